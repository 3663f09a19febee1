//! Tiers: where segments are written, and when what lies in the first tier moves on to the capacity tier.
//!
//! A segment's tier is what its layout and its homes say, so nothing has to be remembered of it, and whatever is
//! neither where data are born nor where they end (written while nodes were away, or under another policy) is written
//! anew by the cleaner.
//!
//! **Rotation.** What comes into the first tier pushes out what has been there longest: for each byte that comes none
//! leaves while the tier is filled to a quarter, one at half, two from three quarters on. So data stays for as long as
//! half of the tier takes to be written, what is overwritten meanwhile dies there and is never moved, and there is no
//! wall to run into. While guests rest it goes on, down to a quarter. It is the cleaner that moves: victims are the
//! oldest segments, whatever of them lives.
//!
//! Invariant: a place that is named has devices for the whole layout; where neither tier has, segments go where they
//! bear most.

use super::reserve::Keep;
use super::topology::{Place, Topology, is_of};
use crate::basis::Basis;
use crate::segment::writer::Aim;
use crate::segment::writer::JobKind;
use crate::segment::{Kind, Named, SegmentInfo, Segments};
use holdfast_base::{BLOCK_BYTES, Instant, MediaClass};
use holdfast_format::geometry::Geometry;
use holdfast_format::ledger::Leg;
use holdfast_format::record::SegmentNo;
use holdfast_format::tier::FirstTier;
use std::collections::VecDeque;
use std::time::Duration;

/// Fill of the first tier, in 1/1000, up to which nothing leaves it, and at which as much leaves as comes.
const CALM_PER_MILLE: u64 = 250;
const EVEN_PER_MILLE: u64 = 500;

/// From here on rotation does not ask whether guests feel it.
const FULL_PER_MILLE: u64 = 750;

/// The segments of the tier are counted this often, and looked for this often when those that were found have left; so
/// many segments' worth at a time.
const MEASURE_EVERY: Duration = Duration::from_millis(500);
const SEARCH_EVERY: Duration = Duration::from_millis(50);
const SEGMENTS_FOUND: u64 = 64;

/// So many segments may be owed.
const CREDIT_SEGMENTS: u64 = 16;

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
    counters: TierUse,
    /// Bytes that are to leave, for what came.
    credit_bytes: u64,
    measured_at: Instant,
    /// Segments of the first tier, oldest first, and when they were looked for.
    oldest: VecDeque<SegmentNo>,
    searched_at: Instant,
}

impl Topology<'_> {
    /// One that does not go with the volume's layout, which was changed alone, counts as none.
    fn first_tier(self) -> Option<FirstTier> {
        let root = self.basis.known()?;
        root.tiers.first_of(root.layout)
    }

    /// Where a segment of that kind is written: the first place that has room. The first tier is filled so far.
    pub(crate) fn places(self, kind: &JobKind, fill_per_mille: u64) -> Vec<Place> {
        if kind.is_meta() {
            let Some(layout) = self.meta_layout_now() else { return Vec::new() };
            let fast = self.fastest_media().map(|media| Place { layout, media: Some(media) });
            return fast.into_iter().chain([Place { layout, media: None }]).collect();
        }
        let Some(capacity) = self.capacity_place() else { return Vec::new() };
        let Some(first) = self.first_place() else { return vec![capacity] };
        match kind {
            JobKind::Clean { aim: Aim::Rotation } => vec![capacity],
            _ if !self.is_born_first(kind) || fill_per_mille >= 1000 => vec![capacity, first],
            _ => vec![first, capacity],
        }
    }

    /// Whether what is written so begins in the first tier. Bulk writes do where that is faster: else whole stripes
    /// cost less in the capacity tier's code than in a mirror.
    fn is_born_first(self, kind: &JobKind) -> bool {
        match kind {
            JobKind::Destage { .. } => true,
            JobKind::Direct { .. } => self.first_tier().is_some_and(|f| f.media > self.root().tiers.capacity),
            _ => false,
        }
    }

    /// The first tier, where there are devices for all of it.
    pub(crate) fn first_place(self) -> Option<Place> {
        let first = self.first_tier()?;
        let place = Place { layout: first.layout, media: first.media };
        self.fits(place).then_some(place)
    }

    /// The capacity tier; while it has too few devices, what bears most with those that are there.
    pub(crate) fn capacity_place(self) -> Option<Place> {
        let place = self.own_place();
        if place.media.is_none() || !self.fits(place) {
            return Some(Place { layout: self.layout_now()?, media: None });
        }
        Some(place)
    }

    /// Whether what is moved now gets the layout, and the media, that the policy says.
    pub(crate) fn is_as_wanted(self) -> bool {
        self.capacity_place() == Some(self.own_place())
    }

    fn own_place(self) -> Place {
        Place { layout: self.root().layout, media: self.root().tiers.capacity }
    }

    /// Whether there are devices for a whole segment.
    fn fits(self, place: Place) -> bool {
        if self.basis.is_on_devices() {
            let devices = self.usable_devices().filter(|d| is_of(d, place.media)).count();
            return devices >= usize::from(place.layout.width());
        }
        let each = usize::from(place.layout.shards_a_domain());
        self.nodes_with_of(each, place.media) >= usize::from(place.layout.width())
    }

    /// The fastest class of media, if there are several.
    fn fastest_media(self) -> Option<MediaClass> {
        let (mut least, mut most) = (None, None);
        for media in self.usable_devices().filter_map(|d| d.media) {
            least = Some(least.map_or(media, |least: MediaClass| least.min(media)));
            most = most.max(Some(media));
        }
        most.filter(|_| most != least)
    }

    /// Whether all homes are of that class, as far as known.
    fn lie_on(self, homes: &[Leg], media: Option<MediaClass>) -> bool {
        let Some(media) = media else { return true };
        homes.iter().all(|home| self.peers.device(*home).and_then(|d| d.media).is_none_or(|of| of == media))
    }

    pub(crate) fn is_in_first_tier(self, geometry: &Geometry, homes: &[Leg]) -> bool {
        let is_of = |first: FirstTier| geometry.layout() == first.layout.shape() && self.lie_on(homes, first.media);
        self.first_tier().is_some_and(is_of)
    }

    fn is_in_capacity_tier(self, geometry: &Geometry, homes: &[Leg]) -> bool {
        let own = self.own_place();
        geometry.layout() == own.layout.shape() && self.lie_on(homes, own.media)
    }

    /// Whether data of this shape bears what the volume's policy says, wherever it lies.
    pub(crate) fn is_of_policy(self, geometry: &Geometry) -> bool {
        let layout = geometry.layout();
        layout == self.root().layout.shape() || self.first_tier().is_some_and(|first| first.layout.shape() == layout)
    }

    /// Whether a segment of the right layout lies on media where the policy does not say.
    pub(crate) fn is_astray(self, info: &SegmentInfo) -> bool {
        let is_home =
            self.is_in_first_tier(&info.geometry, &info.homes) || self.is_in_capacity_tier(&info.geometry, &info.homes);
        !is_home && !info.kept && self.is_of_policy(&info.geometry)
    }

    /// The class of media that a shard stays on, if the policy names any: that of its segment's others.
    pub(crate) fn media_of_homes(self, homes: &[Leg], index: u8) -> Option<MediaClass> {
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
    pub(crate) fn capacity_takes_a_segment(self) -> bool {
        let place = self.own_place();
        let geometry = Geometry::new(place.layout, self.basis.config.segment_payload_bytes / BLOCK_BYTES as u32);
        let shard_bytes = (u64::from(geometry.shard_blocks()) + 8) * BLOCK_BYTES as u64;
        self.could_place(place, shard_bytes, Keep::FromGuests)
    }
}

impl Rotation {
    /// What the first tier does; `None` where there is none.
    pub(crate) fn tier_use(&self, topology: Topology<'_>) -> Option<TierUse> {
        let first = topology.first_tier()?;
        Some(TierUse { bytes_max: first.size.bytes(topology.root().size_bytes), ..self.counters })
    }

    /// Counts what the first tier holds: segments that moving would empty, and those that are on their way.
    pub(crate) fn measure<'s>(
        &mut self,
        topology: Topology<'_>,
        segments: &Segments,
        there: impl FnOnce() -> Vec<SegmentNo>,
        placed: impl Iterator<Item = (&'s Geometry, &'s [Leg])>,
    ) {
        if topology.first_tier().is_none() {
            self.credit_bytes = 0;
            return;
        }
        let now = topology.basis.now;
        if now.since(self.measured_at) < MEASURE_EVERY {
            return;
        }
        self.measured_at = now;
        let blocks_of = |no| segments.get(no).map_or(0, SegmentInfo::payload_blocks);
        let in_table: u64 = there().into_iter().map(blocks_of).sum();
        let coming: u64 = placed
            .filter(|(geometry, homes)| topology.is_in_first_tier(geometry, homes))
            .map(|(geometry, _)| u64::from(geometry.payload_blocks))
            .sum();
        self.counters.bytes = (in_table + coming) * BLOCK_BYTES as u64;
    }

    pub(crate) fn fill_per_mille(&self, topology: Topology<'_>) -> u64 {
        let bytes_max = topology.first_tier().map_or(0, |first| first.size.bytes(topology.root().size_bytes));
        (u128::from(self.counters.bytes) * 1000 / u128::from(bytes_max.max(1))) as u64
    }

    /// A segment of guests' data was placed there.
    pub(crate) fn on_placed(&mut self, topology: Topology<'_>, kind: &JobKind, geometry: &Geometry, homes: &[Leg]) {
        if topology.first_tier().is_none() {
            return;
        }
        let bytes = u64::from(geometry.payload_blocks) * BLOCK_BYTES as u64;
        let is_first = topology.is_in_first_tier(geometry, homes);
        if is_first {
            self.counters.bytes += bytes;
        }
        if !topology.is_born_first(kind) {
            return;
        }
        if is_first {
            self.counters.born_bytes += bytes;
        } else {
            self.counters.passed_bytes += bytes;
        }
        let span = EVEN_PER_MILLE - CALM_PER_MILLE;
        let above = self.fill_per_mille(topology).saturating_sub(CALM_PER_MILLE).min(2 * span);
        let most = CREDIT_SEGMENTS * u64::from(topology.basis.config.segment_payload_bytes);
        self.credit_bytes = (self.credit_bytes + bytes * above / span).min(most);
    }

    /// Whether something is to leave the first tier, and can.
    pub(crate) fn is_due(&self, topology: Topology<'_>, guests_rest: bool) -> bool {
        let is_owed = self.credit_bytes >= u64::from(topology.basis.config.segment_payload_bytes);
        topology.first_tier().is_some()
            && self.fill_per_mille(topology) > CALM_PER_MILLE
            && (is_owed || guests_rest)
            && topology.capacity_takes_a_segment()
    }

    /// Whether the first tier is about to overflow.
    pub(crate) fn is_full(&self, topology: Topology<'_>) -> bool {
        topology.first_tier().is_some() && self.fill_per_mille(topology) >= FULL_PER_MILLE
    }

    /// The oldest segments of the first tier, with so many granules that can be read, or a few more, and no more blocks
    /// than that unless it is one; at most so many segments. `there` gives those that can be read and were not emptied.
    pub(crate) fn take_oldest(
        &mut self,
        topology: Topology<'_>,
        segments: &Segments,
        room: Named,
        count_max: usize,
        there: impl FnOnce() -> Vec<SegmentNo>,
        is_emptied: impl Fn(SegmentNo) -> bool,
    ) -> Vec<SegmentNo> {
        let now = topology.basis.now;
        if self.oldest.is_empty() && now.since(self.searched_at) >= SEARCH_EVERY {
            self.searched_at = now;
            self.oldest = find_oldest(segments, SEGMENTS_FOUND * room.size, there());
        }
        let leaves = |no, info: &SegmentInfo| {
            let is_there = info.kind == Kind::Data && !info.kept && info.is_live() && !is_emptied(no);
            is_there && topology.is_in_first_tier(&info.geometry, &info.homes)
        };
        let (mut total, mut taken) = (Named::NOTHING, Vec::new());
        while total.size < room.size
            && taken.len() < count_max
            && let Some(no) = self.oldest.front().copied()
        {
            // It may have died, or have been moved, since it was found.
            let leaving = segments.get(no).filter(|info| leaves(no, info));
            let visible = leaving.map_or(Named::NOTHING, SegmentInfo::visible);
            if total.blocks + visible.blocks > room.blocks && !taken.is_empty() {
                break;
            }
            self.oldest.pop_front();
            if !visible.is_nothing() {
                total += visible;
                taken.push(no);
            }
        }
        taken
    }

    /// These were emptied: so many bytes are elsewhere now.
    pub(crate) fn on_rotated(&mut self, segments: &Segments, emptied: &[SegmentNo], moved_bytes: u64) {
        let blocks: u64 = emptied.iter().filter_map(|no| Some(segments.get(*no)?.payload_blocks())).sum();
        let bytes = blocks * BLOCK_BYTES as u64;
        self.counters.rotated_bytes += moved_bytes;
        self.counters.bytes = self.counters.bytes.saturating_sub(bytes);
        self.credit_bytes = self.credit_bytes.saturating_sub(bytes);
    }

    /// A guest reads of a segment.
    pub(crate) fn count_read(&mut self, topology: Topology<'_>, segments: &Segments, no: SegmentNo, bytes: u64) {
        if topology.first_tier().is_none() {
            return;
        }
        let is_first = segments.get(no).is_some_and(|info| topology.is_in_first_tier(&info.geometry, &info.homes));
        self.counters.read_bytes += bytes;
        if is_first {
            self.counters.read_first_bytes += bytes;
        }
    }

    /// Asserts what must hold between events (tests and the simulator).
    pub(crate) fn verify(&self, basis: &Basis) {
        let most = CREDIT_SEGMENTS * u64::from(basis.config.segment_payload_bytes);
        assert!(self.credit_bytes <= most, "{} bytes are owed, at most {most}", self.credit_bytes);
        assert!(self.counters.read_first_bytes <= self.counters.read_bytes, "more was read of one tier than of both");
    }
}

fn visible_size(info: &SegmentInfo) -> u64 {
    info.visible().size
}

fn find_oldest(segments: &Segments, granules: u64, there: Vec<SegmentNo>) -> VecDeque<SegmentNo> {
    let mut total = 0;
    let visible_of = |no: SegmentNo| (no, segments.get(no).map_or(0, visible_size));
    let readable = there.into_iter().map(visible_of).filter(|(_, visible)| *visible > 0);
    let few = readable.take_while(|(_, visible)| {
        total += visible;
        total < granules + visible
    });
    few.map(|(no, _)| no).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::basis::tests::basis;
    use crate::peers::Peers;
    use crate::peers::tests::{leg, peers, stat};
    use crate::segment::tests::{info, no};
    use holdfast_base::NodeId;
    use holdfast_format::geometry::Layout;
    use holdfast_format::tier::{TierSize, Tiers};
    use holdfast_format::wire::DeviceStat;

    const AT: Instant = Instant(10_000_000_000);

    /// Three nodes with a disk and an SSD each, and a volume that begins on SSDs, as a mirror of so many bytes.
    fn rig(size_bytes: u64) -> (Basis, Peers) {
        let mut basis = basis("parity:2+1");
        let mut root = basis.root().clone();
        let first = FirstTier {
            layout: Layout::Mirror { copies: 2 },
            media: Some(MediaClass::Ssd),
            size: TierSize::Bytes(size_bytes),
        };
        root.tiers = Tiers { first: Some(first), capacity: Some(MediaClass::Hdd) };
        basis.replace_root(root);
        basis.now = AT;
        let mut peers = peers(AT, &[2, 2, 2]);
        for node in 1..=3 {
            let of = |device, media| DeviceStat { media: Some(media), ..stat(leg(node, device)) };
            peers.on_stat(NodeId(node), vec![of(0, MediaClass::Hdd), of(1, MediaClass::Ssd)]);
        }
        (basis, peers)
    }

    const SEGMENT: u32 = (4 << 20) / BLOCK_BYTES as u32;

    #[test]
    fn data_are_born_in_the_first_tier_until_it_is_full_and_go_past_it_then() {
        let (basis, peers) = rig(16 << 20);
        let topology = Topology::new(&basis, &peers);
        let kind = JobKind::Destage { entries: Vec::new() };
        let media = |fill| topology.places(&kind, fill).into_iter().map(|place| place.media).collect::<Vec<_>>();
        assert_eq!(media(999), [Some(MediaClass::Ssd), Some(MediaClass::Hdd)]);
        assert_eq!(media(1000), [Some(MediaClass::Hdd), Some(MediaClass::Ssd)]);
        let metadata = topology.places(&JobKind::Leaves, 0);
        assert_eq!(metadata.iter().map(|place| place.media).collect::<Vec<_>>(), [Some(MediaClass::Ssd), None]);
        assert_eq!(topology.places(&JobKind::Clean { aim: Aim::Rotation }, 0).len(), 1);
    }

    #[test]
    fn what_comes_into_a_tier_half_full_lets_as_much_leave_and_the_oldest_first() {
        let (basis, peers) = rig(16 << 20);
        let topology = Topology::new(&basis, &peers);
        let (mut rotation, mut segments) = (Rotation::default(), Segments::default());
        let homes = [leg(1, 1), leg(2, 1)];
        let geometry = info(SEGMENT, 0, &homes).geometry;
        for counter in 0..2 {
            rotation.on_placed(topology, &JobKind::Destage { entries: Vec::new() }, &geometry, &homes);
            segments.insert(no(1, counter), info(SEGMENT, u64::from(SEGMENT), &homes));
        }
        assert_eq!(rotation.fill_per_mille(topology), 500);
        assert!(rotation.is_due(topology, false) && !rotation.is_full(topology));
        let there = || vec![no(1, 0), no(1, 1)];
        let room = |size, blocks| Named { size, blocks };
        let both = Rotation::default().take_oldest(topology, &segments, room(1 << 40, 9000), 16, there, |_| false);
        assert_eq!(both.len(), 2);
        let few = Rotation::default().take_oldest(topology, &segments, room(1 << 40, 1500), 16, there, |_| false);
        assert_eq!(few.len(), 1, "the second has too many blocks");
        let taken = rotation.take_oldest(topology, &segments, room(1, 9000), 16, there, |_| false);
        assert_eq!(taken, [no(1, 0)]);
        rotation.on_rotated(&segments, &taken, 4 << 20);
        assert!(!rotation.is_due(topology, false), "nothing is owed any more");
        rotation.measure(topology, &segments, there, std::iter::empty());
        assert_eq!(rotation.tier_use(topology).map(|used| (used.bytes, used.born_bytes)), Some((8 << 20, 8 << 20)));
        rotation.verify(&basis);
    }
}
