//! Segments: what the volume's data and metadata are stored in.

mod table;

pub(crate) use table::{Kind, SegmentInfo, Segments};

#[cfg(test)]
pub(crate) use table::tests;
