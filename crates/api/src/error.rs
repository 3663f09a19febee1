//! Why something was not done.

use crate::texts::texts;
use std::fmt;

texts! {
    /// What kind of thing stood in the way: what a program does next depends on that.
    #[derive(Default)]
    pub enum Code {
        /// What was asked for makes no sense: a name, a size, options that don't go together.
        Invalid = "invalid",
        /// There is no such thing.
        NotFound = "not-found",
        /// There is such a thing already.
        Exists = "exists",
        /// Clients, clones or data hang on it.
        InUse = "in-use",
        /// It is not in the state in which that can be done: out of service, say.
        State = "state",
        /// It is protected from that.
        Protected = "protected",
        /// There is not enough to keep data as safe as they have to be.
        Redundancy = "redundancy",
        /// There is not enough room.
        NoSpace = "no-space",
        /// Somebody changed it in the same moment; the same request may succeed.
        Changed = "changed",
        /// Whoever has to take part can't be reached now; the same request may succeed later.
        Unavailable = "unavailable",
        /// Not with this release, or not with those that others have.
        Unsupported = "unsupported",
        /// Who asks may not do that.
        NotPermitted = "not-permitted",
        /// Something else.
        #[default]
        Failed = "failed",
    }
}

/// A refusal or a failure, with a text for people that says what, why and what to do next.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Error {
    pub code: Code,
    pub message: String,
}

impl Error {
    pub fn new(code: Code, message: impl Into<String>) -> Error {
        Error { code, message: message.into() }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

/// Returns an [`Error`] of that code, with a text as of `format!`.
#[macro_export]
macro_rules! refuse {
    ($code:expr, $($text:tt)+) => {
        return Err($crate::Error::new($code, format!($($text)+)).into())
    };
}
