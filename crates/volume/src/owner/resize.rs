//! Changing a volume's size, layout and tiers.
//!
//! What lies beyond the end reads as zeroes if the volume ever reaches there again: the end is discarded when it is cut
//! off, when an opening finds something behind it (its predecessor died in between), and before a volume grows over it.
//!
//! States of growing: asked for -> the discard is in the log -> it is applied -> the root names the new size.

use crate::controller::{Controller, Out};
use crate::log::window::Done;
use crate::owner::root::Change;
use holdfast_base::{BLOCK_BYTES, Buf, HeadId, Lsn};
use holdfast_format::geometry::Layout;
use holdfast_format::record::Record;
use holdfast_format::root::Root;
use holdfast_format::tier::Tiers;
use std::sync::Arc;

#[derive(Debug, Default)]
pub(crate) struct Resizer {
    wanted_bytes: Option<u64>,
    wanted_layout: Option<Layout>,
    pub(crate) wanted_tiers: Option<Tiers>,
    /// The discard that a growing volume waits for.
    cutting: Option<Lsn>,
}

impl Resizer {
    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted_bytes.is_some() || self.wanted_layout.is_some() || self.wanted_tiers.is_some()
    }
}

impl Controller {
    pub(crate) fn on_resize(&mut self, size_bytes: u64) {
        self.resizer.wanted_bytes = Some(size_bytes);
    }

    /// From the swap on everything is written in the new layout; the cleaner writes anew what is there (see
    /// `wants_recode`), folds the map, and the ledger is rolled if it tolerates less.
    pub(crate) fn on_set_layout(&mut self, layout: Layout) {
        self.resizer.wanted_layout = Some(layout);
    }

    /// The next step of a change of size or layout; no root swap is under way.
    pub(crate) fn drive_resize(&mut self, out: Out) {
        if let Some(layout) = self.resizer.wanted_layout.take() {
            let root = Root { layout, ..self.root().clone() };
            return self.swap_root(root, Change::Layout, out);
        }
        if let Some(tiers) = self.resizer.wanted_tiers.take() {
            let root = Root { tiers, ..self.root().clone() };
            return self.swap_root(root, Change::Tiers, out);
        }
        let Some(size_bytes) = self.resizer.wanted_bytes else { return };
        if self.resizer.cutting.is_some_and(|lsn| lsn > self.log.completed) {
            return;
        }
        if size_bytes > self.root().size_bytes && self.resizer.cutting.is_none() {
            self.resizer.cutting = self.cut_off_end(out);
            if self.resizer.cutting.is_some() {
                return;
            }
        }
        (self.resizer.wanted_bytes, self.resizer.cutting) = (None, None);
        let root = Root { size_bytes, ..self.root().clone() };
        self.swap_root(root, Change::Resize, out);
    }

    /// Discards what the map names behind the end, if there is anything; returns the discard's LSN.
    pub(crate) fn cut_off_end(&mut self, out: Out) -> Option<Lsn> {
        let end = self.root().size_bytes / BLOCK_BYTES as u64;
        let mapped_end = self.map.mapped_end(self.map.layers().live(HeadId::VOLUME)?);
        if mapped_end <= end {
            return None;
        }
        let record = Record::Discard { key: self.write_key(HeadId::VOLUME, end)?, blocks: mapped_end - end };
        Some(self.append(record, Buf::empty(), Arc::from([]), Done::Nothing, out))
    }
}
