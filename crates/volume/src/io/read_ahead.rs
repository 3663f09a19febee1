//! Reading ahead for clients that read in order what lies scattered. Where a volume was written at random, blocks that
//! follow each other lie in as many segments; but in each segment blocks are sorted by address, so beside one that is
//! wanted now lie some that will be wanted soon. Such neighbours are read in one operation, when the first of them is
//! wanted (G6: streams that a host interleaves reach the disks as what they are).
//!
//! States of a stream: watched -> planned (its reads follow each other, in small pieces: the map is looked up for a
//! window before its last read, and what lies side by side in a shard becomes a run) -> watched (what it reads is not
//! scattered, or lies too far apart in each segment) | forgotten (idle).
//! States of a run: planned -> coming (a read wants some of it: all of it is fetched) -> here -> dropped (all was
//! taken, or its stream has passed it, or is forgotten).
//!
//! Segments never change and no number is used twice, so a run is right for as long as the map names its blocks; what
//! is overwritten meanwhile nobody asks for. Runs are kept as they lie in their shard: each read checks and opens what
//! it takes, as if it had fetched that. What is wrong, or did not come, it fetches by itself.
//!
//! Limits: `read_ahead_bytes_max` of runs that are coming or here; windows of all streams together are as long.

use crate::api::Target;
use crate::controller::{Controller, Out};
use crate::map::{Crcs, LEAF_BLOCKS, LeafNo, LeafWaiter, Piece, Pins, Place, Stored};
use crate::segment::encrypt::decrypt_blocks;
use crate::segment::fetch::{FetchError, Recipient, Wanted};
use holdfast_base::{BLOCK_BYTES, Buf, Instant, Token};
use holdfast_format::record::SegmentNo;
use std::collections::BTreeMap;
use std::time::Duration;

/// Streams that are watched at a time.
const STREAMS_MAX: usize = 8;

/// Pieces of a volume that are as long are read as they are.
const PIECE_BLOCKS_MAX: u64 = 8;

/// What may lie between two pieces of a run.
const GAP_BLOCKS_MAX: u32 = 8;

/// A stream that has read nothing for so long is forgotten.
const IDLE_MAX: Duration = Duration::from_secs(2);

/// However long, so many reads must follow each other.
const READS_MIN: u32 = 4;

/// Runs that a stream has passed are looked for after so many blocks.
const SWEPT_AFTER: u64 = 1024;

/// Planning begins when so many blocks of a window are not planned, and does so many leaves of the map for one read.
const PLANNED_MIN: u64 = 64;
const PLANNED_LEAVES_MAX: usize = 2;

/// Where so few pieces lie in each run of a window, in 1/100, the stream is left alone for some windows.
const PIECES_PER_RUN_MIN: u64 = 125;
const RESTS_WINDOWS: u64 = 4;

/// Shorter windows hold hardly two blocks of one segment.
const WINDOW_BLOCKS_MIN: u64 = 16;

/// A client that reads in order, perhaps.
#[derive(Debug)]
struct Stream {
    name: u64,
    of: Target,
    /// Where it was judged last, and one past the last block that it read since.
    from: u64,
    next: u64,
    seen: Seen,
    is_planned: bool,
    /// It is not planned before it comes here.
    rests_to: u64,
    /// The map was looked up for blocks before this one.
    planned_to: u64,
    /// Pieces that were planned for it since that was judged, and the runs that they make.
    gain: (u64, u64),
    /// Where runs that it has passed were dropped last.
    swept_to: u64,
    /// Leaves of the map that were asked for, for what is planned next.
    asked: Vec<LeafNo>,
    used_at: Instant,
}

/// What a stream read since it was judged.
#[derive(Debug, Default)]
struct Seen {
    reads: u32,
    blocks: u64,
    /// Pieces of segments that these were.
    pieces: u64,
    /// Blocks that were left out, and not read since.
    skipped: u64,
    /// Blocks that were read although they lie before others that were.
    again: u64,
}

#[derive(Debug)]
struct Run {
    /// One past its last block in the segment's payload.
    end: u32,
    /// Blocks of it that nobody took yet.
    wanted: u64,
    stream: u64,
    /// Where its last block lies in what the stream reads.
    last: u64,
    state: RunState,
}

#[derive(Debug)]
enum RunState {
    Planned,
    Coming(Vec<Taker>),
    Here(Buf),
}

/// A part of a read that is in a run.
#[derive(Debug)]
pub(crate) struct Taker {
    pub(crate) op: Token,
    pub(crate) part: u32,
    /// Of the segment's payload.
    pub(crate) block: u32,
    pub(crate) blocks: u32,
    pub(crate) crcs: Option<Crcs>,
}

#[derive(Debug, Default)]
pub(crate) struct ReadAhead {
    streams: Vec<Stream>,
    next_name: u64,
    /// By their first block. A block is looked for in the one that begins last before it.
    runs: BTreeMap<(SegmentNo, u32), Run>,
    /// Of runs that are coming or here.
    held_blocks: u64,
}

impl Stream {
    fn note(&mut self, first: u64, blocks: u64, pieces: u64) {
        let seen = &mut self.seen;
        seen.reads += 1;
        seen.blocks += blocks;
        seen.pieces += pieces;
        seen.skipped += first.saturating_sub(self.next);
        let behind = (first + blocks).min(self.next).saturating_sub(first);
        let filled = behind.min(seen.skipped);
        seen.skipped -= filled;
        seen.again += behind - filled;
        self.next = self.next.max(first + blocks);
    }
}

impl ReadAhead {
    /// Drops runs, but those that are coming: they are dropped when they are here.
    fn drop_runs(&mut self, is_over: impl Fn(&Run) -> bool) {
        let held = &mut self.held_blocks;
        self.runs.retain(|(_, first), run| {
            let goes = !matches!(run.state, RunState::Coming(_)) && is_over(run);
            if goes && matches!(run.state, RunState::Here(_)) {
                *held -= u64::from(run.end - first);
            }
            !goes
        });
    }

    fn forget(&mut self, at: usize) {
        let gone = self.streams.swap_remove(at);
        if gone.planned_to > 0 {
            self.drop_runs(|run| run.stream == gone.name);
        }
    }

    /// The stream that a read belongs to, or a new one in the place of the one that is missed least.
    fn stream_of(&mut self, of: Target, first: u64, overtaken_max: u64, now: Instant) -> usize {
        let is_near = |s: &Stream| s.of == of && first.abs_diff(s.next) <= overtaken_max;
        if let Some(at) = self.streams.iter().position(is_near) {
            return at;
        }
        if self.streams.len() == STREAMS_MAX {
            let least = (0..STREAMS_MAX).min_by_key(|at| (self.streams[*at].is_planned, self.streams[*at].used_at));
            self.forget(least.expect("there are some"));
        }
        self.next_name += 1;
        self.streams.push(Stream {
            name: self.next_name,
            of,
            from: first,
            next: first,
            seen: Seen::default(),
            is_planned: false,
            rests_to: 0,
            planned_to: 0,
            gain: (0, 0),
            swept_to: 0,
            asked: Vec::new(),
            used_at: now,
        });
        self.streams.len() - 1
    }

    /// Whether each run has a stream that it is dropped with, or is still coming, and what is held adds up.
    fn is_accounted_for(&self) -> bool {
        let is_planned = |name: u64| self.streams.iter().any(|s| s.name == name && s.planned_to > 0);
        let is_coming = |run: &Run| matches!(run.state, RunState::Coming(_));
        let is_held = |run: &Run| !matches!(run.state, RunState::Planned);
        let held = self.runs.iter().filter(|(_, run)| is_held(run)).map(|((_, first), run)| u64::from(run.end - first));
        self.runs.values().all(|run| is_coming(run) || is_planned(run.stream)) && held.sum::<u64>() == self.held_blocks
    }

    /// The run that has all of these blocks, and its first one.
    fn run_of(&mut self, segment: SegmentNo, block: u32, blocks: u32) -> Option<(u32, &mut Run)> {
        let (key, run) = self.runs.range_mut(..=(segment, block)).next_back()?;
        (key.0 == segment && block + blocks <= run.end).then_some((key.1, run))
    }

    /// Drops a run that is here.
    fn drop_run(&mut self, at: (SegmentNo, u32)) {
        if let Some(run) = self.runs.get(&at).filter(|run| matches!(run.state, RunState::Here(_))) {
            self.held_blocks -= u64::from(run.end - at.1);
            self.runs.remove(&at);
        }
    }

    /// Plans blocks of a segment, with those that lie beside them if these are planned and not fetched: then no run
    /// begins. `end_from` tells where the part of a shard that a block lies in ends.
    fn add(
        &mut self,
        stream: u64,
        segment: SegmentNo,
        (first, blocks): (u32, u32),
        last: u64,
        end_from: impl Fn(u32) -> u32,
    ) -> bool {
        let end = first + blocks;
        if let Some(((_, from), run)) = self.runs.range_mut((segment, 0)..=(segment, first)).next_back() {
            let is_beside = first <= run.end + GAP_BLOCKS_MAX && end <= end_from(*from);
            if end <= run.end || is_beside && matches!(run.state, RunState::Planned) {
                (run.end, run.wanted) = (run.end.max(end), run.wanted + u64::from(blocks));
                (run.stream, run.last) = (stream, run.last.max(last));
                return false;
            }
            if first < run.end {
                return true;
            }
        }
        if self.runs.range((segment, first)..(segment, end)).next().is_none() {
            let run = Run { end, wanted: u64::from(blocks), stream, last, state: RunState::Planned };
            self.runs.insert((segment, first), run);
        }
        true
    }
}

impl Controller {
    /// A client reads these blocks, which lie in `places`.
    pub(crate) fn watch_read(&mut self, of: Target, (first, blocks): (u64, u64), places: &[Piece<Place>], out: Out) {
        if self.basis.config.read_ahead_bytes_max == 0 {
            return;
        }
        let pieces = places.iter().filter(|piece| matches!(piece.value, Some(Place::Segment { .. }))).count() as u64;
        let at = self.readahead.stream_of(of, first, self.overtaken_max(), self.basis.now);
        let stream = &mut self.readahead.streams[at];
        stream.used_at = self.basis.now;
        stream.note(first, blocks, pieces);
        if stream.next - stream.from >= self.basis.config.read_ahead_after_blocks && stream.seen.reads >= READS_MIN {
            self.judge_stream(at);
        }
        if self.readahead.streams[at].is_planned {
            self.plan_ahead(at, out);
        }
    }

    /// Reads of a stream may overtake each other by so many blocks: those of a deep queue do.
    fn overtaken_max(&self) -> u64 {
        2 * self.basis.config.read_ahead_after_blocks
    }

    /// Whether it still reads in order, in pieces of less than half of [`PIECE_BLOCKS_MAX`] on average, and gains by
    /// what is planned.
    fn judge_stream(&mut self, at: usize) {
        let (overtaken_max, window) = (self.overtaken_max(), self.window_blocks());
        let stream = &mut self.readahead.streams[at];
        let advanced = stream.next - stream.from;
        let seen = std::mem::take(&mut stream.seen);
        let is_in_order = seen.skipped.max(seen.again) * 4 <= advanced;
        let is_scattered = seen.pieces * PIECE_BLOCKS_MAX >= 2 * seen.blocks;
        stream.from = stream.next;
        let (name, next) = (stream.name, stream.next);
        let (pieces, runs) = stream.gain;
        if pieces >= window {
            stream.gain = (0, 0);
            if pieces * 100 < runs * PIECES_PER_RUN_MIN {
                stream.rests_to = next + RESTS_WINDOWS * window;
            }
        }
        stream.is_planned = is_in_order && is_scattered && next >= stream.rests_to;
        if !is_in_order && stream.planned_to > 0 {
            stream.planned_to = 0;
            self.readahead.drop_runs(|run| run.stream == name);
        } else if next >= stream.swept_to + SWEPT_AFTER {
            stream.swept_to = next;
            self.readahead.drop_runs(|run| run.stream == name && run.last + overtaken_max < next);
        }
    }

    /// Blocks of one stream's window.
    fn window_blocks(&self) -> u64 {
        let planned = self.readahead.streams.iter().filter(|stream| stream.is_planned).count() as u64;
        let window = self.basis.config.read_ahead_bytes_max / BLOCK_BYTES as u64 / planned.max(1);
        if window < WINDOW_BLOCKS_MIN { 0 } else { window }
    }

    /// Looks the map up towards the end of a stream's window.
    fn plan_ahead(&mut self, at: usize, out: Out) {
        let stream = &self.readahead.streams[at];
        let (of, next) = (stream.of, stream.next);
        let window = self.window_blocks();
        let end = (next + window).min(self.bytes_of(of).unwrap_or(0).div_ceil(BLOCK_BYTES as u64));
        for _ in 0..PLANNED_LEAVES_MAX {
            let from = self.readahead.streams[at].planned_to.max(next);
            let to = ((from / LEAF_BLOCKS + 1) * LEAF_BLOCKS).min(end);
            if from + PLANNED_MIN.min(window / 4) > to {
                return;
            }
            let Some(layer) = self.layer_of(of) else { return };
            match self.map.resolve_through(layer, from, to - from, &Pins::default()) {
                Ok(places) => places.iter().for_each(|piece| self.plan_piece(at, piece)),
                Err(missing) if missing.iter().any(|no| self.loader.is_loading(*no)) => return,
                Err(mut missing) => {
                    let asked = &mut self.readahead.streams[at].asked;
                    missing.retain(|no| !asked.contains(no));
                    if !missing.is_empty() {
                        asked.extend(&missing);
                        return self.load_leaves(&missing, LeafWaiter::ReadAhead, out);
                    }
                    // They did not stay: this leaf is done without.
                }
            }
            let stream = &mut self.readahead.streams[at];
            stream.planned_to = to;
            stream.asked.clear();
        }
    }

    fn plan_piece(&mut self, at: usize, piece: &Piece<Place>) {
        let Some(Place::Segment { segment, stored: Stored::Plain { block }, .. }) = &piece.value else { return };
        if piece.len >= PIECE_BLOCKS_MAX {
            return;
        }
        let geometry = self.segments.get(*segment).expect("a named segment is in the table").geometry;
        let stream = self.readahead.streams[at].name;
        let mut done = 0;
        while done < piece.len as u32 {
            let first = block + done;
            let blocks = geometry.run_from(first).min(piece.len as u32 - done);
            done += blocks;
            let last = piece.start + u64::from(done) - 1;
            let end_from = |from| from + geometry.run_from(from);
            let begins = self.readahead.add(stream, *segment, (first, blocks), last, end_from);
            let (pieces, runs) = &mut self.readahead.streams[at].gain;
            (*pieces, *runs) = (*pieces + 1, *runs + u64::from(begins));
        }
    }

    /// Whether these blocks come, or came, with others: then they are handed out, perhaps at once.
    pub(crate) fn take_ahead(&mut self, segment: SegmentNo, taker: Taker, out: Out) -> Option<Taker> {
        if self.readahead.runs.is_empty() {
            return Some(taker);
        }
        let room = self.basis.config.read_ahead_bytes_max / BLOCK_BYTES as u64;
        let held = self.readahead.held_blocks;
        let Some((first, run)) = self.readahead.run_of(segment, taker.block, taker.blocks) else { return Some(taker) };
        let blocks = run.end - first;
        match &mut run.state {
            RunState::Planned if blocks == taker.blocks => {
                // Nothing beside it after all.
                self.readahead.runs.remove(&(segment, first));
                return Some(taker);
            }
            RunState::Planned if held + u64::from(blocks) > room => {
                // What would come later of it might never be taken whole.
                self.readahead.runs.remove(&(segment, first));
                return Some(taker);
            }
            RunState::Planned => {
                let op = taker.op;
                run.state = RunState::Coming(vec![taker]);
                self.readahead.held_blocks += u64::from(blocks);
                // A read waits for the first of it.
                let (by, urgency) = (Recipient::Ahead { segment, first }, self.urgency_of_read(op));
                let run = (first, blocks);
                self.fetch(Wanted { by, urgency, segment, shape: None, run, crcs: None, units: None }, out);
            }
            RunState::Coming(takers) => takers.push(taker),
            RunState::Here(bytes) => {
                let bytes = bytes.clone();
                self.hand_out((segment, first), &bytes, taker, out);
            }
        }
        None
    }

    pub(crate) fn on_ahead(&mut self, segment: SegmentNo, first: u32, result: Result<Buf, FetchError>, out: Out) {
        let Some(run) = self.readahead.runs.get_mut(&(segment, first)) else { return };
        let RunState::Coming(takers) = &mut run.state else { return };
        let takers = std::mem::take(takers);
        let blocks = u64::from(run.end - first);
        match result {
            Ok(bytes) => {
                run.state = RunState::Here(bytes.clone());
                let stream = run.stream;
                for taker in takers {
                    self.hand_out((segment, first), &bytes, taker, out);
                }
                // Nothing drops it later once its stream is forgotten, or has given up what was planned.
                if !self.readahead.streams.iter().any(|s| s.name == stream && s.planned_to > 0) {
                    self.readahead.drop_run((segment, first));
                }
            }
            Err(_) => {
                self.readahead.runs.remove(&(segment, first));
                self.readahead.held_blocks -= blocks;
                for taker in takers {
                    self.fetch_taken(segment, taker, out);
                }
            }
        }
    }

    /// Gives a read its blocks of a run that is here.
    fn hand_out(&mut self, (segment, first): (SegmentNo, u32), bytes: &Buf, taker: Taker, out: Out) {
        if let Some(run) = self.readahead.runs.get_mut(&(segment, first)) {
            run.wanted = run.wanted.saturating_sub(u64::from(taker.blocks));
            if run.wanted == 0 {
                self.readahead.drop_run((segment, first));
            }
        }
        let from = (taker.block - first) as usize * BLOCK_BYTES;
        let encrypted = bytes.slice(from..from + taker.blocks as usize * BLOCK_BYTES);
        match decrypt_blocks(
            &self.basis.config,
            self.basis.segment_id(segment),
            taker.block,
            encrypted,
            taker.crcs.as_ref(),
        ) {
            Some(bytes) => {
                self.counters.ahead_bytes += bytes.len() as u64;
                self.on_read_part(taker.op, taker.part, Ok(bytes), out);
            }
            None => self.fetch_taken(segment, taker, out),
        }
    }

    /// Fetches for a read by itself.
    pub(crate) fn fetch_taken(&mut self, segment: SegmentNo, taker: Taker, out: Out) {
        let Taker { op, part, block, blocks, crcs } = taker;
        let (by, urgency) = (Recipient::Read { op, part }, self.urgency_of_read(op));
        let run = (block, blocks);
        self.fetch(Wanted { by, urgency, segment, shape: None, run, crcs, units: None }, out);
    }

    /// Forgets streams that nobody reads any more.
    pub(crate) fn rest_readahead(&mut self) {
        let now = self.basis.now;
        while let Some(at) = self.readahead.streams.iter().position(|s| now.since(s.used_at) > IDLE_MAX) {
            self.readahead.forget(at);
        }
        debug_assert!(self.readahead.is_accounted_for(), "runs are left that nothing drops: {:?}", self.readahead);
    }
}
