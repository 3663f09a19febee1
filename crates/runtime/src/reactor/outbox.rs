//! The send queue of one connection: everything queued during a batch leaves in one system call.
//!
//! Invariants
//! 1. While a send is in flight, nothing it points to is touched: new bytes gather in a second set of parts.
//! 2. Bytes leave in the order they were queued.
//!
//! Limits: one send in flight with at most [`IOVECS_MAX`] parts; the queue behind it is bounded by the reactor
//! (`Config::unsent_bytes_max`).

use holdfast_base::Buf;
use io_uring::{opcode, squeue, types};
use std::os::fd::RawFd;

/// Parts of one send: 32 replies with payload; more gains nothing and delays the release of buffers.
const IOVECS_MAX: usize = 64;

/// Payloads up to this size are copied next to their header: cheaper than a part of their own.
const COPY_BYTES_MAX: usize = 1024;

/// Memory for small messages that an outbox keeps while it is empty.
const STAGED_BYTES_KEPT: usize = 256 * 1024;

enum Part {
    /// The next so many bytes of `staged`.
    Staged(usize),
    Vec(Vec<u8>),
    Buf(Buf),
}

#[derive(Default)]
struct Parts {
    staged: Vec<u8>,
    parts: Vec<Part>,
}

impl Parts {
    fn clear(&mut self) {
        self.parts.clear();
        self.staged.clear();
        self.staged.shrink_to(STAGED_BYTES_KEPT);
    }
}

pub(super) struct Outbox {
    queued: Parts,
    queued_bytes: usize,
    flight: Parts,
    /// What the kernel reads while a send is in flight: `iovecs[next..]`, through `header`.
    iovecs: Vec<libc::iovec>,
    next: usize,
    flight_bytes: usize,
    header: Box<libc::msghdr>,
}

impl Outbox {
    pub(super) fn new() -> Outbox {
        // SAFETY: a zeroed msghdr is valid: no name, no parts, no control data.
        let header = Box::new(unsafe { std::mem::zeroed::<libc::msghdr>() });
        Outbox {
            queued: Parts::default(),
            queued_bytes: 0,
            flight: Parts::default(),
            iovecs: Vec::new(),
            next: 0,
            flight_bytes: 0,
            header,
        }
    }

    /// Bytes that the kernel has not taken yet.
    pub(super) fn unsent_bytes(&self) -> usize {
        self.queued_bytes + self.flight_bytes
    }

    pub(super) fn push_slice(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        self.queued_bytes += bytes.len();
        self.queued.staged.extend_from_slice(bytes);
        if let Some(Part::Staged(len)) = self.queued.parts.last_mut() {
            *len += bytes.len();
        } else {
            self.queued.parts.push(Part::Staged(bytes.len()));
        }
    }

    pub(super) fn push_vec(&mut self, bytes: Vec<u8>) {
        if bytes.len() <= COPY_BYTES_MAX {
            return self.push_slice(&bytes);
        }
        self.queued_bytes += bytes.len();
        self.queued.parts.push(Part::Vec(bytes));
    }

    pub(super) fn push_buf(&mut self, bytes: Buf) {
        if bytes.len() <= COPY_BYTES_MAX {
            return self.push_slice(&bytes);
        }
        self.queued_bytes += bytes.len();
        self.queued.parts.push(Part::Buf(bytes));
    }

    /// Drops what has not been given to the kernel.
    pub(super) fn discard_queued(&mut self) {
        self.queued.clear();
        self.queued_bytes = 0;
    }

    /// The next send, if there is anything to send. Called only while none is in flight; the caller submits the entry
    /// and keeps `self` (at any address: all that the kernel sees is on the heap) until it completes.
    pub(super) fn next_send(&mut self, fd: RawFd, user_data: u64) -> Option<squeue::Entry> {
        if self.flight_bytes == 0 {
            if self.queued_bytes == 0 {
                return None;
            }
            self.start_flight();
        }
        let window = &mut self.iovecs[self.next..];
        let flags = libc::MSG_NOSIGNAL | libc::MSG_WAITALL;
        let entry = if let [one] = window {
            // Longer than a send can say: the rest goes with the next one.
            let len = u32::try_from(one.iov_len).unwrap_or(1 << 30);
            opcode::Send::new(types::Fd(fd), one.iov_base.cast(), len).flags(flags).build()
        } else {
            self.header.msg_iov = window.as_mut_ptr();
            self.header.msg_iovlen = window.len().min(IOVECS_MAX);
            opcode::SendMsg::new(types::Fd(fd), &raw const *self.header).flags(flags as u32).build()
        };
        Some(entry.user_data(user_data))
    }

    fn start_flight(&mut self) {
        assert!(self.flight.parts.is_empty() && self.queued_bytes > 0, "one flight at a time");
        std::mem::swap(&mut self.flight, &mut self.queued);
        self.flight_bytes = std::mem::take(&mut self.queued_bytes);
        self.iovecs.clear();
        self.next = 0;
        let mut staged = self.flight.staged.as_slice();
        for part in &self.flight.parts {
            let bytes: &[u8] = match part {
                Part::Staged(len) => {
                    let (head, tail) = staged.split_at(*len);
                    staged = tail;
                    head
                }
                Part::Vec(bytes) => bytes,
                Part::Buf(bytes) => bytes,
            };
            self.iovecs.push(libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() });
        }
        assert!(staged.is_empty(), "every staged byte belongs to a part");
    }

    /// The kernel has taken `count` bytes of the send in flight.
    pub(super) fn on_sent(&mut self, mut count: usize) {
        assert!(count <= self.flight_bytes, "{count} bytes sent of {}", self.flight_bytes);
        self.flight_bytes -= count;
        while count > 0 {
            let iovec = &mut self.iovecs[self.next];
            let step = count.min(iovec.iov_len);
            iovec.iov_len -= step;
            // A raw address moves on within its allocation, or to its end.
            iovec.iov_base = iovec.iov_base.wrapping_byte_add(step);
            count -= step;
            if iovec.iov_len == 0 {
                self.next += 1;
            }
        }
        if self.flight_bytes == 0 {
            self.flight.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flight(outbox: &Outbox) -> Vec<u8> {
        let mut all = Vec::new();
        for iovec in &outbox.iovecs[outbox.next..] {
            // SAFETY: built from live parts of the outbox under test.
            all.extend_from_slice(unsafe { std::slice::from_raw_parts(iovec.iov_base.cast::<u8>(), iovec.iov_len) });
        }
        all
    }

    #[test]
    fn short_sends_resume_where_they_stopped_and_new_bytes_wait_their_turn() {
        let mut outbox = Outbox::new();
        outbox.push_slice(b"head");
        outbox.push_vec(vec![7; 2000]);
        outbox.push_buf(Buf::copy_from(b"small"));
        outbox.push_slice(b"!");
        let mut want = b"head".to_vec();
        want.extend([7; 2000]);
        want.extend(b"small!");
        assert!(outbox.next_send(0, 0).is_some());
        assert_eq!(outbox.iovecs.len(), 3);
        assert_eq!(flight(&outbox), want);
        outbox.push_slice(b"later");
        assert_eq!(outbox.unsent_bytes(), 2015);
        outbox.on_sent(1004);
        assert!(outbox.next_send(0, 0).is_some());
        assert_eq!(flight(&outbox), want[1004..]);
        outbox.on_sent(1006);
        assert!(outbox.next_send(0, 0).is_some());
        assert_eq!(flight(&outbox), b"later");
        outbox.on_sent(5);
        assert_eq!(outbox.unsent_bytes(), 0);
        assert!(outbox.next_send(0, 0).is_none());
    }
}
