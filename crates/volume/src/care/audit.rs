//! The audit: walks the whole map in the background, counts what it names, and compares that with the accounts that are
//! kept write by write: the live counts of segments, and what is shadowed, as far as leaves name it and the overlay
//! hides it. By the way it counts what snapshots and clones share (see [`super::shares`]).
//!
//! States: resting -> walking, place by place of the volume, all layers at a time, leaves that are not in memory being
//! loaded -> (everything was seen) comparing -> resting. A leaf that can't be read ends the round.
//!
//! Leaves that change behind the walk change its counts, too; what the overlay names is counted at the end, in one go.
//!
//! Invariant: accounts and counts agree. A difference is told and put right: the count is true, since it forgets
//! nothing.
//!
//! Limits: one leaf is read at a time; after each, or after [`PLACES_AT_ONCE`] that are in memory, there is a pause.
//! The end of a round goes through overlay and segment table in one go, which is not cut into slices. A round is
//! followed by a rest of twenty times its length.

use super::shares::{Said, Shares, Tally};
use crate::map::{
    LEAF_BLOCKS, LayerTable, Leaf, LeafNo, LeafPointer, Map, Mapped, Naming, Piece, Pins, Place, keys_of, leaf_in,
};
use crate::segment::fetch::FetchError;
use crate::segment::{Kind, SegmentInfo, Segments};
use holdfast_base::{HeadId, Instant, Key, Lba, Lsn, ObjectId};
use holdfast_format::record::SegmentNo;
use std::collections::{BTreeMap, BTreeSet};
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

/// Places looked at in one go: well under a millisecond. Of many layers fewer are.
const PLACES_AT_ONCE: usize = 16;
const LAYERS_A_PLACE: usize = 16;

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

#[derive(Debug)]
struct Round {
    began_at: Instant,
    began_at_lsn: Lsn,
    /// The place of the volume, in leaves, before which everything is counted.
    place: u64,
    pending: BTreeSet<LeafNo>,
    pins: Pins,
    not_before: Instant,
    /// Blocks of data segments, and bytes of others, that leaves counted so far name; and the leaves themselves.
    named: BTreeMap<SegmentNo, i64>,
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

/// What a walk comes to, as far as what it needs is in memory.
#[derive(Debug)]
pub(crate) enum Walked {
    /// Nothing is to be done now.
    Rests,
    /// It goes on when these leaves are there.
    Needs(Vec<LeafNo>),
    /// Everything was seen.
    All,
}

/// What a round found wrong.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Wrong {
    /// Segments, and what is named of them.
    pub(crate) live: Vec<(SegmentNo, u64)>,
    /// More was told to be shadowed in leaves than is.
    pub(crate) shadows_too_much: bool,
}

impl Naming for Audit {
    fn on_named(&mut self, no: LeafNo, segment: SegmentNo, change: i64) {
        if let Some(round) = self.round.as_mut().filter(|round| place_of(no) < round.place) {
            *round.named.entry(segment).or_default() += change;
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
        self.round.as_ref().filter(|round| round.pending.is_empty()).map(|round| round.not_before)
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
            place: 0,
            pending: BTreeSet::new(),
            pins: Pins::default(),
            not_before: now,
            named: BTreeMap::new(),
            shadows_too_much: false,
            tally: Tally::new(layers),
            layer_changes: layers.changes(),
        }));
    }

    /// The volume does not serve any more.
    pub(crate) fn abandon(&mut self) {
        self.round = None;
    }

    /// Goes on with the round that is under way. `looked_at`: how much was looked at in one go.
    pub(crate) fn walk(&mut self, now: Instant, guests_are_at_work: bool, map: &Map, looked_at: &mut usize) -> Walked {
        while let Some(round) = self.round.as_ref().filter(|r| r.pending.is_empty() && r.not_before <= now) {
            if *looked_at >= PLACES_AT_ONCE {
                self.pause(now, guests_are_at_work);
                return Walked::Rests;
            }
            let layer_count = round.tally.layer_count();
            let Some(place) = next_place(map, layer_count, round.place) else { return Walked::All };
            let layers = layers_at(map, layer_count, place);
            *looked_at += 1 + (layers.len() + layer_count) / LAYERS_A_PLACE;
            let leaves: Vec<LeafNo> = layers.iter().map(|layer| leaf_in(LeafNo(place), *layer)).collect();
            let missing = self.missing(map, &leaves);
            if !missing.is_empty() {
                self.round.as_mut().expect("just seen").pending = missing.iter().copied().collect();
                return Walked::Needs(missing);
            }
            self.count_place(map, place, &layers);
        }
        Walked::Rests
    }

    fn missing(&mut self, map: &Map, leaves: &[LeafNo]) -> Vec<LeafNo> {
        let round = self.round.as_mut().expect("a round under way");
        let mut missing = Vec::new();
        for no in leaves {
            let Some(pointer) = map.directory().get(*no).filter(|pointer| round.pins.get(*no, *pointer).is_none())
            else {
                continue;
            };
            match map.peek(*no) {
                Some(leaf) => round.pins.hold(*no, pointer, leaf),
                None => missing.push(*no),
            }
        }
        missing
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
        if !round.pending.remove(&no) {
            return;
        }
        match (leaf, pointer) {
            (Ok(leaf), Some(pointer)) => round.pins.hold(no, pointer, leaf),
            // The base has changed meanwhile: the place is looked at anew.
            (Ok(_), None) | (Err(FetchError::Gone), _) => {}
            (Err(FetchError::Lost), _) => {
                self.round = None;
                self.due = Some(now + AFTER_FAILURE);
                return;
            }
        }
        if round.pending.is_empty() && guests_are_at_work {
            self.pause(now, guests_are_at_work);
        }
    }

    fn pause(&mut self, now: Instant, guests_are_at_work: bool) {
        let pause = if guests_are_at_work { PAUSE_BUSY } else { PAUSE };
        if let Some(round) = &mut self.round {
            round.not_before = now + pause;
        }
    }

    fn count_place(&mut self, map: &Map, place: u64, layers: &BTreeSet<ObjectId>) {
        let round = self.round.as_mut().expect("a round under way");
        let shares = round.tally.layer_count() >= 2;
        let mut said: BTreeMap<ObjectId, Said> = BTreeMap::new();
        for layer in layers {
            let no = leaf_in(LeafNo(place), *layer);
            let pointer = map.directory().get(no);
            let leaf = pointer.map(|pointer| round.pins.get(no, pointer).expect("none is missing"));
            if let (Some(leaf), Some(pointer)) = (leaf, pointer) {
                *round.named.entry(pointer.segment).or_default() += i64::from(pointer.len_bytes);
                for (segment, blocks) in leaf.blocks_by_segment() {
                    *round.named.entry(segment).or_default() += blocks as i64;
                }
                round.shadows_too_much |= map.shadows_too_much(no, leaf);
            }
            if shares {
                said.insert(*layer, said_by(map, no, leaf.map(|leaf| &**leaf)));
            }
        }
        if shares {
            round.tally.add(&said);
        }
        round.pins.release_all();
        round.place = place + 1;
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
        let mut round = self.round.take().expect("a round under way");
        for (_, len, mapped) in map.overlay().iter_from(0) {
            if let Mapped { place: Place::Segment { segment, .. }, .. } = mapped {
                *round.named.entry(*segment).or_default() += len as i64;
            }
        }
        self.audited = Some(round.began_at_lsn);
        let took = now.since(round.began_at);
        let mut rest = every.max(took * REST);
        if round.layer_changes == map.layers().changes() {
            self.publish(&round.tally, map.layers(), heads);
        } else {
            (self.audited, rest) = (None, AFTER_CHANGE.max(took));
        }
        self.due = Some(now + rest);
        let named = |no: &SegmentNo| round.named.get(no).copied().unwrap_or(0);
        let counted = segments.iter().filter(|(_, info)| info.kind != Kind::Run);
        let differs = |(no, info): &(SegmentNo, &SegmentInfo)| named(no) != info.live as i64;
        let live = counted.filter(differs).map(|(no, _)| (no, u64::try_from(named(&no)).unwrap_or(0))).collect();
        Wrong { live, shadows_too_much: round.shadows_too_much }
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
        let places: BTreeSet<u64> = round.pending.iter().map(|no| place_of(*no)).collect();
        assert!(places.len() <= 1, "leaves are asked for place by place");
        // Between the two there was no leaf; one that comes meanwhile is counted when the walk goes on.
        assert!(places.iter().all(|place| *place >= round.place), "no place is counted twice");
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
        // A run may begin before.
        if map.overlay().pieces(first, 1)[0].value.as_ref().is_some_and(|m| m.place != Place::Zero) {
            return Some(from);
        }
        let mut runs = map.overlay().iter_from(first).take_while(|(start, _, _)| *start < keys.end);
        let (start, _, _) = runs.find(|(_, _, mapped)| mapped.place != Place::Zero)?;
        Some(place_of(LeafNo::of(Key(start))))
    };
    map.overlaid().iter().filter_map(in_overlay).chain(in_leaves).min()
}

/// Layers that may say something of it.
fn layers_at(map: &Map, layer_count: usize, place: u64) -> BTreeSet<ObjectId> {
    let mut layers: BTreeSet<ObjectId> = map.directory().layers_at(place * LEAF_BLOCKS, LEAF_BLOCKS).collect();
    if layer_count >= 2 {
        layers.extend(map.overlaid());
    }
    layers
}

fn said_by(map: &Map, no: LeafNo, leaf: Option<&Leaf>) -> Said {
    let mut said = Said::default();
    for piece in leaf.iter().flat_map(|leaf| leaf.lookup(0, LEAF_BLOCKS)) {
        said.say(&piece);
    }
    for piece in map.overlay().pieces(no.first_key(), LEAF_BLOCKS) {
        let value = piece.value.map(|mapped| mapped.place);
        said.say(&Piece { start: piece.start - no.first_key(), len: piece.len, value });
    }
    said
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::tests::TestMap;
    use crate::segment::tests::no;

    const EVERY: Duration = Duration::from_secs(60);

    /// A round over all that there is.
    fn audited(audit: &mut Audit, kept: &TestMap, now: Instant, completed: u64) -> Option<Wrong> {
        audit.drive(now, EVERY, Lsn(completed), kept.map.layers());
        let (mut looked_at, heads) = (0, [HeadId::VOLUME].into_iter());
        let walked = audit.walk(now, false, &kept.map, &mut looked_at);
        audit.verify();
        matches!(walked, Walked::All).then(|| audit.finish(now, EVERY, &kept.map, &kept.segments, heads))
    }

    #[test]
    fn accounts_that_are_wrong_are_found_and_rounds_wait_for_something_new() {
        let (mut audit, mut kept) = (Audit::default(), TestMap::new());
        kept.write(0, 0, 8, 1);
        let first = Instant::ZERO + AFTER_FAILURE;
        assert_eq!(audited(&mut audit, &kept, Instant::ZERO, 1), None, "the first round comes after a while");
        assert_eq!(audited(&mut audit, &kept, first, 1), Some(Wrong::default()));
        kept.segments.add_live(no(1, 1), 3);
        assert_eq!(audited(&mut audit, &kept, first + EVERY, 1), None, "nothing was written since");
        let wrong = audited(&mut audit, &kept, first + EVERY, 2);
        assert_eq!(wrong, Some(Wrong { live: vec![(no(1, 1), 8)], shadows_too_much: false }));
    }

    #[test]
    fn a_leaf_that_comes_before_the_one_that_is_waited_for_is_counted_once() {
        let (mut audit, mut kept, now) = (Audit::default(), TestMap::new(), Instant::ZERO + AFTER_FAILURE);
        kept.write(0, 2 * LEAF_BLOCKS, 8, 1);
        kept.fold(1);
        let far = kept.evict(LeafNo(2));
        assert_eq!(audited(&mut audit, &kept, Instant::ZERO, 1), None, "the first round comes after a while");
        assert_eq!(audited(&mut audit, &kept, now, 1), None, "a leaf is waited for, after a place without any");
        assert!(audit.round.as_ref().is_some_and(|round| round.pending.contains(&LeafNo(2))));
        kept.write(0, LEAF_BLOCKS, 4, 2);
        kept.fold(2);
        let near = kept.evict(LeafNo(1));
        let mut found = None;
        // The far one is let go with what is counted before it, and asked for again.
        for (no, leaf) in [(LeafNo(2), &far), (LeafNo(1), &near), (LeafNo(2), &far)] {
            assert_eq!(found, None, "the round ends when all leaves were there");
            audit.on_leaf(now, false, kept.map.directory().get(no), no, Ok(Arc::clone(leaf)));
            found = audited(&mut audit, &kept, now, 1);
        }
        assert_eq!(found, Some(Wrong::default()));
    }

    #[test]
    fn what_snapshots_share_is_counted_soon_after_they_are_taken() {
        let (mut audit, mut kept) = (Audit::default(), TestMap::new());
        kept.write(0, 0, 8, 1);
        let snapshot = crate::map::Snapshot {
            name: "monday".to_string(),
            head: HeadId::VOLUME,
            created_ms: 0,
            size_bytes: 1 << 20,
        };
        kept.map.layers_mut().freeze(ObjectId(0), ObjectId(1), snapshot, true);
        kept.write(1, 0, 2, 2);
        audit.on_layers_changed(Instant::ZERO);
        assert_eq!(audited(&mut audit, &kept, Instant::ZERO + AFTER_CHANGE, 1), Some(Wrong::default()));
        let sharing = audit.sharing().expect("it was counted");
        let blocks = |shares: Shares| (shares.referenced_bytes >> 12, shares.exclusive_bytes >> 12);
        assert_eq!(sharing.snapshots.get(&ObjectId(0)).copied().map(blocks), Some((8, 2)));
        assert_eq!(sharing.heads.get(&HeadId::VOLUME).copied().map(blocks), Some((8, 2)));
    }
}
