//! `./x bench --noisy`: a guest with one request in flight beside one with many, and two that are equally busy, in grids that
//! differ in `qos.isolation` alone.

use super::grid::{Grid, Shape};
use super::paired::{Figures, Run, Target, fill, measure, median};
use anyhow::{Result, anyhow};

const VOLUME_MIB: u64 = 256;
const SHAPE: Shape = Shape { nodes: 3, devices: 1, device_mib: 1536 };
const LAYOUT: &str = "mirror:2";

/// The first is what the others are compared with.
const SETTINGS: [&str; 4] = ["off", "rate", "balanced", "strict"];

type Job = &'static [&'static str];

const READS: Job = &["--rw=randread", "--bs=8k"];
const WRITES: Job = &["--rw=randwrite", "--bs=8k"];

struct Pair {
    title: &'static str,
    victim: Job,
    /// In flight, of the one that is measured.
    victim_depth: u32,
    neighbour: Job,
    neighbour_depth: u32,
}

const PAIRS: [Pair; 5] = [
    Pair {
        title: "one read beside 256 reads of 8 KiB",
        victim: READS,
        victim_depth: 1,
        neighbour: READS,
        neighbour_depth: 256,
    },
    Pair {
        title: "one read beside 256 writes of 8 KiB",
        victim: READS,
        victim_depth: 1,
        neighbour: WRITES,
        neighbour_depth: 256,
    },
    Pair {
        title: "one write beside 256 writes of 8 KiB",
        victim: WRITES,
        victim_depth: 1,
        neighbour: WRITES,
        neighbour_depth: 256,
    },
    Pair {
        title: "one read beside 16 writes of 1 MiB",
        victim: READS,
        victim_depth: 1,
        neighbour: &["--rw=write", "--bs=1m"],
        neighbour_depth: 16,
    },
    Pair {
        title: "64 reads beside 64 reads of 8 KiB",
        victim: READS,
        victim_depth: 64,
        neighbour: READS,
        neighbour_depth: 64,
    },
];

/// Of one round: the victim alone, the neighbour alone, and both together.
struct Round {
    victim: Figures,
    neighbour: Figures,
    beside: (Figures, Figures),
}

pub fn run(arguments: &[String]) -> Result<()> {
    let run = Run::from(arguments, "./x bench --noisy")?;
    let grids: Vec<Grid> = SETTINGS.iter().map(|setting| make(&run, setting)).collect::<Result<_>>()?;
    println!("{} s a run, median of {} rounds, {LAYOUT}, {VOLUME_MIB} MiB each\n", run.seconds, run.rounds);
    for pair in &PAIRS {
        let mut rounds: Vec<Vec<Round>> = SETTINGS.iter().map(|_| Vec::new()).collect();
        for _ in 0..run.rounds {
            for (grid, into) in grids.iter().zip(&mut rounds) {
                into.push(one_round(grid, pair, run.seconds)?);
            }
        }
        print(pair, &rounds);
    }
    Ok(())
}

fn make(run: &Run, setting: &str) -> Result<Grid> {
    let dir = std::env::temp_dir().join(format!("holdfast-bench-{}-{setting}", std::process::id()));
    let grid = Grid::make(&run.binary, dir, SHAPE, &[])?;
    grid.set_host_setting("qos.isolation", setting)?;
    for name in ["victim", "neighbour"] {
        grid.create_volume(name, VOLUME_MIB, LAYOUT)?;
        fill(&Target::volume("a volume", &grid, name), VOLUME_MIB)?;
    }
    grid.settle()?;
    Ok(grid)
}

fn one_round(grid: &Grid, pair: &Pair, seconds: u64) -> Result<Round> {
    let of = |name: &'static str, job: Job, depth: u32| {
        let (target, depth) = (Target::volume(name, grid, name), format!("--iodepth={depth}"));
        let job: Vec<&str> = job.iter().copied().chain([depth.as_str()]).collect();
        measure(&target, VOLUME_MIB, &job, Some(seconds))
    };
    let victim = || of("victim", pair.victim, pair.victim_depth);
    let neighbour = || of("neighbour", pair.neighbour, pair.neighbour_depth);
    let alone = (victim()?, neighbour()?);
    let beside = std::thread::scope(|scope| -> Result<_> {
        let other = scope.spawn(neighbour);
        let own = victim();
        let other = other.join().map_err(|_| anyhow!("the neighbour's thread ended"))?;
        Ok((own?, other?))
    })?;
    Ok(Round { victim: alone.0, neighbour: alone.1, beside })
}

fn print(pair: &Pair, rounds: &[Vec<Round>]) {
    println!("### {}\n", pair.title);
    println!(
        "| isolation | alone: IOPS | p99 us | beside: IOPS | p99 us | of alone | neighbour alone | beside | of off | both, of off |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    let figures = |rounds: &[Round]| {
        let of = |which: fn(&Round) -> Figures| rounds.iter().map(which).collect::<Vec<_>>();
        let (alone, beside) = (of(|r| r.victim), of(|r| r.beside.0));
        let (neighbour, other) = (of(|r| r.neighbour), of(|r| r.beside.1));
        [
            median(&alone, |f| f.iops),
            median(&alone, |f| f.p99_us),
            median(&beside, |f| f.iops),
            median(&beside, |f| f.p99_us),
            median(&neighbour, |f| f.iops),
            median(&other, |f| f.iops),
        ]
    };
    let first = figures(&rounds[0]);
    for (setting, rounds) in SETTINGS.iter().zip(rounds) {
        let [alone, alone_us, beside, beside_us, neighbour, other] = figures(rounds);
        println!(
            "| {setting} | {alone:.0} | {alone_us:.0} | {beside:.0} | {beside_us:.0} | {:.2} | {neighbour:.0} | {other:.0} | \
             {:.2} | {:.2} |",
            beside_us / alone_us,
            other / first[5],
            (beside + other) / (first[2] + first[5]),
        );
    }
    println!();
}
