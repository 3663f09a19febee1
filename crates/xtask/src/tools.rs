//! Running cargo and our own programs: where they are, and errors that say which command failed.

use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The workspace's directory.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().and_then(Path::parent).expect("crates/xtask lies two levels deep")
}

/// Where cargo puts what it builds.
pub fn target_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

/// The cargo that started us, so that a pinned toolchain stays the pinned one.
pub fn cargo_command() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    // Set for this process by `cargo run`; tests of other packages would see values that aren't theirs.
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("CARGO_PKG_")) {
        command.env_remove(name);
    }
    command.env_remove("CARGO_MANIFEST_DIR").env_remove("CARGO_MANIFEST_PATH").current_dir(root());
    command
}

pub fn cargo(arguments: &[&str], more: &[String]) -> Result<()> {
    let mut command = cargo_command();
    command.args(arguments).args(more);
    run(&mut command)
}

/// Git, asked of these sources.
pub fn git() -> Command {
    let mut command = Command::new("git");
    command.arg("-C").arg(root());
    command
}

/// A program of cargo's registry, of this version and no other, in a directory of its own; built the first time.
pub fn cargo_tool(name: &str, version: &str) -> Result<PathBuf> {
    let dir = target_dir().join("tools").join(format!("{name}-{version}"));
    let program = dir.join("bin").join(name);
    if !program.exists() {
        let mut command = cargo_command();
        command.args(["install", "--locked", "--quiet", "--version", version, name, "--root"]).arg(&dir);
        // Outside of this workspace: what is set for it is not for others.
        run(command.current_dir("/").env("CARGO_TARGET_DIR", dir.join("build")))?;
        let _ = std::fs::remove_dir_all(dir.join("build"));
    }
    Ok(program)
}

/// Runs a command to its end, its output passing through.
pub fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot start {}", shown(command)))?;
    if !status.success() {
        bail!("{} failed ({status})", shown(command));
    }
    Ok(())
}

/// Runs a command for its standard output; what it says on standard error passes through.
pub fn output_of(command: &mut Command) -> Result<String> {
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot start {}", shown(command)))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        bail!("{} failed ({})\n{text}", shown(command), output.status);
    }
    Ok(text)
}

/// The JSON document that a command prints; fio says notes before it.
pub fn json_of(command: &mut Command) -> Result<Value> {
    let text = output_of(command)?;
    let at = text.find(['{', '[']).unwrap_or(0);
    serde_json::from_str(&text[at..])
        .with_context(|| format!("{} printed something that is not JSON:\n{text}", shown(command)))
}

/// Builds the program as users get it, and `holdfast-restore` beside it; returns the first one's path.
pub fn build_release() -> Result<PathBuf> {
    let programs = ["--package", "holdfast", "--package", "holdfast-backup", "--bins"];
    cargo(&[&["build", "--release"], &programs[..]].concat(), &[])?;
    Ok(target_dir().join("release/holdfast"))
}

/// Builds programs with the profile of the tests: optimised, with assertions kept.
pub fn build_checked(programs: &[&str]) -> Result<()> {
    let mut arguments = vec!["build", "--profile", "test"];
    for program in programs {
        arguments.extend(["--bin", program]);
    }
    cargo(&arguments, &[])
}

/// Where [`build_checked`] puts them.
pub fn checked_program(name: &str) -> PathBuf {
    target_dir().join("debug").join(name)
}

fn shown(command: &Command) -> String {
    let mut text = Path::new(command.get_program()).file_name().unwrap_or_default().to_string_lossy().into_owned();
    for argument in command.get_args() {
        text.push(' ');
        text.push_str(&argument.to_string_lossy());
    }
    text
}

/// Python in an environment of its own, with packages of these versions.
pub fn python(name: &str, packages: &[&str]) -> Result<PathBuf> {
    let versions = packages.join("-").replace("==", "-");
    let dir = target_dir().join("tools").join(format!("{name}-{versions}"));
    let (program, complete) = (dir.join("bin/python"), dir.join("complete"));
    if !complete.exists() {
        run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&dir))?;
        run(Command::new(dir.join("bin/pip")).args(["install", "--quiet"]).args(packages))?;
        std::fs::write(&complete, "")?;
    }
    Ok(program)
}
