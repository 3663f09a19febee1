use super::*;
use crate::api::PeerId;
use holdfast_base::{Epoch, GridId, InstanceId, NodeId, Prng, SegmentId, block_crcs};
use std::collections::BTreeMap;

const HOME: DeviceSlot = DeviceSlot(0);
const SLOW: DeviceSlot = DeviceSlot(1);
const BLOCK: usize = BLOCK_BYTES;

/// A cache, and the device that lends it space.
struct Bench {
    cache: ReadCache,
    /// Blocks of the home by number.
    media: BTreeMap<u64, Vec<u8>>,
    lent: BTreeMap<u64, u64>,
    next_first: u64,
    may_lend: bool,
    reads: u64,
}

fn shard(counter: u64) -> ShardId {
    let segment = SegmentId { volume: VolumeId(7), epoch: Epoch(1), counter };
    ShardId { segment, index: 0 }
}

fn asked(counter: u64, block: u32, blocks: u32) -> Asked {
    let client = Client { peer: PeerId::here(1), token: 1, whose: Default::default(), asked_at: None };
    Asked { client, slot: SLOW, shard: shard(counter), block, blocks, checked: true }
}

fn content(counter: u64, block: u32, blocks: u32) -> Vec<u8> {
    let mut bytes = vec![0; blocks as usize * BLOCK];
    for (i, chunk) in bytes.chunks_exact_mut(BLOCK).enumerate() {
        Prng::new((counter << 32) | (u64::from(block) + i as u64)).fill(chunk);
    }
    bytes
}

impl Bench {
    /// For so many lines, in chunks of a sixteenth of them.
    fn new(lines: u64) -> Bench {
        let mut config = NodeConfig::new(GridId(1), NodeId(1), InstanceId(1));
        config.read_cache_per_mille = 100;
        let mut cache = ReadCache::new(&config);
        cache.begin(HOME, lines * u64::from(LINE_BLOCKS) * 10);
        Bench { cache, media: BTreeMap::new(), lent: BTreeMap::new(), next_first: 0, may_lend: true, reads: 0 }
    }

    fn offer(&mut self, counter: u64, block: u32, blocks: u32) -> Vec<CachedWrite> {
        let bytes = content(counter, block, blocks);
        let at = ShardAt { slot: SLOW, shard: shard(counter) };
        let fresh = Fresh { at, block, crcs: block_crcs(&bytes), bytes: Buf::copy_from(&bytes) };
        let (lent, next, may_lend) = (&mut self.lent, &mut self.next_first, self.may_lend);
        self.cache.admit(&fresh, |blocks| {
            may_lend.then(|| {
                lent.insert(*next, blocks);
                *next += blocks;
                *next - blocks
            })
        })
    }

    fn write(&mut self, writes: Vec<CachedWrite>) {
        for write in writes {
            for (i, block) in write.bytes.chunks_exact(BLOCK).enumerate() {
                self.media.insert(write.first + i as u64, block.to_vec());
            }
            self.cache.on_written(write.ticket, Ok(Buf::empty()));
        }
    }

    /// As a node does it: from the cache, or from the device, which offers what is wanted. True for a hit.
    fn read(&mut self, counter: u64, block: u32, blocks: u32) -> bool {
        let is_hit = match self.cache.find(asked(counter, block, blocks)) {
            Found::Miss { wanted } => {
                if wanted {
                    let writes = self.offer(counter, block, blocks);
                    self.write(writes);
                }
                false
            }
            Found::Hit { ticket, reads } => {
                let mut outcome = None;
                for read in reads {
                    self.reads += 1;
                    let blocks = read.first..read.first + u64::from(read.blocks);
                    let bytes: Vec<u8> = blocks.flat_map(|block| self.media[&block].clone()).collect();
                    assert!(outcome.is_none(), "the last part tells");
                    outcome = self.cache.on_read(ticket, read.part, Ok(Buf::copy_from(&bytes)));
                }
                match outcome.expect("all parts are read") {
                    Outcome::Answer(_, payload) => {
                        assert_eq!(holdfast_base::buf::concat(&payload).to_vec(), content(counter, block, blocks));
                        true
                    }
                    Outcome::Fallback(asked) => {
                        assert_eq!((asked.block, asked.blocks), (block, blocks));
                        false
                    }
                }
            }
        };
        self.cache.verify();
        is_hit
    }

    /// Twice, so that it is held.
    fn warm(&mut self, counter: u64, block: u32, blocks: u32) {
        for _ in 0..2 {
            self.read(counter, block, blocks);
        }
    }

    fn give_back(&mut self) -> Option<u64> {
        let first = self.cache.give_back()?;
        Some(self.lent.remove(&first).expect("it was lent"))
    }
}

#[test]
fn what_is_read_twice_is_held_and_the_third_read_is_a_hit() {
    let mut bench = Bench::new(64);
    for (block, blocks) in [(0, 1), (5, 2), (6, 20), (30, 64)] {
        assert!(!bench.read(1, block, blocks), "first, or not all of it was read before");
        bench.read(1, block, blocks);
        assert!(bench.read(1, block, blocks), "{block}+{blocks}");
    }
    assert!(!bench.read(1, 100, READ_BLOCKS_MAX + 1) && !bench.read(1, 100, READ_BLOCKS_MAX + 1));
    assert!(!bench.read(1, 100, READ_BLOCKS_MAX + 1), "long reads pass it by");
    let stat = bench.cache.stat();
    assert_eq!((stat.hits, stat.damaged), (4, 0));
    assert_eq!(stat.held_bytes, stat.admitted_bytes, "nothing was evicted, nor written twice: {stat:?}");
}

#[test]
fn blocks_of_a_line_are_read_before_each_by_itself() {
    let mut bench = Bench::new(64);
    // A scan by small reads comes to each line many times, and to no block twice.
    (0..512).for_each(|block| assert!(!bench.read(1, block, 1)));
    assert_eq!(bench.cache.stat().admitted_bytes, 0);
}

#[test]
fn a_scan_of_twenty_times_its_size_leaves_the_hot_set() {
    for seed in 0..5 {
        let mut bench = Bench::new(256);
        let mut prng = Prng::new(seed);
        let hot: Vec<(u64, u32)> = (0..200).map(|_| (prng.below(50), prng.below(64) as u32 * LINE_BLOCKS)).collect();
        for _ in 0..2 {
            hot.iter().for_each(|(counter, block)| bench.warm(*counter, *block, 8));
        }
        let is_held = |bench: &mut Bench, at: &(u64, u32)| bench.read(at.0, at.1, 8);
        assert!(hot.iter().all(|at| is_held(&mut bench, at)), "the hot set fits");
        let scanned = 20 * 256;
        for line in 0..scanned {
            bench.read(1000 + line / 64, (line % 64) as u32 * LINE_BLOCKS, LINE_BLOCKS);
        }
        let left = hot.iter().filter(|at| is_held(&mut bench, at)).count();
        assert!(left * 10 >= hot.len() * 9, "{left} of {}", hot.len());
    }
}

#[test]
fn what_is_read_often_outlives_what_is_read_now_and_then() {
    let mut bench = Bench::new(64);
    let mut prng = Prng::new(3);
    let mut late = (0, 0);
    for round in 0..4000_u64 {
        let counter = prng.below(20);
        let is_hit = bench.read(counter, 0, 8);
        if round > 1000 {
            late = (late.0 + u64::from(is_hit), late.1 + 1);
        }
        // Many others, each read two or three times and never again.
        bench.read(100 + round / 3, 8, 8);
    }
    assert!(late.0 * 100 > late.1 * 85, "{late:?}");
    let stat = bench.cache.stat();
    assert!(stat.evicted_bytes > 0 && stat.held_bytes <= stat.limit_bytes, "{stat:?}");
    let lent: u64 = bench.lent.values().sum();
    assert!(lent * BLOCK as u64 <= stat.limit_bytes, "{lent} blocks");
}

#[test]
fn lent_space_goes_back_but_where_it_is_being_written() {
    let mut bench = Bench::new(64);
    for counter in 0..64 {
        bench.warm(counter, 0, 8);
    }
    assert_eq!(bench.lent.len(), 16);
    assert!((0..64).all(|counter| bench.read(counter, 0, 8)));
    assert!(bench.give_back().is_some());
    bench.may_lend = false;
    let hits = (0..64).filter(|counter| bench.read(*counter, 0, 8)).count();
    assert!((50..=60).contains(&hits), "{hits}");
    let writes = (0..100).map(|_| bench.offer(99, 0, 8)).find(|writes| !writes.is_empty());
    let writes = writes.expect("in the place of another, by and by");
    while bench.give_back().is_some() {}
    assert_eq!(bench.lent.len(), 1, "the one that is written to stays");
    bench.write(writes);
    assert!(bench.read(99, 0, 8));
    assert!(bench.give_back().is_some() && bench.lent.is_empty());
    assert!(!bench.read(99, 0, 8), "and nobody lends: nothing is admitted");
    assert_eq!(bench.cache.stat().held_bytes, 0);
}

#[test]
fn a_deleted_shard_is_forgotten_even_while_it_is_being_written() {
    let mut bench = Bench::new(64);
    for counter in 0..3 {
        bench.warm(counter, 4, 30);
        assert!(bench.read(counter, 4, 30));
    }
    bench.cache.forget(ShardAt { slot: SLOW, shard: shard(1) });
    assert!(bench.read(0, 4, 30) && bench.read(2, 4, 30));
    assert_eq!(bench.cache.shards().map(|at| at.shard).collect::<Vec<_>>(), [shard(0), shard(2)]);
    let writes = bench.offer(5, 0, 8);
    bench.cache.forget(ShardAt { slot: SLOW, shard: shard(5) });
    bench.cache.verify();
    bench.write(writes);
    assert_eq!(bench.cache.shards().count(), 2, "what was written for it counts for nothing");
    bench.cache.forget_volume(SLOW, VolumeId(8));
    assert_eq!(bench.cache.shards().count(), 2);
    bench.cache.forget_volume(SLOW, VolumeId(7));
    assert_eq!((bench.cache.shards().count(), bench.cache.stat().held_bytes), (0, 0));
    bench.cache.verify();
}

#[test]
fn a_damaged_or_unreadable_line_is_a_miss_and_is_forgotten() {
    let mut bench = Bench::new(64);
    bench.warm(1, 0, 16);
    assert!(bench.read(1, 0, 16));
    bench.media.values_mut().nth(9).unwrap()[77] ^= 4;
    assert!(!bench.read(1, 0, 16), "the second line is damaged");
    assert!(bench.read(1, 0, 8), "the first is not");
    let Found::Hit { ticket, reads } = bench.cache.find(asked(1, 0, 8)) else { panic!("held") };
    let outcome = bench.cache.on_read(ticket, reads[0].part, Err(DiskError::Io));
    assert!(matches!(outcome, Some(Outcome::Fallback(_))));
    assert!(!bench.read(1, 0, 8));
    assert_eq!(bench.cache.stat().damaged, 2);
}

#[test]
fn a_line_that_is_reused_while_it_is_read_is_a_miss() {
    let mut bench = Bench::new(16);
    bench.warm(1, 0, 8);
    let Found::Hit { ticket, reads } = bench.cache.find(asked(1, 0, 8)) else { panic!("held") };
    while bench.give_back().is_some() {}
    let bytes = Buf::copy_from(&content(1, 0, 8));
    let outcome = bench.cache.on_read(ticket, reads[0].part, Ok(bytes));
    assert!(matches!(outcome, Some(Outcome::Fallback(_))), "even if the bytes are there still");
    assert_eq!(bench.cache.stat().damaged, 0, "that is no damage");
}

#[test]
fn a_home_that_can_not_be_written_is_left_for_good() {
    let mut bench = Bench::new(64);
    bench.warm(1, 0, 8);
    let writes = bench.offer(2, 0, 8);
    bench.cache.on_written(writes[0].ticket, Err(DiskError::Io));
    assert!(bench.cache.is_closing() && !bench.cache.may_lend(HOME));
    assert!(!bench.read(1, 0, 8), "nothing is read there any more");
    while bench.give_back().is_some() {}
    assert!(bench.cache.is_empty() && bench.cache.end().is_empty());
}

#[test]
fn its_state_is_bounded() {
    let mut config = NodeConfig::new(GridId(1), NodeId(1), InstanceId(1));
    config.read_cache_state_bytes_max = 1000 * LINE_STATE_BYTES;
    let mut cache = ReadCache::new(&config);
    cache.begin(HOME, 1 << 30);
    let limit = cache.stat().limit_bytes;
    assert!(limit <= 1000 * u64::from(LINE_BLOCKS) * BLOCK as u64 && limit > 0, "{limit}");
}
