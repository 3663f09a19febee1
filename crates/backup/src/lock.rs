//! Who is at work in a repository: many who write and read, or one who deletes.
//!
//! A lock is an object, `locks/shared-ID` or `locks/exclusive-ID`. It is put first; then all are listed. Of two at the same
//! instant each sees the other, so at least one steps back.
//!
//! Its holder writes it anew every minute. One that was not for ten minutes, by the store's clock, is nobody's: whoever
//! needs an exclusive one deletes it. A holder whose lock is gone ends with an error.

use crate::store::Store;
use crate::{Error, Result};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

const FOLDER: &str = "locks";

const REFRESHED_EVERY: Duration = Duration::from_secs(60);

/// Ten times [`REFRESHED_EVERY`]: a store that is away for minutes takes no lock from anybody.
const STALE_MS: u64 = 600_000;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Adds, or reads.
    Shared,
    /// Deletes.
    Exclusive,
}

impl Kind {
    fn word(self) -> &'static str {
        match self {
            Kind::Shared => "shared",
            Kind::Exclusive => "exclusive",
        }
    }
}

/// For people.
#[derive(Serialize, Deserialize)]
struct Holder {
    who: String,
    doing: String,
}

pub struct Lock {
    store: Arc<dyn Store>,
    name: String,
    taken_ms: u64,
    /// Ends what refreshes it.
    end: Option<Sender<()>>,
    refreshing: Option<JoinHandle<()>>,
}

impl Lock {
    /// # Errors
    /// [`Error::Busy`]: somebody else is at work.
    pub fn take(store: &Arc<dyn Store>, kind: Kind, doing: &str) -> Result<Lock> {
        let name = format!("{FOLDER}/{}-{}", kind.word(), uuid::Uuid::new_v4());
        let machine = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let holder = Holder { who: format!("process {} on {machine}", std::process::id()), doing: doing.to_string() };
        let text = serde_json::to_vec(&holder).expect("two strings");
        store.put(&name, &text)?;
        let mut lock = Lock { store: store.clone(), name, taken_ms: 0, end: None, refreshing: None };
        lock.taken_ms = lock.now_ms()?;
        lock.give_way(kind)?;
        let (end, ended) = channel();
        let (store, name) = (store.clone(), lock.name.clone());
        lock.end = Some(end);
        lock.refreshing = Some(std::thread::spawn(move || {
            while ended.recv_timeout(REFRESHED_EVERY) == Err(RecvTimeoutError::Timeout) {
                if !refresh(store.as_ref(), &name, &text) {
                    return;
                }
            }
        }));
        Ok(lock)
    }

    /// A shared one, for who only reads: where nothing can be written there is none, and nobody to be kept from deleting.
    ///
    /// # Errors
    /// [`Error::Busy`]: somebody deletes.
    pub fn to_read(store: &Arc<dyn Store>, doing: &str) -> Result<Option<Lock>> {
        match Lock::take(store, Kind::Shared, doing) {
            Ok(lock) => Ok(Some(lock)),
            Err(Error::Store(_)) => Ok(None),
            Err(why) => Err(why),
        }
    }

    /// Others who are at work, unless they and we may be at it together.
    fn give_way(&self, kind: Kind) -> Result<()> {
        for other in self.store.list(FOLDER)? {
            let is_exclusive = other.name.starts_with(&format!("{FOLDER}/{}-", Kind::Exclusive.word()));
            if other.name == self.name || (kind == Kind::Shared && !is_exclusive) {
                continue;
            }
            if self.taken_ms.saturating_sub(other.written_ms) > STALE_MS {
                self.store.delete(&other.name)?;
                continue;
            }
            let Some(text) = self.store.get(&other.name)? else { continue };
            let holder = serde_json::from_slice(&text)
                .unwrap_or_else(|_| Holder { who: "somebody".to_string(), doing: "at work".to_string() });
            return Err(Error::Busy(format!(
                "{} is {} in the repository; try again when that is done (if it is dead, that counts for nothing ten \
                 minutes after it last was seen)",
                holder.who, holder.doing
            )));
        }
        Ok(())
    }

    /// The store's clock, when the lock was taken.
    pub fn taken_ms(&self) -> u64 {
        self.taken_ms
    }

    /// The store's clock, as the lock has it.
    fn now_ms(&self) -> Result<u64> {
        self.held().map(|found| found.written_ms)
    }

    fn held(&self) -> Result<crate::store::Listed> {
        let found = self.store.stat(&self.name)?;
        found.ok_or_else(|| {
            Error::Busy(
                "the repository was out of reach for so long that somebody else went to work there; run it again"
                    .to_string(),
            )
        })
    }

    /// # Errors
    /// [`Error::Busy`]: it was taken away.
    pub fn check(&self) -> Result<()> {
        self.held().map(drop)
    }
}

/// Whether to go on. One that somebody took away does not come back; a store that is away may.
fn refresh(store: &dyn Store, name: &str, text: &[u8]) -> bool {
    let begun = awake_ms();
    match store.stat(name) {
        Ok(None) => return false,
        Ok(Some(_)) => drop(store.put(name, text)),
        Err(_) => return true,
    }
    // Between the two it may have been taken away, if this process stood still for so long.
    let is_late = awake_ms() - begun > STALE_MS / 2;
    if is_late {
        let _ = store.delete(name);
    }
    !is_late
}

/// Of a clock that goes on while the machine sleeps.
fn awake_ms() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

impl Drop for Lock {
    fn drop(&mut self) {
        self.end.take();
        if let Some(refreshing) = self.refreshing.take() {
            let _ = refreshing.join();
        }
        // One that stays is nobody's in ten minutes.
        let _ = self.store.delete(&self.name);
    }
}
