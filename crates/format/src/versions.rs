//! Versions of messages, as two programs agree on one when they greet each other.
//!
//! Grids are brought to a new release machine by machine, so that for a while programs of two releases talk to each other.
//! Each greets with all versions that it speaks, and both use the newest that they have in common. A message's bytes never
//! change: what is new is a new variant at the end of its enum, which tells since which version it is there, and who
//! sends it asks first which version was agreed on.

use serde::{Deserialize, Serialize};
use std::fmt;

/// All versions from the oldest to the newest.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Versions {
    pub oldest: u32,
    pub newest: u32,
}

impl Versions {
    /// The newest that both speak.
    pub fn common(self, other: Versions) -> Option<u32> {
        let newest = self.newest.min(other.newest);
        (newest >= self.oldest.max(other.oldest)).then_some(newest)
    }

    /// What to tell who speaks `own` of another who speaks these, where they have none in common.
    pub fn apart_from(self, own: Versions) -> String {
        format!(
            "it speaks versions {self} of the messages, and this host {own}: bring the older of the two to the release of \
             the other, or first to one that speaks with both"
        )
    }

    pub fn contain(self, version: u32) -> bool {
        (self.oldest..=self.newest).contains(&version)
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.oldest == self.newest {
            true => write!(f, "{}", self.newest),
            false => write!(f, "{} to {}", self.oldest, self.newest),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_that_both_speak_is_agreed_on_whoever_asks() {
        let of = |oldest, newest| Versions { oldest, newest };
        for (a, b, common) in [
            (of(5, 6), of(5, 6), Some(6)),
            (of(5, 5), of(5, 6), Some(5)),
            (of(6, 9), of(5, 6), Some(6)),
            (of(7, 9), of(5, 6), None),
            (of(0, u32::MAX), of(5, 6), Some(6)),
            // Who says so speaks nothing.
            (of(6, 5), of(5, 6), None),
        ] {
            assert_eq!((a.common(b), b.common(a)), (common, common), "{a} and {b}");
        }
    }
}
