//! The segment table: shape, homes and live count of every segment of the volume; and the numbers that are given out.
//!
//! Invariants (1 and 2 are checked by [`Segments::verify`]): (1) what is summed up is what a walk over the table finds;
//! (2) no more of a segment is shadowed than lives; (3) `live` of a segment is what base and overlay of the map name of
//! it, counted apart (see `named`). One of which everything is shadowed (see `shadowed`), once a durable checkpoint says
//! so, may be freed.

use super::named::{Change, Named, bytes_of};
use crate::api::SpaceUse;
use holdfast_base::{BLOCK_BYTES, DeviceId, Epoch};
use holdfast_format::geometry::Geometry;
use holdfast_format::ledger::Leg;
use holdfast_format::packing::{BLOCK_GRANULES, Codec};
use holdfast_format::record::SegmentNo;
use holdfast_format::root::OwnNumbers;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::ops::Bound;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Data,
    /// Map leaves; `live` counts their bytes.
    Meta,
    /// A part of a checkpoint; `live` is 1 while a checkpoint names it.
    Run,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct SegmentInfo {
    pub(crate) kind: Kind,
    pub(crate) geometry: Geometry,
    pub(crate) homes: Vec<Leg>,
    /// Granules of all its units, if it is packed.
    pub(crate) units: Option<NonZeroU32>,
    pub(crate) live: Named,
    /// Of that: what leaves name and the overlay hides, as far as known.
    pub(crate) shadowed: Named,
    /// Named by others, or another volume's (see `sharing::segments`): neither cleaned nor counted as dead.
    pub(crate) kept: bool,
    /// When its data was written (see `heat`).
    pub(crate) born: u64,
    /// Where in the volume the middle of its data lies, by key: what lies near is cleaned together.
    pub(crate) middle: u64,
    /// What was tried last to make its blocks smaller, since the volume was opened.
    pub(crate) tried: Option<Codec>,
    /// In which round its blocks were fingerprinted last, since the volume was opened.
    pub(crate) printed: Option<u32>,
}

impl SegmentInfo {
    /// One of which nothing is named yet.
    pub(crate) fn new(kind: Kind, geometry: Geometry, homes: Vec<Leg>) -> SegmentInfo {
        let (live, shadowed) = (Named::NOTHING, Named::NOTHING);
        SegmentInfo {
            kind,
            geometry,
            homes,
            units: None,
            live,
            shadowed,
            kept: false,
            born: 0,
            middle: 0,
            tried: None,
            printed: None,
        }
    }

    /// What its payload takes, with what lies between units.
    pub(crate) fn payload_blocks(&self) -> u64 {
        u64::from(self.geometry.payload_blocks)
    }

    /// Granules that a data segment has: those of its payload, or of its units, without what lies between them.
    pub(crate) fn capacity(&self) -> u64 {
        let all = self.payload_blocks() * u64::from(BLOCK_GRANULES);
        self.units.map_or(all, |units| u64::from(units.get()))
    }

    pub(crate) fn is_live(&self) -> bool {
        !self.live.is_nothing()
    }

    /// What of `live` can be read.
    pub(crate) fn visible(&self) -> Named {
        self.live - self.shadowed
    }

    pub(crate) fn is_visible(&self) -> bool {
        self.live != self.shadowed
    }

    /// Granules of a data segment that nobody can read any more, as far as known.
    pub(crate) fn dead(&self) -> u64 {
        if self.kept { 0 } else { self.unseen() }
    }

    /// Granules of a data segment that nobody of this volume can read any more, as far as known.
    fn unseen(&self) -> u64 {
        self.capacity().saturating_sub(self.visible().size)
    }

    /// What it takes of devices.
    pub(crate) fn space(&self) -> SpaceUse {
        let shard_bytes = u64::from(self.geometry.shard_blocks()) * BLOCK_BYTES as u64;
        let shards = shard_bytes * u64::from(self.geometry.shard_count());
        if self.kind != Kind::Data {
            return SpaceUse { metadata_bytes: shards, ..SpaceUse::default() };
        }
        let capacity = bytes_of(self.capacity());
        // While a fold is due a block may be named by base and overlay, and is counted for both.
        let data_bytes = bytes_of(self.visible().size).min(capacity);
        let unseen = capacity - data_bytes;
        let (dead_bytes, kept_bytes) = if self.kept { (0, unseen) } else { (unseen, 0) };
        let payload_bytes = self.payload_blocks() * BLOCK_BYTES as u64;
        let Named { size, blocks } = self.visible();
        let shown_blocks = if size > self.capacity() { blocks * self.capacity() / size } else { blocks };
        let shown_bytes = shown_blocks * BLOCK_BYTES as u64;
        SpaceUse {
            data_bytes,
            dead_bytes,
            kept_bytes,
            padding_bytes: payload_bytes - capacity,
            redundancy_bytes: shards - payload_bytes,
            metadata_bytes: 0,
            shown_bytes,
            plain_bytes: if self.units.is_none() { shown_bytes } else { 0 },
        }
    }

    /// Whether anybody names it.
    pub(crate) fn is_needed(&self) -> bool {
        self.is_live() || self.kept
    }
}

/// Sums over segments; blocks and granules are those of data segments.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Totals {
    pub(crate) segments: u64,
    pub(crate) kept: u64,
    pub(crate) shards: u64,
    pub(crate) space: SpaceUse,
    pub(crate) data_segments: u64,
    /// Granules, and those of them that are dead.
    pub(crate) capacity: u64,
    pub(crate) dead: u64,
    /// As guests see them.
    pub(crate) visible_blocks: u64,
}

impl Totals {
    fn of(info: &SegmentInfo) -> Totals {
        let (segments, kept) = (1, u64::from(info.kept));
        let (shards, space) = (info.homes.len() as u64, info.space());
        let nothing = Totals { segments, kept, shards, space, ..Totals::default() };
        match info.kind {
            Kind::Data => Totals {
                data_segments: 1,
                capacity: info.capacity(),
                dead: info.dead(),
                visible_blocks: info.visible().blocks,
                ..nothing
            },
            _ => nothing,
        }
    }

    fn change(&mut self, by: &Totals, change: impl Fn(&mut u64, u64)) {
        let (to, of) = (&mut self.space, &by.space);
        for (to, of) in [
            (&mut self.segments, by.segments),
            (&mut self.kept, by.kept),
            (&mut self.shards, by.shards),
            (&mut self.data_segments, by.data_segments),
            (&mut self.capacity, by.capacity),
            (&mut self.dead, by.dead),
            (&mut self.visible_blocks, by.visible_blocks),
            (&mut to.data_bytes, of.data_bytes),
            (&mut to.dead_bytes, of.dead_bytes),
            (&mut to.kept_bytes, of.kept_bytes),
            (&mut to.padding_bytes, of.padding_bytes),
            (&mut to.redundancy_bytes, of.redundancy_bytes),
            (&mut to.metadata_bytes, of.metadata_bytes),
            (&mut to.shown_bytes, of.shown_bytes),
            (&mut to.plain_bytes, of.plain_bytes),
        ] {
            change(to, of);
        }
    }

    fn add(&mut self, by: &Totals) {
        self.change(by, |to, by| *to += by);
    }

    fn sub(&mut self, by: &Totals) {
        self.change(by, |to, by| *to -= by);
    }
}

/// What segments amount to.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Sums {
    totals: Totals,
    /// Their shards in each place that has any.
    shards_at: BTreeMap<Leg, u64>,
}

impl Sums {
    fn add(&mut self, info: &SegmentInfo) {
        self.totals.add(&Totals::of(info));
        self.come_home(&info.homes);
    }

    fn sub(&mut self, info: &SegmentInfo) {
        self.totals.sub(&Totals::of(info));
        self.leave_home(&info.homes);
    }

    fn come_home(&mut self, homes: &[Leg]) {
        for home in homes {
            *self.shards_at.entry(*home).or_default() += 1;
        }
    }

    fn leave_home(&mut self, homes: &[Leg]) {
        for home in homes {
            let count = self.shards_at.get_mut(home).expect("it was counted when it came");
            *count -= 1;
            if *count == 0 {
                self.shards_at.remove(home);
            }
        }
    }

    fn shards_on(&self, device: DeviceId) -> u64 {
        self.shards_at.iter().filter(|(leg, _)| leg.device == device).map(|(_, count)| count).sum()
    }
}

fn set_member(set: &mut BTreeSet<SegmentNo>, no: SegmentNo, is_member: bool) {
    if is_member {
        set.insert(no);
    } else {
        set.remove(&no);
    }
}

/// The table as of one instant, for who goes through it in slices.
#[derive(Debug)]
struct Cut {
    /// What is left to go through, where that is not all.
    changed: Option<BTreeSet<SegmentNo>>,
    /// Everything up to here was gone through.
    last: Option<SegmentNo>,
    /// What has changed since, ahead of there, as it was; absent means that it was not in the table.
    kept: BTreeMap<SegmentNo, Option<SegmentInfo>>,
}

impl Cut {
    fn is_ahead(&self, no: SegmentNo) -> bool {
        self.changed.as_ref().map_or(self.last.is_none_or(|last| no > last), |changed| changed.contains(&no))
    }
}

#[derive(Debug, Default)]
pub(crate) struct Segments {
    segments: BTreeMap<SegmentNo, SegmentInfo>,
    /// Those that are not of data.
    metadata: BTreeSet<SegmentNo>,
    /// Those in which nothing can be read any more.
    unseen: BTreeSet<SegmentNo>,
    /// Changed since the last checkpoint run; absent from `segments` means removed.
    dirty: BTreeSet<SegmentNo>,
    cut: Option<Box<Cut>>,
    all: Sums,
    /// Others are origins' or stores' (see `sharing::segments`).
    own: OwnNumbers,
    foreign: Sums,
    /// Changed, in what counts for judging them, since that was asked last.
    touched: RefCell<BTreeSet<SegmentNo>>,
    next: u64,
    /// Numbers of this epoch that have shards on the way or stored, and no commit record applied yet; and those that
    /// the last durable checkpoint names, until their free record is complete.
    unsettled: BTreeSet<SegmentNo>,
}

/// Segments that were not in the table at some time and may have come there since.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct InFlight {
    next: SegmentNo,
    unsettled: BTreeSet<SegmentNo>,
}

impl InFlight {
    pub(crate) fn has(&self, no: SegmentNo) -> bool {
        no >= self.next || self.unsettled.contains(&no)
    }
}

impl Segments {
    /// Empties the table, as of a volume whose own segments have these numbers.
    pub(crate) fn reset(&mut self, own: OwnNumbers) {
        let mut touched = std::mem::take(&mut self.touched);
        touched.get_mut().extend(self.segments.keys());
        let (next, unsettled) = (self.next, std::mem::take(&mut self.unsettled));
        *self = Segments { own, touched, next, unsettled, ..Segments::default() };
    }

    // ---- numbers ----

    /// A new epoch begins.
    pub(crate) fn restart_numbers(&mut self) {
        self.next = 0;
    }

    /// Gives out a number.
    pub(crate) fn take_number(&mut self, epoch: Epoch) -> SegmentNo {
        let no = self.next_number(epoch);
        self.next += 1;
        no
    }

    /// The one that is given out next.
    pub(crate) fn next_number(&self, epoch: Epoch) -> SegmentNo {
        SegmentNo { epoch, counter: self.next }
    }

    /// Nothing of the segment is deleted until it is settled what becomes of it.
    pub(crate) fn unsettle(&mut self, no: SegmentNo) {
        self.unsettled.insert(no);
    }

    pub(crate) fn settle(&mut self, no: SegmentNo) {
        self.unsettled.remove(&no);
    }

    /// Segments that may come into the table yet, as of now.
    pub(crate) fn in_flight(&self, epoch: Epoch) -> InFlight {
        InFlight { next: self.next_number(epoch), unsettled: self.unsettled.clone() }
    }

    pub(crate) fn is_unsettled(&self, no: SegmentNo) -> bool {
        self.unsettled.contains(&no)
    }

    // ---- the table ----

    pub(crate) fn insert(&mut self, no: SegmentNo, info: SegmentInfo) {
        self.keep(no);
        self.in_sums(no, |sums| sums.add(&info));
        set_member(&mut self.metadata, no, info.kind != Kind::Data);
        set_member(&mut self.unseen, no, !info.is_visible());
        if let Some(former) = self.segments.insert(no, info) {
            self.in_sums(no, |sums| sums.sub(&former));
        }
        self.on_changed(no);
    }

    pub(crate) fn remove(&mut self, no: SegmentNo) -> Option<SegmentInfo> {
        self.keep(no);
        self.on_changed(no);
        let info = self.segments.remove(&no)?;
        self.metadata.remove(&no);
        self.unseen.remove(&no);
        self.in_sums(no, |sums| sums.sub(&info));
        Some(info)
    }

    fn on_changed(&mut self, no: SegmentNo) {
        self.dirty.insert(no);
        self.touched.get_mut().insert(no);
    }

    /// In the sums that the segment is part of.
    fn in_sums(&mut self, no: SegmentNo, change: impl Fn(&mut Sums)) {
        change(&mut self.all);
        if !self.own.contains(no) {
            change(&mut self.foreign);
        }
    }

    /// Sums over all segments.
    pub(crate) fn totals(&self) -> &Totals {
        &self.all.totals
    }

    /// Sums over the volume's own.
    pub(crate) fn own_totals(&self) -> Totals {
        let mut totals = self.all.totals.clone();
        totals.sub(&self.foreign.totals);
        totals
    }

    /// What guests see of segments that are another volume's.
    pub(crate) fn elsewhere_bytes(&self) -> u64 {
        self.foreign.totals.visible_blocks * BLOCK_BYTES as u64
    }

    /// Shards of its own segments on the device.
    pub(crate) fn own_shards_on(&self, device: DeviceId) -> u64 {
        self.all.shards_on(device) - self.foreign.shards_on(device)
    }

    /// Where any shards lie, origins' included.
    pub(crate) fn homes(&self) -> impl Iterator<Item = Leg> {
        self.all.shards_at.keys().copied()
    }

    /// Walks over the whole table, and asserts that what is kept says the same (tests and the simulator).
    pub(crate) fn verify(&self) {
        let (mut all, mut foreign) = (Sums::default(), Sums::default());
        for (no, info) in self.iter() {
            all.add(info);
            if !self.own.contains(no) {
                foreign.add(info);
            }
        }
        assert_eq!((&self.all, &self.foreign), (&all, &foreign), "sums are what a walk finds");
        let metadata = self.iter().filter(|(_, info)| info.kind != Kind::Data).map(|(no, _)| no);
        assert!(metadata.eq(self.metadata.iter().copied()), "metadata is what a walk finds");
        let unseen = self.iter().filter(|(_, info)| !info.is_visible()).map(|(no, _)| no);
        assert!(unseen.eq(self.unseen_after(None)), "what holds nothing is what a walk finds");
        assert!(self.iter().all(|(_, info)| info.shadowed.is_within(info.live)), "more is shadowed than lives");
    }

    /// Share of the data segments that is dead, in 1/1000, as far as that was folded.
    pub(crate) fn dead_per_mille(&self) -> u64 {
        self.totals().dead * 1000 / self.totals().capacity.max(1)
    }

    /// The volume's own segments.
    pub(crate) fn own(&self) -> impl Iterator<Item = (SegmentNo, &SegmentInfo)> {
        self.own_after(None)
    }

    /// The volume's own ones behind that one.
    pub(crate) fn own_after(&self, last: Option<SegmentNo>) -> impl Iterator<Item = (SegmentNo, &SegmentInfo)> {
        self.own_behind(last.map_or(Bound::Unbounded, Bound::Excluded))
    }

    /// The same, of those that may be among them.
    pub(crate) fn own_behind(&self, from: Bound<SegmentNo>) -> impl Iterator<Item = (SegmentNo, &SegmentInfo)> {
        let from = match from {
            Bound::Included(no) | Bound::Excluded(no) if no >= self.own.first => from,
            _ => Bound::Included(self.own.first),
        };
        let is_own = |no: SegmentNo| self.own.end.is_none_or(|end| no < end);
        let all = self.segments.range((from, Bound::Unbounded)).map(|(no, info)| (*no, info));
        all.take_while(move |(no, _)| is_own(*no))
    }

    /// Those of its origins, and of stores.
    pub(crate) fn foreign(&self) -> impl Iterator<Item = (SegmentNo, &SegmentInfo)> {
        let stores = self.own.end.map(|end| self.segments.range(end..));
        self.segments.range(..self.own.first).chain(stores.into_iter().flatten()).map(|(no, info)| (*no, info))
    }

    /// Which are the volume's own.
    pub(crate) fn own_numbers(&self) -> OwnNumbers {
        self.own
    }

    /// Up to `count` of what changed, in what counts for judging segments, and was not taken before.
    pub(crate) fn take_touched(&self, count: usize) -> BTreeSet<SegmentNo> {
        let mut touched = self.touched.borrow_mut();
        if touched.len() <= count {
            return std::mem::take(&mut *touched);
        }
        std::iter::from_fn(|| touched.pop_first()).take(count).collect()
    }

    pub(crate) fn touched_count(&self) -> usize {
        self.touched.borrow().len()
    }

    pub(crate) fn is_touched(&self, no: SegmentNo) -> bool {
        self.touched.borrow().contains(&no)
    }

    pub(crate) fn get(&self, no: SegmentNo) -> Option<&SegmentInfo> {
        self.segments.get(&no)
    }

    pub(crate) fn rehome(&mut self, no: SegmentNo, homes: &[(u8, Leg)]) {
        self.keep(no);
        let Some(info) = self.segments.get_mut(&no) else { return };
        let former = info.homes.clone();
        for (index, leg) in homes {
            info.homes[usize::from(*index)] = *leg;
        }
        let now = info.homes.clone();
        self.in_sums(no, |sums| {
            sums.come_home(&now);
            sums.leave_home(&former);
        });
        self.on_changed(no);
    }

    pub(crate) fn add_live(&mut self, no: SegmentNo, named: Named) {
        self.change_live(no, named.as_more());
    }

    pub(crate) fn sub_live(&mut self, no: SegmentNo, named: Named) {
        self.change_live(no, -named.as_more());
    }

    fn change_live(&mut self, no: SegmentNo, by: Change) {
        let is_there = self.change(no, |info| {
            info.live = info.live.checked_change(by).expect("no segment has less than nothing live");
        });
        assert!(is_there, "a named segment is in the table");
        self.dirty.insert(no);
    }

    /// What the map names was counted anew.
    pub(crate) fn set_live(&mut self, no: SegmentNo, live: Named) {
        let is_there = self.change(no, |info| info.live = live);
        assert!(is_there, "a counted segment is in the table");
        self.dirty.insert(no);
    }

    /// A leaf names so much more from now on, or less. Of a segment that is gone that is shadowed.
    pub(crate) fn change_named(&mut self, no: SegmentNo, by: Change) {
        if self.segments.contains_key(&no) {
            self.change_live(no, by);
        }
    }

    /// What can still be read; `None` where the segment is gone.
    pub(crate) fn add_shadowed(&mut self, no: SegmentNo, named: Named) -> Option<Named> {
        let mut visible = None;
        self.change(no, |info| {
            info.shadowed += named;
            visible = info.live.checked_sub(info.shadowed);
        });
        visible
    }

    pub(crate) fn sub_shadowed(&mut self, no: SegmentNo, named: Named) {
        self.change(no, |info| {
            info.shadowed = info.shadowed.checked_sub(named).expect("what is not shadowed any more was counted");
        });
    }

    /// True if that changes it.
    pub(crate) fn set_kept(&mut self, no: SegmentNo, kept: bool) -> bool {
        let is_new = self.segments.get(&no).is_some_and(|info| info.kept != kept);
        is_new && self.change(no, |info| info.kept = kept)
    }

    /// That codec was tried on its blocks. No checkpoint tells that.
    pub(crate) fn note_tried(&mut self, no: SegmentNo, codec: Codec) {
        if let Some(info) = self.segments.get_mut(&no) {
            info.tried = Some(codec);
        }
    }

    /// Its blocks were fingerprinted in that round, or are to be again. No checkpoint tells that.
    pub(crate) fn set_printed(&mut self, no: SegmentNo, printed: Option<u32>) {
        if let Some(info) = self.segments.get_mut(&no) {
            info.printed = printed;
        }
    }

    pub(crate) fn any_kept(&self) -> bool {
        self.all.totals.kept > 0
    }

    fn change(&mut self, no: SegmentNo, change: impl FnOnce(&mut SegmentInfo)) -> bool {
        self.keep(no);
        let Some(info) = self.segments.get_mut(&no) else { return false };
        let what_counts = |info: &SegmentInfo| (info.is_live(), info.is_visible(), info.kept);
        let before = what_counts(info);
        let former = Totals::of(info);
        change(info);
        assert!(info.shadowed.is_within(info.live), "{no:?}: of {:?} {:?} is shadowed", info.live, info.shadowed);
        let now = Totals::of(info);
        if what_counts(info) != before {
            set_member(&mut self.unseen, no, !info.is_visible());
            self.touched.get_mut().insert(no);
        }
        self.in_sums(no, |sums| {
            sums.totals.add(&now);
            sums.totals.sub(&former);
        });
        true
    }

    pub(crate) fn len(&self) -> usize {
        self.segments.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (SegmentNo, &SegmentInfo)> {
        self.segments.iter().map(|(no, info)| (*no, info))
    }

    /// What holds nothing that can be read, behind that one.
    pub(crate) fn unseen_after(&self, last: Option<SegmentNo>) -> impl Iterator<Item = SegmentNo> {
        self.unseen.range((last.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded)).copied()
    }

    /// What is not data, from there on.
    pub(crate) fn metadata_from(&self, from: SegmentNo) -> impl Iterator<Item = (SegmentNo, &SegmentInfo)> {
        self.metadata.range(from..).map(|no| (*no, &self.segments[no]))
    }

    /// All of them behind that one.
    pub(crate) fn iter_after(&self, last: Option<SegmentNo>) -> impl Iterator<Item = (SegmentNo, &SegmentInfo)> {
        let from = last.map_or(Bound::Unbounded, Bound::Excluded);
        self.segments.range((from, Bound::Unbounded)).map(|(no, info)| (*no, info))
    }

    /// All behind that one.
    pub(crate) fn numbers_after(&self, last: Option<SegmentNo>) -> impl Iterator<Item = SegmentNo> {
        self.segments.range((last.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded)).map(|(no, _)| *no)
    }

    pub(crate) fn iter_from(&self, from: SegmentNo) -> impl Iterator<Item = (SegmentNo, &SegmentInfo)> {
        self.segments.range(from..).map(|(no, info)| (*no, info))
    }

    // ---- checkpoints ----

    /// The state as of now is gone through from here on: of all segments, or of those that changed since the last time.
    pub(crate) fn cut(&mut self, of_all: bool) {
        let changed = self.take_dirty();
        self.begin_cut((!of_all).then_some(changed));
    }

    /// So it is of all segments, for another volume: the next checkpoint of this one says the same as without.
    pub(crate) fn cut_for_other(&mut self) {
        self.begin_cut(None);
    }

    fn begin_cut(&mut self, changed: Option<BTreeSet<SegmentNo>>) {
        assert!(self.cut.is_none(), "one walk at a time");
        self.cut = Some(Box::new(Cut { changed, last: None, kept: BTreeMap::new() }));
    }

    /// The walk is given up.
    pub(crate) fn end_cut(&mut self) {
        self.cut = None;
    }

    /// A segment is about to change.
    fn keep(&mut self, no: SegmentNo) {
        if let Some(cut) = &mut self.cut
            && cut.is_ahead(no)
        {
            cut.kept.entry(no).or_insert_with(|| self.segments.get(&no).cloned());
        }
    }

    /// Tells of the next `count` of the cut, in order: of segments that were in the table then, and of changed ones
    /// that were not. False when that was all.
    pub(crate) fn walk_cut(&mut self, count: usize, mut told: impl FnMut(SegmentNo, Option<&SegmentInfo>)) -> bool {
        let mut cut = self.cut.take().expect("a walk begins with a cut");
        let from = cut.last.map_or(Bound::Unbounded, Bound::Excluded);
        let range = (from, Bound::Unbounded);
        let next: BTreeSet<SegmentNo> = match &mut cut.changed {
            Some(changed) => std::iter::from_fn(|| changed.pop_first()).take(count).collect(),
            None => {
                let there = self.segments.range(range).map(|(no, _)| *no).take(count);
                there.chain(cut.kept.range(range).map(|(no, _)| *no).take(count)).collect()
            }
        };
        let is_last = next.len() < count;
        for no in next.into_iter().take(count) {
            let kept = cut.kept.get(&no).map(|kept| kept.as_ref());
            let info = kept.unwrap_or_else(|| self.segments.get(&no));
            if info.is_some() || cut.changed.is_some() {
                told(no, info);
            }
            cut.last = Some(no);
        }
        self.cut = Some(cut).filter(|_| !is_last);
        !is_last
    }

    /// What changed since the last call or cut: present segments and removed ones.
    pub(crate) fn take_dirty(&mut self) -> BTreeSet<SegmentNo> {
        std::mem::take(&mut self.dirty)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use holdfast_format::geometry::Layout;

    pub(crate) fn no(epoch: u64, counter: u64) -> SegmentNo {
        SegmentNo { epoch: Epoch(epoch), counter }
    }

    /// A segment of data in two copies, with so many blocks that live.
    pub(crate) fn info(blocks: u32, live: u64, homes: &[Leg]) -> SegmentInfo {
        let geometry = Geometry::new(Layout::Mirror { copies: 2 }, blocks);
        SegmentInfo { live: Named::of_blocks(live), ..SegmentInfo::new(Kind::Data, geometry, homes.to_vec()) }
    }

    fn homes(devices: [u32; 2]) -> Vec<Leg> {
        devices.map(|device| crate::peers::tests::leg(1, device)).to_vec()
    }

    /// One of an origin and one of its own.
    fn table() -> Segments {
        let mut table = Segments::default();
        table.reset(OwnNumbers { first: no(2, 0), end: Some(no(5, 0)) });
        table.insert(no(1, 7), info(100, 60, &homes([0, 1])));
        table.insert(no(2, 0), info(100, 50, &homes([1, 2])));
        table.verify();
        table
    }

    #[test]
    fn origins_count_in_all_and_not_in_its_own() {
        let table = table();
        assert_eq!((table.totals().segments, table.own_totals().segments), (2, 1));
        assert_eq!((table.totals().visible_blocks, table.own_totals().visible_blocks), (110, 50));
        assert_eq!(table.own_shards_on(homes([0, 1])[1].device), 1);
        assert_eq!((table.own().count(), table.foreign().count()), (1, 1));
        assert_eq!(table.dead_per_mille(), 450);
    }

    #[test]
    fn a_stores_are_foreign_as_an_origins_are() {
        let mut table = table();
        table.insert(no(5, 0), info(100, 30, &homes([2, 3])));
        table.verify();
        assert_eq!((table.totals().segments, table.own_totals().segments), (3, 1));
        assert!(table.own().map(|(no, _)| no).eq([no(2, 0)]));
        assert!(table.foreign().map(|(no, _)| no).eq([no(1, 7), no(5, 0)]));
        table.reset(OwnNumbers { first: no(5, 0), end: None });
        table.insert(no(9, 0), info(100, 30, &homes([2, 3])));
        assert_eq!((table.own().count(), table.foreign().count()), (1, 0), "a store has no end");
    }

    #[test]
    fn what_is_shadowed_or_named_no_more_is_dead_unless_others_need_it() {
        let mut table = table();
        let dead = |table: &Segments| table.get(no(2, 0)).map(|info| info.dead() / 64);
        assert_eq!(table.add_shadowed(no(2, 0), Named::of_blocks(20)), Some(Named::of_blocks(30)));
        assert_eq!(dead(&table), Some(70));
        table.sub_shadowed(no(2, 0), Named::of_blocks(20));
        table.sub_live(no(2, 0), Named::of_blocks(50));
        table.verify();
        assert!(table.unseen_after(None).eq([no(2, 0)]));
        assert!(table.set_kept(no(2, 0), true) && !table.set_kept(no(2, 0), true));
        assert_eq!((dead(&table), table.own_totals().space.kept_bytes), (Some(0), 100 * BLOCK_BYTES as u64));
        table.verify();
        assert_eq!(table.add_shadowed(no(9, 9), Named::of_blocks(1)), None);
    }

    #[test]
    fn a_packed_segment_holds_its_units_and_what_lies_between_is_in_no_account() {
        let mut table = table();
        // Of 6,400 granules 6,000 are units.
        let packed = SegmentInfo { units: NonZeroU32::new(6000), ..info(100, 0, &homes([1, 2])) };
        table.insert(no(2, 1), packed);
        table.add_live(no(2, 1), Named { size: 6000, blocks: 180 });
        let of = |table: &Segments| table.get(no(2, 1)).cloned().expect("it is in the table");
        assert_eq!((of(&table).capacity(), of(&table).dead()), (6000, 0), "all of it lives");
        assert_eq!(table.totals().visible_blocks, 110 + 180);
        assert_eq!(
            table.add_shadowed(no(2, 1), Named { size: 64, blocks: 4 }),
            Some(Named { size: 5936, blocks: 176 })
        );
        assert_eq!((of(&table).dead(), table.totals().visible_blocks), (64, 110 + 176));
        let space = of(&table).space();
        assert_eq!((space.data_bytes, space.dead_bytes), (5936 * 64, 64 * 64));
        // Two copies of 100 blocks.
        assert_eq!(space.data_bytes + space.dead_bytes + space.padding_bytes + space.redundancy_bytes, 200 * 4096);
        table.verify();
    }

    #[test]
    fn what_is_named_twice_while_a_fold_is_due_is_shown_once() {
        let mut table = table();
        let space = |table: &Segments, no| table.get(no).expect("it is in the table").space();
        table.insert(no(2, 1), info(100, 0, &homes([1, 2])));
        table.add_live(no(2, 1), Named::of_blocks(150));
        let SpaceUse { data_bytes, shown_bytes, plain_bytes, .. } = space(&table, no(2, 1));
        assert_eq!((data_bytes, shown_bytes, plain_bytes), (409_600, 409_600, 409_600));
        // Blocks are a third of what their units are.
        table.insert(no(2, 2), SegmentInfo { units: NonZeroU32::new(6000), ..info(100, 0, &homes([1, 2])) });
        table.add_live(no(2, 2), Named { size: 9000, blocks: 450 });
        assert_eq!(space(&table, no(2, 2)).shown_bytes, 300 * BLOCK_BYTES as u64);
        table.verify();
    }

    #[test]
    fn a_home_that_changes_moves_its_count() {
        let mut table = table();
        let (from, to) = (homes([1, 2])[0], homes([3, 3])[0]);
        table.rehome(no(2, 0), &[(0, to)]);
        table.verify();
        assert_eq!((table.own_shards_on(from.device), table.own_shards_on(to.device)), (0, 1));
    }

    #[test]
    fn what_was_there_before_a_reset_is_judged_anew() {
        let mut table = table();
        table.take_touched(usize::MAX);
        let given = table.take_number(Epoch(3));
        table.unsettle(given);
        table.reset(OwnNumbers::default());
        table.verify();
        assert_eq!(table.take_touched(usize::MAX), BTreeSet::from([no(1, 7), no(2, 0)]));
        assert!(table.is_unsettled(given) && table.next_number(Epoch(3)) > given);
        table.settle(given);
        assert!(!table.is_unsettled(given) && table.len() == 0);
    }

    #[test]
    fn only_what_changed_is_written_with_the_next_checkpoint() {
        let mut table = table();
        table.take_dirty();
        table.change_named(no(2, 0), Named::of_blocks(1).as_more());
        table.change_named(no(9, 9), Named::of_blocks(1).as_more());
        assert_eq!(table.take_dirty(), BTreeSet::from([no(2, 0)]));
        table.remove(no(1, 7));
        assert_eq!(table.take_dirty(), BTreeSet::from([no(1, 7)]));
        table.verify();
    }

    #[test]
    #[should_panic(expected = "no segment has less than nothing live")]
    fn nothing_is_named_less_often_than_never() {
        table().sub_live(no(2, 0), Named::of_blocks(51));
    }
}
