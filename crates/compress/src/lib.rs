//! Stored units of packed segments: one block each, compressed to whole granules, and opened again.
//!
//! Role: pure functions over the caller's bytes, like the erasure code. Nothing here knows where a unit lies, what block it
//! is of, or whether what it gives is right: the map's checksum of the block says that.
//!
//! ```text
//! 0                            n          end - 1   end
//! | n bytes, the codec's output | zeroes  | 64 k - n |      of k granules; the last byte is from 1 to 64
//! ```
//!
//! | codec | output |
//! | --- | --- |
//! | raw | the block, without that last byte |
//! | lz4 | one block of LZ4's block format: no frame, no length, no dictionary |
//! | zstd | one frame of RFC 8878, level 1, without magic number, content size, checksum and dictionary |
//!
//! Invariants
//! 1. What `pack` gives, `open` opens to the same block, in this release and all later ones (`tests/golden.rs`).
//! 2. The same block packs to the same bytes, whatever was packed before.
//! 3. A unit is compressed only if it is smaller than the block by [`SAVED_MIN`] of its granules.
//! 4. After [`Packer::new`] nothing is allocated (`tests/allocations.rs`).
//!
//! Faults: a unit that no packer made is refused, or gives some block. None panics, or writes beyond the block.

#![deny(unsafe_code)]

use holdfast_base::BLOCK_BYTES;
use holdfast_format::packing::{BLOCK_GRANULES, Codec, GRANULE_BYTES, StoredLength};
use lz4_flex::block::{CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size};
use zstd_safe::{CCtx, CParameter, DCtx, DParameter, FrameFormat};

/// The least that compression saves, in granules: an eighth of the block.
pub const SAVED_MIN: u32 = BLOCK_GRANULES / 8;

/// Granules of the largest unit that is stored compressed.
const GRANULES_MAX: usize = (BLOCK_GRANULES - SAVED_MIN) as usize;

/// Level 3 makes a hundredth less of a block, in a fifth more time.
const ZSTD_LEVEL: i32 = 1;

/// What may stand in front of the codec's output.
pub const HEAD_BYTES_MAX: usize = 16;

/// The larger of the two bounds of what codecs make of a block at worst: zstd's is some 80 bytes more than a block.
const OUTPUT_BYTES_MAX: usize = get_maximum_output_size(BLOCK_BYTES) + HEAD_BYTES_MAX;

/// A block, stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Packed<'a> {
    /// Compression saves too little: it is stored as it is.
    Raw,
    /// `bytes` are as long as `length` says.
    Unit { length: StoredLength, bytes: &'a [u8] },
}

/// Bytes that are no unit of that codec.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Error {
    #[error("{bytes} bytes are no length of such a unit")]
    Length { bytes: usize },
    #[error("the end of the unit is not filled up as it should be")]
    Filling,
    #[error("the bytes are not the codec's, or give more than a block")]
    Codec,
    #[error("the unit gives {bytes} bytes, which are no block")]
    Short { bytes: usize },
}

/// Packs and opens units, one at a time. It has some hundred KiB of memory: one a thread is enough.
pub struct Packer {
    lz4: CompressTable,
    zstd: CCtx<'static>,
    unzstd: DCtx<'static>,
    output: Box<[u8; OUTPUT_BYTES_MAX]>,
    block: Box<[u8; BLOCK_BYTES]>,
}

impl Packer {
    /// Takes all the memory that it will ever need; panics where there is none.
    pub fn new() -> Packer {
        let mut zstd = CCtx::create();
        for parameter in [
            CParameter::CompressionLevel(ZSTD_LEVEL),
            CParameter::Format(FrameFormat::Magicless),
            CParameter::ContentSizeFlag(false),
            CParameter::ChecksumFlag(false),
            CParameter::DictIdFlag(false),
        ] {
            zstd.set_parameter(parameter).expect("the library has this parameter");
        }
        let mut unzstd = DCtx::create();
        unzstd.set_parameter(DParameter::Format(FrameFormat::Magicless)).expect("the library has this parameter");
        let (lz4, output, block) = (CompressTable::small(), Box::new([0; _]), Box::new([0; _]));
        let mut packer = Packer { lz4, zstd, unzstd, output, block };
        // Its memory is laid out for a block with the first that it gets.
        packer.pack(Codec::Zstd, &[0; BLOCK_BYTES]);
        packer
    }

    /// Packs a block; `codec` may be raw. The unit is valid until the next call.
    pub fn pack(&mut self, codec: Codec, block: &[u8; BLOCK_BYTES]) -> Packed<'_> {
        self.pack_behind(codec, &[], block)
    }

    /// The same, with the codec's output behind some bytes of the caller's, [`HEAD_BYTES_MAX`] at most.
    pub fn pack_behind(&mut self, codec: Codec, head: &[u8], block: &[u8; BLOCK_BYTES]) -> Packed<'_> {
        let (own, output) = self.output.split_at_mut(head.len());
        own.copy_from_slice(head);
        let written = match codec {
            Codec::Raw => return Packed::Raw,
            Codec::Lz4 => {
                let written = compress_into_with_table(block, output, &mut self.lz4);
                written.expect("there is room for what it makes at worst")
            }
            Codec::Zstd => {
                let written = self.zstd.compress2(output, block);
                written.expect("there is room for what it makes at worst")
            }
        };
        let bytes = head.len() + written;
        let granules = (bytes + 1).div_ceil(GRANULE_BYTES);
        if granules > GRANULES_MAX {
            return Packed::Raw;
        }
        let unit = &mut self.output[..granules * GRANULE_BYTES];
        let filling = unit.len() - bytes;
        unit[bytes..].fill(0);
        unit[bytes + filling - 1] = filling as u8;
        Packed::Unit { length: StoredLength::compressed(codec, granules as u32), bytes: unit }
    }

    /// Opens a unit; the block is valid until the next call.
    pub fn open<'a>(&'a mut self, codec: Codec, unit: &'a [u8]) -> Result<&'a [u8; BLOCK_BYTES], Error> {
        if codec == Codec::Raw {
            return unit.try_into().map_err(|_| Error::Length { bytes: unit.len() });
        }
        decompress(&mut self.unzstd, codec, unit, 0, &mut self.block)?;
        Ok(&self.block)
    }

    /// Opens into the caller's block what was packed behind so many bytes; it holds anything after an error.
    pub fn open_behind(
        &mut self,
        codec: Codec,
        unit: &[u8],
        head: usize,
        block: &mut [u8; BLOCK_BYTES],
    ) -> Result<(), Error> {
        decompress(&mut self.unzstd, codec, unit, head, block)
    }

    /// The same, into the caller's block, which holds anything after an error.
    pub fn open_into(&mut self, codec: Codec, unit: &[u8], block: &mut [u8; BLOCK_BYTES]) -> Result<(), Error> {
        if codec == Codec::Raw {
            *block = *self.open(codec, unit)?;
            return Ok(());
        }
        self.open_behind(codec, unit, 0, block)
    }
}

impl Default for Packer {
    fn default() -> Packer {
        Packer::new()
    }
}

/// Of a unit, behind so many bytes of it.
fn decompress(
    zstd: &mut DCtx<'_>,
    codec: Codec,
    unit: &[u8],
    head: usize,
    block: &mut [u8; BLOCK_BYTES],
) -> Result<(), Error> {
    let output = output_in(unit)?.get(head..).ok_or(Error::Codec)?;
    let bytes = match codec {
        Codec::Lz4 => decompress_into(output, block).map_err(|_| Error::Codec)?,
        Codec::Zstd => zstd.decompress(&mut block[..], output).map_err(|_| Error::Codec)?,
        Codec::Raw => return Err(Error::Codec),
    };
    if bytes == BLOCK_BYTES { Ok(()) } else { Err(Error::Short { bytes }) }
}

/// The codec's part of a unit.
fn output_in(unit: &[u8]) -> Result<&[u8], Error> {
    let bytes = unit.len();
    let (true, Some(&filling)) = (bytes.is_multiple_of(GRANULE_BYTES) && bytes <= BLOCK_BYTES, unit.last()) else {
        return Err(Error::Length { bytes });
    };
    if !(1..=GRANULE_BYTES).contains(&usize::from(filling)) {
        return Err(Error::Filling);
    }
    let (output, rest) = unit.split_at(bytes - usize::from(filling));
    if rest[..rest.len() - 1].iter().any(|byte| *byte != 0) {
        return Err(Error::Filling);
    }
    Ok(output)
}

/// Whether nothing but zeroes is in it.
pub fn is_zero(block: &[u8; BLOCK_BYTES]) -> bool {
    // A cache line at a time: without branches in it, it is a few vector instructions.
    block.as_chunks::<64>().0.iter().all(|line| line.iter().fold(0, |any, byte| any | byte) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compressed output of that many bytes, as a unit of the least granules.
    fn unit_of(output: &[u8]) -> Vec<u8> {
        let mut unit = output.to_vec();
        unit.resize((output.len() + 1).next_multiple_of(GRANULE_BYTES), 0);
        let filling = unit.len() - output.len();
        *unit.last_mut().expect("it has a last byte") = filling as u8;
        unit
    }

    #[test]
    fn the_last_byte_says_what_is_no_output() {
        for bytes in [1, 62, 63, 64, 127, 128, 4095] {
            let output = vec![7; bytes];
            assert_eq!(output_in(&unit_of(&output)), Ok(&output[..]), "{bytes}");
        }
        // A granule of nothing but filling is none too much for the last byte.
        assert_eq!(output_in(&unit_of(&[])), Ok(&[][..]));
        for (unit, error) in [
            (vec![], Error::Length { bytes: 0 }),
            (vec![1; 63], Error::Length { bytes: 63 }),
            (vec![1; BLOCK_BYTES + 64], Error::Length { bytes: BLOCK_BYTES + 64 }),
            (vec![0; 64], Error::Filling),
            (vec![65; 128], Error::Filling),
            (vec![2; 64], Error::Filling),
        ] {
            assert_eq!(output_in(&unit), Err(error), "{} bytes", unit.len());
        }
    }

    #[test]
    fn a_unit_is_raw_where_less_than_an_eighth_is_saved() {
        let mut packer = Packer::new();
        let mut noise = holdfast_base::Prng::new(3);
        let random: [u8; BLOCK_BYTES] = std::array::from_fn(|_| noise.below(256) as u8);
        for codec in [Codec::Lz4, Codec::Zstd] {
            // The more of the block is zero, the less granules it has, down to the last that is worth it.
            let mut seen = std::collections::BTreeSet::new();
            for zeroes in (0..BLOCK_BYTES).step_by(32) {
                let mut block = random;
                block[..zeroes].fill(0);
                seen.insert(match packer.pack(codec, &block) {
                    Packed::Raw => 64,
                    Packed::Unit { length, bytes } => {
                        assert_eq!(bytes.len(), length.granules() as usize * GRANULE_BYTES);
                        length.granules()
                    }
                });
            }
            let compressed: Vec<u32> = seen.iter().copied().filter(|granules| *granules < 64).collect();
            assert_eq!(compressed.last(), Some(&56), "{codec:?}");
            assert!(seen.contains(&64) && compressed[0] < 4, "{codec:?}: {compressed:?}");
        }
        assert_eq!(packer.pack(Codec::Raw, &[0; BLOCK_BYTES]), Packed::Raw);
    }

    #[test]
    fn raw_units_are_blocks() {
        let mut packer = Packer::new();
        let block = [9; BLOCK_BYTES];
        assert_eq!(packer.open(Codec::Raw, &block), Ok(&block));
        assert_eq!(packer.open(Codec::Raw, &block[1..]), Err(Error::Length { bytes: BLOCK_BYTES - 1 }));
        let mut other = [0; BLOCK_BYTES];
        assert_eq!(packer.open_into(Codec::Raw, &block, &mut other), Ok(()));
        assert_eq!(other, block);
    }

    #[test]
    fn output_that_is_no_block_is_refused() {
        let mut packer = Packer::new();
        // One literal "a", copied on by so many; then five more.
        let lz4 = |copied: usize| {
            let mut output = vec![0x1f, b'a', 1, 0];
            let more = copied - 19;
            output.extend(std::iter::repeat_n(255, more / 255).chain([(more % 255) as u8]));
            output.extend([0x50, b'a', b'a', b'a', b'a', b'a']);
            unit_of(&output)
        };
        assert_eq!(packer.open(Codec::Lz4, &lz4(4090)), Ok(&[b'a'; BLOCK_BYTES]));
        assert_eq!(packer.open(Codec::Lz4, &lz4(4089)), Err(Error::Short { bytes: 4095 }));
        assert_eq!(packer.open(Codec::Lz4, &lz4(4091)), Err(Error::Codec));
        assert_eq!(packer.open(Codec::Lz4, &lz4(800_000)), Err(Error::Codec));
        // Descriptor, a window of 1 KiB or 4, and one last block of so many times "a".
        let zstd = |count: u32, window: u8| {
            let head = count << 3 | 1 << 1 | 1;
            unit_of(&[0, window, head as u8, (head >> 8) as u8, (head >> 16) as u8, b'a'])
        };
        assert_eq!(packer.open(Codec::Zstd, &zstd(4096, 2 << 3)), Ok(&[b'a'; BLOCK_BYTES]));
        assert_eq!(packer.open(Codec::Zstd, &zstd(4095, 2 << 3)), Err(Error::Short { bytes: 4095 }));
        for (count, window) in [(4097, 2 << 3), (4097, 3 << 3), ((1 << 21) - 1, 30 << 3)] {
            assert_eq!(packer.open(Codec::Zstd, &zstd(count, window)), Err(Error::Codec), "{count}");
        }
        assert_eq!(packer.open(Codec::Zstd, &unit_of(&[])), Err(Error::Short { bytes: 0 }));
        assert_eq!(packer.open(Codec::Lz4, &unit_of(&[])), Err(Error::Codec));
    }

    #[test]
    fn one_bit_anywhere_is_no_zero_block() {
        let mut block = [0; BLOCK_BYTES];
        assert!(is_zero(&block));
        for bit in 0..BLOCK_BYTES * 8 {
            block[bit / 8] = 1 << (bit % 8);
            assert!(!is_zero(&block), "bit {bit}");
            block[bit / 8] = 0;
        }
    }
}
