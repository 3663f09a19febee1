//! The machine: which volumes have to be planned anew, and what is under way.
//!
//! Role: the shell tells it of changes in the [`View`], of what the host does with volumes, of nodes, of the store, and of what
//! came of actions; it gives actions to an executor. A command that works on a volume holds it first: nothing is begun about
//! it until it is let go of.
//!
//! Invariants
//! 1. Of one volume at most one action is under way, and none while a command holds it.
//! 2. While the store is silent or not the right one no action begins.
//!
//! Cost: a change plans the volumes that it concerns; a host that comes or goes, and each [`PASS_EVERY`], all that are to be served.

use crate::assign::{Local, Progress, Reading, Situation, Step, pause_after_reading, plan};
use crate::view::{Changes, View};
use holdfast_base::{Effects, Instant, MetaVersion, NodeId, VolumeId};
use holdfast_format::meta::ExportRecord;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A net below everything: whatever was missed is planned again this often.
const PASS_EVERY: Duration = Duration::from_secs(60);

/// A host that a node has heard nothing of for so long does not reach it: hosts ask each node something every second.
pub const SILENT_FOR: Duration = Duration::from_millis(2500);

/// Pace of asking nodes whether they hear of a host.
const ASK_EVERY: Duration = Duration::from_millis(500);

/// Pause after an action that could not be carried out, or whose outcome nobody knows.
const FAILED_FOR: Duration = Duration::from_millis(500);

/// Pause after a transaction was begun that changes nothing: what it compared was not so, and may be seen late.
const COMMIT_PACE: Duration = Duration::from_millis(100);

/// Pause after an opening was begun: one that comes to nothing is begun again, at this pace.
const OPENED_FOR: Duration = Duration::from_secs(1);

#[derive(Clone, Debug)]
pub struct Config {
    /// This host's name.
    pub host: String,
    /// How long a host that says nothing counts as there.
    pub lease: Duration,
    /// Volumes that are opened at a time.
    pub openings_max: usize,
    pub mutations: Mutations,
}

impl Config {
    pub fn new(host: &str, lease: Duration) -> Config {
        Config { host: host.to_string(), lease, openings_max: 64, mutations: Mutations::default() }
    }
}

holdfast_base::mutations! {
    /// Deliberate faults that the simulator must find; all off outside of its check.
    pub struct Mutations {
        /// A volume is taken over as soon as its host's lease is over, also just after the store was silent.
        fails_over_on_lease_alone,
        /// A take-over does not compare that the other host is gone.
        leaves_absence_out,
        /// Actions begin whatever the store is like.
        believes_any_store,
        /// Two actions of a volume may be under way.
        forgets_what_is_under_way,
        /// A command's hold is granted while an action is under way.
        holds_at_once,
        /// A take-over does not compare the record that it changes.
        leaves_version_out,
        /// What is planned next does not wait for a command's hold to end.
        forgets_holds,
        /// A volume is taken over from a host that nodes hear.
        takes_from_who_is_heard,
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct ActionId(pub u64);

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// Put the volume into service at this host, if its record is at this version when it is claimed. An opening that is
    /// under way rests on that version from here on.
    Open { volume: VolumeId, by: MetaVersion },
    /// Begin to read the volume's map, or see how far that is.
    Read { volume: VolumeId },
    /// Ask the host that hands the volume over to stop serving it.
    AskToYield { volume: VolumeId, host: String },
    /// Drop what this host has of the volume, as it is.
    LetGo { volume: VolumeId },
    /// One transaction: these records are at these versions, then those are written.
    Commit { volume: VolumeId, compares: Vec<(String, MetaVersion)>, writes: Vec<(String, Option<Vec<u8>>)> },
}

impl Action {
    pub fn volume(&self) -> VolumeId {
        match self {
            Action::Open { volume, .. }
            | Action::Read { volume }
            | Action::AskToYield { volume, .. }
            | Action::LetGo { volume }
            | Action::Commit { volume, .. } => *volume,
        }
    }
}

/// What came of an action. Of a transaction the records that were found are in the view by then.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    Done,
    /// It could not be carried out, or nobody knows whether it was.
    Failed,
    Reading(Reading),
    /// Whether the host has answered: it has stopped, or has nothing to stop.
    Asked(bool),
}

#[derive(Clone, Debug)]
pub enum Event {
    /// The view has changed.
    Changed(Changes),
    /// What this host does with a volume from here on.
    Local {
        volume: VolumeId,
        local: Option<Local>,
    },
    /// These nodes are out of reach.
    NodesAway(BTreeSet<NodeId>),
    /// What nodes say of a host that is gone by the records: these have heard nothing of it for [`SILENT_FOR`].
    Silent {
        host: String,
        nodes: BTreeSet<NodeId>,
    },
    /// Whether the store answers and is the right one.
    Store {
        is_right: bool,
    },
    Outcome {
        id: ActionId,
        outcome: Outcome,
    },
    /// A command is about to work on the volume: [`Effect::Granted`] says when it may.
    Hold {
        volume: VolumeId,
        ticket: u64,
    },
    Release {
        volume: VolumeId,
    },
    Tick,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Effect {
    Act {
        id: ActionId,
        action: Action,
    },
    /// Nodes are to be asked whether they hear of this host: [`Event::Silent`].
    AskNodes {
        host: String,
    },
    Granted {
        ticket: u64,
    },
}

pub struct Cluster {
    config: Config,
    local: BTreeMap<VolumeId, Local>,
    progress: BTreeMap<VolumeId, Progress>,
    /// With the version of the volume's record that it was planned by.
    under_way: BTreeMap<ActionId, (VolumeId, MetaVersion)>,
    busy: BTreeMap<VolumeId, ActionId>,
    /// By how many commands.
    held: BTreeMap<VolumeId, usize>,
    /// Commands that wait until nothing is under way.
    waiting: Vec<(VolumeId, u64)>,
    dirty: BTreeSet<VolumeId>,
    /// When volumes are to be planned again, the earliest for each.
    due: BTreeMap<VolumeId, Instant>,
    nodes_away: BTreeSet<NodeId>,
    right_since: Option<Instant>,
    /// Hosts that are named by records and not there, and since when.
    lost: BTreeMap<String, Instant>,
    /// Which nodes hear nothing of them, and when these said so.
    silent: BTreeMap<String, (Instant, BTreeSet<NodeId>)>,
    /// When nodes were asked.
    asked: BTreeMap<String, Instant>,
    next_id: u64,
    pass_at: Instant,
}

impl Cluster {
    pub fn new(config: Config) -> Cluster {
        Cluster {
            config,
            local: BTreeMap::new(),
            progress: BTreeMap::new(),
            under_way: BTreeMap::new(),
            busy: BTreeMap::new(),
            held: BTreeMap::new(),
            waiting: Vec::new(),
            dirty: BTreeSet::new(),
            due: BTreeMap::new(),
            nodes_away: BTreeSet::new(),
            right_since: None,
            lost: BTreeMap::new(),
            silent: BTreeMap::new(),
            asked: BTreeMap::new(),
            next_id: 0,
            pass_at: Instant::ZERO,
        }
    }

    /// Runs one event to completion.
    pub fn handle(&mut self, now: Instant, view: &View, event: Event, out: &mut Effects<Effect>) {
        match event {
            Event::Changed(changes) => self.on_changed(now, view, changes),
            Event::Local { volume, local } => {
                match local {
                    Some(local) => self.local.insert(volume, local),
                    None => self.local.remove(&volume),
                };
                self.dirty.insert(volume);
            }
            Event::NodesAway(nodes) => {
                if self.nodes_away != nodes {
                    self.nodes_away = nodes;
                    self.plan_all(view);
                }
            }
            Event::Silent { host, nodes } => {
                let may_serve = |export: &ExportRecord| export.host == host || export.from.as_ref() == Some(&host);
                self.dirty.extend(view.exports().filter(|(_, export)| may_serve(export)).map(|(volume, _)| volume));
                self.silent.insert(host, (now, nodes));
            }
            Event::Store { is_right } => {
                let is_right = is_right || self.config.mutations.believes_any_store();
                if is_right != self.right_since.is_some() {
                    self.right_since = is_right.then_some(now);
                    self.plan_all(view);
                }
            }
            Event::Outcome { id, outcome } => self.on_outcome(now, id, outcome, out),
            Event::Hold { volume, ticket } => {
                *self.held.entry(volume).or_default() += 1;
                self.waiting.push((volume, ticket));
                self.grant_holds(out);
            }
            Event::Release { volume } => {
                if let Some(count) = self.held.get_mut(&volume) {
                    *count -= 1;
                    if *count == 0 {
                        self.held.remove(&volume);
                        self.dirty.insert(volume);
                        // Of the time that it was held nobody was asked anything.
                        if let Some(progress) = self.progress.get_mut(&volume) {
                            progress.asked_since = None;
                        }
                    }
                }
            }
            Event::Tick => {}
        }
        self.on_time(now, view);
        self.plan_dirty(now, view, out);
    }

    /// When it wants an [`Event::Tick`] at the latest.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.due.values().copied().chain([self.pass_at]).min()
    }

    /// Whether an action is still what its volume's record asks for. One that comes to be carried out when it is not is left out, and
    /// counts as done: it is planned anew.
    pub fn is_current(&self, view: &View, id: ActionId) -> bool {
        self.under_way.get(&id).is_some_and(|(volume, version)| *version == view.export_version(*volume))
    }

    /// Volumes about which something is under way or about to be.
    pub fn is_idle(&self) -> bool {
        self.under_way.is_empty() && self.dirty.is_empty()
    }

    /// Asserts what must hold between events.
    pub fn verify(&self) {
        let mut volumes: Vec<VolumeId> = self.under_way.values().map(|(volume, _)| *volume).collect();
        volumes.sort_unstable();
        let count = volumes.len();
        volumes.dedup();
        assert!(count == volumes.len(), "two actions of one volume are under way");
        for (volume, id) in &self.busy {
            assert_eq!(
                self.under_way.get(id).map(|(volume, _)| volume),
                Some(volume),
                "what is under way is known by both"
            );
        }
    }

    fn on_changed(&mut self, now: Instant, view: &View, changes: Changes) {
        if changes.hosts {
            let named = view.exports().map(|(_, export)| export.host.clone()).filter(|host| !host.is_empty());
            let gone: BTreeSet<String> = named.filter(|host| !view.has_host(host)).collect();
            self.lost.retain(|host, _| gone.contains(host));
            self.silent.retain(|host, _| gone.contains(host));
            self.asked.retain(|host, _| gone.contains(host));
            for host in gone {
                self.lost.entry(host).or_insert(now);
            }
            self.plan_all(view);
        }
        // One may be named by a record only now that it is gone.
        let named = changes.volumes.iter().filter_map(|volume| view.export(*volume)).map(|(_, export)| &export.host);
        for host in named.filter(|host| !host.is_empty() && !view.has_host(host)) {
            self.lost.entry(host.clone()).or_insert(now);
        }
        self.dirty.extend(changes.volumes);
    }

    fn plan_all(&mut self, view: &View) {
        self.dirty.extend(view.exports().map(|(volume, _)| volume).chain(self.local.keys().copied()));
    }

    fn on_time(&mut self, now: Instant, view: &View) {
        if self.pass_at <= now {
            self.pass_at = now + PASS_EVERY;
            self.plan_all(view);
        }
        self.dirty.extend(self.due.extract_if(.., |_, at| *at <= now).map(|(volume, _)| volume));
    }

    fn on_outcome(&mut self, now: Instant, id: ActionId, outcome: Outcome, out: &mut Effects<Effect>) {
        // One that was told twice changes nothing.
        let Some((volume, _)) = self.under_way.remove(&id) else { return };
        if self.busy.get(&volume) == Some(&id) {
            self.busy.remove(&volume);
        }
        let progress = self.progress.entry(volume).or_default();
        match outcome {
            Outcome::Done => {}
            Outcome::Failed => progress.not_before = now + FAILED_FOR,
            Outcome::Reading(reading) => progress.on_reading(now, reading),
            Outcome::Asked(has_answered) => progress.on_asked(now, has_answered),
        }
        self.dirty.insert(volume);
        self.grant_holds(out);
    }

    fn grant_holds(&mut self, out: &mut Effects<Effect>) {
        let (busy, at_once) = (&self.busy, self.config.mutations.holds_at_once());
        for (_, ticket) in self.waiting.extract_if(.., |(volume, _)| at_once || !busy.contains_key(volume)) {
            out.push(Effect::Granted { ticket });
        }
    }

    fn plan_dirty(&mut self, now: Instant, view: &View, out: &mut Effects<Effect>) {
        let openings = self.local.values().filter(|local| **local == Local::Opening).count();
        let mut begun = 0;
        for volume in std::mem::take(&mut self.dirty) {
            let is_busy = self.busy.contains_key(&volume) && !self.config.mutations.forgets_what_is_under_way();
            if is_busy || self.held.contains_key(&volume) && !self.config.mutations.forgets_holds() {
                // Its end, or the hold's, has it planned.
                continue;
            }
            let step = self.plan_one(now, view, volume, openings + begun);
            self.due.remove(&volume);
            match step {
                Step::Nothing => {}
                Step::Until(at) => {
                    self.due.insert(volume, at);
                }
                Step::AskNodes(host) => {
                    self.due.insert(volume, now + ASK_EVERY);
                    if self.asked.get(&host).is_none_or(|at| now.since(*at) >= ASK_EVERY) {
                        self.asked.insert(host.clone(), now);
                        out.push(Effect::AskNodes { host });
                    }
                }
                Step::Do(action) => {
                    begun += usize::from(matches!(action, Action::Open { .. }));
                    self.begin(now, view, action, out);
                }
            }
        }
    }

    fn plan_one(&mut self, now: Instant, view: &View, volume: VolumeId, openings: usize) -> Step {
        let export = view.export(volume);
        let version = view.export_version(volume);
        let local = self.local.get(&volume).copied();
        if export.is_none() && local.is_none() {
            self.progress.remove(&volume);
            return Step::Nothing;
        }
        let progress = self.progress.entry(volume).or_default();
        if progress.version != version {
            *progress = Progress::of(version, Instant::ZERO);
        }
        let lost_since = export.and_then(|(_, export)| self.lost.get(&export.host).copied());
        let situation = Situation {
            now,
            config: &self.config,
            view,
            local,
            progress,
            nodes_away: &self.nodes_away,
            right_since: self.right_since,
            lost_since,
            silent: &self.silent,
            openings,
        };
        plan(volume, &situation)
    }

    fn begin(&mut self, now: Instant, view: &View, action: Action, out: &mut Effects<Effect>) {
        let (volume, id) = (action.volume(), ActionId(self.next_id));
        self.next_id += 1;
        self.under_way.insert(id, (volume, view.export_version(volume)));
        self.busy.insert(volume, id);
        let progress = self.progress.entry(volume).or_default();
        match action {
            Action::Open { .. } => {
                progress.open_not_before = now + OPENED_FOR;
                progress.was_opened = true;
            }
            Action::Read { .. } => progress.reading_since = progress.reading_since.or(Some(now)),
            Action::AskToYield { .. } => progress.asked_since = progress.asked_since.or(Some(now)),
            // Of what was read nothing is left.
            Action::LetGo { .. } => *progress = Progress::of(progress.version, now + pause_after_reading()),
            // One that has come to pass makes a new version, about which something may be done at once.
            Action::Commit { .. } => progress.not_before = now + COMMIT_PACE,
        }
        out.push(Effect::Act { id, action });
    }
}
