//! Key files: of encrypted repositories, in the form of those of volumes.

use crate::{Error, Result};
use holdfast_cipher::{BackupKey, Secret};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// 32 bytes, or 64 hexadecimal digits, in a file that nobody else may read.
///
/// # Errors
/// It can't be read, or is no such file.
pub fn read(path: &Path) -> Result<BackupKey> {
    let shown = path.display();
    let found = path.metadata().map_err(|why| Error::Invalid(format!("cannot read key file {shown}: {why}")))?;
    if !found.is_file() {
        return Err(Error::Invalid(format!("key file {shown} is no regular file; name one that holds a key")));
    }
    if found.mode() & 0o077 != 0 {
        return Err(Error::Invalid(format!(
            "key file {shown} can be read by others (mode {:03o}); `chmod 600 {shown}`, or better make a new key",
            found.mode() & 0o777
        )));
    }
    let text = std::fs::read(path).map_err(|why| Error::Invalid(format!("cannot read key file {shown}: {why}")))?;
    let secret = Secret::parse(&text).ok_or_else(|| {
        let bytes = text.len();
        Error::Invalid(format!(
            "key file {shown} holds no key: a key is 32 bytes, or 64 hexadecimal digits, and this is neither ({bytes} \
             bytes); `(umask 077; openssl rand -hex 32 > FILE)` makes one"
        ))
    })?;
    Ok(BackupKey::new(&secret))
}
