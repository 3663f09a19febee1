//! The file of the embedded store: a redb database that holds the state and its latest history.
//!
//! Every batch of steps is one transaction, flushed before it is answered. The whole state is read at open and served
//! from memory afterwards.
//!
//! Faults: a failed commit leaves open whether it happened, so the file is closed then, and what it holds read again.

use super::state::{State, Step};
use super::{Change, LeaseId, Record, Revision, WatchEvent};
use holdfast_base::{Instant, MetaVersion};
use redb::{
    Builder, Database, DatabaseError, ReadableDatabase, ReadableTable, StorageError, TableDefinition, TableError,
};
use rustix::fs::Advice;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;

/// Version, lease (zero for none) and value of each record.
const RECORDS: TableDefinition<&str, (u64, u64, &[u8])> = TableDefinition::new("records");

/// Time to live of each lease, in milliseconds.
const LEASES: TableDefinition<u64, u64> = TableDefinition::new("leases");

/// By revision: key, version (zero for a deletion), lease and value.
const HISTORY: TableDefinition<u64, (&str, u64, u64, &[u8])> = TableDefinition::new("history");

const NUMBERS: TableDefinition<&str, u64> = TableDefinition::new("numbers");

const FORMAT: &str = "format";
const REVISION: &str = "revision";
const LAST_LEASE: &str = "last_lease";

/// The one layout that exists so far.
const FORMAT_1: u64 = 1;

/// Memory for the database's own pages: everything is read once, at open.
const CACHE_BYTES: usize = 4 << 20;

/// Why the file could not be opened: what, why, and what to do.
#[derive(Debug, Error)]
pub enum OpenError {
    #[error(
        "cannot open the metadata file {path}: another process has it open; stop that process (`fuser -v {path}` \
         names it), or use etcd where several machines share metadata"
    )]
    InUse { path: PathBuf },
    #[error("cannot open the metadata file {path}: {source}; check its directory, permissions and free space")]
    Io { path: PathBuf, source: std::io::Error },
    #[error("cannot open the metadata file {path}: {why}; restore it from a backup, and keep this one for analysis")]
    Damaged { path: PathBuf, why: String },
    #[error("cannot open the metadata file {path}: its format is {found}, and this version knows {FORMAT_1}; upgrade")]
    Format { path: PathBuf, found: u64 },
}

/// Makes a database of what lies under it: the file, or what a test puts in its place.
pub(super) type Opener = Arc<dyn Fn(&Builder) -> Result<Database, DatabaseError> + Send + Sync>;

pub(super) struct File {
    path: PathBuf,
    opener: Opener,
    history_max: usize,
    /// `None` between a commit that failed and the next opening.
    database: Option<Database>,
}

impl File {
    /// Opens the file, or makes it.
    pub(super) fn open(path: &Path, now: Instant, history_max: usize) -> Result<(File, State), OpenError> {
        let of_path = path.to_path_buf();
        let existing: Opener = Arc::new(move |builder| {
            reread(&of_path)?;
            // One that is gone is not to be begun anew.
            builder.open(&of_path)
        });
        let file = File { path: path.to_path_buf(), opener: existing, history_max, database: None };
        let database = builder().create(path);
        file.begin(database, now)
    }

    /// As [`File::open`], of what a test puts in the place of a file.
    #[cfg(test)]
    pub(super) fn open_with(opener: Opener, now: Instant, history_max: usize) -> Result<(File, State), OpenError> {
        let database = opener(&builder());
        let file = File { path: PathBuf::from("/test/meta.redb"), opener, history_max, database: None };
        file.begin(database, now)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Opens the file again after a commit that failed: the state is what it holds.
    pub(super) fn reopen(&mut self, now: Instant) -> Result<State, OpenError> {
        self.database = None;
        let database = (self.opener)(&builder());
        let again = File {
            path: self.path.clone(),
            opener: Arc::clone(&self.opener),
            history_max: self.history_max,
            database: None,
        };
        let (file, state) = again.begin(database, now)?;
        *self = file;
        Ok(state)
    }

    fn begin(mut self, database: Result<Database, DatabaseError>, now: Instant) -> Result<(File, State), OpenError> {
        let path_buf = || self.path.clone();
        let database = database.map_err(|e| match e {
            DatabaseError::DatabaseAlreadyOpen => OpenError::InUse { path: path_buf() },
            DatabaseError::Storage(StorageError::Io(source)) if source.kind() != ErrorKind::InvalidData => {
                OpenError::Io { path: path_buf(), source }
            }
            other => OpenError::Damaged { path: path_buf(), why: other.to_string() },
        })?;
        let failed = |e: redb::Error| match e {
            redb::Error::Io(source) if source.kind() != ErrorKind::InvalidData => {
                OpenError::Io { path: path_buf(), source }
            }
            other => OpenError::Damaged { path: path_buf(), why: other.to_string() },
        };
        let format = create_tables(&database).map_err(failed)?;
        if format != FORMAT_1 {
            return Err(OpenError::Format { path: path_buf(), found: format });
        }
        let state = load(&database, now, self.history_max).map_err(failed)?;
        self.database = Some(database);
        Ok((self, state))
    }

    /// Makes `steps` durable, all or none; with no step, finds out whether anything can be written. After an error the file is
    /// closed.
    pub(super) fn commit(&mut self, steps: &[Step]) -> Result<(), redb::Error> {
        let committed = self.try_commit(steps);
        if committed.is_err() {
            self.database = None;
        }
        committed
    }

    fn try_commit(&self, steps: &[Step]) -> Result<(), redb::Error> {
        let database = self.database.as_ref().ok_or(redb::Error::PreviousIo)?;
        let transaction = database.begin_write()?;
        {
            let mut records = transaction.open_table(RECORDS)?;
            let mut leases = transaction.open_table(LEASES)?;
            let mut history = transaction.open_table(HISTORY)?;
            let mut numbers = transaction.open_table(NUMBERS)?;
            if steps.is_empty() {
                // Nothing changes, and yet something is written.
                let revision = numbers.get(REVISION)?.map_or(0, |n| n.value());
                numbers.insert(REVISION, revision)?;
            }
            for step in steps {
                match step {
                    Step::Granted(lease, ttl) => {
                        leases.insert(lease.0, ttl.as_millis() as u64)?;
                        numbers.insert(LAST_LEASE, lease.0)?;
                    }
                    Step::Ended(lease) => {
                        leases.remove(lease.0)?;
                    }
                    Step::Changed(WatchEvent { revision, key, change }) => {
                        if let Change::Put(Record { version, value, lease, .. }) = change {
                            let lease = lease.map_or(0, |l| l.0);
                            records.insert(key.as_str(), (version.0, lease, value.as_slice()))?;
                            history.insert(revision.0, (key.as_str(), version.0, lease, value.as_slice()))?;
                        } else {
                            records.remove(key.as_str())?;
                            history.insert(revision.0, (key.as_str(), 0, 0, [].as_slice()))?;
                        }
                        history.remove(revision.0.saturating_sub(self.history_max as u64))?;
                        numbers.insert(REVISION, revision.0)?;
                    }
                }
            }
        }
        transaction.commit()?;
        Ok(())
    }
}

fn builder() -> Builder {
    let mut builder = Database::builder();
    builder.set_cache_size(CACHE_BYTES);
    builder
}

/// Has the file's pages come from the device when they are read next: what the kernel could not write it may still show.
fn reread(path: &Path) -> std::io::Result<()> {
    let file = std::fs::File::options().read(true).write(true).open(path)?;
    file.sync_all()?;
    Ok(rustix::fs::fadvise(&file, 0, None, Advice::DontNeed)?)
}

/// Makes the tables of a fresh file; returns the file's format.
fn create_tables(database: &Database) -> Result<u64, redb::Error> {
    match database.begin_read()?.open_table(NUMBERS) {
        Ok(numbers) => return Ok(numbers.get(FORMAT)?.map_or(0, |n| n.value())),
        Err(TableError::TableDoesNotExist(_)) => {}
        Err(e) => return Err(e.into()),
    }
    let transaction = database.begin_write()?;
    transaction.open_table(RECORDS)?;
    transaction.open_table(LEASES)?;
    transaction.open_table(HISTORY)?;
    transaction.open_table(NUMBERS)?.insert(FORMAT, FORMAT_1)?;
    transaction.commit()?;
    Ok(FORMAT_1)
}

fn load(database: &Database, now: Instant, history_max: usize) -> Result<State, redb::Error> {
    let transaction = database.begin_read()?;
    let mut state = State::new(history_max);
    let numbers = transaction.open_table(NUMBERS)?;
    state.revision = Revision(numbers.get(REVISION)?.map_or(0, |n| n.value()));
    state.last_lease = numbers.get(LAST_LEASE)?.map_or(0, |n| n.value());
    let mut records = Vec::new();
    for entry in transaction.open_table(RECORDS)?.iter()? {
        let (key, value) = entry?;
        let (version, lease, bytes) = value.value();
        records.push(record(key.value(), version, lease, bytes));
    }
    let mut leases = Vec::new();
    for entry in transaction.open_table(LEASES)?.iter()? {
        let (lease, ttl) = entry?;
        leases.push((LeaseId(lease.value()), Duration::from_millis(ttl.value())));
    }
    let mut history = Vec::new();
    for entry in transaction.open_table(HISTORY)?.iter()? {
        let (revision, value) = entry?;
        let (key, version, lease, bytes) = value.value();
        let change = if version == 0 { Change::Deleted } else { Change::Put(record(key, version, lease, bytes)) };
        history.push(WatchEvent { revision: Revision(revision.value()), key: key.into(), change });
    }
    state.restore(now, records, leases);
    state.restore_history(history);
    Ok(state)
}

fn record(key: &str, version: u64, lease: u64, value: &[u8]) -> Record {
    let lease = (lease != 0).then_some(LeaseId(lease));
    Record { key: key.into(), version: MetaVersion(version), value: value.into(), lease }
}
