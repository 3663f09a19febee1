//! Which blocks were seen where: a table of prints, of those that the memory is enough for.
//!
//! All prints are kept at first. When the table is full only half of them are: those of which one more bit is zero; and so
//! on. Runs are found by what is left of them. Nothing relies on it: what it forgets is not shared.

use holdfast_base::VolumeId;
use holdfast_format::record::SegmentNo;
use holdfast_format::talk::Print;
use std::collections::{BTreeMap, BTreeSet};

/// A segment that prints were seen in.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Seen {
    pub(crate) volume: VolumeId,
    pub(crate) segment: SegmentNo,
}

/// What a look-up finds.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// Segments of the store that have some of it.
    pub(crate) stored: BTreeSet<SegmentNo>,
    /// Of the prints that were looked up, those that others have, too, or that came before.
    pub(crate) alike: Vec<u32>,
}

/// Prints that are kept.
const ENTRIES_MAX: usize = 2 << 20;

#[derive(Debug, Clone, Copy)]
struct Place {
    source: u32,
    is_stored: bool,
}

pub(crate) struct PrintIndex {
    entries_max: usize,
    /// A fingerprint is kept where so many of its lowest bits are zero.
    zero_bits: u32,
    places: BTreeMap<u64, Place>,
    sources: Vec<Seen>,
    numbers: BTreeMap<Seen, u32>,
}

impl std::fmt::Debug for PrintIndex {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} prints of {} segments, one in {}", self.places.len(), self.sources.len(), self.rate())
    }
}

impl Default for PrintIndex {
    fn default() -> PrintIndex {
        PrintIndex::of(ENTRIES_MAX)
    }
}

impl PrintIndex {
    fn of(entries_max: usize) -> PrintIndex {
        PrintIndex { entries_max, zero_bits: 0, places: BTreeMap::new(), sources: Vec::new(), numbers: BTreeMap::new() }
    }

    /// One of so many prints is kept.
    pub(crate) fn rate(&self) -> u32 {
        1 << self.zero_bits
    }

    /// What is kept of a fingerprint, if it is kept.
    fn key_of(&self, fingerprint: Print) -> Option<u64> {
        let key = fingerprint.0 as u64;
        (key.trailing_zeros() >= self.zero_bits).then_some(key)
    }

    fn number_of(&mut self, seen: Seen) -> u32 {
        *self.numbers.entry(seen).or_insert_with(|| {
            self.sources.push(seen);
            self.sources.len() as u32 - 1
        })
    }

    /// Who else has these, and which of them came before; from here on they were seen there.
    pub(crate) fn look_up(&mut self, seen: Seen, prints: &[Print]) -> Found {
        let (source, mut found) = (self.number_of(seen), Found::default());
        let mut own = BTreeSet::new();
        for (at, fingerprint) in (0..).zip(prints) {
            let Some(key) = self.key_of(*fingerprint) else { continue };
            match self.places.get(&key) {
                Some(place) if place.is_stored => {
                    found.stored.insert(self.sources[place.source as usize].segment);
                }
                Some(place) if place.source != source || own.contains(&key) => found.alike.push(at),
                _ => {
                    self.places.insert(key, Place { source, is_stored: false });
                }
            }
            own.insert(key);
        }
        self.make_room();
        found
    }

    /// The store has these, in that segment. Who was seen to have them.
    pub(crate) fn store(&mut self, stored: Seen, prints: &[Print]) -> BTreeSet<Seen> {
        let (source, mut holders) = (self.number_of(stored), BTreeSet::new());
        for fingerprint in prints {
            let Some(key) = self.key_of(*fingerprint) else { continue };
            let former = self.places.insert(key, Place { source, is_stored: true });
            if let Some(former) = former.filter(|former| !former.is_stored) {
                holders.insert(self.sources[former.source as usize]);
            }
        }
        self.make_room();
        holders
    }

    pub(crate) fn is_stored(&self, fingerprint: Print) -> bool {
        self.key_of(fingerprint).and_then(|key| self.places.get(&key)).is_some_and(|place| place.is_stored)
    }

    /// Nobody has anything of it there any more.
    pub(crate) fn forget(&mut self, seen: Seen) {
        if let Some(number) = self.numbers.remove(&seen) {
            self.places.retain(|_, place| place.source != number);
        }
    }

    fn make_room(&mut self) {
        while self.places.len() > self.entries_max {
            self.zero_bits += 1;
            let zero_bits = self.zero_bits;
            self.places.retain(|key, _| key.trailing_zeros() >= zero_bits);
        }
    }

    pub(crate) fn verify(&self) {
        assert!(self.places.len() <= self.entries_max, "the table is as large as it may be");
        assert!(self.numbers.len() <= self.sources.len(), "each segment has a number");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_base::{Epoch, Prng};

    fn seen(volume: u128, counter: u64) -> Seen {
        Seen { volume: VolumeId(volume), segment: SegmentNo { epoch: Epoch(1), counter } }
    }

    fn prints(seed: u64, count: usize) -> Vec<Print> {
        let mut prng = Prng::new(seed);
        (0..count).map(|_| Print(prng.next_u128())).collect()
    }

    #[test]
    fn what_others_have_or_what_came_before_is_alike_and_a_second_report_is_not() {
        let mut index = PrintIndex::of(1000);
        let mut content = prints(1, 20);
        assert!(index.look_up(seen(1, 0), &content).alike.is_empty());
        assert!(index.look_up(seen(1, 0), &content).alike.is_empty(), "it is the same segment");
        assert_eq!(index.look_up(seen(2, 0), &content[5..]).alike, (0..15).collect::<Vec<_>>());
        content.extend(prints(2, 3));
        content.extend_from_within(20..23);
        assert_eq!(index.look_up(seen(1, 0), &content).alike, [23, 24, 25], "twice in one segment");
        index.verify();
    }

    #[test]
    fn what_is_stored_is_found_there_and_who_had_it_is_told() {
        let mut index = PrintIndex::of(1000);
        let content = prints(1, 20);
        index.look_up(seen(1, 0), &content[..10]);
        index.look_up(seen(2, 5), &content[10..]);
        let holders = index.store(seen(9, 3), &content[5..15]);
        assert_eq!(holders, BTreeSet::from([seen(1, 0), seen(2, 5)]));
        let found = index.look_up(seen(3, 0), &content);
        assert_eq!(found.stored, BTreeSet::from([seen(9, 3).segment]));
        assert_eq!(found.alike.len(), 10, "the rest is others'");
        assert!(index.is_stored(content[7]) && !index.is_stored(content[2]));
        index.forget(seen(9, 3));
        assert!(!index.is_stored(content[7]) && index.look_up(seen(3, 1), &content).stored.is_empty());
        index.verify();
    }

    #[test]
    fn a_full_table_forgets_half_of_what_it_has_and_finds_the_rest() {
        let mut index = PrintIndex::of(1000);
        let content = prints(1, 3000);
        index.look_up(seen(1, 0), &content);
        index.verify();
        assert_eq!(index.rate(), 4);
        let alike = index.look_up(seen(2, 0), &content).alike.len();
        assert!((600..900).contains(&alike), "{alike} of 3,000 are found");
    }
}
