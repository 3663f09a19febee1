//! Why a volume's requests are slow, in a sentence: from what its host and its nodes tell, and nothing else.
//!
//! Role: a pure function. Of the stage in which the slow requests spent most it says who is to blame there, and what to do.
//! Where requests are slow all alike, the stage in which they are for longest is meant.
//!
//! A node is blamed if nearly all that the slow requests waited for nodes was for it, and for others far less.

use holdfast_api::{
    DeviceInfo, FilterInfo, LinkState, Neighbour, NodeInfo, ProcessorInfo, SlowInfo, SlowKind, SlowNode, SlowRequest,
    SlowStage,
};
use holdfast_filter::is_limit;
use serde::Serialize;
use std::cmp::Reverse;

/// What takes no longer is not slow.
const FAST_US: u64 = 5_000;

/// Who takes as long stands still. It is told of where nothing else is slow: of so many requests, or of one that is longer.
const STILL_US: u64 = 50_000;
const STILL_MIN: usize = 4;
const STILL_ALONE_US: u64 = 500_000;

/// Who is under way for so long, and so many times as long as the slow ones take, hangs.
const HANGS_US: u64 = 1_000_000;
const HANGS_TIMES: u64 = 4;

/// Of the slow ones' time: a stage that has it is the cause.
const MOST_PER_MILLE: u64 = 500;

/// The slow ones are others than the rest where they take so many times as long.
const TIMES_APART: u64 = 3;

/// A device that takes so many times what its peers take, and at least that, is the one.
const DEVICE_TIMES: u32 = 4;
const DEVICE_US_MIN: u32 = 2_000;

/// Of a journal; hosts hold writes back from three quarters on.
const JOURNAL_FULL_PERCENT: u64 = 75;

/// A neighbour that has so many requests under way is one that others wait for.
const BUSY_PERCENT: u64 = 400;

/// A neighbour with a floor gets what that says, and no more, up to this.
const FLOOR_PERCENT: u64 = 133;

/// One with less of all requests than this has nobody wait.
const SHARE_PERCENT_MIN: u64 = 20;

/// Nodes that have so much of what the slow ones waited for nodes are the late ones.
const LATE_PERCENT: u64 = 90;

/// Requests of a late node wait so many times as long as others do.
const LATE_TIMES: u64 = 3;

/// A thread that waits for a processor so much of its time is held up by that, and one that has one nearly always is full.
const PROCESSOR_WAITED_PER_MILLE: u64 = 100;
const PROCESSOR_BUSY_PER_MILLE: u64 = 900;

/// Stages that are spent at nodes' devices, by the names that reads and writes have for them.
const AT_DEVICES: &[&str] = &["node queue", "device", "leg queue", "leg device"];

/// Those, and all others that are spent at nodes or on the way to them.
const AT_NODES: &[&str] =
    &["node queue", "device", "leg queue", "leg device", "network", "nodes", "second round", "earlier"];

/// What is the matter, for programs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cause {
    Nothing,
    Guest,
    Limit,
    Neighbour,
    Floor,
    Filter,
    Writers,
    OwnReads,
    OwnWrites,
    WriteBack,
    Journal,
    Space,
    SmallWrites,
    Map,
    Device,
    Devices,
    Queue,
    Network,
    Node,
    SecondRound,
    EarlierWrites,
    Grants,
    Hangs,
    Snapshots,
    Processor,
    Host,
    Several,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Verdict {
    pub cause: Cause,
    pub text: String,
}

fn verdict(cause: Cause, text: impl Into<String>) -> Verdict {
    Verdict { cause, text: text.into() }
}

/// What a verdict is made from.
#[derive(Clone, Copy)]
pub struct Facts<'a> {
    pub name: &'a str,
    /// Its policy, as it was told.
    pub limit: Option<&'a str>,
    pub filters: &'a [FilterInfo],
    pub slow: &'a SlowInfo,
    pub nodes: &'a [NodeInfo],
    /// The kind of requests is writes.
    pub writes: bool,
}

impl<'a> Facts<'a> {
    fn kind(self) -> Option<&'a SlowKind> {
        let SlowInfo { reads, writes, .. } = self.slow;
        if self.writes { writes.as_ref() } else { reads.as_ref() }
    }

    /// Of all that the host is asked for, what another volume asks for.
    fn share_percent(self, other: &Neighbour) -> u64 {
        let rate = |kind: &SlowKind| kind.count * 1000 / kind.over_ms.max(1);
        let own: u64 = [&self.slow.reads, &self.slow.writes].into_iter().flatten().map(rate).sum();
        let all = own + self.slow.others.iter().map(|other| other.per_second).sum::<u64>();
        percent(other.per_second, all)
    }
}

pub fn ms(us: u64) -> String {
    format!("{:.*} ms", if us < 100_000 { 2 } else { 0 }, us as f64 / 1000.0)
}

fn percent(part: u64, of: u64) -> u64 {
    (part * 100).checked_div(of).unwrap_or(0)
}

/// Of few requests nobody knows yet which are the slow ones: if half of them are slow these are meant, and no chance few.
fn are_apart(kind: &SlowKind) -> bool {
    let is_known = kind.slow > 0 || kind.p50_us <= FAST_US;
    is_known && kind.p99_us >= TIMES_APART * kind.p50_us.max(1)
}

/// Of one kind of requests; `None` where there were none.
pub fn of(facts: Facts<'_>) -> Option<Verdict> {
    if let Some(found) = of_hanging(facts) {
        return Some(found);
    }
    let kind = facts.kind()?;
    if kind.p99_us > FAST_US {
        return Some(of_slow(kind, facts));
    }
    Some(of_still(kind, facts).unwrap_or_else(|| nothing(kind)))
}

/// Requests that are not answered at all. Filters may hold them for as long as they like.
fn of_hanging(facts: Facts<'_>) -> Option<Verdict> {
    let SlowInfo { reads_under_way, writes_under_way, .. } = facts.slow;
    let (what, under_way) = if facts.writes { ("writes", writes_under_way) } else { ("reads", reads_under_way) };
    let p99_us = facts.kind().map_or(0, |kind| kind.p99_us);
    let has_filters = facts.filters.iter().any(|filter| !filter.kept);
    if has_filters || under_way.oldest_us < HANGS_US.max(p99_us * HANGS_TIMES) {
        return None;
    }
    let seconds = under_way.oldest_us / 1_000_000;
    let hang = match under_way.count {
        1 => format!("a {} is not answered for {seconds} s", what.trim_end_matches('s')),
        count => format!("{count} {what} are not answered, the first of them for {seconds} s"),
    };
    Some(match of_links(facts.nodes) {
        Some(found) => verdict(found.cause, format!("{hang}: {}", found.text)),
        None => verdict(
            Cause::Hangs,
            format!(
                "{hang}, and no node is known to be away; `holdfast volume explain {}` tells what they wait for",
                facts.name
            ),
        ),
    })
}

/// Nearly all are fast, and some stand still: a guest that has few under way stands still with them. What is said is of the
/// slowest that were kept, as if they alone were slow.
fn of_still(kind: &SlowKind, facts: Facts<'_>) -> Option<Verdict> {
    let still: Vec<&SlowRequest> = kind.slowest.iter().filter(|request| request.took_us >= STILL_US).collect();
    let longest_us = still.first()?.took_us;
    if still.len() < STILL_MIN && longest_us < STILL_ALONE_US {
        return None;
    }
    let count = still.len() as u64;
    let stages = || {
        kind.stages.iter().map(|stage| {
            let us: u64 = still.iter().filter_map(|request| request.stages.get(&stage.stage)).sum();
            SlowStage { slow_us: us / count, p99_us: us / count, ..stage.clone() }
        })
    };
    let beyond = |stage: &SlowStage| stage.slow_us.saturating_sub(stage.p50_us);
    let all: u64 = stages().map(|stage| beyond(&stage)).sum();
    let stages = stages()
        .map(|stage| SlowStage { slow_per_mille: (beyond(&stage) * 1000).checked_div(all).unwrap_or(0), ..stage });
    let nodes = kind.nodes.iter().map(|of| {
        let own = still.iter().filter(|request| request.node == Some(of.node));
        SlowNode { slow: own.clone().count() as u64, slow_us: own.map(|request| request.took_us).sum(), ..*of }
    });
    let (stages, nodes) = (stages.collect(), nodes.collect());
    let only = SlowKind { p99_us: longest_us, slow: count, stages, nodes, ..kind.clone() };
    let mut slow = facts.slow.clone();
    *(if facts.writes { &mut slow.writes } else { &mut slow.reads }) = Some(only.clone());
    let Verdict { cause, text } = of_slow(&only, Facts { slow: &slow, ..facts });
    let text = format!(
        "99 of 100 take at most {}, and now and then some stand still for up to {}: {text}",
        ms(kind.p99_us),
        ms(longest_us)
    );
    Some(verdict(cause, text))
}

fn of_slow(kind: &SlowKind, facts: Facts<'_>) -> Verdict {
    let are_apart = are_apart(kind);
    let by = |stage: &SlowStage| match (are_apart, kind.slow) {
        (false, _) => percent(stage.p50_us, kind.p50_us) * 10,
        // Too few to tell the slow ones from the rest.
        (true, 0) => percent(stage.p99_us, kind.p99_us) * 10,
        (true, _) => stage.slow_per_mille,
    };
    let mut stages: Vec<&SlowStage> = kind.stages.iter().collect();
    stages.sort_by_key(|stage| Reverse(by(stage)));
    let sum =
        |of: &[&str]| stages.iter().filter(|stage| of.contains(&&*stage.stage)).map(|stage| by(stage)).sum::<u64>();
    match stages[..] {
        [first, ..] if by(first) >= MOST_PER_MILLE => of_stage(first, facts),
        // A slow device is a queue before it, too.
        [..] if sum(AT_DEVICES) >= MOST_PER_MILLE => of_devices(facts),
        [..] if sum(AT_NODES) >= MOST_PER_MILLE => of_nodes("", kind.p99_us, facts),
        [first, second, ..] => verdict(
            Cause::Several,
            format!(
                "no single cause: {} ({} %), then {} ({} %); --requests shows the slowest, stage by stage",
                first.about,
                by(first) / 10,
                second.about,
                by(second) / 10
            ),
        ),
        _ => nothing(kind),
    }
}

fn nothing(kind: &SlowKind) -> Verdict {
    let (rate, depth) = (kind.count * 1000 / kind.over_ms.max(1), kind.count * kind.p50_us / kind.over_ms.max(1));
    // In thousandths of a request.
    if (500..1_500).contains(&depth) {
        let text = format!(
            "nothing is slow here: the guest has one request under way at a time, and each takes {}, which makes {rate} a \
             second; more at a time are more a second",
            ms(kind.p50_us)
        );
        return verdict(Cause::Guest, text);
    }
    verdict(Cause::Nothing, format!("nothing is slow: 99 of 100 take at most {}", ms(kind.p99_us)))
}

fn of_stage(stage: &SlowStage, facts: Facts<'_>) -> Verdict {
    let name = facts.name;
    match stage.stage.as_str() {
        "qos" => of_turns(facts),
        "filters" => of_filters(facts),
        "order" => verdict(
            Cause::Writers,
            "writes wait for the right to write, or for what was asked before their client connected anew; `holdfast volume \
             show` names the writer",
        ),
        "room" => verdict(
            Cause::OwnReads,
            "its reads wait for each other: 32 MiB of a volume are read at a time; fewer or smaller reads at a time wait less",
        ),
        "held" => of_held(facts),
        "write-back" => of_write_back(facts),
        "journal" => of_journal(facts),
        "space" => of_space(),
        "blocks" => verdict(
            Cause::SmallWrites,
            "writes of less than a block of 4 KiB wait until the rest of the block is read, or others of the same block are \
             done; align the guest's partitions, and write whole blocks",
        ),
        "map" => verdict(
            Cause::Map,
            "the map of the volume does not fit into memory, and is read first; give it more: `holdfast config explain \
             memory.map_cache`",
        ),
        "device" | "leg device" => of_devices(facts),
        "node queue" | "leg queue" => of_queues(stage.slow_us, facts),
        "network" => of_network(facts),
        "nodes" | "second round" | "earlier" => of_nodes(&stage.stage, stage.slow_us, facts),
        "snapshots" => verdict(
            Cause::Snapshots,
            "a group of snapshots holds its answers back until each of its volumes has a snapshot; smaller groups, or fewer of \
             them, hold less",
        ),
        "grant" => verdict(
            Cause::Grants,
            match of_links(facts.nodes) {
                Some(found) => format!("nodes did not let this host answer in time: {}", found.text),
                None => "nodes did not let this host answer in time".to_string(),
            },
        ),
        _ => of_host(name, facts),
    }
}

fn busiest<'a>(facts: Facts<'a>) -> Option<&'a Neighbour> {
    facts.slow.others.first().filter(|other| other.depth_percent >= BUSY_PERCENT)
}

fn of_neighbour(other: &Neighbour, what: &str, facts: Facts<'_>) -> Verdict {
    let has =
        other.policy.as_ref().map_or(String::new(), |words| format!(" (it has {words}, which is to be said again)"));
    let text = format!(
        "{what} volume {}, which takes {} % of the requests here: {} a second, {} under way at a time; `holdfast volume set {} \
         --qos limit=REQUESTS` holds it{has}",
        other.name,
        facts.share_percent(other),
        other.per_second,
        other.depth_percent.div_ceil(100),
        other.name
    );
    verdict(Cause::Neighbour, text)
}

fn floor_of(other: &Neighbour) -> Option<u64> {
    let words = other.policy.as_deref()?.split(',');
    words.filter_map(|words| words.trim().strip_prefix("floor=")?.parse().ok()).next()
}

/// The neighbour whose floor is what it gets, and that is much.
fn of_floors(facts: Facts<'_>) -> Option<Verdict> {
    let is_kept = |other: &Neighbour, floor: u64| {
        other.per_second * 100 <= floor * FLOOR_PERCENT && facts.share_percent(other) >= SHARE_PERCENT_MIN
    };
    let floors = facts.slow.others.iter().filter_map(|other| Some((other, floor_of(other)?)));
    let (other, floor) =
        floors.filter(|(other, floor)| is_kept(other, *floor)).max_by_key(|(other, _)| other.per_second)?;
    let text = format!(
        "the floor of volume {} goes first: it is promised {floor} requests a second and gets {}, {} % of the requests here; a \
         smaller floor or more nodes leave more (`holdfast qos list`)",
        other.name,
        other.per_second,
        facts.share_percent(other)
    );
    Some(verdict(Cause::Floor, text))
}

fn of_turns(facts: Facts<'_>) -> Verdict {
    let (name, SlowInfo { waited, held_by_limit, has_window, .. }) = (facts.name, facts.slow);
    if let Some(limit) = facts.limit.filter(|_| !has_window || held_by_limit * 2 >= *waited) {
        let next = match is_limit(limit) {
            true => format!("`holdfast volume set {name} --limit none` ends that"),
            false => format!("`holdfast volume set {name} --qos POLICY` says it anew"),
        };
        return verdict(Cause::Limit, format!("its own limit holds it ({limit}); {next}"));
    }
    if let Some(found) = of_floors(facts) {
        return found;
    }
    if let Some(other) = busiest(facts) {
        return of_neighbour(other, "it waits for its turn beside", facts);
    }
    let text = format!(
        "it waits for its turn among volumes of this host; a larger weight is a larger share: `holdfast volume set {name} \
         --qos weight=400`"
    );
    verdict(Cause::Neighbour, text)
}

fn of_filters(facts: Facts<'_>) -> Verdict {
    let own = facts.filters.iter().filter(|filter| !filter.kept);
    let words: Vec<String> = own.map(|filter| format!("{}: {}", filter.id, filter.spec)).collect();
    let text = match words.is_empty() {
        true => "filters stood before it, and are gone".to_string(),
        false => format!(
            "filters before it hold it ({}); `holdfast volume filter remove {}` ends that",
            words.join("; "),
            facts.name
        ),
    };
    verdict(Cause::Filter, text)
}

/// Of hosts that don't tell what is missing this is all that is known.
fn of_held(facts: Facts<'_>) -> Verdict {
    if fullest_journal(facts).is_some_and(|(fill, ..)| fill >= JOURNAL_FULL_PERCENT) {
        return of_journal(facts);
    }
    if is_nearly_full(facts) {
        return of_space();
    }
    verdict(
        Cause::OwnWrites,
        "its writes wait for each other: only so many of a volume are written at a time; fewer at a time wait less",
    )
}

fn of_write_back(facts: Facts<'_>) -> Verdict {
    let other = of_slow_device(facts).or_else(|| is_nearly_full(facts).then(of_space));
    other.unwrap_or_else(|| {
        verdict(
            Cause::WriteBack,
            "write-back is full: what is in the log is written to segments more slowly than guests write; faster devices, more \
             nodes or a larger memory.writeback bear more",
        )
    })
}

/// What keeps the log, and so the journals, from being emptied may be that there is no room for segments.
fn of_journal(facts: Facts<'_>) -> Verdict {
    if let Some(found) = of_slow_device(facts) {
        return found;
    }
    if is_nearly_full(facts) {
        return of_space();
    }
    let whose = fullest_journal(facts).map_or_else(String::new, |(fill, node, device)| {
        format!(", the fullest is that of device {} with {fill} %", place_of(node, device))
    });
    let text = format!(
        "writes wait for room in journals{whose}: what leaves them is written more slowly than guests write; faster devices or \
         more nodes bear more"
    );
    verdict(Cause::Journal, text)
}

fn fullest_journal<'a>(facts: Facts<'a>) -> Option<(u64, &'a NodeInfo, &'a DeviceInfo)> {
    let fill = |device: &DeviceInfo| (device.journal_used_bytes * 100).checked_div(device.journal_bytes);
    let known = all_devices(facts).filter_map(|(node, device)| Some((fill(device)?, node, device)));
    known.max_by_key(|(fill, ..)| *fill)
}

/// Little is left of what guests may fill.
fn is_nearly_full(facts: Facts<'_>) -> bool {
    let free = |device: &DeviceInfo| device.free_bytes.saturating_sub(device.reserve_bytes);
    let (free, all) =
        all_devices(facts).fold((0, 0), |(sum, all), (_, device)| (sum + free(device), all + device.capacity_bytes));
    all > 0 && free * 8 < all
}

fn of_space() -> Verdict {
    verdict(
        Cause::Space,
        "writes wait for room, which is made by cleaning: the grid is nearly full, and the cleaner is behind; `holdfast space` \
         tells what is free, more devices or fewer snapshots make room",
    )
}

/// As commands take it: node and place.
fn place_of(node: &NodeInfo, device: &DeviceInfo) -> String {
    let slot = node.devices.iter().position(|other| other.device == device.device).unwrap_or(0);
    format!("{}/{slot}", node.id)
}

/// What 99 of 100 operations of the kind took on a device.
fn p99_of(device: &DeviceInfo, facts: Facts<'_>) -> Option<u32> {
    if facts.writes { device.write_p99_us } else { device.read_p99_us }
}

fn all_devices<'a>(facts: Facts<'a>) -> impl Iterator<Item = (&'a NodeInfo, &'a DeviceInfo)> {
    facts.nodes.iter().flat_map(|node| node.devices.iter().map(move |device| (node, device)))
}

fn middle_of(facts: Facts<'_>, is_of: impl Fn(&DeviceInfo) -> bool) -> u32 {
    let of = all_devices(facts).filter(|(_, device)| is_of(device));
    let mut times: Vec<u32> = of.filter_map(|(_, device)| p99_of(device, facts)).collect();
    times.sort_unstable();
    times.get(times.len().saturating_sub(1) / 2).copied().unwrap_or(0)
}

/// The device that stands out, or was found slow. Where it is known which nodes are late it is one of theirs.
fn of_slow_device(facts: Facts<'_>) -> Option<Verdict> {
    let late = late_nodes(facts);
    let devices =
        || all_devices(facts).filter(|(node, _)| late.as_ref().is_none_or(|late| late.ids.contains(&node.id)));
    // Disks are compared with disks, flash with flash.
    let outliers = devices().filter_map(|(node, device)| {
        let (us, middle) = (p99_of(device, facts)?, middle_of(facts, |other| other.class == device.class));
        let stands_out = us >= DEVICE_US_MIN && us >= middle.saturating_mul(DEVICE_TIMES);
        stands_out.then_some((us, middle, node, device))
    });
    if let Some((us, middle, node, device)) = outliers.max_by_key(|(us, ..)| *us) {
        return Some(of_device(node, device, Some((us, middle))));
    }
    let told_slow = devices().find(|(_, device)| device.slow_s.is_some());
    told_slow.map(|(node, device)| of_device(node, device, None))
}

/// Nodes that the slow requests waited for, and others did not.
struct Late {
    ids: Vec<u32>,
    /// What a slow one waited for them, in the mean.
    us: u64,
    /// Whoever asks them waits, and not one now and then.
    is_always: bool,
    /// There is no other that they could be compared with.
    is_alone: bool,
}

impl Late {
    fn names(&self) -> String {
        names_of(&self.ids)
    }
}

fn names_of(ids: &[u32]) -> String {
    let words: Vec<String> = ids.iter().map(u32::to_string).collect();
    format!("{} {}", if ids.len() == 1 { "node" } else { "nodes" }, words.join(" and "))
}

fn late_nodes(facts: Facts<'_>) -> Option<Late> {
    let kind = facts.kind()?;
    let of_slow = are_apart(kind) && kind.slow > 0;
    let us = |of: &SlowNode| if of_slow { of.slow_us } else { of.us };
    let mut nodes: Vec<&SlowNode> = kind.nodes.iter().collect();
    nodes.sort_by_key(|of| Reverse(us(of)));
    let (all, mut sum) = (nodes.iter().map(|of| us(of)).sum::<u64>(), 0);
    let few = nodes.iter().position(|of| {
        sum += us(of);
        sum * 100 >= all * LATE_PERCENT
    });
    let (late, others) = nodes.split_at(few.filter(|_| all > 0)? + 1);
    let mean = |of: &[&SlowNode], us: fn(&SlowNode) -> (u64, u64)| {
        let sums = of.iter().map(|of| us(of)).fold((0, 0), |sums, of| (sums.0 + of.0, sums.1 + of.1));
        sums.0.checked_div(sums.1).unwrap_or(0)
    };
    let of_all: fn(&SlowNode) -> (u64, u64) = |of| (of.us, of.count);
    let of_slow_ones: fn(&SlowNode) -> (u64, u64) = |of| (of.slow_us, of.slow);
    let (own, slow) = (mean(late, of_all), mean(late, if of_slow { of_slow_ones } else { of_all }));
    let is_alone = late.len() == 1 && others.is_empty() && facts.nodes.len() > 1;
    if !is_alone && (others.is_empty() || slow < LATE_TIMES * mean(others, of_all)) {
        return None;
    }
    let mut ids: Vec<u32> = late.iter().map(|of| of.node).collect();
    ids.sort_unstable();
    Some(Late { ids, us: slow, is_always: own * LATE_TIMES >= slow, is_alone })
}

fn of_all_devices(facts: Facts<'_>) -> Verdict {
    let text = format!(
        "all devices are slow alike: 99 of 100 operations take up to {}; more devices, or faster ones, bear more",
        ms(middle_of(facts, |_| true).into())
    );
    of_processor(facts).unwrap_or_else(|| verdict(Cause::Devices, text))
}

/// The host's own thread does not come to do what it has to.
fn of_processor(facts: Facts<'_>) -> Option<Verdict> {
    let ProcessorInfo { busy_per_mille, waited_per_mille } = facts.slow.processor?;
    if waited_per_mille >= PROCESSOR_WAITED_PER_MILLE {
        let text = format!(
            "the processors of this host's machine are full: its thread waited for one {} % of the time; move other work away \
             (`top` shows it), or give the host processors of its own",
            waited_per_mille / 10
        );
        return Some(verdict(Cause::Processor, text));
    }
    (busy_per_mille >= PROCESSOR_BUSY_PER_MILLE).then(|| {
        let text = format!(
            "the host's own thread is full: it was at work {} % of the time; more reactors, or another host for some of its \
             volumes, bear more",
            busy_per_mille / 10
        );
        verdict(Cause::Processor, text)
    })
}

/// Nodes tell that their devices took it.
fn of_devices(facts: Facts<'_>) -> Verdict {
    let known = of_slow_device(facts).or_else(|| of_standing_still(facts));
    known.unwrap_or_else(|| of_all_devices(facts))
}

/// Nodes tell that it waited there for others.
fn of_queues(stage_us: u64, facts: Facts<'_>) -> Verdict {
    let beside = || busiest(facts).map(|other| of_neighbour(other, "at nodes it waits behind", facts));
    let known = of_slow_device(facts).or_else(beside).or_else(|| of_standing_still(facts));
    if let Some(found) = known.or_else(|| of_processor(facts)) {
        return found;
    }
    let text = format!(
        "requests wait {} at {} for others that ask the same devices, of this host or another; more devices bear more, and \
         `holdfast top` shows who asks",
        ms(stage_us),
        late_nodes(facts).map_or("nodes".to_string(), |late| late.names())
    );
    verdict(Cause::Queue, text)
}

/// A node that is late now and then, for far longer than its devices take.
fn of_standing_still(facts: Facts<'_>) -> Option<Verdict> {
    let late = late_nodes(facts).filter(|late| !late.is_always)?;
    let devices = all_devices(facts).filter(|(node, _)| late.ids.contains(&node.id));
    let device_us: u64 = devices.filter_map(|(_, device)| p99_of(device, facts)).max().unwrap_or(0).into();
    (device_us * LATE_TIMES < late.us).then(|| {
        let text = format!(
            "{} is late now and then: slow requests waited {} for it, and 99 of 100 operations of its devices take up to {}; its \
             process or a device stands still at times, or its way loses what is sent",
            late.names(),
            ms(late.us),
            ms(device_us)
        );
        verdict(Cause::Node, text)
    })
}

/// Nodes tell that neither they nor their devices took it.
fn of_network(facts: Facts<'_>) -> Verdict {
    let late = late_nodes(facts);
    // A host that does not come to hear of answers sees that of whichever node it asks.
    if let Some(found) = of_processor(facts).filter(|_| late.as_ref().is_none_or(|late| late.is_alone)) {
        return found;
    }
    let is_connected = |id: &u32| facts.nodes.iter().any(|node| node.id == *id && node.link == LinkState::Up);
    if let Some(late) = late.filter(|late| late.is_always && late.ids.iter().all(is_connected)) {
        let text = format!(
            "the way to {} and back is slow, or processors there are busy: requests wait {} for it, and not for its devices; \
             `holdfast node list` shows what each does",
            late.names(),
            ms(late.us)
        );
        return verdict(Cause::Network, text);
    }
    if let Some(found) = of_links(facts.nodes) {
        return found;
    }
    if let Some(found) = of_standing_still(facts) {
        return found;
    }
    let text = format!(
        "the way to nodes and back is slow, or processors at its ends are busy: devices take {} at most; `holdfast node list` \
         shows what each does",
        ms(all_devices(facts).filter_map(|(_, device)| p99_of(device, facts)).max().unwrap_or(0).into())
    );
    verdict(Cause::Network, text)
}

/// Nodes don't tell, or not all of it.
fn of_nodes(stage: &str, stage_us: u64, facts: Facts<'_>) -> Verdict {
    if let Some(found) = of_slow_device(facts).or_else(|| of_links(facts.nodes)) {
        return found;
    }
    match (stage, late_nodes(facts)) {
        ("second round", Some(late)) => return of_second_round(&late, facts),
        ("earlier", Some(late)) => {
            let text = format!(
                "writes wait for earlier ones, for they become durable in their order: {} was late to have these, by {}",
                late.names(),
                ms(late.us)
            );
            return verdict(Cause::EarlierWrites, text);
        }
        _ => {}
    }
    let middle = middle_of(facts, |_| true);
    if u64::from(middle) * 2 >= stage_us && middle >= DEVICE_US_MIN {
        return of_all_devices(facts);
    }
    match busiest(facts) {
        Some(other) => of_neighbour(other, "nodes and their processors are busy with", facts),
        None => of_network(facts),
    }
}

fn of_second_round(late: &Late, facts: Facts<'_>) -> Verdict {
    let errors = all_devices(facts).filter(|(node, device)| late.ids.contains(&node.id) && device.io_errors > 0);
    let errors: Vec<String> = errors
        .map(|(node, device)| format!("device {} had {} errors", place_of(node, device), device.io_errors))
        .collect();
    let next = match errors.is_empty() {
        true => "`holdfast status` tells more".to_string(),
        false => format!("{}; `holdfast device list` tells more", errors.join(", ")),
    };
    let text = format!(
        "{} did not answer well or in time, and others were asked instead, {} later; {next}",
        late.names(),
        ms(late.us)
    );
    verdict(Cause::SecondRound, text)
}

fn of_device(node: &NodeInfo, device: &DeviceInfo, times: Option<(u32, u32)>) -> Verdict {
    let figures = times.map_or(String::new(), |(us, peers)| {
        format!(": 99 of 100 operations take up to {}, those of its peers {}", ms(us.into()), ms(peers.into()))
    });
    let next = match device.bypassed {
        true => "volumes do without it already".to_string(),
        false => format!("`holdfast device drain {}` takes it out", place_of(node, device)),
    };
    verdict(Cause::Device, format!("device {} is slow{figures}; {next}", place_of(node, device)))
}

/// Nodes that are away, or avoided since they were late.
fn of_links(nodes: &[NodeInfo]) -> Option<Verdict> {
    let is_bad = |node: &&NodeInfo| node.link != LinkState::Up || node.suspect;
    let ids: Vec<u32> = nodes.iter().filter(is_bad).map(|node| node.id).collect();
    let text = || format!("requests waited for {}, late or away; `holdfast status` tells more", names_of(&ids));
    (!ids.is_empty()).then(|| verdict(Cause::Node, text()))
}

fn of_host(name: &str, facts: Facts<'_>) -> Verdict {
    if let Some(found) = of_links(facts.nodes).or_else(|| of_processor(facts)) {
        return found;
    }
    let text = format!(
        "the host itself is behind: {name} was being opened, or its thread did something else for long; `holdfast status` tells \
         of its longest turn"
    );
    verdict(Cause::Host, text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_api::{EdgeInfo, UnderWayInfo};
    use serde_json::json;
    use std::collections::BTreeMap;

    /// By stage: what the median and the slow ones spent there, in microseconds.
    fn kind(p50_us: u64, p99_us: u64, stages: &[(&str, u64, u64)]) -> SlowKind {
        let beyond: u64 = stages.iter().map(|(_, p50, slow)| slow.saturating_sub(*p50)).sum();
        let stage = |(stage, p50_us, slow_us): &(&str, u64, u64)| SlowStage {
            stage: (*stage).to_string(),
            about: format!("about {stage}"),
            p50_us: *p50_us,
            p99_us: *slow_us,
            slow_us: *slow_us,
            slow_per_mille: (slow_us.saturating_sub(*p50_us) * 1000).checked_div(beyond).unwrap_or(0),
        };
        let stages = stages.iter().map(stage).collect();
        let (nodes, slowest) = (Vec::new(), Vec::new());
        SlowKind { count: 60_000, over_ms: 60_000, p50_us, p99_us, slow: 600, stages, nodes, slowest }
    }

    /// With two devices each: what 99 of 100 reads took there.
    fn node(id: u32, link: &str, p99_us: [u64; 2]) -> NodeInfo {
        let device = |us: u64| {
            json!({
                "device": format!("{id}-{us}"), "health": "online", "capacity_bytes": 1000, "free_bytes": 900, "journal_bytes": 100,
                "journal_used_bytes": 10, "shards": 1, "read_p99_us": us, "write_p99_us": us,
            })
        };
        let node = json!({
            "id": id, "address": "", "link": link, "suspect": false, "cut": false, "silent_ms": 0, "devices": p99_us.map(device),
        });
        serde_json::from_value(node).unwrap()
    }

    fn nodes() -> Vec<NodeInfo> {
        vec![node(1, "up", [300, 310]), node(2, "up", [290, 400]), node(3, "up", [350, 280])]
    }

    /// Beside the requests, what is known.
    struct Case {
        limit: Option<&'static str>,
        filters: Vec<FilterInfo>,
        slow: SlowInfo,
        nodes: Vec<NodeInfo>,
    }

    fn said(kind: &SlowKind, change: impl FnOnce(&mut Case)) -> Verdict {
        let mut case = Case { limit: None, filters: Vec::new(), slow: SlowInfo::default(), nodes: nodes() };
        change(&mut case);
        case.slow.reads = Some(kind.clone());
        let Case { limit, filters, slow, nodes } = &case;
        of(Facts { name: "vm7", limit: *limit, filters, slow, nodes, writes: false }).expect("there were some")
    }

    #[test]
    fn what_is_fast_is_not_slow_and_one_at_a_time_is_the_guests_choice() {
        let found = said(&kind(100, 400, &[("nodes", 100, 400)]), |_| {});
        assert!(found.cause == Cause::Nothing && found.text.contains("0.40 ms"), "{found:?}");
        let found = said(&kind(1_000, 1_400, &[("nodes", 1_000, 1_400)]), |_| {});
        assert!(found.cause == Cause::Guest && found.text.contains("1000 a second"), "{found:?}");
    }

    #[test]
    fn a_device_that_stands_out_is_named_and_a_node_that_is_late() {
        let slow = kind(400, 9_000, &[("nodes", 300, 8_000), ("map", 0, 500)]);
        let mut all = nodes();
        all[2] = node(3, "up", [350, 7_600]);
        let found = said(&slow, |case| case.nodes.clone_from(&all));
        assert_eq!(found.cause, Cause::Device);
        assert!(found.text.contains("device 3/1 is slow") && found.text.contains("device drain 3/1"), "{found:?}");
        all[2] = node(3, "silent", [350, 280]);
        let found = said(&slow, |case| case.nodes.clone_from(&all));
        assert!(found.cause == Cause::Node && found.text.contains("waited for node 3"), "{found:?}");
        all = (1..4).map(|id| node(id, "up", [7_000, 8_000])).collect();
        assert_eq!(said(&slow, |case| case.nodes.clone_from(&all)).cause, Cause::Devices);
        assert_eq!(said(&slow, |_| {}).cause, Cause::Network);
    }

    #[test]
    fn a_slow_way_is_told_from_a_slow_device_and_from_a_long_queue() {
        let slow = |stages: &[(&str, u64, u64)]| kind(400, 30_000, stages);
        let mut one_slow = nodes();
        one_slow[2] = node(3, "up", [350, 27_600]);
        let at =
            |stages: &[(&str, u64, u64)], nodes: &[NodeInfo]| said(&slow(stages), |case| case.nodes = nodes.to_vec());
        // Some device is slow as well, but requests did not wait for it.
        let way = [("network", 200, 29_000), ("device", 100, 300), ("node queue", 10, 20)];
        let found = at(&way, &one_slow);
        assert!(found.cause == Cause::Network && found.text.contains("the way to nodes"), "{found:?}");
        let device = [("network", 200, 300), ("device", 100, 20_000), ("node queue", 10, 9_000)];
        assert_eq!(at(&device, &one_slow).cause, Cause::Device);
        assert_eq!(at(&device, &nodes()).cause, Cause::Devices);
        let queue = [("network", 200, 300), ("device", 100, 400), ("leg queue", 10, 29_000)];
        let found = at(&queue, &nodes());
        assert!(found.cause == Cause::Queue && found.text.contains("wait 29.00 ms at nodes"), "{found:?}");
        // Two halves of one device, and what nobody can tell apart.
        let halves = [("device", 0, 12_000), ("node queue", 0, 12_000), ("map", 0, 6_000)];
        assert_eq!(at(&halves, &one_slow).cause, Cause::Device);
        let mixed = [("device", 0, 9_000), ("network", 0, 9_000), ("second round", 0, 9_000), ("map", 0, 3_000)];
        assert_eq!(at(&mixed, &one_slow).cause, Cause::Device);
        let away = [node(1, "up", [300, 310]), node(2, "silent", [290, 400])];
        assert_eq!(at(&way, &away).cause, Cause::Node);
    }

    #[test]
    fn who_waits_for_its_turn_waits_for_its_limit_or_for_others() {
        // All of them alike: none is slower than the rest.
        let held = kind(40_000, 41_000, &[("qos", 39_000, 40_000), ("nodes", 400, 500)]);
        let own = SlowInfo { waited: 100, held_by_limit: 90, ..SlowInfo::default() };
        let found = said(&held, |case| (case.limit, case.slow) = (Some("iops=50"), own));
        assert!(found.cause == Cause::Limit && found.text.contains("set vm7 --limit none"), "{found:?}");
        let other =
            Neighbour { name: "db".into(), per_second: 20_000, depth_percent: 25_600, policy: Some("weight=7".into()) };
        let beside =
            SlowInfo { waited: 100, held_by_limit: 3, has_window: true, others: vec![other], ..SlowInfo::default() };
        let found = said(&held, |case| (case.limit, case.slow) = (Some("iops=50"), beside.clone()));
        assert!(
            found.cause == Cause::Neighbour
                && found
                    .text
                    .contains("volume db, which takes 95 % of the requests here: 20000 a second, 256 under way")
                && found.text.contains("it has weight=7"),
            "{found:?}"
        );
        // Of few of which half wait for their limit some were late besides.
        let few = kind(49_000, 360_000, &[("qos", 45_000, 147_000), ("leg device", 480, 213_000)]);
        let few = SlowKind { count: 160, slow: 0, ..few };
        let own = SlowInfo { waited: 160, held_by_limit: 150, ..SlowInfo::default() };
        assert_eq!(said(&few, |case| (case.limit, case.slow) = (Some("iops=50"), own)).cause, Cause::Limit);
        // Without turns it is at the nodes that they meet.
        let found = said(&kind(400, 9_000, &[("nodes", 300, 8_000)]), |case| case.slow = beside);
        assert_eq!(found.cause, Cause::Neighbour);
    }

    /// By node: how many waited for it longest and what they waited together, of all and of the slow ones.
    fn waited(kind: &SlowKind, nodes: &[(u32, [u64; 4])]) -> SlowKind {
        let of = |(node, [count, us, slow, slow_us]): &(u32, [u64; 4])| SlowNode {
            node: *node,
            count: *count,
            us: *us,
            slow: *slow,
            slow_us: *slow_us,
        };
        SlowKind { nodes: nodes.iter().map(of).collect(), ..kind.clone() }
    }

    #[test]
    fn a_node_that_only_the_slow_ones_waited_for_is_named() {
        let way = kind(400, 30_000, &[("network", 200, 29_000), ("device", 100, 300)]);
        let own = [(1, [200, 40_000, 0, 0]), (2, [200, 40_000, 0, 0])];
        let with = |kind: &SlowKind, third: [u64; 4]| said(&waited(kind, &[own[0], own[1], (3, third)]), |_| {});
        let found = with(&way, [200, 5_600_000, 100, 2_900_000]);
        assert!(found.cause == Cause::Network && found.text.contains("the way to node 3 and back"), "{found:?}");
        let found = with(&way, [2_000, 3_000_000, 100, 2_900_000]);
        assert!(found.cause == Cause::Node && found.text.contains("node 3 is late now and then"), "{found:?}");
        let alike = waited(&way, &[1, 2, 3].map(|node| (node, [200, 900_000, 30, 870_000])));
        assert!(!said(&alike, |_| {}).text.contains("node 3"));
        let second = kind(400, 30_000, &[("second round", 0, 29_000)]);
        let found = with(&second, [200, 3_000_000, 100, 2_900_000]);
        assert!(found.cause == Cause::SecondRound && found.text.contains("node 3 did not answer"), "{found:?}");
        let earlier = kind(400, 30_000, &[("earlier", 0, 29_000)]);
        let found = with(&earlier, [200, 3_000_000, 100, 2_900_000]);
        assert!(found.cause == Cause::EarlierWrites && found.text.contains("node 3 was late"), "{found:?}");
        // All are slow alike, and the writes of all wait for the same one of two legs.
        let all = waited(&kind(28_000, 30_000, &[("network", 27_000, 29_000)]), &[(2, [600, 16_800_000, 6, 174_000])]);
        assert!(said(&all, |_| {}).text.contains("the way to node 2 and back"));
        // A device that stands out at a node that nobody waited for is not the one.
        let mut nodes = nodes();
        nodes[0] = node(1, "up", [300, 27_000]);
        let queue = kind(400, 30_000, &[("device", 100, 29_000)]);
        let late = waited(&queue, &[own[1], (1, own[0].1), (3, [200, 5_600_000, 100, 2_900_000])]);
        assert_eq!(said(&late, |case| case.nodes = nodes).cause, Cause::Devices);
    }

    #[test]
    fn of_few_that_stand_still_among_many_that_are_fast_it_is_told_why() {
        let with = |took_us: u64, many: usize| {
            let stages = [("snapshots".to_string(), took_us - 300), ("network".to_string(), 300)].into();
            let slow = SlowRequest { ago_ms: 1, took_us, node: Some(2), stages };
            let fast = kind(300, 450, &[("network", 300, 440), ("snapshots", 0, 0)]);
            said(&SlowKind { slowest: vec![slow; many], ..fast }, |_| {})
        };
        let found = with(640_000, 1);
        assert!(found.cause == Cause::Snapshots && found.text.contains("0.45 ms, and now and then"), "{found:?}");
        assert_eq!(with(60_000, 4).cause, Cause::Snapshots);
        assert_eq!([with(60_000, 3).cause, with(40_000, 8).cause], [Cause::Nothing; 2]);
    }

    #[test]
    fn what_is_not_answered_at_all_is_told_of_first() {
        let fast = kind(300, 450, &[("network", 300, 440)]);
        let with = |oldest_us, link| {
            said(&fast, |case| {
                case.slow.reads_under_way = UnderWayInfo { count: 4, oldest_us };
                case.nodes[1] = node(2, link, [300, 300]);
            })
        };
        assert_eq!(with(900_000, "up").cause, Cause::Nothing);
        let found = with(3_900_000, "up");
        assert!(found.cause == Cause::Hangs && found.text.contains("4 reads are not answered"), "{found:?}");
        let found = with(3_900_000, "down");
        assert!(found.cause == Cause::Node && found.text.contains("for 3 s: requests waited for node 2"), "{found:?}");
    }

    #[test]
    fn a_thread_without_a_processor_is_blamed_where_nobody_stands_out() {
        let way = kind(400, 30_000, &[("network", 200, 29_000)]);
        let with = |busy_per_mille, waited_per_mille| {
            said(&way, |case| case.slow.processor = Some(ProcessorInfo { busy_per_mille, waited_per_mille }))
        };
        assert_eq!(with(400, 20).cause, Cause::Network);
        let found = with(100, 350);
        assert!(found.cause == Cause::Processor && found.text.contains("35 % of the time"), "{found:?}");
        assert!(with(960, 10).text.contains("at work 96 %"));
        // It knows the answers of one node only, and that is not why.
        let alone = waited(&way, &[(2, [600, 18_000_000, 100, 2_900_000])]);
        let starved = ProcessorInfo { busy_per_mille: 100, waited_per_mille: 350 };
        assert_eq!(said(&alone, |case| case.slow.processor = Some(starved)).cause, Cause::Processor);
    }

    #[test]
    fn a_floor_that_is_used_up_to_what_it_promises_is_named() {
        let held = kind(40_000, 41_000, &[("qos", 39_000, 40_000)]);
        let with = |per_second| {
            let policy = Some("floor=8000,weight=7".to_string());
            let other = Neighbour { name: "db".into(), per_second, depth_percent: 6_400, policy };
            let slow = SlowInfo { waited: 100, has_window: true, others: vec![other], ..SlowInfo::default() };
            said(&held, |case| case.slow = slow)
        };
        let found = with(7_900);
        assert!(found.cause == Cause::Floor && found.text.contains("floor of volume db"), "{found:?}");
        assert_eq!(with(20_000).cause, Cause::Neighbour);
        assert!(with(20_000).text.contains("takes 95 % of the requests"), "{:?}", with(20_000));
    }

    #[test]
    fn each_stage_has_its_own_sentence_and_two_halves_are_no_single_cause() {
        let of = |stage: &str| said(&kind(400, 50_000, &[(stage, 0, 49_000), ("nodes", 300, 500)]), |_| {}).cause;
        let causes = [
            ("filters", Cause::Filter),
            ("order", Cause::Writers),
            ("room", Cause::OwnReads),
            ("held", Cause::OwnWrites),
            ("write-back", Cause::WriteBack),
            ("journal", Cause::Journal),
            ("space", Cause::Space),
            ("snapshots", Cause::Snapshots),
            ("blocks", Cause::SmallWrites),
            ("map", Cause::Map),
            ("grant", Cause::Grants),
            ("rest", Cause::Host),
        ];
        for (stage, cause) in causes {
            assert_eq!(of(stage), cause, "{stage}");
        }
        let thirds = kind(400, 50_000, &[("map", 0, 16_000), ("nodes", 0, 16_500), ("held", 0, 15_000)]);
        let found = said(&thirds, |_| {});
        assert!(found.cause == Cause::Several && found.text.contains("about nodes (34 %)"), "{found:?}");
    }

    #[test]
    fn filters_and_full_journals_are_named() {
        let (above, counters) = (EdgeInfo::default(), BTreeMap::new());
        let spec = "delay:read=20ms".to_string();
        let filter = FilterInfo { id: 2, spec, tool: true, leaving: false, kept: false, above, counters };
        let found = said(&kind(20_000, 21_000, &[("filters", 19_800, 20_000)]), |case| case.filters.push(filter));
        assert!(found.text.contains("2: delay:read=20ms") && found.text.contains("filter remove vm7"), "{found:?}");
        let mut all = nodes();
        all[1].devices[0].journal_used_bytes = 80;
        for stage in ["held", "journal"] {
            let found = said(&kind(300, 30_000, &[(stage, 0, 29_000)]), |case| case.nodes.clone_from(&all));
            assert!(found.cause == Cause::Journal && found.text.contains("that of device 2/0 with 80 %"), "{found:?}");
        }
    }
}
