//! `holdfast bench`: the loads of published reports on systems of this kind, on your own grid, each beside what its report says.
//!
//! A benchmark makes volumes of its own, fills them, warms up, runs, and deletes what it made. Its table has the
//! report's figures beside it, for reading: they are of other machines. What compares are the ratios below it, and each has a
//! goal; `--check` fails where one is missed.
//!
//! Sources: vmfleet-4k is the load of a report on Storage Spaces Direct with two nodes of six SSDs; diskspd-8k of one with three nodes
//! and NVMe; xdd-sweep of Violin's block layers on ten servers; vm-farm of scale-out NAS for virtual machines with four
//! and eight nodes.

mod blender;
mod diskspd;
mod farm;
mod fleet;
mod load;
mod page;
mod scratch;
mod setup;
mod sweep;

use crate::drill::tools::{FIO, catch_interrupts, require};
use crate::grid::layout::GridDir;
use anyhow::{Result, bail};
use clap::{Args, Subcommand};
use page::Report;
use scratch::{Scratch, ScratchArgs, Shape};
use setup::Setup;

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    holdfast bench diskspd-8k\n  \
    holdfast bench vmfleet-4k --vms 10 --seconds 60\n  \
    holdfast bench blender --check --json\n\n\
    Figures are of this grid while nothing else uses it. On a machine that shares its cores between clients, host and nodes only\n\
    ratios within a run, and CPU for each request, say much.")]
pub struct BenchArgs {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Args, Clone, Debug)]
struct Common {
    /// Length of each measurement, after as many of warming up, ten at most
    #[arg(long, default_value_t = 20, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    seconds: u64,
    /// As long as the report's: 30 minutes for each measurement
    #[arg(long, conflicts_with = "seconds")]
    full: bool,
    /// Fail where a goal is missed
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    scratch: ScratchArgs,
}

impl Common {
    fn seconds(&self) -> u64 {
        if self.full { 1800 } else { self.seconds }
    }
}

#[derive(Subcommand, Debug)]
enum Bench {
    /// Virtual machines of one image: 4 KiB random, two threads each, 30 in flight; plain and reduced
    #[command(name = "vmfleet-4k")]
    Vmfleet4k(fleet::FleetArgs),
    /// 8 KiB, 70 % reads, 16 threads with 16 each, on a volume and on a file beside the devices
    #[command(name = "diskspd-8k")]
    Diskspd8k(diskspd::DiskspdArgs),
    /// 4 KiB to 1 MiB, sequential and random, reads and writes, by requests in flight
    XddSweep(sweep::SweepArgs),
    /// Threads with 4 and 8 KiB, half of them reads, and how many virtual machines that is
    VmFarm(farm::FarmArgs),
    /// Eight virtual machines, each with one sequential stream, at once
    Blender(blender::BlenderArgs),
}

impl Bench {
    fn common(&self) -> &Common {
        match self {
            Bench::Vmfleet4k(args) => &args.common,
            Bench::Diskspd8k(args) => &args.common,
            Bench::XddSweep(args) => &args.common,
            Bench::VmFarm(args) => &args.common,
            Bench::Blender(args) => &args.common,
        }
    }

    /// Of a grid that is made for it.
    fn shape(&self) -> Shape {
        match self {
            Bench::Vmfleet4k(_) => (2, 6),
            Bench::Diskspd8k(_) | Bench::Blender(_) => (3, 2),
            Bench::XddSweep(_) | Bench::VmFarm(_) => (4, 2),
        }
    }
}

/// Runs a benchmark on the grid in `dir`, or on one that is made for it. An error says that it could not be run, or that a goal was missed.
pub fn run(args: BenchArgs, dir: &GridDir, json: bool) -> Result<()> {
    require(&[FIO])?;
    catch_interrupts()?;
    let common = args.bench.common();
    let scratch = Scratch::begin(&common.scratch, args.bench.shape())?;
    let mut setup = Setup::begin(scratch.as_ref().map_or(dir, Scratch::dir))?;
    let report = match &args.bench {
        Bench::Vmfleet4k(args) => fleet::run(&mut setup, args)?,
        Bench::Diskspd8k(args) => diskspd::run(&mut setup, args)?,
        Bench::XddSweep(args) => sweep::run(&mut setup, args)?,
        Bench::VmFarm(args) => farm::run(&mut setup, args, scratch.as_ref())?,
        Bench::Blender(args) => blender::run(&mut setup, args)?,
    };
    // Before anything is printed, so that what is printed last is the result.
    drop(setup);
    drop(scratch);
    report.print(json)?;
    let missed = Report::missed(&report.goals);
    if common.check && !missed.is_empty() {
        bail!("missed: {}", missed.join("; "));
    }
    Ok(())
}
