//! `./x bench --encrypt`: what encryption at rest costs, on two volumes of one grid which differ in that alone.

use super::grid::{Grid, Shape, USUAL};
use super::paired::{OLTP_8K, READ_8K, READ_64K, Run, Target, WRITE_1M, WRITE_8K, compare, fill};
use anyhow::Result;
use std::os::unix::fs::OpenOptionsExt;

const VOLUME_MIB: u64 = 512;
const SHAPE: Shape = Shape { device_mib: 1536, ..USUAL };
const LAYOUT: &str = "parity:2+1";

pub fn run(arguments: &[String]) -> Result<()> {
    let run = Run::from(arguments, "./x bench --encrypt")?;
    let dir = std::env::temp_dir().join(format!("holdfast-bench-{}-encrypt", std::process::id()));
    let grid = Grid::make(&run.binary, dir, SHAPE, &[])?;
    let key = grid.around().join("key");
    let mut options = std::fs::OpenOptions::new();
    let file = options.write(true).create_new(true).mode(0o600).open(&key)?;
    // What it is makes no difference to what it costs.
    std::io::Write::write_all(&mut &file, &[7; 32])?;
    let size = format!("{VOLUME_MIB}MiB");
    let create = ["volume", "create", "encrypted", "--size", &size, "--layout", LAYOUT, "--encrypt", "--key-file"];
    grid.create_volume("plain", VOLUME_MIB, LAYOUT)?;
    grid.run(&[&create[..], &[&key.to_string_lossy()]].concat())?;
    let targets = ["plain", "encrypted"].map(|volume| Target::volume(volume, &grid, volume));
    for target in &targets {
        fill(target, VOLUME_MIB)?;
    }
    compare(&targets, &[OLTP_8K, READ_8K, WRITE_8K, READ_64K, WRITE_1M], &run, VOLUME_MIB, true)
}
