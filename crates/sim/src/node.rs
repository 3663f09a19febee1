//! A node process: the real [`holdfast_store::Node`] on simulated disks, and what its shell does around it.

use crate::disk::{Crash, Disk, DiskOp};
use crate::host::versions_of;
use crate::net::{Body, ConnId, LANES, Message, Stream, Toward};
use crate::world::{Happening, Machine, Output, World};
use holdfast_base::{Buf, DeviceId, InstanceId, Instant, NodeId, Urgency};
use holdfast_format::wire::{Beside, DeviceStat, Reply, Request};
use holdfast_store as store;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// What waits for a process that stands still.
enum Input {
    Message(Stream, Message),
    Disk {
        slot: usize,
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
    /// One reactor has told another something.
    Told {
        from: usize,
        to: usize,
    },
    /// Another node has answered.
    PeerAnswered {
        reactor: usize,
        token: store::AskToken,
        answer: Option<(Reply, Buf)>,
    },
}

/// A question of one node to another, on its way there or back.
pub(crate) struct NodeAsk {
    from: usize,
    /// Of the node that asks.
    reactor: usize,
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
    /// One a reactor while the process runs.
    reactors: Vec<NodeReactor>,
    /// Which of them has each disk.
    dealt: Vec<usize>,
    pub(crate) generation: u64,
    paused: bool,
    inbox: VecDeque<Input>,
    disk_tokens: BTreeMap<(usize, u64), store::DiskToken>,
}

/// A disk, by its place in its node.
#[derive(Clone, Copy, PartialEq)]
struct Place(usize);

impl store::Named for Place {
    fn is(&self, other: &Place) -> bool {
        self == other
    }

    fn is_at(&self, other: &Place) -> bool {
        self == other
    }
}

/// One reactor of a node's process.
struct NodeReactor {
    machine: Box<store::Node>,
    tick_due: Option<Instant>,
    /// What each of the others has told it and it has not heard yet, in order.
    told: BTreeMap<usize, VecDeque<store::Message>>,
}

impl NodeReactor {
    fn new(config: &store::NodeConfig, reactor: u16) -> NodeReactor {
        let config = store::NodeConfig { reactor, ..config.clone() };
        NodeReactor { machine: Box::new(store::Node::new(config)), tick_due: None, told: BTreeMap::new() }
    }
}

impl NodeProc {
    pub fn is_up(&self) -> bool {
        !self.reactors.is_empty()
    }

    pub fn is_paused(&self) -> bool {
        self.paused
    }

    /// The machines themselves, for checks; none while the process is down.
    pub fn machines(&self) -> impl Iterator<Item = &store::Node> {
        self.reactors.iter().map(|reactor| &*reactor.machine)
    }

    /// What the process would say of its devices; nothing while it is down.
    pub fn stats(&self, now: Instant) -> Vec<DeviceStat> {
        self.machines().flat_map(|machine| machine.stats(now)).collect()
    }

    /// Deals disks out over the reactors.
    fn deal(&mut self) {
        let places: Vec<Place> = (0..self.disks.len()).map(Place).collect();
        let has_cache = self.config.read_cache_per_mille > 0;
        let mut dealing = store::Dealing::new(usize::from(self.config.reactors), has_cache);
        let shares = dealing.deal(&places, |place| self.disks[place.0].media);
        let home = |place: &Place| shares.iter().position(|share| share.contains(place)).expect("all are dealt");
        self.dealt = places.iter().map(home).collect();
    }

    fn reactor_of(&self, slot: usize) -> usize {
        self.dealt[slot]
    }

    /// Where a lane of a host comes to: on the front reactor, or straight to another that has not all devices either.
    fn reactor_of_peer(&self, peer: store::PeerId) -> usize {
        if peer.conn >= ASK_PEERS { 0 } else { peer.conn as usize % self.reactors.len() }
    }
}

/// Every lane of a connection is a peer of its own to the node, as two TCP connections are.
fn peer_of(stream: Stream) -> store::PeerId {
    store::PeerId::here(stream.conn.0 * LANES.len() as u64 + stream.lane as u64)
}

fn stream_to(peer: store::PeerId) -> Stream {
    let lanes = LANES.len() as u64;
    Stream { conn: ConnId(peer.conn / lanes), lane: (peer.conn % lanes) as usize, toward: Toward::Host }
}

/// The peer that the driver of a run is.
const PROBE: u64 = u64::MAX;

impl<M: Machine> World<M> {
    /// Asks a running node something from outside of the simulated network; the answer is [`Output::Probed`].
    pub fn probe(&mut self, index: usize, token: u64, request: Request) {
        let (node, now) = (&self.nodes[index], self.now);
        let has = |machine: &store::Node| machine.stats(now).iter().any(|stat| Some(stat.device) == request.device());
        let reactor = node.machines().position(has).unwrap_or(0);
        let peer = store::PeerId::here(PROBE);
        let event = store::Event::Request { peer, token, beside: Beside::default(), request, payload: Buf::empty() };
        self.node_handles(index, reactor, event);
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
            reactors: Vec::new(),
            dealt: Vec::new(),
            generation: 0,
            paused: false,
            inbox: VecDeque::new(),
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
        assert!(!node.is_up(), "node {index} runs already");
        node.config.boot = boot;
        if self.mixed {
            node.config.wire = versions_of(boot.0.is_multiple_of(2));
        }
        node.reactors = (0..node.config.reactors).map(|reactor| NodeReactor::new(&node.config, reactor)).collect();
        node.deal();
        let disks: Vec<_> = node.disks.iter().map(|disk| (disk.size_bytes(), disk.media)).collect();
        self.trace.event(self.now, &[1, index as u64], || format!("node {} starts", index + 1));
        for (slot, (size_bytes, media)) in disks.into_iter().enumerate() {
            let (reactor, slot) = (self.nodes[index].reactor_of(slot), store::DeviceSlot(slot));
            self.node_handles(index, reactor, store::Event::AddDevice { slot, size_bytes, media, is_direct: true });
        }
        // Peers of a former life that never heard of its end are told when they send; here: soon.
        for conn in self.net.conns_where(|c| c.node == index && !c.node_open && c.host_open) {
            self.end_streams(conn, Toward::Host);
        }
    }

    /// The process ends. After a power loss nobody tells its peers, until it is back.
    pub fn crash_node(&mut self, index: usize, crash: Crash) {
        let node = &mut self.nodes[index];
        if std::mem::take(&mut node.reactors).is_empty() {
            return;
        }
        node.generation += 1;
        node.paused = false;
        node.inbox.clear();
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
        for reactor in 0..self.nodes[index].reactors.len() {
            self.nodes[index].reactors[reactor].tick_due = None;
            self.arm_node(index, reactor);
        }
    }

    pub(crate) fn node_receives(&mut self, index: usize, stream: Stream, message: Message) {
        if self.nodes[index].is_up() {
            self.node_input(index, Input::Message(stream, message));
        }
    }

    fn node_input(&mut self, index: usize, input: Input) {
        if self.nodes[index].paused {
            self.nodes[index].inbox.push_back(input);
            return;
        }
        let (reactor, event) = match input {
            Input::Disk { slot, token, result } => {
                (self.nodes[index].reactor_of(slot), store::Event::Disk { token, result })
            }
            Input::Told { from, to } => {
                let told = self.nodes[index].reactors[to].told.get_mut(&from).and_then(VecDeque::pop_front);
                let message = told.expect("it was told before");
                (to, store::Event::Told { reactor: from as u16, message })
            }
            Input::Opened { slot } => {
                let disk = &self.nodes[index].disks[slot];
                let (size_bytes, media) = (disk.size_bytes(), disk.media);
                let opened =
                    store::Event::AddDevice { slot: store::DeviceSlot(slot), size_bytes, media, is_direct: true };
                (self.nodes[index].reactor_of(slot), opened)
            }
            Input::PeerAnswered { reactor, token, answer } => (reactor, store::Event::PeerAnswered { token, answer }),
            Input::Asked { ask, request } => {
                let peer = store::PeerId::here(ASK_PEERS + ask);
                let beside = Beside { urgency: Urgency::Care, ..Beside::default() };
                self.note_request(index, (peer, 0), &request, beside.urgency, &[]);
                (0, store::Event::Request { peer, token: 0, beside, request, payload: Buf::empty() })
            }
            Input::Message(stream, Message { token, body: Body::Request(request, beside), payload }) => {
                let peer = peer_of(stream);
                self.note_request(index, (peer, token), &request, beside.urgency, &payload);
                let event = store::Event::Request { peer, token, beside, request, payload };
                (self.nodes[index].reactor_of_peer(peer), event)
            }
            Input::Message(stream, Message { body: Body::End, .. }) => {
                self.node_hears_end(stream.conn);
                let peer = peer_of(stream);
                (self.nodes[index].reactor_of_peer(peer), store::Event::PeerGone { peer })
            }
            Input::Message(_, Message { body: Body::Reply(..), .. }) => unreachable!("replies go to hosts"),
        };
        self.node_handles(index, reactor, event);
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

    fn node_handles(&mut self, index: usize, reactor: usize, event: store::Event) {
        if let store::Event::Request { request, .. } = &event {
            let versions = self.nodes[index].config.wire;
            let is_known = matches!(request, Request::Hello { .. }) || request.since() <= versions.newest;
            assert!(is_known, "{request:?} to node {}, which speaks versions {versions}", index + 1);
        }
        let mut effects = std::mem::take(&mut self.node_effects);
        let machine = &mut self.nodes[index].reactors[reactor].machine;
        machine.handle(self.now, event, &mut effects);
        for effect in effects.drain() {
            self.node_effect(index, reactor, effect);
        }
        self.node_effects = effects;
        self.arm_node(index, reactor);
    }

    /// A hit of the read cache is always checked: only disks of the asked device's own class can make a node lie.
    fn witness_reply(&mut self, index: usize, to: (store::PeerId, u64), reply: &Reply, payload: &[u8]) {
        let (node, now) = (&self.nodes[index], self.now);
        let may_lie = |device| {
            let asked = node.stats(now).into_iter().find(|stat| stat.device == device);
            asked.is_none_or(|asked| {
                node.disks.iter().any(|d| d.silently_damaged && (asked.media_is_set || d.media == asked.media))
            })
        };
        self.witness.on_reply(to, reply, payload, may_lie);
        if let Some(service) = &mut self.service {
            service.on_reply(index, to);
        }
    }

    fn note_request(
        &mut self,
        index: usize,
        to: (store::PeerId, u64),
        request: &Request,
        urgency: Urgency,
        payload: &[u8],
    ) {
        self.witness.on_request(to.0, to.1, request, payload);
        if let Some(service) = &mut self.service {
            service.on_request(index, to, request, urgency);
        }
    }

    fn node_effect(&mut self, index: usize, reactor: usize, effect: store::Effect) {
        match effect {
            store::Effect::Reply { peer, token, reply, payload, .. } if peer.conn == PROBE => {
                let payload = holdfast_base::buf::concat(&payload);
                self.outputs.push_back(Output::Probed { node: index, token, reply, payload });
            }
            store::Effect::Reply { peer, reply, payload, .. } if peer.conn >= ASK_PEERS => {
                let payload = holdfast_base::buf::concat(&payload);
                self.witness_reply(index, (peer, 0), &reply, &payload);
                self.node_answers(peer.conn - ASK_PEERS, Some((reply, payload)));
            }
            store::Effect::Tell { reactor: to, message } => self.node_tells(index, reactor, usize::from(to), message),
            store::Effect::Ask { node, token, request, .. } => self.node_asks(index, reactor, node, token, request),
            store::Effect::Reply { peer, token, reply, times, payload } => {
                let payload = holdfast_base::buf::concat(&payload);
                self.witness_reply(index, (peer, token), &reply, &payload);
                self.send(stream_to(peer), Message { token, body: Body::Reply(reply, times), payload });
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
    fn node_asks(&mut self, from: usize, reactor: usize, to: NodeId, token: store::AskToken, request: Request) {
        if self.asks_lost_one_in > 0 && self.prng.below(self.asks_lost_one_in) == 0 {
            return;
        }
        let (ask, generation, to) = (self.next_ask, self.nodes[from].generation, to.0 as usize - 1);
        self.next_ask += 1;
        self.asks.insert(ask, NodeAsk { from, reactor, generation, to, token, body: AskBody::Request(request) });
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
        let (from, reactor, to, token) = (on_way.from, on_way.reactor, on_way.to, on_way.token);
        match std::mem::replace(&mut on_way.body, AskBody::There) {
            AskBody::There => unreachable!("it is not on its way"),
            AskBody::Request(_) if !self.nodes[to].is_up() => self.node_answers(ask, None),
            AskBody::Request(request) => {
                self.trace.event(self.now, &[8, ask], || format!("n{} asks n{}: {request:?}", from + 1, to + 1));
                self.node_input(to, Input::Asked { ask, request });
            }
            AskBody::Answer(answer) => {
                let generation = self.asks.remove(&ask).expect("just seen").generation;
                if self.nodes[from].is_up() && self.nodes[from].generation == generation {
                    self.trace.event(self.now, &[9, ask, u64::from(answer.is_some())], || {
                        let reply = answer.as_ref().map(|(reply, payload)| (reply, payload.len()));
                        format!("n{} tells n{}: {reply:?}", to + 1, from + 1)
                    });
                    self.node_input(from, Input::PeerAnswered { reactor, token, answer });
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
        self.node_input(index, Input::Disk { slot, token, result });
    }

    fn arm_node(&mut self, index: usize, reactor: usize) {
        let node = &mut self.nodes[index];
        let (own, generation) = (&mut node.reactors[reactor], node.generation);
        let Some(due) = own.machine.next_deadline() else { return };
        if own.tick_due.is_none_or(|t| due < t) {
            own.tick_due = Some(due);
            self.schedule(due.max(self.now), Happening::NodeTick { node: index, generation, reactor, due });
        }
    }

    pub(crate) fn node_tick(&mut self, index: usize, generation: u64, reactor: usize, due: Instant) {
        let node = &mut self.nodes[index];
        if node.generation != generation || node.paused || node.reactors[reactor].tick_due != Some(due) {
            return;
        }
        let own = &mut node.reactors[reactor];
        own.tick_due = None;
        if own.machine.next_deadline().is_none_or(|due| due > self.now) {
            self.arm_node(index, reactor);
            return;
        }
        self.node_handles(index, reactor, store::Event::Tick);
        let again = self.nodes[index].reactors[reactor].machine.next_deadline();
        assert!(again.is_none_or(|d| d > self.now), "node {index} wants a tick at an instant that has passed");
    }

    /// One reactor of a node tells another something; what it tells it later does not overtake that.
    fn node_tells(&mut self, index: usize, from: usize, to: usize, message: store::Message) {
        let node = &mut self.nodes[index];
        let generation = node.generation;
        node.reactors[to].told.entry(from).or_default().push_back(message);
        let at = self.now + Duration::from_nanos(1_000 + self.prng.below(60_000));
        self.schedule(at, Happening::Told { node: index, generation, from, to });
    }

    pub(crate) fn node_told(&mut self, index: usize, generation: u64, from: usize, to: usize) {
        if self.nodes[index].generation == generation {
            self.trace.event(self.now, &[11, index as u64, from as u64, to as u64], || {
                format!("n{} reactor {from} tells reactor {to}", index + 1)
            });
            self.node_input(index, Input::Told { from, to });
        }
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
