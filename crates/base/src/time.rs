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

/// The longest span that settings take.
pub const SPAN_MAX: Duration = Duration::from_secs(24 * 3600);

/// `500us`, `10ms`, `2s`, `5min`: a span of [`SPAN_MAX`] at most.
pub fn span_of(text: &str) -> Option<Duration> {
    let at = text.find(|c: char| !c.is_ascii_digit())?;
    let (number, unit) = text.split_at(at);
    let number: u64 = number.parse().ok()?;
    let micros = match unit {
        "us" => number,
        "ms" => number.checked_mul(1_000)?,
        "s" => number.checked_mul(1_000_000)?,
        "min" => number.checked_mul(60_000_000)?,
        _ => return None,
    };
    Some(Duration::from_micros(micros)).filter(|span| *span <= SPAN_MAX)
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
    fn spans_are_read_as_people_write_them() {
        assert_eq!(span_of("500us"), Some(Duration::from_micros(500)));
        assert_eq!((span_of("2min"), span_of("86400s")), (Some(Duration::from_secs(120)), Some(SPAN_MAX)));
        for text in ["10", "ms", "99999999999999999999s", "25h", "86401s"] {
            assert_eq!(span_of(text), None, "{text}");
        }
    }
}
