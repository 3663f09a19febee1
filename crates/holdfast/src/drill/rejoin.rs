//! A node taken out and brought back: never forgotten, and watched until everything is redundant again.

use super::grid::{Fault, Grid};
use super::stats::rounded;
use super::tools::sleep;
use crate::cli::progress::{Progress, Unit};
use anyhow::{Context, Result};
use serde::Serialize;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How often the host is asked while a node comes back.
const POLL: Duration = Duration::from_millis(100);

/// What the host said after the node was brought back, in seconds from that moment.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Rejoin {
    pub noticed_s: Option<f64>,
    pub redundant_s: Option<f64>,
    /// Segments that lacked a shard when the node came back.
    pub degraded_segments: u64,
}

/// A node that is out. Dropped on the way out of a failed drill, it is brought back all the same.
pub struct Loss<'a> {
    grid: &'a dyn Grid,
    node: u32,
    fault: Fault,
    healed: bool,
    /// Unix milliseconds just before the node was struck.
    pub at_ms: u64,
}

pub fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}

impl<'a> Loss<'a> {
    pub fn strike(grid: &'a dyn Grid, node: u32, fault: Fault) -> Result<Loss<'a>> {
        let loss = Loss { grid, node, fault, healed: false, at_ms: unix_ms() };
        grid.strike(node, fault).with_context(|| format!("cannot take node {node} out"))?;
        Ok(loss)
    }

    /// Brings the node back and waits, at most `time_max`, until all `volumes` are fully redundant. `each` is called after
    /// every look and may end the drill.
    pub fn rejoin(
        mut self,
        volumes: &[String],
        time_max: Duration,
        mut each: impl FnMut() -> Result<()>,
    ) -> Result<Rejoin> {
        let before = self.grid.health(self.node, volumes)?;
        let mut rejoin = Rejoin { degraded_segments: before.degraded_segments, ..Rejoin::default() };
        self.healed = true;
        let begun = Instant::now();
        let what = format!("node {} is back; making whole", self.node);
        let mut progress = Progress::begin(what, Unit::Of("segments"), before.degraded_segments, false);
        self.grid.heal(self.node, self.fault).with_context(|| format!("cannot bring node {} back", self.node))?;
        while rejoin.redundant_s.is_none() && begun.elapsed() < time_max {
            let health = self.grid.health(self.node, volumes)?;
            progress.set_left(health.degraded_segments);
            let now_s = rounded(begun.elapsed().as_secs_f64());
            if health.node_up && rejoin.noticed_s.is_none() {
                rejoin.noticed_s = Some(now_s);
            }
            if health.is_redundant() {
                rejoin.redundant_s = Some(now_s);
                break;
            }
            each()?;
            sleep(POLL)?;
        }
        Ok(rejoin)
    }
}

impl Drop for Loss<'_> {
    fn drop(&mut self) {
        if !self.healed
            && let Err(error) = self.grid.heal(self.node, self.fault)
        {
            eprintln!("node {} is still out: {error:#}; run `holdfast node {} {0}`", self.node, self.fault.heal());
        }
    }
}

/// Volumes of a drill, deleted when it ends unless they are to be kept.
pub struct Volumes<'a> {
    grid: &'a dyn Grid,
    pub names: Vec<String>,
    keep: bool,
}

impl<'a> Volumes<'a> {
    pub fn new(grid: &'a dyn Grid, keep: bool) -> Volumes<'a> {
        Volumes { grid, names: Vec::new(), keep }
    }

    pub fn create(&mut self, name: &str, size_bytes: u64, layout: &str) -> Result<()> {
        self.grid.create_volume(name, size_bytes, layout)?;
        self.names.push(name.to_string());
        Ok(())
    }
}

impl Drop for Volumes<'_> {
    fn drop(&mut self) {
        if self.keep {
            return;
        }
        for name in &self.names {
            if let Err(error) = self.grid.delete_volume(name) {
                eprintln!("volume {name} is left: {error:#}; run `holdfast volume delete {name}`");
            }
        }
    }
}
