//! What a node answers, request by request, on disks that work.

use crate::support::*;
use holdfast_base::{Buf, Epoch, GridId, InstanceId, Instant, Lsn, MediaClass, VolumeId};
use holdfast_format::copy;
use holdfast_format::drive::DriveReport;
use holdfast_format::versions::Versions;
use holdfast_format::wire::{DeviceHealth, GRANT_MS, HeldRoot, Refusal, Reply, Request, WIRE};
use holdfast_store::{DeviceSlot, Event, Next, Notice};
use std::time::Duration;

fn refused(refusal: Refusal) -> Reply {
    Reply::Refused(refusal)
}

fn stale(promised: u64) -> Reply {
    refused(Refusal::StaleEpoch { promised: Epoch(promised) })
}

#[test]
fn a_ledger_keeps_what_was_appended_until_it_is_trimmed() {
    let mut rig = Rig::small(1);
    assert!(is_done(&rig.create(5, 1, 0)));
    for lsn in 1..=20 {
        assert!(is_appended(&rig.append(5, 1, 0, lsn, (lsn % 4) as usize)));
    }
    let (entries, damaged) = rig.read_log(5, 1, 0, 3);
    assert_eq!(entries.iter().map(|(e, _)| e.lsn.0).collect::<Vec<_>>(), (3..=20).collect::<Vec<_>>());
    assert!(damaged.is_empty());
    for (entry, payload) in &entries {
        assert_eq!(entry.header, format!("entry {}", entry.lsn.0).into_bytes());
        assert_eq!(*payload, entry_payload(5, 1, 0, entry.lsn.0, (entry.lsn.0 % 4) as usize));
    }
    assert!(is_done(&rig.call(trim(5, 1, ledger(1, 0), 12))));
    assert_eq!(rig.read_log(5, 1, 0, 1).0[0].0.lsn, Lsn(13));
    assert!(is_appended(&rig.append(5, 1, 0, 12, 1)), "an entry below the trim point is not needed any more");
    assert!(is_appended(&rig.append(5, 1, 0, 20, 0)), "an append may be repeated");
    let (_, ledgers) = rig.fence(5, 2);
    assert_eq!(ledgers.len(), 1);
    let state = &ledgers[0];
    assert_eq!((state.ledger, state.sound), (ledger(1, 0), true));
    assert_eq!((state.trimmed, state.last, state.acked), (Lsn(12), Lsn(20), Lsn(19)));
    rig.settle();
}

#[test]
fn what_is_not_valid_is_refused_and_changes_nothing() {
    let mut rig = Rig::small(2);
    assert_eq!(rig.append(5, 1, 0, 1, 1), refused(Refusal::UnknownLedger));
    rig.create(5, 1, 0);
    assert_eq!(rig.append(5, 1, 1, 1, 1), refused(Refusal::UnknownLedger));
    let (request, payload) = append(5, 1, 0, 1, 0, 2);
    let mut altered = payload.to_vec();
    altered[5000] ^= 1;
    assert_eq!(rig.call_with(request.clone(), Buf::copy_from(&altered)).0, refused(Refusal::Checksum));
    assert_eq!(rig.call_with(request, payload.slice(0..4096)).0, refused(Refusal::Invalid));
    assert_eq!(rig.append(5, 1, 0, 1, 16), refused(Refusal::Invalid), "larger than a unit");
    let mut other = create(5, 1, 0);
    let Request::CreateLedger { legs, .. } = &mut other else { unreachable!() };
    legs.pop();
    assert_eq!(rig.call(other), refused(Refusal::Invalid), "the same ledger with other legs");
    let unknown = Request::Grant { device: device(9), volume: VolumeId(5), epoch: Epoch(1) };
    assert_eq!(rig.call(unknown), refused(Refusal::UnknownDevice));
    assert!(rig.read_log(5, 1, 0, 0).0.is_empty());
}

#[test]
fn a_fence_shuts_out_lower_epochs_at_once_and_other_openings_of_its_own() {
    let mut rig = Rig::small(3);
    rig.create(5, 1, 0);
    rig.settle();
    // Sent before the fence: answered before it. Sent after: refused, even while the fence is not yet durable.
    let (request, payload) = append(5, 1, 0, 1, 0, 1);
    let before = rig.send(request, payload);
    let fencing = rig.send(fence(5, 2, 77), Buf::empty());
    let (request, payload) = append(5, 1, 0, 2, 1, 1);
    let after = rig.send(request, payload);
    assert_eq!(rig.replies.remove(&after).unwrap().0, stale(2));
    while !rig.replies.contains_key(&fencing) {
        assert!(rig.complete_any() || rig.tick(), "the fence is never answered");
    }
    assert!(is_appended(&rig.replies.remove(&before).unwrap().0), "what was accepted before is answered before");
    let Reply::Fenced { ledgers, .. } = rig.replies.remove(&fencing).unwrap().0 else { panic!() };
    assert_eq!(ledgers[0].last, Lsn(1));
    assert_eq!(rig.create(5, 1, 1), stale(2));
    assert_eq!(rig.call(fence(5, 2, 78)), stale(2), "another opening of the same epoch");
    assert_eq!(rig.call(trim(5, 1, ledger(1, 0), 1)), stale(2));
    assert_eq!(rig.call(delete_ledger(5, 1, ledger(1, 0))), stale(2));
    assert_eq!(rig.put(5, 1, 1, 1), stale(2));
    assert!(matches!(rig.call(fence(5, 2, 77)), Reply::Fenced { .. }), "a fence may be repeated");
    assert_eq!(rig.call(Request::Grant { device: device(0), volume: VolumeId(5), epoch: Epoch(1) }), stale(2));
}

#[test]
fn a_fence_tells_what_is_left_of_the_read_grant() {
    let mut rig = Rig::small(4);
    assert_eq!(rig.fence(5, 1).0, 0, "nothing was ever granted here");
    rig.create(6, 1, 0);
    rig.settle();
    rig.now = rig.now + Duration::from_secs(5);
    assert_eq!(rig.fence(6, 2).0, 0, "it has run out");
    rig.create(6, 2, 0);
    rig.settle();
    rig.now = rig.now + Duration::from_secs(5);
    rig.call(Request::Grant { device: device(0), volume: VolumeId(6), epoch: Epoch(2) });
    rig.now = rig.now + Duration::from_millis(50);
    let left = rig.fence(6, 3).0;
    assert!((GRANT_MS - 60..=GRANT_MS - 50).contains(&left), "{left} ms");
    let unowned = Request::Grant { device: device(0), volume: VolumeId(6), epoch: Epoch(4) };
    assert_eq!(rig.call(unowned), refused(Refusal::UnknownLedger), "no ledger of that epoch was made here");
    // After a restart nobody knows what was granted: a full grant is assumed, except to what was never here.
    rig.now = rig.now + Duration::from_secs(5);
    rig.restart(Crash::Process);
    let left = rig.fence(6, 5).0;
    assert!((GRANT_MS - 60..=GRANT_MS).contains(&left), "{left} ms");
    assert_eq!(rig.fence(7, 1).0, 0);
}

#[test]
fn shards_are_written_once_and_read_back_in_part() {
    let mut rig = Rig::small(5);
    let shard = shard_id(5, 1, 9);
    assert_eq!(rig.read_shard(shard, 0, 1), Err(Refusal::UnknownShard));
    assert!(is_done(&rig.put(5, 1, 9, 12)));
    let data = shard_data(shard, 12);
    for _ in 0..2 {
        assert_eq!(rig.read_shard(shard, 3, 5), Ok(data[3 * 4096..8 * 4096].to_vec()));
    }
    assert_eq!(rig.read_shard(shard, 0, 12), Ok(data));
    for (block, blocks) in [(12, 1), (0, 13), (0, 0), (u32::MAX, 2)] {
        assert_eq!(rig.read_shard(shard, block, blocks), Err(Refusal::Invalid));
    }
    let writes = rig.disks[0].write_count;
    assert!(is_done(&rig.put(5, 1, 9, 12)), "putting the same again is harmless");
    assert_eq!(rig.disks[0].write_count, writes, "and writes nothing");
    let (reply, payload) = rig.call_with(Request::ReadShardHeader { device: device(0), shard }, Buf::empty());
    assert_eq!((reply, payload[0].len()), (Reply::ShardHeader, 4096));
}

#[test]
fn a_shard_is_compared_with_its_checksums_and_nothing_of_it_is_sent() {
    let mut rig = Rig::small(15);
    let shard = shard_id(5, 1, 9);
    let check = Request::CheckShard { device: device(0), shard };
    assert_eq!(rig.call(check.clone()), refused(Refusal::UnknownShard));
    assert!(is_done(&rig.put(5, 1, 9, 12)));
    let (reply, payload) = rig.call_with(check.clone(), Buf::empty());
    assert_eq!((reply, payload.len()), (Reply::Done, 0));
    let block = &shard_data(shard, 12)[11 * 4096..];
    let at = rig.disks[0].media().windows(4096).step_by(4096).position(|there| there == block).expect("it is there");
    rig.disks[0].corrupt((at * 4096 + 4000) as u64);
    assert_eq!(rig.call(check), refused(Refusal::Checksum));
    assert_eq!(rig.notices.last(), Some(&Notice::ShardDamaged { device: device(0), shard }));
    rig.settle();
}

#[test]
fn a_shard_whose_bytes_do_not_match_is_not_taken() {
    let mut rig = Rig::small(6);
    let (request, payload) = put(5, 1, 1, 3);
    for at in [20, 4096, 3 * 4096] {
        let mut altered = payload.to_vec();
        altered[at] ^= 1;
        assert_eq!(rig.call_with(request.clone(), Buf::copy_from(&altered)).0, refused(Refusal::Checksum), "{at}");
    }
    assert_eq!(rig.call_with(request.clone(), payload.slice(0..8192)).0, refused(Refusal::Checksum));
    assert_eq!(rig.call_with(request, payload.slice(0..4096)).0, refused(Refusal::Invalid));
    let Request::PutShard { device, volume, epoch, header_blocks, .. } = put(5, 1, 1, 3).0 else { unreachable!() };
    let other = Request::PutShard { device, volume, epoch, shard: shard_id(5, 1, 2), header_blocks };
    assert_eq!(rig.call_with(other, payload).0, refused(Refusal::Checksum), "another shard's bytes");
    assert!(rig.list(5).is_empty());
    rig.settle();
}

#[test]
fn space_returns_when_shards_are_deleted_and_is_refused_when_there_is_none() {
    let mut rig = Rig::small(7);
    let Reply::Stat { devices } = rig.call(Request::Stat) else { panic!() };
    let free = devices[0].free_bytes;
    let mut counter = 0;
    loop {
        counter += 1;
        match rig.put(5, 1, counter, 15) {
            Reply::Done => {}
            reply => {
                assert_eq!(reply, refused(Refusal::NoSpace));
                break;
            }
        }
    }
    assert!(u128::from(counter - 1) >= u128::from(free / (16 * 4096)) - 1, "{counter} shards");
    let all = rig.list(5);
    assert_eq!(all.len() as u64, counter - 1);
    assert!(all.windows(2).all(|w| w[0] < w[1]));
    let delete = |shards| Request::DeleteShards { device: device(0), volume: VolumeId(5), epoch: Epoch(1), shards };
    assert!(is_done(&rig.call(delete(all[3..7].to_vec()))));
    assert_eq!(rig.read_shard(all[3], 0, 1), Err(Refusal::UnknownShard));
    assert!(is_done(&rig.call(delete(all[3..7].to_vec()))), "deleting again is harmless");
    assert!(is_done(&rig.put(5, 1, 1000, 60)), "four neighbours make room for a larger one");
    let drop = Request::DropVolume { device: device(0), volume: VolumeId(5), epoch: Epoch(1) };
    assert!(is_done(&rig.call(drop)));
    let Reply::Stat { devices } = rig.call(Request::Stat) else { panic!() };
    assert_eq!((devices[0].free_bytes, devices[0].shard_count), (free, 0));
    assert!(rig.list(5).is_empty());
    rig.settle();
}

#[test]
fn what_drives_say_is_passed_on_under_their_devices() {
    let mut rig = Rig::small(9);
    assert_eq!(rig.call(Request::Drives), Reply::Drives { drives: Vec::new() });
    let report = DriveReport { hours: Some(3), ..DriveReport::default() };
    rig.event(Event::Drive { slot: DeviceSlot(0), report: Some(report.clone()) });
    rig.event(Event::Drive { slot: DeviceSlot(200), report: Some(report.clone()) });
    assert_eq!(rig.call(Request::Drives), Reply::Drives { drives: vec![(device(0), report)] });
    rig.event(Event::Drive { slot: DeviceSlot(0), report: None });
    assert_eq!(rig.call(Request::Drives), Reply::Drives { drives: Vec::new() });
}

#[test]
fn a_dropped_volume_is_gone_but_its_promise_stays() {
    let mut rig = Rig::small(8);
    rig.create(5, 3, 0);
    rig.append(5, 3, 0, 1, 1);
    rig.put(5, 3, 1, 2);
    let drop = Request::DropVolume { device: device(0), volume: VolumeId(5), epoch: Epoch(3) };
    assert!(is_done(&rig.call(drop)));
    for _ in 0..2 {
        assert_eq!(rig.append(5, 3, 0, 2, 1), refused(Refusal::UnknownLedger));
        assert_eq!(rig.create(5, 2, 0), stale(3));
        assert!(rig.list(5).is_empty());
        rig.restart(Crash::Power);
    }
    assert!(rig.fence(5, 4).1.is_empty());
}

#[test]
fn the_newest_copy_of_a_root_is_kept_and_told_of() {
    let mut rig = Rig::small(8);
    let put = |epoch, sequence, byte| Request::PutRoot {
        device: device(0),
        volume: VolumeId(5),
        epoch: Epoch(epoch),
        sequence,
        root: vec![byte; 5000],
    };
    let list = |after, count_max| Request::ListVolumes { device: device(0), after, count_max };
    let held = |rig: &mut Rig| {
        let Reply::Volumes { volumes, more: false } = rig.call(list(None, 10)) else { panic!("not a list") };
        volumes
    };
    rig.create(5, 3, 0);
    rig.put(5, 3, 1, 2);
    assert!(held(&mut rig)[0].root.is_none());
    for (epoch, sequence, byte) in [(3, 1, 1), (3, 4, 2), (3, 2, 3), (3, 4, 9)] {
        assert!(is_done(&rig.call(put(epoch, sequence, byte))));
    }
    assert_eq!(rig.call(put(2, 9, 4)), stale(3));
    for crash in [Crash::Process, Crash::Power] {
        let volumes = held(&mut rig);
        assert_eq!(volumes.len(), 1);
        assert_eq!((volumes[0].volume, volumes[0].promised, volumes[0].ledgers.len()), (VolumeId(5), Epoch(3), 1));
        assert_eq!(volumes[0].root, Some(HeldRoot { epoch: Epoch(3), sequence: 4, blocks: 2 }));
        let shard = copy::root_copy_id(VolumeId(5), Epoch(3), 4);
        let blocks = rig.read_shard(shard, 0, 2).expect("it can be read");
        assert_eq!(copy::decode(&blocks), Ok(&[2; 5000][..]));
        assert_eq!(rig.read_shard(copy::root_copy_id(VolumeId(5), Epoch(3), 1), 0, 2), Err(Refusal::UnknownShard));
        rig.restart(crash);
    }
    assert_eq!(rig.list(5).len(), 1, "it is no shard of the volume's data");
    let Reply::Stat { devices } = rig.call(Request::Stat) else { panic!() };
    assert_eq!(devices[0].shard_count, 1);
    rig.create(9, 1, 0);
    rig.put(7, 1, 1, 2);
    let ids = |reply| {
        let Reply::Volumes { volumes, more } = reply else { panic!("not a list") };
        (volumes.iter().map(|v| v.volume.0).collect::<Vec<_>>(), more)
    };
    assert_eq!(ids(rig.call(list(None, 2))), (vec![5, 7], true));
    assert_eq!(ids(rig.call(list(Some(VolumeId(7)), 2))), (vec![9], false));
    let drop = Request::DropVolume { device: device(0), volume: VolumeId(5), epoch: Epoch(3) };
    assert!(is_done(&rig.call(drop)));
    let gone = held(&mut rig);
    assert_eq!((gone[0].promised, gone[0].root, gone[0].ledgers.len()), (Epoch(3), None, 0));
    rig.settle();
}

#[test]
fn greetings_are_checked_and_devices_listed() {
    let mut rig = Rig::new(9, &[4 << 20, 8 << 20], small_sizing());
    let hello = |oldest, newest, grid| {
        let versions = Versions { oldest, newest };
        Request::Hello { versions, grid, host: "h".to_string() }
    };
    let Versions { oldest, newest } = WIRE;
    let Reply::Hello { version, node, boot, devices } = rig.call(hello(oldest, newest, GRID)) else { panic!() };
    assert_eq!((version, node, boot), (newest, NODE, rig.config.boot));
    assert_eq!(devices.iter().map(|d| d.device).collect::<Vec<_>>(), [device(0), device(1)]);
    assert!(devices.iter().all(|d| d.health == DeviceHealth::Serving));
    for (first, last, common) in [(oldest, oldest, oldest), (newest, newest + 7, newest), (0, oldest, oldest)] {
        let agreed = rig.call(hello(first, last, GRID));
        assert!(matches!(agreed, Reply::Hello { version, .. } if version == common), "{agreed:?}");
    }
    assert_eq!(rig.call(hello(newest + 1, newest + 1, GRID)), refused(Refusal::Version(WIRE)));
    assert_eq!(rig.call(hello(0, oldest - 1, GRID)), refused(Refusal::Version(WIRE)));
    assert_eq!(rig.call(hello(oldest, newest, GridId(1))), refused(Refusal::Invalid));
    assert_eq!(rig.call(Request::Ping), Reply::Pong);
}

#[test]
fn a_device_that_is_opening_asks_for_patience() {
    let mut rig = Rig::small(10);
    rig.crash(Crash::Process);
    rig.start();
    let grant = Request::Grant { device: device(0), volume: VolumeId(5), epoch: Epoch(1) };
    let token = rig.send(grant.clone(), Buf::empty());
    assert_eq!(rig.replies.remove(&token).unwrap().0, refused(Refusal::Busy));
    while rig.complete_any() {
        let token = rig.send(grant.clone(), Buf::empty());
        let reply = rig.replies.remove(&token).unwrap().0;
        assert!(reply == refused(Refusal::Busy) || reply == refused(Refusal::UnknownLedger), "{reply:?}");
    }
    assert_eq!(rig.call(grant), refused(Refusal::UnknownLedger));
}

#[test]
fn a_failed_write_is_the_end_of_its_device_only() {
    for what in 0..2 {
        let mut rig = Rig::new(11, &[4 << 20, 4 << 20], small_sizing());
        rig.create(5, 1, 0);
        rig.put(5, 1, 1, 2);
        rig.settle();
        rig.disks[0].fail_writes = true;
        let (request, payload) = if what == 0 { append(5, 1, 0, 1, 0, 1) } else { put(5, 1, 2, 1) };
        let reply = rig.call_with(request, payload).0;
        assert_eq!(reply, refused(Refusal::DeviceFailed));
        rig.disks[0].fail_writes = false;
        assert_eq!(rig.append(5, 1, 0, 1, 1), refused(Refusal::DeviceFailed), "for good");
        assert_eq!(rig.read_shard(shard_id(5, 1, 1), 0, 1), Err(Refusal::DeviceFailed));
        assert!(rig.notices.iter().any(|n| matches!(n, Notice::DeviceFailed { slot: DeviceSlot(0), .. })));
        let mut fence = fence(5, 1, 1);
        let Request::Fence { device: at, .. } = &mut fence else { unreachable!() };
        *at = device(1);
        assert!(matches!(rig.call(fence), Reply::Fenced { .. }), "the other device serves on");
        let Reply::Stat { devices } = rig.call(Request::Stat) else { panic!() };
        assert_eq!(devices[0].health, DeviceHealth::Failed);
        assert_eq!(devices[1].health, DeviceHealth::Serving);
        rig.settle();
    }
}

/// Runs until nothing is in flight, as many times as deadlines pass within the span.
fn pass(rig: &mut Rig, span: Duration) {
    let until = rig.now + span;
    loop {
        rig.open();
        let due = rig.node.as_ref().and_then(holdfast_store::Node::next_deadline);
        if rig.complete_any() {
            continue;
        }
        if due.is_none_or(|due| due > until) || !rig.tick() {
            break;
        }
    }
    rig.now = rig.now.max(until);
}

fn out_of(rig: &Rig) -> Vec<Next> {
    let next = |n: &Notice| if let Notice::DeviceFailed { next, .. } = n { Some(*next) } else { None };
    rig.notices.iter().filter_map(next).collect()
}

#[test]
fn a_device_that_failed_comes_back_whole_with_what_was_acknowledged_and_twice_a_day_at_most() {
    let mut rig = Rig::new(111, &[4 << 20, 4 << 20], small_sizing());
    rig.create(5, 1, 0);
    assert!(matches!(rig.append(5, 1, 0, 1, 1), Reply::Appended { .. }));
    for round in 0..3 {
        rig.disks[0].fail_writes = true;
        assert_eq!(rig.append(5, 1, 0, 2 + round, 1), refused(Refusal::DeviceFailed));
        rig.disks[0].fail_writes = false;
        pass(&mut rig, Duration::from_millis(900));
        assert_eq!(rig.append(5, 1, 0, 2 + round, 1), refused(Refusal::DeviceFailed), "a pause first");
        pass(&mut rig, Duration::from_millis(200));
        if round == 2 {
            break;
        }
        assert!(matches!(rig.append(5, 1, 0, 1, 1), Reply::Appended { .. }), "it is known, and not written again");
        let Reply::Fenced { ledgers, grant_left_ms } = rig.call(fence(5, 1, 1)) else { panic!() };
        assert_eq!((ledgers.len(), ledgers[0].sound), (1, true));
        assert!(grant_left_ms <= GRANT_MS);
        assert!(matches!(rig.append(5, 1, 0, 2 + round, 1), Reply::Appended { .. }));
    }
    pass(&mut rig, Duration::from_secs(3600));
    assert_eq!(rig.append(5, 1, 0, 4, 1), refused(Refusal::DeviceFailed), "given up");
    let again = Next::Again(Duration::from_secs(1));
    assert_eq!(out_of(&rig), [again, again, Next::GivenUp]);
    rig.restart(Crash::Process);
    assert!(matches!(rig.append(5, 1, 0, 4, 1), Reply::Appended { .. }), "the operator says otherwise");
}

#[test]
fn nothing_is_opened_anew_while_a_write_of_the_former_life_is_under_way() {
    let mut rig = Rig::small(112);
    rig.create(5, 1, 0);
    rig.disks[0].fail_writes = true;
    let (one, payload) = put(5, 1, 1, 1);
    rig.send(one, payload);
    let (other, payload) = put(5, 1, 2, 1);
    rig.send(other, payload);
    assert!(rig.in_flight() >= 2);
    rig.complete_any();
    let left = rig.in_flight();
    assert!(left > 0, "one of them is still in flight");
    rig.now = rig.now + Duration::from_secs(60);
    rig.event(Event::Tick);
    assert!(rig.to_open.is_empty() && rig.node.as_ref().unwrap().next_deadline().is_none());
    while rig.in_flight() > 0 {
        assert!(rig.to_open.is_empty());
        rig.complete_any();
    }
    assert_eq!(rig.to_open, [DeviceSlot(0)]);
}

#[test]
fn a_read_that_fails_for_a_moment_is_tried_again_before_anybody_hears_of_it() {
    let mut rig = Rig::small(113);
    rig.create(5, 1, 0);
    rig.put(5, 1, 1, 2);
    rig.settle();
    for (fails, result) in [(1, true), (2, true), (3, false)] {
        let all = 0..4 << 20;
        rig.disks[0].bad_reads = vec![all];
        let read =
            |id| Request::ReadShard { device: device(0), shard: id, block: 0, blocks: 1, checked: true, cached: false };
        let token = rig.send(read(shard_id(5, 1, 1)), Buf::empty());
        for _ in 0..fails {
            while rig.complete_any() {}
            assert_eq!(
                rig.replies.contains_key(&token),
                fails == 3 && rig.node.as_ref().unwrap().next_deadline().is_none()
            );
            if rig.replies.contains_key(&token) {
                break;
            }
            rig.tick();
        }
        rig.disks[0].bad_reads.clear();
        rig.settle();
        let reply = rig.replies.remove(&token).unwrap().0;
        assert_eq!(matches!(reply, Reply::Shard { .. }), result, "{fails} failures: {reply:?}");
        let Reply::Stat { devices } = rig.call(Request::Stat) else { panic!() };
        assert_eq!(devices[0].io_errors, u64::from(!result));
    }
}

#[test]
fn a_device_that_can_not_be_opened_is_looked_for_until_it_is_there() {
    let mut rig = Rig::new(114, &[4 << 20, 4 << 20], small_sizing());
    rig.crash(Crash::Process);
    rig.node = Some(holdfast_store::Node::new(rig.config.clone()));
    rig.event(Event::ExpectDevice { slot: DeviceSlot(0), device: Some(device(0)) });
    let grant = |n| Request::Grant { device: device(n), volume: VolumeId(5), epoch: Epoch(1) };
    assert_eq!(rig.call(grant(0)), refused(Refusal::Busy), "it may be there in a moment");
    assert_eq!(rig.call(grant(1)), refused(Refusal::UnknownDevice));
    rig.to_open.clear();
    rig.event(Event::NotOpened { slot: DeviceSlot(0), why: "it is gone".to_string() });
    for _ in 0..9 {
        assert_eq!(rig.call(grant(0)), refused(Refusal::DeviceFailed));
        let Reply::Stat { devices } = rig.call(Request::Stat) else { panic!() };
        assert_eq!((devices[0].device, devices[0].health), (device(0), DeviceHealth::Failed));
        while rig.to_open.is_empty() {
            assert!(rig.tick());
        }
        rig.to_open.clear();
        rig.event(Event::NotOpened { slot: DeviceSlot(0), why: "it is gone".to_string() });
    }
    pass(&mut rig, Duration::from_secs(60));
    assert_eq!(rig.call(grant(0)), refused(Refusal::UnknownLedger), "it serves");
}

#[test]
fn a_device_that_hangs_while_it_is_opened_is_out_until_it_goes_on() {
    // Before it has told which it is, or at the write of the table after the scan.
    for (is_known, told) in [(false, Refusal::UnknownDevice), (true, Refusal::DeviceFailed)] {
        let mut rig = Rig::small(116);
        rig.crash(Crash::Process);
        rig.start();
        while is_known && !rig.is_writing() {
            assert!(rig.complete_any());
        }
        let grant = Request::Grant { device: device(0), volume: VolumeId(5), epoch: Epoch(1) };
        let ask = |rig: &mut Rig| {
            let token = rig.send(grant.clone(), Buf::empty());
            rig.replies.remove(&token).map(|(reply, _)| reply)
        };
        assert_eq!(ask(&mut rig), Some(refused(Refusal::Busy)));
        rig.now = rig.now + Duration::from_secs(5);
        assert_eq!(ask(&mut rig), Some(refused(told)));
        let stats = rig.node.as_ref().unwrap().stats(rig.now);
        assert_eq!(stats.len(), usize::from(is_known));
        assert!(stats.iter().all(|stat| stat.health == DeviceHealth::Failed), "{stats:?}");
        rig.settle();
        assert_eq!(ask(&mut rig), Some(refused(Refusal::UnknownLedger)), "it serves");
    }
}

#[test]
fn a_device_that_is_removed_goes_when_nothing_of_it_is_under_way() {
    let mut rig = Rig::new(115, &[4 << 20, 4 << 20], small_sizing());
    rig.create(5, 1, 0);
    let (request, payload) = append(5, 1, 0, 1, 0, 1);
    let token = rig.send(request, payload);
    rig.end_moment();
    rig.event(Event::RemoveDevice { slot: DeviceSlot(0) });
    assert_eq!(rig.replies.remove(&token).unwrap().0, refused(Refusal::DeviceFailed));
    assert!(!rig.notices.contains(&Notice::DeviceGone { slot: DeviceSlot(0) }), "a write is under way");
    rig.settle();
    assert!(rig.notices.contains(&Notice::DeviceGone { slot: DeviceSlot(0) }));
    assert_eq!(rig.append(5, 1, 0, 1, 1), refused(Refusal::UnknownDevice));
}

#[test]
fn foreign_and_doubled_devices_are_not_opened() {
    let mut rig = Rig::new(12, &[4 << 20, 4 << 20, 4 << 20], small_sizing());
    rig.crash(Crash::Process);
    let copy = rig.disks[0].media().to_vec();
    rig.disks[1].write_media(0, &copy);
    rig.disks[2].write_media(0, &vec![0; 4 << 20]);
    rig.notices.clear();
    rig.start();
    rig.settle();
    let failed = rig.notices.iter().filter(|n| matches!(n, Notice::DeviceFailed { .. })).count();
    assert_eq!(failed, 2, "{:?}", rig.notices);
    assert_eq!(rig.node.as_ref().unwrap().stats(Instant::ZERO).len(), 1);
    let mut config = rig.config.clone();
    config.grid = GridId(99);
    config.boot = InstanceId(5);
    let mut rig2 = rig;
    rig2.crash(Crash::Process);
    rig2.config = config;
    rig2.start();
    rig2.settle();
    assert!(rig2.node.as_ref().unwrap().stats(Instant::ZERO).is_empty());
    rig2.event(Event::Tick);
}

#[test]
fn many_appends_share_batches() {
    let mut rig = Rig::new(13, &[64 << 20], crate::support::JOURNAL_LARGE);
    rig.create(5, 1, 0);
    rig.settle();
    let writes = rig.disks[0].write_count;
    let tokens: Vec<u64> = (1..=400)
        .map(|lsn| {
            let (request, payload) = append(5, 1, 0, lsn, 0, 2);
            rig.send(request, payload)
        })
        .collect();
    rig.settle();
    assert!(tokens.iter().all(|t| is_appended(&rig.replies[t].0)));
    let batches = rig.disks[0].write_count - writes;
    assert!(batches < 40, "{batches} writes for 400 appends");
}

#[test]
fn an_idle_node_wants_nothing() {
    let mut rig = Rig::small(14);
    rig.create(5, 1, 0);
    rig.append(5, 1, 0, 1, 1);
    rig.settle();
    assert_eq!(rig.node.as_ref().unwrap().next_deadline(), None);
    let writes = rig.disks[0].write_count;
    rig.event(Event::Tick);
    rig.settle();
    assert_eq!(rig.disks[0].write_count, writes);
}

#[test]
fn a_volume_of_thousands_of_shards_is_dropped_at_once() {
    let sizing = holdfast_store::JournalSizing { shard_bytes_mean: 8 << 10, ..crate::support::JOURNAL_LARGE };
    let mut rig = Rig::new(15, &[96 << 20], sizing);
    for counter in 0..6000 {
        assert!(is_done(&rig.put(5, 1, counter, 1)));
    }
    let drop = Request::DropVolume { device: device(0), volume: VolumeId(5), epoch: Epoch(1) };
    let token = rig.send(drop.clone(), Buf::empty());
    let again = rig.send(drop, Buf::empty());
    assert!(rig.in_flight() <= 64, "{} writes at once", rig.in_flight());
    rig.settle();
    assert!(is_done(&rig.replies[&token].0) && is_done(&rig.replies[&again].0));
    rig.restart(Crash::Power);
    assert!(rig.list(5).is_empty());
}

#[test]
fn a_set_class_of_media_outlives_restarts_and_crashes() {
    let mut rig = Rig::small(40);
    let media_of = |rig: &Rig| rig.node.as_ref().unwrap().stats(rig.now)[0].media;
    let set = |media| Request::SetMedia { device: device(0), media };
    assert_eq!(media_of(&rig), None);
    assert!(is_done(&rig.call(set(Some(MediaClass::Hdd)))));
    assert_eq!(media_of(&rig), Some(MediaClass::Hdd));
    rig.send(set(Some(MediaClass::Nvme)), Buf::empty());
    assert_eq!(rig.call(set(None)), refused(Refusal::Busy), "one change at a time");
    for steps in 0..3 {
        rig.send(set(Some(MediaClass::Ssd)), Buf::empty());
        (0..steps).for_each(|_| assert!(rig.complete_any()));
        rig.restart(Crash::Power);
        let found = media_of(&rig).expect("a label is there, the former or the new one");
        assert!(found == MediaClass::Nvme || found == MediaClass::Ssd || steps == 0, "{found}");
        assert!(is_done(&rig.call(set(Some(MediaClass::Nvme)))));
    }
    assert!(is_done(&rig.call(set(None))));
    rig.restart(Crash::Power);
    assert_eq!(media_of(&rig), None);
}
