//! What a map takes in memory while it is written to everywhere.

use crate::support::*;
use holdfast_base::{BLOCK_BYTES, BlockOp, Buf, ByteRange, Prng};
use holdfast_format::geometry::Layout;
use holdfast_volume::Config;
use std::collections::BTreeMap;
use std::time::Duration;

const BLOCK: u64 = BLOCK_BYTES as u64;

/// Half of the memory for the map, by what a change takes there.
const CHANGES_MAX: u64 = (256 << 10) / 2 / 160;

#[test]
fn changes_of_a_map_that_is_written_to_everywhere_go_to_leaves_while_it_is_cheap() {
    const SIZE: u64 = 256 << 30;
    let mut world = World::new(11, 3, Layout::Mirror { copies: 2 }, SIZE);
    let mut bounds = config(11, 0);
    (bounds.map_cache_bytes_max, bounds.writeback_bytes_max) = (256 << 10, 128 << 20);
    world.config = Some(bounds);
    world.nodes.iter_mut().for_each(|node| node.capacity_bytes = 1 << 30);
    world.open();
    let mut rng = Prng::new(5);
    let mut written = BTreeMap::new();
    let mut most = 0;
    for _ in 0..32 {
        let tokens: Vec<u64> = (0..1_000)
            .map(|_| {
                let (at, mark) = (rng.below(SIZE / BLOCK) * BLOCK, rng.next_u64());
                written.insert(at, mark);
                let data = mark.to_le_bytes().repeat(BLOCK_BYTES / 8);
                world.request(BlockOp::Write { offset: at, data: Buf::copy_from(&data) })
            })
            .collect();
        tokens.into_iter().for_each(|token| drop(world.wait(token)));
        // As many as a fast volume takes: folds and checkpoints go in slices, with pauses in between.
        world.span(Duration::from_millis(40));
        let anatomy = world.controller.anatomy();
        // What is in the log is in no segment yet.
        most = most.max(anatomy.cache.changes.saturating_sub(anatomy.log.entries));
    }
    assert!(most < 4 * CHANGES_MAX, "{most} changes are in memory, and {CHANGES_MAX} may be");
    let check = |world: &mut World| {
        for (at, mark) in &written {
            assert_eq!(world.read(*at, 8), mark.to_le_bytes(), "at {at}");
        }
    };
    check(&mut world);
    world.open();
    check(&mut world);
}

#[test]
fn a_discard_across_places_without_leaves_is_cut_in_two_by_its_fold() {
    const LEAF: u64 = 512 * BLOCK;
    let mut world = World::new(12, 3, Layout::Mirror { copies: 2 }, 4 * LEAF);
    world.write_all(LEAF, BLOCK);
    world.settle(Duration::from_secs(40));
    let discard = world.request(BlockOp::Discard(ByteRange::new(0, 4 * LEAF)));
    world.wait(discard);
    world.settle(Duration::from_secs(40));
    assert_eq!(world.read(LEAF, BLOCK), vec![0; BLOCK_BYTES]);
    world.open();
    assert_eq!(world.read(LEAF, BLOCK), vec![0; BLOCK_BYTES]);
}

/// A checkpoint says what has changed since the one before; the first of such a chain says all that there was.
#[test]
fn what_is_discarded_leaves_no_checkpoints_of_its_size() {
    const SIZE: u64 = 64 << 20;
    for reopened in [false, true] {
        let mut world = World::new(13, 3, Layout::Mirror { copies: 2 }, SIZE);
        let mut bounds = config(13, 0);
        bounds.segment_payload_bytes = 64 << 10;
        world.config = Some(bounds);
        world.nodes.iter_mut().for_each(|node| node.capacity_bytes = 1 << 30);
        world.open();
        world.write_all(0, SIZE);
        world.settle(Duration::from_secs(40));
        if reopened {
            world.open();
        }
        let discard = world.request(BlockOp::Discard(ByteRange::new(0, SIZE)));
        world.wait(discard);
        world.settle(Duration::from_secs(60));
        let held: u64 = world.nodes.iter().map(|node| node.capacity_bytes - node.stat().free_bytes).sum();
        assert!(held <= 64 << 10, "{held} bytes are held for nothing; reopened: {reopened}");
    }
}

/// Four fifths of what there is, overwritten at random by guests who don't wait for each other, on nodes that take their time.
#[test]
fn beside_a_cleaner_that_is_always_at_work_the_overlay_is_folded() {
    const CAPACITY: u64 = 192 << 20;
    const CACHE: u64 = 512 << 10;
    let size = 3 * CAPACITY / 2 * 8 / 10 / BLOCK * BLOCK;
    let mut world = World::new(3, 3, Layout::Mirror { copies: 2 }, size);
    world.nodes.iter_mut().for_each(|node| node.capacity_bytes = CAPACITY);
    world.config = Some(Config {
        segment_payload_bytes: 64 << 10,
        writeback_bytes_max: 8 << 20,
        direct_bytes_min: 64 << 10,
        map_cache_bytes_max: CACHE,
        ..config(3, 1)
    });
    world.open();
    world.write_all(0, size);
    world.span(Duration::from_secs(10));
    world.slow = Some(Prng::new(9));
    let mut rng = Prng::new(5);
    let (mut open, mut done, mut most) = (Vec::new(), 0, 0);
    while done < 40_000 {
        while open.len() < 64 {
            open.push(world.write_op(rng.below(size / BLOCK) * BLOCK, BLOCK));
        }
        let at = world.next_at();
        world.step_to(at.max(world.now + Duration::from_nanos(1)));
        let before = open.len();
        let replies = &mut world.replies;
        open.retain(|token| replies.remove(token).map(|result| result.expect("it is written")).is_none());
        let answered = before - open.len();
        if done / 256 != (done + answered) / 256 {
            most = most.max(world.controller.anatomy().cache.changes);
        }
        done += answered;
    }
    // Half of the memory, 160 bytes each.
    let limit = CACHE / 2 / 160;
    assert!(most < 2 * limit, "{most} runs, of {limit}");
}
