//! A host process: controllers (or other machines) and what their shell does for them.
//!
//! The shell keeps one connection of two lanes to every node, greets on both, tells machines when a node is up or down,
//! and passes on answers only while the connection that they belong to is the current one.

use crate::net::{Body, ConnId, LANES, Message, Stream, Toward, lane_index};
use crate::world::{Happening, Machine, MachineAt, Output, World};
use holdfast_base::{BlockRequest, Buf, Effects, InstanceId, Instant, MetaReply, NodeId, Urgency};
use holdfast_format::versions::Versions;
use holdfast_format::wire::{Beside, DeviceStat, Reply, Request, WIRE};
use holdfast_volume::{Effect, Event, Target, Task};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// A connection whose greeting is not answered for so long is given up and made again.
const HELLO_PATIENCE: Duration = Duration::from_millis(500);

/// Pause between two attempts to connect, at least; as much again at random.
const CONNECT_PAUSE: Duration = Duration::from_millis(10);

/// Machines assert what must hold between events after each of so many: some walk over all that they have.
const VERIFIED_EVERY: u64 = 16;

enum Input {
    Message(Stream, Message),
    Meta { at: MachineAt, token: u64, reply: MetaReply },
    Begin { at: MachineAt, event: Event },
    Event { at: MachineAt, event: Event },
    HelloTimeout(ConnId),
    Connect { node: usize },
}

struct Slot<M> {
    machine: M,
    tick_due: Option<Instant>,
}

#[derive(Clone, Default)]
pub(crate) struct Greeting {
    up: Option<(InstanceId, u32, Vec<DeviceStat>)>,
}

/// Of the messages, that a process speaks: while a grid is brought to a new release some are of the one before.
pub(crate) fn versions_of(is_new: bool) -> Versions {
    Versions { newest: if is_new { WIRE.newest } else { WIRE.oldest }, ..WIRE }
}

/// Blocks that are being packed: for which life of a process, and what it is told.
#[derive(Default)]
pub(crate) struct Packing {
    begun: u64,
    ends: BTreeMap<u64, ((MachineAt, u64), Event)>,
}

/// One host process. Machines keep their places for ever; a crash empties them all.
pub struct HostProc<M> {
    machines: Vec<Option<Slot<M>>>,
    up: bool,
    paused: bool,
    generation: u64,
    inbox: VecDeque<Input>,
    next_token: u64,
    /// By node: what its greeting said, while it is up for the machines.
    pub(crate) nodes: Vec<Greeting>,
    pub meta_reachable: bool,
    /// Without, what it reaches of the metadata store can't change anything, nor tell.
    pub meta_quorum: bool,
}

impl<M> HostProc<M> {
    pub fn is_up(&self) -> bool {
        self.up
    }

    pub fn is_paused(&self) -> bool {
        self.paused
    }
}

impl<M: Machine> World<M> {
    /// Adds a host process and starts it.
    pub fn add_host(&mut self) -> usize {
        self.hosts.push(HostProc {
            machines: Vec::new(),
            up: false,
            paused: false,
            generation: 0,
            inbox: VecDeque::new(),
            next_token: 0,
            nodes: vec![Greeting::default(); self.nodes.len()],
            meta_reachable: true,
            meta_quorum: true,
        });
        let index = self.hosts.len() - 1;
        self.start_host(index);
        index
    }

    pub fn start_host(&mut self, index: usize) {
        let host = &mut self.hosts[index];
        assert!(!host.up, "host {index} runs already");
        host.up = true;
        self.trace.event(self.now, &[20, index as u64], || format!("host {index} starts"));
        for node in 0..self.nodes.len() {
            self.connect_later(index, node, Duration::from_micros(100));
        }
    }

    /// The process ends; what it sent may still arrive.
    pub fn crash_host(&mut self, index: usize) {
        let host = &mut self.hosts[index];
        if !std::mem::take(&mut host.up) {
            return;
        }
        host.generation += 1;
        host.paused = false;
        host.inbox.clear();
        host.machines.iter_mut().for_each(|m| *m = None);
        host.nodes.iter_mut().for_each(|n| n.up = None);
        self.trace.event(self.now, &[21, index as u64], || format!("host {index} crashes"));
        for id in self.net.conns_where(|c| c.host == index && c.host_open) {
            self.close_from_host(id);
        }
    }

    pub fn pause_host(&mut self, index: usize) {
        self.hosts[index].paused = self.hosts[index].up;
        self.trace.event(self.now, &[22, index as u64], || format!("host {index} hangs"));
    }

    pub fn resume_host(&mut self, index: usize) {
        if !std::mem::take(&mut self.hosts[index].paused) {
            return;
        }
        self.trace.event(self.now, &[23, index as u64], || format!("host {index} goes on"));
        // A timer that passed meanwhile fires first: the sockets are read in the same round.
        for machine in 0..self.hosts[index].machines.len() {
            let at = MachineAt { host: index, machine };
            if let Some(slot) = self.hosts[index].machines[machine].as_mut() {
                slot.tick_due = None;
            }
            self.arm_host(at);
        }
        for input in std::mem::take(&mut self.hosts[index].inbox) {
            self.host_input(index, input);
        }
    }

    /// Puts a machine into the host process and tells it which nodes are up.
    pub fn attach(&mut self, host: usize, machine: M) -> MachineAt {
        self.attach_with(host, machine, Event::Open)
    }

    /// A machine that begins otherwise than by opening its volume.
    pub fn attach_with(&mut self, host: usize, machine: M, begin: Event) -> MachineAt {
        assert!(self.hosts[host].up, "host {host} is down");
        self.hosts[host].machines.push(Some(Slot { machine, tick_due: None }));
        let at = MachineAt { host, machine: self.hosts[host].machines.len() - 1 };
        self.host_input(host, Input::Begin { at, event: begin });
        at
    }

    /// Which nodes are up is what the process knows by then: one that was hung hears first of connections that ended.
    fn machine_begins(&mut self, at: MachineAt, event: Event) {
        for node in 0..self.nodes.len() {
            if let Some((boot, version, devices)) = self.hosts[at.host].nodes[node].up.clone() {
                let event = Event::NodeUp { node: NodeId(node as u32 + 1), boot, version, devices };
                self.machine_handles(at, event);
            }
        }
        self.machine_handles(at, event);
    }

    pub fn machine(&self, at: MachineAt) -> Option<&M> {
        self.hosts[at.host].machines.get(at.machine)?.as_ref().map(|s| &s.machine)
    }

    pub fn machine_mut(&mut self, at: MachineAt) -> Option<&mut M> {
        self.hosts[at.host].machines.get_mut(at.machine)?.as_mut().map(|s| &mut s.machine)
    }

    /// Drops one machine of a running host, as a shell does after a close or a deposition.
    pub fn detach(&mut self, at: MachineAt) {
        self.hosts[at.host].machines[at.machine] = None;
    }

    /// Hands a guest's request to a machine; a host that is down swallows it.
    pub fn request(&mut self, at: MachineAt, target: Target, request: BlockRequest) {
        self.trace.event(self.now, &[24, request.token.0], || format!("{at:?} gets request {request:?} to {target:?}"));
        self.tell(at, Event::Request { target, request, urgency: Urgency::Normal });
    }

    pub fn tell(&mut self, at: MachineAt, event: Event) {
        self.host_input(at.host, Input::Event { at, event });
    }

    pub(crate) fn host_receives(&mut self, index: usize, stream: Stream, message: Message) {
        self.host_input(index, Input::Message(stream, message));
    }

    pub(crate) fn meta_replies(&mut self, at: MachineAt, token: u64, reply: MetaReply) {
        self.host_input(at.host, Input::Meta { at, token, reply });
    }

    fn host_input(&mut self, index: usize, input: Input) {
        if !self.hosts[index].up {
            return;
        }
        if self.hosts[index].paused {
            self.hosts[index].inbox.push_back(input);
            return;
        }
        match input {
            Input::Begin { at, event } => self.machine_begins(at, event),
            Input::Event { at, event } => self.machine_handles(at, event),
            Input::Meta { at, token, reply } => self.machine_handles(at, Event::Meta { token, reply }),
            Input::HelloTimeout(conn) => self.give_up_greeting(conn),
            Input::Connect { node } => self.try_connect(index, node),
            Input::Message(stream, message) => self.on_stream(index, stream, message),
        }
    }

    fn on_stream(&mut self, index: usize, stream: Stream, message: Message) {
        let Some(conn) = self.net.conn_mut(stream.conn).filter(|c| c.host_open) else { return };
        let node = conn.node;
        match message.body {
            Body::End => self.drop_connection(stream.conn),
            Body::Reply(Reply::Hello { version, boot, devices, .. }, _) => {
                conn.greeted[stream.lane] = true;
                conn.version = conn.version.min(version);
                if conn.greeted == [true; 2] {
                    let version = conn.version;
                    self.node_is_up(index, node, (boot, version, devices));
                }
            }
            Body::Reply(reply, times) => {
                let (machine, token) =
                    conn.waiting.remove(&message.token).expect("an answer to a request of this stream");
                let at = MachineAt { host: index, machine };
                let node = NodeId(node as u32 + 1);
                self.machine_handles(at, Event::Node { node, token, reply, times, payload: message.payload });
            }
            Body::Request(..) => unreachable!("requests go to nodes"),
        }
    }

    fn node_is_up(&mut self, host: usize, node: usize, greeting: (InstanceId, u32, Vec<DeviceStat>)) {
        self.trace.event(self.now, &[25, host as u64, node as u64], || format!("h{host}: n{} is up", node + 1));
        self.hosts[host].nodes[node].up = Some(greeting.clone());
        let (boot, version, devices) = greeting;
        for machine in 0..self.hosts[host].machines.len() {
            let node = NodeId(node as u32 + 1);
            let event = Event::NodeUp { node, boot, version, devices: devices.clone() };
            self.machine_handles(MachineAt { host, machine }, event);
        }
    }

    fn machine_handles(&mut self, at: MachineAt, event: Event) {
        self.with(at, |machine, now, effects| machine.handle(now, event, effects));
    }

    /// Has a machine do something, and carries out what it wants; nothing where there is no such machine.
    pub fn with<T>(
        &mut self,
        at: MachineAt,
        act: impl FnOnce(&mut M, Instant, &mut Effects<Effect>) -> T,
    ) -> Option<T> {
        let slot = self.hosts[at.host].machines.get_mut(at.machine)?.as_mut()?;
        let mut effects = std::mem::take(&mut self.host_effects);
        let done = act(&mut slot.machine, self.now, &mut effects);
        self.handled += 1;
        let turn = slot.machine.last_turn();
        self.longest_slice = self.longest_slice.max((turn.sliced, turn.of));
        let longest = self.longest_slices.entry(turn.of).or_default();
        *longest = turn.sliced.max(*longest);
        if self.handled.is_multiple_of(VERIFIED_EVERY) {
            slot.machine.verify();
        }
        for encryption in slot.machine.take_encryptions() {
            self.encryptions.note(encryption);
        }
        let list = effects.take();
        self.host_effects = effects;
        for effect in list {
            self.machine_effect(at, effect);
        }
        self.arm_host(at);
        Some(done)
    }

    fn machine_effect(&mut self, at: MachineAt, effect: Effect) {
        match effect {
            Effect::Send { node, lane, token, request, urgency, payload } => {
                let host = &mut self.hosts[at.host];
                // The end of the connection may be among the effects of the same event.
                let Some(conn) = self.net.current(at.host, node.0 as usize - 1) else { return };
                host.next_token += 1;
                let wire = host.next_token;
                let version = self.net.conn(conn).expect("current").version;
                assert!(request.since() <= version, "{request:?} to a node that speaks version {version}");
                self.net.conn_mut(conn).expect("current").waiting.insert(wire, (at.machine, token));
                let payload = holdfast_base::buf::concat(&payload);
                let stream = Stream { conn, lane: lane_index(lane), toward: Toward::Node };
                let beside = Beside::of(&request, urgency).in_version(version);
                self.send(stream, Message { token: wire, body: Body::Request(request, beside), payload });
            }
            Effect::Took { .. } => {}
            Effect::Reply(reply) => {
                let words = [26, reply.token.0, u64::from(reply.result.is_ok())];
                self.trace.event(self.now, &words, || format!("{at:?} replies {reply:?}"));
                self.outputs.push_back(Output::Reply { at, reply });
            }
            Effect::Talk { to, talk } => {
                self.trace.event(self.now, &[28], || format!("{at:?} tells {to:?} {talk:?}"));
                self.outputs.push_back(Output::Talk { at, to, talk });
            }
            Effect::Meta { token, request } => self.call_meta(at, token, request),
            Effect::Work { job, task, blocks, .. } => self.work_later(at, job, &task, &blocks),
            Effect::Reconnect { node } => {
                if let Some(conn) = self.net.current(at.host, node.0 as usize - 1) {
                    self.drop_connection(conn);
                }
            }
            Effect::Notice(notice) => {
                self.trace.event(self.now, &[27], || format!("{at:?} notices {notice:?}"));
                self.outputs.push_back(Output::Notice { at, notice });
            }
        }
    }

    /// The work is done at once, and that is told when a worker could have done it: mostly soon, at times too late.
    fn work_later(&mut self, at: MachineAt, job: u64, task: &Task, blocks: &[Buf]) {
        let outcome = task.work(blocks);
        let event = Event::Worked { job, outcome };
        let us_max = if self.prng.chance(50) { 80_000 } else { 8_000 };
        let after = Duration::from_micros(self.prng.between(50, us_max));
        self.tell_later(at, after, event);
    }

    /// A machine hears of something after a while, if it is still there.
    pub fn tell_later(&mut self, at: MachineAt, after: Duration, event: Event) {
        let due = self.now + after;
        let number = self.packing.begun;
        self.packing.begun += 1;
        let by = (at, self.hosts[at.host].generation);
        self.packing.ends.insert(number, (by, event));
        self.schedule(due, Happening::Worked { number });
    }

    /// A process that is stopped hears of it later, one that was started since does not.
    pub(crate) fn worked(&mut self, number: u64) {
        let ((at, generation), _) = self.packing.ends[&number];
        let host = &self.hosts[at.host];
        if host.paused {
            return self.schedule(self.now + Duration::from_millis(1), Happening::Worked { number });
        }
        let is_there = host.generation == generation;
        let (_, event) = self.packing.ends.remove(&number).expect("just seen");
        if is_there {
            self.machine_handles(at, event);
        }
    }

    /// The host leaves a connection: its machines hear that the node is down, and it connects again.
    fn drop_connection(&mut self, id: ConnId) {
        let Some(conn) = self.net.conn(id).filter(|c| c.host_open) else { return };
        let (host, node) = (conn.host, conn.node);
        self.trace.event(self.now, &[28, id.0], || format!("h{host} leaves {id:?} to n{}", node + 1));
        self.close_from_host(id);
        if self.hosts[host].nodes[node].up.take().is_some() {
            for machine in 0..self.hosts[host].machines.len() {
                self.machine_handles(MachineAt { host, machine }, Event::NodeDown { node: NodeId(node as u32 + 1) });
            }
        }
        self.connect_later(host, node, Duration::from_micros(200));
    }

    /// What was sent may still reach the node, in part, and then the end.
    fn close_from_host(&mut self, id: ConnId) {
        self.net.close_host_side(id);
        self.end_streams(id, Toward::Node);
        self.net.sweep();
    }

    pub(crate) fn connect_later(&mut self, host: usize, node: usize, pause: Duration) {
        let generation = self.hosts[host].generation;
        self.schedule(self.now + pause, Happening::Connect { host, generation, node });
    }

    pub(crate) fn connect(&mut self, host: usize, generation: u64, node: usize) {
        if self.hosts[host].generation == generation {
            self.host_input(host, Input::Connect { node });
        }
    }

    fn try_connect(&mut self, host: usize, node: usize) {
        if self.net.current(host, node).is_some() {
            return;
        }
        // The kernel accepts for a process that hangs.
        if !self.nodes[node].is_up() || !self.net.link(host, node).is_up() {
            let pause = CONNECT_PAUSE + Duration::from_nanos(self.prng.below(CONNECT_PAUSE.as_nanos() as u64));
            self.connect_later(host, node, pause);
            return;
        }
        let conn = self.net.open(host, node);
        let generation = self.hosts[host].generation;
        let versions = if self.mixed { versions_of(generation.is_multiple_of(2)) } else { WIRE };
        for lane in 0..LANES.len() {
            let hello = Request::Hello { versions, grid: self.grid, host: format!("host{host}") };
            let message = Message { token: 0, body: Body::Request(hello, Beside::default()), payload: Buf::empty() };
            self.send(Stream { conn, lane, toward: Toward::Node }, message);
        }
        self.schedule(self.now + HELLO_PATIENCE, Happening::HelloTimeout { conn });
    }

    pub(crate) fn hello_timeout(&mut self, conn: ConnId) {
        if let Some(c) = self.net.conn(conn).filter(|c| c.host_open && c.greeted != [true; 2]) {
            let host = c.host;
            self.host_input(host, Input::HelloTimeout(conn));
        }
    }

    fn give_up_greeting(&mut self, conn: ConnId) {
        if self.net.conn(conn).is_some_and(|c| c.host_open && c.greeted != [true; 2]) {
            self.drop_connection(conn);
        }
    }

    fn arm_host(&mut self, at: MachineAt) {
        let now = self.now;
        let Some(slot) = self.hosts[at.host].machines[at.machine].as_mut() else { return };
        let Some(due) = slot.machine.next_deadline() else { return };
        if slot.tick_due.is_none_or(|t| due < t) {
            slot.tick_due = Some(due);
            self.schedule(due.max(now), Happening::HostTick { at, due });
        }
    }

    pub(crate) fn host_tick(&mut self, at: MachineAt, due: Instant) {
        let now = self.now;
        let host = &mut self.hosts[at.host];
        if host.paused {
            return;
        }
        let Some(slot) = host.machines[at.machine].as_mut().filter(|s| s.tick_due == Some(due)) else { return };
        slot.tick_due = None;
        if slot.machine.next_deadline().is_some_and(|d| d <= now) {
            self.machine_handles(at, Event::Tick);
            let slot = self.hosts[at.host].machines[at.machine].as_ref();
            let again = slot.and_then(|s| s.machine.next_deadline());
            assert!(again.is_none_or(|d| d > now), "{at:?} wants a tick at an instant that has passed: {again:?}");
        } else {
            self.arm_host(at);
        }
    }
}
