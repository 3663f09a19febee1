//! Fingerprints of what a volume holds: a walk over its segments, each of which is read once and told of.
//!
//! States: walking over the table -> looking what lives in a segment, and reading it (a pass of the cleaner) -> printing
//! (a worker has the blocks) -> told. What was printed since the volume was opened is passed over, so a walk that finds
//! nothing costs no reads. Where nobody comes to it, or the segment can't be read, the walk rests and goes on.
//!
//! The blocks of the last segment that was printed are kept until the store has heard of it, and for a moment more: of those
//! some may be wanted. Meanwhile a member prints no other.

use crate::basis::Basis;
use crate::care::{Around, LiveRun};
use crate::segment::{Kind, SegmentInfo};
use holdfast_base::{BLOCK_BYTES, BlockCrc, Buf, Instant, block_crcs};
use holdfast_format::record::SegmentNo;
use holdfast_format::talk::Print;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A worker that does not come to it in that time is not waited for.
const PRINTING_MAX: Duration = Duration::from_secs(5);

/// Blocks that were printed are kept for a fifth of the rest of a walk, and for a whole one until the store has heard.
const KEPT: u32 = 5;

/// Told apart from jobs of the segment writer.
pub(crate) const PRINT_JOB: u64 = 1 << 63;

/// A segment whose blocks are being printed.
#[derive(Debug)]
struct Printing {
    segment: SegmentNo,
    runs: Vec<LiveRun>,
    blocks: Vec<Buf>,
    until: Instant,
}

/// One that was.
#[derive(Debug)]
pub(crate) struct Printed {
    pub(crate) segment: SegmentNo,
    /// In order of keys.
    pub(crate) runs: Vec<LiveRun>,
    pub(crate) prints: Vec<Print>,
    blocks: Vec<Buf>,
    at: Instant,
    /// The store has not said yet what it wants of it.
    is_awaited: bool,
}

impl Printed {
    #[cfg(test)]
    pub(crate) fn of(segment: SegmentNo, runs: Vec<LiveRun>, prints: Vec<Print>) -> Printed {
        Printed { segment, runs, prints, blocks: Vec::new(), at: Instant::ZERO, is_awaited: false }
    }

    /// These blocks, and their checksums.
    pub(crate) fn content(&self, places: &[usize]) -> (Vec<u8>, Vec<BlockCrc>) {
        let each: Vec<&[u8]> = self.blocks.iter().flat_map(|piece| piece.chunks_exact(BLOCK_BYTES)).collect();
        let bytes = places.iter().map(|at| each[*at]).collect::<Vec<_>>().concat();
        let crcs = block_crcs(&bytes);
        (bytes, crcs)
    }
}

#[derive(Debug, Default)]
pub(crate) struct Printer {
    next: SegmentNo,
    rests_until: Instant,
    /// Rises where all is to be told anew.
    round: u32,
    /// These are printed again, whatever was.
    again: BTreeSet<SegmentNo>,
    jobs: u64,
    printing: Option<Printing>,
    last: Option<Printed>,
}

impl Printer {
    pub(crate) fn is_at_rest(&self) -> bool {
        self.next == SegmentNo::default() && self.again.is_empty() && self.printing.is_none()
    }

    pub(crate) fn round(&self) -> u32 {
        self.round
    }

    pub(crate) fn begin_anew(&mut self) {
        self.round += 1;
    }

    /// Nobody is to be told any more. What is being printed ends by itself.
    pub(crate) fn stop(&mut self) {
        (self.next, self.last) = (SegmentNo::default(), None);
        self.again.clear();
    }

    pub(crate) fn is_printing(&self) -> bool {
        self.printing.is_some()
    }

    /// Prints the segment again, since who was told of it has forgotten.
    pub(crate) fn again(&mut self, no: SegmentNo) {
        self.again.insert(no);
    }

    /// The next segment that is to be printed, if there is one; of old ones, while guests come and go.
    pub(crate) fn take(
        &mut self,
        around: &Around<'_>,
        is_left_alone: impl Fn(SegmentNo) -> bool,
        guests_are_away: bool,
    ) -> Option<SegmentNo> {
        let is_store = around.basis.root().is_store();
        // What others keep is not given back.
        let is_whole = |info: &SegmentInfo| info.kind == Kind::Data && info.is_visible() && (is_store || !info.kept);
        while let Some(no) = self.again.pop_first() {
            if around.segments.get(no).is_some_and(is_whole) && !is_left_alone(no) {
                return Some(no);
            }
        }
        if around.basis.now < self.rests_until {
            return None;
        }
        let own = around.basis.root().own_numbers();
        let mut ahead = around.segments.iter_from(self.next.max(own.first));
        let found = ahead.by_ref().take(around.basis.config.search_step).find(|(no, info)| {
            let is_old = guests_are_away || around.map.heat_class(info.born) >= around.basis.config.print_heat_min;
            own.contains(*no) && is_whole(info) && is_old && info.printed != Some(self.round) && !is_left_alone(*no)
        });
        let found = found.map(|(no, _)| no);
        // The step has ended where nothing was found, the walk where nothing is ahead.
        match found.or_else(|| ahead.next().map(|(no, _)| no).filter(|no| own.contains(*no))) {
            Some(no) => self.next = no,
            None => self.rest(around),
        }
        found
    }

    pub(crate) fn rest(&mut self, around: &Around<'_>) {
        (self.next, self.rests_until) = (SegmentNo::default(), around.basis.now + around.basis.config.repack_every);
    }

    /// What lives of it was read: a worker is to fingerprint it, under this number.
    pub(crate) fn begin(
        &mut self,
        now: Instant,
        segment: SegmentNo,
        runs: Vec<LiveRun>,
        blocks: &[Buf],
    ) -> (u64, Instant) {
        let until = now + PRINTING_MAX;
        self.printing = Some(Printing { segment, runs, blocks: blocks.to_vec(), until });
        self.jobs += 1;
        (PRINT_JOB | self.jobs, until)
    }

    /// The worker has done it, or nobody came to it.
    pub(crate) fn on_printed(&mut self, now: Instant, job: u64, prints: Option<Vec<Print>>) -> Option<&Printed> {
        if job != PRINT_JOB | self.jobs {
            return None;
        }
        let Printing { segment, runs, blocks, .. } = self.printing.take()?;
        let count: u64 = runs.iter().map(LiveRun::blocks).sum();
        let prints = prints.filter(|prints| prints.len() as u64 == count)?;
        self.last = Some(Printed { segment, runs, prints, blocks, at: now, is_awaited: false });
        self.last.as_ref()
    }

    /// True where what is being printed is given up.
    pub(crate) fn on_tick(&mut self, basis: &Basis) -> bool {
        let (now, rest) = (basis.now, basis.config.repack_every);
        let kept_for = |last: &Printed| if last.is_awaited { rest } else { rest / KEPT };
        if self.last.as_ref().is_some_and(|last| now.since(last.at) >= kept_for(last)) {
            self.last = None;
        }
        self.printing.take_if(|printing| printing.until <= now).is_some()
    }

    /// The store is told of the last one.
    pub(crate) fn wait_for_word(&mut self) {
        if let Some(last) = &mut self.last {
            last.is_awaited = true;
        }
    }

    /// The store has heard of that segment.
    pub(crate) fn on_word(&mut self, segment: SegmentNo) {
        if let Some(last) = self.last.as_mut().filter(|last| last.segment == segment) {
            last.is_awaited = false;
        }
    }

    /// Whether the store is still to say what it wants of the last one: another would take its place.
    pub(crate) fn is_awaited(&self) -> bool {
        self.last.as_ref().is_some_and(|last| last.is_awaited)
    }

    /// The last one that was printed, if it is that.
    pub(crate) fn last(&self, segment: SegmentNo) -> Option<&Printed> {
        self.last.as_ref().filter(|last| last.segment == segment)
    }
}

/// Prints by where blocks lie in their segment.
pub(crate) type ByPosition = BTreeMap<u32, Print>;

pub(crate) fn by_position(printed: &Printed) -> ByPosition {
    let positions = printed.runs.iter().flat_map(LiveRun::positions);
    positions.zip(printed.prints.iter().copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_base::Epoch;

    #[test]
    fn blocks_are_kept_until_the_store_has_heard_of_them_and_a_moment_more() {
        let mut basis = crate::basis::tests::basis("mirror:2");
        let no = |counter| SegmentNo { epoch: Epoch(1), counter };
        let mut printer = Printer { last: Some(Printed::of(no(3), Vec::new(), Vec::new())), ..Printer::default() };
        let rest = basis.config.repack_every;
        printer.wait_for_word();
        basis.now = Instant::ZERO + rest / 2;
        printer.on_tick(&basis);
        printer.on_word(no(2));
        assert!(printer.is_awaited() && printer.last(no(3)).is_some(), "it was another's");
        printer.on_word(no(3));
        assert!(!printer.is_awaited() && printer.last(no(3)).is_some());
        printer.on_tick(&basis);
        assert!(printer.last(no(3)).is_none(), "it wants no more of them");
        printer.last = Some(Printed::of(no(3), Vec::new(), Vec::new()));
        printer.wait_for_word();
        basis.now = Instant::ZERO + rest;
        printer.on_tick(&basis);
        assert!(!printer.is_awaited(), "a store that says nothing is not waited for");
    }
}
