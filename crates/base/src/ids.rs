//! Identities: newtypes, so that no function takes two bare integers that a caller could swap.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A text that is not an id of the expected form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParseIdError {
    what: &'static str,
}

impl fmt::Display for ParseIdError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "not a {}: expected 32 hexadecimal digits, with or without dashes", self.what)
    }
}

impl std::error::Error for ParseIdError {}

macro_rules! id128 {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Default)]
        pub struct $name(pub u128);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let h = format!("{:032x}", self.0);
                write!(f, "{}-{}-{}-{}-{}", &h[..8], &h[8..12], &h[12..16], &h[16..20], &h[20..])
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({:08x})", stringify!($name), self.0 as u32)
            }
        }

        impl FromStr for $name {
            type Err = ParseIdError;
            fn from_str(text: &str) -> Result<Self, ParseIdError> {
                let digits: String = text.chars().filter(|c| *c != '-').collect();
                if digits.len() != 32 {
                    return Err(ParseIdError { what: stringify!($name) });
                }
                u128::from_str_radix(&digits, 16).map($name).map_err(|_| ParseIdError { what: stringify!($name) })
            }
        }
    };
}

id128!(
    /// One grid: every superblock, segment and greeting names it.
    GridId
);
id128!(
    /// One volume (guest-visible disk).
    VolumeId
);
id128!(
    /// One device (disk) of a node, from its superblock. A device swapped for a blank one has another id.
    DeviceId
);
id128!(
    /// One opening of one volume by one process: the nonce of root swaps (protocol rule 4) and of promises (rule 6).
    InstanceId
);
id128!(
    /// One client of a volume, over all of its connections: who its answers are remembered for.
    AssociationId
);

macro_rules! id_int {
    ($(#[$doc:meta])* $name:ident, $int:ty, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Default)]
        pub struct $name(pub $int);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
    };
}

id_int!(
    /// A storage process; the default fault domain.
    NodeId, u32, "n"
);
id_int!(
    /// Fencing number of a volume's owner; only ever raised, by compare-and-swap in the metadata store.
    Epoch, u64, "e"
);
id_int!(
    /// Log sequence number: the order of everything that changes a volume. The first entry of a volume has LSN 1.
    Lsn, u64, "l"
);
id_int!(
    /// One address space inside a volume's map. A plain volume's data is object 0.
    ObjectId, u32, "o"
);
id_int!(
    /// What of a volume can be written to: head 0 is the volume itself, the others are clones of its snapshots.
    HeadId, u32, "h"
);

id_int!(
    /// A span in which a controller holds back answers. Never reused by one host process.
    QuiesceId, u64, "quiesce"
);

impl HeadId {
    /// The volume itself.
    pub const VOLUME: HeadId = HeadId(0);
}

impl Lsn {
    /// "Nothing yet": smaller than every entry's LSN.
    pub const ZERO: Lsn = Lsn(0);

    #[must_use]
    pub fn next(self) -> Lsn {
        Lsn(self.0 + 1)
    }

    #[must_use]
    pub fn prev(self) -> Lsn {
        Lsn(self.0.checked_sub(1).expect("no LSN precedes zero"))
    }
}

impl Epoch {
    #[must_use]
    pub fn next(self) -> Epoch {
        Epoch(self.0 + 1)
    }
}

/// One replica set's stretch of a volume's log. Unique in its volume: the epoch is one owner's, `n` counts in it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Default)]
pub struct LedgerId {
    pub epoch: Epoch,
    pub n: u32,
}

impl fmt::Debug for LedgerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ledger {}.{}", self.epoch.0, self.n)
    }
}

impl fmt::Display for LedgerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.epoch.0, self.n)
    }
}

/// An immutable coded unit. Never reused (protocol rule 17): each retry takes a new `counter`, each owner a new epoch.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Default)]
pub struct SegmentId {
    pub volume: VolumeId,
    pub epoch: Epoch,
    pub counter: u64,
}

impl fmt::Debug for SegmentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seg {:08x}.{}.{}", self.volume.0 as u32, self.epoch.0, self.counter)
    }
}

/// One piece of a segment: data shards come first, then parity shards; every copy of a mirror has an index of its own.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ShardId {
    pub segment: SegmentId,
    pub index: u8,
}

impl fmt::Debug for ShardId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}/{}", self.segment, self.index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_print_as_uuids_and_read_back() {
        let id = VolumeId(0x0123_4567_89ab_cdef_0011_2233_4455_6677);
        assert_eq!(id.to_string(), "01234567-89ab-cdef-0011-223344556677");
        assert_eq!(id.to_string().parse::<VolumeId>(), Ok(id));
        assert!("0123".parse::<VolumeId>().is_err());
        assert!("zz234567-89ab-cdef-0011-223344556677".parse::<VolumeId>().is_err());
    }
}
