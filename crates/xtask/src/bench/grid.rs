//! A grid of its own for one measurement: made, asked, and gone with its directory when it is dropped.

use anyhow::{Context, Result, bail};
use holdfast_lab::grid;
pub use holdfast_lab::grid::Shape;
use serde_json::Value;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The shape where none is asked for.
pub const USUAL: Shape = Shape { nodes: 4, devices: 2, device_mib: 2048 };

/// A directory for one measurement; gone, with everything in it, when this is dropped.
pub struct Directory(PathBuf);

impl Drop for Directory {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            eprintln!("bench: cannot remove {}: {error}", self.0.display());
        }
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
    // Dropped first: its processes end before its directory goes.
    grid: grid::Grid,
    around: Directory,
}

impl Deref for Grid {
    type Target = grid::Grid;

    fn deref(&self) -> &grid::Grid {
        &self.grid
    }
}

impl Grid {
    /// Makes `dir`, which must not exist, and brings a grid up in it, with these options of `grid up` besides.
    pub fn make(binary: &Path, dir: PathBuf, shape: Shape, options: &[&str]) -> Result<Grid> {
        let grid = Grid::begin(binary, dir)?;
        grid.grid.make(shape, options)?;
        Ok(grid)
    }

    /// Makes `dir`, which must not exist, and has what these options of `grid up` say in it: a host that joins a grid, say.
    pub fn up(binary: &Path, dir: PathBuf, options: &[&str]) -> Result<Grid> {
        let grid = Grid::begin(binary, dir)?;
        grid.run(&[&["grid", "up"], options].concat())?;
        Ok(grid)
    }

    fn begin(binary: &Path, dir: PathBuf) -> Result<Grid> {
        let around = Directory::make(dir)?;
        Ok(Grid { grid: grid::Grid::new(binary, &around.path().join("grid")).ended(), around })
    }

    /// Where files may lie that go with the grid.
    pub fn around(&self) -> &Path {
        self.around.path()
    }

    /// CPU time so far: the host's, and all nodes'.
    pub fn cpu_ms(&self) -> Result<(f64, f64)> {
        cpu_ms(&self.status()?)
    }

    /// A setting of the host that is a number: bytes or seconds.
    pub fn host_setting(&self, key: &str) -> Result<u64> {
        let all = self.json(&["config", "show"])?;
        let found = all.as_array().into_iter().flatten().find(|setting| setting["key"] == key);
        found.and_then(|setting| setting["number"].as_u64()).with_context(|| format!("the host has no setting {key}"))
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
