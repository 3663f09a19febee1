//! A storage device's own structures: superblock, unit table, journal batches and their records, slots.
//!
//! Everything is little-endian, at multiples of 4 KiB unless said otherwise, and carries a CRC32C. Journal checksums are
//! seeded with where and when they were written (device, unit, generation, ledger, LSN), so that stale or misdirected
//! bytes never pass for current ones (protocol rule 11). docs/FORMAT-disk.md draws each structure.

use crate::FormatError;
use holdfast_base::{
    BLOCK_BYTES, DeviceId, Epoch, GridId, MediaClass, NodeId, SegmentId, ShardId, VolumeId, seeded_crc32c,
};

mod journal;

pub use journal::{
    BATCH_HEADER_BYTES, BatchHeader, BatchPlace, EntryRecord, JournalRecord, LedgerRecord, PromiseRecord, RecordPlace,
    blocks_match,
};

/// Version of all structures of this file.
pub const DISK_VERSION: u16 = 2;

/// Writes fields one after the other. The room is known before: running over it is a bug.
struct Out<'a> {
    bytes: &'a mut [u8],
    at: usize,
}

impl<'a> Out<'a> {
    fn new(bytes: &'a mut [u8]) -> Out<'a> {
        Out { bytes, at: 0 }
    }

    fn put(&mut self, field: &[u8]) -> &mut Self {
        self.bytes[self.at..self.at + field.len()].copy_from_slice(field);
        self.at += field.len();
        self
    }

    fn u16(&mut self, v: u16) -> &mut Self {
        self.put(&v.to_le_bytes())
    }

    fn u32(&mut self, v: u32) -> &mut Self {
        self.put(&v.to_le_bytes())
    }

    fn u64(&mut self, v: u64) -> &mut Self {
        self.put(&v.to_le_bytes())
    }

    fn u128(&mut self, v: u128) -> &mut Self {
        self.put(&v.to_le_bytes())
    }

    /// Zeroes up to the end, except for the last four bytes, which take the checksum of all before them.
    fn seal(self, seed: &[u64]) {
        let end = self.bytes.len() - 4;
        self.bytes[self.at..end].fill(0);
        let crc = seeded_crc32c(seed, &self.bytes[..end]);
        self.bytes[end..].copy_from_slice(&crc.to_le_bytes());
    }
}

/// Reads fields one after the other, out of bytes whose length was checked.
struct In<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> In<'a> {
    fn new(bytes: &'a [u8]) -> In<'a> {
        In { bytes, at: 0 }
    }

    fn take(&mut self, count: usize) -> &'a [u8] {
        let field = &self.bytes[self.at..self.at + count];
        self.at += count;
        field
    }

    fn u8(&mut self) -> u8 {
        self.take(1)[0]
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.take(2).try_into().expect("two bytes"))
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take(4).try_into().expect("four bytes"))
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take(8).try_into().expect("eight bytes"))
    }

    fn u128(&mut self) -> u128 {
        u128::from_le_bytes(self.take(16).try_into().expect("sixteen bytes"))
    }
}

/// Whether the last four bytes are the seeded checksum of the others.
fn is_sealed(seed: &[u64], bytes: &[u8]) -> bool {
    let (body, crc) = bytes.split_at(bytes.len() - 4);
    crc == seeded_crc32c(seed, body).to_le_bytes()
}

fn device_words(device: DeviceId) -> [u64; 2] {
    [device.0 as u64, (device.0 >> 64) as u64]
}

pub const SUPERBLOCK_BYTES: usize = BLOCK_BYTES;

const SUPERBLOCK_MAGIC: [u8; 4] = *b"HFSB";

/// Where things lie on a device. Fixed when it is formatted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Areas {
    /// First copy of the unit table; the second follows it.
    pub unit_table_offset: u64,
    /// Length of one copy.
    pub unit_table_bytes: u32,
    pub unit_bytes: u32,
    pub journal_offset: u64,
    pub unit_count: u32,
    pub slot_count: u32,
    pub slot_table_offset: u64,
    pub data_offset: u64,
    pub data_blocks: u64,
}

impl Areas {
    pub fn journal_bytes(&self) -> u64 {
        u64::from(self.unit_bytes) * u64::from(self.unit_count)
    }

    pub fn slot_table_bytes(&self) -> u64 {
        u64::from(self.slot_count) * SLOT_BYTES as u64
    }

    /// The areas follow each other in this order, in whole blocks, and leave the last block to the second superblock.
    fn is_valid(&self, size_bytes: u64) -> bool {
        let block = BLOCK_BYTES as u64;
        let aligned = [
            self.unit_table_offset,
            u64::from(self.unit_table_bytes),
            u64::from(self.unit_bytes),
            self.journal_offset,
            self.slot_table_offset,
            self.slot_table_bytes(),
            self.data_offset,
            size_bytes,
        ];
        let follows = |a: u64, len: u64, b: u64| a.checked_add(len).is_some_and(|end| end <= b);
        aligned.iter().all(|v| v % block == 0)
            && self.unit_count >= 1
            && self.unit_bytes >= 2 * BLOCK_BYTES as u32
            && self.unit_table_bytes as usize >= UnitTable::encoded_bytes(self.unit_count)
            && self.unit_table_offset >= block
            && follows(self.unit_table_offset, 2 * u64::from(self.unit_table_bytes), self.journal_offset)
            && follows(self.journal_offset, self.journal_bytes(), self.slot_table_offset)
            && follows(self.slot_table_offset, self.slot_table_bytes(), self.data_offset)
            && self.data_blocks.checked_mul(block).is_some_and(|len| follows(self.data_offset, len, size_bytes - block))
    }
}

/// Makes a device ours. Two copies: in the first block, and in the last whole one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Superblock {
    pub grid: GridId,
    pub node: NodeId,
    pub device: DeviceId,
    /// Raised by every change; the copy with the larger one counts.
    pub sequence: u64,
    /// Bytes that are ours: the device's size when it was formatted, in whole blocks.
    pub size_bytes: u64,
    /// What one durable write of a block took when the device was formatted; zero where nobody measured.
    pub flush_us: u32,
    /// What the operator says that the device is made of; where nobody did, what its node finds counts.
    pub media: Option<MediaClass>,
    pub areas: Areas,
}

/// Zero is none: in superblocks from before there were classes it always was zero.
fn media_code(media: Option<MediaClass>) -> u16 {
    media.map_or(0, |class| match class {
        MediaClass::Hdd => 1,
        MediaClass::Ssd => 2,
        MediaClass::Nvme => 3,
    })
}

impl Superblock {
    /// Offset of the second copy on a device of this size.
    pub fn second_offset(size_bytes: u64) -> u64 {
        size_bytes / BLOCK_BYTES as u64 * BLOCK_BYTES as u64 - SUPERBLOCK_BYTES as u64
    }

    pub fn encode(&self) -> Vec<u8> {
        assert!(self.areas.is_valid(self.size_bytes), "areas that don't add up: {:?}", self.areas);
        let mut bytes = vec![0; SUPERBLOCK_BYTES];
        let a = &self.areas;
        let mut out = Out::new(&mut bytes);
        out.put(&SUPERBLOCK_MAGIC).u16(DISK_VERSION).u16(media_code(self.media));
        out.u128(self.grid.0).u128(self.device.0).u32(self.node.0).u32(self.flush_us);
        out.u64(self.sequence).u64(self.size_bytes);
        out.u64(a.unit_table_offset).u32(a.unit_table_bytes).u32(a.unit_bytes).u64(a.journal_offset);
        out.u32(a.unit_count).u32(a.slot_count).u64(a.slot_table_offset).u64(a.data_offset).u64(a.data_blocks);
        out.seal(&[]);
        bytes
    }

    pub fn decode(bytes: &[u8]) -> Result<Superblock, FormatError> {
        let bytes = bytes.get(..SUPERBLOCK_BYTES).ok_or(FormatError::Truncated)?;
        let mut input = In::new(bytes);
        if input.take(4) != SUPERBLOCK_MAGIC {
            return Err(FormatError::Magic);
        }
        let version = input.u16();
        if !is_sealed(&[], bytes) {
            return Err(FormatError::Checksum);
        }
        if version != DISK_VERSION {
            return Err(FormatError::Version(version));
        }
        let code = input.u16();
        let media = MediaClass::ALL.into_iter().find(|class| media_code(Some(*class)) == code);
        let (grid, device, node) = (GridId(input.u128()), DeviceId(input.u128()), NodeId(input.u32()));
        let flush_us = input.u32();
        let (sequence, size_bytes) = (input.u64(), input.u64());
        let areas = Areas {
            unit_table_offset: input.u64(),
            unit_table_bytes: input.u32(),
            unit_bytes: input.u32(),
            journal_offset: input.u64(),
            unit_count: input.u32(),
            slot_count: input.u32(),
            slot_table_offset: input.u64(),
            data_offset: input.u64(),
            data_blocks: input.u64(),
        };
        if size_bytes < BLOCK_BYTES as u64 || !areas.is_valid(size_bytes) {
            return Err(FormatError::Field("areas"));
        }
        Ok(Superblock { grid, node, device, sequence, size_bytes, flush_us, media, areas })
    }
}

const UNIT_TABLE_MAGIC: [u8; 4] = *b"HFUT";
const UNIT_TABLE_HEADER_BYTES: usize = 40;
const UNIT_ENTRY_BYTES: usize = 40;

/// One unit of the journal, as the unit table lists it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct UnitEntry {
    /// Which use of the unit this is, from a counter of the device; zero while the unit is not in use.
    pub generation: u64,
    /// Sequence number of the unit's first batch; zero while none is known.
    pub first_seq: u64,
    /// One past the last batch's; zero while the unit may still grow.
    pub end_seq: u64,
    /// Batches `void_base + i`, for each bit i set in `void_bits`, were found never to have become durable: they don't
    /// count, whatever is found of them later.
    pub void_base: u64,
    pub void_bits: u64,
}

impl UnitEntry {
    pub fn is_void(&self, seq: u64) -> bool {
        seq.checked_sub(self.void_base).is_some_and(|i| i < 64 && self.void_bits >> i & 1 == 1)
    }
}

/// The journal's table of contents, in two copies that are written one after the other.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct UnitTable {
    /// Raised by every write; both copies of one write carry the same.
    pub sequence: u64,
    /// No unit was ever used under this generation or a later one.
    pub next_generation: u64,
    /// No batch below this one will ever be written again.
    pub seq_floor: u64,
    /// By unit.
    pub units: Vec<UnitEntry>,
}

impl UnitTable {
    /// Whole blocks for the table of so many units.
    pub fn encoded_bytes(unit_count: u32) -> usize {
        (UNIT_TABLE_HEADER_BYTES + unit_count as usize * UNIT_ENTRY_BYTES + 4).next_multiple_of(BLOCK_BYTES)
    }

    /// Fills `bytes`, one copy's whole area.
    pub fn encode_into(&self, device: DeviceId, bytes: &mut [u8]) {
        assert!(bytes.len() >= UnitTable::encoded_bytes(self.units.len() as u32), "the table's area is too small");
        let mut out = Out::new(bytes);
        out.put(&UNIT_TABLE_MAGIC).u16(DISK_VERSION).u16(0).u32(self.units.len() as u32).u32(0);
        out.u64(self.sequence).u64(self.next_generation).u64(self.seq_floor);
        for unit in &self.units {
            out.u64(unit.generation).u64(unit.first_seq).u64(unit.end_seq).u64(unit.void_base).u64(unit.void_bits);
        }
        out.seal(&device_words(device));
    }

    pub fn decode(device: DeviceId, bytes: &[u8]) -> Result<UnitTable, FormatError> {
        if bytes.len() < UNIT_TABLE_HEADER_BYTES + 4 {
            return Err(FormatError::Truncated);
        }
        let mut input = In::new(bytes);
        if input.take(4) != UNIT_TABLE_MAGIC {
            return Err(FormatError::Magic);
        }
        let version = input.u16();
        if !is_sealed(&device_words(device), bytes) {
            return Err(FormatError::Checksum);
        }
        if version != DISK_VERSION {
            return Err(FormatError::Version(version));
        }
        input.u16();
        let count = input.u32();
        input.u32();
        if UnitTable::encoded_bytes(count) > bytes.len() {
            return Err(FormatError::Field("unit count"));
        }
        let (sequence, next_generation, seq_floor) = (input.u64(), input.u64(), input.u64());
        let units = (0..count)
            .map(|_| UnitEntry {
                generation: input.u64(),
                first_seq: input.u64(),
                end_seq: input.u64(),
                void_base: input.u64(),
                void_bits: input.u64(),
            })
            .collect();
        Ok(UnitTable { sequence, next_generation, seq_floor, units })
    }
}

/// A slot divides a sector, so that a torn write of a block of slots leaves every one of them old or new.
pub const SLOT_BYTES: usize = 128;

pub const SLOTS_PER_BLOCK: u32 = (BLOCK_BYTES / SLOT_BYTES) as u32;

const SLOT_SHARD: u8 = 1;
const SLOT_MORE: u8 = 2;

/// A run of blocks of the data area, counted from its start.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Extent {
    /// Below 2^48.
    pub first: u64,
    /// 1 to [`EXTENT_BLOCKS_MAX`] in a slot.
    pub count: u64,
}

/// Longest extent of a slot.
pub const EXTENT_BLOCKS_MAX: u64 = u16::MAX as u64;

/// Most extents of one slot; a shard that lies in more takes further slots.
pub const SLOT_EXTENTS: usize = 10;

impl Extent {
    /// One past the last block.
    pub fn end(&self) -> u64 {
        self.first + self.count
    }
}

/// Where a shard lies: mostly in one run of blocks, else in several, in the order of its blocks. Reads as a slice.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Extents {
    One(Extent),
    Several(Box<[Extent]>),
}

impl std::ops::Deref for Extents {
    type Target = [Extent];

    fn deref(&self) -> &[Extent] {
        match self {
            Extents::One(extent) => std::slice::from_ref(extent),
            Extents::Several(extents) => extents,
        }
    }
}

impl From<Vec<Extent>> for Extents {
    fn from(extents: Vec<Extent>) -> Extents {
        match extents[..] {
            [extent] => Extents::One(extent),
            _ => Extents::Several(extents.into()),
        }
    }
}

impl Extents {
    pub fn block_count(&self) -> u64 {
        self.iter().map(|e| e.count).sum()
    }

    /// The runs that hold `count` of the shard's blocks from `from` on; the range lies inside.
    pub fn slice(&self, from: u64, count: u64) -> impl Iterator<Item = Extent> {
        let mut start = 0;
        self.iter().filter_map(move |extent| {
            let skip = from.saturating_sub(start).min(extent.count);
            let end = (from + count).saturating_sub(start).min(extent.count);
            start += extent.count;
            (skip < end).then(|| Extent { first: extent.first + skip, count: end - skip })
        })
    }
}

/// One shard of the data area, or more extents of one. A slot of zeroes is empty.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Slot {
    pub shard: ShardId,
    /// Blocks of the header area; `None` in a slot that goes on with the extents of another one.
    pub header_blocks: Option<u16>,
    /// The slot that goes on with the extents of this one.
    pub next: Option<u32>,
    /// Up to [`SLOT_EXTENTS`] of the shard: header area, then data.
    pub extents: Extents,
}

fn slot_seed(device: DeviceId, number: u32) -> [u64; 3] {
    let [low, high] = device_words(device);
    [low, high, u64::from(number)]
}

impl Slot {
    pub fn encode_into(&self, device: DeviceId, number: u32, bytes: &mut [u8]) {
        assert_eq!(bytes.len(), SLOT_BYTES, "room for the slot");
        assert!((1..=SLOT_EXTENTS).contains(&self.extents.len()), "{} extents", self.extents.len());
        let segment = self.shard.segment;
        let kind = if self.header_blocks.is_some() { SLOT_SHARD } else { SLOT_MORE };
        let mut out = Out::new(bytes);
        out.put(&[kind, self.shard.index]).u16(self.header_blocks.unwrap_or(0)).u16(self.extents.len() as u16).u16(0);
        out.u128(segment.volume.0).u64(segment.epoch.0).u64(segment.counter).u32(self.next.map_or(0, |next| next + 1));
        for extent in self.extents.iter() {
            assert!(extent.first < 1 << 48 && (1..=EXTENT_BLOCKS_MAX).contains(&extent.count), "{extent:?} fits");
            out.u64(extent.first << 16 | extent.count);
        }
        out.seal(&slot_seed(device, number));
    }

    /// `Ok(None)` for an empty slot.
    pub fn decode(device: DeviceId, number: u32, bytes: &[u8]) -> Result<Option<Slot>, FormatError> {
        let bytes = bytes.get(..SLOT_BYTES).ok_or(FormatError::Truncated)?;
        if bytes.iter().all(|b| *b == 0) {
            return Ok(None);
        }
        if !is_sealed(&slot_seed(device, number), bytes) {
            return Err(FormatError::Checksum);
        }
        let mut input = In::new(bytes);
        let (kind, index) = (input.u8(), input.u8());
        let (header_blocks, count) = (input.u16(), usize::from(input.u16()));
        input.u16();
        let segment = SegmentId { volume: VolumeId(input.u128()), epoch: Epoch(input.u64()), counter: input.u64() };
        let next = input.u32().checked_sub(1);
        let header_blocks = match (kind, header_blocks) {
            (SLOT_SHARD, 1..) => Some(header_blocks),
            (SLOT_MORE, 0) => None,
            _ => return Err(FormatError::Field("slot")),
        };
        if !(1..=SLOT_EXTENTS).contains(&count) {
            return Err(FormatError::Field("extents"));
        }
        let words = (0..count).map(|_| input.u64());
        let extents: Vec<Extent> = words.map(|w| Extent { first: w >> 16, count: w & EXTENT_BLOCKS_MAX }).collect();
        if extents.iter().any(|e| e.count == 0) {
            return Err(FormatError::Field("extents"));
        }
        Ok(Some(Slot { shard: ShardId { segment, index }, header_blocks, next, extents: extents.into() }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: DeviceId = DeviceId(0x0f0e_0d0c_0b0a_0908_0706_0504_0302_0100);
    const VOLUME: VolumeId = VolumeId(0xabcd);

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|b| format!("{b:02x}")).collect()
    }

    fn superblock() -> Superblock {
        let areas = Areas {
            unit_table_offset: 4096,
            unit_table_bytes: 4096,
            unit_bytes: 65536,
            journal_offset: 12288,
            unit_count: 8,
            slot_count: 32,
            slot_table_offset: 12288 + 8 * 65536,
            data_offset: 16384 + 8 * 65536,
            data_blocks: 100,
        };
        let size_bytes = areas.data_offset + 101 * 4096;
        Superblock {
            grid: GridId(0x11),
            node: NodeId(3),
            device: DEVICE,
            sequence: 9,
            size_bytes,
            flush_us: 0,
            media: None,
            areas,
        }
    }

    fn slot() -> Slot {
        let segment = SegmentId { volume: VOLUME, epoch: Epoch(4), counter: 0x99 };
        let extents = vec![Extent { first: 500, count: 17 }, Extent { first: 7, count: 3 }];
        Slot { shard: ShardId { segment, index: 2 }, header_blocks: Some(1), next: None, extents: extents.into() }
    }

    /// Golden bytes: formats that devices carry must never change under their version.
    #[test]
    fn bytes_on_disk_are_these() {
        let bytes = superblock().encode();
        assert_eq!(
            hex(&bytes[..128]),
            concat!(
                "484653420200000011000000000000000000000000000000000102030405060708090a0b0c0d0e0f0300000000000000",
                "090000000000000000900e00000000000010000000000000001000000000010000300000000000000800000020000000",
                "0030080000000000004008000000000064000000000000000000000000000000"
            )
        );
        assert_eq!(hex(&bytes[4092..]), "38e6bc1e");

        let unit = UnitEntry { generation: 7, first_seq: 100, end_seq: 140, void_base: 138, void_bits: 2 };
        let units = vec![unit, UnitEntry::default()];
        let mut bytes = vec![0xee; 4096];
        UnitTable { sequence: 5, next_generation: 8, seq_floor: 150, units }.encode_into(DEVICE, &mut bytes);
        assert_eq!(
            hex(&bytes[..80]),
            concat!(
                "484655540200000002000000000000000500000000000000080000000000000096000000000000000700000000000000",
                "64000000000000008c000000000000008a000000000000000200000000000000"
            )
        );
        assert_eq!(hex(&bytes[4092..]), "bc014582");

        let mut bytes = [0xee; SLOT_BYTES];
        slot().encode_into(DEVICE, 70, &mut bytes);
        assert_eq!(
            hex(&bytes),
            concat!(
                "0102010002000000cdab000000000000000000000000000004000000000000009900000000000000000000001100f401",
                "000000000300070000000000000000000000000000000000000000000000000000000000000000000000000000000000",
                "000000000000000000000000000000000000000000000000000000008c8e99f0"
            )
        );
    }

    #[test]
    fn structures_read_back() {
        assert_eq!(Superblock::decode(&superblock().encode()), Ok(superblock()));
        for class in MediaClass::ALL {
            let set = Superblock { media: Some(class), ..superblock() };
            assert_eq!(Superblock::decode(&set.encode()), Ok(set));
        }
        let mut bytes = [0; SLOT_BYTES];
        assert_eq!(Slot::decode(DEVICE, 70, &bytes), Ok(None));
        slot().encode_into(DEVICE, 70, &mut bytes);
        assert_eq!(Slot::decode(DEVICE, 70, &bytes), Ok(Some(slot())));
        let more = Slot { header_blocks: None, next: Some(0), ..slot() };
        let mut bytes_of_more = [0; SLOT_BYTES];
        more.encode_into(DEVICE, 9, &mut bytes_of_more);
        assert_eq!(Slot::decode(DEVICE, 9, &bytes_of_more), Ok(Some(more)));
        assert_eq!(Slot::decode(DEVICE, 71, &bytes), Err(FormatError::Checksum), "in another slot it is none");
        assert_eq!(Slot::decode(DeviceId(1), 70, &bytes), Err(FormatError::Checksum));
        let units = vec![UnitEntry { generation: 3, ..UnitEntry::default() }; 150];
        let table = UnitTable { sequence: 2, next_generation: 4, seq_floor: 9, units };
        let mut bytes = vec![0; UnitTable::encoded_bytes(150)];
        table.encode_into(DEVICE, &mut bytes);
        assert_eq!(bytes.len(), 8192);
        assert_eq!(UnitTable::decode(DEVICE, &bytes), Ok(table));
        assert_eq!(UnitTable::decode(DeviceId(1), &bytes), Err(FormatError::Checksum));
    }

    #[test]
    fn a_part_of_a_shard_lies_in_these_runs() {
        let extents = slot().extents;
        let runs =
            |from, count| -> Vec<(u64, u64)> { extents.slice(from, count).map(|e| (e.first, e.count)).collect() };
        assert_eq!(runs(0, 20), [(500, 17), (7, 3)]);
        assert_eq!(runs(3, 4), [(503, 4)]);
        assert_eq!(runs(16, 2), [(516, 1), (7, 1)]);
        assert_eq!(runs(17, 3), [(7, 3)]);
        assert_eq!(runs(19, 1), [(9, 1)]);
        assert_eq!(extents.block_count(), 20);
    }

    #[test]
    fn voids_are_the_batches_marked() {
        let unit = UnitEntry { void_base: 100, void_bits: 0b101, ..UnitEntry::default() };
        let void: Vec<u64> = (0..400).filter(|seq| unit.is_void(*seq)).collect();
        assert_eq!(void, [100, 102]);
    }

    proptest::proptest! {
        /// Whatever is altered is noticed, and nothing makes a parser panic.
        #[test]
        fn altered_bytes_are_refused(at in 0usize..4096, bit in 0u8..8, noise: [u8; 32]) {
            let mut bytes = superblock().encode();
            bytes[at] ^= 1 << bit;
            proptest::prop_assert!(Superblock::decode(&bytes).is_err());
            let mut bytes = [0; SLOT_BYTES];
            slot().encode_into(DEVICE, 70, &mut bytes);
            bytes[at % SLOT_BYTES] ^= 1 << bit;
            proptest::prop_assert!(Slot::decode(DEVICE, 70, &bytes).is_err());
            let mut bytes = vec![0; 4096];
            bytes[..32].copy_from_slice(&noise);
            let _ = UnitTable::decode(DEVICE, &bytes);
            let _ = Slot::decode(DEVICE, 0, &bytes);
            let _ = Superblock::decode(&bytes);
        }
    }
}
