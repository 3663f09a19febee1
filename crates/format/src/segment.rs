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

use crate::geometry::Geometry;
use crate::record::CommitExtent;
use crate::{FormatError, from_postcard, to_postcard};
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
    /// The payload is encrypted. The version in front of the body says so.
    #[serde(skip)]
    pub sealed: bool,
}

const SHARD_MAGIC: [u8; 4] = *b"HFSH";
const SHARD_VERSION: u16 = 1;
/// The payload is encrypted; all else is as in version 1.
const SHARD_VERSION_SEALED: u16 = 2;
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
        let body = to_postcard(self);
        let mut bytes = Vec::with_capacity((PREFIX_BYTES + body.len()).next_multiple_of(BLOCK_BYTES));
        bytes.extend_from_slice(&SHARD_MAGIC);
        let version = if self.sealed { SHARD_VERSION_SEALED } else { SHARD_VERSION };
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
        if version != SHARD_VERSION && version != SHARD_VERSION_SEALED {
            return Err(FormatError::Version(version));
        }
        let len = u32::from_le_bytes(prefix[8..12].try_into().expect("four bytes")) as usize;
        let body = rest.get(..len).ok_or(FormatError::Truncated)?;
        if prefix[12..16] != seeded_crc32c(&seed(shard), body).to_le_bytes() {
            return Err(FormatError::Checksum);
        }
        let header = ShardHeader { sealed: version == SHARD_VERSION_SEALED, ..from_postcard(body)? };
        if header.shard != shard || !header.geometry.is_valid() {
            return Err(FormatError::Field("shard"));
        }
        if header.block_crcs.len() != header.geometry.shard_blocks() as usize {
            return Err(FormatError::Field("block_crcs"));
        }
        Ok(header)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::Layout;
    use holdfast_base::{Epoch, SegmentId, VolumeId};

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
        later[4] = 3;
        assert_eq!(ShardHeader::decode(sealed.shard, &later), Err(FormatError::Version(3)));
    }
}
