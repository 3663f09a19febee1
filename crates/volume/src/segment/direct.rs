//! Bulk writes that become segments without passing through the log (protocol rule 13).
//!
//! Role: [`DirectWrites`] gathers them into segments, which the controller writes.
//!
//! Bulk writes in flight together share a segment, closed when it is full, after [`CLOSE_AFTER`], or when fewer than
//! [`SEGMENTS_WANTED`] are on their way: so that one is received and encoded while another is being stored, and a lone
//! writer does not wait. They take their LSN with the commit record, after all shards are durable.

use crate::segment::writer::{JobKind, Work};
use holdfast_base::{BLOCK_BYTES, BlockCrc, Buf, Instant, Key, ObjectId, Token, block_crcs};
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

/// A write, a run of its blocks, and how many.
pub(crate) type DirectRun = (Token, Key, u64);

#[derive(Debug, Default)]
pub(crate) struct DirectWrites {
    pieces: Vec<Piece>,
    bytes: u64,
    opened_at: Option<Instant>,
    segments_in_flight: usize,
    /// Runs being written, this batch's and its predecessors'.
    covering: Vec<DirectRun>,
    in_flight_bytes: u64,
}

impl DirectWrites {
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.opened_at.map(|at| at + CLOSE_AFTER)
    }

    pub(crate) fn has_room(&self) -> bool {
        self.in_flight_bytes < IN_FLIGHT_BYTES_MAX
    }

    pub(crate) fn in_flight_bytes(&self) -> u64 {
        self.in_flight_bytes
    }

    pub(crate) fn covers(&self, block: u64) -> bool {
        self.covering.iter().any(|(_, key, blocks)| (key.lba().0..key.lba().0 + blocks).contains(&block))
    }

    /// Layers that something is on its way to.
    pub(crate) fn layers(&self) -> impl Iterator<Item = ObjectId> {
        self.covering.iter().map(|(_, key, _)| key.object())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.covering.is_empty()
    }

    /// Asserts what must hold between events (tests and the simulator).
    pub(crate) fn verify(&self) {
        let gathered: u64 = self.pieces.iter().map(|piece| piece.data.len() as u64).sum();
        assert_eq!(self.bytes, gathered, "what is gathered is counted");
        assert_eq!(self.opened_at.is_some(), !self.pieces.is_empty(), "a segment waits while something is in it");
        let covered: u64 = self.covering.iter().map(|(.., blocks)| blocks * BLOCK_BYTES as u64).sum();
        assert_eq!(self.in_flight_bytes, covered, "what is in flight is counted");
    }

    /// Adds whole blocks of one write, cut to the size of a segment. Into how many parts it was cut, and segments that
    /// are full.
    pub(crate) fn add(
        &mut self,
        now: Instant,
        segment_bytes: usize,
        op: Token,
        first: Key,
        data: &Buf,
    ) -> (u32, Vec<Work>) {
        let (mut at, mut parts, mut full) = (0, 0, Vec::new());
        while at < data.len() {
            let room = segment_bytes - self.bytes as usize;
            let len = room.min(data.len() - at);
            let key = first.offset((at / BLOCK_BYTES) as u64);
            self.bytes += len as u64;
            self.in_flight_bytes += len as u64;
            self.covering.push((op, key, (len / BLOCK_BYTES) as u64));
            self.pieces.push(Piece { op, key, data: data.slice(at..at + len) });
            self.opened_at.get_or_insert(now);
            (at, parts) = (at + len, parts + 1);
            if self.bytes as usize >= segment_bytes {
                full.extend(self.close());
            }
        }
        (parts, full)
    }

    /// What was gathered, where fewer segments are on their way than are wanted.
    pub(crate) fn close_early(&mut self) -> Option<Work> {
        if self.segments_in_flight < SEGMENTS_WANTED { self.close() } else { None }
    }

    /// What has waited for long enough.
    pub(crate) fn close_late(&mut self, now: Instant) -> Option<Work> {
        if self.deadline().is_some_and(|at| at <= now) { self.close() } else { None }
    }

    /// What was gathered goes out now.
    pub(crate) fn close(&mut self) -> Option<Work> {
        let pieces = std::mem::take(&mut self.pieces);
        if pieces.is_empty() {
            return None;
        }
        (self.bytes, self.opened_at) = (0, None);
        self.segments_in_flight += 1;
        let mut extents = Vec::with_capacity(pieces.len());
        let mut payload = Vec::with_capacity(pieces.len());
        let mut crcs: Vec<BlockCrc> = Vec::new();
        let mut writes = Vec::with_capacity(pieces.len());
        for piece in pieces {
            let blocks = (piece.data.len() / BLOCK_BYTES) as u32;
            extents.push(CommitExtent { key: piece.key, blocks, source: Source::Direct });
            crcs.extend(block_crcs(&piece.data));
            payload.push(piece.data);
            writes.push((piece.op, piece.key, u64::from(blocks)));
        }
        Some(Work { extents, payload, crcs, ..Work::new(JobKind::Direct { writes }) })
    }

    /// A segment of these runs is on its way no more.
    pub(crate) fn on_segment_ended(&mut self) {
        self.segments_in_flight -= 1;
    }

    /// A run of such a segment is where it belongs, or was refused.
    pub(crate) fn on_run_ended(&mut self, run: DirectRun) {
        let at = self.covering.iter().position(|of| *of == run);
        self.covering.swap_remove(at.expect("a finished run was in flight"));
        self.in_flight_bytes -= run.2 * BLOCK_BYTES as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEGMENT: usize = 8 * BLOCK_BYTES;
    const NOW: Instant = Instant(1_000_000_000);

    fn add(direct: &mut DirectWrites, op: u64, first: u64, blocks: usize) -> (u32, Vec<Work>) {
        let added = direct.add(NOW, SEGMENT, Token(op), Key(first), &Buf::copy_from(&vec![1; blocks * BLOCK_BYTES]));
        direct.verify();
        added
    }

    fn runs(work: &Work) -> Vec<DirectRun> {
        let JobKind::Direct { writes } = &work.kind else { panic!("{:?}", work.kind) };
        writes.clone()
    }

    #[test]
    fn writes_share_a_segment_and_are_cut_at_its_end() {
        let mut direct = DirectWrites::default();
        let (parts, full) = add(&mut direct, 1, 0, 6);
        assert!((parts, full.len()) == (1, 0) && direct.deadline() == Some(NOW + CLOSE_AFTER));
        let (parts, full) = add(&mut direct, 2, 100, 5);
        assert_eq!((parts, full.len()), (2, 1));
        assert_eq!(runs(&full[0]), [(Token(1), Key(0), 6), (Token(2), Key(100), 2)]);
        assert_eq!(full[0].bytes(), SEGMENT as u64);
        assert_eq!(direct.in_flight_bytes(), 11 * BLOCK_BYTES as u64);
        assert!(direct.covers(5) && direct.covers(104) && !direct.covers(105));
        let late = direct.close_late(NOW + CLOSE_AFTER).expect("it has waited");
        assert_eq!(runs(&late), [(Token(2), Key(102), 3)]);
        for run in runs(&full[0]).into_iter().chain(runs(&late)) {
            direct.on_run_ended(run);
        }
        direct.verify();
        assert!(direct.is_empty());
    }

    #[test]
    fn a_lone_writer_does_not_wait_and_a_third_segment_does() {
        let mut direct = DirectWrites::default();
        for op in 0..SEGMENTS_WANTED as u64 {
            add(&mut direct, op, 10 * op, 1);
            assert!(direct.close_early().is_some());
        }
        add(&mut direct, 9, 90, 1);
        assert!(direct.close_early().is_none() && direct.close_late(NOW).is_none());
        direct.on_segment_ended();
        assert!(direct.close_early().is_some_and(|work| runs(&work) == [(Token(9), Key(90), 1)]));
        assert!(direct.close().is_none(), "nothing is left");
    }
}
