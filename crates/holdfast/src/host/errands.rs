//! What a host does since another one was asked for it: by records, since hosts have no connections for this.
//!
//! ```text
//! errand/HOST/ASKER/ID       (metadata, leased by the asker) what that host is to do; only while it is waited for
//! errand-done/ASKER/ID       (metadata, leased by the host) what became of it
//! ```
//! A host of a release that runs no errands says nothing of the kind in its record, and is asked for none.
//!
//! Role: a thread of its own looks for errands, and each is run by another: two hosts may have some for each other.
//!
//! Faults: an errand whose asker is gone is done all the same. A host that goes leaves its errands undone; the asker looks whether
//! it is there.

use super::control::ControlPlane;
use super::meta::Meta;
use crate::logger;
use crate::protocol::{LinkState, Response};
use anyhow::{Context, Result, anyhow, bail};
use holdfast_format::geometry::Layout;
use holdfast_runtime::meta::Change;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

const PREFIX: &str = "errand/";
const DONE_PREFIX: &str = "errand-done/";

/// How long a host may take to say whether it could serve a volume.
const QUESTION_MAX: Duration = Duration::from_secs(3);

/// How long a hand-over may take at the host that is asked for it: longer than that host waits for the other.
const HANDOVER_MAX: Duration = Duration::from_secs(60);

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
}

#[derive(Debug, Serialize, Deserialize)]
struct Done {
    /// Why it was not done.
    #[serde(default)]
    error: Option<String>,
}

impl ControlPlane {
    /// Has another host do something. The outer error is that nobody knows what became of it.
    fn send_errand(&self, host: &str, errand: &Errand, patience: Duration) -> Result<Result<()>> {
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
        Ok(done.error.map_or(Ok(()), |error| Err(anyhow!(error))))
    }

    fn await_done(&self, host: &str, key: &str, patience: Duration) -> Result<Done> {
        let end = Instant::now() + patience;
        let mut looked = Instant::now();
        loop {
            if let Some(done) = self.presence.read(key)? {
                return serde_json::from_slice(&done).with_context(|| format!("record {key} is damaged"));
            }
            if Instant::now() >= end {
                bail!(
                    "host {host} was asked, and does not answer within {} s; see whether it hangs",
                    patience.as_secs()
                );
            }
            if looked.elapsed() >= PAUSE {
                looked = Instant::now();
                if !self.records.view(|view| view.has_host(host)) {
                    bail!("host {host} was asked, and is gone");
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
            false => self.send_errand(&owner, &errand, HANDOVER_MAX).and_then(|done| done),
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
            .with_context(|| format!("host {host} could not take volume {volume} over, which stays where it is"))
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
            bail!(
                "{host} does not reach node {}, which the host does that serves it, and its layout bears {few}; see `holdfast \
                 status` there",
                missed.join(", ")
            );
        }
        Ok(())
    }

    fn run(&self, errand: Errand) -> Result<()> {
        match errand {
            Errand::HandOver { volume, to } => {
                let _alone = self.alone();
                self.records.sync()?;
                let _hold = self.hold(&volume)?;
                let entry = self.catalog.find(&volume)?;
                self.catalog.check_not_elsewhere(&entry)?;
                self.hand_over(&volume, &to).map(drop)
            }
            Errand::CanServe { volume, nodes } => self.could_serve(&volume, &nodes),
        }
    }

    /// Runs one errand on a thread of its own.
    fn begin_errand(self: &Arc<Self>, key: &str, bytes: &[u8]) {
        let own = format!("{PREFIX}{}/", self.catalog.host());
        let Some((asker, id)) = key.strip_prefix(&own).and_then(|rest| rest.split_once('/')) else { return };
        let done_key = format!("{DONE_PREFIX}{asker}/{id}");
        let plane = Arc::clone(self);
        let errand = serde_json::from_slice::<Errand>(bytes);
        let run = move || {
            let done = match errand {
                Ok(errand) => plane.run(errand),
                Err(_) => Err(anyhow!("host {} is of a release that knows no such errand", plane.catalog.host())),
            };
            let done = Done { error: done.err().map(|error| format!("{error:#}")) };
            let done = serde_json::to_vec(&done).expect("our records always encode");
            // Where that fails the asker hears nothing, and says so.
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
