//! Figures from a load's completions: one sample a second, means before and after the loss, gaps, maxima.
//!
//! Completions come in the order in which the load saw them; times are Unix milliseconds. Means leave out `margin_ms`
//! on both sides of the loss, maxima and gaps leave out nothing.

use hdrhistogram::Histogram;
use serde::Serialize;

/// Latencies are kept to three digits up to this; anything longer counts as this in percentiles, not in maxima.
const LATENCY_NS_MAX: u64 = 600_000_000_000;

/// One request that ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completion {
    pub at_ms: u64,
    pub latency_ns: u64,
    pub is_write: bool,
}

/// Longest time without a completion.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Gap {
    previous_ms: Option<u64>,
    pub longest_ms: u64,
    /// When the longest one began.
    pub began_ms: u64,
}

impl Gap {
    pub fn record(&mut self, at_ms: u64) {
        if let Some(previous) = self.previous_ms {
            let gap = at_ms.saturating_sub(previous);
            if gap > self.longest_ms {
                (self.longest_ms, self.began_ms) = (gap, previous);
            }
        }
        self.previous_ms = self.previous_ms.max(Some(at_ms));
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    count: u64,
    latency_ns: u64,
    max_ns: u64,
}

impl Sum {
    fn record(&mut self, latency_ns: u64) {
        self.count += 1;
        self.latency_ns += latency_ns;
        self.max_ns = self.max_ns.max(latency_ns);
    }

    fn mean_ms(&self) -> f64 {
        if self.count == 0 { 0.0 } else { rounded(self.latency_ns as f64 / self.count as f64 / 1e6) }
    }
}

/// Milliseconds with three digits are as fine as the clocks are worth.
pub fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

pub fn ns_to_ms(ns: u64) -> f64 {
    rounded(ns as f64 / 1e6)
}

/// One second of the load.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Sample {
    pub second: usize,
    pub iops: u64,
    pub read_iops: u64,
    pub write_iops: u64,
    pub mean_ms: f64,
    pub max_ms: f64,
    pub read_mean_ms: f64,
    pub read_max_ms: f64,
    pub write_mean_ms: f64,
    pub write_max_ms: f64,
}

/// A stretch of the load. The mean and the percentile leave out the margin, the maximum doesn't.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Stretch {
    pub seconds: f64,
    pub iops: f64,
    pub mean_ms: f64,
    pub p99_ms: f64,
    pub max_ms: f64,
}

/// Everything that the page and the JSON tell of one load.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Figures {
    pub completions: u64,
    pub healthy: Stretch,
    pub degraded: Stretch,
    /// Degraded IOPS as a part of the healthy ones.
    pub retained: f64,
    pub longest_gap_ms: u64,
    /// When the longest gap began, in seconds after the loss.
    pub longest_gap_began_s: f64,
    pub read_gap_ms: u64,
    pub write_gap_ms: u64,
    pub read_max_ms: f64,
    pub write_max_ms: f64,
    /// Highest mean of a second, from the loss on.
    pub peak_mean_ms: f64,
    pub samples: Vec<Sample>,
}

struct StretchSums {
    sum: Sum,
    latencies: Histogram<u64>,
    max_ns: u64,
}

impl StretchSums {
    fn new() -> StretchSums {
        let latencies = Histogram::new_with_bounds(1000, LATENCY_NS_MAX, 3).expect("these bounds are valid");
        StretchSums { sum: Sum::default(), latencies, max_ns: 0 }
    }

    fn stretch(&self, span_ms: u64) -> Stretch {
        let seconds = span_ms as f64 / 1000.0;
        Stretch {
            seconds,
            iops: if span_ms == 0 { 0.0 } else { (self.sum.count as f64 / seconds * 10.0).round() / 10.0 },
            mean_ms: self.sum.mean_ms(),
            p99_ms: ns_to_ms(if self.sum.count == 0 { 0 } else { self.latencies.value_at_quantile(0.99) }),
            max_ms: ns_to_ms(self.max_ns),
        }
    }
}

/// Takes completions one by one; what it keeps does not grow with their number.
pub struct Timeline {
    loss_ms: u64,
    margin_ms: u64,
    first_ms: Option<u64>,
    last_ms: u64,
    seconds: Vec<[Sum; 2]>,
    stretches: [StretchSums; 2],
    gap: Gap,
    gaps: [Gap; 2],
}

impl Timeline {
    /// The node was lost at `loss_ms`; means leave out `margin_ms` on both sides of that.
    pub fn new(loss_ms: u64, margin_ms: u64) -> Timeline {
        Timeline {
            loss_ms,
            margin_ms,
            first_ms: None,
            last_ms: 0,
            seconds: Vec::new(),
            stretches: [StretchSums::new(), StretchSums::new()],
            gap: Gap::default(),
            gaps: [Gap::default(); 2],
        }
    }

    pub fn record(&mut self, completion: Completion) {
        let Completion { at_ms, latency_ns, is_write } = completion;
        let first = *self.first_ms.get_or_insert(at_ms);
        self.last_ms = self.last_ms.max(at_ms);
        let second = (at_ms.saturating_sub(first) / 1000) as usize;
        if second >= self.seconds.len() {
            self.seconds.resize(second + 1, [Sum::default(); 2]);
        }
        self.seconds[second][usize::from(is_write)].record(latency_ns);
        self.gap.record(at_ms);
        self.gaps[usize::from(is_write)].record(at_ms);

        let after = at_ms >= self.loss_ms;
        let stretch = &mut self.stretches[usize::from(after)];
        stretch.max_ns = stretch.max_ns.max(latency_ns);
        let counts = if after { at_ms >= self.loss_ms + self.margin_ms } else { at_ms + self.margin_ms < self.loss_ms };
        if counts {
            stretch.sum.record(latency_ns);
            stretch.latencies.saturating_record(latency_ns);
        }
    }

    pub fn figures(&self) -> Figures {
        let first = self.first_ms.unwrap_or(self.loss_ms);
        let healthy = self.stretches[0].stretch((self.loss_ms.saturating_sub(self.margin_ms)).saturating_sub(first));
        let degraded = self.stretches[1].stretch(self.last_ms.saturating_sub(self.loss_ms + self.margin_ms));
        let samples = self.samples();
        let loss_second = (self.loss_ms.saturating_sub(first) / 1000) as usize;
        let max_ns = |w: usize| self.seconds.iter().map(|s| s[w].max_ns).max().unwrap_or(0);
        Figures {
            completions: self.seconds.iter().flatten().map(|s| s.count).sum(),
            retained: if healthy.iops > 0.0 { rounded(degraded.iops / healthy.iops) } else { 0.0 },
            healthy,
            degraded,
            longest_gap_ms: self.gap.longest_ms,
            longest_gap_began_s: (self.gap.began_ms as f64 - self.loss_ms as f64) / 1000.0,
            read_gap_ms: self.gaps[0].longest_ms,
            write_gap_ms: self.gaps[1].longest_ms,
            read_max_ms: ns_to_ms(max_ns(0)),
            write_max_ms: ns_to_ms(max_ns(1)),
            peak_mean_ms: samples.iter().skip(loss_second).map(|s| s.mean_ms).fold(0.0, f64::max),
            samples,
        }
    }

    /// One sample a second. What was left when the load ended is no second and would look like a stall.
    fn samples(&self) -> Vec<Sample> {
        let covered_ms = self.last_ms.saturating_sub(self.first_ms.unwrap_or(self.last_ms));
        let whole = (covered_ms as usize + 500) / 1000;
        self.seconds.iter().take(whole.max(1)).enumerate().map(|(i, sums)| sample(i, sums)).collect()
    }
}

/// Counts completions from one moment to another.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    from_ms: u64,
    to_ms: u64,
    count: u64,
}

impl Window {
    pub fn new(from_ms: u64, to_ms: u64) -> Window {
        assert!(from_ms < to_ms, "the window from {from_ms} to {to_ms} is empty");
        Window { from_ms, to_ms, count: 0 }
    }

    pub fn record(&mut self, completion: Completion) {
        self.count += u64::from((self.from_ms..self.to_ms).contains(&completion.at_ms));
    }

    pub fn iops(&self) -> f64 {
        (self.count as f64 * 10_000.0 / (self.to_ms - self.from_ms) as f64).round() / 10.0
    }
}

fn sample(second: usize, sums: &[Sum; 2]) -> Sample {
    let [reads, writes] = sums;
    let both = Sum {
        count: reads.count + writes.count,
        latency_ns: reads.latency_ns + writes.latency_ns,
        max_ns: reads.max_ns.max(writes.max_ns),
    };
    Sample {
        second,
        iops: both.count,
        read_iops: reads.count,
        write_iops: writes.count,
        mean_ms: both.mean_ms(),
        max_ms: ns_to_ms(both.max_ns),
        read_mean_ms: reads.mean_ms(),
        read_max_ms: ns_to_ms(reads.max_ns),
        write_mean_ms: writes.mean_ms(),
        write_max_ms: ns_to_ms(writes.max_ns),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done(at_ms: u64, latency_ms: u64, is_write: bool) -> Completion {
        Completion { at_ms, latency_ns: latency_ms * 1_000_000, is_write }
    }

    /// 20 s at one completion every 10 ms, reads and writes by turns, node lost after 10 s, margin 2 s.
    fn run(change: impl Fn(u64) -> Option<u64>) -> Figures {
        let mut timeline = Timeline::new(1_010_000, 2_000);
        for i in 0..2000 {
            let at_ms = 1_000_000 + i * 10;
            if let Some(latency_ms) = change(at_ms) {
                timeline.record(done(at_ms, latency_ms, i % 2 == 1));
            }
        }
        timeline.figures()
    }

    #[test]
    fn an_even_load_has_even_figures() {
        let figures = run(|_| Some(3));
        assert_eq!(figures.completions, 2000);
        assert_eq!(
            figures.healthy,
            Stretch { seconds: 8.0, iops: 100.0, mean_ms: 3.0, p99_ms: figures.healthy.p99_ms, max_ms: 3.0 }
        );
        assert!((figures.degraded.iops - 100.0).abs() < 0.5, "{:?}", figures.degraded);
        assert!((figures.healthy.p99_ms - 3.0).abs() < 0.01);
        assert!((figures.retained - 1.0).abs() < 0.01);
        assert_eq!((figures.longest_gap_ms, figures.read_gap_ms, figures.write_gap_ms), (10, 20, 20));
        assert_eq!(figures.samples.len(), 20);
        assert!(figures.samples.iter().all(|s| s.iops == 100 && s.read_iops == 50));
    }

    #[test]
    fn a_stall_at_the_loss_is_left_out_of_means_but_not_of_maxima_and_gaps() {
        let figures = run(|at_ms| match at_ms {
            1_010_001..1_010_300 => None,
            1_010_300 => Some(299),
            _ => Some(3),
        });
        assert_eq!((figures.healthy.mean_ms, figures.degraded.mean_ms), (3.0, 3.0));
        assert_eq!((figures.healthy.max_ms, figures.degraded.max_ms), (3.0, 299.0));
        assert_eq!(figures.longest_gap_ms, 300);
        assert!((figures.longest_gap_began_s - 0.0).abs() < 1e-9);
        assert_eq!((figures.read_max_ms, figures.write_max_ms), (299.0, 3.0));
        assert!(figures.peak_mean_ms > 3.0);
    }

    #[test]
    fn seconds_without_completions_are_samples_too() {
        let figures = run(|at_ms| (!(1_012_000..1_015_000).contains(&at_ms)).then_some(1));
        assert_eq!(figures.samples.len(), 20);
        assert_eq!(figures.samples[13].iops, 0);
        assert_eq!(figures.longest_gap_ms, 3010);
        assert!(figures.retained < 0.7);
    }

    #[test]
    fn a_load_that_never_ran_gives_zeroes() {
        let figures = Timeline::new(1000, 100).figures();
        assert_eq!((figures.completions, figures.longest_gap_ms), (0, 0));
        assert_eq!((figures.healthy.iops, figures.degraded.iops, figures.retained), (0.0, 0.0, 0.0));
    }

    #[test]
    fn a_window_counts_what_lies_in_it() {
        let mut window = Window::new(1000, 1500);
        for at_ms in [999, 1000, 1499, 1500] {
            window.record(done(at_ms, 1, false));
        }
        assert_eq!(window.iops(), 4.0);
    }
}
