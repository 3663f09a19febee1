//! The start of a host: what it needs, in the order in which one thing needs the other, up to its end.
//!
//! The first reactor runs on the process's first thread, and ends last; the others have threads of their own.

use super::assignment::{self, Assignment};
use super::client::Machine;
use super::commands::{Answer, Command, Waiters};
use super::locality::Local;
use super::meta::{Meta, MetaClient};
use super::nbd::Clients;
use super::packers::Packers;
use super::peers::Peers;
use super::reactors::{FRONT, Own, Reactors};
use super::revocation::Revocations;
use super::{Life, Links, Shell, catalog, control, keys, machines, meta, presence, records, signer, tls};
use crate::config::{Exposure, HostSettings};
use crate::daemon::{EndsTheProcess, outwait, raise_open_files, tell_ready};
use crate::grid::certs::Certificates;
use crate::grid::layout::{GridConfig, GridDir, MetaConfig, NodeConfig};
use crate::grid::renewal::follow;
use crate::grid::revoked;
use crate::link_tls::Door;
use crate::logger::{self, Voice};
use crate::nbd_uri::Place;
use anyhow::{Context, Result, anyhow};
use holdfast_base::{DeviceId, Effects, GridId, InstanceId, NodeId, Slab, VolumeId};
use holdfast_host::homes::{Share, Spread};
use holdfast_host::reservation::ReservedVolume;
use holdfast_host::{
    Budget, Care, Config, Host, HostPlaces, Isolation, Limits, Lists, OpenSpec, Order, PackingShare, Room,
};
use holdfast_runtime::mailbox::{self, Sender};
use holdfast_runtime::reactor::{self, Io, ListenError, ListenerId, Reactor};
use holdfast_runtime::tls::TlsServer;
use holdfast_runtime::tls::link::{HostTls, ServerTls};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;

/// Commands that may wait: one a control connection, and clients that other reactors hand over.
const COMMANDS_MAX: usize = 4096;

/// What each reactor of a host is made with.
struct Common {
    grid: GridId,
    name: String,
    address: Option<IpAddr>,
    /// Where other hosts may come.
    for_hosts: Option<IpAddr>,
    /// The grid's certificates, where links have TLS.
    links_tls: Option<HostTls>,
    /// For hosts that come here.
    door: Option<ServerTls>,
    clients_tls: Option<TlsServer>,
    nodes: Vec<(NodeId, SocketAddr)>,
    own_nodes: Vec<NodeConfig>,
    meta: Meta,
    served_at: Vec<Place>,
    /// Shared evenly.
    budget: Budget,
    care: Care,
    isolation: Option<Isolation>,
    packing: PackingShare,
    places: HostPlaces,
    expected_volumes: usize,
    assignment: Assignment,
    reactors: Arc<Reactors>,
    /// What every reactor goes by from the beginning.
    reservations: BTreeMap<VolumeId, ReservedVolume>,
    access: Lists,
    limits: Limits,
    draining: BTreeSet<DeviceId>,
}

/// Where clients and other hosts come to a reactor.
#[derive(Default)]
struct Front {
    /// Only the first has any.
    clients: Vec<ListenerId>,
    hosts: Vec<ListenerId>,
}

/// The reactors that are not the first.
#[derive(Default)]
struct Others {
    threads: Vec<JoinHandle<()>>,
    /// Where other hosts reach them, in their order.
    addresses: Vec<SocketAddr>,
}

/// Another reactor than the first, as it says that it has begun: the way to it, and where other hosts reach it.
type Begun = (Sender<Command>, Option<SocketAddr>);

impl Common {
    /// A reactor's shell, which has heard all that it has to know before its first volume; and the way to it.
    fn shell(&self, number: usize, reactor: &mut Reactor, front: Front) -> Result<(Shell, Sender<Command>)> {
        let (sender, commands) = mailbox::mailbox(reactor.waker(), COMMANDS_MAX);
        let (now, count) = (reactor.io().now(), self.reactors.count());
        let Room { max, kept_for_local } = self.places.sessions;
        let host = Host::new(&Config {
            grid: self.grid,
            name: self.name.clone(),
            reactor: number,
            reactors: count,
            instance: InstanceId(uuid::Uuid::new_v4().as_u128()),
            budget: Budget {
                writeback_bytes: self.budget.writeback_bytes / count as u64,
                map_cache_bytes: self.budget.map_cache_bytes / count as u64,
                read_ahead_bytes: self.budget.read_ahead_bytes / count as u64,
            },
            care: self.care,
            isolation: self.isolation,
            packing: self.packing,
            room: Room { max: max / count, kept_for_local: kept_for_local / count },
            expected_volumes: self.expected_volumes.div_ceil(count),
            tune: |_| {},
            mutations: holdfast_host::Mutations::default(),
            of_controllers: holdfast_volume::Mutations::default(),
        });
        let revoked = self.links_tls.as_ref().map(|tls| tls.revoked().clone());
        let mut shell = Shell {
            name: self.name.clone(),
            own: Own::new(number, &self.reactors),
            host,
            effects: Effects::new(),
            spare: Effects::new(),
            links: Links::new(self.grid, &self.name, self.links_tls.clone(), &self.nodes, Voice::new(number == FRONT)),
            peers: Peers::new(
                self.links_tls.clone(),
                Door::new(self.door.clone(), self.places.links / 2),
                self.places.links,
            ),
            clients: Clients::new(
                self.places.at(number),
                (self.grid, revoked),
                self.clients_tls.clone(),
                Machine::own(self.address),
            ),
            served_at: self.served_at.clone(),
            meta: MetaClient::start(self.meta.clone(), reactor.waker())?,
            packers: Packers::new(reactor.waker()),
            meta_calls: Slab::new(meta::CALLS_MAX),
            commands,
            waiters: Waiters::default(),
            nbd_listeners: front.clients,
            host_listeners: front.hosts,
            places: self.places,
            requests: VecDeque::new(),
            now,
            chores_at: now,
            started: now,
            local: Local::of(&self.own_nodes),
            assignment: self.assignment.clone(),
            locals: BTreeMap::new(),
            nodes_away: BTreeSet::new(),
            life: Life::Running,
        };
        for (volume, reservation) in &self.reservations {
            shell.tell_host(now, Order::SetReservation { volume: *volume, reservation: Some(*reservation) });
        }
        shell.tell_host(now, Order::Access { lists: self.access.clone(), limits: self.limits.clone() });
        shell.tell_host(now, Order::Drain(self.draining.clone()));
        shell.tell_host(now, Order::LocalNodes(self.own_nodes.iter().map(|node| NodeId(node.id)).collect()));
        Ok((shell, sender))
    }
}

/// Another reactor than the first, on a thread of its own.
fn begin_other(common: &Arc<Common>, number: usize) -> Result<(Begun, JoinHandle<()>)> {
    let (ready, is_ready) = sync_channel(1);
    let own = Arc::clone(common);
    let thread = std::thread::Builder::new().name(format!("reactor {number}"));
    let thread = thread.spawn(move || run_other(&own, number, &ready)).context("no thread for a reactor")?;
    let begun = is_ready.recv().map_err(|_| anyhow!("reactor {number} has ended before it began"))??;
    Ok((begun, thread))
}

fn run_other(common: &Common, number: usize, ready: &SyncSender<Result<Begun>>) {
    let _guard = EndsTheProcess;
    let make = || {
        let mut reactor = Reactor::new(reactor::Config::default())?;
        let hosts = listen_to_hosts(&mut reactor, common.for_hosts, common.places)?;
        let address = hosts.map(|(_, address)| address);
        let hosts = hosts.into_iter().map(|(listener, _)| listener).collect();
        let (shell, sender) = common.shell(number, &mut reactor, Front { clients: Vec::new(), hosts })?;
        anyhow::Ok((reactor, shell, (sender, address)))
    };
    let (mut reactor, mut shell) = match make() {
        Ok((reactor, shell, begun)) => {
            let _ = ready.send(Ok(begun));
            (reactor, shell)
        }
        Err(error) => return drop(ready.send(Err(error))),
    };
    let now = reactor.io().now();
    shell.settle(now, reactor.io());
    if let Err(error) = reactor.run(&mut shell) {
        logger::error(format_args!("reactor {number}: {error}"));
        std::process::abort();
    }
}

/// Runs until SIGTERM.
pub fn run(dir: &GridDir) -> Result<()> {
    let mut config = dir.load()?;
    let settings = dir.settings(&config)?;
    dir.check_socket_paths()?;
    let grid = config.grid_id()?;
    let certificates = || Certificates::of(dir, grid);
    let links_tls = config.tls.then(|| certificates().load_host(&config.host.name)).transpose()?;
    let meta = meta::await_open(dir, &config)?;
    let is_marked = matches!(config.meta, MetaConfig::Etcd(_));
    let records = records::Records::start(meta.clone(), is_marked, Some(dir.clone()))?;
    let catalog = catalog::Catalog::new(meta.clone(), grid, &config.host.name).with_memory(Arc::clone(&records));
    let reactor_config = reactor::Config { handles_signals: true, ..reactor::Config::default() };
    let mut reactor = Reactor::new(reactor_config)?;
    let places = places(settings.reactors.max(1));
    let (listeners, served_at) = listen(&mut reactor, dir, &settings, places)?;
    let for_hosts = config.address().filter(|_| is_shared(&config));
    let host_listener = listen_to_hosts(&mut reactor, for_hosts, places)?;
    let door = config.tls.then(|| certificates().load_host_server(&config.host.name)).transpose()?;
    let revocations = revocations(certificates(), links_tls.as_ref(), door.as_ref())?;
    if let (Some(ways), Some(door)) = (&links_tls, &door) {
        follow(ways.clone(), door.clone())?;
    }
    machines::check_member(dir, &config, &catalog)?;
    // The sockets are ours now: no other host runs in this directory.
    let address = host_listener.map(|(_, address)| address);
    let addresses: Vec<SocketAddr> = address.into_iter().collect();
    let presence = presence::Presence::announce(meta.clone(), (&config.host.name, &addresses), dir)?;
    catalog.set_own_nodes(&config.nodes)?;
    machines::announce(dir, &config, &catalog, address)?;
    let own_nodes = config.nodes.clone();
    signer::start(dir, &config, catalog.clone(), meta.clone())?;
    records.sync()?;
    config.nodes = catalog.nodes()?;
    // Read after that: while the host was away others may have taken volumes over.
    catalog.adopt_exports()?;
    let exported = catalog.exported()?;
    let keys = Arc::new(keys::Keys::new(dir, catalog.clone()));
    let (assignment, inputs) = assignment::Assignment::new();
    let spread = if is_shared(&config) { Spread::ById } else { Spread::Fewest };
    let reactors = Arc::new(Reactors::new(count_of(&settings, &presence)?, spread));
    let common = Arc::new(Common {
        grid,
        name: config.host.name.clone(),
        address: config.address(),
        for_hosts,
        links_tls,
        door,
        clients_tls: settings.tls_dir.as_deref().map(tls::load_and_follow).transpose()?,
        nodes: config.nodes.iter().map(|node| (NodeId(node.id), node.address)).collect(),
        own_nodes,
        meta: meta.clone(),
        served_at,
        budget: Budget {
            writeback_bytes: settings.writeback_bytes,
            map_cache_bytes: settings.map_cache_bytes,
            read_ahead_bytes: settings.read_ahead_bytes,
        },
        care: Care { rebuild_after: settings.rebuild_after, scrub_every: settings.scrub_every },
        isolation: settings.isolation,
        packing: packing_share(&settings, reactors.count()),
        places,
        expected_volumes: exported.len(),
        assignment: assignment.clone(),
        reactors: Arc::clone(&reactors),
        reservations: catalog.reservations()?,
        access: catalog.clients()?,
        limits: catalog.limits()?,
        draining: catalog.draining()?,
    });
    let hosts = host_listener.iter().map(|(listener, _)| *listener).collect();
    let (mut shell, others) = begin_reactors(&common, &mut reactor, Front { clients: listeners, hosts })?;
    if !addresses.is_empty() {
        presence.set_addresses(addresses.into_iter().chain(others.addresses).collect())?;
    }
    // Where stores are, is told when the records are watched.
    let offered = assignment::offers(&catalog, &catalog.all()?, &presence.hosts()?, BTreeMap::new());
    let shares = reactors.homes().set_offers(offered);
    offer_at_start(&mut shell, &reactors, shares, reactor.io());
    let now = reactor.io().now();
    // Those whose keys are not there, or take a while, are opened later.
    for spec in exported.iter().filter_map(|entry| keys.spec_now_and_then(entry)) {
        open_at_start(&mut shell, &reactors, spec);
    }
    shell.settle(now, reactor.io());
    let told = (meta, records, catalog, presence.clone(), keys);
    let ways = (Arc::clone(&reactors), assignment, inputs);
    control::start(dir, (&config, settings), told, revocations, ways, places.http)?;
    logger::info(format_args!("host {} of grid {grid} serves {}", config.host.name, dir.nbd_socket().display()));
    tell_ready();
    drive(&mut reactor, &mut shell, others.threads)?;
    presence.end();
    logger::info(format_args!("host {} stops", config.host.name));
    Ok(())
}

/// The first reactor's shell, and the threads of the others; all can be told from here on.
fn begin_reactors(common: &Arc<Common>, reactor: &mut Reactor, front: Front) -> Result<(Shell, Others)> {
    let (shell, post) = common.shell(FRONT, reactor, front)?;
    let (mut posts, mut others) = (vec![post], Others::default());
    for number in 1..common.reactors.count() {
        let ((post, address), thread) = begin_other(common, number)?;
        posts.push(post);
        others.addresses.extend(address);
        others.threads.push(thread);
    }
    common.reactors.begin(posts);
    Ok((shell, others))
}

/// Tells each reactor what it offers together with other hosts.
fn offer_at_start(shell: &mut Shell, reactors: &Reactors, shares: Vec<Share>, io: &mut Io) {
    for (number, share) in shares.into_iter().enumerate() {
        if number == FRONT {
            shell.take_offers(io.now(), share, io);
            continue;
        }
        // The first thing that it is told.
        let offers = Command::Offers { share, answer: Answer::Part(Box::new(|()| {})) };
        reactors.post_to(number, offers).expect("there is room for it");
    }
}

/// Runs the first reactor to its end, and then waits for the others.
fn drive(reactor: &mut Reactor, shell: &mut Shell, others: Vec<JoinHandle<()>>) -> Result<()> {
    let ended = reactor.run(shell);
    if ended.is_err() {
        shell.own.stop_others();
    }
    for thread in others {
        // One that panics ends the process.
        let _ = thread.join();
    }
    Ok(ended?)
}

/// At a start there may be more of them than commands may wait.
fn open_at_start(shell: &mut Shell, reactors: &Arc<Reactors>, spec: OpenSpec) {
    let (volume, number) = (spec.volume, reactors.homes().place(spec.volume, &spec.name));
    let open = || Order::Open { spec: spec.clone(), exported: true };
    if number == FRONT {
        shell.tell_host(shell.started, open());
        shell.own.publish(volume, &shell.host);
        return reactors.homes().arrived(volume);
    }
    let answer = || Answer::Part(Box::new(|_| {}));
    while reactors.post_to(number, Command::Order { order: Box::new(open()), answer: answer() }).is_err() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// Volumes may go from host to host.
fn is_shared(config: &GridConfig) -> bool {
    matches!(config.meta, MetaConfig::Etcd(_))
}

/// Hosts of releases that know hosts of one reactor only find no volume on another one.
fn count_of(settings: &HostSettings, presence: &presence::Presence) -> Result<usize> {
    let count = settings.reactors.max(1);
    let old = if count == 1 { Vec::new() } else { presence.hosts_of_one_reactor()? };
    if old.is_empty() {
        return Ok(count);
    }
    logger::warn(format_args!(
        "this host has one reactor, not {count}, since {} would not find volumes on others: its release is older. Bring it to \
         this one, then restart this host (`holdfast grid down --host`, `holdfast grid up`)",
        old.join(", ")
    ));
    Ok(1)
}

/// Of the machine's CPU, what packing on each reactor may take.
fn packing_share(settings: &HostSettings, reactors: usize) -> PackingShare {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    // One thread packs.
    let part = |percent: u32| (u64::from(percent) * 10 * cores as u64 / reactors as u64).min(1000) as u32;
    PackingShare { busy_per_mille: part(settings.packing_percent), idle_per_mille: part(settings.packing_idle_percent) }
}

/// How many may come to so many reactors.
fn places(reactors: usize) -> HostPlaces {
    let open_files = raise_open_files();
    let places = HostPlaces::of(open_files, reactors);
    if places.is_short() {
        logger::warn(format_args!(
            "this host may have {open_files} open files, and takes {} clients; a higher hard limit (`ulimit -Hn`, LimitNOFILE of its \
             service) makes room for more",
            places.sessions.max
        ));
    }
    places
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

/// Where other hosts come to a reactor: at this machine's address, on a port that the host's record tells.
fn listen_to_hosts(
    reactor: &mut Reactor,
    ip: Option<IpAddr>,
    places: HostPlaces,
) -> Result<Option<(ListenerId, SocketAddr)>> {
    let Some(ip) = ip else { return Ok(None) };
    listen_at(reactor.io(), ip, places).context("a port for other hosts").map(Some)
}

/// A port for other hosts at this address.
pub(super) fn listen_at(io: &mut Io, ip: IpAddr, places: HostPlaces) -> Result<(ListenerId, SocketAddr), ListenError> {
    let (listener, bound) = io.listen_tcp(SocketAddr::new(ip, 0))?;
    io.set_accepted_max(listener, places.of_hosts());
    Ok((listener, bound))
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
