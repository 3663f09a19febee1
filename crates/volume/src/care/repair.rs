//! Repair: what is missing or damaged is made again from the other shards, by its new node itself or by this host; what
//! is to be elsewhere is copied.
//!
//! States of a repair: reading (the header, and shards that suffice) -> putting | ordered (the target reads them by
//! itself) -> naming (where the shard is not where it was: a record in the log says so) -> done. One that fails waits a
//! while.
//!
//! Invariants (checked by [`Repairer::verify`]): (1) of a segment one shard is made at a time; (2) what is put is
//! remembered only while lists of shards are on their way.

use super::Around;
use super::inventory::Listing;
use super::moves::Move;
use crate::api::{Effect, Notice, Out};
use crate::basis::Basis;
use crate::log::window::Done;
use crate::peers::Purpose;
use crate::segment::{Kind, SegmentInfo, Segments};
use crate::space::{Found, Keep, Need, Shape, Target};
use holdfast_base::time::earliest;
use holdfast_base::{BLOCK_BYTES, Buf, BufMut, Instant, NodeId, ShardId, Slab, Token, block_crcs};
use holdfast_erasure::Code;
use holdfast_format::ledger::Leg;
use holdfast_format::record::{Record, SegmentNo};
use holdfast_format::segment::ShardHeader;
use holdfast_format::wire::{MAKE_MS, Refusal, Reply, Request, ShardSource};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::time::Duration;

/// Shards being made again at a time; fewer while guests are at work ([`Need::shards_beside_guests`]).
const REPAIRS_MAX: usize = 8;

/// Shards that are looked at, in one round, for one that is needed enough, and can be made again now.
const LOOKED_AT_MAX: usize = 64;

/// A repair that failed is tried again after a while, which doubles: what is lost for good is not read for ever. Where
/// one more loss would take data, and no damage has been found, not for as long.
const REPAIR_PAUSE_MIN: Duration = Duration::from_millis(200);
const REPAIR_PAUSE_MAX: Duration = Duration::from_secs(60);
const REPAIR_PAUSE_AT_RISK: Duration = Duration::from_secs(2);

/// How often segments are searched for shards of lost nodes.
const SEARCH_EVERY: Duration = Duration::from_secs(1);

/// A search ends when so many are found, half of them at most of segments that one more loss would take: what can't be
/// made again now is in nobody's way. The next one goes on from there.
const LISTED_MAX: usize = 1024;

/// Segments that a search looks at in each turn, though others have used it up.
const LOOKED_AT_LEAST: usize = 16;

/// How often the table is searched for the end of degradation.
const LOOK_EVERY: Duration = Duration::from_millis(50);

#[derive(Debug)]
struct Repair {
    segment: SegmentNo,
    index: u8,
    target: Leg,
    header: Option<ShardHeader>,
    /// Shards whose header was asked for, and the last of them.
    header_tried: u64,
    header_from: u8,
    got: BTreeMap<u8, Buf>,
    asked: u64,
    bad: u64,
    /// Of these, by their checksums.
    damaged: u64,
    /// The shard is where it belongs, and goes elsewhere.
    is_move: bool,
    /// The shard that may be there, damaged, has been deleted.
    cleared: bool,
    putting: bool,
    /// The target reads the others by itself; until it has refused to.
    by_target: bool,
}

/// Segments that lack something are gone through, slice by slice: those first that one more loss would take.
#[derive(Debug)]
struct Search {
    among: Among,
    /// It begins where the last one ended: what lies before that comes next.
    has_skipped: bool,
    /// Whether one more loss would take the segment, how many of its shards are lost, and one of these.
    found: Vec<(bool, usize, SegmentNo, u8)>,
    next_slice_at: Instant,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Among {
    AtRisk,
    Weak,
    Nothing,
}

impl Search {
    /// Whether enough is found for now.
    fn has_enough(&self) -> bool {
        let max = if self.among == Among::AtRisk { LISTED_MAX / 2 } else { LISTED_MAX };
        self.found.len() >= max
    }

    /// Goes on among the others when this was all, or enough.
    fn pass_on(&mut self, was_all: bool) {
        let has_enough = self.has_enough();
        self.among = match self.among {
            Among::AtRisk if was_all && !has_enough && std::mem::take(&mut self.has_skipped) => Among::AtRisk,
            Among::AtRisk if was_all || has_enough => Among::Weak,
            Among::Weak if was_all || has_enough => Among::Nothing,
            among => among,
        };
    }
}

/// What comes of a shard that was put.
#[derive(Debug)]
pub(crate) enum Made {
    Nothing,
    /// It lies where it belongs.
    InPlace,
    /// It lies elsewhere, and this record is to say so.
    Elsewhere(Record, Done),
}

#[derive(Debug)]
pub(crate) struct Repairer {
    queue: BTreeSet<(SegmentNo, u8)>,
    running: Slab<Repair>,
    /// Repairs that failed: not before when they are tried again, and how long they waited.
    pub(super) paused: BTreeMap<(SegmentNo, u8), (Instant, Duration)>,
    /// Shards to make again because their node has been away for long: next last.
    rebuild: Vec<(SegmentNo, u8)>,
    /// Many of them can't be made again now: when the next ones are tried.
    rebuild_goes_on_at: Option<Instant>,
    search: Option<Search>,
    /// Up to where they were looked for: among those that one more loss would take, and among all that lack something.
    searched_to: [Option<SegmentNo>; 2],
    searched_at: Instant,
    /// Segments of which too many shards are damaged, in whatever places, to make one again from whole ones. What they
    /// hold is moved, block by block, since of each block enough may be there.
    stuck: BTreeSet<SegmentNo>,
    /// Shards that may lie where a segment's final homes are not: (where, segment, index).
    pub(super) strays: BTreeSet<(Leg, SegmentNo, u8)>,
    pub(super) listing: BTreeMap<Leg, Listing>,
    /// When the next slice of what was listed is compared.
    pub(super) compare_at: Option<Instant>,
    /// Shards that were put while lists were on the way: those may lack them.
    pub(super) put_meanwhile: BTreeSet<(SegmentNo, u8)>,
    /// Something may be less redundant than it should be.
    degraded: bool,
    looked_at: Instant,
}

impl Default for Repairer {
    fn default() -> Repairer {
        Repairer {
            queue: BTreeSet::new(),
            running: Slab::new(REPAIRS_MAX),
            paused: BTreeMap::new(),
            rebuild: Vec::new(),
            rebuild_goes_on_at: None,
            search: None,
            searched_to: [None; 2],
            searched_at: Instant::ZERO,
            stuck: BTreeSet::new(),
            strays: BTreeSet::new(),
            listing: BTreeMap::new(),
            compare_at: None,
            put_meanwhile: BTreeSet::new(),
            degraded: false,
            looked_at: Instant::ZERO,
        }
    }
}

impl Repairer {
    pub(crate) fn note_degraded(&mut self) {
        self.degraded = true;
    }

    /// A node that was given a shard did not answer in time; it may write it yet.
    pub(crate) fn note_stray(&mut self, stray: (Leg, SegmentNo, u8)) {
        self.strays.insert(stray);
    }

    pub(crate) fn want(&mut self, segment: SegmentNo, index: u8) {
        self.queue.insert((segment, index));
        self.degraded = true;
    }

    /// Repairs come first.
    pub(crate) fn may_move(&self) -> bool {
        !self.running.is_full() && self.rebuild.is_empty()
    }

    pub(crate) fn has_few_at_work(&self, need: Need) -> bool {
        self.running.len() < need.shards_beside_guests()
    }

    /// The shard is missing or damaged where it lies.
    pub(crate) fn wants(&self, segment: SegmentNo, index: u8) -> bool {
        self.queue.contains(&(segment, index))
    }

    /// Nothing is to be made again, compared or deleted.
    pub(crate) fn is_at_rest(&self) -> bool {
        let has_none = self.queue.is_empty() && self.paused.is_empty() && self.rebuild.is_empty();
        let is_compared = self.strays.is_empty() && self.listing.is_empty();
        !self.is_at_work() && self.search.is_none() && has_none && is_compared && !self.degraded
    }

    pub(crate) fn is_at_work(&self) -> bool {
        !self.running.is_empty()
    }

    pub(crate) fn is_under_repair(&self, segment: SegmentNo) -> bool {
        self.running.iter().any(|(_, r)| r.segment == segment) || self.is_queued(segment)
    }

    pub(crate) fn is_repairing(&self, segment: SegmentNo, index: u8) -> bool {
        self.running.iter().any(|(_, r)| r.segment == segment && r.index == index)
    }

    pub(crate) fn is_stuck(&self, segment: SegmentNo) -> bool {
        self.stuck.contains(&segment)
    }

    pub(crate) fn forget(&mut self, segment: SegmentNo) {
        self.stuck.remove(&segment);
        while let Some(shard) = self.queue.range((segment, 0)..=(segment, u8::MAX)).next().copied() {
            self.queue.remove(&shard);
        }
        while let Some((shard, _)) = self.paused.range((segment, 0)..=(segment, u8::MAX)).next() {
            let shard = *shard;
            self.paused.remove(&shard);
        }
    }

    /// How much it is needed that the segment's data are moved, or its shard made again which is missing or damaged.
    pub(crate) fn need_of(&self, around: &Around<'_>, no: SegmentNo, shard: Option<u8>) -> Need {
        let Some(info) = around.segments.get(no) else { return Need::Choice };
        around.topology().need_of(info, |index| shard == Some(index) || self.wants(no, index))
    }

    /// Whether a shard may be made again, moved or re-coded now.
    pub(crate) fn may_move_data(&self, around: &Around<'_>, need: Need) -> bool {
        !around.guests_are_at_work || self.has_few_at_work(need) && around.governor.admits(around.basis.now, need)
    }

    /// Something is due that may be missing: what nodes hold is compared, what is wanted is made.
    pub(crate) fn drive(&mut self, around: &mut Around<'_>, out: Out) {
        self.take_inventories(around, out);
        self.go_on_comparing(around, out);
        self.delete_strays(around, out);
        self.start_repairs(around, out);
    }

    /// Whether to look now if redundancy is whole again.
    pub(crate) fn looks_for_end(&mut self, now: Instant) -> bool {
        // A list that is under way may lack something.
        let looks = self.degraded && self.listing.is_empty() && now.since(self.looked_at) >= LOOK_EVERY;
        if looks {
            self.looked_at = now;
        }
        looks
    }

    /// All is where it belongs again.
    pub(crate) fn on_restored(&mut self) {
        self.degraded = false;
    }

    /// Whether a shard of it is to be made again where it lies.
    pub(crate) fn makes_again(&self, segment: SegmentNo) -> bool {
        self.running.iter().any(|(_, r)| r.segment == segment && !r.is_move) || self.is_queued(segment)
    }

    fn is_queued(&self, segment: SegmentNo) -> bool {
        self.queue.range((segment, 0)..=(segment, u8::MAX)).next().is_some()
    }

    /// Segments with a shard on a device that is out or missing, or of a narrower layout than the volume's.
    pub(crate) fn degraded_segments(&self, found: &Found, basis: &Basis, segments: &Segments) -> u64 {
        let queued = self.queue.iter().map(|(no, _)| *no);
        let running = self.running.iter().filter(|(_, r)| !r.is_move).map(|(_, r)| r.segment);
        let is_there = |no: &SegmentNo| !basis.is_foreign(*no) && segments.get(*no).is_some();
        let wanted: BTreeSet<SegmentNo> = queued.chain(running).filter(is_there).collect();
        (found.weak().len() + wanted.difference(found.weak()).count()) as u64
    }

    /// A shard is not what it should be where it lies: told once until it is made again. While that happens it is gone
    /// for a moment, and is not wanted anew.
    pub(crate) fn on_damaged(
        &mut self,
        around: &mut Around<'_>,
        shard: (SegmentNo, u8),
        leg: Leg,
        may_repair: bool,
        out: Out,
    ) {
        let (segment, index) = shard;
        if self.queue.contains(&shard) || self.is_repairing(segment, index) {
            return;
        }
        around.counters.checksum_errors += 1;
        let id = around.shard_id(segment, index);
        out.push(Effect::Notice(Notice::ShardDamaged { leg, shard: id, repaired: may_repair }));
        if may_repair {
            self.want(segment, index);
        }
    }

    /// Asserts what must hold between events (tests and the simulator).
    pub(crate) fn verify(&self) {
        let running: BTreeSet<SegmentNo> = self.running.iter().map(|(_, r)| r.segment).collect();
        assert_eq!(running.len(), self.running.len(), "of a segment one shard is made at a time");
        assert!(!self.listing.is_empty() || self.put_meanwhile.is_empty(), "shards are remembered for lists under way");
    }

    // ---- making shards again ----

    /// Makes again what is needed most, as much as may be.
    pub(crate) fn start_repairs(&mut self, around: &mut Around<'_>, out: Out) {
        self.list_rebuild(around);
        self.start_queued(around, out);
        self.rebuild_goes_on_at = None;
        let mut refused = 0;
        while let Some((segment, index)) = self.rebuild.last().copied() {
            if refused == LOOKED_AT_MAX {
                self.rebuild_goes_on_at = Some(around.basis.next_slice_at());
                return;
            }
            let home = around.segments.get(segment).map(|info| info.homes[usize::from(index)]);
            let is_wanted = !self.wants(segment, index) && home.is_some_and(|home| self.is_given_up(around, home));
            // What is needed no more makes nothing wait that is.
            if is_wanted {
                let need = self.need_of(around, segment, Some(index));
                if self.running.is_full() || !self.may_move_data(around, need) {
                    return;
                }
            }
            self.rebuild.pop();
            refused += usize::from(is_wanted && !self.start_repair(around, segment, index, out));
        }
    }

    /// Those first that one more loss would take. Each is tried once a tick: one that can't be read now is queued again
    /// by itself.
    fn start_queued(&mut self, around: &mut Around<'_>, out: Out) {
        if self.running.is_full() || !self.may_move_data(around, Need::AtRisk) {
            return;
        }
        if self.queue.is_empty() {
            return;
        }
        let found = around.survey.look(around.topology(), around.segments);
        let at_risk = found.at_risk();
        let all_of = |no: &SegmentNo| self.queue.range((*no, 0)..=(*no, u8::MAX)).copied();
        // Either may be as large as the table.
        let mut waiting: Vec<(SegmentNo, u8)> = match at_risk.len() < self.queue.len() {
            true => at_risk.iter().flat_map(all_of).take(LOOKED_AT_MAX).collect(),
            false => {
                let queued = self.queue.iter().filter(|(no, _)| at_risk.contains(no));
                queued.take(LOOKED_AT_MAX).copied().collect()
            }
        };
        drop(found);
        waiting.extend(self.queue.iter().copied());
        let mut refused = 0;
        for (segment, index) in waiting {
            if self.running.is_full() || refused == LOOKED_AT_MAX {
                return;
            }
            let is_paused = self.paused.get(&(segment, index)).is_some_and(|(until, _)| *until > around.basis.now);
            if is_paused || !self.wants(segment, index) {
                continue;
            }
            if !self.may_move_data(around, self.need_of(around, segment, Some(index))) {
                refused += 1;
                continue;
            }
            self.queue.remove(&(segment, index));
            if !self.start_repair(around, segment, index, out) {
                self.queue.insert((segment, index));
            }
        }
    }

    /// The node has been away for so long that it is not waited for.
    fn is_lost(&self, around: &Around<'_>, id: NodeId) -> bool {
        let out_since = match around.peers.get(id) {
            Some(node) if node.is_usable() => return false,
            Some(node) => node.out_since().unwrap_or(around.basis.opened_at),
            None => around.basis.opened_at,
        };
        around.basis.now.since(out_since) >= around.basis.config.rebuild_after
    }

    /// What was there is made again elsewhere.
    fn is_given_up(&self, around: &Around<'_>, home: Leg) -> bool {
        self.is_lost(around, home.node) || around.peers.is_draining(home.device) && !around.peers.leg_usable(home)
    }

    /// Shards of lost nodes, those of the segments that one more loss would take last, and of these those that lack
    /// most. What is lost can't be used: such segments are weak.
    fn list_rebuild(&mut self, around: &mut Around<'_>) {
        if !self.rebuild.is_empty() {
            return;
        }
        let now = around.basis.now;
        if self.search.is_none() {
            let pace = SEARCH_EVERY.min(around.basis.config.rebuild_after / 4);
            if now.since(self.searched_at) < pace {
                return;
            }
            self.searched_at = now;
            let any_is_lost = around.segments.homes().any(|home| self.is_given_up(around, home));
            let has_skipped = self.searched_to[0].is_some();
            let begun = Search { among: Among::AtRisk, has_skipped, found: Vec::new(), next_slice_at: now };
            self.search = any_is_lost.then_some(begun);
        }
        if let Some(search) = self.search.take_if(|search| search.next_slice_at <= now) {
            self.go_on(search, around);
        }
    }

    fn go_on(&mut self, mut search: Search, around: &mut Around<'_>) {
        let count = around.turn.left_at_least(around.basis, LOOKED_AT_LEAST);
        let mut looked_at = 0;
        let lacking = around.survey.look(around.topology(), around.segments);
        while looked_at < count && search.among != Among::Nothing {
            let set = if search.among == Among::AtRisk { lacking.at_risk() } else { lacking.weak() };
            let mut last = self.searched_to[usize::from(search.among == Among::Weak)];
            let own = around.segments.own_numbers();
            let from = last.map_or(Bound::Included(own.first), Bound::Excluded);
            let mut next = set.range((from, own.bound()));
            let mut was_all = false;
            while looked_at < count && !search.has_enough() && !was_all {
                looked_at += 1;
                last = next.next().copied();
                was_all = last.is_none();
                let is_at_risk = last.is_some_and(|no| lacking.at_risk().contains(&no));
                if let Some(no) = last.filter(|_| is_at_risk == (search.among == Among::AtRisk)) {
                    self.list_given_up(around, no, is_at_risk, &mut search.found);
                }
            }
            self.searched_to[usize::from(search.among == Among::Weak)] = last;
            search.pass_on(was_all);
        }
        drop(lacking);
        around.turn.slice("repairs: what is lost is looked for", looked_at);
        if search.among != Among::Nothing {
            search.next_slice_at = around.basis.next_slice_at();
            self.search = Some(search);
            return;
        }
        let mut found = search.found;
        found.sort_unstable();
        found.dedup();
        self.rebuild = found.into_iter().map(|(_, _, no, index)| (no, index)).collect();
        self.degraded |= !self.rebuild.is_empty();
    }

    fn list_given_up(
        &self,
        around: &Around<'_>,
        no: SegmentNo,
        is_at_risk: bool,
        found: &mut Vec<(bool, usize, SegmentNo, u8)>,
    ) {
        let info = around.segments.get(no).filter(|info| info.is_needed() || info.kind == Kind::Run);
        let Some(info) = info else { return };
        let missing = info.homes.iter().enumerate().filter(|(_, home)| self.is_given_up(around, **home));
        let count = missing.clone().count();
        found.extend(missing.map(|(index, _)| (is_at_risk, count, no, index as u8)));
    }

    /// When the search goes on, or the next ones are tried of what it has found.
    pub(crate) fn slice_deadline(&self) -> Option<Instant> {
        let search = self.search.as_ref().map(|search| search.next_slice_at).or(self.rebuild_goes_on_at);
        earliest(search, self.compare_at)
    }

    /// False where it can't be done now.
    fn start_repair(&mut self, around: &mut Around<'_>, segment: SegmentNo, index: u8, out: Out) -> bool {
        let Some(info) = around.segments.get(segment) else { return true };
        if self.running.iter().any(|(_, r)| r.segment == segment) {
            // Both might choose the same node.
            return false;
        }
        if info.kind != Kind::Run && !self.has_sources(around, info, index) {
            // Nodes that have them are silent: when they are not, it is not put off as one that failed.
            return false;
        }
        let (geometry, homes) = (info.geometry, info.homes.clone());
        let mut target = homes[usize::from(index)];
        if !around.peers.leg_usable(target) {
            let is_away = !around.peers.is_up(target.node) || around.peers.device_serves(target);
            let is_drained = around.peers.is_draining(target.device);
            if is_away && !self.is_lost(around, target.node) && !is_drained {
                // It may come back with the shard.
                return false;
            }
            if info.kind == Kind::Run {
                // Whoever opens the volume finds it by the homes that the checkpoint names: a new one names others.
                around.wants.rewrite = true;
                return true;
            }
            let bytes = u64::from(geometry.shard_blocks() + 8) * BLOCK_BYTES as u64;
            let media = around.topology().media_of_homes(&homes, index);
            let place = around.placer().place_again(
                Shape { geometry: &geometry, homes: &homes },
                index,
                bytes,
                &[],
                Target { keep: Keep::FromGuests, media },
            );
            let Some(new) = place else { return false };
            target = new;
        }
        self.run_repair(around, segment, index, target, false, out);
        true
    }

    /// Whether shards that can be read now may give this one.
    fn has_sources(&self, around: &Around<'_>, info: &SegmentInfo, index: u8) -> bool {
        let geometry = &info.geometry;
        let others = info
            .homes
            .iter()
            .enumerate()
            .filter(|(i, home)| *i != usize::from(index) && around.peers.leg_usable(**home));
        let positions: Vec<u8> = others.map(|(i, _)| geometry.position(i as u8)).collect();
        let distinct = positions.iter().fold(0_u64, |all, position| all | 1 << position).count_ones();
        distinct >= u32::from(geometry.data) || positions.contains(&geometry.position(index))
    }

    /// Copies a shard that is where it belongs to a device where it shall be.
    pub(crate) fn begin_move(&mut self, around: &mut Around<'_>, moved: Move, out: Out) {
        self.run_repair(around, moved.segment, moved.index, moved.target, true, out);
    }

    fn run_repair(
        &mut self,
        around: &mut Around<'_>,
        segment: SegmentNo,
        index: u8,
        target: Leg,
        is_move: bool,
        out: Out,
    ) {
        let blocks = around.segments.get(segment).map_or(0, |info| info.geometry.shard_blocks());
        let need = self.need_of(around, segment, (!is_move).then_some(index));
        around.charge_moved(u64::from(blocks) * BLOCK_BYTES as u64, need);
        let token = self.running.insert(Repair {
            segment,
            index,
            target,
            header: None,
            header_tried: 0,
            header_from: index,
            got: BTreeMap::new(),
            asked: 0,
            bad: if is_move { 0 } else { 1 << index },
            damaged: 0,
            is_move,
            cleared: false,
            putting: false,
            by_target: around.peers.makes_shards(target.node, around.basis.now),
        });
        self.ask_repair_header(around, token, out);
        self.ask_repair_shards(around, token, out);
    }

    fn ask_repair_header(&mut self, around: &mut Around<'_>, token: Token, out: Out) {
        let Some(repair) = self.running.get(token) else { return };
        let Some(info) = around.segments.get(repair.segment) else { return self.end_repair(around, token, false) };
        // Of a shard that is moved, its own.
        let others = (0..info.geometry.shard_count()).filter(|i| *i != repair.index);
        let next = repair
            .is_move
            .then_some(repair.index)
            .into_iter()
            .chain(others)
            .find(|i| repair.header_tried >> i & 1 == 0 && around.peers.leg_usable(info.homes[usize::from(*i)]));
        let Some(index) = next else { return self.end_repair(around, token, true) };
        let leg = info.homes[usize::from(index)];
        let shard = ShardId { segment: repair.segment.of(around.basis.volume()), index };
        let repair = self.running.get_mut(token).expect("just seen");
        repair.header_tried |= 1 << index;
        repair.header_from = index;
        let request = Request::ReadShardHeader { device: leg.device, shard };
        if around.send_bulk(leg.node, Purpose::RepairHeader { repair: token }, request, Vec::new(), out).is_none() {
            self.end_repair(around, token, true);
        }
    }

    /// Shards that give the one that is repaired, and how many of them do. In a mirror any other copy; in a code the
    /// shards of the same copy, and where these don't suffice the same shard of another one; itself, if it is there.
    fn repair_sources(&self, around: &Around<'_>, repair: &Repair, info: &SegmentInfo) -> (usize, Vec<u8>) {
        let geometry = &info.geometry;
        let (width, position) = (geometry.code_width(), repair.index % geometry.code_width());
        let is_there = repair.is_move && repair.bad >> repair.index & 1 == 0;
        let may_serve = |i: &u8| repair.bad >> i & 1 == 0 && around.peers.leg_usable(info.homes[usize::from(*i)]);
        let of_copy = |i: &u8| geometry.parity > 0 && i / width == repair.index / width && *i != repair.index;
        let is_twin = |i: &u8| i % width == position && *i != repair.index;
        let all = || (0..geometry.shard_count()).filter(may_serve);
        let is_coded = !is_there && all().filter(of_copy).count() >= usize::from(geometry.data);
        let sources: Vec<u8> = match (is_there, is_coded) {
            (true, _) => all().filter(|i| *i == repair.index).collect(),
            (false, true) => all().filter(of_copy).collect(),
            (false, false) => all().filter(is_twin).collect(),
        };
        (if is_coded { usize::from(geometry.data) } else { 1 }, sources)
    }

    fn ask_repair_shards(&mut self, around: &mut Around<'_>, token: Token, out: Out) {
        let Some(repair) = self.running.get(token).filter(|repair| !repair.by_target) else { return };
        let Some(info) = around.segments.get(repair.segment) else { return self.end_repair(around, token, false) };
        let (needed, sources) = self.repair_sources(around, repair, info);
        let (blocks, homes) = (info.geometry.shard_blocks(), info.homes.clone());
        let is_coming = |i: &&u8| repair.asked >> **i & 1 == 1 || repair.got.contains_key(*i);
        let mut coming = sources.iter().filter(is_coming).count();
        let sources: Vec<u8> = sources.iter().filter(|i| !is_coming(i)).copied().collect();
        let segment = repair.segment.of(around.basis.volume());
        for index in sources {
            if coming >= needed {
                break;
            }
            let leg = homes[usize::from(index)];
            let shard = ShardId { segment, index };
            let device = leg.device;
            let request = Request::ReadShard { device, shard, block: 0, blocks, checked: true, cached: false };
            let purpose = Purpose::RepairRead { repair: token, shard: index };
            if around.send_bulk(leg.node, purpose, request, Vec::new(), out).is_some() {
                self.running.get_mut(token).expect("just seen").asked |= 1 << index;
                coming += 1;
            }
        }
        if coming < needed {
            self.note_stuck(around, token);
            self.end_repair(around, token, true);
        }
    }

    /// Has the target read the others, and put what follows. Where the shard lies already, damaged perhaps, it refuses:
    /// what can still be read of that is not given up before its successor is there.
    fn order_shard(&mut self, around: &mut Around<'_>, token: Token, out: Out) {
        let Some(repair) = self.running.get(token) else { return };
        let Some(info) = around.segments.get(repair.segment) else { return self.end_repair(around, token, false) };
        let (Some(header), false) = (&repair.header, repair.putting) else { return };
        let (needed, mut sources) = self.repair_sources(around, repair, info);
        if sources.len() < needed {
            self.note_stuck(around, token);
            return self.end_repair(around, token, true);
        }
        sources.truncate(needed);
        let source = |index: &u8| {
            let Leg { node, device } = info.homes[usize::from(*index)];
            ShardSource { index: *index, node, address: None, device }
        };
        let request = Request::MakeShard {
            device: repair.target.device,
            volume: around.basis.volume(),
            epoch: around.basis.epoch(),
            shard: ShardId { segment: repair.segment.of(around.basis.volume()), index: repair.index },
            header_of: header.shard.index,
            sources: sources.iter().map(source).collect(),
        };
        let (payload, node) = (vec![Buf::copy_from(&header.encode())], repair.target.node);
        if !around.peers.understands(node, &request) {
            // It was started anew meanwhile, as one of an older release.
            return self.make_here(around, token, out);
        }
        self.running.get_mut(token).expect("just seen").putting = true;
        if around.send_bulk(node, Purpose::RepairMake { repair: token }, request, payload, out).is_none() {
            self.end_repair(around, token, true);
        }
    }

    pub(crate) fn on_repair_made(
        &mut self,
        around: &mut Around<'_>,
        token: Token,
        waited: Duration,
        reply: &Reply,
        out: Out,
    ) -> Made {
        if *reply == Reply::Done {
            around.counters.shards_made_by_nodes += 1;
            return self.on_repair_put(around, token, reply);
        }
        // It has put nothing: a source may be damaged or can't be reached from there, or what is to be replaced lies
        // there. The first two take it time to find out.
        let Some(repair) = self.running.get(token) else { return Made::Nothing };
        if waited >= Duration::from_millis(MAKE_MS) / 2 {
            around.peers.on_not_made(repair.target.node, around.basis.now);
        }
        self.make_here(around, token, out);
        Made::Nothing
    }

    fn make_here(&mut self, around: &mut Around<'_>, token: Token, out: Out) {
        let Some(repair) = self.running.get_mut(token) else { return };
        (repair.by_target, repair.putting) = (false, false);
        self.ask_repair_shards(around, token, out);
        self.finish_repair(around, token, out);
    }

    /// A repair finds too few whole shards: if others are damaged, not away, it never will.
    fn note_stuck(&mut self, around: &mut Around<'_>, token: Token) {
        let Some(Repair { segment, index, damaged, .. }) = self.running.get(token) else { return };
        let Some(info) = around.segments.get(*segment).filter(|_| damaged & !(1 << index) != 0) else { return };
        match info.kind {
            Kind::Data => {}
            Kind::Meta => around.wants.fold = true,
            Kind::Run => around.wants.rewrite = true,
        }
        self.stuck.insert(*segment);
    }

    pub(crate) fn on_repair_header(
        &mut self,
        around: &mut Around<'_>,
        token: Token,
        reply: &Reply,
        payload: &Buf,
        out: Out,
    ) {
        let Some(repair) = self.running.get_mut(token) else { return };
        let shard = ShardId { segment: repair.segment.of(around.basis.volume()), index: repair.header_from };
        let header = match reply {
            Reply::ShardHeader => ShardHeader::decode(shard, payload).ok(),
            _ => None,
        };
        if header.is_none() {
            return self.ask_repair_header(around, token, out);
        }
        repair.header = header;
        self.finish_repair(around, token, out);
    }

    pub(crate) fn on_repair_read(
        &mut self,
        around: &mut Around<'_>,
        token: Token,
        index: u8,
        reply: &Reply,
        payload: Buf,
        out: Out,
    ) {
        let Some(repair) = self.running.get_mut(token) else { return };
        repair.asked &= !(1 << index);
        if matches!(reply, Reply::Shard { .. }) {
            repair.got.insert(index, payload);
            return self.finish_repair(around, token, out);
        }
        repair.bad |= 1 << index;
        if matches!(reply, Reply::Refused(Refusal::Checksum)) {
            repair.damaged |= 1 << index;
        }
        self.ask_repair_shards(around, token, out);
    }

    /// A connection was lost on the way: begin again later.
    pub(crate) fn on_repair_lost(&mut self, around: &mut Around<'_>, token: Token) {
        self.end_repair(around, token, true);
    }

    fn finish_repair(&mut self, around: &mut Around<'_>, token: Token, out: Out) {
        let Some(repair) = self.running.get(token) else { return };
        if repair.by_target {
            return self.order_shard(around, token, out);
        }
        let Some(info) = around.segments.get(repair.segment) else { return self.end_repair(around, token, false) };
        let geometry = info.geometry;
        let (Some(header), false) = (&repair.header, repair.putting) else { return };
        let itself = repair.got.get(&repair.index);
        if itself.is_some_and(|bytes| header.shard.index != repair.index || block_crcs(bytes) != header.block_crcs) {
            // It is not what it was: it is made again from the others.
            let repair = self.running.get_mut(token).expect("just seen");
            repair.bad |= 1 << repair.index;
            repair.got.remove(&repair.index);
            return self.ask_repair_shards(around, token, out);
        }
        let width = geometry.code_width();
        let is_fellow = |i: &u8| i / width == repair.index / width;
        let is_twin = |i: &u8| i % width == repair.index % width;
        let fellows = repair.got.keys().filter(|i| geometry.parity > 0 && is_fellow(i)).count();
        let twin = repair.got.iter().find(|(i, _)| is_twin(i)).map(|(_, bytes)| bytes.clone());
        if twin.is_none() && fellows < usize::from(geometry.data) {
            return;
        }
        if !repair.cleared {
            return self.clear_damaged(around, token, out);
        }
        let data = if let Some(itself) = itself {
            itself.clone()
        } else if let Some(twin) = twin.filter(|_| fellows < usize::from(geometry.data) || geometry.parity == 0) {
            twin
        } else {
            let code = Code::new(geometry.data, geometry.parity).expect("geometries in use are valid");
            let sources: Vec<(u8, &[u8])> =
                repair.got.iter().filter(|(i, _)| is_fellow(i)).map(|(i, b)| (i % width, &**b)).collect();
            let sources = &sources[..usize::from(geometry.data)];
            let mut bytes = BufMut::new(geometry.shard_blocks() as usize * BLOCK_BYTES);
            if code.reconstruct(sources, repair.index % width, &mut bytes).is_err() {
                return self.end_repair(around, token, true);
            }
            bytes.freeze()
        };
        let shard = ShardId { segment: repair.segment.of(around.basis.volume()), index: repair.index };
        let header = ShardHeader { shard, block_crcs: block_crcs(&data), ..header.clone() }.encode();
        let target = repair.target;
        let request = Request::PutShard {
            device: target.device,
            volume: around.basis.volume(),
            epoch: around.basis.epoch(),
            shard,
            header_blocks: (header.len() / BLOCK_BYTES) as u32,
        };
        let payload = vec![Buf::copy_from(&header), data];
        self.running.get_mut(token).expect("just seen").putting = true;
        if around.send_bulk(target.node, Purpose::RepairPut { repair: token }, request, payload, out).is_none() {
            self.end_repair(around, token, true);
        }
    }

    /// A shard is never changed in place: what may be left of it goes first.
    fn clear_damaged(&mut self, around: &mut Around<'_>, token: Token, out: Out) {
        let repair = self.running.get_mut(token).expect("checked by the caller");
        repair.putting = true;
        let (target, index, segment) = (repair.target, repair.index, repair.segment);
        let shard = around.shard_id(segment, index);
        let (volume, epoch) = (around.basis.volume(), around.basis.epoch());
        let request = Request::DeleteShards { device: target.device, volume, epoch, shards: vec![shard] };
        let purpose = Purpose::RepairClear { repair: token };
        if around.send_bulk(target.node, purpose, request, Vec::new(), out).is_none() {
            self.end_repair(around, token, true);
        }
    }

    pub(crate) fn on_repair_clear(&mut self, around: &mut Around<'_>, token: Token, reply: &Reply, out: Out) {
        let Some(repair) = self.running.get_mut(token) else { return };
        if *reply != Reply::Done {
            return self.end_repair(around, token, true);
        }
        repair.cleared = true;
        repair.putting = false;
        self.finish_repair(around, token, out);
    }

    pub(crate) fn on_repair_put(&mut self, around: &mut Around<'_>, token: Token, reply: &Reply) -> Made {
        let Some(repair) = self.running.get(token) else { return Made::Nothing };
        if *reply != Reply::Done {
            self.end_repair(around, token, true);
            return Made::Nothing;
        }
        match repair.is_move {
            true => around.counters.shards_moved += 1,
            false => around.counters.shards_rebuilt += 1,
        }
        let (segment, index, target) = (repair.segment, repair.index, repair.target);
        if !self.listing.is_empty() {
            self.put_meanwhile.insert((segment, index));
        }
        let home = around.segments.get(segment).map(|i| i.homes[usize::from(index)]);
        if let Some(former) = home.filter(|home| *home != target) {
            // Until this is complete the shard is where nothing names it: the repair goes on, which exempts it.
            let record = Record::Rehome { segment, homes: vec![(index, target)] };
            return Made::Elsewhere(record, Done::Rehomed { repair: token, shard: (segment, index), former });
        }
        self.end_repair(around, token, false);
        Made::InPlace
    }

    pub(crate) fn on_rehomed(
        &mut self,
        around: &mut Around<'_>,
        token: Token,
        (segment, index): (SegmentNo, u8),
        former: Leg,
    ) {
        self.end_repair(around, token, false);
        // Nothing names it there any more.
        self.note_stray((former, segment, index));
    }

    fn end_repair(&mut self, around: &mut Around<'_>, token: Token, again: bool) {
        let Some(repair) = self.running.remove(token) else { return };
        let Repair { segment, index, target, is_move, damaged, .. } = repair;
        let home = around.segments.get(segment).map(|info| info.homes[usize::from(index)]);
        if (repair.cleared || repair.by_target) && repair.putting && home != Some(target) {
            // Lost on the way, or the segment died meanwhile: it may lie there, or arrive yet.
            self.note_stray((target, segment, index));
        }
        if again && !is_move && home.is_some() {
            self.queue.insert((segment, index));
            let waited = self.paused.get(&(segment, index)).map_or(REPAIR_PAUSE_MIN / 2, |(_, span)| *span);
            let is_urgent = damaged == 0 && self.need_of(around, segment, Some(index)) == Need::AtRisk;
            let pause = (waited * 2).min(if is_urgent { REPAIR_PAUSE_AT_RISK } else { REPAIR_PAUSE_MAX });
            self.paused.insert((segment, index), (around.basis.now + pause, pause));
        } else {
            self.paused.remove(&(segment, index));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::care::tests::Rig;
    use crate::peers::tests::{leg, sent};
    use crate::segment::tests::{info, no};
    use crate::turn::Turn;
    use holdfast_format::geometry::{Geometry, Layout};
    use holdfast_format::segment::SegmentIndex;

    fn header(rig: &Rig, index: u8, data: &Buf) -> ShardHeader {
        let geometry = rig.segments.get(no(1, 0)).expect("it is in the table").geometry;
        ShardHeader {
            grid: rig.basis.config.grid,
            shard: ShardId { segment: no(1, 0).of(rig.basis.volume()), index },
            geometry,
            block_crcs: block_crcs(data),
            index: SegmentIndex::Meta,
            payload_crcs: block_crcs(data),
            sealed: false,
            packed: None,
        }
    }

    /// A mirrored segment on the first two of three nodes, whose second shard is damaged.
    fn damaged() -> (Rig, Repairer) {
        let mut rig = Rig::new("mirror:2", &[1, 1, 1]);
        rig.segments.insert(no(1, 0), info(2, 2, &[leg(1, 0), leg(2, 0)]));
        let mut repairer = Repairer::default();
        for _ in 0..2 {
            rig.with(|around, out| repairer.on_damaged(around, (no(1, 0), 1), leg(2, 0), true, out));
        }
        assert_eq!((rig.out.take().len(), rig.counters.checksum_errors), (1, 1), "it is told once");
        (rig, repairer)
    }

    #[test]
    fn a_damaged_shard_is_made_again_where_it_lay_after_it_was_cleared() {
        let (mut rig, mut repairer) = damaged();
        rig.peers.on_not_made(leg(2, 0).node, rig.basis.now);
        rig.with(|around, out| repairer.start_repairs(around, out));
        let data = Buf::zeroes(2 * BLOCK_BYTES);
        let header = Buf::copy_from(&header(&rig, 0, &data).encode());
        let mut asked = Vec::new();
        for _ in 0..4 {
            for (node, token, request) in sent(&mut rig.out) {
                let call = rig.peers.on_answer(rig.basis.now, node, token).expect("it is waited for");
                asked.push((node.0, call.purpose.clone()));
                rig.with(|around, out| match (call.purpose, request) {
                    (Purpose::RepairHeader { repair }, _) => {
                        repairer.on_repair_header(around, repair, &Reply::ShardHeader, &header, out);
                    }
                    (Purpose::RepairRead { repair, shard }, _) => {
                        let reply = Reply::Shard { blocks: 2 };
                        repairer.on_repair_read(around, repair, shard, &reply, data.clone(), out);
                    }
                    (Purpose::RepairClear { repair }, _) => repairer.on_repair_clear(around, repair, &Reply::Done, out),
                    (Purpose::RepairPut { repair }, Request::PutShard { shard, .. }) => {
                        assert_eq!(shard.index, 1);
                        assert!(matches!(repairer.on_repair_put(around, repair, &Reply::Done), Made::InPlace));
                    }
                    (other, _) => panic!("{other:?}"),
                });
                repairer.verify();
            }
        }
        let steps: Vec<u32> = asked.iter().map(|(node, _)| *node).collect();
        assert_eq!(steps, [1, 1, 2, 2], "header, data, what may be left, and the new one: {asked:?}");
        assert!(!repairer.is_at_work() && !repairer.is_under_repair(no(1, 0)));
        assert_eq!(rig.counters.shards_rebuilt, 1);
    }

    #[test]
    fn a_repair_that_fails_is_queued_again_and_waits() {
        let (mut rig, mut repairer) = damaged();
        rig.with(|around, out| repairer.start_repairs(around, out));
        let (node, token, _) = sent(&mut rig.out).remove(0);
        let call = rig.peers.on_answer(rig.basis.now, node, token).expect("it is waited for");
        let Purpose::RepairHeader { repair } = call.purpose else { panic!("{call:?}") };
        rig.with(|around, _| repairer.on_repair_lost(around, repair));
        assert!(repairer.wants(no(1, 0), 1) && !repairer.is_at_work());
        rig.with(|around, out| repairer.start_repairs(around, out));
        assert!(!repairer.is_at_work(), "it was just tried");
        rig.pass(REPAIR_PAUSE_MIN);
        rig.with(|around, out| repairer.start_repairs(around, out));
        assert!(repairer.is_at_work());
        repairer.verify();
    }

    #[test]
    fn what_is_lost_goes_elsewhere_when_its_node_was_away_for_long() {
        let (mut rig, mut repairer) = damaged();
        repairer.queue.clear();
        rig.peers.on_down(rig.basis.now, leg(2, 0).node);
        rig.with(|around, out| repairer.start_repairs(around, out));
        assert!(!repairer.is_at_work(), "it may come back");
        rig.pass(rig.basis.config.rebuild_after);
        rig.with(|around, out| repairer.start_repairs(around, out));
        assert!(repairer.is_repairing(no(1, 0), 1));
        let (_, repair) = repairer.running.iter().next().expect("just seen");
        assert_eq!(repair.target, leg(3, 0));
        let degraded = rig.with(|around, _| {
            let found = around.survey.look(around.topology(), around.segments);
            repairer.degraded_segments(&found, around.basis, around.segments)
        });
        assert_eq!(degraded, 1);
    }

    /// Some segments that one more loss would take, and behind them some that bear one more; a node is lost.
    fn lost(at_risk: u64, weak: u64) -> (Rig, Repairer) {
        let mut rig = Rig::new("mirror:3", &[1, 1, 1, 1]);
        let wide = Geometry::new(Layout::Mirror { copies: 3 }, 8);
        for counter in 0..at_risk {
            rig.segments.insert(no(1, counter), info(8, 8, &[leg(1, 0), leg(2, 0)]));
        }
        for counter in at_risk..at_risk + weak {
            let homes = [leg(1, 0), leg(2, 0), leg(3, 0)];
            rig.segments.insert(no(1, counter), SegmentInfo { geometry: wide, ..info(8, 8, &homes) });
        }
        rig.peers.on_down(rig.basis.now, leg(1, 0).node);
        rig.pass(rig.basis.config.rebuild_after);
        rig.survey_all();
        (rig, Repairer::default())
    }

    /// Searches to the end for what is lost, in turns of which others have used up so much.
    fn search(rig: &mut Rig, repairer: &mut Repairer, used: usize) {
        repairer.rebuild.clear();
        rig.pass(SEARCH_EVERY);
        for _ in 0..10_000 {
            rig.turn = Turn::default();
            rig.turn.slice("others", used);
            rig.with(|around, _| repairer.list_rebuild(around));
            match repairer.slice_deadline() {
                Some(at) => rig.basis.now = at,
                None => return,
            }
        }
        panic!("the search does not end");
    }

    #[test]
    fn a_search_begins_with_what_one_more_loss_would_take_wherever_the_last_one_ended() {
        let at_risk = LISTED_MAX as u64 / 2;
        let (mut rig, mut repairer) = lost(at_risk, 2000);
        for _ in 0..4 {
            search(&mut rig, &mut repairer, 0);
            let next = repairer.rebuild.last().expect("there is enough to do");
            assert!(next.0 < no(1, at_risk), "{next:?} comes before what is at risk");
        }
    }

    #[test]
    fn searches_that_find_more_than_they_list_get_round_to_all() {
        let (mut rig, mut repairer) = lost(1400, 3000);
        let mut listed = BTreeSet::new();
        for _ in 0..12 {
            search(&mut rig, &mut repairer, 0);
            assert!(repairer.rebuild.len() < 2 * LISTED_MAX);
            listed.extend(repairer.rebuild.iter().map(|(no, _)| *no));
        }
        assert_eq!(listed.len(), 4400);
    }

    #[test]
    fn a_turn_does_not_try_all_that_can_not_be_made_again_now() {
        let (mut rig, mut repairer) = lost(500, 500);
        [3, 4].into_iter().for_each(|node| rig.peers.on_down(rig.basis.now, leg(node, 0).node));
        search(&mut rig, &mut repairer, 0);
        let mut left = repairer.rebuild.len();
        assert_eq!(left, 1000);
        while left > 0 {
            rig.turn = Turn::default();
            rig.with(|around, out| repairer.start_repairs(around, out));
            assert!(!repairer.is_at_work() && left - repairer.rebuild.len() <= LOOKED_AT_MAX);
            left = repairer.rebuild.len();
            assert_eq!(repairer.slice_deadline().is_some(), left > 0);
        }
    }

    #[test]
    fn what_is_lost_is_found_though_others_use_up_every_turn() {
        let (mut rig, mut repairer) = lost(10, 100);
        let used = rig.basis.config.slice_runs_max;
        search(&mut rig, &mut repairer, used);
        assert_eq!(repairer.rebuild.len(), 110);
    }
}
