//! Reads of log entries, for recovery: from the index to places, from places to verified bytes.
//!
//! What lies close together is read in one piece: a log of small entries would otherwise take as many operations as it has.
//!
//! Limits: [`ENTRIES_MAX`] entries a reply; the requester goes on where the last one ended. Units with reads in flight
//! are not given up. Faults: an entry that can't be read, or does not match its checksums, is told as damaged, never
//! left out. Where a piece can't be read, each of its entries is read alone.

use crate::io::{Client, Ctx, IO_RESERVE, Io};
use crate::journal::units::Units;
use crate::ledgers::{Ledger, LedgerKey, Place};
use holdfast_base::{BLOCK_BYTES, Buf, DeviceId, Lsn, Token};
use holdfast_format::disk::{JournalRecord, RecordPlace, blocks_match};
use holdfast_format::wire::LogEntry;
use std::collections::VecDeque;

/// Entries of one reply: up to two reads each.
const ENTRIES_MAX: usize = 256;

/// Damaged entries named in one reply.
const DAMAGED_MAX: usize = 4096;

/// Payload of one reply, however much is asked for, unless a single entry is larger.
const BYTES_MAX: u64 = 4 << 20;

/// Log reads of one device in flight.
pub(crate) const LOG_READS_MAX: usize = 64;

/// What is wanted is read in one piece if no more than this lies between.
const GAP_BYTES_MAX: u32 = 16 << 10;

/// What has to be read alone is read so many at a time. All log reads of a device together keep within its reserve of operations.
const ALONE_MAX: u32 = 8;

const _: () = assert!(ALONE_MAX as usize * LOG_READS_MAX < IO_RESERVE, "as many as fit");

/// One read of several entries is no longer than this.
const SPAN_BYTES_MAX: u32 = 1 << 20;

struct Wanted {
    lsn: Lsn,
    place: Place,
    generation: u64,
    /// Record and payload: a buffer, and the offset in the unit at which it starts.
    parts: [Option<(Buf, u32)>; 2],
}

/// Which part of which wanted entry.
type PartId = (u32, u8);

/// A range of a unit that is read in one piece, and what it is read for.
struct Span {
    unit: u32,
    from: u32,
    to: u32,
    of: Vec<PartId>,
}

pub(crate) struct LogRead {
    pub client: Client,
    pub key: LedgerKey,
    wanted: Vec<Wanted>,
    /// All reads that were started.
    spans: Vec<Span>,
    /// To be read alone, [`ALONE_MAX`] at a time: the piece that they were in can't be read.
    alone: VecDeque<PartId>,
    damaged: Vec<Lsn>,
    more: bool,
    outstanding: u32,
}

/// A finished read.
pub(crate) struct LogReply {
    pub entries: Vec<LogEntry>,
    pub payload: Vec<Buf>,
    pub damaged: Vec<Lsn>,
    pub more: bool,
    /// Found to be damaged only now.
    pub newly_damaged: Vec<(Lsn, Place)>,
}

fn down(at: u32) -> u32 {
    at / BLOCK_BYTES as u32 * BLOCK_BYTES as u32
}

fn up(at: u32) -> u32 {
    at.next_multiple_of(BLOCK_BYTES as u32)
}

/// The ranges of the unit that hold a record and its payload: one where they are close.
fn ranges(place: &Place) -> [Option<(u32, u32)>; 2] {
    let record = (down(place.record_at), up(place.record_at + place.record_bytes));
    if place.blocks == 0 {
        return [Some(record), None];
    }
    let payload = (place.payload_at, place.payload_at + u32::from(place.blocks) * BLOCK_BYTES as u32);
    assert!(payload.0 >= record.1, "payload follows the records");
    if payload.0 - record.1 <= GAP_BYTES_MAX {
        return [Some((record.0, payload.1)), None];
    }
    [Some(record), Some(payload)]
}

/// Reads for all that is wanted, in the order of the device.
fn spans_of(wanted: &[Wanted]) -> Vec<Span> {
    let mut pieces = Vec::with_capacity(wanted.len());
    for (i, wanted) in wanted.iter().enumerate() {
        for (half, range) in ranges(&wanted.place).into_iter().enumerate() {
            pieces.extend(range.map(|(from, to)| (wanted.place.unit, from, to, (i as u32, half as u8))));
        }
    }
    pieces.sort_unstable();
    let mut spans: Vec<Span> = Vec::new();
    for (unit, from, to, part) in pieces {
        match spans.last_mut() {
            Some(span)
                if span.unit == unit
                    && from <= span.to + GAP_BYTES_MAX
                    && to.max(span.to) - span.from <= SPAN_BYTES_MAX =>
            {
                span.to = span.to.max(to);
                span.of.push(part);
            }
            _ => spans.push(Span { unit, from, to, of: vec![part] }),
        }
    }
    spans
}

impl LogRead {
    /// Chooses the entries of a reply.
    pub fn plan(client: Client, key: LedgerKey, ledger: &Ledger, units: &Units, from: Lsn, bytes_max: u32) -> LogRead {
        let bytes_max = u64::from(bytes_max).min(BYTES_MAX);
        let start = ledger.entries.partition_point(|(lsn, _)| *lsn < from);
        let mut read = LogRead {
            client,
            key,
            wanted: Vec::new(),
            spans: Vec::new(),
            alone: VecDeque::new(),
            damaged: Vec::new(),
            more: false,
            outstanding: 0,
        };
        let mut bytes = 0;
        for (lsn, place) in ledger.entries.range(start..) {
            bytes += place.live_bytes();
            let is_first = read.wanted.is_empty() && read.damaged.is_empty();
            let is_full = read.wanted.len() == ENTRIES_MAX || read.damaged.len() == DAMAGED_MAX;
            if is_full || (bytes > bytes_max && !is_first) {
                read.more = true;
                break;
            }
            if place.damaged {
                read.damaged.push(*lsn);
                continue;
            }
            let generation = units.get(place.unit).entry.generation;
            read.wanted.push(Wanted { lsn: *lsn, place: *place, generation, parts: [None, None] });
        }
        read.spans = spans_of(&read.wanted);
        read
    }

    /// Starts the reads; true where there are none and the reply is complete.
    pub fn start(&mut self, ctx: &mut Ctx, units: &mut Units, op: Token) -> bool {
        for wanted in &self.wanted {
            units.get_mut(wanted.place.unit).readers += 1;
        }
        for index in 0..self.spans.len() {
            self.start_span(ctx, units, op, index);
        }
        self.outstanding == 0
    }

    fn start_span(&mut self, ctx: &mut Ctx, units: &Units, op: Token, index: usize) {
        let span = &self.spans[index];
        let (offset, part) = (units.offset(span.unit, span.from), index as u32);
        ctx.read(offset, span.to - span.from, Io::LogRead { op, part });
        self.outstanding += 1;
    }

    /// One read is done; true with the last.
    pub fn on_read(&mut self, ctx: &mut Ctx, units: &Units, op: Token, part: u32, bytes: Option<Buf>) -> bool {
        let span = &mut self.spans[part as usize];
        match bytes {
            Some(bytes) => {
                for (entry, half) in &span.of {
                    self.wanted[*entry as usize].parts[usize::from(*half)] = Some((bytes.clone(), span.from));
                }
            }
            None if span.of.len() > 1 => self.alone.extend(span.of.drain(..)),
            // Told as damaged.
            None => {}
        }
        self.outstanding -= 1;
        while self.outstanding < ALONE_MAX
            && let Some((entry, half)) = self.alone.pop_front()
        {
            let place = &self.wanted[entry as usize].place;
            let (from, to) = ranges(place)[usize::from(half)].expect("it was part of a span");
            self.spans.push(Span { unit: place.unit, from, to, of: vec![(entry, half)] });
            self.start_span(ctx, units, op, self.spans.len() - 1);
        }
        self.outstanding == 0
    }

    /// Verifies what was read, and lets go of the units.
    pub fn finish(mut self, device: DeviceId, units: &mut Units) -> LogReply {
        assert!(self.outstanding == 0 && self.alone.is_empty(), "all parts are there");
        let mut reply = LogReply {
            entries: Vec::with_capacity(self.wanted.len()),
            payload: Vec::with_capacity(self.wanted.len()),
            damaged: std::mem::take(&mut self.damaged),
            more: self.more,
            newly_damaged: Vec::new(),
        };
        for wanted in &self.wanted {
            units.get_mut(wanted.place.unit).readers -= 1;
            match wanted.verify(device, self.key) {
                Some((entry, payload)) => {
                    reply.entries.push(entry);
                    if !payload.is_empty() {
                        reply.payload.push(payload);
                    }
                }
                None => {
                    reply.damaged.push(wanted.lsn);
                    reply.newly_damaged.push((wanted.lsn, wanted.place));
                }
            }
        }
        reply.damaged.sort_unstable();
        reply
    }
}

impl Wanted {
    /// Bytes of the unit out of whichever part has them.
    fn bytes(&self, half: usize, at: u32, len: usize) -> Option<Buf> {
        let (buf, from) = self.parts[half].as_ref()?;
        let start = at.checked_sub(*from)? as usize;
        (start + len <= buf.len()).then(|| buf.slice(start..start + len))
    }

    fn verify(&self, device: DeviceId, key: LedgerKey) -> Option<(LogEntry, Buf)> {
        let place = RecordPlace { device, generation: self.generation };
        let record = self.bytes(0, self.place.record_at, self.place.record_bytes as usize)?;
        let Ok((JournalRecord::Entry(entry), _)) = JournalRecord::decode(place, &record) else { return None };
        if (entry.volume, entry.ledger, entry.lsn) != (key.0, key.1, self.lsn) {
            return None;
        }
        let len = usize::from(self.place.blocks) * BLOCK_BYTES;
        let payload = if len == 0 {
            Buf::empty()
        } else {
            let half = usize::from(ranges(&self.place)[1].is_some());
            self.bytes(half, self.place.payload_at, len)?
        };
        let matches = blocks_match(&entry.crcs, &payload);
        let (header, crcs) = (entry.header.to_vec(), entry.crcs.into_owned());
        matches.then_some((LogEntry { lsn: self.lsn, header, crcs }, payload))
    }
}
