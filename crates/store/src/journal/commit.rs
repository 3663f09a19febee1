//! Group commit: packs queued records into batches, and decides when to send one.
//!
//! Batches leave with ticks, and a tick comes after all events of one moment: requests that were read together share a
//! batch. The window is zero while the device is idle. Under load (a batch is in flight) records wait for company, at most for
//! the window, which grows while batches get company by it, up to half of what a batch takes and the configured maximum,
//! and shrinks when they don't. While as many batches are in flight as may be, records collect.
//!
//! Where more waits than a batch takes, at most half of it is of one host while others wait ([`Journal::take_turns`]).
//!
//! When the journal falls idle, an empty batch tells that the last one with records is durable: damage to that one is then
//! seen as damage, not taken for a write that never was.

use crate::io::{Ctx, Io};
use crate::journal::{BATCH_WINDOW_MAX, EntryIn, Flight, Flown, Journal, Queued, Then, lone_batch_bytes};
use crate::ledgers::{ControlKey, LedgerKey, Life, Place, Volumes};
use crate::line::HostTag;
use holdfast_base::{BLOCK_BYTES, Buf, BufMut, DeviceId, Instant, Lsn};
use holdfast_format::disk::{
    BATCH_HEADER_BYTES, BatchHeader, BatchPlace, EntryRecord, LedgerRecord, PromiseRecord, RecordPlace,
};
use std::borrow::Cow;
use std::time::Duration;

/// Records of one batch: their payloads are pieces of one vectored write, of which the kernel takes 1024.
pub(crate) const BATCH_RECORDS_MAX: usize = 512;

/// Bytes of one batch, unless a single entry is larger: beyond this, more in one write gains nothing.
pub(crate) const BATCH_BYTES_MAX: u64 = 1 << 20;

/// Of these, as many of one host while others wait.
const HOST_BYTES_MAX: u64 = BATCH_BYTES_MAX / 2;

/// Records that a host is looked for among, whose turn it may be.
const LOOK_RECORDS_MAX: usize = 2048;

/// Queued bytes that are sent without waiting for more.
const BATCH_BYTES_ENOUGH: u64 = 256 << 10;

/// Quiet time after which the last batch is confirmed.
pub(crate) const CONFIRM_AFTER: Duration = Duration::from_millis(10);

/// Growth and floor of the window.
const WINDOW_STEP: Duration = Duration::from_micros(5);

/// Vectors of records kept for the next batches.
const SPARE_MAX: usize = 8;

/// How long records wait for company.
#[derive(Debug, Default)]
pub(crate) struct Window {
    len: Duration,
    /// When the first record of the next batch came.
    pub opened: Option<Instant>,
    /// Moving mean of what a batch takes.
    batch_took: Duration,
}

impl Window {
    fn ends(&self, is_idle: bool) -> Option<Instant> {
        self.opened.map(|at| if is_idle { at } else { at + self.len })
    }

    fn on_sent(&mut self, record_count: usize, was_idle: bool, len_max: Duration) {
        if was_idle {
            return;
        }
        if record_count > 1 {
            let ceiling = len_max.min(self.batch_took / 2);
            self.len = (self.len * 2).max(WINDOW_STEP).min(ceiling);
        } else {
            self.len = if self.len > WINDOW_STEP { self.len / 2 } else { Duration::ZERO };
        }
    }

    pub fn on_batch_took(&mut self, took: Duration) {
        self.batch_took = (self.batch_took * 7 + took) / 8;
    }
}

/// The records of a batch being built: their sizes are known before the first byte is written.
struct Draft {
    /// Taken from the queue, and what that is in records.
    count: usize,
    record_count: usize,
    records_bytes: usize,
    payload_bytes: usize,
}

impl Draft {
    fn bytes(&self) -> u64 {
        lone_batch_bytes(self.records_bytes, self.payload_bytes)
    }
}

fn control_bytes(volumes: &Volumes, key: &ControlKey) -> usize {
    match key {
        ControlKey::Promise(_) => PromiseRecord::encoded_bytes(),
        // A subject that is gone by now needs no record.
        ControlKey::Ledger(ledger) => volumes.ledger(*ledger).map_or(0, |l| LedgerRecord::encoded_bytes(l.legs.len())),
    }
}

fn sizes(volumes: &Volumes, record: &Queued) -> (usize, usize) {
    match record {
        Queued::Entry(e) => (EntryRecord::encoded_bytes(e.header.len(), e.crcs.len()), e.payload.len()),
        Queued::Control { key, .. } => (control_bytes(volumes, key), 0),
        Queued::Group(records) => records.iter().map(|r| sizes(volumes, r)).fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1)),
    }
}

/// A batch being built.
struct Build {
    unit: u32,
    /// Offset of the batch in its unit.
    at: u32,
    place: RecordPlace,
    head: BufMut,
    record_at: usize,
    record_count: u32,
    payload_at: usize,
    /// The head's place, then payloads.
    data: Vec<Buf>,
    flown: Vec<Flown>,
    has_control: bool,
}

impl Build {
    fn new(draft: &Draft, device: DeviceId, (unit, at, generation): (u32, u32, u64)) -> Build {
        let head = BufMut::new(BatchHeader::head_bytes(draft.records_bytes));
        let mut data = Vec::with_capacity(draft.record_count + 1);
        data.push(Buf::default());
        Build {
            unit,
            at,
            place: RecordPlace { device, generation },
            record_at: BATCH_HEADER_BYTES,
            record_count: 0,
            payload_at: head.len(),
            head,
            data,
            flown: Vec::new(),
            has_control: false,
        }
    }

    /// Room for the next record.
    fn record(&mut self, len: usize) -> &mut [u8] {
        let at = self.record_at;
        self.record_at += len;
        self.record_count += 1;
        &mut self.head[at..at + len]
    }
}

/// Payload as one piece of a vectored write: itself where it is aligned, as it is when it came in a frame of its own.
fn aligned(payload: Buf) -> Buf {
    if (payload.as_ptr() as usize).is_multiple_of(BLOCK_BYTES) { payload } else { Buf::copy_from(&payload) }
}

impl Journal {
    /// Sends as many batches as may be sent now. Called by ticks.
    pub fn commit(&mut self, ctx: &mut Ctx, volumes: &mut Volumes) {
        self.waits_for_unit = false;
        while !self.queue.is_empty() && self.may_send(ctx) {
            self.take_turns();
            let (records, payload) = sizes(volumes, &self.queue[0]);
            if !self.ensure_room(lone_batch_bytes(records, payload)) {
                self.waits_for_unit = true;
                break;
            }
            self.send(ctx, volumes);
        }
    }

    fn may_send(&self, ctx: &Ctx) -> bool {
        if self.writes_in_flight >= ctx.config.batch_in_flight_max || !self.may_run_ahead() {
            return false;
        }
        let is_idle = self.writes_in_flight == 0;
        self.queue_bytes >= BATCH_BYTES_ENOUGH || self.window.ends(is_idle).is_none_or(|end| end <= ctx.now)
    }

    /// Has the next batch take at most [`HOST_BYTES_MAX`] of one host before all that others have waiting, as far as that
    /// fits. A host's entries stay in order, and nothing passes what is no client's entry: a fence is answered after all
    /// that came before it. Nor does the queue come to need more room than was planned for it.
    fn take_turns(&mut self) {
        if self.queue_bytes <= BATCH_BYTES_MAX {
            return;
        }
        let hosts = self.queue.iter().take(LOOK_RECORDS_MAX).map_while(Queued::host);
        let (mut stretch, mut first, mut are_several) = (0, None, false);
        for host in hosts {
            are_several |= *first.get_or_insert(host) != host;
            stretch += 1;
        }
        if !are_several {
            return;
        }
        let in_turn = self.in_turn(stretch);
        let (mut places, waits): (Vec<usize>, Vec<usize>) = (0..stretch).partition(|at| in_turn[*at]);
        places.extend(waits);
        let rest = self.queue.len();
        let (units, left) = self.plan_of(places.iter().copied().chain(stretch..rest));
        if (units, std::cmp::Reverse(left)) > (self.planned_units, std::cmp::Reverse(self.planned_left)) {
            return;
        }
        (self.planned_units, self.planned_left) = (units, left);
        let mut taken: Vec<Option<Queued>> = self.queue.drain(..stretch).map(Some).collect();
        for at in places.into_iter().rev() {
            self.queue.push_front(taken[at].take().expect("each place is one's"));
        }
    }

    /// Of so many of the first records: which go before the others.
    fn in_turn(&self, stretch: usize) -> Vec<bool> {
        let (mut shares, mut bytes) = (Vec::<(HostTag, u64)>::new(), 0);
        let goes = |record: &Queued| {
            let (host, own) = (record.host().expect("it is a client's"), record.accounted_bytes());
            let at = shares.iter().position(|(of, _)| *of == host).unwrap_or_else(|| {
                shares.push((host, 0));
                shares.len() - 1
            });
            // Whose next one has to wait has none of its later ones go.
            shares[at].1 += own;
            let goes = bytes < BATCH_BYTES_MAX && shares[at].1 <= HOST_BYTES_MAX;
            bytes += if goes { own } else { 0 };
            goes
        };
        self.queue.iter().take(stretch).map(goes).collect()
    }

    fn may_run_ahead(&self) -> bool {
        self.next_seq - self.watermark() <= BATCH_WINDOW_MAX
    }

    /// The open unit has room for a batch of so many bytes, or the next one is opened.
    fn ensure_room(&mut self, bytes: u64) -> bool {
        assert!(bytes <= u64::from(self.units.unit_bytes()), "a batch of {bytes} bytes fits a unit");
        if bytes <= u64::from(self.units.open_left()) {
            return true;
        }
        if !self.units.advance(self.next_seq) {
            return false;
        }
        self.planned_units = self.planned_units.saturating_sub(1);
        self.reclaim_due = true;
        true
    }

    fn draft(&self, volumes: &Volumes, records_max: usize) -> Draft {
        let room = u64::from(self.units.open_left());
        let mut draft = Draft { count: 0, record_count: 0, records_bytes: 0, payload_bytes: 0 };
        for record in &self.queue {
            let (records, payload) = sizes(volumes, record);
            let grown = Draft {
                count: draft.count + 1,
                record_count: draft.record_count + record.record_count(),
                records_bytes: draft.records_bytes + records,
                payload_bytes: draft.payload_bytes + payload,
            };
            let is_large = grown.bytes() > BATCH_BYTES_MAX || grown.record_count > records_max.min(BATCH_RECORDS_MAX);
            if grown.bytes() > room || (draft.count > 0 && is_large) {
                break;
            }
            draft = grown;
        }
        assert!(draft.count > 0 || self.queue.is_empty(), "room for the first record was made");
        draft
    }

    /// Builds a batch of what is queued and fits, and writes it. With nothing queued it tells the watermark.
    fn send(&mut self, ctx: &mut Ctx, volumes: &mut Volumes) {
        let draft = self.draft(volumes, ctx.config.batch_records_max);
        let (seq, watermark, batch_bytes) = (self.next_seq, self.watermark(), draft.bytes() as u32);
        let (unit, at) = self.units.take_room(batch_bytes);
        let entry = self.units.get(unit).entry;
        let mut build = Build::new(&draft, self.units.device, (unit, at, entry.generation));
        build.flown = self.spare.pop().unwrap_or_default();
        for _ in 0..draft.count {
            let queued = self.queue.pop_front().expect("the draft counted it");
            self.add(volumes, &mut build, queued);
        }
        assert_eq!(build.record_at, BATCH_HEADER_BYTES + draft.records_bytes, "records take what was drafted");
        let header = BatchHeader {
            seq,
            watermark,
            unit_first_seq: entry.first_seq,
            control_bits: self.control_bits,
            batch_bytes,
            records_bytes: draft.records_bytes as u32,
            record_count: build.record_count,
        };
        let place = BatchPlace { device: self.units.device, unit, generation: entry.generation, offset: at };
        header.finish(place, &mut build.head);
        build.data[0] = build.head.freeze();
        self.on_sent(ctx, draft.record_count, build.has_control);
        let (bytes, records) = (u64::from(batch_bytes), build.flown);
        self.flight_bytes += bytes;
        self.flights.push_back(Flight { seq, unit, watermark, bytes, submitted: ctx.now, is_done: false, records });
        let durable = !ctx.config.mutations.ack_before_durable();
        ctx.write(self.units.offset(unit, at), build.data, durable, Io::Batch { seq });
    }

    fn on_sent(&mut self, ctx: &Ctx, record_count: usize, has_control: bool) {
        let was_idle = self.writes_in_flight == 0;
        self.window.on_sent(record_count, was_idle, ctx.config.commit_window_max);
        self.window.opened = if self.queue.is_empty() { None } else { Some(ctx.now) };
        self.control_bits = self.control_bits << 1 | u64::from(has_control);
        if record_count > 0 {
            self.last_content_seq = self.next_seq;
        }
        self.next_seq += 1;
        self.writes_in_flight += 1;
        self.confirm_at = None;
    }

    fn add(&mut self, volumes: &mut Volumes, build: &mut Build, queued: Queued) {
        match queued {
            Queued::Entry(entry) => self.add_entry(volumes, build, entry),
            Queued::Control { key, then } => self.add_control(volumes, build, key, then),
            Queued::Group(records) => records.into_iter().for_each(|r| self.add(volumes, build, r)),
        }
    }

    fn add_entry(&mut self, volumes: &mut Volumes, build: &mut Build, entry: EntryIn) {
        let EntryIn { volume, ledger, lsn, epoch, acked, header, crcs, payload, source } = entry;
        let len = EntryRecord::encoded_bytes(header.len(), crcs.len());
        self.queue_bytes -= lone_batch_bytes(len, payload.len());
        let place = Place {
            unit: build.unit,
            record_at: build.at + build.record_at as u32,
            record_bytes: len as u32,
            payload_at: build.at + build.payload_at as u32,
            blocks: crcs.len() as u16,
            damaged: false,
        };
        let record = EntryRecord { volume, ledger, lsn, epoch, acked, header: &header, crcs: Cow::Borrowed(&crcs) };
        let record_place = build.place;
        record.encode_into(record_place, build.record(len));
        build.payload_at += payload.len();
        if !payload.is_empty() {
            build.data.push(aligned(payload));
        }
        self.note_ledger(volumes, build.unit, (volume, ledger), lsn);
        build.flown.push(Flown::Entry { volume, ledger, lsn, acked, place, source });
    }

    fn add_control(&mut self, volumes: &mut Volumes, build: &mut Build, key: ControlKey, then: Then) {
        self.queue_bytes -= BLOCK_BYTES as u64;
        let (mut trimmed, mut deleted) = (Lsn::ZERO, false);
        let (len, place) = (control_bytes(volumes, &key), build.place);
        match key {
            ControlKey::Promise(id) => {
                let volume = volumes.get(id).expect("a promise's volume is never forgotten");
                volume.promise_record(id).encode_into(place, build.record(len));
            }
            ControlKey::Ledger(id) => {
                if let Some(ledger) = volumes.ledger(id) {
                    ledger.record(id).encode_into(place, build.record(len));
                    trimmed = ledger.trimmed;
                    deleted = matches!(ledger.life, Life::Deleting | Life::Deleted);
                    self.note_ledger(volumes, build.unit, id, Lsn::ZERO);
                }
            }
        }
        build.has_control = true;
        build.flown.push(Flown::Control { key, then, trimmed, deleted });
    }

    /// The unit holds something of the ledger from now on.
    fn note_ledger(&mut self, volumes: &mut Volumes, unit: u32, key: LedgerKey, lsn: Lsn) {
        let ledgers = &mut self.units.get_mut(unit).ledgers;
        match ledgers.get_mut(&key) {
            Some(last) => *last = (*last).max(lsn),
            None => {
                ledgers.insert(key, lsn);
                if let Some(ledger) = volumes.ledger_mut(key) {
                    ledger.unit_refs += 1;
                }
            }
        }
    }

    /// The batch's write is complete. Returns its records of entries, to be told to their ledgers now; the flight keeps
    /// its control records until [`Journal::pop_below_watermark`].
    pub fn on_batch_written(&mut self, now: Instant, seq: u64) -> &mut Vec<Flown> {
        let index = (seq - self.flights.front().expect("it is in flight").seq) as usize;
        let flight = &mut self.flights[index];
        assert!(flight.seq == seq && !flight.is_done, "batch {seq} completes once");
        flight.is_done = true;
        self.writes_in_flight -= 1;
        self.flight_bytes -= flight.bytes;
        self.told_watermark = self.told_watermark.max(flight.watermark);
        self.window.on_batch_took(now.since(flight.submitted));
        &mut flight.records
    }

    /// The next batch that is durable with all before it.
    pub fn pop_below_watermark(&mut self) -> Option<Flight> {
        if !self.flights.front()?.is_done {
            return None;
        }
        let flight = self.flights.pop_front()?;
        self.units.note_end(flight.unit, flight.seq + 1);
        self.reclaim_due |= self.units.get(flight.unit).flights == 0;
        Some(flight)
    }

    /// Keeps a flight's vector for the next one.
    pub fn recycle(&mut self, mut records: Vec<Flown>) {
        records.clear();
        if self.spare.len() < SPARE_MAX {
            self.spare.push(records);
        }
    }

    /// After an event: when is the next batch due, if time decides it?
    pub fn next_deadline(&self, batch_in_flight_max: usize) -> Option<Instant> {
        if self.queue.is_empty() {
            return self.confirm_at;
        }
        let may = self.writes_in_flight < batch_in_flight_max && self.may_run_ahead();
        if !may || self.waits_for_unit {
            None
        } else if self.queue_bytes >= BATCH_BYTES_ENOUGH {
            self.window.opened
        } else {
            self.window.ends(self.writes_in_flight == 0)
        }
    }

    /// After an event that may have freed a unit (the table's completion, not the clock): the next tick tries again.
    pub fn look_for_unit_again(&mut self) {
        self.waits_for_unit = false;
    }

    /// Confirms the last batch once the journal has been quiet for a while.
    pub fn confirm(&mut self, ctx: &mut Ctx, volumes: &mut Volumes) {
        if !self.is_idle() || self.last_content_seq <= self.told_watermark {
            self.confirm_at = None;
            return;
        }
        let due = *self.confirm_at.get_or_insert(ctx.now + CONFIRM_AFTER);
        if due <= ctx.now {
            self.confirm_at = None;
            if self.ensure_room(BLOCK_BYTES as u64) {
                self.send(ctx, volumes);
            } else {
                // No unit to say it in: the next batch will.
                self.last_content_seq = 0;
            }
        }
    }

    /// Starts a table write if the journal needs one.
    pub fn drive_table(&mut self, ctx: &mut Ctx) {
        if self.units.wants_table_write() {
            self.start_table_write(ctx);
        }
    }

    pub fn start_table_write(&mut self, ctx: &mut Ctx) {
        let (offset, bytes) = self.units.start_table_write(self.next_seq);
        ctx.write(offset, vec![bytes], true, Io::UnitTable);
    }
}
