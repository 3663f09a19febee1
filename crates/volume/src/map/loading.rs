//! What a checkpoint says goes into the map: its runs are taken in one after the other, older ones first, in slices.
//!
//! Limits: a slice goes to the end of what it is at, which is a part at most ([`super::run`]): one is put together and
//! summed at once.

use super::Map;
use super::apply::log_place;
use super::layers::{LayerTable, keys_of};
use super::leaf::{Crcs, LEAF_BLOCKS, LeafNo, LeafPointer, Mapped, Overlay, Place, Stored};
use super::leafload::block_runs;
use super::run::{BYTES_A_RUN, Element, Head, PartReader, SavedPlace, SavedRun, Unreadable};
use crate::log::window::Log;
use crate::segment::Segments;
use crate::segment::fetch::{Recipient, Wanted};
use holdfast_base::{BLOCK_BYTES, Buf, Key, Lsn, ObjectId, Urgency, buf, crc32c};
use holdfast_format::record::MetaPointer;
use std::collections::VecDeque;

/// Runs of the overlay that cost as much, to be passed by, as one costs to be changed.
const PASSED_A_RUN: usize = 8;

/// A run of a checkpoint that is being fetched.
#[derive(Debug)]
pub(crate) struct RunLoad {
    pub(crate) pointer: MetaPointer,
    /// Empty where the map has what it says.
    parts: Vec<Option<Buf>>,
    pending: usize,
}

/// The runs of the checkpoint that is being loaded.
#[derive(Debug, Default)]
pub(crate) struct RunLoads {
    runs: Vec<RunLoad>,
}

impl RunLoads {
    /// These runs, of which the map has the first `loaded` ones; and what is to be fetched of the others.
    pub(crate) fn begin(pointers: Vec<MetaPointer>, loaded: usize) -> (RunLoads, Vec<Wanted>) {
        let (mut runs, mut wanted) = (Vec::new(), Vec::new());
        for (at, pointer) in pointers.into_iter().enumerate() {
            let blocks = match at < loaded {
                true => Vec::new(),
                false => block_runs(&pointer.geometry, pointer.block * BLOCK_BYTES as u32, pointer.len_bytes),
            };
            runs.push(RunLoad { parts: vec![None; blocks.len()], pending: blocks.len(), pointer: pointer.clone() });
            for (part, run) in blocks.into_iter().enumerate() {
                let (by, urgency) = (Recipient::Run { at, part: part as u32 }, Urgency::Normal);
                let shape = Some(Box::new((pointer.geometry, pointer.homes.clone())));
                wanted.push(Wanted { by, urgency, segment: pointer.segment, shape, run, crcs: None, units: None });
            }
        }
        (RunLoads { runs }, wanted)
    }

    /// A part of the run of this number, which is awaited, is there. True when that was the last.
    pub(crate) fn on_part(&mut self, at: usize, part: u32, bytes: Buf) -> bool {
        let run = &mut self.runs[at];
        run.parts[part as usize] = Some(bytes);
        run.pending -= 1;
        self.runs.iter().all(|run| run.pending == 0)
    }

    /// Whether anything waits for the run of this number.
    pub(crate) fn awaits(&self, at: usize) -> bool {
        at < self.runs.len()
    }

    /// All are there, and go into the map.
    pub(crate) fn take(&mut self) -> RunsLeft {
        RunsLeft { left: std::mem::take(&mut self.runs).into(), ..RunsLeft::default() }
    }
}

/// Runs that are being taken in.
#[derive(Debug, Default)]
pub(crate) struct RunsLeft {
    left: VecDeque<RunLoad>,
    run: Option<Box<RunLeft>>,
    begun: Vec<MetaPointer>,
}

impl RunsLeft {
    /// All of them, once they are in the map.
    pub(crate) fn into_pointers(self) -> Vec<MetaPointer> {
        assert!(self.run.is_none() && self.left.is_empty(), "some are not in the map yet");
        self.begun
    }
}

/// One that is being taken in: what is left of it.
#[derive(Debug)]
pub(crate) struct RunLeft {
    /// Absent once it is in the map.
    head: Option<Head>,
    /// Layers that are not there any more, and that the overlay may say something of.
    gone: Vec<ObjectId>,
    folded_at: Lsn,
    left: PartReader,
}

impl RunLeft {
    pub(super) fn begin(bytes: Buf) -> Result<RunLeft, Unreadable> {
        let (left, head) = PartReader::begin(bytes)?;
        Ok(RunLeft { folded_at: head.folded_at, head: Some(head), gone: Vec::new(), left })
    }
}

impl RunLoad {
    fn is_in_map(&self) -> bool {
        self.parts.is_empty()
    }

    /// What it says, once it is all there.
    fn read(&self) -> Result<RunLeft, Unreadable> {
        let parts: Vec<Buf> = self.parts.iter().map(|p| p.clone().expect("all parts are there")).collect();
        let bytes = buf::concat(&parts).slice(0..self.pointer.len_bytes as usize);
        if crc32c(&bytes) != self.pointer.crc {
            return Err(Unreadable);
        }
        RunLeft::begin(bytes)
    }
}

/// How far a slice has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Sliced {
    /// What was done, in runs of the overlay.
    pub(crate) work: usize,
    pub(crate) is_done: bool,
}

/// A run of the overlay that is in the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LogRun {
    pub(crate) start: u64,
    pub(crate) blocks: u64,
    pub(crate) lsn: Lsn,
    stamp: Lsn,
}

/// What of a stretch of the overlay is in the log.
#[derive(Debug)]
pub(crate) struct LogRuns {
    pub(crate) found: Vec<LogRun>,
    /// How much that was to find, in runs.
    pub(crate) work: usize,
    /// Where the next stretch begins, if there is one.
    pub(crate) next: Option<u64>,
}

impl Map {
    /// What runs say goes into the map, as much as so much work allows.
    pub(crate) fn load_runs(
        &mut self,
        runs: &mut RunsLeft,
        work_max: usize,
        segments: &mut Segments,
        log: &Log,
    ) -> Result<Sliced, Unreadable> {
        let mut work = 0;
        while work < work_max {
            if let Some(run) = &mut runs.run {
                let Sliced { work: more, is_done } = self.load_some(run, work_max - work, segments, log)?;
                work += more;
                if is_done {
                    runs.run = None;
                }
                continue;
            }
            let Some(next) = runs.left.pop_front() else { return Ok(Sliced { work, is_done: true }) };
            if !next.is_in_map() {
                runs.run = Some(Box::new(next.read()?));
                work += next.pointer.len_bytes as usize / BYTES_A_RUN;
            }
            runs.begun.push(next.pointer);
        }
        Ok(Sliced { work, is_done: false })
    }

    /// What one run says, as much as so much work allows.
    pub(super) fn load_some(
        &mut self,
        run: &mut RunLeft,
        work_max: usize,
        segments: &mut Segments,
        log: &Log,
    ) -> Result<Sliced, Unreadable> {
        if let Some(head) = run.head.take() {
            if head.full {
                self.forget_all();
                segments.reset(segments.own_numbers());
            }
            if let Some(layers) = head.layers {
                self.layers = layers;
                self.layers.refresh();
                run.gone = self.take_gone_layers();
            }
        }
        let mut work = self.forget_layers(&mut run.gone, work_max);
        while work < work_max {
            let before = run.left.bytes_left();
            work += match run.left.next()? {
                None => return Ok(Sliced { work, is_done: true }),
                Some(Element::Leaf(no, pointer)) => self.load_pointer(no, pointer, run.folded_at),
                Some(Element::Segment(no, Some(info))) => {
                    segments.insert(no, info);
                    1
                }
                Some(Element::Segment(no, None)) => {
                    segments.remove(no);
                    1
                }
                Some(Element::Run(piece)) => {
                    self.load_piece(piece, log);
                    1
                }
            };
            work += (before - run.left.bytes_left()) / BYTES_A_RUN;
        }
        Ok(Sliced { work, is_done: false })
    }

    /// Takes out what the overlay says of layers that are not in the table any more, run by run. Tells how many.
    fn forget_layers(&mut self, gone: &mut Vec<ObjectId>, runs_max: usize) -> usize {
        let mut runs = 0;
        while runs < runs_max
            && let Some(layer) = gone.last()
        {
            let keys = keys_of(*layer);
            let first = self.overlay.iter_from(keys.start).next().map(|(start, _, _)| start);
            let Some(start) = first.filter(|start| *start < keys.end) else {
                self.overlaid.remove(layer);
                gone.pop();
                continue;
            };
            let len = self.overlay.len_of_runs(start, keys.end - start, runs_max - runs);
            self.overlay.remove(start, len, |_, _, _| runs += 1);
        }
        runs
    }

    /// Tells how much that was, in runs.
    fn load_pointer(&mut self, no: LeafNo, pointer: Option<LeafPointer>, folded_at: Lsn) -> usize {
        match pointer {
            Some(pointer) => self.directory.insert(no, pointer),
            None => self.directory.remove(no),
        };
        1 + self.forget_under(no, folded_at)
    }

    fn load_piece(&mut self, piece: SavedRun, log: &Log) {
        let SavedRun { key, blocks, stamp, place } = piece;
        let place = match place {
            SavedPlace::Zero => Place::Zero,
            SavedPlace::Segment { segment, block, crcs } => Place::plain(segment, block, Crcs::new(crcs)),
            SavedPlace::Packed { segment, granule, crcs, lengths } => {
                Place::Segment { segment, stored: Stored::Packed { granule, lengths }, crcs: Crcs::new(crcs) }
            }
            SavedPlace::Log(lsn) => log_place(log, lsn, key, blocks),
        };
        self.overlaid.insert(Key(key).object());
        self.overlay.insert(key, blocks, Mapped { place, stamp }, |_, _, _| {});
    }

    /// What older runs said under a leaf folded later. What was still in the log then is said anew by the run that
    /// names the leaf.
    fn forget_under(&mut self, no: LeafNo, captured: Lsn) -> usize {
        let mut runs = 0;
        for piece in self.overlay.pieces(no.first_key(), LEAF_BLOCKS) {
            runs += usize::from(piece.value.is_some());
            if piece.value.is_some_and(|m| m.stamp <= captured) {
                self.overlay.remove(piece.start, piece.len, |_, _, _| {});
            }
        }
        runs
    }

    /// As before anything was loaded.
    pub(crate) fn forget_all(&mut self) {
        self.overlay = Overlay::default();
        self.overlaid.clear();
        self.layers = LayerTable::default();
        self.directory.clear();
        self.nothing_is_counted();
    }

    /// What is in the log of a stretch that begins there, and takes so much work to go through.
    pub(crate) fn log_runs(&self, from: u64, work_max: usize) -> LogRuns {
        let (mut found, mut passed) = (Vec::new(), 0);
        for (start, blocks, Mapped { place, stamp }) in self.overlay.iter_from(from) {
            let work = found.len() + passed / PASSED_A_RUN;
            if work >= work_max {
                return LogRuns { found, work, next: Some(start) };
            }
            passed += 1;
            if let Place::Log { lsn, .. } = place {
                found.push(LogRun { start, blocks, lsn: *lsn, stamp: *stamp });
            }
        }
        LogRuns { work: found.len() + passed.div_ceil(PASSED_A_RUN), found, next: None }
    }

    /// One that was read before the log was there.
    pub(crate) fn put_log_in(&mut self, run: LogRun, log: &Log) {
        if log.get(run.lsn).is_some() {
            let place = log_place(log, run.lsn, run.start, run.blocks);
            self.overlay.insert(run.start, run.blocks, Mapped { place, stamp: run.stamp }, |_, _, _| {});
        }
    }
}
