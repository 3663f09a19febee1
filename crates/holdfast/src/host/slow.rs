//! Where the time of requests goes, as the API tells of it.

use super::Shell;
use holdfast_api::{Neighbour, SlowInfo, SlowKind, SlowRequest, SlowStage};
use holdfast_base::Instant;
use holdfast_host::{Kind, Report, Spans, Stage, Waits};
use std::time::Duration;

/// Others that are told of.
const OTHERS_MAX: usize = 8;

pub(super) fn us(span: Duration) -> u64 {
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
        p50_us: us(of.p50),
        p99_us: us(of.p99),
        slow_us: us(of.slow_mean),
        slow_per_mille: report.per_mille(of.stage),
    });
    let slowest = report.slowest.iter().map(|slow| SlowRequest {
        ago_ms: now.since(slow.at).as_millis() as u64,
        took_us: slow.spans.total_us(),
        stages: by_stage(kind, &slow.spans).collect(),
    });
    SlowKind {
        count: report.count,
        over_ms: report.over.as_millis() as u64,
        p50_us: us(report.p50),
        p99_us: us(report.p99),
        slow: report.slow,
        stages: stages.collect(),
        slowest: slowest.collect(),
    }
}

impl Shell {
    /// Without its neighbours, which may be on other reactors.
    pub(super) fn slow_of(&self, now: Instant, name: &str) -> Option<Box<SlowInfo>> {
        let [reads, writes] = self.host.took(now, name)?;
        let told = |kind, report: Option<Report>| report.map(|report| kind_of(now, kind, report));
        let (reads, writes) = (told(Kind::Read, reads), told(Kind::Write, writes));
        let Waits { waited, held_by_limit } = self.host.waits(name);
        let has_window = self.host.has_window();
        Some(Box::new(SlowInfo { reads, writes, waited, held_by_limit, has_window, others: Vec::new() }))
    }

    pub(super) fn loads(&self, now: Instant) -> Vec<Neighbour> {
        let limit_of = |name: &str| {
            let (volume, head) = self.host.find(name)?;
            self.host.limit_of(volume.id_of(head)?).map(str::to_string)
        };
        let loads = self.host.loads(now).into_iter();
        loads
            .map(|(name, rate, depth)| Neighbour {
                per_second: rate.round() as u64,
                depth_percent: (depth * 100.0).round() as u64,
                policy: limit_of(&name),
                name,
            })
            .collect()
    }
}

/// The busiest of a host's volumes beside this one.
pub(super) fn others(mut all: Vec<Neighbour>, name: &str) -> Vec<Neighbour> {
    all.retain(|other| other.name != name && other.per_second > 0);
    all.sort_by_key(|other| std::cmp::Reverse((other.depth_percent, other.per_second)));
    all.truncate(OTHERS_MAX);
    all
}
