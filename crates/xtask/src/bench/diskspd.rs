//! `./x bench --diskspd`: 8 KiB, 70 % reads, sixteen threads with sixteen requests each, as reports on hyper-converged systems have
//! it (DISKSPD `-b8K -w30 -r -t16 -o16`): `mirror:2` on three nodes beside the raw file.

use super::grid::{Grid, Shape};
use super::paired::{Job, Run, Target, compare, fill};
use crate::tools;
use anyhow::Result;
use std::process::Command;

const VOLUME_MIB: u64 = 1536;
const SHAPE: Shape = Shape { nodes: 3, devices: 2, device_mib: 1536 };

const DISKSPD_8K: Job = Job {
    name: "diskspd-8k: 8k random, 70 % reads, 16 threads, each 16 deep",
    arguments: &["--rw=randrw", "--rwmixread=70", "--bs=8k", "--iodepth=16", "--numjobs=16", "--group_reporting=1"],
    is_bulk: false,
};

pub fn run(arguments: &[String]) -> Result<()> {
    let run = Run::from(arguments, "./x bench --diskspd")?;
    let dir = std::env::temp_dir().join(format!("holdfast-bench-{}-diskspd", std::process::id()));
    let grid = Grid::make(&run.binary, dir, SHAPE, &[])?;
    grid.create_volume("v", VOLUME_MIB, "mirror:2")?;
    let raw = grid.around().join("raw.img");
    tools::output_of(Command::new("fallocate").args(["-l", &format!("{VOLUME_MIB}MiB")]).arg(&raw))?;
    let targets = [Target::file("raw file", &raw), Target::volume("mirror:2", &grid, "v")];
    for target in &targets {
        fill(target, VOLUME_MIB)?;
    }
    compare(&targets, &[DISKSPD_8K], &run, VOLUME_MIB, true)
}
