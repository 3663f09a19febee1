//! The segment table: shape, homes and live count of every segment of the volume.
//!
//! Invariant: `live` of a segment is the number of blocks (of leaf bytes, for metadata) by which base and overlay of the
//! map name it, counted apart; a segment at zero, once a durable checkpoint says so, may be freed.

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
}

impl SegmentInfo {
    pub fn capacity_blocks(&self) -> u64 {
        u64::from(self.geometry.payload_blocks)
    }

    /// Blocks of a data segment that nothing names any more, as far as that was folded.
    pub fn dead_blocks(&self) -> u64 {
        self.capacity_blocks().saturating_sub(self.live)
    }
}

#[derive(Debug, Default)]
pub struct SegmentTable {
    segments: BTreeMap<SegmentNo, SegmentInfo>,
    /// Changed since the last checkpoint run; absent from `segments` means removed.
    dirty: BTreeSet<SegmentNo>,
}

impl SegmentTable {
    pub fn insert(&mut self, no: SegmentNo, info: SegmentInfo) {
        self.segments.insert(no, info);
        self.dirty.insert(no);
    }

    pub fn remove(&mut self, no: SegmentNo) -> Option<SegmentInfo> {
        self.dirty.insert(no);
        self.segments.remove(&no)
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
        let info = self.segments.get_mut(&no).expect("a named segment is in the table");
        info.live += count;
        self.dirty.insert(no);
    }

    pub fn sub_live(&mut self, no: SegmentNo, count: u64) {
        let info = self.segments.get_mut(&no).expect("a named segment is in the table");
        info.live = info.live.checked_sub(count).expect("no segment has less than nothing live");
        self.dirty.insert(no);
    }

    pub fn iter(&self) -> impl Iterator<Item = (SegmentNo, &SegmentInfo)> {
        self.segments.iter().map(|(no, info)| (*no, info))
    }

    pub fn iter_from(&self, from: SegmentNo) -> impl Iterator<Item = (SegmentNo, &SegmentInfo)> {
        self.segments.range(from..).map(|(no, info)| (*no, info))
    }

    pub fn len(&self) -> usize {
        self.segments.len()
    }

    /// What changed since the last call: present segments and removed ones.
    pub fn take_dirty(&mut self) -> BTreeSet<SegmentNo> {
        std::mem::take(&mut self.dirty)
    }
}
