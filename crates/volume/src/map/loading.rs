//! What a checkpoint says goes into the map: its runs are fetched, and taken in one after the other, older ones first.

use super::Map;
use super::apply::log_place;
use super::checkpoint::{RunPart, SavedPlace, SavedRun};
use super::layers::LayerTable;
use super::leaf::{Crcs, LEAF_BLOCKS, LeafNo, LeafPointer, Mapped, Overlay, Place};
use super::leafload::block_runs;
use crate::controller::{Controller, Out};
use crate::log::window::Log;
use crate::segment::fetch::{FetchError, Recipient};
use crate::segment::{SegmentInfo, Segments};
use holdfast_base::{BLOCK_BYTES, Buf, Key, Lsn, buf, crc32c};
use holdfast_format::record::{MetaPointer, SegmentNo};
use std::vec::IntoIter;

/// A run of a checkpoint that is being fetched.
#[derive(Debug)]
pub(crate) struct RunLoad {
    pub(crate) pointer: MetaPointer,
    /// Empty where the map has what it says.
    parts: Vec<Option<Buf>>,
    pending: usize,
}

/// One that is being taken in: what is left of it.
#[derive(Debug)]
pub(crate) struct RunLeft {
    full: bool,
    layers: Option<LayerTable>,
    folded_at: Lsn,
    leaves: IntoIter<(u64, Option<LeafPointer>)>,
    segments: IntoIter<(SegmentNo, Option<SegmentInfo>)>,
    overlay: IntoIter<SavedRun>,
}

impl RunLoad {
    pub(crate) fn is_in_map(&self) -> bool {
        self.parts.is_empty()
    }

    /// What it says, once it is all there; `None` where its checksum is wrong.
    pub(crate) fn read(&self) -> Option<RunLeft> {
        let parts: Vec<Buf> = self.parts.iter().map(|p| p.clone().expect("all parts are there")).collect();
        let bytes = buf::concat(&parts);
        let bytes = &bytes[..self.pointer.len_bytes as usize];
        if crc32c(bytes) != self.pointer.crc {
            return None;
        }
        let RunPart { full, layers, folded_at, leaves, segments, overlay } = postcard::from_bytes(bytes).ok()?;
        let (leaves, segments, overlay) = (leaves.into_iter(), segments.into_iter(), overlay.into_iter());
        Some(RunLeft { full, layers, folded_at, leaves, segments, overlay })
    }
}

impl Controller {
    /// Of these runs the map has the first `loaded` ones. [`Controller::on_runs`] when all are there.
    pub(crate) fn fetch_runs(&mut self, pointers: Vec<MetaPointer>, loaded: usize, out: Out) {
        let mut fetches = Vec::new();
        let mut runs = Vec::new();
        for (at, pointer) in pointers.into_iter().enumerate() {
            let blocks = match at < loaded {
                true => Vec::new(),
                false => block_runs(&pointer.geometry, pointer.block * BLOCK_BYTES as u32, pointer.len_bytes),
            };
            runs.push(RunLoad { parts: vec![None; blocks.len()], pending: blocks.len(), pointer: pointer.clone() });
            for (part, run) in blocks.into_iter().enumerate() {
                fetches.push((at, part as u32, pointer.segment, (pointer.geometry, pointer.homes.clone()), run));
            }
        }
        self.opening.as_mut().expect("opening").runs = runs;
        if fetches.is_empty() {
            return self.on_runs(out);
        }
        for (at, part, segment, shape, run) in fetches {
            self.start_fetch(Recipient::Run { at, part }, segment, Some(Box::new(shape)), run, None, out);
        }
    }

    pub(crate) fn on_run_part(&mut self, at: usize, part: u32, result: Result<Buf, FetchError>, out: Out) {
        let Some(opening) = &mut self.opening else { return };
        // Another part could not be read, and nothing waits for this one any more.
        let Some(run) = opening.runs.get_mut(at) else { return };
        let Ok(bytes) = result else {
            if self.is_warming() {
                return self.on_preloaded(None, out);
            }
            return self.opening_waits(
                "the volume's checkpoint can't be read: more of its copies are bad than tolerated",
                out,
            );
        };
        run.parts[part as usize] = Some(bytes);
        run.pending -= 1;
        if opening.runs.iter().all(|r| r.pending == 0) {
            self.on_runs(out);
        }
    }
}

impl Map {
    /// All that a run says goes into the map; false where it can't be read.
    pub(crate) fn load_run(&mut self, run: &RunLoad, segments: &mut Segments, log: &Log) -> bool {
        let Some(mut left) = run.read() else { return false };
        let is_done = self.load_some(&mut left, usize::MAX, segments, log);
        assert!(is_done, "there are not so many");
        true
    }

    /// At most so many leaves, segments and pieces; true when that was all.
    pub(crate) fn load_some(
        &mut self,
        run: &mut RunLeft,
        mut count: usize,
        segments: &mut Segments,
        log: &Log,
    ) -> bool {
        if std::mem::take(&mut run.full) {
            self.forget_all();
            segments.reset(segments.first_own());
        }
        if let Some(layers) = run.layers.take() {
            self.layers = layers;
            self.layers.refresh();
            self.forget_runs_of_gone_layers();
        }
        let mut goes_on = || {
            let is_left = count > 0;
            count = count.saturating_sub(1);
            is_left
        };
        while goes_on() {
            if let Some((no, pointer)) = run.leaves.next() {
                self.load_pointer(LeafNo(no), pointer, run.folded_at);
            } else if let Some((no, info)) = run.segments.next() {
                match info {
                    Some(info) => segments.insert(no, info),
                    None => {
                        segments.remove(no);
                    }
                }
            } else if let Some(piece) = run.overlay.next() {
                self.load_piece(piece, log);
            } else {
                return true;
            }
        }
        false
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
            SavedPlace::Segment { segment, block, crcs } => Place::Segment { segment, block, crcs: Crcs::new(crcs) },
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
