//! Where the leaves of the map lie, and which layers have one for the same blocks.

use super::leaf::{LEAF_BLOCKS, LeafNo, LeafPointer};
use holdfast_base::{Key, ObjectId};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeBounds;

#[derive(Debug, Default)]
pub(crate) struct Directory {
    pointers: BTreeMap<LeafNo, LeafPointer>,
    /// (place of the leaf in its layer, layer), so that a read skips layers that say nothing of its blocks.
    layers: BTreeSet<(u64, ObjectId)>,
}

fn by_place(no: LeafNo) -> (u64, ObjectId) {
    let key = Key(no.first_key());
    (key.lba().0 / LEAF_BLOCKS, key.object())
}

impl Directory {
    pub(crate) fn get(&self, no: LeafNo) -> Option<LeafPointer> {
        self.pointers.get(&no).copied()
    }

    pub(crate) fn len(&self) -> usize {
        self.pointers.len()
    }

    pub(crate) fn insert(&mut self, no: LeafNo, pointer: LeafPointer) -> Option<LeafPointer> {
        self.layers.insert(by_place(no));
        self.pointers.insert(no, pointer)
    }

    pub(crate) fn remove(&mut self, no: LeafNo) -> Option<LeafPointer> {
        self.layers.remove(&by_place(no));
        self.pointers.remove(&no)
    }

    pub(crate) fn clear(&mut self) {
        *self = Directory::default();
    }

    /// Leaves from there on.
    pub(crate) fn iter_from(&self, from: LeafNo) -> impl Iterator<Item = (LeafNo, LeafPointer)> {
        self.pointers.range(from..).map(|(no, pointer)| (*no, *pointer))
    }

    pub(crate) fn range(&self, range: impl RangeBounds<LeafNo>) -> impl DoubleEndedIterator<Item = LeafNo> {
        self.pointers.range(range).map(|(no, _)| *no)
    }

    /// The first place from there on of which any layer has a leaf, in leaves.
    pub(crate) fn place_from(&self, place: u64) -> Option<u64> {
        self.layers.range((place, ObjectId(0))..).next().map(|(place, _)| *place)
    }

    /// The first layer from there on that has a leaf at that place, which is a number of leaves.
    pub(crate) fn layer_from(&self, place: u64, layer: ObjectId) -> Option<ObjectId> {
        self.layers.range((place, layer)..=(place, ObjectId(u32::MAX))).next().map(|(_, layer)| *layer)
    }

    /// Layers that have a leaf for any of these blocks.
    pub(crate) fn layers_at(&self, first: u64, blocks: u64) -> impl Iterator<Item = ObjectId> {
        let from = (first / LEAF_BLOCKS, ObjectId(0));
        let to = ((first + blocks - 1) / LEAF_BLOCKS, ObjectId(u32::MAX));
        self.layers.range(from..=to).map(|(_, layer)| *layer)
    }

    pub(super) fn verify(&self) {
        let by_layer: BTreeSet<(u64, ObjectId)> = self.pointers.keys().map(|no| by_place(*no)).collect();
        assert_eq!(self.layers, by_layer, "each leaf is found by its place");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segment::tests::no;

    #[test]
    fn leaves_are_found_by_their_place_in_whatever_layer() {
        let pointer = LeafPointer { segment: no(1, 1), offset_bytes: 0, len_bytes: 10, crc: 0 };
        let leaf =
            |layer: u32, place: u64| LeafNo::of(Key::new(ObjectId(layer), holdfast_base::Lba(place * LEAF_BLOCKS)));
        let mut directory = Directory::default();
        for no in [leaf(0, 3), leaf(2, 3), leaf(1, 7)] {
            assert!(directory.insert(no, pointer).is_none());
        }
        directory.verify();
        assert_eq!(directory.layers_at(3 * LEAF_BLOCKS, 1).collect::<Vec<_>>(), [ObjectId(0), ObjectId(2)]);
        assert_eq!(directory.layers_at(0, 8 * LEAF_BLOCKS).count(), 3);
        assert_eq!([0, 3, 4, 8].map(|from| directory.place_from(from)), [Some(3), Some(3), Some(7), None]);
        assert_eq!(directory.remove(leaf(2, 3)), Some(pointer));
        assert_eq!(directory.layers_at(3 * LEAF_BLOCKS, 1).count(), 1);
        directory.verify();
    }
}
