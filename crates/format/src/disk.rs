//! A storage device's own structures: superblock, unit table, journal batches and their records, slots.
//!
//! Everything is little-endian, at multiples of 4 KiB unless said otherwise, and carries a CRC32C. Journal checksums are
//! seeded with where and when they were written (device, unit, generation, ledger, LSN), so that stale or misdirected
//! bytes never pass for current ones (protocol rule 11). docs/FORMAT-disk.md draws each structure.

use crate::FormatError;
use crate::ledger::{AckRule, LEGS_MAX, Leg};
use holdfast_base::{
    BLOCK_BYTES, BlockCrc, DeviceId, Epoch, GridId, InstanceId, LedgerId, Lsn, NodeId, SegmentId, ShardId, VolumeId,
    crc32c, seeded_crc32c,
};
use std::borrow::Cow;

/// Version of all structures of this file.
pub const DISK_VERSION: u16 = 1;

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

// ---- Superblock ----------------------------------------------------------------------------------------------------

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
    pub areas: Areas,
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
        out.put(&SUPERBLOCK_MAGIC).u16(DISK_VERSION).u16(0);
        out.u128(self.grid.0).u128(self.device.0).u32(self.node.0).u32(0).u64(self.sequence).u64(self.size_bytes);
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
        input.u16();
        let (grid, device, node) = (GridId(input.u128()), DeviceId(input.u128()), NodeId(input.u32()));
        input.u32();
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
        Ok(Superblock { grid, node, device, sequence, size_bytes, areas })
    }
}

// ---- Unit table ----------------------------------------------------------------------------------------------------

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

// ---- Journal batches -----------------------------------------------------------------------------------------------

const BATCH_MAGIC: [u8; 4] = *b"HFJB";

pub const BATCH_HEADER_BYTES: usize = 64;

/// Where and when a batch was written; its checksum is seeded with it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchPlace {
    pub device: DeviceId,
    pub unit: u32,
    pub generation: u64,
    /// Offset of the batch in its unit.
    pub offset: u32,
}

impl BatchPlace {
    fn seed(&self) -> [u64; 4] {
        let [low, high] = device_words(self.device);
        [low, high, self.generation, u64::from(self.unit) << 32 | u64::from(self.offset)]
    }
}

/// Head of a batch, the unit of durable writing.
///
/// ```text
/// header 64 | records, `records_bytes` | crc 4 | zeroes to a whole block | payload blocks, in record order
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchHeader {
    /// Dense on a device while it is open; the next opening leaves a gap.
    pub seq: u64,
    /// Every batch up to this one was durable when this one was written.
    pub watermark: u64,
    /// Sequence number of the unit's first batch.
    pub unit_first_seq: u64,
    /// Bit i: batch `seq - 1 - i` held control records (promises, ledger states), or may have.
    pub control_bits: u64,
    /// The whole batch, in whole blocks.
    pub batch_bytes: u32,
    pub records_bytes: u32,
    pub record_count: u32,
}

impl BatchHeader {
    /// Bytes before the payload of a batch whose records take `records_bytes`.
    pub fn head_bytes(records_bytes: usize) -> usize {
        (BATCH_HEADER_BYTES + records_bytes + 4).next_multiple_of(BLOCK_BYTES)
    }

    /// Completes `head`, in which the records already stand after the header's place.
    pub fn finish(&self, place: BatchPlace, head: &mut [u8]) {
        let records_end = BATCH_HEADER_BYTES + self.records_bytes as usize;
        assert_eq!(head.len(), BatchHeader::head_bytes(self.records_bytes as usize), "the head has exactly its blocks");
        assert!(self.batch_bytes as usize >= head.len() && (self.batch_bytes as usize).is_multiple_of(BLOCK_BYTES));
        head[records_end + 4..].fill(0);
        let mut out = Out::new(&mut head[..BATCH_HEADER_BYTES]);
        out.put(&BATCH_MAGIC).u16(DISK_VERSION).u16(0).u64(self.seq).u64(self.watermark).u64(self.unit_first_seq);
        out.u64(self.control_bits).u32(self.batch_bytes).u32(self.records_bytes).u32(self.record_count).u32(0);
        out.u64(place.generation);
        let crc = seeded_crc32c(&place.seed(), &head[..records_end]);
        head[records_end..records_end + 4].copy_from_slice(&crc.to_le_bytes());
    }

    /// Reads the header of the batch that starts at `place` and fits `bytes`; its records follow it, verified.
    pub fn decode(place: BatchPlace, bytes: &[u8]) -> Result<(BatchHeader, &[u8]), FormatError> {
        if bytes.len() < BATCH_HEADER_BYTES + 4 {
            return Err(FormatError::Truncated);
        }
        let mut input = In::new(bytes);
        if input.take(4) != BATCH_MAGIC {
            return Err(FormatError::Magic);
        }
        let version = input.u16();
        input.u16();
        let (seq, watermark, unit_first_seq, control_bits) = (input.u64(), input.u64(), input.u64(), input.u64());
        let (batch_bytes, records_bytes, record_count) = (input.u32(), input.u32(), input.u32());
        input.u32();
        let generation = input.u64();
        let records_end = BATCH_HEADER_BYTES.saturating_add(records_bytes as usize);
        if generation != place.generation || records_end + 4 > bytes.len() {
            return Err(FormatError::Checksum);
        }
        let crc = seeded_crc32c(&place.seed(), &bytes[..records_end]);
        if bytes[records_end..records_end + 4] != crc.to_le_bytes() {
            return Err(FormatError::Checksum);
        }
        if version != DISK_VERSION {
            return Err(FormatError::Version(version));
        }
        let whole = (batch_bytes as usize).is_multiple_of(BLOCK_BYTES)
            && batch_bytes as usize >= BatchHeader::head_bytes(records_bytes as usize)
            && batch_bytes as usize <= bytes.len();
        if !whole || watermark >= seq || unit_first_seq > seq {
            return Err(FormatError::Field("batch header"));
        }
        let header =
            BatchHeader { seq, watermark, unit_first_seq, control_bits, batch_bytes, records_bytes, record_count };
        Ok((header, &bytes[BATCH_HEADER_BYTES..records_end]))
    }
}

// ---- Journal records -----------------------------------------------------------------------------------------------

const KIND_ENTRY: u8 = 1;
const KIND_LEDGER: u8 = 2;
const KIND_PROMISE: u8 = 3;

/// Kind, lengths and volume: what every record begins with.
const RECORD_PREFIX_BYTES: usize = 32;
const ENTRY_FIXED_BYTES: usize = RECORD_PREFIX_BYTES + 48;
const LEDGER_FIXED_BYTES: usize = RECORD_PREFIX_BYTES + 48;
const LEG_BYTES: usize = 24;
const PROMISE_BYTES: usize = RECORD_PREFIX_BYTES + 32;

fn record_len(body: usize) -> usize {
    (body + 4).next_multiple_of(8)
}

/// One log entry; its payload blocks lie in the batch, after those of the records before it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EntryRecord<'a> {
    pub volume: VolumeId,
    pub ledger: LedgerId,
    pub lsn: Lsn,
    pub epoch: Epoch,
    pub acked: Lsn,
    pub header: &'a [u8],
    pub crcs: Cow<'a, [BlockCrc]>,
}

/// The whole state of a ledger; the latest one counts.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LedgerRecord {
    pub volume: VolumeId,
    pub ledger: LedgerId,
    pub deleted: bool,
    /// The index over it may miss entries, for good.
    pub unsound: bool,
    pub trimmed: Lsn,
    pub acked: Lsn,
    /// The batch that held the ledger's first record; zero in that record itself.
    pub created_seq: u64,
    pub rule: AckRule,
    pub legs: Vec<Leg>,
}

/// No epoch below this one is served for the volume, nor another opening of the same one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PromiseRecord {
    pub volume: VolumeId,
    pub epoch: Epoch,
    pub instance: InstanceId,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum JournalRecord<'a> {
    Entry(EntryRecord<'a>),
    Ledger(LedgerRecord),
    Promise(PromiseRecord),
}

/// Where and when a record was written: its checksum is seeded with it, with its ledger and its LSN.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecordPlace {
    pub device: DeviceId,
    pub generation: u64,
}

impl RecordPlace {
    fn seed(self, volume: VolumeId, ledger: LedgerId, lsn: Lsn) -> [u64; 8] {
        let [low, high] = device_words(self.device);
        let (v_low, v_high) = (volume.0 as u64, (volume.0 >> 64) as u64);
        [low, high, self.generation, v_low, v_high, ledger.epoch.0, u64::from(ledger.n), lsn.0]
    }
}

fn put_prefix<'a>(bytes: &'a mut [u8], kind: u8, payload_blocks: u32, volume: VolumeId) -> Out<'a> {
    let len = bytes.len() as u32;
    let mut out = Out::new(bytes);
    out.put(&[kind, 0, 0, 0]).u32(len).u32(payload_blocks).u32(0).u128(volume.0);
    out
}

impl EntryRecord<'_> {
    pub fn encoded_bytes(header_bytes: usize, block_count: usize) -> usize {
        record_len(ENTRY_FIXED_BYTES + block_count * 4 + header_bytes)
    }

    /// Fills `bytes`, which has exactly [`EntryRecord::encoded_bytes`].
    pub fn encode_into(&self, place: RecordPlace, bytes: &mut [u8]) {
        assert_eq!(bytes.len(), EntryRecord::encoded_bytes(self.header.len(), self.crcs.len()), "room for the record");
        let mut out = put_prefix(bytes, KIND_ENTRY, self.crcs.len() as u32, self.volume);
        out.u64(self.ledger.epoch.0).u32(self.ledger.n).u32(self.header.len() as u32);
        out.u64(self.lsn.0).u64(self.acked.0).u64(self.epoch.0).u64(0);
        for crc in self.crcs.iter() {
            out.u32(*crc);
        }
        out.put(self.header);
        out.seal(&place.seed(self.volume, self.ledger, self.lsn));
    }
}

impl LedgerRecord {
    pub fn encoded_bytes(leg_count: usize) -> usize {
        record_len(LEDGER_FIXED_BYTES + leg_count * LEG_BYTES)
    }

    pub fn encode_into(&self, place: RecordPlace, bytes: &mut [u8]) {
        assert_eq!(bytes.len(), LedgerRecord::encoded_bytes(self.legs.len()), "room for the record");
        let mut out = put_prefix(bytes, KIND_LEDGER, 0, self.volume);
        let flags = u32::from(self.deleted) | u32::from(self.unsound) << 1;
        out.u64(self.ledger.epoch.0).u32(self.ledger.n).u32(flags);
        out.u64(self.trimmed.0).u64(self.acked.0).u64(self.created_seq);
        out.put(&[self.rule.copies, self.rule.domains]).u16(self.legs.len() as u16).u32(0);
        for leg in &self.legs {
            out.u128(leg.device.0).u32(leg.node.0).u32(0);
        }
        out.seal(&place.seed(self.volume, self.ledger, Lsn::ZERO));
    }
}

impl PromiseRecord {
    pub fn encoded_bytes() -> usize {
        record_len(PROMISE_BYTES)
    }

    pub fn encode_into(&self, place: RecordPlace, bytes: &mut [u8]) {
        assert_eq!(bytes.len(), PromiseRecord::encoded_bytes(), "room for the record");
        let mut out = put_prefix(bytes, KIND_PROMISE, 0, self.volume);
        out.u64(self.epoch.0).u64(0).u128(self.instance.0);
        out.seal(&place.seed(self.volume, LedgerId::default(), Lsn::ZERO));
    }
}

impl<'a> JournalRecord<'a> {
    /// Reads the record at the start of `bytes`; returns it with its length.
    pub fn decode(place: RecordPlace, bytes: &'a [u8]) -> Result<(JournalRecord<'a>, usize), FormatError> {
        if bytes.len() < RECORD_PREFIX_BYTES {
            return Err(FormatError::Truncated);
        }
        let mut input = In::new(bytes);
        let kind = input.take(4)[0];
        let (len, payload_blocks) = (input.u32() as usize, input.u32());
        input.u32();
        let volume = VolumeId(input.u128());
        let record = bytes.get(..len).ok_or(FormatError::Truncated)?;
        match kind {
            KIND_ENTRY => decode_entry(place, record, volume, payload_blocks).map(|r| (JournalRecord::Entry(r), len)),
            KIND_LEDGER => decode_ledger(place, record, volume).map(|r| (JournalRecord::Ledger(r), len)),
            KIND_PROMISE => decode_promise(place, record, volume).map(|r| (JournalRecord::Promise(r), len)),
            _ => Err(FormatError::Field("record kind")),
        }
    }
}

fn decode_entry(
    place: RecordPlace,
    bytes: &[u8],
    volume: VolumeId,
    block_count: u32,
) -> Result<EntryRecord<'_>, FormatError> {
    if bytes.len() < record_len(ENTRY_FIXED_BYTES) {
        return Err(FormatError::Truncated);
    }
    let mut input = In::new(bytes);
    input.take(RECORD_PREFIX_BYTES);
    let ledger = LedgerId { epoch: Epoch(input.u64()), n: input.u32() };
    let header_bytes = input.u32() as usize;
    let (lsn, acked, epoch) = (Lsn(input.u64()), Lsn(input.u64()), Epoch(input.u64()));
    input.u64();
    let block_count = block_count as usize;
    let whole = block_count.checked_mul(4).and_then(|b| b.checked_add(ENTRY_FIXED_BYTES + header_bytes));
    if whole.is_none_or(|body| record_len(body) != bytes.len()) {
        return Err(FormatError::Field("record length"));
    }
    if !is_sealed(&place.seed(volume, ledger, lsn), bytes) {
        return Err(FormatError::Checksum);
    }
    let crcs = (0..block_count).map(|_| input.u32()).collect();
    Ok(EntryRecord { volume, ledger, lsn, epoch, acked, header: input.take(header_bytes), crcs })
}

fn decode_ledger(place: RecordPlace, bytes: &[u8], volume: VolumeId) -> Result<LedgerRecord, FormatError> {
    if bytes.len() < record_len(LEDGER_FIXED_BYTES) {
        return Err(FormatError::Truncated);
    }
    let mut input = In::new(bytes);
    input.take(RECORD_PREFIX_BYTES);
    let ledger = LedgerId { epoch: Epoch(input.u64()), n: input.u32() };
    let flags = input.u32();
    let (trimmed, acked, created_seq) = (Lsn(input.u64()), Lsn(input.u64()), input.u64());
    let rule = AckRule { copies: input.u8(), domains: input.u8() };
    let leg_count = usize::from(input.u16());
    input.u32();
    if leg_count > LEGS_MAX || bytes.len() != LedgerRecord::encoded_bytes(leg_count) {
        return Err(FormatError::Field("legs"));
    }
    if !is_sealed(&place.seed(volume, ledger, Lsn::ZERO), bytes) {
        return Err(FormatError::Checksum);
    }
    let mut leg = || {
        let device = DeviceId(input.u128());
        let node = NodeId(input.u32());
        input.u32();
        Leg { node, device }
    };
    let legs = (0..leg_count).map(|_| leg()).collect();
    let (deleted, unsound) = (flags & 1 != 0, flags & 2 != 0);
    Ok(LedgerRecord { volume, ledger, deleted, unsound, trimmed, acked, created_seq, rule, legs })
}

fn decode_promise(place: RecordPlace, bytes: &[u8], volume: VolumeId) -> Result<PromiseRecord, FormatError> {
    if bytes.len() != PromiseRecord::encoded_bytes() {
        return Err(FormatError::Field("record length"));
    }
    let mut input = In::new(bytes);
    input.take(RECORD_PREFIX_BYTES);
    let epoch = Epoch(input.u64());
    input.u64();
    let instance = InstanceId(input.u128());
    if !is_sealed(&place.seed(volume, LedgerId::default(), Lsn::ZERO), bytes) {
        return Err(FormatError::Checksum);
    }
    Ok(PromiseRecord { volume, epoch, instance })
}

// ---- Slots ---------------------------------------------------------------------------------------------------------

/// A slot divides a sector, so that a torn write of a block of slots leaves every one of them old or new.
pub const SLOT_BYTES: usize = 64;

pub const SLOTS_PER_BLOCK: u32 = (BLOCK_BYTES / SLOT_BYTES) as u32;

const SLOT_FULL: u8 = 1;

/// One shard of the data area. A slot of zeroes is empty.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slot {
    pub shard: ShardId,
    /// Blocks of the header area.
    pub header_blocks: u16,
    /// First block, counted from the start of the data area.
    pub first_block: u64,
    /// Header area and data.
    pub block_count: u32,
}

fn slot_seed(device: DeviceId, number: u32) -> [u64; 3] {
    let [low, high] = device_words(device);
    [low, high, u64::from(number)]
}

impl Slot {
    pub fn encode_into(&self, device: DeviceId, number: u32, bytes: &mut [u8]) {
        assert_eq!(bytes.len(), SLOT_BYTES, "room for the slot");
        assert!(u32::from(self.header_blocks) < self.block_count, "a shard has a header area and data");
        let segment = self.shard.segment;
        let mut out = Out::new(bytes);
        out.put(&[SLOT_FULL, self.shard.index]).u16(self.header_blocks).u32(self.block_count).u64(self.first_block);
        out.u128(segment.volume.0).u64(segment.epoch.0).u64(segment.counter);
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
        let (header_blocks, block_count, first_block) = (input.u16(), input.u32(), input.u64());
        let segment = SegmentId { volume: VolumeId(input.u128()), epoch: Epoch(input.u64()), counter: input.u64() };
        if kind != SLOT_FULL || u32::from(header_blocks) >= block_count || header_blocks == 0 {
            return Err(FormatError::Field("slot"));
        }
        Ok(Some(Slot { shard: ShardId { segment, index }, header_blocks, first_block, block_count }))
    }
}

/// Whether payload blocks match their checksums. Lengths that differ don't match.
pub fn blocks_match(crcs: &[BlockCrc], bytes: &[u8]) -> bool {
    bytes.len() == crcs.len() * BLOCK_BYTES
        && bytes.chunks_exact(BLOCK_BYTES).zip(crcs).all(|(block, crc)| crc32c(block) == *crc)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: DeviceId = DeviceId(0x0f0e_0d0c_0b0a_0908_0706_0504_0302_0100);
    const VOLUME: VolumeId = VolumeId(0xabcd);
    const LEDGER: LedgerId = LedgerId { epoch: Epoch(4), n: 2 };
    const PLACE: RecordPlace = RecordPlace { device: DEVICE, generation: 7 };

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
            slot_count: 64,
            slot_table_offset: 12288 + 8 * 65536,
            data_offset: 16384 + 8 * 65536,
            data_blocks: 100,
        };
        let size_bytes = areas.data_offset + 101 * 4096;
        Superblock { grid: GridId(0x11), node: NodeId(3), device: DEVICE, sequence: 9, size_bytes, areas }
    }

    fn entry(header: &[u8]) -> EntryRecord<'_> {
        let crcs = Cow::Owned(vec![0x0102_0304, 0xa1a2_a3a4]);
        EntryRecord { volume: VOLUME, ledger: LEDGER, lsn: Lsn(50), epoch: Epoch(4), acked: Lsn(49), header, crcs }
    }

    fn ledger_record() -> LedgerRecord {
        LedgerRecord {
            volume: VOLUME,
            ledger: LEDGER,
            deleted: true,
            unsound: false,
            trimmed: Lsn(30),
            acked: Lsn(49),
            created_seq: 12,
            rule: AckRule { copies: 2, domains: 2 },
            legs: vec![Leg { node: NodeId(3), device: DEVICE }],
        }
    }

    fn encoded_entry(header: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0xee; EntryRecord::encoded_bytes(header.len(), 2)];
        entry(header).encode_into(PLACE, &mut bytes);
        bytes
    }

    /// Golden bytes: formats that devices carry must never change under their version.
    #[test]
    fn bytes_on_disk_are_these() {
        let bytes = superblock().encode();
        assert_eq!(
            hex(&bytes[..128]),
            concat!(
                "484653420100000011000000000000000000000000000000000102030405060708090a0b0c0d0e0f0300000000000000",
                "090000000000000000900e00000000000010000000000000001000000000010000300000000000000800000040000000",
                "0030080000000000004008000000000064000000000000000000000000000000"
            )
        );
        assert_eq!(hex(&bytes[4092..]), "6bad9c79");

        let unit = UnitEntry { generation: 7, first_seq: 100, end_seq: 140, void_base: 138, void_bits: 2 };
        let units = vec![unit, UnitEntry::default()];
        let mut bytes = vec![0xee; 4096];
        UnitTable { sequence: 5, next_generation: 8, seq_floor: 150, units }.encode_into(DEVICE, &mut bytes);
        assert_eq!(
            hex(&bytes[..80]),
            concat!(
                "484655540100000002000000000000000500000000000000080000000000000096000000000000000700000000000000",
                "64000000000000008c000000000000008a000000000000000200000000000000"
            )
        );
        assert_eq!(hex(&bytes[4092..]), "d4d3a000");

        assert_eq!(
            hex(&encoded_entry(b"head")),
            concat!(
                "01000000600000000200000000000000cdab000000000000000000000000000004000000000000000200000004000000",
                "320000000000000031000000000000000400000000000000000000000000000004030201a4a3a2a168656164c64d5067"
            )
        );

        let mut bytes = vec![0xee; LedgerRecord::encoded_bytes(1)];
        ledger_record().encode_into(PLACE, &mut bytes);
        assert_eq!(
            hex(&bytes),
            concat!(
                "02000000700000000000000000000000cdab000000000000000000000000000004000000000000000200000001000000",
                "1e0000000000000031000000000000000c000000000000000202010000000000000102030405060708090a0b0c0d0e0f",
                "03000000000000000000000041c11f7f"
            )
        );

        let mut bytes = vec![0xee; PromiseRecord::encoded_bytes()];
        PromiseRecord { volume: VOLUME, epoch: Epoch(6), instance: InstanceId(0x77) }.encode_into(PLACE, &mut bytes);
        assert_eq!(
            hex(&bytes),
            concat!(
                "03000000480000000000000000000000cdab000000000000000000000000000006000000000000000000000000000000",
                "7700000000000000000000000000000000000000d66691a3"
            )
        );

        let mut bytes = [0xee; SLOT_BYTES];
        slot().encode_into(DEVICE, 70, &mut bytes);
        assert_eq!(
            hex(&bytes),
            concat!(
                "0102010011000000f401000000000000cdab000000000000000000000000000004000000000000009900000000000000",
                "00000000000000000000000091dd79e0"
            )
        );

        let (bytes, _) = batch();
        assert_eq!(
            hex(&bytes[..64]),
            concat!(
                "48464a420100000078000000000000007500000000000000640000000000000005000000000000000030000060000000",
                "01000000000000000700000000000000"
            )
        );
        let end = 64 + encoded_entry(b"head").len();
        assert_eq!(hex(&bytes[end..end + 4]), "f453506f");
    }

    fn slot() -> Slot {
        let segment = SegmentId { volume: VOLUME, epoch: Epoch(4), counter: 0x99 };
        Slot { shard: ShardId { segment, index: 2 }, header_blocks: 1, first_block: 500, block_count: 17 }
    }

    fn batch() -> (Vec<u8>, BatchPlace) {
        let record = encoded_entry(b"head");
        let mut head = vec![0xee; BatchHeader::head_bytes(record.len())];
        head[64..64 + record.len()].copy_from_slice(&record);
        let place = BatchPlace { device: DEVICE, unit: 3, generation: 7, offset: 8192 };
        let header = batch_header(record.len());
        header.finish(place, &mut head);
        head.resize(header.batch_bytes as usize, 0);
        (head, place)
    }

    fn batch_header(records_bytes: usize) -> BatchHeader {
        BatchHeader {
            seq: 120,
            watermark: 117,
            unit_first_seq: 100,
            control_bits: 5,
            batch_bytes: 3 * 4096,
            records_bytes: records_bytes as u32,
            record_count: 1,
        }
    }

    #[test]
    fn structures_read_back() {
        assert_eq!(Superblock::decode(&superblock().encode()), Ok(superblock()));
        let (bytes, place) = batch();
        let (header, records) = BatchHeader::decode(place, &bytes).expect("just written");
        assert_eq!(header, batch_header(records.len()));
        let (record, len) = JournalRecord::decode(PLACE, records).expect("just written");
        assert_eq!((record, len), (JournalRecord::Entry(entry(b"head")), records.len()));
        let mut bytes = vec![0; LedgerRecord::encoded_bytes(1)];
        ledger_record().encode_into(PLACE, &mut bytes);
        assert_eq!(JournalRecord::decode(PLACE, &bytes), Ok((JournalRecord::Ledger(ledger_record()), bytes.len())));
        let mut bytes = [0; SLOT_BYTES];
        assert_eq!(Slot::decode(DEVICE, 70, &bytes), Ok(None));
        slot().encode_into(DEVICE, 70, &mut bytes);
        assert_eq!(Slot::decode(DEVICE, 70, &bytes), Ok(Some(slot())));
    }

    #[test]
    fn bytes_of_another_time_or_place_never_count() {
        let (bytes, place) = batch();
        for other in [
            BatchPlace { device: DeviceId(1), ..place },
            BatchPlace { unit: 4, ..place },
            BatchPlace { generation: 8, ..place },
            BatchPlace { offset: 4096, ..place },
        ] {
            assert_eq!(BatchHeader::decode(other, &bytes), Err(FormatError::Checksum), "{other:?}");
        }
        let record = encoded_entry(b"head");
        for other in [RecordPlace { generation: 8, ..PLACE }, RecordPlace { device: DeviceId(1), ..PLACE }] {
            assert_eq!(JournalRecord::decode(other, &record), Err(FormatError::Checksum));
        }
        let mut bytes = [0; SLOT_BYTES];
        slot().encode_into(DEVICE, 70, &mut bytes);
        assert_eq!(Slot::decode(DEVICE, 71, &bytes), Err(FormatError::Checksum));
        assert_eq!(Slot::decode(DeviceId(1), 70, &bytes), Err(FormatError::Checksum));
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
        fn altered_bytes_are_refused(at in 0usize..4096, bit in 0u8..8, noise: [u8; 32], cut in 0usize..200) {
            let mut bytes = superblock().encode();
            bytes[at] ^= 1 << bit;
            proptest::prop_assert!(Superblock::decode(&bytes).is_err());
            let (mut bytes, place) = batch();
            let covered = 64 + encoded_entry(b"head").len() + 4;
            bytes[at % covered] ^= 1 << bit;
            proptest::prop_assert!(BatchHeader::decode(place, &bytes).is_err());
            let mut bytes = encoded_entry(b"head");
            let len = bytes.len();
            bytes[at % len] ^= 1 << bit;
            proptest::prop_assert!(JournalRecord::decode(PLACE, &bytes).is_err());
            let mut bytes = encoded_entry(&noise);
            bytes.truncate(cut);
            if cut < EntryRecord::encoded_bytes(noise.len(), 2) {
                proptest::prop_assert!(JournalRecord::decode(PLACE, &bytes).is_err());
            }
            let _ = JournalRecord::decode(PLACE, &noise);
            let _ = BatchHeader::decode(place, &noise);
            let mut slot = [0; SLOT_BYTES];
            slot[..32].copy_from_slice(&noise);
            let _ = Slot::decode(DEVICE, 0, &slot);
            let mut table = vec![0; 4096];
            table[..32].copy_from_slice(&noise);
            let _ = UnitTable::decode(DEVICE, &table);
        }
    }
}
