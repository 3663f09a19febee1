//! Guests' reads: look up, fetch, answer under a grant.
//!
//! States of an operation: queued (as many bytes as may be are being read) -> looking up (waits for leaves) -> fetching
//! -> waiting for a grant -> answered. A segment freed in between sends it back to looking up.

use crate::api::Target;
use crate::basis::Answer;
use crate::controller::{Controller, Out};
use crate::io::read_ahead::Taker;
use crate::map::{Crcs, Leaf, LeafNo, LeafWaiter, Piece, Pins, Place};
use crate::segment::fetch::{FetchError, Recipient, Wanted};
use crate::segment::units::{Units, cut};
use crate::space::Topology;
use holdfast_base::{
    BLOCK_BYTES, BlockData, BlockError, Buf, ByteRange, Instant, ObjectId, RequestToken, StatusExtent, Token, Urgency,
};
use holdfast_format::record::SegmentNo;
use holdfast_stages::{Stage, Trail};
use std::collections::VecDeque;
use std::sync::Arc;

/// Who reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reader {
    Guest(RequestToken),
    /// Asks which parts are mapped, not for bytes.
    Status(RequestToken),
    /// Asks which parts may differ from what a snapshot holds.
    Changes(RequestToken, ObjectId),
    /// A write of part of a block needs the rest of it.
    Modify(u64),
}

#[derive(Debug)]
pub(crate) struct ReadOp {
    reader: Reader,
    urgency: Urgency,
    began_at: Instant,
    trail: Trail,
    /// A head is read as it is when places are looked up.
    of: Target,
    range: ByteRange,
    pins: Pins,
    leaves_pending: u32,
    parts: Vec<Option<Buf>>,
    /// Nothing of it is mapped.
    is_hole: bool,
    pending: u32,
    failed: Option<FetchError>,
    restarts: u32,
    /// Bytes that it takes of what may be read at a time, once it has begun.
    admitted_bytes: u64,
}

impl ReadOp {
    /// The guest's request that is answered by this, if it is one's.
    pub(crate) fn guest(&self) -> Option<RequestToken> {
        match self.reader {
            Reader::Guest(token) | Reader::Status(token) | Reader::Changes(token, _) => Some(token),
            Reader::Modify(_) => None,
        }
    }

    /// It is answered from the map alone.
    fn is_status(&self) -> bool {
        matches!(self.reader, Reader::Status(_) | Reader::Changes(..))
    }
}

/// Bytes that are read for guests at a time, or one request of more: what is asked of nodes beyond that would only wait
/// there, in front of others.
const READING_BYTES_MAX: u64 = 32 << 20;

/// Reads that wait for their turn.
#[derive(Debug, Default)]
pub(crate) struct ReadQueue {
    waiting: VecDeque<Token>,
    reading_bytes: u64,
}

/// A part of a read that is fetched.
#[derive(Debug)]
struct PartFetch {
    part: u32,
    segment: SegmentNo,
    /// Block of the payload from which on, and how many.
    run: (u32, u32),
    crcs: Crcs,
    units: Option<Units>,
}

/// Leaves that one look-up asks for at a time.
const LEAVES_MAX: usize = 256;

/// A read whose segments are freed under it this often has met a bug.
const RESTARTS_MAX: u32 = 1000;

impl Controller {
    /// Starts to read `range`, which lies inside and is not empty.
    pub(crate) fn start_read(&mut self, reader: Reader, urgency: Urgency, of: Target, range: ByteRange, out: Out) {
        if self.reads.is_full() {
            return self.refuse_read(reader, BlockError::Unavailable, out);
        }
        let op = self.reads.insert(ReadOp {
            reader,
            urgency,
            began_at: self.basis.now,
            trail: Trail::new(self.basis.now),
            of,
            range,
            pins: Pins::default(),
            leaves_pending: 0,
            parts: Vec::new(),
            is_hole: false,
            pending: 0,
            failed: None,
            restarts: 0,
            admitted_bytes: 0,
        });
        match reader {
            Reader::Guest(_) | Reader::Status(_) | Reader::Changes(..) => {
                self.read_queue.waiting.push_back(op);
                self.admit_reads(out);
            }
            Reader::Modify(_) => self.look_up(op, out),
        }
    }

    /// Begins reads that wait, as far as they may be under way together.
    pub(crate) fn admit_reads(&mut self, out: Out) {
        while let Some(token) = self.read_queue.waiting.front().copied() {
            let Some(op) = self.reads.get_mut(token) else {
                self.read_queue.waiting.pop_front();
                continue;
            };
            let reading = self.read_queue.reading_bytes;
            if reading > 0 && reading + op.range.len > READING_BYTES_MAX {
                return;
            }
            op.trail.mark(self.basis.now, Stage::Room);
            op.admitted_bytes = op.range.len;
            self.read_queue.reading_bytes += op.range.len;
            self.read_queue.waiting.pop_front();
            self.look_up(token, out);
        }
    }

    /// Takes an operation that ends out of the table; what waits for it is begun by [`Controller::progress`].
    fn end_read(&mut self, token: Token) -> Option<ReadOp> {
        let op = self.reads.remove(token)?;
        self.read_queue.reading_bytes -= op.admitted_bytes;
        Some(op)
    }

    fn refuse_read(&mut self, reader: Reader, error: BlockError, out: Out) {
        match reader {
            Reader::Guest(token) | Reader::Status(token) | Reader::Changes(token, _) => {
                self.reply(token, Err(error), out);
            }
            Reader::Modify(id) => self.on_modify_failed(id, error, out),
        }
    }

    fn look_up(&mut self, token: Token, out: Out) {
        let Some(op) = self.reads.get_mut(token) else { return };
        let (first, blocks) = blocks_of(op.range);
        let of = op.of;
        let pins = std::mem::take(&mut op.pins);
        let since = match op.reader {
            Reader::Changes(_, since) => Some(since),
            _ => None,
        };
        let is_gone = |snapshot: ObjectId| self.map.layers().snapshot(snapshot).is_none();
        let Some(layer) = self.layer_of(of).filter(|_| !since.is_some_and(is_gone)) else {
            // It was dropped meanwhile.
            let op = self.reads.get_mut(token).expect("still reading");
            op.failed = Some(FetchError::Gone);
            return self.finish_read(token, out);
        };
        let resolved = match since {
            Some(since) => self.map.resolve_changes(layer, since, first, blocks, &pins),
            None => self.map.resolve_through(layer, first, blocks, &pins),
        };
        let op = self.reads.get_mut(token).expect("still reading");
        op.pins = pins;
        match resolved {
            Ok(places) if op.is_status() => self.answer_status(token, &places, out),
            Ok(places) => self.fetch_places(token, places, out),
            Err(mut missing) => {
                missing.truncate(LEAVES_MAX);
                op.leaves_pending = missing.len() as u32;
                for no in missing {
                    self.load_leaves(&[no], LeafWaiter::Read(token), out);
                }
            }
        }
    }

    /// Of one that is over nobody waits.
    pub(crate) fn urgency_of_read(&self, token: Token) -> Urgency {
        self.reads.get(token).map_or(Urgency::Care, |op| op.urgency)
    }

    /// Loads leaves for `waiter`, who is told of each when it is there.
    pub(crate) fn load_leaves(&mut self, leaves: &[LeafNo], waiter: LeafWaiter, out: Out) {
        let urgency = self.urgency_of_leaves(waiter);
        for wanted in self.loader.load(&self.map, &self.segments, leaves, waiter, urgency) {
            self.fetch(wanted, out);
        }
    }

    /// A checkpoint makes room in the log, for which guests may wait.
    fn urgency_of_leaves(&self, waiter: LeafWaiter) -> Urgency {
        match waiter {
            LeafWaiter::Read(op) => self.urgency_of_read(op),
            LeafWaiter::Fold => Urgency::Normal,
            LeafWaiter::ReadAhead | LeafWaiter::Cleaner | LeafWaiter::Audit => Urgency::Care,
        }
    }

    /// The layer that a request for this sees first, if there is one still.
    pub(crate) fn layer_of(&self, of: Target) -> Option<ObjectId> {
        match of {
            Target::Head(head) => self.map.layers().live(head),
            Target::Snapshot(layer) => self.map.layers().snapshot(layer).map(|_| layer),
        }
    }

    pub(crate) fn on_read_leaf(&mut self, token: Token, no: LeafNo, leaf: Result<Arc<Leaf>, FetchError>, out: Out) {
        let pointer = self.map.directory().get(no);
        let Some(op) = self.reads.get_mut(token) else { return };
        match (leaf, pointer) {
            (Ok(leaf), Some(pointer)) => op.pins.hold(no, pointer, leaf),
            (Err(FetchError::Lost), _) => op.failed = Some(FetchError::Lost),
            (Ok(_), None) | (Err(FetchError::Gone), _) => {}
        }
        op.leaves_pending -= 1;
        if op.leaves_pending == 0 {
            op.trail.mark(self.basis.now, Stage::Map);
            if op.failed.is_some() {
                return self.finish_read(token, out);
            }
            self.look_up(token, out);
        }
    }

    fn fetch_places(&mut self, token: Token, places: Vec<Piece<Place>>, out: Out) {
        let mut fetches = Vec::new();
        let op = self.reads.get_mut(token).expect("still reading");
        if let (Reader::Guest(_), 0, of, range) = (op.reader, op.restarts, op.of, op.range) {
            self.watch_read(of, blocks_of(range), &places, out);
        }
        let op = self.reads.get_mut(token).expect("still reading");
        op.parts.clear();
        op.is_hole = places.iter().all(|piece| matches!(piece.value, None | Some(Place::Zero)));
        for piece in places {
            let bytes = piece.len as usize * BLOCK_BYTES;
            match piece.value {
                None | Some(Place::Zero) => op.parts.push(Some(Buf::zeroes(bytes))),
                Some(Place::Log { data, .. }) => op.parts.push(Some(data)),
                Some(Place::Segment { segment, stored, crcs }) => {
                    let geometry = self.segments.get(segment).expect("a named segment is in the table").geometry;
                    cut(&geometry, &stored, &crcs, false, |run, crcs, units| {
                        fetches.push(PartFetch { part: op.parts.len() as u32, segment, run, crcs, units });
                        op.parts.push(None);
                    });
                }
            }
        }
        self.start_part_fetches(token, fetches, out);
    }

    fn start_part_fetches(&mut self, token: Token, fetches: Vec<PartFetch>, out: Out) {
        let op = self.reads.get_mut(token).expect("still reading");
        let is_copied = matches!(op.reader, Reader::Modify(_)) || matches!(op.of, Target::Snapshot(_));
        op.pending = fetches.len() as u32;
        if fetches.is_empty() {
            return self.finish_read(token, out);
        }
        // What goes into a block that is written anew, or from a snapshot into a backup or another grid, must be right:
        // the checksum of the copy would vouch for damage.
        let checked = self.basis.config.checked_reads || is_copied;
        let urgency = op.urgency;
        for PartFetch { part, segment, run, crcs, units } in fetches {
            let (block, blocks) = run;
            let topology = Topology::new(&self.basis, &self.peers);
            self.rotation.count_read(topology, &self.segments, segment, u64::from(blocks) * BLOCK_BYTES as u64);
            if units.is_some() {
                let by = Recipient::Read { op: token, part };
                self.fetch(Wanted { by, urgency, segment, shape: None, run, crcs: Some(crcs), units }, out);
                continue;
            }
            let taker = Taker { op: token, part, block, blocks, crcs: checked.then_some(crcs) };
            if let Some(alone) = self.take_ahead(segment, taker, out) {
                self.fetch_taken(segment, alone, out);
            }
        }
    }

    pub(crate) fn on_read_part(&mut self, token: Token, part: u32, result: Result<Buf, FetchError>, out: Out) {
        let Some(op) = self.reads.get_mut(token) else { return };
        op.pending -= 1;
        match result {
            Ok(bytes) => op.parts[part as usize] = Some(bytes),
            Err(error) => op.failed = Some(error),
        }
        if op.pending > 0 {
            return;
        }
        Answer::mark(self.basis.answer, self.basis.now, &mut op.trail);
        if op.failed == Some(FetchError::Gone) {
            op.failed = None;
            op.restarts += 1;
            assert!(op.restarts < RESTARTS_MAX, "a read finds its segments freed again and again");
            return self.look_up(token, out);
        }
        self.finish_read(token, out);
    }

    /// All bytes are there: answer, if the grants allow it, else when they do.
    fn finish_read(&mut self, token: Token, out: Out) {
        if !self.is_answerable(token) {
            self.awaiting_grant.push(token);
            let soon = self.basis.now + std::time::Duration::from_millis(1);
            self.ask_grants(soon, out);
            return;
        }
        let Some(mut op) = self.end_read(token) else { return };
        op.trail.mark(self.basis.now, Stage::Grant);
        let result = match op.failed {
            Some(_) => Err(BlockError::Unavailable),
            None => Ok(trimmed_parts(&op)),
        };
        match op.reader {
            Reader::Modify(id) => match result {
                Ok(parts) => self.on_modify_read(id, &parts, op.is_hole, out),
                Err(error) => self.on_modify_failed(id, error, out),
            },
            Reader::Guest(request) | Reader::Status(request) | Reader::Changes(request, _) => {
                self.counters.reads += 1;
                self.governor.on_answered(self.basis.now.since(op.began_at));
                self.counters.read_bytes += op.range.len;
                let trail = matches!(op.reader, Reader::Guest(_)).then_some(op.trail);
                match result {
                    Ok(parts) => self.answer_read(request, trail, BlockData::Data(parts), out),
                    Err(error) => self.reply(request, Err(error), out),
                }
            }
        }
    }

    pub(crate) fn serve_granted_reads(&mut self, out: Out) {
        if self.awaiting_grant.is_empty() {
            return;
        }
        let awaiting = std::mem::take(&mut self.awaiting_grant);
        let (ready, waiting): (Vec<_>, Vec<_>) = awaiting.into_iter().partition(|token| self.is_answerable(*token));
        self.awaiting_grant = waiting;
        if !self.awaiting_grant.is_empty() {
            let soon = self.basis.now + std::time::Duration::from_millis(1);
            self.ask_grants(soon, out);
        }
        for token in ready {
            let status = self.reads.get(token).is_some_and(ReadOp::is_status);
            if status { self.look_up(token, out) } else { self.finish_read(token, out) }
        }
    }

    /// One that is gone needs nothing.
    fn is_answerable(&self, token: Token) -> bool {
        self.reads.get(token).is_none_or(|op| self.may_answer(op.began_at))
    }

    fn answer_status(&mut self, token: Token, places: &[Piece<Place>], out: Out) {
        if !self.is_answerable(token) {
            return self.finish_read(token, out);
        }
        let op = self.end_read(token).expect("still reading");
        let (first, _) = blocks_of(op.range);
        let end = op.range.end().expect("checked when it came in");
        let mut extents: Vec<StatusExtent> = Vec::new();
        for piece in places {
            let from = (piece.start * BLOCK_BYTES as u64).max(op.range.offset);
            let to = ((piece.start + piece.len) * BLOCK_BYTES as u64).min(end);
            assert!(piece.start >= first && to > from, "pieces lie in the range");
            let set = match (op.reader, &piece.value) {
                (_, None) => false,
                (Reader::Changes(..), Some(_)) => true,
                (_, Some(place)) => *place != Place::Zero,
            };
            match extents.last_mut() {
                Some(last) if last.set == set => last.len += to - from,
                _ => extents.push(StatusExtent { len: to - from, set }),
            }
        }
        let token = op.guest().expect("only guests ask for a status");
        self.answer_read(token, None, BlockData::Status(extents), out);
    }
}

/// Blocks that a byte range touches: (first, count).
pub(crate) fn blocks_of(range: ByteRange) -> (u64, u64) {
    let block = BLOCK_BYTES as u64;
    let first = range.offset / block;
    let end = (range.offset + range.len).div_ceil(block);
    (first, end - first)
}

/// The parts without what lies outside the byte range asked for.
fn trimmed_parts(op: &ReadOp) -> Vec<Buf> {
    let mut skip = (op.range.offset % BLOCK_BYTES as u64) as usize;
    let mut left = op.range.len as usize;
    let mut parts = Vec::with_capacity(op.parts.len());
    for part in &op.parts {
        let part = part.as_ref().expect("all parts are there");
        let from = skip.min(part.len());
        let to = part.len().min(from + left);
        skip -= from;
        left -= to - from;
        if to > from {
            parts.push(part.slice(from..to));
        }
    }
    assert_eq!(left, 0, "the parts cover the range");
    parts
}
