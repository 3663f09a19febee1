//! The segment table: shape, homes and live count of every segment of the volume.
//!
//! Invariant: `live` of a segment is the number of blocks (of leaf bytes, for metadata) by which base and overlay of the
//! map name it, counted apart. One of which everything is hidden (see `hidden`), once a durable checkpoint says so, may be
//! freed.

use holdfast_format::geometry::Geometry;
use holdfast_format::ledger::Leg;
use holdfast_format::record::SegmentNo;
use serde::{Deserialize, Serialize};
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

    /// Whether anybody names it.
    pub fn is_needed(&self) -> bool {
        self.live > 0 || self.kept
    }
}

#[derive(Debug, Default)]
pub struct SegmentTable {
    segments: BTreeMap<SegmentNo, SegmentInfo>,
    /// Changed since the last checkpoint run; absent from `segments` means removed.
    dirty: BTreeSet<SegmentNo>,
    /// Of all data segments together.
    capacity_blocks: u64,
    dead_blocks: u64,
}

impl SegmentTable {
    pub fn insert(&mut self, no: SegmentNo, info: SegmentInfo) {
        self.count(&info, true);
        if let Some(former) = self.segments.insert(no, info) {
            self.count(&former, false);
        }
        self.dirty.insert(no);
    }

    pub fn remove(&mut self, no: SegmentNo) -> Option<SegmentInfo> {
        self.dirty.insert(no);
        let info = self.segments.remove(&no)?;
        self.count(&info, false);
        Some(info)
    }

    fn count(&mut self, info: &SegmentInfo, is_added: bool) {
        if info.kind == Kind::Data {
            let change = |total: u64, by: u64| if is_added { total + by } else { total - by };
            self.capacity_blocks = change(self.capacity_blocks, info.capacity_blocks());
            self.dead_blocks = change(self.dead_blocks, info.dead_blocks());
        }
    }

    /// Share of the data segments that is dead, in 1/1000, as far as that was folded.
    pub fn dead_per_mille(&self) -> u64 {
        self.dead_blocks * 1000 / self.capacity_blocks.max(1)
    }

    pub fn get(&self, no: SegmentNo) -> Option<&SegmentInfo> {
        self.segments.get(&no)
    }

    pub fn rehome(&mut self, no: SegmentNo, homes: &[(u8, Leg)]) {
        if let Some(info) = self.segments.get_mut(&no) {
            for (index, leg) in homes {
                info.homes[usize::from(*index)] = *leg;
            }
            self.dirty.insert(no);
        }
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

    /// False where the segment is gone.
    pub fn add_hidden(&mut self, no: SegmentNo, count: u64) -> bool {
        self.change(no, |info| info.hidden += count)
    }

    pub fn sub_hidden(&mut self, no: SegmentNo, count: u64) {
        self.change(no, |info| {
            info.hidden = info.hidden.checked_sub(count).expect("what is not hidden any more was counted");
        });
    }

    pub fn set_kept(&mut self, no: SegmentNo, kept: bool) {
        self.change(no, |info| info.kept = kept);
    }

    pub fn any_kept(&self) -> bool {
        self.segments.values().any(|info| info.kept)
    }

    fn change(&mut self, no: SegmentNo, change: impl FnOnce(&mut SegmentInfo)) -> bool {
        let Some(info) = self.segments.get_mut(&no) else { return false };
        let before = info.dead_blocks();
        change(info);
        assert!(info.hidden <= info.live, "{no:?}: of {} blocks {} are hidden", info.live, info.hidden);
        if info.kind == Kind::Data {
            self.dead_blocks = self.dead_blocks + info.dead_blocks() - before;
        }
        true
    }

    pub fn iter(&self) -> impl Iterator<Item = (SegmentNo, &SegmentInfo)> {
        self.segments.iter().map(|(no, info)| (*no, info))
    }

    pub fn iter_from(&self, from: SegmentNo) -> impl Iterator<Item = (SegmentNo, &SegmentInfo)> {
        self.segments.range(from..).map(|(no, info)| (*no, info))
    }

    /// What changed since the last call: present segments and removed ones.
    pub fn take_dirty(&mut self) -> BTreeSet<SegmentNo> {
        std::mem::take(&mut self.dirty)
    }
}
