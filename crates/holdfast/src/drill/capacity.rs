//! What a grid can do without one of its nodes: of that floors are promised (`holdfast qos measure`).
//!
//! A volume of the default layout is written once. Then the links to one node swallow everything, as after a break of its network, and
//! fio reads and writes 8 KiB, seven reads to three writes. What fails to be done is not counted, and an error ends it: a
//! figure of a grid that gives errors is none.

use super::fio::{Job, Pattern, read_latency_log};
use super::grid::{Fault, Grid, LocalGrid, node_of_segments};
use super::rejoin::{Loss, Volumes};
use super::stats::Window;
use super::tools::{self, FIO, WorkDir, sleep};
use crate::grid::layout::GridDir;
use crate::nbd_uri::of_socket;
use anyhow::{Context, Result, bail};
use holdfast_base::size::Size;
use std::time::Duration;

/// Enough that a host and its nodes always have something to do.
const QUEUE_DEPTH: u32 = 64;

/// Until the host has seen that the node is out.
const LOSS_SEEN: Duration = Duration::from_secs(2);

const FILL_TIME_MAX: Duration = Duration::from_secs(600);

/// How long full redundancy may take after the node's return.
const REJOIN_TIME_MAX: Duration = Duration::from_secs(300);

#[derive(Clone, Copy, Debug)]
pub struct Capacity {
    /// Requests of 8 KiB a second.
    pub iops: u64,
    /// All of the grid.
    pub nodes: u64,
    /// The one that was out; none where the layout bears no loss.
    pub without: Option<u32>,
}

/// How to measure.
#[derive(Clone, Debug)]
pub struct Measure {
    pub seconds: u64,
    pub volume_size: Size,
    pub layout: String,
    /// The layout bears the loss of a node.
    pub bears_loss: bool,
}

pub fn measure(dir: &GridDir, how: &Measure) -> Result<Capacity> {
    let Measure { seconds, volume_size, ref layout, bears_loss } = *how;
    tools::require(&[FIO])?;
    let grid = LocalGrid::new(dir.clone());
    grid.wait_until_up()?;
    let nodes = grid.nodes()?.len() as u64;
    tools::catch_interrupts()?;
    let work = WorkDir::create(&grid.root(), false)?;
    let volume = format!("qos-measure-{}", std::process::id());
    let mut volumes = Volumes::new(&grid, false);
    volumes.create(&volume, volume_size.0, layout)?;
    let job = |name, pattern, seconds| Job {
        name,
        pattern,
        uri: of_socket(&grid.socket_of(&volume), &volume),
        size_bytes: volume_size.0,
        queue_depth: if pattern == Pattern::Fill { 4 } else { QUEUE_DEPTH },
        seconds,
        seed: 1,
    };
    eprintln!("writing a volume of {volume_size} ({layout}) once");
    let filled = job("fill", Pattern::Fill, 0).run(work.path(), FILL_TIME_MAX)?;
    if filled.errors > 0 {
        bail!("the volume could not be filled (--volume-size makes it smaller): {}", filled.complaints);
    }
    let without = match bears_loss {
        true => Some(node_of_segments(&grid.holdings()?).context("the grid has no nodes")?),
        false => None,
    };
    let loss = without.map(|node| Loss::strike(&grid, node, Fault::Cut)).transpose()?;
    match without {
        Some(node) => eprintln!("reading and writing for {seconds} s without node {node}"),
        None => eprintln!("reading and writing for {seconds} s; the layout bears the loss of no node"),
    }
    sleep(LOSS_SEEN)?;
    let iops = rate(&job("load", Pattern::Floor8k, seconds), &work)?;
    if let Some(loss) = loss {
        let rejoin = loss.rejoin(&volumes.names, REJOIN_TIME_MAX, || Ok(()))?;
        rejoin.redundant_s.context("the node is back, and not all is redundant again; see `holdfast status`")?;
    }
    Ok(Capacity { iops, nodes, without })
}

/// Completions a second, without the first and the last moment.
fn rate(job: &Job, work: &WorkDir) -> Result<u64> {
    let outcome = job.start(work.path())?.finish()?;
    if outcome.errors > 0 {
        bail!("the load met errors, so there is nothing to promise of: {}", outcome.complaints);
    }
    let (mut first, mut last) = (u64::MAX, 0);
    read_latency_log(&outcome.latency_log, |done| (first, last) = (first.min(done.at_ms), last.max(done.at_ms)))?;
    let margin = last.saturating_sub(first) / 10;
    if last < first || margin == 0 {
        bail!("the load did next to nothing; see `holdfast status`");
    }
    let mut window = Window::new(first + margin, last - margin);
    read_latency_log(&outcome.latency_log, |done| window.record(done))?;
    Ok(window.iops() as u64)
}
