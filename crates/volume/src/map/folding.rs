//! A fold that is under way, slice by slice: guests get their turns in between.
//!
//! States: choosing (leaves that the overlay says something of) -> reading (those that are not in memory) -> merging
//! (each with what the overlay says over it, and encoded) -> writing (one metadata segment) -> installing (the
//! directory names the new leaves, one after the other) -> another fold, or the state is captured.
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

use super::checkpoint::Stage;
use super::fold::{Choice, Choosing, MergedLeaf, NewLeaf};
use super::leaf::{Leaf, LeafNo};
use super::leafload::LeafWaiter;
use super::merge::Going;
use crate::api::State;
use crate::controller::{Controller, Out};
use crate::segment::writer::{JobKind, Work};
use holdfast_base::{BLOCK_BYTES, BlockCrc, BufMut, Instant, Key, Lsn, ObjectId, block_crcs, crc32c};
use holdfast_format::record::SegmentNo;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use std::vec::IntoIter;

/// Between two slices: what has come meanwhile has its turn.
const PAUSE: Duration = Duration::from_micros(500);

/// A leaf costs as much as so many runs, beside its own.
const RUNS_A_LEAF: usize = 16;

/// Runs of the overlay that are looked at without asking whether the turn has done its slice.
const LOOKED_AT_ONCE: usize = 32;

/// Leaves that are asked for in one slice.
const READS_A_SLICE: usize = 128;

type OldLeaf = (LeafNo, Option<Arc<Leaf>>);

#[derive(Debug)]
pub(super) struct Fold {
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

#[derive(Debug)]
enum Step {
    /// Absent while it is at it.
    Choosing(Option<Choosing>),
    Reading(Reading),
    Merging(Merging),
    Writing,
    Installing(Installing),
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
        Work { kind: JobKind::Leaves, extents: Vec::new(), payload: vec![payload], crcs: self.crcs }
    }
}

impl Controller {
    /// When the next slice is due.
    pub(crate) fn slice_deadline(&self) -> Option<Instant> {
        let cleaning = self.care.cleaner.slice_deadline();
        self.checkpointer.slice_at.into_iter().chain(cleaning).min()
    }

    pub(super) fn slice_soon(&mut self) {
        self.checkpointer.slice_at = Some(self.next_slice_at());
    }

    /// When work that is cut here goes on.
    pub(crate) fn next_slice_at(&self) -> Instant {
        self.basis.now + PAUSE
    }

    /// Whether this turn has done its slice.
    pub(super) fn has_sliced(&self) -> bool {
        self.left_of_slice() == 0
    }

    /// Runs that this turn may go through.
    pub(crate) fn left_of_slice(&self) -> usize {
        self.basis.config.slice_runs_max.saturating_sub(self.turn.sliced)
    }

    /// The next slices, if they are due.
    pub(crate) fn drive_slices(&mut self, out: Out) {
        if !matches!(self.state, State::Open | State::Closing) {
            return;
        }
        self.drive_checkpoint_slice(out);
        if self.care.cleaner.slice_deadline().is_some_and(|at| at <= self.basis.now) {
            self.find_live(out);
        }
    }

    fn drive_checkpoint_slice(&mut self, out: Out) {
        if self.checkpointer.slice_at.is_none_or(|at| at > self.basis.now) {
            return;
        }
        self.checkpointer.slice_at = None;
        let fold = match &self.checkpointer.stage {
            Stage::Folding(fold) => fold,
            Stage::Condemning(_) => return self.condemn_or_capture(out),
            Stage::Writing(_) => return self.capture_some(out),
            Stage::Idle | Stage::Recording => return,
        };
        match &fold.step {
            Step::Choosing(_) => self.choose_some(out),
            Step::Reading(_) => self.read_some(out),
            Step::Merging(_) => self.merge_some(out),
            Step::Writing => {}
            Step::Installing(_) => self.install_some(out),
        }
    }

    pub(super) fn begin_fold(&mut self, out: Out) {
        self.wants.fold = false;
        self.checkpointer.folded_last = self.basis.now;
        let from = LeafNo::of(Key(self.checkpointer.fold_cursor));
        let bytes_max = u64::from(self.basis.config.segment_payload_bytes);
        let in_log = self.log.undestaged_count();
        let choosing = self.map.begin_choosing(self.checkpointer.fold_cursor, in_log, bytes_max);
        // Data still in the log counts as unfolded when it is destaged: its commit says so.
        self.map.unfolded = false;
        self.map.shadow.on_choosing();
        let (step, captured) = (Step::Choosing(Some(choosing)), self.log.completed);
        let (merged, dropped) = (Vec::new(), Vec::new());
        let (going, narrow, between) = (Going::default(), BTreeSet::new(), BTreeSet::new());
        let fold = Fold { step, going, narrow, between, from, captured, merged, dropped };
        self.checkpointer.stage = Stage::Folding(Box::new(fold));
        self.choose_some(out);
    }

    // ---- choosing ----

    fn choose_some(&mut self, out: Out) {
        let Stage::Folding(fold) = &mut self.checkpointer.stage else { return };
        let Step::Choosing(choosing) = &mut fold.step else { return };
        let Some(mut choosing) = choosing.take() else { return };
        let mut goes_on = true;
        while goes_on && !self.has_sliced() {
            goes_on = self.map.choose_some(&mut choosing, LOOKED_AT_ONCE);
            self.turn.slice("fold: runs are looked at", LOOKED_AT_ONCE);
        }
        if goes_on {
            let Stage::Folding(fold) = &mut self.checkpointer.stage else { return };
            fold.step = Step::Choosing(Some(choosing));
            return self.slice_soon();
        }
        self.begin_reading(choosing.done(), out);
    }

    fn begin_reading(&mut self, choice: Choice, out: Out) {
        let Choice { leaves: mut chosen, between, next } = choice;
        self.checkpointer.fold_cursor = next.unwrap_or(0);
        self.map.unfolded |= next.is_some();
        let narrow = self.narrow_leaves();
        chosen.extend(narrow.iter().chain(&between).copied());
        if next.is_none() {
            self.map.shadow.on_all_folded();
        }
        let written: Vec<ObjectId> = self.direct.layers().collect();
        let going = self.map.choose_leaves_that_go(&written);
        let mut reading = Reading::default();
        let mut missing = Vec::new();
        for no in chosen.into_iter().chain(going.leaves()).collect::<BTreeSet<LeafNo>>() {
            let pointer = self.map.directory.get(no);
            let leaf = pointer.and_then(|_| self.map.leaves.get(no));
            if let (Some(pointer), None) = (pointer, &leaf) {
                missing.push((pointer.segment, pointer.offset_bytes, no));
            }
            reading.leaves.insert(no, leaf);
        }
        missing.sort_unstable();
        reading.pending = missing.iter().map(|(_, _, no)| *no).collect();
        reading.unasked = missing.into_iter().map(|(_, _, no)| no).collect::<Vec<_>>().into_iter();
        self.turn.slice("fold: leaves are chosen", reading.leaves.len());
        let Stage::Folding(fold) = &mut self.checkpointer.stage else { panic!("leaves were chosen for a fold") };
        (fold.step, fold.going, fold.narrow, fold.between) = (Step::Reading(reading), going, narrow, between);
        self.read_some(out);
    }

    // ---- reading ----

    fn read_some(&mut self, out: Out) {
        let Stage::Folding(fold) = &mut self.checkpointer.stage else { return };
        let Step::Reading(reading) = &mut fold.step else { return };
        if reading.pending.is_empty() {
            return self.begin_merging(out);
        }
        let some: Vec<LeafNo> = reading.unasked.by_ref().take(READS_A_SLICE).collect();
        if reading.unasked.len() > 0 {
            self.slice_soon();
        }
        self.load_leaves(&some, LeafWaiter::Fold, out);
    }

    pub(crate) fn on_fold_leaf(&mut self, no: LeafNo, leaf: Option<Arc<Leaf>>, out: Out) {
        let Stage::Folding(fold) = &mut self.checkpointer.stage else { return };
        let Step::Reading(reading) = &mut fold.step else { return };
        if !reading.pending.remove(&no) {
            return;
        }
        if leaf.is_some() {
            reading.leaves.insert(no, leaf);
        } else {
            // One that can't be read is left as it is; what is over it stays in the overlay, for another fold.
            reading.leaves.remove(&no);
            self.map.unfolded = true;
        }
        if reading.pending.is_empty() {
            self.begin_merging(out);
        }
    }

    // ---- merging ----

    fn begin_merging(&mut self, out: Out) {
        let is_even = self.counters.folds.is_multiple_of(2);
        let bytes_max = self.basis.config.segment_payload_bytes as usize;
        let completed = self.log.completed;
        let Stage::Folding(fold) = &mut self.checkpointer.stage else { return };
        let Step::Reading(reading) = &mut fold.step else { return };
        let mut leaves = std::mem::take(&mut reading.leaves);
        fold.captured = completed;
        let below = fold.going.under.values().filter_map(|gone| Some((*gone, leaves.remove(gone)?))).collect();
        fold.dropped = fold.going.dropped.iter().filter_map(|no| Some((*no, leaves.remove(no)?))).collect();
        // The segment may be full before all had their turn: now these come first, now those.
        let goes_first = |no: &LeafNo| fold.goes_first(*no);
        let (mut ordered, mut others): (Vec<_>, Vec<_>) = leaves.into_iter().partition(|(no, _)| goes_first(no));
        let behind = others.partition_point(|(no, _)| *no < fold.from);
        others.rotate_left(behind);
        if is_even {
            ordered.extend(others);
        } else {
            ordered.splice(0..0, others);
        }
        fold.step = Step::Merging(Merging { left: ordered.into_iter(), below, payload: Payload::new(bytes_max) });
        self.merge_some(out);
    }

    fn merge_some(&mut self, out: Out) {
        let Stage::Folding(mut fold) = std::mem::take(&mut self.checkpointer.stage) else { return };
        let Step::Merging(merging) = &mut fold.step else { return };
        let Merging { mut left, mut below, mut payload } = std::mem::replace(merging, Merging::nothing());
        let mut is_full = false;
        while !self.has_sliced()
            && !is_full
            && let Some((no, old)) = left.next()
        {
            let mut runs = 0;
            let under = fold.going.under.get(&no).and_then(|gone| Some((*gone, below.remove(gone)?)));
            match self.merge_leaf(&fold, (no, old), under, &mut payload, &mut runs) {
                Merged::Nothing => {}
                Merged::Leaf(leaf) => fold.merged.push(leaf),
                Merged::Full => is_full = true,
            }
            self.turn.slice("fold: leaves are merged", runs);
        }
        let is_done = is_full || left.len() == 0;
        fold.step = Step::Merging(Merging { left, below, payload });
        self.checkpointer.stage = Stage::Folding(fold);
        if is_done { self.write_leaves(out) } else { self.slice_soon() }
    }

    /// One leaf with what the overlay says over it, as of now.
    fn merge_leaf(
        &mut self,
        fold: &Fold,
        (no, old): OldLeaf,
        under: Option<OldLeaf>,
        payload: &mut Payload,
        runs: &mut usize,
    ) -> Merged {
        let changes = self.map.foldable(no);
        *runs += RUNS_A_LEAF + changes.len();
        let is_wanted = fold.narrow.contains(&no) || fold.between.contains(&no);
        if changes.is_empty() && under.is_none() && !is_wanted {
            return Merged::Nothing;
        }
        let forgets_below = self.basis.config.mutations.merge_forgets_below();
        let new = self.map.new_leaf(no, old.as_deref(), under.as_ref(), &changes, forgets_below);
        *runs += new.runs.len() + old.as_ref().map_or(0, |old| old.runs.len());
        let encoded = new.encode();
        if payload.used + encoded.len() > self.basis.config.segment_payload_bytes as usize {
            self.map.unfolded = true;
            // The round goes on here: so leaves are written anew in the order in which they were written, and
            // segments with leaves of one age die together.
            if !fold.goes_first(no) {
                self.checkpointer.fold_cursor = no.first_key();
            }
            return Merged::Full;
        }
        let new = (!new.runs.is_empty()).then(|| {
            let (len_bytes, crc) = (encoded.len() as u32, crc32c(&encoded));
            NewLeaf { leaf: Arc::new(new), offset_bytes: payload.push(&encoded), len_bytes, crc }
        });
        Merged::Leaf(MergedLeaf { no, old, under, new, captured: self.log.completed })
    }

    fn write_leaves(&mut self, out: Out) {
        self.counters.folds += 1;
        let Stage::Folding(fold) = &mut self.checkpointer.stage else { return };
        let Step::Merging(Merging { payload, .. }) = std::mem::replace(&mut fold.step, Step::Writing) else { return };
        if payload.used == 0 {
            return self.begin_installing(None, out);
        }
        self.write_segment(payload.into_work(), out);
    }

    // ---- installing ----

    pub(crate) fn on_leaves_durable(&mut self, segment: SegmentNo, out: Out) {
        self.begin_installing(Some(segment), out);
    }

    fn begin_installing(&mut self, segment: Option<SegmentNo>, out: Out) {
        let Stage::Folding(fold) = &mut self.checkpointer.stage else { panic!("leaves became durable outside a fold") };
        let (merged, dropped) = (std::mem::take(&mut fold.merged), std::mem::take(&mut fold.dropped));
        let bytes = merged.iter().filter_map(|m| m.new.as_ref()).map(|new| u64::from(new.len_bytes)).sum();
        let (left, dropped) = (merged.into_iter(), dropped.into_iter());
        fold.step = Step::Installing(Installing { segment, left, dropped, bytes, runs: 0 });
        self.install_some(out);
    }

    /// Directory, accounts and overlay move together, leaf by leaf.
    fn install_some(&mut self, out: Out) {
        let Stage::Folding(mut fold) = std::mem::take(&mut self.checkpointer.stage) else { return };
        let Step::Installing(installing) = &mut fold.step else { return };
        let mut folded = std::mem::take(&mut self.checkpointer.folded_leaves);
        let runs_max = self.left_of_slice();
        let runs_before = self.map.run_count() as i64;
        let (map, mut accounts) = self.map_and_accounts();
        let mut runs = 0;
        while runs < runs_max {
            if let Some(merged) = installing.left.next() {
                runs += RUNS_A_LEAF + merged.run_count();
                map.install_leaf(&merged, installing.segment, &mut accounts);
                folded.push(merged.no);
                if let Some((gone, leaf)) = &merged.under {
                    map.forget_leaf(*gone, leaf.as_deref(), &mut accounts);
                    folded.push(*gone);
                }
            } else if let Some((no, leaf)) = installing.dropped.next() {
                runs += RUNS_A_LEAF + leaf.as_ref().map_or(0, |leaf| leaf.runs.len());
                map.forget_leaf(no, leaf.as_deref(), &mut accounts);
                folded.push(no);
            } else {
                break;
            }
        }
        // A long run may be cut in two by what is taken out of it.
        installing.runs += runs_before - map.run_count() as i64;
        self.checkpointer.folded_leaves = folded;
        self.turn.slice("fold: leaves are installed", runs);
        if self.has_sliced() {
            self.checkpointer.stage = Stage::Folding(fold);
            return self.slice_soon();
        }
        let (bytes, runs) = (installing.bytes, u64::try_from(installing.runs).unwrap_or(0));
        self.checkpointer.folded_at = fold.captured;
        self.finish_fold(bytes, runs, out);
    }

    /// All is installed.
    fn finish_fold(&mut self, bytes: u64, runs: u64, out: Out) {
        self.care.cleaner.on_folded();
        let written: Vec<ObjectId> = self.direct.layers().collect();
        let (map, mut accounts) = self.map_and_accounts();
        map.finish_layers(&written, &mut accounts);
        map.find_overlaid();
        self.checkpointer.bytes_in_row += bytes;
        (self.checkpointer.last_fold, self.checkpointer.fold_done_at) = ((bytes, runs), self.basis.now);
        if self.folds_on(bytes, runs) {
            return self.begin_fold(out);
        }
        self.begin_capture(out);
    }
}

enum Merged {
    /// Nothing of it changes.
    Nothing,
    Leaf(MergedLeaf),
    /// It found no room in the segment.
    Full,
}

impl Merging {
    fn nothing() -> Merging {
        Merging { left: Vec::new().into_iter(), below: BTreeMap::new(), payload: Payload::new(0) }
    }
}

impl Fold {
    fn goes_first(&self, no: LeafNo) -> bool {
        self.going.under.contains_key(&no) || self.narrow.contains(&no)
    }
}
