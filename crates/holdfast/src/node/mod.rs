//! A storage node: one process with some devices, dealt out over its reactors.
//!
//! Role: [`run`] makes the reactors, each with a [`shell::NodeShell`] and links of its own, and waits for their end. Hosts
//! and other nodes come to the first; hosts of this release go on to each reactor that has devices, and ask there.

pub mod devices;
mod peers;
mod shell;
mod siblings;

use crate::daemon::{EndsTheProcess, outwait, raise_open_files, tell_ready};
use crate::grid::{certs, renewal, revoked};
use crate::logger;
use anyhow::{Context, Result, anyhow, bail};
use devices::{NodeDevice, class_of};
use holdfast_base::{DeviceId, GridId, InstanceId, NodeId};
use holdfast_host::node_peers;
use holdfast_runtime::mailbox::Sender;
use holdfast_runtime::pki::Role;
use holdfast_runtime::reactor::{self, ListenError, Reactor};
use holdfast_runtime::tls::link::{HostTls, LinkPaths, ServerTls};
use holdfast_store::{self as store, Dealing};
use shell::{Begun, NodeShell};
use siblings::{Own, Post};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

/// The reactor that hosts come to.
const FRONT: usize = 0;

/// More are of no use to the devices of one machine.
pub const REACTORS_MAX: u32 = 64;

/// What `holdfast node` was asked to run.
#[derive(Clone, Debug)]
pub struct NodeOptions {
    pub node: NodeId,
    pub grid: GridId,
    pub listen: SocketAddr,
    pub devices: Vec<NodeDevice>,
    /// Make devices that hold nothing but zeroes this node's.
    pub format_blank: bool,
    /// Credentials, where links have TLS.
    pub tls: Option<LinkPaths>,
    /// Share of a fast device for copies of what is read from slower ones; zero for none.
    pub read_cache_percent: u32,
    /// Reactors; `None` for one a device, up to a quarter of the cores.
    pub reactors: Option<u32>,
    /// The grid's directory, where the node was started by it.
    pub dir: Option<PathBuf>,
}

/// What all reactors of a node have in common.
struct Common {
    options: NodeOptions,
    count: usize,
    /// Of the whole process: new at every start.
    boot: InstanceId,
    connecting: Option<HostTls>,
    /// Connections that one reactor has room for.
    peers_max: usize,
    posts: Arc<OnceLock<Vec<Sender<Post>>>>,
}

impl Common {
    fn config(&self, number: usize) -> store::NodeConfig {
        let config = store::NodeConfig::new(self.options.grid, self.options.node, self.boot);
        store::NodeConfig {
            reactor: number as u16,
            reactors: self.count as u16,
            read_cache_per_mille: self.options.read_cache_percent * 10,
            read_cache_state_bytes_max: config.read_cache_state_bytes_max / self.count as u64,
            ..config
        }
    }

    fn own(&self, number: usize) -> Own {
        Own::new(number, self.count, Arc::clone(&self.posts))
    }
}

/// Reactors where nobody says how many: half of the cores are the host's, and guests need some.
fn reactors_for(devices: usize, cores: usize) -> usize {
    (cores / 4).min(devices).clamp(1, REACTORS_MAX as usize)
}

/// Runs until SIGTERM.
pub fn run(options: &NodeOptions) -> Result<()> {
    let load = |paths| {
        certs::finish(paths);
        ServerTls::load(paths, options.grid, Role::Node(options.node))
    };
    let tls = options.tls.as_ref().map(load).transpose()?;
    if let (Some(tls), Some(paths)) = (&tls, &options.tls) {
        tls.revoked().replace(&revoked::load(&paths.ca, options.grid)?);
    }
    let connecting = match (&tls, &options.tls) {
        (Some(tls), Some(paths)) => Some(HostTls::load_node(paths, options.grid, options.node, tls)?),
        _ => None,
    };
    if options.devices.is_empty() && options.dir.is_none() {
        bail!("node {} has no device; name at least one with --device", options.node);
    }
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let count = options.reactors.map_or_else(|| reactors_for(options.devices.len(), cores), |count| count as usize);
    let common = Arc::new(Common {
        options: options.clone(),
        count,
        boot: InstanceId(uuid::Uuid::new_v4().as_u128()),
        connecting: connecting.clone(),
        peers_max: node_peers(raise_open_files(), count),
        posts: Arc::default(),
    });
    let mut reactor = Reactor::new(reactor::Config { handles_signals: true, ..reactor::Config::default() })?;
    let in_use = |e: &ListenError| matches!(e, ListenError::InUse { .. });
    let (listener, bound) = outwait(|| reactor.io().listen_tcp(options.listen), in_use)?;
    reactor.io().set_accepted_max(listener, common.peers_max);
    let mut dealing = Dealing::new(count, options.read_cache_percent > 0);
    let shares = dealing.deal(&options.devices, class_of);
    let (mut shell, post) = NodeShell::new(&common, FRONT, &shares[FRONT], &mut reactor, tls.clone());
    let (posts, threads) = begin_others(&common, &shares, post)?;
    let wakers: Vec<_> = posts.iter().map(|post| post.waker()).collect();
    assert!(common.posts.set(posts).is_ok(), "they begin once");
    if let (Some(tls), Some(paths)) = (&tls, &options.tls) {
        revoked::follow(paths.ca.clone(), options.grid, tls.revoked().clone(), wakers)?;
    }
    if let (Some(ways), Some(door)) = (connecting, tls) {
        renewal::follow(ways, door)?;
    }
    if let Some(dir) = &options.dir {
        shell.deal_out(dealing, dir.clone())?;
    }
    let how = if options.tls.is_some() { ", with TLS" } else { "" };
    logger::info(format_args!(
        "node {} of grid {} listens on {bound}{how}; reactors: {count}",
        options.node, options.grid
    ));
    if options.tls.is_none() && !bound.ip().is_loopback() {
        logger::warn(format_args!(
            "{bound} is open to everybody who can reach it, without TLS; only on a network of the grid's own"
        ));
    }
    tell_ready();
    let ended = reactor.run(&mut shell);
    let threads = if shell.stop_others() { threads } else { Vec::new() };
    for thread in threads {
        thread.join().map_err(|_| anyhow!("a reactor has ended before its time"))?;
    }
    ended?;
    logger::info(format_args!("node {} stops", options.node));
    Ok(())
}

type Others = (Vec<Sender<Post>>, Vec<JoinHandle<()>>);

/// All reactors but the first, each on a thread of its own.
fn begin_others(common: &Arc<Common>, shares: &[Vec<NodeDevice>], front: Sender<Post>) -> Result<Others> {
    let (mut posts, mut threads) = (vec![front], Vec::new());
    for (number, share) in shares.iter().enumerate().skip(1) {
        let (ready, is_ready) = sync_channel(1);
        let (common, share) = (Arc::clone(common), share.clone());
        let thread = std::thread::Builder::new().name(format!("reactor {number}"));
        let thread = thread.spawn(move || run_other(&common, number, &share, &ready));
        threads.push(thread.context("no thread for a reactor")?);
        posts.push(is_ready.recv().map_err(|_| anyhow!("reactor {number} has ended before it began"))??);
    }
    Ok((posts, threads))
}

fn run_other(common: &Common, number: usize, devices: &[NodeDevice], ready: &SyncSender<Result<Begun>>) {
    let _guard = EndsTheProcess;
    let mut reactor = match Reactor::new(reactor::Config::default()) {
        Ok(reactor) => reactor,
        Err(error) => return drop(ready.send(Err(error.into()))),
    };
    let (mut shell, post) = NodeShell::new(common, number, devices, &mut reactor, None);
    let _ = ready.send(Ok(post));
    if let Err(error) = reactor.run(&mut shell) {
        logger::error(format_args!("reactor {number}: {error}"));
        std::process::abort();
    }
}

/// A device id for a device about to be formatted.
pub fn fresh_device_id() -> DeviceId {
    DeviceId(uuid::Uuid::new_v4().as_u128())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reactors_are_for_devices_and_leave_cores_to_others() {
        let counts = [(1, 2), (4, 2), (4, 8), (4, 16), (4, 64), (0, 64), (24, 256)].map(|(d, c)| reactors_for(d, c));
        assert_eq!(counts, [1, 1, 2, 4, 4, 1, 24]);
    }
}
