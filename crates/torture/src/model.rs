//! What every cell of a volume may hold: a register with crash semantics.
//!
//! A write that was acknowledged is what reads return, until another write begins. A write in flight may be seen or not.
//! A write whose answer was lost with the host may have happened or not; the first read that finds out settles it for
//! good, since a value that could flip back would be no value. Of writes that overlap in time either may be the last.
//!
//! Role: pure bookkeeping, fed with the beginning and end of every request; never looks at bytes or clocks.
//!
//! Invariants:
//! 1. A cell has at least one candidate, and a candidate older than the start of an acknowledged write is none.
//! 2. A read is judged by what was possible at any moment between its start and its end.

use crate::cell::Version;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

/// Cells of one request: indices within the volume.
pub type Cells = Range<u32>;

/// Order of events, counted.
type Tick = u64;

/// A value that a cell may hold, and when the write of it ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Candidate {
    version: Version,
    since: Tick,
}

struct Write {
    cells: Cells,
    version: Version,
    begun: Tick,
}

#[derive(Default)]
struct Read {
    cells: Cells,
    /// What cells could still hold after the read began, and cannot any more.
    passed: HashMap<u32, Vec<Version>>,
    /// Writes that were in flight at some time during the read: it settles nothing there.
    raced: Vec<Cells>,
}

/// Names a request in flight; the caller's choice.
pub type Request = u64;

/// A read that returned what could not be there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mismatch {
    pub cell: u32,
    pub found: Version,
    pub possible: Vec<Version>,
}

pub struct Model {
    /// The only candidate of each cell, or the mark of those that have several.
    settled: Vec<Candidate>,
    unsettled: HashMap<u32, Vec<Candidate>>,
    writes: BTreeMap<Request, Write>,
    reads: BTreeMap<Request, Read>,
    now: Tick,
}

const UNSETTLED: Candidate = Candidate { version: Version(u64::MAX), since: 0 };

fn overlap(a: &Cells, b: &Cells) -> bool {
    a.start < b.end && b.start < a.end
}

impl Model {
    /// A fresh volume: all zeroes.
    pub fn new(cells: u32) -> Model {
        Model {
            settled: vec![Candidate { version: Version::ZEROES, since: 0 }; cells as usize],
            unsettled: HashMap::new(),
            writes: BTreeMap::new(),
            reads: BTreeMap::new(),
            now: 0,
        }
    }

    pub fn cells(&self) -> u32 {
        self.settled.len() as u32
    }

    /// Cells of which more than one value is possible.
    pub fn unsettled(&self) -> usize {
        self.unsettled.len()
    }

    /// A write (or trim, with [`Version::ZEROES`]) is about to be sent.
    pub fn begin_write(&mut self, request: Request, cells: Cells, version: Version) {
        assert!(cells.end <= self.cells(), "a write stays within the volume");
        self.now += 1;
        for read in self.reads.values_mut().filter(|r| overlap(&r.cells, &cells)) {
            read.raced.push(cells.clone());
        }
        let begun = self.now;
        assert!(self.writes.insert(request, Write { cells, version, begun }).is_none(), "request {request} is in use");
    }

    /// The write was acknowledged: what was there before it began is gone.
    pub fn finish_write(&mut self, request: Request) {
        let write = self.writes.remove(&request).expect("a write ends once");
        self.now += 1;
        for cell in write.cells.clone() {
            let mut candidates = self.candidates(cell);
            let passed: Vec<Version> = candidates.iter().filter(|c| c.since < write.begun).map(|c| c.version).collect();
            self.pass(cell, &passed);
            candidates.retain(|c| c.since >= write.begun && c.version != write.version);
            candidates.push(Candidate { version: write.version, since: self.now });
            self.set(cell, candidates);
        }
    }

    /// The answer was lost: the write may have happened or not.
    pub fn lose_write(&mut self, request: Request) {
        let write = self.writes.remove(&request).expect("a write ends once");
        self.now += 1;
        for cell in write.cells.clone() {
            let mut candidates = self.candidates(cell);
            candidates.retain(|c| c.version != write.version);
            candidates.push(Candidate { version: write.version, since: self.now });
            self.set(cell, candidates);
        }
    }

    /// A read is about to be sent.
    pub fn begin_read(&mut self, request: Request, cells: Cells) {
        assert!(cells.end <= self.cells(), "a read stays within the volume");
        self.now += 1;
        let raced = self.writes.values().filter(|w| overlap(&w.cells, &cells)).map(|w| w.cells.clone()).collect();
        let read = Read { cells, passed: HashMap::new(), raced };
        assert!(self.reads.insert(request, read).is_none(), "request {request} is in use");
    }

    /// The read's answer was lost.
    pub fn lose_read(&mut self, request: Request) {
        self.reads.remove(&request).expect("a read ends once");
    }

    /// The read's answer is here: call [`Reading::see`] for each cell of it.
    pub fn finish_read(&mut self, request: Request) -> Reading<'_> {
        let read = self.reads.remove(&request).expect("a read ends once");
        self.now += 1;
        Reading { model: self, read }
    }

    /// These values are over; reads that are in flight may have found them before.
    fn pass(&mut self, cell: u32, values: &[Version]) {
        for read in self.reads.values_mut().filter(|r| r.cells.contains(&cell)) {
            read.passed.entry(cell).or_default().extend(values);
        }
    }

    fn candidates(&mut self, cell: u32) -> Vec<Candidate> {
        self.unsettled.remove(&cell).unwrap_or_else(|| vec![self.settled[cell as usize]])
    }

    fn set(&mut self, cell: u32, candidates: Vec<Candidate>) {
        assert!(!candidates.is_empty(), "a cell holds something");
        if let [only] = candidates[..] {
            self.settled[cell as usize] = only;
        } else {
            self.settled[cell as usize] = UNSETTLED;
            self.unsettled.insert(cell, candidates);
        }
    }
}

/// An answered read being judged.
pub struct Reading<'a> {
    model: &'a mut Model,
    read: Read,
}

impl Reading<'_> {
    /// What a cell of the read could hold while it was in flight.
    pub fn possible(&self, cell: u32) -> Vec<Version> {
        let model = &self.model;
        let mut possible: Vec<Version> = match model.unsettled.get(&cell) {
            Some(candidates) => candidates.iter().map(|c| c.version).collect(),
            None => vec![model.settled[cell as usize].version],
        };
        possible.extend(model.writes.values().filter(|w| w.cells.contains(&cell)).map(|w| w.version));
        possible.extend(self.read.passed.get(&cell).into_iter().flatten());
        possible.sort_unstable();
        possible.dedup();
        possible
    }

    /// The read returned `found` for `cell`.
    pub fn see(&mut self, cell: u32, found: Version) -> Result<(), Mismatch> {
        assert!(self.read.cells.contains(&cell), "the cell is one that was read");
        if self.model.settled[cell as usize].version == found {
            return Ok(());
        }
        let possible = self.possible(cell);
        if !possible.contains(&found) {
            return Err(Mismatch { cell, found, possible });
        }
        if !self.read.raced.iter().any(|r| r.contains(&cell)) {
            // Without a race, what passed during this read is the only thing besides candidates that it may return.
            let candidates = self.model.candidates(cell);
            let Some(chosen) = candidates.iter().find(|c| c.version == found).copied() else {
                self.model.set(cell, candidates);
                return Ok(());
            };
            let others: Vec<Version> = candidates.iter().map(|c| c.version).filter(|v| *v != found).collect();
            self.model.pass(cell, &others);
            self.model.set(cell, vec![chosen]);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Version = Version(1);
    const B: Version = Version(2);

    fn read(model: &mut Model, found: Version) -> Result<(), Mismatch> {
        model.begin_read(100, 0..1);
        model.finish_read(100).see(0, found)
    }

    #[test]
    fn an_acknowledged_write_is_what_reads_return() {
        let mut m = Model::new(1);
        assert!(read(&mut m, Version::ZEROES).is_ok());
        m.begin_write(1, 0..1, A);
        assert!(read(&mut m, A).is_ok(), "in flight it may be seen");
        assert!(read(&mut m, Version::ZEROES).is_ok(), "or not");
        m.finish_write(1);
        assert!(read(&mut m, Version::ZEROES).is_err());
        assert!(read(&mut m, A).is_ok());
    }

    #[test]
    fn a_lost_write_may_have_happened_until_a_read_settles_it() {
        let mut m = Model::new(1);
        m.begin_write(1, 0..1, A);
        m.lose_write(1);
        assert_eq!(m.unsettled(), 1);
        assert!(read(&mut m, Version::ZEROES).is_ok());
        assert_eq!(read(&mut m, A).unwrap_err().possible, [Version::ZEROES], "it may not come back");
        assert_eq!(m.unsettled(), 0);
    }

    #[test]
    fn a_write_begun_after_a_loss_buries_it() {
        let mut m = Model::new(1);
        m.begin_write(1, 0..1, A);
        m.lose_write(1);
        m.begin_write(2, 0..1, B);
        m.finish_write(2);
        assert!(read(&mut m, A).is_err());
        assert!(read(&mut m, B).is_ok());
    }

    #[test]
    fn of_two_writes_that_overlap_in_time_either_may_be_last() {
        for last in [A, B] {
            let mut m = Model::new(1);
            m.begin_write(1, 0..1, A);
            m.begin_write(2, 0..1, B);
            m.finish_write(1);
            m.finish_write(2);
            assert!(read(&mut m, Version::ZEROES).is_err());
            assert!(read(&mut m, last).is_ok());
            assert!(read(&mut m, if last == A { B } else { A }).is_err(), "once seen it is settled");
        }
    }

    #[test]
    fn a_read_in_flight_may_have_found_what_another_settles_meanwhile() {
        let mut m = Model::new(1);
        m.begin_write(1, 0..1, A);
        m.begin_write(2, 0..1, B);
        m.finish_write(1);
        m.begin_read(9, 0..1);
        m.finish_write(2);
        assert!(read(&mut m, B).is_ok());
        assert!(m.finish_read(9).see(0, A).is_ok(), "it began before the other write was acknowledged");
        assert!(read(&mut m, A).is_err());
        assert!(read(&mut m, B).is_ok());
    }

    #[test]
    fn a_long_read_may_return_what_was_there_when_it_began() {
        let mut m = Model::new(2);
        m.begin_read(9, 0..2);
        for (request, version) in [(1, A), (2, B)] {
            m.begin_write(request, 0..1, version);
            m.finish_write(request);
        }
        let mut reading = m.finish_read(9);
        assert!(reading.see(0, A).is_ok(), "a value that came and went during the read");
        assert!(reading.see(0, Version::ZEROES).is_ok());
        assert!(reading.see(1, A).is_err());
        assert!(read(&mut m, Version::ZEROES).is_err(), "a read that began later sees the last");
        assert!(read(&mut m, B).is_ok());
    }
}
