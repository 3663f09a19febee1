//! What a host does since another one was asked for it: by records, since hosts have no connections for this.
//!
//! ```text
//! errand/HOST/FROM/ID        (metadata, leased by the requester) what that host is to do; only while it is waited for
//! errand-done/FROM/ID        (metadata, leased by the host) what became of it
//! ```
//! A host of a release that runs no errands says nothing of the kind in its record, and is asked for none.
//!
//! Role: a thread of its own looks for errands, and each is run by another: two hosts may have some for each other.
//!
//! Faults: an errand whose requester is gone is done all the same. A host that goes leaves its errands undone; the
//! requester looks whether it is there.

use super::control::ControlPlane;
use super::meta::Meta;
use crate::logger;
use crate::protocol::{self, code_of};
use anyhow::{Context, Result, anyhow};
use holdfast_api::{Code, Error, Kind, LinkState, Request, Response, TaskInfo, VolumeSpace, refuse};
use holdfast_base::NodeId;
use holdfast_cluster::View;
use holdfast_format::geometry::Layout;
use holdfast_host::split_export;
use holdfast_runtime::meta::Change;
use holdfast_verdict::resources;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

const PREFIX: &str = "errand/";
const DONE_PREFIX: &str = "errand-done/";

/// How long a host may take to say whether it could serve a volume.
const QUESTION_MAX: Duration = Duration::from_secs(3);

/// How long a hand-over may take at the host that is asked for it: longer than that host waits for the other.
const HANDOVER_MAX: Duration = Duration::from_secs(60);

/// How long a command may take at the host that has the volume: a little less than the command line waits.
const REQUEST_MAX: Duration = Duration::from_secs(140);

const LOOK_PACE: Duration = Duration::from_millis(30);

/// How long one look waits for errands.
const LOOK_MAX: Duration = Duration::from_secs(5);

/// Pause before the store is asked again that did not answer.
const PAUSE: Duration = Duration::from_millis(500);

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "errand", rename_all = "kebab-case")]
pub(super) enum Errand {
    /// Hand a volume over that the host serves.
    HandOver { volume: String, to: String },
    /// Say why the host could not serve a volume, whose owner reaches these nodes.
    CanServe { volume: String, nodes: BTreeSet<u32> },
    /// Carry a command out, about a volume that the host has in service.
    Request { request: Box<Request> },
    /// Tell what goes on and what open volumes hold: [`HostReport`].
    Tell,
    /// Tell what volumes would lose without these nodes, as a list of weaknesses.
    Losses { nodes: BTreeSet<u32> },
    /// Tell what is left on devices that are to be empty.
    Left,
    /// Have a machine leave the grid: of the host that signs.
    RemoveMachine { name: String, dead: bool, accept_loss: bool },
    /// Sign new certificates for the requester's machine: of a host that signs.
    Renew { renewal: Value },
    /// The same for its server of NBD.
    RenewServer { renewal: Value },
    /// Go on with a session of TLS, by which the key of the grid's authority may come; what is said back is what is told.
    Secured { session: String, bytes: String },
}

/// What goes on at one host.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct HostReport {
    pub tasks: Vec<TaskInfo>,
    pub volumes: Vec<VolumeSpace>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Done {
    /// Why it was not done.
    #[serde(default)]
    error: Option<String>,
    /// What kind of thing stood in the way; older hosts say none.
    #[serde(default)]
    code: Code,
    /// What was asked for.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    told: Value,
}

/// Of what a clone is made by the host that has that in service. One that is to be put into service counts at the machine
/// that is asked.
fn cloned_there(request: &Request) -> Option<&str> {
    match request {
        Request::VolumeClone { source, separate, export, .. } if !(*separate && *export) => Some(source),
        _ => None,
    }
}

impl ControlPlane {
    /// Has another host do something; gives what it tells. The outer error is that nobody knows what became of it.
    pub(super) fn send_errand(&self, host: &str, errand: &Errand, patience: Duration) -> Result<Result<Value>> {
        let id = uuid::Uuid::new_v4();
        let key = format!("{PREFIX}{host}/{}/{id}", self.catalog.host());
        let done_key = format!("{DONE_PREFIX}{}/{id}", self.catalog.host());
        let errand = serde_json::to_vec(errand).expect("our records always encode");
        self.presence.keep(&key, Some(&errand))?;
        let done = self.await_done(host, &done_key, patience);
        // What stays ends with the leases.
        let _ = self.presence.keep(&key, None);
        let _ = self.presence.keep(&done_key, None);
        let done = done?;
        let (told, code) = (done.told, done.code);
        Ok(done.error.map_or(Ok(told), |error| Err(Error::new(code, error).into())))
    }

    fn await_done(&self, host: &str, key: &str, patience: Duration) -> Result<Done> {
        let end = Instant::now() + patience;
        let mut looked = Instant::now();
        loop {
            if let Some(done) = self.presence.read(key)? {
                return serde_json::from_slice(&done).with_context(|| format!("record {key} is damaged"));
            }
            if Instant::now() >= end {
                refuse!(
                    Code::Unavailable,
                    "host {host} was asked, and does not answer within {} s; see whether it hangs",
                    patience.as_secs()
                );
            }
            if looked.elapsed() >= PAUSE {
                looked = Instant::now();
                if !self.records.view(|view| view.has_host(host)) {
                    refuse!(Code::Unavailable, "host {host} was asked, and is gone");
                }
            }
            std::thread::sleep(LOOK_PACE);
        }
    }

    /// Has the owner of a volume hand it over, where that is another host; `None` where this one is to do it, or to say why not.
    pub(super) fn pass_handover_on(&self, name: &str, to: &str) -> Option<Result<Response>> {
        let entry = self.catalog.find(name).ok()?;
        let owner = entry.served_by.clone().filter(|owner| owner != self.catalog.host())?;
        if entry.clone.is_some() || !self.presence.runs_errands(&owner).unwrap_or(false) {
            return None;
        }
        let errand = Errand::HandOver { volume: name.to_string(), to: to.to_string() };
        let handed = match to == owner {
            true => Ok(()),
            false => self.send_errand(&owner, &errand, HANDOVER_MAX).and_then(|done| done.map(drop)),
        };
        Some(handed.and_then(|()| self.show(name)).map(Response::from))
    }

    /// Asks a host whether it could serve a volume of this one. One of an earlier release isn't asked.
    pub(super) fn check_could_serve(&self, volume: &str, host: &str) -> Result<()> {
        if !self.presence.runs_errands(host)? {
            return Ok(());
        }
        let live = self.live()?;
        let nodes = live.nodes.iter().filter(|node| node.link == LinkState::Up).map(|node| node.id).collect();
        let errand = Errand::CanServe { volume: volume.to_string(), nodes };
        self.send_errand(host, &errand, QUESTION_MAX)?
            .map(drop)
            .with_context(|| format!("host {host} could not take volume {volume} over, which stays where it is"))
    }

    /// Has the host do it that has the volume in service, where that is another one; `None` where this one is to do
    /// it, or to say why not.
    pub(super) fn pass_on(&self, request: &Request) -> Option<Response> {
        let owner = |name: &String| self.catalog.find(name).ok()?.served_by;
        let owners: BTreeSet<Option<String>> = match (cloned_there(request), request) {
            (Some(source), _) => BTreeSet::from([owner(&split_export(source).0.to_string())]),
            // What is offered here, too, ends to be so.
            (None, Request::VolumeUnexport { name, .. })
                if self.catalog.find(name).is_ok_and(|e| self.catalog.is_offered(&e)) =>
            {
                return None;
            }
            (None, other) => other.passed_on().iter().map(owner).collect(),
        };
        let mut owners = owners.into_iter();
        let (Some(Some(owner)), None) = (owners.next(), owners.next()) else { return None };
        if owner == *self.catalog.host() || !self.records.view(|view| takes_requests(view, &owner)) {
            return None;
        }
        let errand = Errand::Request { request: Box::new(request.clone()) };
        let patience = if request.kind() == Kind::Look { QUESTION_MAX } else { REQUEST_MAX };
        let done = self.send_errand(&owner, &errand, patience).and_then(|done| done);
        let response =
            done.and_then(|told| serde_json::from_value(told).context("the answer of that host makes no sense"));
        Some(response.unwrap_or_else(|error| protocol::failure(&error)))
    }

    /// What all other hosts tell, and those that don't: all, where the store is silent by which they would.
    pub(super) fn reports_of_others(&self) -> (BTreeMap<String, HostReport>, Vec<String>) {
        let hosts = match self.store_is_right().then(|| self.presence.hosts_that_run_errands()) {
            Some(Ok(hosts)) => hosts,
            Some(Err(_)) | None => {
                let others = self.hosts_there().into_iter().filter(|host| host != self.catalog.host());
                return (BTreeMap::new(), others.collect());
            }
        };
        let tell = |host: &String| -> Result<HostReport> {
            Ok(serde_json::from_value(self.send_errand(host, &Errand::Tell, QUESTION_MAX)??)?)
        };
        // All at a time: one that hangs costs no more than that.
        let heard: Vec<(String, Result<HostReport>)> = std::thread::scope(|scope| {
            let asked: Vec<_> = hosts.iter().map(|host| (host, scope.spawn(move || tell(host)))).collect();
            let heard = |(host, thread): (&String, std::thread::ScopedJoinHandle<'_, Result<HostReport>>)| {
                (host.clone(), thread.join().unwrap_or_else(|_| Err(anyhow!("it could not be asked"))))
            };
            asked.into_iter().map(heard).collect()
        });
        let silent = heard.iter().filter(|(_, told)| told.is_err()).map(|(host, _)| host.clone()).collect();
        (heard.into_iter().filter_map(|(host, told)| Some((host, told.ok()?))).collect(), silent)
    }

    fn could_serve(&self, volume: &str, nodes: &BTreeSet<u32>) -> Result<()> {
        self.records.sync()?;
        let entry = self.catalog.find(volume)?;
        self.keys.spec_of(&entry)?;
        let live = self.live()?;
        let reached: BTreeSet<u32> =
            live.nodes.iter().filter(|node| node.link != LinkState::Down).map(|node| node.id).collect();
        let missed: Vec<String> = nodes.difference(&reached).map(u32::to_string).collect();
        let layout = entry.root.layout;
        let is_missed = match layout.is_on_devices() {
            true => nodes.is_disjoint(&reached),
            false => missed.len() > usize::from(layout.failures()),
        };
        if !nodes.is_empty() && is_missed {
            let (host, few) = (self.catalog.host(), allowed(layout));
            refuse!(
                Code::Redundancy,
                "{host} does not reach node {}, which the host does that serves it, and its layout bears {few}; see `holdfast \
                 status` there",
                missed.join(", ")
            );
        }
        Ok(())
    }

    fn run(&self, errand: Errand) -> Result<Value> {
        let value = |told: serde_json::Result<Value>| told.context("the answer can't be written");
        match errand {
            Errand::Request { request } => {
                let is_passed = |request: &Request| !request.passed_on().is_empty() || cloned_there(request).is_some();
                match is_passed(&request) {
                    true => value(serde_json::to_value(self.respond_here(*request))),
                    false => {
                        refuse!(Code::NotPermitted, "this is none of the commands that a host carries out for another")
                    }
                }
            }
            Errand::Tell => {
                let volumes = self.live()?.volumes;
                let volumes = volumes.iter().filter_map(resources::space_of).collect();
                value(serde_json::to_value(HostReport { tasks: self.tasks()?, volumes }))
            }
            Errand::Losses { nodes } => {
                value(serde_json::to_value(self.losses_here(&nodes.into_iter().map(NodeId).collect())?))
            }
            Errand::Left => value(serde_json::to_value(self.left_here()?)),
            Errand::RemoveMachine { name, dead, accept_loss } => {
                let _alone = self.alone();
                value(serde_json::to_value(self.remove_machine(&name, dead, accept_loss)?))
            }
            Errand::HandOver { volume, to } => {
                let _alone = self.alone();
                self.records.sync()?;
                let _hold = self.hold(&volume)?;
                let entry = self.catalog.find(&volume)?;
                self.catalog.check_not_elsewhere(&entry)?;
                self.hand_over(&volume, &to).map(|_| Value::Null)
            }
            Errand::Renew { renewal } => self.renew(renewal),
            Errand::RenewServer { renewal } => self.renew_server(renewal),
            Errand::Secured { session, bytes } => self.on_secured(&session, &bytes),
            Errand::CanServe { volume, nodes } => self.could_serve(&volume, &nodes).map(|()| Value::Null),
        }
    }

    /// Runs one errand on a thread of its own.
    fn begin_errand(self: &Arc<Self>, key: &str, bytes: &[u8]) {
        let own = format!("{PREFIX}{}/", self.catalog.host());
        let Some((requester, id)) = key.strip_prefix(&own).and_then(|rest| rest.split_once('/')) else { return };
        let done_key = format!("{DONE_PREFIX}{requester}/{id}");
        let plane = Arc::clone(self);
        let errand = serde_json::from_slice::<Errand>(bytes);
        let run = move || {
            let done = match errand {
                Ok(errand) => plane.run(errand),
                Err(_) => Err(anyhow!("host {} is of a release that knows no such errand", plane.catalog.host())),
            };
            let done = match done {
                Ok(told) => Done { error: None, code: Code::default(), told },
                Err(error) => Done { error: Some(format!("{error:#}")), code: code_of(&error), told: Value::Null },
            };
            let done = serde_json::to_vec(&done).expect("our records always encode");
            // Where that fails the requester hears nothing, and says so.
            let _ = plane.presence.keep(&done_key, Some(&done));
        };
        if let Err(error) = std::thread::Builder::new().name("errand".to_string()).spawn(run) {
            logger::error(format_args!("no thread for what another host asks for: {error}; check `ulimit -u`"));
        }
    }

    /// Begins what other hosts ask for, until something fails.
    fn run_errands(self: &Arc<Self>, meta: &Meta, begun: &mut BTreeSet<String>) -> Result<std::convert::Infallible> {
        let own = format!("{PREFIX}{}/", self.catalog.host());
        let listed = meta.list(&own)?;
        begun.retain(|key| listed.records.iter().any(|record| record.key == *key));
        for record in &listed.records {
            if begun.insert(record.key.clone()) {
                self.begin_errand(&record.key, &record.value);
            }
        }
        let mut watch = meta.watch(&own, listed.revision.next())?;
        loop {
            for event in watch.next(LOOK_MAX)? {
                match &event.change {
                    Change::Put(record) if begun.insert(event.key.clone()) => {
                        self.begin_errand(&event.key, &record.value);
                    }
                    Change::Put(_) => {}
                    Change::Deleted => drop(begun.remove(&event.key)),
                }
            }
        }
    }
}

fn takes_requests(view: &View, host: &str) -> bool {
    view.hosts().get(host).and_then(Option::as_ref).is_some_and(|record| record.takes_requests)
}

fn allowed(layout: Layout) -> String {
    format!("the loss of {}", layout.failures())
}

pub(super) fn start(plane: Arc<ControlPlane>, meta: Meta) -> Result<()> {
    let run = move || {
        let mut begun = BTreeSet::new();
        loop {
            let Err(_) = plane.run_errands(&meta, &mut begun);
            std::thread::sleep(PAUSE);
        }
    };
    std::thread::Builder::new().name("errands".to_string()).spawn(run).context("no thread for errands")?;
    Ok(())
}
