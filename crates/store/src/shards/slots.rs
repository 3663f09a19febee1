//! The slot table: one small record a shard, rewritten a block at a time from memory.
//!
//! ```text
//!          data durable          slot durable        deleted            cleared durably
//! Reserved ─────────── Committing ───────── Live ─────────── Clearing ─────────────── free
//! ```
//! On disk a slot is full in `Committing` and `Live`, and zeroes else. A shard in more extents than one slot names has more
//! slots, which are written with its data: the first one, which leads to them, makes it count. A slot never straddles a sector, and a block is
//! rewritten with identical bytes for its other slots: a torn write harms nothing.
//!
//! Limits: one write in flight a block, and what changes meanwhile goes with the next; [`BLOCK_WRITES_MAX`] in all, the
//! other blocks wait for their turn.

use crate::io::{Ctx, Io};
use holdfast_base::{BLOCK_BYTES, BufMut, DeviceId, ShardId, Token};
use holdfast_format::disk::{Extents, SLOT_BYTES, SLOT_EXTENTS, SLOTS_PER_BLOCK, Slot};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Block writes in flight: more than a device's queue takes, when a large volume is dropped.
const BLOCK_WRITES_MAX: usize = 64;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SlotLife {
    Reserved,
    Committing,
    Live,
    Clearing,
}

/// A shard and where it lies.
#[derive(Debug)]
pub(crate) struct StoredShard {
    pub shard: ShardId,
    pub header_blocks: u16,
    /// All of them: header area, then data.
    pub extents: Extents,
    pub life: SlotLife,
    /// The slots that go on with the extents, in order.
    tails: Box<[u32]>,
}

impl StoredShard {
    /// Blocks of data.
    pub fn data_blocks(&self) -> u32 {
        (self.extents.block_count() - u64::from(self.header_blocks)) as u32
    }

    pub fn tails(&self) -> &[u32] {
        &self.tails
    }

    /// What slot `part` of the shard says: zero is the first.
    fn slot(&self, part: usize) -> Slot {
        let whole = || self.extents.clone();
        let chunk = || self.extents.chunks(SLOT_EXTENTS).nth(part).expect("a slot for each so many").to_vec().into();
        Slot {
            shard: self.shard,
            header_blocks: (part == 0).then_some(self.header_blocks),
            next: self.tails.get(part).copied(),
            extents: if self.tails.is_empty() { whole() } else { chunk() },
        }
    }
}

#[derive(Debug)]
enum Content {
    Shard(StoredShard),
    /// Slot `part` of the shard whose first slot is `head`.
    Tail {
        head: u32,
        part: usize,
    },
}

/// What a durable slot block sets free.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Waiter {
    /// More extents of the shard in this slot are named.
    Tail(u32),
    /// The shard in this slot is complete.
    Commit(u32),
    /// The slot is empty, and its space free.
    Clear(u32),
    /// One part of a request with several.
    Join(Token),
    /// A block that the opening found bad is as it should be.
    Mended,
}

#[derive(Default)]
struct BlockWrite {
    is_writing: bool,
    /// It is among `turns`.
    has_turn: bool,
    /// Set free by the write in flight, and by the one after it.
    now: Vec<Waiter>,
    next: Vec<Waiter>,
}

pub(crate) struct Slots {
    device: DeviceId,
    /// Of the table on the device.
    offset: u64,
    capacity: u32,
    /// By number, up to the highest ever used.
    contents: Vec<Option<Content>>,
    /// Holes in `contents`.
    free: BTreeSet<u32>,
    blocks: BTreeMap<u32, BlockWrite>,
    writes_in_flight: usize,
    /// Blocks to be written, in order.
    turns: VecDeque<u32>,
}

impl Slots {
    pub fn new(device: DeviceId, offset: u64, capacity: u32) -> Slots {
        assert!(capacity.is_multiple_of(SLOTS_PER_BLOCK), "the table is whole blocks");
        Slots {
            device,
            offset,
            capacity,
            contents: Vec::new(),
            free: BTreeSet::new(),
            blocks: BTreeMap::new(),
            writes_in_flight: 0,
            turns: VecDeque::new(),
        }
    }

    /// The shard whose first slot this is.
    pub fn get(&self, number: u32) -> Option<&StoredShard> {
        match self.contents.get(number as usize)?.as_ref()? {
            Content::Shard(held) => Some(held),
            Content::Tail { .. } => None,
        }
    }

    /// The shard in this slot, if it is that one and complete.
    pub fn live(&self, number: u32, shard: ShardId) -> Option<&StoredShard> {
        self.get(number).filter(|held| held.life == SlotLife::Live && held.shard == shard)
    }

    pub fn set_life(&mut self, number: u32, life: SlotLife) {
        let Some(Content::Shard(held)) = &mut self.contents[number as usize] else {
            panic!("slot {number} has a shard")
        };
        held.life = life;
    }

    /// Puts a shard where it was found at start: `numbers` are its slots, in order.
    pub fn load(&mut self, numbers: &[u32], shard: ShardId, header_blocks: u16, extents: Extents) {
        for number in numbers {
            self.grow_to(*number);
            self.free.remove(number);
        }
        self.fill(numbers, shard, header_blocks, extents, SlotLife::Live);
    }

    fn fill(&mut self, numbers: &[u32], shard: ShardId, header_blocks: u16, extents: Extents, life: SlotLife) {
        let (head, tails) = numbers.split_first().expect("a shard has a slot");
        for (i, tail) in tails.iter().enumerate() {
            self.contents[*tail as usize] = Some(Content::Tail { head: *head, part: i + 1 });
        }
        let held = StoredShard { shard, header_blocks, extents, life, tails: tails.into() };
        self.contents[*head as usize] = Some(Content::Shard(held));
    }

    fn grow_to(&mut self, number: u32) {
        assert!(number < self.capacity, "slot {number} of {}", self.capacity);
        while self.contents.len() <= number as usize {
            self.free.insert(self.contents.len() as u32);
            self.contents.push(None);
        }
    }

    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    pub fn free_count(&self) -> u32 {
        self.capacity - self.contents.len() as u32 + self.free.len() as u32
    }

    /// Whether a shard in so many extents can be named.
    pub fn has_room_for(&self, extents: usize) -> bool {
        extents.div_ceil(SLOT_EXTENTS) <= self.free_count() as usize
    }

    /// Free slots, the lowest, for a shard whose data is about to be written; returns the first.
    pub fn reserve(&mut self, shard: ShardId, header_blocks: u16, extents: Extents) -> u32 {
        assert!(self.has_room_for(extents.len()), "a full table was checked for");
        let count = extents.len().div_ceil(SLOT_EXTENTS);
        while self.free.len() < count {
            self.grow_to(self.contents.len() as u32);
        }
        let numbers: Vec<u32> = (0..count).map(|_| self.free.pop_first().expect("there are free slots")).collect();
        self.fill(&numbers, shard, header_blocks, extents, SlotLife::Reserved);
        numbers[0]
    }

    pub fn release(&mut self, number: u32) -> StoredShard {
        self.free.insert(number);
        let Some(Content::Shard(held)) = self.contents[number as usize].take() else {
            panic!("slot {number} has a shard")
        };
        for tail in &held.tails {
            self.contents[*tail as usize] = None;
            self.free.insert(*tail);
        }
        held
    }

    /// What the slot is to say on disk. The slots that a shard's first one leads to are written before it, and mean nothing
    /// without it.
    fn on_disk(&self, number: u32) -> Option<Slot> {
        match self.contents.get(number as usize)?.as_ref()? {
            Content::Shard(held) if matches!(held.life, SlotLife::Committing | SlotLife::Live) => Some(held.slot(0)),
            Content::Shard(_) => None,
            Content::Tail { head, part } => Some(self.get(*head).expect("a tail has a head").slot(*part)),
        }
    }

    pub fn block_of(number: u32) -> u32 {
        number / SLOTS_PER_BLOCK
    }

    /// The block's present state goes to disk; waiters are set free by that write.
    pub fn write_block(&mut self, ctx: &mut Ctx, block: u32, waiters: &[Waiter]) {
        self.blocks.entry(block).or_default().next.extend_from_slice(waiters);
        self.give_turn(block);
        self.take_turns(ctx);
    }

    fn give_turn(&mut self, block: u32) {
        let write = self.blocks.get_mut(&block).expect("it has waiters");
        if !write.is_writing && !write.has_turn {
            write.has_turn = true;
            self.turns.push_back(block);
        }
    }

    fn take_turns(&mut self, ctx: &mut Ctx) {
        while self.writes_in_flight < BLOCK_WRITES_MAX {
            let Some(block) = self.turns.pop_front() else { break };
            self.start_write(ctx, block);
        }
    }

    fn start_write(&mut self, ctx: &mut Ctx, block: u32) {
        let mut bytes = BufMut::zeroed(BLOCK_BYTES);
        for (i, out) in bytes.chunks_exact_mut(SLOT_BYTES).enumerate() {
            let number = block * SLOTS_PER_BLOCK + i as u32;
            if let Some(slot) = self.on_disk(number) {
                slot.encode_into(self.device, number, out);
            }
        }
        let write = self.blocks.get_mut(&block).expect("its caller made it");
        assert!(!write.is_writing && write.now.is_empty(), "one write a block");
        write.is_writing = true;
        write.has_turn = false;
        self.writes_in_flight += 1;
        write.now = std::mem::take(&mut write.next);
        let offset = self.offset + u64::from(block) * BLOCK_BYTES as u64;
        ctx.write(offset, vec![bytes.freeze()], true, Io::SlotBlock { block });
    }

    /// The block is durable: who waited for it? Starts the next write if there is cause.
    pub fn on_block_written(&mut self, ctx: &mut Ctx, block: u32) -> Vec<Waiter> {
        let write = self.blocks.get_mut(&block).expect("its write is in flight");
        write.is_writing = false;
        let done = std::mem::take(&mut write.now);
        self.writes_in_flight -= 1;
        if write.next.is_empty() {
            self.blocks.remove(&block);
        } else {
            self.give_turn(block);
        }
        self.take_turns(ctx);
        done
    }

    /// Shards and the numbers of their first slots, in the order of these.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &StoredShard)> {
        (0..self.contents.len() as u32).filter_map(|number| Some((number, self.get(number)?)))
    }

    /// Every slot that goes on with another one's extents is named by it.
    pub fn verify(&self) {
        for (number, held) in self.iter() {
            assert_eq!(
                held.extents.len().div_ceil(SLOT_EXTENTS),
                held.tails.len() + 1,
                "a slot for each so many extents"
            );
            for (i, tail) in held.tails.iter().enumerate() {
                let is_ours = matches!(self.contents[*tail as usize],
                    Some(Content::Tail { head, part }) if head == number && part == i + 1);
                assert!(is_ours, "slot {tail} goes on with slot {number}");
            }
        }
        let in_use = self.iter().map(|(_, held)| held.tails.len() + 1).sum::<usize>();
        assert_eq!(in_use + self.free_count() as usize, self.capacity as usize, "slots are lost");
    }
}
