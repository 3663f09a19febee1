//! Systematic Reed-Solomon codes over GF(2^8): `k` data shards, `m` parity shards, and any `k` of them give all others.
//!
//! Role: pure functions over the caller's buffers. Nothing here allocates, keeps state between calls, knows what a
//! segment is, or checks that sources hold what was once written: a wrong source gives a wrong shard, so verify the
//! checksums of sources before and of the result after.
//!
//! The code, which is part of the on-disk format:
//!
//! | what | value |
//! | --- | --- |
//! | field | GF(2^8) modulo x^8 + x^4 + x^3 + x^2 + 1 (0x11D), generator 2 |
//! | shards | `0..k` are the data unchanged, `k..k+m` the parity |
//! | byte `b` of parity `i` | sum over `j` of `P[i][j]` times byte `b` of data shard `j` |
//! | `P[i][j]` | `(x_0+y_j)(x_i+y_0) / ((x_i+y_j)(x_0+y_0))` with `x_i = 16+i`, `y_j = j` |
//!
//! `P` is Cauchy's matrix scaled so that its first row and first column are ones: one parity shard is the exclusive or
//! of the data, and a 1+m code is m + 1 copies. It doesn't depend on `k` and `m`. `matrix` says why it always inverts.
//!
//! Invariants
//! 1. Bytes at different offsets never mix: shards may be cut anywhere and coded piecewise.
//! 2. All kernels give the same bytes (`tests/properties.rs`; and each process multiplies all pairs of bytes with the
//!    kernel that it selects before the first use).
//!
//! Limits: `k + m` is at most [`SHARDS_MAX`]. Shards have any length, zero included, and any alignment.
//!
//! Faults: shapes that come from elsewhere (a geometry, the set of sources) are refused with an error; buffers of the
//! wrong number or length given to [`Code::encode`] are a bug and panic.

#![deny(unsafe_code)]

mod gf;
mod kernel;
mod matrix;

pub use kernel::{Kernel, kernel_in_use};
pub use matrix::SHARDS_MAX;

use matrix::PARITY;

/// A geometry that no code has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum GeometryError {
    #[error("a code needs at least one data shard")]
    NoDataShards,
    #[error("a code needs at least one parity shard")]
    NoParityShards,
    #[error("{data_shards}+{parity_shards} is more than {SHARDS_MAX} shards")]
    TooManyShards { data_shards: u8, parity_shards: u8 },
}

/// Sources from which a shard can't be rebuilt.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ReconstructError {
    #[error("{given_count} sources were given where exactly {needed_count} are needed")]
    SourceCount { given_count: usize, needed_count: usize },
    #[error("shard {index} doesn't exist in a code of {shard_count} shards")]
    UnknownShard { index: u8, shard_count: u8 },
    #[error("shard {index} was given twice")]
    RepeatedSource { index: u8 },
    #[error("shard {index} has {given_bytes} bytes where the output has {needed_bytes}")]
    SourceLength { index: u8, given_bytes: usize, needed_bytes: usize },
}

/// One k+m code.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Code {
    data_shards: u8,
    parity_shards: u8,
}

impl Code {
    pub fn new(data_shards: u8, parity_shards: u8) -> Result<Code, GeometryError> {
        if data_shards == 0 {
            return Err(GeometryError::NoDataShards);
        }
        if parity_shards == 0 {
            return Err(GeometryError::NoParityShards);
        }
        if usize::from(data_shards) + usize::from(parity_shards) > SHARDS_MAX {
            return Err(GeometryError::TooManyShards { data_shards, parity_shards });
        }
        Ok(Code { data_shards, parity_shards })
    }

    pub fn data_shards(&self) -> u8 {
        self.data_shards
    }

    pub fn parity_shards(&self) -> u8 {
        self.parity_shards
    }

    pub fn shards(&self) -> u8 {
        self.data_shards + self.parity_shards
    }

    /// Fills `parity` from `data`: as many shards of each as the code has, all of one length.
    pub fn encode(&self, data: &[&[u8]], parity: &mut [&mut [u8]]) {
        self.encode_with(kernel_in_use(), data, parity);
    }

    /// Rebuilds shard `want` into `out` from exactly as many `sources` as the code has data shards, given in any order
    /// as index and bytes. Data and parity shards serve alike, on either side; a source that is wanted is copied.
    /// After an error `out` is untouched.
    pub fn reconstruct(&self, sources: &[(u8, &[u8])], want: u8, out: &mut [u8]) -> Result<(), ReconstructError> {
        self.reconstruct_with(kernel_in_use(), sources, want, out)
    }

    /// [`Code::encode`] with a kernel of the caller's choice, for tests and benches. Panics where this processor lacks it.
    #[doc(hidden)]
    pub fn encode_with(&self, kernel: Kernel, data: &[&[u8]], parity: &mut [&mut [u8]]) {
        assert_eq!(data.len(), usize::from(self.data_shards), "wrong number of data shards");
        assert_eq!(parity.len(), usize::from(self.parity_shards), "wrong number of parity shards");
        kernel::combine(kernel, &PARITY[..parity.len()], data, parity);
    }

    /// [`Code::reconstruct`] with a kernel of the caller's choice, like [`Code::encode_with`].
    #[doc(hidden)]
    pub fn reconstruct_with(
        &self,
        kernel: Kernel,
        sources: &[(u8, &[u8])],
        want: u8,
        out: &mut [u8],
    ) -> Result<(), ReconstructError> {
        self.check_sources(sources, want, out.len())?;
        let mut indices = [0; SHARDS_MAX];
        for (index, source) in indices.iter_mut().zip(sources) {
            *index = source.0;
        }
        let row = matrix::coefficients(&indices[..sources.len()], want);

        // Coefficients vanish only where the wanted shard is itself a source: the others needn't be read then.
        let mut used_row = [0; SHARDS_MAX];
        let mut used_bytes: [&[u8]; SHARDS_MAX] = [&[]; SHARDS_MAX];
        let mut used_count = 0;
        for (&(_, bytes), coefficient) in sources.iter().zip(row).filter(|&(_, coefficient)| coefficient != 0) {
            used_row[used_count] = coefficient;
            used_bytes[used_count] = bytes;
            used_count += 1;
        }
        kernel::combine(kernel, &[used_row], &used_bytes[..used_count], &mut [out]);
        Ok(())
    }

    fn check_sources(&self, sources: &[(u8, &[u8])], want: u8, needed_bytes: usize) -> Result<(), ReconstructError> {
        let shard_count = self.shards();
        if want >= shard_count {
            return Err(ReconstructError::UnknownShard { index: want, shard_count });
        }
        let needed_count = usize::from(self.data_shards);
        if sources.len() != needed_count {
            return Err(ReconstructError::SourceCount { given_count: sources.len(), needed_count });
        }
        let mut seen: u32 = 0;
        for &(index, bytes) in sources {
            if index >= shard_count {
                return Err(ReconstructError::UnknownShard { index, shard_count });
            }
            if seen >> index & 1 == 1 {
                return Err(ReconstructError::RepeatedSource { index });
            }
            if bytes.len() != needed_bytes {
                return Err(ReconstructError::SourceLength { index, given_bytes: bytes.len(), needed_bytes });
            }
            seen |= 1 << index;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn geometries_are_bounded() {
        assert_eq!(Code::new(0, 1), Err(GeometryError::NoDataShards));
        assert_eq!(Code::new(4, 0), Err(GeometryError::NoParityShards));
        assert_eq!(Code::new(9, 8), Err(GeometryError::TooManyShards { data_shards: 9, parity_shards: 8 }));
        assert_eq!(
            Code::new(255, 255).map_err(|error| error.to_string()),
            Err("255+255 is more than 16 shards".to_owned())
        );
        let code = Code::new(15, 1).expect("16 shards are allowed");
        assert_eq!((code.data_shards(), code.parity_shards(), code.shards()), (15, 1, 16));
    }

    #[test]
    fn bad_sources_are_refused_and_leave_the_output_alone() {
        let code = Code::new(2, 1).expect("a valid geometry");
        let (a, b, short) = ([1u8; 8], [2u8; 8], [3u8; 7]);
        type Sources<'a> = &'a [(u8, &'a [u8])];
        let cases: [(Sources, u8, ReconstructError); 7] = [
            (&[(0, &a)], 2, ReconstructError::SourceCount { given_count: 1, needed_count: 2 }),
            (&[(0, &a), (1, &b), (2, &b)], 2, ReconstructError::SourceCount { given_count: 3, needed_count: 2 }),
            (&[(0, &a), (1, &b)], 3, ReconstructError::UnknownShard { index: 3, shard_count: 3 }),
            (&[(0, &a), (3, &b)], 1, ReconstructError::UnknownShard { index: 3, shard_count: 3 }),
            (&[(0, &a), (255, &b)], 1, ReconstructError::UnknownShard { index: 255, shard_count: 3 }),
            (&[(1, &a), (1, &b)], 0, ReconstructError::RepeatedSource { index: 1 }),
            (&[(0, &a), (1, &short)], 2, ReconstructError::SourceLength { index: 1, given_bytes: 7, needed_bytes: 8 }),
        ];
        for (sources, want, error) in cases {
            let mut out = [0xEE; 8];
            assert_eq!(code.reconstruct(sources, want, &mut out), Err(error));
            assert_eq!(out, [0xEE; 8]);
        }
    }

    #[test]
    #[should_panic(expected = "wrong number of data shards")]
    fn encoding_the_wrong_number_of_shards_is_a_bug() {
        Code::new(2, 1).expect("a valid geometry").encode(&[&[0; 4]], &mut [&mut [0; 4]]);
    }

    #[test]
    #[should_panic(expected = "all of one length")]
    fn encoding_shards_of_different_lengths_is_a_bug() {
        Code::new(2, 1).expect("a valid geometry").encode(&[&[0; 4], &[0; 5]], &mut [&mut [0; 4]]);
    }

    #[test]
    fn empty_shards_are_coded_to_empty_shards() {
        let code = Code::new(2, 2).expect("a valid geometry");
        code.encode(&[&[], &[]], &mut [&mut [], &mut []]);
        assert_eq!(code.reconstruct(&[(3, &[]), (2, &[])], 0, &mut []), Ok(()));
    }
}
