//! A capture: the state as of one LSN on its way into a run of a checkpoint, slice by slice: of the volume's own, or of
//! the first one of a volume that shares its segments.
//!
//! States: leaves -> segments -> overlay -> done. Payloads that are full are put into segments meanwhile.
//!
//! What may happen between two slices: guests' writes, commits, and cleaning change overlay and segment table, which
//! both keep what they change ahead of the walk as it was ([`super::cut`], [`Segments::cut`]). The directory changes
//! only in folds, and these wait. So the run says what a capture in one turn would, whatever the size of its slices.
//!
//! Faults: a crash on the way leaves the previous checkpoint whole, and segments that no record names.

use super::Map;
use super::layers::LayerTable;
use super::leaf::{LEAF_BLOCKS, LeafNo, Mapped, Place};
use super::rangemap::Sliceable;
use super::run::{Packed, RunWriter};
use crate::segment::{Kind, Segments};
use holdfast_base::{Key, Lsn, ObjectId};
use std::collections::BTreeSet;
use std::vec::IntoIter;

/// Elements that are gone through without looking at what that came to.
const AT_ONCE: usize = 32;

/// What another volume is to see of the map, which is the whole of a snapshot.
#[derive(Debug)]
pub(crate) struct Shown {
    /// Nothing that this layer shows is in the log.
    pub(crate) layer: ObjectId,
    /// Zeroes behind the snapshot's end, if anything was said there: their first key, and how many.
    pub(crate) behind: Option<(u64, u64)>,
    pub(crate) stamp: Lsn,
}

/// What of the map a run says.
#[derive(Debug)]
struct Scope {
    full: bool,
    /// The LSN of the last run.
    since: Lsn,
    /// Leaves that were folded after it.
    folded: BTreeSet<LeafNo>,
    /// Layers that runs of zeroes with older stamps were moved to.
    moved: BTreeSet<ObjectId>,
    /// Where it is for another volume.
    shown: Option<Shown>,
}

impl Scope {
    fn say_run(&self, start: u64, blocks: u64, mapped: &Mapped, layers: &LayerTable, writer: &mut RunWriter) {
        if let (Some(shown), Place::Log { .. }) = (&self.shown, &mapped.place) {
            let layer = Key(start).object();
            assert!(!layers.is_under(layer, shown.layer), "what the snapshot shows has left the log");
            // Of a layer that the other volume drops. Something has to hide what the leaf names there: it may be gone.
            return writer.run(start, blocks, &Mapped { place: Place::Zero, stamp: mapped.stamp });
        }
        let is_moved = || mapped.place == Place::Zero && self.moved.contains(&Key(start).object());
        if self.full || mapped.stamp > self.since || is_moved() {
            return writer.run(start, blocks, mapped);
        }
        // Who reads that forgets what lies over these leaves.
        let end = start + blocks;
        for no in self.folded.range(LeafNo::of(Key(start))..=LeafNo::of(Key(end - 1))) {
            let (from, to) = (start.max(no.first_key()), end.min(no.first_key() + LEAF_BLOCKS));
            writer.run(from, to - from, &mapped.slice(from - start, to - from));
        }
    }
}

#[derive(Debug)]
enum Step {
    /// All that there are, from there on.
    AllLeaves(LeafNo),
    FoldedLeaves(IntoIter<LeafNo>),
    Segments,
    Overlay,
    Done,
}

#[derive(Debug)]
pub(crate) struct Capture {
    scope: Scope,
    step: Step,
    writer: RunWriter,
}

impl Capture {
    /// The state as of now: all of it, or what has changed since the LSN of the last run.
    pub(super) fn begin(
        map: &mut Map,
        segments: &mut Segments,
        since: Option<Lsn>,
        folded: BTreeSet<LeafNo>,
        writer: RunWriter,
    ) -> Capture {
        let full = since.is_none();
        segments.cut(full);
        map.overlay.cut();
        let step = match full {
            true => Step::AllLeaves(LeafNo(0)),
            false => Step::FoldedLeaves(folded.iter().copied().collect::<Vec<_>>().into_iter()),
        };
        let moved = std::mem::take(&mut map.zeroes_moved_to);
        let scope = Scope { full, since: since.unwrap_or(Lsn::ZERO), folded, moved, shown: None };
        Capture { scope, step, writer }
    }

    /// The whole state as of now for another volume: what the next run says of this one is the same as without.
    pub(crate) fn for_other(map: &mut Map, segments: &mut Segments, shown: Shown, writer: RunWriter) -> Capture {
        segments.cut_for_other();
        map.overlay.cut();
        let (folded, moved) = (BTreeSet::new(), BTreeSet::new());
        let scope = Scope { full: true, since: Lsn::ZERO, folded, moved, shown: Some(shown) };
        Capture { scope, step: Step::AllLeaves(LeafNo(0)), writer }
    }

    /// It is given up.
    pub(crate) fn abandon(self, map: &mut Map, segments: &mut Segments) {
        segments.end_cut();
        map.overlay.end_cut();
    }

    pub(crate) fn is_done(&self) -> bool {
        matches!(self.step, Step::Done)
    }

    /// A payload that is full, or the last.
    pub(crate) fn next_packed(&mut self) -> Option<Packed> {
        self.writer.next_packed()
    }

    /// Goes on for a little, and tells how much that was, in runs.
    pub(crate) fn go_on(&mut self, map: &mut Map, segments: &mut Segments) -> usize {
        let (scope, writer) = (&self.scope, &mut self.writer);
        let mut looked_at = 0;
        match &mut self.step {
            Step::AllLeaves(from) => {
                let mut leaves = map.directory.iter_from(*from);
                leaves.by_ref().take(AT_ONCE).for_each(|(no, pointer)| writer.leaf(no, Some(pointer)));
                let next = leaves.next();
                self.step = next.map_or(Step::Segments, |(no, _)| Step::AllLeaves(no));
            }
            Step::FoldedLeaves(left) => {
                left.by_ref().take(AT_ONCE).for_each(|no| writer.leaf(no, map.directory.get(no)));
                if left.len() == 0 {
                    self.step = Step::Segments;
                }
            }
            Step::Segments => {
                let goes_on = segments.walk_cut(AT_ONCE, |no, info| {
                    looked_at += 1;
                    if info.is_none_or(|info| info.kind != Kind::Run) {
                        writer.segment(no, info);
                    }
                });
                if !goes_on {
                    self.step = Step::Overlay;
                }
            }
            Step::Overlay => {
                let layers = &map.layers;
                let goes_on = map.overlay.walk(AT_ONCE, |start, blocks, mapped| {
                    looked_at += 1;
                    scope.say_run(start, blocks, mapped, layers, writer);
                });
                if !goes_on {
                    if let Some(Shown { behind: Some((start, blocks)), stamp, .. }) = &scope.shown {
                        writer.run(*start, *blocks, &Mapped { place: Place::Zero, stamp: *stamp });
                    }
                    self.step = Step::Done;
                    writer.end();
                }
            }
            Step::Done => {}
        }
        self.writer.take_work().max(looked_at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::LeafPointer;
    use crate::map::Snapshot;
    use crate::map::leaf::Crcs;
    use crate::map::loading::RunLeft;
    use crate::map::tests::TestMap;
    use crate::segment::tests::no;
    use holdfast_base::{Buf, HeadId, Lba};

    fn begin(kept: &mut TestMap, since: Option<Lsn>, folded: BTreeSet<LeafNo>) -> Capture {
        let writer = RunWriter::new(since.is_none(), kept.map.layers.clone(), Lsn::ZERO, 64 << 10);
        Capture::begin(&mut kept.map, &mut kept.segments, since, folded, writer)
    }

    /// What is left of it goes into another map, as openings do that.
    fn load(kept: &mut TestMap, mut capture: Capture, into: &mut TestMap) {
        while !capture.is_done() {
            capture.go_on(&mut kept.map, &mut kept.segments);
        }
        while let Some(packed) = capture.next_packed() {
            for part in packed.parts() {
                let mut left = RunLeft::begin(part).expect("it can be read");
                let is_done = into.map.load_some(&mut left, usize::MAX, &mut into.segments, &into.log);
                assert!(is_done.expect("it can be read").is_done, "there are not so many");
            }
        }
    }

    fn counts(kept: &TestMap) -> Vec<(u64, u64)> {
        (1..=9).map(|counter| (counter, kept.live(counter))).filter(|(_, live)| *live > 0).collect()
    }

    #[test]
    fn a_capture_says_what_was_there_when_it_began_whatever_comes_meanwhile() {
        let mut kept = TestMap::new();
        for block in 0..200 {
            kept.write(0, block * 4, 2, 1 + block % 3);
        }
        let (before, live) = (kept.seen(0, 0, 900), counts(&kept));
        let mut capture = begin(&mut kept, None, BTreeSet::new());
        for block in [5_u64, 700, 401, 13, 790, 60, 350] {
            capture.go_on(&mut kept.map, &mut kept.segments);
            kept.write(0, block, 7, 5 + block % 2);
            kept.say(0, block + 30, 9, Place::Zero);
        }
        assert!(!capture.is_done(), "there is something ahead of each write");
        let mut read = TestMap::new();
        load(&mut kept, capture, &mut read);
        assert_eq!(read.seen(0, 0, 900), before);
        assert_eq!(counts(&read), live);
        assert_ne!(kept.seen(0, 0, 900), before);
        // What came meanwhile is in the next run.
        let (now, live) = (kept.seen(0, 0, 900), counts(&kept));
        let mut delta = begin(&mut kept, Some(Lsn(200)), BTreeSet::new());
        delta.go_on(&mut kept.map, &mut kept.segments);
        kept.write(0, 100, 3, 9);
        load(&mut kept, delta, &mut read);
        assert_eq!(read.seen(0, 0, 900), now);
        assert_eq!(counts(&read), live);
    }

    #[test]
    fn what_lies_over_folded_leaves_is_said_anew_and_nothing_else_that_is_old() {
        let mut kept = TestMap::new();
        kept.write(0, 500, 24, 1);
        kept.write(0, 3 * LEAF_BLOCKS, 8, 2);
        let pointer = LeafPointer { segment: no(9, 1), offset_bytes: 0, len_bytes: 2, crc: 0 };
        kept.map.directory.insert(LeafNo(1), pointer);
        let capture = begin(&mut kept, Some(Lsn(2)), BTreeSet::from([LeafNo(1)]));
        let mut read = TestMap::new();
        load(&mut kept, capture, &mut read);
        let runs: Vec<(u64, u64)> = read.map.overlay().iter_from(0).map(|(start, len, _)| (start, len)).collect();
        assert_eq!(runs, [(LEAF_BLOCKS, 12)]);
        assert_eq!(read.map.directory().get(LeafNo(1)), Some(pointer));
    }

    #[test]
    fn what_another_volume_is_to_see_takes_nothing_from_the_next_run_of_this_one() {
        let mut kept = TestMap::new();
        for block in 0..100 {
            kept.write(0, block * 4, 2, 1 + block % 3);
        }
        let snapshot = Snapshot { name: "a".to_string(), head: HeadId::VOLUME, created_ms: 0, size_bytes: 1 << 30 };
        kept.map.layers_mut().freeze(ObjectId(0), ObjectId(1), snapshot, true);
        // What is in the log, of a layer that the other does not see, hides what is below it.
        let data = Place::Log { lsn: Lsn(200), data: Buf::zeroes(4096), crcs: Crcs::new(vec![0]) };
        kept.say(1, 8, 1, data);
        let (before, live) = (kept.seen(0, 0, 900), counts(&kept));
        let layers = kept.map.layers().for_dependent(ObjectId(0)).expect("a layer is left");
        let own = layers.live(HeadId::VOLUME).expect("it has one");
        let writer = RunWriter::new(true, layers, Lsn::ZERO, 64 << 10);
        let behind = Some((Key::new(own, Lba(300)).0, 600));
        let shown = Shown { layer: ObjectId(0), behind, stamp: Lsn(201) };
        let mut capture = Capture::for_other(&mut kept.map, &mut kept.segments, shown, writer);
        for block in [5_u64, 390, 201] {
            capture.go_on(&mut kept.map, &mut kept.segments);
            kept.write(1, block, 7, 5);
        }
        assert!(!capture.is_done(), "there is something ahead of each write");
        let mut read = TestMap::new();
        load(&mut kept, capture, &mut read);
        assert_eq!((read.seen(0, 0, 900), counts(&read)), (before.clone(), live));
        assert_eq!((read.seen(1, 8, 1), read.seen(own.0, 0, 300)), (vec![0], before[..300].to_vec()));
        assert_eq!(read.seen(own.0, 300, 600), [0; 600]);
        // One that is given up leaves nothing behind, and all that has changed is still to be said.
        let shown = Shown { layer: ObjectId(0), behind: None, stamp: Lsn(202) };
        let writer = RunWriter::new(true, LayerTable::default(), Lsn::ZERO, 64 << 10);
        let mut capture = Capture::for_other(&mut kept.map, &mut kept.segments, shown, writer);
        capture.go_on(&mut kept.map, &mut kept.segments);
        capture.abandon(&mut kept.map, &mut kept.segments);
        let (now, live) = (kept.seen(1, 0, 900), counts(&kept));
        let mut own_read = TestMap::new();
        let delta = begin(&mut kept, Some(Lsn::ZERO), BTreeSet::new());
        own_read.map.layers = kept.map.layers.clone();
        load(&mut kept, delta, &mut own_read);
        assert_eq!((own_read.seen(1, 0, 900), counts(&own_read)), (now, live));
    }
}
