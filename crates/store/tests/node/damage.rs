//! Disks that lose, alter or refuse what was durable: what the node then says, and what it never says.

use crate::support::*;
use holdfast_base::{BLOCK_BYTES, Buf, Epoch, Instant, Lsn, VolumeId};
use holdfast_format::disk::{BatchHeader, BatchPlace, SLOT_BYTES, UnitTable};
use holdfast_format::wire::{DeviceHealth, Refusal, Reply, Request};
use holdfast_store::{Mutations, Notice};

/// Device offset and length of each batch of the journal, by sequence number, as a scan of the media finds them.
fn batches(rig: &Rig) -> Vec<(BatchHeader, u64)> {
    let media = rig.disks[0].media();
    let superblock = superblock(rig);
    let table = table(rig);
    let areas = superblock.areas;
    let mut found = Vec::new();
    for (unit, entry) in table.units.iter().enumerate().filter(|(_, e)| e.generation > 0) {
        let mut at = 0;
        while at < areas.unit_bytes {
            let start = areas.journal_offset + unit as u64 * u64::from(areas.unit_bytes);
            let bytes = &media[(start + u64::from(at)) as usize..(start + u64::from(areas.unit_bytes)) as usize];
            let place = BatchPlace { device: device(0), unit: unit as u32, generation: entry.generation, offset: at };
            match BatchHeader::decode(place, bytes) {
                Ok((header, _)) => {
                    found.push((header, start + u64::from(at)));
                    at += header.batch_bytes;
                }
                Err(_) => at += BLOCK_BYTES as u32,
            }
        }
    }
    found.sort_by_key(|(header, _)| header.seq);
    found
}

fn table(rig: &Rig) -> UnitTable {
    let areas = superblock(rig).areas;
    let at = areas.unit_table_offset as usize;
    let copies = rig.disks[0].media()[at..].chunks(areas.unit_table_bytes as usize).take(2);
    copies.filter_map(|c| UnitTable::decode(device(0), c).ok()).max_by_key(|t| t.sequence).unwrap()
}

/// A ledger with one entry a batch; returns where each entry's batch lies.
fn ledger_of_single_batches(rig: &mut Rig, lsns: u64) -> Vec<(BatchHeader, u64)> {
    assert!(is_done(&rig.create(5, 1, 0)));
    rig.settle();
    let before = batches(rig).len();
    for lsn in 1..=lsns {
        assert!(is_appended(&rig.append(5, 1, 0, lsn, 2)));
    }
    rig.settle();
    let all = batches(rig);
    let of_entries: Vec<_> = all[before..].iter().filter(|(h, _)| h.record_count == 1).copied().collect();
    assert_eq!(of_entries.len() as u64, lsns, "one batch an entry");
    of_entries
}

fn health(rig: &Rig) -> DeviceHealth {
    rig.node.as_ref().unwrap().stats(Instant::ZERO)[0].health
}

#[test]
fn an_altered_payload_is_a_damaged_entry_of_a_sound_ledger() {
    let mut rig = Rig::small(1);
    let at = ledger_of_single_batches(&mut rig, 6);
    // Found by a read, by a restart, and again by the next one.
    rig.disks[0].corrupt(at[3].1 + 4096 + 77);
    for _ in 0..3 {
        let (entries, damaged) = rig.read_log(5, 1, 0, 0);
        assert_eq!(damaged, [4]);
        assert_eq!(entries.iter().map(|(e, _)| e.lsn.0).collect::<Vec<_>>(), [1, 2, 3, 5, 6]);
        rig.restart(Crash::Power);
    }
    let state = rig.fence(5, 1).1.remove(0);
    assert!(state.sound && state.last == Lsn(6));
    assert!(rig.notices.iter().any(|n| matches!(n, Notice::EntryDamaged { lsn: Lsn(4), .. })));
    assert!(is_appended(&rig.append(5, 1, 0, 4, 2)), "appended again it is whole again");
    for _ in 0..2 {
        assert_eq!(rig.read_log(5, 1, 0, 0).1, [0; 0]);
        rig.restart(Crash::Power);
    }
}

#[test]
fn a_lost_batch_makes_ledgers_of_its_time_unsound_for_good() {
    let mut rig = Rig::small(2);
    let at = ledger_of_single_batches(&mut rig, 6);
    rig.create(6, 1, 0);
    rig.settle();
    rig.disks[0].corrupt(at[2].1 + 9);
    rig.restart(Crash::Power);
    assert!(rig.notices.iter().any(|n| matches!(n, Notice::JournalDamaged { batches: 1, unsound_ledgers: 1, .. })));
    assert_eq!(health(&rig), DeviceHealth::Serving, "the batches after it tell that it held no promise");
    for _ in 0..3 {
        let state = rig.fence(5, 1).1.remove(0);
        assert!(!state.sound && state.last == Lsn(6), "{state:?}");
        assert!(rig.fence(6, 1).1[0].sound, "it was created after the lost batch");
        rig.restart(Crash::Power);
    }
    rig.create(7, 1, 0);
    assert!(is_appended(&rig.append(5, 1, 0, 7, 1)) && is_appended(&rig.append(7, 1, 0, 1, 1)), "it serves on");
    // The unit with the hole goes in time, the knowledge stays.
    for lsn in 8..200 {
        while !is_appended(&rig.append(5, 1, 0, lsn, 2)) {
            rig.settle();
        }
        rig.call(trim(5, 1, ledger(1, 0), lsn));
    }
    rig.restart(Crash::Power);
    assert!(!rig.fence(5, 1).1[0].sound && rig.fence(7, 1).1[0].sound);
}

#[test]
fn the_last_batch_is_confirmed_when_the_journal_falls_idle() {
    let mut rig = Rig::small(3);
    let at = ledger_of_single_batches(&mut rig, 3);
    rig.disks[0].corrupt(at[2].1 + 9);
    rig.restart(Crash::Power);
    assert!(!rig.fence(5, 1).1[0].sound, "losing the last batch is damage, too");
}

#[test]
fn a_batch_that_never_became_durable_is_not_damage() {
    let mut rig = Rig::small(4);
    ledger_of_single_batches(&mut rig, 3);
    let (request, payload) = append(5, 1, 0, 4, 3, 2);
    rig.send(request, payload);
    rig.end_moment();
    assert_eq!(rig.in_flight(), 1);
    for _ in 0..20 {
        rig.restart(Crash::Power);
        let state = rig.fence(5, 1).1.remove(0);
        assert!(state.sound, "{state:?}");
        let (request, payload) = append(5, 1, 0, state.last.0 + 1, 3, 2);
        rig.send(request, payload);
        rig.end_moment();
    }
    assert!(!rig.notices.iter().any(|n| matches!(n, Notice::JournalDamaged { .. })));
}

#[test]
fn without_its_promises_a_device_serves_reads_only() {
    let mut rig = Rig::small(5);
    rig.put(5, 1, 1, 3);
    rig.create(5, 1, 0);
    rig.append(5, 1, 0, 1, 1);
    rig.fence(5, 2);
    rig.settle();
    let promise = batches(&rig).iter().rev().find(|(h, _)| h.record_count == 1).copied().unwrap();
    rig.disks[0].corrupt(promise.1 + 70);
    for _ in 0..2 {
        rig.restart(Crash::Power);
        assert_eq!(health(&rig), DeviceHealth::Failed);
        let refused = Reply::Refused(Refusal::DeviceFailed);
        assert_eq!(rig.append(5, 1, 0, 2, 1), refused);
        assert_eq!(rig.create(6, 1, 0), refused);
        assert_eq!(rig.call(fence(5, 3, 3)), refused);
        assert_eq!(rig.put(5, 2, 2, 1), refused);
        assert_eq!(rig.read_shard(shard_id(5, 1, 1), 0, 3), Ok(shard_data(shard_id(5, 1, 1), 3)));
        assert_eq!(rig.list(5).len(), 1);
        assert_eq!(rig.read_log(5, 1, 0, 0).0.len(), 1);
    }
}

#[test]
fn an_unreadable_sector_in_the_journal_costs_its_batch_only() {
    let mut rig = Rig::small(6);
    let at = ledger_of_single_batches(&mut rig, 6);
    rig.disks[0].bad_reads.push(at[1].1 + 4096..at[1].1 + 4608);
    rig.restart(Crash::Power);
    let (entries, damaged) = rig.read_log(5, 1, 0, 0);
    assert_eq!((entries.len(), damaged), (5, vec![2]));
    assert!(rig.fence(5, 1).1[0].sound);
}

#[test]
fn a_sector_that_goes_bad_under_a_log_costs_its_entry_only() {
    let mut rig = Rig::small(6);
    let at = ledger_of_single_batches(&mut rig, 6);
    rig.disks[0].bad_reads.push(at[1].1 + 4096..at[1].1 + 4608);
    let (entries, damaged) = rig.read_log(5, 1, 0, 0);
    assert_eq!((entries.len(), damaged), (5, vec![2]), "neighbours are read with it, and then alone");
    assert!(rig.fence(5, 2).1[0].sound);
}

#[test]
fn what_lies_together_in_a_log_is_read_together() {
    let mut rig = Rig::small(6);
    ledger_of_single_batches(&mut rig, 6);
    let before = rig.disks[0].read_count;
    assert_eq!(rig.read_log(5, 1, 0, 0).0.len(), 6);
    assert!(rig.disks[0].read_count - before <= 2, "one for each unit of the journal");
}

#[test]
fn one_copy_of_each_table_is_enough() {
    let mut rig = Rig::small(7);
    ledger_of_single_batches(&mut rig, 3);
    let areas = superblock(&rig).areas;
    for copy in 0..2 {
        rig.disks[0].corrupt(areas.unit_table_offset + copy * u64::from(areas.unit_table_bytes) + 50);
        rig.disks[0].corrupt(if copy == 0 { 30 } else { (4 << 20) - 4096 + 30 });
        rig.restart(Crash::Power);
        assert_eq!(rig.read_log(5, 1, 0, 0).0.len(), 3, "copy {copy}");
        let repaired = rig.notices.iter().filter(|n| matches!(n, Notice::SuperblockRepaired { .. })).count();
        assert_eq!(repaired, copy as usize + 1);
    }
    for copy in 0..2 {
        rig.disks[0].corrupt(areas.unit_table_offset + copy * u64::from(areas.unit_table_bytes) + 50);
    }
    rig.restart(Crash::Power);
    assert_eq!(health(&rig), DeviceHealth::Failed);
}

#[test]
fn an_altered_shard_block_refuses_that_read_only() {
    let mut rig = Rig::small(8);
    rig.put(5, 1, 1, 8);
    rig.put(5, 1, 2, 8);
    rig.settle();
    let (shard, other) = (shard_id(5, 1, 1), shard_id(5, 1, 2));
    let data = shard_data(shard, 8);
    let at = find(rig.disks[0].media(), &data[3 * 4096..4 * 4096]);
    rig.disks[0].corrupt(at + 100);
    for _ in 0..2 {
        assert_eq!(rig.read_shard(shard, 2, 3), Err(Refusal::Checksum));
        assert_eq!(rig.read_shard(shard, 4, 4), Ok(data[4 * 4096..].to_vec()));
        assert_eq!(rig.read_shard(other, 0, 8), Ok(shard_data(other, 8)));
        rig.restart(Crash::Power);
    }
    rig.disks[0].bad_reads.push(at + 4096..at + 4097);
    assert_eq!(rig.read_shard(shard, 4, 1), Err(Refusal::Checksum), "an I/O error is no different");
    assert_eq!(rig.read_shard(shard, 0, 3), Ok(data[..3 * 4096].to_vec()));
    assert_eq!(health(&rig), DeviceHealth::Serving);
}

fn find(media: &[u8], block: &[u8]) -> u64 {
    let at = media.chunks_exact(4096).position(|b| b == block).expect("the block is on the disk");
    at as u64 * 4096
}

#[test]
fn a_shard_without_its_header_area_is_refused_until_it_is_put_anew() {
    let mut rig = Rig::small(9);
    rig.put(5, 1, 1, 4);
    rig.settle();
    let shard = shard_id(5, 1, 1);
    let data_at = find(rig.disks[0].media(), &shard_data(shard, 4)[..4096]);
    rig.disks[0].corrupt(data_at - 4096 + 20);
    assert_eq!(rig.read_shard(shard, 0, 1), Err(Refusal::Checksum));
    let (reply, _) = rig.call_with(Request::ReadShardHeader { device: device(0), shard }, Buf::empty());
    assert_eq!(reply, Reply::Refused(Refusal::Checksum));
    let delete = Request::DeleteShards { device: device(0), volume: VolumeId(5), epoch: Epoch(1), shards: vec![shard] };
    assert!(is_done(&rig.call(delete)) && is_done(&rig.put(5, 1, 1, 4)));
    assert_eq!(rig.read_shard(shard, 0, 4), Ok(shard_data(shard, 4)));
}

#[test]
fn a_damaged_slot_is_a_lost_shard_and_its_space_is_free() {
    let mut rig = Rig::small(10);
    for counter in 1..=3 {
        rig.put(5, 1, counter, 4);
    }
    rig.settle();
    let slots = superblock(&rig).areas.slot_table_offset;
    rig.disks[0].corrupt(slots + SLOT_BYTES as u64 + 20);
    rig.restart(Crash::Power);
    assert!(rig.notices.iter().any(|n| matches!(n, Notice::SlotsDamaged { count: 1, .. })));
    assert_eq!(rig.list(5), [shard_id(5, 1, 1), shard_id(5, 1, 3)]);
    assert!(is_done(&rig.put(5, 1, 2, 4)));
    rig.restart(Crash::Power);
    assert_eq!(rig.list(5).len(), 3);
}

#[test]
fn a_blank_device_proves_nothing_unless_it_lies() {
    for lies in [false, true] {
        let mut rig = Rig::small(11);
        rig.config.mutations = Mutations { blank_says_dont_have: lies, ..Mutations::default() };
        rig.restart(Crash::Process);
        let ledgers = rig.fence(5, 3).1;
        assert_eq!(ledgers.iter().any(|l| l.sound), lies);
    }
}

#[test]
fn misdirected_and_stale_bytes_never_count() {
    let mut rig = Rig::small(12);
    let at = ledger_of_single_batches(&mut rig, 4);
    let media = rig.disks[0].media().to_vec();
    let batch = |i: usize| &media[at[i].1 as usize..at[i].1 as usize + at[i].0.batch_bytes as usize];
    // The write of batch 2 goes where batch 3 is.
    rig.disks[0].write_media(at[3].1, batch(2));
    rig.restart(Crash::Power);
    assert!(!rig.fence(5, 1).1[0].sound);
    assert_eq!(rig.read_log(5, 1, 0, 0).0.len(), 3);
}

#[test]
fn who_waives_the_check_gets_what_the_disk_gives() {
    let mut rig = Rig::small(13);
    rig.put(5, 1, 1, 4);
    rig.settle();
    let shard = shard_id(5, 1, 1);
    let mut data = shard_data(shard, 4);
    let data_at = find(rig.disks[0].media(), &data[..4096]);
    rig.disks[0].corrupt(data_at + 4096 + 20);
    let read = |checked| Request::ReadShard { device: device(0), shard, block: 0, blocks: 4, checked, cached: true };
    let (reply, payload) = rig.call_with(read(false), Buf::empty());
    let bytes: Vec<u8> = payload.iter().flat_map(|buf| buf.to_vec()).collect();
    assert_eq!(reply, Reply::Shard { blocks: 4 });
    let differing: Vec<usize> = (0..data.len()).filter(|i| bytes[*i] != data[*i]).collect();
    assert_eq!(differing, [4096 + 20], "the damaged byte and no other");
    assert_eq!(rig.call_with(read(true), Buf::empty()).0, Reply::Refused(Refusal::Checksum));
    data.truncate(4096);
    assert_eq!(rig.read_shard(shard, 0, 1).unwrap(), data, "what is whole is served");
    let delete = Request::DeleteShards { device: device(0), volume: VolumeId(5), epoch: Epoch(1), shards: vec![shard] };
    assert!(is_done(&rig.call(delete)));
    assert_eq!(rig.call_with(read(false), Buf::empty()).0, Reply::Refused(Refusal::UnknownShard));
}
