//! Disk operations on blocks of a shard: one, or where they lie in several extents one each, told of when all are done.
//!
//! Limits: an operation has [`EXTENTS_MAX`](crate::shards::alloc::EXTENTS_MAX) parts at most. Faults: the first part that
//! fails is the result of all, once none is in flight any more.

use crate::api::DiskError;
use crate::io::{Ctx, IO_MAX, Io};
use holdfast_base::{BLOCK_BYTES, Buf, Slab, Token};
use holdfast_format::disk::Extent;

const BLOCK: u64 = BLOCK_BYTES as u64;

struct Whole {
    io: Io,
    parts: Vec<Buf>,
    waiting: usize,
    error: Option<DiskError>,
}

pub(crate) struct Parts {
    /// Of the data area on the device.
    offset: u64,
    wholes: Slab<Whole>,
}

impl Parts {
    pub fn new(offset: u64) -> Parts {
        Parts { offset, wholes: Slab::new(IO_MAX) }
    }

    fn offset_of(&self, extent: &Extent) -> u64 {
        self.offset + extent.first * BLOCK
    }

    fn split(&mut self, io: Io, count: usize) -> Token {
        self.wholes.insert(Whole { io, parts: vec![Buf::default(); count], waiting: count, error: None })
    }

    /// `io` completes with the blocks of all extents, one after the other.
    pub fn read(&mut self, ctx: &mut Ctx, mut extents: impl Iterator<Item = Extent>, io: Io) {
        let len = |e: &Extent| (e.count * BLOCK) as u32;
        let first = extents.next().expect("some blocks are read");
        let Some(second) = extents.next() else {
            return ctx.read(self.offset_of(&first), len(&first), io);
        };
        let extents: Vec<Extent> = [first, second].into_iter().chain(extents).collect();
        let (class, whose) = (io.class(), io.whose());
        let whole = self.split(io, extents.len());
        for (part, extent) in extents.iter().enumerate() {
            ctx.read(self.offset_of(extent), len(extent), Io::Part { whole, part: part as u8, class, whose });
        }
    }

    /// Durably; `data` is as long as the extents, and aligned.
    pub fn write(&mut self, ctx: &mut Ctx, extents: &[Extent], data: Buf, io: Io) {
        if let [extent] = extents {
            return ctx.write(self.offset_of(extent), vec![data], true, io);
        }
        let (class, whose) = (io.class(), io.whose());
        let whole = self.split(io, extents.len());
        let mut at = 0;
        for (part, extent) in extents.iter().enumerate() {
            let end = at + (extent.count * BLOCK) as usize;
            let io = Io::Part { whole, part: part as u8, class, whose };
            ctx.write(self.offset_of(extent), vec![data.slice(at..end)], true, io);
            at = end;
        }
        assert_eq!(at, data.len(), "the extents take all of it");
    }

    /// One part is done. With the last, what all of them were for.
    pub fn on_part(
        &mut self,
        token: Token,
        part: u8,
        result: Result<Buf, DiskError>,
    ) -> Option<(Io, Result<Buf, DiskError>)> {
        let whole = self.wholes.get_mut(token).expect("it waits for its parts");
        whole.waiting -= 1;
        match result {
            Ok(bytes) => whole.parts[usize::from(part)] = bytes,
            Err(error) => whole.error = whole.error.or(Some(error)),
        }
        if whole.waiting > 0 {
            return None;
        }
        let whole = self.wholes.remove(token).expect("just seen");
        let result = whole.error.map_or_else(|| Ok(holdfast_base::buf::concat(&whole.parts)), Err);
        Some((whole.io, result))
    }

    /// Operations whose parts are in flight.
    pub fn iter(&self) -> impl Iterator<Item = &Io> {
        self.wholes.iter().map(|(_, whole)| &whole.io)
    }
}
