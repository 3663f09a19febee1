//! What guests get: the same fio jobs on the raw file, on qemu-nbd over a file, and on volumes of a grid, in one run.

use super::fio;
use super::grid::{Grid, USUAL};
use super::paired::{Job, OLTP_8K, READ_8K, READ_64K, Run, Target, WRITE_1M, WRITE_8K, compare, fill};
use crate::tools;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

const VOLUME_MIB: u64 = 1536;

const WRITE_ONE_8K: Job =
    Job { name: "8k random write, 1 deep", arguments: &["--rw=randwrite", "--bs=8k", "--iodepth=1"], is_bulk: false };

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
    let run = Run::from(arguments, "./x bench [--maintenance|--tls|--encrypt|--nested|--diskspd|--etcd]")?;
    let dir = std::env::temp_dir().join(format!("holdfast-bench-{}", std::process::id()));
    let mut bench = Bench { grid: Grid::make(&run.binary, dir, USUAL, &[])?, qemu: None };
    let socket = bench.start_qemu()?;
    let targets = bench.targets(&socket)?;
    idle(&bench.grid)?;
    let jobs = [READ_8K, OLTP_8K, WRITE_8K, WRITE_ONE_8K, READ_64K, WRITE_1M];
    compare(&targets, &jobs, &run, VOLUME_MIB, false)?;
    memory(&bench.grid)
}

fn made_file(path: PathBuf) -> Result<PathBuf> {
    tools::output_of(Command::new("fallocate").args(["-l", &format!("{VOLUME_MIB}MiB")]).arg(&path))?;
    Ok(path)
}

impl Bench {
    fn start_qemu(&mut self) -> Result<PathBuf> {
        let dir = self.grid.around();
        let (file, socket) = (made_file(dir.join("qemu.img"))?, dir.join("qemu.sock"));
        self.qemu = Some(start_qemu_nbd(&file, &socket)?);
        Ok(socket)
    }

    /// Makes what is measured, and writes all of it once.
    fn targets(&self, socket: &Path) -> Result<Vec<Target<'_>>> {
        for (name, layout) in [("parity", "parity:2+1"), ("mirror", "mirror:2")] {
            self.grid.create_volume(name, VOLUME_MIB, layout)?;
        }
        let raw = Target::file("raw file", &made_file(self.grid.around().join("raw.img"))?);
        let theirs = fio::nbd(&format!("nbd+unix:///?socket={}", socket.display())).to_vec();
        let durable = raw.arguments.iter().cloned().chain(["--sync=dsync".to_string()]).collect();
        let written = [
            raw,
            Target { name: "qemu-nbd", arguments: theirs, grid: None },
            Target::volume("parity:2+1", &self.grid, "parity"),
            Target::volume("mirror:2", &self.grid, "mirror"),
        ];
        written.iter().try_for_each(|target| fill(target, VOLUME_MIB))?;
        let mut targets = Vec::from(written);
        targets.insert(1, Target { name: "raw, writes durable", arguments: durable, grid: None });
        Ok(targets)
    }
}

fn idle(grid: &Grid) -> Result<()> {
    const IDLE: Duration = Duration::from_secs(15);
    // What the filling left to do in the background is not idleness.
    std::thread::sleep(Duration::from_secs(15));
    let (before, since) = (grid.cpu_ms()?, Instant::now());
    std::thread::sleep(IDLE);
    let after = grid.cpu_ms()?;
    let spent = after.0 - before.0 + after.1 - before.1;
    println!(
        "idle: all processes together take {:.2} % of a core\n",
        spent / since.elapsed().as_millis() as f64 * 100.0
    );
    Ok(())
}

fn memory(grid: &Grid) -> Result<()> {
    let status = grid.status()?;
    let mib = |v: &Value| v["resident_bytes"].as_f64().unwrap_or(0.0) / 1048576.0;
    let nodes = status["nodes"].as_array().map(|n| n.iter().map(mib).fold(0.0, f64::max)).unwrap_or(0.0);
    println!("resident memory afterwards: host {:.0} MiB, largest node {nodes:.0} MiB", mib(&status["host"]));
    Ok(())
}

fn start_qemu_nbd(file: &Path, socket: &Path) -> Result<Child> {
    let mut command = Command::new("qemu-nbd");
    command.args(["--persistent", "--format=raw", "--cache=none", "--aio=io_uring", "--shared=16", "--socket"]);
    let mut child = command.arg(socket).arg(file).spawn().context("cannot start qemu-nbd; ./x setup installs it")?;
    let since = Instant::now();
    while !socket.exists() {
        if since.elapsed() > Duration::from_secs(10) {
            let _ = child.kill();
            let _ = child.wait();
            bail!("qemu-nbd made no socket");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(child)
}
