//! How much of its time a reactor's thread has a processor, and how much it waits for one while others have them all.
//!
//! Role: looked at once in [`WINDOW`] by the thread itself, as the kernel counts; between two looks nothing is done. Figures are
//! of one window to two, or more of a thread that sleeps. A kernel that does not count is asked once in a window in vain.

use crate::process::{ThreadStats, thread_stats};
use holdfast_base::Instant;
use std::time::Duration;

const WINDOW: Duration = Duration::from_secs(60);

/// Thousandths of the time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ProcessorShare {
    pub busy_per_mille: u64,
    pub waited_per_mille: u64,
}

#[derive(Clone, Copy)]
struct Look {
    at: Instant,
    found: ThreadStats,
}

/// The last look, and the one before.
#[derive(Default)]
pub(super) struct Processor {
    last: Option<Look>,
    before: Option<Look>,
}

impl Processor {
    /// To be called by the thread that it is about.
    pub(super) fn look(&mut self, now: Instant) {
        if self.last.is_some_and(|last| now.since(last.at) < WINDOW) {
            return;
        }
        let found = thread_stats().unwrap_or_default();
        self.note(Look { at: now, found });
    }

    fn note(&mut self, look: Look) {
        (self.before, self.last) = (self.last.or(Some(look)), Some(look));
    }

    /// Since the look before the last one; `None` where the kernel does not count.
    pub(super) fn share(&self, now: Instant) -> Option<ProcessorShare> {
        self.since_before(Look { at: now, found: thread_stats()? })
    }

    fn since_before(&self, look: Look) -> Option<ProcessorShare> {
        let before = self.before?;
        let all = look.at.since(before.at).as_micros();
        let share = |new: Duration, old: Duration| (new.saturating_sub(old).as_micros() * 1000).checked_div(all);
        Some(ProcessorShare {
            busy_per_mille: share(look.found.ran, before.found.ran)? as u64,
            waited_per_mille: share(look.found.waited, before.found.waited)? as u64,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(at_s: u64, ran_ms: u64, waited_ms: u64) -> Look {
        let found = ThreadStats { ran: Duration::from_millis(ran_ms), waited: Duration::from_millis(waited_ms) };
        Look { at: Instant(at_s * 1_000_000_000), found }
    }

    #[test]
    fn shares_are_of_what_was_counted_since_the_look_before_the_last_one() {
        let mut processor = Processor::default();
        assert_eq!(processor.since_before(look(1, 0, 0)), None, "there was no look");
        processor.note(look(10, 5_000, 100));
        let share = |processor: &Processor, look| {
            processor.since_before(look).map(|share| (share.busy_per_mille, share.waited_per_mille))
        };
        assert_eq!(share(&processor, look(20, 9_000, 1_100)), Some((400, 100)));
        assert_eq!(share(&processor, look(10, 5_000, 100)), None, "no time has passed");
        processor.note(look(70, 10_000, 200));
        assert_eq!(share(&processor, look(110, 15_000, 20_100)), Some((100, 200)));
        processor.note(look(130, 70_000, 200));
        assert_eq!(share(&processor, look(170, 110_000, 200)), Some((1000, 0)));
    }

    #[test]
    fn a_thread_that_spins_is_seen_to_be_busy_or_to_wait() {
        let mut processor = Processor::default();
        if thread_stats().is_none() {
            return eprintln!("skipped: this kernel does not count");
        }
        processor.look(crate::clock::now());
        let until = std::time::Instant::now() + Duration::from_millis(300);
        while std::time::Instant::now() < until {}
        let share = processor.share(crate::clock::now()).expect("it was looked at");
        assert!(share.busy_per_mille + share.waited_per_mille > 700, "{share:?}");
    }
}
