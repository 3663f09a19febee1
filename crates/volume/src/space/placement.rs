//! Where new things go: legs of a ledger, homes of a segment. One fault domain (node) each, weighted by free space; of
//! a nested layout several devices in each of two nodes. What is placed is taken off what its device is known to have
//! free.

use super::journals::{crowding, free_sixteenths};
use super::reserve::Keep;
use super::topology::{Place, Target, Topology};
use crate::basis::Basis;
use crate::peers::Peers;
use holdfast_base::{MediaClass, NodeId, Prng};
use holdfast_format::geometry::Geometry;
use holdfast_format::ledger::{AckRule, LEGS_MAX, Leg};
use holdfast_format::wire::DeviceStat;

/// Ranks devices by their media; those of which nothing is known stand with SSDs.
fn speed(device: &DeviceStat) -> u64 {
    device.media.unwrap_or(MediaClass::Ssd) as u64
}

/// A segment as it lies.
#[derive(Clone, Copy)]
pub(crate) struct Shape<'a> {
    pub(crate) geometry: &'a Geometry,
    pub(crate) homes: &'a [Leg],
}

/// Chooses; made anew for each choice.
pub(crate) struct Placer<'a> {
    basis: &'a Basis,
    peers: &'a mut Peers,
    rng: &'a mut Prng,
}

impl<'a> Placer<'a> {
    pub(crate) fn new(basis: &'a Basis, peers: &'a mut Peers, rng: &'a mut Prng) -> Placer<'a> {
        Placer { basis, peers, rng }
    }

    fn topology(&self) -> Topology<'_> {
        Topology::new(self.basis, self.peers)
    }

    /// Serving devices of usable nodes, best first inside each node by `score`; nodes in random order.
    fn candidates(&mut self, score: impl Fn(&DeviceStat) -> u64) -> Vec<(NodeId, Vec<Leg>)> {
        let mut nodes: Vec<(NodeId, Vec<Leg>)> = Vec::new();
        for (id, node) in self.peers.iter() {
            if !node.is_usable() {
                continue;
            }
            let mut serving: Vec<&DeviceStat> = node.devices().filter(|d| self.peers.takes_shards(d)).collect();
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
        let failures = self.topology().root().layout.failures();
        // The log goes to the fastest media of each node, if there is room.
        let rank = |d: &DeviceStat| {
            let speed = if crowding(d) == 0 { speed(d) } else { 0 };
            1000 * u64::from(2 - crowding(d)) + 100 * speed + free_sixteenths(d)
        };
        let mut nodes = self.candidates(rank);
        nodes.sort_by_key(|(_, legs)| {
            let best = self.peers.device(legs[0]);
            best.map_or((2, std::cmp::Reverse(0)), |d| (crowding(d), std::cmp::Reverse(speed(d))))
        });
        if self.basis.is_on_devices() {
            return self.choose_devices(&nodes);
        }
        if self.basis.config.mutations.both_copies_on_one_node() {
            let both = nodes.iter().find(|(_, legs)| legs.len() >= 2)?;
            return Some((both.1[..2].to_vec(), AckRule { copies: 2, domains: 1 }));
        }
        let wanted = 2 * usize::from(failures) + 1;
        let paired: Vec<&Vec<Leg>> = nodes.iter().map(|(_, legs)| legs).filter(|legs| legs.len() >= 2).collect();
        if self.topology().root().layout.is_nested() && paired.len() >= 2 {
            let paired = &paired[..paired.len().min(wanted)];
            // Each entry goes to two devices in each of two nodes: with two nodes a third device is a standby, else a
            // third node is.
            let depth = if paired.len() == 2 { 3 } else { 2 };
            let legs = (0..depth).flat_map(|i| paired.iter().filter_map(move |legs| legs.get(i).copied()));
            return Some((legs.collect(), AckRule::NESTED));
        }
        if nodes.len() > usize::from(failures) {
            // A slow standby is better than none.
            let standbys = self.peers.last_resorts();
            let legs = nodes.iter().map(|(_, legs)| legs[0]).chain(standbys).take(wanted.min(LEGS_MAX)).collect();
            return Some((legs, AckRule::flat(failures)));
        }
        let domains = nodes.len() as u8;
        let legs: Vec<Leg> = nodes.iter().flat_map(|(_, legs)| legs.iter().copied()).take(LEGS_MAX).collect();
        let rule = AckRule { copies: domains.max(self.topology().copies_alone()), domains };
        rule.is_satisfiable(&legs).then_some((legs, rule))
    }

    /// Homes of a whole segment: those of one fault domain follow each other.
    pub(crate) fn place_segment(&mut self, place: Place, shard_bytes: u64, keep: Keep) -> Option<Vec<Leg>> {
        let (layout, room) = (place.layout, Target { keep, media: place.media });
        if self.basis.is_on_devices() {
            return self.place_on_devices(usize::from(layout.width()), shard_bytes, room);
        }
        if !layout.is_nested() {
            return self.place_shards(usize::from(layout.width()), shard_bytes, &[], room);
        }
        let each = usize::from(layout.shards_a_domain());
        let mut nodes: Vec<(u64, Vec<Leg>)> = Vec::new();
        for (id, node) in self.peers.usable() {
            let fits = |d: &&DeviceStat| self.topology().fits_shard(id, d, shard_bytes, room);
            let mut fitting: Vec<&DeviceStat> = node.devices().filter(fits).collect();
            fitting.sort_by_key(|d| std::cmp::Reverse(d.free_bytes));
            fitting.truncate(each);
            if fitting.len() == each {
                let free = fitting.iter().map(|d| d.free_bytes).min().unwrap_or(0);
                nodes.push((free, fitting.iter().map(|d| Leg { node: id, device: d.device }).collect()));
            }
        }
        let mut homes = Vec::with_capacity(usize::from(layout.shard_count()));
        for _ in 0..layout.width() {
            let at = self.draw(nodes.iter().map(|(free, _)| *free))?;
            let (_, mut legs) = nodes.swap_remove(at);
            self.rng.shuffle(&mut legs);
            homes.extend(legs);
        }
        for leg in &homes {
            self.peers.charge(*leg, shard_bytes);
        }
        Some(homes)
    }

    /// One of several, each with its weight.
    fn draw(&mut self, weights: impl Iterator<Item = u64> + Clone) -> Option<usize> {
        let total: u64 = weights.clone().map(|w| (w >> 12) + 1).sum();
        if total == 0 {
            return None;
        }
        let mut draw = self.rng.below(total);
        weights.into_iter().position(|w| {
            let weight = (w >> 12) + 1;
            let hit = draw < weight;
            draw = draw.saturating_sub(weight);
            hit
        })
    }

    /// Another home for one shard of a segment, not on these nodes: of a nested one in the fault domain of its fellows,
    /// where those still are. On the class of media that is named, if that has room.
    pub(crate) fn place_again(
        &mut self,
        shape: Shape<'_>,
        index: u8,
        shard_bytes: u64,
        failed: &[NodeId],
        room: Target,
    ) -> Option<Leg> {
        let there = self.place_again_on(shape, index, shard_bytes, failed, room);
        if there.is_some() || room.media.is_none() {
            return there;
        }
        self.place_again_on(shape, index, shard_bytes, failed, Target { media: None, ..room })
    }

    fn place_again_on(
        &mut self,
        Shape { geometry, homes }: Shape<'_>,
        index: u8,
        shard_bytes: u64,
        failed: &[NodeId],
        room: Target,
    ) -> Option<Leg> {
        if self.basis.is_on_devices() {
            return self.place_again_on_devices(homes, index, shard_bytes, failed, room);
        }
        let domain = geometry.domain_of(index);
        let others = homes.iter().enumerate().filter(|(i, _)| *i != usize::from(index));
        let (fellows, strangers): (Vec<_>, Vec<_>) =
            others.map(|(i, leg)| (geometry.domain_of(i as u8), *leg)).partition(|(of, _)| *of == domain);
        let mut avoid: Vec<NodeId> = failed.to_vec();
        avoid.extend(strangers.iter().map(|(_, leg)| leg.node));
        if !geometry.layout().is_nested() {
            return Some(self.place_shards(1, shard_bytes, &avoid, room)?[0]);
        }
        let fellows: Vec<Leg> = fellows.into_iter().map(|(_, leg)| leg).collect();
        let mut found: Vec<(bool, u64, Leg)> = Vec::new();
        for (id, node) in self.peers.usable() {
            let is_home = fellows.iter().any(|leg| leg.node == id);
            for d in node.devices().filter(|_| !avoid.contains(&id)) {
                let leg = Leg { node: id, device: d.device };
                if !homes.contains(&leg) && self.topology().fits_shard(id, d, shard_bytes, room) {
                    found.push((is_home, d.free_bytes, leg));
                }
            }
        }
        let (_, _, leg) = found.into_iter().max_by_key(|(is_home, free, _)| (*is_home, *free))?;
        self.peers.charge(leg, shard_bytes);
        Some(leg)
    }

    /// `count` homes on different nodes, none of them in `avoid`, each drawn with its free space as weight. `None` if
    /// fewer nodes have room. Of a node that is alone they are different devices.
    fn place_shards(&mut self, count: usize, shard_bytes: u64, avoid: &[NodeId], room: Target) -> Option<Vec<Leg>> {
        let is_alone = self.topology().is_alone();
        let mut pool: Vec<(Leg, u64)> = Vec::new();
        for (id, node) in self.peers.iter() {
            if !node.is_usable() || avoid.contains(&id) {
                continue;
            }
            let fits = |d: &&DeviceStat| self.topology().fits_shard(id, d, shard_bytes, room);
            let mut fitting: Vec<&DeviceStat> = node.devices().filter(fits).collect();
            fitting.sort_by_key(|d| std::cmp::Reverse(d.free_bytes));
            let taken = if is_alone { fitting.len() } else { 1 };
            let legs = fitting.iter().take(taken).map(|d| (Leg { node: id, device: d.device }, d.free_bytes.max(1)));
            pool.extend(legs);
        }
        let mut homes = Vec::with_capacity(count);
        while homes.len() < count {
            let at = self.draw(pool.iter().map(|(_, w)| *w))?;
            let (leg, _) = pool.remove(at);
            self.peers.charge(leg, shard_bytes);
            homes.push(leg);
        }
        Some(homes)
    }

    // ---- over devices, whichever nodes these are in: spread over nodes all the same, where that costs nothing ----

    /// Legs and rule of a new ledger over devices: 2f+1 of them where there are that many, taken from the nodes in
    /// turn. Of each node the best comes first.
    fn choose_devices(&mut self, nodes: &[(NodeId, Vec<Leg>)]) -> Option<(Vec<Leg>, AckRule)> {
        let failures = self.topology().root().layout.failures();
        let depth = nodes.iter().map(|(_, legs)| legs.len()).max().unwrap_or(0);
        let mut legs: Vec<Leg> =
            (0..depth).flat_map(|i| nodes.iter().filter_map(move |(_, legs)| legs.get(i).copied())).collect();
        legs.sort_by_key(|leg| self.peers.device(*leg).map_or(2, crowding));
        let rule = self.topology().rule_over(legs.len(), failures);
        if legs.len() > usize::from(failures) {
            // A slow standby is better than none.
            legs.extend(self.peers.slow_standbys());
        }
        legs.truncate((2 * usize::from(failures) + 1).min(LEGS_MAX));
        rule.is_satisfiable(&legs).then_some((legs, rule))
    }

    /// Homes of a segment on so many devices: each on a node that has the fewest of them, drawn by free space.
    fn place_on_devices(&mut self, count: usize, shard_bytes: u64, room: Target) -> Option<Vec<Leg>> {
        let mut pool: Vec<(Leg, u64)> = Vec::new();
        for (id, node) in self.peers.usable() {
            let fitting = node.devices().filter(|d| self.topology().fits_shard(id, d, shard_bytes, room));
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
    fn place_again_on_devices(
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
                if self.topology().fits_shard(id, d, shard_bytes, room) {
                    found.push((usize::MAX - held, d.free_bytes, Leg { node: id, device: d.device }));
                }
            }
        }
        let (_, _, leg) = found.into_iter().max_by_key(|(fewest, free, _)| (*fewest, *free))?;
        self.peers.charge(leg, shard_bytes);
        Some(leg)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::basis::tests::basis;
    use crate::peers::tests::{CAPACITY, leg, peers};
    use holdfast_base::Instant;
    use holdfast_format::geometry::Layout;
    use std::collections::BTreeSet;

    const AT: Instant = Instant(1_000_000_000);

    fn layout(text: &str) -> Layout {
        text.parse().expect("a layout")
    }

    fn place(of: &str, devices: &[u32], shard_bytes: u64) -> Option<Vec<Leg>> {
        let (basis, mut peers, mut rng) = (basis(of), peers(AT, devices), Prng::new(3));
        let place = Place { layout: layout(of), media: None };
        let homes = Placer::new(&basis, &mut peers, &mut rng).place_segment(place, shard_bytes, Keep::Nothing)?;
        for home in &homes {
            assert_eq!(peers.device(*home).map(|d| d.free_bytes), Some(CAPACITY - shard_bytes), "it is taken off");
        }
        Some(homes)
    }

    fn nodes_of(homes: &[Leg]) -> BTreeSet<NodeId> {
        homes.iter().map(|home| home.node).collect()
    }

    #[test]
    fn each_shard_has_a_fault_domain_of_its_own() {
        let homes = place("parity:2+1", &[1, 2, 1, 1], 4096).expect("there are nodes enough");
        assert_eq!((homes.len(), nodes_of(&homes).len()), (3, 3));
        assert_eq!(place("parity:2+1", &[3, 3], 4096), None);
        assert_eq!(place("mirror:2", &[1, 1], CAPACITY + 1), None);
        let homes = place("nested-mirror", &[2, 1, 3], 4096).expect("two nodes have two devices");
        assert_eq!(nodes_of(&homes), BTreeSet::from([NodeId(1), NodeId(3)]));
        assert!(homes[0].node == homes[1].node && homes[0].device != homes[1].device);
        let homes = place("mirror:3@device", &[3, 1], 4096).expect("there are devices enough");
        assert_eq!(homes.iter().filter(|home| home.node == NodeId(2)).count(), 1, "spread over nodes all the same");
    }

    #[test]
    fn another_home_is_on_no_node_that_has_a_shard_or_failed() {
        let (basis, mut peers, mut rng) = (basis("mirror:2"), peers(AT, &[1, 1, 1, 1]), Prng::new(3));
        let geometry = Geometry::new(layout("mirror:2"), 8);
        let shape = Shape { geometry: &geometry, homes: &[leg(1, 0), leg(2, 0)] };
        let room = Target { keep: Keep::FromGuests, media: Some(MediaClass::Ssd) };
        let mut again =
            |failed: &[NodeId]| Placer::new(&basis, &mut peers, &mut rng).place_again(shape, 1, 4096, failed, room);
        assert_eq!(again(&[NodeId(2), NodeId(4)]), Some(leg(3, 0)), "of other media where the named ones have no room");
        assert_eq!(again(&[NodeId(2), NodeId(3), NodeId(4)]), None);
    }

    #[test]
    fn a_ledger_has_a_standby_where_there_is_a_node_for_it() {
        let legs = |of: &str, devices: &[u32]| {
            let (basis, mut peers, mut rng) = (basis(of), peers(AT, devices), Prng::new(3));
            let chosen = Placer::new(&basis, &mut peers, &mut rng).choose_legs();
            chosen.map(|(legs, rule)| (legs.len(), nodes_of(&legs).len(), rule))
        };
        assert_eq!(legs("mirror:2", &[1, 1, 1, 1]), Some((3, 3, AckRule::flat(1))));
        assert_eq!(legs("mirror:2", &[1, 1]), Some((2, 2, AckRule::flat(1))));
        assert_eq!(legs("nested-mirror", &[3, 3]), Some((6, 2, AckRule::NESTED)));
        assert_eq!(legs("mirror:2", &[1]), None);
    }
}
