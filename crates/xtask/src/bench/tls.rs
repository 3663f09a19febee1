//! `./x bench --tls`: what TLS between a host and its nodes costs. Two grids beside each other, which differ in that alone,
//! take turns job by job; medians are printed, of rates and of CPU for each request.

use super::fio;
use super::grid::Grid;
use crate::tools;
use anyhow::{Context, Result, bail};
use std::path::PathBuf;

const VOLUME_MIB: u64 = 512;
const DEVICE_MIB: u64 = 768;

pub const JOBS: &[(&str, &[&str])] = &[
    ("8k random read, 16 deep", fio::RANDOM_READ_8K),
    ("8k random write, 16 deep", &["--rw=randwrite", "--bs=8k", "--iodepth=16"]),
    ("64k sequential read, 16 deep", &["--rw=read", "--bs=64k", "--iodepth=16"]),
    ("1m sequential write, 4 deep", &["--rw=write", "--bs=1m", "--iodepth=4"]),
];

/// One run of fio: requests a second, and CPU for each.
#[derive(Clone, Copy)]
pub struct Figures {
    pub iops: f64,
    pub host_us: f64,
    pub nodes_us: f64,
}

/// What to measure, how long, and how often.
pub struct Run {
    pub binary: PathBuf,
    pub seconds: u64,
    pub rounds: usize,
}

impl Run {
    pub fn from(arguments: &[String], which: &str) -> Result<Run> {
        let (mut binary, mut seconds, mut rounds) = (None, 10, 3);
        let mut words = arguments.iter();
        while let Some(word) = words.next() {
            let value = words.next().with_context(|| format!("{word} needs a value"))?;
            match word.as_str() {
                "--binary" => binary = Some(PathBuf::from(value)),
                "--seconds" => seconds = value.parse().context("--seconds needs a number")?,
                "--rounds" => rounds = value.parse().context("--rounds needs a number")?,
                _ => bail!("usage: ./x bench {which} [--seconds N] [--rounds N] [--binary FILE]"),
            }
        }
        let binary = match binary {
            Some(binary) => std::path::absolute(binary)?,
            None => tools::build_release()?,
        };
        Ok(Run { binary, seconds, rounds })
    }
}

pub fn run(arguments: &[String]) -> Result<()> {
    let Run { binary, seconds, rounds } = Run::from(arguments, "--tls")?;
    let dir = |name: &str| std::env::temp_dir().join(format!("holdfast-bench-{}-{name}", std::process::id()));
    let make = |name: &str, tls: &str| Grid::make_with(&binary, dir(name), DEVICE_MIB, &["--tls", tls]);
    let grids = [make("plain", "off")?, make("tls", "on")?];
    for grid in &grids {
        grid.create_volume("v", VOLUME_MIB, "parity:2+1")?;
        measure(grid, "v", VOLUME_MIB, fio::FILL, None)?;
    }
    println!("{seconds} s a job, median of {rounds} rounds, parity:2+1 of {VOLUME_MIB} MiB\n");
    println!("| job | links | IOPS | CPU us: host | nodes | both |");
    println!("| --- | --- | --- | --- | --- | --- |");
    for (name, job) in JOBS {
        let mut results = [Vec::new(), Vec::new()];
        for _ in 0..rounds.max(1) {
            for (grid, into) in grids.iter().zip(&mut results) {
                into.push(measure(grid, "v", VOLUME_MIB, job, Some(seconds))?);
            }
        }
        for (links, results) in ["plain", "TLS"].iter().zip(&results) {
            println!(
                "| {name} | {links} | {:.0} | {:.1} | {:.1} | {:.1} |",
                median(results, |r| r.iops),
                median(results, |r| r.host_us),
                median(results, |r| r.nodes_us),
                median(results, |r| r.host_us + r.nodes_us)
            );
        }
    }
    Ok(())
}

/// Runs fio for some seconds, or once over everything.
pub fn measure(grid: &Grid, volume: &str, size_mib: u64, job: &[&str], seconds: Option<u64>) -> Result<Figures> {
    let before = grid.cpu_ms()?;
    let mut command = fio::command(size_mib);
    command.args(fio::nbd(&grid.uri(volume))).args(job).args(seconds.iter().flat_map(|s| fio::timed(*s)));
    let report = fio::report_of(&mut command, "the volume")?;
    let after = grid.cpu_ms()?;
    let ios = fio::sum(&report, "total_ios").max(1.0);
    Ok(Figures {
        iops: fio::sum(&report, "iops"),
        host_us: (after.0 - before.0) * 1e3 / ios,
        nodes_us: (after.1 - before.1) * 1e3 / ios,
    })
}

pub fn median(results: &[Figures], of: impl Fn(&Figures) -> f64) -> f64 {
    let mut values: Vec<f64> = results.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
