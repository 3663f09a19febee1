//! What was read once, lately: a bounded memory of lines whose blocks are worth a copy when they are read again.
//!
//! A table of small groups of places: a line's hash says which group it is remembered in, and pushes the oldest of that group
//! out. So it forgets by itself, when about as many other lines were read as there are places. What two lines are mistaken for
//! each other by, a hash, costs at worst a copy that nobody needed.

/// Places of a group: hot lines that share one don't push each other out.
const GROUP: usize = 4;

/// Memory of one place.
pub(super) const PLACE_BYTES: u64 = 8;

#[derive(Clone, Copy, Default)]
struct Place {
    /// Of the line that was here last; with `seen` zero of none.
    fingerprint: u32,
    /// Its blocks that were read, a bit each.
    seen: u8,
}

#[derive(Default)]
pub(super) struct Ghost {
    /// The youngest of each first.
    groups: Vec<[Place; GROUP]>,
}

impl Ghost {
    /// With so many places, rounded up to a power of two.
    pub fn new(places: usize) -> Ghost {
        let groups = places.div_ceil(GROUP).next_power_of_two();
        Ghost { groups: vec![[Place::default(); GROUP]; groups] }
    }

    /// Blocks of a line are read: which of them were before?
    pub fn see(&mut self, hash: u64, blocks: u8) -> u8 {
        let at = hash as usize & (self.groups.len() - 1);
        let group = &mut self.groups[at];
        let fingerprint = (hash >> 32) as u32;
        let known = group.iter_mut().find(|place| place.fingerprint == fingerprint && place.seen != 0);
        if let Some(place) = known {
            let before = place.seen & blocks;
            place.seen |= blocks;
            return before;
        }
        group.rotate_right(1);
        group[0] = Place { fingerprint, seen: blocks };
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_base::Prng;

    #[test]
    fn what_was_read_is_remembered_by_block_and_forgotten_by_and_by() {
        let mut ghost = Ghost::new(1000);
        let mut prng = Prng::new(1);
        let hot: Vec<u64> = (0..100).map(|_| prng.next_u64()).collect();
        for hash in &hot {
            assert_eq!(ghost.see(*hash, 0b0110), 0);
            assert_eq!(ghost.see(*hash, 0b1100), 0b0100);
        }
        let remembered = hot.iter().filter(|hash| ghost.see(**hash, 0b1110) == 0b1110).count();
        assert_eq!(remembered, 100);
        (0..10_000).for_each(|_| assert_eq!(ghost.see(prng.next_u64(), 1), 0));
        assert_eq!(hot.iter().filter(|hash| ghost.see(**hash, 0b1110) > 0).count(), 0);
    }
}
