//! What machines ask of the metadata store, and what it answers: small records with compare-and-swap.

/// Version of a record, raised by every change. Zero stands for "absent".
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct MetaVersion(pub u64);

impl MetaVersion {
    pub const ABSENT: MetaVersion = MetaVersion(0);
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum MetaRequest {
    Get {
        key: String,
    },
    /// Sets the record (or deletes it, with `value: None`) if its version is still `expect`, and the guard holds.
    Swap {
        key: String,
        expect: MetaVersion,
        value: Option<Vec<u8>>,
        guard: Option<MetaGuard>,
    },
}

/// Another record that a swap rests on: it takes place only while that one is at this version.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MetaGuard {
    pub key: String,
    pub version: MetaVersion,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum MetaReply {
    /// The record as read by a `Get`; `value` is `None` where it is absent.
    Record {
        version: MetaVersion,
        value: Option<Vec<u8>>,
    },
    Swapped {
        version: MetaVersion,
    },
    /// The swap lost: the record has another version than expected, and this is it.
    Conflict {
        version: MetaVersion,
        value: Option<Vec<u8>>,
    },
    /// The guard does not hold, and nothing was changed; the record that was to be is this.
    GuardFailed {
        version: MetaVersion,
        value: Option<Vec<u8>>,
    },
    /// The store did not answer: the swap may or may not have happened, now or later (protocol rule 4).
    Unknown,
}
