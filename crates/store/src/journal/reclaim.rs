//! Gets units back: lets go of what is dead, moves what is cheap to move, and compacts while space is short.
//!
//! A closed unit without live entries goes once its control records, and the trim points that its dead entries rely on,
//! are durable elsewhere. That is done at once where it takes a sixteenth of a unit, else when space is short. A unit that
//! a few live entries pin (of a ledger that fell idle) is emptied when space is short, the emptiest first: at most half a
//! unit is moved to win one, or three quarters while the reserve is not whole.
//!
//! Limits: one unit is read and emptied at a time.

use crate::io::{Ctx, Io};
use crate::journal::commit::BATCH_RECORDS_MAX;
use crate::journal::units::CONTROL_BYTES;
use crate::journal::{EntryIn, Journal, Queued, RESERVE_UNITS, Source, Then, Use, lone_batch_bytes};
use crate::ledgers::{ControlKey, Ledger, LedgerKey, Life, Place, Volumes};
use holdfast_base::{BLOCK_BYTES, Buf, Instant, Lsn};
use holdfast_format::disk::{JournalRecord, RecordPlace, blocks_match};
use std::collections::BTreeSet;

/// Share of a unit that is moved without need, to win the rest.
const CHEAP_SHARE: u64 = 16;

/// Share of the units below which space is short, on top of the reserve and the unit taken in advance.
const SHORT_SHARE: u32 = 16;

impl Journal {
    /// Whether units are worth some work.
    fn is_short(&self) -> bool {
        self.units.ahead() <= RESERVE_UNITS + 1 + self.units.areas.unit_count / SHORT_SHARE
    }

    /// Whether units are on their way back: space is short for a moment only.
    pub fn is_reclaiming(&self) -> bool {
        self.compacting.is_some() || self.units.is_writing_table() || self.units.units.iter().any(|u| u.moves > 0)
    }

    /// Lets go of what can go. Called after events; does nothing unless something has changed.
    pub fn reclaim(&mut self, ctx: &mut Ctx, volumes: &Volumes) {
        if !std::mem::take(&mut self.reclaim_due) {
            return;
        }
        for unit in 0..self.units.areas.unit_count {
            let u = self.units.get(unit);
            if !u.is_quiet() || u.live_entries > 0 {
                continue;
            }
            let needs = self.needs(volumes, unit);
            if needs.is_empty() {
                self.units.mark_dead(unit);
                continue;
            }
            let bytes = needs.len() as u64 * CONTROL_BYTES;
            let affordable =
                bytes <= u64::from(self.units.unit_bytes()) / if self.is_short() { 2 } else { CHEAP_SHARE };
            if affordable && self.has_room(bytes + BLOCK_BYTES as u64, Use::Move { records: needs.len() }) {
                self.push_moves(ctx.now, unit, Vec::new(), needs);
            }
        }
        if self.compacting.is_some_and(|unit| self.units.get(unit).moves == 0 && self.units.get(unit).readers == 0) {
            self.compacting = None;
        }
        if self.compacting.is_none() && self.is_short() {
            self.start_compaction(ctx);
        }
    }

    /// Control records to write before the unit can go: those that live there, and those of ledgers whose entries of this
    /// unit were trimmed without a durable record saying so.
    fn needs(&self, volumes: &Volumes, unit: u32) -> BTreeSet<ControlKey> {
        let u = self.units.get(unit);
        let lives_on = |key: &ControlKey| match key {
            ControlKey::Promise(_) => true,
            // A tombstone that only its own unit needs goes with it.
            ControlKey::Ledger(key) => volumes.ledger(*key).is_some_and(|l| l.life != Life::Deleted || l.unit_refs > 1),
        };
        let mut needs: BTreeSet<ControlKey> = u.controls.iter().copied().filter(lives_on).collect();
        for (key, last) in &u.ledgers {
            let relies_on_trim = |l: &Ledger| l.life == Life::Live && (*last).min(l.trimmed) > l.trimmed_durable;
            if volumes.ledger(*key).is_some_and(relies_on_trim) {
                needs.insert(ControlKey::Ledger(*key));
            }
        }
        needs
    }

    fn start_compaction(&mut self, ctx: &mut Ctx) {
        let whole = u64::from(self.units.unit_bytes());
        let most = if self.units.ahead() < RESERVE_UNITS { whole / 4 * 3 } else { whole / 2 };
        let fits = |unit: &u32| {
            let u = self.units.get(*unit);
            u.is_quiet() && u.live_entries > 0 && u.damaged_entries == 0 && !u.is_unreadable && u.move_bytes() <= most
        };
        let victim = (0..self.units.areas.unit_count)
            .filter(fits)
            .min_by_key(|unit| (self.units.get(*unit).move_bytes(), *unit))
            .filter(|unit| {
                let u = self.units.get(*unit);
                let records = u.live_entries as usize + u.ledgers.len() + u.controls.len();
                self.has_room(u.move_bytes() + BLOCK_BYTES as u64, Use::Move { records })
            });
        let Some(unit) = victim else { return };
        self.compacting = Some(unit);
        let u = self.units.get_mut(unit);
        u.readers += 1;
        let generation = u.entry.generation;
        ctx.read(self.units.offset(unit, 0), self.units.unit_bytes(), Io::Compaction { unit, generation });
    }

    /// The victim could not be read: it stays as it is.
    pub fn on_unit_unreadable(&mut self, unit: u32) {
        let u = self.units.get_mut(unit);
        u.readers -= 1;
        u.is_unreadable = true;
        self.reclaim_due = true;
    }

    /// The victim's bytes are here: queue its live entries again. Returns those that turn out to be damaged.
    pub fn on_unit_read(
        &mut self,
        ctx: &mut Ctx,
        volumes: &Volumes,
        unit: u32,
        bytes: &Buf,
    ) -> Vec<(LedgerKey, Lsn, Place)> {
        self.units.get_mut(unit).readers -= 1;
        self.reclaim_due = true;
        let place = RecordPlace { device: self.units.device, generation: self.units.get(unit).entry.generation };
        let (mut unreadable, mut entries) = (Vec::new(), Vec::new());
        let keys: Vec<LedgerKey> = self.units.get(unit).ledgers.keys().copied().collect();
        for key in keys {
            let Some(ledger) = volumes.ledger(key).filter(|l| l.life == Life::Live) else { continue };
            for (lsn, at) in ledger.entries.iter().filter(|(_, at)| at.unit == unit && !at.damaged) {
                match read_entry(place, bytes, at) {
                    Some(entry) if (entry.volume, entry.ledger, entry.lsn) == (key.0, key.1, *lsn) => {
                        entries.push(entry);
                    }
                    _ => unreadable.push((key, *lsn, *at)),
                }
            }
        }
        let needs = self.needs(volumes, unit);
        self.push_moves(ctx.now, unit, entries, needs);
        unreadable
    }

    /// Queues all that lives in a unit, in as few batches as can hold it. One batch moves a unit altogether or not at all.
    fn push_moves(&mut self, now: Instant, unit: u32, entries: Vec<EntryIn>, controls: BTreeSet<ControlKey>) {
        let entries = entries.into_iter().map(Queued::Entry);
        let controls = controls.into_iter().map(|key| Queued::Control { key, then: Then::Moved { unit } });
        let mut group = Vec::new();
        let (mut records_bytes, mut payload_bytes) = (0, 0);
        for record in entries.chain(controls) {
            self.units.get_mut(unit).moves += 1;
            let (records, payload) = record.bytes_max();
            let bytes = lone_batch_bytes(records_bytes + records, payload_bytes + payload);
            if !group.is_empty() && (bytes > self.group_bytes_max() || group.len() == BATCH_RECORDS_MAX) {
                self.push(now, Queued::Group(std::mem::take(&mut group)));
                (records_bytes, payload_bytes) = (0, 0);
            }
            (records_bytes, payload_bytes) = (records_bytes + records, payload_bytes + payload);
            group.push(record);
        }
        if !group.is_empty() {
            self.push(now, Queued::Group(group));
        }
    }
}

/// The entry at `at`, verified, out of its unit's bytes.
fn read_entry(place: RecordPlace, unit: &Buf, at: &Place) -> Option<EntryIn> {
    let record = unit.get(at.record_at as usize..(at.record_at + at.record_bytes) as usize)?;
    let Ok((JournalRecord::Entry(entry), _)) = JournalRecord::decode(place, record) else { return None };
    let payload_at = at.payload_at as usize;
    let payload = unit.slice(payload_at..payload_at + usize::from(at.blocks) * BLOCK_BYTES);
    if !blocks_match(&entry.crcs, &payload) {
        return None;
    }
    Some(EntryIn {
        volume: entry.volume,
        ledger: entry.ledger,
        lsn: entry.lsn,
        epoch: entry.epoch,
        acked: entry.acked,
        header: entry.header.to_vec(),
        crcs: entry.crcs.into_owned(),
        payload,
        source: Source::Unit(*at),
    })
}
