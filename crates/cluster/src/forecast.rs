//! How long the space will last: what is taken, hour by hour, and where that leads.
//!
//! Figures only; when a sample is due [`crate::Upkeep`] has it taken. The rate is the median of the rates over spans of a
//! day, one from each sample on: what happens every night counts once in each, and one large copy or deletion is in few of
//! them.

use holdfast_format::meta::CapacitySample;

const HOUR_MS: u64 = 3_600_000;
const DAY_MS: u64 = 24 * HOUR_MS;

/// Between two samples.
const EVERY_MS: u64 = HOUR_MS;

/// Older ones are forgotten.
const KEPT_MS: u64 = 7 * DAY_MS;

/// Rates are of such spans, or of half the past where that is shorter.
const APART_MS: u64 = DAY_MS;

/// Nothing is said of a shorter past.
const PAST_MS_MIN: u64 = 6 * HOUR_MS;

#[derive(Default, Debug)]
pub struct Forecast {
    samples: Vec<CapacitySample>,
    /// Bytes a day; `None` while the past is too short, or where nothing becomes more.
    rate: Option<f64>,
}

impl Forecast {
    pub fn new(samples: Vec<CapacitySample>) -> Forecast {
        Forecast { rate: bytes_a_day(&samples), samples }
    }

    /// By a clock that was set back, too.
    pub fn is_due(&self, now_ms: u64) -> bool {
        let recent = |last: &CapacitySample| last.at_ms <= now_ms && now_ms - last.at_ms < EVERY_MS;
        !self.samples.last().is_some_and(recent)
    }

    /// Takes a sample in, if one is due. Returns all that are to be kept, then.
    pub fn note(&mut self, sample: CapacitySample) -> Option<&[CapacitySample]> {
        // A clock that was set back begins anew from what is older.
        self.samples.retain(|s| s.at_ms <= sample.at_ms && sample.at_ms - s.at_ms <= KEPT_MS);
        if self.samples.last().is_some_and(|last| sample.at_ms - last.at_ms < EVERY_MS) {
            return None;
        }
        self.samples.push(sample);
        self.rate = bytes_a_day(&self.samples);
        Some(&self.samples)
    }

    /// Until so much is taken besides; `None` where it isn't known, or nothing points to it.
    pub fn days_until(&self, free_bytes: u64) -> Option<f64> {
        Some(free_bytes as f64 / self.rate?)
    }
}

/// Growth, from samples in order of time.
fn bytes_a_day(samples: &[CapacitySample]) -> Option<f64> {
    let (first, last) = (samples.first()?, samples.last()?);
    let past_ms = last.at_ms - first.at_ms;
    if past_ms < PAST_MS_MIN {
        return None;
    }
    let apart_ms = APART_MS.min(past_ms / 2);
    let mut rates = Vec::with_capacity(samples.len());
    for (i, from) in samples.iter().enumerate() {
        if let Some(to) = samples[i + 1..].iter().find(|to| to.at_ms - from.at_ms >= apart_ms) {
            let days = (to.at_ms - from.at_ms) as f64 / DAY_MS as f64;
            rates.push((to.taken_bytes as f64 - from.taken_bytes as f64) / days);
        }
    }
    let middle = rates.len() / 2;
    let (_, median, _) = rates.select_nth_unstable_by(middle, f64::total_cmp);
    (*median > 0.0).then_some(*median)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    /// Some time in 2026.
    const START_MS: u64 = 1_790_000_000_000;

    fn hourly(count: u64, taken: impl Fn(u64) -> u64) -> Vec<CapacitySample> {
        (0..count).map(|hour| CapacitySample { at_ms: START_MS + hour * HOUR_MS, taken_bytes: taken(hour) }).collect()
    }

    fn days(samples: &[CapacitySample], free: u64) -> Option<f64> {
        Forecast::new(samples.to_vec()).days_until(free)
    }

    #[test]
    fn steady_growth_is_carried_on() {
        // A GiB an hour.
        let samples = hourly(48, |hour| (100 + hour) * GIB);
        let found = days(&samples, 240 * GIB).unwrap();
        assert!((found - 10.0).abs() < 1e-6, "{found}");
        assert_eq!(days(&samples, 0), Some(0.0));
    }

    #[test]
    fn a_short_past_says_nothing_and_neither_does_one_that_stands_still() {
        assert_eq!(days(&[], GIB), None);
        assert_eq!(days(&hourly(1, |_| 5), GIB), None);
        assert_eq!(days(&hourly(6, |hour| hour * GIB), GIB), None, "five hours");
        assert!(days(&hourly(7, |hour| hour * GIB), GIB).is_some(), "six");
        assert_eq!(days(&hourly(100, |_| 5), GIB), None);
        assert_eq!(days(&hourly(100, |hour| 1000 * GIB - hour), GIB), None);
    }

    #[test]
    fn one_large_step_does_not_decide() {
        let grows = |hour: u64| (1000 + hour) * GIB;
        let deleted = hourly(120, |hour| grows(hour) - if hour >= 60 { 500 * GIB } else { 0 });
        let found = days(&deleted, 24 * GIB).unwrap();
        assert!((0.9..1.1).contains(&found), "{found}: a plain line would fall");
        let spike = hourly(120, |hour| grows(hour) + if hour == 119 { 900 * GIB } else { 0 });
        let found = days(&spike, 24 * GIB).unwrap();
        assert!((0.9..1.1).contains(&found), "{found}");
    }

    #[test]
    fn what_is_copied_every_night_is_growth() {
        let samples = hourly(150, |hour| (1000 + hour / 24 * 10) * GIB);
        let found = days(&samples, 30 * GIB).unwrap();
        assert!((found - 3.0).abs() < 1e-6, "{found}");
    }

    #[test]
    fn samples_are_an_hour_apart_and_a_week_old_at_most() {
        let mut forecast = Forecast::default();
        for minute in 0..10 * 24 * 60 {
            forecast.note(CapacitySample { at_ms: START_MS + minute * 60_000, taken_bytes: minute });
        }
        let (first, last) = (forecast.samples[0].at_ms, forecast.samples[forecast.samples.len() - 1].at_ms);
        assert_eq!((forecast.samples.len() as u64, last - first), (KEPT_MS / HOUR_MS, KEPT_MS - HOUR_MS));
        // The clock is set back by a year.
        forecast.note(CapacitySample { at_ms: START_MS - 365 * DAY_MS, taken_bytes: 0 });
        assert_eq!((forecast.samples.len(), forecast.days_until(GIB)), (1, None));
    }
}
