//! Copies of the grid's records on its devices: written by one host now and then, and read when the metadata store is lost.
//!
//! Each device has the last [`KEPT`] copies, each whole or none; their numbers rise. A copy is a [`MetadataFile`]. Roots in it are
//! as old as it is: the newest are on the legs of each volume's log.
//!
//! [`MetadataFile`]: super::metadata::MetadataFile

use super::layout::NodeConfig;
use super::node_client::NodeClient;
use anyhow::{Context, Result};
use holdfast_base::{DeviceId, GridId, NodeId, ShardId};
use holdfast_format::copy;
use holdfast_runtime::tls::link::HostTls;
use std::collections::BTreeMap;
use std::net::SocketAddr;

/// Copies of one device.
pub const KEPT: usize = 10;

/// How nodes are reached, and as whom.
#[derive(Clone)]
pub struct Way {
    pub grid: GridId,
    pub host: String,
    pub tls: Option<HostTls>,
}

impl Way {
    pub fn connect(&self, node: u32, address: SocketAddr) -> Result<NodeClient> {
        NodeClient::connect(self.grid, &self.host, self.tls.as_ref(), (NodeId(node), address))
            .with_context(|| format!("node {node} at {address}"))
    }
}

/// The copies that a device has, by their numbers, each with its parts in order.
fn listed(client: &mut NodeClient, device: DeviceId) -> Result<BTreeMap<u64, Vec<ShardId>>> {
    let mut copies: BTreeMap<u64, Vec<ShardId>> = BTreeMap::new();
    for shard in client.record_shards(device)? {
        copies.entry(shard.segment.epoch.0).or_default().push(shard);
    }
    Ok(copies)
}

/// Where a copy was put, and where not.
#[derive(Debug, Default)]
pub struct Written {
    pub devices: usize,
    pub failed: Vec<String>,
}

/// Puts a copy on every device of these nodes, and lets go of the oldest; of all, where the newest of them is one that must not
/// stay.
pub fn write(way: &Way, nodes: &[NodeConfig], bytes: &[u8], must_go: impl Fn(&[u8]) -> bool) -> Written {
    let mut written = Written::default();
    let parts = copy::split(bytes);
    let mut clients: Vec<NodeClient> = Vec::new();
    for node in nodes {
        match way.connect(node.id, node.address) {
            Ok(client) => clients.push(client),
            Err(error) => written.failed.push(format!("{error:#}")),
        }
    }
    // One number for all: above what any of them has.
    let mut held = Vec::new();
    for (at, client) in clients.iter_mut().enumerate() {
        for device in client.serving() {
            match listed(client, device) {
                Ok(copies) => held.push((at, device, copies)),
                Err(error) => written.failed.push(format!("{error:#}")),
            }
        }
    }
    let newest = held.iter().filter_map(|(.., copies)| copies.keys().next_back()).max().copied().unwrap_or(0);
    for (at, device, copies) in held {
        let client = &mut clients[at];
        let last =
            copies.iter().next_back().and_then(|(number, shards)| read(client, device, *number, shards.len()).ok());
        let kept = if last.is_some_and(|last| must_go(&last)) { 1 } else { KEPT };
        match put(client, (way.grid, device), newest + 1, &parts, (copies, kept)) {
            Ok(()) => written.devices += 1,
            Err(error) => written.failed.push(format!("{error:#}")),
        }
    }
    written
}

fn put(
    client: &mut NodeClient,
    (grid, device): (GridId, DeviceId),
    number: u64,
    parts: &[Vec<u8>],
    (held, kept): (BTreeMap<u64, Vec<ShardId>>, usize),
) -> Result<()> {
    for (at, part) in parts.iter().enumerate().rev() {
        let shard = copy::records_part_id(number, at as u64);
        client.put_record_part(device, grid, shard, part).with_context(|| format!("device {device}"))?;
    }
    let gone = (held.len() + 1).saturating_sub(kept);
    for (_, shards) in held.into_iter().take(gone) {
        client.delete_record_parts(device, shards).with_context(|| format!("device {device}"))?;
    }
    Ok(())
}

/// All copies on a node that can be read, by their numbers.
pub fn all(client: &mut NodeClient) -> Result<BTreeMap<u64, Vec<u8>>> {
    let mut all = BTreeMap::new();
    for device in client.serving() {
        for (number, shards) in listed(client, device)? {
            if !all.contains_key(&number)
                && let Ok(bytes) = read(client, device, number, shards.len())
            {
                all.insert(number, bytes);
            }
        }
    }
    Ok(all)
}

fn read(client: &mut NodeClient, device: DeviceId, number: u64, count: usize) -> Result<Vec<u8>> {
    let parts: Vec<Vec<u8>> = (0..count as u64)
        .map(|part| client.read_copy(device, copy::records_part_id(number, part)))
        .collect::<Result<_>>()?;
    copy::join(&parts).map_err(|error| anyhow::anyhow!("copy {number} on device {device}: {error}"))
}
