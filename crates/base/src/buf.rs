//! Buffers: 4 KiB-aligned memory behind reference-counted handles, so that bytes move once from socket to device.
//!
//! Invariants: memory starts on a 4 KiB boundary (O_DIRECT); a [`Buf`] never changes; memory of dropped buffers waits in
//! a per-thread pool for the next one of its size class, since fresh pages cost a fault each.

use std::cell::RefCell;
use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::sync::{Arc, OnceLock};

/// Alignment of every buffer, and the granule of its capacity.
pub const ALIGN_BYTES: usize = 4096;

/// Size classes of a pool: four a power of two, so that a shard and its header don't take twice their size. The largest
/// has 2^11 pages, 8 MiB, more than the largest segment shard.
const CLASSES: usize = 4 * 10;

/// Bytes that one thread's pool keeps for reuse: some segments' worth of shards and the buffers of some hundred requests.
const POOL_BYTES_MAX: usize = 48 << 20;

#[repr(C, align(4096))]
#[derive(Clone, Copy)]
struct Page([u8; ALIGN_BYTES]);

type Pages = Box<[Page]>;

struct Pool {
    classes: [Vec<Pages>; CLASSES],
    held_bytes: usize,
}

thread_local! {
    static POOL: RefCell<Pool> =
        const { RefCell::new(Pool { classes: [const { Vec::new() }; CLASSES], held_bytes: 0 }) };
}

/// The class that holds `pages`, and how many pages its buffers have: 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ...
fn class_of(pages: usize) -> (usize, usize) {
    if pages <= 4 {
        return (pages - 1, pages);
    }
    let power = (pages - 1).ilog2() as usize;
    let step = 1 << (power - 2);
    let steps = (pages - (1 << power)).div_ceil(step);
    (4 * (power - 1) + steps - 1, (1 << power) + steps * step)
}

fn allocate(len: usize) -> Pages {
    let (class, rounded) = class_of(len.div_ceil(ALIGN_BYTES).max(1));
    if class < CLASSES {
        let pooled = POOL.try_with(|pool| {
            let mut pool = pool.borrow_mut();
            let pages = pool.classes[class].pop()?;
            pool.held_bytes -= pages.len() * ALIGN_BYTES;
            Some(pages)
        });
        if let Ok(Some(pages)) = pooled {
            return pages;
        }
    }
    zeroed_pages(rounded)
}

fn zeroed_pages(count: usize) -> Pages {
    // SAFETY: a page is plain bytes, for which all zeroes is a value.
    unsafe { Box::<[Page]>::new_zeroed_slice(count).assume_init() }
}

fn recycle(pages: Pages) {
    let bytes = pages.len() * ALIGN_BYTES;
    let (class, rounded) = class_of(pages.len());
    if class >= CLASSES || pages.len() != rounded {
        return;
    }
    // At thread exit the pool may be gone already; then the memory is simply freed.
    let _ = POOL.try_with(|pool| {
        let mut pool = pool.borrow_mut();
        if pool.makes_room(class, bytes) {
            pool.held_bytes += bytes;
            pool.classes[class].push(pages);
        }
    });
}

impl Pool {
    /// Whether so many bytes fit in: where the pool is full, the class that holds most of it gives way to others, so that what one
    /// load left behind does not stay in the way of the next.
    fn makes_room(&mut self, class: usize, bytes: usize) -> bool {
        while self.held_bytes + bytes > POOL_BYTES_MAX {
            let held = |pages: &Vec<Pages>| pages.first().map_or(0, |one| one.len() * pages.len());
            let (most, _) =
                self.classes.iter().enumerate().max_by_key(|(_, pages)| held(pages)).expect("there are classes");
            if most == class {
                return false;
            }
            let Some(gone) = self.classes[most].pop() else { return false };
            self.held_bytes -= gone.len() * ALIGN_BYTES;
        }
        true
    }
}

struct Memory(Option<Pages>);

impl Memory {
    fn bytes(&self) -> &[u8] {
        let pages = self.0.as_deref().expect("memory is only taken on drop");
        // SAFETY: a page is 4096 plain bytes without padding, so the pages are `len * 4096` initialised bytes.
        unsafe { std::slice::from_raw_parts(pages.as_ptr().cast::<u8>(), pages.len() * ALIGN_BYTES) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        let pages = self.0.as_deref_mut().expect("memory is only taken on drop");
        // SAFETY: as in `bytes`; the exclusive borrow of the pages is passed on.
        unsafe { std::slice::from_raw_parts_mut(pages.as_mut_ptr().cast::<u8>(), pages.len() * ALIGN_BYTES) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Some(pages) = self.0.take() {
            recycle(pages);
        }
    }
}

/// A buffer being filled: one owner, writable. Contents are unspecified (not secret, not uninitialised) until written.
pub struct BufMut {
    memory: Memory,
    len: usize,
}

impl BufMut {
    /// `len` bytes of unspecified content.
    pub fn new(len: usize) -> BufMut {
        BufMut { memory: Memory(Some(allocate(len))), len }
    }

    pub fn zeroed(len: usize) -> BufMut {
        let mut buf = BufMut::new(len);
        buf.fill(0);
        buf
    }

    /// Makes the buffer immutable and shareable, without a copy.
    pub fn freeze(self) -> Buf {
        Buf { offset: 0, len: self.len, memory: Arc::new(self.memory) }
    }
}

impl Deref for BufMut {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.memory.bytes()[..self.len]
    }
}

impl DerefMut for BufMut {
    fn deref_mut(&mut self) -> &mut [u8] {
        let len = self.len;
        &mut self.memory.bytes_mut()[..len]
    }
}

impl fmt::Debug for BufMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BufMut({} bytes)", self.len)
    }
}

/// A shared, immutable run of bytes: cloning and slicing copy a handle, never the bytes.
#[derive(Clone)]
pub struct Buf {
    memory: Arc<Memory>,
    offset: usize,
    len: usize,
}

impl Buf {
    pub fn empty() -> Buf {
        Buf::zeroes(0)
    }

    /// `len` zero bytes; up to 1 MiB they share one static run.
    pub fn zeroes(len: usize) -> Buf {
        const SHARED_BYTES: usize = 1 << 20;
        static SHARED: OnceLock<Arc<Memory>> = OnceLock::new();
        if len > SHARED_BYTES {
            return BufMut::zeroed(len).freeze();
        }
        let memory = SHARED.get_or_init(|| Arc::new(Memory(Some(zeroed_pages(SHARED_BYTES / ALIGN_BYTES)))));
        Buf { memory: Arc::clone(memory), offset: 0, len }
    }

    pub fn copy_from(bytes: &[u8]) -> Buf {
        let mut buf = BufMut::new(bytes.len());
        buf.copy_from_slice(bytes);
        buf.freeze()
    }

    /// Whether both are the same part of the same memory.
    pub fn is_same(&self, other: &Buf) -> bool {
        Arc::ptr_eq(&self.memory, &other.memory) && (self.offset, self.len) == (other.offset, other.len)
    }

    /// A handle on part of the same memory.
    pub fn slice(&self, range: Range<usize>) -> Buf {
        assert!(range.start <= range.end && range.end <= self.len, "slice {range:?} of {} bytes", self.len);
        Buf { memory: Arc::clone(&self.memory), offset: self.offset + range.start, len: range.end - range.start }
    }

    /// Bytes of memory that this handle keeps from being reused.
    pub fn held_bytes(&self) -> usize {
        self.memory.bytes().len()
    }
}

impl Deref for Buf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.memory.bytes()[self.offset..self.offset + self.len]
    }
}

impl PartialEq for Buf {
    fn eq(&self, other: &Buf) -> bool {
        **self == **other
    }
}

impl Eq for Buf {}

impl Default for Buf {
    fn default() -> Buf {
        Buf::empty()
    }
}

impl fmt::Debug for Buf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buf({} bytes)", self.len)
    }
}

/// Total length of several handles.
pub fn total_len(bufs: &[Buf]) -> usize {
    bufs.iter().map(|b| b.len()).sum()
}

/// The bytes of several handles in one: the handle itself where there is only one.
pub fn concat(bufs: &[Buf]) -> Buf {
    if let [one] = bufs {
        return one.clone();
    }
    let mut all = BufMut::new(total_len(bufs));
    let mut at = 0;
    for buf in bufs {
        all[at..at + buf.len()].copy_from_slice(buf);
        at += buf.len();
    }
    all.freeze()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_aligned_and_slices_share_it() {
        let mut m = BufMut::new(10_000);
        m[0] = 1;
        m[9_999] = 9;
        assert_eq!(m.as_ptr() as usize % ALIGN_BYTES, 0);
        let b = m.freeze();
        let tail = b.slice(9_998..10_000);
        drop(b);
        assert_eq!(tail[1], 9);
        assert_eq!(tail.held_bytes(), 12_288);
    }

    #[test]
    fn what_one_load_left_in_the_pool_gives_way_to_the_next() {
        let held = |len: usize| {
            let (class, _) = class_of(len / ALIGN_BYTES);
            POOL.with(|pool| pool.borrow().classes[class].len())
        };
        const LARGE: usize = 1 << 20;
        const SMALL: usize = 8 << 10;
        drop((0..2 * POOL_BYTES_MAX / LARGE).map(|_| BufMut::new(LARGE)).collect::<Vec<_>>());
        assert_eq!(held(LARGE), POOL_BYTES_MAX / LARGE);
        drop((0..1024).map(|_| BufMut::new(SMALL)).collect::<Vec<_>>());
        assert_eq!((held(SMALL), held(LARGE)), (1024, POOL_BYTES_MAX / LARGE - 8));
        // Neither takes it all.
        drop((0..2 * POOL_BYTES_MAX / SMALL).map(|_| BufMut::new(SMALL)).collect::<Vec<_>>());
        assert!(held(SMALL) * SMALL >= POOL_BYTES_MAX / 2, "{} small ones", held(SMALL));
        assert!(held(LARGE) * LARGE >= POOL_BYTES_MAX / 3, "{} large ones", held(LARGE));
    }

    #[test]
    fn classes_grow_by_a_quarter_at_most() {
        let mut last = (0, 1);
        for pages in 1..=2048 {
            let (class, rounded) = class_of(pages);
            assert!(rounded >= pages && rounded - pages <= pages / 4, "{pages} pages take {rounded}");
            assert_eq!(class_of(rounded), (class, rounded), "a buffer goes back to its class");
            assert_eq!(class != last.0, rounded != last.1, "{pages} pages");
            last = (class, rounded);
        }
        assert_eq!((last.0, class_of(2049).0), (CLASSES - 1, CLASSES));
    }

    #[test]
    fn zeroes_are_zero_at_every_size() {
        for len in [0, 1, 4096, 1 << 20, (1 << 20) + 1] {
            let z = Buf::zeroes(len);
            assert_eq!(z.len(), len);
            assert!(z.iter().all(|b| *b == 0));
        }
    }

    #[test]
    fn concat_keeps_order() {
        let a = Buf::copy_from(b"ab");
        let b = Buf::copy_from(b"cde");
        assert_eq!(&*concat(&[a.clone(), b]), b"abcde");
        assert_eq!(&*concat(&[a]), b"ab");
    }
}
