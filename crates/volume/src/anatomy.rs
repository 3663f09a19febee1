//! What a volume consists of, what it lacks and what it would lack: counted when asked, from what the controller knows.

use crate::api::{Counters, SpaceUse, State, Status};
use crate::controller::Controller;
use crate::inspection::{Inspected, Inspection, Question};
use crate::segment::Kind;
use crate::space::TierUse;
use holdfast_base::{BLOCK_BYTES, DeviceId, Epoch, Instant, LedgerId, Lsn};
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
            elsewhere_bytes: self.segments.elsewhere_bytes(),
            shared_blocks: self.shared.domain.shared_blocks(),
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
            counters: Counters { calls_examined: self.peers.examined, ..self.counters },
        }
    }

    fn mapped_blocks(&self) -> u64 {
        self.segments.totals().visible_blocks + self.log.live_blocks()
    }

    /// Shards, and logs, of this volume on each device that is being drained.
    pub fn left_to_drain(&self) -> Vec<(DeviceId, u64)> {
        let left = |device: &DeviceId| (*device, self.segments.own_shards_on(*device) + self.logs_on(*device));
        self.peers.draining().iter().map(left).collect()
    }

    fn logs_on(&self, device: DeviceId) -> u64 {
        let ledgers = self.basis.known().map(|root| &root.ledgers);
        let legs = ledgers.into_iter().flatten().flat_map(|ledger| &ledger.legs);
        legs.filter(|leg| leg.device == device).count() as u64
    }

    /// Segments with a shard on a device that is out or missing, or of a narrower layout than the volume's. At least one
    /// while they are judged anew: nobody knows then whether the volume is whole. Who serves no more says none.
    pub(crate) fn degraded_segments(&self) -> u64 {
        if self.is_over() {
            return 0;
        }
        let found = self.care.repairer.degraded_segments(&self.survey(), &self.basis, &self.segments);
        found.max(u64::from(!self.is_surveyed()))
    }

    /// The volume is another's, or nobody's.
    fn is_over(&self) -> bool {
        matches!(self.state, State::Closed | State::Deposed)
    }

    /// Whether all segments were judged by what there is of devices now.
    fn is_surveyed(&self) -> bool {
        self.survey.is_settled(self.topology(), &self.segments)
    }

    /// Looks at the next segments, `count` at most; true when all were looked at. Nothing is found of a volume that nobody
    /// has opened, and nothing weak of one that is served no more.
    pub fn inspect(&self, question: &Question, inspection: &mut Inspection, count: usize) -> bool {
        let is_over = matches!(question, Question::WeakApartFrom(_)) && self.is_over();
        if is_over || !self.basis.is_known() {
            return true;
        }
        let (segments, repairer) = (&self.segments, &self.care.repairer);
        inspection.go_on(question, &Inspected { topology: self.topology(), segments, repairer }, count)
    }

    pub(crate) fn astray_segments(&self) -> u64 {
        if self.root().tiers == Tiers::default() { 0 } else { self.survey().astray().len() as u64 }
    }

    /// What the first tier does; `None` where there is none.
    pub fn tier_use(&self) -> Option<TierUse> {
        self.rotation.tier_use(self.topology())
    }

    /// What the volume's segments are made of.
    pub fn space_use(&self) -> SpaceUse {
        self.segments.own_totals().space
    }

    /// Guests' data that was let in and is in no segment yet.
    pub fn unplaced_bytes(&self) -> u64 {
        self.log.bytes + self.direct.in_flight_bytes()
    }

    /// Devices found slow: since when, and whether this volume does without them.
    pub fn slow_devices(&self) -> Vec<(DeviceId, Instant, bool)> {
        self.peers.slow_devices()
    }

    /// Everything inside, for a person who looks into a simulation that failed.
    pub fn dump(&self) -> String {
        format!(
            "segments {:#?} repair {:?} cleaner {:?} reads {:?}\nfetches {:?}\nleafloads {:?}\nawaiting {:?}\ncalls {:?}\n\
             open {:?}\nopening {:?}\njobs {:?}\nnodes {:?}\ncheckpointer {:?}\nspace {:?}\nshared {:?}\n\
             log {} bytes, {} entries, completed {}",
            self.segments,
            self.care.repairer,
            self.care.cleaner,
            self.reads,
            self.fetcher,
            self.loader,
            self.awaiting_grant,
            self.peers.calls(),
            self.log.open,
            self.opening,
            self.writer.summaries(),
            self.peers,
            self.checkpointer,
            self.room,
            self.shared,
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
