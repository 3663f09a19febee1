//! The map: block -> where its bytes are.
//!
//! Two parts. The **overlay** is a run map in memory with every change since the leaf under it was last written: log
//! data not destaged, and committed segments not folded. The **base** is a directory of immutable leaves, each covering
//! [`LEAF_BLOCKS`] blocks, packed into metadata segments and cached in memory within a budget. Folding merges a batch
//! of leaves with the overlay and writes them anew; the old ones are never changed (copy on write). A block's key
//! carries the **layer** that it was written to.
//!
//! Role: [`Map`] says where blocks are, and changes; it settles the [`Accounts`] of what it names. When it is folded
//! and written down decides [`Checkpointer`]; who wants leaves that are not in memory waits in [`LeafLoader`].
//!
//! Invariants: (1) a block's place is the overlay's if it has one, else the leaf's, else a hole; (2) every run carries
//! the LSN of its last change, so that a fold knows which runs its leaves already contain; (3) layers with runs in the
//! overlay are in the set of these; (4) what leaves are kept for together stays in the budget. [`Map::verify`] checks
//! the last two.

mod apply;
mod capture;
pub(crate) mod checkpoint;
mod cut;
mod directory;
mod fold;
mod folding;
mod heat;
mod layers;
mod leaf;
mod leafload;
mod loading;
mod merge;
mod rangemap;
mod resolve;
pub(crate) mod run;
mod shadow;

pub(crate) use capture::{Capture, Shown};
pub(crate) use checkpoint::Checkpointer;
pub use layers::{CloneInfo, Snapshot};
pub(crate) use layers::{LayerTable, keys_of, leaf_in};
pub(crate) use leaf::{Crcs, LEAF_BLOCKS, Leaf, LeafNo, LeafPointer, Mapped, Overlay, Place, Stored};
pub(crate) use leafload::{Brought, LeafLoader, LeafWaiter, Pins};
pub(crate) use loading::{LogRun, RunLoads, RunsLeft, Sliced};
pub(crate) use rangemap::Piece;

use crate::api::Mutations;
use crate::log::window::Log;
use crate::segment::{Change, Segments};
use crate::wants::Wants;
use directory::Directory;
use heat::Heat;
use holdfast_base::{Key, ObjectId};
use holdfast_format::record::SegmentNo;
use leaf::LeafCache;
use shadow::Shadow;
use std::collections::BTreeSet;

/// Hears how much more or less the map names.
pub(crate) trait Naming {
    /// A leaf names so much more of a segment (or is so many bytes itself), or less.
    fn on_named(&mut self, no: LeafNo, segment: SegmentNo, change: Change);

    /// The overlay names that of a segment from now on, or no more.
    fn on_overlay(&mut self, run: NamedRun<'_>, is_named: bool);
}

/// Blocks of a segment, named by the overlay.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NamedRun<'a> {
    pub(crate) start: u64,
    pub(crate) blocks: u64,
    pub(crate) segment: SegmentNo,
    pub(crate) stored: &'a Stored,
}

/// The accounts of what the map names, and who hears of changes.
pub(crate) struct Accounts<'a> {
    pub(crate) segments: &'a mut Segments,
    pub(crate) log: &'a mut Log,
    pub(crate) wants: &'a mut Wants,
    pub(crate) audit: &'a mut dyn Naming,
    pub(crate) mutations: Mutations,
}

pub(crate) struct Map {
    overlay: Overlay,
    /// Layers that may have runs in the overlay.
    overlaid: BTreeSet<ObjectId>,
    directory: Directory,
    layers: LayerTable,
    leaves: LeafCache,
    /// What frozen layers say together with those below them, by their leaf; the layers that there are such leaves of.
    flats: LeafCache,
    flat_layers: BTreeSet<ObjectId>,
    shadow: Shadow,
    heat: Heat,
    /// The overlay may hold runs that a fold would take in.
    unfolded: bool,
    /// Layers that runs of zeroes were moved to since the last run: they have older stamps.
    zeroes_moved_to: BTreeSet<ObjectId>,
    /// Where the search for leaves of layers that go begins anew.
    going_cursor: LeafNo,
    /// Memory that it may take.
    bytes_max: u64,
}

impl Map {
    pub(crate) fn new(bytes_max: u64) -> Map {
        Map {
            overlay: Overlay::default(),
            overlaid: BTreeSet::new(),
            directory: Directory::default(),
            layers: LayerTable::default(),
            leaves: LeafCache::new(bytes_max),
            flats: LeafCache::new(bytes_max / 4),
            flat_layers: BTreeSet::new(),
            shadow: Shadow::default(),
            heat: Heat::default(),
            unfolded: false,
            zeroes_moved_to: BTreeSet::new(),
            going_cursor: LeafNo::default(),
            bytes_max,
        }
    }

    pub(crate) fn overlay(&self) -> &Overlay {
        &self.overlay
    }

    /// Runs of the overlay.
    pub(crate) fn run_count(&self) -> usize {
        self.overlay.run_count()
    }

    pub(crate) fn layers(&self) -> &LayerTable {
        &self.layers
    }

    pub(crate) fn layers_mut(&mut self) -> &mut LayerTable {
        &mut self.layers
    }

    pub(crate) fn directory(&self) -> &Directory {
        &self.directory
    }

    /// Layers that may have runs in the overlay.
    pub(crate) fn overlaid(&self) -> &BTreeSet<ObjectId> {
        &self.overlaid
    }

    /// A leaf that is in memory, without keeping it for longer.
    pub(crate) fn peek(&self, no: LeafNo) -> Option<std::sync::Arc<Leaf>> {
        self.leaves.peek(no)
    }

    pub(crate) fn is_unfolded(&self) -> bool {
        self.unfolded
    }

    /// The overlay holds runs that a fold would take in.
    pub(crate) fn set_unfolded(&mut self) {
        self.unfolded = true;
    }

    /// Whether all that the overlay hides of leaves is known.
    pub(crate) fn knows_all_shadowed(&self) -> bool {
        self.shadow.is_known()
    }

    /// Memory of leaves.
    pub(crate) fn cached_bytes(&self) -> usize {
        self.leaves.bytes() + self.flats.bytes()
    }

    /// Asserts what must hold between events (tests and the simulator).
    pub(crate) fn verify(&self) {
        let mut from = 0;
        while let Some((start, _, _)) = self.overlay.iter_from(from).next() {
            let layer = Key(start).object();
            assert!(
                self.overlaid.contains(&layer),
                "{layer:?} has runs in the overlay, and is not among those that have"
            );
            from = keys_of(layer).end;
        }
        self.directory.verify();
        self.leaves.verify();
        self.flats.verify();
        assert!(
            self.flat_layers.iter().all(|layer| !self.layers.is_live(*layer)),
            "only frozen layers have flat leaves"
        );
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::care::Audit;
    use crate::segment::tests::{info, no};
    use crate::segment::{Named, SegmentInfo};
    use holdfast_base::{HeadId, Lsn};
    use holdfast_format::packing::{BLOCK_GRANULES, Codec, StoredLength, StoredLengths};
    use holdfast_format::record::{CommitExtent, SegmentCommit, Source};

    /// Blocks of a volume that there are units of.
    const PACKED_BLOCKS: u64 = 2500;

    /// A map with accounts of its own.
    pub(crate) struct TestMap {
        pub(crate) map: Map,
        pub(crate) segments: Segments,
        pub(crate) log: Log,
        pub(crate) wants: Wants,
        pub(crate) audit: Audit,
        stamp: u64,
    }

    impl TestMap {
        pub(crate) fn new() -> TestMap {
            let (segments, log, wants) = (Segments::default(), Log::default(), Wants::default());
            TestMap { map: Map::new(1 << 20), segments, log, wants, audit: Audit::default(), stamp: 0 }
        }

        pub(crate) fn with<T>(&mut self, change: impl FnOnce(&mut Map, &mut Accounts<'_>) -> T) -> T {
            let TestMap { map, segments, log, wants, audit, .. } = self;
            let mut accounts = Accounts { segments, log, wants, audit, mutations: Mutations::default() };
            let result = change(map, &mut accounts);
            self.segments.verify();
            self.map.verify();
            result
        }

        /// Writes to a layer; the segment is the one of that number.
        pub(crate) fn write(&mut self, layer: u32, block: u64, blocks: u64, counter: u64) {
            if self.segments.get(no(1, counter)).is_none() {
                self.segments.insert(no(1, counter), info(512, 0, &[]));
            }
            let crcs = Crcs::new(vec![counter as u32; blocks as usize]);
            let place = Place::plain(no(1, counter), block as u32, crcs);
            self.say(layer, block, blocks, place);
        }

        /// The same to a packed segment, in which each block has a unit of its own: its length follows from its number.
        pub(crate) fn write_packed(&mut self, layer: u32, block: u64, blocks: u64, counter: u64) {
            let length = |n: u64| match n % 5 {
                0 => StoredLength::RAW,
                _ => StoredLength::compressed(Codec::Lz4, 1 + (n * 7 % 40) as u32),
            };
            let all = StoredLengths::new((0..PACKED_BLOCKS).map(length));
            if self.segments.get(no(1, counter)).is_none() {
                let units = std::num::NonZeroU32::new(all.granules() as u32);
                let payload_blocks = all.end_from(0).div_ceil(BLOCK_GRANULES);
                self.segments.insert(no(1, counter), SegmentInfo { units, ..info(payload_blocks, 0, &[]) });
            }
            let stored = Stored::Packed { granule: all.start_of(block, 0), lengths: all.slice(block, blocks) };
            let crcs = Crcs::new(vec![counter as u32; blocks as usize]);
            self.say(layer, block, blocks, Place::Segment { segment: no(1, counter), stored, crcs });
        }

        pub(crate) fn say(&mut self, layer: u32, block: u64, blocks: u64, place: Place) {
            self.stamp += 1;
            let (key, stamp) = (Key::new(ObjectId(layer), holdfast_base::Lba(block)).0, Lsn(self.stamp));
            self.with(|map, accounts| map.map_to(key, blocks, Mapped { place, stamp }, accounts));
        }

        /// The log has come to what was written last, and none of that is in it.
        pub(crate) fn complete_log(&mut self) {
            self.log = Log::starting_after(Lsn(self.stamp));
        }

        /// Folds all that there is into leaves, which lie in the metadata segment of that number.
        pub(crate) fn fold(&mut self, counter: u64) {
            fold::tests::fold(self, counter);
        }

        /// Takes a leaf out of memory.
        pub(crate) fn evict(&mut self, no: LeafNo) -> std::sync::Arc<Leaf> {
            let leaf = self.map.peek(no).expect("it was there");
            self.map.leaves.remove(no);
            leaf
        }

        /// Segments by their numbers, as a layer sees the blocks: zero for holes and zeroes.
        pub(crate) fn seen(&mut self, layer: u32, first: u64, blocks: u64) -> Vec<u64> {
            let found = self.map.resolve_through(ObjectId(layer), first, blocks, &Pins::default());
            let counter = |piece: Piece<Place>| match piece.value {
                Some(Place::Segment { segment, .. }) => vec![segment.counter; piece.len as usize],
                _ => vec![0; piece.len as usize],
            };
            found.expect("all leaves are there").into_iter().flat_map(counter).collect()
        }

        pub(crate) fn live(&self, counter: u64) -> u64 {
            self.segments.get(no(1, counter)).map_or(0, |info| info.live.blocks)
        }
    }

    #[test]
    fn what_is_written_last_is_seen_and_what_it_replaces_is_named_no_more() {
        let mut kept = TestMap::new();
        kept.write(0, 0, 8, 1);
        kept.write(0, 2, 4, 2);
        assert_eq!(kept.seen(0, 0, 10), [1, 1, 2, 2, 2, 2, 1, 1, 0, 0]);
        assert_eq!((kept.live(1), kept.live(2)), (4, 4));
        kept.say(0, 0, 4, Place::Zero);
        assert_eq!(kept.seen(0, 0, 8), [0, 0, 0, 0, 2, 2, 1, 1]);
        assert_eq!((kept.live(1), kept.live(2)), (2, 2));
        assert_eq!(kept.map.mapped_end(ObjectId(0)), 8);
    }

    #[test]
    fn a_unit_that_becomes_another_is_found_where_it_was_whatever_its_length_is_now() {
        let mut kept = TestMap::new();
        // Of 8, 15, 22 and 29 granules.
        kept.write_packed(0, 1, 4, 1);
        let was = [64, 72, 87, 109];
        // A whole block, and a unit that crosses a stripe where the former one was, begin elsewhere.
        let becomes =
            [StoredLength::compressed(Codec::Zstd, 5), StoredLength::RAW, StoredLength::RAW, StoredLength::RAW];
        let lengths = StoredLengths::new(becomes);
        let geometry = holdfast_format::geometry::Geometry::new("mirror:2".parse().expect("a layout"), 4);
        let of = |at: usize| CommitExtent {
            key: Key::new(ObjectId(0), holdfast_base::Lba(1 + at as u64)),
            blocks: 1,
            source: Source::Packed { segment: no(1, 1), granule: was[at] },
        };
        let commit = SegmentCommit {
            segment: no(1, 2),
            geometry,
            homes: Vec::new(),
            extents: (0..4).map(of).collect(),
            crcs: vec![1; 4],
        };
        kept.with(|map, accounts| map.apply_commit(&commit, Some(&lengths), Lsn(9), accounts));
        assert_eq!(kept.seen(0, 1, 4), [2; 4]);
        assert_eq!((kept.live(1), kept.live(2)), (0, 4));
    }

    #[test]
    fn packed_blocks_count_what_their_units_take() {
        let mut kept = TestMap::new();
        let counts = |kept: &TestMap| {
            let info = kept.segments.get(no(1, 1)).expect("it is in the table");
            (info.live, info.shadowed)
        };
        // Raw, and 8, 15, 22 and 29 granules.
        kept.write_packed(0, 0, 5, 1);
        let all = Named { size: 64 + 8 + 15 + 22 + 29, blocks: 5 };
        assert_eq!(counts(&kept), (all, Named::NOTHING));
        let capacity = kept.segments.totals().capacity;
        kept.fold(1);
        assert_eq!(counts(&kept), (all, Named::NOTHING));
        kept.write(0, 1, 2, 2);
        assert_eq!(counts(&kept), (all, Named { size: 8 + 15, blocks: 2 }));
        // A leaf that names other units of the same segment, which are fewer blocks and more granules.
        kept.write_packed(0, 5, 1, 1);
        kept.say(0, 3, 2, Place::Zero);
        assert_eq!(counts(&kept).0, Named { size: all.size + 64, blocks: 6 });
        kept.fold(2);
        assert_eq!(counts(&kept), (Named { size: 64 + 64, blocks: 2 }, Named::NOTHING));
        let totals = kept.segments.totals();
        assert_eq!((totals.visible_blocks, totals.capacity), (4, capacity + 512 * 64));
        assert_eq!(totals.dead, totals.capacity - 2 * 64 - 2 * 64);
    }

    #[test]
    fn a_layer_shows_what_those_below_it_say_where_it_says_nothing() {
        let mut kept = TestMap::new();
        kept.write(0, 0, 4, 1);
        for (frozen, live) in [(0, 1), (1, 2), (2, 3)] {
            let snapshot =
                Snapshot { name: live.to_string(), head: HeadId::VOLUME, created_ms: 0, size_bytes: 1 << 20 };
            kept.map.layers_mut().freeze(ObjectId(frozen), ObjectId(live), snapshot, true);
            kept.write(live, u64::from(live), 1, u64::from(live) + 1);
        }
        assert_eq!(kept.seen(3, 0, 4), [1, 2, 3, 4]);
        assert_eq!(kept.seen(1, 0, 4), [1, 2, 1, 1]);
        assert_eq!(kept.seen(0, 0, 4), [1, 1, 1, 1]);
        // What was looked up through many layers is kept, and forgotten where one of them changes.
        kept.say(1, 1, 1, Place::Zero);
        assert_eq!(kept.seen(3, 0, 4), [1, 0, 3, 4]);
        let changes = kept.map.resolve_changes(ObjectId(3), ObjectId(1), 0, 4, &Pins::default()).expect("no leaves");
        let changed: Vec<(u64, u64)> = changes.iter().filter(|p| p.value.is_some()).map(|p| (p.start, p.len)).collect();
        assert_eq!(changed, [(2, 1), (3, 1)]);
    }

    #[test]
    #[should_panic(expected = "is not among those that have")]
    fn a_layer_with_runs_that_nobody_knows_of_is_a_bug() {
        let mut kept = TestMap::new();
        kept.write(0, 0, 1, 1);
        kept.map.overlaid.clear();
        kept.map.verify();
    }
}
