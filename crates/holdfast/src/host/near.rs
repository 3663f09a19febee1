//! Nodes of this host's own machine, which its volumes read from first: what lies there costs no network.

use super::Host;
use crate::grid::layout::NodeConfig;
use holdfast_base::{Instant, NodeId};
use holdfast_runtime::reactor::{Io, ListenError};
use holdfast_volume::Event as VolumeEvent;
use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

pub(super) struct Near {
    /// Addresses of this machine, as its nodes have them.
    own: BTreeSet<IpAddr>,
    pub(super) nodes: BTreeSet<NodeId>,
}

impl Near {
    /// `own` are the nodes that `grid.json` of this machine names.
    pub(super) fn of(own: &[NodeConfig]) -> Near {
        let nodes = own.iter().map(|node| NodeId(node.id)).collect();
        Near { own: own.iter().map(|node| node.address.ip()).collect(), nodes }
    }
}

impl Host {
    /// This machine has this address, too: its nodes are there from here on, and other hosts are to come there if they may.
    /// Where it had another, that goes on to be listened on.
    pub(super) fn take_address(&mut self, ip: IpAddr, io: &mut Io) -> Result<Option<SocketAddr>, ListenError> {
        self.near.own.insert(ip);
        if self.host_listeners.is_empty() {
            return Ok(None);
        }
        let (listener, bound) = io.listen_tcp(SocketAddr::new(ip, 0))?;
        self.host_listeners.push(listener);
        Ok(Some(bound))
    }

    /// The grid has these nodes from here on.
    pub(super) fn look_who_is_near(&mut self, now: Instant, nodes: &[(NodeId, SocketAddr)], io: &mut Io) {
        let is_near = |(_, address): &&(NodeId, SocketAddr)| self.near.own.contains(&address.ip());
        self.near.nodes = nodes.iter().filter(is_near).map(|(node, _)| *node).collect();
        for at in self.volumes.table.tokens() {
            self.drive(now, at, VolumeEvent::Near { nodes: self.near.nodes.clone() }, io);
        }
    }
}
