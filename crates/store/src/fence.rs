//! Promises and read grants of one volume on one device.
//!
//! A promise (protocol rule 6) is the highest epoch that was ever asked for here, with the opening that asked: lower epochs,
//! and other openings of the same one, are refused from the moment it is *accepted*, before it is durable. A read grant
//! (rule 8) is given by every answer to an owner; who fences that owner is told how much of it is left.
//!
//! Invariants:
//! 1. The accepted promise only rises.
//! 2. What is told of a lower epoch's grant never falls short of what its owner may count on: grants are counted here from
//!    the receipt of a request, there from its sending.

use holdfast_base::{Epoch, InstanceId, Instant};
use holdfast_format::wire::{GRANT_MS, Refusal};
use std::time::Duration;

pub(crate) const GRANT: Duration = Duration::from_millis(GRANT_MS);

/// The highest epoch accepted, and whose.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Promise {
    pub epoch: Epoch,
    pub instance: InstanceId,
}

impl Promise {
    /// For requests that carry an epoch only: nothing below the promise is served.
    pub fn check(&self, epoch: Epoch) -> Result<(), Refusal> {
        if epoch < self.epoch {
            return Err(Refusal::StaleEpoch { promised: self.epoch });
        }
        Ok(())
    }

    /// For requests that raise the promise: also another opening of the same epoch is refused. True where it rises.
    pub fn check_claim(&self, claim: Promise) -> Result<bool, Refusal> {
        self.check(claim.epoch)?;
        let fresh = *self == Promise::default();
        if claim.epoch == self.epoch && claim.instance != self.instance && !fresh {
            return Err(Refusal::StaleEpoch { promised: self.epoch });
        }
        Ok(claim.epoch > self.epoch || fresh)
    }

    pub fn raise(&mut self, claim: Promise) {
        assert!(claim.epoch >= self.epoch, "a promise never falls from {:?} to {:?}", self.epoch, claim.epoch);
        *self = claim;
    }
}

/// Until when owners may still serve reads by answers of this device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Grants {
    epoch: Epoch,
    until: Instant,
    /// The latest end of any lower epoch's.
    lower_until: Instant,
    /// Its owner serves no more.
    is_released: bool,
}

impl Grants {
    /// After a start nobody knows which answers the former process gave: assume the latest possible.
    pub fn assumed_at_start(promise: Promise, now: Instant) -> Grants {
        Grants { epoch: promise.epoch, until: now + GRANT, lower_until: now + GRANT, is_released: false }
    }

    /// An answer to a request of `epoch` that arrived at `received`.
    pub fn give(&mut self, epoch: Epoch, received: Instant) {
        let end = received + GRANT;
        if epoch > self.epoch {
            self.lower_until = self.lower_until.max(self.until);
            (self.epoch, self.until, self.is_released) = (epoch, end, false);
        } else if epoch == self.epoch {
            if !self.is_released {
                self.until = self.until.max(end);
            }
        } else {
            self.lower_until = self.lower_until.max(end);
        }
    }

    /// The owner of the epoch serves no more, and counts on no answer, before or after. Of an epoch that is not the latest here
    /// nothing is known apart from others': that runs out.
    pub fn release(&mut self, epoch: Epoch, now: Instant) {
        if epoch == self.epoch {
            (self.until, self.is_released) = (now, true);
        }
    }

    /// What owners of epochs below `epoch` may still have, rounded up to milliseconds.
    pub fn left_below(&self, epoch: Epoch, now: Instant) -> u64 {
        let until = if self.epoch < epoch { self.until.max(self.lower_until) } else { self.lower_until };
        let left = until.since(now);
        u64::try_from(left.as_nanos().div_ceil(1_000_000)).expect("a grant is short")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(epoch: u64, instance: u128) -> Promise {
        Promise { epoch: Epoch(epoch), instance: InstanceId(instance) }
    }

    #[test]
    fn a_promise_refuses_lower_epochs_and_other_openings_of_its_own() {
        let mut promise = Promise::default();
        assert_eq!(promise.check_claim(claim(3, 7)), Ok(true));
        promise.raise(claim(3, 7));
        let stale = Err(Refusal::StaleEpoch { promised: Epoch(3) });
        assert_eq!(promise.check_claim(claim(3, 7)), Ok(false));
        assert_eq!(promise.check_claim(claim(3, 8)), stale);
        assert_eq!(promise.check_claim(claim(2, 7)), stale);
        assert_eq!(promise.check(Epoch(2)), Err(Refusal::StaleEpoch { promised: Epoch(3) }));
        assert_eq!(promise.check(Epoch(4)), Ok(()));
        assert_eq!(promise.check_claim(claim(4, 8)), Ok(true));
    }

    #[test]
    fn grants_of_lower_epochs_run_out_whatever_the_new_owner_is_given() {
        let ms = |n: u64| Instant(n * 1_000_000);
        let mut grants = Grants::default();
        assert_eq!(grants.left_below(Epoch(9), ms(0)), 0);
        grants.give(Epoch(1), ms(100));
        assert_eq!(grants.left_below(Epoch(2), ms(150)), 150);
        assert_eq!(grants.left_below(Epoch(1), ms(150)), 0);
        grants.give(Epoch(2), ms(200));
        assert_eq!(grants.left_below(Epoch(2), ms(250)), 50);
        assert_eq!(grants.left_below(Epoch(3), ms(250)), 150);
        assert_eq!(grants.left_below(Epoch(2), ms(300)), 0);
        grants.release(Epoch(1), ms(250));
        assert_eq!(grants.left_below(Epoch(3), ms(250)), 150, "another's");
        grants.release(Epoch(2), ms(250));
        grants.give(Epoch(2), ms(260));
        assert_eq!(grants.left_below(Epoch(3), ms(260)), 40, "only what the one before may still have");
        grants.give(Epoch(3), ms(300));
        assert_eq!(grants.left_below(Epoch(4), ms(300)), 200, "the next owner's is its own");
        let after_start = Grants::assumed_at_start(claim(2, 1), ms(1000));
        assert_eq!(after_start.left_below(Epoch(3), ms(1000)), GRANT_MS);
        assert_eq!(after_start.left_below(Epoch(2), ms(1001)), GRANT_MS - 1);
    }
}
