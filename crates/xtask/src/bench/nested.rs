//! `./x bench --nested`: nested layouts beside a mirror, on two nodes of three devices.

use super::fio;
use super::grid::{Grid, Shape};
use super::paired::{Job, READ_8K, Run, Target, compare, fill};
use anyhow::Result;

const VOLUME_MIB: u64 = 512;
const SHAPE: Shape = Shape { nodes: 2, devices: 3, device_mib: 1536 };

/// The first is what others are compared with.
const LAYOUTS: [&str; 3] = ["mirror:2", "nested-mirror", "nested-parity:2+1"];

const MIXED_8K: Job = Job { name: "8k random, 70 % reads, 16 deep", arguments: fio::MIXED_8K, is_bulk: false };

pub fn run(arguments: &[String]) -> Result<()> {
    let run = Run::from(arguments, "./x bench --nested")?;
    let dir = std::env::temp_dir().join(format!("holdfast-bench-{}-nested", std::process::id()));
    let grid = Grid::make(&run.binary, dir, SHAPE, &[])?;
    let mut targets = Vec::new();
    for (n, layout) in LAYOUTS.into_iter().enumerate() {
        let volume = format!("v{n}");
        grid.create_volume(&volume, VOLUME_MIB, layout)?;
        let target = Target::volume(layout, &grid, &volume);
        fill(&target, VOLUME_MIB)?;
        targets.push(target);
    }
    compare(&targets, &[READ_8K, MIXED_8K], &run, VOLUME_MIB, true)
}
