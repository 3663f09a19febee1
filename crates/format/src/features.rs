//! Features of the format that one volume uses, by number: which forms of records, headers and leaves there may be of it.
//!
//! A number never changes its meaning, and none is given twice. From [`COMPATIBLE_FROM`] on, a release that does not know
//! one serves the volume all the same, and keeps it. One below that which it does not know ends its reading.

use crate::FormatError;
use serde::{Deserialize, Serialize};
use std::fmt;

/// From here on are features that a release need not know in order to serve a volume.
pub const COMPATIBLE_FROM: u16 = 1 << 15;

/// Features that this release reads; which of them it serves, the controller says.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u16)]
pub enum Feature {
    /// Keys are of 28 bits of layer and 36 of block.
    WideKeys = 1,
    /// Blocks are compressed: segments, runs of the map and commits count granules.
    Packed = 2,
    /// Heads that stand on no snapshot.
    Heads = 3,
    /// Attributes of the volume, and answers that are given again.
    Replies = 4,
    /// The map names segments of stores.
    Stores = 5,
}

impl Feature {
    pub const ALL: [Feature; 5] =
        [Feature::WideKeys, Feature::Packed, Feature::Heads, Feature::Replies, Feature::Stores];

    pub fn number(self) -> u16 {
        self as u16
    }

    pub fn of(number: u16) -> Option<Feature> {
        Feature::ALL.into_iter().find(|feature| feature.number() == number)
    }

    fn name(self) -> &'static str {
        match self {
            Feature::WideKeys => "wide keys",
            Feature::Packed => "packed",
            Feature::Heads => "heads",
            Feature::Replies => "replies",
            Feature::Stores => "stores",
        }
    }
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.number(), self.name())
    }
}

/// A set of them.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Features {
    /// Rising.
    numbers: Vec<u16>,
}

impl Features {
    pub fn with(mut self, feature: Feature) -> Features {
        if let Err(at) = self.numbers.binary_search(&feature.number()) {
            self.numbers.insert(at, feature.number());
        }
        self
    }

    pub fn has(&self, feature: Feature) -> bool {
        self.numbers.binary_search(&feature.number()).is_ok()
    }

    pub fn is_empty(&self) -> bool {
        self.numbers.is_empty()
    }

    /// Features that a release has to know, rising.
    pub fn needed(&self) -> impl Iterator<Item = u16> {
        self.numbers.iter().copied().take_while(|number| *number < COMPATIBLE_FROM)
    }

    /// As they were read: sorted, and none that is needed is unknown.
    pub(crate) fn check(&self) -> Result<(), FormatError> {
        if self.numbers.windows(2).any(|pair| pair[0] >= pair[1]) {
            return Err(FormatError::Field("features"));
        }
        match self.needed().find(|number| Feature::of(*number).is_none()) {
            Some(unknown) => Err(FormatError::Feature(unknown)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_that_volumes_have() {
        let told: Vec<String> = Feature::ALL.map(|feature| feature.to_string()).to_vec();
        assert_eq!(told, ["1 (wide keys)", "2 (packed)", "3 (heads)", "4 (replies)", "5 (stores)"]);
        assert!(Feature::ALL.into_iter().all(|feature| Feature::of(feature.number()) == Some(feature)));
        assert!(Feature::of(0).is_none() && Feature::of(6).is_none());
    }

    #[test]
    fn unknown_features_are_told_by_number_unless_they_are_compatible() {
        let of = |numbers: &[u16]| Features { numbers: numbers.to_vec() };
        let two = Features::default().with(Feature::Heads).with(Feature::WideKeys).with(Feature::Heads);
        assert_eq!(two, of(&[1, 3]));
        assert!(two.has(Feature::Heads) && !two.has(Feature::Packed) && two.check().is_ok());
        assert_eq!(of(&[1, 77, 78]).check(), Err(FormatError::Feature(77)));
        let compatible = of(&[2, COMPATIBLE_FROM, u16::MAX]);
        assert_eq!((compatible.check(), compatible.needed().collect()), (Ok(()), vec![2]));
        for unsorted in [&[3, 1][..], &[3, 3]] {
            assert_eq!(of(unsorted).check(), Err(FormatError::Field("features")));
        }
    }
}
