//! The AVX-512 kernel: multiplication by a constant is linear over bits, and GF2P8AFFINEQB applies an 8x8 bit matrix to
//! 64 bytes at once.

use crate::gf::double;
use crate::matrix::Row;
use std::arch::x86_64::{
    __m512i, _mm512_gf2p8affine_epi64_epi8, _mm512_loadu_si512, _mm512_set1_epi64, _mm512_setzero_si512,
    _mm512_storeu_si512, _mm512_xor_si512,
};
use std::ops::Range;

/// Bytes of a vector register.
const VECTOR_BYTES: usize = size_of::<__m512i>();

/// Multiplication by every coefficient as an 8x8 bit matrix, laid out for GF2P8AFFINEQB: 2 KiB.
///
/// The instruction's output bit `i` is the parity of the input byte masked with the matrix's byte `7 - i`. Column `j` of
/// the map is the coefficient times x^j, so bit `j` of byte `7 - i` is bit `i` of that product. (GF2P8MULB is of no use
/// here: its polynomial is fixed at 0x11B.)
static AFFINE: [u64; 256] = {
    let mut matrices = [0; 256];
    let mut coefficient = 0;
    while coefficient < 256 {
        let mut column = coefficient as u8;
        let mut j = 0;
        while j < 8 {
            let mut i = 0;
            while i < 8 {
                let bit = (column >> i & 1) as u64;
                matrices[coefficient] |= bit << (8 * (7 - i) + j);
                i += 1;
            }
            column = double(column);
            j += 1;
        }
        coefficient += 1;
    }
    matrices
};

/// Computes whole blocks of up to four outputs from the start of `range` on; returns where it stopped.
#[target_feature(enable = "avx512f,gfni")]
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
#[target_feature(enable = "avx512f,gfni")]
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
    let mut at = range.start;
    while at + block_bytes <= range.end {
        let mut sums = [[_mm512_setzero_si512(); VECTORS]; ROWS];
        for (index, source) in sources.iter().enumerate() {
            let mut values = [_mm512_setzero_si512(); VECTORS];
            for vector in 0..VECTORS {
                // SAFETY: the block ends at or before `range.end`, which no source is shorter than (asserted above), and
                // `vector` counts the registers within the block. Unaligned loads are meant.
                values[vector] = unsafe { _mm512_loadu_si512(source.as_ptr().add(at + vector * VECTOR_BYTES).cast()) };
            }
            if PLAIN {
                for vector in 0..VECTORS {
                    sums[0][vector] = _mm512_xor_si512(sums[0][vector], values[vector]);
                }
            }
            for row in usize::from(PLAIN)..ROWS {
                let matrix = _mm512_set1_epi64(AFFINE[usize::from(rows[row][index])].cast_signed());
                for vector in 0..VECTORS {
                    let product = _mm512_gf2p8affine_epi64_epi8::<0>(values[vector], matrix);
                    sums[row][vector] = _mm512_xor_si512(sums[row][vector], product);
                }
            }
        }
        for (output, sums) in outputs.iter_mut().zip(&sums) {
            for vector in 0..VECTORS {
                // SAFETY: as for the loads; no output is shorter than `range.end`, and its borrow is exclusive.
                unsafe {
                    _mm512_storeu_si512(output.as_mut_ptr().add(at + vector * VECTOR_BYTES).cast(), sums[vector])
                };
            }
        }
        at += block_bytes;
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gf::mul;

    /// GF2P8AFFINEQB of one byte with a zero constant, after the pseudocode of the instruction's manual page.
    fn affine_byte(matrix: u64, input: u8) -> u8 {
        let rows = matrix.to_le_bytes();
        (0..8).fold(0, |output, i| output | ((rows[7 - i] & input).count_ones() as u8 & 1) << i)
    }

    #[test]
    fn the_bit_matrices_multiply() {
        for (coefficient, &matrix) in (0..=255).zip(&AFFINE) {
            for byte in 0..=255 {
                assert_eq!(affine_byte(matrix, byte), mul(coefficient, byte), "{coefficient} * {byte}");
            }
        }
    }
}
