//! Where the leaves of the map lie, and which layers have one for the same blocks.

use crate::map::{LEAF_BLOCKS, LeafNo, LeafPointer};
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

    pub(crate) fn contains(&self, no: LeafNo) -> bool {
        self.pointers.contains_key(&no)
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

    pub(crate) fn iter(&self) -> impl Iterator<Item = (LeafNo, LeafPointer)> {
        self.pointers.iter().map(|(no, pointer)| (*no, *pointer))
    }

    pub(crate) fn range(&self, range: impl RangeBounds<LeafNo>) -> impl DoubleEndedIterator<Item = LeafNo> {
        self.pointers.range(range).map(|(no, _)| *no)
    }

    /// The first place from there on of which any layer has a leaf, in leaves.
    pub(crate) fn place_from(&self, place: u64) -> Option<u64> {
        self.layers.range((place, ObjectId(0))..).next().map(|(place, _)| *place)
    }

    /// Layers that have a leaf for any of these blocks.
    pub(crate) fn layers_at(&self, first: u64, blocks: u64) -> impl Iterator<Item = ObjectId> {
        let from = (first / LEAF_BLOCKS, ObjectId(0));
        let to = ((first + blocks - 1) / LEAF_BLOCKS, ObjectId(u32::MAX));
        self.layers.range(from..=to).map(|(_, layer)| *layer)
    }
}
