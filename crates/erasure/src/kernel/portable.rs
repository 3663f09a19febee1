//! The kernel for any processor, and for the bytes that fill no whole block of the others.
//!
//! Horner's rule over the bits of the coefficients: from the highest bit to the lowest, double the output and add every
//! source whose coefficient has that bit. An output costs seven doublings however many sources it has, and none at all
//! where every coefficient is one. Both steps are loops over bytes that compilers turn into vector code (SSE2, NEON),
//! and are three times as fast as looking products up byte by byte.

use crate::gf::double;
use crate::matrix::Row;
use std::ops::Range;

/// Computes `range` of every output.
pub(super) fn combine(rows: &[Row], sources: &[&[u8]], outputs: &mut [&mut [u8]], range: Range<usize>) {
    for (row, output) in rows.iter().zip(outputs) {
        combine_one(&row[..sources.len()], sources, &mut output[range.clone()], range.start);
    }
}

/// Computes one output from the sources' bytes from `start` on.
fn combine_one(row: &[u8], sources: &[&[u8]], output: &mut [u8], start: usize) {
    output.fill(0);
    let all_bits = row.iter().fold(0, |bits, coefficient| bits | coefficient);
    let bit_count = u8::BITS - all_bits.leading_zeros();
    for bit in (0..bit_count).rev() {
        // Nothing was added yet before the highest bit.
        if bit + 1 < bit_count {
            output.iter_mut().for_each(|byte| *byte = double(*byte));
        }
        for (source, _) in sources.iter().zip(row).filter(|&(_, coefficient)| coefficient >> bit & 1 == 1) {
            output.iter_mut().zip(&source[start..]).for_each(|(byte, addend)| *byte ^= addend);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gf::mul;
    use crate::matrix::SHARDS_MAX;

    #[test]
    fn only_the_range_is_written() {
        let source: [u8; 40] = std::array::from_fn(|byte| (byte * 7) as u8);
        let mut row = [0; SHARDS_MAX];
        row[..2].copy_from_slice(&[0x53, 0xCA]);
        let mut output = [0xEE; 40];
        combine(&[row], &[&source, &source], &mut [&mut output], 3..38);
        assert_eq!([output[2], output[38]], [0xEE; 2]);
        assert!((3..38).all(|at| output[at] == mul(0x53 ^ 0xCA, source[at])));
    }
}
