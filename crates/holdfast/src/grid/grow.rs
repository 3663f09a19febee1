//! Nodes and devices of a local grid that come and go while it serves.
//!
//! Faults: a device is made before grid.json names it, and grid.json forgets it before its file is removed; a crash in
//! between leaves a file that nothing names. Nothing is removed that the host has not found empty.

use super::asking::Asking;
use super::certs::Certificates;
use super::layout::{DeviceConfig, GridConfig, GridDir, NodeConfig};
use super::processes::{Role, wait};
use super::token::JoinToken;
use super::units::{self, Units};
use super::{
    DEVICE_SIZE_MIN, DEVICES_MAX, Lock, NODE_DOWN_MAX, NODES_MAX, UP_MAX, check_port, check_space, check_startable,
    ownership, wait_until_serves,
};
use crate::client;
use crate::node_shell::fresh_device_id;
use crate::protocol::{LinkState, Request};
use crate::size::Size;
use anyhow::{Context, Result, bail};
use holdfast_base::NodeId;
use holdfast_runtime::device::create_file;
use holdfast_runtime::pki;
use rustix::process::Signal;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Adds a device to a node, and restarts that.
pub fn add_device(dir: &GridDir, node: u32, size: Option<Size>) -> Result<DeviceConfig> {
    let _lock = Lock::take(dir)?;
    let mut config = dir.load()?;
    let at = config.node(node)?;
    if at.devices.len() as u32 >= DEVICES_MAX {
        bail!("node {node} has {DEVICES_MAX} devices, which is the bound");
    }
    let size = size.or_else(|| at.devices.first().map(|d| Size(d.size_bytes))).unwrap_or(super::DEVICE_SIZE_DEFAULT);
    check_size(size)?;
    check_space(dir, 1, size)?;
    client::done(dir, &Request::CheckRemovable { devices: Vec::new(), force: false })
        .with_context(|| format!("node {node} is not restarted now"))?;
    let device = make_device(dir, &config, node, size)?;
    let entry = config.nodes.iter_mut().find(|n| n.id == node).expect("just seen");
    entry.devices.push(device.clone());
    dir.save(&config)?;
    units::refresh(dir, &config)?;
    restart(dir, &config, node)?;
    client::done(dir, &Request::GridReload)?;
    wait_until_used(dir, &config, node)?;
    Ok(device)
}

/// Adds a node and starts it; with a token, where the grid has TLS and this machine can't sign.
pub fn add_node(
    dir: &GridDir,
    devices: Option<u32>,
    size: Option<Size>,
    token: Option<&JoinToken>,
) -> Result<NodeConfig> {
    let _lock = Lock::take(dir)?;
    let mut config = dir.load()?;
    let last = config.nodes.iter().max_by_key(|n| n.id).context("a grid has nodes")?.clone();
    let count = devices.unwrap_or(last.devices.len() as u32);
    if config.nodes.len() as u32 >= NODES_MAX || !(1..=DEVICES_MAX).contains(&count) {
        bail!("a local grid has 1 to {NODES_MAX} nodes with 1 to {DEVICES_MAX} devices each");
    }
    let size = size.or_else(|| last.devices.first().map(|d| Size(d.size_bytes))).unwrap_or(super::DEVICE_SIZE_DEFAULT);
    check_size(size)?;
    check_space(dir, u64::from(count), size)?;
    // Nodes of other machines have numbers, too.
    let told = client::status(dir)?.nodes;
    let id = told.iter().map(|node| node.id).fold(last.id, u32::max) + 1;
    let ports = last.address.port().saturating_add(1)..u16::MAX;
    let mut addresses = ports.map(|port| SocketAddr::new(last.address.ip(), port));
    let is_free =
        |address: &SocketAddr| config.nodes.iter().all(|n| n.address != *address) && check_port(*address).is_ok();
    let address = addresses.find(is_free).context("no free port was found for the node")?;
    if config.tls {
        obtain(dir, &config, &[pki::Role::Node(NodeId(id))], token)?;
    }
    let devices = (0..count).map(|_| make_device(dir, &config, id, size)).collect::<Result<_>>()?;
    let node = NodeConfig { id, address, devices };
    config.nodes.push(node.clone());
    dir.save(&config)?;
    units::refresh(dir, &config)?;
    check_startable(dir, &config, Role::Node(id))?;
    Role::Node(id).start(dir, &[])?;
    wait_until_serves(dir, &config, id)?;
    client::done(dir, &Request::GridReload)?;
    wait_until_used(dir, &config, id)?;
    Ok(node)
}

/// Gets new certificates: signed here where that can be done, with a token elsewhere.
pub fn obtain(dir: &GridDir, config: &GridConfig, roles: &[pki::Role], token: Option<&JoinToken>) -> Result<()> {
    let certificates = Certificates::of(dir, config.grid_id()?);
    let Some(token) = token else {
        return certificates.sign(roles, &config.host.name);
    };
    if token.grid.to_string() != config.grid {
        bail!("the token is for grid {}, and this machine is of grid {}; make one there", token.grid, config.grid);
    }
    let meta = crate::host::meta::open(dir, config)?;
    Asking::begin(meta, token, &config.host.name)?.obtain(&certificates, roles)
}

/// Makes new keys and certificates for all of this machine.
pub fn rotate(dir: &GridDir, config: &GridConfig, roles: &[pki::Role], token: Option<&JoinToken>) -> Result<()> {
    let _lock = Lock::take(dir)?;
    obtain(dir, config, roles, token)
}

/// Removes devices of one node that were drained, and the node with its last one. Returns the node.
pub fn remove_devices(dir: &GridDir, devices: &[String], force: bool) -> Result<u32> {
    let _lock = Lock::take(dir)?;
    let mut config = dir.load()?;
    let holds = |node: &NodeConfig| node.devices.iter().any(|d| devices.contains(&d.device));
    let node =
        config.nodes.iter().find(|n| holds(n)).context("this grid has no such device; see `holdfast device list`")?;
    let id = node.id;
    let is_last_node = config.nodes.len() == 1 && node.devices.len() == devices.len();
    if is_last_node {
        bail!("the last node of a grid can't be removed; `holdfast grid down` stops the grid");
    }
    client::done(dir, &Request::CheckRemovable { devices: devices.to_vec(), force })?;
    let gone: Vec<PathBuf> = config
        .nodes
        .iter()
        .flat_map(|n| &n.devices)
        .filter(|d| devices.contains(&d.device))
        .map(|d| dir.device_path(d))
        .collect();
    for node in &mut config.nodes {
        node.devices.retain(|d| !devices.contains(&d.device));
    }
    config.nodes.retain(|n| !n.devices.is_empty());
    dir.save(&config)?;
    units::refresh(dir, &config)?;
    stop(dir, id)?;
    if config.nodes.iter().any(|n| n.id == id) {
        start(dir, &config, id)?;
    }
    client::done(dir, &Request::GridReload)?;
    if config.nodes.iter().any(|n| n.id == id) {
        wait_until_used(dir, &config, id)?;
    } else if config.tls {
        Certificates::of(dir, config.grid_id()?).forget(&pki::Role::Node(NodeId(id)));
    }
    for path in gone {
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(e)
                    .with_context(|| format!("{} is not a part of the grid any more, but stays", path.display()));
            }
            _ => {}
        }
    }
    Ok(id)
}

/// Until the host has all devices of the node in use, and no others.
fn wait_until_used(dir: &GridDir, config: &GridConfig, node: u32) -> Result<()> {
    let wanted: Vec<&String> = config.node(node)?.devices.iter().map(|d| &d.device).collect();
    let is_used = || {
        let status = client::status(dir).ok();
        let found = status.as_ref().and_then(|s| s.nodes.iter().find(|n| n.id == node));
        found.is_some_and(|n| {
            let serving = n.devices.iter().filter(|d| d.health == "serving");
            n.link == LinkState::Up && n.devices.len() == wanted.len() && serving.count() == wanted.len()
        })
    };
    if !wait(UP_MAX, is_used) {
        bail!("node {node} is restarted, and the host does not use all of its devices yet; see `holdfast device list`");
    }
    Ok(())
}

fn check_size(size: Size) -> Result<()> {
    if size < DEVICE_SIZE_MIN || !size.0.is_multiple_of(4096) {
        bail!("a device has at least {DEVICE_SIZE_MIN}, in whole blocks of 4 KiB; choose a larger size");
    }
    Ok(())
}

fn make_device(dir: &GridDir, config: &GridConfig, node: u32, size: Size) -> Result<DeviceConfig> {
    let name = |n: u32| PathBuf::from(format!("devices/node{node}-{n}.img"));
    let path = (0..).map(name).find(|path| !dir.root().join(path).exists()).expect("numbers don't end");
    let device = DeviceConfig { path, device: fresh_device_id().to_string(), size_bytes: size.0 };
    let full = dir.device_path(&device);
    create_file(&full, size.0, 0)?;
    ownership::format(&full, size.0, config.grid_id()?, NodeId(node), device.device.parse()?)?;
    Ok(device)
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
    Role::Node(node).start(dir, &[])?;
    wait_until_serves(dir, config, node)
}

fn restart(dir: &GridDir, config: &GridConfig, node: u32) -> Result<()> {
    stop(dir, node)?;
    start(dir, config, node)
}
