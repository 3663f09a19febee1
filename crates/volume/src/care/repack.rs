//! Finds segments whose blocks may become smaller: bulk writes, what was written while guests or the log pressed or before
//! the volume was packed, and what was packed by a faster codec.
//!
//! States: walking over the table, so many segments at a time -> resting for a while. What the codec was tried on since
//! the volume was opened is passed over: what can't be made smaller is read once. A pass for which there was no room, or
//! to which nobody came, ends the walk; so does a volume that is packed no more. After passes that made nothing smaller
//! the next waits while guests are at work, each time twice as long: what they write now is likely to be of that kind.

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
    /// Passes on end that made nothing smaller, and until when the next waits for guests.
    in_vain: u32,
    yields_until: Instant,
}

/// The first such wait, in parts of `repack_every`; it doubles so often.
const FIRST_WAIT: u32 = 8;
const DOUBLINGS_MAX: u32 = 6;

impl Repacker {
    pub(crate) fn is_at_rest(&self) -> bool {
        self.next == SegmentNo::default()
    }

    /// Between two walks, and after a pass that nobody came to, or for which there was no room.
    pub(crate) fn rest(&mut self, basis: &Basis) {
        (self.next, self.rests_until) = (SegmentNo::default(), basis.now + basis.config.repack_every);
    }

    /// Nothing is packed any more: a walk that is under way ends.
    pub(crate) fn stop(&mut self) {
        self.next = SegmentNo::default();
    }

    /// A pass ended, which may have made blocks smaller.
    pub(crate) fn on_cleaned(&mut self, is_smaller: bool) {
        if is_smaller {
            (self.in_vain, self.yields_until) = (0, Instant::default());
        }
    }

    /// A pass made nothing smaller.
    pub(crate) fn on_in_vain(&mut self, basis: &Basis) {
        let wait = basis.config.repack_every / FIRST_WAIT * (1 << self.in_vain);
        (self.in_vain, self.yields_until) = ((self.in_vain + 1).min(DOUBLINGS_MAX), basis.now + wait);
    }

    fn is_due(&self, now: Instant, guests_are_away: bool) -> bool {
        now >= self.rests_until && (guests_are_away || now >= self.yields_until)
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
        if !self.is_due(around.basis.now, guests_are_away) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn while_guests_work_passes_in_vain_come_ever_more_rarely() {
        let mut basis = crate::basis::tests::basis("mirror:2");
        let mut repacker = Repacker::default();
        assert!(repacker.is_due(basis.now, false));
        let mut waits = Vec::new();
        for _ in 0..9 {
            repacker.on_in_vain(&basis);
            assert!(repacker.is_due(basis.now, true), "nobody is there whom it could hold up");
            let from = basis.now;
            while !repacker.is_due(basis.now, false) {
                basis.now = basis.now + Duration::from_millis(250);
            }
            waits.push(basis.now.since(from).as_millis());
        }
        assert_eq!(waits, [1250, 2500, 5000, 10_000, 20_000, 40_000, 80_000, 80_000, 80_000]);
        repacker.on_cleaned(true);
        assert!(repacker.is_due(basis.now, false), "that one was not in vain");
        repacker.on_in_vain(&basis);
        assert!(!repacker.is_due(basis.now, false));
        basis.now = basis.now + Duration::from_millis(1250);
        assert!(repacker.is_due(basis.now, false), "it begins anew");
    }
}
