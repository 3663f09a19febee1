//! `./x atlas`: the optimised binary under every fault of six machines; see `crates/torture/src/atlas/mod.rs`.

use crate::tools;
use anyhow::Result;
use std::process::Command;

/// Builds what users get and the program that tries it, and runs that; its own usage message says the rest.
pub fn run(arguments: &[String]) -> Result<()> {
    let binary = tools::build_release()?;
    tools::cargo(&["build", "--release", "--package", "holdfast-torture", "--bin", "holdfast-atlas"], &[])?;
    let mut command = Command::new(tools::target_dir().join("release/holdfast-atlas"));
    command.arg("--binary").arg(binary).arg("--dir").arg(tools::target_dir().join("atlas")).args(arguments);
    tools::run(&mut command)
}
