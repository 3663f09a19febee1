//! The steward: what one host does for the whole grid, and which one that is.
//!
//! ```text
//! caretaker              (metadata, leased) the host that is the steward
//! ```
//! Role: it returns the space of deleted volumes ([`crate::deletion`]), and empties the trash in time. It has volumes that
//! nobody serves cared for, one at a time. It has the records copied to the grid's devices, and counts the store's minutes
//! ([`crate::beat`]). The shell tells it of changes in the [`View`] and of what came of actions, and carries them out; it
//! chooses nothing, waits for nothing, and repeats nothing.
//!
//! Invariants
//! 1. Nothing begins while the store is silent or not the right one, nor at a host that is not the steward by what it knows.
//!    Every transaction compares that it still is: of two that take themselves for the steward one changes nothing.
//! 2. A device is asked to drop a volume only when the record says that it is deleted, for ever.
//! 3. Of one matter at most one action is under way.
//! 4. A minute in the trash is one that the steward has seen pass: clocks that are set take nothing away early.
//!
//! Faults: all that it remembers may be lost with the process; dropping twice, or caring twice, is harmless.

use crate::beat;
use crate::deletion;
use crate::view::{Changes, Record, View};
use holdfast_base::prng::Prng;
use holdfast_base::{DeviceId, Effects, Epoch, Instant, MetaVersion, NodeId, VolumeId, crc32c};
use holdfast_format::meta::{
    BEAT_KEY, BeatRecord, DELETING_PREFIX, DRAINING_PREFIX, DeletingRecord, FLEETING, Other, REMOVED_PREFIX,
    ROOT_SUFFIX, RemovedRecord, STEWARD_KEY, TRASH_PREFIX, TrashRecord, decode, deleting_key, encode, export_key,
};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// How long a volume can be had back.
pub const KEPT_MINUTES: u64 = 24 * 60;

/// Pace while anything is under way, and otherwise.
const PACE: Duration = Duration::from_secs(1);
const IDLE_PACE: Duration = Duration::from_secs(2);

/// Between two looks at everything, however much happens.
const LOOK_PACE: Duration = Duration::from_millis(100);

/// Pause after an action that came to nothing.
const FAILED_FOR: Duration = Duration::from_secs(2);

/// Pace of looking whether space is short, while there is something in the trash.
const SPACE_PACE: Duration = Duration::from_secs(5);

/// Pause after a volume was given up for want of space: what it held comes back, and is told of by nodes.
const RETURNED_WITHIN: Duration = Duration::from_secs(15);

/// Each volume that nobody serves is looked after this often, and more often while devices are to be emptied.
const CARE_EVERY: Duration = Duration::from_secs(3600);
const CARE_EVERY_DRAINING: Duration = Duration::from_secs(5);

/// It is closed when there has been nothing to do for so long, and in any case after the longer span: others wait.
const REST: Duration = Duration::from_secs(3);
const CARE_MAX: Duration = Duration::from_secs(600);
const CARE_PACE: Duration = Duration::from_millis(500);

/// Between two copies of the records that change: as many times what the one before took, and in between these.
const COPY_SHARE: u32 = 20;
const COPY_PAUSE_MIN: Duration = Duration::from_secs(1);
const COPY_PAUSE: Duration = Duration::from_secs(20);

/// How long one lasts although nothing has changed: devices come and go.
const COPY_EVERY: Duration = Duration::from_secs(24 * 3600);

/// Pace of asking whether anything is missing of what removed machines had.
const SETTLE_PACE: Duration = Duration::from_secs(5);

pub type Place = (NodeId, DeviceId);

#[derive(Clone, Debug)]
pub struct Config {
    /// This host's name.
    pub host: String,
    /// How long a volume in the trash can be had back.
    pub kept_minutes: u64,
    /// How long a minute is.
    pub minute: Duration,
    /// Another one in each process: what it makes of the store's beat nobody else makes.
    pub random: u64,
    pub mutations: Mutations,
}

impl Config {
    pub fn new(host: &str, random: u64) -> Config {
        let (kept_minutes, minute) = (KEPT_MINUTES, Duration::from_secs(60));
        Config { host: host.to_string(), kept_minutes, minute, random, mutations: Mutations::default() }
    }
}

holdfast_base::mutations! {
    /// Deliberate faults that the simulator must find; all off outside of its check.
    pub struct Mutations {
        /// Devices are asked to drop what a deletion was begun of, whether it can be had back or not.
        drops_before_it_is_marked,
        /// What is given up is not compared: it may have been had back meanwhile.
        gives_up_without_comparing,
        /// Every look at what is in the trash counts as a minute.
        counts_looks,
        /// Actions begin whatever the store is like.
        acts_in_doubt,
        /// A deletion is over when one device has dropped the volume.
        finishes_early,
        /// Whoever is alive does what the steward does.
        all_are_stewards,
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct ActionId(pub u64);

pub type Compares = Vec<(String, MetaVersion)>;
pub type Writes = Vec<(String, Option<Vec<u8>>)>;

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// Write that this host is the steward, on the lease that says that the host is there. Nobody is then, or this host itself:
    /// in an earlier life, or by an outcome that it never heard of.
    BeSteward { replaces: MetaVersion },
    /// One transaction: these records are at these versions, then those are written.
    Commit { volume: VolumeId, change: Change, compares: Compares, writes: Writes },
    /// Ask a device to drop the volume, up to this epoch.
    Drop { volume: VolumeId, epoch: Epoch, place: Place },
    /// See whether devices are nearly full.
    LookAtSpace,
    /// Open the volume without clients.
    OpenForCare { volume: VolumeId },
    /// See whether it has anything to do.
    LookAtCare { volume: VolumeId },
    /// Close it, unless it is in service by then.
    EndCare { volume: VolumeId },
    /// One transaction: the store's beat goes on.
    Beat { compares: Compares, writes: Writes },
    /// Write the records to the grid's devices.
    CopyRecords,
    /// Ask hosts whether anything is missing of what removed machines had.
    SettleRemoved,
}

/// What a transaction does with a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// It is deleted for ever.
    Delete,
    /// Its deletion was begun, and can't be: others need it.
    KeepIt,
    /// It was being made of one that is deleted.
    EndCreation,
    /// What is left of its records is deleted.
    Forget,
    /// All devices have dropped it.
    Finish,
    /// It has been in the trash for a minute more.
    Age,
    /// It is in the trash, and can't be had back any more: its time is over, or devices are nearly full.
    GiveUp { for_space: bool },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    Done,
    /// It could not be carried out, or nobody knows whether it was.
    Failed,
    /// Its record has this version: this host is the steward as long as it is there.
    Steward(MetaVersion),
    Space {
        is_short: bool,
    },
    /// Of a volume in care: whether it has something to do, or that it is not in care any more.
    Care {
        is_busy: Option<bool>,
    },
    Copied {
        is_everywhere: bool,
    },
}

#[derive(Clone, Debug)]
pub enum Event {
    /// The view has changed.
    Changed(Changes),
    /// Whether the store answers and is the right one.
    Store {
        is_right: bool,
    },
    /// The grid has these devices from here on.
    Places(BTreeSet<Place>),
    Outcome {
        id: ActionId,
        outcome: Outcome,
    },
    Tick,
}

pub type Out<'a> = &'a mut Effects<(ActionId, Action)>;

/// What an action is about: of each at most one is under way.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Matter {
    Stewardship,
    Volume(VolumeId),
    Place(VolumeId, Place),
    Space,
    Care,
    Beat,
    Copy,
    Removed,
}

fn matter(action: &Action) -> Matter {
    match action {
        Action::BeSteward { .. } => Matter::Stewardship,
        Action::Commit { volume, .. } => Matter::Volume(*volume),
        Action::Drop { volume, place, .. } => Matter::Place(*volume, *place),
        Action::LookAtSpace => Matter::Space,
        Action::OpenForCare { .. } | Action::LookAtCare { .. } | Action::EndCare { .. } => Matter::Care,
        Action::Beat { .. } => Matter::Beat,
        Action::CopyRecords => Matter::Copy,
        Action::SettleRemoved => Matter::Removed,
    }
}

/// The volume that is in care.
#[derive(Clone, Copy, Debug)]
struct Care {
    volume: VolumeId,
    begun: Instant,
    busy_at: Instant,
    is_ending: bool,
}

/// What was copied last.
#[derive(Clone, Copy, Debug)]
struct Copy {
    at: Instant,
    fingerprint: u32,
    is_everywhere: bool,
    /// How long another one waits, where there is something to copy.
    pause: Duration,
}

pub struct Steward {
    config: Config,
    prng: Prng,
    now: Instant,
    /// When it last looked at everything, and whether something has happened since.
    looked_at: Option<Instant>,
    is_due: bool,
    is_right: bool,
    /// The record by which this host is the steward.
    taken: Option<MetaVersion>,
    places: BTreeSet<Place>,
    under_way: BTreeMap<ActionId, Action>,
    busy: BTreeSet<Matter>,
    /// Until then nothing is begun about it.
    rests: BTreeMap<Matter, Instant>,
    /// Who has dropped a volume already.
    dropped: BTreeMap<VolumeId, BTreeSet<Place>>,
    /// How long records of the trash have stood as they are.
    aging: BTreeMap<VolumeId, (MetaVersion, Instant)>,
    is_short: bool,
    care: Option<Care>,
    /// Since when this process looks after volumes, and when it did last.
    since: Instant,
    cared: BTreeMap<VolumeId, Instant>,
    /// When volumes were last opened here until they had nothing left to do.
    rested: BTreeMap<VolumeId, Instant>,
    copied: Option<Copy>,
    /// Since when the store's beat stands as it is.
    beaten: Option<(MetaVersion, Instant)>,
    /// Records have changed since the last look at them.
    is_changed: bool,
    /// When a machine was first found to be removed.
    removed_since: BTreeMap<String, Instant>,
    next_id: u64,
}

impl Steward {
    pub fn new(now: Instant, config: Config) -> Steward {
        Steward {
            prng: Prng::new(config.random),
            config,
            now,
            looked_at: None,
            is_due: false,
            is_right: false,
            taken: None,
            places: BTreeSet::new(),
            under_way: BTreeMap::new(),
            busy: BTreeSet::new(),
            rests: BTreeMap::new(),
            dropped: BTreeMap::new(),
            aging: BTreeMap::new(),
            is_short: false,
            care: None,
            since: now,
            cared: BTreeMap::new(),
            rested: BTreeMap::new(),
            copied: None,
            beaten: None,
            is_changed: true,
            removed_since: BTreeMap::new(),
            next_id: 0,
        }
    }

    /// Runs one event to completion.
    pub fn handle(&mut self, now: Instant, view: &View, event: Event, out: Out) {
        self.now = now;
        match event {
            Event::Changed(_) => self.is_changed = true,
            Event::Store { is_right } => self.is_right = is_right || self.config.mutations.acts_in_doubt(),
            Event::Places(places) => self.places = places,
            Event::Outcome { id, outcome } => self.on_outcome(id, outcome),
            Event::Tick => {}
        }
        self.is_due = self.looked_at.is_some_and(|at| now.since(at) < LOOK_PACE);
        if !self.is_due {
            self.looked_at = Some(now);
            self.plan(view, out);
        }
    }

    /// When it wants an [`Event::Tick`] at the latest.
    pub fn next_deadline(&self) -> Instant {
        if let Some(at) = self.looked_at.filter(|_| self.is_due) {
            return at + LOOK_PACE;
        }
        let is_at_work =
            self.care.is_some() || !self.busy.is_empty() || !self.aging.is_empty() || !self.dropped.is_empty();
        self.now + if is_at_work { PACE.min(CARE_PACE) } else { IDLE_PACE }
    }

    /// Asserts what must hold between events.
    pub fn verify(&self) {
        let matters: BTreeSet<Matter> = self.under_way.values().map(matter).collect();
        assert_eq!(matters.len(), self.under_way.len(), "two actions of one matter are under way");
        assert_eq!(matters, self.busy, "what is under way is known by both");
    }

    pub fn is_steward(&self, view: &View) -> bool {
        let record = view.get(STEWARD_KEY);
        self.config.mutations.all_are_stewards() || self.taken.is_some() && record.map(|r| r.version) == self.taken
    }

    fn on_outcome(&mut self, id: ActionId, outcome: Outcome) {
        // One that was told twice changes nothing.
        let Some(action) = self.under_way.remove(&id) else { return };
        self.busy.remove(&matter(&action));
        if outcome == Outcome::Failed {
            self.rests.insert(matter(&action), self.now + FAILED_FOR);
        }
        match (action, outcome) {
            (Action::BeSteward { .. }, Outcome::Steward(version)) => self.taken = Some(version),
            (Action::Drop { volume, place, .. }, Outcome::Done) => {
                self.dropped.entry(volume).or_default().insert(place);
            }
            (Action::Commit { volume, change: Change::Finish, .. }, Outcome::Done) => {
                self.dropped.remove(&volume);
            }
            (Action::Commit { change: Change::GiveUp { for_space: true }, .. }, Outcome::Done) => {
                self.is_short = false;
                self.rests.insert(Matter::Space, self.now + RETURNED_WITHIN);
            }
            (Action::LookAtSpace, Outcome::Space { is_short }) => {
                self.is_short = is_short;
                self.rests.insert(Matter::Space, self.now + SPACE_PACE);
            }
            (Action::OpenForCare { volume }, Outcome::Done) => {
                let (begun, busy_at, is_ending) = (self.now, self.now, false);
                self.care = Some(Care { volume, begun, busy_at, is_ending });
            }
            // Others wait: it has had its turn.
            (Action::OpenForCare { volume }, _) => {
                self.cared.insert(volume, self.now);
            }
            (Action::LookAtCare { .. }, Outcome::Care { is_busy }) => self.on_care(is_busy),
            (Action::EndCare { volume }, Outcome::Done) => {
                self.cared.insert(volume, self.now);
                self.care = None;
            }
            (Action::CopyRecords, Outcome::Copied { is_everywhere }) => {
                let pause = |took: Duration| (took * COPY_SHARE).clamp(COPY_PAUSE_MIN, COPY_PAUSE);
                self.copied = self.copied.map(|copied| {
                    let pause = if is_everywhere { pause(self.now.since(copied.at)) } else { COPY_PAUSE };
                    Copy { is_everywhere, pause, ..copied }
                });
            }
            (Action::CopyRecords, _) => {
                self.copied = None;
                self.rests.insert(Matter::Copy, self.now + COPY_PAUSE);
            }
            (Action::SettleRemoved, _) => {
                self.rests.insert(Matter::Removed, self.now + SETTLE_PACE);
            }
            _ => {}
        }
    }

    fn on_care(&mut self, is_busy: Option<bool>) {
        let Some(care) = &mut self.care else { return };
        let Some(is_busy) = is_busy else {
            // It is in service by now, or another host has it.
            self.cared.insert(care.volume, self.now);
            self.care = None;
            return;
        };
        if is_busy {
            care.busy_at = self.now;
        }
        let has_rested = self.now.since(care.busy_at) >= REST;
        if has_rested {
            self.rested.insert(care.volume, care.begun);
        }
        care.is_ending = has_rested || self.now.since(care.begun) >= CARE_MAX;
        self.rests.insert(Matter::Care, self.now + if care.is_ending { Duration::ZERO } else { CARE_PACE });
    }

    fn plan(&mut self, view: &View, out: Out) {
        self.rests.retain(|_, until| *until > self.now);
        if let Some(care) = self.care
            && (!self.is_right || !self.is_steward(view))
        {
            // Another one may be about to open it: closing changes nothing that anybody rests on.
            self.begin(Action::EndCare { volume: care.volume }, out);
        }
        if !self.is_right {
            return;
        }
        if !self.is_steward(view) {
            self.taken = None;
            // What was seen meanwhile is not known.
            self.aging.clear();
            self.beaten = None;
            self.copied = None;
            let record = view.get(STEWARD_KEY);
            if record.is_none_or(|record| *record.value == *self.config.host.as_bytes()) {
                let replaces = record.map_or(MetaVersion::ABSENT, |record| record.version);
                self.begin(Action::BeSteward { replaces }, out);
            }
            return;
        }
        self.look_after_deletions(view, out);
        self.look_after_trash(view, out);
        self.look_after_volumes(view, out);
        self.look_after_beat(view, out);
        self.look_after_copies(view, out);
        self.look_after_removed(view, out);
    }

    fn begin(&mut self, action: Action, out: Out) {
        let about = matter(&action);
        if self.rests.contains_key(&about) || !self.busy.insert(about) {
            return;
        }
        let id = ActionId(self.next_id);
        self.next_id += 1;
        self.under_way.insert(id, action.clone());
        out.push((id, action));
    }

    /// A transaction of the steward's: it compares that this host still is.
    fn commit(&mut self, volume: VolumeId, change: Change, records: (Compares, Writes), out: Out) {
        let (compares, writes) = records;
        let compares = self.as_steward(compares);
        self.begin(Action::Commit { volume, change, compares, writes }, out);
    }

    fn as_steward(&self, mut compares: Compares) -> Compares {
        if let Some(version) = self.taken.filter(|_| !self.config.mutations.all_are_stewards()) {
            compares.push((STEWARD_KEY.to_string(), version));
        }
        compares
    }

    // ---- deletions ----

    fn look_after_deletions(&mut self, view: &View, out: Out) {
        let begun: Vec<Record> = view.list(DELETING_PREFIX).cloned().collect();
        self.dropped.retain(|volume, _| view.get(&deleting_key(&volume.to_string())).is_some());
        for record in &begun {
            let Ok(deleting) = decode::<DeletingRecord>(&record.value) else { continue };
            let Ok(volume) = deleting.volume.parse::<VolumeId>() else { continue };
            match deletion::next(view, volume, &deleting, record.version) {
                deletion::Step::Commit(volume, change, compares, writes) => {
                    if self.config.mutations.drops_before_it_is_marked() {
                        self.drop_everywhere(volume, Epoch(u64::MAX >> 1), out);
                    }
                    self.commit(volume, change, (compares, writes), out);
                }
                deletion::Step::Drop { epoch, finish: (compares, writes) } => {
                    if self.drop_everywhere(volume, epoch, out) {
                        self.commit(volume, Change::Finish, (compares, writes), out);
                    }
                }
                deletion::Step::Unreadable => {}
            }
        }
    }

    /// True where all devices have dropped it.
    fn drop_everywhere(&mut self, volume: VolumeId, epoch: Epoch, out: Out) -> bool {
        let done = self.dropped.entry(volume).or_default();
        let left: Vec<Place> = self.places.difference(done).copied().collect();
        let is_done = left.is_empty() || self.config.mutations.finishes_early() && !done.is_empty();
        // Of none it is not known yet what the grid has.
        let is_known = !self.places.is_empty();
        for place in left {
            self.begin(Action::Drop { volume, epoch, place }, out);
        }
        is_done && is_known
    }

    // ---- the trash ----

    fn look_after_trash(&mut self, view: &View, out: Out) {
        let trash: Vec<(VolumeId, TrashRecord, MetaVersion)> = view.list(TRASH_PREFIX).filter_map(trashed).collect();
        self.aging.retain(|id, _| trash.iter().any(|(volume, ..)| volume == id));
        for (volume, record, version) in &trash {
            let is_over = record.minutes >= self.config.kept_minutes;
            if is_over {
                self.give_up(*volume, record, *version, false, out);
            } else if self.is_minute_over(*volume, *version) {
                let older = TrashRecord { minutes: record.minutes + 1, ..record.clone() };
                let key = format!("{TRASH_PREFIX}{volume}");
                let records = (vec![(key.clone(), *version)], vec![(key, Some(encode(&older)))]);
                self.commit(*volume, Change::Age, records, out);
            }
        }
        // What was given up before is on its way back.
        if trash.is_empty() || view.list(DELETING_PREFIX).next().is_some() {
            self.is_short = false;
            return;
        }
        if std::mem::take(&mut self.is_short) {
            let oldest = trash.iter().max_by_key(|(_, record, version)| (record.minutes, std::cmp::Reverse(*version)));
            let (volume, record, version) = oldest.expect("it is not empty");
            self.give_up(*volume, record, *version, true, out);
        } else {
            self.begin(Action::LookAtSpace, out);
        }
    }

    /// Whether the record has stood so for a minute. However long nobody looked, it is one.
    fn is_minute_over(&mut self, volume: VolumeId, version: MetaVersion) -> bool {
        let seen = self.aging.entry(volume).or_insert((version, self.now));
        if seen.0 != version {
            *seen = (version, self.now);
        }
        self.now.since(seen.1) >= self.config.minute || self.config.mutations.counts_looks()
    }

    fn give_up(&mut self, volume: VolumeId, record: &TrashRecord, version: MetaVersion, for_space: bool, out: Out) {
        let deleting = DeletingRecord { volume: volume.to_string(), name: record.name.clone(), other: Other::new() };
        let (key, next) = (format!("{TRASH_PREFIX}{volume}"), deleting_key(&deleting.volume));
        let is_compared = !self.config.mutations.gives_up_without_comparing();
        // Whoever serves it again has it back.
        let state = [(key.clone(), version), (export_key(volume), MetaVersion::ABSENT)];
        let compares = state.into_iter().filter(|_| is_compared).collect();
        let writes = vec![(key, None), (next, Some(encode(&deleting)))];
        self.commit(volume, Change::GiveUp { for_space }, (compares, writes), out);
    }

    // ---- volumes that nobody serves ----

    fn look_after_volumes(&mut self, view: &View, out: Out) {
        if let Some(care) = self.care {
            let volume = care.volume;
            return self
                .begin(if care.is_ending { Action::EndCare { volume } } else { Action::LookAtCare { volume } }, out);
        }
        let is_emptied = view.list(DRAINING_PREFIX).next().is_some() || !self.removed_since.is_empty();
        let every = if is_emptied { CARE_EVERY_DRAINING } else { CARE_EVERY };
        let last = |volume: &VolumeId| self.cared.get(volume).copied().unwrap_or(self.since);
        let due = unserved(view).filter(|volume| self.now.since(last(volume)) >= every).min_by_key(last);
        if let Some(volume) = due {
            self.begin(Action::OpenForCare { volume }, out);
        }
    }

    // ---- the store's beat ----

    fn look_after_beat(&mut self, view: &View, out: Out) {
        let record = view.get(BEAT_KEY);
        let version = record.map_or(MetaVersion::ABSENT, |record| record.version);
        let since = self.beaten.filter(|(seen, _)| *seen == version).map_or(self.now, |(_, since)| since);
        self.beaten = Some((version, since));
        let next = match record.map(|record| decode::<BeatRecord>(&record.value)) {
            // Of a store that an earlier release has made.
            None => beat::begin(None, 0, self.prng.next_u64()),
            Some(Ok(beat)) if self.now.since(since) >= self.config.minute => beat::next(&beat, self.prng.next_u64()),
            // It is not time yet; or it is of a release whose beat this one does not know.
            Some(_) => return,
        };
        let compares = self.as_steward(vec![(BEAT_KEY.to_string(), version)]);
        self.begin(Action::Beat { compares, writes: vec![(BEAT_KEY.to_string(), Some(encode(&next)))] }, out);
    }

    // ---- copies of the records ----

    fn look_after_copies(&mut self, view: &View, out: Out) {
        let is_old = |copy: &Copy| {
            self.now.since(copy.at) >= if self.is_changed || !copy.is_everywhere { copy.pause } else { COPY_EVERY }
        };
        if !self.copied.as_ref().is_none_or(is_old)
            || self.busy.contains(&Matter::Copy)
            || self.rests.contains_key(&Matter::Copy)
        {
            return;
        }
        self.is_changed = false;
        let fingerprint = fingerprint(view);
        let is_same =
            |copy: &Copy| copy.fingerprint == fingerprint && copy.is_everywhere && self.now.since(copy.at) < COPY_EVERY;
        if self.copied.as_ref().is_some_and(is_same) {
            return;
        }
        self.copied = Some(Copy { at: self.now, fingerprint, is_everywhere: false, pause: COPY_PAUSE });
        self.begin(Action::CopyRecords, out);
    }

    // ---- machines that were removed ----

    fn look_after_removed(&mut self, view: &View, out: Out) {
        let open = |record: &&Record| decode::<RemovedRecord>(&record.value).is_ok_and(|removed| !removed.made_good);
        let open: BTreeSet<String> = view.list(REMOVED_PREFIX).filter(open).map(|record| record.key.clone()).collect();
        self.removed_since.retain(|key, _| open.contains(key));
        for key in open {
            self.removed_since.entry(key).or_insert(self.now);
        }
        let Some(latest) = self.removed_since.values().max().copied() else { return };
        // Whoever serves a volume knows what it lacks; of the others it is known when they have had nothing left to do.
        if unserved(view).all(|volume| self.rested.get(&volume).is_some_and(|at| *at > latest)) {
            self.begin(Action::SettleRemoved, out);
        }
    }
}

fn trashed(record: &Record) -> Option<(VolumeId, TrashRecord, MetaVersion)> {
    let volume = record.key.strip_prefix(TRASH_PREFIX)?.parse().ok()?;
    Some((volume, decode(&record.value).ok()?, record.version))
}

/// Volumes that no host has in service, and whose data are to be kept; also those in the trash.
pub fn unserved(view: &View) -> impl Iterator<Item = VolumeId> {
    let id = |record: &Record| record.key[DELETING_PREFIX.len()..].parse().ok();
    let deleting: BTreeSet<VolumeId> = view.list(DELETING_PREFIX).filter_map(id).collect();
    let closed = view.volumes().filter(|volume| view.export(*volume).is_none());
    let there = closed.filter(|volume| view.volume(*volume).is_some_and(|known| !known.is_gone));
    there.filter(move |volume| !deleting.contains(volume))
}

/// Of all that lasts. Roots are not looked at: each change of theirs that matters is on the legs of its volume's log.
fn fingerprint(view: &View) -> u32 {
    let is_kept = |key: &str| !key.ends_with(ROOT_SUFFIX) && !FLEETING.iter().any(|fleeting| key.starts_with(fleeting));
    let lasting = view.list("").filter(|record| is_kept(&record.key));
    let bytes = |record: &Record| [record.key.as_bytes(), &[0], &record.value, &[0]].concat();
    crc32c(&lasting.flat_map(bytes).collect::<Vec<u8>>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_base::GridId;
    use holdfast_format::geometry::Layout;
    use holdfast_format::root::{Root, root_key};

    const VM: VolumeId = VolumeId(7);

    /// A steward, what it sees, and what it wants.
    struct Scene {
        now: Instant,
        view: View,
        steward: Steward,
        version: u64,
        wanted: Vec<(ActionId, Action)>,
        /// What is wanted every minute.
        beats: Vec<(ActionId, Action)>,
    }

    impl Scene {
        fn new() -> Scene {
            let now = Instant::ZERO + Duration::from_secs(1);
            let steward = Steward::new(now, Config::new("a", 7));
            let mut scene =
                Scene { now, view: View::new(None, None), steward, version: 0, wanted: Vec::new(), beats: Vec::new() };
            scene.put(&root_key(VM), &Root::new(GridId(1), VM, "vm", 1 << 30, Layout::DEFAULT).encode());
            scene.tell(Event::Store { is_right: true });
            let id = scene.take(|action| matches!(action, Action::BeSteward { .. })).expect("nobody is");
            let version = scene.put(STEWARD_KEY, b"a");
            scene.tell(Event::Outcome { id, outcome: Outcome::Steward(version) });
            scene
        }

        fn put(&mut self, key: &str, value: &[u8]) -> MetaVersion {
            self.version += 1;
            let version = MetaVersion(self.version);
            self.view.note(Record { key: key.to_string(), version, value: value.into() });
            version
        }

        fn tell(&mut self, event: Event) {
            let mut out = Effects::new();
            self.now = self.now + LOOK_PACE;
            self.steward.handle(self.now, &self.view, event, &mut out);
            self.steward.verify();
            let (beats, wanted): (Vec<_>, Vec<_>) =
                out.take().into_iter().partition(|(_, action)| matches!(action, Action::Beat { .. }));
            self.beats.extend(beats);
            self.wanted.extend(wanted);
        }

        fn pass(&mut self, span: Duration) {
            self.now = self.now + span;
            self.tell(Event::Tick);
        }

        /// What is under way of the kind, from here on carried out.
        fn take(&mut self, is_it: impl Fn(&Action) -> bool) -> Option<ActionId> {
            let at = self.wanted.iter().position(|(_, action)| is_it(action))?;
            Some(self.wanted.remove(at).0)
        }

        fn end(&mut self, is_it: impl Fn(&Action) -> bool, outcome: Outcome) {
            let id = self.take(is_it).unwrap_or_else(|| panic!("it wants {:?}", self.wanted));
            self.tell(Event::Outcome { id, outcome });
        }
    }

    #[test]
    fn the_beat_goes_on_once_a_minute() {
        let mut scene = Scene::new();
        let beats = |scene: &mut Scene| {
            let (id, Action::Beat { compares, writes }) = scene.beats.pop()? else { panic!("it is one") };
            assert!(compares.iter().any(|(key, _)| key == STEWARD_KEY), "{compares:?}");
            let (key, value) = &writes[0];
            scene.put(key, value.as_deref().expect("it is written"));
            scene.tell(Event::Outcome { id, outcome: Outcome::Done });
            decode::<BeatRecord>(value.as_deref().unwrap()).ok()
        };
        let first = beats(&mut scene).expect("the store has none");
        assert_eq!(first.count, 0);
        scene.pass(Duration::from_secs(50));
        assert_eq!(beats(&mut scene), None);
        scene.pass(Duration::from_secs(10));
        let second = beats(&mut scene).expect("a minute is over");
        assert_eq!((second.count, &second.lineage, second.marks.len()), (1, &first.lineage, 2));
    }

    fn is_copying(action: &Action) -> bool {
        *action == Action::CopyRecords
    }

    #[test]
    fn records_are_copied_when_what_lasts_has_changed() {
        let mut scene = Scene::new();
        let changed = || Event::Changed(Changes::default());
        scene.end(is_copying, Outcome::Copied { is_everywhere: true });
        scene.pass(COPY_PAUSE);
        scene.put("trend", b"1");
        scene.put(&root_key(VM), b"another root");
        scene.tell(changed());
        scene.pass(COPY_PAUSE);
        assert_eq!(scene.take(is_copying), None, "nobody would miss that");
        scene.put("name/vm", b"{}");
        scene.tell(changed());
        scene.end(is_copying, Outcome::Copied { is_everywhere: false });
        scene.pass(Duration::from_secs(1));
        assert_eq!(scene.take(is_copying), None);
        scene.pass(COPY_PAUSE);
        scene.end(is_copying, Outcome::Copied { is_everywhere: true });
        scene.pass(COPY_EVERY);
        scene.end(is_copying, Outcome::Failed);
        scene.pass(FAILED_FOR);
        assert_eq!(scene.take(is_copying), None, "it would fail again");
        scene.pass(COPY_PAUSE);
        assert!(scene.take(is_copying).is_some(), "nobody knows what was written");
    }

    #[test]
    fn what_is_new_is_soon_on_the_devices_where_that_costs_little() {
        let mut scene = Scene::new();
        let renamed = |scene: &mut Scene, to: &[u8]| {
            scene.put("name/vm", to);
            scene.tell(Event::Changed(Changes::default()));
        };
        // It is told 100 ms later, with every event.
        scene.end(is_copying, Outcome::Copied { is_everywhere: true });
        renamed(&mut scene, b"{}");
        scene.pass(Duration::from_millis(1_600));
        assert_eq!(scene.take(is_copying), None, "it is a twentieth of the time");
        scene.pass(Duration::from_millis(100));
        // Of many records it takes longer.
        scene.pass(Duration::from_secs(3));
        scene.end(is_copying, Outcome::Copied { is_everywhere: true });
        renamed(&mut scene, b"{ }");
        scene.pass(COPY_PAUSE - Duration::from_secs(4));
        assert_eq!(scene.take(is_copying), None);
        scene.pass(Duration::from_secs(1));
        assert!(scene.take(is_copying).is_some(), "however long it takes");
    }

    #[test]
    fn a_volume_is_in_care_until_it_has_rested_or_is_served() {
        let mut scene = Scene::new();
        let is_looking = |action: &Action| *action == Action::LookAtCare { volume: VM };
        scene.pass(CARE_EVERY);
        scene.end(|action| *action == Action::OpenForCare { volume: VM }, Outcome::Done);
        for _ in 0..20 {
            scene.pass(CARE_PACE);
            scene.end(is_looking, Outcome::Care { is_busy: Some(true) });
        }
        let rested_at = scene.now + REST;
        while scene.now <= rested_at {
            scene.pass(CARE_PACE);
            scene.end(is_looking, Outcome::Care { is_busy: Some(false) });
        }
        scene.end(|action| *action == Action::EndCare { volume: VM }, Outcome::Done);
        scene.pass(CARE_EVERY);
        scene.end(|action| *action == Action::OpenForCare { volume: VM }, Outcome::Done);
        scene.pass(CARE_PACE);
        scene.end(is_looking, Outcome::Care { is_busy: None });
        scene.pass(CARE_PACE);
        assert_eq!(scene.take(is_looking), None, "somebody serves it by now");
        scene.pass(CARE_EVERY);
        scene.end(|action| *action == Action::OpenForCare { volume: VM }, Outcome::Done);
        scene.tell(Event::Store { is_right: false });
        scene.end(is_looking, Outcome::Care { is_busy: Some(true) });
        scene.pass(CARE_PACE);
        scene.end(|action| *action == Action::EndCare { volume: VM }, Outcome::Done);
        scene.pass(CARE_EVERY);
        assert_eq!(scene.wanted.iter().find(|(_, action)| !is_copying(action)), None, "in doubt nothing begins");
    }

    #[test]
    fn who_has_lost_the_record_is_the_steward_no_more() {
        let mut scene = Scene::new();
        scene.put(STEWARD_KEY, b"b");
        scene.wanted.clear();
        scene.pass(CARE_EVERY);
        assert_eq!(scene.wanted, []);
        assert!(!scene.steward.is_steward(&scene.view));
    }
}
