//! A grid that grows and shrinks in the middle of a story.

use crate::host::Greeting;
use crate::scenario::Cluster;
use crate::world::{Machine, World};
use holdfast_base::{DeviceId, InstanceId, NodeId};
use holdfast_store as store;
use std::collections::BTreeSet;
use std::time::Duration;

impl<M: Machine> World<M> {
    /// Starts a node that hosts have not heard of, and tells them.
    pub fn join_node(&mut self, config: store::NodeConfig, sizing: store::JournalSizing, disk_sizes: &[u64]) -> usize {
        let node = self.add_node(config, sizing, disk_sizes);
        self.start_node(node);
        for host in 0..self.hosts.len() {
            self.hosts[host].nodes.push(Greeting::default());
            if self.hosts[host].is_up() {
                self.connect_later(host, node, Duration::from_micros(100));
            }
        }
        node
    }
}

impl Cluster {
    /// A node joins the grid, with so many disks; returns its number.
    pub fn add_node(&mut self, disks: usize) -> usize {
        let (sizing, disk_bytes) = (self.run.plan.sizing, self.run.plan.disk_bytes);
        let world = &mut self.run.world;
        let id = NodeId(world.nodes.len() as u32 + 1);
        let config = store::NodeConfig::new(world.grid, id, InstanceId(0));
        let node = world.join_node(config, sizing, &vec![disk_bytes; disks]);
        self.pass_ms(50);
        node
    }

    /// Everything on these nodes shall go elsewhere; waits until nothing is left there.
    pub fn empty_nodes(&mut self, nodes: &[usize]) {
        let now = self.now();
        let devices = nodes.iter().flat_map(|node| self.world().nodes[*node].stats(now));
        let devices: BTreeSet<DeviceId> = devices.map(|device| device.device).collect();
        self.run.drain_devices(devices);
        self.until("nothing is left on the nodes", |s| {
            let left = s.status().left_to_drain;
            !left.is_empty() && left.iter().all(|(_, left)| *left == 0)
        });
    }
}
