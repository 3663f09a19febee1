//! `holdfast grid units`: the grid's processes as services of systemd.

use super::format::{print, print_json};
use crate::grid::layout::GridDir;
use crate::grid::roles;
use crate::grid::units::{NAME_DEFAULT, OUTPUT_DEFAULT, Units};
use anyhow::{Context, Result};
use clap::Args;
use holdfast_api::{Code, refuse};
use serde_json::json;
use std::path::PathBuf;

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    holdfast grid down\n  \
    holdfast grid units\n  \
    systemctl daemon-reload && systemctl enable --now holdfast.target\n\n  \
    holdfast grid units --output /tmp/units      only to look at them\n  \
    holdfast grid units --name lab --dir /data/lab      another grid on the same machine\n\n\
    From then on `holdfast grid up`, `grid down`, `node start`, `node stop` and all else that starts or stops a process do it \
    through systemctl. To go back: systemctl disable --now holdfast.target, and delete the files.\n\
    For the grid in /var/lib/holdfast the package has units; then the files say what nodes and devices the grid has.")]
pub struct UnitsArgs {
    /// Where the files go
    #[arg(long, value_name = "DIR", default_value = OUTPUT_DEFAULT)]
    output: PathBuf,
    /// What their names begin with
    #[arg(long, default_value = NAME_DEFAULT)]
    name: String,
}

pub fn run(args: UnitsArgs, dir: &GridDir, json: bool) -> Result<()> {
    let UnitsArgs { output, name } = args;
    if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_') {
        refuse!(Code::Invalid, "`{name}` can't begin the names of units; choose a --name of letters, digits, - and _");
    }
    let output =
        std::path::absolute(&output).with_context(|| format!("cannot use {} as --output", output.display()))?;
    let config = dir.load()?;
    let units = Units::choose(dir, output, name);
    if let Some(others) = Units::of(dir).filter(|others| *others != units && units.is_searched()) {
        let (target, at) = (others.target(), others.directory.display());
        refuse!(
            Code::Exists,
            "{target} in {at} runs this grid already; disable it and delete its files first, or use its --name and --output"
        );
    }
    // Before systemd counts as the one that runs them.
    let by_hand = Units::of(dir).is_none();
    let running: Vec<String> = roles(&config)
        .into_iter()
        .filter(|role| by_hand && role.find(dir).is_some())
        .map(|role| role.to_string())
        .collect();
    if !running.is_empty() && units.is_searched() {
        refuse!(Code::State, "{} runs without systemd; stop the grid first: `holdfast grid down`", running.join(", "));
    }
    let files: Vec<PathBuf> = units.write(dir, &config)?.into_iter().map(|file| file.path).collect();
    if json {
        return print_json(&json!({ "files": files, "target": units.target(), "in_use": units.is_searched() }));
    }
    for file in &files {
        print(format_args!("wrote {}", file.display()))?;
    }
    if !units.is_searched() {
        return print("systemd does not look there: the grid is run as before");
    }
    print(format_args!("next: `systemctl daemon-reload && systemctl enable --now {}`", units.target()))
}
