//! Throughput of every kernel that this processor has: GB of data per second, encoding and rebuilding one data shard.
//!
//! `cargo bench -p holdfast-erasure`. Run in any other way it makes one round of each, to show that it still works.

use holdfast_erasure::{Code, Kernel, kernel_in_use};
use std::hint::black_box;
use std::time::{Duration, Instant};

const SHARD_BYTES: usize = 64 << 10;
const GEOMETRIES: [(u8, u8); 4] = [(2, 1), (4, 2), (7, 1), (8, 8)];

/// Long enough to even out a busy machine; the best of [`ROUNDS`] counts.
const ROUND: Duration = Duration::from_millis(200);
const ROUNDS: u32 = 5;

fn main() {
    let measured = std::env::args().any(|argument| argument == "--bench");
    println!("{} KiB shards, GB of data per second; in use: {}", SHARD_BYTES >> 10, kernel_in_use());
    println!("{:<12} {:>5} {:>10} {:>12}", "kernel", "code", "encode", "reconstruct");
    for kernel in Kernel::ALL.into_iter().filter(|kernel| kernel.is_available()) {
        for (data_shards, parity_shards) in GEOMETRIES {
            let code = Code::new(data_shards, parity_shards).expect("a valid geometry");
            let data: Vec<Vec<u8>> = (0..data_shards).map(shard).collect();
            let data: Vec<&[u8]> = data.iter().map(Vec::as_slice).collect();
            let mut parity = vec![vec![0; SHARD_BYTES]; usize::from(parity_shards)];
            let bytes = data.len() * SHARD_BYTES;

            let mut outputs: Vec<&mut [u8]> = parity.iter_mut().map(Vec::as_mut_slice).collect();
            let encode = rate(measured, bytes, || code.encode_with(kernel, black_box(&data), black_box(&mut outputs)));

            // The first data shard is lost; the last parity shard, whose coefficients are not all ones, stands in.
            let mut sources: Vec<(u8, &[u8])> =
                (1..data_shards).map(|index| (index, data[usize::from(index)])).collect();
            sources.push((code.shards() - 1, parity.last().expect("one parity shard at least")));
            let mut rebuilt = vec![0; SHARD_BYTES];
            let reconstruct = rate(measured, bytes, || {
                code.reconstruct_with(kernel, black_box(&sources), 0, black_box(&mut rebuilt)).expect("enough sources");
            });
            assert!(rebuilt == data[0], "{kernel} rebuilt another shard");
            println!("{kernel:<12} {:>5} {encode:>10.2} {reconstruct:>12.2}", format!("{data_shards}+{parity_shards}"));
        }
    }
}

fn shard(index: u8) -> Vec<u8> {
    (0..SHARD_BYTES).map(|at| (at * 31 + usize::from(index) * 7 + (at >> 8)) as u8).collect()
}

/// GB per second of the best round, each call working on `bytes`.
fn rate(measured: bool, bytes: usize, mut work: impl FnMut()) -> f64 {
    let (rounds, round) = if measured { (ROUNDS, ROUND) } else { (1, Duration::ZERO) };
    (0..rounds)
        .map(|_| {
            let start = Instant::now();
            let mut calls = 0;
            while calls == 0 || start.elapsed() < round {
                work();
                calls += 1;
            }
            (calls * bytes) as f64 / start.elapsed().as_secs_f64() / 1e9
        })
        .fold(0.0, f64::max)
}
