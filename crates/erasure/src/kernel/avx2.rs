//! The AVX2 kernel: a product is the exclusive or of two 16-entry lookups, one per half of the byte, and a byte shuffle
//! does 32 lookups at once.

use crate::gf::mul;
use crate::matrix::Row;
use std::arch::x86_64::{
    __m256i, _mm_loadu_si128, _mm256_and_si256, _mm256_broadcastsi128_si256, _mm256_loadu_si256, _mm256_set1_epi8,
    _mm256_setzero_si256, _mm256_shuffle_epi8, _mm256_srli_epi64, _mm256_storeu_si256, _mm256_xor_si256,
};
use std::ops::Range;

/// Bytes of a vector register.
const VECTOR_BYTES: usize = size_of::<__m256i>();

/// Products of one coefficient with every low and every high half of a byte, as a byte shuffle looks them up.
#[repr(C, align(32))]
struct Nibbles {
    /// `low[n]` is the coefficient times `n`.
    low: [u8; 16],
    /// `high[n]` is the coefficient times `n << 4`.
    high: [u8; 16],
}

/// The shuffle tables of every coefficient: 8 KiB.
static NIBBLES: [Nibbles; 256] = {
    let mut tables = [const { Nibbles { low: [0; 16], high: [0; 16] } }; 256];
    let mut coefficient = 0;
    while coefficient < 256 {
        let mut n = 0;
        while n < 16 {
            tables[coefficient].low[n] = mul(coefficient as u8, n as u8);
            tables[coefficient].high[n] = mul(coefficient as u8, (n as u8) << 4);
            n += 1;
        }
        coefficient += 1;
    }
    tables
};

/// Computes whole blocks of up to four outputs from the start of `range` on; returns where it stopped.
#[target_feature(enable = "avx2")]
pub(super) fn combine(rows: &[Row], sources: &[&[u8]], outputs: &mut [&mut [u8]], range: Range<usize>) -> usize {
    let plain = super::starts_plain(rows, sources);
    match (rows.len(), plain) {
        (1, true) => blocks::<1, true, 4>(rows, sources, outputs, range),
        (1, false) => blocks::<1, false, 4>(rows, sources, outputs, range),
        (2, true) => blocks::<2, true, 2>(rows, sources, outputs, range),
        (2, false) => blocks::<2, false, 2>(rows, sources, outputs, range),
        (3, true) => blocks::<3, true, 2>(rows, sources, outputs, range),
        (3, false) => blocks::<3, false, 2>(rows, sources, outputs, range),
        (4, true) => blocks::<4, true, 2>(rows, sources, outputs, range),
        (4, false) => blocks::<4, false, 2>(rows, sources, outputs, range),
        (count, _) => unreachable!("{count} outputs in one pass"),
    }
}

/// Blocks of `VECTORS` registers for each of `ROWS` outputs; `PLAIN` when the first output's coefficients are all ones.
///
/// Loops over indices, for the compiler to unroll and keep the arrays in registers: iterator adapters lack the target
/// feature, and where one isn't inlined everything goes through memory, several times slower.
#[expect(clippy::needless_range_loop)]
#[target_feature(enable = "avx2")]
fn blocks<const ROWS: usize, const PLAIN: bool, const VECTORS: usize>(
    rows: &[Row],
    sources: &[&[u8]],
    outputs: &mut [&mut [u8]],
    range: Range<usize>,
) -> usize {
    assert!(rows.len() == ROWS && outputs.len() == ROWS);
    assert!(sources.iter().all(|source| source.len() >= range.end));
    assert!(outputs.iter().all(|output| output.len() >= range.end));
    let block_bytes = VECTORS * VECTOR_BYTES;
    let low_half = _mm256_set1_epi8(0x0F);
    let mut at = range.start;
    while at + block_bytes <= range.end {
        let mut sums = [[_mm256_setzero_si256(); VECTORS]; ROWS];
        for (index, source) in sources.iter().enumerate() {
            let mut values = [_mm256_setzero_si256(); VECTORS];
            for vector in 0..VECTORS {
                // SAFETY: the block ends at or before `range.end`, which no source is shorter than (asserted above), and
                // `vector` counts the registers within the block. Unaligned loads are meant.
                values[vector] = unsafe { _mm256_loadu_si256(source.as_ptr().add(at + vector * VECTOR_BYTES).cast()) };
            }
            if PLAIN {
                for vector in 0..VECTORS {
                    sums[0][vector] = _mm256_xor_si256(sums[0][vector], values[vector]);
                }
            }
            let mut lows = values;
            let mut highs = values;
            for vector in 0..VECTORS {
                lows[vector] = _mm256_and_si256(values[vector], low_half);
                highs[vector] = _mm256_and_si256(_mm256_srli_epi64::<4>(values[vector]), low_half);
            }
            for row in usize::from(PLAIN)..ROWS {
                let nibbles = &NIBBLES[usize::from(rows[row][index])];
                let low_products = broadcast(&nibbles.low);
                let high_products = broadcast(&nibbles.high);
                for vector in 0..VECTORS {
                    let low = _mm256_shuffle_epi8(low_products, lows[vector]);
                    let high = _mm256_shuffle_epi8(high_products, highs[vector]);
                    sums[row][vector] = _mm256_xor_si256(sums[row][vector], _mm256_xor_si256(low, high));
                }
            }
        }
        for (output, sums) in outputs.iter_mut().zip(&sums) {
            for vector in 0..VECTORS {
                // SAFETY: as for the loads; no output is shorter than `range.end`, and its borrow is exclusive.
                unsafe {
                    _mm256_storeu_si256(output.as_mut_ptr().add(at + vector * VECTOR_BYTES).cast(), sums[vector])
                };
            }
        }
        at += block_bytes;
    }
    at
}

/// The table in both halves of a register, as the shuffle wants it.
#[target_feature(enable = "avx2")]
fn broadcast(table: &[u8; 16]) -> __m256i {
    // SAFETY: the reference is to 16 readable bytes, and the load may be unaligned.
    _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(table.as_ptr().cast()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_two_lookups_add_up_to_the_product() {
        for (coefficient, nibbles) in (0..=255).zip(&NIBBLES) {
            for byte in 0..=255 {
                let sum = nibbles.low[usize::from(byte & 15)] ^ nibbles.high[usize::from(byte >> 4)];
                assert_eq!(sum, mul(coefficient, byte), "{coefficient} * {byte}");
            }
        }
    }
}
