//! Moving shards that could stay: off devices that are being drained, and from full devices to empty ones.
//!
//! A move is a repair whose source is the shard itself: it is copied, its segment's homes are changed by a record in
//! the log, and then the old one is garbage. Parts of checkpoints are not moved but written anew.
//!
//! Drains come first. Balancing begins when the fullest device is [`TILT_PER_MILLE`] fuller than the emptiest, and
//! moves part of the difference before it looks again: others do the same with their volumes.
//!
//! States: resting -> the table is gone through for what is to move, slice by slice, up to [`LISTED_MAX`] shards -> these
//! are moved, one after another -> the search goes on where it was -> resting.

use super::Around;
use super::repair::Repairer;
use crate::segment::{Kind, SegmentInfo};
use crate::space::{Keep, Shape, Target, Topology};
use holdfast_base::{BLOCK_BYTES, Instant, MediaClass};
use holdfast_format::ledger::Leg;
use holdfast_format::record::SegmentNo;
use holdfast_format::wire::DeviceStat;
use std::collections::BTreeSet;
use std::ops::Bound;
use std::time::Duration;

/// The table is searched for shards to move this often while devices are drained.
const DRAIN_EVERY: Duration = Duration::from_secs(1);

/// And this often for balancing: what was moved shows in what nodes tell of their devices by then.
const BALANCE_EVERY: Duration = Duration::from_secs(6);

/// Difference of fill, in 1/1000 of a device, from which on shards are moved.
const TILT_PER_MILLE: u64 = 100;

/// Share of the bytes that would even two devices out which is moved at a time.
const TILT_PART: u64 = 4;

/// So many shards are listed; when they are on their way, the search goes on.
const LISTED_MAX: usize = 1024;

/// Segments that a search looks at in each turn, though others have used it up.
const LOOKED_AT_LEAST: usize = 8;

/// A shard, where it is, and where it shall be; anywhere else where nothing is said.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Listed {
    segment: SegmentNo,
    index: u8,
    home: Leg,
    target: Option<Leg>,
}

/// What is to be copied, and where to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Move {
    pub(crate) segment: SegmentNo,
    pub(crate) index: u8,
    pub(crate) target: Leg,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Goal {
    Drain,
    Balance(Balance),
}

/// From the fullest device to the emptiest, so many bytes more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Balance {
    fullest: Leg,
    emptiest: Leg,
    left_bytes: u64,
}

/// The table is gone through.
#[derive(Debug)]
struct Search {
    goal: Goal,
    last: Option<SegmentNo>,
    has_found: bool,
    next_slice_at: Instant,
}

impl Search {
    fn new(goal: Goal, now: Instant) -> Search {
        Search { goal, last: None, has_found: false, next_slice_at: now }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Mover {
    /// Next last.
    list: Vec<Listed>,
    search: Option<Search>,
    drain_listed_at: Instant,
    balance_listed_at: Instant,
    /// Up to which segment those were listed whose shards lie together, where the list did not take all.
    together_to: Option<SegmentNo>,
    /// The last look at the devices' fill gave something to move; until the next one is over.
    balances: bool,
}

impl Mover {
    pub(crate) fn is_at_rest(&self) -> bool {
        self.list.is_empty() && self.search.is_none()
    }

    /// The segment of which a shard is moved next.
    pub(crate) fn next(&self) -> Option<SegmentNo> {
        self.list.last().map(|listed| listed.segment)
    }

    /// When the search goes on, if nothing that it has found is left.
    pub(crate) fn slice_deadline(&self) -> Option<Instant> {
        self.search.as_ref().filter(|_| self.list.is_empty()).map(|search| search.next_slice_at)
    }

    /// Looks for shards to move, now and then, when those that were found are on their way.
    pub(crate) fn look(&mut self, around: &mut Around<'_>) {
        if !self.list.is_empty() {
            return;
        }
        if self.search.is_none() {
            self.begin_search(around);
        }
        if let Some(search) = self.search.take_if(|search| search.next_slice_at <= around.basis.now) {
            self.go_on(search, around);
        }
    }

    fn begin_search(&mut self, around: &Around<'_>) {
        let (now, segments) = (around.basis.now, around.segments);
        let draining = around.peers.draining();
        if !draining.is_empty() {
            if now.since(self.drain_listed_at) >= DRAIN_EVERY {
                self.drain_listed_at = now;
                let has_any = draining.iter().any(|device| segments.own_shards_on(*device) > 0);
                self.search = has_any.then(|| Search::new(Goal::Drain, now));
            }
        } else if now.since(self.balance_listed_at) >= BALANCE_EVERY {
            self.balance_listed_at = now;
            self.list_together(around);
            match tilt(around.topology()).filter(|_| self.list.is_empty()) {
                Some((fullest, emptiest, bytes)) => {
                    let goal = Balance { fullest, emptiest, left_bytes: bytes / TILT_PART };
                    self.search = Some(Search::new(Goal::Balance(goal), now));
                }
                None => self.balances = false,
            }
        }
    }

    /// Shards of one segment on one node, which a repair in a hurry may leave: one loss would take both. Those that did
    /// not fit into the last list come first.
    fn list_together(&mut self, around: &Around<'_>) {
        let topology = around.topology();
        let together = |no: &SegmentNo| {
            let info = around.segments.get(*no)?;
            let index = topology.crowded(&info.geometry, &info.homes)?;
            Some(Listed { segment: *no, index, home: info.homes[usize::from(index)], target: None })
        };
        let found = around.survey.look(topology, around.segments);
        let from = self.together_to.map_or(Bound::Unbounded, Bound::Excluded);
        let behind = found.crowded().range((from, Bound::Unbounded));
        let before = self.together_to.into_iter().flat_map(|last| found.crowded().range(..=last));
        self.list = behind.chain(before).filter_map(together).take(LISTED_MAX).collect();
        self.together_to = self.list.last().map(|listed| listed.segment).filter(|_| self.list.len() == LISTED_MAX);
    }

    fn go_on(&mut self, mut search: Search, around: &mut Around<'_>) {
        let (segments, count) = (around.segments, around.turn.left_at_least(around.basis, LOOKED_AT_LEAST));
        let (mut list, mut looked_at) = (Vec::new(), 0);
        for (no, info) in segments.own_after(search.last).take(count) {
            match &mut search.goal {
                Goal::Drain => list_drained(around, no, info, &mut list),
                Goal::Balance(goal) => list.extend(listed_to_balance(around, no, info, goal)),
            }
            (search.last, looked_at) = (Some(no), looked_at + 1);
            if list.len() >= LISTED_MAX {
                break;
            }
        }
        around.turn.slice("moves: what is to move is looked for", looked_at);
        search.has_found |= !list.is_empty();
        let goes_on = looked_at == count || list.len() >= LISTED_MAX;
        if matches!(search.goal, Goal::Balance(_)) && (search.has_found || !goes_on) {
            self.balances = search.has_found;
        }
        if goes_on {
            search.next_slice_at = around.basis.next_slice_at();
            self.search = Some(search);
        }
        self.list = list;
    }

    /// Bytes between the fullest device and the emptiest, while shards are moved from one to the other.
    pub(crate) fn left_to_balance_bytes(&self, topology: Topology<'_>) -> u64 {
        let is_balancing = self.balances && topology.peers().draining().is_empty();
        tilt(topology).filter(|_| is_balancing).map_or(0, |(_, _, bytes)| bytes)
    }

    /// Takes the next one off the list: what is to be copied, if it still is.
    pub(crate) fn take(&mut self, around: &mut Around<'_>, repairer: &Repairer) -> Option<Move> {
        let Listed { segment, index, home: listed, target } = self.list.pop()?;
        if let Some(search) = self.search.as_mut().filter(|_| self.list.is_empty()) {
            search.next_slice_at = around.basis.next_slice_at();
        }
        let info = around.segments.get(segment)?;
        let (geometry, homes) = (&info.geometry, &info.homes);
        let home = homes[usize::from(index)];
        let is_busy = repairer.is_under_repair(segment);
        if is_busy || !info.is_needed() || home != listed || !around.peers.leg_usable(home) {
            return None;
        }
        let bytes = u64::from(geometry.shard_blocks() + 8) * BLOCK_BYTES as u64;
        let room = Target { keep: Keep::FromGuests, media: around.topology().media_of_homes(homes, index) };
        let shape = Shape { geometry, homes };
        let target = target.or_else(|| around.placer().place_again(shape, index, bytes, &[], room));
        // The list may be old: the others may have been made again there.
        let fits = |target: &Leg| {
            let is_usable = *target != home && around.peers.leg_usable(*target);
            is_usable && around.topology().may_lie(geometry, homes, index, *target)
        };
        match target.filter(fits) {
            Some(target) => Some(Move { segment, index, target }),
            None => gather_copy(around, segment, info),
        }
    }

    /// Asserts what must hold between events (tests and the simulator).
    pub(crate) fn verify(&self) {
        assert!(self.list.iter().all(|listed| listed.target != Some(listed.home)), "a shard is moved to where it is");
    }
}

/// Whether it is better to clean the segment than to move its shards: most of it is dead.
pub(crate) fn is_drained_by_cleaning(topology: Topology<'_>, info: &SegmentInfo) -> bool {
    let leaves = info.homes.iter().any(|home| topology.peers().is_draining(home.device));
    leaves && info.dead() * 2 > info.capacity()
}

/// Shards on devices that are drained; or a wish that what can't be moved is written anew.
fn list_drained(around: &mut Around<'_>, no: SegmentNo, info: &SegmentInfo, list: &mut Vec<Listed>) {
    for (index, home) in info.homes.iter().enumerate() {
        if !around.peers.is_draining(home.device) {
            continue;
        }
        match info.kind {
            Kind::Run => around.wants.rewrite |= around.topology().meta_layout_now().is_some(),
            _ if info.is_needed() && around.peers.leg_usable(*home) => {
                list.push(Listed { segment: no, index: index as u8, home: *home, target: None });
            }
            _ => {}
        }
    }
}

/// The shard on the fullest device, if it may lie on the emptiest, and is no longer than what is left to move.
fn listed_to_balance(around: &Around<'_>, no: SegmentNo, info: &SegmentInfo, goal: &mut Balance) -> Option<Listed> {
    if info.kind != Kind::Data || !info.is_needed() {
        return None;
    }
    let index = info.homes.iter().position(|home| *home == goal.fullest)? as u8;
    let bytes = u64::from(info.geometry.shard_blocks()) * BLOCK_BYTES as u64;
    if bytes > goal.left_bytes || !around.topology().may_lie(&info.geometry, &info.homes, index, goal.emptiest) {
        return None;
    }
    goal.left_bytes -= bytes;
    Some(Listed { segment: no, index, home: goal.fullest, target: Some(goal.emptiest) })
}

/// The fullest device, the emptiest one of the same class of media, and the bytes that would make them equal, if they
/// differ much: of the class where they differ most.
fn tilt(topology: Topology<'_>) -> Option<(Leg, Leg, u64)> {
    let classes: BTreeSet<Option<MediaClass>> = topology.usable_devices().map(|d| d.media).collect();
    classes.into_iter().filter_map(|media| tilt_of(topology, media)).max_by_key(|(_, _, bytes)| *bytes)
}

fn tilt_of(topology: Topology<'_>, media: Option<MediaClass>) -> Option<(Leg, Leg, u64)> {
    let peers = topology.peers();
    let fill = |d: &DeviceStat| d.capacity_bytes.saturating_sub(d.free_bytes) * 1000 / d.capacity_bytes.max(1);
    let mut by_fill: Vec<(u64, Leg, u64)> = peers
        .usable_legs()
        .filter(|(_, d)| peers.takes_shards(d) && d.media == media)
        .map(|(leg, d)| (fill(d), leg, d.capacity_bytes))
        .collect();
    by_fill.sort_unstable();
    let ((low, emptiest, room), (high, fullest, _)) = (*by_fill.first()?, *by_fill.last()?);
    (high >= low + TILT_PER_MILLE).then(|| (fullest, emptiest, (high - low) * room / 2000))
}

/// A copy of a nested layout that lies on two nodes, since its own had no other device, keeps the other copy off both
/// of them: one of its shards goes to where the others are.
fn gather_copy(around: &mut Around<'_>, segment: SegmentNo, info: &SegmentInfo) -> Option<Move> {
    let (geometry, homes) = (&info.geometry, &info.homes);
    if !geometry.layout().is_nested() {
        return None;
    }
    for (index, home) in homes.iter().enumerate() {
        let domain = geometry.domain_of(index as u8);
        let fellows =
            || homes.iter().enumerate().filter(|(i, _)| *i != index && geometry.domain_of(*i as u8) == domain);
        if !around.peers.leg_usable(*home) || fellows().any(|(_, leg)| leg.node == home.node) {
            continue;
        }
        let bytes = u64::from(geometry.shard_blocks() + 8) * BLOCK_BYTES as u64;
        let index = index as u8;
        let room = Target { keep: Keep::FromGuests, media: around.topology().media_of_homes(homes, index) };
        let target = around.placer().place_again(Shape { geometry, homes }, index, bytes, &[], room);
        if let Some(target) = target.filter(|target| fellows().any(|(_, leg)| leg.node == target.node)) {
            return Some(Move { segment, index, target });
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::care::tests::Rig;
    use crate::peers::tests::{CAPACITY, leg, stat};
    use crate::segment::tests::{info, no};
    use crate::turn::{PAUSE, Turn};
    use holdfast_base::NodeId;

    #[test]
    fn what_lies_on_a_device_that_is_drained_goes_elsewhere_and_runs_are_written_anew() {
        let mut rig = Rig::new("mirror:2", &[1, 1, 1]);
        let (mut mover, repairer) = (Mover::default(), Repairer::default());
        rig.segments.insert(no(1, 0), info(8, 8, &[leg(1, 0), leg(2, 0)]));
        rig.segments.insert(no(1, 1), SegmentInfo { kind: Kind::Run, ..info(8, 1, &[leg(1, 0), leg(3, 0)]) });
        mover.look(&mut rig.around());
        assert_eq!(mover.next(), None);
        rig.peers.set_draining([leg(1, 0).device].into());
        mover.look(&mut rig.around());
        assert!(mover.next() == Some(no(1, 0)) && rig.wants.rewrite);
        mover.verify();
        let moved = mover.take(&mut rig.around(), &repairer);
        assert_eq!(moved, Some(Move { segment: no(1, 0), index: 0, target: leg(3, 0) }));
        assert_eq!(mover.next(), None);
    }

    #[test]
    fn a_full_device_passes_shards_on_to_an_empty_one_where_they_may_lie() {
        let mut rig = Rig::new("mirror:2", &[1, 1, 1]);
        let (mut mover, repairer) = (Mover::default(), Repairer::default());
        rig.segments.insert(no(1, 0), info(8, 8, &[leg(1, 0), leg(3, 0)]));
        rig.segments.insert(no(1, 1), info(8, 8, &[leg(1, 0), leg(2, 0)]));
        let free = |free_bytes| vec![DeviceStat { free_bytes, ..stat(leg(1, 0)) }];
        rig.peers.on_stat(NodeId(1), free(CAPACITY * 91 / 100));
        mover.look(&mut rig.around());
        assert_eq!((mover.next(), mover.left_to_balance_bytes(rig.around().topology())), (None, 0));
        rig.peers.on_stat(NodeId(1), free(CAPACITY / 2));
        rig.pass(BALANCE_EVERY);
        mover.look(&mut rig.around());
        assert!(mover.left_to_balance_bytes(rig.around().topology()) > 0);
        let moved = mover.take(&mut rig.around(), &repairer);
        assert_eq!(moved, Some(Move { segment: no(1, 0), index: 0, target: leg(2, 0) }));
        mover.verify();
    }

    /// The next look, in a turn of which others have used up so much.
    fn look(rig: &mut Rig, mover: &mut Mover, used: usize) {
        rig.turn = Turn::default();
        rig.turn.slice("others", used);
        mover.look(&mut rig.around());
        rig.pass(PAUSE);
    }

    #[test]
    fn while_it_is_looked_for_what_is_to_move_balancing_is_not_said_to_be_over() {
        let mut rig = Rig::new("mirror:2", &[1, 1, 1]);
        let (mut mover, repairer) = (Mover::default(), Repairer::default());
        rig.basis.config.slice_runs_max = 8;
        (0..40).for_each(|counter| rig.segments.insert(no(1, counter), info(8, 8, &[leg(2, 0), leg(3, 0)])));
        rig.segments.insert(no(1, 40), info(8, 8, &[leg(1, 0), leg(3, 0)]));
        rig.peers.on_stat(NodeId(1), vec![DeviceStat { free_bytes: CAPACITY / 2, ..stat(leg(1, 0)) }]);
        let left = |rig: &mut Rig, mover: &Mover| mover.left_to_balance_bytes(rig.around().topology());
        (0..8).for_each(|_| look(&mut rig, &mut mover, 0));
        assert!(mover.take(&mut rig.around(), &repairer).is_some() && left(&mut rig, &mover) > 0);
        rig.pass(BALANCE_EVERY);
        look(&mut rig, &mut mover, 0);
        assert!(mover.next().is_none() && mover.slice_deadline().is_some() && left(&mut rig, &mover) > 0);
        rig.segments.remove(no(1, 40));
        (0..8).for_each(|_| look(&mut rig, &mut mover, 0));
        assert!(mover.is_at_rest() && left(&mut rig, &mover) == 0, "there is nothing to move any more");
    }

    #[test]
    fn what_is_to_move_is_found_though_others_use_up_every_turn() {
        let mut rig = Rig::new("mirror:2", &[1, 1, 1]);
        let mut mover = Mover::default();
        (0..40).for_each(|counter| rig.segments.insert(no(1, counter), info(8, 8, &[leg(2, 0), leg(3, 0)])));
        rig.segments.insert(no(1, 40), info(8, 8, &[leg(1, 0), leg(3, 0)]));
        rig.peers.set_draining([leg(1, 0).device].into());
        let used = rig.basis.config.slice_runs_max;
        (0..50).for_each(|_| look(&mut rig, &mut mover, used));
        assert_eq!(mover.next(), Some(no(1, 40)));
    }

    #[test]
    fn what_lies_together_and_can_not_be_moved_hides_nothing() {
        let mut rig = Rig::new("mirror:2", &[2]);
        let (mut mover, repairer) = (Mover::default(), Repairer::default());
        let count = LISTED_MAX as u64 + 100;
        (0..count).for_each(|counter| rig.segments.insert(no(1, counter), info(8, 8, &[leg(1, 0), leg(1, 1)])));
        rig.survey_all();
        let mut listed = BTreeSet::new();
        for _ in 0..3 {
            rig.pass(BALANCE_EVERY);
            look(&mut rig, &mut mover, 0);
            assert!(mover.list.len() <= LISTED_MAX);
            while let Some(next) = mover.next() {
                listed.insert(next);
                assert_eq!(mover.take(&mut rig.around(), &repairer), None);
            }
        }
        assert_eq!(listed.len() as u64, count);
    }
}
