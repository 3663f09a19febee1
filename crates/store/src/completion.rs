//! What happens when the disk has answered: entries and control records take effect, and clients are told.
//!
//! Order: an entry counts, and is acknowledged, with its own batch. A control record counts when all batches up to its own
//! are durable, so that promises and states take effect in the order in which they were accepted, and a fence is answered
//! after everything that was accepted before it (protocol rules 5 and 6).

use crate::api::{DiskError, FailReason, Notice};
use crate::io::{Client, Ctx, Io};
use crate::journal::units::TableStep;
use crate::journal::{Flown, Journal, Queued, Source, Then};
use crate::ledgers::{ControlKey, Inserted, LedgerKey, Life, Place, Volume};
use crate::serving::Serving;
use holdfast_base::{Buf, Epoch, LedgerId, Lsn, Token, VolumeId};
use holdfast_format::wire::{LedgerState, Refusal, Reply};

impl Serving {
    /// A disk operation of this device is done. An error is the device's end.
    pub fn on_disk(&mut self, ctx: &mut Ctx, io: Io, result: Result<Buf, DiskError>) -> Result<(), FailReason> {
        match io {
            Io::Batch { seq } => {
                result.map_err(FailReason::JournalWrite)?;
                self.on_batch_written(ctx, seq);
            }
            Io::UnitTable => {
                result.map_err(FailReason::TableWrite)?;
                self.on_table_written(ctx);
            }
            Io::SuperblockRepair => {
                result.map_err(FailReason::TableWrite)?;
                ctx.note(Notice::SuperblockRepaired { device: ctx.device });
            }
            Io::Label { copy } => self.on_label_written(ctx, copy, result)?,
            Io::ShardData { number } => {
                result.map_err(FailReason::ShardWrite)?;
                self.shards.on_part_durable(ctx, number);
            }
            Io::SlotBlock { block } => {
                result.map_err(FailReason::TableWrite)?;
                for join in self.shards.on_slot_block_written(ctx, block) {
                    self.finish_join(ctx, join, 1);
                }
                self.become_ready(ctx);
            }
            Io::Part { whole, part, .. } => {
                if let Some((io, result)) = self.shards.on_part(whole, part, result) {
                    return self.on_disk(ctx, io, result);
                }
            }
            Io::ShardRead(read) => self.shards.on_read(ctx, read, result.ok()),
            Io::HeaderRead(read) => self.shards.on_header(ctx, read, result.ok()),
            Io::ShardTable { number, shard, .. } => self.shards.on_table(ctx, number, shard, result.ok()),
            Io::LogRead { op, part } => {
                let read = self.log_reads.get_mut(op).expect("a log read waits for its parts");
                if read.on_read(ctx, &self.journal.units, op, part, result.ok()) {
                    self.finish_log_read(ctx, op);
                }
            }
            Io::Compaction { unit, generation } => self.on_unit_read(ctx, unit, generation, result.ok()),
            // How long it took has been noted, and so has an error.
            Io::Probe => {}
            Io::CachedRead { .. } | Io::CachedWrite { .. } => unreachable!("the node hears of these"),
            Io::Opening { .. } => unreachable!("the opening is over"),
        }
        Ok(())
    }

    /// Serves once all that the opening writes is durable.
    fn become_ready(&mut self, ctx: &mut Ctx) {
        if !self.is_ready && self.is_table_written && self.shards.is_mended() {
            self.is_ready = true;
            let (ledgers, shards) = (self.volumes.ledger_count(), self.shards.live_count());
            ctx.note(Notice::DeviceOpened { slot: ctx.slot, device: ctx.device, ledgers, shards });
        }
    }

    fn on_unit_read(&mut self, ctx: &mut Ctx, unit: u32, generation: u64, bytes: Option<Buf>) {
        assert_eq!(self.journal.units.get(unit).entry.generation, generation, "a unit that is read stays as it is");
        let Some(bytes) = bytes else { return self.journal.on_unit_unreadable(unit) };
        for (key, lsn, place) in self.journal.on_unit_read(ctx, &self.volumes, unit, &bytes) {
            self.mark_damaged(ctx, key, lsn, &place);
        }
    }

    fn on_batch_written(&mut self, ctx: &mut Ctx, seq: u64) {
        let mut records = std::mem::take(self.journal.on_batch_written(ctx.now, seq));
        for record in &records {
            if let Flown::Entry { volume, ledger, lsn, acked, place, source } = record {
                match source {
                    Source::Client(client) => self.land_entry(ctx, *client, (*volume, *ledger), (*lsn, *acked), place),
                    Source::Unit(from) => self.land_moved_entry((*volume, *ledger), *lsn, from, place),
                }
            }
        }
        records.retain(|r| matches!(r, Flown::Control { .. }));
        self.journal.keep_controls(seq, records);
        while let Some(mut flight) = self.journal.pop_below_watermark() {
            for record in flight.records.drain(..) {
                let Flown::Control { key, then, trimmed, deleted } = record else {
                    unreachable!("entries were told with their batch");
                };
                self.land_control(flight.seq, flight.unit, key, (trimmed, deleted));
                self.follow(ctx, key, then);
            }
            self.journal.recycle(flight.records);
        }
    }

    fn land_entry(&mut self, ctx: &mut Ctx, client: Client, key: LedgerKey, (lsn, acked): (Lsn, Lsn), place: &Place) {
        let units = &mut self.journal.units;
        let Some(ledger) = self.volumes.ledger_mut(key).filter(|l| l.life != Life::Deleted) else {
            return ctx.refuse(client, Refusal::UnknownLedger);
        };
        ledger.acked = ledger.acked.max(acked);
        match ledger.insert(lsn, *place) {
            Inserted::New => units.get_mut(place.unit).add_live(place),
            Inserted::Replaced(old) => {
                units.get_mut(place.unit).add_live(place);
                self.journal.drop_entry(&old);
            }
            Inserted::NotNeeded => {}
        }
        ctx.reply(client, Reply::Appended { lsn, journal_fill: self.journal.fill() });
    }

    fn land_moved_entry(&mut self, key: LedgerKey, lsn: Lsn, from: &Place, to: &Place) {
        self.journal.on_moved(from.unit);
        let ledger = self.volumes.ledger_mut(key).filter(|l| l.life != Life::Deleted);
        if let Some(old) = ledger.and_then(|l| l.move_entry(lsn, from, *to)) {
            self.journal.units.get_mut(to.unit).add_live(to);
            self.journal.drop_entry(&old);
        }
    }

    fn land_control(&mut self, seq: u64, unit: u32, key: ControlKey, (trimmed, deleted): (Lsn, bool)) {
        let journal = &mut self.journal;
        let former = match key {
            ControlKey::Promise(volume) => {
                let volume: &mut Volume = self.volumes.by_id.get_mut(&volume).expect("volumes are never forgotten");
                volume.promise_unit.replace(unit)
            }
            ControlKey::Ledger(key) => {
                // A tombstone that was forgotten before its record was moved needs none.
                let Some(ledger) = self.volumes.ledger_mut(key) else { return };
                ledger.trimmed_durable = ledger.trimmed_durable.max(trimmed);
                if ledger.created_seq == 0 {
                    ledger.created_seq = seq;
                }
                if ledger.life == Life::Creating {
                    ledger.life = Life::Live;
                }
                if ledger.life == Life::Deleting && deleted {
                    ledger.life = Life::Deleted;
                    ledger.clear(|place| journal.drop_entry(&place));
                }
                ledger.control_unit.replace(unit)
            }
        };
        if let Some(former) = former {
            journal.units.get_mut(former).controls.remove(&key);
        }
        journal.units.get_mut(unit).controls.insert(key);
        journal.reclaim_due = true;
    }

    /// What was to happen once a control record counts.
    fn follow(&mut self, ctx: &mut Ctx, key: ControlKey, then: Then) {
        match (then, key) {
            (Then::Nothing, _) => {}
            (Then::Done(client), _) => ctx.reply(client, Reply::Done),
            (Then::Fenced { client, epoch }, ControlKey::Promise(volume)) => {
                self.answer_fence(ctx, client, volume, epoch);
            }
            (Then::Fenced { .. }, ControlKey::Ledger(_)) => unreachable!("fences wait for promises"),
            (Then::Join(join), _) => self.finish_join(ctx, join, 1),
            (Then::Moved { unit }, _) => self.journal.on_moved(unit),
            (Then::Recovered, _) => self.journal.on_recovered(),
        }
    }

    /// Tells the fencing opening what is held now: everything that was acknowledged before is in it.
    pub fn answer_fence(&mut self, ctx: &mut Ctx, client: Client, volume: VolumeId, epoch: Epoch) {
        let state = self.volumes.get(volume).expect("the promise made it");
        let is_told = |life: Life| matches!(life, Life::Live | Life::Deleting);
        let mut ledgers: Vec<LedgerState> =
            state.ledgers.iter().filter(|(_, l)| is_told(l.life)).map(|(id, l)| l.state(*id)).collect();
        if ctx.config.mutations.blank_says_dont_have() {
            pretend_to_hold(&mut ledgers, epoch);
        }
        let grant_left_ms = state.grants.left_below(epoch, ctx.now);
        ctx.reply(client, Reply::Fenced { grant_left_ms, ledgers });
    }

    pub fn finish_join(&mut self, ctx: &mut Ctx, token: Token, parts: u32) {
        let join = self.joins.get_mut(token).expect("it waits for its parts");
        assert!(join.waiting >= parts, "no part is done twice");
        join.waiting -= parts;
        if join.waiting == 0 {
            let join = self.joins.remove(token).expect("just seen");
            ctx.reply(join.client, Reply::Done);
        }
    }

    pub fn finish_log_read(&mut self, ctx: &mut Ctx, op: Token) {
        let read = self.log_reads.remove(op).expect("it is complete");
        let (client, key) = (read.client, read.key);
        let done = read.finish(self.superblock.device, &mut self.journal.units);
        self.journal.reclaim_due = true;
        for (lsn, place) in &done.newly_damaged {
            self.mark_damaged(ctx, key, *lsn, place);
        }
        let damaged = if ctx.config.mutations.blank_says_dont_have() { Vec::new() } else { done.damaged };
        ctx.reply_with(client, Reply::LogEntries { entries: done.entries, damaged, more: done.more }, done.payload);
    }

    fn mark_damaged(&mut self, ctx: &mut Ctx, key: LedgerKey, lsn: Lsn, place: &Place) {
        if self.volumes.ledger_mut(key).is_some_and(|l| l.mark_damaged(lsn, place)) {
            self.journal.units.get_mut(place.unit).damaged_entries += 1;
            ctx.note(Notice::EntryDamaged { device: ctx.device, volume: key.0, ledger: key.1, lsn });
        }
    }

    fn on_table_written(&mut self, ctx: &mut Ctx) {
        match self.journal.units.on_table_written() {
            TableStep::Write { offset, bytes } => ctx.write(offset, vec![bytes], true, Io::UnitTable),
            TableStep::Done { dropped } => {
                for unit in dropped {
                    for key in self.journal.units.forget_contents(unit).into_keys() {
                        self.volumes.release(key);
                    }
                }
                self.journal.reclaim_due = true;
                self.is_table_written = true;
                self.become_ready(ctx);
            }
        }
    }
}

impl Journal {
    /// An entry of the index is not needed any more at this place.
    pub fn drop_entry(&mut self, place: &Place) {
        let unit = self.units.get_mut(place.unit);
        unit.drop_live(place);
        self.reclaim_due |= unit.live_entries == 0;
    }

    fn on_moved(&mut self, unit: u32) {
        let unit = self.units.get_mut(unit);
        assert!(unit.moves > 0, "what was moved was counted");
        unit.moves -= 1;
        self.reclaim_due |= unit.moves == 0;
    }

    /// One more record says what the opening found; with the last, units that lack batches may go.
    fn on_recovered(&mut self) {
        self.recovery_moves -= 1;
        if self.recovery_moves == 0 {
            self.units.units.iter_mut().for_each(|u| u.is_evidence = false);
            self.reclaim_due = true;
        }
    }

    /// Gives a completed flight back its control records, which wait for the watermark.
    fn keep_controls(&mut self, seq: u64, records: Vec<Flown>) {
        let index = (seq - self.flights[0].seq) as usize;
        self.flights[index].records = records;
    }

    /// Clients of all that is queued or in flight, in order.
    pub fn waiting_clients(&self) -> Vec<Client> {
        let flown = self.flights.iter().flat_map(|f| &f.records).filter_map(|record| match record {
            Flown::Entry { source, .. } => client_of_source(source),
            Flown::Control { then, .. } => client_of_then(then),
        });
        let mut clients: Vec<Client> = flown.collect();
        self.queue.iter().for_each(|record| add_clients(record, &mut clients));
        clients
    }
}

fn client_of_then(then: &Then) -> Option<Client> {
    match then {
        Then::Done(client) | Then::Fenced { client, .. } => Some(*client),
        Then::Nothing | Then::Join(_) | Then::Moved { .. } | Then::Recovered => None,
    }
}

fn client_of_source(source: &Source) -> Option<Client> {
    match source {
        Source::Client(client) => Some(*client),
        Source::Unit(_) => None,
    }
}

fn add_clients(record: &Queued, clients: &mut Vec<Client>) {
    match record {
        Queued::Entry(entry) => clients.extend(client_of_source(&entry.source)),
        Queued::Control { then, .. } => clients.extend(client_of_then(then)),
        Queued::Group(records) => records.iter().for_each(|r| add_clients(r, clients)),
    }
}

/// The deliberate mistake of [`crate::Mutations::blank_says_dont_have`]: sound and empty is told of every ledger that the
/// requester may think of.
fn pretend_to_hold(ledgers: &mut Vec<LedgerState>, epoch: Epoch) {
    ledgers.iter_mut().for_each(|l| l.sound = true);
    for e in epoch.0.saturating_sub(16)..epoch.0 {
        for n in 0..8 {
            let ledger = LedgerId { epoch: Epoch(e), n };
            if ledgers.iter().all(|l| l.ledger != ledger) {
                let none = Lsn::ZERO;
                ledgers.push(LedgerState { ledger, sound: true, acked: none, trimmed: none, last: none });
            }
        }
    }
}
