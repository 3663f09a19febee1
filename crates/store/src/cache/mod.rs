//! The read cache: what is read again and again from slower devices of a node is kept on a device of its fastest class.
//!
//! Role: the node ([`crate::node`], [`drive`]) asks [`ReadCache::find`] before it passes a read on to a slower device, offers
//! what such a device has read and verified ([`Fresh`]), and passes on completions of reads and writes of the cache's own. The
//! cache does no I/O and knows no device: it names blocks of the one that lends it space, its *home*.
//!
//! What it keeps is volatile. Its index is in memory alone; space is lent by the home's allocator and taken back whenever
//! shards need it; after a restart nothing is left of it.
//!
//! Admission: a read is worth a copy if all of its blocks that are not held were read before, lately ([`ghost`]). So one scan,
//! however long, admits nothing.
//!
//! Invariants:
//! 1. What a hit is answered with matches the checksums that the shard carries. Whatever else comes of a read of the cache
//!    (damage, an error, a line that is in other use by now), the read then goes to the shard's own device.
//! 2. Nothing is held of a shard that its device does not hold.
//! 3. Space with a write under way is not given back before that has ended.
//!
//! Limits: [`READS_MAX`] hits and [`WRITES_MAX`] writes under way; [`READ_BLOCKS_MAX`] a read; memory and space as configured.

mod drive;
mod ghost;
mod lines;

use crate::api::{DeviceSlot, DiskError, NodeConfig};
use crate::io::Client;
use ghost::Ghost;
use holdfast_base::{BLOCK_BYTES, BlockCrc, Buf, ShardId, Slab, Token, VolumeId};
use holdfast_format::disk::blocks_match;
use holdfast_format::wire::CacheStat;
pub(crate) use lines::ShardAt;
use lines::{LINE_BLOCKS, LINE_STATE_BYTES, Lines};
use std::collections::BTreeSet;

/// Hits under way: with more, reads go to their own devices.
const READS_MAX: usize = 4096;

/// Writes of the cache under way: so few that they don't stand in front of the home's own work.
const WRITES_MAX: usize = 32;

/// Longer reads pass the cache by: a slow device is good at these.
pub(crate) const READ_BLOCKS_MAX: u32 = 64;

/// Blocks that are lent at a time, where the cache is large.
const CHUNK_BLOCKS_MAX: u32 = 256;

/// Where it is small, it has so many chunks.
const CHUNKS_MIN: u64 = 16;

/// A read of a shard's blocks, as a client asked for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Asked {
    pub client: Client,
    pub slot: DeviceSlot,
    pub shard: ShardId,
    pub block: u32,
    pub blocks: u32,
    pub checked: bool,
}

impl Asked {
    fn at(&self) -> ShardAt {
        ShardAt { slot: self.slot, shard: self.shard }
    }
}

/// Blocks of a shard that its device has read and verified for the cache.
#[derive(Debug)]
pub(crate) struct Fresh {
    pub at: ShardAt,
    pub block: u32,
    pub crcs: Vec<BlockCrc>,
    pub bytes: Buf,
}

/// Where a read is best answered from.
#[derive(Debug)]
pub(crate) enum Found {
    Hit {
        ticket: Token,
        reads: Vec<CachedRead>,
    },
    /// `wanted`: what the device reads is to be offered.
    Miss {
        wanted: bool,
    },
}

/// Blocks of the home's data area to be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct CachedRead {
    pub part: u8,
    pub first: u64,
    pub blocks: u32,
}

/// Blocks of the home's data area to be written; not durably.
#[derive(Debug)]
pub(crate) struct CachedWrite {
    pub ticket: Token,
    pub first: u64,
    pub bytes: Buf,
}

/// What came of a hit.
#[derive(Debug)]
pub(crate) enum Outcome {
    Answer(Asked, Vec<Buf>),
    /// The shard's own device has to be asked.
    Fallback(Asked),
}

/// A part of a run that lies in one line.
#[derive(Clone, Copy)]
struct Span {
    /// Of the line in the shard.
    number: u32,
    /// The first block in the line, and how many.
    from: u32,
    count: u32,
}

impl Span {
    fn mask(&self) -> u8 {
        (((1_u32 << self.count) - 1) << self.from) as u8
    }
}

/// The lines that a run of a shard's blocks lies in.
fn spans(block: u32, blocks: u32) -> impl Iterator<Item = Span> {
    let end = block + blocks;
    (block / LINE_BLOCKS..=(end - 1) / LINE_BLOCKS).map(move |number| {
        let first = number * LINE_BLOCKS;
        let from = block.max(first) - first;
        Span { number, from, count: end.min(first + LINE_BLOCKS) - first - from }
    })
}

fn hash(at: ShardAt, number: u32) -> u64 {
    let (segment, volume) = (at.shard.segment, at.shard.segment.volume.0);
    let place = (at.slot.0 as u64) << 40 | u64::from(at.shard.index) << 32 | u64::from(number);
    let words = [volume as u64, (volume >> 64) as u64, segment.epoch.0, segment.counter, place];
    words.iter().fold(0x243f_6a88_85a3_08d3, |h: u64, word| {
        let h = (h ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        h ^ h >> 29
    })
}

struct Part {
    place: u32,
    generation: u32,
    from: u32,
    bytes: Buf,
}

struct Hit {
    asked: Asked,
    parts: Vec<Part>,
    waiting: usize,
    failed: bool,
}

struct Writing {
    place: u32,
    generation: u32,
    /// Blocks of the line.
    written: Vec<(u32, BlockCrc)>,
}

/// The device that lends space.
struct Home {
    slot: DeviceSlot,
    chunks_max: usize,
    /// It is to be the home no longer: nothing new begins, and what is lent goes back.
    closing: bool,
}

pub(crate) struct ReadCache {
    share_per_mille: u32,
    state_bytes_max: u64,
    unverified: bool,
    forgetful: bool,
    home: Option<Home>,
    lines: Lines,
    ghost: Ghost,
    hits: Slab<Hit>,
    writes: Slab<Writing>,
    /// Homes that the cache could not write to: never again.
    broken: BTreeSet<DeviceSlot>,
    stat: CacheStat,
}

impl ReadCache {
    pub fn new(config: &NodeConfig) -> ReadCache {
        ReadCache {
            share_per_mille: config.read_cache_per_mille.min(1000),
            state_bytes_max: config.read_cache_state_bytes_max,
            unverified: config.mutations.cached_read_unverified(),
            forgetful: !config.mutations.deletion_keeps_cached(),
            home: None,
            lines: Lines::new(LINE_BLOCKS),
            ghost: Ghost::default(),
            hits: Slab::new(READS_MAX),
            writes: Slab::new(WRITES_MAX),
            broken: BTreeSet::new(),
            stat: CacheStat::default(),
        }
    }

    /// Whether there may be one at all.
    pub fn is_wanted(&self) -> bool {
        self.share_per_mille > 0
    }

    /// The device that lends space, or has lent some and does not have it back yet.
    pub fn home(&self) -> Option<DeviceSlot> {
        self.home.as_ref().map(|home| home.slot)
    }

    pub fn is_open(&self) -> bool {
        self.home.as_ref().is_some_and(|home| !home.closing)
    }

    pub fn may_lend(&self, slot: DeviceSlot) -> bool {
        !self.broken.contains(&slot)
    }

    /// From here on the device lends space, of so many blocks in all.
    pub fn begin(&mut self, slot: DeviceSlot, capacity_blocks: u64) {
        assert!(self.home.is_none() && self.hits.is_empty() && self.writes.is_empty(), "one home at a time");
        let by_memory = self.state_bytes_max / LINE_STATE_BYTES * u64::from(LINE_BLOCKS);
        let blocks = (capacity_blocks * u64::from(self.share_per_mille) / 1000).min(by_memory);
        let chunk_lines =
            (blocks / CHUNKS_MIN / u64::from(LINE_BLOCKS)).clamp(1, u64::from(CHUNK_BLOCKS_MAX / LINE_BLOCKS));
        let chunk_blocks = chunk_lines as u32 * LINE_BLOCKS;
        let chunks_max = (blocks / u64::from(chunk_blocks)) as usize;
        self.home = Some(Home { slot, chunks_max, closing: false });
        self.lines = Lines::new(chunk_blocks);
        self.ghost = Ghost::new((2 * chunks_max * chunk_lines as usize).max(1024));
        self.stat.limit_bytes = chunks_max as u64 * u64::from(chunk_blocks) * BLOCK_BYTES as u64;
    }

    /// Another device is to lend, or none: what is lent goes back as soon as may be ([`ReadCache::give_back`]).
    pub fn close(&mut self) {
        if let Some(home) = &mut self.home {
            home.closing = true;
        }
    }

    pub fn is_closing(&self) -> bool {
        self.home.as_ref().is_some_and(|home| home.closing)
    }

    /// The home is gone, or has everything back. Returns the reads that nobody will answer from here.
    pub fn end(&mut self) -> Vec<Asked> {
        self.home = None;
        self.stat = CacheStat { limit_bytes: 0, held_bytes: 0, ..self.stat() };
        self.lines = Lines::new(LINE_BLOCKS);
        self.ghost = Ghost::default();
        for token in self.writes.tokens() {
            self.writes.remove(token);
        }
        let hits = self.hits.tokens();
        hits.into_iter().filter_map(|token| self.hits.remove(token)).map(|hit| hit.asked).collect()
    }

    /// Everything is back, and nothing under way.
    pub fn is_empty(&self) -> bool {
        self.lines.chunk_count() == 0 && self.hits.is_empty() && self.writes.is_empty()
    }

    /// Where to read from; takes note of what is read.
    pub fn find(&mut self, asked: Asked) -> Found {
        if !self.is_open() || asked.blocks == 0 || asked.blocks > READ_BLOCKS_MAX {
            return Found::Miss { wanted: false };
        }
        let at = asked.at();
        let (mut parts, mut wanted) = (Vec::with_capacity(1), true);
        let mut is_held = true;
        for span in spans(asked.block, asked.blocks) {
            let place = self.lines.find(at, span.number);
            let missing = span.mask() & !place.map_or(0, |place| self.lines.get(place).valid);
            match place {
                Some(place) if missing == 0 => {
                    self.lines.touch(place);
                    parts.push((place, span));
                }
                _ => {
                    is_held = false;
                    wanted &= self.ghost.see(hash(at, span.number), missing) == missing;
                }
            }
        }
        if !is_held || self.hits.is_full() {
            self.stat.misses += 1;
            return Found::Miss { wanted: wanted && !is_held };
        }
        self.begin_hit(asked, &parts)
    }

    fn begin_hit(&mut self, asked: Asked, spans: &[(u32, Span)]) -> Found {
        let (mut parts, mut reads) = (Vec::with_capacity(spans.len()), Vec::with_capacity(spans.len()));
        for (part, (place, span)) in spans.iter().enumerate() {
            let generation = self.lines.get(*place).generation;
            parts.push(Part { place: *place, generation, from: span.from, bytes: Buf::default() });
            let first = self.lines.first_block(*place) + u64::from(span.from);
            reads.push(CachedRead { part: part as u8, first, blocks: span.count });
        }
        let ticket = self.hits.insert(Hit { asked, waiting: parts.len(), parts, failed: false });
        Found::Hit { ticket, reads }
    }

    /// The home can't take the reads of a hit now.
    pub fn cancel(&mut self, ticket: Token) {
        self.hits.remove(ticket);
        self.stat.misses += 1;
    }

    /// A part of a hit was read, or not. With the last of them, what came of it.
    pub fn on_read(&mut self, ticket: Token, part: u8, result: Result<Buf, DiskError>) -> Option<Outcome> {
        let hit = self.hits.get_mut(ticket)?;
        let Part { place, generation, from, bytes } = &mut hit.parts[usize::from(part)];
        hit.waiting -= 1;
        let is_same = self.lines.get(*place).generation == *generation;
        let matches = |bytes: &Buf| {
            let blocks = bytes.len() / BLOCK_BYTES;
            let crcs = &self.lines.get(*place).crcs[*from as usize..*from as usize + blocks];
            is_same && blocks_match(crcs, bytes) || self.unverified
        };
        match result {
            Ok(read) if matches(&read) => *bytes = read,
            _ => {
                hit.failed = true;
                if is_same {
                    self.stat.damaged += 1;
                    self.lines.drop(*place);
                }
            }
        }
        if hit.waiting > 0 {
            return None;
        }
        let hit = self.hits.remove(ticket).expect("just seen");
        if hit.failed {
            self.stat.misses += 1;
            return Some(Outcome::Fallback(hit.asked));
        }
        self.stat.hits += 1;
        Some(Outcome::Answer(hit.asked, hit.parts.into_iter().map(|part| part.bytes).collect()))
    }

    /// Takes what was read, as far as there is room. `lend` gives the first of so many blocks of the home, if it has them to
    /// spare.
    pub fn admit(&mut self, fresh: &Fresh, mut lend: impl FnMut(u64) -> Option<u64>) -> Vec<CachedWrite> {
        let mut writes = Vec::new();
        if !self.is_open() {
            return writes;
        }
        assert_eq!(fresh.crcs.len() * BLOCK_BYTES, fresh.bytes.len(), "a checksum a block");
        for span in spans(fresh.block, fresh.crcs.len() as u32) {
            if self.writes.is_full() {
                break;
            }
            let Some(place) = self.place_for(fresh.at, span.number, &mut lend) else { continue };
            let line = self.lines.get(place);
            let missing = span.mask() & !line.valid;
            if line.writing || missing == 0 {
                continue;
            }
            let (from, end) = (missing.trailing_zeros(), 8 - missing.leading_zeros());
            let first_in_run = (span.number * LINE_BLOCKS + from - fresh.block) as usize;
            let crcs = &fresh.crcs[first_in_run..first_in_run + (end - from) as usize];
            let written = (from..end).zip(crcs.iter().copied()).collect();
            let ticket = self.writes.insert(Writing { place, generation: line.generation, written });
            self.lines.begin_write(place);
            let bytes = fresh.bytes.slice(first_in_run * BLOCK_BYTES..(first_in_run + crcs.len()) * BLOCK_BYTES);
            self.stat.admitted_bytes += bytes.len() as u64;
            writes.push(CachedWrite { ticket, first: self.lines.first_block(place) + u64::from(from), bytes });
        }
        writes
    }

    fn place_for(&mut self, at: ShardAt, number: u32, lend: &mut impl FnMut(u64) -> Option<u64>) -> Option<u32> {
        if let Some(place) = self.lines.find(at, number) {
            return Some(place);
        }
        let chunks_max = self.home.as_ref().map_or(0, |home| home.chunks_max);
        if !self.lines.has_free()
            && self.lines.chunk_count() < chunks_max
            && let Some(first) = lend(self.lines.chunk_blocks())
        {
            self.lines.add_chunk(first);
        }
        self.lines.take(at, number)
    }

    /// A write of the cache is over.
    pub fn on_written(&mut self, ticket: Token, result: Result<Buf, DiskError>) {
        let Some(Writing { place, generation, written }) = self.writes.remove(ticket) else { return };
        let written = if result.is_ok() { &written[..] } else { &[] };
        self.lines.end_write(place, generation, written);
        if let (Err(_), Some(home)) = (result, &mut self.home) {
            home.closing = true;
            self.broken.insert(home.slot);
        }
    }

    /// A chunk that the home gets back: the first of its blocks. `None` where nothing is lent, or all of it is being written.
    pub fn give_back(&mut self) -> Option<u64> {
        self.lines.remove_chunk()
    }

    /// The shard is being deleted.
    pub fn forget(&mut self, at: ShardAt) {
        if self.forgetful {
            self.lines.forget(at);
        }
    }

    pub fn forget_volume(&mut self, slot: DeviceSlot, volume: VolumeId) {
        if self.forgetful {
            self.lines.forget_volume(slot, volume);
        }
    }

    /// Reads of these devices are cached, and of no others.
    pub fn retain(&mut self, slots: &BTreeSet<DeviceSlot>) {
        self.lines.retain(slots);
    }

    pub fn stat(&self) -> CacheStat {
        let block = BLOCK_BYTES as u64;
        let (held_bytes, evicted_bytes) =
            (self.lines.held_blocks * block, self.stat.evicted_bytes + self.lines.evicted_blocks * block);
        CacheStat { held_bytes, evicted_bytes, ..self.stat }
    }

    /// Shards of which something is held.
    pub fn shards(&self) -> impl Iterator<Item = ShardAt> {
        self.lines.shards()
    }

    /// Asserts what must hold between events.
    pub fn verify(&self) {
        self.lines.verify();
        assert!(self.home.is_some() || self.is_empty(), "without a home nothing is held");
    }
}

#[cfg(test)]
mod tests;
