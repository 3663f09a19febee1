//! CRC32C (Castagnoli, RFC 3720 appendix B.4): of every block, kept apart from the block, and of every header.

use crate::units::BLOCK_BYTES;

/// CRC32C of one 4 KiB block of a volume, from the controller that received it to the reader that checks it.
pub type BlockCrc = u32;

/// CRC32C of `bytes`. `crc32c(b"123456789") == 0xE306_9283`.
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// CRC32C of `bytes`, tied to where and when they were written: stale or misdirected bytes carry another seed and
/// fail the check (protocol rule 11). The seed's words are hashed, not added, so that related seeds don't cancel.
pub fn seeded_crc32c(seed: &[u64], bytes: &[u8]) -> u32 {
    crc32c(bytes) ^ seed_mask(seed)
}

/// What [`seeded_crc32c`] folds into the plain checksum.
pub fn seed_mask(seed: &[u64]) -> u32 {
    let mut h = 0x243f_6a88_85a3_08d3_u64;
    for word in seed {
        h = (h ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        h ^= h >> 29;
    }
    (h ^ (h >> 32)) as u32
}

/// Checksums of each block of `bytes`, whose length is a whole number of blocks.
pub fn block_crcs(bytes: &[u8]) -> Vec<BlockCrc> {
    assert!(bytes.len().is_multiple_of(BLOCK_BYTES), "{} bytes are not whole blocks", bytes.len());
    bytes.chunks_exact(BLOCK_BYTES).map(crc32c).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_polynomial_is_castagnolis() {
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
        // RFC 3720 B.4: 32 bytes of zeroes, and of ones.
        assert_eq!(crc32c(&[0; 32]), 0x8A91_36AA);
        assert_eq!(crc32c(&[0xff; 32]), 0x62A8_AB43);
    }

    #[test]
    fn another_seed_is_another_checksum() {
        assert_ne!(seeded_crc32c(&[1, 2], b"abc"), seeded_crc32c(&[2, 1], b"abc"));
        assert_ne!(seeded_crc32c(&[0], b"abc"), seeded_crc32c(&[0, 0], b"abc"));
    }
}
