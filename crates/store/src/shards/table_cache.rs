//! Checksum tables of shards that were read lately: by slot number, bounded in bytes, second chance.
//!
//! A read of a shard whose table is here costs one disk read and no other look-up than its slot's.

use holdfast_base::BlockCrc;
use std::sync::Arc;

/// Checksums of a shard's blocks. Reads in flight keep theirs, whatever the cache does.
pub(crate) type Table = Arc<[BlockCrc]>;

/// Memory of an entry beside its checksums.
const ENTRY_BYTES: usize = 64;

struct Entry {
    number: u32,
    table: Table,
    /// Used since the hand passed.
    recent: bool,
}

pub(crate) struct TableCache {
    /// Place in `entries` plus one, by slot number; zero for none.
    places: Vec<u32>,
    entries: Vec<Entry>,
    hand: usize,
    bytes: usize,
    bytes_max: usize,
}

fn cost(table: &Table) -> usize {
    table.len() * size_of::<BlockCrc>() + ENTRY_BYTES
}

impl TableCache {
    pub fn new(bytes_max: usize) -> TableCache {
        TableCache { places: Vec::new(), entries: Vec::new(), hand: 0, bytes: 0, bytes_max }
    }

    pub fn get(&mut self, number: u32) -> Option<Table> {
        let place = *self.places.get(number as usize)?;
        let entry = self.entries.get_mut((place as usize).checked_sub(1)?)?;
        assert_eq!(entry.number, number, "the places name their entries");
        entry.recent = true;
        Some(Arc::clone(&entry.table))
    }

    pub fn insert(&mut self, number: u32, table: Table) {
        self.remove(number);
        let cost = cost(&table);
        while self.bytes + cost > self.bytes_max && !self.entries.is_empty() {
            self.evict_one();
        }
        if cost > self.bytes_max {
            return;
        }
        if self.places.len() <= number as usize {
            self.places.resize(number as usize + 1, 0);
        }
        self.bytes += cost;
        self.entries.push(Entry { number, table, recent: false });
        self.places[number as usize] = self.entries.len() as u32;
    }

    pub fn remove(&mut self, number: u32) {
        let place = self.places.get(number as usize).copied().unwrap_or(0);
        if place > 0 {
            self.remove_at(place as usize - 1);
        }
    }

    fn remove_at(&mut self, at: usize) {
        let entry = self.entries.swap_remove(at);
        self.places[entry.number as usize] = 0;
        self.bytes -= cost(&entry.table);
        if let Some(moved) = self.entries.get(at) {
            self.places[moved.number as usize] = at as u32 + 1;
        }
    }

    fn evict_one(&mut self) {
        loop {
            if self.hand >= self.entries.len() {
                self.hand = 0;
            }
            let entry = &mut self.entries[self.hand];
            if !std::mem::take(&mut entry.recent) {
                return self.remove_at(self.hand);
            }
            self.hand += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(n: u32) -> Table {
        vec![n; 16].into()
    }

    #[test]
    fn what_is_used_stays_and_memory_is_bounded() {
        let mut cache = TableCache::new(4 * cost(&table(0)));
        for n in 0..100 {
            cache.insert(n, table(n));
            assert!(cache.bytes <= cache.bytes_max);
            if n > 0 {
                assert_eq!(cache.get(0).as_deref(), Some(&[0; 16][..]), "{n}");
            }
        }
        assert_eq!(cache.entries.len(), 4);
        cache.remove(0);
        assert!(cache.get(0).is_none() && cache.get(7777).is_none());
        cache.insert(3, vec![1; 100_000].into());
        assert!(cache.get(3).is_none());
    }

    #[test]
    fn a_table_replaces_the_one_of_its_slot() {
        let mut cache = TableCache::new(1 << 20);
        cache.insert(5, table(1));
        cache.insert(6, table(2));
        cache.insert(5, table(3));
        assert_eq!(cache.get(5).as_deref(), Some(&[3; 16][..]));
        assert_eq!(cache.get(6).as_deref(), Some(&[2; 16][..]));
        assert_eq!(cache.bytes, 2 * cost(&table(0)));
    }
}
