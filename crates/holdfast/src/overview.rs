//! A grid as one machine has it: what its host tells, and what can be seen of processes and certificates here.

use crate::client;
use crate::config::HostSettings;
use crate::grid::certs::{Certificates, etcd_warning, roles, server_warning};
use crate::grid::layout::{GridConfig, GridDir, MetaConfig};
use crate::grid::processes::Role;
use crate::resources;
use anyhow::Result;
use holdfast_api::{
    GridStatus, Health, HostState, HostStatus, HostView, MetadataView, NodeInfo, NodeState, NodeView, PackingInfo,
};
use holdfast_runtime::clock;
use holdfast_runtime::process::{self, ProcessStats};
use holdfast_verdict::findings;

/// From the host's memory and from /proc alone: nothing here waits for a node.
pub fn gather(dir: &GridDir) -> Result<GridStatus> {
    if let Some(remote) = dir.remote() {
        return Ok(remote.health()?.status);
    }
    gather_as(dir, || client::status(dir))
}

/// The same, with what is not well.
pub fn health(dir: &GridDir) -> Result<Health> {
    if let Some(remote) = dir.remote() {
        return remote.health();
    }
    let status = gather(dir)?;
    Ok(Health { findings: findings::of(&status), status })
}

/// The same, with what the host tells of itself.
pub fn gather_as(dir: &GridDir, tell: impl FnOnce() -> Result<HostStatus>) -> Result<GridStatus> {
    let config: GridConfig = dir.load()?;
    let process = Role::Host.find(dir);
    let told = process.filter(|p| !p.stopped).map(|_| tell());
    let (status, trouble) = match told {
        Some(Ok(status)) => (Some(status), None),
        Some(Err(error)) => (None, Some(error.to_string())),
        None => (None, None),
    };
    let waits_for = Role::Host.waits_for(dir).filter(|_| status.is_none());
    let removed = dir.removed();
    let state = match (&process, &status) {
        (None, _) if removed.is_some() => HostState::Removed,
        (None, _) => HostState::Down,
        (Some(process), None) if waits_for.is_some() && !process.stopped => HostState::Starting,
        (Some(_), Some(_)) => HostState::Up,
        (Some(_), None) => HostState::Hung,
    };
    let cost = process.map_or_else(ProcessStats::default, |p| process::stats(p.pid).unwrap_or_default());
    let host = HostView {
        state,
        pid: process.map(|p| p.pid),
        cpu_ms: cost.cpu().as_millis() as u64,
        packing_cpu_ms: status.as_ref().map_or(0, |status| status.packing_cpu_ms),
        packing: status.as_ref().map_or_else(PackingInfo::default, |status| status.packing.clone()),
        resident_bytes: cost.resident_bytes,
        longest_turn: status.as_ref().and_then(|status| status.longest_turn.clone()),
        crossings: status.as_ref().map_or(0, |status| status.crossings),
        trouble: removed.or(waits_for.map(|why| format!("it waits for the grid's metadata: {why}"))).or(trouble),
    };
    let status = status.unwrap_or_default();
    let own = config.nodes.iter().map(|node| {
        let told = status.nodes.iter().find(|n| n.id == node.id);
        let view = node_view(Some(dir), node.id, node.address.to_string(), told);
        NodeView { configured: node.devices.iter().map(resources::configured).collect(), ..view }
    });
    let elsewhere = status.nodes.iter().filter(|told| config.nodes.iter().all(|own| own.id != told.id));
    let elsewhere = elsewhere.map(|told| node_view(None, told.id, told.address.clone(), Some(told)));
    let mut nodes: Vec<NodeView> = own.chain(elsewhere).collect();
    nodes.sort_by_key(|node| node.id);
    let root = dir.root().display().to_string();
    let metadata = MetadataView { store: config.meta.to_string(), trouble: status.metadata_trouble };
    Ok(GridStatus {
        metadata,
        tls: config.tls,
        certificate_warnings: certificate_warnings(dir, &config)?,
        nbd_warning: nbd_warning(dir, &config),
        grid: config.grid,
        dir: root,
        host,
        clock_ms: clock::wall().as_millis() as u64,
        alert_troubles: status.alert_troubles,
        days_to_full: status.days_to_full,
        nodes,
        volumes: status.volumes,
        deleting: status.deleting,
        trash: status.trash,
        unreadable: status.unreadable,
        found: status.found,
        other_hosts: status.other_hosts,
        hosts_gone: status.hosts_gone,
        announced: status.announced,
    })
}

/// What is to be done about certificates of this machine.
pub fn certificate_warnings(dir: &GridDir, config: &GridConfig) -> Result<Vec<String>> {
    let certificates = config.tls.then(|| config.grid_id().map(|grid| Certificates::of(dir, grid))).transpose()?;
    let warnings = certificates.as_ref().map(|certificates| certificates.warnings(&roles(config)));
    let settings = dir.settings(config).ok();
    let servers = settings.iter().flat_map(HostSettings::server_dirs);
    let servers = servers.filter_map(|server| server_warning(server, certificates.as_ref()));
    let etcd = match &config.meta {
        MetaConfig::Etcd(etcd) => etcd.tls_dir.as_deref().and_then(etcd_warning),
        MetaConfig::Embedded => None,
    };
    Ok(warnings.unwrap_or_default().into_iter().chain(servers).chain(etcd).collect())
}

/// What is to be known of this machine's NBD over TCP.
pub fn nbd_warning(dir: &GridDir, config: &GridConfig) -> Option<String> {
    dir.settings(config).ok()?.exposure().text()
}

/// `dir` where the node is one of this machine's.
fn node_view(dir: Option<&GridDir>, id: u32, address: String, told: Option<&NodeInfo>) -> NodeView {
    let process = dir.and_then(|dir| Role::Node(id).find(dir));
    let state = match (&process, told) {
        (None, _) if dir.is_some() => NodeState::Down,
        (None, None) => NodeState::Down,
        (Some(p), _) if p.stopped => NodeState::Hung,
        (_, Some(told)) => told.state(),
        (Some(_), None) => NodeState::Up,
    };
    let cost = process.map_or_else(ProcessStats::default, |p| process::stats(p.pid).unwrap_or_default());
    NodeView {
        id,
        state,
        address,
        pid: process.map(|p| p.pid),
        cpu_ms: cost.cpu().as_millis() as u64,
        resident_bytes: cost.resident_bytes,
        trouble: told.and_then(|n| n.trouble.clone()),
        wire: told.and_then(|n| n.wire),
        reactors: told.and_then(|n| n.reactors),
        passed_on: told.and_then(|n| n.passed_on),
        devices: told.map_or_else(Vec::new, |n| n.devices.clone()),
        machine: told.and_then(|n| n.machine.clone()),
        machine_gone: told.is_some_and(|n| n.machine_gone),
        is_own: dir.is_some(),
        configured: told.map_or_else(Vec::new, |n| n.configured.clone()),
    }
}
