//! `holdfast-guest`: a QEMU guest with ext4 on a volume that is handed over, and whose owner is killed.

use anyhow::{Context, Result};
use clap::Parser;
use holdfast_torture::atlas::{launch, say};
use holdfast_torture::guest::{self, Options};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// A real guest on a volume that is handed over twice, and whose owner is then killed
///
/// Fails on an I/O error in the guest, a file whose checksum is not right, a file system that is not clean, and any gap of a
/// minute. Needs root, for network namespaces, and what `./x setup --guests` fetches.
#[derive(Parser, Debug)]
#[command(name = "holdfast-guest", version, args_override_self = true)]
struct Arguments {
    /// Move the guest between two QEMUs, each at the socket of another host, and hand the volume over after it
    #[arg(long)]
    migrate: bool,

    /// Seconds that the guest writes after each event
    #[arg(long, default_value_t = 12.0)]
    pause: f64,

    /// Size of each of the nine devices, all of it allocated
    #[arg(long, default_value_t = 768)]
    device_mib: u64,

    /// Size of the guest's disk
    #[arg(long, default_value_t = 512)]
    volume_mib: u64,

    /// The program under test
    #[arg(long, default_value = "target/release/holdfast")]
    binary: PathBuf,

    /// Where the guest's kernel and programs were unpacked
    #[arg(long, default_value = "target/tools/guest")]
    parts: PathBuf,

    /// Directory of the grid and its logs; made, or emptied if an earlier run has made it
    #[arg(long, default_value = "target/guest")]
    dir: PathBuf,

    /// The inner process of a run
    #[arg(long, hide = true)]
    inside: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let outcome = match arguments.inside {
        true => inner(&arguments),
        false => guest::check(&arguments.parts).and_then(|()| launch::outer(&arguments.binary, &arguments.dir)),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("guest: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The run itself, in the namespace of the bridge.
fn inner(arguments: &Arguments) -> Result<bool> {
    let stopped = launch::interrupted()?;
    let options = Options {
        binary: arguments.binary.clone(),
        dir: arguments.dir.clone(),
        parts: arguments.parts.clone(),
        pause: Duration::from_secs_f64(arguments.pause),
        device_mib: arguments.device_mib,
        volume_mib: arguments.volume_mib,
        migrate: arguments.migrate,
    };
    let report = guest::run(&options, &stopped)?;
    let path = arguments.dir.join("guest.json");
    let text = serde_json::to_string_pretty(&report.json())?;
    std::fs::write(&path, text + "\n").with_context(|| format!("cannot write {}", path.display()))?;
    println!("{}", report.text());
    say(&format!("the same as JSON: {}", path.display()));
    Ok(report.failures.is_empty())
}
