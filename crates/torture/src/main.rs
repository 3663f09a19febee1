//! `holdfast-torture`: a grid of its own, some minutes of faults under a checking workload, one line at the end.

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use holdfast_base::Prng;
use holdfast_lab::grid::{Grid, Shape, make_key};
use holdfast_torture::engine::{Engine, Plan, VolumePlan};
use holdfast_torture::faults::{Fault, Report, Tormentor};
use holdfast_torture::fleet::{self, FailingDevice, Images};
use holdfast_torture::journey::Journey;
use holdfast_torture::logs::{self, Expected};
use holdfast_torture::maintenance;
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

    /// Reactors of the host [default: one or two, by the seed]
    #[arg(long)]
    reactors: Option<u32>,

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

    /// Instead of faults at random: on six nodes, a volume of parity:2+1 becomes mirror:2, parity:4+2 and parity:2+1 again
    #[arg(long, conflicts_with_all = ["faults", "minutes", "nodes", "journey"])]
    layouts: bool,

    /// Instead of faults at random: a thousand bits of a device flip, scrubs look for them, and another node is killed
    #[arg(long, conflicts_with_all = ["faults", "minutes", "nodes", "journey", "layouts"])]
    damage: bool,

    /// Instead of faults at random: ten machines that were cloned from one disk, by the images in this directory, in a packed
    /// volume on two nodes, while a device fails and a node is lost
    #[arg(long, value_name = "DIR", conflicts_with_all = ["faults", "minutes", "nodes", "journey", "layouts", "damage"])]
    fleet: Option<PathBuf>,

    /// Keep the grid's directory even if all is well
    #[arg(long)]
    keep: bool,
}

/// Volumes of a run: name, layout, MiB. Small, so that the same blocks are hit again and again.
const VOLUMES: [(&str, &str, u64); 2] = [("parity", "parity:2+1", 192), ("mirror", "mirror:2", 96)];

/// The volume of a run that has one only.
const VOLUME: &str = "vm";

const CONNECTIONS: usize = 2;
const DEVICES: u64 = 2;
const DEVICE_MIB: u64 = 1024;

/// The volume of a journey, and the devices of its six nodes, two each.
const JOURNEY_MIB: u64 = 96;
const JOURNEY_DEVICE_MIB: u64 = 512;

/// The volume that maintenance is tried on: large against the devices, so that most bits that flip are of something.
const MAINTENANCE_MIB: u64 = 288;
const DAMAGE_DEVICE_MIB: u64 = 320;
const DAMAGE_BITS: u64 = 1000;
const SCRUB_EVERY: Duration = Duration::from_secs(20);

/// One kind of run: what is done to the grid, and a line about it.
type Way = fn(&Arguments, &Grid, &mut Prng) -> Result<String>;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let seed = arguments.seed.unwrap_or(clock.as_nanos() as u64 % 1_000_000);
    let dir = arguments.dir.join(format!("torture-{seed}-{}", std::process::id()));
    println!("torture: seed {seed}, in {}", dir.display());
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
    let (way, nodes, devices, device_mib): (Way, _, _, _) = if arguments.journey {
        (travel, 1, DEVICES, JOURNEY_DEVICE_MIB)
    } else if arguments.layouts {
        (change_layouts, 6, 1, DEVICE_MIB)
    } else if arguments.damage {
        (damage, 4, 1, DAMAGE_DEVICE_MIB)
    } else if arguments.fleet.is_some() {
        (lose_of_fleet, 2, fleet::DEVICES, fleet::DEVICE_MIB)
    } else {
        (run, u64::from(arguments.nodes.unwrap_or(drawn)), DEVICES, DEVICE_MIB)
    };
    let mut grid = Grid::new(&arguments.binary, dir);
    if arguments.encrypt {
        // Beside the grid's files, whose directory is to be empty.
        let key = dir.with_extension("key");
        make_key(&key)?;
        grid = grid.encrypted(key);
    }
    grid.make(Shape { nodes, devices, device_mib }, &["--tls", if arguments.tls { "on" } else { "off" }])?;
    let outcome = way(arguments, &grid, &mut random);
    // Whatever happened, no process stays behind; the logs are complete only now.
    let down = grid.down();
    let expected = match (arguments.damage, &arguments.fleet) {
        (true, _) => logs::OF_DAMAGE,
        (_, Some(_)) => fleet::OF_LOSS,
        _ => Expected::default(),
    };
    let findings = logs::scan(&dir.join("logs"), expected)?;
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
    let drawn = random.between(1, 2) as u32;
    let reactors = arguments.reactors.unwrap_or(drawn);
    grid.set_host_setting("cpu.reactors", &reactors.to_string())?;
    let mut volumes = Vec::new();
    for (name, layout, mib) in VOLUMES {
        grid.create_volume(name, mib, layout)?;
        let (socket, export) = (grid.nbd_socket(), name.to_string());
        volumes.push(VolumePlan { socket, export, size_bytes: mib << 20, connections: CONNECTIONS, image: None });
    }
    let mut engine = Engine::new(Plan { seed: random.next_u64(), depth: arguments.depth, volumes })?;
    let until = Instant::now() + Duration::from_secs_f64(arguments.minutes * 60.0);
    let all = || Fault::ALL.map(|(fault, _)| fault).to_vec();
    let allowed = if arguments.faults.is_empty() { all() } else { arguments.faults.clone() };
    let random = random.fork();
    let report = engine.run(|control| Tormentor { grid, control, random, allowed, until }.run())?;
    engine.sweep().context("while everything was read back")?;
    let mut ahead_bytes = 0;
    for (name, _, _) in VOLUMES {
        ahead_bytes += grid.counter(name, "ahead_bytes")?;
    }
    ensure!(ahead_bytes > 0, "nothing came ahead of its reads, and all was read in order: that was not tried");
    engine.disconnect();
    grid.down()?;
    grid.up()?;
    engine.reconnect()?;
    engine.sweep().context("while everything was read back after a clean stop and start")?;
    engine.disconnect();
    Ok(format!("{reactors} reactors, {}", summary(&engine, &report, ahead_bytes)))
}

/// The one volume of a run, and what asks for its bytes.
fn engine_of_one(arguments: &Arguments, grid: &Grid, (mib, layout): (u64, &str), seed: u64) -> Result<Engine> {
    grid.create_volume(VOLUME, mib, layout)?;
    let (socket, export) = (grid.nbd_socket(), VOLUME.to_string());
    let volumes = vec![VolumePlan { socket, export, size_bytes: mib << 20, connections: CONNECTIONS, image: None }];
    Engine::new(Plan { seed, depth: arguments.depth, volumes })
}

/// See [`maintenance::change_layouts`].
fn change_layouts(arguments: &Arguments, grid: &Grid, random: &mut Prng) -> Result<String> {
    let mut engine = engine_of_one(arguments, grid, (MAINTENANCE_MIB, "parity:2+1"), random.next_u64())?;
    let took = engine.run(|control| maintenance::change_layouts(grid, &control, VOLUME))?;
    engine.sweep().context("while everything was read back")?;
    engine.disconnect();
    let took: Vec<String> = took.iter().map(|(to, took)| format!("{to} in {:.0} s", took.as_secs_f64())).collect();
    Ok(format!("{}; {}", took.join(", "), all_well(&engine)))
}

/// See [`maintenance::flip_bits`].
fn damage(arguments: &Arguments, grid: &Grid, random: &mut Prng) -> Result<String> {
    const DAMAGED: u32 = 2;
    const LOST: u32 = 3;
    grid.set_host_setting("care.scrub_every", &format!("{} s", SCRUB_EVERY.as_secs()))?;
    let mut engine = engine_of_one(arguments, grid, (MAINTENANCE_MIB, "parity:2+1"), random.next_u64())?;
    let device = grid.device_file(DAMAGED);
    let found = engine.run(|control| {
        let (what, how) = ((VOLUME, device.as_path()), (DAMAGE_BITS, SCRUB_EVERY));
        let found = maintenance::flip_bits(grid, &control, what, how, random)?;
        maintenance::lose(grid, &control, LOST)?;
        Ok(found)
    })?;
    engine.sweep().context("while everything was read back without another node")?;
    engine.disconnect();
    let took = found.took.as_secs_f64();
    let flipped = format!("{} bits of node {DAMAGED} flipped, {} shards found damaged", found.bits, found.found);
    Ok(format!("{flipped}, none after {took:.0} s; then node {LOST} lost; {}", all_well(&engine)))
}

/// See [`fleet`].
fn lose_of_fleet(arguments: &Arguments, grid: &Grid, random: &mut Prng) -> Result<String> {
    let images = Images::find(arguments.fleet.as_deref().context("no disks of machines")?)?;
    let mut device = FailingDevice::make(grid.dir())?;
    fleet::add_failing(grid, &device)?;
    let (plan, saved) = fleet::make(grid, &images, random.next_u64())?;
    println!("{}", grid.run(&["space", "why"])?);
    let mut engine = Engine::new(plan)?;
    let said = engine.run(|control| fleet::lose(grid, &control, &mut device))?;
    println!("while a device and a node were lost:\n{said}");
    engine.sweep().context("while everything was read back")?;
    engine.disconnect();
    Ok(format!("{saved}; {}", all_well(&engine)))
}

fn all_well(engine: &Engine) -> String {
    format!(
        "{} requests, longest {:.0} ms, {} MiB read back: 0 errors, 0 mismatches",
        engine.counts.requests,
        engine.counts.longest.as_secs_f64() * 1e3,
        engine.bytes() >> 20,
    )
}

/// See [`Journey`].
fn travel(arguments: &Arguments, grid: &Grid, random: &mut Prng) -> Result<String> {
    let mut engine = engine_of_one(arguments, grid, (JOURNEY_MIB, "mirror:2@device"), random.next_u64())?;
    let (steps, longest) = engine.run(|control| Journey { grid, control, volume: VOLUME }.run())?;
    engine.sweep().context("while everything was read back")?;
    engine.disconnect();
    Ok(format!("{steps} steps, redundant again within {:.1} s; {}", longest.as_secs_f64(), all_well(&engine)))
}

fn summary(engine: &Engine, report: &Report, ahead_bytes: u64) -> String {
    let counts = &engine.counts;
    let total: u32 = report.faults.values().sum();
    let faults: Vec<String> = report.faults.iter().map(|(fault, count)| format!("{count} {fault}")).collect();
    format!(
        "{} requests ({} reads, {} writes, {} trims, {} flushes), {total} faults ({}), {} answers lost with the host, \
         longest request {:.0} ms, redundant again within {:.1} s, volumes open {:.1} s and clients back {:.1} s after a host's start at the latest, \
         {} MiB read back twice, {} MiB came ahead of reads since the last start: 0 errors, 0 mismatches",
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
        ahead_bytes >> 20,
    )
}
