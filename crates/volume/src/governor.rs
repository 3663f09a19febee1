//! The governor: how fast shards are made again, moved and re-coded while guests are at work. It steers by what they feel:
//! the 99th percentile of their requests' latency, against what that is while nothing is moved.
//!
//! States: measuring calm (nothing is moved for [`CALM_WINDOWS`] windows, every [`CALM_EVERY`]) and moving (each window, the
//! rate goes down where guests feel it, and up where they don't). When guests rest, nothing is held back.
//!
//! Invariant: the rate never falls below [`FLOOR`], so that redundancy comes back whatever the load.

use holdfast_base::Instant;
use std::time::Duration;

/// Latencies are compared this often, if there were enough requests.
const WINDOW: Duration = Duration::from_millis(250);
const WINDOW_MAX: Duration = Duration::from_secs(2);
const SAMPLES_MIN: usize = 100;

/// Of one window at most so many are kept: the first.
const SAMPLES_MAX: usize = 4096;

/// While shards are moved, calm is measured anew this often, and for so long: what was under way ends in the first.
const CALM_EVERY: u32 = 40;
const CALM_WINDOWS: u32 = 3;

/// Bytes a second of shards.
const FLOOR: u64 = 4 << 20;
const CEILING: u64 = 1 << 30;
const START: u64 = 32 << 20;

/// Guests feel it from so much more than calm on, in 1/1000; up to half of that it may grow.
const FELT_PER_MILLE: u64 = 200;

/// Guests have rested when nothing was asked for this long.
pub(crate) const GUESTS_REST: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct Governor {
    samples_us: Vec<u32>,
    window_began: Instant,
    /// Windows until the next change between moving and measuring calm.
    windows_left: u32,
    is_measuring: bool,
    /// Something was moved, or under way, in this window.
    moved: bool,
    calm_p99_us: Option<u64>,
    rate: u64,
    not_before: Instant,
}

impl Default for Governor {
    fn default() -> Governor {
        Governor {
            samples_us: Vec::new(),
            window_began: Instant::ZERO,
            windows_left: CALM_EVERY,
            is_measuring: false,
            moved: false,
            calm_p99_us: None,
            rate: START,
            not_before: Instant::ZERO,
        }
    }
}

impl Governor {
    /// A guest's request was answered after so long.
    pub(crate) fn on_answered(&mut self, took: Duration) {
        if self.samples_us.len() < SAMPLES_MAX {
            self.samples_us.push(took.as_micros().min(u128::from(u32::MAX)) as u32);
        }
    }

    /// Whether a shard may be moved now, with guests at work.
    pub(crate) fn admits(&self, now: Instant) -> bool {
        !self.is_measuring && now >= self.not_before
    }

    /// A shard of so many bytes is moved.
    pub(crate) fn charge(&mut self, now: Instant, bytes: u64) {
        self.moved = true;
        self.not_before = self.not_before.max(now) + Duration::from_micros(bytes * 1_000_000 / self.rate);
    }

    /// Looks at the window, when it is over. `moving`: shards are under way.
    pub(crate) fn look(&mut self, now: Instant, moving: bool) {
        self.moved |= moving;
        let passed = now.since(self.window_began);
        let is_over = passed >= WINDOW && self.samples_us.len() >= SAMPLES_MIN || passed >= WINDOW_MAX;
        if !is_over {
            return;
        }
        let p99_us = self.p99_us();
        let moved = std::mem::take(&mut self.moved);
        self.window_began = now;
        self.samples_us.clear();
        match p99_us {
            Some(p99_us) if moved => self.steer(p99_us),
            Some(p99_us) => {
                // Slowly, but while it is measured for the sake of it.
                let weight = if self.is_measuring { 2 } else { 8 };
                let calm = self.calm_p99_us.unwrap_or(p99_us);
                self.calm_p99_us = Some((calm * (weight - 1) + p99_us) / weight);
            }
            None => {}
        }
        if moved || self.is_measuring {
            self.windows_left -= 1;
        }
        if self.windows_left == 0 {
            self.is_measuring = !self.is_measuring;
            self.windows_left = if self.is_measuring { CALM_WINDOWS } else { CALM_EVERY };
        }
    }

    fn p99_us(&mut self) -> Option<u64> {
        let count = self.samples_us.len();
        if count < SAMPLES_MIN {
            return None;
        }
        let (_, p99_us, _) = self.samples_us.select_nth_unstable(count * 99 / 100);
        Some(u64::from(*p99_us))
    }

    fn steer(&mut self, p99_us: u64) {
        let Some(calm) = self.calm_p99_us else {
            // What it is without is not known yet: measured next.
            self.windows_left = 1;
            return;
        };
        if p99_us * 1000 > calm * (1000 + FELT_PER_MILLE) {
            self.rate = (self.rate * 3 / 4).max(FLOOR);
        } else if p99_us * 1000 < calm * (1000 + FELT_PER_MILLE / 2) {
            self.rate = (self.rate + self.rate / 8).min(CEILING);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Guests whose p99 is `calm_us`, and more by `us_per_mib` for each MiB a second that is moved, for so long; shards of
    /// 1 MiB wait all the time. Bytes moved a second at the end.
    fn run(governor: &mut Governor, from: Instant, seconds: u64, calm_us: u64, us_per_mib: u64) -> u64 {
        let mut moved = 0;
        let mut lately = std::collections::VecDeque::from([0_u64; 250]);
        for ms in 0..seconds * 1000 {
            let now = from + Duration::from_millis(ms);
            governor.look(now, false);
            let mut bytes = 0;
            while governor.admits(now) {
                governor.charge(now, 1 << 20);
                bytes += 1 << 20;
            }
            moved = moved + bytes - lately.pop_front().expect("a quarter of a second");
            lately.push_back(bytes);
            let us = calm_us + (moved >> 20) * 4 * us_per_mib;
            for i in 0..5 {
                // One in a hundred is slow.
                let is_slow = (ms * 5 + i) % 50 == 0;
                governor.on_answered(Duration::from_micros(if is_slow { us } else { us / 10 }));
            }
        }
        governor.rate
    }

    #[test]
    fn it_goes_as_fast_as_guests_don_t_feel() {
        let mut governor = Governor::default();
        let from = Instant::ZERO + Duration::from_secs(1);
        // 20 % more are 1000 us: at 50 MiB a second.
        let rate = run(&mut governor, from, 120, 5000, 20) >> 20;
        assert!((20..70).contains(&rate), "{rate} MiB/s");
        // The load changes: now everybody is slower, whatever is moved.
        let rate = run(&mut governor, from + Duration::from_secs(120), 120, 20_000, 20) >> 20;
        assert!((80..260).contains(&rate), "{rate} MiB/s");
    }

    #[test]
    fn it_never_stops() {
        let mut governor = Governor::default();
        let rate = run(&mut governor, Instant::ZERO + Duration::from_secs(1), 60, 1000, 1000);
        assert_eq!(rate, FLOOR);
    }

    #[test]
    fn of_a_few_requests_nothing_is_concluded() {
        let mut governor = Governor::default();
        for ms in 0..60_000 {
            let now = Instant::ZERO + Duration::from_millis(ms);
            governor.look(now, true);
            if ms % 100 == 0 {
                governor.on_answered(Duration::from_millis(ms));
            }
        }
        assert_eq!(governor.rate, START);
    }
}
