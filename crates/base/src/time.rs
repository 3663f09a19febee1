//! Virtual instants: the shell passes `now` into every machine; no machine reads a clock.

use std::fmt;
use std::ops::{Add, Sub};
use std::time::Duration;

/// Nanoseconds since an arbitrary start of one process (monotonic clock) or one simulation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Instant(pub u64);

impl Instant {
    pub const ZERO: Instant = Instant(0);

    /// Time since `earlier`; zero where `earlier` is later.
    pub fn since(self, earlier: Instant) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// The first multiple of a span from here on.
    pub fn next_multiple_of(self, span: Duration) -> Instant {
        let span = (span.as_nanos() as u64).max(1);
        Instant(self.0.div_ceil(span).saturating_mul(span))
    }
}

impl Add<Duration> for Instant {
    type Output = Instant;
    fn add(self, span: Duration) -> Instant {
        Instant(self.0.saturating_add(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)))
    }
}

impl Sub<Duration> for Instant {
    type Output = Instant;
    fn sub(self, span: Duration) -> Instant {
        Instant(self.0.saturating_sub(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)))
    }
}

impl fmt::Debug for Instant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:06}ms", self.0 / 1_000_000, self.0 % 1_000_000)
    }
}

/// The earlier of two deadlines that may be absent.
pub fn earliest(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn multiples_of_a_span_are_met_from_below() {
        let span = Duration::from_millis(10);
        let next = |ms: u64| Instant(ms * 1_000_000).next_multiple_of(span).0 / 1_000_000;
        assert_eq!([next(0), next(1), next(10), next(11), next(20)], [0, 10, 10, 20, 20]);
        assert!(Instant(u64::MAX).next_multiple_of(span) >= Instant(u64::MAX - 10_000_000));
    }
}
