//! Finds segments whose blocks may become smaller: bulk writes, what was written while guests or the log pressed or before
//! the volume was packed, and what was packed by a faster codec.
//!
//! States: walking over the table, so many segments at a time -> resting for a while. What the codec was tried on since
//! the volume was opened is passed over: what can't be made smaller is read once. A pass for which there was no room, or
//! to which nobody came, ends the walk; so does a volume that is packed no more.

use super::Around;
use super::cleaner::{Cleaner, VICTIMS_MAX};
use crate::basis::Basis;
use crate::segment::{Kind, SegmentInfo};
use holdfast_base::{BLOCK_BYTES, Instant};
use holdfast_format::packing::Codec;
use holdfast_format::record::SegmentNo;

#[derive(Debug, Default)]
pub(crate) struct Repacker {
    next: SegmentNo,
    rests_until: Instant,
}

impl Repacker {
    pub(crate) fn is_at_rest(&self) -> bool {
        self.next == SegmentNo::default()
    }

    /// Between two walks, and after a pass that nobody came to, or for which there was no room.
    pub(crate) fn rest(&mut self, basis: &Basis) {
        *self = Repacker { next: SegmentNo::default(), rests_until: basis.now + basis.config.repack_every };
    }

    /// Nothing is packed any more: a walk that is under way ends.
    pub(crate) fn stop(&mut self) {
        self.next = SegmentNo::default();
    }

    /// The next segments whose blocks make up one that is not packed, if there are some; of old ones, while guests come
    /// and go.
    pub(crate) fn take(
        &mut self,
        around: &Around<'_>,
        cleaner: &Cleaner,
        codec: Codec,
        guests_are_away: bool,
    ) -> Vec<SegmentNo> {
        let mut found = Vec::new();
        if around.basis.now < self.rests_until {
            return found;
        }
        let mut room = u64::from(around.basis.config.segment_payload_bytes) / BLOCK_BYTES as u64;
        let mut ahead = around.segments.iter_from(self.next);
        for (no, info) in ahead.by_ref().take(around.basis.config.search_step) {
            let blocks = info.visible().blocks;
            let is_old = guests_are_away || around.map.heat_class(info.born) > 0;
            let is_wanted = is_old && is_worth_a_try(around, cleaner, (no, info), codec);
            // What fits into no segment has nothing to gain.
            if !is_wanted || found.is_empty() && blocks > room {
                continue;
            }
            if blocks > room || found.len() == VICTIMS_MAX {
                self.next = no;
                return found;
            }
            room -= blocks;
            found.push(no);
        }
        match ahead.next() {
            Some((next, _)) => self.next = next,
            None => self.rest(around.basis),
        }
        found
    }
}

fn is_worth_a_try(around: &Around<'_>, cleaner: &Cleaner, (no, info): (SegmentNo, &SegmentInfo), codec: Codec) -> bool {
    let topology = around.topology();
    let is_own = info.kind == Kind::Data && !info.kept && !around.basis.is_foreign(no);
    // What is packed was by what is fast, at least.
    let is_larger = info.tried < Some(codec) && (info.units.is_none() || codec > Codec::Lz4);
    is_own
        && info.is_visible()
        && is_larger
        && !cleaner.is_unreadable(no)
        && !cleaner.is_emptied(no)
        && !topology.is_in_first_tier(&info.geometry, &info.homes)
}
