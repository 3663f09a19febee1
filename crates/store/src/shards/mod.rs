//! Shards of one device: written once, whole, verified before and after; found by a slot table.
//!
//! Role: the device passes on puts, reads and deletions whose epoch it has checked, and completions. A put writes the data
//! durably, then its slot durably, then answers: a crash in between leaves no shard and no space lost. A deletion clears
//! the slot durably before its space can be used again.
//!
//! Invariants:
//! 1. Extents of slots in use and lent ones are disjoint, and what they don't cover is free.
//! 2. A shard can be read, listed and deleted exactly while its slot is `Live`.
//! 3. No byte leaves this module that does not match the shard's own checksums, but where the reader waives that.
//!
//! Limits: [`PUTS_MAX`], [`PUT_BYTES_MAX`], [`PARKED_MAX`]: above them `Busy`.
//! Faults: unreadable or altered bytes of a shard refuse that read only; a failed write is the device's end.

pub(crate) mod alloc;
pub(crate) mod parts;
pub(crate) mod slots;
pub(crate) mod table_cache;

use crate::api::{DiskError, Notice};
use crate::cache::{Asked, Fresh, ShardAt};
use crate::io::{Client, Ctx, Io, client_of};
use crate::line::Whose;
use crate::shards::alloc::Allocator;
use crate::shards::parts::Parts;
use crate::shards::slots::{SlotLife, Slots, StoredShard, Waiter};
use crate::shards::table_cache::{Table, TableCache};
use holdfast_base::{BLOCK_BYTES, Buf, Epoch, SegmentId, ShardId, Token, Urgency, VolumeId};
use holdfast_format::copy::{self, is_copy, root_copy_of};
use holdfast_format::disk::{Extent, Extents, SLOT_BYTES, SLOTS_PER_BLOCK, Slot, Superblock, blocks_match};
use holdfast_format::segment::{HEADER_BLOCKS_MAX, ShardHeader};
use holdfast_format::wire::{HeldRoot, PAYLOAD_BYTES_MAX, Refusal, Reply};
use std::collections::{BTreeMap, BTreeSet};

/// Puts in flight on a device: more than its queue depth can use.
pub(crate) const PUTS_MAX: usize = 512;

/// Payload of puts in flight on a device.
pub(crate) const PUT_BYTES_MAX: u64 = 256 << 20;

/// Clients that wait for the same put: repetitions of one request over several connections.
const PUT_CLIENTS_MAX: usize = 16;

/// Reads that wait for the checksum table of their shard.
const PARKED_MAX: usize = 4096;

/// Shards of one page of a list: stays well below a frame's meta part.
const LIST_MAX: usize = 20_000;

/// A shard's name inside its volume, in listing order.
type ShardKey = (Epoch, u64, u8);

fn key_of(shard: ShardId) -> ShardKey {
    (shard.segment.epoch, shard.segment.counter, shard.index)
}

fn id_of(volume: VolumeId, (epoch, counter, index): ShardKey) -> ShardId {
    ShardId { segment: SegmentId { volume, epoch, counter }, index }
}

/// A read of a shard's blocks in flight.
#[derive(Debug)]
pub(crate) struct ShardRead {
    client: Client,
    shard: ShardId,
    number: u32,
    block: u32,
    blocks: u32,
    checked: bool,
    /// The read cache would like it: it is verified in any case, and told of.
    wanted: bool,
    /// Whether it matches is all that is asked.
    verdict: bool,
    /// `None` until the table has been loaded.
    table: Option<Table>,
}

impl ShardRead {
    /// Nobody waits for its bytes.
    pub fn is_check(&self) -> bool {
        self.verdict
    }
}

#[derive(Debug)]
pub(crate) struct HeaderRead {
    client: Client,
    shard: ShardId,
    number: u32,
}

struct Put {
    clients: Vec<Client>,
    bytes: u64,
    /// Writes that the shard's first slot waits for: its data, and blocks with its other slots.
    waiting: usize,
}

/// Slots found at start that don't stand alone.
#[derive(Default)]
struct Found {
    /// Blocks of the table with something that is not true: unreadable, bad, or naming what others have.
    false_blocks: BTreeSet<u32>,
    /// First slots that lead to others.
    heads: Vec<(u32, Slot)>,
    tails: BTreeMap<u32, Slot>,
}

pub(crate) struct Shards {
    superblock: Superblock,
    allocator: Allocator,
    /// Extents that the node's read cache has for the time being: first block and count.
    lent: BTreeMap<u64, u64>,
    slots: Slots,
    cache: TableCache,
    index: BTreeMap<VolumeId, BTreeMap<ShardKey, u32>>,
    /// Of those the copies of roots.
    roots: BTreeMap<VolumeId, BTreeSet<ShardKey>>,
    /// Without copies of metadata.
    live_count: u64,
    /// By slot number.
    puts: BTreeMap<u32, Put>,
    put_bytes: u64,
    /// Tables being loaded, with the reads whose data came first.
    loading: BTreeMap<ShardId, Vec<(ShardRead, Buf)>>,
    parked: usize,
    parts: Parts,
    found: Found,
    /// Blocks of the table that are being mended before the device serves.
    mending: usize,
}

impl Shards {
    pub fn new(superblock: Superblock, cache_bytes: usize) -> Shards {
        let areas = &superblock.areas;
        Shards {
            superblock,
            allocator: Allocator::new(areas.data_blocks),
            lent: BTreeMap::new(),
            slots: Slots::new(superblock.device, areas.slot_table_offset, areas.slot_count),
            cache: TableCache::new(cache_bytes),
            index: BTreeMap::new(),
            roots: BTreeMap::new(),
            live_count: 0,
            puts: BTreeMap::new(),
            put_bytes: 0,
            loading: BTreeMap::new(),
            parked: 0,
            parts: Parts::new(areas.data_offset),
            found: Found::default(),
            mending: 0,
        }
    }

    /// Takes a part of the slot table as read at start; returns how many slots can't be what they say.
    pub fn load(&mut self, first_block: u32, bytes: &[u8]) -> u64 {
        assert!(bytes.len().is_multiple_of(BLOCK_BYTES), "the table is read in whole blocks");
        let mut damaged = 0;
        for (i, bytes) in bytes.chunks_exact(SLOT_BYTES).enumerate() {
            let number = first_block * SLOTS_PER_BLOCK + i as u32;
            let is_true = match Slot::decode(self.superblock.device, number, bytes) {
                Ok(None) => true,
                Ok(Some(slot)) => self.take_slot(number, slot),
                Err(_) => false,
            };
            if !is_true {
                damaged += 1;
                self.found.false_blocks.insert(Slots::block_of(number));
            }
        }
        damaged
    }

    fn take_slot(&mut self, number: u32, slot: Slot) -> bool {
        match (slot.header_blocks, slot.next) {
            (None, _) => {
                self.found.tails.insert(number, slot);
                true
            }
            (Some(_), Some(_)) => {
                self.found.heads.push((number, slot));
                true
            }
            (Some(header_blocks), None) => self.take_loaded(&[number], slot.shard, header_blocks, slot.extents),
        }
    }

    /// A block of the slot table can't be read: its shards don't exist. Returns how many slots that are.
    pub fn load_unreadable(&mut self, block: u32) -> u64 {
        self.found.false_blocks.insert(block);
        u64::from(SLOTS_PER_BLOCK)
    }

    /// Writes what was found untrue anew, so that it can't come back when its space has been used again. The device serves
    /// when that is durable.
    pub fn mend(&mut self, ctx: &mut Ctx) {
        let false_blocks = std::mem::take(&mut self.found.false_blocks);
        self.mending = false_blocks.len();
        for block in false_blocks {
            self.slots.write_block(ctx, block, &[Waiter::Mended]);
        }
    }

    pub fn is_mended(&self) -> bool {
        self.mending == 0
    }

    /// The whole table was read: puts shards of several slots together. A tail that no first slot leads to is what a put or
    /// a deletion left that a crash cut short. Returns how many shards lack a part.
    pub fn finish_load(&mut self) -> u64 {
        let heads = std::mem::take(&mut self.found.heads);
        let mut tails = std::mem::take(&mut self.found.tails);
        let mut damaged = 0;
        for (number, head) in heads {
            let (mut numbers, mut extents, mut next) = (vec![number], head.extents.to_vec(), head.next);
            while let Some(number) = next {
                let Some(tail) = tails.remove(&number).filter(|tail| tail.shard == head.shard) else { break };
                numbers.push(number);
                extents.extend(tail.extents.iter());
                next = tail.next;
            }
            let header_blocks = head.header_blocks.expect("it was sorted out by that");
            if next.is_some() || !self.take_loaded(&numbers, head.shard, header_blocks, extents.into()) {
                damaged += 1;
                self.found.false_blocks.insert(Slots::block_of(number));
            }
        }
        damaged
    }

    /// False for slots that name no data, or space or a shard that others have.
    fn take_loaded(&mut self, numbers: &[u32], shard: ShardId, header_blocks: u16, extents: Extents) -> bool {
        let shards = self.index.entry(shard.segment.volume).or_default();
        let has_data = extents.block_count() > u64::from(header_blocks);
        if !has_data || shards.contains_key(&key_of(shard)) || !self.allocator.reserve_all(&extents) {
            return false;
        }
        shards.insert(key_of(shard), numbers[0]);
        self.slots.load(numbers, shard, header_blocks, extents);
        self.note_root(shard);
        self.live_count += u64::from(!is_copy(shard.segment));
        true
    }

    /// Shards of volumes' data: copies of metadata are not counted.
    pub fn live_count(&self) -> u64 {
        self.live_count
    }

    fn note_root(&mut self, shard: ShardId) {
        if root_copy_of(shard.segment).is_some() {
            self.roots.entry(shard.segment.volume).or_default().insert(key_of(shard));
        }
    }

    pub fn capacity_bytes(&self) -> u64 {
        self.superblock.areas.data_blocks * BLOCK_BYTES as u64
    }

    /// Of data and of slots the scarcer, so that small shards, too, are seen to fill the device. What is lent counts as free.
    pub fn free_bytes(&self) -> u64 {
        let data = (self.allocator.free_blocks() + self.lent.values().sum::<u64>()) * BLOCK_BYTES as u64;
        let slots = u64::from(self.slots.free_count());
        let by_slots = u128::from(self.capacity_bytes()) * u128::from(slots) / u128::from(self.slots.capacity());
        data.min(by_slots as u64)
    }

    /// Free, and not lent.
    pub fn unlent_blocks(&self) -> u64 {
        self.allocator.free_blocks()
    }

    /// Whether there is room for a shard, in the data area and among the slots.
    pub fn can_place(&self, blocks: u64) -> bool {
        self.allocator.extents_for(blocks).is_some_and(|extents| self.slots.has_room_for(extents))
    }

    /// One extent of free space for the read cache, where so much stays free; its first block. Shards know nothing of what is
    /// there, and no slot names it: after a restart it is free.
    pub fn lend(&mut self, blocks: u64, kept_blocks: u64) -> Option<u64> {
        if self.allocator.free_blocks() < blocks + kept_blocks || self.allocator.extents_for(blocks) != Some(1) {
            return None;
        }
        let extents = self.allocator.allocate(blocks).expect("just looked");
        self.lent.insert(extents[0].first, extents[0].count);
        Some(extents[0].first)
    }

    pub fn take_back(&mut self, first: u64) {
        let count = self.lent.remove(&first).expect("it was lent");
        self.allocator.free(Extent { first, count });
    }

    /// Of a block of the data area on the device.
    pub fn offset_of(&self, block: u64) -> u64 {
        self.superblock.areas.data_offset + block * BLOCK_BYTES as u64
    }

    /// A slot is in use for the shard, in whatever state.
    pub fn has(&self, shard: ShardId) -> bool {
        self.number_of(shard).is_some()
    }

    fn number_of(&self, shard: ShardId) -> Option<u32> {
        self.index.get(&shard.segment.volume)?.get(&key_of(shard)).copied()
    }

    /// Whether the payload is the shard that it claims to be: header area and every block.
    fn is_valid_payload(&self, shard: ShardId, header_bytes: usize, payload: &[u8]) -> bool {
        let (header, data) = payload.split_at(header_bytes);
        ShardHeader::decode(shard, header)
            .is_ok_and(|h| h.grid == self.superblock.grid && blocks_match(&h.block_crcs, data))
    }

    pub fn put(
        &mut self,
        ctx: &mut Ctx,
        client: Client,
        shard: ShardId,
        header_blocks: u32,
        payload: Buf,
    ) -> Result<(), Refusal> {
        let header_bytes = header_blocks as usize * BLOCK_BYTES;
        let is_whole = payload.len().is_multiple_of(BLOCK_BYTES) && payload.len() > header_bytes;
        if !(1..=HEADER_BLOCKS_MAX).contains(&header_blocks) || !is_whole {
            return Err(Refusal::Invalid);
        }
        if let Some(number) = self.number_of(shard) {
            return self.put_again(ctx, client, number);
        }
        if !self.is_valid_payload(shard, header_bytes, &payload) {
            return Err(Refusal::Checksum);
        }
        let bytes = payload.len() as u64;
        if self.puts.len() >= PUTS_MAX || self.put_bytes + bytes > PUT_BYTES_MAX {
            return Err(Refusal::Busy);
        }
        // What is still lent is being written for the read cache, and comes back in a moment.
        let full = if self.lent.is_empty() { Refusal::NoSpace } else { Refusal::Busy };
        let extents = self.allocator.allocate((payload.len() / BLOCK_BYTES) as u64).ok_or(full)?;
        if !self.slots.has_room_for(extents.len()) {
            self.allocator.free_all(&extents);
            return Err(full);
        }
        let number = self.slots.reserve(shard, header_blocks as u16, extents.clone());
        self.index.entry(shard.segment.volume).or_default().insert(key_of(shard), number);
        self.note_root(shard);
        let tails = self.slots.get(number).expect("just reserved").tails();
        let tail_blocks: BTreeSet<u32> = tails.iter().map(|tail| Slots::block_of(*tail)).collect();
        self.puts.insert(number, Put { clients: vec![client], bytes, waiting: 1 + tail_blocks.len() });
        self.put_bytes += bytes;
        let aligned = (payload.as_ptr() as usize).is_multiple_of(BLOCK_BYTES);
        let data = if aligned { payload } else { Buf::copy_from(&payload) };
        self.parts.write(ctx, &extents, data, Io::ShardData { number });
        for block in tail_blocks {
            self.slots.write_block(ctx, block, &[Waiter::Tail(number)]);
        }
        Ok(())
    }

    /// The shard is here already, or on its way: ids are never written twice with other bytes.
    fn put_again(&mut self, ctx: &mut Ctx, client: Client, number: u32) -> Result<(), Refusal> {
        let state = self.slots.get(number).expect("the index names slots in use");
        match state.life {
            SlotLife::Live => ctx.reply(client, Reply::Done),
            SlotLife::Clearing => return Err(Refusal::Busy),
            SlotLife::Reserved | SlotLife::Committing => {
                let clients = &mut self.puts.get_mut(&number).expect("it is being put").clients;
                if clients.len() >= PUT_CLIENTS_MAX {
                    return Err(Refusal::Busy);
                }
                clients.push(client);
            }
        }
        Ok(())
    }

    /// The data of a put is durable, or one of its further slots: with the last comes the first slot.
    pub fn on_part_durable(&mut self, ctx: &mut Ctx, number: u32) {
        let put = self.puts.get_mut(&number).expect("it is being put");
        put.waiting -= 1;
        if put.waiting == 0 {
            self.slots.set_life(number, SlotLife::Committing);
            self.slots.write_block(ctx, Slots::block_of(number), &[Waiter::Commit(number)]);
        }
    }

    /// A slot block is durable. Returns the joins to be told.
    pub fn on_slot_block_written(&mut self, ctx: &mut Ctx, block: u32) -> Vec<Token> {
        let mut joins = Vec::new();
        for waiter in self.slots.on_block_written(ctx, block) {
            match waiter {
                Waiter::Mended => self.mending -= 1,
                Waiter::Tail(number) => self.on_part_durable(ctx, number),
                Waiter::Commit(number) => self.complete_put(ctx, number),
                Waiter::Clear(number) => self.complete_clear(number),
                Waiter::Join(join) => joins.push(join),
            }
        }
        joins
    }

    fn complete_put(&mut self, ctx: &mut Ctx, number: u32) {
        self.slots.set_life(number, SlotLife::Live);
        let shard = self.slots.get(number).expect("just put").shard;
        self.live_count += u64::from(!is_copy(shard.segment));
        let put = self.puts.remove(&number).expect("it was being put");
        self.put_bytes -= put.bytes;
        self.clear_older_roots(ctx, shard);
        for client in put.clients {
            ctx.reply(client, Reply::Done);
        }
    }

    fn complete_clear(&mut self, number: u32) {
        let held = self.slots.release(number);
        assert_eq!(held.life, SlotLife::Clearing, "only a deleted shard's space returns");
        self.allocator.free_all(&held.extents);
        let volume = held.shard.segment.volume;
        let shards = self.index.get_mut(&volume).expect("it was indexed");
        shards.remove(&key_of(held.shard));
        if shards.is_empty() {
            self.index.remove(&volume);
        }
        if let Some(roots) = self.roots.get_mut(&volume) {
            roots.remove(&key_of(held.shard));
            if roots.is_empty() {
                self.roots.remove(&volume);
            }
        }
    }

    /// A root's copy is durable: those before it say nothing any more.
    fn clear_older_roots(&mut self, ctx: &mut Ctx, shard: ShardId) {
        if root_copy_of(shard.segment).is_none() {
            return;
        }
        let volume = shard.segment.volume;
        let older: Vec<u32> = self.live_roots(volume).filter(|(key, _)| *key < key_of(shard)).map(|(_, n)| n).collect();
        for number in older {
            self.slots.set_life(number, SlotLife::Clearing);
            self.cache.remove(number);
            self.slots.write_block(ctx, Slots::block_of(number), &[Waiter::Clear(number)]);
        }
    }

    fn live_roots(&self, volume: VolumeId) -> impl DoubleEndedIterator<Item = (ShardKey, u32)> {
        let shards = self.index.get(&volume);
        let keys = self.roots.get(&volume).into_iter().flatten();
        keys.filter_map(move |key| {
            let number = *shards?.get(key)?;
            self.slots.live(number, id_of(volume, *key)).map(|_| (*key, number))
        })
    }

    /// The newest copy of the volume's root.
    pub fn root_of(&self, volume: VolumeId) -> Option<HeldRoot> {
        let (key, number) = self.live_roots(volume).next_back()?;
        let shard = id_of(volume, key);
        let (epoch, sequence) = root_copy_of(shard.segment)?;
        Some(HeldRoot { epoch, sequence, blocks: self.slots.live(number, shard)?.data_blocks() })
    }

    /// Puts a root's copy, where none is held or on its way that is newer.
    pub fn put_root(&mut self, ctx: &mut Ctx, client: Client, shard: ShardId, root: &[u8]) -> Result<(), Refusal> {
        let newest = self.roots.get(&shard.segment.volume).and_then(|roots| roots.last());
        if newest.is_some_and(|newest| *newest > key_of(shard)) {
            ctx.reply(client, Reply::Done);
            return Ok(());
        }
        let (header_blocks, payload) = copy::encode(self.superblock.grid, shard, root);
        self.put(ctx, client, shard, header_blocks, Buf::copy_from(&payload))
    }

    /// Volumes of which there are shards.
    pub fn volumes_after(&self, after: Option<VolumeId>) -> impl Iterator<Item = VolumeId> {
        use std::ops::Bound;
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        self.index.range((from, Bound::Unbounded)).map(|(volume, _)| *volume)
    }

    /// Deletes shards; what is not here needs nothing. Returns how many parts `join` has to wait for.
    pub fn delete(
        &mut self,
        ctx: &mut Ctx,
        shards: impl Iterator<Item = ShardId>,
        join: Token,
    ) -> Result<u32, Refusal> {
        let numbers: BTreeSet<u32> = shards.filter_map(|s| self.number_of(s)).collect();
        if numbers.iter().any(|n| self.puts.contains_key(n)) {
            return Err(Refusal::Busy);
        }
        let mut waiters: BTreeMap<u32, Vec<Waiter>> = BTreeMap::new();
        for number in numbers {
            let of_block = waiters.entry(Slots::block_of(number)).or_insert_with(|| vec![Waiter::Join(join)]);
            if self.slots.get(number).expect("indexed").life == SlotLife::Live {
                self.slots.set_life(number, SlotLife::Clearing);
                self.cache.remove(number);
                let shard = self.slots.get(number).expect("indexed").shard;
                self.live_count -= u64::from(!is_copy(shard.segment));
                of_block.push(Waiter::Clear(number));
            }
        }
        let parts = waiters.len() as u32;
        for (block, waiters) in waiters {
            self.slots.write_block(ctx, block, &waiters);
        }
        Ok(parts)
    }

    /// Every shard of a volume, however far it has come.
    pub fn of_volume(&self, volume: VolumeId) -> Vec<ShardId> {
        self.index.get(&volume).map(|s| s.keys().map(|k| id_of(volume, *k)).collect()).unwrap_or_default()
    }

    /// Shards of its data, and copies of the records; no roots.
    pub fn list(&self, volume: VolumeId, after: Option<ShardId>, count_max: u32) -> Reply {
        use std::ops::Bound;
        let count_max = (count_max as usize).clamp(1, LIST_MAX);
        let from = match after {
            Some(shard) if shard.segment.volume == volume => Bound::Excluded(key_of(shard)),
            _ => Bound::Unbounded,
        };
        let Some(shards) = self.index.get(&volume) else { return Reply::Shards { shards: Vec::new(), more: false } };
        let mut live = shards
            .range((from, Bound::Unbounded))
            .filter(|(key, _)| root_copy_of(id_of(volume, **key).segment).is_none())
            .filter(|(key, number)| self.slots.live(**number, id_of(volume, **key)).is_some())
            .map(|(key, _)| id_of(volume, *key));
        let page: Vec<ShardId> = live.by_ref().take(count_max).collect();
        Reply::Shards { more: live.next().is_some(), shards: page }
    }

    /// Whether these blocks of a shard can be read.
    pub fn holds(&self, shard: ShardId, block: u32, blocks: u32) -> bool {
        let held = self.number_of(shard).and_then(|number| self.slots.live(number, shard));
        held.is_some_and(|held| is_in_range(held, block, blocks))
    }

    pub fn read(&mut self, ctx: &mut Ctx, asked: &Asked, wanted: bool) -> Result<(), Refusal> {
        self.begin_read(ctx, asked, wanted, false)
    }

    /// Reads all of a shard, and tells whether it matches its checksums.
    pub fn check(&mut self, ctx: &mut Ctx, client: Client, shard: ShardId) -> Result<(), Refusal> {
        let number = self.number_of(shard).ok_or(Refusal::UnknownShard)?;
        let blocks = self.slots.live(number, shard).ok_or(Refusal::UnknownShard)?.data_blocks();
        let asked = Asked { client, slot: ctx.slot, shard, block: 0, blocks, checked: true };
        self.begin_read(ctx, &asked, false, true)
    }

    fn begin_read(&mut self, ctx: &mut Ctx, asked: &Asked, wanted: bool, verdict: bool) -> Result<(), Refusal> {
        let Asked { client, shard, block, blocks, checked, .. } = *asked;
        let number = self.number_of(shard).ok_or(Refusal::UnknownShard)?;
        let slot = self.slots.live(number, shard).ok_or(Refusal::UnknownShard)?;
        if !is_in_range(slot, block, blocks) || u64::from(blocks) * BLOCK_BYTES as u64 > u64::from(PAYLOAD_BYTES_MAX) {
            return Err(Refusal::Invalid);
        }
        let table = if checked || wanted { self.cache.get(number) } else { None };
        let may_park = table.is_some() || self.parked < PARKED_MAX;
        if checked && !may_park {
            return Err(Refusal::Busy);
        }
        let wanted = wanted && may_park;
        let from = u64::from(slot.header_blocks) + u64::from(block);
        let wants_table = (checked || wanted) && table.is_none();
        let read = ShardRead { client, shard, number, block, blocks, checked, wanted, verdict, table };
        self.parts.read(ctx, slot.extents.slice(from, u64::from(blocks)), Io::ShardRead(read));
        if wants_table {
            self.load_table(ctx, number, shard, client.whose);
        }
        Ok(())
    }

    /// Reads the header area of a shard for its checksums, once for all that wait.
    fn load_table(&mut self, ctx: &mut Ctx, number: u32, shard: ShardId, whose: Whose) {
        if let std::collections::btree_map::Entry::Vacant(vacant) = self.loading.entry(shard) {
            vacant.insert(Vec::new());
            let slot = self.slots.live(number, shard).expect("its caller has seen it");
            // Who comes next may wait for it more urgently.
            let whose = Whose { urgency: Urgency::Sparse, ..whose };
            self.parts.read(ctx, header_extents(slot), Io::ShardTable { number, shard, whose });
        }
    }

    pub fn on_read(&mut self, ctx: &mut Ctx, read: ShardRead, bytes: Option<Buf>) {
        let Some(bytes) = bytes else { return self.refuse_damaged(ctx, &read) };
        if let Some(table) = read.table.clone() {
            return self.answer(ctx, &read, &table, bytes);
        }
        if self.slots.live(read.number, read.shard).is_none() {
            return ctx.refuse(read.client, Refusal::UnknownShard);
        }
        if !read.checked && !read.wanted {
            return ctx.reply_with(read.client, Reply::Shard { blocks: read.blocks }, vec![bytes]);
        }
        if let Some(table) = self.cache.get(read.number) {
            return self.answer(ctx, &read, &table, bytes);
        }
        if !ctx.has_io_room() {
            return match read.checked {
                true => ctx.refuse(read.client, Refusal::Busy),
                false => ctx.reply_with(read.client, Reply::Shard { blocks: read.blocks }, vec![bytes]),
            };
        }
        self.load_table(ctx, read.number, read.shard, read.client.whose);
        self.parked += 1;
        self.loading.get_mut(&read.shard).expect("being loaded").push((read, bytes));
    }

    pub fn on_table(&mut self, ctx: &mut Ctx, number: u32, shard: ShardId, bytes: Option<Buf>) {
        let parked = self.loading.remove(&shard).expect("one load a shard");
        self.parked -= parked.len();
        let table: Option<Table> = self.slots.live(number, shard).and_then(|slot| {
            let header = ShardHeader::decode(shard, &bytes?).ok()?;
            (header.block_crcs.len() == slot.data_blocks() as usize).then(|| header.block_crcs.into())
        });
        if let Some(table) = &table {
            self.cache.insert(number, Table::clone(table));
        }
        for (read, bytes) in parked {
            match &table {
                Some(table) => self.answer(ctx, &read, table, bytes),
                None => self.answer_unmatched(ctx, &read, bytes),
            }
        }
    }

    fn answer(&self, ctx: &mut Ctx, read: &ShardRead, table: &Table, bytes: Buf) {
        let crcs = &table[read.block as usize..(read.block + read.blocks) as usize];
        if !blocks_match(crcs, &bytes) {
            return self.answer_unmatched(ctx, read, bytes);
        }
        if read.wanted && self.slots.live(read.number, read.shard).is_some() {
            let at = ShardAt { slot: ctx.slot, shard: read.shard };
            ctx.fresh.push(Fresh { at, block: read.block, crcs: crcs.to_vec(), bytes: bytes.clone() });
        }
        match read.verdict {
            true => ctx.reply(read.client, Reply::Done),
            false => ctx.reply_with(read.client, Reply::Shard { blocks: read.blocks }, vec![bytes]),
        }
    }

    /// Bytes that were compared with checksums and differ, or could not be: who waived that takes them all the same.
    fn answer_unmatched(&self, ctx: &mut Ctx, read: &ShardRead, bytes: Buf) {
        match read.checked {
            true => self.refuse_damaged(ctx, read),
            false => ctx.reply_with(read.client, Reply::Shard { blocks: read.blocks }, vec![bytes]),
        }
    }

    fn refuse_damaged(&self, ctx: &mut Ctx, read: &ShardRead) {
        self.refuse_bad(ctx, read.client, read.number, read.shard);
    }

    /// Bytes that don't match: damage, unless the shard was deleted and its space used while they were read.
    fn refuse_bad(&self, ctx: &mut Ctx, client: Client, number: u32, shard: ShardId) {
        if self.slots.live(number, shard).is_none() {
            return ctx.refuse(client, Refusal::UnknownShard);
        }
        ctx.note(Notice::ShardDamaged { device: ctx.device, shard });
        ctx.refuse(client, Refusal::Checksum);
    }

    pub fn read_header(&mut self, ctx: &mut Ctx, client: Client, shard: ShardId) -> Result<(), Refusal> {
        let number = self.number_of(shard).ok_or(Refusal::UnknownShard)?;
        let slot = self.slots.live(number, shard).ok_or(Refusal::UnknownShard)?;
        self.parts.read(ctx, header_extents(slot), Io::HeaderRead(HeaderRead { client, shard, number }));
        Ok(())
    }

    pub fn on_header(&mut self, ctx: &mut Ctx, read: HeaderRead, bytes: Option<Buf>) {
        match bytes {
            Some(bytes) if ShardHeader::decode(read.shard, &bytes).is_ok() => {
                ctx.reply_with(read.client, Reply::ShardHeader, vec![bytes]);
            }
            _ => self.refuse_bad(ctx, read.client, read.number, read.shard),
        }
    }

    /// A part of an operation on a shard is done; see [`Parts::on_part`].
    pub fn on_part(
        &mut self,
        whole: Token,
        part: u8,
        result: Result<Buf, DiskError>,
    ) -> Option<(Io, Result<Buf, DiskError>)> {
        self.parts.on_part(whole, part, result)
    }

    /// Clients that wait for writes of this module, in order.
    pub fn waiting_clients(&self) -> Vec<Client> {
        let parked = self.loading.values().flatten().map(|(read, _)| read.client);
        let split = self.parts.iter().filter_map(client_of);
        self.puts.values().flat_map(|p| p.clients.iter().copied()).chain(parked).chain(split).collect()
    }

    /// Extents of shards are disjoint, and with the free space they are the whole area.
    pub fn verify(&self) {
        let mut extents: Vec<Extent> = self.slots.iter().flat_map(|(_, held)| held.extents.iter().copied()).collect();
        extents.extend(self.lent.iter().map(|(first, count)| Extent { first: *first, count: *count }));
        extents.sort();
        assert!(extents.windows(2).all(|w| w[0].end() <= w[1].first), "extents overlap");
        let used: u64 = extents.iter().map(|e| e.count).sum();
        assert_eq!(used + self.allocator.free_blocks(), self.superblock.areas.data_blocks, "space is lost");
        self.slots.verify();
    }
}

fn is_in_range(held: &StoredShard, block: u32, blocks: u32) -> bool {
    blocks > 0 && block.checked_add(blocks).is_some_and(|end| end <= held.data_blocks())
}

fn header_extents(held: &StoredShard) -> impl Iterator<Item = Extent> {
    held.extents.slice(0, u64::from(held.header_blocks))
}

impl ShardRead {
    pub fn client(&self) -> Client {
        self.client
    }
}

impl HeaderRead {
    pub fn client(&self) -> Client {
        self.client
    }
}
