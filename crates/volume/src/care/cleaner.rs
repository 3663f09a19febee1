//! The cleaner: moves what still lives out of mostly dead segments, so that they can be freed whole; and re-codes
//! segments that were written in a narrower layout while nodes were away.
//!
//! States: idle -> headers (the victims' indexes are read) -> leaves (what lives is looked up) -> data (it is read) ->
//! writing (a new segment, whose commit names each block's old place as its source) -> idle.
//!
//! A fold never changes the base while the cleaner is at work (see `apply`).

use super::moves::is_drained_by_cleaning;
use crate::api::{Lane, State};
use crate::controller::{Controller, Out};
use crate::fetch::{FetchError, Recipient};
use crate::job::{JobKind, Work};
use crate::map::{Crcs, Leaf, LeafNo, LeafWaiter, Pins, Place};
use crate::peers::Purpose;
use crate::segment::{Kind, SegmentInfo};
use crate::space::{DEAD_PER_MILLE_MIN, Need, Topology, movable_payload_bytes};
use holdfast_base::{BLOCK_BYTES, Buf, Instant, Key, ShardId};
use holdfast_format::ledger::Leg;
use holdfast_format::record::{CommitExtent, SegmentNo, Source};
use holdfast_format::segment::{SegmentIndex, ShardHeader};
use holdfast_format::tier::Tiers;
use holdfast_format::wire::{Reply, Request};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// Victims of one pass.
const VICTIMS_MAX: usize = 16;

/// The table is searched for victims at most this often. While room is ample a step of a search, or a pass over what was
/// found, follows the other after this time.
const SEARCH_EVERY: Duration = Duration::from_millis(50);
const SEARCH_EVERY_CALM: Duration = Duration::from_millis(500);

/// While room is ample what was found in several steps is cleaned for so long; then it is looked anew what is best.
const FOUND_FOR: Duration = Duration::from_secs(10);

/// Payload of the candidates that one search finds, in segments: as many passes follow at once while room is short.
const PASSES_FOUND: u64 = 8;

/// While room is ample victims of one pass are chosen from so many passes' worth.
const PASSES_NEAR_CALM: u64 = 2;

/// Pieces that are read at a time. What was written at random is moved in a thousand of them: guests' requests wait behind these few.
const READS_AHEAD: usize = 32;

/// How long a segment that could not be read is left alone.
const UNREADABLE_PAUSE: Duration = Duration::from_secs(10);

/// After a pass for whose segment there was no room: time for a fold to free some.
const REFUSED_PAUSE: Duration = Duration::from_secs(1);

#[derive(Debug)]
struct Victim {
    no: SegmentNo,
    tried: u8,
    asked_at: Option<Leg>,
    index: Option<Vec<CommitExtent>>,
}

#[derive(Debug)]
struct Move {
    key: u64,
    segment: SegmentNo,
    block: u32,
    blocks: u32,
    crcs: Crcs,
}

/// A piece: which, the blocks in its segment from which on and how many, and their checksums.
#[derive(Debug)]
struct Unread {
    part: u32,
    run: (u32, u32),
    crcs: Crcs,
}

#[derive(Debug)]
struct Pass {
    id: u64,
    victims: Vec<Victim>,
    pins: Pins,
    leaves_pending: BTreeSet<LeafNo>,
    moves: Vec<Move>,
    /// The pieces to move, and the segments that they are read from.
    parts: Vec<(SegmentNo, Option<Buf>)>,
    /// What of them nobody has asked for yet.
    unread: VecDeque<Unread>,
    /// Headers, or pieces, that were asked for.
    pending: usize,
    failed: bool,
    unreadable: BTreeSet<SegmentNo>,
    /// Its victims leave the first tier.
    rotates: bool,
}

/// A search that is under way. Its candidates are hints: a step may find one that has died, or was cleaned, until the last.
#[derive(Debug, Default)]
struct Search {
    next: SegmentNo,
    /// Data segments before that one.
    rank: u64,
    /// How much it is to be written in another layout or elsewhere, if it is, what cleaning it gains, which, and its blocks that
    /// can be read.
    candidates: Vec<(Option<Need>, u64, SegmentNo, u64)>,
}

#[derive(Debug, Default)]
pub(crate) struct Cleaner {
    pass: Option<Pass>,
    next_id: u64,
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
    /// Emptied already; freed with the next checkpoint, or when a fold has told that they are empty.
    emptied: BTreeSet<SegmentNo>,
    /// Moved since the last checkpoint: so much more is taken until that frees what was emptied.
    owed_bytes: u64,
    /// Segments that could not be read, and when to try again: shards may have been lost that are re-created since.
    unreadable: BTreeMap<SegmentNo, Instant>,
}

impl Cleaner {
    pub(crate) fn is_idle(&self) -> bool {
        self.pass.is_none()
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
        let Some(pass) = &self.pass else { return };
        assert!(pass.id < self.next_id && !pass.victims.is_empty(), "a pass has a number of its own, and victims");
        assert!(pass.pending <= READS_AHEAD.max(pass.victims.len()), "{} are asked for at a time", pass.pending);
    }

    /// What was emptied is about to be freed.
    pub(crate) fn on_captured(&mut self) {
        self.owed_bytes = 0;
    }

    /// The base has changed: what it names is counted anew. What took several steps to find stays worth its while: were it
    /// given up, a large volume that is short of room would have one pass for each search.
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
}

impl Controller {
    pub(crate) fn drive_cleaner(&mut self, out: Out) {
        if self.state != State::Open || !self.care.cleaner.is_idle() || self.checkpointer.is_folding() {
            return;
        }
        let movable_bytes = movable_payload_bytes(self.topology());
        // Begun at half of it, the checkpoint is done before the cleaner has to wait.
        self.wants.hurry |= self.care.cleaner.owed_bytes > movable_bytes / 2;
        // Nor does a fold that the overlay needs find a pass under way.
        let lets_fold = self.wants.hurry && self.overlay_wants_fold();
        if self.care.cleaner.owed_bytes > movable_bytes || lets_fold {
            return;
        }
        if self.care.cleaner.has_passed_since_fold && self.fold_goes_first() {
            self.wants.fold = true;
            return;
        }
        // In turn, but where the first tier is about to overflow.
        let rotates_first = !self.care.cleaner.rotated || self.rotation.is_full(self.topology());
        for rotates in [rotates_first, !rotates_first] {
            let victims = if rotates { self.take_leaving() } else { self.take_dead() };
            if !victims.is_empty() {
                return self.begin_pass(victims, rotates, out);
            }
        }
    }

    /// The oldest segments of the first tier, if some are to leave it.
    fn take_leaving(&mut self) -> Vec<SegmentNo> {
        let (topology, segments) = (Topology::new(&self.basis, &self.peers), &self.segments);
        let cleaner = &self.care.cleaner;
        let there = || -> Vec<SegmentNo> {
            let found = self.survey.look(topology, segments);
            found.first().iter().copied().filter(|no| !cleaner.is_emptied(*no)).collect()
        };
        let placed = self.jobs.iter().filter_map(|(_, job)| job.placed_data());
        self.rotation.measure(topology, segments, there, placed);
        if self.room.is_wanted() || !self.rotation.is_due(topology, !self.guests_are_at_work()) || !self.may_rotate() {
            return Vec::new();
        }
        let (topology, segments) = (Topology::new(&self.basis, &self.peers), &self.segments);
        let blocks = u64::from(self.basis.config.segment_payload_bytes) / BLOCK_BYTES as u64;
        let readable = || {
            let mut found = there();
            found.retain(|no| !cleaner.is_unreadable(*no));
            found
        };
        self.rotation.take_oldest(topology, segments, blocks, VICTIMS_MAX, readable, |no| cleaner.is_emptied(no))
    }

    /// Whether guests bear that something leaves the first tier now.
    fn may_rotate(&self) -> bool {
        self.rotation.is_full(self.topology()) || self.may_move_data(Need::Choice)
    }

    /// Room is short, or much is to be written anew.
    fn is_cleaning_pressed(&self) -> bool {
        self.room.is_wanted() || self.care.cleaner.recodes.is_some()
    }

    /// The next step of a search is not put off to the next tick. What nobody waits for takes two steps a second: on a volume
    /// of terabytes a host would search without end.
    pub(crate) fn hurries_search(&self) -> bool {
        self.state == State::Open && self.care.cleaner.search.is_some() && self.is_cleaning_pressed()
    }

    /// What is mostly dead, or is to be written anew.
    fn take_dead(&mut self) -> Vec<SegmentNo> {
        let is_short = self.room.is_wanted();
        let is_pressed = self.is_cleaning_pressed();
        let is_fresh = self.basis.now.since(self.care.cleaner.found_at) < FOUND_FOR && self.care.cleaner.found_in_steps;
        let takes_found = !self.care.cleaner.found.is_empty() && (is_pressed || is_fresh);
        let pace = match (is_pressed, takes_found || self.care.cleaner.search.is_some()) {
            (false, _) => SEARCH_EVERY_CALM,
            (true, false) => SEARCH_EVERY,
            (true, true) => Duration::ZERO,
        };
        if self.basis.now.since(self.care.cleaner.searched_at) < pace {
            return Vec::new();
        }
        if pace > Duration::ZERO {
            self.care.cleaner.searched_at = self.basis.now;
        }
        if !takes_found {
            if !self.search_victims() {
                return Vec::new();
            }
            if self.care.cleaner.found_in_steps && self.care.cleaner.found.is_empty() {
                // A walk over all that found nothing is not begun again at once.
                self.care.cleaner.searched_at = self.basis.now + SEARCH_EVERY_CALM;
            }
            // Of leaves that are not in memory, what is dead is known only when they are folded. Not before the last step:
            // a fold that begins puts off whatever is cleaned.
            let is_hidden = !self.map.knows_all_hidden() || !self.room.is_left() && self.map.is_unfolded();
            self.wants.fold |= is_short && is_hidden;
        } else {
            // Begun when there was more room.
            self.care.cleaner.search = None;
        }
        if !is_short && self.care.cleaner.recodes.is_some_and(|need| !self.may_move_data(need)) {
            return Vec::new();
        }
        self.take_victims()
    }

    fn begin_pass(&mut self, victims: Vec<SegmentNo>, rotates: bool, out: Out) {
        self.care.cleaner.rotated = rotates;
        self.care.cleaner.has_passed_since_fold = true;
        let id = self.care.cleaner.next_id;
        self.care.cleaner.next_id += 1;
        let count = victims.len();
        self.care.cleaner.pass = Some(Pass {
            id,
            victims: victims.into_iter().map(|no| Victim { no, tried: 0, asked_at: None, index: None }).collect(),
            pins: Pins { generation: self.map.generation(), ..Pins::default() },
            leaves_pending: BTreeSet::new(),
            moves: Vec::new(),
            parts: Vec::new(),
            unread: VecDeque::new(),
            pending: count,
            failed: false,
            unreadable: BTreeSet::new(),
            rotates,
        });
        for at in 0..count {
            self.ask_header(id, at, out);
        }
    }

    /// Dead share from which a segment is worth cleaning. While room is short, segments with more that is dead than the
    /// average: there always are some.
    fn dead_threshold(&self) -> u64 {
        if self.room.is_wanted() {
            return self.segments.dead_per_mille().max(DEAD_PER_MILLE_MIN);
        }
        u64::from(self.basis.config.clean_dead_per_mille).min(self.room.per_mille().max(450))
    }

    /// Looks for the segments that are best cleaned, in the order of what a pass gains for what it costs, and of age: what
    /// has not changed for long stays as it is when it is moved (cost-benefit: Rosenblum and Ousterhout, The Design and
    /// Implementation of a Log-Structured File System, 1992, section 3.5). In steps; true with the last one.
    fn search_victims(&mut self) -> bool {
        let now = self.basis.now;
        self.care.cleaner.unreadable.retain(|_, until| *until > now);
        let may_return = self.root().tiers != Tiers::default() && self.topology().capacity_takes_a_segment();
        let may_spread = self.topology().layout_now() == Some(self.root().layout);
        let threshold = self.dead_threshold();
        let in_steps = self.care.cleaner.search.is_some();
        let mut search = self.care.cleaner.search.take().unwrap_or_default();
        let count = self.segments.totals().data_segments;
        let mut ahead = self.segments.iter_from(search.next);
        for (no, info) in ahead.by_ref().take(self.basis.config.search_step).filter(|(_, s)| s.kind == Kind::Data) {
            search.rank += 1;
            let left_alone = self.care.cleaner.is_unreadable(no) || self.care.cleaner.is_emptied(no);
            if info.visible() == 0 || left_alone {
                continue;
            }
            let must_move = is_drained_by_cleaning(self.topology(), info) || self.care.repairer.is_stuck(no);
            let recode = must_move
                || self.topology().wants_recode(&info.geometry)
                || may_return && self.topology().is_astray(info)
                || may_spread && self.topology().is_crowded_foreign(no, info);
            if recode || info.dead_blocks() * 1000 >= threshold * info.capacity_blocks() {
                // Segments are in the order in which they were begun.
                let age = (count + 1).saturating_sub(search.rank);
                let benefit = info.dead_blocks() * age * 1000 / (info.capacity_blocks() + info.visible());
                let recode = recode.then(|| self.need_of(no, None));
                search.candidates.push((recode, benefit, no, info.visible()));
            }
        }
        let next = ahead.next().map(|(no, _)| no);
        drop(ahead);
        // Each has a block that lives, at least: more than so many don't fit.
        let room = PASSES_FOUND * u64::from(self.basis.config.segment_payload_bytes) / BLOCK_BYTES as u64;
        if search.candidates.len() as u64 > 2 * room || next.is_none() {
            self.keep_best(&mut search.candidates, room as usize);
        }
        if let Some(next) = next {
            search.next = next;
            self.care.cleaner.search = Some(search);
            return false;
        }
        (self.care.cleaner.found_in_steps, self.care.cleaner.found_at) = (in_steps, now);
        self.choose(search.candidates, room);
        true
    }

    /// Of candidates that are still to be cleaned, so many that gain most.
    fn keep_best(&self, candidates: &mut Vec<(Option<Need>, u64, SegmentNo, u64)>, count: usize) {
        candidates.retain(|(_, _, no, _)| {
            let left_alone = self.care.cleaner.is_unreadable(*no) || self.care.cleaner.is_emptied(*no);
            !left_alone && self.segments.get(*no).is_some_and(|info| info.visible() > 0)
        });
        if candidates.len() > count {
            candidates.select_nth_unstable_by(count, |a, b| b.cmp(a));
            candidates.truncate(count);
        }
    }

    fn choose(&mut self, mut candidates: Vec<(Option<Need>, u64, SegmentNo, u64)>, room: u64) {
        candidates.sort_unstable_by(|a, b| b.cmp(a));
        let mut total = 0;
        self.care.cleaner.found.clear();
        self.care.cleaner.recodes = candidates.first().and_then(|(recode, ..)| *recode);
        for (_, _, no, live) in candidates {
            total += live;
            self.care.cleaner.found.push_back(no);
            if total >= room {
                break;
            }
        }
    }

    /// The next victims: what lives in them fills one segment, half of it at least with data of about one age.
    fn take_victims(&mut self) -> Vec<SegmentNo> {
        let room = u64::from(self.basis.config.segment_payload_bytes) / BLOCK_BYTES as u64;
        let mut total = 0;
        let mut victims = Vec::new();
        // Some may have died and been freed since.
        self.care.cleaner.found.retain(|no| self.segments.get(*no).is_some_and(|info| info.visible() > 0));
        let class_of = |no: &SegmentNo| self.segments.get(*no).map_or(0, |info| self.map.heat_class(info.born));
        let Some(class) = self.care.cleaner.found.front().map(class_of) else { return victims };
        let (mut ordered, others): (Vec<SegmentNo>, Vec<SegmentNo>) =
            self.care.cleaner.found.iter().partition(|no| class_of(no) == class);
        self.sort_by_nearness(&mut ordered);
        let alike: u64 = ordered.iter().filter_map(|no| Some(self.segments.get(*no)?.visible())).sum();
        if alike < room / 2 {
            ordered.extend(others);
        }
        for no in ordered {
            let live = self.segments.get(no).map_or(0, SegmentInfo::visible);
            let is_full = total + live > room && !victims.is_empty();
            if is_full || victims.len() >= VICTIMS_MAX {
                break;
            }
            total += live;
            victims.push(no);
        }
        self.care.cleaner.found.retain(|no| !victims.contains(no));
        victims
    }

    /// Puts the ones first that lie near to the first one, so that what they hold lies close together when it is moved
    /// ([`crate::readahead`]). Where not all that was found is going to be cleaned, of so many passes' worth that are best.
    fn sort_by_nearness(&self, ordered: &mut [SegmentNo]) {
        if self.care.cleaner.recodes.is_some() {
            // Some of them have to go first.
            return;
        }
        let passes = if self.room.is_wanted() { PASSES_FOUND } else { PASSES_NEAR_CALM };
        let mut left = passes * u64::from(self.basis.config.segment_payload_bytes) / BLOCK_BYTES as u64;
        let live_of = |no: &SegmentNo| self.segments.get(*no).map_or(0, SegmentInfo::visible);
        let best = ordered.iter().take_while(|no| {
            let fits = left > 0;
            left = left.saturating_sub(live_of(no));
            fits
        });
        let count = best.count();
        let middle_of = |no: &SegmentNo| self.segments.get(*no).map_or(0, |info| info.middle);
        if let Some(near) = ordered.first().map(middle_of) {
            ordered[..count].sort_by_key(|no| middle_of(no).abs_diff(near));
        }
    }

    fn ask_header(&mut self, id: u64, at: usize, out: Out) {
        let Some(pass) = self.pass(id) else { return };
        let (no, tried) = (pass.victims[at].no, pass.victims[at].tried);
        let Some(info) = self.segments.get(no) else { return self.give_up_pass() };
        let next = (tried..info.geometry.shard_count()).find(|i| self.peers.leg_usable(info.homes[usize::from(*i)]));
        let Some(index) = next else { return self.give_up_pass() };
        let leg = info.homes[usize::from(index)];
        let victim = &mut self.care.cleaner.pass.as_mut().expect("checked").victims[at];
        (victim.tried, victim.asked_at) = (index + 1, Some(leg));
        let shard = ShardId { segment: self.basis.segment_id(no), index };
        let request = Request::ReadShardHeader { device: leg.device, shard };
        let purpose = Purpose::Header { cleaner: id, victim: at };
        if self.send(leg.node, Lane::Bulk, purpose, request, Vec::new(), out).is_none() {
            self.give_up_pass();
        }
    }

    fn pass(&self, id: u64) -> Option<&Pass> {
        self.care.cleaner.pass.as_ref().filter(|p| p.id == id)
    }

    pub(crate) fn on_header(&mut self, id: u64, at: usize, reply: &Reply, payload: &Buf, out: Out) {
        let Some(pass) = self.pass(id) else { return };
        let (no, index) = (pass.victims[at].no, pass.victims[at].tried - 1);
        let shard = ShardId { segment: self.basis.segment_id(no), index };
        let header = match reply {
            Reply::ShardHeader => ShardHeader::decode(shard, payload).ok(),
            _ => None,
        };
        let Some(ShardHeader { index: SegmentIndex::Data(extents), .. }) = header else {
            let home = self.segments.get(no).map(|info| info.homes[usize::from(index)]);
            // One that was moved meanwhile need not be there any more.
            if home == self.pass(id).and_then(|pass| pass.victims[at].asked_at) {
                self.want_shard(no, index);
            }
            return self.ask_header(id, at, out);
        };
        let pass = self.care.cleaner.pass.as_mut().expect("checked");
        pass.victims[at].index = Some(extents);
        pass.pending -= 1;
        if pass.pending == 0 {
            self.find_live(out);
        }
    }

    pub(crate) fn on_header_lost(&mut self, id: u64, at: usize, out: Out) {
        self.ask_header(id, at, out);
    }

    /// Looks up which of the victims' blocks the map still names.
    fn find_live(&mut self, out: Out) {
        let mut pass = self.care.cleaner.pass.take().expect("a pass under way");
        let mut missing = BTreeSet::new();
        let mut moves = Vec::new();
        for victim in &pass.victims {
            let mut block = 0;
            for extent in victim.index.as_ref().expect("all headers are there") {
                match self.map.resolve_written(extent.key.0, u64::from(extent.blocks), &pass.pins) {
                    Ok(pieces) => {
                        for piece in pieces {
                            let offset = (Key(piece.start).lba().0 - extent.key.lba().0) as u32;
                            if let Some(Place::Segment { segment, block: at, crcs }) = piece.value
                                && segment == victim.no
                                && at == block + offset
                            {
                                let blocks = piece.len as u32;
                                moves.push(Move { key: piece.start, segment, block: at, blocks, crcs });
                            }
                        }
                    }
                    Err(leaves) => missing.extend(leaves),
                }
                block += extent.blocks;
            }
        }
        pass.leaves_pending = missing.clone();
        pass.moves = moves;
        self.care.cleaner.pass = Some(pass);
        if missing.is_empty() {
            return self.read_live(out);
        }
        for no in missing {
            self.load_leaf(no, LeafWaiter::Cleaner, out);
        }
    }

    pub(crate) fn on_cleaner_leaf(&mut self, no: LeafNo, leaf: Option<Arc<Leaf>>, error: Option<FetchError>, out: Out) {
        let Some(pass) = &mut self.care.cleaner.pass else { return };
        if !pass.leaves_pending.remove(&no) {
            return;
        }
        match leaf {
            Some(leaf) => {
                pass.pins.leaves.insert(no, leaf);
            }
            None => pass.failed |= error == Some(FetchError::Lost),
        }
        if pass.leaves_pending.is_empty() {
            if pass.failed {
                return self.give_up_pass();
            }
            self.find_live(out);
        }
    }

    fn read_live(&mut self, out: Out) {
        let pass = self.care.cleaner.pass.as_mut().expect("a pass under way");
        if pass.moves.is_empty() {
            // Dead already, only not folded yet: the next checkpoints find that out.
            self.wants.fold = true;
            let pass = self.care.cleaner.pass.take().expect("just seen");
            self.care.cleaner.emptied.extend(pass.victims.iter().map(|v| v.no));
            return;
        }
        pass.moves.sort_by_key(|m| m.key);
        for at in &pass.moves {
            let geometry = self.segments.get(at.segment).expect("a named segment is in the table").geometry;
            let mut done = 0;
            while done < at.blocks {
                // Of what is damaged in several places, each block may be there, but not several at once.
                let run_max =
                    if self.care.repairer.is_stuck(at.segment) { 1 } else { geometry.run_from(at.block + done) };
                let run = run_max.min(at.blocks - done);
                let crcs = at.crcs.slice(u64::from(done), u64::from(run));
                pass.unread.push_back(Unread { part: pass.parts.len() as u32, run: (at.block + done, run), crcs });
                pass.parts.push((at.segment, None));
                done += run;
            }
        }
        self.read_on(out);
    }

    fn read_on(&mut self, out: Out) {
        while let Some(pass) = self.care.cleaner.pass.as_mut().filter(|pass| pass.pending < READS_AHEAD) {
            let Some(Unread { part, run, crcs }) = pass.unread.pop_front() else { return };
            let segment = pass.parts[part as usize].0;
            pass.pending += 1;
            let wants = Recipient::Clean { job: pass.id, part };
            self.start_fetch(wants, segment, None, run, Some(crcs), out);
        }
    }

    pub(crate) fn on_clean_part(&mut self, id: u64, part: u32, result: Result<Buf, FetchError>, out: Out) {
        let Some(pass) = self.care.cleaner.pass.as_mut().filter(|p| p.id == id) else { return };
        pass.pending -= 1;
        let (segment, bytes) = &mut pass.parts[part as usize];
        match result {
            Ok(read) => *bytes = Some(read),
            Err(_) => {
                pass.unreadable.insert(*segment);
                // The pass is given up as soon as what is under way has ended.
                pass.unread.clear();
            }
        }
        if !pass.unread.is_empty() {
            return self.read_on(out);
        }
        if pass.pending > 0 {
            return;
        }
        if !pass.unreadable.is_empty() {
            return self.give_up_pass();
        }
        self.write_live(out);
    }

    fn write_live(&mut self, out: Out) {
        let pass = self.care.cleaner.pass.as_mut().expect("a pass under way");
        let kind = JobKind::Clean { rotates: pass.rotates };
        let mut work = Work { kind, extents: Vec::new(), payload: Vec::new(), crcs: Vec::new() };
        for at in &pass.moves {
            let source = Source::Segment { segment: at.segment, block: at.block };
            work.extents.push(CommitExtent { key: Key(at.key), blocks: at.blocks, source });
            work.crcs.extend_from_slice(at.crcs.as_slice());
        }
        work.payload = pass.parts.drain(..).map(|(_, p)| p.expect("all parts are there")).collect();
        self.start_job(work, out);
    }

    pub(crate) fn on_cleaned(&mut self, blocks: u64, out: Out) {
        let pass = self.care.cleaner.pass.take().expect("a pass was written");
        self.care.cleaner.emptied.extend(pass.victims.iter().map(|v| v.no));
        self.counters.segments_cleaned += pass.victims.len() as u64;
        self.counters.cleaned_bytes += blocks * BLOCK_BYTES as u64;
        self.care.cleaner.owed_bytes += blocks * BLOCK_BYTES as u64;
        let need = if pass.rotates { Some(Need::Choice) } else { self.care.cleaner.recodes };
        if let Some(need) = need {
            self.charge_moved(blocks * BLOCK_BYTES as u64, need);
        }
        if pass.rotates {
            let victims: Vec<SegmentNo> = pass.victims.iter().map(|v| v.no).collect();
            self.rotation.on_rotated(&self.segments, &victims, blocks * BLOCK_BYTES as u64);
        }
        self.wants.free = true;
        self.wants.fold |= !self.map.knows_all_hidden();
        if pass.rotates || self.care.cleaner.recodes.is_some() && !self.care.cleaner.found.is_empty() {
            // The next is not put off to the next tick.
            self.drive_cleaner(out);
        }
    }

    /// No room for what lives: the victims stay as they are, and folds look for dead segments first.
    pub(crate) fn on_clean_refused(&mut self) {
        self.give_up_pass();
        self.care.cleaner.found.clear();
        self.care.cleaner.search = None;
        self.care.cleaner.searched_at = self.basis.now + REFUSED_PAUSE;
        self.wants.fold = true;
    }

    fn give_up_pass(&mut self) {
        let until = self.basis.now + UNREADABLE_PAUSE;
        let unreadable = self.care.cleaner.pass.take().map(|pass| pass.unreadable).unwrap_or_default();
        // Victims that died meanwhile were kept for the pass.
        self.wants.free_dead();
        self.care.cleaner.unreadable.extend(unreadable.into_iter().map(|no| (no, until)));
    }
}
