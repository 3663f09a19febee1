//! Loading the leaves that are not in memory, and runs of a checkpoint.

use super::leaf::{Leaf, LeafNo, LeafPointer};
use super::loading::RunLoad;
use crate::controller::{Controller, Out};
use crate::segment::fetch::{FetchError, Recipient, Wanted};
use holdfast_base::{BLOCK_BYTES, Buf, Token, buf};
use holdfast_format::record::{MetaPointer, SegmentNo};
use std::collections::BTreeMap;
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LeafWaiter {
    Read(Token),
    /// Nobody: it is looked for when it is needed.
    ReadAhead,
    Cleaner,
    Fold,
    Audit,
}

#[derive(Debug)]
pub(crate) struct LeafLoad {
    pointer: LeafPointer,
    waiters: Vec<LeafWaiter>,
}

/// One read of leaves that lie side by side in a segment.
#[derive(Debug)]
pub(crate) struct Span {
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

impl Controller {
    /// Loads a leaf for `waiter`, who is told when it is there.
    pub(crate) fn load_leaf(&mut self, no: LeafNo, waiter: LeafWaiter, out: Out) {
        self.load_leaves(&[no], waiter, out);
    }

    /// Loads leaves for `waiter`, who is told of each when it is there. What lies side by side is read at once.
    pub(crate) fn load_leaves(&mut self, leaves: &[LeafNo], waiter: LeafWaiter, out: Out) {
        let mut fresh: Vec<(LeafPointer, LeafNo)> = Vec::with_capacity(leaves.len());
        for &no in leaves {
            if let Some(load) = self.leaf_loads.get_mut(&no) {
                if !load.waiters.contains(&waiter) {
                    load.waiters.push(waiter);
                }
                continue;
            }
            let pointer = self.map.directory.get(no).expect("only leaves in the directory are loaded");
            self.leaf_loads.insert(no, LeafLoad { pointer, waiters: vec![waiter] });
            fresh.push((pointer, no));
        }
        fresh.sort_unstable_by_key(|(pointer, _)| (pointer.segment, pointer.offset_bytes));
        let mut spans: Vec<Span> = Vec::new();
        for (pointer, no) in fresh {
            let (from, end) = (pointer.offset_bytes, pointer.offset_bytes + pointer.len_bytes);
            match spans.last_mut() {
                Some(span)
                    if span.segment == pointer.segment
                        && from.saturating_sub(span.end) <= GAP_BYTES_MAX
                        && end.saturating_sub(span.from) <= SPAN_BYTES_MAX =>
                {
                    span.leaves.push(no);
                    span.end = span.end.max(end);
                }
                _ => spans.push(Span::new(no, pointer)),
            }
        }
        for span in spans {
            self.start_span(span, out);
        }
    }

    fn start_span(&mut self, mut span: Span, out: Out) {
        let segment = span.segment;
        let Some(info) = self.segments.get(segment) else {
            panic!("leaf {:?} lies in an unknown segment", span.leaves[0])
        };
        let runs = block_runs(&info.geometry, span.from, span.end - span.from);
        (span.parts, span.pending) = (vec![None; runs.len()], runs.len() as u32);
        let name = self.leaf_spans.keys().next_back().map_or(0, |last| last + 1);
        self.leaf_spans.insert(name, span);
        for (part, run) in runs.into_iter().enumerate() {
            let (by, (block, blocks)) = (Recipient::Leaves { span: name, part: part as u32 }, run);
            self.fetch(Wanted { by, segment, shape: None, block, blocks, crcs: None }, out);
        }
    }

    pub(crate) fn on_leaves_part(&mut self, name: u64, part: u32, result: Result<Buf, FetchError>, out: Out) {
        let Some(span) = self.leaf_spans.get_mut(&name) else { return };
        span.pending -= 1;
        match result {
            Ok(bytes) => span.parts[part as usize] = Some(bytes),
            Err(error) => span.failed = Some(error),
        }
        if span.pending > 0 {
            return;
        }
        let span = self.leaf_spans.remove(&name).expect("just seen");
        if span.failed == Some(FetchError::Lost) && span.leaves.len() > 1 {
            return self.load_apart(&span, out);
        }
        let parts: Vec<Buf> = span.parts.iter().flatten().cloned().collect();
        let bytes = buf::concat(&parts);
        let from = span.from - span.from % BLOCK_BYTES as u32;
        for no in span.leaves {
            let Some(load) = self.leaf_loads.remove(&no) else { continue };
            let leaf = match span.failed {
                Some(error) => Err(error),
                None => decode_leaf(&load.pointer, &bytes[(load.pointer.offset_bytes - from) as usize..]),
            };
            self.on_leaf(no, load, leaf, out);
        }
    }

    /// A block of a span is lost: only the leaves that lie in it are, too.
    fn load_apart(&mut self, span: &Span, out: Out) {
        for no in &span.leaves {
            let Some(pointer) = self.leaf_loads.get(no).map(|load| load.pointer) else { continue };
            if self.map.directory.get(*no) == Some(pointer) {
                self.start_span(Span::new(*no, pointer), out);
            } else if let Some(load) = self.leaf_loads.remove(no) {
                self.on_leaf(*no, load, Err(FetchError::Gone), out);
            }
        }
    }

    fn on_leaf(&mut self, no: LeafNo, load: LeafLoad, leaf: Result<Leaf, FetchError>, out: Out) {
        let current = self.map.directory.get(no) == Some(load.pointer);
        let (leaf, error) = match leaf {
            _ if !current => (None, Some(FetchError::Gone)),
            Ok(leaf) => (Some(Arc::new(leaf)), None),
            Err(error) => (None, Some(error)),
        };
        if let Some(leaf) = &leaf {
            match load.waiters[..] {
                [LeafWaiter::Audit] => {}
                [LeafWaiter::Fold] => self.map.leaves.insert_beside(no, Arc::clone(leaf)),
                _ => self.map.leaves.insert(no, Arc::clone(leaf)),
            }
            let (map, mut accounts) = self.map_and_accounts();
            map.look_at_shadowed(no, leaf, &mut accounts);
        }
        for waiter in load.waiters {
            let leaf = leaf.clone();
            match waiter {
                LeafWaiter::Read(op) => self.on_read_leaf(op, no, leaf, error, out),
                LeafWaiter::ReadAhead => {}
                LeafWaiter::Cleaner => self.on_cleaner_leaf(no, leaf, error, out),
                LeafWaiter::Fold => self.on_fold_leaf(no, leaf, out),
                LeafWaiter::Audit => self.on_audit_leaf(no, leaf, error),
            }
        }
    }
}

impl Controller {
    /// Of these runs the map has the first `loaded` ones. [`Controller::on_runs`] when all are there.
    pub(crate) fn fetch_runs(&mut self, pointers: Vec<MetaPointer>, loaded: usize, out: Out) {
        let mut fetches = Vec::new();
        let mut runs = Vec::new();
        for (at, pointer) in pointers.into_iter().enumerate() {
            let blocks = match at < loaded {
                true => Vec::new(),
                false => block_runs(&pointer.geometry, pointer.block * BLOCK_BYTES as u32, pointer.len_bytes),
            };
            runs.push(RunLoad { parts: vec![None; blocks.len()], pending: blocks.len(), pointer: pointer.clone() });
            for (part, run) in blocks.into_iter().enumerate() {
                fetches.push((at, part as u32, pointer.segment, (pointer.geometry, pointer.homes.clone()), run));
            }
        }
        self.opening.as_mut().expect("opening").runs = runs;
        if fetches.is_empty() {
            return self.on_runs(out);
        }
        for (at, part, segment, shape, (block, blocks)) in fetches {
            let (by, shape) = (Recipient::Run { at, part }, Some(Box::new(shape)));
            self.fetch(Wanted { by, segment, shape, block, blocks, crcs: None }, out);
        }
    }

    pub(crate) fn on_run_part(&mut self, at: usize, part: u32, result: Result<Buf, FetchError>, out: Out) {
        let Some(opening) = &mut self.opening else { return };
        // Another part could not be read, and nothing waits for this one any more.
        let Some(run) = opening.runs.get_mut(at) else { return };
        let Ok(bytes) = result else {
            if self.is_warming() {
                return self.on_preloaded(None, out);
            }
            return self.opening_waits(
                "the volume's checkpoint can't be read: more of its copies are bad than tolerated",
                out,
            );
        };
        run.parts[part as usize] = Some(bytes);
        run.pending -= 1;
        if opening.runs.iter().all(|r| r.pending == 0) {
            self.on_runs(out);
        }
    }
}

impl Span {
    fn new(no: LeafNo, pointer: LeafPointer) -> Span {
        let (from, end) = (pointer.offset_bytes, pointer.offset_bytes + pointer.len_bytes);
        Span { leaves: vec![no], segment: pointer.segment, from, end, parts: Vec::new(), failed: None, pending: 0 }
    }
}

/// `bytes` begin where the leaf does.
fn decode_leaf(pointer: &LeafPointer, bytes: &[u8]) -> Result<Leaf, FetchError> {
    let bytes = &bytes[..pointer.len_bytes as usize];
    let leaf = if pointer.matches(bytes) { Leaf::decode(bytes) } else { None };
    leaf.ok_or(FetchError::Lost)
}

/// The payload blocks that hold some bytes, cut into runs that each lie in one shard: (first block, blocks).
pub(crate) fn block_runs(
    geometry: &holdfast_format::geometry::Geometry,
    offset_bytes: u32,
    len_bytes: u32,
) -> Vec<(u32, u32)> {
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
