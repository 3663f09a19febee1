//! Sharing: snapshots and clones, groups of snapshots, and volumes that share the segments of their origin.

pub(crate) mod family;
pub mod group;
pub(crate) mod snapshots;
