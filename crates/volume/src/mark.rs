//! The mark: walks the whole map in the background, counts what it names, and compares that with the accounts that are
//! kept write by write: the live counts of segments (see `segments`), and what is hidden (see `hidden`). By the way it
//! counts what snapshots and clones share (see `sharing`).
//!
//! States: resting -> walking, place by place of the volume, all layers at a time, leaves that are not in memory being
//! loaded -> (everything was seen) comparing -> resting. A leaf that can't be read ends the round.
//!
//! Leaves that change behind the walk change its counts, too; what the overlay names is counted at the end, in one go.
//!
//! Invariant: accounts and counts agree. A difference is told and put right: the count is true, since it forgets nothing.
//!
//! Limits: one leaf is read at a time; after each, or after [`PLACES_AT_ONCE`] that are in memory, there is a pause. The end
//! of a round goes through overlay and segment table in one go, as a checkpoint does. A round is followed by a rest of
//! twenty times its length.

use crate::api::{Notice, State};
use crate::controller::{Controller, Out};
use crate::fetch::FetchError;
use crate::map::{Audit, LEAF_BLOCKS, Leaf, LeafNo, LeafWaiter, Mapped, Piece, Pins, Place, leaf_in};
use crate::segment::Kind;
use crate::sharing::{Said, Shares, Tally};
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
    /// More was told to be hidden in leaves than is.
    hides_too_much: bool,
    tally: Tally,
    /// [`LayerTable::changes`](crate::layers::LayerTable::changes) when the tally was begun.
    layer_changes: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Marker {
    round: Option<Box<Round>>,
    due: Option<Instant>,
    /// What the log had come to when the last round began.
    marked: Option<Lsn>,
    sharing: Option<Arc<Sharing>>,
}

impl Marker {
    pub(crate) fn on_layers_changed(&mut self, now: Instant) {
        self.due = Some(self.due.unwrap_or(now + AFTER_CHANGE).min(now + AFTER_CHANGE));
    }

    pub(crate) fn sharing(&self) -> Option<Arc<Sharing>> {
        self.sharing.clone()
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.round.as_ref().filter(|round| round.pending.is_empty()).map(|round| round.not_before)
    }
}

impl Audit for Marker {
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

impl Controller {
    /// Begins a round if one is due, and there is something new to count.
    pub(crate) fn drive_mark(&mut self) {
        if self.state != State::Open || self.marker.round.is_some() {
            return;
        }
        let first = self.basis.now + self.basis.config.mark_every.min(AFTER_FAILURE);
        let due = *self.marker.due.get_or_insert(first);
        if self.basis.now < due || self.marker.marked == Some(self.log.completed) {
            return;
        }
        self.marker.round = Some(Box::new(Round {
            began_at: self.basis.now,
            began_at_lsn: self.log.completed,
            place: 0,
            pending: BTreeSet::new(),
            pins: Pins::default(),
            not_before: self.basis.now,
            named: BTreeMap::new(),
            hides_too_much: false,
            tally: Tally::new(self.map.layers()),
            layer_changes: self.map.layers().changes(),
        }));
    }

    /// Goes on with the round that is under way, as far as what it needs is in memory.
    pub(crate) fn walk_map(&mut self, out: Out) {
        if self.state != State::Open {
            self.marker.round = None;
            return;
        }
        let mut looked_at = 0;
        while let Some(round) =
            self.marker.round.as_ref().filter(|r| r.pending.is_empty() && r.not_before <= self.basis.now)
        {
            if looked_at >= PLACES_AT_ONCE {
                return self.pause_mark();
            }
            let Some(place) = self.next_place(round.place) else { return self.finish_round(out) };
            let layers = self.layers_at(place);
            looked_at += 1 + (layers.len() + self.marker_layers()) / LAYERS_A_PLACE;
            let leaves: Vec<LeafNo> = layers.iter().map(|layer| leaf_in(LeafNo(place), *layer)).collect();
            let missing = self.missing_for_mark(&leaves);
            if missing.is_empty() {
                self.count_place(place, &layers);
                continue;
            }
            self.marker.round.as_mut().expect("just seen").pending = missing.iter().copied().collect();
            for no in missing {
                self.load_leaf(no, LeafWaiter::Mark, out);
            }
        }
    }

    fn marker_layers(&self) -> usize {
        self.marker.round.as_ref().map_or(0, |round| round.tally.layer_count())
    }

    /// The next place from there on of which anything is said that counts.
    fn next_place(&self, from: u64) -> Option<u64> {
        let in_leaves = self.map.directory().place_from(from);
        if self.marker_layers() < 2 {
            return in_leaves;
        }
        let in_overlay = |layer: &ObjectId| {
            let keys = crate::map::keys_of(*layer);
            let first = Key::new(*layer, Lba(from * LEAF_BLOCKS)).0;
            // A run may begin before.
            if self.map.overlay().pieces(first, 1)[0].value.as_ref().is_some_and(|m| m.place != Place::Zero) {
                return Some(from);
            }
            let mut runs = self.map.overlay().iter_from(first).take_while(|(start, _, _)| *start < keys.end);
            let (start, _, _) = runs.find(|(_, _, mapped)| mapped.place != Place::Zero)?;
            Some(place_of(LeafNo::of(Key(start))))
        };
        self.map.overlaid().iter().filter_map(in_overlay).chain(in_leaves).min()
    }

    /// Layers that may say something of it.
    fn layers_at(&self, place: u64) -> BTreeSet<ObjectId> {
        let mut layers: BTreeSet<ObjectId> = self.map.directory().layers_at(place * LEAF_BLOCKS, LEAF_BLOCKS).collect();
        if self.marker_layers() >= 2 {
            layers.extend(self.map.overlaid());
        }
        layers
    }

    fn missing_for_mark(&mut self, leaves: &[LeafNo]) -> Vec<LeafNo> {
        let generation = self.map.generation();
        let round = self.marker.round.as_mut().expect("a round under way");
        if round.pins.generation != generation {
            round.pins = Pins { generation, ..Pins::default() };
        }
        let mut missing = Vec::new();
        for no in leaves.iter().filter(|no| self.map.directory().contains(**no)) {
            if !round.pins.leaves.contains_key(no) {
                match self.map.peek(*no) {
                    Some(leaf) => drop(round.pins.leaves.insert(*no, leaf)),
                    None => missing.push(*no),
                }
            }
        }
        missing
    }

    pub(crate) fn on_mark_leaf(&mut self, no: LeafNo, leaf: Option<Arc<Leaf>>, error: Option<FetchError>) {
        let generation = self.map.generation();
        let Some(round) = &mut self.marker.round else { return };
        if !round.pending.remove(&no) {
            return;
        }
        match leaf {
            Some(leaf) if round.pins.generation == generation => drop(round.pins.leaves.insert(no, leaf)),
            // The base has changed meanwhile: the place is looked at anew.
            Some(_) => {}
            None if error == Some(FetchError::Gone) => {}
            None => return self.give_up_round(),
        }
        if round.pending.is_empty() && self.guests_are_at_work() {
            self.pause_mark();
        }
    }

    fn pause_mark(&mut self) {
        let pause = if self.guests_are_at_work() { PAUSE_BUSY } else { PAUSE };
        if let Some(round) = &mut self.marker.round {
            round.not_before = self.basis.now + pause;
        }
    }

    fn give_up_round(&mut self) {
        self.marker.round = None;
        self.marker.due = Some(self.basis.now + AFTER_FAILURE);
    }

    fn count_place(&mut self, place: u64, layers: &BTreeSet<ObjectId>) {
        let mut round = self.marker.round.take().expect("a round under way");
        let shares = round.tally.layer_count() >= 2;
        let mut said: BTreeMap<ObjectId, Said> = BTreeMap::new();
        for layer in layers {
            let no = leaf_in(LeafNo(place), *layer);
            let leaf = round.pins.leaves.remove(&no);
            if let Some(leaf) = &leaf {
                let pointer = self.map.directory().get(no).expect("the leaf is in the directory");
                *round.named.entry(pointer.segment).or_default() += i64::from(pointer.len_bytes);
                for (segment, blocks) in leaf.blocks_by_segment() {
                    *round.named.entry(segment).or_default() += blocks as i64;
                }
                round.hides_too_much |= self.map.hides_too_much(no, leaf);
            }
            if shares {
                said.insert(*layer, self.said_by(no, leaf.as_deref()));
            }
        }
        if shares {
            round.tally.add(&said);
        }
        round.place = place + 1;
        self.marker.round = Some(round);
    }

    fn said_by(&self, no: LeafNo, leaf: Option<&Leaf>) -> Said {
        let mut said = Said::default();
        for piece in leaf.iter().flat_map(|leaf| leaf.lookup(0, LEAF_BLOCKS)) {
            said.say(&piece);
        }
        for piece in self.map.overlay().pieces(no.first_key(), LEAF_BLOCKS) {
            let value = piece.value.map(|mapped| mapped.place);
            said.say(&Piece { start: piece.start - no.first_key(), len: piece.len, value });
        }
        said
    }

    fn finish_round(&mut self, out: Out) {
        let mut round = self.marker.round.take().expect("a round under way");
        for (_, len, mapped) in self.map.overlay().iter_from(0) {
            if let Mapped { place: Place::Segment { segment, .. }, .. } = mapped {
                *round.named.entry(*segment).or_default() += len as i64;
            }
        }
        self.counters.marks += 1;
        self.compare(&round, out);
        self.marker.marked = Some(round.began_at_lsn);
        let took = self.basis.now.since(round.began_at);
        let mut rest = self.basis.config.mark_every.max(took * REST);
        if round.layer_changes == self.map.layers().changes() {
            self.publish(&round.tally);
        } else {
            (self.marker.marked, rest) = (None, AFTER_CHANGE.max(took));
        }
        self.marker.due = Some(self.basis.now + rest);
    }

    fn compare(&mut self, round: &Round, out: Out) {
        let named = |no: &SegmentNo| round.named.get(no).copied().unwrap_or(0);
        let counted = self.segments.iter().filter(|(_, info)| info.kind != Kind::Run);
        let differs = |(no, info): &(SegmentNo, &crate::segment::SegmentInfo)| named(no) != info.live as i64;
        let wrong: Vec<(SegmentNo, u64)> =
            counted.filter(differs).map(|(no, _)| (no, u64::try_from(named(&no)).unwrap_or(0))).collect();
        if wrong.is_empty() && !round.hides_too_much {
            return;
        }
        self.notice(Notice::Miscounted { segments: wrong.len() as u64, hidden: round.hides_too_much }, out);
        self.map.forget_all_hidden(&mut self.segments);
        for (no, live) in wrong {
            self.segments.set_live(no, live);
        }
        self.wants.free_dead();
    }

    fn publish(&mut self, tally: &Tally) {
        if tally.layer_count() < 2 {
            // Nobody shares anything, and it was not counted.
            self.marker.sharing = None;
            return;
        }
        let (mut shares, held_by_snapshots_bytes) = tally.outcome();
        let heads = self.clones().map(|(head, _)| head).chain([HeadId::VOLUME]);
        let heads: BTreeMap<HeadId, Shares> =
            heads.filter_map(|head| Some((head, shares.remove(&self.map.layers().live(head)?)?))).collect();
        let sharing = Sharing { snapshots: shares, heads, held_by_snapshots_bytes };
        self.marker.sharing = Some(Arc::new(sharing));
    }
}
