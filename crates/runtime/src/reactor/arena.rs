//! Receive buffers that all connections of a reactor share: the kernel picks one when bytes arrive, so that an idle
//! connection costs none.
//!
//! Invariants
//! 1. A buffer belongs either to the kernel (it is in the ring) or to us (between its completion and
//!    [`Arena::give_back`]).
//!
//! Limits: `count` buffers of [`SLICE_BYTES`]. A receive that finds none fails with ENOBUFS and is repeated: buffers
//! come back while the same batch is handled.

use super::ring::Ring;
use io_uring::types::BufRingEntry;
use std::io;
use std::sync::atomic::{AtomicU16, Ordering};

/// Bytes one receive can take: eight 8 KiB requests, while the whole arena still fits the processor's cache.
pub(super) const SLICE_BYTES: usize = 64 * 1024;

/// The only buffer group of a reactor.
pub(super) const GROUP: u16 = 0;

const PAGE_BYTES: usize = 4096;

/// Buffers that fit the one page of the shared ring.
pub(super) const COUNT_MAX: u16 = (PAGE_BYTES / size_of::<BufRingEntry>()) as u16;

#[repr(C, align(4096))]
struct RingPage([u8; PAGE_BYTES]);

pub(super) struct Arena {
    page: *mut RingPage,
    memory: *mut u8,
    count: u16,
    tail: u16,
}

impl Arena {
    /// Allocates `count` buffers (a power of two) and hands them to `ring`.
    pub(super) fn new(ring: &Ring, count: u16) -> io::Result<Arena> {
        assert!(count.is_power_of_two() && count <= COUNT_MAX, "{count} receive buffers");
        let page = Box::into_raw(Box::new(RingPage([0; PAGE_BYTES])));
        let memory = Box::into_raw(vec![0_u8; SLICE_BYTES * usize::from(count)].into_boxed_slice()).cast::<u8>();
        let mut arena = Arena { page, memory, count, tail: 0 };
        // SAFETY: the page is freed only after the ring is gone (`Reactor` drops its ring first) or never.
        unsafe { ring.submitter().register_buf_ring_with_flags(page as u64, count, GROUP, 0)? };
        for id in 0..count {
            arena.give_back(id);
        }
        Ok(arena)
    }

    /// The first `len` bytes of the buffer that a completion named.
    pub(super) fn bytes(&mut self, id: u16, len: usize) -> &mut [u8] {
        assert!(id < self.count && len <= SLICE_BYTES, "the kernel named buffer {id} with {len} bytes");
        // SAFETY: within the allocation; the buffer is ours until given back, which needs `&mut self`.
        unsafe { std::slice::from_raw_parts_mut(self.memory.add(usize::from(id) * SLICE_BYTES), len) }
    }

    /// Returns buffer `id` to the kernel.
    pub(super) fn give_back(&mut self, id: u16) {
        let slot = usize::from(self.tail & (self.count - 1));
        let entries = self.page.cast::<BufRingEntry>();
        // SAFETY: `slot < count <= COUNT_MAX`, so the entry lies in the page; entries beyond the published tail are
        // ours. The tail shares the page's first entry and is published after the entry is written, as the interface
        // demands; the setters leave the tail's bytes alone.
        unsafe {
            let entry = &mut *entries.add(slot);
            entry.set_addr(self.memory.add(usize::from(id) * SLICE_BYTES) as u64);
            entry.set_len(SLICE_BYTES as u32);
            entry.set_bid(id);
            self.tail = self.tail.wrapping_add(1);
            let tail = BufRingEntry::tail(entries).cast_mut();
            AtomicU16::from_ptr(tail).store(self.tail, Ordering::Release);
        }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: both came from `Box::into_raw` with these types, and the kernel has no operation left on them: the
        // reactor drops its arena only after the last completion, and leaks it otherwise.
        unsafe {
            drop(Box::from_raw(self.page));
            let len = SLICE_BYTES * usize::from(self.count);
            drop(Box::from_raw(std::ptr::slice_from_raw_parts_mut(self.memory, len)));
        }
    }
}
