//! What the control plane plans, as orders of this host, and what comes of them, as the control plane hears it.
//!
//! Role: between [`holdfast_cluster::Cluster`] and [`crate::Host`]. All of it is pure: whoever has both machines, in production or in
//! the simulator, asks here what one's words mean to the other.

use crate::event::{OpenSpec, Order, Outcome};
use crate::offers::{Offer, Place};
use crate::volumes::Volume;
use holdfast_base::{MetaVersion, VolumeId};
use holdfast_cluster::{Action, Changes, Local, Outcome as Came, Reading, View};
use holdfast_format::forward::Answer;
use holdfast_format::meta::ExportRecord;
use holdfast_volume::{PreloadState, State};
use std::collections::{BTreeMap, BTreeSet};

/// How an action of the control plane is carried out.
#[derive(Debug)]
pub enum Way {
    Order(Box<Order>),
    /// One transaction: these records are at these versions, then those are written.
    Commit {
        compares: Vec<(String, MetaVersion)>,
        writes: Vec<(String, Option<Vec<u8>>)>,
    },
}

impl Way {
    /// Nothing where it can't be now: of a volume that is to be opened or read `spec` gives none.
    pub fn of<E>(action: Action, spec: impl FnOnce(VolumeId) -> Result<Option<OpenSpec>, E>) -> Result<Option<Way>, E> {
        let order = match action {
            Action::Open { volume, by } => match spec(volume)? {
                Some(spec) => Order::Open { spec: OpenSpec { guard: Some(by), ..spec }, exported: true },
                None => return Ok(None),
            },
            Action::Read { volume } => match spec(volume)? {
                Some(spec) => Order::Preload { spec },
                None => return Ok(None),
            },
            Action::AskToYield { volume, host } => Order::AskToYield { host, volume },
            Action::LetGo { volume } => Order::LetGo { volume },
            Action::Commit { compares, writes, .. } => return Ok(Some(Way::Commit { compares, writes })),
        };
        Ok(Some(Way::Order(Box::new(order))))
    }
}

/// What came of an action's order.
///
/// # Panics
/// It is the outcome of an order that no action becomes.
pub fn came_of(outcome: Outcome) -> Came {
    match outcome {
        Outcome::Done => Came::Done,
        Outcome::Preload(found) => Came::Reading(match found {
            None => Reading::NoRoom,
            Some(None | Some(PreloadState::Done)) => Reading::Read,
            Some(Some(PreloadState::Unreadable)) => Reading::Unreadable,
            Some(Some(PreloadState::Reading | PreloadState::Applying)) => Reading::Begun,
        }),
        // Whoever refuses has nothing to stop.
        Outcome::Yielded(answer) => Came::Asked(matches!(answer, Some(Answer::Yielded | Answer::Refused(_)))),
        other => panic!("no action becomes an order with such an outcome: {other:?}"),
    }
}

/// What a host does with a volume that it has, for the control plane.
pub fn local_of(volume: &Volume) -> Local {
    match volume.controller().state() {
        State::Opening if volume.controller().is_preloading() => Local::Reading,
        State::Opening if volume.is_exported() => Local::Opening,
        State::Open if volume.is_exported() => Local::Open,
        State::Opening | State::Open => Local::InCare,
        State::Closing | State::Closed | State::Deposed => Local::Ending,
    }
}

/// A volume or clone that is in service somewhere, as the records tell.
#[derive(Clone, Copy, Debug)]
pub struct InService<'a> {
    pub volume: VolumeId,
    /// The clone's own, of a clone.
    pub id: VolumeId,
    pub name: &'a str,
    pub size_bytes: u64,
    pub host: &'a str,
    /// The host that it is handed over by.
    pub from: Option<&'a str>,
    /// Hosts that offer it.
    pub offered_by: &'a BTreeSet<String>,
}

/// What a host offers together with others, and the hosts that it has to reach for that.
pub fn offered<'a>(me: &str, all: impl Iterator<Item = InService<'a>>) -> (Vec<Offer>, BTreeSet<String>) {
    let mut offers: BTreeMap<VolumeId, Offer> = BTreeMap::new();
    let mut reaches = BTreeSet::new();
    for served in all.filter(|served| served.offered_by.contains(me)) {
        // Until a hand-over is done the host that has the volume serves it, and knows itself when it has stopped.
        let place = match served.from.filter(|from| *from != me) {
            Some(from) => Place::At(from.to_string()),
            None if served.host == me => Place::Here,
            None => Place::At(served.host.to_string()),
        };
        let volume = served.volume;
        let offer = offers.entry(volume).or_insert_with(|| Offer { volume, exports: BTreeMap::new(), place });
        offer.exports.insert(served.name.to_string(), (served.id, served.size_bytes));
        reaches.extend(served.from.into_iter().chain([served.host]).map(str::to_string));
        reaches.extend(served.offered_by.iter().cloned());
    }
    reaches.remove(me);
    (offers.into_values().collect(), reaches)
}

/// Hosts, by volume that they serve, which those that this host serves may talk with: stores, which members and those that
/// want to be some talk with; and all of them where a store is here.
pub fn heard_at(me: &str, view: &View) -> BTreeMap<VolumeId, String> {
    let has_store = serves_store(me, view);
    let is_heard = |(volume, export): &(VolumeId, &ExportRecord)| {
        let known = view.volume(*volume).filter(|known| !known.is_gone && export.host != me);
        known.is_some_and(|known| known.is_store || has_store)
    };
    view.exports().filter(is_heard).map(|(volume, export)| (volume, export.host.clone())).collect()
}

fn serves_store(me: &str, view: &View) -> bool {
    let is_store = |volume| view.volume(volume).is_some_and(|known| known.is_store && !known.is_gone);
    view.exports().any(|(volume, export)| export.host == me && is_store(volume))
}

/// Whether what a host offers together with others may have changed since it was told last.
#[derive(Debug)]
pub struct Offering {
    host: String,
    offered: BTreeSet<VolumeId>,
    /// Of [`heard_at`].
    heard: BTreeSet<VolumeId>,
    /// To be set again where telling has failed.
    pub is_stale: bool,
}

impl Offering {
    pub fn new(host: &str) -> Offering {
        Offering { host: host.to_string(), offered: BTreeSet::new(), heard: BTreeSet::new(), is_stale: false }
    }

    pub fn note(&mut self, view: &View, changes: &Changes) {
        let has_store = !changes.volumes.is_empty() && serves_store(&self.host, view);
        for changed in &changes.volumes {
            // A clone that is gone, maybe.
            self.is_stale |= view.volume(*changed).is_none() && !self.offered.is_empty();
            let volume = view.origin_of_clone(*changed).unwrap_or(*changed);
            let is_offered = view.export(volume).is_some_and(|(_, export)| export.offered_by.contains(&self.host));
            let was_offered = if is_offered { !self.offered.insert(volume) } else { self.offered.remove(&volume) };
            let is_heard = view.volume(volume).is_some_and(|known| known.is_store || has_store);
            let was_heard = if is_heard { !self.heard.insert(volume) } else { self.heard.remove(&volume) };
            self.is_stale |= is_offered || was_offered || is_heard || was_heard;
        }
        self.is_stale |= changes.hosts && !(self.offered.is_empty() && self.heard.is_empty());
    }
}
