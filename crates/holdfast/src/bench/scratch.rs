//! A grid that is made for a benchmark, and goes with it.

use crate::grid::layout::GridDir;
use crate::grid::{Part, UpOptions, down, grow, up};
use anyhow::{Context, Result};
use clap::Args;
use holdfast_base::size::Size;
use std::path::PathBuf;

/// Whether a benchmark makes one, and of what.
#[derive(Args, Clone, Debug)]
pub struct ScratchArgs {
    /// On a grid of this machine that is made for it, below the directory for temporary files (TMPDIR), and goes with it
    #[arg(long)]
    pub scratch: bool,
    /// Nodes of that grid [default: as many as the report's, or what its layouts take]
    #[arg(long, requires = "scratch", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    nodes: Option<u32>,
    /// Devices of each node [default: as in the report, or two]
    #[arg(long, requires = "scratch", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    devices: Option<u32>,
    /// Size of each device
    #[arg(long, requires = "scratch", value_name = "SIZE", default_value = "2GiB")]
    device_size: Size,
}

/// Nodes, and devices of each.
pub type Shape = (u32, u32);

pub struct Scratch {
    dir: GridDir,
    root: PathBuf,
    nodes: u32,
}

impl Scratch {
    /// Makes it, if that is asked for; `shape` where nothing else is said.
    pub fn begin(args: &ScratchArgs, shape: Shape) -> Result<Option<Scratch>> {
        if !args.scratch {
            return Ok(None);
        }
        let (nodes, devices) = (args.nodes.unwrap_or(shape.0), args.devices.unwrap_or(shape.1));
        let root = std::env::temp_dir().join(format!("holdfast-bench-{}", std::process::id()));
        let scratch = Scratch { dir: GridDir::choose(Some(&root))?, root, nodes };
        let device_size = Some(args.device_size);
        let options = UpOptions { nodes: Some(nodes), devices: Some(devices), device_size, ..UpOptions::default() };
        eprintln!("a grid of {nodes} nodes with {devices} devices of {} each", args.device_size);
        up(&scratch.dir, &options).context("the grid of the benchmark can't be made")?;
        Ok(Some(scratch))
    }

    pub fn dir(&self) -> &GridDir {
        &self.dir
    }

    pub fn nodes(&self) -> u32 {
        self.nodes
    }

    /// As many nodes again, like those that are there.
    pub fn double(&self) -> Result<()> {
        for _ in 0..self.nodes {
            grow::add_node(&self.dir, &grow::Devices::Files(None, None), None)?;
        }
        Ok(())
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Where that fails the directory stays, for somebody to see why.
        let ended = !self.dir.exists() || down(&self.dir, Part::All, true).is_ok();
        if !ended || std::fs::remove_dir_all(&self.root).is_err() && self.root.exists() {
            eprintln!(
                "warning: {} stays; `holdfast grid down --force --dir {0}` ends what runs there",
                self.root.display()
            );
        }
    }
}
