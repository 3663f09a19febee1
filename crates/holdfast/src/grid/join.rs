//! A machine becomes a part of a grid that others have made.
//!
//! Faults: numbers of nodes are taken in the metadata store before devices are made; where that fails they are given back.
//! A crash in between leaves numbers that no node has, and they show as nodes that are down. The same command, given
//! again in that directory, takes them for its nodes: it knows them by the devices ([`Begun`]). Elsewhere the name is
//! taken, since it might be that of a machine that is merely off.

use super::certs::Certificates;
use super::creating::Begun;
use super::join_client::JoinClient;
use super::layout::{GridConfig, GridDir, MetaConfig, NodeConfig};
use super::token::{Join, JoinToken};
use super::{address, authority};
use crate::host::catalog::Catalog;
use crate::host::{meta, presence};
use crate::logger;
use anyhow::{Context, Result};
use holdfast_api::{Code, refuse};
use holdfast_runtime::pki::Role;
use std::collections::BTreeSet;
use std::net::IpAddr;

/// A machine that is about to be one of the grid's.
pub struct Joining<'a> {
    catalog: Catalog,
    /// Numbers that a command that was cut short has taken.
    taken: BTreeSet<u32>,
    /// Where the grid has TLS.
    client: Option<JoinClient<'a>>,
}

impl<'a> Joining<'a> {
    /// The configuration names the grid, its store, and this machine's host.
    pub fn begin(
        dir: &GridDir,
        config: &GridConfig,
        (ip, begun): (IpAddr, &Begun),
        join: &'a Join,
    ) -> Result<Joining<'a>> {
        if config.meta == MetaConfig::Embedded {
            refuse!(
                Code::Invalid,
                "only a grid whose metadata are in etcd has room for other machines; name its members with --etcd"
            );
        }
        let access = join.token().and_then(JoinToken::access);
        let meta = meta::open_with(dir, config, access).context("the grid that --join names can't be joined")?;
        if join.token().is_none() && authority::named_in(&meta)?.is_some() {
            refuse!(
                Code::NotPermitted,
                "grid {} has TLS: its id alone does not show that this machine may join. Make a token on the grid's first \
                 machine (`holdfast grid token`), and give that to --join",
                config.grid
            );
        }
        let name = &config.host.name;
        let catalog = Catalog::new(meta.clone(), config.grid_id()?, name);
        let taken = catalog.numbers_of(|node| begun.is_of(node))?;
        if presence::live_hosts(&meta)?.contains(name) || catalog.has_machine(name, &taken)? {
            refuse!(
                Code::Exists,
                "the grid has a machine named {name} already; choose another --name, or, if that one will not be \
                 back, take it out first, on another machine: `holdfast machine remove {name} --dead`"
            );
        }
        address::check_among(ip, address::of_others(&meta, config)?).context("choose another --address")?;
        let begin = |token: &'a JoinToken| JoinClient::begin(meta.clone(), token, config);
        Ok(Joining { catalog, taken, client: join.token().map(begin).transpose()? })
    }

    /// Gets certificates for this machine, where the grid has TLS: last of all, since a token works once.
    pub fn obtain(&self, certificates: &Certificates, roles: &[Role]) -> Result<()> {
        self.client.as_ref().map_or(Ok(()), |client| client.obtain(certificates, roles))
    }

    /// Takes a number for each of so many nodes: those first that were taken before. What is left of these is given
    /// back.
    pub fn add_nodes(&self, count: u32, node_of: impl Fn(u32, u32) -> NodeConfig) -> Result<Vec<NodeConfig>> {
        let mut taken = self.taken.iter();
        let add = |index: u32| match taken.next() {
            Some(id) => self.catalog.retake_node(node_of(index, *id)),
            None => self.catalog.add_node(|id| node_of(index, id)),
        };
        let nodes = (0..count).map(add).collect::<Result<_>>()?;
        self.catalog.give_back(taken)?;
        Ok(nodes)
    }

    /// Gives all numbers back; false where that was not possible.
    pub fn undo(self) -> bool {
        let undone = self.catalog.give_back_nodes().and_then(|()| self.catalog.give_back(self.taken.iter()));
        if let Err(error) = &undone {
            logger::warn(format_args!("numbers of nodes stay taken until the command is given again: {error:#}"));
        }
        undone.is_ok()
    }
}
