//! Units of packed segments, on their way in and out: which stored blocks they lie in, what comes of these, and how a
//! payload of them is put together.
//!
//! In encrypted volumes a compressed unit has the checksum of its block in front of the codec's output: the map has the head
//! of a tag in its place, which says nothing of what a codec gives.
//!
//! Invariant: what a payload is made of opens to the blocks that it was made of; each unit was opened and compared when it
//! was made ([`pack_blocks`]). A bug of a codec is found before the log lets go of the data.

use crate::map::{Crcs, Stored};
use holdfast_base::{BLOCK_BYTES, Buf, BufMut, crc32c};
use holdfast_cipher::Cipher;
use holdfast_compress::{Packed, Packer};
use holdfast_format::geometry::Geometry;
use holdfast_format::packing::{BLOCK_GRANULES, Codec, GRANULE_BYTES, StoredLength, StoredLengths, Unit};
use std::cell::RefCell;
use std::ops::Range;

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
    pub(crate) fn taken_from(&self, stored: &[u8]) -> Option<Buf> {
        let mut bytes = Vec::with_capacity(self.lengths.granules() as usize * GRANULE_BYTES);
        for unit in self.iter() {
            bytes.extend_from_slice(stored.get(bytes_of(unit))?);
        }
        Some(Buf::copy_from(&bytes))
    }

    /// The same, of encrypted ones: decrypted, where they fit the checks. `position` is that of a unit's nonce.
    pub(crate) fn decrypted(
        &self,
        cipher: &Cipher,
        position: impl Fn(Unit) -> u32,
        stored: &[u8],
        checks: Option<&[u32]>,
    ) -> Option<Buf> {
        let mut bytes = BufMut::new(self.lengths.granules() as usize * GRANULE_BYTES);
        bytes.copy_from_slice(&self.taken_from(stored)?);
        let mut rest = &mut bytes[..];
        for (i, unit) in self.iter().enumerate() {
            let (own, others) = rest.split_at_mut(unit.length.granules() as usize * GRANULE_BYTES);
            let check = checks.map(|checks| checks.get(i).copied());
            if check == Some(None) || !cipher.decrypt_unit(position(unit), own, check.flatten()) {
                return None;
            }
            rest = others;
        }
        Some(bytes.freeze())
    }

    /// The blocks of the volume that they are, one behind the other in `units`; `None` where one does not open.
    pub(crate) fn opened(&self, units: &[u8], is_sealed: bool) -> Option<Buf> {
        let mut blocks = BufMut::new(self.len() as usize * BLOCK_BYTES);
        let mut rest = units;
        let opens = PACKER.with_borrow_mut(|packer| {
            self.lengths.iter().zip(blocks.as_chunks_mut::<BLOCK_BYTES>().0).all(|(length, block)| {
                let Some((unit, others)) = rest.split_at_checked(length.granules() as usize * GRANULE_BYTES) else {
                    return false;
                };
                rest = others;
                open_into(packer, length.codec(), unit, is_sealed, block)
            })
        });
        opens.then(|| blocks.freeze())
    }
}

fn bytes_of(unit: Unit) -> Range<usize> {
    unit.start as usize * GRANULE_BYTES..unit.end() as usize * GRANULE_BYTES
}

/// False, and a block of no meaning, where the unit gives none, or another one than it was made of.
fn open_into(packer: &mut Packer, codec: Codec, unit: &[u8], is_sealed: bool, block: &mut [u8; BLOCK_BYTES]) -> bool {
    if !is_sealed || codec == Codec::Raw {
        return packer.open_into(codec, unit, block).is_ok();
    }
    let Some((crc, _)) = unit.split_first_chunk::<CRC_BYTES>() else { return false };
    packer.open_behind(codec, unit, CRC_BYTES, block).is_ok() && crc32c(block) == u32::from_le_bytes(*crc)
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

/// How blocks are made smaller.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Way {
    pub codec: Codec,
    /// They are encrypted then.
    pub is_sealed: bool,
}

/// In front of a unit that is to be encrypted.
const CRC_BYTES: usize = 4;

/// Blocks in a row that lz4 makes no smaller: of those behind them it tries some.
const MISSES_MAX: usize = 8;
const TRIED_OF_MISSES: usize = 8;

/// Packs blocks, raw where that saves too little. Each unit is opened again, and what does not give its block is stored
/// raw.
pub fn pack_blocks(way: Way, blocks: &[Buf]) -> Result<PackedPayload, NotPacked> {
    pack_each(way, blocks, |packer, block, unit| {
        let crc = way.is_sealed.then(|| crc32c(block).to_le_bytes());
        match packer.pack_behind(way.codec, crc.as_ref().map_or(&[], |crc| &crc[..]), block) {
            Packed::Raw => StoredLength::RAW,
            Packed::Unit { length, bytes } => {
                unit[..bytes.len()].copy_from_slice(bytes);
                length
            }
        }
    })
}

/// `made` puts the unit of a block in its place, and tells its length.
fn pack_each(
    way: Way,
    blocks: &[Buf],
    mut made: impl FnMut(&mut Packer, &[u8; BLOCK_BYTES], &mut [u8; BLOCK_BYTES]) -> StoredLength,
) -> Result<PackedPayload, NotPacked> {
    let all = || blocks.iter().flat_map(|buf| buf.as_chunks::<BLOCK_BYTES>().0);
    // Laid out from the first block on that becomes smaller: where none does, none is copied.
    let mut layout: Option<UnitWriter> = None;
    let (mut misses, mut unit, mut opened) = (0, [0; BLOCK_BYTES], [0; BLOCK_BYTES]);
    PACKER.with_borrow_mut(|packer| {
        for (number, block) in all().enumerate() {
            let is_tried = misses < MISSES_MAX || way.codec != Codec::Lz4 || number.is_multiple_of(TRIED_OF_MISSES);
            let length = if is_tried { made(packer, block, &mut unit) } else { StoredLength::RAW };
            let bytes = &unit[..length.granules() as usize * GRANULE_BYTES];
            let is_smaller = length != StoredLength::RAW
                && open_into(packer, way.codec, bytes, way.is_sealed, &mut opened)
                && opened == *block;
            if !is_smaller {
                misses += 1;
                layout.iter_mut().for_each(|layout| layout.push(StoredLength::RAW, block));
                continue;
            }
            misses = 0;
            let layout = layout.get_or_insert_with(|| {
                let mut layout = UnitWriter::default();
                all().take(number).for_each(|block| layout.push(StoredLength::RAW, block));
                layout
            });
            layout.push(length, bytes);
        }
    });
    layout.map(UnitWriter::finish).ok_or(NotPacked::Incompressible)
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
    fn where_many_blocks_become_no_smaller_lz4_tries_one_in_eight_and_zstd_each() {
        let mut prng = Prng::new(7);
        let mut random = vec![0; 64 * BLOCK_BYTES];
        prng.fill(&mut random);
        let (random, text) = (Buf::copy_from(&random), blocks(64, &mut prng));
        for (codec, tried) in [(Codec::Lz4, 8 + 7), (Codec::Zstd, 64)] {
            let (way, mut count) = (Way { codec, is_sealed: false }, 0);
            let none = pack_each(way, std::slice::from_ref(&random), |_, _, _| {
                count += 1;
                StoredLength::RAW
            });
            assert_eq!((none.err(), count), (Some(NotPacked::Incompressible), tried));
        }
        // What can be made smaller behind them is found, but for seven of it at most.
        let way = Way { codec: Codec::Lz4, is_sealed: false };
        let packed = pack_blocks(way, &[random.clone(), text.clone(), random.clone()]).expect("half of it is text");
        let lengths: Vec<StoredLength> = packed.lengths.iter().collect();
        assert!(lengths[..64].iter().all(|length| *length == StoredLength::RAW));
        assert!(lengths[64 + 7..128].iter().all(|length| *length != StoredLength::RAW));
        let units = Units { first: 0, lengths: packed.lengths.clone() };
        let opened = units.taken_from(&packed.bytes).and_then(|bytes| units.opened(&bytes, false));
        assert!(opened.is_some_and(|opened| *opened == *[&random[..], &text, &random].concat()));
    }

    #[test]
    fn a_codec_that_returns_rubbish_costs_space_and_no_block() {
        let mut prng = Prng::new(1);
        let all = blocks(300, &mut prng);
        let ways = [Codec::Lz4, Codec::Zstd].map(|codec| [false, true].map(|is_sealed| Way { codec, is_sealed }));
        for way in ways.into_iter().flatten() {
            let codec = way.codec;
            let (mut lies, mut tried, mut last) = (0, 0, [0; BLOCK_BYTES]);
            let packed = pack_each(way, std::slice::from_ref(&all), |packer, block, unit| {
                let crc = crc32c(block).to_le_bytes();
                let Packed::Unit { length, bytes } =
                    packer.pack_behind(codec, &crc[..if way.is_sealed { 4 } else { 0 }], block)
                else {
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
                lies += usize::from(said != length || *unit != whole);
                tried += 1;
                said
            });
            let packed = packed.expect("some are told the truth of");
            let units = Units { first: 0, lengths: packed.lengths.clone() };
            let opened = units.taken_from(&packed.bytes).and_then(|bytes| units.opened(&bytes, way.is_sealed));
            assert!(opened.is_some_and(|opened| *opened == *all), "{way:?}: a block is another");
            let raw = packed.lengths.iter().filter(|length| *length == StoredLength::RAW).count();
            let most = lies + 300 - tried;
            assert!(lies > 80 && (50..=most).contains(&raw), "{way:?}: {raw} raw of {lies} lies, {tried} tried");
        }
    }
}
