//! Volumes whose blocks are packed, against ideal nodes: what was written is read, whatever becomes of its segments, and it
//! takes less. Every audit is one of granules: a wrong account ends the test.

use crate::support::*;
use holdfast_base::{BLOCK_BYTES, BlockData, BlockOp, Buf, Epoch, HeadId, InstanceId, MetaVersion, Prng};
use holdfast_cipher::{Secret, VolumeKey};
use holdfast_format::features::{Feature, Features};
use holdfast_format::geometry::Layout;
use holdfast_format::packing::Compression;
use holdfast_format::root::Root;
use holdfast_format::wire::PACKED_SINCE;
use holdfast_volume::{Change, Config, Event, State};
use std::time::Duration;

const BLOCK: u64 = BLOCK_BYTES as u64;
const BLOCKS: u64 = 1024;

/// Turns packing on: from the next opening on.
fn pack(world: &mut World) {
    let root = Root::decode(&world.root.1).unwrap();
    world.root.1 = Root { features: Features::default().with(Feature::Packed), ..root }.encode();
    world.open();
}

/// Which repeat in no order that lz4 would find: zstd makes less than half of them.
fn into_letters(bytes: &mut [u8]) {
    bytes.iter_mut().for_each(|byte| *byte = b'a' + *byte % 8);
}

/// A block that packs well, half, by zstd alone, or not at all.
fn block(prng: &mut Prng) -> Vec<u8> {
    let mut bytes = vec![0; BLOCK_BYTES];
    let random = *prng.pick(&[0, 100, BLOCK_BYTES / 2, BLOCK_BYTES, BLOCK_BYTES]);
    prng.fill(&mut bytes[..random]);
    if prng.chance(300) {
        into_letters(&mut bytes);
    }
    bytes[BLOCK_BYTES - 1] = 1 + prng.below(200) as u8;
    bytes
}

struct Model {
    world: World,
    prng: Prng,
    bytes: Vec<u8>,
}

impl Model {
    fn new(seed: u64, nodes: u32, layout: Layout) -> Model {
        Model::of(seed, nodes, layout, false)
    }

    /// Encrypted where `is_sealed`.
    fn of(seed: u64, nodes: u32, layout: Layout, is_sealed: bool) -> Model {
        let mut world = World::new(seed, nodes, layout, BLOCKS * BLOCK);
        let key = is_sealed.then(|| VolumeKey::new(&Secret::new([7; 32])));
        key.iter().for_each(|key| world.encrypt(key));
        // Of several rows in every layout.
        let segments = Config { segment_payload_bytes: 1 << 20, direct_bytes_min: 256 << 10, ..config(0, 0) };
        let compression = if seed.is_multiple_of(2) { Compression::Auto } else { Compression::Lz4 };
        world.config = Some(Config { clean_dead_per_mille: 200, compression, key, ..segments });
        pack(&mut world);
        Model { world, prng: Prng::new(seed), bytes: vec![0; (BLOCKS * BLOCK) as usize] }
    }

    fn write(&mut self, at: u64, blocks: u64) {
        let data: Vec<u8> = (0..blocks).flat_map(|_| block(&mut self.prng)).collect();
        self.write_data(at, data);
    }

    fn write_data(&mut self, at: u64, data: Vec<u8>) {
        self.bytes[(at * BLOCK) as usize..][..data.len()].copy_from_slice(&data);
        let write = self.world.request(BlockOp::Write { offset: at * BLOCK, data: Buf::copy_from(&data) });
        assert!(matches!(self.world.wait(write), BlockData::Done));
    }

    fn write_some(&mut self, count: usize) {
        for _ in 0..count {
            let at = self.prng.below(BLOCKS);
            let blocks = 1 + self.prng.below(12.min(BLOCKS - at));
            self.write(at, blocks);
        }
    }

    fn judge(&mut self, when: &str) {
        for at in (0..BLOCKS).step_by(64) {
            let found = self.world.read(at * BLOCK, 64 * BLOCK);
            let wanted = &self.bytes[(at * BLOCK) as usize..][..(64 * BLOCK) as usize];
            let differs = found.chunks(BLOCK_BYTES).zip(wanted.chunks(BLOCK_BYTES)).position(|(a, b)| a != b);
            assert_eq!(differs.map(|block| at + block as u64), None, "{when}: the first block that is not as written");
        }
    }
}

fn layouts() -> Vec<(u32, Layout)> {
    vec![
        (3, Layout::Mirror { copies: 2 }),
        (4, Layout::Parity { data: 2, parity: 1 }),
        (7, Layout::Parity { data: 4, parity: 2 }),
    ]
}

/// With a seed for each, that is of one kind of compression for both.
fn layouts_plain_and_sealed() -> impl Iterator<Item = (u64, u32, Layout, bool)> {
    let all = layouts().into_iter().zip(0..);
    all.flat_map(|((nodes, layout), seed)| [false, true].map(|is_sealed| (seed, nodes, layout, is_sealed)))
}

#[test]
fn what_was_written_is_read_whatever_becomes_of_its_segments() {
    for (seed, nodes, layout, is_sealed) in layouts_plain_and_sealed() {
        let mut model = Model::of(seed, nodes, layout, is_sealed);
        let mut cleaned = 0;
        for round in 0..6 {
            model.write_some(200);
            model.judge("out of the log");
            model.world.span(Duration::from_secs(30));
            model.judge("out of segments");
            if round % 2 == 1 {
                cleaned += model.world.controller.status().counters.segments_cleaned;
                model.world.open();
                model.judge("after an owner that crashed");
            }
            if round == 3 {
                model.world.node_down(0);
                model.judge("without a node");
                model.world.node_back(0);
            }
        }
        let status = model.world.controller.status();
        assert!(cleaned > 0, "{layout:?}: some was moved");
        assert!(status.space.data_bytes < status.mapped_blocks * BLOCK * 3 / 4, "{layout:?}: {:?}", status.space);
    }
}

#[test]
fn what_packs_takes_less_and_the_accounts_tell_what() {
    let mut model = Model::new(9, 3, Layout::Mirror { copies: 2 });
    let whole: Vec<u8> = (0..BLOCKS as u32).flat_map(|i| [i.to_le_bytes(); BLOCK_BYTES / 4].concat()).collect();
    for at in (0..whole.len()).step_by(1 << 15) {
        let data = Buf::copy_from(&whole[at..at + (1 << 15)]);
        let write = model.world.request(BlockOp::Write { offset: at as u64, data });
        assert!(matches!(model.world.wait(write), BlockData::Done));
    }
    model.world.span(Duration::from_secs(30));
    model.bytes = whole;
    model.judge("packed");
    let status = model.world.controller.status();
    assert_eq!(status.mapped_blocks, BLOCKS);
    assert!(status.space.data_bytes < BLOCKS * BLOCK / 20, "{:?}", status.space);
    assert!(model.world.nodes[0].put_bytes.0 < BLOCKS * BLOCK / 2, "{:?}", model.world.nodes[0].put_bytes);
}

/// Has all of it written in large pieces, which become segments directly, and in small ones: blocks that any codec makes
/// smaller, and letters.
fn write_raw(model: &mut Model) {
    let pieces = (0..512).step_by(256).map(|at| (at, 256)).chain((512..BLOCKS).step_by(8).map(|at| (at, 8)));
    for (at, blocks) in pieces {
        let mut data = vec![0; (blocks * BLOCK) as usize];
        model.prng.fill(&mut data);
        for (n, block) in data.chunks_mut(BLOCK_BYTES).enumerate() {
            block[1000..].fill(7);
            if n % 2 == 0 {
                model.prng.fill(block);
                into_letters(block);
            }
        }
        model.write_data(at, data);
    }
    model.world.span(Duration::from_secs(30));
}

fn data_bytes(model: &Model) -> u64 {
    model.world.controller.status().space.data_bytes
}

fn cleaned_bytes(model: &Model) -> u64 {
    model.world.controller.status().counters.cleaned_bytes
}

#[test]
fn what_was_written_as_it_is_becomes_smaller_while_guests_rest() {
    for (seed, nodes, layout, is_sealed) in layouts_plain_and_sealed() {
        let mut model = Model::of(50 + seed, nodes, layout, is_sealed);
        let set = |model: &mut Model, compression| {
            model.world.push(Event::SetCompression { compression });
            model.world.span(Duration::from_secs(1));
            assert_eq!(model.world.controller.compression(), compression);
        };
        set(&mut model, Compression::Off);
        write_raw(&mut model);
        assert_eq!(data_bytes(&model), BLOCKS * BLOCK, "{layout:?}: nothing is packed");
        set(&mut model, Compression::Lz4);
        model.world.span(Duration::from_secs(120));
        let by_lz4 = data_bytes(&model);
        assert!(by_lz4 < BLOCKS * BLOCK * 3 / 4, "{layout:?}: {by_lz4} bytes");
        model.judge("packed by lz4");
        set(&mut model, Compression::Auto);
        model.world.span(Duration::from_secs(120));
        let by_zstd = data_bytes(&model);
        assert!(by_zstd < by_lz4, "{layout:?}: {by_zstd} bytes after {by_lz4}");
        model.judge("packed by zstd");
        // What was tried is left alone, also by those who come later.
        let cleaned = cleaned_bytes(&model);
        model.world.span(Duration::from_secs(300));
        assert_eq!(cleaned_bytes(&model), cleaned, "{layout:?}");
        model.world.open();
        model.world.span(Duration::from_secs(300));
        assert_eq!((cleaned_bytes(&model), data_bytes(&model)), (0, by_zstd), "{layout:?}");
        model.judge("after an owner that crashed");
    }
}

#[test]
fn nothing_is_packed_while_a_node_of_an_older_release_is_there() {
    let mut model = Model::new(62, 3, Layout::Mirror { copies: 2 });
    let greet = |model: &mut Model, version| {
        let (node, devices) = (model.world.nodes[2].id, vec![model.world.nodes[2].stat()]);
        model.world.push(Event::NodeDown { node });
        model.world.push(Event::NodeUp { node, boot: InstanceId(1), version, devices });
        model.world.drain();
    };
    greet(&mut model, PACKED_SINCE - 1);
    write_raw(&mut model);
    assert_eq!(data_bytes(&model), BLOCKS * BLOCK);
    greet(&mut model, PACKED_SINCE);
    model.world.span(Duration::from_secs(120));
    assert!(data_bytes(&model) < BLOCKS * BLOCK * 3 / 4, "what was written meanwhile follows");
    model.judge("after the node was brought to this release");
}

#[test]
fn what_nothing_makes_smaller_is_read_once_and_stays_where_it_is() {
    let mut model = Model::new(60, 3, Layout::Mirror { copies: 2 });
    for at in (0..BLOCKS).step_by(256) {
        let mut data = vec![0; (256 * BLOCK) as usize];
        model.prng.fill(&mut data);
        model.write_data(at, data);
    }
    model.world.span(Duration::from_secs(5));
    model.world.span(Duration::from_secs(120));
    let counters = model.world.controller.status().counters;
    assert_eq!(counters.cleaned_bytes, 0, "no data is moved");
    assert_eq!(data_bytes(&model), BLOCKS * BLOCK);
    model.judge("as it was");
}

#[test]
fn snapshots_keep_what_they_show() {
    let mut model = Model::new(4, 4, Layout::Parity { data: 2, parity: 1 });
    model.write_some(100);
    model.world.span(Duration::from_secs(10));
    let taken = Change::Snapshot { head: HeadId::VOLUME, name: "a".to_string(), created_ms: 0 };
    let Ok(Some(snapshot)) = model.world.change(taken) else { panic!("no snapshot is taken") };
    let before = model.bytes.clone();
    for _ in 0..4 {
        model.write_some(100);
        model.world.span(Duration::from_secs(20));
    }
    model.world.open();
    model.judge("after an owner that crashed");
    for at in (0..BLOCKS).step_by(64) {
        let found = model.world.read_of(snapshot, at * BLOCK, 64 * BLOCK);
        assert!(found == before[(at * BLOCK) as usize..][..(64 * BLOCK) as usize], "block {at} of the snapshot");
    }
}

#[test]
fn damage_in_packed_segments_is_read_around_and_made_good() {
    [false, true].into_iter().for_each(damage_is_read_around);
}

fn damage_is_read_around(is_sealed: bool) {
    let mut model = Model::of(5, 3, Layout::Parity { data: 2, parity: 1 }, is_sealed);
    model.write_some(200);
    model.world.span(Duration::from_secs(30));
    model.world.nodes[0].shards.alter_data(|_, data| flip_blocks(data, 3));
    model.judge("with damage on a node");
    assert!(model.world.controller.status().counters.checksum_errors > 0);
    model.world.span(Duration::from_secs(60));
    assert!(model.world.controller.status().counters.shards_rebuilt > 0);
    // Nobody checks for this guest; what is packed is checked all the same, since nothing else tells what it gives.
    model.world.push(Event::CheckReads(false));
    model.world.nodes[1].shards.alter_data(|_, data| flip_blocks(data, 1));
    let at = (0..BLOCKS)
        .find(|at| model.bytes[(at * BLOCK) as usize..][..BLOCK_BYTES].iter().filter(|b| **b == 0).count() > 3000);
    let at = at.expect("some block packs well");
    assert!(model.world.read(at * BLOCK, BLOCK) == model.bytes[(at * BLOCK) as usize..][..BLOCK_BYTES]);
}

#[test]
fn blocks_of_units_are_put_together_where_no_run_of_them_can_be_had() {
    for is_sealed in [false, true] {
        let mut model = Model::of(8, 3, Layout::Parity { data: 2, parity: 1 }, is_sealed);
        model.write_some(200);
        model.world.span(Duration::from_secs(30));
        // Of each stored block two shards are sound, of no two neighbours the same two.
        for node in 0..2 {
            let flip = |data: &mut [u8]| flip_blocks(&mut data[node * BLOCK_BYTES..], 2);
            model.world.nodes[node].shards.alter_data(|_, data| flip(data));
        }
        model.judge("with damage in two places");
        assert!(model.world.controller.status().counters.checksum_errors > 0);
    }
}

#[test]
fn a_worker_that_is_held_up_delays_nobody_and_what_it_does_too_late_is_nothing() {
    let mut model = Model::new(6, 3, Layout::Mirror { copies: 2 });
    model.world.packed = Some(Vec::new());
    model.write_some(100);
    model.world.span(Duration::from_secs(10));
    let status = model.world.controller.status();
    assert!(status.log_bytes < 4096, "all has left the log: {status:?}");
    assert_eq!(status.space.data_bytes, status.mapped_blocks * BLOCK, "as it was");
    let late = model.world.packed.replace(Vec::new()).expect("it was held up");
    assert!(!late.is_empty());
    late.into_iter().for_each(|event| model.world.push(event));
    model.world.drain();
    model.judge("after late answers");
}

#[test]
fn an_owner_that_serves_no_more_writes_nothing_that_was_packed_for_it() {
    let mut model = Model::new(7, 3, Layout::Mirror { copies: 2 });
    model.world.packed = Some(Vec::new());
    model.write_some(40);
    model.world.run_until(|world| world.packed.as_ref().is_some_and(|held| !held.is_empty()));
    let begun = |world: &World| world.controller.status().counters.segments_written;
    // Another has taken the volume over.
    for node in &mut model.world.nodes {
        node.promised = Epoch(node.promised.0 + 1);
    }
    let root = Root::decode(&model.world.root.1).unwrap();
    let taken = Root { epoch: Epoch(root.epoch.0 + 1), instance: InstanceId(77), ..root };
    model.world.root = (MetaVersion(model.world.root.0.0 + 1), taken.encode());
    let write = BlockOp::Write { offset: 0, data: Buf::copy_from(&[1; BLOCK_BYTES]) };
    model.world.request(write);
    model.world.run_until(|world| world.controller.state() == State::Deposed);
    let held = model.world.packed.take().expect("it was held up");
    let before = begun(&model.world);
    held.into_iter().for_each(|event| model.world.push(event));
    model.world.drain();
    assert_eq!(begun(&model.world), before);
}

fn set(model: &mut Model, compression: Compression) {
    model.world.push(Event::SetCompression { compression });
    model.world.span(Duration::from_secs(1));
    assert_eq!(model.world.controller.compression(), compression);
}

/// How long nothing is going to be looked at.
fn rests_for(model: &Model) -> Duration {
    model.world.controller.next_deadline().expect("it is open").since(model.world.now)
}

#[test]
fn a_volume_that_is_packed_no_more_comes_to_rest() {
    let mut model = Model::new(70, 3, Layout::Mirror { copies: 2 });
    set(&mut model, Compression::Off);
    write_raw(&mut model);
    model.world.span(Duration::from_secs(60));
    assert!(rests_for(&model) > Duration::from_secs(1), "before");
    // In the midst of a walk over the table.
    model.world.packed = Some(Vec::new());
    set(&mut model, Compression::Lz4);
    model.world.span(Duration::from_secs(1));
    set(&mut model, Compression::Off);
    let held = model.world.packed.take().expect("it was held up");
    assert!(!held.is_empty());
    held.into_iter().for_each(|event| model.world.push(event));
    model.world.span(Duration::from_secs(60));
    assert!(model.world.controller.status().counters.repacked_bytes > 0);
    assert!(rests_for(&model) > Duration::from_secs(1), "it has ended");
}

#[test]
fn what_is_written_again_and_again_is_not_packed_in_every_pause() {
    let mut model = Model::new(72, 3, Layout::Mirror { copies: 2 });
    model.world.span(Duration::from_secs(30));
    const ROUNDS: u64 = 40;
    for _ in 0..ROUNDS {
        for at in (0..512).step_by(256) {
            let mut data = vec![7; (256 * BLOCK) as usize];
            data.chunks_mut(BLOCK_BYTES).for_each(|block| model.prng.fill(&mut block[..1000]));
            model.write_data(at, data);
        }
        model.world.span(Duration::from_secs(3));
    }
    let written = ROUNDS * 512 * BLOCK;
    let repacked = model.world.controller.status().counters.repacked_bytes;
    assert!(repacked < written / 4, "{repacked} bytes of {written} were packed later");
    model.world.span(Duration::from_secs(120));
    assert!(data_bytes(&model) < 512 * BLOCK / 2, "{} bytes", data_bytes(&model));
    model.judge("packed");
}

/// Of segments of two rows, all of it raw.
fn of_small_segments(seed: u64) -> Model {
    let mut model = Model::new(seed, 3, Layout::Mirror { copies: 2 });
    let small = |c: Config| Config { segment_payload_bytes: 128 << 10, direct_bytes_min: 64 << 10, ..c };
    model.world.config = model.world.config.take().map(small);
    model.world.open();
    set(&mut model, Compression::Off);
    write_raw(&mut model);
    model
}

#[test]
fn where_there_is_no_room_packing_leaves_the_grid_alone() {
    let mut model = of_small_segments(74);
    // Nodes say that they have room, and refuse every shard of data.
    model.world.nodes.iter_mut().for_each(|node| node.refuse_above = 20 << 10);
    let before = model.world.controller.status().counters.shard_reads;
    set(&mut model, Compression::Auto);
    model.world.span(Duration::from_secs(120));
    let read = model.world.controller.status().counters.shard_reads - before;
    assert!((1..60).contains(&read), "{read} reads");
    model.world.nodes.iter_mut().for_each(|node| node.refuse_above = usize::MAX);
    model.world.span(Duration::from_secs(120));
    assert!(data_bytes(&model) < BLOCKS * BLOCK * 3 / 4);
    model.judge("packed");
}

#[test]
fn nothing_is_packed_later_while_it_would_be_written_in_a_narrower_layout() {
    let mut model = Model::new(78, 3, Layout::Parity { data: 2, parity: 1 });
    set(&mut model, Compression::Off);
    write_raw(&mut model);
    model.world.node_down(2);
    model.world.span(Duration::from_secs(30));
    set(&mut model, Compression::Lz4);
    model.world.span(Duration::from_secs(60));
    assert_eq!(model.world.controller.status().counters.repacked_bytes, 0);
    model.world.node_back(2);
    model.world.span(Duration::from_secs(120));
    assert!(data_bytes(&model) < BLOCKS * BLOCK * 3 / 4, "{} bytes", data_bytes(&model));
    model.judge("packed");
}
