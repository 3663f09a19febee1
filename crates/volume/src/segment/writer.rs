//! Writing one segment: place, encode, put every shard, then commit.
//!
//! Role: owns the segments on their way. What follows from them it leaves to others, as [`Wish`]es: the commit record, word
//! that metadata is durable, an id that was given up.
//!
//! States: packing (blocks are being made smaller, for a while at most) -> parked (no room or too few nodes: tried again
//! on ticks) -> putting -> committing (all shards durable, commit record in the log) -> done. A shard whose node is lost,
//! hung or full goes to another node under the same id, with the same bytes; if there is none, the whole segment begins
//! again under a new id and a layout that fits, and the old id is freed by a record (protocol rules 16 and 17). Bulk
//! writes and cleaning don't stay parked on a grid that is full.
//!
//! Invariants (checked by [`SegmentWriter::verify`]): (1) a segment is committed when all its shards are durable, and not
//! begun anew from then on; (2) a segment that has a place has a home and a checksum for each of its shards and blocks.

use crate::api::{Config, Counters, Effect, Lane, Out};
use crate::basis::Basis;
use crate::peers::{Ask, Peers, Purpose};
use crate::segment::direct::DirectRun;
use crate::segment::encrypt::{EncryptedPayload, Encryption, encrypt_payload, encrypt_units};
use crate::segment::shards::pieces_of;
use crate::segment::task::Task;
use crate::segment::units::{NotPacked, PackedPayload, Way};
use crate::segment::{Kind, Named, SegmentInfo, Segments};
use crate::space::{Keep, Placer, Rotation, Shape, Target, Topology};
use holdfast_base::buf::total_len;
use holdfast_base::{
    BLOCK_BYTES, BlockCrc, Buf, Epoch, Instant, Lsn, MediaClass, NodeId, Prng, SegmentId, ShardId, Slab, Token,
    Urgency, VolumeId, block_crcs,
};
use holdfast_format::geometry::{Geometry, Layout};
use holdfast_format::ledger::Leg;
use holdfast_format::packing::{Codec, StoredLengths};
use holdfast_format::record::{CommitExtent, PackedCommit, Record, SegmentCommit, SegmentNo};
use holdfast_format::segment::{self, SegmentIndex, ShardHeader};
use holdfast_format::wire::{Refusal, Reply, Request};
use std::time::Duration;

/// Segments on their way at a time, parked ones included.
const JOBS_MAX: usize = 1024;

/// Blocks that were not packed by then are written as they are: the log does not wait for a codec.
const PACKING_MAX: Duration = Duration::from_millis(50);

/// What is moved only to be packed has so long.
const REPACKING_MAX: Duration = Duration::from_secs(5);

/// Up to about ten minutes, from 0.6 s on.
const PUT_DOUBLINGS_MAX: usize = 10;

/// Why a segment is written, and who is told when it is part of the volume.
#[derive(Debug, Clone)]
pub(crate) enum JobKind {
    /// Log entries leave the log.
    Destage { entries: Vec<Lsn> },
    /// The cleaner moves what lives.
    Clean { aim: Aim },
    /// Bulk writes.
    Direct { writes: Vec<DirectRun> },
    /// Leaves of the map.
    Leaves,
    /// A part of a checkpoint.
    Runs { part: usize },
    /// Content that a store's members have more than once.
    Gather { id: u64 },
    /// A part of the first checkpoint of another volume.
    Dependent { volume: VolumeId, epoch: Epoch, part: usize },
}

/// What the cleaner moves blocks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Aim {
    /// Their segments are mostly dead, or are to be written in another layout or elsewhere.
    Room,
    /// They leave the first tier.
    Rotation,
    /// They are made smaller by that codec; what this does not, stays where it is.
    Packing(Codec),
    /// They are fingerprinted, and stay where they are.
    Print,
    /// A store has them, too: they are named there.
    Share,
    /// A store's, which no member names: its map forgets them.
    Forget,
    /// The volume leaves its sharing domain: what it names of the store becomes its own again.
    Return,
}

impl Aim {
    /// Packed blocks go as they lie.
    pub(crate) fn moves_units(self) -> bool {
        !matches!(self, Aim::Packing(_) | Aim::Print)
    }

    /// What lives is read, and not only looked up.
    pub(crate) fn reads(self) -> bool {
        !matches!(self, Aim::Share | Aim::Forget)
    }

    /// What lives is written anew.
    pub(crate) fn writes(self) -> bool {
        self.reads() && self != Aim::Print
    }
}

impl JobKind {
    pub(crate) fn is_meta(&self) -> bool {
        matches!(self, JobKind::Leaves | JobKind::Runs { .. } | JobKind::Dependent { .. })
    }

    fn keep(&self) -> Keep {
        match self {
            JobKind::Destage { .. } | JobKind::Direct { .. } | JobKind::Gather { .. } => Keep::FromGuests,
            // What leaves a tier gives the other nothing back.
            JobKind::Clean { aim: Aim::Rotation } => Keep::FromGuests,
            JobKind::Clean { .. } => Keep::FromCleaner,
            JobKind::Leaves | JobKind::Runs { .. } => Keep::Nothing,
            // What is refused leaves shards that nobody knows before the volume is deleted.
            JobKind::Dependent { .. } => Keep::FromCleaner,
        }
    }
}

/// What a segment is to hold.
#[derive(Debug)]
pub(crate) struct Work {
    pub(crate) kind: JobKind,
    pub(crate) extents: Vec<CommitExtent>,
    /// Whole blocks, in payload order.
    pub(crate) payload: Vec<Buf>,
    pub(crate) crcs: Vec<BlockCrc>,
    /// The same blocks, packed: written instead where that is less.
    pub(crate) packed: Option<PackedPayload>,
    /// It is written only if that takes no more bytes.
    pub(crate) worth_bytes: Option<u64>,
}

impl Work {
    /// Nothing yet.
    pub(crate) fn new(kind: JobKind) -> Work {
        Work { kind, extents: Vec::new(), payload: Vec::new(), crcs: Vec::new(), packed: None, worth_bytes: None }
    }

    /// Of the payload.
    pub(crate) fn bytes(&self) -> u64 {
        self.crcs.len() as u64 * BLOCK_BYTES as u64
    }

    /// The shape of its segment in that layout: packed units have whole rows, and what packing does not make smaller by
    /// more than that costs is written as it is.
    fn geometry(&self, layout: Layout) -> Geometry {
        let raw = Geometry::new(layout, self.crcs.len() as u32);
        let Some(packed) = &self.packed else { return raw };
        let stored = ((packed.bytes.len() / BLOCK_BYTES) as u32).next_multiple_of(raw.row_blocks());
        let packed = Geometry::new(layout, stored);
        if self.is_packed_in(&packed) { packed } else { raw }
    }

    /// Whether a segment of that shape gets the blocks packed: what was moved as it lay always does.
    fn is_packed_in(&self, geometry: &Geometry) -> bool {
        self.payload.is_empty() || (geometry.payload_blocks as usize) < self.crcs.len()
    }

    fn packed_in(&self, geometry: &Geometry) -> Option<&PackedPayload> {
        self.packed.as_ref().filter(|_| self.is_packed_in(geometry))
    }
}

#[derive(Debug)]
struct Shard {
    payload: Vec<Buf>,
    header_blocks: u32,
    durable: bool,
    /// Nodes that were given it and failed.
    failed: Vec<NodeId>,
}

#[derive(Debug)]
struct SegmentJob {
    work: Work,
    /// While its blocks are being packed: until when that is waited for.
    packing_until: Option<Instant>,
    /// What its blocks are packed by, or were, or could not be.
    codec: Option<Codec>,
    /// Absent while packing or parked.
    placed: Option<Placed>,
    /// Times that it was begun anew.
    restarts: usize,
}

#[derive(Debug)]
struct Placed {
    no: SegmentNo,
    /// Of this volume, or of a dependent that is being created.
    id: SegmentId,
    geometry: Geometry,
    homes: Vec<Leg>,
    /// Of the homes, where that matters.
    media: Option<MediaClass>,
    shards: Vec<Shard>,
    /// By which the map knows the volume's blocks: checksums, or what tells that they open.
    checks: Vec<BlockCrc>,
    /// Of these as units, where they are packed.
    lengths: Option<StoredLengths>,
    committing: bool,
}

impl SegmentJob {
    fn is_parked(&self) -> bool {
        self.placed.is_none() && self.packing_until.is_none()
    }

    /// Whose ids its shards get.
    fn owner(&self, basis: &Basis) -> (VolumeId, Epoch) {
        match self.work.kind {
            JobKind::Dependent { volume, epoch, .. } => (volume, epoch),
            _ => (basis.volume(), basis.epoch()),
        }
    }
}

/// A shard that a node was given, for a segment that is on its way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Put {
    pub(crate) job: Token,
    pub(crate) shard: ShardId,
    pub(crate) node: NodeId,
}

/// What comes of segments, for others to see to.
#[derive(Debug)]
pub(crate) enum Wish {
    /// Packing blocks was not worth writing them anew, if that codec was tried; or nobody came to it.
    NotWorth(Option<Codec>),
    /// All shards are durable: this record makes the segment a part of the volume.
    Commit(Token, Record),
    /// The same of metadata, which has no record of its own.
    Durable(Written),
    /// The id will never be committed. What may lie there is freed.
    Abandon(SegmentNo, Vec<Leg>),
    /// A node that was given the shard of this number did not answer in time; it may write it yet.
    Stray(Leg, SegmentNo, u8),
    /// A device has failed.
    Degraded,
}

/// A segment of metadata that is durable.
#[derive(Debug)]
pub(crate) struct Written {
    pub(crate) kind: JobKind,
    pub(crate) id: SegmentId,
    pub(crate) geometry: Geometry,
    pub(crate) homes: Vec<Leg>,
}

/// What the writer works with.
pub(crate) struct Around<'a> {
    pub(crate) basis: &'a Basis,
    pub(crate) peers: &'a mut Peers,
    pub(crate) segments: &'a mut Segments,
    pub(crate) rotation: &'a mut Rotation,
    pub(crate) rng: &'a mut Prng,
    pub(crate) counters: &'a mut Counters,
    pub(crate) encryptions: &'a mut Vec<Encryption>,
    pub(crate) wishes: &'a mut Vec<Wish>,
}

impl Around<'_> {
    fn placer(&mut self) -> Placer<'_> {
        Placer::new(self.basis, self.peers, self.rng)
    }

    /// The first place with room for a segment of so many blocks: its shape, its homes, and their class of media.
    fn find_homes(&mut self, work: &Work) -> Option<(Geometry, Vec<Leg>, Option<MediaClass>)> {
        let (kind, topology) = (&work.kind, Topology::new(self.basis, self.peers));
        let places = topology.places(kind, self.rotation.fill_per_mille(topology));
        places.into_iter().find_map(|place| {
            let geometry = work.geometry(place.layout);
            let shard_bytes = (u64::from(geometry.shard_blocks()) + 8) * BLOCK_BYTES as u64;
            Some((geometry, self.placer().place_segment(place, shard_bytes, kind.keep())?, place.media))
        })
    }
}

/// The segments on their way.
#[derive(Debug)]
pub(crate) struct SegmentWriter {
    jobs: Slab<SegmentJob>,
}

impl Default for SegmentWriter {
    fn default() -> SegmentWriter {
        SegmentWriter { jobs: Slab::new(JOBS_MAX) }
    }
}

impl SegmentWriter {
    // ---- what is under way ----

    pub(crate) fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.jobs.len()
    }

    /// Segments that log entries are on their way into.
    pub(crate) fn destages(&self) -> usize {
        self.jobs.iter().filter(|(_, job)| matches!(job.work.kind, JobKind::Destage { .. })).count()
    }

    /// Of the log, what is in jobs whose shards are not all durable.
    pub(crate) fn unwritten_destage_bytes(&self) -> u64 {
        let is_unwritten = |job: &SegmentJob| job.placed.as_ref().is_none_or(|placed| !placed.committing);
        let destaged = self.jobs.iter().filter(|(_, job)| matches!(job.work.kind, JobKind::Destage { .. }));
        let blocks = destaged.filter(|(_, job)| is_unwritten(job)).map(|(_, job)| job.work.crcs.len() as u64);
        blocks.sum::<u64>() * BLOCK_BYTES as u64
    }

    /// Shape and homes of segments of guests' data.
    pub(crate) fn placed_data(&self) -> impl Iterator<Item = (&Geometry, &[Leg])> {
        let data = self.jobs.iter().filter(|(_, job)| !job.work.kind.is_meta());
        let placed = data.filter_map(|(_, job)| job.placed.as_ref());
        placed.map(|placed| (&placed.geometry, placed.homes.as_slice()))
    }

    /// How often the time that a call may take was doubled: of a shard, with each place that was tried. Where all disks
    /// that are left are slow the segment is written at their pace, and not begun anew for ever.
    pub(crate) fn put_doublings(&self, purpose: &Purpose) -> u32 {
        let Purpose::PutShard { job, shard } = purpose else { return 0 };
        let Some(job) = self.jobs.get(*job) else { return 0 };
        let of_shard = job.placed.as_ref().and_then(|placed| placed.shards.get(usize::from(shard.index)));
        let tried = job.restarts + of_shard.map_or(0, |shard| shard.failed.len());
        tried.min(PUT_DOUBLINGS_MAX) as u32
    }

    /// For a person who looks into a simulation that failed.
    pub(crate) fn summaries(&self) -> Vec<String> {
        let summary = |job: &SegmentJob| {
            let (kind, blocks) = (&job.work.kind, job.work.crcs.len());
            let placed = job.placed.as_ref().map(|p| (p.no, &p.homes, p.committing));
            format!("{kind:?} of {blocks} blocks, placed {placed:?}")
        };
        self.jobs.iter().map(|(_, job)| summary(job)).collect()
    }

    /// Asserts what must hold between events (tests and the simulator).
    pub(crate) fn verify(&self) {
        for (_, job) in self.jobs.iter() {
            let Some(placed) = &job.placed else { continue };
            assert_eq!(placed.homes.len(), usize::from(placed.geometry.shard_count()), "a home for each shard");
            let units = placed.lengths.as_ref().map_or(u64::from(placed.geometry.payload_blocks), StoredLengths::len);
            assert_eq!(placed.checks.len() as u64, units, "a checksum for each block");
            assert!(placed.lengths.as_ref().is_none_or(|l| l.fill(&placed.geometry)), "units lie where they may");
            let is_durable = placed.shards.iter().all(|shard| shard.durable);
            assert_eq!(placed.committing, is_durable, "{:?} is committed when its shards are durable", placed.no);
        }
    }

    // ---- places ----

    pub(crate) fn start(&mut self, around: &mut Around<'_>, work: Work, out: Out) {
        let payload_blocks: u64 = work.payload.iter().map(|b| (b.len() / BLOCK_BYTES) as u64).sum();
        let units = work.packed.as_ref().map_or(payload_blocks, |packed| packed.lengths.len());
        assert_eq!(units, work.crcs.len() as u64, "a checksum a block");
        let token = self.jobs.insert(SegmentJob { work, packing_until: None, codec: None, placed: None, restarts: 0 });
        self.place(around, token, out);
    }

    // ---- packing ----

    /// Has the blocks packed before they are written.
    pub(crate) fn start_packing(&mut self, basis: &Basis, work: Work, codec: Codec, out: Out) {
        let blocks = work.payload.clone();
        let can_wait = work.worth_bytes.is_some() || matches!(work.kind, JobKind::Gather { .. });
        let max = if can_wait { REPACKING_MAX } else { PACKING_MAX };
        let (until, way) = (basis.now + max, Way { codec, is_sealed: basis.config.key.is_some() });
        let job = SegmentJob { work, packing_until: Some(until), codec: Some(codec), placed: None, restarts: 0 };
        let job = self.jobs.insert(job);
        out.push(Effect::Work { job: job.0, task: Task::Pack(way), blocks, until });
    }

    /// The blocks were packed, if that makes them smaller; or it was too late. They are written, if that is worth it.
    pub(crate) fn on_packed(
        &mut self,
        around: &mut Around<'_>,
        token: Token,
        packed: Result<PackedPayload, NotPacked>,
        out: Out,
    ) {
        let Some(job) = self.jobs.get_mut(token).filter(|job| job.packing_until.is_some()) else { return };
        job.packing_until = None;
        if matches!(packed, Err(NotPacked::NotTried)) {
            job.codec = None;
        }
        let blocks = job.work.crcs.len() as u64;
        job.work.packed = packed.ok().filter(|packed| packed.lengths.len() == blocks);
        let is_worth_it = |worth_bytes| {
            let layout = Topology::new(around.basis, around.peers).layout_now();
            let geometry = job.work.geometry(layout.unwrap_or(around.basis.root().layout));
            u64::from(geometry.payload_blocks) * BLOCK_BYTES as u64 <= worth_bytes
        };
        if !job.work.worth_bytes.is_none_or(is_worth_it) {
            let job = self.jobs.remove(token).expect("just seen");
            return around.wishes.push(Wish::NotWorth(job.codec));
        }
        self.place(around, token, out);
    }

    /// When packing is waited for no longer.
    pub(crate) fn packing_deadline(&self) -> Option<Instant> {
        self.jobs.iter().filter_map(|(_, job)| job.packing_until).min()
    }

    /// Blocks that were not packed in time are written as they are; all of them where `is_pressed`.
    pub(crate) fn end_packing(&mut self, around: &mut Around<'_>, is_pressed: bool, out: Out) {
        let now = around.basis.now;
        let is_late = |job: &SegmentJob| job.packing_until.is_some_and(|until| is_pressed || until <= now);
        let late: Vec<Token> = self.jobs.iter().filter(|(_, job)| is_late(job)).map(|(token, _)| token).collect();
        for token in late {
            self.on_packed(around, token, Err(NotPacked::NotTried), out);
        }
    }

    /// Gives parked jobs a place. Those that stay parked, and what they are of.
    pub(crate) fn retry_parked(&mut self, around: &mut Around<'_>, out: Out) -> Vec<(Token, JobKind)> {
        let parked: Vec<Token> = self.jobs.iter().filter(|(_, job)| job.is_parked()).map(|(token, _)| token).collect();
        for token in &parked {
            self.place(around, *token, out);
        }
        let stays = |token: Token| Some((token, self.jobs.get(token).filter(|job| job.is_parked())?.work.kind.clone()));
        parked.into_iter().filter_map(stays).collect()
    }

    /// Ends parked jobs that are of no use any more.
    pub(crate) fn drop_parked(&mut self, is_of_use: impl Fn(&JobKind) -> bool) {
        let is_dropped = |job: &SegmentJob| job.is_parked() && !is_of_use(&job.work.kind);
        let dropped: Vec<Token> = self.jobs.iter().filter(|(_, job)| is_dropped(job)).map(|(token, _)| token).collect();
        for token in dropped {
            self.jobs.remove(token);
        }
    }

    /// Ends a parked job: there is no room for it.
    pub(crate) fn give_up(&mut self, token: Token) {
        let job = self.jobs.remove(token);
        assert!(job.is_some_and(|job| job.is_parked()), "only what is parked is given up");
    }

    /// Gives a parked job an id and homes, and sends its shards. Stays parked where there is no room.
    fn place(&mut self, around: &mut Around<'_>, token: Token, out: Out) {
        let job = self.jobs.get_mut(token).expect("a job under way");
        let Some((geometry, homes, media)) = around.find_homes(&job.work) else { return };
        if !job.work.kind.is_meta() {
            let topology = Topology::new(around.basis, around.peers);
            around.rotation.on_placed(topology, &job.work.kind, &geometry, &homes);
        }
        let (volume, epoch) = job.owner(around.basis);
        let no = around.segments.take_number(epoch);
        let id = no.of(volume);
        if volume == around.basis.volume() {
            around.segments.unsettle(no);
        }
        let (shards, checks) = encode(&around.basis.config, &job.work, id, &geometry, around.encryptions);
        let count = shards.len() as u8;
        let lengths = job.work.packed_in(&geometry).map(|packed| packed.lengths.clone());
        job.placed = Some(Placed { no, id, geometry, homes, media, shards, checks, lengths, committing: false });
        around.counters.segments_written += 1;
        for index in 0..count {
            // A shard that can't be sent anywhere parks the job again.
            if self.jobs.get(token).is_some_and(|j| j.placed.as_ref().is_some_and(|p| p.no == no)) {
                self.put(around, token, index, out);
            }
        }
    }

    // ---- shards ----

    fn put(&mut self, around: &mut Around<'_>, token: Token, index: u8, out: Out) {
        let job = self.jobs.get(token).expect("a job under way");
        let placed = job.placed.as_ref().expect("a placed job");
        let (shard, Leg { node, device }) = (&placed.shards[usize::from(index)], placed.homes[usize::from(index)]);
        let id = ShardId { segment: placed.id, index };
        let (volume, epoch) = job.owner(around.basis);
        let request = Request::PutShard { device, volume, epoch, shard: id, header_blocks: shard.header_blocks };
        let payload = shard.payload.clone();
        around.counters.segment_bytes_written += total_len(&payload) as u64;
        let purpose = Purpose::PutShard { job: token, shard: id };
        let is_care = matches!(job.work.kind, JobKind::Clean { .. });
        let urgency = if is_care { Urgency::Care } else { Urgency::Normal };
        let ask = Ask::new(node, Lane::Bulk, purpose, request, payload).with(urgency);
        if around.peers.send(around.basis.now, ask, out).is_none() {
            self.replace(around, token, index, node, out);
        }
    }

    /// Whether an answer belongs to what the job is at: the same segment id, the same home, not durable yet.
    fn awaits(&self, Put { job, shard, node }: Put) -> Option<Leg> {
        let placed = self.jobs.get(job)?.placed.as_ref()?;
        if placed.committing || placed.id != shard.segment {
            return None;
        }
        let leg = placed.homes[usize::from(shard.index)];
        (leg.node == node && !placed.shards[usize::from(shard.index)].durable).then_some(leg)
    }

    /// A node's answer.
    pub(crate) fn on_put(&mut self, around: &mut Around<'_>, put: Put, reply: &Reply, out: Out) {
        let Some(leg) = self.awaits(put) else { return };
        let (token, index, node) = (put.job, put.shard.index, put.node);
        let placed = self.jobs.get_mut(token).and_then(|j| j.placed.as_mut()).expect("just seen");
        match reply {
            Reply::Done => {
                placed.shards[usize::from(index)].durable = true;
                if placed.shards.iter().all(|s| s.durable) {
                    self.on_durable(around, token);
                }
            }
            Reply::Refused(Refusal::DeviceFailed | Refusal::UnknownDevice) => {
                around.peers.on_device_failed(leg);
                around.wishes.push(Wish::Degraded);
                self.replace(around, token, index, node, out);
            }
            Reply::Refused(Refusal::NoSpace) => {
                let bytes = total_len(&placed.shards[usize::from(index)].payload) as u64;
                around.peers.on_refused(leg, bytes);
                self.replace(around, token, index, node, out);
            }
            _ => self.replace(around, token, index, node, out),
        }
    }

    /// There will be no answer, or it is not waited for any more.
    pub(crate) fn on_put_lost(&mut self, around: &mut Around<'_>, put: Put, out: Out) {
        if self.awaits(put).is_some() {
            self.replace(around, put.job, put.shard.index, put.node, out);
        }
    }

    /// Shards under way to a node that is out go elsewhere.
    pub(crate) fn replace_on(&mut self, around: &mut Around<'_>, node: NodeId, out: Out) {
        let mut lost = Vec::new();
        for (job, of) in self.jobs.iter() {
            let Some(placed) = &of.placed else { continue };
            for (index, leg) in placed.homes.iter().enumerate() {
                if leg.node == node {
                    lost.push(Put { job, shard: ShardId { segment: placed.id, index: index as u8 }, node });
                }
            }
        }
        for put in lost {
            self.on_put_lost(around, put, out);
        }
    }

    fn replace(&mut self, around: &mut Around<'_>, token: Token, index: u8, failed: NodeId, out: Out) {
        let job = self.jobs.get_mut(token).expect("a job under way");
        let keep = job.work.kind.keep();
        let placed = job.placed.as_mut().expect("a placed job");
        let shard = &mut placed.shards[usize::from(index)];
        shard.failed.push(failed);
        let avoid = shard.failed.clone();
        let bytes = total_len(&shard.payload) as u64;
        // What is left of another volume's it finds itself, when it opens.
        if placed.id.volume == around.basis.volume() {
            around.wishes.push(Wish::Stray(placed.homes[usize::from(index)], placed.no, index));
            around.peers.recheck(around.basis.now, failed);
        }
        // Where a node holds several of its shards another device of the node will do, where the node is there.
        let is_tried = avoid.len() > usize::from(placed.geometry.shard_count());
        let holds_several = placed.geometry.layout().is_nested() || around.basis.is_on_devices();
        let is_avoided = |node: &NodeId| !holds_several || is_tried || !around.peers.is_usable(*node);
        let avoid: Vec<NodeId> = avoid.into_iter().filter(is_avoided).collect();
        let shape = Shape { geometry: &placed.geometry, homes: &placed.homes };
        let target = Target { keep, media: placed.media };
        match around.placer().place_again(shape, index, bytes, &avoid, target) {
            Some(home) => {
                placed.homes[usize::from(index)] = home;
                self.put(around, token, index, out);
            }
            None => self.restart(around, token),
        }
    }

    /// Gives the id up for good and parks the job: the next tick begins it anew with what nodes are there.
    fn restart(&mut self, around: &mut Around<'_>, token: Token) {
        let job = self.jobs.get_mut(token).expect("a job under way");
        job.restarts += 1;
        let placed = job.placed.take().expect("a placed job");
        assert!(!placed.committing, "a segment whose shards are durable is not begun again");
        if placed.id.volume != around.basis.volume() {
            return;
        }
        // What a device that hangs has yet to write comes after the deletion.
        let unwritten = placed.homes.iter().enumerate().filter(|(index, _)| !placed.shards[*index].durable);
        around.wishes.extend(unwritten.map(|(index, home)| Wish::Stray(*home, placed.no, index as u8)));
        around.wishes.push(Wish::Abandon(placed.no, placed.homes));
    }

    // ---- ends ----

    /// All shards are durable: commit (data), or hand the pointer on (metadata).
    fn on_durable(&mut self, around: &mut Around<'_>, token: Token) {
        let job = self.jobs.get_mut(token).expect("a job under way");
        let placed = job.placed.as_mut().expect("a placed job");
        placed.committing = true;
        if job.work.kind.is_meta() {
            return self.on_meta_durable(around, token);
        }
        placed.shards.clear();
        let commit = SegmentCommit {
            segment: placed.no,
            geometry: placed.geometry,
            homes: placed.homes.clone(),
            extents: job.work.extents.clone(),
            crcs: placed.checks.clone(),
        };
        let record = match &placed.lengths {
            None => Record::Commit(commit),
            Some(lengths) => Record::CommitPacked(Box::new(PackedCommit { commit, lengths: lengths.clone() })),
        };
        around.wishes.push(Wish::Commit(token, record));
    }

    fn on_meta_durable(&mut self, around: &mut Around<'_>, token: Token) {
        let job = self.jobs.remove(token).expect("a job under way");
        let Placed { no, id, geometry, homes, .. } = job.placed.expect("a placed job");
        let named = match job.work.kind {
            JobKind::Runs { .. } => Some((Kind::Run, Named::of_metadata(1))),
            JobKind::Dependent { .. } => None,
            _ => Some((Kind::Meta, Named::NOTHING)),
        };
        if let Some((kind, live)) = named {
            around.segments.settle(no);
            let info = SegmentInfo { live, ..SegmentInfo::new(kind, geometry, homes.clone()) };
            around.segments.insert(no, info);
        }
        around.wishes.push(Wish::Durable(Written { kind: job.work.kind, id, geometry, homes }));
    }

    /// The record of a segment of data is in the log: what it was written for, its blocks, and the bytes of its payload.
    pub(crate) fn on_committed(&mut self, segments: &mut Segments, token: Token) -> (JobKind, u64, u64) {
        let job = self.jobs.remove(token).expect("a committed job was under way");
        assert!(!job.work.kind.is_meta(), "metadata has no commit record");
        let placed = job.placed.expect("a placed job");
        if let Some(codec) = job.codec {
            segments.note_tried(placed.no, codec);
        }
        let payload_blocks = u64::from(placed.geometry.payload_blocks);
        (job.work.kind, job.work.crcs.len() as u64, payload_blocks * BLOCK_BYTES as u64)
    }
}

/// The shards of a segment, and by what the map is to know its blocks.
fn encode(
    config: &Config,
    work: &Work,
    id: SegmentId,
    geometry: &Geometry,
    encryptions: &mut Vec<Encryption>,
) -> (Vec<Shard>, Vec<BlockCrc>) {
    let is_meta = work.kind.is_meta();
    let index = if is_meta { SegmentIndex::Meta } else { SegmentIndex::Data(work.extents.clone()) };
    let is_encrypted = !is_meta && config.key.is_some();
    let packed = work.packed_in(geometry);
    let plain =
        || EncryptedPayload { payload: work.payload.clone(), crcs: work.crcs.clone(), checks: work.crcs.clone() };
    let EncryptedPayload { payload, crcs, checks } = match packed {
        Some(packed) => {
            let encrypted = encrypt_units(config, id, packed, encryptions);
            let (bytes, checks) = encrypted.unwrap_or_else(|| (packed.bytes.clone(), work.crcs.clone()));
            let padding = geometry.payload_blocks as usize * BLOCK_BYTES - bytes.len();
            let payload: Vec<Buf> = [bytes].into_iter().chain((padding > 0).then(|| Buf::zeroes(padding))).collect();
            let crcs = payload.iter().flat_map(|buf| block_crcs(buf)).collect();
            EncryptedPayload { payload, crcs, checks }
        }
        None if is_encrypted => encrypt_payload(config, id, &work.payload, encryptions).expect("there is a key"),
        None => plain(),
    };
    let pieces = pieces_of(payload, crcs, geometry);
    let width = geometry.code_width();
    let shards = (0..geometry.shard_count())
        .map(|i| {
            let (data, block_crcs) = &pieces[usize::from(i % width)];
            let header = ShardHeader {
                grid: config.grid,
                shard: ShardId { segment: id, index: i },
                geometry: *geometry,
                block_crcs: block_crcs.clone(),
                index: index.clone(),
                payload_crcs: checks.clone(),
                sealed: is_encrypted,
                packed: packed
                    .map(|packed| segment::PackedPayload { lengths: packed.lengths.clone(), fingerprints: Vec::new() }),
            };
            let header = header.encode();
            let header_blocks = (header.len() / BLOCK_BYTES) as u32;
            let mut payload = vec![Buf::copy_from(&header)];
            payload.extend(data.iter().cloned());
            Shard { payload, header_blocks, durable: false, failed: Vec::new() }
        })
        .collect();
    (shards, checks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::Effect;
    use crate::peers::tests::{leg, peers, sent};
    use holdfast_base::{Effects, Instant, block_crcs};
    use holdfast_format::record::Source;

    /// What the writer works with, and itself.
    struct Rig {
        basis: Basis,
        peers: Peers,
        segments: Segments,
        rotation: Rotation,
        rng: Prng,
        counters: Counters,
        writer: SegmentWriter,
        wishes: Vec<Wish>,
        out: Effects<Effect>,
    }

    impl Rig {
        fn new(layout: &str, devices_by_node: &[u32]) -> Rig {
            let mut basis = crate::basis::tests::basis(layout);
            basis.now = Instant(10_000_000_000);
            let peers = peers(basis.now, devices_by_node);
            Rig {
                basis,
                peers,
                segments: Segments::default(),
                rotation: Rotation::default(),
                rng: Prng::new(1),
                counters: Counters::default(),
                writer: SegmentWriter::default(),
                wishes: Vec::new(),
                out: Effects::new(),
            }
        }

        fn with<T>(&mut self, act: impl FnOnce(&mut SegmentWriter, &mut Around<'_>, Out) -> T) -> T {
            let mut around = Around {
                basis: &self.basis,
                peers: &mut self.peers,
                segments: &mut self.segments,
                rotation: &mut self.rotation,
                rng: &mut self.rng,
                counters: &mut self.counters,
                encryptions: &mut Vec::new(),
                wishes: &mut self.wishes,
            };
            let outcome = act(&mut self.writer, &mut around, &mut self.out);
            self.writer.verify();
            outcome
        }

        fn start(&mut self, kind: JobKind) -> Vec<Put> {
            let payload = Buf::copy_from(&[7; 2 * BLOCK_BYTES]);
            let crcs = block_crcs(&payload);
            let extents = vec![CommitExtent { key: holdfast_base::Key(4), blocks: 2, source: Source::Direct }];
            let work = Work { extents, payload: vec![payload], crcs, ..Work::new(kind) };
            self.with(|writer, around, out| writer.start(around, work, out));
            self.puts()
        }

        /// Shards that were sent since the last look.
        fn puts(&mut self) -> Vec<Put> {
            let put = |(node, token, request)| match request {
                Request::PutShard { shard, .. } => {
                    let call = self.peers.on_answer(self.basis.now, node, token).expect("it was asked");
                    let Purpose::PutShard { job, .. } = call.purpose else { panic!("{:?}", call.purpose) };
                    Put { node, job, shard }
                }
                other => panic!("{other:?}"),
            };
            sent(&mut self.out).into_iter().map(put).collect()
        }

        fn answer(&mut self, put: Put, reply: &Reply) {
            self.with(|writer, around, out| writer.on_put(around, put, reply, out));
        }

        fn take_wishes(&mut self) -> Vec<Wish> {
            std::mem::take(&mut self.wishes)
        }
    }

    fn data() -> JobKind {
        JobKind::Destage { entries: vec![Lsn(3)] }
    }

    #[test]
    fn data_is_committed_once_every_shard_is_durable() {
        let mut rig = Rig::new("parity:2+1", &[1, 1, 1]);
        let puts = rig.start(data());
        assert_eq!(puts.len(), 3);
        for put in &puts[..2] {
            rig.answer(*put, &Reply::Done);
        }
        assert!(rig.take_wishes().is_empty(), "a shard is on its way");
        assert_eq!(rig.writer.unwritten_destage_bytes(), 2 * BLOCK_BYTES as u64);
        rig.answer(puts[2], &Reply::Done);
        let wishes = rig.take_wishes();
        let [Wish::Commit(job, Record::Commit(commit))] = &wishes[..] else { panic!("{wishes:?}") };
        assert_eq!((commit.segment, commit.homes.len()), (SegmentNo::from(puts[0].shard.segment), 3));
        assert!(rig.segments.is_unsettled(commit.segment), "it is not named yet");
        assert_eq!(rig.writer.unwritten_destage_bytes(), 0);
        // What comes late is nobody's.
        rig.answer(puts[2], &Reply::Refused(Refusal::NoSpace));
        assert!(rig.take_wishes().is_empty() && rig.puts().is_empty());
        let (kind, blocks, _) = rig.writer.on_committed(&mut rig.segments, *job);
        assert!(matches!(kind, JobKind::Destage { entries } if entries == [Lsn(3)]));
        assert!(blocks == 2 && rig.writer.is_empty());
    }

    #[test]
    fn metadata_is_in_the_table_when_it_is_durable() {
        let mut rig = Rig::new("mirror:2", &[1, 1]);
        for put in rig.start(JobKind::Leaves) {
            rig.answer(put, &Reply::Done);
        }
        let wishes = rig.take_wishes();
        let [Wish::Durable(Written { kind: JobKind::Leaves, id, .. })] = &wishes[..] else { panic!("{wishes:?}") };
        let no = SegmentNo::from(*id);
        assert!(rig.segments.get(no).is_some_and(|info| info.kind == Kind::Meta) && !rig.segments.is_unsettled(no));
        assert!(rig.writer.is_empty());
    }

    #[test]
    fn a_shard_that_is_refused_goes_elsewhere_under_its_id() {
        let mut rig = Rig::new("mirror:2", &[1, 1, 1]);
        let puts = rig.start(data());
        let first = puts[0];
        rig.answer(first, &Reply::Refused(Refusal::NoSpace));
        let again = rig.puts();
        let [other] = again[..] else { panic!("{again:?}") };
        assert_eq!(other.shard, first.shard);
        assert!(puts.iter().all(|put| put.node != other.node), "on a third node");
        let wishes = rig.take_wishes();
        let [Wish::Stray(home, no, 0)] = wishes[..] else { panic!("{wishes:?}") };
        assert_eq!((home.node, no), (first.node, SegmentNo::from(first.shard.segment)));
        // The first answers after all: it is not its home any more.
        rig.answer(first, &Reply::Done);
        rig.answer(puts[1], &Reply::Done);
        assert!(rig.take_wishes().is_empty());
        let purpose = Purpose::PutShard { job: other.job, shard: other.shard };
        assert_eq!(rig.writer.put_doublings(&purpose), 1);
        rig.answer(other, &Reply::Done);
        let wishes = rig.take_wishes();
        assert!(
            matches!(&wishes[..], [Wish::Commit(_, Record::Commit(commit))] if commit.homes[0] == leg(other.node.0, 0))
        );
    }

    #[test]
    fn where_there_is_no_other_node_the_id_is_given_up_and_a_new_one_taken() {
        let mut rig = Rig::new("mirror:2", &[1, 1]);
        let puts = rig.start(data());
        let no = SegmentNo::from(puts[0].shard.segment);
        rig.answer(puts[0], &Reply::Refused(Refusal::DeviceFailed));
        let wishes = rig.take_wishes();
        let [Wish::Degraded, Wish::Stray(..), Wish::Stray(..), Wish::Stray(..), Wish::Abandon(given_up, homes)] =
            &wishes[..]
        else {
            panic!("{wishes:?}")
        };
        assert!(*given_up == no && homes.len() == 2);
        // With one device left there is a place for copies on one node only after a pause; then with what there is.
        let retried = rig.with(|writer, around, out| writer.retry_parked(around, out));
        assert!(matches!(&retried[..], [(_, JobKind::Destage { .. })]), "{retried:?}");
        rig.peers.on_up(rig.basis.now, NodeId(3), u32::MAX, vec![crate::peers::tests::stat(leg(3, 0))]);
        let retried = rig.with(|writer, around, out| writer.retry_parked(around, out));
        assert!(retried.is_empty());
        let again = rig.puts();
        assert!(again.iter().all(|put| SegmentNo::from(put.shard.segment) != no), "an id is used once");
        assert_eq!(again.len(), 2);
    }

    #[test]
    fn parked_jobs_of_no_use_are_dropped_and_placed_ones_stay() {
        let mut rig = Rig::new("mirror:2", &[]);
        assert!(rig.start(data()).is_empty() && rig.start(JobKind::Leaves).is_empty());
        rig.writer.drop_parked(JobKind::is_meta);
        assert_eq!(rig.writer.len(), 1);
        let mut rig = Rig::new("mirror:2", &[1, 1]);
        assert_eq!(rig.start(data()).len(), 2);
        rig.writer.drop_parked(JobKind::is_meta);
        assert_eq!(rig.writer.len(), 1);
    }
}
