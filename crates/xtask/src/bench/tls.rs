//! `./x bench --tls`: what TLS between a host and its nodes costs, on two grids beside each other which differ in that alone.

use super::grid::{Grid, Shape, USUAL};
use super::paired::{OLTP_8K, READ_8K, READ_64K, Run, Target, WRITE_1M, WRITE_8K, compare, fill};
use anyhow::Result;

const VOLUME_MIB: u64 = 512;
const SHAPE: Shape = Shape { device_mib: 768, ..USUAL };

pub fn run(arguments: &[String]) -> Result<()> {
    let run = Run::from(arguments, "./x bench --tls")?;
    let dir = |name: &str| std::env::temp_dir().join(format!("holdfast-bench-{}-{name}", std::process::id()));
    let make = |name: &str, tls: &str| Grid::make(&run.binary, dir(name), SHAPE, &["--tls", tls]);
    let grids = [make("plain", "off")?, make("tls", "on")?];
    let targets = [Target::volume("plain", &grids[0], "v"), Target::volume("TLS", &grids[1], "v")];
    for (grid, target) in grids.iter().zip(&targets) {
        grid.create_volume("v", VOLUME_MIB, "parity:2+1")?;
        fill(target, VOLUME_MIB)?;
    }
    compare(&targets, &[OLTP_8K, READ_8K, WRITE_8K, READ_64K, WRITE_1M], &run, VOLUME_MIB, true)
}
