//! Judges a history of reads and writes: every 512-byte sector is a register, and must be linearizable.
//!
//! A write that was acknowledged took effect at one instant between its request and its answer; a read saw what was there
//! at one instant between its own. A write whose outcome nobody heard (crash, deposition) *may* have taken effect at one
//! instant before a bound: the moment when the next owner began to serve. After it, what has not happened never will.
//! Reads of an old owner are judged by the same history, so a stale one after a newer write's answer is found.
//!
//! Method: per sector, invocations and endings in order; the set of possible states (value, and which of the open
//! operations have taken effect) is carried along, and extended only when an ending demands it (just-in-time
//! linearization, Lowe 2017). Open reads are satisfied as soon as the value fits, which loses no generality. Of two states
//! with the same value, the one in which fewer *optional* writes (of unheard outcome) have taken effect explains whatever
//! the other does, and is kept alone.

use std::collections::BTreeMap;
use std::fmt;

pub const SECTOR_BYTES: usize = 512;
const WORDS: usize = SECTOR_BYTES / 8;

/// What a sector holds: zero for zeroes, else the number of the write.
pub type Version = u32;

/// Fills `bytes`, whole sectors from `first_sector` on, with a version's pattern.
pub fn fill(bytes: &mut [u8], first_sector: u64, version: Version) {
    for (i, sector) in bytes.chunks_exact_mut(SECTOR_BYTES).enumerate() {
        let base = base_word(first_sector + i as u64, version);
        for (k, word) in sector.chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(&(base ^ (k as u64).wrapping_mul(STEP)).to_le_bytes());
        }
    }
}

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// From this one on the pattern of a version is the same in each MiB, as where a guest has a file twice.
pub const REPEATED: Version = 7 << 29;
const REPEATED_SECTORS: u64 = (1 << 20) / SECTOR_BYTES as u64;

fn base_word(sector: u64, version: Version) -> u64 {
    let named = if version < REPEATED { sector } else { sector % REPEATED_SECTORS };
    u64::from(version) << 32 | (named & 0xffff_ffff)
}

/// The version in one sector's bytes; `None` where they are nobody's for this address.
pub fn decode(bytes: &[u8], sector: u64) -> Option<Version> {
    let word = |k: usize| u64::from_le_bytes(bytes[k * 8..k * 8 + 8].try_into().expect("eight bytes"));
    let base = word(0);
    if base == 0 {
        return bytes.iter().all(|b| *b == 0).then_some(0);
    }
    let version = (base >> 32) as Version;
    let sound =
        base == base_word(sector, version) && (1..WORDS).all(|k| word(k) == base ^ (k as u64).wrapping_mul(STEP));
    sound.then_some(version)
}

/// Whether these bytes of a sector are of a pattern, whatever its version and address. Zeroes are not.
pub fn is_pattern(bytes: &[u8]) -> bool {
    let word = |k: usize| u64::from_le_bytes(bytes[k * 8..k * 8 + 8].try_into().expect("eight bytes"));
    (1..WORDS).all(|k| word(k) == word(0) ^ (k as u64).wrapping_mul(STEP))
}

/// Names an operation of a [`History`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct OpId(pub u32);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ending {
    Open,
    Done(u64),
    /// May have taken effect, but not after this.
    Maybe(u64),
    /// Must not have any effect.
    Never,
}

#[derive(Clone, Debug)]
enum Kind {
    Write(Version),
    /// A rollback: by sector.
    WriteEach(Vec<Version>),
    /// By sector; empty until answered.
    Read(Vec<Version>),
}

#[derive(Clone, Debug)]
struct Op {
    kind: Kind,
    first: u64,
    count: u64,
    invoked: u64,
    ending: Ending,
    who: u32,
}

/// Everything that guests asked for and heard, in one order.
#[derive(Default)]
pub struct History {
    ops: Vec<Op>,
    clock: u64,
    sectors: u64,
    /// What sectors held before everything, where it isn't zeroes.
    initial: BTreeMap<u64, Version>,
}

/// A sector whose history no order of effects explains.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Violation {
    pub sector: u64,
    pub text: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sector {} (block {}) is not linearizable: {}", self.sector, self.sector / 8, self.text)
    }
}

impl History {
    pub fn new(size_bytes: u64) -> History {
        History { sectors: size_bytes / SECTOR_BYTES as u64, ..History::default() }
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    fn invoke(&mut self, kind: Kind, offset: u64, len: u64, who: u32) -> OpId {
        let sector = SECTOR_BYTES as u64;
        assert!(offset.is_multiple_of(sector) && len.is_multiple_of(sector), "{len} bytes at {offset} are not sectors");
        let invoked = self.tick();
        let (first, count) = (offset / sector, len / sector);
        assert!(first + count <= self.sectors, "sectors {first}+{count} beyond the volume's {}", self.sectors);
        self.ops.push(Op { kind, first, count, invoked, ending: Ending::Open, who });
        OpId(self.ops.len() as u32 - 1)
    }

    /// A write (of zeroes, where `version` is zero) is asked for; `who` only serves reports.
    pub fn invoke_write(&mut self, version: Version, offset: u64, len: u64, who: u32) -> OpId {
        self.invoke(Kind::Write(version), offset, len, who)
    }

    pub fn invoke_read(&mut self, offset: u64, len: u64, who: u32) -> OpId {
        self.invoke(Kind::Read(Vec::new()), offset, len, who)
    }

    /// A version for each sector, all at one instant.
    pub fn invoke_write_each(&mut self, versions: Vec<Version>, offset: u64, who: u32) -> OpId {
        let len = (versions.len() * SECTOR_BYTES) as u64;
        self.invoke(Kind::WriteEach(versions), offset, len, who)
    }

    /// What was there from the beginning.
    pub fn begin_with(&mut self, offset: u64, versions: &[Version]) {
        let first = offset / SECTOR_BYTES as u64;
        self.initial.extend(versions.iter().enumerate().map(|(i, version)| (first + i as u64, *version)));
    }

    /// A moment of the history.
    pub fn now(&mut self) -> u64 {
        self.tick()
    }

    /// A read of what was there at an instant not before `invoked`.
    pub fn invoke_read_at(&mut self, invoked: u64, offset: u64, len: u64, who: u32) -> OpId {
        let op = self.invoke_read(offset, len, who);
        self.ops[op.0 as usize].invoked = invoked;
        op
    }

    /// The read is answered, by what was there at an instant not after `ended`.
    pub fn read_done_by(&mut self, op: OpId, versions: Vec<Version>, ended: u64) {
        self.read_done(op, versions);
        self.ops[op.0 as usize].ending = Ending::Done(ended);
    }

    /// The write is acknowledged. After [`History::never_after_now`], it must have happened before that.
    pub fn write_done(&mut self, op: OpId) {
        let now = self.tick();
        let op = &mut self.ops[op.0 as usize];
        op.ending = match op.ending {
            Ending::Maybe(at) => Ending::Done(at),
            _ => Ending::Done(now),
        };
    }

    /// The write was asked of an owner that has a successor already: nobody may ever see it.
    pub fn never(&mut self, op: OpId) {
        self.ops[op.0 as usize].ending = Ending::Never;
    }

    /// The read is answered: a version for each of its sectors.
    pub fn read_done(&mut self, op: OpId, versions: Vec<Version>) {
        let at = self.tick();
        let op = &mut self.ops[op.0 as usize];
        assert_eq!(versions.len() as u64, op.count, "a read is answered in full");
        op.kind = Kind::Read(versions);
        op.ending = Ending::Done(at);
    }

    /// From a status reply: a part of an earlier invocation's range reads as zeroes.
    pub fn hole_seen(&mut self, invoked_with: OpId, offset: u64, len: u64) {
        let at = self.tick();
        let template = &self.ops[invoked_with.0 as usize];
        let (invoked, who) = (template.invoked, template.who);
        let (first, count) = (offset / SECTOR_BYTES as u64, len / SECTOR_BYTES as u64);
        let kind = Kind::Read(vec![0; count as usize]);
        self.ops.push(Op { kind, first, count, invoked, ending: Ending::Done(at), who });
    }

    /// The outcome will never be heard; what it may have done, it has done by now.
    pub fn never_after_now(&mut self, op: OpId) {
        let at = self.tick();
        let op = &mut self.ops[op.0 as usize];
        if op.ending == Ending::Open {
            op.ending = Ending::Maybe(at);
        }
    }

    /// Checks every sector.
    pub fn check(&self) -> Result<(), Violation> {
        let mut by_sector: Vec<Vec<u32>> = vec![Vec::new(); self.sectors as usize];
        for (i, op) in self.ops.iter().enumerate() {
            // An unanswered read says nothing.
            if matches!(&op.kind, Kind::Read(v) if v.is_empty()) || op.ending == Ending::Never {
                continue;
            }
            for sector in op.first..op.first + op.count {
                by_sector[sector as usize].push(i as u32);
            }
        }
        let mut search = Search::default();
        for (sector, ops) in by_sector.iter().enumerate() {
            search.check(self, sector as u64, ops)?;
        }
        Ok(())
    }

    fn value_at(&self, op: u32, sector: u64) -> (bool, Version) {
        let op = &self.ops[op as usize];
        match &op.kind {
            Kind::Write(version) => (true, *version),
            Kind::WriteEach(versions) => (true, versions[(sector - op.first) as usize]),
            Kind::Read(versions) => (false, versions[(sector - op.first) as usize]),
        }
    }

    /// Whether it is a write that need not take effect.
    fn is_optional(&self, op: u32) -> bool {
        let op = &self.ops[op as usize];
        !matches!(op.kind, Kind::Read(_)) && !matches!(op.ending, Ending::Done(_))
    }

    fn describe(&self, sector: u64, ops: &[u32]) -> String {
        let from = ops.len().saturating_sub(24);
        let mut text = String::new();
        for i in &ops[from..] {
            let op = &self.ops[*i as usize];
            let (is_write, value) = self.value_at(*i, sector);
            let name = if is_write { "write" } else { "read" };
            let ending = match op.ending {
                Ending::Open => "unanswered".to_string(),
                Ending::Done(at) => format!("{at}"),
                Ending::Maybe(at) => format!("maybe before {at}"),
                Ending::Never => "must not happen".to_string(),
            };
            text.push_str(&format!("\n    [{} .. {ending}] guest {} {name} {value}", op.invoked, op.who));
        }
        text
    }
}

/// One possible state of a sector: its value, and the open operations that have taken effect (by slot).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct State {
    value: Version,
    effective: u128,
}

/// An operation between its invocation and its ending.
#[derive(Clone, Copy, Debug)]
struct Open {
    op: u32,
    is_write: bool,
    /// Need not take effect at all.
    is_optional: bool,
    value: Version,
}

/// Scratch space of the check of one sector.
#[derive(Default)]
struct Search {
    /// (time, is an ending, operation)
    events: Vec<(u64, bool, u32)>,
    states: Vec<State>,
    open: Vec<Option<Open>>,
    /// What reads of the sector saw.
    seen: Vec<Version>,
}

impl Search {
    fn check(&mut self, history: &History, sector: u64, ops: &[u32]) -> Result<(), Violation> {
        self.events.clear();
        self.seen.clear();
        self.seen.extend(ops.iter().map(|i| history.value_at(*i, sector)).filter(|(w, _)| !w).map(|(_, value)| value));
        self.seen.sort_unstable();
        for i in ops {
            let op = &history.ops[*i as usize];
            // That it took effect would explain nothing.
            if history.is_optional(*i) && self.seen.binary_search(&history.value_at(*i, sector).1).is_err() {
                continue;
            }
            self.events.push((op.invoked, false, *i));
            match op.ending {
                Ending::Open | Ending::Never => {}
                Ending::Done(at) | Ending::Maybe(at) => self.events.push((at, true, *i)),
            }
        }
        self.events.sort_unstable();
        self.states.clear();
        let value = history.initial.get(&sector).copied().unwrap_or(0);
        self.states.push(State { value, effective: 0 });
        self.open.clear();
        for at in 0..self.events.len() {
            let (_, is_ending, op) = self.events[at];
            if !is_ending {
                let (is_write, value) = history.value_at(op, sector);
                let is_optional = history.is_optional(op);
                self.invoke(Open { op, is_write, is_optional, value });
            } else if let Err(why) = self.end(op) {
                let text = format!("{why}{}", history.describe(sector, ops));
                return Err(Violation { sector, text });
            }
        }
        Ok(())
    }

    fn invoke(&mut self, open: Open) {
        let slot = self.open.iter().position(Option::is_none).unwrap_or_else(|| {
            self.open.push(None);
            self.open.len() - 1
        });
        assert!(slot < 128, "more than 128 open operations on one sector");
        self.open[slot] = Some(open);
        if !open.is_write {
            for state in self.states.iter_mut().filter(|s| s.value == open.value) {
                state.effective |= 1 << slot;
            }
        }
    }

    fn end(&mut self, op: u32) -> Result<(), String> {
        let slot = self.open.iter().position(|o| o.is_some_and(|o| o.op == op)).expect("an invoked operation ends");
        let open = self.open[slot].expect("just found");
        let bit = 1_u128 << slot;
        let mut reached: Vec<State> = Vec::with_capacity(self.states.len());
        for i in 0..self.states.len() {
            let state = self.states[i];
            if state.effective & bit != 0 {
                reached.push(state);
            } else {
                if open.is_optional {
                    reached.push(state);
                }
                self.extend(state, bit, &mut reached);
            }
        }
        let possible: Vec<Version> = self.states.iter().map(|s| s.value).collect();
        reached.iter_mut().for_each(|s| s.effective &= !bit);
        self.open[slot] = None;
        self.keep_undominated(reached);
        if self.states.is_empty() {
            let name = if open.is_write { "the write of" } else { "the read of" };
            return Err(format!("{name} {} can't be explained; before it, possible were {possible:?}", open.value));
        }
        Ok(())
    }

    fn keep_undominated(&mut self, mut reached: Vec<State>) {
        reached.sort_unstable();
        reached.dedup();
        let is_optional = |o: &Option<Open>| o.is_some_and(|o| o.is_optional);
        let optional =
            self.open.iter().enumerate().filter(|(_, o)| is_optional(o)).fold(0, |m, (i, _)| m | 1_u128 << i);
        let dominates = |a: &State, b: &State| {
            a != b
                && a.value == b.value
                && a.effective & !optional == b.effective & !optional
                && a.effective & optional & !b.effective == 0
        };
        self.states.clear();
        for state in &reached {
            if optional == 0 || !reached.iter().any(|other| dominates(other, state)) {
                self.states.push(*state);
            }
        }
    }

    /// All states that orders of open writes lead to, up to the one in which `goal` has taken effect.
    fn extend(&self, from: State, goal: u128, reached: &mut Vec<State>) {
        let mut seen = vec![from];
        let mut next = 0;
        while next < seen.len() {
            let state = seen[next];
            next += 1;
            for (slot, open) in self.open.iter().enumerate() {
                let Some(open) = open.filter(|o| o.is_write) else { continue };
                if state.effective >> slot & 1 == 1 {
                    continue;
                }
                let after = self.apply(state, slot, open.value);
                if after.effective & goal != 0 {
                    reached.push(after);
                    continue;
                }
                // On the way to the goal, an optional write helps only if a read saw it.
                let is_needless = open.is_optional && after.effective == state.effective | 1 << slot;
                if !is_needless && !seen.contains(&after) {
                    seen.push(after);
                }
            }
        }
    }

    fn apply(&self, state: State, slot: usize, value: Version) -> State {
        let mut effective = state.effective | 1 << slot;
        for (i, open) in self.open.iter().enumerate() {
            if open.is_some_and(|o| !o.is_write && o.value == value) {
                effective |= 1 << i;
            }
        }
        State { value, effective }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: u64 = SECTOR_BYTES as u64;

    fn read(history: &mut History, version: Version) {
        let op = history.invoke_read(0, LEN, 0);
        history.read_done(op, vec![version]);
    }

    fn write(history: &mut History, version: Version) {
        let op = history.invoke_write(version, 0, LEN, 0);
        history.write_done(op);
    }

    #[test]
    fn patterns_name_address_and_version() {
        let mut bytes = vec![0; 1024];
        fill(&mut bytes, 7, 9);
        assert_eq!(decode(&bytes[..512], 7), Some(9));
        assert_eq!(decode(&bytes[512..], 8), Some(9));
        assert_eq!(decode(&bytes[512..], 7), None);
        assert_eq!(decode(&[0; 512], 3), Some(0));
        bytes[100] ^= 1;
        assert_eq!(decode(&bytes[..512], 7), None);
        fill(&mut bytes, 7, REPEATED);
        assert_eq!(decode(&bytes[..512], 7 + REPEATED_SECTORS), Some(REPEATED));
        assert_eq!(decode(&bytes[..512], 8), None);
    }

    #[test]
    fn a_read_sees_the_last_write_and_nothing_older() {
        let mut history = History::new(4096);
        read(&mut history, 0);
        write(&mut history, 1);
        read(&mut history, 1);
        write(&mut history, 2);
        assert!(history.check().is_ok());
        read(&mut history, 1);
        let violation = history.check().unwrap_err();
        assert_eq!(violation.sector, 0);
        assert!(violation.to_string().contains("the read of 1 can't be explained"), "{violation}");
    }

    #[test]
    fn however_many_writes_nobody_heard_of() {
        let mut history = History::new(4096);
        for version in 1..1000 {
            history.invoke_write(version, 0, LEN, 0);
        }
        read(&mut history, 700);
        read(&mut history, 300);
        assert!(history.check().is_ok());
        read(&mut history, 0);
        assert!(history.check().is_err(), "no zero is left");
    }

    #[test]
    fn overlapping_writes_go_either_way_but_not_both() {
        for (first, second, sound) in [(1, 1, true), (2, 2, true), (1, 2, false), (0, 1, false)] {
            let mut history = History::new(4096);
            let a = history.invoke_write(1, 0, LEN, 0);
            let b = history.invoke_write(2, 0, LEN, 0);
            history.write_done(a);
            history.write_done(b);
            read(&mut history, first);
            read(&mut history, second);
            assert_eq!(history.check().is_ok(), sound, "{first} then {second}");
        }
    }

    #[test]
    fn a_read_during_a_write_may_see_both_but_never_flips_back() {
        for (first, second, sound) in [(0, 1, true), (1, 1, true), (1, 0, false)] {
            let mut history = History::new(4096);
            let a = history.invoke_write(1, 0, LEN, 0);
            read(&mut history, first);
            read(&mut history, second);
            history.write_done(a);
            assert_eq!(history.check().is_ok(), sound, "{first} then {second}");
        }
    }

    #[test]
    fn a_write_lost_in_a_crash_surfaces_until_the_next_owner_serves_or_never() {
        for (first, second, sound) in [(0, 0, true), (1, 1, true), (0, 1, false), (1, 0, false)] {
            let mut history = History::new(4096);
            let a = history.invoke_write(1, 0, LEN, 0);
            history.never_after_now(a);
            read(&mut history, first);
            read(&mut history, second);
            assert_eq!(history.check().is_ok(), sound, "{first} then {second}");
        }
    }

    #[test]
    fn zeroes_of_several_discards_are_told_apart_by_time() {
        let mut history = History::new(4096);
        write(&mut history, 1);
        write(&mut history, 0);
        read(&mut history, 0);
        write(&mut history, 2);
        assert!(history.check().is_ok());
        read(&mut history, 0);
        assert!(history.check().is_err());
    }
}
