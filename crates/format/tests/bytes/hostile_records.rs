//! What a metadata store or a device may give back that is no record of ours, or of a release that went wrong: cut off, damaged,
//! or damaged with a checksum that fits. Reading it is an error, or a record; it never stops the process.

use holdfast_base::{
    AssociationId, DeviceId, Epoch, GridId, HeadId, Key, KeyWidth, Lsn, NodeId, ObjectId, SegmentId, ShardId, VolumeId,
    crc32c, seeded_crc32c,
};
use holdfast_format::FormatError;
use holdfast_format::features::{Feature, Features};
use holdfast_format::geometry::{Geometry, Layout};
use holdfast_format::ledger::Leg;
use holdfast_format::packing::StoredLengths;
use holdfast_format::record::{
    Call, CommitExtent, PackedCommit, Record, Replied, SegmentCommit, SegmentNo, Share, SharedExtent, SharedRun,
    SharedSegment, Source,
};
use holdfast_format::root::Root;
use holdfast_format::segment::{PackedPayload, SegmentIndex, ShardHeader};
use holdfast_format::sharing::{STORE_EPOCHS, Store};
use proptest::prelude::*;

const SEGMENT: SegmentNo = SegmentNo { epoch: Epoch(4), counter: 9 };

fn lengths(bytes: &[u8]) -> StoredLengths {
    StoredLengths::try_from(bytes.to_vec()).unwrap()
}

fn extents() -> Vec<CommitExtent> {
    vec![
        CommitExtent { key: Key(7), blocks: 2, source: Source::Log(Lsn(5)) },
        CommitExtent { key: Key(20), blocks: 1, source: Source::Packed { segment: SEGMENT, granule: 77 } },
    ]
}

fn records() -> Vec<Record> {
    let geometry = Geometry::new(Layout::Mirror { copies: 2 }, 16);
    let homes = [1, 2].map(|n| Leg { node: NodeId(n), device: DeviceId(4) }).to_vec();
    let commit =
        |extents, geometry, crcs| SegmentCommit { segment: SEGMENT, geometry, homes: homes.clone(), extents, crcs };
    let packed = commit(extents(), geometry, vec![1, 2, 3]);
    let call = Call { association: AssociationId(5), sequence: 6, procedure: 7, arguments_crc: 8 };
    let reply = Replied { call, outcome: vec![1, 2, 3] };
    let shared = SharedExtent {
        key: Key(8),
        blocks: 2,
        source: Source::Log(Lsn(3)),
        segment: SegmentNo { epoch: STORE_EPOCHS, counter: 6 },
        run: SharedRun::Packed { granule: 129, lengths: lengths(&[0x41, 0xbf]) },
        crcs: vec![5, 300],
    };
    let of_store = SharedSegment { segment: shared.segment, geometry, homes: homes.clone(), units: None };
    let share = Share { segments: vec![of_store], extents: vec![shared] };
    vec![
        Record::Write { key: Key(1 << 40), blocks: 2 },
        Record::Rollback { head: HeadId(1), to: ObjectId(3), live: ObjectId(10) },
        Record::Commit(commit(extents(), Geometry { payload_blocks: 3, ..geometry }, vec![1, 2, 3])),
        Record::CommitPacked(Box::new(PackedCommit { commit: packed, lengths: lengths(&[63, 0x40, 0xbf]) })),
        Record::Share(Box::new(share)),
        Record::Head { head: HeadId(3), live: ObjectId(5), id: VolumeId(7), size_bytes: 4096 },
        Record::WriteReplied { key: Key(300), blocks: 2, reply: reply.clone() },
        Record::Replied(reply.clone()),
        Record::Attribute { name: "ab".to_string(), value: vec![1, 0xff], reply: Some(Box::new(reply)) },
    ]
}

fn headers() -> Vec<ShardHeader> {
    let packed = |fingerprints| PackedPayload { lengths: lengths(&[63, 0x40, 0xbf]), fingerprints };
    [(None, false), (Some(packed(Vec::new())), false), (Some(packed(vec![9; 40])), true)]
        .into_iter()
        .map(|(packed, sealed)| ShardHeader {
            grid: GridId(1),
            shard: ShardId { segment: SEGMENT.of(VolumeId(7)), index: 1 },
            geometry: Geometry::new(Layout::Mirror { copies: 2 }, 16),
            block_crcs: (0..16).collect(),
            index: SegmentIndex::Data(extents()),
            payload_crcs: vec![1, 2, 3],
            sealed,
            packed,
        })
        .collect()
}

fn roots() -> Vec<Root> {
    let plain = Root::new(GridId(1), VolumeId(2), "vm1", 1 << 30, Layout::DEFAULT);
    let stores = vec![Store { volume: VolumeId(3), first: STORE_EPOCHS, last: Epoch(u64::MAX) }];
    let features = Features::default().with(Feature::Stores).with(Feature::WideKeys);
    vec![Root { stores, features, ..plain.clone() }, plain]
}

/// Each with one bit of it changed.
fn flipped(bytes: &[u8]) -> impl Iterator<Item = Vec<u8>> {
    (0..bytes.len() * 8).map(|bit| {
        let mut bytes = bytes.to_vec();
        bytes[bit / 8] ^= 1 << (bit % 8);
        bytes
    })
}

fn root_of(version: u16, body: &[u8]) -> Vec<u8> {
    [&b"HFRT"[..], &version.to_le_bytes(), &crc32c(body).to_le_bytes(), body].concat()
}

fn header_of(version: u16, shard: ShardId, body: &[u8]) -> Vec<u8> {
    let SegmentId { volume, epoch, counter } = shard.segment;
    let seed = [volume.0 as u64, (volume.0 >> 64) as u64, epoch.0, counter, u64::from(shard.index)];
    let crc = seeded_crc32c(&seed, body);
    let prefix = [&b"HFSH"[..], &version.to_le_bytes(), &[0; 2], &(body.len() as u32).to_le_bytes()].concat();
    [&prefix, &crc.to_le_bytes()[..], body].concat()
}

#[test]
fn records_that_are_cut_off_are_none_and_damaged_ones_stop_nobody() {
    for record in records() {
        for width in [KeyWidth::Narrow, KeyWidth::Wide] {
            let bytes = record.encode_in(width);
            assert_eq!(Record::decode_in(width, &bytes).as_ref(), Ok(&record));
            for len in 0..bytes.len() {
                assert!(Record::decode_in(width, &bytes[..len]).is_err(), "{record:?}, cut at {len}");
            }
        }
    }
    for bytes in records().iter().flat_map(|record| flipped(&record.encode()).collect::<Vec<_>>()) {
        for width in [KeyWidth::Narrow, KeyWidth::Wide] {
            if let Ok(record) = Record::decode_in(width, &bytes) {
                assert_eq!(Record::decode_in(width, &record.encode_in(width)), Ok(record));
            }
        }
    }
}

#[test]
fn headers_that_are_cut_off_or_damaged_are_none() {
    for header in headers() {
        let bytes = header.encode();
        let len = 16 + u32::from_le_bytes(bytes[8..12].try_into().unwrap()) as usize;
        assert_eq!(ShardHeader::decode(header.shard, &bytes[..len]).as_ref(), Ok(&header));
        for len in 0..len {
            assert!(ShardHeader::decode(header.shard, &bytes[..len]).is_err(), "cut at {len}");
        }
        for bytes in flipped(&bytes[16..len]) {
            let damaged = [&header.encode()[..16], &bytes].concat();
            assert_eq!(ShardHeader::decode(header.shard, &damaged), Err(FormatError::Checksum));
            for version in 0..5 {
                let _ = ShardHeader::decode(header.shard, &header_of(version, header.shard, &bytes));
            }
        }
    }
}

#[test]
fn roots_that_are_cut_off_or_damaged_are_none() {
    for root in roots() {
        let bytes = root.encode();
        assert_eq!(root_of(root.version(), &bytes[10..]), bytes);
        for len in 0..bytes.len() {
            assert!(Root::decode(&bytes[..len]).is_err(), "cut at {len}");
            let _ = Root::decode(&root_of(root.version(), &bytes[10..len.max(10)]));
        }
        for bytes in flipped(&bytes[10..]) {
            for version in 0..7 {
                let _ = Root::decode(&root_of(version, &bytes));
            }
        }
    }
}

proptest! {
    #[test]
    fn any_bytes_with_a_checksum_that_fits_are_a_record_or_none(body: Vec<u8>, version in 0u8..8) {
        let shard = headers()[0].shard;
        let _ = Root::decode(&root_of(u16::from(version), &body));
        let _ = ShardHeader::decode(shard, &header_of(u16::from(version), shard, &body));
        let bytes = [&[version][..], &body].concat();
        for width in [KeyWidth::Narrow, KeyWidth::Wide] {
            if let Ok(record) = Record::decode_in(width, &bytes) {
                prop_assert_eq!(Record::decode_in(width, &record.encode_in(width)), Ok(record));
            }
        }
    }
}
