//! The window of log entries that are in memory: from the trim point to the newest, completed or in flight.
//!
//! Invariants: (1) LSNs in the window are consecutive; (2) entries complete in LSN order, none while the open ledger is
//! frozen; (3) an entry's payload stays until the entry is trimmed, so that it can be appended again; (4) the sum of
//! entry sizes is what the write-back budget bounds; (5) what is summed up is what a walk over the window finds
//! ([`Log::verify`]), so that nobody has to walk who only asks for the state.

use crate::api::Mutations;
use crate::basis::Answer;
use crate::segment::encrypt::Sent;
use holdfast_base::{
    BLOCK_BYTES, BlockCrc, BlockError, Buf, HeadId, Instant, Key, LedgerId, Lsn, RequestToken, Token, Urgency,
};
use holdfast_format::ledger::{AckRule, LedgerRef, Leg};
use holdfast_format::record::{Checkpoint, Record, SegmentNo};
use holdfast_stages::Trail;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// What to do when an entry completes.
#[derive(Clone, Debug)]
pub enum Done {
    Nothing,
    /// One part of a guest's write, discard or zeroing is durable and visible.
    Write(Token),
    /// A partial block is durable; others may write it again.
    Modified {
        op: Token,
        modify: u64,
    },
    /// A segment became part of the volume.
    Committed(Token),
    Checkpointed(Checkpoint),
    /// A shard that was made again, or moved, is named where it lies now.
    Rehomed {
        repair: Token,
        shard: (SegmentNo, u8),
        former: Leg,
    },
    /// A pass that moved nothing is over.
    PassOver,
    /// These segments' shards may be deleted.
    Freed(Vec<SegmentNo>),
}

#[derive(Debug)]
pub struct Entry {
    pub header: Vec<u8>,
    pub record: Record,
    pub crcs: Arc<[BlockCrc]>,
    pub payload: Buf,
    /// What legs get instead of header, checksums and payload, while it may be sent again.
    pub encrypted: Option<Box<Sent>>,
    pub done: Done,
    /// To whichever leg it goes, and however often.
    pub urgency: Urgency,
    /// The ledger that holds (or is to hold) it, and the legs that do ([`Log::on_held`]) or were asked to.
    pub ledger: LedgerId,
    pub have: u8,
    pub sent: u8,
    pub appended_at: Instant,
    /// Since when it has all legs that the rule asks for, and by which answer.
    pub acknowledged: Option<(Instant, Option<Answer>)>,
    /// Bytes that were ever appended before it; the log sets it.
    pub position: u64,
    /// Blocks of a write that the map still takes from the log; [`Log::set_live`] keeps the account of all.
    pub live_blocks: u64,
    /// It is likely to be overwritten soon.
    pub is_hot: bool,
    /// A segment job is writing it out; see [`Log::set_destaging`].
    pub destaging: bool,
}

/// Memory and journal overhead of an entry beyond its payload.
const ENTRY_OVERHEAD_BYTES: u64 = 256;

impl Entry {
    pub fn size_bytes(&self) -> u64 {
        (self.payload.len() + self.header.len()) as u64 + ENTRY_OVERHEAD_BYTES
    }

    /// Live blocks of it that nobody destages.
    fn waiting_blocks(&self) -> u64 {
        if self.destaging { 0 } else { self.live_blocks }
    }

    /// Volume blocks that it wrote.
    pub fn extent(&self) -> Option<(Key, u32)> {
        match self.record {
            Record::Write { key, blocks } => Some((key, blocks)),
            _ => None,
        }
    }
}

/// The ledger that takes appends.
#[derive(Clone, Debug)]
pub struct OpenLedger {
    pub id: LedgerId,
    pub legs: Vec<Leg>,
    pub rule: AckRule,
    /// Until when each leg lets us serve reads.
    pub grants: Vec<Instant>,
    /// When the youngest request was sent that each leg has carried out for us: until then it had promised nobody a
    /// higher epoch.
    pub heeded: Vec<Instant>,
    /// Grant requests on the way.
    pub asked: u8,
    /// Legs whose device does not know the ledger: it was replaced, or wiped. It may serve everything else.
    pub gone: u8,
    /// Legs that new entries go to: an ack set of usable ones, or zero if there is none.
    pub preferred: u8,
    /// Chosen seal: no acknowledgement completes anything any more (protocol rule 4).
    pub frozen: bool,
}

impl OpenLedger {
    pub fn new(reference: &LedgerRef) -> OpenLedger {
        OpenLedger {
            id: reference.id,
            legs: reference.legs.clone(),
            rule: reference.rule,
            grants: vec![Instant::ZERO; reference.legs.len()],
            heeded: vec![Instant::ZERO; reference.legs.len()],
            asked: 0,
            gone: 0,
            preferred: 0,
            frozen: false,
        }
    }

    /// The smallest prefix of usable legs, in leg order, that acknowledges.
    pub fn choose_preferred(&self, usable: u8) -> u8 {
        let mut mask = 0;
        for i in 0..self.legs.len() {
            if usable >> i & 1 == 1 {
                mask |= 1 << i;
                if self.rule.is_ack_set(&self.legs, mask) {
                    return self.without_surplus(mask);
                }
            }
        }
        0
    }

    /// Drops legs that the rule does not need (a second device of a node already in).
    fn without_surplus(&self, mut mask: u8) -> u8 {
        for i in (0..self.legs.len()).rev() {
            let less = mask & !(1 << i);
            if mask != less && self.rule.is_ack_set(&self.legs, less) {
                mask = less;
            }
        }
        mask
    }

    pub fn granted(&self, now: Instant) -> bool {
        self.rule.is_ack_set(&self.legs, self.granting(now))
    }

    /// Whether a read that began at `since` may be answered: each leg of an ack set grants it, or has heeded this owner
    /// since.
    pub fn granted_since(&self, now: Instant, since: Instant) -> bool {
        let heeding = self.heeded.iter().enumerate().filter(|(_, at)| **at >= since);
        let mask = heeding.fold(self.granting(now), |mask, (i, _)| mask | 1 << i);
        self.rule.is_ack_set(&self.legs, mask)
    }

    /// Legs whose grants have not run out.
    fn granting(&self, now: Instant) -> u8 {
        let legs = self.grants.iter().enumerate().filter(|(_, until)| **until > now);
        legs.fold(0, |mask, (i, _)| mask | 1 << i)
    }
}

#[derive(Debug)]
pub struct Log {
    first: Lsn,
    entries: VecDeque<Entry>,
    /// Everything up to here is acknowledged and applied.
    pub completed: Lsn,
    /// Everything up to here is gone from the window and may go from the legs.
    pub trimmed: Lsn,
    /// When more may go, if there was too much for one turn.
    pub trims_at: Option<Instant>,
    /// Legs have yet to be told of what has gone: they are when that was all.
    pub trims_untold: bool,
    pub bytes: u64,
    in_flight_bytes: u64,
    /// Bytes ever appended by this opening.
    pub total_bytes: u64,
    /// Every entry before it is destaged, being destaged, or has nothing to destage.
    cursor: Lsn,
    /// Live blocks of all entries, and of those that nobody destages.
    live_blocks: u64,
    waiting_blocks: u64,
    /// Completed entries by the ledger and the legs of it that hold them.
    held: BTreeMap<(LedgerId, u8), u64>,
    pub open: Option<OpenLedger>,
}

impl Default for Log {
    fn default() -> Log {
        Log {
            first: Lsn(1),
            entries: VecDeque::new(),
            completed: Lsn::ZERO,
            trimmed: Lsn::ZERO,
            trims_at: None,
            trims_untold: false,
            bytes: 0,
            in_flight_bytes: 0,
            total_bytes: 0,
            cursor: Lsn(1),
            live_blocks: 0,
            waiting_blocks: 0,
            held: BTreeMap::new(),
            open: None,
        }
    }
}

impl Log {
    /// A window that begins after `trimmed`, as recovery found it.
    pub fn starting_after(trimmed: Lsn) -> Log {
        Log { first: trimmed.next(), cursor: trimmed.next(), completed: trimmed, trimmed, ..Log::default() }
    }

    pub fn next_lsn(&self) -> Lsn {
        Lsn(self.first.0 + self.entries.len() as u64)
    }

    pub fn push(&mut self, mut entry: Entry) -> Lsn {
        let lsn = self.next_lsn();
        entry.position = self.total_bytes;
        self.bytes += entry.size_bytes();
        self.in_flight_bytes += entry.size_bytes();
        self.total_bytes += entry.size_bytes();
        self.live_blocks += entry.live_blocks;
        self.waiting_blocks += entry.waiting_blocks();
        self.entries.push_back(entry);
        lsn
    }

    pub fn get(&self, lsn: Lsn) -> Option<&Entry> {
        self.entries.get(lsn.0.checked_sub(self.first.0)? as usize)
    }

    pub fn get_mut(&mut self, lsn: Lsn) -> Option<&mut Entry> {
        self.entries.get_mut(lsn.0.checked_sub(self.first.0)? as usize)
    }

    /// Entries from `from` on, in order.
    pub fn iter_from(&self, from: Lsn) -> impl Iterator<Item = (Lsn, &Entry)> {
        let skip = from.0.saturating_sub(self.first.0) as usize;
        let first = self.first.0.max(from.0);
        self.entries.iter().skip(skip).enumerate().map(move |(i, e)| (Lsn(first + i as u64), e))
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Moves `completed` on by one.
    pub fn complete_next(&mut self) -> Lsn {
        self.completed = self.completed.next();
        self.in_flight_bytes -= self.get(self.completed).map_or(0, Entry::size_bytes);
        self.count_held(self.completed);
        self.completed
    }

    /// Everything after `completed` is to complete again, one by one.
    pub fn replay_after(&mut self, completed: Lsn) {
        self.completed = completed;
        self.in_flight_bytes = self.iter_from(completed.next()).map(|(_, e)| e.size_bytes()).sum();
        self.held.clear();
        for lsn in self.first.0..=completed.0 {
            self.count_held(Lsn(lsn));
        }
    }

    // ---- who holds what ----

    /// A leg of its ledger holds the entry from now on.
    pub fn on_held(&mut self, lsn: Lsn, leg: u8) {
        self.change_holders(lsn, |entry| entry.have |= 1 << leg);
    }

    /// Notes when an entry of the open ledger has the legs that it needs: from then on it waits for those before it.
    pub fn note_acknowledged(&mut self, heard: (Instant, Option<Answer>), lsn: Lsn) {
        let Some(open) = &self.open else { return };
        let has_all = |entry: &Entry| entry.ledger == open.id && open.rule.is_ack_set(&open.legs, entry.have);
        if self.get(lsn).is_some_and(|entry| entry.acknowledged.is_none() && has_all(entry)) {
            self.get_mut(lsn).expect("just seen").acknowledged = Some(heard);
        }
    }

    /// Another ledger is to hold the entry, no leg of which was asked yet.
    pub fn give_to(&mut self, lsn: Lsn, ledger: LedgerId) {
        self.change_holders(lsn, |entry| {
            (entry.ledger, entry.have, entry.sent) = (ledger, 0, 0);
            entry.acknowledged = None;
        });
    }

    fn change_holders(&mut self, lsn: Lsn, change: impl FnOnce(&mut Entry)) {
        self.count_held_no_more(lsn);
        if let Some(entry) = self.get_mut(lsn) {
            change(entry);
        }
        self.count_held(lsn);
    }

    fn count_held(&mut self, lsn: Lsn) {
        if let Some(by) = self.holders(lsn) {
            *self.held.entry(by).or_default() += 1;
        }
    }

    fn count_held_no_more(&mut self, lsn: Lsn) {
        let Some(by) = self.holders(lsn) else { return };
        let count = self.held.get_mut(&by).expect("it was counted when it completed");
        *count -= 1;
        if *count == 0 {
            self.held.remove(&by);
        }
    }

    /// Of a completed entry.
    fn holders(&self, lsn: Lsn) -> Option<(LedgerId, u8)> {
        self.get(lsn).filter(|_| lsn <= self.completed).map(|entry| (entry.ledger, entry.have))
    }

    /// How many completed entries each set of a ledger's legs holds.
    pub fn held(&self) -> impl Iterator<Item = (LedgerId, u8, u64)> {
        self.held.iter().map(|((ledger, have), count)| (*ledger, *have, *count))
    }

    // ---- what is live ----

    /// Bytes of entries that are not completed.
    pub fn in_flight_bytes(&self) -> u64 {
        self.in_flight_bytes
    }

    /// Whether no entry holds data that only the log has.
    pub fn all_destaged(&self) -> bool {
        self.in_flight() == 0 && self.live_blocks == 0
    }

    /// Blocks that the map takes from entries.
    pub fn live_blocks(&self) -> u64 {
        self.live_blocks
    }

    pub fn in_flight(&self) -> u64 {
        self.next_lsn().0 - 1 - self.completed.0
    }

    /// Whether the next entry has what the rule asks.
    pub fn next_is_acknowledged(&self, mutations: &Mutations) -> bool {
        let Some(open) = &self.open else { return false };
        if open.frozen && !mutations.late_ack_after_freeze() {
            return false;
        }
        let Some(entry) = self.get(self.completed.next()) else { return false };
        let rule = if mutations.ack_one_short() && open.rule == AckRule::NESTED {
            AckRule::flat(1)
        } else if mutations.ack_one_short() {
            AckRule { copies: open.rule.copies - 1, domains: open.rule.domains.saturating_sub(1) }
        } else {
            open.rule
        };
        entry.ledger == open.id && rule.is_ack_set(&open.legs, entry.have)
    }

    /// Bytes that the map takes from entries which nobody destages.
    pub fn waiting_bytes(&self) -> u64 {
        self.waiting_blocks * BLOCK_BYTES as u64
    }

    /// Bytes of the log from the first entry on that waits to be destaged: they can't be trimmed before it is.
    pub fn waiting_span(&mut self) -> u64 {
        let from = self.next_to_destage();
        self.get(from).map_or(0, |entry| self.total_bytes - entry.position)
    }

    /// So many blocks of an entry are live now, by what were; of one behind the trim point nothing is counted.
    pub fn set_live(&mut self, lsn: Lsn, change: impl FnOnce(u64) -> u64) {
        self.change(lsn, |entry| entry.live_blocks = change(entry.live_blocks));
    }

    /// A segment job writes the entry out from now on, or does no more.
    pub fn set_destaging(&mut self, lsn: Lsn, is_so: bool) {
        self.change(lsn, |entry| entry.destaging = is_so);
    }

    fn change(&mut self, lsn: Lsn, change: impl FnOnce(&mut Entry)) {
        let Some(entry) = self.get_mut(lsn) else { return };
        let before = (entry.live_blocks, entry.waiting_blocks());
        change(entry);
        let after = (entry.live_blocks, entry.waiting_blocks());
        self.live_blocks = self.live_blocks - before.0 + after.0;
        self.waiting_blocks = self.waiting_blocks - before.1 + after.1;
    }

    /// The first completed entry with live data that nobody destages yet.
    pub fn next_to_destage(&mut self) -> Lsn {
        self.cursor = self.cursor.max(self.first);
        while self.cursor <= self.completed && self.get(self.cursor).is_some_and(|e| e.live_blocks == 0 || e.destaging)
        {
            self.cursor = self.cursor.next();
        }
        self.cursor
    }

    /// Entries from the first one on that nobody has begun to destage, whether they have anything to destage or not.
    pub fn undestaged_count(&self) -> usize {
        (self.next_lsn().0 - self.cursor.max(self.first).0) as usize
    }

    /// These are not being destaged any more, and were not: they come first again.
    pub fn destage_again(&mut self, entries: &[Lsn]) {
        for lsn in entries {
            self.set_destaging(*lsn, false);
            self.cursor = self.cursor.min(*lsn);
        }
    }

    /// The oldest entry that is kept; the next one to come if there is none.
    pub fn first(&self) -> Lsn {
        self.first
    }

    /// First LSN whose data only the log has; the next one to come if there is none.
    pub fn first_undestaged(&self) -> Lsn {
        self.iter_from(self.first)
            .find(|(lsn, e)| *lsn > self.completed || e.live_blocks > 0)
            .map_or(self.next_lsn(), |(lsn, _)| lsn)
    }

    /// Drops entries up to and including `upto`, which are completed, and no further than what only the log has; at most
    /// `count` of them. How many it were, and whether there are more.
    pub fn trim(&mut self, upto: Lsn, count: usize) -> (usize, bool) {
        assert!(upto <= self.completed, "trim to {upto:?} beyond the completed {:?}", self.completed);
        let mut dropped = 0;
        let is_dropped = |entry: &Entry| entry.live_blocks == 0;
        while dropped < count && self.first <= upto && self.entries.front().is_some_and(is_dropped) {
            self.count_held_no_more(self.first);
            let entry = self.entries.pop_front().expect("just seen");
            self.bytes -= entry.size_bytes();
            self.waiting_blocks -= entry.waiting_blocks();
            self.trimmed = self.trimmed.max(self.first);
            self.first = self.first.next();
            dropped += 1;
        }
        (dropped, dropped == count && self.first <= upto)
    }

    /// Walks over the window, and asserts that what is kept says the same (tests and the simulator).
    pub fn verify(&self) {
        let of_all = |of: fn(&Entry) -> u64| self.entries.iter().map(of).sum::<u64>();
        let sums = (of_all(Entry::size_bytes), of_all(|e| e.live_blocks), of_all(Entry::waiting_blocks));
        assert_eq!((self.bytes, self.live_blocks, self.waiting_blocks), sums, "sums are what a walk finds");
        let mut held: BTreeMap<(LedgerId, u8), u64> = BTreeMap::new();
        for (_, entry) in self.iter_from(self.first).take_while(|(lsn, _)| *lsn <= self.completed) {
            *held.entry((entry.ledger, entry.have)).or_default() += 1;
        }
        assert_eq!(self.held, held, "who holds entries is what a walk finds");
    }
}

/// Answers owed to the guest for one request: done when every part is.
#[derive(Debug)]
pub struct WriteOp {
    pub urgency: Urgency,
    pub head: HeadId,
    pub token: RequestToken,
    pub began_at: Instant,
    pub trail: Trail,
    pub parts: u32,
    pub bytes: u64,
    /// Why a part was not done: the guest hears of it when nothing of the write is under way any more, since what comes
    /// later would undo what it writes after the answer.
    pub failed: Option<BlockError>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_base::{Epoch, ObjectId, Prng};

    fn ledger(n: u32) -> LedgerId {
        LedgerId { epoch: Epoch(1), n }
    }

    fn entry(blocks: u32) -> Entry {
        Entry {
            header: vec![0; 32],
            record: Record::Write { key: Key::new(ObjectId(0), holdfast_base::Lba(0)), blocks },
            crcs: Arc::from([]),
            payload: Buf::zeroes(blocks as usize * BLOCK_BYTES),
            encrypted: None,
            done: Done::Nothing,
            urgency: Urgency::Normal,
            ledger: ledger(1),
            have: 0,
            sent: 0,
            appended_at: Instant::ZERO,
            acknowledged: None,
            position: 0,
            live_blocks: 0,
            is_hot: false,
            destaging: false,
        }
    }

    #[test]
    fn sums_are_what_a_walk_finds_whatever_happens_to_entries() {
        let (mut log, mut prng) = (Log::default(), Prng::new(1));
        for _ in 0..3000 {
            let any = Lsn(log.first().0 + prng.below(log.len() as u64 + 2));
            match prng.below(9) {
                0 | 1 => {
                    log.push(entry(1 + prng.below(4) as u32));
                }
                2 if log.in_flight() > 0 => {
                    let lsn = log.complete_next();
                    log.set_live(lsn, |_| prng.below(4));
                }
                3 if any <= log.completed => log.set_live(any, |live| live.saturating_sub(1)),
                4 => log.set_destaging(any, prng.chance(500)),
                5 => log.destage_again(&[any]),
                6 => log.on_held(any, prng.below(3) as u8),
                7 if any > log.completed => log.give_to(any, ledger(2)),
                8 if prng.chance(100) => {
                    let (end, first) = (log.first_undestaged().min(log.completed.next()), log.first());
                    let (dropped, goes_on) = log.trim(log.completed, 20);
                    assert_eq!(
                        log.first(),
                        Lsn(end.0.min(first.0 + 20)),
                        "{dropped} dropped from {first:?} to {end:?}"
                    );
                    assert_eq!(
                        (goes_on, dropped as u64),
                        (dropped == 20 && log.first() <= log.completed, log.first().0 - first.0)
                    );
                }
                _ => {}
            }
            log.verify();
            let live = |(_, entry): (Lsn, &Entry)| entry.live_blocks;
            assert_eq!(log.live_blocks(), log.iter_from(Lsn::ZERO).map(live).sum::<u64>());
            assert_eq!(log.all_destaged(), log.first_undestaged() == log.next_lsn());
        }
        let (completed, again) = (log.completed, log.trimmed);
        log.replay_after(again);
        log.verify();
        assert!(log.held().next().is_none(), "nothing is completed");
        while log.completed < completed {
            log.complete_next();
        }
        log.verify();
        let held: u64 = log.held().map(|(.., entries)| entries).sum();
        assert!(held > 10 && held == completed.0 - again.0 && log.held().count() > 2);
    }
}
