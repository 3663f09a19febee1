//! A store that outwaits another one: where a call's outcome is unknown, it finds out.
//!
//! Every store may answer that it does not know ([`MetaError::Unknown`]), a cluster on a slow machine now and then does,
//! and none of the suite's rules is about that. Swaps follow protocol rule 4: they are repeated on the version that was
//! expected until they win, or until the record shows that they have won. That works since no two of the suite's
//! concurrent swaps of a record from one version write the same value.

use super::{LeaseId, MetaError, MetaStore, Revision, Swap, Watch};
use crate::meta::{Commit, Compare, Listing, Record, Write};
use holdfast_base::MetaVersion;
use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a store may not know.
const UNKNOWN_MAX: Duration = Duration::from_secs(60);

pub(super) struct Patient(pub Arc<dyn MetaStore>);

/// Repeats a call while its outcome is unknown. The call is told whether it was made before.
fn outwait<T>(call: impl Fn(bool) -> Result<T, MetaError>) -> Result<T, MetaError> {
    let (end, again) = (Instant::now() + UNKNOWN_MAX, Cell::new(false));
    loop {
        match call(again.replace(true)) {
            Err(MetaError::Unknown { .. } | MetaError::Unwritable { .. }) if Instant::now() < end => {}
            known => return known,
        }
    }
}

/// What a swap came to whose outcome was unknown, from what is there now: `None` where it may still win.
fn outcome(found: Option<Record>, expect: MetaVersion, value: Option<&[u8]>) -> Option<Swap> {
    let version = found.as_ref().map_or(MetaVersion::ABSENT, |r| r.version);
    let is_ours = found.as_ref().map(|r| r.value.as_slice()) == value;
    match version == expect {
        true => None,
        false if is_ours => Some(Swap::Done(version)),
        false => Some(Swap::Conflict(found)),
    }
}

impl Patient {
    /// What a transaction came to whose outcome was unknown: `None` where it may still win. It happened where each record that
    /// it wrote says so; one of the suite's writes nothing that is there already.
    fn outcome_of(&self, compares: &[Compare], writes: &[Write]) -> Result<Option<Commit>, MetaError> {
        let found = compares.iter().map(|c| self.get(&c.key)).collect::<Result<Vec<_>, _>>()?;
        let version = |record: &Option<Record>| record.as_ref().map_or(MetaVersion::ABSENT, |r| r.version);
        let written = writes.iter().map(|w| self.get(&w.key)).collect::<Result<Vec<_>, _>>()?;
        let is_written = |(write, found): (&Write, &Option<Record>)| write.value == found.clone().map(|r| r.value);
        if writes.iter().zip(&written).all(is_written) {
            return Ok(Some(Commit::Done(written.iter().map(version).collect())));
        }
        let is_as_expected = compares.iter().zip(&found).all(|(compare, found)| version(found) == compare.version);
        Ok((!is_as_expected).then_some(Commit::Conflict(found)))
    }
}

impl MetaStore for Patient {
    fn get(&self, key: &str) -> Result<Option<Record>, MetaError> {
        outwait(|_| self.0.get(key))
    }

    fn list(&self, prefix: &str) -> Result<Listing, MetaError> {
        outwait(|_| self.0.list(prefix))
    }

    fn swap(
        &self,
        key: &str,
        expect: MetaVersion,
        value: Option<&[u8]>,
        lease: Option<LeaseId>,
    ) -> Result<Swap, MetaError> {
        outwait(|again| {
            if again && let Some(swap) = outcome(self.0.get(key)?, expect, value) {
                return Ok(swap);
            }
            match self.0.swap(key, expect, value, lease)? {
                // The one before may have won since it was looked for.
                Swap::Conflict(found) if again => {
                    Ok(outcome(found.clone(), expect, value).unwrap_or(Swap::Conflict(found)))
                }
                known => Ok(known),
            }
        })
    }

    fn commit(&self, compares: &[Compare], writes: &[Write]) -> Result<Commit, MetaError> {
        outwait(|again| {
            if again && let Some(commit) = self.outcome_of(compares, writes)? {
                return Ok(commit);
            }
            match self.0.commit(compares, writes)? {
                Commit::Conflict(found) if again => {
                    Ok(self.outcome_of(compares, writes)?.unwrap_or(Commit::Conflict(found)))
                }
                known => Ok(known),
            }
        })
    }

    fn grant(&self, ttl: Duration) -> Result<LeaseId, MetaError> {
        outwait(|_| self.0.grant(ttl))
    }

    fn keep_alive(&self, lease: LeaseId) -> Result<(), MetaError> {
        outwait(|_| self.0.keep_alive(lease))
    }

    fn revoke(&self, lease: LeaseId) -> Result<(), MetaError> {
        outwait(|again| match self.0.revoke(lease) {
            Err(MetaError::LeaseGone) if again => Ok(()),
            revoked => revoked,
        })
    }

    fn watch(&self, prefix: &str, from: Revision) -> Result<Box<dyn Watch>, MetaError> {
        outwait(|_| self.0.watch(prefix, from))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{self as suite, Subject};
    use super::*;
    use crate::clock;
    use crate::meta::LocalStore;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// Of every few calls it does not know the outcome; they have happened or not.
    struct Forgetful(LocalStore, AtomicU64);

    impl Forgetful {
        fn through<T>(&self, call: impl FnOnce() -> Result<T, MetaError>) -> Result<T, MetaError> {
            let unknown = || MetaError::Unknown { why: "forgotten".to_string() };
            // Scattered: a pattern could always meet the same one of the calls that are made in turn.
            let scattered = self.1.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
            match scattered % 5 {
                1 => Err(unknown()),
                3 => call().and_then(|_| Err(unknown())),
                _ => call(),
            }
        }
    }

    impl MetaStore for Forgetful {
        fn get(&self, key: &str) -> Result<Option<Record>, MetaError> {
            self.through(|| self.0.get(key))
        }

        fn list(&self, prefix: &str) -> Result<Listing, MetaError> {
            self.through(|| self.0.list(prefix))
        }

        fn swap(
            &self,
            key: &str,
            expect: MetaVersion,
            value: Option<&[u8]>,
            lease: Option<LeaseId>,
        ) -> Result<Swap, MetaError> {
            self.through(|| self.0.swap(key, expect, value, lease))
        }

        fn commit(&self, compares: &[Compare], writes: &[Write]) -> Result<Commit, MetaError> {
            self.through(|| self.0.commit(compares, writes))
        }

        fn grant(&self, ttl: Duration) -> Result<LeaseId, MetaError> {
            self.through(|| self.0.grant(ttl))
        }

        fn keep_alive(&self, lease: LeaseId) -> Result<(), MetaError> {
            self.through(|| self.0.keep_alive(lease))
        }

        fn revoke(&self, lease: LeaseId) -> Result<(), MetaError> {
            self.through(|| self.0.revoke(lease))
        }

        fn watch(&self, prefix: &str, from: Revision) -> Result<Box<dyn Watch>, MetaError> {
            self.through(|| self.0.watch(prefix, from))
        }
    }

    struct Shared(Arc<Forgetful>);

    impl Subject for Shared {
        fn open(&self) -> Arc<dyn MetaStore> {
            Arc::clone(&self.0) as Arc<dyn MetaStore>
        }

        fn advance(&self, _span: Duration) {}
    }

    #[test]
    fn records_are_judged_although_outcomes_are_unknown() {
        let store = LocalStore::in_memory(Arc::new(clock::now));
        let subject = Shared(Arc::new(Forgetful(store, AtomicU64::new(0))));
        suite::records_live_and_die(&subject);
        suite::versions_rise_for_ever(&subject);
        suite::lists_are_sorted_and_bounded_by_their_prefix(&subject);
        suite::a_swap_is_won_once(&subject);
        suite::transactions_happen_whole_or_not_at_all(&subject);
        suite::a_transaction_is_won_once(&subject);
        assert!(subject.0.1.load(Ordering::Relaxed) > 20, "calls were made");
    }
}
