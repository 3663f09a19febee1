//! Checkpoints: the state of the map as of an LSN, in metadata segments, named by a record in the log.
//!
//! States: idle -> folding (a batch of leaves is merged with the overlay and written; optional) -> writing (the runs of
//! the checkpoint are being put) -> recording (its record is in the log) -> idle. The base changes leaf by leaf, when the
//! new ones are durable, and then the state is captured; a crash at any point leaves the previous checkpoint whole.
//!
//! A run is full (everything) or a delta (what changed since the last run); a chain is a full run and its deltas.
//!
//! Protocol rules 15 (trim point), 18 (nothing that the last durable checkpoint names is freed), 24 (sorted deltas).

use super::folding::Fold;
use super::layers::LayerTable;
use super::leaf::{LEAF_BLOCKS, LeafNo, LeafPointer, Mapped, Place};
use crate::api::State;
use crate::controller::{Controller, Out};
use crate::log::window::Done;
use crate::segment::writer::{JobKind, Work};
use crate::segment::{Kind, SegmentInfo};
use holdfast_base::{BLOCK_BYTES, BlockCrc, Buf, BufMut, Instant, Key, Lsn, crc32c};
use holdfast_format::geometry::Geometry;
use holdfast_format::ledger::{LedgerRef, Leg};
use holdfast_format::record::{Checkpoint, MetaPointer, Record, SegmentNo};
use serde::{Deserialize, Serialize};
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

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum SavedPlace {
    Log(Lsn),
    Segment { segment: SegmentNo, block: u32, crcs: Vec<BlockCrc> },
    Zero,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SavedRun {
    pub(crate) key: u64,
    pub(crate) blocks: u64,
    pub(crate) stamp: Lsn,
    pub(crate) place: SavedPlace,
}

/// A part of a run; parts are loaded in order.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct RunPart {
    /// Forget everything loaded before.
    pub(crate) full: bool,
    /// Once a run.
    pub(crate) layers: Option<LayerTable>,
    /// Overlay runs up to this stamp under the leaves named here are in those leaves, but for runs said anew here.
    pub(crate) folded_at: Lsn,
    pub(crate) leaves: Vec<(u64, Option<LeafPointer>)>,
    pub(crate) segments: Vec<(SegmentNo, Option<SegmentInfo>)>,
    pub(crate) overlay: Vec<SavedRun>,
}

#[derive(Debug, Default)]
pub(super) enum Stage {
    #[default]
    Idle,
    Folding(Box<Fold>),
    Writing(Writing),
    Recording,
}

/// Parts in one payload: (first block, bytes, checksum).
pub(crate) type PartIndex = Vec<(u32, u32, u32)>;

#[derive(Debug)]
pub(super) struct Writing {
    lsn: Lsn,
    full: bool,
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
        self.chain_len = durable.runs.len();
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
            self.capture(out);
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

    /// Takes the state as of the completed LSN and writes it as a run.
    pub(super) fn capture(&mut self, out: Out) {
        let rewrite = std::mem::take(&mut self.wants.rewrite);
        self.checkpointer.bytes_in_row = 0;
        self.map.limit_leaves();
        self.condemn_dead();
        let names = self.names();
        let chain_max = if self.keeps_chain() { CHAIN_KEPT_MAX } else { CHAIN_MAX };
        let is_long = self.checkpointer.chain_len >= chain_max;
        let has_shrunk = names < self.checkpointer.chain_names / SHRUNK_PART;
        let full = rewrite || self.checkpointer.durable.runs.is_empty() || is_long || has_shrunk;
        self.checkpointer.chain_names = if full { names } else { names.max(self.checkpointer.chain_names) };
        self.turn.note("checkpoint: what has changed is gathered", self.map.run_count());
        let parts = self.run_parts(full);
        let checkpointer = &mut self.checkpointer;
        checkpointer.captured = self.log.completed;
        checkpointer.bytes_at_capture = self.log.total_bytes;
        self.wants.on_captured();
        self.care.cleaner.on_captured();
        checkpointer.journal_fill = 0;
        self.write_runs(full, &parts, out);
    }

    /// What a full run would name.
    fn names(&self) -> usize {
        self.map.directory.len() + self.segments.len() + self.map.run_count()
    }

    /// A chain has been loaded.
    pub(crate) fn on_runs_loaded(&mut self) {
        self.checkpointer.chain_names = self.names();
    }

    /// Segments that nothing names leave the table with this checkpoint; once it is durable they are freed.
    fn condemn_dead(&mut self) {
        let dead: Vec<SegmentNo> = self
            .segments
            .unseen()
            .filter(|no| !self.segments.is_unsettled(*no) && !self.care.cleaner.is_victim(*no))
            .filter(|no| !self.is_named_by_dependents(*no))
            .collect();
        for no in dead {
            let info = self.segments.remove(no).expect("just listed");
            if info.kind == Kind::Data {
                self.room.on_dead(self.basis.now);
            }
            self.care.repairer.forget(no);
            // The last durable checkpoint still names it: exempt from clean-up until its free record is complete.
            self.segments.unsettle(no);
            self.checkpointer.condemned.insert(no, info.homes);
        }
    }

    fn run_parts(&mut self, full: bool) -> Vec<Vec<u8>> {
        let since = if full { Lsn::ZERO } else { self.checkpointer.captured };
        let folded = std::mem::take(&mut self.checkpointer.folded_leaves);
        let dirty = self.segments.take_dirty();
        let mut writer =
            PartWriter::new(full, self.checkpointer.folded_at, self.basis.config.segment_payload_bytes / 4);
        writer.layers(self.map.layers.clone());
        if full {
            for (no, pointer) in self.map.directory.iter() {
                writer.leaf(no, Some(pointer));
            }
            for (no, info) in self.segments.iter().filter(|(_, s)| s.kind != Kind::Run) {
                writer.segment(no, Some(info.clone()));
            }
        } else {
            for no in &folded {
                writer.leaf(*no, self.map.directory.get(*no));
            }
            for no in dirty {
                let info = self.segments.get(no);
                if info.is_none_or(|i| i.kind != Kind::Run) {
                    writer.segment(no, info.cloned());
                }
            }
        }
        let moved = std::mem::take(&mut self.map.zeroes_moved_to);
        for (key, blocks, mapped) in self.map.overlay.iter_from(0) {
            let is_moved = || mapped.place == Place::Zero && moved.contains(&Key(key).object());
            if full || mapped.stamp > since || is_moved() {
                writer.run(key, blocks, mapped);
            }
        }
        if !full {
            for no in folded {
                for piece in self.map.overlay.pieces(no.first_key(), LEAF_BLOCKS) {
                    if let Some(mapped) = piece.value.filter(|m| m.stamp <= since) {
                        writer.run(piece.start, piece.len, &mapped);
                    }
                }
            }
        }
        writer.finish()
    }

    fn write_runs(&mut self, full: bool, parts: &[Vec<u8>], out: Out) {
        let jobs = pack_parts(parts, self.basis.config.segment_payload_bytes as usize);
        self.checkpointer.stage = Stage::Writing(Writing {
            lsn: self.log.completed,
            full,
            jobs: jobs.iter().map(|(index, _)| index.clone()).collect(),
            pointers: vec![Vec::new(); jobs.len()],
            pending: jobs.len(),
        });
        for (part, (_, bytes)) in jobs.into_iter().enumerate() {
            self.counters.checkpoint_bytes += bytes.len() as u64;
            let payload = padded(&bytes);
            let crcs = holdfast_base::block_crcs(&payload);
            let kind = JobKind::Runs { part };
            self.start_job(Work { kind, extents: Vec::new(), payload: vec![payload], crcs }, out);
        }
    }

    pub(crate) fn on_runs_durable(&mut self, part: usize, segment: SegmentNo, out: Out) {
        let info = self.segments.get(segment).expect("just put into the table");
        let (geometry, homes): (Geometry, Vec<Leg>) = (info.geometry, info.homes.clone());
        let Stage::Writing(writing) = &mut self.checkpointer.stage else {
            panic!("a run became durable outside a checkpoint")
        };
        writing.pointers[part] = pointers_into(&writing.jobs[part], segment, geometry, &homes);
        writing.pending -= 1;
        if writing.pending > 0 {
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
    pub(crate) fn abandon_segment(&mut self, no: SegmentNo, _geometry: Geometry, homes: Vec<Leg>, out: Out) {
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

/// Parts of a run, gathered into payloads that each fit a segment.
pub(crate) fn pack_parts(parts: &[Vec<u8>], bytes_max: usize) -> Vec<(PartIndex, Vec<u8>)> {
    let mut jobs: Vec<(PartIndex, Vec<u8>)> = vec![(Vec::new(), Vec::new())];
    for part in parts {
        let last = jobs.last_mut().expect("never empty");
        if !last.1.is_empty() && last.1.len() + part.len() > bytes_max {
            jobs.push((Vec::new(), Vec::new()));
        }
        let (index, bytes) = jobs.last_mut().expect("never empty");
        index.push(((bytes.len() / BLOCK_BYTES) as u32, part.len() as u32, crc32c(part)));
        bytes.extend_from_slice(part);
        bytes.resize(bytes.len().next_multiple_of(BLOCK_BYTES), 0);
    }
    jobs
}

/// Where the parts in one payload lie.
pub(crate) fn pointers_into(
    index: &PartIndex,
    segment: SegmentNo,
    geometry: Geometry,
    homes: &[Leg],
) -> Vec<MetaPointer> {
    let pointer = |&(block, len_bytes, crc): &(u32, u32, u32)| MetaPointer {
        segment,
        geometry,
        homes: homes.to_vec(),
        block,
        len_bytes,
        crc,
    };
    index.iter().map(pointer).collect()
}

pub(crate) fn padded(bytes: &[u8]) -> Buf {
    let mut buf = BufMut::new(bytes.len().next_multiple_of(BLOCK_BYTES));
    buf[..bytes.len()].copy_from_slice(bytes);
    buf[bytes.len()..].fill(0);
    buf.freeze()
}

/// Cuts a run into parts that each fit well into a segment.
pub(crate) struct PartWriter {
    parts: Vec<Vec<u8>>,
    part: RunPart,
    estimate: usize,
    bytes_max: usize,
    folded_at: Lsn,
}

impl PartWriter {
    pub(crate) fn new(full: bool, folded_at: Lsn, bytes_max: u32) -> PartWriter {
        let part = RunPart { full, folded_at, ..RunPart::default() };
        PartWriter { parts: Vec::new(), part, estimate: 0, bytes_max: bytes_max as usize, folded_at }
    }

    fn grow(&mut self, bytes: usize) {
        if self.estimate + bytes > self.bytes_max && self.estimate > 0 {
            self.flush();
        }
        self.estimate += bytes;
    }

    fn flush(&mut self) {
        let next = RunPart { folded_at: self.folded_at, ..RunPart::default() };
        let part = std::mem::replace(&mut self.part, next);
        self.parts.push(postcard::to_stdvec(&part).expect("our records always encode"));
        self.estimate = 0;
    }

    /// Comes first.
    pub(crate) fn layers(&mut self, layers: LayerTable) {
        self.estimate = 64 * layers.len();
        self.part.layers = Some(layers);
    }

    pub(crate) fn leaf(&mut self, no: LeafNo, pointer: Option<LeafPointer>) {
        self.grow(40);
        self.part.leaves.push((no.0, pointer));
    }

    pub(crate) fn segment(&mut self, no: SegmentNo, info: Option<SegmentInfo>) {
        self.grow(40 + info.as_ref().map_or(0, |i| 24 * i.homes.len() + 20));
        self.part.segments.push((no, info));
    }

    pub(crate) fn run(&mut self, key: u64, blocks: u64, mapped: &Mapped) {
        let place = match &mapped.place {
            Place::Log { lsn, .. } => SavedPlace::Log(*lsn),
            Place::Zero => SavedPlace::Zero,
            Place::Segment { segment, block, crcs } => {
                // A long run is cut, so that its checksums fit a part.
                let crcs = crcs.as_slice();
                let chunk = (self.bytes_max / 10).max(1);
                for (i, some) in crcs.chunks(chunk).enumerate() {
                    let offset = (i * chunk) as u64;
                    let place =
                        SavedPlace::Segment { segment: *segment, block: block + offset as u32, crcs: some.to_vec() };
                    self.saved(key + offset, some.len() as u64, mapped.stamp, place);
                }
                return;
            }
        };
        self.saved(key, blocks, mapped.stamp, place);
    }

    fn saved(&mut self, key: u64, blocks: u64, stamp: Lsn, place: SavedPlace) {
        let crcs = if let SavedPlace::Segment { crcs, .. } = &place { crcs.len() * 5 } else { 0 };
        self.grow(40 + crcs);
        self.part.overlay.push(SavedRun { key, blocks, stamp, place });
    }

    pub(crate) fn finish(mut self) -> Vec<Vec<u8>> {
        if self.estimate > 0 || self.parts.is_empty() {
            self.flush();
        }
        self.parts
    }
}
