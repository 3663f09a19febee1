//! Why a volume of a run is slow: the sentence that `holdfast why slow` would print, of what the simulated machines tell.
//!
//! Role: what the shell of a host knows of links and devices is made here of the world; stages, neighbours, suspects and the
//! sentence are what the real machines say.

use crate::neighbours::Neighbours;
use holdfast_api::{LinkState, NodeInfo, SlowInfo};
use holdfast_host::{Host, Kind};
use holdfast_verdict::{Facts, Verdict, told};

impl Neighbours {
    /// What is said of the requests of one kind; `None` where there were none.
    pub fn why(&self, volume: usize, kind: Kind) -> Option<Verdict> {
        let (host, name) = self.home_of(volume);
        let slow = self.slow(volume)?;
        let (found, head) = host.find(&name)?;
        let limit = found.id_of(head).and_then(|id| host.limit_of(id));
        let nodes = self.nodes_as_told(host);
        let writes = kind == Kind::Write;
        holdfast_verdict::of(Facts { name: &name, limit, filters: &[], slow: &slow, nodes: &nodes, writes })
    }

    /// What the host tells of a volume that it serves.
    pub fn slow(&self, volume: usize) -> Option<SlowInfo> {
        let (host, name) = self.home_of(volume);
        let mut slow = told::slow_of(host, self.world.now(), &name)?;
        slow.others = told::others(told::loads(host, self.world.now()), &name);
        Some(slow)
    }

    pub(crate) fn nodes_as_told(&self, host: &Host) -> Vec<NodeInfo> {
        let (now, slow) = (self.world.now(), host.slow_devices());
        let suspects: Vec<_> = host.volumes().flat_map(|volume| volume.controller().status().suspect_nodes).collect();
        let node = |node: &crate::node::NodeProc| NodeInfo {
            id: node.id.0,
            address: String::new(),
            link: if node.is_up() { LinkState::Up } else { LinkState::Down },
            suspect: suspects.contains(&node.id),
            cut: false,
            silent_ms: 0,
            trouble: None,
            wire: None,
            reactors: None,
            passed_on: None,
            devices: node
                .stats(now)
                .iter()
                .map(|stat| {
                    let slow = slow.get(&stat.device).map(|(since, bypassed)| (now.since(*since), *bypassed));
                    told::device_of(host, stat, None, slow)
                })
                .collect(),
            machine: None,
            machine_gone: false,
            configured: Vec::new(),
        };
        self.world.nodes.iter().map(node).collect()
    }
}
