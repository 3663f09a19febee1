//! Rejoin: what a returning node holds is compared with the segment table. What is missing is wanted again, what
//! nothing names is deleted.
//!
//! A shard that was not written for a committed segment is deleted only if its id is of a recovered earlier epoch, or a
//! free record for it is complete (protocol rule 17): ids of this epoch without one are `unsettled` and exempt.

use super::Around;
use super::repair::Repairer;
use crate::api::Out;
use crate::basis::Basis;
use crate::peers::{Ask, Purpose};
use crate::segment::Segments;
use holdfast_base::{DeviceId, NodeId, ShardId};
use holdfast_format::ledger::Leg;
use holdfast_format::record::SegmentNo;
use holdfast_format::wire::{Refusal, Reply, Request};
use std::collections::{BTreeMap, BTreeSet};

/// Shards listed by one request.
const LIST_COUNT: u32 = 4096;

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
            self.want_shards_of_lost_devices(around, id);
            let node = around.peers.get(id).expect("listed");
            let devices: Vec<DeviceId> = node.devices().map(|d| d.device).collect();
            for device in devices {
                self.listing.insert((id, device), BTreeSet::new());
                self.list_shards(around, id, device, None, out);
                let leg = Leg { node: id, device };
                around.peers.send(around.basis.now, ledger_inventory(around.basis, leg), out);
            }
        }
    }

    /// Shards whose device the node has no more, or only as a failed one, are made again elsewhere.
    fn want_shards_of_lost_devices(&mut self, around: &Around<'_>, id: NodeId) {
        if around.peers.get(id).is_none_or(|n| n.may_have_more_devices(around.basis.now)) {
            return;
        }
        let mut lost = Vec::new();
        for (no, info) in around.segments.own() {
            for (index, home) in info.homes.iter().enumerate() {
                if home.node == id && !around.peers.device_serves(*home) {
                    lost.push((no, index as u8));
                }
            }
        }
        for (no, index) in lost {
            self.want(no, index);
        }
    }

    fn list_shards(
        &mut self,
        around: &mut Around<'_>,
        node: NodeId,
        device: DeviceId,
        after: Option<ShardId>,
        out: Out,
    ) {
        let request = Request::ListShards { device, volume: around.basis.volume(), after, count_max: LIST_COUNT };
        around.send_bulk(node, Purpose::Inventory { device }, request, Vec::new(), out);
    }

    pub(crate) fn on_inventory(
        &mut self,
        around: &mut Around<'_>,
        node: NodeId,
        device: DeviceId,
        reply: Reply,
        out: Out,
    ) {
        let Reply::Shards { shards, more } = reply else {
            if reply == Reply::Refused(Refusal::Busy) {
                around.peers.want_inventory(node);
            }
            return;
        };
        let Some(held) = self.listing.get_mut(&(node, device)) else { return };
        let last = shards.last().copied();
        held.extend(shards);
        if more {
            return self.list_shards(around, node, device, last, out);
        }
        let held = self.listing.remove(&(node, device)).expect("just seen");
        self.compare_inventory(around, Leg { node, device }, &held, out);
    }

    fn compare_inventory(&mut self, around: &mut Around<'_>, leg: Leg, held: &BTreeSet<ShardId>, out: Out) {
        let volume = around.basis.volume();
        let mut missing = Vec::new();
        for (no, info) in around.segments.own() {
            for (index, home) in info.homes.iter().enumerate() {
                let shard = ShardId { segment: no.of(volume), index: index as u8 };
                if *home == leg && !held.contains(&shard) {
                    missing.push((no, index as u8));
                }
            }
        }
        for (no, index) in missing {
            if self.put_meanwhile.contains(&(no, index)) {
                around.peers.recheck(around.basis.now, leg.node);
            } else {
                self.want(no, index);
            }
        }
        if self.listing.is_empty() {
            self.put_meanwhile.clear();
        }
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
