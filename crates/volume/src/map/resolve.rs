//! Looking places up: in one layer, and through the layers below it.

use super::Map;
use super::layers::{keys_of, leaf_in, leaves_of};
use super::leaf::{LEAF_BLOCKS, Leaf, LeafNo, Place};
use super::leafload::Pins;
use super::rangemap::{Piece, Sliceable};
use holdfast_base::{Key, Lba, ObjectId};
use std::collections::BTreeSet;
use std::sync::Arc;

/// So few layers are asked one after the other. More are asked once, and what they say is kept.
const ASKED_MAX: usize = 2;

impl Map {
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
            let Some(pointer) = self.directory.get(no) else {
                // A hole up to the next leaf that exists.
                let next = self.directory.range(no..).next().map_or(end, LeafNo::first_key).min(end);
                let hole_end = next.max(leaf_end);
                places.push(Piece { start: at, len: hole_end - at, value: None });
                at = hole_end;
                continue;
            };
            match pins.get(no, pointer).cloned().or_else(|| self.leaves.get(no)) {
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
        let mut search = Search::new(first, blocks);
        if self.layers.is_live(layer) {
            search.ask(self, layer, pins);
        }
        let frozen = if self.layers.is_live(layer) { self.layers.parent(layer) } else { Some(layer) };
        if let Some(frozen) = frozen {
            if self.layers.chain(frozen).len() <= ASKED_MAX {
                search.ask_all(self, frozen, pins);
            } else {
                search.ask_flat(self, frozen, pins);
            }
        }
        search.outcome()
    }

    /// What may differ between two states: pieces with a value where a layer that only one of them stands on says
    /// something.
    pub(crate) fn resolve_changes(
        &mut self,
        layer: ObjectId,
        since: ObjectId,
        first: u64,
        blocks: u64,
        pins: &Pins,
    ) -> Result<Vec<Piece<Place>>, Vec<LeafNo>> {
        let (now, then) = (self.layers.chain(layer), self.layers.chain(since));
        let mut between = self.layers_to_ask(layer, first, blocks);
        between.extend(self.layers_to_ask(since, first, blocks));
        between.retain(|layer| now.contains(layer) != then.contains(layer));
        let mut search = Search::new(first, blocks);
        for layer in between {
            search.ask(self, layer, pins);
        }
        search.outcome()
    }

    /// What a frozen layer and those below it say of the blocks of a leaf, as one leaf. Kept until any of it is moved.
    fn flat_leaf(&mut self, frozen: ObjectId, place: u64, pins: &Pins) -> Result<Flat, Vec<LeafNo>> {
        let first = place * LEAF_BLOCKS;
        let no = LeafNo::of(Key::new(frozen, Lba(first)));
        if let Some(leaf) = self.flats.get(no) {
            return Ok(Flat::Leaf(leaf));
        }
        let mut search = Search::new(first, LEAF_BLOCKS);
        search.ask_all(self, frozen, pins);
        let mut pieces = search.outcome()?;
        if pieces.iter().any(|piece| matches!(piece.value, Some(Place::Log { .. }))) {
            return Ok(Flat::Pieces(pieces));
        }
        pieces.iter_mut().for_each(|piece| piece.start -= first);
        let leaf = Arc::new(Leaf::default().merged(&pieces, false));
        self.flats.insert(no, Arc::clone(&leaf));
        self.flat_layers.insert(frozen);
        // Together they stay in the budget.
        self.limit_leaves();
        Ok(Flat::Leaf(leaf))
    }

    /// Blocks of a layer get another place.
    pub(crate) fn forget_flat(&mut self, start: u64, blocks: u64) {
        if self.flat_layers.is_empty() || self.layers.is_live(Key(start).object()) {
            return;
        }
        let (first, last) = (LeafNo::of(Key(start)), LeafNo::of(Key(start + blocks - 1)));
        for layer in &self.flat_layers {
            for no in leaf_in(first, *layer).0..=leaf_in(last, *layer).0 {
                self.flats.remove(LeafNo(no));
            }
        }
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

enum Flat {
    Leaf(Arc<Leaf>),
    Pieces(Vec<Piece<Place>>),
}

/// A search for places through layers: what was found, and what no layer has said anything of yet.
struct Search {
    found: Vec<Piece<Place>>,
    gaps: Vec<(u64, u64)>,
    missing: Vec<LeafNo>,
}

impl Search {
    fn new(first: u64, blocks: u64) -> Search {
        Search { found: Vec::new(), gaps: vec![(first, blocks)], missing: Vec::new() }
    }

    fn ask(&mut self, map: &mut Map, layer: ObjectId, pins: &Pins) {
        for (start, len) in std::mem::take(&mut self.gaps) {
            let key = Key::new(layer, Lba(start)).0;
            match map.resolve(key, len, pins) {
                Ok(pieces) => self.take_in(pieces, key - start),
                Err(leaves) => self.missing.extend(leaves),
            }
        }
    }

    /// The layer and those below it.
    fn ask_all(&mut self, map: &mut Map, layer: ObjectId, pins: &Pins) {
        let Some((first, end)) = self.span() else { return };
        for layer in map.layers_to_ask(layer, first, end - first) {
            if !self.gaps.is_empty() {
                self.ask(map, layer, pins);
            }
        }
    }

    /// The layer and those below it, by leaves that say what all of them say.
    fn ask_flat(&mut self, map: &mut Map, frozen: ObjectId, pins: &Pins) {
        for (start, len) in std::mem::take(&mut self.gaps) {
            let mut at = start;
            while at < start + len {
                let base = at / LEAF_BLOCKS * LEAF_BLOCKS;
                let count = (base + LEAF_BLOCKS).min(start + len) - at;
                match map.flat_leaf(frozen, at / LEAF_BLOCKS, pins) {
                    Ok(Flat::Leaf(leaf)) => {
                        let pieces = leaf.lookup(at - base, count);
                        self.found.extend(pieces.into_iter().map(|p| Piece { start: p.start + base, ..p }));
                    }
                    Ok(Flat::Pieces(pieces)) => {
                        let cut = pieces.into_iter().filter_map(|piece| cut(piece, at, at + count));
                        self.found.extend(cut);
                    }
                    Err(leaves) => self.missing.extend(leaves),
                }
                at += count;
            }
        }
    }

    fn span(&self) -> Option<(u64, u64)> {
        let (last, len) = self.gaps.last()?;
        Some((self.gaps[0].0, last + len))
    }

    fn take_in(&mut self, pieces: Vec<Piece<Place>>, base: u64) {
        for piece in pieces {
            let start = piece.start - base;
            match (piece.value, self.gaps.last_mut()) {
                (Some(place), _) => self.found.push(Piece { start, len: piece.len, value: Some(place) }),
                // Gaps that touch become one.
                (None, Some((last, last_len))) if *last + *last_len == start => *last_len += piece.len,
                (None, _) => self.gaps.push((start, piece.len)),
            }
        }
    }

    /// Every block once, in order; or the leaves that must be loaded first.
    fn outcome(mut self) -> Result<Vec<Piece<Place>>, Vec<LeafNo>> {
        if !self.missing.is_empty() {
            self.missing.sort_unstable();
            self.missing.dedup();
            return Err(self.missing);
        }
        self.found.extend(self.gaps.into_iter().map(|(start, len)| Piece { start, len, value: None }));
        self.found.sort_unstable_by_key(|piece| piece.start);
        Ok(self.found)
    }
}

fn cut(piece: Piece<Place>, from: u64, to: u64) -> Option<Piece<Place>> {
    let (start, end) = (piece.start.max(from), (piece.start + piece.len).min(to));
    let value = |place: Place| place.slice(start - piece.start, end - start);
    (start < end).then(|| Piece { start, len: end - start, value: piece.value.map(value) })
}
