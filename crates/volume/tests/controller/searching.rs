//! The cleaner: its search for what is worth cleaning, where that takes many steps, on large volumes; and how it reads that.

use crate::support::*;
use holdfast_base::{BLOCK_BYTES, BlockOp, ByteRange};
use holdfast_format::geometry::Layout;
use holdfast_volume::{Config, Counters};
use std::time::Duration;

const BLOCK: u64 = BLOCK_BYTES as u64;
const WRITTEN: u64 = 12 << 20;

/// A volume that was written once, and then every so-many-th block of it a second time.
fn written_again(seed: u64, bounds: Config, every: u64) -> World {
    let mut world = World::new(seed, 3, Layout::Mirror { copies: 2 }, WRITTEN);
    world.config = Some(bounds);
    world.open();
    world.write_all(0, WRITTEN);
    world.span(Duration::from_secs(10));
    for block in (0..WRITTEN / BLOCK).step_by(every as usize) {
        let write = world.write_op(block * BLOCK, BLOCK);
        world.answer(write, Duration::from_secs(30));
    }
    world.span(Duration::from_secs(10));
    world
}

/// In some hundred small segments, each a step of a search.
fn in_small_segments(seed: u64) -> World {
    let bounds = Config {
        search_step: 1,
        segment_payload_bytes: 16 << 10,
        direct_bytes_min: 8 << 10,
        map_cache_bytes_max: 64 << 10,
        ..config(seed, 1)
    };
    written_again(seed, bounds, 4)
}

fn counters(world: &World) -> Counters {
    world.controller.status().counters
}

#[test]
fn an_idle_volume_searches_at_the_pace_of_its_ticks() {
    let mut world = in_small_segments(1);
    let until = world.now + Duration::from_secs(60);
    let mut wakes = 0;
    while world.now < until {
        world.span(Duration::from_nanos(1));
        wakes += 1;
    }
    // Twice a second for itself, and now and then for others.
    assert!((60..300).contains(&wakes), "{wakes}");
}

#[test]
fn what_a_long_search_has_found_outlives_folds() {
    let mut world = in_small_segments(2);
    world.free_now(holdfast_volume::reserve_bytes(&config(0, 0), CAPACITY) + (32 << 10));
    let before = counters(&world);
    // Discards change the map, so that there is something to fold, and need no room.
    for i in 0..WRITTEN / BLOCK / 2 {
        let at = (i * 5 % (WRITTEN / BLOCK)) * BLOCK;
        let discard = world.request(BlockOp::Discard(ByteRange::new(at, BLOCK)));
        world.answer(discard, Duration::from_secs(30));
        world.span(Duration::from_millis(10));
    }
    let after = counters(&world);

    assert!(after.folds - before.folds >= 8, "{before:?} {after:?}");
    assert!(after.segments_cleaned - before.segments_cleaned >= 64, "{before:?} {after:?}");
}

#[test]
fn what_lies_in_many_pieces_is_not_read_all_at_once() {
    let bounds = Config { segment_payload_bytes: 2 << 20, direct_bytes_min: 4 << 20, ..config(3, 1) };
    let reserve = holdfast_volume::reserve_bytes(&bounds, CAPACITY);
    let mut world = written_again(3, bounds, 2);
    let before = counters(&world);
    world.queue_max = 0;
    world.free_now(reserve + (32 << 10));
    world.span(Duration::from_secs(10));
    let cleaned = (counters(&world).cleaned_bytes - before.cleaned_bytes) / BLOCK;

    assert!(cleaned > 500, "{cleaned} blocks were moved");
    assert!(world.queue_max < 50, "{} questions at once, of {cleaned} blocks", world.queue_max);
}
