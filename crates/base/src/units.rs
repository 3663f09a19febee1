//! Units: the 4 KiB block, its address, and the key under which a map names it.

use crate::ids::ObjectId;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Bytes of a block, the unit of maps, checksums and segments.
pub const BLOCK_BYTES: usize = 4096;

/// Logical block address: index of a 4 KiB block in an object.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Default)]
pub struct Lba(pub u64);

impl fmt::Debug for Lba {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lba{}", self.0)
    }
}

/// Bits of a key that hold the block; the rest hold the object: 4 PiB an object, 16 Mi objects a volume.
const LBA_BITS: u32 = 40;

/// Largest number of blocks that an object can have.
pub const OBJECT_BLOCKS_MAX: u64 = 1 << LBA_BITS;

/// (object, block) in one integer, ordered by object, then by block.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Default)]
pub struct Key(pub u64);

impl Key {
    pub fn new(object: ObjectId, lba: Lba) -> Key {
        assert!(lba.0 < OBJECT_BLOCKS_MAX, "block address {} beyond an object's {OBJECT_BLOCKS_MAX} blocks", lba.0);
        assert!(object.0 < 1 << (64 - LBA_BITS), "object number {} beyond the key's width", object.0);
        Key((u64::from(object.0) << LBA_BITS) | lba.0)
    }

    pub fn object(self) -> ObjectId {
        ObjectId((self.0 >> LBA_BITS) as u32)
    }

    pub fn lba(self) -> Lba {
        Lba(self.0 & (OBJECT_BLOCKS_MAX - 1))
    }

    /// The key `blocks` further on in the same object.
    #[must_use]
    pub fn offset(self, blocks: u64) -> Key {
        Key::new(self.object(), Lba(self.lba().0 + blocks))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.object().0, self.lba().0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_order_by_object_then_block() {
        let a = Key::new(ObjectId(0), Lba(OBJECT_BLOCKS_MAX - 1));
        let b = Key::new(ObjectId(1), Lba(0));
        assert!(a < b);
        assert_eq!(b.object(), ObjectId(1));
        assert_eq!(a.lba(), Lba(OBJECT_BLOCKS_MAX - 1));
    }

    #[test]
    #[should_panic(expected = "beyond an object's")]
    fn a_block_beyond_the_object_is_a_bug() {
        let _ = Key::new(ObjectId(0), Lba(OBJECT_BLOCKS_MAX));
    }
}
