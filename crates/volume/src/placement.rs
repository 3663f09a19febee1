//! Where new things go: legs of a ledger, homes of a segment. One fault domain (node) each, weighted by free space.

use crate::controller::Controller;
use crate::pressure::is_roomy;
use crate::space::Keep;
use holdfast_base::NodeId;
use holdfast_format::geometry::{Geometry, Layout};
use holdfast_format::ledger::{AckRule, LEGS_MAX, Leg};
use holdfast_format::wire::DeviceStat;
use std::time::Duration;

/// How long all other nodes must have been out before copies are put onto devices of one: a pause of theirs is waited out.
const ALONE_AFTER: Duration = Duration::from_millis(200);

impl Controller {
    /// Serving devices of usable nodes, best first inside each node by `score`; nodes in random order.
    fn candidates(&mut self, score: impl Fn(&DeviceStat) -> u64) -> Vec<(NodeId, Vec<Leg>)> {
        let mut nodes: Vec<(NodeId, Vec<Leg>)> = Vec::new();
        for (id, node) in self.nodes.iter() {
            if !node.up || node.suspect {
                continue;
            }
            let mut serving: Vec<&DeviceStat> = node.devices.values().filter(|d| self.nodes.takes_shards(d)).collect();
            serving.sort_by_key(|d| std::cmp::Reverse(score(d)));
            let legs: Vec<Leg> = serving.iter().map(|d| Leg { node: id, device: d.device }).collect();
            if !legs.is_empty() {
                nodes.push((id, legs));
            }
        }
        self.rng.shuffle(&mut nodes);
        nodes
    }

    /// Legs and rule of a new ledger: 2f+1 nodes where there are that many, else what is left, never fewer than two
    /// devices (protocol rule 2). Spread: a random device of each node among those with journal space.
    pub(crate) fn choose_legs(&mut self) -> Option<(Vec<Leg>, AckRule)> {
        let failures = self.root().layout.failures();
        let mut nodes = self.candidates(|d| d.journal_bytes.saturating_sub(d.journal_used_bytes) >> 22);
        nodes.sort_by_key(|(_, legs)| !self.nodes.device(legs[0]).is_some_and(is_roomy));
        if self.config.mutations.both_copies_on_one_node {
            let both = nodes.iter().find(|(_, legs)| legs.len() >= 2)?;
            return Some((both.1[..2].to_vec(), AckRule { copies: 2, domains: 1 }));
        }
        let wanted = 2 * usize::from(failures) + 1;
        if nodes.len() > usize::from(failures) {
            // A slow standby is better than none.
            let standbys = self.nodes.last_resorts();
            let legs = nodes.iter().map(|(_, legs)| legs[0]).chain(standbys).take(wanted.min(LEGS_MAX)).collect();
            return Some((legs, AckRule::flat(failures)));
        }
        let domains = nodes.len() as u8;
        let legs: Vec<Leg> = nodes.iter().flat_map(|(_, legs)| legs.iter().copied()).take(LEGS_MAX).collect();
        let rule = AckRule { copies: domains.max(2), domains };
        rule.is_satisfiable(&legs).then_some((legs, rule))
    }

    /// Whether a ledger chosen now would tolerate more than the open one does.
    pub(crate) fn better_ledger_possible(&self) -> bool {
        let Some(open) = &self.log.open else { return false };
        let failures = self.root().layout.failures();
        let wanted = 2 * usize::from(failures) + 1;
        let usable_nodes = self.nodes.usable_count();
        let usable = self.usable_legs();
        let stays =
            |leg: &Leg| !self.nodes.draining.contains(&leg.device) && !self.nodes.bypassed.contains(&leg.device);
        let legs = open.legs.iter().enumerate().filter(|(i, leg)| usable >> i & 1 == 1 && stays(leg));
        let mut domains: Vec<NodeId> = legs.map(|(_, leg)| leg.node).collect();
        domains.sort_unstable();
        domains.dedup();
        domains.len() < wanted.min(usable_nodes)
            || open.rule != AckRule::flat(failures) && usable_nodes > failures.into()
    }

    /// `count` homes on different nodes, none of them in `avoid`, each drawn with its free space as weight. `None` if
    /// fewer nodes have room. Of a node that is alone they are different devices.
    pub(crate) fn place_shards(
        &mut self,
        count: usize,
        shard_bytes: u64,
        avoid: &[NodeId],
        keep: Keep,
    ) -> Option<Vec<Leg>> {
        let is_alone = self.is_alone();
        let mut pool: Vec<(Leg, u64)> = Vec::new();
        for (id, node) in self.nodes.iter() {
            if !node.up || node.suspect || avoid.contains(&id) {
                continue;
            }
            let mut fitting: Vec<&DeviceStat> = node
                .devices
                .values()
                .filter(|d| self.nodes.takes_shards(d) && d.free_bytes >= keep.bytes(&self.config, d) + shard_bytes)
                .filter(|d| self.nodes.may_hold(Leg { node: id, device: d.device }, shard_bytes))
                .collect();
            fitting.sort_by_key(|d| std::cmp::Reverse(d.free_bytes));
            let taken = if is_alone { fitting.len() } else { 1 };
            let legs = fitting.iter().take(taken).map(|d| (Leg { node: id, device: d.device }, d.free_bytes.max(1)));
            pool.extend(legs);
        }
        let mut homes = Vec::with_capacity(count);
        while homes.len() < count {
            let total: u64 = pool.iter().map(|(_, w)| w >> 12).sum::<u64>() + pool.len() as u64;
            if pool.is_empty() {
                return None;
            }
            let mut draw = self.rng.below(total);
            let at = pool.iter().position(|(_, w)| {
                let weight = (w >> 12) + 1;
                let hit = draw < weight;
                draw = draw.saturating_sub(weight);
                hit
            });
            let (leg, _) = pool.remove(at.expect("the draw is below the sum of weights"));
            self.nodes.charge(leg, shard_bytes);
            homes.push(leg);
        }
        Some(homes)
    }

    /// Whether one node is left, with two devices at least, and the others have been out for a while: then copies lie on
    /// two of its devices, and go apart when others are back.
    pub(crate) fn is_alone(&self) -> bool {
        let is_out = |node: &crate::nodes::Node| {
            let since = node.out_since.unwrap_or(self.opened_at);
            node.up && !node.suspect || self.now.since(since) >= ALONE_AFTER
        };
        self.nodes.usable_count() == 1
            && self.nodes.iter().all(|(_, node)| is_out(node))
            && self.usable_devices().nth(1).is_some()
    }

    /// Devices of usable nodes that take shards.
    pub(crate) fn usable_devices(&self) -> impl Iterator<Item = &DeviceStat> {
        let usable = self.nodes.iter().filter(|(_, n)| n.up && !n.suspect).flat_map(|(_, n)| n.devices.values());
        usable.filter(|d| self.nodes.takes_shards(d))
    }

    /// The layout to write new segments in, with the nodes usable now. With a single device left nothing is destaged: the
    /// log keeps what is written.
    pub(crate) fn layout_now(&self) -> Option<Layout> {
        match self.nodes.usable_count() {
            0 | 1 => self.is_alone().then_some(Layout::Mirror { copies: 2 }),
            usable => self.root().layout.adapted_to(usable),
        }
    }

    /// Metadata is mirrored, so that a small page is one small read: one copy more than failures tolerated.
    pub(crate) fn meta_layout_now(&self) -> Option<Layout> {
        match usize::from(self.root().layout.failures() + 1).min(self.nodes.usable_count()) {
            0 | 1 => self.is_alone().then_some(Layout::Mirror { copies: 2 }),
            copies => Some(Layout::Mirror { copies: copies as u8 }),
        }
    }

    /// Whether shards of a segment can lie on nodes of their own, as many as the layout tolerates to lose and one more.
    pub(crate) fn can_spread(&self) -> bool {
        self.nodes.usable_count() > usize::from(self.root().layout.failures())
    }

    /// Whether metadata of this shape has fewer copies than the volume's policy asks for.
    pub(crate) fn is_narrow_metadata(&self, geometry: &Geometry) -> bool {
        geometry.shard_count() <= self.root().layout.failures()
    }

    /// Whether a segment of this shape is narrower than the volume's policy asks, and could be written better now.
    pub(crate) fn wants_recode(&self, geometry: &Geometry) -> bool {
        let layout = self.root().layout;
        geometry.layout() != layout && self.layout_now() == Some(layout)
    }
}
