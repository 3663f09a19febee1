//! The controller against ideal nodes: every request is answered at once and nothing is ever torn or lost, but nodes go
//! away and come back, and the controller is dropped and opened anew. What it serves is compared with a plain array.
//! Faults of disks and network belong to the simulator.

use crate::support::*;
use holdfast_base::{BLOCK_BYTES, BlockOp, Buf, ByteRange, Epoch, Prng};
use holdfast_format::geometry::Layout;
use holdfast_format::root::Root;
use holdfast_volume::{Config, Event, State};
use std::time::Duration;

fn random_range(rng: &mut Prng, size: u64) -> (u64, u64) {
    let len = match rng.below(10) {
        0 => rng.between(1, 6000),
        1 => rng.between(1, 40) * 4096,
        _ => rng.between(1, 4) * 4096,
    };
    let offset = rng.below(size - len);
    (if len % 4096 == 0 { offset / 4096 * 4096 } else { offset }, len)
}

/// Random requests, nodes away one at a time, and re-openings; every read is checked against an array.
fn compare_with_array(seed: u64, nodes: u32, layout: Layout, ops: u32) {
    let size: u64 = 6 << 20;
    let mut world = World::new(seed, nodes, layout, size);
    let mut model = vec![0_u8; size as usize];
    let mut rng = Prng::new(seed ^ 0x5eed);
    let mut down: Option<usize> = None;
    for _ in 0..ops {
        let (offset, len) = random_range(&mut rng, size);
        let range = offset as usize..(offset + len) as usize;
        match rng.below(100) {
            0..45 => {
                let mut data = vec![0; len as usize];
                rng.fill(&mut data);
                model[range].copy_from_slice(&data);
                let token = world.request(BlockOp::Write { offset, data: Buf::copy_from(&data) });
                world.wait(token);
            }
            45..50 => {
                model[range].fill(0);
                let token = world.request(BlockOp::Discard(ByteRange::new(offset, len)));
                world.wait(token);
            }
            50..90 => assert!(world.read(offset, len) == model[range], "seed {seed}: read {offset}+{len} differs"),
            90..94 => match down.take() {
                Some(i) => world.node_back(i),
                None => {
                    let i = rng.below(u64::from(nodes)) as usize;
                    if rng.chance(500) {
                        world.node_down(i)
                    } else {
                        world.node_hangs(i)
                    }
                    down = Some(i);
                }
            },
            94..96 => world.settle(Duration::from_millis(rng.between(1, 4000))),
            96..98 => world.preload(rng.below(60)),
            _ => world.open(),
        }
    }
    if let Some(i) = down.take() {
        world.node_back(i);
    }
    finish(seed, &mut world, &model);
}

fn finish(seed: u64, world: &mut World, model: &[u8]) {
    world.settle(Duration::from_secs(30));
    assert_eq!(world.controller.status().degraded_segments, 0, "seed {seed}: redundancy is back");
    for chunk in 0..model.len() / 65536 {
        let at = chunk * 65536;
        assert!(world.read(at as u64, 65536) == model[at..at + 65536], "seed {seed}: chunk {chunk} differs");
    }
    world.push(Event::Close);
    world.run_until(|w| w.controller.state() == State::Closed);
    world.open();
    for chunk in 0..model.len() / 65536 {
        let at = chunk * 65536;
        assert!(world.read(at as u64, 65536) == model[at..at + 65536], "seed {seed}: chunk {chunk} differs, reopened");
    }
    world.settle(Duration::from_secs(30));
    let live = world.controller.status().mapped_blocks * BLOCK_BYTES as u64;
    let held: u64 = world.nodes.iter().flat_map(|n| n.shards.values()).map(|(_, b)| b.len() as u64).sum();
    assert!(held < 4 * live * u64::from(world.layout.width()) + (4 << 20), "seed {seed}: {held} held for {live} live");
}

#[test]
fn parity_on_four_nodes() {
    for seed in 0..24 {
        compare_with_array(seed, 4, Layout::DEFAULT, 400);
    }
}

#[test]
fn parity_on_three_nodes_degrades_to_mirrors_and_is_recoded() {
    for seed in 100..124 {
        compare_with_array(seed, 3, Layout::DEFAULT, 400);
    }
}

#[test]
fn mirrors() {
    for seed in 200..212 {
        compare_with_array(seed, 3, Layout::Mirror { copies: 2 }, 300);
        compare_with_array(seed, 4, Layout::Mirror { copies: 3 }, 300);
    }
}

#[test]
fn wide_codes() {
    for seed in 300..306 {
        compare_with_array(seed, 7, Layout::Parity { data: 4, parity: 2 }, 300);
        compare_with_array(seed, 8, Layout::Parity { data: 7, parity: 1 }, 300);
    }
}

#[test]
fn what_a_smaller_size_cut_off_never_comes_back() {
    const MIB: u64 = 1 << 20;
    for (seed, cut) in [(400, 4 * MIB), (401, 5 * MIB + BLOCK_BYTES as u64), (402, 0)] {
        for opens_between in [false, true] {
            let mut world = World::new(seed, 4, Layout::DEFAULT, 8 * MIB);
            world.run_until(|w| w.controller.state() == State::Open);
            for i in 0..8 {
                let data = Buf::copy_from(&vec![i as u8 + 1; MIB as usize]);
                let write = world.request(BlockOp::Write { offset: i * MIB, data });
                world.wait(write);
            }
            world.settle(Duration::from_secs(8));
            let mut resize = |size: u64| {
                world.push(Event::Resize { size_bytes: size });
                world.run_until(|w| Root::decode(&w.root.1).unwrap().size_bytes == size);
                if opens_between {
                    world.open();
                    world.run_until(|w| w.controller.state() == State::Open);
                }
            };
            resize(cut);
            resize(8 * MIB);
            let kept: Vec<u8> = (0..cut).map(|at| (at / MIB) as u8 + 1).collect();
            assert!(cut == 0 || world.read(0, cut) == kept, "what lies in front of the end stays");
            assert!(world.read(cut, 8 * MIB - cut).iter().all(|b| *b == 0), "cut at {cut}, {opens_between}");
        }
    }
}

#[test]
fn the_parts_of_a_volume_add_up() {
    let layout = Layout::Parity { data: 2, parity: 1 };
    let mut world = World::new(11, 4, layout, 6 << 20);
    let none = world.controller.anatomy();
    assert_eq!((none.segments.len(), none.log.legs.len()), (0, 3), "{none:?}");
    for at in 0..96 {
        let data = Buf::copy_from(&vec![at as u8 + 1; 65536]);
        let token = world.request(BlockOp::Write { offset: at * 65536 % (6 << 20), data });
        world.wait(token);
    }
    let full = world.controller.anatomy();
    assert!(full.log.appended_bytes > 0 && full.log.completed.0 >= 96, "{full:?}");
    let legs: Vec<u64> = full.log.legs.iter().filter(|leg| leg.is_preferred).map(|leg| leg.entries).collect();
    assert_eq!(legs.len(), 2, "{full:?}");
    world.settle(Duration::from_secs(30));
    let parts = world.controller.anatomy();
    let shards: u64 = parts.segments.iter().map(|part| part.shards).sum();
    let bytes: u64 = parts.segments.iter().map(|part| part.bytes).sum();
    assert_eq!(shards, parts.devices.iter().map(|device| device.shards).sum::<u64>());
    assert_eq!(bytes, parts.devices.iter().map(|device| device.bytes).sum::<u64>());
    let data: u64 =
        parts.segments.iter().filter(|part| part.is_data && part.layout == layout).map(|part| part.bytes).sum();
    assert!(data >= 9 << 20, "half as much again: {parts:?}");
    assert_eq!(parts.segments.iter().map(|part| part.segments).sum::<u64>(), world.controller.status().segment_count);
}

/// Opens the volume for who opens it only because nobody has it, as it was known at that epoch.
fn open_only_from(world: &mut World, epoch: Epoch) -> State {
    let bounds = config(3, 1);
    world.config = Some(Config { only_from: Some(epoch), ..bounds });
    world.begin_open();
    world.run_until(|w| !matches!(w.controller.state(), State::Opening));
    world.controller.state()
}

#[test]
fn who_cares_for_a_closed_volume_keeps_off_where_others_have_had_it_since() {
    let mut world = World::new(5, 3, Layout::Mirror { copies: 2 }, 1 << 20);
    world.write_all(0, 64 << 10);
    let root = |world: &World| Root::decode(&world.root.1).unwrap();
    let known = root(&world).epoch;
    // Another host puts it into service in between.
    world.open();
    let (served, version) = (root(&world), world.root.0);
    assert!(served.epoch > known);
    let promised: Vec<Epoch> = world.nodes.iter().map(|node| node.promised).collect();
    assert_eq!(open_only_from(&mut world, known), State::Deposed);
    assert_eq!((root(&world), world.root.0), (served.clone(), version), "the record is as it was");
    assert_eq!(world.nodes.iter().map(|node| node.promised).collect::<Vec<_>>(), promised, "its owner goes on");
    assert_eq!(open_only_from(&mut world, served.epoch), State::Open);
}

/// What was destaged stays in the log until a checkpoint trims it. If that counted as what is still to be destaged, all of the log
/// would go at once each time, and guests would wait behind it.
#[test]
fn data_leaves_the_log_as_fast_as_it_comes() {
    const PIECE: u64 = 2 * BLOCK_BYTES as u64;
    const SEGMENT: u64 = 256 << 10;
    let mut world = World::new(15, 3, Layout::Mirror { copies: 2 }, 64 << 20);
    let mut bounds = config(15, 0);
    (bounds.writeback_bytes_max, bounds.segment_payload_bytes) = (16 << 20, SEGMENT as u32);
    world.config = Some(bounds);
    world.open();
    let data_put = |world: &World| world.nodes.iter().map(|node| node.put_bytes.0).sum::<u64>() / 2;
    let (mut most, mut before) = (0, 0);
    for piece in 0..(48 << 20) / PIECE {
        world.write_all(piece * PIECE, PIECE);
        world.now = world.now + Duration::from_millis(1);
        world.push(Event::Tick);
        if (piece + 1) % (4 * SEGMENT / PIECE) == 0 {
            most = most.max(data_put(&world) - before);
            before = data_put(&world);
        }
    }
    assert!(before > 40 << 20, "{before} bytes: the log is emptied");
    assert!(most <= 6 * SEGMENT, "{most} bytes went while {} came", 4 * SEGMENT);
}

/// What is overwritten in the log is never destaged, but what lies before it has to be, or nothing can be trimmed.
#[test]
fn one_block_at_the_start_of_the_log_does_not_let_it_fill_with_what_is_overwritten() {
    const PIECE: u64 = 4 * BLOCK_BYTES as u64;
    const BUDGET: u64 = 16 << 20;
    let mut world = World::new(16, 3, Layout::Mirror { copies: 2 }, 64 << 20);
    let mut bounds = config(16, 0);
    (bounds.writeback_bytes_max, bounds.segment_payload_bytes) = (BUDGET, 256 << 10);
    world.config = Some(bounds);
    world.open();
    for round in 0..8 {
        world.write_all((8 << 20) + round * PIECE, PIECE);
        for piece in 0..8 * BUDGET / 10 / PIECE {
            world.write_all(piece * PIECE % (1 << 20), PIECE);
            world.now = world.now + Duration::from_micros(100);
            world.push(Event::Tick);
            let log_bytes = world.controller.status().log_bytes;
            assert!(log_bytes < BUDGET / 2, "{log_bytes} bytes: writes are held back from half of the budget on");
        }
    }
}

/// Segments are made of what lies close together, not of what is oldest; yet nothing waits for long, or little of the log could be trimmed,
/// and then much at once.
#[test]
fn what_is_written_all_over_leaves_the_log_in_sweeps_and_soon() {
    const BUDGET: u64 = 16 << 20;
    let mut world = World::new(17, 3, Layout::Mirror { copies: 2 }, 256 << 20);
    let mut bounds = config(17, 0);
    (bounds.writeback_bytes_max, bounds.segment_payload_bytes) = (BUDGET, 256 << 10);
    world.config = Some(bounds);
    world.open();
    let blocks = (256 << 20) / BLOCK_BYTES as u64;
    let (mut most, mut least) = (0, BUDGET);
    for round in 0..6000_u64 {
        // All blocks, each once, in an order that goes all over the volume.
        let block = round.wrapping_mul(40_503) % blocks;
        world.write_all(block * BLOCK_BYTES as u64, BLOCK_BYTES as u64);
        world.now = world.now + Duration::from_micros(100);
        world.push(Event::Tick);
        let log_bytes = world.controller.status().log_bytes;
        most = most.max(log_bytes);
        if round > 2000 {
            least = least.min(log_bytes);
        }
    }
    assert!(most < BUDGET * 5 / 16, "{most} bytes lie in the log at once");
    assert!(least > BUDGET / 16, "{least} bytes: it is not emptied at once");
}
