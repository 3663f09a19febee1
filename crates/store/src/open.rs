//! Opening a device: superblock, flush, tables, and all of the journal that is in use.
//!
//! ```text
//! superblocks ──both read──▶ flush ──done──▶ tables, slots ──unit table known──▶ units ──all read──▶ open
//! ```
//! The flush comes first: what a killed process left in the device's cache is about to be read and believed, so it must be
//! on media. Time is bounded by the journal and the slot table, and does not depend on how much the shards hold.
//!
//! Limits: [`READS_MAX`] reads in flight. Faults: one copy of a superblock or unit table is enough; a large read that fails
//! is repeated block by block, and only blocks that can't be read count as damaged; anything else ends the opening.

use crate::api::{DiskError, FailReason, Notice};
use crate::io::{Ctx, Io};
use crate::journal::recover::recover;
use crate::journal::scan::{ScannedBatch, scan_unit};
use crate::serving::Serving;
use crate::shards::Shards;
use holdfast_base::{BLOCK_BYTES, Buf, BufMut, Instant};
use holdfast_format::disk::{SUPERBLOCK_BYTES, Superblock, UnitTable};
use std::collections::{BTreeMap, VecDeque};

/// Reads in flight: with units of 4 MiB that is as much memory as the journal's own queue may take.
const READS_MAX: usize = 8;

/// Bytes of the slot table read at once.
const SLOTS_CHUNK_BYTES: u64 = 1 << 20;

const BLOCK: u64 = BLOCK_BYTES as u64;

/// One step: what is read, or done.
#[derive(Clone, Copy, Debug)]
enum Step {
    Superblock {
        copy: usize,
    },
    Flush,
    Table {
        copy: usize,
    },
    Slots {
        first_block: u32,
        blocks: u32,
    },
    Unit {
        unit: u32,
    },
    /// One block of a unit that could not be read in one piece.
    UnitBlock {
        unit: u32,
        at: u32,
    },
}

/// A unit being put together block by block.
struct Pieces {
    bytes: BufMut,
    missing: u32,
}

/// The two copies of something: not yet read, unreadable, or there.
type Copies<T> = [Option<Option<T>>; 2];

pub(crate) struct Opening {
    size_bytes: u64,
    superblocks: Copies<Superblock>,
    chosen: Option<Superblock>,
    tables: Copies<UnitTable>,
    /// The one that counts, and which copy it came from.
    table: Option<(UnitTable, usize)>,
    shards: Option<Box<Shards>>,
    damaged_slots: u64,
    batches: Vec<ScannedBatch>,
    pieces: BTreeMap<u32, Pieces>,
    todo: VecDeque<Step>,
    in_flight: BTreeMap<u32, Step>,
    next_step: u32,
    /// When a step was done last.
    pub progress_at: Instant,
}

/// How far an opening has come.
pub(crate) enum Progress {
    Going,
    /// The superblock is known: another slot may have the same device.
    Identified,
    Done(Box<Serving>),
}

impl Opening {
    pub fn start(ctx: &mut Ctx, size_bytes: u64) -> Result<Opening, FailReason> {
        if size_bytes < 4 * BLOCK {
            return Err(FailReason::NoSuperblock);
        }
        let mut opening = Opening {
            size_bytes,
            superblocks: [None, None],
            chosen: None,
            tables: [None, None],
            table: None,
            shards: None,
            damaged_slots: 0,
            batches: Vec::new(),
            pieces: BTreeMap::new(),
            todo: VecDeque::from([Step::Superblock { copy: 0 }, Step::Superblock { copy: 1 }]),
            in_flight: BTreeMap::new(),
            next_step: 0,
            progress_at: ctx.now,
        };
        opening.pump(ctx);
        Ok(opening)
    }

    pub fn superblock(&self) -> Option<&Superblock> {
        self.chosen.as_ref()
    }

    /// A read that fails is tried again, but for single blocks of what could not be read in one piece: there may be many.
    pub fn is_tried_again(&self, io: &Io) -> bool {
        let Io::Opening { step } = io else { return false };
        !matches!(self.in_flight.get(step), Some(Step::UnitBlock { .. } | Step::Slots { blocks: 1, .. }) | None)
    }

    fn chosen(&self) -> &Superblock {
        self.chosen.as_ref().expect("the superblock was read before")
    }

    fn pump(&mut self, ctx: &mut Ctx) {
        while self.in_flight.len() < READS_MAX {
            let Some(what) = self.todo.pop_front() else { break };
            let step = self.next_step;
            self.next_step += 1;
            self.in_flight.insert(step, what);
            let io = Io::Opening { step };
            match what {
                Step::Superblock { copy: 0 } => ctx.read(0, SUPERBLOCK_BYTES as u32, io),
                Step::Superblock { .. } => {
                    ctx.read(Superblock::second_offset(self.size_bytes), SUPERBLOCK_BYTES as u32, io);
                }
                Step::Flush => ctx.flush(io),
                Step::Table { copy } => {
                    let areas = &self.chosen().areas;
                    let len = areas.unit_table_bytes;
                    ctx.read(areas.unit_table_offset + copy as u64 * u64::from(len), len, io);
                }
                Step::Slots { first_block, blocks } => {
                    let offset = self.chosen().areas.slot_table_offset + u64::from(first_block) * BLOCK;
                    ctx.read(offset, blocks * BLOCK_BYTES as u32, io);
                }
                Step::Unit { unit } => ctx.read(self.unit_offset(unit), self.chosen().areas.unit_bytes, io),
                Step::UnitBlock { unit, at } => {
                    ctx.read(self.unit_offset(unit) + u64::from(at), BLOCK_BYTES as u32, io);
                }
            }
        }
    }

    fn unit_offset(&self, unit: u32) -> u64 {
        let areas = &self.chosen().areas;
        areas.journal_offset + u64::from(unit) * u64::from(areas.unit_bytes)
    }

    pub fn on_disk(
        &mut self,
        ctx: &mut Ctx,
        step: u32,
        result: Result<Buf, DiskError>,
    ) -> Result<Progress, FailReason> {
        let mut progress = Progress::Going;
        self.progress_at = ctx.now;
        match self.in_flight.remove(&step).expect("a step completes once") {
            Step::Superblock { copy } => {
                self.superblocks[copy] = Some(result.ok().and_then(|b| Superblock::decode(&b).ok()));
                if self.superblocks.iter().all(Option::is_some) {
                    self.choose_superblock(ctx)?;
                    progress = Progress::Identified;
                }
            }
            Step::Flush => {
                result.map_err(FailReason::Flush)?;
                self.on_flushed(ctx);
            }
            Step::Table { copy } => {
                let device = self.chosen().device;
                self.tables[copy] = Some(result.ok().and_then(|b| UnitTable::decode(device, &b).ok()));
                if self.tables.iter().all(Option::is_some) {
                    self.choose_table()?;
                }
            }
            Step::Slots { first_block, blocks } => self.on_slots(first_block, blocks, result.ok()),
            Step::Unit { unit } => match result {
                Ok(bytes) => self.scan(unit, &bytes),
                Err(_) => self.read_in_pieces(unit),
            },
            Step::UnitBlock { unit, at } => self.on_unit_block(unit, at, result.ok()),
        }
        self.pump(ctx);
        if self.in_flight.is_empty() {
            return Ok(Progress::Done(Box::new(self.finish(ctx))));
        }
        Ok(progress)
    }

    fn choose_superblock(&mut self, ctx: &mut Ctx) -> Result<(), FailReason> {
        let copies = self.superblocks.iter().flatten().flatten();
        let superblock = *copies.max_by_key(|s| s.sequence).ok_or(FailReason::NoSuperblock)?;
        if superblock.grid != ctx.config.grid {
            return Err(FailReason::OtherGrid(superblock.grid));
        }
        if superblock.node != ctx.config.node {
            return Err(FailReason::OtherNode(superblock.node));
        }
        if superblock.size_bytes > self.size_bytes {
            return Err(FailReason::Shrunk);
        }
        self.chosen = Some(superblock);
        self.shards = Some(Box::new(Shards::new(superblock, ctx.config.shard_table_cache_bytes)));
        self.todo.push_back(Step::Flush);
        Ok(())
    }

    fn on_flushed(&mut self, ctx: &mut Ctx) {
        ctx.device = self.chosen().device;
        self.todo.extend([Step::Table { copy: 0 }, Step::Table { copy: 1 }]);
        let blocks = self.chosen().areas.slot_table_bytes() / BLOCK;
        let chunk = SLOTS_CHUNK_BYTES / BLOCK;
        let chunks = (0..blocks).step_by(chunk as usize);
        let step = |at: u64| Step::Slots { first_block: at as u32, blocks: chunk.min(blocks - at) as u32 };
        self.todo.extend(chunks.map(step));
    }

    fn choose_table(&mut self) -> Result<(), FailReason> {
        let unit_count = self.chosen().areas.unit_count as usize;
        let copies = self.tables.iter_mut().enumerate().filter_map(|(copy, t)| Some((t.take().flatten()?, copy)));
        let fitting = copies.filter(|(t, _)| t.units.len() == unit_count);
        let (table, copy) = fitting.max_by_key(|(t, _)| t.sequence).ok_or(FailReason::NoUnitTable)?;
        let in_use = (0..unit_count as u32).filter(|u| table.units[*u as usize].generation > 0);
        self.todo.extend(in_use.map(|unit| Step::Unit { unit }));
        self.table = Some((table, copy));
        Ok(())
    }

    fn on_slots(&mut self, first_block: u32, blocks: u32, bytes: Option<Buf>) {
        let shards = self.shards.as_mut().expect("made with the superblock");
        match bytes {
            Some(bytes) => self.damaged_slots += shards.load(first_block, &bytes),
            // Shards of a block that can't be read don't exist; its slots are used again.
            None if blocks == 1 => self.damaged_slots += shards.load_unreadable(first_block),
            None => {
                let one = |block: u32| Step::Slots { first_block: block, blocks: 1 };
                self.todo.extend((first_block..first_block + blocks).map(one));
            }
        }
    }

    fn scan(&mut self, unit: u32, bytes: &[u8]) {
        let (table, _) = self.table.as_ref().expect("units are read after the table");
        let generation = table.units[unit as usize].generation;
        self.batches.extend(scan_unit(self.chosen().device, unit, generation, bytes));
    }

    fn read_in_pieces(&mut self, unit: u32) {
        let unit_bytes = self.chosen().areas.unit_bytes;
        let missing = unit_bytes / BLOCK_BYTES as u32;
        self.pieces.insert(unit, Pieces { bytes: BufMut::zeroed(unit_bytes as usize), missing });
        let blocks = (0..unit_bytes).step_by(BLOCK_BYTES);
        self.todo.extend(blocks.map(|at| Step::UnitBlock { unit, at }));
    }

    fn on_unit_block(&mut self, unit: u32, at: u32, bytes: Option<Buf>) {
        let pieces = self.pieces.get_mut(&unit).expect("it is being put together");
        if let Some(bytes) = bytes {
            pieces.bytes[at as usize..at as usize + BLOCK_BYTES].copy_from_slice(&bytes);
        }
        pieces.missing -= 1;
        if pieces.missing == 0 {
            let pieces = self.pieces.remove(&unit).expect("just seen");
            self.scan(unit, &pieces.bytes);
        }
    }

    fn finish(&mut self, ctx: &mut Ctx) -> Serving {
        let superblock = *self.chosen();
        let (table, copy) = self.table.take().expect("the table was read");
        let stops_at_hole = ctx.config.mutations.scan_stops_at_hole();
        let batches = std::mem::take(&mut self.batches);
        let found = recover(superblock.device, superblock.areas, (&table, copy), batches, stops_at_hole);
        let mut shards = self.shards.take().expect("made with the superblock");
        self.damaged_slots += shards.finish_load();
        if self.damaged_slots > 0 {
            ctx.note(Notice::SlotsDamaged { device: superblock.device, count: self.damaged_slots });
        }
        let second = Superblock::second_offset(superblock.size_bytes);
        for (copy, read) in self.superblocks.iter().enumerate() {
            // The second copy of a device that has grown since is not where it was looked for.
            let was_sought = copy == 0 || Superblock::second_offset(self.size_bytes) == second;
            if was_sought && read.flatten() != Some(superblock) {
                let offset = if copy == 0 { 0 } else { second };
                let bytes = Buf::copy_from(&superblock.encode());
                ctx.write(offset, vec![bytes], true, Io::SuperblockRepair);
            }
        }
        Serving::new(ctx, superblock, found, *shards)
    }
}
