//! A backup being written: chunks first, then pages, then the manifest that makes it one.

use crate::lock::{Kind, Lock};
use crate::manifest::{FORMAT, Source};
use crate::object::Name;
use crate::parallel::WORKERS;
use crate::{Backup, CHUNK_BYTES, Error, Manifest, Map, PAGE_CHUNKS, Repository, Result};
use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

/// What a backup brought to the repository.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stored {
    /// Bytes of the volume that were given.
    pub read_bytes: u64,
    /// Bytes of objects that were not there.
    pub added_bytes: u64,
}

pub struct Writing<'r> {
    repository: &'r Repository,
    lock: Lock,
    map: Map,
    /// Chunks that were set aside: they are stored again.
    damaged: BTreeSet<Name>,
    /// Bytes of chunks that are no holes, by page of the backup that this one builds on.
    page_bytes: Vec<u64>,
    stored: Stored,
    size_bytes: u64,
}

/// A chunk's place; nothing for a hole, else its name and the bytes that were added.
type Outcome = (u64, Option<(Name, u64)>);

/// What workers have done.
#[derive(Default)]
struct Done {
    outcomes: Vec<Outcome>,
    /// Why the first of them gave up.
    failure: Option<Error>,
    /// Memory of chunks that are stored, for those to come.
    spare: Vec<Vec<u8>>,
}

/// Takes chunks while they are read.
pub struct Give<'a> {
    giver: SyncSender<(u64, Vec<u8>)>,
    done: &'a Mutex<Done>,
    read_bytes: u64,
}

impl Give<'_> {
    /// A chunk at its place: [`CHUNK_BYTES`], or up to the volume's end.
    ///
    /// # Errors
    /// The store did not take one before.
    pub fn chunk(&mut self, chunk: u64, bytes: &[u8]) -> Result<()> {
        self.read_bytes += bytes.len() as u64;
        let mut done = self.done.lock().expect("no worker panics");
        let (mut copy, is_over) = (done.spare.pop().unwrap_or_default(), done.failure.is_some());
        drop(done);
        copy.clear();
        copy.extend_from_slice(bytes);
        if is_over || self.giver.send((chunk, copy)).is_err() {
            return Err(Error::Store("the backup can't be stored".to_string()));
        }
        Ok(())
    }
}

impl<'r> Writing<'r> {
    /// A backup of a volume of that size, of which nothing is known.
    ///
    /// # Errors
    /// Somebody deletes in the repository now.
    pub fn begin(repository: &'r Repository, size_bytes: u64) -> Result<Writing<'r>> {
        let lock = Lock::take(&repository.store, Kind::Shared, "writing a backup")?;
        let aside = repository.store.list("damaged")?;
        let damaged = aside.iter().filter_map(|found| found.name.strip_prefix("damaged/")?.parse().ok()).collect();
        let map = Map::empty(size_bytes);
        Ok(Writing { repository, lock, map, damaged, page_bytes: Vec::new(), stored: Stored::default(), size_bytes })
    }

    /// What is not given is as in this backup. Returns places of chunks that are to be given all the same.
    ///
    /// # Errors
    /// [`Error::Damaged`]: its pages can't be read. [`Error::NotFound`]: it was deleted since it was looked up, so what it
    /// needs may be gone.
    pub fn build_on(&mut self, base: &Backup) -> Result<Vec<u64>> {
        if self.repository.store.stat(&base.object)?.is_none() {
            return Err(Error::NotFound(format!("backup {} was deleted meanwhile", base.id)));
        }
        let base = &base.manifest;
        let map = Map::of(base);
        let mut wanted = BTreeSet::new();
        let mut page_bytes = vec![0; map.pages() as usize];
        // Pages that do not change are read, too: what can't be, nothing is built on.
        map.each(self.repository, |chunk, name| {
            page_bytes[(chunk / PAGE_CHUNKS) as usize] += CHUNK_BYTES.min(base.size_bytes - chunk * CHUNK_BYTES);
            if self.damaged.contains(&name) {
                wanted.insert(chunk);
            }
        })?;
        // Where it ended or ends now inside a chunk, that one has another length.
        let end = base.size_bytes.min(self.size_bytes);
        if base.size_bytes != self.size_bytes && !end.is_multiple_of(CHUNK_BYTES) {
            wanted.insert(end / CHUNK_BYTES);
        }
        // Pages that another size changes count as changed.
        let is_as_long = base.size_bytes == self.size_bytes;
        self.map = if is_as_long { map } else { map.resized(self.repository, self.size_bytes)? };
        self.page_bytes = page_bytes;
        Ok(wanted.into_iter().filter(|chunk| *chunk < self.map.chunks()).collect())
    }

    /// `feed` gives chunks, which are stored while it reads the next.
    ///
    /// # Errors
    /// `feed` returns one; a chunk can't be stored.
    pub fn write<E: From<Error>>(
        &mut self,
        feed: impl FnOnce(&mut Give) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let done: Mutex<Done> = Mutex::default();
        let (giver, taker) = sync_channel(WORKERS);
        let taker = Mutex::new(taker);
        let again: Mutex<BTreeSet<Name>> = Mutex::default();
        let (repository, damaged) = (self.repository, &self.damaged);
        // What was set aside is stored once, however often it is in the volume.
        let is_doubtful = |name: &Name| damaged.contains(name) && again.lock().expect("no panic").insert(*name);
        let (fed, read_bytes) = std::thread::scope(|scope| {
            for _ in 0..WORKERS {
                scope.spawn(|| work(repository, &taker, &is_doubtful, &done));
            }
            let mut give = Give { giver, done: &done, read_bytes: 0 };
            (feed(&mut give), give.read_bytes)
        });
        let Done { outcomes, failure, .. } = done.into_inner().expect("no worker panics");
        // Why a worker gave up says more than that nothing could be given to it.
        failure.map_or(Ok(()), Err)?;
        fed?;
        self.stored.read_bytes += read_bytes;
        for (chunk, stored) in outcomes {
            self.stored.added_bytes += stored.map_or(0, |(_, bytes)| bytes);
            self.map.set(repository, chunk, stored.map(|(name, _)| name))?;
        }
        Ok(())
    }

    /// These chunks are holes.
    ///
    /// # Errors
    /// A page can't be read.
    pub fn holes(&mut self, chunks: impl IntoIterator<Item = u64>) -> Result<()> {
        chunks.into_iter().try_for_each(|chunk| self.map.set(self.repository, chunk, None))
    }

    /// Makes it a backup.
    ///
    /// # Errors
    /// The store does not take it; then there is none.
    pub fn commit(self, source: Source) -> Result<(Backup, Stored)> {
        let Writing { repository, lock, map, mut stored, size_bytes, page_bytes, .. } = self;
        let data_bytes = map.data_bytes(size_bytes, &page_bytes);
        let pages = map.store(repository, |bytes| stored.added_bytes += bytes)?;
        let added_bytes = stored.added_bytes;
        repository.store.settle()?;
        lock.check()?;
        let manifest = Manifest { format: FORMAT, source, size_bytes, data_bytes, added_bytes, pages };
        let backup = repository.put_manifest(manifest)?;
        // Somebody may have begun to delete before this was there to be seen.
        if let Err(why) = lock.check() {
            repository.store.delete(&backup.object)?;
            return Err(why);
        }
        Ok((backup, stored))
    }
}

/// One of those who store what is given, until nothing more is. After a failure all is taken still, and not stored: who
/// gives would wait for ever for the last to take it.
fn work(
    repository: &Repository,
    taker: &Mutex<Receiver<(u64, Vec<u8>)>>,
    is_doubtful: &(dyn Fn(&Name) -> bool + Sync),
    done: &Mutex<Done>,
) {
    let mut object = Vec::new();
    loop {
        let given = taker.lock().expect("no worker panics").recv();
        let Ok((chunk, bytes)) = given else { return };
        if done.lock().expect("no worker panics").failure.is_some() {
            continue;
        }
        let is_hole = bytes.iter().all(|byte| *byte == 0);
        let stored = (!is_hole).then(|| repository.put_chunk(&bytes, is_doubtful, &mut object)).transpose();
        let mut done = done.lock().expect("no worker panics");
        done.spare.push(bytes);
        match stored {
            Ok(stored) => done.outcomes.push((chunk, stored)),
            Err(why) => drop(done.failure.get_or_insert(why)),
        }
    }
}
