//! Made-up answers of a host.

use super::choice::{choose, detailed};
use super::page::Facts;
use super::sums::Sums;
use super::{Certificate, Times};
use holdfast_api::{
    Concern, Counters, Finding, HostStatus, Neighbour, Severity, SlowInfo, SlowKind, SlowStage, TaskInfo, TaskKind,
    TaskUnit, UnderWayInfo, VolumeInfo,
};
use serde_json::json;
use std::sync::Arc;

/// Stages of a request: as many as there are.
const STAGES: [&str; 19] = [
    "order",
    "qos",
    "filters",
    "room",
    "held",
    "write-back",
    "journal",
    "space",
    "blocks",
    "map",
    "nodes",
    "second round",
    "node queue",
    "device",
    "network",
    "earlier",
    "grant",
    "snapshots",
    "rest",
];

/// A volume in service.
pub fn volume(name: &str) -> VolumeInfo {
    let counters =
        Counters { reads: 1 << 40, read_bytes: 1 << 52, writes: 1 << 40, write_bytes: 1 << 52, ..Counters::default() };
    let json = json!({
        "name": name, "id": format!("id-{name}"), "size_bytes": 1u64 << 40, "layout": "parity:4+2", "exported": true,
        "compression": "auto", "state": "open", "epoch": 1, "uris": [], "sessions": 2,
        "live": {
            "log_bytes": 1u64 << 30, "unplaced_bytes": 1u64 << 30, "mapped_bytes": 1u64 << 40, "segments": 40_000,
            "degraded_segments": 0, "at_risk_entries": 0, "suspect_nodes": [], "counters": counters,
            "read_times": { "p50_us": 123, "p99_us": 4567 }, "write_times": { "p50_us": 234, "p99_us": 5678 },
            "space": {
                "data_bytes": 700, "dead_bytes": 50, "kept_bytes": 5, "padding_bytes": 100, "redundancy_bytes": 400,
                "metadata_bytes": 20, "shown_bytes": 1000, "plain_bytes": 100, "elsewhere_bytes": 30,
            },
        },
    });
    serde_json::from_value(json).expect("a volume")
}

/// A host with six nodes of two devices, one of which is at a path that is no good name, and these volumes.
pub fn status(volumes: Vec<VolumeInfo>) -> HostStatus {
    let device = |node: u32, place: u32| {
        json!({
            "device": format!("{node:08x}-0000-4000-8000-00000000000{place}"), "health": "serving", "class": "ssd",
            "capacity_bytes": 1000, "free_bytes": 600, "reserve_bytes": 100, "journal_bytes": 64, "journal_used_bytes": 32,
            "shards": 7, "read_p99_us": 250, "write_p99_us": 1500, "io_errors": 3, "retries": 4,
            "drive": { "troubles": [], "worn_percent": 12, "spare_percent": 100, "celsius": -3, "media_errors": 0, "hours": 5 },
            "read_cache": {
                "hits": 9, "misses": 1, "damaged": 0, "admitted_bytes": 8, "evicted_bytes": 4, "held_bytes": 4,
                "limit_bytes": 16,
            },
        })
    };
    let node = |id: u32| {
        let odd = json!({ "path": "/srv/a \"b\" \\ c\nd", "device": format!("{id:08x}-0000-4000-8000-000000000001"), "size_bytes": 1000 });
        json!({
            "id": id, "address": "127.0.0.1:1", "link": "up", "suspect": false, "cut": id == 6, "silent_ms": 40,
            "machine": format!("m{id}"), "devices": [device(id, 0), device(id, 1)], "configured": [odd],
        })
    };
    let nodes: Vec<_> = (1..=6).map(node).collect();
    let status = json!({
        "grid": "demo", "host": "m1", "pid": 1, "uptime_ms": 61_500, "cpu_ms": 2500, "resident_bytes": 1 << 20,
        "days_to_full": 20.5, "longest_turn": { "took_us": 1500, "ago_ms": 1, "event": "tick" }, "nodes": nodes,
        "volumes": volumes, "deleting": ["gone"], "packing": {
            "recent_per_mille": 1, "share_percent": 50, "ns_per_block": 9, "refused_bytes": 11,
        },
    });
    serde_json::from_value(status).expect("a status")
}

fn slow() -> SlowInfo {
    let stage = |name: &&str| SlowStage {
        stage: (*name).to_string(),
        about: String::new(),
        p50_us: 12,
        p99_us: 34_567,
        slow_us: 1,
        slow_per_mille: 1,
    };
    let stages: Vec<SlowStage> = STAGES.iter().map(stage).collect();
    let kind = SlowKind { count: 9, over_ms: 1, p50_us: 1, p99_us: 2, slow: 1, stages, nodes: vec![], slowest: vec![] };
    let reads_under_way = UnderWayInfo { count: 3, oldest_us: 1_500_000 };
    SlowInfo {
        reads: Some(kind.clone()),
        writes: Some(kind),
        reads_under_way,
        waited: 5,
        held_by_limit: 2,
        ..SlowInfo::default()
    }
}

fn times() -> Vec<Times> {
    let stages = || std::iter::once(None).chain(STAGES.map(Some));
    let buckets: Vec<(Option<u64>, u64)> =
        (0..18).map(|n| Some(100u64 << n)).chain([None]).map(|bound| (bound, 1 << 40)).collect();
    let times = |(op, stage)| Times { op, stage, buckets: buckets.clone(), sum_us: 1 << 50 };
    ["read", "write"].into_iter().flat_map(|op| stages().map(move |stage| (op, stage))).map(times).collect()
}

/// All that a host with so many volumes in service tells.
pub fn facts(volumes: usize) -> Facts {
    let volumes: Vec<VolumeInfo> = (0..volumes).map(|n| volume(&format!("volume-with-a-name-{n}"))).collect();
    let load = |(n, volume): (usize, &VolumeInfo)| Neighbour {
        name: volume.name.clone(),
        per_second: n as u64 + 1,
        depth_percent: 150,
        policy: None,
    };
    let loads: Vec<Neighbour> = volumes.iter().enumerate().map(load).collect();
    let task = |n: u64| TaskInfo {
        name: format!("drain device of node {n}"),
        left: n,
        kind: TaskKind::Drain,
        unit: TaskUnit::Shards,
        per_second: 0.5,
        seconds_left: Some(2 * n),
    };
    let finding = Finding {
        severity: Severity::Warning,
        concern: Concern::DataAtRisk,
        about: "it".into(),
        what: "it is".into(),
        next: None,
        announced: false,
    };
    let mut sums = Sums::default();
    sums.add(&volumes);
    let (chosen, left_out) = choose(&volumes, &loads, &[]);
    let names = detailed(&chosen, &loads, false);
    Facts {
        slow: Some(names.into_iter().map(|name| (name, slow())).collect()),
        times: Some(times()),
        tasks: Some((1..300).map(task).collect()),
        findings: Some(vec![finding]),
        certificates: Some(vec![Certificate { role: "host m1".into(), ends_s: 1_800_000_000 }]),
        members: Some(3),
        sums: Some(sums.all()),
        status: Some(Arc::new(status(volumes))),
        loads: Some(loads),
        chosen,
        left_out,
    }
}
