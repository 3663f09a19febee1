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
    /// Sets the record (or deletes it, with `value: None`) if its version is still `expect`.
    Swap {
        key: String,
        expect: MetaVersion,
        value: Option<Vec<u8>>,
    },
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
    /// The store did not answer: the swap may or may not have happened, now or later (protocol rule 4).
    Unknown,
}
