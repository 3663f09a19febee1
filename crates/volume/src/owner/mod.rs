//! Ownership: the root record and its copies, opening and recovery, what is read before a hand-over, and the old
//! owner's part.

pub(crate) mod copies;
pub(crate) mod handover;
pub(crate) mod opening;
pub(crate) mod recovery;
pub(crate) mod root;
