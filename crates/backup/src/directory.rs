//! A repository in a directory: local, or of a file server.
//!
//! Invariants
//! 1. A name is there with all of its bytes, on the medium, or not at all: a file is written under another name in the same
//!    folder, synced and renamed. Names that begin with a dot are no objects.
//! 2. Nothing outside the directory is touched.

use crate::store::{Listed, OBJECT_BYTES_MAX, Store};
use crate::{Error, Result};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

/// Of files that are being written. One that stays longer was left behind.
const ASIDE: &str = ".";
const LEFT_BEHIND: Duration = Duration::from_secs(86_400);

/// Only the owner reads backups.
const MODE: u32 = 0o600;

pub struct Directory {
    root: PathBuf,
    /// Directories of which names that came or went may not outlive a loss of power.
    unsettled: Mutex<BTreeSet<PathBuf>>,
}

impl Directory {
    /// # Errors
    /// It is not there.
    pub fn open(root: &Path) -> Result<Directory> {
        let found = fs::metadata(root).map_err(|why| match why.kind() {
            ErrorKind::NotFound => Error::NotFound(format!(
                "there is no directory {0}: mount it, or make it (`mkdir -p {0}`)",
                root.display()
            )),
            _ => Error::store(root.display(), why),
        })?;
        if !found.is_dir() {
            return Err(Error::Invalid(format!("{} is no directory; backups go to one", root.display())));
        }
        Ok(Directory { root: root.to_path_buf(), unsettled: Mutex::default() })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// The bytes in a file of their own, and the path that they are to have.
    fn write_aside(&self, name: &str, bytes: &[u8]) -> Result<(PathBuf, PathBuf)> {
        let path = self.path(name);
        let folder = path.parent().unwrap_or(&self.root).to_path_buf();
        let attempt = || -> std::io::Result<PathBuf> {
            if !folder.is_dir() {
                fs::create_dir_all(&folder)?;
                self.touched(folder.parent().unwrap_or(&self.root).to_path_buf());
            }
            let file = folder.join(format!("{ASIDE}{}", uuid::Uuid::new_v4()));
            let write = |file: &Path| {
                let mut open = OpenOptions::new().write(true).create_new(true).mode(MODE).open(file)?;
                open.write_all(bytes)?;
                open.sync_all()
            };
            write(&file).inspect_err(|_| drop(fs::remove_file(&file)))?;
            Ok(file)
        };
        let written = attempt().map_err(|why| Error::store(format_args!("cannot write {}", path.display()), why))?;
        self.touched(folder);
        Ok((written, path))
    }

    fn touched(&self, folder: PathBuf) {
        self.unsettled.lock().expect("nobody panics with it").insert(folder);
    }

    /// Files below a folder.
    fn walk(&self, folder: &Path, into: &mut Vec<Listed>) -> std::io::Result<()> {
        let entries = match fs::read_dir(self.root.join(folder)) {
            Err(why) if why.kind() == ErrorKind::NotFound => return Ok(()),
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            let name = folder.join(entry.file_name());
            if is_aside(&entry) {
                continue;
            }
            // One that is deleted meanwhile is none.
            let found = match entry.metadata() {
                Err(why) if why.kind() == ErrorKind::NotFound => continue,
                found => found?,
            };
            match (found.is_dir(), name.to_str()) {
                (true, _) => self.walk(&name, into)?,
                (false, Some(name)) if found.is_file() => into.push(listed(name, &found)),
                _ => {}
            }
        }
        Ok(())
    }
}

fn is_aside(entry: &fs::DirEntry) -> bool {
    entry.file_name().as_encoded_bytes().starts_with(ASIDE.as_bytes())
}

/// What a bad sector or a damaged file system says of a file: others may well be read.
fn is_of_one_file(why: &std::io::Error) -> bool {
    let of = why.raw_os_error().map(Errno::from_raw_os_error);
    of.is_some_and(|of| [Errno::IO, Errno::BADMSG, Errno::UCLEAN, Errno::LOOP, Errno::ISDIR].contains(&of))
}

fn listed(name: &str, found: &fs::Metadata) -> Listed {
    let written_ms = found.mtime().max(0) as u64 * 1000 + found.mtime_nsec() as u64 / 1_000_000;
    Listed { name: name.to_string(), bytes: found.len(), written_ms }
}

impl Store for Directory {
    fn put(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let (aside, path) = self.write_aside(name, bytes)?;
        fs::rename(&aside, &path).map_err(|why| Error::store(format_args!("cannot write {}", path.display()), why))
    }

    fn put_new(&self, name: &str, bytes: &[u8]) -> Result<bool> {
        let (aside, path) = self.write_aside(name, bytes)?;
        let linked = fs::hard_link(&aside, &path);
        let outcome = match linked.as_ref().map_err(std::io::Error::kind) {
            Ok(()) => Ok(true),
            Err(ErrorKind::AlreadyExists) => Ok(false),
            // A file system without links: two at the same instant are not told apart there.
            Err(_) if path.exists() => Ok(false),
            Err(_) => return fs::rename(&aside, &path).map(|()| true).map_err(|why| Error::store(path.display(), why)),
        };
        fs::remove_file(&aside).map_err(|why| Error::store(aside.display(), why))?;
        outcome
    }

    fn get(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let path = self.path(name);
        let mut bytes = Vec::new();
        let read = File::open(&path).and_then(|file| {
            bytes.reserve_exact(file.metadata()?.len().min(OBJECT_BYTES_MAX) as usize + 1);
            file.take(OBJECT_BYTES_MAX).read_to_end(&mut bytes)
        });
        match read {
            Ok(_) => Ok(Some(bytes)),
            Err(why) if why.kind() == ErrorKind::NotFound => Ok(None),
            Err(why) if is_of_one_file(&why) => Err(Error::Damaged(format!("{} can't be read: {why}", path.display()))),
            Err(why) => Err(Error::store(format_args!("cannot read {}", path.display()), why)),
        }
    }

    fn stat(&self, name: &str) -> Result<Option<Listed>> {
        let path = self.path(name);
        match fs::metadata(&path) {
            Ok(found) => Ok(Some(listed(name, &found))),
            Err(why) if why.kind() == ErrorKind::NotFound => Ok(None),
            Err(why) => Err(Error::store(format_args!("cannot look at {}", path.display()), why)),
        }
    }

    fn list(&self, folder: &str) -> Result<Vec<Listed>> {
        let mut found = Vec::new();
        let walked = self.walk(Path::new(folder), &mut found);
        walked.map_err(|why| Error::store(format_args!("cannot list {}", self.path(folder).display()), why))?;
        Ok(found)
    }

    fn delete(&self, name: &str) -> Result<()> {
        let path = self.path(name);
        self.touched(path.parent().unwrap_or(&self.root).to_path_buf());
        match fs::remove_file(&path) {
            Err(why) if why.kind() != ErrorKind::NotFound => {
                Err(Error::store(format_args!("cannot delete {}", path.display()), why))
            }
            _ => Ok(()),
        }
    }

    fn sweep(&self, folder: &str) -> Result<()> {
        let entries = match fs::read_dir(self.path(folder)) {
            Err(why) if why.kind() == ErrorKind::NotFound => return Ok(()),
            entries => entries.map_err(|why| Error::store(self.path(folder).display(), why))?,
        };
        for entry in entries.flatten().filter(is_aside) {
            let written = entry.metadata().and_then(|found| found.modified()).ok();
            let age = written.and_then(|written| SystemTime::now().duration_since(written).ok());
            if age.is_some_and(|age| age > LEFT_BEHIND) {
                fs::remove_file(entry.path()).map_err(|why| Error::store(entry.path().display(), why))?;
            }
        }
        Ok(())
    }

    fn check_vacant(&self) -> Result<()> {
        let entries = fs::read_dir(&self.root).map_err(|why| Error::store(self.root.display(), why))?;
        let mut names = entries.filter_map(|entry| Some(entry.ok()?.file_name()));
        match names.find(|name| name != "lost+found") {
            None => Ok(()),
            Some(name) => Err(Error::Invalid(format!(
                "{0} has other things in it ({1}); make an empty directory for backups: `mkdir {0}/holdfast`",
                self.root.display(),
                name.display()
            ))),
        }
    }

    fn settle(&self) -> Result<()> {
        let folders = std::mem::take(&mut *self.unsettled.lock().expect("nobody panics with it"));
        for folder in folders {
            let synced = File::open(&folder).and_then(|open| open.sync_all());
            synced.map_err(|why| Error::store(format_args!("cannot sync {}", folder.display()), why))?;
        }
        Ok(())
    }
}
