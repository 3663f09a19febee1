//! Checkpoints: the state of the map as of an LSN, in metadata segments, named by a record in the log.
//!
//! States: idle -> folding (a batch of leaves is merged with the overlay and written; optional) -> condemning
//! (dead segments leave the table, in slices) -> writing (the state is captured, in slices, and the runs of the
//! checkpoint are being put) -> recording (its record is in the log) -> freeing (of the segments that left the table, in
//! slices) -> idle. The base changes leaf by leaf, when the
//! new ones are durable, and then the state is captured ([`super::capture`]); a crash at any point leaves the previous
//! checkpoint whole.
//!
//! A run is full (everything) or a delta (what changed since the last run); a chain is a full run and its deltas.
//!
//! Role: [`Checkpointer`] decides when, and does it; what it wants of others it leaves to the controller, as [`Wish`]es.
//!
//! Protocol rules 15 (trim point), 18 (nothing that the last durable checkpoint names is freed), 24 (sorted deltas).

use super::capture::Capture;
use super::folding::{Folds, Gain, Went};
use super::leaf::{Leaf, LeafNo};
use super::run::{Packed, PartIndex, RunWriter, pointers_into};
use super::{Accounts, Map};
use crate::api::{Counters, State};
use crate::basis::Basis;
use crate::care::Care;
use crate::log::window::{Done, Log};
use crate::owner::handover::Handover;
use crate::peers::Peers;
use crate::segment::direct::DirectWrites;
use crate::segment::fetch::FetchError;
use crate::segment::writer::{JobKind, Work};
use crate::segment::{Kind, Segments};
use crate::sharing::segments::SharedSegments;
use crate::space::{Room, Topology};
use crate::turn::Turn;
use crate::wants::Wants;
use holdfast_base::{Instant, Lsn};
use holdfast_format::geometry::Geometry;
use holdfast_format::ledger::{LedgerRef, Leg};
use holdfast_format::record::{Checkpoint, MetaPointer, Record, SegmentNo};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
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

/// A fold by age alone happens at most this often: while it is not known what is shadowed, and else.
const FOLD_EVERY: Duration = Duration::from_secs(5);
const FOLD_EVERY_KNOWN: Duration = Duration::from_secs(30);

/// Metadata of too few copies is looked for this often.
const NARROW_EVERY: Duration = Duration::from_secs(1);

/// A journal that is fuller than this, in 1/255, is emptied by a checkpoint.
const JOURNAL_PRESSURE: u8 = 110;

/// Under such pressure one checkpoint follows the other after this time.
const PRESSED_EVERY: Duration = Duration::from_millis(100);

/// Segments that one record frees.
const FREED_AT_ONCE: usize = 1024;

/// What is wanted of others, for a checkpoint.
#[derive(Debug)]
pub(crate) enum Wish {
    /// Leaves are to be loaded for a fold.
    Load(Vec<LeafNo>),
    /// A segment of leaves or runs is to be written.
    Write(Work),
    Append(Record, Done),
    /// Segments of an origin are named no more.
    Released,
    /// A checkpoint is durable: what it covers may leave the log.
    Trim,
}

/// What the checkpointer works with.
pub(crate) struct Around<'a> {
    pub(crate) basis: &'a Basis,
    pub(crate) state: State,
    pub(crate) peers: &'a Peers,
    pub(crate) map: &'a mut Map,
    pub(crate) segments: &'a mut Segments,
    pub(crate) log: &'a mut Log,
    pub(crate) wants: &'a mut Wants,
    pub(crate) care: &'a mut Care,
    pub(crate) room: &'a mut Room,
    pub(crate) shared: &'a SharedSegments,
    pub(crate) handover: &'a Handover,
    pub(crate) direct: &'a DirectWrites,
    pub(crate) counters: &'a mut Counters,
    pub(crate) turn: &'a mut Turn,
    pub(crate) wishes: &'a mut Vec<Wish>,
}

impl Around<'_> {
    pub(super) fn topology(&self) -> Topology<'_> {
        Topology::new(self.basis, self.peers)
    }

    pub(super) fn map_and_accounts(&mut self) -> (&mut Map, Accounts<'_>) {
        let mutations = self.basis.config.mutations;
        let (segments, log, wants) = (&mut *self.segments, &mut *self.log, &mut *self.wants);
        (&mut *self.map, Accounts { segments, log, wants, audit: &mut self.care.audit, mutations })
    }

    /// Runs that this turn may go through.
    pub(super) fn left_of_slice(&self) -> usize {
        self.turn.left(self.basis)
    }

    /// Whether this turn has done its slice.
    pub(super) fn has_sliced(&self) -> bool {
        self.left_of_slice() == 0
    }

    /// Whether nothing but a checkpoint is left to do until the log is empty, for which another host waits.
    fn empties_log(&self) -> bool {
        self.state == State::Open && self.handover.waits_for_checkpoint(self.log)
    }

    /// Whether metadata can be written, given the nodes that are there.
    fn can_write(&self) -> bool {
        self.topology().meta_layout_now().is_some()
    }

    /// Folds and the cleaner take turns; and nothing is folded while the volume closes.
    fn may_fold(&self) -> bool {
        self.state == State::Open && self.care.cleaner.is_idle()
    }

    /// What a full run would name.
    fn names(&self) -> usize {
        self.map.directory.len() + self.segments.len() + self.map.run_count()
    }
}

/// Segments whose shards are to be deleted, and where they are.
type Condemned = BTreeMap<SegmentNo, Vec<Leg>>;

#[derive(Debug, Default)]
enum Stage {
    #[default]
    Idle,
    Folding,
    /// Up to that segment dead ones have left the table.
    Condemning(Option<SegmentNo>),
    Writing(Writing),
    Recording,
    /// These are yet to be freed.
    Freeing(Condemned),
}

#[derive(Debug)]
struct Writing {
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
    stage: Stage,
    folds: Folds,
    durable: Checkpoint,
    /// The LSN that the newest run was captured at.
    captured: Lsn,
    /// When work that is done in slices goes on.
    slice_at: Option<Instant>,
    /// When the last look for old metadata began, and what it comes to next.
    looked_at: Instant,
    unseen: Option<SegmentNo>,
    journal_fill: u8,
    bytes_at_capture: u64,
    started_at: Instant,
    condemned: Condemned,
    /// Homes of segments whose free record is in the log.
    freeing: Condemned,
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

    /// The newest checkpoint that is durable.
    pub(crate) fn durable(&self) -> &Checkpoint {
        &self.durable
    }

    /// What a full run that is written now says of the leaves that it names.
    pub(crate) fn folded_at(&self) -> Lsn {
        self.folds.captured()
    }

    /// Segments that the last durable checkpoint names, and the next one doesn't.
    pub(crate) fn condemned(&self) -> impl Iterator<Item = SegmentNo> {
        self.condemned.keys().copied()
    }

    /// Whether the shards of segments are about to be deleted.
    pub(crate) fn is_freeing(&self) -> bool {
        !self.freeing.is_empty() || matches!(self.stage, Stage::Freeing(_))
    }

    pub(crate) fn is_folding(&self) -> bool {
        matches!(self.stage, Stage::Folding)
    }

    /// When the next slice is due.
    pub(crate) fn slice_deadline(&self) -> Option<Instant> {
        self.slice_at
    }

    /// Continues a chain that was loaded.
    pub(crate) fn resume(&mut self, durable: Checkpoint) {
        self.captured = durable.lsn;
        // A run may have several parts, and has segments of its own.
        self.chain_len = durable.runs.iter().map(|run| run.segment).collect::<BTreeSet<_>>().len();
        self.durable = durable;
    }

    /// A chain has been loaded, of a map that names so much.
    pub(crate) fn on_runs_loaded(&mut self, around: &Around<'_>) {
        self.chain_names = around.names();
    }

    /// Guests that have waited for the volume come first: what a checkpoint is due for by age alone waits as long as
    /// after one.
    pub(crate) fn rest(&mut self, now: Instant) {
        self.started_at = now;
        self.folds.rest(now);
    }

    // ---- when ----

    /// Begins a checkpoint, if one is wanted.
    pub(crate) fn drive(&mut self, around: &mut Around<'_>) {
        // A walk for another volume keeps the directory, and it is one walk at a time.
        let is_free = self.is_idle() && !around.shared.is_composing();
        if !is_free || !around.can_write() || !self.is_wanted(around) {
            return;
        }
        self.started_at = around.basis.now;
        let many = around.map.run_count() >= around.map.fold_runs(around.basis.config.fold_runs_min)
            || around.wants.fold
            || self.fold_is_due(around);
        if many && around.may_fold() && !around.empties_log() {
            self.begin_fold(around);
        } else {
            self.begin_capture(around);
        }
    }

    /// The next slice, if it is due.
    pub(crate) fn drive_slice(&mut self, around: &mut Around<'_>) {
        if self.slice_at.is_none_or(|at| at > around.basis.now) {
            return;
        }
        self.slice_at = None;
        match &self.stage {
            Stage::Folding => {
                let went = self.folds.go_on(around);
                self.on_fold(went, around);
            }
            Stage::Condemning(_) => self.condemn_or_capture(around),
            Stage::Writing(_) => self.capture_some(around),
            Stage::Freeing(_) => self.free_some(around),
            Stage::Idle | Stage::Recording => {}
        }
    }

    fn slice_soon(&mut self, around: &Around<'_>) {
        self.slice_at = Some(around.basis.next_slice_at());
    }

    fn is_wanted(&self, around: &Around<'_>) -> bool {
        let (wants, basis) = (&around.wants, around.basis);
        let grown = around.log.total_bytes - self.bytes_at_capture;
        let since = basis.now.since(self.started_at);
        let is_awaited = wants.fold && around.care.cleaner.is_idle() || wants.free;
        let age_max = if is_awaited { FOLD_AGE_MAX } else { AGE_MAX };
        let is_wanted = around.state == State::Closing || around.empties_log();
        let idle = is_wanted || since >= age_max || wants.rewrite;
        let pressed = self.is_pressed(around) && since >= PRESSED_EVERY;
        let fold_wanted = wants.fold && around.state == State::Open;
        (wants.checkpoint || fold_wanted || wants.rewrite || self.fold_is_due(around))
            && (idle || pressed || grown >= basis.config.writeback_bytes_max / 8)
    }

    /// A journal is filling up, or space is awaited, which only a checkpoint frees.
    fn is_pressed(&self, around: &Around<'_>) -> bool {
        self.journal_fill > JOURNAL_PRESSURE || around.wants.hurry
    }

    /// What has lain in the overlay for a while is folded even if it is little: only then are all dead segments known.
    fn fold_is_due(&self, around: &Around<'_>) -> bool {
        let every = if around.map.shadow.is_known() { FOLD_EVERY_KNOWN } else { FOLD_EVERY };
        around.map.unfolded && around.basis.now.since(self.folds.began_at()) >= every && around.may_fold()
    }

    /// What only a checkpoint ends: sealed ledgers are let go of, and metadata that was written while nodes were away,
    /// or before the layout was changed, is written anew. A look goes on as far as the turn has not done its slice.
    pub(crate) fn look_for_old_metadata(&mut self, around: &mut Around<'_>) {
        if self.unseen.is_none() {
            if around.basis.now.since(self.looked_at) < NARROW_EVERY {
                return;
            }
            self.looked_at = around.basis.now;
            self.unseen = Some(SegmentNo::default());
            // A sealed ledger whose last records no checkpoint covers would be needed for ever, with whatever legs it
            // has left.
            let is_held = |ledger: &LedgerRef| ledger.sealed.is_some_and(|sealed| sealed > around.log.trimmed);
            let holds = around.basis.root().ledgers.iter().any(is_held);
            around.wants.checkpoint |= holds && around.log.all_destaged() && around.log.trims_at.is_none();
        }
        let topology = Topology::new(around.basis, around.peers);
        let (can_spread, shards_now) = (topology.can_spread(), topology.meta_shards_now());
        let mut metadata = around.segments.metadata_from(self.unseen.unwrap_or_default());
        let mut looked_at = 0;
        for (_, info) in metadata.by_ref().take(around.turn.left(around.basis)) {
            looked_at += 1;
            let is_narrow = info.geometry.shard_count() < shards_now;
            match info.kind {
                Kind::Meta => around.wants.fold |= info.is_live() && is_narrow,
                // Where they lie the checkpoint says: they are not moved.
                Kind::Run if info.is_live() && !around.wants.rewrite => {
                    let is_together = can_spread && topology.crowded(&info.geometry, &info.homes).is_some();
                    around.wants.rewrite = is_narrow || is_together;
                }
                Kind::Run | Kind::Data => {}
            }
        }
        self.unseen = metadata.next().map(|(no, _)| no);
        around.turn.slice("checkpoint: old metadata is looked for", looked_at);
    }

    /// Whether a look for old metadata is under way.
    pub(crate) fn is_looking(&self) -> bool {
        self.unseen.is_some()
    }

    // ---- folding ----

    fn begin_fold(&mut self, around: &mut Around<'_>) {
        self.stage = Stage::Folding;
        let went = self.folds.begin(around);
        self.on_fold(went, around);
    }

    /// A leaf that a fold has wished for is there, or can't be read.
    pub(crate) fn on_leaf(&mut self, around: &mut Around<'_>, no: LeafNo, leaf: Result<Arc<Leaf>, FetchError>) {
        let went = self.folds.on_leaf(around, no, leaf);
        self.on_fold(went, around);
    }

    /// A fold's leaves are durable in that segment.
    pub(crate) fn on_leaves_durable(&mut self, around: &mut Around<'_>, segment: SegmentNo) {
        let went = self.folds.on_written(around, segment);
        self.on_fold(went, around);
    }

    fn on_fold(&mut self, went: Went, around: &mut Around<'_>) {
        match went {
            Went::Waits => {}
            Went::Slice => self.slice_soon(around),
            Went::Done if self.folds_on(around) => self.begin_fold(around),
            Went::Done => self.begin_capture(around),
        }
    }

    /// Whether another fold follows the one that is done: the overlay takes more memory than it may. A row of them
    /// returns no room and shortens no log: it ends before either is missed.
    fn folds_on(&self, around: &Around<'_>) -> bool {
        let config = &around.basis.config;
        let grown = around.log.total_bytes - self.bytes_at_capture;
        let has_time = around.basis.now.since(self.started_at) < ROW_MAX
            && grown < config.writeback_bytes_max / 4
            && !self.is_pressed(around);
        let has_room = !around.room.is_short() && !around.room.is_wanted() && !around.wants.free;
        self.overlay_wants_fold(around)
            && self.is_fold_worth(around)
            && self.folds.bytes_in_row() < ROW_SEGMENTS_MAX * u64::from(config.segment_payload_bytes)
            && has_time
            && has_room
            && around.may_fold()
    }

    fn is_fold_worth(&self, around: &Around<'_>) -> bool {
        let Gain { bytes, runs } = self.folds.last();
        around.map.is_fold_worth(bytes, runs, around.log.undestaged_count())
    }

    /// It takes more memory than it may, and a fold would take something out of it.
    pub(crate) fn overlay_wants_fold(&self, around: &Around<'_>) -> bool {
        around.map.overlay_is_large(around.log.undestaged_count()) && around.map.unfolded && around.can_write()
    }

    /// The overlay takes more memory than it may, and the cleaner, for which folds wait, has had time since the last
    /// one. Not where room is nearly gone.
    pub(crate) fn fold_goes_first(&self, around: &Around<'_>) -> bool {
        self.overlay_wants_fold(around)
            && around.basis.now.since(self.folds.done_at()) >= FOLD_AGE_MAX
            && self.is_fold_worth(around)
            && !around.room.is_nearly_gone()
    }

    // ---- capturing and writing ----

    /// A checkpoint begins: dead segments leave the table, and then the state is captured.
    fn begin_capture(&mut self, around: &mut Around<'_>) {
        self.folds.end_row();
        around.wants.on_condemning();
        around.care.cleaner.on_condemning();
        self.stage = Stage::Condemning(None);
        self.condemn_or_capture(around);
    }

    fn condemn_or_capture(&mut self, around: &mut Around<'_>) {
        let Stage::Condemning(mut last) = self.stage else { return };
        if self.condemn_some(&mut last, around) {
            return self.capture(around);
        }
        self.stage = Stage::Condemning(last);
        self.slice_soon(around);
    }

    /// Takes the state as of the completed LSN and writes it as a run.
    fn capture(&mut self, around: &mut Around<'_>) {
        let rewrite = std::mem::take(&mut around.wants.rewrite);
        around.map.limit_leaves();
        let names = around.names();
        let chain_max = if around.handover.keeps_chain() { CHAIN_KEPT_MAX } else { CHAIN_MAX };
        let is_long = self.chain_len >= chain_max;
        let has_shrunk = names < self.chain_names / SHRUNK_PART;
        let full = rewrite || self.durable.runs.is_empty() || is_long || has_shrunk;
        self.chain_names = if full { names } else { names.max(self.chain_names) };
        let (lsn, payload_bytes) = (around.log.completed, around.basis.config.segment_payload_bytes);
        let folded = self.folds.take_leaves();
        let writer = RunWriter::new(full, around.map.layers.clone(), self.folds.captured(), payload_bytes);
        let since = (!full).then_some(self.captured);
        let capture = Some(Box::new(Capture::begin(around.map, around.segments, since, folded, writer)));
        self.stage = Stage::Writing(Writing { lsn, full, capture, jobs: Vec::new(), pointers: Vec::new(), pending: 0 });
        self.captured = lsn;
        self.bytes_at_capture = around.log.total_bytes;
        around.wants.on_captured();
        self.journal_fill = 0;
        self.capture_some(around);
    }

    /// Segments that nothing names leave the table with this checkpoint; once it is durable they are freed. True when
    /// all have.
    ///
    /// Between two slices the map goes on changing. Invariant: nothing dead is named again, but of stores' segments, so that
    /// what has left the table is missed by nobody. What dies behind the walk is wanted to be freed anew, by another checkpoint.
    fn condemn_some(&mut self, last: &mut Option<SegmentNo>, around: &mut Around<'_>) -> bool {
        while !around.has_sliced() {
            let looked_at: Vec<SegmentNo> = around.segments.unseen_after(*last).take(CONDEMNED_AT_ONCE).collect();
            around.turn.slice("checkpoint: dead segments are condemned", looked_at.len());
            for no in &looked_at {
                let Some(info) = around.segments.get(*no) else { continue };
                let (kind, is_hidden) = (info.kind, info.is_live());
                // A store's may be named again: not while leaves name what nobody sees.
                let is_kept_known = is_hidden && around.basis.root().is_stores(*no);
                around.wants.fold |= is_kept_known;
                let is_held = is_kept_known || around.segments.is_unsettled(*no) || around.care.cleaner.is_victim(*no);
                if !is_held && !around.shared.is_named(around.basis, *no, kind) {
                    self.condemn(*no, around);
                }
            }
            *last = looked_at.last().copied();
            if last.is_none() {
                return true;
            }
        }
        false
    }

    fn condemn(&mut self, no: SegmentNo, around: &mut Around<'_>) {
        let info = around.segments.remove(no).expect("just listed");
        if info.kind == Kind::Data {
            around.room.on_dead(around.basis.now);
        }
        around.care.repairer.forget(no);
        // The last durable checkpoint still names it: exempt from clean-up until its free record is complete.
        around.segments.unsettle(no);
        self.condemned.insert(no, info.homes);
    }

    /// A store's segment is named again: it is not let go of after all. What is being written may say that it was.
    pub(crate) fn on_named_again(&mut self, segments: &mut Segments, no: SegmentNo) {
        let to_free = if let Stage::Freeing(condemned) = &mut self.stage { condemned.remove(&no) } else { None };
        if to_free.or(self.condemned.remove(&no)).is_some() {
            segments.settle(no);
        }
    }

    /// Encodes what was captured, as much as a slice allows, and puts full payloads into segments.
    fn capture_some(&mut self, around: &mut Around<'_>) {
        let Stage::Writing(writing) = &mut self.stage else { return };
        let Some(mut capture) = writing.capture.take() else { return };
        while !around.has_sliced() && !capture.is_done() {
            let runs = capture.go_on(around.map, around.segments);
            around.turn.slice("checkpoint: what has changed is encoded", runs);
        }
        while let Some(packed) = capture.next_packed() {
            writing.write(packed, around);
        }
        if !capture.is_done() {
            writing.capture = Some(capture);
            self.slice_soon(around);
        }
    }

    /// One segment of it is durable.
    pub(crate) fn on_runs_durable(&mut self, around: &mut Around<'_>, part: usize, segment: SegmentNo) {
        let info = around.segments.get(segment).expect("just put into the table");
        let Stage::Writing(writing) = &mut self.stage else { panic!("a run became durable outside a checkpoint") };
        writing.on_durable(part, segment, info.geometry, &info.homes);
        if writing.pending > 0 || writing.capture.is_some() {
            return;
        }
        let Stage::Writing(writing) = std::mem::replace(&mut self.stage, Stage::Recording) else {
            unreachable!("just seen")
        };
        let mut runs = if writing.full { Vec::new() } else { self.durable.runs.clone() };
        self.chain_len = if writing.full { 1 } else { self.chain_len + 1 };
        runs.extend(writing.pointers.into_iter().flatten());
        let checkpoint = Checkpoint { lsn: writing.lsn, runs };
        around.wishes.push(Wish::Append(Record::Checkpoint(checkpoint.clone()), Done::Checkpointed(checkpoint)));
    }

    /// Its record is complete in the log.
    pub(crate) fn on_checkpointed(&mut self, around: &mut Around<'_>, checkpoint: Checkpoint) {
        around.counters.checkpoints += 1;
        let named: BTreeSet<SegmentNo> = checkpoint.runs.iter().map(|r| r.segment).collect();
        let old: BTreeSet<SegmentNo> = self.durable.runs.iter().map(|r| r.segment).collect();
        self.durable = checkpoint;
        for no in old.difference(&named) {
            if let Some(info) = around.segments.remove(*no) {
                around.care.repairer.forget(*no);
                around.segments.unsettle(*no);
                self.condemned.insert(*no, info.homes);
            }
        }
        around.wishes.push(Wish::Trim);
        self.stage = Stage::Freeing(std::mem::take(&mut self.condemned));
        self.free_some(around);
    }

    /// Writes the records after which the shards of condemned segments may be deleted (protocol rule 17), as many as a
    /// slice allows. An origin's are its owner's to free: they are let go of.
    fn free_some(&mut self, around: &mut Around<'_>) {
        let Stage::Freeing(mut condemned) = std::mem::take(&mut self.stage) else { return };
        let (own, mut is_any_released) = (around.basis.root().own_numbers(), false);
        while !condemned.is_empty() && !around.has_sliced() {
            let mut segments = Vec::new();
            let mut looked_at = 0;
            while looked_at < FREED_AT_ONCE
                && let Some((no, homes)) = condemned.pop_first()
            {
                looked_at += 1;
                if !own.contains(no) {
                    around.segments.settle(no);
                    is_any_released = true;
                    continue;
                }
                self.freeing.insert(no, homes);
                segments.push(no);
            }
            around.turn.slice("checkpoint: dead segments are freed", looked_at);
            if !segments.is_empty() {
                let (record, done) = free(segments);
                around.wishes.push(Wish::Append(record, done));
            }
        }
        if is_any_released {
            around.wishes.push(Wish::Released);
        }
        if !condemned.is_empty() {
            self.stage = Stage::Freeing(condemned);
            self.slice_soon(around);
        }
    }

    /// An id that was given out and will never be committed: its shards, if there are any, are freed.
    #[must_use]
    pub(crate) fn abandon(&mut self, no: SegmentNo, homes: Vec<Leg>) -> (Record, Done) {
        self.freeing.insert(no, homes);
        free(vec![no])
    }

    /// The free record of these segments is complete: their shards may go, from there.
    pub(crate) fn on_freed(&mut self, segments: Vec<SegmentNo>) -> Vec<(SegmentNo, Vec<Leg>)> {
        segments.into_iter().filter_map(|no| Some((no, self.freeing.remove(&no)?))).collect()
    }

    /// Asserts what must hold between events (tests and the simulator).
    pub(crate) fn verify(&self, segments: &Segments) {
        assert_eq!(self.is_folding(), self.folds.is_under_way(), "a fold is under way in its stage only");
        self.folds.verify();
        let is_known = |no: &&SegmentNo| segments.get(**no).is_some();
        let to_free = if let Stage::Freeing(condemned) = &self.stage { Some(condemned) } else { None };
        let mut condemned = self.condemned.keys().chain(to_free.into_iter().flat_map(BTreeMap::keys));
        assert_eq!(condemned.clone().find(is_known), None, "what is condemned has left the table");
        assert!(condemned.all(|no| segments.is_unsettled(*no)), "nobody deletes it before it is freed");
        assert!(self.captured >= self.durable.lsn, "what is durable was captured");
        if let Stage::Writing(writing) = &self.stage {
            assert!(writing.pending > 0 || writing.capture.is_some(), "a checkpoint is written, or being encoded");
        }
    }
}

/// The record that frees these segments.
fn free(segments: Vec<SegmentNo>) -> (Record, Done) {
    (Record::Free { segments: segments.clone() }, Done::Freed(segments))
}

impl Writing {
    fn write(&mut self, packed: Packed, around: &mut Around<'_>) {
        let kind = JobKind::Runs { part: self.jobs.len() };
        self.jobs.push(packed.index.clone());
        self.pointers.push(Vec::new());
        self.pending += 1;
        around.counters.checkpoint_bytes += packed.bytes();
        around.wishes.push(Wish::Write(packed.into_work(kind)));
    }

    fn on_durable(&mut self, part: usize, segment: SegmentNo, geometry: Geometry, homes: &[Leg]) {
        self.pointers[part] = pointers_into(&self.jobs[part], segment, geometry, homes);
        self.pending -= 1;
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::map::LEAF_BLOCKS;
    use crate::map::leaf::Place;
    use crate::map::tests::TestMap;
    use crate::peers::tests::{leg, peers};
    use crate::segment::tests::{info, no};
    use crate::segment::{Named, SegmentInfo};
    use holdfast_base::Epoch;
    use holdfast_format::geometry::Layout;
    use holdfast_format::sharing::Origin;

    /// A checkpointer with a map, on three nodes.
    pub(in crate::map) struct Rig {
        pub(in crate::map) kept: TestMap,
        pub(in crate::map) checkpointer: Checkpointer,
        basis: Basis,
        peers: Peers,
        care: Care,
        room: Room,
        shared: SharedSegments,
        handover: Handover,
        direct: DirectWrites,
        counters: Counters,
        written: u64,
        last_turn: Turn,
    }

    impl Rig {
        fn new(slice_runs_max: usize) -> Rig {
            let mut basis = crate::basis::tests::basis("parity:2+1");
            basis.now = Instant(10_000_000_000);
            basis.config.slice_runs_max = slice_runs_max;
            basis.config.fold_runs_min = 1;
            let peers = peers(basis.now, &[1, 1, 1]);
            Rig {
                kept: TestMap::new(),
                checkpointer: Checkpointer::default(),
                basis,
                peers,
                care: Care::default(),
                room: Room::default(),
                shared: SharedSegments::default(),
                handover: Handover::default(),
                direct: DirectWrites::default(),
                counters: Counters::default(),
                written: 0,
                last_turn: Turn::default(),
            }
        }

        fn with(&mut self, act: impl FnOnce(&mut Checkpointer, &mut Around<'_>)) -> Vec<Wish> {
            let (mut wishes, mut turn) = (Vec::new(), Turn::default());
            self.kept.complete_log();
            let mut around = Around {
                basis: &self.basis,
                state: State::Open,
                peers: &self.peers,
                map: &mut self.kept.map,
                segments: &mut self.kept.segments,
                log: &mut self.kept.log,
                wants: &mut self.kept.wants,
                care: &mut self.care,
                room: &mut self.room,
                shared: &self.shared,
                handover: &self.handover,
                direct: &self.direct,
                counters: &mut self.counters,
                turn: &mut turn,
                wishes: &mut wishes,
            };
            act(&mut self.checkpointer, &mut around);
            self.last_turn = turn;
            self.checkpointer.verify(&self.kept.segments);
            self.kept.map.verify();
            wishes
        }

        /// Slices until something is wished for, and what comes between them.
        fn until_wish(&mut self, between: &mut dyn FnMut(&mut TestMap)) -> Vec<Wish> {
            let mut wishes = self.with(Checkpointer::drive);
            while wishes.is_empty() {
                let next = self.checkpointer.slice_deadline().expect("it goes on by itself, or wishes for something");
                self.basis.now = next;
                between(&mut self.kept);
                wishes = self.with(Checkpointer::drive_slice);
            }
            wishes
        }

        /// A segment of that kind is durable, under a number of its own.
        fn put(&mut self, kind: Kind) -> SegmentNo {
            self.written += 1;
            let at = no(9, self.written);
            let homes = [leg(1, 0), leg(2, 0), leg(3, 0)];
            self.kept.segments.insert(at, SegmentInfo { kind, ..info(64, 1, &homes) });
            at
        }

        /// A whole checkpoint, whatever comes between its slices; the segments that its records free.
        fn checkpoint(&mut self, between: &mut dyn FnMut(&mut TestMap)) -> Vec<SegmentNo> {
            self.basis.now = self.basis.now + FOLD_EVERY_KNOWN;
            let (mut freed, mut todo) = (Vec::new(), self.until_wish(between));
            while let Some(wish) = todo.pop() {
                let more = match wish {
                    Wish::Write(work) => match work.kind {
                        JobKind::Leaves => {
                            let segment = self.put(Kind::Meta);
                            self.kept.segments.sub_live(segment, Named::of_blocks(1));
                            self.with(|checkpointer, around| checkpointer.on_leaves_durable(around, segment))
                        }
                        JobKind::Runs { part } => {
                            let segment = self.put(Kind::Run);
                            self.with(|checkpointer, around| checkpointer.on_runs_durable(around, part, segment))
                        }
                        kind => panic!("{kind:?}"),
                    },
                    Wish::Append(Record::Checkpoint(checkpoint), _) => {
                        self.with(|checkpointer, around| checkpointer.on_checkpointed(around, checkpoint))
                    }
                    Wish::Append(Record::Free { segments }, _) => {
                        freed.extend(&segments);
                        assert_eq!(self.checkpointer.on_freed(segments.clone()).len(), segments.len());
                        Vec::new()
                    }
                    Wish::Load(leaves) => {
                        let lost = |no: LeafNo| self.with(|c, around| c.on_leaf(around, no, Err(FetchError::Lost)));
                        leaves.into_iter().flat_map(lost).collect()
                    }
                    Wish::Released | Wish::Trim => Vec::new(),
                    Wish::Append(record, _) => panic!("{record:?}"),
                };
                todo.extend(more);
                if todo.is_empty() && !self.checkpointer.is_idle() {
                    todo = self.until_wish(between);
                }
            }
            freed
        }
    }

    fn write_here_and_there(kept: &mut TestMap) {
        for at in 0..300 {
            kept.write(0, at * 7 % (4 * LEAF_BLOCKS), 3, 1 + at % 3);
        }
    }

    #[test]
    fn a_checkpoint_names_a_folded_map_whatever_is_written_meanwhile() {
        for slice_runs_max in [1, 64, 100_000] {
            let mut rig = Rig::new(slice_runs_max);
            write_here_and_there(&mut rig.kept);
            rig.kept.map.set_unfolded();
            let mut at = 0;
            let mut write = |kept: &mut TestMap| {
                at += 1;
                kept.write(0, at * 11 % (4 * LEAF_BLOCKS), 2, 8);
            };
            rig.kept.wants.checkpoint = true;
            rig.checkpoint(&mut write);
            assert!(rig.checkpointer.is_idle() && rig.counters.folds == 1 && rig.counters.checkpoints == 1);
            assert_eq!(rig.checkpointer.durable().runs.len(), 1);
            assert_eq!(rig.kept.map.directory().len(), 4);
            let mut expected = TestMap::new();
            write_here_and_there(&mut expected);
            for at in 1..=at {
                expected.write(0, at * 11 % (4 * LEAF_BLOCKS), 2, 8);
            }
            assert_eq!(at > 10, slice_runs_max <= 64, "{at} slices");
            assert_eq!(rig.kept.seen(0, 0, 4 * LEAF_BLOCKS), expected.seen(0, 0, 4 * LEAF_BLOCKS));
        }
    }

    #[test]
    fn what_is_dead_is_freed_by_the_checkpoint_that_does_not_name_it_any_more() {
        let mut rig = Rig::new(100_000);
        rig.kept.write(0, 0, 8, 1);
        rig.kept.wants.checkpoint = true;
        assert_eq!(rig.checkpoint(&mut |_| {}), []);
        rig.kept.write(0, 0, 8, 2);
        rig.kept.wants.free_dead();
        rig.kept.map.set_unfolded();
        // A fold finds out that the leaf, too, is dead.
        let freed: BTreeSet<SegmentNo> = rig.checkpoint(&mut |_| {}).into_iter().collect();
        assert!(freed.contains(&no(1, 1)), "{freed:?}");
        assert!(rig.kept.segments.get(no(1, 1)).is_none() && rig.kept.segments.get(no(1, 2)).is_some());
        assert!(!rig.checkpointer.is_freeing());
    }

    #[test]
    fn many_dead_segments_are_freed_in_slices() {
        let mut rig = Rig::new(1);
        // The run of an older checkpoint is freed with them.
        rig.kept.wants.checkpoint = true;
        rig.checkpoint(&mut |_| {});
        rig.kept.wants.rewrite = true;
        for at in 0..3_000 {
            rig.kept.write(0, at * 2, 1, at);
        }
        rig.kept.say(0, 0, 6_000, Place::Zero);
        rig.kept.wants.free_dead();
        let mut slices = 0;
        let freed = rig.checkpoint(&mut |_| slices += 1);
        assert_eq!(freed.len(), 3_000 + 1);
        assert!(slices > 3_000 / CONDEMNED_AT_ONCE + 3_000 / FREED_AT_ONCE, "{slices} slices");
        assert!(rig.checkpointer.is_idle() && !rig.checkpointer.is_freeing());
    }

    #[test]
    fn old_metadata_is_looked_for_in_slices() {
        let mut rig = Rig::new(8);
        (0..40).for_each(|_| assert!(rig.put(Kind::Meta) < no(9, 41)));
        let narrow = no(9, 41);
        let geometry = Geometry::new(Layout::Mirror { copies: 1 }, 64);
        rig.kept.segments.insert(narrow, SegmentInfo { kind: Kind::Meta, geometry, ..info(64, 1, &[leg(1, 0)]) });
        for turn in 0..6 {
            assert!(!rig.kept.wants.fold && rig.checkpointer.is_looking() == (turn > 0), "turn {turn}");
            rig.with(Checkpointer::look_for_old_metadata);
            assert_eq!(rig.last_turn.sliced, if turn < 5 { 8 } else { 1 });
        }
        assert!(rig.kept.wants.fold && !rig.checkpointer.is_looking());
        // A turn that has done its slice leaves it to the next; and a look follows the other only after a while.
        rig.with(Checkpointer::look_for_old_metadata);
        assert_eq!(rig.last_turn.sliced, 0);
        rig.basis.now = rig.basis.now + NARROW_EVERY;
        rig.with(|checkpointer, around| {
            around.turn.slice("something else", 8);
            checkpointer.look_for_old_metadata(around);
        });
        assert!(rig.checkpointer.is_looking() && rig.last_turn.sliced == 8);
    }

    #[test]
    fn segments_of_an_origin_are_let_go_of_and_not_freed() {
        let mut rig = Rig::new(100_000);
        let mut root = rig.basis.root().clone();
        root.origins.push(Origin { upto: Epoch(1), volume: crate::basis::tests::VOLUME });
        rig.basis.replace_root(root);
        rig.kept.write(0, 0, 8, 1);
        rig.kept.say(0, 0, 8, Place::Zero);
        rig.kept.wants.free_dead();
        assert_eq!(rig.checkpoint(&mut |_| {}), []);
        assert!(rig.kept.segments.get(no(1, 1)).is_none() && !rig.kept.segments.is_unsettled(no(1, 1)));
    }

    #[test]
    fn a_leaf_that_cannot_be_read_is_left_for_another_fold() {
        let mut rig = Rig::new(100_000);
        rig.kept.write(0, 0, 8, 1);
        rig.kept.map.set_unfolded();
        rig.kept.wants.checkpoint = true;
        rig.checkpoint(&mut |_| {});
        let leaf = rig.kept.evict(LeafNo(0));
        rig.kept.write(0, 4, 2, 2);
        rig.kept.map.set_unfolded();
        rig.kept.wants.checkpoint = true;
        rig.checkpoint(&mut |_| {});
        assert_eq!((rig.kept.map.is_unfolded(), rig.kept.map.run_count()), (true, 1), "it stays in the overlay");
        assert_eq!(leaf.runs.len(), 1);
        assert!(rig.checkpointer.is_idle() && rig.counters.checkpoints == 2);
    }
}
