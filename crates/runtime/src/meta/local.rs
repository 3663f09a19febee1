//! A metadata store within this process: in memory, or with a file below it.
//!
//! Limits: everything is held in memory (a grid has some kilobytes a volume); the latest [`HISTORY_MAX`] changes are
//! kept for watches.

use super::embedded::{File, OpenError};
use super::state::{State, Step};
use super::{
    Commit, Compare, LeaseId, Listing, MetaError, MetaStore, Record, Revision, Swap, Watch, WatchEvent, Write,
    check_commit, check_size,
};
use holdfast_base::{Instant, MetaVersion};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Changes kept for watches: hours of a busy grid, and some megabytes.
const HISTORY_MAX: usize = 10_000;

/// Where a store reads the time from: monotonic, and not across restarts (leases live anew after one).
pub type Clock = Arc<dyn Fn() -> Instant + Send + Sync>;

/// A handle on one store; clones share it.
#[derive(Clone)]
pub struct LocalStore(Arc<Shared>);

struct Shared {
    inner: Mutex<Inner>,
    changed: Condvar,
    clock: Clock,
}

struct Inner {
    state: State,
    file: Option<File>,
    /// Set by a commit that failed: what the file holds is open until it is read again.
    failure: Option<String>,
}

impl LocalStore {
    /// A store that is gone with its last handle.
    pub fn in_memory(clock: Clock) -> LocalStore {
        Self::with_history(State::new(HISTORY_MAX), None, clock)
    }

    /// Opens the store in the file `path`, or makes it. One process has it open at a time.
    pub fn open(path: &Path, clock: Clock) -> Result<LocalStore, OpenError> {
        Self::open_with_history(path, clock, HISTORY_MAX)
    }

    /// As [`LocalStore::open`], keeping another number of changes for watches.
    pub fn open_with_history(path: &Path, clock: Clock, history_max: usize) -> Result<LocalStore, OpenError> {
        let (file, state) = File::open(path, clock(), history_max)?;
        Ok(Self::with_history(state, Some(file), clock))
    }

    fn with_history(state: State, file: Option<File>, clock: Clock) -> LocalStore {
        let inner = Mutex::new(Inner { state, file, failure: None });
        LocalStore(Arc::new(Shared { inner, changed: Condvar::new(), clock }))
    }
}

impl Shared {
    /// The state, with every lease that is over ended.
    fn lock(&self) -> Result<MutexGuard<'_, Inner>, MetaError> {
        // A panic while the lock is held is a failed assertion about the state: whoever comes next fails, too.
        let mut inner = self.inner.lock().map_err(|_| unknown("an earlier operation failed an assertion"))?;
        self.expire(&mut inner)?;
        Ok(inner)
    }

    fn expire(&self, inner: &mut Inner) -> Result<(), MetaError> {
        if let Some(why) = &inner.failure {
            return Err(unknown(why));
        }
        let now = (self.clock)();
        while let Some(lease) = inner.state.expired(now) {
            let steps = inner.state.end_lease(lease)?;
            self.commit(inner, steps)?;
        }
        Ok(())
    }

    fn commit(&self, inner: &mut Inner, steps: Vec<Step>) -> Result<(), MetaError> {
        if let Some(file) = &inner.file
            && let Err(e) = file.commit(&steps)
        {
            let why = format!("its file could not be written ({e})");
            inner.failure = Some(why.clone());
            return Err(unknown(&why));
        }
        // Read after the commit: a lease lives its full time from when it is granted, not from when that began.
        let now = (self.clock)();
        for step in steps {
            inner.state.apply(now, step);
        }
        self.changed.notify_all();
        Ok(())
    }
}

fn unknown(why: &str) -> MetaError {
    MetaError::Unknown { why: why.into() }
}

impl MetaStore for LocalStore {
    fn get(&self, key: &str) -> Result<Option<Record>, MetaError> {
        Ok(self.0.lock()?.state.get(key).cloned())
    }

    fn list(&self, prefix: &str) -> Result<Listing, MetaError> {
        let inner = self.0.lock()?;
        Ok(Listing { revision: inner.state.revision, records: inner.state.list(prefix) })
    }

    fn revision(&self) -> Result<Revision, MetaError> {
        Ok(self.0.lock()?.state.revision)
    }

    fn swap(
        &self,
        key: &str,
        expect: MetaVersion,
        value: Option<&[u8]>,
        lease: Option<LeaseId>,
    ) -> Result<Swap, MetaError> {
        check_size(key, value)?;
        let mut inner = self.0.lock()?;
        let (answer, step) = inner.state.swap(key, expect, value, lease)?;
        if let Some(step) = step {
            self.0.commit(&mut inner, vec![step])?;
        }
        Ok(answer)
    }

    fn commit(&self, compares: &[Compare], writes: &[Write]) -> Result<Commit, MetaError> {
        check_commit(compares, writes)?;
        let mut inner = self.0.lock()?;
        let (answer, steps) = inner.state.commit(compares, writes)?;
        if !steps.is_empty() {
            self.0.commit(&mut inner, steps)?;
        }
        Ok(answer)
    }

    fn grant(&self, ttl: Duration) -> Result<LeaseId, MetaError> {
        let mut inner = self.0.lock()?;
        let (lease, step) = inner.state.grant(ttl);
        self.0.commit(&mut inner, vec![step])?;
        Ok(lease)
    }

    fn keep_alive(&self, lease: LeaseId) -> Result<(), MetaError> {
        let mut inner = self.0.lock()?;
        inner.state.keep_alive((self.0.clock)(), lease)
    }

    fn revoke(&self, lease: LeaseId) -> Result<(), MetaError> {
        let mut inner = self.0.lock()?;
        let steps = inner.state.end_lease(lease)?;
        self.0.commit(&mut inner, steps)
    }

    fn watch(&self, prefix: &str, from: Revision) -> Result<Box<dyn Watch>, MetaError> {
        self.0.lock()?.state.changes(prefix, from)?;
        Ok(Box::new(LocalWatch { shared: Arc::clone(&self.0), prefix: prefix.into(), from }))
    }
}

struct LocalWatch {
    shared: Arc<Shared>,
    prefix: String,
    from: Revision,
}

impl Watch for LocalWatch {
    fn next(&mut self, timeout: Duration) -> Result<Vec<WatchEvent>, MetaError> {
        let shared = Arc::clone(&self.shared);
        let end = crate::clock::now() + timeout;
        let mut inner = shared.lock()?;
        loop {
            let events = inner.state.changes(&self.prefix, self.from)?;
            // Also past changes under other prefixes, or an idle watch would be compacted.
            self.from = self.from.max(inner.state.revision.next());
            let left = end.since(crate::clock::now());
            if !events.is_empty() || left == Duration::ZERO {
                return Ok(events);
            }
            // Nobody else may be there to notice that a lease is over.
            let expiry = inner.state.next_expiry().map(|at| at.since((shared.clock)()).max(Duration::from_millis(1)));
            let wait = expiry.map_or(left, |e| e.min(left));
            inner = shared.changed.wait_timeout(inner, wait).unwrap_or_else(PoisonError::into_inner).0;
            shared.expire(&mut inner)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::conformance::{self, Subject};
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    struct Hands(Arc<AtomicU64>);

    impl Hands {
        fn new() -> Hands {
            Hands(Arc::new(AtomicU64::new(1_000_000_000)))
        }

        fn clock(&self) -> Clock {
            let hands = Arc::clone(&self.0);
            Arc::new(move || Instant(hands.load(Ordering::SeqCst)))
        }

        fn advance(&self, span: Duration) {
            self.0.fetch_add(span.as_nanos() as u64, Ordering::SeqCst);
        }
    }

    struct InMemory(Hands, LocalStore);

    impl Subject for InMemory {
        fn open(&self) -> Arc<dyn MetaStore> {
            Arc::new(self.1.clone())
        }

        fn advance(&self, span: Duration) {
            self.0.advance(span);
        }
    }

    struct OnDisk(Hands, tempfile::TempDir);

    impl Subject for OnDisk {
        fn open(&self) -> Arc<dyn MetaStore> {
            Arc::new(LocalStore::open_with_history(&self.1.path().join("meta"), self.0.clock(), 40).unwrap())
        }

        fn advance(&self, span: Duration) {
            self.0.advance(span);
        }

        fn forget_history(&self, store: &dyn MetaStore) -> bool {
            let mut version = MetaVersion::ABSENT;
            for n in 0..50_u8 {
                let Swap::Done(now) = store.swap("conformance/filler", version, Some(&[n]), None).unwrap() else {
                    panic!("nobody else writes here")
                };
                version = now;
            }
            true
        }
    }

    #[test]
    fn the_store_in_memory_conforms() {
        let hands = Hands::new();
        let store = LocalStore::in_memory(hands.clock());
        conformance::run(&InMemory(hands, store));
    }

    #[test]
    fn the_store_on_disk_conforms() {
        conformance::run(&OnDisk(Hands::new(), tempfile::tempdir().unwrap()));
    }

    #[test]
    fn a_second_open_is_refused_with_reason_and_advice() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("meta");
        let hands = Hands::new();
        let first = LocalStore::open(&path, hands.clock()).unwrap();
        let Err(error) = LocalStore::open(&path, hands.clock()) else { panic!("opened twice") };
        assert!(matches!(error, OpenError::InUse { .. }), "{error}");
        assert!(error.to_string().contains("another process has it open; stop"), "{error}");
        drop(first);
        LocalStore::open(&path, hands.clock()).unwrap();
    }

    #[test]
    fn a_file_that_is_none_of_ours_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("meta");
        let bytes = vec![0x5a; 100_000];
        std::fs::write(&path, &bytes).unwrap();
        assert!(LocalStore::open(&path, Hands::new().clock()).is_err());
        assert!(std::fs::read(&path).unwrap() == bytes);
        assert!(matches!(
            LocalStore::open(&dir.path().join("no/such"), Hands::new().clock()),
            Err(OpenError::Io { .. })
        ));
    }

    #[test]
    fn leases_live_their_full_time_again_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let subject = OnDisk(Hands::new(), dir);
        let ttl = Duration::from_secs(10);
        let store = subject.open();
        let lease = store.grant(ttl).unwrap();
        store.swap("a", MetaVersion::ABSENT, Some(b"1"), Some(lease)).unwrap();
        subject.advance(ttl - Duration::from_secs(1));
        drop(store);
        let store = subject.open();
        subject.advance(ttl - Duration::from_secs(1));
        assert_eq!(store.get("a").unwrap().unwrap().lease, Some(lease));
        subject.advance(Duration::from_secs(2));
        assert_eq!(store.get("a").unwrap(), None);
    }
}
