//! The grid over six machines: how it is made, and whether all of it is well.

use super::machine::{Machine, Part, Shape, wait_etcd};
use super::net::Net;
use super::{LOOK_PACE, say};
use crate::logs;
use anyhow::{Context, Result};
use holdfast_lab::grid::make_key;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Devices of a node: as many as `nested-parity:2+1` wants.
const DEVICES: &str = "3";

/// How long a host that is back may take to say so.
const ANNOUNCED_MAX: Duration = Duration::from_secs(20);

/// A volume that both hosts are to offer.
#[derive(Clone, Copy, Debug)]
pub struct VolumeSpec {
    pub name: &'static str,
    pub layout: &'static str,
    pub is_encrypted: bool,
}

pub struct Site {
    pub net: Net,
    shape: &'static Shape,
    volumes: Vec<VolumeSpec>,
    machines: Vec<Machine>,
    key: PathBuf,
}

impl Site {
    /// Links the machines, starts etcd, makes the grid on the first, lets the others join, and makes the volumes.
    pub fn build(
        shape: &'static Shape,
        (binary, dir): (&Path, &Path),
        (device_mib, volume_mib): (u64, u64),
        volumes: &[VolumeSpec],
    ) -> Result<Site> {
        let net = Net::build(dir)?;
        let machines = shape.parts().into_iter().map(|part| Machine::new(part, shape, binary, dir)).collect();
        let mut site = Site { net, shape, volumes: volumes.to_vec(), machines, key: dir.join("sealed.key") };
        say("starting three members of etcd");
        for part in shape.voters {
            site.machine(part).start_etcd()?;
        }
        wait_etcd(&shape.voters)?;
        site.make_grid(device_mib)?;
        site.make_volumes(volume_mib)?;
        Ok(site)
    }

    pub fn machine(&mut self, part: Part) -> &mut Machine {
        self.machines.iter_mut().find(|machine| machine.part == part).expect("there is one of each part")
    }

    fn make_grid(&mut self, device_mib: u64) -> Result<()> {
        let (etcd, size) = (self.shape.endpoints(), format!("{device_mib}MiB"));
        let first = self.shape.nodes[0];
        for part in self.shape.parts().into_iter().filter(|part| *part != Part::W) {
            say(&format!("{part} {}", if part == first { "makes the grid" } else { "joins" }));
            let token = match part == first {
                true => String::new(),
                false => self.machine(first).holdfast(&["grid", "token"])?.trim().to_string(),
            };
            let (address, nbd) = (part.address().to_string(), part.nbd().to_string());
            let mut line = vec!["grid", "up", "--etcd", &etcd, "--name", part.name(), "--address", &address];
            if part.is_host() {
                // The namespaces reach nobody else.
                line.extend(["--nbd-tcp", &nbd, "--nbd-open"]);
            }
            if self.shape.is_node(part) {
                line.extend(["--nodes", "1", "--devices", DEVICES, "--device-size", &size]);
            } else {
                line.extend(["--nodes", "0"]);
            }
            if !token.is_empty() {
                line.extend(["--join", &token]);
            }
            self.machine(part).holdfast(&line)?;
        }
        // Not as many on each: so each talks to every one of the other's.
        for (at, part) in Part::HOSTS.into_iter().enumerate() {
            self.machine(part).set_reactors(at + 2)?;
        }
        Ok(())
    }

    fn make_volumes(&mut self, volume_mib: u64) -> Result<()> {
        make_key(&self.key)?;
        let (size, key) = (format!("{volume_mib}MiB"), self.key.to_string_lossy().into_owned());
        for VolumeSpec { name, layout, is_encrypted } in self.volumes.clone() {
            say(&format!("volume {name}: {layout}{}", if is_encrypted { ", encrypted" } else { "" }));
            let mut create = vec!["volume", "create", name, "--size", &size, "--layout", layout];
            let mut export = vec!["volume", "export", name, "--multipath"];
            if is_encrypted {
                create.extend(["--encrypt", "--key-file", &key]);
                export.extend(["--key-file", &key]);
            }
            self.machine(Part::H1).holdfast(&create)?;
            self.machine(Part::H2).holdfast(&export)?;
        }
        self.balance(0)
    }

    /// Hands volumes over until each host has every second one in service, counted from `turn` on.
    pub fn balance(&mut self, turn: usize) -> Result<()> {
        for (at, VolumeSpec { name, .. }) in self.volumes.clone().into_iter().enumerate() {
            let wanted = Part::HOSTS[(at + turn) % Part::HOSTS.len()];
            let shown = self.machine(Part::H1).json(&["volume", "show", name])?;
            let host =
                shown["host"].as_str().with_context(|| format!("volume {name} is in service nowhere: {shown}"))?;
            if host != wanted.name() {
                let from = Part::parse(host).with_context(|| format!("volume {name} is at {host}"))?;
                self.hand_over(name, from, wanted)?;
            }
        }
        Ok(())
    }

    /// Has one host serve all volumes.
    pub fn hand_all_over(&mut self, to: Part) -> Result<()> {
        for VolumeSpec { name, .. } in self.volumes.clone() {
            let shown = self.machine(to).json(&["volume", "show", name])?;
            let host = shown["host"].as_str().and_then(Part::parse);
            let from = host.with_context(|| format!("volume {name} is in service nowhere: {shown}"))?;
            if from != to {
                self.hand_over(name, from, to)?;
            }
        }
        Ok(())
    }

    /// Nothing can be handed over to a host that was out of reach until it has announced itself again.
    fn hand_over(&mut self, name: &str, from: Part, to: Part) -> Result<()> {
        let since = Instant::now();
        loop {
            match self.machine(from).holdfast(&["volume", "handover", name, "--to", to.name()]) {
                Err(error) if format!("{error:#}").contains("or it is down") && since.elapsed() < ANNOUNCED_MAX => {
                    std::thread::sleep(LOOK_PACE);
                }
                done => return done.map(drop),
            }
        }
    }

    /// What still keeps the grid from being whole; none when nothing does.
    pub fn lacks(&mut self) -> Option<String> {
        if let Some(what) = self.machines.iter_mut().find_map(Machine::missing) {
            return Some(what);
        }
        let volumes = self.volumes.clone();
        let mut owners = vec![0; volumes.len()];
        for host in Part::HOSTS {
            let status = match self.machine(host).json(&["grid", "status"]) {
                Ok(status) => status,
                Err(error) => return Some(format!("{error:#}")),
            };
            if let Some(what) = lacks_at(&status, self.shape.nodes.len(), &volumes, &mut owners) {
                return Some(format!("host {host}: {what}"));
            }
        }
        let at = owners.iter().position(|owners| *owners != 1)?;
        Some(format!("volume {} is in service at {} hosts", volumes[at].name, owners[at]))
    }

    /// What processes logged that asks for a person.
    pub fn complaints(&self) -> Result<Vec<String>> {
        let mut all = Vec::new();
        for machine in self.machines.iter().filter(|machine| machine.logs().exists()) {
            let errors = logs::errors(&machine.logs())?;
            all.extend(errors.into_iter().map(|line| format!("log of {}: {line}", machine.part)));
        }
        Ok(all)
    }
}

/// What one host lacks; counts the volumes that it has in service.
fn lacks_at(status: &Value, node_count: usize, wanted: &[VolumeSpec], owners: &mut [usize]) -> Option<String> {
    if let Some(what) = lacks_of_nodes(status, node_count) {
        return Some(what);
    }
    let volumes = status["volumes"].as_array().cloned().unwrap_or_default();
    for (at, VolumeSpec { name, .. }) in wanted.iter().enumerate() {
        let Some(volume) = volumes.iter().find(|volume| volume["name"] == *name) else {
            return Some(format!("it knows of no volume {name}"));
        };
        if volume["state"] == "forwarding" {
            continue;
        }
        if volume["state"] != "open" {
            return Some(format!("volume {name} is {}", volume["state"]));
        }
        owners[at] += 1;
        if let Some(what) = lacks_of_volume(volume) {
            return Some(what);
        }
    }
    None
}

/// What a host lacks, by its status, to be up and to reach all nodes.
pub fn lacks_of_nodes(status: &Value, node_count: usize) -> Option<String> {
    if status["host"]["state"] != "up" {
        return Some(format!("it is {}", status["host"]["state"]));
    }
    let nodes = status["nodes"].as_array().cloned().unwrap_or_default();
    if nodes.len() != node_count {
        return Some(format!("it knows of {} nodes", nodes.len()));
    }
    let node = nodes.iter().find(|node| node["state"] != "up")?;
    Some(format!("node {} is {}", node["id"], node["state"]))
}

/// What an open volume lacks to be redundant.
pub fn lacks_of_volume(volume: &Value) -> Option<String> {
    let live = &volume["live"];
    let number = |key: &str| live[key].as_u64();
    let suspects = live["suspect_nodes"].as_array().map(Vec::len);
    let redundant = (number("degraded_segments"), number("at_risk_entries"), suspects);
    (redundant != (Some(0), Some(0), Some(0)))
        .then(|| format!("volume {}: degraded segments, entries at risk, suspect nodes: {redundant:?}", volume["name"]))
}
