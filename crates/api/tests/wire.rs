//! What goes between hosts and those that ask them, as each release wrote it: an older or newer one on the other side reads it.

use holdfast_api::{
    Code, DeviceHealth, DeviceInfo, DeviceState, GridStatus, HostState, Integrity, Kind, LinkState, NodeInfo,
    NodeState, PackingInfo, Provisioning, Request, Response, TaskKind, TaskUnit, VolumeInfo, VolumeState,
};
use serde_json::{Value, json};

fn read<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).expect("it is read")
}

#[test]
fn requests_are_written_as_ever() {
    let golden = [
        (json!({"op": "status"}), Kind::Look),
        (json!({"op": "volume-show", "name": "vm"}), Kind::Look),
        (json!({"op": "room"}), Kind::Look),
        (json!({"op": "room", "layout": "mirror:2"}), Kind::Look),
        (json!({"op": "check-stop", "node": 3}), Kind::Check),
        (json!({"op": "volume-delete", "name": "vm", "force": false}), Kind::Change),
        (json!({"op": "volume-handover", "name": "vm", "to": "b"}), Kind::Change),
        (json!({"op": "snapshot-group", "volumes": ["a", "b"], "name": "s"}), Kind::Change),
        (json!({"op": "drain", "devices": ["2/0"], "cancel": false, "force": false}), Kind::Change),
        (json!({"op": "node-cut", "node": 1}), Kind::Act),
    ];
    for (golden, kind) in golden {
        let request: Request = read(golden.clone());
        assert_eq!(serde_json::to_value(&request).unwrap(), golden);
        assert_eq!(request.kind(), kind, "{golden}");
    }
    let unknown = json!({"op": "volume-show", "name": "vm", "colour": "red"});
    assert!(serde_json::from_value::<Request>(unknown).is_err(), "what a host does not know it does not ignore");
}

/// As the first release with this crate wrote it, without what has a default.
fn volume() -> Value {
    json!({
        "name": "vm", "id": "00000000-0000-0000-0000-000000000007", "size_bytes": 1 << 30, "layout": "mirror-3",
        "exported": true, "state": "open", "epoch": 3, "uris": ["nbd+unix:///vm"], "sessions": 1,
    })
}

#[test]
fn answers_of_older_hosts_are_read() {
    let info: VolumeInfo = read(volume());
    assert_eq!(
        (info.state, info.provisioning, info.integrity),
        (VolumeState::Open, Provisioning::Other, Integrity::Other)
    );
    let mut told = volume();
    told["provisioning"] = json!("fixed");
    told["integrity"] = json!("on");
    let info: VolumeInfo = read(told);
    assert_eq!((info.provisioning, info.integrity), (Provisioning::Fixed, Integrity::On));
    let written = serde_json::to_value(&info).unwrap();
    assert_eq!((&written["provisioning"], &written["integrity"]), (&json!("fixed"), &json!("on")));

    for (older, state) in [("portal", VolumeState::Forwarding), ("warming", VolumeState::Preloading)] {
        let mut told = volume();
        (told["state"], told["portals"]) = (json!(older), json!(["a", "b"]));
        let info: VolumeInfo = read(told);
        assert_eq!((info.state, info.offered_by), (state, vec!["a".to_string(), "b".to_string()]));
    }

    let without_code: Response = read(json!({"reply": "error", "message": "no"}));
    assert_eq!(without_code, Response::Error { message: "no".to_string(), code: Code::Failed });
    let tasks: Response = read(json!({
        "reply": "tasks", "tasks": [{"name": "rebuild volume vm", "left": 7, "unit": "segments", "per_second": 0.5}],
    }));
    let Response::Tasks { tasks, silent } = tasks else { panic!("{tasks:?}") };
    assert_eq!((tasks[0].kind, tasks[0].unit, silent.len()), (TaskKind::Other, TaskUnit::Segments, 0));
}

/// By `/v1/health`, which the command line reads from elsewhere, too.
#[test]
fn lists_that_are_empty_are_left_out_and_read() {
    let packing = serde_json::to_value(PackingInfo::default()).unwrap();
    let host = json!({
        "state": "up", "pid": 7, "cpu_ms": 1, "packing_cpu_ms": 0, "packing": packing, "resident_bytes": 1, "crossings": 0,
    });
    let mut golden = json!({
        "grid": "g", "dir": "/d", "host": host, "metadata": {"store": "embedded"}, "tls": true, "clock_ms": 1,
        "days_to_full": null, "nodes": [], "volumes": [], "deleting": [], "trash": [], "unreadable": [], "found": [],
    });
    for _ in 0..2 {
        let status: GridStatus = read(golden.clone());
        assert_eq!(serde_json::to_value(&status).unwrap(), golden);
        golden["alert_troubles"] = json!([{"way": "mail by m", "why": "it is away", "waiting": 1, "dropped": 0}]);
        golden["certificate_warnings"] = json!(["it ends"]);
    }
}

fn device(health: &str) -> Value {
    json!({
        "device": "d", "health": health, "capacity_bytes": 100, "free_bytes": 50, "journal_bytes": 8,
        "journal_used_bytes": 1, "shards": 2,
    })
}

#[test]
fn states_of_nodes_and_devices_follow_from_what_is_told() {
    let state = |value: Value| read::<DeviceInfo>(value).state();
    let with = |health: &str, key: &str, value: Value| {
        let mut told = device(health);
        told[key] = value;
        told
    };
    let outage = |missing| json!({"seconds": 5, "why": "gone", "missing": missing, "tried": true});
    assert_eq!(state(device("opening")), DeviceState::Opening);
    assert_eq!(state(device("serving")), DeviceState::Serving);
    assert_eq!(state(device("failed")), DeviceState::Failed);
    assert_eq!(state(with("failed", "outage", outage(false))), DeviceState::Failed);
    assert_eq!(state(with("failed", "outage", outage(true))), DeviceState::Missing);
    assert_eq!(state(with("serving", "slow_s", json!(9))), DeviceState::Slow);
    let mut errors = with("serving", "slow_s", json!(9));
    (errors["io_errors"], errors["errors_within_s"]) = (json!(3), json!(10));
    assert_eq!(state(errors), DeviceState::Failing, "a device with errors is not called slow");
    let newer: DeviceInfo = read(device("shy"));
    assert_eq!((newer.health, newer.state()), (DeviceHealth::Other, DeviceState::Other));

    let node = |link: &str, suspect: bool, cut: bool| {
        let told = json!({
            "id": 1, "address": "127.0.0.1:1", "link": link, "suspect": suspect, "cut": cut, "silent_ms": 0, "devices": [],
        });
        read::<NodeInfo>(told).state()
    };
    assert_eq!(node("up", false, false), NodeState::Up);
    assert_eq!(node("up", true, false), NodeState::Suspect);
    assert_eq!(node("silent", true, false), NodeState::Hung);
    assert_eq!(node("down", false, false), NodeState::Down);
    assert_eq!(node("up", false, true), NodeState::Cut);
    assert_eq!(node("dreaming", false, false), NodeState::Other);
}

#[test]
fn each_text_is_of_one_value_and_unknown_ones_are_of_the_last() {
    fn check<T: Copy + PartialEq + std::fmt::Debug + From<String>>(all: &[T], text: fn(T) -> &'static str) {
        for value in all {
            assert_eq!(T::from(text(*value).to_string()), *value);
        }
        assert_eq!(Some(&T::from("what nobody knows".to_string())), all.last());
    }
    check(Code::ALL, Code::text);
    check(VolumeState::ALL, VolumeState::text);
    check(Provisioning::ALL, Provisioning::text);
    check(Integrity::ALL, Integrity::text);
    check(LinkState::ALL, LinkState::text);
    check(NodeState::ALL, NodeState::text);
    check(HostState::ALL, HostState::text);
    check(DeviceHealth::ALL, DeviceHealth::text);
    check(DeviceState::ALL, DeviceState::text);
    check(TaskKind::ALL, TaskKind::text);
    check(TaskUnit::ALL, TaskUnit::text);
}
