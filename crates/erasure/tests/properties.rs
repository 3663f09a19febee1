//! Every kernel against a naive model, for random geometries, lengths, alignments and losses.
//!
//! The model shares nothing with the crate: it multiplies by adding shifted copies bit by bit, and computes each
//! coefficient from the formula when it needs it.

use holdfast_erasure::{Code, Kernel, SHARDS_MAX};
use proptest::prelude::*;

/// What buffers hold around the shards, to notice writes outside them.
const GUARD: u8 = 0xA5;
const GUARD_BYTES: usize = 64;

/// `a` times `b` modulo 0x11D, by adding `a` times x^i for every bit `i` of `b`.
fn product(a: u8, b: u8) -> u8 {
    let (mut a, mut sum) = (u16::from(a), 0);
    for bit in 0..8 {
        if b & 1 << bit != 0 {
            sum ^= a;
        }
        a *= 2;
        if a > 255 {
            a ^= 0x11D;
        }
    }
    sum as u8
}

/// `a` divided by `b`, by trying all.
fn quotient(a: u8, b: u8) -> u8 {
    (0..=255).find(|&q| product(q, b) == a).expect("the divisor is not zero")
}

/// The parity matrix's entry as documented, with `x_i = 16 + i` and `y_j = j`.
fn coefficient(i: usize, j: usize) -> u8 {
    let sum = |i: usize, j: usize| (16 + i as u8) ^ j as u8;
    quotient(product(sum(0, j), sum(i, 0)), product(sum(i, j), sum(0, 0)))
}

fn model_parity(code: Code, data: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let row = |i: usize| -> Vec<u8> {
        let coefficients: Vec<u8> = (0..data.len()).map(|j| coefficient(i, j)).collect();
        let byte = |at: usize| data.iter().zip(&coefficients).fold(0, |sum, (shard, &c)| sum ^ product(c, shard[at]));
        (0..data[0].len()).map(byte).collect()
    };
    (0..usize::from(code.parity_shards())).map(row).collect()
}

fn available_kernels() -> Vec<Kernel> {
    Kernel::ALL.into_iter().filter(|kernel| kernel.is_available()).collect()
}

/// A shard somewhere inside a larger buffer: `lead` decides its alignment.
struct Placed {
    buffer: Vec<u8>,
    lead: usize,
}

impl Placed {
    fn new(bytes: &[u8], lead: usize) -> Placed {
        let buffer = [&vec![GUARD; lead], bytes, &[GUARD; GUARD_BYTES]].concat();
        Placed { buffer, lead }
    }

    fn shard(&self) -> &[u8] {
        &self.buffer[self.lead..self.buffer.len() - GUARD_BYTES]
    }

    fn shard_mut(&mut self) -> &mut [u8] {
        let end = self.buffer.len() - GUARD_BYTES;
        &mut self.buffer[self.lead..end]
    }

    fn guards_hold(&self) -> bool {
        let (lead, rest) = self.buffer.split_at(self.lead);
        lead.iter().chain(&rest[rest.len() - GUARD_BYTES..]).all(|&byte| byte == GUARD)
    }
}

fn encode(kernel: Kernel, code: Code, data: &[Placed], parity: &mut [Placed]) {
    let data: Vec<&[u8]> = data.iter().map(Placed::shard).collect();
    let mut outputs: Vec<&mut [u8]> = parity.iter_mut().map(Placed::shard_mut).collect();
    code.encode_with(kernel, &data, &mut outputs);
}

fn codes() -> impl Strategy<Value = Code> {
    (1..SHARDS_MAX as u8)
        .prop_flat_map(|k| (Just(k), 1..=SHARDS_MAX as u8 - k))
        .prop_map(|(k, m)| Code::new(k, m).expect("a valid geometry"))
}

/// A code and its data shards, each with the alignment its buffer gets, mostly around the sizes of blocks.
fn stripes() -> impl Strategy<Value = (Code, Vec<Vec<u8>>, Vec<usize>)> {
    let shard_bytes = prop_oneof![0..=300usize, 2040..=2060usize, Just(4096), 4090..=4700usize];
    (codes(), shard_bytes).prop_flat_map(|(code, shard_bytes)| {
        let shard = proptest::collection::vec(any::<u8>(), shard_bytes);
        let data = proptest::collection::vec(shard, usize::from(code.data_shards()));
        let leads = proptest::collection::vec(0..70usize, SHARDS_MAX);
        (Just(code), data, leads)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn every_kernel_encodes_as_the_model((code, data, leads) in stripes()) {
        let expected = model_parity(code, &data);
        let placed: Vec<Placed> = data.iter().zip(&leads).map(|(shard, &lead)| Placed::new(shard, lead)).collect();
        for kernel in available_kernels() {
            let dirty = vec![0xEE; data[0].len()];
            let mut parity: Vec<Placed> =
                leads[data.len()..][..expected.len()].iter().map(|&lead| Placed::new(&dirty, lead)).collect();
            encode(kernel, code, &placed, &mut parity);
            for (index, (parity, expected)) in parity.iter().zip(&expected).enumerate() {
                prop_assert!(parity.shard() == expected, "{kernel}: parity {index} of {code:?}");
                prop_assert!(parity.guards_hold(), "{kernel}: parity {index} of {code:?} overflows");
            }
        }
    }

    #[test]
    fn any_survivors_rebuild_every_shard(
        (code, data, leads) in stripes(),
        order in Just((0..SHARDS_MAX as u8).collect::<Vec<u8>>()).prop_shuffle(),
    ) {
        let shards = [data.clone(), model_parity(code, &data)].concat();
        let placed: Vec<Placed> = shards.iter().zip(&leads).map(|(shard, &lead)| Placed::new(shard, lead)).collect();
        let survivors: Vec<(u8, &[u8])> = order
            .into_iter()
            .filter(|&index| index < code.shards())
            .take(data.len())
            .map(|index| (index, placed[usize::from(index)].shard()))
            .collect();
        for kernel in available_kernels() {
            for want in 0..code.shards() {
                let mut out = Placed::new(&vec![0xEE; data[0].len()], leads[usize::from(want)]);
                code.reconstruct_with(kernel, &survivors, want, out.shard_mut()).expect("enough sources");
                prop_assert!(out.shard() == shards[usize::from(want)], "{kernel}: shard {want} of {code:?}");
                prop_assert!(out.guards_hold(), "{kernel}: shard {want} of {code:?} overflows");
            }
        }
    }

    #[test]
    fn shards_coded_piecewise_are_the_whole_ones((code, data, leads) in stripes(), cut in any::<prop::sample::Index>()) {
        let cut = cut.index(data[0].len() + 1);
        let piece = |range: std::ops::Range<usize>| {
            let data: Vec<Placed> =
                data.iter().zip(&leads).map(|(shard, &lead)| Placed::new(&shard[range.clone()], lead)).collect();
            let mut parity: Vec<Placed> =
                (0..code.parity_shards()).map(|_| Placed::new(&vec![0; range.len()], 0)).collect();
            encode(holdfast_erasure::kernel_in_use(), code, &data, &mut parity);
            parity
        };
        let (first, second, whole) = (piece(0..cut), piece(cut..data[0].len()), piece(0..data[0].len()));
        for ((first, second), whole) in first.iter().zip(&second).zip(&whole) {
            prop_assert!([first.shard(), second.shard()].concat() == whole.shard());
        }
    }
}

#[test]
fn one_parity_shard_is_the_exclusive_or() {
    for data_shards in 1..SHARDS_MAX as u8 {
        let code = Code::new(data_shards, 1).expect("a valid geometry");
        let data: Vec<Vec<u8>> = (0..data_shards)
            .map(|shard| (0..999u32).map(|at| (at * 7 + u32::from(shard) * 31) as u8).collect())
            .collect();
        let slices: Vec<&[u8]> = data.iter().map(Vec::as_slice).collect();
        let mut parity = vec![0; 999];
        code.encode(&slices, &mut [&mut parity]);
        assert!((0..999).all(|at| parity[at] == data.iter().fold(0, |sum, shard| sum ^ shard[at])), "{code:?}");
    }
}

#[test]
fn one_data_shard_is_copied() {
    let data: Vec<u8> = (0..999u32).map(|at| (at * 7) as u8).collect();
    let mut parity = vec![vec![0; 999]; SHARDS_MAX - 1];
    let mut outputs: Vec<&mut [u8]> = parity.iter_mut().map(Vec::as_mut_slice).collect();
    Code::new(1, 15).expect("a valid geometry").encode(&[&data], &mut outputs);
    assert!(parity.iter().all(|copy| *copy == data));
}

/// Every geometry, at a length with several rounds, whole blocks and a remainder: kernels against each other.
#[test]
fn all_kernels_agree_on_every_geometry() {
    const SHARD_BYTES: usize = 3 * 2048 + 5 * 64 + 37;
    for data_shards in 1..SHARDS_MAX as u8 {
        for parity_shards in 1..=SHARDS_MAX as u8 - data_shards {
            let code = Code::new(data_shards, parity_shards).expect("a valid geometry");
            let mut state = u32::from(data_shards) << 8 | u32::from(parity_shards);
            let mut byte = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 24) as u8
            };
            let data: Vec<Placed> = (0..data_shards)
                .map(|_| Placed::new(&(0..SHARD_BYTES).map(|_| byte()).collect::<Vec<u8>>(), 0))
                .collect();
            let parities = available_kernels().into_iter().map(|kernel| {
                let mut parity: Vec<Placed> =
                    (0..parity_shards).map(|_| Placed::new(&[0xEE; SHARD_BYTES], usize::from(data_shards))).collect();
                encode(kernel, code, &data, &mut parity);
                (kernel, parity)
            });
            let parities: Vec<(Kernel, Vec<Placed>)> = parities.collect();
            let (_, reference) = &parities[0];
            for (kernel, parity) in &parities {
                assert!(parity.iter().zip(reference).all(|(a, b)| a.buffer == b.buffer), "{kernel}: {code:?}");
            }
        }
    }
}
