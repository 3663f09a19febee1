//! Folding: leaves are written anew with what the overlay says over them. Which, and what becomes of directory, overlay
//! and accounts at the instant when a new one is installed. (When: see [`super::checkpoint`]; how it goes:
//! [`super::folding`].)

use super::leaf::{LEAF_BLOCKS, Leaf, LeafNo, LeafPointer, Mapped, Place, encoded_run_bytes};
use super::rangemap::Piece;
use super::{Accounts, Map};
use crate::segment::{Change, Named};
use holdfast_base::{Key, Lsn};
use holdfast_format::record::SegmentNo;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;

/// Leaves of one fold: some milliseconds of merging. And no more than fit a segment.
const FOLD_LEAVES_MAX: usize = 2048;

/// Leaves that such a fold passes by are written anew with the others if they are no more than this, one after the
/// other.
const BETWEEN_MAX: u64 = 16;

/// What may be written for each run that such a fold takes in, in leaves, while the overlay takes as much as it may:
/// four times as much at twice that. A leaf of a few runs costs less; one that is full takes 14 KiB.
const FOLD_BYTES_A_RUN: u64 = 512;

/// Runs of the overlay that a leaf waits for until it is written anew; and where they find room beside all leaves.
const RUNS_A_LEAF: usize = 24;
const RUNS_A_LEAF_ROOMY: usize = 96;

/// What a leaf of many short runs takes.
const LEAF_BYTES: usize = 14 << 10;

/// Memory that a run of the overlay takes; all of them may take half of what leaves may.
const RUN_BYTES: usize = 160;

/// Memory that a leaf's place in the directory takes.
const POINTER_BYTES: usize = 80;

/// What is to be folded.
#[derive(Debug)]
pub(super) struct Choice {
    pub(super) leaves: BTreeSet<LeafNo>,
    pub(super) between: BTreeSet<LeafNo>,
    /// Where the next fold goes on, if there is more to take in.
    pub(super) next: Option<u64>,
}

/// A choice that is under way, run by run.
#[derive(Debug)]
pub(super) struct Choosing {
    choice: Choice,
    /// What is to be written.
    bytes: u64,
    bytes_max: u64,
    gap_max: u64,
    /// The last leaf that was chosen.
    last: Option<LeafNo>,
    /// Where the search goes on, and where it ends, once it has come round.
    at: u64,
    end: Option<u64>,
    cursor: u64,
}

impl Choosing {
    pub(super) fn done(mut self) -> Choice {
        while self.choice.leaves.len() > FOLD_LEAVES_MAX {
            self.choice.leaves.pop_last();
        }
        self.choice
    }
}

#[derive(Debug)]
pub(super) struct MergedLeaf {
    pub(super) no: LeafNo,
    pub(super) old: Option<Arc<Leaf>>,
    /// The leaf of a layer that goes, and what it said: the new one says it, too.
    pub(super) under: Option<(LeafNo, Option<Arc<Leaf>>)>,
    pub(super) new: Option<NewLeaf>,
    /// The LSN as of which it was merged.
    pub(super) captured: Lsn,
}

impl MergedLeaf {
    /// Runs that installing it goes through.
    pub(super) fn run_count(&self) -> usize {
        let runs = |leaf: Option<&Leaf>| leaf.map_or(0, |leaf| leaf.runs.len());
        let under = self.under.as_ref().and_then(|(_, leaf)| leaf.as_deref());
        runs(self.old.as_deref()) + runs(under) + runs(self.new.as_ref().map(|new| &*new.leaf))
    }
}

/// A leaf that is to be installed, and where its bytes lie in the segment of the fold.
#[derive(Debug)]
pub(super) struct NewLeaf {
    pub(super) leaf: Arc<Leaf>,
    pub(super) offset_bytes: u32,
    pub(super) len_bytes: u32,
    pub(super) crc: u32,
}

impl Map {
    // ---- how much memory it takes ----

    /// So many runs of the overlay are folded: in proportion to the map, so that a leaf takes in many at a time.
    pub(super) fn fold_runs(&self, fold_runs_min: usize) -> usize {
        let leaves = self.directory.len();
        let beside = self.bytes_max.saturating_sub((leaves * (POINTER_BYTES + LEAF_BYTES)) as u64);
        let roomy = (leaves * RUNS_A_LEAF_ROOMY).min(beside as usize / RUN_BYTES);
        (leaves * RUNS_A_LEAF).max(roomy).min(self.overlay_runs_max()).max(fold_runs_min)
    }

    /// So many runs of the overlay fit the memory that it may take.
    fn overlay_runs_max(&self) -> usize {
        (self.bytes_max as usize / 2 / RUN_BYTES).max(1)
    }

    /// Runs of the overlay, but for about those whose data only the log has, so many: they are bounded there.
    fn overlay_runs(&self, in_log: usize) -> usize {
        self.overlay.run_count().saturating_sub(in_log)
    }

    /// It takes more memory than it may.
    pub(super) fn overlay_is_large(&self, in_log: usize) -> bool {
        self.overlay_runs(in_log) > self.overlay_runs_max()
    }

    /// What leaves may take in memory: what the directory leaves of it, less what the overlay takes, of that half at
    /// least.
    pub(super) fn limit_leaves(&mut self) {
        let all = self.bytes_max as usize;
        let ours = all.saturating_sub(self.directory.len() * POINTER_BYTES).max(all / 8);
        let left = ours.saturating_sub(self.overlay.run_count() * RUN_BYTES).max(ours / 2);
        self.leaves.limit(left.saturating_sub(self.flats.bytes()));
    }

    /// After one that has written `bytes` of leaves and taken `runs` out of the overlay: the more memory that takes,
    /// the more may be written for each run.
    pub(super) fn is_fold_worth(&self, bytes: u64, runs: u64, in_log: usize) -> bool {
        let (most, now) = (self.overlay_runs_max() as u128, self.overlay_runs(in_log) as u128);
        let allowed = u128::from(FOLD_BYTES_A_RUN) * u128::from(runs) * now * now;
        runs > 0 && u128::from(bytes) * most * most <= allowed
    }

    // ---- what is folded ----

    /// Begins to choose the next leaves, in key order from the cursor on and round again, with anything of the overlay
    /// to take in.
    pub(super) fn begin_choosing(&self, cursor: u64, in_log: usize, bytes_max: u64) -> Choosing {
        // Rounds that follow each other quickly take in few of many leaves each time; those that they pass by would
        // keep what the others leave behind from being freed.
        let gap_max = if self.overlay_is_large(in_log) { BETWEEN_MAX } else { 0 };
        let choice = Choice { leaves: BTreeSet::new(), between: BTreeSet::new(), next: None };
        Choosing { choice, bytes: 0, bytes_max, gap_max, last: None, at: cursor, end: None, cursor }
    }

    /// Looks at the next `count` runs; false once all are chosen. What comes behind that place meanwhile is for another
    /// fold.
    pub(super) fn choose_some(&self, choosing: &mut Choosing, count: usize) -> bool {
        let end = choosing.end.unwrap_or(u64::MAX);
        let mut runs = self.overlay.iter_from(choosing.at).take_while(|(start, _, _)| *start < end);
        for (start, len, mapped) in runs.by_ref().take(count) {
            self.choose_under(choosing, start, len, mapped);
            if choosing.choice.leaves.len() + choosing.choice.between.len() >= FOLD_LEAVES_MAX
                || choosing.bytes >= choosing.bytes_max
            {
                choosing.choice.next = Some(start + len);
                return false;
            }
        }
        match runs.next() {
            Some((start, _, _)) => choosing.at = start,
            None if choosing.end.is_some() => return false,
            None => (choosing.at, choosing.end) = (0, Some(choosing.cursor)),
        }
        true
    }

    /// Leaves that take in this run.
    fn choose_under(&self, choosing: &mut Choosing, start: u64, len: u64, mapped: &Mapped) {
        let Choosing { choice: Choice { leaves: chosen, between, .. }, bytes, gap_max, last, .. } = choosing;
        let len_of = |no: LeafNo| self.directory.get(no).map_or(0, |leaf| u64::from(leaf.len_bytes));
        let (first, last_here) = (LeafNo::of(Key(start)), LeafNo::of(Key(start + len - 1)));
        let mut choose = |no: LeafNo| {
            // Runs of one leaf follow each other.
            if *last == Some(no) || !chosen.insert(no) {
                return;
            }
            *bytes += len_of(no);
            if let Some(before) = last.replace(no).filter(|before| *before < no && no.0 - before.0 <= *gap_max) {
                let passed = self.directory.range((Bound::Excluded(before), Bound::Excluded(no)));
                between.extend(passed.inspect(|no| *bytes += len_of(*no)));
            }
        };
        match &mapped.place {
            Place::Log { .. } => {}
            // Where no leaf is, zeroes are what the base says anyway; only existing leaves change.
            Place::Zero if self.layers.parent(Key(start).object()).is_some() => {
                // Where no leaf is, whole leaves of zeroes stay in the overlay: one run, however many there are.
                let covered = |no: LeafNo| no.first_key() >= start && no.first_key() + LEAF_BLOCKS <= start + len;
                self.directory.range(first..=last_here).take(FOLD_LEAVES_MAX).for_each(&mut choose);
                [first, last_here].into_iter().filter(|no| !covered(*no)).for_each(&mut choose);
            }
            Place::Zero => {
                self.directory.range(first..=last_here).take(FOLD_LEAVES_MAX).for_each(&mut choose);
                if first == last_here {
                    choose(first);
                }
            }
            Place::Segment { stored, .. } => {
                (first.0..=last_here.0).map(LeafNo).for_each(&mut choose);
                *bytes += encoded_run_bytes(len, stored);
            }
        }
    }

    pub(super) fn new_leaf(
        &self,
        no: LeafNo,
        old: Option<&Leaf>,
        under: Option<&(LeafNo, Option<Arc<Leaf>>)>,
        changes: &[Piece<Place>],
        forgets_below: bool,
    ) -> Leaf {
        let empty = Leaf::default();
        let old = old.unwrap_or(&empty);
        let layer = Key(no.first_key()).object();
        let Some((gone, leaf)) = under else {
            return old.merged(changes, self.layers.parent(layer).is_some());
        };
        let keeps_zeroes = self.layers.parent(Key(gone.first_key()).object()).is_some();
        let leaf = leaf.as_deref().filter(|_| !forgets_below);
        let below = leaf.unwrap_or(&empty).merged(&self.foldable(*gone), keeps_zeroes);
        let own: Vec<Piece<Place>> =
            old.lookup(0, LEAF_BLOCKS).into_iter().filter(|piece| piece.value.is_some()).collect();
        below.merged(&own, keeps_zeroes).merged(changes, keeps_zeroes)
    }

    /// What the overlay has for a leaf, but for data still in the log.
    pub(super) fn foldable(&self, no: LeafNo) -> Vec<Piece<Place>> {
        self.overlay
            .pieces(no.first_key(), LEAF_BLOCKS)
            .into_iter()
            .filter_map(|piece| match piece.value {
                None | Some(Mapped { place: Place::Log { .. }, .. }) => None,
                Some(mapped) => {
                    Some(Piece { start: piece.start - no.first_key(), len: piece.len, value: Some(mapped.place) })
                }
            })
            .collect()
    }

    // ---- the instant at which a leaf changes ----

    /// The directory names a new leaf from now on, and what that holds leaves the overlay.
    pub(super) fn install_leaf(
        &mut self,
        merged: &MergedLeaf,
        segment: Option<SegmentNo>,
        accounts: &mut Accounts<'_>,
    ) {
        self.forget_shadowed(merged.no, accounts.segments);
        if let Some(NewLeaf { leaf, offset_bytes, len_bytes, crc }) = &merged.new {
            let segment = segment.expect("leaves with bytes lie in a segment");
            let pointer = LeafPointer { segment, offset_bytes: *offset_bytes, len_bytes: *len_bytes, crc: *crc };
            let named = Named::of_metadata(u64::from(*len_bytes));
            accounts.segments.add_live(segment, named);
            accounts.audit.on_named(merged.no, segment, named.as_more());
            let old = self.directory.insert(merged.no, pointer);
            accounts.forget_pointer(merged.no, old);
            self.leaves.insert_beside(merged.no, Arc::clone(leaf));
        } else {
            let old = self.directory.remove(merged.no);
            accounts.forget_pointer(merged.no, old);
            self.leaves.remove(merged.no);
        }
        let old = merged.old.as_deref().filter(|_| !accounts.mutations.fold_keeps_old_counts());
        accounts.change_named(merged.no, old, merged.new.as_ref().map(|new| &*new.leaf));
        // What the new leaf contains leaves the overlay.
        for piece in self.overlay.pieces(merged.no.first_key(), LEAF_BLOCKS) {
            let Some(mapped) = piece.value else { continue };
            if mapped.stamp <= merged.captured && !matches!(mapped.place, Place::Log { .. }) {
                self.overlay.remove(piece.start, piece.len, |_, _, _| {});
                accounts.unmap(piece.start, piece.len, &mapped.place);
            }
        }
        if let Some(new) = &merged.new {
            self.recount_shadowed(merged.no, &new.leaf, accounts);
        }
    }

    /// What this leaf and the overlay over it say is not wanted, or said elsewhere.
    pub(super) fn forget_leaf(&mut self, gone: LeafNo, leaf: Option<&Leaf>, accounts: &mut Accounts<'_>) {
        let old = self.directory.remove(gone);
        accounts.forget_pointer(gone, old);
        self.leaves.remove(gone);
        self.forget_shadowed(gone, accounts.segments);
        accounts.change_named(gone, leaf, None);
        let mut replaced = Vec::new();
        self.overlay.remove(gone.first_key(), LEAF_BLOCKS, |at, len, old| replaced.push((at, len, old.place)));
        for (at, len, place) in replaced {
            accounts.unmap(at, len, &place);
        }
    }
}

impl Accounts<'_> {
    /// The directory names a leaf no more.
    fn forget_pointer(&mut self, no: LeafNo, old: Option<LeafPointer>) {
        if let Some(LeafPointer { segment, len_bytes, .. }) = old {
            let named = Named::of_metadata(u64::from(len_bytes));
            self.segments.sub_live(segment, named);
            self.audit.on_named(no, segment, -named.as_more());
        }
    }

    /// A leaf names what `new` says, and no more what `old` said. Most of that is the same.
    fn change_named(&mut self, no: LeafNo, old: Option<&Leaf>, new: Option<&Leaf>) {
        let more = new.into_iter().flat_map(Leaf::named).map(|(segment, named)| (segment, named.as_more()));
        let less = old.into_iter().flat_map(Leaf::named).map(|(segment, named)| (segment, -named.as_more()));
        let mut changes: BTreeMap<SegmentNo, Change> = BTreeMap::new();
        more.chain(less).for_each(|(segment, change)| *changes.entry(segment).or_default() += change);
        for (segment, change) in changes.into_iter().filter(|(_, change)| !change.is_none()) {
            self.segments.change_named(segment, change);
            self.audit.on_named(no, segment, change);
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::map::leaf::Stored;
    use crate::map::tests::TestMap;
    use crate::segment::tests::{info, no};
    use crate::segment::{Kind, SegmentInfo};
    use holdfast_base::crc32c;

    /// Folds all that there is into leaves, which lie in the metadata segment of that number.
    pub(in crate::map) fn fold(kept: &mut TestMap, counter: u64) {
        let mut choosing = kept.map.begin_choosing(0, 0, 1 << 20);
        while kept.map.choose_some(&mut choosing, 1) {}
        let choice = choosing.done();
        assert_eq!(choice.next, None);
        kept.segments.insert(no(9, counter), SegmentInfo { kind: Kind::Meta, ..info(64, 0, &[]) });
        for leaf in choice.leaves {
            let merged = merged(kept, leaf, Lsn(u64::MAX));
            kept.with(|map, accounts| map.install_leaf(&merged, Some(no(9, counter)), accounts));
        }
    }

    fn merged(kept: &TestMap, no: LeafNo, captured: Lsn) -> MergedLeaf {
        let old = kept.map.peek(no);
        let new = kept.map.new_leaf(no, old.as_deref(), None, &kept.map.foldable(no), false);
        let bytes = new.encode();
        let (len_bytes, crc) = (bytes.len() as u32, crc32c(&bytes));
        let new = Some(NewLeaf { leaf: Arc::new(new), offset_bytes: 0, len_bytes, crc });
        MergedLeaf { no, old, under: None, new, captured }
    }

    #[test]
    fn what_is_said_after_a_leaf_was_merged_stays_over_it() {
        let mut kept = TestMap::new();
        kept.write(0, 0, 8, 1);
        let merged = merged(&kept, LeafNo(0), Lsn(1));
        kept.write(0, 2, 3, 2);
        kept.say(0, 7, 1, Place::Zero);
        kept.segments.insert(no(9, 1), SegmentInfo { kind: Kind::Meta, ..info(64, 0, &[]) });
        kept.with(|map, accounts| map.install_leaf(&merged, Some(no(9, 1)), accounts));
        assert_eq!(kept.map.run_count(), 2, "what the leaf says is taken out, and no more");
        assert_eq!(kept.seen(0, 0, 9), [1, 1, 2, 2, 2, 1, 1, 0, 0]);
        let counts = kept.segments.get(no(1, 1)).map(|info| (info.live.blocks, info.shadowed.blocks));
        assert_eq!((counts, kept.live(2)), (Some((8, 4)), 3));
        fold(&mut kept, 2);
        assert_eq!((kept.live(1), kept.live(2), kept.map.run_count()), (4, 3, 0));
    }

    #[test]
    fn a_fold_moves_what_the_overlay_says_into_leaves_and_changes_nothing_that_is_seen() {
        let mut kept = TestMap::new();
        kept.write(0, 0, 8, 1);
        kept.write(0, LEAF_BLOCKS + 1, 4, 2);
        let before = kept.seen(0, 0, 2 * LEAF_BLOCKS);
        fold(&mut kept, 1);
        assert_eq!((kept.map.run_count(), kept.map.directory().len()), (0, 2));
        assert_eq!(kept.seen(0, 0, 2 * LEAF_BLOCKS), before);
        assert_eq!((kept.live(1), kept.live(2)), (8, 4));
        let bytes = kept.segments.get(no(9, 1)).map_or(0, |info| info.live.size);
        let run_bytes = |blocks| encoded_run_bytes(blocks, &Stored::Plain { block: 0 });
        assert_eq!(bytes, run_bytes(8) + run_bytes(4) + 4);
    }

    #[test]
    fn what_is_overwritten_is_shadowed_until_it_is_folded_and_dead_then() {
        let mut kept = TestMap::new();
        kept.write(0, 0, 8, 1);
        fold(&mut kept, 1);
        kept.write(0, 2, 3, 2);
        let counts = |kept: &TestMap| {
            let info = kept.segments.get(no(1, 1))?;
            Some((info.live.blocks, info.shadowed.blocks))
        };
        assert_eq!(counts(&kept), Some((8, 3)));
        kept.write(0, 2, 3, 3);
        assert_eq!(counts(&kept), Some((8, 3)), "it is counted once");
        fold(&mut kept, 2);
        assert_eq!((counts(&kept), kept.live(2), kept.live(3)), (Some((5, 0)), 0, 3));
        assert_eq!(
            kept.segments.get(no(9, 1)).map(|info| info.live),
            Some(Named::NOTHING),
            "nothing names the old leaf"
        );
        assert_eq!(kept.seen(0, 0, 8), [1, 1, 3, 3, 3, 1, 1, 1]);
    }

    #[test]
    fn a_leaf_that_goes_takes_what_it_names_with_it() {
        let mut kept = TestMap::new();
        kept.write(0, 0, 8, 1);
        fold(&mut kept, 1);
        kept.write(0, 4, 8, 2);
        let leaf = LeafNo(0);
        let old = kept.map.peek(leaf);
        kept.with(|map, accounts| map.forget_leaf(leaf, old.as_deref(), accounts));
        assert_eq!((kept.live(1), kept.live(2), kept.map.run_count()), (0, 0, 0));
        assert_eq!(kept.map.directory().len(), 0);
    }

    #[test]
    fn leaves_are_chosen_from_the_cursor_on_and_round_again_whatever_comes_meanwhile() {
        let mut kept = TestMap::new();
        for leaf in [1, 4, 7] {
            kept.write(0, leaf * LEAF_BLOCKS, 8, 1);
        }
        let mut choosing = kept.map.begin_choosing(3 * LEAF_BLOCKS, 0, 1 << 20);
        assert!(kept.map.choose_some(&mut choosing, 1));
        kept.write(0, 9 * LEAF_BLOCKS, 8, 2);
        kept.say(0, 7 * LEAF_BLOCKS, 8, Place::Zero);
        kept.write(0, 2 * LEAF_BLOCKS, 8, 2);
        while kept.map.choose_some(&mut choosing, 1) {}
        let choice = choosing.done();
        assert_eq!(choice.leaves, [1, 2, 4, 7, 9].map(LeafNo).into());
        assert_eq!(choice.next, None);
    }

    #[test]
    fn a_large_discard_while_leaves_are_chosen_stays_to_be_folded() {
        let mut kept = TestMap::new();
        let pointer = LeafPointer { segment: no(9, 1), offset_bytes: 0, len_bytes: 2, crc: 0 };
        for leaf in 0..2000 {
            kept.map.directory.insert(LeafNo(leaf), pointer);
        }
        for is_late in [false, true] {
            kept.map.shadow = Default::default();
            kept.map.overlay = Default::default();
            if !is_late {
                kept.say(0, 0, 2000 * LEAF_BLOCKS, Place::Zero);
            }
            kept.map.shadow.on_choosing();
            if is_late {
                kept.say(0, 0, 2000 * LEAF_BLOCKS, Place::Zero);
            }
            assert!(!kept.map.knows_all_shadowed());
            kept.map.shadow.on_all_folded();
            assert_eq!(kept.map.knows_all_shadowed(), !is_late);
        }
        // So does one over which a run is said that begins before the place where the choice is.
        kept.say(0, 0, 2000 * LEAF_BLOCKS, Place::Zero);
        kept.map.shadow.on_choosing();
        kept.write(0, LEAF_BLOCKS - 8, 16, 2);
        kept.map.shadow.on_all_folded();
        assert!(!kept.map.knows_all_shadowed());
    }
}
