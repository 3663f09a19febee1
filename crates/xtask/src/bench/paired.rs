//! Targets that take turns, job by job and round by round, with medians side by side: on a shared machine figures drift by the
//! minute, so what counts are ratios within a run, and CPU for each request.

use super::fio;
use super::grid::Grid;
use crate::tools;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};

pub struct Job {
    pub name: &'static str,
    pub arguments: &'static [&'static str],
    /// Megabytes a second tell more than requests a second.
    pub is_bulk: bool,
}

pub const READ_8K: Job = Job { name: "8k random read, 16 deep", arguments: fio::RANDOM_READ_8K, is_bulk: false };

pub const READ_8K_ALONE: Job = Job {
    name: "8k random read, one at a time",
    arguments: &["--rw=randread", "--bs=8k", "--iodepth=1"],
    is_bulk: false,
};

/// 40 % writes.
pub const OLTP_8K: Job = Job { name: "oltp-8k, 16 deep", arguments: fio::OLTP_8K, is_bulk: false };

pub const WRITE_8K: Job =
    Job { name: "8k random write, 16 deep", arguments: &["--rw=randwrite", "--bs=8k", "--iodepth=16"], is_bulk: false };

pub const READ_64K: Job =
    Job { name: "64k sequential read, 16 deep", arguments: &["--rw=read", "--bs=64k", "--iodepth=16"], is_bulk: true };

pub const WRITE_1M: Job =
    Job { name: "1m sequential write, 4 deep", arguments: &["--rw=write", "--bs=1m", "--iodepth=4"], is_bulk: true };

pub struct Target<'a> {
    pub name: &'static str,
    /// Tells fio what it is to use.
    pub arguments: Vec<String>,
    /// Whose processes do the work, where they are ours.
    pub grid: Option<&'a Grid>,
}

impl Target<'_> {
    pub fn volume<'a>(name: &'static str, grid: &'a Grid, volume: &str) -> Target<'a> {
        Target { name, arguments: fio::nbd(&grid.uri(volume)).to_vec(), grid: Some(grid) }
    }

    /// Past the page cache.
    pub fn file(name: &'static str, path: &Path) -> Target<'static> {
        let arguments = vec!["--ioengine=io_uring".to_string(), format!("--filename={}", path.display())];
        Target { name, arguments, grid: None }
    }
}

/// One run of fio, and what it cost.
#[derive(Clone, Copy)]
pub struct Figures {
    pub iops: f64,
    pub megabytes: f64,
    pub mean_us: f64,
    pub p99_us: f64,
    /// CPU for each request.
    pub fio_us: f64,
    pub host_us: f64,
    pub nodes_us: f64,
}

impl Figures {
    pub fn ours_us(&self) -> f64 {
        self.host_us + self.nodes_us
    }
}

/// What to measure, how long, and how often.
pub struct Run {
    pub binary: PathBuf,
    pub seconds: u64,
    pub rounds: usize,
}

impl Run {
    pub fn from(arguments: &[String], usage: &str) -> Result<Run> {
        let (mut binary, mut seconds, mut rounds) = (None, 10, 3);
        let mut words = arguments.iter();
        while let Some(word) = words.next() {
            let mut value = || words.next().with_context(|| format!("{word} needs a value"));
            let number = |text: &str| text.parse::<u64>().ok().filter(|n| *n > 0);
            match word.as_str() {
                "--binary" => binary = Some(PathBuf::from(value()?)),
                "--seconds" => seconds = number(value()?).context("--seconds needs a number")?,
                "--rounds" => rounds = number(value()?).context("--rounds needs a number")?,
                _ => bail!("usage: {usage} [--seconds N] [--rounds N] [--binary FILE]"),
            }
        }
        let binary = match binary {
            Some(binary) => std::path::absolute(binary)?,
            None => tools::build_release()?,
        };
        Ok(Run { binary, seconds, rounds: rounds as usize })
    }
}

/// Writes all of it once.
pub fn fill(target: &Target, size_mib: u64) -> Result<()> {
    eprintln!("bench: writing all of {}", target.name);
    measure(target, size_mib, fio::FILL, None).map(drop)
}

/// Runs fio for some seconds, or once over everything.
pub fn measure(target: &Target, size_mib: u64, job: &[&str], seconds: Option<u64>) -> Result<Figures> {
    let cpu = || target.grid.map_or(Ok((0.0, 0.0)), Grid::cpu_ms);
    let before = cpu()?;
    let mut command = fio::command(size_mib);
    command.args(&target.arguments).args(job).args(seconds.iter().flat_map(|s| fio::timed(*s)));
    let job = fio::report_of(&mut command, target.name)?;
    let after = cpu()?;
    let sum = |key: &str| fio::sum(&job, key);
    let ios = sum("total_ios").max(1.0);
    // Of two directions the mean is weighted; the slower one's percentile is the one that is felt.
    let weighted =
        |d: &str| job[d]["clat_ns"]["mean"].as_f64().unwrap_or(0.0) * job[d]["total_ios"].as_f64().unwrap_or(0.0);
    let p99 = |d: &str| job[d]["clat_ns"]["percentile"]["99.000000"].as_f64().unwrap_or(0.0);
    let fio_share = job["usr_cpu"].as_f64().unwrap_or(0.0) + job["sys_cpu"].as_f64().unwrap_or(0.0);
    Ok(Figures {
        iops: sum("iops"),
        megabytes: sum("bw_bytes") / 1e6,
        mean_us: (weighted("read") + weighted("write")) / ios / 1e3,
        p99_us: p99("read").max(p99("write")) / 1e3,
        fio_us: fio_share / 100.0 * job["job_runtime"].as_f64().unwrap_or(0.0) * 1e3 / ios,
        host_us: (after.0 - before.0) * 1e3 / ios,
        nodes_us: (after.1 - before.1) * 1e3 / ios,
    })
}

/// Runs each job on all targets in turns, another one first in each round, and prints a table for each. The first target
/// is what others are compared with. What a grid has left to do in the background is waited for if `settles`, so that the
/// next target does not bear it.
pub fn compare(targets: &[Target], jobs: &[Job], run: &Run, size_mib: u64, settles: bool) -> Result<()> {
    if settles {
        targets.iter().filter_map(|target| target.grid).try_for_each(Grid::settle)?;
    }
    println!("{} s a job, median of {} rounds, {size_mib} MiB each\n", run.seconds, run.rounds);
    for job in jobs {
        let mut results = vec![Vec::new(); targets.len()];
        for round in 0..run.rounds {
            for place in 0..targets.len() {
                let at = (round + place) % targets.len();
                let target = &targets[at];
                results[at].push(measure(target, size_mib, job.arguments, Some(run.seconds))?);
                if let Some(grid) = target.grid.filter(|_| settles) {
                    grid.settle()?;
                }
            }
        }
        print(job, targets, &results);
    }
    Ok(())
}

fn print(job: &Job, targets: &[Target], results: &[Vec<Figures>]) {
    println!("### {}\n", job.name);
    println!(
        "| target | {} | of {} | mean us | p99 us | CPU us: fio | host | nodes | both | of {} |",
        if job.is_bulk { "MB/s" } else { "IOPS" },
        targets[0].name,
        // A file or somebody else's server tells no CPU.
        targets.iter().find(|target| target.grid.is_some()).map_or("-", |target| target.name)
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    let rate = |r: &Figures| if job.is_bulk { r.megabytes } else { r.iops };
    let first_rate = median(&results[0], rate);
    let ours: Vec<f64> = targets
        .iter()
        .zip(results)
        .filter(|(target, _)| target.grid.is_some())
        .map(|(_, results)| median(results, Figures::ours_us))
        .collect();
    for (target, results) in targets.iter().zip(results) {
        let value = median(results, rate);
        let cpu = match target.grid {
            None => "- | - | - | -".to_string(),
            Some(_) => format!(
                "{:.1} | {:.1} | {:.1} | {:.2}",
                median(results, |r| r.host_us),
                median(results, |r| r.nodes_us),
                median(results, Figures::ours_us),
                median(results, Figures::ours_us) / ours[0]
            ),
        };
        println!(
            "| {} | {value:.0} | {:.2} | {:.0} | {:.0} | {:.1} | {cpu} |",
            target.name,
            value / first_rate,
            median(results, |r| r.mean_us),
            median(results, |r| r.p99_us),
            median(results, |r| r.fio_us),
        );
    }
    println!();
}

pub fn median(results: &[Figures], of: impl Fn(&Figures) -> f64) -> f64 {
    let mut values: Vec<f64> = results.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
