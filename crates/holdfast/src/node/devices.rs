//! The devices of a node's process: opened by threads of their own, and taken in and let go while it serves.
//!
//! Role: the shell ([`super::shell`]) has a device opened, and hears what became of it, or nothing while the device
//! hangs: a disk that does not answer may keep `open` waiting for minutes, and nobody else. It hears too which devices the
//! grid's directory names for its node, whenever that changes: `holdfast device add` writes it there.
//!
//! Safety: nothing is written to a device that is another's, or nobody's ([`ownership::claim`]).

use crate::daemon::outwait;
use crate::grid::layout::GridDir;
use crate::grid::ownership::{self, Claim};
use crate::logger;
use anyhow::{Context, Result};
use holdfast_base::{DeviceId, GridId, MediaClass, NodeId};
use holdfast_runtime::device::{self, Device, DeviceError};
use holdfast_runtime::mailbox::Sender;
use holdfast_store::Named;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Pace of looking whether grid.json has changed.
const LOOK_PACE: Duration = Duration::from_millis(250);

/// A device of a node, as the configuration has it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NodeDevice {
    pub path: PathBuf,
    /// Which it should be, as far as that was said.
    pub device: Option<DeviceId>,
}

impl Named for NodeDevice {
    /// By its id where that is known of both, else by its path.
    fn is(&self, other: &NodeDevice) -> bool {
        match (self.device, other.device) {
            (Some(own), Some(other)) => own == other,
            _ => self.is_at(other),
        }
    }

    fn is_at(&self, other: &NodeDevice) -> bool {
        self.path == other.path
    }
}

/// What it is made of, as far as the kernel says before it is opened.
pub fn class_of(device: &NodeDevice) -> Option<MediaClass> {
    device::media_at(&device.path)
}

/// What the shell hears.
pub enum DeviceEvent {
    /// The device in this place is open, or why not.
    Opened { place: usize, opened: Result<Device, String> },
    /// Where it was blank and was made this node's.
    Formatted { place: usize, device: DeviceId },
    /// The node has these devices from here on.
    Devices(Vec<NodeDevice>),
}

/// Whose devices are opened.
#[derive(Clone, Debug)]
pub struct Owner {
    pub grid: GridId,
    pub node: NodeId,
    pub dir: Option<PathBuf>,
}

/// Opens a device, from a thread of its own.
pub fn open(owner: Owner, place: usize, path: PathBuf, format_blank: bool, tell: Sender<DeviceEvent>) -> Result<()> {
    let work = move || {
        let opened = open_now(&owner, &path, format_blank);
        if let Ok((_, Some(device))) = &opened {
            note_formatted(&owner, &path, *device);
            // There is room for one of each kind from each place.
            let _ = tell.post(DeviceEvent::Formatted { place, device: *device });
        }
        let opened = opened.map(|(device, _)| device).map_err(|error| format!("{error:#}"));
        let _ = tell.post(DeviceEvent::Opened { place, opened });
    };
    std::thread::Builder::new().name("open".to_string()).spawn(work).context("no thread to open a device")?;
    Ok(())
}

fn open_now(owner: &Owner, path: &Path, format_blank: bool) -> Result<(Device, Option<DeviceId>)> {
    let device = outwait(|| device::open(path), |e| matches!(e, DeviceError::InUse { .. }))?;
    let formatted = match ownership::claim(&device, (owner.grid, owner.node), format_blank)? {
        Claim::Ours => None,
        Claim::Formatted(id) => Some(id),
    };
    Ok((device, formatted))
}

/// The grid's directory names the device that is there now, not the one that was.
fn note_formatted(owner: &Owner, path: &Path, device: DeviceId) {
    let Some(dir) = &owner.dir else { return };
    let noted = GridDir::choose(Some(dir)).and_then(|dir| crate::grid::note_device(&dir, owner.node, path, device));
    if let Err(error) = noted {
        logger::error(format_args!(
            "{} is formatted as device {device}, and grid.json names the former one still: {error:#}; write the id there by \
             hand",
            path.display()
        ));
    }
}

/// The devices that the grid's directory names for a node; none where it has the node no more.
pub fn named(dir: &GridDir, node: NodeId) -> Result<Vec<NodeDevice>> {
    let config = dir.load()?;
    let devices = config.nodes.iter().filter(|n| n.id == node.0).flat_map(|n| &n.devices);
    Ok(devices.map(|d| NodeDevice { path: dir.device_path(d), device: d.device.parse().ok() }).collect())
}

/// Looks at grid.json now and then, from a thread of its own.
pub fn watch(dir: PathBuf, node: NodeId, tell: Sender<DeviceEvent>) -> Result<()> {
    let dir = GridDir::choose(Some(&dir))?;
    let path = dir.config_path();
    let stamp = move || -> Option<(SystemTime, u64)> {
        let found = fs::metadata(&path).ok()?;
        Some((found.modified().ok()?, found.len()))
    };
    let mut seen = stamp();
    let look = move || {
        // What was written before the first look counts as well.
        let mut is_first = true;
        loop {
            let found = stamp();
            if (is_first || found != seen)
                && let Ok(devices) = named(&dir, node)
            {
                (seen, is_first) = (found, false);
                let _ = tell.post(DeviceEvent::Devices(devices));
            }
            std::thread::sleep(LOOK_PACE);
        }
    };
    std::thread::Builder::new().name("devices".to_string()).spawn(look).context("no thread to watch grid.json")?;
    Ok(())
}
