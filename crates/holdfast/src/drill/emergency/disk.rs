//! A disk of a node is gone, and another one takes its place.
//!
//! The device's file is put aside and its node killed and started anew, since a process does not miss a file that it has open:
//! the node comes up without that disk.
//!
//! Faults: until the replacement has begun the file is put back, and the node takes it up again by itself. After that it is put
//! back too, and is emptied as any device is that is replaced.

use super::{Calamity, Site, Steps, check_layouts};
use crate::grid::layout::{DeviceConfig, GridConfig};
use crate::grid::processes::Role;
use crate::grid::survey::{self, Requester};
use crate::grid::{self, SPARE_BYTES};
use anyhow::{Context, Result, bail};
use clap::Args;
use holdfast_api::{Concern, Finding, NodeView};
use holdfast_base::size::Size;
use rustix::process::Signal;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

/// A process that was killed is gone by then.
const GONE_WITHIN: Duration = Duration::from_secs(20);

#[derive(Args, Clone, Debug)]
pub struct DiskLossArgs {
    #[command(flatten)]
    pub common: super::EmergencyArgs,
    /// The device to lose, by node and place: a file, of a node of this machine [default: the one of these that holds most]
    #[arg(long, value_name = "NODE/N")]
    device: Option<String>,
    /// What takes its place: a block device or a file, which has to be empty [default: a new file in the grid's directory]
    #[arg(long, value_name = "PATH")]
    new: Option<PathBuf>,
}

/// The device that is lost.
struct Disk {
    node: u32,
    /// NODE/PLACE.
    name: String,
    device: DeviceConfig,
    path: PathBuf,
    aside: PathBuf,
}

pub struct DiskLoss {
    device: Option<String>,
    new: Option<PathBuf>,
    disk: Option<Disk>,
    is_being_replaced: bool,
}

impl DiskLoss {
    pub fn new(args: &DiskLossArgs) -> Result<DiskLoss> {
        let new = args.new.as_ref().map(std::path::absolute).transpose()?;
        Ok(DiskLoss { device: args.device.clone(), new, disk: None, is_being_replaced: false })
    }

    fn disk(&self) -> Result<&Disk> {
        self.disk.as_ref().context("the drill has not chosen a disk yet")
    }

    /// Refuses where nothing could take the disk's place.
    fn check_new(&self, site: &Site, config: &GridConfig) -> Result<()> {
        if let Some(path) = &self.new {
            return survey::check(path, &Requester::of(&site.dir, config)?, false).map(drop);
        }
        let (free, size_bytes) = (grid::free_bytes(site.dir.root())?, self.disk()?.device.size_bytes);
        if free < size_bytes.saturating_add(SPARE_BYTES) {
            bail!(
                "{} is free in {}, too little for another disk of {} beside the lost one; make room, or name another with \
                 --new PATH",
                Size(free),
                site.dir.root().display(),
                Size(size_bytes)
            );
        }
        Ok(())
    }
}

/// Devices of this machine that are files, with what they hold.
fn candidates(site: &Site, config: &GridConfig, nodes: &[NodeView]) -> Vec<(u64, Disk)> {
    let mut all = Vec::new();
    for node in &config.nodes {
        let told = nodes.iter().find(|view| view.id == node.id);
        for (place, device) in node.devices.iter().enumerate() {
            let path = site.dir.device_path(device);
            let stat = told.and_then(|node| node.devices.iter().find(|stat| stat.device == device.device));
            if let Some(stat) = stat.filter(|_| fs::symlink_metadata(&path).is_ok_and(|meta| meta.is_file())) {
                let mut aside = path.clone().into_os_string();
                aside.push(format!(".{}", site.volume));
                let (name, device, aside) = (format!("{}/{place}", node.id), device.clone(), aside.into());
                let held = stat.capacity_bytes.saturating_sub(stat.free_bytes);
                all.push((held, Disk { node: node.id, name, device, path, aside }));
            }
        }
    }
    all
}

impl Calamity for DiskLoss {
    fn name(&self) -> &'static str {
        "disk-loss"
    }

    fn check(&mut self, site: &Site) -> Result<()> {
        let (status, config) = (site.status()?, site.dir.load()?);
        check_layouts(&status)?;
        let candidates = candidates(site, &config, &status.nodes);
        let names: Vec<&str> = candidates.iter().map(|(_, disk)| disk.name.as_str()).collect();
        if names.is_empty() {
            bail!(
                "no device of this machine's nodes is a file, and a drill can't take a block device out. Pull a disk out by hand \
                 and see `holdfast status`; or drill a grid on files: `holdfast grid up --dir DIR`"
            );
        }
        if let Some(wanted) = self.device.as_deref().filter(|wanted| !names.contains(wanted)) {
            bail!("device {wanted} is no file of a node of this machine; these are: {}", names.join(", "));
        }
        let is_wanted = |disk: &Disk| self.device.as_ref().is_none_or(|wanted| *wanted == disk.name);
        let of = candidates.into_iter().filter(|(_, disk)| is_wanted(disk));
        self.disk = of.max_by_key(|(held, _)| *held).map(|(_, disk)| disk);
        self.check_new(site, &config)
    }

    fn warning(&self) -> String {
        let name = self.disk.as_ref().map_or("a device", |disk| &disk.name);
        format!("device {name} is lost under load, with its node for a moment, and replaced")
    }

    fn prepare(&mut self, _: &Site) -> Result<String> {
        let disk = self.disk()?;
        let (aside, path) = (disk.aside.display(), disk.path.display());
        Ok(format!("`mv {aside} {path}`, `holdfast node start {}` where that is down", disk.node))
    }

    fn strike(&mut self, site: &Site) -> Result<String> {
        let disk = self.disk()?;
        fs::rename(&disk.path, &disk.aside).with_context(|| format!("cannot put {} aside", disk.path.display()))?;
        let role = Role::Node(disk.node);
        role.signal(&site.dir, Signal::KILL)?;
        if !role.wait_gone(&site.dir, GONE_WITHIN) {
            bail!("node {} does not end although it was killed: its machine hangs", disk.node);
        }
        grid::start_node(&site.dir, disk.node, false)?;
        Ok(format!("device {} ({}) is gone, its node was started anew without it", disk.name, disk.path.display()))
    }

    fn is_told(&self) -> bool {
        true
    }

    fn is_told_by(&self, finding: &Finding) -> bool {
        let name = self.disk.as_ref().map(|disk| format!("device {} ", disk.name));
        finding.concern == Concern::Redundancy && name.is_some_and(|name| finding.what.contains(&name))
    }

    fn mend(&mut self, _: &Site, steps: &mut Steps) -> Result<()> {
        self.is_being_replaced = true;
        let name = &self.disk()?.name;
        let mut words = vec!["device", "replace", name];
        let new =
            self.new.as_ref().map(|path| path.to_str().context("the name of the new device is no text")).transpose()?;
        words.extend(new);
        steps.give(&words).map(drop)
    }

    fn undo(&mut self, site: &Site) -> Result<()> {
        let Some(disk) = &self.disk else { return Ok(()) };
        let (aside, path) = (disk.aside.display(), disk.path.display());
        if disk.aside.exists() {
            fs::rename(&disk.aside, &disk.path).with_context(|| format!("run `mv {aside} {path}`"))?;
        }
        grid::start_node(&site.dir, disk.node, false)
            .with_context(|| format!("run `holdfast node start {}`", disk.node))?;
        let config = site.dir.load()?;
        let is_there = config.nodes.iter().flat_map(|node| &node.devices).any(|of| of.device == disk.device.device);
        if self.is_being_replaced && is_there {
            bail!(
                "device {0} may be on its way out: `holdfast task watch` shows it; when nothing is left there, `holdfast \
                 device remove {0}` takes it out, and `holdfast device drain {0} --cancel` keeps it",
                disk.device.device
            );
        }
        Ok(())
    }

    fn clear_up(&mut self) -> Result<()> {
        let aside = &self.disk()?.aside;
        fs::remove_file(aside).with_context(|| format!("cannot delete {}", aside.display()))
    }
}
