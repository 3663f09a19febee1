//! Copies of what the metadata store holds, on the devices themselves: each a shard of one block or more, so that devices
//! keep, check, list and return it as they do all other shards.
//!
//! A **root's copy** is of its volume, under the epoch of the root and a number that rises within it ([`root_copy_id`]). A
//! **copy of the records** is of the volume [`RECORDS_VOLUME`], that no grid has; its segment's epoch numbers the copies,
//! its counter the parts of one ([`records_part_id`]).
//!
//! ```text
//! 0        4     6     8          12        16
//! +--------+-----+-----+----------+---------+-------------------------+
//! | "HFCP" | ver | 0   | bytes    | crc32c  | bytes, zeroes to 4 KiB  |
//! +--------+-----+-----+----------+---------+-------------------------+
//! ```

use crate::geometry::{Geometry, Layout};
use crate::segment::{SegmentIndex, ShardHeader};
use crate::{FormatError, from_postcard, to_postcard};
use holdfast_base::{BLOCK_BYTES, Epoch, GridId, SegmentId, ShardId, VolumeId, block_crcs, crc32c};
use serde::{Deserialize, Serialize};

/// No volume has this id: what is kept under it are the grid's records.
pub const RECORDS_VOLUME: VolumeId = VolumeId(u128::MAX);

/// Set in the counters of roots' copies; no volume writes so many segments in an epoch.
const ROOT_COPY: u64 = 1 << 63;

const MAGIC: [u8; 4] = *b"HFCP";
const VERSION: u16 = 1;
const PREFIX_BYTES: usize = 16;

/// Bytes of the records that one shard takes.
pub const PART_BYTES_MAX: usize = (1 << 20) - PREFIX_BYTES;

/// The shard that a root's copy is.
pub fn root_copy_id(volume: VolumeId, epoch: Epoch, sequence: u64) -> ShardId {
    assert!(sequence < ROOT_COPY, "a root is changed {sequence} times in an epoch");
    ShardId { segment: SegmentId { volume, epoch, counter: ROOT_COPY | sequence }, index: 0 }
}

/// Epoch and sequence of the root that the shard is a copy of.
pub fn root_copy_of(segment: SegmentId) -> Option<(Epoch, u64)> {
    (segment.counter & ROOT_COPY != 0).then_some((segment.epoch, segment.counter & !ROOT_COPY))
}

/// The shard that holds a part of a copy of the records.
pub fn records_part_id(copy: u64, part: u64) -> ShardId {
    ShardId { segment: SegmentId { volume: RECORDS_VOLUME, epoch: Epoch(copy), counter: part }, index: 0 }
}

/// Whether a shard is a copy of metadata, and no part of a volume's data.
pub fn is_copy(segment: SegmentId) -> bool {
    segment.volume == RECORDS_VOLUME || root_copy_of(segment).is_some()
}

/// The whole shard that holds `bytes`: how many blocks its header area has, and that area with the blocks after it.
pub fn encode(grid: GridId, shard: ShardId, bytes: &[u8]) -> (u32, Vec<u8>) {
    let mut data = Vec::with_capacity((PREFIX_BYTES + bytes.len()).next_multiple_of(BLOCK_BYTES));
    data.extend_from_slice(&MAGIC);
    data.extend_from_slice(&VERSION.to_le_bytes());
    data.extend_from_slice(&[0; 2]);
    data.extend_from_slice(&u32::try_from(bytes.len()).expect("a copy's part is short").to_le_bytes());
    data.extend_from_slice(&crc32c(bytes).to_le_bytes());
    data.extend_from_slice(bytes);
    data.resize(data.len().next_multiple_of(BLOCK_BYTES), 0);
    let crcs = block_crcs(&data);
    let geometry = Geometry::new(Layout::Mirror { copies: 1 }, crcs.len() as u32);
    let header = ShardHeader {
        grid,
        shard,
        geometry,
        block_crcs: crcs.clone(),
        index: SegmentIndex::Meta,
        payload_crcs: crcs,
        sealed: false,
        packed: None,
    };
    let header = header.encode();
    ((header.len() / BLOCK_BYTES) as u32, [header, data].concat())
}

/// A copy of the records in parts: the first is its head, which is written last, so that a copy which was cut short has none.
pub fn split(bytes: &[u8]) -> Vec<Vec<u8>> {
    let parts: Vec<&[u8]> = bytes.chunks(PART_BYTES_MAX).collect();
    let head = CopyHead { parts: parts.len() as u32, bytes: bytes.len() as u64, crc32c: crc32c(bytes) };
    [to_postcard(&head)].into_iter().chain(parts.into_iter().map(<[u8]>::to_vec)).collect()
}

/// What a copy's parts hold, its head first.
pub fn join(parts: &[Vec<u8>]) -> Result<Vec<u8>, FormatError> {
    let (head, parts) = parts.split_first().ok_or(FormatError::Truncated)?;
    let head: CopyHead = from_postcard(head)?;
    let bytes = parts.concat();
    if parts.len() != head.parts as usize || bytes.len() as u64 != head.bytes {
        return Err(FormatError::Truncated);
    }
    if crc32c(&bytes) != head.crc32c {
        return Err(FormatError::Checksum);
    }
    Ok(bytes)
}

#[derive(Serialize, Deserialize)]
struct CopyHead {
    /// Beside this one.
    parts: u32,
    bytes: u64,
    crc32c: u32,
}

/// What the blocks of such a shard hold.
pub fn decode(data: &[u8]) -> Result<&[u8], FormatError> {
    let (prefix, rest) = data.split_at_checked(PREFIX_BYTES).ok_or(FormatError::Truncated)?;
    if prefix[..4] != MAGIC {
        return Err(FormatError::Magic);
    }
    let version = u16::from_le_bytes([prefix[4], prefix[5]]);
    if version != VERSION {
        return Err(FormatError::Version(version));
    }
    let word = |at: usize| u32::from_le_bytes(prefix[at..at + 4].try_into().expect("four bytes"));
    let bytes = rest.get(..word(8) as usize).ok_or(FormatError::Truncated)?;
    if word(12) != crc32c(bytes) {
        return Err(FormatError::Checksum);
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_of_the_records_is_whole_or_none() {
        for len in [0, 5, PART_BYTES_MAX, PART_BYTES_MAX + 1] {
            let bytes: Vec<u8> = (0..len).map(|i| i as u8).collect();
            let mut parts = split(&bytes);
            assert_eq!(join(&parts), Ok(bytes));
            if len > 0 {
                parts[1][0] ^= 1;
                assert_eq!(join(&parts), Err(FormatError::Checksum));
                parts.pop();
                assert_eq!(join(&parts), Err(FormatError::Truncated));
            }
        }
        assert_eq!(join(&[]), Err(FormatError::Truncated));
    }

    #[test]
    fn a_copy_reads_back_and_damage_is_seen() {
        let shard = root_copy_id(VolumeId(7), Epoch(3), 9);
        assert_eq!((root_copy_of(shard.segment), is_copy(shard.segment)), (Some((Epoch(3), 9)), true));
        let segment = SegmentId { volume: VolumeId(7), epoch: Epoch(3), counter: 9 };
        assert_eq!((root_copy_of(segment), is_copy(segment)), (None, false));
        for len in [0, 1, 4080, 4081, 9000] {
            let bytes = vec![5; len];
            let (header_blocks, whole) = encode(GridId(1), shard, &bytes);
            let (header, data) = whole.split_at(header_blocks as usize * BLOCK_BYTES);
            let header = ShardHeader::decode(shard, header).unwrap();
            assert_eq!(header.block_crcs.len() * BLOCK_BYTES, data.len());
            assert_eq!(decode(data), Ok(&bytes[..]));
        }
        let (_, mut whole) = encode(GridId(1), shard, &[5; 10]);
        whole[BLOCK_BYTES + 20] ^= 1;
        assert_eq!(decode(&whole[BLOCK_BYTES..]), Err(FormatError::Checksum));
        whole[BLOCK_BYTES + 4] = 2;
        assert_eq!(decode(&whole[BLOCK_BYTES..]), Err(FormatError::Version(2)));
        assert_eq!(decode(&[0; 4]), Err(FormatError::Truncated));
        let (header_blocks, whole) = encode(GridId(1), records_part_id(4, 0), &vec![1; PART_BYTES_MAX]);
        assert_eq!(whole.len() - header_blocks as usize * BLOCK_BYTES, 1 << 20);
    }
}
