//! Rejoin: what a returning node holds is compared with the segment table. What is missing is wanted again, what
//! nothing names is deleted. Nodes list what they hold page by page; a page is compared in slices, before the next one is
//! asked for.
//!
//! A shard that was not written for a committed segment is deleted only if its id is of a recovered earlier epoch, or a
//! free record for it is complete (protocol rule 17): ids of this epoch without one are `unsettled` and exempt.

use super::Around;
use super::repair::Repairer;
use crate::api::Out;
use crate::basis::Basis;
use crate::peers::{Ask, Purpose};
use crate::segment::{InFlight, Segments};
use holdfast_base::{DeviceId, NodeId, ShardId};
use holdfast_format::ledger::Leg;
use holdfast_format::record::SegmentNo;
use holdfast_format::wire::{Refusal, Reply, Request};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

/// Shards listed by one request.
const LIST_COUNT: u32 = 4096;

/// What a device has of the volume, as it is listed, page by page in the order of shards. A page is compared before the
/// next one is asked for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Listing {
    /// Up to there all was compared.
    after: Option<ShardId>,
    /// When the next page was asked for: it may lack them.
    in_flight: InFlight,
    /// What came, until it is compared.
    page: Option<Page>,
}

#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Page {
    shards: BTreeSet<ShardId>,
    /// Nothing is behind it.
    is_last: bool,
    /// The last segment that was compared with it.
    seen: Option<SegmentNo>,
}

/// Asks which ledgers of the volume the device has: those that the root doesn't name will go.
pub(crate) fn ledger_inventory(basis: &Basis, leg: Leg) -> Ask {
    let (volume, epoch, instance) = (basis.volume(), basis.epoch(), basis.config.instance);
    let request = Request::Fence { device: leg.device, volume, epoch, instance };
    Ask::fast(leg.node, Purpose::LedgerInventory { leg }, request)
}

impl Repairer {
    pub(super) fn take_inventories(&mut self, around: &mut Around<'_>, out: Out) {
        for id in around.peers.ids() {
            if !around.peers.begin_inventory(around.basis.now, id) {
                continue;
            }
            self.paused.clear();
            let lost = self.lost_devices(around, id);
            for device in &lost {
                let page = Some(Page { is_last: true, ..Page::default() });
                let in_flight = around.segments.in_flight(around.basis.epoch());
                self.listing.insert(Leg { node: id, device: *device }, Listing { after: None, in_flight, page });
            }
            let node = around.peers.get(id).expect("listed");
            let devices: Vec<DeviceId> = node.devices().map(|d| d.device).collect();
            for device in devices {
                let leg = Leg { node: id, device };
                if !lost.contains(&device) {
                    self.list_shards(around, leg, None, out);
                }
                around.peers.send(around.basis.now, ledger_inventory(around.basis, leg), out);
            }
        }
    }

    /// Devices of a node that it has no more, or only as failed ones, and that segments name: nothing is there.
    fn lost_devices(&self, around: &Around<'_>, id: NodeId) -> Vec<DeviceId> {
        if around.peers.get(id).is_none_or(|n| n.may_have_more_devices(around.basis.now)) {
            return Vec::new();
        }
        let is_lost = |home: &Leg| {
            home.node == id && !around.peers.device_serves(*home) && around.segments.own_shards_on(home.device) > 0
        };
        around.segments.homes().filter(is_lost).map(|home| home.device).collect()
    }

    /// Asks for what is behind that shard.
    fn list_shards(&mut self, around: &mut Around<'_>, leg: Leg, after: Option<ShardId>, out: Out) {
        let in_flight = around.segments.in_flight(around.basis.epoch());
        self.listing.insert(leg, Listing { after, in_flight, page: None });
        let Leg { node, device } = leg;
        let request = Request::ListShards { device, volume: around.basis.volume(), after, count_max: LIST_COUNT };
        around.send_bulk(node, Purpose::Inventory { device, after }, request, Vec::new(), out);
    }

    /// An answer: what the device has behind that shard. Of a list that was begun anew meanwhile, nothing comes of it.
    pub(crate) fn on_inventory(
        &mut self,
        around: &mut Around<'_>,
        leg: Leg,
        after: Option<ShardId>,
        reply: Reply,
        out: Out,
    ) {
        let awaits = |listing: &&mut Listing| listing.after == after && listing.page.is_none();
        let Some(listing) = self.listing.get_mut(&leg).filter(awaits) else { return };
        match reply {
            Reply::Shards { shards, more } => {
                listing.page = Some(Page { shards: shards.into_iter().collect(), is_last: !more, seen: None });
                self.go_on_comparing(around, out);
            }
            reply => {
                if reply == Reply::Refused(Refusal::Busy) {
                    around.peers.want_inventory(leg.node);
                }
                self.end_list(leg);
            }
        }
    }

    fn end_list(&mut self, leg: Leg) {
        self.listing.remove(&leg);
        if self.listing.is_empty() {
            self.put_meanwhile.clear();
        }
    }

    /// Compares what came with the segment table, a slice at a time.
    pub(super) fn go_on_comparing(&mut self, around: &mut Around<'_>, out: Out) {
        if self.compare_at.is_some_and(|at| at > around.basis.now) {
            return;
        }
        self.compare_at = None;
        let is_next = |(leg, listing): (&Leg, &Listing)| listing.page.is_some().then_some(*leg);
        while let Some(leg) = self.listing.iter().find_map(is_next) {
            if around.turn.left(around.basis) == 0 {
                self.compare_at = Some(around.basis.next_slice_at());
                return;
            }
            let mut listing = self.listing.remove(&leg).expect("just found");
            let is_compared = self.compare(around, leg, &mut listing);
            let Some(page) = listing.page.take_if(|_| is_compared) else {
                self.listing.insert(leg, listing);
                continue;
            };
            self.delete_garbage(around, leg, &page.shards, out);
            let last = page.shards.last().copied();
            if page.is_last || last.is_none() {
                self.end_list(leg);
            } else {
                self.list_shards(around, leg, last, out);
            }
        }
    }

    /// Wants what should be among the shards of a page and is not. False when there is more to compare.
    fn compare(&mut self, around: &mut Around<'_>, leg: Leg, listing: &mut Listing) -> bool {
        let Listing { after, in_flight, page: Some(page) } = listing else { return true };
        let volume = around.basis.volume();
        let upto = page.shards.last().copied().filter(|_| !page.is_last);
        let is_of_page = |shard: ShardId| Some(shard) > *after && upto.is_none_or(|upto| shard <= upto);
        let from = after.map(|shard| SegmentNo::from(shard.segment));
        let from = page.seen.map_or(from.map_or(Bound::Unbounded, Bound::Included), Bound::Excluded);
        let ahead = around.segments.own_behind(from);
        let upto = upto.map(|shard| SegmentNo::from(shard.segment));
        let mut ahead = ahead.take_while(|(no, _)| upto.is_none_or(|upto| *no <= upto));
        let (mut looked_at, mut missing) = (0, Vec::new());
        for (no, info) in ahead.by_ref().take(around.turn.left_at_least(around.basis, 1)) {
            (page.seen, looked_at) = (Some(no), looked_at + 1);
            if in_flight.has(no) {
                continue;
            }
            for (index, _) in info.homes.iter().enumerate().filter(|(_, home)| **home == leg) {
                let shard = ShardId { segment: no.of(volume), index: index as u8 };
                if is_of_page(shard) && !page.shards.contains(&shard) {
                    missing.push((no, index as u8));
                }
            }
        }
        let is_all = ahead.next().is_none();
        around.turn.slice("inventory: shards are compared", looked_at);
        for shard in missing {
            if self.put_meanwhile.contains(&shard) {
                around.peers.recheck(around.basis.now, leg.node);
            } else {
                self.want(shard.0, shard.1);
            }
        }
        is_all
    }

    fn delete_garbage(&mut self, around: &mut Around<'_>, leg: Leg, held: &BTreeSet<ShardId>, out: Out) {
        let mut garbage = Vec::new();
        for shard in held {
            let no = SegmentNo::from(shard.segment);
            if self.is_exempt(around, no, shard.index) {
                // Looked at again when its segment's fate is known.
                self.note_stray((leg, no, shard.index));
            } else if is_garbage(around.segments, *shard, leg) {
                garbage.push(*shard);
            }
        }
        around.turn.slice("inventory: shards are compared", held.len());
        for chunk in garbage.chunks(1024) {
            self.delete_shards(around, leg, chunk.to_vec(), out);
        }
    }

    /// Of this shard nothing is deleted yet.
    fn is_exempt(&self, around: &Around<'_>, segment: SegmentNo, index: u8) -> bool {
        let unsettled =
            around.segments.is_unsettled(segment) && !around.basis.config.mutations.clean_after_unknown_append();
        unsettled || self.is_repairing(segment, index)
    }

    fn delete_shards(&mut self, around: &mut Around<'_>, leg: Leg, shards: Vec<ShardId>, out: Out) {
        let request = Request::DeleteShards {
            device: leg.device,
            volume: around.basis.volume(),
            epoch: around.basis.epoch(),
            shards: shards.clone(),
        };
        around.send_bulk(leg.node, Purpose::DeleteShards { shards }, request, Vec::new(), out);
    }

    /// Deletes late shards of settled segments. On a node that is out its next inventory finds them.
    pub(super) fn delete_strays(&mut self, around: &mut Around<'_>, out: Out) {
        for (leg, segment, index) in std::mem::take(&mut self.strays) {
            let shard = around.shard_id(segment, index);
            let late = around.peers.is_late(leg.node);
            if self.is_exempt(around, segment, index) || late && around.peers.is_usable(leg.node) {
                self.strays.insert((leg, segment, index));
            } else if around.peers.is_usable(leg.node) && is_garbage(around.segments, shard, leg) {
                self.delete_shards(around, leg, vec![shard], out);
            }
        }
    }

    pub(crate) fn on_shards_deleted(
        &mut self,
        around: &mut Around<'_>,
        node: NodeId,
        shards: &[ShardId],
        reply: &Reply,
    ) {
        if *reply == Reply::Done {
            around.counters.shards_deleted += shards.len() as u64;
        } else {
            around.peers.recheck(around.basis.now, node);
        }
    }

    /// The free record of these segments is complete: their shards may go.
    pub(crate) fn on_freed(&mut self, around: &mut Around<'_>, freed: Vec<(SegmentNo, Vec<Leg>)>, out: Out) {
        let mut by_leg: BTreeMap<Leg, Vec<ShardId>> = BTreeMap::new();
        for (no, homes) in freed {
            for (index, leg) in homes.into_iter().enumerate() {
                let shard = around.shard_id(no, index as u8);
                by_leg.entry(leg).or_default().push(shard);
            }
        }
        for (leg, shards) in by_leg {
            if around.peers.is_usable(leg.node) {
                self.delete_shards(around, leg, shards, out);
            }
        }
    }
}

/// Nothing names this shard, there, of a segment that is settled.
fn is_garbage(segments: &Segments, shard: ShardId, leg: Leg) -> bool {
    let info = segments.get(SegmentNo::from(shard.segment));
    info.is_none_or(|info| info.homes.get(usize::from(shard.index)) != Some(&leg))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::care::tests::Rig;
    use crate::peers::tests::{leg, sent};
    use crate::segment::tests::{info, no};
    use std::time::Duration;

    const SLICE: usize = 16;
    const SEGMENTS: u64 = 300;
    const PAGE: usize = 40;

    /// Mirrored segments on the first two of three nodes.
    fn rig() -> Rig {
        let mut rig = Rig::new("mirror:2", &[1, 1, 1]);
        rig.basis.config.slice_runs_max = SLICE;
        for counter in 0..SEGMENTS {
            rig.segments.insert(no(0, counter), info(8, 8, &[leg(1, 0), leg(2, 0)]));
            rig.segments.take_number(rig.basis.epoch());
        }
        rig
    }

    /// Answers lists by what each device has, page by page, until all was compared. Gives how many turns it took, and
    /// what was to be deleted on the second node.
    fn compare_all(rig: &mut Rig, repairer: &mut Repairer, held: &[BTreeSet<ShardId>; 2]) -> (usize, Vec<ShardId>) {
        let mut garbage = Vec::new();
        rig.with(|around, out| repairer.take_inventories(around, out));
        for turns in 1..1000 {
            rig.turn = Default::default();
            rig.with(|around, out| repairer.go_on_comparing(around, out));
            for (node, token, request) in sent(&mut rig.out) {
                let call = rig.peers.on_answer(rig.basis.now, node, token).expect("it is waited for");
                match (call.purpose, request) {
                    (Purpose::Inventory { device, after }, Request::ListShards { .. }) => {
                        let nothing = BTreeSet::new();
                        let held = held.get(node.0 as usize - 1).unwrap_or(&nothing);
                        let mut behind = held.iter().copied().filter(|shard| Some(*shard) > after);
                        let shards: Vec<ShardId> = behind.by_ref().take(PAGE).collect();
                        let reply = Reply::Shards { shards, more: behind.next().is_some() };
                        rig.with(|around, out| repairer.on_inventory(around, Leg { node, device }, after, reply, out));
                    }
                    (Purpose::DeleteShards { shards }, _) if node == leg(2, 0).node => garbage.extend(shards),
                    _ => {}
                }
            }
            assert!(rig.turn.sliced <= 2 * (SLICE + PAGE), "{:?}", rig.turn);
            if repairer.listing.is_empty() {
                return (turns, garbage);
            }
            rig.pass(Duration::from_millis(1));
            repairer.verify();
        }
        panic!("it does not end")
    }

    fn held_by(rig: &Rig, index: u8, has: impl Fn(u64) -> bool) -> BTreeSet<ShardId> {
        let shard = |counter| ShardId { segment: rig.basis.segment_id(no(0, counter)), index };
        (0..SEGMENTS).filter(|counter| has(*counter)).map(shard).collect()
    }

    #[test]
    fn what_a_node_lacks_or_has_too_much_is_found_page_by_page_in_slices() {
        let (mut rig, mut repairer) = (rig(), Repairer::default());
        rig.segments.remove(no(0, 14));
        let first = held_by(&rig, 0, |counter| counter != 14);
        let second = held_by(&rig, 1, |counter| counter % 7 != 3);
        let (turns, garbage) = compare_all(&mut rig, &mut repairer, &[first, second]);
        assert!(turns > 2 * SEGMENTS as usize / SLICE, "{turns} turns");
        assert_eq!(garbage, [ShardId { segment: rig.basis.segment_id(no(0, 14)), index: 1 }]);
        for counter in 0..SEGMENTS {
            let wanted = [0, 1].map(|index| repairer.wants(no(0, counter), index));
            assert_eq!(wanted, [false, counter % 7 == 3], "segment {counter}");
        }
    }

    #[test]
    fn a_node_that_has_nothing_lacks_all_and_what_came_meanwhile_is_not_missed() {
        let (mut rig, mut repairer) = (rig(), Repairer::default());
        rig.with(|around, out| repairer.take_inventories(around, out));
        let late = rig.segments.take_number(rig.basis.epoch());
        rig.segments.insert(late, info(8, 8, &[leg(1, 0), leg(2, 0)]));
        rig.peers.want_inventory(leg(1, 0).node);
        let asked = sent(&mut rig.out);
        for (node, token, _) in asked {
            let call = rig.peers.on_answer(rig.basis.now, node, token).expect("it is waited for");
            let Purpose::Inventory { device, after } = call.purpose else { continue };
            let reply = Reply::Shards { shards: Vec::new(), more: false };
            rig.with(|around, out| repairer.on_inventory(around, Leg { node, device }, after, reply, out));
        }
        while !repairer.listing.is_empty() {
            rig.pass(Duration::from_millis(1));
            rig.turn = Default::default();
            rig.with(|around, out| repairer.go_on_comparing(around, out));
        }
        let wanted = |counter| [0, 1].map(|index| repairer.wants(no(0, counter), index));
        assert!((0..SEGMENTS).all(|counter| wanted(counter) == [true; 2]));
        assert!(!repairer.wants(late, 0) && !repairer.wants(late, 1));
    }

    #[test]
    fn what_was_on_a_device_that_failed_is_wanted_without_asking_it() {
        let (mut rig, mut repairer) = (rig(), Repairer::default());
        rig.pass(Duration::from_secs(600));
        rig.peers.on_device_failed(leg(2, 0));
        let held = [held_by(&rig, 0, |_| true), BTreeSet::new()];
        let (turns, garbage) = compare_all(&mut rig, &mut repairer, &held);
        assert!(turns > SEGMENTS as usize / SLICE && garbage.is_empty());
        assert!((0..SEGMENTS).all(|counter| repairer.wants(no(0, counter), 1) && !repairer.wants(no(0, counter), 0)));
    }
}
