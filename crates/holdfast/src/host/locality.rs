//! Nodes of this host's own machine, which its volumes read from first: what lies there costs no network.

use super::{Shell, start};
use crate::grid::layout::NodeConfig;
use holdfast_base::NodeId;
use holdfast_runtime::reactor::{Io, ListenError};
use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

/// Addresses of this machine, as its nodes have them.
pub(super) struct Local(BTreeSet<IpAddr>);

impl Local {
    /// `own` are the nodes that `grid.json` of this machine names.
    pub(super) fn of(own: &[NodeConfig]) -> Local {
        Local(own.iter().map(|node| node.address.ip()).collect())
    }
}

impl Shell {
    /// This machine has this address, too: its nodes are there from here on, and other hosts are to come there if they may.
    /// Where it had another, that goes on to be listened on.
    pub(super) fn take_address(&mut self, ip: IpAddr, io: &mut Io) -> Result<Vec<SocketAddr>, ListenError> {
        self.local.0.insert(ip);
        if self.host_listeners.is_empty() {
            return Ok(Vec::new());
        }
        let (listener, bound) = start::listen_at(io, ip, self.places)?;
        self.host_listeners.push(listener);
        Ok(vec![bound])
    }

    /// Of all nodes, those on this machine.
    pub(super) fn local_of(&self, nodes: &[(NodeId, SocketAddr)]) -> BTreeSet<NodeId> {
        let is_local = |(_, address): &&(NodeId, SocketAddr)| self.local.0.contains(&address.ip());
        nodes.iter().filter(is_local).map(|(node, _)| *node).collect()
    }
}
