//! One connection: what is being received and sent, and how it ends.
//!
//! States
//! ```text
//! Connecting --connected--> Open --close()--> Draining --all sent, peer closed, or linger over--> Dead
//!     |                      |                                                                     ^
//!     +--- failed, abort() --+--- peer closed, failed, abort() ------------------------------------+
//!                            |                                                                     |
//!                            +--detach()--> Detaching --failed, abort() ---------------------------+
//!                                               +--all sent, nothing being received--> another reactor's
//! ```
//! A dead connection stays in the table until the kernel has completed everything that it still does for it.

use super::outbox::Outbox;
use super::patience::Patience;
use super::{ConnError, ListenerId};
use holdfast_base::BufMut;
use socket2::SockAddr;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    Connecting,
    Open,
    /// The application has let go; what is queued is still sent.
    Draining {
        /// All is sent, and the peer told so: its own end is awaited, lest unread bytes turn our close into a reset.
        flushed: bool,
    },
    /// It goes to another reactor, once the kernel has done with it here. What is received until then goes along.
    Detaching,
    Dead,
}

/// What the receive in flight fills.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Receiving {
    Nothing,
    Arena,
    Sink,
}

/// A buffer that the application lends for a large payload.
pub(super) struct Sink {
    pub buf: BufMut,
    pub filled: usize,
}

pub(super) struct Conn {
    /// Absent only where the kernel refused to make one.
    pub socket: Option<OwnedFd>,
    pub state: State,
    /// Counts against this listener's bound.
    pub accepted_by: Option<ListenerId>,
    pub receiving: Receiving,
    pub sink: Option<Sink>,
    pub is_paused: bool,
    /// Received bytes are being handed over: the next receive waits, or it would overtake them.
    pub is_delivering: bool,
    /// The peer has sent its last byte, while ours are still on the way.
    pub is_ended: bool,
    /// Bytes that came while paused: at most what one receive takes, as no other is started.
    pub stash: Vec<u8>,
    pub outbox: Outbox,
    pub is_sending: bool,
    /// Already in the list of connections to flush at the end of the batch.
    pub is_dirty: bool,
    /// The last receive left the socket empty: the next one had better wait than try.
    pub is_drained: bool,
    /// Where it connects to; the kernel reads it until connected.
    pub address: Option<Box<SockAddr>>,
    /// Its peer may stop reading for as long as it likes.
    pub patience: Option<Patience>,
}

impl Conn {
    pub(super) fn new(socket: Option<OwnedFd>, state: State) -> Conn {
        Conn {
            socket,
            state,
            accepted_by: None,
            receiving: Receiving::Nothing,
            sink: None,
            is_paused: false,
            is_delivering: false,
            is_ended: false,
            stash: Vec::new(),
            outbox: Outbox::new(),
            is_sending: false,
            is_dirty: false,
            is_drained: true,
            address: None,
            patience: None,
        }
    }

    pub(super) fn fd(&self) -> RawFd {
        self.socket.as_ref().map_or(-1, AsRawFd::as_raw_fd)
    }

    /// The kernel still works on memory of this connection.
    pub(super) fn is_in_kernel(&self) -> bool {
        self.is_sending || self.receiving != Receiving::Nothing || self.address.is_some()
    }

    /// The application still gets events of it.
    pub(super) fn is_known(&self) -> bool {
        matches!(self.state, State::Connecting | State::Open | State::Detaching)
    }

    /// Moves as much of `bytes` as fits into the sink; returns how much that was.
    pub(super) fn fill_sink(&mut self, bytes: &[u8]) -> usize {
        let Some(sink) = &mut self.sink else { return 0 };
        let room = &mut sink.buf[sink.filled..];
        let count = room.len().min(bytes.len());
        room[..count].copy_from_slice(&bytes[..count]);
        sink.filled += count;
        count
    }

    /// The sink's buffer, if it is full.
    pub(super) fn take_full_sink(&mut self) -> Option<BufMut> {
        self.sink.take_if(|sink| sink.filled == sink.buf.len()).map(|sink| sink.buf)
    }
}

/// What a failed socket operation means for its connection.
pub(super) fn conn_error(error: &std::io::Error) -> ConnError {
    use std::io::ErrorKind;
    match error.kind() {
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::ConnectionAborted => ConnError::Reset,
        ErrorKind::ConnectionRefused => ConnError::Refused,
        ErrorKind::TimedOut => ConnError::TimedOut,
        _ => ConnError::System(error.raw_os_error().unwrap_or(libc::EIO)),
    }
}
