//! A grid on this machine: made once, then brought up and down as often as one likes.
//!
//! Faults: nothing is written before everything that could be checked was checked; a grid that could not be completed
//! is removed again, also by the next `up` after a crash in between. Devices that exist are never formatted here.

pub mod address;
pub mod authority;
pub mod beat;
pub mod certs;
pub mod copies;
mod creating;
pub mod etcd;
pub mod etcd_members;
pub mod grow;
mod join;
pub mod join_client;
pub mod layout;
pub mod metadata;
pub mod nbd_server;
mod node_client;
pub mod ownership;
pub mod processes;
pub mod recovery;
pub mod removing;
pub mod renewal;
pub mod revoked;
pub mod rolling;
pub mod signatures;
pub mod survey;
pub mod token;
pub mod units;

use crate::client;
use crate::config::keys::Value;
use crate::config::{ConfigError, Exposure, HostSettings};
use crate::daemon::outwait;
use crate::host::catalog::Catalog;
use crate::host::machines;
use crate::logger;
use crate::node::fresh_device_id;
use anyhow::{Context, Result, anyhow, bail};
use certs::Certificates;
use creating::Begun;
use holdfast_api::{Code, VolumeState, refuse};
use holdfast_base::size::Size;
use holdfast_base::{DeviceId, GridId, MetaVersion, NodeId};
use holdfast_format::meta::{TLS_KEY, encode};
use holdfast_runtime::device::create_file;
use holdfast_runtime::pki;
use layout::{DeviceConfig, GridConfig, GridDir, HostConfig, MetaConfig, NodeConfig, remove_if_there};
use processes::{Role, wait};
use rustix::fs::FlockOperation;
use rustix::process::Signal;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use survey::Requester;
use token::Join;
use units::Units;

const NODES_DEFAULT: u32 = 4;
const NODES_MAX: u32 = 64;
const DEVICES_DEFAULT: u32 = 2;
const DEVICES_MAX: u32 = 64;
const DEVICE_SIZE_DEFAULT: Size = Size(8 << 30);
const DEVICE_SIZE_MIN: Size = Size(128 << 20);

/// Sizes that are chosen are whole multiples of it.
const DEVICE_SIZE_STEP: u64 = 128 << 20;
const PORT_DEFAULT: u16 = 7500;

/// Room that making a grid leaves on its file system: for metadata, logs, and everybody else.
pub const SPARE_BYTES: u64 = 256 << 20;

/// How long all processes may take until they serve.
const UP_MAX: Duration = Duration::from_secs(60);

/// How long the host may take to close its volumes, with some margin over its own bound.
const HOST_DOWN_MAX: Duration = Duration::from_secs(30);
/// How long making a device may take: its tables are written, and its journal, on a disk perhaps.
const FORMAT_MAX: Duration = Duration::from_secs(120);
/// A device that has not answered by then hangs.
const ANSWER_MAX: Duration = Duration::from_secs(5);
const NODE_DOWN_MAX: Duration = Duration::from_secs(10);

/// What `grid up` was asked for; what is absent has a default when the grid is made, and is not looked at afterwards.
#[derive(Clone, Debug, Default)]
pub struct UpOptions {
    pub nodes: Option<u32>,
    pub devices: Option<u32>,
    pub device_size: Option<Size>,
    /// Devices of the only node, rather than new files.
    pub paths: Vec<PathBuf>,
    /// Although these are not empty.
    pub force: bool,
    pub port: Option<u16>,
    pub nbd_tcp: Option<SocketAddr>,
    /// Serve other machines without TLS.
    pub nbd_open: bool,
    pub tls_dir: Option<PathBuf>,
    pub meta: Option<MetaConfig>,
    /// Of the host.
    pub name: Option<String>,
    /// Where the nodes listen.
    pub address: Option<IpAddr>,
    /// Become a part of this grid rather than make one.
    pub join: Option<Join>,
    /// Of a grid that is made: whether hosts and nodes talk over TLS. By default they do where there may be several
    /// machines: with etcd and an address.
    pub tls: Option<bool>,
}

/// What `grid up` did.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UpOutcome {
    pub created: bool,
    pub started: Vec<String>,
    /// Nodes that a signal has stopped: the grid serves without them.
    pub hung: Vec<u32>,
    pub config: GridConfig,
}

/// Keeps other `up` and `down` away while it lives.
struct Lock {
    _file: fs::File,
}

impl Lock {
    fn take(dir: &GridDir) -> Result<Lock> {
        dir.check_here()?;
        let path = dir.lock_path();
        let file = fs::OpenOptions::new().create(true).truncate(false).write(true).open(&path);
        let file = file.with_context(|| format!("cannot write {}; check permissions", path.display()))?;
        if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            refuse!(
                Code::Changed,
                "another `holdfast grid up` or `down` is at work in {}; wait for it",
                dir.root().display()
            );
        }
        Ok(Lock { _file: file })
    }
}

pub fn up(dir: &GridDir, options: &UpOptions) -> Result<UpOutcome> {
    dir.check_socket_paths()?;
    for path in [dir.root().to_path_buf(), dir.logs_dir(), dir.run_dir()] {
        fs::create_dir_all(&path)
            .with_context(|| format!("cannot make the directory {}; choose another --dir", path.display()))?;
    }
    let _lock = Lock::take(dir)?;
    let created = !dir.exists();
    check_member(dir)?;
    let config = if created { create(dir, options)? } else { dir.load()? };
    // A command that was cut short when all was done has left what says that devices hold nothing.
    Begun::done(dir)?;
    grow::clear_unfinished(dir, &config)?;
    let settings = dir.settings(&config)?;
    check_unchanged(dir, (&config, &settings), options)?;
    check_metadata(dir, &config)?;
    let missing: Vec<Role> = roles(&config).into_iter().filter(|role| role.find(dir).is_none()).collect();
    if let Some(host) = Role::Host.find(dir).filter(|host| host.stopped) {
        refuse!(
            Code::Unavailable,
            "the host hangs (process {}): a signal has stopped it; `kill -CONT {0}` lets it go on",
            host.pid
        );
    }
    // What can't be used is told by what does not start with it.
    let _: Result<()> = renew_due(dir, &config);
    for role in &missing {
        check_startable(dir, &config, *role)?;
    }
    for role in &missing {
        role.start(dir)?;
    }
    wait_until_serving(dir, &config)?;
    tell_host(dir, &config)?;
    // The grid is up whatever comes of it.
    if let Err(error) = grow::finish_removing(dir, &config) {
        logger::warn(format_args!("{error:#}"));
    }
    let started = missing.iter().map(Role::to_string).collect();
    Ok(UpOutcome { created, started, hung: hung_nodes(dir, &config), config })
}

/// Where this machine signs: its host, which sees to that else, can't while somebody waits for nodes that nobody accepts.
fn renew_due(dir: &GridDir, config: &GridConfig) -> Result<()> {
    let certificates = Certificates::of(dir, config.grid_id()?);
    if config.tls && certificates.has_authority() && renewal::is_due(&certificates, config)? {
        certificates.issue(&certs::roles(config))?;
    }
    Ok(())
}

/// A node of this machine. Of one that is not it is told where it is, as far as the host can tell.
pub fn own_node<'c>(dir: &GridDir, config: &'c GridConfig, id: u32) -> Result<&'c NodeConfig> {
    let unknown = match config.node(id) {
        Ok(node) => return Ok(node),
        Err(unknown) => unknown,
    };
    let Ok(told) = client::status(dir) else { return Err(unknown) };
    let found = told.nodes.iter().find(|node| node.id == id);
    if let Some(machine) = found.and_then(|node| node.machine.as_ref()) {
        refuse!(
            Code::State,
            "node {id} is on machine {machine}, and this is done there: run the command on that machine"
        );
    }
    let ids: Vec<String> = told.nodes.iter().map(|node| node.id.to_string()).collect();
    refuse!(Code::NotFound, "this grid has no node {id}; its nodes are {}", ids.join(", "));
}

/// Refuses what would start something of a machine that was taken out of its grid.
fn check_member(dir: &GridDir) -> Result<()> {
    dir.removed().map_or(Ok(()), |why| refuse!(Code::NotPermitted, "{why}"))
}

pub fn roles(config: &GridConfig) -> Vec<Role> {
    config.nodes.iter().map(|n| Role::Node(n.id)).chain([Role::Host]).collect()
}

/// Has a host know nodes that it was not told of: a command that has added one was cut short.
fn tell_host(dir: &GridDir, config: &GridConfig) -> Result<()> {
    let Ok(status) = client::status(dir) else { return Ok(()) };
    let is_known = |node: &NodeConfig| status.nodes.iter().any(|told| told.id == node.id);
    if config.nodes.iter().all(is_known) { Ok(()) } else { client::done(dir, &holdfast_api::Request::GridReload) }
}

/// Starts one process of a grid that is up; its blank devices are made the node's before, where that is asked for. False where it
/// was running.
pub fn start_node(dir: &GridDir, id: u32, format_blank: bool) -> Result<bool> {
    let mut config = dir.load()?;
    check_member(dir)?;
    own_node(dir, &config, id)?;
    let role = Role::Node(id);
    match role.find(dir) {
        Some(running) if running.stopped => refuse!(
            Code::State,
            "node {id} is running already (process {}), and hangs: `holdfast node resume {id}` lets it go on",
            running.pid
        ),
        Some(running) if format_blank => refuse!(
            Code::Invalid,
            "node {id} is running already (process {}), and --format-blank counts for a start: `holdfast node stop {id}` first",
            running.pid
        ),
        Some(_) => return Ok(false),
        None => {}
    }
    let _lock = Lock::take(dir)?;
    check_startable(dir, &config, role)?;
    let is_changed = format_blank && format_devices(dir, &mut config, id)?;
    role.start(dir)?;
    wait_until_serves(dir, &config, id)?;
    if is_changed && Role::Host.find(dir).is_some() {
        client::done(dir, &holdfast_api::Request::GridReload)?;
    }
    tell_host(dir, &config)?;
    Ok(true)
}

/// Makes blank devices of a node that is down its own. They have ids of their own: what was in their places before is gone, and
/// the configuration names it no more. Returns whether there was one.
fn format_devices(dir: &GridDir, config: &mut GridConfig, id: u32) -> Result<bool> {
    let owner = (config.grid_id()?, NodeId(id));
    let mut is_changed = false;
    let node = config.nodes.iter_mut().find(|node| node.id == id).expect("just seen");
    for device in &mut node.devices {
        let path = dir.device_path(device);
        let probed = path.clone();
        let Some(Ok(Err(_))) = within(ANSWER_MAX, move || ownership::probe(&probed, 0)) else { continue };
        let claim = move || {
            let opened = holdfast_runtime::device::open(&path)?;
            Ok::<_, anyhow::Error>((ownership::claim(&opened, owner, true)?, opened.size_bytes()))
        };
        // What can't be claimed the node tells itself, and does without.
        if let Some(Ok((ownership::Claim::Formatted(new), size_bytes))) = within(FORMAT_MAX, claim) {
            (device.device, device.size_bytes, is_changed) = (new.to_string(), size_bytes, true);
        }
    }
    if is_changed {
        dir.save(config)?;
    }
    Ok(is_changed)
}

/// The device in this place is this one from here on.
pub fn note_device(dir: &GridDir, node: NodeId, path: &Path, device: DeviceId) -> Result<()> {
    let _lock = outwait(|| Lock::take(dir), |_| true)?;
    let mut config = dir.load()?;
    let devices = config.nodes.iter_mut().filter(|n| n.id == node.0).flat_map(|n| &mut n.devices);
    for known in devices.filter(|known| dir.device_path(known) == path) {
        known.device = device.to_string();
    }
    dir.save(&config)
}

/// What comes of work on a device, which may hang: then its thread is left to itself.
fn within<T: Send + 'static>(patience: Duration, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (tell, told) = std::sync::mpsc::channel();
    // Nobody may listen any more.
    std::thread::spawn(move || drop(tell.send(work())));
    told.recv_timeout(patience).ok()
}

/// Stops a node in good order, where nothing would be less redundant than its absence alone makes it. False where it was not
/// running.
pub fn stop_node(dir: &GridDir, id: u32, force: bool) -> Result<bool> {
    let config = dir.load()?;
    own_node(dir, &config, id)?;
    let role = Role::Node(id);
    if role.find(dir).is_none() {
        return Ok(false);
    }
    let _lock = Lock::take(dir)?;
    // Without its host no volume is in service, and what lies on devices stays there.
    if !force && Role::Host.find(dir).is_some() {
        client::done(dir, &holdfast_api::Request::CheckStop { node: id })?;
    }
    grow::stop(dir, id)?;
    Ok(true)
}

fn wait_until_serves(dir: &GridDir, config: &GridConfig, id: u32) -> Result<()> {
    let (role, address) = (Role::Node(id), config.node(id)?.address);
    let mut died = false;
    let serves = wait(UP_MAX, || {
        died = role.find(dir).is_none();
        died || std::net::TcpStream::connect_timeout(&address, Duration::from_millis(200)).is_ok()
    });
    if died || !serves {
        refuse!(Code::Unavailable, "{} did not come up; the end of its log:\n{}", role, role.log_tail(dir));
    }
    Ok(())
}

/// What of a machine's part of the grid is stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    All,
    /// Its nodes go on.
    Host,
}

/// Stops everything, or the host alone; not under the hands of clients, nor while the rest of the grid can't do
/// without the nodes that are here,
/// unless that is forced.
pub fn down(dir: &GridDir, part: Part, force: bool) -> Result<Vec<String>> {
    let config = dir.load()?;
    let _lock = Lock::take(dir)?;
    if !force {
        if part == Part::All {
            check_spared(dir, &config)?;
        }
        check_unused(dir, part)?;
    }
    // The host first: it empties its log into the nodes.
    let to_stop = roles(&config).into_iter().rev().filter(|role| part == Part::All || *role == Role::Host);
    if let Some(units) = Units::of(dir) {
        return down_by_systemd(dir, to_stop, &units);
    }
    let mut stopped = Vec::new();
    for (role, patience) in to_stop.map(|role| (role, patience_of(role))) {
        if role.find(dir).is_none() {
            role.forget(dir);
            continue;
        }
        // A process that hangs hears nothing else.
        role.signal(dir, Signal::CONT)?;
        role.signal(dir, Signal::TERM)?;
        if role == Role::Host && !role.wait_gone(dir, patience) {
            role.signal(dir, Signal::KILL)?;
        }
        stopped.push(role);
    }
    for role in &stopped {
        if !role.wait_gone(dir, patience_of(*role)) {
            role.signal(dir, Signal::KILL)?;
            role.wait_gone(dir, NODE_DOWN_MAX);
        }
        role.forget(dir);
    }
    Ok(stopped.iter().map(Role::to_string).collect())
}

/// What doesn't run may be about to be started again: so all units are stopped, the host's first.
fn down_by_systemd(dir: &GridDir, to_stop: impl Iterator<Item = Role>, units: &Units) -> Result<Vec<String>> {
    let mut stopped = Vec::new();
    for role in to_stop {
        let was_there = role.find(dir).is_some();
        units.stop(role)?;
        role.forget(dir);
        stopped.extend(was_there.then(|| role.to_string()));
    }
    Ok(stopped)
}

/// The same question as for `node stop`, for all nodes of this machine at once. Without its host it can't be asked.
fn check_spared(dir: &GridDir, config: &GridConfig) -> Result<()> {
    let nodes: Vec<u32> = config.nodes.iter().map(|n| n.id).collect();
    let is_up = Role::Host.find(dir).is_some_and(|host| !host.stopped) && client::status(dir).is_ok();
    if nodes.is_empty() || !is_up {
        return Ok(());
    }
    match client::done(dir, &holdfast_api::Request::CheckDown { nodes }) {
        // A host of an older release doesn't know the question.
        Err(error) if format!("{error:#}").contains("unknown variant") => Ok(()),
        checked => checked.context("the grid's part on this machine is not stopped"),
    }
}

/// A host that does not answer has no clients that get any.
fn check_unused(dir: &GridDir, part: Part) -> Result<()> {
    let is_up = Role::Host.find(dir).is_some_and(|host| !host.stopped);
    // A client that has just said good-bye is gone in a moment.
    let patience = Instant::now() + client::HANG_UP_MAX;
    let used = loop {
        let Some(Ok(status)) = is_up.then(|| client::status(dir)) else { return Ok(()) };
        let used = status.volumes.iter().filter(|v| v.sessions > 0);
        let used: Vec<String> = used.map(|v| format!("{} ({})", v.name, v.sessions)).collect();
        if used.is_empty() || Instant::now() >= patience {
            break used;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    if !used.is_empty() {
        let (what, host) = if part == Part::All { ("grid", "") } else { ("host", " --host") };
        refuse!(
            Code::InUse,
            "the {what} is not stopped: clients are connected to {}, and would get errors. Disconnect them first; or \
             `holdfast grid down{host} --force`, which loses nothing that was acknowledged",
            used.join(", ")
        );
    }
    Ok(())
}

fn patience_of(role: Role) -> Duration {
    if role == Role::Host { HOST_DOWN_MAX } else { NODE_DOWN_MAX }
}

/// A grid keeps the shape it was made with.
fn check_unchanged(dir: &GridDir, (config, settings): (&GridConfig, &HostSettings), options: &UpOptions) -> Result<()> {
    check_chosen(dir, settings, options)?;
    let nodes = config.nodes.len() as u32;
    let devices = config.nodes.first().map_or(0, |n| n.devices.len() as u32);
    let size = config.nodes.first().and_then(|n| n.devices.first()).map_or(Size(0), |d| Size(d.size_bytes));
    let is_named =
        |path: &PathBuf| std::path::absolute(path).is_ok_and(|path| config.nodes.iter().any(|n| n.has(&path)));
    let changed = [
        ("--device", !options.paths.iter().all(is_named)),
        ("--nodes", options.nodes.is_some_and(|n| n != nodes)),
        // A machine without nodes has no devices to differ.
        ("--devices", nodes > 0 && options.devices.is_some_and(|d| d != devices)),
        ("--device-size", nodes > 0 && options.device_size.is_some_and(|s| s != size)),
        ("--port", options.port.is_some_and(|p| config.nodes.first().is_some_and(|n| n.address.port() != p))),
        ("--etcd", options.meta.as_ref().is_some_and(|meta| *meta != config.meta)),
        ("--name", options.name.as_ref().is_some_and(|name| *name != config.host.name)),
        ("--address", options.address.is_some_and(|ip| config.address() != Some(ip))),
        ("--join", options.join.as_ref().is_some_and(|join| join.grid().to_string() != config.grid)),
        ("--tls", options.tls.is_some_and(|tls| tls != config.tls)),
    ];
    if let Some((name @ ("--port" | "--address"), _)) = changed.iter().find(|(_, is)| *is) {
        refuse!(
            Code::Invalid,
            "{name} differs from the grid in {}; leave the option out to bring that grid up, or change it first with `holdfast \
             grid address`",
            dir.root().display()
        );
    }
    if let Some(("--etcd", _)) = changed.iter().find(|(_, is)| *is) {
        refuse!(
            Code::Invalid,
            "--etcd differs from the grid in {}, whose metadata are: {}; leave the option out to bring that grid up, \
             or have it use other members first with `holdfast grid etcd use`",
            dir.root().display(),
            config.meta
        );
    }
    if let Some((name, _)) = changed.iter().find(|(_, is)| *is) {
        refuse!(
            Code::Invalid,
            "{name} differs from the grid in {}, which has {nodes} nodes with {devices} devices of {size}; leave the \
             option out to bring that grid up, or make another grid with --dir",
            dir.root().display()
        );
    }
    Ok(())
}

/// Options of `grid up` that are settings: a file that says something else is the operator's.
fn check_chosen(dir: &GridDir, settings: &HostSettings, options: &UpOptions) -> Result<()> {
    let changed = [
        ("--nbd-tcp", "nbd.tcp", options.nbd_tcp.is_some() && options.nbd_tcp != settings.nbd_tcp),
        ("--nbd-open", "nbd.open", options.nbd_open && !settings.nbd_open),
        ("--tls-dir", "nbd.tls_dir", options.tls_dir.is_some() && options.tls_dir != settings.tls_dir),
    ];
    if let Some((name, key, _)) = changed.iter().find(|(_, _, is)| *is) {
        refuse!(
            Code::Invalid,
            "{name} differs from what is set for the grid in {}; leave the option out, and set {key} in {}",
            dir.root().display(),
            dir.settings_path().display()
        );
    }
    Ok(())
}

/// Writes a new grid's settings, unless there are some already. Returns whether it did.
fn write_settings(dir: &GridDir, config: &GridConfig, options: &UpOptions) -> Result<bool> {
    let path = dir.settings_path();
    if path.exists() {
        check_chosen(dir, &dir.settings(config)?, options)?;
        return Ok(false);
    }
    let wanted = HostSettings { nbd_tcp: options.nbd_tcp, tls_dir: options.tls_dir.clone(), ..HostSettings::default() };
    if let (Exposure::Withheld(address), false) = (wanted.exposure(), options.nbd_open) {
        refuse!(
            Code::Invalid,
            "--nbd-tcp {address} without TLS would let everybody who reaches that address read, overwrite and discard every \
             volume; add --tls-dir, or --nbd-open where only machines that may do all of that reach it"
        );
    }
    let chosen = [
        ("nbd.tcp", options.nbd_tcp.map(Value::Address)),
        ("nbd.tls_dir", options.tls_dir.clone().map(Value::Directory)),
        ("nbd.open", options.nbd_open.then_some(Value::Switch(true))),
    ];
    let chosen: Vec<_> = chosen.into_iter().filter_map(|(name, value)| Some((name, value?))).collect();
    layout::write_durably(&path, crate::config::template(&chosen).as_bytes())?;
    if let Err(error) = dir.settings(config) {
        fs::remove_file(&path)?;
        return Err(of_options(error));
    }
    Ok(true)
}

/// What is wrong with settings that were given as options: there is no file that it could be put right in.
fn of_options(error: anyhow::Error) -> anyhow::Error {
    let Some(wrong) = error.downcast_ref::<ConfigError>() else { return error };
    let told: Vec<String> = wrong.complaints.iter().map(|wrong| format!("{}; {}", wrong.what, wrong.next)).collect();
    let as_options = [("nbd.tls_dir", "--tls-dir"), ("nbd.tcp", "--nbd-tcp"), ("nbd.open", "--nbd-open")];
    let told = as_options.iter().fold(told.join("\n"), |told, (key, option)| told.replace(key, option));
    anyhow!("{told}")
}

/// As whom a process takes part in its grid.
fn identity(config: &GridConfig, role: Role) -> pki::Role {
    match role {
        Role::Host => pki::Role::Host(config.host.name.clone()),
        Role::Node(id) => pki::Role::Node(NodeId(id)),
    }
}

/// Everything that can be known to fail is found before anything is started.
fn check_startable(dir: &GridDir, config: &GridConfig, role: Role) -> Result<()> {
    let grid = config.grid_id()?;
    if config.tls {
        Certificates::of(dir, grid).check(&identity(config, role))?;
    }
    let Role::Node(id) = role else {
        return Ok(());
    };
    let node = config.node(id)?;
    outwait(|| check_port(node.address), |_| true)
        .with_context(|| format!("node {id} can't start; nothing of the grid was changed"))
}

/// A grid's metadata are made with it: where they are gone, its volumes would seem never to have been.
fn check_metadata(dir: &GridDir, config: &GridConfig) -> Result<()> {
    let path = dir.meta_path();
    if config.meta != MetaConfig::Embedded {
        return match crate::host::meta::open(dir, config) {
            // Nodes need none, and the host waits for it by itself.
            Err(error) if crate::host::meta::is_away(&error) => Ok(()),
            opened => {
                let catalog = Catalog::new(opened?, config.grid_id()?, &config.host.name);
                machines::check_member(dir, config, &catalog)
            }
        };
    }
    if fs::metadata(&path).is_ok_and(|m| m.len() > 0) {
        return Ok(());
    }
    refuse!(
        Code::State,
        "{} is missing or empty: it says which volumes there are, and their data, which is still on the devices, can't be \
         found without it. Restore that file if a copy is somewhere; else `holdfast meta recover` makes it anew from what the \
         nodes hold; or move the directory away if nothing in it is needed",
        path.display()
    );
}

fn check_port(address: SocketAddr) -> Result<()> {
    match TcpListener::bind(address) {
        Ok(_) => Ok(()),
        Err(e) if e.kind() == std::io::ErrorKind::AddrInUse => refuse!(
            Code::InUse,
            "port {} is in use by another process; `ss -lntp 'sport = :{0}'` names it: stop it, or have this grid's nodes use \
             others (`holdfast grid address --port PORT`)",
            address.port()
        ),
        Err(e) if e.kind() == std::io::ErrorKind::AddrNotAvailable => {
            let what = address::check_own(address.ip()).err().unwrap_or_else(|| e.into());
            Err(what.context(format!(
                "node can't listen on {address}; give this machine's part of the grid another address (`holdfast grid address \
                 ADDRESS`)"
            )))
        }
        Err(e) => Err(e).with_context(|| format!("cannot listen on {address}")),
    }
}

/// Makes a new grid: devices first, its configuration last.
fn create(dir: &GridDir, options: &UpOptions) -> Result<GridConfig> {
    let before = clear_unfinished(dir)?;
    let given = grow::describe_all(&options.paths, &Requester::default(), options.force)?;
    let nodes = options.nodes.unwrap_or(if given.is_empty() { NODES_DEFAULT } else { 1 });
    let devices = options.devices.unwrap_or(if given.is_empty() { DEVICES_DEFAULT } else { given.len() as u32 });
    let size = match options.device_size {
        Some(size) => size,
        None => fitting_size(free_bytes(dir.root())?, u64::from(nodes) * u64::from(devices)),
    };
    check_shape(dir, options, (nodes, devices, size))?;
    let ip = options.address.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
    address::check_own(ip)?;
    let ports = choose_ports(ip, options.port, nodes)?;
    let prepared = etcd::check_prepared(dir, options.meta.as_ref(), options.join.is_some())?;
    let new = || prepared.unwrap_or_else(|| GridId(uuid::Uuid::new_v4().as_u128()));
    let grid = options.join.as_ref().map_or_else(new, Join::grid);
    let file =
        |_| DeviceConfig { path: PathBuf::from("devices"), device: fresh_device_id().to_string(), size_bytes: size.0 };
    let planned: Vec<Vec<DeviceConfig>> = match given.is_empty() {
        true => (0..nodes).map(|_| (0..devices).map(file).collect()).collect(),
        false => vec![given.clone()],
    };
    let node = |index: u32, id: u32| NodeConfig {
        id,
        address: SocketAddr::from((ip, ports + index as u16)),
        devices: creating::named(&planned[index as usize], id),
    };
    let mut host = options.name.clone().map_or_else(HostConfig::default, HostConfig::named);
    host.address = options.address;
    crate::host::catalog::check_name(&host.name)?;
    let meta = options.meta.clone().unwrap_or_default();
    let tls = wants_tls(options)?;
    let mut config = GridConfig { meta, tls, ..GridConfig::new(grid.to_string(), Vec::new(), host) };
    let mut has_new_settings = false;
    let begun = Begun::new(&config.grid, planned.concat()).after(before);
    begun.save(dir)?;
    // What another grid, that was here before, has left.
    remove_if_there(&dir.beat_path())?;
    let join = |join| join::Joining::begin(dir, &config, (ip, &begun), join);
    let joined = options.join.as_ref().map(join).transpose()?;
    let made = match &joined {
        Some(joining) => joining.add_nodes(nodes, node),
        None => Ok((0..nodes).map(|index| node(index, index + 1)).collect()),
    };
    let made = made
        .map(|nodes| config.nodes = nodes)
        .and_then(|()| write_settings(dir, &config, options))
        .map(|is_new| has_new_settings = is_new)
        .and_then(|()| make_devices(dir, &config))
        .and_then(|()| secure(dir, &config, joined.as_ref(), prepared.is_some()))
        .and_then(|()| if joined.is_some() { Ok(()) } else { make_metadata(dir, &config) })
        .and_then(|()| dir.save(&config));
    if let Err(error) = made {
        let is_undone = joined.is_none_or(join::Joining::undo);
        // What was made ours of them is of no grid.
        clear_unfinished(dir)?;
        if has_new_settings {
            fs::remove_file(dir.settings_path())?;
        }
        // Else the next attempt finds by it what is to be undone still.
        if is_undone {
            Begun::done(dir)?;
        }
        return Err(error);
    }
    Begun::done(dir)?;
    if prepared.is_some() {
        fs::remove_file(dir.prepared_path())?;
    }
    Ok(config)
}

/// Refuses what a machine can't have, or has no room for.
fn check_shape(dir: &GridDir, options: &UpOptions, (nodes, devices, size): (u32, u32, Size)) -> Result<()> {
    let fewest = if options.join.is_some() { 0 } else { 1 };
    if !(fewest..=NODES_MAX).contains(&nodes) || !(1..=DEVICES_MAX).contains(&devices) {
        refuse!(
            Code::Invalid,
            "a machine has {fewest} to {NODES_MAX} nodes with 1 to {DEVICES_MAX} devices each; choose --nodes and \
             --devices so"
        );
    }
    if size < DEVICE_SIZE_MIN || !size.0.is_multiple_of(4096) {
        refuse!(
            Code::Invalid,
            "a device has at least {DEVICE_SIZE_MIN}, in whole blocks of 4 KiB; choose a larger --device-size"
        );
    }
    if options.paths.is_empty() {
        check_space(dir, u64::from(nodes) * u64::from(devices), size)?;
    } else if nodes != 1 {
        refuse!(
            Code::Invalid,
            "devices that are named by --device are those of one node; leave --nodes out, and add others by `holdfast node add`"
        );
    }
    Ok(())
}

/// Whether a grid that is being made or joined has TLS.
fn wants_tls(options: &UpOptions) -> Result<bool> {
    if let Some(join) = &options.join {
        return Ok(join.token().is_some());
    }
    let may_grow = matches!(options.meta, Some(MetaConfig::Etcd(_))) && options.address.is_some();
    let has_own_etcd = options.meta.as_ref().is_some_and(MetaConfig::has_own_tls);
    if has_own_etcd && options.tls == Some(false) {
        refuse!(
            Code::Invalid,
            "an etcd that goes by the grid's certificates is one of a grid with TLS; leave --tls off out"
        );
    }
    Ok(options.tls.unwrap_or(may_grow || has_own_etcd))
}

/// Makes the certificates of the grid's first machine, or gets those of another one.
fn secure(dir: &GridDir, config: &GridConfig, joining: Option<&join::Joining<'_>>, has_authority: bool) -> Result<()> {
    if !config.tls {
        return Ok(());
    }
    let (certificates, roles) = (Certificates::of(dir, config.grid_id()?), certs::roles(config));
    if let Some(joining) = joining {
        return joining.obtain(&certificates, &roles);
    }
    if !has_authority {
        certificates.make_authority()?;
    }
    certificates.issue(&roles)?;
    etcd::settle(dir, config)
}

/// Prepares the metadata store for a grid that is being made.
fn make_metadata(dir: &GridDir, config: &GridConfig) -> Result<()> {
    let meta = crate::host::meta::connect(dir, config)?;
    if config.tls {
        let record = encode(&authority::record_of(&Certificates::of(dir, config.grid_id()?).ca_pem()?)?);
        // Before the grid can be found: who joins it is to see this.
        meta.swap(TLS_KEY, MetaVersion::ABSENT, Some(&record), None)?;
    }
    crate::host::meta::complete(dir, &meta, config)
}

/// Removes what a `grid up` left that did not get to its end, and tells what that was. What the grid's metadata have of
/// it stays, and so does the file that tells of it.
fn clear_unfinished(dir: &GridDir) -> Result<Option<Begun>> {
    let devices = dir.devices_dir();
    let is_occupied = fs::read_dir(&devices).is_ok_and(|mut entries| entries.next().is_some());
    let Some(begun) = Begun::load(dir)? else {
        if is_occupied {
            refuse!(
                Code::State,
                "{} holds devices, but {} is missing; restore that file, or move the directory away if its data is not \
                 needed",
                devices.display(),
                dir.config_path().display()
            );
        }
        return Ok(None);
    };
    for (device, grid) in begun.given() {
        // One that is broken or gone by now is told of where it is to be taken.
        let _: Result<()> = grid.parse().map_err(anyhow::Error::from).and_then(|grid| grow::give_back(device, grid));
    }
    if is_occupied {
        fs::remove_dir_all(&devices).with_context(|| format!("cannot remove {}", devices.display()))?;
    }
    if dir.meta_path().exists() {
        fs::remove_file(dir.meta_path())?;
    }
    certs::clear(&dir.tls_dir(), dir.prepared_path().exists())?;
    Ok(Some(begun))
}

/// Room that the file system of a path has for what is not the superuser's.
pub fn free_bytes(path: &Path) -> Result<u64> {
    let stat =
        rustix::fs::statvfs(path).with_context(|| format!("cannot examine the file system of {}", path.display()))?;
    Ok(stat.f_bavail * stat.f_frsize)
}

/// As large as devices are by default, or less: files that leave a third of what is free to others.
fn fitting_size(free: u64, devices: u64) -> Size {
    let fitting = (free / 3 * 2).saturating_sub(SPARE_BYTES) / devices.max(1);
    Size((fitting / DEVICE_SIZE_STEP * DEVICE_SIZE_STEP).clamp(DEVICE_SIZE_MIN.0, DEVICE_SIZE_DEFAULT.0))
}

fn check_space(dir: &GridDir, devices: u64, size: Size) -> Result<()> {
    let free = free_bytes(dir.root())?;
    let needed = devices.saturating_mul(size.0);
    if needed.saturating_add(SPARE_BYTES) > free {
        let fitting = (free.saturating_sub(SPARE_BYTES) / devices / 10 * 9) >> 20;
        let advice = if fitting >= DEVICE_SIZE_MIN.0 >> 20 {
            format!("add --device-size {fitting}MiB, or choose a --dir with more room")
        } else {
            "choose a --dir with more room, or fewer --nodes or --devices".to_string()
        };
        refuse!(
            Code::NoSpace,
            "too little space in {}: {devices} devices of {size} need {}, and {} is free ({} is left for other \
             things); {advice}",
            dir.root().display(),
            Size(needed),
            Size(free),
            Size(SPARE_BYTES)
        );
    }
    Ok(())
}

/// The ports from `asked` on, or the first free range from the default on.
fn choose_ports(ip: IpAddr, asked: Option<u16>, nodes: u32) -> Result<u16> {
    let is_free = |base: u16| {
        (0..nodes as u16).try_for_each(|i| {
            let port = base.checked_add(i).context("there is no port above 65535; choose a smaller --port")?;
            check_port(SocketAddr::from((ip, port)))
        })
    };
    if let Some(base) = asked {
        is_free(base)
            .with_context(|| format!("the nodes can't have the {nodes} ports from {base} on; choose another --port"))?;
        return Ok(base);
    }
    let mut bases = (PORT_DEFAULT..u16::MAX - NODES_MAX as u16).step_by(100);
    bases.find(|base| is_free(*base).is_ok()).context("no free range of ports was found; name one with --port")
}

fn make_devices(dir: &GridDir, config: &GridConfig) -> Result<()> {
    certs::make_private_dir(&dir.devices_dir())?;
    let grid = config.grid_id()?;
    for node in &config.nodes {
        for device in &node.devices {
            if device.path.is_absolute() {
                grow::take(device, grid, NodeId(node.id))?;
                continue;
            }
            let path = dir.device_path(device);
            create_file(&path, device.size_bytes, 0)?;
            // Writes the journal with zeroes, as `create_file` advises.
            ownership::format(&path, device.size_bytes, grid, NodeId(node.id), device.device.parse()?)?;
        }
    }
    Ok(())
}

fn hung_nodes(dir: &GridDir, config: &GridConfig) -> Vec<u32> {
    let is_hung = |id: &u32| Role::Node(*id).find(dir).is_some_and(|running| running.stopped);
    config.nodes.iter().map(|n| n.id).filter(is_hung).collect()
}

/// Waits for all nodes but those that hang, and for every volume.
fn wait_until_serving(dir: &GridDir, config: &GridConfig) -> Result<()> {
    let mut dead = None;
    let mut last = String::from("the host did not answer");
    let mut waits_for = None;
    let serves = wait(UP_MAX, || {
        waits_for = Role::Host.waits_for(dir);
        if waits_for.is_some() {
            return true;
        }
        dead = roles(config).into_iter().find(|role| role.find(dir).is_none());
        if dead.is_some() {
            return true;
        }
        match client::status(dir) {
            Ok(status) => {
                let is_up = |n: &holdfast_api::NodeInfo| {
                    n.link != holdfast_api::LinkState::Down
                        && n.devices.iter().all(|d| d.health != holdfast_api::DeviceHealth::Opening)
                };
                let hung = hung_nodes(dir, config);
                let is_late = |n: &&holdfast_api::NodeInfo| !is_up(n) && !hung.contains(&n.id);
                let is_here = |n: &&holdfast_api::NodeInfo| config.nodes.iter().any(|own| own.id == n.id);
                let late = status.nodes.iter().filter(is_here).filter(is_late);
                let late: Vec<String> = late.map(|n| n.id.to_string()).collect();
                let opening = status.volumes.iter().filter(|v| v.state == VolumeState::Opening);
                let waits: Vec<String> = opening
                    .map(|v| format!("volume {}: {}", v.name, v.waits.as_deref().unwrap_or("opening")))
                    .collect();
                last = if late.is_empty() { waits.join("; ") } else { format!("node {} is not up", late.join(", ")) };
                last.is_empty()
            }
            Err(error) => {
                last = error.to_string();
                false
            }
        }
    });
    if let Some(why) = waits_for {
        refuse!(
            Code::Unavailable,
            "nodes are started, and the host waits for the grid's metadata: {why}. It goes on by itself when they can be read; \
             `holdfast status` tells"
        );
    }
    if dead.is_some() {
        check_member(dir)?;
    }
    if let Some(role) = dead {
        bail!(
            "{role} ended while the grid came up; the end of {}:\n{}\nWhat was started stays; stop it with `holdfast \
             grid down`",
            role.log_path(dir).display(),
            role.log_tail(dir)
        );
    }
    if !serves {
        refuse!(
            Code::Unavailable,
            "the grid did not come up within {} s: {last}. It goes on trying: see `holdfast status` and the logs in {}",
            UP_MAX.as_secs(),
            dir.logs_dir().display()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_as_large_as_there_is_room_for() {
        const GIB: u64 = 1 << 30;
        assert_eq!(fitting_size(1000 * GIB, 8), DEVICE_SIZE_DEFAULT);
        let size = fitting_size(30 * GIB, 8);
        assert!(size.0 >= 2 * GIB && 8 * size.0 + SPARE_BYTES <= 20 * GIB, "{size}");
        // What doesn't fit is refused by who looks at the room.
        assert_eq!(fitting_size(GIB, 8), DEVICE_SIZE_MIN);
    }
}
