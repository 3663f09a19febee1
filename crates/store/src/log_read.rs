//! Reads of log entries, for recovery: from the index to places, from places to verified bytes.
//!
//! Limits: [`ENTRIES_MAX`] entries a reply; the asker goes on where the last one ended. Units with reads in flight are not
//! given up. Faults: an entry that can't be read, or does not match its checksums, is told as damaged, never left out.

use crate::io::{Client, Ctx, Io};
use crate::journal::units::Units;
use crate::ledgers::{Ledger, LedgerKey, Place};
use holdfast_base::{BLOCK_BYTES, Buf, DeviceId, Lsn, Token};
use holdfast_format::disk::{JournalRecord, RecordPlace, blocks_match};
use holdfast_format::wire::LogEntry;

/// Entries of one reply: up to two reads each.
const ENTRIES_MAX: usize = 64;

/// Damaged entries named in one reply.
const DAMAGED_MAX: usize = 4096;

/// Payload of one reply, however much is asked for, unless a single entry is larger.
const BYTES_MAX: u64 = 4 << 20;

/// Log reads of one device in flight.
pub(crate) const LOG_READS_MAX: usize = 64;

/// A record and its payload are read in one piece if no more than this lies between them.
const GAP_BYTES_MAX: u32 = 16 << 10;

struct Wanted {
    lsn: Lsn,
    place: Place,
    generation: u64,
    /// Record and payload: a buffer, and the offset in the unit at which it starts.
    parts: [Option<(Buf, u32)>; 2],
}

pub(crate) struct LogRead {
    pub client: Client,
    pub key: LedgerKey,
    wanted: Vec<Wanted>,
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

impl LogRead {
    /// Chooses the entries of a reply.
    pub fn plan(client: Client, key: LedgerKey, ledger: &Ledger, units: &Units, from: Lsn, bytes_max: u32) -> LogRead {
        let bytes_max = u64::from(bytes_max).min(BYTES_MAX);
        let start = ledger.entries.partition_point(|(lsn, _)| *lsn < from);
        let mut read = LogRead { client, key, wanted: Vec::new(), damaged: Vec::new(), more: false, outstanding: 0 };
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
        read
    }

    /// Starts the reads; true where there are none and the reply is complete.
    pub fn start(&mut self, ctx: &mut Ctx, units: &mut Units, op: Token) -> bool {
        for (i, wanted) in self.wanted.iter().enumerate() {
            units.get_mut(wanted.place.unit).readers += 1;
            for (half, range) in ranges(&wanted.place).into_iter().enumerate() {
                if let Some((from, to)) = range {
                    let part = (i * 2 + half) as u32;
                    ctx.read(units.offset(wanted.place.unit, from), to - from, Io::LogRead { op, part });
                    self.outstanding += 1;
                }
            }
        }
        self.outstanding == 0
    }

    /// One read is done; true with the last.
    pub fn on_read(&mut self, part: u32, bytes: Option<Buf>) -> bool {
        let wanted = &mut self.wanted[part as usize / 2];
        let half = part as usize % 2;
        let (from, _) = ranges(&wanted.place)[half].expect("it was asked for");
        wanted.parts[half] = bytes.map(|b| (b, from));
        self.outstanding -= 1;
        self.outstanding == 0
    }

    /// Verifies what was read, and lets go of the units.
    pub fn finish(mut self, device: DeviceId, units: &mut Units) -> LogReply {
        assert_eq!(self.outstanding, 0, "all parts are there");
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
