//! The window: how many units may be under way at a time. It is as large as latency allows.
//!
//! At the end of each span the medians are compared with floors: the medians that requests have when little is under way.
//! Above so many times the floor the window falls by 15 %; below, and if it was full, it grows by 4 units.
//!
//! **So many times** is 1.3 for strict isolation. At twice the floor, what is under way is twice what the machine does at a
//! time, and a request that finds it waits as long as it takes, unless nodes take it first. In the model of `tests/bars.rs`
//! its p99 is then 1.5 times that alone, and 1.2 with 1.3.
//!
//! **Looks.** A floor that is the least of the last ten seconds rises under steady load, since in ten seconds nothing is
//! seen but what the window itself makes; then the window follows the floor without end. So every ten seconds in which
//! it was full the window is small for one span, and what that shows is the floor. Costs at most 1 % of the rate.
//!
//! **Own samples.** Only requests count that went since the window last fell. Others waited in a queue that it has already
//! answered.

use crate::cost::Cost;
use crate::latency::{SORTS, Samples};
use crate::mutations::Mutations;
use holdfast_base::Instant;
use std::time::Duration;

pub const WINDOW_MIN: Cost = Cost::units(8);
pub const WINDOW_MAX: Cost = Cost::units(1024);

/// Before anything was measured: twice what a fast device has places.
const WINDOW_FIRST: Cost = Cost::units(64);

const GROWS_BY: Cost = Cost::units(4);

pub const SPAN: Duration = Duration::from_millis(100);

/// Completions that end a span: with fewer a median says little.
const SPAN_COMPLETIONS: u64 = 50;

/// A look ends after this, whatever has come.
const LOOK_MAX: Duration = Duration::from_secs(1);

const LOOK_EVERY: Duration = Duration::from_secs(10);

/// Of one sort, before its median counts.
const SAMPLES_MIN: u64 = 10;

/// A floor that no look has seen for so long is of another time.
const FLOOR_AGE_MAX: Duration = Duration::from_secs(30);

/// Nothing is lowered: factors are in 1,024ths.
pub const WHOLE: u64 = 1024;

/// What counts more: that tenants do not feel each other, or how much is done in all.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Isolation {
    Strict,
    #[default]
    Balanced,
    Rate,
}

impl Isolation {
    /// Latency that is still well, in thousandths of the floor.
    const fn times(self) -> u64 {
        match self {
            Isolation::Strict => 1_300,
            Isolation::Balanced => 4_000,
            Isolation::Rate => 10_000,
        }
    }
}

#[derive(Debug)]
pub(crate) struct Window {
    isolation: Isolation,
    units: Cost,
    span_began: Instant,
    /// When it last fell: earlier requests say nothing of it.
    fell_at: Instant,
    floors: [Option<Floor>; SORTS],
    looked_at: Option<Instant>,
    /// While it looks, what it was before.
    look: Option<Cost>,
}

#[derive(Clone, Copy, Debug)]
struct Floor {
    nanos: u64,
    seen_at: Instant,
}

impl Window {
    pub fn new(isolation: Isolation) -> Window {
        Window {
            isolation,
            units: WINDOW_FIRST,
            span_began: Instant::ZERO,
            fell_at: Instant::ZERO,
            floors: [None; SORTS],
            looked_at: None,
            look: None,
        }
    }

    pub fn units(&self) -> Cost {
        self.units
    }

    pub fn fell_at(&self) -> Instant {
        self.fell_at
    }

    /// Whether the span ends, in which so many have completed.
    pub fn is_due(&self, now: Instant, completions: u64) -> bool {
        let span = now.since(self.span_began);
        span >= SPAN && (completions >= SPAN_COMPLETIONS || self.look.is_some() && span >= LOOK_MAX)
    }

    /// The window counts from here on. What went before says nothing of it.
    pub fn begin(&mut self, now: Instant) {
        self.span_began = now;
        self.fell_at = now;
        if let Some(units) = self.look.take() {
            self.units = units;
        }
    }

    /// Ends a span. It was full if something waited for it; `lowered` is how far goals of latency have tightened it.
    pub fn end_span(&mut self, now: Instant, samples: &Samples, was_full: bool, lowered: u64, mutations: Mutations) {
        self.span_began = now;
        if let Some(units) = self.look.take() {
            self.see(now, samples);
            self.units = units;
            return;
        }
        let times = 1_000 + (self.isolation.times() - 1_000) * lowered / WHOLE;
        if self.is_above(now, samples, times) && !mutations.window_never_falls() {
            self.units = Cost(self.units.0 * 85 / 100).max(WINDOW_MIN);
            self.fell_at = now;
        } else if was_full {
            self.units = (self.units + GROWS_BY).min(WINDOW_MAX);
        }
        let is_look_due = self.looked_at.is_none_or(|at| now.since(at) >= LOOK_EVERY);
        if was_full && is_look_due && !mutations.window_never_falls() {
            self.look = Some(self.units);
            self.units = WINDOW_MIN;
            self.fell_at = now;
        }
    }

    /// What a look has shown are the floors.
    fn see(&mut self, now: Instant, samples: &Samples) {
        self.looked_at = Some(now);
        for (floor, sample) in self.floors.iter_mut().zip(samples) {
            if sample.count >= SAMPLES_MIN {
                *floor = Some(Floor { nanos: sample.median_nanos, seen_at: now });
            }
        }
    }

    /// Whether most requests were of sorts that took longer than so many thousandths of their floor.
    fn is_above(&mut self, now: Instant, samples: &Samples, times: u64) -> bool {
        let (mut above, mut below) = (0, 0);
        for (floor, sample) in self.floors.iter_mut().zip(samples).filter(|(_, sample)| sample.count >= SAMPLES_MIN) {
            let known = floor.filter(|floor| now.since(floor.seen_at) <= FLOOR_AGE_MAX);
            let least = known.filter(|floor| floor.nanos <= sample.median_nanos);
            let least = *floor.insert(least.unwrap_or(Floor { nanos: sample.median_nanos, seen_at: now }));
            let is_above = u128::from(sample.median_nanos) * 1_000 > u128::from(least.nanos) * u128::from(times);
            *if is_above { &mut above } else { &mut below } += sample.count;
        }
        above > below
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::latency::Sample;

    const ONE: Duration = Duration::from_millis(100);

    /// Spans of a machine that does 16 at a time in 100 us each, and of what is beyond the window there is always more.
    fn run(window: &mut Window, now: &mut Instant, spans: usize) -> Vec<u64> {
        (0..spans)
            .map(|_| {
                *now = *now + ONE;
                let median_nanos = (window.units().whole_units() * 100_000 / 16).max(100_000);
                let mut samples = Samples::default();
                samples[0] = Sample { median_nanos, count: 1000 };
                assert!(window.is_due(*now, 1000));
                window.end_span(*now, &samples, true, WHOLE, Mutations::default());
                window.units().whole_units()
            })
            .collect()
    }

    #[test]
    fn it_settles_where_latency_is_so_many_times_the_floor_and_stays_there_for_ever() {
        for isolation in [Isolation::Strict, Isolation::Balanced, Isolation::Rate] {
            let most_units = 16 * isolation.times() / 1000;
            let (mut window, mut now) = (Window::new(isolation), Instant(1));
            run(&mut window, &mut now, 400);
            let units: Vec<u64> = run(&mut window, &mut now, 3000).into_iter().filter(|units| *units > 8).collect();
            let (least, most) = (units.iter().min().unwrap(), units.iter().max().unwrap());
            assert!(*least >= most_units * 85 / 100 - 2 && *most <= most_units + 4, "{isolation:?}: {least} to {most}");
            assert!(units.len() >= 3000 * 98 / 100, "looks are seldom: {}", units.len());
        }
    }

    #[test]
    fn it_does_not_grow_where_nothing_waits_and_tightens_for_goals() {
        let (mut window, mut now) = (Window::new(Isolation::Balanced), Instant(1));
        let mut samples = Samples::default();
        samples[3] = Sample { median_nanos: 100_000, count: 60 };
        for _ in 0..100 {
            now = now + ONE;
            window.end_span(now, &samples, false, WHOLE, Mutations::default());
        }
        assert_eq!(window.units(), WINDOW_FIRST);
        samples[3].median_nanos = 150_000;
        window.end_span(now + ONE, &samples, false, WHOLE, Mutations::default());
        assert_eq!(window.units(), WINDOW_FIRST);
        window.end_span(now + 2 * ONE, &samples, false, WHOLE / 8, Mutations::default());
        assert!(window.units() < WINDOW_FIRST, "1.5 is above 1 + 3/8");
    }

    #[test]
    fn a_mixture_that_changes_is_no_queue() {
        let (mut window, mut now) = (Window::new(Isolation::Strict), Instant(1));
        for span in 0..200 {
            now = now + ONE;
            let mut samples = Samples::default();
            let megabytes = span % 2 * 90;
            samples[0] = Sample { median_nanos: 100_000, count: 100 - megabytes };
            samples[5] = Sample { median_nanos: 5_000_000, count: megabytes };
            window.end_span(now, &samples, true, WHOLE, Mutations::default());
        }
        assert!(window.units() > Cost::units(500), "{:?}", window.units());
    }

    #[test]
    fn a_look_ends_though_little_comes() {
        let (mut window, mut now) = (Window::new(Isolation::Balanced), Instant(1));
        run(&mut window, &mut now, 1);
        assert_eq!(window.units(), WINDOW_MIN, "the first full span is followed by a look");
        assert!(!window.is_due(now + ONE, 3));
        assert!(window.is_due(now + LOOK_MAX, 3));
        window.end_span(now + LOOK_MAX, &Samples::default(), true, WHOLE, Mutations::default());
        assert!(window.units() > WINDOW_FIRST);
    }
}
