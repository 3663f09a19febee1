//! Loading the leaves that are not in memory.

use crate::call::Wants;
use crate::controller::{Controller, Out};
use crate::fetch::FetchError;
use crate::map::{Leaf, LeafNo, LeafPointer};
use holdfast_base::{BLOCK_BYTES, Buf, Token, buf};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Leaves that an operation holds on to, so that a small cache can't starve it. Valid until the next fold is installed.
#[derive(Debug, Default)]
pub(crate) struct Pins {
    pub(crate) generation: u64,
    pub(crate) leaves: BTreeMap<LeafNo, Arc<Leaf>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LeafWaiter {
    Read(Token),
    Cleaner,
    Fold,
    Mark,
}

#[derive(Debug)]
pub(crate) struct LeafLoad {
    pointer: LeafPointer,
    parts: Vec<Option<Buf>>,
    failed: Option<FetchError>,
    pending: u32,
    waiters: Vec<LeafWaiter>,
}

impl Controller {
    /// Loads a leaf for `waiter`, who is told when it is there.
    pub(crate) fn load_leaf(&mut self, no: LeafNo, waiter: LeafWaiter, out: Out) {
        if let Some(load) = self.leaf_loads.get_mut(&no) {
            if !load.waiters.contains(&waiter) {
                load.waiters.push(waiter);
            }
            return;
        }
        let pointer = self.directory.get(no).expect("only leaves in the directory are loaded");
        let Some(info) = self.segments.get(pointer.segment) else { panic!("leaf {no:?} lies in an unknown segment") };
        let runs = block_runs(&info.geometry, pointer.offset_bytes, pointer.len_bytes);
        let load = LeafLoad {
            pointer,
            parts: vec![None; runs.len()],
            failed: None,
            pending: runs.len() as u32,
            waiters: vec![waiter],
        };
        self.leaf_loads.insert(no, load);
        for (part, run) in runs.into_iter().enumerate() {
            let wants = Wants::Leaf { no, part: part as u32 };
            self.start_fetch(wants, pointer.segment, None, run, None, out);
        }
    }

    pub(crate) fn on_leaf_part(&mut self, no: LeafNo, part: u32, result: Result<Buf, FetchError>, out: Out) {
        let Some(load) = self.leaf_loads.get_mut(&no) else { return };
        load.pending -= 1;
        match result {
            Ok(bytes) => load.parts[part as usize] = Some(bytes),
            Err(error) => load.failed = Some(error),
        }
        if load.pending > 0 {
            return;
        }
        let load = self.leaf_loads.remove(&no).expect("just seen");
        let leaf = if load.failed.is_some() { None } else { decode_leaf(&load) };
        let current = self.directory.get(no) == Some(load.pointer);
        let error = match (&leaf, load.failed) {
            (Some(_), _) => None,
            (None, Some(error)) => Some(error),
            (None, None) => Some(FetchError::Lost),
        };
        let leaf = leaf.map(Arc::new);
        if let (Some(leaf), true) = (&leaf, current) {
            // A walk through all of them would push out those that are used.
            if load.waiters != [LeafWaiter::Mark] {
                self.leaves.insert(no, Arc::clone(leaf));
            }
            self.recount_hidden(no, leaf);
        }
        let error = if current { error } else { Some(FetchError::Gone) };
        for waiter in load.waiters {
            let leaf = if current { leaf.clone() } else { None };
            match waiter {
                LeafWaiter::Read(op) => self.on_read_leaf(op, no, leaf, error, out),
                LeafWaiter::Cleaner => self.on_cleaner_leaf(no, leaf, error, out),
                LeafWaiter::Fold => self.on_fold_leaf(no, leaf, error, out),
                LeafWaiter::Mark => self.on_mark_leaf(no, leaf, error),
            }
        }
    }
}

fn decode_leaf(load: &LeafLoad) -> Option<Leaf> {
    let parts: Vec<Buf> = load.parts.iter().map(|p| p.clone().expect("all parts arrived")).collect();
    let bytes = buf::concat(&parts);
    let from = load.pointer.offset_bytes as usize % BLOCK_BYTES;
    let bytes = &bytes[from..from + load.pointer.len_bytes as usize];
    if load.pointer.matches(bytes) { Leaf::decode(bytes) } else { None }
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
