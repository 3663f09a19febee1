//! Units: the 4 KiB block, its address, and the key under which a map names it.

use crate::ids::ObjectId;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;

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

/// How many bits of a key hold the block, for a whole volume; the rest hold the object.
///
/// What lies in the first 256 TiB of an object has the same key in both: there object n is object n × 16 of wide keys.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KeyWidth {
    /// 40: 4 PiB an object, 16 Mi objects a volume.
    Narrow,
    /// 36: 256 TiB an object, 256 Mi objects a volume.
    Wide,
}

impl KeyWidth {
    pub const fn lba_bits(self) -> u32 {
        match self {
            KeyWidth::Narrow => 40,
            KeyWidth::Wide => 36,
        }
    }

    /// Largest number of blocks that an object can have.
    pub const fn object_blocks_max(self) -> u64 {
        1 << self.lba_bits()
    }

    /// Objects have lower numbers.
    pub const fn objects_max(self) -> u32 {
        1 << (u64::BITS - self.lba_bits())
    }

    /// `None` for an object or a block that has no key of this width.
    pub fn encode(self, object: ObjectId, lba: Lba) -> Option<u64> {
        let has_key = object.0 < self.objects_max() && lba.0 < self.object_blocks_max();
        has_key.then_some(u64::from(object.0) << self.lba_bits() | lba.0)
    }

    pub fn decode(self, key: u64) -> (ObjectId, Lba) {
        (ObjectId((key >> self.lba_bits()) as u32), Lba(key & (self.object_blocks_max() - 1)))
    }

    /// The number that an object of a volume with such keys has in wide ones.
    pub fn widened(self, object: ObjectId) -> Option<ObjectId> {
        let (wide, _) = KeyWidth::Wide.decode(self.encode(object, Lba(0))?);
        Some(wide)
    }

    /// The other way; `None` for one that no object with such keys has.
    pub fn of_wide(self, object: ObjectId) -> Option<ObjectId> {
        let (own, lba) = self.decode(KeyWidth::Wide.encode(object, Lba(0))?);
        (lba == Lba(0)).then_some(own)
    }
}

/// Bits of a key that hold the block.
const LBA_BITS: u32 = KeyWidth::Narrow.lba_bits();

/// Largest number of blocks that an object can have.
pub const OBJECT_BLOCKS_MAX: u64 = KeyWidth::Narrow.object_blocks_max();

/// (object, block) in one integer, ordered by object, then by block; narrow.
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

/// Blocks of these bytes that are not zero alone, those that follow each other together. The last block may be shorter.
pub fn nonzero_runs(bytes: &[u8]) -> Vec<Range<usize>> {
    let mut found: Vec<Range<usize>> = Vec::new();
    for (number, block) in bytes.chunks(BLOCK_BYTES).enumerate() {
        let at = number * BLOCK_BYTES;
        match found.last_mut() {
            _ if block.iter().all(|byte| *byte == 0) => {}
            Some(last) if last.end == at => last.end += block.len(),
            _ => found.push(at..at + block.len()),
        }
    }
    found
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
    fn keys_of_both_widths_read_back_and_others_are_none() {
        for width in [KeyWidth::Narrow, KeyWidth::Wide] {
            let (object, block) = (width.objects_max() - 1, width.object_blocks_max() - 1);
            assert_eq!(width.encode(ObjectId(object), Lba(block)), Some(u64::MAX));
            assert_eq!(width.encode(ObjectId(object + 1), Lba(0)), None);
            assert_eq!(width.encode(ObjectId(0), Lba(block + 1)), None);
            for key in [0, 1, 1 << 36, (1 << 40) - 1, 1 << 40, 0x0123_4567_89ab_cdef, u64::MAX] {
                let (object, lba) = width.decode(key);
                assert_eq!(width.encode(object, lba), Some(key));
            }
        }
        assert_eq!(KeyWidth::Narrow.encode(ObjectId(3), Lba(5)), Some(Key::new(ObjectId(3), Lba(5)).0));
        assert_eq!((KeyWidth::Wide.objects_max(), KeyWidth::Wide.object_blocks_max() << 12), (1 << 28, 256 << 40));
    }

    #[test]
    fn an_object_of_256_tib_keeps_its_keys_when_they_become_wide() {
        let last = Lba(KeyWidth::Wide.object_blocks_max() - 1);
        for object in [0, 1, 7, (1 << 24) - 1].map(ObjectId) {
            let wide = KeyWidth::Narrow.widened(object).expect("it has keys");
            assert_eq!((wide.0, KeyWidth::Narrow.of_wide(wide)), (object.0 * 16, Some(object)));
            for lba in [Lba(0), Lba(77), last] {
                assert_eq!(KeyWidth::Narrow.encode(object, lba), KeyWidth::Wide.encode(wide, lba));
            }
            assert_eq!((KeyWidth::Wide.widened(wide), KeyWidth::Wide.of_wide(wide)), (Some(wide), Some(wide)));
        }
        assert_eq!(KeyWidth::Narrow.widened(ObjectId(1 << 24)), None);
        assert_eq!(KeyWidth::Narrow.of_wide(ObjectId(17)), None);
        assert_eq!(KeyWidth::Wide.of_wide(ObjectId(1 << 28)), None);
    }

    #[test]
    #[should_panic(expected = "beyond an object's")]
    fn a_block_beyond_the_object_is_a_bug() {
        let _ = Key::new(ObjectId(0), Lba(OBJECT_BLOCKS_MAX));
    }
}
