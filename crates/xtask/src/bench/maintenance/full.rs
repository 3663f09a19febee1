//! A pool that is filled until nothing more fits, its host killed meanwhile, and emptied again: what was acknowledged is there,
//! every byte is accounted for, and in the end as much is free as at the beginning.

use super::{LAYOUT, Setup, say, writable_mib};
use crate::bench::fio;
use crate::bench::grid::{Grid, Shape};
use crate::bench::load::Load;
use crate::bench::report::Report;
use anyhow::{Context, Result, bail, ensure};
use holdfast_lab::process::{self, Signal};
use serde_json::Value;
use std::time::{Duration, Instant};

const ROUNDS: u64 = 5;

/// What `space why` may call "on the way", besides headers.
const OTHER_MAX: i64 = 16 << 20;
const MIB: u64 = 1 << 20;

/// What stays in use of an empty volume: a checkpoint or two, with what devices set aside for each shard.
const LEFT_MAX_MIB: f64 = 2.0;

/// Blocks that are checked carry their own checksums.
const CHECKED: &[&str] = &["--verify=crc32c", "--verify_interval=4k", "--verify_fatal=1", "--verify_state_save=0"];

/// Writes in order; so much may be in flight when the first of them finds no room.
const FILL: &[&str] = &["--rw=write", "--bs=256k", "--iodepth=8", "--do_verify=0"];
const IN_FLIGHT_MIB: u64 = 2;

/// While it is full, the last quarter of what fits is overwritten at random.
const BRIM: &[&str] = &["--rw=randwrite", "--bs=4k", "--iodepth=16", "--do_verify=0"];
const BRIM_FOR: Duration = Duration::from_secs(5);

/// Of that quarter the beginning is trimmed first, and written last before the kill, with a pattern that differs by round: what
/// was acknowledged a moment ago lies in the log only.
const TRIMMED_MIB: u64 = 32;
const WITNESS_MIB: u64 = 4;

/// Space is free when cleaning and a checkpoint have been there.
const FREED_WITHIN: Duration = Duration::from_secs(60);

/// What has not changed for so long is at rest.
const REST: Duration = Duration::from_secs(3);

pub fn measure(setup: &Setup, report: &mut Report) -> Result<()> {
    let shape = Shape { nodes: 4, devices: 1, device_mib: setup.options.device_mib_min };
    say(&format!("full: making a grid of 4 nodes with a device of {} MiB each", shape.device_mib));
    let grid = Grid::make(&setup.binary, setup.dir.path().join("full"), shape, &[])?;
    // More than fits.
    let size_mib = shape.nodes * shape.device_mib;
    grid.create_volume("v", size_mib, LAYOUT)?;
    let begun_with = space(&grid)?;
    report.told("can be written, by `holdfast space`", writable_mib(&grid)?, "MiB");
    let (mut least, mut most, mut amiss, mut left) = (f64::MAX, 0.0_f64, 0, 0.0_f64);
    let mut overwritten = 0;
    for round in 1..=ROUNDS {
        say(&format!("full: round {round} of {ROUNDS}"));
        let acknowledged = fill_up(&grid, size_mib)?;
        (least, most) = (least.min(acknowledged as f64), most.max(acknowledged as f64));
        amiss += u64::from(!adds_up(&space(&grid)?)?);
        overwritten += kill_while_full(&grid, acknowledged, round)?;
        verify(&grid, acknowledged, round)?;
        amiss += u64::from(!adds_up(&space(&grid)?)?);
        left = left.max(empty(&grid, size_mib, &begun_with)?);
        amiss += u64::from(!adds_up(&space(&grid)?)?);
    }
    report.told("least that fitted", least, "MiB");
    report.told("most that fitted", most, "MiB");
    report.told("writes while full", overwritten as f64, "");
    report.told("rounds whose data was all there after kill -9, or this report would end here", ROUNDS as f64, "");
    report.judged("looks at `space why` that do not add up", "0", (amiss as f64, ""), amiss == 0);
    report.judged(
        "more in use than at the beginning",
        format!("at most {LEFT_MAX_MIB} MiB"),
        (left, "MiB"),
        left <= LEFT_MAX_MIB,
    );
    Ok(())
}

fn space(grid: &Grid) -> Result<Value> {
    grid.json(&["space", "why"])
}

fn number(of: &Value, key: &str) -> Result<i64> {
    of[key].as_i64().with_context(|| format!("`holdfast space` tells no {key}"))
}

/// To the byte, and what no other line of the account explains is headers of shards and little else: a hundredth of what is in
/// use, more where segments are short, and what is on its way to or from devices.
fn adds_up(space: &Value) -> Result<bool> {
    let listed = |of: &Value| of.as_array().into_iter().flatten().filter_map(|pair| pair[1].as_i64()).sum::<i64>();
    let of = |keys: &[&str]| keys.iter().map(|key| number(space, key)).sum::<Result<i64>>();
    let parts = ["overhead_bytes", "used_bytes", "reserve_bytes", "spare_bytes", "free_bytes"];
    let whole = of(&parts)? + listed(&space["set_aside"]) == number(space, "raw_bytes")?;
    let used = &space["used"];
    let lists: i64 = ["data", "snapshots", "kept"].iter().map(|key| listed(&used[*key])).sum();
    let keys = ["dead_bytes", "redundancy_bytes", "metadata_bytes", "other_bytes"];
    let known = keys.iter().map(|key| number(used, key)).sum::<Result<i64>>()?;
    let (used_bytes, other) = (number(space, "used_bytes")?, number(used, "other_bytes")?);
    let is_small = (-OTHER_MAX..=used_bytes * 3 / 100 + OTHER_MAX).contains(&other);
    Ok(whole && is_small && lists + known == used_bytes)
}

fn job(grid: &Grid, size_mib: u64, arguments: &[&str]) -> std::process::Command {
    let mut command = fio::command(size_mib);
    command.args(fio::nbd(&grid.uri("v"))).args(arguments).args(CHECKED);
    command
}

/// Until there is no room; MiB that were acknowledged, from the volume's beginning on.
fn fill_up(grid: &Grid, size_mib: u64) -> Result<u64> {
    const ENOSPC: i64 = 28;
    let output = job(grid, size_mib, FILL).output().context("cannot start fio; ./x setup installs it")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let at = text.find('{').context("fio printed no report")?;
    let report: Value = serde_json::from_str(&text[at..]).context("fio printed something that is not JSON")?;
    let (error, written) = (report["jobs"][0]["error"].as_i64(), &report["jobs"][0]["write"]["io_bytes"]);
    if error != Some(ENOSPC) {
        bail!("a volume that is larger than the pool was written with error {error:?}, not with ENOSPC");
    }
    let written = written.as_u64().context("fio tells nothing of what it wrote")? / MIB;
    written.checked_sub(IN_FLIGHT_MIB).context("nothing fitted at all")
}

/// How many writes were done while it was full.
fn kill_while_full(grid: &Grid, acknowledged_mib: u64, round: u64) -> Result<u64> {
    let at = acknowledged_mib * 3 / 4;
    trim(grid, at, TRIMMED_MIB)?;
    let offset = format!("--offset={}m", at + TRIMMED_MIB);
    let arguments: Vec<&str> = BRIM.iter().copied().chain(CHECKED.iter().copied()).chain([offset.as_str()]).collect();
    let writes = || grid.volume("v")?["live"]["counters"]["writes"].as_u64().context("the volume counts no writes");
    let before = writes()?;
    let size_mib = acknowledged_mib - at - TRIMMED_MIB;
    let mut load = Load::start(grid, "v", size_mib, &arguments, 10 * BRIM_FOR.as_secs())?;
    std::thread::sleep(BRIM_FOR);
    let done = writes()? - before;
    ensure!(load.is_running()?, "writing while full ended by itself: it got an error");
    fio::report_of(&mut witness(grid, at, round, "--rw=write"), "the witness")?;
    let host = grid.pid("host")?;
    process::signal(host, Signal::KILL)?;
    // A client that has lost its server would wait for it.
    drop(load);
    process::wait_gone(host)?;
    grid.run(&["grid", "up"])?;
    Ok(done)
}

/// Writes, or reads and compares.
fn witness(grid: &Grid, at_mib: u64, round: u64, how: &str) -> std::process::Command {
    let mut command = fio::command(WITNESS_MIB);
    command.args(fio::nbd(&grid.uri("v"))).args([how, "--bs=4k", "--iodepth=16", "--do_verify=0"]);
    command.args(["--verify=pattern", "--verify_fatal=1", "--verify_state_save=0"]);
    command.arg(format!("--verify_pattern=0x{:08x}", 0x5eed_0000 + round)).arg(format!("--offset={at_mib}m"));
    command
}

/// What was filled, what was overwritten while full, and the witness.
fn verify(grid: &Grid, acknowledged_mib: u64, round: u64) -> Result<()> {
    let at = acknowledged_mib * 3 / 4;
    let after = at + TRIMMED_MIB;
    for (from, len) in [(0, at), (after, acknowledged_mib - after)] {
        let offset = format!("--offset={from}m");
        let mut command = job(grid, len, &["--rw=read", "--bs=256k", "--iodepth=8", &offset]);
        read_back(&mut command, len)?;
    }
    read_back(&mut witness(grid, at, round, "--rw=read"), WITNESS_MIB)
}

fn read_back(command: &mut std::process::Command, size_mib: u64) -> Result<()> {
    let outcome = fio::report_of(command, "the volume");
    let read = fio::sum(&outcome.context("what was acknowledged while full is not there")?, "io_bytes");
    ensure!(read == (size_mib * MIB) as f64, "of {size_mib} MiB {read} bytes were read back");
    Ok(())
}

fn trim(grid: &Grid, at_mib: u64, size_mib: u64) -> Result<()> {
    let mut command = fio::command(size_mib);
    command.args(fio::nbd(&grid.uri("v"))).args(["--rw=trim", "--bs=16m", "--iodepth=1"]);
    fio::report_of(command.arg(format!("--offset={at_mib}m")), "the volume").map(drop)
}

/// Trims everything; MiB in use beyond what was at the beginning, when that has come to rest.
fn empty(grid: &Grid, size_mib: u64, begun_with: &Value) -> Result<f64> {
    trim(grid, 0, size_mib)?;
    let since = Instant::now();
    let mut last = f64::INFINITY;
    loop {
        let left = (number(&space(grid)?, "used_bytes")? - number(begun_with, "used_bytes")?) as f64 / MIB as f64;
        if left <= LEFT_MAX_MIB && left == last || since.elapsed() > FREED_WITHIN {
            return Ok(left);
        }
        last = left;
        std::thread::sleep(REST);
    }
}
