//! TLS for clients that come over TCP: credentials, and the layer between a session and its connection.

use super::access::caller_of;
use crate::grid::certs::{finish, server_paths};
use crate::grid::renewal::Files;
use anyhow::Result;
use holdfast_base::{Buf, GridId};
use holdfast_host::Caller;
use holdfast_runtime::reactor::{ConnId, Io};
use holdfast_runtime::revoked::RevokedNow;
use holdfast_runtime::tls::link::LinkPaths;
use holdfast_runtime::tls::{TlsError, TlsPaths, TlsServer, TlsStream};
use std::path::Path;

/// Loads `server-cert.pem` and `server-key.pem`, and where there is a `ca-cert.pem`, lets in only clients that show a
/// certificate of that CA.
pub fn load(dir: &Path) -> Result<TlsServer> {
    Ok(TlsServer::load(&paths_in(dir, false))?)
}

/// `asks`: clients were asked for certificates before.
fn paths_in(dir: &Path, asks: bool) -> TlsPaths {
    let LinkPaths { ca, certificate, key } = server_paths(dir);
    TlsPaths { certificate, key, client_ca: (asks || ca.exists()).then_some(ca), lets_unnamed_in: false }
}

/// What the HTTP interface shows of itself, from such a directory; callers are judged by the grid's own authority, in
/// `ca`. What is put there later counts from the next connection on.
pub fn load_api_and_follow(dir: &Path, ca: &Path) -> Result<TlsServer> {
    let LinkPaths { certificate, key, .. } = server_paths(dir);
    finish(&server_paths(dir));
    let paths = TlsPaths { certificate, key, client_ca: Some(ca.to_path_buf()), lets_unnamed_in: true };
    let files = Files {
        what: format!("certificate of the HTTP interface in {}", dir.display()),
        paths: vec![paths.key.clone(), paths.certificate.clone(), ca.to_path_buf()],
        advice: "put the files there that go together",
    };
    let server = TlsServer::load(&paths)?;
    let followed = server.clone();
    files.follow(move || followed.reload(&paths).map_err(Into::into))?;
    Ok(server)
}

/// As [`load`], of a host that serves: what is put there later it uses from the next connection on. Clients that are
/// asked for certificates are asked still when the file is gone that says so: until the host's next start.
pub fn load_and_follow(dir: &Path) -> Result<TlsServer> {
    let paths = server_paths(dir);
    finish(&paths);
    let files = Files {
        what: format!("certificate of the NBD server in {}", dir.display()),
        paths: vec![paths.key, paths.certificate, paths.ca],
        advice: "put the files there that go together",
    };
    let (server, dir) = (load(dir)?, dir.to_path_buf());
    let (followed, mut asks) = (server.clone(), paths_in(&dir, false).client_ca.is_some());
    files.follow(move || {
        let paths = paths_in(&dir, asks);
        followed.reload(&paths)?;
        asks = paths.client_ca.is_some();
        Ok(())
    })?;
    Ok(server)
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
        caller_of(grid, self.stream.has_certificate(), self.stream.peer())
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
