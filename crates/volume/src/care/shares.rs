//! Shares: of the blocks that layers say, which are seen by whom, and which by one alone.
//!
//! Counted place by place of the volume, 512 blocks at a time, as sets of blocks: once down from the layers that
//! somebody reads to those that they stand on, which tells how many see what a layer says, and once up again, which
//! tells what each reader sees.

use crate::map::{LEAF_BLOCKS, LayerTable, Piece, Place};
use holdfast_base::{BLOCK_BYTES, ObjectId};
use std::collections::BTreeMap;
use std::ops::{BitAnd, BitOr, BitOrAssign, Not};

/// What a snapshot, a clone or the volume itself shows, in bytes of data. (ZFS calls the second `unique`.)
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shares {
    /// All of it.
    pub referenced_bytes: u64,
    /// What nobody else shows.
    pub exclusive_bytes: u64,
}

/// A set of the blocks of one leaf.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Blocks([u64; (LEAF_BLOCKS / 64) as usize]);

impl Blocks {
    const ALL: Blocks = Blocks([u64::MAX; (LEAF_BLOCKS / 64) as usize]);

    fn insert(&mut self, start: u64, len: u64) {
        for block in start..start + len {
            self.0[(block / 64) as usize] |= 1 << (block % 64);
        }
    }

    fn bytes(&self) -> u64 {
        self.0.iter().map(|word| u64::from(word.count_ones())).sum::<u64>() * BLOCK_BYTES as u64
    }

    fn zip(self, other: Blocks, of: impl Fn(u64, u64) -> u64) -> Blocks {
        Blocks(std::array::from_fn(|i| of(self.0[i], other.0[i])))
    }
}

impl BitAnd for Blocks {
    type Output = Blocks;

    fn bitand(self, other: Blocks) -> Blocks {
        self.zip(other, |a, b| a & b)
    }
}

impl BitOr for Blocks {
    type Output = Blocks;

    fn bitor(self, other: Blocks) -> Blocks {
        self.zip(other, |a, b| a | b)
    }
}

impl BitOrAssign for Blocks {
    fn bitor_assign(&mut self, other: Blocks) {
        *self = *self | other;
    }
}

impl Not for Blocks {
    type Output = Blocks;

    fn not(self) -> Blocks {
        self.zip(self, |a, _| !a)
    }
}

/// What a layer says of the blocks of one leaf.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Said {
    data: Blocks,
    /// Those, and zeroes.
    anything: Blocks,
}

impl Said {
    /// Over what was said before; starts count from the leaf's first block.
    pub(crate) fn say(&mut self, piece: &Piece<Place>) {
        let mut blocks = Blocks::default();
        blocks.insert(piece.start, piece.len);
        match &piece.value {
            None => {}
            Some(Place::Zero) => {
                self.data = self.data & !blocks;
                self.anything |= blocks;
            }
            Some(_) => {
                self.data |= blocks;
                self.anything |= blocks;
            }
        }
    }
}

#[derive(Debug)]
struct Layer {
    id: ObjectId,
    /// Index among the layers; smaller than this one's.
    parent: Option<usize>,
    is_read: bool,
    is_live: bool,
    shares: Shares,
}

/// How many readers see what a layer says.
#[derive(Clone, Copy, Default)]
struct Seen {
    by_one: Blocks,
    by_two: Blocks,
    by_heads: Blocks,
}

/// Sums over the places that were counted, for the layers as they were when it was made.
#[derive(Debug)]
pub(crate) struct Tally {
    layers: Vec<Layer>,
    /// What no head sees: only snapshots need it, or nobody any more.
    unseen_by_heads_bytes: u64,
}

impl Tally {
    pub(crate) fn new(table: &LayerTable) -> Tally {
        let mut layers: Vec<Layer> = Vec::new();
        for (id, parent) in table.iter() {
            let parent = parent.and_then(|parent| layers.binary_search_by_key(&parent, |layer| layer.id).ok());
            let is_live = table.is_live(id);
            let is_read = is_live || table.snapshot(id).is_some();
            layers.push(Layer { id, parent, is_read, is_live, shares: Shares::default() });
        }
        Tally { layers, unseen_by_heads_bytes: 0 }
    }

    pub(crate) fn layer_count(&self) -> usize {
        self.layers.len()
    }

    /// Of one place of the volume: what those layers say that say anything of it.
    pub(crate) fn add(&mut self, said: &BTreeMap<ObjectId, Said>) {
        let said: Vec<Said> = self.layers.iter().map(|l| said.get(&l.id).copied().unwrap_or_default()).collect();
        let seen = self.look_down(&said);
        // Of each layer: the data that it shows, and what of that one reader alone sees.
        let mut shown = vec![(Blocks::default(), Blocks::default()); said.len()];
        for at in 0..said.len() {
            let Said { data, anything } = said[at];
            let (below, below_alone) = self.layers[at].parent.map(|parent| shown[parent]).unwrap_or_default();
            let all = data | below & !anything;
            let alone = data & !seen[at].by_two | below_alone & !anything;
            shown[at] = (all, alone);
            let layer = &mut self.layers[at];
            if layer.is_read {
                layer.shares.referenced_bytes += all.bytes();
                layer.shares.exclusive_bytes += alone.bytes();
            }
        }
    }

    fn look_down(&mut self, said: &[Said]) -> Vec<Seen> {
        let mut seen = vec![Seen::default(); said.len()];
        for at in (0..said.len()).rev() {
            let layer = &self.layers[at];
            if layer.is_read {
                let by_others = seen[at].by_one;
                seen[at].by_two |= by_others;
                seen[at].by_one = Blocks::ALL;
            }
            if layer.is_live {
                seen[at].by_heads = Blocks::ALL;
            }
            let Said { data, anything } = said[at];
            self.unseen_by_heads_bytes += (data & !seen[at].by_heads).bytes();
            if let Some(parent) = layer.parent {
                let by_one = seen[at].by_one & !anything;
                let below = seen[parent];
                seen[parent] = Seen {
                    by_one: below.by_one | by_one,
                    by_two: below.by_two | seen[at].by_two & !anything | below.by_one & by_one,
                    by_heads: below.by_heads | seen[at].by_heads & !anything,
                };
            }
        }
        seen
    }

    /// What each layer that is read shows, and what no head sees of all data, in bytes.
    pub(crate) fn outcome(&self) -> (BTreeMap<ObjectId, Shares>, u64) {
        let read = self.layers.iter().filter(|layer| layer.is_read);
        (read.map(|layer| (layer.id, layer.shares)).collect(), self.unseen_by_heads_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::{CloneInfo, Snapshot};
    use holdfast_base::{HeadId, VolumeId};
    use proptest::prelude::*;

    /// Heads and snapshots as the steps make them, the newest state of everything last.
    fn table(steps: &[(u8, u8)]) -> LayerTable {
        let mut table = LayerTable::default();
        let mut heads = vec![HeadId::VOLUME];
        for (n, (kind, of)) in steps.iter().enumerate() {
            let head = heads[usize::from(*of) % heads.len()];
            let live = table.layer_after(ObjectId(0)).expect("few layers");
            let snapshots: Vec<ObjectId> = table.snapshots().map(|(id, _)| id).collect();
            let chosen = (!snapshots.is_empty()).then(|| snapshots[usize::from(*of) % snapshots.len()]);
            match (kind % 4, chosen) {
                (0 | 1, _) | (_, None) => {
                    let snapshot = Snapshot { name: n.to_string(), head, created_ms: 0, size_bytes: 0 };
                    table.freeze(table.live(head).expect("a head"), live, snapshot, true);
                }
                (2, Some(of)) => {
                    let clone = CloneInfo { id: VolumeId(n as u128), name: n.to_string(), size_bytes: 0 };
                    let head = table.head_after(HeadId::VOLUME);
                    table.add_clone(head, of, live, clone);
                    heads.push(head);
                }
                (_, Some(of)) => table.unname(of),
            }
        }
        table
    }

    proptest! {
        #[test]
        fn shares_are_what_counting_block_by_block_gives(
            steps in proptest::collection::vec((any::<u8>(), any::<u8>()), 0..12),
            says in proptest::collection::vec((any::<u8>(), 0u64..60, 1u64..200, any::<bool>()), 0..30),
        ) {
            let table = table(&steps);
            let layers: Vec<ObjectId> = table.iter().map(|(id, _)| id).collect();
            let mut said: BTreeMap<ObjectId, Said> = BTreeMap::new();
            let mut naive: BTreeMap<(ObjectId, u64), bool> = BTreeMap::new();
            for (of, start, len, is_data) in says {
                let layer = layers[usize::from(of) % layers.len()];
                let crcs = crate::map::Crcs::new(vec![0; len as usize]);
                let data = Place::plain(Default::default(), 0, crcs);
                let value = Some(if is_data { data } else { Place::Zero });
                said.entry(layer).or_default().say(&Piece { start, len, value });
                naive.extend((start..start + len).map(|block| ((layer, block), is_data)));
            }
            let mut tally = Tally::new(&table);
            tally.add(&said);
            let (shares, unseen) = tally.outcome();

            // Which layer each reader sees a block of, if it is data.
            let origin = |reader: ObjectId, block: u64| {
                let chain = std::iter::successors(Some(reader), |layer| table.parent(*layer));
                let first = chain.into_iter().find(|layer| naive.contains_key(&(*layer, block)));
                first.filter(|layer| naive[&(*layer, block)])
            };
            let readers: Vec<ObjectId> =
                layers.iter().copied().filter(|l| table.is_live(*l) || table.snapshot(*l).is_some()).collect();
            prop_assert_eq!(shares.keys().copied().collect::<Vec<_>>(), readers.clone());
            let mut expected: BTreeMap<ObjectId, Shares> = readers.iter().map(|r| (*r, Shares::default())).collect();
            let mut unseen_expected = 0;
            for block in 0..LEAF_BLOCKS {
                let origins: Vec<(ObjectId, Option<ObjectId>)> = readers.iter().map(|r| (*r, origin(*r, block))).collect();
                for (reader, from) in origins.iter().filter(|(_, from)| from.is_some()) {
                    let shares = expected.get_mut(reader).expect("a reader");
                    shares.referenced_bytes += BLOCK_BYTES as u64;
                    let others = origins.iter().filter(|(other, at)| other != reader && at == from).count();
                    shares.exclusive_bytes += if others == 0 { BLOCK_BYTES as u64 } else { 0 };
                }
                for layer in layers.iter().filter(|layer| naive.get(&(**layer, block)) == Some(&true)) {
                    let sees = |(reader, from): &(ObjectId, Option<ObjectId>)| table.is_live(*reader) && *from == Some(*layer);
                    unseen_expected += if origins.iter().any(sees) { 0 } else { BLOCK_BYTES as u64 };
                }
            }
            prop_assert_eq!(shares, expected);
            prop_assert_eq!(unseen, unseen_expected);
        }
    }
}
