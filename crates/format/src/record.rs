//! Entries of a volume's log: everything that changes the volume, in LSN order.
//!
//! A node keeps an entry as opaque header bytes plus payload blocks with their checksums; only controllers read headers.
//! Live operation and replay apply the same records by the same code.
//!
//! A record is written in the oldest version that says all of it. In version 1 layers have the numbers of narrow keys,
//! in version 3 those of wide ones, whatever the volume's are. Version 2 is another header around either.

use crate::features::Feature;
use crate::geometry::Geometry;
use crate::ledger::Leg;
use crate::packing::{BLOCK_GRANULES, StoredLengths};
use crate::sharing::STORE_EPOCHS;
use crate::{FormatError, from_postcard, to_postcard};
use holdfast_base::{
    AssociationId, BlockCrc, Epoch, HeadId, InstanceId, Key, KeyWidth, Lsn, ObjectId, SegmentId, VolumeId,
};
use serde::{Deserialize, Serialize};
use std::num::NonZeroU32;

/// A segment's number inside its volume: unique for ever, since counters only rise and every owner's epoch is new.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize, Default)]
pub struct SegmentNo {
    pub epoch: Epoch,
    pub counter: u64,
}

impl SegmentNo {
    pub fn of(self, volume: VolumeId) -> SegmentId {
        SegmentId { volume, epoch: self.epoch, counter: self.counter }
    }
}

impl From<SegmentId> for SegmentNo {
    fn from(id: SegmentId) -> SegmentNo {
        SegmentNo { epoch: id.epoch, counter: id.counter }
    }
}

/// What an extent of a commit replaces; it is applied only where the map still names this (protocol rule 12). It tells
/// of the extent's first block; those of the others follow, one after the other.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Source {
    /// Data destaged from the log entry with this LSN.
    Log(Lsn),
    /// Data moved by the cleaner: payload block in the segment it came from.
    Segment { segment: SegmentNo, block: u32 },
    /// A bulk write that never was in the log: it takes effect with this record's LSN, unconditionally.
    Direct,
    /// Data moved out of a packed segment: where its first unit starts. The others follow by the extent's own lengths,
    /// since units are moved as they lie; one that was not is an extent by itself.
    Packed { segment: SegmentNo, granule: u32 },
}

/// A run of volume blocks in a segment; runs follow each other in the payload without gaps.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CommitExtent {
    pub key: Key,
    pub blocks: u32,
    pub source: Source,
}

/// Makes a segment part of the volume. Written only after all its shards are durable (protocol rule 16).
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SegmentCommit {
    pub segment: SegmentNo,
    pub geometry: Geometry,
    /// Home of each shard, by shard index.
    pub homes: Vec<Leg>,
    pub extents: Vec<CommitExtent>,
    /// Checksum of each payload block.
    pub crcs: Vec<BlockCrc>,
}

/// A commit of a packed segment: its payload is the units of its extents, from granule 0 on.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PackedCommit {
    /// Its checksums are of the blocks, as they were before they were packed.
    pub commit: SegmentCommit,
    pub lengths: StoredLengths,
}

/// A segment of a store that is named from here on: as in a commit, so that the log says all that a reader needs.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SharedSegment {
    pub segment: SegmentNo,
    pub geometry: Geometry,
    /// Home of each shard, by shard index, as far as its store knew. They may be elsewhere by now.
    pub homes: Vec<Leg>,
    /// Granules of all its units, if it is packed.
    pub units: Option<NonZeroU32>,
}

/// Where the blocks of a run lie in a store's segment, one behind the other.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum SharedRun {
    /// From this block of the payload on.
    Plain { block: u32 },
    /// As units, of which the first starts at this granule.
    Packed { granule: u32, lengths: StoredLengths },
}

/// Blocks that a store has, too: named there from here on, where the map still names the source.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SharedExtent {
    pub key: Key,
    pub blocks: u32,
    pub source: Source,
    /// The store's.
    pub segment: SegmentNo,
    pub run: SharedRun,
    pub crcs: Vec<BlockCrc>,
}

/// Content that is shared from here on.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Share {
    /// All that extents name, once.
    pub segments: Vec<SharedSegment>,
    pub extents: Vec<SharedExtent>,
}

impl SharedExtent {
    fn is_valid_in(&self, segments: &[SharedSegment]) -> bool {
        let Some(of) = segments.iter().find(|of| of.segment == self.segment) else { return false };
        let blocks = u64::from(self.blocks);
        self.run.lies_in(&of.geometry, blocks) && self.crcs.len() as u64 == blocks && self.source != Source::Direct
    }
}

impl SharedSegment {
    /// It is a store's, and has a shape, and a home for each shard.
    pub fn is_valid(&self) -> bool {
        let granules = u64::from(self.geometry.payload_blocks) * u64::from(BLOCK_GRANULES);
        self.segment.epoch >= STORE_EPOCHS
            && self.geometry.is_valid()
            && self.units.is_none_or(|units| u64::from(units.get()) <= granules)
            && self.homes.len() == usize::from(self.geometry.shard_count())
    }
}

impl SharedRun {
    /// Whether so many blocks of a segment of that shape can lie so.
    pub fn lies_in(&self, geometry: &Geometry, blocks: u64) -> bool {
        let payload_blocks = u64::from(geometry.payload_blocks);
        match self {
            SharedRun::Plain { block } => u64::from(*block) + blocks <= payload_blocks,
            SharedRun::Packed { granule, lengths } => {
                lengths.len() == blocks
                    && lengths.fit_from(*granule)
                    && u64::from(lengths.end_from(*granule)) <= payload_blocks * u64::from(BLOCK_GRANULES)
            }
        }
    }
}

impl Share {
    fn is_valid(&self) -> bool {
        self.segments.iter().all(SharedSegment::is_valid)
            && self.extents.iter().all(|extent| extent.is_valid_in(&self.segments))
    }
}

/// A request that may not be carried out twice. One with the same origin and another content is another request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Call {
    pub association: AssociationId,
    /// Which of the association's.
    pub sequence: u64,
    /// By the numbers of the association's protocol.
    pub procedure: u32,
    pub arguments_crc: u32,
}

/// The answer to one, to be given again to who asks again.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Replied {
    pub call: Call,
    /// In the words of the protocol.
    pub outcome: Vec<u8>,
}

/// Where a run of metadata bytes lies: the segment, self-contained, since it is read before any map is there.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MetaPointer {
    pub segment: SegmentNo,
    pub geometry: Geometry,
    pub homes: Vec<Leg>,
    /// First payload block.
    pub block: u32,
    pub len_bytes: u32,
    pub crc: u32,
}

/// A checkpoint: replay starts after `lsn`, from the state that these runs describe, oldest first.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, Default)]
pub struct Checkpoint {
    pub lsn: Lsn,
    /// The folded base, then the deltas written since.
    pub runs: Vec<MetaPointer>,
}

/// One log entry's meaning.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Record {
    /// Payload follows: `blocks` blocks for the volume blocks from `key` on.
    Write {
        key: Key,
        blocks: u32,
    },
    /// The blocks read as zeroes from here on.
    Discard {
        key: Key,
        blocks: u64,
    },
    Commit(SegmentCommit),
    /// These segments may be deleted: neither the map nor the last durable checkpoint names them.
    Free {
        segments: Vec<SegmentNo>,
    },
    /// Shards of a segment now lie elsewhere (repair and rebuild): (shard index, home).
    Rehome {
        segment: SegmentNo,
        homes: Vec<(u8, Leg)>,
    },
    Checkpoint(Checkpoint),
    /// Fills an LSN and changes nothing.
    Noop,
    /// A snapshot: the layer that a head wrote to is frozen under this name; what follows is written to a new one over it.
    Snapshot {
        head: HeadId,
        frozen: ObjectId,
        live: ObjectId,
        name: String,
        /// Milliseconds since 1970.
        created_ms: u64,
        size_bytes: u64,
    },
    /// The layer's snapshot is not wanted any more.
    DropSnapshot {
        layer: ObjectId,
    },
    /// A new head: what it doesn't say itself, the snapshot `of` says.
    Clone {
        of: ObjectId,
        head: HeadId,
        live: ObjectId,
        /// Under which the operator's records know it.
        id: VolumeId,
        name: String,
        size_bytes: u64,
    },
    /// The clone is not wanted any more, nor are its snapshots.
    DropClone {
        head: HeadId,
    },
    /// Only clones: the size of the volume itself stands in its root.
    ResizeClone {
        head: HeadId,
        size_bytes: u64,
    },
    /// The head is as the snapshot `to` was: what it said since is dropped, and it writes to a new layer.
    Rollback {
        head: HeadId,
        to: ObjectId,
        live: ObjectId,
    },
    /// As `Commit`, of a packed segment.
    CommitPacked(Box<PackedCommit>),
    Share(Box<Share>),
    /// A new head that stands on no snapshot.
    Head {
        head: HeadId,
        live: ObjectId,
        /// Under which the operator's records know it.
        id: VolumeId,
        size_bytes: u64,
    },
    /// As `Write`, by a request that has an answer to be kept.
    WriteReplied {
        key: Key,
        blocks: u32,
        reply: Replied,
    },
    /// Such a request that changed nothing.
    Replied(Replied),
    /// The volume remembers this under that name, in place of what it did; no snapshot has it, and no rollback undoes it.
    Attribute {
        name: String,
        value: Vec<u8>,
        reply: Option<Box<Replied>>,
    },
}

/// Version byte in front of every record that has nothing of what came later.
const RECORD_VERSION: u8 = 1;

/// The records behind `Rollback`, sources in packed segments, and numbers of layers as wide keys have them.
const RECORD_VERSION_WIDE: u8 = 3;

/// Version byte in front of the header of an entry whose payload is encrypted: instance, tag, and the record as above.
const SEALED_VERSION: u8 = 2;

const SEALED_PREFIX_BYTES: usize = 1 + 16 + 16;

/// The header of an entry whose payload is encrypted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SealedHeader<'a> {
    /// The opening that wrote it: a part of its key.
    pub instance: InstanceId,
    /// Of the payload, and of the record.
    pub tag: [u8; 16],
    /// As [`Record::encode`] gives it.
    pub record: &'a [u8],
}

impl SealedHeader<'_> {
    pub fn encode(&self) -> Vec<u8> {
        let instance = self.instance.0.to_le_bytes();
        [&[SEALED_VERSION][..], &instance, &self.tag, self.record].concat()
    }

    /// `None` for a header of another version.
    pub fn decode(bytes: &[u8]) -> Option<SealedHeader<'_>> {
        let (prefix, record) = bytes.split_at_checked(SEALED_PREFIX_BYTES)?;
        let (instance, tag) = prefix[1..].split_at(16);
        let instance = InstanceId(u128::from_le_bytes(instance.try_into().expect("16 bytes")));
        let header = SealedHeader { instance, tag: tag.try_into().expect("16 bytes"), record };
        (prefix[0] == SEALED_VERSION).then_some(header)
    }
}

impl Record {
    /// The oldest version that says all of it.
    fn version(&self) -> u8 {
        match self.feature() {
            None => RECORD_VERSION,
            Some(_) => RECORD_VERSION_WIDE,
        }
    }

    /// The feature that a volume has to use for there to be such a record of it.
    pub fn feature(&self) -> Option<Feature> {
        match self {
            Record::Commit(commit) => {
                let is_packed = |extent: &CommitExtent| matches!(extent.source, Source::Packed { .. });
                commit.extents.iter().any(is_packed).then_some(Feature::Packed)
            }
            Record::CommitPacked(_) => Some(Feature::Packed),
            Record::Share(_) => Some(Feature::Stores),
            Record::Head { .. } => Some(Feature::Heads),
            Record::WriteReplied { .. } | Record::Replied(_) | Record::Attribute { .. } => Some(Feature::Replies),
            Record::Write { .. }
            | Record::Discard { .. }
            | Record::Free { .. }
            | Record::Rehome { .. }
            | Record::Checkpoint(_)
            | Record::Noop
            | Record::Snapshot { .. }
            | Record::DropSnapshot { .. }
            | Record::Clone { .. }
            | Record::DropClone { .. }
            | Record::ResizeClone { .. }
            | Record::Rollback { .. } => None,
        }
    }

    /// The numbers of layers in it; those in keys are not among them.
    fn layers(&mut self) -> [Option<&mut ObjectId>; 2] {
        match self {
            Record::Snapshot { frozen, live, .. } => [Some(frozen), Some(live)],
            Record::DropSnapshot { layer } => [Some(layer), None],
            Record::Clone { of, live, .. } => [Some(of), Some(live)],
            Record::Rollback { to, live, .. } => [Some(to), Some(live)],
            Record::Head { live, .. } => [Some(live), None],
            Record::Write { .. }
            | Record::Discard { .. }
            | Record::Commit(_)
            | Record::Free { .. }
            | Record::Rehome { .. }
            | Record::Checkpoint(_)
            | Record::Noop
            | Record::DropClone { .. }
            | Record::ResizeClone { .. }
            | Record::CommitPacked(_)
            | Record::Share(_)
            | Record::WriteReplied { .. }
            | Record::Replied(_)
            | Record::Attribute { .. } => [None, None],
        }
    }

    /// In a volume with narrow keys.
    pub fn encode(&self) -> Vec<u8> {
        self.encode_in(KeyWidth::Narrow)
    }

    /// In a volume with such keys.
    pub fn encode_in(&self, width: KeyWidth) -> Vec<u8> {
        let version = if width == KeyWidth::Wide { RECORD_VERSION_WIDE } else { self.version() };
        let mut bytes = vec![version];
        if version == RECORD_VERSION {
            bytes.extend_from_slice(&to_postcard(self));
            return bytes;
        }
        let mut said = self.clone();
        for layer in said.layers().into_iter().flatten() {
            *layer = width.widened(*layer).expect("a layer has a number that keys can have");
        }
        bytes.extend_from_slice(&to_postcard(&said));
        bytes
    }

    /// In a volume with narrow keys.
    pub fn decode(bytes: &[u8]) -> Result<Record, FormatError> {
        Record::decode_in(KeyWidth::Narrow, bytes)
    }

    /// In a volume with such keys: that is how its layers are numbered then, whatever they were when it was written.
    pub fn decode_in(width: KeyWidth, bytes: &[u8]) -> Result<Record, FormatError> {
        let (version, body) = bytes.split_first().ok_or(FormatError::Truncated)?;
        if ![RECORD_VERSION, RECORD_VERSION_WIDE].contains(version) {
            return Err(FormatError::Version(u16::from(*version)));
        }
        let mut record: Record = from_postcard(body)?;
        if *version < record.version() {
            return Err(FormatError::Field("record of a later version"));
        }
        for layer in record.layers().into_iter().flatten() {
            let own = match (*version, width) {
                (RECORD_VERSION, KeyWidth::Narrow) => Some(*layer),
                (RECORD_VERSION, KeyWidth::Wide) => KeyWidth::Narrow.widened(*layer),
                _ => width.of_wide(*layer),
            };
            *layer = own.ok_or(FormatError::Field("layer"))?;
        }
        record.check()?;
        Ok(record)
    }

    /// Refuses what does not add up.
    fn check(&self) -> Result<(), FormatError> {
        let (name, is_valid) = match self {
            Record::Commit(commit) => {
                let is_one = |e: &CommitExtent| e.blocks == 1 || !matches!(e.source, Source::Packed { .. });
                let is_payload = commit.blocks() == u64::from(commit.geometry.payload_blocks);
                ("segment commit", commit.adds_up() && is_payload && commit.extents.iter().all(is_one))
            }
            Record::CommitPacked(packed) => {
                let PackedCommit { commit, lengths } = &**packed;
                let are_lengths = lengths.len() == commit.blocks() && lengths.fill(&commit.geometry);
                ("packed commit", commit.adds_up() && are_lengths)
            }
            Record::Share(share) => ("share", share.is_valid()),
            _ => return Ok(()),
        };
        if is_valid { Ok(()) } else { Err(FormatError::Field(name)) }
    }
}

impl SegmentCommit {
    /// Of the volume.
    fn blocks(&self) -> u64 {
        self.extents.iter().map(|extent| u64::from(extent.blocks)).sum()
    }

    /// Its shape is one, each shard has a home, and each block a checksum.
    fn adds_up(&self) -> bool {
        self.geometry.is_valid()
            && self.crcs.len() as u64 == self.blocks()
            && self.homes.len() == usize::from(self.geometry.shard_count())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::Layout;
    use holdfast_base::{DeviceId, NodeId};

    fn commit() -> SegmentCommit {
        let geometry = Geometry::new(Layout::DEFAULT, 3);
        let leg = |n| Leg { node: NodeId(n), device: DeviceId(u128::from(n)) };
        SegmentCommit {
            segment: SegmentNo { epoch: Epoch(4), counter: 9 },
            geometry,
            homes: vec![leg(1), leg(2), leg(3)],
            extents: vec![
                CommitExtent { key: Key(7), blocks: 2, source: Source::Log(Lsn(5)) },
                CommitExtent { key: Key(20), blocks: 1, source: Source::Direct },
            ],
            crcs: vec![1, 2, u32::MAX],
        }
    }

    #[test]
    fn records_read_back() {
        for record in [
            Record::Write { key: Key(1 << 40), blocks: 2 },
            Record::Discard { key: Key(0), blocks: 1 << 38 },
            Record::Commit(commit()),
            Record::Free { segments: vec![commit().segment] },
            Record::Checkpoint(Checkpoint { lsn: Lsn(3), runs: vec![] }),
            Record::Noop,
            Record::Clone {
                of: ObjectId(3),
                head: HeadId(1),
                live: ObjectId(9),
                id: VolumeId(7),
                name: "vm2".to_string(),
                size_bytes: 1 << 30,
            },
            Record::Rollback { head: HeadId::VOLUME, to: ObjectId(3), live: ObjectId(10) },
        ] {
            assert_eq!(Record::decode(&record.encode()), Ok(record));
        }
    }

    fn lengths(bytes: &[u8]) -> StoredLengths {
        StoredLengths::try_from(bytes.to_vec()).expect("they are lengths")
    }

    fn packed_commit() -> PackedCommit {
        let geometry = Geometry::new(Layout::DEFAULT, 32);
        PackedCommit { commit: SegmentCommit { geometry, ..commit() }, lengths: lengths(&[63, 0x40, 0xbf]) }
    }

    fn replied() -> Replied {
        let call = Call { association: AssociationId(9), sequence: 7, procedure: 0x89, arguments_crc: u32::MAX };
        Replied { call, outcome: vec![0, 1, 2] }
    }

    fn share() -> Share {
        let segment = SegmentNo { epoch: STORE_EPOCHS, counter: 5 };
        let source = Source::Packed { segment: commit().segment, granule: 70 };
        let of = |key, run| SharedExtent { key: Key(key), blocks: 2, source, segment, run, crcs: vec![5, 6] };
        let packed = SharedRun::Packed { granule: 3, lengths: lengths(&[0x41, 0x80]) };
        let SegmentCommit { homes, .. } = commit();
        let units = NonZeroU32::new(2000);
        let shared = SharedSegment { segment, geometry: Geometry::new(Layout::DEFAULT, 32), homes, units };
        Share { segments: vec![shared], extents: vec![of(8, packed), of(20, SharedRun::Plain { block: 30 })] }
    }

    /// One at least of each feature.
    fn later_records() -> Vec<Record> {
        let mut unpacked = commit();
        unpacked.extents[1].source = Source::Packed { segment: commit().segment, granule: 99 };
        vec![
            Record::Commit(unpacked),
            Record::CommitPacked(Box::new(packed_commit())),
            Record::Share(Box::new(share())),
            Record::Head { head: HeadId(70_000), live: ObjectId(5), id: VolumeId(7), size_bytes: 4096 },
            Record::WriteReplied { key: Key(1 << 40), blocks: 2, reply: replied() },
            Record::Replied(replied()),
            Record::Attribute { name: "reserve".to_string(), value: vec![9; 40], reply: Some(Box::new(replied())) },
            Record::Attribute { name: String::new(), value: Vec::new(), reply: None },
        ]
    }

    #[test]
    fn what_came_later_reads_back_in_its_version_and_in_none_before() {
        for record in later_records() {
            let mut bytes = record.encode();
            assert_eq!((bytes[0], Record::decode(&bytes).as_ref()), (3, Ok(&record)));
            assert!(record.feature().is_some());
            bytes[0] = 1;
            assert_eq!(Record::decode(&bytes), Err(FormatError::Field("record of a later version")));
        }
    }

    #[test]
    fn layers_have_the_numbers_of_their_volume_however_they_are_written() {
        let (narrow, wide) = (KeyWidth::Narrow, KeyWidth::Wide);
        let of = |n: u32| Record::Rollback { head: HeadId(1), to: ObjectId(3 * n), live: ObjectId(10 * n) };
        assert_eq!((of(1).encode()[0], of(16).encode_in(wide)[0]), (1, 3));
        // A volume whose keys have become wide replays what was written before.
        assert_eq!(Record::decode_in(wide, &of(1).encode()), Ok(of(16)));
        assert_eq!(Record::decode_in(wide, &of(16).encode_in(wide)), Ok(of(16)));
        let head = |n: u32| Record::Head { head: HeadId(1), live: ObjectId(n), id: VolumeId(7), size_bytes: 1 };
        assert_eq!(head(2).encode(), head(32).encode_in(wide));
        assert_eq!(Record::decode_in(wide, &head(2).encode()), Ok(head(32)));
        assert_eq!(Record::decode_in(narrow, &head(33).encode_in(wide)), Err(FormatError::Field("layer")));
        let beyond = Record::DropSnapshot { layer: ObjectId(1 << 28) }.encode();
        assert_eq!(Record::decode_in(wide, &beyond), Err(FormatError::Field("layer")));
        let snapshot = |n: u32| Record::Snapshot {
            head: HeadId(1),
            frozen: ObjectId(n),
            live: ObjectId(2 * n),
            name: "a".to_string(),
            created_ms: 5,
            size_bytes: 6,
        };
        assert_eq!(Record::decode_in(wide, &snapshot(1).encode()), Ok(snapshot(16)));
        let key = Record::Discard { key: Key(1 << 40), blocks: 1 };
        assert_eq!(Record::decode_in(wide, &key.encode_in(wide)), Ok(key), "keys are the same number");
    }

    #[test]
    fn packed_commits_and_shares_that_do_not_add_up_are_refused() {
        let good = packed_commit;
        let refused = |change: &dyn Fn(&mut PackedCommit)| {
            let mut bad = good();
            change(&mut bad);
            let decoded = Record::decode(&Record::CommitPacked(Box::new(bad)).encode());
            assert_eq!(decoded, Err(FormatError::Field("packed commit")));
        };
        refused(&|bad| bad.lengths = lengths(&[63, 0x40]));
        refused(&|bad| bad.commit.crcs.push(1));
        refused(&|bad| bad.commit.extents[0].blocks = 9);
        refused(&|bad| bad.commit.homes.truncate(2));
        refused(&|bad| bad.commit.geometry.payload_blocks = 31);
        refused(&|bad| bad.commit.geometry.stripe_blocks = u32::MAX);
        let refused = |change: &dyn Fn(&mut Share)| {
            let mut bad = share();
            change(&mut bad);
            assert_eq!(Record::decode(&Record::Share(Box::new(bad)).encode()), Err(FormatError::Field("share")));
        };
        let packed = |granule, bytes: &[u8]| SharedRun::Packed { granule, lengths: lengths(bytes) };
        refused(&|bad| bad.segments[0].segment.epoch = Epoch(4));
        refused(&|bad| bad.segments.clear());
        refused(&|bad| bad.segments[0].homes.truncate(1));
        refused(&|bad| bad.segments[0].units = NonZeroU32::new(2049));
        refused(&|bad| bad.segments[0].geometry.stripe_blocks = u32::MAX);
        refused(&|bad| bad.extents[0].segment.counter += 1);
        refused(&|bad| bad.extents[0].source = Source::Direct);
        refused(&|bad| bad.extents[0].blocks = 3);
        refused(&|bad| bad.extents[0].crcs = vec![5]);
        refused(&|bad| bad.extents[0].run = packed(3, &[0x41]));
        // It would cross a stripe; it ends behind the payload; there is no such place.
        refused(&|bad| bad.extents[0].run = packed(1023, &[0x41, 0x80]));
        refused(&|bad| bad.extents[0].run = packed(2046, &[0x41, 0x80]));
        refused(&|bad| bad.extents[0].run = packed(u32::MAX, &[0x41, 0x80]));
        refused(&|bad| bad.extents[1].run = SharedRun::Plain { block: 31 });
        refused(&|bad| bad.extents[1].run = SharedRun::Plain { block: u32::MAX });
        let mut recoded = commit();
        recoded.extents[0].source = Source::Packed { segment: commit().segment, granule: 0 };
        assert_eq!(Record::decode(&Record::Commit(recoded).encode()), Err(FormatError::Field("segment commit")));
    }

    #[test]
    fn a_sealed_header_reads_back_and_is_no_record() {
        let record = Record::Write { key: Key(7), blocks: 2 }.encode();
        let header = SealedHeader { instance: InstanceId(9), tag: [3; 16], record: &record };
        let bytes = header.encode();
        assert_eq!(SealedHeader::decode(&bytes), Some(header));
        assert_eq!(SealedHeader::decode(&bytes[..32]), None);
        assert_eq!(SealedHeader::decode(&[1; 40]), None);
        assert_eq!(Record::decode(&bytes), Err(FormatError::Version(2)));
    }

    #[test]
    fn a_commit_that_does_not_add_up_is_refused() {
        let mut bad = commit();
        bad.crcs.pop();
        assert_eq!(Record::decode(&Record::Commit(bad).encode()), Err(FormatError::Field("segment commit")));
        assert_eq!(Record::decode(&[]), Err(FormatError::Truncated));
        assert_eq!(Record::decode(&[9, 0]), Err(FormatError::Version(9)));
    }
}
