//! Rest: a volume that nobody uses, and of which nothing is left to do, is looked at seldom, so that hundreds of them cost
//! next to nothing.
//!
//! States: stirred (something happened to it, or is under way) -> at rest (nothing did for [`REST_AFTER`], and nothing is)
//! -> stirred (any event but a tick, and but an answer that tells of nothing new). One that is stirred is looked at at
//! once: its last look was long ago.
//!
//! Of nodes that come and go, and of devices and their room, it hears from its host.
//!
//! What has a deadline of its own keeps it at rest: scrub, audit, answers held back. What comes about by age alone may be
//! late by [`TICK_REST`]: a shard that is made again since its node was away for ten minutes, a balance, a tidied record.
//!
//! While nothing is owed by nodes there is nobody to judge, and a process that stood still is not told from one at rest.

use holdfast_base::Instant;
use std::time::Duration;

/// A volume to which nothing happened for so long may be at rest.
const REST_AFTER: Duration = Duration::from_secs(5);

/// One at rest is looked at this often.
pub(crate) const TICK_REST: Duration = Duration::from_secs(30);

/// When something happened.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rest {
    stirred_at: Instant,
    /// As the last look has left it.
    pub(crate) was_at_rest: bool,
}

impl Rest {
    pub(crate) fn stir(&mut self, now: Instant) {
        self.stirred_at = now;
    }

    /// Nothing has happened for a while.
    pub(crate) fn is_quiet(&self, now: Instant) -> bool {
        now.since(self.stirred_at) >= REST_AFTER
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_quiet_when_nothing_has_happened_for_a_while() {
        let mut rest = Rest::default();
        let at = Instant(1_000_000_000_000);
        assert!(rest.is_quiet(at));
        rest.stir(at);
        assert!(!rest.is_quiet(at) && !rest.is_quiet(at + REST_AFTER / 2) && rest.is_quiet(at + REST_AFTER));
    }
}
