//! The lines of a cache: which run of which shard each holds, with its checksums, and which goes next.
//!
//! A line is [`LINE_BLOCKS`] blocks of a shard, of which any may be held. Lines lie in chunks, which the device lends and
//! takes back whole. The clock goes round: a line that was used since is passed over, up to three times for one that was used
//! often.
//!
//! Invariants:
//! 1. The index names every line that holds something, and no other.
//! 2. A line that is being written is in nobody else's use until that write has ended, whatever becomes of what it was for.
//!
//! Limits: [`LINE_STATE_BYTES`] of memory a line, whatever is cached; [`STEPS_MAX`] a look for a line.

use super::ghost;
use crate::api::DeviceSlot;
use holdfast_base::{BlockCrc, Epoch, SegmentId, ShardId, VolumeId};
use std::collections::{BTreeMap, BTreeSet};

/// Small enough that a read of a few blocks holds few that nobody asked for, large enough that its state is small against it.
pub(super) const LINE_BLOCKS: u32 = 8;

/// At most, with its share of the index, of the names of shards (one a line, where each is of another shard) and of the ghost.
pub(super) const LINE_STATE_BYTES: u64 = 240 + 2 * ghost::PLACE_BYTES;

/// Lines that the clock looks at for one that may go; where it finds none, nothing is admitted this time. So few that what is
/// used keeps its line while more is read again and again than the cache has room for.
const STEPS_MAX: usize = 8;

/// The clock passes a line over so often.
const USES_MAX: u8 = 3;

const NOBODY: u32 = u32::MAX;

/// A shard on a device of the node.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct ShardAt {
    pub slot: DeviceSlot,
    pub shard: ShardId,
}

/// A shard of which something is held.
struct Name {
    at: ShardAt,
    lines: u32,
}

pub(super) struct Line {
    /// Place in `names`.
    name: u32,
    /// Of the line in its shard.
    number: u32,
    /// Of its present use.
    pub generation: u32,
    /// Blocks that are held, a bit each.
    pub valid: u8,
    uses: u8,
    pub writing: bool,
    pub crcs: [BlockCrc; LINE_BLOCKS as usize],
}

const EMPTY: Line =
    Line { name: NOBODY, number: 0, generation: 0, valid: 0, uses: 0, writing: false, crcs: [0; LINE_BLOCKS as usize] };

pub(super) struct Lines {
    chunk_lines: u32,
    /// First blocks on the device, by chunk.
    chunks: Vec<Option<u64>>,
    spare_chunks: Vec<u32>,
    lines: Vec<Line>,
    /// Lines for anybody.
    free: BTreeSet<u32>,
    /// By name and number.
    index: BTreeMap<(u32, u32), u32>,
    names: Vec<Option<Name>>,
    spare_names: Vec<u32>,
    by_shard: BTreeMap<ShardAt, u32>,
    hand: usize,
    /// The next chunk to go, if one has to.
    chunk_hand: usize,
    pub held_blocks: u64,
    pub evicted_blocks: u64,
}

impl Lines {
    /// `chunk_blocks`: whole lines.
    pub fn new(chunk_blocks: u32) -> Lines {
        assert!(chunk_blocks > 0 && chunk_blocks.is_multiple_of(LINE_BLOCKS), "chunks of {chunk_blocks} blocks");
        Lines {
            chunk_lines: chunk_blocks / LINE_BLOCKS,
            chunks: Vec::new(),
            spare_chunks: Vec::new(),
            lines: Vec::new(),
            free: BTreeSet::new(),
            index: BTreeMap::new(),
            names: Vec::new(),
            spare_names: Vec::new(),
            by_shard: BTreeMap::new(),
            hand: 0,
            chunk_hand: 0,
            held_blocks: 0,
            evicted_blocks: 0,
        }
    }

    pub fn chunk_blocks(&self) -> u64 {
        u64::from(self.chunk_lines * LINE_BLOCKS)
    }

    pub fn chunk_count(&self) -> usize {
        self.chunks.len() - self.spare_chunks.len()
    }

    pub fn find(&self, at: ShardAt, number: u32) -> Option<u32> {
        let name = self.by_shard.get(&at)?;
        self.index.get(&(*name, number)).copied()
    }

    pub fn get(&self, place: u32) -> &Line {
        &self.lines[place as usize]
    }

    /// Where the line lies on the device.
    pub fn first_block(&self, place: u32) -> u64 {
        let chunk = self.chunks[(place / self.chunk_lines) as usize].expect("a line is in a chunk");
        chunk + u64::from(place % self.chunk_lines * LINE_BLOCKS)
    }

    pub fn touch(&mut self, place: u32) {
        let line = &mut self.lines[place as usize];
        line.uses = (line.uses + 1).min(USES_MAX);
    }

    /// More room, from this block of the device on.
    pub fn add_chunk(&mut self, first: u64) {
        let chunk = self.spare_chunks.pop().unwrap_or_else(|| {
            self.chunks.push(None);
            self.lines.extend((0..self.chunk_lines).map(|_| EMPTY));
            self.chunks.len() as u32 - 1
        });
        assert!(self.chunks[chunk as usize].replace(first).is_none(), "a spare chunk is empty");
        self.free.extend(chunk * self.chunk_lines..(chunk + 1) * self.chunk_lines);
    }

    /// A chunk that nothing is being written to goes, with what it held; the first of its blocks.
    pub fn remove_chunk(&mut self) -> Option<u64> {
        for _ in 0..self.chunks.len() {
            let chunk = self.chunk_hand % self.chunks.len();
            self.chunk_hand = chunk + 1;
            let places = chunk as u32 * self.chunk_lines..(chunk as u32 + 1) * self.chunk_lines;
            if self.chunks[chunk].is_none() || places.clone().any(|place| self.get(place).writing) {
                continue;
            }
            for place in places {
                self.evict(place);
                self.free.remove(&place);
            }
            self.spare_chunks.push(chunk as u32);
            return self.chunks[chunk].take();
        }
        None
    }

    pub fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    /// A line for this run, empty: a free one, or the next that nobody used. `None` where all are in use for the moment.
    pub fn take(&mut self, at: ShardAt, number: u32) -> Option<u32> {
        if self.free.is_empty() {
            self.evict_one();
        }
        let place = self.free.pop_first()?;
        let name = self.name(at);
        let line = &mut self.lines[place as usize];
        assert!(line.name == NOBODY && line.valid == 0 && !line.writing, "a free line is empty");
        (line.name, line.number, line.uses) = (name, number, 1);
        line.generation = line.generation.wrapping_add(1);
        self.names[name as usize].as_mut().expect("just named").lines += 1;
        let fresh = self.index.insert((name, number), place).is_none();
        assert!(fresh, "a run has one line");
        Some(place)
    }

    fn name(&mut self, at: ShardAt) -> u32 {
        if let Some(name) = self.by_shard.get(&at) {
            return *name;
        }
        let name = self.spare_names.pop().unwrap_or_else(|| {
            self.names.push(None);
            self.names.len() as u32 - 1
        });
        self.names[name as usize] = Some(Name { at, lines: 0 });
        self.by_shard.insert(at, name);
        name
    }

    fn evict_one(&mut self) {
        for _ in 0..self.lines.len().min(STEPS_MAX) {
            let place = self.hand % self.lines.len();
            self.hand = place + 1;
            let line = &mut self.lines[place];
            if line.name == NOBODY || line.writing {
                continue;
            }
            if line.uses == 0 {
                return self.evict(place as u32);
            }
            line.uses -= 1;
        }
    }

    fn evict(&mut self, place: u32) {
        self.evicted_blocks += u64::from(self.get(place).valid.count_ones());
        self.drop(place);
    }

    /// What the line holds is forgotten.
    pub fn drop(&mut self, place: u32) {
        let line = &mut self.lines[place as usize];
        if line.name == NOBODY {
            return;
        }
        let (name, number) = (std::mem::replace(&mut line.name, NOBODY), line.number);
        self.held_blocks -= u64::from(line.valid.count_ones());
        line.valid = 0;
        line.generation = line.generation.wrapping_add(1);
        if !line.writing {
            self.free.insert(place);
        }
        self.index.remove(&(name, number));
        let named = self.names[name as usize].as_mut().expect("a line's shard has a name");
        named.lines -= 1;
        if named.lines == 0 {
            self.by_shard.remove(&named.at);
            self.names[name as usize] = None;
            self.spare_names.push(name);
        }
    }

    pub fn begin_write(&mut self, place: u32) {
        let line = &mut self.lines[place as usize];
        assert!(!std::mem::replace(&mut line.writing, true), "one write a line");
    }

    /// The write that was begun for this use of the line is over; `written`, if it went well: blocks with their checksums.
    pub fn end_write(&mut self, place: u32, generation: u32, written: &[(u32, BlockCrc)]) {
        let line = &mut self.lines[place as usize];
        assert!(std::mem::replace(&mut line.writing, false), "its write was begun");
        if line.name == NOBODY {
            self.free.insert(place);
        } else if line.generation == generation {
            for (block, crc) in written {
                let bit = 1 << block;
                self.held_blocks += u64::from(line.valid & bit == 0);
                line.valid |= bit;
                line.crcs[*block as usize] = *crc;
            }
            if line.valid == 0 {
                self.drop(place);
            }
        }
    }

    /// Everything of a shard goes.
    pub fn forget(&mut self, at: ShardAt) {
        let Some(name) = self.by_shard.get(&at).copied() else { return };
        let places: Vec<u32> = self.index.range((name, 0)..=(name, u32::MAX)).map(|(_, place)| *place).collect();
        places.into_iter().for_each(|place| self.drop(place));
    }

    /// Everything of a volume on a device goes.
    pub fn forget_volume(&mut self, slot: DeviceSlot, volume: VolumeId) {
        let first = SegmentId { volume, epoch: Epoch(0), counter: 0 };
        let from = ShardAt { slot, shard: ShardId { segment: first, index: 0 } };
        let held = self.by_shard.range(from..).map(|(at, _)| *at);
        let of_volume: Vec<ShardAt> =
            held.take_while(|at| at.slot == slot && at.shard.segment.volume == volume).collect();
        of_volume.into_iter().for_each(|at| self.forget(at));
    }

    /// Everything goes that is of none of these devices.
    pub fn retain(&mut self, slots: &BTreeSet<DeviceSlot>) {
        let gone: Vec<ShardAt> = self.by_shard.keys().filter(|at| !slots.contains(&at.slot)).copied().collect();
        gone.into_iter().for_each(|at| self.forget(at));
    }

    /// Shards of which something is held.
    pub fn shards(&self) -> impl Iterator<Item = ShardAt> {
        self.by_shard.keys().copied()
    }

    /// Index, lines and free places agree.
    pub fn verify(&self) {
        let mut held = 0;
        for (place, line) in (0..).zip(&self.lines) {
            let is_lent = self.chunks[(place / self.chunk_lines) as usize].is_some();
            assert_eq!(self.free.contains(&place), is_lent && line.name == NOBODY && !line.writing, "line {place}");
            assert!(is_lent || !line.writing && line.name == NOBODY, "a line without a place");
            held += u64::from(line.valid.count_ones());
            if line.name != NOBODY {
                assert_eq!(self.index.get(&(line.name, line.number)), Some(&place), "line {place} is indexed");
            }
        }
        assert_eq!(held, self.held_blocks, "what is held was counted");
        let named = self.names.iter().flatten();
        let (lines, names) = named.fold((0, 0), |(lines, names), name| (lines + name.lines as usize, names + 1));
        assert_eq!((lines, names), (self.index.len(), self.by_shard.len()), "names are counted");
    }
}
