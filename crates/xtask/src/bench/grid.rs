//! A grid of its own for one measurement: made, asked, and gone with its directory when it is dropped.

use crate::tools;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How large a grid is.
#[derive(Clone, Copy)]
pub struct Shape {
    pub nodes: u64,
    /// Of each node.
    pub devices: u64,
    pub device_mib: u64,
}

impl Shape {
    pub const USUAL: Shape = Shape { nodes: 4, devices: 2, device_mib: 2048 };
}

/// A directory for one measurement; gone, with everything in it, when this is dropped.
pub struct Directory(PathBuf);

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Directory {
    /// It must not exist.
    pub fn make(path: PathBuf) -> Result<Directory> {
        std::fs::create_dir(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(Directory(path))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

pub struct Grid {
    binary: PathBuf,
    dir: PathBuf,
}

impl Drop for Grid {
    fn drop(&mut self) {
        let mut down = self.holdfast(&["grid", "down", "--force"]);
        // A grid that never came up has nothing to take down, and that is said already.
        let _ = down.stdout(Stdio::null()).stderr(Stdio::null()).status();
        if let Err(error) = std::fs::remove_dir_all(&self.dir) {
            eprintln!("bench: cannot remove {}: {error}", self.dir.display());
        }
    }
}

impl Grid {
    /// Makes `dir`, which must not exist, and brings a grid up in it, with these options of `grid up` besides.
    pub fn make(binary: &Path, dir: PathBuf, shape: Shape, options: &[&str]) -> Result<Grid> {
        let Shape { nodes, devices, device_mib } = shape;
        let (nodes, devices, size) = (nodes.to_string(), devices.to_string(), format!("{device_mib}MiB"));
        let up = ["--nodes", &nodes, "--devices", &devices, "--device-size", &size];
        Grid::up(binary, dir, &[&up, options].concat())
    }

    /// Makes `dir`, which must not exist, and has what these options of `grid up` say in it: a host that joins a grid, say.
    pub fn up(binary: &Path, dir: PathBuf, options: &[&str]) -> Result<Grid> {
        std::fs::create_dir(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let grid = Grid { binary: binary.to_path_buf(), dir };
        grid.done(&[&["grid", "up"], options].concat())?;
        Ok(grid)
    }

    /// Where files may lie that go with the grid.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn holdfast(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.binary);
        command.args(arguments).env("HOLDFAST_DIR", self.dir.join("grid"));
        command
    }

    /// Runs a command that must succeed; returns what it said.
    pub fn done(&self, arguments: &[&str]) -> Result<String> {
        tools::output_of(&mut self.holdfast(arguments))
    }

    pub fn create_volume(&self, name: &str, size_mib: u64, layout: &str) -> Result<()> {
        let size = format!("{size_mib}MiB");
        self.done(&["volume", "create", name, "--size", &size, "--layout", layout]).map(drop)
    }

    pub fn uri(&self, volume: &str) -> String {
        format!("nbd+unix:///{volume}?socket={}", self.dir.join("grid/nbd.sock").display())
    }

    pub fn status(&self) -> Result<Value> {
        tools::json_of(&mut self.holdfast(&["grid", "status", "--json"]))
    }

    pub fn volume(&self, name: &str) -> Result<Value> {
        tools::json_of(&mut self.holdfast(&["volume", "show", name, "--json"]))
    }

    pub fn host_pid(&self) -> Result<u64> {
        self.status()?["host"]["pid"].as_u64().context("status tells no process of the host")
    }

    /// CPU time so far: the host's, and all nodes'.
    pub fn cpu_ms(&self) -> Result<(f64, f64)> {
        cpu_ms(&self.status()?)
    }

    /// A setting of the host that is a number: bytes or seconds.
    pub fn host_setting(&self, key: &str) -> Result<u64> {
        let all = tools::json_of(&mut self.holdfast(&["config", "show", "--json"]))?;
        let found = all.as_array().into_iter().flatten().find(|setting| setting["key"] == key);
        found.and_then(|setting| setting["number"].as_u64()).with_context(|| format!("the host has no setting {key}"))
    }

    /// Sets one, and nothing else; the grid is down and up again afterwards.
    pub fn set_host_setting(&self, key: &str, value: &str) -> Result<()> {
        self.done(&["grid", "down"])?;
        let path = self.dir.join("grid/holdfast.toml");
        std::fs::write(&path, format!("{key} = \"{value}\"\n"))
            .with_context(|| format!("cannot write {}", path.display()))?;
        self.done(&["grid", "up"]).map(drop)
    }

    pub fn host_log(&self) -> Result<String> {
        let path = self.dir.join("grid/logs/host.log");
        std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    }

    /// Waits until every volume is whole and nothing moves in the background any more.
    pub fn settle(&self) -> Result<()> {
        const SETTLED_AFTER: Duration = Duration::from_secs(300);
        const PAUSE: Duration = Duration::from_secs(3);
        const WORK: [&str; 6] =
            ["segments_written", "segments_cleaned", "shards_deleted", "shards_rebuilt", "shards_moved", "folds"];
        let since = Instant::now();
        let mut last = None;
        loop {
            let status = self.status()?;
            let volumes = status["volumes"].as_array().context("status lists no volumes")?;
            let live: Vec<&Value> = volumes.iter().map(|v| &v["live"]).collect();
            let is_whole = live
                .iter()
                .all(|l| l["degraded_segments"].as_u64() == Some(0) && l["at_risk_entries"].as_u64() == Some(0));
            let work: Vec<u64> =
                live.iter().flat_map(|l| WORK.iter().map(|w| l["counters"][w].as_u64().unwrap_or(0))).collect();
            if is_whole && last.as_ref() == Some(&work) {
                return Ok(());
            }
            if since.elapsed() > SETTLED_AFTER {
                bail!("the grid did not come to rest within {} s", SETTLED_AFTER.as_secs());
            }
            last = Some(work);
            std::thread::sleep(PAUSE);
        }
    }
}

/// CPU time so far, from a status: the host's, and all nodes'.
pub fn cpu_ms(status: &Value) -> Result<(f64, f64)> {
    let nodes = status["nodes"].as_array().context("status lists no nodes")?;
    let nodes = nodes.iter().filter_map(|n| n["cpu_ms"].as_f64()).sum();
    Ok((status["host"]["cpu_ms"].as_f64().context("status tells no CPU time")?, nodes))
}
