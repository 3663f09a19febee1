//! The log: the window of entries in memory, their way to the legs of the open ledger, and ledgers that follow each
//! other.

pub(crate) mod append;
pub(crate) mod pressure;
pub(crate) mod roll;
pub(crate) mod window;
