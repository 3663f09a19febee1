//! All that can be asked for.

use crate::answer::{
    Alerts, Answer, Created, Done, Explained, Leaving, Machines, Names, Nodes, Slow, Snapshots, Space, Tasks, Told,
    Trash, Volumes,
};
use crate::bodies::{
    AnnouncementBody, ClassBody, ClientsBody, CloneBody, CommandBody, DeleteQuery, DeviceQuery, DrainBody, ExportBody,
    FilterBody, ForceQuery, HandoverBody, ProtectBody, RekeyBody, RemoveQuery, RenameBody, ReplaceBody, ResizeBody,
    RestoreBody, RoomQuery, ScheduleBody, SharingCreateBody, SnapshotBody, SnapshotGroupBody, VolumeCreateBody,
    VolumeSetBody,
};
use crate::endpoint::Endpoint;
use crate::given::{Fields, Nothing, Object, Path};
use crate::words::{DevicePath, Layout};
use axum::http::Method;
use holdfast_api::{Error, HostStatus, QosInfo, Request, RoomInfo, VolumeInfo};
use serde::de::DeserializeOwned;
use utoipa::{IntoParams, ToSchema};

type Built = Result<Request, Error>;

/// Each entry once; paths are in the order of the description.
pub fn all() -> Vec<Endpoint> {
    let parts = [grid(), volumes(), service(), snapshots(), trash(), devices()];
    parts.into_iter().flatten().collect()
}

fn volume(path: &Path) -> String {
    path.text("volume")
}

fn with_body<B, A>(
    method: Method,
    path: &'static str,
    summary: &'static str,
    build: impl Fn(&Path, B) -> Built + Send + Sync + 'static,
) -> Endpoint
where
    B: DeserializeOwned + ToSchema,
    A: Answer,
{
    Endpoint::new::<Nothing, Object<B>, A>(method, path, summary, move |at, _, Object(body)| build(at, body))
}

fn act<A: Answer>(
    method: Method,
    path: &'static str,
    summary: &'static str,
    build: impl Fn(&Path) -> Built + Send + Sync + 'static,
) -> Endpoint {
    Endpoint::new::<Nothing, Nothing, A>(method, path, summary, move |at, _, _| build(at))
}

fn delete<Q, A>(
    path: &'static str,
    summary: &'static str,
    build: impl Fn(&Path, Q) -> Built + Send + Sync + 'static,
) -> Endpoint
where
    Q: DeserializeOwned + IntoParams,
    A: Answer,
{
    Endpoint::new::<Fields<Q>, Nothing, A>(Method::DELETE, path, summary, move |at, Fields(query), _| build(at, query))
}

fn grid() -> Vec<Endpoint> {
    vec![
        act::<HostStatus>(Method::GET, "/v1/status", "The host with what it knows of the grid, from memory", |_| {
            Ok(Request::Status)
        }),
        with_body::<CommandBody, Told>(
            Method::POST,
            "/v1/requests",
            "A request of the command line, for a host of the same release; programs go by the other resources",
            |_, body| body.request(),
        ),
        act::<Tasks>(Method::GET, "/v1/tasks", "What all hosts do in the background", |_| Ok(Request::Tasks)),
        act::<Space>(Method::GET, "/v1/space", "What open volumes hold, at all hosts", |_| Ok(Request::GridSpace)),
        act::<Alerts>(Method::POST, "/v1/alerts/test", "Sends a test alert by each way that this host has", |_| {
            Ok(Request::AlertsTest)
        }),
        Endpoint::new::<Fields<RoomQuery>, Nothing, RoomInfo>(
            Method::GET,
            "/v1/room",
            "What there is room for in a layout, and which layout new volumes get",
            |_, Fields(RoomQuery { layout }), _| {
                Ok(Request::Room { layout: layout.map(|Layout(layout)| layout.to_string()) })
            },
        ),
        act::<QosInfo>(Method::GET, "/v1/qos", "Which floors are promised, and of what", |_| Ok(Request::Qos)),
        act::<Machines>(Method::GET, "/v1/machines", "Machines of the grid", |_| Ok(Request::Machines)),
        with_body::<AnnouncementBody, Done>(
            Method::PUT,
            "/v1/machines/{machine}/announcement",
            "Says that a machine will be away for a while: what comes of that nobody is told",
            |at, body| Ok(body.request(at.text("machine"))),
        ),
        act::<Done>(
            Method::DELETE,
            "/v1/machines/{machine}/announcement",
            "Says that a machine which was to be away is back",
            |at| Ok(Request::MachineAnnounce { name: at.text("machine"), seconds: None }),
        ),
        delete::<RemoveQuery, Leaving>(
            "/v1/machines/{machine}",
            "Has a machine leave the grid for good; ask again until it waits for nothing",
            |at, RemoveQuery { dead, accept_loss }| {
                Ok(Request::MachineRemove { name: at.text("machine"), dead, accept_loss })
            },
        ),
    ]
}

fn volumes() -> Vec<Endpoint> {
    vec![
        act::<Volumes>(Method::GET, "/v1/volumes", "All volumes of the grid", |_| Ok(Request::VolumeList)),
        with_body::<VolumeCreateBody, Created<VolumeInfo>>(Method::POST, "/v1/volumes", "Makes a volume", |_, body| {
            Ok(body.request())
        }),
        act::<VolumeInfo>(Method::GET, "/v1/volumes/{volume}", "One volume, with its counters", |at| {
            Ok(Request::VolumeLive { name: volume(at) })
        }),
        with_body::<VolumeSetBody, VolumeInfo>(
            Method::PATCH,
            "/v1/volumes/{volume}",
            "Changes how a volume is kept, while it is used",
            |at, body| Ok(body.request(volume(at))),
        ),
        delete::<DeleteQuery, Done>(
            "/v1/volumes/{volume}",
            "Deletes a volume: it goes into the trash for a day",
            |at, DeleteQuery { force, now }| Ok(Request::VolumeDelete { name: volume(at), force, now }),
        ),
        act::<Explained>(
            Method::GET,
            "/v1/volumes/{volume}/parts",
            "What a volume consists of, down to devices",
            |at| Ok(Request::VolumeExplain { name: volume(at) }),
        ),
        act::<Slow>(Method::GET, "/v1/volumes/{volume}/slow", "Where the time of a volume's requests goes", |at| {
            Ok(Request::VolumeSlow { name: volume(at) })
        }),
        with_body::<ResizeBody, VolumeInfo>(
            Method::POST,
            "/v1/volumes/{volume}/resize",
            "Changes a volume's size",
            |at, ResizeBody { size_bytes, shrink, force }| {
                Ok(Request::VolumeResize { name: volume(at), size_bytes: size_bytes.0, shrink, force })
            },
        ),
        with_body::<RenameBody, VolumeInfo>(
            Method::POST,
            "/v1/volumes/{volume}/rename",
            "Gives a volume another name",
            |at, body| Ok(Request::VolumeRename { name: volume(at), new: body.name.0 }),
        ),
        with_body::<ProtectBody, VolumeInfo>(
            Method::POST,
            "/v1/volumes/{volume}/protect",
            "Has a volume deleted by nobody, until that is taken back",
            |at, body| Ok(Request::VolumeProtect { name: volume(at), protected: body.protected }),
        ),
        with_body::<RekeyBody, VolumeInfo>(
            Method::POST,
            "/v1/volumes/{volume}/rekey",
            "Wraps the key of an encrypted volume anew",
            |at, body| Ok(body.request(volume(at))),
        ),
        with_body::<SharingCreateBody, Created<VolumeInfo>>(
            Method::POST,
            "/v1/sharing",
            "Makes a sharing domain",
            |_, body| Ok(body.request()),
        ),
    ]
}

fn service() -> Vec<Endpoint> {
    vec![
        with_body::<ExportBody, VolumeInfo>(
            Method::POST,
            "/v1/volumes/{volume}/export",
            "Offers a volume to clients, now and after every start",
            |at, body| Ok(body.request(volume(at))),
        ),
        delete::<ForceQuery, VolumeInfo>(
            "/v1/volumes/{volume}/export",
            "Takes a volume out of service; its data stays",
            |at, ForceQuery { force }| Ok(Request::VolumeUnexport { name: volume(at), force }),
        ),
        with_body::<HandoverBody, VolumeInfo>(
            Method::POST,
            "/v1/volumes/{volume}/handover",
            "Has another host serve a volume, while clients use it",
            |at, body| Ok(Request::VolumeHandover { name: volume(at), to: body.to.0 }),
        ),
        with_body::<ClientsBody, VolumeInfo>(
            Method::POST,
            "/v1/volumes/{volume}/clients",
            "Says whom a volume is for",
            |at, body| body.request(volume(at)),
        ),
        with_body::<ScheduleBody, Done>(
            Method::PUT,
            "/v1/volumes/{volume}/schedule",
            "Has snapshots taken by schedule",
            |at, body| Ok(body.request(volume(at))),
        ),
        act::<Done>(Method::DELETE, "/v1/volumes/{volume}/schedule", "No snapshots by schedule any more", |at| {
            Ok(Request::VolumeSchedule { name: volume(at), schedule: None })
        }),
        with_body::<FilterBody, VolumeInfo>(
            Method::POST,
            "/v1/volumes/{volume}/filters",
            "Puts a filter before a volume in service",
            |at, body| Ok(Request::VolumeFilterAdd { name: volume(at), spec: body.spec.0 }),
        ),
        act::<VolumeInfo>(Method::DELETE, "/v1/volumes/{volume}/filters", "Takes all filters away", |at| {
            Ok(Request::VolumeFilterRemove { name: volume(at), filter: None })
        }),
        act::<VolumeInfo>(Method::DELETE, "/v1/volumes/{volume}/filters/{filter}", "Takes one filter away", |at| {
            Ok(Request::VolumeFilterRemove { name: volume(at), filter: Some(at.number("filter")?) })
        }),
    ]
}

fn snapshots() -> Vec<Endpoint> {
    let one = |at: &Path| (volume(at), at.text("snapshot"));
    vec![
        act::<Snapshots>(Method::GET, "/v1/volumes/{volume}/snapshots", "Snapshots of a volume in service", |at| {
            Ok(Request::VolumeLive { name: volume(at) })
        }),
        with_body::<SnapshotBody, Created<VolumeInfo>>(
            Method::POST,
            "/v1/volumes/{volume}/snapshots",
            "Takes a snapshot",
            |at, SnapshotBody { name }| Ok(Request::SnapshotCreate { volume: volume(at), name: name.0 }),
        ),
        act::<Done>(Method::DELETE, "/v1/volumes/{volume}/snapshots/{snapshot}", "Deletes a snapshot", move |at| {
            let (volume, name) = one(at);
            Ok(Request::SnapshotDelete { volume, name })
        }),
        act::<VolumeInfo>(
            Method::POST,
            "/v1/volumes/{volume}/snapshots/{snapshot}/rollback",
            "Makes a volume what its snapshot is",
            move |at| {
                let (volume, name) = one(at);
                Ok(Request::SnapshotRollback { volume, name })
            },
        ),
        with_body::<CloneBody, Created<VolumeInfo>>(
            Method::POST,
            "/v1/volumes/{volume}/snapshots/{snapshot}/clone",
            "Makes a writable clone of a snapshot",
            move |at, body| {
                let (volume, snapshot) = one(at);
                Ok(body.request(&volume, &snapshot))
            },
        ),
        with_body::<SnapshotGroupBody, Created<Volumes>>(
            Method::POST,
            "/v1/snapshot-groups",
            "Takes consistent snapshots of several volumes, of all or of none",
            |_, body| body.request(),
        ),
    ]
}

fn trash() -> Vec<Endpoint> {
    vec![
        act::<Trash>(Method::GET, "/v1/trash", "What was deleted and can be had back", |_| Ok(Request::TrashList)),
        act::<Names>(Method::DELETE, "/v1/trash", "Returns the space of all that was deleted", |_| {
            Ok(Request::TrashEmpty { volume: None })
        }),
        act::<Names>(Method::DELETE, "/v1/trash/{volume}", "Returns the space of one, by its name or id", |at| {
            Ok(Request::TrashEmpty { volume: Some(volume(at)) })
        }),
        with_body::<RestoreBody, VolumeInfo>(
            Method::POST,
            "/v1/trash/{volume}/restore",
            "Has a deleted volume back",
            |at, body| Ok(Request::TrashRestore { volume: volume(at), name: body.name.map(|name| name.0) }),
        ),
    ]
}

fn devices() -> Vec<Endpoint> {
    vec![
        act::<Nodes>(Method::GET, "/v1/nodes", "Nodes, with their devices", |_| Ok(Request::Status)),
        with_body::<DrainBody, Done>(
            Method::POST,
            "/v1/devices/{device}/drain",
            "Empties a device, or lets it take data again",
            |at, DrainBody { cancel, force }| Ok(Request::Drain { devices: vec![at.text("device")], cancel, force }),
        ),
        with_body::<ReplaceBody, Done>(
            Method::POST,
            "/v1/devices/{device}/replace",
            "Gives a device's place to another, at the host of its machine: that is taken in, this one emptied",
            |at, ReplaceBody { path, force }| {
                Ok(Request::DeviceReplace { device: at.text("device"), path: path.map(|DevicePath(path)| path), force })
            },
        ),
        delete::<DeviceQuery, Leaving>(
            "/v1/devices/{device}",
            "Takes a device out that was emptied, at the host of its machine",
            |at, DeviceQuery { force }| Ok(Request::DeviceRemove { device: at.text("device"), force }),
        ),
        with_body::<ClassBody, Done>(
            Method::PUT,
            "/v1/devices/{device}/class",
            "Says what a device is made of",
            |at, body| Ok(body.request(at.text("device"))),
        ),
        act::<Done>(Method::POST, "/v1/nodes/{node}/cut", "Cuts the links to a node, for drills", |at| {
            Ok(Request::NodeCut { node: at.number("node")? })
        }),
        act::<Done>(Method::POST, "/v1/nodes/{node}/mend", "Mends the links to a node", |at| {
            Ok(Request::NodeMend { node: at.number("node")? })
        }),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn each_path_and_method_is_there_once() {
        let all = all();
        let once: BTreeSet<String> = all.iter().map(|of| format!("{} {}", of.method, of.path)).collect();
        assert_eq!(once.len(), all.len());
        assert!(all.iter().all(|of| of.path.starts_with("/v1/")));
    }

    #[test]
    fn what_is_given_becomes_the_request_that_the_command_line_makes() {
        let build = |method: Method, path: &str, parts: &[(&str, &str)], query: &str, body: &str| {
            let all = all();
            let found = all.iter().find(|of| of.method == method && of.path == path).expect("it is there");
            let parts = parts.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
            found.request(&Path::new(parts), query, body.as_bytes())
        };
        let one = [("volume", "vm 1")];
        let name = "vm 1".to_string();
        let deleted = build(Method::DELETE, "/v1/volumes/{volume}", &one, "now=true", "").unwrap();
        assert_eq!(deleted, Request::VolumeDelete { name: name.clone(), force: false, now: true });
        let renamed = build(Method::POST, "/v1/volumes/{volume}/rename", &one, "", r#"{"name":"web"}"#).unwrap();
        assert_eq!(renamed, Request::VolumeRename { name: name.clone(), new: "web".to_string() });
        for (query, body) in [("", r#"{"nane":"web"}"#), ("", ""), ("force=1", r#"{"name":"web"}"#), ("", "[]")] {
            let refused = build(Method::POST, "/v1/volumes/{volume}/rename", &one, query, body).unwrap_err();
            assert_eq!(refused.code, holdfast_api::Code::Invalid, "{query} {body}: {refused}");
        }
        let refused = build(Method::DELETE, "/v1/volumes/{volume}", &one, "now=perhaps", "").unwrap_err();
        assert_eq!(refused.code, holdfast_api::Code::Invalid);
        let cut = [("node", "seven")];
        assert!(build(Method::POST, "/v1/nodes/{node}/cut", &cut, "", "").is_err());
    }
}
