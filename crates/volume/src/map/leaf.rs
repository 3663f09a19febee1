//! Leaves: what the base of the map is made of, as they are encoded and kept in memory; and the places that they and
//! the overlay name.

use super::cut::Cuttable;
use super::rangemap::{Piece, Sliceable};
use holdfast_base::{BLOCK_BYTES, BlockCrc, Buf, Epoch, Key, Lsn, crc32c};
use holdfast_format::record::SegmentNo;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::RangeBounds;
use std::sync::Arc;

/// Blocks that one leaf covers: 2 MiB of a volume.
pub const LEAF_BLOCKS: u64 = 512;

/// Index of a leaf in key space.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct LeafNo(pub u64);

impl LeafNo {
    pub fn of(key: Key) -> LeafNo {
        LeafNo(key.0 / LEAF_BLOCKS)
    }

    pub fn first_key(self) -> u64 {
        self.0 * LEAF_BLOCKS
    }
}

/// Shared checksums of a run of blocks.
#[derive(Clone, Debug)]
pub struct Crcs {
    all: Arc<[BlockCrc]>,
    first: u32,
    len: u32,
}

impl Crcs {
    pub fn new(all: impl Into<Arc<[BlockCrc]>>) -> Crcs {
        let all = all.into();
        let len = all.len() as u32;
        Crcs { all, first: 0, len }
    }

    pub fn as_slice(&self) -> &[BlockCrc] {
        &self.all[self.first as usize..(self.first + self.len) as usize]
    }

    pub fn slice(&self, offset: u64, len: u64) -> Crcs {
        assert!(offset + len <= u64::from(self.len), "checksums {offset}+{len} of {}", self.len);
        Crcs { all: Arc::clone(&self.all), first: self.first + offset as u32, len: len as u32 }
    }
}

impl PartialEq for Crcs {
    fn eq(&self, other: &Crcs) -> bool {
        self.as_slice() == other.as_slice()
    }
}

impl Eq for Crcs {}

/// Where a run of blocks is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// Acknowledged, in the log and in memory, not yet in a segment.
    Log {
        lsn: Lsn,
        data: Buf,
        crcs: Crcs,
    },
    Segment {
        segment: SegmentNo,
        block: u32,
        crcs: Crcs,
    },
    /// Discarded or never written: reads as zeroes.
    Zero,
}

/// A run of the overlay with the LSN of its last change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapped {
    pub place: Place,
    pub stamp: Lsn,
}

impl Sliceable for Place {
    fn slice(&self, offset: u64, len: u64) -> Place {
        match self {
            Place::Log { lsn, data, crcs } => {
                let bytes = offset as usize * BLOCK_BYTES..(offset + len) as usize * BLOCK_BYTES;
                Place::Log { lsn: *lsn, data: data.slice(bytes), crcs: crcs.slice(offset, len) }
            }
            Place::Segment { segment, block, crcs } => {
                Place::Segment { segment: *segment, block: block + offset as u32, crcs: crcs.slice(offset, len) }
            }
            Place::Zero => Place::Zero,
        }
    }
}

impl Sliceable for Mapped {
    fn slice(&self, offset: u64, len: u64) -> Mapped {
        Mapped { place: self.place.slice(offset, len), stamp: self.stamp }
    }
}

pub type Overlay = Cuttable<Mapped>;

/// In a run of a leaf: these blocks read as zeroes, whatever the layer below says.
const ZEROES: SegmentNo = SegmentNo { epoch: Epoch(0), counter: 0 };

/// A run of a leaf; its checksums stand in [`Leaf::crcs`], in run order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeafRun {
    pub start: u16,
    pub len: u16,
    /// Where its checksums begin in [`Leaf::crcs`] (derived; not part of the encoded leaf).
    crc_at: u16,
    pub segment: SegmentNo,
    pub block: u32,
}

impl LeafRun {
    fn crc_count(&self) -> u16 {
        if self.segment == ZEROES { 0 } else { self.len }
    }

    fn end(&self) -> u64 {
        u64::from(self.start) + u64::from(self.len)
    }
}

/// The places of [`LEAF_BLOCKS`] blocks; what no run covers is a hole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leaf {
    pub runs: Vec<LeafRun>,
    pub crcs: Arc<[BlockCrc]>,
}

impl Default for Leaf {
    fn default() -> Leaf {
        Leaf { runs: Vec::new(), crcs: Arc::from([]) }
    }
}

const LEAF_RUN_BYTES: usize = 24;

/// What a run of data takes in an encoded leaf, with its checksums.
pub fn encoded_run_bytes(blocks: u64) -> u64 {
    LEAF_RUN_BYTES as u64 + blocks * size_of::<BlockCrc>() as u64
}

impl Leaf {
    /// `u16` run count, then per run `u16` start, `u16` length, `u64` epoch, `u64` counter, `u32` block; then
    /// checksums. All little-endian.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(2 + self.runs.len() * LEAF_RUN_BYTES + self.crcs.len() * 4);
        bytes.extend_from_slice(&(self.runs.len() as u16).to_le_bytes());
        for run in &self.runs {
            bytes.extend_from_slice(&run.start.to_le_bytes());
            bytes.extend_from_slice(&run.len.to_le_bytes());
            bytes.extend_from_slice(&run.segment.epoch.0.to_le_bytes());
            bytes.extend_from_slice(&run.segment.counter.to_le_bytes());
            bytes.extend_from_slice(&run.block.to_le_bytes());
        }
        for crc in self.crcs.iter() {
            bytes.extend_from_slice(&crc.to_le_bytes());
        }
        bytes
    }

    /// `None` if the bytes are no leaf (their checksum was checked before, so that is a format error).
    pub fn decode(bytes: &[u8]) -> Option<Leaf> {
        let count = usize::from(u16::from_le_bytes(bytes.get(..2)?.try_into().ok()?));
        let runs_bytes = bytes.get(2..2 + count * LEAF_RUN_BYTES)?;
        let mut runs = Vec::with_capacity(count);
        let mut blocks = 0_u16;
        for run in runs_bytes.chunks_exact(LEAF_RUN_BYTES) {
            let u16_at = |at: usize| u16::from_le_bytes([run[at], run[at + 1]]);
            let u64_at = |at: usize| u64::from_le_bytes(run[at..at + 8].try_into().expect("eight bytes"));
            let run = LeafRun {
                start: u16_at(0),
                len: u16_at(2),
                crc_at: blocks,
                segment: SegmentNo { epoch: Epoch(u64_at(4)), counter: u64_at(12) },
                block: u32::from_le_bytes(run[20..24].try_into().expect("four bytes")),
            };
            blocks = blocks.checked_add(run.crc_count())?;
            runs.push(run);
        }
        let crcs = bytes.get(2 + count * LEAF_RUN_BYTES..)?;
        if crcs.len() != usize::from(blocks) * 4 {
            return None;
        }
        let crcs = crcs.chunks_exact(4).map(|c| u32::from_le_bytes(c.try_into().expect("four bytes"))).collect();
        Some(Leaf { runs, crcs })
    }

    /// With its place in a cache.
    pub fn memory_bytes(&self) -> usize {
        CACHED_BYTES
            + std::mem::size_of::<Leaf>()
            + self.runs.len() * std::mem::size_of::<LeafRun>()
            + self.crcs.len() * 4
    }

    /// Segment places in `start..start + len` (block numbers in the leaf), in order; gaps are holes.
    pub fn lookup(&self, start: u64, len: u64) -> Vec<Piece<Place>> {
        let end = start + len;
        let mut pieces = Vec::new();
        let mut at = start;
        let first = self.runs.partition_point(|run| run.end() <= start);
        for run in self.runs[first..].iter().take_while(|run| u64::from(run.start) < end) {
            let (cut_start, cut_end) = (u64::from(run.start).max(start), run.end().min(end));
            if at < cut_start {
                pieces.push(Piece { start: at, len: cut_start - at, value: None });
            }
            let skip = (cut_start - u64::from(run.start)) as u32;
            let len = (cut_end - cut_start) as u32;
            let place = if run.segment == ZEROES {
                Place::Zero
            } else {
                let crcs = Crcs { all: Arc::clone(&self.crcs), first: u32::from(run.crc_at) + skip, len };
                Place::Segment { segment: run.segment, block: run.block + skip, crcs }
            };
            pieces.push(Piece { start: cut_start, len: u64::from(len), value: Some(place) });
            at = cut_end;
        }
        if at < end {
            pieces.push(Piece { start: at, len: end - at, value: None });
        }
        pieces
    }

    /// Blocks of each segment named here.
    pub fn blocks_by_segment(&self) -> BTreeMap<SegmentNo, u64> {
        let mut blocks = BTreeMap::new();
        for run in self.runs.iter().filter(|run| run.segment != ZEROES) {
            *blocks.entry(run.segment).or_insert(0) += u64::from(run.len);
        }
        blocks
    }

    /// This leaf with `changes` over it, which are in order (in-leaf block numbers; `None` leaves holes, and so do zero
    /// places unless `keeps_zeroes`: then they are said, since there is a layer below).
    pub fn merged(&self, changes: &[Piece<Place>], keeps_zeroes: bool) -> Leaf {
        let mut leaf = LeafBuilder::default();
        let (mut at, mut runs) = (0, self.runs.as_slice());
        for change in changes {
            self.copy(&mut runs, at, change.start, &mut leaf);
            at = change.start + change.len;
            match &change.value {
                Some(Place::Segment { segment, block, crcs }) => {
                    leaf.push(change.start, change.len, (*segment, *block), crcs.as_slice());
                }
                Some(Place::Log { .. }) => panic!("log data is not folded into a leaf"),
                Some(Place::Zero) if keeps_zeroes => {
                    leaf.push(change.start, change.len, (ZEROES, change.start as u32), &[]);
                }
                Some(Place::Zero) | None => {}
            }
        }
        self.copy(&mut runs, at, LEAF_BLOCKS, &mut leaf);
        Leaf { runs: leaf.runs, crcs: leaf.crcs.into() }
    }

    /// What `runs`, the rest of this leaf's, say of the blocks from `from` up to `to`; those that end there are taken
    /// off.
    fn copy(&self, runs: &mut &[LeafRun], from: u64, to: u64, into: &mut LeafBuilder) {
        while let Some((run, rest)) = runs.split_first() {
            let (start, end) = (u64::from(run.start).max(from), run.end().min(to));
            if start < end {
                let skip = (start - u64::from(run.start)) as u32;
                let crcs = match run.segment == ZEROES {
                    true => &[],
                    false => &self.crcs[(u32::from(run.crc_at) + skip) as usize..][..(end - start) as usize],
                };
                into.push(start, end - start, (run.segment, run.block + skip), crcs);
            }
            if run.end() > to {
                return;
            }
            *runs = rest;
        }
    }
}

/// A leaf that is put together from runs in order.
#[derive(Default)]
struct LeafBuilder {
    runs: Vec<LeafRun>,
    crcs: Vec<BlockCrc>,
}

impl LeafBuilder {
    fn push(&mut self, start: u64, len: u64, (segment, block): (SegmentNo, u32), crcs: &[BlockCrc]) {
        match self.runs.last_mut() {
            Some(last)
                if last.end() == start && last.segment == segment && last.block + u32::from(last.len) == block =>
            {
                last.len += len as u16;
            }
            _ => self.runs.push(LeafRun {
                start: start as u16,
                len: len as u16,
                crc_at: self.crcs.len() as u16,
                segment,
                block,
            }),
        }
        self.crcs.extend_from_slice(crcs);
    }
}

/// Where a leaf's bytes are: in a metadata segment's payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct LeafPointer {
    pub segment: SegmentNo,
    pub offset_bytes: u32,
    pub len_bytes: u32,
    pub crc: u32,
}

impl LeafPointer {
    pub fn matches(&self, bytes: &[u8]) -> bool {
        bytes.len() == self.len_bytes as usize && crc32c(bytes) == self.crc
    }
}

/// Leaves in memory, within a budget; the least recently used go first (second chance).
pub struct LeafCache {
    leaves: BTreeMap<LeafNo, Cached>,
    queue: VecDeque<LeafNo>,
    bytes: usize,
    bytes_max: usize,
}

/// What a leaf in a cache takes beside its runs and checksums: counts of those who share it, its places in map and
/// queue.
const CACHED_BYTES: usize = 100;

/// Places in the queue of leaves that are gone, beyond as many as there are others.
const QUEUE_SPARE: usize = 64;

struct Cached {
    leaf: Arc<Leaf>,
    used: bool,
}

impl LeafCache {
    pub fn new(bytes_max: u64) -> LeafCache {
        LeafCache { leaves: BTreeMap::new(), queue: VecDeque::new(), bytes: 0, bytes_max: bytes_max as usize }
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Which of these are here.
    pub fn cached(&self, range: impl RangeBounds<LeafNo>) -> Vec<LeafNo> {
        self.leaves.range(range).map(|(no, _)| *no).collect()
    }

    /// From the next leaf on.
    pub fn limit(&mut self, bytes_max: usize) {
        self.bytes_max = bytes_max;
    }

    pub fn get(&mut self, no: LeafNo) -> Option<Arc<Leaf>> {
        let cached = self.leaves.get_mut(&no)?;
        cached.used = true;
        Some(Arc::clone(&cached.leaf))
    }

    /// Without keeping it for longer.
    pub fn peek(&self, no: LeafNo) -> Option<Arc<Leaf>> {
        self.leaves.get(&no).map(|cached| Arc::clone(&cached.leaf))
    }

    /// What is here is replaced; what is not comes in where there is room. For whoever walks through all leaves, and
    /// would push out those that are used.
    pub fn insert_beside(&mut self, no: LeafNo, leaf: Arc<Leaf>) {
        if self.leaves.contains_key(&no) || self.bytes + leaf.memory_bytes() <= self.bytes_max {
            self.insert(no, leaf);
        }
    }

    pub fn insert(&mut self, no: LeafNo, leaf: Arc<Leaf>) {
        self.bytes += leaf.memory_bytes();
        if let Some(old) = self.leaves.insert(no, Cached { leaf, used: false }) {
            self.bytes -= old.leaf.memory_bytes();
        } else {
            self.queue.push_back(no);
        }
        while self.bytes > self.bytes_max && self.leaves.len() > 1 {
            let Some(oldest) = self.queue.pop_front() else { break };
            match self.leaves.get_mut(&oldest) {
                Some(cached) if cached.used && oldest != no => {
                    cached.used = false;
                    self.queue.push_back(oldest);
                }
                Some(_) if oldest == no => self.queue.push_back(oldest),
                Some(_) => self.forget(oldest),
                None => {}
            }
        }
    }

    /// Drops a leaf that is there no more.
    pub fn remove(&mut self, no: LeafNo) {
        self.forget(no);
        // Its place in the queue stays, until most places are such.
        if self.queue.len() > 2 * self.leaves.len() + QUEUE_SPARE {
            let mut seen = BTreeSet::new();
            self.queue.retain(|no| self.leaves.contains_key(no) && seen.insert(*no));
        }
    }

    pub(super) fn verify(&self) {
        let bytes: usize = self.leaves.values().map(|cached| cached.leaf.memory_bytes()).sum();
        assert_eq!(self.bytes, bytes, "what leaves take is counted");
        assert!(self.queue.len() >= self.leaves.len(), "each leaf has a place in the queue");
    }

    fn forget(&mut self, no: LeafNo) {
        if let Some(cached) = self.leaves.remove(&no) {
            self.bytes -= cached.leaf.memory_bytes();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_base::Epoch;
    use proptest::prelude::*;

    fn no(counter: u64) -> SegmentNo {
        SegmentNo { epoch: Epoch(1), counter }
    }

    fn place(counter: u64, block: u32, len: u64) -> Place {
        let crcs: Vec<u32> = (0..len as u32).map(|i| block + i + 1000 * counter as u32).collect();
        Place::Segment { segment: no(counter), block, crcs: Crcs::new(crcs) }
    }

    proptest! {
        #[test]
        fn leaves_merge_like_arrays_and_read_back(
            changes in proptest::collection::vec((0u64..500, 1u64..12, 0u64..4, any::<bool>()), 0..40),
        ) {
            let mut leaf = Leaf::default();
            let mut naive: Vec<Option<(u64, u32)>> = vec![None; LEAF_BLOCKS as usize];
            for (start, len, counter, zero) in changes {
                let value = if zero { Place::Zero } else { place(counter, start as u32, len) };
                leaf = leaf.merged(&[Piece { start, len, value: Some(value) }], false);
                for block in start..start + len {
                    naive[block as usize] = (!zero).then_some((counter, block as u32));
                }
            }
            let leaf = Leaf::decode(&leaf.encode()).expect("reads back");
            let mut at = 0;
            for piece in leaf.lookup(0, LEAF_BLOCKS) {
                for i in 0..piece.len {
                    let seen = piece.value.as_ref().map(|v| v.slice(i, 1));
                    let want = naive[(at + i) as usize].map(|(counter, block)| place(counter, block, 1));
                    prop_assert_eq!(seen, want);
                }
                at += piece.len;
            }
            prop_assert_eq!(at, LEAF_BLOCKS);
            let counted: u64 = leaf.blocks_by_segment().values().sum();
            prop_assert_eq!(counted, naive.iter().flatten().count() as u64);
        }
    }

    #[test]
    fn the_cache_stays_in_its_budget_and_keeps_what_is_used() {
        let leaf = Arc::new(Leaf { runs: vec![], crcs: vec![0; 100].into() });
        let mut cache = LeafCache::new(leaf.memory_bytes() as u64 * 3);
        for i in 0..10 {
            cache.insert(LeafNo(i), Arc::clone(&leaf));
            cache.get(LeafNo(0));
        }
        assert!(cache.bytes <= leaf.memory_bytes() * 3);
        assert!(cache.get(LeafNo(0)).is_some());
        assert!(cache.get(LeafNo(1)).is_none());
        assert!(cache.get(LeafNo(9)).is_some());
    }
}
