//! Journal batches and their records: what the start-up scan finds, and what log reads verify.

use super::{DISK_VERSION, In, Out, device_words, is_sealed};
use crate::FormatError;
use crate::ledger::{AckRule, LEGS_MAX, Leg};
use holdfast_base::{
    BLOCK_BYTES, BlockCrc, DeviceId, Epoch, InstanceId, LedgerId, Lsn, NodeId, VolumeId, crc32c, seeded_crc32c,
};
use std::borrow::Cow;

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

    /// Golden bytes: formats that devices carry must never change under their version.
    #[test]
    fn bytes_on_disk_are_these() {
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

        let (bytes, _) = batch();
        assert_eq!(
            hex(&bytes[..64]),
            concat!(
                "48464a420200000078000000000000007500000000000000640000000000000005000000000000000030000060000000",
                "01000000000000000700000000000000"
            )
        );
        let end = 64 + encoded_entry(b"head").len();
        assert_eq!(hex(&bytes[end..end + 4]), "7eef132f");
    }

    #[test]
    fn structures_read_back() {
        let (bytes, place) = batch();
        let (header, records) = BatchHeader::decode(place, &bytes).expect("just written");
        assert_eq!(header, batch_header(records.len()));
        let (record, len) = JournalRecord::decode(PLACE, records).expect("just written");
        assert_eq!((record, len), (JournalRecord::Entry(entry(b"head")), records.len()));
        let mut bytes = vec![0; LedgerRecord::encoded_bytes(1)];
        ledger_record().encode_into(PLACE, &mut bytes);
        assert_eq!(JournalRecord::decode(PLACE, &bytes), Ok((JournalRecord::Ledger(ledger_record()), bytes.len())));
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
    }

    proptest::proptest! {
        /// Whatever is altered is noticed, and nothing makes a parser panic.
        #[test]
        fn altered_bytes_are_refused(at in 0usize..4096, bit in 0u8..8, noise: [u8; 32], cut in 0usize..200) {
            let (mut bytes, place) = batch();
            let covered = BATCH_HEADER_BYTES + encoded_entry(b"head").len() + 4;
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
        }
    }
}
