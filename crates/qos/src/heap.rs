//! An ordered set of tenants with a key each: a binary heap in which a tenant finds its own place. Nothing is allocated once it
//! has been as large as it gets.

use holdfast_base::Token;

/// Tenants by their token in the slab; of equal keys the one that came first is the first.
#[derive(Debug)]
pub(crate) struct Heap<K> {
    entries: Vec<(K, u64, Token)>,
    /// By slot of the slab, its place among the entries.
    places: Vec<u32>,
    came: u64,
}

const NOWHERE: u32 = u32::MAX;

fn slot(tenant: Token) -> usize {
    tenant.0 as u32 as usize
}

impl<K> Default for Heap<K> {
    fn default() -> Heap<K> {
        Heap { entries: Vec::new(), places: Vec::new(), came: 0 }
    }
}

impl<K: Copy + Ord> Heap<K> {
    pub fn first(&self) -> Option<(K, Token)> {
        self.entries.first().map(|(key, _, tenant)| (*key, *tenant))
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub fn key_of(&self, tenant: Token) -> Option<K> {
        self.place(tenant).map(|place| self.entries[place].0)
    }

    pub fn tenants(&self) -> impl Iterator<Item = Token> {
        self.entries.iter().map(|(_, _, tenant)| *tenant)
    }

    fn place(&self, tenant: Token) -> Option<usize> {
        self.places.get(slot(tenant)).filter(|place| **place != NOWHERE).map(|place| *place as usize)
    }

    /// Puts a tenant in, or gives it another key.
    pub fn put(&mut self, tenant: Token, key: K) {
        self.came += 1;
        let entry = (key, self.came, tenant);
        let place = if let Some(place) = self.place(tenant) {
            self.entries[place] = entry;
            place
        } else {
            if self.places.len() <= slot(tenant) {
                self.places.resize(slot(tenant) + 1, NOWHERE);
            }
            self.entries.push(entry);
            self.entries.len() - 1
        };
        self.places[slot(tenant)] = place as u32;
        self.settle(place);
    }

    pub fn remove(&mut self, tenant: Token) {
        let Some(place) = self.place(tenant) else { return };
        self.places[slot(tenant)] = NOWHERE;
        self.entries.swap_remove(place);
        if place < self.entries.len() {
            self.places[slot(self.entries[place].2)] = place as u32;
            self.settle(place);
        }
    }

    fn is_before(&self, a: usize, b: usize) -> bool {
        let ((a_key, a_came, _), (b_key, b_came, _)) = (&self.entries[a], &self.entries[b]);
        (a_key, a_came) < (b_key, b_came)
    }

    fn swap(&mut self, a: usize, b: usize) {
        self.entries.swap(a, b);
        self.places[slot(self.entries[a].2)] = a as u32;
        self.places[slot(self.entries[b].2)] = b as u32;
    }

    /// Moves the entry at a place to where it belongs.
    fn settle(&mut self, mut place: usize) {
        while place > 0 && self.is_before(place, (place - 1) / 2) {
            self.swap(place, (place - 1) / 2);
            place = (place - 1) / 2;
        }
        loop {
            let (left, right) = (2 * place + 1, 2 * place + 2);
            let mut least = place;
            if left < self.entries.len() && self.is_before(left, least) {
                least = left;
            }
            if right < self.entries.len() && self.is_before(right, least) {
                least = right;
            }
            if least == place {
                return;
            }
            self.swap(place, least);
            place = least;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_base::Prng;
    use std::collections::BTreeMap;

    #[test]
    fn the_first_is_always_the_least() {
        let (mut heap, mut naive, mut prng) = (Heap::default(), BTreeMap::new(), Prng::new(3));
        for came in 0..20_000_u64 {
            let tenant = Token(prng.below(40));
            if prng.chance(600) {
                let key = prng.below(30);
                heap.put(tenant, key);
                naive.insert(tenant, (key, came));
            } else {
                heap.remove(tenant);
                naive.remove(&tenant);
            }
            let least = naive.iter().map(|(tenant, (key, came))| (*key, *came, *tenant)).min();
            assert_eq!(heap.first(), least.map(|(key, _, tenant)| (key, tenant)));
            assert_eq!(heap.key_of(tenant), naive.get(&tenant).map(|(key, _)| *key));
            assert_eq!(heap.tenants().count(), naive.len());
        }
    }
}
