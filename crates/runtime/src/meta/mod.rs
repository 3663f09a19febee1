//! The metadata store: small records with compare-and-swap, leases and watches.
//!
//! Role: called from control-plane threads, since every call may wait for a disk or a network; reactors ask through
//! [`MetaService`]. [`LocalStore`] is the embedded implementation (one file, one process) and, without a file, the one
//! for tests; [`EtcdStore`] is a cluster that all hosts of a grid share. Whatever implements [`MetaStore`] passes [`conformance::run`].
//!
//! Invariants
//! 1. A store has one revision, raised by every change; a record's version is the revision of its last change, so
//!    versions rise for ever, also over deletion and re-creation.
//! 2. A swap that returned `Done` is durable. A swap that returned an error may have happened or not.
//! 3. A watch yields every change under its prefix from its revision on, in order of revision, or fails as compacted.
//! 4. A lease that expired takes its records with it; it never expires before its time to live has passed since the
//!    last keep-alive that returned. Leases only permit take-over: nothing may depend on prompt expiry.

pub mod conformance;
mod embedded;
mod etcd;
mod local;
pub mod member;
mod service;
mod state;

pub use embedded::OpenError;
pub use etcd::{EtcdConfig, EtcdError, EtcdMember, EtcdStore, EtcdTls, Right};
pub use local::{Clock, LocalStore};
pub use service::{MetaService, MetaTicket};

use holdfast_base::MetaVersion;
use std::collections::BTreeSet;
use std::time::Duration;
use thiserror::Error;

/// Longest key: etcd has no limit worth the name, file systems and people have.
pub const KEY_BYTES_MAX: usize = 1024;

/// Longest value: etcd refuses requests above 1.5 MiB.
pub const VALUE_BYTES_MAX: usize = 1 << 20;

/// Records that one transaction compares, and records that it writes: what etcd takes by default is 128 of both.
pub const COMMIT_KEYS_MAX: usize = 64;

/// A moment in the life of a store: the number of its changes so far.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Revision(pub u64);

impl Revision {
    /// Where a watch continues that has seen everything up to this one.
    #[must_use]
    pub fn next(self) -> Revision {
        Revision(self.0 + 1)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LeaseId(pub u64);

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Record {
    pub key: String,
    pub version: MetaVersion,
    pub value: Vec<u8>,
    pub lease: Option<LeaseId>,
}

/// Records under a prefix, in key order, as of one revision.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Listing {
    pub revision: Revision,
    pub records: Vec<Record>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Swap {
    /// The record has this version now: `ABSENT` where it was deleted.
    Done(MetaVersion),
    /// It had another version than expected; this is the record.
    Conflict(Option<Record>),
}

/// What a record must be for a transaction to happen: at this version, or absent.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Compare {
    pub key: String,
    pub version: MetaVersion,
}

/// One record that a transaction sets, or deletes where there is no value.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Write {
    pub key: String,
    pub value: Option<Vec<u8>>,
    pub lease: Option<LeaseId>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Commit {
    /// All writes happened, and these are the records' versions, in the order of the writes: `ABSENT` where one was deleted.
    Done(Vec<MetaVersion>),
    /// Nothing happened. What is there of the records that were compared, in their order.
    Conflict(Vec<Option<Record>>),
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Change {
    Put(Record),
    Deleted,
}

/// One change of one record.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WatchEvent {
    pub revision: Revision,
    pub key: String,
    pub change: Change,
}

#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum MetaError {
    /// The store did not answer, or not conclusively: a change may have happened, now or later.
    #[error("the metadata store did not answer: {why}; check that it runs and can be reached")]
    Unknown { why: String },
    /// The store knows why it can't write. A change that was under way may have happened; those after it have not.
    #[error("{why}")]
    Unwritable { why: String },
    /// The store knows who asks, and has done nothing.
    #[error(
        "the metadata store refuses this to whom this machine's certificate names: in an etcd that goes by the grid's \
         certificates \
         it was revoked, or the machine was taken out of the grid (`holdfast machine list` on another one shows which \
         there \
         are). One that is to stay is given others: `holdfast grid token --for MACHINE` where the grid's authority \
         is, and here `holdfast grid tls rotate --token TOKEN`"
    )]
    Refused,
    #[error("the lease has expired or was revoked; take a new one")]
    LeaseGone,
    #[error("the changes from revision {} on are no longer kept (the oldest is {}); list again", .wanted.0, .oldest.0)]
    Compacted { wanted: Revision, oldest: Revision },
    #[error(
        "keys have 1 to {KEY_BYTES_MAX} bytes and values at most {VALUE_BYTES_MAX}, a transaction as much in all, for at most \
         {COMMIT_KEYS_MAX} records; use smaller ones"
    )]
    TooLarge,
}

/// Whether a record may be as large.
fn check_size(key: &str, value: Option<&[u8]>) -> Result<(), MetaError> {
    let fits = (1..=KEY_BYTES_MAX).contains(&key.len()) && value.is_none_or(|v| v.len() <= VALUE_BYTES_MAX);
    if fits { Ok(()) } else { Err(MetaError::TooLarge) }
}

/// Whether a transaction may be as large, and names each record at most once on either side.
fn check_commit(compares: &[Compare], writes: &[Write]) -> Result<(), MetaError> {
    let is_each_once = |keys: Vec<&String>| keys.iter().collect::<BTreeSet<_>>().len() == keys.len();
    let is_bounded = compares.len() <= COMMIT_KEYS_MAX && writes.len() <= COMMIT_KEYS_MAX;
    let bytes: usize = writes.iter().map(|write| write.key.len() + write.value.as_ref().map_or(0, Vec::len)).sum();
    let is_plain = is_each_once(compares.iter().map(|c| &c.key).collect())
        && is_each_once(writes.iter().map(|w| &w.key).collect());
    if !is_bounded || !is_plain || bytes > VALUE_BYTES_MAX {
        return Err(MetaError::TooLarge);
    }
    compares.iter().try_for_each(|compare| check_size(&compare.key, None))?;
    writes.iter().try_for_each(|write| check_size(&write.key, write.value.as_deref()))
}

/// A metadata store. Every call may block; none may be made on a reactor's thread.
pub trait MetaStore: Send + Sync {
    fn get(&self, key: &str) -> Result<Option<Record>, MetaError>;

    /// All records whose keys start with `prefix`.
    fn list(&self, prefix: &str) -> Result<Listing, MetaError>;

    /// Sets the record (or deletes it, with `value: None`) if its version is still `expect`. The record is attached to
    /// `lease` from then on, or to none. Deleting what is absent (`expect` being `ABSENT`) changes nothing.
    fn swap(
        &self,
        key: &str,
        expect: MetaVersion,
        value: Option<&[u8]>,
        lease: Option<LeaseId>,
    ) -> Result<Swap, MetaError>;

    /// Writes all of these records if each of those is what it is compared with, else nothing; at most [`COMMIT_KEYS_MAX`] of
    /// each and [`VALUE_BYTES_MAX`] in all. Whoever watches sees all of it or nothing.
    fn commit(&self, compares: &[Compare], writes: &[Write]) -> Result<Commit, MetaError>;

    /// A lease that expires `ttl` after the last keep-alive.
    fn grant(&self, ttl: Duration) -> Result<LeaseId, MetaError>;

    fn keep_alive(&self, lease: LeaseId) -> Result<(), MetaError>;

    /// Ends the lease and deletes its records.
    fn revoke(&self, lease: LeaseId) -> Result<(), MetaError>;

    /// The store's revision by now.
    fn revision(&self) -> Result<Revision, MetaError> {
        // Under no key of anybody's: only the answer's head counts.
        Ok(self.list("\u{1}revision")?.revision)
    }

    /// Why no change can be made now, where the store knows by itself: reads are served meanwhile, and it goes on by itself
    /// when what is said is put right.
    fn trouble(&self) -> Option<MetaError> {
        None
    }

    /// Changes under `prefix` from revision `from` on, those that happened already included.
    fn watch(&self, prefix: &str, from: Revision) -> Result<Box<dyn Watch>, MetaError>;
}

pub trait Watch: Send {
    /// The next changes, at least one, waiting at most `timeout` for them: none came where the answer is empty. After
    /// an error the watch is over.
    fn next(&mut self, timeout: Duration) -> Result<Vec<WatchEvent>, MetaError>;
}
