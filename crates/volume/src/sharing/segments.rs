//! Shared segments: clones that are volumes of their own, which other hosts may own, and still share the segments of
//! the volume that they were made of (protocol rule 19).
//!
//! **Creating one.** The owner of the *origin* writes down its whole map as the first checkpoint of the new volume, its
//! *dependent*: which costs what a checkpoint costs, and no data. In it, the snapshot's layer is under the live one;
//! what belongs to other layers is dropped by the dependent as that of any layer that nobody needs. Numbers of its own
//! segments begin above all that it names of others, so that a number tells whose segment it is.
//!
//! States of a creation: waiting (until what the snapshot shows has left the log, and all leaves of the map are in a
//! durable checkpoint: the origin's next owner must know whatever the dependent names) -> writing (the map as of then
//! is encoded, in slices, and the checkpoint's shards are put, under ids of the dependent) -> naming (the origin's root
//! names the dependent) -> told. Meanwhile nothing is freed that it may name.
//!
//! Between two slices of the wait guests go on: nobody writes to a layer that a snapshot shows, so nothing of it comes
//! to the log where it was looked for. While the map is encoded no checkpoint or fold begins, so its leaves stay; what
//! else changes is kept as it was ([`Capture`]).
//!
//! **The origin** frees no segment that a dependent may name: all up to the number that its root says, but for those
//! that the dependent has said it doesn't name ([`Controller::on_dependent`]). It repairs, moves and scrubs them as its
//! own; their bytes and ids stay what they are.
//!
//! **The dependent** reads them, and looks after none of them. Where one isn't where it was, all devices are asked
//! which shards of the origin they hold, and the homes in the table are corrected. What its last durable checkpoint
//! does not name it lets go of ([`Controller::named_of_origin`]), for good: it never names more of them later.
//!
//! Faults on the way of a look: a device that gives no list may hold anything, and corrects nothing.
//!
//! Limits: one creation at a time, of [`CREATION_MAX`] and [`PARTS_MAX`] parts; one look for homes at a time, at most
//! every [`LOOK_EVERY`]; [`RANGES_MAX`] runs of numbers.
//!
//! Faults: an owner that dies while it creates one leaves shards and perhaps the name of a volume that never comes to
//! be. Its record, which the host has written before, tells the next one of that.

use crate::api::{Effect, Lane, Notice, State};
use crate::basis::Basis;
use crate::controller::{Controller, Out};
use crate::map::run::{Packed, PartIndex, RunWriter, pointers_into};
use crate::map::{Capture, LayerTable, Shown};
use crate::owner::root::Change;
use crate::peers::Purpose;
use crate::segment::Kind;
use crate::segment::writer::JobKind;
use crate::sharing::domain::Domain;
use holdfast_base::{
    BLOCK_BYTES, DeviceId, Epoch, HeadId, InstanceId, Instant, Key, Lba, Lsn, NodeId, ObjectId, SegmentId, ShardId,
    Token, VolumeId,
};
use holdfast_format::geometry::Geometry;
use holdfast_format::ledger::Leg;
use holdfast_format::record::{Checkpoint, MetaPointer, SegmentNo};
use holdfast_format::root::Root;
use holdfast_format::sharing::{Dependent, Origin, SegmentRanges};
use holdfast_format::wire::{Reply, Request};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Between two looks for where an origin's shards are.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Shards that were not found are looked for again after this long: the origin may be making them anew.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// Shards that a device is asked to list at a time.
const LIST_COUNT: u32 = 4096;

/// How often a read that finds nothing where it looked waits for another look.
pub(crate) const LOOKS_MAX: u8 = 4;

/// Runs of numbers that a dependent says it names: a record of some ten kilobytes.
const RANGES_MAX: usize = 1024;

/// How long a creation may keep what is dead from being freed.
const CREATION_MAX: Duration = Duration::from_secs(10);

/// Segments that the map of a new volume may take: beyond, there are too many jobs for one controller.
const PARTS_MAX: usize = 512;

/// Segments that are marked as kept, and runs that are looked at, without asking whether the turn has done its slice.
const AT_ONCE: usize = 32;

/// Segments that cost as much, to be marked, as a run of the map.
const MARKED_A_RUN: usize = 4;

/// Dependents of one volume.
const DEPENDENTS_MAX: usize = 1024;

#[derive(Debug, Default)]
pub(crate) struct SharedSegments {
    pub(crate) domain: Domain,
    creation: Option<Creation>,
    /// What dependents said last that they name; of others everything counts.
    named: BTreeMap<VolumeId, SegmentRanges>,
    /// Dependents that name nothing any more.
    gone: BTreeSet<VolumeId>,
    /// Shards of origins that are not where they were; others whose node is out; and reads that wait for the first.
    lost: BTreeSet<(SegmentNo, u8)>,
    away: BTreeSet<(SegmentNo, u8)>,
    waiting: BTreeSet<(SegmentNo, Token)>,
    look: Option<Look>,
    /// Raised when segments of an origin were let go of.
    released: u64,
    look_at: Instant,
    looked_for_away_at: Instant,
    marking: Option<Marking>,
    /// When work that is done in slices goes on.
    slice_at: Option<Instant>,
}

/// A walk over the segment table that marks what is kept.
#[derive(Debug)]
struct Marking {
    /// Up to there all are marked.
    last: Option<SegmentNo>,
    is_more_kept: bool,
}

#[derive(Debug)]
struct Creation {
    head: HeadId,
    snapshot: String,
    dependent: VolumeId,
    name: String,
    size_bytes: Option<u64>,
    since: Instant,
    /// What was completed when it last looked whether it can go on.
    looked_at: Option<Lsn>,
    /// The highest number that the dependent may name, once that is known.
    upto: Option<SegmentNo>,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// Up to there in the overlay nothing that the snapshot shows is in the log.
    Waiting(u64),
    Writing(Writing),
    Naming {
        root: Box<Root>,
    },
}

#[derive(Debug)]
struct Writing {
    root: Box<Root>,
    /// What is not encoded yet; absent when all is.
    capture: Option<Box<Capture>>,
    /// By part.
    indexes: Vec<PartIndex>,
    pointers: Vec<Option<Vec<MetaPointer>>>,
}

/// All devices list what they hold of one origin, from a shard on.
#[derive(Debug)]
struct Look {
    volume: VolumeId,
    from: SegmentNo,
    /// Up to here every list is complete.
    upto: Option<SegmentNo>,
    pending: BTreeSet<Leg>,
    /// These gave no list.
    silent: BTreeSet<Leg>,
    found: BTreeMap<(SegmentNo, u8), BTreeSet<Leg>>,
}

impl Look {
    fn covers(&self, volume: VolumeId, no: SegmentNo) -> bool {
        volume == self.volume && no >= self.from && self.upto.is_none_or(|upto| no < upto)
    }
}

impl SharedSegments {
    pub(crate) fn is_idle(&self) -> bool {
        self.creation.is_none() && self.look.is_none() && self.waiting.is_empty()
    }

    /// Whether the map is being encoded for a dependent: it is gone through, and its leaves are not to change.
    pub(crate) fn is_composing(&self) -> bool {
        let stage = self.creation.as_ref().map(|creation| &creation.stage);
        matches!(stage, Some(Stage::Writing(Writing { capture: Some(_), .. })))
    }

    /// When the next slice is due.
    pub(crate) fn slice_deadline(&self) -> Option<Instant> {
        self.slice_at
    }

    /// The volume is served now: what an opening has left undone goes on soon.
    pub(crate) fn on_serving(&mut self, basis: &Basis) {
        self.slice_at = self.marking.is_some().then(|| basis.next_slice_at());
    }

    /// Whether it is not known of all segments yet which are kept.
    pub(crate) fn is_marking(&self) -> bool {
        self.marking.is_some()
    }

    /// Whether a dependent may name the segment.
    pub(crate) fn is_named(&self, basis: &Basis, no: SegmentNo, kind: Kind) -> bool {
        if basis.config.mutations.forgets_dependents() {
            return false;
        }
        // What others name of a store they have not named from the beginning on.
        if basis.root().is_store() {
            return kind == Kind::Data && self.domain.store.may_be_named(basis, no);
        }
        let names = |of: &Dependent| no <= of.upto && self.named.get(&of.volume).is_none_or(|r| r.contains(no));
        let will_be = self.creation.as_ref().is_some_and(|creation| creation.upto.is_none_or(|upto| no <= upto));
        will_be || basis.root().dependents.iter().any(names)
    }

    /// Whether any volume is being made of this one.
    pub(crate) fn is_creating_any(&self) -> bool {
        self.creation.is_some()
    }

    /// Whether the creation of this volume is still under way.
    pub(crate) fn is_creating(&self, dependent: VolumeId) -> bool {
        self.creation.as_ref().is_some_and(|creation| creation.dependent == dependent)
    }
}

impl Controller {
    // ---- the origin ----

    /// Marks which segments are kept for others, or others', after either has changed. That goes in slices, and begins
    /// anew with each change. Nobody relies on it to keep them: whoever frees asks [`SharedSegments::is_named`].
    pub(crate) fn mark_kept(&mut self) {
        let is_more_kept = self.shared.marking.take().is_some_and(|marking| marking.is_more_kept);
        let root = self.root();
        let is_alone = root.origins.is_empty() && root.stores.is_empty() && root.dependents.is_empty();
        if is_alone && !self.segments.any_kept() {
            return;
        }
        self.shared.marking = Some(Marking { last: None, is_more_kept });
        self.mark_some();
    }

    /// The next slice of that; true when all are marked.
    pub(crate) fn mark_some(&mut self) -> bool {
        let Some(Marking { mut last, mut is_more_kept }) = self.shared.marking.take() else { return true };
        while self.turn.left(&self.basis) > 0 {
            let some: Vec<SegmentNo> = self.segments.numbers_after(last).take(AT_ONCE).collect();
            self.turn.slice("sharing: what is kept is marked", some.len().div_ceil(MARKED_A_RUN));
            for no in &some {
                let Some(kind) = self.segments.get(*no).map(|info| info.kind) else { continue };
                let is_kept = self.basis.is_foreign(*no) || self.shared.is_named(&self.basis, *no, kind);
                is_more_kept |= self.segments.set_kept(*no, is_kept) && is_kept;
            }
            last = some.last().copied();
            if last.is_none() {
                if is_more_kept {
                    self.care.cleaner.on_kept();
                }
                // What is kept no more may be freed by the next checkpoint.
                self.wants.free_dead();
                return true;
            }
        }
        self.shared.marking = Some(Marking { last, is_more_kept });
        self.shared.slice_at = Some(self.basis.next_slice_at());
        false
    }

    /// The next slice of all of this, if it is due.
    pub(crate) fn drive_sharing_slice(&mut self, out: Out) {
        if self.shared.slice_at.take_if(|at| *at <= self.basis.now).is_some() {
            self.mark_some();
            self.drive_creation(out);
            self.compose_some(out);
        }
    }

    /// A dependent says what it names, or that it is gone.
    pub(crate) fn on_dependent(&mut self, volume: VolumeId, names: Option<SegmentRanges>) {
        if !self.basis.is_known() || !self.root().dependents.iter().any(|of| of.volume == volume) {
            return;
        }
        match names.filter(|names| !names.is_empty()) {
            Some(names) if self.shared.named.get(&volume) != Some(&names) => {
                self.shared.named.insert(volume, names);
                self.mark_kept();
            }
            Some(_) => {}
            None => {
                self.shared.gone.insert(volume);
            }
        }
    }

    pub(crate) fn create_dependent(
        &mut self,
        (head, snapshot): (HeadId, String),
        (dependent, name): (VolumeId, String),
        size_bytes: Option<u64>,
        out: Out,
    ) {
        let why = if self.state != State::Open {
            Some("the volume is not open")
        } else if self.shared.creation.is_some() {
            Some("another clone is being made of the volume; try again in a moment")
        } else if self.is_in_domain() {
            Some(
                "the volume is in a sharing domain, or is to be, and separate clones of those can't be made yet; copy it \
                 (`holdfast send`)",
            )
        } else if self.root().dependents.iter().any(|of| of.volume == dependent)
            || self.shared.gone.contains(&dependent)
        {
            Some("a volume with that id was made, or begun, before; choose another")
        } else if self.root().dependents.len() >= DEPENDENTS_MAX {
            Some("the volume has 1024 separate clones")
        } else {
            self.settled(head, &snapshot).err()
        };
        if let Some(why) = why {
            return self.notice(Notice::DependentRefused { dependent, why }, out);
        }
        let since = self.basis.now;
        let (looked_at, upto, stage) = (None, None, Stage::Waiting(0));
        self.shared.creation =
            Some(Creation { head, snapshot, dependent, name, size_bytes, since, looked_at, upto, stage });
        self.mark_kept();
        self.drive_creation(out);
    }

    /// Whether the log is to be emptied for a creation.
    pub(crate) fn creation_waits(&self) -> bool {
        matches!(&self.shared.creation, Some(Creation { stage: Stage::Waiting(_), .. }))
    }

    /// The next step of a creation, and of what is done about dependents that are gone.
    pub(crate) fn drive_creation(&mut self, out: Out) {
        let Some(Creation { stage, since, dependent, .. }) = &self.shared.creation else { return };
        let (is_late, dependent) = (self.basis.now.since(*since) >= CREATION_MAX, *dependent);
        match stage {
            Stage::Waiting(_) | Stage::Writing(_) if is_late => {
                self.end_creation();
                let why = "there is no room for its map, or too few nodes are within reach; see `holdfast status`";
                self.notice(Notice::DependentRefused { dependent, why }, out);
            }
            Stage::Waiting(_) => self.compose_dependent(out),
            Stage::Writing(_) | Stage::Naming { .. } => {}
        }
    }

    /// Swaps of the root record that volumes which share want; no other is under way. True where one was begun.
    pub(crate) fn swap_for_sharing(&mut self, out: Out) -> bool {
        if let Some(Creation { stage: Stage::Naming { .. }, dependent, upto: Some(upto), .. }) = &self.shared.creation {
            let (mut root, upto) = (self.root().clone(), *upto);
            root.dependents.push(Dependent { volume: *dependent, upto });
            self.swap_root(root, Change::Dependent, out);
            return true;
        }
        let is_gone = |of: &Dependent| self.shared.gone.contains(&of.volume);
        if !self.root().dependents.iter().any(is_gone) {
            self.shared.gone.clear();
            return false;
        }
        let mut root = self.root().clone();
        root.dependents.retain(|of| !is_gone(of));
        self.swap_root(root, Change::Unname, out);
        true
    }

    pub(crate) fn on_dependents_changed(&mut self) {
        let root = self.basis.root();
        self.shared.named.retain(|volume, _| root.dependents.iter().any(|of| of.volume == *volume));
        self.mark_kept();
    }

    /// The root names the dependent: from here on what it names stays, whoever owns this volume.
    pub(crate) fn on_dependent_named(&mut self, out: Out) {
        let creation = self.shared.creation.take();
        self.on_dependents_changed();
        let Some(Creation { dependent, stage: Stage::Naming { root }, .. }) = creation else { return };
        self.notice(Notice::DependentCreated { dependent, root }, out);
    }

    /// Begins to write the dependent's first checkpoint, if what the snapshot shows has left the log.
    fn compose_dependent(&mut self, out: Out) {
        let Some(Creation { head, snapshot, dependent, name, size_bytes, .. }) = &self.shared.creation else {
            return;
        };
        let (dependent, name, wanted_bytes) = (*dependent, name.clone(), *size_bytes);
        let layer = match self.settled(*head, snapshot) {
            Ok(layer) => layer,
            Err(why) => {
                self.end_creation();
                return self.notice(Notice::DependentRefused { dependent, why }, out);
            }
        };
        let (completed, can_be_written) = (self.log.completed, self.topology().meta_layout_now().is_some());
        let creation = self.shared.creation.as_mut().expect("just seen");
        // Until the log gets on, nothing leaves it.
        if !self.checkpointer.is_idle() || creation.looked_at == Some(completed) {
            return;
        }
        creation.looked_at = Some(completed).filter(|_| can_be_written);
        if !can_be_written || self.may_be_in_log(layer) {
            return;
        }
        let shown_bytes = self.map.layers().snapshot(layer).expect("just found").size_bytes;
        let size_bytes = wanted_bytes.unwrap_or(shown_bytes).max(shown_bytes);
        let Some(layers) = self.map.layers().for_dependent(layer) else {
            self.end_creation();
            let why = "the volume has had all the snapshots that it can have; copy it to a new one";
            return self.notice(Notice::DependentRefused { dependent, why }, out);
        };
        let mut root = Root::new(self.basis.config.grid, dependent, &name, size_bytes, self.root().layout);
        // It names segments of this one as they are.
        root.features = self.root().features.clone();
        root.tiers = self.root().tiers;
        root.epoch = self.epoch().next();
        root.instance = InstanceId(dependent.0);
        root.key_id = self.root().key_id;
        root.origins = self.root().origins.clone();
        root.origins.push(Origin { upto: self.epoch(), volume: self.basis.config.volume });
        root.trimmed = self.log.completed;
        root.checkpoint.lsn = self.log.completed;
        let capture = self.capture_dependent(layers, layer, shown_bytes);
        let writing = Writing {
            root: Box::new(root),
            capture: Some(Box::new(capture)),
            indexes: Vec::new(),
            pointers: Vec::new(),
        };
        let upto = self.segments.next_number(self.epoch());
        let creation = self.shared.creation.as_mut().expect("just seen");
        (creation.upto, creation.stage) = (Some(upto), Stage::Writing(writing));
        self.mark_kept();
        self.compose_some(out);
    }

    /// Whether anything that a layer shows is in the log, as far as it was looked for: that goes in slices.
    fn may_be_in_log(&mut self, layer: ObjectId) -> bool {
        loop {
            let left = self.turn.left(&self.basis);
            let creation = self.shared.creation.as_mut().expect("a creation under way");
            let Stage::Waiting(from) = &mut creation.stage else { return true };
            if left == 0 {
                creation.looked_at = None;
                self.shared.slice_at = Some(self.basis.next_slice_at());
                return true;
            }
            let runs = self.map.log_runs(*from, left.max(AT_ONCE));
            self.turn.slice("sharing: what a clone needs is looked for in the log", runs.work);
            let is_shown = |start: u64| self.map.layers().is_under(Key(start).object(), layer);
            if let Some(run) = runs.found.iter().find(|run| is_shown(run.start)) {
                *from = run.start;
                return true;
            }
            let Some(next) = runs.next else { return false };
            *from = next;
        }
    }

    /// The whole map as a run of a checkpoint.
    fn capture_dependent(&mut self, layers: LayerTable, shown: ObjectId, shown_bytes: u64) -> Capture {
        let live = layers.live(HeadId::VOLUME).expect("every volume has a live layer");
        let payload_bytes = self.basis.config.segment_payload_bytes;
        let writer = RunWriter::new(true, layers, self.checkpointer.folded_at(), payload_bytes);
        // What the snapshot's layer says behind its end is not part of it.
        let (end, mapped_end) = (shown_bytes.div_ceil(BLOCK_BYTES as u64), self.map.mapped_end(shown));
        let behind = (mapped_end > end).then(|| (Key::new(live, Lba(end)).0, mapped_end - end));
        let shown = Shown { layer: shown, behind, stamp: self.log.completed };
        Capture::for_other(&mut self.map, &mut self.segments, shown, writer)
    }

    /// Encodes the map for the dependent, as much as a slice allows, and puts full payloads into segments.
    fn compose_some(&mut self, out: Out) {
        let creation = self.shared.creation.as_mut();
        let Some(Creation { stage: Stage::Writing(writing), dependent, .. }) = creation else { return };
        let Some(mut capture) = writing.capture.take() else { return };
        while self.turn.left(&self.basis) > 0 && !capture.is_done() {
            let runs = capture.go_on(&mut self.map, &mut self.segments);
            self.turn.slice("sharing: a clone's map is encoded", runs);
        }
        let packed: Vec<Packed> = std::iter::from_fn(|| capture.next_packed()).collect();
        let (first, dependent, epoch) = (writing.indexes.len(), *dependent, writing.root.epoch);
        writing.indexes.extend(packed.iter().map(|packed| packed.index.clone()));
        writing.pointers.resize(writing.indexes.len(), None);
        let is_too_large = writing.indexes.len() > PARTS_MAX;
        if !capture.is_done() {
            writing.capture = Some(capture);
            self.shared.slice_at = Some(self.basis.next_slice_at());
        }
        if is_too_large {
            self.end_creation();
            let why = "the volume's map is too large for that; copy the snapshot (`holdfast send`)";
            return self.notice(Notice::DependentRefused { dependent, why }, out);
        }
        for (at, packed) in packed.into_iter().enumerate() {
            let kind = JobKind::Dependent { volume: dependent, epoch, part: first + at };
            self.write_segment(packed.into_work(kind), out);
        }
    }

    /// One segment of it is durable.
    pub(crate) fn on_dependent_durable(&mut self, id: SegmentId, part: usize, geometry: Geometry, homes: &[Leg]) {
        let Some(creation) = self.shared.creation.as_mut().filter(|creation| creation.dependent == id.volume) else {
            return;
        };
        let Stage::Writing(Writing { root, capture, indexes, pointers }) = &mut creation.stage else { return };
        let segment = SegmentNo::from(id);
        pointers[part] = Some(pointers_into(&indexes[part], segment, geometry, homes));
        if capture.is_some() || pointers.iter().any(Option::is_none) {
            return;
        }
        let runs = pointers.iter().flatten().flatten().cloned();
        let mut root = root.clone();
        root.checkpoint = Checkpoint { lsn: root.checkpoint.lsn, runs: runs.collect() };
        creation.stage = Stage::Naming { root };
    }

    fn end_creation(&mut self) {
        self.drop_creation();
        self.mark_kept();
    }

    /// Whatever of it was under way ends.
    fn drop_creation(&mut self) -> Option<Creation> {
        let mut creation = self.shared.creation.take()?;
        if let Stage::Writing(Writing { capture, .. }) = &mut creation.stage
            && let Some(capture) = capture.take()
        {
            capture.abandon(&mut self.map, &mut self.segments);
        }
        Some(creation)
    }

    /// Volumes that may name segments of this one.
    pub fn dependents(&self) -> &[Dependent] {
        if self.basis.is_known() { &self.root().dependents } else { &[] }
    }

    // ---- the dependent ----

    /// Of the volume that this one was made of: what this one may still name, whatever becomes of it. `None` for a
    /// volume that was not made of another one, or is not open.
    pub fn named_of_origin(&self) -> Option<(VolumeId, SegmentRanges)> {
        if !matches!(self.state, State::Open | State::Closing) {
            return None;
        }
        let origin = self.root().origins.last()?;
        let first_own = self.root().first_own();
        let mut there = self.segments.foreign().map(|(no, _)| no).take_while(|no| *no < first_own).peekable();
        // The last durable checkpoint names these.
        let mut condemned = self.checkpointer.condemned().take_while(|no| *no < first_own).peekable();
        let named = std::iter::from_fn(|| match (there.peek(), condemned.peek()) {
            (Some(a), Some(b)) if b < a => condemned.next(),
            (Some(_), _) => there.next(),
            (None, _) => condemned.next(),
        });
        Some((origin.volume, SegmentRanges::holding(named, RANGES_MAX)))
    }

    /// Another number when what it names may have become less, or another opening tells.
    pub fn named_generation(&self) -> (Epoch, u64) {
        let epoch = if self.basis.is_known() { self.epoch() } else { Epoch(0) };
        (epoch, self.shared.released)
    }

    pub(crate) fn on_released(&mut self) {
        self.shared.released += 1;
    }

    /// A shard is damaged or missing. An origin's is its owner's to make again; it may lie elsewhere by now.
    pub(crate) fn want_shard(&mut self, no: SegmentNo, index: u8) {
        if self.basis.is_foreign(no) {
            self.shared.lost.insert((no, index));
        } else {
            self.care.repairer.want(no, index);
        }
    }

    /// Begins to look for shards that are not where they were.
    pub(crate) fn drive_look(&mut self, out: Out) {
        let is_at_work = matches!(self.state, State::Open | State::Closing);
        let is_alone = |root: &Root| root.origins.is_empty() && root.stores.is_empty();
        if !is_at_work || is_alone(self.root()) || self.shared.look.is_some() {
            return;
        }
        self.look_for_away();
        let waiting = self.shared.waiting.first().map(|(no, _)| *no);
        let lost = self.shared.lost.first().or(self.shared.away.first()).map(|(no, _)| *no);
        let Some(from) = waiting.or(lost).filter(|_| self.basis.now >= self.shared.look_at) else { return };
        self.shared.look_at = self.basis.now + LOOK_EVERY;
        let volume = self.root().owner_of(from);
        let before = match (from.counter.checked_sub(1), from.epoch.0.checked_sub(1)) {
            (Some(counter), _) => Some(SegmentNo { counter, ..from }),
            (None, Some(epoch)) => Some(SegmentNo { epoch: Epoch(epoch), counter: u64::MAX }),
            (None, None) => None,
        };
        let after = before.map(|before| ShardId { segment: before.of(volume), index: u8::MAX });
        let mut pending = BTreeSet::new();
        for (node, device) in self.listable() {
            let request = Request::ListShards { device, volume, after, count_max: LIST_COUNT };
            let leg = Leg { node, device };
            if self.send(node, Lane::Bulk, Purpose::Look { leg }, request, Vec::new(), out).is_some() {
                pending.insert(leg);
            }
        }
        if !pending.is_empty() {
            let (silent, found) = (BTreeSet::new(), BTreeMap::new());
            self.shared.look = Some(Look { volume, from, upto: None, pending, silent, found });
        }
    }

    fn listable(&self) -> Vec<(NodeId, DeviceId)> {
        let usable = self.peers.ids().into_iter().filter(|id| self.peers.is_usable(*id));
        let devices = usable.flat_map(|id| {
            let node = self.peers.get(id).expect("listed");
            node.devices().map(move |d| (id, d.device)).collect::<Vec<_>>()
        });
        devices.filter(|(node, device)| self.peers.leg_usable(Leg { node: *node, device: *device })).collect()
    }

    /// What lies on nodes that are out may be elsewhere by now.
    fn look_for_away(&mut self) {
        // A round comes to its end before the next one begins.
        if self.basis.now.since(self.shared.looked_for_away_at) < LOOK_AGAIN || !self.shared.away.is_empty() {
            return;
        }
        self.shared.looked_for_away_at = self.basis.now;
        let mut away = Vec::new();
        for (no, info) in self.segments.foreign() {
            let out = info.homes.iter().enumerate().filter(|(_, home)| !self.peers.leg_usable(**home));
            away.extend(out.map(|(index, _)| (no, index as u8)));
        }
        self.shared.away.extend(away);
    }

    pub(crate) fn on_looked(&mut self, leg: Leg, reply: &Reply, out: Out) {
        let volume = self.basis.config.volume;
        let Some(look) = &mut self.shared.look else { return };
        if !look.pending.remove(&leg) {
            return;
        }
        assert_ne!(look.volume, volume, "only origins are looked through");
        if !matches!(reply, Reply::Shards { .. }) {
            look.silent.insert(leg);
        }
        if let Reply::Shards { shards, more } = reply {
            for shard in shards.iter().filter(|shard| shard.segment.volume == look.volume) {
                let no = SegmentNo::from(shard.segment);
                look.found.entry((no, shard.index)).or_default().insert(leg);
            }
            if *more && let Some(last) = shards.last() {
                // Of the last one not all shards may be listed.
                let last = SegmentNo::from(last.segment);
                look.upto = Some(look.upto.map_or(last, |upto| upto.min(last)));
            }
        }
        if look.pending.is_empty() {
            self.end_look(out);
        }
    }

    /// Corrects homes that are elsewhere by now. They are no part of the log's history: who opens the volume next may
    /// look for itself.
    fn end_look(&mut self, out: Out) {
        let Some(look) = self.shared.look.take() else { return };
        let root = self.basis.root();
        let covered = self.segments.iter_from(look.from).take_while(|(no, _)| look.covers(root.owner_of(*no), *no));
        let mut corrected = Vec::new();
        for (no, info) in covered {
            for (index, home) in info.homes.iter().enumerate().filter(|(_, home)| !look.silent.contains(home)) {
                let legs = look.found.get(&(no, index as u8));
                if let Some(legs) = legs.filter(|legs| !legs.contains(home)) {
                    corrected.push((no, index as u8, *legs.first().expect("somebody holds it")));
                }
            }
        }
        for (no, index, leg) in &corrected {
            self.segments.rehome(*no, &[(*index, *leg)]);
            self.fetcher.on_located(*no, *index);
        }
        self.wants.checkpoint |= !corrected.is_empty();
        let is_whole = look.silent.is_empty();
        let root = self.basis.root();
        // Who gave no list may hold them.
        let is_done = |(no, index): &(SegmentNo, u8)| {
            look.covers(root.owner_of(*no), *no) && (is_whole || look.found.contains_key(&(*no, *index)))
        };
        let is_missing = self.shared.lost.iter().any(|shard| is_done(shard) && !look.found.contains_key(shard));
        self.shared.lost.retain(|shard| !is_done(shard));
        self.shared.away.retain(|shard| !is_done(shard) && is_whole);
        if is_missing {
            self.shared.look_at = self.basis.now + LOOK_AGAIN.min(self.basis.config.rebuild_after / 2).max(LOOK_EVERY);
        }
        let is_told = |(no, _): &(SegmentNo, Token)| is_whole && look.covers(root.owner_of(*no), *no);
        let told: Vec<(SegmentNo, Token)> = self.shared.waiting.extract_if(.., is_told).collect();
        for (_, token) in told {
            self.drive_fetcher(out, |fetcher, around, out| fetcher.ask_anew(around, token, out));
        }
    }

    /// A read waits until it is known where an origin's shards are.
    pub(crate) fn wait_for_look(&mut self, segment: SegmentNo, fetch: Token) {
        self.shared.waiting.insert((segment, fetch));
    }

    /// A look that nobody answers ends.
    pub(crate) fn on_look_lost(&mut self, leg: Leg, out: Out) {
        self.on_looked(leg, &Reply::Done, out);
    }

    /// Tells of a creation that its controller does not come to finish.
    pub(crate) fn abandon_creation(&mut self, out: Out) {
        if let Some(creation) = self.drop_creation() {
            let why = "the volume was closed or taken over meanwhile; try again";
            out.push(Effect::Notice(Notice::DependentRefused { dependent: creation.dependent, why }));
        }
    }
}
