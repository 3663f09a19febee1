//! Whether to look for completions a little longer before sleeping: learned from whether that paid lately.

use crate::clock;
use holdfast_base::Instant;
use std::time::Duration;

/// Sleeps to let pass, at most, after looking in vain again and again.
const SKIPS_MAX: u32 = 256;

pub(super) struct Spin {
    span: Duration,
    /// Sleeps to let pass before the next attempt, doubled by every vain one.
    skips: u32,
    skips_left: u32,
}

impl Spin {
    pub(super) fn new(span: Duration) -> Spin {
        Spin { span, skips: 0, skips_left: 0 }
    }

    pub(super) fn span(&self) -> Duration {
        self.span
    }

    /// Asked before each sleep.
    pub(super) fn is_due(&mut self) -> bool {
        if self.span == Duration::ZERO {
            return false;
        }
        if self.skips_left > 0 {
            self.skips_left -= 1;
            return false;
        }
        true
    }

    pub(super) fn learn(&mut self, found: bool) {
        self.skips = if found { 0 } else { (self.skips * 2).clamp(1, SKIPS_MAX) };
        self.skips_left = self.skips;
    }
}

/// Runs `stirs` until it is true or the time is over; returns whether it was.
pub(super) fn until(end: Instant, mut stirs: impl FnMut() -> bool) -> bool {
    loop {
        for _ in 0..16 {
            if stirs() {
                return true;
            }
            std::hint::spin_loop();
        }
        if clock::now() >= end {
            return false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vain_attempts_become_rare_and_one_that_pays_brings_them_back() {
        let mut spin = Spin::new(Duration::from_micros(50));
        let mut attempts = 0;
        for _ in 0..10_000 {
            if spin.is_due() {
                attempts += 1;
                spin.learn(false);
            }
        }
        assert!(attempts < 60, "{attempts} attempts");
        while !spin.is_due() {}
        spin.learn(true);
        assert!(spin.is_due());
        assert!(!Spin::new(Duration::ZERO).is_due());
    }
}
