//! Devices that take a few operations at a time: what waits, what passes what, and what becomes of it when one fails.

use crate::support::{FakeDisk, Rig, append, device, is_appended, is_done, put, shard_id};
use holdfast_base::{Buf, MediaClass, Urgency};
use holdfast_format::wire::{Refusal, Reply, Request};
use holdfast_store::{FailReason, JournalSizing, Notice};
use std::time::Duration;

/// A node whose device takes so many at a time.
fn rig(seed: u64, in_flight_max: usize) -> Rig {
    Rig::mixed(seed, &[(MediaClass::Ssd, 16 << 20)], |config| config.disk_in_flight_max = in_flight_max)
}

fn put_many(rig: &mut Rig, counters: std::ops::Range<u64>) -> Vec<u64> {
    let each = |counter| {
        let (request, payload) = put(9, 1, counter, 4);
        rig.send(request, payload)
    };
    counters.map(each).collect()
}

fn check(rig: &mut Rig, counter: u64) -> u64 {
    rig.send(Request::CheckShard { device: device(0), shard: shard_id(9, 1, counter) }, Buf::empty())
}

/// Operations that end before the request is answered.
fn ended_before(rig: &mut Rig, token: u64) -> usize {
    let mut ended = 0;
    while !rig.replies.contains_key(&token) {
        assert!(rig.complete_oldest(0) || rig.tick(), "request {token} is never answered");
        rig.end_moment();
        ended += 1;
    }
    ended
}

#[test]
fn everything_is_answered_whatever_a_device_takes_at_a_time() {
    for seed in 0..40 {
        let mut rig = rig(seed, [1, 2, 3, 8][seed as usize % 4]);
        assert!(is_done(&rig.create(1, 1, 0)));
        let puts = put_many(&mut rig, 0..30);
        let (request, payload) = append(1, 1, 0, 1, 0, 2);
        let appended = rig.send(request, payload);
        rig.settle();
        assert!(is_appended(&rig.replies[&appended].0));
        assert!(puts.iter().all(|put| is_done(&rig.replies[put].0)));
        for counter in 0..30 {
            assert!(rig.read_shard(shard_id(9, 1, counter), 0, 4).is_ok());
        }
    }
}

#[test]
fn an_append_does_not_wait_for_a_burst_of_shards() {
    for in_flight_max in [1, 2, 4] {
        let mut rig = rig(1, in_flight_max);
        assert!(is_done(&rig.create(1, 1, 0)));
        let puts = put_many(&mut rig, 0..60);
        let (request, payload) = append(1, 1, 0, 1, 0, 2);
        let appended = rig.send(request, payload);
        rig.end_moment();
        let ended = ended_before(&mut rig, appended);
        assert!(ended <= 2 * in_flight_max + 1, "{ended} operations came first, {in_flight_max} at a time");
        assert!(puts.iter().filter(|put| rig.replies.contains_key(put)).count() < 10, "the burst still waits");
        rig.settle();
        assert!(puts.iter().all(|put| is_done(&rig.replies[put].0)));
    }
}

#[test]
fn a_check_is_passed_by_reads_and_comes_about_while_they_go_on() {
    let mut rig = rig(2, 1);
    put_many(&mut rig, 0..10);
    rig.settle();
    // Its table is at hand.
    assert!(rig.read_shard(shard_id(9, 1, 1), 0, 1).is_ok());
    let read = |rig: &mut Rig| {
        let shard = shard_id(9, 1, 1);
        let read = Request::ReadShard { device: device(0), shard, block: 0, blocks: 1, checked: true, cached: false };
        rig.send(read, Buf::empty())
    };
    let reads: Vec<u64> = (0..4).map(|_| read(&mut rig)).collect();
    let checked = check(&mut rig, 1);
    let later = read(&mut rig);
    assert!(ended_before(&mut rig, later) <= 5, "a read does not wait for a check");
    assert!(reads.iter().all(|read| rig.replies.contains_key(read)) && !rig.replies.contains_key(&checked));
    let mut ended = 0;
    while !rig.replies.contains_key(&checked) {
        read(&mut rig);
        read(&mut rig);
        assert!(rig.complete_oldest(0));
        ended += 1;
        assert!(ended < 12, "reads keep a check from coming about");
    }
}

#[test]
fn what_waits_for_a_device_that_fails_is_refused_and_never_reaches_it() {
    for seed in 0..20 {
        let mut rig = rig(seed, 2);
        assert!(is_done(&rig.create(1, 1, 0)));
        put_many(&mut rig, 0..10);
        rig.settle();
        let puts = put_many(&mut rig, 10..40);
        let reads: Vec<u64> = (0..10)
            .map(|counter| {
                let shard = shard_id(9, 1, counter);
                let (block, blocks) = (0, 4);
                let read =
                    Request::ReadShard { device: device(0), shard, block, blocks, checked: false, cached: false };
                rig.send(read, Buf::empty())
            })
            .collect();
        rig.disks[0].fail_writes = true;
        while rig.complete_any() {}
        rig.node.as_ref().unwrap().verify();
        let refused = |token: &u64| rig.replies[token].0 == Reply::Refused(Refusal::DeviceFailed);
        assert!(puts.iter().all(refused));
        assert!(reads.iter().filter(|read| refused(read)).count() >= 8, "they waited");
        let failed =
            |notice: &&Notice| matches!(notice, Notice::DeviceFailed { reason: FailReason::ShardWrite(_), .. });
        assert_eq!(rig.notices.iter().filter(failed).count(), 1);
        let written = rig.disks[0].write_count;
        // After a pause it is opened anew, and serves.
        rig.disks[0].fail_writes = false;
        while rig.to_open.is_empty() {
            assert!(rig.tick(), "it is never opened again");
        }
        assert_eq!((rig.in_flight(), rig.disks[0].write_count), (0, written));
        rig.open();
        rig.settle();
        assert!(is_done(&rig.put(9, 1, 50, 4)));
        assert!((0..10).all(|counter| rig.read_shard(shard_id(9, 1, counter), 0, 4).is_ok()));
    }
}

/// A read of one block of a shard that is there, with its table at hand.
fn read_as(rig: &mut Rig, conn: u64, urgency: Urgency) -> u64 {
    let (device, shard) = (device(0), shard_id(9, 1, 1));
    let request = Request::ReadShard { device, shard, block: 1, blocks: 1, checked: false, cached: false };
    rig.send_as(conn, urgency, request, Buf::empty())
}

/// A node with a shard, which two hosts have greeted: over connections 1 and 2.
fn shared(in_flight_max: usize) -> Rig {
    let mut rig = rig(5, in_flight_max);
    put_many(&mut rig, 1..2);
    rig.settle();
    rig.greet(1, "a");
    rig.greet(2, "b");
    rig
}

#[test]
fn a_sparse_guest_does_not_wait_for_256_reads_of_another() {
    let mut rig = shared(2);
    let others: Vec<u64> = (0..256).map(|_| read_as(&mut rig, 1, Urgency::Normal)).collect();
    let sparse = read_as(&mut rig, 1, Urgency::Sparse);
    let ended = ended_before(&mut rig, sparse);
    assert!(ended <= 3, "{ended} operations came first, of which 2 were in flight");
    let normal = read_as(&mut rig, 1, Urgency::Normal);
    let ended = ended_before(&mut rig, normal);
    assert!(ended > 200, "who says nothing is behind all of the same host: {ended}");
    assert!(others.iter().all(|read| rig.replies.contains_key(read)));
}

#[test]
fn a_host_does_not_wait_for_all_that_another_reads() {
    let mut rig = shared(1);
    (0..256).for_each(|_| _ = read_as(&mut rig, 1, Urgency::Normal));
    for _ in 0..8 {
        let read = read_as(&mut rig, 2, Urgency::Normal);
        let ended = ended_before(&mut rig, read);
        assert!(ended <= 8, "{ended} operations came first");
    }
}

#[test]
fn care_is_behind_reads_of_guests_and_goes_on() {
    let mut rig = shared(1);
    (0..3).for_each(|_| _ = read_as(&mut rig, 1, Urgency::Normal));
    let care: Vec<u64> = (0..3).map(|_| read_as(&mut rig, 1, Urgency::Care)).collect();
    let mut ended = Vec::new();
    for read in care {
        let mut count = 0;
        while !rig.replies.contains_key(&read) {
            read_as(&mut rig, 2, Urgency::Normal);
            assert!(rig.complete_oldest(0));
            count += 1;
        }
        ended.push(count);
    }
    assert!(ended.iter().all(|count| (8..=12).contains(count)), "{ended:?}");
}

#[test]
fn a_batch_takes_half_of_one_host_while_another_waits() {
    let sizing = JournalSizing { journal_bytes: 64 << 20, unit_bytes: 8 << 20, shard_bytes_mean: 64 << 10 };
    let mut rig = Rig::of(7, vec![FakeDisk::new(96 << 20)], sizing, |config| config.batch_in_flight_max = 1);
    rig.greet(1, "noisy");
    rig.greet(2, "quiet");
    for volume in [1, 2] {
        assert!(is_done(&rig.create(volume, 1, 0)));
    }
    let send = |rig: &mut Rig, conn: u64, lsn: u64| {
        let (request, payload) = append(u128::from(conn), 1, 0, lsn, 0, 8);
        rig.send_as(conn, Urgency::Normal, request, payload)
    };
    // In flight before the others come.
    let first = send(&mut rig, 1, 1);
    rig.end_moment();
    let noisy: Vec<u64> = (2..102).map(|lsn| send(&mut rig, 1, lsn)).collect();
    let quiet: Vec<u64> = (1..11).map(|lsn| send(&mut rig, 2, lsn)).collect();
    let answered = |rig: &Rig, of: &[u64]| of.iter().filter(|token| rig.replies.contains_key(token)).count();
    while answered(&rig, &[first]) == 0 {
        assert!(rig.complete_oldest(0) || rig.tick());
        rig.end_moment();
    }
    assert_eq!((answered(&rig, &noisy), answered(&rig, &quiet)), (0, 0), "they are in the next batch");
    while answered(&rig, &noisy) + answered(&rig, &quiet) == 0 {
        assert!(rig.complete_oldest(0) || rig.tick());
        rig.end_moment();
    }
    assert_eq!(answered(&rig, &quiet), 10, "{} of the noisy one were taken", answered(&rig, &noisy));
    rig.settle();
    assert_eq!(answered(&rig, &noisy), 100);
}

#[test]
fn who_asks_for_times_is_told_what_the_device_took_and_what_the_rest() {
    let mut rig = shared(1);
    assert!(is_done(&rig.create(1, 1, 0)));
    let unasked = read_as(&mut rig, 1, Urgency::Normal);
    rig.settle();
    assert!(rig.times.is_empty() && rig.replies.contains_key(&unasked));
    rig.wants_times = true;
    let reads = [0, 1, 2].map(|_| read_as(&mut rig, 1, Urgency::Normal));
    for _ in 0..3 {
        rig.now = rig.now + Duration::from_millis(5);
        assert!(rig.complete_oldest(0));
    }
    let told = reads.map(|read| rig.times[&read]).map(|times| (times.queue_us, times.device_us));
    assert_eq!(told, [(0, 5_000), (5_000, 5_000), (10_000, 5_000)], "one at a time");

    let (request, payload) = append(1, 1, 0, 1, 0, 2);
    let appended = rig.send(request, payload);
    rig.now = rig.now + Duration::from_millis(1);
    rig.end_moment();
    rig.now = rig.now + Duration::from_millis(3);
    assert!(rig.complete_oldest(0));
    let times = rig.times[&appended];
    assert_eq!((times.queue_us, times.device_us), (1_000, 3_000), "it waited for its batch");
}
