//! Layers: the states of a volume, each of which says only what was written while it was the live one.
//!
//! ```text
//!   layer 0 ◀── layer 1 ◀── layer 2      a block is looked for in a layer, then in its parent, and so on
//!   "monday"    "tuesday"    live         writes go to the live layer
//! ```
//! A block's key carries the layer that it was written to, in the place of the object number. A snapshot is a record in the
//! log: it freezes the live layer, and what is appended behind it is written to a new one. So it costs the same at any size,
//! and holds what was completed before it, in order (crash-consistent). Bulk writes that were under way are part of it, and
//! it is told as taken only when they are: until then nobody can have seen it without them.
//!
//! A snapshot that is dropped keeps its layer while more than one other layer stands on it. With one, what that one does
//! not say itself is merged into it, leaf by leaf, with folds (see `checkpoint`). What the cleaner finds under a key of a
//! layer that is gone is named by the layer that it was merged into.
//!
//! Invariants: (1) the parents of a layer lead to layer after layer without a circle; (2) only the live layer is written to,
//! but for what was on its way when it was frozen; (3) every place of the map is named by exactly one layer.

use crate::api::Notice;
use crate::controller::{Controller, Out};
use crate::leafload::Pins;
use crate::log::Done;
use crate::map::{LEAF_BLOCKS, LeafNo, Place};
use crate::rangemap::Piece;
use holdfast_base::{Buf, Key, Lba, Lsn, OBJECT_BLOCKS_MAX, ObjectId};
use holdfast_format::record::Record;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Snapshots of one volume at a time.
const SNAPSHOTS_MAX: usize = 1024;

/// The highest number of a layer: its keys end below the last one there is.
const LAYERS_MAX: u32 = (1 << 24) - 2;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    pub name: String,
    /// By the clock of the host that took it, since 1970.
    pub created_ms: u64,
    /// The volume's size then.
    pub size_bytes: u64,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Layer {
    parent: Option<ObjectId>,
    snapshot: Option<Snapshot>,
}

/// The layers as of the applied LSN; part of every checkpoint.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct LayerTable {
    layers: BTreeMap<ObjectId, Layer>,
    live: ObjectId,
    /// Layers that are gone, and the ones that say now what they said.
    merged: BTreeMap<ObjectId, ObjectId>,
}

impl Default for LayerTable {
    fn default() -> LayerTable {
        let live = ObjectId(0);
        LayerTable { layers: BTreeMap::from([(live, Layer::default())]), live, merged: BTreeMap::new() }
    }
}

/// Keys of a layer.
fn keys_of(layer: ObjectId) -> Range<u64> {
    let first = Key::new(layer, Lba(0)).0;
    first..first + OBJECT_BLOCKS_MAX
}

/// Leaves of a layer.
pub(crate) fn leaves_of(layer: ObjectId) -> Range<LeafNo> {
    let keys = keys_of(layer);
    LeafNo(keys.start / LEAF_BLOCKS)..LeafNo(keys.end / LEAF_BLOCKS)
}

/// The leaf of another layer for the same blocks.
pub(crate) fn leaf_in(no: LeafNo, layer: ObjectId) -> LeafNo {
    let lba = Key(no.first_key()).lba();
    LeafNo::of(Key::new(layer, lba))
}

impl LayerTable {
    pub(crate) fn len(&self) -> usize {
        self.layers.len() + self.merged.len()
    }

    pub(crate) fn live(&self) -> ObjectId {
        self.live
    }

    pub(crate) fn parent(&self, layer: ObjectId) -> Option<ObjectId> {
        self.layers.get(&layer)?.parent
    }

    pub(crate) fn snapshot(&self, layer: ObjectId) -> Option<&Snapshot> {
        self.layers.get(&layer)?.snapshot.as_ref()
    }

    pub(crate) fn snapshots(&self) -> impl Iterator<Item = (ObjectId, &Snapshot)> {
        self.layers.iter().filter_map(|(id, layer)| Some((*id, layer.snapshot.as_ref()?)))
    }

    fn named(&self, name: &str) -> Option<ObjectId> {
        self.snapshots().find(|(_, s)| s.name == name).map(|(id, _)| id)
    }

    fn children(&self, of: ObjectId) -> impl Iterator<Item = ObjectId> {
        self.layers.iter().filter(move |(_, l)| l.parent == Some(of)).map(|(id, _)| *id)
    }

    /// The layer that says now what this one said.
    pub(crate) fn now_of(&self, layer: ObjectId) -> ObjectId {
        let mut layer = layer;
        while let Some(into) = self.merged.get(&layer) {
            layer = *into;
        }
        layer
    }

    /// A layer that nobody needs as it is, and the only one that stands on it.
    pub(crate) fn to_merge(&self) -> Option<(ObjectId, ObjectId)> {
        self.layers.iter().filter(|(id, l)| l.snapshot.is_none() && **id != self.live).find_map(|(id, _)| {
            let mut children = self.children(*id);
            let child = children.next()?;
            children.next().is_none().then_some((*id, child))
        })
    }

    /// Everything that `gone` said, `into` says now.
    pub(crate) fn on_merged(&mut self, gone: ObjectId, into: ObjectId) {
        let layer = self.layers.remove(&gone).expect("it was in the table");
        self.layers.get_mut(&into).expect("it stood on the other").parent = layer.parent;
        self.merged.insert(gone, into);
    }
}

/// A snapshot that was asked for and is not told of yet.
#[derive(Debug)]
struct Taking {
    name: String,
    layer: ObjectId,
    lsn: Lsn,
}

#[derive(Debug, Default)]
pub(crate) struct Snapshots {
    /// The layer that what is appended now belongs to, once it differs from the applied live one.
    writing: Option<ObjectId>,
    taking: Vec<Taking>,
    dropping: Vec<(String, Lsn)>,
}

impl Snapshots {
    /// Not told of yet, or about to go: nobody is to read it.
    pub(crate) fn is_in_between(&self, layer: ObjectId, name: &str) -> bool {
        self.taking.iter().any(|t| t.layer == layer) || self.dropping.iter().any(|(n, _)| n == name)
    }
}

impl Controller {
    /// The layer that writes appended from now on belong to.
    pub(crate) fn writing_layer(&self) -> ObjectId {
        self.snapshots.writing.unwrap_or(self.layers.live())
    }

    pub(crate) fn write_key(&self, block: u64) -> Key {
        Key::new(self.writing_layer(), Lba(block))
    }

    pub(crate) fn on_snapshot(&mut self, name: String, created_ms: u64, out: Out) {
        let is_taken = self.layers.named(&name).is_some() || self.snapshots.taking.iter().any(|t| t.name == name);
        let count = self.layers.snapshots().count() + self.snapshots.taking.len();
        if is_taken || count >= SNAPSHOTS_MAX {
            let why = if is_taken { "the volume has a snapshot of that name" } else { "the volume has 1024 snapshots" };
            return self.notice(Notice::SnapshotRefused { name, why }, out);
        }
        let Some(live) = self.next_layer() else {
            let why = "the volume has had all the snapshots that it can have; copy it to a new one";
            return self.notice(Notice::SnapshotRefused { name, why }, out);
        };
        // What bulk writes have been collected so far lies in front of the snapshot.
        self.flush_bypass(out);
        let frozen = self.writing_layer();
        let snapshot = Snapshot { name: name.clone(), created_ms, size_bytes: self.root().size_bytes };
        let record = Record::Snapshot {
            frozen,
            live,
            name: snapshot.name,
            created_ms: snapshot.created_ms,
            size_bytes: snapshot.size_bytes,
        };
        if !self.config.mutations.snapshot_stays_live {
            self.snapshots.writing = Some(live);
        }
        let lsn = self.append(record, Buf::empty(), Arc::from([]), Done::Nothing, out);
        self.snapshots.taking.push(Taking { name, layer: frozen, lsn });
    }

    /// A layer that never was; every number is used once.
    fn next_layer(&self) -> Option<ObjectId> {
        let table = &self.layers;
        let known = table.layers.keys().next_back().max(table.merged.keys().next_back()).copied();
        let newest = known.max(Some(self.writing_layer()))?;
        (newest.0 < LAYERS_MAX).then(|| ObjectId(newest.0 + 1))
    }

    pub(crate) fn on_drop_snapshot(&mut self, name: String, out: Out) {
        if self.snapshots.taking.iter().any(|t| t.name == name) {
            return self.notice(Notice::SnapshotRefused { name, why: "the snapshot is being taken" }, out);
        }
        let is_dropping = self.snapshots.dropping.iter().any(|(n, _)| *n == name);
        let Some(layer) = self.layers.named(&name).filter(|_| !is_dropping) else {
            return self.notice(Notice::SnapshotRefused { name, why: "the volume has no snapshot of that name" }, out);
        };
        let record = Record::DropSnapshot { layer };
        let lsn = self.append(record, Buf::empty(), Arc::from([]), Done::Nothing, out);
        self.snapshots.dropping.push((name, lsn));
    }

    /// Tells of snapshots that are complete: their record is applied, and every bulk write of their layer and those below it.
    pub(crate) fn tell_of_snapshots(&mut self, out: Out) {
        if self.snapshots.taking.is_empty() && self.snapshots.dropping.is_empty() {
            return;
        }
        let completed = self.log.completed;
        let bypass = &self.bypass;
        let (done, taking) = std::mem::take(&mut self.snapshots.taking)
            .into_iter()
            .partition(|t: &Taking| t.lsn <= completed && !bypass.is_writing_below(t.layer));
        self.snapshots.taking = taking;
        let (gone, dropping) =
            std::mem::take(&mut self.snapshots.dropping).into_iter().partition(|(_, lsn)| *lsn <= completed);
        self.snapshots.dropping = dropping;
        for taken in done {
            self.notice(Notice::SnapshotTaken { name: taken.name, layer: taken.layer }, out);
        }
        let gone: Vec<(String, Lsn)> = gone;
        for (name, _) in gone {
            self.notice(Notice::SnapshotDropped { name }, out);
        }
    }

    pub(crate) fn apply_snapshot(&mut self, frozen: ObjectId, live: ObjectId, snapshot: Snapshot) {
        let table = &mut self.layers;
        table.layers.entry(frozen).or_default().snapshot = Some(snapshot);
        table.layers.insert(live, Layer { parent: Some(frozen), snapshot: None });
        if self.config.mutations.snapshot_stays_live {
            return;
        }
        table.live = live;
        if self.snapshots.writing == Some(live) {
            self.snapshots.writing = None;
        }
    }

    pub(crate) fn apply_drop(&mut self, layer: ObjectId) {
        if let Some(layer) = self.layers.layers.get_mut(&layer) {
            layer.snapshot = None;
        }
        self.checkpointer.fold_wanted = true;
    }

    /// Places of blocks as a layer sees them: its own, else its parent's. Pieces start at block numbers.
    pub(crate) fn resolve_through(
        &mut self,
        layer: ObjectId,
        first: u64,
        blocks: u64,
        pins: &Pins,
    ) -> Result<Vec<Piece<Place>>, Vec<LeafNo>> {
        let key = Key::new(layer, Lba(first)).0;
        let parent = self.layers.parent(layer);
        if parent.is_none() && key == first {
            // A volume without snapshots.
            return self.resolve(key, blocks, pins);
        }
        let mut places = Vec::new();
        let mut missing = Vec::new();
        match self.resolve(key, blocks, pins) {
            Ok(own) => {
                for piece in own {
                    let start = piece.start - key + first;
                    match (piece.value, parent) {
                        (None, Some(parent)) => match self.resolve_through(parent, start, piece.len, pins) {
                            Ok(theirs) => places.extend(theirs),
                            Err(leaves) => missing.extend(leaves),
                        },
                        (value, _) => places.push(Piece { start, len: piece.len, value }),
                    }
                }
            }
            Err(leaves) => missing = leaves,
        }
        missing.sort_unstable();
        missing.dedup();
        if missing.is_empty() { Ok(places) } else { Err(missing) }
    }

    /// What the map names now of blocks that were once written under these keys: the layer may have been merged, or be
    /// about to be, into the one that stands on it.
    pub(crate) fn resolve_written(
        &mut self,
        start: u64,
        blocks: u64,
        pins: &Pins,
    ) -> Result<Vec<Piece<Place>>, Vec<LeafNo>> {
        let layer = Key(start).object();
        let now = self.layers.now_of(layer);
        let start = Key::new(now, Key(start).lba()).0;
        let Some((_, into)) = self.layers.to_merge().filter(|(gone, _)| *gone == now) else {
            return self.resolve(start, blocks, pins);
        };
        let mut places = Vec::new();
        for piece in self.resolve(start, blocks, pins)? {
            match piece.value {
                Some(_) => places.push(piece),
                None => places.extend(self.resolve(Key::new(into, Key(piece.start).lba()).0, piece.len, pins)?),
            }
        }
        Ok(places)
    }

    /// One past the last block that the live layer or one below it says anything of.
    pub(crate) fn mapped_end(&self) -> u64 {
        let mut layer = Some(self.layers.live());
        let mut end = 0;
        while let Some(id) = layer {
            let keys = keys_of(id);
            let last_leaf = self
                .directory
                .range(leaves_of(id))
                .next_back()
                .map_or(0, |(no, _)| no.first_key() + LEAF_BLOCKS - keys.start);
            let last_run = self.overlay.end_before(keys.end).saturating_sub(keys.start);
            end = end.max(last_leaf).max(last_run);
            layer = self.layers.parent(id);
        }
        end
    }

    /// Whether a layer says anything, in the map or in what is not folded.
    pub(crate) fn layer_is_empty(&self, layer: ObjectId) -> bool {
        let keys = keys_of(layer);
        let in_overlay = self.overlay.iter_from(keys.start).next().is_some_and(|(start, _, _)| start < keys.end);
        !in_overlay && self.directory.range(leaves_of(layer)).next().is_none()
    }
}
