//! `holdfast-atlas`: a grid over six network namespaces, every fault for each of them, a table at the end.

use anyhow::{Context, Result, ensure};
use clap::Parser;
use holdfast_torture::atlas::fault::Fault;
use holdfast_torture::atlas::order::Order;
use holdfast_torture::atlas::{self, Happens, Options, launch, say};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A grid over six machines, every fault for each of them, and guests that check every byte
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

    /// Two machines with hosts and nodes, and a witness, instead of six: orders of losing and regaining them and their link
    #[arg(long, conflicts_with_all = ["only", "short"])]
    two_nodes: bool,

    /// Machines that are alike: the first burns, another one comes in its place, and then all of etcd is emptied
    #[arg(long, conflicts_with_all = ["only", "short", "two_nodes"])]
    burn: bool,

    /// Orders that are drawn
    #[arg(long, default_value_t = 12, requires = "two_nodes")]
    orders: usize,

    /// Only this order, for example kill:h1>cut:w>kill:h1>link; who is named again comes back. May be given several times
    #[arg(long, requires = "two_nodes")]
    order: Vec<String>,

    /// Print the faults of a run, and what is expected of each
    #[arg(long)]
    list: bool,

    /// How long a fault lasts; longer where a host is silent, for its guests to leave it
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,

    /// How late frames of a slow machine are, in each direction
    #[arg(long, default_value_t = 100)]
    slow_ms: u64,

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

fn seed(arguments: &Arguments) -> u64 {
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    arguments.seed.unwrap_or(clock.as_nanos() as u64 % 1_000_000)
}

fn happens(arguments: &Arguments, seed: u64) -> Result<Happens> {
    if arguments.burn {
        return Ok(Happens::Burn);
    }
    if !arguments.two_nodes {
        return Ok(Happens::Faults(faults(arguments)?));
    }
    Ok(Happens::Orders(match arguments.order.is_empty() {
        true => Order::draw(seed, arguments.orders),
        false => arguments.order.iter().map(|text| Order::parse(text)).collect::<Result<_>>()?,
    }))
}

fn faults(arguments: &Arguments) -> Result<Vec<Fault>> {
    if !arguments.only.is_empty() {
        return arguments.only.iter().map(|text| Fault::parse(text)).collect();
    }
    Ok(if arguments.short { Fault::short() } else { Fault::atlas() })
}

fn list(arguments: &Arguments) -> Result<()> {
    match happens(arguments, seed(arguments))? {
        Happens::Faults(faults) => {
            faults.iter().for_each(|fault| println!("{:<18} {}", fault.to_string(), fault.expectation()));
        }
        Happens::Orders(orders) => orders.iter().for_each(|order| println!("{order}")),
        Happens::Burn => atlas::burn::PHASES.iter().for_each(|phase| println!("{phase}")),
    }
    Ok(())
}

fn outer(arguments: &Arguments) -> Result<bool> {
    happens(arguments, 0)?;
    ensure!(arguments.seconds > 0.0 && arguments.rate > 0.0 && arguments.depth > 0, "there is nothing to do");
    launch::outer(&arguments.binary, &arguments.dir)
}

/// The run itself, in the namespace of the bridge.
fn inner(arguments: &Arguments) -> Result<bool> {
    let stopped = launch::interrupted()?;
    let seed = seed(arguments);
    let options = Options {
        binary: arguments.binary.clone(),
        dir: arguments.dir.clone(),
        seed,
        happens: happens(arguments, seed)?,
        lasts: Duration::from_secs_f64(arguments.seconds),
        slow: Duration::from_millis(arguments.slow_ms),
        silence: Duration::from_secs_f64(arguments.silence),
        patience: Duration::from_secs_f64(arguments.patience),
        depth: arguments.depth,
        rate: arguments.rate,
        device_mib: arguments.device_mib,
        volume_mib: arguments.volume_mib,
    };
    say(&format!("seed {}, in {}", options.seed, options.dir.display()));
    let report = atlas::run(&options, &stopped)?;
    let path = arguments.json.clone().unwrap_or_else(|| arguments.dir.join("atlas.json"));
    let text = serde_json::to_string_pretty(&report.json())?;
    std::fs::write(&path, text + "\n").with_context(|| format!("cannot write {}", path.display()))?;
    println!("{}", report.text());
    say(&format!("the same as JSON: {}", path.display()));
    Ok(report.passed())
}
