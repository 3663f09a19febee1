//! Reading in order what was written at random: neighbours come together, and what is read is what is there now, whatever
//! was read ahead.

use crate::support::*;
use holdfast_base::{BLOCK_BYTES, BlockData, BlockOp, Buf, ByteRange, HeadId, Prng};
use holdfast_cipher::{Secret, VolumeKey};
use holdfast_format::geometry::Layout;
use holdfast_volume::{Change, Config, Counters, Target};
use std::time::Duration;

const BLOCK: u64 = BLOCK_BYTES as u64;
const SIZE: u64 = 8 << 20;
const READ: u64 = 64 << 10;

/// A volume that was written block after block in random order, and what is in it.
struct Scattered {
    world: World,
    model: Vec<u8>,
    prng: Prng,
}

impl Scattered {
    fn new(seed: u64, read_ahead_bytes_max: u64, key: Option<VolumeKey>) -> Scattered {
        let mut world = World::new(seed, 4, Layout::DEFAULT, SIZE);
        if let Some(key) = &key {
            world.encrypt(key);
        }
        let map_cache_bytes_max = 1 << 20;
        let (read_ahead_after_blocks, writeback_bytes_max) = (32, 8 << 20);
        world.config = Some(Config {
            key,
            read_ahead_bytes_max,
            read_ahead_after_blocks,
            map_cache_bytes_max,
            writeback_bytes_max,
            ..config(seed, 1)
        });
        world.open();
        let mut scattered = Scattered { world, model: vec![0; SIZE as usize], prng: Prng::new(seed ^ 0x5ca7) };
        let mut order: Vec<u64> = (0..SIZE / BLOCK).collect();
        scattered.prng.shuffle(&mut order);
        for block in order {
            scattered.write(block * BLOCK, BLOCK);
        }
        scattered.world.settle(Duration::from_secs(30));
        scattered
    }

    fn write(&mut self, offset: u64, len: u64) {
        let mut data = vec![0; len as usize];
        self.prng.fill(&mut data);
        self.model[offset as usize..(offset + len) as usize].copy_from_slice(&data);
        let token = self.world.request(BlockOp::Write { offset, data: Buf::copy_from(&data) });
        self.wait_all(&[token]);
    }

    fn wait_all(&mut self, tokens: &[u64]) {
        let patience = self.world.now + Duration::from_secs(600);
        while !tokens.iter().all(|token| self.world.replies.contains_key(token)) {
            assert!(self.world.now < patience, "a request is never answered: {}", self.world.controller.dump());
            let next = self.world.next_at();
            self.world.step_to(next);
        }
    }

    /// Reads so many pieces of 64 KiB from `offset` on, all at once, and compares them with the model.
    fn read(&mut self, of: Target, offset: u64, count: u64) {
        let places: Vec<u64> = (0..count).map(|i| offset + i * READ).filter(|at| at + READ <= SIZE).collect();
        let ask = |at: &u64| self.world.request_to(of, BlockOp::Read(ByteRange::new(*at, READ)));
        let tokens: Vec<u64> = places.iter().map(ask).collect();
        self.wait_all(&tokens);
        for (at, token) in places.iter().zip(tokens) {
            let Some(Ok(BlockData::Data(parts))) = self.world.replies.remove(&token) else { panic!("no data at {at}") };
            let whole = holdfast_base::buf::concat(&parts);
            assert!(whole[..] == self.model[*at as usize..(*at + READ) as usize], "what is read at {at} differs");
        }
    }

    fn read_all(&mut self, of: Target, at_once: u64) {
        for at in (0..SIZE).step_by((at_once * READ) as usize) {
            self.read(of, at, at_once);
        }
    }

    /// Flips a bit in each so-many-th block of the data that a node holds.
    fn damage(&mut self, node: usize, every: usize) {
        self.world.nodes[node].shards.alter_data(|_, data| flip_blocks(data, every));
    }

    fn counters(&self) -> Counters {
        self.world.controller.status().counters
    }
}

#[test]
fn neighbours_are_read_together() {
    let runs_of = |read_ahead_bytes_max: u64, at_once: u64| {
        let mut scattered = Scattered::new(1, read_ahead_bytes_max, None);
        let before = scattered.counters();
        scattered.read_all(Target::VOLUME, at_once);
        let after = scattered.counters();
        (after.shard_reads - before.shard_reads, after.ahead_bytes - before.ahead_bytes)
    };
    for at_once in [1, 4] {
        let (apart, nothing) = runs_of(0, at_once);
        let (together, ahead) = runs_of(4 << 20, at_once);
        assert_eq!(nothing, 0);
        assert!(together * 2 < apart, "{together} reads of shards instead of {apart}");
        assert!(ahead > SIZE / 2, "{ahead} of {SIZE} bytes");
    }
}

#[test]
fn reads_at_random_are_not_taken_for_streams() {
    let mut scattered = Scattered::new(2, 4 << 20, None);
    for _ in 0..2000 {
        let at = scattered.prng.below(SIZE / BLOCK - 1) * BLOCK;
        let whole = scattered.world.read(at, 2 * BLOCK);
        assert!(whole == scattered.model[at as usize..(at + 2 * BLOCK) as usize]);
    }
    // By chance a few follow each other.
    let counters = scattered.counters();
    assert!(counters.ahead_bytes * 20 < counters.read_bytes, "{counters:?}");
}

#[test]
fn what_is_overwritten_before_it_is_read_is_read_as_it_is_then() {
    for seed in 10..22 {
        let mut scattered = Scattered::new(seed, 256 << 10 << (seed % 5), None);
        scattered.world.slow = (seed % 2 == 0).then(|| Prng::new(seed));
        let at_once = 1 + seed % 4;
        for at in (0..SIZE).step_by((at_once * READ) as usize) {
            scattered.read(Target::VOLUME, at, at_once);
            let len = scattered.prng.between(1, 8) * BLOCK;
            // Mostly a little before what is read next.
            let near = if scattered.prng.chance(800) { (1 << 20).min(SIZE - at) } else { SIZE - at };
            let offset = at + scattered.prng.below((near / BLOCK).max(1)) * BLOCK;
            if offset + len <= SIZE {
                scattered.write(offset, len);
            }
            if scattered.prng.chance(100) {
                scattered.world.end_slow();
                // Segments are cleaned, and freed, meanwhile.
                scattered.world.settle(Duration::from_millis(1500));
                scattered.world.slow = (seed % 2 == 0).then(|| Prng::new(at));
            }
        }
        assert!(scattered.counters().ahead_bytes > 0, "seed {seed}");
    }
}

/// What still comes for a client that has begun to jump is not kept for it: it would keep its room for ever.
#[test]
fn clients_that_stop_reading_in_order_leave_nothing_behind() {
    let mut scattered = Scattered::new(25, 512 << 10, None);
    for turn in 0..16 {
        scattered.world.slow = Some(Prng::new(turn));
        let from = turn % 8 * 192 * BLOCK;
        scattered.read(Target::VOLUME, from, 8);
        let jump = |i: u64| BlockOp::Read(ByteRange::new(from + 8 * READ + i * 6 * BLOCK, BLOCK));
        let tokens: Vec<u64> = (0..60).map(|i| scattered.world.request(jump(i))).collect();
        scattered.wait_all(&tokens);
        scattered.world.end_slow();
        // Nobody reads for a while, and afterwards all lies elsewhere.
        scattered.world.settle(Duration::from_secs(3));
        for block in 0..SIZE / BLOCK {
            scattered.write((block * 997 + turn) % (SIZE / BLOCK) * BLOCK, BLOCK);
        }
        scattered.world.settle(Duration::from_secs(10));
    }
    let before = scattered.counters().ahead_bytes;
    scattered.read_all(Target::VOLUME, 2);
    let ahead = scattered.counters().ahead_bytes - before;
    assert!(ahead > SIZE / 3, "{ahead} of {SIZE} bytes came ahead");
}

#[test]
fn snapshots_and_streams_side_by_side() {
    let mut scattered = Scattered::new(30, 4 << 20, None);
    let taken = Change::Snapshot { head: HeadId::VOLUME, name: "s".to_string(), created_ms: 0 };
    let Ok(Some(snapshot)) = scattered.world.change(taken) else { panic!("no snapshot is taken") };
    for at in (0..SIZE / 2).step_by(READ as usize) {
        for (of, at) in [(Target::VOLUME, at), (snapshot, at), (Target::VOLUME, SIZE / 2 + at)] {
            scattered.read(of, at, 1);
        }
    }
    assert!(scattered.counters().ahead_bytes > SIZE / 2);
}

#[test]
fn nodes_that_go_away_meanwhile() {
    for seed in 40..46 {
        let mut scattered = Scattered::new(seed, 2 << 20, None);
        for at in (0..SIZE).step_by(4 * READ as usize) {
            let token = scattered.world.request(BlockOp::Read(ByteRange::new(at, READ)));
            let node = scattered.prng.below(4) as usize;
            if scattered.prng.chance(500) {
                scattered.world.node_hangs(node)
            } else {
                scattered.world.node_down(node)
            }
            scattered.read(Target::VOLUME, at, 4);
            scattered.wait_all(&[token]);
            scattered.world.node_back(node);
        }
        assert!(scattered.counters().ahead_bytes > 0, "seed {seed}");
    }
}

#[test]
fn damage_in_what_is_read_ahead_is_read_around_and_repaired() {
    let mut scattered = Scattered::new(50, 4 << 20, None);
    scattered.damage(1, 3);
    scattered.read_all(Target::VOLUME, 2);
    let counters = scattered.counters();
    assert!(counters.ahead_bytes > 0 && counters.checksum_errors > 0, "{counters:?}");
    scattered.world.settle(Duration::from_secs(60));
    assert!(scattered.counters().shards_rebuilt > 0);
    let errors = scattered.counters().checksum_errors;
    scattered.read_all(Target::VOLUME, 2);
    assert_eq!(scattered.counters().checksum_errors, errors, "the damaged shards were made again");
}

/// Where too little is left of some blocks, those beside them are there.
#[test]
fn what_is_lost_beside_a_block_does_not_keep_it() {
    let answered = |read_ahead_bytes_max: u64| {
        let mut scattered = Scattered::new(51, read_ahead_bytes_max, None);
        scattered.world.node_down(0);
        scattered.damage(1, 13);
        let ask = |block| scattered.world.request(BlockOp::Read(ByteRange::new(block * BLOCK, BLOCK)));
        let tokens: Vec<u64> = (0..SIZE / BLOCK).map(ask).collect();
        scattered.world.settle(Duration::from_secs(20));
        let answered = |token: &&u64| scattered.world.replies.contains_key(token);
        (tokens.iter().filter(answered).count(), scattered.counters().ahead_bytes)
    };
    let ((alone, nothing), (together, ahead)) = (answered(0), answered(4 << 20));
    assert!(nothing == 0 && ahead > 0, "{ahead}");
    assert!(alone < (SIZE / BLOCK) as usize && together >= alone, "{alone}, {together}");
}

#[test]
fn encrypted_volumes() {
    let mut scattered = Scattered::new(60, 4 << 20, Some(VolumeKey::new(&Secret::new([7; 32]))));
    scattered.read_all(Target::VOLUME, 3);
    assert!(scattered.counters().ahead_bytes > SIZE / 2);
}
