//! A node that does not come back: how fast what it held is made again, with guests idle and under load.

use super::{Setup, remove, say};
use crate::bench::fio;
use crate::bench::grid::{Grid, USUAL, cpu_ms};
use crate::bench::latency::{self, Completion, SECOND_MS, Spread};
use crate::bench::load::Load;
use crate::bench::machine::{Ticks, cores, unix_ms};
use crate::bench::report::Report;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::process::Command;
use std::time::{Duration, Instant};

const VOLUME: &str = "guest";
const BANDWIDTH_RATIO_MIN: f64 = 0.5;
/// Processors that are busy for this part of the time are what binds.
const CPU_BOUND: f64 = 0.9;
const P99_FACTOR_MAX: f64 = 1.2;
const POLL: Duration = Duration::from_millis(100);

/// Right after a loss requests wait for what is gone; that is the drill's to measure.
const AFTER_LOSS_MS: u64 = 2000;

/// The slowest that a rebuild is steered to while guests are at work; a second with so many times as much counts as one at that
/// pace, since a shard is half of what is allowed in it.
const FLOOR_BYTES: f64 = (4 << 20) as f64;
const FLOOR_FACTOR: f64 = 1.6;

/// The grid at one moment.
#[derive(Clone, Copy)]
struct Sample {
    at: Instant,
    unix_ms: u64,
    rebuilt: u64,
    degraded: u64,
    cpu_ms: f64,
    /// On devices that serve.
    used_bytes: f64,
    shards: f64,
    machine: Ticks,
}

impl Sample {
    fn take(grid: &Grid) -> Result<Sample> {
        let status = grid.status()?;
        let volumes = status["volumes"].as_array().context("status lists no volumes")?;
        let live = &volumes.iter().find(|v| v["name"] == VOLUME).context("the volume is gone")?["live"];
        let devices: Vec<&Value> = status["nodes"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|n| n["devices"].as_array())
            .flatten()
            .collect();
        let number = |d: &Value, key: &str| d[key].as_f64().unwrap_or(0.0);
        let (host, nodes) = cpu_ms(&status)?;
        Ok(Sample {
            at: Instant::now(),
            unix_ms: unix_ms(),
            rebuilt: live["counters"]["shards_rebuilt"].as_u64().context("the volume tells no rebuilt shards")?,
            degraded: live["degraded_segments"].as_u64().context("the volume tells no degraded segments")?,
            cpu_ms: host + nodes,
            used_bytes: devices.iter().map(|d| number(d, "capacity_bytes") - number(d, "free_bytes")).sum(),
            shards: devices.iter().map(|d| number(d, "shards")).sum(),
            machine: Ticks::now()?,
        })
    }
}

/// Shards that are read for each that is made again, in the layout of the volume.
const SHARDS_READ: f64 = 2.0;

/// One rebuild, from the first shard to the last.
struct Rebuild {
    killed_ms: u64,
    first: Sample,
    last: Sample,
    /// When nine of ten degraded segments were whole again.
    mostly: Option<Instant>,
    shard_bytes: f64,
    is_whole: bool,
    /// Shards made again so far, at each look.
    seen: Vec<(u64, u64)>,
}

impl Rebuild {
    /// How many bytes were made again in the second that begins then.
    fn bytes_in_second(&self, from_ms: u64) -> f64 {
        let until =
            |ms: u64| self.seen.iter().take_while(|(at, _)| *at <= ms).last().map_or(0, |(_, rebuilt)| *rebuilt);
        until(from_ms + SECOND_MS).saturating_sub(until(from_ms).max(self.first.rebuilt)) as f64 * self.shard_bytes
    }

    /// Completions of the seconds in which it went at its slowest, and how many seconds these are.
    fn at_floor(&self, completions: &[Completion]) -> (Vec<Completion>, usize) {
        let (first, last) = (self.first.unix_ms, self.last.unix_ms);
        let is_slow = |from: &u64| self.bytes_in_second(*from) <= FLOOR_FACTOR * FLOOR_BYTES;
        let slow: Vec<u64> =
            (first..last.saturating_sub(SECOND_MS)).step_by(SECOND_MS as usize).filter(is_slow).collect();
        let lies_in = |at: u64| slow.iter().any(|from| (*from..*from + SECOND_MS).contains(&at));
        (completions.iter().filter(|c| lies_in(c.at_ms)).copied().collect(), slow.len())
    }

    fn seconds(&self) -> f64 {
        self.last.at.duration_since(self.first.at).as_secs_f64()
    }

    fn bytes(&self) -> f64 {
        (self.last.rebuilt - self.first.rebuilt) as f64 * self.shard_bytes
    }

    fn megabytes_per_second(&self) -> f64 {
        self.bytes() / self.seconds() / 1e6
    }

    /// Of all cores' time: what the grid's processes took.
    fn cpu(&self) -> f64 {
        (self.last.cpu_ms - self.first.cpu_ms) / 1e3 / self.seconds() / cores()
    }

    /// Of all cores' time: in which they had work, whoever's.
    fn machine(&self) -> f64 {
        self.last.machine.busy_since(self.first.machine)
    }

    fn tell(&self, report: &mut Report, how: &str) {
        report.told(format!("made again, {how}"), self.bytes() / 1048576.0, "MiB");
        report.told(format!("from the first shard to the last, {how}"), self.seconds(), "s");
        if let Some(mostly) = self.mostly {
            let seconds = mostly.duration_since(self.first.at).as_secs_f64();
            report.told(format!("until nine of ten degraded segments were whole, {how}"), seconds, "s");
        }
        report.told(format!("made again a second, {how}"), self.megabytes_per_second(), "MB/s");
        report.told(format!("processes of the grid, {how}, of {} cores", cores()), self.cpu() * 100.0, "%");
        report.told(format!("all processes, {how}, of {} cores", cores()), self.machine() * 100.0, "%");
        if !self.is_whole {
            let left = self.last.degraded;
            report.remark(format!("The rebuild, {how}, was not done in time: {left} segments were still degraded."));
        }
    }
}

pub fn measure(setup: &Setup, report: &mut Report) -> Result<()> {
    let options = &setup.options;
    // All of it has to fit on the nodes that are left, and be overwritten there.
    let grid = setup.grid("rebuild", options.rebuild_mib, USUAL.nodes - 1, 1.6)?;
    grid.set_host_setting("care.rebuild_after", &format!("{} s", options.grace_seconds))?;
    setup.filled_volume(&grid, VOLUME, options.rebuild_mib)?;
    grid.settle()?;
    let lost = idle(setup, &grid, report)?;
    say(&format!("rebuild: node {lost} comes back"));
    grid.run(&["node", "start", &lost])?;
    grid.settle()?;
    loaded(setup, &grid, report)
}

/// Returns the node that was lost.
fn idle(setup: &Setup, grid: &Grid, report: &mut Report) -> Result<String> {
    let before = bandwidth(setup, grid)?;
    let lost = fullest_node(grid)?;
    let rebuild = kill_and_watch(setup, grid, &lost, || Ok(()))?;
    let after = bandwidth(setup, grid)?;
    rebuild.tell(report, "guests idle");
    report.told("the same by what devices hold more", used_more_bytes(&rebuild) / 1048576.0, "MiB");
    for (bandwidth, when) in [(&before, "before"), (&after, "afterwards")] {
        let how = "with O_DIRECT on the same file system";
        report.told(format!("reads of 1 MiB in sequence {how}, {when}"), bandwidth.reads, "MB/s");
        report.told(format!("writes of 1 MiB in sequence {how}, with fdatasync, {when}"), bandwidth.writes, "MB/s");
    }
    judge_bandwidth(&rebuild, &[before, after], report);
    Ok(lost)
}

fn used_more_bytes(rebuild: &Rebuild) -> f64 {
    rebuild.last.used_bytes - rebuild.first.used_bytes
}

fn judge_bandwidth(rebuild: &Rebuild, raw: &[Bandwidth], report: &mut Report) {
    // The lower of two counts: of shards by their mean size, and of what devices hold more.
    let megabytes = rebuild.bytes().min(used_more_bytes(rebuild)) / 1e6;
    let seconds: f64 = raw.iter().map(|raw| megabytes * SHARDS_READ / raw.reads + megabytes / raw.writes).sum();
    let ratio = seconds / raw.len() as f64 / rebuild.seconds();
    let (what, goal) = (
        "time for the same bytes in sequence, two read for each written, to that of the rebuild, guests idle",
        format!("at least {BANDWIDTH_RATIO_MIN}, or processors saturated ({:.0} %)", CPU_BOUND * 100.0),
    );
    let is_saturated = rebuild.machine() >= CPU_BOUND;
    // Where others keep the processors busy, the grid gets what they leave.
    let is_ours = rebuild.cpu() >= rebuild.machine() / 2.0;
    let is_disk_bound = ratio >= BANDWIDTH_RATIO_MIN;
    if is_saturated && !is_ours && !is_disk_bound {
        report.told(what, ratio, "times");
        let why = "other programs than the grid's saturated the processors; repeat it on a quieter machine";
        return report.unmeasured("the same, judged", goal, why);
    }
    report.judged(what, goal, (ratio, "times"), is_disk_bound || is_saturated);
    report.remark(match (is_saturated, is_disk_bound) {
        (true, _) => "With guests idle the processors bind.",
        (false, true) => "With guests idle the disk binds.",
        (false, false) => {
            "With guests idle neither processors nor the disk's bandwidth bind: the rebuild's own pace, or latencies."
        }
    });
}

fn loaded(setup: &Setup, grid: &Grid, report: &mut Report) -> Result<()> {
    let options = &setup.options;
    let lost = fullest_node(grid)?;
    let most = options.grace_seconds * 4 + options.rebuild_seconds_max;
    let mut load = Load::start(grid, VOLUME, options.rebuild_mib, fio::OLTP_8K, most)?;
    // What the load does at first is no measure.
    std::thread::sleep(Duration::from_millis(AFTER_LOSS_MS));
    say(&format!("rebuild: oltp-8k for {} s with all nodes", options.grace_seconds));
    let up_ms = unix_ms();
    std::thread::sleep(Duration::from_secs(options.grace_seconds));
    let rebuild = kill_and_watch(setup, grid, &lost, || {
        if !load.is_running()? {
            bail!("the load ended before the rebuild did");
        }
        Ok(())
    })?;
    say(&format!("rebuild: oltp-8k for {} s with the node gone and nothing left to make again", options.grace_seconds));
    std::thread::sleep(Duration::from_secs(options.grace_seconds));
    let completions = load.stop()?;
    rebuild.tell(report, "under oltp-8k");
    phases(&completions, up_ms, &rebuild, report);
    Ok(())
}

fn phases(completions: &[Completion], up_ms: u64, rebuild: &Rebuild, report: &mut Report) {
    let (killed, first, last) = (rebuild.killed_ms, rebuild.first.unix_ms, rebuild.last.unix_ms);
    let mut tell = |name: &str, from: u64, to: u64| -> Option<Spread> {
        let spread = latency::spread(completions, from, to);
        match &spread {
            Some(spread) => {
                report.told(format!("oltp-8k, {name}"), spread.per_second, "IOPS");
                report.told(format!("p99, {name}"), spread.p99_us, "us");
                report.told(format!("p99 of single seconds, {name}, median"), spread.median_second_us, "us");
                report.told(format!("p99 of single seconds, {name}, worst"), spread.worst_second_us, "us");
            }
            None => report.remark(format!("No whole second of the load, {name}.")),
        }
        spread
    };
    tell("all nodes up", up_ms, killed);
    tell("node gone, before the grace time ended", killed + AFTER_LOSS_MS, first);
    let while_rebuilding = tell("while rebuilding", first, last);
    tell("node gone, all made again", last, completions.iter().map(|c| c.at_ms).max().unwrap_or(last));
    // The load overwrites, and the more it has overwritten the more is cleaned: what lies on both sides of the rebuild counts.
    let lies_beside = |at: u64| (killed + AFTER_LOSS_MS..first).contains(&at) || at >= last;
    let beside = latency::p99_us(completions.iter().filter(|c| lies_beside(c.at_ms)));
    let (what, goal) = ("p99 while rebuilding to p99 with the node gone", format!("at most {P99_FACTOR_MAX}"));
    let (slow, seconds) = rebuild.at_floor(completions);
    match (beside, while_rebuilding) {
        (Some(gone_us), Some(rebuilding)) => {
            report.told(what, rebuilding.p99_us / gone_us, "times");
            let what = format!("{what}, in {seconds} s at the floor rate (4 MiB a second)");
            match latency::p99_us(&slow).map(|p99_us| p99_us / gone_us) {
                Some(factor) => report.judged(what, goal, (factor, "times"), factor <= P99_FACTOR_MAX),
                None => report.unmeasured(what, goal, "it was never as slow as that, since guests did not feel it"),
            }
        }
        _ => report.unmeasured(
            what,
            goal,
            "a phase was shorter than a second; give a larger --rebuild-gib or --grace-seconds",
        ),
    }
    if last < first + 5 * SECOND_MS {
        report.remark("The rebuild under load took less than five seconds: a larger --rebuild-gib tells more.");
    }
}

/// The node that holds most shards; its loss is felt most.
fn fullest_node(grid: &Grid) -> Result<String> {
    let status = grid.status()?;
    let nodes = status["nodes"].as_array().context("status lists no nodes")?;
    let shards = |n: &&Value| -> u64 {
        n["devices"].as_array().into_iter().flatten().filter_map(|d| d["shards"].as_u64()).sum()
    };
    let fullest = nodes.iter().max_by_key(shards).context("the grid has no nodes")?;
    Ok(fullest["id"].as_u64().context("a node has no number")?.to_string())
}

/// `check` is asked now and then whether it makes sense to go on.
fn kill_and_watch(setup: &Setup, grid: &Grid, node: &str, mut check: impl FnMut() -> Result<()>) -> Result<Rebuild> {
    let before = Sample::take(grid)?;
    // Shards of one volume are of one size but for the last ones of a stream: the mean is what one takes.
    let shard_bytes = before.used_bytes / before.shards.max(1.0);
    let killed_ms = unix_ms();
    grid.run(&["node", "kill", node])?;
    let (grace, most) = (setup.options.grace_seconds, setup.options.rebuild_seconds_max);
    say(&format!("rebuild: node {node} is killed; {grace} s until what it held is made again"));
    let since = Instant::now();
    let mut first = Sample::take(grid)?;
    loop {
        std::thread::sleep(POLL);
        check()?;
        let sample = Sample::take(grid)?;
        // What was in the making when the node went is repaired at once; what it held waits for the grace time.
        let is_grace = since.elapsed() < Duration::from_secs(grace.saturating_sub(1));
        let has_begun = !is_grace && sample.rebuilt > first.rebuilt;
        if has_begun {
            return watch(first, (killed_ms, shard_bytes), Duration::from_secs(most), grid, check);
        }
        if since.elapsed() > Duration::from_secs(grace * 2 + 60) {
            bail!("no shard was made again {} s after the loss of node {node}", since.elapsed().as_secs());
        }
        first = sample;
    }
}

fn watch(
    first: Sample,
    (killed_ms, shard_bytes): (u64, f64),
    most: Duration,
    grid: &Grid,
    mut check: impl FnMut() -> Result<()>,
) -> Result<Rebuild> {
    say("rebuild: shards are made again");
    let (since, mut mostly, mut seen) = (Instant::now(), None, Vec::new());
    loop {
        let last = Sample::take(grid)?;
        seen.push((last.unix_ms, last.rebuilt));
        let is_whole = last.degraded == 0;
        if mostly.is_none() && last.degraded <= first.degraded / 10 {
            mostly = Some(last.at);
        }
        if is_whole || since.elapsed() > most {
            return Ok(Rebuild { killed_ms, first, last, mostly, shard_bytes, is_whole, seen });
        }
        check()?;
        std::thread::sleep(POLL);
    }
}

/// What the devices' file system does in sequence, in megabytes a second.
struct Bandwidth {
    reads: f64,
    writes: f64,
}

fn bandwidth(setup: &Setup, grid: &Grid) -> Result<Bandwidth> {
    const FILE_MIB: u64 = 1024;
    say("rebuild: measuring the file system");
    let path = grid.around().join("raw.img");
    let run = |kind: &[&str], more: &[String]| {
        let mut command = Command::new("fio");
        command.args(["--name=bench", "--output-format=json", "--direct=1", "--ioengine=io_uring", "--iodepth=4"]);
        command.args(["--bs=1m"]).args(kind).arg(format!("--size={FILE_MIB}m"));
        command.arg(format!("--filename={}", path.display())).args(more);
        anyhow::Ok(fio::sum(&fio::report_of(&mut command, "the raw file")?, "bw_bytes") / 1e6)
    };
    let (write, timed) = (["--rw=write", "--fdatasync=16"], fio::timed(setup.options.seconds));
    // Once over all of it, so that blocks are allocated as the devices' are.
    run(&write, &[])?;
    let bandwidth = Bandwidth { writes: run(&write, &timed)?, reads: run(&["--rw=read"], &timed)? };
    remove(&path)?;
    Ok(bandwidth)
}
