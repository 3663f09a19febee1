//! What is known of each node and its devices: connection, latency, suspicion, room.

use super::Peers;
use super::call::Class;
use crate::api::Config;
use holdfast_base::{DeviceId, Instant, MediaClass, NodeId};
use holdfast_format::ledger::Leg;
use holdfast_format::wire::{DeviceHealth, DeviceStat, Request};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Smoothed latency and its deviation, as TCP's retransmission timer keeps them (RFC 6298).
#[derive(Clone, Copy, Debug, Default)]
pub struct Latency {
    mean_us: u64,
    deviation_us: u64,
}

impl Latency {
    pub(crate) fn record(&mut self, took: Duration) {
        let us = took.as_micros() as u64;
        if self.mean_us == 0 {
            (self.mean_us, self.deviation_us) = (us.max(1), us / 2);
            return;
        }
        let error = us.abs_diff(self.mean_us);
        self.deviation_us = (self.deviation_us * 15 + error) / 16;
        self.mean_us = ((self.mean_us * 15 + us) / 16).max(1);
    }

    /// Mean and eight deviations: about one request in some thousands of a healthy node takes longer.
    fn bound(&self) -> Duration {
        Duration::from_micros(self.mean_us + 8 * self.deviation_us)
    }
}

/// Each suspicion doubles the patience with the next, up to this many: a machine under load is not outed ten times a
/// second. One is forgotten in each span of calm. Late requests are hedged all the same.
const SUSPICIONS_COUNTED: u32 = 4;
const CALM_AFTER: Duration = Duration::from_secs(5);

/// A node that has just started greets before it has read which devices it has.
pub(super) const DEVICES_APPEAR_WITHIN: Duration = Duration::from_secs(3);

/// What was sent over a connection that broke has been acted on, or never will be, after this long.
const RECHECK_AFTER: Duration = Duration::from_secs(3);

/// A node that could not make a shard is asked to again after this long.
const NOT_MADE_PAUSE: Duration = Duration::from_secs(5);

#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(super) up: bool,
    /// Of the messages that it understands.
    version: u32,
    pub(super) suspect: bool,
    /// When it became suspect or went down.
    pub(super) out_since: Option<Instant>,
    up_since: Instant,
    last_reply: Instant,
    /// When the youngest request that it has answered was sent.
    answered_sent_at: Instant,
    devices: BTreeMap<DeviceId, DeviceStat>,
    latency: BTreeMap<Class, Latency>,
    /// The shell was asked to connect anew and has not reported yet.
    pub(super) reconnecting: bool,
    /// Suspicions in short succession, and the last of them.
    suspicions: u32,
    suspected_at: Instant,
    /// Its holdings were compared with the segment table since it came up.
    pub(super) inventoried: bool,
    /// When to compare again: something may have arrived late.
    recheck_at: Option<Instant>,
    /// It is asked to make shards from then on.
    makes_from: Instant,
}

impl Node {
    /// One that greets.
    fn new(now: Instant, version: u32, devices: BTreeMap<DeviceId, DeviceStat>) -> Node {
        Node {
            up: true,
            version,
            suspect: false,
            out_since: None,
            up_since: now,
            last_reply: now,
            answered_sent_at: now,
            devices,
            latency: BTreeMap::new(),
            reconnecting: false,
            suspicions: 0,
            suspected_at: Instant::ZERO,
            inventoried: false,
            recheck_at: None,
            makes_from: Instant::ZERO,
        }
    }

    pub(crate) fn is_up(&self) -> bool {
        self.up
    }

    pub(crate) fn is_usable(&self) -> bool {
        self.up && !self.suspect
    }

    /// When it became suspect or went down, if it did.
    pub(crate) fn out_since(&self) -> Option<Instant> {
        self.out_since
    }

    pub(crate) fn devices(&self) -> impl Iterator<Item = &DeviceStat> {
        self.devices.values()
    }

    /// It may have said nothing yet of devices that it has.
    pub(crate) fn may_have_more_devices(&self, now: Instant) -> bool {
        now.since(self.up_since) < DEVICES_APPEAR_WITHIN
    }

    /// A device of it does not serve yet, or none is known.
    pub(crate) fn is_opening(&self) -> bool {
        self.devices.is_empty() || self.has_opening_device()
    }

    pub(crate) fn has_opening_device(&self) -> bool {
        self.devices().any(|d| d.health == DeviceHealth::Opening)
    }

    /// What it holds was compared, and nothing is on its way to it.
    pub(super) fn is_compared(&self) -> bool {
        (self.inventoried || self.devices.is_empty()) && self.recheck_at.is_none() && !self.has_opening_device()
    }

    pub(super) fn note_suspicion(&mut self, now: Instant) {
        self.suspicions = self.recent_suspicions(now) + 1;
        self.suspected_at = now;
    }

    fn recent_suspicions(&self, now: Instant) -> u32 {
        let quiet = now.since(self.suspected_at).as_secs() / CALM_AFTER.as_secs();
        self.suspicions.saturating_sub(quiet.min(u64::from(u32::MAX)) as u32).min(SUSPICIONS_COUNTED)
    }

    /// Its holdings are compared once more, when what is on its way to it has arrived.
    pub(super) fn recheck(&mut self, now: Instant) {
        self.recheck_at = Some(now + RECHECK_AFTER);
    }

    pub(super) fn verify(&self, id: NodeId, now: Instant) {
        assert_eq!(self.out_since.is_none(), self.is_usable(), "{id:?} is out since {:?}", self.out_since);
        assert!(self.up_since <= now && self.last_reply <= now, "{id:?} was heard in the future");
        assert!(self.answered_sent_at <= self.last_reply, "{id:?} has answered what was sent later");
    }
}

impl Peers {
    pub(crate) fn on_up(&mut self, now: Instant, id: NodeId, version: u32, devices: Vec<DeviceStat>) {
        let fresh = Node::new(now, version, devices.into_iter().map(|d| (d.device, d)).collect());
        let former = self.nodes.remove(&id);
        let learned = former.map(|node| (node.latency, node.makes_from));
        let (latency, makes_from) = learned.unwrap_or((BTreeMap::new(), Instant::ZERO));
        self.nodes.insert(id, Node { latency, makes_from, ..fresh });
    }

    pub(crate) fn on_down(&mut self, now: Instant, id: NodeId) {
        if let Some(node) = self.nodes.get_mut(&id) {
            node.up = false;
            node.suspect = false;
            node.out_since.get_or_insert(now);
        }
    }

    pub(crate) fn get(&self, id: NodeId) -> Option<&Node> {
        self.nodes.get(&id)
    }

    pub(super) fn get_mut(&mut self, id: NodeId) -> Option<&mut Node> {
        self.nodes.get_mut(&id)
    }

    /// These nodes are of the host's own machine.
    pub(crate) fn set_local(&mut self, nodes: BTreeSet<NodeId>) {
        self.local = nodes;
    }

    pub(crate) fn is_local(&self, id: NodeId) -> bool {
        self.local.contains(&id)
    }

    /// Nothing new goes to these devices.
    pub(crate) fn set_draining(&mut self, devices: BTreeSet<DeviceId>) {
        self.draining = devices;
    }

    pub(crate) fn draining(&self) -> &BTreeSet<DeviceId> {
        &self.draining
    }

    pub(crate) fn is_draining(&self, device: DeviceId) -> bool {
        self.draining.contains(&device)
    }

    pub(crate) fn is_bypassed(&self, device: DeviceId) -> bool {
        self.bypassed.contains(&device)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (NodeId, &Node)> {
        self.nodes.iter().map(|(id, node)| (*id, node))
    }

    /// Nodes that are connected and not suspect.
    pub(crate) fn usable(&self) -> impl Iterator<Item = (NodeId, &Node)> {
        self.iter().filter(|(_, node)| node.is_usable())
    }

    /// Devices of usable nodes, whatever becomes of them.
    pub(crate) fn usable_legs(&self) -> impl Iterator<Item = (Leg, &DeviceStat)> {
        self.usable().flat_map(|(node, n)| n.devices().map(move |d| (Leg { node, device: d.device }, d)))
    }

    pub(crate) fn ids(&self) -> Vec<NodeId> {
        self.nodes.keys().copied().collect()
    }

    pub(crate) fn is_up(&self, id: NodeId) -> bool {
        self.nodes.get(&id).is_some_and(|n| n.up)
    }

    /// Whether the node may be asked to make shards: it understands that, and has not refused one lately.
    pub(crate) fn makes_shards(&self, id: NodeId, now: Instant) -> bool {
        self.nodes.get(&id).is_some_and(|n| n.version >= Request::MAKE_SHARD_SINCE && n.makes_from <= now)
    }

    /// It could not make a shard: it may not reach the others at all, and finding out takes time.
    pub(crate) fn on_not_made(&mut self, id: NodeId, now: Instant) {
        if let Some(node) = self.nodes.get_mut(&id) {
            node.makes_from = now + NOT_MADE_PAUSE;
        }
    }

    /// Whether the node understands the request.
    pub(crate) fn understands(&self, id: NodeId, request: &Request) -> bool {
        self.nodes.get(&id).is_some_and(|n| n.version >= request.since())
    }

    /// Whether all nodes that are there speak that version of the messages.
    pub(crate) fn all_speak(&self, version: u32) -> bool {
        self.nodes.values().all(|node| !node.up || node.version >= version)
    }

    pub(crate) fn is_usable(&self, id: NodeId) -> bool {
        self.nodes.get(&id).is_some_and(|n| n.is_usable())
    }

    pub(crate) fn device(&self, leg: Leg) -> Option<&DeviceStat> {
        self.nodes.get(&leg.node)?.devices.get(&leg.device)
    }

    /// The device's journal is filled to `fill` / 255.
    pub(crate) fn on_journal_fill(&mut self, leg: Leg, fill: u8) {
        if let Some(device) = self.nodes.get_mut(&leg.node).and_then(|n| n.devices.get_mut(&leg.device)) {
            device.journal_used_bytes = device.journal_bytes * u64::from(fill) / 255;
        }
    }

    /// The node is usable and the device serves.
    pub(crate) fn leg_usable(&self, leg: Leg) -> bool {
        self.is_usable(leg.node) && self.device_serves(leg)
    }

    /// That, and it is not bypassed.
    pub(crate) fn leg_preferable(&self, leg: Leg) -> bool {
        self.leg_usable(leg) && !self.bypassed.contains(&leg.device)
    }

    /// The device was serving when last heard of.
    pub(crate) fn device_serves(&self, leg: Leg) -> bool {
        self.device(leg).is_some_and(|d| d.health == DeviceHealth::Serving)
    }

    pub(crate) fn on_device_failed(&mut self, leg: Leg) {
        if let Some(device) = self.nodes.get_mut(&leg.node).and_then(|n| n.devices.get_mut(&leg.device)) {
            device.health = DeviceHealth::Failed;
        }
        if let Some(node) = self.nodes.get_mut(&leg.node) {
            node.inventoried = false;
        }
    }

    /// The device has no room for a shard of that length.
    pub(crate) fn on_refused(&mut self, leg: Leg, bytes: u64) {
        let least = self.refused_bytes.entry(leg).or_insert(bytes);
        *least = bytes.min(*least);
    }

    pub(crate) fn may_hold(&self, leg: Leg, bytes: u64) -> bool {
        self.refused_bytes.get(&leg).is_none_or(|refused| bytes < *refused)
    }

    /// A node tells how its devices are. True where another one serves, or one serves no more.
    pub(crate) fn on_stat(&mut self, id: NodeId, devices: Vec<DeviceStat>) -> bool {
        self.refused_bytes.retain(|leg, _| leg.node != id);
        let mut has_changed = false;
        if let Some(node) = self.nodes.get_mut(&id) {
            let serving = |devices: &BTreeMap<DeviceId, DeviceStat>| -> Vec<DeviceId> {
                devices.values().filter(|d| d.health == DeviceHealth::Serving).map(|d| d.device).collect()
            };
            let before = serving(&node.devices);
            node.devices = devices.into_iter().map(|d| (d.device, d)).collect();
            has_changed = serving(&node.devices) != before;
            node.inventoried &= !has_changed;
        }
        has_changed
    }

    pub(crate) fn usable_count(&self) -> usize {
        let takes_any = |n: &Node| n.devices.values().any(|d| self.takes_shards(d));
        self.nodes.iter().filter(|(_, n)| n.is_usable() && takes_any(n)).count()
    }

    /// Whether anything new may go to the device.
    pub(crate) fn takes_shards(&self, device: &DeviceStat) -> bool {
        self.may_take(device) && !self.bypassed.contains(&device.device)
    }

    /// Whether anything new may go to the device if need be.
    fn may_take(&self, device: &DeviceStat) -> bool {
        device.health == DeviceHealth::Serving && !self.draining.contains(&device.device)
    }

    /// Usable nodes if no device were bypassed.
    pub(crate) fn usable_count_in_need(&self) -> usize {
        let may_take_any = |n: &Node| n.devices.values().any(|d| self.may_take(d));
        self.nodes.iter().filter(|(_, n)| n.is_usable() && may_take_any(n)).count()
    }

    /// Devices of usable nodes if none were bypassed, apart from those of one node.
    pub(crate) fn devices_in_need(&self, without: Option<NodeId>) -> usize {
        let usable = self.nodes.iter().filter(|(id, n)| n.is_usable() && Some(**id) != without);
        usable.flat_map(|(_, n)| n.devices.values()).filter(|d| self.may_take(d)).count()
    }

    /// Bypassed devices that could take something new.
    pub(crate) fn slow_standbys(&self) -> Vec<Leg> {
        let usable = self.nodes.iter().filter(|(_, n)| n.is_usable());
        let devices = usable.flat_map(|(id, n)| n.devices.values().map(|d| (*id, d)));
        let slow = devices.filter(|(_, d)| self.may_take(d) && !self.takes_shards(d));
        slow.map(|(node, d)| Leg { node, device: d.device }).collect()
    }

    /// Bypassed devices that could take something new, one of each usable node that has no better one.
    pub(crate) fn last_resorts(&self) -> Vec<Leg> {
        let usable = self.nodes.iter().filter(|(_, n)| n.is_usable());
        let without = usable.filter(|(_, n)| !n.devices.values().any(|d| self.takes_shards(d)));
        let leg = |(id, n): (&NodeId, &Node)| {
            let device = n.devices.values().find(|d| self.may_take(d))?.device;
            Some(Leg { node: *id, device })
        };
        without.filter_map(leg).collect()
    }

    pub(crate) fn record(&mut self, now: Instant, id: NodeId, class: Class, sent_at: Instant) {
        if let Some(node) = self.nodes.get_mut(&id) {
            node.last_reply = now;
            node.answered_sent_at = node.answered_sent_at.max(sent_at);
            node.latency.entry(class).or_default().record(now.since(sent_at));
        }
    }

    /// After how long an outstanding request to this node is hedged.
    pub(crate) fn hedge_bound(&self, config: &Config, id: NodeId, class: Class) -> Duration {
        let (min, max) = match class {
            Class::Read => (config.read_hedge_min, config.read_hedge_max),
            Class::Append | Class::Control => (config.append_hedge_min, config.append_hedge_max),
            Class::Bulk => (config.append_hedge_min * 4, config.append_hedge_max),
        };
        let learned = self.nodes.get(&id).and_then(|n| n.latency.get(&class)).map(Latency::bound);
        learned.unwrap_or(max / 2).clamp(min, max)
    }

    /// Most of the other usable nodes have answered requests that were sent at that instant: what this one was asked for
    /// before, and owes, is late because of it. Else it is this host, or all of the grid, that is slow.
    pub(crate) fn others_answered_to(&self, id: NodeId) -> Option<Instant> {
        let others = self.nodes.iter().filter(|(other, n)| **other != id && n.is_usable());
        let mut answered: Vec<Instant> = others.map(|(_, n)| n.answered_sent_at).collect();
        answered.sort_unstable_by(|a, b| b.cmp(a));
        answered.get(answered.len().div_ceil(2).saturating_sub(1)).copied()
    }

    /// The newest request that the node has answered was sent at that instant.
    pub(crate) fn answered_to(&self, id: NodeId) -> Instant {
        self.nodes.get(&id).map_or(Instant::ZERO, |n| n.answered_sent_at)
    }

    /// Whether the node has answered something that was sent later than `then`.
    pub(crate) fn has_answered_since(&self, id: NodeId, then: Instant) -> bool {
        self.answered_to(id) > then
    }

    /// Since when the node has said nothing, although something is owed since then.
    pub(crate) fn silent_since(&self, id: NodeId, owed_since: Instant) -> Instant {
        self.nodes.get(&id).map_or(owed_since, |n| owed_since.max(n.last_reply))
    }

    /// How many times the usual patience this node is given.
    pub(crate) fn patience(&self, id: NodeId, now: Instant) -> u32 {
        self.nodes.get(&id).map_or(1, |n| 1 << n.recent_suspicions(now))
    }

    pub(crate) fn suspects(&self) -> Vec<NodeId> {
        self.nodes.iter().filter(|(_, n)| !n.up || n.suspect).map(|(id, _)| *id).collect()
    }

    /// Takes `bytes` off what the device is known to have free, until it is asked again.
    pub(crate) fn charge(&mut self, leg: Leg, bytes: u64) {
        if let Some(device) = self.nodes.get_mut(&leg.node).and_then(|n| n.devices.get_mut(&leg.device)) {
            device.free_bytes = device.free_bytes.saturating_sub(bytes);
        }
    }

    // ---- what they hold ----

    /// Compares what the node holds once more, when what is on its way to it has arrived.
    pub(crate) fn recheck(&mut self, now: Instant, id: NodeId) {
        if let Some(node) = self.nodes.get_mut(&id) {
            node.recheck(now);
        }
    }

    /// Whether the node's holdings are to be compared now; they count as compared from then on.
    pub(crate) fn begin_inventory(&mut self, now: Instant, id: NodeId) -> bool {
        let node = self.nodes.get_mut(&id).expect("listed");
        if node.recheck_at.is_some_and(|at| at <= now) {
            node.recheck_at = None;
            node.inventoried = false;
        }
        let is_due = node.is_usable() && !node.inventoried && !node.is_opening();
        node.inventoried |= is_due;
        is_due
    }

    /// The comparison came to nothing.
    pub(crate) fn want_inventory(&mut self, id: NodeId) {
        if let Some(node) = self.nodes.get_mut(&id) {
            node.inventoried = false;
        }
    }

    /// Whether what all nodes that are up hold was compared.
    pub(crate) fn all_are_inventoried(&self) -> bool {
        self.nodes.values().all(|n| !n.up || n.inventoried)
    }

    /// All devices that nodes told of: their media, and whether they can be used.
    pub(crate) fn device_states(&self) -> impl Iterator<Item = (Leg, Option<MediaClass>, bool)> {
        let devices = self.nodes.iter().flat_map(|(node, n)| n.devices().map(move |d| (*node, n.is_usable(), d)));
        devices.map(|(node, is_usable, d)| {
            let serves = d.health == DeviceHealth::Serving;
            (Leg { node, device: d.device }, d.media, is_usable && serves)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{leg, peers, stat};
    use super::*;

    const AT: Instant = Instant(1_000_000_000);

    #[test]
    fn a_device_that_refused_a_shard_takes_shorter_ones_until_it_is_asked_anew() {
        let mut peers = peers(AT, &[1]);
        peers.on_refused(leg(1, 0), 4096);
        peers.on_refused(leg(1, 0), 8192);
        assert!(peers.may_hold(leg(1, 0), 4095) && !peers.may_hold(leg(1, 0), 4096));
        peers.on_stat(NodeId(1), vec![stat(leg(1, 0))]);
        assert!(peers.may_hold(leg(1, 0), 4096));
    }

    #[test]
    fn what_is_drained_or_bypassed_takes_nothing_and_the_latter_would_in_need() {
        let mut peers = peers(AT, &[1, 1, 2]);
        peers.set_draining(BTreeSet::from([leg(1, 0).device]));
        peers.bypassed = BTreeSet::from([leg(2, 0).device]);
        assert_eq!((peers.usable_count(), peers.usable_count_in_need()), (1, 2));
        assert_eq!((peers.devices_in_need(None), peers.devices_in_need(Some(NodeId(3)))), (3, 1));
        assert_eq!((peers.slow_standbys(), peers.last_resorts()), (vec![leg(2, 0)], vec![leg(2, 0)]));
        assert!(peers.leg_usable(leg(2, 0)) && !peers.leg_preferable(leg(2, 0)));
    }

    #[test]
    fn holdings_are_compared_once_and_again_when_something_may_have_arrived_late() {
        let mut peers = peers(AT, &[1]);
        assert!(peers.begin_inventory(AT, NodeId(1)) && !peers.begin_inventory(AT, NodeId(1)));
        assert!(peers.all_are_inventoried());
        peers.recheck(AT, NodeId(1));
        assert!(!peers.begin_inventory(AT, NodeId(1)));
        assert!(peers.begin_inventory(AT + RECHECK_AFTER, NodeId(1)));
        peers.on_device_failed(leg(1, 0));
        assert!(!peers.all_are_inventoried() && !peers.leg_usable(leg(1, 0)));
    }

    #[test]
    fn a_node_that_greets_again_keeps_what_was_learned_and_nothing_else() {
        let mut peers = peers(AT, &[1, 1]);
        let config = crate::basis::tests::basis("mirror:2").config;
        let bound = |peers: &Peers| peers.hedge_bound(&config, NodeId(1), Class::Read);
        for ms in 0..100 {
            peers.record(AT + Duration::from_millis(ms + 5), NodeId(1), Class::Read, AT + Duration::from_millis(ms));
        }
        let learned = bound(&peers);
        assert!(learned > config.read_hedge_min && learned < config.read_hedge_max, "{learned:?}");
        peers.on_not_made(NodeId(1), AT);
        assert!(!peers.makes_shards(NodeId(1), AT) && peers.makes_shards(NodeId(2), AT));
        peers.on_down(AT, NodeId(1));
        assert_eq!(peers.suspects(), [NodeId(1)]);
        peers.on_up(AT, NodeId(1), u32::MAX, vec![stat(leg(1, 0))]);
        assert_eq!((bound(&peers), peers.suspects()), (learned, vec![]));
        assert!(!peers.makes_shards(NodeId(1), AT));
    }
}
