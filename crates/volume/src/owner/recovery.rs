//! Recovery: between the fences of an opening and its first ledger log and map are put together again, in slices, since
//! guests of other volumes wait for each turn. Before a hand-over the new owner reads the map while the old one serves.
//!
//! States: rebuilding (what legs hold becomes the log) -> fetching (the runs of the newest checkpoint) -> taking in
//! (they go into the map) -> counting (what the map takes from the log) -> replaying (what follows the checkpoint) ->
//! looking (for places in entries that are gone) -> marking (segments that are kept for others) -> done: the opening
//! goes on ([`super::opening`]).
//!
//! What may happen between two slices: answers of legs that came too late to count, other fences, a node that has
//! promised a higher epoch (then it rests for good), closing, and the end of a preload. Nobody is served, and nothing
//! is written, cleaned or freed: so nothing else changes map, log or table.
//!
//! States of an opening that begins with a preload: loading the root -> preloading (the checkpoint that the root names
//! is read) -> applying (it is taken in) -> preloaded, or unreadable ([`Notice::Preloaded`]) -> as ever, from
//! [`Event::Open`] on, which may come at any time.
//!
//! Nothing is claimed, fenced or written by it, and nothing is taken on trust later: the opening finds the checkpoint
//! that it has to begin with by itself. Where that goes on from the runs that were read, only the others are. Runs
//! never change, and each is known by its place and checksum; the data of what lay in the log are put in when it is
//! counted.
//!
//! Faults: a run that can't be read, which is said once. The old owner may delete what is read beforehand, and a node
//! may be away. An opening then may be able to read it, since it knows a newer one from the log. Who waits decides.
//!
//! [`Event::Open`]: crate::Event::Open

use crate::api::{Effect, Notice, PreloadState, State};
use crate::controller::{Controller, Out};
use crate::log::window::{Done, Entry, Log};
use crate::map::run::{BYTES_A_RUN, CRCS_A_RUN};
use crate::map::{LogRun, RunLoads, RunsLeft, Sliced};
use crate::owner::opening::{Found, Step};
use crate::segment::fetch::FetchError;
use crate::segment::{Kind, Named, SegmentInfo};
use holdfast_base::{Buf, Key, LedgerId, Lsn, Urgency};
use holdfast_format::ledger::{AckRule, LedgerRef};
use holdfast_format::record::{Checkpoint, MetaPointer, Record};
use holdfast_format::root::OwnNumbers;
use std::collections::BTreeMap;

/// What is done, in runs of the map, without asking whether the turn has done its slice.
const AT_ONCE: usize = 32;

/// How far it has come.
#[derive(Debug, Default)]
pub(crate) enum Recovery {
    /// Nothing can be done: runs are awaited, can't be read, or all is done.
    #[default]
    Waiting,
    Rebuilding(Rebuilding),
    TakingIn(RunsLeft),
    /// From there on in the overlay.
    Counting(u64),
    Replaying,
    Looking(u64),
    Marking,
}

/// What legs hold, and the log does not have yet.
#[derive(Debug)]
pub(crate) struct Rebuilding {
    found: BTreeMap<Lsn, Found>,
    /// The newest checkpoint that root and log have named so far.
    newest: Checkpoint,
}

/// What was taken in.
#[derive(Debug)]
pub(crate) struct Preloaded {
    runs: Vec<MetaPointer>,
    own: OwnNumbers,
}

impl Controller {
    /// Where the log ends is known.
    pub(super) fn begin_recovery(&mut self, found: BTreeMap<Lsn, Found>, out: Out) {
        self.step(Step::Recovering);
        self.log = Log::starting_after(self.trim_floor());
        let newest = self.root().checkpoint.clone();
        self.opening.as_mut().expect("opening").recovery = Recovery::Rebuilding(Rebuilding { found, newest });
        self.recover(out);
    }

    /// As far as this turn's slice allows.
    pub(super) fn recover(&mut self, out: Out) {
        loop {
            let now = self.basis.now;
            let Some(opening) = &mut self.opening else { return };
            if opening.slice_at.is_some_and(|at| at > now) {
                return;
            }
            opening.slice_at = None;
            if matches!(opening.recovery, Recovery::Waiting) {
                return;
            }
            if self.turn.left(&self.basis) == 0 {
                opening.slice_at = Some(self.basis.next_slice_at());
                return;
            }
            match std::mem::take(&mut opening.recovery) {
                Recovery::Waiting => {}
                Recovery::Rebuilding(rebuilding) => self.rebuild_log(rebuilding, out),
                Recovery::TakingIn(runs) => self.take_runs_in(runs, out),
                Recovery::Counting(from) => self.count_live_entries(from),
                Recovery::Replaying => self.replay(),
                Recovery::Looking(from) => self.assert_no_dangling_log_places(from),
                Recovery::Marking => self.mark_and_go_on(out),
            }
        }
    }

    /// What may be done until that is asked again.
    pub(super) fn recovers_at_once(&self) -> usize {
        self.turn.left(&self.basis).max(AT_ONCE)
    }

    fn recovery_goes_on(&mut self, recovery: Recovery) {
        self.opening.as_mut().expect("opening").recovery = recovery;
    }

    // ---- the log ----

    fn rebuild_log(&mut self, mut rebuilding: Rebuilding, out: Out) {
        let (ledgers, rule) = (self.root().ledgers.clone(), self.topology().rule_now());
        let (floor, end) = (self.log.trimmed, self.opening.as_ref().expect("opening").end);
        let (work_max, mut work) = (self.recovers_at_once(), 0);
        while work < work_max {
            let Some((lsn, found)) = rebuilding.found.pop_first() else {
                self.turn.slice("opening: the log is put together", work);
                return self.load_checkpoint(rebuilding.newest, out);
            };
            work += 1 + found.entry.header.len() / BYTES_A_RUN + found.entry.crcs.len() / CRCS_A_RUN;
            if lsn > floor && lsn <= end {
                let entry = self.recovered_entry(lsn, found, &ledgers, rule);
                if let Record::Checkpoint(checkpoint) = &entry.record
                    && checkpoint.lsn >= rebuilding.newest.lsn
                {
                    rebuilding.newest = checkpoint.clone();
                }
                assert_eq!(self.log.push(entry), lsn, "recovered LSNs are consecutive");
            }
        }
        self.turn.slice("opening: the log is put together", work);
        self.recovery_goes_on(Recovery::Rebuilding(rebuilding));
    }

    fn recovered_entry(&self, lsn: Lsn, found: Found, ledgers: &[LedgerRef], rule: AckRule) -> Entry {
        let root = self.root();
        let record = Record::decode_in(root.key_width(), &found.entry.header);
        let record = record.expect("a record whose checksums hold can be read");
        if let Some(feature) = record.feature() {
            let used = &root.features;
            assert!(used.has(feature), "entry {lsn} is of feature {feature:?}, and the volume uses {used:?}");
        }
        let (ledger, have) = best_holder(ledgers, &found.holders, rule);
        Entry {
            header: found.entry.header,
            record,
            crcs: found.entry.crcs.into(),
            payload: found.payload,
            encrypted: None,
            done: Done::Nothing,
            urgency: Urgency::Normal,
            ledger,
            have,
            sent: 0,
            appended_at: self.basis.now,
            acknowledged: None,
            position: 0,
            live_blocks: 0,
            is_hot: false,
            destaging: false,
        }
    }

    // ---- the checkpoint ----

    fn load_checkpoint(&mut self, checkpoint: Checkpoint, out: Out) {
        assert!(checkpoint.lsn >= self.log.trimmed, "the log is not trimmed beyond its checkpoint");
        self.checkpointer.resume(checkpoint.clone());
        let loaded = self.use_preloaded(&checkpoint.runs);
        self.opening.as_mut().expect("opening").was_preloaded = loaded > 0;
        self.fetch_runs(checkpoint.runs, loaded, out);
    }

    /// Of these runs the map has the first `loaded` ones. [`Controller::on_runs`] when all are there.
    pub(crate) fn fetch_runs(&mut self, pointers: Vec<MetaPointer>, loaded: usize, out: Out) {
        let (runs, wanted) = RunLoads::begin(pointers, loaded);
        self.opening.as_mut().expect("opening").runs = runs;
        if wanted.is_empty() {
            return self.on_runs(out);
        }
        for wanted in wanted {
            self.fetch(wanted, out);
        }
    }

    pub(crate) fn on_run_part(&mut self, at: usize, part: u32, result: Result<Buf, FetchError>, out: Out) {
        let Some(opening) = self.opening.as_mut().filter(|opening| opening.runs.awaits(at)) else { return };
        let Ok(bytes) = result else {
            if self.is_preloading() {
                return self.on_preloaded(None, out);
            }
            return self.opening_waits(
                "the volume's checkpoint can't be read: more of its copies are bad than tolerated",
                out,
            );
        };
        if opening.runs.on_part(at, part, bytes) {
            self.on_runs(out);
        }
    }

    fn on_runs(&mut self, out: Out) {
        if self.is_preloading() {
            return self.apply_preload(out);
        }
        let opening = self.opening.as_mut().expect("opening");
        opening.recovery = Recovery::TakingIn(opening.runs.take());
        self.progress_opening(out);
    }

    fn take_runs_in(&mut self, mut runs: RunsLeft, out: Out) {
        let work_max = self.recovers_at_once();
        let taken = self.map.load_runs(&mut runs, work_max, &mut self.segments, &self.log);
        // What a checkpoint says is no change since it.
        self.segments.take_dirty();
        let Ok(Sliced { work, is_done }) = taken else {
            if self.is_preloading() {
                return self.on_preloaded(None, out);
            }
            return self.opening_waits("the volume's checkpoint can't be read: its checksum is wrong", out);
        };
        self.turn.slice("opening: the map is read", work);
        if !is_done {
            return self.recovery_goes_on(Recovery::TakingIn(runs));
        }
        if self.is_preloading() {
            return self.on_preloaded(Some(runs.into_pointers()), out);
        }
        self.on_runs_in_map(runs.into_pointers(), out);
    }

    fn on_runs_in_map(&mut self, runs: Vec<MetaPointer>, out: Out) {
        self.drive_checkpointer(out, |checkpointer, around| checkpointer.on_runs_loaded(around));
        self.turn.slice("opening: the map is read", runs.len());
        for MetaPointer { segment, geometry, homes, .. } in runs {
            let nothing_yet = SegmentInfo::new(Kind::Run, geometry, homes);
            self.segments.insert(segment, SegmentInfo { live: Named::of_metadata(1), ..nothing_yet });
        }
        self.recovery_goes_on(Recovery::Counting(0));
    }

    /// What was read before the log was there lacks its data.
    fn count_live_entries(&mut self, from: u64) {
        let was_preloaded = self.opening.as_ref().expect("opening").was_preloaded;
        let runs = self.map.log_runs(from, self.recovers_at_once());
        self.turn.slice("opening: what is in the log is counted", runs.work);
        for run in runs.found {
            self.log.set_live(run.lsn, |live| live + run.blocks);
            if was_preloaded {
                self.map.put_log_in(run, &self.log);
            }
        }
        if let Some(from) = runs.next {
            return self.recovery_goes_on(Recovery::Counting(from));
        }
        self.segments.take_dirty();
        self.wants.checkpoint = false;
        self.log.replay_after(self.checkpointer.durable().lsn.max(self.log.trimmed));
        self.recovery_goes_on(Recovery::Replaying);
    }

    // ---- replay ----

    /// Applies entries after the checkpoint, by the same code as in live operation.
    fn replay(&mut self) {
        let end = self.opening.as_ref().expect("opening").end;
        let (work_max, mut work) = (self.recovers_at_once(), 0);
        while self.log.completed < end && work < work_max {
            let runs_before = self.map.run_count();
            let lsn = self.log.complete_next();
            work += self.log.get(lsn).map_or(1, |entry| work_of(&entry.record));
            self.apply(lsn);
            work += runs_before.saturating_sub(self.map.run_count());
        }
        self.turn.slice("opening: the log is replayed", work);
        if self.log.completed < end {
            return self.recovery_goes_on(Recovery::Replaying);
        }
        if self.map.run_count() > 0 {
            self.map.set_unfolded();
        }
        self.recovery_goes_on(Recovery::Looking(0));
    }

    /// What a layer said that goes with all of it counts for nothing: an entry that only such ones named was trimmed, and no
    /// record tells that they were forgotten.
    fn assert_no_dangling_log_places(&mut self, from: u64) {
        let runs = self.map.log_runs(from, self.recovers_at_once());
        self.turn.slice("opening: what is in the log is looked at", runs.work);
        for LogRun { start, lsn, .. } in runs.found {
            let is_there = self.log.get(lsn).is_some() || self.map.layers().is_dropped(Key(start).object());
            assert!(is_there, "block {start} is in log entry {lsn:?}, which was trimmed");
        }
        if runs.next.is_none() {
            self.mark_kept();
        }
        self.recovery_goes_on(runs.next.map_or(Recovery::Marking, Recovery::Looking));
    }

    fn mark_and_go_on(&mut self, out: Out) {
        if !self.mark_some() {
            return self.recovery_goes_on(Recovery::Marking);
        }
        self.step(Step::Creating);
        self.create_first_ledger(out);
    }

    // ---- before a hand-over ----

    pub(crate) fn begin_preload(&mut self, out: Out) {
        if self.state == State::Opening && self.opening.is_none() {
            self.start_opening(true, out);
        }
    }

    /// Whether nothing is claimed yet, since another host serves.
    pub fn is_preloading(&self) -> bool {
        self.opening.as_ref().is_some_and(|opening| opening.is_preload)
    }

    /// How far that is; `None` where nothing is read so.
    pub fn preload_state(&self) -> Option<PreloadState> {
        let opening = self.opening.as_ref().filter(|opening| opening.is_preload)?;
        Some(match opening.step {
            Step::Applying => PreloadState::Applying,
            Step::Preloaded if self.preloaded.is_some() => PreloadState::Done,
            Step::Preloaded => PreloadState::Unreadable,
            _ => PreloadState::Reading,
        })
    }

    /// The opening proper begins: of what is still being read nothing counts.
    pub(crate) fn end_preload(&mut self) {
        self.opening = None;
        if self.preloaded.is_none() && self.basis.is_known() {
            self.forget_map();
        }
        self.fetcher.clear();
    }

    pub(crate) fn fetch_preload(&mut self, out: Out) {
        self.step(Step::Preloading);
        let runs = self.root().checkpoint.runs.clone();
        self.fetch_runs(runs, 0, out);
    }

    /// All runs are there, and go into the map in slices, since other volumes' guests wait meanwhile.
    pub(crate) fn apply_preload(&mut self, out: Out) {
        self.step(Step::Applying);
        let opening = self.opening.as_mut().expect("opening");
        opening.recovery = Recovery::TakingIn(opening.runs.take());
        self.recover(out);
    }

    /// These runs are in the map, which are all; or something can't be read.
    pub(crate) fn on_preloaded(&mut self, runs: Option<Vec<MetaPointer>>, out: Out) {
        self.step(Step::Preloaded);
        self.opening.as_mut().expect("opening").runs = RunLoads::default();
        match runs {
            Some(runs) => self.preloaded = Some(Preloaded { runs, own: self.root().own_numbers() }),
            None => self.forget_map(),
        }
        out.push(Effect::Notice(Notice::Preloaded));
    }

    /// How many of these runs, from the first on, the map is made of. Others that it was made of are taken out.
    pub(crate) fn use_preloaded(&mut self, runs: &[MetaPointer]) -> usize {
        let own = self.root().own_numbers();
        let Some(preloaded) = self.preloaded.take() else { return 0 };
        let goes_on = runs.starts_with(&preloaded.runs) || self.basis.config.mutations.preload_fits_anything();
        if goes_on && preloaded.own == own {
            return preloaded.runs.len().min(runs.len());
        }
        self.forget_map();
        0
    }
}

/// How much it is to apply a record to the map, in runs.
fn work_of(record: &Record) -> usize {
    match record {
        Record::Commit(commit) => 1 + commit.extents.len() + commit.crcs.len() / CRCS_A_RUN,
        Record::Free { segments } => 1 + segments.len(),
        Record::Share(share) => 1 + share.segments.len() + share.extents.len(),
        _ => 1,
    }
}

/// The ledger to account an entry to: one whose rule its holders meet, and the rule of now (an older ledger may be of a
/// time when nodes were away: what is accounted to that is copied again at each opening), else one whose rule they
/// meet, else the newest.
fn best_holder(ledgers: &[LedgerRef], holders: &BTreeMap<LedgerId, u8>, now: AckRule) -> (LedgerId, u8) {
    let mask_of = |ledger: &LedgerRef| holders.get(&ledger.id).copied().unwrap_or(0);
    let meets = |ledger: &&LedgerRef, rule: AckRule| rule.is_ack_set(&ledger.legs, mask_of(ledger));
    let mut met = ledgers.iter().filter(|ledger| meets(ledger, ledger.rule));
    let first = met.clone().next();
    if let Some(ledger) = met.find(|ledger| meets(ledger, now)).or(first) {
        return (ledger.id, mask_of(ledger));
    }
    let (id, mask) = holders.last_key_value().expect("a found entry has a holder");
    (*id, *mask)
}
