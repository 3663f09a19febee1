//! Sharing: snapshots and clones, groups of snapshots, and volumes that share the segments of their origin.

pub mod group;
pub(crate) mod segments;
pub(crate) mod snapshots;
