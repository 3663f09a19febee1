//! What is not well on a grid, how bad that is, and what to do next: from a report of its state alone.
//!
//! Role: a pure function. Who shows a grid's state, or raises alarms, asks it, so that all say the same.

use holdfast_api::{
    AlertTrouble, Concern, DeviceInfo, DeviceState, Finding, GridStatus, HostHealth, HostState, NodeState, NodeView,
    Severity, SnapshotInfo, VolumeInfo, VolumeLive, VolumeNames, VolumeState, Waiting, free_of, takers,
};
use holdfast_format::geometry::Layout;
use holdfast_volume::claims::writable_beside;
use holdfast_volume::protect::{Protect, choose, lacks};
use std::collections::BTreeSet;

/// Clocks of machines that are kept right differ by less.
const SKEW_MS: u64 = 60_000;

/// Of what devices hold for guests: with less than that left somebody should act, with less than the latter at once.
const WARN_PER_CENT: u64 = 20;
const LOW_PER_CENT: u64 = 5;

/// Volumes that a host tells others it can't open yet, at most.
pub const WAITING_MAX: usize = 16;

struct Found(Vec<Finding>);

impl Found {
    /// `about`: the same for as long as it is the same trouble, whatever the text says.
    fn add(&mut self, severity: Severity, concern: Concern, about: String, what: String, next: &str) {
        let next = (!next.is_empty()).then(|| next.to_string());
        self.0.push(Finding { severity, concern, about, what, next, announced: false });
    }

    /// What `about` finds; where that `is` so because of what somebody has announced, it says so.
    fn announced(&mut self, is: bool, about: impl FnOnce(&mut Found)) {
        let before = self.0.len();
        about(self);
        self.0[before..].iter_mut().for_each(|finding| finding.announced = is);
    }

    fn warning(&mut self, concern: Concern, about: impl Into<String>, what: impl Into<String>, next: &str) {
        self.add(Severity::Warning, concern, about.into(), what.into(), next);
    }

    fn critical(&mut self, concern: Concern, about: impl Into<String>, what: impl Into<String>, next: &str) {
        self.add(Severity::Critical, concern, about.into(), what.into(), next);
    }
}

/// All that is not well, the worst first.
pub fn of(status: &GridStatus) -> Vec<Finding> {
    let mut found = Found(Vec::new());
    about_host(status, &mut found);
    if status.host.state == HostState::Removed {
        // What runs here, or does not, is nothing to anybody.
        return found.0;
    }
    let health = health_of_all(status);
    about_volumes(status, &health, &mut found);
    about_recovery(status, &health.unrecoverable, &mut found);
    about_other_hosts(status, &mut found);
    for node in &status.nodes {
        found.announced(is_announced(status, node.machine.as_ref()), |found| about_node(node, found));
        // What becomes of its devices nobody has announced.
        node.devices.iter().for_each(|device| about_device(node, device, &mut found));
    }
    about_capacity(status, &mut found);
    for (number, warning) in status.certificate_warnings.iter().enumerate() {
        found.warning(Concern::Certificates, format!("certificate {number}"), warning, "");
    }
    about_alerts(&status.alert_troubles, None, &mut found);
    about_clock(status, &mut found);
    // Those of one severity stay in the order above.
    found.0.sort_by_key(|finding| (finding.announced, std::cmp::Reverse(finding.severity)));
    // Two hosts may tell of the same.
    let mut told = BTreeSet::new();
    found.0.retain(|finding| told.insert((finding.concern, finding.about.clone())));
    found.0
}

/// Whether something is away that nobody has announced: then what comes of an announced absence comes on top.
fn is_more_away(status: &GridStatus) -> bool {
    let is_expected = |node: &NodeView| is_announced(status, node.machine.as_ref());
    let is_up =
        |id: u32| status.nodes.iter().any(|node| node.id == id && node.state == NodeState::Up && !is_expected(node));
    let missed =
        |host: &HostHealth| !is_announced(status, Some(&host.host)) && host.nodes_away.iter().any(|node| is_up(*node));
    status.nodes.iter().any(|node| is_away(node) && !is_expected(node)) || status.other_hosts.iter().any(missed)
}

/// Whether somebody has said that this machine will be away.
fn is_announced(status: &GridStatus, machine: Option<&String>) -> bool {
    machine.is_some_and(|machine| status.announced.iter().any(|announced| announced.machine == *machine))
}

fn about_host(status: &GridStatus, found: &mut Found) {
    let host = &status.host;
    let why = host.trouble.as_ref().map_or(String::new(), |why| format!(" ({why})"));
    match host.state {
        HostState::Up => {}
        HostState::Down => {
            found.critical(Concern::Service, "host", "the host is down, and serves no volume", "`holdfast grid up`")
        }
        HostState::Removed => found.critical(Concern::Service, "host", host.trouble.clone().unwrap_or_default(), ""),
        HostState::Starting => found.critical(
            Concern::Service,
            "host",
            format!("the host serves no volume yet{why}"),
            "see whether the metadata store runs; the host goes on by itself",
        ),
        HostState::Hung | HostState::Other => {
            let next =
                host.pid.map_or(String::new(), |pid| format!("`kill -CONT {pid}`, where a signal has stopped it"));
            found.critical(Concern::Service, "host", format!("the host hangs{why}"), &next);
        }
    }
    if let Some(trouble) = &status.metadata.trouble {
        found.critical(Concern::Metadata, "metadata", format!("metadata {}, {trouble}", status.metadata.store), "");
    }
    for volume in &status.unreadable {
        let what = format!("volume {} can't be read by this release: {}", volume.name, volume.why);
        found.critical(
            Concern::Metadata,
            format!("volume {} unreadable", volume.name),
            what,
            "bring this machine to the release of the others",
        );
    }
}

/// A clone's figures are its volume's.
fn live(volume: &VolumeInfo) -> Option<&VolumeLive> {
    volume.live.as_ref().filter(|_| volume.clone_of.is_none())
}

/// What a host's own volumes lack, as it tells others.
pub fn health_of(volumes: &[VolumeInfo]) -> HostHealth {
    let lacking = |lacks: fn(&VolumeLive) -> bool| {
        volumes.iter().filter(|volume| live(volume).is_some_and(lacks)).map(|volume| volume.name.as_str()).collect()
    };
    // One that waits for its host is another's.
    let waits = volumes.iter().filter(|volume| volume.state == VolumeState::Opening);
    let waits = waits.filter_map(|v| Some(Waiting { volume: v.name.clone(), why: v.waits.clone()? }));
    let locked = volumes.iter().filter(|volume| volume.state == VolumeState::Locked);
    HostHealth {
        waits: waits.collect(),
        locked: locked.map(|volume| volume.name.as_str()).collect(),
        at_risk: lacking(|live| live.at_risk_entries > 0),
        degraded: lacking(|live| live.degraded_segments > 0),
        unrecoverable: lacking(|live| !live.recoverable),
        ..HostHealth::default()
    }
}

/// The same of all hosts together, whose names don't count here.
fn health_of_all(status: &GridStatus) -> HostHealth {
    let mut all = health_of(&status.volumes);
    for host in &status.other_hosts {
        all.waits.extend(host.waits.iter().cloned());
        let pairs = [
            (&mut all.locked, &host.locked),
            (&mut all.at_risk, &host.at_risk),
            (&mut all.degraded, &host.degraded),
            (&mut all.unrecoverable, &host.unrecoverable),
        ];
        pairs.into_iter().for_each(|(all, more)| all.extend(more));
    }
    all
}

fn about_recovery(status: &GridStatus, lacking: &VolumeNames, found: &mut Found) {
    for volume in &status.found {
        let what = format!(
            "volume {} was found when the metadata were lost, and is kept unopened: {}",
            volume.name, volume.why
        );
        let next = format!(
            "with all hosts stopped, bring back what is missing and recover again (`holdfast meta recover --replace`), or take it \
             as it is: `holdfast meta recover --accept {} --yes`",
            volume.name
        );
        found.warning(Concern::Metadata, format!("volume {} found", volume.name), what, &next);
    }
    if !lacking.is_empty() {
        let what = format!("{lacking} could not be had back as they are if the metadata store were lost");
        found.warning(
            Concern::Redundancy,
            "volumes not recoverable",
            what,
            "bring nodes back that are away, and all to one release",
        );
    }
}

/// Volumes that are not served, or not as far as nodes go.
fn about_volumes(status: &GridStatus, health: &HostHealth, found: &mut Found) {
    let away: Vec<&NodeView> = status.nodes.iter().filter(|node| is_away(node)).collect();
    let is_more_away = is_more_away(status);
    let is_expected = |volume: &VolumeInfo| is_announced(status, volume.host.as_ref()) && !is_more_away;
    let opening = health.waits.iter().map(|waiting| (&waiting.volume, &waiting.why));
    let is_opened_later = |v: &&VolumeInfo| !matches!(v.state, VolumeState::Opening | VolumeState::Locked);
    let closed = status.volumes.iter().filter(is_opened_later);
    let closed = closed.filter_map(|volume| Some((&volume.name, volume.waits.as_ref()?, is_expected(volume))));
    for (volume, why, expected) in opening.map(|(volume, why)| (volume, why, false)).chain(closed) {
        let what = format!("volume {volume} can't be opened yet: {why}");
        found.announced(expected, |found| {
            found.critical(Concern::Service, format!("volume {volume} waits"), what, &bring_back(&away));
        });
    }
    for volume in status.volumes.iter().filter(|v| v.orphaned && v.clone_of.is_none() && v.waits.is_none()) {
        let host = volume.host.as_deref().unwrap_or("-");
        let what = format!("volume {} is served by nobody: its host, {host}, is gone", volume.name);
        let next = format!(
            "bring that up (`holdfast grid up` there), or serve it here: `holdfast volume export {}`",
            volume.name
        );
        found.announced(is_expected(volume), |found| {
            found.critical(Concern::Service, format!("volume {} orphaned", volume.name), what, &next);
        });
    }
    if let Some(first) = health.locked.first.first() {
        let are = if health.locked.count == 1 { "is locked: its key" } else { "are locked: their keys" };
        let what = format!("{} {are} could not be had", health.locked);
        let next = format!("`holdfast volume export {first} --key-file FILE`");
        found.critical(Concern::Service, "volumes locked", what, &next);
    }
    let is_short = |volume: &&VolumeInfo| {
        let layout = volume.layout.parse::<Layout>().ok().filter(|layout| !layout.is_on_devices());
        is_served(volume) && layout.is_some_and(|layout| away.len() > usize::from(layout.failures()))
    };
    let short: VolumeNames = status.volumes.iter().filter(is_short).map(|volume| volume.name.as_str()).collect();
    if !short.is_empty() {
        let what = format!("{} nodes are away, more than {short} can do without: data may be out of reach", away.len());
        found.critical(Concern::Service, "nodes short", what, &bring_back(&away));
    }
    if !health.at_risk.is_empty() {
        let what = format!("what {} wrote last is on fewer devices than it is to be", health.at_risk);
        found.critical(Concern::DataAtRisk, "volumes at risk", what, &bring_back(&away));
    }
    if !health.degraded.is_empty() {
        let next = if away.is_empty() { goes_on_or_lacks(status, health) } else { bring_back(&away) };
        let what = format!("parts of {} bear less than they are to", health.degraded);
        let expected = !status.announced.is_empty() && !is_more_away;
        found.announced(expected, |found| found.warning(Concern::Redundancy, "volumes degraded", what, &next));
    }
}

/// With all nodes there: what a layout lacks that is missing on this grid, and one that fits.
fn goes_on_or_lacks(status: &GridStatus, health: &HostHealth) -> String {
    let places: Vec<usize> = status.nodes.iter().map(|node| takers(&node.devices).count()).collect();
    let lacking = health.degraded.first.iter().find_map(|name| {
        let volume = status.volumes.iter().find(|volume| volume.name == *name)?;
        let layout = volume.layout.parse().ok()?;
        let (wants, has) = lacks(layout, &places)?;
        Some((name, layout, format!("{layout} of volume {name} wants {wants}, and there are {has}")))
    });
    let Some((name, layout, why)) = lacking else {
        return "nothing while `holdfast task watch` gets on; else devices lack room (`holdfast space`)".to_string();
    };
    let rules = Protect::ALL.into_iter().rev().filter(|rule| *rule <= Protect::of(layout));
    let fits = rules.filter_map(|rule| Some((rule, choose(rule, &places).ok()?))).next();
    let fits = fits.map_or(String::new(), |(rule, fits)| {
        format!(", or `holdfast volume set {name} --protect {rule}`, which means {fits} here")
    });
    format!("{why}: add what is missing{fits}")
}

/// What other hosts see that this one does not, and hosts that are gone.
fn about_other_hosts(status: &GridStatus, found: &mut Found) {
    for host in &status.hosts_gone {
        let what = format!("host {host} is gone: it says nothing to the metadata store");
        let next = format!(
            "on machine {host}: `holdfast grid up`; if that machine will not be back, `holdfast machine remove {host} --dead`"
        );
        found.announced(is_announced(status, Some(host)), |found| {
            found.warning(Concern::Service, format!("host {host}"), what, &next);
        });
    }
    for HostHealth { host, nodes_away, certificate_warnings, alert_troubles, .. } in &status.other_hosts {
        let is_up = |id: &u32| status.nodes.iter().any(|node| node.id == *id && node.state == NodeState::Up);
        for node in nodes_away.iter().filter(|node| is_up(node)) {
            let what = format!("host {host} does not reach node {node}, which this host reaches");
            let next = format!("see the network between them; on machine {host}: `holdfast node list`");
            let machine = status.nodes.iter().find(|known| known.id == *node).and_then(|node| node.machine.as_ref());
            found.announced(is_announced(status, Some(host)) || is_announced(status, machine), |found| {
                found.warning(Concern::Redundancy, format!("node {node} from host {host}"), what, &next);
            });
        }
        for (number, warning) in certificate_warnings.iter().enumerate() {
            let what = format!("machine {host}: {warning}");
            found.warning(Concern::Certificates, format!("certificate {number} of {host}"), what, "");
        }
        about_alerts(alert_troubles, Some(host), found);
    }
}

/// Somewhere in the grid, or to be, as far as is known here.
fn is_served(volume: &VolumeInfo) -> bool {
    let is_elsewhere = matches!(volume.state, VolumeState::Elsewhere | VolumeState::Forwarding);
    live(volume).is_some() || (is_elsewhere && volume.clone_of.is_none())
}

fn is_away(node: &NodeView) -> bool {
    matches!(node.state, NodeState::Down | NodeState::Hung | NodeState::Cut)
}

/// What has the first of these nodes come back.
fn bring_back(away: &[&NodeView]) -> String {
    away.first().map_or_else(|| "`holdfast task list`".to_string(), |node| how_back(node))
}

fn how_back(node: &NodeView) -> String {
    if let Some(machine) =
        node.machine.as_ref().filter(|_| node.machine_gone && !node.is_own && node.state == NodeState::Down)
    {
        return format!(
            "on machine {machine}: `holdfast grid up`; if that machine will not be back, `holdfast machine remove \
             {machine} --dead`"
        );
    }
    let (id, command) = match node.state {
        NodeState::Cut => return format!("`holdfast node mend {}`", node.id),
        NodeState::Hung => (node.id, "resume"),
        _ => (node.id, "start"),
    };
    on_its_machine(node, format!("`holdfast node {command} {id}`"))
}

/// What is to be done at a node's machine.
fn on_its_machine(node: &NodeView, command: String) -> String {
    match (&node.machine, node.is_own) {
        (_, true) => command,
        (Some(machine), false) => format!("on machine {machine}: {command}"),
        (None, false) => format!("on its machine: {command}"),
    }
}

fn about_node(node: &NodeView, found: &mut Found) {
    let id = node.id;
    let why = node.trouble.as_ref().map_or(String::new(), |why| format!(": {why}"));
    match node.state {
        NodeState::Up => {}
        NodeState::Suspect => {
            found.warning(
                Concern::Redundancy,
                format!("node {id}"),
                format!("node {id} is late, and avoided{why}"),
                "`holdfast device list`",
            );
        }
        NodeState::Hung => {
            found.warning(Concern::Redundancy, format!("node {id}"), format!("node {id} hangs{why}"), &how_back(node))
        }
        NodeState::Cut => found.warning(
            Concern::Redundancy,
            format!("node {id}"),
            format!("node {id} is cut off{why}"),
            &how_back(node),
        ),
        state => found.warning(
            Concern::Redundancy,
            format!("node {id}"),
            format!("node {id} is {state}{why}"),
            &how_back(node),
        ),
    }
}

fn about_device(node: &NodeView, device: &DeviceInfo, found: &mut Found) {
    if let Some((what, next)) = device_trouble(node, device) {
        found.warning(Concern::Redundancy, format!("device {}", node.name_of(device).0), what, &next);
    }
    if let Some(drive) = device.drive.as_ref().filter(|drive| drive.is_failing()) {
        let (name, _) = node.name_of(device);
        let remove = on_its_machine(node, format!("`holdfast device remove {name}`"));
        let next = format!("`holdfast device list`; when it is empty {remove}");
        let what = format!("node {}: the drive of device {name} {drive}; replace it", node.id);
        found.warning(Concern::Redundancy, format!("drive {}", node.name_of(device).0), what, &next);
    }
}

/// How a device is that is not well, since when, and what to do.
pub fn device_trouble(node: &NodeView, device: &DeviceInfo) -> Option<(String, String)> {
    let (name, path) = node.name_of(device);
    let replace = on_its_machine(node, format!("`holdfast device replace {name} NEW`"));
    let (is_so, next) = match (device.state(), &device.outage) {
        (state @ (DeviceState::Missing | DeviceState::Failed), Some(outage)) => {
            let then = if outage.tried { "it is used again when it is back" } else { "it stays out" };
            (format!("is {state} for {} s: {}; {then}", outage.seconds, outage.why), replace)
        }
        (DeviceState::Failed, None) => ("has failed; its node's log says why".to_string(), replace),
        (DeviceState::Failing, _) => {
            let (errors, ago) = (device.io_errors, device.errors_within_s.unwrap_or(0));
            (format!("is failing: {errors} errors, the last {ago} s ago"), replace)
        }
        (DeviceState::Slow, _) => {
            let and = if device.bypassed { "bypassed" } else { "still needed" };
            let next = format!("`holdfast device list`; where that lasts {replace}");
            (format!("has been slow for {} s, and is {and}", device.slow_s.unwrap_or(0)), next)
        }
        _ => return None,
    };
    let path = path.map_or(String::new(), |path| format!(" ({})", path.display()));
    Some((format!("node {}: device {name}{path} {is_so}", node.id), next))
}

/// What is left of that which guests can write.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Room {
    Nothing,
    /// Less than somebody must act on.
    Little,
    /// Less than somebody should think about.
    Less,
    Enough,
}

impl Room {
    fn of(free: u64, whole: u64) -> Room {
        match free {
            _ if whole == 0 => Room::Enough,
            0 => Room::Nothing,
            _ if free < whole / 100 * LOW_PER_CENT => Room::Little,
            _ if free < whole / 100 * WARN_PER_CENT => Room::Less,
            _ => Room::Enough,
        }
    }
}

/// What guests could write to a node with these devices if nothing were there.
fn whole_of(devices: &[DeviceInfo]) -> Vec<u64> {
    takers(devices).map(|device| device.capacity_bytes.saturating_sub(device.reserve_bytes)).collect()
}

/// What nodes with these devices have for all together.
fn room(by_node: &[&[DeviceInfo]]) -> Room {
    let sum = |of: fn(&[DeviceInfo]) -> Vec<u64>| by_node.iter().flat_map(|devices| of(devices)).sum();
    Room::of(sum(free_of), sum(whole_of))
}

/// What they have for a layout: each of its shards is another node's, so that the fullest nodes bound it, whatever is
/// free on others. Of one that just now has too few nodes nothing is said: its data are mirrored on those that are left.
fn room_for(by_node: &[&[DeviceInfo]], layout: Layout) -> Room {
    let places: Vec<usize> = by_node.iter().map(|devices| takers(devices).count()).collect();
    if lacks(layout, &places).is_some() {
        return Room::Enough;
    }
    let writable = |of: fn(&[DeviceInfo]) -> Vec<u64>| {
        writable_beside(&by_node.iter().map(|devices| of(devices)).collect::<Vec<_>>(), &[], layout)
    };
    Room::of(writable(free_of), writable(whole_of))
}

/// Less is left than somebody must act on, for all or for one of these layouts.
pub fn is_short(by_node: &[&[DeviceInfo]], layouts: &[Layout]) -> bool {
    room(by_node) <= Room::Little || layouts.iter().any(|layout| room_for(by_node, *layout) <= Room::Little)
}

/// The layouts of volumes, each once.
fn layouts_of(status: &GridStatus) -> Vec<Layout> {
    let names: BTreeSet<&str> = status.volumes.iter().map(|volume| volume.layout.as_str()).collect();
    names.into_iter().filter_map(|name| name.parse().ok()).collect()
}

fn about_capacity(status: &GridStatus, found: &mut Found) {
    let by_node: Vec<&[DeviceInfo]> = status.nodes.iter().map(|node| &node.devices[..]).collect();
    let of_layout = layouts_of(status).into_iter().map(|layout| (room_for(&by_node, layout), Some(layout)));
    let worst = of_layout.chain([(room(&by_node), None)]).min_by_key(|(room, layout)| (*room, layout.is_some()));
    let (left, layout) = worst.expect("one is of all together");
    let whom = layout.map_or(String::new(), |layout| format!(" for volumes of {layout}"));
    // Where one has most of what is free, the others bound what can be written.
    let free = |node: &&NodeView| free_of(&node.devices).iter().sum::<u64>();
    let fullest = status.nodes.iter().filter(|node| !node.devices.is_empty()).min_by_key(free);
    let node = fullest.filter(|_| layout.is_some()).map_or("NODE".to_string(), |node| node.id.to_string());
    let next = format!("`holdfast space`; then free space, or `holdfast device add {node}`");
    match left {
        Room::Nothing => {
            let what = format!("devices are full{whom}: guests' writes wait, or fail");
            found.critical(Concern::Capacity, "room", what, &next);
        }
        Room::Little => {
            let what = format!("less than {LOW_PER_CENT} % of devices is free{whom}");
            found.critical(Concern::Capacity, "room", what, &next);
        }
        Room::Less => {
            let what = format!("less than {WARN_PER_CENT} % of devices is free{whom}");
            found.warning(Concern::Capacity, "room", what, &next);
        }
        Room::Enough => {}
    }
    if let Some(alarm) = full_soon(status.days_to_full) {
        found.warning(Concern::Capacity, "room soon", alarm, "");
    }
}

/// Shown from so many days on.
const ALARM_DAYS: f64 = 30.0;

pub fn full_soon(days: Option<f64>) -> Option<String> {
    let days = days.filter(|days| *days < ALARM_DAYS)?;
    let when = match days.round() as u64 {
        0 => "today".to_string(),
        1 => "in about a day".to_string(),
        days => format!("in about {days} days"),
    };
    Some(format!(
        "devices are full {when} if what is taken grows as in the last week; free space, or add devices (`holdfast device \
         add NODE`)"
    ))
}

/// `host`: which it is, if it is another one.
fn about_alerts(troubles: &[AlertTrouble], host: Option<&String>, found: &mut Found) {
    let (of, by, machine) = host.map_or((String::new(), String::new(), "this machine".to_string()), |host| {
        (format!(" of {host}"), format!("host {host}: "), format!("machine {host}"))
    });
    for AlertTrouble { way, why, waiting, dropped } in troubles {
        let dropped = if *dropped > 0 { format!(", {dropped} older ones are dropped") } else { String::new() };
        let waiting = if *waiting == 1 { "1 waits".to_string() } else { format!("{waiting} wait") };
        found.warning(
            Concern::Service,
            format!("alerts by {way}{of}"),
            format!("{by}alerts can't be sent by {way}: {why}; {waiting}{dropped}"),
            &format!("see whether that can be reached from {machine} (`holdfast alerts test`); it is tried again"),
        );
    }
}

fn about_clock(status: &GridStatus, found: &mut Found) {
    let newest = |volume: &VolumeInfo| live(volume)?.snapshots.iter().max_by_key(|s| s.layer).cloned();
    let is_ahead = |snapshot: &SnapshotInfo| snapshot.created_ms > status.clock_ms.saturating_add(SKEW_MS);
    let ahead: Vec<String> = status
        .volumes
        .iter()
        .filter_map(|volume| newest(volume).filter(is_ahead).map(|s| format!("{}@{}", volume.name, s.name)))
        .collect();
    if let Some(first) = ahead.first() {
        let what =
            format!("snapshot {first} is dated ahead of this machine's clock: that is wrong, or was when it was taken");
        found.warning(Concern::Time, "clock", what, "`timedatectl` shows whether the clock is kept right");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_api::{Announcement, DeviceHealth, HostView};

    fn node(id: u32, state: NodeState, is_own: bool) -> NodeView {
        NodeView {
            id,
            state,
            address: format!("127.0.0.1:{}", 7500 + id),
            pid: None,
            cpu_ms: 0,
            resident_bytes: 0,
            trouble: None,
            wire: None,
            reactors: None,
            passed_on: None,
            devices: vec![device()],
            machine: None,
            machine_gone: false,
            is_own,
            configured: Vec::new(),
        }
    }

    fn device() -> DeviceInfo {
        let json = serde_json::json!({
            "device": "d1", "health": "serving", "capacity_bytes": 1000, "free_bytes": 900, "reserve_bytes": 100,
            "journal_bytes": 0, "journal_used_bytes": 0, "shards": 0,
        });
        serde_json::from_value(json).unwrap()
    }

    fn volume(layout: &str) -> VolumeInfo {
        let zero = serde_json::to_value(holdfast_api::Counters::default()).unwrap();
        let json = serde_json::json!({
            "name": "v", "id": "1", "size_bytes": 1, "layout": layout, "exported": true, "state": "open", "epoch": 1,
            "uris": [], "sessions": 0,
            "live": {
                "log_bytes": 0, "mapped_bytes": 0, "segments": 0, "degraded_segments": 0, "at_risk_entries": 0,
                "suspect_nodes": [], "counters": zero,
            },
        });
        serde_json::from_value(json).unwrap()
    }

    fn status(nodes: Vec<NodeView>) -> GridStatus {
        GridStatus {
            host: HostView { state: HostState::Up, pid: Some(7), ..HostView::default() },
            clock_ms: 1_000_000_000,
            nodes,
            volumes: vec![volume("parity:2+1")],
            ..GridStatus::default()
        }
    }

    fn told(status: &GridStatus) -> Vec<String> {
        of(status).iter().map(Finding::to_string).collect()
    }

    #[test]
    fn of_a_grid_that_is_well_there_is_nothing_to_say() {
        assert_eq!(of(&status(vec![node(1, NodeState::Up, true), node(2, NodeState::Up, false)])), []);
    }

    #[test]
    fn a_node_that_is_away_is_a_warning_and_more_than_the_layout_bears_are_worse() {
        let mut one =
            status(vec![node(1, NodeState::Up, true), node(2, NodeState::Down, true), node(3, NodeState::Up, true)]);
        one.volumes[0].live.as_mut().unwrap().degraded_segments = 5;
        assert_eq!(
            told(&one),
            [
                "WARNING (redundancy): parts of volume v bear less than they are to; next: `holdfast node start 2`",
                "WARNING (redundancy): node 2 is down; next: `holdfast node start 2`",
            ]
        );
        one.nodes[1] = node(2, NodeState::Hung, false);
        one.nodes[2] = node(3, NodeState::Cut, true);
        let found = of(&one);
        assert_eq!((found[0].severity, found[0].concern), (Severity::Critical, Concern::Service));
        assert!(found[0].what.contains("2 nodes are away"), "{}", found[0]);
        assert_eq!(found[0].next.as_deref(), Some("on its machine: `holdfast node resume 2`"));
        assert!(found[1..].iter().all(|finding| finding.severity == Severity::Warning));
    }

    #[test]
    fn what_other_hosts_see_is_told_with_the_rest() {
        let mut all = status((1..=3).map(|id| node(id, NodeState::Up, true)).collect());
        all.volumes[0].live.as_mut().unwrap().degraded_segments = 5;
        let names = |names: &[&str]| names.iter().copied().collect::<VolumeNames>();
        let c = HostHealth {
            host: "c".to_string(),
            waits: vec![Waiting { volume: "x".to_string(), why: "node 9 is away".to_string() }],
            locked: names(&["y", "z"]),
            at_risk: names(&["z"]),
            degraded: names(&["a", "b"]),
            unrecoverable: names(&["b"]),
            nodes_away: vec![2],
            certificate_warnings: vec!["the certificate of node 3 ends in 3 days".to_string()],
            alert_troubles: Vec::new(),
        };
        // Another one has tried the key, too.
        let d = HostHealth {
            host: "d".to_string(),
            waits: c.waits.clone(),
            locked: names(&["y"]),
            degraded: names(&["e"]),
            ..HostHealth::default()
        };
        (all.other_hosts, all.hosts_gone) = (vec![c, d], vec!["b".to_string()]);
        let told = told(&all);
        for (at, begin) in [
            "CRITICAL (service): volume x can't be opened yet: node 9 is away",
            "CRITICAL (service): volumes y, z are locked: their keys could not be had",
            "CRITICAL (data at risk): what volume z wrote last",
            "WARNING (redundancy): parts of 4 volumes (a, b, e, ...) bear less than they are to",
            "WARNING (redundancy): volume b could not be had back",
            "WARNING (service): host b is gone",
            "WARNING (redundancy): host c does not reach node 2, which this host reaches",
            "WARNING (certificates): machine c: the certificate of node 3 ends in 3 days",
        ]
        .iter()
        .enumerate()
        {
            assert!(told[at].starts_with(begin), "{at}: {told:#?}");
        }
        assert_eq!(told.len(), 8, "{told:#?}");
        all.nodes[1] = node(2, NodeState::Down, true);
        assert!(!of(&all).iter().any(|finding| finding.what.contains("does not reach")), "it is down here, too");
    }

    #[test]
    fn what_comes_of_a_machine_that_was_announced_to_be_away_is_marked() {
        let mut away = status((1..=3).map(|id| node(id, NodeState::Up, true)).collect());
        away.nodes[1] = node(2, NodeState::Down, false);
        away.nodes[1].machine = Some("b".to_string());
        away.volumes[0].live.as_mut().unwrap().degraded_segments = 5;
        (away.volumes[0].orphaned, away.volumes[0].host) = (true, Some("b".to_string()));
        away.hosts_gone.push("b".to_string());
        let marks = |status: &GridStatus| of(status).iter().map(|finding| finding.announced).collect::<Vec<_>>();
        assert_eq!(marks(&away), [false; 4]);
        away.announced.push(Announcement { machine: "b".to_string(), until_s: 1 });
        assert_eq!(marks(&away), [true; 4]);
        assert!(told(&away)[0].starts_with("CRITICAL (service), announced: volume v is served by nobody"));
        // Its devices are nothing that was announced, nor is what another one adds, which comes first.
        away.nodes[0].machine = Some("b".to_string());
        away.nodes[0].devices[0].health = DeviceHealth::Failed;
        assert_eq!(marks(&away), [false, true, true, true, true], "{:#?}", told(&away));
        away.nodes[2] = node(3, NodeState::Hung, true);
        assert_eq!(marks(&away).iter().filter(|is| **is).count(), 2, "{:#?}", told(&away));
        assert!(told(&away).iter().any(|line| line.starts_with("CRITICAL (service): volume v is served by nobody")));
        // Back again, what it missed is made good.
        away.nodes = (1..=3).map(|id| node(id, NodeState::Up, true)).collect();
        (away.volumes[0].orphaned, away.hosts_gone) = (false, Vec::new());
        assert_eq!(marks(&away), [true], "{:#?}", told(&away));
        away.volumes[0].live.as_mut().unwrap().at_risk_entries = 1;
        assert_eq!(marks(&away), [false, true]);
        away.announced.clear();
        away.volumes[0].failover = true;
        (away.volumes[0].state, away.volumes[0].waits) = (VolumeState::Elsewhere, Some("its host".to_string()));
        away.announced.push(Announcement { machine: "b".to_string(), until_s: 1 });
        assert!(
            told(&away).iter().any(|line| line.contains("announced: volume v can't be opened yet")),
            "{:#?}",
            told(&away)
        );
    }

    #[test]
    fn where_repair_lacks_nodes_a_layout_that_fits_is_named() {
        let mut few = status(vec![node(1, NodeState::Up, true), node(2, NodeState::Up, true)]);
        few.volumes[0].live.as_mut().unwrap().degraded_segments = 5;
        let next = |status: &GridStatus| of(status)[0].next.clone().unwrap();
        assert_eq!(
            next(&few),
            "parity:2+1 of volume v wants 3 nodes, and there are 2: add what is missing, or `holdfast volume set v \
             --protect node`, which means mirror:2 here"
        );
        few.volumes[0].layout = "mirror:2@device".to_string();
        assert!(next(&few).contains("`holdfast task watch`"), "{}", next(&few));
        few.nodes.pop();
        assert!(next(&few).ends_with("wants 2 devices, and there are 1: add what is missing"), "{}", next(&few));
    }

    #[test]
    fn what_a_machine_that_is_gone_has_left_behind_is_told_with_what_to_do() {
        let mut gone = status(vec![node(1, NodeState::Up, true), node(2, NodeState::Down, false)]);
        (gone.nodes[1].machine, gone.nodes[1].machine_gone) = (Some("b".to_string()), true);
        (gone.volumes[0].orphaned, gone.volumes[0].host, gone.volumes[0].live) = (true, Some("b".to_string()), None);
        let [volume, node] = &told(&gone)[..] else { panic!("{:?}", told(&gone)) };
        assert!(volume.contains("served by nobody: its host, b, is gone"), "{volume}");
        assert!(volume.contains("`holdfast volume export v`"), "{volume}");
        assert!(node.contains("`holdfast machine remove b --dead`"), "{node}");
        (gone.host.state, gone.host.trouble) = (HostState::Removed, Some("it was taken out".to_string()));
        assert_eq!(told(&gone), ["CRITICAL (service): it was taken out"]);
    }

    #[test]
    fn what_is_critical_comes_first_whatever_it_is_about() {
        let mut all = status(vec![node(1, NodeState::Up, true)]);
        all.volumes[0].layout = "mirror:2@device".to_string();
        all.certificate_warnings.push("the certificate of node 1 expires in 3 days".to_string());
        all.days_to_full = Some(3.0);
        all.nodes[0].devices[0].health = DeviceHealth::Failed;
        all.volumes[0].live.as_mut().unwrap().at_risk_entries = 1;
        all.volumes[0].live.as_mut().unwrap().snapshots.push(SnapshotInfo {
            name: "s".to_string(),
            layer: 1,
            created_ms: all.clock_ms + SKEW_MS + 1,
            size_bytes: 1,
            uris: Vec::new(),
            shares: None,
        });
        all.metadata.trouble = Some("out of reach for 3 s: no space left".to_string());
        let concerns: Vec<Concern> = of(&all).iter().map(|finding| finding.concern).collect();
        assert_eq!(
            concerns,
            [
                Concern::Metadata,
                Concern::DataAtRisk,
                Concern::Redundancy,
                Concern::Capacity,
                Concern::Certificates,
                Concern::Time
            ]
        );
        all.host.state = HostState::Down;
        assert!(told(&all)[0].starts_with("CRITICAL (service): the host is down"), "{:?}", told(&all));
    }

    #[test]
    fn what_is_left_of_devices_is_told_before_there_is_nothing() {
        let mut low = status(vec![node(1, NodeState::Up, true)]);
        low.volumes.clear();
        low.nodes[0].devices[0].free_bytes = 280;
        assert!(told(&low).is_empty(), "{:?}", told(&low));
        low.nodes[0].devices[0].free_bytes = 279;
        assert!(told(&low)[0].starts_with("WARNING (capacity): less than 20 %"), "{:?}", told(&low));
        low.nodes[0].devices[0].free_bytes = 145;
        assert!(told(&low)[0].starts_with("WARNING (capacity): less than 20 %"), "{:?}", told(&low));
        assert!(!is_short(&[&low.nodes[0].devices], &[]), "the trash stays");
        low.nodes[0].devices[0].free_bytes = 139;
        assert!(told(&low)[0].starts_with("CRITICAL (capacity): less than 5 %"), "{:?}", told(&low));
        assert!(is_short(&[&low.nodes[0].devices], &[]));
        low.nodes[0].devices[0].free_bytes = 100;
        assert!(told(&low)[0].starts_with("CRITICAL (capacity): devices are full"), "{:?}", told(&low));
    }

    #[test]
    fn room_on_one_node_is_none_for_a_layout_that_takes_three() {
        let mut uneven = status((1..=3).map(|id| node(id, NodeState::Up, true)).collect());
        uneven.nodes[1].devices[0].free_bytes = 130;
        assert_eq!(
            told(&uneven),
            ["CRITICAL (capacity): less than 5 % of devices is free for volumes of parity:2+1; next: `holdfast \
                 space`; then free space, or `holdfast device add 2`"]
        );
        uneven.nodes[1].devices[0].free_bytes = 100;
        assert!(
            told(&uneven)[0].starts_with("CRITICAL (capacity): devices are full for volumes of parity:2+1: guests'")
        );
        let by_node: Vec<&[DeviceInfo]> = uneven.nodes.iter().map(|node| &node.devices[..]).collect();
        assert!(is_short(&by_node, &["parity:2+1".parse().unwrap()]));
        assert!(!is_short(&by_node, &["mirror:2".parse().unwrap()]), "the two others have room for it");
        // Two nodes are left, and what is written is mirrored there.
        uneven.nodes[1] = node(2, NodeState::Down, true);
        uneven.nodes[1].devices.clear();
        assert!(told(&uneven).iter().all(|line| !line.contains("capacity")), "{:?}", told(&uneven));
    }

    #[test]
    fn people_who_can_not_be_told_are_told_of_here() {
        let mut all = status(Vec::new());
        assert!(of(&all).is_empty());
        let way = "webhook at chat.example".to_string();
        all.alert_troubles = vec![AlertTrouble { way, why: "connection refused".to_string(), waiting: 1, dropped: 0 }];
        let found = of(&all);
        assert_eq!(
            (found.len(), found[0].severity, found[0].about.as_str()),
            (1, Severity::Warning, "alerts by webhook at chat.example")
        );
        assert_eq!(found[0].what, "alerts can't be sent by webhook at chat.example: connection refused; 1 waits");
        (all.alert_troubles[0].waiting, all.alert_troubles[0].dropped) = (100, 3);
        assert!(of(&all)[0].what.ends_with("; 100 wait, 3 older ones are dropped"), "{:?}", of(&all));
    }

    #[test]
    fn the_alarm_is_raised_in_the_last_month() {
        assert_eq!(full_soon(None), None);
        assert_eq!(full_soon(Some(30.5)), None);
        assert!(full_soon(Some(12.2)).unwrap().contains("in about 12 days"));
        assert!(full_soon(Some(1.4)).unwrap().contains("in about a day"));
        assert!(full_soon(Some(0.0)).unwrap().contains("full today"));
    }
}
