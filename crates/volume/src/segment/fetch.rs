//! Fetching a run of blocks out of one shard, from its holder if that answers in time, else from the others.
//!
//! States: direct (one holder asked) -> wide (late, lost or bad: every other shard of a code copy, and other copies,
//! are asked; first to add up wins) -> done | stalled (too few holders reachable: tried again when a node returns) | by
//! blocks (too few holders have all of it: each block is fetched by itself) | failed (too few have a block of it).
//! Bytes are checked against the map's checksums before anyone sees them; by their holder where they are metadata, or
//! where several give the run. If the volume's guests do without ([`Config::checked_reads`](crate::Config)) a holder's
//! own bytes go as they are, unchecked by both.

use crate::api::{Counters, Out};
use crate::basis::Basis;
use crate::map::Crcs;
use crate::peers::{Ask, CALLS_MAX, Peers, Purpose};
use crate::segment::encrypt::{decrypt_blocks, open_units};
use crate::segment::units::Units;
use crate::segment::{Kind, Segments};
use crate::sharing::segments::LOOKS_MAX;
use holdfast_base::{BLOCK_BYTES, Buf, BufMut, NodeId, ShardId, Slab, Token, Urgency, crc32c};
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
    /// Live data of a cleaner job: piece `part`. Units as they lie, or the blocks that they are.
    Clean { job: u64, part: u32, opened: bool },
    /// Another fetch, of several blocks, which can't be had together: its block `at`. That is one of a payload of units, and
    /// nothing by itself, if it is wanted as it is stored.
    Block { of: Token, at: u32, as_stored: bool },
}

impl Recipient {
    /// Whoever wants it opens each block by itself, and asks alone for what is damaged or can't be had.
    pub(crate) fn takes_parts(&self) -> bool {
        matches!(self, Recipient::Ahead { .. })
    }

    /// It gets units, one behind the other, and not the blocks that they are.
    fn moves(&self) -> bool {
        matches!(self, Recipient::Clean { opened: false, .. })
    }
}

/// Shape and homes of a segment that is not in the table (a checkpoint's, while opening).
pub(crate) type Shape = Box<(Geometry, Vec<Leg>)>;

#[derive(Debug)]
struct Fetch {
    wants: Recipient,
    /// Whichever shard is asked for, and however often.
    urgency: Urgency,
    segment: SegmentNo,
    shape: Option<Shape>,
    /// Position of the data shard that holds the run, and its blocks there.
    position: u8,
    block: u32,
    blocks: u32,
    /// The run's first block in the segment's payload.
    payload_block: u32,
    /// Checksums of the run's blocks, or of those that its units are; without them (metadata), who wants the bytes checks
    /// them, or nobody (guests' reads).
    crcs: Option<Crcs>,
    /// What is wanted of the run, where it is packed.
    units: Option<Units>,
    wide: bool,
    asked: u64,
    /// Who was asked first.
    first_asked: Option<NodeId>,
    /// Where each was asked for last.
    asked_at: BTreeMap<u8, Leg>,
    bad: u64,
    got: BTreeMap<u8, Buf>,
    stalled: bool,
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
        (wants, urgency): (Recipient, Urgency),
        (segment, shape): (SegmentNo, Option<Shape>),
        position: u8,
        (block, blocks, payload_block): (u32, u32, u32),
        crcs: Option<Crcs>,
        units: Option<Units>,
    ) -> Fetch {
        Fetch {
            wants,
            urgency,
            segment,
            shape,
            position,
            block,
            blocks,
            payload_block,
            crcs,
            units,
            wide: false,
            asked: 0,
            first_asked: None,
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

/// What comes of fetches, for others to see to.
#[derive(Debug)]
pub(crate) enum Wish {
    Deliver(Recipient, Result<Buf, FetchError>),
    /// A device has failed.
    Degraded,
    /// The shard of this number is damaged there.
    Damaged {
        segment: SegmentNo,
        index: u8,
        at: Leg,
        may_repair: bool,
    },
    /// An origin's shard may lie elsewhere by now.
    Locate(SegmentNo, u8),
    /// The fetch waits until that is known of the segment's shards.
    AwaitLocation(SegmentNo, Token),
}

/// What the fetcher works with.
pub(crate) struct Around<'a> {
    pub(crate) basis: &'a Basis,
    pub(crate) peers: &'a mut Peers,
    pub(crate) segments: &'a Segments,
    pub(crate) counters: &'a mut Counters,
    pub(crate) wishes: &'a mut Vec<Wish>,
}

impl Around<'_> {
    fn shape_of<'a>(&'a self, fetch: &'a Fetch) -> Option<(Geometry, &'a [Leg])> {
        match &fetch.shape {
            Some(shape) => Some((shape.0, &shape.1)),
            None => self.segments.get(fetch.segment).map(|info| (info.geometry, info.homes.as_slice())),
        }
    }

    /// The run as it was before it was written, where it is what was written. Data is in the table, and so are leaves,
    /// which their reader checks.
    fn opened(&self, fetch: &Fetch, bytes: Buf) -> Option<Buf> {
        if fetch.wants.takes_parts() || matches!(fetch.wants, Recipient::Block { as_stored: true, .. }) {
            return Some(bytes);
        }
        if let Some(units) = &fetch.units {
            let (id, block, as_they_lie) =
                (self.basis.segment_id(fetch.segment), fetch.payload_block, fetch.wants.moves());
            return open_units(&self.basis.config, id, block, units, &bytes, fetch.crcs.as_ref(), as_they_lie);
        }
        let is_data = fetch.shape.is_none() && self.segments.get(fetch.segment).is_some_and(|s| s.kind == Kind::Data);
        if !is_data {
            return verifies(&bytes, fetch.crcs.as_ref()).then_some(bytes);
        }
        let (id, block) = (self.basis.segment_id(fetch.segment), fetch.payload_block);
        decrypt_blocks(&self.basis.config, id, block, bytes, fetch.crcs.as_ref())
    }

    /// Whether what was got and what is awaited can add up to the run.
    fn is_enough_coming(&self, fetch: &Fetch) -> bool {
        let Some((geometry, homes)) = self.shape_of(fetch) else { return false };
        let mut coming = mask_of(&fetch.got);
        for index in 0..geometry.shard_count() {
            if fetch.asked >> index & 1 == 1 && self.peers.leg_usable(homes[usize::from(index)]) {
                coming |= 1 << index;
            }
        }
        adds_up(&geometry, fetch.position, coming & !fetch.bad)
    }
}

/// A run of payload blocks that is wanted of a segment: in one stripe run of one shard.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    pub(crate) by: Recipient,
    pub(crate) urgency: Urgency,
    pub(crate) segment: SegmentNo,
    /// Of a segment that is not in the table.
    pub(crate) shape: Option<Shape>,
    /// The first block, and how many.
    pub(crate) run: (u32, u32),
    pub(crate) crcs: Option<Crcs>,
    /// What of it is wanted, where it is packed; then the checksums are of these.
    pub(crate) units: Option<Units>,
}

/// The fetches under way.
#[derive(Debug)]
pub(crate) struct Fetcher {
    fetches: Slab<Fetch>,
    /// Those that a node had no room for.
    refused: Vec<Token>,
}

impl Default for Fetcher {
    fn default() -> Fetcher {
        Fetcher { fetches: Slab::new(CALLS_MAX), refused: Vec::new() }
    }
}

impl Fetcher {
    pub(crate) fn is_empty(&self) -> bool {
        self.fetches.is_empty()
    }

    /// Who was asked first for what a fetch wants.
    pub(crate) fn first_asked(&self, fetch: Token) -> Option<NodeId> {
        self.fetches.get(fetch).and_then(|fetch| fetch.first_asked)
    }

    /// Nobody waits for anything any more.
    pub(crate) fn clear(&mut self) {
        for token in self.fetches.tokens() {
            self.fetches.remove(token);
        }
    }

    /// Asserts what must hold between events (tests and the simulator).
    pub(crate) fn verify(&self) {
        for (token, fetch) in self.fetches.iter() {
            assert_eq!(fetch.asked & fetch.bad, 0, "{token:?} asks a shard that was found bad");
            assert!(!fetch.stalled || fetch.asked == 0, "{token:?} has stalled, and waits for an answer");
            assert!(fetch.got.values().all(|got| got.len() == fetch.blocks as usize * BLOCK_BYTES), "whole runs only");
        }
    }

    /// Starts to fetch a run.
    pub(crate) fn start(&mut self, around: &mut Around<'_>, wanted: Wanted, out: Out) {
        let Wanted { by, urgency, segment, shape, run: (block, blocks), crcs, units } = wanted;
        let geometry = match &shape {
            Some(shape) => Some(shape.0),
            None => around.segments.get(segment).map(|info| info.geometry),
        };
        let Some(geometry) = geometry.filter(|_| !self.fetches.is_full()) else {
            return around.wishes.push(Wish::Deliver(by, Err(FetchError::Gone)));
        };
        let at = geometry.locate(block);
        assert!(blocks <= geometry.run_from(block), "a fetch stays in one run of one shard");
        let run = (at.block, blocks, block);
        let fetch = Fetch::new((by, urgency), (segment, shape), at.position, run, crcs, units);
        let token = self.fetches.insert(fetch);
        self.ask_direct(around, token, out);
    }

    /// Asks one holder of the run itself: of several copies one that is usable, on this machine if there is one, else
    /// spread by address. Where that would be a
    /// device that is bypassed, enough others are asked instead.
    fn ask_direct(&mut self, around: &mut Around<'_>, token: Token, out: Out) {
        let Some(fetch) = self.fetches.get(token) else { return };
        let Some((geometry, homes)) = around.shape_of(fetch) else {
            return self.finish(around, token, Err(FetchError::Gone), out);
        };
        let width = geometry.code_width();
        let first = (fetch.block >> 4) % u32::from(geometry.copies);
        let copies = (0..u32::from(geometry.copies)).map(|i| (first + i) % u32::from(geometry.copies));
        let usable: Vec<u8> = copies
            .map(|copy| copy as u8 * width + fetch.position)
            .filter(|index| around.peers.leg_usable(homes[usize::from(*index)]))
            .collect();
        let preferable = |index: &u8| around.peers.leg_preferable(homes[usize::from(*index)]);
        let is_local = |index: &u8| around.peers.is_local(homes[usize::from(*index)].node);
        let local = usable.iter().copied().find(|index| preferable(index) && is_local(index));
        let choice = local.or_else(|| usable.iter().copied().find(preferable));
        if choice.is_none() && !usable.is_empty() {
            let enough: Vec<u8> = (0..width)
                .filter(|index| *index != fetch.position && preferable(index))
                .take(geometry.data.into())
                .collect();
            let mask = enough.iter().fold(0, |mask, index| mask | 1 << index);
            if adds_up(&geometry, fetch.position, mask) {
                self.fetches.get_mut(token).expect("just seen").wide = true;
                let asked = enough.into_iter().filter(|index| self.ask_shard(around, token, *index, out)).count();
                if asked < usize::from(geometry.data) {
                    self.ask_wide(around, token, out);
                }
                return;
            }
        }
        match choice.or(usable.first().copied()) {
            Some(index) => {
                let is_local = is_local(&index);
                around.counters.shard_reads += 1;
                around.counters.local_reads += u64::from(is_local);
                if !self.ask_shard(around, token, index, out) {
                    self.hedge(around, token, out);
                }
            }
            None => self.hedge(around, token, out),
        }
    }

    fn ask_shard(&mut self, around: &mut Around<'_>, token: Token, index: u8, out: Out) -> bool {
        let Some(fetch) = self.fetches.get(token) else { return false };
        let Some((_, homes)) = around.shape_of(fetch) else { return false };
        let leg = homes[usize::from(index)];
        let shard = ShardId { segment: around.basis.segment_id(fetch.segment), index };
        // Compared with checksums once: here with the map's, or else where they lie. So is what is computed from
        // several: one flipped bit would spread.
        let by_map = fetch.crcs.is_some() || matches!(fetch.wants, Recipient::Read { .. } | Recipient::Ahead { .. });
        let checked = fetch.wide || !by_map;
        let (block, blocks) = (fetch.block, fetch.blocks);
        let request = Request::ReadShard { device: leg.device, shard, block, blocks, checked, cached: true };
        let forgets = around.basis.config.mutations.hedge_forgets_class() && fetch.wide;
        let urgency = if forgets { Urgency::Normal } else { fetch.urgency };
        let purpose = Purpose::Fetch { fetch: token, shard: index };
        let ask = Ask::fast(leg.node, purpose, request).with(urgency);
        let sent = around.peers.send(around.basis.now, ask, out).is_some();
        if sent && let Some(fetch) = self.fetches.get_mut(token) {
            fetch.asked |= 1 << index;
            fetch.first_asked = fetch.first_asked.or(Some(leg.node));
            fetch.asked_at.insert(index, leg);
        }
        sent
    }

    /// Goes wide: asks the other copies and, in a code, every other shard.
    pub(crate) fn hedge(&mut self, around: &mut Around<'_>, token: Token, out: Out) {
        let Some(fetch) = self.fetches.get_mut(token) else { return };
        if !fetch.wide {
            fetch.wide = true;
            around.counters.read_hedges += 1;
        }
        self.ask_wide(around, token, out);
    }

    fn ask_wide(&mut self, around: &mut Around<'_>, token: Token, out: Out) {
        let Some(fetch) = self.fetches.get(token) else { return };
        let Some((geometry, homes)) = around.shape_of(fetch) else {
            return self.finish(around, token, Err(FetchError::Gone), out);
        };
        let done_with = fetch.asked | fetch.bad | mask_of(&fetch.got);
        let open: Vec<(u8, Leg)> = (0..geometry.shard_count())
            .filter(|i| done_with >> i & 1 == 0)
            .map(|i| (i, homes[usize::from(i)]))
            .collect();
        let usable: Vec<u8> = open.iter().filter(|(_, l)| around.peers.leg_usable(*l)).map(|(i, _)| *i).collect();
        for index in &usable {
            self.ask_shard(around, token, *index, out);
        }
        let fetch = self.fetches.get(token).expect("still fetching");
        if !around.is_enough_coming(fetch) {
            // Suspects are asked only when the others don't suffice.
            let suspects: Vec<u8> = open
                .iter()
                .filter(|(i, l)| !usable.contains(i) && around.peers.is_up(l.node) && around.peers.device_serves(*l))
                .map(|(i, _)| *i)
                .collect();
            for index in suspects {
                self.ask_shard(around, token, index, out);
            }
        }
        self.settle(around, token, out);
    }

    pub(crate) fn on_fetched(
        &mut self,
        around: &mut Around<'_>,
        token: Token,
        index: u8,
        reply: &Reply,
        payload: Buf,
        out: Out,
    ) {
        let Some(fetch) = self.fetches.get_mut(token) else { return };
        fetch.asked &= !(1 << index);
        let whole = payload.len() == fetch.blocks as usize * BLOCK_BYTES;
        match reply {
            Reply::Shard { .. } if whole => {
                fetch.got.insert(index, payload);
                self.settle(around, token, out);
            }
            Reply::Refused(Refusal::Busy) => {
                fetch.refusals += 1;
                self.refused.push(token);
            }
            _ => self.on_bad_shard(around, token, index, reply, out),
        }
    }

    fn on_bad_shard(&mut self, around: &mut Around<'_>, token: Token, index: u8, reply: &Reply, out: Out) {
        let home = around.shape_of(self.fetches.get(token).expect("checked by the caller"));
        let device = home.map(|(_, homes)| homes[usize::from(index)]);
        let fetch = self.fetches.get_mut(token).expect("checked by the caller");
        fetch.got.remove(&index);
        if device.is_some() && device != fetch.asked_at.get(&index).copied() {
            // It was moved meanwhile: where it was asked for it need not be any more.
            return self.hedge(around, token, out);
        }
        fetch.bad |= 1 << index;
        let (segment, in_table) = (fetch.segment, fetch.shape.is_none());
        if let (Some(leg), Reply::Refused(Refusal::DeviceFailed | Refusal::UnknownDevice)) = (device, reply) {
            around.peers.on_device_failed(leg);
            around.wishes.push(Wish::Degraded);
        } else if in_table && around.basis.is_foreign(segment) && !matches!(reply, Reply::Refused(Refusal::Checksum)) {
            // It may have been moved: its owner is another.
            around.wishes.push(Wish::Locate(segment, index));
        } else if let Some(leg) = device {
            let may_repair = in_table && !around.basis.is_foreign(segment);
            around.wishes.push(Wish::Damaged { segment, index, at: leg, may_repair });
        }
        self.hedge(around, token, out);
    }

    pub(crate) fn on_lost(&mut self, around: &mut Around<'_>, token: Token, index: u8, out: Out) {
        if let Some(fetch) = self.fetches.get_mut(token) {
            fetch.asked &= !(1 << index);
            self.hedge(around, token, out);
        }
    }

    /// Finishes the fetch if what is there adds up; fails or stalls it if nothing more will come.
    fn settle(&mut self, around: &mut Around<'_>, token: Token, out: Out) {
        let Some(fetch) = self.fetches.get(token) else { return };
        let Some((geometry, _)) = around.shape_of(fetch) else {
            return self.finish(around, token, Err(FetchError::Gone), out);
        };
        let width = geometry.code_width();
        let direct = fetch.got.iter().find(|(i, _)| *i % width == fetch.position).map(|(i, b)| (*i, b.clone()));
        if let Some((index, bytes)) = direct {
            if let Some(bytes) = around.opened(fetch, bytes) {
                return self.finish(around, token, Ok(bytes), out);
            }
            let reply = Reply::Refused(Refusal::Checksum);
            return self.on_bad_shard(around, token, index, &reply, out);
        }
        if let Some(bytes) = reconstruct(&geometry, fetch) {
            if let Some(bytes) = around.opened(fetch, bytes) {
                around.counters.reconstructed_reads += 1;
                return self.finish(around, token, Ok(bytes), out);
            }
            if fetch.asked == 0 {
                return self.finish(around, token, Err(FetchError::Lost), out);
            }
            return;
        }
        let unreachable = (0..geometry.shard_count())
            .any(|i| (fetch.bad | mask_of(&fetch.got)) >> i & 1 == 0 && fetch.asked >> i & 1 == 0);
        let gives_up = !unreachable || fetch.wide && fetch.wants.takes_parts();
        if fetch.asked == 0 && gives_up {
            self.finish(around, token, Err(FetchError::Lost), out);
        } else if fetch.asked == 0 && fetch.wide {
            self.fetches.get_mut(token).expect("still there").stalled = true;
        }
    }

    /// Asks once more for what nodes had no room for, a tick ago; elsewhere only after a while: others have no more
    /// room.
    pub(crate) fn retry_refused(&mut self, around: &mut Around<'_>, out: Out) {
        for token in std::mem::take(&mut self.refused) {
            match self.fetches.get(token) {
                Some(fetch) if fetch.wide => self.ask_wide(around, token, out),
                Some(fetch) if fetch.refusals >= REFUSALS_MAX => self.hedge(around, token, out),
                Some(fetch) if fetch.asked == 0 => self.ask_direct(around, token, out),
                _ => {}
            }
        }
    }

    pub(crate) fn retry_stalled(&mut self, around: &mut Around<'_>, out: Out) {
        let stalled: Vec<Token> = self.fetches.iter().filter(|(_, f)| f.stalled).map(|(t, _)| t).collect();
        for token in stalled {
            self.fetches.get_mut(token).expect("listed").stalled = false;
            self.ask_wide(around, token, out);
        }
    }

    fn finish(&mut self, around: &mut Around<'_>, token: Token, result: Result<Buf, FetchError>, out: Out) {
        let Some(fetch) = self.fetches.get(token) else { return };
        let is_lost = matches!(result, Err(FetchError::Lost)) && !fetch.wants.takes_parts();
        if is_lost && (self.waits_for_location(around, token) || self.ask_by_blocks(around, token, out)) {
            return;
        }
        if let Some(fetch) = self.fetches.remove(token) {
            match fetch.wants {
                Recipient::Block { of, at, .. } => self.on_block_fetched(around, of, at, result, out),
                wants => around.wishes.push(Wish::Deliver(wants, result)),
            }
        }
    }

    /// Of an origin's segment all shards may lie elsewhere by now: then the fetch waits until that is known.
    fn waits_for_location(&mut self, around: &mut Around<'_>, token: Token) -> bool {
        let Some(fetch) = self.fetches.get_mut(token) else { return false };
        let (segment, in_table) = (fetch.segment, fetch.shape.is_none());
        if !in_table || fetch.looks >= LOOKS_MAX || !around.basis.is_foreign(segment) {
            return false;
        }
        let fetch = self.fetches.get_mut(token).expect("just seen");
        fetch.looks += 1;
        let bad = fetch.bad;
        for index in (0..64).filter(|index| bad >> index & 1 == 1) {
            around.wishes.push(Wish::Locate(segment, index));
        }
        around.wishes.push(Wish::AwaitLocation(segment, token));
        true
    }

    /// A shard is elsewhere than it was asked for.
    pub(crate) fn on_located(&mut self, segment: SegmentNo, index: u8) {
        let of_it: Vec<Token> =
            self.fetches.iter().filter(|(_, f)| f.segment == segment && f.shape.is_none()).map(|(t, _)| t).collect();
        for token in of_it {
            self.fetches.get_mut(token).expect("just seen").bad &= !(1 << index);
        }
    }

    /// It is known where the shards are.
    pub(crate) fn ask_anew(&mut self, around: &mut Around<'_>, token: Token, out: Out) {
        if let Some(fetch) = self.fetches.get_mut(token) {
            (fetch.bad, fetch.stalled) = (0, false);
            self.ask_wide(around, token, out);
        }
    }

    /// Shards that are damaged in different places don't add up to the run, and may to each of its blocks. False where
    /// that was tried, or can't be.
    fn ask_by_blocks(&mut self, around: &mut Around<'_>, token: Token, out: Out) -> bool {
        let Some(fetch) = self.fetches.get_mut(token) else { return false };
        if fetch.blocks == 1 || fetch.by_blocks.is_some() {
            return false;
        }
        fetch.by_blocks = Some(vec![None; fetch.blocks as usize]);
        for at in 0..fetch.blocks {
            // Gone as soon as one of them can't be had.
            let Some(fetch) = self.fetches.get(token) else { return true };
            // Of stored blocks the map knows no checksums: their holders check them.
            let crcs = fetch.crcs.as_ref().filter(|_| fetch.units.is_none());
            let crcs = crcs.map(|crcs| crcs.slice(u64::from(at), 1));
            let place = (fetch.segment, fetch.shape.clone());
            let run = (fetch.block + at, 1, fetch.payload_block + at);
            let by = Recipient::Block { of: token, at, as_stored: fetch.units.is_some() };
            let piece = Fetch::new((by, fetch.urgency), place, fetch.position, run, crcs, None);
            if self.fetches.is_full() {
                self.finish(around, token, Err(FetchError::Lost), out);
                return true;
            }
            let piece = self.fetches.insert(piece);
            self.ask_direct(around, piece, out);
        }
        true
    }

    fn on_block_fetched(
        &mut self,
        around: &mut Around<'_>,
        of: Token,
        at: u32,
        result: Result<Buf, FetchError>,
        out: Out,
    ) {
        let Some(blocks) = self.fetches.get_mut(of).and_then(|fetch| fetch.by_blocks.as_mut()) else { return };
        match result {
            Ok(bytes) => blocks[at as usize] = Some(bytes),
            Err(error) => return self.finish(around, of, Err(error), out),
        }
        let blocks: Option<Vec<Buf>> = blocks.iter().cloned().collect();
        if let Some(blocks) = blocks {
            let mut run = BufMut::new(blocks.len() * BLOCK_BYTES);
            run.chunks_exact_mut(BLOCK_BYTES).zip(&blocks).for_each(|(to, from)| to.copy_from_slice(from));
            let fetch = self.fetches.get(of).expect("just seen");
            let run = if fetch.units.is_some() { around.opened(fetch, run.freeze()) } else { Some(run.freeze()) };
            self.finish(around, of, run.ok_or(FetchError::Lost), out);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::Effect;
    use crate::peers::tests::{leg, peers, sent};
    use crate::segment::tests::{info, no};
    use holdfast_base::{Effects, Instant, NodeId, block_crcs};
    use holdfast_format::geometry::Layout;

    struct Rig {
        basis: Basis,
        peers: Peers,
        segments: Segments,
        counters: Counters,
        fetcher: Fetcher,
        wishes: Vec<Wish>,
        out: Effects<Effect>,
    }

    /// A shard that was asked for, and where.
    #[derive(Clone, Copy, Debug)]
    struct Asked {
        node: NodeId,
        fetch: Token,
        index: u8,
    }

    impl Rig {
        /// A segment of one row on `parity:2+1`: zeroes but for two blocks on the first shard.
        fn new() -> Rig {
            let mut basis = crate::basis::tests::basis("parity:2+1");
            basis.now = Instant(10_000_000_000);
            let peers = peers(basis.now, &[1, 1, 1]);
            let mut segments = Segments::default();
            let mut of = info(32, 32, &[leg(1, 0), leg(2, 0), leg(3, 0)]);
            of.geometry = Geometry::new(Layout::DEFAULT, 32);
            segments.insert(no(1, 1), of);
            let (counters, fetcher) = (Counters::default(), Fetcher::default());
            Rig { basis, peers, segments, counters, fetcher, wishes: Vec::new(), out: Effects::new() }
        }

        fn with(&mut self, act: impl FnOnce(&mut Fetcher, &mut Around<'_>, Out)) -> Vec<Asked> {
            let mut around = Around {
                basis: &self.basis,
                peers: &mut self.peers,
                segments: &self.segments,
                counters: &mut self.counters,
                wishes: &mut self.wishes,
            };
            act(&mut self.fetcher, &mut around, &mut self.out);
            self.fetcher.verify();
            let asked = |(node, token, _)| {
                let call = self.peers.on_answer(self.basis.now, node, token).expect("it was asked");
                let Purpose::Fetch { fetch, shard } = call.purpose else { panic!("{:?}", call.purpose) };
                Asked { node, fetch, index: shard }
            };
            sent(&mut self.out).into_iter().map(asked).collect()
        }

        fn start(&mut self, data: &Buf) -> Vec<Asked> {
            let crcs = Some(Crcs::new(block_crcs(data)));
            let by = Recipient::Leaves { span: 1, part: 0 };
            let (run, urgency) = ((0, 2), Urgency::Sparse);
            let wanted = Wanted { by, urgency, segment: no(1, 1), shape: None, run, crcs, units: None };
            self.with(|fetcher, around, out| fetcher.start(around, wanted, out))
        }

        fn answer(&mut self, to: Asked, bytes: &Buf) -> Vec<Asked> {
            let reply = Reply::Shard { blocks: 2 };
            self.with(|fetcher, around, out| {
                fetcher.on_fetched(around, to.fetch, to.index, &reply, bytes.clone(), out);
            })
        }

        fn take_wishes(&mut self) -> Vec<Wish> {
            std::mem::take(&mut self.wishes)
        }
    }

    fn data() -> Buf {
        Buf::copy_from(&[5; 2 * BLOCK_BYTES])
    }

    #[test]
    fn its_holder_is_asked_and_the_run_delivered() {
        let mut rig = Rig::new();
        let asked = rig.start(&data());
        let [direct] = asked[..] else { panic!("{asked:?}") };
        assert_eq!((direct.node, direct.index), (NodeId(1), 0));
        assert!(rig.answer(direct, &data()).is_empty() && rig.fetcher.is_empty());
        let wishes = rig.take_wishes();
        assert!(matches!(&wishes[..], [Wish::Deliver(Recipient::Leaves { .. }, Ok(bytes))] if **bytes == *data()));
    }

    #[test]
    fn what_is_damaged_is_told_and_made_of_the_others() {
        let mut rig = Rig::new();
        let direct = rig.start(&data())[0];
        let others = rig.answer(direct, &Buf::copy_from(&[9; 2 * BLOCK_BYTES]));
        assert_eq!(others.iter().map(|asked| asked.index).collect::<Vec<_>>(), [1, 2]);
        let told = rig.take_wishes();
        let [Wish::Damaged { index: 0, at, may_repair: true, .. }] = told[..] else { panic!("{told:?}") };
        assert_eq!(at, leg(1, 0));
        // The second data shard is zeroes, so that the parity is the first.
        assert!(rig.answer(others[0], &Buf::zeroes(2 * BLOCK_BYTES)).is_empty());
        assert!(rig.take_wishes().is_empty(), "one of two does not add up");
        rig.answer(others[1], &data());
        let wishes = rig.take_wishes();
        assert!(matches!(&wishes[..], [Wish::Deliver(_, Ok(bytes))] if **bytes == *data()), "{wishes:?}");
        assert_eq!(rig.counters.reconstructed_reads, 1);
    }

    #[test]
    fn with_too_few_nodes_it_stalls_and_goes_on_when_one_is_back() {
        let mut rig = Rig::new();
        let direct = rig.start(&data())[0];
        for node in [1, 2] {
            rig.peers.on_down(rig.basis.now, NodeId(node));
        }
        let asked = rig.with(|fetcher, around, out| fetcher.on_lost(around, direct.fetch, direct.index, out));
        let [third] = asked[..] else { panic!("{asked:?}") };
        assert!(rig.answer(third, &data()).is_empty() && rig.take_wishes().is_empty() && !rig.fetcher.is_empty());
        assert!(rig.with(Fetcher::retry_stalled).is_empty(), "nobody else is there");
        rig.peers.on_up(rig.basis.now, NodeId(1), u32::MAX, vec![crate::peers::tests::stat(leg(1, 0))]);
        let asked = rig.with(Fetcher::retry_stalled);
        assert!(matches!(asked[..], [Asked { node: NodeId(1), index: 0, .. }]), "{asked:?}");
    }

    #[test]
    fn a_segment_that_is_not_in_the_table_is_gone() {
        let mut rig = Rig::new();
        rig.segments.remove(no(1, 1));
        assert!(rig.start(&data()).is_empty());
        let wishes = rig.take_wishes();
        assert!(matches!(wishes[..], [Wish::Deliver(_, Err(FetchError::Gone))]), "{wishes:?}");
    }
}
