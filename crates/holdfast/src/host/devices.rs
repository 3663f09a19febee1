//! Taking devices and nodes into use and out of it, and what goes on in the background: the control plane's part.
//!
//! ```text
//! draining/DEVICE        (metadata) there while a device is to be emptied, and until nothing is missing that was there
//! kept/DEVICE            (metadata) there when an operator has said that it is not: it is not emptied unasked again
//! ```
//! A device is taken out in three steps, each of which can be repeated: drained (volumes move everything off it), found
//! empty, removed from grid.json by the command line, which then has the host read that anew.

use super::commands::{Command, LiveStatus};
use super::control::ControlPlane;
use crate::grid::grow;
use crate::grid::layout::{GridConfig, NodeConfig};
use crate::logger;
use crate::protocol::read;
use anyhow::{Context, Result};
use holdfast_api::{
    Code, DeviceHealth, DeviceInfo, LinkState, NodeInfo, Response, TaskInfo, TaskKind, TaskUnit, VolumeInfo,
    VolumeSpace, refuse,
};
use holdfast_base::size::Size;
use holdfast_base::{DeviceId, MediaClass, NodeId};
use holdfast_format::drive::DriveReport;
use holdfast_format::geometry::Layout;
use holdfast_format::wire::{Refusal, Reply, Request};
use holdfast_host::Order;
use holdfast_verdict::resources;
use holdfast_volume::protect;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::time::{Duration, Instant};

/// Share of the free space of other devices that a drain may fill.
const FILL_PER_MILLE: u64 = 900;

/// Rates are of this span.
const RATE_SPAN: Duration = Duration::from_secs(30);

/// How long a device may take to note its class, and that to show.
const CLASS_MAX: Duration = Duration::from_secs(4);

/// A node that can't be asked just now is asked again so often.
const LOOKS_MAX: u32 = 8;
const LOOK_PACE: Duration = Duration::from_millis(250);

/// Why a node did not note a device's class, and what to do.
fn why_no_class(node: NodeId, reply: Option<Reply>) -> (Code, String) {
    match reply {
        None => {
            let why = "is out of reach; `holdfast status` says why, and when it is up again, try again";
            (Code::Unavailable, format!("node {node} {why}"))
        }
        Some(Reply::Refused(Refusal::DeviceFailed)) => {
            let why = "it is noted on the device, which has failed; replace it (`holdfast device replace`)";
            (Code::State, why.to_string())
        }
        Some(Reply::Refused(Refusal::UnknownDevice)) => {
            let why = "runs without it; its log (`holdfast grid status` names the directory) says why";
            (Code::State, format!("node {node} {why}"))
        }
        Some(Reply::Refused(Refusal::Busy)) => {
            (Code::Unavailable, format!("node {node} is busy with the device, or still opens it; try again"))
        }
        Some(other) => {
            let why = format!("node {node} answered {other:?}; check that it runs the same release as this host");
            (Code::Unsupported, why)
        }
    }
}

/// What is left of each task, as it was seen.
#[derive(Default)]
pub struct TaskHistory {
    seen: BTreeMap<String, VecDeque<(Instant, u64)>>,
}

impl TaskHistory {
    /// Units a second that were done lately, and seconds that the rest takes at that rate.
    fn note(&mut self, now: Instant, task: &str, left: u64) -> (f64, Option<u64>) {
        let seen = self.seen.entry(task.to_string()).or_default();
        seen.push_back((now, left));
        while seen.front().is_some_and(|(at, _)| now.duration_since(*at) > RATE_SPAN) {
            seen.pop_front();
        }
        let (since, before) = *seen.front().expect("just pushed");
        let span = now.duration_since(since).as_secs_f64();
        let rate = if span > 0.0 { before.saturating_sub(left) as f64 / span } else { 0.0 };
        (rate, (rate > 0.0).then(|| (left as f64 / rate).ceil() as u64))
    }

    fn forget_others(&mut self, tasks: &[TaskInfo]) {
        self.seen.retain(|name, _| tasks.iter().any(|task| task.name == *name));
    }
}

/// What the list of tasks calls the repair of a volume.
pub(super) fn repair_task(volume: &str) -> String {
    format!("repair volume {volume}")
}

/// Why a device is emptied without anybody's asking.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Unasked {
    /// Bypassed for so many seconds.
    Slow(u64),
    /// Bypassed for so many errors.
    Errors(u64),
    /// Its drive says why.
    Failing(DriveReport),
}

impl fmt::Display for Unasked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unasked::Slow(seconds) => write!(f, "has been slow for {seconds} s"),
            Unasked::Errors(count) => write!(f, "has reported {count} I/O errors"),
            Unasked::Failing(report) => write!(f, "is on a drive that {report}"),
        }
    }
}

fn unasked(device: &DeviceInfo) -> Option<Unasked> {
    let failing = device.drive.as_ref().filter(|drive| drive.is_failing());
    let slow_s = device.slow_s.as_ref().filter(|_| device.bypassed);
    failing.map(|drive| Unasked::Failing(drive.clone())).or(slow_s.map(|seconds| match device.is_failing() {
        true => Unasked::Errors(device.io_errors),
        false => Unasked::Slow(*seconds),
    }))
}

impl ControlPlane {
    pub(super) fn live(&self) -> Result<LiveStatus> {
        self.ask(|answer| Command::Status { answer })
    }

    /// Empties devices, or lets them take data again, as an operator wants it.
    pub(super) fn drain(&self, devices: &[String], cancel: bool, force: bool) -> Result<()> {
        let wanted: BTreeSet<DeviceId> = devices.iter().map(|d| read(d)).collect::<Result<_>>()?;
        let known = self.config().devices();
        if let Some(device) = wanted.iter().find(|device| !known.iter().any(|(_, d)| d == *device)) {
            refuse!(Code::NotFound, "this grid has no device {device}; `holdfast device list` shows them");
        }
        if !cancel {
            self.empty(&wanted, force)?;
        }
        for device in &wanted {
            self.catalog.set_kept(*device, cancel)?;
        }
        if !cancel {
            return Ok(());
        }
        for device in &wanted {
            self.catalog.set_draining(*device, false)?;
        }
        // Another one takes its place no more.
        grow::forget_replacing(&self.dir, devices)?;
        let draining = self.catalog.draining()?;
        self.order(Order::Drain(draining)).map(drop)
    }

    /// Has everything moved off devices.
    pub(super) fn empty(&self, devices: &BTreeSet<DeviceId>, force: bool) -> Result<()> {
        let draining: BTreeSet<DeviceId> = self.catalog.draining()?.union(devices).copied().collect();
        if !force {
            self.check_drain(&draining)?;
        }
        for device in devices {
            self.catalog.set_draining(*device, true)?;
        }
        self.order(Order::Drain(draining)).map(drop)
    }

    /// The device's node notes what it is made of, or is to find out. Returns when it shows.
    pub(super) fn set_class(&self, name: &str, class: Option<MediaClass>) -> Result<()> {
        let device: DeviceId = read(name)?;
        let Some((node, _)) = self.config().devices().into_iter().find(|(_, known)| *known == device) else {
            refuse!(Code::NotFound, "this grid has no device {name}; `holdfast device list` shows them");
        };
        let patience = Instant::now() + CLASS_MAX;
        loop {
            let request = || Box::new(Request::SetMedia { device, media: class });
            match self.ask(|answer| Command::Call { node, request: request(), answer })? {
                Some(Reply::Done) => break,
                Some(Reply::Refused(Refusal::Busy)) if Instant::now() < patience => {
                    std::thread::sleep(Duration::from_millis(50));
                }
                reply => {
                    let (code, why) = why_no_class(node, reply);
                    refuse!(code, "the class of device {name} is not changed: {why}")
                }
            }
        }
        // Nodes are asked for the state of their devices once a second.
        let is_shown = |d: &DeviceInfo| {
            d.device.parse() == Ok(device) && d.class_set == class.is_some() && (!d.class_set || d.class == class)
        };
        while Instant::now() < patience && !self.live()?.nodes.iter().flat_map(|n| &n.devices).any(is_shown) {
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// What remains must be able to hold what leaves.
    fn check_drain(&self, draining: &BTreeSet<DeviceId>) -> Result<()> {
        let live = self.live()?;
        let stays = |d: &&DeviceInfo| {
            let is_drained = d.device.parse().is_ok_and(|id: DeviceId| draining.contains(&id));
            d.health == DeviceHealth::Serving && !is_drained
        };
        // Of a device that does not serve nothing new is taken away.
        let is_new = |d: &DeviceInfo| d.health == DeviceHealth::Serving && !d.draining && !stays(&d);
        let takes_any = live.nodes.iter().flat_map(|node| &node.devices).any(is_new);
        for entry in self.catalog.all_kept_strictly()?.iter().filter(|entry| entry.clone.is_none() && takes_any) {
            let layout: Layout = entry.root.layout;
            let by_node: Vec<usize> = live.nodes.iter().map(|node| node.devices.iter().filter(stays).count()).collect();
            if let Some((wants, left)) = protect::lacks(layout, &by_node) {
                refuse!(
                    Code::Redundancy,
                    "volume {} ({layout}) needs {wants} that take data, and {left} would be left; `holdfast device replace` puts \
                     another one in its place; or add a node or device first, or choose another layout (`holdfast volume set`)",
                    entry.name()
                );
            }
        }
        let devices = || live.nodes.iter().flat_map(|node| &node.devices);
        let leaves: u64 = devices().filter(|d| !stays(d)).map(|d| d.capacity_bytes - d.free_bytes).sum();
        let free: u64 = devices().filter(stays).map(|d| d.free_bytes).sum();
        if leaves > free / 1000 * FILL_PER_MILLE {
            refuse!(
                Code::NoSpace,
                "{} would have to move, and the other devices have {} free; add a device first, or free space",
                Size(leaves),
                Size(free)
            );
        }
        Ok(())
    }

    /// How many shards a device holds, asked just now: what is asked once a second is older than what a volume wrote when it was
    /// closed. None on a device that is out, or that its node does not know. `None` where its node does not answer.
    fn shards_now(&self, device: DeviceId) -> Option<u64> {
        let (node, _) = self.config().devices().into_iter().find(|(_, known)| *known == device)?;
        let request = Box::new(Request::Stat);
        let reply = self.ask(|answer| Command::Call { node, request, answer }).ok()?;
        let Some(Reply::Stat { devices }) = reply else { return None };
        Some(devices.iter().find(|stat| stat.device == device).map_or(0, |stat| stat.shard_count))
    }

    /// Says why these devices can't be removed from the grid yet, if so.
    pub(super) fn check_removable(&self, devices: &[String], force: bool) -> Result<()> {
        let draining = self.catalog.draining()?;
        let live = self.live()?;
        let left_of = self.ask(|answer| Command::LeftToDrain { answer })?;
        for name in devices {
            let device: DeviceId = read(name)?;
            if !draining.contains(&device) {
                refuse!(Code::InUse, "device {name} is in use; `holdfast device drain {name}` empties it first");
            }
            // Its link may just be made anew, as it is when another device comes.
            let shards = (0..LOOKS_MAX).find_map(|look| {
                std::thread::sleep(LOOK_PACE * look.min(1));
                self.shards_now(device)
            });
            match (shards, left_of.get(&device).copied().unwrap_or(0)) {
                (Some(0), 0) => {}
                _ if force => logger::warn(format_args!("device {name} is removed although it is not empty")),
                (Some(shards), left) => refuse!(
                    Code::InUse,
                    "device {name} still holds {shards} shards, and {left} are still to be moved or made again; `holdfast task \
                     watch` shows how it gets on{}",
                    self.closed_volumes()?
                ),
                // What nobody needs may be gone with its node.
                (None, 0) => {
                    if let Some(why) = self.who_may_need(name)? {
                        refuse!(
                            Code::Unavailable,
                            "device {name} can't be looked at: its node does not answer, and {why}. Bring the node \
                             back (`holdfast node start`), or do that and try again"
                        );
                    }
                }
                (None, left) => refuse!(
                    Code::Unavailable,
                    "device {name} can't be looked at: its node does not answer, and {left} of what lay there are still to be \
                     made again; `holdfast task watch` shows how it gets on. Bring the node back (`holdfast node start`), or wait"
                ),
            }
        }
        let is_leaving = |device: DeviceId| devices.iter().any(|name| name.parse() == Ok(device));
        let entries = if force { self.catalog.all_kept()? } else { self.catalog.all_kept_strictly()? };
        for entry in entries.iter().filter(|entry| entry.clone.is_none() && !force) {
            if entry.root.ledgers.iter().flat_map(|ledger| &ledger.legs).any(|leg| is_leaving(leg.device)) {
                refuse!(
                    Code::InUse,
                    "the log of volume {} still has a leg there; `holdfast task watch` shows how it gets on{}",
                    entry.name(),
                    self.closed_volumes()?
                );
            }
        }
        let weak = |v: &&VolumeInfo| v.live.as_ref().is_some_and(|l| l.degraded_segments + l.at_risk_entries > 0);
        match live.volumes.iter().find(weak).filter(|_| !force) {
            Some(volume) => refuse!(
                Code::Redundancy,
                "volume {} is not fully redundant now; wait until `holdfast status` shows no degraded segments",
                volume.name
            ),
            None => Ok(()),
        }
    }

    /// Volumes that have to wait for the steward, as the end of a sentence.
    fn closed_volumes(&self) -> Result<String> {
        let names = self.unserved();
        Ok(match names.is_empty() {
            true => String::new(),
            false => format!(
                ". Volumes that are not in service are moved one after the other ({}); exported ones at once",
                names.join(", ")
            ),
        })
    }

    /// Reads grid.json anew: nodes and devices have come or gone.
    pub(super) fn reload(&self) -> Result<()> {
        let config: GridConfig = self.dir.load()?;
        if let Some(ip) = config.address().filter(|ip| self.presence.address().is_none_or(|now| now.ip() != *ip)) {
            let bound = self.ask(|answer| Command::Address { ip, answer })?;
            self.presence.set_addresses(bound.context("other hosts can't reach this one at its new address")?)?;
        }
        self.catalog.set_own_nodes(&config.nodes)?;
        self.use_nodes(self.catalog.nodes()?)?;
        let known: BTreeSet<DeviceId> = self.config().devices().into_iter().map(|(_, device)| device).collect();
        // Of a device that is gone nothing may be missing any more before it is forgotten.
        let left = self.ask(|answer| Command::LeftToDrain { answer })?;
        let mut draining = self.catalog.draining()?;
        for (device, count) in left.into_iter().filter(|(device, _)| !known.contains(device)) {
            if count == 0 {
                self.catalog.set_draining(device, false)?;
                draining.remove(&device);
            }
        }
        for device in self.catalog.kept()?.difference(&known) {
            self.catalog.set_kept(*device, false)?;
        }
        self.order(Order::Drain(draining)).map(drop)
    }

    /// The grid has these nodes from here on.
    pub(super) fn use_nodes(&self, nodes: Vec<NodeConfig>) -> Result<()> {
        let config = self.config();
        if config.nodes != nodes {
            let places = nodes.iter().map(|n| (NodeId(n.id), n.address)).collect();
            self.ask(|answer| Command::Nodes { nodes: places, answer })?;
            self.set_config(GridConfig { nodes, ..config });
        }
        Ok(())
    }

    /// Why a device is emptied that nobody asked for.
    pub(super) fn why_unasked(&self, device: DeviceId) -> Result<String> {
        let name = device.to_string();
        let devices = self.live()?.nodes.into_iter().flat_map(|node| node.devices);
        let found = devices.filter(|seen| seen.device == name).find_map(|seen| unasked(&seen));
        Ok(found.map_or("is well again".to_string(), |why| why.to_string()))
    }

    /// What is done in the background at any host. What several are at, as emptying a device, is as far as the last
    /// of them.
    pub(super) fn all_tasks(&self) -> Result<Response> {
        let mut tasks = self.tasks()?;
        let (told, silent) = self.reports_of_others();
        for task in told.into_values().flat_map(|told| told.tasks) {
            match tasks.iter_mut().find(|known| known.name == task.name) {
                Some(known) if known.left >= task.left => {}
                Some(known) => *known = task,
                None => tasks.push(task),
            }
        }
        Ok(Response::Tasks { tasks, silent })
    }

    /// What open volumes hold, at any host.
    pub(super) fn space_of_all(&self) -> Result<Response> {
        let mut volumes: Vec<VolumeSpace> = self.live()?.volumes.iter().filter_map(resources::space_of).collect();
        let (told, silent) = self.reports_of_others();
        volumes.extend(told.into_values().flat_map(|told| told.volumes));
        Ok(Response::Space { volumes, silent })
    }

    /// What is done in the background here, with what is left of it.
    pub(super) fn tasks(&self) -> Result<Vec<TaskInfo>> {
        let live = self.live()?;
        self.tasks_in(&live.nodes, &live.volumes)
    }

    pub(super) fn tasks_in(&self, nodes: &[NodeInfo], volumes: &[VolumeInfo]) -> Result<Vec<TaskInfo>> {
        let mut tasks: Vec<TaskInfo> = Vec::new();
        let mut add = |kind: TaskKind, name: String, left: u64, unit: TaskUnit| {
            tasks.push(TaskInfo { name, kind, left, unit, per_second: 0.0, seconds_left: None });
        };
        for NodeInfo { id, devices, link, .. } in nodes {
            for device in devices.iter().filter(|d| d.draining) {
                // What a node that is down held is made again elsewhere.
                let held = if *link == LinkState::Down { 0 } else { device.shards };
                let left = device.left.unwrap_or(0).max(held);
                if left == 0 {
                    continue;
                }
                add(TaskKind::Drain, format!("drain device {} of node {id}", device.device), left, TaskUnit::Shards);
            }
        }
        for volume in volumes.iter().filter(|v| v.clone_of.is_none()) {
            let Some(figures) = &volume.live else { continue };
            if figures.degraded_segments > 0 {
                add(TaskKind::Repair, repair_task(&volume.name), figures.degraded_segments, TaskUnit::Segments);
            }
            if figures.left_to_balance_bytes > 0 {
                let mib = figures.left_to_balance_bytes.div_ceil(1 << 20);
                add(TaskKind::Balance, format!("even devices out with volume {}", volume.name), mib, TaskUnit::MiB);
            }
            if figures.layers_going > 0 {
                let name = format!("merge deleted snapshots of volume {}", volume.name);
                add(TaskKind::Merge, name, figures.layers_going, TaskUnit::Layers);
            }
        }
        for record in self.catalog.deleting()? {
            add(TaskKind::Return, format!("return the space of volume {}", record.name), 1, TaskUnit::Volumes);
        }
        let mut history = self.history();
        let now = Instant::now();
        for task in &mut tasks {
            (task.per_second, task.seconds_left) = history.note(now, &task.name, task.left);
        }
        history.forget_others(&tasks);
        Ok(tasks)
    }
}

impl GridConfig {
    /// All devices, with their nodes.
    pub fn devices(&self) -> Vec<(NodeId, DeviceId)> {
        let devices = self.nodes.iter().flat_map(|n| n.devices.iter().map(move |d| (NodeId(n.id), d.device.parse())));
        devices.filter_map(|(node, device)| Some((node, device.ok()?))).collect()
    }
}
