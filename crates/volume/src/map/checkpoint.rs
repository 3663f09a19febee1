//! Checkpoints: the state of the map as of an LSN, in metadata segments, named by a record in the log.
//!
//! States: idle -> folding (a batch of leaves is merged with the overlay and written; optional) -> condemning
//! (dead segments leave the table, in slices) -> writing (the state is captured, in slices, and the runs of the
//! checkpoint are being put) -> recording (its record is in the log) -> idle. The base changes leaf by leaf, when the
//! new ones are durable, and then the state is captured ([`super::capture`]); a crash at any point leaves the previous
//! checkpoint whole.
//!
//! A run is full (everything) or a delta (what changed since the last run); a chain is a full run and its deltas.
//!
//! Protocol rules 15 (trim point), 18 (nothing that the last durable checkpoint names is freed), 24 (sorted deltas).

use super::capture::Capture;
use super::folding::Fold;
use super::leaf::{LeafNo, LeafPointer};
use super::run::{Packed, PartIndex, RunWriter, pointers_into};
use crate::api::State;
use crate::controller::{Controller, Out};
use crate::log::window::Done;
use crate::segment::Kind;
use crate::segment::writer::JobKind;
use holdfast_base::{Instant, Lsn};
use holdfast_format::geometry::Geometry;
use holdfast_format::ledger::{LedgerRef, Leg};
use holdfast_format::record::{Checkpoint, MetaPointer, Record, SegmentNo};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Folds follow each other before a checkpoint, while the overlay takes more memory than it may, until they have
/// written so many segments' bytes, or for so long.
const ROW_SEGMENTS_MAX: u64 = 4;
const ROW_MAX: Duration = Duration::from_secs(5);

/// Deltas after a full run before everything is written again.
const CHAIN_MAX: usize = 12;

/// While the volume is handed over: another host reads them.
const CHAIN_KEPT_MAX: usize = 64;

/// And everything is written again, too, once it is less than this part of what the chain's runs have named.
const SHRUNK_PART: usize = 4;

/// Segments that are looked at without asking whether the turn has done its slice.
const CONDEMNED_AT_ONCE: usize = 32;

/// A dirty volume is checkpointed at least this often, so that an idle log becomes empty.
const AGE_MAX: Duration = Duration::from_secs(3);

/// A fold that the cleaner waits for begins this soon.
const FOLD_AGE_MAX: Duration = Duration::from_millis(500);

/// A fold by age alone happens at most this often: while it is not known what is hidden, and else.
const FOLD_EVERY: Duration = Duration::from_secs(5);
const FOLD_EVERY_KNOWN: Duration = Duration::from_secs(30);

/// Metadata of too few copies is looked for this often; so many of its leaves are written anew with a fold.
const NARROW_EVERY: Duration = Duration::from_secs(1);
const NARROW_LEAVES_MAX: usize = 128;

/// Segments whose shards are to be deleted: how many, and where they are.
pub(crate) type Condemned = BTreeMap<SegmentNo, Vec<Leg>>;

#[derive(Debug, Default)]
pub(super) enum Stage {
    #[default]
    Idle,
    Folding(Box<Fold>),
    /// Up to that segment dead ones have left the table.
    Condemning(Option<SegmentNo>),
    Writing(Writing),
    Recording,
}

#[derive(Debug)]
pub(super) struct Writing {
    lsn: Lsn,
    full: bool,
    /// What is not encoded yet; absent when all is.
    capture: Option<Box<Capture>>,
    /// By job.
    jobs: Vec<PartIndex>,
    pointers: Vec<Vec<MetaPointer>>,
    pending: usize,
}

#[derive(Debug, Default)]
pub(crate) struct Checkpointer {
    pub(crate) durable: Checkpoint,
    pub(crate) last_roll: Instant,
    pub(super) folded_last: Instant,
    /// The last fold: leaves' bytes that it wrote, runs that it took out of the overlay, and when it was done.
    pub(super) last_fold: (u64, u64),
    pub(super) fold_done_at: Instant,
    /// When work that is done in slices goes on.
    pub(super) slice_at: Option<Instant>,
    looked_at: Instant,
    pub(crate) captured: Lsn,
    journal_fill: u8,
    bytes_at_capture: u64,
    started_at: Instant,
    pub(super) fold_cursor: u64,
    /// Of leaves that were folded since the last checkpoint.
    pub(super) bytes_in_row: u64,
    pub(super) folded_leaves: Vec<LeafNo>,
    pub(super) folded_at: Lsn,
    pub(super) stage: Stage,
    condemned: Condemned,
    /// Homes of segments whose free record is in the log.
    pub(crate) freeing: Condemned,
    chain_len: usize,
    /// The most leaves, segments and runs of the overlay that there were at any run of the chain; of one that was
    /// loaded, at its last.
    chain_names: usize,
}

impl Checkpointer {
    pub(crate) fn note_journal_fill(&mut self, fill: u8) {
        self.journal_fill = self.journal_fill.max(fill);
    }

    pub(crate) fn journal_fill(&self) -> u8 {
        self.journal_fill
    }

    pub(crate) fn is_idle(&self) -> bool {
        matches!(self.stage, Stage::Idle)
    }

    /// What a full run that is written now says of the leaves that it names.
    pub(crate) fn folded_at(&self) -> Lsn {
        self.folded_at
    }

    /// Segments that the last durable checkpoint names, and the next one doesn't.
    pub(crate) fn condemned(&self) -> impl Iterator<Item = SegmentNo> {
        self.condemned.keys().copied()
    }

    pub(crate) fn is_folding(&self) -> bool {
        matches!(self.stage, Stage::Folding(_))
    }

    /// Continues a chain that was loaded.
    pub(crate) fn resume(&mut self, durable: Checkpoint) {
        self.captured = durable.lsn;
        // A run may have several parts, and has segments of its own.
        self.chain_len = durable.runs.iter().map(|run| run.segment).collect::<BTreeSet<_>>().len();
        self.durable = durable;
    }

    /// Guests that have waited for the volume come first: what a checkpoint is due for by age alone waits as long as
    /// after one.
    pub(crate) fn rest(&mut self, now: Instant) {
        (self.started_at, self.folded_last) = (now, now);
    }
}

impl Controller {
    pub(crate) fn drive_checkpoint(&mut self, out: Out) {
        if !self.checkpointer.is_idle() || self.topology().meta_layout_now().is_none() || !self.wants_checkpoint() {
            return;
        }
        self.checkpointer.started_at = self.basis.now;
        let many = self.map.run_count() >= self.map.fold_runs(self.basis.config.fold_runs_min)
            || self.wants.fold
            || self.fold_is_due();
        if many && self.care.cleaner.is_idle() && self.state == State::Open && !self.empties_log_by_checkpoint() {
            self.begin_fold(out);
        } else {
            self.begin_capture(out);
        }
    }

    /// It takes more memory than it may, and a fold would take something out of it.
    pub(crate) fn overlay_wants_fold(&self) -> bool {
        self.map.overlay_is_large(self.log.undestaged_count())
            && self.map.unfolded
            && self.topology().meta_layout_now().is_some()
    }

    /// The overlay takes more memory than it may, and the cleaner, for which folds wait, has had time since the last
    /// one. Not where room is nearly gone.
    pub(crate) fn fold_goes_first(&self) -> bool {
        let (bytes, runs) = self.checkpointer.last_fold;
        self.overlay_wants_fold()
            && self.basis.now.since(self.checkpointer.fold_done_at) >= FOLD_AGE_MAX
            && self.map.is_fold_worth(bytes, runs, self.log.undestaged_count())
            && !self.room.is_nearly_gone()
    }

    /// Whether another fold follows one that has written `bytes` of leaves and taken `runs` out of the overlay: it
    /// takes more memory than it may. A row of them returns no room and shortens no log: it ends before either is
    /// missed.
    pub(super) fn folds_on(&self, bytes: u64, runs: u64) -> bool {
        let grown = self.log.total_bytes - self.checkpointer.bytes_at_capture;
        let has_time = self.basis.now.since(self.checkpointer.started_at) < ROW_MAX
            && grown < self.basis.config.writeback_bytes_max / 4
            && !self.is_pressed_for_checkpoint();
        let has_room = !self.room.is_short() && !self.room.is_wanted() && !self.wants.free;
        self.map.overlay_is_large(self.log.undestaged_count())
            && self.map.is_fold_worth(bytes, runs, self.log.undestaged_count())
            && self.map.unfolded
            && self.checkpointer.bytes_in_row < ROW_SEGMENTS_MAX * u64::from(self.basis.config.segment_payload_bytes)
            && has_time
            && has_room
            && self.state == State::Open
            && self.care.cleaner.is_idle()
            && self.topology().meta_layout_now().is_some()
    }

    /// A journal is filling up, or space is awaited, which only a checkpoint frees.
    fn is_pressed_for_checkpoint(&self) -> bool {
        self.checkpointer.journal_fill > 110 || self.wants.hurry
    }

    fn wants_checkpoint(&self) -> bool {
        let grown = self.log.total_bytes - self.checkpointer.bytes_at_capture;
        let since = self.basis.now.since(self.checkpointer.started_at);
        let is_awaited = self.wants.fold && self.care.cleaner.is_idle() || self.wants.free;
        let age_max = if is_awaited { FOLD_AGE_MAX } else { AGE_MAX };
        let is_wanted = self.state == State::Closing || self.empties_log_by_checkpoint();
        let idle = is_wanted || since >= age_max || self.wants.rewrite;
        let pressed = self.is_pressed_for_checkpoint() && since >= Duration::from_millis(100);
        // Nothing is folded while the volume closes.
        let fold_wanted = self.wants.fold && self.state == State::Open;
        (self.wants.checkpoint || fold_wanted || self.wants.rewrite || self.fold_is_due())
            && (idle || pressed || grown >= self.basis.config.writeback_bytes_max / 8)
    }

    /// What has lain in the overlay for a while is folded even if it is little: only then are all dead segments known.
    fn fold_is_due(&self) -> bool {
        let every = if self.map.shadow.is_known() { FOLD_EVERY_KNOWN } else { FOLD_EVERY };
        let rested = self.basis.now.since(self.checkpointer.folded_last) >= every;
        self.map.unfolded && rested && self.care.cleaner.is_idle() && self.state == State::Open
    }

    /// What only a checkpoint ends: sealed ledgers are let go of, and metadata that was written while nodes were away,
    /// or before the layout was changed, is written anew.
    pub(crate) fn look_for_old_metadata(&mut self) {
        if self.basis.now.since(self.checkpointer.looked_at) < NARROW_EVERY {
            return;
        }
        self.checkpointer.looked_at = self.basis.now;
        // A sealed ledger whose last records no checkpoint covers would be needed for ever, with whatever legs it has
        // left.
        let is_held = |ledger: &LedgerRef| ledger.sealed.is_some_and(|sealed| sealed > self.log.trimmed);
        let holds = self.root().ledgers.iter().any(is_held);
        self.wants.checkpoint |= holds && self.log.all_destaged();
        let can_spread = self.topology().can_spread();
        for (_, info) in self.segments.metadata().filter(|(_, info)| info.live > 0) {
            let is_narrow = self.topology().could_be_wider(&info.geometry);
            self.wants.fold |= is_narrow && info.kind == Kind::Meta;
            // Where they lie the checkpoint says: they are not moved.
            let is_together = can_spread && self.topology().crowded(&info.geometry, &info.homes).is_some();
            self.wants.rewrite |= (is_narrow || is_together) && info.kind == Kind::Run;
        }
    }

    /// Some of the leaves that lie in segments of too few copies, or too damaged ones.
    pub(super) fn narrow_leaves(&self) -> BTreeSet<LeafNo> {
        let is_narrow = |no: &SegmentNo| {
            let is_narrow = self.segments.get(*no).is_some_and(|s| self.topology().could_be_wider(&s.geometry));
            is_narrow || self.care.repairer.is_stuck(*no)
        };
        let metas = self.segments.metadata().filter(|(_, info)| info.kind == Kind::Meta);
        let narrow: BTreeSet<SegmentNo> = metas.map(|(no, _)| no).filter(is_narrow).collect();
        if narrow.is_empty() {
            return BTreeSet::new();
        }
        let lies_there = |(_, pointer): &(LeafNo, LeafPointer)| narrow.contains(&pointer.segment);
        self.map.directory.iter().filter(lies_there).map(|(no, _)| no).take(NARROW_LEAVES_MAX).collect()
    }

    // ---- capturing and writing ----

    /// A checkpoint begins: dead segments leave the table, and then the state is captured.
    pub(super) fn begin_capture(&mut self, out: Out) {
        self.checkpointer.bytes_in_row = 0;
        self.wants.on_condemning();
        self.care.cleaner.on_condemning();
        self.checkpointer.stage = Stage::Condemning(None);
        self.condemn_or_capture(out);
    }

    pub(super) fn condemn_or_capture(&mut self, out: Out) {
        let Stage::Condemning(mut last) = self.checkpointer.stage else { return };
        if self.condemn_some(&mut last) {
            return self.capture(out);
        }
        self.checkpointer.stage = Stage::Condemning(last);
        self.slice_soon();
    }

    /// Takes the state as of the completed LSN and writes it as a run.
    fn capture(&mut self, out: Out) {
        let rewrite = std::mem::take(&mut self.wants.rewrite);
        self.map.limit_leaves();
        let names = self.names();
        let chain_max = if self.keeps_chain() { CHAIN_KEPT_MAX } else { CHAIN_MAX };
        let is_long = self.checkpointer.chain_len >= chain_max;
        let has_shrunk = names < self.checkpointer.chain_names / SHRUNK_PART;
        let full = rewrite || self.checkpointer.durable.runs.is_empty() || is_long || has_shrunk;
        self.checkpointer.chain_names = if full { names } else { names.max(self.checkpointer.chain_names) };
        let (lsn, payload_bytes) = (self.log.completed, self.basis.config.segment_payload_bytes);
        let checkpointer = &mut self.checkpointer;
        let folded = std::mem::take(&mut checkpointer.folded_leaves).into_iter().collect();
        let writer = RunWriter::new(full, self.map.layers.clone(), checkpointer.folded_at, payload_bytes);
        let since = (!full).then_some(checkpointer.captured);
        let capture = Some(Box::new(Capture::begin(&mut self.map, &mut self.segments, since, folded, writer)));
        let (jobs, pointers) = (Vec::new(), Vec::new());
        checkpointer.stage = Stage::Writing(Writing { lsn, full, capture, jobs, pointers, pending: 0 });
        checkpointer.captured = lsn;
        checkpointer.bytes_at_capture = self.log.total_bytes;
        self.wants.on_captured();
        checkpointer.journal_fill = 0;
        self.capture_some(out);
    }

    /// What a full run would name.
    fn names(&self) -> usize {
        self.map.directory.len() + self.segments.len() + self.map.run_count()
    }

    /// A chain has been loaded.
    pub(crate) fn on_runs_loaded(&mut self) {
        self.checkpointer.chain_names = self.names();
    }

    /// Segments that nothing names leave the table with this checkpoint; once it is durable they are freed. True when
    /// all have.
    ///
    /// Between two slices the map goes on changing. Invariant: nothing dead is named again, so that what has left the
    /// table is missed by nobody. What dies behind the walk is wanted to be freed anew, by another checkpoint.
    fn condemn_some(&mut self, last: &mut Option<SegmentNo>) -> bool {
        while !self.has_sliced() {
            let looked_at: Vec<SegmentNo> = self.segments.unseen_after(*last).take(CONDEMNED_AT_ONCE).collect();
            self.turn.slice("checkpoint: dead segments are condemned", looked_at.len());
            for no in &looked_at {
                let is_held = self.segments.is_unsettled(*no) || self.care.cleaner.is_victim(*no);
                if !is_held && !self.is_named_by_dependents(*no) {
                    self.condemn(*no);
                }
            }
            *last = looked_at.last().copied();
            if last.is_none() {
                return true;
            }
        }
        false
    }

    fn condemn(&mut self, no: SegmentNo) {
        let info = self.segments.remove(no).expect("just listed");
        if info.kind == Kind::Data {
            self.room.on_dead(self.basis.now);
        }
        self.care.repairer.forget(no);
        // The last durable checkpoint still names it: exempt from clean-up until its free record is complete.
        self.segments.unsettle(no);
        self.checkpointer.condemned.insert(no, info.homes);
    }

    /// Encodes what was captured, as much as a slice allows, and puts full payloads into segments.
    pub(super) fn capture_some(&mut self, out: Out) {
        let Stage::Writing(Writing { capture, .. }) = &mut self.checkpointer.stage else { return };
        let Some(mut capture) = capture.take() else { return };
        while !self.has_sliced() && !capture.is_done() {
            let runs = capture.go_on(&mut self.map, &mut self.segments);
            self.turn.slice("checkpoint: what has changed is encoded", runs);
        }
        while let Some(packed) = capture.next_packed() {
            self.write_runs(packed, out);
        }
        if capture.is_done() {
            return;
        }
        let Stage::Writing(writing) = &mut self.checkpointer.stage else { unreachable!("jobs take longer") };
        writing.capture = Some(capture);
        self.slice_soon();
    }

    fn write_runs(&mut self, packed: Packed, out: Out) {
        let Stage::Writing(writing) = &mut self.checkpointer.stage else { unreachable!("runs are captured") };
        let kind = JobKind::Runs { part: writing.jobs.len() };
        writing.jobs.push(packed.index.clone());
        writing.pointers.push(Vec::new());
        writing.pending += 1;
        self.counters.checkpoint_bytes += packed.bytes();
        self.write_segment(packed.into_work(kind), out);
    }

    pub(crate) fn on_runs_durable(&mut self, part: usize, segment: SegmentNo, out: Out) {
        let info = self.segments.get(segment).expect("just put into the table");
        let (geometry, homes): (Geometry, Vec<Leg>) = (info.geometry, info.homes.clone());
        let Stage::Writing(writing) = &mut self.checkpointer.stage else {
            panic!("a run became durable outside a checkpoint")
        };
        writing.pointers[part] = pointers_into(&writing.jobs[part], segment, geometry, &homes);
        writing.pending -= 1;
        if writing.pending > 0 || writing.capture.is_some() {
            return;
        }
        let Stage::Writing(writing) = std::mem::replace(&mut self.checkpointer.stage, Stage::Recording) else {
            unreachable!("just seen")
        };
        let mut runs = if writing.full { Vec::new() } else { self.checkpointer.durable.runs.clone() };
        self.checkpointer.chain_len = if writing.full { 1 } else { self.checkpointer.chain_len + 1 };
        runs.extend(writing.pointers.into_iter().flatten());
        let checkpoint = Checkpoint { lsn: writing.lsn, runs };
        self.append_control(Record::Checkpoint(checkpoint.clone()), Done::Checkpointed(checkpoint), out);
    }

    pub(crate) fn on_checkpointed(&mut self, _lsn: Lsn, checkpoint: Checkpoint, out: Out) {
        self.counters.checkpoints += 1;
        self.checkpointer.stage = Stage::Idle;
        let named: BTreeSet<SegmentNo> = checkpoint.runs.iter().map(|r| r.segment).collect();
        let old: BTreeSet<SegmentNo> = self.checkpointer.durable.runs.iter().map(|r| r.segment).collect();
        self.checkpointer.durable = checkpoint;
        for no in old.difference(&named) {
            if let Some(info) = self.segments.remove(*no) {
                self.care.repairer.forget(*no);
                self.checkpointer.condemned.insert(*no, info.homes);
            }
        }
        self.free_condemned(out);
        self.trim(out);
    }

    /// Writes the record after which the shards of condemned segments may be deleted (protocol rule 17).
    fn free_condemned(&mut self, out: Out) {
        let first_own = self.root().first_own();
        let mut condemned = std::mem::take(&mut self.checkpointer.condemned);
        // An origin's are its owner's to free: they are let go of.
        let released: Vec<SegmentNo> = condemned.extract_if(..first_own, |_, _| true).map(|(no, _)| no).collect();
        for no in &released {
            self.segments.settle(*no);
        }
        if !released.is_empty() {
            self.on_released();
        }
        if condemned.is_empty() {
            return;
        }
        let segments: Vec<SegmentNo> = condemned.keys().copied().collect();
        segments.iter().for_each(|no| self.segments.unsettle(*no));
        self.checkpointer.freeing.extend(condemned);
        for chunk in segments.chunks(1024) {
            let chunk = chunk.to_vec();
            self.append_control(Record::Free { segments: chunk.clone() }, Done::Freed(chunk), out);
        }
    }

    /// An id that was given out and will never be committed.
    pub(crate) fn abandon_segment(&mut self, no: SegmentNo, homes: Vec<Leg>, out: Out) {
        self.checkpointer.freeing.insert(no, homes);
        self.append_control(Record::Free { segments: vec![no] }, Done::Freed(vec![no]), out);
    }

    /// Forgets log entries that are destaged and that the last durable checkpoint covers (protocol rule 15).
    pub(crate) fn trim(&mut self, out: Out) {
        let destaged = self.log.first_undestaged().prev();
        let upto = if self.basis.config.mutations.trim_past_commit() {
            destaged.min(self.log.completed)
        } else {
            destaged.min(self.checkpointer.durable.lsn)
        };
        if upto <= self.log.trimmed {
            return;
        }
        self.log.trim(upto);
        self.send_trims(out);
    }

    pub(crate) fn send_trims(&mut self, out: Out) {
        use crate::api::Lane;
        use crate::peers::Purpose;
        use holdfast_format::wire::Request;
        let (volume, epoch, upto) = (self.basis.config.volume, self.epoch(), self.log.trimmed);
        for ledger in self.root().ledgers.clone() {
            for leg in &ledger.legs {
                if self.peers.leg_usable(*leg) {
                    let request = Request::TrimLedger { device: leg.device, volume, epoch, ledger: ledger.id, upto };
                    self.send(leg.node, Lane::Fast, Purpose::Forget, request, Vec::new(), out);
                }
            }
        }
    }
}
