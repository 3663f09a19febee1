//! Write amplification under random overwrites: a real controller on ideal nodes, in simulated time, so that the same
//! arguments always give the same figures.
//!
//! ```text
//! cargo run --release -p holdfast-volume --example amplification -- [--fill 0.77] [--skewed] [--overwrites 1.5] [--device-mib 512]
//! ```
//! A volume whose data takes `fill` of four devices in `parity:2+1` (0.77 is 80 % of what guests may fill: 4 % are a reserve) is
//! written once in order, then overwritten at random in
//! blocks of 4 KiB; `--skewed` sends 80 % of the writes to 20 % of the blocks. Each line is a quarter of the volume's size
//! in writes.

#[path = "../tests/controller/support/mod.rs"]
mod support;

use holdfast_base::{BLOCK_BYTES, BlockOp, Buf, InstanceId, Instant, Prng};
use holdfast_format::geometry::Layout;
use holdfast_volume::{Config, Counters, Event};
use std::time::Duration;
use support::{GRID, VOLUME, World};

const BLOCK: u64 = BLOCK_BYTES as u64;

/// Between two writes.
const PACE: Duration = Duration::from_micros(100);

struct Args {
    fill: f64,
    skewed: bool,
    overwrites: f64,
    device_mib: u64,
}

fn args() -> Args {
    let mut args = Args { fill: 0.77, skewed: false, overwrites: 1.5, device_mib: 512 };
    let mut given = std::env::args().skip(1);
    while let Some(name) = given.next() {
        let mut number = || given.next().and_then(|value| value.parse::<f64>().ok()).expect("a number");
        match name.as_str() {
            "--fill" => args.fill = number(),
            "--overwrites" => args.overwrites = number(),
            "--device-mib" => args.device_mib = number() as u64,
            "--skewed" => args.skewed = true,
            _ => panic!("{name} is not known"),
        }
    }
    args
}

/// What was written, as counted by the controller and by the nodes.
#[derive(Clone, Copy)]
struct Seen {
    counters: Counters,
    data_bytes: u64,
    meta_bytes: u64,
}

fn seen(world: &World) -> Seen {
    let put = |of: fn(&(u64, u64)) -> u64| world.nodes.iter().map(|node| of(&node.put_bytes)).sum();
    Seen { counters: world.controller.status().counters, data_bytes: put(|put| put.0), meta_bytes: put(|put| put.1) }
}

fn tell(what: &str, before: Seen, after: Seen, world: &World) {
    let (b, a) = (before.counters, after.counters);
    let written = (a.write_bytes - b.write_bytes) as f64;
    let share = |bytes: u64| bytes as f64 / written;
    let data = share(after.data_bytes - before.data_bytes) / 1.5;
    let space = world.controller.status().space;
    println!(
        "{what}: capacity tier {data:.2} of what was written (moved {:.2}), with parity {:.2}, map {:.2}; of segments {:.1} % dead; \
         {:.0} s of pace lost",
        share(a.cleaned_bytes - b.cleaned_bytes),
        data * 1.5,
        share(after.meta_bytes - before.meta_bytes),
        100.0 * space.dead_bytes as f64 / (space.dead_bytes + space.data_bytes) as f64,
        world.now.0 as f64 / 1e9 - a.writes as f64 * PACE.as_secs_f64(),
    );
}

/// Lets time pass up to then.
fn pass(world: &mut World, until: Instant) {
    while let Some(deadline) = world.controller.next_deadline().filter(|deadline| *deadline <= until) {
        world.now = Instant(deadline.0.max(world.now.0 + 1));
        world.push(Event::Tick);
    }
    world.now = world.now.max(until);
}

fn main() {
    let args = args();
    let capacity = args.device_mib << 20;
    let blocks = (4.0 * capacity as f64 * args.fill / 1.5) as u64 / BLOCK;
    let layout = Layout::Parity { data: 2, parity: 1 };
    let mut world = World::new(1, 4, layout, blocks * BLOCK);
    world.nodes.iter_mut().for_each(|node| node.capacity_bytes = capacity);
    let mut config = Config::new(GRID, VOLUME, "host", InstanceId(1), 1);
    // As small against the devices as the defaults are against larger ones.
    (config.segment_payload_bytes, config.writeback_bytes_max) = (1 << 20, 32 << 20);
    world.config = Some(config);
    world.open();
    let mut prng = Prng::new(2);
    let data = Buf::copy_from(&[7; BLOCK_BYTES]);
    let write = |world: &mut World, block: u64| {
        let next = world.now + PACE;
        let token = world.request(BlockOp::Write { offset: block * BLOCK, data: data.clone() });
        let patience = world.now + Duration::from_secs(100);
        while !world.replies.contains_key(&token) {
            assert!(world.now < patience, "the write is held back for ever");
            pass(world, world.now + PACE);
        }
        let answer = world.replies.remove(&token);
        assert!(matches!(answer, Some(Ok(_))), "{answer:?}");
        pass(world, next);
    };
    let start = seen(&world);
    for block in 0..blocks {
        write(&mut world, block);
    }
    tell("written once", start, seen(&world), &world);
    let quarter = blocks / 4;
    for round in 0..(args.overwrites * 4.0) as u64 {
        let before = seen(&world);
        for _ in 0..quarter {
            let hot = args.skewed && prng.chance(800);
            let fifth = blocks / 5;
            let block = if hot {
                prng.below(fifth) * 5
            } else if args.skewed {
                // One of the four others of a group.
                let among = prng.below(blocks - fifth);
                (among / 4 * 5 + among % 4 + 1).min(blocks - 1)
            } else {
                prng.below(blocks)
            };
            write(&mut world, block);
        }
        tell(&format!("{:.2} times over", (round + 1) as f64 / 4.0), before, seen(&world), &world);
    }
}
