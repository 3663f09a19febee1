//! A packer takes its memory when it is made, and none for a block, be it the library's.

use holdfast_base::{BLOCK_BYTES, Prng};
use holdfast_compress::{Packed, Packer};
use holdfast_format::packing::Codec;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: everything is passed on as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.set(COUNT.get() + 1);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn nothing_is_allocated_for_a_block() {
    let at_first = COUNT.get();
    let mut packer = Packer::new();
    assert!(COUNT.get() > at_first + 3, "memory of the C library counts, too");
    let mut prng = Prng::new(7);
    let mut opened = [0; BLOCK_BYTES];
    let (mut units, mut raw) = (0, 0);
    let before = COUNT.get();
    // Long enough for a context that thinks itself too large to have made itself smaller.
    for round in 0..1000 {
        let random = prng.below(BLOCK_BYTES as u64 + 1) as usize;
        let mut block = [b'x'; BLOCK_BYTES];
        block[..random].fill_with(|| prng.below(256) as u8);
        let codec = if round % 2 == 0 { Codec::Zstd } else { Codec::Lz4 };
        let mut unit = [0; BLOCK_BYTES];
        match packer.pack(codec, &block) {
            Packed::Raw => raw += 1,
            Packed::Unit { bytes, .. } => {
                unit[..bytes.len()].copy_from_slice(bytes);
                let len = bytes.len();
                packer.open_into(codec, &unit[..len], &mut opened).unwrap();
                assert_eq!(opened, block);
                assert!(packer.open(codec, &unit[..len / 128 * 64]).is_err());
                units += 1;
            }
        }
    }
    assert_eq!(COUNT.get(), before);
    assert!(units > 500 && raw > 50, "{units} units, {raw} raw");
}
