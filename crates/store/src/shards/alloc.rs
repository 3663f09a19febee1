//! Free space of the data area: extents of blocks, best fit.
//!
//! Invariants: free extents are disjoint and never touch (neighbours are merged); both indexes hold the same extents.

use std::collections::{BTreeMap, BTreeSet};

/// A run of blocks of the data area.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Extent {
    pub first: u64,
    pub count: u64,
}

impl Extent {
    pub fn end(&self) -> u64 {
        self.first + self.count
    }
}

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

    /// The smallest free extent that is large enough; of equal ones the first.
    pub fn allocate(&mut self, count: u64) -> Option<Extent> {
        assert!(count > 0, "a shard has blocks");
        let &(len, first) = self.by_len.range((count, 0)..).next()?;
        self.remove(Extent { first, count: len });
        if len > count {
            self.add(Extent { first: first + count, count: len - count });
        }
        Some(Extent { first, count })
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

    const BLOCKS: u64 = 200;

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
            (1u64..40).prop_map(Op::Allocate),
            any::<usize>().prop_map(Op::Free),
            (0..BLOCKS, 0u64..30).prop_map(|(first, count)| Op::Reserve(first, count)),
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
                        let best = free_runs(&bitmap).into_iter().filter(|r| r.1 >= count).min_by_key(|r| (r.1, r.0));
                        let got = allocator.allocate(count);
                        prop_assert_eq!(got.map(|e| e.first), best.map(|r| r.0));
                        if let Some(extent) = got {
                            mark(&mut bitmap, extent, true);
                            held.push(extent);
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
