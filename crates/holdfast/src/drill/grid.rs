//! The grid as a drill sees it: volumes made and deleted, a node struck and healed, and the host's own word on both.
//!
//! Everything goes the way that the command line goes: signals to the processes of the local grid, requests to the host's
//! control socket.

use super::tools::sleep;
use crate::client;
use crate::grid::layout::GridDir;
use crate::grid::processes::Role;
use crate::grid::start_node;
use crate::grid::units::Units;
use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use holdfast_api::{HostStatus, LinkState, NodeInfo, Request, Response, VolumeState};
use rustix::process::Signal;
use serde::Serialize;
use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// How long the host may take to say how it is, on a machine whose cores are all busy.
const STATUS_TIME_MAX: Duration = Duration::from_secs(10);

/// How long all nodes may take to be up before a drill starts: a busy machine makes one late now and then.
const UP_TIME_MAX: Duration = Duration::from_secs(5);

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
    /// Refuses a grid that has lost a node already.
    fn wait_until_up(&self) -> Result<()>;
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
    /// What each node holds right now.
    fn holdings(&self) -> Result<Vec<Holding>>;
}

/// What one node holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Holding {
    pub node: u32,
    pub journal_bytes: u64,
    pub segment_bytes: u64,
}

/// The node that a drill takes out if the user names none: one that the log is being written to, told by whose journal
/// has grown most; the loss of a standby would prove little.
pub fn node_of_log(before: &[Holding], after: &[Holding]) -> Option<u32> {
    let grown = |holding: &Holding| {
        let was = before.iter().find(|h| h.node == holding.node).map_or(0, |h| h.journal_bytes);
        holding.journal_bytes.saturating_sub(was)
    };
    after.iter().max_by_key(|holding| grown(holding)).map(|holding| holding.node)
}

/// The same for a drill that only reads: the node that holds most.
pub fn node_of_segments(holdings: &[Holding]) -> Option<u32> {
    holdings.iter().max_by_key(|holding| holding.segment_bytes).map(|holding| holding.node)
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

/// The grid that `holdfast grid up` started.
pub struct LocalGrid {
    dir: GridDir,
}

impl LocalGrid {
    pub fn new(dir: GridDir) -> LocalGrid {
        LocalGrid { dir }
    }

    pub fn nodes(&self) -> Result<Vec<u32>> {
        Ok(self.status()?.nodes.iter().map(|node| node.id).collect())
    }

    pub fn status(&self) -> Result<HostStatus> {
        match client::ask(&self.dir, &Request::Status, STATUS_TIME_MAX)? {
            Response::Status(status) => Ok(*status),
            other => bail!("the host's answer does not fit the request ({other:?}): is it another release?"),
        }
    }

    fn signal(&self, node: u32, signal: Signal) -> Result<()> {
        Role::Node(node).signal(&self.dir, signal).map(|_| ())
    }
}

fn is_up(node: &NodeInfo) -> bool {
    node.link == LinkState::Up && !node.suspect && !node.cut
}

impl Grid for LocalGrid {
    fn wait_until_up(&self) -> Result<()> {
        let deadline = Instant::now() + UP_TIME_MAX;
        loop {
            let status = self.status()?;
            let Some(node) = status.nodes.iter().find(|node| !is_up(node)) else { return Ok(()) };
            if Instant::now() >= deadline {
                bail!(
                    "node {0} is not up, and a drill starts with all of them; see `holdfast status`, then `holdfast \
                     node start {0}`, `resume {0}` or `mend {0}`",
                    node.id
                );
            }
            sleep(Duration::from_millis(100))?;
        }
    }

    fn socket_of(&self, _volume: &str) -> PathBuf {
        self.dir.nbd_socket()
    }

    fn root(&self) -> PathBuf {
        self.dir.root().to_path_buf()
    }

    fn create_volume(&self, name: &str, size_bytes: u64, layout: &str) -> Result<()> {
        let (name, layout) = (name.to_string(), layout.to_string());
        let request = Request::VolumeCreate {
            name: name.clone(),
            size_bytes,
            layout,
            export: true,
            fixed: false,
            checked_reads: true,
            compression: None,
            tiers: holdfast_format::tier::Tiers::default(),
            key: None,
            limit: None,
        };
        let mut volume = client::volume(&self.dir, &request)?;
        let deadline = Instant::now() + OPEN_TIME_MAX;
        while volume.state != VolumeState::Open {
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
        // The witness writes beside the load.
        let (takeover, multipath, key, shared, failover) = (false, false, None, Some(true), None);
        client::volume(&self.dir, &Request::VolumeExport { name, takeover, multipath, key, shared, failover }).map(drop)
    }

    fn delete_volume(&self, name: &str) -> Result<()> {
        client::done(&self.dir, &Request::VolumeDelete { name: name.to_string(), force: true, now: true })
    }

    fn strike(&self, node: u32, fault: Fault) -> Result<()> {
        match fault {
            Fault::Kill => {
                self.signal(node, Signal::KILL)?;
                // Else it would be back after a second, and nothing be measured without it.
                Units::of(&self.dir).map_or(Ok(()), |units| units.stop(Role::Node(node)))
            }
            Fault::Hang => self.signal(node, Signal::STOP),
            Fault::Cut => client::done(&self.dir, &Request::NodeCut { node }),
        }
    }

    fn heal(&self, node: u32, fault: Fault) -> Result<()> {
        match fault {
            Fault::Kill => start_node(&self.dir, node, false).map(|_| ()),
            Fault::Hang => self.signal(node, Signal::CONT),
            Fault::Cut => client::done(&self.dir, &Request::NodeMend { node }),
        }
    }

    fn health(&self, node: u32, volumes: &[String]) -> Result<Health> {
        let status = self.status()?;
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

    fn holdings(&self) -> Result<Vec<Holding>> {
        let holding = |node: &NodeInfo| Holding {
            node: node.id,
            journal_bytes: node.devices.iter().map(|d| d.journal_used_bytes).sum(),
            segment_bytes: node.devices.iter().map(|d| d.capacity_bytes.saturating_sub(d.free_bytes)).sum(),
        };
        Ok(self.status()?.nodes.iter().map(holding).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holdings(bytes: [(u64, u64); 3]) -> Vec<Holding> {
        let holding = |(i, (journal_bytes, segment_bytes)): (usize, (u64, u64))| Holding {
            node: i as u32 + 1,
            journal_bytes,
            segment_bytes,
        };
        bytes.into_iter().enumerate().map(holding).collect()
    }

    #[test]
    fn the_node_to_lose_is_one_that_matters() {
        let before = holdings([(900, 10), (100, 70), (500, 20)]);
        let after = holdings([(200, 10), (400, 70), (510, 20)]);
        assert_eq!(node_of_log(&before, &after), Some(2));
        assert_eq!(node_of_segments(&after), Some(2));
        assert_eq!(node_of_log(&[], &[]), None);
    }
}
