//! Connections between the processes of a grid: frames over a socket, secured where links have TLS.
//!
//! Role: one end of a connection between a host and a node, two nodes, or two hosts. It turns bytes into frames of `M`, and
//! messages into bytes. What they mean, and what becomes of a connection that fails, is its owner's business.
//!
//! Large payloads are received in place, but for what comes encrypted.
//!
//! Faults: bytes that are no frame end what can be read, once and for all ([`Framed::settle`] says so).

use crate::pki::Identity;
use crate::reactor::{ConnId, Io};
use crate::revoked::RevokedNow;
use crate::tls::{TlsError, TlsStream, sealed_bytes_max};
use holdfast_base::buf::total_len;
use holdfast_base::stream::Inbound;
use holdfast_base::{Buf, BufMut};
use holdfast_format::FormatError;
use holdfast_format::wire::{Beside, Frame, FrameReader, Message, encode_frame_with};

/// Bytes that are sealed on the stack, and copied next to what else is sent: requests, and answers without payload.
const SMALL_BYTES_MAX: usize = 1024;

/// What is said of a connection whose other side has such a certificate.
pub const REVOKED: &str = "its certificate was revoked; give it another one, if it is to be let in again";

/// The TLS session of a connection.
pub struct Secured {
    stream: TlsStream,
    ciphertext: Vec<u8>,
    revoked: RevokedNow,
}

impl Secured {
    /// One at its beginning, at either end.
    pub fn new(stream: TlsStream, revoked: RevokedNow) -> Box<Secured> {
        Box::new(Secured { stream, ciphertext: Vec::new(), revoked })
    }

    /// The other side has not shown who it is.
    fn is_handshaking(&self) -> bool {
        self.stream.is_handshaking()
    }

    /// Identity of the other side's certificate, once the handshake is done.
    fn peer(&self) -> Option<Identity> {
        self.stream.peer()
    }

    /// The other side's certificate was taken back since.
    fn is_revoked(&self) -> bool {
        self.revoked.covers_peer(&self.stream)
    }

    /// Takes received bytes, answers the handshake, and passes on what they hold. After an error the alert that tells
    /// the peer is queued.
    fn on_bytes(
        &mut self,
        conn: ConnId,
        bytes: &mut [u8],
        io: &mut Io,
        pass_on: impl FnMut(&[u8]),
    ) -> Result<(), TlsError> {
        let was_handshaking = self.is_handshaking();
        let opened = self.stream.open(bytes, pass_on);
        self.flush(conn, io);
        // The list may have changed since its certificate was looked at.
        if opened.is_ok() && was_handshaking && !self.is_handshaking() && self.is_revoked() {
            return Err(TlsError::Link(REVOKED.to_string()));
        }
        opened
    }

    /// Sends a frame; before the handshake is done it waits for that.
    fn send(&mut self, conn: ConnId, frame: &[u8], payload: &[Buf], io: &mut Io) {
        let len = frame.len() + total_len(payload);
        let parts = [frame].into_iter().chain(payload.iter().map(|part| &part[..]));
        let room = sealed_bytes_max(len);
        if room <= SMALL_BYTES_MAX {
            let mut sealed = [0; SMALL_BYTES_MAX];
            let count = self.stream.seal(parts, &mut sealed);
            self.flush(conn, io);
            return io.send(conn, &sealed[..count]);
        }
        // Of the pool: what is sealed is as large as what was read, and fresh memory costs more than sealing does.
        let mut sealed = BufMut::new(room);
        let count = self.stream.seal(parts, &mut sealed);
        self.flush(conn, io);
        io.send_buf(conn, sealed.freeze().slice(0..count));
    }

    /// Sends what the session itself has to say.
    fn flush(&mut self, conn: ConnId, io: &mut Io) {
        self.stream.take_ciphertext(&mut self.ciphertext);
        if !self.ciphertext.is_empty() {
            io.send_vec(conn, std::mem::take(&mut self.ciphertext));
        }
    }
}

/// One end of a connection; `M` is what the other end sends.
pub struct Framed<M> {
    conn: ConnId,
    reader: FrameReader<M>,
    secured: Option<Box<Secured>>,
}

impl<M: Message> Framed<M> {
    /// An end at its beginning: of a socket that is being connected, or was accepted.
    pub fn new(conn: ConnId, secured: Option<Box<Secured>>) -> Framed<M> {
        Framed { conn, reader: FrameReader::new(), secured }
    }

    pub fn conn(&self) -> ConnId {
        self.conn
    }

    /// The socket has come to another reactor, where its connection has this name.
    pub fn move_to(&mut self, conn: ConnId) {
        self.conn = conn;
    }

    /// Whether it has TLS.
    pub fn is_secured(&self) -> bool {
        self.secured.is_some()
    }

    /// The other side has not shown who it is.
    pub fn is_handshaking(&self) -> bool {
        self.secured.as_ref().is_some_and(|secured| secured.is_handshaking())
    }

    /// Identity of the other side's certificate, once it has shown one.
    pub fn peer(&self) -> Option<Identity> {
        self.secured.as_ref()?.peer()
    }

    /// The other side's certificate was taken back since.
    pub fn is_revoked(&self) -> bool {
        self.secured.as_ref().is_some_and(|secured| secured.is_revoked())
    }

    /// Takes received bytes; what is whole of them [`Framed::pop`] gives.
    ///
    /// # Errors
    /// The TLS session has failed; the alert that tells the other side is queued.
    pub fn on_bytes(&mut self, bytes: &mut [u8], io: &mut Io) -> Result<(), TlsError> {
        let Framed { conn, reader, secured } = self;
        match secured {
            None => {
                reader.on_bytes(bytes);
                Ok(())
            }
            Some(secured) => secured.on_bytes(*conn, bytes, io, |part| reader.on_bytes(part)),
        }
    }

    /// A payload that [`Framed::settle`] lent room for has come.
    pub fn on_filled(&mut self, buf: BufMut) {
        let filled = buf.len();
        self.reader.give_sink(buf, filled);
    }

    /// The next frame that is whole.
    pub fn pop(&mut self) -> Option<Frame<M>> {
        self.reader.pop()
    }

    /// Has the kernel fill what is large, when all whole frames were taken.
    ///
    /// # Errors
    /// What came is no frame: nothing more can be read.
    pub fn settle(&mut self, io: &mut Io) -> Result<(), FormatError> {
        if let Some(error) = self.reader.error() {
            return Err(error);
        }
        if self.secured.is_none()
            && let Some((buf, filled)) = self.reader.take_sink()
        {
            io.recv_into(self.conn, buf, filled);
        }
        Ok(())
    }

    /// Sends a message with its payload.
    pub fn send<S: Message>(&mut self, token: u64, message: &S, payload: Vec<Buf>, io: &mut Io) {
        self.send_with(token, message, payload, Beside::default(), io);
    }

    /// The same, of a frame that says more.
    pub fn send_with<S: Message>(&mut self, token: u64, message: &S, payload: Vec<Buf>, beside: Beside, io: &mut Io) {
        self.send_frame(encode_frame_with(token, message, total_len(&payload), beside), payload, io);
    }

    /// Sends a frame that is encoded already, and the payload that it tells of.
    pub fn send_frame(&mut self, frame: Vec<u8>, payload: Vec<Buf>, io: &mut Io) {
        if let Some(secured) = &mut self.secured {
            return secured.send(self.conn, &frame, &payload, io);
        }
        io.send_vec(self.conn, frame);
        for part in payload {
            io.send_buf(self.conn, part);
        }
    }
}
