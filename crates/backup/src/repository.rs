//! A repository: what it says of itself, and its objects under their names.

use crate::object::{HEAD_BYTES, Name, name_of, open, seal};
use crate::store::{Store, store};
use crate::{CHUNK_BYTES, Error, Result};
use holdfast_cipher::BackupKey;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

const FORMAT: u16 = 1;
const ABOUT: &str = "repository.json";

/// `repository.json`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct About {
    pub format: u16,
    pub id: String,
    pub made_ms: u64,
    pub chunk_bytes: u64,
    /// Of the key that it is encrypted with.
    pub key: Option<String>,
}

pub struct Repository {
    pub(crate) store: Arc<dyn Store>,
    place: String,
    about: About,
    pub(crate) key: Option<BackupKey>,
}

/// Shown of a repository's key.
fn id_of(key: &BackupKey) -> String {
    format!("{:032x}", key.id())
}

/// Since 1970, by this machine's clock.
pub fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

/// `YYYYMMDD-HHMMSS`, in UTC, of milliseconds since 1970.
pub fn stamp(ms: u64) -> String {
    let at = i64::try_from(ms).ok().and_then(|ms| jiff::Timestamp::from_millisecond(ms).ok());
    at.unwrap_or(jiff::Timestamp::UNIX_EPOCH).strftime("%Y%m%d-%H%M%S").to_string()
}

impl Repository {
    /// Makes one in an empty place, for good with that key or without.
    ///
    /// # Errors
    /// There is one already, or something else; the store refuses.
    pub fn init(place: &str, key: Option<BackupKey>) -> Result<Repository> {
        let store: Arc<dyn Store> = store(place)?.into();
        if store.get(ABOUT)?.is_some() {
            return Err(Error::Exists(format!(
                "{place} is a repository already; `holdfast backup list` shows what it has"
            )));
        }
        store.check_vacant()?;
        let about = About {
            format: FORMAT,
            id: uuid::Uuid::new_v4().to_string(),
            made_ms: now_ms(),
            chunk_bytes: CHUNK_BYTES,
            key: key.as_ref().map(id_of),
        };
        let text = serde_json::to_vec_pretty(&about).expect("plain fields");
        // A request that was asked twice finds its own.
        if !store.put_new(ABOUT, &text)? && store.get(ABOUT)?.as_deref() != Some(&text[..]) {
            return Err(Error::Exists(format!("somebody made a repository of {place} at this moment")));
        }
        store.settle()?;
        Ok(Repository { store, place: place.to_string(), about, key })
    }

    /// # Errors
    /// There is none, it is of a later release, or the key is not its own.
    pub fn open(place: &str, key: Option<BackupKey>) -> Result<Repository> {
        let store: Arc<dyn Store> = store(place)?.into();
        let Some(text) = store.get(ABOUT)? else {
            return Err(Error::NotFound(format!(
                "{place} is no repository of backups: is what belongs there mounted? `holdfast backup init {place}` makes \
                 a new one"
            )));
        };
        let about: About = serde_json::from_slice(&text)
            .map_err(|why| Error::Damaged(format!("{ABOUT} of {place} makes no sense: {why}")))?;
        if about.format != FORMAT || about.chunk_bytes != CHUNK_BYTES {
            return Err(Error::Invalid(format!(
                "{place} has format {} and chunks of {} bytes, of a later release; this one reads format {FORMAT}",
                about.format, about.chunk_bytes
            )));
        }
        match (&about.key, &key) {
            (None, Some(_)) => Err(Error::Invalid(format!("{place} is not encrypted; leave --key-file away"))),
            (Some(_), None) => {
                Err(Error::Invalid(format!("{place} is encrypted; name the file with its key by --key-file")))
            }
            (Some(wanted), Some(key)) if *wanted != id_of(key) => {
                Err(Error::Invalid(format!("{place} is encrypted with another key (its id is {wanted})")))
            }
            _ => Ok(Repository { store, place: place.to_string(), about, key }),
        }
    }

    pub fn about(&self) -> &About {
        &self.about
    }

    /// As it was named.
    pub fn place(&self) -> &str {
        &self.place
    }

    /// The bytes of a chunk, or of a page.
    ///
    /// # Errors
    /// It is not there, or damaged.
    pub fn chunk(&self, name: &Name) -> Result<Vec<u8>> {
        let object = self.store.get(&name.chunk())?;
        let object = object.ok_or_else(|| Error::Damaged(format!("object {name} is missing")))?;
        open(self.key.as_ref(), name, object)
    }

    /// Stores a chunk unless it is there; gives its name, and how many bytes that took. `is_doubtful` tells of chunks that
    /// are stored in any case; `object` is memory for it.
    ///
    /// # Errors
    /// The store does not take it.
    pub(crate) fn put_chunk(
        &self,
        plain: &[u8],
        is_doubtful: &dyn Fn(&Name) -> bool,
        object: &mut Vec<u8>,
    ) -> Result<(Name, u64)> {
        let name = name_of(self.key.as_ref(), plain);
        let at = name.chunk();
        if !is_doubtful(&name) && self.store.stat(&at)?.is_some_and(|found| found.bytes >= HEAD_BYTES as u64) {
            return Ok((name, 0));
        }
        seal(self.key.as_ref(), &name, plain, object);
        self.store.put(&at, object)?;
        Ok((name, object.len() as u64))
    }
}
