//! What of a run is not well, as `holdfast status` would say it.
//!
//! Role: what the shell knows of processes and machines is made here of the world; what hosts say of their volumes, and the
//! findings, are what the real machines say.

use crate::neighbours::Neighbours;
use holdfast_api::{GridStatus, HostHealth, HostState, HostView, NodeInfo, NodeView, VolumeInfo};
use holdfast_base::Instant;
use holdfast_host::Host;
use holdfast_verdict::findings::health_of;
use holdfast_verdict::volumes::info_of;

impl Neighbours {
    /// The grid as one host has it, by what the other hosts, or reactors, say of themselves.
    pub fn status(&self, asked: usize) -> GridStatus {
        let others = (0..self.reactors())
            .filter(|other| *other != asked)
            .map(|other| HostHealth { host: format!("host{other}"), ..health_of(&self.infos(self.host(other))) });
        GridStatus {
            host: HostView { state: HostState::Up, ..HostView::default() },
            clock_ms: self.world.now().since(Instant::ZERO).as_millis() as u64,
            nodes: self.nodes_as_told(self.host(asked)).into_iter().map(view).collect(),
            volumes: self.infos(self.host(asked)),
            other_hosts: others.collect(),
            ..GridStatus::default()
        }
    }

    fn infos(&self, host: &Host) -> Vec<VolumeInfo> {
        let now = self.world.now();
        host.heads().map(|(name, volume, head)| info_of(now, volume, name, head, |_| Vec::new())).collect()
    }
}

fn view(node: NodeInfo) -> NodeView {
    NodeView {
        id: node.id,
        state: node.state(),
        address: node.address,
        pid: None,
        cpu_ms: 0,
        resident_bytes: 0,
        trouble: node.trouble,
        wire: node.wire,
        reactors: node.reactors,
        passed_on: node.passed_on,
        devices: node.devices,
        machine: node.machine,
        machine_gone: node.machine_gone,
        is_own: false,
        configured: node.configured,
    }
}
