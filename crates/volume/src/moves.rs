//! Moving shards that could stay: off devices that are being drained, and from full devices to empty ones.
//!
//! A move is a repair whose source is the shard itself: it is copied, its segment's homes are changed by a record in the
//! log, and then the old one is garbage. Parts of checkpoints are not moved but written anew.
//!
//! Drains come first. Balancing begins when the fullest device is [`TILT_PER_MILLE`] fuller than the emptiest, and moves
//! part of the difference before it looks again: others do the same with their volumes.

use crate::controller::{Controller, Out};
use crate::segment::Kind;
use crate::space::{Keep, Shape, Target};
use holdfast_base::{BLOCK_BYTES, DeviceId, Instant, MediaClass};
use holdfast_format::geometry::Geometry;
use holdfast_format::ledger::Leg;
use holdfast_format::record::SegmentNo;
use std::collections::BTreeSet;
use std::time::Duration;

/// The table is searched for shards to move this often while devices are drained.
const DRAIN_EVERY: Duration = Duration::from_secs(1);

/// And this often for balancing: what was moved shows in what nodes tell of their devices by then.
const BALANCE_EVERY: Duration = Duration::from_secs(6);

/// Difference of fill, in 1/1000 of a device, from which on shards are moved.
const TILT_PER_MILLE: u64 = 100;

/// Share of the bytes that would even two devices out which is moved at a time.
const TILT_PART: u64 = 4;

#[derive(Debug, Default)]
pub(crate) struct Mover {
    /// Shard, where it is, and where it shall be; next last.
    list: Vec<(SegmentNo, u8, Leg, Option<Leg>)>,
    drain_listed_at: Instant,
    balance_listed_at: Instant,
    /// The last look at the devices' fill gave something to move.
    balances: bool,
}

impl Controller {
    /// Nothing new goes to these devices, and what lies there leaves them.
    pub(crate) fn on_drain(&mut self, devices: BTreeSet<DeviceId>, out: Out) {
        self.peers.set_draining(devices);
        self.mover = Mover::default();
        self.on_legs_changed(out);
    }

    /// Shards, and logs, of this volume on each device that is being drained.
    pub fn left_to_drain(&self) -> Vec<(DeviceId, u64)> {
        if self.peers.draining().is_empty() {
            return Vec::new();
        }
        self.peers
            .draining()
            .iter()
            .map(|device| (*device, self.segments.own_shards_on(*device) + self.logs_on(*device)))
            .collect()
    }

    fn logs_on(&self, device: DeviceId) -> u64 {
        let ledgers = self.basis.is_known().then(|| &self.root().ledgers);
        let legs = ledgers.into_iter().flatten().flat_map(|ledger| &ledger.legs);
        legs.filter(|leg| leg.device == device).count() as u64
    }

    pub(crate) fn drive_moves(&mut self, out: Out) {
        if self.mover.list.is_empty() {
            self.list_moves();
        }
        while self.repairer.may_move()
            && let Some((segment, index, home, target)) = self.mover.list.last().copied()
            && self.may_move_data(self.need_of(segment, None))
        {
            self.mover.list.pop();
            self.start_move(segment, index, home, target, out);
        }
    }

    fn list_moves(&mut self) {
        if !self.peers.draining().is_empty() {
            if self.basis.now.since(self.mover.drain_listed_at) >= DRAIN_EVERY {
                self.mover.drain_listed_at = self.basis.now;
                self.list_drain();
            }
        } else if self.basis.now.since(self.mover.balance_listed_at) >= BALANCE_EVERY {
            self.mover.balance_listed_at = self.basis.now;
            self.list_together();
            if self.mover.list.is_empty() {
                self.list_balance();
            }
        }
    }

    fn list_drain(&mut self) {
        if !self.peers.draining().iter().any(|device| self.segments.own_shards_on(*device) > 0) {
            return;
        }
        let mut list = Vec::new();
        let mut rewrite = false;
        for (no, info) in self.segments.own() {
            for (index, home) in info.homes.iter().enumerate().filter(|(_, h)| self.peers.is_draining(h.device)) {
                match info.kind {
                    Kind::Run => rewrite = true,
                    _ if info.is_needed() && self.peers.leg_usable(*home) => list.push((no, index as u8, *home, None)),
                    _ => {}
                }
            }
        }
        self.mover.list = list;
        self.wants.rewrite |= rewrite && self.topology().meta_layout_now().is_some();
    }

    /// Whether it is better to clean the segment than to move its shards: most of it is dead.
    pub(crate) fn is_drained_by_cleaning(&self, info: &crate::segment::SegmentInfo) -> bool {
        let leaves = info.homes.iter().any(|home| self.peers.is_draining(home.device));
        leaves && info.dead_blocks() * 2 > info.capacity_blocks()
    }

    /// Shards of one segment on one node, which a repair in a hurry may leave: one loss would take both.
    fn list_together(&mut self) {
        let mut list = Vec::new();
        for no in self.survey().crowded() {
            if let Some(info) = self.segments.get(*no)
                && let Some(index) = self.topology().crowded(&info.geometry, &info.homes)
            {
                list.push((*no, index, info.homes[usize::from(index)], None));
            }
        }
        self.mover.list = list;
    }

    fn list_balance(&mut self) {
        self.mover.balances = false;
        let Some((fullest, emptiest, bytes)) = self.tilt() else { return };
        let mut left = bytes / TILT_PART;
        let mut list = Vec::new();
        for (no, info) in self.segments.own().filter(|(_, info)| info.kind == Kind::Data && info.is_needed()) {
            let Some(index) = info.homes.iter().position(|home| *home == fullest) else { continue };
            let bytes = u64::from(info.geometry.shard_blocks()) * BLOCK_BYTES as u64;
            if bytes <= left && self.topology().may_lie(&info.geometry, &info.homes, index as u8, emptiest) {
                list.push((no, index as u8, fullest, Some(emptiest)));
                left -= bytes;
            }
        }
        self.mover.list = list;
        self.mover.balances = !self.mover.list.is_empty();
    }

    /// Bytes between the fullest device and the emptiest, while shards are moved from one to the other.
    pub(crate) fn left_to_balance_bytes(&self) -> u64 {
        let tilt = self.tilt().filter(|_| self.mover.balances && self.peers.draining().is_empty());
        tilt.map_or(0, |(_, _, bytes)| bytes)
    }

    /// The fullest device, the emptiest one of the same class of media, and the bytes that would make them equal, if they differ
    /// much: of the class where they differ most.
    fn tilt(&self) -> Option<(Leg, Leg, u64)> {
        let classes: BTreeSet<Option<MediaClass>> = self.topology().usable_devices().map(|d| d.media).collect();
        classes.into_iter().filter_map(|media| self.tilt_of(media)).max_by_key(|(_, _, bytes)| *bytes)
    }

    fn tilt_of(&self, media: Option<MediaClass>) -> Option<(Leg, Leg, u64)> {
        let usable = self.peers.usable();
        let devices = usable.flat_map(|(id, node)| node.devices().map(move |d| (id, d)));
        let fill = |d: &holdfast_format::wire::DeviceStat| {
            (d.capacity_bytes.saturating_sub(d.free_bytes)) * 1000 / d.capacity_bytes.max(1)
        };
        let mut by_fill: Vec<(u64, Leg, u64)> = devices
            .filter(|(_, d)| self.peers.takes_shards(d) && d.media == media)
            .map(|(node, d)| (fill(d), Leg { node, device: d.device }, d.capacity_bytes))
            .collect();
        by_fill.sort_unstable();
        let ((low, emptiest, room), (high, fullest, _)) = (*by_fill.first()?, *by_fill.last()?);
        (high >= low + TILT_PER_MILLE).then(|| (fullest, emptiest, (high - low) * room / 2000))
    }

    fn start_move(&mut self, segment: SegmentNo, index: u8, listed: Leg, target: Option<Leg>, out: Out) {
        let Some(info) = self.segments.get(segment) else { return };
        let (geometry, homes) = (info.geometry, info.homes.clone());
        let home = homes[usize::from(index)];
        let is_busy = self.repairer.is_under_repair(segment);
        if is_busy || !info.is_needed() || home != listed || !self.peers.leg_usable(home) {
            return;
        }
        let bytes = u64::from(geometry.shard_blocks() + 8) * BLOCK_BYTES as u64;
        let room = Target { keep: Keep::FromGuests, media: self.topology().media_of_homes(&homes, index) };
        let target = target.or_else(|| {
            self.placer().place_again(Shape { geometry: &geometry, homes: &homes }, index, bytes, &[], room)
        });
        // The list may be old: the others may have been made again there.
        let fits = |target: &Leg| {
            *target != home
                && self.peers.leg_usable(*target)
                && self.topology().may_lie(&geometry, &homes, index, *target)
        };
        match target.filter(fits) {
            Some(target) => self.begin_move(segment, index, target, out),
            None => self.gather_copy(segment, &geometry, &homes, out),
        }
    }

    /// A copy of a nested layout that lies on two nodes, since its own had no other device, keeps the other copy off both of them: one of
    /// its shards goes to where the others are.
    fn gather_copy(&mut self, segment: SegmentNo, geometry: &Geometry, homes: &[Leg], out: Out) {
        if !geometry.layout().is_nested() {
            return;
        }
        for (index, home) in homes.iter().enumerate() {
            let domain = geometry.domain_of(index as u8);
            let fellows =
                || homes.iter().enumerate().filter(|(i, _)| *i != index && geometry.domain_of(*i as u8) == domain);
            if !self.peers.leg_usable(*home) || fellows().any(|(_, leg)| leg.node == home.node) {
                continue;
            }
            let bytes = u64::from(geometry.shard_blocks() + 8) * BLOCK_BYTES as u64;
            let room = Target { keep: Keep::FromGuests, media: self.topology().media_of_homes(homes, index as u8) };
            let target = self.placer().place_again(Shape { geometry, homes }, index as u8, bytes, &[], room);
            if let Some(target) = target.filter(|target| fellows().any(|(_, leg)| leg.node == target.node)) {
                return self.begin_move(segment, index as u8, target, out);
            }
        }
    }
}
