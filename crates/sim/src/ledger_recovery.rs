//! Recovery of a log from its legs, as a new owner does it: what is there, what was never acknowledged, what lacks copies.
//!
//! Invariants: only answers given after the fence count (rule 5); a leg that doesn't know the ledger, has a damaged index
//! over it, or can't read an entry is absent, it never "lacks" (rule 1); with too few sound answers recovery waits.

use crate::ledger_client::payload_of;
use holdfast_base::{BLOCK_BYTES, Buf, LedgerId, Lsn, block_crcs};
use holdfast_format::ledger::{LedgerRef, Leg};
use holdfast_format::root::Root;
use holdfast_format::wire::{LogEntry, Refusal, Reply};
use std::collections::{BTreeMap, BTreeSet};

/// What a leg told of one ledger.
struct LegLog {
    sound: bool,
    trimmed: Lsn,
    acked: Lsn,
    entries: BTreeMap<Lsn, (u64, usize)>,
    damaged: BTreeSet<Lsn>,
    next: Lsn,
    done: bool,
}

/// The recovered log.
pub struct Found {
    pub log: BTreeMap<Lsn, u64>,
    pub last: Lsn,
    pub trimmed: Lsn,
    /// Entries with too few copies: LSN, value, blocks.
    pub reappend: Vec<(Lsn, u64, usize)>,
}

pub struct Recovery {
    trust_absent_legs: bool,
    ledgers: Vec<LedgerRef>,
    /// Everything up to here was trimmed when the root was written.
    floor: Lsn,
    fenced: BTreeSet<Leg>,
    logs: BTreeMap<(LedgerId, Leg), LegLog>,
    /// Ledgers that the next root leaves out.
    pub dropped: Vec<LedgerRef>,
    /// Ledgers that no root names: openings made them that never got to serve.
    pub strays: Vec<(Leg, LedgerId)>,
}

impl Recovery {
    pub fn new(trust_absent_legs: bool) -> Recovery {
        Recovery {
            trust_absent_legs,
            ledgers: Vec::new(),
            floor: Lsn::ZERO,
            fenced: BTreeSet::new(),
            logs: BTreeMap::new(),
            dropped: Vec::new(),
            strays: Vec::new(),
        }
    }

    pub fn begin(&mut self, root: &Root) {
        (self.ledgers, self.floor) = (root.ledgers.clone(), root.checkpoint.lsn);
    }

    /// Legs, and other devices, that have not promised yet, each once.
    pub fn legs_to_fence(&self, others: &BTreeSet<Leg>) -> Vec<Leg> {
        let mut all: BTreeSet<Leg> = self.ledgers.iter().flat_map(|l| l.legs.iter().copied()).collect();
        all.extend(others);
        all.difference(&self.fenced).copied().collect()
    }

    pub fn on_fenced(&mut self, leg: Leg, reply: &Reply) {
        let states = match reply {
            Reply::Fenced { ledgers, .. } => ledgers.clone(),
            Reply::Refused(Refusal::UnknownDevice | Refusal::DeviceFailed) if self.trust_absent_legs => Vec::new(),
            Reply::Refused(_) => return,
            other => panic!("a fence was answered by {other:?}"),
        };
        self.fenced.insert(leg);
        let named = |id: LedgerId| self.ledgers.iter().any(|l| l.id == id);
        self.strays.extend(states.iter().filter(|s| !named(s.ledger)).map(|s| (leg, s.ledger)));
        for ledger in self.ledgers.iter().filter(|l| l.legs.contains(&leg)) {
            let log = match states.iter().find(|s| s.ledger == ledger.id) {
                Some(state) => LegLog {
                    sound: state.sound,
                    trimmed: state.trimmed,
                    acked: state.acked,
                    entries: BTreeMap::new(),
                    damaged: BTreeSet::new(),
                    next: state.trimmed.next(),
                    done: false,
                },
                None if self.trust_absent_legs => LegLog {
                    sound: true,
                    trimmed: Lsn::ZERO,
                    acked: Lsn::ZERO,
                    entries: BTreeMap::new(),
                    damaged: BTreeSet::new(),
                    next: Lsn(1),
                    done: true,
                },
                None => continue,
            };
            self.logs.insert((ledger.id, leg), log);
        }
    }

    /// What is still to be read: ledger, leg, and from which LSN.
    pub fn reads_wanted(&self) -> Vec<(LedgerId, Leg, Lsn)> {
        self.logs.iter().filter(|(_, log)| !log.done).map(|((id, leg), log)| (*id, *leg, log.next)).collect()
    }

    pub fn on_read(&mut self, id: LedgerId, leg: Leg, reply: Reply, payload: &Buf) {
        match reply {
            Reply::LogEntries { entries, damaged, more } => {
                let log = self.logs.get_mut(&(id, leg)).expect("only known ledgers are read");
                log.take(entries, damaged, more, payload);
            }
            Reply::Refused(Refusal::UnknownLedger) => {
                self.logs.remove(&(id, leg));
            }
            Reply::Refused(_) => {}
            other => panic!("a log read was answered by {other:?}"),
        }
    }

    /// The whole log, once enough is known; `None` while recovery has to wait.
    pub fn finish(&self) -> Option<Found> {
        let trimmed = self.logs.values().map(|l| l.trimmed).fold(self.floor, Lsn::max);
        let sealed = self.ledgers.iter().filter_map(|l| l.sealed).max().unwrap_or(Lsn::ZERO);
        let mut found = Found { log: BTreeMap::new(), last: trimmed.max(sealed), trimmed, reappend: Vec::new() };
        let mut lsn = trimmed.next();
        while lsn <= sealed {
            self.take_entry(lsn, &mut found)?;
            lsn = lsn.next();
        }
        let Some(open) = self.ledgers.last().filter(|l| l.sealed.is_none()) else { return Some(found) };
        let mask = |wanted: &dyn Fn(&Leg) -> bool| {
            open.legs.iter().enumerate().filter(|(_, l)| wanted(l)).fold(0, |m, (i, _)| m | 1 << i)
        };
        if !open.rule.is_fence_set(&open.legs, mask(&|l| self.fenced.contains(l))) {
            return None;
        }
        let acked = self.logs.values().map(|l| l.acked).max().unwrap_or(Lsn::ZERO);
        loop {
            if self.take_entry(lsn, &mut found).is_none() {
                let lacking = mask(&|l| self.logs.get(&(open.id, *l)).is_some_and(|log| log.lacks(lsn)));
                if !open.rule.proves_unacknowledged(&open.legs, lacking) {
                    return None;
                }
                assert!(lsn > acked, "entry {lsn} was acknowledged (up to {acked}) and is proved absent");
                return Some(found);
            }
            found.last = lsn;
            lsn = lsn.next();
        }
    }

    /// What it knows of every ledger, for failure reports.
    pub fn describe(&self) -> String {
        let mut text = String::new();
        for ledger in &self.ledgers {
            text.push_str(&format!("\n  {:?} sealed {:?}", ledger.id, ledger.sealed));
            for leg in &ledger.legs {
                let fenced = self.fenced.contains(leg);
                match self.logs.get(&(ledger.id, *leg)) {
                    None => text.push_str(&format!("\n    {leg:?} fenced {fenced}: knows nothing")),
                    Some(log) => {
                        let held: Vec<u64> = log.entries.keys().map(|l| l.0).collect();
                        let (done, sound, trimmed, damaged) = (log.done, log.sound, log.trimmed, &log.damaged);
                        text.push_str(&format!(
                            "\n    {leg:?} fenced {fenced}, done {done}, sound {sound}, trimmed {trimmed}, holds {held:?}, \
                             damaged {damaged:?}"
                        ));
                    }
                }
            }
        }
        text
    }

    fn take_entry(&self, lsn: Lsn, found: &mut Found) -> Option<()> {
        let mut entry = None;
        let mut nodes = BTreeSet::new();
        for ledger in self.ledgers.iter().filter(|l| l.sealed.is_none_or(|s| lsn <= s)) {
            for leg in &ledger.legs {
                let held = self.logs.get(&(ledger.id, *leg)).and_then(|log| log.entries.get(&lsn));
                if let Some(held) = held {
                    assert!(entry.is_none_or(|e| e == *held), "entry {lsn} has two contents: {entry:?} and {held:?}");
                    entry = Some(*held);
                    nodes.insert(leg.node);
                }
            }
        }
        let (value, blocks) = entry?;
        found.log.insert(lsn, value);
        let copies = self.ledgers.last().map_or(1, |l| usize::from(l.rule.copies));
        if nodes.len() < copies {
            found.reappend.push((lsn, value, blocks));
        }
        Some(())
    }
}

impl LegLog {
    fn take(&mut self, entries: Vec<LogEntry>, damaged: Vec<Lsn>, more: bool, payload: &Buf) {
        let mut at = 0;
        let mut last = Lsn::ZERO;
        for entry in entries {
            let len = entry.crcs.len() * BLOCK_BYTES;
            let bytes = payload.slice(at..at + len);
            at += len;
            last = last.max(entry.lsn);
            let value = u64::from_le_bytes(entry.header[..8].try_into().expect("a value"));
            if block_crcs(&bytes) == entry.crcs {
                assert!(*bytes == *payload_of(value, entry.crcs.len()), "entry {} holds another's bytes", entry.lsn);
                self.entries.insert(entry.lsn, (value, entry.crcs.len()));
            } else {
                self.damaged.insert(entry.lsn);
            }
        }
        last = damaged.iter().copied().fold(last, Lsn::max);
        self.damaged.extend(damaged);
        assert!(!more || last >= self.next, "a page of the log leads on");
        self.next = self.next.max(last.next());
        self.done = !more;
    }

    /// Whether this leg proves that it lacks the entry.
    fn lacks(&self, lsn: Lsn) -> bool {
        self.sound
            && self.done
            && lsn > self.trimmed
            && !self.entries.contains_key(&lsn)
            && !self.damaged.contains(&lsn)
    }
}
