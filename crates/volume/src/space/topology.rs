//! What there is for the volume, by its policy and what is known of nodes and devices: fault domains, layouts and rules
//! that can be had now, and whether what was written bears what it is to bear.
//!
//! Role: a view, made anew for each question; it changes nothing. Fault domains are nodes, or devices where the layout
//! is over these. Such a volume bears the loss of devices, not of a node; it goes on with its last device, in one copy,
//! as that is what it promises; until there is another one it shows as at risk.

use super::governor::Need;
use super::reserve::Keep;
use crate::basis::Basis;
use crate::peers::{Node, Peers};
use crate::segment::SegmentInfo;
use holdfast_base::{MediaClass, NodeId};
use holdfast_format::geometry::{Geometry, Layout};
use holdfast_format::ledger::{AckRule, LEGS_MAX, Leg};
use holdfast_format::record::SegmentNo;
use holdfast_format::root::Root;
use holdfast_format::wire::DeviceStat;
use std::time::Duration;

/// How long all other nodes must have been out before copies are put onto devices of one: a pause of theirs is waited
/// out.
const ALONE_AFTER: Duration = Duration::from_millis(200);

/// Where a segment may be written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    pub(crate) layout: Layout,
    /// Any where none is named.
    pub(crate) media: Option<MediaClass>,
}

/// What a shard leaves of a device's reserve, and the class of media that it goes to; any where none is named.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    pub(crate) keep: Keep,
    pub(crate) media: Option<MediaClass>,
}

/// Whether the device is of that class of media.
pub(crate) fn is_of(device: &DeviceStat, media: Option<MediaClass>) -> bool {
    media.is_none() || device.media == media
}

#[derive(Clone, Copy)]
pub(crate) struct Topology<'a> {
    pub(crate) basis: &'a Basis,
    pub(crate) peers: &'a Peers,
}

impl<'a> Topology<'a> {
    pub(crate) fn new(basis: &'a Basis, peers: &'a Peers) -> Topology<'a> {
        Topology { basis, peers }
    }

    pub(crate) fn peers(self) -> &'a Peers {
        self.peers
    }

    pub(super) fn root(self) -> &'a Root {
        self.basis.root()
    }

    /// Usable fault domains: devices, or nodes.
    pub(crate) fn domain_count(self) -> usize {
        if self.basis.is_on_devices() { self.usable_devices().count() } else { self.peers.usable_count() }
    }

    /// What a ledger on so many devices promises: all of them have every entry where there are no more than copies.
    pub(crate) fn rule_over(self, devices: usize, failures: u8) -> AckRule {
        if devices > usize::from(failures) {
            return AckRule::on_devices(failures);
        }
        AckRule { copies: (devices as u8).max(self.copies_alone()), domains: 0 }
    }

    /// Whether a shard may lie there beside the others of its segment: on a device of its own, and, where fault domains
    /// are nodes, on no node that another domain's shards are on.
    pub(crate) fn may_lie(self, geometry: &Geometry, homes: &[Leg], index: u8, there: Leg) -> bool {
        let domain = geometry.domain_of(index);
        let is_on_devices = self.basis.is_on_devices();
        let mut others = homes.iter().enumerate().filter(|(i, _)| *i != usize::from(index));
        others.all(|(i, home)| {
            home.device != there.device
                && (is_on_devices || home.node != there.node || geometry.domain_of(i as u8) == domain)
        })
    }

    /// Whether it is another volume's segment whose shards lie closer together than this volume's fault domains: then
    /// this volume writes what it sees of it anew.
    pub(crate) fn is_crowded_foreign(self, no: SegmentNo, info: &SegmentInfo) -> bool {
        self.basis.is_foreign(no) && info.is_visible() && self.crowded(&info.geometry, &info.homes).is_some()
    }

    /// The first shard that may not lie where it does.
    pub(crate) fn crowded(self, geometry: &Geometry, homes: &[Leg]) -> Option<u8> {
        (0..geometry.shard_count()).find(|index| !self.may_lie(geometry, homes, *index, homes[usize::from(*index)]))
    }

    // ---- rules of ledgers ----

    /// Whether a ledger chosen now would tolerate more than one of these legs, of which those in the mask are usable.
    pub(crate) fn better_ledger_possible(self, open: &[Leg], rule: AckRule, usable: u8) -> bool {
        let failures = self.root().layout.failures();
        let best = self.rule_now();
        let stays = |leg: &Leg| !self.peers.is_draining(leg.device) && !self.peers.is_bypassed(leg.device);
        let staying = open.iter().enumerate().filter(|(i, leg)| usable >> i & 1 == 1 && stays(leg));
        // Of a nested ledger a node has several legs: one that is to go does not take the node with it.
        let is_nested = best == AckRule::NESTED && rule == best;
        let is_leaving = is_nested && open.iter().any(|leg| !stays(leg))
            || open.iter().any(|leg| self.peers.is_draining(leg.device));
        self.is_ledger_short(staying.map(|(_, leg)| leg))
            || is_leaving
            || !rule.is_at_least(best)
            || rule != best && self.domains_for(best) > failures.into()
    }

    /// Whether a ledger chosen now would have legs in more domains than these. Of the others one is lost, perhaps: if the
    /// next goes, too, nobody can tell whether the rest have all that was acknowledged.
    pub(crate) fn is_ledger_short<'l>(self, legs: impl Iterator<Item = &'l Leg>) -> bool {
        let wanted = (2 * usize::from(self.root().layout.failures()) + 1).min(LEGS_MAX);
        let mut domains: Vec<NodeId> = legs.map(|leg| leg.node).collect();
        if !self.basis.is_on_devices() {
            domains.sort_unstable();
            domains.dedup();
        }
        domains.len() < wanted.min(self.domains_for(self.rule_now()))
    }

    fn domains_for(self, rule: AckRule) -> usize {
        if rule == AckRule::NESTED { self.nodes_with(2) } else { self.domain_count() }
    }

    /// What the log wants: what it acknowledges bears as much as the layout does.
    pub(crate) fn full_rule(self) -> AckRule {
        let layout = self.root().layout;
        match layout.is_nested() {
            true => AckRule::NESTED,
            false if layout.is_on_devices() => AckRule::on_devices(layout.failures()),
            false => AckRule::flat(layout.failures()),
        }
    }

    /// The same, as far as there are nodes and devices for it: that of a ledger that is chosen now.
    pub(crate) fn rule_now(self) -> AckRule {
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

    /// Copies in the log while one node is left. What bears the loss of a node and of a device of the other, or of
    /// devices wherever they are, goes on with the last device, when it has come to that.
    pub(crate) fn copies_alone(self) -> u8 {
        let layout = self.root().layout;
        if (layout.is_nested() || layout.is_on_devices()) && self.is_last_device() { 1 } else { 2 }
    }

    /// Usable nodes that have so many devices which take shards.
    pub(crate) fn nodes_with(self, devices: usize) -> usize {
        let usable = self.peers.usable();
        let takers = |n: &Node| n.devices().filter(|d| self.peers.takes_shards(d)).count();
        usable.filter(|(_, n)| takers(n) >= devices).count()
    }

    /// The same, of a class of media.
    pub(crate) fn nodes_with_of(self, devices: usize, media: Option<MediaClass>) -> usize {
        let usable = self.peers.usable();
        let is_taker = |d: &&DeviceStat| self.peers.takes_shards(d) && is_of(d, media);
        usable.filter(|(_, n)| n.devices().filter(is_taker).count() >= devices).count()
    }

    /// Whether a whole segment would find homes.
    pub(crate) fn could_place(self, place: Place, shard_bytes: u64, keep: Keep) -> bool {
        if self.basis.is_on_devices() {
            let usable = self.peers.usable();
            let fits = |(id, d): &(NodeId, &DeviceStat)| {
                self.fits_shard(*id, d, shard_bytes, Target { keep, media: place.media })
            };
            let devices = usable.flat_map(|(id, n)| n.devices().map(move |d| (id, d)));
            return devices.filter(fits).count() >= usize::from(place.layout.width());
        }
        let each = usize::from(place.layout.shards_a_domain());
        let has_room = |(id, node): &(NodeId, &Node)| {
            let fits = |d: &&DeviceStat| self.fits_shard(*id, d, shard_bytes, Target { keep, media: place.media });
            node.is_usable() && node.devices().filter(fits).count() >= each
        };
        self.peers.iter().filter(has_room).count() >= usize::from(place.layout.width())
    }

    pub(crate) fn fits_shard(self, node: NodeId, d: &DeviceStat, shard_bytes: u64, room: Target) -> bool {
        self.peers.takes_shards(d)
            && is_of(d, room.media)
            && d.free_bytes >= room.keep.bytes(&self.basis.config, d) + shard_bytes
            && self.peers.may_hold(Leg { node, device: d.device }, shard_bytes)
    }

    /// Whether one node is left, with two devices at least, and the others have been out for a while: then copies lie
    /// on two of its devices, and go apart when others are back.
    pub(crate) fn is_alone(self) -> bool {
        self.is_last_node() && self.usable_devices().nth(1).is_some()
    }

    /// One device of one node is left, and has been for a while.
    fn is_last_device(self) -> bool {
        // Others of its node may be about to open.
        let may_appear =
            |node: &Node| node.is_up() && (node.has_opening_device() || node.may_have_more_devices(self.basis.now));
        self.is_last_node()
            && self.usable_devices().count() == 1
            && !self.peers.iter().any(|(_, node)| may_appear(node))
    }

    fn is_last_node(self) -> bool {
        let is_out = |node: &Node| {
            let since = node.out_since().unwrap_or(self.basis.opened_at);
            node.is_usable() || self.basis.now.since(since) >= ALONE_AFTER
        };
        self.peers.usable_count() == 1 && self.peers.iter().all(|(_, node)| is_out(node))
    }

    /// What is written while one node is left.
    fn layout_alone(self) -> Option<Layout> {
        if self.copies_alone() == 1 {
            return Some(Layout::Mirror { copies: 1 });
        }
        self.is_alone().then_some(Layout::Mirror { copies: 2 })
    }

    /// Devices of usable nodes that take shards.
    pub(crate) fn usable_devices(self) -> impl Iterator<Item = &'a DeviceStat> {
        let usable = self.peers.usable().flat_map(|(_, n)| n.devices());
        usable.filter(move |d| self.peers.takes_shards(d))
    }

    /// The layout to write new segments in, with the nodes usable now. With a single device left nothing is destaged:
    /// the log keeps what is written.
    pub(crate) fn layout_now(self) -> Option<Layout> {
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
    pub(crate) fn meta_layout_now(self) -> Option<Layout> {
        match usize::from(self.root().layout.failures() + 1).min(self.domain_count()) {
            0 | 1 => self.layout_alone(),
            _ if self.root().layout.is_nested() && self.nodes_with(2) >= 2 => Some(Layout::NestedMirror),
            copies => Some(Layout::Mirror { copies: copies as u8 }),
        }
    }

    /// Whether shards of a segment can lie on nodes of their own, as many as the layout tolerates to lose and one more.
    pub(crate) fn can_spread(self) -> bool {
        self.domain_count() > usize::from(self.root().layout.failures())
    }

    /// Whether metadata of this shape has fewer copies than the volume's policy asks for.
    pub(crate) fn is_narrow_metadata(self, geometry: &Geometry) -> bool {
        match self.root().layout.is_nested() {
            true => geometry.layout() != Layout::NestedMirror,
            false => geometry.shard_count() <= self.root().layout.failures(),
        }
    }

    /// Shards that a segment of metadata would have if it were written now: what has fewer could be wider.
    pub(crate) fn meta_shards_now(self) -> u8 {
        self.meta_layout_now().map_or(0, Layout::shard_count)
    }

    /// Whether a segment of this shape is narrower than the volume's policy asks, and could be written better now.
    pub(crate) fn wants_recode(self, geometry: &Geometry) -> bool {
        if self.is_of_policy(geometry) {
            return false;
        }
        let layout = self.root().layout;
        let now = self.layout_now();
        let bears_more = |now: Layout| Geometry::new(now, 1).failures() > geometry.failures();
        let may_be_between = layout.is_nested() || layout.is_on_devices();
        now == Some(layout) || may_be_between && now.is_some_and(bears_more)
    }

    // ---- what segments bear ----

    /// Whether one more loss would take the segment, with shards missing where they can't be used, and where `lacks`
    /// says so.
    pub(crate) fn bears_nothing(self, info: &SegmentInfo, lacks: impl Fn(u8) -> bool) -> bool {
        let is_on_devices = self.basis.is_on_devices();
        let is_beside = |one: &Leg, other: &Leg| {
            if is_on_devices { one.device == other.device } else { one.node == other.node }
        };
        let there: Vec<(u8, Leg)> = info
            .homes
            .iter()
            .enumerate()
            .map(|(index, home)| (index as u8, *home))
            .filter(|(index, home)| self.peers.leg_usable(*home) && !lacks(*index))
            .collect();
        let is_lost_without = |gone: Option<&Leg>| {
            let left = there.iter().filter(|(_, home)| gone.is_none_or(|gone| !is_beside(gone, home)));
            let positions = left.fold(0_u64, |positions, (index, _)| positions | 1 << info.geometry.position(*index));
            positions.count_ones() < u32::from(info.geometry.data)
        };
        is_lost_without(None) || there.iter().any(|(_, home)| is_lost_without(Some(home)))
    }

    /// How much it is needed that the segment's data are moved, or a shard made again: `lacks` says which are missing
    /// or damaged.
    pub(crate) fn need_of(self, info: &SegmentInfo, lacks: impl Fn(u8) -> bool + Copy) -> Need {
        let is_out = |(index, home): (usize, &Leg)| lacks(index as u8) || !self.peers.leg_usable(*home);
        if self.bears_nothing(info, lacks) {
            Need::AtRisk
        } else if info.homes.iter().enumerate().any(is_out) || info.geometry.failures() < self.root().layout.failures()
        {
            Need::Lacking
        } else {
            Need::Choice
        }
    }
}
