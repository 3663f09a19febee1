//! The cleaner: moves what still lives out of mostly dead segments, so that they can be freed whole; and re-codes
//! segments that were written in a narrower layout while nodes were away.
//!
//! States: idle -> headers (the victims' indexes are read) -> leaves (what lives is looked up, in slices) -> data (it is
//! read) -> writing (a new segment, whose commit names each block's old place as its source) -> idle.
//!
//! A fold never changes the base while the cleaner is at work (see `apply`).
//!
//! Invariant: nothing in a victim comes to life again, since the map names older places only less often. So what one
//! slice found dead stays dead; what it found alive and died since is sorted out by the commit.

use super::Around;
use super::moves::is_drained_by_cleaning;
use super::repair::Repairer;
use crate::api::Out;
use crate::map::{Crcs, LEAF_BLOCKS, Leaf, LeafNo, Map, Pins, Place, Stored};
use crate::peers::Purpose;
use crate::segment::fetch::FetchError;
use crate::segment::named::{bytes_of, granules_of};
use crate::segment::units::{UnitWriter, Units, cut};
use crate::segment::writer::{Aim, JobKind, Work};
use crate::segment::{Kind, Named, SegmentInfo};
use crate::space::{DEAD_PER_MILLE_MIN, Need, Room};
use holdfast_base::{BLOCK_BYTES, Buf, Instant, Key};
use holdfast_format::ledger::Leg;
use holdfast_format::packing::{Codec, StoredLength, StoredLengths, Unit};
use holdfast_format::record::{CommitExtent, SegmentNo, Source};
use holdfast_format::segment::{SegmentIndex, ShardHeader};
use holdfast_format::sharing::STORE_EPOCHS;
use holdfast_format::tier::Tiers;
use holdfast_format::wire::{Reply, Request};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// Victims of one pass.
pub(crate) const VICTIMS_MAX: usize = 16;

/// The table is searched for victims at most this often. While room is ample a step of a search, or a pass over what
/// was found, follows the other after this time.
const SEARCH_EVERY: Duration = Duration::from_millis(50);
const SEARCH_EVERY_CALM: Duration = Duration::from_millis(500);

/// While room is ample what was found in several steps is cleaned for so long; then it is looked anew what is best.
const FOUND_FOR: Duration = Duration::from_secs(10);

/// Payload of the candidates that one search finds, in segments: as many passes follow at once while room is short.
const PASSES_FOUND: u64 = 8;

/// Segments of a store that are found to be copied back in one search.
const OF_STORE_MAX: usize = 256;

/// While room is ample victims of one pass are chosen from so many passes' worth.
const PASSES_NEAR_CALM: u64 = 2;

/// Blocks of the volume that a segment may hold, in payloads: what packs very well would have an index and a commit
/// record without bound.
const UNITS_A_PAYLOAD: u64 = 4;

/// Blocks are packed anew where that saves one part in so many.
const WORTH_PART: u64 = 8;

/// Pieces that are read at a time. What was written at random is moved in a thousand of them: guests' requests wait
/// behind these few.
const READS_AHEAD: usize = 32;

/// Leaves that are asked for at a time.
const LEAVES_AHEAD: usize = 128;

/// How long a segment that could not be read is left alone.
const UNREADABLE_PAUSE: Duration = Duration::from_secs(10);

/// After a pass for whose segment there was no room: time for a fold to free some.
const REFUSED_PAUSE: Duration = Duration::from_secs(1);

/// Segments that could not be read, and when to try again.
type Unreadable = BTreeMap<SegmentNo, Instant>;

#[derive(Debug)]
struct Victim {
    no: SegmentNo,
    tried: u8,
    asked_at: Option<Leg>,
    index: Option<Index>,
}

/// What a victim holds.
#[derive(Debug)]
struct Index {
    extents: Vec<CommitExtent>,
    /// Of its units, where it is packed.
    lengths: Option<StoredLengths>,
}

impl Index {
    /// How `blocks` are stored that begin at block `at` of the index, behind what ends at granule `end`.
    fn stored(&self, at: u32, blocks: u32, end: u32) -> Stored {
        let Some(lengths) = &self.lengths else { return Stored::Plain { block: at } };
        let lengths = lengths.slice(u64::from(at), u64::from(blocks));
        let granule = lengths.iter().next().map_or(end, |first| first.start_after(end));
        Stored::Packed { granule, lengths }
    }
}

/// A run of blocks that the map names: the first one's key, and where they lie.
#[derive(Clone, Debug)]
pub(crate) struct LiveRun {
    pub(crate) key: u64,
    pub(crate) segment: SegmentNo,
    pub(crate) stored: Stored,
    pub(crate) crcs: Crcs,
}

impl LiveRun {
    /// Of what a look-up gives: nothing, where that is in no segment.
    pub(crate) fn of(key: u64, place: Place) -> Option<LiveRun> {
        let Place::Segment { segment, stored, crcs } = place else { return None };
        Some(LiveRun { key, segment, stored, crcs })
    }

    pub(crate) fn blocks(&self) -> u64 {
        self.crcs.as_slice().len() as u64
    }

    pub(crate) fn is_packed(&self) -> bool {
        matches!(self.stored, Stored::Packed { .. })
    }

    /// Where each block lies: blocks of the payload, or granules. Unique in its segment.
    pub(crate) fn positions(&self) -> Vec<u32> {
        match &self.stored {
            Stored::Plain { block } => (*block..).take(self.blocks() as usize).collect(),
            Stored::Packed { granule, lengths } => lengths.units_after(*granule).map(|unit| unit.start).collect(),
        }
    }

    /// So many of its blocks, from the first on.
    fn first(&self, blocks: u64) -> LiveRun {
        let crcs = Crcs::new(&self.crcs.as_slice()[..blocks as usize]);
        LiveRun { stored: self.stored.slice(0, blocks), crcs, ..*self }
    }

    /// Nothing of it is compressed.
    fn is_raw(&self) -> bool {
        match &self.stored {
            Stored::Plain { .. } => true,
            Stored::Packed { lengths, .. } => lengths.iter().all(|length| length == StoredLength::RAW),
        }
    }

    fn stored_bytes(&self) -> u64 {
        bytes_of(self.stored.named(self.crcs.as_slice().len() as u64).size)
    }

    /// As one that is moved as it lies.
    fn extent(&self) -> CommitExtent {
        let source = match self.stored {
            Stored::Plain { block } => Source::Segment { segment: self.segment, block },
            Stored::Packed { granule, .. } => Source::Packed { segment: self.segment, granule },
        };
        CommitExtent { key: Key(self.key), blocks: self.crcs.as_slice().len() as u32, source }
    }

    /// As one whose units become others: where each was, the lengths of the new ones don't tell.
    fn extents_apart(&self) -> Vec<CommitExtent> {
        let Stored::Packed { granule, lengths } = &self.stored else { return vec![self.extent()] };
        let of_unit = |(offset, unit): (usize, Unit)| {
            let source = Source::Packed { segment: self.segment, granule: unit.start };
            CommitExtent { key: Key(self.key + offset as u64), blocks: 1, source }
        };
        lengths.units_after(*granule).enumerate().map(of_unit).collect()
    }
}

/// Where the look-up for what lives has come to: an extent of a victim's index, how many blocks are before it in the
/// index, and where their units end; and how many moves came before.
#[derive(Clone, Copy, Debug, Default)]
struct At {
    victim: usize,
    extent: usize,
    block: u32,
    end: u32,
    moves: usize,
}

/// What a slice of that look-up comes to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Looked {
    /// It goes on with the next slice.
    On,
    /// It goes on when these leaves are there.
    Needs(Vec<LeafNo>),
    /// Everything that lives is known.
    All,
}

/// A piece: which, the blocks in its segment from which on and how many, and their checksums.
#[derive(Debug)]
struct Unread {
    part: u32,
    run: (u32, u32),
    crcs: Crcs,
    units: Option<Units>,
}

/// What an answer to the question for a victim's index comes to.
#[derive(Debug)]
pub(crate) enum Header {
    Nothing,
    /// It can't be read there: another shard is asked for it. This one is wanted again, unless it was moved meanwhile.
    Unreadable(Option<(SegmentNo, u8)>),
    /// All indexes are there.
    All,
    /// Too few blocks are of those that this codec may make smaller.
    NotWorth(Codec),
}

/// What comes of the wish for a walk over what is named of a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Returned {
    /// A pass has begun.
    Begun,
    /// The walk over all leaves is done; the next one rests before it.
    All,
    Rests,
}

/// A piece of a victim that is to be fetched.
#[derive(Debug)]
pub(crate) struct CleanRead {
    pub(crate) pass: u64,
    pub(crate) part: u32,
    pub(crate) segment: SegmentNo,
    pub(crate) run: (u32, u32),
    pub(crate) crcs: Crcs,
    pub(crate) units: Option<Units>,
    /// The blocks are wanted, and not the units that they are stored as.
    pub(crate) opened: bool,
}

/// What a piece that was read comes to.
#[derive(Debug)]
pub(crate) enum Read {
    Nothing,
    /// More is to be read.
    On,
    /// All is there, and is written.
    All(Work),
    /// All is there, to be looked at.
    Seen(Vec<LiveRun>, Vec<Buf>),
}

/// What a pass comes to.
#[derive(Debug)]
pub(crate) struct Cleaned {
    /// These have left the first tier.
    pub(crate) rotated: Option<Vec<SegmentNo>>,
    /// It was to make blocks smaller, and did.
    pub(crate) is_smaller: bool,
    /// Another pass follows at once.
    pub(crate) goes_on: bool,
}

#[derive(Debug)]
struct Pass {
    id: u64,
    victims: Vec<Victim>,
    pins: Pins,
    leaves_pending: BTreeSet<LeafNo>,
    at: At,
    /// Where leaves were missing first, and which.
    missing_at: Option<At>,
    missing: BTreeSet<LeafNo>,
    moves: Vec<LiveRun>,
    /// The pieces to move, in the order of moves.
    parts: Vec<Part>,
    /// What of them nobody has asked for yet.
    unread: VecDeque<Unread>,
    /// Headers, or pieces, that were asked for.
    pending: usize,
    failed: bool,
    unreadable: BTreeSet<SegmentNo>,
    aim: Aim,
    /// Of a walk, which has no victims before it has looked there.
    leaves: VecDeque<LeafNo>,
    /// Blocks that fit a segment, whatever they take.
    blocks_left: u64,
    /// Of a walk: of these segments only.
    only: Option<BTreeSet<SegmentNo>>,
}

/// A piece that is moved.
#[derive(Debug)]
struct Part {
    /// From there.
    segment: SegmentNo,
    /// Of its units, where it is moved as these.
    lengths: Option<StoredLengths>,
    bytes: Option<Buf>,
}

impl Pass {
    /// What is named it learns from the map, and not from victims' indexes.
    fn is_walk(&self) -> bool {
        self.aim == Aim::Return || self.only.is_some()
    }

    /// Whether that codec may make an eighth of the victims' blocks smaller, as far as their indexes tell: where it was at
    /// work before, what is raw stays so.
    fn is_worth_packing_by(&self, codec: Codec) -> bool {
        let (mut all, mut may_shrink) = (0, 0);
        for index in self.victims.iter().filter_map(|victim| victim.index.as_ref()) {
            let blocks: u64 = index.extents.iter().map(|extent| u64::from(extent.blocks)).sum();
            all += blocks;
            may_shrink += index.lengths.as_ref().map_or(blocks, |lengths| {
                let of = |wanted: fn(Codec, Codec) -> bool| {
                    lengths.iter().filter(|length| wanted(length.codec(), codec)).count() as u64
                };
                let (raw, done) = (of(|of, _| of == Codec::Raw), of(|of, codec| of >= codec));
                if done > 0 { blocks - done - raw } else { blocks }
            });
        }
        may_shrink * WORTH_PART >= all
    }

    /// Looks what the next leaf names of a store, as far as that fits a segment, and can be read where it is to be. False
    /// where that is not known yet.
    fn look_for_foreign(&mut self, map: &mut Map, left_alone: &Unreadable, runs: &mut usize) -> bool {
        let Some(leaf) = self.leaves.front() else { return true };
        let pieces = match map.resolve_written(leaf.first_key(), LEAF_BLOCKS, &self.pins) {
            Ok(pieces) => pieces,
            Err(leaves) => {
                self.leaves_pending.extend(leaves);
                return false;
            }
        };
        *runs += pieces.len();
        for run in pieces.into_iter().filter_map(|piece| LiveRun::of(piece.start, piece.value?)) {
            let is_wanted = self.only.as_ref().is_none_or(|only| only.contains(&run.segment));
            let is_left_alone = self.aim.reads() && left_alone.contains_key(&run.segment);
            if run.segment.epoch < STORE_EPOCHS || !is_wanted || is_left_alone {
                continue;
            }
            let fits = run.blocks().min(self.blocks_left);
            self.blocks_left -= fits;
            if fits > 0 && !self.victims.iter().any(|victim| victim.no == run.segment) {
                self.victims.push(Victim { no: run.segment, tried: 0, asked_at: None, index: None });
            }
            if fits < run.blocks() {
                self.moves.extend((fits > 0).then(|| run.first(fits)));
                return true;
            }
            self.moves.push(run);
        }
        self.leaves.pop_front();
        true
    }

    /// Looks up the next extent, and tells how many runs the map has for it.
    fn look_up(&mut self, map: &mut Map) -> usize {
        let At { victim, extent, block, end, .. } = self.at;
        let index = self.victims[victim].index.as_ref().expect("all headers are there");
        let Some(CommitExtent { key, blocks, .. }) = index.extents.get(extent) else {
            self.at = At { victim: victim + 1, extent: 0, block: 0, end: 0, moves: self.moves.len() };
            return 0;
        };
        let written = index.stored(block, *blocks, end);
        let no = self.victims[victim].no;
        let mut runs = 0;
        match map.resolve_written(key.0, u64::from(*blocks), &self.pins) {
            Ok(pieces) => {
                runs = pieces.len();
                for piece in pieces {
                    let offset = Key(piece.start).lba().0 - key.lba().0;
                    if let Some(Place::Segment { segment, stored, crcs }) = piece.value
                        && segment == no
                        && stored == written.slice(offset, piece.len)
                    {
                        self.moves.push(LiveRun { key: piece.start, segment, stored, crcs });
                    }
                }
            }
            Err(leaves) => {
                self.missing_at.get_or_insert(self.at);
                self.missing.extend(leaves);
            }
        }
        let end = written.end();
        self.at = At { victim, extent: extent + 1, block: block + blocks, end, moves: self.moves.len() };
        runs
    }
}

/// A search that is under way. Its candidates are hints: a step may find one that has died, or was cleaned, until the
/// last.
#[derive(Debug, Default)]
struct Search {
    next: SegmentNo,
    /// Data segments before that one.
    rank: u64,
    /// How much it is to be written in another layout or elsewhere, if it is, what cleaning it gains, which, and its
    /// blocks that can be read.
    candidates: Vec<(Option<Need>, u64, SegmentNo, u64)>,
    of_store: Vec<SegmentNo>,
}

#[derive(Debug, Default)]
pub(crate) struct Cleaner {
    /// Of a store, and to be written in another layout or elsewhere. Their indexes have the store's addresses: what the
    /// map names of them only the map tells.
    of_store: Vec<SegmentNo>,
    pass: Option<Pass>,
    next_id: u64,
    /// Where the walk for what is to be copied back from a store goes on, and when at the earliest.
    next_to_return: LeafNo,
    /// Where the last pass of it began.
    returned_from: LeafNo,
    returns_at: Instant,
    /// Candidates of the last search, best first, and when it was or the next may be.
    found: VecDeque<SegmentNo>,
    /// The search took more than one step, and when it ended.
    found_in_steps: bool,
    found_at: Instant,
    has_passed_since_fold: bool,
    /// Some of them are to be written in another layout, or elsewhere; those for which that is needed most come first.
    recodes: Option<Need>,
    /// The last pass moved what leaves the first tier.
    rotated: bool,
    searched_at: Instant,
    search: Option<Search>,
    /// When the look-up for what lives goes on.
    slice_at: Option<Instant>,
    /// Emptied already; freed with the next checkpoint, or when a fold has told that they are empty.
    emptied: BTreeSet<SegmentNo>,
    /// Moved since the last checkpoint: so much more is taken until that frees what was emptied.
    owed_bytes: u64,
    /// Segments that could not be read, and when to try again: shards may have been lost that are re-created since.
    unreadable: Unreadable,
}

impl Cleaner {
    pub(crate) fn is_idle(&self) -> bool {
        self.pass.is_none()
    }

    /// Nothing is being looked for either, and what was found is cleaned.
    pub(crate) fn is_at_rest(&self) -> bool {
        self.pass.is_none() && self.search.is_none() && self.found.is_empty()
    }

    /// Whether the pass that is under way reads it.
    pub(crate) fn is_victim(&self, no: SegmentNo) -> bool {
        self.pass.as_ref().is_some_and(|pass| pass.victims.iter().any(|victim| victim.no == no))
    }

    pub(crate) fn is_emptied(&self, no: SegmentNo) -> bool {
        self.emptied.contains(&no)
    }

    pub(crate) fn is_unreadable(&self, no: SegmentNo) -> bool {
        self.unreadable.contains_key(&no)
    }

    /// Asserts what must hold between events (tests and the simulator).
    pub(crate) fn verify(&self) {
        let Some(pass) = &self.pass else { return assert!(self.slice_at.is_none(), "a slice is of a pass") };
        let has_what_for = !pass.victims.is_empty() || pass.is_walk();
        assert!(pass.id < self.next_id && has_what_for, "a pass has a number of its own, and victims");
        assert!(pass.pending <= READS_AHEAD.max(pass.victims.len()), "{} are asked for at a time", pass.pending);
    }

    /// What was emptied is about to be freed.
    pub(crate) fn on_condemning(&mut self) {
        self.owed_bytes = 0;
    }

    /// The base has changed: what it names is counted anew. What took several steps to find stays worth its while: were
    /// it given up, a large volume that is short of room would have one pass for each search.
    pub(crate) fn on_folded(&mut self) {
        self.emptied.clear();
        self.has_passed_since_fold = false;
        if !self.found_in_steps {
            self.found.clear();
        }
    }

    /// Some segments are others' now, or are named by others: what is dead in them stays.
    pub(crate) fn on_kept(&mut self) {
        self.search = None;
        self.found.clear();
    }

    /// Bytes that were moved since the last checkpoint.
    pub(crate) fn owed_bytes(&self) -> u64 {
        self.owed_bytes
    }

    pub(crate) fn has_passed_since_fold(&self) -> bool {
        self.has_passed_since_fold
    }

    /// The last pass moved what leaves the first tier.
    pub(crate) fn has_rotated(&self) -> bool {
        self.rotated
    }

    // ---- what is cleaned ----

    /// Room is short, or much is to be written anew.
    fn is_pressed(&self, room: &Room) -> bool {
        room.is_wanted() || self.recodes.is_some()
    }

    /// The next step of a search is not put off to the next tick. What nobody waits for takes two steps a second: on a
    /// volume of terabytes a host would search without end.
    pub(crate) fn hurries_search(&self, room: &Room) -> bool {
        self.search.is_some() && self.is_pressed(room)
    }

    /// What is mostly dead, or is to be written anew.
    pub(crate) fn take_dead(&mut self, around: &mut Around<'_>, repairer: &Repairer) -> Vec<SegmentNo> {
        let is_short = around.room.is_wanted();
        let is_pressed = self.is_pressed(around.room);
        let is_fresh = around.basis.now.since(self.found_at) < FOUND_FOR && self.found_in_steps;
        let takes_found = !self.found.is_empty() && (is_pressed || is_fresh);
        let pace = match (is_pressed, takes_found || self.search.is_some()) {
            (false, _) => SEARCH_EVERY_CALM,
            (true, false) => SEARCH_EVERY,
            (true, true) => Duration::ZERO,
        };
        if around.basis.now.since(self.searched_at) < pace {
            return Vec::new();
        }
        if pace > Duration::ZERO {
            self.searched_at = around.basis.now;
        }
        if !takes_found {
            if !self.search_victims(around, repairer) {
                return Vec::new();
            }
            if self.found_in_steps && self.found.is_empty() {
                // A walk over all that found nothing is not begun again at once.
                self.searched_at = around.basis.now + SEARCH_EVERY_CALM;
            }
            // Of leaves that are not in memory, what is dead is known only when they are folded. Not before the last
            // step: a fold that begins puts off whatever is cleaned.
            let is_shadowed = !around.map.knows_all_shadowed() || !around.room.is_left() && around.map.is_unfolded();
            around.wants.fold |= is_short && is_shadowed;
        } else {
            // Begun when there was more room.
            self.search = None;
        }
        if !is_short && self.recodes.is_some_and(|need| !repairer.may_move_data(around, need)) {
            return Vec::new();
        }
        self.take_victims(around)
    }

    /// Looks for the segments that are best cleaned, in the order of what a pass gains for what it costs, and of age:
    /// what has not changed for long stays as it is when it is moved (cost-benefit: Rosenblum and Ousterhout, The
    /// Design and Implementation of a Log-Structured File System, 1992, section 3.5). In steps; true with the last one.
    fn search_victims(&mut self, around: &Around<'_>, repairer: &Repairer) -> bool {
        let now = around.basis.now;
        self.unreadable.retain(|_, until| *until > now);
        let may_return = around.basis.root().tiers != Tiers::default() && around.topology().capacity_takes_a_segment();
        let may_spread = around.topology().layout_now() == Some(around.basis.root().layout);
        let threshold = dead_threshold(around);
        let in_steps = self.search.is_some();
        let mut search = self.search.take().unwrap_or_default();
        let count = around.segments.totals().data_segments;
        let mut ahead = around.segments.iter_from(search.next);
        for (no, info) in ahead.by_ref().take(around.basis.config.search_step).filter(|(_, s)| s.kind == Kind::Data) {
            search.rank += 1;
            let left_alone = self.is_unreadable(no) || self.is_emptied(no);
            if !info.is_visible() || left_alone {
                continue;
            }
            let is_crowded = may_spread && around.topology().is_crowded_foreign(no, info);
            if no.epoch >= STORE_EPOCHS && around.basis.is_foreign(no) {
                let returns = is_crowded || around.topology().wants_recode(&info.geometry);
                search.of_store.extend(Some(no).filter(|_| returns && search.of_store.len() < OF_STORE_MAX));
                continue;
            }
            let must_move = is_drained_by_cleaning(around.topology(), info) || repairer.is_stuck(no);
            let recode = must_move
                || around.topology().wants_recode(&info.geometry)
                || may_return && around.topology().is_astray(info)
                || is_crowded;
            if recode || info.dead() * 1000 >= threshold * info.capacity() {
                // Segments are in the order in which they were begun.
                let age = (count + 1).saturating_sub(search.rank);
                let benefit = info.dead() * age * 1000 / (info.capacity() + info.visible().size);
                let recode = recode.then(|| repairer.need_of(around, no, None));
                search.candidates.push((recode, benefit, no, info.visible().size));
            }
        }
        let next = ahead.next().map(|(no, _)| no);
        drop(ahead);
        // Each has a block that lives, at least: more than so many don't fit, unless most of that is packed.
        let payload_bytes = PASSES_FOUND * u64::from(around.basis.config.segment_payload_bytes);
        let (count_max, room) = ((payload_bytes / BLOCK_BYTES as u64) as usize, granules_of(payload_bytes));
        if search.candidates.len() > 2 * count_max || next.is_none() {
            self.keep_best(around, &mut search.candidates, count_max);
        }
        if let Some(next) = next {
            search.next = next;
            self.search = Some(search);
            return false;
        }
        (self.found_in_steps, self.found_at) = (in_steps, now);
        self.of_store = search.of_store;
        self.choose(search.candidates, room);
        true
    }

    /// Of candidates that are still to be cleaned, so many that gain most.
    fn keep_best(&self, around: &Around<'_>, candidates: &mut Vec<(Option<Need>, u64, SegmentNo, u64)>, count: usize) {
        candidates.retain(|(_, _, no, _)| {
            let left_alone = self.is_unreadable(*no) || self.is_emptied(*no);
            !left_alone && around.segments.get(*no).is_some_and(SegmentInfo::is_visible)
        });
        if candidates.len() > count {
            candidates.select_nth_unstable_by(count, |a, b| b.cmp(a));
            candidates.truncate(count);
        }
    }

    fn choose(&mut self, mut candidates: Vec<(Option<Need>, u64, SegmentNo, u64)>, room: u64) {
        candidates.sort_unstable_by(|a, b| b.cmp(a));
        let mut total = 0;
        self.found.clear();
        self.recodes = candidates.first().and_then(|(recode, ..)| *recode);
        for (_, _, no, live) in candidates {
            total += live;
            self.found.push_back(no);
            if total >= room {
                break;
            }
        }
    }

    /// The next victims: what lives in them fills one segment, half of it at least with data of about one age.
    fn take_victims(&mut self, around: &Around<'_>) -> Vec<SegmentNo> {
        let payload_bytes = u64::from(around.basis.config.segment_payload_bytes);
        let (room, blocks_max) = (granules_of(payload_bytes), blocks_max(payload_bytes));
        let mut total = Named::NOTHING;
        let mut victims = Vec::new();
        // Some may have died and been freed since.
        self.found.retain(|no| around.segments.get(*no).is_some_and(SegmentInfo::is_visible));
        let class_of = |no: &SegmentNo| around.segments.get(*no).map_or(0, |info| around.map.heat_class(info.born));
        let Some(class) = self.found.front().map(class_of) else { return victims };
        let (mut ordered, others): (Vec<SegmentNo>, Vec<SegmentNo>) =
            self.found.iter().partition(|no| class_of(no) == class);
        self.sort_by_nearness(around, &mut ordered);
        let alike: u64 = ordered.iter().filter_map(|no| Some(around.segments.get(*no)?.visible().size)).sum();
        if alike < room / 2 {
            ordered.extend(others);
        }
        for no in ordered {
            let live = around.segments.get(no).map_or(Named::NOTHING, SegmentInfo::visible);
            let is_full = total.size + live.size > room || total.blocks + live.blocks > blocks_max;
            if is_full && !victims.is_empty() || victims.len() >= VICTIMS_MAX {
                break;
            }
            total += live;
            victims.push(no);
        }
        self.found.retain(|no| !victims.contains(no));
        victims
    }

    /// Puts the ones first that lie near to the first one, so that what they hold lies close together when it is moved
    /// ([`crate::io::read_ahead`]). Where not all that was found is going to be cleaned, of so many passes' worth that
    /// are best.
    fn sort_by_nearness(&self, around: &Around<'_>, ordered: &mut [SegmentNo]) {
        if self.recodes.is_some() {
            // Some of them have to go first.
            return;
        }
        let passes = if around.room.is_wanted() { PASSES_FOUND } else { PASSES_NEAR_CALM };
        let mut left = granules_of(passes * u64::from(around.basis.config.segment_payload_bytes));
        let live_of = |no: &SegmentNo| around.segments.get(*no).map_or(0, |info| info.visible().size);
        let best = ordered.iter().take_while(|no| {
            let fits = left > 0;
            left = left.saturating_sub(live_of(no));
            fits
        });
        let count = best.count();
        let middle_of = |no: &SegmentNo| around.segments.get(*no).map_or(0, |info| info.middle);
        if let Some(near) = ordered.first().map(middle_of) {
            ordered[..count].sort_by_key(|no| middle_of(no).abs_diff(near));
        }
    }

    // ---- a pass ----

    /// Begins to clean these.
    pub(crate) fn begin_pass(&mut self, around: &mut Around<'_>, victims: Vec<SegmentNo>, aim: Aim, out: Out) {
        self.rotated = aim == Aim::Rotation;
        let (id, count) = (self.next_id, victims.len());
        self.make_pass(victims, aim);
        for at in 0..count {
            self.ask_header(around, id, at, out);
        }
    }

    /// Begins a walk over what the next leaves name of a store: of these segments, or of all. A member copies it back; a store
    /// forgets by it what has no index any more that can be read.
    pub(crate) fn begin_walk(
        &mut self,
        around: &mut Around<'_>,
        only: Option<BTreeSet<SegmentNo>>,
        aim: Aim,
    ) -> Returned {
        let (now, config) = (around.basis.now, &around.basis.config);
        if now < self.returns_at {
            return Returned::Rests;
        }
        self.unreadable.retain(|_, until| *until > now);
        let ahead = around.map.directory().iter_from(self.next_to_return).take(LEAVES_AHEAD);
        let leaves: VecDeque<LeafNo> = ahead.map(|(no, _)| no).collect();
        if leaves.is_empty() {
            (self.next_to_return, self.returns_at) = (LeafNo::default(), now + config.repack_every);
            // What no leaf says yet the next round finds.
            around.wants.fold = true;
            return Returned::All;
        }
        let blocks_left = u64::from(config.segment_payload_bytes) / BLOCK_BYTES as u64;
        self.returned_from = self.next_to_return;
        self.make_pass(Vec::new(), aim);
        let pass = self.pass.as_mut().expect("just made");
        (pass.leaves, pass.blocks_left, pass.only) = (leaves, blocks_left, only);
        Returned::Begun
    }

    /// What of a store was found that is to be copied back, once.
    pub(crate) fn take_of_store(&mut self) -> Vec<SegmentNo> {
        std::mem::take(&mut self.of_store)
    }

    /// The next walk begins at once, and with the first leaf.
    pub(crate) fn return_from_start(&mut self) {
        (self.next_to_return, self.returns_at) = (LeafNo::default(), Instant::ZERO);
    }

    fn make_pass(&mut self, victims: Vec<SegmentNo>, aim: Aim) {
        self.has_passed_since_fold |= aim.writes();
        let id = self.next_id;
        self.next_id += 1;
        let count = victims.len();
        self.pass = Some(Pass {
            id,
            victims: victims.into_iter().map(|no| Victim { no, tried: 0, asked_at: None, index: None }).collect(),
            pins: Pins::default(),
            leaves_pending: BTreeSet::new(),
            at: At::default(),
            missing_at: None,
            missing: BTreeSet::new(),
            moves: Vec::new(),
            parts: Vec::new(),
            unread: VecDeque::new(),
            pending: count,
            failed: false,
            unreadable: BTreeSet::new(),
            aim,
            leaves: VecDeque::new(),
            blocks_left: 0,
            only: None,
        });
    }

    /// Asks for a victim's index, of the next shard that has it.
    pub(crate) fn ask_header(&mut self, around: &mut Around<'_>, id: u64, at: usize, out: Out) {
        let Some(pass) = self.pass(id) else { return };
        let (no, tried) = (pass.victims[at].no, pass.victims[at].tried);
        let Some(info) = around.segments.get(no) else { return self.give_up_pass(around) };
        let next = (tried..info.geometry.shard_count()).find(|i| around.peers.leg_usable(info.homes[usize::from(*i)]));
        let Some(index) = next else { return self.give_up_pass(around) };
        let leg = info.homes[usize::from(index)];
        let victim = &mut self.pass.as_mut().expect("checked").victims[at];
        (victim.tried, victim.asked_at) = (index + 1, Some(leg));
        let shard = around.shard_id(no, index);
        let request = Request::ReadShardHeader { device: leg.device, shard };
        let purpose = Purpose::Header { cleaner: id, victim: at };
        if around.send_bulk(leg.node, purpose, request, Vec::new(), out).is_none() {
            self.give_up_pass(around);
        }
    }

    fn pass(&self, id: u64) -> Option<&Pass> {
        self.pass.as_ref().filter(|p| p.id == id)
    }

    pub(crate) fn on_header(
        &mut self,
        around: &Around<'_>,
        id: u64,
        at: usize,
        reply: &Reply,
        payload: &Buf,
    ) -> Header {
        let Some(pass) = self.pass(id) else { return Header::Nothing };
        let victim = &pass.victims[at];
        let (no, index) = (victim.no, victim.tried - 1);
        let shard = around.shard_id(no, index);
        let header = match reply {
            Reply::ShardHeader => ShardHeader::decode(shard, payload).ok(),
            _ => None,
        };
        let Some(ShardHeader { index: SegmentIndex::Data(extents), packed, .. }) = header else {
            let home = around.segments.get(no).map(|info| info.homes[usize::from(index)]);
            // One that was moved meanwhile need not be there any more.
            return Header::Unreadable((home == victim.asked_at).then_some((no, index)));
        };
        let pass = self.pass.as_mut().expect("checked");
        pass.victims[at].index = Some(Index { extents, lengths: packed.map(|packed| packed.lengths) });
        pass.pending -= 1;
        match pass.aim {
            _ if pass.pending > 0 => Header::Nothing,
            Aim::Packing(codec) if !pass.is_worth_packing_by(codec) => Header::NotWorth(codec),
            _ => Header::All,
        }
    }

    /// Looks up which of the victims' blocks the map still names, to the end of the extent with which `runs` come to
    /// `runs_max`.
    pub(crate) fn find_live(&mut self, map: &mut Map, runs_max: usize, runs: &mut usize) -> Looked {
        let pass = self.pass.as_mut().expect("a pass under way");
        if pass.is_walk() {
            return self.find_foreign(map, runs_max, runs);
        }
        while pass.at.victim < pass.victims.len() && pass.missing.len() < LEAVES_AHEAD {
            if *runs >= runs_max {
                return Looked::On;
            }
            *runs += 1 + pass.look_up(map);
        }
        if let Some(at) = pass.missing_at.take() {
            pass.at = at;
            pass.moves.truncate(at.moves);
            pass.leaves_pending = std::mem::take(&mut pass.missing);
            return Looked::Needs(pass.leaves_pending.iter().copied().collect());
        }
        Looked::All
    }

    fn find_foreign(&mut self, map: &mut Map, runs_max: usize, runs: &mut usize) -> Looked {
        let pass = self.pass.as_mut().expect("a pass under way");
        while let Some(leaf) = pass.leaves.front().copied().filter(|_| pass.blocks_left > 0) {
            // Where not all fitted, the next pass goes on.
            self.next_to_return = leaf;
            if *runs >= runs_max {
                return Looked::On;
            }
            if !pass.look_for_foreign(map, &self.unreadable, runs) {
                return Looked::Needs(pass.leaves_pending.iter().copied().collect());
            }
            if pass.leaves.front() != Some(&leaf) {
                self.next_to_return = LeafNo(leaf.0 + 1);
            }
        }
        Looked::All
    }

    /// When the next slice is due.
    pub(crate) fn slice_deadline(&self) -> Option<Instant> {
        self.slice_at
    }

    pub(crate) fn slice_by(&mut self, at: Option<Instant>) {
        self.slice_at = at;
    }

    /// True when all leaves are there: then the look-up goes on where the first of them was missing.
    pub(crate) fn on_leaf(&mut self, around: &mut Around<'_>, no: LeafNo, leaf: Result<Arc<Leaf>, FetchError>) -> bool {
        let Some(pass) = &mut self.pass else { return false };
        if !pass.leaves_pending.remove(&no) {
            return false;
        }
        match leaf {
            Ok(leaf) => {
                let pointer = around.map.directory().get(no).expect("a leaf that was just read is in the directory");
                pass.pins.hold(no, pointer, leaf);
            }
            Err(error) => pass.failed |= error == FetchError::Lost,
        }
        if !pass.leaves_pending.is_empty() {
            return false;
        }
        let failed = pass.failed;
        if failed {
            self.give_up_pass(around);
        }
        !failed
    }

    /// Everything that lives is known: it is cut into pieces that are read. Of nothing nothing is.
    pub(crate) fn begin_reading(&mut self, around: &mut Around<'_>, repairer: &Repairer) {
        let pass = self.pass.as_mut().expect("a pass under way");
        if pass.moves.is_empty() {
            let pass = self.pass.take().expect("just seen");
            // Dead already, only not folded yet: the next checkpoints find that out.
            around.wants.fold |= pass.aim != Aim::Return;
            self.emptied.extend(pass.victims.iter().map(|v| v.no));
            return;
        }
        // Blocks between units would each begin a block of the payload: cleaning would give back less than it takes.
        let is_moved = pass.aim != Aim::Print;
        pass.moves.sort_by_key(|m| (is_moved && m.is_raw(), m.key));
        for at in &pass.moves {
            let geometry = around.segments.get(at.segment).expect("a named segment is in the table").geometry;
            // Of what is damaged in several places, each block may be there, but not several at once.
            let apart = repairer.is_stuck(at.segment);
            let (parts, unread) = (&mut pass.parts, &mut pass.unread);
            let as_units = pass.aim.moves_units();
            cut(&geometry, &at.stored, &at.crcs, apart, |run, crcs, units| {
                let lengths = units.as_ref().filter(|_| as_units).map(|units| units.lengths().clone());
                unread.push_back(Unread { part: parts.len() as u32, run, crcs, units });
                parts.push(Part { segment: at.segment, lengths, bytes: None });
            });
        }
    }

    /// The next piece that is to be fetched, if not too many are.
    pub(crate) fn next_read(&mut self) -> Option<CleanRead> {
        let pass = self.pass.as_mut().filter(|pass| pass.pending < READS_AHEAD)?;
        let Unread { part, run, crcs, units } = pass.unread.pop_front()?;
        pass.pending += 1;
        let (segment, opened) = (pass.parts[part as usize].segment, !pass.aim.moves_units());
        Some(CleanRead { pass: pass.id, part, segment, run, crcs, units, opened })
    }

    /// A piece was read: what follows.
    pub(crate) fn on_part(
        &mut self,
        around: &mut Around<'_>,
        id: u64,
        part: u32,
        result: Result<Buf, FetchError>,
    ) -> Read {
        let Some(pass) = self.pass.as_mut().filter(|p| p.id == id) else { return Read::Nothing };
        pass.pending -= 1;
        let Part { segment, bytes, .. } = &mut pass.parts[part as usize];
        match result {
            Ok(read) => *bytes = Some(read),
            Err(_) => {
                pass.unreadable.insert(*segment);
                // The pass is given up as soon as what is under way has ended.
                pass.unread.clear();
            }
        }
        if !pass.unread.is_empty() {
            return Read::On;
        }
        if pass.pending > 0 {
            return Read::Nothing;
        }
        if !pass.unreadable.is_empty() {
            self.give_up_pass(around);
            return Read::Nothing;
        }
        if pass.aim == Aim::Print {
            let blocks = pass.parts.iter_mut().map(|part| part.bytes.take().expect("all parts are there")).collect();
            return Read::Seen(std::mem::take(&mut pass.moves), blocks);
        }
        Read::All(self.written())
    }

    /// All that lives, for a pass that reads nothing of it: what for.
    pub(crate) fn found_live(&mut self) -> Option<(Aim, Vec<LiveRun>)> {
        let pass = self.pass.as_mut().filter(|pass| !pass.aim.reads())?;
        pass.moves.sort_by_key(|m| m.key);
        Some((pass.aim, std::mem::take(&mut pass.moves)))
    }

    /// A pass that moves nothing is over.
    pub(crate) fn end_pass(&mut self, around: &mut Around<'_>) {
        self.slice_at = None;
        let victims = self.pass.take().map(|pass| pass.victims).unwrap_or_default();
        let is_seen = |victim: &Victim| around.segments.get(victim.no).is_some_and(SegmentInfo::is_visible);
        if !victims.iter().all(is_seen) {
            around.wants.free_dead();
        }
    }

    /// What the pass is for that is under way.
    pub(crate) fn aim(&self) -> Option<Aim> {
        self.pass.as_ref().map(|pass| pass.aim)
    }

    /// What lives, as a new segment.
    fn written(&mut self) -> Work {
        let pass = self.pass.as_mut().expect("a pass under way");
        let (kind, as_units) = (JobKind::Clean { aim: pass.aim }, pass.aim.moves_units());
        let mut work = Work::new(kind);
        for at in &pass.moves {
            work.crcs.extend_from_slice(at.crcs.as_slice());
            if as_units {
                work.extents.push(at.extent());
            } else {
                work.extents.extend(at.extents_apart());
            }
        }
        if !as_units {
            let stored_bytes: u64 = pass.moves.iter().map(LiveRun::stored_bytes).sum();
            work.worth_bytes = Some(stored_bytes - stored_bytes / WORTH_PART);
        }
        let read = |part: &mut Part| part.bytes.take().expect("all parts are there");
        if pass.parts.iter().all(|part| part.lengths.is_none()) {
            work.payload = pass.parts.iter_mut().map(read).collect();
            return work;
        }
        let mut units = UnitWriter::default();
        for part in &mut pass.parts {
            let bytes = read(part);
            match &part.lengths {
                Some(lengths) => units.push_all(lengths, &bytes),
                None => units.push_blocks(&bytes),
            }
        }
        work.packed = Some(units.finish());
        work
    }

    /// So many blocks of the victims are elsewhere now, where they take so many bytes. The victims, where they have left
    /// the first tier.
    pub(crate) fn on_cleaned(&mut self, around: &mut Around<'_>, blocks: u64, bytes: u64) -> Cleaned {
        let pass = self.pass.take().expect("a pass was written");
        if pass.aim != Aim::Return {
            self.emptied.extend(pass.victims.iter().map(|v| v.no));
        }
        around.counters.segments_cleaned += pass.victims.len() as u64;
        let cleaned_bytes = blocks * BLOCK_BYTES as u64;
        around.counters.cleaned_bytes += cleaned_bytes;
        around.counters.repacked_bytes += if pass.aim.moves_units() { 0 } else { cleaned_bytes };
        self.owed_bytes += bytes;
        let need = if pass.aim == Aim::Room { self.recodes } else { Some(Need::Choice) };
        if let Some(need) = need {
            around.charge_moved(bytes, need);
        }
        around.wants.free = true;
        around.wants.fold |= !around.map.knows_all_shadowed();
        Cleaned {
            rotated: (pass.aim == Aim::Rotation).then(|| pass.victims.iter().map(|v| v.no).collect()),
            is_smaller: matches!(pass.aim, Aim::Packing(_)),
            // The next is not put off to the next tick.
            goes_on: pass.aim != Aim::Room || self.recodes.is_some() && !self.found.is_empty(),
        }
    }

    /// No room for what lives: the victims stay as they are, and folds look for dead segments first.
    pub(crate) fn on_refused(&mut self, around: &mut Around<'_>) {
        self.give_up_pass(around);
        self.found.clear();
        self.search = None;
        self.searched_at = around.basis.now + REFUSED_PAUSE;
        around.wants.fold = true;
    }

    /// The victims stay as they are, since they would take as much elsewhere: these.
    pub(crate) fn on_not_worth(&mut self, around: &mut Around<'_>) -> Vec<SegmentNo> {
        let victims = self.pass.iter().flat_map(|pass| &pass.victims).map(|victim| victim.no).collect();
        let read_bytes: u64 = self.pass.iter().flat_map(|pass| &pass.moves).map(LiveRun::stored_bytes).sum();
        around.charge_moved(read_bytes, Need::Choice);
        self.give_up_pass(around);
        victims
    }

    fn give_up_pass(&mut self, around: &mut Around<'_>) {
        let until = around.basis.now + UNREADABLE_PAUSE;
        self.slice_at = None;
        let mut unreadable = BTreeSet::new();
        if let Some(pass) = self.pass.take() {
            match pass.aim {
                // Once more, without those.
                Aim::Return if !pass.unreadable.is_empty() => self.next_to_return = self.returned_from,
                _ if pass.is_walk() => self.returns_at = around.basis.now + REFUSED_PAUSE,
                _ => {}
            }
            // Whoever only looks would look at the same at once.
            let looked_at = pass.victims.iter().map(|victim| victim.no).filter(|_| !pass.aim.writes());
            unreadable = pass.unreadable.into_iter().chain(looked_at.collect::<Vec<_>>()).collect();
        }
        // Victims that died meanwhile were kept for the pass.
        around.wants.free_dead();
        self.unreadable.extend(unreadable.into_iter().map(|no| (no, until)));
    }
}

/// Blocks of the volume that a segment of so many bytes may hold.
pub(crate) fn blocks_max(payload_bytes: u64) -> u64 {
    UNITS_A_PAYLOAD * (payload_bytes / BLOCK_BYTES as u64)
}

/// Dead share from which a segment is worth cleaning. While room is short, segments with more that is dead than the
/// average: there always are some.
fn dead_threshold(around: &Around<'_>) -> u64 {
    if around.room.is_wanted() {
        return around.segments.dead_per_mille().max(DEAD_PER_MILLE_MIN);
    }
    u64::from(around.basis.config.clean_dead_per_mille).min(around.room.per_mille().max(450))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::care::tests::Rig;
    use crate::map::tests::TestMap;
    use crate::peers::tests::{leg, sent};
    use crate::segment::Segments;
    use crate::segment::tests::{info, no};
    use holdfast_base::{Lsn, ShardId, Token};
    use holdfast_format::packing::{BLOCK_GRANULES, Codec, GRANULE_BYTES};
    use std::num::NonZeroU32;

    const BLOCKS: u32 = (4 << 20) / BLOCK_BYTES as u32;

    /// Of two segments one is mostly dead: of its first blocks a hundred live.
    fn rig() -> Rig {
        let mut rig = Rig::new("mirror:2", &[1, 1, 1]);
        let mut kept = TestMap::new();
        for (counter, first, live) in [(1, 0, 100), (2, 5000, 1000)] {
            kept.segments.insert(no(1, counter), info(BLOCKS, 0, &[leg(1, 0), leg(2, 0)]));
            kept.write(0, first, live, counter);
        }
        (rig.segments, rig.map) = (kept.segments, kept.map);
        rig
    }

    /// Begins a pass over what is mostly dead: the one victim, and the question for its index.
    fn begin(rig: &mut Rig, cleaner: &mut Cleaner) -> (u64, Token) {
        let repairer = Repairer::default();
        let victims = rig.with(|around, _| cleaner.take_dead(around, &repairer));
        assert_eq!(victims, [no(1, 1)]);
        rig.with(|around, out| cleaner.begin_pass(around, victims, Aim::Room, out));
        cleaner.verify();
        let asked = sent(&mut rig.out);
        let call = rig.peers.on_answer(rig.basis.now, asked[0].0, asked[0].1).expect("it is waited for");
        let Purpose::Header { cleaner: pass, victim: 0 } = call.purpose else { panic!("{call:?}") };
        (pass, asked[0].1)
    }

    fn header(rig: &Rig) -> Buf {
        let crcs = vec![0; BLOCKS as usize];
        let extent = CommitExtent { key: Key(0), blocks: BLOCKS, source: Source::Log(Lsn(1)) };
        let header = ShardHeader {
            grid: rig.basis.config.grid,
            shard: ShardId { segment: no(1, 1).of(rig.basis.volume()), index: 0 },
            geometry: rig.segments.get(no(1, 1)).expect("it is in the table").geometry,
            block_crcs: crcs.clone(),
            index: SegmentIndex::Data(vec![extent]),
            payload_crcs: crcs,
            sealed: false,
            packed: None,
        };
        Buf::copy_from(&header.encode())
    }

    #[test]
    fn what_lives_of_a_victim_is_read_and_written_and_names_where_it_was() {
        let (mut rig, mut cleaner) = (rig(), Cleaner::default());
        let (pass, _) = begin(&mut rig, &mut cleaner);
        let header = header(&rig);
        let answered = rig.with(|around, _| cleaner.on_header(around, pass, 0, &Reply::ShardHeader, &header));
        assert!(matches!(answered, Header::All));
        assert_eq!(cleaner.find_live(&mut rig.map, usize::MAX, &mut 0), Looked::All);
        rig.with(|around, _| cleaner.begin_reading(around, &Repairer::default()));
        let mut written = None;
        while let Some(read) = cleaner.next_read() {
            cleaner.verify();
            assert_eq!((read.pass, read.segment), (pass, no(1, 1)));
            let bytes = Ok(Buf::zeroes(read.run.1 as usize * BLOCK_BYTES));
            if let Read::All(work) = rig.with(|around, _| cleaner.on_part(around, pass, read.part, bytes)) {
                written = Some(work);
            }
        }
        let work = written.expect("all was read");
        let from: Vec<Source> = work.extents.iter().map(|extent| extent.source).collect();
        assert_eq!((from, work.crcs.len()), (vec![Source::Segment { segment: no(1, 1), block: 0 }], 100));
        let cleaned = rig.with(|around, _| cleaner.on_cleaned(around, 100, 100 * BLOCK_BYTES as u64));
        assert!(cleaned.rotated.is_none() && !cleaned.goes_on);
        assert!(cleaner.is_idle() && cleaner.is_emptied(no(1, 1)) && rig.wants.free);
        assert_eq!((cleaner.owed_bytes(), rig.counters.segments_cleaned), (100 * BLOCK_BYTES as u64, 1));
    }

    #[test]
    fn what_lives_is_looked_up_in_slices_and_goes_on_where_a_leaf_was_missing() {
        let looked = |runs_max: usize| {
            let mut kept = TestMap::new();
            kept.segments.insert(no(1, 1), info(BLOCKS, 0, &[leg(1, 0), leg(2, 0)]));
            let extent_of = |at: u64| CommitExtent { key: Key(at * 256), blocks: 1, source: Source::Log(Lsn(1)) };
            for at in 0..300 {
                let place = Place::plain(no(1, 1), at as u32, Crcs::new(vec![0]));
                kept.say(0, at * 256, 1, place);
            }
            kept.fold(2);
            for at in (0..300).step_by(3) {
                kept.say(0, at * 256, 1, Place::Zero);
            }
            let gone: BTreeMap<LeafNo, _> = (0..150).map(|no| (LeafNo(no), kept.evict(LeafNo(no)))).collect();
            let mut rig = rig();
            let mut cleaner = Cleaner::default();
            rig.segments = std::mem::take(&mut kept.segments);
            rig.with(|around, out| cleaner.begin_pass(around, vec![no(1, 1)], Aim::Room, out));
            let pass = cleaner.pass.as_mut().expect("it has begun");
            pass.victims[0].index = Some(Index { extents: (0..300).map(extent_of).collect(), lengths: None });
            let (mut slices, mut asked) = (0, Vec::new());
            rig.map = kept.map;
            loop {
                let mut runs = 0;
                let found = cleaner.find_live(&mut rig.map, runs_max, &mut runs);
                assert!(runs <= runs_max.saturating_add(1), "{runs} runs in a slice of {runs_max}");
                slices += 1;
                match found {
                    Looked::All => break,
                    Looked::On => {}
                    Looked::Needs(leaves) => {
                        asked.push(leaves.len());
                        for no in leaves {
                            let leaf = Ok(Arc::clone(&gone[&no]));
                            rig.with(|around, _| cleaner.on_leaf(around, no, leaf));
                        }
                    }
                }
            }
            let pass = cleaner.pass.as_ref().expect("it is under way");
            (slices, asked, pass.moves.iter().map(|at| (at.key, at.extent().source)).collect::<Vec<_>>())
        };
        let source = |at| Source::Segment { segment: no(1, 1), block: at as u32 };
        let expected: Vec<_> = (0..300).filter(|at| at % 3 > 0).map(|at| (at * 256, source(at))).collect();
        for (runs_max, slices) in [(usize::MAX, 3), (10, 50)] {
            let found = looked(runs_max);
            assert!(found.0 >= slices, "{} slices of {runs_max} runs", found.0);
            assert_eq!(found.1, [LEAVES_AHEAD, 150 - LEAVES_AHEAD], "no more leaves at a time, and each once");
            assert_eq!(found.2, expected);
        }
    }

    #[test]
    fn an_index_that_can_not_be_read_is_asked_of_the_next_shard_and_what_is_damaged_is_left_alone() {
        let (mut rig, mut cleaner) = (rig(), Cleaner::default());
        let (pass, _) = begin(&mut rig, &mut cleaner);
        let answered = rig.with(|around, _| cleaner.on_header(around, pass, 0, &Reply::Done, &Buf::empty()));
        assert!(matches!(answered, Header::Unreadable(Some((segment, 0))) if segment == no(1, 1)));
        rig.with(|around, out| cleaner.ask_header(around, pass, 0, out));
        assert_eq!(sent(&mut rig.out)[0].0, leg(2, 0).node);
        rig.with(|around, out| cleaner.ask_header(around, pass, 0, out));
        assert!(cleaner.is_idle() && rig.wants.free, "nobody else has it: the pass is given up");
    }

    #[test]
    fn what_can_not_be_read_of_a_store_keeps_nothing_else_from_being_copied_back() {
        let (mut rig, mut cleaner) = (rig(), Cleaner::default());
        let stores = |counter| SegmentNo { epoch: STORE_EPOCHS, counter };
        let mut kept = TestMap::new();
        for counter in [1, 2] {
            kept.segments.insert(stores(counter), info(BLOCKS, 0, &[leg(1, 0), leg(2, 0)]));
            kept.say(0, counter * 4096, 1, Place::plain(stores(counter), 0, Crcs::new(vec![0])));
        }
        kept.fold(2);
        (rig.segments, rig.map) = (kept.segments, kept.map);
        let copied = |rig: &mut Rig, cleaner: &mut Cleaner| {
            assert_eq!(rig.with(|around, _| cleaner.begin_walk(around, None, Aim::Return)), Returned::Begun);
            assert_eq!(cleaner.find_live(&mut rig.map, usize::MAX, &mut 0), Looked::All);
            rig.with(|around, _| cleaner.begin_reading(around, &Repairer::default()));
            let mut copied = Vec::new();
            while let Some(CleanRead { pass, part, segment, .. }) = cleaner.next_read() {
                let result = if segment == stores(1) { Err(FetchError::Lost) } else { Ok(Buf::zeroes(BLOCK_BYTES)) };
                if let Read::All(work) = rig.with(|around, _| cleaner.on_part(around, pass, part, result)) {
                    copied = work.extents.iter().map(|extent| extent.source).collect();
                }
            }
            copied
        };
        assert!(copied(&mut rig, &mut cleaner).is_empty() && cleaner.is_unreadable(stores(1)));
        assert_eq!(copied(&mut rig, &mut cleaner), [Source::Segment { segment: stores(2), block: 0 }]);
        rig.with(|around, _| cleaner.on_refused(around));
        let again = rig.with(|around, _| cleaner.begin_walk(around, None, Aim::Return));
        assert_eq!(again, Returned::Rests, "there is no room for it");
    }

    #[test]
    fn what_packs_well_is_moved_in_segments_of_no_more_blocks_than_they_may_hold() {
        let (mut rig, mut cleaner) = (rig(), Cleaner::default());
        rig.segments = Segments::default();
        for counter in 1..=20 {
            let live = Named { size: 300, blocks: 300 };
            let packed = SegmentInfo { live, units: NonZeroU32::new(4000), ..info(64, 0, &[leg(1, 0), leg(2, 0)]) };
            rig.segments.insert(no(1, counter), packed);
        }
        let victims = rig.with(|around, _| cleaner.take_dead(around, &Repairer::default()));
        assert_eq!(victims.len() as u64, blocks_max(4 << 20) / 300, "one more would be too many");
    }

    #[test]
    fn blocks_that_are_moved_with_units_do_not_lie_between_them() {
        let (mut rig, mut cleaner) = (rig(), Cleaner::default());
        rig.with(|around, out| cleaner.begin_pass(around, vec![no(1, 1), no(1, 2)], Aim::Room, out));
        let pass = cleaner.pass.as_mut().expect("it has begun");
        (pass.pending, pass.moves) = (0, Vec::new());
        let length = StoredLength::compressed(Codec::Lz4, 30);
        for at in 0..16_u32 {
            let packed = Stored::Packed { granule: at * 64, lengths: StoredLengths::new([length]) };
            for (key, counter, stored) in [(2 * at, 1, Stored::Plain { block: at }), (2 * at + 1, 2, packed)] {
                let crcs = Crcs::new(vec![key]);
                pass.moves.push(LiveRun { key: key.into(), segment: no(1, counter), stored, crcs });
            }
        }
        rig.with(|around, _| cleaner.begin_reading(around, &Repairer::default()));
        let mut written = None;
        while let Some(CleanRead { pass, part, run, units, .. }) = cleaner.next_read() {
            let granules = units.map_or(run.1 * BLOCK_GRANULES, |units| units.lengths().granules() as u32);
            let bytes = Ok(Buf::copy_from(&vec![7; granules as usize * GRANULE_BYTES]));
            if let Read::All(work) = rig.with(|around, _| cleaner.on_part(around, pass, part, bytes)) {
                written = Some(work);
            }
        }
        let work = written.expect("all was read");
        let payload = work.packed.expect("units go as they lie");
        let blocks = (16 * 30_usize).div_ceil(64) + 16;
        assert_eq!((payload.bytes.len(), payload.lengths.len()), (blocks * BLOCK_BYTES, 32));
        // Each is still said to come from where it was.
        for (extent, crc) in work.extents.iter().zip(&work.crcs) {
            let (at, key) = (*crc / 2, extent.key.0 as u32);
            let source = match key % 2 {
                0 => Source::Segment { segment: no(1, 1), block: at },
                _ => Source::Packed { segment: no(1, 2), granule: at * 64 },
            };
            assert_eq!((key, extent.source), (*crc, source));
        }
    }

    #[test]
    fn a_search_of_several_steps_finds_what_one_step_would() {
        let (mut rig, mut cleaner) = (rig(), Cleaner::default());
        rig.basis.config.search_step = 1;
        let repairer = Repairer::default();
        assert!(rig.with(|around, _| cleaner.take_dead(around, &repairer)).is_empty());
        assert!(!cleaner.hurries_search(&rig.room), "nobody waits for it");
        rig.pass(SEARCH_EVERY_CALM);
        assert_eq!(rig.with(|around, _| cleaner.take_dead(around, &repairer)), [no(1, 1)]);
    }
}
