//! Ledgers of one device: an index over the journal, and nothing else.
//!
//! Payloads stay on disk; an entry costs a place (32 bytes), an idle ledger a few hundred bytes, so that 15,000 volumes fit.
//! The journal tells this index what has become durable; requests only read it and move it forward.
//!
//! Life of a ledger: `Creating` (its record is on its way) → `Live` → `Deleting` (its tombstone is on its way) →
//! `Deleted`, a tombstone, forgotten when no unit of the journal holds anything of the ledger any more.
//!
//! Invariants:
//! 1. `entries` is sorted by LSN, holds each once, and none at or below `trimmed`.
//! 2. Only durable entries are in `entries`.

use crate::fence::{Grants, Promise};
use holdfast_base::{LedgerId, Lsn, VolumeId};
use holdfast_format::disk::{LedgerRecord, PromiseRecord};
use holdfast_format::ledger::{AckRule, Leg};
use holdfast_format::wire::LedgerState;
use std::collections::{BTreeMap, VecDeque};

/// A ledger's name on its device.
pub(crate) type LedgerKey = (VolumeId, LedgerId);

/// A control record's subject: a volume's promise, or a ledger's state. The latest record of a subject counts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum ControlKey {
    Promise(VolumeId),
    Ledger(LedgerKey),
}

/// Where an entry lies. Offsets count from the start of its unit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    pub unit: u32,
    pub record_at: u32,
    pub record_bytes: u32,
    pub payload_at: u32,
    pub blocks: u16,
    /// It was durable, and its payload or record can't be read any more.
    pub damaged: bool,
}

impl Place {
    /// Bytes that moving the entry would write.
    pub fn live_bytes(&self) -> u64 {
        u64::from(self.record_bytes) + u64::from(self.blocks) * 4096
    }

    pub fn is_same_copy(&self, other: &Place) -> bool {
        self.unit == other.unit && self.record_at == other.record_at
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Life {
    Creating,
    Live,
    Deleting,
    Deleted,
}

#[derive(Debug)]
pub(crate) struct Ledger {
    pub life: Life,
    pub rule: AckRule,
    pub legs: Vec<Leg>,
    /// The index may miss entries: lacking one proves nothing (protocol rule 1). For good.
    pub unsound: bool,
    pub acked: Lsn,
    pub trimmed: Lsn,
    /// What the ledger's durable record says of `trimmed`.
    pub trimmed_durable: Lsn,
    /// Batch of the first record; zero until that is durable.
    pub created_seq: u64,
    pub entries: VecDeque<(Lsn, Place)>,
    /// Unit that holds the latest durable record.
    pub control_unit: Option<u32>,
    /// Units that hold entries or records of this ledger, dead ones included.
    pub unit_refs: u32,
}

/// What became of an entry that was put into the index.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Inserted {
    New,
    /// It took the place of this copy.
    Replaced(Place),
    /// Trimmed already, or held already: the new copy is dead.
    NotNeeded,
}

impl Ledger {
    pub fn new(rule: AckRule, legs: Vec<Leg>) -> Ledger {
        Ledger {
            life: Life::Creating,
            rule,
            legs,
            unsound: false,
            acked: Lsn::ZERO,
            trimmed: Lsn::ZERO,
            trimmed_durable: Lsn::ZERO,
            created_seq: 0,
            entries: VecDeque::new(),
            control_unit: None,
            unit_refs: 0,
        }
    }

    /// A ledger as its latest record describes it.
    pub fn recovered(record: &LedgerRecord, unit: u32, created_seq: u64) -> Ledger {
        Ledger {
            life: if record.deleted { Life::Deleted } else { Life::Live },
            unsound: record.unsound,
            acked: record.acked,
            trimmed: record.trimmed,
            trimmed_durable: record.trimmed,
            created_seq,
            control_unit: Some(unit),
            ..Ledger::new(record.rule, record.legs.clone())
        }
    }

    /// The whole state as accepted: what a record written now says.
    pub fn record(&self, (volume, ledger): LedgerKey) -> LedgerRecord {
        LedgerRecord {
            volume,
            ledger,
            deleted: matches!(self.life, Life::Deleting | Life::Deleted),
            unsound: self.unsound,
            trimmed: self.trimmed,
            acked: self.acked,
            created_seq: self.created_seq,
            rule: self.rule,
            legs: self.legs.clone(),
        }
    }

    /// Whether it serves appends and reads.
    pub fn is_live(&self) -> bool {
        self.life == Life::Live
    }

    fn position(&self, lsn: Lsn) -> Result<usize, usize> {
        match self.entries.back() {
            Some((last, _)) if *last < lsn => Err(self.entries.len()),
            None => Err(0),
            _ => self.entries.binary_search_by_key(&lsn, |(l, _)| *l),
        }
    }

    pub fn find(&self, lsn: Lsn) -> Option<&Place> {
        self.position(lsn).ok().map(|i| &self.entries[i].1)
    }

    /// A durable copy of an entry. A readable copy takes the place of a damaged one, never the other way round.
    pub fn insert(&mut self, lsn: Lsn, place: Place) -> Inserted {
        if lsn <= self.trimmed {
            return Inserted::NotNeeded;
        }
        match self.position(lsn) {
            Err(at) => {
                self.entries.insert(at, (lsn, place));
                Inserted::New
            }
            Ok(at) if self.entries[at].1.damaged && !place.damaged => {
                Inserted::Replaced(std::mem::replace(&mut self.entries[at].1, place))
            }
            Ok(_) => Inserted::NotNeeded,
        }
    }

    /// The entry was copied from `from` to `to`. Returns its former place, unless it is not `from` any more.
    pub fn move_entry(&mut self, lsn: Lsn, from: &Place, to: Place) -> Option<Place> {
        let at = self.position(lsn).ok()?;
        let current = &mut self.entries[at].1;
        current.is_same_copy(from).then(|| std::mem::replace(current, to))
    }

    /// Marks the copy at `place` as unreadable; false where it is not the entry's place any more, or marked already.
    pub fn mark_damaged(&mut self, lsn: Lsn, place: &Place) -> bool {
        let Ok(at) = self.position(lsn) else { return false };
        let current = &mut self.entries[at].1;
        let marks = current.is_same_copy(place) && !current.damaged;
        current.damaged |= marks;
        marks
    }

    /// Drops entries up to and including `upto`; hands each one's place to `dead`.
    pub fn trim(&mut self, upto: Lsn, mut dead: impl FnMut(Place)) {
        self.trimmed = self.trimmed.max(upto);
        while let Some((lsn, place)) = self.entries.front() {
            if *lsn > self.trimmed {
                break;
            }
            dead(*place);
            self.entries.pop_front();
        }
        if self.entries.is_empty() {
            self.entries.shrink_to(0);
        }
    }

    /// Drops all entries of a ledger that was deleted.
    pub fn clear(&mut self, dead: impl FnMut(Place)) {
        assert_eq!(self.life, Life::Deleted, "only a durable tombstone lets entries go");
        std::mem::take(&mut self.entries).into_iter().map(|(_, place)| place).for_each(dead);
    }

    pub fn state(&self, ledger: LedgerId) -> LedgerState {
        LedgerState {
            ledger,
            sound: !self.unsound,
            acked: self.acked.max(self.trimmed),
            trimmed: self.trimmed,
            last: self.entries.back().map_or(Lsn::ZERO, |(lsn, _)| *lsn),
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Volume {
    /// As accepted; it is durable when `promise_unit` holds its record.
    pub promise: Promise,
    pub promise_unit: Option<u32>,
    pub grants: Grants,
    pub ledgers: BTreeMap<LedgerId, Ledger>,
}

impl Volume {
    pub fn promise_record(&self, volume: VolumeId) -> PromiseRecord {
        PromiseRecord { volume, epoch: self.promise.epoch, instance: self.promise.instance }
    }
}

/// Everything that one device knows of volumes' logs.
#[derive(Debug, Default)]
pub(crate) struct Volumes {
    pub by_id: BTreeMap<VolumeId, Volume>,
}

impl Volumes {
    pub fn get(&self, volume: VolumeId) -> Option<&Volume> {
        self.by_id.get(&volume)
    }

    pub fn ledger(&self, (volume, ledger): LedgerKey) -> Option<&Ledger> {
        self.by_id.get(&volume)?.ledgers.get(&ledger)
    }

    pub fn ledger_mut(&mut self, (volume, ledger): LedgerKey) -> Option<&mut Ledger> {
        self.by_id.get_mut(&volume)?.ledgers.get_mut(&ledger)
    }

    /// The promise in force: the default where nothing was ever promised.
    pub fn promise(&self, volume: VolumeId) -> Promise {
        self.by_id.get(&volume).map(|v| v.promise).unwrap_or_default()
    }

    /// One unit less holds anything of this ledger; a tombstone that nothing needs any more is forgotten.
    pub fn release(&mut self, (volume, id): LedgerKey) {
        let Some(ledgers) = self.by_id.get_mut(&volume).map(|v| &mut v.ledgers) else { return };
        let Some(ledger) = ledgers.get_mut(&id) else { return };
        assert!(ledger.unit_refs > 0, "{id:?} is released once for every unit that holds it");
        ledger.unit_refs -= 1;
        if ledger.unit_refs == 0 && ledger.life == Life::Deleted {
            ledgers.remove(&id);
        }
    }

    pub fn ledger_count(&self) -> u64 {
        self.by_id.values().map(|v| v.ledgers.values().filter(|l| l.is_live()).count() as u64).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(n: u32) -> Place {
        Place { unit: n, record_at: 64, record_bytes: 96, payload_at: 4096, blocks: 2, damaged: false }
    }

    fn ledger(lsns: &[u64]) -> Ledger {
        let mut ledger = Ledger::new(AckRule::flat(1), Vec::new());
        for lsn in lsns {
            assert_eq!(ledger.insert(Lsn(*lsn), place(*lsn as u32)), Inserted::New);
        }
        ledger
    }

    #[test]
    fn entries_are_kept_in_order_however_they_come() {
        let mut ledger = ledger(&[5, 3, 9, 4]);
        let lsns: Vec<u64> = ledger.entries.iter().map(|(l, _)| l.0).collect();
        assert_eq!(lsns, [3, 4, 5, 9]);
        assert_eq!(ledger.insert(Lsn(4), place(77)), Inserted::NotNeeded);
        assert_eq!(ledger.find(Lsn(4)), Some(&place(4)));
        assert_eq!(ledger.find(Lsn(6)), None);
        let mut dead = Vec::new();
        ledger.trim(Lsn(4), |p| dead.push(p.unit));
        assert_eq!(dead, [3, 4]);
        assert_eq!(ledger.insert(Lsn(4), place(1)), Inserted::NotNeeded);
        ledger.trim(Lsn(2), |_| panic!("a trim never goes back"));
        assert_eq!((ledger.trimmed, ledger.state(LedgerId::default()).last), (Lsn(4), Lsn(9)));
    }

    #[test]
    fn a_readable_copy_replaces_a_damaged_one() {
        let mut ledger = ledger(&[1]);
        assert!(ledger.mark_damaged(Lsn(1), &place(1)) && !ledger.mark_damaged(Lsn(1), &place(1)));
        let damaged = Place { damaged: true, ..place(2) };
        assert_eq!(ledger.insert(Lsn(1), damaged), Inserted::NotNeeded);
        assert!(matches!(ledger.insert(Lsn(1), place(3)), Inserted::Replaced(p) if p.unit == 1));
        assert_eq!(ledger.move_entry(Lsn(1), &place(3), place(4)), Some(place(3)));
        assert_eq!(ledger.move_entry(Lsn(1), &place(3), place(5)), None);
    }

    #[test]
    fn small_memory_for_what_is_idle() {
        assert!(size_of::<(Lsn, Place)>() <= 32);
        assert!(size_of::<Volume>() + size_of::<Ledger>() + 8 * size_of::<Leg>() < 700);
    }

    #[test]
    fn a_tombstone_is_forgotten_with_the_last_unit() {
        let mut volumes = Volumes::default();
        let key = (VolumeId(1), LedgerId::default());
        let mut tombstone = ledger(&[]);
        tombstone.life = Life::Deleted;
        tombstone.unit_refs = 2;
        volumes.by_id.entry(key.0).or_default().ledgers.insert(key.1, tombstone);
        volumes.release(key);
        assert!(volumes.ledger(key).is_some());
        volumes.release(key);
        assert!(volumes.ledger(key).is_none());
    }
}
