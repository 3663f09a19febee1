//! Volumes in service as the API tells of them.

use crate::resources;
use holdfast_api::{
    FilterInfo, FiltersInfo, Integrity, Provisioning, ScheduleInfo, SnapshotInfo, Times, VolumeInfo, VolumeLive,
    VolumeState,
};
use holdfast_base::{HeadId, Instant, ObjectId};
use holdfast_filter::{Edge, FilterView, is_limit};
use holdfast_format::schedule::ScheduleRecord;
use holdfast_host::{Figures, LIMIT, Volume, snapshot_export_name};
use holdfast_volume::{Sharing, Snapshot, State};
use std::time::Duration;

/// How long a client that was refused is told of.
const REFUSED_SHOWN: Duration = Duration::from_secs(600);

pub fn filters_info(volume: &Volume, head: HeadId) -> Option<FiltersInfo> {
    let stack = volume.stack(head)?;
    let info = |view: FilterView| FilterInfo {
        id: view.id.0,
        spec: view.spec,
        tool: view.nature.is_tool,
        leaving: view.is_leaving,
        kept: false,
        above: resources::edge(view.above),
        counters: view.counters.into_iter().map(|(name, count)| (name.to_string(), count)).collect(),
    };
    let filters = stack.filters().into_iter().map(info).collect();
    Some(FiltersInfo { filters, below: resources::edge(stack.below()) })
}

/// A limit among filters: what passed it is what went to the volume.
pub fn limit_info(words: &str, figures: Figures) -> FilterInfo {
    let waiting = figures.waiting as u64;
    let above = Edge { requests: figures.went + waiting, replies: figures.went, ..Edge::default() };
    let counters = [("waited", figures.held_by_limit), ("waiting now", waiting)];
    FilterInfo {
        id: LIMIT.0,
        spec: format!("{}:{words}", if is_limit(words) { "limit" } else { "qos" }),
        tool: false,
        leaving: false,
        kept: true,
        above: resources::edge(above),
        counters: counters.into_iter().map(|(name, count)| (name.to_string(), count)).collect(),
    }
}

/// `uris_of` tells where clients find an export.
pub fn info_of(
    now: Instant,
    volume: &Volume,
    name: &str,
    head: HeadId,
    uris_of: impl Fn(&str) -> Vec<String>,
) -> VolumeInfo {
    let controller = volume.controller();
    let status = controller.status();
    let is_open = matches!(status.state, State::Open | State::Closing);
    let clone = status.clones.iter().find(|(of, _)| *of == head).map(|(_, clone)| clone.id);
    let snapshots = status.snapshots.into_iter().filter(|(_, s)| s.head == head);
    let sharing = status.sharing.as_deref();
    let writers = volume.writers_view(head);
    let [reads, writes] = volume.times(now, head);
    let us = |span: Duration| span.as_micros() as u64;
    let times = |(p50, p99): (Duration, Duration)| Times { p50_us: us(p50), p99_us: us(p99) };
    VolumeInfo {
        name: name.to_string(),
        id: clone.unwrap_or(volume.id()).to_string(),
        clone_of: clone.map(|_| volume.name().to_string()),
        size_bytes: volume.size_bytes(head),
        layout: volume.layout().to_string(),
        tiers: status.tiers,
        provisioning: Provisioning::Thin,
        set_aside_bytes: 0,
        integrity: integrity_of(controller.checks_reads()),
        compression: controller.compression().to_string(),
        encrypted: controller.is_encrypted(),
        exported: volume.is_exported(),
        protected: false,
        schedule: None,
        shared: volume.is_shared(),
        writer: writers.holder,
        refused_writer: writers.refused.filter(|(_, at)| now.since(*at) < REFUSED_SHOWN).map(|(client, _)| client),
        shares_with: None,
        is_store: volume.is_store(),
        sharing: None,
        leaves_domain: false,
        needed_by: Vec::new(),
        host: None,
        orphaned: false,
        failover: false,
        offered_by: Vec::new(),
        only_for: None,
        limit: None,
        state: match volume.is_exported() || status.state == State::Deposed {
            true => state_of(status.state),
            false if controller.is_preloading() => VolumeState::Preloading,
            false => VolumeState::InCare,
        },
        waits: volume.waits().filter(|_| status.state == State::Opening).map(|w| w.why.to_string()),
        warning: None,
        epoch: status.epoch.0,
        uris: if volume.is_exported() { uris_of(name) } else { Vec::new() },
        sessions: volume.sessions_of(head),
        filters: None,
        live: is_open.then(|| VolumeLive {
            log_bytes: status.log_bytes,
            unplaced_bytes: controller.unplaced_bytes(),
            mapped_bytes: status.mapped_blocks * holdfast_base::BLOCK_BYTES as u64,
            segments: status.segment_count,
            degraded_segments: status.degraded_segments,
            at_risk_entries: status.at_risk_entries,
            recoverable: status.is_recoverable,
            suspect_nodes: status.suspect_nodes.iter().map(|n| n.0).collect(),
            left_to_drain: status.left_to_drain.iter().map(|(_, count)| count).sum(),
            left_to_balance_bytes: status.left_to_balance_bytes,
            space: resources::space(status.space, status.elsewhere_bytes),
            shares: sharing.and_then(|s| s.heads.get(&head)).map(|s| resources::shares(*s)),
            held_by_snapshots_bytes: sharing.map_or(0, |s| s.held_by_snapshots_bytes).min(status.space.data_bytes),
            layers_going: status.layers_going,
            read_times: reads.map(times),
            write_times: writes.map(times),
            first_tier: status.first_tier.map(resources::first_tier),
            astray_segments: status.astray_segments,
            snapshots: snapshots.map(|s| snapshot_info(name, s, sharing, &uris_of)).collect(),
            counters: resources::counters(status.counters),
        }),
    }
}

fn snapshot_info(
    of: &str,
    (layer, snapshot): (ObjectId, Snapshot),
    sharing: Option<&Sharing>,
    uris_of: &impl Fn(&str) -> Vec<String>,
) -> SnapshotInfo {
    SnapshotInfo {
        layer: layer.0,
        shares: sharing.and_then(|s| s.snapshots.get(&layer)).map(|s| resources::shares(*s)),
        uris: uris_of(&snapshot_export_name(of, &snapshot.name)),
        name: snapshot.name,
        created_ms: snapshot.created_ms,
        size_bytes: snapshot.size_bytes,
    }
}

pub fn schedule_info(schedule: &ScheduleRecord) -> ScheduleInfo {
    ScheduleInfo { every: schedule.every.to_string(), keep: schedule.keep.to_string() }
}

pub fn provisioning_of(is_fixed: bool) -> Provisioning {
    if is_fixed { Provisioning::Fixed } else { Provisioning::Thin }
}

pub fn integrity_of(checked_reads: bool) -> Integrity {
    if checked_reads { Integrity::On } else { Integrity::Off }
}

/// Of a volume that clients may have here.
pub fn state_of(state: State) -> VolumeState {
    match state {
        State::Opening => VolumeState::Opening,
        State::Open => VolumeState::Open,
        State::Deposed => VolumeState::Deposed,
        State::Closing => VolumeState::Closing,
        State::Closed => VolumeState::Closed,
    }
}
