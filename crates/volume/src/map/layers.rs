//! Layers: the states of a volume, each of which says only what was written while it was a live one.
//!
//! ```text
//!   layer 0 ◀── layer 1 ◀── layer 2      a block is looked for in a layer, then in its parent, and so on
//!   "monday"    "tuesday"    live         a head writes to its live layer
//!                  ▲
//!                  └─────── layer 3      a clone of "tuesday": another head
//!                            live
//! ```
//! A block's key carries the layer that it was written to, in the place of the object number. So every place is named
//! once, whoever sees it. What is done to layers is in `snapshots`, how blocks are looked for through them in
//! `resolve`.
//!
//! A layer that nobody needs as it is goes: with one layer that stands on it, what that one does not say itself is
//! merged into it, leaf by leaf; with none, all that it says is dropped. Both are done by folds (see `checkpoint`).
//! What the cleaner finds under a key of a layer that is gone is named by the layer that it was merged into.
//!
//! Invariants: (1) the parents of a layer have smaller numbers; (2) only live layers are written to, but for what was
//! on its way when they were frozen; (3) every place of the map is named by exactly one layer.

use super::leaf::{LEAF_BLOCKS, LeafNo};
use holdfast_base::{HeadId, Key, Lba, OBJECT_BLOCKS_MAX, ObjectId, VolumeId};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

/// The highest number of a layer: its keys end below the last one there is.
const FILTERS_MAX: u32 = (1 << 24) - 2;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Unique among those of its head.
    pub name: String,
    /// What it was taken of.
    pub head: HeadId,
    /// By the clock of the host that took it, since 1970.
    pub created_ms: u64,
    /// The head's size then.
    pub size_bytes: u64,
}

/// What a head is but the volume itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CloneInfo {
    /// Under which the operator's records know it.
    pub id: VolumeId,
    pub name: String,
    pub size_bytes: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Head {
    live: ObjectId,
    clone: Option<CloneInfo>,
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
    heads: BTreeMap<HeadId, Head>,
    /// Layers that are gone, and the ones that say now what they said.
    merged: BTreeMap<ObjectId, ObjectId>,
    /// No layer and no head ever had a higher number.
    newest_layer: ObjectId,
    newest_head: HeadId,
    /// A layer, its parent, and so on.
    #[serde(skip)]
    chains: BTreeMap<ObjectId, Arc<[ObjectId]>>,
    #[serde(skip)]
    live: BTreeSet<ObjectId>,
    /// Layers that nobody needs as they are, with less than two others on them.
    #[serde(skip)]
    going: BTreeMap<ObjectId, Fate>,
    #[serde(skip)]
    changes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Merged { into: ObjectId },
    Dropped,
}

impl Default for LayerTable {
    fn default() -> LayerTable {
        let live = ObjectId(0);
        LayerTable {
            layers: BTreeMap::from([(live, Layer::default())]),
            heads: BTreeMap::from([(HeadId::VOLUME, Head { live, clone: None })]),
            merged: BTreeMap::new(),
            newest_layer: live,
            newest_head: HeadId::VOLUME,
            chains: BTreeMap::new(),
            live: BTreeSet::from([live]),
            going: BTreeMap::new(),
            changes: 0,
        }
    }
}

/// Keys of a layer.
pub(crate) fn keys_of(layer: ObjectId) -> Range<u64> {
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
    /// The same with other numbers, which stay in order, before [`LayerTable::refresh`]; `None` where a layer has none.
    pub(crate) fn renumbered(self, number: impl Fn(ObjectId) -> Option<ObjectId>) -> Option<LayerTable> {
        let mut layers = BTreeMap::new();
        for (id, mut layer) in self.layers {
            if let Some(parent) = &mut layer.parent {
                *parent = number(*parent)?;
            }
            layers.insert(number(id)?, layer);
        }
        let mut heads = self.heads;
        for head in heads.values_mut() {
            head.live = number(head.live)?;
        }
        let mut merged = BTreeMap::new();
        for (gone, into) in self.merged {
            merged.insert(number(gone)?, number(into)?);
        }
        let (newest_layer, newest_head) = (number(self.newest_layer)?, self.newest_head);
        Some(LayerTable { layers, heads, merged, newest_layer, newest_head, ..LayerTable::default() })
    }

    /// With their parents, which come first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (ObjectId, Option<ObjectId>)> {
        self.layers.iter().map(|(id, layer)| (*id, layer.parent))
    }

    /// Another number after every change.
    pub(crate) fn changes(&self) -> u64 {
        self.changes
    }

    /// The layer that a head writes to; `None` where the head is not there.
    pub(crate) fn live(&self, head: HeadId) -> Option<ObjectId> {
        Some(self.heads.get(&head)?.live)
    }

    pub(crate) fn clone_of(&self, head: HeadId) -> Option<&CloneInfo> {
        self.heads.get(&head)?.clone.as_ref()
    }

    pub(crate) fn clones(&self) -> impl Iterator<Item = (HeadId, &CloneInfo)> {
        self.heads.iter().filter_map(|(id, head)| Some((*id, head.clone.as_ref()?)))
    }

    /// Whether a head writes to it.
    pub(crate) fn is_live(&self, layer: ObjectId) -> bool {
        self.live.contains(&layer)
    }

    pub(crate) fn has(&self, layer: ObjectId) -> bool {
        self.layers.contains_key(&layer)
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

    pub(crate) fn named(&self, head: HeadId, name: &str) -> Option<ObjectId> {
        self.snapshots().find(|(_, s)| s.head == head && s.name == name).map(|(id, _)| id)
    }

    /// A number for a layer that is higher than every number that was given out.
    pub(crate) fn layer_after(&self, newest_given: ObjectId) -> Option<ObjectId> {
        let newest = self.newest_layer.max(newest_given);
        (newest.0 < FILTERS_MAX).then(|| ObjectId(newest.0 + 1))
    }

    pub(crate) fn head_after(&self, newest_given: HeadId) -> HeadId {
        HeadId(self.newest_head.max(newest_given).0 + 1)
    }

    /// The layer, its parent, and so on.
    pub(crate) fn chain(&mut self, layer: ObjectId) -> Arc<[ObjectId]> {
        if let Some(chain) = self.chains.get(&layer) {
            return Arc::clone(chain);
        }
        let chain: Arc<[ObjectId]> = std::iter::successors(Some(layer), |l| self.parent(*l)).collect();
        self.chains.insert(layer, Arc::clone(&chain));
        chain
    }

    /// Whether the layer is `above` or one that it stands on.
    pub(crate) fn is_under(&self, layer: ObjectId, above: ObjectId) -> bool {
        std::iter::successors(Some(above), |l| self.parent(*l)).take_while(|l| *l >= layer).any(|l| l == layer)
    }

    /// The layer that says now what this one said.
    pub(crate) fn now_of(&self, layer: ObjectId) -> ObjectId {
        let mut layer = layer;
        while let Some(into) = self.merged.get(&layer) {
            layer = *into;
        }
        layer
    }

    pub(crate) fn going_count(&self) -> u64 {
        self.going.len() as u64
    }

    /// Whether any layer is to go.
    pub(crate) fn any_goes(&self) -> bool {
        !self.going.is_empty()
    }

    /// Where what is under a layer's keys may be told of besides: in the layer that this one is being merged into.
    pub(crate) fn heir(&self, layer: ObjectId) -> Option<ObjectId> {
        match self.going.get(&layer)? {
            Fate::Merged { into } => Some(*into),
            Fate::Dropped => None,
        }
    }

    /// Layers to be merged into the only ones that stand on them, where that one stays: (gone, into).
    pub(crate) fn to_merge(&self) -> impl Iterator<Item = (ObjectId, ObjectId)> {
        let merged = self.going.iter().filter_map(|(gone, fate)| match fate {
            Fate::Merged { into } => Some((*gone, *into)),
            Fate::Dropped => None,
        });
        merged.filter(|(_, into)| !self.going.contains_key(into))
    }

    /// Whether the layer is one that goes with all that it says.
    pub(crate) fn is_dropped(&self, layer: ObjectId) -> bool {
        self.going.get(&layer) == Some(&Fate::Dropped)
    }

    /// Layers that are to go with all that they say.
    pub(crate) fn to_drop(&self) -> impl Iterator<Item = ObjectId> {
        self.going.iter().filter(|(_, fate)| **fate == Fate::Dropped).map(|(gone, _)| *gone)
    }

    // ---- changes; each ends by [`LayerTable::refresh`] ----

    /// Finds anew what follows from the table.
    pub(crate) fn refresh(&mut self) {
        self.chains.clear();
        self.changes += 1;
        let mut children: BTreeMap<ObjectId, (ObjectId, u32)> = BTreeMap::new();
        for (id, layer) in &self.layers {
            if let Some(parent) = layer.parent {
                children.entry(parent).or_insert((*id, 0)).1 += 1;
            }
        }
        self.live = self.heads.values().map(|head| head.live).collect();
        let unneeded = self.layers.iter().filter(|(id, layer)| layer.snapshot.is_none() && !self.live.contains(id));
        self.going = unneeded
            .filter_map(|(id, _)| match children.get(id) {
                None => Some((*id, Fate::Dropped)),
                Some((child, 1)) => Some((*id, Fate::Merged { into: *child })),
                Some(_) => None,
            })
            .collect();
    }

    fn insert(&mut self, layer: ObjectId, parent: ObjectId) {
        self.layers.insert(layer, Layer { parent: Some(parent), snapshot: None });
        self.newest_layer = self.newest_layer.max(layer);
    }

    pub(crate) fn freeze(&mut self, frozen: ObjectId, live: ObjectId, snapshot: Snapshot, is_moved_on: bool) {
        let head = snapshot.head;
        self.layers.entry(frozen).or_default().snapshot = Some(snapshot);
        self.insert(live, frozen);
        if is_moved_on {
            self.set_live(head, live);
        }
        self.refresh();
    }

    fn set_live(&mut self, head: HeadId, live: ObjectId) {
        if let Some(head) = self.heads.get_mut(&head) {
            head.live = live;
        }
    }

    pub(crate) fn unname(&mut self, layer: ObjectId) {
        if let Some(layer) = self.layers.get_mut(&layer) {
            layer.snapshot = None;
        }
        self.refresh();
    }

    pub(crate) fn add_clone(&mut self, head: HeadId, of: ObjectId, live: ObjectId, clone: CloneInfo) {
        self.insert(live, of);
        self.newest_head = self.newest_head.max(head);
        self.heads.insert(head, Head { live, clone: Some(clone) });
        self.refresh();
    }

    pub(crate) fn drop_clone(&mut self, head: HeadId) {
        self.heads.remove(&head);
        for layer in self.layers.values_mut().filter(|l| l.snapshot.as_ref().is_some_and(|s| s.head == head)) {
            layer.snapshot = None;
        }
        self.refresh();
    }

    pub(crate) fn resize_clone(&mut self, head: HeadId, size_bytes: u64) {
        if let Some(clone) = self.heads.get_mut(&head).and_then(|h| h.clone.as_mut()) {
            clone.size_bytes = size_bytes;
        }
    }

    /// The table of a volume that begins as a snapshot: its own live layer over the snapshot's, and no other head.
    /// Snapshots that this one stands on stay, but for older ones of a name that a younger one has.
    pub(crate) fn for_dependent(&self, of: ObjectId) -> Option<LayerTable> {
        let live = self.layer_after(self.newest_layer)?;
        let mut table = self.clone();
        let mut names = BTreeSet::new();
        for (id, layer) in table.layers.iter_mut().rev() {
            let name = layer.snapshot.as_ref().map(|snapshot| snapshot.name.clone());
            let stays = self.is_under(*id, of) && name.is_some_and(|name| names.insert(name));
            layer.snapshot = layer.snapshot.take().filter(|_| stays);
            if let Some(snapshot) = &mut layer.snapshot {
                snapshot.head = HeadId::VOLUME;
            }
        }
        table.heads = BTreeMap::from([(HeadId::VOLUME, Head { live, clone: None })]);
        table.insert(live, of);
        table.refresh();
        Some(table)
    }

    pub(crate) fn roll_back(&mut self, head: HeadId, to: ObjectId, live: ObjectId) {
        self.insert(live, to);
        self.set_live(head, live);
        self.refresh();
    }

    /// Everything that `gone` said, `into` says now.
    pub(crate) fn on_merged(&mut self, gone: ObjectId, into: ObjectId) {
        let layer = self.layers.remove(&gone).expect("it was in the table");
        self.layers.get_mut(&into).expect("it stood on the other").parent = layer.parent;
        self.merged.insert(gone, into);
        self.refresh();
    }

    pub(crate) fn on_dropped(&mut self, gone: ObjectId) {
        self.layers.remove(&gone);
        self.refresh();
    }
}
