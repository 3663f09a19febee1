//! What is written: cells of 128 bytes, each saying where it belongs and which write it came from.
//!
//! Smaller than a sector, so that writes of cells are unaligned ones for every layer below; no cell crosses a block.
//! Zeroes are a value of their own: never written, trimmed, or written as zeroes.

use holdfast_base::{Prng, crc32c};
use std::fmt;

pub const CELL_BYTES: usize = 128;

const MAGIC: [u8; 4] = *b"HfTc";

/// Which write a cell's bytes come from: the life of the host it was sent to, and its number in the run.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(pub u64);

impl Version {
    pub const ZEROES: Version = Version(0);

    const GENERATION_SHIFT: u32 = 48;

    pub fn new(generation: u16, number: u64) -> Version {
        assert!(number > 0 && number < 1 << Version::GENERATION_SHIFT, "write number {number} does not fit");
        Version((u64::from(generation) << Version::GENERATION_SHIFT) | number)
    }

    pub fn generation(self) -> u16 {
        (self.0 >> Version::GENERATION_SHIFT) as u16
    }

    pub fn number(self) -> u64 {
        self.0 & ((1 << Version::GENERATION_SHIFT) - 1)
    }
}

impl fmt::Debug for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Version::ZEROES {
            return f.write_str("zeroes");
        }
        write!(f, "write {} (host life {})", self.number(), self.generation())
    }
}

/// A cell's place: the volume's number in the run, and the cell's index in the volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    pub volume: u8,
    pub index: u32,
}

impl Place {
    fn word(self) -> u64 {
        (u64::from(self.volume) << 32) | u64::from(self.index)
    }
}

/// Writes the bytes of `version` at `place`.
pub fn fill(place: Place, version: Version, cell: &mut [u8]) {
    assert_eq!(cell.len(), CELL_BYTES, "a cell is filled whole");
    if version == Version::ZEROES {
        cell.fill(0);
        return;
    }
    cell[8..16].copy_from_slice(&place.word().to_le_bytes());
    cell[16..24].copy_from_slice(&version.0.to_le_bytes());
    Prng::new(place.word() ^ version.0.rotate_left(32)).fill(&mut cell[24..]);
    let checksum = crc32c(&cell[8..]);
    cell[..4].copy_from_slice(&MAGIC);
    cell[4..8].copy_from_slice(&checksum.to_le_bytes());
}

/// Why a cell's bytes are none that were ever written to its place.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum BadCell {
    /// Neither zeroes nor a cell: a torn, mixed or foreign piece.
    Torn,
    /// A sound cell of another place.
    Elsewhere(Place, Version),
}

impl fmt::Display for BadCell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BadCell::Torn => f.write_str("bytes that nobody wrote (torn or foreign)"),
            BadCell::Elsewhere(place, version) => {
                write!(
                    f,
                    "{version:?} of volume {}, offset {}",
                    place.volume,
                    u64::from(place.index) * CELL_BYTES as u64
                )
            }
        }
    }
}

/// Which write the bytes at `place` come from.
pub fn read(place: Place, cell: &[u8]) -> Result<Version, BadCell> {
    assert_eq!(cell.len(), CELL_BYTES, "a cell is read whole");
    if cell.iter().all(|b| *b == 0) {
        return Ok(Version::ZEROES);
    }
    let word = |at: usize| u64::from_le_bytes(cell[at..at + 8].try_into().expect("eight bytes"));
    let checksum = u32::from_le_bytes(cell[4..8].try_into().expect("four bytes"));
    if cell[..4] != MAGIC || checksum != crc32c(&cell[8..]) {
        return Err(BadCell::Torn);
    }
    let (found, version) = (word(8), Version(word(16)));
    if found != place.word() {
        return Err(BadCell::Elsewhere(Place { volume: (found >> 32) as u8, index: found as u32 }, version));
    }
    Ok(version)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_read_back_and_tell_what_is_wrong() {
        let (here, there) = (Place { volume: 1, index: 7 }, Place { volume: 1, index: 8 });
        let version = Version::new(3, 99);
        let mut cell = [0; CELL_BYTES];
        assert_eq!(read(here, &cell), Ok(Version::ZEROES));
        fill(here, version, &mut cell);
        assert_eq!(read(here, &cell), Ok(version));
        assert_eq!(read(there, &cell), Err(BadCell::Elsewhere(here, version)));
        cell[100] ^= 1;
        assert_eq!(read(here, &cell), Err(BadCell::Torn));
        assert_eq!((version.generation(), version.number()), (3, 99));
    }
}
