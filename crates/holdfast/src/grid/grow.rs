//! Nodes and devices of a local grid that come and go while it serves.
//!
//! Faults: a device is made before grid.json names it; `grid.adding` says which, so that the next command removes what
//! a crash in between has left. It says so until all know of the device: the same command, given again, goes on with
//! what grid.json names of it, and adds no other. `grid.replacing` says which device is to take the place of which one,
//! until that is out. grid.json forgets a device before its file is removed; `grid.removing` says until then which it
//! was, so that the same command, or `grid up`, goes on with it. Nothing else is removed that the host has not found
//! empty. What is there already is taken only where it is empty, or where that is forced.

use super::certs::Certificates;
use super::etcd;
use super::join_client::JoinClient;
use super::layout::{DeviceConfig, GridConfig, GridDir, MetaConfig, NodeConfig, remove_if_there, write_durably};
use super::processes::{Role, wait};
use super::removing::Removing;
use super::survey::{self, Requester};
use super::token::JoinToken;
use super::units::{self, Units};
use super::{
    DEVICE_SIZE_MIN, DEVICES_MAX, Lock, NODE_DOWN_MAX, NODES_MAX, UP_MAX, check_port, check_space, check_startable,
    ownership, wait_until_serves,
};
use crate::client;
use crate::daemon::outwait;
use crate::node::fresh_device_id;
use anyhow::{Context, Result};
use holdfast_api::{Code, DeviceHealth, Request, refuse};
use holdfast_base::size::Size;
use holdfast_base::{BLOCK_BYTES, GridId, NodeId};
use holdfast_runtime::device::{DeviceError, create_file};
use holdfast_runtime::pki;
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long a node may take to see that its devices have changed: it looks a few times a second, the host asks it once.
const NOTICED_MAX: Duration = Duration::from_secs(10);

/// How long clearing a device may take.
const DISCARD_MAX: Duration = Duration::from_secs(20);

/// What becomes a device.
pub enum Source {
    /// A new file in the grid's directory; by default as large as the node's first device.
    File(Option<Size>),
    /// A block device or a file that is there; all that it holds is destroyed where that is forced.
    Path { path: PathBuf, force: bool },
}

/// Adds a device to a node, which takes it in while it serves; or when it is started, where it is down. One that was
/// begun before, perhaps to replace the same device, is completed.
pub fn add_device(dir: &GridDir, node: u32, source: &Source, replaces: Option<&String>) -> Result<DeviceConfig> {
    let _lock = Lock::take(dir)?;
    let mut config = dir.load()?;
    let begun = unfinished(dir, &config)?;
    let at = super::own_node(dir, &config, node)?;
    // The host is to use it.
    client::status(dir)?;
    let device = match begun_before(dir, at, &begun, source, replaces)? {
        Some(device) => device,
        None => make_device(dir, &mut config, node, source, replaces)?,
    };
    units::refresh(dir, &config)?;
    client::done(dir, &Request::GridReload)?;
    if Role::Node(node).find(dir).is_some() {
        take_in(dir, &config, node, &device.device)?;
    }
    finish_adding(dir)?;
    Ok(device)
}

/// Has a device of this machine give its place to another one: that is taken in, and the old one emptied. Once nothing
/// is left there it can be removed. Gives the node, and the new device.
pub fn replace_device(dir: &GridDir, old: &String, source: &Source) -> Result<(u32, DeviceConfig)> {
    let config = dir.load()?;
    let holds = |node: &&NodeConfig| node.devices.iter().any(|d| d.device == *old);
    let Some(node) = config.nodes.iter().find(holds) else {
        refuse!(
            Code::State,
            "device {old} is another machine's, and is replaced there (`holdfast node list` shows which machine has which \
             node)"
        );
    };
    let new = add_device(dir, node.id, source, Some(old))?;
    client::done(dir, &Request::Drain { devices: vec![old.clone()], cancel: false, force: false })?;
    Ok((node.id, new))
}

/// The device that the same command has made already.
fn begun_before(
    dir: &GridDir,
    at: &NodeConfig,
    begun: &[DeviceConfig],
    source: &Source,
    replaces: Option<&String>,
) -> Result<Option<DeviceConfig>> {
    let replacing = Replacing::load(dir)?;
    let is_at = |d: &&DeviceConfig, path: &Path| dir.device_path(d) == *path;
    let found = match (source, replaces) {
        // Given once more when it is done, its old place is another device's, and it would take that out, too.
        (source, Some(old)) => {
            at.devices.iter().filter(|d| replacing.0.get(old) == Some(&d.device)).find(|d| match source {
                Source::Path { path, .. } => is_at(d, path),
                Source::File(_) => true,
            })
        }
        // All devices of a node are one that was added.
        (_, None) if begun == at.devices => None,
        (source, None) => at.devices.iter().filter(|d| begun.contains(d)).find(|d| match source {
            _ if replacing.0.values().any(|new| *new == d.device) => false,
            Source::Path { path, .. } => is_at(d, path),
            Source::File(size) => d.path.is_relative() && size.is_none_or(|size| size.0 == d.size_bytes),
        }),
    };
    match found {
        Some(found) if replaces == Some(&found.device) => {
            refuse!(Code::Invalid, "{} is the device that is to be replaced; name another one", found.path.display())
        }
        found => Ok(found.cloned()),
    }
}

/// Makes a device that grid.json names then.
fn make_device(
    dir: &GridDir,
    config: &mut GridConfig,
    node: u32,
    source: &Source,
    replaces: Option<&String>,
) -> Result<DeviceConfig> {
    let at = super::own_node(dir, config, node)?;
    if at.devices.len() as u32 >= DEVICES_MAX {
        refuse!(Code::Invalid, "node {node} has {DEVICES_MAX} devices, which is the bound");
    }
    let default =
        at.devices.iter().find(|d| d.path.is_relative()).map_or(super::DEVICE_SIZE_DEFAULT, |d| Size(d.size_bytes));
    match source {
        Source::File(size) => {
            check_size(size.unwrap_or(default))?;
            check_space(dir, 1, size.unwrap_or(default))?;
        }
        Source::Path { path, force } => drop(survey::check(path, &Requester::of(dir, config)?, *force)?),
    }
    let device = match source {
        Source::File(size) => describe_files(dir, config, node, 1, size.unwrap_or(default)).remove(0),
        Source::Path { path, force } => describe(path, &Requester::of(dir, config)?, *force)?,
    };
    if let Some(old) = replaces {
        let mut replacing = Replacing::load(dir)?;
        replacing.0.insert(old.clone(), device.device.clone());
        replacing.save(dir)?;
    }
    make_named(dir, config, (node, std::slice::from_ref(&device)), |config| {
        let entry = config.nodes.iter_mut().find(|n| n.id == node).expect("just seen");
        entry.devices.push(device.clone());
    })?;
    Ok(device)
}

/// Which device takes the place of which one, as long as that is under way.
#[derive(Default, Serialize, Deserialize)]
struct Replacing(BTreeMap<String, String>);

impl Replacing {
    fn load(dir: &GridDir) -> Result<Replacing> {
        let path = dir.replacing_path();
        match std::fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text)
                .with_context(|| format!("{} is damaged; remove it, and give the command again", path.display())),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Replacing::default()),
            Err(e) => Err(e).with_context(|| format!("cannot read {}; check its permissions", path.display())),
        }
    }

    fn save(&self, dir: &GridDir) -> Result<()> {
        let text = serde_json::to_vec(&self.0).expect("our configuration always encodes");
        write_durably(&dir.replacing_path(), &text)
    }
}

/// These devices are not being replaced, or not any more.
pub fn forget_replacing(dir: &GridDir, devices: &[String]) -> Result<()> {
    let mut replacing = Replacing::load(dir)?;
    let before = replacing.0.len();
    replacing.0.retain(|old, _| !devices.contains(old));
    if replacing.0.len() == before { Ok(()) } else { replacing.save(dir) }
}

/// The device that takes this one's place, while that is under way.
pub fn replaced_by(dir: &GridDir, device: &str) -> Result<Option<String>> {
    Ok(Replacing::load(dir)?.0.remove(device))
}

/// Waits until the node has taken a device in that grid.json names. A node that systemd runs may not see the device, and one of
/// an older release does not look: these are restarted, if the grid can do without them just now.
fn take_in(dir: &GridDir, config: &GridConfig, node: u32, device: &String) -> Result<()> {
    if wait(NOTICED_MAX, || health_of(dir, node, device) == Some(DeviceHealth::Serving)) {
        return Ok(());
    }
    restart_checked(dir, config, node)
        .with_context(|| format!("device {device} is added, and node {node} uses it when it is started again"))?;
    wait_until_used(dir, node, device)
}

/// Waits until the node has let devices go that grid.json names no more.
fn let_go(dir: &GridDir, config: &GridConfig, node: u32, devices: &[String]) -> Result<()> {
    if wait(NOTICED_MAX, || devices.iter().all(|device| health_of(dir, node, device).is_none())) {
        return Ok(());
    }
    restart_checked(dir, config, node).with_context(|| {
        format!("node {node} lets the device go when it is started again; then it can be taken elsewhere")
    })
}

/// How a device of a node is, as the host was told.
pub(super) fn health_of(dir: &GridDir, node: u32, device: &String) -> Option<DeviceHealth> {
    let status = client::status(dir).ok()?;
    let found = status.nodes.into_iter().find(|n| n.id == node)?;
    found.devices.into_iter().find(|d| d.device == *device).map(|d| d.health)
}

/// The devices of a node that is added.
pub enum Devices {
    /// New files, so many, so large; by default as the last node has.
    Files(Option<u32>, Option<Size>),
    /// Block devices or files that are there.
    Paths { paths: Vec<PathBuf>, force: bool },
}

/// Adds a node and starts it; with a token, where the grid has TLS and this machine can't sign. One that was begun
/// before is completed.
pub fn add_node(dir: &GridDir, devices: &Devices, token: Option<&JoinToken>) -> Result<NodeConfig> {
    let _lock = Lock::take(dir)?;
    let mut config = dir.load()?;
    let begun = unfinished(dir, &config)?;
    let is_it = |node: &&NodeConfig| !begun.is_empty() && node.devices == begun && devices.are(dir, &begun);
    let node = match config.nodes.iter().find(is_it) {
        Some(node) => node.clone(),
        None => make_node(dir, &mut config, devices, token)?,
    };
    let id = node.id;
    units::refresh(dir, &config)?;
    if Role::Node(id).find(dir).is_none() {
        check_startable(dir, &config, Role::Node(id))?;
        Role::Node(id).start(dir)?;
    }
    wait_until_serves(dir, &config, id)?;
    client::done(dir, &Request::GridReload)?;
    node.devices.iter().try_for_each(|device| wait_until_used(dir, id, &device.device))?;
    finish_adding(dir)?;
    Ok(node)
}

impl Devices {
    /// Whether these are what is asked for.
    fn are(&self, dir: &GridDir, made: &[DeviceConfig]) -> bool {
        match self {
            Devices::Files(count, size) => {
                let is_it = |d: &DeviceConfig| d.path.is_relative() && size.is_none_or(|size| size.0 == d.size_bytes);
                count.is_none_or(|count| count as usize == made.len()) && made.iter().all(is_it)
            }
            Devices::Paths { paths, .. } => made.iter().map(|d| dir.device_path(d)).eq(paths.iter().cloned()),
        }
    }
}

/// Makes a node that grid.json names then.
fn make_node(
    dir: &GridDir,
    config: &mut GridConfig,
    devices: &Devices,
    token: Option<&JoinToken>,
) -> Result<NodeConfig> {
    let last = config.nodes.iter().max_by_key(|n| n.id);
    let default = last.and_then(|last| last.devices.first()).map_or(super::DEVICE_SIZE_DEFAULT, |d| Size(d.size_bytes));
    let count = match devices {
        Devices::Files(count, _) => {
            count.unwrap_or(last.map_or(super::DEVICES_DEFAULT, |last| last.devices.len() as u32))
        }
        Devices::Paths { paths, .. } => paths.len() as u32,
    };
    if config.nodes.len() as u32 >= NODES_MAX || !(1..=DEVICES_MAX).contains(&count) {
        refuse!(Code::Invalid, "a local grid has 1 to {NODES_MAX} nodes with 1 to {DEVICES_MAX} devices each");
    }
    let chosen = match devices {
        Devices::Files(_, size) => {
            check_size(size.unwrap_or(default))?;
            check_space(dir, u64::from(count), size.unwrap_or(default))?;
            Vec::new()
        }
        Devices::Paths { paths, force } => describe_all(paths, &Requester::of(dir, config)?, *force)?,
    };
    // Nodes of other machines have numbers, too, and those that were taken out had.
    let told = client::status(dir)?;
    let id = told
        .nodes
        .iter()
        .map(|node| node.id + 1)
        .fold(told.next_node.max(last.map_or(1, |last| last.id + 1)), u32::max);
    let ip = config.address().unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
    let from = last.map_or(super::PORT_DEFAULT, |last| last.address.port().saturating_add(1));
    let mut addresses = (from..u16::MAX).map(|port| SocketAddr::new(ip, port));
    let is_free =
        |address: &SocketAddr| config.nodes.iter().all(|n| n.address != *address) && check_port(*address).is_ok();
    let address = addresses.find(is_free).context("no free port was found for the node")?;
    if config.tls {
        obtain(dir, config, &[pki::Role::Node(NodeId(id))], token)?;
    }
    let devices = match devices {
        Devices::Files(_, size) => describe_files(dir, config, id, count, size.unwrap_or(default)),
        Devices::Paths { .. } => chosen,
    };
    let node = NodeConfig { id, address, devices };
    make_named(dir, config, (id, &node.devices), |config| config.nodes.push(node.clone()))?;
    Ok(node)
}

/// Gets new certificates: signed here where that can be done, with a token elsewhere.
pub fn obtain(dir: &GridDir, config: &GridConfig, roles: &[pki::Role], token: Option<&JoinToken>) -> Result<()> {
    let certificates = Certificates::of(dir, config.grid_id()?);
    let Some(token) = token else {
        certificates.sign(roles, &config.host.name)?;
        let is_host = |role: &pki::Role| matches!(role, pki::Role::Host(_));
        return if roles.iter().any(is_host) { etcd::renew(dir, config) } else { Ok(()) };
    };
    if token.grid.to_string() != config.grid {
        refuse!(
            Code::Invalid,
            "the token is for grid {}, and this machine is of grid {}; make one there",
            token.grid,
            config.grid
        );
    }
    let meta = crate::host::meta::open_with(dir, config, token.access())?;
    JoinClient::begin(meta, token, config)?.obtain(&certificates, roles)
}

/// Makes new keys and certificates for all of this machine.
pub fn rotate(dir: &GridDir, config: &GridConfig, roles: &[pki::Role], token: Option<&JoinToken>) -> Result<()> {
    let _lock = Lock::take(dir)?;
    obtain(dir, config, roles, token)
}

/// What is to be said of devices that were removed.
#[derive(Debug)]
pub struct Removed {
    pub node: u32,
    /// Of devices that could not be cleared, being broken perhaps: they are none of the grid's nevertheless.
    pub notes: Vec<String>,
}

/// Removes devices of one node that were drained, and the node with its last one.
pub fn remove_devices(dir: &GridDir, devices: &[String], force: bool) -> Result<Removed> {
    let _lock = Lock::take(dir)?;
    let mut config = dir.load()?;
    if let Some(left) = Removing::left(dir, &config)? {
        let is_asked_for = left.ids().any(|id| devices.contains(id));
        let removed = finish(dir, &config, &left)?;
        if is_asked_for {
            return Ok(removed);
        }
    }
    let Some(removing) = Removing::of(&config, devices) else {
        refuse!(
            Code::NotFound,
            "no node of this machine has such a device; `holdfast device list` shows all of the grid, and what is \
             another machine's is removed there"
        );
    };
    let id = removing.node;
    let node = config.node(id)?;
    let is_last_here = config.nodes.len() == 1 && node.devices.len() == devices.len();
    if is_last_here && client::status(dir)?.nodes.iter().all(|node| node.id == id) {
        refuse!(Code::Invalid, "the last node of a grid can't be removed; `holdfast grid down` stops the grid");
    }
    // Where there is no node left to say it, the host is reached at the same address.
    let address = config.address().filter(|_| config.meta != MetaConfig::Embedded);
    config.host.address = config.host.address.or(address.filter(|_| is_last_here));
    client::done(dir, &Request::CheckRemovable { devices: devices.to_vec(), force })?;
    removing.save(dir)?;
    for node in &mut config.nodes {
        node.devices.retain(|d| !devices.contains(&d.device));
    }
    config.nodes.retain(|n| !n.devices.is_empty());
    dir.save(&config)?;
    finish(dir, &config, &removing)
}

/// Goes on with what a command was cut short doing.
pub(super) fn finish_removing(dir: &GridDir, config: &GridConfig) -> Result<()> {
    let left = Removing::left(dir, config)?;
    let Some(left) = left else { return Removing::done(dir) };
    finish(dir, config, &left).with_context(|| {
        format!("devices that were being taken out of node {} are not out yet; give that command again", left.node)
    })?;
    Ok(())
}

/// Devices that grid.json has forgotten are to be out for everybody.
fn finish(dir: &GridDir, config: &GridConfig, removing: &Removing) -> Result<Removed> {
    let (id, devices) = (removing.node, removing.ids().cloned().collect::<Vec<_>>());
    units::refresh(dir, config)?;
    let is_node_gone = config.nodes.iter().all(|n| n.id != id);
    if is_node_gone {
        let stopped = stop(dir, id);
        // It may be so since the last time: systemd knows nothing of it then.
        if Role::Node(id).find(dir).is_some() {
            stopped?;
        }
    } else if Role::Node(id).find(dir).is_some() {
        let_go(dir, config, id, &devices)?;
    }
    client::done(dir, &Request::GridReload)?;
    if is_node_gone && config.tls {
        Certificates::of(dir, config.grid_id()?).forget(&pki::Role::Node(NodeId(id)));
    }
    forget_replacing(dir, &devices)?;
    let gone = removing.devices.iter().map(|(_, device)| device);
    let notes = gone.filter_map(|device| Some(left_as_it_is(dir, device, &discard(dir, device).err()?))).collect();
    Removing::done(dir)?;
    Ok(Removed { node: id, notes })
}

/// What is to be said of a device that is removed, and could not be cleared.
fn left_as_it_is(dir: &GridDir, device: &DeviceConfig, why: &anyhow::Error) -> String {
    let path = dir.device_path(device);
    let then = match path.starts_with(dir.devices_dir()) {
        true => "delete that file",
        false => "before it is used again it is to be wiped, or taken with --force",
    };
    format!("{} could not be cleared, and holds still what it held ({why:#}): {then}", path.display())
}

/// Until the host uses the device.
pub(super) fn wait_until_used(dir: &GridDir, node: u32, device: &String) -> Result<()> {
    if !wait(UP_MAX, || health_of(dir, node, device) == Some(DeviceHealth::Serving)) {
        refuse!(
            Code::Unavailable,
            "node {node} is up, and the host does not use device {device} yet; `holdfast device list` says why"
        );
    }
    Ok(())
}

fn check_size(size: Size) -> Result<()> {
    if size < DEVICE_SIZE_MIN || !size.0.is_multiple_of(4096) {
        refuse!(
            Code::Invalid,
            "a device has at least {DEVICE_SIZE_MIN}, in whole blocks of 4 KiB; choose a larger size"
        );
    }
    Ok(())
}

/// Deletes the file of a device that is the grid's no more; what isn't the grid's to delete can be taken by others again. A device
/// that is another one by now stays as it is.
fn discard(dir: &GridDir, device: &DeviceConfig) -> Result<()> {
    let (path, device, own) = (dir.device_path(device), device.clone(), dir.devices_dir());
    let work = move || {
        // Its node has let it go, and the kernel perhaps not yet.
        let held = outwait(|| holdfast_runtime::device::open(&path), |e| matches!(e, DeviceError::InUse { .. }));
        let found = match &held {
            Ok(held) => ownership::probe(&path, held.size_bytes()).ok().and_then(Result::ok),
            Err(DeviceError::InUse { .. }) => return Err(held.expect_err("just seen").into()),
            // It is gone or broken.
            Err(_) => None,
        };
        let is_it = found.as_ref().map(|found| found.device.to_string() == device.device);
        match (path.starts_with(own), is_it) {
            (true, Some(true) | None) => match std::fs::remove_file(&path) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(e.into()),
                _ => Ok(()),
            },
            (false, Some(true)) => survey::clear_ends(&path, device.size_bytes),
            (_, Some(false)) | (false, None) => Ok(()),
        }
    };
    super::within(DISCARD_MAX, work).context("it does not answer")?
}

/// A device that is there, as the configuration will name it; refused where it can't be taken.
fn describe(path: &Path, requester: &Requester, force: bool) -> Result<DeviceConfig> {
    let path = std::path::absolute(path).with_context(|| format!("cannot use {} as a device", path.display()))?;
    let found = survey::check(&path, requester, force)?;
    let size_bytes = found.size_bytes / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
    Ok(DeviceConfig { path, device: fresh_device_id().to_string(), size_bytes })
}

pub(super) fn describe_all(paths: &[PathBuf], requester: &Requester, force: bool) -> Result<Vec<DeviceConfig>> {
    let mut seen = BTreeSet::new();
    for path in paths {
        let real = std::fs::canonicalize(path).unwrap_or_else(|_| path.clone());
        if !seen.insert(real) {
            refuse!(Code::Invalid, "{} is named twice; name each device once", path.display());
        }
    }
    paths.iter().map(|path| describe(path, requester, force)).collect()
}

/// Makes a device that is there a node's: all that it holds is destroyed.
pub(super) fn take(device: &DeviceConfig, grid: GridId, node: NodeId) -> Result<()> {
    // Nobody else's while that goes on.
    let held = holdfast_runtime::device::open(&device.path)?;
    survey::clear_end(&device.path, held.size_bytes())?;
    ownership::format(&device.path, device.size_bytes, grid, node, device.device.parse()?)
}

/// Undoes [`take`], where it was done.
pub(super) fn give_back(device: &DeviceConfig, grid: GridId) -> Result<()> {
    match ownership::probe(&device.path, device.size_bytes)? {
        Ok(found) if found.grid == grid && found.device.to_string() == device.device => {
            survey::clear_ends(&device.path, device.size_bytes)
        }
        _ => Ok(()),
    }
}

/// New files for a node's devices, under names that no file has.
fn describe_files(dir: &GridDir, config: &GridConfig, node: u32, count: u32, size: Size) -> Vec<DeviceConfig> {
    let names = (0..).map(|n: u32| PathBuf::from(format!("devices/node{node}-{n}.img")));
    // One that is gone keeps its name as long as the configuration has it.
    let is_named = |path: &PathBuf| config.nodes.iter().any(|node| node.has(path));
    let free = names.filter(|path| !is_named(path) && !dir.root().join(path).exists()).take(count as usize);
    free.map(|path| DeviceConfig { path, device: fresh_device_id().to_string(), size_bytes: size.0 }).collect()
}

/// Makes devices for a node, and has grid.json name them: all or none, also where a command is cut short.
fn make_named(
    dir: &GridDir,
    config: &mut GridConfig,
    (node, devices): (u32, &[DeviceConfig]),
    name: impl FnOnce(&mut GridConfig),
) -> Result<()> {
    let grid = config.grid_id()?;
    let text = serde_json::to_vec(devices).expect("our configuration always encodes");
    write_durably(&dir.adding_path(), &text)?;
    let make = |device: &DeviceConfig| {
        if device.path.is_absolute() {
            return take(device, grid, NodeId(node));
        }
        let full = dir.device_path(device);
        create_file(&full, device.size_bytes, 0)?;
        ownership::format(&full, device.size_bytes, grid, NodeId(node), device.device.parse()?)
    };
    let made = devices.iter().try_for_each(make).and_then(|()| {
        name(config);
        dir.save(config)
    });
    // What is named stays; of an attempt that failed nothing is.
    let cleared = if made.is_ok() { Ok(()) } else { dir.load().and_then(|config| clear_unfinished(dir, &config)) };
    made.and(cleared)
}

/// Removes devices that a command was making which did not get to the point where grid.json names them.
pub(super) fn clear_unfinished(dir: &GridDir, config: &GridConfig) -> Result<()> {
    unfinished(dir, config)?;
    finish_adding(dir)
}

/// All know of the devices that were added.
fn finish_adding(dir: &GridDir) -> Result<()> {
    remove_if_there(&dir.adding_path())
}

/// Removes devices as [`clear_unfinished`] does, and gives those that a command was adding and that grid.json names.
fn unfinished(dir: &GridDir, config: &GridConfig) -> Result<Vec<DeviceConfig>> {
    let path = dir.adding_path();
    let text = match std::fs::read(&path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(e).with_context(|| format!("cannot read {}; check its permissions", path.display())),
    };
    let begun: Vec<DeviceConfig> = serde_json::from_slice(&text)
        .with_context(|| format!("{} is damaged: look which devices nothing names, then remove it", path.display()))?;
    let is_named =
        |device: &DeviceConfig| config.nodes.iter().any(|n| n.devices.iter().any(|d| d.device == device.device));
    let (named, unnamed): (Vec<_>, Vec<_>) = begun.into_iter().partition(is_named);
    for device in &unnamed {
        let what = dir.device_path(device);
        discard(dir, device).with_context(|| format!("cannot remove {}, which was not completed", what.display()))?;
    }
    Ok(named)
}

/// Ends the node's process in good order, or by force if that takes too long.
pub(super) fn stop(dir: &GridDir, node: u32) -> Result<()> {
    let role = Role::Node(node);
    if let Some(units) = Units::of(dir) {
        units.stop(role)?;
    } else if role.find(dir).is_some() {
        role.signal(dir, Signal::CONT)?;
        role.signal(dir, Signal::TERM)?;
        if !role.wait_gone(dir, NODE_DOWN_MAX) {
            role.signal(dir, Signal::KILL)?;
            role.wait_gone(dir, NODE_DOWN_MAX);
        }
    }
    role.forget(dir);
    Ok(())
}

fn start(dir: &GridDir, config: &GridConfig, node: u32) -> Result<()> {
    check_startable(dir, config, Role::Node(node))?;
    Role::Node(node).start(dir)?;
    wait_until_serves(dir, config, node)
}

pub(super) fn restart(dir: &GridDir, config: &GridConfig, node: u32) -> Result<()> {
    stop(dir, node)?;
    start(dir, config, node)
}

/// Restarts a node, where `holdfast node stop` would stop it.
fn restart_checked(dir: &GridDir, config: &GridConfig, node: u32) -> Result<()> {
    client::done(dir, &Request::CheckStop { node }).with_context(|| {
        format!("it can't be restarted now; `holdfast node restart {node}` does it as soon as that may be")
    })?;
    restart(dir, config, node)
}
