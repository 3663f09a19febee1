//! `holdfast node`: the storage process itself, and the faults that a local grid can be given.

use super::device::{self, DISCARDED, drain};
use super::format::{print, print_json};
use super::status;
use crate::config::{self, keys};
use crate::grid::certs::Certificates;
use crate::grid::layout::{GridDir, NodeConfig};
use crate::grid::processes::Role;
use crate::grid::rolling::restart_nodes;
use crate::grid::token::TokenArgs;
use crate::grid::units::Units;
use crate::grid::{self, grow};
use crate::node::devices::{self as node_devices, NodeDevice};
use crate::node::{self, NodeOptions};
use crate::{client, daemon, logger};
use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use holdfast_api::{Code, Request, refuse};
use holdfast_base::size::Size;
use holdfast_base::{GridId, NodeId};
use holdfast_runtime::pki;
use rustix::process::Signal;
use serde_json::json;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

#[derive(Args, Debug)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    after_help = "Examples:\n  \
        holdfast node stop 2      for maintenance: refused while data can't do without it\n  \
        holdfast node restart --rolling   all nodes of this machine, one after the other, while volumes serve\n  \
        holdfast node kill 2      node 2 of the local grid dies, as in a crash\n  \
        holdfast node start 2     and comes back\n  \
        holdfast node hang 3      node 3 stands still: its connections stay, nothing answers\n  \
        holdfast node resume 3    and goes on\n  \
        holdfast node cut 4       the network between host and node 4 swallows everything\n  \
        holdfast node add         another node; data is moved there by itself\n  \
        holdfast node drain 1     everything leaves node 1; then `holdfast node remove 1`\n\n  \
        holdfast node --id 1 --grid 0f9e… --listen 10.0.0.1:7500 --device /dev/nvme0n1 --format-blank\n                            \
        runs a storage node in the foreground, on a machine of its own"
)]
pub struct NodeArgs {
    #[command(subcommand)]
    action: Option<NodeAction>,

    /// Number of this node in its grid
    #[arg(long, required = true)]
    id: Option<u32>,

    /// Address to serve on; by default what grid.json says
    #[arg(long, value_name = "ADDR:PORT")]
    listen: Option<SocketAddr>,

    /// A device of this node: a block device or a file, any number of times; by default what grid.json says
    #[arg(long = "device", value_name = "PATH")]
    devices: Vec<PathBuf>,

    /// The grid's id; by default what grid.json says
    #[arg(long, value_name = "UUID")]
    grid: Option<GridId>,

    /// Make devices that hold nothing but zeroes this node's own
    #[arg(long)]
    format_blank: bool,

    /// Let in only hosts of the grid, over TLS: a directory with ca.pem, and this node's node-N.pem and node-N.key; by
    /// default what grid.json says
    #[arg(long, value_name = "DIR")]
    tls: Option<PathBuf>,

    /// Share of a fast device for copies of what is read often from this node's slower ones, or `off`; by default what
    /// holdfast.toml says (`cache.reads`), 10 % where there is none
    #[arg(long, value_name = "SHARE", value_parser = share)]
    read_cache: Option<u32>,

    /// Threads of this node, each with some of its devices; by default what holdfast.toml says (`cpu.node_reactors`), one a
    /// device up to a quarter of the cores where there is none
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=i64::from(node::REACTORS_MAX)))]
    reactors: Option<u32>,

    #[arg(long, hide = true)]
    daemon: bool,
}

/// A share in per cent, as `cache.reads` in holdfast.toml takes it.
fn share(text: &str) -> Result<u32, String> {
    keys::READ_CACHE.parse(text).map(|value| value.share())
}

#[derive(Subcommand, Debug)]
enum NodeAction {
    /// All nodes of the grid, and the machines that they are on
    List,
    /// Add a node to the local grid; data is moved there by itself
    Add {
        /// By default as many as the last node has
        #[arg(long)]
        devices: Option<u32>,
        /// By default as large as the last node's first
        #[arg(long)]
        device_size: Option<Size>,
        /// A block device, or a file that is there, any number of times, rather than new files; it has to be empty
        #[arg(long = "path", value_name = "PATH", conflicts_with_all = ["devices", "device_size"])]
        paths: Vec<PathBuf>,
        /// Although such a device holds something, which is destroyed
        #[arg(long, requires = "paths")]
        force: bool,
        #[command(flatten)]
        token: TokenArgs,
    },
    /// Move everything off a node's devices, whichever machine it is on; nothing new goes there
    Drain {
        node: u32,
        /// Let it take data again
        #[arg(long)]
        cancel: bool,
        /// Although volumes would be less redundant, or the others may have too little room
        #[arg(long)]
        force: bool,
    },
    /// Stop a node that was drained, take it out of the local grid, and delete its devices' files (devices elsewhere
    /// become empty ones)
    Remove {
        node: u32,
        /// Although it is not empty, or down: what lay there is made again from the others
        #[arg(long)]
        force: bool,
    },
    /// Stop a node of the local grid in good order; `holdfast node start` brings it back
    Stop {
        node: u32,
        /// Although data that is not fully redundant now would be less so without it
        #[arg(long)]
        force: bool,
    },
    /// Stop and start nodes of this machine one after the other, for a new version of the program: each only when data can do
    /// without it, and the next only when nothing is missing any more
    Restart {
        #[arg(required_unless_present = "rolling", conflicts_with = "rolling")]
        nodes: Vec<u32>,
        /// All nodes of this machine
        #[arg(long)]
        rolling: bool,
        /// Give up when data can't do without a node for so many seconds
        #[arg(long, value_name = "SECONDS", default_value_t = 600)]
        patience: u64,
    },
    /// Kill a node of the local grid at once (SIGKILL)
    Kill { node: u32 },
    /// Make a node of the local grid stand still (SIGSTOP)
    Hang { node: u32 },
    /// Let a node that hangs go on (SIGCONT)
    Resume { node: u32 },
    /// Start a node of the local grid that is down
    Start {
        node: u32,
        /// Make devices that hold nothing but zeroes this node's own: after a failed one was replaced
        #[arg(long)]
        format_blank: bool,
    },
    /// Black-hole the links between the host and a node
    ///
    /// All of a local grid's traffic runs over one loopback, so the cut is made in the host: it stops reading from and
    /// sending to the node, keeps the connections open, and gets no answer to new ones, as if a cable were pulled. What
    /// was to be sent waits until `holdfast node mend`. The node itself and its process notice nothing.
    Cut { node: u32 },
    /// End a cut
    Mend { node: u32 },
}

pub fn run(args: NodeArgs, dir: Option<&std::path::Path>, json: bool) -> Result<()> {
    match &args.action {
        Some(action) => act(action, &GridDir::choose(dir)?, json),
        None => serve(args, dir),
    }
}

fn act(action: &NodeAction, dir: &GridDir, json: bool) -> Result<()> {
    let config = dir.load()?;
    if let NodeAction::List = action {
        return status::list_nodes(dir, json);
    }
    if let NodeAction::Restart { nodes, rolling, patience } = action {
        nodes.iter().try_for_each(|node| grid::own_node(dir, &config, *node).map(drop))?;
        let all = || config.nodes.iter().map(|node| node.id).collect();
        return restart(dir, &if *rolling { all() } else { nodes.clone() }, Duration::from_secs(*patience), json);
    }
    let own = |node: u32| grid::own_node(dir, &config, node);
    let devices_of = |node: &NodeConfig| -> Vec<String> { node.devices.iter().map(|d| d.device.clone()).collect() };
    let (id, text) = match *action {
        NodeAction::Add { devices, device_size, ref paths, force, ref token } => {
            let devices = match paths.is_empty() {
                true => grow::Devices::Files(devices, device_size),
                false => grow::Devices::Paths { paths: paths.clone(), force },
            };
            let node = grow::add_node(dir, &devices, token.token()?.as_ref())?;
            (node.id, format!("node {} is added, and up at {}; data is moved there by itself", node.id, node.address))
        }
        NodeAction::Drain { node, cancel, force } => {
            let devices = devices_of(&device::node_of_grid(dir, node)?);
            drain(dir, &devices, cancel, force)?;
            if cancel {
                grow::forget_replacing(dir, &devices)?;
            }
            let text = match cancel {
                true => format!("node {node} takes data again"),
                false => format!("node {node} is being emptied; `holdfast task watch` shows how it gets on"),
            };
            (node, text)
        }
        NodeAction::Remove { node, force } => {
            // One that was cut short may have got to where the configuration knows the node no more.
            let left = device::being_removed(dir)?.filter(|left| left.node == node && config.node(node).is_err());
            let devices = match left {
                Some(left) => left.ids().cloned().collect(),
                None => devices_of(own(node)?),
            };
            let removed = grow::remove_devices(dir, &devices, force)?;
            let notes = removed.notes.iter().map(|note| format!("\n{note}")).collect::<String>();
            (node, format!("node {node} is not a part of the grid any more; {DISCARDED}{notes}"))
        }
        NodeAction::Stop { node, force } => {
            let is = if grid::stop_node(dir, node, force)? { "is" } else { "was" };
            (node, format!("node {node} {is} stopped; `holdfast node start {node}` brings it back"))
        }
        NodeAction::Restart { .. } | NodeAction::List => unreachable!("done above"),
        NodeAction::Kill { node } => {
            own(node)?;
            let role = Role::Node(node);
            if role.find(dir).is_none() {
                let text = format!("node {node} was dead; `holdfast node start {node}` brings it back");
                return if json { print_json(&json!({ "node": node, "done": true })) } else { print(text) };
            }
            let running = role.signal(dir, Signal::KILL)?;
            if !role.wait_gone(dir, Duration::from_secs(10)) {
                refuse!(
                    Code::Unavailable,
                    "node {node} (process {}) does not die; it waits for its disk (see `dmesg`)",
                    running.pid
                );
            }
            let back = match Units::of(dir) {
                Some(_) => "systemd starts it again in a second".to_string(),
                None => format!("`holdfast node start {node}` brings it back"),
            };
            (node, format!("node {node} is dead; {back}"))
        }
        NodeAction::Hang { node } => {
            own(node)?;
            Role::Node(node).signal(dir, Signal::STOP)?;
            (node, format!("node {node} hangs; `holdfast node resume {node}` lets it go on"))
        }
        NodeAction::Resume { node } => {
            own(node)?;
            Role::Node(node).signal(dir, Signal::CONT)?;
            (node, format!("node {node} goes on"))
        }
        NodeAction::Start { node, format_blank } => {
            let is_started = grid::start_node(dir, node, format_blank)?;
            (node, format!("node {node} is up{}", if is_started { "" } else { " already" }))
        }
        NodeAction::Cut { node } => {
            client::done(dir, &Request::NodeCut { node })?;
            (node, format!("node {node} is cut off; `holdfast node mend {node}` ends that"))
        }
        NodeAction::Mend { node } => {
            client::done(dir, &Request::NodeMend { node })?;
            (node, format!("node {node} can be reached again"))
        }
    };
    if json { print_json(&json!({ "node": id, "done": true })) } else { print(text) }
}

fn restart(dir: &GridDir, nodes: &[u32], patience: Duration, json: bool) -> Result<()> {
    restart_nodes(dir, nodes, patience, |step| {
        if !json {
            let _ = print(step);
        }
    })?;
    if json { print_json(&json!({ "nodes": nodes, "done": true })) } else { Ok(()) }
}

/// Runs the storage process in the foreground.
fn serve(args: NodeArgs, dir: Option<&std::path::Path>) -> Result<()> {
    let id = args.id.expect("clap requires it where there is no action");
    let mut options = NodeOptions {
        node: NodeId(id),
        grid: args.grid.unwrap_or_default(),
        listen: args.listen.unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 0))),
        devices: args.devices.into_iter().map(|path| NodeDevice { path, device: None }).collect(),
        format_blank: args.format_blank,
        tls: None,
        read_cache_percent: args.read_cache.unwrap_or(keys::READ_CACHE_PERCENT),
        reactors: args.reactors,
        dir: None,
    };
    let own = pki::Role::Node(options.node);
    if args.grid.is_none() || args.listen.is_none() || options.devices.is_empty() {
        let dir = GridDir::choose(dir)?;
        let config =
            dir.load().context("without --grid, --listen and --device a node takes them from a grid's directory")?;
        let node = config.node(id)?;
        if args.grid.is_none() {
            options.grid = config.grid_id()?;
        }
        if args.listen.is_none() {
            options.listen = node.address;
        }
        if options.devices.is_empty() {
            options.devices = node_devices::named(&dir, options.node)?;
            options.dir = Some(dir.root().to_path_buf());
        }
        if args.read_cache.is_none() || args.reactors.is_none() {
            // A node starts whatever is wrong with the file: hosts are there to complain of it.
            let (read_cache_percent, reactors) = config::load(&dir, &config).map_or_else(
                |error| {
                    logger::warn(format_args!("node {id} has no read cache, and one reactor: {error:#}"));
                    (0, Some(1))
                },
                |settings| (settings.read_cache_percent, settings.node_reactors),
            );
            options.read_cache_percent = args.read_cache.unwrap_or(read_cache_percent);
            options.reactors = args.reactors.or(reactors);
        }
        options.tls = config.tls.then(|| Certificates::of(&dir, options.grid).paths(&own));
        Role::Node(id).register(&dir)?;
    }
    if let Some(dir) = &args.tls {
        options.tls = Some(Certificates::in_dir(dir, options.grid).paths(&own));
    }
    daemon::begin(args.daemon)?;
    node::run(&options)
}
