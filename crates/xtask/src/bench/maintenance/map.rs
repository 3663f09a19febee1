//! A large thin volume, written to everywhere a little: memory that its map takes, and how long it takes to open.

use super::{LAYOUT, Setup, say};
use crate::bench::fio;
use crate::bench::grid::{Grid, USUAL};
use crate::bench::latency;
use crate::bench::machine::memory_mib;
use crate::bench::report::Report;
use anyhow::{Context, Result, bail};
use std::time::{Duration, Instant};

const VOLUME_MIB: u64 = 1 << 20;
const OPEN_SECONDS_MAX: f64 = 1.0;
const OPENS: usize = 3;
const MIB: f64 = 1048576.0;

pub fn measure(setup: &Setup, report: &mut Report) -> Result<()> {
    let grid = setup.grid("map", setup.options.map_mib, USUAL.nodes, 1.5)?;
    grid.create_volume("thin", VOLUME_MIB, LAYOUT)?;
    grid.settle()?;
    let pid = grid.pid("host")?;
    let before = memory_mib(pid, "VmRSS")?;
    write_everywhere(&grid, setup.options.map_mib, report)?;
    let (at_once, most) = (memory_mib(pid, "VmRSS")?, memory_mib(pid, "VmHWM")?);
    grid.settle()?;
    let after = memory_mib(pid, "VmRSS")?;
    let budget = (grid.host_setting("memory.map_cache")? + grid.host_setting("memory.writeback")?) as f64 / MIB;
    report.told("resident memory of the host before", before, "MiB");
    report.told("right after the last write", at_once, "MiB");
    report.told("at rest", after, "MiB");
    let growth = most - before;
    let goal = format!("map cache and write-back: {budget:.0} MiB");
    report.judged("growth to its peak (VmHWM)", goal, (growth, "MiB"), growth <= budget);
    let live = &grid.volume("thin")?["live"];
    report.told("mapped", live["mapped_bytes"].as_f64().unwrap_or(0.0) / MIB, "MiB");
    report.told("metadata on devices", live["space"]["metadata_bytes"].as_f64().unwrap_or(0.0) / MIB, "MiB");
    opening(&grid, report)
}

/// 4 KiB at random places until enough is mapped.
fn write_everywhere(grid: &Grid, mib: u64, report: &mut Report) -> Result<()> {
    const RUNS_MAX: u32 = 8;
    /// What was written over, or is still in the log, may be missing.
    const ENOUGH: f64 = 0.98;
    let wanted = mib << 20;
    let (since, mut written) = (Instant::now(), 0.0);
    for _ in 0..RUNS_MAX {
        let live = &grid.volume("thin")?["live"];
        let mapped = live["mapped_bytes"].as_u64().context("the volume tells nothing of its map")?;
        if mapped as f64 >= ENOUGH * wanted as f64 {
            report.told("random writes of 4 KiB, 32 deep", written / since.elapsed().as_secs_f64(), "IOPS");
            return Ok(());
        }
        say(&format!("map: {} of {mib} MiB are mapped", mapped >> 20));
        let mut command = fio::command(VOLUME_MIB);
        command.args(fio::nbd(&grid.uri("thin"))).args(["--rw=randwrite", "--bs=4k", "--iodepth=32"]);
        command.arg(format!("--io_size={}", (wanted - mapped).next_multiple_of(4096)));
        written += fio::sum(&fio::report_of(&mut command, "thin")?, "total_ios");
    }
    bail!("not even {RUNS_MAX} runs of fio mapped {mib} MiB")
}

fn opening(grid: &Grid, report: &mut Report) -> Result<()> {
    say("map: opening the volume");
    let goal = format!("under {OPEN_SECONDS_MAX} s");
    let mut exports = Vec::new();
    for _ in 0..OPENS {
        grid.run(&["volume", "unexport", "thin"])?;
        exports.push(export(grid)?);
    }
    let slowest = latency::max(&exports);
    report.judged(
        format!("`volume export` until open, slowest of {OPENS}"),
        &goal,
        (slowest, "s"),
        slowest < OPEN_SECONDS_MAX,
    );
    grid.run(&["grid", "down"])?;
    grid.run(&["grid", "up"])?;
    let seconds = opened_in(&grid.host_log()?, "thin")?;
    report.judged("after a start of the grid, by the host's log", goal, (seconds, "s"), seconds < OPEN_SECONDS_MAX);
    Ok(())
}

fn export(grid: &Grid) -> Result<f64> {
    const PATIENCE: Duration = Duration::from_secs(60);
    let since = Instant::now();
    grid.run(&["volume", "export", "thin"])?;
    while grid.volume("thin")?["state"] != "open" {
        if since.elapsed() > PATIENCE {
            bail!("the volume did not open within {} s", PATIENCE.as_secs());
        }
    }
    Ok(since.elapsed().as_secs_f64())
}

/// Seconds from the last line that tells of the volume's opening to the one that it is open.
pub fn opened_in(log: &str, volume: &str) -> Result<f64> {
    let (opening, open) = (format!(" volume {volume} ("), format!(" volume {volume} is open"));
    let last = |is: &dyn Fn(&str) -> bool| log.lines().rev().find(|l| is(l)).and_then(second_of_day);
    let began = last(&|l| l.contains(&opening) && l.ends_with("is being opened"));
    let ended = last(&|l| l.ends_with(&open));
    let (Some(began), Some(ended)) = (began, ended) else {
        bail!("the host's log does not tell when {volume} was opened")
    };
    const DAY: f64 = 86400.0;
    Ok((ended - began).rem_euclid(DAY))
}

/// Of a line that begins like `2026-11-22T05:39:10.433Z`.
fn second_of_day(line: &str) -> Option<f64> {
    let time = line.split_once('T')?.1.split_once('Z')?.0;
    time.split(':').try_fold(0.0, |sum, part| Some(sum * 60.0 + part.parse::<f64>().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_tells_how_long_opening_took() {
        let log = "2026-11-22T05:39:10.433Z INFO  volume a (b8) is being opened\n2026-11-22T05:39:10.500Z INFO  volume a is open\n\
                   2026-11-22T23:59:59.900Z INFO  volume a (b8) is being opened\n2026-11-23T00:00:00.150Z INFO  volume a is open\n\
                   2026-11-23T00:00:00.160Z INFO  volume a: recovered up to 0\n";
        assert!((opened_in(log, "a").unwrap() - 0.25).abs() < 1e-6);
        assert!(opened_in(log, "b").is_err());
    }
}
