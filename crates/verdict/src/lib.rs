//! Why a volume's requests are slow.
//!
//! Role: [`told`] has what a host tells of a volume's stages and of its other volumes, as the API has it. [`verdict`] makes one
//! sentence of that and of what is known of the nodes. Both are pure: the shell and the simulator call them alike.

pub mod told;
mod verdict;

pub use verdict::{Cause, Facts, Verdict, ms, of};
