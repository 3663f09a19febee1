//! Bulk writes that become segments without passing through the log (protocol rule 13).
//!
//! Bulk writes in flight together share a segment, closed when it is full, after [`CLOSE_AFTER`], or when fewer than
//! [`SEGMENTS_WANTED`] are on their way: so that one is received and encoded while another is being stored, and a lone
//! writer does not wait. They take their LSN with the commit record, after all shards are durable.

use crate::controller::{Controller, Out};
use crate::segment::writer::{JobKind, Work};
use holdfast_base::{BLOCK_BYTES, BlockCrc, BlockError, Buf, Instant, Key, ObjectId, Token, block_crcs};
use holdfast_format::record::{CommitExtent, Source};
use std::time::Duration;

/// How long a segment waits for more bulk writes.
const CLOSE_AFTER: Duration = Duration::from_millis(1);

/// Segments on their way below which one is closed with what it has.
const SEGMENTS_WANTED: usize = 2;

/// Payload of bulk writes in flight: the memory that a host lends them besides its write-back budget.
const IN_FLIGHT_BYTES_MAX: u64 = 64 << 20;

#[derive(Debug)]
struct Piece {
    op: Token,
    key: Key,
    data: Buf,
}

#[derive(Debug, Default)]
pub(crate) struct DirectWrites {
    pieces: Vec<Piece>,
    bytes: u64,
    opened_at: Option<Instant>,
    segments_in_flight: usize,
    /// Runs being written, this batch's and its predecessors': (key, blocks, write).
    covering: Vec<(Key, u64, Token)>,
    pub(crate) in_flight_bytes: u64,
}

impl DirectWrites {
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.opened_at.map(|at| at + CLOSE_AFTER)
    }

    pub(crate) fn has_room(&self) -> bool {
        self.in_flight_bytes < IN_FLIGHT_BYTES_MAX
    }

    pub(crate) fn covers(&self, block: u64) -> bool {
        self.covering.iter().any(|(key, blocks, _)| (key.lba().0..key.lba().0 + blocks).contains(&block))
    }

    /// Layers that something is on its way to.
    pub(crate) fn layers(&self) -> impl Iterator<Item = ObjectId> {
        self.covering.iter().map(|(key, _, _)| key.object())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.covering.is_empty()
    }

    fn finished(&mut self, op: Token, key: Key, blocks: u64) {
        let at = self.covering.iter().position(|run| *run == (key, blocks, op));
        self.covering.swap_remove(at.expect("a finished run was in flight"));
        self.in_flight_bytes -= blocks * BLOCK_BYTES as u64;
    }
}

impl Controller {
    /// Adds whole blocks of one write, cut to the size of a segment.
    pub(crate) fn add_direct(&mut self, op: Token, first: Key, data: Buf, out: Out) {
        let segment_bytes = self.basis.config.segment_payload_bytes as usize;
        let mut at = 0;
        let mut pieces = 0;
        // It has an end only when all of it is cut: what is refused is so at once.
        self.add_parts(1, op);
        while at < data.len() {
            let room = segment_bytes - self.direct.bytes as usize;
            let len = room.min(data.len() - at);
            let piece = data.slice(at..at + len);
            let key = first.offset((at / BLOCK_BYTES) as u64);
            pieces += 1;
            self.direct.bytes += len as u64;
            self.direct.in_flight_bytes += len as u64;
            self.direct.covering.push((key, (len / BLOCK_BYTES) as u64, op));
            self.direct.pieces.push(Piece { op, key, data: piece });
            self.direct.opened_at.get_or_insert(self.basis.now);
            at += len;
            if pieces > 1 {
                self.add_parts(1, op);
            }
            if self.direct.bytes as usize >= segment_bytes {
                self.close_direct(out);
            }
        }
        self.close_direct_early(out);
        self.on_write_part_done(op, out);
    }

    fn close_direct_early(&mut self, out: Out) {
        if self.direct.segments_in_flight < SEGMENTS_WANTED && !self.direct.pieces.is_empty() {
            self.close_direct(out);
        }
    }

    pub(crate) fn tick_direct(&mut self, out: Out) {
        if self.direct.deadline().is_some_and(|at| at <= self.basis.now) {
            self.close_direct(out);
        }
    }

    /// What has been collected goes out now.
    pub(crate) fn flush_direct(&mut self, out: Out) {
        if !self.direct.pieces.is_empty() {
            self.close_direct(out);
        }
    }

    fn close_direct(&mut self, out: Out) {
        let pieces = std::mem::take(&mut self.direct.pieces);
        self.direct.bytes = 0;
        self.direct.opened_at = None;
        self.direct.segments_in_flight += 1;
        let mut extents = Vec::with_capacity(pieces.len());
        let mut payload = Vec::with_capacity(pieces.len());
        let mut crcs: Vec<BlockCrc> = Vec::new();
        let mut writes = Vec::with_capacity(pieces.len());
        for piece in pieces {
            let blocks = (piece.data.len() / BLOCK_BYTES) as u32;
            extents.push(CommitExtent { key: piece.key, blocks, source: Source::Bypass });
            crcs.extend(block_crcs(&piece.data));
            payload.push(piece.data);
            writes.push((piece.op, piece.key, u64::from(blocks)));
        }
        self.counters.bypass_bytes += crcs.len() as u64 * BLOCK_BYTES as u64;
        self.start_job(Work { kind: JobKind::Direct { writes }, extents, payload, crcs }, out);
    }

    /// There is no room for these writes.
    pub(crate) fn on_direct_refused(&mut self, writes: Vec<(Token, Key, u64)>, out: Out) {
        self.direct.segments_in_flight -= 1;
        for (op, key, blocks) in writes {
            self.direct.finished(op, key, blocks);
            self.fail_write(op, BlockError::NoSpace, out);
        }
    }

    pub(crate) fn on_direct_committed(&mut self, writes: Vec<(Token, Key, u64)>, out: Out) {
        self.direct.segments_in_flight -= 1;
        for (op, key, blocks) in writes {
            self.direct.finished(op, key, blocks);
            self.on_write_part_done(op, out);
        }
        self.close_direct_early(out);
    }
}
