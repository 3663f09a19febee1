//! `./x bench --encrypt`: what encryption at rest costs. Two volumes of one grid, which differ in that alone, take turns job
//! by job; medians are printed, of rates and of CPU for each request.

use super::fio;
use super::grid::Grid;
use super::tls::{JOBS, Run, measure, median};
use anyhow::Result;
use std::os::unix::fs::OpenOptionsExt;

const VOLUME_MIB: u64 = 512;
const DEVICE_MIB: u64 = 1536;

const VOLUMES: [&str; 2] = ["plain", "encrypted"];

pub fn run(arguments: &[String]) -> Result<()> {
    let Run { binary, seconds, rounds } = Run::from(arguments, "--encrypt")?;
    let dir = std::env::temp_dir().join(format!("holdfast-bench-{}-encrypt", std::process::id()));
    let grid = Grid::make(&binary, dir, DEVICE_MIB)?;
    let key = grid.dir().join("key");
    let mut options = std::fs::OpenOptions::new();
    let file = options.write(true).create_new(true).mode(0o600).open(&key)?;
    // What it is makes no difference to what it costs.
    std::io::Write::write_all(&mut &file, &[7; 32])?;
    let size = format!("{VOLUME_MIB}MiB");
    let create = ["volume", "create", VOLUMES[1], "--size", &size, "--layout", "parity:2+1", "--encrypt", "--key-file"];
    grid.create_volume(VOLUMES[0], VOLUME_MIB, "parity:2+1")?;
    grid.done(&[&create[..], &[&key.to_string_lossy()]].concat())?;
    for volume in VOLUMES {
        measure(&grid, volume, VOLUME_MIB, fio::FILL, None)?;
    }
    println!("{seconds} s a job, median of {rounds} rounds, parity:2+1 of {VOLUME_MIB} MiB\n");
    println!("| job | volume | IOPS | CPU us: host | nodes | both |");
    println!("| --- | --- | --- | --- | --- | --- |");
    for (name, job) in JOBS {
        let mut results = [Vec::new(), Vec::new()];
        for _ in 0..rounds.max(1) {
            for (volume, into) in VOLUMES.iter().zip(&mut results) {
                into.push(measure(&grid, volume, VOLUME_MIB, job, Some(seconds))?);
                // What one has left to destage is not to be done in the other's turn.
                grid.settle()?;
            }
        }
        for (volume, results) in VOLUMES.iter().zip(&results) {
            println!(
                "| {name} | {volume} | {:.0} | {:.1} | {:.1} | {:.1} |",
                median(results, |r| r.iops),
                median(results, |r| r.host_us),
                median(results, |r| r.nodes_us),
                median(results, |r| r.host_us + r.nodes_us)
            );
        }
    }
    Ok(())
}
