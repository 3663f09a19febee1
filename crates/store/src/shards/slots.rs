//! The slot table: one small record a shard, rewritten a block at a time from memory.
//!
//! ```text
//!          data durable          slot durable        deleted            cleared durably
//! Reserved ─────────── Committing ───────── Live ─────────── Clearing ─────────────── free
//! ```
//! On disk a slot is full in `Committing` and `Live`, and zeroes else. A slot never straddles a sector, and a block is
//! rewritten with identical bytes for its other slots: a torn write harms nothing.
//!
//! Limits: one write in flight a block, and what changes meanwhile goes with the next; [`BLOCK_WRITES_MAX`] in all, the
//! other blocks wait for their turn.

use crate::io::{Ctx, Io};
use holdfast_base::{BLOCK_BYTES, BufMut, DeviceId, ShardId, Token};
use holdfast_format::disk::{SLOT_BYTES, SLOTS_PER_BLOCK, Slot};
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

#[derive(Clone, Debug)]
pub(crate) struct SlotState {
    pub slot: Slot,
    pub life: SlotLife,
}

/// What a durable slot block sets free.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Waiter {
    /// The shard in this slot is complete.
    Commit(u32),
    /// The slot is empty, and its space free.
    Clear(u32),
    /// One part of a request with several.
    Join(Token),
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
    states: Vec<Option<SlotState>>,
    /// Holes in `states`.
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
            states: Vec::new(),
            free: BTreeSet::new(),
            blocks: BTreeMap::new(),
            writes_in_flight: 0,
            turns: VecDeque::new(),
        }
    }

    pub fn get(&self, number: u32) -> Option<&SlotState> {
        self.states.get(number as usize)?.as_ref()
    }

    /// The shard in this slot, if it is that one and complete.
    pub fn live(&self, number: u32, shard: ShardId) -> Option<&Slot> {
        self.get(number).filter(|s| s.life == SlotLife::Live && s.slot.shard == shard).map(|s| &s.slot)
    }

    pub fn set_life(&mut self, number: u32, life: SlotLife) {
        let state = self.states[number as usize].as_mut().expect("the slot is in use");
        state.life = life;
    }

    /// Puts a slot where it was found at start.
    pub fn load(&mut self, number: u32, slot: Slot) {
        self.grow_to(number);
        self.free.remove(&number);
        self.states[number as usize] = Some(SlotState { slot, life: SlotLife::Live });
    }

    fn grow_to(&mut self, number: u32) {
        assert!(number < self.capacity, "slot {number} of {}", self.capacity);
        while self.states.len() <= number as usize {
            self.free.insert(self.states.len() as u32);
            self.states.push(None);
        }
    }

    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    pub fn free_count(&self) -> u32 {
        self.capacity - self.states.len() as u32 + self.free.len() as u32
    }

    pub fn is_full(&self) -> bool {
        self.free.is_empty() && self.states.len() == self.capacity as usize
    }

    /// A free slot, the lowest, for a shard whose data is about to be written.
    pub fn reserve(&mut self, slot: Slot) -> u32 {
        assert!(!self.is_full(), "a full table was checked for");
        if self.free.is_empty() {
            self.grow_to(self.states.len() as u32);
        }
        let number = self.free.pop_first().expect("there is a free slot");
        self.states[number as usize] = Some(SlotState { slot, life: SlotLife::Reserved });
        number
    }

    pub fn release(&mut self, number: u32) -> SlotState {
        self.free.insert(number);
        self.states[number as usize].take().expect("the slot was in use")
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
            if let Some(state) = self.get(number)
                && matches!(state.life, SlotLife::Committing | SlotLife::Live)
            {
                state.slot.encode_into(self.device, number, out);
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

    /// Slots in use, in order of their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &SlotState)> {
        self.states.iter().enumerate().filter_map(|(i, s)| s.as_ref().map(|s| (i as u32, s)))
    }
}
