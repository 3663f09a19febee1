//! Which requests a filter is for: by kind, by share or by count, by range.

use crate::spec::{self, Fields, SpecError};
use holdfast_base::{BlockOp, ByteRange, Prng};

/// Kinds of requests, as filters are told of them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum OpKind {
    Read,
    Write,
    /// And zeroes.
    Discard,
    Flush,
    /// Hints and questions.
    Other,
}

impl OpKind {
    pub const ALL: [OpKind; 5] = [OpKind::Read, OpKind::Write, OpKind::Discard, OpKind::Flush, OpKind::Other];

    pub fn of(op: &BlockOp) -> OpKind {
        match op {
            BlockOp::Read(_) => OpKind::Read,
            BlockOp::Write { .. } => OpKind::Write,
            BlockOp::Discard(_) | BlockOp::WriteZeroes(_) => OpKind::Discard,
            BlockOp::Flush => OpKind::Flush,
            BlockOp::Prefetch(_) | BlockOp::Status(_) | BlockOp::Changes { .. } => OpKind::Other,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            OpKind::Read => "read",
            OpKind::Write => "write",
            OpKind::Discard => "discard",
            OpKind::Flush => "flush",
            OpKind::Other => "other",
        }
    }
}

/// Something for some kinds of requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PerKind<T>([Option<T>; OpKind::ALL.len()]);

impl<T> Default for PerKind<T> {
    fn default() -> Self {
        PerKind([const { None }; OpKind::ALL.len()])
    }
}

impl<T: Copy> PerKind<T> {
    pub fn get(&self, op: &BlockOp) -> Option<T> {
        self.0[OpKind::of(op) as usize]
    }

    pub fn set(&mut self, kind: OpKind, value: Option<T>) {
        self.0[kind as usize] = value;
    }

    pub fn is_empty(&self) -> bool {
        self.0.iter().all(Option::is_none)
    }
}

/// The bytes that a request is about; a flush is about none.
pub(crate) fn range_of(op: &BlockOp) -> Option<ByteRange> {
    match op {
        BlockOp::Write { offset, data } => Some(ByteRange::new(*offset, data.len() as u64)),
        BlockOp::Read(range)
        | BlockOp::Discard(range)
        | BlockOp::WriteZeroes(range)
        | BlockOp::Prefetch(range)
        | BlockOp::Status(range)
        | BlockOp::Changes { range, .. } => Some(*range),
        BlockOp::Flush => None,
    }
}

/// Whether both change a byte that the other changes, so that their order matters.
pub(crate) fn collide(one: &BlockOp, other: &BlockOp) -> bool {
    let changed = |op: &BlockOp| match op {
        BlockOp::Write { .. } | BlockOp::Discard(_) | BlockOp::WriteZeroes(_) => range_of(op),
        _ => None,
    };
    let (Some(a), Some(b)) = (changed(one), changed(other)) else { return false };
    let end = |range: ByteRange| range.end().unwrap_or(u64::MAX);
    a.offset < end(b) && b.offset < end(a)
}

/// What [`Choice`] can be told, for the lists of filters that have one.
macro_rules! choice_takes {
    ($values:literal) => {
        concat!("read, write, discard, flush, other, all (", $values, "), share, every, range, seed")
    };
}
pub(crate) use choice_takes;

/// Chooses among requests: a share of them by chance, or every nth, and those that touch a range.
#[derive(Clone, Debug)]
pub struct Choice {
    /// In millionths.
    share: Option<u32>,
    every: Option<u64>,
    range: Option<ByteRange>,
    seen: u64,
    pub prng: Prng,
}

impl Choice {
    pub fn of(fields: &mut Fields<'_>) -> Result<Choice, SpecError> {
        let share = fields.parse("share", "a number above 0 and up to 1, for example 0.1", spec::share)?;
        let counted = |text: &str| text.parse().ok().filter(|every| *every > 0);
        let every = fields.parse("every", "a number of requests from 1 on", counted)?;
        if share.is_some() && every.is_some() {
            return Err(fields.missing("share or every, and not both"));
        }
        let range = fields.parse("range", "a range of bytes, for example 0..1GiB", spec::range)?;
        let seed = fields.parse("seed", "a number", |text| text.parse().ok())?.unwrap_or(1);
        Ok(Choice { share, every, range, seen: 0, prng: Prng::new(seed) })
    }

    /// Whether a request of a kind that the filter is for is chosen.
    pub fn takes(&mut self, op: &BlockOp) -> bool {
        if let Some(within) = self.range {
            let touches = |range: ByteRange| {
                let ends = (range.end().unwrap_or(u64::MAX), within.end().unwrap_or(u64::MAX));
                range.offset < ends.1 && within.offset < ends.0
            };
            if !range_of(op).is_some_and(touches) {
                return false;
            }
        }
        self.seen += 1;
        match (self.share, self.every) {
            (Some(share), _) => self.prng.below(1_000_000) < u64::from(share),
            (None, Some(every)) => self.seen.is_multiple_of(every),
            (None, None) => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choice(share: Option<u32>, every: Option<u64>, range: Option<ByteRange>) -> Choice {
        Choice { share, every, range, seen: 0, prng: Prng::new(1) }
    }

    fn read(offset: u64) -> BlockOp {
        BlockOp::Read(ByteRange::new(offset, 10))
    }

    #[test]
    fn shares_counts_and_ranges_choose() {
        let taken = |mut choice: Choice| (0..10_000).filter(|n| choice.takes(&read(n % 100))).count();
        assert_eq!(taken(choice(None, None, None)), 10_000);
        assert_eq!(taken(choice(None, Some(4), None)), 2_500);
        let tenth = taken(choice(Some(100_000), None, None));
        assert!((900..1_100).contains(&tenth), "{tenth}");
        let within = Some(ByteRange::new(50, 5));
        let mut some = choice(None, None, within);
        assert!(!some.takes(&read(40)) && some.takes(&read(41)) && some.takes(&read(54)) && !some.takes(&read(55)));
        assert!(!some.takes(&BlockOp::Flush), "it is about no bytes");
    }
}
