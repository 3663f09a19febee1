//! What a `grid up` has begun that makes a grid or joins one, written down before anything of it is done:
//! `grid.creating`.
//!
//! Role: for the same command, given again after it was cut short. It takes no other numbers for nodes than those that
//! were taken, and takes devices that it has made its own already.
//!
//! Invariant: what is taken back belongs to nobody else. A node's number is this command's where the devices are, and
//! their ids were given to no others.

use super::layout::{DeviceConfig, GridDir, NodeConfig, remove_if_there, write_durably};
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::PathBuf;

/// A grid, and the devices of nodes whose numbers may not be known yet.
#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Begun {
    grid: String,
    devices: Vec<DeviceConfig>,
}

impl Begun {
    pub fn new(grid: &str, devices: Vec<DeviceConfig>) -> Begun {
        Begun { grid: grid.to_string(), devices }
    }

    /// What was begun in a directory and is not complete; without what it was, where an older release has written that
    /// down.
    pub fn load(dir: &GridDir) -> Result<Option<Begun>> {
        let path = dir.creating_path();
        match fs::read(&path) {
            Ok(text) => Ok(Some(serde_json::from_slice(&text).unwrap_or_default())),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e).with_context(|| format!("cannot read {}; check its permissions", path.display())),
        }
    }

    /// Beside what was begun before in the same grid: numbers of that may be taken still.
    pub fn after(mut self, before: Option<Begun>) -> Begun {
        let before = before.filter(|before| before.grid == self.grid);
        self.devices.extend(before.into_iter().flat_map(|before| before.devices));
        self
    }

    pub fn save(&self, dir: &GridDir) -> Result<()> {
        write_durably(&dir.creating_path(), &serde_json::to_vec(self).expect("our configuration always encodes"))
    }

    /// The grid is made, or joined.
    pub fn done(dir: &GridDir) -> Result<()> {
        remove_if_there(&dir.creating_path())
    }

    /// A node that a command has taken the number for which was cut short then.
    pub fn is_of(&self, node: &NodeConfig) -> bool {
        let is_ours = |device: &DeviceConfig| self.devices.iter().any(|own| own.device == device.device);
        !node.devices.is_empty() && node.devices.iter().all(is_ours)
    }

    /// Devices that were there before, and are perhaps made the grid's.
    pub fn given(&self) -> impl Iterator<Item = (&DeviceConfig, &str)> {
        self.devices.iter().filter(|device| device.path.is_absolute()).map(|device| (device, self.grid.as_str()))
    }
}

/// Devices of a node as its configuration names them: files have its number in their names.
pub fn named(devices: &[DeviceConfig], node: u32) -> Vec<DeviceConfig> {
    let named = |(index, device): (usize, &DeviceConfig)| match device.path.is_absolute() {
        true => device.clone(),
        false => DeviceConfig { path: PathBuf::from(format!("devices/node{node}-{index}.img")), ..device.clone() },
    };
    devices.iter().enumerate().map(named).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(id: &str) -> DeviceConfig {
        DeviceConfig { path: PathBuf::from("devices/x"), device: id.to_string(), size_bytes: 1 << 20 }
    }

    fn node(devices: &[&str]) -> NodeConfig {
        let devices = devices.iter().map(|id| device(id)).collect();
        NodeConfig { id: 2, address: "127.0.0.1:7501".parse().unwrap(), devices }
    }

    #[test]
    fn what_was_begun_is_known_by_its_devices() {
        let temp = tempfile::tempdir().unwrap();
        let dir = GridDir::choose(Some(temp.path())).unwrap();
        assert_eq!(Begun::load(&dir).unwrap(), None);
        let first = Begun::new("g", vec![device("1"), device("2")]);
        first.save(&dir).unwrap();
        let again = Begun::new("g", vec![device("3")]).after(Begun::load(&dir).unwrap());
        for (devices, is_of) in [(&["1", "2"][..], true), (&["3"], true), (&["1", "4"], false), (&[], false)] {
            assert_eq!(again.is_of(&node(devices)), is_of, "{devices:?}");
        }
        let elsewhere = Begun::new("h", vec![device("3")]).after(Some(first));
        assert!(!elsewhere.is_of(&node(&["1"])), "of another grid");
        fs::write(dir.creating_path(), "this grid is not complete: its devices hold nothing\n").unwrap();
        assert_eq!(Begun::load(&dir).unwrap(), Some(Begun::default()), "an older release's");
        let paths: Vec<_> = named(&[device("1"), device("2")], 7).into_iter().map(|device| device.path).collect();
        assert_eq!(paths, ["devices/node7-0.img", "devices/node7-1.img"].map(PathBuf::from));
    }
}
