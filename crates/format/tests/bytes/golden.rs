//! Records as they are on disk and in the metadata store: what these say is read for ever. They were written out by hand after
//! docs/FORMAT.md.

use holdfast_base::{
    AssociationId, BLOCK_BYTES, DeviceId, Epoch, GridId, HeadId, InstanceId, Key, KeyWidth, Lba, LedgerId, Lsn,
    MediaClass, NodeId, ObjectId, SegmentId, ShardId, VolumeId,
};
use holdfast_format::drive::{DriveReport, DriveTrouble};
use holdfast_format::features::{Feature, Features};
use holdfast_format::geometry::{Geometry, Layout};
use holdfast_format::ledger::{AckRule, Leg};
use holdfast_format::packing::StoredLengths;
use holdfast_format::record::{
    Call, CommitExtent, PackedCommit, Record, Replied, SealedHeader, SegmentCommit, SegmentNo, Share, SharedExtent,
    SharedRun, SharedSegment, Source,
};
use holdfast_format::root::Root;
use holdfast_format::segment::{PackedPayload, SegmentIndex, ShardHeader};
use holdfast_format::sharing::{STORE_EPOCHS, Store};
use holdfast_format::tier::{FirstTier, TierSize, Tiers};
use holdfast_format::versions::Versions;
use holdfast_format::wire::*;
use std::num::NonZeroU32;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn bytes(hex: &str) -> Vec<u8> {
    hex.as_bytes().chunks(2).map(|p| u8::from_str_radix(std::str::from_utf8(p).unwrap(), 16).unwrap()).collect()
}

fn root(key_id: Option<u128>, tiers: Tiers) -> Root {
    let root = Root::new(GridId(1), VolumeId(2), "vm1", 1 << 30, Layout::DEFAULT);
    Root { epoch: Epoch(7), instance: InstanceId(9), owner: "a".to_string(), key_id, tiers, ..root }
}

#[test]
fn roots_of_all_versions() {
    let none = Tiers::default();
    let size = TierSize::PerMille(200);
    let first = FirstTier { layout: Layout::Mirror { copies: 2 }, media: Some(MediaClass::Nvme), size };
    let tiers = Tiers { first: Some(first), capacity: Some(MediaClass::Hdd) };
    for (version, golden, key_id, tiers) in [
        (1, "484652540100c049438e010203766d31808080800401020107090161000000000000", None, none),
        (2, "4846525402001c037ccc010203766d318080808004010201070901610000000000000000", None, none),
        (3, "484652540300ed27ac0f010203766d31808080800401020107090161000000000000000000", None, none),
        (3, "484652540300e532bf79010203766d31808080800401020107090161000000000000000001a222", Some(0x1122), none),
        (4, "484652540400a77775be010203766d318080808004010201070901610000000000000000000000", None, none),
        (
            4,
            "484652540400205d61b3010203766d31808080800401020107090161000000000000000001a222010002010201c8010100",
            Some(0x1122),
            tiers,
        ),
    ] {
        let golden = bytes(golden);
        assert_eq!(Root::decode(&golden), Ok(root(key_id, tiers)), "version {version}");
        assert!(root(key_id, tiers).version() <= version);
        // Written is the oldest that says all of it.
        if version == root(key_id, tiers).version() {
            assert_eq!(hex(&root(key_id, tiers).encode()), hex(&golden));
        }
    }
}

#[test]
fn roots_with_features() {
    let plain = root(None, Tiers::default());
    let packed = Features::default().with(Feature::Packed).with(Feature::WideKeys);
    let first = Epoch(1 << 63);
    let stores = vec![Store { volume: VolumeId(3), first, last: Epoch(first.0 + 4) }];
    // The features stand in front of what version 4 has, the stores behind it.
    let of_version_4 = "010203766d318080808004010201070901610000000000000000000000";
    let with_stores = Root { features: packed.clone().with(Feature::Stores), stores, ..plain.clone() };
    for (crc, features, stores, root) in [
        ("e0538a2f", "020102", "00", Root { features: packed, ..plain }),
        ("1f81225b", "03010205", "01038080808080808080800184808080808080808001", with_stores),
    ] {
        let golden = format!("484652540500{crc}{features}{of_version_4}{stores}");
        assert_eq!(hex(&root.encode()), golden);
        assert_eq!(Root::decode(&bytes(&golden)), Ok(root));
    }
}

#[test]
fn keys_of_both_widths() {
    let (narrow, wide) = (KeyWidth::Narrow, KeyWidth::Wide);
    for (key, width, object, block) in [
        (0x0000_0100_0000_0007, narrow, 1, 7),
        (0x0000_0100_0000_0007, wide, 16, 7),
        (0xffff_ff00_0000_0000, narrow, (1 << 24) - 1, 0),
        (0x0000_0010_0000_0000, narrow, 0, 1 << 36),
        (0x0000_0010_0000_0000, wide, 1, 0),
        (0xffff_fff0_0000_0000, wide, (1 << 28) - 1, 0),
    ] {
        assert_eq!(width.encode(ObjectId(object), Lba(block)), Some(key));
        assert_eq!(width.decode(key), (ObjectId(object), Lba(block)));
    }
}

#[test]
fn headers_of_entries() {
    let record = Record::Write { key: Key(300), blocks: 2 }.encode();
    assert_eq!(hex(&record), "0100ac0202");
    let instance = InstanceId(0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10);
    let header = SealedHeader { instance, tag: std::array::from_fn(|i| i as u8 + 0xa0), record: &record };
    let golden = concat!("02", "100f0e0d0c0b0a090807060504030201", "a0a1a2a3a4a5a6a7a8a9aaabacadaeaf", "0100ac0202");
    assert_eq!(hex(&header.encode()), golden);
    assert_eq!(SealedHeader::decode(&bytes(golden)), Some(header));
}

#[test]
fn records_of_version_3() {
    let leg = |n: u32| Leg { node: NodeId(n), device: DeviceId(u128::from(n) + 4) };
    let segment = SegmentNo { epoch: Epoch(4), counter: 9 };
    let shared = SegmentNo { epoch: STORE_EPOCHS, counter: 6 };
    let lengths = |bytes: &[u8]| StoredLengths::try_from(bytes.to_vec()).unwrap();
    let of = |source, blocks| CommitExtent { key: Key(8), blocks, source };
    let packed =
        |geometry, extents, crcs| SegmentCommit { segment, geometry, homes: vec![leg(1), leg(2)], extents, crcs };
    let from_packed = Source::Packed { segment, granule: 130 };
    let call = Call { association: AssociationId(0x1122), sequence: 300, procedure: 0x89, arguments_crc: 7 };
    let reply = Replied { call, outcome: vec![0xaa, 0xbb] };
    let mirror = |blocks| Geometry::new(Layout::Mirror { copies: 2 }, blocks);
    let run = SharedRun::Packed { granule: 129, lengths: lengths(&[0x41, 0xbf]) };
    let of_store =
        |key, source, run| SharedExtent { key: Key(key), blocks: 2, source, segment: shared, run, crcs: vec![5, 300] };
    let share = Share {
        segments: vec![SharedSegment {
            segment: shared,
            geometry: mirror(16),
            homes: vec![leg(1), leg(2)],
            units: NonZeroU32::new(300),
        }],
        extents: vec![of_store(8, from_packed, run), of_store(20, Source::Log(Lsn(5)), SharedRun::Plain { block: 14 })],
    };
    let commit = packed(mirror(16), vec![of(Source::Log(Lsn(5)), 2), of(from_packed, 1)], vec![1, 2, 3]);
    for (golden, record) in [
        (
            "0302040902010010010201050206010801030409820101ac02",
            Record::Commit(packed(mirror(1), vec![of(from_packed, 1)], vec![300])),
        ),
        (
            "030d04090201001010020105020602080200050801030409820103010203033f409d",
            Record::CommitPacked(Box::new(PackedCommit { commit, lengths: lengths(&[63, 0x40, 0x9d]) })),
        ),
        (
            "030e0180808080808080808001060201001010020105020601ac0202080203040982018080808080808080800106018101\
             0241bf0205ac02140200058080808080808080800106000e0205ac02",
            Record::Share(Box::new(share)),
        ),
        ("030f0350078020", Record::Head { head: HeadId(3), live: ObjectId(5), id: VolumeId(7), size_bytes: 4096 }),
        ("0310ac0202a222ac0289010702aabb", Record::WriteReplied { key: Key(300), blocks: 2, reply: reply.clone() }),
        ("0311a222ac0289010702aabb", Record::Replied(reply.clone())),
        ("03120261620201ff00", Record::Attribute { name: "ab".to_string(), value: vec![1, 0xff], reply: None }),
        (
            "03120261620001a222ac0289010702aabb",
            Record::Attribute { name: "ab".to_string(), value: vec![], reply: Some(Box::new(reply)) },
        ),
    ] {
        assert_eq!(hex(&record.encode()), golden, "{record:?}");
        assert_eq!(Record::decode(&bytes(golden)), Ok(record));
    }
}

#[test]
fn headers_of_shards() {
    let segment = SegmentId { volume: VolumeId(5), epoch: Epoch(1), counter: 2 };
    let extents = vec![CommitExtent { key: Key(8), blocks: 2, source: Source::Log(Lsn(4)) }];
    for (sealed, golden) in [
        (false, "484653480100000016000000184ac63d0105010201020100100202070800010802000402090a"),
        (true, "484653480200000016000000184ac63d0105010201020100100202070800010802000402090a"),
    ] {
        let header = ShardHeader {
            grid: GridId(1),
            shard: ShardId { segment, index: 1 },
            geometry: Geometry::new(Layout::Mirror { copies: 2 }, 2),
            block_crcs: vec![7, 8],
            index: SegmentIndex::Data(extents.clone()),
            payload_crcs: vec![9, 10],
            sealed,
            packed: None,
        };
        let mut expected = bytes(golden);
        assert_eq!(hex(&header.encode()[..expected.len()]), golden);
        expected.resize(BLOCK_BYTES, 0);
        assert_eq!(ShardHeader::decode(header.shard, &expected), Ok(header));
    }
}

#[test]
fn headers_of_packed_shards() {
    let segment = SegmentId { volume: VolumeId(5), epoch: Epoch(1), counter: 2 };
    let source = Source::Packed { segment: segment.into(), granule: 130 };
    let lengths = StoredLengths::try_from(vec![0x41, 0xbf]).unwrap();
    let block_crcs = (0..16).collect();
    let of_version_1 = "0105010201020100101010000102030405060708090a0b0c0d0e0f00010802030102820102090a";
    for (prefix, end, sealed, fingerprints) in [
        ("2c000000cde7b52d", "000241bf00", false, vec![]),
        ("3c0000003ed47da6", "000241bf10202122232425262728292a2b2c2d2e2f", false, (0x20..0x30).collect()),
        ("2c0000006188a415", "010241bf00", true, vec![]),
        (
            "4c0000005bfed16f",
            "010241bf20202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f",
            true,
            (0x20..0x40).collect::<Vec<u8>>(),
        ),
    ] {
        let header = ShardHeader {
            grid: GridId(1),
            shard: ShardId { segment, index: 1 },
            geometry: Geometry::new(Layout::Mirror { copies: 2 }, 16),
            block_crcs: Vec::clone(&block_crcs),
            index: SegmentIndex::Data(vec![CommitExtent { key: Key(8), blocks: 2, source }]),
            payload_crcs: vec![9, 10],
            sealed,
            packed: Some(PackedPayload { lengths: lengths.clone(), fingerprints }),
        };
        let golden = format!("4846534803000000{prefix}{of_version_1}{end}");
        let mut expected = bytes(&golden);
        assert_eq!(hex(&header.encode()[..expected.len()]), golden);
        expected.resize(BLOCK_BYTES, 0);
        assert_eq!(ShardHeader::decode(header.shard, &expected), Ok(header));
    }
}

const REQUESTS: [&str; 27] = [
    "0005ac02090161",
    "01",
    "02",
    "030102030403050108010201",
    "0401020303050a090101010b",
    "0501020304",
    "06010203050c0d",
    "0701020303050e",
    "080102030305",
    "09010203",
    "0a010203",
    "0b010102",
    "0c010203020306070f",
    "0d010203060710110100",
    "0e0102030607",
    "0f0102030102030607",
    "100102010203060712",
    "11010203",
    "120102030607",
    "13010203020306070f011008010d3132372e302e302e313a33303001",
    "14",
    "15",
    "1601020313020102",
    "1701010214",
    "180161",
    "19",
    "1a150162",
];
const REPLIES: [&str; 25] = [
    "0006080401010100000000001314000000000101000115160000000017",
    "01",
    "0201010100000000001314000000000101000115160000000017",
    "03",
    "041d1e",
    "051f0103050118191a",
    "06011b0101011c012001",
    "0721",
    "08",
    "09010203060700",
    "0a0022",
    "0a01",
    "0a02",
    "0a03",
    "0a04",
    "0a05",
    "0a06",
    "0a07",
    "0a08",
    "0a092324",
    "0b0101020105012500014b0000",
    "0c01012829012a2b012701620100",
    "0d01022e0103050118191a01032c2d01",
    "0e2f",
    "0f3001013132",
];

/// What hosts and nodes say to each other: a message keeps its bytes, in this release and in all that speak with it.
#[test]
fn messages_between_hosts_and_nodes() {
    let (device, volume, epoch) = (DeviceId(1), VolumeId(2), Epoch(3));
    let (instance, ledger) = (InstanceId(4), LedgerId { epoch, n: 5 });
    let shard = ShardId { segment: SegmentId { volume, epoch, counter: 6 }, index: 7 };
    let legs = vec![Leg { node: NodeId(8), device }];
    let rule = AckRule { copies: 2, domains: 1 };
    let source = ShardSource { index: 16, node: NodeId(8), address: Some("127.0.0.1:300".to_string()), device };
    let requests = [
        Request::Hello { versions: Versions { oldest: 5, newest: 300 }, grid: GridId(9), host: "a".to_string() },
        Request::Ping,
        Request::Stat,
        Request::CreateLedger { device, volume, epoch, instance, ledger, legs, rule },
        Request::Append { device, volume, epoch, ledger, lsn: Lsn(10), acked: Lsn(9), header: vec![1], crcs: vec![11] },
        Request::Fence { device, volume, epoch, instance },
        Request::ReadLog { device, volume, ledger, from: Lsn(12), bytes_max: 13 },
        Request::TrimLedger { device, volume, epoch, ledger, upto: Lsn(14) },
        Request::DeleteLedger { device, volume, epoch, ledger },
        Request::Grant { device, volume, epoch },
        Request::Release { device, volume, epoch },
        Request::SetMedia { device, media: Some(MediaClass::Nvme) },
        Request::PutShard { device, volume, epoch, shard, header_blocks: 15 },
        Request::ReadShard { device, shard, block: 16, blocks: 17, checked: true, cached: false },
        Request::ReadShardHeader { device, shard },
        Request::DeleteShards { device, volume, epoch, shards: vec![shard] },
        Request::ListShards { device, volume, after: Some(shard), count_max: 18 },
        Request::DropVolume { device, volume, epoch },
        Request::CheckShard { device, shard },
        Request::MakeShard { device, volume, epoch, shard, header_of: 15, sources: vec![source] },
        Request::Drives,
        Request::Troubles,
        Request::PutRoot { device, volume, epoch, sequence: 19, root: vec![1, 2] },
        Request::ListVolumes { device, after: Some(volume), count_max: 20 },
        Request::Heard { host: "a".to_string() },
        Request::Reactors,
        Request::Join { reactor: 21, host: "b".to_string() },
    ];
    let said: Vec<String> =
        requests.iter().map(|request| hex(&encode_frame(0, request, 0)[FRAME_HEADER_BYTES..])).collect();
    assert_eq!(said, REQUESTS);
    let times = OpTimes { p99_us: 19, samples: 20 };
    let cache = CacheStat { hits: 21, misses: 22, limit_bytes: 23, ..CacheStat::default() };
    let stat = DeviceStat {
        reads: times,
        media: Some(MediaClass::Ssd),
        read_cache: Some(cache),
        ..DeviceStat::unknown(device, DeviceHealth::Serving)
    };
    let devices = vec![stat];
    let state = LedgerState { ledger, sound: true, acked: Lsn(24), trimmed: Lsn(25), last: Lsn(26) };
    let entry = LogEntry { lsn: Lsn(27), header: vec![1], crcs: vec![28] };
    let troubles = vec![DriveTrouble::SpareLow, DriveTrouble::Temperature];
    let report = DriveReport { troubles, worn_percent: Some(37), celsius: Some(-38), ..DriveReport::default() };
    let outage = Outage { ms: 39, why: "b".to_string(), is_missing: true, is_tried: false };
    let trouble =
        DeviceTrouble { device, lives: 40, io_errors: 41, last_error_ms: Some(42), retries: 43, outage: Some(outage) };
    let root = Some(HeldRoot { epoch, sequence: 44, blocks: 45 });
    let held = HeldVolume { volume, promised: Epoch(46), ledgers: vec![state.clone()], root };
    let replies = [
        Reply::Hello { version: 6, node: NodeId(8), boot: instance, devices: devices.clone() },
        Reply::Pong,
        Reply::Stat { devices },
        Reply::Done,
        Reply::Appended { lsn: Lsn(29), journal_fill: 30 },
        Reply::Fenced { grant_left_ms: 31, ledgers: vec![state] },
        Reply::LogEntries { entries: vec![entry], damaged: vec![Lsn(32)], more: true },
        Reply::Shard { blocks: 33 },
        Reply::ShardHeader,
        Reply::Shards { shards: vec![shard], more: false },
        Reply::Refused(Refusal::StaleEpoch { promised: Epoch(34) }),
        Reply::Refused(Refusal::UnknownDevice),
        Reply::Refused(Refusal::DeviceFailed),
        Reply::Refused(Refusal::Busy),
        Reply::Refused(Refusal::UnknownLedger),
        Reply::Refused(Refusal::UnknownShard),
        Reply::Refused(Refusal::Checksum),
        Reply::Refused(Refusal::NoSpace),
        Reply::Refused(Refusal::Invalid),
        Reply::Refused(Refusal::Version(Versions { oldest: 35, newest: 36 })),
        Reply::Drives { drives: vec![(device, report)] },
        Reply::Troubles { troubles: vec![trouble] },
        Reply::Volumes { volumes: vec![held], more: true },
        Reply::Heard { ms: 47 },
        Reply::Reactors { count: 48, devices: vec![(device, 49)], passed_on: 50 },
    ];
    let said: Vec<String> = replies.iter().map(|reply| hex(&encode_frame(0, reply, 0)[FRAME_HEADER_BYTES..])).collect();
    assert_eq!(said, REPLIES);
}
