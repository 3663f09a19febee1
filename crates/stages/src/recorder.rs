//! What is kept of a volume's requests.

use crate::histogram::{Histogram, least_us, quantile, quantile_among};
use crate::trail::{Spans, Stage};
use holdfast_base::{Instant, NodeId};
use std::time::Duration;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Read,
    /// Writes, discards and zeroings.
    Write,
}

/// A window is closed after this.
const WINDOW: Duration = Duration::from_secs(60);

/// Of each window, kept whole.
pub const SLOWEST_MAX: usize = 8;

/// Requests before some are called the slow ones.
const TYPICAL_MIN: u64 = 100;

/// What counts as slow is looked at again after so many requests.
const LOOK_EVERY: u64 = 256;

/// Nodes of a volume that are counted: more than any has.
const NODES_MAX: usize = 64;

const STAGES: usize = Stage::ALL.len();

/// A slow request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slow {
    pub at: Instant,
    pub spans: Spans,
}

/// Requests that waited for a node longer than for any other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NodeReport {
    pub node: NodeId,
    pub count: u64,
    /// All microseconds that they waited for it.
    pub us: u64,
    /// The slow ones among them.
    pub slow: u64,
    pub slow_us: u64,
}

impl NodeReport {
    fn new(node: NodeId) -> NodeReport {
        NodeReport { node, count: 0, us: 0, slow: 0, slow_us: 0 }
    }
}

#[derive(Debug, Default)]
struct Window {
    all: Histogram,
    stages: [Histogram; STAGES],
    nodes: Vec<NodeReport>,
    /// Of the slow ones: how many, and all microseconds by stage.
    slow: u64,
    slow_us: [u64; STAGES],
    /// The slowest first.
    slowest: Vec<Slow>,
}

impl Window {
    fn count(&mut self, now: Instant, spans: &Spans, slow_us: Option<u64>) {
        let took = spans.total_us();
        self.all.count(took);
        // Most stages of most requests take no time: these are not counted.
        for (stage, histogram) in Stage::ALL.iter().zip(&mut self.stages).filter(|(stage, _)| spans.us(**stage) > 0) {
            histogram.count(spans.us(*stage));
        }
        let is_slow = slow_us.is_some_and(|least| took >= least);
        self.count_node(spans, is_slow);
        if is_slow {
            self.slow += 1;
            for (stage, sum) in Stage::ALL.iter().zip(&mut self.slow_us) {
                *sum += spans.us(*stage);
            }
        }
        let is_slowest =
            self.slowest.len() < SLOWEST_MAX || self.slowest.last().is_some_and(|last| last.spans.total_us() < took);
        if is_slowest {
            self.slowest.truncate(SLOWEST_MAX - 1);
            let at = self.slowest.partition_point(|other| other.spans.total_us() >= took);
            self.slowest.insert(at, Slow { at: now, spans: *spans });
        }
    }

    fn count_node(&mut self, spans: &Spans, is_slow: bool) {
        let Some((node, us)) = spans.node() else { return };
        let of = match self.nodes.iter().position(|of| of.node == node) {
            Some(at) => &mut self.nodes[at],
            None if self.nodes.len() < NODES_MAX => {
                self.nodes.push(NodeReport::new(node));
                self.nodes.last_mut().expect("just added")
            }
            None => return,
        };
        (of.count, of.us) = (of.count + 1, of.us + us);
        if is_slow {
            (of.slow, of.slow_us) = (of.slow + 1, of.slow_us + us);
        }
    }
}

/// Requests of one kind.
#[derive(Debug)]
struct Series {
    began_at: Instant,
    now: Box<Window>,
    before: Option<(Duration, Box<Window>)>,
    /// What takes that long is slow.
    slow_us: Option<u64>,
    look_in: u64,
}

impl Series {
    fn new(now: Instant) -> Series {
        Series { began_at: now, now: Box::default(), before: None, slow_us: None, look_in: TYPICAL_MIN }
    }

    fn windows(&self) -> impl Iterator<Item = &Window> + Clone {
        std::iter::once(&*self.now).chain(self.before.as_ref().map(|(_, window)| &**window))
    }

    fn turn_over(&mut self, now: Instant) {
        let age = now.since(self.began_at);
        if age < WINDOW {
            return;
        }
        let closed = std::mem::take(&mut self.now);
        // One that nothing was added to for long tells of a time that is over.
        self.before = (age < 2 * WINDOW).then_some((age, closed));
        self.began_at = now;
    }

    fn record(&mut self, now: Instant, spans: &Spans) {
        self.turn_over(now);
        self.now.count(now, spans, self.slow_us);
        self.look_in -= 1;
        if self.look_in == 0 {
            self.look_in = LOOK_EVERY;
            let all = self.windows().map(|window| &window.all);
            self.slow_us = Some(least_us(all, 990));
        }
    }

    /// What the windows are of.
    fn span(&self, now: Instant) -> Duration {
        now.since(self.began_at) + self.before.as_ref().map_or(Duration::ZERO, |(span, _)| *span)
    }

    fn is_over(&self, now: Instant) -> bool {
        now.since(self.began_at) > 2 * WINDOW
    }

    fn report(&self, now: Instant) -> Option<Report> {
        let count: u64 = self.windows().map(|window| window.all.len()).sum();
        if count == 0 || self.is_over(now) {
            return None;
        }
        let slow: u64 = self.windows().map(|window| window.slow).sum();
        let stage = |stage: &Stage| {
            let at = *stage as usize;
            let of = |per_mille| quantile_among(count, self.windows().map(|window| &window.stages[at]), per_mille);
            let (p50, sum_us) = (of(500), self.windows().map(|window| window.slow_us[at]).sum::<u64>());
            let mean_us = sum_us.checked_div(slow).unwrap_or(0);
            let beyond = Duration::from_micros(mean_us).saturating_sub(p50);
            StageReport { stage: *stage, p50, p99: of(990), slow_mean: Duration::from_micros(mean_us), beyond }
        };
        let of = |per_mille| quantile(self.windows().map(|window| &window.all), per_mille);
        let (p50, p99) = (of(500), of(990));
        let mut slowest: Vec<Slow> = self.windows().flat_map(|window| window.slowest.iter().copied()).collect();
        slowest.sort_by_key(|slow| std::cmp::Reverse(slow.spans.total_us()));
        slowest.truncate(SLOWEST_MAX);
        Some(Report {
            count,
            over: self.span(now),
            p50,
            p99,
            slow,
            stages: Stage::ALL.iter().map(stage).collect(),
            nodes: self.nodes(),
            slowest,
        })
    }

    fn nodes(&self) -> Vec<NodeReport> {
        let mut sums: Vec<NodeReport> = Vec::new();
        for of in self.windows().flat_map(|window| &window.nodes) {
            match sums.iter_mut().find(|sum| sum.node == of.node) {
                Some(sum) => {
                    (sum.count, sum.us) = (sum.count + of.count, sum.us + of.us);
                    (sum.slow, sum.slow_us) = (sum.slow + of.slow, sum.slow_us + of.slow_us);
                }
                None => sums.push(*of),
            }
        }
        sums.sort_by_key(|of| of.node);
        sums
    }
}

/// Figures of a stage.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StageReport {
    pub stage: Stage,
    pub p50: Duration,
    pub p99: Duration,
    /// What the slow ones spent there in the mean, and what of it is more than the median of all.
    pub slow_mean: Duration,
    pub beyond: Duration,
}

/// Requests of one kind, of the last minute or two.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Report {
    pub count: u64,
    pub over: Duration,
    pub p50: Duration,
    pub p99: Duration,
    /// How many were slow.
    pub slow: u64,
    pub stages: Vec<StageReport>,
    pub nodes: Vec<NodeReport>,
    pub slowest: Vec<Slow>,
}

impl Report {
    /// How much of what makes the slow ones slow is of a stage, in thousandths.
    pub fn per_mille(&self, stage: Stage) -> u64 {
        let all: u128 = self.stages.iter().map(|of| of.beyond.as_micros()).sum();
        let own = self.stages.iter().find(|of| of.stage == stage).map_or(0, |of| of.beyond.as_micros());
        (own * 1000).checked_div(all).unwrap_or(0) as u64
    }
}

/// Of a volume; nothing before its first request.
#[derive(Debug, Default)]
pub struct Recorder {
    reads: Option<Series>,
    writes: Option<Series>,
}

impl Recorder {
    pub fn record(&mut self, now: Instant, kind: Kind, spans: &Spans) {
        let series = match kind {
            Kind::Read => &mut self.reads,
            Kind::Write => &mut self.writes,
        };
        series.get_or_insert_with(|| Series::new(now)).record(now, spans);
    }

    fn series(&self, kind: Kind) -> Option<&Series> {
        match kind {
            Kind::Read => self.reads.as_ref(),
            Kind::Write => self.writes.as_ref(),
        }
    }

    /// `None` where there was nothing of late.
    pub fn report(&self, now: Instant, kind: Kind) -> Option<Report> {
        self.series(kind)?.report(now)
    }

    /// Requests a second; of less than a second as if they had been one second's.
    pub fn per_second(&self, now: Instant, kind: Kind) -> f64 {
        let Some(series) = self.series(kind).filter(|series| !series.is_over(now)) else { return 0.0 };
        let count: u64 = series.windows().map(|window| window.all.len()).sum();
        count as f64 / series.span(now).as_secs_f64().max(1.0)
    }

    /// What half of the requests of all these took at most, and 99 of 100.
    pub fn times<'a>(
        of: impl Iterator<Item = &'a Recorder> + Clone,
        now: Instant,
        kind: Kind,
    ) -> Option<(Duration, Duration)> {
        let series = of.filter_map(|recorder| recorder.series(kind)).filter(|series| !series.is_over(now));
        let all = series.flat_map(Series::windows).map(|window| &window.all);
        all.clone().next()?;
        Some((quantile(all.clone(), 500), quantile(all, 990)))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub fn spans(of: &[(Stage, u64)]) -> Spans {
        let mut spans = Spans::default();
        of.iter().for_each(|(stage, us)| spans.add(*stage, Duration::from_micros(*us)));
        spans
    }

    fn at(ms: u64) -> Instant {
        Instant(ms * 1_000_000)
    }

    #[test]
    fn what_makes_the_slow_ones_slow_is_told_and_not_what_all_do() {
        let mut recorder = Recorder::default();
        assert_eq!(recorder.report(at(0), Kind::Read), None);
        for n in 0..20_000u64 {
            let is_slow = n % 50 == 49;
            let nodes = if is_slow { 9_000 } else { 900 };
            let map = if n % 4 == 0 { 300 } else { 0 };
            recorder.record(at(n), Kind::Read, &spans(&[(Stage::Nodes, nodes), (Stage::Map, map), (Stage::Qos, 5)]));
        }
        let report = recorder.report(at(20_000), Kind::Read).expect("there were some");
        assert_eq!((report.count, report.over), (20_000, Duration::from_secs(20)));
        let of_map = report.stages.iter().find(|of| of.stage == Stage::Map).expect("one of them");
        assert_eq!((of_map.p50, of_map.p99 >= Duration::from_micros(300)), (Duration::ZERO, true), "{of_map:?}");
        assert!((900..1_100).contains(&(report.p50.as_micros() as u64)), "{:?}", report.p50);
        assert!(
            report.p99 >= Duration::from_micros(9_005) && report.slow > 300,
            "{} slow, {:?}",
            report.slow,
            report.p99
        );
        assert!(report.per_mille(Stage::Nodes) > 980, "{:?}", report.stages);
        assert_eq!((report.slowest.len(), report.slowest[0].spans.total_us()), (SLOWEST_MAX, 9_005));
        assert_eq!(recorder.report(at(20_000), Kind::Write), None);
    }

    #[test]
    fn the_slow_ones_are_counted_by_the_node_that_they_waited_for() {
        let mut recorder = Recorder::default();
        for n in 0..10_000u64 {
            let (node, us) = if n % 50 == 49 { (2, 9_000) } else { (1 + n as u32 % 3, 300) };
            let mut spans = spans(&[(Stage::Network, us)]);
            spans.wait_for(NodeId(node), Duration::from_micros(us));
            // Over more than one window.
            recorder.record(at(n * 10), Kind::Read, &spans);
        }
        let report = recorder.report(at(100_000), Kind::Read).expect("there were some");
        let nodes: Vec<u32> = report.nodes.iter().map(|of| of.node.0).collect();
        assert_eq!((nodes, report.nodes.iter().map(|of| of.count).sum()), (vec![1, 2, 3], 10_000u64));
        let slow: Vec<(bool, bool)> = report.nodes.iter().map(|of| (of.slow > 0, of.slow_us > 1_000_000)).collect();
        assert_eq!(slow, [(false, false), (true, true), (false, false)], "{:?}", report.nodes);
        assert_eq!(report.slow, report.nodes[1].slow);
    }

    #[test]
    fn what_was_two_minutes_ago_is_told_no_more() {
        let mut recorder = Recorder::default();
        let slow = spans(&[(Stage::Held, 50_000)]);
        (0..1_000).for_each(|n| recorder.record(at(n), Kind::Write, &slow));
        (1..1_500).for_each(|n| recorder.record(at(n * 100), Kind::Write, &spans(&[(Stage::Nodes, 100)])));
        let report = recorder.report(at(150_000), Kind::Write).expect("there were some");
        assert!(report.p99 < Duration::from_millis(1) && report.over <= 2 * WINDOW, "{report:?}");
        assert_eq!(recorder.report(at(400_000), Kind::Write), None, "a volume that rests has no figures");
    }

    #[test]
    fn the_slowest_are_kept_whole_in_order() {
        let mut recorder = Recorder::default();
        for us in [5, 900, 30, 7, 800, 2, 4, 6, 8, 1, 700] {
            recorder.record(at(us), Kind::Read, &spans(&[(Stage::Nodes, us)]));
        }
        let report = recorder.report(at(1_000), Kind::Read).expect("there were some");
        let took: Vec<u64> = report.slowest.iter().map(|slow| slow.spans.total_us()).collect();
        assert_eq!(took, [900, 800, 700, 30, 8, 7, 6, 5]);
    }
}
