//! A capture: the state as of one LSN on its way into a run of a checkpoint, slice by slice.
//!
//! States: leaves -> segments -> overlay -> done. Payloads that are full are put into segments meanwhile.
//!
//! What may happen between two slices: guests' writes, commits, and cleaning change overlay and segment table, which
//! both keep what they change ahead of the walk as it was ([`super::cut`], [`Segments::cut`]). The directory changes
//! only in folds, and these wait. So the run says what a capture in one turn would, whatever the size of its slices.
//!
//! Faults: a crash on the way leaves the previous checkpoint whole, and segments that no record names.

use super::Map;
use super::leaf::{LEAF_BLOCKS, LeafNo, Mapped, Place};
use super::rangemap::Sliceable;
use super::run::{Packed, RunWriter};
use crate::segment::{Kind, Segments};
use holdfast_base::{Key, Lsn, ObjectId};
use std::collections::BTreeSet;
use std::vec::IntoIter;

/// Elements that are gone through without looking at what that came to.
const AT_ONCE: usize = 32;

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
}

impl Scope {
    fn say_run(&self, start: u64, blocks: u64, mapped: &Mapped, writer: &mut RunWriter) {
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
pub(super) struct Capture {
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
        let scope = Scope { full, since: since.unwrap_or(Lsn::ZERO), folded, moved };
        Capture { scope, step, writer }
    }

    pub(super) fn is_done(&self) -> bool {
        matches!(self.step, Step::Done)
    }

    /// A payload that is full, or the last.
    pub(super) fn next_packed(&mut self) -> Option<Packed> {
        self.writer.next_packed()
    }

    /// Goes on for a little, and tells how much that was, in runs.
    pub(super) fn go_on(&mut self, map: &mut Map, segments: &mut Segments) -> usize {
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
                let goes_on = map.overlay.walk(AT_ONCE, |start, blocks, mapped| {
                    looked_at += 1;
                    scope.say_run(start, blocks, mapped, writer);
                });
                if !goes_on {
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
    use crate::map::loading::RunLeft;
    use crate::map::tests::TestMap;
    use crate::segment::tests::no;

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
}
