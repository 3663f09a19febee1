//! A shard on its device: header area, then the shard's blocks.
//!
//! The header area makes a shard understandable without any map or metadata store: grid, volume, segment, geometry,
//! position, checksum of each of the shard's blocks, and the segment's whole index (which volume blocks it holds, with
//! their checksums), so that losing all metadata is a scan and not a loss.
//!
//! ```text
//! 0        4     6     8            12          16
//! +--------+-----+-----+------------+-----------+----------------------------------+
//! | "HFSH" | ver | 0   | body bytes | crc32c of body, seeded with the shard's id | body (postcard), zeroes to 4 KiB |
//! +--------+-----+-----+------------+-----------+----------------------------------+
//! then `shard_blocks` blocks of 4 KiB
//! ```
//! Where the payload is packed, it and the shard's blocks are stored ones: each block of the volume is a unit somewhere in
//! them (see `packing`). The header has the length of each.

use crate::geometry::Geometry;
use crate::packing::StoredLengths;
use crate::record::CommitExtent;
use crate::{FormatError, from_postcard, split_postcard, to_postcard};
use holdfast_base::{BLOCK_BYTES, BlockCrc, GridId, ShardId, seeded_crc32c};
use serde::{Deserialize, Serialize};

/// What a segment holds.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum SegmentIndex {
    /// Volume data: runs of blocks in payload order.
    Data(Vec<CommitExtent>),
    /// Map pages and checkpoints, found by pointers.
    Meta,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ShardHeader {
    pub grid: GridId,
    pub shard: ShardId,
    pub geometry: Geometry,
    /// Checksums of this shard's blocks.
    pub block_crcs: Vec<BlockCrc>,
    pub index: SegmentIndex,
    /// Checksums of the segment's payload blocks; where they are encrypted, the heads of their tags.
    pub payload_crcs: Vec<BlockCrc>,
    /// The payload is encrypted. The version in front of the body says so, or the end of the body.
    #[serde(skip)]
    pub sealed: bool,
    /// The payload is packed: the body ends with this.
    #[serde(skip)]
    pub packed: Option<PackedPayload>,
}

/// More about the units of a packed payload. `payload_crcs` are of the blocks that they give.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PackedPayload {
    /// Parallel to `payload_crcs`.
    pub lengths: StoredLengths,
    /// Eight bytes of the fingerprint of each, a hint of what is alike; in most shards none. In an encrypted volume they
    /// are one message, with its tag.
    pub fingerprints: Vec<u8>,
}

/// Bytes of a fingerprint.
const FINGERPRINT_BYTES: usize = 8;

/// Bytes of the tag behind fingerprints that are encrypted.
const TAG_BYTES: usize = 16;

const SHARD_MAGIC: [u8; 4] = *b"HFSH";
const SHARD_VERSION: u16 = 1;
/// The payload is encrypted; all else is as in version 1.
const SHARD_VERSION_SEALED: u16 = 2;
/// The payload is packed; whether it is encrypted, the body says.
const SHARD_VERSION_PACKED: u16 = 3;
const PREFIX_BYTES: usize = 16;

/// Blocks a header area may have: index and checksums of the largest segment stay below half of it.
pub const HEADER_BLOCKS_MAX: u32 = 256;

fn seed(shard: ShardId) -> [u64; 5] {
    let volume = shard.segment.volume.0;
    [volume as u64, (volume >> 64) as u64, shard.segment.epoch.0, shard.segment.counter, u64::from(shard.index)]
}

impl ShardHeader {
    /// The header area, a whole number of blocks.
    pub fn encode(&self) -> Vec<u8> {
        let mut body = to_postcard(self);
        let version = match (&self.packed, self.sealed) {
            (Some(packed), sealed) => {
                body.extend_from_slice(&to_postcard(&(sealed, packed)));
                SHARD_VERSION_PACKED
            }
            (None, true) => SHARD_VERSION_SEALED,
            (None, false) => SHARD_VERSION,
        };
        let mut bytes = Vec::with_capacity((PREFIX_BYTES + body.len()).next_multiple_of(BLOCK_BYTES));
        bytes.extend_from_slice(&SHARD_MAGIC);
        bytes.extend_from_slice(&version.to_le_bytes());
        bytes.extend_from_slice(&[0; 2]);
        bytes.extend_from_slice(&(body.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&seeded_crc32c(&seed(self.shard), &body).to_le_bytes());
        bytes.extend_from_slice(&body);
        bytes.resize(bytes.len().next_multiple_of(BLOCK_BYTES), 0);
        assert!(bytes.len() <= HEADER_BLOCKS_MAX as usize * BLOCK_BYTES, "shard header of {} bytes", bytes.len());
        bytes
    }

    /// Reads the header area of `shard`; anything that was not written for this very shard fails its checksum.
    pub fn decode(shard: ShardId, bytes: &[u8]) -> Result<ShardHeader, FormatError> {
        let (prefix, rest) = bytes.split_at_checked(PREFIX_BYTES).ok_or(FormatError::Truncated)?;
        if prefix[..4] != SHARD_MAGIC {
            return Err(FormatError::Magic);
        }
        let version = u16::from_le_bytes([prefix[4], prefix[5]]);
        if !(SHARD_VERSION..=SHARD_VERSION_PACKED).contains(&version) {
            return Err(FormatError::Version(version));
        }
        let len = u32::from_le_bytes(prefix[8..12].try_into().expect("four bytes")) as usize;
        let body = rest.get(..len).ok_or(FormatError::Truncated)?;
        if prefix[12..16] != seeded_crc32c(&seed(shard), body).to_le_bytes() {
            return Err(FormatError::Checksum);
        }
        let header = match version {
            SHARD_VERSION_PACKED => {
                let (header, end): (ShardHeader, &[u8]) = split_postcard(body)?;
                let (sealed, packed) = from_postcard(end)?;
                ShardHeader { sealed, packed: Some(packed), ..header }
            }
            _ => ShardHeader { sealed: version == SHARD_VERSION_SEALED, ..from_postcard(body)? },
        };
        if header.shard != shard || !header.geometry.is_valid() {
            return Err(FormatError::Field("shard"));
        }
        if header.block_crcs.len() != header.geometry.shard_blocks() as usize {
            return Err(FormatError::Field("block_crcs"));
        }
        if header.packed.as_ref().is_some_and(|packed| !header.adds_up(packed)) {
            return Err(FormatError::Field("packed"));
        }
        Ok(header)
    }

    /// Lengths and checksums are of the index's blocks, and the units fill a payload of this shape.
    fn adds_up(&self, packed: &PackedPayload) -> bool {
        let SegmentIndex::Data(extents) = &self.index else { return false };
        let blocks: u64 = extents.iter().map(|extent| u64::from(extent.blocks)).sum();
        let units = packed.lengths.len();
        let tag = if self.sealed { TAG_BYTES } else { 0 };
        let fingerprints = packed.fingerprints.len();
        units == blocks
            && self.payload_crcs.len() as u64 == units
            && packed.lengths.fill(&self.geometry)
            && (fingerprints == 0 || fingerprints == units as usize * FINGERPRINT_BYTES + tag)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::Layout;
    use crate::record::Source;
    use holdfast_base::{Epoch, Key, Lsn, SegmentId, VolumeId};

    #[test]
    fn a_header_reads_back_only_as_the_shard_it_was_written_for() {
        let segment = SegmentId { volume: VolumeId(5), epoch: Epoch(1), counter: 2 };
        let geometry = Geometry::new(Layout::DEFAULT, 40);
        let header = ShardHeader {
            grid: GridId(1),
            shard: ShardId { segment, index: 1 },
            geometry,
            block_crcs: vec![7; geometry.shard_blocks() as usize],
            index: SegmentIndex::Meta,
            payload_crcs: vec![9; 40],
            sealed: false,
            packed: None,
        };
        let bytes = header.encode();
        assert_eq!(bytes.len() % BLOCK_BYTES, 0);
        assert_eq!(ShardHeader::decode(header.shard, &bytes), Ok(header.clone()));
        let other = ShardId { segment, index: 2 };
        assert_eq!(ShardHeader::decode(other, &bytes), Err(FormatError::Checksum));
        assert_eq!(ShardHeader::decode(header.shard, &[0; 4096]), Err(FormatError::Magic));
        let sealed = ShardHeader { sealed: true, ..header };
        assert_eq!(ShardHeader::decode(sealed.shard, &sealed.encode()), Ok(sealed.clone()));
        let mut later = sealed.encode();
        later[4] = 4;
        assert_eq!(ShardHeader::decode(sealed.shard, &later), Err(FormatError::Version(4)));
        later[4] = 0;
        assert_eq!(ShardHeader::decode(sealed.shard, &later), Err(FormatError::Version(0)));
    }

    fn packed() -> ShardHeader {
        let segment = SegmentId { volume: VolumeId(5), epoch: Epoch(1), counter: 2 };
        let geometry = Geometry::new(Layout::DEFAULT, 32);
        let lengths = StoredLengths::try_from(vec![63, 0x40, 0x9d]).expect("they are lengths");
        let of = |key, blocks, source| CommitExtent { key: Key(key), blocks, source };
        ShardHeader {
            grid: GridId(1),
            shard: ShardId { segment, index: 1 },
            geometry,
            block_crcs: vec![7; geometry.shard_blocks() as usize],
            index: SegmentIndex::Data(vec![
                of(8, 2, Source::Log(Lsn(4))),
                of(99, 1, Source::Packed { segment: segment.into(), granule: 77 }),
            ]),
            payload_crcs: vec![9; 3],
            sealed: false,
            packed: Some(PackedPayload { lengths, fingerprints: Vec::new() }),
        }
    }

    fn with(change: impl Fn(&mut ShardHeader, &mut PackedPayload)) -> ShardHeader {
        let mut header = packed();
        let mut units = header.packed.clone().expect("it is packed");
        change(&mut header, &mut units);
        ShardHeader { packed: Some(units), ..header }
    }

    #[test]
    fn a_packed_payload_reads_back_with_lengths_and_fingerprints() {
        for header in [
            packed(),
            with(|header, _| header.sealed = true),
            with(|_, units| units.fingerprints = vec![3; 24]),
            with(|header, units| (header.sealed, units.fingerprints) = (true, vec![3; 40])),
        ] {
            let bytes = header.encode();
            assert_eq!((bytes[4], ShardHeader::decode(header.shard, &bytes)), (3, Ok(header)));
        }
    }

    #[test]
    fn a_packed_payload_that_does_not_add_up_is_refused() {
        for (at, bad) in [
            with(|header, _| header.index = SegmentIndex::Meta),
            with(|header, _| header.payload_crcs.truncate(2)),
            with(|_, units| units.lengths = units.lengths.slice(0, 2)),
            with(|_, units| units.lengths = StoredLengths::default()),
            with(|_, units| units.fingerprints = vec![3; 40]),
            with(|header, units| (header.sealed, units.fingerprints) = (true, vec![3; 24])),
            with(|header, _| header.geometry.payload_blocks = 31),
        ]
        .into_iter()
        .enumerate()
        {
            assert_eq!(ShardHeader::decode(bad.shard, &bad.encode()), Err(FormatError::Field("packed")), "{at}");
        }
    }

    #[test]
    fn segments_hold_whatever_units_their_largest_payload_may_have() {
        // 16 MiB of blocks, one of each extent, in a payload of 4 MiB.
        let count = 4096;
        let header = with(|header, units| {
            let source = Source::Packed { segment: header.shard.segment.into(), granule: u32::MAX };
            let of = |at: u64| CommitExtent { key: Key(u64::MAX - 2 * at), blocks: 1, source };
            header.geometry = Geometry::new(Layout::Mirror { copies: 2 }, 1024);
            header.block_crcs = vec![u32::MAX; 1024];
            header.index = SegmentIndex::Data((0..count).map(of).collect());
            header.payload_crcs = vec![u32::MAX; count as usize];
            units.lengths = StoredLengths::try_from(vec![0x4f; count as usize]).expect("they are lengths");
            units.fingerprints = vec![9; count as usize * 8];
        });
        let bytes = header.encode();
        assert!(bytes.len() / BLOCK_BYTES <= HEADER_BLOCKS_MAX as usize / 2, "{} bytes", bytes.len());
        assert_eq!(ShardHeader::decode(header.shard, &bytes), Ok(header));
    }
}
