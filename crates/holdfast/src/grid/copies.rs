//! Copies of the grid's records on its devices: written by one host now and then, and by one that has just made a
//! volume's key; read when the metadata store is lost.
//!
//! Each device has the last [`KEPT`] copies, each whole or none; their numbers rise, and are given by the store. A copy
//! is a [`MetadataFile`]. Roots in it are as old as it is: the newest are on the legs of each volume's log.
//!
//! [`MetadataFile`]: holdfast_format::meta::MetadataFile

use super::layout::NodeConfig;
use super::node_client::NodeClient;
use anyhow::{Context, Result};
use holdfast_base::{DeviceId, GridId, NodeId, ShardId};
use holdfast_format::copy;
use holdfast_format::geometry::Layout;
use holdfast_runtime::tls::link::HostTls;
use std::collections::{BTreeMap, BTreeSet};
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
fn listed(client: &mut NodeClient, device: DeviceId) -> Result<Copies> {
    let mut copies = Copies::new();
    for shard in client.record_shards(device)? {
        copies.entry(shard.segment.epoch.0).or_default().push(shard);
    }
    Ok(copies)
}

/// The nodes that answer, each with its devices and the copies that these have.
pub struct Places {
    way: Way,
    found: Vec<Found>,
    away: Vec<String>,
    failed: Vec<String>,
}

type Copies = BTreeMap<u64, Vec<ShardId>>;

struct Found {
    client: NodeClient,
    devices: Vec<(DeviceId, Copies)>,
}

/// A copy to be put everywhere. Its number was given to nobody else, before what it holds was read: of two copies the
/// one with the higher number has all that was there when the other one's number was given.
pub struct Copy<'a> {
    pub number: u64,
    pub bytes: &'a [u8],
    /// Whether older ones must not stay, the newest of them being this.
    pub must_go: &'a (dyn Fn(&[u8]) -> bool + Sync),
}

/// Where a copy was put, and where not.
#[derive(Debug, Default)]
pub struct Written {
    pub on: BTreeSet<(NodeId, DeviceId)>,
    /// Nodes that did not answer.
    pub away: Vec<String>,
    /// Devices that took none although their nodes answer.
    pub failed: Vec<String>,
    /// How many of these have a newer one: somebody else writes at the same time.
    pub outdone: usize,
}

impl Written {
    pub fn is_everywhere(&self) -> bool {
        self.away.is_empty() && self.failed.is_empty()
    }

    /// Whether losing as much as the layout bears leaves one; or whether it is on all that there is just now.
    pub fn bears(&self, layout: Layout) -> bool {
        self.domains(layout) > usize::from(layout.failures()) || self.failed.is_empty() && !self.on.is_empty()
    }

    /// In so many of the layout's fault domains it is.
    pub fn domains(&self, layout: Layout) -> usize {
        match layout.is_on_devices() {
            true => self.on.len(),
            false => self.on.iter().map(|(node, _)| node).collect::<BTreeSet<_>>().len(),
        }
    }
}

/// Does the same with all at once: one that hangs costs its time, and not that of the others.
fn with_each<T: Send, R: Send>(all: Vec<T>, work: impl Fn(T) -> R + Sync) -> Vec<R> {
    let work = &work;
    std::thread::scope(|scope| {
        let begun: Vec<_> = all.into_iter().map(|one| scope.spawn(move || work(one))).collect();
        begun.into_iter().map(|one| one.join().expect("it does not panic")).collect()
    })
}

impl Places {
    pub fn look(way: Way, nodes: &[NodeConfig]) -> Places {
        let ask = |node: &NodeConfig| {
            let mut client = way.connect(node.id, node.address)?;
            let listed = client.serving().into_iter().map(|device| (device, listed(&mut client, device))).collect();
            anyhow::Ok((client, listed))
        };
        let (mut found, mut away, mut failed) = (Vec::new(), Vec::new(), Vec::new());
        for answer in with_each(nodes.iter().collect(), ask) {
            let (client, listed): (_, Vec<(DeviceId, Result<Copies>)>) = match answer {
                Ok(answer) => answer,
                Err(error) => {
                    away.push(format!("{error:#}"));
                    continue;
                }
            };
            let mut devices = Vec::new();
            for (device, copies) in listed {
                match copies {
                    Ok(copies) => devices.push((device, copies)),
                    Err(error) => failed.push(format!("{error:#}")),
                }
            }
            found.push(Found { client, devices });
        }
        Places { way, found, away, failed }
    }

    /// The highest number that any of them has.
    pub fn newest(&self) -> u64 {
        let copies = self.found.iter().flat_map(|found| &found.devices);
        copies.filter_map(|(_, copies)| copies.keys().next_back()).max().copied().unwrap_or(0)
    }

    /// Puts a copy on every device, and lets go of the oldest; of all older ones where the newest of them must not
    /// stay.
    pub fn write(self, copy: &Copy) -> Written {
        let Places { way, found, away, failed } = self;
        let mut written = Written { away, failed, ..Written::default() };
        let parts = copy::split(copy.bytes);
        let work = |Found { mut client, devices }: Found| {
            let mut put_on = |(device, copies)| {
                let done = put(&mut client, (way.grid, device), (copy, &parts), copies);
                ((client.node, device), done)
            };
            devices.into_iter().map(&mut put_on).collect::<Vec<_>>()
        };
        for (place, done) in with_each(found, work).into_iter().flatten() {
            match done {
                Ok(Put::Done) => drop(written.on.insert(place)),
                Ok(Put::Outdone) => {
                    written.outdone += 1;
                    written.failed.push(format!("device {} has a newer copy of the metadata by now", place.1));
                }
                Err(error) => written.failed.push(format!("{error:#}")),
            }
        }
        written
    }
}

enum Put {
    Done,
    /// It has a newer one.
    Outdone,
}

/// A device that has a newer copy takes no older one: where a volume's key was wrapped anew in between, the former
/// wrapping would be back.
fn put(
    client: &mut NodeClient,
    (grid, device): (GridId, DeviceId),
    (copy, parts): (&Copy, &[Vec<u8>]),
    held: Copies,
) -> Result<Put> {
    let of = || format!("device {device}");
    if held.keys().next_back().is_some_and(|newest| *newest > copy.number) {
        return Ok(Put::Outdone);
    }
    let last = held.iter().next_back();
    let last = last.and_then(|(number, shards)| read(client, device, *number, shards.len()).ok());
    let kept = if last.is_some_and(|last| (copy.must_go)(&last)) { 1 } else { KEPT };
    let ids: Vec<ShardId> = (0..parts.len() as u64).map(|at| copy::records_part_id(copy.number, at)).collect();
    for (shard, part) in ids.iter().zip(parts).rev() {
        client.put_record_part(device, grid, *shard, part).with_context(of)?;
    }
    let newest = listed(client, device)?.keys().next_back().copied();
    if newest.is_some_and(|newest| newest > copy.number) {
        client.delete_record_parts(device, ids).with_context(of)?;
        return Ok(Put::Outdone);
    }
    let gone = (held.len() + 1).saturating_sub(kept);
    for (_, shards) in held.into_iter().take(gone) {
        client.delete_record_parts(device, shards).with_context(of)?;
    }
    Ok(Put::Done)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_bears_what_the_layout_bears_or_is_on_all_that_there_is() {
        let on = |places: &[(u32, u128)]| {
            let on = places.iter().map(|(node, device)| (NodeId(*node), DeviceId(*device))).collect();
            Written { on, away: vec!["node 9".to_string()], failed: vec!["device 9".to_string()], outdone: 0 }
        };
        let bears = |written: &Written, layout: &str| written.bears(layout.parse().unwrap());
        let (one_node, two_nodes) = (on(&[(1, 1), (1, 2)]), on(&[(1, 1), (2, 3)]));
        for layout in ["mirror:2", "parity:2+1", "nested-mirror"] {
            assert!(!bears(&one_node, layout) && bears(&two_nodes, layout), "{layout}");
        }
        assert!(bears(&one_node, "mirror:2@device") && !bears(&two_nodes, "mirror:3"));
        let of_all = Written { failed: Vec::new(), ..one_node };
        assert!(bears(&of_all, "mirror:2") && !of_all.is_everywhere(), "the others are away");
        assert!(!bears(&Written { failed: Vec::new(), ..on(&[]) }, "mirror:2"), "all are");
    }
}
