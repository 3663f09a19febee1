//! `holdfast drill`: takes something out of a running grid under a real load, and proves what the grid promises.
//!
//! `node-loss` measures three things. **Availability**: errors, the longest time without a completion, maxima (nothing left
//! out), means before and after the loss. **Integrity**: every block that fio wrote carries its address and version, and
//! must hold the version that was acknowledged last ([`history`]); a witness overwrites and reads blocks of its own all
//! the while ([`witness`]). **Recovery**: the node comes back under a second load, until the host says that everything is
//! redundant again ([`rejoin`]). The load is fio over NBD, whose command line is printed, so that anyone can repeat it; or
//! films ([`film`]).
//!
//! `disk-loss`, `host-loss`, `metadata-loss` and `machine-loss` rehearse what is in the runbook ([`emergency`]).
//!
//! A drill makes volumes of its own, deletes them, and brings back what it took even if it fails or is interrupted.

mod capacity;
mod emergency;
mod film;
mod fio;
pub mod grid;
mod history;
mod load;
mod machine;
pub mod rejoin;
mod report;
mod stats;
pub mod tools;
mod witness;

pub use capacity::{Measure, measure};

use crate::grid::layout::GridDir;
use anyhow::{Result, bail};
use clap::{Args, Subcommand, ValueEnum};
use emergency::Calamity;
use emergency::disk::{DiskLoss, DiskLossArgs};
use emergency::host::{HostLoss, HostLossArgs};
use emergency::machines::{MachineLoss, MachineLossArgs};
use emergency::metadata::{MetadataLoss, MetadataLossArgs};
use fio::Pattern;
use grid::{Fault, Grid, LocalGrid};
use holdfast_base::size::Size;
use std::fmt;
use tools::{Tool, WorkDir};

#[derive(Args, Debug)]
pub struct DrillArgs {
    #[command(subcommand)]
    drill: Drill,
}

#[derive(Subcommand, Debug)]
#[allow(clippy::enum_variant_names, reason = "all of them are losses, and commands are called so")]
enum Drill {
    /// Lose a node at half time of a load, bring it back, and verify every block.
    #[command(after_help = "\
Examples:
  holdfast drill node-loss --workload oltp-8k --fault hang --seconds 60
  holdfast drill node-loss --workload film --fault kill --seconds 20
  holdfast drill node-loss --workload seq-read-64k --layout mirror:2 --fault cut --json

Ends with an error if a request failed, a block did not hold what was acknowledged last, a frame
was lost, or full redundancy did not return. Latencies depend on what else the machine does.")]
    NodeLoss(NodeLossArgs),
    /// Lose a disk under load, replace it, and verify everything.
    #[command(after_help = "\
Examples:
  holdfast drill disk-loss
  holdfast drill disk-loss --device 2/0 --new /dev/disk/by-id/nvme-…

The disk's file is put aside, and its node killed and started without it. Then `holdfast device replace` is run.
Ends with an error if a client got one, a block did not hold what was acknowledged last, or not all was well again.")]
    DiskLoss(DiskLossArgs),
    /// Kill the host under load, start it again, and verify everything.
    #[command(after_help = "\
Example:
  holdfast drill host-loss --seconds 10

Clients of the drill's volume keep trying, as guests do that are set up for it; how long they waited is told.
Ends with an error if a client got one, a block did not hold what was acknowledged last, or not all was well again.")]
    HostLoss(HostLossArgs),
    /// Lose all metadata under load, have them back from the nodes, and verify everything.
    #[command(after_help = "\
Example:
  holdfast drill metadata-loss --yes

meta.redb is put aside, or the records of the grid are deleted from etcd. Then the runbook's commands are run:
`holdfast grid down --host`, `holdfast meta recover`, `holdfast grid up`. Of other machines you are asked to do the
first and the last. What puts the grid right should the drill be killed is told before the harm is done.
Ends with an error if a client got one, a block did not hold what was acknowledged last, or not all was well again.")]
    MetadataLoss(MetadataLossArgs),
    /// Lose another machine under load, by your own hand, bring it back, and verify everything.
    #[command(after_help = "\
Example:
  holdfast drill machine-loss --machine b --yes

Says when machine b is to be taken away, and when it is to come back; give it on a machine that stays.
Ends with an error if a client got one, a block did not hold what was acknowledged last, or not all was well again.")]
    MachineLoss(MachineLossArgs),
}

/// What runs while the node is lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Workload {
    /// fio: 8 KiB, 60 % read, 90 % random and 10 % sequential.
    #[value(name = "oltp-8k")]
    Oltp8k,
    /// fio: 64 KiB sequential read.
    #[value(name = "seq-read-64k")]
    SeqRead64k,
    /// Three players of MPEG-4 films in real time.
    Film,
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Workload::Oltp8k => "oltp-8k",
            Workload::SeqRead64k => "seq-read-64k",
            Workload::Film => "film",
        })
    }
}

#[derive(Args, Clone, Debug)]
pub struct NodeLossArgs {
    #[arg(long, value_enum, default_value_t = Workload::Oltp8k)]
    workload: Workload,
    /// Layout of the drill's volumes: mirror:2, mirror:3, parity:2+1, parity:4+2 and so on.
    #[arg(long, default_value = "parity:2+1", value_name = "LAYOUT")]
    layout: String,
    /// How the node is lost.
    #[arg(long, value_enum, default_value_t = Fault::Hang)]
    fault: Fault,
    /// Length of the load; the node is lost half-way.
    #[arg(long, default_value_t = 60, value_name = "N", value_parser = clap::value_parser!(u64).range(4..=86_400))]
    seconds: u64,
    /// The node to lose; by default one that the log is written to, or, for films, the one that holds most.
    #[arg(long, value_name = "N")]
    node: Option<u32>,
    /// Size of the volume under load.
    #[arg(long, default_value = "2GiB", value_name = "SIZE")]
    volume_size: Size,
    /// Requests in flight.
    #[arg(long, default_value_t = 16, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    queue_depth: u32,
    /// How long full redundancy may take after the node's return.
    #[arg(long, default_value_t = 300, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    rejoin_seconds: u64,
    /// Keep the drill's volumes and fio's logs.
    #[arg(long)]
    keep: bool,
}

impl NodeLossArgs {
    fn tools(&self) -> &'static [Tool] {
        match self.workload {
            Workload::Oltp8k | Workload::SeqRead64k => &[tools::FIO],
            Workload::Film => &[tools::FFMPEG, tools::FFPROBE, tools::NBDFUSE, tools::FUSERMOUNT, tools::QEMU_NBD],
        }
    }
}

/// Runs a drill against the grid in `dir`. An error says that it could not be run or did not pass.
pub fn run(args: DrillArgs, dir: &GridDir, json: bool) -> Result<()> {
    let emergency = |calamity: &mut dyn Calamity, common| emergency::run(calamity, dir, common, json);
    match args.drill {
        Drill::NodeLoss(args) => node_loss(&args, dir, json),
        Drill::DiskLoss(args) => emergency(&mut DiskLoss::new(&args)?, &args.common),
        Drill::HostLoss(args) => emergency(&mut HostLoss { with_clients: args.with_clients }, &args.common),
        Drill::MetadataLoss(args) => emergency(&mut MetadataLoss::new(args.with_clients), &args.common),
        Drill::MachineLoss(args) => emergency(&mut MachineLoss::new(&args), &args.common),
    }
}

fn node_loss(args: &NodeLossArgs, dir: &GridDir, json: bool) -> Result<()> {
    tools::require(args.tools())?;
    let grid = LocalGrid::new(dir.clone());
    grid.wait_until_up()?;
    let nodes = grid.nodes()?;
    if let Some(node) = args.node.filter(|node| !nodes.contains(node)) {
        let ids: Vec<String> = nodes.iter().map(ToString::to_string).collect();
        bail!("this grid has no node {node}; its nodes are {}", ids.join(", "));
    }
    lose_node(&grid, args, json)
}

fn lose_node(grid: &dyn Grid, args: &NodeLossArgs, json: bool) -> Result<()> {
    tools::catch_interrupts()?;
    let work = WorkDir::create(&grid.root(), args.keep)?;
    let pattern = match args.workload {
        Workload::Oltp8k => Some(Pattern::Oltp8k),
        Workload::SeqRead64k => Some(Pattern::SeqRead64k),
        Workload::Film => None,
    };
    let has_passed = if let Some(pattern) = pattern {
        let report = load::run(grid, args, pattern, &work)?;
        report::print(json, &report, || report::load_page(&report))?;
        report.has_passed()
    } else {
        let report = film::run(grid, args, &work)?;
        report::print(json, &report, || report::film_page(&report))?;
        report.has_passed()
    };
    if args.keep {
        eprintln!("kept: the volumes, and logs in {}", work.path().display());
    }
    if !has_passed {
        bail!("the drill did not pass; what failed stands in its report");
    }
    Ok(())
}
