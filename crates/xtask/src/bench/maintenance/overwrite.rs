//! Blocks overwritten at random where a volume takes 80 % of what guests may write: how fast, how much is moved for it, and what
//! sequential reads lose.

use super::{LAYOUT, Setup, say, writable_mib};
use crate::bench::fio;
use crate::bench::grid::{Grid, Shape};
use crate::bench::latency::SECOND_MS;
use crate::bench::load::Load;
use crate::bench::paired::{Figures, READ_64K, Target, fill, measure as run_job, median};
use crate::bench::reduce::packed;
use crate::bench::report::Report;
use anyhow::{Context, Result};
use std::time::Duration;

const TAKEN: f64 = 0.8;
const MOST_WRITTEN: f64 = 2.8;
const MOST_WRITTEN_SKEWED: f64 = 1.8;
const LEAST_OF_EMPTY: f64 = 0.6;
const LEAST_OF_FRESH: f64 = 0.5;
const OVERWRITE: &[&str] = &["--rw=randwrite", "--bs=4k", "--iodepth=16"];

/// Of five writes four go to the first fifth of the volume.
const SKEW: &str = "--random_distribution=zoned:80/20:20/80";

/// Half of each block is zeroes: with what lies between them, packed blocks take a little more than half.
const HALF: [&str; 2] = ["--buffer_compress_percentage=50", "--refill_buffers=1"];
const HALVED: f64 = 1.75;
/// Bulk writes lie as they are until they are packed.
const FILLED_AT_ONCE: u64 = 8;

/// With a volume that takes 80 % of what can be written there, once it is full.
fn make(setup: &Setup, name: &str) -> Result<(Grid, u64)> {
    let grid = make_empty(setup, name)?;
    let size_mib = (writable_mib(&grid)? * TAKEN) as u64;
    grid.create_volume("v", size_mib, LAYOUT)?;
    Ok((grid, size_mib))
}

fn make_empty(setup: &Setup, name: &str) -> Result<Grid> {
    let shape = Shape { nodes: 4, devices: 1, device_mib: setup.options.overwrite_device_mib };
    say(&format!("{name}: making a grid of 4 nodes with a device of {} MiB each", shape.device_mib));
    let grid = Grid::make(&setup.binary, setup.dir.path().join(name), shape, &[])?;
    if let Some(mib) = setup.options.writeback_mib {
        grid.set_host_setting("memory.writeback", &format!("{mib} MiB"))?;
    }
    Ok(grid)
}

/// Write amplification where all blocks are packed.
pub fn measure_packed(setup: &Setup, report: &mut Report) -> Result<()> {
    let grid = make_empty(setup, "packed")?;
    let whole_mib = writable_mib(&grid)?;
    let part_mib = (whole_mib * TAKEN * HALVED) as u64 / FILLED_AT_ONCE;
    let size_mib = part_mib * FILLED_AT_ONCE;
    let size = format!("{size_mib}MiB");
    grid.run(&["volume", "create", "v", "--size", &size, "--layout", LAYOUT, "--compress", "lz4"])?;
    let target = Target::volume("the volume", &grid, "v");
    for part in 0..FILLED_AT_ONCE {
        say(&format!("writing part {} of {FILLED_AT_ONCE}", part + 1));
        let offset = format!("--offset={}m", part * part_mib);
        let job: Vec<&str> = fio::FILL.iter().copied().chain(HALF).chain([offset.as_str()]).collect();
        run_job(&target, part_mib, &job, None)?;
        packed(&grid, "v")?;
    }
    report.told("of what could be written is taken", 1.0 - writable_mib(&grid)? / whole_mib, "");
    let job: Vec<&str> = OVERWRITE.iter().copied().chain(HALF).collect();
    overwrite(&grid, size_mib, setup.options.overwrite_seconds, (&job, MOST_WRITTEN), report).map(drop)
}

/// Write amplification alone: what is written often has to be kept apart from what is not.
pub fn measure_skewed(setup: &Setup, report: &mut Report) -> Result<()> {
    let (grid, size_mib) = make(setup, "skewed")?;
    fill(&Target::volume("the volume", &grid, "v"), size_mib)?;
    let job: Vec<&str> = OVERWRITE.iter().copied().chain([SKEW]).collect();
    overwrite(&grid, size_mib, setup.options.overwrite_seconds, (&job, MOST_WRITTEN_SKEWED), report).map(drop)
}

pub fn measure(setup: &Setup, report: &mut Report) -> Result<()> {
    let options = &setup.options;
    let (grid, size_mib) = make(setup, "overwrite")?;
    let target = Target::volume("the volume", &grid, "v");
    let empty = run_job(&target, size_mib, OVERWRITE, Some(options.seconds))?;
    report.told("4 KiB random writes, 16 deep, empty grid", empty.iops, "IOPS");
    fill(&target, size_mib)?;
    let fresh = sequential(setup, &grid, &target, size_mib)?;
    let iops = overwrite(&grid, size_mib, options.overwrite_seconds, (OVERWRITE, MOST_WRITTEN), report)?;
    let after = sequential(setup, &grid, &target, size_mib)?;
    // Disks that are shared give less after minutes of writing than at first: what the empty grid does then counts as much.
    grid.run(&["volume", "delete", "v", "--now"])?;
    grid.create_volume("v", size_mib, LAYOUT)?;
    grid.settle()?;
    let empty_again = run_job(&target, size_mib, OVERWRITE, Some(options.seconds))?;
    report.told("4 KiB random writes, 16 deep, the grid emptied again", empty_again.iops, "IOPS");
    let of_empty = iops / ((empty.iops + empty_again.iops) / 2.0);
    let goal = format!("at least {LEAST_OF_EMPTY}");
    let what = "IOPS at 80 % to the empty grid's, of before and after the mean";
    report.judged(what, goal, (of_empty, ""), of_empty >= LEAST_OF_EMPTY);
    let rate = |read: &[Figures]| median(read, |r| r.megabytes);
    let cpu = |read: &[Figures]| median(read, Figures::ours_us);
    report.told("64 KiB sequential read, written in order", rate(&fresh), "MB/s");
    report.told("the same after overwriting", rate(&after), "MB/s");
    report.told("CPU of host and nodes for each, written in order", cpu(&fresh), "us");
    report.told("the same after overwriting", cpu(&after), "us");
    let goal = format!("at least {LEAST_OF_FRESH}");
    let (by_rate, by_cpu) = (rate(&after) / rate(&fresh), cpu(&fresh) / cpu(&after));
    report.judged("after to before, by rate", &goal, (by_rate, ""), by_rate >= LEAST_OF_FRESH);
    report.judged("the same, by CPU", &goal, (by_cpu, ""), by_cpu >= LEAST_OF_FRESH);
    Ok(())
}

fn sequential(setup: &Setup, grid: &Grid, target: &Target, size_mib: u64) -> Result<Vec<Figures>> {
    grid.settle()?;
    let run = |_| run_job(target, size_mib, READ_64K.arguments, Some(setup.options.seconds));
    (0..setup.options.rounds).map(run).collect()
}

/// The first third brings it to where it stays; what is told is of the rest. IOPS.
fn overwrite(
    grid: &Grid,
    size_mib: u64,
    seconds: u64,
    (job, most_written): (&[&str], f64),
    report: &mut Report,
) -> Result<f64> {
    say(&format!("overwriting for {seconds} s"));
    let load = Load::start(grid, "v", size_mib, job, seconds)?;
    std::thread::sleep(Duration::from_secs(seconds / 3));
    let before = grid.volume("v")?;
    std::thread::sleep(Duration::from_secs(seconds - seconds / 3));
    let completions = load.finish()?;
    let after = grid.volume("v")?;
    let gained = |name: &str| -> Result<f64> {
        let count = |volume: &serde_json::Value| volume["live"]["counters"][name].as_f64();
        count(&after).zip(count(&before)).map(|(a, b)| a - b).with_context(|| format!("no counter {name}"))
    };
    let written = gained("write_bytes")?.max(1.0);
    let (first, last) = completions.iter().fold((u64::MAX, 0), |(a, b), c| (a.min(c.at_ms), b.max(c.at_ms)));
    let from = first + seconds / 3 * SECOND_MS;
    // The last second is not whole.
    let mut by_second = vec![0_u64; (last.saturating_sub(from) / SECOND_MS) as usize];
    for completion in completions.iter().filter(|c| c.at_ms >= from) {
        if let Some(count) = by_second.get_mut(((completion.at_ms - from) / SECOND_MS) as usize) {
            *count += 1;
        }
    }
    let iops = by_second.iter().sum::<u64>() as f64 / by_second.len().max(1) as f64;
    let slowest = by_second.iter().min().copied().context("not even a second was overwritten")? as f64;
    report.told("4 KiB random writes, 16 deep, at 80 %, two thirds of the time", iops, "IOPS");
    report.judged("the slowest second", "any at all", (slowest, "IOPS"), slowest > 0.0);
    // What left the log, and what the cleaner wrote once more; parity, headers and map are not in it.
    let destaged = (gained("destaged_bytes")? + gained("bypass_bytes")?) / written;
    let segments = destaged + gained("cleaned_bytes")? / written;
    let goal = format!("at most {most_written}");
    report.told("left the log, of what was written", destaged, "");
    report.judged("data written for each byte, what is moved included", goal, (segments, ""), segments <= most_written);
    let put = gained("segment_bytes_written")? / written;
    report.told("all that was put to devices for it, the log apart: with parity, headers, map", put, "");
    report.told("how often all was overwritten in that time", written / (size_mib << 20) as f64, "times");
    Ok(iops)
}
