//! What a host tells of its volumes, and what is to be said of a grid.
//!
//! Role: [`volumes`] and [`told`] have what a host knows, as the API has it. [`findings`] says of a grid's state what is not
//! well, [`alerts`] which of that people are told, and when. [`verdict`] says why a volume's requests are slow. None does I/O:
//! the shell and the simulator call them alike.

pub mod alerts;
pub mod findings;
pub mod resources;
pub mod told;
mod verdict;
pub mod volumes;

pub use verdict::{Cause, Facts, Verdict, ms, of};
