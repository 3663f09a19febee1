//! `./x atlas` and `./x guest`: the optimised binary over six machines; see `crates/torture/src/atlas/mod.rs` and
//! `crates/torture/src/guest/mod.rs`.

use crate::tools;
use anyhow::Result;
use std::process::Command;

/// Every fault of six machines.
pub fn run(arguments: &[String]) -> Result<()> {
    tools::run(program("holdfast-atlas", "atlas")?.args(arguments))
}

/// A real guest on a volume that changes hands.
pub fn guest(arguments: &[String]) -> Result<()> {
    let mut command = program("holdfast-guest", "guest")?;
    command.arg("--parts").arg(tools::target_dir().join("tools/guest"));
    tools::run(command.args(arguments))
}

/// Builds what users get and the program that tries it, whose own usage message says the rest.
fn program(name: &str, dir: &str) -> Result<Command> {
    let binary = tools::build_release()?;
    tools::cargo(&["build", "--release", "--package", "holdfast-torture", "--bin", name], &[])?;
    let mut command = Command::new(tools::target_dir().join("release").join(name));
    command.arg("--binary").arg(binary).arg("--dir").arg(tools::target_dir().join(dir));
    Ok(command)
}
