//! The grid's records in this host's memory: read there, written through to the store.
//!
//! Role: [`Records`] is a metadata store whose reads cost nothing: a thread of its own keeps a [`View`] by one watch, and
//! what this host writes is in it at once. Whoever has to know what others have written by now calls [`Records::sync`] first,
//! which asks the store once. What must not rest on memory at all reads the store itself.
//!
//! Faults: while the store is silent, and when it turns out not to be the one that it was, what was known stays, and listeners
//! are told. After a gap everything is listed anew.

use super::meta::{GRID_KEY, Meta};
use crate::grid::beat;
use crate::grid::layout::GridDir;
use crate::logger;
use anyhow::{Context, Result};
use holdfast_api::{Code, refuse};
use holdfast_base::MetaVersion;
use holdfast_cluster::view::{self, Doubt};
use holdfast_cluster::{Changes, View};
use holdfast_format::meta::BeatRecord;
use holdfast_runtime::meta::{
    Change, Commit, Compare, LeaseId, Listing, MetaError, MetaStore, Record, Revision, Swap, Watch, WatchEvent, Write,
};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long one look waits for changes.
const LOOK_MAX: Duration = Duration::from_secs(5);

/// Pause before the store is asked again that did not answer, and before one is looked at again that is not the right one.
const PAUSE: Duration = Duration::from_millis(500);
const DOUBT_PAUSE: Duration = Duration::from_secs(5);

/// How long the watch may take to tell of what the store has by now, before it is listed.
const WATCHED_MAX: Duration = Duration::from_millis(100);

/// How often it is looked whether the store has come further.
const MEMORY_PACE: Duration = Duration::from_secs(2);

/// What to do about a store that is doubted when a host is started.
const WAYS_OUT: &str = "this machine knows a newer metadata store of the grid. Bring that one back, if it is somewhere; or have the \
    metadata back from the nodes (`holdfast meta recover --replace`); or go on with the store as it is (`holdfast meta believe`), \
    where it is the right one all the same, filled by an older release";

pub enum News {
    Changed(Changes),
    /// Whether the store answers and is the one that it was.
    Right(bool),
}

type Listener = Box<dyn Fn(News) + Send>;

pub struct Records {
    store: Meta,
    known: Mutex<Known>,
    advanced: Condvar,
}

struct Known {
    view: View,
    /// The watch is at work.
    is_watched: bool,
    /// The store answers, as whoever looks after its health finds.
    is_healthy: bool,
    was_right: bool,
    listeners: Vec<Listener>,
}

impl Known {
    fn is_right(&self) -> bool {
        self.is_watched && self.is_healthy && self.view.doubt().is_none()
    }

    fn tell(&mut self) {
        let is_right = self.is_right();
        if std::mem::replace(&mut self.was_right, is_right) != is_right {
            self.listeners.iter().for_each(|listener| listener(News::Right(is_right)));
        }
        let changes = self.view.take_changes();
        if !changes.is_empty() {
            self.listeners.iter().for_each(|listener| listener(News::Changed(changes.clone())));
        }
    }
}

fn known(record: Record) -> view::Record {
    view::Record { key: record.key, version: record.version, value: record.value.into() }
}

fn told(record: &view::Record) -> Record {
    Record { key: record.key.clone(), version: record.version, value: record.value.to_vec(), lease: None }
}

fn change(event: WatchEvent) -> view::Change {
    let record = match event.change {
        Change::Put(record) => Some(known(record)),
        Change::Deleted => None,
    };
    view::Change { revision: event.revision.0, key: event.key, record }
}

impl Records {
    /// Reads all that there is, and keeps up with it from a thread of its own. `is_marked`: the store has the grid's own
    /// record, as one that several may share has. `memory`: where it is kept how far the store had come.
    pub fn start(store: Meta, is_marked: bool, memory: Option<GridDir>) -> Result<Arc<Records>> {
        let remembered = memory.as_ref().and_then(beat::remembered);
        let view = View::new(is_marked.then_some(GRID_KEY), remembered.clone());
        let known = Known { view, is_watched: false, is_healthy: true, was_right: false, listeners: Vec::new() };
        let records = Arc::new(Records { store, known: Mutex::new(known), advanced: Condvar::new() });
        if let Err(error) = records.list_anew() {
            return Err(match records.doubt() {
                Some(_) => error.context(WAYS_OUT),
                None => error.context("the grid's records can't be read"),
            });
        }
        if let Some(dir) = memory {
            let own = Arc::clone(&records);
            let keep = move || own.remember(&dir, remembered);
            std::thread::Builder::new().name("memory".to_string()).spawn(keep).context("no thread for the memory")?;
        }
        let own = Arc::clone(&records);
        let follow = move || {
            loop {
                let Err(error) = own.follow();
                let doubt = own.doubt();
                own.lock().is_watched = false;
                own.lock().tell();
                if doubt.is_none() && error.downcast_ref::<MetaError>().is_none() {
                    logger::warn(format_args!("the grid's records are read again: {error:#}"));
                }
                std::thread::sleep(if doubt.is_some() { DOUBT_PAUSE } else { PAUSE });
            }
        };
        std::thread::Builder::new().name("records".to_string()).spawn(follow).context("no thread for the records")?;
        Ok(records)
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        // The view is changed whole: after a panic it is as good as before.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn follow(&self) -> Result<std::convert::Infallible> {
        let from = self.list_anew()?;
        let mut watch = self.store.watch("", from)?;
        {
            let mut known = self.lock();
            known.is_watched = true;
            known.tell();
        }
        loop {
            let changes: Vec<view::Change> = watch.next(LOOK_MAX)?.into_iter().map(change).collect();
            let taken = self.lock().view.apply(changes);
            self.told(taken)?;
        }
    }

    /// Gives where a watch goes on.
    fn list_anew(&self) -> Result<Revision> {
        let (before, asked) = self.view(|view| (view.upto(), view.asking()));
        let Listing { revision, records } = self.store.list("")?;
        let taken = {
            let mut known_now = self.lock();
            // While it was on its way the watch, or another listing, has gone past it.
            let is_outrun = revision.0 >= before && revision.0 < known_now.view.upto();
            if is_outrun && known_now.view.doubt().is_none() {
                return Ok(revision.next());
            }
            known_now.view.replace(asked, revision.0, records.into_iter().map(known).collect())
        };
        self.told(taken)?;
        Ok(revision.next())
    }

    fn told(&self, taken: Result<(), Doubt>) -> Result<()> {
        let mut known = self.lock();
        let was_right = known.was_right;
        known.tell();
        self.advanced.notify_all();
        let Err(doubt) = taken else { return Ok(()) };
        if was_right {
            logger::error(format_args!(
                "the metadata store is not believed: {}. What is in service is served on, and nothing that the store decides \
                 happens until the right one is back",
                doubt
            ));
        }
        refuse!(Code::Unavailable, "the metadata store is not believed: {}", doubt)
    }

    /// Keeps beside the configuration how far the store has come, for the next process.
    fn remember(&self, dir: &GridDir, mut kept: Option<BeatRecord>) {
        let mut failed = false;
        loop {
            let seen = self.lock().view.beat().cloned();
            if let Some(beat) = seen.filter(|beat| kept.as_ref() != Some(beat)) {
                match beat::remember(dir, &beat) {
                    Ok(()) => (kept, failed) = (Some(beat), false),
                    Err(error) if !failed => {
                        failed = true;
                        logger::warn(format_args!("how far the metadata store has come can't be kept: {error:#}"));
                    }
                    Err(_) => {}
                }
            }
            std::thread::sleep(MEMORY_PACE);
        }
    }

    /// From here on told of news, of all that there is first.
    pub fn listen(&self, listener: impl Fn(News) + Send + 'static) {
        let mut known = self.lock();
        listener(News::Right(known.is_right()));
        known.listeners.push(Box::new(listener));
        known.tell();
    }

    /// Whoever asks the store all the time tells whether it answers.
    pub fn note_health(&self, is_healthy: bool) {
        let mut known = self.lock();
        known.is_healthy = is_healthy;
        known.tell();
    }

    /// This process stood still: what is known of the store is of before, until it has answered again.
    pub fn forget_rightness(&self) {
        let mut known = self.lock();
        known.is_healthy = false;
        known.tell();
    }

    pub fn doubt(&self) -> Option<Doubt> {
        self.lock().view.doubt()
    }

    /// Everything that was written by now, by whomever, is in the view.
    pub fn sync(&self) -> Result<()> {
        if let Some(doubt) = self.doubt() {
            refuse!(
                Code::Unavailable,
                "the metadata store is not believed: {}. Bring the right one back, or have the metadata back from the \
                 nodes (`holdfast meta recover --help`); where that was done, start this host again",
                doubt
            );
        }
        let revision = self.store.revision()?;
        let end = Instant::now() + WATCHED_MAX;
        let mut known = self.lock();
        while known.view.upto() < revision.0 {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                drop(known);
                return self.list_anew().map(drop);
            }
            known = self.advanced.wait_timeout(known, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    /// The store itself, with what is written there, and found there, in the view at once.
    pub fn written_through(self: Arc<Records>) -> Meta {
        Arc::new(WrittenThrough(self))
    }

    /// Looks at the records as they are known.
    pub fn view<T>(&self, look: impl FnOnce(&View) -> T) -> T {
        look(&self.lock().view)
    }

    fn note(&self, key: &str, expect: MetaVersion, found: Option<view::Record>) {
        let mut known = self.lock();
        if known.view.doubt().is_none() {
            match found {
                Some(record) => known.view.note(record),
                None if expect != MetaVersion::ABSENT => known.view.note_deleted(key, expect),
                None => {}
            }
            known.tell();
        }
    }
}

impl MetaStore for Records {
    fn get(&self, key: &str) -> Result<Option<Record>, MetaError> {
        Ok(self.lock().view.get(key).map(told))
    }

    fn list(&self, prefix: &str) -> Result<Listing, MetaError> {
        let known = self.lock();
        let records = known.view.list(prefix).map(told).collect();
        Ok(Listing { revision: Revision(known.view.upto()), records })
    }

    fn swap(
        &self,
        key: &str,
        expect: MetaVersion,
        value: Option<&[u8]>,
        lease: Option<LeaseId>,
    ) -> Result<Swap, MetaError> {
        let swap = self.store.swap(key, expect, value, lease)?;
        let found = match &swap {
            Swap::Done(version) => {
                value.map(|value| view::Record { key: key.to_string(), version: *version, value: value.into() })
            }
            Swap::Conflict(found) => found.clone().map(known),
        };
        self.note(key, expect, found);
        Ok(swap)
    }

    fn commit(&self, compares: &[Compare], writes: &[Write]) -> Result<Commit, MetaError> {
        let commit = self.store.commit(compares, writes)?;
        match &commit {
            Commit::Done(versions) => {
                for (Write { key, value, .. }, version) in writes.iter().zip(versions) {
                    let record = |value: &Vec<u8>| view::Record {
                        key: key.clone(),
                        version: *version,
                        value: value.as_slice().into(),
                    };
                    let expect = compares.iter().find(|c| c.key == *key).map_or(MetaVersion::ABSENT, |c| c.version);
                    self.note(key, expect, value.as_ref().map(record));
                }
            }
            Commit::Conflict(found) => {
                for (Compare { key, version }, found) in compares.iter().zip(found) {
                    self.note(key, *version, found.clone().map(known));
                }
            }
        }
        Ok(commit)
    }

    fn grant(&self, ttl: Duration) -> Result<LeaseId, MetaError> {
        self.store.grant(ttl)
    }

    fn keep_alive(&self, lease: LeaseId) -> Result<(), MetaError> {
        self.store.keep_alive(lease)
    }

    fn revoke(&self, lease: LeaseId) -> Result<(), MetaError> {
        self.store.revoke(lease)
    }

    fn watch(&self, prefix: &str, from: Revision) -> Result<Box<dyn Watch>, MetaError> {
        self.store.watch(prefix, from)
    }

    fn revision(&self) -> Result<Revision, MetaError> {
        self.store.revision()
    }
}

struct WrittenThrough(Arc<Records>);

impl MetaStore for WrittenThrough {
    fn get(&self, key: &str) -> Result<Option<Record>, MetaError> {
        let found = self.0.store.get(key)?;
        if let Some(record) = found.clone() {
            self.0.note(key, MetaVersion::ABSENT, Some(known(record)));
        }
        Ok(found)
    }

    fn list(&self, prefix: &str) -> Result<Listing, MetaError> {
        self.0.store.list(prefix)
    }

    fn swap(
        &self,
        key: &str,
        expect: MetaVersion,
        value: Option<&[u8]>,
        lease: Option<LeaseId>,
    ) -> Result<Swap, MetaError> {
        self.0.swap(key, expect, value, lease)
    }

    fn commit(&self, compares: &[Compare], writes: &[Write]) -> Result<Commit, MetaError> {
        self.0.commit(compares, writes)
    }

    fn grant(&self, ttl: Duration) -> Result<LeaseId, MetaError> {
        self.0.store.grant(ttl)
    }

    fn keep_alive(&self, lease: LeaseId) -> Result<(), MetaError> {
        self.0.store.keep_alive(lease)
    }

    fn revoke(&self, lease: LeaseId) -> Result<(), MetaError> {
        self.0.store.revoke(lease)
    }

    fn watch(&self, prefix: &str, from: Revision) -> Result<Box<dyn Watch>, MetaError> {
        self.0.store.watch(prefix, from)
    }

    fn revision(&self) -> Result<Revision, MetaError> {
        self.0.store.revision()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_runtime::clock;
    use holdfast_runtime::meta::LocalStore;

    fn store() -> Meta {
        Arc::new(LocalStore::in_memory(Arc::new(clock::now)))
    }

    fn put(store: &dyn MetaStore, key: &str, value: &[u8]) {
        let expect = store.get(key).unwrap().map_or(MetaVersion::ABSENT, |r| r.version);
        assert!(matches!(store.swap(key, expect, Some(value), None), Ok(Swap::Done(_))));
    }

    #[test]
    fn what_is_written_here_is_read_at_once_and_what_others_write_after_a_sync() {
        let store = store();
        put(&*store, "a", b"1");
        let records = Records::start(store.clone(), false, None).unwrap();
        assert_eq!(records.get("a").unwrap().unwrap().value, b"1");
        put(&*records, "b", b"1");
        assert_eq!(records.get("b").unwrap().unwrap().value, b"1");
        for round in 0..50_u8 {
            put(&*store, "a", &[round]);
            records.sync().unwrap();
            assert_eq!(records.get("a").unwrap().unwrap().value, [round]);
            let version = records.get("b").unwrap().unwrap().version;
            records.swap("b", version, None, None).unwrap();
            assert_eq!(records.get("b").unwrap(), None);
            put(&*records, "b", b"again");
        }
        assert_eq!(records.list("").unwrap().records.len(), 2);
    }

    #[test]
    fn a_store_that_is_emptied_is_not_believed_and_the_right_one_is_again() {
        let store = store();
        put(&*store, GRID_KEY, b"{}");
        put(&*store, "a", b"1");
        let records = Records::start(store.clone(), true, None).unwrap();
        let version = |key| store.get(key).unwrap().unwrap().version;
        store.commit(&[], &[delete("a"), delete(GRID_KEY)]).unwrap();
        while records.doubt().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(records.doubt(), Some(Doubt::Emptied));
        assert!(records.sync().unwrap_err().to_string().contains("it was emptied"));
        put(&*store, GRID_KEY, b"{}");
        put(&*store, "a", b"2");
        assert!(version("a") > MetaVersion(2));
        while records.doubt().is_some() {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(records.get("a").unwrap().unwrap().value, b"2");
    }

    fn delete(key: &str) -> Write {
        Write { key: key.to_string(), value: None, lease: None }
    }
}
