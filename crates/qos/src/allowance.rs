//! What a limit still allows: the moment at which all that went before is paid for.
//!
//! A request costs time: a thousandth of a second at 1,000 a second, and the same for bytes. Unused time may follow at once, up
//! to the burst. Credits are seconds in which less than the limit was asked; each lets so many requests more pass, spread over
//! a second.

use crate::policy::{BURST_DEFAULT, Burst, Policy};
use holdfast_base::Instant;
use std::time::Duration;

const SECOND: u64 = 1_000_000_000;

/// What is spent of one good.
#[derive(Clone, Copy, Debug)]
struct Account {
    /// In a second.
    rate: u64,
    paid_at: Instant,
}

impl Account {
    fn new(rate: u64, former: Option<Account>) -> Account {
        Account { rate, paid_at: former.map_or(Instant::ZERO, |account| account.paid_at) }
    }

    fn pay(&mut self, now: Instant, burst: Duration, amount: u64) {
        self.paid_at = self.paid_at.max(now - burst) + nanos_of(amount, self.rate);
    }
}

fn nanos_of(amount: u64, rate: u64) -> Duration {
    let nanos = u128::from(amount) * u128::from(SECOND) / u128::from(rate);
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

#[derive(Clone, Copy, Debug)]
struct Credits {
    account: Account,
    most: Duration,
    saved: Duration,
    /// Of the limit, in the second that ends there.
    used: u64,
    second_end: Instant,
}

impl Credits {
    /// Ends the seconds that are over: of each in which less was asked than the limit, one is saved.
    fn roll(&mut self, now: Instant, limit: u64) {
        if self.second_end > now {
            return;
        }
        let more = now.since(self.second_end).as_nanos() as u64 / SECOND;
        let is_known = self.second_end > Instant::ZERO;
        if is_known {
            let seconds = u64::from(self.used < limit) + more;
            self.saved = self.most.min(self.saved.saturating_add(Duration::from_secs(seconds)));
        }
        self.used = 0;
        self.second_end = if is_known {
            self.second_end + Duration::from_nanos((more + 1) * SECOND)
        } else {
            now + Duration::from_secs(1)
        };
    }

    fn one(&self) -> Duration {
        nanos_of(1, self.account.rate)
    }
}

/// Of one tenant.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Allowance {
    requests: Option<Account>,
    bytes: Option<Account>,
    burst: Duration,
    credits: Option<Credits>,
}

impl Allowance {
    /// For a policy that follows another one: what was spent stays spent.
    pub fn following(self, policy: &Policy) -> Allowance {
        let former = self.credits;
        let credits = |more, most: Duration| Credits {
            account: Account::new(more, former.map(|credits| credits.account)),
            most,
            saved: former.map_or(Duration::ZERO, |credits| credits.saved.min(most)),
            used: former.map_or(0, |credits| credits.used),
            second_end: former.map_or(Instant::ZERO, |credits| credits.second_end),
        };
        let (burst, credits) = match policy.burst {
            Burst::Span(span) => (span, None),
            Burst::Credits { more, most } => (BURST_DEFAULT, Some(credits(more, most))),
        };
        Allowance {
            requests: policy.iops.map(|rate| Account::new(rate, self.requests)),
            bytes: policy.bytes.map(|rate| Account::new(rate, self.bytes)),
            burst,
            credits,
        }
    }

    pub fn is_unlimited(&self) -> bool {
        self.requests.is_none() && self.bytes.is_none()
    }

    /// When the next request may go.
    pub fn free_at(&mut self, now: Instant) -> Instant {
        let bytes = self.bytes.map_or(Instant::ZERO, |account| account.paid_at);
        let Some(requests) = self.requests else { return bytes };
        let mut at = requests.paid_at;
        if let Some(credits) = &mut self.credits {
            credits.roll(now, requests.rate);
            if credits.saved >= credits.one() {
                at = at.min(credits.account.paid_at);
            }
        }
        at.max(bytes)
    }

    /// A request of so many bytes goes, which may.
    pub fn pay(&mut self, now: Instant, bytes: u64) {
        if let Some(account) = &mut self.bytes {
            account.pay(now, self.burst, bytes);
        }
        let Some(requests) = &mut self.requests else { return };
        if let Some(credits) = &mut self.credits {
            credits.roll(now, requests.rate);
            if requests.paid_at > now {
                credits.saved = credits.saved.saturating_sub(credits.one());
                credits.account.pay(now, Duration::ZERO, 1);
                return;
            }
            credits.used += 1;
        }
        requests.pay(now, self.burst, 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many requests, of a tenant that always has one, pass in each of the seconds; it begins at that second.
    fn passed(text: &str, bytes: u64, begins: u64, seconds: u64) -> Vec<u64> {
        let mut allowance = Allowance::default().following(&text.parse().unwrap());
        let start = Instant(1_000 * SECOND);
        assert!(allowance.free_at(start) <= start);
        let mut now = start + Duration::from_secs(begins);
        let mut passed = vec![0; seconds as usize];
        loop {
            now = now.max(allowance.free_at(now));
            let second = now.since(start).as_nanos() as u64 / SECOND - begins;
            let Some(count) = passed.get_mut(second as usize) else { return passed };
            allowance.pay(now, bytes);
            *count += 1;
        }
    }

    #[test]
    fn the_burst_passes_and_then_the_rate() {
        assert_eq!(passed("limit=100", 4096, 0, 3), [200, 100, 100], "a second's worth at once");
        assert_eq!(passed("limit=100,burst=100ms", 4096, 0, 2), [110, 100]);
        assert_eq!(passed("limit=/40K,burst=1s", 4096, 0, 2), [20, 10]);
        assert_eq!(passed("limit=1000/40K", 4096, 0, 2), [20, 10], "the scarcer good counts");
    }

    #[test]
    fn seconds_below_the_limit_are_credit() {
        // Three seconds of rest are three in which 50 more pass, and no more.
        assert_eq!(passed("limit=100,burst=50/60s", 4096, 3, 6), [250, 150, 150, 100, 100, 100]);
        assert_eq!(
            passed("limit=100,burst=50/2s", 4096, 30, 5),
            [250, 150, 100, 100, 100],
            "two seconds at most are saved"
        );
        assert_eq!(passed("limit=100,burst=50/60s", 4096, 0, 3), [200, 100, 100], "who never rests has none");
    }

    #[test]
    fn another_policy_forgives_nothing() {
        let mut allowance = Allowance::default().following(&"limit=10,burst=1ms".parse().unwrap());
        let now = Instant(SECOND);
        allowance.pay(now, 0);
        let owes = allowance.free_at(now);
        assert!(owes > now);
        let mut after = allowance.following(&"limit=10000,burst=1ms".parse().unwrap());
        assert_eq!(after.free_at(now), owes);
        assert!(Allowance::default().following(&Policy::default()).is_unlimited());
    }
}
