//! Metadata contexts: what a block status tells of an export.
//!
//! | context | flags of an extent |
//! | --- | --- |
//! | `base:allocation` | 0 mapped, 3 a hole that reads as zeroes |
//! | `holdfast:changed:SNAPSHOT` | 1 may differ from what the snapshot holds, 0 does not |
//!
//! The flag of the second is the one of `qemu:dirty-bitmap`, for clients that can be told which context to read. A client
//! that selected several gets a chunk for each, in the order of its queries.

use holdfast_base::{BlockOp, ByteRange, ObjectId};
use std::collections::BTreeSet;

const ALLOCATION: &str = "base:allocation";
const CHANGED: &str = "holdfast:changed:";

/// Queries of `LIST_META_CONTEXT` that name all contexts of a namespace.
const BASE_WILDCARD: &str = "base:";
const CHANGED_WILDCARDS: [&str; 2] = ["holdfast:", CHANGED];

/// What `base:allocation` says of a hole: not allocated, and reads as zeroes.
const STATE_HOLE_ZERO: u32 = 0b11;

/// What QEMU's dirty bitmaps say of what was written.
const STATE_DIRTY: u32 = 0b1;

/// Contexts that a client may select: each is a chunk of every reply. The protocol lets a server select fewer than asked for.
pub(super) const SELECTED_MAX: usize = 16;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Context {
    Allocation,
    ChangedSince(ObjectId),
}

impl Context {
    pub(super) fn op(self, range: ByteRange) -> BlockOp {
        match self {
            Context::Allocation => BlockOp::Status(range),
            Context::ChangedSince(since) => BlockOp::Changes { range, since },
        }
    }

    pub(super) fn state(self, set: bool) -> u32 {
        match self {
            Context::Allocation if !set => STATE_HOLE_ZERO,
            Context::ChangedSince(_) if set => STATE_DIRTY,
            Context::Allocation | Context::ChangedSince(_) => 0,
        }
    }
}

/// The context that a client selects by this name of an export that has these snapshots.
pub(super) fn named(query: &str, snapshots: &[(String, ObjectId)]) -> Option<Context> {
    if query == ALLOCATION {
        return Some(Context::Allocation);
    }
    let snapshot = query.strip_prefix(CHANGED)?;
    let found = snapshots.iter().find(|(name, _)| name == snapshot);
    found.map(|(_, since)| Context::ChangedSince(*since))
}

/// Names of the contexts that any of the queries names; of all where there are none.
pub(super) fn listed<'a>(queries: impl Iterator<Item = &'a str>, snapshots: &[(String, ObjectId)]) -> Vec<String> {
    let queries: BTreeSet<&str> = queries.collect();
    let mut names = Vec::new();
    let lists_any = |names: &[&str]| queries.is_empty() || names.iter().any(|name| queries.contains(name));
    if lists_any(&[ALLOCATION, BASE_WILDCARD]) {
        names.push(ALLOCATION.to_string());
    }
    let lists_all = lists_any(&CHANGED_WILDCARDS);
    let changed = snapshots.iter().map(|(snapshot, _)| format!("{CHANGED}{snapshot}"));
    names.extend(changed.filter(|name| lists_all || queries.contains(name.as_str())));
    names
}
