//! Fault domains that are devices: legs and homes of a volume whose layout is over devices, whichever nodes these are in.
//!
//! Such a volume bears the loss of devices, not of a node. Where there are several nodes its legs and shards are spread over
//! them all the same, as evenly as room allows: what costs nothing is taken. It goes on with its last device, in one copy,
//! as that is what it promises; until there is another one it shows as at risk.

use crate::controller::Controller;
use crate::placement::Target;
use crate::pressure::crowding;
use crate::segments::{Kind, SegmentInfo};
use holdfast_base::NodeId;
use holdfast_format::geometry::Geometry;
use holdfast_format::ledger::{AckRule, LEGS_MAX, Leg};
use holdfast_format::record::SegmentNo;

impl Controller {
    /// Usable fault domains: devices, or nodes.
    pub(crate) fn domain_count(&self) -> usize {
        if self.basis.is_on_devices() { self.usable_devices().count() } else { self.peers.usable_count() }
    }

    /// Legs and rule of a new ledger over devices: 2f+1 of them where there are that many, taken from the nodes in turn.
    /// Of each node the best comes first.
    pub(crate) fn choose_devices(&mut self, nodes: &[(NodeId, Vec<Leg>)]) -> Option<(Vec<Leg>, AckRule)> {
        let failures = self.root().layout.failures();
        let depth = nodes.iter().map(|(_, legs)| legs.len()).max().unwrap_or(0);
        let mut legs: Vec<Leg> =
            (0..depth).flat_map(|i| nodes.iter().filter_map(move |(_, legs)| legs.get(i).copied())).collect();
        legs.sort_by_key(|leg| self.peers.device(*leg).map_or(2, crowding));
        let rule = self.rule_over(legs.len(), failures);
        if legs.len() > usize::from(failures) {
            // A slow standby is better than none.
            legs.extend(self.peers.slow_standbys());
        }
        legs.truncate((2 * usize::from(failures) + 1).min(LEGS_MAX));
        rule.is_satisfiable(&legs).then_some((legs, rule))
    }

    /// What a ledger on so many devices promises: all of them have every entry where there are no more than copies.
    pub(crate) fn rule_over(&self, devices: usize, failures: u8) -> AckRule {
        if devices > usize::from(failures) {
            return AckRule::on_devices(failures);
        }
        AckRule { copies: (devices as u8).max(self.copies_alone()), domains: 0 }
    }

    /// Homes of a segment on so many devices: each on a node that has the fewest of them, drawn by free space.
    pub(crate) fn place_on_devices(&mut self, count: usize, shard_bytes: u64, room: Target) -> Option<Vec<Leg>> {
        let mut pool: Vec<(Leg, u64)> = Vec::new();
        for (id, node) in self.peers.usable() {
            let fitting = node.devices().filter(|d| self.fits_shard(id, d, shard_bytes, room));
            pool.extend(fitting.map(|d| (Leg { node: id, device: d.device }, d.free_bytes.max(1))));
        }
        let mut homes: Vec<Leg> = Vec::with_capacity(count);
        while homes.len() < count {
            let held = |leg: &Leg| homes.iter().filter(|home| home.node == leg.node).count();
            let fewest = pool.iter().map(|(leg, _)| held(leg)).min()?;
            let nodes: Vec<usize> = (0..pool.len()).filter(|i| held(&pool[*i].0) == fewest).collect();
            let drawn = self.draw(nodes.iter().map(|i| pool[*i].1))?;
            let (leg, _) = pool.remove(nodes[drawn]);
            homes.push(leg);
        }
        for leg in &homes {
            self.peers.charge(*leg, shard_bytes);
        }
        Some(homes)
    }

    /// Another home for one shard, on a device that has none of the segment, not on these nodes; on one that has few.
    pub(crate) fn place_again_on_devices(
        &mut self,
        homes: &[Leg],
        index: u8,
        shard_bytes: u64,
        failed: &[NodeId],
        room: Target,
    ) -> Option<Leg> {
        let others = || homes.iter().enumerate().filter(|(i, _)| *i != usize::from(index)).map(|(_, leg)| leg);
        let mut found: Vec<(usize, u64, Leg)> = Vec::new();
        for (id, node) in self.peers.iter().filter(|(id, node)| node.is_usable() && !failed.contains(id)) {
            let held = others().filter(|home| home.node == id).count();
            for d in node.devices().filter(|d| homes.iter().all(|home| home.device != d.device)) {
                if self.fits_shard(id, d, shard_bytes, room) {
                    found.push((usize::MAX - held, d.free_bytes, Leg { node: id, device: d.device }));
                }
            }
        }
        let (_, _, leg) = found.into_iter().max_by_key(|(fewest, free, _)| (*fewest, *free))?;
        self.peers.charge(leg, shard_bytes);
        Some(leg)
    }

    /// Whether a shard may lie there beside the others of its segment: on a device of its own, and, where fault domains are
    /// nodes, on no node that another domain's shards are on.
    pub(crate) fn may_lie(&self, geometry: &Geometry, homes: &[Leg], index: u8, there: Leg) -> bool {
        let domain = geometry.domain_of(index);
        let is_on_devices = self.basis.is_on_devices();
        let mut others = homes.iter().enumerate().filter(|(i, _)| *i != usize::from(index));
        others.all(|(i, home)| {
            home.device != there.device
                && (is_on_devices || home.node != there.node || geometry.domain_of(i as u8) == domain)
        })
    }

    /// Whether it is another volume's segment whose shards lie closer together than this volume's fault domains: then this volume
    /// writes what it sees of it anew.
    pub(crate) fn is_crowded_foreign(&self, no: SegmentNo, info: &SegmentInfo) -> bool {
        self.basis.is_foreign(no) && info.visible() > 0 && self.crowded(&info.geometry, &info.homes).is_some()
    }

    pub(crate) fn crowded_foreign(&self) -> u64 {
        let foreign = self.segments.iter().take_while(|(no, _)| self.basis.is_foreign(*no));
        let data = foreign.filter(|(_, info)| info.kind == Kind::Data);
        data.filter(|(no, info)| self.is_crowded_foreign(*no, info)).count() as u64
    }

    /// The first shard that may not lie where it does.
    pub(crate) fn crowded(&self, geometry: &Geometry, homes: &[Leg]) -> Option<u8> {
        (0..geometry.shard_count()).find(|index| !self.may_lie(geometry, homes, *index, homes[usize::from(*index)]))
    }
}
