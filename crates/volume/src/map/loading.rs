//! What a checkpoint says goes into the map: its runs are taken in one after the other, older ones first.

use super::Map;
use super::apply::log_place;
use super::layers::LayerTable;
use super::leaf::{Crcs, LEAF_BLOCKS, LeafNo, LeafPointer, Mapped, Overlay, Place, Stored};
use super::leafload::block_runs;
use super::run::{Element, Head, PartReader, SavedPlace, SavedRun, Unreadable};
use crate::log::window::Log;
use crate::segment::Segments;
use crate::segment::fetch::{Recipient, Wanted};
use holdfast_base::{BLOCK_BYTES, Buf, Key, Lsn, buf, crc32c};
use holdfast_format::record::MetaPointer;

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
            for (part, (block, blocks)) in blocks.into_iter().enumerate() {
                let (by, segment) = (Recipient::Run { at, part: part as u32 }, pointer.segment);
                let shape = Some(Box::new((pointer.geometry, pointer.homes.clone())));
                wanted.push(Wanted { by, segment, shape, block, blocks, crcs: None });
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

    pub(crate) fn take(&mut self) -> Vec<RunLoad> {
        std::mem::take(&mut self.runs)
    }
}

/// One that is being taken in: what is left of it.
#[derive(Debug)]
pub(crate) struct RunLeft {
    /// Absent once it is in the map.
    head: Option<Head>,
    folded_at: Lsn,
    left: PartReader,
}

impl RunLeft {
    pub(super) fn begin(bytes: Buf) -> Result<RunLeft, Unreadable> {
        let (left, head) = PartReader::begin(bytes)?;
        Ok(RunLeft { folded_at: head.folded_at, head: Some(head), left })
    }
}

impl RunLoad {
    pub(crate) fn is_in_map(&self) -> bool {
        self.parts.is_empty()
    }

    /// What it says, once it is all there.
    pub(crate) fn read(&self) -> Result<RunLeft, Unreadable> {
        let parts: Vec<Buf> = self.parts.iter().map(|p| p.clone().expect("all parts are there")).collect();
        let bytes = buf::concat(&parts).slice(0..self.pointer.len_bytes as usize);
        if crc32c(&bytes) != self.pointer.crc {
            return Err(Unreadable);
        }
        RunLeft::begin(bytes)
    }
}

impl Map {
    /// All that a run says goes into the map.
    pub(crate) fn load_run(&mut self, run: &RunLoad, segments: &mut Segments, log: &Log) -> Result<(), Unreadable> {
        let is_done = self.load_some(&mut run.read()?, usize::MAX, segments, log)?;
        assert!(is_done, "there are not so many");
        Ok(())
    }

    /// At most so many leaves, segments and pieces; true when that was all.
    pub(crate) fn load_some(
        &mut self,
        run: &mut RunLeft,
        count: usize,
        segments: &mut Segments,
        log: &Log,
    ) -> Result<bool, Unreadable> {
        if let Some(head) = run.head.take() {
            if head.full {
                self.forget_all();
                segments.reset(segments.first_own());
            }
            if let Some(layers) = head.layers {
                self.layers = layers;
                self.layers.refresh();
                self.forget_runs_of_gone_layers();
            }
        }
        for _ in 0..count {
            match run.left.next()? {
                None => return Ok(true),
                Some(Element::Leaf(no, pointer)) => self.load_pointer(no, pointer, run.folded_at),
                Some(Element::Segment(no, Some(info))) => segments.insert(no, info),
                Some(Element::Segment(no, None)) => {
                    segments.remove(no);
                }
                Some(Element::Run(piece)) => self.load_piece(piece, log),
            }
        }
        Ok(false)
    }

    fn load_pointer(&mut self, no: LeafNo, pointer: Option<LeafPointer>, folded_at: Lsn) {
        match pointer {
            Some(pointer) => self.directory.insert(no, pointer),
            None => self.directory.remove(no),
        };
        self.forget_under(no, folded_at);
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
    fn forget_under(&mut self, no: LeafNo, captured: Lsn) {
        for piece in self.overlay.pieces(no.first_key(), LEAF_BLOCKS) {
            if piece.value.is_some_and(|m| m.stamp <= captured) {
                self.overlay.remove(piece.start, piece.len, |_, _, _| {});
            }
        }
    }

    /// As before anything was loaded.
    pub(crate) fn forget_all(&mut self) {
        self.overlay = Overlay::default();
        self.overlaid.clear();
        self.layers = LayerTable::default();
        self.directory.clear();
        self.nothing_is_counted();
    }

    /// Of what was read before the log was there.
    pub(crate) fn put_log_in(&mut self, log: &Log) {
        let in_log: Vec<(u64, u64, Lsn, Lsn)> = self
            .overlay
            .iter_from(0)
            .filter_map(|(start, len, mapped)| match mapped.place {
                Place::Log { lsn, .. } if log.get(lsn).is_some() => Some((start, len, lsn, mapped.stamp)),
                _ => None,
            })
            .collect();
        for (start, len, lsn, stamp) in in_log {
            let place = log_place(log, lsn, start, len);
            self.overlay.insert(start, len, Mapped { place, stamp }, |_, _, _| {});
        }
    }
}
