//! Looking places up: in one layer, and through the layers below it.

use crate::controller::Controller;
use crate::layers::{keys_of, leaves_of};
use crate::leafload::Pins;
use crate::map::{LEAF_BLOCKS, LeafNo, Place};
use crate::rangemap::Piece;
use holdfast_base::{Key, Lba, ObjectId};
use std::collections::BTreeSet;

/// With so few layers each is asked; with more, those that say something of the blocks are looked for first.
const ASKED_MAX: usize = 3;

impl Controller {
    /// Places of `blocks` blocks from `start` on, without holes in the answer; or the leaves that must be loaded first.
    pub(crate) fn resolve(&mut self, start: u64, blocks: u64, pins: &Pins) -> Result<Vec<Piece<Place>>, Vec<LeafNo>> {
        let mut places = Vec::new();
        let mut missing = Vec::new();
        for piece in self.overlay.pieces(start, blocks) {
            match piece.value {
                Some(mapped) => {
                    places.push(Piece { start: piece.start, len: piece.len, value: Some(mapped.place) });
                }
                None => self.resolve_in_base(piece.start, piece.len, pins, &mut places, &mut missing),
            }
        }
        missing.dedup();
        if missing.is_empty() { Ok(places) } else { Err(missing) }
    }

    fn resolve_in_base(
        &mut self,
        start: u64,
        len: u64,
        pins: &Pins,
        places: &mut Vec<Piece<Place>>,
        missing: &mut Vec<LeafNo>,
    ) {
        let end = start + len;
        let mut at = start;
        while at < end {
            let no = LeafNo::of(Key(at));
            let leaf_end = (no.first_key() + LEAF_BLOCKS).min(end);
            if !self.directory.contains(no) {
                // A hole up to the next leaf that exists.
                let next = self.directory.range(no..).next().map_or(end, LeafNo::first_key).min(end);
                let hole_end = next.max(leaf_end);
                places.push(Piece { start: at, len: hole_end - at, value: None });
                at = hole_end;
                continue;
            }
            let pinned = (pins.generation == self.checkpointer.generation).then(|| pins.leaves.get(&no)).flatten();
            match pinned.cloned().or_else(|| self.leaves.get(no)) {
                Some(leaf) => {
                    for piece in leaf.lookup(at - no.first_key(), leaf_end - at) {
                        places.push(Piece { start: no.first_key() + piece.start, ..piece });
                    }
                }
                None => missing.push(no),
            }
            at = leaf_end;
        }
    }

    /// Places of blocks as a layer sees them: its own, else its parent's, and so on. Pieces start at block numbers.
    pub(crate) fn resolve_through(
        &mut self,
        layer: ObjectId,
        first: u64,
        blocks: u64,
        pins: &Pins,
    ) -> Result<Vec<Piece<Place>>, Vec<LeafNo>> {
        if layer == ObjectId(0) {
            // A volume without snapshots: a key is a block number.
            return self.resolve(first, blocks, pins);
        }
        let mut found = Vec::new();
        let mut missing = Vec::new();
        let mut gaps = vec![(first, blocks)];
        for layer in self.layers_to_ask(layer, first, blocks) {
            let mut left = Vec::new();
            for (start, len) in gaps {
                let key = Key::new(layer, Lba(start)).0;
                match self.resolve(key, len, pins) {
                    Ok(pieces) => {
                        for piece in pieces {
                            let piece = Piece { start: start + (piece.start - key), ..piece };
                            match piece.value {
                                Some(_) => found.push(piece),
                                None => push_gap(&mut left, piece.start, piece.len),
                            }
                        }
                    }
                    Err(leaves) => missing.extend(leaves),
                }
            }
            gaps = left;
            if gaps.is_empty() {
                break;
            }
        }
        if !missing.is_empty() {
            missing.sort_unstable();
            missing.dedup();
            return Err(missing);
        }
        found.extend(gaps.into_iter().map(|(start, len)| Piece { start, len, value: None }));
        found.sort_unstable_by_key(|piece| piece.start);
        Ok(found)
    }

    /// The layer and those below it that may say something of the blocks, nearest first.
    fn layers_to_ask(&mut self, layer: ObjectId, first: u64, blocks: u64) -> Vec<ObjectId> {
        let chain = self.layers.chain(layer);
        if chain.len() <= ASKED_MAX {
            return chain.to_vec();
        }
        let known = self.overlaid.iter().copied().chain(self.directory.layers_at(first, blocks));
        let mut layers: Vec<ObjectId> =
            known.filter(|layer| chain.binary_search_by(|of| layer.cmp(of)).is_ok()).collect();
        layers.sort_unstable_by(|a, b| b.cmp(a));
        layers.dedup();
        layers
    }

    /// What the map names now of blocks that were once written under these keys: the layer may have been merged, or be
    /// about to be, into the one that stands on it.
    pub(crate) fn resolve_written(
        &mut self,
        start: u64,
        blocks: u64,
        pins: &Pins,
    ) -> Result<Vec<Piece<Place>>, Vec<LeafNo>> {
        let mut layer = self.layers.now_of(Key(start).object());
        let mut places = Vec::new();
        let mut gaps = vec![(Key(start).lba(), blocks)];
        loop {
            let mut left = Vec::new();
            for (lba, len) in gaps {
                for piece in self.resolve(Key::new(layer, lba).0, len, pins)? {
                    match piece.value {
                        Some(_) => places.push(piece),
                        None => left.push((Key(piece.start).lba(), piece.len)),
                    }
                }
            }
            gaps = left;
            match self.layers.heir(layer) {
                Some(heir) if !gaps.is_empty() => layer = heir,
                _ => return Ok(places),
            }
        }
    }

    /// One past the last block that a layer or one below it says anything of.
    pub(crate) fn mapped_end(&mut self, layer: ObjectId) -> u64 {
        let mut end = 0;
        for id in self.layers.chain(layer).iter() {
            let keys = keys_of(*id);
            let last_leaf = self
                .directory
                .range(leaves_of(*id))
                .next_back()
                .map_or(0, |no| no.first_key() + LEAF_BLOCKS - keys.start);
            let last_run = self.overlay.end_before(keys.end).saturating_sub(keys.start);
            end = end.max(last_leaf).max(last_run);
        }
        end
    }

    /// Layers with runs in the overlay, as they are now: elsewhere the set only grows.
    pub(crate) fn find_overlaid(&mut self) {
        let mut overlaid = BTreeSet::new();
        let mut from = 0;
        while let Some((start, _, _)) = self.overlay.iter_from(from).next() {
            let layer = Key(start).object();
            overlaid.insert(layer);
            from = keys_of(layer).end;
        }
        self.overlaid = overlaid;
    }
}

/// Gaps that touch become one.
fn push_gap(gaps: &mut Vec<(u64, u64)>, start: u64, len: u64) {
    match gaps.last_mut() {
        Some((last, last_len)) if *last + *last_len == start => *last_len += len,
        _ => gaps.push((start, len)),
    }
}
