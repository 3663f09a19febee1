//! Writing one segment: place, encode, put every shard, then commit.
//!
//! States: parked (no room or too few nodes: tried again on ticks) -> putting -> committing (all shards durable, commit
//! record in the log) -> done. A shard whose node is lost, hung or full goes to another node under the same id, with
//! the same bytes; if there is none, the whole segment begins again under a new id and a layout that fits, and the old
//! id is freed by a record (protocol rules 16 and 17). Bulk writes and cleaning don't stay parked on a grid that is
//! full.

use crate::api::Lane;
use crate::controller::{Controller, Out};
use crate::log::window::Done;
use crate::peers::Purpose;
use crate::segment::encrypt::SealedPayload;
use crate::segment::{Kind, SegmentInfo};
use crate::space::{Keep, Shape, Target, Topology};
use holdfast_base::{
    BLOCK_BYTES, BlockCrc, Buf, BufMut, Epoch, Key, Lsn, MediaClass, NodeId, SegmentId, ShardId, Slab, Token, VolumeId,
    block_crcs, crc32c,
};
use holdfast_erasure::Code;
use holdfast_format::geometry::Geometry;
use holdfast_format::ledger::Leg;
use holdfast_format::record::{CommitExtent, Record, SegmentCommit, SegmentNo};
use holdfast_format::segment::{SegmentIndex, ShardHeader};
use holdfast_format::wire::{Refusal, Reply, Request};

/// Up to about ten minutes, from 0.6 s on.
const PUT_DOUBLINGS_MAX: usize = 10;

/// Why a segment is written, and who is told when it is part of the volume.
#[derive(Debug, Clone)]
pub(crate) enum JobKind {
    /// Log entries leave the log.
    Destage { entries: Vec<Lsn> },
    /// The cleaner moves what lives, out of mostly dead segments or out of the first tier.
    Clean { rotates: bool },
    /// Bulk writes: (write, first block, blocks).
    Direct { writes: Vec<(Token, Key, u64)> },
    /// Leaves of the map.
    Leaves,
    /// A part of a checkpoint.
    Runs { part: usize },
    /// A part of the first checkpoint of another volume.
    Fork { volume: VolumeId, epoch: Epoch, part: usize },
}

impl JobKind {
    pub(crate) fn is_meta(&self) -> bool {
        matches!(self, JobKind::Leaves | JobKind::Runs { .. } | JobKind::Fork { .. })
    }

    fn keep(&self) -> Keep {
        match self {
            JobKind::Destage { .. } | JobKind::Direct { .. } => Keep::FromGuests,
            // What leaves a tier gives the other nothing back.
            JobKind::Clean { rotates: true } => Keep::FromGuests,
            JobKind::Clean { rotates: false } => Keep::FromCleaner,
            JobKind::Leaves | JobKind::Runs { .. } => Keep::Nothing,
            // What is refused leaves shards that nobody knows before the volume is deleted.
            JobKind::Fork { .. } => Keep::FromCleaner,
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
pub(crate) struct SegmentJob {
    work: Work,
    /// Absent while parked.
    placed: Option<Placed>,
    /// Times that it was begun anew.
    restarts: usize,
}

#[derive(Debug)]
struct Placed {
    no: SegmentNo,
    /// Of this volume, or of one that is being forked.
    id: SegmentId,
    geometry: Geometry,
    homes: Vec<Leg>,
    /// Of the homes, where that matters.
    media: Option<MediaClass>,
    shards: Vec<Shard>,
    /// By which the map knows the payload's blocks: checksums, or what tells that they open.
    checks: Vec<BlockCrc>,
    committing: bool,
}

impl SegmentJob {
    pub(crate) fn is_parked(&self) -> bool {
        self.placed.is_none()
    }

    /// For a person who looks into a simulation that failed.
    pub(crate) fn summary(&self) -> String {
        let (kind, blocks) = (&self.work.kind, self.work.crcs.len());
        let placed = self.placed.as_ref().map(|p| (p.no, &p.homes, p.committing));
        format!("{kind:?} of {blocks} blocks, placed {placed:?}")
    }

    /// Shape and homes of a segment of guests' data that is on its way.
    pub(crate) fn placed_data(&self) -> Option<(&Geometry, &[Leg])> {
        let placed = self.placed.as_ref().filter(|_| !self.work.kind.is_meta())?;
        Some((&placed.geometry, &placed.homes))
    }

    pub(crate) fn kind(&self) -> &JobKind {
        &self.work.kind
    }
}

impl Controller {
    pub(crate) fn start_job(&mut self, work: Work, out: Out) -> Token {
        let payload_blocks: usize = work.payload.iter().map(|b| b.len() / BLOCK_BYTES).sum();
        assert_eq!(payload_blocks, work.crcs.len(), "a checksum a block");
        let token = self.jobs.insert(SegmentJob { work, placed: None, restarts: 0 });
        self.place_job(token, out);
        token
    }

    /// Gives a parked job an id and homes, and sends its shards. Stays parked where there is no room.
    fn place_job(&mut self, token: Token, out: Out) {
        let job = self.jobs.get(token).expect("a job under way");
        let blocks = job.work.crcs.len() as u32;
        let kind = job.work.kind.clone();
        let Some((geometry, homes, media)) = self.find_homes(&kind, blocks) else { return };
        if !kind.is_meta() {
            self.rotation.on_placed(Topology::new(&self.basis, &self.peers), &kind, &geometry, &homes);
        }
        let (volume, epoch) = self.is_fork_job(token).unwrap_or((self.basis.config.volume, self.epoch()));
        let no = self.segments.take_number(epoch);
        let id = no.of(volume);
        if volume == self.basis.config.volume {
            self.segments.unsettle(no);
        }
        let (shards, checks) = self.encode(token, id, &geometry);
        let count = shards.len() as u8;
        let job = self.jobs.get_mut(token).expect("a job under way");
        job.placed = Some(Placed { no, id, geometry, homes, media, shards, checks, committing: false });
        self.counters.segments_written += 1;
        for index in 0..count {
            // A shard that can't be sent anywhere parks the job again.
            if self.jobs.get(token).is_some_and(|j| j.placed.as_ref().is_some_and(|p| p.no == no)) {
                self.put_shard(token, index, out);
            }
        }
    }

    /// The first place with room for a segment of so many blocks: its shape, its homes, and their class of media.
    fn find_homes(&mut self, kind: &JobKind, blocks: u32) -> Option<(Geometry, Vec<Leg>, Option<MediaClass>)> {
        let places = self.topology().places(kind, self.rotation.fill_per_mille(self.topology()));
        places.into_iter().find_map(|place| {
            let geometry = Geometry::new(place.layout, blocks);
            let shard_bytes = (u64::from(geometry.shard_blocks()) + 8) * BLOCK_BYTES as u64;
            Some((geometry, self.placer().place_segment(place, shard_bytes, kind.keep())?, place.media))
        })
    }

    /// Volume and epoch of the ids that a job's shards get, where they are not ours.
    fn is_fork_job(&self, token: Token) -> Option<(VolumeId, Epoch)> {
        match self.jobs.get(token)?.work.kind {
            JobKind::Fork { volume, epoch, .. } => Some((volume, epoch)),
            _ => None,
        }
    }

    /// The shards of a segment, and by what the map is to know its blocks.
    fn encode(&mut self, token: Token, id: SegmentId, geometry: &Geometry) -> (Vec<Shard>, Vec<BlockCrc>) {
        let work = &self.jobs.get(token).expect("a job under way").work;
        let is_meta = work.kind.is_meta();
        let index = if is_meta { SegmentIndex::Meta } else { SegmentIndex::Data(work.extents.clone()) };
        let (payload, crcs) = (work.payload.clone(), work.crcs.clone());
        let sealed = if is_meta { None } else { self.sealed_payload(id, &payload) };
        let is_sealed = sealed.is_some();
        let SealedPayload { payload, crcs, checks } =
            sealed.unwrap_or_else(|| SealedPayload { payload, checks: crcs.clone(), crcs });
        let pieces = match geometry.parity {
            0 => mirror_shards(payload, crcs),
            _ => code_shards(&payload, &crcs, geometry),
        };
        let width = geometry.code_width();
        let shards = (0..geometry.shard_count())
            .map(|i| {
                let (data, block_crcs) = &pieces[usize::from(i % width)];
                let header = ShardHeader {
                    grid: self.basis.config.grid,
                    shard: ShardId { segment: id, index: i },
                    geometry: *geometry,
                    block_crcs: block_crcs.clone(),
                    index: index.clone(),
                    payload_crcs: checks.clone(),
                    sealed: is_sealed,
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

    fn put_shard(&mut self, token: Token, index: u8, out: Out) {
        let job = self.jobs.get(token).expect("a job under way");
        let placed = job.placed.as_ref().expect("a placed job");
        let (shard, leg) = (&placed.shards[usize::from(index)], placed.homes[usize::from(index)]);
        let id = ShardId { segment: placed.id, index };
        let (volume, epoch) = self.is_fork_job(token).unwrap_or((self.basis.config.volume, self.epoch()));
        let request =
            Request::PutShard { device: leg.device, volume, epoch, shard: id, header_blocks: shard.header_blocks };
        let payload = shard.payload.clone();
        self.counters.segment_bytes_written += holdfast_base::buf::total_len(&payload) as u64;
        let purpose = Purpose::PutShard { job: token, shard: id };
        if self.send(leg.node, Lane::Bulk, purpose, request, payload, out).is_none() {
            self.replace_shard(token, index, leg.node, out);
        }
    }

    /// Whether an answer belongs to what the job is at: the same segment id, the same home, not durable yet.
    fn awaits_put(&self, token: Token, shard: ShardId, node: NodeId) -> Option<Leg> {
        let placed = self.jobs.get(token)?.placed.as_ref()?;
        if placed.committing || placed.id != shard.segment {
            return None;
        }
        let leg = placed.homes[usize::from(shard.index)];
        (leg.node == node && !placed.shards[usize::from(shard.index)].durable).then_some(leg)
    }

    pub(crate) fn on_shard_put(&mut self, token: Token, shard: ShardId, node: NodeId, reply: &Reply, out: Out) {
        let Some(leg) = self.awaits_put(token, shard, node) else { return };
        let index = shard.index;
        let placed = self.jobs.get_mut(token).and_then(|j| j.placed.as_mut()).expect("just seen");
        match reply {
            Reply::Done => {
                placed.shards[usize::from(index)].durable = true;
                if placed.shards.iter().all(|s| s.durable) {
                    self.on_segment_durable(token, out);
                }
            }
            Reply::Refused(Refusal::DeviceFailed | Refusal::UnknownDevice) => {
                self.peers.on_device_failed(leg);
                self.care.repairer.note_degraded();
                self.replace_shard(token, index, node, out);
            }
            Reply::Refused(Refusal::NoSpace) => {
                let shard = &placed.shards[usize::from(index)];
                self.peers.on_refused(leg, holdfast_base::buf::total_len(&shard.payload) as u64);
                self.replace_shard(token, index, node, out);
            }
            _ => self.replace_shard(token, index, node, out),
        }
    }

    pub(crate) fn on_put_lost(&mut self, token: Token, shard: ShardId, node: NodeId, out: Out) {
        if self.awaits_put(token, shard, node).is_some() {
            self.replace_shard(token, shard.index, node, out);
        }
    }

    /// Shards under way to a node that is out go elsewhere.
    pub(crate) fn replace_shards_on(&mut self, node: NodeId, out: Out) {
        let mut moves = Vec::new();
        for (token, job) in self.jobs.iter() {
            let Some(placed) = &job.placed else { continue };
            for (index, leg) in placed.homes.iter().enumerate() {
                if leg.node == node {
                    moves.push((token, ShardId { segment: placed.id, index: index as u8 }));
                }
            }
        }
        for (token, shard) in moves {
            self.on_put_lost(token, shard, node, out);
        }
    }

    fn replace_shard(&mut self, token: Token, index: u8, failed: NodeId, out: Out) {
        let job = self.jobs.get_mut(token).expect("a job under way");
        let keep = job.work.kind.keep();
        let placed = job.placed.as_mut().expect("a placed job");
        let shard = &mut placed.shards[usize::from(index)];
        shard.failed.push(failed);
        let stray = (placed.homes[usize::from(index)], placed.no, index);
        let (geometry, homes, media) = (placed.geometry, placed.homes.clone(), placed.media);
        let avoid = shard.failed.clone();
        let bytes = holdfast_base::buf::total_len(&shard.payload) as u64;
        // What is left of another volume's it finds itself, when it opens.
        if placed.id.volume == self.basis.config.volume {
            self.care.repairer.note_stray(stray);
            self.peers.recheck(self.basis.now, failed);
        }
        // Where a node holds several of its shards another device of the node will do, where the node is there.
        let is_tried = avoid.len() > usize::from(geometry.shard_count());
        let holds_several = geometry.layout().is_nested() || self.basis.is_on_devices();
        let is_avoided = |node: &NodeId| !holds_several || is_tried || !self.peers.is_usable(*node);
        let avoid: Vec<NodeId> = avoid.into_iter().filter(is_avoided).collect();
        match self.placer().place_again(
            Shape { geometry: &geometry, homes: &homes },
            index,
            bytes,
            &avoid,
            Target { keep, media },
        ) {
            Some(home) => {
                let placed = self.jobs.get_mut(token).and_then(|j| j.placed.as_mut()).expect("a placed job");
                placed.homes[usize::from(index)] = home;
                self.put_shard(token, index, out);
            }
            None => self.restart_job(token, out),
        }
    }

    /// Gives the id up for good and parks the job: the next tick begins it anew with what nodes are there.
    fn restart_job(&mut self, token: Token, out: Out) {
        let job = self.jobs.get_mut(token).expect("a job under way");
        job.restarts += 1;
        let placed = job.placed.take().expect("a placed job");
        assert!(!placed.committing, "a segment whose shards are durable is not begun again");
        if placed.id.volume != self.basis.config.volume {
            return;
        }
        // What a device that hangs has yet to write comes after the deletion.
        for (index, home) in placed.homes.iter().enumerate().filter(|(index, _)| !placed.shards[*index].durable) {
            self.care.repairer.note_stray((*home, placed.no, index as u8));
        }
        self.abandon_segment(placed.no, placed.geometry, placed.homes, out);
    }

    /// Of the log, what is in jobs whose shards are not all durable.
    pub(crate) fn unwritten_destage_bytes(&self) -> u64 {
        let is_unwritten = |job: &SegmentJob| job.placed.as_ref().is_none_or(|placed| !placed.committing);
        let destaged = self.jobs.iter().filter(|(_, job)| matches!(job.kind(), JobKind::Destage { .. }));
        let blocks = destaged.filter(|(_, job)| is_unwritten(job)).map(|(_, job)| job.work.crcs.len() as u64);
        blocks.sum::<u64>() * BLOCK_BYTES as u64
    }

    pub(crate) fn retry_parked_jobs(&mut self, out: Out) {
        let parked: Vec<Token> = self.jobs.iter().filter(|(_, j)| j.is_parked()).map(|(t, _)| t).collect();
        for token in parked {
            self.place_job(token, out);
            // Nodes enough, and still no place: the grid is full. Bulk writers hear of it; other work waits for space.
            let full =
                self.topology().layout_now().is_some() && self.jobs.get(token).is_some_and(SegmentJob::is_parked);
            match self.jobs.get(token).map(|j| j.work.kind.clone()) {
                Some(JobKind::Direct { writes }) if full && self.room_expected_at().is_none() => {
                    self.jobs.remove(token);
                    self.on_direct_refused(writes, out);
                }
                // Collected anew: of what it holds much may have been overwritten when there is room again.
                Some(JobKind::Destage { entries }) if full => {
                    self.jobs.remove(token);
                    self.log.destage_again(&entries);
                    self.room.on_destage_refused(self.basis.now);
                }
                // While a pass waits no fold tells which segments are dead: it must not wait for the room they take.
                Some(JobKind::Fork { volume, .. }) if !self.is_writing_fork(volume) => {
                    self.jobs.remove(token);
                }
                Some(JobKind::Clean { .. }) if full => {
                    self.jobs.remove(token);
                    self.on_clean_refused();
                }
                _ => {}
            }
        }
    }

    /// All shards are durable: commit (data), or hand the pointer on (metadata).
    fn on_segment_durable(&mut self, token: Token, out: Out) {
        let job = self.jobs.get_mut(token).expect("a job under way");
        let placed = job.placed.as_mut().expect("a placed job");
        placed.committing = true;
        if job.work.kind.is_meta() {
            return self.on_meta_durable(token, out);
        }
        let commit = SegmentCommit {
            segment: placed.no,
            geometry: placed.geometry,
            homes: placed.homes.clone(),
            extents: job.work.extents.clone(),
            crcs: placed.checks.clone(),
        };
        placed.shards.clear();
        self.append_control(Record::Commit(commit), Done::Committed(token), out);
    }

    fn on_meta_durable(&mut self, token: Token, out: Out) {
        let job = self.jobs.remove(token).expect("a job under way");
        let placed = job.placed.expect("a placed job");
        let (kind, live) = match job.work.kind {
            JobKind::Fork { part, .. } => return self.on_fork_durable(placed.id, part, placed.geometry, &placed.homes),
            JobKind::Runs { .. } => (Kind::Run, 1),
            _ => (Kind::Meta, 0),
        };
        self.segments.settle(placed.no);
        let info = SegmentInfo {
            kind,
            geometry: placed.geometry,
            homes: placed.homes,
            live,
            shadowed: 0,
            kept: false,
            born: 0,
            middle: 0,
        };
        self.segments.insert(placed.no, info);
        match job.work.kind {
            JobKind::Leaves => self.on_leaves_durable(placed.no, out),
            JobKind::Runs { part } => self.on_runs_durable(part, placed.no, out),
            _ => unreachable!("only metadata comes here"),
        }
    }

    pub(crate) fn on_committed(&mut self, token: Token, out: Out) {
        let job = self.jobs.remove(token).expect("a committed job was under way");
        match job.work.kind {
            JobKind::Destage { entries } => {
                self.counters.destaged_bytes += (job.work.crcs.len() * BLOCK_BYTES) as u64;
                self.on_destaged(&entries);
            }
            JobKind::Clean { .. } => self.on_cleaned(job.work.crcs.len() as u64, out),
            JobKind::Direct { writes } => self.on_direct_committed(writes, out),
            JobKind::Leaves | JobKind::Runs { .. } | JobKind::Fork { .. } => {
                unreachable!("metadata has no commit record")
            }
        }
    }
}

/// Of each shard of one copy: its blocks, and their checksums.
type ShardPieces = Vec<(Vec<Buf>, Vec<BlockCrc>)>;

/// How often the time that a call may take was doubled: of a shard, with each place that was tried. Where all disks
/// that are left are slow the segment is written at their pace, and not begun anew for ever.
pub(crate) fn put_doublings(jobs: &Slab<SegmentJob>, purpose: &Purpose) -> u32 {
    let Purpose::PutShard { job, shard } = purpose else { return 0 };
    let Some(job) = jobs.get(*job) else { return 0 };
    let of_shard = job.placed.as_ref().and_then(|placed| placed.shards.get(usize::from(shard.index)));
    let tried = job.restarts + of_shard.map_or(0, |shard| shard.failed.len());
    tried.min(PUT_DOUBLINGS_MAX) as u32
}

/// Handles beyond this many are gathered into one: a send takes no more, and small pieces cost more than a copy.
const HANDLES_MAX: usize = 64;

fn gathered(handles: Vec<Buf>) -> Vec<Buf> {
    if handles.len() > HANDLES_MAX { vec![holdfast_base::buf::concat(&handles)] } else { handles }
}

fn mirror_shards(payload: Vec<Buf>, crcs: Vec<BlockCrc>) -> ShardPieces {
    vec![(gathered(payload), crcs)]
}

/// Data shards by stripes, then parity over them.
fn code_shards(payload: &[Buf], all_crcs: &[BlockCrc], geometry: &Geometry) -> ShardPieces {
    let mut pieces: ShardPieces = vec![Default::default(); usize::from(geometry.data)];
    let mut block = 0_u32;
    for buf in payload {
        let mut at = 0;
        while at < buf.len() {
            // A shard's blocks come in order.
            let run = geometry.run_from(block).min(((buf.len() - at) / BLOCK_BYTES) as u32);
            let (handles, crcs) = &mut pieces[usize::from(geometry.locate(block).position)];
            let end = at + run as usize * BLOCK_BYTES;
            handles.push(buf.slice(at..end));
            crcs.extend_from_slice(&all_crcs[block as usize..(block + run) as usize]);
            at = end;
            block += run;
        }
    }
    for (handles, crcs) in &mut pieces {
        let padding = geometry.shard_blocks() as usize - crcs.len();
        if padding > 0 {
            handles.push(Buf::zeroes(padding * BLOCK_BYTES));
            crcs.extend(std::iter::repeat_n(zero_block_crc(), padding));
        }
        *handles = gathered(std::mem::take(handles));
    }
    let shards: Vec<&[Buf]> = pieces.iter().map(|(handles, _)| &handles[..]).collect();
    let parities = parity_shards(&shards, geometry);
    pieces.extend(parities.into_iter().map(|(parity, crcs)| (vec![parity], crcs)));
    pieces
}

/// The parity shards over data shards of equal length, each in any number of pieces.
fn parity_shards(shards: &[&[Buf]], geometry: &Geometry) -> Vec<(Buf, Vec<BlockCrc>)> {
    let shard_bytes = geometry.shard_blocks() as usize * BLOCK_BYTES;
    let code = Code::new(geometry.data, geometry.parity).expect("geometries in use are valid");
    let mut parities: Vec<BufMut> = (0..geometry.parity).map(|_| BufMut::new(shard_bytes)).collect();
    let mut crcs = vec![Vec::with_capacity(geometry.shard_blocks() as usize); parities.len()];
    let mut rests: Vec<Pieces<'_>> = shards.iter().map(|handles| Pieces::new(handles)).collect();
    let mut at = 0;
    while at < shard_bytes {
        // In steps that the cache holds until they are summed.
        let longest = rests.iter().map(Pieces::run_bytes).min().expect("a code has data shards");
        let end = at + longest.min(geometry.stripe_blocks as usize * BLOCK_BYTES);
        let sources: Vec<&[u8]> = rests.iter_mut().map(|rest| rest.take(end - at)).collect();
        let mut targets: Vec<&mut [u8]> = parities.iter_mut().map(|p| &mut p[at..end]).collect();
        code.encode(&sources, &mut targets);
        for (target, crcs) in targets.iter().zip(&mut crcs) {
            crcs.extend(block_crcs(target));
        }
        at = end;
    }
    parities.into_iter().map(BufMut::freeze).zip(crcs).collect()
}

/// Handles read one after the other.
struct Pieces<'a> {
    handles: &'a [Buf],
    /// Bytes of the first handle that were taken.
    taken: usize,
}

impl<'a> Pieces<'a> {
    fn new(handles: &'a [Buf]) -> Pieces<'a> {
        Pieces { handles, taken: 0 }
    }

    /// Bytes that lie next to each other from here on.
    fn run_bytes(&self) -> usize {
        self.handles.first().map_or(0, |h| h.len() - self.taken)
    }

    fn take(&mut self, count: usize) -> &'a [u8] {
        let first = &self.handles[0];
        let bytes = &first[self.taken..self.taken + count];
        self.taken += count;
        if self.taken == first.len() {
            self.handles = &self.handles[1..];
            self.taken = 0;
        }
        bytes
    }
}

fn zero_block_crc() -> BlockCrc {
    static CRC: std::sync::OnceLock<BlockCrc> = std::sync::OnceLock::new();
    *CRC.get_or_init(|| crc32c(&[0; BLOCK_BYTES]))
}
