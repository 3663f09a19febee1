//! A session of the library's, used without the library's buffers: records are opened where they lie, and sealed into
//! memory that the caller gives.
//!
//! Role: hides that clients' and servers' sessions are two types, and the states that both go through. What records are,
//! and what is in them, is the library's alone.
//!
//! Limits: [`RECORD_BYTES`] for each thread, in which small parts are put side by side.

use rustls::client::UnbufferedClientConnection;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, EncodeError, EncodeTlsData, EncryptError, UnbufferedStatus, WriteTraffic};
use rustls::{CommonState, Error};
use std::cell::RefCell;

/// What a record holds at most.
const RECORD_BYTES: usize = 16 * 1024;

/// What encryption adds to a record, and some: its header, its tag, and its kind or, before TLS 1.3, its nonce.
const RECORD_EXTRA_BYTES: usize = 32;

/// Room for a message of the session's own that goes before what is sealed: an update of keys, or an alert.
const OWN_BYTES: usize = 64;

thread_local! {
    static GATHERED: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Room that [`super::TlsStream::seal`] needs for `len` bytes.
pub fn sealed_bytes_max(len: usize) -> usize {
    len + len.div_ceil(RECORD_BYTES) * RECORD_EXTRA_BYTES + OWN_BYTES
}

/// Either end of a session.
pub(super) enum Session {
    Client(Box<UnbufferedClientConnection>),
    Server(Box<UnbufferedServerConnection>),
}

impl From<UnbufferedClientConnection> for Session {
    fn from(session: UnbufferedClientConnection) -> Session {
        Session::Client(Box::new(session))
    }
}

impl From<UnbufferedServerConnection> for Session {
    fn from(session: UnbufferedServerConnection) -> Session {
        Session::Server(Box::new(session))
    }
}

/// What a session can do after a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stage {
    /// Another step, with the same bytes.
    More,
    /// Nothing until more has come: its handshake is not done.
    Waiting,
    /// Encrypt; more may come.
    Open,
    /// The peer has said that nothing more follows.
    Ended,
}

/// Encrypts for one end of a session.
pub(super) trait Writer {
    /// Seals `plaintext`, in as many records as it takes; returns what `out` holds then.
    fn encrypt(&mut self, plaintext: &[u8], out: &mut [u8]) -> Result<usize, EncryptError>;

    /// Seals the message that nothing more follows.
    fn close(&mut self, out: &mut [u8]) -> Result<usize, EncryptError>;
}

impl<D> Writer for WriteTraffic<'_, D> {
    fn encrypt(&mut self, plaintext: &[u8], out: &mut [u8]) -> Result<usize, EncryptError> {
        WriteTraffic::encrypt(self, plaintext, out)
    }

    fn close(&mut self, out: &mut [u8]) -> Result<usize, EncryptError> {
        self.queue_close_notify(out)
    }
}

impl Session {
    pub(super) fn state(&self) -> &CommonState {
        match self {
            Session::Client(session) => session,
            Session::Server(session) => session,
        }
    }

    /// Goes one step on with what has come. What it wants sent is appended to `own`; what the next record holds goes to
    /// `pass_on`. Returns how many bytes from the front are done with.
    pub(super) fn step(
        &mut self,
        came: &mut [u8],
        own: &mut Vec<u8>,
        pass_on: &mut dyn FnMut(&[u8]),
    ) -> (usize, Result<Stage, Error>) {
        match self {
            Session::Client(session) => after(session.process_tls_records(came), own, pass_on),
            Session::Server(session) => after(session.process_tls_records(came), own, pass_on),
        }
    }

    /// Lends what encrypts, where the session is open. `came` is what has come and is not done with: sessions look at it
    /// whenever they are asked for anything.
    pub(super) fn write<R>(&mut self, came: &mut [u8], f: impl FnOnce(&mut dyn Writer) -> R) -> Option<R> {
        match self {
            Session::Client(session) => writer(session.process_tls_records(came)).map(|mut w| f(&mut w)),
            Session::Server(session) => writer(session.process_tls_records(came)).map(|mut w| f(&mut w)),
        }
    }
}

fn writer<'c, D>(status: UnbufferedStatus<'c, '_, D>) -> Option<WriteTraffic<'c, D>> {
    debug_assert_eq!(status.discard, 0, "all that could be done was done when it came");
    match status.state {
        Ok(ConnectionState::WriteTraffic(writer)) => Some(writer),
        _ => None,
    }
}

fn after<D>(
    status: UnbufferedStatus<'_, '_, D>,
    own: &mut Vec<u8>,
    pass_on: &mut dyn FnMut(&[u8]),
) -> (usize, Result<Stage, Error>) {
    let mut done = status.discard;
    let stage = match status.state {
        Ok(ConnectionState::ReadTraffic(mut traffic)) => loop {
            match traffic.next_record() {
                Some(Ok(record)) => {
                    done += record.discard;
                    pass_on(record.payload);
                }
                Some(Err(error)) => break Err(error),
                None => break Ok(Stage::More),
            }
        },
        Ok(ConnectionState::EncodeTlsData(data)) => {
            encode(data, own);
            Ok(Stage::More)
        }
        Ok(ConnectionState::TransmitTlsData(data)) => {
            data.done();
            Ok(Stage::More)
        }
        Ok(ConnectionState::BlockedHandshake) => Ok(Stage::Waiting),
        Ok(ConnectionState::WriteTraffic(_)) => Ok(Stage::Open),
        Ok(ConnectionState::PeerClosed | ConnectionState::Closed) => Ok(Stage::Ended),
        Ok(other) => Err(Error::General(format!("the session is in a state that nobody asked for: {other:?}"))),
        Err(error) => Err(error),
    };
    (done, stage)
}

fn encode<D>(mut data: EncodeTlsData<'_, D>, own: &mut Vec<u8>) {
    if let Err(EncodeError::InsufficientSize(room)) = data.encode(&mut []) {
        let at = own.len();
        own.resize(at + room.required_size, 0);
        data.encode(&mut own[at..]).expect("it has the room that it asked for");
    }
}

/// Seals `parts`, which follow each other, in as few records as hold them; returns what `out` holds then. Small parts are
/// put side by side first, which costs less than records of their own; what fills records is sealed from where it is.
pub(super) fn seal<'a>(
    writer: &mut dyn Writer,
    parts: impl Iterator<Item = &'a [u8]>,
    out: &mut [u8],
) -> Result<usize, EncryptError> {
    let mut parts = parts.peekable();
    GATHERED.with_borrow_mut(|gathered| {
        gathered.clear();
        let mut sealed = 0;
        while let Some(mut part) = parts.next() {
            if !gathered.is_empty() {
                let (head, tail) = part.split_at(part.len().min(RECORD_BYTES - gathered.len()));
                gathered.extend_from_slice(head);
                part = tail;
                if gathered.len() == RECORD_BYTES {
                    sealed += writer.encrypt(gathered, &mut out[sealed..])?;
                    gathered.clear();
                }
            }
            let is_last = parts.peek().is_none();
            let whole = if is_last { part.len() } else { part.len() - part.len() % RECORD_BYTES };
            let (whole, rest) = part.split_at(if gathered.is_empty() { whole } else { 0 });
            if !whole.is_empty() {
                sealed += writer.encrypt(whole, &mut out[sealed..])?;
            }
            gathered.extend_from_slice(rest);
        }
        if !gathered.is_empty() {
            sealed += writer.encrypt(gathered, &mut out[sealed..])?;
        }
        Ok(sealed)
    })
}
