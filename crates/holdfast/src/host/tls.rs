//! TLS for clients that come over TCP: credentials, and the layer between a session and its connection.

use super::access::Caller;
use anyhow::Result;
use holdfast_base::{Buf, GridId};
use holdfast_runtime::reactor::{ConnId, Io};
use holdfast_runtime::revoked::RevokedNow;
use holdfast_runtime::tls::{TlsError, TlsPaths, TlsServer, TlsStream};
use std::path::Path;

/// Loads `server-cert.pem` and `server-key.pem`, and where there is a `ca-cert.pem`, lets in only clients that show a
/// certificate of that CA.
pub fn load(dir: &Path) -> Result<TlsServer> {
    let client_ca = dir.join("ca-cert.pem");
    Ok(TlsServer::load(&TlsPaths {
        certificate: dir.join("server-cert.pem"),
        key: dir.join("server-key.pem"),
        client_ca: client_ca.exists().then_some(client_ca),
    })?)
}

/// The secured part of one connection.
pub struct Secured {
    stream: TlsStream,
    ciphertext: Vec<u8>,
    plaintext: Vec<u8>,
    started: bool,
}

/// What came of received bytes.
pub struct Opened {
    /// The handshake has just been completed.
    pub started: bool,
    /// What the client says: give it back with [`Secured::recycle`].
    pub plaintext: Vec<u8>,
}

impl Secured {
    pub fn new(server: &TlsServer) -> Result<Secured, TlsError> {
        Ok(Secured { stream: TlsStream::new(server)?, ciphertext: Vec::new(), plaintext: Vec::new(), started: false })
    }

    /// Who the client has shown to be.
    pub fn caller(&self, grid: GridId) -> Caller {
        Caller::of(grid, self.stream.has_certificate(), self.stream.peer())
    }

    /// The client's certificate was taken back.
    pub fn is_revoked(&self, revoked: &RevokedNow) -> bool {
        revoked.covers_peer(&self.stream)
    }

    pub fn is_started(&self) -> bool {
        self.started
    }

    pub fn on_bytes(&mut self, conn: ConnId, bytes: &mut [u8], io: &mut Io) -> Result<Opened, TlsError> {
        let mut plaintext = std::mem::take(&mut self.plaintext);
        let result = self.stream.on_ciphertext(bytes, &mut plaintext);
        // Answers of the handshake, or the alert that says why it failed.
        self.flush(conn, io);
        result?;
        let started = !self.started && !self.stream.is_handshaking();
        self.started |= started;
        Ok(Opened { started, plaintext })
    }

    pub fn recycle(&mut self, mut plaintext: Vec<u8>) {
        plaintext.clear();
        self.plaintext = plaintext;
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.send(bytes);
    }

    pub fn send_buf(&mut self, buf: &Buf) {
        self.stream.send(buf);
    }

    pub fn close(&mut self) {
        self.stream.close();
    }

    /// Hands over what is encrypted by now.
    pub fn flush(&mut self, conn: ConnId, io: &mut Io) {
        self.stream.take_ciphertext(&mut self.ciphertext);
        if !self.ciphertext.is_empty() {
            io.send_vec(conn, std::mem::take(&mut self.ciphertext));
        }
    }
}
