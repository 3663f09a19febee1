//! A metadata store within this process: in memory, or with a file below it.
//!
//! Limits: everything is held in memory (a grid has some kilobytes a volume); the latest [`HISTORY_MAX`] changes are
//! kept for watches.
//!
//! Faults: where a change could not be written, its outcome is open. The file is opened again at once, and what it holds is
//! the state from then on; where it can't be opened either, what was known before is read on, the outcome staying open, and
//! changes are refused until it can. Leases don't end meanwhile, and live their full time anew behind it.

use super::embedded::{File, OpenError};
use super::state::{State, Step};
use super::{
    Commit, Compare, LeaseId, Listing, MetaError, MetaStore, Record, Revision, Swap, Watch, WatchEvent, Write,
    check_commit, check_size,
};
use holdfast_base::{Instant, MetaVersion};
use redb::Error;
use std::io;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Changes kept for watches: hours of a busy grid, and some megabytes.
const HISTORY_MAX: usize = 10_000;

/// A file system that was full has room again from so many bytes on: for some commits, whatever they hold.
const ROOM_BYTES_MIN: u64 = 1 << 20;

/// Between two attempts to write where nobody asks for a change.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

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
    /// Set by a commit that failed, until one succeeds and there is room for others.
    failure: Option<Failure>,
}

struct Failure {
    why: String,
    /// The file is closed, and the state is what it held for sure.
    is_closed: bool,
    retry_at: Instant,
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

    /// As [`LocalStore::open_with_history`], of what a test puts in the place of a file.
    #[cfg(test)]
    fn open_with(opener: super::embedded::Opener, clock: Clock, history_max: usize) -> Result<LocalStore, OpenError> {
        let (file, state) = File::open_with(opener, clock(), history_max)?;
        Ok(Self::with_history(state, Some(file), clock))
    }

    fn with_history(state: State, file: Option<File>, clock: Clock) -> LocalStore {
        let inner = Mutex::new(Inner { state, file, failure: None });
        LocalStore(Arc::new(Shared { inner, changed: Condvar::new(), clock }))
    }
}

impl Shared {
    /// The state, with every lease that is over ended, as far as that can be written.
    fn lock(&self) -> Result<MutexGuard<'_, Inner>, MetaError> {
        // A panic while the lock is held is a failed assertion about the state: whoever comes next fails, too.
        let mut inner = self.inner.lock().map_err(|_| unknown("an earlier operation failed an assertion"))?;
        self.expire(&mut inner);
        Ok(inner)
    }

    /// As [`Self::lock`], for a change: the file is open.
    fn lock_to_change(&self) -> Result<MutexGuard<'_, Inner>, MetaError> {
        let mut inner = self.lock()?;
        if inner.failure.as_ref().is_some_and(|failure| failure.is_closed) {
            self.reopen(&mut inner)?;
        }
        Ok(inner)
    }

    fn expire(&self, inner: &mut Inner) {
        let now = (self.clock)();
        if inner.failure.as_ref().is_some_and(|failure| now < failure.retry_at) {
            return;
        }
        while let Some(lease) = inner.state.expired(now) {
            if inner.failure.as_ref().is_some_and(|failure| failure.is_closed) {
                // Where that succeeds, the lease lives anew.
                let _ = self.reopen(inner);
                return;
            }
            let Ok(steps) = inner.state.end_lease(lease) else { return };
            if self.commit(inner, steps).is_err() {
                return;
            }
        }
    }

    fn commit(&self, inner: &mut Inner, steps: Vec<Step>) -> Result<(), MetaError> {
        if let Some(file) = &mut inner.file
            && let Err(error) = file.commit(&steps)
        {
            let why = unwritable(file.path(), &error);
            self.fail(inner, why.clone());
            // What became of it may be found in the file; it is told to nobody but those who look.
            let _ = self.reopen(inner);
            return Err(MetaError::Unwritable { why });
        }
        if let (Some(file), Some(failure)) = (&inner.file, &mut inner.failure) {
            failure.is_closed = false;
            // A small change may find room in the file where the next one finds none.
            if has_room(file.path()) {
                inner.failure = None;
            }
        }
        // Read after the commit: a lease lives its full time from when it is granted, not from when that began.
        let now = (self.clock)();
        for step in steps {
            inner.state.apply(now, step);
        }
        self.changed.notify_all();
        Ok(())
    }

    fn fail(&self, inner: &mut Inner, why: String) {
        let retry_at = (self.clock)() + RETRY_PAUSE;
        inner.failure = Some(Failure { why, is_closed: true, retry_at });
    }

    /// Opens the file again and takes its state over. It can be written then, or not: the next commit tells.
    fn reopen(&self, inner: &mut Inner) -> Result<(), MetaError> {
        let Some(file) = &mut inner.file else { return Ok(()) };
        let state = match file.reopen((self.clock)()) {
            Ok(state) if state.revision >= inner.state.revision => state,
            Ok(_) => {
                let why = format!(
                    "the metadata file {} holds less than was written to it: another one is in its place; put the right one back, \
                     and the host goes on by itself",
                    file.path().display()
                );
                return self.refuse(inner, why);
            }
            Err(OpenError::Io { path, source }) => {
                let why = unwritable(&path, &Error::Io(source));
                return self.refuse(inner, why);
            }
            Err(error) => return self.refuse(inner, error.to_string()),
        };
        inner.state = state;
        if let Some(failure) = &mut inner.failure {
            failure.is_closed = false;
        }
        // Its history may hold a change whose outcome was open.
        self.changed.notify_all();
        Ok(())
    }

    fn refuse(&self, inner: &mut Inner, why: String) -> Result<(), MetaError> {
        self.fail(inner, why.clone());
        Err(MetaError::Unwritable { why })
    }
}

/// Whether the file could grow; where that can't be told it is tried.
fn has_room(path: &Path) -> bool {
    rustix::fs::statvfs(path).map_or(true, |found| found.f_bavail * found.f_frsize >= ROOM_BYTES_MIN)
}

/// What can't be written, why, and what is to be done.
fn unwritable(path: &Path, error: &Error) -> String {
    let path = path.display();
    match error {
        Error::Io(e) if matches!(e.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) => format!(
            "no space left on the file system of {path}: metadata can be read, and not changed. Make room there (`df {path}`); \
             the host goes on by itself"
        ),
        error => format!(
            "the metadata file {path} can't be written ({error}): metadata can be read, and not changed. See what `dmesg` says of \
             its disk; the host tries on by itself"
        ),
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
        let mut inner = self.0.lock_to_change()?;
        let (answer, step) = inner.state.swap(key, expect, value, lease)?;
        if let Some(step) = step {
            self.0.commit(&mut inner, vec![step])?;
        }
        Ok(answer)
    }

    fn commit(&self, compares: &[Compare], writes: &[Write]) -> Result<Commit, MetaError> {
        check_commit(compares, writes)?;
        let mut inner = self.0.lock_to_change()?;
        let (answer, steps) = inner.state.commit(compares, writes)?;
        if !steps.is_empty() {
            self.0.commit(&mut inner, steps)?;
        }
        Ok(answer)
    }

    fn grant(&self, ttl: Duration) -> Result<LeaseId, MetaError> {
        let mut inner = self.0.lock_to_change()?;
        let (lease, step) = inner.state.grant(ttl);
        self.0.commit(&mut inner, vec![step])?;
        Ok(lease)
    }

    fn keep_alive(&self, lease: LeaseId) -> Result<(), MetaError> {
        let mut inner = self.0.lock()?;
        inner.state.keep_alive((self.0.clock)(), lease)
    }

    fn revoke(&self, lease: LeaseId) -> Result<(), MetaError> {
        let mut inner = self.0.lock_to_change()?;
        let steps = inner.state.end_lease(lease)?;
        self.0.commit(&mut inner, steps)
    }

    fn trouble(&self) -> Option<MetaError> {
        let mut inner = self.0.lock().ok()?;
        if inner.failure.is_some() {
            // Whether it is over is found out by writing.
            let tried = match inner.failure.as_ref().is_some_and(|failure| failure.is_closed) {
                true => self.0.reopen(&mut inner),
                false => Ok(()),
            };
            let _ = tried.and_then(|()| self.0.commit(&mut inner, Vec::new()));
        }
        inner.failure.as_ref().map(|failure| MetaError::Unwritable { why: failure.why.clone() })
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
            let pause = if inner.failure.is_some() { RETRY_PAUSE } else { Duration::from_millis(1) };
            let expiry = inner.state.next_expiry().map(|at| at.since((shared.clock)()).max(pause));
            let wait = expiry.map_or(left, |e| e.min(left));
            inner = shared.changed.wait_timeout(inner, wait).unwrap_or_else(PoisonError::into_inner).0;
            shared.expire(&mut inner);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::conformance::{self, Subject};
    use super::super::embedded::Opener;
    use super::*;
    use redb::StorageBackend;
    use redb::backends::FileBackend;
    use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};

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

    /// A file whose file system is full after so many more writes; never, where that is below zero.
    #[derive(Debug)]
    struct Filling {
        file: FileBackend,
        room: Arc<AtomicI64>,
    }

    impl Filling {
        fn take(&self) -> io::Result<()> {
            let left = self.room.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| (left > 0).then(|| left - 1));
            match left {
                Err(0) => Err(io::ErrorKind::StorageFull.into()),
                _ => Ok(()),
            }
        }
    }

    impl StorageBackend for Filling {
        fn len(&self) -> io::Result<u64> {
            self.file.len()
        }

        fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
            self.file.read(offset, out)
        }

        fn set_len(&self, len: u64) -> io::Result<()> {
            self.take()?;
            self.file.set_len(len)
        }

        fn sync_data(&self) -> io::Result<()> {
            self.file.sync_data()
        }

        fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
            self.take()?;
            self.file.write(offset, data)
        }
    }

    /// A store on such a file.
    struct Filled {
        hands: Hands,
        dir: tempfile::TempDir,
        room: Arc<AtomicI64>,
        is_upset: AtomicBool,
    }

    impl Filled {
        fn new() -> Filled {
            let (hands, dir) = (Hands::new(), tempfile::tempdir().unwrap());
            Filled { hands, dir, room: Arc::new(AtomicI64::new(-1)), is_upset: AtomicBool::new(false) }
        }

        fn store(&self) -> Result<LocalStore, OpenError> {
            let (path, room) = (self.dir.path().join("meta"), Arc::clone(&self.room));
            let opener: Opener = Arc::new(move |builder| {
                let mut options = std::fs::File::options();
                let file = options.read(true).write(true).create(true).truncate(false).open(&path)?;
                builder.create_with_backend(Filling { file: FileBackend::new(file)?, room: Arc::clone(&room) })
            });
            LocalStore::open_with(opener, self.hands.clock(), 40)
        }

        fn has_room(&self, writes: i64) {
            self.room.store(writes, Ordering::SeqCst);
        }
    }

    fn value_of(store: &LocalStore, key: &str) -> Option<Vec<u8>> {
        store.get(key).unwrap().map(|record| record.value)
    }

    #[test]
    fn a_full_file_system_refuses_changes_and_the_store_goes_on_when_there_is_room() {
        let filled = Filled::new();
        let store = filled.store().unwrap();
        let lease = store.grant(Duration::from_secs(10)).unwrap();
        store.swap("leased", MetaVersion::ABSENT, Some(b"l"), Some(lease)).unwrap();
        let mut version = MetaVersion::ABSENT;
        let (mut won, mut lost) = (0, 0);
        // The file system gets full at every point of a commit, of what opens the file again, and of the commit behind that.
        for writes in 0..60 {
            let (before, wanted) = (value_of(&store, "a"), vec![writes as u8]);
            let mut watch = store.watch("a", store.list("a").unwrap().revision.next()).unwrap();
            filled.has_room(writes);
            let refused = store.swap("a", version, Some(&wanted), None);
            if let Err(error) = &refused {
                assert!(matches!(error, MetaError::Unwritable { .. }), "{error}");
                assert!(error.to_string().contains("no space left on the file system of"), "{error}");
                // Until there is room: it is read, and nothing else.
                filled.has_room(0);
                assert!(store.trouble().is_some());
                assert!(store.swap("b", MetaVersion::ABSENT, Some(b"b"), None).is_err());
                assert_eq!(value_of(&store, "b"), None);
                filled.hands.advance(Duration::from_secs(11));
                assert_eq!(value_of(&store, "leased"), Some(b"l".to_vec()), "leases end when that can be written");
                store.keep_alive(lease).unwrap();
            }
            let read = value_of(&store, "a");
            assert!(read == before || read.as_ref() == Some(&wanted), "{read:?}");
            filled.has_room(-1);
            assert_eq!(store.trouble(), None, "it goes on by itself");
            let found = store.get("a").unwrap();
            version = found.as_ref().map_or(MetaVersion::ABSENT, |record| record.version);
            let is_new = found.map(|record| record.value).as_ref() == Some(&wanted);
            assert!(is_new || refused.is_err());
            let told = watch.next(Duration::ZERO).unwrap();
            assert_eq!(told.len(), usize::from(is_new), "a watch tells of it exactly where it happened");
            (won, lost) = (won + u32::from(is_new && refused.is_err()), lost + u32::from(!is_new));
            let Swap::Done(now) = store.swap("a", version, Some(b"next"), None).unwrap() else { panic!("it is ours") };
            version = now;
            store.keep_alive(lease).unwrap();
        }
        assert!(lost > 5, "{lost} changes did not happen, {won} did although that was not known");
        drop(store);
        let store = filled.store().unwrap();
        assert_eq!(value_of(&store, "a"), Some(b"next".to_vec()));
        filled.hands.advance(Duration::from_secs(11));
        assert_eq!(value_of(&store, "leased"), None);
    }

    /// Gets full once in a while, for a moment.
    struct NowAndThen(Filled);

    impl Subject for NowAndThen {
        fn open(&self) -> Arc<dyn MetaStore> {
            let store = loop {
                // It may be full just now.
                match self.0.store() {
                    Ok(store) => break Arc::new(store),
                    Err(error) => assert!(matches!(error, OpenError::Io { .. }), "{error}"),
                }
            };
            let room = Arc::downgrade(&self.0.room);
            let upsets = move || {
                let mut writes = 0;
                while let Some(room) = room.upgrade() {
                    writes = (writes + 7) % 31;
                    room.store(writes, Ordering::SeqCst);
                    std::thread::sleep(Duration::from_millis(3));
                    room.store(-1, Ordering::SeqCst);
                    drop(room);
                    std::thread::sleep(Duration::from_millis(10));
                }
            };
            if !self.0.is_upset.swap(true, Ordering::SeqCst) {
                std::thread::spawn(upsets);
            }
            store
        }

        fn advance(&self, span: Duration) {
            self.0.hands.advance(span);
        }
    }

    #[test]
    fn a_store_whose_file_system_is_full_now_and_then_conforms() {
        conformance::run(&NowAndThen(Filled::new()));
    }
}
