//! Counts of requests since the host was started, by how long they took and how long they were in each stage.
//!
//! Role: unlike a [`Recorder`](crate::Recorder) this forgets nothing, so that differences can be made of it and sums over
//! several hosts. Counters have few fixed bounds for that, the same everywhere.
//!
//! Limits: one table a reactor, of 6 KiB, however many volumes there are. A request costs a counter for itself and one for
//! each stage in which it was for a microsecond.

use crate::recorder::Kind;
use crate::trail::{Spans, Stage};

/// What counters have at most, in microseconds; one more has all that took longer. In seconds none of these is whole or
/// less than a ten-thousandth: all texts of metrics write them alike.
pub const BOUNDS_US: [u64; 18] = bounds();

/// From 0.1 ms to 13 s, each twice the one before.
const fn bounds() -> [u64; 18] {
    let (mut bounds, mut at) = ([0; 18], 0);
    while at < bounds.len() {
        bounds[at] = 100 << at;
        at += 1;
    }
    bounds
}

const STAGES: usize = Stage::ALL.len();

/// How many took so long.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tally {
    /// By the first bound that is not less; the last of none.
    pub counts: [u64; BOUNDS_US.len() + 1],
    /// Of all together, in microseconds.
    pub us: u64,
}

impl Tally {
    fn count(&mut self, us: u64) {
        self.counts[BOUNDS_US.partition_point(|bound| *bound < us)] += 1;
        self.us += us;
    }

    fn add(&mut self, other: &Tally) {
        self.counts.iter_mut().zip(other.counts).for_each(|(sum, count)| *sum += count);
        self.us += other.us;
    }

    /// How many were counted.
    pub fn all(&self) -> u64 {
        self.counts.iter().sum()
    }
}

#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct OfKind {
    whole: Tally,
    stages: [Tally; STAGES],
}

/// Of all requests that one reactor, or a host, answered well.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Totals {
    reads: OfKind,
    writes: OfKind,
}

impl Totals {
    pub fn count(&mut self, kind: Kind, spans: &Spans) {
        let of = match kind {
            Kind::Read => &mut self.reads,
            Kind::Write => &mut self.writes,
        };
        of.whole.count(spans.total_us());
        // Most stages of most requests take no time: how many these are follows from the whole.
        for (stage, tally) in Stage::ALL.iter().zip(&mut of.stages).filter(|(stage, _)| spans.us(**stage) > 0) {
            tally.count(spans.us(*stage));
        }
    }

    /// Of several reactors together.
    pub fn add(&mut self, other: &Totals) {
        for (sum, of) in [(&mut self.reads, &other.reads), (&mut self.writes, &other.writes)] {
            sum.whole.add(&of.whole);
            sum.stages.iter_mut().zip(&of.stages).for_each(|(sum, of)| sum.add(of));
        }
    }

    fn of(&self, kind: Kind) -> &OfKind {
        match kind {
            Kind::Read => &self.reads,
            Kind::Write => &self.writes,
        }
    }

    /// What requests of that kind took.
    pub fn whole(&self, kind: Kind) -> &Tally {
        &self.of(kind).whole
    }

    /// What they took in a stage. All are counted there, also those that were never in it.
    pub fn stage(&self, kind: Kind, stage: Stage) -> Tally {
        let of = self.of(kind);
        let mut tally = of.stages[stage as usize];
        tally.counts[0] += of.whole.all() - tally.all();
        tally
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recorder::tests::spans;
    use proptest::prelude::*;

    #[test]
    fn a_bound_counts_what_takes_just_as_long() {
        let mut totals = Totals::default();
        for us in [0, 100, 101, 13_107_200, 13_107_201] {
            totals.count(Kind::Read, &spans(&[(Stage::Device, us)]));
        }
        let (tally, last) = (totals.whole(Kind::Read), BOUNDS_US.len());
        assert_eq!((tally.counts[0], tally.counts[1], tally.counts[last - 1], tally.counts[last]), (2, 1, 1, 1));
        assert_eq!((tally.all(), tally.us), (5, 26_214_602));
        assert_eq!(totals.stage(Kind::Read, Stage::Device), *tally);
        assert_eq!(*totals.whole(Kind::Write), Tally::default());
    }

    proptest! {
        #[test]
        fn each_stage_counts_all_requests_and_times_add_up(
            requests in prop::collection::vec((any::<bool>(), 0..STAGES, 0u64..30_000_000, 0..STAGES, 0u64..100), 1..50),
        ) {
            let mut parts = [Totals::default(), Totals::default()];
            for (at, (is_read, a, long, b, short)) in requests.iter().enumerate() {
                let kind = if *is_read { Kind::Read } else { Kind::Write };
                parts[at % 2].count(kind, &spans(&[(Stage::ALL[*a], *long), (Stage::ALL[*b], *short)]));
            }
            let mut totals = Totals::default();
            parts.iter().for_each(|part| totals.add(part));
            for (kind, wanted) in [(Kind::Read, true), (Kind::Write, false)] {
                let count = requests.iter().filter(|(is_read, ..)| *is_read == wanted).count() as u64;
                let stages: Vec<Tally> = Stage::ALL.iter().map(|stage| totals.stage(kind, *stage)).collect();
                prop_assert!(stages.iter().chain([totals.whole(kind)]).all(|tally| tally.all() == count));
                prop_assert_eq!(stages.iter().map(|tally| tally.us).sum::<u64>(), totals.whole(kind).us);
            }
        }
    }
}
