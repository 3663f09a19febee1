//! A part of a file, read at offsets.

use crate::{Error, Result};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

#[derive(Debug)]
pub struct Window {
    file: File,
    start: u64,
    pub len: u64,
}

impl Window {
    pub fn whole(path: &Path) -> Result<Window> {
        let file = File::open(path)?;
        let len = rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0)).map_err(std::io::Error::from)?;
        Ok(Window { file, start: 0, len })
    }

    pub fn part(file: File, start: u64, len: u64) -> Window {
        Window { file, start, len }
    }

    /// # Errors
    /// It reaches beyond the end.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let end = offset.checked_add(into.len() as u64).filter(|end| *end <= self.len);
        if end.is_none() {
            return Err(Error::damaged(format!("something is to be at {offset}, and the file ends at {}", self.len)));
        }
        Ok(self.file.read_exact_at(into, self.start + offset)?)
    }

    /// Whether the bytes from `offset` on are a hole of the file, and how many are alike.
    pub fn extent(&self, offset: u64) -> Result<(u64, bool)> {
        let at = self.start + offset;
        let end = self.start + self.len;
        let seek = |to| match rustix::fs::seek(&self.file, to) {
            Ok(found) => Ok(found.min(end)),
            // There is none up to the end.
            Err(rustix::io::Errno::NXIO) => Ok(end),
            Err(error) => Err(std::io::Error::from(error)),
        };
        let data = match seek(rustix::fs::SeekFrom::Data(at)) {
            // Of a block device, say, nobody can tell.
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::INVAL.raw_os_error()) => {
                return Ok((self.len - offset, true));
            }
            other => other?,
        };
        match data {
            data if data > at => Ok((data - at, false)),
            _ => Ok((seek(rustix::fs::SeekFrom::Hole(at))?.max(at + 1) - at, true)),
        }
    }
}
