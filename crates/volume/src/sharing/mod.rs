//! Sharing: snapshots and clones, groups of snapshots, volumes that share the segments of their origin, and domains in
//! which equal content is stored once.

mod domain;
pub mod group;
mod index;
mod member;
mod printer;
pub(crate) mod segments;
pub(crate) mod snapshots;
mod sparse;
mod store;

pub(crate) use domain::META;
pub(crate) use member::Member;
pub(crate) use printer::Printer;
pub(crate) use sparse::Sparse;
pub(crate) use store::Store;
