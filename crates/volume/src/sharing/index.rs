//! Which blocks were seen where: a table of prints, of those that the memory is enough for.
//!
//! All prints are kept at first. When the table is full only half of them are: those of which one more bit is zero; and so
//! on, a little with each report. Runs are found by what is left of them. Nothing relies on it: what it forgets is not
//! shared.
//!
//! Limits: two million prints, and an eighth more while half of them go; segments are remembered while prints of them are.

use holdfast_base::{Instant, VolumeId};
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
    /// Of the prints that were looked up, those that another segment has, too, or that came before in the segment.
    pub(crate) alike: Vec<u32>,
    /// Segments of the same volume that had some of it, where it is not known whether they do yet.
    pub(crate) unsure: Vec<SegmentNo>,
}

/// Prints that are kept.
const ENTRIES_MAX: usize = 2 << 20;

#[derive(Debug, Clone, Copy)]
struct Place {
    source: u32,
    is_stored: bool,
}

/// A segment, while prints of it are kept.
#[derive(Debug)]
struct Source {
    /// Nothing once nobody has anything of it there.
    seen: Option<Seen>,
    /// How many are kept.
    places: u32,
    /// Its volume has said that it lives, and until then that is believed.
    lives_until: Instant,
}

/// While prints come, so many of those that are kept are looked at for each: a table that is full has lost half of them
/// when an eighth has come.
const LOOKED_AT: usize = 8;

pub(crate) struct PrintIndex {
    entries_max: usize,
    /// A fingerprint is kept where so many of its lowest bits are zero.
    zero_bits: u32,
    /// Where the table is still to be gone through for those that are not kept any more.
    sweep: Option<u64>,
    places: BTreeMap<u64, Place>,
    sources: Vec<Source>,
    unused: Vec<u32>,
    numbers: BTreeMap<Seen, u32>,
}

impl std::fmt::Debug for PrintIndex {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} prints of {} segments, one in {}", self.places.len(), self.numbers.len(), self.rate())
    }
}

impl Default for PrintIndex {
    fn default() -> PrintIndex {
        PrintIndex::of(ENTRIES_MAX)
    }
}

impl PrintIndex {
    fn of(entries_max: usize) -> PrintIndex {
        PrintIndex {
            entries_max,
            zero_bits: 0,
            sweep: None,
            places: BTreeMap::new(),
            sources: Vec::new(),
            unused: Vec::new(),
            numbers: BTreeMap::new(),
        }
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

    /// Where it was seen, and whether the store has it.
    fn place_of(&self, key: u64) -> Option<(Seen, Place)> {
        let place = self.places.get(&key)?;
        Some((self.sources[place.source as usize].seen?, *place))
    }

    /// The number of a segment, which it has until [`PrintIndex::let_go`] is called as often, and nothing of it is kept.
    fn hold(&mut self, seen: Seen) -> u32 {
        let number = self.numbers.get(&seen).copied().unwrap_or_else(|| {
            let source = Source { seen: Some(seen), places: 0, lives_until: Instant::ZERO };
            let number = match self.unused.pop() {
                Some(number) => {
                    self.sources[number as usize] = source;
                    number
                }
                None => {
                    self.sources.push(source);
                    self.sources.len() as u32 - 1
                }
            };
            self.numbers.insert(seen, number);
            number
        });
        self.sources[number as usize].places += 1;
        number
    }

    fn let_go(&mut self, number: u32) {
        let source = &mut self.sources[number as usize];
        source.places -= 1;
        if source.places == 0 {
            if let Some(seen) = source.seen.take() {
                self.numbers.remove(&seen);
            }
            self.unused.push(number);
        }
    }

    fn put(&mut self, key: u64, place: Place) {
        self.sources[place.source as usize].places += 1;
        if let Some(former) = self.places.insert(key, place) {
            self.let_go(former.source);
        }
    }

    /// Which of these another segment has, or came before. What another segment of the same volume had may have been moved,
    /// since all that is packed anew, or cleaned, is reported again: it is alike where that segment is known to live. Of
    /// `least` prints and more it is to be asked for; of fewer it counts as moved.
    pub(crate) fn look_up(&mut self, now: Instant, seen: Seen, prints: &[Print], least: usize) -> Found {
        let (source, mut found) = (self.hold(seen), Found::default());
        let (mut own, mut unsure) = (BTreeSet::new(), BTreeMap::<Seen, Vec<u64>>::new());
        for (at, fingerprint) in (0..).zip(prints) {
            let Some(key) = self.key_of(*fingerprint) else { continue };
            let is_first = own.insert(key);
            match self.place_of(key) {
                Some((of, place)) if place.is_stored => found.stored.extend([of.segment]),
                _ if !is_first => found.alike.push(at),
                None => self.put(key, Place { source, is_stored: false }),
                Some((of, _)) if of == seen => {}
                Some((of, place)) => match self.lives(now, of, place, seen.volume) {
                    true => found.alike.push(at),
                    false => unsure.entry(of).or_default().push(key),
                },
            }
        }
        for (of, keys) in unsure {
            match keys.len() >= least {
                true => found.unsure.push(of.segment),
                false => keys.into_iter().for_each(|key| self.put(key, Place { source, is_stored: false })),
            }
        }
        self.let_go(source);
        self.make_room(prints.len());
        found
    }

    /// Whether what was seen there is another block than one of that volume.
    fn lives(&self, now: Instant, of: Seen, place: Place, volume: VolumeId) -> bool {
        of.volume != volume || now < self.sources[place.source as usize].lives_until
    }

    /// Something lives in that segment, says its volume; which is believed until then.
    pub(crate) fn believe(&mut self, seen: Seen, until: Instant) {
        if let Some(number) = self.numbers.get(&seen) {
            self.sources[*number as usize].lives_until = until;
        }
    }

    /// The store has these, in that segment. Who was seen to have them.
    pub(crate) fn store(&mut self, stored: Seen, prints: &[Print]) -> BTreeSet<Seen> {
        let (source, mut holders) = (self.hold(stored), BTreeSet::new());
        for fingerprint in prints {
            let Some(key) = self.key_of(*fingerprint) else { continue };
            holders.extend(self.place_of(key).filter(|(_, former)| !former.is_stored).map(|(seen, _)| seen));
            self.put(key, Place { source, is_stored: true });
        }
        self.let_go(source);
        self.make_room(prints.len());
        holders
    }

    pub(crate) fn is_stored(&self, fingerprint: Print) -> bool {
        self.key_of(fingerprint).and_then(|key| self.place_of(key)).is_some_and(|(_, place)| place.is_stored)
    }

    /// Nobody has anything of it there any more. What is kept of it goes when it is come upon.
    pub(crate) fn forget(&mut self, seen: Seen) {
        if let Some(number) = self.numbers.remove(&seen) {
            self.sources[number as usize].seen = None;
        }
    }

    /// So many have come.
    fn make_room(&mut self, come: usize) {
        let mut left = LOOKED_AT * come;
        while left > 0 {
            if self.sweep.is_none() {
                if self.places.len() <= self.entries_max {
                    return;
                }
                self.zero_bits += 1;
                self.sweep = Some(0);
            }
            let (from, zero_bits) = (self.sweep.take().unwrap_or(0), self.zero_bits);
            let ahead: Vec<u64> = self.places.range(from..).take(left).map(|(key, _)| *key).collect();
            self.sweep = ahead.last().filter(|_| ahead.len() == left).and_then(|last| last.checked_add(1));
            left -= ahead.len();
            for key in ahead {
                if (key.trailing_zeros() < zero_bits || self.place_of(key).is_none())
                    && let Some(place) = self.places.remove(&key)
                {
                    self.let_go(place.source);
                }
            }
        }
    }

    pub(crate) fn verify(&self) {
        let max = self.entries_max + self.entries_max / 4;
        assert!(self.places.len() <= max, "the table is as large as it may be: {self:?}");
        let kept: usize = self.sources.iter().map(|source| source.places as usize).sum();
        assert_eq!(kept, self.places.len(), "of each segment it is known how many prints are kept");
        let named = self.sources.iter().filter(|source| source.seen.is_some()).count();
        assert_eq!(named, self.numbers.len(), "each segment has a number while prints of it are kept");
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

    fn look_up(index: &mut PrintIndex, seen: Seen, prints: &[Print]) -> Found {
        index.look_up(Instant::ZERO, seen, prints, 8)
    }

    #[test]
    fn what_others_have_or_what_came_before_is_alike_and_a_second_report_is_not() {
        let mut index = PrintIndex::of(1000);
        let mut content = prints(1, 20);
        assert!(look_up(&mut index, seen(1, 0), &content).alike.is_empty());
        assert!(look_up(&mut index, seen(1, 0), &content).alike.is_empty(), "it is the same segment");
        assert_eq!(look_up(&mut index, seen(2, 0), &content[5..]).alike, (0..15).collect::<Vec<_>>());
        content.extend(prints(2, 3));
        content.extend_from_within(20..23);
        assert_eq!(look_up(&mut index, seen(1, 0), &content).alike, [23, 24, 25], "twice in one segment");
        let holders = index.store(seen(9, 3), &content[..20]);
        assert_eq!(holders, BTreeSet::from([seen(1, 0)]));
        index.verify();
    }

    #[test]
    fn what_a_volume_has_in_two_segments_is_alike_where_both_live_and_moved_where_not() {
        let mut index = PrintIndex::of(1000);
        let content = prints(1, 20);
        look_up(&mut index, seen(1, 0), &content);
        let found = look_up(&mut index, seen(1, 7), &content);
        assert!(found.alike.is_empty(), "it may have been moved");
        assert_eq!(found.unsure, [seen(1, 0).segment]);
        index.believe(seen(1, 0), Instant(5));
        let found = look_up(&mut index, seen(1, 7), &content);
        assert_eq!((found.alike.len(), found.unsure.len()), (20, 0));
        let late = index.look_up(Instant(5), seen(1, 7), &content, 8);
        assert_eq!((late.alike.len(), late.unsure.len()), (0, 1), "that was long ago");
        // Nothing lives in the first one any more.
        index.forget(seen(1, 0));
        let found = look_up(&mut index, seen(1, 7), &content);
        assert_eq!((found.alike.len(), found.unsure.len()), (0, 0));
        assert_eq!(index.store(seen(9, 3), &content), BTreeSet::from([seen(1, 7)]));
        index.verify();
    }

    #[test]
    fn of_little_that_a_volume_has_elsewhere_nobody_is_asked() {
        let mut index = PrintIndex::of(1000);
        let content = prints(1, 7);
        look_up(&mut index, seen(1, 0), &content);
        assert!(look_up(&mut index, seen(1, 7), &content).unsure.is_empty());
        assert_eq!(index.store(seen(9, 3), &content), BTreeSet::from([seen(1, 7)]));
        index.verify();
    }

    #[test]
    fn what_is_stored_is_found_there_and_who_had_it_is_told() {
        let mut index = PrintIndex::of(1000);
        let content = prints(1, 20);
        look_up(&mut index, seen(1, 0), &content[..10]);
        look_up(&mut index, seen(2, 5), &content[10..]);
        let holders = index.store(seen(9, 3), &content[5..15]);
        assert_eq!(holders, BTreeSet::from([seen(1, 0), seen(2, 5)]));
        let found = look_up(&mut index, seen(3, 0), &content);
        assert_eq!(found.stored, BTreeSet::from([seen(9, 3).segment]));
        assert_eq!(found.alike.len(), 10, "the rest is others'");
        assert!(index.is_stored(content[7]) && !index.is_stored(content[2]));
        index.forget(seen(9, 3));
        assert!(!index.is_stored(content[7]) && look_up(&mut index, seen(3, 1), &content).stored.is_empty());
        index.verify();
        for volume in 1..4 {
            (0..2).for_each(|segment| index.forget(seen(volume, segment)));
            index.forget(seen(volume, 5));
        }
        index.store(seen(9, 4), &content);
        index.verify();
        assert_eq!((index.numbers.len(), index.unused.len()), (1, index.sources.len() - 1), "they are used again");
    }

    #[test]
    fn a_table_that_was_full_loses_half_a_little_with_each_report() {
        let mut index = PrintIndex::of(4000);
        for segment in 0..200 {
            let content = prints(segment, 100);
            look_up(&mut index, seen(1, segment), &content);
            index.verify();
            assert!(index.numbers.len() <= 200);
        }
        assert!(index.rate() >= 4, "{index:?}");
        assert!(index.sweep.is_some() || index.places.len() <= 4000);
    }

    #[test]
    fn a_full_table_forgets_half_of_what_it_has_and_finds_the_rest() {
        let mut index = PrintIndex::of(1000);
        let content = prints(1, 3000);
        look_up(&mut index, seen(1, 0), &content);
        index.verify();
        assert_eq!(index.rate(), 4);
        let alike = look_up(&mut index, seen(2, 0), &content).alike.len();
        assert!((600..900).contains(&alike), "{alike} of 3,000 are found");
    }
}
