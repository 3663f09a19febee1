//! Changing the map: the one place where a run comes into the overlay, or leaves it, and accounts are settled.
//!
//! Protocol rule 12: each extent of a commit names its source and is applied only where the map still names it. Where
//! the overlay says nothing about a block, the base does, and it can only name what it named when the cleaner looked:
//! folds and cleaner jobs exclude each other.

use super::leaf::{Crcs, Mapped, Place, Stored};
use super::rangemap::Sliceable;
use super::{Accounts, Map, NamedRun};
use crate::log::window::Log;
use crate::segment::{Kind, SegmentInfo};
use holdfast_base::{BLOCK_BYTES, Buf, Key, Lsn};
use holdfast_format::packing::StoredLengths;
use holdfast_format::record::{CommitExtent, SegmentCommit, Share, SharedExtent, SharedRun, SharedSegment, Source};
use std::num::NonZeroU32;
use std::sync::Arc;

impl Map {
    /// Puts a run into the overlay and settles the accounts of what it replaces.
    pub(crate) fn map_to(&mut self, start: u64, blocks: u64, mapped: Mapped, accounts: &mut Accounts<'_>) {
        if let Place::Segment { segment, stored, .. } = &mapped.place {
            accounts.segments.add_live(*segment, stored.named(blocks));
            accounts.audit.on_overlay(NamedRun { start, blocks, segment: *segment, stored }, true);
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
    /// `lengths`: of the units that its blocks are, where they are packed.
    pub(crate) fn apply_commit(
        &mut self,
        commit: &SegmentCommit,
        lengths: Option<&StoredLengths>,
        lsn: Lsn,
        accounts: &mut Accounts<'_>,
    ) {
        let born = self.born(&commit.extents, accounts.segments);
        let middle = commit.extents.get(commit.extents.len() / 2).map_or(0, |extent| extent.key.0);
        let nothing_yet = SegmentInfo::new(Kind::Data, commit.geometry, commit.homes.clone());
        let units = lengths.and_then(|lengths| NonZeroU32::new(lengths.granules() as u32));
        let info = SegmentInfo { born, middle, units, ..nothing_yet };
        accounts.segments.insert(commit.segment, info);
        accounts.segments.settle(commit.segment);
        let crcs = Crcs::new(commit.crcs.as_slice());
        let stored = match lengths {
            None => Stored::Plain { block: 0 },
            Some(lengths) => Stored::Packed { granule: 0, lengths: lengths.clone() },
        };
        let mut rest = Place::Segment { segment: commit.segment, stored, crcs };
        let mut left = commit.crcs.len() as u64;
        for extent in &commit.extents {
            let blocks = u64::from(extent.blocks);
            self.apply_extent(extent, &rest.slice(0, blocks), lsn, accounts);
            left -= blocks;
            if left > 0 {
                rest = rest.slice(blocks, left);
            }
        }
    }

    /// What a store has, too, is named there, where the map still names the source.
    pub(crate) fn apply_share(&mut self, share: &Share, lsn: Lsn, accounts: &mut Accounts<'_>) {
        for SharedSegment { segment, geometry, homes, units } in &share.segments {
            // Of one that is named already it is known where it lies now.
            if accounts.segments.get(*segment).is_none() {
                let nothing_yet = SegmentInfo::new(Kind::Data, *geometry, homes.clone());
                accounts.segments.insert(*segment, SegmentInfo { kept: true, units: *units, ..nothing_yet });
            }
        }
        for SharedExtent { key, blocks, source, segment, run, crcs } in &share.extents {
            let stored = match run {
                SharedRun::Plain { block } => Stored::Plain { block: *block },
                SharedRun::Packed { granule, lengths } => {
                    Stored::Packed { granule: *granule, lengths: lengths.clone() }
                }
            };
            let now = Place::Segment { segment: *segment, stored, crcs: Crcs::new(crcs.as_slice()) };
            let extent = CommitExtent { key: *key, blocks: *blocks, source: *source };
            self.apply_extent(&extent, &now, lsn, accounts);
        }
    }

    /// `now`: where the extent's blocks are from here on.
    fn apply_extent(&mut self, extent: &CommitExtent, now: &Place, lsn: Lsn, accounts: &mut Accounts<'_>) {
        let start = extent.key.0;
        for piece in self.overlay.pieces(start, u64::from(extent.blocks)) {
            let offset = piece.start - start;
            let place = piece.value.as_ref().map(|m| &m.place);
            if names_source(place, extent.source, offset, now) || accounts.mutations.unconditional_repoint() {
                let place = now.slice(offset, piece.len);
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
            Place::Segment { segment, stored, .. } => {
                self.segments.sub_live(*segment, stored.named(blocks));
                self.audit.on_overlay(NamedRun { start, blocks, segment: *segment, stored }, false);
            }
            Place::Zero => {}
        }
    }
}

/// Whether a run of the map (an overlay piece, or `None` for "what the base says") names a commit's source, of which the
/// blocks from there on are `now`.
fn names_source(place: Option<&Place>, source: Source, offset: u64, now: &Place) -> bool {
    match (source, place) {
        (Source::Direct, _) => true,
        (Source::Log(from), Some(Place::Log { lsn, .. })) => *lsn == from,
        (Source::Segment { segment, block }, Some(Place::Segment { segment: at, stored, .. })) => {
            let expected = u64::from(block) + offset;
            *at == segment && matches!(stored, Stored::Plain { block } if u64::from(*block) == expected)
        }
        (Source::Packed { segment, granule }, Some(Place::Segment { segment: at, stored, .. })) => {
            let Stored::Packed { granule: named, .. } = stored else { return false };
            *at == segment && start_in_source(granule, offset, now) == Some(*named)
        }
        (Source::Segment { .. } | Source::Packed { .. }, None) => true,
        _ => false,
    }
}

/// Where the unit of that offset was, if the first of the extent started at `granule`: units are moved as they lie. What
/// was not is an extent by itself, and of where it was its length now tells nothing.
fn start_in_source(granule: u32, offset: u64, now: &Place) -> Option<u32> {
    match now {
        _ if offset == 0 => Some(granule),
        Place::Segment { stored: Stored::Packed { lengths, .. }, .. } => Some(lengths.start_of(offset, granule)),
        _ => None,
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
