//! Units of packed segments, on their way in and out: which stored blocks they lie in, what comes of these, and how a
//! payload of them is put together.
//!
//! Invariant: what a payload is made of opens to the blocks that it was made of; each unit was opened and compared when it
//! was made ([`pack_blocks`]). A bug of a codec is found before the log lets go of the data.

use crate::map::{Crcs, Stored};
use holdfast_base::{BLOCK_BYTES, Buf, BufMut};
use holdfast_compress::{Packed, Packer};
use holdfast_format::geometry::Geometry;
use holdfast_format::packing::{BLOCK_GRANULES, Codec, GRANULE_BYTES, StoredLength, StoredLengths, Unit};
use std::cell::RefCell;

thread_local! {
    /// Its memory says nothing between two calls, and is too much for each of many volumes.
    static PACKER: RefCell<Packer> = RefCell::new(Packer::new());
}

/// Units that lie in one run of stored blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Units {
    /// Where the first one starts in the first of the blocks, in granules.
    first: u32,
    lengths: StoredLengths,
}

/// Stored blocks of one shard that are fetched for some units.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct UnitRun {
    /// In the segment's payload.
    pub(crate) block: u32,
    pub(crate) blocks: u32,
    /// Units before these, in what was cut.
    pub(crate) offset: u64,
    pub(crate) units: Units,
}

/// Cuts a run of the map into pieces that each lie in one run of blocks of one shard, block by block where they are
/// `apart`; tells of each which stored blocks it is, and which units of them.
pub(crate) fn cut(
    geometry: &Geometry,
    stored: &Stored,
    crcs: &Crcs,
    apart: bool,
    mut told: impl FnMut((u32, u32), Crcs, Option<Units>),
) {
    match stored {
        Stored::Plain { block } => {
            let (blocks, mut done) = (crcs.as_slice().len() as u32, 0);
            while done < blocks {
                let run = if apart { 1 } else { geometry.run_from(block + done).min(blocks - done) };
                told((block + done, run), crcs.slice(u64::from(done), u64::from(run)), None);
                done += run;
            }
        }
        Stored::Packed { granule, lengths } => {
            for UnitRun { block, blocks, offset, units } in runs_of_units(geometry, *granule, lengths, apart) {
                told((block, blocks), crcs.slice(offset, units.len()), Some(units));
            }
        }
    }
}

/// Cuts units, of which the first starts at `granule`, into runs that each lie in one run of blocks of one shard; of one
/// unit each where they are `apart`.
pub(crate) fn runs_of_units(geometry: &Geometry, granule: u32, lengths: &StoredLengths, apart: bool) -> Vec<UnitRun> {
    let mut runs = Vec::new();
    let mut units = lengths.units_after(granule).enumerate().peekable();
    while let Some((offset, first)) = units.next() {
        let block = first.start / BLOCK_GRANULES;
        let end_max = (block + geometry.run_from(block)) * BLOCK_GRANULES;
        let (mut count, mut end) = (1, first.end());
        while let Some((_, next)) = units.next_if(|(_, next)| !apart && next.end() <= end_max) {
            (count, end) = (count + 1, next.end());
        }
        let blocks = end.div_ceil(BLOCK_GRANULES) - block;
        let lengths = lengths.slice(offset as u64, count);
        let units = Units { first: first.start - block * BLOCK_GRANULES, lengths };
        runs.push(UnitRun { block, blocks, offset: offset as u64, units });
    }
    runs
}

impl Units {
    /// Blocks of the volume.
    pub(crate) fn len(&self) -> u64 {
        self.lengths.len()
    }

    fn iter(&self) -> impl Iterator<Item = Unit> {
        self.lengths.units_after(self.first)
    }

    pub(crate) fn lengths(&self) -> &StoredLengths {
        &self.lengths
    }

    /// Their bytes in `stored`, which they lie in, without what is between them.
    pub(crate) fn taken_from(&self, stored: &[u8]) -> Buf {
        let mut bytes = Vec::with_capacity(self.lengths.granules() as usize * GRANULE_BYTES);
        for unit in self.iter() {
            bytes.extend_from_slice(&stored[unit.start as usize * GRANULE_BYTES..unit.end() as usize * GRANULE_BYTES]);
        }
        Buf::copy_from(&bytes)
    }

    /// The blocks of the volume that they are, if they lie in `stored` and open.
    pub(crate) fn open(&self, stored: &[u8]) -> Option<Buf> {
        let mut blocks = BufMut::new(self.len() as usize * BLOCK_BYTES);
        let opens = PACKER.with_borrow_mut(|packer| {
            self.iter().zip(blocks.as_chunks_mut::<BLOCK_BYTES>().0).all(|(unit, block)| {
                let bytes = stored.get(unit.start as usize * GRANULE_BYTES..unit.end() as usize * GRANULE_BYTES);
                bytes.is_some_and(|bytes| packer.open_into(unit.length.codec(), bytes, block).is_ok())
            })
        });
        opens.then(|| blocks.freeze())
    }
}

/// A payload of units, whole blocks long.
#[derive(Clone, Debug)]
pub struct PackedPayload {
    pub bytes: Buf,
    pub lengths: StoredLengths,
}

/// Puts units one behind the other.
#[derive(Debug, Default)]
pub(crate) struct UnitWriter {
    bytes: Vec<u8>,
    lengths: Vec<StoredLength>,
    end: u32,
}

impl UnitWriter {
    /// Units of these lengths, one behind the other in `bytes`.
    pub(crate) fn push_all(&mut self, lengths: &StoredLengths, bytes: &[u8]) {
        let mut at = 0;
        for length in lengths.iter() {
            let end = at + length.granules() as usize * GRANULE_BYTES;
            self.push(length, &bytes[at..end]);
            at = end;
        }
    }

    /// Blocks that are not packed.
    pub(crate) fn push_blocks(&mut self, blocks: &[u8]) {
        blocks.chunks_exact(BLOCK_BYTES).for_each(|block| self.push(StoredLength::RAW, block));
    }

    fn push(&mut self, length: StoredLength, unit: &[u8]) {
        let start = length.start_after(self.end);
        self.bytes.resize(start as usize * GRANULE_BYTES, 0);
        self.bytes.extend_from_slice(unit);
        self.lengths.push(length);
        self.end = start + length.granules();
    }

    pub(crate) fn finish(mut self) -> PackedPayload {
        self.bytes.resize(self.bytes.len().next_multiple_of(BLOCK_BYTES), 0);
        PackedPayload { bytes: Buf::copy_from(&self.bytes), lengths: StoredLengths::new(self.lengths) }
    }
}

/// Why blocks were not packed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NotPacked {
    /// None is made smaller.
    Incompressible,
    /// Nobody tried: too much waited for that.
    NotTried,
}

/// Packs blocks, raw where that saves too little. Each unit is opened again, and what does not give its block is stored
/// raw.
pub fn pack_blocks(codec: Codec, blocks: &[Buf]) -> Result<PackedPayload, NotPacked> {
    pack_each(codec, blocks, |packer, block, unit| match packer.pack(codec, block) {
        Packed::Raw => StoredLength::RAW,
        Packed::Unit { length, bytes } => {
            unit[..bytes.len()].copy_from_slice(bytes);
            length
        }
    })
}

/// `made` puts the unit of a block in its place, and tells its length.
fn pack_each(
    codec: Codec,
    blocks: &[Buf],
    mut made: impl FnMut(&mut Packer, &[u8; BLOCK_BYTES], &mut [u8; BLOCK_BYTES]) -> StoredLength,
) -> Result<PackedPayload, NotPacked> {
    let mut layout = UnitWriter::default();
    let mut saves = false;
    PACKER.with_borrow_mut(|packer| {
        for block in blocks.iter().flat_map(|buf| buf.as_chunks::<BLOCK_BYTES>().0) {
            let mut unit = [0; BLOCK_BYTES];
            let length = made(packer, block, &mut unit);
            let bytes = &unit[..length.granules() as usize * GRANULE_BYTES];
            if length != StoredLength::RAW && packer.open(codec, bytes).is_ok_and(|opened| opened == block) {
                layout.push(length, bytes);
                saves = true;
            } else {
                layout.push(StoredLength::RAW, block);
            }
        }
    });
    if saves { Ok(layout.finish()) } else { Err(NotPacked::Incompressible) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_base::Prng;

    /// Blocks of letters, each begins with its number.
    fn blocks(count: u64, prng: &mut Prng) -> Buf {
        let mut bytes = vec![0; count as usize * BLOCK_BYTES];
        prng.fill(&mut bytes);
        for (number, block) in bytes.chunks_mut(BLOCK_BYTES).enumerate() {
            block.iter_mut().for_each(|byte| *byte = b'a' + *byte % 3);
            block[..8].copy_from_slice(&(number as u64).to_le_bytes());
        }
        Buf::copy_from(&bytes)
    }

    #[test]
    fn a_codec_that_returns_rubbish_costs_space_and_no_block() {
        let mut prng = Prng::new(1);
        let all = blocks(300, &mut prng);
        for codec in [Codec::Lz4, Codec::Zstd] {
            let (mut lies, mut last) = (0, [0; BLOCK_BYTES]);
            let packed = pack_each(codec, std::slice::from_ref(&all), |packer, block, unit| {
                let Packed::Unit { length, bytes } = packer.pack(codec, block) else {
                    panic!("letters are made smaller")
                };
                unit[..bytes.len()].copy_from_slice(bytes);
                let (whole, before) = (*unit, std::mem::replace(&mut last, *unit));
                let said = match prng.below(6) {
                    0 => StoredLength::compressed(codec, length.granules() - 1),
                    1 => StoredLength::compressed(codec, (length.granules() + 1).min(64)),
                    2 => {
                        unit[prng.below(bytes.len() as u64) as usize] ^= 1 << prng.below(8);
                        length
                    }
                    // What the block before this one became.
                    3 => {
                        *unit = before;
                        length
                    }
                    _ => length,
                };
                lies += u32::from(said != length || *unit != whole);
                said
            });
            let packed = packed.expect("some are told the truth of");
            let units = Units { first: 0, lengths: packed.lengths.clone() };
            assert!(units.open(&packed.bytes).is_some_and(|opened| *opened == *all), "{codec:?}: a block is another");
            let raw = packed.lengths.iter().filter(|length| *length == StoredLength::RAW).count();
            assert!(lies > 100 && (50..=lies as usize).contains(&raw), "{codec:?}: {raw} raw of {lies} lies");
        }
    }
}
