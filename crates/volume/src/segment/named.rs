//! How much of a segment is named, or is there to be named.
//!
//! A block of data is counted twice: as what it takes of the segment, in granules, by which victims are chosen and space
//! is told; and as a block, which is what a guest sees. A block that is not packed takes 64 granules.

use holdfast_base::BLOCK_BYTES;
use holdfast_format::packing::{BLOCK_GRANULES, GRANULE_BYTES, StoredLengths};
use std::ops::{AddAssign, Neg, Sub};

/// An amount of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Named {
    /// Granules of data, without padding; of metadata bytes of leaves, or 1 for a part of a checkpoint.
    pub(crate) size: u64,
    /// Of data.
    pub(crate) blocks: u64,
}

/// A difference of two.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Change {
    pub(crate) size: i64,
    pub(crate) blocks: i64,
}

/// Bytes of so many granules.
pub(crate) fn bytes_of(granules: u64) -> u64 {
    granules * GRANULE_BYTES as u64
}

/// Granules of so many bytes of whole blocks.
pub(crate) fn granules_of(bytes: u64) -> u64 {
    bytes / BLOCK_BYTES as u64 * u64::from(BLOCK_GRANULES)
}

impl Named {
    pub(crate) const NOTHING: Named = Named { size: 0, blocks: 0 };

    /// Blocks that are not packed.
    pub(crate) fn of_blocks(blocks: u64) -> Named {
        Named { size: blocks * u64::from(BLOCK_GRANULES), blocks }
    }

    /// Units of a packed segment.
    pub(crate) fn of_units(lengths: &StoredLengths) -> Named {
        Named { size: lengths.granules(), blocks: lengths.len() }
    }

    /// Metadata.
    pub(crate) fn of_metadata(size: u64) -> Named {
        Named { size, blocks: 0 }
    }

    pub(crate) fn is_nothing(self) -> bool {
        self == Named::NOTHING
    }

    /// Whether there is as much in the other one, of both.
    pub(crate) fn is_within(self, other: Named) -> bool {
        self.size <= other.size && self.blocks <= other.blocks
    }

    /// `None` where there is less.
    pub(crate) fn checked_sub(self, other: Named) -> Option<Named> {
        Some(Named { size: self.size.checked_sub(other.size)?, blocks: self.blocks.checked_sub(other.blocks)? })
    }

    /// Nothing where that would be less.
    pub(crate) fn saturating_change(self, by: Change) -> Named {
        let (size, blocks) = (self.size.saturating_add_signed(by.size), self.blocks.saturating_add_signed(by.blocks));
        Named { size, blocks }
    }

    /// `None` where that would be less than nothing.
    pub(crate) fn checked_change(self, by: Change) -> Option<Named> {
        let (size, blocks) = (self.size.checked_add_signed(by.size)?, self.blocks.checked_add_signed(by.blocks)?);
        Some(Named { size, blocks })
    }

    /// As a change from nothing.
    pub(crate) fn as_more(self) -> Change {
        Change { size: self.size as i64, blocks: self.blocks as i64 }
    }
}

impl AddAssign for Named {
    fn add_assign(&mut self, other: Named) {
        self.size += other.size;
        self.blocks += other.blocks;
    }
}

impl Sub for Named {
    type Output = Named;

    fn sub(self, other: Named) -> Named {
        Named { size: self.size - other.size, blocks: self.blocks - other.blocks }
    }
}

impl Change {
    pub(crate) fn is_none(self) -> bool {
        self == Change::default()
    }
}

impl AddAssign for Change {
    fn add_assign(&mut self, other: Change) {
        self.size += other.size;
        self.blocks += other.blocks;
    }
}

impl Sub for Change {
    type Output = Change;

    fn sub(self, other: Change) -> Change {
        Change { size: self.size - other.size, blocks: self.blocks - other.blocks }
    }
}

impl Neg for Change {
    type Output = Change;

    fn neg(self) -> Change {
        Change { size: -self.size, blocks: -self.blocks }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_format::packing::{Codec, StoredLength};

    #[test]
    fn blocks_are_64_granules_unless_they_are_packed() {
        assert_eq!(Named::of_blocks(3), Named { size: 192, blocks: 3 });
        let units = [StoredLength::RAW, StoredLength::compressed(Codec::Lz4, 5)];
        assert_eq!(Named::of_units(&StoredLengths::new(units)), Named { size: 69, blocks: 2 });
        assert_eq!((bytes_of(192), granules_of(3 * 4096)), (3 * 4096, 192));
    }

    #[test]
    fn one_that_has_less_blocks_and_more_granules_is_not_within_the_other() {
        let (one, other) = (Named { size: 64, blocks: 1 }, Named { size: 3, blocks: 2 });
        assert!(!one.is_within(other) && !other.is_within(one) && one.is_within(one));
        assert_eq!((one.checked_sub(other), other.checked_sub(one)), (None, None));
        let change = one.as_more() - other.as_more();
        assert_eq!(change, Change { size: 61, blocks: -1 });
        assert_eq!(other.checked_change(change), Some(one));
        assert_eq!(one.checked_change(-change), Some(other));
        assert_eq!(Named::NOTHING.checked_change(change), None);
        assert_eq!(Named::NOTHING.saturating_change(change), Named { size: 61, blocks: 0 });
        assert!(!change.is_none() && !(-change).is_none());
    }
}
