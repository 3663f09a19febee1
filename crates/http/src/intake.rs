//! Bodies of requests while they come.
//!
//! Role: reads a body into one piece of memory. A client says first how long its body is and may never send the rest, so
//! memory is taken as parts come, not before, and never more for small parts than for large ones.
//!
//! Limits: a body has [`BODY_BYTES_MAX`]. All that are under way have [`ROOM_BYTES`] together, beside [`FREE_BYTES`] that
//! each has anyway: whatever large ones take, small ones get in.

use crate::serve::{Refusal, refused};
use axum::body::{Body, HttpBody};
use axum::http::StatusCode;
use futures_util::StreamExt;
use holdfast_api::{Code, Error};
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

pub const BODY_BYTES_MAX: usize = 1 << 20;

/// Eight bodies of the largest size: the largest that is known of has some 10 KiB.
pub const ROOM_BYTES: usize = 8 << 20;

/// A common body has less; as many as there may be connections to a socket have 4 MiB.
const FREE_BYTES: usize = 16 << 10;

/// Room for bodies, of all connections.
pub struct Intake(Arc<Semaphore>);

/// A body, and the room that it has until it is dropped.
#[derive(Default)]
pub struct Whole {
    bytes: Vec<u8>,
    room: Option<OwnedSemaphorePermit>,
}

impl Whole {
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Memory for so many bytes altogether; `kept` of the room is for others.
    fn grow(&mut self, len: usize, intake: &Intake, kept: usize) -> Result<(), Error> {
        if len <= self.bytes.capacity() {
            return Ok(());
        }
        let wanted = len.next_power_of_two().max(1024);
        let held = self.bytes.capacity().saturating_sub(FREE_BYTES);
        let more = wanted.saturating_sub(FREE_BYTES) - held;
        if more > 0 {
            let room = intake.take(more, kept)?;
            match &mut self.room {
                Some(own) => own.merge(room),
                None => self.room = Some(room),
            }
        }
        self.bytes.reserve_exact(wanted - self.bytes.len());
        Ok(())
    }
}

impl Default for Intake {
    fn default() -> Intake {
        Intake(Arc::new(Semaphore::new(ROOM_BYTES)))
    }
}

impl Intake {
    fn take(&self, bytes: usize, kept: usize) -> Result<OwnedSemaphorePermit, Error> {
        let full = || Error::new(Code::Unavailable, "the host has no room for more large bodies; ask again");
        let has_room = self.0.available_permits() >= kept + bytes;
        let bytes = u32::try_from(bytes).expect("a body is small");
        if has_room { Arc::clone(&self.0).try_acquire_many_owned(bytes).map_err(|_| full()) } else { Err(full()) }
    }

    /// All of a body; `kept` bytes of the room are for others. One that `is_wanted` by nobody is thrown away as it comes.
    ///
    /// # Errors
    /// It is too large, breaks off, or there is no room.
    pub async fn read(&self, body: Body, is_wanted: bool, kept: usize) -> Result<Whole, Refusal> {
        let too_large = || {
            let why = format!("a body has {BODY_BYTES_MAX} bytes at most");
            refused(StatusCode::PAYLOAD_TOO_LARGE, Code::Invalid, why)
        };
        if body.size_hint().lower() > BODY_BYTES_MAX as u64 {
            return Err(too_large());
        }
        let (mut parts, mut whole, mut len) = (body.into_data_stream(), Whole::default(), 0);
        while let Some(part) = parts.next().await {
            let broken = |why| refused(StatusCode::BAD_REQUEST, Code::Invalid, format!("the body breaks off: {why}"));
            let part = part.map_err(broken)?;
            len += part.len();
            if len > BODY_BYTES_MAX {
                return Err(too_large());
            }
            if is_wanted {
                whole.grow(len, self, kept)?;
                whole.bytes.extend_from_slice(&part);
            }
        }
        Ok(whole)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::Bytes;
    use futures_util::stream;
    use std::convert::Infallible;

    fn read(intake: &Intake, part: usize, parts: usize, kept: usize) -> Result<Whole, Refusal> {
        let parts = stream::iter((0..parts).map(move |_| Ok::<_, Infallible>(Bytes::from(vec![7; part]))));
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(intake.read(Body::from_stream(parts), true, kept))
    }

    #[test]
    fn memory_is_taken_as_parts_come_and_given_back() {
        let intake = Intake::default();
        let small = read(&intake, 1, FREE_BYTES, ROOM_BYTES).ok().expect("it has its own");
        assert_eq!((small.bytes.len(), small.bytes.capacity()), (FREE_BYTES, FREE_BYTES));
        assert_eq!(intake.0.available_permits(), ROOM_BYTES);
        let whole = read(&intake, 1000, 1000, 0).ok().expect("there is room");
        assert_eq!((whole.bytes.len(), whole.bytes.capacity()), (1_000_000, BODY_BYTES_MAX));
        assert_eq!(intake.0.available_permits(), ROOM_BYTES - (BODY_BYTES_MAX - FREE_BYTES));
        drop(whole);
        assert_eq!(intake.0.available_permits(), ROOM_BYTES);
    }

    #[test]
    fn large_ones_leave_what_is_kept_and_small_ones_get_in() {
        let intake = Intake::default();
        let kept = ROOM_BYTES / 2;
        let mut all = Vec::new();
        let refusal = loop {
            match read(&intake, BODY_BYTES_MAX / 2, 2, kept) {
                Ok(whole) => all.push(whole),
                Err(refusal) => break refusal,
            }
        };
        assert_eq!((all.len(), refusal.status), (4, StatusCode::SERVICE_UNAVAILABLE));
        assert!(intake.0.available_permits() >= kept);
        assert!(read(&intake, 10, 100, kept).is_ok());
        assert!(read(&intake, BODY_BYTES_MAX, 1, 0).is_ok(), "others have room");
        let refusal = read(&intake, 1 << 10, 1025, 0).err().expect("it is too large");
        assert_eq!(refusal.status, StatusCode::PAYLOAD_TOO_LARGE);
    }
}
