//! Reading what is on a device, to see whose it is.

use anyhow::{Context, Result};
use holdfast_base::{BLOCK_BYTES, BufMut};
use holdfast_store::signatures::judge;
pub use holdfast_store::signatures::{HEAD_BYTES, Holding, TAIL_BYTES};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::path::Path;

/// Reads what is on the device; whose handle has it locked does not matter.
pub fn examine(path: &Path, size_bytes: u64) -> Result<Holding> {
    let fd = open_unlocked(path, OFlags::RDONLY)?;
    let head_bytes = (HEAD_BYTES as u64).min(size_bytes) as usize;
    let head = read(&fd, path, 0, head_bytes)?;
    let tail_offset = size_bytes.saturating_sub(TAIL_BYTES) / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
    let tail = read(&fd, path, tail_offset, (size_bytes - tail_offset) as usize)?;
    Ok(judge(&head, &tail, tail_offset, size_bytes))
}

/// The lock on the device is another handle's: the caller's, or nobody's.
pub fn open_unlocked(path: &Path, mode: OFlags) -> Result<OwnedFd> {
    let flags = mode | OFlags::CLOEXEC;
    match rustix::fs::open(path, flags | OFlags::DIRECT, Mode::empty()) {
        // Some file systems have no direct I/O.
        Err(Errno::INVAL) => rustix::fs::open(path, flags, Mode::empty()),
        other => other,
    }
    .with_context(|| format!("cannot open {}; check the path and its permissions", path.display()))
}

/// `len` bytes, less at the end of a device; the buffer is as direct I/O wants it.
fn read(fd: &OwnedFd, path: &Path, offset: u64, len: usize) -> Result<Vec<u8>> {
    let mut buffer = BufMut::zeroed(len.next_multiple_of(BLOCK_BYTES));
    let mut done = 0;
    while done < len {
        let count = rustix::io::pread(fd, &mut buffer[done..], offset + done as u64)
            .with_context(|| format!("cannot read {} at {offset}; check `dmesg`", path.display()))?;
        done += count;
        // The end of a file: what follows could not be read directly.
        if count == 0 || !count.is_multiple_of(BLOCK_BYTES) {
            break;
        }
    }
    Ok(buffer[..done.min(len)].to_vec())
}
