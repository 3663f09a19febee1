//! What a volume's controller says, as resources of the API.

use holdfast_api::{
    Counters, DeviceParts, EdgeInfo, FirstTierUse, LedgerParts, LegParts, LegState, LogParts, Parts, Provisioning,
    SegmentKind, SegmentParts, Shares, SpaceUse, VolumeInfo, VolumeLive, VolumeSpace, VolumeWork,
};
use holdfast_filter::Edge;
use holdfast_volume::Anatomy;

pub fn edge(edge: Edge) -> EdgeInfo {
    let Edge { requests, bytes_down, replies, bytes_up, errors } = edge;
    EdgeInfo { requests, bytes_down, replies, bytes_up, errors, in_flight: edge.in_flight() }
}

pub fn first_tier(u: holdfast_volume::TierUse) -> FirstTierUse {
    FirstTierUse {
        bytes: u.bytes,
        bytes_max: u.bytes_max,
        born_bytes: u.born_bytes,
        passed_bytes: u.passed_bytes,
        rotated_bytes: u.rotated_bytes,
        read_bytes: u.read_bytes,
        read_first_bytes: u.read_first_bytes,
    }
}

pub fn space(s: holdfast_volume::SpaceUse, elsewhere_bytes: u64) -> SpaceUse {
    SpaceUse {
        data_bytes: s.data_bytes,
        dead_bytes: s.dead_bytes,
        kept_bytes: s.kept_bytes,
        padding_bytes: s.padding_bytes,
        redundancy_bytes: s.redundancy_bytes,
        metadata_bytes: s.metadata_bytes,
        shown_bytes: s.shown_bytes,
        plain_bytes: s.plain_bytes,
        elsewhere_bytes,
    }
}

pub fn shares(s: holdfast_volume::Shares) -> Shares {
    Shares { referenced_bytes: s.referenced_bytes, exclusive_bytes: s.exclusive_bytes }
}

pub fn counters(c: holdfast_volume::Counters) -> Counters {
    Counters {
        reads: c.reads,
        read_bytes: c.read_bytes,
        writes: c.writes,
        write_bytes: c.write_bytes,
        append_hedges: c.append_hedges,
        read_hedges: c.read_hedges,
        shard_reads: c.shard_reads,
        local_reads: c.local_reads,
        reconstructed_reads: c.reconstructed_reads,
        ahead_bytes: c.ahead_bytes,
        rolls: c.rolls,
        segments_written: c.segments_written,
        segment_bytes_written: c.segment_bytes_written,
        direct_bytes: c.direct_bytes,
        destaged_bytes: c.destaged_bytes,
        segments_cleaned: c.segments_cleaned,
        cleaned_bytes: c.cleaned_bytes,
        repacked_bytes: c.repacked_bytes,
        segments_freed: c.segments_freed,
        shards_deleted: c.shards_deleted,
        shards_rebuilt: c.shards_rebuilt,
        shards_moved: c.shards_moved,
        shards_made_by_nodes: c.shards_made_by_nodes,
        checkpoints: c.checkpoints,
        checkpoint_bytes: c.checkpoint_bytes,
        folds: c.folds,
        checksum_errors: c.checksum_errors,
        shards_scrubbed: c.shards_scrubbed,
    }
}

/// What the volume holds, where it is open where this is told.
pub fn space_of(volume: &VolumeInfo) -> Option<VolumeSpace> {
    let live = volume.live.as_ref().filter(|_| volume.clone_of.is_none())?;
    Some(VolumeSpace {
        name: volume.name.clone(),
        space: live.space,
        held_by_snapshots_bytes: live.held_by_snapshots_bytes,
        reclaimable_bytes: reclaimable_bytes(volume),
        work: Some(work_of(live)),
    })
}

fn work_of(live: &VolumeLive) -> VolumeWork {
    let Counters { reads, read_bytes, writes, write_bytes, .. } = live.counters;
    VolumeWork {
        reads,
        read_bytes,
        writes,
        write_bytes,
        read_times: live.read_times,
        write_times: live.write_times,
        degraded_segments: live.degraded_segments,
        at_risk_entries: live.at_risk_entries,
    }
}

/// Of what its segments take: dead, with its copies and parity, and cleaned when room is needed. A fixed volume keeps
/// it, and a clone shows the figures of its volume.
pub fn reclaimable_bytes(volume: &VolumeInfo) -> u64 {
    let is_own = volume.clone_of.is_none() && volume.provisioning != Provisioning::Fixed;
    volume.live.as_ref().filter(|_| is_own).map_or(0, |live| {
        let SpaceUse { data_bytes, dead_bytes, kept_bytes, padding_bytes, redundancy_bytes, .. } = live.space;
        let payload = data_bytes + dead_bytes + kept_bytes + padding_bytes;
        let gained = dead_bytes.saturating_sub(payload * holdfast_volume::DEAD_PER_MILLE_MIN / 1000);
        gained + (u128::from(redundancy_bytes) * u128::from(gained) / u128::from(payload.max(1))) as u64
    })
}

pub fn parts(anatomy: Anatomy) -> Parts {
    let log = anatomy.log;
    let leg = |part: &holdfast_volume::LegParts| LegParts {
        node: part.leg.node.0,
        device: part.leg.device.to_string(),
        state: match (part.is_usable, part.is_preferred) {
            (false, _) => LegState::Out,
            (true, true) => LegState::Appending,
            (true, false) => LegState::Standby,
        },
        entries: part.entries,
    };
    let ledger = |(id, rule): (holdfast_base::LedgerId, holdfast_format::ledger::AckRule)| LedgerParts {
        id: id.to_string(),
        copies: rule.copies,
        nodes: rule.domains,
        legs: log.legs.iter().map(leg).collect(),
    };
    let segment = |part: holdfast_volume::SegmentParts| SegmentParts {
        kind: if part.is_data { SegmentKind::Data } else { SegmentKind::Map },
        layout: part.layout.to_string(),
        segments: part.segments,
        shards: part.shards,
        bytes: part.bytes,
    };
    let device = |part: holdfast_volume::DeviceParts| DeviceParts {
        node: part.leg.node.0,
        device: part.leg.device.to_string(),
        shards: part.shards,
        bytes: part.bytes,
        usable: part.is_usable,
    };
    Parts {
        reads_in_flight: anatomy.reads_in_flight,
        writes_in_flight: anatomy.writes_in_flight,
        waiting: anatomy.waiting,
        map_cache_bytes: anatomy.cache.map_bytes,
        map_cache_bytes_max: anatomy.cache.map_bytes_max,
        map_changes: anatomy.cache.changes,
        log: LogParts {
            entries: log.entries,
            bytes: log.bytes,
            bytes_max: log.bytes_max,
            appended_bytes: log.appended_bytes,
            completed_lsn: log.completed.0,
            trimmed_lsn: log.trimmed.0,
            ledgers: log.ledgers,
            open: log.open.map(ledger),
        },
        segments: anatomy.segments.into_iter().map(segment).collect(),
        jobs: anatomy.jobs,
        devices: anatomy.devices.into_iter().map(device).collect(),
    }
}
