//! Where the time of requests goes, as the API tells of it.

use holdfast_api::{
    DeviceHealth, DeviceInfo, Neighbour, ReadCacheInfo, SlowInfo, SlowKind, SlowNode, SlowRequest, SlowStage,
    UnderWayInfo,
};
use holdfast_base::Instant;
use holdfast_format::wire::{self, CacheStat, DeviceStat, OpTimes};
use holdfast_host::{Host, Kind, Report, Spans, Stage, Waits};
use std::time::Duration;

/// Others that are told of.
const OTHERS_MAX: usize = 8;

fn us_of(span: Duration) -> u64 {
    span.as_micros() as u64
}

fn by_stage(kind: Kind, spans: &Spans) -> impl Iterator<Item = (String, u64)> {
    let stages = Stage::ALL.iter().map(move |stage| (stage.name_in(kind).to_string(), spans.us(*stage)));
    stages.filter(|(_, us)| *us > 0)
}

fn kind_of(now: Instant, kind: Kind, report: Report) -> SlowKind {
    let stages = report.stages.iter().map(|of| SlowStage {
        stage: of.stage.name_in(kind).to_string(),
        about: of.stage.about().to_string(),
        p50_us: us_of(of.p50),
        p99_us: us_of(of.p99),
        slow_us: us_of(of.slow_mean),
        slow_per_mille: report.per_mille(of.stage),
    });
    let slowest = report.slowest.iter().map(|slow| SlowRequest {
        ago_ms: now.since(slow.at).as_millis() as u64,
        took_us: slow.spans.total_us(),
        node: slow.spans.node().map(|(node, _)| node.0),
        stages: by_stage(kind, &slow.spans).collect(),
    });
    let nodes = report.nodes.iter().map(|of| SlowNode {
        node: of.node.0,
        count: of.count,
        us: of.us,
        slow: of.slow,
        slow_us: of.slow_us,
    });
    SlowKind {
        count: report.count,
        over_ms: report.over.as_millis() as u64,
        p50_us: us_of(report.p50),
        p99_us: us_of(report.p99),
        slow: report.slow,
        stages: stages.collect(),
        nodes: nodes.collect(),
        slowest: slowest.collect(),
    }
}

/// Of a volume or clone that the host serves, without its neighbours, which may be on other reactors.
pub fn slow_of(host: &Host, now: Instant, name: &str) -> Option<SlowInfo> {
    let [reads, writes] = host.took(now, name)?;
    let told = |kind, report: Option<Report>| report.map(|report| kind_of(now, kind, report));
    let (reads, writes) = (told(Kind::Read, reads), told(Kind::Write, writes));
    let Waits { waited, held_by_limit } = host.waits(name);
    let under_way = host.under_way(now, name);
    let [reads_under_way, writes_under_way] =
        under_way.map(|(count, oldest)| UnderWayInfo { count, oldest_us: us_of(oldest) });
    Some(SlowInfo {
        reads,
        writes,
        reads_under_way,
        writes_under_way,
        read_verdict: None,
        write_verdict: None,
        waited,
        held_by_limit,
        has_window: host.has_window(),
        others: Vec::new(),
        processor: None,
    })
}

/// What volumes and clones of a host were asked for of late.
pub fn loads(host: &Host, now: Instant) -> Vec<Neighbour> {
    let limit_of = |name: &str| {
        let (volume, head) = host.find(name)?;
        host.limit_of(volume.id_of(head)?).map(str::to_string)
    };
    let loads = host.loads(now).into_iter();
    loads
        .map(|(name, rate, depth)| Neighbour {
            per_second: rate.round() as u64,
            depth_percent: (depth * 100.0).round() as u64,
            policy: limit_of(&name),
            name,
        })
        .collect()
}

/// The busiest of a host's volumes beside this one.
pub fn others(mut all: Vec<Neighbour>, name: &str) -> Vec<Neighbour> {
    all.retain(|other| other.name != name && other.per_second > 0);
    all.sort_by_key(|other| std::cmp::Reverse((other.depth_percent, other.per_second)));
    all.truncate(OTHERS_MAX);
    all
}

fn read_cache_of(stat: CacheStat) -> ReadCacheInfo {
    let CacheStat { hits, misses, damaged, admitted_bytes, evicted_bytes, held_bytes, limit_bytes } = stat;
    ReadCacheInfo { hits, misses, damaged, admitted_bytes, evicted_bytes, held_bytes, limit_bytes }
}

/// A device as its node tells of it; if it is being drained with what is left there, and if it is slow for how long, and
/// whether volumes do without it.
pub fn device_of(host: &Host, stat: &DeviceStat, left: Option<u64>, slow: Option<(Duration, bool)>) -> DeviceInfo {
    let told = |times: OpTimes| (times.samples > 0).then_some(times.p99_us);
    let (reserve_bytes, spare_bytes) = host.reserve_and_spare_bytes(stat.capacity_bytes);
    let reserve_bytes = reserve_bytes.min(stat.free_bytes);
    DeviceInfo {
        device: stat.device.to_string(),
        health: match stat.health {
            wire::DeviceHealth::Opening => DeviceHealth::Opening,
            wire::DeviceHealth::Serving => DeviceHealth::Serving,
            wire::DeviceHealth::Failed => DeviceHealth::Failed,
        },
        capacity_bytes: stat.capacity_bytes,
        free_bytes: stat.free_bytes,
        reserve_bytes,
        spare_bytes: spare_bytes.min(stat.free_bytes - reserve_bytes),
        journal_bytes: stat.journal_bytes,
        journal_used_bytes: stat.journal_used_bytes,
        shards: stat.shard_count,
        class: stat.media,
        class_set: stat.media_is_set,
        read_cache: stat.read_cache.map(read_cache_of),
        drive: None,
        draining: left.is_some(),
        left,
        read_p99_us: told(stat.reads),
        write_p99_us: told(stat.writes),
        io_errors: stat.io_errors,
        flush_us: (stat.flush_us > 0).then_some(stat.flush_us),
        slow_s: slow.map(|(span, _)| span.as_secs()),
        bypassed: slow.is_some_and(|(_, bypassed)| bypassed),
        errors_within_s: None,
        retries: 0,
        outage: None,
    }
}
