//! A machine becomes a part of a grid that others have made.
//!
//! Faults: numbers of nodes are taken in the metadata store before devices are made; where that fails they are given back.
//! A crash in between leaves numbers that no node has: they show as nodes that are down, and the name stays taken, since it
//! might be that of a machine that is merely off; another attempt needs another name.

use super::layout::{GridConfig, GridDir, MetaConfig, NodeConfig};
use crate::host::catalog::Catalog;
use crate::host::{meta, presence};
use crate::logger;
use anyhow::{Result, bail};

pub struct Joining {
    catalog: Catalog,
}

impl Joining {
    /// The configuration names the grid, its store, and this machine's host.
    pub fn begin(dir: &GridDir, config: &GridConfig) -> Result<Joining> {
        if config.meta == MetaConfig::Embedded {
            bail!("only a grid whose metadata are in etcd has room for other machines; name its members with --etcd");
        }
        let meta = meta::open(dir, config)?;
        let name = &config.host.name;
        let catalog = Catalog::new(meta.clone(), config.grid_id()?, name);
        if presence::live_hosts(&meta)?.contains(name) || catalog.has_machine(name)? {
            bail!("the grid has a machine named {name} already; choose another --name");
        }
        Ok(Joining { catalog })
    }

    /// Takes a number for a node.
    pub fn add_node(&self, node_of: impl Fn(u32) -> NodeConfig) -> Result<NodeConfig> {
        self.catalog.add_node(node_of)
    }

    /// Gives all numbers back.
    pub fn undo(self) {
        if let Err(error) = self.catalog.set_own_nodes(&[]) {
            logger::warn(format_args!("numbers of nodes stay taken: {error:#}"));
        }
    }
}
