//! A map from runs of block numbers to values: what the overlay of a volume's map is made of.
//!
//! Invariants: runs don't overlap; no run is empty; cutting a run slices its value.

use std::collections::BTreeMap;

/// A value over a run of blocks that can be cut.
pub trait Sliceable: Clone {
    /// The value of the `len` blocks from the `offset`th on.
    #[must_use]
    fn slice(&self, offset: u64, len: u64) -> Self;
}

#[derive(Clone, Debug)]
struct Run<V> {
    len: u64,
    value: V,
}

/// One piece of a lookup: a run, cut to the range asked for, or a gap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece<V> {
    pub start: u64,
    pub len: u64,
    pub value: Option<V>,
}

#[derive(Clone, Debug)]
pub struct RangeMap<V> {
    runs: BTreeMap<u64, Run<V>>,
}

impl<V> Default for RangeMap<V> {
    fn default() -> Self {
        RangeMap { runs: BTreeMap::new() }
    }
}

impl<V: Sliceable> RangeMap<V> {
    /// Where the last run that starts before `end` ends; zero without any.
    pub fn end_before(&self, end: u64) -> u64 {
        self.runs.range(..end).next_back().map_or(0, |(at, run)| at + run.len)
    }

    /// Number of runs.
    pub fn run_count(&self) -> usize {
        self.runs.len()
    }

    /// The runs that reach into `start..end`, last first: one search of the tree, however many they are.
    fn overlapping(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, &Run<V>)> {
        let before = self.runs.range(..end).rev();
        before.map(|(at, run)| (*at, run)).take_while(move |(at, run)| start < end && at + run.len > start)
    }

    /// Takes everything in `start..start + len` out; `removed` is told each piece, last first.
    pub fn remove(&mut self, start: u64, len: u64, mut removed: impl FnMut(u64, u64, V)) {
        let end = start + len;
        let last_of = |runs: &Self| runs.overlapping(start, end).next().map(|(at, _)| at);
        while let Some(at) = last_of(self) {
            let run = self.runs.remove(&at).expect("just found");
            let run_end = at + run.len;
            let (cut_start, cut_end) = (at.max(start), run_end.min(end));
            if at < start {
                self.runs.insert(at, Run { len: start - at, value: run.value.slice(0, start - at) });
            }
            if run_end > end {
                self.runs.insert(end, Run { len: run_end - end, value: run.value.slice(end - at, run_end - end) });
            }
            if cut_start == at && cut_end == run_end {
                removed(at, run.len, run.value);
            } else {
                removed(cut_start, cut_end - cut_start, run.value.slice(cut_start - at, cut_end - cut_start));
            }
        }
    }

    /// Puts a run in, over whatever was there; `removed` is told each piece replaced.
    pub fn insert(&mut self, start: u64, len: u64, value: V, mut removed: impl FnMut(u64, u64, V)) {
        assert!(len > 0, "an empty run at {start}");
        // One that is written again as it was is where it shall be.
        if let Some(run) = self.runs.get_mut(&start).filter(|run| run.len == len) {
            return removed(start, len, std::mem::replace(&mut run.value, value));
        }
        self.remove(start, len, removed);
        self.runs.insert(start, Run { len, value });
    }

    /// The range cut into runs and gaps, in order, without holes.
    pub fn pieces(&self, start: u64, len: u64) -> Vec<Piece<V>> {
        let end = start + len;
        let mut pieces = Vec::new();
        let mut from = end;
        for (at, run) in self.overlapping(start, end) {
            let (cut_start, cut_end) = (at.max(start), (at + run.len).min(end));
            if cut_end < from {
                pieces.push(Piece { start: cut_end, len: from - cut_end, value: None });
            }
            let value = run.value.slice(cut_start - at, cut_end - cut_start);
            pieces.push(Piece { start: cut_start, len: cut_end - cut_start, value: Some(value) });
            from = cut_start;
        }
        if start < from {
            pieces.push(Piece { start, len: from - start, value: None });
        }
        pieces.reverse();
        pieces
    }

    /// The parts of `start..start + len` that no run covers, in order: (start, end).
    pub fn gaps(&self, start: u64, len: u64) -> Vec<(u64, u64)> {
        let end = start + len;
        let mut gaps = Vec::new();
        let mut from = end;
        for (at, run) in self.overlapping(start, end) {
            if at + run.len < from {
                gaps.push((at + run.len, from));
            }
            from = at.max(start);
        }
        if start < from {
            gaps.push((start, from));
        }
        gaps.reverse();
        gaps
    }

    /// Whether a run reaches into this range.
    pub fn has_any(&self, start: u64, len: u64) -> bool {
        self.overlapping(start, start + len).next().is_some()
    }

    /// How many of the `len` blocks from `start` on no more than so many runs, at least one, begin in.
    pub fn len_of_runs(&self, start: u64, len: u64, runs_max: usize) -> u64 {
        let behind = self.iter_from(start).nth(runs_max.max(1)).map(|(at, _, _)| at - start);
        behind.map_or(len, |behind| len.min(behind))
    }

    /// All runs that reach behind `from`, in order: where they start, how much of them lies before `from`, what of their
    /// length is left then, and their whole value.
    pub fn iter_behind(&self, from: u64) -> impl Iterator<Item = (u64, u64, u64, &V)> {
        let before = self.runs.range(..from).next_back().filter(move |(at, run)| *at + run.len > from);
        let rest = before.map(move |(at, run)| (*at, from - at, at + run.len - from, &run.value));
        rest.into_iter().chain(self.iter_from(from).map(|(at, len, value)| (at, 0, len, value)))
    }

    /// All runs that start at or after `from`, in order.
    pub fn iter_from(&self, from: u64) -> impl Iterator<Item = (u64, u64, &V)> {
        self.runs.range(from..).map(|(at, run)| (*at, run.len, &run.value))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A value that knows which block each of its blocks belongs to.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(in crate::map) struct Tagged {
        pub tag: u32,
        pub first: u64,
    }

    impl Sliceable for Tagged {
        fn slice(&self, offset: u64, _len: u64) -> Self {
            Tagged { tag: self.tag, first: self.first + offset }
        }
    }

    proptest! {
        #[test]
        fn behaves_like_an_array_of_blocks(
            ops in proptest::collection::vec((0u64..60, 1u64..20, any::<bool>(), any::<bool>()), 1..60),
            look in (0u64..60, 0u64..30),
        ) {
            let mut map = RangeMap::default();
            let mut naive: Vec<Option<Tagged>> = vec![None; 100];
            for (tag, (start, len, insert, is_aligned)) in ops.into_iter().enumerate() {
                // Half of them are the same few runs again and again.
                let (start, len) = if is_aligned { (start / 16 * 16, 16) } else { (start, len) };
                let mut told: Vec<Option<Tagged>> = vec![None; 100];
                let tell = |at: u64, n: u64, value: Tagged| {
                    for i in 0..n {
                        assert!(told[(at + i) as usize].replace(value.slice(i, 1)).is_none(), "told once");
                    }
                };
                let mut before = naive.clone();
                before.iter_mut().enumerate().for_each(|(block, tagged)| {
                    tagged.take_if(|_| !(start..start + len).contains(&(block as u64)));
                });
                if insert {
                    map.insert(start, len, Tagged { tag: tag as u32, first: start }, tell);
                } else {
                    map.remove(start, len, tell);
                }
                prop_assert_eq!(told, before);
                for block in start..start + len {
                    naive[block as usize] = insert.then_some(Tagged { tag: tag as u32, first: block });
                }
            }
            let mut at = look.0;
            for piece in map.pieces(look.0, look.1) {
                prop_assert_eq!(piece.start, at);
                for i in 0..piece.len {
                    prop_assert_eq!(&piece.value.as_ref().map(|v| v.slice(i, 1)), &naive[(at + i) as usize]);
                }
                at += piece.len;
            }
            prop_assert_eq!(at, look.0 + look.1);
            let begin_in = |len: u64| map.iter_from(look.0).take_while(|(at, _, _)| *at < look.0 + len).count();
            let few = map.len_of_runs(look.0, look.1, 2);
            prop_assert!(begin_in(few) <= 2 && (few == look.1 || begin_in(few + 1) == 3));
            let behind: u64 = map.iter_behind(look.0).map(|(_, _, left, _)| left).sum();
            prop_assert_eq!(behind as usize, naive[look.0 as usize..].iter().flatten().count());
            prop_assert!(map.iter_behind(look.0).all(|(at, before, _, _)| at + before >= look.0));
            let bare = |b: &u64| map.gaps(look.0, look.1).iter().any(|(from, to)| (*from..*to).contains(b));
            for block in look.0..look.0 + look.1 {
                prop_assert_eq!(bare(&block), naive[block as usize].is_none());
            }
        }
    }
}
