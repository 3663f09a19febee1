//! What snapshots and clones take, what a load feels of them, and what reading through generations of them costs.

use super::{Setup, say};
use crate::bench::fio;
use crate::bench::grid::{Grid, USUAL};
use crate::bench::latency::{self, Completion, SECOND_MS, max, median};
use crate::bench::load::Load;
use crate::bench::machine::unix_ms;
use crate::bench::report::Report;
use anyhow::{Context, Result};
use std::time::{Duration, Instant};

const COMMAND_MS_MAX: f64 = 50.0;
/// A volume's size doesn't count where the large one takes no more than this times what the small one takes: medians of a
/// few milliseconds vary by as much.
const SIZE_FACTOR_MAX: f64 = 1.2;
const LOAD_FACTOR_MAX: f64 = 2.0;
const GENERATIONS_RATIO_MIN: f64 = 0.95;

/// Requests that a volume gets before a snapshot is timed.
const WRITES_BEFORE: &str = "--number_ios=2000";

/// Requests that a generation of clones writes.
const WRITES_EACH: &str = "--number_ios=16";

/// Times of one command.
#[derive(Default)]
struct Times {
    list: Vec<f64>,
    /// Of the small and of the large volume.
    snapshot: [Vec<f64>; 2],
    clone: [Vec<f64>; 2],
}

pub fn measure(setup: &Setup, report: &mut Report) -> Result<()> {
    let options = &setup.options;
    // The load overwrites some of the large volume while snapshots hold what was there.
    let guest_mib = options.small_mib + options.large_mib + (options.large_mib / 8).max(1024);
    let grid = setup.grid("snapshots", guest_mib, USUAL.nodes, 1.05)?;
    setup.filled_volume(&grid, "small", options.small_mib)?;
    setup.filled_volume(&grid, "large", options.large_mib)?;
    grid.settle()?;
    commands(setup, &grid, report)?;
    generations(setup, &grid, report)?;
    grid.settle()?;
    under_load(setup, &grid, report)
}

fn commands(setup: &Setup, grid: &Grid, report: &mut Report) -> Result<()> {
    say("snapshots: timing commands");
    let mut times = Times::default();
    let timed = |arguments: &[&str]| -> Result<f64> {
        let since = Instant::now();
        grid.run(arguments)?;
        Ok(since.elapsed().as_secs_f64() * 1e3)
    };
    for round in 0..setup.options.repeats {
        for (volume, mib) in [("small", setup.options.small_mib), ("large", setup.options.large_mib)] {
            // A snapshot of what has not changed would be little to do.
            let mut command = fio::command(mib);
            command.args(fio::nbd(&grid.uri(volume))).args([
                "--rw=randwrite",
                "--bs=8k",
                "--iodepth=16",
                WRITES_BEFORE,
            ]);
            fio::report_of(&mut command, volume)?;
        }
        times.list.push(timed(&["volume", "list"])?);
        for (index, volume) in ["small", "large"].iter().enumerate() {
            let (snapshot, clone) = (format!("timed{round}"), format!("{volume}-{round}"));
            times.snapshot[index].push(timed(&["snapshot", "create", volume, &snapshot])?);
            times.clone[index].push(timed(&["volume", "clone", &format!("{volume}@{snapshot}"), &clone])?);
        }
    }
    let middle = |values: &[f64]| median(values).context("no command was timed");
    let start = middle(&times.list)?;
    report.told("`volume list`: a control request that does nothing, median", start, "ms");
    for (name, [small, large]) in [("`snapshot create`", &times.snapshot), ("`volume clone`", &times.clone)] {
        for (mib, values) in [(setup.options.small_mib, small), (setup.options.large_mib, large)] {
            let (value, most) = (middle(values)?, max(values));
            let goal = format!("under {COMMAND_MS_MAX:.0} ms");
            report.judged(format!("{name}, {mib} MiB, median"), &goal, (value, "ms"), value < COMMAND_MS_MAX);
            report.judged(
                format!("{name}, {mib} MiB, slowest of {}", values.len()),
                goal,
                (most, "ms"),
                most < COMMAND_MS_MAX,
            );
            report.told(format!("{name}, {mib} MiB, median less that of `volume list`"), value - start, "ms");
        }
        let factor = middle(large)? / middle(small)?;
        let goal = format!("no slower ({SIZE_FACTOR_MAX} at most)");
        report.judged(format!("{name}: large to small, medians"), goal, (factor, "times"), factor <= SIZE_FACTOR_MAX);
    }
    Ok(())
}

/// Clones of clones of the small volume, each written to a little; reads of the first and the last in turns.
fn generations(setup: &Setup, grid: &Grid, report: &mut Report) -> Result<()> {
    let options = &setup.options;
    say(&format!("snapshots: making {} generations of clones", options.generations));
    let (mut parent, mut took) = ("small".to_string(), Vec::new());
    for generation in 1..=options.generations {
        let child = format!("generation{generation}");
        let since = Instant::now();
        grid.run(&["snapshot", "create", &parent, "generation"])?;
        grid.run(&["volume", "clone", &format!("{parent}@generation"), &child])?;
        took.push(since.elapsed().as_secs_f64() * 1e3);
        let mut command = fio::command(options.small_mib);
        command.args(fio::nbd(&grid.uri(&child))).args(["--rw=randwrite", "--bs=8k", "--iodepth=16", WRITES_EACH]);
        fio::report_of(&mut command, &child)?;
        parent = child;
    }
    report.told("a generation's snapshot and clone, two commands, slowest", max(&took), "ms");
    grid.settle()?;
    let reads = |volume: &str| -> Result<f64> {
        let mut command = fio::command(options.small_mib);
        command.args(fio::nbd(&grid.uri(volume))).args(fio::RANDOM_READ_8K).args(fio::timed(options.seconds));
        Ok(fio::sum(&fio::report_of(&mut command, volume)?, "iops"))
    };
    let (mut first, mut last) = (Vec::new(), Vec::new());
    for round in 0..options.rounds {
        // Whoever is second in a round gains or loses by it: they change places.
        for is_last in [round % 2 == 1, round % 2 == 0] {
            let (volume, into) = if is_last { (parent.as_str(), &mut last) } else { ("small", &mut first) };
            into.push(reads(volume)?);
        }
    }
    let ratios: Vec<f64> = first.iter().zip(&last).map(|(first, last)| last / first).collect();
    let ratio = median(&ratios).context("nothing was read")?;
    report.told("8 KiB random reads of the base, median", median(&first).unwrap_or(0.0), "IOPS");
    report.told(format!("the same of generation {}", options.generations), median(&last).unwrap_or(0.0), "IOPS");
    let goal = format!("at least {GENERATIONS_RATIO_MIN}");
    report.judged(
        "reads of the last generation to the base, median of rounds",
        goal,
        (ratio, "times"),
        ratio >= GENERATIONS_RATIO_MIN,
    );
    report.told("the same, lowest round", ratios.iter().copied().fold(f64::INFINITY, f64::min), "times");
    report.told("the same, highest round", max(&ratios), "times");
    Ok(())
}

fn under_load(setup: &Setup, grid: &Grid, report: &mut Report) -> Result<()> {
    const EVERY_SECONDS: u64 = 10;
    /// The load's first requests are no measure.
    const WARM_UP_SECONDS: u64 = 3;
    let options = &setup.options;
    say(&format!("snapshots: oltp-8k for {} s", options.load_seconds));
    let seconds = options.load_seconds;
    let load = Load::start(grid, "large", options.large_mib, fio::OLTP_8K, seconds + WARM_UP_SECONDS)?;
    std::thread::sleep(Duration::from_secs(WARM_UP_SECONDS));
    let (since, from_ms) = (Instant::now(), unix_ms());
    let (mut windows, mut took) = (Vec::new(), Vec::new());
    let every = Duration::from_secs(EVERY_SECONDS.min(seconds.div_ceil(3)));
    for index in 0u32.. {
        let at = every / 2 + every * index;
        if at + Duration::from_secs(1) >= Duration::from_secs(seconds) {
            break;
        }
        std::thread::sleep(at.saturating_sub(since.elapsed()));
        let begin_ms = unix_ms();
        let began = Instant::now();
        grid.run(&["snapshot", "create", "large", &format!("loaded{index}")])?;
        took.push(began.elapsed().as_secs_f64() * 1e3);
        windows.push(begin_ms..begin_ms + SECOND_MS);
    }
    let completions = load.finish()?;
    let counted = completions.iter().filter(|c| c.at_ms >= from_ms);
    let is_near = |c: &&Completion| windows.iter().any(|w| w.contains(&c.at_ms));
    let (near, far): (Vec<&Completion>, Vec<&Completion>) = counted.partition(is_near);
    report.told(
        "oltp-8k on the large volume, with snapshots",
        (near.len() + far.len()) as f64 / seconds as f64,
        "IOPS",
    );
    report.told("`snapshot create` under that load, slowest", max(&took), "ms");
    let nothing = "no request was completed";
    let (near, far) = (latency::p99_us(near).context(nothing)?, latency::p99_us(far).context(nothing)?);
    report.told("p99, other seconds", far, "us");
    report.told(format!("p99, seconds that begin with a snapshot ({})", windows.len()), near, "us");
    let goal = format!("at most {LOAD_FACTOR_MAX}");
    report.judged(
        "p99 while a snapshot is taken to other seconds",
        goal,
        (near / far, "times"),
        near / far <= LOAD_FACTOR_MAX,
    );
    Ok(())
}
