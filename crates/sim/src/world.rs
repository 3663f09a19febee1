//! The simulated grid: one clock, one queue of events, node and host processes around the real machines.
//!
//! Role: drives [`holdfast_store::Node`] and any [`Machine`] as their shells would, over simulated disks, connections and
//! metadata. Tests and the swarm act on it between steps and read [`Output`]s; nothing else enters a run but its seed.
//!
//! Invariants:
//! 1. Events happen in order of (time, sequence number); the sequence is that of their scheduling.
//! 2. A crashed process hears nothing of its former life: completions and ticks carry its generation.
//! 3. A paused process finds everything that came meanwhile, in order, when it goes on.

use crate::disk::DiskFaults;
use crate::host::{HostProc, Packing};
use crate::meta::{MetaOutcome, MetaStore};
use crate::net::{Body, ConnId, Message, Net, Stream, Toward};
use crate::node::{NodeAsk, NodeProc};
use crate::secrecy::Encryptions;
use crate::service::Service;
use crate::shards::ShardWitness;
use crate::trace::Trace;
use holdfast_base::{BlockReply, Buf, Effects, GridId, Instant, MetaReply, MetaRequest, Prng, VolumeId};
use holdfast_format::talk::Talk;
use holdfast_format::wire::Reply;
use holdfast_store as store;
use holdfast_volume::{Effect, Encryption, Event, Notice, Turn};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::time::Duration;

/// A host-side machine: the controller, or a smaller client in tests of the store.
pub trait Machine {
    fn handle(&mut self, now: Instant, event: Event, out: &mut Effects<Effect>);
    fn next_deadline(&self) -> Option<Instant>;

    /// Asserts what must hold between events.
    fn verify(&self) {}

    /// What it has encrypted since the last call.
    fn take_encryptions(&mut self) -> Vec<Encryption> {
        Vec::new()
    }

    /// The most work that a part of it did in the last turn.
    fn last_turn(&self) -> Turn {
        Turn::default()
    }
}

impl Machine for holdfast_volume::Controller {
    fn handle(&mut self, now: Instant, event: Event, out: &mut Effects<Effect>) {
        holdfast_volume::Controller::handle(self, now, event, out);
    }

    fn next_deadline(&self) -> Option<Instant> {
        holdfast_volume::Controller::next_deadline(self)
    }

    fn verify(&self) {
        holdfast_volume::Controller::verify(self);
    }

    fn take_encryptions(&mut self) -> Vec<Encryption> {
        holdfast_volume::Controller::take_encryptions(self)
    }

    fn last_turn(&self) -> Turn {
        holdfast_volume::Controller::last_turn(self)
    }
}

/// What the driver of a run hears.
#[derive(Debug)]
pub enum Output {
    Reply {
        at: MachineAt,
        reply: BlockReply,
    },
    Notice {
        at: MachineAt,
        notice: Notice,
    },
    NodeNote {
        node: usize,
        notice: store::Notice,
    },
    /// A node's answer to [`World::probe`].
    Probed {
        node: usize,
        token: u64,
        reply: Reply,
        payload: Buf,
    },
    /// What a machine tells whoever has another volume open.
    Talk {
        at: MachineAt,
        to: VolumeId,
        talk: Box<Talk>,
    },
    /// What a machine asks the metadata store, where that is not this world's ([`World::meta_is_elsewhere`]).
    Meta {
        at: MachineAt,
        token: u64,
        request: MetaRequest,
    },
    /// A time that the driver asked to be woken at, with its key.
    Wake(u64),
}

/// Names a machine: its host and its place there. A restarted host's machines get new places.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct MachineAt {
    pub host: usize,
    pub machine: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Happening {
    Deliver(Stream),
    Connect {
        host: usize,
        generation: u64,
        node: usize,
    },
    /// The greeting was not answered for long.
    HelloTimeout {
        conn: ConnId,
    },
    Disk {
        node: usize,
        generation: u64,
        slot: usize,
        op: u64,
    },
    /// The shell of a node has opened a device again.
    Opened {
        node: usize,
        generation: u64,
        slot: usize,
    },
    /// A question of a node to another, or its answer, arrives.
    NodeAsk {
        ask: u64,
    },
    NodeTick {
        node: usize,
        generation: u64,
        reactor: usize,
        due: Instant,
    },
    /// What one reactor of a node told another arrives.
    Told {
        node: usize,
        generation: u64,
        from: usize,
        to: usize,
    },
    /// Blocks that a machine of a host wanted to be packed are.
    Worked {
        number: u64,
    },
    HostTick {
        at: MachineAt,
        due: Instant,
    },
    MetaArrives {
        call: u64,
    },
    MetaApplies {
        call: u64,
    },
    MetaAnswers {
        call: u64,
    },
    Wake(u64),
}

#[derive(PartialEq, Eq)]
struct Scheduled {
    at: Instant,
    sequence: u64,
    what: Happening,
}

impl Ord for Scheduled {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.sequence).cmp(&(other.at, other.sequence))
    }
}

impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

struct MetaCall {
    at: MachineAt,
    token: u64,
    request: MetaRequest,
    reply: MetaReply,
    apply_pending: bool,
    answered: bool,
}

/// A whole grid in one value.
pub struct World<M> {
    pub(crate) now: Instant,
    queue: BinaryHeap<Reverse<Scheduled>>,
    sequence: u64,
    pub trace: Trace,
    pub prng: Prng,
    pub(crate) packing: Packing,
    pub net: Net,
    pub meta: MetaStore,
    pub meta_is_elsewhere: bool,
    meta_calls: BTreeMap<u64, MetaCall>,
    next_meta_call: u64,
    pub nodes: Vec<NodeProc>,
    pub hosts: Vec<HostProc<M>>,
    pub outputs: VecDeque<Output>,
    pub encryptions: Encryptions,
    pub witness: ShardWitness,
    /// While somebody wants to know.
    pub service: Option<Service>,
    pub(crate) node_effects: Effects<store::Effect>,
    pub(crate) host_effects: Effects<Effect>,
    /// Events that machines have handled.
    pub(crate) handled: u64,
    /// The most work that one of them has done in one of what goes in slices.
    pub longest_slice: (usize, &'static str),
    /// The most that a turn had done when it ended with that.
    pub longest_slices: BTreeMap<&'static str, usize>,
    pub grid: GridId,
    pub(crate) asks: BTreeMap<u64, NodeAsk>,
    pub(crate) next_ask: u64,
    /// Of the questions of nodes to each other one in so many is never answered; zero for none.
    pub asks_lost_one_in: u64,
    /// Processes are of this release or of the one before, each time that they start.
    pub mixed: bool,
}

impl<M: Machine> World<M> {
    pub fn new(seed: u64, verbose: bool) -> World<M> {
        let mut prng = Prng::new(seed);
        let net = Net::new(prng.fork());
        let meta = MetaStore::new(prng.fork());
        World {
            // Not zero: machines may take instant zero for "never".
            now: Instant(1_000_000_000),
            queue: BinaryHeap::new(),
            sequence: 0,
            trace: Trace::new(verbose),
            net,
            meta,
            meta_is_elsewhere: false,
            meta_calls: BTreeMap::new(),
            next_meta_call: 0,
            nodes: Vec::new(),
            hosts: Vec::new(),
            outputs: VecDeque::new(),
            encryptions: Encryptions::default(),
            witness: ShardWitness::default(),
            service: None,
            node_effects: Effects::new(),
            host_effects: Effects::new(),
            handled: 0,
            longest_slice: (0, ""),
            longest_slices: BTreeMap::new(),
            grid: GridId(0x1001),
            asks: BTreeMap::new(),
            next_ask: 0,
            asks_lost_one_in: 0,
            mixed: false,
            prng,
            packing: Packing::default(),
        }
    }

    pub fn now(&self) -> Instant {
        self.now
    }

    pub(crate) fn schedule(&mut self, at: Instant, what: Happening) {
        self.sequence += 1;
        let at = at.max(self.now);
        self.queue.push(Reverse(Scheduled { at, sequence: self.sequence, what }));
    }

    /// Wakes the driver with [`Output::Wake`].
    pub fn wake_at(&mut self, at: Instant, key: u64) {
        self.schedule(at, Happening::Wake(key));
    }

    /// When the next event happens.
    pub fn next_at(&self) -> Option<Instant> {
        self.queue.peek().map(|Reverse(s)| s.at)
    }

    /// Lets the next event happen; false where nothing ever will.
    pub fn step(&mut self) -> bool {
        let Some(Reverse(Scheduled { at, what, .. })) = self.queue.pop() else { return false };
        assert!(at >= self.now, "time runs forward");
        self.now = at;
        match what {
            Happening::Deliver(stream) => self.deliver(stream),
            Happening::Connect { host, generation, node } => self.connect(host, generation, node),
            Happening::HelloTimeout { conn } => self.hello_timeout(conn),
            Happening::Disk { node, generation, slot, op } => self.disk_done(node, generation, slot, op),
            Happening::Opened { node, generation, slot } => self.disk_opened(node, generation, slot),
            Happening::NodeAsk { ask } => self.node_ask_arrives(ask),
            Happening::NodeTick { node, generation, reactor, due } => self.node_tick(node, generation, reactor, due),
            Happening::Told { node, generation, from, to } => self.node_told(node, generation, from, to),
            Happening::HostTick { at, due } => self.host_tick(at, due),
            Happening::Worked { number } => self.worked(number),
            Happening::MetaArrives { call } => self.meta_arrives(call),
            Happening::MetaApplies { call } => self.meta_applies(call),
            Happening::MetaAnswers { call } => self.meta_answers(call),
            Happening::Wake(key) => self.outputs.push_back(Output::Wake(key)),
        }
        true
    }

    fn deliver(&mut self, stream: Stream) {
        let Some(message) = self.net.deliver(stream) else { return };
        let words = [
            stream.conn.0,
            (stream.lane as u64) << 1 | stream.toward as u64,
            message.token,
            message.payload.len() as u64,
            u64::from(holdfast_base::crc32c(&message.payload)),
        ];
        let conn = self.net.conn(stream.conn).expect("it delivered");
        let (host, node) = (conn.host, conn.node);
        self.trace.event(self.now, &words, || describe(host, node, stream, &message));
        match stream.toward {
            Toward::Node => self.node_receives(node, stream, message),
            Toward::Host => self.host_receives(host, stream, message),
        }
    }

    /// Sends on a stream of a connection.
    pub(crate) fn send(&mut self, stream: Stream, message: Message) {
        if let Some(at) = self.net.send(self.now, stream, message) {
            self.schedule(at, Happening::Deliver(stream));
        }
    }

    /// Ends both lanes in one direction: what is on its way is lost except for a part, then the end arrives.
    pub(crate) fn end_streams(&mut self, conn: ConnId, toward: Toward) {
        self.net.lose_in_flight(conn, toward);
        for lane in 0..crate::net::LANES.len() {
            let end = Message { token: 0, body: Body::End, payload: Buf::empty() };
            self.send(Stream { conn, lane, toward }, end);
        }
    }

    /// A reset in the network: both sides hear of it, and lose what was on its way.
    pub fn reset_connection(&mut self, host: usize, node: usize) {
        if let Some(conn) = self.net.current(host, node) {
            self.trace.event(self.now, &[conn.0, 77], || format!("reset of host {host} <-> node {node}"));
            self.end_streams(conn, Toward::Node);
            self.end_streams(conn, Toward::Host);
        }
    }

    /// Blocks directions between a host and a node; what is sent waits.
    pub fn block(&mut self, host: usize, node: usize, toward_node: bool, toward_host: bool) {
        let link = self.net.link_mut(host, node);
        link.blocked[Toward::Node as usize] |= toward_node;
        link.blocked[Toward::Host as usize] |= toward_host;
        self.trace.event(self.now, &[78, host as u64, node as u64], || format!("block host {host} <-> node {node}"));
    }

    pub fn unblock(&mut self, host: usize, node: usize) {
        for toward in [Toward::Node, Toward::Host] {
            for (stream, count) in self.net.unblock(host, node, toward) {
                let at = self.now + Duration::from_micros(50 + self.prng.below(200));
                for _ in 0..count {
                    self.schedule(at, Happening::Deliver(stream));
                }
            }
        }
        self.trace.event(self.now, &[79, host as u64, node as u64], || format!("unblock host {host} <-> node {node}"));
    }

    pub(crate) fn call_meta(&mut self, at: MachineAt, token: u64, request: MetaRequest) {
        if self.meta_is_elsewhere {
            return self.outputs.push_back(Output::Meta { at, token, request });
        }
        let call = self.next_meta_call;
        self.next_meta_call += 1;
        let reply = MetaReply::Unknown;
        let entry = MetaCall { at, token, request, reply, apply_pending: false, answered: false };
        self.meta_calls.insert(call, entry);
        let arrives = self.now + self.meta.latency();
        self.schedule(arrives, Happening::MetaArrives { call });
    }

    fn meta_arrives(&mut self, id: u64) {
        let call = self.meta_calls.get_mut(&id).expect("a call arrives before it ends");
        let reachable = self.hosts[call.at.host].meta_reachable;
        let outcome = match self.hosts[call.at.host].meta_quorum {
            true => self.meta.arrive(self.now, &call.request, reachable),
            false => MetaOutcome::Unknown { applied_after: None },
        };
        self.trace.event(self.now, &[80, id], || {
            format!("meta {:?} from {:?}: {}", kind(&call.request), call.at, {
                match &outcome {
                    MetaOutcome::Answered(reply) => short(reply),
                    unknown @ MetaOutcome::Unknown { .. } => format!("{unknown:?}"),
                }
            })
        });
        match outcome {
            MetaOutcome::Answered(reply) => {
                call.reply = reply;
                let at = self.now + self.meta.latency();
                self.schedule(at, Happening::MetaAnswers { call: id });
            }
            MetaOutcome::Unknown { applied_after } => {
                call.apply_pending = applied_after.is_some();
                let at = self.now + self.meta.faults.patience;
                self.schedule(at, Happening::MetaAnswers { call: id });
                if let Some(after) = applied_after {
                    self.schedule(self.now + after, Happening::MetaApplies { call: id });
                }
            }
        }
    }

    fn meta_applies(&mut self, id: u64) {
        let call = self.meta_calls.get_mut(&id).expect("kept until applied");
        let reply = self.meta.apply(&call.request);
        self.trace.event(self.now, &[81, id], || format!("meta swap of unknown outcome happens: {}", short(&reply)));
        call.apply_pending = false;
        if call.answered {
            self.meta_calls.remove(&id);
        }
    }

    fn meta_answers(&mut self, id: u64) {
        let call = self.meta_calls.get_mut(&id).expect("kept until answered");
        call.answered = true;
        let (at, token, reply) = (call.at, call.token, call.reply.clone());
        if !call.apply_pending {
            self.meta_calls.remove(&id);
        }
        self.meta_replies(at, token, reply);
    }

    /// Sets the same faults on all disks of a node.
    pub fn set_disk_faults(&mut self, node: usize, faults: DiskFaults) {
        for disk in &mut self.nodes[node].disks {
            disk.faults = faults;
        }
    }
}

fn kind(request: &MetaRequest) -> String {
    match request {
        MetaRequest::Get { .. } => "get".to_string(),
        MetaRequest::Swap { expect, .. } => format!("swap of version {}", expect.0),
    }
}

fn short(reply: &MetaReply) -> String {
    match reply {
        MetaReply::Record { version, .. } => format!("record at version {}", version.0),
        MetaReply::Swapped { version } => format!("swapped to version {}", version.0),
        MetaReply::Conflict { version, .. } => format!("conflict with version {}", version.0),
        MetaReply::GuardFailed { version, .. } => format!("guard of version {} does not hold", version.0),
        MetaReply::Unknown => "unknown".to_string(),
    }
}

/// A message as a line of the printed trace, cut where checksums and headers make it long.
fn describe(host: usize, node: usize, stream: Stream, message: &Message) -> String {
    let arrow = if stream.toward == Toward::Node { "->" } else { "<-" };
    let mut body = match &message.body {
        Body::Request(request, _) => format!("{request:?}"),
        Body::Reply(reply, _) => format!("{reply:?}"),
        Body::End => "end of stream".to_string(),
    };
    if let Some((cut, _)) = body.char_indices().nth(260) {
        body.truncate(cut);
        body.push('…');
    }
    let (conn, lane, token) = (stream.conn.0, crate::net::LANES[stream.lane], message.token);
    format!("h{host} {arrow} n{} c{conn} {lane:?} #{token} {body} +{}", node + 1, message.payload.len())
}
