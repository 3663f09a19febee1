//! The machine of one host: events in, effects out.
//!
//! One event is handled to its end. What parts push gathers in queues, and [`Host::handle`] works these off until all are
//! empty: so no part is ever entered twice.
//!
//! Parts: [`Volumes`] with a controller each, sessions of clients, forwarding between hosts, groups of snapshots, and
//! those who wait for what an order asked for.

use crate::access::Caller;
use crate::admission::Room;
use crate::event::{Call, ChangeOutcome, Effect, Event, Level, News, OpenSpec, Ownership, Policy};
use crate::groups::Groups;
use crate::homes::Names;
use crate::inspections::Inspections;
use crate::mutations::Mutations;
use crate::offers::Forward;
use crate::packing::{Job, Packing, PackingFigures, PackingShare};
use crate::requests::{Answered, Requester};
use crate::sessions::Session;
use crate::turns::{Left, Turns};
use crate::volumes::{Budget, Care, Volume, Volumes, Wait};
use crate::waiters::Waiters;
use crate::writers::WriterEvent;
use holdfast_base::time::earliest;
use holdfast_base::{
    BlockError, BlockReply, BlockRequest, DeviceId, Effects, ExportInfo, GridId, HeadId, InstanceId, Instant, NodeId,
    ObjectId, Slab, Token, VolumeId,
};
use holdfast_format::talk::Talk;
use holdfast_format::wire::{DeviceHealth, DeviceStat};
use holdfast_qos::Isolation;
use holdfast_stages::Totals;
use holdfast_volume::{Change, Effect as VolumeEffect, Event as VolumeEvent, Notice, SlowBecause, State, Turn};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// Pace of what needs no better.
const CHORES_PACE: Duration = Duration::from_secs(1);

/// Controllers are told of free space that grows or shrinks by one of so many parts of a device: a small part of what they
/// keep free.
const ROOM_PARTS: u64 = 256;

/// How a host is set up.
#[derive(Clone, Debug)]
pub struct Config {
    pub grid: GridId,
    pub name: String,
    /// Which of the host's reactors the machine runs on, and how many there are.
    pub reactor: usize,
    pub reactors: usize,
    /// Of this start; openings of volumes get theirs from it, by counting up.
    pub instance: InstanceId,
    pub budget: Budget,
    pub care: Care,
    /// Of volumes from each other; without any, no more is kept than limits.
    pub isolation: Option<Isolation>,
    /// Of CPU.
    pub packing: PackingShare,
    /// Places of sessions.
    pub room: Room,
    /// Volumes that the budget is divided by.
    pub expected_volumes: usize,
    pub mutations: Mutations,
    pub of_controllers: holdfast_volume::Mutations,
    /// Changes a controller's configuration; for simulations of small volumes.
    pub tune: fn(&mut holdfast_volume::Config),
}

pub(crate) type Out<'a> = &'a mut Effects<Effect>;

/// A node that is up: what its greeting said.
struct NodeUp {
    boot: InstanceId,
    version: u32,
    devices: Vec<DeviceStat>,
}

/// One host; see the module.
#[cfg(test)]
impl Config {
    pub(crate) fn for_tests(reactor: usize) -> Config {
        let (hour, year) = (Duration::from_secs(3600), Duration::from_secs(1 << 25));
        Config {
            reactor,
            reactors: 3,
            grid: GridId(7),
            name: "a".to_string(),
            instance: InstanceId(1),
            budget: Budget { writeback_bytes: 1 << 30, map_cache_bytes: 1 << 30, read_ahead_bytes: 0 },
            care: Care { rebuild_after: hour, scrub_every: year },
            isolation: Some(Isolation::default()),
            packing: PackingShare::default(),
            room: Room { max: 8, kept_for_local: 1 },
            expected_volumes: 1,
            mutations: Mutations::default(),
            of_controllers: holdfast_volume::Mutations::default(),
            tune: |_| {},
        }
    }
}

pub struct Host {
    pub(crate) volumes: Volumes,
    pub(crate) sessions: Slab<Session>,
    pub(crate) room: Room,
    pub(crate) forward: Forward,
    pub(crate) groups: Groups,
    pub(crate) turns: Turns,
    pub(crate) packing: Packing,
    pub(crate) waiters: Waiters,
    pub(crate) totals: Box<Totals>,
    nodes_up: BTreeMap<NodeId, NodeUp>,
    pub(crate) nodes_away: BTreeSet<NodeId>,
    pub(crate) inspections: Inspections,
    pub(crate) local_nodes: BTreeSet<NodeId>,
    /// Devices that volumes leave.
    pub(crate) draining: BTreeSet<DeviceId>,
    volume_effects: Effects<VolumeEffect>,
    pub(crate) replies: VecDeque<(Token, BlockReply)>,
    /// What volumes tell each other: from this one, to that one.
    talks: VecDeque<(Token, VolumeId, Box<Talk>)>,
    /// About who may write to a volume, or a clone in it.
    pub(crate) writer_events: VecDeque<(Token, HeadId, WriterEvent)>,
    pub(crate) closed: VecDeque<Token>,
    pub(crate) changed: Vec<VolumeId>,
    /// Volumes that something happened to in this event.
    touched: Vec<Token>,
    /// The one that has done the most maintenance since that was asked for anew.
    busiest: Option<(Token, Turn)>,
    pub(crate) now: Instant,
    chores_at: Instant,
    pub(crate) is_stopping: bool,
    pub(crate) mutations: Mutations,
    /// Of volumes that are gone, by the mutation.
    pub(crate) kept_filters: BTreeMap<VolumeId, Vec<(HeadId, holdfast_filter::Stack)>>,
    #[cfg(feature = "simulated")]
    pub(crate) observed: crate::observed::Observed,
}

impl Host {
    pub fn new(config: &Config) -> Host {
        Host {
            volumes: Volumes::new(config),
            // One more comes before another is refused.
            sessions: Slab::new(config.room.max + 1),
            room: config.room,
            forward: Forward::new(config),
            groups: Groups::new(config.reactor),
            turns: Turns::new(config),
            packing: Packing::new(config.packing, config.mutations),
            waiters: Waiters::default(),
            totals: Box::default(),
            nodes_up: BTreeMap::new(),
            nodes_away: BTreeSet::new(),
            inspections: Inspections::default(),
            local_nodes: BTreeSet::new(),
            draining: BTreeSet::new(),
            volume_effects: Effects::new(),
            replies: VecDeque::new(),
            talks: VecDeque::new(),
            writer_events: VecDeque::new(),
            closed: VecDeque::new(),
            changed: Vec::new(),
            touched: Vec::new(),
            busiest: None,
            now: Instant::ZERO,
            chores_at: Instant::ZERO,
            is_stopping: false,
            mutations: config.mutations,
            kept_filters: BTreeMap::new(),
            #[cfg(feature = "simulated")]
            observed: crate::observed::Observed::default(),
        }
    }

    /// Handles one event to its end; everything wanted of the world is in `out` afterwards. Time does not go back.
    pub fn handle(&mut self, now: Instant, event: Event, out: Out) {
        let now = self.pass_to(now);
        match event {
            Event::Node { node, call: Call { volume, token }, reply, times, payload } => {
                self.drive(now, volume, VolumeEvent::Node { node, token, reply, times, payload }, out);
            }
            Event::Request { session, request } => self.on_request(now, session, request, out),
            Event::Meta { call, reply } => {
                self.drive(now, call.volume, VolumeEvent::Meta { token: call.token, reply }, out);
            }
            Event::Worked { call, outcome, cpu } => {
                self.packing.done(now, call, cpu);
                self.drive(now, call.volume, VolumeEvent::Worked { job: call.token, outcome }, out);
            }
            Event::NodeUp { node, boot, version, devices } => {
                self.nodes_up.insert(node, NodeUp { boot, version, devices });
                let event = self.node_up(node);
                self.drive_all(now, &event, out);
            }
            Event::NodeDown { node } => {
                self.nodes_up.remove(&node);
                self.drive_all(now, &VolumeEvent::NodeDown { node }, out);
            }
            Event::Devices { node, devices } => self.on_devices(now, node, devices, out),
            Event::NodesAway(nodes) => self.nodes_away = nodes,
            Event::Close { session } => self.close_session(session),
            Event::Peer(event) => self.forward.hear(event),
            Event::Order { ticket, order } => self.on_order(now, ticket, order, out),
            Event::Sibling { reactor, message } => self.on_sibling(now, reactor, message, out),
            Event::Tick => self.on_tick(now, out),
        }
        self.settle(now, out);
    }

    /// The time of what is handled now.
    pub(crate) fn pass_to(&mut self, now: Instant) -> Instant {
        self.now = self.now.max(now);
        self.now
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        let machines = earliest(self.volumes.next_deadline(), self.groups.next_deadline());
        let machines = earliest(machines, earliest(self.turns.next_deadline(), self.packing.next_deadline()));
        let machines = earliest(machines, self.inspections.next_deadline());
        earliest(earliest(machines, self.forward.next_deadline()), Some(self.chores_at))
    }

    // ---- what others may see ----

    /// How packing fares, of all volumes here.
    pub fn packing(&self, now: Instant) -> PackingFigures {
        self.packing.figures(now)
    }

    /// # Panics
    /// An invariant of a part does not hold.
    pub fn verify(&self) {
        self.verify_turns();
        self.packing.verify();
    }

    /// A turn begins, in which any number of events may be handled.
    pub fn begin_turn(&mut self) {
        self.busiest = None;
    }

    /// The volume that has done the most maintenance in this turn, and how much of what.
    pub fn busiest(&self) -> Option<(&str, Turn)> {
        let (at, turn) = self.busiest?;
        Some((self.volumes.table.get(at)?.name(), turn))
    }

    /// The open volume of that name, or the one that a clone of that name is in.
    pub fn find(&self, name: &str) -> Option<(&Volume, HeadId)> {
        let (at, head) = self.volumes.find_open(name)?;
        Some((self.volumes.table.get(at)?, head))
    }

    pub fn find_id(&self, volume: VolumeId) -> Option<&Volume> {
        self.volumes.table.get(self.volumes.find_id(volume)?)
    }

    pub fn volumes(&self) -> impl Iterator<Item = &Volume> {
        self.volumes.table.iter().map(|(_, volume)| volume)
    }

    /// All volumes in service, and the clones in them, by name.
    pub fn heads(&self) -> impl Iterator<Item = (&str, &Volume, HeadId)> {
        self.volumes.heads().filter_map(|(name, at, head)| Some((name, self.volumes.table.get(at)?, head)))
    }

    /// Names of an open volume and of the clones in it, and what clients may open of them, with the volume or clone that each
    /// export is of.
    pub fn shown(&self, volume: VolumeId) -> Option<Names> {
        let at = self.volumes.find_id(volume)?;
        let found = self.volumes.table.get(at)?;
        let own = || self.volumes.heads().filter(|(_, of, _)| *of == at);
        let names = own().map(|(name, ..)| name.to_string()).chain([found.name.clone()]).collect();
        let exports = own().filter_map(|(name, _, head)| Some((found.exports(name, head), found.id_of(head)?)));
        Some((names, exports.flat_map(|(exports, id)| exports.into_iter().map(move |export| (export, id))).collect()))
    }

    /// Volumes, clones and snapshots that this client may have, here or by way of other hosts.
    pub fn exports(&self, caller: &Caller) -> Vec<ExportInfo> {
        let mut list = self.volumes.exports();
        let away: Vec<_> = self.forward.exports().filter(|e| list.iter().all(|own| own.name != e.name)).collect();
        list.extend(away);
        list.retain(|export| self.why_refused(caller, &export.name).is_none());
        list
    }

    /// An export as the client sees it, if it may have it.
    pub fn export(&self, caller: &Caller, name: &str) -> Option<ExportInfo> {
        if self.why_refused(caller, name).is_some() {
            return None;
        }
        self.volumes.export(name).or_else(|| Some(self.forward.export(name)?.1))
    }

    /// Snapshots of an export, with the layers that changes can be counted from.
    pub fn snapshots(&self, export: &str) -> Vec<(String, ObjectId)> {
        self.volumes.snapshots(export)
    }

    // ---- controllers ----

    fn node_up(&self, node: NodeId) -> VolumeEvent {
        let up = &self.nodes_up[&node];
        VolumeEvent::NodeUp { node, boot: up.boot, version: up.version, devices: up.devices.clone() }
    }

    /// A node tells how its devices are. Controllers ask by themselves, but seldom while nobody uses their volumes: they
    /// are told where one serves or serves no more, and has more room or less.
    fn on_devices(&mut self, now: Instant, node: NodeId, devices: Vec<DeviceStat>, out: Out) {
        let Some(up) = self.nodes_up.get_mut(&node) else { return };
        let has_changed = states_of(&up.devices) != states_of(&devices);
        up.devices.clone_from(&devices);
        if has_changed {
            self.drive_all(now, &VolumeEvent::Devices { node, devices }, out);
        }
    }

    /// Opens a volume, and tells its controller what is up.
    pub(crate) fn open_volume(
        &mut self,
        now: Instant,
        spec: OpenSpec,
        (exported, begin): (bool, VolumeEvent),
        out: Out,
    ) -> Token {
        info(out, format!("volume {} ({}) is being opened", spec.name, spec.volume));
        self.changed.push(spec.volume);
        let kept_filters = self.kept_filters.remove(&spec.volume);
        let at = self.volumes.insert(now, spec, exported);
        if let (Some(filters), Some(volume)) = (kept_filters, self.volumes.table.get_mut(at)) {
            volume.filters = filters;
        }
        for node in self.nodes_up.keys().copied().collect::<Vec<_>>() {
            let event = self.node_up(node);
            self.drive(now, at, event, out);
        }
        self.drive(now, at, VolumeEvent::LocalNodes { nodes: self.local_nodes.clone() }, out);
        if !self.draining.is_empty() {
            self.drive(now, at, VolumeEvent::Drain { devices: self.draining.clone() }, out);
        }
        self.tell_claims(now, out);
        self.drive(now, at, begin, out);
        at
    }

    /// Gives an event to a controller and carries out what it wants.
    pub(crate) fn drive(&mut self, now: Instant, at: Token, event: VolumeEvent, out: Out) {
        let Some(volume) = self.volumes.table.get_mut(at) else { return };
        #[cfg(feature = "simulated")]
        {
            self.observed.entered += 1;
        }
        let mut effects = std::mem::take(&mut self.volume_effects);
        volume.controller.handle(now, event, &mut effects);
        let turn = volume.controller.last_turn();
        if turn.runs > self.busiest.map_or(0, |(_, most)| most.runs) {
            self.busiest = Some((at, turn));
        }
        self.touch(at);
        for effect in effects.drain() {
            match effect {
                VolumeEffect::Send { node, lane, token, request, urgency, payload } => {
                    let call = Call { volume: at, token };
                    out.push(Effect::Send { node, lane, call, request, urgency, payload });
                }
                VolumeEffect::Reply(reply) => self.replies.push_back((at, reply)),
                VolumeEffect::Took { token, spans } => {
                    if let Some(volume) = self.volumes.table.get_mut(at) {
                        volume.requests.took(token, spans);
                    }
                }
                VolumeEffect::Meta { token, request } => {
                    out.push(Effect::Meta { call: Call { volume: at, token }, request });
                }
                VolumeEffect::Talk { to, talk } => self.talks.push_back((at, to, talk)),
                VolumeEffect::Work { job, task, blocks, until } => {
                    self.packing.ask(now, Job { call: Call { volume: at, token: job }, task, blocks, until });
                }
                VolumeEffect::Reconnect { node } => out.push(Effect::Reconnect { node }),
                VolumeEffect::Notice(notice) => {
                    self.groups.on_notice(at, &notice);
                    self.on_notice(at, &notice, out);
                }
            }
        }
        self.volume_effects = effects;
    }

    pub(crate) fn drive_all(&mut self, now: Instant, event: &VolumeEvent, out: Out) {
        for at in self.volumes.tokens() {
            self.drive(now, at, event.clone(), out);
        }
    }

    fn on_notice(&mut self, at: Token, notice: &Notice, out: Out) {
        let Some(volume) = self.volumes.table.get_mut(at) else { return };
        match notice {
            Notice::StateChanged(state) => return self.on_state(at, *state, out),
            Notice::OpenWaits { why } => volume.waits = Some(Wait::new(why)),
            Notice::Resized { size_bytes } => {
                self.waiters.on_resized(at, *size_bytes, out);
                self.tell_size(at, HeadId::VOLUME, *size_bytes, out);
            }
            Notice::LayoutSet { layout } => self.waiters.on_policy_set(at, Policy::Layout(*layout), out),
            Notice::TiersSet { tiers } => self.waiters.on_policy_set(at, Policy::Tiers(*tiers), out),
            Notice::CompressionSet { compression } => {
                self.waiters.on_policy_set(at, Policy::Compression(*compression), out)
            }
            Notice::Changed { change, .. } => {
                self.volumes.refresh_clones(at);
                self.turns.left.push_back(Left::Clones { at });
                if let Some(volume) = self.volumes.table.get(at) {
                    // Before anybody is told that it is done.
                    out.push(Effect::Changed { volume: volume.id });
                }
                self.waiters.on_change(at, change, &ChangeOutcome::Done, out);
                if let Change::ResizeClone { head, size_bytes } = change {
                    self.tell_size(at, *head, *size_bytes, out);
                }
            }
            Notice::Refused { change, why } => self.waiters.on_change(at, change, &ChangeOutcome::Refused(why), out),
            Notice::DependentCreated { .. } | Notice::DependentRefused { .. } => {
                self.waiters.on_dependent_notice(at, notice, out)
            }
            Notice::Prepared => self.waiters.on_prepared(at, true, out),
            Notice::NotPrepared => self.waiters.on_prepared(at, false, out),
            Notice::QuiesceEnded { .. } => volume.quiesced_at = Some(self.now),
            _ => {}
        }
        let name = self.volumes.table.get(at).map_or("", |volume| &volume.name);
        if let Some((level, text)) = text_of(name, notice) {
            out.push(Effect::Log { level, text });
        }
    }

    fn on_state(&mut self, at: Token, state: State, out: Out) {
        let Some(volume) = self.volumes.table.get(at) else { return };
        let (id, name, exported) = (volume.id, volume.name.clone(), volume.exported);
        self.changed.push(id);
        match state {
            // A host that puts a volume into service does not ask the steward.
            State::Deposed if !exported => {
                info(out, format!("volume {name}: it is put into service, and not looked after any more"));
                self.waiters.on_changes_lost(at, out);
            }
            State::Deposed if self.forward.is_offered(id) => {
                info(out, format!("volume {name}: another host has it now; clients go on through this one"));
                self.waiters.on_changes_lost(at, out);
                self.closed.push_back(at);
            }
            State::Deposed => {
                error(
                    out,
                    format!(
                        "volume {name}: another host has taken it over; `holdfast volume export {name} --takeover` takes it back"
                    ),
                );
                self.waiters.on_changes_lost(at, out);
            }
            state => {
                info(out, format!("volume {name} is {}", state_word(state)));
                match state {
                    State::Closed => self.closed.push_back(at),
                    State::Open => {
                        self.volumes.refresh_clones(at);
                        self.on_serving(at, out);
                    }
                    _ => {}
                }
            }
        }
    }

    /// A volume's deadlines may have changed.
    pub(crate) fn touch(&mut self, at: Token) {
        if self.touched.last() != Some(&at) {
            self.touched.push(at);
        }
    }

    /// Works off everything that parts pushed, and what follows from that.
    pub(crate) fn settle(&mut self, now: Instant, out: Out) {
        loop {
            if self.settle_groups(now, out) {
                // It may have pushed more.
            } else if self.settle_left(now, out) {
                // The same.
            } else if let Some((at, reply)) = self.replies.pop_front() {
                self.on_volume_reply(now, at, reply, out);
            } else if let Some((at, head, event)) = self.writer_events.pop_front() {
                self.drive_writers(now, at, head, event, out);
            } else if self.settle_packing(now, out) {
                // The same.
            } else if let Some((from, to, talk)) = self.talks.pop_front() {
                self.on_talk(now, from, to, talk, out);
            } else if let Some(at) = self.closed.pop_front() {
                self.on_volume_closed(now, at, out);
            } else if !self.settle_forward(now, out) {
                break;
            }
        }
        // Not before: in between a deadline may be one that is just being seen to.
        while let Some(at) = self.touched.pop() {
            self.volumes.arm(at);
        }
        if !self.changed.is_empty() {
            let mut changed = std::mem::take(&mut self.changed);
            changed.sort_unstable();
            changed.dedup();
            changed.into_iter().for_each(|volume| out.push(Effect::Changed { volume }));
        }
    }

    /// What may be packed goes to the worker; volumes hear of what may not.
    fn settle_packing(&mut self, now: Instant, out: Out) -> bool {
        if let Some((call, task)) = self.packing.refused.pop_front() {
            let outcome = task.not_done();
            self.drive(now, call.volume, VolumeEvent::Worked { job: call.token, outcome }, out);
            return true;
        }
        let Some(Job { call, task, blocks, .. }) = self.packing.next(now) else { return false };
        out.push(Effect::Work { call, task, blocks });
        true
    }

    /// A controller's answer.
    pub(crate) fn on_volume_reply(&mut self, now: Instant, at: Token, reply: BlockReply, out: Out) {
        let answered = self.volumes.table.get_mut(at).and_then(|v| v.requests.answered(reply.token));
        let Some(Answered { origin, way, turn, clear }) = answered else { return };
        if reply.result.is_ok() {
            self.note_took(now, at, &origin, &way);
        }
        self.forward.cleared.extend(clear);
        if let Some(head) = origin.changes {
            self.on_change_answered(now, (at, head), &origin, reply.result.is_ok());
            if !matches!(origin.requester, Requester::Filters(_)) {
                self.look_at_room(at, &reply, out);
            }
        }
        self.answer(now, at, origin, reply.result, out);
        if let Some(turn) = turn {
            self.end_turn(now, at, turn, out);
        }
    }

    /// A controller has stopped for good: its clients go, and who waited for it is told.
    pub(crate) fn on_volume_closed(&mut self, now: Instant, at: Token, out: Out) {
        self.drop_turns(now, at, out);
        // A reply that passes filters comes here a second time.
        while let Some(n) = self.replies.iter().position(|(of, _)| *of == at) {
            let (_, reply) = self.replies.remove(n).expect("just seen");
            self.on_volume_reply(now, at, reply, out);
        }
        self.give_up_held(now, at, out);
        self.give_up_filters(at);
        if let Some((requests, waiting)) = self.volumes.table.get_mut(at).map(|volume| volume.requests.give_up()) {
            // One that was dropped with requests under way: what became of them its successor knows.
            for token in requests {
                self.on_volume_reply(now, at, BlockReply { token, result: Err(BlockError::Deposed) }, out);
            }
            self.forward.cleared.extend(waiting);
        }
        self.let_sessions_go(at, out);
        let gone = self.volumes.remove(at);
        self.packing.forget(at);
        self.groups.on_gone(at);
        self.waiters.on_closed(at, out);
        if let Some(volume) = gone {
            self.changed.push(volume.id);
            self.on_unserved(at, volume.id, out);
        }
    }

    /// Ticks all that is due. What follows from that may make volumes due that were idle: these have their tick in the
    /// same event.
    fn on_tick(&mut self, now: Instant, out: Out) {
        let mut ticked = BTreeSet::new();
        self.tick_volumes(now, &mut ticked, out);
        self.tick_groups(now, out);
        self.tick_turns(now, out);
        self.tick_inspections(now, out);
        self.forward.tick(now);
        self.do_chores(now, out);
        self.settle(now, out);
        while self.tick_volumes(now, &mut ticked, out) {
            self.settle(now, out);
        }
    }

    /// Ticks volumes that are due, each once in an event; false where there is none.
    fn tick_volumes(&mut self, now: Instant, ticked: &mut BTreeSet<Token>, out: Out) -> bool {
        let mut is_any = false;
        for at in self.volumes.take_due(now) {
            if ticked.insert(at) {
                is_any = true;
                self.drive(now, at, VolumeEvent::Tick, out);
                self.tick_filters(now, at, out);
                self.tick_writers(now, at, out);
            }
            self.touch(at);
        }
        is_any
    }

    fn do_chores(&mut self, now: Instant, out: Out) {
        if self.chores_at > now {
            return;
        }
        self.chores_at = now + CHORES_PACE;
        self.tell_set_aside(now, out);
        for at in self.volumes.tokens() {
            let Some(volume) = self.volumes.table.get_mut(at) else { continue };
            if let Some(text) = volume.tell_waiting(now) {
                warn(out, text);
            }
            if volume.is_to_be_dropped() {
                self.on_volume_closed(now, at, out);
            }
        }
    }

    // ---- news ----

    fn tell_size(&mut self, at: Token, head: HeadId, size_bytes: u64, out: Out) {
        let uses = |s: &Session| s.is_bound_to(at, holdfast_volume::Target::Head(head));
        self.tell_news(uses, News::SizeBytes(size_bytes), out);
    }

    /// A write that finds no room, and the first one that does again, are news.
    fn look_at_room(&mut self, at: Token, reply: &BlockReply, out: Out) {
        let Some(volume) = self.volumes.table.get_mut(at) else { return };
        let is_full = match reply.result {
            Ok(_) => false,
            Err(BlockError::NoSpace) => true,
            Err(_) => return,
        };
        if std::mem::replace(&mut volume.is_full, is_full) != is_full {
            self.tell_news(|session| session.at() == Some(at), News::IsFull(is_full), out);
        }
    }

    pub(crate) fn tell_news(&self, is_for: impl Fn(&Session) -> bool, news: News, out: Out) {
        for (_, session) in self.sessions.iter().filter(|(_, session)| is_for(session)) {
            out.push(Effect::News { to: session.to(), news });
        }
    }

    /// Tells the sessions of an offered volume who serves it.
    pub(crate) fn tell_owner(&self, volume: VolumeId, owner: Ownership, out: Out) {
        self.tell_news(|session| session.is_forwarded() && session.is_of(volume), News::Owner(owner), out);
    }
}

/// As far as a controller that asks seldom is told of it: health, and free space in parts of its capacity.
fn states_of(devices: &[DeviceStat]) -> BTreeMap<DeviceId, (DeviceHealth, u64)> {
    let part = |stat: &DeviceStat| stat.free_bytes / (stat.capacity_bytes / ROOM_PARTS).max(1);
    devices.iter().map(|stat| (stat.device, (stat.health, part(stat)))).collect()
}

/// A session's request as it comes to [`Host::handle`].
pub(crate) struct Asked {
    pub request: BlockRequest,
    /// The earliest that the client may have sent it.
    pub since: Instant,
    pub came_at: Instant,
}

pub(crate) fn info(out: Out, text: String) {
    out.push(Effect::Log { level: Level::Info, text });
}

pub(crate) fn warn(out: Out, text: String) {
    out.push(Effect::Log { level: Level::Warn, text });
}

pub(crate) fn error(out: Out, text: String) {
    out.push(Effect::Log { level: Level::Error, text });
}

fn state_word(state: State) -> &'static str {
    match state {
        State::Opening => "opening",
        State::Open => "open",
        State::Deposed => "deposed",
        State::Closing => "closing",
        State::Closed => "closed",
    }
}

/// What the log says of a controller's notice, if anything.
fn text_of(name: &str, notice: &Notice) -> Option<(Level, String)> {
    let info = |text: String| Some((Level::Info, format!("volume {name}{text}")));
    let warn = |text: String| Some((Level::Warn, format!("volume {name}{text}")));
    let error = |text: String| Some((Level::Error, format!("volume {name}{text}")));
    match notice {
        // Told when it lasts: at the start of a host every volume waits until nodes have greeted.
        Notice::StoreDoubted { is_doubted: true } => error(
            ": the metadata store lacks its newest record: the store was emptied, or set back to an older state. It is \
             served on, and nothing that needs the metadata happens until the right store is back"
                .to_string(),
        ),
        Notice::NotClaimed => info(": who is to serve it has changed; this opening ends".to_string()),
        Notice::StoreDoubted { is_doubted: false } => {
            info(": the metadata store has its newest record again".to_string())
        }
        Notice::Recovered { epoch, last, entries, reappended } => {
            info(format!(": recovered up to {last} in epoch {epoch}: {entries} entries read, {reappended} re-appended"))
        }
        Notice::NodeSuspect { node } => warn(format!(": node {node} is late, and avoided")),
        Notice::NodeTrusted { node } => info(format!(": node {node} is used again")),
        Notice::DeviceSlow { node, device, because } => {
            let how = if matches!(because, SlowBecause::Errors { .. }) { "failing" } else { "slow" };
            warn(format!(": device {device} of node {node} is {how}, and bypassed where that can be: {because}"))
        }
        Notice::DeviceTrusted { node, device } => {
            info(format!(": device {device} of node {node} behaves again, and is used"))
        }
        Notice::RedundancyRestored => info(": full redundancy".to_string()),
        Notice::Resized { size_bytes } => info(format!(" has {size_bytes} bytes now")),
        Notice::LayoutSet { layout } => info(format!(" is written as {layout} from here on")),
        Notice::TiersSet { .. } => info(" has other tiers from here on".to_string()),
        Notice::CompressionSet { compression } => info(format!(" has compression {compression} from here on")),
        Notice::Changed { change, .. } => info(format!(": {}", change_text(change))),
        Notice::DependentCreated { root, .. } => {
            info(format!(": what separate clone {} begins with is written", root.name))
        }
        Notice::ShardDamaged { leg, shard, repaired } => warn(format!(
            ": shard {shard:?} on device {} of node {} is damaged; {}",
            leg.device,
            leg.node,
            if *repaired { "it is being repaired" } else { "it is read elsewhere, and a scrub repairs it" }
        )),
        Notice::Miscounted { segments, shadowed } => error(format!(
            ": what lives was miscounted in {segments} segments{}, and is put right: this is a bug, please report it with \
             this log",
            if *shadowed { ", and what is shadowed in leaves of the map" } else { "" }
        )),
        Notice::QuiesceEnded { whole: false, .. } => {
            info(": answers could not be held back for a group of snapshots".to_string())
        }
        Notice::LedgerRolled { .. } => info(": a new ledger is open".to_string()),
        Notice::StateChanged(_)
        | Notice::OpenWaits { .. }
        | Notice::Refused { .. }
        | Notice::DependentRefused { .. }
        | Notice::Prepared
        | Notice::NotPrepared
        | Notice::Preloaded
        | Notice::Quiesced { .. }
        | Notice::QuiesceEnded { whole: true, .. } => None,
    }
}

/// For the log.
fn change_text(change: &Change) -> String {
    match change {
        Change::Snapshot { name, .. } => format!("snapshot {name} is taken"),
        Change::DropSnapshot { name, .. } => format!("snapshot {name} is deleted; its space returns"),
        Change::Clone { name, .. } => format!("clone {name} is made"),
        Change::DropClone { head } => format!("clone {head} is deleted; its space returns"),
        Change::ResizeClone { head, size_bytes } => format!("clone {head} has {size_bytes} bytes now"),
        Change::Rollback { name, .. } => format!("rolled back to snapshot {name}"),
    }
}
