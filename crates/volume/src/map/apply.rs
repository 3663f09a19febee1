//! Changing the map: the one place where a run comes into the overlay, or leaves it, and accounts are settled.
//!
//! Protocol rule 12: each extent of a commit names its source and is applied only where the map still names it. Where
//! the overlay says nothing about a block, the base does, and it can only name what it named when the cleaner looked:
//! folds and cleaner jobs exclude each other.

use super::leaf::{Crcs, Mapped, Place};
use super::rangemap::Sliceable;
use super::{Accounts, Map};
use crate::log::window::Log;
use crate::segment::{Kind, SegmentInfo};
use holdfast_base::{BLOCK_BYTES, Buf, Key, Lsn};
use holdfast_format::record::{CommitExtent, SegmentCommit, SegmentNo, Source};
use std::sync::Arc;

impl Map {
    /// Puts a run into the overlay and settles the accounts of what it replaces.
    pub(crate) fn map_to(&mut self, start: u64, blocks: u64, mapped: Mapped, accounts: &mut Accounts<'_>) {
        if let Place::Segment { segment, .. } = &mapped.place {
            accounts.segments.add_live(*segment, blocks);
            accounts.audit.on_overlay(start..start + blocks, *segment, true);
        }
        self.overlaid.insert(Key(start).object());
        self.forget_flat(start, blocks);
        self.hide(start, blocks, accounts);
        let mut replaced = Vec::new();
        self.overlay.insert(start, blocks, mapped, |at, len, old| replaced.push((at, len, old.place)));
        for (at, len, old) in replaced {
            accounts.unmap(at, len, &old);
        }
    }

    /// A segment becomes part of the volume, as far as it holds what the map still names.
    pub(crate) fn apply_commit(&mut self, commit: &SegmentCommit, lsn: Lsn, accounts: &mut Accounts<'_>) {
        let (geometry, homes) = (commit.geometry, commit.homes.clone());
        let born = self.born(&commit.extents, accounts.segments);
        let middle = commit.extents.get(commit.extents.len() / 2).map_or(0, |extent| extent.key.0);
        let info = SegmentInfo { kind: Kind::Data, geometry, homes, live: 0, shadowed: 0, kept: false, born, middle };
        accounts.segments.insert(commit.segment, info);
        accounts.segments.settle(commit.segment);
        let crcs = Crcs::new(commit.crcs.as_slice());
        let mut block = 0;
        for extent in &commit.extents {
            let crcs = crcs.slice(u64::from(block), u64::from(extent.blocks));
            self.apply_extent(extent, commit.segment, block, &crcs, lsn, accounts);
            block += extent.blocks;
        }
    }

    fn apply_extent(
        &mut self,
        extent: &CommitExtent,
        segment: SegmentNo,
        block: u32,
        crcs: &Crcs,
        lsn: Lsn,
        accounts: &mut Accounts<'_>,
    ) {
        let start = extent.key.0;
        for piece in self.overlay.pieces(start, u64::from(extent.blocks)) {
            let offset = piece.start - start;
            let place = piece.value.as_ref().map(|m| &m.place);
            if names_source(place, extent.source, offset) || accounts.mutations.unconditional_repoint() {
                let crcs = crcs.slice(offset, piece.len);
                let place = Place::plain(segment, block + offset as u32, crcs);
                self.map_to(piece.start, piece.len, Mapped { place, stamp: lsn }, accounts);
            }
        }
    }
}

impl Accounts<'_> {
    /// A run of the overlay named this place and does so no more.
    pub(super) fn unmap(&mut self, start: u64, blocks: u64, place: &Place) {
        match place {
            Place::Log { lsn, .. } => {
                // In replay, the entry may be behind the trim point.
                self.log.set_live(*lsn, |live| live.saturating_sub(blocks));
            }
            Place::Segment { segment, .. } => {
                self.segments.sub_live(*segment, blocks);
                self.audit.on_overlay(start..start + blocks, *segment, false);
            }
            Place::Zero => {}
        }
    }
}

/// Whether a run of the map (an overlay piece, or `None` for "what the base says") names a commit's source.
fn names_source(place: Option<&Place>, source: Source, offset: u64) -> bool {
    match (source, place) {
        (Source::Direct, _) => true,
        (Source::Log(from), Some(Place::Log { lsn, .. })) => *lsn == from,
        (Source::Segment { segment, block }, Some(Place::Segment { segment: at, stored, .. })) => {
            *at == segment && u64::from(stored.block()) == u64::from(block) + offset
        }
        (Source::Segment { .. }, None) => true,
        _ => false,
    }
}

/// Puts the data of recovered entries behind log places that a checkpoint named by LSN only.
pub(crate) fn log_place(log: &Log, lsn: Lsn, start: u64, blocks: u64) -> Place {
    if let Some(entry) = log.get(lsn)
        && let Some((key, len)) = entry.extent()
    {
        let offset = start - key.0;
        assert!(offset + blocks <= u64::from(len), "a log place lies in its entry");
        let all = Place::Log { lsn, data: entry.payload.clone(), crcs: Crcs::new(Arc::clone(&entry.crcs)) };
        return all.slice(offset, blocks);
    }
    // Behind the trim point: a commit record that follows in the log repoints it before anyone reads.
    Place::Log { lsn, data: Buf::zeroes(blocks as usize * BLOCK_BYTES), crcs: Crcs::new(vec![0; blocks as usize]) }
}
