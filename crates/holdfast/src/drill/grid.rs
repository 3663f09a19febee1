//! The grid as a drill sees it: volumes made and deleted, a node struck and healed, and the host's own word on both.
//!
//! Everything goes the way that the command line goes: signals to the processes of the local grid, requests to the host's
//! control socket.

use super::tools::sleep;
use crate::client;
use crate::grid::layout::GridDir;
use crate::grid::processes::Role;
use crate::grid::start_node;
use crate::protocol::{LinkState, NodeInfo, Request};
use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use rustix::process::Signal;
use serde::Serialize;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a new volume may take to open.
const OPEN_TIME_MAX: Duration = Duration::from_secs(30);

/// How a node is lost, and by which commands.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fault {
    /// SIGKILL; the node is started again.
    Kill,
    /// SIGSTOP; the node is resumed.
    Hang,
    /// Its links swallow everything; they are mended.
    Cut,
}

impl Fault {
    /// The command that does it.
    pub fn strike(self) -> &'static str {
        match self {
            Fault::Kill => "kill",
            Fault::Hang => "hang",
            Fault::Cut => "cut",
        }
    }

    /// The command that undoes it.
    pub fn heal(self) -> &'static str {
        match self {
            Fault::Kill => "start",
            Fault::Hang => "resume",
            Fault::Cut => "mend",
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.strike())
    }
}

/// What a drill needs from a grid.
pub trait Grid: Sync {
    /// Where clients of a volume connect.
    fn socket_of(&self, volume: &str) -> PathBuf;
    /// Where the drill may keep files.
    fn root(&self) -> PathBuf;
    /// Makes a volume and returns once clients can use it.
    fn create_volume(&self, name: &str, size_bytes: u64, layout: &str) -> Result<()>;
    fn delete_volume(&self, name: &str) -> Result<()>;
    fn strike(&self, node: u32, fault: Fault) -> Result<()>;
    fn heal(&self, node: u32, fault: Fault) -> Result<()>;
    fn health(&self, node: u32, volumes: &[String]) -> Result<Health>;
    /// The node that a drill takes out if the user names none: the one that holds most of what was just written.
    fn busiest_node(&self) -> Result<u32>;
}

/// What the host says.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Health {
    /// The node is connected and answers, and no volume avoids it.
    pub node_up: bool,
    pub degraded_segments: u64,
    /// Log entries with fewer copies than they should have.
    pub at_risk_entries: u64,
}

impl Health {
    pub fn is_redundant(self) -> bool {
        self.node_up && self.degraded_segments == 0 && self.at_risk_entries == 0
    }
}

/// URI of an export, as fio, nbdfuse and all other clients of libnbd and QEMU take it.
pub fn uri(socket: &Path, volume: &str) -> String {
    format!("nbd+unix:///{volume}?socket={}", socket.display())
}

/// The grid that `holdfast grid up` started.
pub struct LocalGrid {
    dir: GridDir,
}

impl LocalGrid {
    /// A running grid, all of whose nodes are up.
    pub fn open(dir: GridDir) -> Result<LocalGrid> {
        let status = client::status(&dir)?;
        if let Some(node) = status.nodes.iter().find(|node| !is_up(node)) {
            bail!(
                "node {0} is not up, and a drill starts with all of them; see `holdfast status`, then `holdfast node \
                 start {0}`, `resume {0}` or `mend {0}`",
                node.id
            );
        }
        Ok(LocalGrid { dir })
    }

    pub fn nodes(&self) -> Result<Vec<u32>> {
        Ok(client::status(&self.dir)?.nodes.iter().map(|node| node.id).collect())
    }

    fn signal(&self, node: u32, signal: Signal) -> Result<()> {
        Role::Node(node).signal(&self.dir, signal).map(|_| ())
    }
}

fn is_up(node: &NodeInfo) -> bool {
    node.link == LinkState::Up && !node.suspect && !node.cut
}

impl Grid for LocalGrid {
    fn socket_of(&self, _volume: &str) -> PathBuf {
        self.dir.nbd_socket()
    }

    fn root(&self) -> PathBuf {
        self.dir.root().to_path_buf()
    }

    fn create_volume(&self, name: &str, size_bytes: u64, layout: &str) -> Result<()> {
        let (name, layout) = (name.to_string(), layout.to_string());
        let request = Request::VolumeCreate { name: name.clone(), size_bytes, layout, export: true };
        let mut volume = client::volume(&self.dir, &request)?;
        let deadline = Instant::now() + OPEN_TIME_MAX;
        while volume.state != "open" {
            if Instant::now() >= deadline {
                bail!(
                    "volume {name} is {} after {} s (it waits for {}); see `holdfast status`",
                    volume.state,
                    OPEN_TIME_MAX.as_secs(),
                    volume.waits.as_deref().unwrap_or("nothing that it names")
                );
            }
            sleep(Duration::from_millis(50))?;
            volume = client::volume(&self.dir, &Request::VolumeShow { name: name.clone() })?;
        }
        Ok(())
    }

    fn delete_volume(&self, name: &str) -> Result<()> {
        client::done(&self.dir, &Request::VolumeDelete { name: name.to_string(), force: true })
    }

    fn strike(&self, node: u32, fault: Fault) -> Result<()> {
        match fault {
            Fault::Kill => self.signal(node, Signal::KILL),
            Fault::Hang => self.signal(node, Signal::STOP),
            Fault::Cut => client::done(&self.dir, &Request::NodeCut { node }),
        }
    }

    fn heal(&self, node: u32, fault: Fault) -> Result<()> {
        match fault {
            Fault::Kill => start_node(&self.dir, node).map(|_| ()),
            Fault::Hang => self.signal(node, Signal::CONT),
            Fault::Cut => client::done(&self.dir, &Request::NodeMend { node }),
        }
    }

    fn health(&self, node: u32, volumes: &[String]) -> Result<Health> {
        let status = client::status(&self.dir)?;
        let node_up = status.nodes.iter().find(|n| n.id == node).is_some_and(is_up);
        let mut health = Health { node_up, degraded_segments: 0, at_risk_entries: 0 };
        for name in volumes {
            let volume = status.volumes.iter().find(|v| v.name == *name);
            let live = volume.and_then(|v| v.live.as_ref());
            let live = live.with_context(|| format!("the host does not have volume {name} open any more"))?;
            health.degraded_segments += live.degraded_segments;
            health.at_risk_entries += live.at_risk_entries;
        }
        Ok(health)
    }

    fn busiest_node(&self) -> Result<u32> {
        let status = client::status(&self.dir)?;
        let used = |node: &NodeInfo| -> u64 {
            node.devices.iter().map(|d| d.capacity_bytes.saturating_sub(d.free_bytes)).sum()
        };
        let busiest = status.nodes.iter().max_by_key(|node| used(node)).context("the grid has no nodes")?;
        Ok(busiest.id)
    }
}
