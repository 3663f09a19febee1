//! A metadata store of which a grid's hosts are clients: transactions, leases, a history for watches; and what may come in its place.

use holdfast_base::{Instant, MetaVersion};
use holdfast_cluster::view::{Change, Record};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// There in every store of the grid.
pub const MARK: &str = "grid";

/// What a client asks for.
#[derive(Clone, Debug)]
pub enum Op {
    Get(String),
    List,
    /// With the lease that what is written hangs on.
    Commit(Compares, Writes, Option<u64>),
    Grant,
    KeepAlive(u64),
}

pub type Compares = Vec<(String, MetaVersion)>;
pub type Writes = Vec<(String, Option<Vec<u8>>)>;

#[derive(Clone, Debug)]
pub enum Answer {
    Record(Option<Record>),
    Listing(u64, Vec<Record>, Which),
    /// The version that the records have that were written.
    Done(MetaVersion),
    /// What is there of the records that were compared.
    Conflict(Vec<Option<Record>>),
    Granted(u64),
    Alive,
    LeaseGone,
    /// None came in time.
    Unknown,
}

/// Which store it is: hosts may believe the right one only.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Which {
    Right,
    Emptied,
    Older,
}

#[derive(Clone, Debug)]
struct Stored {
    version: MetaVersion,
    value: Arc<[u8]>,
    lease: Option<u64>,
}

/// One store, with all that is in it.
#[derive(Clone, Debug)]
pub struct Store {
    pub which: Which,
    pub revision: u64,
    records: BTreeMap<String, Stored>,
    history: Vec<Change>,
    /// Changes up to here are kept no more.
    pub compacted: u64,
    leases: BTreeMap<u64, Instant>,
}

impl Store {
    pub fn new(which: Which, revision: u64) -> Store {
        let (records, leases) = (BTreeMap::new(), BTreeMap::new());
        Store { which, revision, records, history: Vec::new(), compacted: revision, leases }
    }

    pub fn get(&self, key: &str) -> Option<Record> {
        let stored = self.records.get(key)?;
        Some(Record { key: key.to_string(), version: stored.version, value: stored.value.clone() })
    }

    fn version(&self, key: &str) -> MetaVersion {
        self.records.get(key).map_or(MetaVersion::ABSENT, |stored| stored.version)
    }

    pub fn has(&self, key: &str) -> bool {
        self.records.contains_key(key)
    }

    pub fn list(&self) -> Vec<Record> {
        self.records.keys().filter_map(|key| self.get(key)).collect()
    }

    pub fn commit(&mut self, compares: &Compares, writes: &Writes, lease: Option<u64>) -> Answer {
        if lease.is_some_and(|lease| !self.leases.contains_key(&lease)) {
            return Answer::LeaseGone;
        }
        if compares.iter().any(|(key, version)| self.version(key) != *version) {
            return Answer::Conflict(compares.iter().map(|(key, _)| self.get(key)).collect());
        }
        self.revision += 1;
        for (key, value) in writes {
            self.write(key, value.as_deref(), lease);
        }
        Answer::Done(MetaVersion(self.revision))
    }

    /// As a part of the newest revision.
    fn write(&mut self, key: &str, value: Option<&[u8]>, lease: Option<u64>) {
        let version = MetaVersion(self.revision);
        let was_there = match value {
            Some(value) => {
                self.records.insert(key.to_string(), Stored { version, value: value.into(), lease });
                true
            }
            None => self.records.remove(key).is_some(),
        };
        if was_there {
            self.history.push(Change { revision: self.revision, key: key.to_string(), record: self.get(key) });
        }
    }

    pub fn grant(&mut self, lease: u64, until: Instant) {
        self.leases.insert(lease, until);
    }

    pub fn keep_alive(&mut self, lease: u64, until: Instant) -> Answer {
        match self.leases.get_mut(&lease) {
            Some(end) => {
                *end = until;
                Answer::Alive
            }
            None => Answer::LeaseGone,
        }
    }

    /// Leases whose time is over take their records with them; whether there were such records.
    pub fn expire(&mut self, now: Instant) -> bool {
        let over: BTreeSet<u64> = self.leases.extract_if(.., |_, end| *end <= now).map(|(lease, _)| lease).collect();
        if over.is_empty() {
            return false;
        }
        let hangs_on = |stored: &Stored| stored.lease.is_some_and(|lease| over.contains(&lease));
        let keys: Vec<String> = self.records.iter().filter(|(_, s)| hangs_on(s)).map(|(key, _)| key.clone()).collect();
        for key in &keys {
            self.revision += 1;
            self.write(key, None, None);
        }
        !keys.is_empty()
    }

    /// A new leader gives every lease its whole time again.
    pub fn extend_leases(&mut self, now: Instant, ttl: Duration) {
        self.leases.values_mut().for_each(|end| *end = now + ttl);
    }

    pub fn end_leases(&mut self, now: Instant) {
        self.leases.values_mut().for_each(|end| *end = now);
    }

    pub fn next_expiry(&self) -> Option<Instant> {
        self.leases.values().copied().min()
    }

    /// Changes after one revision up to another, or that they are kept no more.
    pub fn changes(&self, after: u64, upto: u64) -> Option<Vec<Change>> {
        if after < self.compacted {
            return None;
        }
        let from = self.history.partition_point(|change| change.revision <= after);
        let until = self.history.partition_point(|change| change.revision <= upto);
        Some(self.history[from..until.max(from)].to_vec())
    }

    pub fn compact(&mut self) {
        self.compacted = self.revision;
        self.history.clear();
    }
}
