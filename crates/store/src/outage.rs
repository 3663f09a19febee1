//! How a device that is out comes back: opened anew after a pause, whole, as after a crash of its node (protocol rule 25).
//!
//! A bus that is reset or a path that is switched fails a device for a moment; one that fails again and again is not to be
//! trusted with anything new. What was under way when a write or flush failed is never tried again: nobody knows what of it
//! is on the media, and opening anew finds out.
//!
//! Limits: a device that has come back [`RETURNS_MAX`] times within [`RETURNS_WITHIN`] stays out when it fails once more. Pauses
//! double from [`PAUSE_MIN`] to [`PAUSE_MAX`] while opening it fails, for one that is not there to [`PAUSE_ABSENT_MAX`].

use crate::api::{FailReason, Next};
use holdfast_base::Instant;
use std::collections::VecDeque;
use std::time::Duration;

/// Returns that are put up with.
const RETURNS_MAX: usize = 2;
const RETURNS_WITHIN: Duration = Duration::from_secs(24 * 3600);

const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(512);

/// Looking whether a device is there costs little.
const PAUSE_ABSENT_MAX: Duration = Duration::from_secs(16);

/// Pauses after which a read that has failed is tried again.
pub(crate) const READ_PAUSES: [Duration; 2] = [Duration::from_millis(100), Duration::from_millis(500)];

/// So long without any progress an opening hangs.
pub(crate) const HANGS_AFTER: Duration = Duration::from_secs(4);

/// What is known of one device's failures, over all its lives within this process.
#[derive(Debug, Default)]
pub(crate) struct Outages {
    /// It has served since it was last out.
    served: bool,
    /// A write or flush of it has failed while it served, and it has not come back yet.
    fell: bool,
    returned_at: VecDeque<Instant>,
    /// Openings in a row that failed.
    attempts: u32,
    /// Since when it is out, and why.
    pub out: Option<(Instant, FailReason)>,
    /// How often it was opened.
    pub lives: u32,
}

impl Outages {
    /// It serves.
    pub fn on_served(&mut self, now: Instant) {
        if std::mem::take(&mut self.fell) {
            self.returned_at.push_back(now);
        }
        (self.served, self.attempts, self.out) = (true, 0, None);
    }

    /// It is out. Tells what becomes of it.
    pub fn on_out(&mut self, now: Instant, reason: &FailReason, is_direct: bool) -> Next {
        let since = self.out.as_ref().map_or(now, |(since, _)| *since);
        self.out = Some((since, reason.clone()));
        let pause_max = match reason {
            FailReason::Twice | FailReason::Removed | FailReason::PromisesLost => return Next::Stays,
            FailReason::NotOpened(_) => PAUSE_ABSENT_MAX,
            // The page cache says that what it has lost is on the media.
            _ if !is_direct => return Next::Stays,
            _ => PAUSE_MAX,
        };
        self.fell |= self.served;
        self.served = false;
        while self.returned_at.front().is_some_and(|at| now.since(*at) >= RETURNS_WITHIN) {
            self.returned_at.pop_front();
        }
        if self.fell && self.returned_at.len() >= RETURNS_MAX {
            return Next::GivenUp;
        }
        let pause = PAUSE_MIN * (1 << self.attempts.min(16));
        self.attempts += 1;
        Next::Again(pause.min(pause_max))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::DiskError;

    fn at(s: u64) -> Instant {
        Instant(0) + Duration::from_secs(s)
    }

    const WRITE: FailReason = FailReason::JournalWrite(DiskError::Io);

    fn again(s: u64) -> Next {
        Next::Again(Duration::from_secs(s))
    }

    #[test]
    fn pauses_grow_while_opening_fails_and_begin_anew_once_it_serves() {
        let mut outages = Outages::default();
        let pauses: Vec<Next> = (0..11).map(|i| outages.on_out(at(i), &FailReason::NoSuperblock, true)).collect();
        assert_eq!(pauses[..4], [again(1), again(2), again(4), again(8)]);
        assert_eq!(pauses[9..], [again(512), again(512)]);
        assert_eq!(outages.out.as_ref().unwrap().0, at(0), "since it was out first");
        outages.on_served(at(100));
        assert!(outages.out.is_none());
        assert_eq!(outages.on_out(at(200), &WRITE, true), again(1));
    }

    #[test]
    fn what_is_not_there_is_looked_for_often_and_for_ever() {
        let mut outages = Outages::default();
        let gone = FailReason::NotOpened("it is gone".to_string());
        for i in 0..100 {
            assert!(matches!(outages.on_out(at(i), &gone, true), Next::Again(pause) if pause <= PAUSE_ABSENT_MAX));
        }
        // To be plugged in is no return.
        outages.on_served(at(200));
        for i in 0..2 {
            assert_eq!(outages.on_out(at(300 + i), &WRITE, true), again(1));
            outages.on_served(at(300 + i));
        }
    }

    #[test]
    fn the_third_failure_in_a_day_is_the_last_and_one_of_the_day_before_is_forgotten() {
        let mut outages = Outages::default();
        for i in 0..2 {
            outages.on_served(at(i));
            assert_eq!(outages.on_out(at(10 + i), &WRITE, true), again(1));
        }
        outages.on_served(at(20));
        assert_eq!(outages.on_out(at(30), &WRITE, true), Next::GivenUp);
        let mut outages = Outages::default();
        for i in 0..5 {
            outages.on_served(at(i * 25 * 3600));
            assert_eq!(outages.on_out(at(i * 25 * 3600 + 5), &WRITE, true), again(1), "{i}");
        }
    }

    #[test]
    fn what_a_page_cache_may_have_lost_stays_out() {
        let mut outages = Outages::default();
        outages.on_served(at(1));
        assert_eq!(outages.on_out(at(2), &WRITE, false), Next::Stays);
    }
}
