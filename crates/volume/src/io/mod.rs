//! Guests' requests: admission, reads and writes, what is read ahead, and answers that are held back.

pub mod quiesce;
pub(crate) mod read;
pub(crate) mod read_ahead;
pub(crate) mod write;
