//! What a host does next about one volume: who serves it by the records, and what this host does with it.
//!
//! | records | this host has it | next |
//! | --- | --- | --- |
//! | served here | not | open |
//! | served here, handed over by a host that is there | not, or reads its map | read, ask that host to yield, open |
//! | served here, handed over | open | note that the hand-over is done |
//! | served elsewhere, by a host that is gone; offered here | not | the record says "here", then open |
//! | the same; not offered here, to be taken over by whoever lives | not | the nodes hear no more of that host: the same |
//! | handed over by this host to one that is gone | open | the record says "here" |
//! | served elsewhere, or by nobody | reads it, or serves it | let go |
//!
//! What changes a record compares its version, and, where it rests on a host's absence, that absence. What a plan says is
//! right for the view that it was made from; where that is older than the records, the compare fails and it is planned anew.

use crate::machine::{Action, Config};
use crate::view::{View, Volume};
use holdfast_base::{Instant, MetaVersion, NodeId, VolumeId, crc32c};
use holdfast_format::meta::{ExportRecord, encode, export_key, host_key};
use holdfast_format::root::root_key;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// How long a map may take to be read before a hand-over. A node may be away, and the old owner have deleted what is asked for.
pub const READ_MAX: Duration = Duration::from_secs(5);

/// Pace of looking how far the reading is.
const READ_PACE: Duration = Duration::from_millis(5);

/// Pause before a map that could not be read is tried again: the root may name another checkpoint by then.
const UNREADABLE_FOR: Duration = Duration::from_secs(1);

/// How long a host that is there may take to be asked to yield: the connection to it has to come up.
pub const REACH_MAX: Duration = Duration::from_secs(3);

/// Pace of trying that.
const REACH_PACE: Duration = Duration::from_millis(20);

/// Of several hosts that could take a volume over, each waits for so much longer than the one before it.
const TURN: Duration = Duration::from_millis(300);

/// A host that lacks more nodes than the volume's layout can do without leaves it for so long to those that lack fewer.
const FEWER_NODES_LATER: Duration = Duration::from_secs(10);

/// Pause before too few nodes are counted again.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// How long what nodes say of a host counts.
const SILENCE_COUNTS: Duration = Duration::from_millis(1500);

/// Pause before another opening may begin where as many as may be are under way.
const CROWDED_FOR: Duration = Duration::from_millis(50);

/// What this host does with a volume; absent: nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Local {
    /// Reads its map, for a hand-over.
    Reading,
    Opening,
    Open,
    /// Has it open while nobody serves it.
    InCare,
    /// Closes it, or was deposed: it is gone in a moment.
    Ending,
}

/// How far the reading of a map is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reading {
    Begun,
    /// There is nothing to read any more: all is read, or it is being opened.
    Read,
    Unreadable,
    /// It can't be opened here: the host is stopping, or has as many as it can.
    NoRoom,
}

/// How far a volume is on its way here.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Progress {
    /// The version of the record that the rest is about.
    pub version: MetaVersion,
    pub reading_since: Option<Instant>,
    pub is_read: bool,
    pub is_unreadable: bool,
    pub asked_since: Option<Instant>,
    pub has_yielded: bool,
    /// Nothing is done before.
    pub not_before: Instant,
    /// An opening was begun, and is not begun again before.
    pub open_not_before: Instant,
    /// It was, by this version.
    pub was_opened: bool,
}

impl Progress {
    pub fn of(version: MetaVersion, not_before: Instant) -> Progress {
        Progress { version, not_before, ..Progress::default() }
    }

    pub fn on_reading(&mut self, now: Instant, reading: Reading) {
        match reading {
            Reading::Begun => self.not_before = now + READ_PACE,
            Reading::Read => self.is_read = true,
            Reading::Unreadable => self.is_unreadable = true,
            Reading::NoRoom => self.not_before = now + UNREADABLE_FOR,
        }
    }

    pub fn on_asked(&mut self, now: Instant, has_answered: bool) {
        self.has_yielded = has_answered;
        if !has_answered {
            self.not_before = now + REACH_PACE;
        }
    }
}

/// What a plan is made from.
pub struct Situation<'a> {
    pub now: Instant,
    pub config: &'a Config,
    pub view: &'a View,
    pub local: Option<Local>,
    pub progress: &'a Progress,
    /// Nodes that this host can't reach.
    pub nodes_away: &'a BTreeSet<NodeId>,
    /// Since when the store has answered without a pause, and was the right one.
    pub right_since: Option<Instant>,
    /// Since when the host that serves the volume is gone.
    pub lost_since: Option<Instant>,
    /// Nodes that have heard nothing of a host for [`SILENT_FOR`](crate::SILENT_FOR), and when they said so.
    pub silent: &'a BTreeMap<String, (Instant, BTreeSet<NodeId>)>,
    /// Volumes that are being opened here.
    pub openings: usize,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    Nothing,
    /// Nothing before then, if nothing changes.
    Until(Instant),
    /// Nodes are to tell whether they hear of this host; then it is planned anew.
    AskNodes(String),
    Do(Action),
}

pub fn plan(volume: VolumeId, s: &Situation) -> Step {
    // A store that is silent, or is not the one that it was, decides nothing.
    let Some(right_since) = s.right_since else { return Step::Nothing };
    if s.progress.not_before > s.now {
        return Step::Until(s.progress.not_before);
    }
    let me = &s.config.host;
    let known = s.view.volume(volume).filter(|known| !known.is_gone);
    let Some((known, (version, export))) = known.zip(s.view.export(volume)) else {
        return match s.local {
            Some(Local::Reading) => Step::Do(Action::LetGo { volume }),
            // Its record is gone, and not merely one that this release can't read: it was deleted by who never heard so.
            Some(Local::Open | Local::Opening) if s.view.get(&export_key(volume)).is_none() => {
                Step::Do(Action::LetGo { volume })
            }
            _ => Step::Nothing,
        };
    };
    if export.host == *me {
        return match (s.local, export.from.as_ref().filter(|from| *from != me)) {
            (None | Some(Local::Reading), Some(from)) => arrive(volume, known, from, s),
            (None | Some(Local::Reading | Local::InCare), None) => open(volume, s),
            // It rests on an older record.
            (Some(Local::Opening), None) if !s.progress.was_opened => Step::Do(Action::Open { volume, by: *version }),
            (Some(Local::Open), Some(_)) => note(volume, *version, ExportRecord { from: None, ..export.clone() }, None),
            _ => Step::Nothing,
        };
    }
    let is_lost = !export.host.is_empty() && !s.view.has_host(&export.host);
    let is_handed_by_me = export.from.as_ref() == Some(me);
    match s.local {
        None | Some(Local::Reading) if is_lost && export.offered_by.contains(me) => {
            take_from(turn_at(volume, export, s).max(lease_over(right_since, s)), volume, *version, export, s)
        }
        None | Some(Local::Reading) if is_lost && export.failover => {
            let due = turn_at(volume, export, s).max(lease_over(right_since, s));
            if due > s.now { Step::Until(due) } else { fail_over(volume, known, *version, export, s) }
        }
        Some(Local::Open | Local::Opening) if is_handed_by_me && is_lost => {
            take_from(lease_over(right_since, s), volume, *version, export, s)
        }
        Some(Local::Open | Local::Opening) if is_handed_by_me => Step::Nothing,
        Some(Local::Open | Local::Opening | Local::Reading) => Step::Do(Action::LetGo { volume }),
        None | Some(Local::InCare | Local::Ending) => Step::Nothing,
    }
}

/// The volume is handed over to this host: the map is read while the other one serves, then that is asked to stop.
fn arrive(volume: VolumeId, known: &Volume, from: &str, s: &Situation) -> Step {
    let progress = s.progress;
    // After a silence it may be there without a lease: it is asked.
    let is_gone = !s.view.has_host(from) && s.right_since.is_some_and(|since| s.now >= lease_over(since, s));
    if is_gone || progress.has_yielded {
        return open(volume, s);
    }
    // Until it could be served here the other host goes on. Whether segments lie on what is away, who reads the map
    // finds.
    if s.nodes_away.len() > usize::from(known.failures) && !known.log_needs_none_of(s.nodes_away) {
        return Step::Until(s.now + LOOK_AGAIN);
    }
    if !progress.is_read {
        let is_late = progress.reading_since.is_some_and(|since| s.now.since(since) >= READ_MAX);
        let is_in_vain = is_late || progress.is_unreadable;
        return Step::Do(if is_in_vain { Action::LetGo { volume } } else { Action::Read { volume } });
    }
    // It hangs, or can't be reached: what it has is recovered like after a crash.
    if progress.asked_since.is_some_and(|since| s.now.since(since) >= REACH_MAX) {
        return open(volume, s);
    }
    Step::Do(Action::AskToYield { volume, host: from.to_string() })
}

/// How long nothing is done about a volume whose map could not be read.
pub fn pause_after_reading() -> Duration {
    UNREADABLE_FOR
}

fn open(volume: VolumeId, s: &Situation) -> Step {
    if s.progress.open_not_before > s.now {
        return Step::Until(s.progress.open_not_before);
    }
    if s.openings >= s.config.openings_max {
        return Step::Until(s.now + CROWDED_FOR);
    }
    Step::Do(Action::Open { volume, by: s.view.export_version(volume) })
}

/// While the store was silent no lease was renewed: whoever is there has been for long enough to say so again by then.
fn lease_over(right_since: Instant, s: &Situation) -> Instant {
    if s.config.mutations.fails_over_on_lease_alone() { s.now } else { right_since + s.config.lease }
}

/// The volume is taken over although its clients were at the other host: never where one may be serving it still. That is the
/// host that the record names, and in a hand-over the one that it is handed over by.
fn fail_over(volume: VolumeId, known: &Volume, version: MetaVersion, export: &ExportRecord, s: &Situation) -> Step {
    let others = std::iter::once(&export.host).chain(export.from.as_ref().filter(|from| **from != s.config.host));
    for host in others.filter(|_| !s.config.mutations.takes_from_who_is_heard()) {
        let told = s.silent.get(host).filter(|(at, _)| s.now.since(*at) < SILENCE_COUNTS);
        match told.map(|(_, silent)| known.is_cut_off(silent)) {
            Some(true) => {}
            Some(false) => return Step::Until(s.now + LOOK_AGAIN),
            None => return Step::AskNodes(host.clone()),
        }
    }
    // The nodes that have answered suffice for its log. Of the others some may be out for long, and none of them needed.
    let lacks_many = s.nodes_away.len() > usize::from(known.failures);
    let due = s.lost_since.unwrap_or(s.now) + FEWER_NODES_LATER;
    if lacks_many && due > s.now {
        return Step::Until(due.min(s.now + LOOK_AGAIN));
    }
    let mut step = take(volume, version, export, s);
    // It was cut off from these legs, and not from those that it may have gone to since.
    let root = root_key(volume);
    if let (Step::Do(Action::Commit { compares, .. }), Some(record)) = (&mut step, s.view.get(&root)) {
        compares.push((root, record.version));
    }
    step
}

fn take_from(due: Instant, volume: VolumeId, version: MetaVersion, export: &ExportRecord, s: &Situation) -> Step {
    if due > s.now { Step::Until(due) } else { take(volume, version, export, s) }
}

/// From here on this host serves the volume, if the other is gone by then.
fn take(volume: VolumeId, version: MetaVersion, export: &ExportRecord, s: &Situation) -> Step {
    let gone = host_key(&export.host);
    let next = ExportRecord { host: s.config.host.clone(), from: None, ..export.clone() };
    let mut step = note(volume, version, next, Some(gone).filter(|_| !s.config.mutations.leaves_absence_out()));
    if let Step::Do(Action::Commit { compares, .. }) = &mut step
        && s.config.mutations.leaves_version_out()
    {
        compares.retain(|(key, _)| *key != export_key(volume));
    }
    step
}

fn note(volume: VolumeId, version: MetaVersion, next: ExportRecord, absent: Option<String>) -> Step {
    let key = export_key(volume);
    let absent = absent.map(|key| (key, MetaVersion::ABSENT));
    let compares = std::iter::once((key.clone(), version)).chain(absent).collect();
    Step::Do(Action::Commit { volume, compares, writes: vec![(key, Some(encode(&next)))] })
}

/// When it is this host's turn to take the volume over: the hosts that are there and may come one after another, those that
/// offer it first.
fn turn_at(volume: VolumeId, export: &ExportRecord, s: &Situation) -> Instant {
    let rank = |host: &str| {
        let hash = crc32c(&[&volume.0.to_le_bytes()[..], host.as_bytes()].concat());
        (!export.offered_by.contains(host), hash, host.to_string())
    };
    let own = rank(&s.config.host);
    let may = |host: &&String| export.failover || export.offered_by.contains(*host);
    let before = s.view.hosts().keys().filter(may).filter(|host| rank(host) < own).count();
    s.lost_since.unwrap_or(s.now) + TURN * before.try_into().unwrap_or(u32::MAX)
}
