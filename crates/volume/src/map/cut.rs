//! A run map of which the state as of one instant can be gone through in slices, while it goes on changing.
//!
//! From [`Cuttable::cut`] on, what changes ahead of the cursor is kept as it was. So all slices together say what the
//! map said at that instant, and none of them is longer than asked.
//!
//! Invariants: (1) a run ahead of the cursor either was there at the cut, or lies wholly where something is kept; (2)
//! nothing is kept twice.
//!
//! Limits: no more is kept than changes during one walk, which is as long as that takes.

use super::rangemap::{RangeMap, Sliceable};
use std::ops::Deref;

/// What a place said; nothing, too, is something to keep.
#[derive(Clone, Debug)]
struct Previous<V>(Option<V>);

impl<V: Sliceable> Sliceable for Previous<V> {
    fn slice(&self, offset: u64, len: u64) -> Previous<V> {
        Previous(self.0.as_ref().map(|value| value.slice(offset, len)))
    }
}

#[derive(Clone, Debug)]
struct Cut<V> {
    /// Everything before was gone through.
    at: u64,
    kept: RangeMap<Previous<V>>,
}

/// Reads go to the map as it is now.
#[derive(Clone, Debug)]
pub struct Cuttable<V> {
    now: RangeMap<V>,
    cut: Option<Cut<V>>,
}

impl<V> Default for Cuttable<V> {
    fn default() -> Cuttable<V> {
        Cuttable { now: RangeMap::default(), cut: None }
    }
}

impl<V> Deref for Cuttable<V> {
    type Target = RangeMap<V>;

    fn deref(&self) -> &RangeMap<V> {
        &self.now
    }
}

impl<V: Sliceable> Cuttable<V> {
    /// See [`RangeMap::insert`].
    pub fn insert(&mut self, start: u64, len: u64, value: V, removed: impl FnMut(u64, u64, V)) {
        self.keep(start, len);
        self.now.insert(start, len, value, removed);
    }

    /// See [`RangeMap::remove`].
    pub fn remove(&mut self, start: u64, len: u64, removed: impl FnMut(u64, u64, V)) {
        self.keep(start, len);
        self.now.remove(start, len, removed);
    }

    /// The state as of now is gone through from here on.
    pub fn cut(&mut self) {
        assert!(self.cut.is_none(), "one walk at a time");
        self.cut = Some(Cut { at: 0, kept: RangeMap::default() });
    }

    /// The walk is given up.
    pub fn end_cut(&mut self) {
        self.cut = None;
    }

    fn keep(&mut self, start: u64, len: u64) {
        let Some(cut) = &mut self.cut else { return };
        let (from, end) = (start.max(cut.at), start + len);
        if from >= end {
            return;
        }
        for (from, to) in cut.kept.gaps(from, end - from) {
            for piece in self.now.pieces(from, to - from) {
                cut.kept.insert(piece.start, piece.len, Previous(piece.value), |_, _, _| {});
            }
        }
    }

    /// Tells of the next runs of the cut, about `count` of them and in no order; false when that was all.
    pub fn walk(&mut self, count: usize, mut told: impl FnMut(u64, u64, &V)) -> bool {
        let Cut { at, kept } = self.cut.as_mut().expect("a walk begins with a cut");
        let from = *at;
        let first_now = self.now.iter_from(from).nth(count).map(|(start, _, _)| start);
        let first_kept = kept.iter_from(from).nth(count).map(|(start, _, _)| start);
        let to = first_now.into_iter().chain(first_kept).min();
        let is_ahead = |start: u64| to.is_none_or(|to| start < to);
        for (start, len, value) in self.now.iter_from(from).take_while(|(start, _, _)| is_ahead(*start)) {
            if !kept.has_any(start, len) {
                told(start, len, value);
            }
        }
        for (start, len, Previous(value)) in kept.iter_from(from).take_while(|(start, _, _)| is_ahead(*start)) {
            if let Some(value) = value {
                told(start, len, value);
            }
        }
        match to {
            Some(to) => *at = to,
            None => self.cut = None,
        }
        to.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::rangemap::tests::Tagged;
    use proptest::prelude::*;

    type Blocks = Vec<Option<Tagged>>;

    fn tell(said: &mut Blocks, start: u64, len: u64, value: &Tagged) {
        for i in 0..len {
            let former = said[(start + i) as usize].replace(value.slice(i, 1));
            assert_eq!(former, None, "block {} is told once", start + i);
        }
    }

    #[derive(Clone, Debug)]
    enum Op {
        Put(u64, u64),
        TakeOut(u64, u64),
        Walk(usize),
    }

    fn op() -> impl Strategy<Value = Op> {
        let aligned = (0u64..6).prop_map(|at| (at * 16, 16));
        let place = prop_oneof![(0u64..80, 1u64..20), aligned];
        prop_oneof![
            4 => place.clone().prop_map(|(start, len)| Op::Put(start, len)),
            2 => place.prop_map(|(start, len)| Op::TakeOut(start, len)),
            2 => (1usize..4).prop_map(Op::Walk),
        ]
    }

    proptest! {
        #[test]
        fn slices_say_together_what_was_there_at_the_cut(
            before in proptest::collection::vec((0u64..80, 1u64..20), 0..40),
            ops in proptest::collection::vec(op(), 0..60),
        ) {
            let mut map = Cuttable::default();
            for (tag, (start, len)) in before.into_iter().enumerate() {
                map.insert(start, len, Tagged { tag: tag as u32, first: start }, |_, _, _| {});
            }
            let mut expected: Blocks = vec![None; 200];
            map.iter_from(0).for_each(|(start, len, value)| tell(&mut expected, start, len, value));
            let mut said: Blocks = vec![None; 200];
            map.cut();
            let mut goes_on = true;
            for (tag, op) in ops.into_iter().enumerate() {
                match op {
                    Op::Put(start, len) => {
                        map.insert(start, len, Tagged { tag: 1000 + tag as u32, first: start }, |_, _, _| {});
                    }
                    Op::TakeOut(start, len) => map.remove(start, len, |_, _, _| {}),
                    Op::Walk(count) if goes_on => {
                        let mut runs = 0;
                        goes_on = map.walk(count, |start, len, value| {
                            runs += 1;
                            tell(&mut said, start, len, value);
                        });
                        prop_assert!(runs <= 2 * count, "{runs} runs in a slice of {count}");
                    }
                    Op::Walk(_) => {}
                }
            }
            while goes_on {
                goes_on = map.walk(1, |start, len, value| tell(&mut said, start, len, value));
            }
            prop_assert_eq!(said, expected);
            prop_assert!(map.cut.is_none(), "nothing is kept for longer");
        }
    }
}
