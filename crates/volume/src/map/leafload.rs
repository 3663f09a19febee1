//! Loading the leaves that are not in memory.
//!
//! Role: [`LeafLoader`] knows which leaves are being read, for whom, and which lie side by side and are read at once. The
//! controller has the bytes fetched, and tells those who wait, leaf by leaf ([`Map::take_in`]).
//!
//! Faults: where a block of several leaves is lost each leaf is read by itself. A leaf that was written anew meanwhile is
//! gone: who waits looks it up again.

use super::leaf::{Leaf, LeafNo, LeafPointer};
use super::{Accounts, Map};
use crate::segment::Segments;
use crate::segment::fetch::{FetchError, Recipient, Wanted};
use holdfast_base::{BLOCK_BYTES, Buf, Token, Urgency, buf};
use holdfast_format::geometry::Geometry;
use holdfast_format::record::SegmentNo;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Leaves that an operation holds on to, so that a small cache can't starve it. Each is valid while the directory names
/// it: a place in a segment is not used twice.
#[derive(Debug, Default)]
pub(crate) struct Pins {
    leaves: BTreeMap<LeafNo, (LeafPointer, Arc<Leaf>)>,
}

impl Pins {
    /// Holds on to a leaf that the directory names by `pointer`.
    pub(crate) fn hold(&mut self, no: LeafNo, pointer: LeafPointer, leaf: Arc<Leaf>) {
        self.leaves.insert(no, (pointer, leaf));
    }

    pub(crate) fn get(&self, no: LeafNo, pointer: LeafPointer) -> Option<&Arc<Leaf>> {
        self.leaves.get(&no).filter(|(of, _)| *of == pointer).map(|(_, leaf)| leaf)
    }

    pub(crate) fn release_all(&mut self) {
        self.leaves.clear();
    }
}

/// Whose need a leaf is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LeafWaiter {
    Read(Token),
    /// Nobody: it is looked for when it is needed.
    ReadAhead,
    Cleaner,
    Fold,
    Audit,
}

/// A leaf that is being read.
#[derive(Debug)]
pub(crate) struct LeafLoad {
    pointer: LeafPointer,
    waiters: Vec<LeafWaiter>,
}

/// One read of leaves that lie side by side in a segment.
#[derive(Debug)]
struct Span {
    /// Of who wanted them first.
    urgency: Urgency,
    leaves: Vec<LeafNo>,
    segment: SegmentNo,
    /// Bytes of the segment's payload that it covers.
    from: u32,
    end: u32,
    parts: Vec<Option<Buf>>,
    failed: Option<FetchError>,
    pending: u32,
}

/// Leaves are read together if they lie no further apart than this, and so much at most.
const GAP_BYTES_MAX: u32 = 16 << 10;
const SPAN_BYTES_MAX: u32 = 256 << 10;

/// What a part that was fetched brings: leaves that were read or lost, each to be taken in and told of, and what is to be
/// fetched for others.
#[derive(Debug, Default)]
pub(crate) struct Brought {
    pub(crate) leaves: Vec<(LeafNo, Result<Leaf, FetchError>)>,
    pub(crate) wanted: Vec<Wanted>,
}

/// The leaves that are being read.
#[derive(Debug, Default)]
pub(crate) struct LeafLoader {
    loads: BTreeMap<LeafNo, LeafLoad>,
    spans: BTreeMap<u64, Span>,
}

impl LeafLoader {
    pub(crate) fn is_loading(&self, no: LeafNo) -> bool {
        self.loads.contains_key(&no)
    }

    /// Loads leaves of the directory for `waiter`, who is told of each when it is there: what is to be fetched for that.
    /// What lies side by side is read at once.
    pub(crate) fn load(
        &mut self,
        map: &Map,
        segments: &Segments,
        leaves: &[LeafNo],
        waiter: LeafWaiter,
        urgency: Urgency,
    ) -> Vec<Wanted> {
        let mut fresh: Vec<(LeafPointer, LeafNo)> = Vec::with_capacity(leaves.len());
        for &no in leaves {
            if let Some(load) = self.loads.get_mut(&no) {
                if !load.waiters.contains(&waiter) {
                    load.waiters.push(waiter);
                }
                continue;
            }
            let pointer = map.directory.get(no).expect("only leaves in the directory are loaded");
            self.loads.insert(no, LeafLoad { pointer, waiters: vec![waiter] });
            fresh.push((pointer, no));
        }
        fresh.sort_unstable_by_key(|(pointer, _)| (pointer.segment, pointer.offset_bytes));
        let mut spans: Vec<Span> = Vec::new();
        for (pointer, no) in fresh {
            match spans.last_mut() {
                Some(span) if span.reaches(&pointer) => span.add(no, &pointer),
                _ => spans.push(Span::new(no, pointer, urgency)),
            }
        }
        spans.into_iter().flat_map(|span| self.start(span, segments)).collect()
    }

    fn start(&mut self, mut span: Span, segments: &Segments) -> Vec<Wanted> {
        let (segment, urgency) = (span.segment, span.urgency);
        let Some(info) = segments.get(segment) else { panic!("leaf {:?} lies in an unknown segment", span.leaves[0]) };
        let runs = block_runs(&info.geometry, span.from, span.end - span.from);
        (span.parts, span.pending) = (vec![None; runs.len()], runs.len() as u32);
        let name = self.spans.keys().next_back().map_or(0, |last| last + 1);
        self.spans.insert(name, span);
        let wanted = |(part, run): (usize, (u32, u32))| {
            let by = Recipient::Leaves { span: name, part: part as u32 };
            Wanted { by, urgency, segment, shape: None, run, crcs: None, units: None }
        };
        runs.into_iter().enumerate().map(wanted).collect()
    }

    pub(crate) fn on_part(
        &mut self,
        map: &Map,
        segments: &Segments,
        name: u64,
        part: u32,
        result: Result<Buf, FetchError>,
    ) -> Brought {
        let Some(span) = self.spans.get_mut(&name) else { return Brought::default() };
        span.pending -= 1;
        match result {
            Ok(bytes) => span.parts[part as usize] = Some(bytes),
            Err(error) => span.failed = Some(error),
        }
        if span.pending > 0 {
            return Brought::default();
        }
        let span = self.spans.remove(&name).expect("just seen");
        if span.failed == Some(FetchError::Lost) && span.leaves.len() > 1 {
            return self.load_apart(map, segments, &span);
        }
        let parts: Vec<Buf> = span.parts.iter().flatten().cloned().collect();
        let bytes = buf::concat(&parts);
        let from = span.from - span.from % BLOCK_BYTES as u32;
        let read = |no: LeafNo| {
            let pointer = self.loads.get(&no)?.pointer;
            let leaf = match span.failed {
                Some(error) => Err(error),
                None => decode_leaf(&pointer, &bytes[(pointer.offset_bytes - from) as usize..]),
            };
            Some((no, leaf))
        };
        Brought { leaves: span.leaves.iter().copied().filter_map(read).collect(), wanted: Vec::new() }
    }

    /// A block of a span is lost: only the leaves that lie in it are, too.
    fn load_apart(&mut self, map: &Map, segments: &Segments, span: &Span) -> Brought {
        let mut brought = Brought::default();
        for no in &span.leaves {
            let Some(pointer) = self.loads.get(no).map(|load| load.pointer) else { continue };
            if map.directory.get(*no) == Some(pointer) {
                brought.wanted.extend(self.start(Span::new(*no, pointer, span.urgency), segments));
            } else {
                brought.leaves.push((*no, Err(FetchError::Gone)));
            }
        }
        brought
    }

    /// A leaf was brought: nobody waits for it any more.
    pub(crate) fn end(&mut self, no: LeafNo) -> Option<LeafLoad> {
        self.loads.remove(&no)
    }

    /// Asserts what must hold between events (tests and the simulator).
    pub(crate) fn verify(&self) {
        let mut read = BTreeSet::new();
        for (name, span) in &self.spans {
            let missing = span.parts.iter().filter(|part| part.is_none()).count();
            assert!(span.pending > 0 && span.pending as usize <= missing, "span {name} waits for what is not there");
            for no in &span.leaves {
                assert!(read.insert(*no), "leaf {no:?} is read twice at a time");
                assert!(self.loads.contains_key(no), "leaf {no:?} is read for nobody");
            }
        }
        assert!(self.loads.keys().all(|no| read.contains(no)), "each leaf that is waited for is being read");
        assert!(self.loads.values().all(|load| !load.waiters.is_empty()), "somebody waits for each leaf");
    }
}

impl Map {
    /// A leaf was read: it is kept in memory, if it still is what the directory names. Returns it with who waits.
    pub(crate) fn take_in(
        &mut self,
        no: LeafNo,
        load: LeafLoad,
        leaf: Result<Leaf, FetchError>,
        accounts: &mut Accounts<'_>,
    ) -> (Result<Arc<Leaf>, FetchError>, Vec<LeafWaiter>) {
        let LeafLoad { pointer, waiters } = load;
        if self.directory.get(no) != Some(pointer) {
            return (Err(FetchError::Gone), waiters);
        }
        let leaf = leaf.map(Arc::new);
        if let Ok(leaf) = &leaf {
            match waiters[..] {
                [LeafWaiter::Audit] => {}
                [LeafWaiter::Fold] => self.leaves.insert_beside(no, Arc::clone(leaf)),
                _ => self.leaves.insert(no, Arc::clone(leaf)),
            }
            self.look_at_shadowed(no, leaf, accounts);
        }
        (leaf, waiters)
    }
}

impl Span {
    fn new(no: LeafNo, pointer: LeafPointer, urgency: Urgency) -> Span {
        let (from, end) = (pointer.offset_bytes, pointer.offset_bytes + pointer.len_bytes);
        let (leaves, segment) = (vec![no], pointer.segment);
        Span { urgency, leaves, segment, from, end, parts: Vec::new(), failed: None, pending: 0 }
    }

    /// Whether a leaf that lies behind it is close enough to be read with it.
    fn reaches(&self, pointer: &LeafPointer) -> bool {
        let (from, end) = (pointer.offset_bytes, pointer.offset_bytes + pointer.len_bytes);
        self.segment == pointer.segment
            && from.saturating_sub(self.end) <= GAP_BYTES_MAX
            && end.saturating_sub(self.from) <= SPAN_BYTES_MAX
    }

    fn add(&mut self, no: LeafNo, pointer: &LeafPointer) {
        self.leaves.push(no);
        self.end = self.end.max(pointer.offset_bytes + pointer.len_bytes);
    }
}

/// `bytes` begin where the leaf does.
fn decode_leaf(pointer: &LeafPointer, bytes: &[u8]) -> Result<Leaf, FetchError> {
    let bytes = &bytes[..pointer.len_bytes as usize];
    let leaf = if pointer.matches(bytes) { Leaf::decode(bytes) } else { None };
    leaf.ok_or(FetchError::Lost)
}

/// The payload blocks that hold some bytes, cut into runs that each lie in one shard: (first block, blocks).
pub(super) fn block_runs(geometry: &Geometry, offset_bytes: u32, len_bytes: u32) -> Vec<(u32, u32)> {
    let first = offset_bytes / BLOCK_BYTES as u32;
    let end = (offset_bytes + len_bytes).div_ceil(BLOCK_BYTES as u32);
    let mut runs = Vec::new();
    let mut block = first;
    while block < end {
        let run = geometry.run_from(block).min(end - block);
        runs.push((block, run));
        block += run;
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::LEAF_BLOCKS;
    use crate::map::tests::TestMap;
    use crate::segment::tests::{info, no};
    use crate::segment::{Kind, SegmentInfo};
    use holdfast_base::{Buf, Key, Lba, ObjectId, crc32c};

    /// Three leaves, side by side in one segment but for the last; none is in memory.
    struct Rig {
        kept: TestMap,
        loader: LeafLoader,
        payload: Vec<u8>,
        leaves: Vec<LeafNo>,
    }

    const FAR: usize = 100 << 10;

    impl Rig {
        fn new() -> Rig {
            let mut kept = TestMap::new();
            let mut payload = vec![0; 256 << 10];
            let mut leaves = Vec::new();
            for (place, at) in [(0, 0), (1, 200), (2, FAR)] {
                kept.write(0, place * LEAF_BLOCKS, 4, place + 1);
                let no_ = LeafNo::of(Key::new(ObjectId(0), Lba(place * LEAF_BLOCKS)));
                let bytes = kept.map.new_leaf(no_, None, None, &kept.map.foldable(no_), false).encode();
                payload[at..at + bytes.len()].copy_from_slice(&bytes);
                let (offset_bytes, len_bytes) = (at as u32, bytes.len() as u32);
                let pointer = LeafPointer { segment: no(9, 1), offset_bytes, len_bytes, crc: crc32c(&bytes) };
                kept.map.directory.insert(no_, pointer);
                leaves.push(no_);
            }
            kept.segments.insert(no(9, 1), SegmentInfo { kind: Kind::Meta, ..info(64, 0, &[]) });
            Rig { kept, loader: LeafLoader::default(), payload, leaves }
        }

        fn load(&mut self, leaves: &[LeafNo], waiter: LeafWaiter) -> Vec<Wanted> {
            let wanted = self.loader.load(&self.kept.map, &self.kept.segments, leaves, waiter, Urgency::Care);
            self.loader.verify();
            wanted
        }

        fn answer(&mut self, wanted: &Wanted, error: Option<FetchError>) -> Brought {
            let Recipient::Leaves { span, part } = wanted.by else { panic!("{wanted:?}") };
            let (first, blocks) = wanted.run;
            let from = first as usize * BLOCK_BYTES;
            let bytes = &self.payload[from..from + blocks as usize * BLOCK_BYTES];
            let result = error.map_or(Ok(Buf::copy_from(bytes)), Err);
            self.loader.on_part(&self.kept.map, &self.kept.segments, span, part, result)
        }

        /// Who is told of what.
        fn take_in(&mut self, brought: Brought) -> Vec<(LeafNo, bool, Vec<LeafWaiter>)> {
            let told = |(no, leaf)| {
                let load = self.loader.end(no)?;
                let (leaf, waiters) = self.kept.with(|map, accounts| map.take_in(no, load, leaf, accounts));
                Some((no, leaf.is_ok(), waiters))
            };
            let told = brought.leaves.into_iter().filter_map(told).collect();
            self.loader.verify();
            told
        }
    }

    #[test]
    fn leaves_that_lie_side_by_side_are_read_at_once_and_each_once() {
        let mut rig = Rig::new();
        let leaves = rig.leaves.clone();
        let wanted = rig.load(&leaves, LeafWaiter::Cleaner);
        assert_eq!(wanted.len(), 2, "the third lies too far behind");
        assert!(rig.load(&leaves[..1], LeafWaiter::Fold).is_empty() && rig.loader.is_loading(leaves[0]));
        let brought = rig.answer(&wanted[0], None);
        let told = rig.take_in(brought);
        let (fold, cleaner) = (LeafWaiter::Fold, LeafWaiter::Cleaner);
        assert_eq!(told, [(leaves[0], true, vec![cleaner, fold]), (leaves[1], true, vec![cleaner])]);
        assert!(rig.kept.map.peek(leaves[0]).is_some() && rig.kept.map.peek(leaves[2]).is_none());
        assert!(!rig.loader.is_loading(leaves[0]) && rig.loader.is_loading(leaves[2]));
    }

    #[test]
    fn of_what_is_lost_together_each_leaf_is_read_by_itself() {
        let mut rig = Rig::new();
        let leaves = rig.leaves[..2].to_vec();
        let wanted = rig.load(&leaves, LeafWaiter::Cleaner);
        let Brought { leaves: none, wanted: apart } = rig.answer(&wanted[0], Some(FetchError::Lost));
        assert!(none.is_empty() && apart.len() == 2);
        rig.loader.verify();
        let brought = rig.answer(&apart[0], Some(FetchError::Lost));
        assert_eq!(rig.take_in(brought), [(leaves[0], false, vec![LeafWaiter::Cleaner])]);
        let brought = rig.answer(&apart[1], None);
        assert_eq!(rig.take_in(brought), [(leaves[1], true, vec![LeafWaiter::Cleaner])]);
    }

    #[test]
    fn a_leaf_that_was_written_anew_meanwhile_is_gone_and_one_that_is_damaged_is_lost() {
        let mut rig = Rig::new();
        let leaves = rig.leaves.clone();
        let wanted = rig.load(&leaves, LeafWaiter::Audit);
        rig.payload[210] ^= 1;
        let moved = LeafPointer { segment: no(9, 2), offset_bytes: 0, len_bytes: 9, crc: 1 };
        rig.kept.map.directory.insert(leaves[0], moved);
        let brought = rig.answer(&wanted[0], None);
        let read: Vec<_> = brought.leaves.iter().map(|(no, leaf)| (*no, leaf.is_ok())).collect();
        assert_eq!(read, [(leaves[0], true), (leaves[1], false)]);
        let load = rig.loader.end(leaves[0]).expect("it is awaited");
        let (_, leaf) = brought.leaves.into_iter().next().expect("just seen");
        let (leaf, _) = rig.kept.with(|map, accounts| map.take_in(leaves[0], load, leaf, accounts));
        assert!(matches!(leaf, Err(FetchError::Gone)));
        assert!(rig.kept.map.peek(leaves[0]).is_none(), "it is not kept");
    }
}
