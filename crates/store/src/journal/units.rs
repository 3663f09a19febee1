//! Units of the journal: which are in use, what lives in each, and the table that says so on disk.
//!
//! ```text
//!          table written         opened            full             nothing lives there     table written
//! Free ───── Taking ───── Next ────────── Open ────────── Closed ─────────────────── Dead ───────────── Free
//!                                                                     a Dead unit may be taken again at once ↑ Taking
//! ```
//!
//! Invariants:
//! 1. A unit is written only under a generation that a completed table write gave it: the table's two copies are written
//!    one after the other, so that one of them can always be read, and no use of a unit is ever forgotten.
//! 2. One copy of the table can always be read: the first write after a start goes to the copy that was not relied on.
//! 3. What a unit held counts as held until a completed table write has dropped it.
//!
//! Limits: one table write in flight; one unit taken in advance.

use crate::ledgers::{ControlKey, LedgerKey, Place};
use holdfast_base::{Buf, BufMut, DeviceId, Lsn};
use holdfast_format::disk::{Areas, UnitEntry, UnitTable};
use std::collections::{BTreeMap, BTreeSet};

/// Bytes that a control record takes at most: a ledger's state with as many legs as one may have.
pub(crate) const CONTROL_BYTES: u64 = 280;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum UnitState {
    Free,
    /// The table write in flight gives it this generation; until then its former contents count.
    Taking {
        generation: u64,
    },
    Next,
    Open,
    Closed,
    Dead,
}

#[derive(Debug)]
pub(crate) struct Unit {
    pub state: UnitState,
    pub entry: UnitEntry,
    pub live_entries: u32,
    pub live_bytes: u64,
    /// Live entries that can't be read, and so can't be moved either.
    pub damaged_entries: u32,
    /// Ledgers of which it holds entries or records, with the largest LSN among the entries.
    pub ledgers: BTreeMap<LedgerKey, Lsn>,
    /// Subjects whose latest durable record lies here.
    pub controls: BTreeSet<ControlKey>,
    /// Batches not yet below the watermark.
    pub flights: u32,
    /// Reads that expect its present contents.
    pub readers: u32,
    /// Records on their way from here to the journal's tail.
    pub moves: u32,
    /// Reading all of it failed: it can't be compacted.
    pub is_unreadable: bool,
    /// It lacks batches, and the ledgers' records don't all say so yet.
    pub is_evidence: bool,
}

impl Unit {
    fn new(entry: UnitEntry, state: UnitState) -> Unit {
        Unit {
            state,
            entry,
            live_entries: 0,
            live_bytes: 0,
            damaged_entries: 0,
            ledgers: BTreeMap::new(),
            controls: BTreeSet::new(),
            flights: 0,
            readers: 0,
            moves: 0,
            is_unreadable: false,
            is_evidence: false,
        }
    }

    pub fn add_live(&mut self, place: &Place) {
        self.live_entries += 1;
        self.live_bytes += place.live_bytes();
        self.damaged_entries += u32::from(place.damaged);
    }

    pub fn drop_live(&mut self, place: &Place) {
        assert!(self.live_entries > 0 && self.live_bytes >= place.live_bytes(), "an entry dies once");
        self.live_entries -= 1;
        self.live_bytes -= place.live_bytes();
        self.damaged_entries -= u32::from(place.damaged);
    }

    /// Whether nothing is going on that needs the unit as it is, live contents apart.
    pub fn is_quiet(&self) -> bool {
        let is_used = self.flights > 0 || self.readers > 0 || self.moves > 0;
        self.state == UnitState::Closed && !is_used && !self.is_evidence
    }

    /// What moving all that lives here would write.
    pub fn move_bytes(&self) -> u64 {
        self.live_bytes + self.controls.len() as u64 * CONTROL_BYTES
    }

    fn may_be_taken(&self) -> bool {
        matches!(self.state, UnitState::Free | UnitState::Dead)
    }
}

struct TableWrite {
    bytes: Buf,
    /// Both copies are written one after the other.
    second: bool,
    taking: Option<u32>,
    /// Units that this write drops.
    dropping: Vec<u32>,
}

pub(crate) struct Units {
    pub device: DeviceId,
    pub areas: Areas,
    pub units: Vec<Unit>,
    pub open: Option<u32>,
    /// First free byte of the open unit.
    pub open_at: u32,
    /// Taken in advance, so that no batch waits for the table.
    pub next: Option<u32>,
    next_generation: u64,
    table_sequence: u64,
    /// The copy that is written first: the one that was not relied on at start, so that a crash never harms both.
    first_copy: u64,
    writing: Option<TableWrite>,
    /// Free and dead units.
    pub available: u32,
}

/// What a completed step of a table write asks for.
pub(crate) enum TableStep {
    /// The second copy is still to be written.
    Write { offset: u64, bytes: Buf },
    /// The write is complete; these units' former contents are gone.
    Done { dropped: Vec<u32> },
}

impl Units {
    /// From the table as it was read from `good_copy`; everything in use is closed until the journal says more.
    pub fn new(device: DeviceId, areas: Areas, table: &UnitTable, good_copy: usize) -> Units {
        assert!(good_copy < 2, "a table has two copies");
        assert_eq!(table.units.len(), areas.unit_count as usize, "the table lists every unit");
        let state = |e: &UnitEntry| if e.generation == 0 { UnitState::Free } else { UnitState::Closed };
        let units: Vec<Unit> = table.units.iter().map(|e| Unit::new(*e, state(e))).collect();
        let available = units.iter().filter(|u| u.may_be_taken()).count() as u32;
        Units {
            device,
            areas,
            units,
            open: None,
            open_at: 0,
            next: None,
            next_generation: table.next_generation,
            table_sequence: table.sequence,
            first_copy: 1 - good_copy as u64,
            writing: None,
            available,
        }
    }

    pub fn get(&self, unit: u32) -> &Unit {
        &self.units[unit as usize]
    }

    pub fn get_mut(&mut self, unit: u32) -> &mut Unit {
        &mut self.units[unit as usize]
    }

    pub fn unit_bytes(&self) -> u32 {
        self.areas.unit_bytes
    }

    /// Offset on the device.
    pub fn offset(&self, unit: u32, at: u32) -> u64 {
        self.areas.journal_offset + u64::from(unit) * u64::from(self.areas.unit_bytes) + u64::from(at)
    }

    pub fn open_left(&self) -> u32 {
        if self.open.is_some() { self.areas.unit_bytes - self.open_at } else { 0 }
    }

    /// Units beyond the open one that can be written without anything being freed first.
    pub fn ahead(&self) -> u32 {
        let taken = self.next.is_some() || self.writing.as_ref().is_some_and(|w| w.taking.is_some());
        self.available + u32::from(taken)
    }

    pub fn used_bytes(&self) -> u64 {
        let empty = self.ahead() + u32::from(self.open.is_some());
        let full = self.units.len() as u64 - u64::from(empty);
        full * u64::from(self.areas.unit_bytes) + if self.open.is_some() { u64::from(self.open_at) } else { 0 }
    }

    pub fn mark_dead(&mut self, unit: u32) {
        let u = self.get_mut(unit);
        assert!(u.is_quiet() && u.live_entries == 0, "unit {unit} dies with nothing in it: {u:?}");
        u.state = UnitState::Dead;
        self.available += 1;
    }

    /// Closes the open unit and opens the one taken in advance; false where there is none yet.
    pub fn advance(&mut self, first_seq: u64) -> bool {
        let Some(next) = self.next else { return false };
        if let Some(open) = self.open.take() {
            let unit = self.get_mut(open);
            unit.state = UnitState::Closed;
            if unit.flights == 0 {
                unit.entry.end_seq = first_seq;
            }
        }
        let unit = self.get_mut(next);
        assert!(unit.state == UnitState::Next && unit.ledgers.is_empty(), "the next unit is taken and empty");
        unit.state = UnitState::Open;
        unit.entry.first_seq = first_seq;
        self.open = Some(next);
        self.open_at = 0;
        self.next = None;
        true
    }

    /// Room in the open unit for one batch.
    pub fn take_room(&mut self, batch_bytes: u32) -> (u32, u32) {
        assert!(batch_bytes <= self.open_left(), "a batch never crosses a unit");
        let (unit, at) = (self.open.expect("a unit is open"), self.open_at);
        self.open_at += batch_bytes;
        self.get_mut(unit).flights += 1;
        (unit, at)
    }

    /// A batch of the unit, and all before it, are durable. A closed unit's range is told to the table with its last.
    pub fn note_end(&mut self, unit: u32, end_seq: u64) {
        let u = self.get_mut(unit);
        u.flights -= 1;
        if u.flights == 0 && u.state == UnitState::Closed {
            u.entry.end_seq = end_seq;
        }
    }

    pub fn is_writing_table(&self) -> bool {
        self.writing.is_some()
    }

    /// Whether a table write would help the journal: there is no unit in advance, and one to be had.
    pub fn wants_table_write(&self) -> bool {
        self.writing.is_none() && self.next.is_none() && self.available > 0
    }

    /// Starts a table write that takes a unit in advance if it can; returns the first copy's place and bytes.
    pub fn start_table_write(&mut self, seq_floor: u64) -> (u64, Buf) {
        assert!(self.writing.is_none(), "one table write at a time");
        let taking = if self.next.is_none() { self.pick() } else { None };
        if let Some(unit) = taking {
            let generation = self.next_generation;
            self.next_generation += 1;
            self.get_mut(unit).state = UnitState::Taking { generation };
            self.available -= 1;
        }
        let dropping: Vec<u32> =
            (0..self.units.len() as u32).filter(|u| self.get(*u).state == UnitState::Dead).collect();
        self.table_sequence += 1;
        let table = UnitTable {
            sequence: self.table_sequence,
            next_generation: self.next_generation,
            seq_floor,
            units: self.units.iter().map(table_entry).collect(),
        };
        let mut bytes = BufMut::new(self.areas.unit_table_bytes as usize);
        table.encode_into(self.device, &mut bytes);
        let bytes = bytes.freeze();
        self.writing = Some(TableWrite { bytes: bytes.clone(), second: false, taking, dropping });
        (self.copy_offset(self.first_copy), bytes)
    }

    fn copy_offset(&self, copy: u64) -> u64 {
        self.areas.unit_table_offset + copy * u64::from(self.areas.unit_table_bytes)
    }

    /// The available unit whose last use is longest ago.
    fn pick(&self) -> Option<u32> {
        let of = |unit: u32| (self.get(unit).entry.generation, unit);
        (0..self.units.len() as u32).filter(|u| self.get(*u).may_be_taken()).min_by_key(|u| of(*u))
    }

    /// One copy is durable.
    pub fn on_table_written(&mut self) -> TableStep {
        let mut write = self.writing.take().expect("a table write is in flight");
        if !write.second {
            write.second = true;
            let bytes = write.bytes.clone();
            self.writing = Some(write);
            return TableStep::Write { offset: self.copy_offset(1 - self.first_copy), bytes };
        }
        let mut dropped = write.dropping;
        for unit in &dropped {
            self.get_mut(*unit).state = UnitState::Free;
        }
        if let Some(unit) = write.taking {
            let UnitState::Taking { generation } = self.get(unit).state else {
                panic!("unit {unit} is being taken");
            };
            self.get_mut(unit).entry = UnitEntry { generation, ..UnitEntry::default() };
            self.get_mut(unit).state = UnitState::Next;
            self.next = Some(unit);
            dropped.push(unit);
        }
        TableStep::Done { dropped }
    }

    /// What a dropped unit held, for the ledgers to be told.
    pub fn forget_contents(&mut self, unit: u32) -> BTreeMap<LedgerKey, Lsn> {
        let u = self.get_mut(unit);
        assert!(u.live_entries == 0 && matches!(u.state, UnitState::Free | UnitState::Next), "unit {unit} is empty");
        u.controls.clear();
        u.is_unreadable = false;
        std::mem::take(&mut u.ledgers)
    }
}

/// How the table lists a unit.
fn table_entry(unit: &Unit) -> UnitEntry {
    match unit.state {
        UnitState::Free | UnitState::Dead => UnitEntry::default(),
        UnitState::Taking { generation } => UnitEntry { generation, ..UnitEntry::default() },
        UnitState::Next | UnitState::Open | UnitState::Closed => unit.entry,
    }
}
