//! Operations on devices: many in flight on each, short transfers finished, errors typed.
//!
//! States of an operation: in flight -> done, or in flight again for the rest of a short transfer. Nothing is queued here:
//! what a device gets, and in which order, is the application's to decide.
//!
//! Invariants
//! 1. The memory of an operation in flight belongs to it until its completion.
//! 2. A device is closed when it was removed, and nothing of it is in flight.
//!
//! Limits: [`OPS_MAX`] operations in all; more is a bug of the application, which must bound its own.
//!
//! Faults: a device that fails is the application's to exclude; nothing is retried here except interrupted calls.

use super::ring::{Completion, Kind, Ring};
use super::table::{Table, index_of};
use super::{DeviceSlot, DiskToken, Event};
use crate::device::{ALIGN_BYTES, Device};
use holdfast_base::{Buf, BufMut};
use io_uring::{opcode, squeue, types};
use std::fmt;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Operations in flight over all devices of a reactor: a few thousand devices with some dozen each. Memory is taken for those
/// that there are.
const OPS_MAX: usize = 1 << 18;

/// Parts of one vectored write (the kernel's own limit).
const IOVECS_MAX: usize = 1024;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DiskVerb {
    Read,
    Write,
    Flush,
    Discard,
}

/// Why an operation failed, by what its owner must do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DiskFault {
    /// Beyond the end of the device, or the device has become smaller.
    OutOfRange,
    /// The file system below a file has no room left (holes of discarded ranges need it again).
    NoSpace,
    /// The media or its controller failed, with this error number: a read is repaired, a failed write or flush
    /// excludes the device.
    Media(i32),
}

#[derive(Debug, Error)]
#[error("{verb} of {len} bytes at {offset} on {path}: {fault}")]
pub struct DiskError {
    pub verb: DiskVerb,
    pub offset: u64,
    pub len: u64,
    pub path: PathBuf,
    pub fault: DiskFault,
}

impl fmt::Display for DiskVerb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DiskVerb::Read => "read",
            DiskVerb::Write => "write",
            DiskVerb::Flush => "flush",
            DiskVerb::Discard => "discard",
        })
    }
}

impl fmt::Display for DiskFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DiskFault::OutOfRange => f.write_str("beyond the end of the device"),
            DiskFault::NoSpace => f.write_str("the file system below has no space left"),
            DiskFault::Media(errno) => std::io::Error::from_raw_os_error(*errno).fmt(f),
        }
    }
}

enum Work {
    Read(BufMut),
    /// `_memory` is what the vectors point to.
    Write {
        _memory: Vec<Buf>,
        iovecs: Vec<libc::iovec>,
        next: usize,
        durable: bool,
    },
    Flush,
    Discard,
}

struct Op {
    slot: DeviceSlot,
    token: DiskToken,
    offset: u64,
    len: u64,
    done: u64,
    work: Work,
}

impl Op {
    fn verb(&self) -> DiskVerb {
        match self.work {
            Work::Read(_) => DiskVerb::Read,
            Work::Write { .. } => DiskVerb::Write,
            Work::Flush => DiskVerb::Flush,
            Work::Discard => DiskVerb::Discard,
        }
    }

    /// What is left of the operation, for the kernel.
    fn entry(&mut self, fd: types::Fd) -> squeue::Entry {
        let at = self.offset + self.done;
        let len = (self.len - self.done).min(1 << 30) as u32;
        match &mut self.work {
            Work::Read(buf) => opcode::Read::new(fd, buf[self.done as usize..].as_mut_ptr(), len).offset(at).build(),
            Work::Write { iovecs, next, durable, .. } => {
                let flags = if *durable { libc::RWF_DSYNC } else { 0 };
                let rest = &iovecs[*next..];
                if let [one] = rest {
                    let len = one.iov_len as u32;
                    opcode::Write::new(fd, one.iov_base.cast(), len).offset(at).rw_flags(flags).build()
                } else {
                    let count = rest.len().min(IOVECS_MAX) as u32;
                    opcode::Writev::new(fd, rest.as_ptr(), count).offset(at).rw_flags(flags).build()
                }
            }
            Work::Flush => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
            Work::Discard => {
                let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                opcode::Fallocate::new(fd, u64::from(len)).offset(at).mode(mode).build()
            }
        }
    }

    fn advance(&mut self, mut count: usize) {
        self.done += count as u64;
        assert!(self.done <= self.len, "{} bytes done of {}", self.done, self.len);
        if let Work::Write { iovecs, next, .. } = &mut self.work {
            while count > 0 {
                let iovec = &mut iovecs[*next];
                let step = count.min(iovec.iov_len);
                iovec.iov_len -= step;
                iovec.iov_base = iovec.iov_base.wrapping_byte_add(step);
                count -= step;
                *next += usize::from(iovec.iov_len == 0);
            }
        }
    }

    fn finish(self, path: &Path, result: Result<(), DiskFault>) -> Event<'static> {
        let (verb, offset, len, token) = (self.verb(), self.offset, self.len, self.token);
        let result = result.map_err(|fault| DiskError { verb, offset, len, path: path.into(), fault });
        match self.work {
            Work::Read(buf) => Event::Read { token, result: result.map(|()| buf.freeze()) },
            Work::Write { .. } | Work::Flush => Event::Written { token, result },
            Work::Discard => Event::Discarded { token, result },
        }
    }
}

struct Disk {
    device: Device,
    in_flight: usize,
    removed: bool,
}

pub(super) struct Disks {
    disks: Vec<Option<Disk>>,
    ops: Table<Op>,
}

impl Disks {
    pub(super) fn new() -> Disks {
        Disks { disks: Vec::new(), ops: Table::new(OPS_MAX) }
    }

    /// Operations in flight.
    pub(super) fn in_flight(&self) -> usize {
        self.ops.len()
    }

    pub(super) fn add(&mut self, device: Device) -> DeviceSlot {
        let disk = Disk { device, in_flight: 0, removed: false };
        let index = self.disks.iter().position(Option::is_none).unwrap_or(self.disks.len());
        if index == self.disks.len() {
            self.disks.push(None);
        }
        self.disks[index] = Some(disk);
        DeviceSlot(index as u32)
    }

    fn disk(&mut self, slot: DeviceSlot) -> &mut Disk {
        self.disks[slot.0 as usize].as_mut().expect("a slot is used only while its device is there")
    }

    pub(super) fn device(&self, slot: DeviceSlot) -> &Device {
        &self.disks[slot.0 as usize].as_ref().expect("a slot is used only while its device is there").device
    }

    /// Lets what is in flight end, then closes the device.
    pub(super) fn remove(&mut self, slot: DeviceSlot) {
        self.disk(slot).removed = true;
        self.close_if_drained(slot);
    }

    fn close_if_drained(&mut self, slot: DeviceSlot) {
        let disk = self.disk(slot);
        if disk.removed && disk.in_flight == 0 {
            self.disks[slot.0 as usize] = None;
        }
    }

    pub(super) fn read(
        &mut self,
        ring: &mut Ring,
        slot: DeviceSlot,
        offset: u64,
        len: usize,
        token: DiskToken,
    ) -> Option<Event<'static>> {
        let work = Work::Read(BufMut::new(len));
        self.start(ring, Op { slot, token, offset, len: len as u64, done: 0, work })
    }

    pub(super) fn write(
        &mut self,
        ring: &mut Ring,
        slot: DeviceSlot,
        offset: u64,
        bufs: Vec<Buf>,
        durable: bool,
        token: DiskToken,
    ) -> Option<Event<'static>> {
        let mut iovecs = Vec::with_capacity(bufs.len());
        let mut len = 0;
        for buf in &bufs {
            let address = buf.as_ptr();
            assert!((address as u64).is_multiple_of(ALIGN_BYTES), "a write from unaligned memory");
            assert!((buf.len() as u64).is_multiple_of(ALIGN_BYTES) && !buf.is_empty(), "a part of {} bytes", buf.len());
            iovecs.push(libc::iovec { iov_base: address.cast_mut().cast(), iov_len: buf.len() });
            len += buf.len() as u64;
        }
        let work = Work::Write { _memory: bufs, iovecs, next: 0, durable };
        self.start(ring, Op { slot, token, offset, len, done: 0, work })
    }

    pub(super) fn flush(&mut self, ring: &mut Ring, slot: DeviceSlot, token: DiskToken) -> Option<Event<'static>> {
        self.start(ring, Op { slot, token, offset: 0, len: 0, done: 0, work: Work::Flush })
    }

    pub(super) fn discard(
        &mut self,
        ring: &mut Ring,
        slot: DeviceSlot,
        offset: u64,
        len: u64,
        token: DiskToken,
    ) -> Option<Event<'static>> {
        self.start(ring, Op { slot, token, offset, len, done: 0, work: Work::Discard })
    }

    /// Sends the operation to the kernel. An operation that can't start is answered at once.
    fn start(&mut self, ring: &mut Ring, op: Op) -> Option<Event<'static>> {
        assert!(op.offset.is_multiple_of(ALIGN_BYTES), "{} at offset {}", op.verb(), op.offset);
        let is_sized = op.len > 0 || matches!(op.work, Work::Flush);
        assert!(op.len.is_multiple_of(ALIGN_BYTES) && is_sized, "{} of {} bytes", op.verb(), op.len);
        let disk = self.disk(op.slot);
        assert!(!disk.removed, "{} on a device that was removed", op.verb());
        if op.offset.checked_add(op.len).is_none_or(|end| end > disk.device.size_bytes()) {
            return Some(op.finish(disk.device.path(), Err(DiskFault::OutOfRange)));
        }
        disk.in_flight += 1;
        let index = index_of(self.ops.insert(op));
        self.submit(ring, index);
        None
    }

    fn submit(&mut self, ring: &mut Ring, index: u32) {
        let slot = self.ops.at(index).slot;
        let fd = types::Fd(self.device(slot).raw_fd());
        let entry = self.ops.at(index).entry(fd).user_data(Kind::Disk.tag(index));
        // SAFETY: the buffers and vectors are on the heap, owned by the operation, which stays in the table until
        // `on_complete` sees its completion.
        unsafe { ring.push(entry) };
    }

    pub(super) fn on_complete(&mut self, ring: &mut Ring, completion: Completion) -> Option<Event<'static>> {
        let index = completion.index;
        let op = self.ops.at(index);
        let result = match completion.outcome() {
            Ok(_) if matches!(op.work, Work::Discard) => {
                op.advance((op.len - op.done).min(1 << 30) as usize);
                Ok(())
            }
            Ok(_) if matches!(op.work, Work::Flush) => Ok(()),
            // The end of a file that has become shorter.
            Ok(0) => Err(DiskFault::OutOfRange),
            Ok(count) => {
                op.advance(count);
                Ok(())
            }
            Err(e) => match e.raw_os_error().unwrap_or(libc::EIO) {
                libc::EINTR | libc::EAGAIN if matches!(op.work, Work::Flush) => {
                    self.submit(ring, index);
                    return None;
                }
                libc::EINTR | libc::EAGAIN => Ok(()),
                // Discarding is a hint: where the media has no such thing, nothing happens.
                libc::EOPNOTSUPP if matches!(op.work, Work::Discard) => {
                    op.done = op.len;
                    Ok(())
                }
                libc::ENOSPC | libc::EDQUOT => Err(DiskFault::NoSpace),
                errno => Err(DiskFault::Media(errno)),
            },
        };
        if result.is_ok() && op.done < op.len {
            self.submit(ring, index);
            return None;
        }
        let op = self.ops.remove_at(index);
        let slot = op.slot;
        let event = op.finish(self.device(slot).path(), result);
        self.disk(slot).in_flight -= 1;
        self.close_if_drained(slot);
        Some(event)
    }
}
