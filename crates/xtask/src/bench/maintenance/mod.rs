//! `./x bench --maintenance`: what background maintenance costs guests, and what it takes, each part on a grid of its own.
//!
//! A part that can't be measured says why; the others go on, and the command fails at its end.

mod full;
mod map;
mod options;
mod overwrite;
mod rebuild;
mod recovery;
mod snapshots;

use super::fio;
use super::grid::{Directory, Grid, Shape, USUAL};
use super::report::{self, Report};
use crate::tools;
use anyhow::{Context, Result, bail};
use options::Options;

use std::path::{Path, PathBuf};

/// What a device gives to guests is about this part of it; the rest is its journal, and a reserve.
const DEVICE_SHARE: f64 = 0.84;

/// Bytes of devices for each byte in `parity:2+1`.
const PARITY: f64 = 1.5;
const LAYOUT: &str = "parity:2+1";

type Measure = fn(&Setup, &mut Report) -> Result<()>;

const PARTS: &[(&str, &str, Measure)] = &[
    ("snapshots", "Snapshots and clones", snapshots::measure),
    ("rebuild", "Rebuilding after the loss of a node", rebuild::measure),
    ("map", "Map of a large thin volume", map::measure),
    ("recovery", "Recovery of a host", recovery::measure),
    ("overwrite", "Overwriting a full grid", overwrite::measure),
    ("packed", "Overwriting a full grid of packed blocks", overwrite::measure_packed),
    ("skewed", "Overwriting a full grid, four of five writes in a fifth of it", overwrite::measure_skewed),
    ("full", "A pool filled up and emptied, five times", full::measure),
];

/// What every part is given.
struct Setup {
    binary: PathBuf,
    /// Gone, with everything in it, when this is dropped.
    dir: Directory,
    options: Options,
}

impl Setup {
    /// A grid for `guest_mib` in `parity:2+1` on that many nodes, with `slack` times the room that this takes.
    fn grid(&self, name: &str, guest_mib: u64, nodes: u64, slack: f64) -> Result<Grid> {
        let Shape { nodes: all, devices: of_node, .. } = USUAL;
        let devices = (nodes * of_node) as f64;
        let device_mib = (guest_mib as f64 * PARITY * slack / devices / DEVICE_SHARE).ceil() as u64;
        let device_mib = device_mib.max(self.options.device_mib_min);
        say(&format!("{name}: making a grid of {all} nodes with {of_node} devices of {device_mib} MiB each"));
        Grid::make(&self.binary, self.dir.path().join(name), Shape { device_mib, ..USUAL }, &[])
    }

    /// A volume that was written in full once.
    fn filled_volume(&self, grid: &Grid, name: &str, size_mib: u64) -> Result<()> {
        grid.create_volume(name, size_mib, LAYOUT)?;
        say(&format!("writing all {size_mib} MiB of {name}"));
        let mut command = fio::command(size_mib);
        command.args(fio::nbd(&grid.uri(name))).args(fio::FILL);
        fio::report_of(&mut command, name).map(drop)
    }
}

pub fn run(arguments: &[String]) -> Result<()> {
    let options = options::parse(arguments)?;
    let binary = match &options.binary {
        Some(binary) => std::path::absolute(binary)?,
        None => tools::build_release()?,
    };
    let dir = match &options.dir {
        Some(dir) => std::path::absolute(dir)?,
        None => std::env::temp_dir(),
    };
    let dir = Directory::make(dir.join(format!("holdfast-maintenance-{}", std::process::id())))?;
    let setup = Setup { binary, dir, options };
    let mut failed = Vec::new();
    let mut reports = Vec::new();
    let chosen = |name: &str| setup.options.only.is_empty() || setup.options.only.iter().any(|o| o == name);
    for (name, title, measure) in PARTS.iter().filter(|(name, _, _)| chosen(name)) {
        let mut report = Report::new(name, title);
        if let Err(error) = measure(&setup, &mut report) {
            report.remark(format!("not measured to its end: {error:#}"));
            failed.push(*name);
        }
        if !setup.options.json {
            report.print();
        }
        reports.push(report);
    }
    if setup.options.json {
        println!("{}", serde_json::to_string_pretty(&report::json(&reports))?);
    }
    if !failed.is_empty() {
        bail!("not measured to its end: {}", failed.join(", "));
    }
    Ok(())
}

/// What guests can write of a grid, by `holdfast space`.
fn writable_mib(grid: &Grid) -> Result<f64> {
    let space = grid.json(&["space"])?;
    let found = space["writable"].as_array().into_iter().flatten().find(|of| of["layout"] == LAYOUT);
    let bytes = found.and_then(|of| of["bytes"].as_f64());
    Ok(bytes.with_context(|| format!("`holdfast space` tells nothing of {LAYOUT}"))? / 1048576.0)
}

/// Removes a file that is in the way of what comes next.
fn remove(path: &Path) -> Result<()> {
    std::fs::remove_file(path).with_context(|| format!("cannot remove {}", path.display()))
}

fn say(text: &str) {
    eprintln!("bench: {text}");
}
