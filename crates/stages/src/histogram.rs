//! Counts of times, by their size.

use std::time::Duration;

/// Counters to each doubling.
const PARTS: u32 = 8;
/// From a microsecond to 134 s.
const DOUBLINGS: u32 = 27;
/// One to each microsecond below eight, as many to each doubling after that.
const COUNTERS: usize = ((DOUBLINGS - 2) * PARTS) as usize;

#[derive(Clone, Debug)]
pub struct Histogram {
    counters: [u32; COUNTERS],
    count: u64,
}

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram { counters: [0; COUNTERS], count: 0 }
    }
}

fn place_of(us: u64) -> usize {
    if us < u64::from(PARTS) {
        return us as usize;
    }
    let doubling = us.ilog2();
    let part = (us >> (doubling - PARTS.ilog2())) as usize - PARTS as usize;
    (((doubling - 2) * PARTS) as usize + part).min(COUNTERS - 1)
}

/// The largest time that is counted there.
fn upper_us(place: usize) -> u64 {
    let (doubling, part) = (place as u32 / PARTS, place as u64 % u64::from(PARTS));
    if doubling == 0 {
        return part;
    }
    ((u64::from(PARTS) + part + 1) << (doubling - 1)) - 1
}

impl Histogram {
    pub fn count(&mut self, us: u64) {
        let counter = &mut self.counters[place_of(us)];
        *counter = counter.saturating_add(1);
        self.count += 1;
    }

    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// How many were counted.
    pub fn len(&self) -> u64 {
        self.count
    }
}

/// What so many of a thousand take at most, of what several histograms counted; zero of nothing.
pub fn quantile<'a>(of: impl Iterator<Item = &'a Histogram> + Clone, per_mille: u64) -> Duration {
    let all = of.clone().map(Histogram::len).sum();
    quantile_among(all, of, per_mille)
}

/// The same among so many, of which all others took no time.
pub fn quantile_among<'a>(all: u64, of: impl Iterator<Item = &'a Histogram> + Clone, per_mille: u64) -> Duration {
    Duration::from_micros(place_in(all, of, per_mille).map_or(0, upper_us))
}

/// The least time that is counted where that one is.
pub fn least_us<'a>(of: impl Iterator<Item = &'a Histogram> + Clone, per_mille: u64) -> u64 {
    let all = of.clone().map(Histogram::len).sum();
    let place = place_in(all, of, per_mille).unwrap_or(0);
    place.checked_sub(1).map_or(0, |before| upper_us(before) + 1)
}

fn place_in<'a>(all: u64, of: impl Iterator<Item = &'a Histogram> + Clone, per_mille: u64) -> Option<usize> {
    let wanted = (all * per_mille).div_ceil(1000).max(1);
    let mut seen = all.saturating_sub(of.clone().map(Histogram::len).sum());
    (0..COUNTERS).filter(|_| all > 0).find(|place| {
        seen += of.clone().map(|histogram| u64::from(histogram.counters[*place])).sum::<u64>();
        seen >= wanted
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_told_is_at_most_an_eighth_too_large(us in 0u64..134_000_000) {
            let told = upper_us(place_of(us));
            prop_assert!(told >= us && told <= us + us / 8, "{us}: {told}");
            let mut one = Histogram::default();
            one.count(us);
            let least = least_us(std::iter::once(&one), 500);
            prop_assert!(least <= us && place_of(least) == place_of(us), "{us}: {least}");
        }

        #[test]
        fn larger_times_have_later_places(us in 0u64..u64::MAX / 2) {
            prop_assert!(place_of(us) <= place_of(us + 1) && place_of(us + 1) - place_of(us) <= 1);
        }
    }

    #[test]
    fn quantiles_are_of_all_that_was_counted() {
        let (mut a, mut b) = (Histogram::default(), Histogram::default());
        assert_eq!(quantile([&a, &b].into_iter(), 500), Duration::ZERO);
        (0..98).for_each(|_| a.count(4));
        (0..2).for_each(|_| b.count(7_000_000_000));
        let told = |per_mille| quantile([&a, &b].into_iter(), per_mille);
        assert_eq!(
            (told(0), told(500), told(980)),
            (Duration::from_micros(4), Duration::from_micros(4), Duration::from_micros(4))
        );
        assert!(told(990) > Duration::from_secs(100), "what is too long for the table counts in its last place");
    }
}
