//! The simulated metadata store: a few records with compare-and-swap, and clients that don't always hear the outcome.
//!
//! Faults: latency, windows in which nothing is answered, swaps whose outcome stays unknown to the client although they
//! happened, did not happen, or happen later (protocol rule 4).

use holdfast_base::{Instant, MetaReply, MetaRequest, MetaVersion, Prng};
use std::collections::BTreeMap;
use std::time::Duration;

/// How the store misbehaves.
#[derive(Clone, Copy, Debug)]
pub struct MetaFaults {
    pub latency_min: Duration,
    pub latency_max: Duration,
    /// Swaps whose outcome the client does not hear, per mille.
    pub unknown: u32,
    /// Nothing is answered before this instant.
    pub unavailable_until: Instant,
    /// How long the client's shell waits before it calls an outcome unknown.
    pub patience: Duration,
}

impl Default for MetaFaults {
    fn default() -> MetaFaults {
        MetaFaults {
            latency_min: Duration::from_micros(300),
            latency_max: Duration::from_micros(2_000),
            unknown: 0,
            unavailable_until: Instant::ZERO,
            patience: Duration::from_millis(100),
        }
    }
}

/// What becomes of a request that arrived.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum MetaOutcome {
    Answered(MetaReply),
    /// The client hears [`MetaReply::Unknown`] after its patience; the request takes effect after the span, if any.
    Unknown {
        applied_after: Option<Duration>,
    },
}

pub struct MetaStore {
    records: BTreeMap<String, (MetaVersion, Vec<u8>)>,
    last_version: u64,
    prng: Prng,
    pub faults: MetaFaults,
    /// Records that were asked for.
    pub gets: u64,
}

impl MetaStore {
    pub fn new(prng: Prng) -> MetaStore {
        MetaStore { records: BTreeMap::new(), last_version: 0, prng, faults: MetaFaults::default(), gets: 0 }
    }

    pub fn latency(&mut self) -> Duration {
        let (low, high) = (self.faults.latency_min.as_nanos() as u64, self.faults.latency_max.as_nanos() as u64);
        Duration::from_nanos(self.prng.between(low, high))
    }

    /// Decides on a request that arrived at `now`; `reachable` is false where the client is cut off.
    pub fn arrive(&mut self, now: Instant, request: &MetaRequest, reachable: bool) -> MetaOutcome {
        let is_swap = matches!(request, MetaRequest::Swap { .. });
        let patience_ns = self.faults.patience.as_nanos() as u64;
        if now < self.faults.unavailable_until || !reachable {
            // A swap stuck on its way may still come through when the way is open again.
            let late = is_swap && self.prng.chance(200);
            let after = Duration::from_nanos(self.prng.below(4 * patience_ns));
            return MetaOutcome::Unknown { applied_after: late.then_some(after) };
        }
        if is_swap && self.faults.unknown > 0 && self.prng.chance(self.faults.unknown) {
            let applied_after = match self.prng.below(3) {
                0 => None,
                1 => Some(Duration::ZERO),
                _ => Some(Duration::from_nanos(self.prng.below(4 * patience_ns))),
            };
            return MetaOutcome::Unknown { applied_after };
        }
        MetaOutcome::Answered(self.apply(request))
    }

    /// Carries a request out.
    pub fn apply(&mut self, request: &MetaRequest) -> MetaReply {
        match request {
            MetaRequest::Get { key } => {
                self.gets += 1;
                let (version, value) = self.current(key);
                MetaReply::Record { version, value }
            }
            MetaRequest::Swap { key, expect, value, guard } => {
                let (version, current) = self.current(key);
                if guard.as_ref().is_some_and(|guard| self.current(&guard.key).0 != guard.version) {
                    return MetaReply::GuardFailed { version, value: current };
                }
                if version != *expect {
                    return MetaReply::Conflict { version, value: current };
                }
                self.last_version += 1;
                let version = MetaVersion(self.last_version);
                match value {
                    Some(value) => self.records.insert(key.clone(), (version, value.clone())),
                    None => self.records.remove(key),
                };
                MetaReply::Swapped { version }
            }
        }
    }

    fn current(&self, key: &str) -> (MetaVersion, Option<Vec<u8>>) {
        match self.records.get(key) {
            Some((version, value)) => (*version, Some(value.clone())),
            None => (MetaVersion::ABSENT, None),
        }
    }

    /// The record as it stands, for set-up and checks.
    pub fn peek(&self, key: &str) -> Option<&[u8]> {
        self.records.get(key).map(|(_, value)| value.as_slice())
    }

    /// All records are gone. What clients have sent and was not carried out never finds what it expects.
    pub fn empty(&mut self) -> BTreeMap<String, Vec<u8>> {
        self.last_version += 1_000_000;
        std::mem::take(&mut self.records).into_iter().map(|(key, (_, value))| (key, value)).collect()
    }

    /// Puts a record into an emptied store.
    pub fn put(&mut self, key: &str, value: Vec<u8>) {
        self.last_version += 1;
        self.records.insert(key.to_string(), (MetaVersion(self.last_version), value));
    }

    /// Ends all faults.
    pub fn heal(&mut self) {
        self.faults = MetaFaults { patience: self.faults.patience, ..MetaFaults::default() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn swaps_need_the_current_version() {
        let mut store = MetaStore::new(Prng::new(1));
        let swap = |expect, value: &[u8]| MetaRequest::Swap {
            key: "k".to_string(),
            expect: MetaVersion(expect),
            value: Some(value.to_vec()),
            guard: None,
        };
        assert_eq!(store.apply(&swap(0, b"a")), MetaReply::Swapped { version: MetaVersion(1) });
        let lost = MetaReply::Conflict { version: MetaVersion(1), value: Some(b"a".to_vec()) };
        assert_eq!(store.apply(&swap(0, b"b")), lost);
        assert_eq!(store.apply(&swap(1, b"b")), MetaReply::Swapped { version: MetaVersion(2) });
        assert_eq!(store.peek("k"), Some(&b"b"[..]));
    }
}
