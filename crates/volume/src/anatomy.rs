//! What a volume consists of, for a person who wants to see it: counted when asked, from what the controller knows.

use crate::api::Status;
use crate::controller::Controller;
use crate::segment::Kind;
use holdfast_base::{BLOCK_BYTES, DeviceId, Epoch, LedgerId, Lsn};
use holdfast_format::geometry::Layout;
use holdfast_format::ledger::{AckRule, Leg};
use holdfast_format::tier::Tiers;
use std::collections::BTreeMap;

/// The parts of a volume, from its guests' requests down to devices.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Anatomy {
    pub reads_in_flight: u64,
    pub writes_in_flight: u64,
    /// Requests that wait until the volume is open, or may be read.
    pub waiting: u64,
    pub cache: CacheParts,
    pub log: LogParts,
    /// Of this volume's own segments, by kind and layout.
    pub segments: Vec<SegmentParts>,
    /// Segments that are being written right now.
    pub jobs: u64,
    pub devices: Vec<DeviceParts>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheParts {
    pub map_bytes: u64,
    pub map_bytes_max: u64,
    /// Runs of the overlay: what changed, and is in no leaf yet.
    pub changes: u64,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LogParts {
    /// Entries in memory: in flight, or acknowledged and not trimmed.
    pub entries: u64,
    pub bytes: u64,
    pub bytes_max: u64,
    /// Appended by this opening.
    pub appended_bytes: u64,
    /// The newest entry that is acknowledged; they are numbered from 1 on since the volume was made.
    pub completed: Lsn,
    pub trimmed: Lsn,
    /// Ledgers that hold what is not trimmed, sealed ones and the open one.
    pub ledgers: u64,
    /// The one that takes appends, with its rule.
    pub open: Option<(LedgerId, AckRule)>,
    pub legs: Vec<LegParts>,
}

/// A leg of the open ledger.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LegParts {
    pub leg: Leg,
    /// New entries go there; else it is a standby.
    pub is_preferred: bool,
    pub is_usable: bool,
    /// Of the entries in memory, those of this ledger that it has said to have.
    pub entries: u64,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SegmentParts {
    /// Guests' data; else the map and its checkpoints.
    pub is_data: bool,
    pub layout: Layout,
    pub segments: u64,
    pub shards: u64,
    /// Of devices, without the headers of shards.
    pub bytes: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceParts {
    pub leg: Leg,
    pub shards: u64,
    pub bytes: u64,
    pub is_usable: bool,
}

impl Controller {
    pub fn status(&self) -> Status {
        let known = self.basis.is_known();
        let own = self.segments.own_totals();
        Status {
            state: self.state,
            epoch: if known { self.epoch() } else { Epoch(0) },
            size_bytes: if known { self.root().size_bytes } else { 0 },
            layout: if known { self.root().layout } else { holdfast_format::geometry::Layout::DEFAULT },
            log_bytes: self.log.bytes,
            mapped_blocks: self.mapped_blocks(),
            segment_count: own.segments,
            degraded_segments: if known { self.degraded_segments() } else { 0 },
            at_risk_entries: self.at_risk_entries(),
            is_recoverable: self.is_recoverable(),
            suspect_nodes: self.peers.suspects(),
            snapshots: self.snapshots().map(|(layer, s)| (layer, s.clone())).collect(),
            clones: self.clones().map(|(head, c)| (head, c.clone())).collect(),
            space: own.space,
            sharing: self.care.audit.sharing(),
            layers_going: self.map.layers().going_count(),
            left_to_drain: self.left_to_drain(),
            left_to_balance_bytes: self.care.mover.left_to_balance_bytes(self.topology()),
            tiers: if known { self.root().tiers } else { Tiers::default() },
            first_tier: self.tier_use(),
            astray_segments: if known { self.astray_segments() } else { 0 },
            dependents: if known { self.root().dependents.clone() } else { Vec::new() },
            counters: self.counters,
        }
    }

    fn mapped_blocks(&self) -> u64 {
        let in_log: u64 = self.log.iter_from(Lsn(0)).map(|(_, e)| e.live_blocks).sum();
        self.segments.totals().visible_blocks + in_log
    }

    /// Everything inside, for a person who looks into a simulation that failed.
    pub fn dump(&self) -> String {
        format!(
            "segments {:#?} repair {:?} cleaner {:?} reads {:?}\nfetches {:?}\nleafloads {:?}\nawaiting {:?}\ncalls {:?}\n\
             open {:?}\nopening {:?}\njobs {:?}\nnodes {:?}\ncheckpointer {:?}\nspace {:?}\nfamily {:?}\n\
             log {} bytes, {} entries, completed {}",
            self.segments,
            self.care.repairer,
            self.care.cleaner,
            self.reads,
            self.fetcher,
            self.leaf_loads,
            self.awaiting_grant,
            self.peers.calls(),
            self.log.open,
            self.opening,
            self.writer.summaries(),
            self.peers,
            self.checkpointer,
            self.room,
            self.family,
            self.log.bytes,
            self.log.len(),
            self.log.completed
        )
    }

    /// Takes time for each segment: for a person's command, not for every status.
    pub fn anatomy(&self) -> Anatomy {
        let (segments, devices) = self.segment_parts();
        Anatomy {
            reads_in_flight: self.reads.len() as u64,
            writes_in_flight: self.write_ops.len() as u64,
            waiting: (self.waiting.len() + self.awaiting_grant.len()) as u64,
            cache: CacheParts {
                map_bytes: self.map.cached_bytes() as u64,
                map_bytes_max: self.basis.config.map_cache_bytes_max,
                changes: self.map.run_count() as u64,
            },
            log: self.log_parts(),
            segments,
            jobs: self.writer.len() as u64,
            devices,
        }
    }

    fn log_parts(&self) -> LogParts {
        let open = self.log.open.as_ref();
        let legs = open.map_or(Vec::new(), |open| {
            let has = |bit: usize| {
                let of_it = self.log.iter_from(Lsn::ZERO).filter(|(_, entry)| entry.ledger == open.id);
                of_it.filter(|(_, entry)| entry.have >> bit & 1 == 1).count() as u64
            };
            let part = |(bit, leg): (usize, &Leg)| LegParts {
                leg: *leg,
                is_preferred: open.preferred >> bit & 1 == 1,
                is_usable: self.peers.leg_usable(*leg) && open.gone >> bit & 1 == 0,
                entries: has(bit),
            };
            open.legs.iter().enumerate().map(part).collect()
        });
        LogParts {
            entries: self.log.len() as u64,
            bytes: self.log.bytes,
            bytes_max: self.basis.config.writeback_bytes_max,
            appended_bytes: self.log.total_bytes,
            completed: self.log.completed,
            trimmed: self.log.trimmed,
            ledgers: if self.basis.is_known() { self.root().ledgers.len() as u64 } else { 0 },
            open: open.map(|open| (open.id, open.rule)),
            legs,
        }
    }

    fn segment_parts(&self) -> (Vec<SegmentParts>, Vec<DeviceParts>) {
        let mut kinds: BTreeMap<(bool, String), SegmentParts> = BTreeMap::new();
        let mut devices: BTreeMap<DeviceId, DeviceParts> = BTreeMap::new();
        let own = self.basis.is_known().then(|| self.segments.own());
        for (_, info) in own.into_iter().flatten() {
            let layout = info.geometry.layout();
            let (is_data, count) = (info.kind == Kind::Data, u64::from(info.geometry.shard_count()));
            let shard_bytes = u64::from(info.geometry.shard_blocks()) * BLOCK_BYTES as u64;
            let part = kinds.entry((!is_data, layout.to_string())).or_insert(SegmentParts {
                is_data,
                layout,
                segments: 0,
                shards: 0,
                bytes: 0,
            });
            part.segments += 1;
            part.shards += count;
            part.bytes += count * shard_bytes;
            for leg in &info.homes {
                let is_usable = self.peers.leg_usable(*leg);
                let part =
                    devices.entry(leg.device).or_insert(DeviceParts { leg: *leg, shards: 0, bytes: 0, is_usable });
                part.shards += 1;
                part.bytes += shard_bytes;
            }
        }
        let mut devices: Vec<DeviceParts> = devices.into_values().collect();
        devices.sort_by_key(|part| (part.leg.node, part.leg.device));
        (kinds.into_values().collect(), devices)
    }
}
