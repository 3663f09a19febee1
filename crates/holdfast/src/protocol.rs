//! How the command line and the host speak: one JSON object a line, over the grid's control socket. A [`Request`] is answered
//! by exactly one [`Response`]; a connection may carry any number, one after the other.
//!
//! [`Request`]: holdfast_api::Request

use crate::host::keys::CommandFailed;
use holdfast_api::{Code, Error, Response};
use holdfast_runtime::meta::MetaError;
use std::fmt::Display;
use std::str::FromStr;

/// Longest line that either side takes.
pub const LINE_BYTES_MAX: usize = 16 << 20;

/// What is answered to a request that was refused, or failed.
pub fn failure(error: &anyhow::Error) -> Response {
    Response::Error { message: format!("{error:#}"), code: code_of(error) }
}

/// A text that stands for something else.
pub fn read<T: FromStr<Err: Display>>(text: &str) -> anyhow::Result<T> {
    text.parse().map_err(|why: T::Err| Error::new(Code::Invalid, why.to_string()).into())
}

/// What kind of thing stood in the way.
pub fn code_of(error: &anyhow::Error) -> Code {
    let of = |cause: &(dyn std::error::Error + 'static)| match cause.downcast_ref::<MetaError>() {
        Some(MetaError::Unknown { .. } | MetaError::Unwritable { .. }) => Some(Code::Unavailable),
        Some(MetaError::Refused) => Some(Code::NotPermitted),
        Some(MetaError::LeaseGone | MetaError::Compacted { .. } | MetaError::TooLarge) => None,
        None if cause.is::<CommandFailed>() => Some(Code::Unavailable),
        None => cause.downcast_ref::<Error>().map(|error| error.code),
    };
    // What was found last is the deepest.
    let deepest = error.chain().filter_map(of).last();
    deepest.unwrap_or_default()
}
