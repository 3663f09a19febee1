//! What `./x` runs: the parts of a test run in their order, the house rules (`tidy`), the demo, the benchmark, and thin
//! wrappers around the simulator and the torture programs.
//!
//! Few dependencies, no clap: this crate is compiled before anything else can start.

mod ansible;
mod atlas;
mod bench;
mod dashboard;
mod demo;
mod figures;
mod package;
mod picture;
mod schemathesis;
mod suite;
mod tidy;
mod tools;

use anyhow::{Result, bail};
use std::process::ExitCode;

const USAGE: &str = "usage: cargo run -p xtask -- build|test|tidy|docs|demo|sim|torture|atlas|guest|dashboard|schemathesis|\
                     ansible|package|bench|clean [ARGUMENTS]";

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let command = arguments.next().unwrap_or_default();
    let rest: Vec<String> = arguments.collect();
    match dispatch(&command, &rest) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("./x {command}: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(command: &str, rest: &[String]) -> Result<()> {
    std::env::set_current_dir(tools::root())?;
    match command {
        "build" => tools::cargo(&["build", "--workspace", "--release"], rest),
        "test" => suite::run(rest),
        "tidy" => tidy::run(),
        "docs" => figures::run(rest),
        "demo" => demo::run(rest),
        "sim" => suite::simulate(rest),
        "torture" => suite::torture(rest),
        "atlas" => atlas::run(rest),
        "guest" => atlas::guest(rest),
        "schemathesis" => schemathesis::run(rest),
        "dashboard" => dashboard::run(rest),
        "ansible" => ansible::run(),
        "package" => package::run(rest),
        "bench" => bench::run(rest),
        "clean" => tools::cargo(&["clean"], rest),
        _ => bail!("no such command\n{USAGE}"),
    }
}
