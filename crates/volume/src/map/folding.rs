//! A fold that is under way, slice by slice: guests get their turns in between.
//!
//! States: choosing (leaves that the overlay says something of) -> narrow (others that lie in too few copies are looked
//! for) -> reading (those that are not in memory) -> merging (each with what the overlay says over it, and encoded) ->
//! writing (one metadata segment) -> installing (the directory names the new leaves, one after the other) -> finishing
//! (layers without leaves go: [`super::merge`]) -> done: another fold, or the state is captured
//! ([`super::checkpoint`]).
//!
//! What may happen between two slices: whatever changes the overlay, as writes, discards, destages and bulk writes do;
//! snapshots and clones; openings of the volume elsewhere, which end all of this. What can't: the cleaner and the
//! checkpointer wait, so nothing else changes the directory, no segment leaves the table, and no layer its parent.
//!
//! Invariants: (1) each leaf is merged at one instant, and remembers its LSN: what the overlay has under it from before
//! is in the leaf, and only that is taken out when it is installed. (2) The map says the same before and after each
//! leaf is installed. (3) Nothing is captured before all are: a crash leaves the previous checkpoint whole.
//!
//! Limits: a slice goes through [`crate::api::Config::slice_runs_max`] runs of leaves and overlay, and then to the end
//! of the leaf that it is at.

use super::checkpoint::{Around, Wish};
use super::fold::{Choice, Choosing, MergedLeaf, NewLeaf};
use super::leaf::{Leaf, LeafNo, LeafPointer};
use super::merge::{Finishing, Going};
use crate::segment::Kind;
use crate::segment::fetch::FetchError;
use crate::segment::writer::{JobKind, Work};
use holdfast_base::{BLOCK_BYTES, BlockCrc, BufMut, Instant, Key, Lsn, ObjectId, block_crcs, crc32c};
use holdfast_format::record::SegmentNo;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::vec::IntoIter;

/// A leaf costs as much as so many runs, beside its own.
const RUNS_A_LEAF: usize = 16;

/// Runs of the overlay, or leaves of the directory, that are looked at without asking whether the turn has done its
/// slice.
const LOOKED_AT_ONCE: usize = 32;

/// Leaves that are asked for in one slice.
const READS_A_SLICE: usize = 128;

/// Leaves of too few copies that are written anew with one fold.
const NARROW_LEAVES_MAX: usize = 128;

type OldLeaf = (LeafNo, Option<Arc<Leaf>>);

/// What a fold has written, in bytes of leaves, and the runs that it has taken out of the overlay.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Gain {
    pub(super) bytes: u64,
    pub(super) runs: u64,
}

/// The folds of a volume: the one under way, and what those before it have left.
#[derive(Debug, Default)]
pub(super) struct Folds {
    fold: Option<Box<Fold>>,
    /// Where the next one begins: leaves have their turns in rounds.
    cursor: u64,
    began_at: Instant,
    done_at: Instant,
    last: Gain,
    /// Leaves that were folded since the last capture, and the LSN that the log had come to when the last of them were.
    leaves: Vec<LeafNo>,
    captured: Lsn,
    /// Bytes of leaves that were written since the last capture.
    bytes_in_row: u64,
}

/// What becomes of a fold that has gone on.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Went {
    /// There is more to do at once: with the next slice.
    Slice,
    /// Something is awaited.
    Waits,
    Done,
}

#[derive(Debug)]
struct Fold {
    step: Step,
    going: Going,
    /// Written anew although nothing of them changes.
    narrow: BTreeSet<LeafNo>,
    /// So are these, which lie between others: the segments that they leave are dead as a whole.
    between: BTreeSet<LeafNo>,
    /// Where the round has come to: from here on, and then from the start.
    from: LeafNo,
    /// The LSN that the log had come to when merging began.
    captured: Lsn,
    merged: Vec<MergedLeaf>,
    /// What leaves said that go with their layer.
    dropped: Vec<OldLeaf>,
}

#[derive(Debug, Default)]
enum Step {
    Choosing(Choosing),
    Narrow(Narrow),
    Reading(Reading),
    Merging(Merging),
    #[default]
    Writing,
    Installing(Installing),
    Finishing(Gain, Finishing),
}

/// What follows a step.
enum Next {
    AtOnce(Step),
    Slice(Step),
    Waits(Step),
    Done(Gain),
}

/// The look for segments of too few copies, or too damaged ones, and then for leaves that lie there.
#[derive(Debug)]
struct Narrow {
    choice: Choice,
    /// The next one to look at.
    unseen: Option<SegmentNo>,
    segments: BTreeSet<SegmentNo>,
    from: LeafNo,
}

#[derive(Debug, Default)]
struct Reading {
    leaves: BTreeMap<LeafNo, Option<Arc<Leaf>>>,
    /// Not asked for yet, in the order in which they lie in segments.
    unasked: IntoIter<LeafNo>,
    pending: BTreeSet<LeafNo>,
}

#[derive(Debug)]
struct Merging {
    left: IntoIter<OldLeaf>,
    /// Of layers that go. Absent where it could not be read: then it is left for another fold.
    below: BTreeMap<LeafNo, Option<Arc<Leaf>>>,
    payload: Payload,
}

#[derive(Debug)]
struct Installing {
    segment: Option<SegmentNo>,
    left: IntoIter<MergedLeaf>,
    dropped: IntoIter<OldLeaf>,
    /// Leaves' bytes that were written, and runs that were taken out of the overlay.
    bytes: u64,
    runs: i64,
}

/// Leaves that were encoded, one behind the other.
#[derive(Debug)]
struct Payload {
    bytes: BufMut,
    used: usize,
    /// Of the blocks that are full.
    crcs: Vec<BlockCrc>,
}

impl Payload {
    fn new(bytes_max: usize) -> Payload {
        Payload { bytes: BufMut::new(bytes_max.next_multiple_of(BLOCK_BYTES)), used: 0, crcs: Vec::new() }
    }

    fn push(&mut self, encoded: &[u8]) -> u32 {
        let at = self.used;
        self.bytes[at..at + encoded.len()].copy_from_slice(encoded);
        self.used += encoded.len();
        let full = self.crcs.len() * BLOCK_BYTES..self.used / BLOCK_BYTES * BLOCK_BYTES;
        self.crcs.extend(block_crcs(&self.bytes[full]));
        at as u32
    }

    fn into_work(mut self) -> Work {
        let len = self.used.next_multiple_of(BLOCK_BYTES);
        self.bytes[self.used..len].fill(0);
        let full = self.crcs.len() * BLOCK_BYTES;
        self.crcs.extend(block_crcs(&self.bytes[full..len]));
        let payload = self.bytes.freeze().slice(0..len);
        Work { payload: vec![payload], crcs: self.crcs, ..Work::new(JobKind::Leaves) }
    }
}

impl Folds {
    pub(super) fn is_under_way(&self) -> bool {
        self.fold.is_some()
    }

    pub(super) fn began_at(&self) -> Instant {
        self.began_at
    }

    pub(super) fn done_at(&self) -> Instant {
        self.done_at
    }

    pub(super) fn last(&self) -> Gain {
        self.last
    }

    pub(super) fn bytes_in_row(&self) -> u64 {
        self.bytes_in_row
    }

    /// The LSN that the log had come to when leaves were folded last.
    pub(super) fn captured(&self) -> Lsn {
        self.captured
    }

    /// Another row of folds may begin.
    pub(super) fn end_row(&mut self) {
        self.bytes_in_row = 0;
    }

    /// Leaves that were folded since the last call.
    pub(super) fn take_leaves(&mut self) -> BTreeSet<LeafNo> {
        std::mem::take(&mut self.leaves).into_iter().collect()
    }

    /// What is due for by age waits as long as after a fold.
    pub(super) fn rest(&mut self, now: Instant) {
        self.began_at = now;
    }

    pub(super) fn begin(&mut self, around: &mut Around<'_>) -> Went {
        assert!(self.fold.is_none(), "folds follow each other");
        around.wants.fold = false;
        self.began_at = around.basis.now;
        let bytes_max = u64::from(around.basis.config.segment_payload_bytes);
        let choosing = around.map.begin_choosing(self.cursor, around.log.undestaged_count(), bytes_max);
        // Data still in the log counts as unfolded when it is destaged: its commit says so.
        around.map.unfolded = false;
        around.map.shadow.on_choosing();
        self.fold = Some(Box::new(Fold {
            step: Step::Choosing(choosing),
            going: Going::default(),
            narrow: BTreeSet::new(),
            between: BTreeSet::new(),
            from: LeafNo::of(Key(self.cursor)),
            captured: around.log.completed,
            merged: Vec::new(),
            dropped: Vec::new(),
        }));
        self.go_on(around)
    }

    /// As far as this turn's slice allows.
    pub(super) fn go_on(&mut self, around: &mut Around<'_>) -> Went {
        let Some(mut fold) = self.fold.take() else { return Went::Waits };
        loop {
            let next = match std::mem::take(&mut fold.step) {
                Step::Choosing(choosing) => self.choose(choosing, around),
                Step::Narrow(narrow) => self.look_for_narrow(&mut fold, narrow, around),
                Step::Reading(reading) => self.read(&mut fold, reading, around),
                Step::Merging(merging) => self.merge(&mut fold, merging, around),
                Step::Writing => Next::Waits(Step::Writing),
                Step::Installing(installing) => self.install(installing, around),
                Step::Finishing(gain, finishing) => self.finish(gain, finishing, around),
            };
            let (step, went) = match next {
                Next::AtOnce(step) => (step, None),
                Next::Slice(step) => (step, Some(Went::Slice)),
                Next::Waits(step) => (step, Some(Went::Waits)),
                Next::Done(gain) => {
                    self.captured = fold.captured;
                    self.bytes_in_row += gain.bytes;
                    (self.last, self.done_at) = (gain, around.basis.now);
                    return Went::Done;
                }
            };
            fold.step = step;
            if let Some(went) = went {
                self.fold = Some(fold);
                return went;
            }
        }
    }

    // ---- choosing ----

    fn choose(&mut self, mut choosing: Choosing, around: &mut Around<'_>) -> Next {
        let mut goes_on = true;
        while goes_on && !around.has_sliced() {
            goes_on = around.map.choose_some(&mut choosing, LOOKED_AT_ONCE);
            around.turn.slice("fold: runs are looked at", LOOKED_AT_ONCE);
        }
        if goes_on {
            return Next::Slice(Step::Choosing(choosing));
        }
        let choice = choosing.done();
        self.cursor = choice.next.unwrap_or(0);
        around.map.unfolded |= choice.next.is_some();
        if choice.next.is_none() {
            around.map.shadow.on_all_folded();
        }
        let (unseen, segments, from) = (Some(SegmentNo::default()), BTreeSet::new(), LeafNo::default());
        Next::AtOnce(Step::Narrow(Narrow { choice, unseen, segments, from }))
    }

    fn look_for_narrow_segments(narrow: &mut Narrow, around: &mut Around<'_>) {
        let shards_now = around.topology().meta_shards_now();
        while let Some(unseen) = narrow.unseen.filter(|_| !around.has_sliced()) {
            let mut metadata = around.segments.metadata_from(unseen);
            for (no, info) in metadata.by_ref().take(LOOKED_AT_ONCE).filter(|(_, info)| info.kind == Kind::Meta) {
                if info.geometry.shard_count() < shards_now || around.care.repairer.is_stuck(no) {
                    narrow.segments.insert(no);
                }
            }
            narrow.unseen = metadata.next().map(|(no, _)| no);
            around.turn.slice("fold: segments of too few copies are looked for", LOOKED_AT_ONCE);
        }
    }

    fn look_for_narrow(&mut self, fold: &mut Fold, mut narrow: Narrow, around: &mut Around<'_>) -> Next {
        Folds::look_for_narrow_segments(&mut narrow, around);
        if narrow.unseen.is_some() {
            return Next::Slice(Step::Narrow(narrow));
        }
        while !narrow.segments.is_empty() && fold.narrow.len() < NARROW_LEAVES_MAX {
            if around.has_sliced() {
                return Next::Slice(Step::Narrow(narrow));
            }
            let mut leaves = around.map.directory.iter_from(narrow.from);
            let lies_there = |(_, pointer): &(LeafNo, LeafPointer)| narrow.segments.contains(&pointer.segment);
            fold.narrow.extend(leaves.by_ref().take(LOOKED_AT_ONCE).filter(lies_there).map(|(no, _)| no));
            let next = leaves.next().map(|(no, _)| no);
            around.turn.slice("fold: leaves of too few copies are looked for", LOOKED_AT_ONCE);
            let Some(next) = next else { break };
            narrow.from = next;
        }
        self.begin_reading(fold, narrow.choice, around)
    }

    fn begin_reading(&mut self, fold: &mut Fold, choice: Choice, around: &mut Around<'_>) -> Next {
        let Choice { leaves: mut chosen, between, .. } = choice;
        chosen.extend(fold.narrow.iter().chain(&between).copied());
        let written: Vec<ObjectId> = around.direct.layers().collect();
        let going = around.map.choose_leaves_that_go(&written);
        let mut reading = Reading::default();
        let mut missing = Vec::new();
        for no in chosen.into_iter().chain(going.leaves()).collect::<BTreeSet<LeafNo>>() {
            let pointer = around.map.directory.get(no);
            let leaf = pointer.and_then(|_| around.map.leaves.get(no));
            if let (Some(pointer), None) = (pointer, &leaf) {
                missing.push((pointer.segment, pointer.offset_bytes, no));
            }
            reading.leaves.insert(no, leaf);
        }
        missing.sort_unstable();
        reading.pending = missing.iter().map(|(_, _, no)| *no).collect();
        reading.unasked = missing.into_iter().map(|(_, _, no)| no).collect::<Vec<_>>().into_iter();
        around.turn.slice("fold: leaves are chosen", reading.leaves.len() + going.runs);
        (fold.going, fold.between) = (going, between);
        Next::AtOnce(Step::Reading(reading))
    }

    // ---- reading ----

    fn read(&mut self, fold: &mut Fold, mut reading: Reading, around: &mut Around<'_>) -> Next {
        if reading.pending.is_empty() {
            return self.begin_merging(fold, reading, around);
        }
        let some: Vec<LeafNo> = reading.unasked.by_ref().take(READS_A_SLICE).collect();
        if !some.is_empty() {
            around.wishes.push(Wish::Load(some));
        }
        match reading.unasked.len() {
            0 => Next::Waits(Step::Reading(reading)),
            _ => Next::Slice(Step::Reading(reading)),
        }
    }

    /// A leaf that was wished for is there, or can't be read.
    pub(super) fn on_leaf(&mut self, around: &mut Around<'_>, no: LeafNo, leaf: Result<Arc<Leaf>, FetchError>) -> Went {
        let Some(Fold { step: Step::Reading(reading), .. }) = self.fold.as_deref_mut() else { return Went::Waits };
        if !reading.pending.remove(&no) {
            return Went::Waits;
        }
        if let Ok(leaf) = leaf {
            reading.leaves.insert(no, Some(leaf));
        } else {
            // One that can't be read is left as it is; what is over it stays in the overlay, for another fold.
            reading.leaves.remove(&no);
            around.map.unfolded = true;
        }
        if reading.pending.is_empty() { self.go_on(around) } else { Went::Waits }
    }

    // ---- merging ----

    fn begin_merging(&mut self, fold: &mut Fold, reading: Reading, around: &mut Around<'_>) -> Next {
        let mut leaves = reading.leaves;
        fold.captured = around.log.completed;
        let below = fold.going.under.values().filter_map(|gone| Some((*gone, leaves.remove(gone)?))).collect();
        fold.dropped = fold.going.dropped.iter().filter_map(|no| Some((*no, leaves.remove(no)?))).collect();
        // The segment may be full before all had their turn: now these come first, now those.
        let goes_first = |no: &LeafNo| fold.goes_first(*no);
        let (mut ordered, mut others): (Vec<_>, Vec<_>) = leaves.into_iter().partition(|(no, _)| goes_first(no));
        let behind = others.partition_point(|(no, _)| *no < fold.from);
        others.rotate_left(behind);
        if around.counters.folds.is_multiple_of(2) {
            ordered.extend(others);
        } else {
            ordered.splice(0..0, others);
        }
        let payload = Payload::new(around.basis.config.segment_payload_bytes as usize);
        Next::AtOnce(Step::Merging(Merging { left: ordered.into_iter(), below, payload }))
    }

    fn merge(&mut self, fold: &mut Fold, mut merging: Merging, around: &mut Around<'_>) -> Next {
        let mut is_full = false;
        while !around.has_sliced()
            && !is_full
            && let Some((no, old)) = merging.left.next()
        {
            let mut runs = 0;
            let under = fold.going.under.get(&no).and_then(|gone| Some((*gone, merging.below.remove(gone)?)));
            match self.merge_leaf(fold, (no, old), under, &mut merging.payload, &mut runs, around) {
                Merged::Nothing => {}
                Merged::Leaf(leaf) => fold.merged.push(leaf),
                Merged::Full => is_full = true,
            }
            around.turn.slice("fold: leaves are merged", runs);
        }
        if !is_full && merging.left.len() > 0 {
            return Next::Slice(Step::Merging(merging));
        }
        around.counters.folds += 1;
        if merging.payload.used == 0 {
            return Next::AtOnce(Step::Installing(fold.begin_installing(None)));
        }
        around.wishes.push(Wish::Write(merging.payload.into_work()));
        Next::Waits(Step::Writing)
    }

    /// One leaf with what the overlay says over it, as of now.
    fn merge_leaf(
        &mut self,
        fold: &Fold,
        (no, old): OldLeaf,
        under: Option<OldLeaf>,
        payload: &mut Payload,
        runs: &mut usize,
        around: &mut Around<'_>,
    ) -> Merged {
        let changes = around.map.foldable(no);
        *runs += RUNS_A_LEAF + changes.len();
        let is_wanted = fold.narrow.contains(&no) || fold.between.contains(&no);
        if changes.is_empty() && under.is_none() && !is_wanted {
            return Merged::Nothing;
        }
        let forgets_below = around.basis.config.mutations.merge_forgets_below();
        let new = around.map.new_leaf(no, old.as_deref(), under.as_ref(), &changes, forgets_below);
        *runs += new.runs.len() + old.as_ref().map_or(0, |old| old.runs.len());
        let encoded = new.encode();
        if payload.used + encoded.len() > around.basis.config.segment_payload_bytes as usize {
            around.map.unfolded = true;
            // The round goes on here: so leaves are written anew in the order in which they were written, and
            // segments with leaves of one age die together.
            if !fold.goes_first(no) {
                self.cursor = no.first_key();
            }
            return Merged::Full;
        }
        let new = (!new.runs.is_empty()).then(|| {
            let (len_bytes, crc) = (encoded.len() as u32, crc32c(&encoded));
            NewLeaf { leaf: Arc::new(new), offset_bytes: payload.push(&encoded), len_bytes, crc }
        });
        Merged::Leaf(MergedLeaf { no, old, under, new, captured: around.log.completed })
    }

    // ---- installing ----

    /// The leaves are durable in that segment.
    pub(super) fn on_written(&mut self, around: &mut Around<'_>, segment: SegmentNo) -> Went {
        let fold = self.fold.as_deref_mut().expect("leaves become durable in a fold only");
        fold.step = Step::Installing(fold.begin_installing(Some(segment)));
        self.go_on(around)
    }

    /// Directory, accounts and overlay move together, leaf by leaf.
    fn install(&mut self, mut installing: Installing, around: &mut Around<'_>) -> Next {
        let runs_max = around.left_of_slice();
        let runs_before = around.map.run_count() as i64;
        let (map, mut accounts) = around.map_and_accounts();
        let mut runs = 0;
        while runs < runs_max {
            if let Some(merged) = installing.left.next() {
                runs += RUNS_A_LEAF + merged.run_count();
                map.install_leaf(&merged, installing.segment, &mut accounts);
                self.leaves.push(merged.no);
                if let Some((gone, leaf)) = &merged.under {
                    map.forget_leaf(*gone, leaf.as_deref(), &mut accounts);
                    self.leaves.push(*gone);
                }
            } else if let Some((no, leaf)) = installing.dropped.next() {
                runs += RUNS_A_LEAF + leaf.as_ref().map_or(0, |leaf| leaf.runs.len());
                map.forget_leaf(no, leaf.as_deref(), &mut accounts);
                self.leaves.push(no);
            } else {
                break;
            }
        }
        // A long run may be cut in two by what is taken out of it.
        installing.runs += runs_before - map.run_count() as i64;
        around.turn.slice("fold: leaves are installed", runs);
        if around.has_sliced() {
            return Next::Slice(Step::Installing(installing));
        }
        around.care.cleaner.on_folded();
        let gain = Gain { bytes: installing.bytes, runs: u64::try_from(installing.runs).unwrap_or(0) };
        Next::AtOnce(Step::Finishing(gain, Finishing::default()))
    }

    // ---- finishing ----

    /// All is installed: layers that have no leaves any more go.
    fn finish(&mut self, gain: Gain, mut finishing: Finishing, around: &mut Around<'_>) -> Next {
        let written: Vec<ObjectId> = around.direct.layers().collect();
        let runs_max = around.left_of_slice();
        let (map, mut accounts) = around.map_and_accounts();
        let (runs, is_done) = map.finish_layers(&mut finishing, &written, runs_max, &mut accounts);
        around.turn.slice("fold: layers without leaves go", runs);
        if !is_done {
            return Next::Slice(Step::Finishing(gain, finishing));
        }
        around.map.find_overlaid();
        Next::Done(gain)
    }

    /// Asserts what must hold between events (tests and the simulator).
    pub(super) fn verify(&self) {
        let Some(fold) = &self.fold else { return };
        if let Step::Reading(reading) = &fold.step {
            assert!(!reading.pending.is_empty(), "a fold reads what is missing, and then merges");
            let has_place = |no: &LeafNo| reading.leaves.get(no).is_some_and(Option::is_none);
            assert!(reading.pending.iter().all(has_place), "what is awaited has its place, and is not there");
            let unasked = reading.unasked.as_slice();
            assert!(unasked.iter().all(|no| reading.pending.contains(no)), "what is not asked for yet is awaited");
        }
    }
}

enum Merged {
    /// Nothing of it changes.
    Nothing,
    Leaf(MergedLeaf),
    /// It found no room in the segment.
    Full,
}

impl Fold {
    fn goes_first(&self, no: LeafNo) -> bool {
        self.going.under.contains_key(&no) || self.narrow.contains(&no)
    }

    fn begin_installing(&mut self, segment: Option<SegmentNo>) -> Installing {
        let (merged, dropped) = (std::mem::take(&mut self.merged), std::mem::take(&mut self.dropped));
        let bytes = merged.iter().filter_map(|m| m.new.as_ref()).map(|new| u64::from(new.len_bytes)).sum();
        Installing { segment, left: merged.into_iter(), dropped: dropped.into_iter(), bytes, runs: 0 }
    }
}
