//! Where a repository lies: objects with names, in a directory or in a bucket.

use crate::{Directory, Error, Result, S3};
use std::path::Path;

/// An object is not larger: [`crate::CHUNK_BYTES`] and what goes with it, or a manifest.
pub const OBJECT_BYTES_MAX: u64 = 64 << 20;

/// An object as a store lists it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Listed {
    /// With its folder: `FOLDER/NAME`.
    pub name: String,
    pub bytes: u64,
    /// By the store's clock, in milliseconds since 1970.
    pub written_ms: u64,
}

/// Names are plain ASCII, with folders before a `/`. Whoever reads sees what was written before, by anybody.
pub trait Store: Send + Sync {
    /// Writes all of it or nothing, also in the place of what is there.
    ///
    /// # Errors
    /// As for all others: [`Error::Store`].
    fn put(&self, name: &str, bytes: &[u8]) -> Result<()>;

    /// As [`Self::put`], but `false` where there is one.
    fn put_new(&self, name: &str, bytes: &[u8]) -> Result<bool>;

    /// At most [`OBJECT_BYTES_MAX`]; nothing where there is none.
    ///
    /// # Errors
    /// [`Error::Damaged`], too: this one can't be read, and others may.
    fn get(&self, name: &str) -> Result<Option<Vec<u8>>>;

    fn stat(&self, name: &str) -> Result<Option<Listed>>;

    /// All of a folder, in no order.
    fn list(&self, folder: &str) -> Result<Vec<Listed>>;

    /// It is no error where there is none.
    fn delete(&self, name: &str) -> Result<()>;

    /// Takes away what writers that were cut off left in a folder a day ago.
    fn sweep(&self, folder: &str) -> Result<()>;

    /// # Errors
    /// [`Error::Invalid`]: something else lies there.
    fn check_vacant(&self) -> Result<()>;

    /// What was put and deleted before outlives a loss of power.
    fn settle(&self) -> Result<()>;
}

/// A directory, or `s3:https://HOST[:PORT]/BUCKET[/PREFIX]`, for which there are credentials in the environment.
///
/// # Errors
/// It is neither; the directory is not there.
pub fn store(place: &str) -> Result<Box<dyn Store>> {
    match place.strip_prefix("s3:") {
        Some(url) => Ok(Box::new(S3::open(url)?)),
        None if place.contains("://") => Err(Error::Invalid(format!(
            "`{place}` is no place for backups: name a directory, or s3:https://HOST/BUCKET/PREFIX"
        ))),
        None => Ok(Box::new(Directory::open(Path::new(place))?)),
    }
}
