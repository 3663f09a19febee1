//! `holdfast-torture`: a grid of its own, some minutes of faults under a checking workload, one line at the end.

use anyhow::{Context, Result, bail};
use clap::Parser;
use holdfast_base::Prng;
use holdfast_torture::engine::{Engine, Plan, VolumePlan};
use holdfast_torture::faults::{Fault, Report, Tormentor};
use holdfast_torture::grid::{Grid, Shape};
use holdfast_torture::journey::Journey;
use holdfast_torture::logs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Drives a local grid of the real binary through kills and hangs, checking every byte that is read
///
/// Fails on an I/O error, a wrong byte, a request that takes longer than 30 s, a process that ends by itself, redundancy
/// that does not come back, or an ERROR line in a log. The grid's directory is kept then, and named.
#[derive(Parser, Debug)]
#[command(name = "holdfast-torture", version)]
struct Arguments {
    /// How long faults go on
    #[arg(long, default_value_t = 2.0)]
    minutes: f64,

    /// What is drawn follows from it; when it happens does not [default: from the clock]
    #[arg(long)]
    seed: Option<u64>,

    /// The program under test
    #[arg(long, default_value = "target/release/holdfast")]
    binary: PathBuf,

    /// Where the grid is made: a directory of its own below this one
    #[arg(long, default_value_os_t = std::env::temp_dir())]
    dir: PathBuf,

    /// Storage nodes [default: three or four, by the seed]
    #[arg(long)]
    nodes: Option<u32>,

    /// Hosts and nodes talk over TLS
    #[arg(long)]
    tls: bool,

    /// Volumes are encrypted
    #[arg(long)]
    encrypt: bool,

    /// Requests in flight on each connection
    #[arg(long, default_value_t = 8)]
    depth: usize,

    /// Only these faults [default: all]
    #[arg(long, value_delimiter = ',')]
    faults: Vec<Fault>,

    /// Instead of faults at random: a grid of one node grows to six and shrinks to one again, and its volume goes from layout to
    /// layout
    #[arg(long, conflicts_with_all = ["faults", "minutes", "nodes"])]
    journey: bool,

    /// Keep the grid's directory even if all is well
    #[arg(long)]
    keep: bool,
}

/// Volumes of a run: name, layout, MiB. Small, so that the same blocks are hit again and again.
const VOLUMES: [(&str, &str, u64); 2] = [("parity", "parity:2+1", 192), ("mirror", "mirror:2", 96)];

const CONNECTIONS: usize = 2;
const DEVICES: u32 = 2;
const DEVICE_MIB: u64 = 1024;

/// The volume of a journey, and the devices of its six nodes, two each.
const JOURNEY_MIB: u64 = 96;
const JOURNEY_DEVICE_MIB: u64 = 512;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let seed = arguments.seed.unwrap_or(clock.as_nanos() as u64 % 1_000_000);
    let dir = arguments.dir.join(format!("torture-{seed}-{}", std::process::id()));
    println!("torture: seed {seed}, {} minutes, in {}", arguments.minutes, dir.display());
    match torture(&arguments, seed, &dir) {
        Ok(line) => {
            println!("{line}");
            if !arguments.keep {
                let _ = std::fs::remove_dir_all(&dir);
                let _ = std::fs::remove_file(dir.with_extension("key"));
            }
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("torture FAILED with seed {seed}: {error:#}");
            println!("kept: {} (logs, devices)", dir.display());
            ExitCode::FAILURE
        }
    }
}

fn torture(arguments: &Arguments, seed: u64, dir: &Path) -> Result<String> {
    std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let mut random = Prng::new(seed);
    let drawn = random.between(3, 4) as u32;
    let nodes = if arguments.journey { 1 } else { arguments.nodes.unwrap_or(drawn) };
    let (tls, encrypt) = (arguments.tls, arguments.encrypt);
    let device_mib = if arguments.journey { JOURNEY_DEVICE_MIB } else { DEVICE_MIB };
    let shape = Shape { nodes, devices: DEVICES, device_mib, tls, encrypt };
    let grid = Grid::create(&arguments.binary, dir, shape)?;
    let way = if arguments.journey { travel } else { run };
    let outcome = way(arguments, &grid, &mut random);
    // Whatever happened, no process stays behind; the logs are complete only now.
    let down = grid.down();
    let findings = logs::scan(&dir.join("logs"))?;
    let line = outcome.map_err(|error| match findings.errors.is_empty() {
        true => error,
        false => error.context(format!("the logs have errors:\n{}\nand", findings.errors.join("\n"))),
    })?;
    down?;
    if !findings.errors.is_empty() {
        bail!("errors in the logs:\n{}", findings.errors.join("\n"));
    }
    for (warning, count) in &findings.warnings {
        println!("warned {count} times: {warning}");
    }
    Ok(format!("torture: seed {seed}, {nodes} nodes: {line}"))
}

fn run(arguments: &Arguments, grid: &Grid, random: &mut Prng) -> Result<String> {
    let mut volumes = Vec::new();
    for (name, layout, mib) in VOLUMES {
        grid.create_volume(name, mib << 20, layout)?;
        let (socket, export) = (grid.nbd_socket(), name.to_string());
        volumes.push(VolumePlan { socket, export, size_bytes: mib << 20, connections: CONNECTIONS });
    }
    let mut engine = Engine::new(Plan { seed: random.next_u64(), depth: arguments.depth, volumes })?;
    let until = Instant::now() + Duration::from_secs_f64(arguments.minutes * 60.0);
    let all = || Fault::ALL.map(|(fault, _)| fault).to_vec();
    let allowed = if arguments.faults.is_empty() { all() } else { arguments.faults.clone() };
    let random = random.fork();
    let report = engine.run(|control| Tormentor { grid, control, random, allowed, until }.run())?;
    engine.sweep().context("while everything was read back")?;
    engine.disconnect();
    grid.down()?;
    grid.up()?;
    engine.reconnect()?;
    engine.sweep().context("while everything was read back after a clean stop and start")?;
    engine.disconnect();
    Ok(summary(&engine, &report))
}

/// See [`Journey`].
fn travel(arguments: &Arguments, grid: &Grid, random: &mut Prng) -> Result<String> {
    let (volume, size_bytes) = ("vm", JOURNEY_MIB << 20);
    grid.create_volume(volume, size_bytes, "mirror:2@device")?;
    let (socket, export) = (grid.nbd_socket(), volume.to_string());
    let volumes = vec![VolumePlan { socket, export, size_bytes, connections: CONNECTIONS }];
    let mut engine = Engine::new(Plan { seed: random.next_u64(), depth: arguments.depth, volumes })?;
    let (steps, longest) = engine.run(|control| Journey { grid, control, volume }.run())?;
    engine.sweep().context("while everything was read back")?;
    engine.disconnect();
    Ok(format!(
        "{steps} steps, {} requests, redundant again within {:.1} s, longest request {:.0} ms, {} MiB read back: 0 errors, 0 \
         mismatches",
        engine.counts.requests,
        longest.as_secs_f64(),
        engine.counts.longest.as_secs_f64() * 1e3,
        engine.bytes() >> 20,
    ))
}

fn summary(engine: &Engine, report: &Report) -> String {
    let counts = &engine.counts;
    let total: u32 = report.faults.values().sum();
    let faults: Vec<String> = report.faults.iter().map(|(fault, count)| format!("{count} {fault}")).collect();
    format!(
        "{} requests ({} reads, {} writes, {} trims, {} flushes), {total} faults ({}), {} answers lost with the host, \
         longest request {:.0} ms, redundant again within {:.1} s, volumes open {:.1} s and clients back {:.1} s after a host's start at the latest, \
         {} MiB read back twice: 0 errors, 0 mismatches",
        counts.requests,
        counts.reads,
        counts.writes,
        counts.trims,
        counts.flushes,
        faults.join(", "),
        counts.lost,
        counts.longest.as_secs_f64() * 1e3,
        report.longest_repair.as_secs_f64(),
        report.longest_host_start.as_secs_f64(),
        counts.longest_reopening.as_secs_f64(),
        engine.bytes() >> 20,
    )
}
