//! Records as they are on disk and in the metadata store: what these say is read for ever. They were written out by hand after
//! docs/FORMAT.md.

use holdfast_base::{BLOCK_BYTES, Epoch, GridId, InstanceId, Key, Lsn, MediaClass, SegmentId, ShardId, VolumeId};
use holdfast_format::geometry::{Geometry, Layout};
use holdfast_format::record::{CommitExtent, Record, SealedHeader, Source};
use holdfast_format::root::Root;
use holdfast_format::segment::{SegmentIndex, ShardHeader};
use holdfast_format::tier::{FirstTier, TierSize, Tiers};

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
        if version == 4 {
            assert_eq!(hex(&root(key_id, tiers).encode()), hex(&golden));
        }
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
        };
        let mut expected = bytes(golden);
        assert_eq!(hex(&header.encode()[..expected.len()]), golden);
        expected.resize(BLOCK_BYTES, 0);
        assert_eq!(ShardHeader::decode(header.shard, &expected), Ok(header));
    }
}
