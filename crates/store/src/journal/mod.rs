//! The journal of one device: every log entry, ledger state and promise goes through it, in batches.
//!
//! Role: the device queues records; the journal packs them into batches ([`commit`]), tells the device what has become
//! durable, and gets space back ([`reclaim`]). At start [`scan`] finds every batch by itself and [`recover`] makes the
//! index of them; [`units`] knows which unit is used for what.
//!
//! A batch is one durable write that never crosses a unit. Several are in flight together and complete in any order:
//! entries are acknowledged with their own batch, since the scan finds each batch independently; control records take
//! effect, and are answered, when every batch up to theirs is durable (the watermark).
//!
//! Invariants:
//! 1. A batch is written only to a unit whose generation a completed table write has recorded.
//! 2. Control records take effect in the order of their batches.
//! 3. The first batch in `flights` is the one after the watermark.
//! 4. A unit is given up only when nothing lives in it, when the records that replace its control records are below the
//!    watermark, and when the trim point of each of its ledgers is durable as far as entries of this unit were trimmed: a
//!    leg that restarts never says "sound, and I lack it" of what it held and trimmed.
//!
//! Limits: [`QUEUE_RECORDS_MAX`], [`QUEUE_BYTES_MAX`], [`BATCH_WINDOW_MAX`]; a full queue is `Busy`, a full journal
//! `NoSpace` for entries; [`RESERVE_UNITS`] stay free for promises, creations, tombstones and moves.

pub(crate) mod commit;
pub(crate) mod reclaim;
pub(crate) mod recover;
pub(crate) mod scan;
pub(crate) mod units;

use crate::io::Client;
use crate::journal::commit::{BATCH_BYTES_MAX, BATCH_RECORDS_MAX, Window};
use crate::journal::units::{CONTROL_BYTES, Units};
use crate::ledgers::{ControlKey, Place};
use crate::line::HostTag;
use holdfast_base::{BLOCK_BYTES, BlockCrc, Buf, Epoch, Instant, LedgerId, Lsn, Token, VolumeId};
use holdfast_format::disk::{BatchHeader, EntryRecord};
use std::collections::VecDeque;

/// Records waiting for a batch: some milliseconds' worth at the highest rate seen.
pub(crate) const QUEUE_RECORDS_MAX: usize = 8192;

/// Payload waiting for a batch, or in one that is in flight.
pub(crate) const QUEUE_BYTES_MAX: u64 = 64 << 20;

/// How far batches may run ahead of the watermark. Holes of a crash lie in this window: they fit the bits of a unit's
/// table entry.
pub(crate) const BATCH_WINDOW_MAX: u64 = 64;

/// Units that entries leave free: one for control records, one for moving what lives in the next victim.
pub(crate) const RESERVE_UNITS: u32 = 2;

/// What happens once a control record counts.
#[derive(Debug)]
pub(crate) enum Then {
    Nothing,
    Done(Client),
    /// Answer a fence with what is held now.
    Fenced {
        client: Client,
        epoch: Epoch,
    },
    /// One part of a request with several.
    Join(Token),
    /// It was moved here from this unit.
    Moved {
        unit: u32,
    },
    /// It tells what the opening found; until all are durable nothing is given up.
    Recovered,
}

/// What room in the journal is asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Use {
    /// Entries of clients leave the reserve, also where the open unit would have room: what they fill is not easily won
    /// back.
    Entry,
    /// Promises, creations, tombstones.
    Control,
    /// All that lives in a unit that can be freed then.
    Move { records: usize },
}

/// An entry on its way into the journal.
#[derive(Debug)]
pub(crate) struct EntryIn {
    pub volume: VolumeId,
    pub ledger: LedgerId,
    pub lsn: Lsn,
    pub epoch: Epoch,
    pub acked: Lsn,
    pub header: Vec<u8>,
    pub crcs: Vec<BlockCrc>,
    pub payload: Buf,
    pub source: Source,
}

/// Where an entry came from.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Source {
    Client(Client),
    /// Moved from another unit.
    Unit(Place),
}

#[derive(Debug)]
pub(crate) enum Queued {
    Entry(EntryIn),
    /// The subject's state at the time when the batch is built.
    Control {
        key: ControlKey,
        then: Then,
    },
    /// Records of the two kinds above that share a batch: all of them become durable, or none.
    Group(Vec<Queued>),
}

/// A record in a batch in flight.
#[derive(Debug)]
pub(crate) enum Flown {
    Entry { volume: VolumeId, ledger: LedgerId, lsn: Lsn, acked: Lsn, place: Place, source: Source },
    Control { key: ControlKey, then: Then, trimmed: Lsn, deleted: bool },
}

/// A batch in flight, or complete and waiting for an earlier one.
#[derive(Debug)]
pub(crate) struct Flight {
    pub seq: u64,
    pub unit: u32,
    pub watermark: u64,
    pub bytes: u64,
    pub submitted: Instant,
    pub is_done: bool,
    pub records: Vec<Flown>,
}

pub(crate) struct Journal {
    pub units: Units,
    pub queue: VecDeque<Queued>,
    queue_bytes: u64,
    /// In order of `seq`, without gaps.
    pub flights: VecDeque<Flight>,
    writes_in_flight: usize,
    flight_bytes: u64,
    pub next_seq: u64,
    control_bits: u64,
    /// Highest watermark that a durable batch carries.
    told_watermark: u64,
    /// Last batch with records in it.
    last_content_seq: u64,
    confirm_at: Option<Instant>,
    window: Window,
    /// Upper bound of the units that the queue will open, and what it leaves in the last of them.
    planned_units: u32,
    planned_left: u64,
    /// Records of the opening that are not durable yet.
    pub recovery_moves: u32,
    /// The unit being emptied.
    pub compacting: Option<u32>,
    /// Something happened that may let a unit go.
    pub reclaim_due: bool,
    /// Records are due, and no unit is open that has room for them.
    waits_for_unit: bool,
    spare: Vec<Vec<Flown>>,
}

/// Blocks that a record takes in a batch of its own.
fn lone_batch_bytes(record_bytes: usize, payload_bytes: usize) -> u64 {
    (BatchHeader::head_bytes(record_bytes) + payload_bytes) as u64
}

impl Queued {
    /// Bytes of records and of payload, at most.
    fn bytes_max(&self) -> (usize, usize) {
        match self {
            Queued::Entry(e) => (EntryRecord::encoded_bytes(e.header.len(), e.crcs.len()), e.payload.len()),
            Queued::Control { .. } => (CONTROL_BYTES as usize, 0),
            Queued::Group(records) => records.iter().map(Queued::bytes_max).fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1)),
        }
    }

    /// What it counts for in the queue's bound: a batch of its own for every record.
    fn accounted_bytes(&self) -> u64 {
        match self {
            Queued::Entry(e) => Journal::entry_bytes(e.header.len(), e.crcs.len()),
            Queued::Control { .. } => BLOCK_BYTES as u64,
            Queued::Group(records) => records.iter().map(Queued::accounted_bytes).sum(),
        }
    }

    /// Whose entry it is; none of what the node itself has to say, and of promises and states.
    fn host(&self) -> Option<HostTag> {
        match self {
            Queued::Entry(EntryIn { source: Source::Client(client), .. }) => Some(client.whose.host),
            _ => None,
        }
    }

    fn record_count(&self) -> usize {
        if let Queued::Group(records) = self { records.len() } else { 1 }
    }
}

impl Journal {
    pub fn new(units: Units, next_seq: u64) -> Journal {
        assert!(next_seq > 0, "batches are numbered from 1");
        Journal {
            units,
            queue: VecDeque::new(),
            queue_bytes: 0,
            flights: VecDeque::new(),
            writes_in_flight: 0,
            flight_bytes: 0,
            next_seq,
            control_bits: u64::MAX,
            told_watermark: next_seq - 1,
            last_content_seq: 0,
            confirm_at: None,
            window: Window::default(),
            planned_units: 0,
            planned_left: 0,
            recovery_moves: 0,
            compacting: None,
            reclaim_due: true,
            waits_for_unit: false,
            spare: Vec::new(),
        }
    }

    /// Every batch up to this one is durable, or known not to exist.
    pub fn watermark(&self) -> u64 {
        self.flights.front().map_or(self.next_seq, |f| f.seq) - 1
    }

    /// Whether an entry could ever be written, however empty the journal is.
    pub fn can_hold(&self, header_bytes: usize, blocks: usize) -> bool {
        blocks <= usize::from(u16::MAX)
            && Journal::entry_bytes(header_bytes, blocks) <= u64::from(self.units.unit_bytes())
    }

    pub fn is_queue_full(&self) -> bool {
        self.queue.len() >= QUEUE_RECORDS_MAX || self.queue_bytes + self.flight_bytes >= QUEUE_BYTES_MAX
    }

    /// Where the plan stands before another record: units to open, and room left in the last.
    fn plan(&self) -> (u32, u64) {
        if self.queue.is_empty() {
            (0, u64::from(self.units.open_left()))
        } else {
            (self.planned_units, self.planned_left)
        }
    }

    /// Plans room for `bytes` and says how many units the queue may open then. Records are planned as batches of their
    /// own: what is packed together never needs more.
    fn planned_with(&self, bytes: u64) -> (u32, u64) {
        let (units, left) = self.plan();
        if bytes <= left { (units, left - bytes) } else { (units + 1, u64::from(self.units.unit_bytes()) - bytes) }
    }

    /// What an entry takes at most.
    pub fn entry_bytes(header_bytes: usize, blocks: usize) -> u64 {
        lone_batch_bytes(EntryRecord::encoded_bytes(header_bytes, blocks), blocks * BLOCK_BYTES)
    }

    /// The same of what is queued, if it goes in this order.
    fn plan_of(&self, places: impl Iterator<Item = usize>) -> (u32, u64) {
        let unit_bytes = u64::from(self.units.unit_bytes());
        places.fold((0, u64::from(self.units.open_left())), |(units, left), at| {
            let (records, payload) = self.queue[at].bytes_max();
            let bytes = lone_batch_bytes(records, payload);
            if bytes <= left { (units, left - bytes) } else { (units + 1, unit_bytes - bytes) }
        })
    }

    /// Whether `bytes` have room, with what this use must leave.
    pub fn has_room(&self, bytes: u64, what_for: Use) -> bool {
        let (units, _) = self.planned_with(bytes.min(u64::from(self.units.unit_bytes())));
        let leave = match what_for {
            Use::Entry => RESERVE_UNITS,
            // The last unit is for moves that one batch holds: a crash leaves all of it or nothing, and so a free unit.
            Use::Move { records } if bytes <= self.group_bytes_max() && records <= BATCH_RECORDS_MAX => 0,
            Use::Control | Use::Move { .. } => 1,
        };
        units + leave <= self.units.ahead()
    }

    pub fn push(&mut self, now: Instant, record: Queued) {
        let (records, payload) = record.bytes_max();
        (self.planned_units, self.planned_left) = self.planned_with(lone_batch_bytes(records, payload));
        self.queue_bytes += record.accounted_bytes();
        if self.queue.is_empty() {
            self.window.opened = Some(now);
        }
        self.queue.push_back(record);
    }

    /// Most that records of one group may take.
    pub fn group_bytes_max(&self) -> u64 {
        BATCH_BYTES_MAX.min(u64::from(self.units.unit_bytes()))
    }

    /// Used share of what entries may use, in 1/255.
    pub fn fill(&self) -> u8 {
        (self.units.used_bytes() * 255 / self.usable_bytes()).min(255) as u8
    }

    /// What entries may use.
    pub fn usable_bytes(&self) -> u64 {
        self.units.areas.journal_bytes() - u64::from(RESERVE_UNITS + 1) * u64::from(self.units.unit_bytes())
    }

    pub fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.flights.is_empty()
    }
}
