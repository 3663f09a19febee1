//! Discards and zeroings that don't begin and end at a block: what they take, and what they leave.

use crate::support::*;
use holdfast_base::{BLOCK_BYTES, BlockData, BlockOp, ByteRange, HeadId};
use holdfast_format::geometry::Layout;
use holdfast_volume::{Change, Target};
use std::time::Duration;

const BLOCK: u64 = BLOCK_BYTES as u64;
const SECTOR: u64 = 512;
const MIRROR: Layout = Layout::Mirror { copies: 2 };

fn mapped(world: &World) -> u64 {
    world.controller.status().mapped_blocks
}

fn do_it(world: &mut World, op: BlockOp) {
    let token = world.request(op);
    assert!(matches!(world.wait(token), BlockData::Done));
}

#[test]
fn the_edges_of_holes_stay_holes() {
    let mut world = World::new(21, 3, MIRROR, 8 << 20);
    for reopened in [false, true] {
        let entries = world.controller.anatomy().log.entries;
        for i in 0..200 {
            let range = ByteRange::new(SECTOR + i * 2 * BLOCK, BLOCK);
            do_it(&mut world, if i % 2 == 0 { BlockOp::Discard(range) } else { BlockOp::WriteZeroes(range) });
        }
        assert_eq!(mapped(&world), 0, "reopened: {reopened}");
        assert!(world.controller.anatomy().log.entries <= entries, "nothing goes into the log for nothing");
        // Across whole blocks as well, the last of which were there.
        world.write_all(100 * BLOCK, 4 * BLOCK);
        do_it(&mut world, BlockOp::Discard(ByteRange::new(90 * BLOCK + SECTOR, 15 * BLOCK)));
        assert_eq!(mapped(&world), 0, "reopened: {reopened}");
        assert!(world.read(0, 4 << 20) == vec![0; 4 << 20]);
        world.settle(Duration::from_secs(40));
        world.open();
    }
}

#[test]
fn a_block_of_which_nothing_is_left_becomes_a_hole_and_what_is_left_stays() {
    let mut world = World::new(22, 3, MIRROR, 8 << 20);
    for destaged in [false, true] {
        world.write_all(0, 4 * BLOCK);
        if destaged {
            world.settle(Duration::from_secs(40));
        }
        let before = world.read(0, 4 * BLOCK);
        do_it(&mut world, BlockOp::Discard(ByteRange::new(BLOCK + SECTOR, BLOCK - SECTOR)));
        assert_eq!(mapped(&world), 4);
        let mut wanted = before.clone();
        wanted[(BLOCK + SECTOR) as usize..2 * BLOCK_BYTES].fill(0);
        assert!(world.read(0, 4 * BLOCK) == wanted);
        do_it(&mut world, BlockOp::WriteZeroes(ByteRange::new(BLOCK, SECTOR)));
        assert_eq!(mapped(&world), 3, "destaged: {destaged}");
        wanted[BLOCK_BYTES..2 * BLOCK_BYTES].fill(0);
        assert!(world.read(0, 4 * BLOCK) == wanted);
        world.open();
        assert!(world.read(0, 4 * BLOCK) == wanted);
        assert_eq!(mapped(&world), 3, "opened anew; destaged: {destaged}");
    }
}

#[test]
fn a_hole_of_the_volume_over_bytes_of_its_snapshot_is_none() {
    let mut world = World::new(23, 3, MIRROR, 8 << 20);
    world.write_all(0, BLOCK);
    let before = world.read(0, BLOCK);
    let snapshot = Change::Snapshot { head: HeadId::VOLUME, name: "before".to_string(), created_ms: 0 };
    let made = world.change(snapshot).unwrap();
    let Some(snapshot @ Target::Snapshot(_)) = made else { panic!("{made:?}") };
    let half = BLOCK / 2;
    do_it(&mut world, BlockOp::Discard(ByteRange::new(0, half)));
    let rest = &before[half as usize..];
    assert_eq!(world.read(0, BLOCK), [&vec![0; half as usize], rest].concat());
    do_it(&mut world, BlockOp::Discard(ByteRange::new(half, half)));
    assert!(world.read(0, BLOCK) == vec![0; BLOCK_BYTES]);
    // Once more, where it is a hole by now.
    do_it(&mut world, BlockOp::Discard(ByteRange::new(SECTOR, SECTOR)));
    world.open();
    assert!(world.read(0, BLOCK) == vec![0; BLOCK_BYTES]);
    assert!(world.read_of(snapshot, 0, BLOCK) == before);
}
