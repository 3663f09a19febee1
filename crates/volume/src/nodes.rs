//! What this controller knows of each node, from its own I/O alone: connection, latency, suspicion.
//!
//! A node is **usable** while it is connected and not suspect. It becomes suspect when a request has been outstanding
//! for longer than its bound while other nodes answered later requests (protocol rule 10: outliers only), and is trusted
//! again when everything it owed has been answered. Nothing here waits for a membership service.

use crate::api::Config;
use crate::call::Class;
use holdfast_base::{DeviceId, Instant, NodeId};
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
    pub fn record(&mut self, took: Duration) {
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

/// A node that could not make a shard is asked to again after this long.
const NOT_MADE_PAUSE: Duration = Duration::from_secs(5);

#[derive(Clone, Debug)]
pub struct Node {
    pub up: bool,
    /// Of the messages that it understands.
    pub version: u32,
    pub suspect: bool,
    /// When it became suspect or went down.
    pub out_since: Option<Instant>,
    pub up_since: Instant,
    pub last_reply: Instant,
    /// When the youngest request that it has answered was sent.
    pub answered_sent_at: Instant,
    pub devices: BTreeMap<DeviceId, DeviceStat>,
    latency: BTreeMap<Class, Latency>,
    /// The shell was asked to connect anew and has not reported yet.
    pub reconnecting: bool,
    /// Suspicions in short succession, and the last of them.
    suspicions: u32,
    suspected_at: Instant,
    /// Its holdings were compared with the segment table since it came up.
    pub inventoried: bool,
    /// When to compare again: something may have arrived late.
    pub recheck_at: Option<Instant>,
    /// It is asked to make shards from then on.
    makes_from: Instant,
}

impl Node {
    pub fn note_suspicion(&mut self, now: Instant) {
        self.suspicions = self.recent_suspicions(now) + 1;
        self.suspected_at = now;
    }

    fn recent_suspicions(&self, now: Instant) -> u32 {
        let quiet = now.since(self.suspected_at).as_secs() / CALM_AFTER.as_secs();
        self.suspicions.saturating_sub(quiet.min(u64::from(u32::MAX)) as u32).min(SUSPICIONS_COUNTED)
    }
}

#[derive(Debug, Default)]
pub struct Nodes {
    nodes: BTreeMap<NodeId, Node>,
    /// Shortest shard that a device had no room for since it was last asked for its state.
    refused_bytes: BTreeMap<Leg, u64>,
    /// Nothing new goes there.
    pub draining: BTreeSet<DeviceId>,
    /// Nodes of the host's own machine.
    pub near: BTreeSet<NodeId>,
    /// Slow ones that the volume does without: nothing new goes there, and what can be read elsewhere is.
    pub bypassed: BTreeSet<DeviceId>,
}

impl Nodes {
    pub fn on_up(&mut self, now: Instant, id: NodeId, version: u32, devices: Vec<DeviceStat>) {
        let devices = devices.into_iter().map(|d| (d.device, d)).collect();
        let node = self.nodes.entry(id).or_insert_with(|| Node {
            up: false,
            version,
            suspect: false,
            out_since: None,
            up_since: now,
            last_reply: now,
            answered_sent_at: now,
            devices: BTreeMap::new(),
            latency: BTreeMap::new(),
            reconnecting: false,
            suspicions: 0,
            suspected_at: Instant::ZERO,
            inventoried: false,
            recheck_at: None,
            makes_from: Instant::ZERO,
        });
        *node = Node {
            up: true,
            version,
            suspect: false,
            out_since: None,
            up_since: now,
            last_reply: now,
            answered_sent_at: now,
            devices,
            latency: std::mem::take(&mut node.latency),
            reconnecting: false,
            suspicions: 0,
            suspected_at: Instant::ZERO,
            inventoried: false,
            recheck_at: None,
            makes_from: node.makes_from,
        };
    }

    pub fn on_down(&mut self, now: Instant, id: NodeId) {
        if let Some(node) = self.nodes.get_mut(&id) {
            node.up = false;
            node.suspect = false;
            node.out_since.get_or_insert(now);
        }
    }

    pub fn get(&self, id: NodeId) -> Option<&Node> {
        self.nodes.get(&id)
    }

    pub fn get_mut(&mut self, id: NodeId) -> Option<&mut Node> {
        self.nodes.get_mut(&id)
    }

    pub fn iter(&self) -> impl Iterator<Item = (NodeId, &Node)> {
        self.nodes.iter().map(|(id, node)| (*id, node))
    }

    pub fn ids(&self) -> Vec<NodeId> {
        self.nodes.keys().copied().collect()
    }

    pub fn is_up(&self, id: NodeId) -> bool {
        self.nodes.get(&id).is_some_and(|n| n.up)
    }

    /// Whether the node may be asked to make shards: it understands that, and has not refused one lately.
    pub fn makes_shards(&self, id: NodeId, now: Instant) -> bool {
        self.nodes.get(&id).is_some_and(|n| n.version >= Request::MAKE_SHARD_SINCE && n.makes_from <= now)
    }

    /// It could not make a shard: it may not reach the others at all, and finding out takes time.
    pub fn on_not_made(&mut self, id: NodeId, now: Instant) {
        if let Some(node) = self.nodes.get_mut(&id) {
            node.makes_from = now + NOT_MADE_PAUSE;
        }
    }

    /// Whether the node understands the request.
    pub fn understands(&self, id: NodeId, request: &Request) -> bool {
        self.nodes.get(&id).is_some_and(|n| n.version >= request.since())
    }

    pub fn is_usable(&self, id: NodeId) -> bool {
        self.nodes.get(&id).is_some_and(|n| n.up && !n.suspect)
    }

    pub fn device(&self, leg: Leg) -> Option<&DeviceStat> {
        self.nodes.get(&leg.node)?.devices.get(&leg.device)
    }

    /// The device's journal is filled to `fill` / 255.
    pub fn on_journal_fill(&mut self, leg: Leg, fill: u8) {
        if let Some(device) = self.nodes.get_mut(&leg.node).and_then(|n| n.devices.get_mut(&leg.device)) {
            device.journal_used_bytes = device.journal_bytes * u64::from(fill) / 255;
        }
    }

    /// The node is usable and the device serves.
    pub fn leg_usable(&self, leg: Leg) -> bool {
        self.is_usable(leg.node) && self.device_serves(leg)
    }

    /// That, and it is not bypassed.
    pub fn leg_preferable(&self, leg: Leg) -> bool {
        self.leg_usable(leg) && !self.bypassed.contains(&leg.device)
    }

    /// The device was serving when last heard of.
    pub fn device_serves(&self, leg: Leg) -> bool {
        self.device(leg).is_some_and(|d| d.health == DeviceHealth::Serving)
    }

    pub fn on_device_failed(&mut self, leg: Leg) {
        if let Some(device) = self.nodes.get_mut(&leg.node).and_then(|n| n.devices.get_mut(&leg.device)) {
            device.health = DeviceHealth::Failed;
        }
        if let Some(node) = self.nodes.get_mut(&leg.node) {
            node.inventoried = false;
        }
    }

    /// The device has no room for a shard of that length.
    pub fn on_refused(&mut self, leg: Leg, bytes: u64) {
        let least = self.refused_bytes.entry(leg).or_insert(bytes);
        *least = bytes.min(*least);
    }

    pub fn may_hold(&self, leg: Leg, bytes: u64) -> bool {
        self.refused_bytes.get(&leg).is_none_or(|refused| bytes < *refused)
    }

    pub fn on_stat(&mut self, id: NodeId, devices: Vec<DeviceStat>) {
        self.refused_bytes.retain(|leg, _| leg.node != id);
        if let Some(node) = self.nodes.get_mut(&id) {
            let serving = |devices: &BTreeMap<DeviceId, DeviceStat>| -> Vec<DeviceId> {
                devices.values().filter(|d| d.health == DeviceHealth::Serving).map(|d| d.device).collect()
            };
            let before = serving(&node.devices);
            node.devices = devices.into_iter().map(|d| (d.device, d)).collect();
            if serving(&node.devices) != before {
                node.inventoried = false;
            }
        }
    }

    pub fn usable_count(&self) -> usize {
        let takes_any = |n: &Node| n.devices.values().any(|d| self.takes_shards(d));
        self.nodes.iter().filter(|(_, n)| n.up && !n.suspect && takes_any(n)).count()
    }

    /// Whether anything new may go to the device.
    pub fn takes_shards(&self, device: &DeviceStat) -> bool {
        self.may_take(device) && !self.bypassed.contains(&device.device)
    }

    /// Whether anything new may go to the device if need be.
    fn may_take(&self, device: &DeviceStat) -> bool {
        device.health == DeviceHealth::Serving && !self.draining.contains(&device.device)
    }

    /// Usable nodes if no device were bypassed.
    pub fn usable_count_in_need(&self) -> usize {
        let may_take_any = |n: &Node| n.devices.values().any(|d| self.may_take(d));
        self.nodes.iter().filter(|(_, n)| n.up && !n.suspect && may_take_any(n)).count()
    }

    /// Devices of usable nodes if none were bypassed, apart from those of one node.
    pub fn devices_in_need(&self, without: Option<NodeId>) -> usize {
        let usable = self.nodes.iter().filter(|(id, n)| n.up && !n.suspect && Some(**id) != without);
        usable.flat_map(|(_, n)| n.devices.values()).filter(|d| self.may_take(d)).count()
    }

    /// Bypassed devices that could take something new.
    pub fn slow_standbys(&self) -> Vec<Leg> {
        let usable = self.nodes.iter().filter(|(_, n)| n.up && !n.suspect);
        let devices = usable.flat_map(|(id, n)| n.devices.values().map(|d| (*id, d)));
        let slow = devices.filter(|(_, d)| self.may_take(d) && !self.takes_shards(d));
        slow.map(|(node, d)| Leg { node, device: d.device }).collect()
    }

    /// Bypassed devices that could take something new, one of each usable node that has no better one.
    pub fn last_resorts(&self) -> Vec<Leg> {
        let usable = self.nodes.iter().filter(|(_, n)| n.up && !n.suspect);
        let without = usable.filter(|(_, n)| !n.devices.values().any(|d| self.takes_shards(d)));
        let leg = |(id, n): (&NodeId, &Node)| {
            let device = n.devices.values().find(|d| self.may_take(d))?.device;
            Some(Leg { node: *id, device })
        };
        without.filter_map(leg).collect()
    }

    pub fn record(&mut self, now: Instant, id: NodeId, class: Class, sent_at: Instant) {
        if let Some(node) = self.nodes.get_mut(&id) {
            node.last_reply = now;
            node.answered_sent_at = node.answered_sent_at.max(sent_at);
            node.latency.entry(class).or_default().record(now.since(sent_at));
        }
    }

    /// After how long an outstanding request to this node is hedged.
    pub fn hedge_bound(&self, config: &Config, id: NodeId, class: Class) -> Duration {
        let (min, max) = match class {
            Class::Read => (config.read_hedge_min, config.read_hedge_max),
            Class::Append | Class::Control => (config.append_hedge_min, config.append_hedge_max),
            Class::Bulk => (config.append_hedge_min * 4, config.append_hedge_max),
        };
        let learned = self.nodes.get(&id).and_then(|n| n.latency.get(&class)).map(Latency::bound);
        learned.unwrap_or(max / 2).clamp(min, max)
    }

    /// Whether most of the other usable nodes have answered requests sent later than `then`: otherwise it is this host,
    /// or all of the grid, that is slow.
    pub fn others_are_faster(&self, then: Instant, id: NodeId) -> bool {
        let others = || self.nodes.iter().filter(|(other, n)| **other != id && n.up && !n.suspect);
        let faster = others().filter(|(_, n)| n.answered_sent_at > then).count();
        faster > 0 && faster * 2 >= others().count()
    }

    /// Whether the node has answered something that was sent later than `then`.
    pub fn has_answered_since(&self, id: NodeId, then: Instant) -> bool {
        self.nodes.get(&id).is_some_and(|n| n.answered_sent_at > then)
    }

    /// Since when the node has said nothing, although something is owed since then.
    pub fn silent_since(&self, id: NodeId, owed_since: Instant) -> Instant {
        self.nodes.get(&id).map_or(owed_since, |n| owed_since.max(n.last_reply))
    }

    /// How many times the usual patience this node is given.
    pub fn patience(&self, id: NodeId, now: Instant) -> u32 {
        self.nodes.get(&id).map_or(1, |n| 1 << n.recent_suspicions(now))
    }

    pub fn suspects(&self) -> Vec<NodeId> {
        self.nodes.iter().filter(|(_, n)| !n.up || n.suspect).map(|(id, _)| *id).collect()
    }

    /// Takes `bytes` off what the device is known to have free, until it is asked again.
    pub fn charge(&mut self, leg: Leg, bytes: u64) {
        if let Some(device) = self.nodes.get_mut(&leg.node).and_then(|n| n.devices.get_mut(&leg.device)) {
            device.free_bytes = device.free_bytes.saturating_sub(bytes);
        }
    }
}
