//! Shards on a device whose free space is cut up: they lie in several extents, and are as whole as any other.

use crate::support::*;
use holdfast_base::{Buf, Epoch, ShardId, VolumeId};
use holdfast_format::wire::{Refusal, Reply, Request};
use holdfast_store::{JournalSizing, Notice};

fn delete(shards: Vec<ShardId>) -> Request {
    Request::DeleteShards { device: device(0), volume: VolumeId(5), epoch: Epoch(1), shards }
}

fn free_bytes(rig: &mut Rig) -> u64 {
    let Reply::Stat { devices } = rig.call(Request::Stat) else { panic!("a node tells its state") };
    devices[0].free_bytes
}

/// Full of small shards, of which every other one of the first `holes * 2` is then deleted: holes of four blocks.
fn cut_up(seed: u64, holes: usize) -> Rig {
    // Slots for the smallest shards: it is the data area that fills.
    let sizing = JournalSizing { shard_bytes_mean: 8 << 10, ..small_sizing() };
    let mut rig = Rig::new(seed, &[4 << 20], sizing);
    let mut counter = 0;
    while is_done(&rig.put(5, 1, counter + 1, 3)) {
        counter += 1;
    }
    // What is left is too short for one block and its header.
    while is_done(&rig.put(5, 1, counter + 1, 1)) {
        counter += 1;
    }
    let victims = rig.list(5).into_iter().take(holes * 2).step_by(2).collect();
    assert!(is_done(&rig.call(delete(victims))));
    rig
}

#[test]
fn a_shard_longer_than_every_hole_is_put_read_and_deleted() {
    let mut rig = cut_up(1, 12);
    let free = free_bytes(&mut rig);
    let shard = shard_id(5, 1, 1000);
    assert!(is_done(&rig.put(5, 1, 1000, 37)), "ten holes of four blocks hold 38");
    assert_eq!(free_bytes(&mut rig), free - 38 * 4096);
    let data = shard_data(shard, 37);
    for round in 0..2 {
        for (block, blocks) in [(0, 37), (0, 3), (2, 2), (3, 4), (6, 9), (36, 1)] {
            let expected = &data[block as usize * 4096..(block + blocks) as usize * 4096];
            assert_eq!(rig.read_shard(shard, block, blocks).as_deref(), Ok(expected), "{round}: {block} + {blocks}");
        }
        rig.restart(Crash::Power);
    }
    assert!(is_done(&rig.call(delete(vec![shard]))));
    assert_eq!(rig.read_shard(shard, 0, 1), Err(Refusal::UnknownShard));
    assert_eq!(free_bytes(&mut rig), free);
    rig.settle();
}

#[test]
fn however_it_is_cut_up_all_space_is_of_use() {
    let mut rig = cut_up(2, 60);
    let free = free_bytes(&mut rig);
    assert_eq!(rig.put(5, 1, 1000, 240), Reply::Refused(Refusal::NoSpace), "header and data are one block too many");
    assert!(is_done(&rig.put(5, 1, 1001, 200)), "in 51 extents, which six slots name");
    let left = rig.list(5);
    rig.restart(Crash::Power);
    assert_eq!(rig.list(5), left);
    let shard = shard_id(5, 1, 1001);
    assert_eq!(rig.read_shard(shard, 0, 200), Ok(shard_data(shard, 200)));
    assert!(is_done(&rig.call(delete(vec![shard]))));
    assert_eq!(free_bytes(&mut rig), free);
    rig.restart(Crash::Power);
    assert_eq!(free_bytes(&mut rig), free);
    rig.settle();
}

#[test]
fn a_shard_that_lacks_one_of_its_slots_is_lost_and_its_space_is_free() {
    let mut rig = cut_up(4, 60);
    let free = free_bytes(&mut rig);
    let areas = superblock(&rig).areas;
    let before = rig.disks[0].media().to_vec();
    assert!(is_done(&rig.put(5, 1, 1001, 200)));
    rig.settle();
    let changed = |at: &u64| rig.disks[0].media()[*at as usize..][..128] != before[*at as usize..][..128];
    let new: Vec<u64> =
        (0..u64::from(areas.slot_count)).map(|n| areas.slot_table_offset + n * 128).filter(changed).collect();
    assert_eq!(new.len(), 6, "slots that name it");
    rig.disks[0].corrupt(new[3] + 30);
    rig.restart(Crash::Power);
    assert!(rig.notices.iter().any(|n| matches!(n, Notice::SlotsDamaged { count: 2, .. })), "a slot, and the shard");
    assert_eq!(rig.read_shard(shard_id(5, 1, 1001), 0, 1), Err(Refusal::UnknownShard));
    assert_eq!(free_bytes(&mut rig), free);
    assert!(is_done(&rig.put(5, 1, 1001, 200)));
    rig.settle();
}

#[test]
fn damage_to_one_extent_refuses_reads_of_it_only() {
    let mut rig = cut_up(3, 10);
    let shard = shard_id(5, 1, 1000);
    assert!(is_done(&rig.put(5, 1, 1000, 35)));
    rig.settle();
    let data = shard_data(shard, 35);
    let media = rig.disks[0].media();
    let at = media.chunks_exact(4096).position(|b| *b == data[20 * 4096..21 * 4096]).expect("it is on the disk");
    rig.disks[0].corrupt(at as u64 * 4096 + 9);
    assert_eq!(rig.read_shard(shard, 0, 35), Err(Refusal::Checksum));
    assert_eq!(rig.read_shard(shard, 0, 20).as_deref(), Ok(&data[..20 * 4096]));
    rig.disks[0].bad_reads.push(at as u64 * 4096..at as u64 * 4096 + 1);
    assert_eq!(rig.read_shard(shard, 18, 4), Err(Refusal::Checksum), "a part that can't be read is damage, too");
    assert_eq!(rig.read_shard(shard, 24, 11).as_deref(), Ok(&data[24 * 4096..]));
}

#[test]
fn a_crash_while_extents_are_written_leaves_the_shard_whole_or_absent() {
    let mut acknowledged = 0;
    for seed in 10..90_u64 {
        let blocks = if seed % 2 == 0 { 36 } else { 150 };
        let mut rig = cut_up(seed, 60);
        let free = free_bytes(&mut rig);
        let shard = shard_id(5, 1, 1000);
        let (request, payload) = put(5, 1, 1000, blocks);
        let token = rig.send(request, payload);
        for _ in 0..seed * 7 % 55 {
            rig.complete_any();
        }
        let was_acknowledged = matches!(rig.replies.get(&token), Some((Reply::Done, _)));
        acknowledged += u64::from(was_acknowledged);
        rig.restart(if seed % 3 == 0 { Crash::Process } else { Crash::Power });
        match rig.read_shard(shard, 0, blocks) {
            Ok(data) => assert_eq!(data, shard_data(shard, blocks)),
            Err(refusal) => {
                assert_eq!(refusal, Refusal::UnknownShard);
                assert!(!was_acknowledged, "seed {seed}: an acknowledged shard is there");
                assert_eq!(free_bytes(&mut rig), free, "and no space is lost");
            }
        }
        // Whatever slots the crash has left behind, they are never taken for those of the shard's next life.
        for _ in 0..2 {
            assert!(is_done(&rig.put(5, 1, 1000, blocks)));
            rig.restart(Crash::Power);
            assert_eq!(rig.read_shard(shard, 0, blocks), Ok(shard_data(shard, blocks)));
            rig.send(delete(vec![shard]), Buf::empty());
            for _ in 0..seed % 3 {
                rig.complete_any();
            }
            rig.restart(Crash::Power);
        }
        rig.settle();
    }
    assert!((1..80).contains(&acknowledged), "some crashes come before the answer, some after: {acknowledged}");
}

#[test]
fn slots_that_could_not_be_read_at_one_start_never_come_back() {
    let mut rig = cut_up(5, 12);
    rig.settle();
    let at = superblock(&rig).areas.slot_table_offset + 3 * 4096;
    rig.disks[0].bad_reads.push(at..at + 4096);
    rig.restart(Crash::Process);
    // The space of those that were lost is used again, by a shard that is acknowledged.
    let shard = shard_id(5, 1, 1000);
    assert!(is_done(&rig.put(5, 1, 1000, 170)));
    rig.disks[0].bad_reads.clear();
    rig.notices.clear();
    rig.restart(Crash::Process);
    assert!(!rig.notices.iter().any(|n| matches!(n, Notice::SlotsDamaged { .. })), "what was untrue was written anew");
    assert_eq!(rig.read_shard(shard, 0, 170), Ok(shard_data(shard, 170)));
}

#[test]
fn the_first_slot_of_a_lost_shard_never_leads_to_slots_of_its_next_life() {
    for seed in 0..80_u64 {
        // The lowest free slot, where the shard begins, is alone in its block.
        let mut rig = cut_up(seed, 0);
        let all = rig.list(5);
        let victims = all.iter().take(1).chain(all.iter().skip(40).step_by(2).take(59)).copied().collect();
        assert!(is_done(&rig.call(delete(victims))));
        let areas = superblock(&rig).areas;
        let before = rig.disks[0].media().to_vec();
        assert!(is_done(&rig.put(5, 1, 1001, 200)));
        rig.settle();
        let changed = |at: &u64| rig.disks[0].media()[*at as usize..][..128] != before[*at as usize..][..128];
        let slots = (0..u64::from(areas.slot_count)).map(|n| areas.slot_table_offset + n * 128);
        let damaged = slots.filter(changed).nth(3).expect("a further slot");
        rig.disks[0].corrupt(damaged + 30);
        rig.restart(Crash::Power);
        let shard = shard_id(5, 1, 1001);
        assert_eq!(rig.read_shard(shard, 0, 1), Err(Refusal::UnknownShard));
        // Other shards go, so that its next life lies elsewhere; and that is cut short.
        let others = |s: &ShardId| (42..150).contains(&s.segment.counter) && s.segment.counter % 4 == 2;
        let victims: Vec<ShardId> = rig.list(5).into_iter().filter(others).collect();
        assert!(is_done(&rig.call(delete(victims))));
        let (request, payload) = put(5, 1, 1001, 200);
        rig.send(request, payload);
        for _ in 0..seed % 40 {
            rig.complete_any();
        }
        rig.restart(Crash::Power);
        match rig.read_shard(shard, 0, 200) {
            Ok(data) => assert_eq!(data, shard_data(shard, 200)),
            Err(refusal) => assert_eq!(refusal, Refusal::UnknownShard, "seed {seed}"),
        }
        assert!(is_done(&rig.put(5, 1, 1001, 200)));
        assert_eq!(rig.read_shard(shard, 0, 200), Ok(shard_data(shard, 200)), "seed {seed}");
    }
}

#[test]
fn a_device_that_fails_with_parts_in_flight_answers_everything_once() {
    for seed in 0..60_u64 {
        let mut rig = cut_up(seed, 60);
        assert!(is_done(&rig.put(5, 1, 1000, 60)));
        if seed % 2 == 0 {
            rig.config.shard_table_cache_bytes = 0;
        }
        rig.restart(Crash::Process);
        let (large, others) = (shard_id(5, 1, 1000), rig.list(5));
        let read = |shard, block, blocks| Request::ReadShard {
            device: device(0),
            shard,
            block,
            blocks,
            checked: true,
            cached: true,
        };
        let mut tokens = Vec::new();
        for i in 0..30 {
            let (request, payload) = match i % 5 {
                0 => (read(large, i % 20, 30), Buf::empty()),
                1 => put(5, 1, 2000 + u64::from(i % 12), 20),
                2 => (Request::ReadShardHeader { device: device(0), shard: large }, Buf::empty()),
                3 => (delete(vec![others[i as usize]]), Buf::empty()),
                _ => (read(others[i as usize], 0, 1), Buf::empty()),
            };
            tokens.push(rig.send(request, payload));
            for _ in 0..rig.prng.below(4) {
                rig.complete_any();
            }
        }
        rig.disks[0].fail_writes = true;
        let (request, payload) = put(5, 1, 3000, 20);
        tokens.push(rig.send(request, payload));
        while rig.complete_any() || rig.tick() {}
        // The rig itself refuses a second answer.
        assert!(tokens.iter().all(|token| rig.replies.contains_key(token)), "seed {seed}: something is never answered");
    }
}
