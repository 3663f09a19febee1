//! Costs: what a request takes of a host, in units. A unit is about what a small read costs of CPU; the shares of bytes follow
//! CPU a request in `docs/performance.md`.

use std::ops::{Add, AddAssign, Sub, SubAssign};

/// What a request asks for, as far as its cost goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Read,
    Write,
    /// As well as what is answered from the map alone.
    Discard,
    Flush,
}

/// In 1,024ths of a unit.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Cost(pub u64);

/// Floors count requests up to this size as one.
pub const FLOOR_BYTES: u64 = 8 << 10;

impl Cost {
    pub const ZERO: Cost = Cost(0);
    pub const UNIT: Cost = Cost(1 << 10);

    pub const fn units(units: u64) -> Cost {
        Cost(units << 10)
    }

    /// A read is 1 + bytes/32 KiB, a write 2 + bytes/16 KiB, a discard 1, a flush nothing.
    pub const fn of(kind: Kind, bytes: u64) -> Cost {
        match kind {
            Kind::Read => Cost((1 << 10) + bytes / 32),
            Kind::Write => Cost((2 << 10) + bytes / 16),
            Kind::Discard => Cost::UNIT,
            Kind::Flush => Cost::ZERO,
        }
    }

    pub const fn is_zero(self) -> bool {
        self.0 == 0
    }

    /// Whole units, the last one begun.
    pub const fn whole_units(self) -> u64 {
        self.0.div_ceil(1 << 10)
    }

    #[must_use]
    pub const fn saturating_sub(self, other: Cost) -> Cost {
        Cost(self.0.saturating_sub(other.0))
    }
}

impl Add for Cost {
    type Output = Cost;
    fn add(self, other: Cost) -> Cost {
        Cost(self.0 + other.0)
    }
}

impl AddAssign for Cost {
    fn add_assign(&mut self, other: Cost) {
        self.0 += other.0;
    }
}

impl Sub for Cost {
    type Output = Cost;
    fn sub(self, other: Cost) -> Cost {
        Cost(self.0 - other.0)
    }
}

impl SubAssign for Cost {
    fn sub_assign(&mut self, other: Cost) {
        self.0 -= other.0;
    }
}

/// Time that a request takes of a floor of so many a second. One up to [`FLOOR_BYTES`] counts as one, whatever its kind; a
/// larger one as many as it costs of those.
pub(crate) fn floor_nanos(kind: Kind, cost: Cost, floor: u64) -> u64 {
    if cost.is_zero() {
        return 0;
    }
    let one = Cost::of(kind, FLOOR_BYTES);
    let nanos = u128::from(cost.max(one).0) * 1_000_000_000 / (u128::from(one.0) * u128::from(floor.max(1)));
    u64::try_from(nanos).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn larger_and_written_costs_more() {
        assert_eq!(Cost::of(Kind::Read, 32 << 10), Cost::units(2));
        assert_eq!(Cost::of(Kind::Read, 4 << 10), Cost(1024 + 128));
        assert_eq!(Cost::of(Kind::Write, 1 << 20), Cost::units(66));
        assert_eq!(Cost::of(Kind::Discard, 1 << 30), Cost::units(1));
        assert!(Cost::of(Kind::Flush, 0).is_zero());
        assert_eq!(Cost::of(Kind::Read, 4 << 10).whole_units(), 2);
    }

    #[test]
    fn a_floor_counts_requests_of_8_kib() {
        let nanos = |kind, bytes| floor_nanos(kind, Cost::of(kind, bytes), 1000);
        assert_eq!(nanos(Kind::Read, 512), 1_000_000);
        assert_eq!(nanos(Kind::Write, 8 << 10), 1_000_000);
        assert_eq!(nanos(Kind::Read, 128 << 10), 4_000_000, "5 units for 1.25");
        assert_eq!(nanos(Kind::Flush, 0), 0);
    }
}
