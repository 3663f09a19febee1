//! Fetching a run of blocks out of one shard, from its holder if that answers in time, else from the others.
//!
//! States: direct (one holder asked) -> wide (late, lost or bad: every other shard of a code copy, and other copies,
//! are asked; first to add up wins) -> done | stalled (too few holders reachable: tried again when a node returns) | by
//! blocks (too few holders have all of it: each block is fetched by itself) | failed (too few have a block of it).
//! Bytes are checked against the map's checksums before anyone sees them; by their holder where they are metadata, or
//! where several give the run. If the volume's guests do without ([`Config::checked_reads`](crate::Config)) a holder's
//! own bytes go as they are, unchecked by both.

use crate::api::Lane;
use crate::controller::{Controller, Out};
use crate::map::Crcs;
use crate::peers::Purpose;
use crate::segment::Kind;
use crate::segment::encrypt::open_blocks;
use crate::sharing::family::LOOKS_MAX;
use holdfast_base::{BLOCK_BYTES, Buf, BufMut, NodeId, ShardId, Token, crc32c};
use holdfast_erasure::Code;
use holdfast_format::geometry::Geometry;
use holdfast_format::ledger::Leg;
use holdfast_format::record::SegmentNo;
use holdfast_format::wire::{Refusal, Reply, Request};
use std::collections::BTreeMap;

/// Who wants bytes out of a segment.
#[derive(Clone, Debug)]
pub(crate) enum Recipient {
    /// A guest's read: piece `part` of the operation.
    Read { op: Token, part: u32 },
    /// What reads want, or will want, of one shard: the run that begins at block `first`.
    Ahead { segment: SegmentNo, first: u32 },
    /// Leaves of the map that are read at once: piece `part` of their blocks.
    Leaves { span: u64, part: u32 },
    /// A run of the checkpoint that is being loaded: piece `part` of run `at`.
    Run { at: usize, part: u32 },
    /// Live data of a cleaner job: piece `part`.
    Clean { job: u64, part: u32 },
    /// Another fetch, of several blocks, which can't be had together: its block `at`.
    Block { of: Token, at: u32 },
}

impl Recipient {
    /// Whoever wants it opens each block by itself, and asks alone for what is damaged or can't be had.
    pub(crate) fn takes_parts(&self) -> bool {
        matches!(self, Recipient::Ahead { .. })
    }
}

/// Shape and homes of a segment that is not in the table (a checkpoint's, while opening).
pub(crate) type Shape = Box<(Geometry, Vec<Leg>)>;

#[derive(Debug)]
pub(crate) struct Fetch {
    wants: Recipient,
    segment: SegmentNo,
    shape: Option<Shape>,
    /// Position of the data shard that holds the run, and its blocks there.
    position: u8,
    block: u32,
    blocks: u32,
    /// The run's first block in the segment's payload.
    payload_block: u32,
    /// Checksums of the run's blocks; without them (metadata), who wants the bytes checks them, or nobody (guests'
    /// reads).
    crcs: Option<Crcs>,
    wide: bool,
    asked: u64,
    /// Where each was asked for last.
    asked_at: BTreeMap<u8, Leg>,
    bad: u64,
    got: BTreeMap<u8, Buf>,
    pub(crate) stalled: bool,
    /// How often a node had no room for it.
    refusals: u32,
    /// How often it waited until it was known where an origin's shards are.
    looks: u8,
    /// Its blocks, where each is fetched by itself.
    by_blocks: Option<Vec<Option<Buf>>>,
}

/// A fetch that a node had no room for so often goes wide.
const REFUSALS_MAX: u32 = 8;

/// Why a fetch ended without bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum FetchError {
    /// The segment was freed meanwhile: look the map up again.
    Gone,
    /// More shards are bad than the layout tolerates.
    Lost,
}

impl Fetch {
    fn new(
        wants: Recipient,
        (segment, shape): (SegmentNo, Option<Shape>),
        position: u8,
        (block, blocks, payload_block): (u32, u32, u32),
        crcs: Option<Crcs>,
    ) -> Fetch {
        Fetch {
            wants,
            segment,
            shape,
            position,
            block,
            blocks,
            payload_block,
            crcs,
            wide: false,
            asked: 0,
            asked_at: BTreeMap::new(),
            bad: 0,
            got: BTreeMap::new(),
            stalled: false,
            refusals: 0,
            looks: 0,
            by_blocks: None,
        }
    }
}

impl Controller {
    /// Starts to fetch payload blocks `block..block + blocks`, which lie in one stripe run of one shard.
    pub(crate) fn start_fetch(
        &mut self,
        wants: Recipient,
        segment: SegmentNo,
        shape: Option<Shape>,
        (block, blocks): (u32, u32),
        crcs: Option<Crcs>,
        out: Out,
    ) {
        let geometry = match &shape {
            Some(shape) => shape.0,
            None => match self.segments.get(segment) {
                Some(info) => info.geometry,
                None => return self.deliver(wants, Err(FetchError::Gone), out),
            },
        };
        let at = geometry.locate(block);
        assert!(blocks <= geometry.run_from(block), "a fetch stays in one run of one shard");
        let fetch = Fetch::new(wants, (segment, shape), at.position, (at.block, blocks, block), crcs);
        if self.fetches.is_full() {
            return self.deliver(fetch.wants, Err(FetchError::Gone), out);
        }
        let token = self.fetches.insert(fetch);
        self.ask_direct(token, out);
    }

    fn shape_of<'a>(&'a self, fetch: &'a Fetch) -> Option<(Geometry, &'a [Leg])> {
        match &fetch.shape {
            Some(shape) => Some((shape.0, &shape.1)),
            None => self.segments.get(fetch.segment).map(|info| (info.geometry, info.homes.as_slice())),
        }
    }

    /// Asks one holder of the run itself: of several copies one that is usable, on this machine if there is one, else
    /// spread by address. Where that would be a
    /// device that is bypassed, enough others are asked instead.
    fn ask_direct(&mut self, token: Token, out: Out) {
        let Some(fetch) = self.fetches.get(token) else { return };
        let Some((geometry, homes)) = self.shape_of(fetch) else {
            return self.finish_fetch(token, Err(FetchError::Gone), out);
        };
        let width = geometry.code_width();
        let first = (fetch.block >> 4) % u32::from(geometry.copies);
        let copies = (0..u32::from(geometry.copies)).map(|i| (first + i) % u32::from(geometry.copies));
        let usable: Vec<u8> = copies
            .map(|copy| copy as u8 * width + fetch.position)
            .filter(|index| self.peers.leg_usable(homes[usize::from(*index)]))
            .collect();
        let preferable = |index: &u8| self.peers.leg_preferable(homes[usize::from(*index)]);
        let is_near = |index: &u8| self.peers.is_near(homes[usize::from(*index)].node);
        let near = usable.iter().copied().find(|index| preferable(index) && is_near(index));
        let choice = near.or_else(|| usable.iter().copied().find(preferable));
        if choice.is_none() && !usable.is_empty() {
            let enough: Vec<u8> = (0..width)
                .filter(|index| *index != fetch.position && preferable(index))
                .take(geometry.data.into())
                .collect();
            let mask = enough.iter().fold(0, |mask, index| mask | 1 << index);
            if adds_up(&geometry, fetch.position, mask) {
                self.fetches.get_mut(token).expect("just seen").wide = true;
                let asked = enough.into_iter().filter(|index| self.ask_shard(token, *index, out)).count();
                if asked < usize::from(geometry.data) {
                    self.ask_wide(token, out);
                }
                return;
            }
        }
        match choice.or(usable.first().copied()) {
            Some(index) => {
                let is_near = is_near(&index);
                self.counters.shard_reads += 1;
                self.counters.near_reads += u64::from(is_near);
                if !self.ask_shard(token, index, out) {
                    self.hedge_fetch(token, out);
                }
            }
            None => self.hedge_fetch(token, out),
        }
    }

    fn ask_shard(&mut self, token: Token, index: u8, out: Out) -> bool {
        let Some(fetch) = self.fetches.get(token) else { return false };
        let Some((_, homes)) = self.shape_of(fetch) else { return false };
        let leg = homes[usize::from(index)];
        let shard = ShardId { segment: self.basis.segment_id(fetch.segment), index };
        // Compared with checksums once: here with the map's, or else where they lie. So is what is computed from
        // several: one flipped bit would spread.
        let by_map = fetch.crcs.is_some() || matches!(fetch.wants, Recipient::Read { .. } | Recipient::Ahead { .. });
        let checked = fetch.wide || !by_map;
        let (block, blocks) = (fetch.block, fetch.blocks);
        let request = Request::ReadShard { device: leg.device, shard, block, blocks, checked, cached: true };
        let purpose = Purpose::Fetch { fetch: token, shard: index };
        let sent = self.send(leg.node, Lane::Fast, purpose, request, Vec::new(), out).is_some();
        if sent && let Some(fetch) = self.fetches.get_mut(token) {
            fetch.asked |= 1 << index;
            fetch.asked_at.insert(index, leg);
        }
        sent
    }

    /// Goes wide: asks the other copies and, in a code, every other shard.
    pub(crate) fn hedge_fetch(&mut self, token: Token, out: Out) {
        let Some(fetch) = self.fetches.get_mut(token) else { return };
        if !fetch.wide {
            fetch.wide = true;
            self.counters.read_hedges += 1;
        }
        self.ask_wide(token, out);
    }

    fn ask_wide(&mut self, token: Token, out: Out) {
        let Some(fetch) = self.fetches.get(token) else { return };
        let Some((geometry, homes)) = self.shape_of(fetch) else {
            return self.finish_fetch(token, Err(FetchError::Gone), out);
        };
        let done_with = fetch.asked | fetch.bad | mask_of(&fetch.got);
        let open: Vec<(u8, Leg)> = (0..geometry.shard_count())
            .filter(|i| done_with >> i & 1 == 0)
            .map(|i| (i, homes[usize::from(i)]))
            .collect();
        let usable: Vec<u8> = open.iter().filter(|(_, l)| self.peers.leg_usable(*l)).map(|(i, _)| *i).collect();
        for index in &usable {
            self.ask_shard(token, *index, out);
        }
        let fetch = self.fetches.get(token).expect("still fetching");
        if !self.enough_coming(fetch) {
            // Suspects are asked only when the others don't suffice.
            let suspects: Vec<u8> = open
                .iter()
                .filter(|(i, l)| !usable.contains(i) && self.peers.is_up(l.node) && self.peers.device_serves(*l))
                .map(|(i, _)| *i)
                .collect();
            for index in suspects {
                self.ask_shard(token, index, out);
            }
        }
        self.settle_fetch(token, out);
    }

    /// Whether what was got and what is awaited can add up to the run.
    fn enough_coming(&self, fetch: &Fetch) -> bool {
        let Some((geometry, homes)) = self.shape_of(fetch) else { return false };
        let mut coming = mask_of(&fetch.got);
        for index in 0..geometry.shard_count() {
            if fetch.asked >> index & 1 == 1 && self.peers.leg_usable(homes[usize::from(index)]) {
                coming |= 1 << index;
            }
        }
        adds_up(&geometry, fetch.position, coming & !fetch.bad)
    }

    pub(crate) fn on_fetched(&mut self, token: Token, index: u8, reply: &Reply, payload: Buf, out: Out) {
        let Some(fetch) = self.fetches.get_mut(token) else { return };
        fetch.asked &= !(1 << index);
        let whole = payload.len() == fetch.blocks as usize * BLOCK_BYTES;
        match reply {
            Reply::Shard { .. } if whole => {
                fetch.got.insert(index, payload);
                self.settle_fetch(token, out);
            }
            Reply::Refused(Refusal::Busy) => {
                fetch.refusals += 1;
                self.refused_fetches.push(token);
            }
            _ => self.on_bad_shard(token, index, reply, out),
        }
    }

    fn on_bad_shard(&mut self, token: Token, index: u8, reply: &Reply, out: Out) {
        let home = self.shape_of(self.fetches.get(token).expect("checked by the caller"));
        let device = home.map(|(_, homes)| homes[usize::from(index)]);
        let fetch = self.fetches.get_mut(token).expect("checked by the caller");
        fetch.got.remove(&index);
        if device.is_some() && device != fetch.asked_at.get(&index).copied() {
            // It was moved meanwhile: where it was asked for it need not be any more.
            return self.hedge_fetch(token, out);
        }
        fetch.bad |= 1 << index;
        let (segment, in_table) = (fetch.segment, fetch.shape.is_none());
        if let (Some(leg), Reply::Refused(Refusal::DeviceFailed | Refusal::UnknownDevice)) = (device, reply) {
            self.peers.on_device_failed(leg);
            self.care.repairer.note_degraded();
        } else if in_table && self.basis.is_foreign(segment) && !matches!(reply, Reply::Refused(Refusal::Checksum)) {
            // It may have been moved: its owner is another.
            self.want_shard(segment, index);
        } else if let Some(leg) = device {
            let may_repair = in_table && !self.basis.is_foreign(segment);
            self.on_damaged((segment, index), leg, may_repair, out);
        }
        self.hedge_fetch(token, out);
    }

    pub(crate) fn on_fetch_lost(&mut self, token: Token, index: u8, _node: NodeId, out: Out) {
        if let Some(fetch) = self.fetches.get_mut(token) {
            fetch.asked &= !(1 << index);
            self.hedge_fetch(token, out);
        }
    }

    /// Finishes the fetch if what is there adds up; fails or stalls it if nothing more will come.
    fn settle_fetch(&mut self, token: Token, out: Out) {
        let Some(fetch) = self.fetches.get(token) else { return };
        let Some((geometry, _)) = self.shape_of(fetch) else {
            return self.finish_fetch(token, Err(FetchError::Gone), out);
        };
        let width = geometry.code_width();
        let direct = fetch.got.iter().find(|(i, _)| *i % width == fetch.position).map(|(i, b)| (*i, b.clone()));
        if let Some((index, bytes)) = direct {
            if let Some(bytes) = self.opened(fetch, bytes) {
                return self.finish_fetch(token, Ok(bytes), out);
            }
            let reply = Reply::Refused(Refusal::Checksum);
            return self.on_bad_shard(token, index, &reply, out);
        }
        if let Some(bytes) = reconstruct(&geometry, fetch) {
            if let Some(bytes) = self.opened(fetch, bytes) {
                self.counters.reconstructed_reads += 1;
                return self.finish_fetch(token, Ok(bytes), out);
            }
            if fetch.asked == 0 {
                return self.finish_fetch(token, Err(FetchError::Lost), out);
            }
            return;
        }
        let unreachable = (0..geometry.shard_count())
            .any(|i| (fetch.bad | mask_of(&fetch.got)) >> i & 1 == 0 && fetch.asked >> i & 1 == 0);
        let gives_up = !unreachable || fetch.wide && fetch.wants.takes_parts();
        if fetch.asked == 0 && gives_up {
            self.finish_fetch(token, Err(FetchError::Lost), out);
        } else if fetch.asked == 0 && fetch.wide {
            self.fetches.get_mut(token).expect("still there").stalled = true;
        }
    }

    /// The run as it was before it was written, where it is what was written. Data is in the table, and so are leaves,
    /// which their reader checks.
    fn opened(&self, fetch: &Fetch, bytes: Buf) -> Option<Buf> {
        if fetch.wants.takes_parts() {
            return Some(bytes);
        }
        let is_data = fetch.shape.is_none() && self.segments.get(fetch.segment).is_some_and(|s| s.kind == Kind::Data);
        if !is_data {
            return verifies(&bytes, fetch.crcs.as_ref()).then_some(bytes);
        }
        open_blocks(
            &self.basis.config,
            self.basis.segment_id(fetch.segment),
            fetch.payload_block,
            bytes,
            fetch.crcs.as_ref(),
        )
    }

    /// Asks once more for what nodes had no room for, a tick ago; elsewhere only after a while: others have no more
    /// room.
    pub(crate) fn retry_refused_fetches(&mut self, out: Out) {
        for token in std::mem::take(&mut self.refused_fetches) {
            match self.fetches.get(token) {
                Some(fetch) if fetch.wide => self.ask_wide(token, out),
                Some(fetch) if fetch.refusals >= REFUSALS_MAX => self.hedge_fetch(token, out),
                Some(fetch) if fetch.asked == 0 => self.ask_direct(token, out),
                _ => {}
            }
        }
    }

    pub(crate) fn retry_stalled_fetches(&mut self, out: Out) {
        let stalled: Vec<Token> = self.fetches.iter().filter(|(_, f)| f.stalled).map(|(t, _)| t).collect();
        for token in stalled {
            self.fetches.get_mut(token).expect("listed").stalled = false;
            self.ask_wide(token, out);
        }
    }

    fn finish_fetch(&mut self, token: Token, result: Result<Buf, FetchError>, out: Out) {
        let Some(fetch) = self.fetches.get(token) else { return };
        let is_lost = matches!(result, Err(FetchError::Lost)) && !fetch.wants.takes_parts();
        if is_lost && (self.waits_for_look(token) || self.fetch_by_blocks(token, out)) {
            return;
        }
        if let Some(fetch) = self.fetches.remove(token) {
            self.deliver(fetch.wants, result, out);
        }
    }

    /// Of an origin's segment all shards may lie elsewhere by now: then the fetch waits until that is known.
    fn waits_for_look(&mut self, token: Token) -> bool {
        let Some(fetch) = self.fetches.get_mut(token) else { return false };
        let (segment, in_table) = (fetch.segment, fetch.shape.is_none());
        if !in_table || fetch.looks >= LOOKS_MAX || !self.basis.is_foreign(segment) {
            return false;
        }
        let fetch = self.fetches.get_mut(token).expect("just seen");
        fetch.looks += 1;
        let bad = fetch.bad;
        for index in (0..64).filter(|index| bad >> index & 1 == 1) {
            self.want_shard(segment, index);
        }
        self.wait_for_look(segment, token);
        true
    }

    /// A shard is elsewhere than it was asked for.
    pub(crate) fn correct_fetches(&mut self, segment: SegmentNo, index: u8) {
        let of_it: Vec<Token> =
            self.fetches.iter().filter(|(_, f)| f.segment == segment && f.shape.is_none()).map(|(t, _)| t).collect();
        for token in of_it {
            self.fetches.get_mut(token).expect("just seen").bad &= !(1 << index);
        }
    }

    /// It is known where the shards are.
    pub(crate) fn fetch_anew(&mut self, token: Token, out: Out) {
        if let Some(fetch) = self.fetches.get_mut(token) {
            fetch.bad = 0;
            self.ask_wide(token, out);
        }
    }

    /// Shards that are damaged in different places don't add up to the run, and may to each of its blocks. False where
    /// that was tried, or can't be.
    fn fetch_by_blocks(&mut self, token: Token, out: Out) -> bool {
        let Some(fetch) = self.fetches.get_mut(token) else { return false };
        if fetch.blocks == 1 || fetch.by_blocks.is_some() {
            return false;
        }
        fetch.by_blocks = Some(vec![None; fetch.blocks as usize]);
        for at in 0..fetch.blocks {
            // Gone as soon as one of them can't be had.
            let Some(fetch) = self.fetches.get(token) else { return true };
            let crcs = fetch.crcs.as_ref().map(|crcs| crcs.slice(u64::from(at), 1));
            let place = (fetch.segment, fetch.shape.clone());
            let run = (fetch.block + at, 1, fetch.payload_block + at);
            let piece = Fetch::new(Recipient::Block { of: token, at }, place, fetch.position, run, crcs);
            if self.fetches.is_full() {
                self.finish_fetch(token, Err(FetchError::Lost), out);
                return true;
            }
            let piece = self.fetches.insert(piece);
            self.ask_direct(piece, out);
        }
        true
    }

    fn on_block_fetched(&mut self, of: Token, at: u32, result: Result<Buf, FetchError>, out: Out) {
        let Some(blocks) = self.fetches.get_mut(of).and_then(|fetch| fetch.by_blocks.as_mut()) else { return };
        match result {
            Ok(bytes) => blocks[at as usize] = Some(bytes),
            Err(error) => return self.finish_fetch(of, Err(error), out),
        }
        let blocks: Option<Vec<Buf>> = blocks.iter().cloned().collect();
        if let Some(blocks) = blocks {
            let mut run = BufMut::new(blocks.len() * BLOCK_BYTES);
            run.chunks_exact_mut(BLOCK_BYTES).zip(&blocks).for_each(|(to, from)| to.copy_from_slice(from));
            self.finish_fetch(of, Ok(run.freeze()), out);
        }
    }

    fn deliver(&mut self, wants: Recipient, result: Result<Buf, FetchError>, out: Out) {
        match wants {
            Recipient::Read { op, part } => self.on_read_part(op, part, result, out),
            Recipient::Ahead { segment, first } => self.on_ahead(segment, first, result, out),
            Recipient::Leaves { span, part } => self.on_leaves_part(span, part, result, out),
            Recipient::Run { at, part } => self.on_run_part(at, part, result, out),
            Recipient::Clean { job, part } => self.on_clean_part(job, part, result, out),
            Recipient::Block { of, at } => self.on_block_fetched(of, at, result, out),
        }
    }
}

fn mask_of(got: &BTreeMap<u8, Buf>) -> u64 {
    got.keys().fold(0, |mask, index| mask | 1 << index)
}

/// Whether the shards in `mask` yield the run at `position`: a copy of it, or enough of one copy's code.
fn adds_up(geometry: &Geometry, position: u8, mask: u64) -> bool {
    let width = geometry.code_width();
    (0..geometry.copies).any(|copy| {
        let of_copy = mask >> (copy * width) & ((1 << width) - 1);
        of_copy >> position & 1 == 1 || of_copy.count_ones() >= u32::from(geometry.data)
    })
}

pub(crate) fn verifies(bytes: &Buf, crcs: Option<&Crcs>) -> bool {
    crcs.is_none_or(|crcs| {
        let crcs = crcs.as_slice();
        let blocks = bytes.chunks_exact(BLOCK_BYTES);
        blocks.len() == crcs.len() && blocks.zip(crcs).all(|(block, crc)| crc32c(block) == *crc)
    })
}

fn reconstruct(geometry: &Geometry, fetch: &Fetch) -> Option<Buf> {
    if geometry.parity == 0 {
        return None;
    }
    let width = geometry.code_width();
    let code = Code::new(geometry.data, geometry.parity).expect("geometries in use are valid");
    for copy in 0..geometry.copies {
        let sources: Vec<(u8, &[u8])> = fetch
            .got
            .iter()
            .filter(|(i, _)| *i / width == copy)
            .map(|(i, bytes)| (i % width, &**bytes))
            .take(usize::from(geometry.data))
            .collect();
        if sources.len() < usize::from(geometry.data) {
            continue;
        }
        let mut out = BufMut::new(fetch.blocks as usize * BLOCK_BYTES);
        if code.reconstruct(&sources, fetch.position, &mut out).is_ok() {
            return Some(out.freeze());
        }
    }
    None
}
