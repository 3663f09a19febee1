//! Damage on a device: read around, or handed to a guest that asked for no checks, and never copied with a new checksum.

use crate::support::*;
use holdfast_base::{BLOCK_BYTES, BlockData, BlockOp, Buf, ByteRange, HeadId};
use holdfast_format::geometry::Layout;
use holdfast_format::segment::ShardHeader;
use holdfast_volume::{Change, Event};
use std::time::Duration;

const BLOCK: u64 = BLOCK_BYTES as u64;
const LEN: u64 = 1 << 20;

/// A volume on two nodes, of which one has a flipped bit in every block of guests' data.
fn damaged(seed: u64) -> (World, Vec<u8>) {
    let mut world = World::new(seed, 2, Layout::Mirror { copies: 2 }, 2 << 20);
    world.write_all(0, LEN);
    world.span(Duration::from_secs(30));
    let whole = world.read(0, LEN);
    world.nodes[0].shards.alter_data(|_, data| flip_blocks(data, 1));
    (world, whole)
}

/// Bytes in which the volume differs from what was written.
fn differing(world: &mut World, whole: &[u8]) -> Vec<usize> {
    let found = world.read(0, LEN);
    (0..whole.len()).filter(|i| found[*i] != whole[*i]).collect()
}

#[test]
fn damage_is_read_around_and_repaired() {
    let (mut world, whole) = damaged(1);
    assert!(differing(&mut world, &whole).is_empty());
    let counters = world.controller.status().counters;
    assert!(counters.checksum_errors > 0, "{counters:?}");
    world.span(Duration::from_secs(60));
    assert!(world.controller.status().counters.shards_rebuilt > 0);
    let errors = world.controller.status().counters.checksum_errors;
    assert!(differing(&mut world, &whole).is_empty());
    assert_eq!(world.controller.status().counters.checksum_errors, errors, "the damaged copies were made again");
}

#[test]
fn without_checks_a_guest_gets_what_the_disk_gives_and_nothing_else_does() {
    let (mut world, whole) = damaged(2);
    world.push(Event::CheckReads(false));
    let taken = Change::Snapshot { head: HeadId::VOLUME, name: "backup".to_string(), created_ms: 0 };
    let Ok(Some(snapshot)) = world.change(taken) else { panic!("no snapshot is taken") };
    let flipped = differing(&mut world, &whole);
    assert!(world.read_of(snapshot, 0, LEN) == whole, "backups are read from snapshots, and checked");
    assert!(!flipped.is_empty() && flipped.iter().all(|at| at % BLOCK_BYTES == 9), "{flipped:?}");
    // A write of a few bytes puts the rest of the block back, with a checksum that would vouch for it.
    for block in 0..LEN / BLOCK {
        let at = block * BLOCK + 100;
        let write = world.request(BlockOp::Write { offset: at, data: Buf::copy_from(&whole[at as usize..][..8]) });
        assert!(matches!(world.wait(write), BlockData::Done));
    }
    world.span(Duration::from_secs(30));
    assert!(differing(&mut world, &whole).is_empty(), "what was written anew is right");
    world.push(Event::CheckReads(true));
    assert!(differing(&mut world, &whole).is_empty());
}

/// Shards with a block that is not what it was.
fn damaged_shards(world: &World) -> usize {
    let is_damaged = |(shard, (header_blocks, bytes)): (&holdfast_base::ShardId, &(u32, Buf))| {
        let data_at = *header_blocks as usize * BLOCK_BYTES;
        let header = ShardHeader::decode(*shard, &bytes[..data_at]).unwrap();
        holdfast_base::block_crcs(&bytes.slice(data_at..bytes.len())) != header.block_crcs
    };
    world.nodes.iter().map(|node| node.shards.iter().filter(|held| is_damaged(*held)).count()).sum()
}

#[test]
fn segments_damaged_in_two_shards_are_repaired_where_each_block_can_be() {
    for seed in 0..4 {
        let mut world = World::new(seed, 4, Layout::Parity { data: 2, parity: 1 }, 2 << 20);
        // Shards of several stripes.
        let mut bounds = config(seed, 1);
        (bounds.segment_payload_bytes, bounds.direct_bytes_min) = (512 << 10, 256 << 10);
        world.config = Some(bounds);
        world.open();
        world.write_all(0, LEN);
        world.span(Duration::from_secs(30));
        let whole = world.read(0, LEN);
        for node in &mut world.nodes {
            node.shards.alter_data(|shard, data| {
                let blocks = data.len() / BLOCK_BYTES;
                // The first block of one, the last of the other.
                let at = [0, blocks.saturating_sub(1)].get(usize::from(shard.index)).copied();
                if let Some(at) = at.filter(|_| blocks > 16) {
                    data[at * BLOCK_BYTES] ^= 1;
                }
            });
        }
        assert!(damaged_shards(&world) > 2, "seed {seed}");
        assert!(differing(&mut world, &whole).is_empty(), "each block can be read");
        world.span(Duration::from_secs(60));
        assert_eq!(damaged_shards(&world), 0, "seed {seed}: nothing damaged is left");
        world.node_down(0);
        assert!(differing(&mut world, &whole).is_empty(), "seed {seed}");
    }
}

#[test]
fn a_repair_that_fails_when_its_segment_has_gone_leaves_nothing_behind() {
    let mut world = World::new(7, 3, Layout::Mirror { copies: 2 }, 8 << 20);
    let mut bounds = config(7, 0);
    bounds.rebuild_after = Duration::from_secs(1);
    world.config = Some(bounds);
    world.open();
    world.write_all(0, 4 << 20);
    world.span(Duration::from_secs(30));
    world.node_down(2);
    world.nodes.iter_mut().for_each(|node| node.hang_shard_reads = true);
    let read_by = |world: &World| world.nodes.iter().position(|node| !node.waiting.is_empty());
    world.run_until(|world| read_by(world).is_some());
    let freed = world.controller.status().counters.segments_freed;
    let discard = world.request(BlockOp::Discard(ByteRange::new(0, 8 << 20)));
    world.wait(discard);
    world.run_until(|world| world.controller.status().counters.segments_freed > freed);
    let source = read_by(&world).expect("it waits");
    world.node_down(source);
    world.span(Duration::from_secs(1));
    let dump = world.controller.dump();
    assert!(dump.contains("queue: {}") && dump.contains("paused: {}"), "{dump}");
}
