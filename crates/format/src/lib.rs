//! Every byte on disk and on our own wire.
//!
//! Small, rarely written records are postcard (a documented varint encoding of serde's data model) behind a version and
//! a checksum; what is read in bulk or found by scanning has a fixed little-endian layout. docs/FORMAT.md draws each.

pub mod copy;
pub mod disk;
pub mod drive;
pub mod features;
pub mod forward;
pub mod geometry;
pub mod ledger;
pub mod meta;
pub mod packing;
pub mod record;
pub mod root;
pub mod schedule;
pub mod segment;
pub mod sharing;
pub mod stream;
pub mod talk;
pub mod tier;
pub mod versions;
pub mod wire;

use std::fmt;

/// Bytes that are not what they should be. The location is added by who read them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FormatError {
    /// Fewer bytes than the structure has.
    Truncated,
    /// Another structure, or none: the magic number differs.
    Magic,
    /// Written by a release that this one doesn't know.
    Version(u16),
    /// The volume uses something by this number that this release doesn't know.
    Feature(u16),
    Checksum,
    /// The checksum holds, but a field has an impossible value.
    Field(&'static str),
}

impl fmt::Display for FormatError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FormatError::Truncated => write!(f, "truncated"),
            FormatError::Magic => write!(f, "wrong magic number"),
            FormatError::Version(v) => write!(f, "format version {v} is not known to this release"),
            FormatError::Feature(n) => write!(
                f,
                "feature {n} of the format is not known to this release: use the one that turned it on, or a newer one"
            ),
            FormatError::Checksum => write!(f, "checksum mismatch"),
            FormatError::Field(name) => write!(f, "impossible value in field `{name}`"),
        }
    }
}

impl std::error::Error for FormatError {}

/// Encodes with postcard. Our records have no map keys or lengths that could fail.
pub(crate) fn to_postcard<T: serde::Serialize>(value: &T) -> Vec<u8> {
    postcard::to_stdvec(value).expect("our records always encode")
}

pub(crate) fn from_postcard<T: serde::de::DeserializeOwned>(bytes: &[u8]) -> Result<T, FormatError> {
    postcard::from_bytes(bytes).map_err(|_| FormatError::Field("postcard body"))
}

/// Decodes what the bytes begin with; gives the rest of them.
pub(crate) fn split_postcard<T: serde::de::DeserializeOwned>(bytes: &[u8]) -> Result<(T, &[u8]), FormatError> {
    postcard::take_from_bytes(bytes).map_err(|_| FormatError::Field("postcard body"))
}
