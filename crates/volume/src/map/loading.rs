//! What a checkpoint says goes into the map: its runs are taken in one after the other, older ones first.

use super::Map;
use super::apply::log_place;
use super::checkpoint::{RunPart, SavedPlace, SavedRun};
use super::layers::LayerTable;
use super::leaf::{Crcs, LEAF_BLOCKS, LeafNo, LeafPointer, Mapped, Overlay, Place};
use crate::log::window::Log;
use crate::segment::{SegmentInfo, Segments};
use holdfast_base::{Buf, Key, Lsn, buf, crc32c};
use holdfast_format::record::{MetaPointer, SegmentNo};
use std::vec::IntoIter;

/// A run of a checkpoint that is being fetched.
#[derive(Debug)]
pub(crate) struct RunLoad {
    pub(crate) pointer: MetaPointer,
    /// Empty where the map has what it says.
    pub(super) parts: Vec<Option<Buf>>,
    pub(super) pending: usize,
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
