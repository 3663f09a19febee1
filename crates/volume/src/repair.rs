//! Rejoin and repair: what a returning node holds is compared with the segment table; what is missing is made again from
//! the other shards, what nothing names is deleted, ledgers that are over are dropped.
//!
//! A shard that was not written for a committed segment is deleted only if its id is of a recovered earlier epoch, or a
//! free record for it is complete (protocol rule 17): ids of this epoch without one are `unsettled` and exempt.

use crate::api::{Lane, Notice, State};
use crate::controller::{Controller, Out};
use crate::log::Done;
use crate::peers::Purpose;
use crate::segment::{Kind, SegmentInfo};
use crate::space::{Keep, Need, Shape, Target};
use holdfast_base::{BLOCK_BYTES, Buf, BufMut, DeviceId, Instant, LedgerId, NodeId, ShardId, Slab, Token, block_crcs};
use holdfast_erasure::Code;
use holdfast_format::ledger::Leg;
use holdfast_format::record::{Record, SegmentNo};
use holdfast_format::root::Root;
use holdfast_format::segment::ShardHeader;
use holdfast_format::wire::{LedgerState, MAKE_MS, Refusal, Reply, Request, ShardSource};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Shards listed by one request.
const LIST_COUNT: u32 = 4096;

/// Shards being made again at a time; fewer while guests are at work ([`Need::shards_beside_guests`]).
const REPAIRS_MAX: usize = 8;

/// Shards of the queue that are looked at, in one round, for one that is needed enough to be made again now.
const LOOKED_AT_MAX: usize = 64;

/// A repair that failed is tried again after a while, which doubles: what is lost for good is not read for ever. Where one more
/// loss would take data, and no damage has been found, not for as long.
const REPAIR_PAUSE_MIN: Duration = Duration::from_millis(200);
const REPAIR_PAUSE_MAX: Duration = Duration::from_secs(60);
const REPAIR_PAUSE_AT_RISK: Duration = Duration::from_secs(2);

/// How often the table is searched for shards of lost nodes.
const REBUILD_EVERY: Duration = Duration::from_secs(1);

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

#[derive(Debug)]
pub(crate) struct Repairer {
    queue: BTreeSet<(SegmentNo, u8)>,
    running: Slab<Repair>,
    /// Repairs that failed: not before when they are tried again, and how long they waited.
    paused: BTreeMap<(SegmentNo, u8), (Instant, Duration)>,
    /// Shards to make again because their node has been away for long: next last.
    rebuild: Vec<(SegmentNo, u8)>,
    rebuild_listed_at: Instant,
    /// Segments of which too many shards are damaged, in whatever places, to make one again from whole ones. What they hold is
    /// moved, block by block, since of each block enough may be there.
    stuck: BTreeSet<SegmentNo>,
    /// Shards that may lie where a segment's final homes are not: (where, segment, index).
    strays: BTreeSet<(Leg, SegmentNo, u8)>,
    listing: BTreeMap<(NodeId, DeviceId), BTreeSet<ShardId>>,
    /// Shards that were put while lists were on the way: those may lack them.
    put_meanwhile: BTreeSet<(SegmentNo, u8)>,
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
            rebuild_listed_at: Instant::ZERO,
            stuck: BTreeSet::new(),
            strays: BTreeSet::new(),
            listing: BTreeMap::new(),
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

    pub(crate) fn is_at_work(&self) -> bool {
        !self.running.is_empty()
    }

    pub(crate) fn is_under_repair(&self, segment: SegmentNo) -> bool {
        self.running.iter().any(|(_, r)| r.segment == segment)
            || self.queue.range((segment, 0)..=(segment, u8::MAX)).next().is_some()
    }

    pub(crate) fn is_repairing(&self, segment: SegmentNo, index: u8) -> bool {
        self.running.iter().any(|(_, r)| r.segment == segment && r.index == index)
    }

    pub(crate) fn is_stuck(&self, segment: SegmentNo) -> bool {
        self.stuck.contains(&segment)
    }

    pub(crate) fn forget(&mut self, segment: SegmentNo) {
        self.stuck.remove(&segment);
        self.queue.retain(|(no, _)| *no != segment);
        self.paused.retain(|(no, _), _| *no != segment);
    }
}

impl Controller {
    pub(crate) fn drive_repair(&mut self, out: Out) {
        if self.state != State::Open {
            return;
        }
        let is_in_use = self.basis.now.since(self.last_activity) <= Duration::from_secs(5);
        self.peers.refresh_state(self.basis.now, is_in_use, out);
        self.take_inventories(out);
        self.delete_strays(out);
        self.start_repairs(out);
        self.drive_moves(out);
        if self.repairer.degraded && self.basis.now.since(self.repairer.looked_at) >= LOOK_EVERY {
            self.repairer.looked_at = self.basis.now;
            if self.peers.all_are_inventoried() && self.degraded_segments() == 0 && self.at_risk_entries() == 0 {
                self.repairer.degraded = false;
                self.notice(Notice::RedundancyRestored, out);
            }
        }
    }

    /// Segments with a shard on a device that is out or missing, or of a narrower layout than the volume's.
    pub(crate) fn degraded_segments(&self) -> u64 {
        let survey = self.survey();
        let is_wanted = |no: &SegmentNo| !self.basis.is_foreign(*no) && self.segments.get(*no).is_some();
        let queued = self.repairer.queue.iter().map(|(no, _)| *no);
        let running = self.repairer.running.iter().filter(|(_, r)| !r.is_move).map(|(_, r)| r.segment);
        let wanted: BTreeSet<SegmentNo> = queued.chain(running).filter(is_wanted).collect();
        (survey.weak().len() + wanted.difference(survey.weak()).count()) as u64
    }

    /// Own segments that lack something as they lie.
    pub(crate) fn own_weak_segments(&self) -> Vec<SegmentNo> {
        self.survey().weak().range(self.root().first_own()..).copied().collect()
    }

    /// The same, without counting what is out with one node: for who asks before that goes, over the whole table.
    fn degraded_apart_from(&self, node: NodeId) -> u64 {
        let is_out = |home: &Leg| home.node != node && !self.peers.leg_usable(*home);
        self.segments
            .own()
            .filter(|(no, info)| {
                info.live > 0 && info.kind == Kind::Data && !self.topology().is_of_policy(&info.geometry)
                    || info.live > 0 && info.kind != Kind::Data && self.topology().is_narrow_metadata(&info.geometry)
                    || info.homes.iter().any(is_out)
                    || info.live > 0 && self.topology().crowded(&info.geometry, &info.homes).is_some()
                    || self.repairer.queue.range((*no, 0)..=(*no, u8::MAX)).next().is_some()
                    || self.repairer.running.iter().any(|(_, r)| r.segment == *no && !r.is_move)
            })
            .count() as u64
            + self.crowded_foreign()
    }

    fn crowded_foreign(&self) -> u64 {
        let data = self.segments.foreign().filter(|(_, info)| info.kind == Kind::Data);
        data.filter(|(no, info)| self.topology().is_crowded_foreign(*no, info)).count() as u64
    }

    /// Segments and log entries that lack redundancy whether this node is there or not: without it they would lack more.
    pub fn weak_apart_from(&self, node: NodeId) -> (u64, u64) {
        if !self.basis.is_known() {
            return (0, 0);
        }
        (self.degraded_apart_from(node), self.at_risk_apart_from(Some(node)))
    }

    /// Segments that are needed and could not be read any more without these nodes, as things are now. What the log
    /// holds is in memory, too, and will be in segments.
    pub fn lost_without(&self, nodes: &BTreeSet<NodeId>) -> u64 {
        if !self.basis.is_known() {
            return 0;
        }
        let is_lost = |info: &SegmentInfo| {
            let stays = |home: &Leg| !nodes.contains(&home.node) && self.peers.leg_usable(*home);
            let left = info.homes.iter().enumerate().filter(|(_, home)| stays(home));
            let positions: BTreeSet<u8> = left.map(|(index, _)| info.geometry.position(index as u8)).collect();
            positions.len() < usize::from(info.geometry.data)
        };
        let needed = self.segments.own().filter(|(_, info)| info.is_needed() || info.kind == Kind::Run);
        needed.filter(|(_, info)| is_lost(info)).count() as u64
    }

    /// A shard is not what it should be where it lies: told once until it is made again. While that happens it is gone for a
    /// moment, and is not wanted anew.
    pub(crate) fn on_damaged(&mut self, shard: (SegmentNo, u8), leg: Leg, may_repair: bool, out: Out) {
        let (segment, index) = shard;
        // The host that serves a volume may have deleted what another one reads beforehand.
        if self.repairer.queue.contains(&shard) || self.repairer.is_repairing(segment, index) || self.is_warming() {
            return;
        }
        self.counters.checksum_errors += 1;
        let id = ShardId { segment: self.basis.segment_id(segment), index };
        self.notice(Notice::ShardDamaged { leg, shard: id, repaired: may_repair }, out);
        if may_repair {
            self.repairer.want(segment, index);
        }
    }

    // ---- inventory ----

    fn take_inventories(&mut self, out: Out) {
        for id in self.peers.ids() {
            if !self.peers.begin_inventory(self.basis.now, id) {
                continue;
            }
            self.repairer.paused.clear();
            self.want_shards_of_lost_devices(id);
            let node = self.peers.get(id).expect("listed");
            let devices: Vec<DeviceId> = node.devices().map(|d| d.device).collect();
            for device in devices {
                self.repairer.listing.insert((id, device), BTreeSet::new());
                self.list_shards(id, device, None, out);
                let leg = Leg { node: id, device };
                self.list_ledgers(leg, out);
            }
        }
    }

    /// Asks which ledgers of the volume the device has: those that the root doesn't name will go.
    pub(crate) fn list_ledgers(&mut self, leg: Leg, out: Out) {
        let (volume, epoch, instance) = (self.basis.config.volume, self.epoch(), self.basis.config.instance);
        let request = Request::Fence { device: leg.device, volume, epoch, instance };
        self.send(leg.node, Lane::Fast, Purpose::LedgerInventory { leg }, request, Vec::new(), out);
    }

    /// Shards whose device the node has no more, or only as a failed one, are made again elsewhere.
    fn want_shards_of_lost_devices(&mut self, id: NodeId) {
        if self.peers.get(id).is_none_or(|n| n.may_have_more_devices(self.basis.now)) {
            return;
        }
        let mut lost = Vec::new();
        for (no, info) in self.segments.own() {
            for (index, home) in info.homes.iter().enumerate() {
                if home.node == id && !self.peers.device_serves(*home) {
                    lost.push((no, index as u8));
                }
            }
        }
        for (no, index) in lost {
            self.repairer.want(no, index);
        }
    }

    fn list_shards(&mut self, node: NodeId, device: DeviceId, after: Option<ShardId>, out: Out) {
        let request = Request::ListShards { device, volume: self.basis.config.volume, after, count_max: LIST_COUNT };
        self.send(node, Lane::Bulk, Purpose::Inventory { device }, request, Vec::new(), out);
    }

    pub(crate) fn on_inventory(&mut self, node: NodeId, device: DeviceId, reply: Reply, out: Out) {
        let Reply::Shards { shards, more } = reply else {
            if reply == Reply::Refused(Refusal::Busy) {
                self.peers.want_inventory(node);
            }
            return;
        };
        let Some(held) = self.repairer.listing.get_mut(&(node, device)) else { return };
        let last = shards.last().copied();
        held.extend(shards);
        if more {
            return self.list_shards(node, device, last, out);
        }
        let held = self.repairer.listing.remove(&(node, device)).expect("just seen");
        self.compare_inventory(Leg { node, device }, &held, out);
    }

    fn compare_inventory(&mut self, leg: Leg, held: &BTreeSet<ShardId>, out: Out) {
        let volume = self.basis.config.volume;
        let mut missing = Vec::new();
        for (no, info) in self.segments.own() {
            for (index, home) in info.homes.iter().enumerate() {
                let shard = ShardId { segment: no.of(volume), index: index as u8 };
                if *home == leg && !held.contains(&shard) {
                    missing.push((no, index as u8));
                }
            }
        }
        for (no, index) in missing {
            if self.repairer.put_meanwhile.contains(&(no, index)) {
                self.peers.recheck(self.basis.now, leg.node);
            } else {
                self.repairer.want(no, index);
            }
        }
        if self.repairer.listing.is_empty() {
            self.repairer.put_meanwhile.clear();
        }
        let mut garbage = Vec::new();
        for shard in held {
            let no = SegmentNo::from(shard.segment);
            if self.is_exempt(no, shard.index) {
                // Looked at again when its segment's fate is known.
                self.repairer.note_stray((leg, no, shard.index));
            } else if self.is_garbage(*shard, leg) {
                garbage.push(*shard);
            }
        }
        for chunk in garbage.chunks(1024) {
            self.delete_shards(leg, chunk.to_vec(), out);
        }
    }

    /// Of this shard nothing is deleted yet.
    fn is_exempt(&self, segment: SegmentNo, index: u8) -> bool {
        let unsettled = self.segments.is_unsettled(segment) && !self.basis.config.mutations.clean_after_unknown_append;
        unsettled || self.repairer.is_repairing(segment, index)
    }

    /// Nothing names this shard, there, of a segment that is settled.
    fn is_garbage(&self, shard: ShardId, leg: Leg) -> bool {
        let info = self.segments.get(SegmentNo::from(shard.segment));
        info.is_none_or(|info| info.homes.get(usize::from(shard.index)) != Some(&leg))
    }

    fn delete_shards(&mut self, leg: Leg, shards: Vec<ShardId>, out: Out) {
        let request = Request::DeleteShards {
            device: leg.device,
            volume: self.basis.config.volume,
            epoch: self.epoch(),
            shards: shards.clone(),
        };
        self.send(leg.node, Lane::Bulk, Purpose::DeleteShards { shards }, request, Vec::new(), out);
    }

    /// Deletes late shards of settled segments. On a node that is out its next inventory finds them.
    fn delete_strays(&mut self, out: Out) {
        for (leg, segment, index) in std::mem::take(&mut self.repairer.strays) {
            let shard = ShardId { segment: self.basis.segment_id(segment), index };
            let late = self.peers.is_late(leg.node);
            if self.is_exempt(segment, index) || late && self.peers.is_usable(leg.node) {
                self.repairer.strays.insert((leg, segment, index));
            } else if self.peers.is_usable(leg.node) && self.is_garbage(shard, leg) {
                self.delete_shards(leg, vec![shard], out);
            }
        }
    }

    pub(crate) fn on_shards_deleted(&mut self, node: NodeId, shards: &[ShardId], reply: &Reply) {
        if *reply == Reply::Done {
            self.counters.shards_deleted += shards.len() as u64;
        } else {
            self.peers.recheck(self.basis.now, node);
        }
    }

    /// The node will be asked what it holds when it is back.
    pub(crate) fn on_delete_lost(&mut self, node: NodeId, _shards: Vec<ShardId>) {
        self.peers.recheck(self.basis.now, node);
    }

    /// The free record of these segments is complete: their shards may go.
    pub(crate) fn on_freed(&mut self, segments: Vec<SegmentNo>, out: Out) {
        let mut by_leg: BTreeMap<Leg, Vec<ShardId>> = BTreeMap::new();
        for no in segments {
            self.counters.segments_freed += 1;
            let Some(homes) = self.checkpointer.freeing.remove(&no) else { continue };
            for (index, leg) in homes.into_iter().enumerate() {
                let shard = ShardId { segment: self.basis.segment_id(no), index: index as u8 };
                by_leg.entry(leg).or_default().push(shard);
            }
        }
        for (leg, shards) in by_leg {
            if self.peers.is_usable(leg.node) {
                self.delete_shards(leg, shards, out);
            }
        }
    }

    pub(crate) fn on_ledger_inventory(&mut self, leg: Leg, reply: &Reply, out: Out) {
        let Reply::Fenced { ledgers, .. } = reply else { return };
        self.note_held(leg, ledgers);
        let opening = self.opening.as_ref().and_then(|opening| opening.new_ledger());
        let to_be_named = self.roll.as_ref().map(|r| r.new.id).or(opening);
        self.delete_unnamed_ledgers(leg, ledgers, to_be_named, out);
    }

    /// Of these ledgers on a leg, deletes those that the root doesn't name, apart from one that is still to be named.
    pub(crate) fn delete_unnamed_ledgers(
        &mut self,
        leg: Leg,
        ledgers: &[LedgerState],
        to_be_named: Option<LedgerId>,
        out: Out,
    ) {
        let named: BTreeSet<_> = self.root().ledgers.iter().map(|l| l.id).chain(to_be_named).collect();
        for state in ledgers.iter().filter(|state| !named.contains(&state.ledger)) {
            self.delete_ledger(leg, state.ledger, out);
        }
    }

    pub(crate) fn delete_ledger(&mut self, leg: Leg, ledger: LedgerId, out: Out) {
        let (volume, epoch) = (self.basis.config.volume, self.epoch());
        let request = Request::DeleteLedger { device: leg.device, volume, epoch, ledger };
        self.send(leg.node, Lane::Fast, Purpose::Forget, request, Vec::new(), out);
    }

    /// The root record names these ledgers no more.
    pub(crate) fn delete_dropped_ledgers(&mut self, old: Option<&Root>, out: Out) {
        let Some(old) = old else { return };
        let named: BTreeSet<_> = self.root().ledgers.iter().map(|l| l.id).collect();
        for ledger in old.ledgers.iter().filter(|l| !named.contains(&l.id)) {
            for leg in &ledger.legs {
                if self.peers.is_usable(leg.node) {
                    self.delete_ledger(*leg, ledger.id, out);
                }
            }
        }
    }

    // ---- making shards again ----

    fn start_repairs(&mut self, out: Out) {
        self.list_rebuild();
        self.start_queued(out);
        while let Some((segment, index)) = self.repairer.rebuild.last().copied() {
            let home = self.segments.get(segment).map(|info| info.homes[usize::from(index)]);
            let is_wanted = !self.repairer.wants(segment, index) && home.is_some_and(|home| self.is_given_up(home));
            // What is needed no more makes nothing wait that is.
            if is_wanted {
                let need = self.need_of(segment, Some(index));
                if self.repairer.running.is_full() || !self.may_move_data(need) {
                    return;
                }
            }
            self.repairer.rebuild.pop();
            if is_wanted {
                self.start_repair(segment, index, out);
            }
        }
    }

    /// Those first that one more loss would take. Each is tried once a tick: one that can't be read now is queued again by itself.
    fn start_queued(&mut self, out: Out) {
        if self.repairer.running.is_full() || !self.may_move_data(Need::AtRisk) {
            return;
        }
        let all_of = |no: &SegmentNo| self.repairer.queue.range((*no, 0)..=(*no, u8::MAX)).copied();
        let survey = self.survey();
        let mut waiting: Vec<(SegmentNo, u8)> = survey.at_risk().iter().flat_map(all_of).take(LOOKED_AT_MAX).collect();
        drop(survey);
        waiting.extend(self.repairer.queue.iter().copied());
        let mut refused = 0;
        for (segment, index) in waiting {
            if self.repairer.running.is_full() || refused == LOOKED_AT_MAX {
                return;
            }
            let is_paused =
                self.repairer.paused.get(&(segment, index)).is_some_and(|(until, _)| *until > self.basis.now);
            if is_paused || !self.repairer.wants(segment, index) {
                continue;
            }
            if !self.may_move_data(self.need_of(segment, Some(index))) {
                refused += 1;
                continue;
            }
            self.repairer.queue.remove(&(segment, index));
            if !self.start_repair(segment, index, out) {
                self.repairer.queue.insert((segment, index));
            }
        }
    }

    /// The node has been away for so long that it is not waited for.
    fn is_lost(&self, id: NodeId) -> bool {
        let out_since = match self.peers.get(id) {
            Some(node) if node.is_usable() => return false,
            Some(node) => node.out_since().unwrap_or(self.basis.opened_at),
            None => self.basis.opened_at,
        };
        self.basis.now.since(out_since) >= self.basis.config.rebuild_after
    }

    /// What was there is made again elsewhere.
    fn is_given_up(&self, home: Leg) -> bool {
        self.is_lost(home.node) || self.peers.is_draining(home.device) && !self.peers.leg_usable(home)
    }

    /// Shards of lost nodes, those of the segments that one more loss would take last, and of these those that lack most.
    fn list_rebuild(&mut self) {
        let pace = REBUILD_EVERY.min(self.basis.config.rebuild_after / 4);
        if !self.repairer.rebuild.is_empty() || self.basis.now.since(self.repairer.rebuild_listed_at) < pace {
            return;
        }
        self.repairer.rebuild_listed_at = self.basis.now;
        let at_risk = self.survey().at_risk().clone();
        let mut found: Vec<(bool, usize, SegmentNo, u8)> = Vec::new();
        // What is given up can't be used: its segments are weak.
        for no in self.own_weak_segments() {
            let info = self.segments.get(no).filter(|info| info.is_needed() || info.kind == Kind::Run);
            let Some(info) = info else { continue };
            let missing = info.homes.iter().enumerate().filter(|(_, home)| self.is_given_up(**home));
            let (is_at_risk, count) = (at_risk.contains(&no), missing.clone().count());
            found.extend(missing.map(|(index, _)| (is_at_risk, count, no, index as u8)));
        }
        found.sort_unstable();
        self.repairer.rebuild = found.into_iter().map(|(_, _, no, index)| (no, index)).collect();
        self.repairer.degraded |= !self.repairer.rebuild.is_empty();
    }

    /// False where it can't be done now.
    fn start_repair(&mut self, segment: SegmentNo, index: u8, out: Out) -> bool {
        let Some(info) = self.segments.get(segment) else { return true };
        if self.repairer.running.iter().any(|(_, r)| r.segment == segment) {
            // Both might choose the same node.
            return false;
        }
        if info.kind != Kind::Run && !self.has_sources(info, index) {
            // Nodes that have them are silent: when they are not, it is not put off as one that failed.
            return false;
        }
        let (geometry, homes) = (info.geometry, info.homes.clone());
        let mut target = homes[usize::from(index)];
        if !self.peers.leg_usable(target) {
            let is_away = !self.peers.is_up(target.node) || self.peers.device_serves(target);
            let is_drained = self.peers.is_draining(target.device);
            if is_away && !self.is_lost(target.node) && !is_drained {
                // It may come back with the shard.
                return false;
            }
            if info.kind == Kind::Run {
                // Whoever opens the volume finds it by the homes that the checkpoint names: a new one names others.
                self.wants.rewrite = true;
                return true;
            }
            let bytes = u64::from(geometry.shard_blocks() + 8) * BLOCK_BYTES as u64;
            let media = self.topology().media_of_homes(&homes, index);
            let place = self.placer().place_again(
                Shape { geometry: &geometry, homes: &homes },
                index,
                bytes,
                &[],
                Target { keep: Keep::FromGuests, media },
            );
            let Some(new) = place else { return false };
            target = new;
        }
        self.run_repair(segment, index, target, false, out);
        true
    }

    /// Whether shards that can be read now may give this one.
    fn has_sources(&self, info: &SegmentInfo, index: u8) -> bool {
        let geometry = &info.geometry;
        let others =
            info.homes.iter().enumerate().filter(|(i, home)| *i != usize::from(index) && self.peers.leg_usable(**home));
        let positions: Vec<u8> = others.map(|(i, _)| geometry.position(i as u8)).collect();
        let distinct = positions.iter().fold(0_u64, |all, position| all | 1 << position).count_ones();
        distinct >= u32::from(geometry.data) || positions.contains(&geometry.position(index))
    }

    /// Copies a shard that is where it belongs to a device where it shall be.
    pub(crate) fn begin_move(&mut self, segment: SegmentNo, index: u8, target: Leg, out: Out) {
        self.run_repair(segment, index, target, true, out);
    }

    fn run_repair(&mut self, segment: SegmentNo, index: u8, target: Leg, is_move: bool, out: Out) {
        let blocks = self.segments.get(segment).map_or(0, |info| info.geometry.shard_blocks());
        let need = self.need_of(segment, (!is_move).then_some(index));
        self.charge_moved(u64::from(blocks) * BLOCK_BYTES as u64, need);
        let token = self.repairer.running.insert(Repair {
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
            by_target: self.peers.makes_shards(target.node, self.basis.now),
        });
        self.ask_repair_header(token, out);
        self.ask_repair_shards(token, out);
    }

    fn ask_repair_header(&mut self, token: Token, out: Out) {
        let Some(repair) = self.repairer.running.get(token) else { return };
        let Some(info) = self.segments.get(repair.segment) else { return self.end_repair(token, false) };
        // Of a shard that is moved, its own.
        let others = (0..info.geometry.shard_count()).filter(|i| *i != repair.index);
        let next = repair
            .is_move
            .then_some(repair.index)
            .into_iter()
            .chain(others)
            .find(|i| repair.header_tried >> i & 1 == 0 && self.peers.leg_usable(info.homes[usize::from(*i)]));
        let Some(index) = next else { return self.end_repair(token, true) };
        let leg = info.homes[usize::from(index)];
        let shard = ShardId { segment: repair.segment.of(self.basis.config.volume), index };
        let repair = self.repairer.running.get_mut(token).expect("just seen");
        repair.header_tried |= 1 << index;
        repair.header_from = index;
        let request = Request::ReadShardHeader { device: leg.device, shard };
        if self.send(leg.node, Lane::Bulk, Purpose::RepairHeader { repair: token }, request, Vec::new(), out).is_none()
        {
            self.end_repair(token, true);
        }
    }

    /// Shards that give the one that is repaired, and how many of them do. In a mirror any other copy; in a code the shards of the
    /// same copy, and where these don't suffice the same shard of another one; itself, if it is there.
    fn repair_sources(&self, repair: &Repair, info: &SegmentInfo) -> (usize, Vec<u8>) {
        let geometry = &info.geometry;
        let (width, position) = (geometry.code_width(), repair.index % geometry.code_width());
        let is_there = repair.is_move && repair.bad >> repair.index & 1 == 0;
        let may_serve = |i: &u8| repair.bad >> i & 1 == 0 && self.peers.leg_usable(info.homes[usize::from(*i)]);
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

    fn ask_repair_shards(&mut self, token: Token, out: Out) {
        let Some(repair) = self.repairer.running.get(token).filter(|repair| !repair.by_target) else { return };
        let Some(info) = self.segments.get(repair.segment) else { return self.end_repair(token, false) };
        let (needed, sources) = self.repair_sources(repair, info);
        let (blocks, homes) = (info.geometry.shard_blocks(), info.homes.clone());
        let is_coming = |i: &&u8| repair.asked >> **i & 1 == 1 || repair.got.contains_key(*i);
        let mut coming = sources.iter().filter(is_coming).count();
        let sources: Vec<u8> = sources.iter().filter(|i| !is_coming(i)).copied().collect();
        let segment = repair.segment.of(self.basis.config.volume);
        for index in sources {
            if coming >= needed {
                break;
            }
            let leg = homes[usize::from(index)];
            let shard = ShardId { segment, index };
            let device = leg.device;
            let request = Request::ReadShard { device, shard, block: 0, blocks, checked: true, cached: false };
            let purpose = Purpose::RepairRead { repair: token, shard: index };
            if self.send(leg.node, Lane::Bulk, purpose, request, Vec::new(), out).is_some() {
                self.repairer.running.get_mut(token).expect("just seen").asked |= 1 << index;
                coming += 1;
            }
        }
        if coming < needed {
            self.note_stuck(token);
            self.end_repair(token, true);
        }
    }

    /// Has the target read the others, and put what follows. Where the shard lies already, damaged perhaps, it refuses: what can
    /// still be read of that is not given up before its successor is there.
    fn order_shard(&mut self, token: Token, out: Out) {
        let Some(repair) = self.repairer.running.get(token) else { return };
        let Some(info) = self.segments.get(repair.segment) else { return self.end_repair(token, false) };
        let (Some(header), false) = (&repair.header, repair.putting) else { return };
        let (needed, mut sources) = self.repair_sources(repair, info);
        if sources.len() < needed {
            self.note_stuck(token);
            return self.end_repair(token, true);
        }
        sources.truncate(needed);
        let source = |index: &u8| {
            let Leg { node, device } = info.homes[usize::from(*index)];
            ShardSource { index: *index, node, address: None, device }
        };
        let request = Request::MakeShard {
            device: repair.target.device,
            volume: self.basis.config.volume,
            epoch: self.epoch(),
            shard: ShardId { segment: repair.segment.of(self.basis.config.volume), index: repair.index },
            header_of: header.shard.index,
            sources: sources.iter().map(source).collect(),
        };
        let (payload, node) = (vec![Buf::copy_from(&header.encode())], repair.target.node);
        if !self.peers.understands(node, &request) {
            // It was started anew meanwhile, as one of an older release.
            return self.make_here(token, out);
        }
        self.repairer.running.get_mut(token).expect("just seen").putting = true;
        if self.send(node, Lane::Bulk, Purpose::RepairMake { repair: token }, request, payload, out).is_none() {
            self.end_repair(token, true);
        }
    }

    pub(crate) fn on_repair_made(&mut self, token: Token, waited: Duration, reply: &Reply, out: Out) {
        if *reply == Reply::Done {
            self.counters.shards_made_by_nodes += 1;
            return self.on_repair_put(token, reply, out);
        }
        // It has put nothing: a source may be damaged or can't be reached from there, or what is to be replaced lies there. The
        // first two take it time to find out.
        let Some(repair) = self.repairer.running.get(token) else { return };
        if waited >= Duration::from_millis(MAKE_MS) / 2 {
            self.peers.on_not_made(repair.target.node, self.basis.now);
        }
        self.make_here(token, out);
    }

    fn make_here(&mut self, token: Token, out: Out) {
        let Some(repair) = self.repairer.running.get_mut(token) else { return };
        (repair.by_target, repair.putting) = (false, false);
        self.ask_repair_shards(token, out);
        self.finish_repair(token, out);
    }

    /// A repair finds too few whole shards: if others are damaged, not away, it never will.
    fn note_stuck(&mut self, token: Token) {
        let Some(Repair { segment, index, damaged, .. }) = self.repairer.running.get(token) else { return };
        let Some(info) = self.segments.get(*segment).filter(|_| damaged & !(1 << index) != 0) else { return };
        match info.kind {
            Kind::Data => {}
            Kind::Meta => self.wants.fold = true,
            Kind::Run => self.wants.rewrite = true,
        }
        self.repairer.stuck.insert(*segment);
    }

    pub(crate) fn on_repair_header(&mut self, token: Token, reply: &Reply, payload: &Buf, out: Out) {
        let Some(repair) = self.repairer.running.get_mut(token) else { return };
        let shard = ShardId { segment: repair.segment.of(self.basis.config.volume), index: repair.header_from };
        let header = match reply {
            Reply::ShardHeader => ShardHeader::decode(shard, payload).ok(),
            _ => None,
        };
        if header.is_none() {
            return self.ask_repair_header(token, out);
        }
        repair.header = header;
        self.finish_repair(token, out);
    }

    pub(crate) fn on_repair_read(&mut self, token: Token, index: u8, reply: &Reply, payload: Buf, out: Out) {
        let Some(repair) = self.repairer.running.get_mut(token) else { return };
        repair.asked &= !(1 << index);
        if matches!(reply, Reply::Shard { .. }) {
            repair.got.insert(index, payload);
            return self.finish_repair(token, out);
        }
        repair.bad |= 1 << index;
        if matches!(reply, Reply::Refused(Refusal::Checksum)) {
            repair.damaged |= 1 << index;
        }
        self.ask_repair_shards(token, out);
    }

    /// A connection was lost on the way: begin again later.
    pub(crate) fn on_repair_lost(&mut self, token: Token) {
        self.end_repair(token, true);
    }

    fn finish_repair(&mut self, token: Token, out: Out) {
        let Some(repair) = self.repairer.running.get(token) else { return };
        if repair.by_target {
            return self.order_shard(token, out);
        }
        let Some(info) = self.segments.get(repair.segment) else { return self.end_repair(token, false) };
        let geometry = info.geometry;
        let (Some(header), false) = (&repair.header, repair.putting) else { return };
        let itself = repair.got.get(&repair.index);
        if itself.is_some_and(|bytes| header.shard.index != repair.index || block_crcs(bytes) != header.block_crcs) {
            // It is not what it was: it is made again from the others.
            let repair = self.repairer.running.get_mut(token).expect("just seen");
            repair.bad |= 1 << repair.index;
            repair.got.remove(&repair.index);
            return self.ask_repair_shards(token, out);
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
            return self.clear_damaged(token, out);
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
                return self.end_repair(token, true);
            }
            bytes.freeze()
        };
        let shard = ShardId { segment: repair.segment.of(self.basis.config.volume), index: repair.index };
        let header = ShardHeader { shard, block_crcs: block_crcs(&data), ..header.clone() }.encode();
        let target = repair.target;
        let request = Request::PutShard {
            device: target.device,
            volume: self.basis.config.volume,
            epoch: self.epoch(),
            shard,
            header_blocks: (header.len() / BLOCK_BYTES) as u32,
        };
        let payload = vec![Buf::copy_from(&header), data];
        self.repairer.running.get_mut(token).expect("just seen").putting = true;
        if self.send(target.node, Lane::Bulk, Purpose::RepairPut { repair: token }, request, payload, out).is_none() {
            self.end_repair(token, true);
        }
    }

    /// A shard is never changed in place: what may be left of it goes first.
    fn clear_damaged(&mut self, token: Token, out: Out) {
        let repair = self.repairer.running.get_mut(token).expect("checked by the caller");
        repair.putting = true;
        let (target, index, segment) = (repair.target, repair.index, repair.segment);
        let shard = ShardId { segment: self.basis.segment_id(segment), index };
        let (volume, epoch) = (self.basis.config.volume, self.epoch());
        let request = Request::DeleteShards { device: target.device, volume, epoch, shards: vec![shard] };
        let purpose = Purpose::RepairClear { repair: token };
        if self.send(target.node, Lane::Bulk, purpose, request, Vec::new(), out).is_none() {
            self.end_repair(token, true);
        }
    }

    pub(crate) fn on_repair_clear(&mut self, token: Token, reply: &Reply, out: Out) {
        let Some(repair) = self.repairer.running.get_mut(token) else { return };
        if *reply != Reply::Done {
            return self.end_repair(token, true);
        }
        repair.cleared = true;
        repair.putting = false;
        self.finish_repair(token, out);
    }

    pub(crate) fn on_repair_put(&mut self, token: Token, reply: &Reply, out: Out) {
        let Some(repair) = self.repairer.running.get(token) else { return };
        if *reply != Reply::Done {
            return self.end_repair(token, true);
        }
        match repair.is_move {
            true => self.counters.shards_moved += 1,
            false => self.counters.shards_rebuilt += 1,
        }
        let (segment, index, target) = (repair.segment, repair.index, repair.target);
        if !self.repairer.listing.is_empty() {
            self.repairer.put_meanwhile.insert((segment, index));
        }
        let home = self.segments.get(segment).map(|i| i.homes[usize::from(index)]);
        if let Some(former) = home.filter(|home| *home != target) {
            // Until this is complete the shard is where nothing names it: the repair goes on, which exempts it.
            let record = Record::Rehome { segment, homes: vec![(index, target)] };
            self.append_control(record, Done::Rehomed { repair: token, shard: (segment, index), former }, out);
        } else {
            self.end_repair(token, false);
            self.go_on_repairing(out);
        }
    }

    pub(crate) fn on_rehomed(&mut self, token: Token, (segment, index): (SegmentNo, u8), former: Leg, out: Out) {
        self.end_repair(token, false);
        // Nothing names it there any more.
        self.repairer.note_stray((former, segment, index));
        self.go_on_repairing(out);
    }

    /// One is done: the next is not put off to the next tick.
    fn go_on_repairing(&mut self, out: Out) {
        if self.state == State::Open {
            self.start_repairs(out);
            self.drive_moves(out);
        }
    }

    fn end_repair(&mut self, token: Token, again: bool) {
        let Some(repair) = self.repairer.running.remove(token) else { return };
        let Repair { segment, index, target, is_move, damaged, .. } = repair;
        let home = self.segments.get(segment).map(|info| info.homes[usize::from(index)]);
        if (repair.cleared || repair.by_target) && repair.putting && home != Some(target) {
            // Lost on the way, or the segment died meanwhile: it may lie there, or arrive yet.
            self.repairer.note_stray((target, segment, index));
        }
        if again && !is_move && home.is_some() {
            self.repairer.queue.insert((segment, index));
            let waited = self.repairer.paused.get(&(segment, index)).map_or(REPAIR_PAUSE_MIN / 2, |(_, span)| *span);
            let is_urgent = damaged == 0 && self.need_of(segment, Some(index)) == Need::AtRisk;
            let pause = (waited * 2).min(if is_urgent { REPAIR_PAUSE_AT_RISK } else { REPAIR_PAUSE_MAX });
            self.repairer.paused.insert((segment, index), (self.basis.now + pause, pause));
        } else {
            self.repairer.paused.remove(&(segment, index));
        }
    }
}
