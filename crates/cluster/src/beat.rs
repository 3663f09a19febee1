//! Whether a store is the one that it was, by a record that only grows.
//!
//! ```text
//! beat                   (metadata) lineage, count, marks: one step a minute by the steward
//! ```
//! An older state of a store looks right in everything that it holds. So hosts remember, beside it, how far it had come; of a store
//! that has come less far, or by another way, they take nothing in ([`Doubt`]). Neither its revisions nor etcd's cluster id tell
//! that: other clients push the one, and a cluster that is made anew with the same flags has the same other.
//!
//! Invariants
//! 1. Within a lineage the count only grows, and two states with the same count have the same mark.
//! 2. A new lineage begins by an operator's command alone, with all hosts stopped; it is later than the one before.
//!
//! Limits: what was set back by less than a minute may look right to a host that starts then. Marks reach back for
//! [`BEAT_MARKS_MAX`] steps; after a longer absence the count decides alone, since hosts that were there have looked closer.

use crate::view::Doubt;
use holdfast_format::meta::{BEAT_MARKS_MAX, BeatRecord, Other};

/// The first of a store that is filled, or believed by command, at that moment, where `known` was known of the one before.
pub fn begin(known: Option<&BeatRecord>, now_s: u64, random: u64) -> BeatRecord {
    let since_s = known.map_or(now_s, |known| now_s.max(known.since_s + 1));
    let random = mark(random);
    BeatRecord { lineage: random.clone(), since_s, count: 0, marks: vec![random], other: Other::new() }
}

/// The next one of the same store.
pub fn next(beat: &BeatRecord, random: u64) -> BeatRecord {
    let mut next = BeatRecord { count: beat.count + 1, ..beat.clone() };
    next.marks.push(mark(random));
    let superfluous = next.marks.len().saturating_sub(BEAT_MARKS_MAX);
    next.marks.drain(..superfluous);
    next
}

fn mark(random: u64) -> String {
    format!("{random:016x}")
}

/// Why a store is not believed that says `found`, by whoever remembers `known` of it. `is_first`: it was just started, and an
/// operator may have had the store filled from elsewhere while it was not there.
pub fn doubt(known: Option<&BeatRecord>, found: Option<&BeatRecord>, is_first: bool) -> Option<Doubt> {
    let known = known?;
    let Some(found) = found else { return Some(Doubt::Older) };
    if found.lineage != known.lineage {
        let is_later = found.since_s > known.since_s;
        return if is_first && is_later { None } else { Some(Doubt::Another) };
    }
    let Some(ahead) = found.count.checked_sub(known.count) else { return Some(Doubt::Older) };
    let then = usize::try_from(ahead).ok().and_then(|ahead| found.marks.iter().rev().nth(ahead));
    let is_other = then.is_some_and(|then| Some(then) != known.marks.last());
    is_other.then_some(Doubt::Another)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(from: &BeatRecord, count: u64, seed: u64) -> BeatRecord {
        (0..count).fold(from.clone(), |beat, n| next(&beat, seed + n))
    }

    #[test]
    fn what_has_come_less_far_or_by_another_way_is_not_believed() {
        let begun = begin(None, 1_000, 1);
        let (early, late) = (steps(&begun, 10, 100), steps(&begun, 20, 100));
        assert_eq!(doubt(Some(&early), Some(&late), false), None);
        assert_eq!(doubt(Some(&late), Some(&late), true), None);
        assert_eq!(doubt(Some(&late), Some(&early), true), Some(Doubt::Older));
        assert_eq!(doubt(Some(&early), None, true), Some(Doubt::Older));
        assert_eq!(doubt(None, Some(&early), true), None);
        assert_eq!(doubt(None, None, true), None);
        // Set back to `early`, and gone on with from there.
        let other = steps(&early, 30, 900);
        assert_eq!(doubt(Some(&late), Some(&other), true), Some(Doubt::Another));
        assert_eq!(doubt(Some(&early), Some(&other), true), None);
    }

    #[test]
    fn after_a_long_absence_the_count_decides() {
        let begun = begin(None, 1_000, 1);
        let far = steps(&begun, 3 * BEAT_MARKS_MAX as u64, 100);
        assert_eq!(far.marks.len(), BEAT_MARKS_MAX);
        assert_eq!(doubt(Some(&begun), Some(&far), true), None);
        assert_eq!(doubt(Some(&far), Some(&begun), true), Some(Doubt::Older));
    }

    #[test]
    fn a_new_lineage_is_taken_at_a_start_and_never_an_old_one() {
        let old = steps(&begin(None, 1_000, 1), 50, 100);
        // The clock of the machine that fills the store may be behind.
        let new = begin(Some(&old), 10, 2);
        assert_eq!(doubt(Some(&old), Some(&new), true), None);
        assert_eq!(doubt(Some(&old), Some(&new), false), Some(Doubt::Another));
        assert_eq!(doubt(Some(&new), Some(&old), true), Some(Doubt::Another));
    }
}
