//! The read cache on fake disks: a node with a fast device (slot 0) and a slow one (slot 1).

use crate::support::*;
use holdfast_base::{Buf, Epoch, MediaClass, Prng, VolumeId, buf};
use holdfast_format::wire::{CacheStat, DeviceHealth, Refusal, Reply, Request};
use holdfast_store::Notice;
use std::collections::BTreeSet;

const FAST: usize = 0;
const SLOW: usize = 1;
const VOLUME: u128 = 5;

/// With half of the fast device for the cache.
fn rig(seed: u64) -> Rig {
    let disks = [(MediaClass::Ssd, 4 << 20), (MediaClass::Hdd, 16 << 20)];
    Rig::mixed(seed, &disks, |config| config.read_cache_per_mille = 500)
}

fn put_slow(rig: &mut Rig, counter: u64, blocks: u32) -> Reply {
    let (request, payload) = put_on(SLOW, VOLUME, 1, counter, blocks);
    rig.call_with(request, payload).0
}

fn expected(counter: u64, block: u32, blocks: u32) -> Vec<u8> {
    shard_data(shard_id(VOLUME, 1, counter), block + blocks)[block as usize * 4096..].to_vec()
}

/// Reads from the slow device, and judges what comes.
fn read(rig: &mut Rig, counter: u64, block: u32, blocks: u32) {
    let got = rig.read_shard_of(SLOW, shard_id(VOLUME, 1, counter), block, blocks);
    assert_eq!(got.map(|bytes| bytes == expected(counter, block, blocks)), Ok(true), "{counter}: {block}+{blocks}");
}

/// So that it is held.
fn warm(rig: &mut Rig, counter: u64, block: u32, blocks: u32) {
    (0..2).for_each(|_| read(rig, counter, block, blocks));
    rig.settle();
}

fn stat(rig: &Rig) -> CacheStat {
    let stats = rig.node.as_ref().unwrap().stats(rig.now);
    assert!(stats[SLOW].read_cache.is_none());
    stats[FAST].read_cache.unwrap_or_default()
}

fn delete(rig: &mut Rig, counter: u64) -> Reply {
    let shards = vec![shard_id(VOLUME, 1, counter)];
    rig.call(Request::DeleteShards { device: device(SLOW), volume: VolumeId(VOLUME), epoch: Epoch(1), shards })
}

#[test]
fn hits_read_nothing_from_the_slow_device() {
    let mut rig = rig(1);
    (0..4).for_each(|counter| assert!(is_done(&put_slow(&mut rig, counter, 40))));
    for (block, blocks) in [(0, 2), (5, 20), (39, 1)] {
        (0..4).for_each(|counter| warm(&mut rig, counter, block, blocks));
    }
    let (read_before, hits_before) = (rig.disks[SLOW].bytes_read, stat(&rig).hits);
    for checked in [true, false] {
        for (block, blocks) in [(0, 2), (0, 1), (5, 20), (7, 13), (39, 1)] {
            let shard = shard_id(VOLUME, 1, 2);
            let request = Request::ReadShard { device: device(SLOW), shard, block, blocks, checked, cached: true };
            let (reply, payload) = rig.call_with(request, Buf::empty());
            assert_eq!((reply, buf::concat(&payload).to_vec()), (Reply::Shard { blocks }, expected(2, block, blocks)));
        }
    }
    assert_eq!((rig.disks[SLOW].bytes_read, stat(&rig).hits), (read_before, hits_before + 10));
    // Who wants to know whether the shard can be read is told of the shard.
    let (device, shard) = (device(SLOW), shard_id(VOLUME, 1, 2));
    rig.call(Request::ReadShard { device, shard, block: 0, blocks: 2, checked: true, cached: false });
    assert_eq!(rig.disks[SLOW].bytes_read, read_before + 2 * 4096);
    rig.disks[SLOW].bad_reads.push(0..16 << 20);
    assert_eq!(
        rig.call(Request::ReadShard { device, shard, block: 0, blocks: 2, checked: true, cached: false }),
        Reply::Refused(Refusal::Checksum)
    );
    read(&mut rig, 2, 0, 2);
}

#[test]
fn nothing_is_cached_where_devices_are_alike_or_it_is_off() {
    for (classes, per_mille) in [([MediaClass::Ssd; 2], 500), ([MediaClass::Ssd, MediaClass::Hdd], 0)] {
        let disks = classes.map(|class| (class, 4 << 20));
        let mut rig = Rig::mixed(2, &disks, |config| config.read_cache_per_mille = per_mille);
        assert!(is_done(&put_slow(&mut rig, 1, 8)));
        (0..5).for_each(|_| warm(&mut rig, 1, 0, 8));
        assert_eq!(rig.node.as_ref().unwrap().stats(rig.now)[FAST].read_cache, None);
        assert!(rig.disks[SLOW].bytes_read > 10 * 8 * 4096);
    }
}

#[test]
fn the_class_that_an_operator_sets_turns_it_on_and_off() {
    let disks = [(MediaClass::Ssd, 4 << 20), (MediaClass::Ssd, 16 << 20)];
    let mut rig = Rig::mixed(3, &disks, |config| config.read_cache_per_mille = 500);
    assert!(is_done(&put_slow(&mut rig, 1, 8)));
    let set = |rig: &mut Rig, slot, media| {
        assert!(is_done(&rig.call(Request::SetMedia { device: device(slot), media: Some(media) })));
    };
    let free = |rig: &Rig| rig.node.as_ref().unwrap().stats(rig.now)[FAST].free_bytes;
    let free_before = free(&rig);
    set(&mut rig, SLOW, MediaClass::Hdd);
    warm(&mut rig, 1, 0, 8);
    assert_eq!((stat(&rig).held_bytes, free(&rig)), (8 * 4096, free_before), "what is held counts as free");
    set(&mut rig, FAST, MediaClass::Hdd);
    rig.settle();
    assert_eq!(rig.node.as_ref().unwrap().stats(rig.now)[FAST].read_cache, None);
    read(&mut rig, 1, 0, 8);
    // The other way round: now it is the second device that lends.
    set(&mut rig, SLOW, MediaClass::Nvme);
    let stats = rig.node.as_ref().unwrap().stats(rig.now);
    assert!(stats[SLOW].read_cache.is_some() && stats[FAST].read_cache.is_none());
}

#[test]
fn shards_find_all_the_space_that_they_would_find_without_a_cache() {
    let fill = |rig: &mut Rig| {
        let mut done = 0;
        for counter in 1000.. {
            let (request, payload) = put_on(FAST, VOLUME, 1, counter, 1 + (counter % 30) as u32);
            match rig.call_with(request, payload).0 {
                Reply::Done => done += 1,
                reply => {
                    assert_eq!(reply, Reply::Refused(Refusal::NoSpace));
                    break;
                }
            }
        }
        done
    };
    let mut without = rig(4);
    let mut with = rig(4);
    (0..10).for_each(|counter| assert!(is_done(&put_slow(&mut with, counter, 64))));
    (0..10).for_each(|counter| warm(&mut with, counter, 0, 64));
    let held = stat(&with).held_bytes;
    assert!(held > 1 << 20, "{held}");
    assert_eq!(fill(&mut with), fill(&mut without));
    assert_eq!(stat(&with).held_bytes, 0);
    (0..10).for_each(|counter| read(&mut with, counter, 0, 64));
    with.settle();
}

#[test]
fn a_put_never_meets_a_write_of_the_cache() {
    for seed in 0..40 {
        let mut rig = rig(100 + seed);
        (0..12).for_each(|counter| assert!(is_done(&put_slow(&mut rig, counter, 64))));
        (0..12).for_each(|counter| read(&mut rig, counter, 0, 64));
        // Writes of the cache stay under way while shards fill the device.
        let mut puts = Vec::new();
        for counter in 0..60 {
            let (block, blocks) = (rig.prng.below(40) as u32, 1 + rig.prng.below(20) as u32);
            let shard = shard_id(VOLUME, 1, counter % 12);
            let device_id = device(SLOW);
            rig.send(
                Request::ReadShard { device: device_id, shard, block, blocks, checked: true, cached: true },
                Buf::empty(),
            );
            let (request, payload) = put_on(FAST, VOLUME, 1, 1000 + counter, 1 + rig.prng.below(20) as u32);
            puts.push((rig.send(request.clone(), payload), counter));
            let steps = rig.prng.below(6);
            for _ in 0..steps {
                rig.complete_any();
            }
            rig.node.as_ref().unwrap().verify();
        }
        rig.settle();
        for (token, counter) in puts {
            let shard = shard_id(VOLUME, 1, 1000 + counter);
            if rig.replies[&token].0 == Reply::Done {
                let bytes = rig.read_shard_of(FAST, shard, 0, 1).unwrap();
                assert_eq!(bytes, shard_data(shard, 1), "seed {seed}");
            }
        }
        let damaged = rig.notices.iter().filter(|notice| matches!(notice, Notice::ShardDamaged { .. })).count();
        assert_eq!(damaged, 0, "seed {seed}");
    }
}

#[test]
fn a_deleted_shard_is_not_read_from_the_cache() {
    let mut rig = rig(5);
    (0..2).for_each(|counter| assert!(is_done(&put_slow(&mut rig, counter, 16))));
    (0..2).for_each(|counter| warm(&mut rig, counter, 0, 16));
    assert!(is_done(&delete(&mut rig, 0)));
    let gone = |counter| (SLOW, shard_id(VOLUME, 1, counter), 0, 1);
    let (slot, shard, block, blocks) = gone(0);
    assert_eq!(rig.read_shard_of(slot, shard, block, blocks), Err(Refusal::UnknownShard));
    assert_eq!(stat(&rig).held_bytes, 16 * 4096);
    read(&mut rig, 1, 0, 16);
    let (device, volume, epoch) = (device(SLOW), VolumeId(VOLUME), Epoch(1));
    assert!(is_done(&rig.call(Request::DropVolume { device, volume, epoch })));
    assert_eq!(stat(&rig).held_bytes, 0);
    rig.settle();
}

#[test]
fn damage_on_the_fast_device_is_no_damage_of_the_shard() {
    let mut rig = rig(6);
    assert!(is_done(&put_slow(&mut rig, 1, 16)));
    warm(&mut rig, 1, 0, 16);
    let areas = superblock(&rig).areas;
    // What was written is not durable: it is in the disk's own cache.
    rig.disks[FAST].spoil_cache(|bytes| bytes[0] ^= 1);
    read(&mut rig, 1, 0, 16);
    assert!(stat(&rig).damaged > 0);
    assert!(!rig.notices.iter().any(|notice| matches!(notice, Notice::ShardDamaged { .. })));
    warm(&mut rig, 1, 0, 16);
    rig.disks[FAST].bad_reads.push(areas.data_offset..4 << 20);
    read(&mut rig, 1, 0, 16);
    read(&mut rig, 1, 0, 16);
    rig.settle();
}

#[test]
fn what_hits_wait_for_on_a_device_that_fails_comes_from_the_other() {
    for seed in 0..20 {
        let mut rig = rig(200 + seed);
        assert!(is_done(&put_slow(&mut rig, 1, 64)));
        warm(&mut rig, 1, 0, 64);
        let device_id = device(SLOW);
        let read_of = |block| Request::ReadShard {
            device: device_id,
            shard: shard_id(VOLUME, 1, 1),
            block,
            blocks: 4,
            checked: true,
            cached: true,
        };
        let tokens: Vec<u64> = (0..16).map(|i| rig.send(read_of(i * 4), Buf::empty())).collect();
        rig.disks[FAST].fail_writes = true;
        let (request, payload) = put_on(FAST, VOLUME, 1, 50, 8);
        let put = rig.send(request, payload);
        rig.settle();
        assert_eq!(rig.replies[&put].0, Reply::Refused(Refusal::DeviceFailed));
        for (i, token) in (0..).zip(tokens) {
            let (reply, payload) = &rig.replies[&token];
            assert_eq!(*reply, Reply::Shard { blocks: 4 });
            assert_eq!(buf::concat(payload).to_vec(), expected(1, i * 4, 4));
        }
        assert_eq!(rig.node.as_ref().unwrap().stats(rig.now)[FAST].health, DeviceHealth::Failed);
        warm(&mut rig, 1, 0, 64);
    }
}

#[test]
fn a_write_of_the_cache_that_fails_harms_nothing_but_the_cache() {
    let mut rig = rig(7);
    assert!(is_done(&put_slow(&mut rig, 1, 16)));
    rig.disks[FAST].fail_writes = true;
    warm(&mut rig, 1, 0, 16);
    rig.disks[FAST].fail_writes = false;
    (0..3).for_each(|_| warm(&mut rig, 1, 0, 16));
    let stats = rig.node.as_ref().unwrap().stats(rig.now);
    assert_eq!((stats[FAST].health, stats[FAST].read_cache), (DeviceHealth::Serving, None));
    let (request, payload) = put_on(FAST, VOLUME, 1, 50, 8);
    assert!(is_done(&rig.call_with(request, payload).0));
    // Another start, another chance.
    rig.restart(Crash::Process);
    warm(&mut rig, 1, 0, 16);
    assert_eq!(stat(&rig).held_bytes, 16 * 4096);
}

/// Everything at once, with crashes: reads tell what was put, of shards that are there, and nothing else.
#[test]
fn whatever_happens_reads_tell_what_was_put() {
    for seed in 0..25 {
        let mut rig = rig(300 + seed);
        let mut random = Prng::new(seed);
        let mut live: [BTreeSet<u64>; 2] = Default::default();
        let (mut next, mut hits) = (0, 0);
        for _ in 0..300 {
            let slot = usize::from(random.chance(700));
            let of = |random: &mut Prng, live: &BTreeSet<u64>| {
                live.iter().nth(random.below(live.len() as u64) as usize).copied()
            };
            match random.below(100) {
                0..15 => {
                    next += 1;
                    let (request, payload) = put_on(slot, VOLUME, 1, next, 4 + (next % 40) as u32);
                    if is_done(&rig.call_with(request, payload).0) {
                        live[slot].insert(next);
                    }
                }
                15..22 if !live[slot].is_empty() => {
                    let counter = of(&mut random, &live[slot]).unwrap();
                    let (device, volume, epoch) = (device(slot), VolumeId(VOLUME), Epoch(1));
                    let shards = vec![shard_id(VOLUME, 1, counter)];
                    let reply = rig.call(Request::DeleteShards { device, volume, epoch, shards });
                    assert!(is_done(&reply), "{reply:?}");
                    live[slot].remove(&counter);
                    let gone = rig.read_shard_of(slot, shard_id(VOLUME, 1, counter), 0, 1);
                    assert_eq!(gone, Err(Refusal::UnknownShard));
                }
                22..24 => {
                    hits += stat(&rig).hits;
                    rig.restart(*random.pick(&[Crash::Process, Crash::Power]));
                }
                _ if !live[slot].is_empty() => {
                    let counter = of(&mut random, &live[slot]).unwrap();
                    let size = 4 + (counter % 40) as u32;
                    let block = random.below(u64::from(size) / 4) as u32 * 4;
                    let shard = shard_id(VOLUME, 1, counter);
                    let got = rig.read_shard_of(slot, shard, block, 4.min(size - block)).unwrap();
                    assert!(got == expected(counter, block, 4.min(size - block)), "seed {seed}: {counter}, {block}");
                }
                _ => {}
            }
            if random.chance(300) {
                rig.settle();
            }
        }
        rig.settle();
        hits += stat(&rig).hits;
        assert!(hits > 5, "seed {seed}: {hits} hits");
    }
}
