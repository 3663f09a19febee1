//! `holdfast-atlas`: a grid over six network namespaces, every fault for each of them, a table at the end.
//!
//! Two processes. The outer one makes the namespaces, starts the inner one in that of the bridge, and removes them all when
//! it has ended, however it has ended; so a run that was killed with everything else leaves only what the next start removes.

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use holdfast_torture::atlas::fault::Fault;
use holdfast_torture::atlas::{self, Options, net, say};
use rustix::fs::FlockOperation;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// One run at a time: names of namespaces are this program's.
const LOCK: &str = "/run/holdfast-atlas.lock";

/// In each directory that this program has made, and may therefore empty.
const MARK: &str = "atlas-was-here";

/// Grids over six machines, every fault for each of them, and guests that check every byte
///
/// Fails on any error that a guest sees, any wrong byte, any request that takes longer than it may, redundancy that does not come
/// back, a process that ends by itself, and any ERROR line in a log. Needs root, for network namespaces.
#[derive(Parser, Debug)]
#[command(name = "holdfast-atlas", version, args_override_self = true)]
struct Arguments {
    /// Only these faults, for example kill:n1,hang:h1+n2,kill:h1+slow:n3
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,

    /// A handful of faults, in about five minutes
    #[arg(long)]
    short: bool,

    /// Print the faults of a run, and what is expected of each
    #[arg(long)]
    list: bool,

    /// How long a fault lasts; longer where a host is silent, for its guests to leave it
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,

    /// How long a guest that waits hears nothing before it leaves its host; less than 25 is not safe
    #[arg(long, default_value_t = 25.0)]
    silence: f64,

    /// Seconds that a request may take, over all paths
    #[arg(long, default_value_t = 60.0)]
    patience: f64,

    /// Requests that each of the twelve guests has under way
    #[arg(long, default_value_t = 4)]
    depth: usize,

    /// Requests that each guest begins in a second
    #[arg(long, default_value_t = 25.0)]
    rate: f64,

    /// Size of each volume
    #[arg(long, default_value_t = 64)]
    volume_mib: u64,

    /// Size of each of the nine devices, all of it allocated
    #[arg(long, default_value_t = 768)]
    device_mib: u64,

    /// What is drawn follows from it; when it happens does not [default: from the clock]
    #[arg(long)]
    seed: Option<u64>,

    /// The program under test
    #[arg(long, default_value = "target/release/holdfast")]
    binary: PathBuf,

    /// Directory of the grid and its logs; made, or emptied if an earlier run has made it
    #[arg(long, default_value = "target/atlas")]
    dir: PathBuf,

    /// Where the table is written as JSON [default: atlas.json in the directory]
    #[arg(long)]
    json: Option<PathBuf>,

    /// The inner process of a run
    #[arg(long, hide = true)]
    inside: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let outcome = match (arguments.list, arguments.inside) {
        (true, _) => list(&arguments).map(|()| true),
        (false, true) => inner(&arguments),
        (false, false) => outer(&arguments),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("atlas: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn faults(arguments: &Arguments) -> Result<Vec<Fault>> {
    if !arguments.only.is_empty() {
        return arguments.only.iter().map(|text| Fault::parse(text)).collect();
    }
    Ok(if arguments.short { Fault::short() } else { Fault::atlas() })
}

fn list(arguments: &Arguments) -> Result<()> {
    for fault in faults(arguments)? {
        println!("{:<18} {}", fault.to_string(), fault.expectation());
    }
    Ok(())
}

/// Makes the namespaces, runs the inner process, and removes them.
fn outer(arguments: &Arguments) -> Result<bool> {
    faults(arguments)?;
    ensure!(
        rustix::process::geteuid().is_root(),
        "network namespaces are root's to make: run it as root, or with sudo"
    );
    ensure!(arguments.seconds > 0.0 && arguments.rate > 0.0 && arguments.depth > 0, "there is nothing to do");
    let binary = std::fs::canonicalize(&arguments.binary);
    let binary = binary.with_context(|| format!("no program {}; `./x build`", arguments.binary.display()))?;
    let lock = std::fs::File::options().create(true).truncate(false).write(true).open(LOCK)?;
    if rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        bail!("another run is at work on this machine ({LOCK} is locked); wait for it");
    }
    // What an interrupt does the inner process decides; this one waits for it, and cleans up.
    let ignored = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&ignored))?;
    }
    net::remove().context("what an earlier run has left can't be removed")?;
    let dir = make_dir(&arguments.dir)?;
    net::make()?;
    let outcome = run_inner(&binary, &dir);
    let removed = net::remove();
    for entry in std::fs::read_dir(&dir)?.flatten() {
        // Devices are large, and logs tell what there is to tell; after a failure both stay.
        if outcome.as_ref().is_ok_and(|passed| *passed) && entry.path().is_dir() {
            let _ = std::fs::remove_dir_all(entry.path().join("devices"));
        }
    }
    removed?;
    if !outcome.as_ref().is_ok_and(|passed| *passed) {
        say(&format!("logs and devices are kept in {}", dir.display()));
    }
    outcome
}

fn run_inner(binary: &Path, dir: &Path) -> Result<bool> {
    let own = std::env::current_exe().context("cannot tell where this program is")?;
    let mut command = Command::new("ip");
    command.args(["netns", "exec", &net::namespace(net::HUB)]).arg(own);
    command.args(std::env::args_os().skip(1)).arg("--inside");
    command.arg("--binary").arg(binary).arg("--dir").arg(dir);
    let status = command.status().context("cannot start `ip`; is iproute2 installed? (`./x setup`)")?;
    Ok(status.success())
}

/// An empty directory, marked as this program's.
fn make_dir(dir: &Path) -> Result<PathBuf> {
    let is_empty = std::fs::read_dir(dir).map_or(true, |mut entries| entries.next().is_none());
    if !is_empty {
        let shown = dir.display();
        ensure!(dir.join(MARK).exists(), "{shown} is not empty, and no run of this has made it: choose another --dir");
        std::fs::remove_dir_all(dir).with_context(|| format!("cannot empty {shown}"))?;
    }
    std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    std::fs::write(dir.join(MARK), b"a run of holdfast-atlas has made this directory, and the next one empties it\n")?;
    Ok(std::fs::canonicalize(dir)?)
}

/// The run itself, in the namespace of the bridge.
fn inner(arguments: &Arguments) -> Result<bool> {
    let stopped = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&stopped))?;
    }
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let options = Options {
        binary: arguments.binary.clone(),
        dir: arguments.dir.clone(),
        seed: arguments.seed.unwrap_or(clock.as_nanos() as u64 % 1_000_000),
        faults: faults(arguments)?,
        lasts: Duration::from_secs_f64(arguments.seconds),
        silence: Duration::from_secs_f64(arguments.silence),
        patience: Duration::from_secs_f64(arguments.patience),
        depth: arguments.depth,
        rate: arguments.rate,
        device_mib: arguments.device_mib,
        volume_mib: arguments.volume_mib,
    };
    say(&format!("seed {}, {} faults, in {}", options.seed, options.faults.len(), options.dir.display()));
    let report = atlas::run(&options, &stopped)?;
    let path = arguments.json.clone().unwrap_or_else(|| arguments.dir.join("atlas.json"));
    let text = serde_json::to_string_pretty(&report.json())?;
    std::fs::write(&path, text + "\n").with_context(|| format!("cannot write {}", path.display()))?;
    println!("{}", report.text());
    say(&format!("the same as JSON: {}", path.display()));
    Ok(report.passed())
}
