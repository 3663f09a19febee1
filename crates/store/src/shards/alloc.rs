//! Free space of the data area: extents of blocks, best fit; several for one shard where none is long enough.
//!
//! Invariants: free extents are disjoint and never touch (neighbours are merged); both indexes hold the same extents.

use holdfast_format::disk::{EXTENT_BLOCKS_MAX, Extent, Extents};
use std::collections::{BTreeMap, BTreeSet};

/// Most extents of a shard: so many that free space is of use however it is cut up.
pub(crate) const EXTENTS_MAX: usize = 250;

#[derive(Debug, Default)]
pub(crate) struct Allocator {
    /// Length by first block.
    by_start: BTreeMap<u64, u64>,
    /// (length, first block).
    by_len: BTreeSet<(u64, u64)>,
    free_blocks: u64,
}

impl Allocator {
    /// Everything free.
    pub fn new(block_count: u64) -> Allocator {
        let mut allocator = Allocator::default();
        if block_count > 0 {
            allocator.add(Extent { first: 0, count: block_count });
        }
        allocator
    }

    pub fn free_blocks(&self) -> u64 {
        self.free_blocks
    }

    fn add(&mut self, extent: Extent) {
        let fresh = self.by_start.insert(extent.first, extent.count).is_none();
        assert!(fresh && self.by_len.insert((extent.count, extent.first)), "{extent:?} is free once");
        self.free_blocks += extent.count;
    }

    fn remove(&mut self, extent: Extent) {
        let known = self.by_start.remove(&extent.first) == Some(extent.count);
        assert!(known && self.by_len.remove(&(extent.count, extent.first)), "{extent:?} is in both indexes");
        self.free_blocks -= extent.count;
    }

    /// Room for a shard: the smallest free extent that is long enough; where there is none, the longest ones until what is
    /// left fits one. `None` if that takes more than [`EXTENTS_MAX`].
    pub fn allocate(&mut self, count: u64) -> Option<Extents> {
        assert!((1..=EXTENT_BLOCKS_MAX).contains(&count), "a shard of {count} blocks");
        self.extents_for(count)?;
        let mut extents = Vec::with_capacity(1);
        let mut left = count;
        while left > 0 {
            let fitting = self.by_len.range((left, 0)..).next().or(self.by_len.last());
            let &(len, first) = fitting.expect("counted before");
            self.remove(Extent { first, count: len });
            let taken = len.min(left);
            if len > taken {
                self.add(Extent { first: first + taken, count: len - taken });
            }
            extents.push(Extent { first, count: taken });
            left -= taken;
        }
        Some(extents.into())
    }

    /// How many extents [`Allocator::allocate`] would find room in.
    pub fn extents_for(&self, count: u64) -> Option<usize> {
        let mut found = 0;
        let is_enough = |len: u64| {
            found += len;
            found >= count
        };
        let mut lengths = self.by_len.iter().rev().map(|(len, _)| *len).take(EXTENTS_MAX);
        lengths.position(is_enough).map(|at| at + 1)
    }

    /// Takes exactly this extent, as found in use at start; false where part of it is in use already.
    pub fn reserve(&mut self, extent: Extent) -> bool {
        let Some((&first, &count)) = self.by_start.range(..=extent.first).next_back() else { return false };
        let free = Extent { first, count };
        if extent.count == 0 || extent.end() > free.end() {
            return false;
        }
        self.remove(free);
        if free.first < extent.first {
            self.add(Extent { first: free.first, count: extent.first - free.first });
        }
        if extent.end() < free.end() {
            self.add(Extent { first: extent.end(), count: free.end() - extent.end() });
        }
        true
    }

    /// All of them, or none.
    pub fn reserve_all(&mut self, extents: &[Extent]) -> bool {
        let reserved = extents.iter().take_while(|extent| self.reserve(**extent)).count();
        if reserved < extents.len() {
            self.free_all(&extents[..reserved]);
        }
        reserved == extents.len()
    }

    pub fn free_all(&mut self, extents: &[Extent]) {
        extents.iter().for_each(|extent| self.free(*extent));
    }

    pub fn free(&mut self, extent: Extent) {
        let mut merged = extent;
        if let Some((&first, &count)) = self.by_start.range(..extent.end()).next_back() {
            assert!(first + count <= extent.first, "{extent:?} is freed once");
            if first + count == extent.first {
                self.remove(Extent { first, count });
                merged = Extent { first, count: count + merged.count };
            }
        }
        if let Some(&count) = self.by_start.get(&extent.end()) {
            self.remove(Extent { first: extent.end(), count });
            merged.count += count;
        }
        self.add(merged);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BLOCKS: u64 = 2000;

    fn free_runs(bitmap: &[bool]) -> Vec<(u64, u64)> {
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for (i, used) in bitmap.iter().enumerate() {
            match runs.last_mut() {
                _ if *used => {}
                Some((first, count)) if *first + *count == i as u64 => *count += 1,
                _ => runs.push((i as u64, 1)),
            }
        }
        runs
    }

    #[derive(Clone, Debug)]
    enum Op {
        Allocate(u64),
        Free(usize),
        Reserve(u64, u64),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            (1u64..4).prop_map(Op::Allocate),
            (1u64..40).prop_map(Op::Allocate),
            (200..1500u64).prop_map(Op::Allocate),
            any::<usize>().prop_map(Op::Free),
            (0..BLOCKS, 0u64..6).prop_map(|(first, count)| Op::Reserve(first, count)),
        ]
    }

    proptest! {
        #[test]
        fn extents_agree_with_a_bitmap(ops in proptest::collection::vec(op(), 1..200)) {
            let mut allocator = Allocator::new(BLOCKS);
            let mut bitmap = vec![false; BLOCKS as usize];
            let mut held: Vec<Extent> = Vec::new();
            let mark = |bitmap: &mut Vec<bool>, e: Extent, used: bool| {
                for block in e.first..e.end() {
                    assert_ne!(std::mem::replace(&mut bitmap[block as usize], used), used);
                }
            };
            for op in ops {
                match op {
                    Op::Allocate(count) => {
                        let mut runs = free_runs(&bitmap);
                        runs.sort_by_key(|r| (r.1, r.0));
                        let best = runs.iter().find(|r| r.1 >= count).map(|r| vec![(r.0, count)]);
                        let longest: u64 = runs.iter().rev().take(EXTENTS_MAX).map(|r| r.1).sum();
                        let expected = allocator.extents_for(count);
                        let got = allocator.allocate(count);
                        prop_assert_eq!(got.as_ref().map(|extents| extents.len()), expected);
                        prop_assert_eq!(got.is_some(), longest >= count);
                        let Some(extents) = got else { continue };
                        prop_assert_eq!(extents.block_count(), count);
                        prop_assert!(extents.len() <= EXTENTS_MAX);
                        if let Some(best) = best {
                            let got: Vec<(u64, u64)> = extents.iter().map(|e| (e.first, e.count)).collect();
                            prop_assert_eq!(got, best);
                        }
                        for extent in extents.iter() {
                            mark(&mut bitmap, *extent, true);
                            held.push(*extent);
                        }
                    }
                    Op::Free(at) if !held.is_empty() => {
                        let extent = held.swap_remove(at % held.len());
                        mark(&mut bitmap, extent, false);
                        allocator.free(extent);
                    }
                    Op::Free(_) => {}
                    Op::Reserve(first, count) => {
                        let extent = Extent { first, count };
                        let is_free = count > 0 && extent.end() <= BLOCKS
                            && (first..extent.end()).all(|b| !bitmap[b as usize]);
                        prop_assert_eq!(allocator.reserve(extent), is_free);
                        if is_free {
                            mark(&mut bitmap, extent, true);
                            held.push(extent);
                        }
                    }
                }
                let runs: Vec<(u64, u64)> = allocator.by_start.iter().map(|(f, c)| (*f, *c)).collect();
                prop_assert_eq!(runs, free_runs(&bitmap));
                prop_assert_eq!(allocator.by_len.len(), allocator.by_start.len());
                prop_assert_eq!(allocator.free_blocks(), bitmap.iter().filter(|u| !**u).count() as u64);
            }
        }
    }
}
