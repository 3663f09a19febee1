//! Peers: the nodes as this controller sees them through its own I/O alone, and all that it has asked of them.
//!
//! Role: sends requests and remembers them, so that a lost connection, a late answer or a deadline finds its operation;
//! knows which nodes and devices can be used; judges them ([`health`], [`outliers`]). Whoever is waited for in vain is
//! told by the controller, which asks for a `Judgement` on every tick.
//!
//! A node is **usable** while it is connected and not suspect. It becomes suspect when a request has been outstanding
//! for longer than its bound while other nodes answered later requests (protocol rule 10: outliers only), and is
//! trusted again when everything it owed has been answered. Nothing here waits for a membership service.
//!
//! Invariants (checked by [`Peers::verify`]): (1) a node that is suspect or down is out since some time, others are
//! not; (2) a call was sent to a node that is known, and not later than now; (3) only devices that were found slow are
//! bypassed.
//!
//! Limits: [`CALLS_MAX`] calls in flight; one record a node and a device.

mod call;
mod health;
mod nodes;
mod outliers;

pub(crate) use call::{CALLS_MAX, Call, Purpose};
pub(crate) use health::{JUDGED_EVERY, Lags, PING_MAX, Worth};
pub(crate) use nodes::Node;

use crate::api::{Effect, Lane, Out};
use holdfast_base::{Buf, DeviceId, Instant, NodeId, Slab, Token, Urgency};
use holdfast_format::ledger::Leg;
use holdfast_format::wire::Request;
use outliers::Outliers;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A device that was still being opened when its node greeted is asked after this often.
const OPENING_ASKED_EVERY: Duration = Duration::from_millis(50);

/// Free space and journal fill are asked for this often while the volume is in use, while it is not, and at rest: then
/// its host tells what matters.
pub(crate) const STATE_EVERY: Duration = Duration::from_secs(1);
pub(crate) const STATE_EVERY_IDLE: Duration = Duration::from_secs(5);
pub(crate) const STATE_EVERY_REST: Duration = Duration::from_secs(120);

/// A request on its way to a node.
pub(crate) struct Ask {
    pub(crate) node: NodeId,
    pub(crate) lane: Lane,
    pub(crate) purpose: Purpose,
    pub(crate) request: Request,
    pub(crate) urgency: Urgency,
    pub(crate) payload: Vec<Buf>,
}

impl Ask {
    pub(crate) fn new(node: NodeId, lane: Lane, purpose: Purpose, request: Request, payload: Vec<Buf>) -> Ask {
        Ask { node, lane, urgency: purpose.urgency(), purpose, request, payload }
    }

    pub(crate) fn fast(node: NodeId, purpose: Purpose, request: Request) -> Ask {
        Ask::new(node, Lane::Fast, purpose, request, Vec::new())
    }

    /// For who waits so urgently.
    pub(crate) fn with(self, urgency: Urgency) -> Ask {
        Ask { urgency, ..self }
    }
}

#[derive(Debug)]
pub(crate) struct Peers {
    nodes: BTreeMap<NodeId, Node>,
    calls: Slab<Call>,
    outliers: Outliers,
    /// Shortest shard that a device had no room for since it was last asked for its state.
    refused_bytes: BTreeMap<Leg, u64>,
    /// Nothing new goes there.
    draining: BTreeSet<DeviceId>,
    /// Nodes of the host's own machine.
    local: BTreeSet<NodeId>,
    /// Slow ones that the volume does without: nothing new goes there, and what can be read elsewhere is.
    bypassed: BTreeSet<DeviceId>,
    opening_asked_at: Instant,
    state_asked_at: Instant,
    judged_at: Instant,
    /// Calls, nodes and devices that were gone through to judge nodes.
    pub(crate) examined: u64,
}

impl Default for Peers {
    fn default() -> Peers {
        Peers {
            nodes: BTreeMap::new(),
            calls: Slab::new(CALLS_MAX),
            outliers: Outliers::default(),
            refused_bytes: BTreeMap::new(),
            draining: BTreeSet::new(),
            local: BTreeSet::new(),
            bypassed: BTreeSet::new(),
            opening_asked_at: Instant::ZERO,
            state_asked_at: Instant::ZERO,
            judged_at: Instant::ZERO,
            examined: 0,
        }
    }
}

impl Peers {
    /// Sends to a node that is up. `None` (and nothing sent) where it is not, or too much is in flight.
    pub(crate) fn send(&mut self, now: Instant, ask: Ask, out: Out) -> Option<Token> {
        let Ask { node, lane, purpose, request, urgency, payload } = ask;
        if !self.is_up(node) || self.calls.is_full() {
            return None;
        }
        let token = self.calls.insert(Call { node, sent_at: now, purpose, late: false });
        out.push(Effect::Send { node, lane, token: token.0, request, urgency, payload });
        Some(token)
    }

    /// An answer to a call: what it was, unless nobody waits for it any more.
    pub(crate) fn on_answer(&mut self, now: Instant, node: NodeId, token: Token) -> Option<Call> {
        let call = self.calls.remove(token)?;
        assert_eq!(call.node, node, "an answer comes from the node that was asked");
        self.record(now, node, call.purpose.class(), call.sent_at);
        Some(call)
    }

    /// A call whose answer will never come, if it is still waited for.
    pub(crate) fn lose(&mut self, token: Token) -> Option<Call> {
        self.calls.remove(token)
    }

    /// Calls that the node owes an answer to.
    pub(crate) fn owed_by(&self, node: NodeId) -> impl Iterator<Item = (Token, &Call)> {
        self.calls.iter().filter(move |(_, call)| call.node == node)
    }

    /// Whether nobody owes an answer.
    pub(crate) fn is_idle(&self) -> bool {
        self.calls.is_empty()
    }

    /// Whether nothing about any node or device is to be found out, or waited for.
    pub(crate) fn is_settled(&self) -> bool {
        let is_known = |node: &Node| !node.suspect && node.is_compared();
        self.draining.is_empty() && self.outliers.is_calm() && self.nodes.values().all(|n| !n.up || is_known(n))
    }

    /// Whether the node owes something that is over its bound.
    pub(crate) fn is_late(&self, node: NodeId) -> bool {
        self.owed_by(node).any(|(_, call)| call.late)
    }

    /// For a person who looks into a simulation that failed.
    pub(crate) fn calls(&self) -> &Slab<Call> {
        &self.calls
    }

    /// Asks whether the node is there, unless that was asked already.
    pub(crate) fn probe(&mut self, now: Instant, node: NodeId, out: Out) {
        let is_asked = self.owed_by(node).any(|(_, call)| matches!(call.purpose, Purpose::Probe));
        if !is_asked && self.is_usable(node) {
            self.send(now, Ask::fast(node, Purpose::Probe, Request::Ping), out);
        }
    }

    /// Asks a usable node for the state of its devices, unless that was asked already.
    pub(crate) fn ask_state(&mut self, now: Instant, node: NodeId, out: Out) {
        let is_asked = self.owed_by(node).any(|(_, call)| matches!(call.purpose, Purpose::Stat));
        if !is_asked && self.is_usable(node) {
            self.send(now, Ask::fast(node, Purpose::Stat, Request::Stat), out);
        }
    }

    /// A device that was still being opened when its node greeted is asked after until it serves.
    pub(crate) fn ask_after_opening_devices(&mut self, now: Instant, out: Out) {
        if now.since(self.opening_asked_at) < OPENING_ASKED_EVERY {
            return;
        }
        self.opening_asked_at = now;
        for id in self.ids() {
            let node = self.get(id).expect("listed");
            if node.is_usable() && (node.may_have_more_devices(now) || node.is_opening()) {
                self.send(now, Ask::fast(id, Purpose::Stat, Request::Stat), out);
            }
        }
    }

    /// Free space and journal fill are asked for now and then.
    pub(crate) fn refresh_state(&mut self, now: Instant, pace: Duration, out: Out) {
        if now.since(self.state_asked_at) < pace {
            return;
        }
        self.state_asked_at = now;
        for node in self.ids() {
            if self.is_usable(node) {
                self.send(now, Ask::fast(node, Purpose::Stat, Request::Stat), out);
            }
        }
    }

    /// Asserts what must hold between events (tests and the simulator).
    pub(crate) fn verify(&self, now: Instant) {
        for (id, node) in &self.nodes {
            node.verify(*id, now);
        }
        for (_, call) in self.calls.iter() {
            assert!(self.nodes.contains_key(&call.node), "{:?} was never up, and owes {:?}", call.node, call.purpose);
            assert!(call.sent_at <= now, "{:?} is sent in the future", call.purpose);
        }
        let is_slow = |device: &DeviceId| self.outliers.slow().any(|(leg, _)| leg.device == *device);
        assert!(self.bypassed.iter().all(is_slow), "{:?} are bypassed, and not all are slow", self.bypassed);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::nodes::DEVICES_APPEAR_WITHIN;
    use super::*;
    use holdfast_base::Effects;
    use holdfast_format::wire::{DeviceHealth, DeviceStat};

    pub(crate) const CAPACITY: u64 = 1 << 30;

    pub(crate) fn leg(node: u32, device: u32) -> Leg {
        Leg { node: NodeId(node), device: DeviceId(u128::from(100 * node + device)) }
    }

    /// A device that serves, and is empty.
    pub(crate) fn stat(leg: Leg) -> DeviceStat {
        let empty = DeviceStat::unknown(leg.device, DeviceHealth::Serving);
        DeviceStat { capacity_bytes: CAPACITY, free_bytes: CAPACITY, journal_bytes: 1 << 26, ..empty }
    }

    /// Nodes from 1 on with so many devices each, up since `now`.
    pub(crate) fn peers(now: Instant, devices_by_node: &[u32]) -> Peers {
        let mut peers = Peers::default();
        for (node, devices) in (1..).zip(devices_by_node) {
            let stats = (0..*devices).map(|device| stat(leg(node, device))).collect();
            peers.on_up(now, NodeId(node), u32::MAX, stats);
        }
        peers.verify(now);
        peers
    }

    /// Requests that were sent: to which node, and their tokens.
    pub(crate) fn sent(out: &mut Effects<Effect>) -> Vec<(NodeId, Token, Request)> {
        let sent = out.take().into_iter().filter_map(|effect| match effect {
            Effect::Send { node, token, request, .. } => Some((node, Token(token), request)),
            _ => None,
        });
        sent.collect()
    }

    const AT: Instant = Instant(1_000_000_000);

    #[test]
    fn nothing_is_sent_to_a_node_that_is_down_and_each_answer_counts_once() {
        let (mut peers, mut out) = (peers(AT, &[1, 1]), Effects::new());
        peers.on_down(AT, NodeId(2));
        peers.ask_state(AT, NodeId(2), &mut out);
        assert!(sent(&mut out).is_empty() && peers.is_idle());
        peers.ask_state(AT, NodeId(1), &mut out);
        peers.ask_state(AT, NodeId(1), &mut out);
        let asked = sent(&mut out);
        assert_eq!(asked.len(), 1, "it was asked already");
        let (node, token, _) = &asked[0];
        assert!(peers.on_answer(AT, *node, *token).is_some());
        assert!(peers.on_answer(AT, *node, *token).is_none());
        peers.verify(AT);
    }

    #[test]
    fn a_node_is_asked_after_devices_that_it_has_yet_to_open() {
        let (mut peers, mut out) = (peers(AT, &[1]), Effects::new());
        let later = AT + DEVICES_APPEAR_WITHIN;
        peers.ask_after_opening_devices(AT, &mut out);
        peers.ask_after_opening_devices(AT + OPENING_ASKED_EVERY / 2, &mut out);
        assert_eq!(sent(&mut out).len(), 1);
        peers.ask_after_opening_devices(later, &mut out);
        assert!(sent(&mut out).is_empty(), "all that it has serve");
        peers.on_stat(NodeId(1), vec![DeviceStat::unknown(leg(1, 0).device, DeviceHealth::Opening)]);
        peers.ask_after_opening_devices(later + OPENING_ASKED_EVERY, &mut out);
        assert_eq!(sent(&mut out).len(), 1);
    }

    #[test]
    #[should_panic(expected = "not all are slow")]
    fn a_device_that_is_bypassed_and_not_slow_is_a_bug() {
        let mut peers = peers(AT, &[1]);
        peers.bypassed.insert(leg(1, 0).device);
        peers.verify(AT);
    }
}
