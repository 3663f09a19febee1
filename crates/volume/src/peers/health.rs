//! Judging nodes by our own I/O: hedges when a bound passes, suspicion when it lasts, trust when all is answered.
//!
//! Protocol rule 10: only outliers are hedged and suspected. A node is slow only against its peers: if no other node
//! has answered since the request was sent, it is this host that stands still.

use super::Peers;
use super::call::{Call, Class, Purpose};
use crate::api::{Effect, Notice, Out};
use crate::basis::Basis;
use holdfast_base::{Instant, NodeId, Token};
use holdfast_format::geometry::Layout;
use std::collections::BTreeMap;
use std::time::Duration;

/// A suspect node that stays silent for this long gets new connections.
const RECONNECT_AFTER: Duration = Duration::from_millis(1500);

/// A node without which there are fewer copies is done without when it has said nothing for this long: not because it
/// is slow.
const MISSED_AFTER: Duration = Duration::from_millis(400);

/// One without which all copies lie on one node, as with two nodes, is given a little more.
const NEEDED_AFTER: Duration = Duration::from_millis(600);

/// A node whose process is alive answers a ping within this, however slow its disks are.
pub(crate) const PING_MAX: Duration = Duration::from_millis(200);

/// Out for this long, a node's holdings are compared at once when it is back.
const ABSENCE: Duration = Duration::from_secs(1);

/// What is long by nature may take this much longer than the hedge bound's cap while its node is alive.
const BULK_BOUNDS: u32 = 4;

/// A suspect's oldest request is this many times as old as its peers' in the middle.
const LAG_TIMES: u32 = 4;

/// While calls are under way they are judged this often...
pub(crate) const JUDGED_EVERY: Duration = Duration::from_millis(2);

/// ... and of so many more, for each so many, once less.
const JUDGED_AT_ONCE: usize = 1000;

/// Age of the oldest request that each usable node owes.
pub(crate) type Lags = BTreeMap<NodeId, Duration>;

/// What a volume loses with a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Worth {
    /// Nothing: there are fault domains enough for all copies without it.
    Spare,
    /// A copy: what is written without it bears fewer losses, but still one.
    Missed,
    /// What is written without it lies on two devices of one other node, and bears the loss of no node.
    Needed,
    /// What is written without it would have one copy, or waits.
    Last,
}

/// What a look at everything outstanding finds.
#[derive(Debug, Default)]
pub(crate) struct Judgement {
    /// Calls over their bound, or once more over a longer one: whoever waits for them looks elsewhere.
    pub(crate) late: Vec<Token>,
    /// Nodes that can be spared, and are done without from now on.
    pub(crate) suspects: Vec<NodeId>,
    /// Nodes that would be missed, what they are worth, and since when they owe something.
    pub(crate) doubted: BTreeMap<NodeId, (Worth, Instant)>,
    /// Something is late, and nobody else was asked anything since: who is slow can't be told.
    pub(crate) is_unclear: bool,
    pub(crate) lags: Lags,
}

/// What calls to one node are judged by.
#[derive(Clone, Copy, Debug)]
struct Known {
    /// By class: after how long a call is late.
    bounds: [Duration; Class::ALL.len()],
    /// What was sent then most others have answered, and this one.
    others_answered_to: Option<Instant>,
    answered_to: Instant,
    worth: Worth,
}

impl Peers {
    /// How well a volume of that layout can do without this node.
    pub(crate) fn worth(&self, layout: Option<Layout>, node: NodeId) -> Worth {
        let failures = layout.map_or(0, |layout| usize::from(layout.failures()));
        let is_on_devices = layout.is_some_and(Layout::is_on_devices);
        let left = match is_on_devices {
            true => self.devices_in_need(Some(node)),
            false => self.usable_count_in_need().saturating_sub(1),
        };
        match left {
            _ if left > failures => Worth::Spare,
            0 => Worth::Last,
            1 if is_on_devices || self.devices_in_need(Some(node)) < 2 => Worth::Last,
            1 => Worth::Needed,
            _ => Worth::Missed,
        }
    }

    /// Looks at everything outstanding, if that is due: what is over its bound, and who is far over it. What is long by
    /// nature has had its time doubled so often.
    pub(crate) fn judge_if_due(&mut self, basis: &Basis, doublings: impl Fn(&Purpose) -> u32) -> Option<Judgement> {
        // All of it is gone through each time.
        if basis.now.since(self.judged_at) < JUDGED_EVERY * (self.calls.len() / JUDGED_AT_ONCE) as u32 {
            return None;
        }
        self.judged_at = basis.now;
        let (found, looks) = self.judge(basis, doublings);
        self.examined += looks;
        Some(found)
    }

    /// Nodes and devices that are gone through to learn what one node is judged by.
    fn size(&self) -> u64 {
        self.nodes.values().map(|node| 1 + node.devices().count() as u64).sum()
    }

    /// What is found, and how many calls, nodes and devices were gone through for that.
    fn judge(&self, basis: &Basis, doublings: impl Fn(&Purpose) -> u32) -> (Judgement, u64) {
        let mut found = Judgement { lags: self.lags(basis.now), ..Judgement::default() };
        // Thousands of calls are of a few nodes.
        let mut known: BTreeMap<NodeId, Known> = BTreeMap::new();
        let mut newest: Option<(NodeId, Known)> = None;
        // Twice all calls: for how far nodes lag, and for each.
        let (mut looks, a_node) = (2 * self.calls.len() as u64, self.size());
        for (token, call) in self.calls.iter() {
            let class = call.purpose.class();
            let of_node = match newest {
                Some((node, known)) if node == call.node => known,
                _ => *known.entry(call.node).or_insert_with(|| {
                    looks += a_node;
                    self.known_of(basis, call.node)
                }),
            };
            newest = Some((call.node, of_node));
            let age = basis.now.since(call.sent_at);
            if age <= of_node.bounds[class as usize] {
                continue;
            }
            let node_lags = of_node.others_answered_to.is_some_and(|then| then > call.sent_at);
            // Where devices are the fault domains one of them may be slow on a node that answers, the only one perhaps.
            let device_lags = basis.is_on_devices() && of_node.answered_to > call.sent_at;
            if !node_lags && !device_lags {
                found.is_unclear |= class != Class::Bulk;
                continue;
            }
            if !call.late {
                found.late.push(token);
            }
            if node_lags && class != Class::Bulk && !found.suspects.contains(&call.node) {
                self.weigh(basis, call, of_node.worth, &mut found);
            }
            // It is asked for elsewhere although its node is alive.
            let bulk_bound = || basis.config.append_hedge_max * (BULK_BOUNDS << doublings(&call.purpose));
            if class == Class::Bulk && call.late && age > bulk_bound() {
                found.late.push(token);
            }
        }
        (found, looks)
    }

    fn known_of(&self, basis: &Basis, node: NodeId) -> Known {
        let bound = |class| self.hedge_bound(&basis.config, node, class);
        Known {
            bounds: Class::ALL.map(bound),
            others_answered_to: self.others_answered_to(node),
            answered_to: self.answered_to(node),
            worth: self.worth(basis.layout(), node),
        }
    }

    /// A node lags behind its peers with this call.
    fn weigh(&self, basis: &Basis, call: &Call, worth: Worth, found: &mut Judgement) {
        match worth {
            Worth::Spare if self.is_far_over(basis, call, &found.lags) => found.suspects.push(call.node),
            worth @ (Worth::Missed | Worth::Needed) => {
                let (_, since) = found.doubted.entry(call.node).or_insert((worth, call.sent_at));
                *since = (*since).min(call.sent_at);
            }
            // Nothing is gained by it.
            Worth::Spare | Worth::Last => {}
        }
    }

    /// Whether a node that can be spared is done without from now on, since it owes this.
    fn is_far_over(&self, basis: &Basis, call: &Call, lags: &Lags) -> bool {
        let bound = self.hedge_bound(&basis.config, call.node, call.purpose.class());
        let least = (bound * 2).max(basis.config.append_hedge_min * 2) * self.patience(call.node, basis.now);
        basis.now.since(call.sent_at) > least.max(peers_lag(lags, call.node) * LAG_TIMES)
    }

    /// Whether a node that would be missed is done without: it does not even answer a ping, and has been silent for
    /// long.
    pub(crate) fn is_hung(&self, now: Instant, node: NodeId, worth: Worth, silent_since: Instant, lags: &Lags) -> bool {
        let probes = self.owed_by(node).filter(|(_, call)| matches!(call.purpose, Purpose::Probe));
        let probed_at = probes.map(|(_, call)| call.sent_at).min();
        let least = if worth == Worth::Needed { NEEDED_AFTER } else { MISSED_AFTER };
        let patience = least * self.patience(node, now);
        probed_at.is_some_and(|at| now.since(at) >= PING_MAX)
            && now.since(silent_since) > patience.max(peers_lag(lags, node) * LAG_TIMES)
    }

    fn lags(&self, now: Instant) -> Lags {
        let mut lags: Lags = self.usable().map(|(id, _)| (id, Duration::ZERO)).collect();
        for (_, call) in self.calls.iter().filter(|(_, c)| c.purpose.class() != Class::Bulk) {
            if let Some(lag) = lags.get_mut(&call.node) {
                *lag = (*lag).max(now.since(call.sent_at));
            }
        }
        lags
    }

    /// A call is over its bound: what it is, and whether it was before.
    pub(crate) fn note_late(&mut self, token: Token) -> Option<(Call, bool)> {
        let call = self.calls.get_mut(token)?;
        let was_late = std::mem::replace(&mut call.late, true);
        Some((call.clone(), was_late))
    }

    /// Does without the node from now on. False where it is out already, or is worth more than it was judged as:
    /// another one may have become suspect just before.
    pub(crate) fn suspect(&mut self, basis: &Basis, node: NodeId, judged_as: Worth, out: Out) -> bool {
        let is_so = self.worth(basis.layout(), node) == judged_as;
        let Some(state) = self.get_mut(node) else { return false };
        if !state.is_usable() || !is_so {
            return false;
        }
        state.suspect = true;
        state.out_since = Some(basis.now);
        state.note_suspicion(basis.now);
        out.push(Effect::Notice(Notice::NodeSuspect { node }));
        true
    }

    /// A suspect node has answered: it is trusted again once nothing it owes is over its bound. True when it is.
    pub(crate) fn reconsider(&mut self, basis: &Basis, node: NodeId, out: Out) -> bool {
        let now = basis.now;
        if self.get(node).is_none_or(|n| !n.suspect) {
            return false;
        }
        let bounds = Class::ALL.map(|class| self.hedge_bound(&basis.config, node, class));
        let is_over = |call: &Call| {
            let class = call.purpose.class();
            class != Class::Bulk && now.since(call.sent_at) > bounds[class as usize]
        };
        let over = self.calls.iter().position(|(_, call)| call.node == node && is_over(call));
        self.examined += over.unwrap_or(self.calls.len()) as u64;
        if over.is_some() {
            return false;
        }
        let state = self.get_mut(node).expect("a node that answered is known");
        state.suspect = false;
        // What was deleted or placed elsewhere meanwhile: after a moment's absence that is little, and can wait.
        if state.out_since.take().is_some_and(|since| now.since(since) >= ABSENCE) {
            state.inventoried = false;
        } else {
            state.recheck(now);
        }
        out.push(Effect::Notice(Notice::NodeTrusted { node }));
        true
    }

    /// Also one that is the last and so is never suspected: its connection may lead nowhere.
    pub(crate) fn reconnect_silent(&mut self, now: Instant, out: Out) {
        let mut owed_since: BTreeMap<NodeId, Instant> = BTreeMap::new();
        for (_, call) in self.calls.iter() {
            let since = owed_since.entry(call.node).or_insert(call.sent_at);
            *since = (*since).min(call.sent_at);
        }
        for (id, since) in owed_since {
            let silent = now.since(self.silent_since(id, since)) >= RECONNECT_AFTER;
            let Some(node) = self.get_mut(id) else { continue };
            if node.up && silent && !node.reconnecting {
                node.reconnecting = true;
                out.push(Effect::Reconnect { node: id });
            }
        }
    }
}

/// Lag of the other nodes: the one in the middle.
fn peers_lag(lags: &Lags, node: NodeId) -> Duration {
    let mut others: Vec<Duration> = lags.iter().filter(|(id, _)| **id != node).map(|(_, lag)| *lag).collect();
    others.sort_unstable();
    others.get(others.len() / 2).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::super::Ask;
    use super::super::tests::{peers, sent};
    use super::*;
    use crate::basis::tests::basis;
    use holdfast_base::Effects;
    use holdfast_format::wire::Request;

    const AT: Instant = Instant(1_000_000_000);

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    struct Rig {
        basis: Basis,
        peers: Peers,
        out: Effects<Effect>,
    }

    impl Rig {
        fn new(layout: &str, devices_by_node: &[u32]) -> Rig {
            let mut basis = basis(layout);
            basis.now = AT;
            Rig { basis, peers: peers(AT, devices_by_node), out: Effects::new() }
        }

        fn ask(&mut self, node: u32, purpose: Purpose) -> Token {
            let ask = Ask::fast(NodeId(node), purpose, Request::Ping);
            self.peers.send(self.basis.now, ask, &mut self.out).expect("the node is up")
        }

        /// Everybody else answers at once what is asked now.
        fn others_answer(&mut self, silent: u32) {
            for node in self.peers.ids().into_iter().filter(|id| id.0 != silent) {
                let token = self.ask(node.0, Purpose::Stat);
                self.peers.on_answer(self.basis.now, node, token);
            }
        }

        fn pass(&mut self, span: Duration) {
            self.basis.now = self.basis.now + span;
            self.peers.verify(self.basis.now);
        }

        fn judge(&self) -> Judgement {
            self.peers.judge(&self.basis, |_| 0).0
        }
    }

    #[test]
    fn a_node_is_worth_what_is_lost_without_it() {
        let worth = |layout: &str, devices: &[u32]| peers(AT, devices).worth(Some(layout.parse().unwrap()), NodeId(1));
        assert_eq!(worth("mirror:2", &[1, 1, 1]), Worth::Spare);
        assert_eq!(worth("mirror:3", &[1, 1, 1]), Worth::Missed);
        assert_eq!(worth("mirror:2", &[1, 2]), Worth::Needed);
        assert_eq!(worth("mirror:2", &[1, 1]), Worth::Last);
        assert_eq!(worth("mirror:2@device", &[1, 2]), Worth::Spare);
        assert_eq!(worth("mirror:2@device", &[2, 1]), Worth::Last);
    }

    #[test]
    fn who_is_late_is_hedged_and_suspected_only_where_others_have_answered_since() {
        let mut rig = Rig::new("mirror:2", &[1, 1, 1]);
        let token = rig.ask(1, Purpose::Grant { leg: 0, ledger: Default::default() });
        rig.pass(ms(500));
        let found = rig.judge();
        assert!(found.late.is_empty() && found.suspects.is_empty() && found.is_unclear);
        rig.others_answer(1);
        let found = rig.judge();
        assert_eq!((found.late, found.suspects, found.is_unclear), (vec![token], vec![NodeId(1)], false));
        assert!(rig.peers.note_late(token).is_some_and(|(_, was_late)| !was_late));
        assert!(rig.judge().late.is_empty() && rig.peers.is_late(NodeId(1)));
        assert!(rig.peers.suspect(&rig.basis, NodeId(1), Worth::Spare, &mut rig.out));
        assert!(!rig.peers.suspect(&rig.basis, NodeId(1), Worth::Spare, &mut rig.out), "it is out already");
        rig.pass(ms(1));
        assert!(!rig.peers.reconsider(&rig.basis, NodeId(1), &mut rig.out), "it still owes that");
        assert!(rig.peers.on_answer(rig.basis.now, NodeId(1), token).is_some());
        assert!(rig.peers.reconsider(&rig.basis, NodeId(1), &mut rig.out));
        rig.pass(ms(1));
        assert!(rig.peers.is_usable(NodeId(1)));
    }

    #[test]
    fn a_call_is_late_where_half_of_the_others_have_answered_what_was_sent_later() {
        let mut rig = Rig::new("mirror:2", &[1, 1, 1, 1]);
        rig.ask(1, Purpose::Grant { leg: 0, ledger: Default::default() });
        rig.pass(ms(500));
        for (node, is_late) in [(2, false), (3, true), (4, true)] {
            let token = rig.ask(node, Purpose::Stat);
            rig.peers.on_answer(rig.basis.now, NodeId(node), token);
            assert_eq!(!rig.judge().late.is_empty(), is_late, "{node}");
        }
        assert_eq!(Class::ALL.map(|class| class as usize), [0, 1, 2, 3]);
    }

    #[test]
    fn a_node_that_would_be_missed_is_hung_only_when_it_answers_no_ping_either() {
        let mut rig = Rig::new("mirror:3", &[1, 1, 1]);
        rig.ask(1, Purpose::Grant { leg: 0, ledger: Default::default() });
        rig.pass(ms(500));
        rig.others_answer(1);
        let found = rig.judge();
        assert!(found.suspects.is_empty());
        assert_eq!(found.doubted, BTreeMap::from([(NodeId(1), (Worth::Missed, AT))]));
        let is_hung = |rig: &Rig| rig.peers.is_hung(rig.basis.now, NodeId(1), Worth::Missed, AT, &rig.judge().lags);
        assert!(!is_hung(&rig), "it was not asked whether it is there");
        rig.peers.probe(rig.basis.now, NodeId(1), &mut rig.out);
        rig.pass(PING_MAX - ms(1));
        assert!(!is_hung(&rig));
        rig.pass(ms(1));
        assert!(is_hung(&rig));
    }

    #[test]
    fn of_what_is_long_by_nature_a_node_is_not_suspected_and_each_place_tried_doubles_the_time() {
        let mut rig = Rig::new("mirror:2", &[1, 1, 1]);
        let token = rig.ask(1, Purpose::Forget);
        rig.pass(ms(500));
        rig.others_answer(1);
        assert_eq!(rig.judge().late, [token]);
        rig.peers.note_late(token);
        rig.pass(ms(101));
        assert_eq!(rig.judge().late, [token]);
        assert!(rig.peers.judge(&rig.basis, |_| 1).0.late.is_empty());
        assert!(rig.judge().suspects.is_empty());
    }

    #[test]
    fn a_silent_node_gets_one_new_connection() {
        let mut rig = Rig::new("mirror:2", &[1, 1]);
        rig.ask(1, Purpose::Forget);
        rig.pass(RECONNECT_AFTER);
        rig.others_answer(1);
        sent(&mut rig.out);
        for _ in 0..2 {
            rig.peers.reconnect_silent(rig.basis.now, &mut rig.out);
        }
        let reconnects = rig.out.take().into_iter().filter(|e| matches!(e, Effect::Reconnect { node: NodeId(1) }));
        assert_eq!(reconnects.count(), 1);
    }
}
