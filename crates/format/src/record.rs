//! Entries of a volume's log: everything that changes the volume, in LSN order.
//!
//! A node keeps an entry as opaque header bytes plus payload blocks with their checksums; only controllers read headers.
//! Live operation and replay apply the same records by the same code.

use crate::geometry::Geometry;
use crate::ledger::Leg;
use crate::{FormatError, from_postcard, to_postcard};
use holdfast_base::{BlockCrc, Epoch, HeadId, InstanceId, Key, Lsn, ObjectId, SegmentId, VolumeId};
use serde::{Deserialize, Serialize};

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

/// What an extent of a commit replaces; it is applied only where the map still names this (protocol rule 12).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Source {
    /// Data destaged from the log entry with this LSN.
    Log(Lsn),
    /// Data moved by the cleaner: payload block in the segment it came from.
    Segment { segment: SegmentNo, block: u32 },
    /// A bulk write that never was in the log: it takes effect with this record's LSN, unconditionally.
    Bypass,
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
}

/// Version byte in front of every record.
const RECORD_VERSION: u8 = 1;

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
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![RECORD_VERSION];
        bytes.extend_from_slice(&to_postcard(self));
        bytes
    }

    pub fn decode(bytes: &[u8]) -> Result<Record, FormatError> {
        let (version, body) = bytes.split_first().ok_or(FormatError::Truncated)?;
        if *version != RECORD_VERSION {
            return Err(FormatError::Version(u16::from(*version)));
        }
        let record: Record = from_postcard(body)?;
        if let Record::Commit(commit) = &record {
            let blocks: u64 = commit.extents.iter().map(|e| u64::from(e.blocks)).sum();
            let geometry = &commit.geometry;
            if !geometry.is_valid()
                || blocks != u64::from(geometry.payload_blocks)
                || commit.crcs.len() as u64 != blocks
                || commit.homes.len() != usize::from(geometry.shard_count())
            {
                return Err(FormatError::Field("segment commit"));
            }
        }
        Ok(record)
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
                CommitExtent { key: Key(20), blocks: 1, source: Source::Bypass },
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
