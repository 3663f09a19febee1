//! Applying log records to the map: the one place where a volume changes, live and in replay.
//!
//! Protocol rule 12: each extent of a commit names its source and is applied only where the map still names it. Where the
//! overlay says nothing about a block, the base does, and it can only name what it named when the cleaner looked: folds
//! and cleaner jobs exclude each other.

use crate::controller::Controller;
use crate::layers::{CloneInfo, Snapshot};
use crate::map::{Crcs, Mapped, Place};
use crate::segment::{Kind, SegmentInfo};
use holdfast_base::{Buf, Key, Lsn};
use holdfast_format::record::{CommitExtent, Record, SegmentCommit, SegmentNo, Source};

impl Controller {
    /// Applies the completed entry `lsn`.
    pub(crate) fn apply(&mut self, lsn: Lsn) {
        let entry = self.log.get_mut(lsn).expect("a completed entry is in the window");
        let record = match &entry.record {
            Record::Write { key, blocks } => Record::Write { key: *key, blocks: *blocks },
            _ => std::mem::replace(&mut entry.record, Record::Noop),
        };
        match record {
            Record::Write { key, blocks } => {
                let place = Place::Log {
                    lsn,
                    data: entry.payload.clone(),
                    crcs: Crcs::new(std::sync::Arc::clone(&entry.crcs)),
                };
                let is_hot = self.judge_heat(key.0, u64::from(blocks));
                self.log.get_mut(lsn).expect("just seen").is_hot = is_hot;
                self.log.set_live(lsn, |_| u64::from(blocks));
                self.map_to(key.0, u64::from(blocks), place, lsn);
            }
            Record::Discard { key, blocks } => self.map_to(key.0, blocks, Place::Zero, lsn),
            Record::Commit(commit) => self.apply_commit(&commit, lsn),
            Record::Free { segments } => return self.apply_free(&segments),
            Record::Rehome { segment, homes } => self.segments.rehome(segment, &homes),
            Record::Snapshot { head, frozen, live, name, created_ms, size_bytes } => {
                self.apply_snapshot(frozen, live, Snapshot { name, head, created_ms, size_bytes });
            }
            Record::DropSnapshot { layer } => self.apply_drop(layer),
            Record::Clone { of, head, live, id, name, size_bytes } => {
                self.apply_clone(head, of, live, CloneInfo { id, name, size_bytes });
            }
            Record::DropClone { head } => self.apply_drop_clone(head),
            Record::ResizeClone { head, size_bytes } => self.layers.resize_clone(head, size_bytes),
            Record::Rollback { head, to, live } => self.apply_rollback(head, to, live),
            Record::Checkpoint(_) | Record::Noop => return,
        }
        self.wants.checkpoint = true;
        self.checkpointer.unfolded = true;
    }

    /// Puts a run into the overlay and settles the accounts of what it replaces.
    pub(crate) fn map_to(&mut self, start: u64, blocks: u64, place: Place, stamp: Lsn) {
        if let Place::Segment { segment, .. } = &place {
            self.segments.add_live(*segment, blocks);
        }
        self.overlaid.insert(Key(start).object());
        self.forget_flat(start, blocks);
        self.hide(start, blocks);
        let mut replaced = Vec::new();
        self.overlay.insert(start, blocks, Mapped { place, stamp }, |_, len, old| replaced.push((len, old.place)));
        for (len, old) in replaced {
            self.unmap(len, &old);
        }
    }

    /// A run of the overlay named this place and does so no more.
    pub(crate) fn unmap(&mut self, blocks: u64, place: &Place) {
        match place {
            Place::Log { lsn, .. } => {
                // In replay, the entry may be behind the trim point.
                self.log.set_live(*lsn, |live| live.saturating_sub(blocks));
            }
            Place::Segment { segment, .. } => self.segments.sub_live(*segment, blocks),
            Place::Zero => {}
        }
    }

    fn apply_commit(&mut self, commit: &SegmentCommit, lsn: Lsn) {
        let (geometry, homes) = (commit.geometry, commit.homes.clone());
        let born = self.born(&commit.extents);
        let middle = commit.extents.get(commit.extents.len() / 2).map_or(0, |extent| extent.key.0);
        let info = SegmentInfo { kind: Kind::Data, geometry, homes, live: 0, hidden: 0, kept: false, born, middle };
        self.segments.insert(commit.segment, info);
        self.segments.settle(commit.segment);
        let crcs = Crcs::new(commit.crcs.as_slice());
        let mut block = 0;
        for extent in &commit.extents {
            let crcs = crcs.slice(u64::from(block), u64::from(extent.blocks));
            self.apply_extent(extent, commit.segment, block, &crcs, lsn);
            block += extent.blocks;
        }
    }

    fn apply_extent(&mut self, extent: &CommitExtent, segment: SegmentNo, block: u32, crcs: &Crcs, lsn: Lsn) {
        let start = extent.key.0;
        for piece in self.overlay.pieces(start, u64::from(extent.blocks)) {
            let offset = piece.start - start;
            let place = piece.value.as_ref().map(|m| &m.place);
            if self.names_source(place, extent.source, offset) || self.basis.config.mutations.unconditional_repoint {
                let crcs = crcs.slice(offset, piece.len);
                let place = Place::Segment { segment, block: block + offset as u32, crcs };
                self.map_to(piece.start, piece.len, place, lsn);
            }
        }
    }

    /// Whether a run of the map (an overlay piece, or `None` for "what the base says") names a commit's source.
    fn names_source(&self, place: Option<&Place>, source: Source, offset: u64) -> bool {
        match (source, place) {
            (Source::Bypass, _) => true,
            (Source::Log(from), Some(Place::Log { lsn, .. })) => *lsn == from,
            (Source::Segment { segment, block }, Some(Place::Segment { segment: at, block: at_block, .. })) => {
                *at == segment && u64::from(*at_block) == u64::from(block) + offset
            }
            (Source::Segment { .. }, None) => true,
            _ => false,
        }
    }

    fn apply_free(&mut self, segments: &[SegmentNo]) {
        for no in segments {
            if let Some(info) = self.segments.get(*no) {
                assert_eq!(info.visible(), 0, "{no:?} is freed while the map names it");
                self.segments.remove(*no);
            }
            self.segments.settle(*no);
        }
    }

    /// Puts the data of recovered entries behind log places that a checkpoint named by LSN only.
    pub(crate) fn log_place(&self, lsn: Lsn, start: u64, blocks: u64) -> Place {
        if let Some(entry) = self.log.get(lsn)
            && let Some((key, len)) = entry.extent()
        {
            let offset = start - key.0;
            assert!(offset + blocks <= u64::from(len), "a log place lies in its entry");
            let all =
                Place::Log { lsn, data: entry.payload.clone(), crcs: Crcs::new(std::sync::Arc::clone(&entry.crcs)) };
            return crate::rangemap::Sliceable::slice(&all, offset, blocks);
        }
        // Behind the trim point: a commit record that follows in the log repoints it before anyone reads.
        Place::Log {
            lsn,
            data: Buf::zeroes(blocks as usize * holdfast_base::BLOCK_BYTES),
            crcs: Crcs::new(vec![0; blocks as usize]),
        }
    }
}
