//! What a host does as time goes by for what it has. It sees to snapshots by schedule, what fixed volumes have left, word between
//! separate clones and their origins, devices that are to be emptied unasked, how much space is taken, its machine's certificates,
//! and the key that signs them.
//!
//! Role: the shell looks at what there is when it is told to ([`Effect::Look`]), and tells what it saw; from that and the records
//! follows what is done ([`plan`]). Nothing is remembered but what is under way.
//!
//! ```text
//! every two seconds:  Look ──> shell ──Facts──> plan
//! plan ──actions, at most one a chore──> executor ──Outcome──> the next look
//! ```
//! Invariants
//! 1. Of one chore at most one action is under way.
//! 2. No action follows from what was seen before the end of the last one of that chore: it would be done twice.
//! 3. While the store is silent or not the right one no action begins.

use crate::schedule::{self, Snapshot};
use crate::view::View;
use holdfast_base::{DeviceId, Effects, Epoch, Instant, VolumeId};
use holdfast_format::meta::{
    KEPT_PREFIX, MACHINE_PREFIX, MachineRecord, SCHEDULE_PREFIX, decode, found_key, machine_key,
};
use holdfast_format::root::{Root, root_key};
use holdfast_format::schedule::ScheduleRecord;
use holdfast_format::sharing::SegmentRanges;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Pace of looking.
pub const LOOK_EVERY: Duration = Duration::from_secs(2);

/// Pause before what could not be done is tried again.
const FAILED_FOR: Duration = Duration::from_secs(20);

/// The record of a fixed volume follows when what is left has changed by this part of the size.
const NOTED_PART: u64 = 64;

/// A volume or clone with a schedule that this host serves.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Scheduled {
    pub volume: VolumeId,
    pub snapshots: Vec<Snapshot>,
}

/// A fixed volume that this host serves, or has the care of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReservationNow {
    pub volume: VolumeId,
    pub size_bytes: u64,
    /// It is open; else what was seen last stands.
    pub is_open: bool,
    /// What its record says, and what is so: bytes that do not count as written, and that it has left to write.
    pub noted: (u64, u64),
    pub now: (u64, u64),
}

impl ReservationNow {
    /// What its record is to say, where that is to be written: bytes that do not count, bytes left, and whether the first are others.
    pub fn to_note(&self) -> Option<(u64, u64, bool)> {
        let ((noted_base, noted_left), (base_bytes, left_bytes)) = (self.noted, self.now);
        let has_new_base = self.is_open && base_bytes != noted_base;
        let moved = left_bytes.abs_diff(noted_left);
        let is_far = moved > self.size_bytes / NOTED_PART || !self.is_open && moved > 0;
        let base_bytes = if has_new_base { base_bytes } else { noted_base };
        (has_new_base || is_far).then_some((base_bytes, left_bytes, has_new_base))
    }
}

/// A volume that is open here and shares segments with others.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SharingNow {
    pub volume: VolumeId,
    /// Separate clones that may need what it holds.
    pub dependents: Vec<VolumeId>,
    /// Of a separate clone: its origin, and what it names of that, where its record is of another generation.
    pub names: Option<(VolumeId, SegmentRanges)>,
    /// Another one when what it names may have become less, or another opening tells: epoch, and a count.
    pub generation: (Epoch, u64),
}

/// A device that this host reaches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceNow {
    pub device: DeviceId,
    pub is_draining: bool,
    /// Its drive expects to fail.
    pub is_failing: bool,
    /// How long volumes have done without it, where they do.
    pub bypassed_for: Option<Duration>,
}

/// What was seen.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Facts {
    /// Since 1970, by this machine's clock.
    pub wall_ms: u64,
    pub scheduled: Vec<Scheduled>,
    pub reservations: Vec<ReservationNow>,
    pub sharing: Vec<SharingNow>,
    pub devices: Vec<DeviceNow>,
    /// How much is taken was noted some time ago.
    pub space_is_due: bool,
    /// Of this machine's certificates most of their time is used up.
    pub certificates_are_due: bool,
    /// This machine has the key of the grid's authority.
    pub has_authority: bool,
}

/// What is done about one thing at a time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Chore {
    Snapshots(VolumeId),
    Reservation(VolumeId),
    /// What a separate clone names.
    Names(VolumeId),
    /// What the origin of a separate clone knows of it.
    Dependent(VolumeId),
    Device(DeviceId),
    Space,
    Certificates,
    Authority,
    Machine,
}

/// A snapshot by schedule.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Take {
    pub name: String,
    /// Only while the newest by schedule is the one with this layer, if any: another one may have been taken since, here or by a host
    /// that had the volume meanwhile.
    pub after: Option<u32>,
    /// That one, where it is dated in the future.
    pub ahead: Option<String>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// A snapshot is taken, and those go that no rule keeps.
    Snapshots {
        volume: VolumeId,
        take: Option<Take>,
        drops: Vec<String>,
    },
    /// The record of a fixed volume is to say this; the reactor, too, where what does not count has changed.
    NoteReservation {
        volume: VolumeId,
        base_bytes: u64,
        left_bytes: u64,
        has_new_base: bool,
    },
    /// The record of a separate clone is to say what it names of its origin.
    NoteNames {
        origin: VolumeId,
        dependent: VolumeId,
        names: SegmentRanges,
        generation: (Epoch, u64),
    },
    /// An origin that is open here hears what the record of a separate clone says.
    TellNames {
        origin: VolumeId,
        dependent: VolumeId,
    },
    /// There seems to be no such clone. Where that is so, and nobody at this host is at work on it, it is given up, so that nobody
    /// else finishes it; then its origin hears that it names nothing.
    GiveUp {
        origin: VolumeId,
        dependent: VolumeId,
    },
    /// A device is to be emptied though nobody asked.
    Drain {
        device: DeviceId,
    },
    /// How much is taken is noted.
    NoteSpace,
    Renew,
    /// One of these hosts is to have the key of the grid's authority, the first that takes it.
    GiveAuthority {
        to: Vec<String>,
    },
    /// The record of this machine is to say what it has: whoever wants something signed goes by it.
    NoteMachine,
}

impl Action {
    pub fn chore(&self) -> Chore {
        match self {
            Action::Snapshots { volume, .. } => Chore::Snapshots(*volume),
            Action::NoteReservation { volume, .. } => Chore::Reservation(*volume),
            Action::NoteNames { dependent, .. } => Chore::Names(*dependent),
            Action::TellNames { dependent, .. } | Action::GiveUp { dependent, .. } => Chore::Dependent(*dependent),
            Action::Drain { device } => Chore::Device(*device),
            Action::NoteSpace => Chore::Space,
            Action::Renew => Chore::Certificates,
            Action::GiveAuthority { .. } => Chore::Authority,
            Action::NoteMachine => Chore::Machine,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct LookId(pub u64);

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// What was seen; nothing where it could not be looked.
    Seen {
        look: LookId,
        facts: Option<Facts>,
    },
    Outcome {
        chore: Chore,
        is_done: bool,
    },
    Store {
        is_right: bool,
    },
    Tick,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Effect {
    Look(LookId),
    Act(Action),
}

#[derive(Clone, Debug)]
pub struct Config {
    /// This host's name.
    pub host: String,
    /// A device that volumes have done without for so long is emptied.
    pub rebuild_after: Duration,
    /// The authority's key goes to a second machine.
    pub spreads_authority: bool,
    pub mutations: Mutations,
}

holdfast_base::mutations! {
    /// Deliberate faults that the simulator must find; all off outside of its check.
    pub struct Mutations {
        /// What was seen before an action's end counts.
        believes_old_looks,
        /// Two actions of a chore may be under way.
        begins_twice,
    }
}

pub struct Upkeep {
    config: Config,
    is_right: bool,
    looks: u64,
    /// The look that is under way.
    looking: Option<LookId>,
    look_at: Instant,
    under_way: BTreeSet<Chore>,
    /// From which look on what is seen counts for a chore, and from when.
    fresh_from: BTreeMap<Chore, (LookId, Instant)>,
}

impl Upkeep {
    pub fn new(config: Config) -> Upkeep {
        Upkeep {
            config,
            is_right: false,
            looks: 0,
            looking: None,
            look_at: Instant::ZERO,
            under_way: BTreeSet::new(),
            fresh_from: BTreeMap::new(),
        }
    }

    /// Runs one event to completion.
    pub fn handle(&mut self, now: Instant, view: &View, event: Event, out: &mut Effects<Effect>) {
        match event {
            Event::Seen { look, facts } if self.looking == Some(look) => {
                self.looking = None;
                self.look_at = now + LOOK_EVERY;
                if let Some(facts) = facts.filter(|_| self.is_right) {
                    self.begin(now, view, look, &facts, out);
                }
            }
            Event::Seen { .. } => {}
            Event::Outcome { chore, is_done } => {
                self.under_way.remove(&chore);
                let pause = if is_done { Duration::ZERO } else { FAILED_FOR };
                self.fresh_from.insert(chore, (LookId(self.looks + 1), now + pause));
            }
            Event::Store { is_right } => self.is_right = is_right,
            Event::Tick => {}
        }
        if self.looking.is_none() && self.look_at <= now {
            self.looks += 1;
            self.looking = Some(LookId(self.looks));
            out.push(Effect::Look(LookId(self.looks)));
        }
    }

    /// When it wants an [`Event::Tick`]; nothing while it waits for what is seen.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.looking.is_none().then_some(self.look_at)
    }

    fn begin(&mut self, now: Instant, view: &View, look: LookId, facts: &Facts, out: &mut Effects<Effect>) {
        let mutations = self.config.mutations;
        self.fresh_from.retain(|_, (from, at)| *from > look || *at > now);
        for action in plan(view, facts, &self.config) {
            let chore = action.chore();
            let is_busy = self.under_way.contains(&chore) && !mutations.begins_twice();
            let is_old = self.fresh_from.contains_key(&chore) && !mutations.believes_old_looks();
            if !is_busy && !is_old {
                self.under_way.insert(chore);
                out.push(Effect::Act(action));
            }
        }
    }
}

/// What is to be done, by what is there.
pub fn plan(view: &View, facts: &Facts, config: &Config) -> Vec<Action> {
    let snapshots = facts.scheduled.iter().filter_map(|seen| of_schedule(view, seen, facts.wall_ms, config));
    let reservation = facts.reservations.iter().filter_map(of_reservation);
    let drains = facts.devices.iter().filter(|seen| is_to_be_emptied(view, seen, config));
    let drains = drains.map(|seen| Action::Drain { device: seen.device });
    let renew = facts.certificates_are_due.then_some(Action::Renew);
    let space = facts.space_is_due.then_some(Action::NoteSpace);
    let authority = of_authority(view, facts, config);
    let words = facts.sharing.iter().flat_map(|seen| of_sharing(view, seen));
    let of_volumes = snapshots.chain(reservation).chain(words);
    of_volumes.chain(drains).chain(space).chain(renew).chain(authority).chain(of_machine(view, facts, config)).collect()
}

/// A clone whose root stands in the view, or that a recovery has found, names what its record says. One without may be new: whoever
/// carries that out looks again. Members of a sharing domain write their records themselves, and its store reads them.
fn of_sharing(view: &View, seen: &SharingNow) -> Vec<Action> {
    let is_store = view.volume(seen.volume).is_some_and(|volume| volume.is_store);
    let own = seen.names.iter().map(|(origin, names)| Action::NoteNames {
        origin: *origin,
        dependent: seen.volume,
        names: names.clone(),
        generation: seen.generation,
    });
    let of_others = seen.dependents.iter().filter_map(|dependent| {
        let (origin, dependent) = (seen.volume, *dependent);
        let root = view.get(&root_key(dependent)).and_then(|record| Root::decode(&record.value).ok());
        let stands = root.is_some_and(|root| !root.deleted) || view.get(&found_key(dependent)).is_some();
        match stands {
            false => Some(Action::GiveUp { origin, dependent }),
            true => (!is_store).then_some(Action::TellNames { origin, dependent }),
        }
    });
    own.chain(of_others).collect()
}

fn of_schedule(view: &View, seen: &Scheduled, wall_ms: u64, config: &Config) -> Option<Action> {
    let volume = seen.volume;
    let served = view.export(view.origin_of_clone(volume).unwrap_or(volume));
    let is_here = served.is_some_and(|(_, export)| export.host == config.host || export.host.is_empty());
    if !is_here {
        return None;
    }
    let record: ScheduleRecord = decode(&view.get(&format!("{SCHEDULE_PREFIX}{volume}"))?.value).ok()?;
    let take = schedule::is_due(&record, &seen.snapshots, wall_ms).then(|| Take {
        name: schedule::name_at(wall_ms),
        after: schedule::newest(&seen.snapshots).map(|snapshot| snapshot.layer),
        ahead: schedule::ahead(&seen.snapshots, wall_ms).map(|snapshot| snapshot.name.clone()),
    });
    let drops = schedule::superfluous(&record, &seen.snapshots);
    (take.is_some() || !drops.is_empty()).then_some(Action::Snapshots { volume, take, drops })
}

fn of_reservation(seen: &ReservationNow) -> Option<Action> {
    let (base_bytes, left_bytes, has_new_base) = seen.to_note()?;
    Some(Action::NoteReservation { volume: seen.volume, base_bytes, left_bytes, has_new_base })
}

/// Its drive is failing, or volumes have done without it for as long as an absent node is waited for; and no operator wants to go
/// on with it.
fn is_to_be_emptied(view: &View, seen: &DeviceNow, config: &Config) -> bool {
    let is_bypassed = seen.bypassed_for.is_some_and(|span| span >= config.rebuild_after);
    let is_kept = || view.get(&format!("{KEPT_PREFIX}{}", seen.device)).is_some();
    !seen.is_draining && (seen.is_failing || is_bypassed) && !is_kept()
}

/// The key came or went otherwise than from another host: by hand.
fn of_machine(view: &View, facts: &Facts, config: &Config) -> Option<Action> {
    let record: MachineRecord = decode(&view.get(&machine_key(&config.host))?.value).ok()?;
    (record.signs != facts.has_authority).then_some(Action::NoteMachine)
}

/// Where no other machine has the key that this one has: whoever is up may get it, in order of names.
fn of_authority(view: &View, facts: &Facts, config: &Config) -> Option<Action> {
    if !config.spreads_authority || !facts.has_authority {
        return None;
    }
    let others = view.list(MACHINE_PREFIX).filter_map(|record| {
        let name = record.key.strip_prefix(MACHINE_PREFIX).filter(|name| *name != config.host)?;
        Some((name.to_string(), decode::<MachineRecord>(&record.value).ok()?))
    });
    let others: Vec<(String, MachineRecord)> = others.collect();
    if others.iter().any(|(_, record)| record.signs) {
        return None;
    }
    let to: Vec<String> = others.into_iter().map(|(name, _)| name).filter(|name| view.has_host(name)).collect();
    (!to.is_empty()).then_some(Action::GiveAuthority { to })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::{Asked, Record};
    use holdfast_base::{GridId, MetaVersion};
    use holdfast_format::geometry::Layout;
    use holdfast_format::meta::{ExportRecord, Other, encode, export_key, host_key};
    use holdfast_format::sharing::STORE_EPOCHS;

    const VOLUME: VolumeId = VolumeId(7);
    const HOUR_MS: u64 = 3_600_000;

    fn config() -> Config {
        let (host, rebuild_after) = ("a".to_string(), Duration::from_secs(600));
        Config { host, rebuild_after, spreads_authority: true, mutations: Mutations::default() }
    }

    fn view(records: &[(String, Vec<u8>)]) -> View {
        let mut view = View::new(None, None);
        let record = |(n, (key, value)): (usize, &(String, Vec<u8>))| Record {
            key: key.clone(),
            version: MetaVersion(n as u64 + 1),
            value: value.as_slice().into(),
        };
        view.replace(Asked::default(), records.len() as u64, records.iter().enumerate().map(record).collect()).unwrap();
        view
    }

    fn scheduled_at(host: &str) -> View {
        let root = Root::new(GridId(1), VOLUME, "vm", 1 << 30, Layout::DEFAULT);
        let export = ExportRecord { host: host.to_string(), ..ExportRecord::default() };
        let record = ScheduleRecord::new("1h".parse().unwrap(), "2h".parse().unwrap());
        view(&[
            (root_key(VOLUME), root.encode()),
            (export_key(VOLUME), encode(&export)),
            (format!("{SCHEDULE_PREFIX}{VOLUME}"), encode(&record)),
        ])
    }

    fn snapshots(hours: &[u64]) -> Vec<Snapshot> {
        let taken = hours.iter().enumerate().map(|(layer, hour)| {
            let created_ms = hour * HOUR_MS;
            Snapshot { name: schedule::name_at(created_ms), layer: layer as u32, created_ms }
        });
        taken.collect()
    }

    fn seen(hour: u64, taken: &[u64]) -> Facts {
        let scheduled = vec![Scheduled { volume: VOLUME, snapshots: snapshots(taken) }];
        Facts { wall_ms: hour * HOUR_MS, scheduled, ..Facts::default() }
    }

    /// What is done upon a look.
    fn look(upkeep: &mut Upkeep, view: &View, now: Instant, facts: Facts) -> Vec<Action> {
        let mut out = Effects::new();
        upkeep.handle(now, view, Event::Tick, &mut out);
        let looks: Vec<LookId> =
            out.take().into_iter().filter_map(|e| if let Effect::Look(id) = e { Some(id) } else { None }).collect();
        let [id] = looks[..] else { panic!("it does not look: {looks:?}") };
        upkeep.handle(now, view, Event::Seen { look: id, facts: Some(facts) }, &mut out);
        out.take().into_iter().filter_map(|e| if let Effect::Act(action) = e { Some(action) } else { None }).collect()
    }

    fn at(s: u64) -> Instant {
        Instant::ZERO + Duration::from_secs(s)
    }

    #[test]
    fn a_clone_that_stands_has_its_word_told_and_one_that_does_not_is_given_up() {
        let root = |volume: VolumeId| Root::new(GridId(1), volume, "vm", 1 << 30, Layout::DEFAULT);
        let (stands, deleted, begun) = (VolumeId(8), VolumeId(9), VolumeId(10));
        let gone = Root { deleted: true, epoch: Epoch(3), ..root(deleted) };
        let placeholder = Root { deleted: true, ..root(begun) };
        let roots = [root(VOLUME), root(stands), gone, placeholder];
        let found = VolumeId(12);
        let mut records = roots.map(|root| (root_key(root.volume), root.encode())).to_vec();
        records.push((found_key(found), b"{}".to_vec()));
        let view = view(&records);
        let names = (VOLUME, SegmentRanges::default());
        let origin = SharingNow {
            volume: VOLUME,
            dependents: vec![stands, deleted, begun, VolumeId(11), found],
            names: None,
            generation: (Epoch(1), 0),
        };
        let clone = SharingNow { volume: stands, dependents: vec![], names: Some(names), generation: (Epoch(2), 5) };
        let facts = Facts { sharing: vec![origin, clone], ..Facts::default() };
        let give_up = |dependent| Action::GiveUp { origin: VOLUME, dependent };
        let note = Action::NoteNames {
            origin: VOLUME,
            dependent: stands,
            names: SegmentRanges::default(),
            generation: (Epoch(2), 5),
        };
        let tell = |dependent| Action::TellNames { origin: VOLUME, dependent };
        let planned = plan(&view, &facts, &config());
        let gone = [deleted, begun, VolumeId(11)].map(give_up).to_vec();
        assert_eq!(planned, [vec![tell(stands)], gone, vec![tell(found), note.clone()]].concat());
        assert_ne!(
            note.chore(),
            planned[0].chore(),
            "a clone's record and its origin's word don't wait for each other"
        );
    }

    #[test]
    fn a_store_reads_what_its_members_write_and_hears_of_those_that_are_gone() {
        let root = |volume: VolumeId| Root::new(GridId(1), volume, "vm", 1 << 30, Layout::DEFAULT);
        let (stands, deleted) = (VolumeId(8), VolumeId(9));
        let store = Root { epoch: STORE_EPOCHS, ..root(VOLUME) };
        let roots = [store, root(stands), Root { deleted: true, epoch: Epoch(3), ..root(deleted) }];
        let view = view(&roots.map(|root| (root_key(root.volume), root.encode())));
        let dependents = vec![stands, deleted];
        let seen = SharingNow { volume: VOLUME, dependents, names: None, generation: (STORE_EPOCHS, 0) };
        let facts = Facts { sharing: vec![seen], ..Facts::default() };
        assert_eq!(plan(&view, &facts, &config()), [Action::GiveUp { origin: VOLUME, dependent: deleted }]);
    }

    #[test]
    fn a_snapshot_is_taken_once_and_what_no_rule_keeps_goes_after_it() {
        let view = scheduled_at("a");
        let mut upkeep = Upkeep::new(config());
        let mut out = Effects::new();
        assert_eq!(look(&mut upkeep, &view, at(2), seen(9, &[7, 8])), [], "nobody knows yet what the store is like");
        upkeep.handle(at(2), &view, Event::Store { is_right: true }, &mut out);
        let take = Take { name: schedule::name_at(9 * HOUR_MS), after: Some(2), ahead: None };
        let drops = vec![schedule::name_at(6 * HOUR_MS)];
        let taken = Action::Snapshots { volume: VOLUME, take: Some(take), drops };
        assert_eq!(look(&mut upkeep, &view, at(4), seen(9, &[6, 7, 8])), std::slice::from_ref(&taken));
        assert_eq!(look(&mut upkeep, &view, at(6), seen(9, &[6, 7, 8])), [], "it is under way");
        // A look that was begun before the end tells of before it.
        upkeep.handle(at(8), &view, Event::Tick, &mut out);
        let chore = taken.chore();
        upkeep.handle(at(8), &view, Event::Outcome { chore, is_done: true }, &mut out);
        let old = Event::Seen { look: LookId(4), facts: Some(seen(9, &[6, 7, 8])) };
        upkeep.handle(at(8), &view, old, &mut out);
        assert_eq!(out.take(), [Effect::Look(LookId(4))]);
        let drops = Action::Snapshots { volume: VOLUME, take: None, drops: vec![schedule::name_at(7 * HOUR_MS)] };
        assert_eq!(look(&mut upkeep, &view, at(10), seen(9, &[7, 8, 9])), std::slice::from_ref(&drops));
        // What could not be done is not tried all the time.
        upkeep.handle(at(11), &view, Event::Outcome { chore, is_done: false }, &mut out);
        assert_eq!(look(&mut upkeep, &view, at(12), seen(9, &[7, 8, 9])), []);
        assert_eq!(look(&mut upkeep, &view, at(32), seen(9, &[7, 8, 9])), [drops]);
        assert_eq!(plan(&scheduled_at("b"), &seen(9, &[7, 8]), &config()), [], "it is another host's");
    }

    #[test]
    fn fixed_volumes_are_noted_when_enough_has_changed() {
        let reservation =
            |is_open, noted, now| ReservationNow { volume: VOLUME, size_bytes: 6400, is_open, noted, now };
        let noted = |base_bytes, left_bytes, has_new_base| {
            Some(Action::NoteReservation { volume: VOLUME, base_bytes, left_bytes, has_new_base })
        };
        assert_eq!(of_reservation(&reservation(true, (0, 1000), (0, 900))), None);
        assert_eq!(of_reservation(&reservation(true, (0, 1000), (0, 899))), noted(0, 899, false));
        assert_eq!(of_reservation(&reservation(true, (0, 1000), (50, 1000))), noted(50, 1000, true));
        assert_eq!(
            of_reservation(&reservation(false, (7, 1000), (50, 1000))),
            None,
            "of one that is closed nothing is seen"
        );
        assert_eq!(of_reservation(&reservation(false, (7, 1000), (50, 999))), noted(7, 999, false));
    }

    #[test]
    fn what_fails_or_stays_bypassed_is_emptied_unless_it_is_kept() {
        let (kept, other) = (DeviceId(1), DeviceId(2));
        let view = view(&[(format!("{KEPT_PREFIX}{kept}"), b"{}".to_vec())]);
        let seen = |device, is_draining, is_failing, bypassed_s: Option<u64>| {
            let bypassed_for = bypassed_s.map(Duration::from_secs);
            is_to_be_emptied(&view, &DeviceNow { device, is_draining, is_failing, bypassed_for }, &config())
        };
        assert!(!seen(other, false, false, None) && !seen(other, false, false, Some(599)));
        assert!(seen(other, false, false, Some(600)) && seen(other, false, true, None));
        assert!(!seen(other, true, true, Some(900)) && !seen(kept, false, true, Some(900)));
    }

    #[test]
    fn the_authoritys_key_goes_to_a_machine_that_is_up_where_no_other_has_it() {
        let machine = |signs| {
            let (id, home, release) = (String::new(), String::new(), String::new());
            let (address, gone_s, certificates_end_s) = (None, None, None);
            encode(&MachineRecord {
                id,
                home,
                address,
                release,
                started_s: 0,
                gone_s,
                certificates_end_s,
                signs,
                announced_until_s: None,
                other: Other::new(),
            })
        };
        let with = |signs| {
            view(&[
                (machine_key("a"), machine(true)),
                (machine_key("b"), machine(signs)),
                (machine_key("c"), machine(false)),
                (machine_key("d"), machine(false)),
                (host_key("c"), b"of a newer release".to_vec()),
                (host_key("d"), b"of a newer release".to_vec()),
            ])
        };
        let facts = |has_authority| Facts { has_authority, ..Facts::default() };
        let to = vec!["c".to_string(), "d".to_string()];
        assert_eq!(plan(&with(false), &facts(true), &config()), [Action::GiveAuthority { to }]);
        assert_eq!(plan(&with(false), &facts(false), &config()), [Action::NoteMachine], "a file was deleted");
        let at_c = Config { host: "c".to_string(), ..config() };
        assert_eq!(plan(&with(false), &facts(true), &at_c), [Action::NoteMachine], "its operator had the words");
        assert_eq!(plan(&with(false), &facts(false), &at_c), []);
        assert_eq!(plan(&with(true), &facts(true), &config()), [], "b has it, up or not");
        let alone = Config { spreads_authority: false, ..config() };
        assert_eq!(plan(&with(false), &facts(true), &alone), []);
    }
}
