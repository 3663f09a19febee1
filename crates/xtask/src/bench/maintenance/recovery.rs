//! A host that is killed with its log full: how long it takes until reads are answered again, and whether everything
//! acknowledged is still there.

use super::map::opened_in;
use super::{LAYOUT, Setup, say};
use crate::bench::fio;
use crate::bench::grid::{Grid, USUAL};
use crate::bench::load::Load;
use crate::bench::report::Report;
use anyhow::{Context, Result, bail};
use holdfast_lab::process::{self, Signal};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const SECONDS_MAX: f64 = 2.0;
const MIB: f64 = 1048576.0;

/// Written last before the kill, with checksums; the load leaves it alone.
const WITNESS_MIB: u64 = 16;

/// Patterns of the witness's blocks: a block that holds something else than was written to it is noticed.
const WITNESS: &[&str] = &["--bs=4k", "--iodepth=64", "--verify=crc32c", "--verify_fatal=1", "--verify_state_save=0"];

pub fn measure(setup: &Setup, report: &mut Report) -> Result<()> {
    let size_mib = setup.options.recovery_mib;
    let grid = setup.grid("recovery", size_mib + WITNESS_MIB, USUAL.nodes, 2.5)?;
    if let Some(mib) = setup.options.writeback_mib {
        grid.set_host_setting("memory.writeback", &format!("{mib} MiB"))?;
    }
    grid.create_volume("busy", size_mib + WITNESS_MIB, LAYOUT)?;
    let host = grid.pid("host")?;
    let load = fill_log(setup, &grid, report)?;
    process::signal(host, Signal::KILL)?;
    // A client that has lost its server would wait for it.
    drop(load);
    process::wait_gone(host)?;
    let (open_seconds, read_seconds) = restart(&grid)?;
    let goal = format!("under {SECONDS_MAX} s");
    report.told("opening of the volume, by the host's log", opened_in(&grid.host_log()?, "busy")?, "s");
    report.judged("from `grid up` to a read that is answered", goal, (read_seconds, "s"), read_seconds < SECONDS_MAX);
    report.told("from `grid up` to its end, with all nodes seen", open_seconds, "s");
    if let Some(line) = grid.host_log()?.lines().rev().find(|l| l.contains("volume busy: recovered")) {
        report.remark(format!("The host's log: {line}"));
    }
    verify(&grid, size_mib, report)
}

/// Returns when the log is as full as it gets, and the witness is acknowledged; the load goes on.
fn fill_log(setup: &Setup, grid: &Grid, report: &mut Report) -> Result<Load> {
    const FULL: f64 = 0.95;
    let bound = grid.host_setting("memory.writeback")? as f64;
    let (size_mib, seconds) = (setup.options.recovery_mib, setup.options.log_seconds_max);
    say(&format!("recovery: filling the log, for {seconds} s at most"));
    let block = format!("--bs={}k", setup.options.log_block_kib);
    let job = ["--rw=randwrite", &block, "--iodepth=64"];
    // Longer than needed: the kill ends it.
    let load = Load::start(grid, "busy", size_mib, &job, seconds * 4)?;
    let log_bytes = || -> Result<f64> {
        grid.volume("busy")?["live"]["log_bytes"].as_f64().context("the volume tells nothing of its log")
    };
    let (since, mut most) = (Instant::now(), 0.0f64);
    while most < FULL * bound && since.elapsed() < Duration::from_secs(seconds) {
        std::thread::sleep(Duration::from_millis(200));
        most = most.max(log_bytes()?);
    }
    let mut command = fio::command(WITNESS_MIB);
    command.args(fio::nbd(&grid.uri("busy"))).arg(format!("--offset={size_mib}m"));
    fio::report_of(command.args(["--rw=write", "--do_verify=0"]).args(WITNESS), "the witness")?;
    let last = log_bytes()?;
    report.told("bound of the log", bound / MIB, "MiB");
    report.told("most that it reached", most.max(last) / MIB, "MiB");
    report.told("log right before the kill", last / MIB, "MiB");
    if most.max(last) < FULL * bound {
        report.remark(format!(
            "The log did not come to its bound within {seconds} s: what is written leaves it as fast. A larger --writeback-gib with a larger --device-gib (whose journals hold the log) lets it grow."
        ));
    }
    Ok(load)
}

/// Seconds until everything serves, and until a read is answered.
fn restart(grid: &Grid) -> Result<(f64, f64)> {
    const PATIENCE: Duration = Duration::from_secs(120);
    let since = Instant::now();
    let mut up = grid.command(&["grid", "up"]).stdout(Stdio::null()).spawn().context("cannot start the grid")?;
    let (mut up_seconds, mut read_seconds) = (None, None);
    let outcome = loop {
        if read_seconds.is_none() && reads(grid)? {
            read_seconds = Some(since.elapsed().as_secs_f64());
        }
        match up.try_wait()? {
            Some(status) if !status.success() => break Err(anyhow::anyhow!("`grid up` failed ({status})")),
            Some(_) if up_seconds.is_none() => up_seconds = Some(since.elapsed().as_secs_f64()),
            _ => {}
        }
        if let (Some(up), Some(read)) = (up_seconds, read_seconds) {
            break Ok((up, read));
        }
        if since.elapsed() > PATIENCE {
            break Err(anyhow::anyhow!("nothing could be read {} s after the kill", PATIENCE.as_secs()));
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let _ = up.kill();
    let _ = up.wait();
    outcome
}

/// Whether a client gets its block.
fn reads(grid: &Grid) -> Result<bool> {
    let mut command = Command::new("qemu-io");
    command.args(["-r", "-f", "raw", "-c", "read 0 4k"]).arg(grid.uri("busy"));
    let output = command.output().context("cannot start qemu-io; ./x setup installs it")?;
    Ok(output.status.success() && String::from_utf8_lossy(&output.stdout).contains("read 4096/4096"))
}

fn verify(grid: &Grid, size_mib: u64, report: &mut Report) -> Result<()> {
    let mut command = fio::command(WITNESS_MIB);
    command.args(fio::nbd(&grid.uri("busy"))).arg(format!("--offset={size_mib}m")).arg("--rw=read");
    let outcome = fio::report_of(command.args(WITNESS), "the witness");
    let read = outcome.as_ref().map_or(0.0, |job| fio::sum(job, "io_bytes")) / MIB;
    let what = "acknowledged right before the kill, and there afterwards";
    let is_whole = read == WITNESS_MIB as f64;
    report.judged(what, format!("{WITNESS_MIB} MiB"), (read, "MiB"), is_whole);
    if let Err(error) = outcome {
        bail!("what was acknowledged before the kill can't be read back: {error:#}");
    }
    Ok(())
}
