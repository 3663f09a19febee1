//! Layers that nobody needs as they are: merged into the ones that stand on them, or dropped with what they say.
//!
//! A few leaves go with each fold (see `checkpoint`). When a layer has none left, what the overlay holds of it goes at
//! once: runs of zeroes, which may be as long as the volume, stay runs.

use super::layers::{keys_of, leaf_in, leaves_of};
use super::leaf::{LEAF_BLOCKS, LeafNo, Mapped, Place};
use super::{Accounts, Map};
use holdfast_base::{Key, Lba, ObjectId};
use std::collections::{BTreeMap, BTreeSet};

/// Leaves that go with one fold: each is read, and written with the one that it is merged into.
const LEAVES_MAX: usize = 128;

/// Leaves of layers that go.
#[derive(Debug, Default)]
pub(super) struct Going {
    /// By those of the layer that they are merged into.
    pub(super) under: BTreeMap<LeafNo, LeafNo>,
    /// What these say is dropped.
    pub(super) dropped: BTreeSet<LeafNo>,
}

impl Going {
    /// All that have to be read.
    pub(super) fn leaves(&self) -> impl Iterator<Item = LeafNo> {
        let merged = self.under.iter().flat_map(|(into, gone)| [*into, *gone]);
        merged.chain(self.dropped.iter().copied())
    }
}

impl Map {
    /// The next leaves of layers that go, and round again: where one can't be read, the others get on. Bulk writes are
    /// on their way to the `written` ones.
    pub(super) fn choose_leaves_that_go(&mut self, written: &[ObjectId]) -> Going {
        let mut going = Going::default();
        if !self.layers.any_goes() {
            return going;
        }
        let cursor = self.going_cursor;
        self.choose_from(cursor, written, &mut going);
        if going.under.len() + going.dropped.len() < LEAVES_MAX {
            self.choose_from(LeafNo::default(), written, &mut going);
        }
        let last = going.under.values().chain(&going.dropped).max();
        self.going_cursor = last.map_or(LeafNo::default(), |no| LeafNo(no.0 + 1));
        going
    }

    fn choose_from(&self, from: LeafNo, written: &[ObjectId], going: &mut Going) {
        let left = |going: &Going| LEAVES_MAX.saturating_sub(going.under.len() + going.dropped.len());
        for gone in self.layers.to_drop().filter(|gone| !self.is_awaited(*gone, written)) {
            let leaves = leaves_of(gone);
            let found = self.directory.range(leaves.start.max(from)..leaves.end.max(from));
            going.dropped.extend(found.take(left(going)));
        }
        for (gone, into) in self.layers.to_merge() {
            // What is on its way there must arrive first.
            if !self.is_awaited(gone, written) {
                let found = self.leaves_to_merge(gone, into, from, left(going));
                going.under.extend(found.into_iter().map(|no| (leaf_in(no, into), no)));
            }
        }
    }

    /// Leaves of a layer that may be merged: nothing in them is still in the log.
    fn leaves_to_merge(&self, gone: ObjectId, into: ObjectId, from: LeafNo, count_max: usize) -> BTreeSet<LeafNo> {
        let leaves = leaves_of(gone);
        let leaves = leaves.start.max(from)..leaves.end.max(from);
        let mut found: BTreeSet<LeafNo> = self.directory.range(leaves.clone()).take(count_max).collect();
        for (start, len, mapped) in self.overlay.iter_from(leaves.start.first_key()) {
            if start >= leaves.end.first_key() || found.len() >= count_max {
                break;
            }
            let (first, last) = (LeafNo::of(Key(start)), LeafNo::of(Key(start + len - 1)));
            if mapped.place != Place::Zero {
                found.extend((first.0..=last.0).take(count_max).map(LeafNo));
                continue;
            }
            // Whole leaves of zeroes are moved as a run, but where the other layer has leaves of its own.
            let covered = |no: LeafNo| no.first_key() >= start && no.first_key() + LEAF_BLOCKS <= start + len;
            found.extend([first, last].into_iter().filter(|no| !covered(*no)));
            let theirs = self.directory.range(leaf_in(first, into)..=leaf_in(last, into));
            found.extend(theirs.map(|no| leaf_in(no, gone)).take(count_max));
        }
        let is_settled = |no: &LeafNo| {
            let pieces = self.overlay.pieces(no.first_key(), LEAF_BLOCKS);
            pieces.iter().all(|p| !matches!(p.value, Some(Mapped { place: Place::Log { .. }, .. })))
        };
        found.into_iter().filter(is_settled).collect()
    }

    /// Layers that have no leaves any more go, with the runs that the overlay has of them.
    pub(super) fn finish_layers(&mut self, written: &[ObjectId], accounts: &mut Accounts<'_>) {
        loop {
            let dropped = self.layers.to_drop().find(|gone| self.may_finish(*gone, written));
            let merged = self
                .layers
                .to_merge()
                .find(|(gone, into)| self.may_finish(*gone, written) && self.only_zeroes_are_left(*gone, *into));
            if let Some(gone) = dropped {
                self.forget_runs(gone, accounts);
                self.layers.on_dropped(gone);
            } else if let Some((gone, into)) = merged {
                self.move_zeroes(gone, into);
                self.forget_runs(gone, accounts);
                self.layers.on_merged(gone, into);
            } else {
                let layers = &self.layers;
                self.flat_layers.retain(|layer| layers.has(*layer));
                return;
            }
        }
    }

    /// What is on its way to a layer, or one that it stands on, must arrive first.
    fn is_awaited(&self, gone: ObjectId, written: &[ObjectId]) -> bool {
        written.iter().any(|of| self.layers.is_under(*of, gone))
    }

    fn may_finish(&self, gone: ObjectId, written: &[ObjectId]) -> bool {
        !self.is_awaited(gone, written) && self.directory.range(leaves_of(gone)).next().is_none()
    }

    /// Whether what the overlay says of the layer are zeroes where the other layer has no leaves.
    fn only_zeroes_are_left(&self, gone: ObjectId, into: ObjectId) -> bool {
        let keys = keys_of(gone);
        let mut runs = self.overlay.iter_from(keys.start).take_while(|(start, _, _)| *start < keys.end);
        let is_free = |(start, len, mapped): (u64, u64, &Mapped)| {
            let (first, last) = (LeafNo::of(Key(start)), LeafNo::of(Key(start + len - 1)));
            let mut theirs = self.directory.range(leaf_in(first, into)..=leaf_in(last, into));
            mapped.place == Place::Zero && theirs.next().is_none()
        };
        runs.all(is_free)
    }

    /// Where the other layer says nothing it says zeroes from now on, if there is a layer below that says something
    /// else.
    fn move_zeroes(&mut self, gone: ObjectId, into: ObjectId) {
        if self.layers.parent(gone).is_none() {
            return;
        }
        let keys = keys_of(gone);
        let runs: Vec<(u64, u64, Mapped)> = self
            .overlay
            .iter_from(keys.start)
            .take_while(|(start, _, _)| *start < keys.end)
            .map(|(start, len, mapped)| (start, len, mapped.clone()))
            .collect();
        for (start, len, mapped) in runs {
            let key = Key::new(into, Lba(start - keys.start)).0;
            for piece in self.overlay.pieces(key, len).into_iter().filter(|piece| piece.value.is_none()) {
                self.overlay.insert(piece.start, piece.len, mapped.clone(), |_, _, _| {});
                self.zeroes_moved_to.insert(into);
            }
        }
    }

    /// Everything that the overlay says of a layer.
    fn forget_runs(&mut self, gone: ObjectId, accounts: &mut Accounts<'_>) {
        let keys = keys_of(gone);
        let mut removed = Vec::new();
        self.overlay.remove(keys.start, keys.end - keys.start, |_, len, old| removed.push((len, old.place)));
        for (len, place) in removed {
            accounts.unmap(len, &place);
        }
    }

    /// While loading: a layer that is not in the table any more was finished since the runs were written.
    pub(super) fn forget_runs_of_gone_layers(&mut self) {
        self.find_overlaid();
        for layer in std::mem::take(&mut self.overlaid) {
            if self.layers.has(layer) {
                self.overlaid.insert(layer);
            } else {
                let keys = keys_of(layer);
                self.overlay.remove(keys.start, keys.end - keys.start, |_, _, _| {});
            }
        }
    }
}
