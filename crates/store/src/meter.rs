//! How long a device's operations take, and how many of them fail: what its owners judge it by.
//!
//! Role: told of the start and the end of every disk operation of one device; asked by whoever asks for the device's state.
//! Operations above [`SMALL_BYTES_MAX`] don't count: their time says more about their length than about the device.
//!
//! Limits: two histograms a kind, of fixed size; nothing is allocated. The window holds the last one to two [`HALF`]s.

use holdfast_base::Instant;
use holdfast_format::wire::OpTimes;
use std::time::Duration;

/// An operation up to this long counts: a group of log entries, the longest read of a guest.
const SMALL_BYTES_MAX: u64 = 256 << 10;

/// Half of the window.
const HALF: Duration = Duration::from_secs(5);

/// Four buckets for each power of two of microseconds, up to a minute.
const BUCKETS: usize = 4 * 27;

/// With fewer reads than this in the window, whoever asks for the device's state has a block of it read.
const PROBE_BELOW: u32 = 8;

/// So many errors within this time: a sector that can't be read is one, a disk that dies has many.
const FAILING_ERRORS: usize = 3;
const FAILING_WITHIN: Duration = Duration::from_secs(60);

/// At most so often.
const PROBE_PACE: Duration = Duration::from_millis(500);

/// Kinds of operations that are told apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Read,
    DurableWrite,
    /// Too long, or not durable, or a flush.
    Other,
}

impl Kind {
    pub fn of_read(len: u32) -> Kind {
        if u64::from(len) <= SMALL_BYTES_MAX { Kind::Read } else { Kind::Other }
    }

    pub fn of_write(len: u64, durable: bool) -> Kind {
        if durable && len <= SMALL_BYTES_MAX { Kind::DurableWrite } else { Kind::Other }
    }
}

#[derive(Clone, Debug)]
struct Histogram {
    counts: [u32; BUCKETS],
}

impl Histogram {
    const EMPTY: Histogram = Histogram { counts: [0; BUCKETS] };

    fn add(&mut self, took: Duration) {
        self.counts[bucket_of(took.as_micros() as u64)] += 1;
    }
}

fn bucket_of(us: u64) -> usize {
    let us = us.max(1);
    let octave = us.ilog2() as usize;
    let quarter = ((us << 2) >> octave) as usize & 3;
    (octave * 4 + quarter).min(BUCKETS - 1)
}

/// The longest time that falls into the bucket.
fn bucket_end_us(bucket: usize) -> u32 {
    let (octave, quarter) = (bucket as u32 / 4, bucket as u64 % 4);
    (((5 + quarter) << octave).div_ceil(4) - 1) as u32
}

#[derive(Clone, Debug)]
struct Window {
    halves: [Histogram; 2],
}

impl Window {
    const EMPTY: Window = Window { halves: [Histogram::EMPTY; 2] };

    /// Of as many halves, the newest first, and of what is under way.
    fn times(&self, halves: usize, under_way: &Histogram) -> OpTimes {
        let counted = || self.halves[..halves].iter().chain([under_way]);
        let count = |bucket: usize| counted().map(|half| half.counts[bucket]).sum::<u32>();
        let samples: u32 = (0..BUCKETS).map(count).sum();
        let mut above = samples / 100;
        for bucket in (0..BUCKETS).rev() {
            let here = count(bucket);
            if here > above {
                return OpTimes { p99_us: bucket_end_us(bucket), samples };
            }
            above -= here;
        }
        OpTimes::default()
    }
}

pub(crate) struct Meter {
    reads: Window,
    writes: Window,
    turned_at: Instant,
    probed_at: Option<Instant>,
    pub io_errors: u64,
    /// Reads that failed and were tried again.
    pub retries: u64,
    /// The last few errors.
    errors_at: [Option<Instant>; FAILING_ERRORS],
}

impl Meter {
    pub fn new(now: Instant) -> Meter {
        Meter {
            reads: Window::EMPTY,
            writes: Window::EMPTY,
            turned_at: now,
            probed_at: None,
            io_errors: 0,
            retries: 0,
            errors_at: [None; FAILING_ERRORS],
        }
    }

    /// What is older than the window goes.
    fn turn(&mut self, now: Instant) {
        let passed = now.since(self.turned_at);
        if passed < HALF {
            return;
        }
        for window in [&mut self.reads, &mut self.writes] {
            let last = std::mem::replace(&mut window.halves[0], Histogram::EMPTY);
            window.halves[1] = if passed < 2 * HALF { last } else { Histogram::EMPTY };
        }
        self.turned_at = now;
    }

    pub fn on_done(&mut self, now: Instant, kind: Kind, started_at: Instant, failed: bool) {
        self.turn(now);
        if failed {
            self.io_errors += 1;
            self.errors_at.rotate_left(1);
            self.errors_at[FAILING_ERRORS - 1] = Some(now);
        }
        let took = now.since(started_at);
        match kind {
            Kind::Read => self.reads.halves[0].add(took),
            Kind::DurableWrite => self.writes.halves[0].add(took),
            Kind::Other => {}
        }
    }

    /// Whether it has had many errors of late.
    pub fn is_failing(&self, now: Instant) -> bool {
        self.errors_at[0].is_some_and(|at| now.since(at) < FAILING_WITHIN)
    }

    pub fn last_error_at(&self) -> Option<Instant> {
        self.errors_at[FAILING_ERRORS - 1]
    }

    /// Of reads and of durable writes. What is under way counts with the time that it has taken so far.
    pub fn times(&self, now: Instant, under_way: impl Iterator<Item = (Kind, Instant)>) -> (OpTimes, OpTimes) {
        let halves = 2_usize.saturating_sub((now.since(self.turned_at).as_secs() / HALF.as_secs()) as usize);
        let (mut reads, mut writes) = (Histogram::EMPTY, Histogram::EMPTY);
        for (kind, started_at) in under_way {
            match kind {
                Kind::Read => reads.add(now.since(started_at)),
                Kind::DurableWrite => writes.add(now.since(started_at)),
                Kind::Other => {}
            }
        }
        (self.reads.times(halves, &reads), self.writes.times(halves, &writes))
    }

    /// Whether a block should be read to see how the device does: it is asked after, and has read little of late.
    pub fn wants_probe(&mut self, now: Instant, under_way: bool) -> bool {
        let is_due = self.probed_at.is_none_or(|at| now.since(at) >= PROBE_PACE);
        let wanted = is_due && !under_way && self.times(now, std::iter::empty()).0.samples < PROBE_BELOW;
        if wanted {
            self.probed_at = Some(now);
        }
        wanted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Instant {
        Instant(0) + Duration::from_millis(ms)
    }

    fn read_times(meter: &Meter, now: Instant) -> OpTimes {
        meter.times(now, std::iter::empty()).0
    }

    #[test]
    fn buckets_cover_a_microsecond_to_a_minute_without_gaps() {
        let mut last = 0;
        for us in 1..200_000 {
            let bucket = bucket_of(us);
            assert!(bucket >= last, "{us}");
            assert!(u64::from(bucket_end_us(bucket)) >= us && u64::from(bucket_end_us(bucket)) <= us + us / 4, "{us}");
            last = bucket;
        }
        assert_eq!(bucket_of(u64::MAX >> 3), BUCKETS - 1);
        assert!(bucket_end_us(BUCKETS - 1) > 60_000_000);
    }

    #[test]
    fn one_slow_operation_in_two_hundred_is_not_the_ninety_ninth() {
        let mut meter = Meter::new(at(0));
        for i in 0..199 {
            meter.on_done(at(i + 1), Kind::Read, at(i), false);
        }
        meter.on_done(at(500), Kind::Read, at(0), false);
        let times = read_times(&meter, at(500));
        assert_eq!(times.samples, 200);
        assert!((1000..=1250).contains(&times.p99_us), "{times:?}");
        for _ in 0..2 {
            meter.on_done(at(500), Kind::Read, at(0), false);
        }
        assert!(read_times(&meter, at(500)).p99_us >= 500_000);
    }

    #[test]
    fn the_window_slides() {
        let mut meter = Meter::new(at(0));
        meter.on_done(at(100), Kind::Read, at(0), false);
        assert_eq!(read_times(&meter, at(4_900)).samples, 1);
        meter.on_done(at(6_000), Kind::Read, at(5_999), false);
        assert_eq!(read_times(&meter, at(6_000)).samples, 2, "the half before still counts");
        assert_eq!(read_times(&meter, at(11_500)).samples, 1);
        assert_eq!(read_times(&meter, at(40_000)), OpTimes::default());
    }

    #[test]
    fn what_does_not_come_back_counts_with_its_age() {
        let meter = Meter::new(at(0));
        let (reads, writes) = meter.times(at(3_000), [(Kind::DurableWrite, at(1_000))].into_iter());
        assert_eq!((reads.samples, writes.samples), (0, 1));
        assert!(writes.p99_us >= 2_000_000);
    }

    #[test]
    fn long_operations_and_unflushed_writes_do_not_count_and_errors_do() {
        assert_eq!((Kind::of_read(4 << 20), Kind::of_write(4096, false)), (Kind::Other, Kind::Other));
        assert_eq!((Kind::of_read(4096), Kind::of_write(8192, true)), (Kind::Read, Kind::DurableWrite));
        let mut meter = Meter::new(at(0));
        meter.on_done(at(9), Kind::Other, at(0), true);
        assert_eq!((meter.io_errors, read_times(&meter, at(9)).samples), (1, 0));
    }

    #[test]
    fn an_idle_device_is_probed_now_and_then_and_a_busy_one_is_not() {
        let mut meter = Meter::new(at(0));
        assert!(meter.wants_probe(at(0), false));
        assert!(!meter.wants_probe(at(100), false), "just done");
        assert!(!meter.wants_probe(at(600), true), "one is under way");
        assert!(meter.wants_probe(at(600), false));
        for _ in 0..PROBE_BELOW {
            meter.on_done(at(1_300), Kind::Read, at(1_299), false);
        }
        assert!(!meter.wants_probe(at(1_400), false));
    }
}
