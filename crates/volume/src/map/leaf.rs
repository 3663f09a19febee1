//! Leaves: what the base of the map is made of, as they are encoded and kept in memory; and the places that they and
//! the overlay name.

use super::cut::Cuttable;
use super::rangemap::{Piece, Sliceable};
use crate::segment::Named;
use holdfast_base::{BLOCK_BYTES, BlockCrc, Buf, Epoch, Key, Lsn, crc32c};
use holdfast_format::packing::{StoredLength, StoredLengths};
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
        stored: Stored,
        crcs: Crcs,
    },
    /// Discarded or never written: reads as zeroes.
    Zero,
}

/// Where blocks lie in the payload of their segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stored {
    /// One behind the other, from this block on.
    Plain { block: u32 },
    /// As units, of which the first starts at this granule.
    Packed { granule: u32, lengths: StoredLengths },
}

impl Stored {
    pub(crate) fn slice(&self, offset: u64, len: u64) -> Stored {
        match self {
            Stored::Plain { block } => Stored::Plain { block: block + offset as u32 },
            Stored::Packed { granule, lengths } => {
                Stored::Packed { granule: lengths.start_of(offset, *granule), lengths: lengths.slice(offset, len) }
            }
        }
    }

    /// What the first so many blocks take of their segment.
    pub(crate) fn named(&self, blocks: u64) -> Named {
        self.named_behind(0, blocks)
    }

    /// The same of those that follow the first `before`.
    pub(crate) fn named_behind(&self, before: u64, blocks: u64) -> Named {
        match self {
            Stored::Plain { .. } => Named::of_blocks(blocks),
            Stored::Packed { lengths, .. } => Named::of_units(&lengths.slice(before, blocks)),
        }
    }

    /// Behind the last unit, in granules; of blocks that are not packed nothing.
    pub(crate) fn end(&self) -> u32 {
        match self {
            Stored::Plain { .. } => 0,
            Stored::Packed { granule, lengths } => lengths.end_from(*granule),
        }
    }

    fn start(&self) -> Start {
        match self {
            Stored::Plain { block } => Start::Block(*block),
            Stored::Packed { granule, .. } => Start::Granule(*granule),
        }
    }
}

impl Place {
    /// Blocks that are not packed, from this one of the segment's payload on.
    pub(crate) fn plain(segment: SegmentNo, block: u32, crcs: Crcs) -> Place {
        Place::Segment { segment, stored: Stored::Plain { block }, crcs }
    }
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
            Place::Segment { segment, stored, crcs } => {
                let (stored, crcs) = (stored.slice(offset, len), crcs.slice(offset, len));
                Place::Segment { segment: *segment, stored, crcs }
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

/// Where the first block of a run of a leaf lies in the payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Start {
    Block(u32),
    /// The run is packed.
    Granule(u32),
}

/// In the last field of an encoded run: it is packed, and the other bits are a granule.
const PACKED: u32 = 1 << 31;

impl Start {
    fn encode(self) -> u32 {
        match self {
            Start::Block(block) => block,
            Start::Granule(granule) => granule | PACKED,
        }
    }

    fn decode(field: u32) -> Start {
        match field & PACKED {
            0 => Start::Block(field),
            _ => Start::Granule(field & !PACKED),
        }
    }
}

/// A run of a leaf; its checksums stand in [`Leaf::crcs`], in run order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeafRun {
    pub start: u16,
    pub len: u16,
    /// Where its checksums begin in [`Leaf::crcs`] (derived; not part of the encoded leaf).
    crc_at: u16,
    /// The same of the stored lengths of a packed one, in [`Leaf::lengths`].
    length_at: u16,
    pub segment: SegmentNo,
    at: Start,
}

impl LeafRun {
    fn crc_count(&self) -> u16 {
        if self.segment == ZEROES { 0 } else { self.len }
    }

    fn length_count(&self) -> u16 {
        if self.is_packed() { self.len } else { 0 }
    }

    fn is_packed(&self) -> bool {
        matches!(self.at, Start::Granule(_))
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
    /// Of the blocks of packed runs, in run order.
    pub lengths: StoredLengths,
}

impl Default for Leaf {
    fn default() -> Leaf {
        Leaf { runs: Vec::new(), crcs: Arc::from([]), lengths: StoredLengths::default() }
    }
}

const LEAF_RUN_BYTES: usize = 24;

/// In the count that a leaf begins with: bits of its version. It is 0 where no run is packed, and 1 where any may be.
const VERSION_BITS: u32 = 4;
const COUNT_BITS: u32 = u16::BITS - VERSION_BITS;

/// What a run of data takes in an encoded leaf, with its checksums and lengths.
pub(super) fn encoded_run_bytes(blocks: u64, stored: &Stored) -> u64 {
    let lengths = match stored {
        Stored::Plain { .. } => 0,
        Stored::Packed { lengths, .. } => lengths.len(),
    };
    LEAF_RUN_BYTES as u64 + blocks * size_of::<BlockCrc>() as u64 + lengths
}

fn crcs_of(bytes: &[u8]) -> impl Iterator<Item = BlockCrc> {
    bytes.chunks_exact(4).map(|crc| u32::from_le_bytes(crc.try_into().expect("four bytes")))
}

impl Leaf {
    /// `u16` run count and version, then per run `u16` start, `u16` length, `u64` epoch, `u64` counter, `u32` block, or
    /// granule and a bit; then per run checksums, and stored lengths if it is packed. All little-endian.
    pub fn encode(&self) -> Vec<u8> {
        let checks = self.crcs.len() * 4 + self.lengths.len() as usize;
        let mut bytes = Vec::with_capacity(2 + self.runs.len() * LEAF_RUN_BYTES + checks);
        let version = u16::from(self.runs.iter().any(LeafRun::is_packed));
        bytes.extend_from_slice(&(self.runs.len() as u16 | version << COUNT_BITS).to_le_bytes());
        for run in &self.runs {
            bytes.extend_from_slice(&run.start.to_le_bytes());
            bytes.extend_from_slice(&run.len.to_le_bytes());
            bytes.extend_from_slice(&run.segment.epoch.0.to_le_bytes());
            bytes.extend_from_slice(&run.segment.counter.to_le_bytes());
            bytes.extend_from_slice(&run.at.encode().to_le_bytes());
        }
        for run in &self.runs {
            for crc in &self.crcs[usize::from(run.crc_at)..][..usize::from(run.crc_count())] {
                bytes.extend_from_slice(&crc.to_le_bytes());
            }
            let lengths = &self.lengths.as_bytes()[usize::from(run.length_at)..];
            bytes.extend_from_slice(&lengths[..usize::from(run.length_count())]);
        }
        bytes
    }

    /// `None` if the bytes are no leaf (their checksum was checked before, so that is a format error).
    pub fn decode(bytes: &[u8]) -> Option<Leaf> {
        let head = u16::from_le_bytes(bytes.get(..2)?.try_into().ok()?);
        let (count, version) = (usize::from(head) & ((1 << COUNT_BITS) - 1), head >> COUNT_BITS);
        let runs_bytes = bytes.get(2..2 + count * LEAF_RUN_BYTES)?;
        let mut runs = Vec::with_capacity(count);
        let (mut blocks, mut units) = (0_u16, 0_u16);
        for run in runs_bytes.chunks_exact(LEAF_RUN_BYTES) {
            let u16_at = |at: usize| u16::from_le_bytes([run[at], run[at + 1]]);
            let u64_at = |at: usize| u64::from_le_bytes(run[at..at + 8].try_into().expect("eight bytes"));
            let run = LeafRun {
                start: u16_at(0),
                len: u16_at(2),
                crc_at: blocks,
                length_at: units,
                segment: SegmentNo { epoch: Epoch(u64_at(4)), counter: u64_at(12) },
                at: Start::decode(u32::from_le_bytes(run[20..24].try_into().expect("four bytes"))),
            };
            blocks = blocks.checked_add(run.crc_count())?;
            units = units.checked_add(run.length_count())?;
            runs.push(run);
        }
        let checks = bytes.get(2 + count * LEAF_RUN_BYTES..)?;
        match (version, units) {
            (0, 0) if checks.len() == usize::from(blocks) * 4 => {
                Some(Leaf { runs, crcs: crcs_of(checks).collect(), lengths: StoredLengths::default() })
            }
            (1, _) => Leaf::decode_packed(runs, checks),
            _ => None,
        }
    }

    fn decode_packed(runs: Vec<LeafRun>, mut checks: &[u8]) -> Option<Leaf> {
        let (mut crcs, mut lengths) = (Vec::new(), Vec::new());
        for run in &runs {
            let (own, rest) = checks.split_at_checked(usize::from(run.crc_count()) * 4)?;
            crcs.extend(crcs_of(own));
            let (own, rest) = rest.split_at_checked(usize::from(run.length_count()))?;
            lengths.extend_from_slice(own);
            checks = rest;
        }
        let leaf = Leaf { runs, crcs: crcs.into(), lengths: StoredLengths::try_from(lengths).ok()? };
        let is_valid = |run: &LeafRun| match leaf.stored(run) {
            Stored::Plain { .. } => true,
            Stored::Packed { granule, lengths } => run.segment != ZEROES && lengths.fit_from(granule),
        };
        (checks.is_empty() && leaf.runs.iter().all(is_valid)).then_some(leaf)
    }

    /// Where a run's blocks are.
    fn stored(&self, run: &LeafRun) -> Stored {
        match run.at {
            Start::Block(block) => Stored::Plain { block },
            Start::Granule(granule) => {
                Stored::Packed { granule, lengths: self.lengths.slice(u64::from(run.length_at), u64::from(run.len)) }
            }
        }
    }

    /// With its place in a cache.
    pub fn memory_bytes(&self) -> usize {
        CACHED_BYTES
            + std::mem::size_of::<Leaf>()
            + self.runs.len() * std::mem::size_of::<LeafRun>()
            + self.crcs.len() * 4
            + self.lengths.len() as usize
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
                let stored = self.stored(run).slice(u64::from(skip), u64::from(len));
                Place::Segment { segment: run.segment, stored, crcs }
            };
            pieces.push(Piece { start: cut_start, len: u64::from(len), value: Some(place) });
            at = cut_end;
        }
        if at < end {
            pieces.push(Piece { start: at, len: end - at, value: None });
        }
        pieces
    }

    /// What is named here of segments, run by run.
    pub(crate) fn named(&self) -> impl Iterator<Item = (SegmentNo, Named)> {
        let runs = self.runs.iter().filter(|run| run.segment != ZEROES);
        runs.map(|run| (run.segment, self.stored(run).named(u64::from(run.len))))
    }

    /// The same of each segment.
    pub(crate) fn named_by_segment(&self) -> BTreeMap<SegmentNo, Named> {
        let mut sums: BTreeMap<SegmentNo, Named> = BTreeMap::new();
        self.named().for_each(|(segment, named)| *sums.entry(segment).or_default() += named);
        sums
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
                Some(Place::Segment { segment, stored, crcs }) => {
                    leaf.push(change.start, change.len, *segment, stored, crcs.as_slice());
                }
                Some(Place::Log { .. }) => panic!("log data is not folded into a leaf"),
                Some(Place::Zero) if keeps_zeroes => {
                    let stored = Stored::Plain { block: change.start as u32 };
                    leaf.push(change.start, change.len, ZEROES, &stored, &[]);
                }
                Some(Place::Zero) | None => {}
            }
        }
        self.copy(&mut runs, at, LEAF_BLOCKS, &mut leaf);
        Leaf { runs: leaf.runs, crcs: leaf.crcs.into(), lengths: StoredLengths::new(leaf.lengths) }
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
                let stored = self.stored(run).slice(u64::from(skip), end - start);
                into.push(start, end - start, run.segment, &stored, crcs);
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
    lengths: Vec<StoredLength>,
    /// Where the last unit ends, if the last run is packed.
    unit_end: u32,
}

impl LeafBuilder {
    fn push(&mut self, start: u64, len: u64, segment: SegmentNo, stored: &Stored, crcs: &[BlockCrc]) {
        match self.runs.last_mut() {
            Some(last) if last.end() == start && last.segment == segment && follows(last, self.unit_end, stored) => {
                last.len += len as u16;
            }
            _ => self.runs.push(LeafRun {
                start: start as u16,
                len: len as u16,
                crc_at: self.crcs.len() as u16,
                length_at: self.lengths.len() as u16,
                segment,
                at: stored.start(),
            }),
        }
        self.crcs.extend_from_slice(crcs);
        if let Stored::Packed { granule, lengths } = stored {
            self.lengths.extend(lengths.iter());
            self.unit_end = lengths.end_from(*granule);
        }
    }
}

/// Whether blocks lie behind those of a run, whose last unit ends there if it is packed.
fn follows(run: &LeafRun, unit_end: u32, stored: &Stored) -> bool {
    match (run.at, stored) {
        (Start::Block(first), Stored::Plain { block }) => first + u32::from(run.len) == *block,
        (Start::Granule(_), Stored::Packed { granule, lengths }) => {
            lengths.units_after(unit_end).next().is_some_and(|unit| unit.start == *granule)
        }
        _ => false,
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
    use holdfast_format::packing::Codec;
    use proptest::prelude::*;

    fn no(counter: u64) -> SegmentNo {
        SegmentNo { epoch: Epoch(1), counter }
    }

    fn place(counter: u64, block: u32, len: u64) -> Place {
        let crcs: Vec<u32> = (0..len as u32).map(|i| block + i + 1000 * counter as u32).collect();
        Place::plain(no(counter), block, Crcs::new(crcs))
    }

    /// Block `block` is a unit in the packed segment of that number; so is what follows it, if the lengths are asked for
    /// in one go. How long a unit is follows from its number.
    fn length_of(block: u64) -> StoredLength {
        match block % 7 {
            0 => StoredLength::RAW,
            n => StoredLength::compressed(
                if n % 2 == 0 { Codec::Lz4 } else { Codec::Zstd },
                (block * 11 % 64) as u32 + 1,
            ),
        }
    }

    fn packed(counter: u64, block: u64, len: u64) -> Place {
        let all = StoredLengths::new((0..LEAF_BLOCKS).map(length_of));
        let (granule, lengths) = (all.start_of(block, 0), all.slice(block, len));
        let crcs: Vec<u32> = (0..len as u32).map(|i| block as u32 + i + 1000 * counter as u32).collect();
        Place::Segment { segment: no(counter), stored: Stored::Packed { granule, lengths }, crcs: Crcs::new(crcs) }
    }

    /// Of each kind one: plain, packed and zero.
    fn mixed() -> Leaf {
        let said = |start, len, value| Piece { start, len, value: Some(value) };
        Leaf::default().merged(
            &[
                said(3, 2, place(1, 3, 2)),
                said(5, 3, packed(9, 6, 3)),
                said(10, 4, Place::Zero),
                said(20, 1, packed(9, 1, 1)),
            ],
            true,
        )
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|b| format!("{b:02x}")).collect()
    }

    #[test]
    fn leaves_keep_their_bytes() {
        let said = [Piece { start: 3, len: 2, value: Some(place(1, 3, 2)) }];
        let plain = Leaf::default().merged(&said, false);
        let segment_1 = "01000000000000000100000000000000";
        let segment_9 = "01000000000000000900000000000000";
        let golden_plain = format!("010003000200{segment_1}03000000eb030000ec030000");
        let golden_mixed = [
            "0410",
            &format!("03000200{segment_1}03000000"),
            &format!("05000300{segment_9}ea000080"),
            &format!("0a000400{}0a000000", "00".repeat(16)),
            &format!("14000100{segment_9}40000080"),
            // Checksums of each run, and lengths behind those of a packed one.
            "eb030000ec030000",
            "2e2300002f23000030230000423f98",
            "292300008b",
        ]
        .concat();
        for (golden, leaf) in [(golden_plain, plain), (golden_mixed, mixed())] {
            assert_eq!(hex(&leaf.encode()), golden);
            assert_eq!(Leaf::decode(&leaf.encode()), Some(leaf));
        }
    }

    #[test]
    fn bytes_that_are_no_leaf_are_told_apart() {
        let bytes = mixed().encode();
        assert_eq!(Leaf::decode(&bytes), Some(mixed()));
        assert!((0..bytes.len()).all(|len| Leaf::decode(&bytes[..len]).is_none()), "one that is cut off is none");
        let with = |at: usize, byte: u8| {
            let mut bytes = bytes.clone();
            bytes[at] = byte;
            Leaf::decode(&bytes)
        };
        assert!(with(1, 0x00).is_none() && with(1, 0x20).is_none(), "packed runs are there from version 1 on");
        let lengths_at = bytes.len() - 1;
        assert!(with(lengths_at, 0xff).is_none() && with(lengths_at, 62).is_none());
        let mut misplaced = bytes.clone();
        misplaced[2 + 3 * 24 + 20..][..2].copy_from_slice(&1020_u16.to_le_bytes());
        assert!(Leaf::decode(&misplaced).is_none(), "units lie where the rule has them");
        // Whatever is damaged is a leaf, or none.
        for bit in 0..bytes.len() * 8 {
            let mut bytes = bytes.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            Leaf::decode(&bytes);
        }
    }

    proptest! {
        #[test]
        fn leaves_merge_like_arrays_and_read_back(
            changes in proptest::collection::vec((0u64..500, 1u64..12, 0u64..8, any::<bool>()), 0..40),
        ) {
            // Segments from number 4 on are packed.
            let place = |counter: u64, block: u32, len: u64| match counter {
                0..4 => place(counter, block, len),
                _ => packed(counter, u64::from(block), len),
            };
            let mut leaf = Leaf::default();
            let mut naive: Vec<Option<(u64, u32)>> = vec![None; LEAF_BLOCKS as usize];
            for (start, len, counter, zero) in changes {
                let value = if zero { Place::Zero } else { place(counter, start as u32, len) };
                leaf = leaf.merged(&[Piece { start, len, value: Some(value) }], false);
                for block in start..start + len {
                    naive[block as usize] = (!zero).then_some((counter, block as u32));
                }
            }
            let decoded = Leaf::decode(&leaf.encode()).expect("reads back");
            prop_assert_eq!(&decoded, &leaf);
            let leaf = decoded;
            // Neighbours of one segment are one run.
            let is_one = |pair: &[Option<(u64, u32)>]| pair[0].map(|(counter, _)| counter) == pair[1].map(|(counter, _)| counter);
            let runs = naive[0].iter().count() + naive.windows(2).filter(|pair| pair[1].is_some() && !is_one(pair)).count();
            prop_assert_eq!(leaf.runs.len(), runs);
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
            let mut counted: BTreeMap<SegmentNo, Named> = BTreeMap::new();
            for (counter, block) in naive.iter().flatten() {
                *counted.entry(no(*counter)).or_default() += match counter {
                    0..4 => Named::of_blocks(1),
                    _ => Named { size: u64::from(length_of(u64::from(*block)).granules()), blocks: 1 },
                };
            }
            prop_assert_eq!(leaf.named_by_segment(), counted);
        }
    }

    #[test]
    fn the_cache_stays_in_its_budget_and_keeps_what_is_used() {
        let leaf = Arc::new(Leaf { crcs: vec![0; 100].into(), ..Leaf::default() });
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
