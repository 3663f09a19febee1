//! Segments: what the volume's data and metadata are stored in.

pub(crate) mod destage;
pub(crate) mod direct;
pub(crate) mod encrypt;
pub(crate) mod fetch;
pub(crate) mod named;
mod pack;
mod shards;
mod table;
pub(crate) mod task;
pub(crate) mod units;
pub(crate) mod writer;

pub(crate) use named::{Change, Named};
pub(crate) use table::{InFlight, Kind, SegmentInfo, Segments};

#[cfg(test)]
pub(crate) use table::tests;
