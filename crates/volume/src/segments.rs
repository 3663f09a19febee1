//! The segment table: shape, homes and live count of every segment of the volume.
//!
//! Invariant: `live` of a segment is the number of blocks (of leaf bytes, for metadata) by which base and overlay of the
//! map name it, counted apart. One of which everything is hidden (see `hidden`), once a durable checkpoint says so, may be
//! freed.

use crate::api::SpaceUse;
use crate::survey::Survey;
use holdfast_base::{BLOCK_BYTES, DeviceId};
use holdfast_format::geometry::Geometry;
use holdfast_format::ledger::Leg;
use holdfast_format::record::SegmentNo;
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Kind {
    Data,
    /// Map leaves; `live` counts their bytes.
    Meta,
    /// A part of a checkpoint; `live` is 1 while a checkpoint names it.
    Run,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SegmentInfo {
    pub kind: Kind,
    pub geometry: Geometry,
    pub homes: Vec<Leg>,
    pub live: u64,
    /// Of these: blocks that leaves name and the overlay hides, as far as known.
    #[serde(skip)]
    pub hidden: u64,
    /// Named by others, or another volume's (see `family`): neither cleaned nor counted as dead.
    #[serde(skip)]
    pub kept: bool,
    /// When its data was written (see `heat`).
    #[serde(skip)]
    pub born: u64,
    /// Where in the volume the middle of its data lies, by key: what lies near is cleaned together.
    #[serde(skip)]
    pub middle: u64,
}

impl SegmentInfo {
    pub fn capacity_blocks(&self) -> u64 {
        u64::from(self.geometry.payload_blocks)
    }

    /// What of `live` can be read.
    pub fn visible(&self) -> u64 {
        self.live - self.hidden
    }

    /// Blocks of a data segment that nobody can read any more, as far as known.
    pub fn dead_blocks(&self) -> u64 {
        if self.kept { 0 } else { self.unseen_blocks() }
    }

    /// Blocks of a data segment that nobody of this volume can read any more, as far as known.
    pub fn unseen_blocks(&self) -> u64 {
        self.capacity_blocks().saturating_sub(self.visible())
    }

    /// What it takes of devices.
    pub fn space(&self) -> SpaceUse {
        let block = BLOCK_BYTES as u64;
        let shards = u64::from(self.geometry.shard_blocks()) * block * u64::from(self.geometry.shard_count());
        if self.kind != Kind::Data {
            return SpaceUse { metadata_bytes: shards, ..SpaceUse::default() };
        }
        let payload = self.capacity_blocks() * block;
        // While a fold is due a block may be named by base and overlay, and is counted for both.
        let data_bytes = (self.visible() * block).min(payload);
        let unseen = payload - data_bytes;
        let (dead_bytes, kept_bytes) = if self.kept { (0, unseen) } else { (unseen, 0) };
        SpaceUse { data_bytes, dead_bytes, kept_bytes, redundancy_bytes: shards - payload, metadata_bytes: 0 }
    }

    /// Whether anybody names it.
    pub fn is_needed(&self) -> bool {
        self.live > 0 || self.kept
    }
}

/// Sums over segments; blocks are those of data segments.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Totals {
    pub segments: u64,
    pub shards: u64,
    pub space: SpaceUse,
    pub data_segments: u64,
    pub capacity_blocks: u64,
    pub dead_blocks: u64,
    pub visible_blocks: u64,
}

impl Totals {
    fn of(info: &SegmentInfo) -> Totals {
        let (segments, shards, space) = (1, info.homes.len() as u64, info.space());
        let nothing = Totals { segments, shards, space, ..Totals::default() };
        match info.kind {
            Kind::Data => Totals {
                data_segments: 1,
                capacity_blocks: info.capacity_blocks(),
                dead_blocks: info.dead_blocks(),
                visible_blocks: info.visible(),
                ..nothing
            },
            _ => nothing,
        }
    }

    fn change(&mut self, by: &Totals, change: impl Fn(&mut u64, u64)) {
        let (to, of) = (&mut self.space, &by.space);
        for (to, of) in [
            (&mut self.segments, by.segments),
            (&mut self.shards, by.shards),
            (&mut self.data_segments, by.data_segments),
            (&mut self.capacity_blocks, by.capacity_blocks),
            (&mut self.dead_blocks, by.dead_blocks),
            (&mut self.visible_blocks, by.visible_blocks),
            (&mut to.data_bytes, of.data_bytes),
            (&mut to.dead_bytes, of.dead_bytes),
            (&mut to.kept_bytes, of.kept_bytes),
            (&mut to.redundancy_bytes, of.redundancy_bytes),
            (&mut to.metadata_bytes, of.metadata_bytes),
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
    /// Their shards on each device that has any.
    shards_on: BTreeMap<DeviceId, u64>,
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
            *self.shards_on.entry(home.device).or_default() += 1;
        }
    }

    fn leave_home(&mut self, homes: &[Leg]) {
        for home in homes {
            let count = self.shards_on.get_mut(&home.device).expect("it was counted when it came");
            *count -= 1;
            if *count == 0 {
                self.shards_on.remove(&home.device);
            }
        }
    }

    fn shards_on(&self, device: DeviceId) -> u64 {
        self.shards_on.get(&device).copied().unwrap_or_default()
    }
}

fn set_member(set: &mut BTreeSet<SegmentNo>, no: SegmentNo, is_member: bool) {
    if is_member {
        set.insert(no);
    } else {
        set.remove(&no);
    }
}

#[derive(Debug, Default)]
pub struct SegmentTable {
    segments: BTreeMap<SegmentNo, SegmentInfo>,
    /// Those that are not of data.
    metadata: BTreeSet<SegmentNo>,
    /// Those in which nothing can be read any more.
    unseen: BTreeSet<SegmentNo>,
    /// Changed since the last checkpoint run; absent from `segments` means removed.
    dirty: BTreeSet<SegmentNo>,
    all: Sums,
    /// Below this number segments are origins' (see `family`).
    first_own: SegmentNo,
    foreign: Sums,
    pub(crate) survey: RefCell<Survey>,
}

impl SegmentTable {
    /// Empty, as of a volume whose own segments have numbers from there on.
    pub fn starting_at(first_own: SegmentNo) -> SegmentTable {
        SegmentTable { first_own, ..SegmentTable::default() }
    }

    pub fn insert(&mut self, no: SegmentNo, info: SegmentInfo) {
        self.in_sums(no, |sums| sums.add(&info));
        set_member(&mut self.metadata, no, info.kind != Kind::Data);
        set_member(&mut self.unseen, no, info.visible() == 0);
        if let Some(former) = self.segments.insert(no, info) {
            self.in_sums(no, |sums| sums.sub(&former));
        }
        self.on_changed(no);
    }

    pub fn remove(&mut self, no: SegmentNo) -> Option<SegmentInfo> {
        self.on_changed(no);
        let info = self.segments.remove(&no)?;
        self.metadata.remove(&no);
        self.unseen.remove(&no);
        self.in_sums(no, |sums| sums.sub(&info));
        Some(info)
    }

    fn on_changed(&mut self, no: SegmentNo) {
        self.dirty.insert(no);
        self.survey.get_mut().touched.insert(no);
    }

    /// In the sums that the segment is part of.
    fn in_sums(&mut self, no: SegmentNo, change: impl Fn(&mut Sums)) {
        change(&mut self.all);
        if no < self.first_own {
            change(&mut self.foreign);
        }
    }

    /// Sums over all segments.
    pub fn totals(&self) -> &Totals {
        &self.all.totals
    }

    /// Sums over the volume's own.
    pub fn own_totals(&self) -> Totals {
        let mut totals = self.all.totals.clone();
        totals.sub(&self.foreign.totals);
        totals
    }

    /// Shards of its own segments on the device.
    pub fn own_shards_on(&self, device: DeviceId) -> u64 {
        self.all.shards_on(device) - self.foreign.shards_on(device)
    }

    /// Walks over the whole table, and panics where what is kept says anything else.
    pub(crate) fn check_totals(&self, first_own: Option<SegmentNo>) {
        assert!(first_own.is_none_or(|first| first == self.first_own), "{:?} is not {first_own:?}", self.first_own);
        let (mut all, mut foreign) = (Sums::default(), Sums::default());
        for (no, info) in self.iter() {
            all.add(info);
            if no < self.first_own {
                foreign.add(info);
            }
        }
        assert_eq!((&self.all, &self.foreign), (&all, &foreign), "sums are what a walk finds");
        let metadata = self.iter().filter(|(_, info)| info.kind != Kind::Data).map(|(no, _)| no);
        assert!(metadata.eq(self.metadata.iter().copied()), "metadata is what a walk finds");
        let unseen = self.iter().filter(|(_, info)| info.visible() == 0).map(|(no, _)| no);
        assert!(unseen.eq(self.unseen()), "what holds nothing is what a walk finds");
    }

    /// Share of the data segments that is dead, in 1/1000, as far as that was folded.
    pub fn dead_per_mille(&self) -> u64 {
        self.totals().dead_blocks * 1000 / self.totals().capacity_blocks.max(1)
    }

    pub fn get(&self, no: SegmentNo) -> Option<&SegmentInfo> {
        self.segments.get(&no)
    }

    pub fn rehome(&mut self, no: SegmentNo, homes: &[(u8, Leg)]) {
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

    pub fn add_live(&mut self, no: SegmentNo, count: u64) {
        let is_there = self.change(no, |info| info.live += count);
        assert!(is_there, "a named segment is in the table");
        self.dirty.insert(no);
    }

    pub fn sub_live(&mut self, no: SegmentNo, count: u64) {
        let is_there = self.change(no, |info| {
            info.live = info.live.checked_sub(count).expect("no segment has less than nothing live");
        });
        assert!(is_there, "a named segment is in the table");
        self.dirty.insert(no);
    }

    /// What the map names was counted anew.
    pub fn set_live(&mut self, no: SegmentNo, live: u64) {
        let is_there = self.change(no, |info| info.live = live);
        assert!(is_there, "a counted segment is in the table");
        self.dirty.insert(no);
    }

    /// A leaf names these blocks from now on. Of a segment that is gone they are hidden.
    pub fn add_named(&mut self, no: SegmentNo, count: u64) {
        if self.segments.contains_key(&no) {
            self.add_live(no, count);
        }
    }

    /// A leaf names these blocks no more.
    pub fn sub_named(&mut self, no: SegmentNo, count: u64) {
        if self.segments.contains_key(&no) {
            self.sub_live(no, count);
        }
    }

    /// The blocks that can still be read; `None` where the segment is gone.
    pub fn add_hidden(&mut self, no: SegmentNo, count: u64) -> Option<u64> {
        let mut visible = None;
        self.change(no, |info| {
            info.hidden += count;
            visible = info.live.checked_sub(info.hidden);
        });
        visible
    }

    pub fn sub_hidden(&mut self, no: SegmentNo, count: u64) {
        self.change(no, |info| {
            info.hidden = info.hidden.checked_sub(count).expect("what is not hidden any more was counted");
        });
    }

    /// True if that changes it.
    pub fn set_kept(&mut self, no: SegmentNo, kept: bool) -> bool {
        let is_new = self.segments.get(&no).is_some_and(|info| info.kept != kept);
        is_new && self.change(no, |info| info.kept = kept)
    }

    pub fn any_kept(&self) -> bool {
        self.segments.values().any(|info| info.kept)
    }

    fn change(&mut self, no: SegmentNo, change: impl FnOnce(&mut SegmentInfo)) -> bool {
        let Some(info) = self.segments.get_mut(&no) else { return false };
        let what_counts = |info: &SegmentInfo| (info.live > 0, info.visible() > 0, info.kept);
        let before = what_counts(info);
        let former = Totals::of(info);
        change(info);
        assert!(info.hidden <= info.live, "{no:?}: of {} blocks {} are hidden", info.live, info.hidden);
        let now = Totals::of(info);
        if what_counts(info) != before {
            set_member(&mut self.unseen, no, info.visible() == 0);
            self.survey.get_mut().touched.insert(no);
        }
        self.in_sums(no, |sums| {
            sums.totals.add(&now);
            sums.totals.sub(&former);
        });
        true
    }

    pub fn len(&self) -> usize {
        self.segments.len()
    }

    pub fn iter(&self) -> impl Iterator<Item = (SegmentNo, &SegmentInfo)> {
        self.segments.iter().map(|(no, info)| (*no, info))
    }

    /// What holds nothing that can be read.
    pub fn unseen(&self) -> impl Iterator<Item = SegmentNo> {
        self.unseen.iter().copied()
    }

    /// What is not data.
    pub fn metadata(&self) -> impl Iterator<Item = (SegmentNo, &SegmentInfo)> {
        self.metadata.iter().map(|no| (*no, &self.segments[no]))
    }

    pub fn iter_from(&self, from: SegmentNo) -> impl Iterator<Item = (SegmentNo, &SegmentInfo)> {
        self.segments.range(from..).map(|(no, info)| (*no, info))
    }

    /// What changed since the last call: present segments and removed ones.
    pub fn take_dirty(&mut self) -> BTreeSet<SegmentNo> {
        std::mem::take(&mut self.dirty)
    }
}
