//! The governor: how fast shards are made again, moved and re-coded while guests are at work. It steers by what they
//! feel: the 99th percentile of their requests' latency, against what that is while nothing is moved.
//!
//! States: measuring calm (nothing is moved for [`CALM_WINDOWS`] windows, every [`CALM_EVERY`]) and moving (each
//! window, the rate goes down where guests feel it, and up where they don't). When guests rest, nothing is held back.
//!
//! Work is admitted by its [`Need`]. The rate bends to guests; what a need is given of it at least ([`Need::floor`])
//! does not: data that one more loss would take is made whole again whatever the load.
//!
//! Invariants
//! 1. The rate never falls below [`FLOOR`].
//! 2. What is needed more never waits for what was spent on what is needed less.

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

/// Bytes a second of shards: at least, where something lacks redundancy, and where one more loss would take data.
const FLOOR: u64 = 4 << 20;
const FLOOR_LACKING: u64 = 8 << 20;
const FLOOR_AT_RISK: u64 = 16 << 20;
const CEILING: u64 = 1 << 30;
const START: u64 = 32 << 20;

/// Guests feel it from so much more than calm on, in 1/1000; up to half of that it may grow.
const FELT_PER_MILLE: u64 = 200;

/// Shards under way at a time while guests are at work. Where nodes answer late it is this that bounds the rate.
const SHARDS: usize = 2;
const SHARDS_AT_RISK: usize = 4;

/// Guests have rested when nothing was asked for this long.
pub(crate) const GUESTS_REST: Duration = Duration::from_secs(1);

/// Why bytes are moved; what is needed most last.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Need {
    /// All is as redundant as it is to be: it is drained, evened out, written in another layout or tier.
    Choice,
    /// It bears fewer losses than it is to, and still one.
    Lacking,
    /// One more loss would take it.
    AtRisk,
}

impl Need {
    /// Bytes a second that it gets whatever guests feel.
    fn floor(self) -> u64 {
        match self {
            Need::Choice => FLOOR,
            Need::Lacking => FLOOR_LACKING,
            Need::AtRisk => FLOOR_AT_RISK,
        }
    }

    /// Shards that may be under way for it while guests are at work.
    pub(crate) fn shards_beside_guests(self) -> usize {
        if self == Need::AtRisk { SHARDS_AT_RISK } else { SHARDS }
    }
}

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
    /// Calm was measured at least once, whatever came of it.
    has_measured: bool,
    rate: u64,
    /// By need.
    not_before: [Instant; 3],
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
            has_measured: false,
            rate: START,
            not_before: [Instant::ZERO; 3],
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

    /// Something is moved, or how it is without that is measured.
    pub(crate) fn is_at_work(&self) -> bool {
        self.moved || self.is_measuring
    }

    /// Whether a shard may be moved now, with guests at work.
    pub(crate) fn admits(&self, now: Instant, need: Need) -> bool {
        !self.is_measuring && now >= self.not_before[need as usize]
    }

    /// A shard of so many bytes is moved. What is needed as much waits until it has had that, all in all; what is
    /// needed less for this one.
    pub(crate) fn charge(&mut self, now: Instant, bytes: u64, need: Need) {
        self.moved = true;
        for other in [Need::Choice, Need::Lacking, Need::AtRisk].into_iter().filter(|other| *other <= need) {
            let not_before = &mut self.not_before[other as usize];
            let span = Duration::from_micros(bytes * 1_000_000 / self.rate.max(other.floor()));
            *not_before = if other == need { (*not_before).max(now) + span } else { (*not_before).max(now + span) };
        }
    }

    /// Asserts what must hold between events (tests and the simulator).
    pub(crate) fn verify(&self) {
        assert!((FLOOR..=CEILING).contains(&self.rate), "{} bytes a second", self.rate);
        assert!(self.windows_left > 0 && self.samples_us.len() <= SAMPLES_MAX);
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
            // Guests ask too little to tell: nothing waits for that any longer.
            None if self.is_measuring => self.windows_left = 1,
            None => {}
        }
        if moved || self.is_measuring {
            self.windows_left -= 1;
        }
        if self.windows_left == 0 {
            self.is_measuring = !self.is_measuring;
            self.has_measured |= self.is_measuring;
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
            // What it is without is not known yet: measured next. Once, since guests may ask too little then to tell.
            if !self.has_measured {
                self.windows_left = 1;
            }
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

    /// Guests whose p99 is `calm_us`, and more by `us_per_mib` for each MiB a second that is moved, for so long; shards
    /// of 1 MiB wait all the time. Bytes moved a second, all in all.
    fn run_for(need: Need, governor: &mut Governor, from: Instant, seconds: u64, calm_us: u64, us_per_mib: u64) -> u64 {
        let (mut moved, mut all) = (0, 0);
        let mut lately = std::collections::VecDeque::from([0_u64; 250]);
        for ms in 0..seconds * 1000 {
            let now = from + Duration::from_millis(ms);
            governor.look(now, false);
            let mut bytes = 0;
            while governor.admits(now, need) {
                governor.charge(now, 1 << 20, need);
                bytes += 1 << 20;
            }
            all += bytes;
            moved = moved + bytes - lately.pop_front().expect("a quarter of a second");
            lately.push_back(bytes);
            let us = calm_us + (moved >> 20) * 4 * us_per_mib;
            for i in 0..5 {
                // One in a hundred is slow.
                let is_slow = (ms * 5 + i) % 50 == 0;
                governor.on_answered(Duration::from_micros(if is_slow { us } else { us / 10 }));
            }
        }
        all / seconds
    }

    /// The same for what is moved by choice. The rate at the end.
    fn run(governor: &mut Governor, from: Instant, seconds: u64, calm_us: u64, us_per_mib: u64) -> u64 {
        run_for(Need::Choice, governor, from, seconds, calm_us, us_per_mib);
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
    fn what_is_needed_more_gets_more_however_guests_press() {
        let from = Instant::ZERO + Duration::from_secs(1);
        let pressed = |need| run_for(need, &mut Governor::default(), from, 120, 1000, 1000) >> 20;
        let (choice, lacking, at_risk) = (pressed(Need::Choice), pressed(Need::Lacking), pressed(Need::AtRisk));
        assert!((3..5).contains(&choice), "{choice} MiB/s");
        assert!((7..9).contains(&lacking), "{lacking} MiB/s");
        assert!((14..17).contains(&at_risk), "{at_risk} MiB/s");
    }

    #[test]
    fn what_is_needed_most_waits_for_nothing_else() {
        let mut governor = Governor::default();
        let now = Instant::ZERO + Duration::from_secs(1);
        governor.charge(now, 1 << 30, Need::Lacking);
        assert!(governor.admits(now, Need::AtRisk));
        assert!(!governor.admits(now, Need::Lacking) && !governor.admits(now, Need::Choice));
        governor.charge(now, 1 << 20, Need::AtRisk);
        assert!(!governor.admits(now, Need::AtRisk));
    }

    #[test]
    fn calm_that_can_not_be_measured_is_not_waited_for_again_and_again() {
        // Guests ask much while something is moved, and too little to tell while nothing is.
        let mut governor = Governor::default();
        let (mut admitted, seconds) = (0, 100);
        for ms in 0..seconds * 1000 {
            let now = Instant::ZERO + Duration::from_millis(ms);
            let is_moving = governor.admits(now, Need::AtRisk);
            governor.look(now, is_moving);
            admitted += u64::from(is_moving);
            if is_moving || ms % 50 == 0 {
                governor.on_answered(Duration::from_millis(300));
            }
        }
        assert!(admitted > seconds * 700, "it was admitted for {admitted} ms of {seconds} s");
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
