//! The host: reactors, each a thread with the controllers of its volumes, their links to the nodes, and their clients.
//!
//! Role: the shell of one reactor, around [`holdfast_host::Host`] and [`holdfast_frontend::nbd::Session`]. It moves events to machines and
//! effects to sockets and decides nothing about data. The control plane (metadata records, the control socket, deletions)
//! runs on threads of its own and reaches the reactors by [`commands::Command`].
//!
//! One event is handled to its end: what machines push gathers in queues, and [`Shell::settle`] works them off until all
//! are empty, so that no machine is ever entered twice.
//!
//! Faults: a clean stop closes every volume, which empties its log; a stop that takes longer than [`STOP_MAX`] is as
//! good as a crash, from which the next start recovers.

mod access;
mod alerts;
mod assignment;
mod authority;
pub mod catalog;
mod client;
mod commands;
mod control;
mod control_sockets;
mod copies;
mod devices;
mod errands;
mod executors;
mod filters;
mod floors;
mod forecast;
mod groups;
mod handover;
mod health;
mod http;
pub mod keys;
mod limits;
mod links;
mod locality;
pub mod machines;
pub mod meta;
mod names;
mod nbd;
mod own_devices;
mod packers;
mod peer_query;
mod peers;
pub mod presence;
mod reactors;
pub mod receive;
mod record_watch;
mod records;
mod reservation;
mod revocation;
mod room;
mod separate;
mod sharing;
pub mod signer;
mod start;
mod steward;
mod stop;
mod survey;
pub mod tls;
mod trash;
mod upkeep;
mod volume_info;
mod why;
mod writers;

use crate::logger;
use crate::nbd_uri::Place;
use commands::{Command, Waiters};
use holdfast_base::time::earliest;
use holdfast_base::{BlockRequest, Effects, Instant, NodeId, Slab, Token, VolumeId};
use holdfast_cluster::{Event as AssignmentEvent, Local};
use holdfast_format::forward::{self as wire, Ask, FORWARD, Refusal};
use holdfast_format::wire::Beside;
use holdfast_host::planned;
use holdfast_host::{Call, Effect, Event as HostEvent, Host, HostPlaces, Level, Order, PeerEffect, PeerEvent};
use holdfast_runtime::mailbox::Receiver;
use holdfast_runtime::meta::MetaTicket;
use holdfast_runtime::reactor::{App, Event, Io, ListenerId, Turn};
use holdfast_volume::Event as VolumeEvent;
pub use links::DEVICES_SHOWN_WITHIN;
use links::{LinkEvent, Links, Owner, Question};
use meta::MetaClient;
use nbd::Clients;
use packers::Packers;
use peers::Peers;
use reactors::Own;
pub use start::run;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// How long a stop may take to close the volumes.
const STOP_MAX: Duration = Duration::from_secs(20);

/// Pace of what needs no better.
const CHORES_PACE: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Life {
    Running,
    Stopping { give_up_at: Instant },
}

pub struct Shell {
    name: String,
    /// Which of the host's reactors this is, and the others.
    own: Own,
    host: Host,
    /// What the host wants, and the tray that is being worked off.
    effects: Effects<Effect>,
    spare: Effects<Effect>,
    links: Links,
    peers: Peers,
    clients: Clients,
    /// Where clients connect.
    served_at: Vec<Place>,
    meta: MetaClient,
    packers: Packers,
    /// Calls to the metadata store, by their tickets there.
    meta_calls: Slab<Call>,
    commands: Receiver<Command>,
    waiters: Waiters,
    nbd_listeners: Vec<ListenerId>,
    /// Where other hosts come, if they may.
    host_listeners: Vec<ListenerId>,
    places: HostPlaces,
    /// Of clients, by their sessions here.
    requests: VecDeque<(Token, BlockRequest)>,
    /// Of the batch of events that is being handled: all of it happens at one time.
    now: Instant,
    chores_at: Instant,
    started: Instant,
    local: locality::Local,
    /// Told what this host does with volumes; what it was told last.
    assignment: assignment::Assignment,
    locals: BTreeMap<VolumeId, Local>,
    nodes_away: BTreeSet<NodeId>,
    life: Life,
}

impl Shell {
    fn is_stopping(&self) -> bool {
        self.life != Life::Running
    }

    /// Works off everything that machines pushed, and what follows from that.
    fn settle(&mut self, now: Instant, io: &mut Io) {
        loop {
            if !self.effects.is_empty() {
                let mut effects = std::mem::replace(&mut self.effects, std::mem::take(&mut self.spare));
                for effect in effects.drain() {
                    self.carry_out(now, effect, io);
                }
                self.spare = effects;
            } else if let Some(event) = self.links.events.pop_front() {
                self.on_link_event(now, event);
            } else if let Some((client, request)) = self.requests.pop_front() {
                if let Some(session) = self.opened_by(client) {
                    self.host.handle(now, HostEvent::Request { session, request }, &mut self.effects);
                }
            } else if let Some(event) = self.peers.events.pop_front() {
                self.on_peer_event(now, event);
            } else {
                break;
            }
        }
    }

    fn carry_out(&mut self, now: Instant, effect: Effect, io: &mut Io) {
        match effect {
            Effect::Send { node, lane, call, request, urgency, payload } => {
                let owner = Owner::Volume { volume: call.volume, token: call.token };
                let beside = Beside::of(&request, urgency);
                self.links.send(node, lane, owner, Question { request: &request, beside }, payload, io);
            }
            Effect::Reply { to, reply } => self.on_client_reply(to, reply, io),
            Effect::Meta { call, request } => {
                let ticket = self.meta_calls.insert(call);
                self.meta.service.request(MetaTicket(ticket.0), request);
            }
            Effect::Work { call, task, blocks } => self.packers.work(call, task, blocks),
            Effect::Reconnect { node } => self.links.reconnect(now, node, io),
            Effect::Abort { to, why } => self.on_client_aborted(to, why.as_deref(), io),
            // NBD has no word for news: clients see a new size when they connect anew, and errors say the rest.
            Effect::News { .. } => {}
            Effect::Peer(effect) => self.on_peer_effect(now, effect, io),
            Effect::Sibling { reactor, message } => {
                self.own.tell(reactor, message);
            }
            Effect::Done { ticket, outcome } => self.waiters.on_done(ticket, outcome),
            Effect::Changed { volume } => self.tell_local(volume),
            Effect::Log { level: Level::Info, text } => logger::info(format_args!("{text}")),
            Effect::Log { level: Level::Warn, text } => logger::warn(format_args!("{text}")),
            Effect::Log { level: Level::Error, text } => logger::error(format_args!("{text}")),
        }
    }

    fn on_peer_effect(&mut self, now: Instant, effect: PeerEffect, io: &mut Io) {
        match effect {
            PeerEffect::Ask { peer, token, ask, payload } => self.peers.ask(peer, token, &ask, payload, io),
            PeerEffect::Answer { link, token, answer, payload } => {
                self.peers.answer(link, token, &answer, payload, io);
            }
            PeerEffect::CloseLink { link } => self.peers.close_link(link, io),
            PeerEffect::Reconnect { peer } => {
                self.peers.tell_trouble(peer, "it is connected, but does not answer");
                self.peers.reconnect(now, peer, false, io);
            }
            PeerEffect::Trouble { peer, refusal } => {
                let apart;
                let why = match refusal {
                    Refusal::Version(its) => {
                        apart = its.apart_from(FORWARD);
                        &apart
                    }
                    Refusal::Grid => "it is of another grid: check the addresses",
                    Refusal::Superseded => "it has a newer connection of this host",
                    Refusal::NotOwner | Refusal::Unknown | Refusal::Full => "it has refused the greeting",
                };
                self.peers.tell_trouble(peer, why);
                self.peers.reconnect(now, peer, refusal != Refusal::Superseded, io);
            }
        }
    }

    fn on_peer_event(&mut self, now: Instant, event: PeerEvent) {
        let event = match event {
            PeerEvent::Answer { peer, token, answer, payload } => {
                if matches!(answer, wire::Answer::Hello { .. }) {
                    self.peers.is_well(peer);
                }
                PeerEvent::Answer { peer, token, answer, payload }
            }
            // Who shows one host's certificate and calls itself another is neither.
            PeerEvent::Ask { link, token, ask: Ask::Hello { host, .. }, payload }
                if !self.peers.is_from(link, &host) =>
            {
                PeerEvent::Ask { link, token, ask: Ask::Ping, payload }
            }
            event => event,
        };
        self.host.handle(now, HostEvent::Peer(event), &mut self.effects);
    }

    fn on_link_event(&mut self, now: Instant, event: LinkEvent) {
        let event = match event {
            LinkEvent::Answer { node, volume, token, reply, times, payload } => {
                HostEvent::Node { node, call: Call { volume, token }, reply, times, payload }
            }
            LinkEvent::Up(VolumeEvent::NodeUp { node, boot, version, devices }) => {
                self.tell_nodes_away(now);
                HostEvent::NodeUp { node, boot, version, devices }
            }
            LinkEvent::Up(event) => unreachable!("a link that is up says so by another event than {event:?}"),
            LinkEvent::Down { node } => {
                self.tell_nodes_away(now);
                HostEvent::NodeDown { node }
            }
            LinkEvent::Devices { node, devices } => HostEvent::Devices { node, devices },
            LinkEvent::Control { ticket, reply } => return self.waiters.on_node_answer(ticket, reply),
        };
        self.host.handle(now, event, &mut self.effects);
    }

    /// Tells what this host does with a volume, if that has changed.
    fn tell_local(&mut self, volume: VolumeId) {
        self.own.publish(volume, &self.host);
        let local = self.host.find_id(volume).map(planned::local_of);
        let before = match local {
            Some(local) => self.locals.insert(volume, local),
            None => self.locals.remove(&volume),
        };
        if before != local {
            self.assignment.tell(AssignmentEvent::Local { volume, local });
        }
    }

    fn tell_nodes_away(&mut self, now: Instant) {
        let away = self.links.views().filter(|link| !link.up || link.polls_missed > 1).map(|link| link.node).collect();
        if self.nodes_away != away {
            self.nodes_away = away;
            if self.own.is_front() {
                self.assignment.tell(AssignmentEvent::NodesAway(self.nodes_away.clone()));
            }
            self.host.handle(now, HostEvent::NodesAway(self.nodes_away.clone()), &mut self.effects);
        }
    }

    fn on_timer(&mut self, now: Instant, io: &mut Io) {
        self.links.on_time(now, io);
        self.peers.on_time(now, io);
        if self.host.next_deadline().is_some_and(|at| at <= now) {
            self.host.handle(now, HostEvent::Tick, &mut self.effects);
        }
        if self.chores_at <= now {
            self.chores_at = now + CHORES_PACE;
            self.cut_slow_handshakes(now, io);
            self.tell_nodes_away(now);
        }
    }

    fn on_wake(&mut self, now: Instant, io: &mut Io) {
        for (ticket, reply) in self.meta.answers.drain() {
            if let Some(call) = self.meta_calls.remove(Token(ticket.0)) {
                self.host.handle(now, HostEvent::Meta { call, reply }, &mut self.effects);
            }
        }
        for (call, outcome, cpu) in self.packers.done.drain() {
            self.host.handle(now, HostEvent::Worked { call, outcome, cpu }, &mut self.effects);
        }
        for command in self.commands.drain() {
            self.on_command(now, command, io);
        }
    }

    fn begin_stop(&mut self, now: Instant, io: &mut Io) {
        if self.is_stopping() {
            logger::warn(format_args!("told to stop a second time: volumes are left to recovery"));
            self.own.stop_others();
            return io.stop();
        }
        self.life = Life::Stopping { give_up_at: now + STOP_MAX };
        self.own.stop_others();
        self.tell_host(now, Order::TakeNoMore);
        for client in self.clients.tokens() {
            self.shut_client_down(client, io);
        }
        self.settle(now, io);
        self.tell_host(now, Order::CloseAll);
    }

    /// Ends the reactor once every volume is closed, or has had its time.
    fn finish_stop(&mut self, now: Instant, io: &mut Io) {
        let Life::Stopping { give_up_at } = self.life else { return };
        let open = self.host.count_open();
        if (open > 0 || !self.own.may_end()) && now < give_up_at {
            return;
        }
        if open > 0 {
            logger::warn(format_args!(
                "{open} volumes could not be closed in time; their logs are read at the next start"
            ));
        }
        for client in self.clients.tokens() {
            self.abort_client(client, io);
        }
        self.own.end();
        io.stop();
    }
}

impl App for Shell {
    fn on_event(&mut self, now: Instant, event: Event<'_>, io: &mut Io) {
        self.now = now;
        self.host.begin_turn();
        match event {
            Event::Bytes { conn, bytes } => {
                if let Some(client) = self.clients.owner(conn) {
                    self.on_client_bytes(now, client, bytes, io);
                } else if self.peers.owns(conn) {
                    self.peers.on_bytes(now, conn, bytes, io);
                } else {
                    self.links.on_bytes(now, conn, bytes, io);
                }
            }
            Event::Timer => self.on_timer(now, io),
            Event::Wake => self.on_wake(now, io),
            Event::Accepted { listener, conn, peer, address, .. } if self.host_listeners.contains(&listener) => {
                self.peers.on_accepted(now, conn, (peer, address), io);
            }
            Event::Accepted { listener, conn, peer, address, process } => {
                assert!(self.nbd_listeners.contains(&listener), "only clients of volumes are accepted here");
                self.on_client(now, conn, (peer, address, process), io);
            }
            Event::TurnedAway { listener, peer } if self.host_listeners.contains(&listener) => {
                self.peers.on_turned_away(now, &peer);
            }
            Event::TurnedAway { peer, .. } => self.on_turned_away(now, &peer),
            Event::Connected { conn } if self.peers.owns(conn) => self.peers.on_connected(conn),
            Event::Connected { conn } => self.links.on_connected(conn, io),
            Event::ConnectFailed { conn, error } | Event::Closed { conn, error } if self.peers.owns(conn) => {
                self.peers.on_lost(now, conn, &error.to_string(), io);
            }
            Event::ConnectFailed { conn, error } => self.links.on_lost(now, conn, error, io),
            Event::Closed { conn, error } => match self.clients.owner(conn) {
                Some(client) => self.forget_client(now, client),
                None => self.links.on_lost(now, conn, error, io),
            },
            Event::Shutdown { .. } => self.begin_stop(now, io),
            Event::Detached { conn, socket, bytes } => self.on_detached(now, conn, socket, bytes, io),
            Event::Filled { conn, buf } if self.peers.owns(conn) => {
                self.peers.on_filled(now, conn, buf, io);
            }
            Event::Filled { conn, buf } => match self.clients.owner(conn) {
                Some(client) => self.on_client_filled(client, buf, io),
                None => self.links.on_filled(now, conn, buf, io),
            },
            Event::Read { .. } | Event::Written { .. } | Event::Discarded { .. } => {
                unreachable!("a host has no devices")
            }
        }
        self.settle(now, io);
    }

    fn on_batch_end(&mut self, now: Instant, io: &mut Io) {
        self.now = now;
        self.host.begin_turn();
        self.settle_sends(io);
        self.settle(now, io);
        self.own.tell_rest();
        self.tell_of_strangers(now);
        self.finish_stop(now, io);
    }

    fn next_deadline(&self) -> Option<Instant> {
        let own = match self.life {
            Life::Running => self.chores_at,
            Life::Stopping { give_up_at } => self.chores_at.min(give_up_at),
        };
        let links = earliest(self.links.next_deadline(), self.peers.next_deadline());
        earliest(earliest(links, self.host.next_deadline()), Some(own))
    }

    fn cause(&self) -> Option<String> {
        let (volume, turn) = self.host.busiest()?;
        Some(format!("volume {volume}, {}, {} runs", turn.of, turn.runs))
    }

    fn on_long_turn(&mut self, turn: &Turn, untold: u64) {
        logger::info(format_args!("a turn of the reactor took {turn}; {untold} others did since the last such line"));
    }
}
