//! Tiers: where segments are written, and when what lies in the first tier moves on to the capacity tier.
//!
//! A segment's tier is what its layout and its homes say, so nothing has to be remembered of it, and whatever is neither
//! where data are born nor where they end (written while nodes were away, or under another policy) is written anew by the
//! cleaner.
//!
//! **Rotation.** What comes into the first tier pushes out what has been there longest: for each byte that comes none leaves
//! while the tier is filled to a quarter, one at half, two from three quarters on. So data stays for as long as half of the tier
//! takes to be written, what is overwritten meanwhile dies there and is never moved, and there is no wall to run into. While
//! guests rest it goes on, down to a quarter. It is the cleaner that moves: victims are the oldest segments, whatever of them
//! lives.
//!
//! Invariant: a place that is named has devices for the whole layout; where neither tier has, segments go where they bear most.

use crate::controller::Controller;
use crate::governor::Need;
use crate::job::JobKind;
use crate::placement::is_of;
use crate::reserve::Keep;
use crate::segments::{Kind, SegmentInfo};
use holdfast_base::{BLOCK_BYTES, Instant, MediaClass};
use holdfast_format::geometry::{Geometry, Layout};
use holdfast_format::ledger::Leg;
use holdfast_format::record::SegmentNo;
use holdfast_format::tier::{FirstTier, Tiers};
use std::collections::VecDeque;
use std::time::Duration;

/// Fill of the first tier, in 1/1000, up to which nothing leaves it, and at which as much leaves as comes.
const CALM_PER_MILLE: u64 = 250;
const EVEN_PER_MILLE: u64 = 500;

/// From here on rotation does not ask whether guests feel it.
const FULL_PER_MILLE: u64 = 750;

/// The segments of the tier are counted this often, and looked for this often when those that were found have left; so many
/// segments' worth at a time.
const MEASURE_EVERY: Duration = Duration::from_millis(500);
const SEARCH_EVERY: Duration = Duration::from_millis(50);
const SEGMENTS_FOUND: u64 = 64;

/// So many segments may be owed.
const CREDIT_SEGMENTS: u64 = 16;

/// Where a segment may be written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    pub(crate) layout: Layout,
    /// Any where none is named.
    pub(crate) media: Option<MediaClass>,
}

/// What a first tier holds, and what it did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TierUse {
    /// Payload of its segments, dead blocks included.
    pub bytes: u64,
    /// So much it may hold.
    pub bytes_max: u64,
    /// Payload that was written into it.
    pub born_bytes: u64,
    /// And that went past it: it was full, or had too few devices.
    pub passed_bytes: u64,
    /// What was moved on. What was born, and neither is there nor was moved, died before.
    pub rotated_bytes: u64,
    /// Bytes that guests read of segments: in all, and of the first tier's.
    pub read_bytes: u64,
    pub read_first_bytes: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Rotation {
    pub(crate) counters: TierUse,
    /// Bytes that are to leave, for what came.
    credit_bytes: u64,
    measured_at: Instant,
    /// Segments of the first tier, oldest first, and when they were looked for.
    oldest: VecDeque<SegmentNo>,
    searched_at: Instant,
}

impl Controller {
    /// One that does not go with the volume's layout, which was changed alone, counts as none.
    fn first_tier(&self) -> Option<FirstTier> {
        let root = self.basis.is_known().then(|| self.root())?;
        root.tiers.first_of(root.layout)
    }

    /// What the first tier does; `None` where there is none.
    pub fn tier_use(&self) -> Option<TierUse> {
        let first = self.first_tier()?;
        Some(TierUse { bytes_max: first.size.bytes(self.root().size_bytes), ..self.rotation.counters })
    }

    /// Where a segment of that kind is written: the first place that has room.
    pub(crate) fn places(&self, kind: &JobKind) -> Vec<Place> {
        if kind.is_meta() {
            let Some(layout) = self.meta_layout_now() else { return Vec::new() };
            let fast = self.fastest_media().map(|media| Place { layout, media: Some(media) });
            return fast.into_iter().chain([Place { layout, media: None }]).collect();
        }
        let Some(capacity) = self.capacity_place() else { return Vec::new() };
        let Some(first) = self.first_place() else { return vec![capacity] };
        match kind {
            JobKind::Clean { rotates: true } => vec![capacity],
            _ if !self.is_born_first(kind) || self.tier_fill_per_mille() >= 1000 => vec![capacity, first],
            _ => vec![first, capacity],
        }
    }

    /// Whether what is written so begins in the first tier. Bulk writes do where that is faster: else whole stripes cost less in
    /// the capacity tier's code than in a mirror.
    fn is_born_first(&self, kind: &JobKind) -> bool {
        match kind {
            JobKind::Destage { .. } => true,
            JobKind::Bypass { .. } => self.first_tier().is_some_and(|f| f.media > self.root().tiers.capacity),
            _ => false,
        }
    }

    /// The first tier, where there are devices for all of it.
    pub(crate) fn first_place(&self) -> Option<Place> {
        let first = self.first_tier()?;
        let place = Place { layout: first.layout, media: first.media };
        self.fits(place).then_some(place)
    }

    /// The capacity tier; while it has too few devices, what bears most with those that are there.
    pub(crate) fn capacity_place(&self) -> Option<Place> {
        let place = self.own_place();
        if place.media.is_none() || !self.fits(place) {
            return Some(Place { layout: self.layout_now()?, media: None });
        }
        Some(place)
    }

    fn own_place(&self) -> Place {
        Place { layout: self.root().layout, media: self.root().tiers.capacity }
    }

    /// Whether there are devices for a whole segment.
    fn fits(&self, place: Place) -> bool {
        if self.basis.is_on_devices() {
            let devices = self.usable_devices().filter(|d| is_of(d, place.media)).count();
            return devices >= usize::from(place.layout.width());
        }
        let each = usize::from(place.layout.shards_a_domain());
        self.nodes_with_of(each, place.media) >= usize::from(place.layout.width())
    }

    /// The fastest class of media, if there are several.
    fn fastest_media(&self) -> Option<MediaClass> {
        let (mut least, mut most) = (None, None);
        for media in self.usable_devices().filter_map(|d| d.media) {
            least = Some(least.map_or(media, |least: MediaClass| least.min(media)));
            most = most.max(Some(media));
        }
        most.filter(|_| most != least)
    }

    /// Whether all homes are of that class, as far as known.
    fn lie_on(&self, homes: &[Leg], media: Option<MediaClass>) -> bool {
        let Some(media) = media else { return true };
        homes.iter().all(|home| self.peers.device(*home).and_then(|d| d.media).is_none_or(|of| of == media))
    }

    pub(crate) fn is_in_first_tier(&self, geometry: &Geometry, homes: &[Leg]) -> bool {
        let is_of = |first: FirstTier| geometry.layout() == first.layout.shape() && self.lie_on(homes, first.media);
        self.first_tier().is_some_and(is_of)
    }

    fn is_in_capacity_tier(&self, geometry: &Geometry, homes: &[Leg]) -> bool {
        let own = self.own_place();
        geometry.layout() == own.layout.shape() && self.lie_on(homes, own.media)
    }

    /// Whether data of this shape bears what the volume's policy says, wherever it lies.
    pub(crate) fn is_of_policy(&self, geometry: &Geometry) -> bool {
        let layout = geometry.layout();
        layout == self.root().layout.shape() || self.first_tier().is_some_and(|first| first.layout.shape() == layout)
    }

    /// Whether a segment of the right layout lies on media where the policy does not say.
    pub(crate) fn is_astray(&self, info: &SegmentInfo) -> bool {
        let is_home =
            self.is_in_first_tier(&info.geometry, &info.homes) || self.is_in_capacity_tier(&info.geometry, &info.homes);
        !is_home && !info.kept && self.is_of_policy(&info.geometry)
    }

    pub(crate) fn astray_segments(&self) -> u64 {
        if self.root().tiers == Tiers::default() {
            return 0;
        }
        self.survey().astray().len() as u64
    }

    /// The class of media that a shard stays on, if the policy names any: that of its segment's others.
    pub(crate) fn media_of_homes(&self, homes: &[Leg], index: u8) -> Option<MediaClass> {
        let tiers = self.root().tiers;
        if tiers.capacity.is_none() && tiers.first.is_none_or(|first| first.media.is_none()) {
            return None;
        }
        let others = homes.iter().enumerate().filter(|(i, _)| *i != usize::from(index));
        let mut media = others.filter_map(|(_, home)| self.peers.device(*home).and_then(|d| d.media));
        let first = media.next()?;
        media.all(|other| other == first).then_some(first)
    }

    /// Whether the capacity tier has devices and room for one more full segment.
    pub(crate) fn capacity_takes_a_segment(&self) -> bool {
        let place = self.own_place();
        let geometry = Geometry::new(place.layout, self.basis.config.segment_payload_bytes / BLOCK_BYTES as u32);
        let shard_bytes = (u64::from(geometry.shard_blocks()) + 8) * BLOCK_BYTES as u64;
        self.could_place(place, shard_bytes, Keep::FromGuests)
    }

    // ---- rotation ----

    /// Counts what the first tier holds.
    pub(crate) fn measure_first_tier(&mut self) {
        if self.first_tier().is_none() {
            self.rotation.credit_bytes = 0;
            return;
        }
        if self.basis.now.since(self.rotation.measured_at) < MEASURE_EVERY {
            return;
        }
        self.rotation.measured_at = self.basis.now;
        let in_table: u64 = self.first_segments().map(|(_, info)| info.capacity_blocks()).sum();
        let placed = self.jobs.iter().filter_map(|(_, job)| job.placed_data());
        let coming: u64 = placed
            .filter(|(geometry, homes)| self.is_in_first_tier(geometry, homes))
            .map(|(geometry, _)| u64::from(geometry.payload_blocks))
            .sum();
        self.rotation.counters.bytes = (in_table + coming) * BLOCK_BYTES as u64;
    }

    /// Segments of the first tier that moving would empty.
    fn first_segments(&self) -> impl Iterator<Item = (SegmentNo, &SegmentInfo)> {
        let found: Vec<SegmentNo> =
            self.survey().first().iter().copied().filter(|no| !self.cleaner.is_emptied(*no)).collect();
        found.into_iter().filter_map(|no| Some((no, self.segments.get(no)?)))
    }

    fn leaves_first_tier(&self, no: SegmentNo, info: &SegmentInfo) -> bool {
        info.kind == Kind::Data
            && !info.kept
            && info.live > 0
            && !self.cleaner.is_emptied(no)
            && self.is_in_first_tier(&info.geometry, &info.homes)
    }

    pub(crate) fn tier_fill_per_mille(&self) -> u64 {
        let bytes_max = self.first_tier().map_or(0, |first| first.size.bytes(self.root().size_bytes));
        (u128::from(self.rotation.counters.bytes) * 1000 / u128::from(bytes_max.max(1))) as u64
    }

    /// A segment of guests' data was placed there.
    pub(crate) fn on_placed(&mut self, kind: &JobKind, geometry: &Geometry, homes: &[Leg]) {
        if self.first_tier().is_none() {
            return;
        }
        let bytes = u64::from(geometry.payload_blocks) * BLOCK_BYTES as u64;
        let is_first = self.is_in_first_tier(geometry, homes);
        if is_first {
            self.rotation.counters.bytes += bytes;
        }
        if !self.is_born_first(kind) {
            return;
        }
        let counters = &mut self.rotation.counters;
        if is_first {
            counters.born_bytes += bytes;
        } else {
            counters.passed_bytes += bytes;
        }
        let span = EVEN_PER_MILLE - CALM_PER_MILLE;
        let above = self.tier_fill_per_mille().saturating_sub(CALM_PER_MILLE).min(2 * span);
        let most = CREDIT_SEGMENTS * u64::from(self.basis.config.segment_payload_bytes);
        self.rotation.credit_bytes = (self.rotation.credit_bytes + bytes * above / span).min(most);
    }

    /// Whether something is to leave the first tier, and can.
    pub(crate) fn rotation_is_due(&self) -> bool {
        let is_owed = self.rotation.credit_bytes >= u64::from(self.basis.config.segment_payload_bytes);
        self.first_tier().is_some()
            && self.tier_fill_per_mille() > CALM_PER_MILLE
            && (is_owed || !self.guests_are_at_work())
            && self.capacity_takes_a_segment()
    }

    /// Whether guests bear it now.
    pub(crate) fn may_rotate(&self) -> bool {
        self.first_tier_is_full() || self.may_move_data(Need::Choice)
    }

    pub(crate) fn first_tier_is_full(&self) -> bool {
        self.first_tier().is_some() && self.tier_fill_per_mille() >= FULL_PER_MILLE
    }

    /// The oldest segments of the first tier, with so many blocks that can be read, or a few more.
    pub(crate) fn take_oldest(&mut self, blocks: u64, count_max: usize) -> Vec<SegmentNo> {
        if self.rotation.oldest.is_empty() && self.basis.now.since(self.rotation.searched_at) >= SEARCH_EVERY {
            self.rotation.searched_at = self.basis.now;
            self.rotation.oldest = self.find_oldest(SEGMENTS_FOUND * blocks);
        }
        let (mut total, mut taken) = (0, Vec::new());
        while total < blocks
            && taken.len() < count_max
            && let Some(no) = self.rotation.oldest.pop_front()
        {
            // It may have died, or have been moved, since it was found.
            let visible =
                self.segments.get(no).filter(|info| self.leaves_first_tier(no, info)).map_or(0, |i| i.visible());
            if visible > 0 {
                total += visible;
                taken.push(no);
            }
        }
        taken
    }

    fn find_oldest(&self, blocks: u64) -> VecDeque<SegmentNo> {
        let mut total = 0;
        let with_data = self.first_segments().filter(|(_, info)| info.visible() > 0);
        let readable = with_data.filter(|(no, _)| !self.cleaner.is_unreadable(*no));
        let few = readable.take_while(|(_, info)| {
            total += info.visible();
            total < blocks + info.visible()
        });
        few.map(|(no, _)| no).collect()
    }

    /// These were emptied: so many bytes are elsewhere now.
    pub(crate) fn on_rotated(&mut self, emptied: &[SegmentNo], moved_bytes: u64) {
        let blocks: u64 = emptied.iter().filter_map(|no| Some(self.segments.get(*no)?.capacity_blocks())).sum();
        let bytes = blocks * BLOCK_BYTES as u64;
        self.rotation.counters.rotated_bytes += moved_bytes;
        self.rotation.counters.bytes = self.rotation.counters.bytes.saturating_sub(bytes);
        self.rotation.credit_bytes = self.rotation.credit_bytes.saturating_sub(bytes);
    }

    /// A guest reads of a segment.
    pub(crate) fn count_tier_read(&mut self, no: SegmentNo, bytes: u64) {
        if self.first_tier().is_none() {
            return;
        }
        let is_first = self.segments.get(no).is_some_and(|info| self.is_in_first_tier(&info.geometry, &info.homes));
        self.rotation.counters.read_bytes += bytes;
        if is_first {
            self.rotation.counters.read_first_bytes += bytes;
        }
    }
}
