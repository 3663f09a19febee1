//! Layers that nobody needs as they are: merged into the ones that stand on them, or dropped with what they say.
//!
//! A few leaves go with each fold (see `folding`). When a layer has none left, what the overlay holds of it goes, run by
//! run, in slices: runs of zeroes, which may be as long as the volume, stay runs.
//!
//! Between two slices heads and snapshots go on, and nothing else changes the directory. Invariants: (1) nobody writes
//! to a layer that goes, so that what was looked at stays as it was; (2) what one layer says of a block goes only after
//! the other one says it. So every head and snapshot shows the same all the while.

use super::layers::{keys_of, leaf_in, leaves_of};
use super::leaf::{LEAF_BLOCKS, LeafNo, Mapped, Place};
use super::{Accounts, Map};
use holdfast_base::{Key, Lba, ObjectId};
use std::collections::{BTreeMap, BTreeSet};

/// Leaves that go with one fold: each is read, and written with the one that it is merged into.
const LEAVES_MAX: usize = 128;

/// Runs of the overlay that are looked at for them.
const RUNS_LOOKED_AT: usize = 2048;

/// Leaves of layers that go.
#[derive(Debug, Default)]
pub(super) struct Going {
    /// By those of the layer that they are merged into.
    pub(super) under: BTreeMap<LeafNo, LeafNo>,
    /// What these say is dropped.
    pub(super) dropped: BTreeSet<LeafNo>,
    /// Runs that were looked at; and where that ended, if there were more.
    pub(super) runs: usize,
    stopped_at: Option<LeafNo>,
}

impl Going {
    /// All that have to be read.
    pub(super) fn leaves(&self) -> impl Iterator<Item = LeafNo> {
        let merged = self.under.iter().flat_map(|(into, gone)| [*into, *gone]);
        merged.chain(self.dropped.iter().copied())
    }
}

/// Layers without leaves on their way out of the map.
#[derive(Debug, Default)]
pub(super) struct Finishing {
    leaving: Option<Leaving>,
    /// Layers that say something besides zeroes, or where the ones that they are merged into have leaves: not yet.
    refused: BTreeSet<(ObjectId, ObjectId)>,
}

/// One of them, and what it is merged into, if it is not dropped.
#[derive(Clone, Copy, Debug)]
struct Leaving {
    gone: ObjectId,
    into: Option<ObjectId>,
    /// From where on what it says is yet to be looked at; absent once it has been.
    unseen: Option<u64>,
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
        if going.under.len() + going.dropped.len() < LEAVES_MAX && going.stopped_at.is_none() {
            self.choose_from(LeafNo::default(), written, &mut going);
        }
        let last = going.under.values().chain(&going.dropped).max();
        self.going_cursor = going.stopped_at.unwrap_or(last.map_or(LeafNo::default(), |no| LeafNo(no.0 + 1)));
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
            if !self.is_awaited(gone, written) && going.stopped_at.is_none() {
                let count_max = left(going);
                let found = self.leaves_to_merge(gone, into, from, count_max, going);
                going.under.extend(found.into_iter().map(|no| (leaf_in(no, into), no)));
            }
        }
    }

    /// Leaves of a layer that may be merged: nothing in them is still in the log.
    fn leaves_to_merge(
        &self,
        gone: ObjectId,
        into: ObjectId,
        from: LeafNo,
        count_max: usize,
        going: &mut Going,
    ) -> BTreeSet<LeafNo> {
        let leaves = leaves_of(gone);
        let leaves = leaves.start.max(from)..leaves.end.max(from);
        let mut found: BTreeSet<LeafNo> = self.directory.range(leaves.clone()).take(count_max).collect();
        for (start, len, mapped) in self.overlay.iter_from(leaves.start.first_key()) {
            if start >= leaves.end.first_key() || found.len() >= count_max {
                break;
            }
            if going.runs >= RUNS_LOOKED_AT {
                going.stopped_at = Some(LeafNo::of(Key(start)));
                break;
            }
            going.runs += 1;
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

    /// Layers that have no leaves any more go, with the runs that the overlay has of them: as far as so many runs allow.
    /// Tells how many it went through; and whether that was all.
    pub(super) fn finish_layers(
        &mut self,
        finishing: &mut Finishing,
        written: &[ObjectId],
        runs_max: usize,
        accounts: &mut Accounts<'_>,
    ) -> (usize, bool) {
        let mut runs = 0;
        while runs < runs_max {
            let leaving = finishing.leaving.take().filter(|leaving| self.still_goes(*leaving));
            let Some(mut leaving) = leaving.or_else(|| self.next_leaving(&finishing.refused, written)) else {
                let layers = &self.layers;
                self.flat_layers.retain(|layer| layers.has(*layer));
                return (runs, true);
            };
            match leaving.into {
                Some(into) if leaving.unseen.is_some() => {
                    if !self.look_for_more_than_zeroes(&mut leaving, into, runs_max, &mut runs) {
                        finishing.refused.insert((leaving.gone, into));
                        runs += 1;
                        continue;
                    }
                }
                into => {
                    if self.forget_some(leaving.gone, into, runs_max, &mut runs, accounts) {
                        match into {
                            Some(into) => self.layers.on_merged(leaving.gone, into),
                            None => self.layers.on_dropped(leaving.gone),
                        }
                        runs += 1;
                        continue;
                    }
                }
            }
            finishing.leaving = Some(leaving);
        }
        (runs, false)
    }

    /// What becomes of a layer may change while it is on its way.
    fn still_goes(&self, Leaving { gone, into, .. }: Leaving) -> bool {
        match into {
            Some(into) => self.layers.to_merge().any(|pair| pair == (gone, into)),
            None => self.layers.to_drop().any(|layer| layer == gone),
        }
    }

    fn next_leaving(&self, refused: &BTreeSet<(ObjectId, ObjectId)>, written: &[ObjectId]) -> Option<Leaving> {
        if let Some(gone) = self.layers.to_drop().find(|gone| self.may_finish(*gone, written)) {
            return Some(Leaving { gone, into: None, unseen: None });
        }
        let may_go = |pair: &(ObjectId, ObjectId)| !refused.contains(pair) && self.may_finish(pair.0, written);
        let (gone, into) = self.layers.to_merge().find(may_go)?;
        Some(Leaving { gone, into: Some(into), unseen: Some(keys_of(gone).start) })
    }

    /// What is on its way to a layer, or one that it stands on, must arrive first.
    fn is_awaited(&self, gone: ObjectId, written: &[ObjectId]) -> bool {
        written.iter().any(|of| self.layers.is_under(*of, gone))
    }

    fn may_finish(&self, gone: ObjectId, written: &[ObjectId]) -> bool {
        !self.is_awaited(gone, written) && self.directory.range(leaves_of(gone)).next().is_none()
    }

    /// Looks on through what the overlay says of a layer: false where that is something else than zeroes where the other
    /// layer has no leaves.
    fn look_for_more_than_zeroes(
        &self,
        leaving: &mut Leaving,
        into: ObjectId,
        runs_max: usize,
        runs: &mut usize,
    ) -> bool {
        let end = keys_of(leaving.gone).end;
        let from = leaving.unseen.take().unwrap_or(end);
        for (start, len, mapped) in self.overlay.iter_from(from).take_while(|(start, _, _)| *start < end) {
            if *runs >= runs_max {
                leaving.unseen = Some(start);
                return true;
            }
            *runs += 1;
            let (first, last) = (LeafNo::of(Key(start)), LeafNo::of(Key(start + len - 1)));
            let mut theirs = self.directory.range(leaf_in(first, into)..=leaf_in(last, into));
            if mapped.place != Place::Zero || theirs.next().is_some() {
                return false;
            }
        }
        true
    }

    /// Takes what the overlay says of a layer out of it, run by run; true once all is. What it is merged into says zeroes
    /// from then on where it said nothing, if there is a layer below that says something else.
    fn forget_some(
        &mut self,
        gone: ObjectId,
        into: Option<ObjectId>,
        runs_max: usize,
        runs: &mut usize,
        accounts: &mut Accounts<'_>,
    ) -> bool {
        let keys = keys_of(gone);
        let heir = into.filter(|_| self.layers.parent(gone).is_some());
        loop {
            let next = self.overlay.iter_from(keys.start).next().filter(|(start, _, _)| *start < keys.end);
            let Some((start, mut len, mapped)) = next.map(|(start, len, mapped)| (start, len, mapped.clone())) else {
                return true;
            };
            if *runs >= runs_max {
                return false;
            }
            if let Some(heir) = heir {
                let key = Key::new(heir, Lba(start - keys.start)).0;
                len = self.overlay.len_of_runs(key, len, runs_max - *runs);
                *runs += self.say_where_nothing_is(key, len, &mapped);
            }
            *runs += 1;
            let mut removed = Vec::new();
            self.overlay.remove(start, len, |at, len, old| removed.push((at, len, old.place)));
            removed.into_iter().for_each(|(at, len, place)| accounts.unmap(at, len, &place));
        }
    }

    /// Tells how many pieces it went through.
    fn say_where_nothing_is(&mut self, key: u64, len: u64, mapped: &Mapped) -> usize {
        let pieces = self.overlay.pieces(key, len);
        let count = pieces.len();
        for piece in pieces.into_iter().filter(|piece| piece.value.is_none()) {
            self.overlay.insert(piece.start, piece.len, mapped.clone(), |_, _, _| {});
            self.zeroes_moved_to.insert(Key(key).object());
            self.overlaid.insert(Key(key).object());
        }
        count
    }

    /// While loading: layers that are not in the table any more were finished since the runs were written. What the
    /// overlay says of them is yet to go.
    pub(super) fn take_gone_layers(&mut self) -> Vec<ObjectId> {
        self.find_overlaid();
        let layers = &self.layers;
        self.overlaid.iter().copied().filter(|layer| !layers.has(*layer)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::Snapshot;
    use crate::map::tests::TestMap;
    use holdfast_base::HeadId;

    fn freeze(kept: &mut TestMap, frozen: u32, live: u32) {
        let snapshot = Snapshot { name: frozen.to_string(), head: HeadId::VOLUME, created_ms: 0, size_bytes: 1 << 30 };
        kept.map.layers_mut().freeze(ObjectId(frozen), ObjectId(live), snapshot, true);
    }

    /// Layers that go, in slices of so many runs, and what comes between them; how many slices that took.
    fn finish(kept: &mut TestMap, runs_max: usize, mut between: impl FnMut(&mut TestMap)) -> usize {
        let mut finishing = Finishing::default();
        for slices in 1.. {
            let (runs, is_done) = kept.with(|map, accounts| map.finish_layers(&mut finishing, &[], runs_max, accounts));
            // Between the runs of the other layer there are gaps.
            assert!(runs <= runs_max.saturating_mul(2) + 3, "{runs} runs in a slice of {runs_max}");
            if is_done {
                return slices;
            }
            between(kept);
        }
        unreachable!("it ends")
    }

    /// Over a base of segment 1: a snapshot in between that says zeroes here and there, and a live layer over it.
    fn with_zeroes_in_between() -> TestMap {
        let mut kept = TestMap::new();
        kept.write(0, 0, 600, 1);
        freeze(&mut kept, 0, 1);
        for at in 0..40 {
            kept.say(1, at * 10, 5, Place::Zero);
        }
        freeze(&mut kept, 1, 2);
        for at in 0..20 {
            kept.write(2, at * 7, 2, 2);
        }
        kept
    }

    #[test]
    fn zeroes_of_a_layer_that_goes_are_seen_all_the_while() {
        for runs_max in [1, 3, 1 << 20] {
            let mut kept = with_zeroes_in_between();
            let before = kept.seen(2, 0, 650);
            kept.map.layers_mut().unname(ObjectId(1));
            let slices = finish(&mut kept, runs_max, |kept| assert_eq!(kept.seen(2, 0, 650), before));
            assert_eq!(slices > 20, runs_max <= 3, "{slices} slices");
            assert_eq!(kept.seen(2, 0, 650), before);
            assert!(!kept.map.layers().has(ObjectId(1)) && !kept.map.layers().any_goes());
            assert_eq!((kept.live(1), kept.live(2)), (600, 40));
        }
    }

    #[test]
    fn what_is_written_meanwhile_stays_over_zeroes_that_are_moved() {
        let mut kept = with_zeroes_in_between();
        kept.map.layers_mut().unname(ObjectId(1));
        let mut at = 0;
        finish(&mut kept, 2, |kept| {
            kept.write(2, at, 1, 3);
            at += 9;
        });
        let seen = kept.seen(2, 0, 650);
        for block in (0..at.min(600)).step_by(9) {
            assert_eq!(seen[block as usize], 3, "block {block}");
        }
    }

    #[test]
    fn the_look_for_leaves_that_go_is_cut_and_goes_on_with_the_next_fold() {
        let mut kept = TestMap::new();
        kept.write(0, 0, 8, 1);
        freeze(&mut kept, 0, 1);
        for at in 0..3000 {
            kept.say(1, at * 2 * LEAF_BLOCKS, LEAF_BLOCKS, Place::Zero);
        }
        kept.write(1, 6000 * LEAF_BLOCKS, 4, 2);
        freeze(&mut kept, 1, 2);
        kept.map.layers_mut().unname(ObjectId(1));
        let first = kept.map.choose_leaves_that_go(&[]);
        assert_eq!((first.runs, first.leaves().count()), (RUNS_LOOKED_AT, 0));
        let second = kept.map.choose_leaves_that_go(&[]);
        assert_eq!(
            second.under.values().map(|no| no.first_key()).collect::<Vec<_>>(),
            [Key::new(ObjectId(1), Lba(6000 * LEAF_BLOCKS)).0]
        );
        assert!(second.runs <= RUNS_LOOKED_AT);
    }

    #[test]
    fn a_layer_that_is_dropped_gives_up_what_it_names_in_slices() {
        let mut kept = TestMap::new();
        kept.write(0, 0, 8, 1);
        freeze(&mut kept, 0, 1);
        for at in 0..50 {
            kept.write(1, at * 3, 1, 2);
        }
        kept.map.layers_mut().roll_back(HeadId::VOLUME, ObjectId(0), ObjectId(2));
        let slices = finish(&mut kept, 4, |kept| assert_eq!(kept.seen(2, 0, 8), [1; 8]));
        assert!(slices > 10, "{slices} slices");
        assert_eq!((kept.live(1), kept.live(2), kept.map.run_count()), (8, 0, 1));
        assert!(!kept.map.layers().has(ObjectId(1)));
    }

    #[test]
    fn a_layer_that_says_more_than_zeroes_stays_until_it_is_folded() {
        let mut kept = with_zeroes_in_between();
        kept.write(1, 390, 1, 4);
        kept.map.layers_mut().unname(ObjectId(1));
        let before = kept.seen(2, 0, 650);
        finish(&mut kept, 3, |_| {});
        assert!(kept.map.layers().has(ObjectId(1)), "it is looked at again by the next fold");
        assert_eq!(kept.seen(2, 0, 650), before);
        // The head rolls back meanwhile: what was to be merged is dropped with the layer above.
        let mut finishing = Finishing::default();
        kept.say(1, 390, 1, Place::Zero);
        kept.with(|map, accounts| map.finish_layers(&mut finishing, &[], 60, accounts));
        assert!(finishing.leaving.is_some(), "it is under way");
        kept.map.layers_mut().roll_back(HeadId::VOLUME, ObjectId(0), ObjectId(3));
        while !kept.with(|map, accounts| map.finish_layers(&mut finishing, &[], 5, accounts)).1 {
            assert_eq!(kept.seen(3, 0, 600), [1; 600]);
        }
        assert!(!kept.map.layers().any_goes());
        assert_eq!((kept.live(1), kept.live(2), kept.live(4)), (600, 0, 0));
    }
}
