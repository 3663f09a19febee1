//! What leaves of the map name although the overlay says something newer: dead, but not folded yet.
//!
//! Of leaves that are in memory it is counted as it happens, of others when they are loaded or folded. So a segment is
//! free as soon as a durable checkpoint holds the overlay that hides what leaves still name of it, and no fold is
//! waited for.
//!
//! Invariants: (1) what is counted as shadowed is shadowed; there may be more. (2) A leaf may name segments that are
//! gone; then the overlay hides what it says of them, until the leaf is folded (asserted when a leaf is counted, where
//! assertions are for tests: a leaf that is loaded may have a thousand segments).

use super::leaf::{LEAF_BLOCKS, Leaf, LeafNo, Place};
use super::{Accounts, Map};
use crate::segment::{Named, Segments};
use holdfast_base::Key;
use holdfast_format::record::SegmentNo;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Debug, Default)]
pub(super) struct Shadow {
    /// What each leaf names of segments and the overlay hides.
    counted: BTreeMap<LeafNo, BTreeMap<SegmentNo, Named>>,
    /// Leaves of which all was counted that was shadowed when they were last looked at.
    looked_at: BTreeSet<LeafNo>,
    /// Leaves of which more may be shadowed than is counted; of those that were looked at what was shadowed since:
    /// first block in the leaf, and blocks.
    uncounted: BTreeMap<LeafNo, Vec<(u16, u16)>>,
    /// So are more than are worth listing.
    is_vague: bool,
    /// Since the leaves of a fold are being chosen.
    is_vague_anew: bool,
}

/// Leaves that one run of the overlay hides: of more, only those in memory are looked at.
const LEAVES_MAX: usize = 1024;

impl Shadow {
    /// Whether all that is shadowed is known.
    pub(crate) fn is_known(&self) -> bool {
        self.uncounted.is_empty() && !self.is_vague
    }

    /// Leaves are being chosen from here on.
    pub(super) fn on_choosing(&mut self) {
        self.is_vague_anew = false;
    }

    /// Everything is folded that could be when that began.
    pub(super) fn on_all_folded(&mut self) {
        self.is_vague = self.is_vague_anew;
    }
}

impl Map {
    /// The overlay is about to say something of these blocks.
    pub(super) fn hide(&mut self, start: u64, blocks: u64, accounts: &mut Accounts<'_>) {
        // A choice of leaves that is past its beginning misses what it goes on to hide.
        let is_long = LeafNo::of(Key(start)) != LeafNo::of(Key(start + blocks - 1));
        self.shadow.is_vague_anew |= self.shadow.is_vague && is_long;
        let mut said_of_anew = self.overlay.gaps(start, blocks);
        if accounts.mutations.hides_twice() {
            said_of_anew = vec![(start, start + blocks)];
        }
        for (from, to) in said_of_anew {
            let (first, last) = (LeafNo::of(Key(from)), LeafNo::of(Key(to - 1)));
            let mut leaves: Vec<LeafNo> = self.directory.range(first..=last).take(LEAVES_MAX + 1).collect();
            if leaves.len() > LEAVES_MAX {
                (self.shadow.is_vague, self.shadow.is_vague_anew) = (true, true);
                // What is shadowed of those that are not in memory is listed nowhere.
                self.shadow.looked_at.clear();
                leaves = self.leaves.cached(first..=last);
            }
            for no in leaves {
                let base = no.first_key();
                let (from, to) = (from.max(base), to.min(base + LEAF_BLOCKS));
                let Some(leaf) = self.leaves.get(no) else {
                    let since = self.shadow.uncounted.entry(no).or_default();
                    if self.shadow.looked_at.contains(&no) {
                        since.push(((from - base) as u16, (to - from) as u16));
                    }
                    continue;
                };
                self.count_shadowed(no, &leaf, from - base, to - from, accounts.segments);
            }
        }
    }

    /// True if a segment is dead by that.
    fn count_shadowed(&mut self, no: LeafNo, leaf: &Leaf, start: u64, blocks: u64, segments: &mut Segments) -> bool {
        let mut is_dead = false;
        for piece in leaf.lookup(start, blocks) {
            let Some(Place::Segment { segment, stored, .. }) = piece.value else { continue };
            let named = stored.named(piece.len);
            if let Some(visible) = segments.add_shadowed(segment, named) {
                *self.shadow.counted.entry(no).or_default().entry(segment).or_default() += named;
                is_dead |= visible.is_nothing();
            }
        }
        is_dead
    }

    /// A leaf is in memory: what the overlay hides of it is counted, if it was looked at before what came since.
    pub(crate) fn look_at_shadowed(&mut self, no: LeafNo, leaf: &Leaf, accounts: &mut Accounts<'_>) {
        if !self.shadow.looked_at.contains(&no) {
            return self.recount_shadowed(no, leaf, accounts);
        }
        let mut is_any_dead = false;
        for (start, blocks) in self.shadow.uncounted.remove(&no).unwrap_or_default() {
            is_any_dead |= self.count_shadowed(no, leaf, u64::from(start), u64::from(blocks), accounts.segments);
        }
        if is_any_dead {
            accounts.wants.free_dead();
        }
    }

    /// A leaf has changed, or was never looked at: what the overlay hides of it is counted anew.
    pub(super) fn recount_shadowed(&mut self, no: LeafNo, leaf: &Leaf, accounts: &mut Accounts<'_>) {
        self.forget_shadowed(no, accounts.segments);
        self.shadow.looked_at.insert(no);
        let base = no.first_key();
        let gaps = self.overlay.gaps(base, LEAF_BLOCKS);
        let (mut at, mut is_any_dead) = (base, false);
        for (from, to) in gaps.into_iter().chain([(base + LEAF_BLOCKS, base + LEAF_BLOCKS)]) {
            if at < from {
                is_any_dead |= self.count_shadowed(no, leaf, at - base, from - at, accounts.segments);
            }
            if cfg!(debug_assertions) {
                assert_there(no, leaf, (from - base, to - from), accounts.segments);
            }
            at = to;
        }
        if is_any_dead {
            accounts.wants.free_dead();
        }
    }

    /// Whether more of a leaf is counted as shadowed than is.
    pub(crate) fn shadows_too_much(&self, no: LeafNo, leaf: &Leaf) -> bool {
        let Some(counted) = self.shadow.counted.get(&no) else { return false };
        let mut shadowed: BTreeMap<SegmentNo, Named> = BTreeMap::new();
        for piece in self.overlay.pieces(no.first_key(), LEAF_BLOCKS).into_iter().filter(|p| p.value.is_some()) {
            for below in leaf.lookup(piece.start - no.first_key(), piece.len) {
                if let Some(Place::Segment { segment, stored, .. }) = below.value {
                    *shadowed.entry(segment).or_default() += stored.named(below.len);
                }
            }
        }
        counted.iter().any(|(segment, named)| shadowed.get(segment).is_none_or(|there| !named.is_within(*there)))
    }

    /// All is counted anew as leaves are loaded and folded.
    pub(crate) fn forget_all_shadowed(&mut self, segments: &mut Segments) {
        let leaves: Vec<LeafNo> = self.shadow.counted.keys().copied().collect();
        for no in leaves {
            self.forget_shadowed(no, segments);
        }
        self.nothing_is_counted();
        self.unfolded = true;
    }

    /// After a checkpoint was loaded: nothing is counted yet.
    pub(super) fn nothing_is_counted(&mut self) {
        self.shadow = Shadow { is_vague: true, is_vague_anew: true, ..Shadow::default() };
    }

    /// The leaf is to be replaced, or is gone.
    pub(super) fn forget_shadowed(&mut self, no: LeafNo, segments: &mut Segments) {
        self.shadow.uncounted.remove(&no);
        self.shadow.looked_at.remove(&no);
        for (segment, named) in self.shadow.counted.remove(&no).unwrap_or_default() {
            segments.sub_shadowed(segment, named);
        }
    }
}

/// A look-up for each block of the leaf: what is gone from a release is found by reads.
fn assert_there(no: LeafNo, leaf: &Leaf, (start, blocks): (u64, u64), segments: &Segments) {
    for piece in leaf.lookup(start, blocks) {
        if let Some(Place::Segment { segment, .. }) = piece.value {
            assert!(segments.get(segment).is_some(), "{no:?} shows blocks of {segment:?}, which is gone");
        }
    }
}
