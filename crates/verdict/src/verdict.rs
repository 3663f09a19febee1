//! Why a volume's requests are slow, in a sentence: from what its host and its nodes tell, and nothing else.
//!
//! Role: a pure function. Of the stage in which the slow requests spent most it says who is to
//! blame there, and what to do. Where requests are slow all alike, the stage in which they are for longest is meant.

use holdfast_api::{DeviceInfo, FilterInfo, LinkState, Neighbour, NodeInfo, SlowInfo, SlowKind, SlowStage};
use holdfast_filter::is_limit;
use serde::Serialize;

/// What takes no longer is not slow.
const FAST_US: u64 = 5_000;

/// Of the slow ones' time: a stage that has it is the cause.
const MOST_PER_MILLE: u64 = 500;

/// The slow ones are others than the rest where they take so many times as long.
const TIMES_APART: u64 = 3;

/// A device that takes so many times what its peers take, and at least that, is the one.
const DEVICE_TIMES: u32 = 4;
const DEVICE_US_MIN: u32 = 2_000;

/// A neighbour that has so many requests under way is one that others wait for.
const BUSY_PERCENT: u64 = 400;

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
    Filter,
    Writers,
    OwnReads,
    Full,
    SmallWrites,
    Map,
    Device,
    Node,
    Devices,
    Queue,
    Network,
    Grants,
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

pub fn ms(us: u64) -> String {
    format!("{:.*} ms", if us < 100_000 { 2 } else { 0 }, us as f64 / 1000.0)
}

fn percent(part: u64, of: u64) -> u64 {
    (part * 100).checked_div(of).unwrap_or(0)
}

/// Of one kind of requests.
pub fn of(kind: &SlowKind, facts: Facts<'_>) -> Verdict {
    if kind.p99_us <= FAST_US {
        return nothing(kind);
    }
    let are_apart = kind.p99_us >= TIMES_APART * kind.p50_us.max(1);
    let by = |stage: &SlowStage| match (are_apart, kind.slow) {
        (false, _) => percent(stage.p50_us, kind.p50_us) * 10,
        // Too few to tell the slow ones from the rest.
        (true, 0) => percent(stage.p99_us, kind.p99_us) * 10,
        (true, _) => stage.slow_per_mille,
    };
    let mut stages: Vec<&SlowStage> = kind.stages.iter().collect();
    stages.sort_by_key(|stage| std::cmp::Reverse(by(stage)));
    let sum =
        |of: &[&str]| stages.iter().filter(|stage| of.contains(&&*stage.stage)).map(|stage| by(stage)).sum::<u64>();
    match stages[..] {
        [first, ..] if by(first) >= MOST_PER_MILLE => of_stage(first, facts),
        // A slow device is a queue before it, too.
        [..] if sum(AT_DEVICES) >= MOST_PER_MILLE => of_devices(facts),
        [..] if sum(AT_NODES) >= MOST_PER_MILLE => of_nodes(kind.p99_us, facts),
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
        "nodes" | "second round" | "earlier" => of_nodes(stage.slow_us, facts),
        "grant" => verdict(
            Cause::Grants,
            format!("nodes did not let this host answer in time{}", of_links(facts.nodes).unwrap_or_default()),
        ),
        _ => of_host(name, facts),
    }
}

fn busiest<'a>(facts: Facts<'a>) -> Option<&'a Neighbour> {
    facts.slow.others.first().filter(|other| other.depth_percent >= BUSY_PERCENT)
}

fn of_neighbour(other: &Neighbour, what: &str) -> Verdict {
    let has =
        other.policy.as_ref().map_or(String::new(), |words| format!(" (it has {words}, which is to be said again)"));
    let text = format!(
        "{what} volume {}, which has {} requests under way at a time, {} a second; `holdfast volume set {} --qos \
         limit=REQUESTS` holds it{has}",
        other.name,
        other.depth_percent.div_ceil(100),
        other.per_second,
        other.name
    );
    verdict(Cause::Neighbour, text)
}

fn of_turns(facts: Facts<'_>) -> Verdict {
    let (name, SlowInfo { waited, held_by_limit, has_window, .. }) = (facts.name, facts.slow);
    match (facts.limit, busiest(facts)) {
        (Some(limit), _) if !has_window || held_by_limit * 2 >= *waited => {
            let next = match is_limit(limit) {
                true => format!("`holdfast volume set {name} --limit none` ends that"),
                false => format!("`holdfast volume set {name} --qos POLICY` says it anew"),
            };
            verdict(Cause::Limit, format!("its own limit holds it ({limit}); {next}"))
        }
        (_, Some(other)) => of_neighbour(other, "it waits for its turn beside"),
        _ => verdict(
            Cause::Neighbour,
            format!(
                "it waits for its turn among volumes of this host; a larger weight is a larger share: `holdfast volume set \
                 {name} --qos weight=400`"
            ),
        ),
    }
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

fn of_held(facts: Facts<'_>) -> Verdict {
    let devices = || facts.nodes.iter().flat_map(|node| node.devices.iter().map(move |device| (node, device)));
    let is_full = |device: &DeviceInfo| device.journal_used_bytes * 4 >= device.journal_bytes * 3;
    if let Some((node, device)) = devices().find(|(_, device)| device.journal_bytes > 0 && is_full(device)) {
        let text = format!(
            "writes wait: the journal of device {} is nearly full, since what leaves it is written more slowly than guests write",
            place_of(node, device)
        );
        return verdict(Cause::Full, text);
    }
    let (free, all) =
        devices().fold((0, 0), |(free, all), (_, device)| (free + device.free_bytes, all + device.capacity_bytes));
    if all > 0 && free * 8 < all {
        let text = "writes wait for room, which is made by cleaning: the grid is nearly full; `holdfast space` tells what is \
                    free";
        return verdict(Cause::Full, text);
    }
    let text = "writes wait: what is in the log is written to segments more slowly than guests write; faster devices, more \
                nodes or a larger memory.writeback bear more";
    verdict(Cause::Full, text)
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

/// The device that stands out, or was found slow.
fn of_slow_device(facts: Facts<'_>) -> Option<Verdict> {
    // Disks are compared with disks, flash with flash.
    let outliers = all_devices(facts).filter_map(|(node, device)| {
        let (us, middle) = (p99_of(device, facts)?, middle_of(facts, |other| other.class == device.class));
        let stands_out = us >= DEVICE_US_MIN && us >= middle.saturating_mul(DEVICE_TIMES);
        stands_out.then_some((us, middle, node, device))
    });
    if let Some((us, middle, node, device)) = outliers.max_by_key(|(us, ..)| *us) {
        return Some(of_device(node, device, Some((us, middle))));
    }
    let told_slow = all_devices(facts).find(|(_, device)| device.slow_s.is_some());
    told_slow.map(|(node, device)| of_device(node, device, None))
}

fn of_all_devices(facts: Facts<'_>) -> Verdict {
    let text = format!(
        "all devices are slow alike: 99 of 100 operations take up to {}; more devices, or faster ones, bear more",
        ms(middle_of(facts, |_| true).into())
    );
    verdict(Cause::Devices, text)
}

/// Nodes tell that their devices took it.
fn of_devices(facts: Facts<'_>) -> Verdict {
    of_slow_device(facts).unwrap_or_else(|| of_all_devices(facts))
}

/// Nodes tell that it waited there for others.
fn of_queues(stage_us: u64, facts: Facts<'_>) -> Verdict {
    if let Some(found) = of_slow_device(facts) {
        return found;
    }
    if let Some(other) = busiest(facts) {
        return of_neighbour(other, "at nodes it waits behind");
    }
    let text = format!(
        "requests wait {} at nodes for others that ask the same devices, of this host or another; more devices bear more, \
         and `holdfast top` shows who asks",
        ms(stage_us)
    );
    verdict(Cause::Queue, text)
}

/// Nodes tell that neither they nor their devices took it.
fn of_network(facts: Facts<'_>) -> Verdict {
    if let Some(words) = of_links(facts.nodes) {
        return verdict(Cause::Node, format!("requests waited for a node{words}"));
    }
    let text = format!(
        "the way to nodes and back is slow, or processors at its ends are busy: devices take {} at most; `holdfast node list` \
         shows what each does",
        ms(all_devices(facts).filter_map(|(_, device)| p99_of(device, facts)).max().unwrap_or(0).into())
    );
    verdict(Cause::Network, text)
}

/// Nodes don't tell, or not all of it.
fn of_nodes(stage_us: u64, facts: Facts<'_>) -> Verdict {
    if let Some(found) = of_slow_device(facts) {
        return found;
    }
    if let Some(words) = of_links(facts.nodes) {
        return verdict(Cause::Node, format!("requests waited for a node{words}"));
    }
    let middle = middle_of(facts, |_| true);
    if u64::from(middle) * 2 >= stage_us && middle >= DEVICE_US_MIN {
        return of_all_devices(facts);
    }
    match busiest(facts) {
        Some(other) => of_neighbour(other, "nodes and their processors are busy with"),
        None => of_network(facts),
    }
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

/// Which nodes are away or late, if any are.
fn of_links(nodes: &[NodeInfo]) -> Option<String> {
    let is_bad = |node: &&NodeInfo| node.link != LinkState::Up || node.suspect;
    let ids: Vec<String> = nodes.iter().filter(is_bad).map(|node| node.id.to_string()).collect();
    (!ids.is_empty()).then(|| format!(": node {} is late or away; `holdfast status` tells more", ids.join(", ")))
}

fn of_host(name: &str, facts: Facts<'_>) -> Verdict {
    if let Some(words) = of_links(facts.nodes) {
        return verdict(Cause::Node, format!("requests waited for a node{words}"));
    }
    let text = format!(
        "the host itself is behind: {name} was being opened, answers were held back for snapshots, or its processors are busy; \
         `holdfast status` tells of its longest turn"
    );
    verdict(Cause::Host, text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_api::EdgeInfo;
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
        SlowKind { count: 60_000, over_ms: 60_000, p50_us, p99_us, slow: 600, stages, slowest: Vec::new() }
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
        let Case { limit, filters, slow, nodes } = &case;
        of(kind, Facts { name: "vm7", limit: *limit, filters, slow, nodes, writes: false })
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
        assert!(found.cause == Cause::Node && found.text.contains("node 3 is late"), "{found:?}");
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
                && found.text.contains("volume db, which has 256")
                && found.text.contains("it has weight=7"),
            "{found:?}"
        );
        // Without turns it is at the nodes that they meet.
        let found = said(&kind(400, 9_000, &[("nodes", 300, 8_000)]), |case| case.slow = beside);
        assert_eq!(found.cause, Cause::Neighbour);
    }

    #[test]
    fn each_stage_has_its_own_sentence_and_two_halves_are_no_single_cause() {
        let of = |stage: &str| said(&kind(400, 50_000, &[(stage, 0, 49_000), ("nodes", 300, 500)]), |_| {}).cause;
        let causes = [
            ("filters", Cause::Filter),
            ("order", Cause::Writers),
            ("room", Cause::OwnReads),
            ("held", Cause::Full),
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
        let found = said(&kind(300, 30_000, &[("held", 0, 29_000)]), |case| case.nodes.clone_from(&all));
        assert!(found.text.contains("journal of device 2/0"), "{found:?}");
    }
}
