//! Devices of a node that a command is taking out: `grid.removing`, from before grid.json forgets them until all know
//! of it.
//!
//! Role: for the same command, given again after it was cut short, and for the next `grid up`: they go on with what is
//! left to do. Until then the devices are called what they were called, though their places are others' by now.

use super::layout::{DeviceConfig, GridConfig, GridDir, remove_if_there, write_durably};
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::fs;

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Removing {
    pub node: u32,
    /// By their places in the node.
    pub devices: Vec<(u32, DeviceConfig)>,
}

impl Removing {
    /// Those of these devices that a node of this machine has.
    pub fn of(config: &GridConfig, devices: &[String]) -> Option<Removing> {
        let of_node = |node: &super::NodeConfig| {
            let placed = node.devices.iter().enumerate().map(|(place, device)| (place as u32, device.clone()));
            let removed = placed.filter(|(_, device)| devices.contains(&device.device)).collect();
            Removing { node: node.id, devices: removed }
        };
        config.nodes.iter().map(of_node).find(|removing| !removing.devices.is_empty())
    }

    /// What was cut short when grid.json had forgotten the devices.
    pub fn left(dir: &GridDir, config: &GridConfig) -> Result<Option<Removing>> {
        let path = dir.removing_path();
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e).with_context(|| format!("cannot read {}; check its permissions", path.display())),
        };
        let removing: Removing = serde_json::from_slice(&text).with_context(|| {
            format!("{} is damaged: look which devices nothing names any more, then remove it", path.display())
        })?;
        let is_named = |id: &String| config.nodes.iter().any(|node| node.devices.iter().any(|d| d.device == *id));
        Ok(Some(removing).filter(|removing| !removing.ids().any(is_named)))
    }

    pub fn ids(&self) -> impl Iterator<Item = &String> {
        self.devices.iter().map(|(_, device)| &device.device)
    }

    /// The device of this name, its id or NODE/PLACE.
    pub fn named(&self, name: &str) -> Option<&String> {
        let is_it =
            |(place, device): &&(u32, DeviceConfig)| device.device == name || format!("{}/{place}", self.node) == name;
        self.devices.iter().find(is_it).map(|(_, device)| &device.device)
    }

    pub fn save(&self, dir: &GridDir) -> Result<()> {
        write_durably(&dir.removing_path(), &serde_json::to_vec(self).expect("our configuration always encodes"))
    }

    /// All know of it.
    pub fn done(dir: &GridDir) -> Result<()> {
        remove_if_there(&dir.removing_path())
    }
}
