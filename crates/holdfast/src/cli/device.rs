//! `holdfast device`: what the grid's data lies on.

use super::format::{percent_used, print, print_json, print_table, table};
use super::progress::{Progress, Unit};
use crate::client;
use crate::drives;
use crate::grid::grow::{self, Source};
use crate::grid::layout::{GridDir, NodeConfig};
use crate::grid::removing::Removing;
use crate::grid::survey::{self, Requester, Verdict};
use crate::host::DEVICES_SHOWN_WITHIN;
use crate::overview::gather;
use crate::resources;
use anyhow::{Context, Result};
use clap::{Args, Subcommand, ValueEnum};
use holdfast_api::{Code, DeviceInfo, Error, HostStatus, ReadCacheInfo, Request, refuse};
use holdfast_base::MediaClass;
use holdfast_base::size::Size;
use holdfast_format::drive::DriveReport;
use holdfast_verdict::findings::device_trouble;
use serde_json::json;
use std::path::PathBuf;
use std::time::{Duration, Instant};

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    holdfast device list\n  \
    holdfast device list --eligible         which block devices of this machine could be taken\n  \
    holdfast device add 2 --path /dev/disk/by-id/nvme-…    one of them; refused if it holds anything\n  \
    holdfast device add 2 --size 8GiB       a new device for node 2, which takes it in while it serves\n  \
    holdfast device replace 2/0 /dev/disk/by-id/nvme-…     another one in the place of one that is dead, or to go\n  \
    holdfast device drain 2/0               by node and place in the list, or by its id\n  \
    holdfast task watch                     how it gets on\n  \
    holdfast device remove 2/0              once it is empty\n  \
    holdfast device health                  what this machine's drives say of themselves\n  \
    holdfast device class 2/1 hdd           what it is made of, where the list has it wrong\n\n\
    Data is moved from full devices to empty ones by itself.")]
pub struct DeviceArgs {
    #[command(subcommand)]
    action: DeviceAction,
}

#[derive(Subcommand, Debug)]
enum DeviceAction {
    /// All devices of the grid: their fill, what they are made of, what a flush costs, how they do
    ///
    /// CLASS is as the node found it, or as it was set (`holdfast device class`).
    /// FLUSH is what a durable write of 4 KiB took when the device was added. READS and WRITES are what 99 of 100 took no
    /// longer than in the last seconds, of small ones, writes being durable. ERRORS counts since the node was started. A
    /// device that is `slow` is an outlier among its peers: data goes elsewhere where it can, and after
    /// `care.rebuild_after` (holdfast.toml) of that the device is emptied. DRIVE is what its drive says of itself, where it says
    /// anything (`holdfast device health`): one that expects to fail is emptied at once.
    List {
        /// Instead: which block devices of this machine could be taken, and why the others can't
        #[arg(long)]
        eligible: bool,
        /// Only these, block devices or files
        #[arg(requires = "eligible")]
        paths: Vec<PathBuf>,
    },
    /// Add a device to a node of a local grid: a new file, or with --path what is there
    Add {
        node: u32,
        /// By default as large as the node's first
        #[arg(long, conflicts_with = "path")]
        size: Option<Size>,
        /// A block device, or a file that is there; it has to be empty
        #[arg(long)]
        path: Option<PathBuf>,
        /// Although it holds something, which is destroyed
        #[arg(long, requires = "path")]
        force: bool,
    },
    /// Put another device in the place of one that is dead, or is to go
    ///
    /// The new one is taken in, the old one emptied: what can be read there is moved, what can't is made again from the other
    /// devices. When nothing needs the old one any more it is taken out, as by `device remove`. `holdfast task watch` shows how it
    /// gets on; what was interrupted goes on when the command is given again.
    Replace {
        /// NODE/PLACE, for example 2/0, or the device's id
        old: String,
        /// A block device, or a file that is there; it has to be empty. Without it: a new file
        new: Option<PathBuf>,
        /// Of a new file; by default as large as the node's first
        #[arg(long, conflicts_with = "new")]
        size: Option<Size>,
        /// Although the new one holds something, which is destroyed
        #[arg(long, requires = "new")]
        force: bool,
        /// Return when the old one is being emptied; `holdfast device remove` takes it out once nothing is left
        #[arg(long)]
        no_wait: bool,
    },
    /// Move everything off a device; nothing new goes there
    Drain {
        /// NODE/PLACE, for example 2/0, or the device's id
        device: String,
        /// Let it take data again
        #[arg(long)]
        cancel: bool,
        /// Although volumes would be less redundant, or the others may have too little room
        #[arg(long)]
        force: bool,
        /// Return when it is empty
        #[arg(long, conflicts_with = "cancel")]
        wait: bool,
    },
    /// Ask the drives of this machine how they are (SMART)
    ///
    /// Of the grid's block devices that are here, or of those that are named. Takes smartmontools, and mostly root. Nodes ask
    /// by themselves every ten minutes, or read what --save wrote.
    Health {
        /// Block devices
        paths: Vec<PathBuf>,
        /// Write it down in the grid's directory, for nodes that have not the privilege to ask
        #[arg(long, conflicts_with = "paths")]
        save: bool,
    },
    /// Show what a device is made of, or set it
    ///
    /// Nodes ask the kernel, which often has it wrong of virtual disks: these claim to be rotational, whatever is below. What is set
    /// stands on the device, and takes effect at once.
    Class {
        /// NODE/PLACE, for example 2/0, or the device's id
        device: String,
        /// `auto`: as the node finds it to be
        class: Option<ClassArg>,
    },
    /// Take a device that was drained out of a local grid, and delete its file (a device elsewhere becomes an empty one)
    Remove {
        device: String,
        /// Although it is not empty: what lay there is made again from the others
        #[arg(long)]
        force: bool,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum ClassArg {
    Nvme,
    Ssd,
    Hdd,
    Auto,
}

impl ClassArg {
    fn media(self) -> Option<MediaClass> {
        match self {
            ClassArg::Nvme => Some(MediaClass::Nvme),
            ClassArg::Ssd => Some(MediaClass::Ssd),
            ClassArg::Hdd => Some(MediaClass::Hdd),
            ClassArg::Auto => None,
        }
    }
}

pub fn run(args: DeviceArgs, dir: &GridDir, json: bool) -> Result<()> {
    match args.action {
        DeviceAction::List { eligible: true, paths } => list_eligible(&paths, dir, json),
        DeviceAction::List { .. } => list(dir, json),
        DeviceAction::Add { node, size, path, force } => {
            let source = match path {
                Some(path) => Source::Path { path: std::path::absolute(path)?, force },
                None => Source::File(size),
            };
            let device = grow::add_device(dir, node, &source, None)?;
            let text = format!("device {} ({}) is added to node {node}", device.device, Size(device.size_bytes));
            if json { print_json(&device) } else { print(text) }
        }
        DeviceAction::Replace { old, new, size, force, no_wait } => {
            let source = match new {
                Some(path) => Source::Path { path: std::path::absolute(path)?, force },
                None => Source::File(size),
            };
            replace(dir, &old, &source, no_wait, json)
        }
        DeviceAction::Drain { device, cancel, force, wait } => {
            let device = find(dir, &device)?;
            drain(dir, std::slice::from_ref(&device), cancel, force)?;
            if wait {
                wait_until_empty(dir, &device, json)?;
            }
            let text = match cancel {
                true => format!("device {device} takes data again"),
                false if wait => format!("device {device} is empty; `holdfast device remove {device}` takes it out"),
                false => format!("device {device} is being emptied; `holdfast task watch` shows how it gets on"),
            };
            if json { print_json(&json!({ "device": device, "draining": !cancel })) } else { print(text) }
        }
        DeviceAction::Health { paths, save } => health(paths, save, dir, json),
        DeviceAction::Class { device, class } => {
            let device = find(dir, &device)?;
            if let Some(class) = class {
                client::done(dir, &Request::DeviceClass { device: device.clone(), class: class.media() })?;
            }
            show_class(dir, &device, json)
        }
        DeviceAction::Remove { device, force } => {
            let device = find(dir, &device)?;
            let removed = grow::remove_devices(dir, std::slice::from_ref(&device), force)?;
            if json {
                return print_json(&json!({ "device": device, "removed": true, "notes": removed.notes }));
            }
            print(format_args!("device {device} is not a part of node {} any more; {DISCARDED}", removed.node))?;
            removed.notes.iter().try_for_each(print)
        }
    }
}

fn wait_until_empty(dir: &GridDir, device: &str, json: bool) -> Result<()> {
    let mut progress = Progress::begin(format!("emptying device {device}"), Unit::Of("shards"), 0, json);
    loop {
        let left = left_on(&client::status(dir)?, device);
        progress.set_left(left);
        if left == 0 {
            return Ok(());
        }
        std::thread::sleep(EMPTY_PACE);
    }
}

/// Pace of looking whether a device is empty.
const EMPTY_PACE: Duration = Duration::from_secs(1);

fn replace(dir: &GridDir, old: &str, source: &Source, no_wait: bool, json: bool) -> Result<()> {
    let say = |text: String| if json { Ok(()) } else { print(text) };
    let old = find(dir, old)?;
    // All but the last step was done, and that was cut short.
    if being_removed(dir)?.is_some_and(|removing| removing.named(&old).is_some()) {
        let new = grow::replaced_by(dir, &old)?;
        let removed = grow::remove_devices(dir, std::slice::from_ref(&old), false)?;
        say(format!("device {old} is not a part of node {} any more; {DISCARDED}", removed.node))?;
        removed.notes.iter().try_for_each(|note| say(note.clone()))?;
        return match json {
            true => print_json(&json!({ "old": old, "new": new, "removed": true, "notes": removed.notes })),
            false => Ok(()),
        };
    }
    let (node, new) = grow::replace_device(dir, &old, source)?;
    say(format!("device {} ({}) is in node {node}", new.device, Size(new.size_bytes)))?;
    // Whoever looks next sees what the old one held when this began.
    std::thread::sleep(DEVICES_SHOWN_WITHIN);
    say(format!("device {old} is being emptied; `holdfast task watch` shows how it gets on"))?;
    let mut notes = Vec::new();
    if no_wait {
        say(format!("once nothing is left there, `holdfast device remove {old}` takes it out"))?;
    } else {
        let mut told = String::new();
        let mut progress = Progress::begin(format!("emptying device {old}"), Unit::Of("shards"), 0, json);
        loop {
            // Whoever can't be asked says nothing of the device.
            let status = client::status(dir)?;
            let left = left_on(&status, &old);
            progress.set_left(left);
            let Err(error) = client::done(dir, &Request::CheckRemovable { devices: vec![old.clone()], force: false })
            else {
                break;
            };
            let why = format!("{error:#}");
            // While shards leave it is the bar that tells.
            if why != told && left == 0 {
                say(why.clone())?;
                told = why;
            }
            std::thread::sleep(EMPTY_PACE);
        }
        drop(progress);
        let removed = grow::remove_devices(dir, std::slice::from_ref(&old), false)?;
        say(format!("device {old} is not a part of node {node} any more; {DISCARDED}"))?;
        removed.notes.iter().try_for_each(|note| say(note.clone()))?;
        notes = removed.notes;
    }
    if json {
        return print_json(&json!({ "old": old, "new": new.device, "removed": !no_wait, "notes": notes }));
    }
    Ok(())
}

/// What is still to leave a device, as far as its node tells.
fn left_on(status: &HostStatus, device: &str) -> u64 {
    let found = status.nodes.iter().flat_map(|node| &node.devices).find(|of| of.device == device);
    found.map_or(0, |device| device.shards.max(device.left.unwrap_or(0)))
}

fn show_class(dir: &GridDir, device: &str, json: bool) -> Result<()> {
    let status = gather(dir)?;
    let found = status.nodes.iter().flat_map(|n| &n.devices).find(|d| d.device == device);
    let found = found.with_context(|| {
        format!("nothing is known of device {device}: its node is down; `holdfast status` shows the nodes")
    })?;
    if json {
        return print_json(&json!({ "device": device, "class": found.class, "class_set": found.class_set }));
    }
    print(match found.class {
        Some(class) if found.class_set => format!("device {device} is {class}, as it was set"),
        Some(class) => format!("device {device} is {class}, as its node found it"),
        None => {
            format!("nobody knows what device {device} is; `holdfast device class {device} nvme`, ssd or hdd sets it")
        }
    })
}

/// `set` beside a class that nobody detected.
fn class_text(device: &DeviceInfo) -> String {
    let set = if device.class_set { " (set)" } else { "" };
    device.class.map_or("-".to_string(), |class| format!("{class}{set}"))
}

/// What becomes of a device that is removed.
pub const DISCARDED: &str = "files in the grid's directory are deleted, other devices can be taken again";

/// Has devices emptied, or ends that. The former takes a second, so that whoever looks next sees what they held when it began.
pub fn drain(dir: &GridDir, devices: &[String], cancel: bool, force: bool) -> Result<()> {
    client::done(dir, &Request::Drain { devices: devices.to_vec(), cancel, force })?;
    if !cancel {
        std::thread::sleep(DEVICES_SHOWN_WITHIN);
    }
    Ok(())
}

/// The nodes of the grid with their devices; this machine's alone while its host does not answer.
fn nodes_of_grid(dir: &GridDir) -> Result<Vec<NodeConfig>> {
    let own = if dir.remote().is_some() { Vec::new() } else { dir.load()?.nodes };
    let Ok(told) = client::status(dir) else { return Ok(own) };
    let is_own = |id: u32| own.iter().any(|node| node.id == id);
    let others = told.nodes.into_iter().filter(|node| !is_own(node.id)).filter_map(|node| {
        Some(NodeConfig {
            id: node.id,
            address: node.address.parse().ok()?,
            devices: node.configured.into_iter().map(resources::device_config).collect(),
        })
    });
    let mut nodes: Vec<NodeConfig> = others.collect();
    nodes.extend(own.iter().cloned());
    nodes.sort_by_key(|node| node.id);
    Ok(nodes)
}

/// A node of any machine of the grid.
pub fn node_of_grid(dir: &GridDir, id: u32) -> Result<NodeConfig> {
    let nodes = nodes_of_grid(dir)?;
    let ids: Vec<String> = nodes.iter().map(|node| node.id.to_string()).collect();
    let found = nodes.into_iter().find(|node| node.id == id);
    let why = format!("this grid has no node {id}; its nodes are {}", ids.join(", "));
    found.ok_or_else(|| Error::new(Code::NotFound, why).into())
}

/// Devices that a command was taking out when it was cut short: what they were called they are called still.
pub fn being_removed(dir: &GridDir) -> Result<Option<Removing>> {
    match dir.remote() {
        Some(_) => Ok(None),
        None => Removing::left(dir, &dir.load()?),
    }
}

/// The id of a device of the grid that is named by node and place, or by its id.
fn find(dir: &GridDir, name: &str) -> Result<String> {
    if let Some(id) = being_removed(dir)?.as_ref().and_then(|removing| removing.named(name)) {
        return Ok(id.clone());
    }
    if let Some((node, place)) = name.split_once('/') {
        let number = |text: &str| {
            let why = || format!("`{name}` is no device: write NODE/PLACE, as 2/0");
            text.parse::<u32>().map_err(|_| Error::new(Code::Invalid, why()))
        };
        let (node, place) = (number(node)?, number(place)?);
        let devices = node_of_grid(dir, node)?.devices;
        let Some(found) = devices.get(place as usize) else {
            refuse!(Code::NotFound, "node {node} has {} devices, from 0 on", devices.len());
        };
        return Ok(found.device.clone());
    }
    let nodes = nodes_of_grid(dir)?;
    let mut ids = nodes.iter().flat_map(|n| &n.devices).map(|d| &d.device);
    match ids.find(|id| *id == name) {
        Some(id) => Ok(id.clone()),
        None => refuse!(Code::NotFound, "this grid has no device {name}; `holdfast device list` shows them"),
    }
}

/// A drive that has not said by then how it is hangs.
const HEALTH_MAX: Duration = Duration::from_secs(60);

/// Asks drives, each by a thread of its own: one that hangs costs only its own line.
fn health(mut paths: Vec<PathBuf>, save: bool, dir: &GridDir, json: bool) -> Result<()> {
    if paths.is_empty() {
        let config = dir.load().context("name block devices, or a grid of which they are with --dir")?;
        let devices = config.nodes.iter().flat_map(|node| &node.devices).map(|device| dir.device_path(device));
        paths = devices.filter(|path| drives::is_asked(path)).collect();
    }
    let (tell, told) = std::sync::mpsc::channel();
    for (place, path) in paths.iter().cloned().enumerate() {
        let tell = tell.clone();
        std::thread::spawn(move || tell.send((place, drives::ask(&path))));
    }
    drop(tell);
    let late = || Err(format!("it has not answered within {} s", HEALTH_MAX.as_secs()));
    let mut heard: Vec<(PathBuf, Result<DriveReport, String>)> = paths.into_iter().map(|path| (path, late())).collect();
    let end = Instant::now() + HEALTH_MAX;
    while let Ok((place, said)) = told.recv_timeout(end.saturating_duration_since(Instant::now())) {
        heard[place].1 = said;
    }
    if save {
        let told = heard.iter().filter_map(|(path, said)| Some((path.clone(), said.clone().ok()?)));
        drives::save(dir.root(), told.collect())?;
    }
    if json {
        let row = |(path, said): &(PathBuf, Result<DriveReport, String>)| match said {
            Ok(report) => json!({ "path": path, "drive": report, "failing": report.is_failing() }),
            Err(why) => json!({ "path": path, "unknown": why }),
        };
        return print_json(&heard.iter().map(row).collect::<Vec<_>>());
    }
    if heard.is_empty() {
        return print("no block device of the grid is on this machine");
    }
    let mut rows = table(&["PATH", "WORN", "SPARE", "ERRORS", "HOURS", "HEAT", "IT"], &[1, 2, 3, 4, 5]);
    for (path, said) in heard {
        let report = said.clone().unwrap_or_default();
        let percent = |value: Option<u8>| value.map_or("-".to_string(), |p| format!("{p} %"));
        let count = |value: Option<u64>| value.map_or("-".to_string(), |n| n.to_string());
        rows.add_row([
            path.display().to_string(),
            percent(report.worn_percent),
            percent(report.spare_percent),
            count(report.media_errors),
            count(report.hours),
            report.celsius.map_or("-".to_string(), |c| format!("{c} °C")),
            said.map_or_else(|why| format!("says nothing: {why}"), |report| report.to_string()),
        ]);
    }
    print_table(&rows)
}

/// What a drive says of itself, in a word or two.
fn drive_text(device: &DeviceInfo) -> String {
    let Some(drive) = &device.drive else { return "-".to_string() };
    let word = match (drive.is_failing(), drive.troubles.is_empty()) {
        (true, _) => "FAILING",
        (false, false) => "too hot or cold",
        (false, true) => "well",
    };
    drive.worn_percent.filter(|worn| *worn > 0).map_or(word.to_string(), |worn| format!("{word}, {worn} % worn"))
}

/// What could be taken; before there is a grid, too.
fn list_eligible(paths: &[PathBuf], dir: &GridDir, json: bool) -> Result<()> {
    let requester = if dir.exists() { Requester::of(dir, &dir.load()?)? } else { Requester::default() };
    let found = match paths.is_empty() {
        true => survey::all(dir, &requester)?,
        false => paths.iter().map(|path| survey::examine(path, &requester)).collect(),
    };
    if json {
        return print_json(&found);
    }
    let mut rows = table(&["PATH", "KIND", "SIZE", "ELIGIBLE", "WHY"], &[2]);
    for candidate in &found {
        let (is_eligible, why) = match &candidate.verdict {
            Verdict::Eligible => ("yes", "is empty"),
            Verdict::NotEmpty(why) => ("with --force", why.as_str()),
            Verdict::Impossible(why) => ("no", why.as_str()),
        };
        let size = Size(candidate.size_bytes).to_string();
        rows.add_row([&candidate.path.display().to_string(), &candidate.kind, &size, is_eligible, why]);
    }
    print_table(&rows)
}

fn millis(us: Option<u32>) -> String {
    us.map_or("-".to_string(), |us| format!("{:.2} ms", f64::from(us) / 1000.0))
}

fn list(dir: &GridDir, json: bool) -> Result<()> {
    let status = gather(dir)?;
    super::volume::warn_of_store(status.metadata.trouble.as_ref());
    if json {
        let devices: Vec<_> = status.nodes.iter().flat_map(|n| n.devices.iter().map(|d| (n.id, d))).collect();
        let rows: Vec<_> = devices.iter().map(|(node, d)| json!({ "node": node, "device": d })).collect();
        return print_json(&rows);
    }
    let mut rows = table(
        &[
            "DEVICE", "STATE", "CLASS", "CAPACITY", "USED", "SHARDS", "JOURNAL", "FLUSH", "READS", "WRITES", "ERRORS",
            "DRIVE", "ID", "PATH",
        ],
        &[3, 4, 5, 6, 7, 8, 9, 10],
    );
    for node in &status.nodes {
        for (place, device) in node.configured.iter().enumerate() {
            let found = node.devices.iter().find(|d| d.device == device.device);
            let state = match found {
                None => "unknown".to_string(),
                Some(d) if d.draining && d.shards == 0 && d.left == Some(0) => "drained".to_string(),
                Some(d) if d.draining => format!("draining ({} left)", d.left.unwrap_or(0)),
                Some(d) => d.state().to_string(),
            };
            let figure = |f: &dyn Fn(&DeviceInfo) -> String| found.map_or("-".to_string(), f);
            rows.add_row([
                format!("{}/{place}", node.id),
                state,
                figure(&class_text),
                figure(&|d| Size(d.capacity_bytes).to_string()),
                figure(&|d| percent_used(d.capacity_bytes, d.free_bytes)),
                figure(&|d| d.shards.to_string()),
                figure(&|d| percent_used(d.journal_bytes, d.journal_bytes.saturating_sub(d.journal_used_bytes))),
                figure(&|d| millis(d.flush_us)),
                figure(&|d| millis(d.read_p99_us)),
                figure(&|d| millis(d.write_p99_us)),
                figure(&|d| d.io_errors.to_string()),
                figure(&drive_text),
                device.device.clone(),
                device.path.display().to_string(),
            ]);
        }
    }
    print_table(&rows)?;
    for node in &status.nodes {
        for (what, next) in node.devices.iter().filter_map(|device| device_trouble(node, device)) {
            print(format_args!("{what}; next: {next}"))?;
        }
    }
    for node in &status.nodes {
        for (place, device) in node.configured.iter().enumerate() {
            let found = node.devices.iter().find(|d| d.device == device.device);
            if let Some(cache) = found.and_then(|d| d.read_cache) {
                print(format_args!("read cache on {}/{place}: {}", node.id, cache_text(cache)))?;
            }
        }
    }
    Ok(())
}

fn cache_text(cache: ReadCacheInfo) -> String {
    let (held, limit, reads) = (Size(cache.held_bytes), Size(cache.limit_bytes), cache.hits + cache.misses);
    let percent = (cache.hits * 100).checked_div(reads).unwrap_or(0);
    format!("{held} of at most {limit}, which served {percent} % of {reads} reads of slower devices")
}
