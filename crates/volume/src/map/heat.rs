//! Heat: which data will soon be overwritten, told by how long that lived which it overwrites. What dies together is
//! put together, so that segments are mostly dead or mostly live, and cleaning moves little. (Wang et al., Separating
//! Data via Block Invalidation Time Inference for Write Amplification Reduction in Log-Structured Storage, FAST 2022.)
//!
//! Time is counted in blocks that guests wrote since the volume was opened; of what was there before all is as old. Of
//! a segment it is known when its data was written, on average: what the cleaner moves stays as old as it was.

use super::Map;
use super::leaf::{LEAF_BLOCKS, LeafNo, Mapped, Place};
use super::rangemap::Piece;
use crate::segment::Segments;
use holdfast_base::Key;
use holdfast_format::record::{CommitExtent, Source};

/// Lifespans that the mean goes back over, about.
const MEAN_OF: u64 = 4096;

#[derive(Debug, Default)]
pub(super) struct Heat {
    /// Blocks written until now.
    now: u64,
    /// Of what was overwritten lately: how many blocks were written while it lived, times [`MEAN_OF`].
    lifespans: u64,
}

impl Heat {
    fn mean_lifespan(&self) -> u64 {
        self.lifespans / MEAN_OF
    }

    fn learn(&mut self, lifespan: u64) {
        self.lifespans = self.lifespans - self.lifespans / MEAN_OF + lifespan;
    }

    fn age(&self, born: u64) -> u64 {
        self.now.saturating_sub(born)
    }

    /// Data of one class is moved together: the older, the fewer distinctions.
    pub(super) fn class(&self, born: u64) -> u32 {
        let lifespan = self.mean_lifespan().max(1);
        (self.age(born) / lifespan).checked_ilog(4).map_or(0, |log| 1 + log.min(2))
    }
}

impl Map {
    /// Data of one class is moved together.
    pub(crate) fn heat_class(&self, born: u64) -> u32 {
        self.heat.class(born)
    }

    /// A guest writes these blocks: whether it is likely to do so again soon. Asked before the map changes.
    pub(crate) fn judge_heat(&mut self, start: u64, blocks: u64, segments: &Segments) -> bool {
        self.heat.now += blocks;
        let mut youngest: Option<u64> = None;
        for piece in self.overlay.pieces(start, blocks) {
            let born = match piece.value {
                // It did not even leave the log.
                Some(Mapped { place: Place::Log { .. }, .. }) => Some(self.heat.now),
                Some(Mapped { place: Place::Segment { segment, .. }, .. }) => segments.get(segment).map(|s| s.born),
                Some(Mapped { place: Place::Zero, .. }) => None,
                None => self.born_in_base(&piece, segments),
            };
            youngest = youngest.max(born);
        }
        let Some(born) = youngest else { return false };
        let lifespan = self.heat.age(born);
        self.heat.learn(lifespan);
        lifespan < self.heat.mean_lifespan()
    }

    /// Of leaves that are not in memory nothing is known: what nobody looks at is cold.
    fn born_in_base(&self, piece: &Piece<Mapped>, segments: &Segments) -> Option<u64> {
        let mut youngest = None;
        let no = LeafNo::of(Key(piece.start));
        let leaf = self.leaves.peek(no)?;
        let from = piece.start - no.first_key();
        for below in leaf.lookup(from, piece.len.min(LEAF_BLOCKS - from)) {
            if let Some(Place::Segment { segment, .. }) = below.value {
                youngest = youngest.max(segments.get(segment).map(|s| s.born));
            }
        }
        youngest
    }

    /// When what a segment is made of was written, on average.
    pub(super) fn born(&self, extents: &[CommitExtent], segments: &Segments) -> u64 {
        let (mut sum, mut blocks) = (0_u128, 0_u128);
        for extent in extents {
            let born = match extent.source {
                Source::Segment { segment, .. } | Source::Packed { segment, .. } => {
                    segments.get(segment).map_or(0, |s| s.born)
                }
                Source::Log(_) | Source::Direct => self.heat.now,
            };
            sum += u128::from(born) * u128::from(extent.blocks);
            blocks += u128::from(extent.blocks);
        }
        (sum / blocks.max(1)) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segment::tests::{info, no};

    #[test]
    fn what_lives_shorter_than_usual_is_hot_and_what_was_never_written_is_not() {
        let mut heat = Heat { now: 10_000, lifespans: 1000 * MEAN_OF };
        assert_eq!([10_000, 9_000, 6_000, 0].map(|born| heat.class(born)), [0, 1, 2, 2]);
        heat.learn(5096);
        assert_eq!(heat.mean_lifespan(), 1001);
        let (mut map, segments) = (Map::new(1 << 20), Segments::default());
        assert!(!map.judge_heat(0, 8, &segments));
    }

    #[test]
    fn what_is_moved_stays_as_old_as_it_was() {
        let (mut map, mut segments) = (Map::new(1 << 20), Segments::default());
        map.heat.now = 1000;
        let mut old = info(8, 0, &[]);
        old.born = 100;
        segments.insert(no(1, 1), old);
        let from = |source, blocks| CommitExtent { key: Key(0), blocks, source };
        let moved = from(Source::Segment { segment: no(1, 1), block: 0 }, 3);
        assert_eq!(map.born(&[moved], &segments), 100);
        assert_eq!(map.born(&[moved, from(Source::Direct, 1)], &segments), 325);
    }
}
