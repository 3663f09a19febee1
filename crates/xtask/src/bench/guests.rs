//! What guests get: the same fio jobs on the raw file, on qemu-nbd over a file, and on volumes of a grid, in one run.
//!
//! On a shared machine figures drift by the minute: targets take turns job by job, every job runs several rounds, and medians
//! are printed. What counts are ratios within a run, and CPU for each request.

use super::fio;
use super::grid::Grid;
use crate::tools;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

const VOLUME_MIB: u64 = 1536;
const DEVICE_MIB: u64 = 2048;

struct Job {
    name: &'static str,
    arguments: &'static [&'static str],
    /// Megabytes a second tell more than requests a second.
    is_bulk: bool,
}

const JOBS: &[Job] = &[
    Job { name: "8k random read, 16 deep", arguments: fio::RANDOM_READ_8K, is_bulk: false },
    Job { name: "oltp-8k, 16 deep", arguments: fio::OLTP_8K, is_bulk: false },
    Job { name: "8k random write, 16 deep", arguments: &["--rw=randwrite", "--bs=8k", "--iodepth=16"], is_bulk: false },
    Job { name: "8k random write, 1 deep", arguments: &["--rw=randwrite", "--bs=8k", "--iodepth=1"], is_bulk: false },
    Job { name: "64k sequential read, 16 deep", arguments: &["--rw=read", "--bs=64k", "--iodepth=16"], is_bulk: true },
    Job { name: "1m sequential write, 4 deep", arguments: &["--rw=write", "--bs=1m", "--iodepth=4"], is_bulk: true },
];

struct Target {
    name: &'static str,
    arguments: Vec<String>,
    /// Whether the grid's processes do the work.
    is_ours: bool,
}

struct Options {
    binary: Option<PathBuf>,
    seconds: u64,
    rounds: usize,
}

/// One run of fio, and what it cost.
#[derive(Clone, Copy, Default)]
struct Figures {
    iops: f64,
    megabytes: f64,
    mean_us: f64,
    p99_us: f64,
    fio_us: f64,
    host_us: f64,
    nodes_us: f64,
}

/// The grid and qemu-nbd, gone when this is dropped.
struct Bench {
    grid: Grid,
    qemu: Option<Child>,
}

impl Drop for Bench {
    fn drop(&mut self) {
        if let Some(qemu) = &mut self.qemu {
            let _ = qemu.kill();
            let _ = qemu.wait();
        }
    }
}

pub fn run(arguments: &[String]) -> Result<()> {
    let options = parse(arguments)?;
    let binary = match &options.binary {
        Some(binary) => std::path::absolute(binary)?,
        None => tools::build_release()?,
    };
    let dir = std::env::temp_dir().join(format!("holdfast-bench-{}", std::process::id()));
    let mut bench = Bench { grid: Grid::make(&binary, dir, DEVICE_MIB)?, qemu: None };
    let targets = bench.set_up()?;
    println!(
        "{} s a job, median of {} rounds, {} MiB each; in {}\n",
        options.seconds,
        options.rounds,
        VOLUME_MIB,
        bench.grid.dir().display()
    );
    bench.idle()?;
    for job in JOBS {
        bench.measure(job, &targets, &options)?;
    }
    bench.memory()
}

fn parse(arguments: &[String]) -> Result<Options> {
    let mut options = Options { binary: None, seconds: 10, rounds: 3 };
    let mut words = arguments.iter();
    while let Some(word) = words.next() {
        if word == "--binary" {
            options.binary = Some(words.next().context("--binary needs a file")?.into());
            continue;
        }
        let mut number = || words.next().and_then(|w| w.parse::<u64>().ok()).filter(|n| *n > 0);
        match word.as_str() {
            "--seconds" => options.seconds = number().context("--seconds needs a number")?,
            "--rounds" => options.rounds = number().context("--rounds needs a number")? as usize,
            _ => bail!(
                "usage: ./x bench [--seconds N] [--rounds N] [--binary FILE], or ./x bench --care|--tls [OPTIONS]"
            ),
        }
    }
    Ok(options)
}

impl Bench {
    /// Makes what is measured, and writes all of it once.
    fn set_up(&mut self) -> Result<Vec<Target>> {
        let size = format!("{VOLUME_MIB}MiB");
        for (name, layout) in [("parity", "parity:2+1"), ("mirror", "mirror:2")] {
            self.grid.create_volume(name, VOLUME_MIB, layout)?;
        }
        let dir = self.grid.dir();
        let (raw, qemu) = (dir.join("raw.img"), dir.join("qemu.img"));
        let socket = dir.join("qemu.sock");
        for file in [&raw, &qemu] {
            tools::output_of(Command::new("fallocate").args(["-l", &size]).arg(file))?;
        }
        self.qemu = Some(start_qemu_nbd(&qemu, &socket)?);
        let file = |more: &[&str]| {
            let mut arguments = vec!["--ioengine=io_uring".to_string(), format!("--filename={}", raw.display())];
            arguments.extend(more.iter().map(ToString::to_string));
            arguments
        };
        let ours = |name: &str| fio::nbd(&self.grid.uri(name)).to_vec();
        let theirs = fio::nbd(&format!("nbd+unix:///?socket={}", socket.display())).to_vec();
        let targets = vec![
            Target { name: "raw file", arguments: file(&[]), is_ours: false },
            Target { name: "raw, writes durable", arguments: file(&["--sync=dsync"]), is_ours: false },
            Target { name: "qemu-nbd", arguments: theirs, is_ours: false },
            Target { name: "parity:2+1", arguments: ours("parity"), is_ours: true },
            Target { name: "mirror:2", arguments: ours("mirror"), is_ours: true },
        ];
        for target in targets.iter().filter(|t| t.name != "raw, writes durable") {
            eprintln!("bench: writing all of {}", target.name);
            self.fio(target, fio::FILL, None)?;
        }
        Ok(targets)
    }

    /// Runs fio for some seconds, or once over everything.
    fn fio(&self, target: &Target, job: &[&str], seconds: Option<u64>) -> Result<Figures> {
        let before = self.grid.cpu_ms()?;
        let mut command = fio::command(VOLUME_MIB);
        command.args(&target.arguments).args(job).args(seconds.iter().flat_map(|s| fio::timed(*s)));
        let job = fio::report_of(&mut command, target.name)?;
        let after = self.grid.cpu_ms()?;
        let sum = |key: &str| fio::sum(&job, key);
        let ios = sum("total_ios").max(1.0);
        // Of two directions the mean is weighted; the slower one's percentile is the one that is felt.
        let weighted =
            |d: &str| job[d]["clat_ns"]["mean"].as_f64().unwrap_or(0.0) * job[d]["total_ios"].as_f64().unwrap_or(0.0);
        let p99 = |d: &str| job[d]["clat_ns"]["percentile"]["99.000000"].as_f64().unwrap_or(0.0);
        let cpu = job["usr_cpu"].as_f64().unwrap_or(0.0) + job["sys_cpu"].as_f64().unwrap_or(0.0);
        let ours = |milliseconds: f64| if target.is_ours { milliseconds * 1e3 / ios } else { 0.0 };
        Ok(Figures {
            iops: sum("iops"),
            megabytes: sum("bw_bytes") / 1e6,
            mean_us: (weighted("read") + weighted("write")) / ios / 1e3,
            p99_us: p99("read").max(p99("write")) / 1e3,
            fio_us: cpu / 100.0 * job["job_runtime"].as_f64().unwrap_or(0.0) * 1e3 / ios,
            host_us: ours(after.0 - before.0),
            nodes_us: ours(after.1 - before.1),
        })
    }

    fn measure(&self, job: &Job, targets: &[Target], options: &Options) -> Result<()> {
        let mut results = vec![Vec::new(); targets.len()];
        for _ in 0..options.rounds {
            for (target, into) in targets.iter().zip(&mut results) {
                into.push(self.fio(target, job.arguments, Some(options.seconds))?);
            }
        }
        println!("### {}\n", job.name);
        println!(
            "| target | {} | of raw | mean us | p99 us | CPU us: fio | host | nodes |",
            if job.is_bulk { "MB/s" } else { "IOPS" }
        );
        println!("| --- | --- | --- | --- | --- | --- | --- | --- |");
        let figure = |r: &Figures| if job.is_bulk { r.megabytes } else { r.iops };
        let raw = median(&results[0], figure);
        for (target, results) in targets.iter().zip(&results) {
            let value = median(results, figure);
            let ours =
                |f: fn(&Figures) -> f64| if target.is_ours { format!("{:.1}", median(results, f)) } else { "-".into() };
            println!(
                "| {} | {value:.0} | {:.2} | {:.0} | {:.0} | {:.1} | {} | {} |",
                target.name,
                value / raw,
                median(results, |r| r.mean_us),
                median(results, |r| r.p99_us),
                median(results, |r| r.fio_us),
                ours(|r| r.host_us),
                ours(|r| r.nodes_us),
            );
        }
        println!();
        Ok(())
    }

    fn idle(&self) -> Result<()> {
        const IDLE: Duration = Duration::from_secs(15);
        // What the filling left to do in the background is not idleness.
        std::thread::sleep(Duration::from_secs(15));
        let (before, since) = (self.grid.cpu_ms()?, Instant::now());
        std::thread::sleep(IDLE);
        let after = self.grid.cpu_ms()?;
        let spent = after.0 - before.0 + after.1 - before.1;
        println!(
            "idle: all processes together take {:.2} % of a core\n",
            spent / since.elapsed().as_millis() as f64 * 100.0
        );
        Ok(())
    }

    fn memory(&self) -> Result<()> {
        let status = self.grid.status()?;
        let mib = |v: &Value| v["resident_bytes"].as_f64().unwrap_or(0.0) / 1048576.0;
        let nodes = status["nodes"].as_array().map(|n| n.iter().map(mib).fold(0.0, f64::max)).unwrap_or(0.0);
        println!("resident memory afterwards: host {:.0} MiB, largest node {nodes:.0} MiB", mib(&status["host"]));
        Ok(())
    }
}

fn median(results: &[Figures], of: impl Fn(&Figures) -> f64) -> f64 {
    let mut values: Vec<f64> = results.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn start_qemu_nbd(file: &Path, socket: &Path) -> Result<Child> {
    let mut command = Command::new("qemu-nbd");
    command.args(["--persistent", "--format=raw", "--cache=none", "--aio=io_uring", "--shared=16", "--socket"]);
    let child = command.arg(socket).arg(file).spawn().context("cannot start qemu-nbd; ./x setup installs it")?;
    let since = Instant::now();
    while !socket.exists() {
        if since.elapsed() > Duration::from_secs(10) {
            bail!("qemu-nbd made no socket");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(child)
}
