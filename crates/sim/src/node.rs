//! A node process: the real [`holdfast_store::Node`] on simulated disks, and what its shell does around it.

use crate::disk::{Crash, Disk, DiskOp};
use crate::host::versions_of;
use crate::net::{Body, ConnId, LANES, Message, Stream, Toward};
use crate::world::{Happening, Machine, Output, World};
use holdfast_base::{Buf, DeviceId, InstanceId, Instant, NodeId};
use holdfast_format::wire::{Reply, Request};
use holdfast_store as store;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// What waits for a process that stands still.
enum Input {
    Message(Stream, Message),
    Disk {
        token: store::DiskToken,
        result: Result<Buf, store::DiskError>,
    },
    /// A device that the node wanted to have opened is open.
    Opened {
        slot: usize,
    },
    /// Another node asks.
    Asked {
        ask: u64,
        request: Request,
    },
    /// Another node has answered.
    PeerAnswered {
        token: store::AskToken,
        answer: Option<(Reply, Buf)>,
    },
}

/// A question of one node to another, on its way there or back.
pub(crate) struct NodeAsk {
    from: usize,
    generation: u64,
    to: usize,
    token: store::AskToken,
    body: AskBody,
}

enum AskBody {
    Request(Request),
    /// The other process has it.
    There,
    Answer(Option<(Reply, Buf)>),
}

/// Peers of nodes that are other nodes: each question is a peer of its own.
const ASK_PEERS: u64 = 1 << 62;

/// One storage process with its disks. The disks outlive it.
pub struct NodeProc {
    pub id: NodeId,
    pub disks: Vec<Disk>,
    /// Settings for the next start; `boot` is set afresh.
    pub config: store::NodeConfig,
    pub sizing: store::JournalSizing,
    machine: Option<Box<store::Node>>,
    pub(crate) generation: u64,
    paused: bool,
    inbox: VecDeque<Input>,
    tick_due: Option<Instant>,
    disk_tokens: BTreeMap<(usize, u64), store::DiskToken>,
}

impl NodeProc {
    pub fn is_up(&self) -> bool {
        self.machine.is_some()
    }

    pub fn is_paused(&self) -> bool {
        self.paused
    }

    /// The machine itself, for checks.
    pub fn machine(&self) -> Option<&store::Node> {
        self.machine.as_deref()
    }
}

/// Every lane of a connection is a peer of its own to the node, as two TCP connections are.
fn peer_of(stream: Stream) -> store::PeerId {
    store::PeerId(stream.conn.0 * LANES.len() as u64 + stream.lane as u64)
}

fn stream_to(peer: store::PeerId) -> Stream {
    let lanes = LANES.len() as u64;
    Stream { conn: ConnId(peer.0 / lanes), lane: (peer.0 % lanes) as usize, toward: Toward::Host }
}

/// The peer that the driver of a run is.
const PROBE: store::PeerId = store::PeerId(u64::MAX);

impl<M: Machine> World<M> {
    /// Asks a running node something from outside of the simulated network; the answer is [`Output::Probed`].
    pub fn probe(&mut self, index: usize, token: u64, request: Request) {
        let event = store::Event::Request { peer: PROBE, token, request, payload: Buf::empty() };
        self.node_handles(index, event);
    }

    /// Adds a node process, not yet started, on disks of these sizes, freshly formatted.
    pub fn add_node(&mut self, config: store::NodeConfig, sizing: store::JournalSizing, disk_sizes: &[u64]) -> usize {
        let index = self.nodes.len();
        let id = config.node;
        assert_eq!(id, NodeId(index as u32 + 1), "nodes are numbered in order of their making");
        let disks = disk_sizes.iter().map(|size| Disk::new(*size, self.prng.fork())).collect();
        self.nodes.push(NodeProc {
            id,
            disks,
            config,
            sizing,
            machine: None,
            generation: 0,
            paused: false,
            inbox: VecDeque::new(),
            tick_due: None,
            disk_tokens: BTreeMap::new(),
        });
        for slot in 0..disk_sizes.len() {
            self.format_disk(index, slot);
        }
        index
    }

    /// Starts the process: a new machine that opens its devices.
    pub fn start_node(&mut self, index: usize) {
        let boot = InstanceId(self.prng.next_u128());
        let node = &mut self.nodes[index];
        assert!(node.machine.is_none(), "node {index} runs already");
        node.config.boot = boot;
        if self.mixed {
            node.config.wire = versions_of(boot.0.is_multiple_of(2));
        }
        node.machine = Some(Box::new(store::Node::new(node.config.clone())));
        let disks: Vec<_> = node.disks.iter().map(|disk| (disk.size_bytes(), disk.media)).collect();
        self.trace.event(self.now, &[1, index as u64], || format!("node {} starts", index + 1));
        for (slot, (size_bytes, media)) in disks.into_iter().enumerate() {
            let slot = store::DeviceSlot(slot);
            self.node_handles(index, store::Event::AddDevice { slot, size_bytes, media, is_direct: true });
        }
        // Peers of a former life that never heard of its end are told when they send; here: soon.
        for conn in self.net.conns_where(|c| c.node == index && !c.node_open && c.host_open) {
            self.end_streams(conn, Toward::Host);
        }
    }

    /// The process ends. After a power loss nobody tells its peers, until it is back.
    pub fn crash_node(&mut self, index: usize, crash: Crash) {
        let node = &mut self.nodes[index];
        if node.machine.take().is_none() {
            return;
        }
        node.generation += 1;
        node.paused = false;
        node.inbox.clear();
        node.tick_due = None;
        node.disk_tokens.clear();
        for disk in &mut node.disks {
            disk.crash(crash);
        }
        self.trace.event(self.now, &[2, index as u64], || format!("node {} crashes: {crash:?}", index + 1));
        for id in self.net.conns_where(|c| c.node == index && c.node_open) {
            self.net.conn_mut(id).expect("just listed").node_open = false;
            if crash == Crash::Process {
                self.end_streams(id, Toward::Host);
            }
        }
        self.net.sweep();
        // Who waits for an answer of it hears that its connection is gone, or nothing.
        let is_lost = |waits: &NodeAsk| waits.to == index && matches!(waits.body, AskBody::There);
        let lost: Vec<u64> = self.asks.iter().filter(|(_, waits)| is_lost(waits)).map(|(ask, _)| *ask).collect();
        for ask in lost.into_iter().filter(|_| crash == Crash::Process) {
            self.node_answers(ask, None);
        }
    }

    /// The process stands still; its sockets and disks do not.
    pub fn pause_node(&mut self, index: usize) {
        self.nodes[index].paused = true;
        self.trace.event(self.now, &[3, index as u64], || format!("node {} hangs", index + 1));
    }

    pub fn resume_node(&mut self, index: usize) {
        if !std::mem::take(&mut self.nodes[index].paused) {
            return;
        }
        self.trace.event(self.now, &[4, index as u64], || format!("node {} goes on", index + 1));
        for input in std::mem::take(&mut self.nodes[index].inbox) {
            self.node_input(index, input);
        }
        self.nodes[index].tick_due = None;
        self.arm_node(index);
    }

    pub(crate) fn node_receives(&mut self, index: usize, stream: Stream, message: Message) {
        if self.nodes[index].machine.is_some() {
            self.node_input(index, Input::Message(stream, message));
        }
    }

    fn node_input(&mut self, index: usize, input: Input) {
        if self.nodes[index].paused {
            self.nodes[index].inbox.push_back(input);
            return;
        }
        let event = match input {
            Input::Disk { token, result } => store::Event::Disk { token, result },
            Input::Opened { slot } => {
                let disk = &self.nodes[index].disks[slot];
                let (size_bytes, media) = (disk.size_bytes(), disk.media);
                store::Event::AddDevice { slot: store::DeviceSlot(slot), size_bytes, media, is_direct: true }
            }
            Input::PeerAnswered { token, answer } => store::Event::PeerAnswered { token, answer },
            Input::Asked { ask, request } => {
                let peer = store::PeerId(ASK_PEERS + ask);
                self.witness.on_request(peer, 0, &request, &[]);
                store::Event::Request { peer, token: 0, request, payload: Buf::empty() }
            }
            Input::Message(stream, Message { token, body: Body::Request(request), payload }) => {
                let peer = peer_of(stream);
                self.witness.on_request(peer, token, &request, &payload);
                store::Event::Request { peer, token, request, payload }
            }
            Input::Message(stream, Message { body: Body::End, .. }) => {
                self.node_hears_end(stream.conn);
                store::Event::PeerGone { peer: peer_of(stream) }
            }
            Input::Message(_, Message { body: Body::Reply(_), .. }) => unreachable!("replies go to hosts"),
        };
        self.node_handles(index, event);
    }

    fn node_hears_end(&mut self, id: ConnId) {
        if let Some(conn) = self.net.conn_mut(id)
            && !conn.host_open
        {
            // The other lane's rest is still read: closed for good when both ends have come.
            conn.ends_heard += 1;
            if conn.ends_heard == LANES.len() {
                conn.node_open = false;
                self.net.sweep();
            }
        }
    }

    fn node_handles(&mut self, index: usize, event: store::Event) {
        if let store::Event::Request { request, .. } = &event {
            let versions = self.nodes[index].config.wire;
            let is_known = matches!(request, Request::Hello { .. }) || request.since() <= versions.newest;
            assert!(is_known, "{request:?} to node {}, which speaks versions {versions}", index + 1);
        }
        let mut effects = std::mem::take(&mut self.node_effects);
        let machine = self.nodes[index].machine.as_mut().expect("a running node");
        machine.handle(self.now, event, &mut effects);
        for effect in effects.drain() {
            self.node_effect(index, effect);
        }
        self.node_effects = effects;
        self.arm_node(index);
    }

    /// A hit of the read cache is always checked: only disks of the asked device's own class can make a node lie.
    fn witness_reply(&mut self, index: usize, to: (store::PeerId, u64), reply: &Reply, payload: &[u8]) {
        let (node, now) = (&self.nodes[index], self.now);
        let may_lie = |device| {
            let stats = node.machine.as_ref().map(|machine| machine.stats(now)).unwrap_or_default();
            let asked = stats.into_iter().find(|stat| stat.device == device);
            asked.is_none_or(|asked| {
                node.disks.iter().any(|d| d.silently_damaged && (asked.media_is_set || d.media == asked.media))
            })
        };
        self.witness.on_reply(to, reply, payload, may_lie);
    }

    fn node_effect(&mut self, index: usize, effect: store::Effect) {
        match effect {
            store::Effect::Reply { peer: PROBE, token, reply, payload } => {
                let payload = holdfast_base::buf::concat(&payload);
                self.outputs.push_back(Output::Probed { node: index, token, reply, payload });
            }
            store::Effect::Reply { peer, reply, payload, .. } if peer.0 >= ASK_PEERS => {
                let payload = holdfast_base::buf::concat(&payload);
                self.witness_reply(index, (peer, 0), &reply, &payload);
                self.node_answers(peer.0 - ASK_PEERS, Some((reply, payload)));
            }
            store::Effect::Ask { node, token, request, .. } => self.node_asks(index, node, token, request),
            store::Effect::Reply { peer, token, reply, payload } => {
                let payload = holdfast_base::buf::concat(&payload);
                self.witness_reply(index, (peer, token), &reply, &payload);
                self.send(stream_to(peer), Message { token, body: Body::Reply(reply), payload });
            }
            store::Effect::Read { slot, offset, len, token } => {
                self.submit_disk(index, slot, DiskOp::Read { offset, len }, token);
            }
            store::Effect::Write { slot, offset, data, durable, token } => {
                self.submit_disk(index, slot, DiskOp::Write { offset, data, durable }, token);
            }
            store::Effect::Flush { slot, token } => self.submit_disk(index, slot, DiskOp::Flush, token),
            store::Effect::Open { slot } => {
                let is_idle = self.nodes[index].disks[slot.0].is_idle();
                assert!(is_idle, "rule 25: disk {} of node {} is opened while it is at work", slot.0, index + 1);
                let at = self.now + Duration::from_nanos(100_000 + self.prng.below(2_000_000));
                let generation = self.nodes[index].generation;
                self.schedule(at, Happening::Opened { node: index, generation, slot: slot.0 });
            }
            store::Effect::Close { .. } => {}
            store::Effect::Discard { slot, offset, len } => self.nodes[index].disks[slot.0].discard(offset, len),
            store::Effect::Note(note) => {
                self.trace.event(self.now, &[5, index as u64], || format!("node {} notes {note:?}", index + 1));
                self.outputs.push_back(Output::NodeNote { node: index, notice: note });
            }
        }
    }

    /// Sends a question from one node to another; it may be lost.
    fn node_asks(&mut self, from: usize, to: NodeId, token: store::AskToken, request: Request) {
        if self.asks_lost_one_in > 0 && self.prng.below(self.asks_lost_one_in) == 0 {
            return;
        }
        let (ask, generation, to) = (self.next_ask, self.nodes[from].generation, to.0 as usize - 1);
        self.next_ask += 1;
        self.asks.insert(ask, NodeAsk { from, generation, to, token, body: AskBody::Request(request) });
        self.schedule_ask(ask, 0);
    }

    fn schedule_ask(&mut self, ask: u64, bytes: usize) {
        let at = self.now + Duration::from_nanos(40_000 + self.prng.below(80_000) + bytes as u64);
        self.schedule(at, Happening::NodeAsk { ask });
    }

    fn node_answers(&mut self, ask: u64, answer: Option<(Reply, Buf)>) {
        let Some(waits) = self.asks.get_mut(&ask) else { return };
        let bytes = answer.as_ref().map_or(0, |(_, payload)| payload.len());
        waits.body = AskBody::Answer(answer);
        self.schedule_ask(ask, bytes);
    }

    /// A question has arrived, or its answer.
    pub(crate) fn node_ask_arrives(&mut self, ask: u64) {
        let Some(on_way) = self.asks.get_mut(&ask) else { return };
        let (from, to, token) = (on_way.from, on_way.to, on_way.token);
        match std::mem::replace(&mut on_way.body, AskBody::There) {
            AskBody::There => unreachable!("it is not on its way"),
            AskBody::Request(_) if self.nodes[to].machine.is_none() => self.node_answers(ask, None),
            AskBody::Request(request) => {
                self.trace.event(self.now, &[8, ask], || format!("n{} asks n{}: {request:?}", from + 1, to + 1));
                self.node_input(to, Input::Asked { ask, request });
            }
            AskBody::Answer(answer) => {
                let generation = self.asks.remove(&ask).expect("just seen").generation;
                if self.nodes[from].machine.is_some() && self.nodes[from].generation == generation {
                    self.trace.event(self.now, &[9, ask, u64::from(answer.is_some())], || {
                        let reply = answer.as_ref().map(|(reply, payload)| (reply, payload.len()));
                        format!("n{} tells n{}: {reply:?}", to + 1, from + 1)
                    });
                    self.node_input(from, Input::PeerAnswered { token, answer });
                }
            }
        }
    }

    fn submit_disk(&mut self, index: usize, slot: store::DeviceSlot, op: DiskOp, token: store::DiskToken) {
        let node = &mut self.nodes[index];
        let slot = slot.0;
        let (id, due) = node.disks[slot].submit(self.now, op);
        let (in_flight, most) = (node.disks[slot].in_flight(), node.config.disk_in_flight_max);
        assert!(in_flight <= most, "disk {slot} of node {} has {in_flight} of {most} operations", index + 1);
        node.disk_tokens.insert((slot, id), token);
        let generation = node.generation;
        self.schedule(due, Happening::Disk { node: index, generation, slot, op: id });
    }

    pub(crate) fn disk_opened(&mut self, index: usize, generation: u64, slot: usize) {
        if self.nodes[index].generation == generation {
            self.trace
                .event(self.now, &[10, index as u64, slot as u64], || format!("n{} opens disk {slot}", index + 1));
            self.node_input(index, Input::Opened { slot });
        }
    }

    pub(crate) fn disk_done(&mut self, index: usize, generation: u64, slot: usize, op: u64) {
        let node = &mut self.nodes[index];
        if node.generation != generation {
            return;
        }
        if let Some(later) = node.disks[slot].postponed(self.now) {
            self.schedule(later, Happening::Disk { node: index, generation, slot, op });
            return;
        }
        let Some(outcome) = node.disks[slot].complete(self.now, op) else { return };
        let token = node.disk_tokens.remove(&(slot, op)).expect("every operation has a token");
        let words = [6, index as u64, slot as u64, op, u64::from(outcome.is_ok())];
        self.trace.event(self.now, &words, || {
            let result = outcome.as_ref().map_or_else(|_| "error".to_string(), |b| format!("{} bytes", b.len()));
            format!("n{} disk {slot} op {op}: {result}", index + 1)
        });
        let result = outcome.map_err(|_| store::DiskError::Io);
        self.node_input(index, Input::Disk { token, result });
    }

    fn arm_node(&mut self, index: usize) {
        let node = &mut self.nodes[index];
        let Some(due) = node.machine.as_ref().and_then(|m| m.next_deadline()) else { return };
        if node.tick_due.is_none_or(|t| due < t) {
            node.tick_due = Some(due);
            let generation = node.generation;
            self.schedule(due.max(self.now), Happening::NodeTick { node: index, generation, due });
        }
    }

    pub(crate) fn node_tick(&mut self, index: usize, generation: u64, due: Instant) {
        let node = &mut self.nodes[index];
        if node.generation != generation || node.tick_due != Some(due) || node.paused {
            return;
        }
        node.tick_due = None;
        let is_due = node.machine.as_ref().and_then(|m| m.next_deadline()).is_some_and(|d| d <= self.now);
        if !is_due {
            self.arm_node(index);
            return;
        }
        self.node_handles(index, store::Event::Tick);
        let again = self.nodes[index].machine.as_ref().and_then(|m| m.next_deadline());
        assert!(again.is_none_or(|d| d > self.now), "node {index} wants a tick at an instant that has passed");
    }

    /// Gives up the contents of a disk and formats it: a blank disk in the place of the old one, with an id of its own.
    pub fn format_disk(&mut self, index: usize, slot: usize) {
        let device = DeviceId(self.prng.next_u128());
        self.format_disk_as(index, slot, device);
    }

    /// The disk forgets everything but who it is: a blank one that was given the id of the old one.
    pub fn forget_disk(&mut self, index: usize, slot: usize) {
        let start = self.nodes[index].disks[slot].peek(0, holdfast_base::BLOCK_BYTES);
        match store::probe_superblock(&start) {
            Ok(superblock) => self.format_disk_as(index, slot, superblock.device),
            Err(_) => self.format_disk(index, slot),
        }
    }

    fn format_disk_as(&mut self, index: usize, slot: usize, device: DeviceId) {
        assert!(!self.nodes[index].is_up(), "disks are swapped while the process is down");
        let grid = self.grid;
        let node = &mut self.nodes[index];
        let disk = &mut node.disks[slot];
        disk.blank();
        let writes = store::format_device(grid, node.id, device, disk.size_bytes(), node.sizing)
            .expect("a simulated disk has room for its tables");
        for (offset, data) in writes {
            disk.write_now(offset, &data);
        }
        let superblock = store::probe_superblock(&disk.peek(0, holdfast_base::BLOCK_BYTES)).expect("just written");
        disk.silent_from = superblock.areas.data_offset;
        self.trace.event(self.now, &[7, index as u64], || format!("n{} disk {slot} is blank: {device:?}", index + 1));
    }
}
