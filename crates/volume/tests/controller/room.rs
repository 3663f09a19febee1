//! Writes on a grid that is nearly full: held back while there is hope, refused when there is none, and never for ever.

use crate::support::*;
use holdfast_base::{BLOCK_BYTES, BlockData, BlockError, BlockOp, ByteRange};
use holdfast_format::geometry::Layout;
use holdfast_format::segment::{SegmentIndex, ShardHeader};
use holdfast_volume::{Claim, Event};
use std::time::Duration;

const MIRROR: Layout = Layout::Mirror { copies: 2 };
const BLOCK: u64 = BLOCK_BYTES as u64;

/// What guests' writes leave free on a device.
fn reserve() -> u64 {
    holdfast_volume::reserve_bytes(&config(0, 0), CAPACITY)
}

/// A volume of 6 MiB, of which 4 are written, and every eighth block again: an eighth is dead, no segment wholly.
fn with_dead(seed: u64) -> World {
    let mut world = World::new(seed, 3, MIRROR, 6 << 20);
    world.write_all(0, 4 << 20);
    world.span(Duration::from_secs(30));
    for i in 0..128 {
        let write = world.write_op(i * 8 * BLOCK, BLOCK);
        world.answer(write, Duration::from_secs(30));
    }
    world.span(Duration::from_secs(20));
    world
}

/// What becomes of a write of a block; it is answered within any patience.
fn write_one(world: &mut World) -> Result<(), BlockError> {
    let write = world.write_op(0, BLOCK);
    outcome(world, write, Duration::from_secs(20))
}

fn outcome(world: &mut World, token: u64, within: Duration) -> Result<(), BlockError> {
    let answer = world.answer(token, within).1.expect("no request is held back for ever");
    answer.map(|data| assert!(matches!(data, BlockData::Done)))
}

#[test]
fn what_was_just_discarded_is_waited_for() {
    let mut world = World::new(4, 3, MIRROR, 6 << 20);
    world.write_all(0, 4 << 20);
    world.span(Duration::from_secs(30));
    world.free_now(reserve() * 3 / 4);
    world.span(Duration::from_secs(15));
    let discard = world.request(BlockOp::Discard(ByteRange::new(0, 3 << 20)));
    assert_eq!(outcome(&mut world, discard, Duration::from_millis(1)), Ok(()), "discards don't wait");
    assert_eq!(write_one(&mut world), Ok(()));
}

#[test]
fn checkpoints_make_no_room() {
    // What is dead can't be moved, since its segments can't be read.
    let mut world = with_dead(6);
    for node in &mut world.nodes {
        node.journal_fill = 150;
        node.shards.retain(|shard, (header_blocks, bytes)| {
            let header = ShardHeader::decode(*shard, &bytes[..*header_blocks as usize * BLOCK_BYTES]).unwrap();
            matches!(header.index, SegmentIndex::Meta)
        });
    }
    world.free_now(reserve() / 2);
    world.span(Duration::from_secs(10));
    assert_eq!(write_one(&mut world), Err(BlockError::NoSpace));
}

#[test]
fn attempts_make_no_room() {
    // Nodes say that they have room, and refuse every long shard.
    let mut world = with_dead(7);
    world.free_now(reserve() * 7 / 8);
    world.nodes.iter_mut().for_each(|node| node.refuse_above = 40 << 10);
    world.span(Duration::from_secs(6));
    assert_eq!(write_one(&mut world), Err(BlockError::NoSpace));
}

#[test]
fn beside_older_hosts_writes_leave_what_is_not_promised() {
    let mut world = World::new(8, 3, MIRROR, 6 << 20);
    world.write_all(0, 4 << 20);
    world.span(Duration::from_secs(30));
    world.free_now(reserve() + holdfast_volume::spare_bytes(&config(0, 0), CAPACITY) / 2);
    for (keep, expected) in [(true, Err(BlockError::NoSpace)), (false, Ok(())), (true, Err(BlockError::NoSpace))] {
        world.push(Event::KeepSpare(keep));
        world.span(Duration::from_secs(10));
        assert_eq!(write_one(&mut world), expected, "{keep}");
    }
}

#[test]
fn an_idle_volume_on_a_full_grid_rests() {
    let mut world = World::new(3, 3, MIRROR, 6 << 20);
    world.write_all(0, 4 << 20);
    world.span(Duration::from_secs(30));
    world.free_now(reserve() * 3 / 8);
    world.span(Duration::from_secs(10));
    let before = world.controller.status().counters;
    world.span(Duration::from_secs(120));
    let after = world.controller.status().counters;
    assert!(after.checkpoints - before.checkpoints < 3, "{before:?} {after:?}");
}

#[test]
fn discards_are_not_slowed() {
    let mut world = with_dead(12);
    world.free_now(reserve() + (64 << 10));
    world.span(Duration::from_secs(3));
    let from = world.now;
    for i in 0..200 {
        let discard = world.request(BlockOp::Discard(ByteRange::new(i * BLOCK, BLOCK)));
        assert_eq!(outcome(&mut world, discard, Duration::from_millis(1)), Ok(()));
    }
    assert_eq!(world.now, from, "at once");
}

#[test]
fn what_waits_while_the_end_is_cut_off_lies_beyond_it() {
    let mut world = World::new(1, 3, MIRROR, 6 << 20);
    world.nodes.iter_mut().for_each(|node| node.refuse_above = 0);
    world.write_all(0, 700 << 10);
    // Behind a write that the curve slows.
    world.write_op(5 << 20, BLOCK);
    world.write_op(0, BLOCK);
    let part = |at: u64| BlockOp::WriteZeroes(ByteRange::new(at + 100, 1000));
    let waiting = [world.request(part(5 << 20)), world.request(part((5 << 20) + BLOCK))];
    world.push(Event::Resize { size_bytes: 4 << 20 });
    world.push(Event::Tick);
    world.free_now(100 << 10);
    for i in 0..3 {
        world.node_down(i);
        world.nodes[i].up = true;
        world.announce(i);
    }
    world.span(Duration::from_secs(1));
    for token in waiting {
        let answer = world.replies.remove(&token).expect("answered");
        assert!(matches!(answer, Ok(BlockData::Done) | Err(BlockError::OutOfRange)), "{answer:?}");
    }
}

#[test]
fn a_part_that_waits_for_another_write_outlives_its_own() {
    let mut world = World::new(2, 3, MIRROR, 6 << 20);
    world.write_all(0, 1 << 20);
    world.span(Duration::from_secs(20));
    world.nodes.iter_mut().for_each(|node| node.hang_appends = true);
    let modify = world.write_op(100 * BLOCK + 10, 100);
    // The partial block in front of this one can't be read any more; the rest waits for the first write.
    world.nodes.iter_mut().for_each(|node| node.shards.clear());
    let write = world.write_op(98 * BLOCK + 10, 5 * BLOCK);
    for i in 0..3 {
        world.nodes[i].hang_appends = false;
        world.node_resumes(i);
    }
    assert_eq!(outcome(&mut world, modify, Duration::from_secs(2)), Ok(()));
    assert_eq!(outcome(&mut world, write, Duration::from_secs(2)), Err(BlockError::Unavailable));
}

#[test]
fn what_others_own_is_not_written_to() {
    let mut world = World::new(9, 3, MIRROR, 6 << 20);
    world.write_all(0, 2 << 20);
    world.span(Duration::from_secs(30));
    world.free_now(12 << 20);
    world.span(Duration::from_secs(10));
    assert_eq!(write_one(&mut world), Ok(()));
    // All that is above the reserve, of each node.
    let claims = vec![Claim { width: 3, shard_bytes: 12 << 20 }];
    world.push(Event::SetAside { claims });
    world.drain();
    let destaged = world.controller.status().counters.segments_written;
    let refused = world.write_op(4 << 20, BLOCK);
    assert_eq!(outcome(&mut world, refused, Duration::from_secs(20)), Err(BlockError::NoSpace));
    assert!(world.controller.status().counters.segments_written > destaged, "what was acknowledged is destaged");
    let discard = world.request(BlockOp::Discard(ByteRange::new(0, BLOCK)));
    assert_eq!(outcome(&mut world, discard, Duration::from_millis(1)), Ok(()), "discards go on");
    world.push(Event::SetAside { claims: Vec::new() });
    assert_eq!(write_one(&mut world), Ok(()), "the owner has let go of it");
}

#[test]
fn writes_stop_short_of_what_others_own() {
    let mut world = World::new(10, 3, MIRROR, 32 << 20);
    world.span(Duration::from_secs(1));
    world.free_now(16 << 20);
    world.span(Duration::from_secs(10));
    let owned = 8 << 20;
    world.push(Event::SetAside { claims: vec![Claim { width: 3, shard_bytes: owned }] });
    world.drain();
    let mut written = 0;
    // Many at a time, long ones past the log: what is under way counts.
    for round in 0..16 {
        let writes: Vec<u64> = (0..2).map(|i| world.write_op((round * 2 + i) << 20, 1 << 20)).collect();
        let done = writes.iter().filter(|w| outcome(&mut world, **w, Duration::from_secs(20)).is_ok()).count();
        written += done as u64;
    }
    assert!(written > 0, "what nobody owns is written to");
    world.span(Duration::from_secs(20));
    let least = world.nodes.iter().map(|n| n.stat().free_bytes).min().unwrap();
    let reserve = reserve();
    // Maps and checkpoints may take a little of it: owners own a sixteenth more than they will write.
    assert!(
        least + owned / 16 >= owned + reserve,
        "{least} of {owned} and {reserve} are left, {written} MiB were written"
    );
}
