//! What a second reactor brings: two volumes on one thread, and each on its own, against ideal nodes in the process.
//!
//! `cargo bench -p holdfast-volume --bench reactors`. Run in any other way it does a little of each, to show that it works.

#[path = "../tests/controller/support/mod.rs"]
mod support;

use holdfast_base::{BlockOp, Buf, ByteRange, Prng};
use holdfast_format::geometry::Layout;
use std::time::{Duration, Instant};
use support::World;

const SIZE: u64 = 64 << 20;
const REQUEST: u64 = 8 << 10;
/// Requests of a volume in one run.
const REQUESTS: u32 = 40_000;
/// Pairs of runs; the middle one counts.
const PAIRS: usize = 9;

fn volume(seed: u64) -> (World, Prng) {
    let mut world = World::new(seed, 3, Layout::Mirror { copies: 2 }, SIZE);
    for offset in (0..SIZE).step_by(1 << 20) {
        let token = world.request(BlockOp::Write { offset, data: Buf::copy_from(&vec![1; 1 << 20]) });
        world.wait(token);
    }
    (world, Prng::new(seed))
}

/// 70 % reads, 30 % writes, at random places.
fn request((world, prng): &mut (World, Prng), data: &Buf) {
    let offset = prng.below(SIZE / REQUEST) * REQUEST;
    let op = match prng.chance(700) {
        true => BlockOp::Read(ByteRange::new(offset, REQUEST)),
        false => BlockOp::Write { offset, data: data.clone() },
    };
    let token = world.request(op);
    world.wait(token);
}

fn on_one_thread(requests: u32) -> Duration {
    let (mut volumes, data) = ([volume(1), volume(2)], Buf::copy_from(&[7; REQUEST as usize]));
    let began = Instant::now();
    for _ in 0..requests {
        volumes.iter_mut().for_each(|volume| request(volume, &data));
    }
    began.elapsed()
}

fn on_two_threads(requests: u32) -> Duration {
    let ready = std::sync::Barrier::new(3);
    std::thread::scope(|scope| {
        let threads = [1, 2].map(|seed| {
            let ready = &ready;
            scope.spawn(move || {
                let (mut volume, data) = (volume(seed), Buf::copy_from(&[7; REQUEST as usize]));
                ready.wait();
                (0..requests).for_each(|_| request(&mut volume, &data));
            })
        });
        ready.wait();
        let began = Instant::now();
        threads.into_iter().for_each(|thread| thread.join().expect("no request fails here"));
        began.elapsed()
    })
}

fn main() {
    let is_bench = std::env::args().any(|argument| argument == "--bench");
    let (pairs, requests) = if is_bench { (PAIRS, REQUESTS) } else { (1, 100) };
    let mut ratios: Vec<f64> =
        (0..pairs).map(|_| on_one_thread(requests).as_secs_f64() / on_two_threads(requests).as_secs_f64()).collect();
    ratios.sort_by(f64::total_cmp);
    println!(
        "two volumes, {requests} requests of 8 KiB each, 70 % reads: two threads do {:.2} times as much as one (middle of {pairs}; \
         {:.2} to {:.2})",
        ratios[pairs / 2],
        ratios[0],
        ratios[pairs - 1]
    );
}
