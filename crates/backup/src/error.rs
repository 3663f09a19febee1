//! What stands in the way of a backup.

use std::fmt::Display;

pub type Result<T> = std::result::Result<T, Error>;

/// Each with a text for people.
#[derive(thiserror::Error, Debug)]
pub enum Error {
    /// What was asked for makes no sense.
    #[error("{0}")]
    Invalid(String),
    /// There is no such repository, or no such backup.
    #[error("{0}")]
    NotFound(String),
    #[error("{0}")]
    Exists(String),
    /// Somebody else is at work there.
    #[error("{0}")]
    Busy(String),
    /// What was written can't be read as it was.
    #[error("{0}")]
    Damaged(String),
    /// The store can't be reached, or refuses.
    #[error("{0}")]
    Store(String),
}

impl Error {
    /// Something that was done with an object of a store.
    pub fn store(what: impl Display, why: impl Display) -> Error {
        Error::Store(format!("{what}: {why}"))
    }
}
