//! The audit: goes over the whole map in the background, counts what it names, and compares that with the accounts that
//! are kept write by write: the live counts of segments, and what is shadowed, as far as leaves name it and the overlay
//! hides it. By the way it counts what snapshots and clones share (see [`super::shares`]).
//!
//! States: resting -> leaves are counted, place by place of the volume and in each layer by layer, those that are not in
//! memory being loaded -> what the overlay names is counted, run by run -> the accounts are compared, segment by
//! segment -> resting. A leaf that can't be read ends the round.
//!
//! A [`Cursor`] says how far that has come. Changes behind it change the counts, too; those ahead are found when it
//! comes there. So at any instant what was compared was right, or differs by as much as when it was compared.
//!
//! Invariants: (1) accounts and counts agree. A difference is told and put right, at once: the count is true, since it
//! forgets nothing. (2) Nothing is kept of segments that were compared ([`Audit::verify`]).
//!
//! Limits: one leaf is read at a time; after each, or after a slice of what is in memory, there is a pause. A leaf is
//! counted in one go. A round is followed by a rest of twenty times its length. What guests write while the layers of a
//! place are gone through may be in the figures of some and not of others.

use super::shares::{Said, Shares, Tally};
use crate::basis::Basis;
use crate::map::{
    LEAF_BLOCKS, LayerTable, Leaf, LeafNo, LeafPointer, Map, NamedRun, Naming, Piece, Pins, Place, keys_of, leaf_in,
};
use crate::segment::fetch::FetchError;
use crate::segment::{Change, Kind, Named, Segments};
use crate::turn::Turn;
use holdfast_base::{HeadId, Instant, Key, Lba, Lsn, ObjectId};
use holdfast_format::record::SegmentNo;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// After snapshots or clones changed, their figures are counted anew this soon.
const AFTER_CHANGE: Duration = Duration::from_secs(1);

/// After a round that came to nothing.
const AFTER_FAILURE: Duration = Duration::from_secs(30);

/// A round is followed by a rest of so many times its length.
const REST: u32 = 20;

/// Pauses: while guests are at work, and else, when guests of other volumes may be.
const PAUSE_BUSY: Duration = Duration::from_millis(5);
const PAUSE: Duration = Duration::from_millis(2);

/// What costs as much as so many runs: a leaf, beside its own; and a layer that is asked what it says.
const RUNS_A_LEAF: usize = 256;
const RUNS_A_LAYER: usize = 16;

/// Names under which a turn tells of these steps.
const COUNTED: &str = "audit: leaves are counted";
const COMPARED: &str = "audit: accounts are compared";

/// What the last whole round found of who sees what.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sharing {
    /// By layer.
    pub snapshots: BTreeMap<ObjectId, Shares>,
    /// The volume itself and its clones.
    pub heads: BTreeMap<HeadId, Shares>,
    /// Data that neither the volume nor a clone shows: snapshots need it, or did until they were deleted.
    pub held_by_snapshots_bytes: u64,
}

/// How far a round has come.
#[derive(Clone, Copy, Debug)]
enum Cursor {
    /// Leaves before that spot are counted.
    Leaves(Spot),
    /// All leaves are, and what the overlay names before that key.
    Overlay(u64),
    /// All of that is, and the accounts up to that segment were compared.
    Accounts(Option<SegmentNo>),
}

impl Cursor {
    fn is_behind_leaf(self, no: LeafNo) -> bool {
        if let Cursor::Leaves(spot) = self { Spot::of(no) < spot } else { true }
    }

    /// Number of the run's blocks that are behind it, from the first one on.
    fn blocks_behind(self, run: NamedRun<'_>) -> u64 {
        match self {
            Cursor::Leaves(_) => 0,
            Cursor::Overlay(key) => key.saturating_sub(run.start).min(run.blocks),
            Cursor::Accounts(_) => run.blocks,
        }
    }

    fn was_compared(self, no: SegmentNo) -> bool {
        matches!(self, Cursor::Accounts(Some(last)) if no <= last)
    }
}

/// Where a leaf is, or could be: its place in the volume, in leaves, and its layer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Spot {
    place: u64,
    layer: ObjectId,
}

impl Spot {
    /// The first of a place.
    fn at(place: u64) -> Spot {
        Spot { place, layer: ObjectId(0) }
    }

    fn of(no: LeafNo) -> Spot {
        Spot { place: place_of(no), layer: Key(no.first_key()).object() }
    }

    fn leaf(self) -> LeafNo {
        leaf_in(LeafNo(self.place), self.layer)
    }

    fn next(self) -> Spot {
        match self.layer.0.checked_add(1) {
            Some(layer) => Spot { layer: ObjectId(layer), ..self },
            None => Spot::at(self.place + 1),
        }
    }
}

/// What layers say of the place that is being counted, as far as they were asked.
#[derive(Debug)]
struct PlaceSaid {
    place: u64,
    by_layer: BTreeMap<ObjectId, Said>,
}

#[derive(Debug)]
struct Round {
    began_at: Instant,
    began_at_lsn: Lsn,
    cursor: Cursor,
    /// The leaf that it waits for.
    pending: Option<LeafNo>,
    pins: Pins,
    said: Option<PlaceSaid>,
    not_before: Instant,
    /// What leaves and overlay name of segments behind the cursor; and the leaves themselves. Of segments that were
    /// compared nothing.
    named: BTreeMap<SegmentNo, Change>,
    /// Segments whose accounts are wrong, and by how much more is named.
    differing: Vec<(SegmentNo, Change)>,
    /// More was told to be shadowed in leaves than is.
    shadows_too_much: bool,
    tally: Tally,
    /// [`LayerTable::changes`] when the tally was begun.
    layer_changes: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Audit {
    round: Option<Box<Round>>,
    due: Option<Instant>,
    /// What the log had come to when the last round began.
    audited: Option<Lsn>,
    sharing: Option<Arc<Sharing>>,
}

/// State that a round goes through.
pub(crate) struct Walk<'a> {
    pub(crate) basis: &'a Basis,
    pub(crate) guests_are_at_work: bool,
    pub(crate) map: &'a Map,
    pub(crate) segments: &'a Segments,
    pub(crate) turn: &'a mut Turn,
}

impl Walk<'_> {
    fn left(&self) -> usize {
        self.turn.left(self.basis)
    }
}

/// What a walk comes to, as far as what it needs is in memory.
#[derive(Debug)]
pub(crate) enum Walked {
    /// Nothing is to be done now.
    Rests,
    /// It goes on when this leaf is there.
    Needs(LeafNo),
    /// Everything was seen.
    All,
}

/// What a round found wrong.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Wrong {
    /// Segments, and what is named of them.
    pub(crate) live: Vec<(SegmentNo, Named)>,
    /// More was told to be shadowed in leaves than is.
    pub(crate) shadows_too_much: bool,
}

impl Naming for Audit {
    fn on_named(&mut self, no: LeafNo, segment: SegmentNo, change: Change) {
        if let Some(round) = self.round.as_mut().filter(|round| round.cursor.is_behind_leaf(no)) {
            round.count(segment, change);
        }
    }

    fn on_overlay(&mut self, run: NamedRun<'_>, is_named: bool) {
        if let Some(round) = &mut self.round {
            let behind = run.stored.named(round.cursor.blocks_behind(run)).as_more();
            round.count(run.segment, if is_named { behind } else { -behind });
        }
    }
}

/// Where a leaf lies in its layer, in leaves.
fn place_of(no: LeafNo) -> u64 {
    Key(no.first_key()).lba().0 / LEAF_BLOCKS
}

impl Audit {
    pub(crate) fn on_layers_changed(&mut self, now: Instant) {
        self.due = Some(self.due.unwrap_or(now + AFTER_CHANGE).min(now + AFTER_CHANGE));
    }

    pub(crate) fn sharing(&self) -> Option<Arc<Sharing>> {
        self.sharing.clone()
    }

    /// A round is under way.
    pub(crate) fn is_at_work(&self) -> bool {
        self.round.is_some()
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.round.as_ref().filter(|round| round.pending.is_none()).map(|round| round.not_before)
    }

    /// Begins a round if one is due, and there is something new to count.
    pub(crate) fn drive(&mut self, now: Instant, every: Duration, completed: Lsn, layers: &LayerTable) {
        if self.round.is_some() {
            return;
        }
        let due = *self.due.get_or_insert(now + every.min(AFTER_FAILURE));
        if now < due || self.audited == Some(completed) {
            return;
        }
        self.round = Some(Box::new(Round {
            began_at: now,
            began_at_lsn: completed,
            cursor: Cursor::Leaves(Spot::at(0)),
            pending: None,
            pins: Pins::default(),
            said: None,
            not_before: now,
            named: BTreeMap::new(),
            differing: Vec::new(),
            shadows_too_much: false,
            tally: Tally::new(layers),
            layer_changes: layers.changes(),
        }));
    }

    /// The volume does not serve any more.
    pub(crate) fn abandon(&mut self) {
        self.round = None;
    }

    /// Goes on with the round that is under way, as far as a slice allows.
    pub(crate) fn walk(&mut self, walk: &mut Walk<'_>) -> Walked {
        let now = walk.basis.now;
        while let Some(round) = self.round.as_mut().filter(|r| r.pending.is_none() && r.not_before <= now) {
            if walk.left() == 0 {
                self.pause(now, walk.guests_are_at_work);
                return Walked::Rests;
            }
            match round.cursor {
                Cursor::Leaves(from) => {
                    if let Some(missing) = round.count_next_leaf(from, walk) {
                        return Walked::Needs(missing);
                    }
                }
                Cursor::Overlay(from) => round.count_overlay(from, walk),
                Cursor::Accounts(last) => {
                    if !round.compare_accounts(last, walk) {
                        return Walked::All;
                    }
                }
            }
        }
        Walked::Rests
    }

    pub(crate) fn on_leaf(
        &mut self,
        now: Instant,
        guests_are_at_work: bool,
        pointer: Option<LeafPointer>,
        no: LeafNo,
        leaf: Result<Arc<Leaf>, FetchError>,
    ) {
        let Some(round) = &mut self.round else { return };
        if round.pending.take_if(|pending| *pending == no).is_none() {
            return;
        }
        match (leaf, pointer) {
            (Ok(leaf), Some(pointer)) => round.pins.hold(no, pointer, leaf),
            // The base has changed meanwhile: it is looked for anew.
            (Ok(_), None) | (Err(FetchError::Gone), _) => {}
            (Err(FetchError::Lost), _) => {
                self.round = None;
                self.due = Some(now + AFTER_FAILURE);
                return;
            }
        }
        if guests_are_at_work {
            self.pause(now, guests_are_at_work);
        }
    }

    fn pause(&mut self, now: Instant, guests_are_at_work: bool) {
        let pause = if guests_are_at_work { PAUSE_BUSY } else { PAUSE };
        if let Some(round) = &mut self.round {
            round.not_before = now + pause;
        }
    }

    /// Everything was seen: what the accounts say wrong. `heads` are those that stay; `every` how often there is a
    /// round.
    pub(crate) fn finish(
        &mut self,
        now: Instant,
        every: Duration,
        map: &Map,
        segments: &Segments,
        heads: impl Iterator<Item = HeadId>,
    ) -> Wrong {
        let round = self.round.take().expect("a round under way");
        self.audited = Some(round.began_at_lsn);
        let took = now.since(round.began_at);
        let mut rest = every.max(took * REST);
        if round.layer_changes == map.layers().changes() {
            self.publish(&round.tally, map.layers(), heads);
        } else {
            (self.audited, rest) = (None, AFTER_CHANGE.max(took));
        }
        self.due = Some(now + rest);
        // What has changed since they were compared has changed both.
        let named = |(no, more)| Some((no, segments.get(no)?.live.saturating_change(more)));
        Wrong {
            live: round.differing.into_iter().filter_map(named).collect(),
            shadows_too_much: round.shadows_too_much,
        }
    }

    fn publish(&mut self, tally: &Tally, layers: &LayerTable, heads: impl Iterator<Item = HeadId>) {
        if tally.layer_count() < 2 {
            // Nobody shares anything, and it was not counted.
            self.sharing = None;
            return;
        }
        let (mut shares, held_by_snapshots_bytes) = tally.outcome();
        let heads: BTreeMap<HeadId, Shares> =
            heads.filter_map(|head| Some((head, shares.remove(&layers.live(head)?)?))).collect();
        self.sharing = Some(Arc::new(Sharing { snapshots: shares, heads, held_by_snapshots_bytes }));
    }

    /// Asserts what must hold between events (tests and the simulator).
    pub(crate) fn verify(&self) {
        let Some(round) = &self.round else { return };
        // Between the two there was no leaf; one that comes meanwhile is counted when the walk goes on.
        assert!(round.pending.is_none_or(|no| !round.cursor.is_behind_leaf(no)), "no leaf is counted twice");
        if let (Some(said), Cursor::Leaves(spot)) = (&round.said, round.cursor) {
            assert!(
                said.place <= spot.place
                    && said.by_layer.keys().all(|layer| said.place < spot.place || *layer < spot.layer),
                "no layer is asked before its turn"
            );
        }
        let first = round.named.first_key_value().map(|(no, _)| *no);
        assert!(first.is_none_or(|no| !round.cursor.was_compared(no)), "what was compared is counted no more");
    }
}

impl Round {
    fn count(&mut self, segment: SegmentNo, change: Change) {
        if !change.is_none() && !self.cursor.was_compared(segment) {
            *self.named.entry(segment).or_default() += change;
        }
    }

    /// Counts the next leaf, and asks its layer what it says, unless that leaf is missing, which it gives. Where a place
    /// ends before it, that is added up first.
    fn count_next_leaf(&mut self, from: Spot, walk: &mut Walk<'_>) -> Option<LeafNo> {
        let map = walk.map;
        let layer_count = self.tally.layer_count();
        let next = next_spot(map, layer_count, from);
        if let Some(said) = self.said.take_if(|said| next.is_none_or(|next| next.place != said.place)) {
            self.tally.add(&said.by_layer);
            walk.turn.slice(COUNTED, layer_count * RUNS_A_LAYER);
            return None;
        }
        let Some(spot) = next else {
            self.cursor = Cursor::Overlay(0);
            return None;
        };
        let (no, pointer) = (spot.leaf(), map.directory().get(spot.leaf()));
        let held = |pointer| self.pins.get(no, pointer).cloned().or_else(|| map.peek(no));
        let leaf = pointer.map(|pointer| (pointer, held(pointer)));
        let mut runs = RUNS_A_LAYER;
        if let Some((pointer, leaf)) = &leaf {
            let Some(leaf) = leaf else {
                self.pending = Some(no);
                return Some(no);
            };
            self.count_leaf(map, no, *pointer, leaf);
            runs += RUNS_A_LEAF + leaf.runs.len();
        }
        if layer_count >= 2 {
            let (said, pieces) = said_by(map, no, leaf.and_then(|(_, leaf)| leaf).as_deref());
            runs += pieces;
            let of_place = || PlaceSaid { place: spot.place, by_layer: BTreeMap::new() };
            self.said.get_or_insert_with(of_place).by_layer.insert(spot.layer, said);
        }
        self.pins.release_all();
        self.cursor = Cursor::Leaves(spot.next());
        walk.turn.slice(COUNTED, runs);
        None
    }

    fn count_leaf(&mut self, map: &Map, no: LeafNo, pointer: LeafPointer, leaf: &Leaf) {
        let leaf_itself = (pointer.segment, Named::of_metadata(u64::from(pointer.len_bytes)));
        for (segment, named) in leaf.named_by_segment().into_iter().chain([leaf_itself]) {
            *self.named.entry(segment).or_default() += named.as_more();
        }
        self.shadows_too_much |= map.shadows_too_much(no, leaf);
    }

    fn count_overlay(&mut self, from: u64, walk: &mut Walk<'_>) {
        let (runs_max, mut runs, mut seen) = (walk.left(), 0, from);
        for (start, before, blocks, mapped) in walk.map.overlay().iter_behind(from).take(runs_max) {
            (runs, seen) = (runs + 1, start + before + blocks);
            if let Place::Segment { segment, stored, .. } = &mapped.place {
                self.count(*segment, stored.named_behind(before, blocks).as_more());
            }
        }
        walk.turn.slice("audit: what the overlay names is counted", runs.max(1));
        self.cursor = if runs < runs_max { Cursor::Accounts(None) } else { Cursor::Overlay(seen) };
    }

    /// False when all of them were.
    fn compare_accounts(&mut self, last: Option<SegmentNo>, walk: &mut Walk<'_>) -> bool {
        let mut in_table = walk.segments.iter_after(last).peekable();
        for compared in 0..walk.left() {
            // Segments that are gone may still be named: there it is shadowed.
            let named = self.named.first_key_value().map(|(no, _)| *no);
            let Some(no) = named.into_iter().chain(in_table.peek().map(|(no, _)| *no)).min() else {
                walk.turn.slice(COMPARED, compared.max(1));
                return false;
            };
            let named = self.named.remove(&no).unwrap_or_default();
            if let Some((_, info)) = in_table.next_if(|(in_table, _)| *in_table == no)
                && info.kind != Kind::Run
                && named != info.live.as_more()
            {
                self.differing.push((no, named - info.live.as_more()));
            }
            self.cursor = Cursor::Accounts(Some(no));
        }
        walk.turn.slice(COMPARED, walk.left());
        true
    }
}

/// The next place from there on of which anything is said that counts.
fn next_place(map: &Map, layer_count: usize, from: u64) -> Option<u64> {
    let in_leaves = map.directory().place_from(from);
    if layer_count < 2 {
        return in_leaves;
    }
    let in_overlay = |layer: &ObjectId| {
        let keys = keys_of(*layer);
        let first = Key::new(*layer, Lba(from * LEAF_BLOCKS)).0;
        // A run may begin before. Zeroes, which may be as long as the volume, are looked at where they begin.
        if map.overlay().pieces(first, 1)[0].value.as_ref().is_some_and(|m| m.place != Place::Zero) {
            return Some(from);
        }
        let (start, _, _) = map.overlay().iter_from(first).next().filter(|(start, _, _)| *start < keys.end)?;
        Some(place_of(LeafNo::of(Key(start))))
    };
    map.overlaid().iter().filter_map(in_overlay).chain(in_leaves).min()
}

/// The next spot from there on of which anything may be said that counts.
fn next_spot(map: &Map, layer_count: usize, from: Spot) -> Option<Spot> {
    let in_place = |from: Spot| {
        let in_leaves = map.directory().layer_from(from.place, from.layer);
        let in_overlay = map.overlaid().range(from.layer..).next().copied().filter(|_| layer_count >= 2);
        let layer = in_leaves.into_iter().chain(in_overlay).min()?;
        Some(Spot { layer, ..from })
    };
    let is_begun = from != Spot::at(from.place);
    let rest_of_place = is_begun.then(|| in_place(from)).flatten();
    rest_of_place.or_else(|| in_place(Spot::at(next_place(map, layer_count, from.place + u64::from(is_begun))?)))
}

/// What a layer says, and how many pieces of leaf and overlay that is.
fn said_by(map: &Map, no: LeafNo, leaf: Option<&Leaf>) -> (Said, usize) {
    let (mut said, mut pieces) = (Said::default(), 0);
    for piece in leaf.iter().flat_map(|leaf| leaf.lookup(0, LEAF_BLOCKS)) {
        said.say(&piece);
        pieces += 1;
    }
    for piece in map.overlay().pieces(no.first_key(), LEAF_BLOCKS) {
        let value = piece.value.map(|mapped| mapped.place);
        said.say(&Piece { start: piece.start - no.first_key(), len: piece.len, value });
        pieces += 1;
    }
    (said, pieces)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::tests::TestMap;
    use crate::segment::tests::no;
    use holdfast_base::Prng;

    const EVERY: Duration = Duration::from_secs(60);

    fn basis(slice_runs_max: usize) -> Basis {
        let mut basis = crate::basis::tests::basis("mirror:2");
        basis.config.slice_runs_max = slice_runs_max;
        basis
    }

    /// What follows for the round under way in one turn; and what it comes to, if it ends.
    fn turn(kept: &mut TestMap, basis: &Basis) -> (Turn, Option<Wrong>) {
        let mut turn = Turn::default();
        let TestMap { map, segments, audit, .. } = kept;
        let walked = audit.walk(&mut Walk { basis, guests_are_at_work: false, map, segments, turn: &mut turn });
        audit.verify();
        let heads = [HeadId::VOLUME].into_iter();
        let is_all = matches!(walked, Walked::All);
        (turn, is_all.then(|| audit.finish(basis.now, EVERY, map, segments, heads)))
    }

    /// A round over all that there is.
    fn audited(kept: &mut TestMap, now: Instant, completed: u64) -> Option<Wrong> {
        let mut basis = basis(1 << 20);
        basis.now = now;
        kept.audit.drive(now, EVERY, Lsn(completed), kept.map.layers());
        turn(kept, &basis).1
    }

    /// A round in slices, with what comes between them.
    fn audited_in_slices(kept: &mut TestMap, slice: usize, mut between: impl FnMut(&mut TestMap)) -> (usize, Wrong) {
        let mut basis = basis(slice);
        basis.now = Instant::ZERO + AFTER_CHANGE;
        kept.audit = Audit::default();
        kept.audit.on_layers_changed(Instant::ZERO);
        kept.audit.drive(basis.now, EVERY, Lsn(1), kept.map.layers());
        let a_leaf = RUNS_A_LEAF + RUNS_A_LAYER + 3 * LEAF_BLOCKS as usize;
        for slices in 1..100_000 {
            let (turn, found) = turn(kept, &basis);
            let beyond = if turn.of == COUNTED { a_leaf } else { 1 };
            assert!(turn.sliced < slice + beyond, "{} of {slice} in a turn: {}", turn.sliced, turn.of);
            if let Some(wrong) = found {
                return (slices, wrong);
            }
            between(kept);
            basis.now = kept.audit.deadline().expect("nothing is missing, and it goes on by itself");
        }
        panic!("it does not end")
    }

    #[test]
    fn accounts_that_are_wrong_are_found_and_rounds_wait_for_something_new() {
        let mut kept = TestMap::new();
        kept.write(0, 0, 8, 1);
        let first = Instant::ZERO + AFTER_FAILURE;
        assert_eq!(audited(&mut kept, Instant::ZERO, 1), None, "the first round comes after a while");
        assert_eq!(audited(&mut kept, first, 1), Some(Wrong::default()));
        kept.segments.add_live(no(1, 1), Named::of_blocks(3));
        assert_eq!(audited(&mut kept, first + EVERY, 1), None, "nothing was written since");
        let wrong = audited(&mut kept, first + EVERY, 2);
        assert_eq!(wrong, Some(Wrong { live: vec![(no(1, 1), Named::of_blocks(8))], shadows_too_much: false }));
    }

    #[test]
    fn a_leaf_that_comes_before_the_one_that_is_waited_for_is_counted_once() {
        let (mut kept, now) = (TestMap::new(), Instant::ZERO + AFTER_FAILURE);
        kept.write(0, 2 * LEAF_BLOCKS, 8, 1);
        kept.fold(1);
        let far = kept.evict(LeafNo(2));
        assert_eq!(audited(&mut kept, Instant::ZERO, 1), None, "the first round comes after a while");
        assert_eq!(audited(&mut kept, now, 1), None, "a leaf is waited for, after a place without any");
        assert!(kept.audit.round.as_ref().is_some_and(|round| round.pending == Some(LeafNo(2))));
        kept.write(0, LEAF_BLOCKS, 4, 2);
        kept.fold(2);
        let near = kept.evict(LeafNo(1));
        let mut found = None;
        // The far one is let go with what is counted before it, and asked for again.
        for (no, leaf) in [(LeafNo(2), &far), (LeafNo(1), &near), (LeafNo(2), &far)] {
            assert_eq!(found, None, "the round ends when all leaves were there");
            kept.audit.on_leaf(now, false, kept.map.directory().get(no), no, Ok(Arc::clone(leaf)));
            found = audited(&mut kept, now, 1);
        }
        assert_eq!(found, Some(Wrong::default()));
    }

    #[test]
    fn what_snapshots_share_is_counted_soon_after_they_are_taken() {
        let mut kept = TestMap::new();
        kept.write(0, 0, 8, 1);
        let snapshot = crate::map::Snapshot {
            name: "monday".to_string(),
            head: HeadId::VOLUME,
            created_ms: 0,
            size_bytes: 1 << 20,
        };
        kept.map.layers_mut().freeze(ObjectId(0), ObjectId(1), snapshot, true);
        kept.write(1, 0, 2, 2);
        kept.audit.on_layers_changed(Instant::ZERO);
        assert_eq!(audited(&mut kept, Instant::ZERO + AFTER_CHANGE, 1), Some(Wrong::default()));
        let sharing = kept.audit.sharing().expect("it was counted");
        let blocks = |shares: Shares| (shares.referenced_bytes >> 12, shares.exclusive_bytes >> 12);
        assert_eq!(sharing.snapshots.get(&ObjectId(0)).copied().map(blocks), Some((8, 2)));
        assert_eq!(sharing.heads.get(&HeadId::VOLUME).copied().map(blocks), Some((8, 2)));
    }

    #[test]
    fn many_layers_of_one_place_are_counted_layer_by_layer() {
        let layers = 60;
        let mut kept = TestMap::new();
        for layer in 0..layers {
            for at in 0..60 {
                kept.write(layer, (at * 17 + u64::from(layer)) % LEAF_BLOCKS, 4, 1 + at % 7);
            }
            let (name, size_bytes) = (layer.to_string(), 1 << 21);
            let snapshot = crate::map::Snapshot { name, head: HeadId::VOLUME, created_ms: 0, size_bytes };
            kept.map.layers_mut().freeze(ObjectId(layer), ObjectId(layer + 1), snapshot, true);
        }
        kept.fold(1);
        kept.write(layers, 0, 3, 2);
        let in_slices_of = |kept: &mut TestMap, slice| {
            let (slices, wrong) = audited_in_slices(kept, slice, |_| {});
            assert_eq!(wrong, Wrong::default());
            (slices, kept.audit.sharing().expect("it was counted"))
        };
        let (slices, at_once) = in_slices_of(&mut kept, 1 << 24);
        assert_eq!((slices, at_once.snapshots.len()), (1, layers as usize));
        let (slices, in_slices) = in_slices_of(&mut kept, 1);
        assert!(slices > layers as usize, "{slices} slices");
        assert_eq!(in_slices, at_once);
    }

    /// A map of leaves and runs over them, with dead segments here and there.
    fn with_leaves_and_runs() -> TestMap {
        let mut kept = TestMap::new();
        for at in 0..40 {
            kept.write(0, at * 50, 30, 1 + at % 7);
        }
        kept.fold(1);
        for at in 0..60 {
            kept.write(0, at * 33, 5, 1 + at % 11);
        }
        kept
    }

    #[test]
    fn what_changes_while_a_round_is_under_way_is_counted_once() {
        for slice in [1, 7, 64, 1 << 20] {
            let (mut kept, mut prng, mut folds) = (with_leaves_and_runs(), Prng::new(slice as u64), 1);
            for _ in 0..40 {
                let (slices, wrong) = audited_in_slices(&mut kept, slice, |kept| {
                    let (at, blocks) = (prng.below(4 * LEAF_BLOCKS), 1 + prng.below(90));
                    match prng.below(20) {
                        0 => {
                            folds += 1;
                            kept.fold(folds);
                        }
                        1..4 => kept.say(0, at, 3 * blocks, Place::Zero),
                        4..12 => kept.write_packed(0, at, blocks, 100 + prng.below(20)),
                        _ => kept.write(0, at, blocks, 1 + prng.below(20)),
                    }
                });
                assert_eq!(wrong, Wrong::default(), "in {slices} slices of {slice}");
                assert_eq!(slices > 20, slice == 1, "{slices} slices of {slice}");
            }
        }
    }

    #[test]
    fn accounts_that_are_wrong_are_found_however_they_change_meanwhile() {
        for (segment, wrong_by) in [(1, 3), (11, 1)] {
            let mut kept = with_leaves_and_runs();
            kept.segments.add_live(no(1, segment), Named::of_blocks(wrong_by));
            let mut at = 0;
            let (slices, wrong) = audited_in_slices(&mut kept, 1, |kept| {
                at += 7;
                kept.write(0, at % (4 * LEAF_BLOCKS), 9, segment);
            });
            let counted = kept.live(segment) - wrong_by;
            assert_eq!(wrong.live, [(no(1, segment), Named::of_blocks(counted))], "in {slices} slices");
            assert!(slices > 60 + 11);
        }
    }
}
