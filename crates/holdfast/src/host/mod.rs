//! The host: one reactor thread with all controllers, their links to the nodes, and the clients of their volumes.
//!
//! Role: the shell around [`holdfast_volume::Controller`] and [`holdfast_frontend::nbd::Session`]. It moves events to
//! machines and effects to sockets and decides nothing about data. The control plane (metadata records, the control
//! socket, deletions) runs on threads of its own and reaches the reactor by [`commands::Command`].
//!
//! One event is handled to its end: what machines push gathers in queues, and [`Host::settle`] works them off until all
//! are empty, so that no machine is ever entered twice.
//!
//! Faults: a clean stop closes every volume, which empties its log; a stop that takes longer than [`STOP_MAX`] is as
//! good as a crash, from which the next start recovers.

mod access;
mod assignment;
mod authority;
pub mod catalog;
mod commands;
mod control;
mod copies;
mod devices;
mod doors;
mod errands;
mod executors;
mod family;
mod fixed;
mod groups;
mod handover;
mod keys;
mod layers;
mod limits;
mod links;
pub mod machines;
pub mod meta;
mod names;
mod nbd;
mod near;
mod peers;
pub mod portals;
pub mod presence;
mod questions;
pub mod receive;
mod records;
mod revocation;
pub mod signer;
mod steward;
mod stop;
pub mod tls;
mod trash;
mod trend;
mod upkeep;
mod volumes;
mod watcher;
mod writers;

use crate::admission::HostPlaces;
use crate::config::{Exposure, HostSettings};
use crate::daemon::{outwait, raise_open_files, tell_ready};
use crate::grid::certs::Certificates;
use crate::grid::layout::{GridConfig, GridDir, MetaConfig};
use crate::grid::renewal::follow;
use crate::grid::revoked;
use crate::link_tls::Door;
use crate::logger;
use crate::nbd_uri::Place;
use anyhow::{Context, Result};
use commands::{ChangeOutcome, Command, Policy, Waiters};
use holdfast_base::time::earliest;
use holdfast_base::{
    BlockError, BlockReply, BlockRequest, DeviceId, Effects, HeadId, Instant, NodeId, Slab, Token, VolumeId,
};
use holdfast_cluster::{Event as AssignmentEvent, Local};
use holdfast_portal::WriterEvent;
use holdfast_runtime::mailbox::{self, Receiver};
use holdfast_runtime::meta::MetaTicket;
use holdfast_runtime::reactor::{self, App, Event, Io, ListenError, ListenerId, Reactor};
use holdfast_runtime::tls::link::{HostTls, ServerTls};
use holdfast_volume::{Effect, Event as VolumeEvent, Notice, SlowBecause, State};
pub use links::DEVICES_SHOWN_WITHIN;
use links::{LinkEvent, Links, Owner};
use meta::MetaClient;
use nbd::Clients;
use peers::Peers;
use portals::Portals;
use revocation::Revocations;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use volumes::{Budget, Care, OpenSpec, Volumes, Wait};
use writers::Machine;

/// Commands that may wait: one a control connection.
const COMMANDS_MAX: usize = 1024;

/// How long a stop may take to close the volumes.
const STOP_MAX: Duration = Duration::from_secs(20);

/// Pace of what needs no better.
const CHORES_PACE: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Life {
    Running,
    Stopping { give_up_at: Instant },
}

pub struct Host {
    links: Links,
    volumes: Volumes,
    clients: Clients,
    portals: Portals,
    meta: MetaClient,
    /// Which volume's controller waits for the answer, and its name for the call.
    meta_calls: Slab<(Token, u64)>,
    commands: Receiver<Command>,
    /// Devices that volumes leave.
    draining: BTreeSet<DeviceId>,
    waiters: Waiters,
    groups: groups::Groups,
    nbd_listeners: Vec<ListenerId>,
    /// Where portals of other hosts come, if they may.
    host_listeners: Vec<ListenerId>,
    effects: Effects<Effect>,
    replies: VecDeque<(Token, BlockReply)>,
    requests: VecDeque<(Token, BlockRequest)>,
    /// About who may write to a volume, or a clone in it.
    writer_events: VecDeque<(Token, HeadId, WriterEvent)>,
    reconnects: VecDeque<NodeId>,
    closed: VecDeque<Token>,
    chores_at: Instant,
    started: Instant,
    near: near::Near,
    /// Told what this host does with volumes; what it was told last, and which may have changed since.
    assignment: assignment::Assignment,
    locals: BTreeMap<VolumeId, Local>,
    locals_changed: Vec<VolumeId>,
    nodes_away: BTreeSet<NodeId>,
    life: Life,
}

/// Runs until SIGTERM.
pub fn run(dir: &GridDir) -> Result<()> {
    let mut config = dir.load()?;
    let settings = dir.settings(&config)?;
    dir.check_socket_paths()?;
    let grid = config.grid_id()?;
    let load_tls = || Certificates::of(dir, grid).load_host(&config.host.name);
    let links_tls = config.tls.then(load_tls).transpose()?;
    let meta = meta::await_open(dir, &config)?;
    let is_marked = matches!(config.meta, MetaConfig::Etcd(_));
    let records = records::Records::start(meta.clone(), is_marked, Some(dir.clone()))?;
    let catalog = catalog::Catalog::new(meta.clone(), grid, &config.host.name).with_memory(Arc::clone(&records));
    let reactor_config = reactor::Config { handles_signals: true, ..reactor::Config::default() };
    let mut reactor = Reactor::new(reactor_config)?;
    let open_files = raise_open_files();
    let places = HostPlaces::of(open_files);
    if places.is_short() {
        logger::warn(format_args!(
            "this host may have {open_files} open files, and takes {} clients; a higher hard limit (`ulimit -Hn`, LimitNOFILE of its \
             service) makes room for more",
            places.sessions.max
        ));
    }
    let (listeners, served_at) = listen(&mut reactor, dir, &settings, places)?;
    let host_listener = listen_to_hosts(&mut reactor, &config, places)?;
    let door = config.tls.then(|| Certificates::of(dir, grid).load_host_server(&config.host.name)).transpose()?;
    let revocations = revocations(Certificates::of(dir, grid), links_tls.as_ref(), door.as_ref())?;
    let revoked = links_tls.as_ref().map(|tls| tls.revoked().clone());
    if let (Some(ways), Some(door)) = (&links_tls, &door) {
        follow(ways.clone(), door.clone())?;
    }
    machines::check_member(dir, &config, &catalog)?;
    // The sockets are ours now: no other host runs in this directory.
    let address = host_listener.map(|(_, address)| address);
    let presence = presence::Presence::announce(meta.clone(), (&config.host.name, address), dir)?;
    catalog.set_own_nodes(&config.nodes)?;
    machines::announce(dir, &config, &catalog, address)?;
    let near = near::Near::of(&config.nodes);
    signer::start(dir, &config, catalog.clone(), meta.clone())?;
    records.sync()?;
    config.nodes = catalog.nodes()?;
    // Read after that: while the host was away others may have taken volumes over.
    catalog.adopt_exports()?;
    let (exported, draining, fixed) = (catalog.exported()?, catalog.draining()?, catalog.fixed()?);
    let (access, limits) = (catalog.clients()?, catalog.limits()?);
    let keys = Arc::new(keys::Keys::new(dir, catalog.clone()));
    let (sender, commands) = mailbox::mailbox(reactor.waker(), COMMANDS_MAX);
    let budget = Budget {
        writeback_bytes: settings.writeback_bytes,
        map_cache_bytes: settings.map_cache_bytes,
        read_ahead_bytes: settings.read_ahead_bytes,
    };
    let care = Care { rebuild_after: settings.rebuild_after, scrub_every: settings.scrub_every };
    let nodes: Vec<_> = config.nodes.iter().map(|n| (NodeId(n.id), n.address)).collect();
    let started = reactor.io().now();
    let (assignment, inputs) = assignment::Assignment::new();
    let mut host = Host {
        links: Links::new(grid, &config.host.name, links_tls.clone(), &nodes),
        volumes: Volumes::new(
            grid,
            &config.host.name,
            (budget, care),
            (fixed, access, limits),
            exported.len(),
            served_at,
        ),
        portals: Portals::new(
            grid,
            &config.host.name,
            Peers::new(links_tls.clone(), Door::new(door, places.links / 2), places.links),
        ),
        clients: Clients::new(
            places,
            (grid, revoked),
            settings.tls_dir.as_deref().map(tls::load_and_follow).transpose()?,
            Machine::own(config.address()),
        ),
        meta: MetaClient::start(meta.clone(), reactor.waker())?,
        meta_calls: Slab::new(meta::CALLS_MAX),
        commands,
        draining,
        waiters: Waiters::default(),
        groups: groups::Groups::new(),
        nbd_listeners: listeners,
        host_listeners: host_listener.iter().map(|(listener, _)| *listener).collect(),
        effects: Effects::new(),
        replies: VecDeque::new(),
        requests: VecDeque::new(),
        writer_events: VecDeque::new(),
        reconnects: VecDeque::new(),
        closed: VecDeque::new(),
        chores_at: started,
        started,
        near,
        assignment: assignment.clone(),
        locals: BTreeMap::new(),
        locals_changed: Vec::new(),
        nodes_away: BTreeSet::new(),
        life: Life::Running,
    };
    let (offers, hosts) = assignment::offers(&catalog, &catalog.all()?, &presence.hosts()?);
    host.set_offers(started, offers, &hosts, reactor.io());
    // Those whose keys are not there, or take a while, are opened later.
    for spec in exported.iter().filter_map(|entry| keys.spec_now_and_then(entry)) {
        host.open_volume(started, spec, (true, VolumeEvent::Open), reactor.io());
    }
    let told = (meta, records, catalog, presence.clone(), keys);
    control::start(dir, (&config, settings), told, revocations, (sender, assignment, inputs))?;
    logger::info(format_args!("host {} of grid {grid} serves {}", config.host.name, dir.nbd_socket().display()));
    tell_ready();
    reactor.run(&mut host)?;
    presence.end();
    logger::info(format_args!("host {} stops", config.host.name));
    Ok(())
}

/// What this machine knows of certificates that were taken back.
fn revocations(certificates: Certificates, links: Option<&HostTls>, door: Option<&ServerTls>) -> Result<Revocations> {
    let lists = links.map(HostTls::revoked).into_iter().chain(door.map(ServerTls::revoked)).cloned().collect();
    let revocations = Revocations { certificates, lists };
    if links.is_some() {
        revocations.replace(&revoked::load(&revocations.certificates.ca(), revocations.certificates.grid())?);
    }
    Ok(revocations)
}

/// Where portals of other hosts come: at this machine's address, on a port that the host's record tells.
fn listen_to_hosts(
    reactor: &mut Reactor,
    config: &GridConfig,
    places: HostPlaces,
) -> Result<Option<(ListenerId, SocketAddr)>> {
    let is_shared = matches!(config.meta, MetaConfig::Etcd(_));
    let Some(ip) = config.address().filter(|_| is_shared) else { return Ok(None) };
    let address = SocketAddr::new(ip, 0);
    let (listener, bound) = reactor.io().listen_tcp(address).context("a port for other hosts")?;
    reactor.io().set_accepted_max(listener, places.links + places.closing);
    Ok(Some((listener, bound)))
}

/// Where clients come.
fn listen(
    reactor: &mut Reactor,
    dir: &GridDir,
    settings: &HostSettings,
    places: HostPlaces,
) -> Result<(Vec<ListenerId>, Vec<Place>)> {
    let socket = dir.nbd_socket();
    let in_use = |e: &ListenError| matches!(e, ListenError::InUse { .. });
    let mut listeners = vec![outwait(|| reactor.io().listen_unix(&socket), in_use)?];
    let mut served_at = vec![Place::Unix(socket)];
    let exposure = settings.exposure();
    match (exposure, exposure.text()) {
        // The unix socket, other hosts and nodes are served all the same.
        (Exposure::Withheld(_), Some(why)) => logger::error(format_args!("{why}")),
        (_, Some(why)) => logger::warn(format_args!("{why}")),
        (_, None) => {}
    }
    if let Some(address) = settings.nbd_tcp.filter(|_| !matches!(exposure, Exposure::Withheld(_))) {
        let (listener, bound) =
            outwait(|| reactor.io().listen_tcp(address), in_use).context("NBD over TCP, as nbd.tcp asks for")?;
        listeners.push(listener);
        let tls = settings.tls_dir.is_some();
        served_at.push(Place::Tcp { address: bound, tls });
    }
    for listener in &listeners {
        reactor.io().set_accepted_max(*listener, places.clients() + places.closing);
    }
    Ok((listeners, served_at))
}

impl Host {
    fn is_stopping(&self) -> bool {
        self.life != Life::Running
    }

    /// Opens a volume, and tells its controller what is up.
    fn open_volume(
        &mut self,
        now: Instant,
        spec: OpenSpec,
        (exported, begin): (bool, VolumeEvent),
        io: &mut Io,
    ) -> Token {
        logger::info(format_args!("volume {} ({}) is being opened", spec.name, spec.volume));
        self.locals_changed.push(spec.volume);
        let at = self.volumes.insert(now, spec, exported);
        for event in self.links.up().collect::<Vec<_>>() {
            self.drive(now, at, event, io);
        }
        self.drive(now, at, VolumeEvent::Near { nodes: self.near.nodes.clone() }, io);
        if !self.draining.is_empty() {
            self.drive(now, at, VolumeEvent::Drain { devices: self.draining.clone() }, io);
        }
        self.tell_claims(now, io);
        self.drive(now, at, begin, io);
        at
    }

    /// Gives an event to a controller and carries out what it wants.
    fn drive(&mut self, now: Instant, at: Token, event: VolumeEvent, io: &mut Io) {
        let Some(volume) = self.volumes.table.get_mut(at) else { return };
        let mut effects = std::mem::take(&mut self.effects);
        volume.controller.handle(now, event, &mut effects);
        volume.deadline = volume.next_deadline();
        for effect in effects.drain() {
            match effect {
                Effect::Send { node, lane, token, request, payload } => {
                    let owner = Owner::Volume { volume: at, token };
                    self.links.send(node, lane, owner, &request, payload, io);
                }
                Effect::Reply(reply) => self.replies.push_back((at, reply)),
                Effect::Meta { token, request } => {
                    let ticket = self.meta_calls.insert((at, token));
                    self.meta.service.request(MetaTicket(ticket.0), request);
                }
                Effect::Reconnect { node } => self.reconnects.push_back(node),
                Effect::Notice(notice) => {
                    self.groups.on_notice(at, &notice);
                    self.on_notice(at, &notice);
                }
            }
        }
        self.effects = effects;
    }

    fn on_notice(&mut self, at: Token, notice: &Notice) {
        let Some(volume) = self.volumes.table.get_mut(at) else { return };
        let name = &volume.name;
        if matches!(notice, Notice::StateChanged(_)) {
            self.locals_changed.push(volume.id);
        }
        match notice {
            // A host that puts a volume into service does not ask the steward.
            Notice::StateChanged(State::Deposed) if !volume.exported => {
                logger::info(format_args!("volume {name}: it is put into service, and not looked after any more"));
                self.waiters.on_changes_lost(at);
            }
            Notice::StateChanged(State::Deposed) if self.portals.is_offered(volume.id) => {
                logger::info(format_args!("volume {name}: another host has it now; clients go on through this one"));
                self.waiters.on_changes_lost(at);
                self.closed.push_back(at);
            }
            Notice::StateChanged(State::Deposed) => {
                logger::error(format_args!(
                    "volume {name}: another host has taken it over; `holdfast volume export {name} --takeover` takes it back"
                ));
                self.waiters.on_changes_lost(at);
            }
            Notice::StateChanged(state) => {
                logger::info(format_args!("volume {name} is {}", volumes::state_of(*state)));
                match state {
                    State::Closed => self.closed.push_back(at),
                    State::Open => {
                        self.volumes.refresh_clones(at);
                        self.on_serving(at);
                    }
                    _ => {}
                }
            }
            // Told when it lasts: at the start of a host every volume waits until nodes have greeted.
            Notice::StoreDoubted { is_doubted: true } => logger::error(format_args!(
                "volume {name}: the metadata store lacks its newest record: the store was emptied, or set back to an older \
                 state. It is served on, and nothing that needs the metadata happens until the right store is back"
            )),
            Notice::StoreDoubted { is_doubted: false } => {
                logger::info(format_args!("volume {name}: the metadata store has its newest record again"));
            }
            Notice::OpenWaits { why } => volume.waits = Some(Wait { why, told: false }),
            Notice::Recovered { epoch, last, entries, reappended } => logger::info(format_args!(
                "volume {name}: recovered up to {last} in epoch {epoch}: {entries} entries read, {reappended} \
                 re-appended"
            )),
            Notice::NodeSuspect { node } => {
                logger::warn(format_args!("volume {name}: node {node} is late, and avoided"));
            }
            Notice::NodeTrusted { node } => logger::info(format_args!("volume {name}: node {node} is used again")),
            Notice::DeviceSlow { node, device, because } => {
                let how = if matches!(because, SlowBecause::Errors { .. }) { "failing" } else { "slow" };
                logger::warn(format_args!(
                    "volume {name}: device {device} of node {node} is {how}, and bypassed where that can be: {because}"
                ));
            }
            Notice::DeviceTrusted { node, device } => {
                logger::info(format_args!("volume {name}: device {device} of node {node} behaves again, and is used"));
            }
            Notice::RedundancyRestored => logger::info(format_args!("volume {name}: full redundancy")),
            Notice::Resized { size_bytes } => {
                logger::info(format_args!("volume {name} has {size_bytes} bytes now"));
                self.waiters.on_resized(at, *size_bytes);
            }
            Notice::LayoutSet { layout } => {
                logger::info(format_args!("volume {name} is written as {layout} from here on"));
                self.waiters.on_policy_set(at, Policy::Layout(*layout));
            }
            Notice::TiersSet { tiers } => {
                logger::info(format_args!("volume {name} has other tiers from here on"));
                self.waiters.on_policy_set(at, Policy::Tiers(*tiers));
            }
            Notice::Changed { change, .. } => {
                logger::info(format_args!("volume {name}: {}", commands::change_text(change)));
                self.volumes.refresh_clones(at);
                self.waiters.on_change(at, change, &ChangeOutcome::Done);
            }
            Notice::Refused { change, why } => self.waiters.on_change(at, change, &ChangeOutcome::Refused(why)),
            Notice::Forked { .. } | Notice::ForkRefused { .. } => self.waiters.on_fork_notice(at, notice),
            Notice::ShardDamaged { leg, shard, repaired } => logger::warn(format_args!(
                "volume {name}: shard {shard:?} on device {} of node {} is damaged; {}",
                leg.device,
                leg.node,
                if *repaired { "it is being repaired" } else { "it is read elsewhere, and a scrub repairs it" }
            )),
            Notice::Miscounted { segments, hidden } => logger::error(format_args!(
                "volume {name}: what lives was miscounted in {segments} segments{}, and is put right: this is a bug, please \
                 report it with this log",
                if *hidden { ", and what is hidden in leaves of the map" } else { "" }
            )),
            Notice::Prepared => self.on_prepared(at),
            // Who waits for it asks how far it is.
            Notice::Warmed => {}
            Notice::Held { .. } | Notice::HoldEnded { whole: true, .. } => {}
            Notice::HoldEnded { whole: false, .. } => {
                logger::info(format_args!("volume {name}: answers could not be held back for a group of snapshots"));
            }
            Notice::LedgerRolled { .. } => logger::info(format_args!("volume {name}: a new ledger is open")),
        }
    }

    /// Works off everything that machines pushed, and what follows from that.
    fn settle(&mut self, now: Instant, io: &mut Io) {
        loop {
            if self.settle_groups(now, io) {
                // It may have pushed more.
            } else if let Some(event) = self.links.events.pop_front() {
                self.on_link_event(now, event, io);
            } else if let Some((at, reply)) = self.replies.pop_front() {
                self.on_volume_reply(now, at, reply, io);
            } else if let Some((at, head, event)) = self.writer_events.pop_front() {
                self.drive_writers(now, at, head, event, io);
            } else if let Some((session, request)) = self.requests.pop_front() {
                self.submit(now, session, request, io);
            } else if let Some(node) = self.reconnects.pop_front() {
                self.links.reconnect(now, node, io);
            } else if let Some(at) = self.closed.pop_front() {
                self.on_volume_closed(now, at, io);
            } else if !self.settle_portals(now, io) {
                break;
            }
        }
        if !self.locals_changed.is_empty() {
            self.tell_locals();
        }
    }

    fn on_link_event(&mut self, now: Instant, event: LinkEvent, io: &mut Io) {
        match event {
            LinkEvent::Answer { node, volume, token, reply, payload } => {
                self.drive(now, volume, VolumeEvent::Node { node, token, reply, payload }, io);
            }
            LinkEvent::Up(event) => {
                self.tell_nodes_away();
                for at in self.volumes.tokens() {
                    self.drive(now, at, event.clone(), io);
                }
            }
            LinkEvent::Down { node } => {
                self.tell_nodes_away();
                for at in self.volumes.tokens() {
                    self.drive(now, at, VolumeEvent::NodeDown { node }, io);
                }
            }
            LinkEvent::Control { ticket, reply } => self.waiters.on_node_answer(ticket, reply),
        }
    }

    /// A controller has stopped for good: its clients go, and who waited for it is told.
    fn on_volume_closed(&mut self, now: Instant, at: Token, io: &mut Io) {
        // A reply that passes layers comes here a second time.
        while let Some(n) = self.replies.iter().position(|(of, _)| *of == at) {
            let (_, reply) = self.replies.remove(n).expect("just seen");
            self.on_volume_reply(now, at, reply, io);
        }
        self.give_up_held(now, at, io);
        if let Some((requests, behind)) = self.volumes.table.get_mut(at).map(volumes::Volume::give_up) {
            // One that was dropped with requests under way: what became of them its successor knows.
            for token in requests {
                self.on_volume_reply(now, at, BlockReply { token, result: Err(BlockError::Deposed) }, io);
            }
            self.portals.cleared.extend(behind);
        }
        self.let_sessions_go(at, io);
        let gone = self.volumes.remove(at);
        self.groups.on_gone(at);
        self.waiters.on_closed(at);
        if let Some(volume) = gone {
            self.locals_changed.push(volume.id);
            self.on_unserved(at, volume.id);
        }
    }

    /// Tells what this host does with volumes, as far as that has changed.
    fn tell_locals(&mut self) {
        for volume in std::mem::take(&mut self.locals_changed) {
            let open = self.volumes.find_id(volume).and_then(|at| self.volumes.table.get(at));
            let local = open.map(assignment::local_of);
            let before = match local {
                Some(local) => self.locals.insert(volume, local),
                None => self.locals.remove(&volume),
            };
            if before != local {
                self.assignment.tell(AssignmentEvent::Local { volume, local });
            }
        }
    }

    fn tell_nodes_away(&mut self) {
        let away = self.links.views().filter(|link| !link.up || link.polls_missed > 1).map(|link| link.node).collect();
        if self.nodes_away != away {
            self.nodes_away = away;
            self.assignment.tell(AssignmentEvent::NodesAway(self.nodes_away.clone()));
        }
    }

    fn on_timer(&mut self, now: Instant, io: &mut Io) {
        self.links.on_time(now, io);
        for at in self.volumes.tokens() {
            let is_due = |v: &volumes::Volume| v.deadline.is_some_and(|d| d <= now);
            if self.volumes.table.get(at).is_some_and(is_due) {
                self.drive(now, at, VolumeEvent::Tick, io);
                self.tick_layers(now, at, io);
                self.tick_writers(now, at, io);
            }
        }
        self.tick_groups(now, io);
        self.tick_portals(now, io);
        if self.chores_at <= now {
            self.chores_at = now + CHORES_PACE;
            self.cut_slow_handshakes(now, io);
            self.tell_set_aside(now, io);
            self.tell_nodes_away();
            for at in self.volumes.tokens() {
                let Some(volume) = self.volumes.table.get_mut(at) else { continue };
                volume.tell_waiting(now);
                if volume.is_to_be_dropped() {
                    self.on_volume_closed(now, at, io);
                }
            }
        }
    }

    fn on_wake(&mut self, now: Instant, io: &mut Io) {
        for (ticket, reply) in self.meta.answers.drain() {
            if let Some((at, token)) = self.meta_calls.remove(Token(ticket.0)) {
                self.drive(now, at, VolumeEvent::Meta { token, reply }, io);
            }
        }
        for command in self.commands.drain() {
            self.on_command(now, command, io);
        }
    }

    fn begin_stop(&mut self, now: Instant, io: &mut Io) {
        if self.is_stopping() {
            logger::warn(format_args!("told to stop a second time: volumes are left to recovery"));
            return io.stop();
        }
        logger::info(format_args!("stopping: {} volumes are closed first", self.volumes.table.len()));
        self.life = Life::Stopping { give_up_at: now + STOP_MAX };
        for session in self.clients.tokens() {
            self.shut_client_down(session, io);
        }
        self.settle(now, io);
        for at in self.volumes.tokens() {
            self.drain_layers(now, at, io);
            self.drive(now, at, VolumeEvent::Close, io);
        }
    }

    /// Ends the reactor once every volume is closed, or has had its time.
    fn finish_stop(&mut self, now: Instant, io: &mut Io) {
        let Life::Stopping { give_up_at } = self.life else { return };
        let is_open = |v: &volumes::Volume| !matches!(v.controller.state(), State::Closed | State::Deposed);
        let open = self.volumes.table.iter().filter(|(_, v)| is_open(v)).count();
        if open > 0 && now < give_up_at {
            return;
        }
        if open > 0 {
            logger::warn(format_args!(
                "{open} volumes could not be closed in time; their logs are read at the next start"
            ));
        }
        for session in self.clients.tokens() {
            self.abort_client(session, io);
        }
        io.stop();
    }
}

impl App for Host {
    fn on_event(&mut self, now: Instant, event: Event<'_>, io: &mut Io) {
        match event {
            Event::Bytes { conn, bytes } => {
                if let Some(client) = self.clients.owner(conn) {
                    self.on_client_bytes(now, client, bytes, io);
                } else if self.portals.peers.owns(conn) {
                    self.portals.peers.on_bytes(now, conn, bytes, io);
                } else {
                    self.links.on_bytes(now, conn, bytes, io);
                }
            }
            Event::Timer => self.on_timer(now, io),
            Event::Wake => self.on_wake(now, io),
            Event::Accepted { listener, conn, peer, address, .. } if self.host_listeners.contains(&listener) => {
                self.portals.peers.on_accepted(now, conn, (peer, address), io);
            }
            Event::Accepted { listener, conn, peer, address, process } => {
                assert!(self.nbd_listeners.contains(&listener), "only clients of volumes are accepted here");
                self.on_client(now, conn, (peer, address, process), io);
            }
            Event::TurnedAway { listener, peer } if self.host_listeners.contains(&listener) => {
                self.portals.peers.on_turned_away(now, &peer);
            }
            Event::TurnedAway { peer, .. } => self.on_turned_away(now, &peer),
            Event::Connected { conn } if self.portals.peers.owns(conn) => self.portals.peers.on_connected(conn),
            Event::Connected { conn } => self.links.on_connected(conn, io),
            Event::ConnectFailed { conn, error } | Event::Closed { conn, error } if self.portals.peers.owns(conn) => {
                self.portals.peers.on_lost(now, conn, &error.to_string(), io);
            }
            Event::ConnectFailed { conn, error } => self.links.on_lost(now, conn, error, io),
            Event::Closed { conn, error } => match self.clients.owner(conn) {
                Some(client) => self.forget_client(client),
                None => self.links.on_lost(now, conn, error, io),
            },
            Event::Shutdown { .. } => self.begin_stop(now, io),
            Event::Filled { conn, buf } if self.portals.peers.owns(conn) => {
                self.portals.peers.on_filled(now, conn, buf, io);
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
        self.settle_sends(io);
        self.settle(now, io);
        self.tell_of_strangers(now);
        self.finish_stop(now, io);
    }

    fn next_deadline(&self) -> Option<Instant> {
        let own = match self.life {
            Life::Running => self.chores_at,
            Life::Stopping { give_up_at } => self.chores_at.min(give_up_at),
        };
        let machines = earliest(self.volumes.next_deadline(), self.groups.next_deadline());
        let machines = earliest(machines, self.portals.next_deadline());
        earliest(earliest(self.links.next_deadline(), machines), Some(own))
    }
}
