//! The decisions of a local store, without I/O: what a request changes, and how the state follows a change.
//!
//! Deciding ([`State::swap`] …) and applying ([`State::apply`]) are apart, so that a change can be made durable in
//! between. Replaying is applying what was stored.

use super::{Change, Commit, Compare, LeaseId, MetaError, Record, Revision, Swap, WatchEvent, Write};
use holdfast_base::time::earliest;
use holdfast_base::{Instant, MetaVersion};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;
use std::time::Duration;

/// A step from one state to the next.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Step {
    Changed(WatchEvent),
    Granted(LeaseId, Duration),
    Ended(LeaseId),
}

struct Lease {
    ttl: Duration,
    expires_at: Instant,
}

pub(super) struct State {
    pub revision: Revision,
    /// Number of the last lease granted; none is granted twice.
    pub last_lease: u64,
    records: BTreeMap<String, Record>,
    leases: BTreeMap<LeaseId, Lease>,
    /// The latest changes, oldest first.
    history: VecDeque<WatchEvent>,
    history_max: usize,
    /// No lease expires before this.
    next_expiry: Option<Instant>,
}

impl State {
    pub(super) fn new(history_max: usize) -> State {
        State {
            revision: Revision(0),
            last_lease: 0,
            records: BTreeMap::new(),
            leases: BTreeMap::new(),
            history: VecDeque::new(),
            history_max,
            next_expiry: None,
        }
    }

    /// Puts back what was stored: records and leases, which live their full time again.
    pub(super) fn restore(&mut self, now: Instant, records: Vec<Record>, leases: Vec<(LeaseId, Duration)>) {
        self.records = records.into_iter().map(|r| (r.key.clone(), r)).collect();
        for (lease, ttl) in leases {
            self.start_lease(now, lease, ttl);
        }
    }

    pub(super) fn restore_history(&mut self, history: Vec<WatchEvent>) {
        self.history = history.into();
    }

    pub(super) fn get(&self, key: &str) -> Option<&Record> {
        self.records.get(key)
    }

    pub(super) fn list(&self, prefix: &str) -> Vec<Record> {
        let from = self.records.range::<str, _>((Bound::Included(prefix), Bound::Unbounded));
        from.take_while(|(key, _)| key.starts_with(prefix)).map(|(_, r)| r.clone()).collect()
    }

    /// What a swap answers, and the step it takes.
    pub(super) fn swap(
        &self,
        key: &str,
        expect: MetaVersion,
        value: Option<&[u8]>,
        lease: Option<LeaseId>,
    ) -> Result<(Swap, Option<Step>), MetaError> {
        let found = self.records.get(key);
        if found.map_or(MetaVersion::ABSENT, |r| r.version) != expect {
            return Ok((Swap::Conflict(found.cloned()), None));
        }
        if value.is_some() && lease.is_some_and(|l| !self.leases.contains_key(&l)) {
            return Err(MetaError::LeaseGone);
        }
        if value.is_none() && found.is_none() {
            return Ok((Swap::Done(MetaVersion::ABSENT), None));
        }
        let revision = self.revision.next();
        let version = value.map_or(MetaVersion::ABSENT, |_| MetaVersion(revision.0));
        let change = value.map_or(Change::Deleted, |value| {
            Change::Put(Record { key: key.into(), version, value: value.into(), lease })
        });
        Ok((Swap::Done(version), Some(Step::Changed(WatchEvent { revision, key: key.into(), change }))))
    }

    /// What a transaction answers, and the steps that it takes.
    pub(super) fn commit(&self, compares: &[Compare], writes: &[Write]) -> Result<(Commit, Vec<Step>), MetaError> {
        let version = |key: &str| self.records.get(key).map_or(MetaVersion::ABSENT, |r| r.version);
        if compares.iter().any(|compare| version(&compare.key) != compare.version) {
            let found = compares.iter().map(|compare| self.records.get(&compare.key).cloned());
            return Ok((Commit::Conflict(found.collect()), Vec::new()));
        }
        let (mut revision, mut versions, mut steps) = (self.revision, Vec::new(), Vec::new());
        for Write { key, value, lease } in writes {
            if value.is_some() && lease.is_some_and(|l| !self.leases.contains_key(&l)) {
                return Err(MetaError::LeaseGone);
            }
            if value.is_none() && !self.records.contains_key(key) {
                versions.push(MetaVersion::ABSENT);
                continue;
            }
            revision = revision.next();
            let version = value.as_ref().map_or(MetaVersion::ABSENT, |_| MetaVersion(revision.0));
            let change = match value {
                Some(value) => Change::Put(Record { key: key.clone(), version, value: value.clone(), lease: *lease }),
                None => Change::Deleted,
            };
            versions.push(version);
            steps.push(Step::Changed(WatchEvent { revision, key: key.clone(), change }));
        }
        Ok((Commit::Done(versions), steps))
    }

    pub(super) fn grant(&self, ttl: Duration) -> (LeaseId, Step) {
        let lease = LeaseId(self.last_lease + 1);
        (lease, Step::Granted(lease, ttl))
    }

    /// Keeping a lease alive changes nothing durable: after a restart it lives its full time anyway.
    pub(super) fn keep_alive(&mut self, now: Instant, lease: LeaseId) -> Result<(), MetaError> {
        let lease = self.leases.get_mut(&lease).ok_or(MetaError::LeaseGone)?;
        lease.expires_at = now + lease.ttl;
        Ok(())
    }

    /// The steps that end `lease`, its records first.
    pub(super) fn end_lease(&self, lease: LeaseId) -> Result<Vec<Step>, MetaError> {
        if !self.leases.contains_key(&lease) {
            return Err(MetaError::LeaseGone);
        }
        let mut revision = self.revision;
        let attached = self.records.values().filter(|r| r.lease == Some(lease));
        let mut steps: Vec<Step> = attached
            .map(|record| {
                revision = revision.next();
                Step::Changed(WatchEvent { revision, key: record.key.clone(), change: Change::Deleted })
            })
            .collect();
        steps.push(Step::Ended(lease));
        Ok(steps)
    }

    /// A lease whose time is over, if there is one.
    pub(super) fn expired(&mut self, now: Instant) -> Option<LeaseId> {
        if self.next_expiry.is_none_or(|at| now < at) {
            return None;
        }
        let found = self.leases.iter().find(|(_, l)| l.expires_at <= now).map(|(id, _)| *id);
        if found.is_none() {
            self.next_expiry = self.leases.values().map(|l| l.expires_at).min();
        }
        found
    }

    pub(super) fn next_expiry(&self) -> Option<Instant> {
        self.next_expiry
    }

    pub(super) fn apply(&mut self, now: Instant, step: Step) {
        match step {
            Step::Changed(event) => {
                assert!(event.revision == self.revision.next(), "a change out of order");
                self.revision = event.revision;
                match &event.change {
                    Change::Put(record) => self.records.insert(event.key.clone(), record.clone()),
                    Change::Deleted => self.records.remove(&event.key),
                };
                self.history.push_back(event);
                if self.history.len() > self.history_max {
                    self.history.pop_front();
                }
            }
            Step::Granted(lease, ttl) => {
                self.last_lease = lease.0;
                self.start_lease(now, lease, ttl);
            }
            Step::Ended(lease) => {
                self.leases.remove(&lease);
            }
        }
    }

    fn start_lease(&mut self, now: Instant, lease: LeaseId, ttl: Duration) {
        let expires_at = now + ttl;
        self.leases.insert(lease, Lease { ttl, expires_at });
        self.next_expiry = earliest(self.next_expiry, Some(expires_at));
    }

    /// The oldest revision from which a watch can start.
    pub(super) fn oldest(&self) -> Revision {
        self.history.front().map_or(self.revision.next(), |e| e.revision)
    }

    /// Changes under `prefix` from `from` on.
    pub(super) fn changes(&self, prefix: &str, from: Revision) -> Result<Vec<WatchEvent>, MetaError> {
        let oldest = self.oldest();
        if from < oldest {
            return Err(MetaError::Compacted { wanted: from, oldest });
        }
        let skipped = (from.0 - oldest.0) as usize;
        Ok(self.history.iter().skip(skipped).filter(|e| e.key.starts_with(prefix)).cloned().collect())
    }
}
