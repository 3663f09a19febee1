//! Judging nodes by our own I/O: hedges when a bound passes, suspicion when it lasts, trust when all is answered.
//!
//! Protocol rule 10: only outliers are hedged and suspected. A node is slow only against its peers: if no other node has
//! answered since the request was sent, it is this host that stands still.

use crate::api::{Effect, Lane, Notice};
use crate::call::{Call, Class, Purpose};
use crate::controller::{Controller, Out};
use crate::domains::Worth;
use holdfast_base::{Instant, NodeId, Token};
use holdfast_format::wire::{DeviceStat, Request};
use std::collections::BTreeMap;
use std::time::Duration;

/// A suspect node that stays silent for this long gets new connections.
const RECONNECT_AFTER: Duration = Duration::from_millis(1500);

/// A node without which there are fewer copies is done without when it has said nothing for this long: not because it is slow.
const MISSED_AFTER: Duration = Duration::from_millis(400);

/// One without which all copies lie on one node, as with two nodes, is given a little more.
const NEEDED_AFTER: Duration = Duration::from_millis(600);

/// A node whose process is alive answers a ping within this, however slow its disks are.
const PING_MAX: Duration = Duration::from_millis(200);

/// Out for this long, a node's holdings are compared at once when it is back.
const ABSENCE: Duration = Duration::from_secs(1);

/// What is long by nature may take this much longer than the hedge bound's cap while its node is alive.
const BULK_BOUNDS: u32 = 4;

/// A suspect's oldest request is this many times as old as its peers' in the middle.
const LAG_TIMES: u32 = 4;

/// Hedges allowed: one in this many appends, beyond a first few.
const HEDGE_SHARE: u64 = 20;
const HEDGES_FREE: u64 = 64;

impl Controller {
    pub(crate) fn on_node_up(&mut self, node: NodeId, version: u32, devices: Vec<DeviceStat>, out: Out) {
        self.lose_calls(node, out);
        self.nodes.on_up(self.now, node, version, devices);
        self.recheck(node);
        self.on_legs_changed(out);
        self.retry_stalled_fetches(out);
        self.progress(out);
    }

    pub(crate) fn on_node_down(&mut self, node: NodeId, out: Out) {
        self.nodes.on_down(self.now, node);
        self.repairer.note_degraded();
        self.lose_calls(node, out);
        self.on_legs_changed(out);
        self.replace_shards_on(node, out);
        self.progress(out);
    }

    fn lose_calls(&mut self, node: NodeId, out: Out) {
        let lost: Vec<Token> = self.calls.iter().filter(|(_, c)| c.node == node).map(|(t, _)| t).collect();
        for token in lost {
            if let Some(call) = self.calls.remove(token) {
                self.on_call_lost(call, out);
            }
        }
    }

    /// Looks at everything outstanding: what is over its bound is hedged, who is far over it is suspected.
    pub(crate) fn judge_calls(&mut self, out: Out) {
        let mut late = Vec::new();
        let mut suspects = Vec::new();
        let mut doubted: BTreeMap<NodeId, (Worth, Instant)> = BTreeMap::new();
        let mut alone = false;
        let lags = self.lags();
        for (token, call) in self.calls.iter() {
            let class = call.purpose.class();
            let bound = self.nodes.hedge_bound(&self.config, call.node, class);
            let age = self.now.since(call.sent_at);
            if age <= bound {
                continue;
            }
            let node_lags = self.nodes.others_are_faster(call.sent_at, call.node);
            // Where devices are the fault domains one of them may be slow on a node that answers, the only one perhaps.
            let device_lags = self.is_on_devices() && self.nodes.has_answered_since(call.node, call.sent_at);
            if !node_lags && !device_lags {
                alone |= class != Class::Bulk;
                continue;
            }
            if !call.late {
                late.push(token);
            }
            if node_lags && class != Class::Bulk && !suspects.contains(&call.node) {
                match self.worth(call.node) {
                    Worth::Spare if self.is_far_over(call, &lags) => suspects.push(call.node),
                    worth @ (Worth::Missed | Worth::Needed) => {
                        let (_, since) = doubted.entry(call.node).or_insert((worth, call.sent_at));
                        *since = (*since).min(call.sent_at);
                    }
                    // Nothing is gained by it.
                    Worth::Spare | Worth::Last => {}
                }
            }
            if class == Class::Bulk && call.late && age > self.bulk_bound(&call.purpose) {
                late.push(token);
            }
        }
        if alone {
            // Nobody else was asked anything since: ask, to tell a slow node from a host that stands still.
            for node in self.nodes.ids() {
                self.probe(node, out);
            }
        }
        for token in late {
            self.on_late(token, out);
        }
        for node in suspects {
            self.suspect(node, Worth::Spare, out);
        }
        for (node, (worth, since)) in doubted {
            self.doubt(node, worth, since, &lags, out);
        }
        self.reconnect_silent(out);
    }

    /// Whether a node that can be spared is done without from now on, since it owes this.
    fn is_far_over(&self, call: &Call, lags: &BTreeMap<NodeId, Duration>) -> bool {
        let bound = self.nodes.hedge_bound(&self.config, call.node, call.purpose.class());
        let least = (bound * 2).max(self.config.append_hedge_min * 2) * self.nodes.patience(call.node, self.now);
        self.now.since(call.sent_at) > least.max(peers_lag(lags, call.node) * LAG_TIMES)
    }

    /// A node that would be missed owes something since then. To do without it the log needs another rule, so the metadata store:
    /// it is done without only when it does not even answer a ping, and the store has answered since it fell silent.
    fn doubt(&mut self, node: NodeId, worth: Worth, since: Instant, lags: &BTreeMap<NodeId, Duration>, out: Out) {
        self.probe(node, out);
        let silent_since = self.nodes.silent_since(node, since);
        if self.now.since(silent_since) >= PING_MAX {
            self.ask_store(silent_since, out);
        }
        let is_probe = |call: &Call| call.node == node && matches!(call.purpose, Purpose::Probe);
        let probed_at = self.calls.iter().filter(|(_, call)| is_probe(call)).map(|(_, call)| call.sent_at).min();
        let is_hung = probed_at.is_some_and(|at| self.now.since(at) >= PING_MAX);
        let least = if worth == Worth::Needed { NEEDED_AFTER } else { MISSED_AFTER };
        let patience = least * self.nodes.patience(node, self.now);
        let is_long = self.now.since(silent_since) > patience.max(peers_lag(lags, node) * LAG_TIMES);
        if is_hung && is_long && self.root.was_heard_since(silent_since) {
            self.suspect(node, worth, out);
        }
    }

    /// How long what is long by nature may take before it is asked for elsewhere although its node is alive.
    fn bulk_bound(&self, purpose: &Purpose) -> Duration {
        let doublings = match purpose {
            Purpose::PutShard { job, shard } => self.put_doublings(*job, *shard),
            _ => 0,
        };
        self.config.append_hedge_max * (BULK_BOUNDS << doublings)
    }

    /// Age of the oldest request that each usable node owes.
    fn lags(&self) -> BTreeMap<NodeId, Duration> {
        let mut lags: BTreeMap<NodeId, Duration> =
            self.nodes.iter().filter(|(_, n)| n.up && !n.suspect).map(|(id, _)| (id, Duration::ZERO)).collect();
        for (_, call) in self.calls.iter().filter(|(_, c)| c.purpose.class() != Class::Bulk) {
            if let Some(lag) = lags.get_mut(&call.node) {
                *lag = (*lag).max(self.now.since(call.sent_at));
            }
        }
        lags
    }

    fn on_late(&mut self, token: Token, out: Out) {
        let Some(call) = self.calls.get_mut(token) else { return };
        let again = call.late;
        call.late = true;
        let call = call.clone();
        match call.purpose {
            Purpose::Append { ledger, lsn, .. } => {
                let allowed =
                    self.counters.append_hedges * HEDGE_SHARE <= self.log.completed.0 + HEDGES_FREE * HEDGE_SHARE;
                if allowed {
                    self.hedge_append(ledger, lsn, out);
                }
            }
            Purpose::Fetch { fetch, .. } => {
                let allowed =
                    self.counters.read_hedges * HEDGE_SHARE <= self.counters.reads + HEDGES_FREE * HEDGE_SHARE;
                if allowed || !self.nodes.is_usable(call.node) {
                    self.hedge_fetch(fetch, out);
                }
            }
            Purpose::PutShard { job, shard } if again => self.on_put_lost(job, shard, call.node, out),
            // Whether the node is alive decides: a busy disk is waited for, a hung process is not.
            Purpose::PutShard { .. } => self.probe(call.node, out),
            Purpose::CreateLedger { ledger, leg } => self.on_create_lost(ledger, leg, out),
            _ => self.opening_call_late(&call, out),
        }
    }

    pub(crate) fn probe(&mut self, node: NodeId, out: Out) {
        if !self.nodes.is_usable(node) {
            return;
        }
        let probing = self.calls.iter().any(|(_, c)| c.node == node && matches!(c.purpose, Purpose::Probe));
        if !probing {
            self.send(node, Lane::Fast, Purpose::Probe, Request::Ping, Vec::new(), out);
        }
    }

    fn suspect(&mut self, node: NodeId, judged_as: Worth, out: Out) {
        let now = self.now;
        // Another one that became suspect just before may make this one worth more.
        let is_so = self.worth(node) == judged_as;
        let Some(state) = self.nodes.get_mut(node) else { return };
        if !state.up || state.suspect || !is_so {
            return;
        }
        state.suspect = true;
        state.out_since = Some(now);
        state.note_suspicion(now);
        self.repairer.note_degraded();
        out.push(Effect::Notice(Notice::NodeSuspect { node }));
        self.on_legs_changed(out);
        self.replace_shards_on(node, out);
        let fetches: Vec<Token> = self
            .calls
            .iter()
            .filter(|(_, c)| c.node == node)
            .filter_map(|(_, c)| if let Purpose::Fetch { fetch, .. } = c.purpose { Some(fetch) } else { None })
            .collect();
        for fetch in fetches {
            self.hedge_fetch(fetch, out);
        }
        let waited_for: Vec<Call> = self
            .calls
            .iter()
            .filter(|(_, c)| c.node == node)
            .filter(|(_, c)| {
                matches!(c.purpose, Purpose::CreateLedger { .. } | Purpose::Fence { .. } | Purpose::RecoverRead { .. })
            })
            .map(|(_, c)| c.clone())
            .collect();
        for call in waited_for {
            self.on_call_lost(call, out);
        }
    }

    /// A suspect node has answered: it is trusted again once nothing it owes is over its bound.
    pub(crate) fn reconsider(&mut self, node: NodeId, out: Out) {
        let owes = self.calls.iter().any(|(_, c)| {
            let bound = self.nodes.hedge_bound(&self.config, node, c.purpose.class());
            c.node == node && c.purpose.class() != Class::Bulk && self.now.since(c.sent_at) > bound
        });
        if owes {
            return;
        }
        let now = self.now;
        let state = self.nodes.get_mut(node).expect("a node that answered is known");
        state.suspect = false;
        // What was deleted or placed elsewhere meanwhile: after a moment's absence that is little, and can wait.
        if state.out_since.take().is_some_and(|since| now.since(since) >= ABSENCE) {
            state.inventoried = false;
        } else {
            self.recheck(node);
        }
        out.push(Effect::Notice(Notice::NodeTrusted { node }));
        self.on_legs_changed(out);
        self.retry_stalled_fetches(out);
    }

    /// Also one that is the last and so is never suspected: its connection may lead nowhere.
    fn reconnect_silent(&mut self, out: Out) {
        let mut owed_since: BTreeMap<NodeId, Instant> = BTreeMap::new();
        for (_, call) in self.calls.iter() {
            let since = owed_since.entry(call.node).or_insert(call.sent_at);
            *since = (*since).min(call.sent_at);
        }
        for (id, since) in owed_since {
            let silent = self.now.since(self.nodes.silent_since(id, since)) >= RECONNECT_AFTER;
            let Some(node) = self.nodes.get_mut(id) else { continue };
            if node.up && silent && !node.reconnecting {
                node.reconnecting = true;
                out.push(Effect::Reconnect { node: id });
            }
        }
    }
}

/// Lag of the other nodes: the one in the middle.
fn peers_lag(lags: &BTreeMap<NodeId, Duration>, node: NodeId) -> Duration {
    let mut others: Vec<Duration> = lags.iter().filter(|(id, _)| **id != node).map(|(_, lag)| *lag).collect();
    others.sort_unstable();
    others.get(others.len() / 2).copied().unwrap_or_default()
}
