//! What a host answers, typed: states and error codes that programs can go by.
//!
//! Role: between hosts and whatever asks them. Texts of errors are for people, and may change with any release; codes
//! and states stay, and come through a host that passes a request on.
//!
//! Invariant: what a newer release calls otherwise is read as [`Code::Failed`] and [`VolumeState::Other`], never refused.

mod error;
mod texts;
mod volume;

pub use error::{Code, Error};
pub use volume::VolumeState;
