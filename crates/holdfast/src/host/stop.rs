//! Whether a node may be stopped: not while something lacks redundancy already, since its absence would come on top.
//!
//! Role: asks the volumes in service here and at other hosts, and the other nodes whether they answer. It changes nothing:
//! the command line stops the node when it hears no refusal.

use super::catalog::Entry;
use super::commands::{Command, LiveStatus, Weakness};
use super::control::{ControlPlane, ask};
use anyhow::{Context, Result};
use holdfast_api::{Code, DeviceHealth, DeviceInfo, LinkState, NodeInfo, Response, TaskInfo, refuse};
use holdfast_base::NodeId;
use holdfast_format::wire::{Reply, Request};
use holdfast_volume::Question;
use std::fmt::Write as _;
use std::time::Duration;
use thiserror::Error;

/// A node that is well answers in a millisecond; a loaded one is not to be called gone.
const PING_MAX: Duration = Duration::from_secs(2);

/// With fewer devices than this nothing can be acknowledged.
const DEVICES_MIN: usize = 2;

impl ControlPlane {
    /// Says why this node can't be stopped now, and how long to wait, if so.
    pub(super) fn check_stop(&self, node: u32) -> Result<()> {
        // The grid has nothing to do with it any more.
        if self.is_removed()? {
            return Ok(());
        }
        self.check_stop_of(&self.live()?, node, &[node])
    }

    /// The same of all nodes of this machine at once, with its host. Where they are all that there are, no volume can be served
    /// without them, and each is closed first.
    pub(super) fn check_down(&self, nodes: &[u32]) -> Result<()> {
        let live = self.live()?;
        if live.nodes.iter().all(|n| nodes.contains(&n.id)) || self.is_removed()? {
            return Ok(());
        }
        self.check_spread(&live, nodes)?;
        nodes.iter().try_for_each(|node| self.check_stop_of(&live, *node, nodes))
    }

    /// Whether every volume bears to be without so many nodes at once.
    fn check_spread(&self, live: &LiveStatus, nodes: &[u32]) -> Result<()> {
        let [_, _, ..] = nodes else { return Ok(()) };
        let gone = live.nodes.iter().filter(|n| nodes.contains(&n.id));
        let devices: usize = gone.map(|n| n.devices.iter().filter(|d| d.health == DeviceHealth::Serving).count()).sum();
        for entry in self.catalog.all_kept_strictly()?.iter().filter(|entry| entry.clone.is_none()) {
            let layout = entry.root.layout;
            let (lost, what) = if layout.is_on_devices() { (devices, "devices") } else { (nodes.len(), "nodes") };
            if lost > usize::from(layout.failures()) {
                refuse!(
                    Code::Redundancy,
                    "the nodes here are not stopped: volume {} ({layout}) bears the loss of {}, and {lost} {what} would go at \
                     once. Stop them one after the other (`holdfast node stop`), or choose another layout for it (`holdfast \
                     volume set`), or move what lies here elsewhere (`holdfast node drain`)",
                    entry.name(),
                    layout.failures()
                );
            }
        }
        Ok(())
    }

    /// The same for who waits until it may be: with whether it ever may.
    pub(super) fn may_stop(&self, node: u32) -> Result<Response> {
        let why = self.check_stop(node).err();
        let never = why.as_ref().is_some_and(|why| why.is::<Never>());
        Ok(Response::MayStop { why: why.map(|why| format!("{why:#}")), never })
    }

    fn check_stop_of(&self, live: &LiveStatus, node: u32, together: &[u32]) -> Result<()> {
        let entries = self.catalog.all_kept_strictly()?;
        let volumes: Vec<&Entry> = entries.iter().filter(|entry| entry.clone.is_none()).collect();
        if volumes.is_empty() {
            return Ok(());
        }
        self.check_devices_left(live, node, together, (&volumes, false))?;
        if let Some(missing) = self.silent_besides(live, node, together) {
            refuse!(Code::Redundancy, "{}", without_both(node, missing, &volumes));
        }
        let weak = self.inspect(Question::WeakApartFrom(NodeId(node)))?;
        let elsewhere = self.weak_elsewhere(node).with_context(|| format!("node {node} is not stopped"))?;
        let is_well = weak.is_empty() && elsewhere.is_empty();
        // Of volumes in service it is known whether they miss what is down.
        let is_all_told = volumes.iter().all(|entry| self.is_in_service(entry));
        if !(is_well && is_all_told)
            && let Some(missing) = self.missing_besides(live, node, together)?
        {
            refuse!(Code::Redundancy, "{}", without_both(node, missing, &volumes));
        }
        self.check_devices_left(live, node, together, (&volumes, true))?;
        if is_well {
            return Ok(());
        }
        let tasks = self.tasks()?;
        let mut text = format!("node {node} is not stopped: ");
        for weakness in &weak {
            let _ = write!(text, "{}; ", describe(weakness, &tasks));
        }
        for (host, weakness) in &elsewhere {
            let _ = write!(text, "at host {host}, {}; ", describe(weakness, &[]));
        }
        refuse!(
            Code::Redundancy,
            "{text}without this node they would lack more. `holdfast status` shows when they are whole"
        );
    }

    /// Refuses where nothing could be acknowledged without these nodes: as the grid is, or as it is just `now`.
    fn check_devices_left(
        &self,
        live: &LiveStatus,
        node: u32,
        together: &[u32],
        (volumes, now): (&[&Entry], bool),
    ) -> Result<()> {
        let others = || live.nodes.iter().filter(|other| !together.contains(&other.id));
        let up = others().filter(|other| other.link == LinkState::Up);
        let left = up.flat_map(|other| &other.devices).filter(|device| device.health == DeviceHealth::Serving).count();
        if left >= DEVICES_MIN {
            return Ok(());
        }
        let config = self.config();
        let there_are = config.nodes.iter().filter(|other| !together.contains(&other.id)).map(|n| n.devices.len());
        let devices = if left == 1 { "1 device".to_string() } else { format!("{left} devices") };
        let why = format!(
            "node {node} is not stopped: {devices} would be left, and what {} write is acknowledged when it is on \
             {DEVICES_MIN}: they would wait until the node is back. ",
            names(volumes)
        );
        if there_are.sum::<usize>() < DEVICES_MIN {
            return Err(Never(format!(
                "{why}Add a node or a device first (`holdfast node add`, `holdfast device add`); or stop and start \
                 all of the grid while no guest uses it (`holdfast grid down`, `holdfast grid up`)"
            ))
            .into());
        }
        if now {
            refuse!(
                Code::Redundancy,
                "{why}Bring back what is away first (`holdfast status` shows it), or add a node (`holdfast node add`)"
            );
        }
        Ok(())
    }

    /// Whether a host that is there has the volume in service, and so can tell how it is.
    fn is_in_service(&self, entry: &Entry) -> bool {
        let host = entry.served_by.as_ref();
        host.is_some_and(|host| self.records.view(|view| view.has_host(host)))
    }

    /// A node that is cut off or hangs, which nobody may have missed yet.
    fn silent_besides(&self, live: &LiveStatus, node: u32, together: &[u32]) -> Option<(String, String)> {
        let mut others = live.nodes.iter().filter(|other| other.id != node && !together.contains(&other.id));
        let other = others.find(|n| n.cut || n.link == LinkState::Silent || !self.answers(n))?;
        Some(self.missing_node(other))
    }

    /// What of the rest of the grid is not there, and what to do.
    fn missing_besides(&self, live: &LiveStatus, node: u32, together: &[u32]) -> Result<Option<(String, String)>> {
        let rebuild_after_s = self.settings.rebuild_after.as_secs();
        let others = || live.nodes.iter().filter(|other| other.id != node && !together.contains(&other.id));
        if let Some(other) = others().find(|other| is_missing(other, rebuild_after_s)) {
            let (what, wait) = self.missing_node(other);
            let machine = self.catalog.node_machines()?.remove(&other.id);
            let gone = machine.filter(|machine| !self.records.view(|view| view.has_host(machine)));
            let for_good = gone.map_or(String::new(), |machine| {
                format!("; or, if machine {machine} is gone for good, `holdfast machine remove {machine} --dead`")
            });
            return Ok(Some((what, format!("{wait}{for_good}"))));
        }
        let is_out = |d: &&DeviceInfo| d.health != DeviceHealth::Serving && !d.draining;
        let up = || others().filter(|other| other.link == LinkState::Up);
        let found = up().find_map(|other| Some((other, other.devices.iter().find(is_out)?)));
        let Some((other, device)) = found else { return Ok(None) };
        let what = format!("device {} of node {} is {}", device.device, other.id, device.health);
        let wait = match device.health {
            DeviceHealth::Opening => "That takes seconds".to_string(),
            _ => format!(
                "`holdfast device replace {}` puts another one in its place; `holdfast device drain` of it has what it held made \
                 again on the others",
                device.device
            ),
        };
        Ok(Some((what, wait)))
    }

    fn missing_node(&self, node: &NodeInfo) -> (String, String) {
        let left_s = self.settings.rebuild_after.as_secs().saturating_sub(node.silent_ms / 1000);
        let state = if node.cut { "cut off" } else { "down or hangs" };
        let wait = format!(
            "Bring node {} back (`holdfast status` shows how it is), or wait {left_s} s: what it held is made again \
             on others from then on",
            node.id
        );
        (format!("node {} is {state}", node.id), wait)
    }
}

impl ControlPlane {
    /// Whether the node answers now: one that hangs since a moment ago is not missed by anybody yet.
    fn answers(&self, node: &NodeInfo) -> bool {
        if node.link == LinkState::Down {
            // It was given up.
            return true;
        }
        let (node, request) = (NodeId(node.id), Box::new(Request::Ping));
        matches!(ask(&self.reactors, PING_MAX, |answer| Command::Call { node, request, answer }), Ok(Some(Reply::Pong)))
    }
}

/// Whether the node is out of reach and nobody has given it up yet. What it held is made again once it is; then the
/// volumes know best what they lack.
fn is_missing(node: &NodeInfo, rebuild_after_s: u64) -> bool {
    let is_given_up = node.link == LinkState::Down && node.silent_ms / 1000 >= rebuild_after_s;
    node.cut || node.link != LinkState::Up && !is_given_up
}

fn names(volumes: &[&Entry]) -> String {
    match volumes {
        [one] => format!("volume {}", one.name()),
        all => format!("volumes {}", all.iter().map(|entry| entry.name()).collect::<Vec<_>>().join(", ")),
    }
}

fn without_both(node: u32, (what, wait): (String, String), volumes: &[&Entry]) -> String {
    format!(
        "node {node} is not stopped: {what}, and without both the data of {} may be out of reach, or without a \
         spare copy. {wait}",
        names(volumes)
    )
}

/// Why a node can't be stopped, however long one waits.
#[derive(Debug, Error)]
#[error("{0}")]
struct Never(String);

fn describe(weakness: &Weakness, tasks: &[TaskInfo]) -> String {
    let Weakness { volume, unknown, segments, entries } = weakness;
    if *unknown {
        return format!("volume {volume} is being opened or closed, which takes seconds");
    }
    let name = super::devices::repair_task(volume);
    let wait = match tasks.iter().find(|task| task.name == name).and_then(|task| task.seconds_left) {
        Some(seconds) => format!("about {seconds} s at the present rate"),
        None => "nobody knows yet for how long".to_string(),
    };
    format!("volume {volume} has {segments} segments and {entries} log entries below their redundancy ({wait})")
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_api::{TaskKind, TaskUnit};

    fn task(seconds_left: Option<u64>) -> TaskInfo {
        let name = super::super::devices::repair_task("vm");
        TaskInfo { name, kind: TaskKind::Repair, left: 40, unit: TaskUnit::Segments, per_second: 2.0, seconds_left }
    }

    fn node(link: LinkState, silent_ms: u64, cut: bool) -> NodeInfo {
        let (address, trouble, wire, devices) = (String::new(), None, None, Vec::new());
        let (machine, machine_gone, configured, suspect) = (None, false, Vec::new(), false);
        NodeInfo {
            id: 1,
            address,
            reactors: None,
            passed_on: None,
            link,
            suspect,
            cut,
            silent_ms,
            trouble,
            wire,
            devices,
            machine,
            machine_gone,
            configured,
        }
    }

    #[test]
    fn a_node_is_missing_until_it_is_given_up() {
        assert!(!is_missing(&node(LinkState::Up, 0, false), 600));
        assert!(is_missing(&node(LinkState::Up, 0, true), 600));
        assert!(is_missing(&node(LinkState::Silent, 700_000, false), 600));
        assert!(is_missing(&node(LinkState::Down, 599_000, false), 600));
        assert!(!is_missing(&node(LinkState::Down, 600_000, false), 600));
    }

    #[test]
    fn a_refusal_says_how_long_where_that_is_known() {
        let weakness = Weakness { volume: "vm".to_string(), unknown: false, segments: 40, entries: 2 };
        assert!(describe(&weakness, &[task(Some(20))]).contains("40 segments and 2 log entries"));
        assert!(describe(&weakness, &[task(Some(20))]).contains("about 20 s"));
        assert!(describe(&weakness, &[task(None)]).contains("nobody knows"));
        assert!(describe(&Weakness { unknown: true, ..weakness }, &[]).contains("opened or closed"));
    }
}
