//! Sums of products over whole shards: the one inner loop of encoding and reconstruction, in three implementations.
//!
//! Role: [`combine`] sets every output to the sum of all sources, each times its coefficient. It checks shapes and the
//! processor's features once per call; the implementations work through whole blocks of a range and say how far they
//! came, and the portable one finishes what is left.
//!
//! Invariants
//! 1. An implementation runs only on a processor that has its instructions (asserted in [`combine`] on every call).
//! 2. Every source is read once per [`OUTPUTS_PER_PASS`] outputs; where more passes are needed, the rounds of
//!    [`ROUND_BYTES`] keep what is read again in the first-level cache.
//! 3. The kernel in use multiplies all 65536 pairs of bytes as the field does (asserted when it is selected).

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod avx2;
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod gfni;
mod portable;

use crate::gf;
use crate::matrix::{Row, SHARDS_MAX};
use std::fmt;
use std::ops::Range;
use std::sync::OnceLock;

/// Outputs made in one pass over the sources: what fits into vector registers with two blocks each.
const OUTPUTS_PER_PASS: usize = 4;

/// Bytes of each shard that are finished before the next ones are begun, where sources are read more than once: all of
/// [`SHARDS_MAX`] together fill a first-level cache of 32 KiB.
const ROUND_BYTES: usize = 2048;

/// An implementation, and the instructions it needs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Kernel {
    /// Doubling and exclusive or, byte by byte in the source and as wide as the compiler makes it: any processor.
    Portable,
    /// Nibble tables looked up by byte shuffles: AVX2.
    Avx2,
    /// Bit matrices applied by GF2P8AFFINEQB to 64 bytes at once: AVX-512F and GFNI.
    Avx512Gfni,
}

impl Kernel {
    /// All kernels, the fastest last.
    pub const ALL: [Kernel; 3] = [Kernel::Portable, Kernel::Avx2, Kernel::Avx512Gfni];

    /// Whether this processor, under this operating system, can run it.
    pub fn is_available(self) -> bool {
        match self {
            Kernel::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx2 => is_x86_feature_detected!("avx2"),
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx512Gfni => is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("gfni"),
            #[cfg(not(target_arch = "x86_64"))]
            Kernel::Avx2 | Kernel::Avx512Gfni => false,
        }
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Kernel::Portable => "portable",
            Kernel::Avx2 => "avx2",
            Kernel::Avx512Gfni => "avx512-gfni",
        })
    }
}

/// The kernel that this process encodes and reconstructs with: the fastest available one.
pub fn kernel_in_use() -> Kernel {
    static SELECTED: OnceLock<Kernel> = OnceLock::new();
    *SELECTED.get_or_init(|| {
        let fastest = Kernel::ALL.into_iter().rfind(|kernel| kernel.is_available());
        let kernel = fastest.expect("the portable kernel is always available");
        check_products(kernel);
        kernel
    })
}

/// Panics unless the kernel multiplies every pair of bytes correctly: parity that is wrong is noticed only when it is
/// needed, so a processor, or a hypervisor's emulation of one, that fails here must not encode anything.
fn check_products(kernel: Kernel) {
    let bytes: [u8; 256] = std::array::from_fn(|byte| byte as u8);
    for coefficient in 0..=255 {
        let mut row = [0; SHARDS_MAX];
        row[0] = coefficient;
        let mut products = [0; 256];
        combine(kernel, &[row], &[&bytes], &mut [&mut products]);
        let correct = bytes.iter().zip(products).all(|(&byte, product)| product == gf::mul(coefficient, byte));
        assert!(correct, "the {kernel} kernel multiplies by {coefficient} wrongly on this processor");
    }
}

/// Sets output `i` to the sum over `j` of `rows[i][j]` times `sources[j]`.
pub(crate) fn combine(kernel: Kernel, rows: &[Row], sources: &[&[u8]], outputs: &mut [&mut [u8]]) {
    assert!((1..=SHARDS_MAX).contains(&sources.len()));
    assert!(!rows.is_empty() && rows.len() == outputs.len());
    let shard_bytes = outputs[0].len();
    let one_length = sources.iter().all(|source| source.len() == shard_bytes)
        && outputs.iter().all(|output| output.len() == shard_bytes);
    assert!(one_length, "shards must be all of one length");
    assert!(kernel.is_available(), "this processor lacks the instructions of the {kernel} kernel");

    let single_pass = kernel != Kernel::Portable && rows.len() <= OUTPUTS_PER_PASS;
    let round_bytes = if single_pass { shard_bytes.max(1) } else { ROUND_BYTES };
    for start in (0..shard_bytes).step_by(round_bytes) {
        let range = start..shard_bytes.min(start + round_bytes);
        for (rows, outputs) in rows.chunks(OUTPUTS_PER_PASS).zip(outputs.chunks_mut(OUTPUTS_PER_PASS)) {
            let done = combine_blocks(kernel, rows, sources, outputs, range.clone());
            assert!(done <= range.end);
            if done < range.end {
                portable::combine(rows, sources, outputs, done..range.end);
            }
        }
    }
}

/// Whole blocks from the start of the range; returns where it stopped.
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
fn combine_blocks(
    kernel: Kernel,
    rows: &[Row],
    sources: &[&[u8]],
    outputs: &mut [&mut [u8]],
    range: Range<usize>,
) -> usize {
    match kernel {
        Kernel::Portable => range.start,
        // SAFETY: `combine` asserted that the kernel is available, so the processor has AVX2.
        Kernel::Avx2 => unsafe { avx2::combine(rows, sources, outputs, range) },
        // SAFETY: `combine` asserted that the kernel is available, so the processor has AVX-512F and GFNI.
        Kernel::Avx512Gfni => unsafe { gfni::combine(rows, sources, outputs, range) },
    }
}

/// No processor of this architecture has another kernel than the portable one, which starts where this stops.
#[cfg(not(target_arch = "x86_64"))]
fn combine_blocks(_: Kernel, _: &[Row], _: &[&[u8]], _: &mut [&mut [u8]], range: Range<usize>) -> usize {
    range.start
}

/// Whether the first output is nothing but the exclusive or of the sources.
#[cfg(target_arch = "x86_64")]
fn starts_plain(rows: &[Row], sources: &[&[u8]]) -> bool {
    rows[0][..sources.len()].iter().all(|&coefficient| coefficient == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_available_kernel_multiplies_all_bytes_correctly() {
        Kernel::ALL.into_iter().filter(|kernel| kernel.is_available()).for_each(check_products);
    }

    #[test]
    fn the_kernel_in_use_is_the_fastest_available() {
        let kernel = kernel_in_use();
        assert!(kernel.is_available());
        assert!(Kernel::ALL.into_iter().filter(|other| other.is_available()).all(|other| other <= kernel));
    }

    #[test]
    fn a_kernel_that_the_processor_lacks_is_never_run() {
        for kernel in Kernel::ALL.into_iter().filter(|kernel| !kernel.is_available()) {
            let run = move || combine(kernel, &[[1; SHARDS_MAX]], &[&[0; 64]], &mut [&mut [0; 64]]);
            assert!(std::panic::catch_unwind(run).is_err(), "{kernel}");
        }
    }
}
