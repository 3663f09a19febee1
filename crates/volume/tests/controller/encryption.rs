//! An encrypted volume on ideal nodes: what leaves the controller is sealed, and only its key opens the volume.

use crate::support::*;
use holdfast_base::{BLOCK_BYTES, Buf, LedgerId, Lsn};
use holdfast_cipher::{Secret, VolumeKey};
use holdfast_format::geometry::Layout;
use holdfast_format::record::SealedHeader;
use holdfast_format::segment::{SegmentIndex, ShardHeader};
use holdfast_volume::{Config, Notice, State};
use std::collections::BTreeMap;
use std::time::Duration;

const LEN: u64 = 1 << 20;

fn key(n: u8) -> VolumeKey {
    VolumeKey::new(&Secret::new([n; 32]))
}

/// A volume that has never been opened becomes an encrypted one.
fn encrypted(seed: u64, nodes: u32, layout: Layout, size: u64) -> World {
    let mut world = World::new(seed, nodes, layout, size);
    assert_eq!(world.controller.state(), State::Open);
    world.encrypt(&key(1));
    world.config = Some(Config { key: Some(key(1)), notes_encryptions: true, ..config(seed, 1) });
    world.open();
    world
}

fn data_shards(world: &World) -> Vec<(usize, ShardHeader, Buf)> {
    let of = |(i, node): (usize, &IdealNode)| {
        let decoded = node.shards.iter().map(move |(shard, (header_blocks, bytes))| {
            let data_at = *header_blocks as usize * BLOCK_BYTES;
            (i, ShardHeader::decode(*shard, &bytes[..data_at]).unwrap(), bytes.slice(data_at..bytes.len()))
        });
        decoded.filter(|(_, header, _)| matches!(header.index, SegmentIndex::Data(_))).collect::<Vec<_>>()
    };
    world.nodes.iter().enumerate().flat_map(of).collect()
}

/// Entries with payload, by ledger and LSN.
fn writes_in_log(world: &World) -> BTreeMap<(LedgerId, Lsn), (Vec<u8>, Buf)> {
    let ledgers = world.nodes.iter().flat_map(|node| node.ledgers.iter());
    let entries = ledgers.flat_map(|(id, ledger)| ledger.entries.iter().map(move |(lsn, e)| ((*id, *lsn), e)));
    let writes = entries.filter(|(_, (_, payload))| !payload.is_empty());
    writes.map(|(at, (entry, payload))| (at, (entry.header.clone(), payload.clone()))).collect()
}

/// Blocks of the volume that any of these bytes show.
fn shown(plain: &[u8], bytes: &[u8]) -> usize {
    let known: std::collections::BTreeSet<&[u8]> = plain.chunks(16).collect();
    bytes.chunks(16).filter(|chunk| known.contains(chunk)).count()
}

#[test]
fn log_and_segments_hold_ciphertext_and_everything_reads_back() {
    for layout in [Layout::Mirror { copies: 2 }, Layout::Parity { data: 2, parity: 1 }] {
        let mut world = encrypted(1, 4, layout, 4 << 20);
        world.write_all(0, LEN);
        let whole = world.read(0, LEN);
        let writes = writes_in_log(&world);
        assert!(!writes.is_empty());
        for (header, payload) in writes.values() {
            assert!(SealedHeader::decode(header).is_some());
            assert_eq!(shown(&whole, payload), 0);
        }
        world.span(Duration::from_secs(30));
        let shards = data_shards(&world);
        assert!(!shards.is_empty());
        for (_, header, bytes) in &shards {
            assert!(header.sealed && holdfast_base::block_crcs(bytes) == header.block_crcs);
            assert_eq!(shown(&whole, bytes), 0);
        }
        assert_eq!(world.read(0, LEN), whole);
        // One node gone: what is reconstructed opens as well.
        world.nodes[0].up = false;
        world.open();
        assert_eq!(world.read(0, LEN), whole);
    }
}

#[test]
fn an_entry_that_is_copied_to_another_ledger_is_sealed_anew() {
    let mut world = encrypted(2, 3, Layout::Mirror { copies: 2 }, 4 << 20);
    world.write_all(0, 64 << 10);
    let whole = world.read(0, 64 << 10);
    let before = writes_in_log(&world);
    // A leg is lost: the next owner copies what lacks a copy.
    let holder = world.nodes.iter().position(|n| n.ledgers.values().any(|l| !l.entries.is_empty())).unwrap();
    world.nodes[holder].up = false;
    world.open();
    let after = writes_in_log(&world);
    let copied: Vec<_> = after.iter().filter(|(at, _)| !before.contains_key(at)).collect();
    assert!(!copied.is_empty());
    for ((_, lsn), (header, payload)) in copied {
        let former = before.iter().find(|((_, of), _)| of == lsn).map(|(_, entry)| entry).unwrap();
        let (new, old) = (SealedHeader::decode(header).unwrap(), SealedHeader::decode(&former.0).unwrap());
        assert_eq!(new.record, old.record);
        assert_ne!((new.instance, new.tag), (old.instance, old.tag));
        assert_ne!(payload[..16], former.1[..16]);
    }
    assert_eq!(world.read(0, 64 << 10), whole);
}

#[test]
fn what_was_changed_on_a_device_with_its_checksums_is_not_taken_for_data() {
    let mut world = encrypted(3, 2, Layout::Mirror { copies: 2 }, 2 << 20);
    world.write_all(0, LEN);
    world.span(Duration::from_secs(30));
    let whole = world.read(0, LEN);
    world.nodes[0].shards.alter_data(|_, data| flip_blocks(data, 1));
    world.nodes[0].shards.vouch();
    assert_eq!(world.read(0, LEN), whole);
    assert!(world.controller.status().counters.checksum_errors > 0);
}

#[test]
fn with_another_key_or_none_the_volume_waits_and_is_as_it_was() {
    let mut world = encrypted(4, 3, Layout::Mirror { copies: 2 }, 2 << 20);
    world.write_all(0, LEN);
    let whole = world.read(0, LEN);
    let (root, right) = (world.root.clone(), world.config.clone().unwrap());
    for wrong in [Some(key(2)), None] {
        world.config = Some(Config { key: wrong, ..right.clone() });
        world.notices.clear();
        world.begin_open();
        world.span(Duration::from_secs(2));
        assert_eq!(world.controller.state(), State::Opening);
        let told = world.notices.iter().any(|n| matches!(n, Notice::OpenWaits { why } if why.contains("key")));
        assert!(told, "{:?}", world.notices);
        assert!(world.root == root, "nobody is deposed by who can't open the volume");
    }
    world.config = Some(right);
    world.open();
    assert_eq!(world.read(0, LEN), whole);
}

#[test]
fn hedges_send_the_same_bytes_and_no_position_is_used_for_two_plaintexts() {
    let mut world = encrypted(5, 4, Layout::Parity { data: 2, parity: 1 }, 4 << 20);
    let mut seen = BTreeMap::new();
    for round in 0..12 {
        world.write_all(0, LEN / 4 + round * 4096);
        let hung = (round % 4) as usize;
        world.nodes[hung].hang_appends = round % 3 == 0;
        world.write_all(LEN / 2, LEN / 4);
        world.nodes[hung].hang_appends = false;
        world.span(Duration::from_secs(3));
        for encryption in world.controller.take_encryptions() {
            let first = *seen.entry((encryption.key, encryption.position)).or_insert(encryption.digest);
            assert_eq!(first, encryption.digest, "a key and a position have sealed two plaintexts");
        }
        if round % 4 == 3 {
            world.open();
        }
    }
    assert!(seen.len() > 1000);
}
