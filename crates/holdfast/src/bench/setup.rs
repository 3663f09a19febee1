//! What a benchmark has of a grid: volumes, clones and files of its own, which go with it.

use super::load::{Done, Load, Target, run};
use crate::client;
use crate::drill::grid::{Grid, LocalGrid};
use crate::drill::rejoin::Volumes;
use crate::drill::tools::{WorkDir, sleep};
use crate::grid::layout::GridDir;
use anyhow::{Context, Result};
use holdfast_api::{HostStatus, Request, SpaceUse};
use holdfast_format::geometry::Layout;
use holdfast_format::packing::Compression;
use holdfast_volume::protect;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// How long a volume may take to come to rest.
const SETTLE_MAX: Duration = Duration::from_secs(300);

/// Nothing has moved for so long: it rests. What packs blocks at rest begins later.
pub const REST: Duration = Duration::from_secs(5);
pub const PACKED_REST: Duration = Duration::from_secs(30);

const POLL: Duration = Duration::from_millis(500);

pub struct Setup {
    dir: GridDir,
    // Before the grid, which it is removed from.
    volumes: Vec<String>,
    work: WorkDir,
}

impl Setup {
    /// Refuses a grid that has lost a node.
    pub fn begin(dir: &GridDir) -> Result<Setup> {
        LocalGrid::new(dir.clone()).wait_until_up()?;
        let work = WorkDir::create(dir.root(), false)?;
        Ok(Setup { dir: dir.clone(), volumes: Vec::new(), work })
    }

    /// A name that nothing else has.
    pub fn name(&self, what: &str) -> String {
        format!("bench-{}-{what}", std::process::id())
    }

    pub fn create(&mut self, what: &str, size_bytes: u64, layout: Layout) -> Result<String> {
        let name = self.name(what);
        let made = LocalGrid::new(self.dir.clone()).create_volume(&name, size_bytes, &layout.to_string());
        // Also one that was made and can't be used goes in the end.
        if made.is_ok() || self.status()?.volumes.iter().any(|volume| volume.name == name) {
            self.volumes.push(name.clone());
        }
        made.map(|()| name)
    }

    /// Clones of what a volume holds now.
    pub fn clones(&mut self, of: &str, count: u32) -> Result<Vec<String>> {
        client::volume(&self.dir, &Request::SnapshotCreate { volume: of.to_string(), name: "image".to_string() })?;
        (0..count)
            .map(|n| {
                let name = format!("{of}-vm{n}");
                let source = format!("{of}@image");
                let request = Request::VolumeClone {
                    source,
                    name: name.clone(),
                    size_bytes: None,
                    separate: false,
                    export: true,
                };
                client::volume(&self.dir, &request)?;
                self.volumes.push(name.clone());
                Ok(name)
            })
            .collect()
    }

    pub fn reduce(&self, volume: &str) -> Result<()> {
        let request = Request::VolumeSet {
            name: volume.to_string(),
            layout: None,
            fixed: None,
            checked_reads: None,
            compression: Some(Compression::Auto),
            tiers: None,
            limit: None,
            sharing: None,
        };
        client::volume(&self.dir, &request).map(drop)
    }

    /// Removes what there is by now.
    pub fn remove_all(&mut self) {
        let grid = LocalGrid::new(self.dir.clone());
        let mut volumes = Volumes::new(&grid, false);
        // Clones go before what they were made of.
        volumes.names = self.volumes.drain(..).rev().collect();
    }

    /// A file of so many bytes beside the grid's own.
    pub fn file(&self, size_bytes: u64) -> Result<PathBuf> {
        let path = self.work.path().join("bare");
        let file = std::fs::File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, size_bytes)
            .with_context(|| format!("no room for {} of {size_bytes} bytes", path.display()))?;
        Ok(path)
    }

    pub fn run(&self, targets: &[Target], load: &Load) -> Result<Done> {
        run(&self.dir, targets, load)
    }

    pub fn status(&self) -> Result<HostStatus> {
        LocalGrid::new(self.dir.clone()).status()
    }

    /// Requests of shards that a volume has sent to nodes, and what clients read.
    pub fn shard_reads(&self, volume: &str) -> Result<(u64, u64)> {
        let status = self.status()?;
        let live = status.volumes.iter().find(|of| of.name == volume).and_then(|of| of.live.as_ref());
        let counters = &live.with_context(|| format!("volume {volume} is not open any more"))?.counters;
        Ok((counters.shard_reads, counters.read_bytes))
    }

    /// What these volumes take.
    fn space(&self, names: &[String]) -> Result<Vec<SpaceUse>> {
        let (volumes, _) = client::space(&self.dir)?;
        let of = |name: &String| {
            let found = volumes.iter().find(|of| of.name == *name);
            Ok(found.with_context(|| format!("volume {name} is not open any more"))?.space)
        };
        names.iter().map(of).collect()
    }

    /// Waits until volumes have done in the background what they had to; what each takes then.
    pub fn settle(&self, names: &[String], rest: Duration) -> Result<Vec<SpaceUse>> {
        let (begun, mut since, mut last) = (Instant::now(), Instant::now(), self.space(names)?);
        while since.elapsed() < rest && begun.elapsed() < SETTLE_MAX {
            sleep(POLL)?;
            let now = self.space(names)?;
            if now != last {
                (since, last) = (Instant::now(), now);
            }
        }
        Ok(last)
    }

    /// Whether this grid can have volumes of a layout.
    pub fn bears(&self, layout: Layout) -> Result<bool> {
        let status = self.status()?;
        let by_node: Vec<usize> = status.nodes.iter().map(|node| node.devices.len()).collect();
        Ok(protect::lacks(layout, &by_node).is_none())
    }

    /// Cores, nodes and devices.
    pub fn machine(&self) -> Result<String> {
        let status = self.status()?;
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let own = self.dir.load()?.nodes.len();
        let devices: usize = status.nodes.iter().map(|node| node.devices.len()).sum();
        let nodes = status.nodes.len();
        let shared = if own == nodes { ", all on this machine, clients too" } else { "" };
        Ok(format!("{cores} cores; {nodes} nodes with {devices} devices{shared}"))
    }
}

impl Drop for Setup {
    fn drop(&mut self) {
        self.remove_all();
    }
}

pub fn volumes(names: &[String]) -> Vec<Target> {
    names.iter().map(|name| Target::Volume(name.clone())).collect()
}
