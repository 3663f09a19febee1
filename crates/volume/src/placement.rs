//! Where new things go: legs of a ledger, homes of a segment. One fault domain (node) each, weighted by free space; of a nested
//! layout several devices in each of two nodes.

use crate::controller::Controller;
use crate::peers::Node;
use crate::pressure::{crowding, free_sixteenths};
use crate::reserve::Keep;
use crate::tiers::Place;
use holdfast_base::{MediaClass, NodeId};
use holdfast_format::geometry::{Geometry, Layout};
use holdfast_format::ledger::{AckRule, LEGS_MAX, Leg};
use holdfast_format::wire::DeviceStat;
use std::time::Duration;

/// How long all other nodes must have been out before copies are put onto devices of one: a pause of theirs is waited out.
const ALONE_AFTER: Duration = Duration::from_millis(200);

/// What a shard leaves of a device's reserve, and the class of media that it goes to; any where none is named.
pub(crate) type Target = (Keep, Option<MediaClass>);

/// Whether the device is of that class of media.
pub(crate) fn is_of(device: &DeviceStat, media: Option<MediaClass>) -> bool {
    media.is_none() || device.media == media
}

/// Ranks devices by their media; those of which nothing is known stand with SSDs.
fn speed(device: &DeviceStat) -> u64 {
    device.media.unwrap_or(MediaClass::Ssd) as u64
}

impl Controller {
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
        let failures = self.root().layout.failures();
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
        if self.basis.config.mutations.both_copies_on_one_node {
            let both = nodes.iter().find(|(_, legs)| legs.len() >= 2)?;
            return Some((both.1[..2].to_vec(), AckRule { copies: 2, domains: 1 }));
        }
        let wanted = 2 * usize::from(failures) + 1;
        let paired: Vec<&Vec<Leg>> = nodes.iter().map(|(_, legs)| legs).filter(|legs| legs.len() >= 2).collect();
        if self.root().layout.is_nested() && paired.len() >= 2 {
            let paired = &paired[..paired.len().min(wanted)];
            // Each entry goes to two devices in each of two nodes: with two nodes a third device is a standby, else a third node is.
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
        let rule = AckRule { copies: domains.max(self.copies_alone()), domains };
        rule.is_satisfiable(&legs).then_some((legs, rule))
    }

    /// Whether a ledger chosen now would tolerate more than the open one does.
    pub(crate) fn better_ledger_possible(&self) -> bool {
        let Some(open) = &self.log.open else { return false };
        let failures = self.root().layout.failures();
        let wanted = (2 * usize::from(failures) + 1).min(LEGS_MAX);
        let best = self.rule_now();
        let usable_domains = if best == AckRule::NESTED { self.nodes_with(2) } else { self.domain_count() };
        let usable = self.usable_legs();
        let stays = |leg: &Leg| !self.peers.is_draining(leg.device) && !self.peers.is_bypassed(leg.device);
        let legs = open.legs.iter().enumerate().filter(|(i, leg)| usable >> i & 1 == 1 && stays(leg));
        let mut domains: Vec<NodeId> = legs.map(|(_, leg)| leg.node).collect();
        if !self.basis.is_on_devices() {
            domains.sort_unstable();
            domains.dedup();
        }
        // Of a nested ledger a node has several legs: one that is to go does not take the node with it.
        let is_nested = best == AckRule::NESTED && open.rule == best;
        let is_leaving = is_nested && open.legs.iter().any(|leg| !stays(leg))
            || open.legs.iter().any(|leg| self.peers.is_draining(leg.device));
        domains.len() < wanted.min(usable_domains)
            || is_leaving
            || !open.rule.is_at_least(best)
            || open.rule != best && usable_domains > failures.into()
    }

    /// What the log wants: what it acknowledges bears as much as the layout does.
    pub(crate) fn full_rule(&self) -> AckRule {
        let layout = self.root().layout;
        match layout.is_nested() {
            true => AckRule::NESTED,
            false if layout.is_on_devices() => AckRule::on_devices(layout.failures()),
            false => AckRule::flat(layout.failures()),
        }
    }

    /// The same, as far as there are nodes and devices for it: that of a ledger that is chosen now.
    pub(crate) fn rule_now(&self) -> AckRule {
        let (full, failures) = (self.full_rule(), self.root().layout.failures());
        let usable = self.peers.usable_count();
        if self.basis.is_on_devices() {
            return self.rule_over(self.domain_count(), failures);
        }
        if full == AckRule::NESTED && self.nodes_with(2) >= 2 {
            return full;
        }
        if usable > usize::from(failures) {
            return AckRule::flat(failures);
        }
        let domains = usable.max(1) as u8;
        AckRule { copies: domains.max(self.copies_alone()), domains }
    }

    /// Copies in the log while one node is left. What bears the loss of a node and of a device of the other, or of devices
    /// wherever they are, goes on with the last device, when it has come to that.
    pub(crate) fn copies_alone(&self) -> u8 {
        let layout = self.root().layout;
        if (layout.is_nested() || layout.is_on_devices()) && self.is_last_device() { 1 } else { 2 }
    }

    /// Usable nodes that have so many devices which take shards.
    pub(crate) fn nodes_with(&self, devices: usize) -> usize {
        let usable = self.peers.usable();
        let takers = |n: &Node| n.devices().filter(|d| self.peers.takes_shards(d)).count();
        usable.filter(|(_, n)| takers(n) >= devices).count()
    }

    /// The same, of a class of media.
    pub(crate) fn nodes_with_of(&self, devices: usize, media: Option<MediaClass>) -> usize {
        let usable = self.peers.usable();
        let is_taker = |d: &&DeviceStat| self.peers.takes_shards(d) && is_of(d, media);
        usable.filter(|(_, n)| n.devices().filter(is_taker).count() >= devices).count()
    }

    /// Whether a whole segment would find homes.
    pub(crate) fn could_place(&self, place: Place, shard_bytes: u64, keep: Keep) -> bool {
        if self.basis.is_on_devices() {
            let usable = self.peers.usable();
            let fits = |(id, d): &(NodeId, &DeviceStat)| self.fits_shard(*id, d, shard_bytes, (keep, place.media));
            let devices = usable.flat_map(|(id, n)| n.devices().map(move |d| (id, d)));
            return devices.filter(fits).count() >= usize::from(place.layout.width());
        }
        let each = usize::from(place.layout.shards_a_domain());
        let has_room = |(id, node): &(NodeId, &Node)| {
            let fits = |d: &&DeviceStat| self.fits_shard(*id, d, shard_bytes, (keep, place.media));
            node.is_usable() && node.devices().filter(fits).count() >= each
        };
        self.peers.iter().filter(has_room).count() >= usize::from(place.layout.width())
    }

    /// Homes of a whole segment: those of one fault domain follow each other.
    pub(crate) fn place_segment(&mut self, place: Place, shard_bytes: u64, keep: Keep) -> Option<Vec<Leg>> {
        let (layout, room) = (place.layout, (keep, place.media));
        if self.basis.is_on_devices() {
            return self.place_on_devices(usize::from(layout.width()), shard_bytes, room);
        }
        if !layout.is_nested() {
            return self.place_shards(usize::from(layout.width()), shard_bytes, &[], room);
        }
        let each = usize::from(layout.shards_a_domain());
        let mut nodes: Vec<(u64, Vec<Leg>)> = Vec::new();
        for (id, node) in self.peers.usable() {
            let fits = |d: &&DeviceStat| self.fits_shard(id, d, shard_bytes, room);
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
    pub(crate) fn draw(&mut self, weights: impl Iterator<Item = u64> + Clone) -> Option<usize> {
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

    pub(crate) fn fits_shard(&self, node: NodeId, d: &DeviceStat, shard_bytes: u64, (keep, media): Target) -> bool {
        self.peers.takes_shards(d)
            && is_of(d, media)
            && d.free_bytes >= keep.bytes(&self.basis.config, d) + shard_bytes
            && self.peers.may_hold(Leg { node, device: d.device }, shard_bytes)
    }

    /// Another home for one shard of a segment, not on these nodes: of a nested one in the fault domain of its fellows, where
    /// those still are. On the class of media that is named, if that has room.
    pub(crate) fn place_again(
        &mut self,
        shape: (&Geometry, &[Leg]),
        index: u8,
        shard_bytes: u64,
        failed: &[NodeId],
        (keep, media): Target,
    ) -> Option<Leg> {
        let there = self.place_again_on(shape, index, shard_bytes, failed, (keep, media));
        if there.is_some() || media.is_none() {
            return there;
        }
        self.place_again_on(shape, index, shard_bytes, failed, (keep, None))
    }

    fn place_again_on(
        &mut self,
        (geometry, homes): (&Geometry, &[Leg]),
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
                if !homes.contains(&leg) && self.fits_shard(id, d, shard_bytes, room) {
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
    pub(crate) fn place_shards(
        &mut self,
        count: usize,
        shard_bytes: u64,
        avoid: &[NodeId],
        room: Target,
    ) -> Option<Vec<Leg>> {
        let is_alone = self.is_alone();
        let mut pool: Vec<(Leg, u64)> = Vec::new();
        for (id, node) in self.peers.iter() {
            if !node.is_usable() || avoid.contains(&id) {
                continue;
            }
            let fits = |d: &&DeviceStat| self.fits_shard(id, d, shard_bytes, room);
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

    /// Whether one node is left, with two devices at least, and the others have been out for a while: then copies lie on
    /// two of its devices, and go apart when others are back.
    pub(crate) fn is_alone(&self) -> bool {
        self.is_last_node() && self.usable_devices().nth(1).is_some()
    }

    /// One device of one node is left, and has been for a while.
    fn is_last_device(&self) -> bool {
        // Others of its node may be about to open.
        let may_appear =
            |node: &Node| node.is_up() && (node.has_opening_device() || node.may_have_more_devices(self.basis.now));
        self.is_last_node()
            && self.usable_devices().count() == 1
            && !self.peers.iter().any(|(_, node)| may_appear(node))
    }

    fn is_last_node(&self) -> bool {
        let is_out = |node: &Node| {
            let since = node.out_since().unwrap_or(self.basis.opened_at);
            node.is_usable() || self.basis.now.since(since) >= ALONE_AFTER
        };
        self.peers.usable_count() == 1 && self.peers.iter().all(|(_, node)| is_out(node))
    }

    /// What is written while one node is left.
    fn layout_alone(&self) -> Option<Layout> {
        if self.copies_alone() == 1 {
            return Some(Layout::Mirror { copies: 1 });
        }
        self.is_alone().then_some(Layout::Mirror { copies: 2 })
    }

    /// Devices of usable nodes that take shards.
    pub(crate) fn usable_devices(&self) -> impl Iterator<Item = &DeviceStat> {
        let usable = self.peers.usable().flat_map(|(_, n)| n.devices());
        usable.filter(|d| self.peers.takes_shards(d))
    }

    /// The layout to write new segments in, with the nodes usable now. With a single device left nothing is destaged: the
    /// log keeps what is written.
    pub(crate) fn layout_now(&self) -> Option<Layout> {
        let layout = self.root().layout;
        match self.domain_count() {
            0 | 1 => self.layout_alone(),
            _ if self.nodes_with(layout.shards_a_domain().into()) < usize::from(layout.width())
                && layout.is_nested() =>
            {
                // Four copies, where there are devices for them, bear the same as what is coded does.
                Some(if self.nodes_with(2) >= 2 { Layout::NestedMirror } else { Layout::Mirror { copies: 2 } })
            }
            usable => layout.adapted_to(usable),
        }
    }

    /// Metadata is mirrored, so that a small page is one small read: one copy more than failures tolerated.
    pub(crate) fn meta_layout_now(&self) -> Option<Layout> {
        match usize::from(self.root().layout.failures() + 1).min(self.domain_count()) {
            0 | 1 => self.layout_alone(),
            _ if self.root().layout.is_nested() && self.nodes_with(2) >= 2 => Some(Layout::NestedMirror),
            copies => Some(Layout::Mirror { copies: copies as u8 }),
        }
    }

    /// Whether shards of a segment can lie on nodes of their own, as many as the layout tolerates to lose and one more.
    pub(crate) fn can_spread(&self) -> bool {
        self.domain_count() > usize::from(self.root().layout.failures())
    }

    /// Whether metadata of this shape has fewer copies than the volume's policy asks for.
    pub(crate) fn is_narrow_metadata(&self, geometry: &Geometry) -> bool {
        match self.root().layout.is_nested() {
            true => geometry.layout() != Layout::NestedMirror,
            false => geometry.shard_count() <= self.root().layout.failures(),
        }
    }

    /// Whether metadata of this shape would have more copies if they were written now.
    pub(crate) fn could_be_wider(&self, geometry: &Geometry) -> bool {
        self.meta_layout_now().is_some_and(|now| now.shard_count() > geometry.shard_count())
    }

    /// Whether a segment of this shape is narrower than the volume's policy asks, and could be written better now.
    pub(crate) fn wants_recode(&self, geometry: &Geometry) -> bool {
        if self.is_of_policy(geometry) {
            return false;
        }
        let layout = self.root().layout;
        let now = self.layout_now();
        let bears_more = |now: Layout| Geometry::new(now, 1).failures() > geometry.failures();
        let may_be_between = layout.is_nested() || layout.is_on_devices();
        now == Some(layout) || may_be_between && now.is_some_and(bears_more)
    }
}
