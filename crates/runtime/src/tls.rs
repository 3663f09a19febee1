//! TLS without I/O: ciphertext in, plaintext out, and the other way round.
//!
//! Role: sits between a connection's bytes and its protocol: NBD after STARTTLS, and the links between hosts and nodes
//! ([`link`]). The caller sends whatever [`TlsStream::take_ciphertext`] holds after each call.
//!
//! Limits: a stream holds at most one record that is incomplete (16 KiB and its header), or a message of a handshake that
//! is in several ([`HANDSHAKE_BYTES_MAX`]), and what the caller has not taken; it refuses nothing that the caller gives it
//! to encrypt. A peer that has not finished its handshake within [`HANDSHAKE_BYTES_MAX`] gets no further; until then no
//! plaintext is passed on.
//!
//! Faults: a broken or unauthenticated peer is an error, after which the alert to send is still to be taken, and
//! nothing else is to be done with the stream but dropping it.

pub mod link;
mod session;

pub use session::sealed_bytes_max;

use crate::pki;
use rustls::crypto::ring;
use rustls::server::{NoServerSessionStorage, UnbufferedServerConnection, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig};
use rustls_pki_types::pem::{self, PemObject};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use session::{Session, Stage};
use std::fmt;
use std::io::IoSlice;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use thiserror::Error;

/// What a peer may send before its handshake is done: two of the longest messages that TLS has, though real ones have a
/// few kilobytes.
pub const HANDSHAKE_BYTES_MAX: usize = 128 * 1024;

/// Sizes of RSA keys that `ring` signs with: it wants both primes to be multiples of 512 bits.
const RSA_BITS: [usize; 3] = [2048, 3072, 4096];

/// Why there is no TLS, or no longer: what, why, and what to do.
#[derive(Debug, Error)]
pub enum TlsError {
    #[error("cannot read {what} from {path}: {why}; give the path of a PEM file that this user may read")]
    File { what: &'static str, path: PathBuf, why: String },
    #[error("{path} holds no {what}; give a PEM file with at least one")]
    Empty { what: &'static str, path: PathBuf },
    #[error("the key in {key} does not go with the certificate in {certificate}: {source}; give the pair's other half")]
    Mismatch { certificate: PathBuf, key: PathBuf, source: rustls::Error },
    #[error("the key in {key} can't be used: {why}")]
    Key { key: PathBuf, why: String },
    #[error("the client CA in {path} can't be used: {why}; give the CA certificate itself, in PEM")]
    ClientCa { path: PathBuf, why: String },
    #[error("the TLS session failed: {0}; check the client's certificate, and that it speaks TLS 1.2 or 1.3")]
    Session(#[from] rustls::Error),
    #[error(
        "the peer sent {HANDSHAKE_BYTES_MAX} bytes without finishing its TLS handshake; check what it is that connects"
    )]
    Endless,
    #[error("the certificate in {path} is {found}'s, and this is {wanted}: give it its own, or have that made anew")]
    NotOurs { path: PathBuf, found: String, wanted: String },
    /// The whole text, as [`link`] makes it.
    #[error("{0}")]
    Link(String),
}

/// Where a server's credentials are.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TlsPaths {
    /// The server's certificate, with any intermediate ones after it.
    pub certificate: PathBuf,
    /// The key that goes with it.
    pub key: PathBuf,
    /// Where it is set, clients are asked for a certificate of this CA.
    pub client_ca: Option<PathBuf>,
    /// Clients without any are let in all the same: by something else they may be known.
    pub lets_unnamed_in: bool,
}

/// Credentials that may be replaced while they are used: what was begun with the old ones stays as it is.
struct Current<T>(Arc<RwLock<Arc<T>>>);

impl<T> Clone for Current<T> {
    fn clone(&self) -> Current<T> {
        Current(Arc::clone(&self.0))
    }
}

impl<T> Current<T> {
    fn new(first: T) -> Current<T> {
        Current(Arc::new(RwLock::new(Arc::new(first))))
    }

    fn get(&self) -> Arc<T> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn replace(&self, next: T) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(next);
    }
}

/// Loaded credentials; clones share them.
#[derive(Clone)]
pub struct TlsServer(Current<ServerConfig>);

impl fmt::Debug for TlsServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TlsServer")
    }
}

impl TlsServer {
    /// Reads them, and finds what does not go together.
    pub fn load(paths: &TlsPaths) -> Result<TlsServer, TlsError> {
        TlsServer::read(paths).map(|config| TlsServer(Current::new(config)))
    }

    /// As they are now.
    pub fn config(&self) -> Arc<ServerConfig> {
        self.0.get()
    }

    /// Takes what lies there, from the next session on; where that can't be used, all stays as it is.
    pub fn reload(&self, paths: &TlsPaths) -> Result<(), TlsError> {
        self.0.replace(TlsServer::read(paths)?);
        Ok(())
    }

    fn read(paths: &TlsPaths) -> Result<ServerConfig, TlsError> {
        let provider = Arc::new(ring::default_provider());
        let chain = certificates("a certificate", &paths.certificate)?;
        let key = PrivateKeyDer::from_pem_file(&paths.key).map_err(|e| pem_error("a private key", &paths.key, e))?;
        if let Some(why) = why_unusable(&chain, &key) {
            return Err(TlsError::Key { key: paths.key.clone(), why });
        }
        let builder =
            ServerConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions()?;
        let builder = match &paths.client_ca {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let unusable = |why: String| TlsError::ClientCa { path: path.clone(), why };
                let mut roots = RootCertStore::empty();
                for certificate in certificates("a certificate", path)? {
                    roots.add(certificate).map_err(|e| unusable(e.to_string()))?;
                }
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
                let verifier = if paths.lets_unnamed_in { verifier.allow_unauthenticated() } else { verifier };
                builder.with_client_cert_verifier(verifier.build().map_err(|e| unusable(e.to_string()))?)
            }
        };
        let mut config = builder.with_single_cert(chain, key).map_err(|source| TlsError::Mismatch {
            certificate: paths.certificate.clone(),
            key: paths.key.clone(),
            source,
        })?;
        // Sessions are not resumed: each connection shows a certificate that is good now.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(config)
    }
}

/// Why a key can't be used whatever the certificate is, and what to do; the size of an RSA key is told from the
/// certificate.
fn why_unusable(chain: &[CertificateDer<'_>], key: &PrivateKeyDer<'_>) -> Option<String> {
    const HOW: &str = "make another one, and have a certificate made for it (`openssl req -new -newkey rsa:3072 -nodes -keyout \
                       key.pem -out request.pem` makes a key, and what its authority has to sign)";
    let error = ring::sign::any_supported_type(key).err()?;
    Some(match chain.first().and_then(|certificate| pki::rsa_bits(certificate)) {
        Some(bits) if !RSA_BITS.contains(&bits) => {
            let [least, middle, most] = RSA_BITS;
            format!("it is an RSA key of {bits} bits, and RSA keys have to have {least}, {middle} or {most}; {HOW}")
        }
        _ => format!(
            "{error}; RSA keys of 2048, 3072 or 4096 bits, ECDSA keys (P-256, P-384) and Ed25519 keys can; {HOW}"
        ),
    })
}

/// As for [`TlsServer::load`], of texts in PEM: why the key of a certificate can't be used.
pub fn why_unusable_pem(certificate: &[u8], key: &[u8]) -> Option<String> {
    let chain: Vec<_> = CertificateDer::pem_slice_iter(certificate).collect::<Result<_, _>>().ok()?;
    why_unusable(&chain, &PrivateKeyDer::from_pem_slice(key).ok()?)
}

fn certificates(what: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let found = CertificateDer::pem_file_iter(path)
        .and_then(|all| all.collect::<Result<Vec<_>, _>>())
        .map_err(|e| pem_error(what, path, e))?;
    if found.is_empty() {
        return Err(TlsError::Empty { what, path: path.into() });
    }
    Ok(found)
}

fn pem_error(what: &'static str, path: &Path, error: pem::Error) -> TlsError {
    match error {
        pem::Error::NoItemsFound => TlsError::Empty { what, path: path.into() },
        pem::Error::Io(e) => TlsError::File { what, path: path.into(), why: e.to_string() },
        other => TlsError::File { what, path: path.into(), why: other.to_string() },
    }
}

/// One session, from the first byte of the client's hello.
pub struct TlsStream {
    session: Session,
    /// What has come and can't be opened yet: the front of a record, or of a message of the handshake.
    pending: Vec<u8>,
    /// Said before the session could encrypt it.
    held: Vec<u8>,
    ciphertext: Vec<u8>,
    failure: Option<rustls::Error>,
    /// Between a host and a node: what fails is told in their words.
    is_link: bool,
    /// It encrypts.
    is_open: bool,
    is_ended: bool,
    is_closed: bool,
    handshake_bytes: usize,
}

impl fmt::Debug for TlsStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TlsStream(handshaking: {}, ended: {})", self.is_handshaking(), self.is_ended)
    }
}

impl TlsStream {
    /// A server's side of a session with any client that its credentials let in.
    pub fn new(server: &TlsServer) -> Result<TlsStream, TlsError> {
        Ok(TlsStream::over(UnbufferedServerConnection::new(server.0.get())?.into(), false))
    }

    fn over(session: Session, is_link: bool) -> TlsStream {
        let mut stream = TlsStream {
            session,
            pending: Vec::new(),
            held: Vec::new(),
            ciphertext: Vec::new(),
            failure: None,
            is_link,
            is_open: false,
            is_ended: false,
            is_closed: false,
            handshake_bytes: 0,
        };
        // A client says hello of its own accord.
        let _ = stream.advance(&mut [], &mut |_| {});
        stream
    }

    /// Nobody is known yet, and nothing was said.
    pub fn is_handshaking(&self) -> bool {
        self.session.state().is_handshaking()
    }

    /// The client has said that nothing more follows; a connection that closes without that was cut.
    pub fn is_ended(&self) -> bool {
        self.is_ended
    }

    fn error(&self, error: rustls::Error) -> TlsError {
        if self.is_link { TlsError::Link(link::text(&error)) } else { TlsError::Session(error) }
    }

    /// Takes all of `ciphertext`, and appends to `plaintext` what it holds.
    pub fn on_ciphertext(&mut self, ciphertext: &mut [u8], plaintext: &mut Vec<u8>) -> Result<(), TlsError> {
        self.open(ciphertext, |part| plaintext.extend_from_slice(part))
    }

    /// Takes all of `ciphertext`, and passes on what it holds, a record at a time. Records are opened where they lie;
    /// only what waits for its rest is copied.
    pub fn open(&mut self, mut ciphertext: &mut [u8], mut pass_on: impl FnMut(&[u8])) -> Result<(), TlsError> {
        if let Some(failure) = &self.failure {
            return Err(self.error(failure.clone()));
        }
        if self.is_handshaking() {
            self.handshake_bytes += ciphertext.len();
        }
        while !ciphertext.is_empty() && !self.is_ended {
            if self.pending.is_empty() {
                let done = self.advance(ciphertext, &mut pass_on)?;
                self.pending.extend_from_slice(&ciphertext[done..]);
                break;
            }
            let (head, tail) = ciphertext.split_at_mut(rest_of_record(&self.pending).min(ciphertext.len()));
            self.pending.extend_from_slice(head);
            ciphertext = tail;
            let mut pending = std::mem::take(&mut self.pending);
            let done = self.advance(&mut pending, &mut pass_on)?;
            pending.drain(..done);
            self.pending = pending;
        }
        self.send_held();
        let is_endless = self.is_handshaking() && self.handshake_bytes > HANDSHAKE_BYTES_MAX;
        if is_endless || self.pending.len() > HANDSHAKE_BYTES_MAX { Err(TlsError::Endless) } else { Ok(()) }
    }

    /// Does all that can be done with what has come; returns how many bytes from the front are done with.
    fn advance(&mut self, came: &mut [u8], pass_on: &mut dyn FnMut(&[u8])) -> Result<usize, TlsError> {
        let mut done = 0;
        loop {
            let (count, stage) = self.session.step(&mut came[done..], &mut self.ciphertext, pass_on);
            done += count;
            match stage {
                Ok(Stage::More) => {}
                Ok(Stage::Waiting) => return Ok(done),
                Ok(Stage::Open) => {
                    self.is_open = true;
                    return Ok(done);
                }
                Ok(Stage::Ended) => {
                    self.is_ended = true;
                    // All in one go: what ends the handshake, what is asked, and that nothing follows.
                    self.is_open |= !self.is_handshaking();
                    return Ok(came.len());
                }
                Err(error) => {
                    self.failure = Some(error.clone());
                    self.take_alert_before(&mut came[done..]);
                    return Err(self.error(error));
                }
            }
        }
    }

    fn take_alert(&mut self) {
        let mut pending = std::mem::take(&mut self.pending);
        self.take_alert_before(&mut pending);
        self.pending = pending;
    }

    /// Has the alert that tells the peer sent. A step too far would have the session judge what follows.
    fn take_alert_before(&mut self, rest: &mut [u8]) {
        while self.session.state().wants_write() {
            let before = self.ciphertext.len();
            let _ = self.session.step(rest, &mut self.ciphertext, &mut |_| {});
            if self.ciphertext.len() == before {
                break;
            }
        }
    }

    fn send_held(&mut self) {
        if self.is_open && !self.held.is_empty() {
            let held = std::mem::take(&mut self.held);
            self.send(&held);
        }
    }

    /// Encrypts `plaintext`; during the handshake it waits for its end.
    pub fn send(&mut self, plaintext: &[u8]) {
        self.append([plaintext].into_iter());
    }

    /// As [`TlsStream::send`], of parts that follow each other: small ones share a record. Nothing is sent on a session
    /// that has failed.
    pub fn send_parts(&mut self, parts: &[IoSlice<'_>]) {
        self.append(parts.iter().map(|part| &part[..]));
    }

    fn append<'a>(&mut self, parts: impl Iterator<Item = &'a [u8]> + Clone) {
        let mut ciphertext = std::mem::take(&mut self.ciphertext);
        let at = ciphertext.len();
        ciphertext.resize(at + sealed_bytes_max(parts.clone().map(<[u8]>::len).sum()), 0);
        let sealed = self.seal(parts, &mut ciphertext[at..]);
        ciphertext.truncate(at + sealed);
        // An alert, where it failed.
        ciphertext.append(&mut self.ciphertext);
        self.ciphertext = ciphertext;
    }

    /// As [`TlsStream::send_parts`], into memory of the caller's: `out` has room for as much as [`sealed_bytes_max`] says,
    /// and holds what is returned. What [`TlsStream::take_ciphertext`] gives goes before it.
    pub fn seal<'a>(&mut self, parts: impl Iterator<Item = &'a [u8]>, out: &mut [u8]) -> usize {
        if self.failure.is_some() {
            return 0;
        }
        if !self.is_open {
            parts.for_each(|part| self.held.extend_from_slice(part));
            return 0;
        }
        let sealed = self.session.write(&mut self.pending, |writer| session::seal(writer, parts, out));
        match sealed {
            Some(Ok(count)) => count,
            Some(Err(error)) => {
                // No more may be said with this key, for one. The peer is told.
                self.failure = Some(rustls::Error::General(error.to_string()));
                self.take_alert();
                0
            }
            None if self.is_ended && self.is_closed => 0,
            None => {
                self.failure = Some(rustls::Error::General("the session takes nothing more".to_string()));
                0
            }
        }
    }

    /// Tells the client that nothing more follows. Before its handshake is done it is told nothing.
    pub fn close(&mut self) {
        if self.failure.is_none() && self.is_open {
            let at = self.ciphertext.len();
            self.ciphertext.resize(at + sealed_bytes_max(0), 0);
            let out = &mut self.ciphertext[at..];
            let closed = self.session.write(&mut self.pending, |writer| writer.close(out));
            let count = closed.and_then(Result::ok).unwrap_or(0);
            self.ciphertext.truncate(at + count);
            self.is_closed = true;
        }
    }

    /// What is to be sent to the client now: appended to `ciphertext`.
    pub fn take_ciphertext(&mut self, ciphertext: &mut Vec<u8>) {
        if ciphertext.is_empty() {
            std::mem::swap(ciphertext, &mut self.ciphertext);
        } else {
            ciphertext.append(&mut self.ciphertext);
        }
    }
}

/// How much completes the record that `pending` begins; at least a byte. Where that is there in full, it waits for
/// another, and how long that is nobody knows.
fn rest_of_record(pending: &[u8]) -> usize {
    const HEADER_BYTES: usize = 5;
    let Some(header) = pending.first_chunk::<HEADER_BYTES>() else { return HEADER_BYTES - pending.len() };
    let len = HEADER_BYTES + usize::from(u16::from_be_bytes([header[3], header[4]]));
    if len > pending.len() { len - pending.len() } else { usize::MAX }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
    use rustls::{ClientConfig, ClientConnection};
    use std::fs;
    use std::io::{Read, Write};

    struct Credentials {
        dir: tempfile::TempDir,
        ca: CertificateDer<'static>,
        client: (CertificateDer<'static>, PrivateKeyDer<'static>),
    }

    impl Credentials {
        fn new() -> Credentials {
            let mut params = CertificateParams::new(Vec::new()).unwrap();
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
            let issue = |name: &str| {
                let key = KeyPair::generate().unwrap();
                (CertificateParams::new(vec![name.into()]).unwrap().signed_by(&key, &ca).unwrap(), key)
            };
            let (server, server_key) = issue("grid.test");
            let (client, client_key) = issue("client.test");
            let dir = tempfile::tempdir().unwrap();
            fs::write(dir.path().join("cert.pem"), server.pem()).unwrap();
            fs::write(dir.path().join("key.pem"), server_key.serialize_pem()).unwrap();
            fs::write(dir.path().join("ca.pem"), ca.pem()).unwrap();
            fs::write(dir.path().join("other.pem"), client_key.serialize_pem()).unwrap();
            let client_key = PrivateKeyDer::try_from(client_key.serialize_der()).unwrap();
            Credentials { dir, ca: ca.der().clone(), client: (client.der().clone(), client_key) }
        }

        fn paths(&self, with_clients: bool) -> TlsPaths {
            let path = |name: &str| self.dir.path().join(name);
            let client_ca = with_clients.then(|| path("ca.pem"));
            TlsPaths { certificate: path("cert.pem"), key: path("key.pem"), client_ca, lets_unnamed_in: false }
        }

        fn client(&self, with_certificate: bool) -> ClientConnection {
            let mut roots = RootCertStore::empty();
            roots.add(self.ca.clone()).unwrap();
            let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
                .with_safe_default_protocol_versions()
                .unwrap()
                .with_root_certificates(roots);
            let config = if with_certificate {
                config.with_client_auth_cert(vec![self.client.0.clone()], self.client.1.clone_key()).unwrap()
            } else {
                config.with_no_client_auth()
            };
            ClientConnection::new(Arc::new(config), "grid.test".try_into().unwrap()).unwrap()
        }
    }

    /// Passes everything between the two until neither has more, in pieces of `piece` bytes; returns both plaintexts.
    fn exchange(
        server: &mut TlsStream,
        client: &mut ClientConnection,
        piece: usize,
    ) -> Result<(Vec<u8>, Vec<u8>), TlsError> {
        let (mut at_server, mut at_client) = (Vec::new(), Vec::new());
        loop {
            let (mut up, mut down) = (Vec::new(), Vec::new());
            while client.wants_write() {
                client.write_tls(&mut up).unwrap();
            }
            for bytes in up.chunks_mut(piece) {
                server.on_ciphertext(bytes, &mut at_server)?;
            }
            server.take_ciphertext(&mut down);
            if up.is_empty() && down.is_empty() {
                return Ok((at_server, at_client));
            }
            let mut rest = down.as_slice();
            while !rest.is_empty() {
                client.read_tls(&mut rest).unwrap();
                client.process_new_packets()?;
                // Ends with "would block" when all is read.
                let _ = client.reader().read_to_end(&mut at_client);
            }
        }
    }

    #[test]
    fn bytes_go_both_ways_in_any_pieces() {
        let credentials = Credentials::new();
        for (with_clients, piece) in [(false, 1), (true, 7), (true, 100_000)] {
            let tls = TlsServer::load(&credentials.paths(with_clients)).unwrap();
            let mut server = TlsStream::new(&tls).unwrap();
            let mut client = credentials.client(with_clients);
            server.send(b"said before the handshake was done");
            let (_, greeting) = exchange(&mut server, &mut client, piece).unwrap();
            assert!(!server.is_handshaking());
            assert_eq!(greeting, b"said before the handshake was done");
            let payload: Vec<u8> = (0..300_000_u32).map(|n| (n * 7) as u8).collect();
            client.set_buffer_limit(None);
            client.writer().write_all(&payload).unwrap();
            server.send(&payload);
            let (up, down) = exchange(&mut server, &mut client, piece).unwrap();
            assert!(up == payload && down == payload);
            client.send_close_notify();
            server.close();
            exchange(&mut server, &mut client, piece).unwrap();
            assert!(server.is_ended());
        }
    }

    /// Writes a self-signed certificate for an RSA key of so many bits, and that.
    fn make_rsa(dir: &Path, bits: usize) -> TlsPaths {
        let path = |name: &str| dir.join(format!("{bits}-{name}.pem"));
        let paths = TlsPaths { certificate: path("cert"), key: path("key"), client_ca: None, lets_unnamed_in: false };
        let mut openssl = std::process::Command::new("openssl");
        openssl.args([
            "req",
            "-x509",
            "-newkey",
            &format!("rsa:{bits}"),
            "-nodes",
            "-subj",
            "/CN=grid.test",
            "-keyout",
        ]);
        let made = openssl.arg(&paths.key).arg("-out").arg(&paths.certificate).output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        paths
    }

    #[test]
    fn rsa_keys_of_other_sizes_are_refused_with_the_reason() {
        let dir = tempfile::tempdir().unwrap();
        for bits in RSA_BITS {
            TlsServer::load(&make_rsa(dir.path(), bits)).unwrap();
        }
        for bits in [1024, 2432, 2560] {
            let paths = make_rsa(dir.path(), bits);
            let error = TlsServer::load(&paths).unwrap_err().to_string();
            assert!(error.contains(&format!("RSA key of {bits} bits")) && error.contains("openssl req"), "{error}");
            let read = |path| fs::read(path).unwrap();
            assert!(why_unusable_pem(&read(&paths.certificate), &read(&paths.key)).is_some());
        }
        let (small, large) = (make_rsa(dir.path(), 2048), make_rsa(dir.path(), 3072));
        let error = TlsServer::load(&TlsPaths { key: large.key, ..small }).unwrap_err();
        assert!(matches!(error, TlsError::Mismatch { .. }), "{error}");
    }

    /// What ends the handshake, a request, and that nothing follows: a client that is in a hurry.
    #[test]
    fn all_that_a_client_says_in_one_go_is_answered() {
        let credentials = Credentials::new();
        let mut server = TlsStream::new(&TlsServer::load(&credentials.paths(true)).unwrap()).unwrap();
        let mut client = credentials.client(true);
        let say = |client: &mut ClientConnection, server: &mut TlsStream| {
            let (mut up, mut heard) = (Vec::new(), Vec::new());
            while client.wants_write() {
                client.write_tls(&mut up).unwrap();
            }
            server.on_ciphertext(&mut up, &mut heard).unwrap();
            heard
        };
        let hear = |client: &mut ClientConnection, server: &mut TlsStream| {
            let (mut down, mut heard) = (Vec::new(), Vec::new());
            server.take_ciphertext(&mut down);
            let mut rest = down.as_slice();
            while !rest.is_empty() {
                client.read_tls(&mut rest).unwrap();
                client.process_new_packets().unwrap();
                let _ = client.reader().read_to_end(&mut heard);
            }
            heard
        };
        assert!(say(&mut client, &mut server).is_empty());
        assert!(hear(&mut client, &mut server).is_empty());
        client.writer().write_all(b"a request").unwrap();
        client.send_close_notify();
        assert_eq!(say(&mut client, &mut server), b"a request");
        assert!(server.is_ended() && !server.is_handshaking());
        server.send(b"its answer");
        server.close();
        assert_eq!(hear(&mut client, &mut server), b"its answer");
        // Nothing more goes out, and nothing is kept.
        server.send(b"more");
        assert!(hear(&mut client, &mut server).is_empty() && server.held.is_empty());
    }

    #[test]
    fn keys_are_renewed_when_a_client_asks_for_that() {
        let credentials = Credentials::new();
        let mut server = TlsStream::new(&TlsServer::load(&credentials.paths(false)).unwrap()).unwrap();
        let mut client = credentials.client(false);
        exchange(&mut server, &mut client, 4096).unwrap();
        for round in 0..3_u8 {
            client.refresh_traffic_keys().unwrap();
            client.writer().write_all(&[round; 100]).unwrap();
            server.send(&[round; 20_000]);
            let (up, down) = exchange(&mut server, &mut client, 7).unwrap();
            assert!(up == [round; 100] && down == [round; 20_000]);
            // Its new keys go before the next that is said.
            server.send(&[round; 10]);
            let (_, down) = exchange(&mut server, &mut client, 7).unwrap();
            assert_eq!(down, [round; 10]);
        }
    }

    #[test]
    fn a_client_without_a_certificate_is_turned_away_where_one_is_due() {
        let credentials = Credentials::new();
        let mut server = TlsStream::new(&TlsServer::load(&credentials.paths(true)).unwrap()).unwrap();
        let error = exchange(&mut server, &mut credentials.client(false), 4096).unwrap_err();
        assert!(error.to_string().contains("certificate"), "{error}");
        let mut alert = Vec::new();
        server.take_ciphertext(&mut alert);
        assert!(!alert.is_empty(), "the client is told why");
    }

    #[test]
    fn what_is_no_hello_is_an_error() {
        let credentials = Credentials::new();
        let mut server = TlsStream::new(&TlsServer::load(&credentials.paths(false)).unwrap()).unwrap();
        let error = server.on_ciphertext(&mut b"GET / HTTP/1.1\r\n\r\n".to_vec(), &mut Vec::new()).unwrap_err();
        assert!(matches!(error, TlsError::Session(_)), "{error}");
    }

    #[test]
    fn bad_files_are_named_with_the_reason() {
        let credentials = Credentials::new();
        let file = |name: &str| credentials.dir.path().join(name);
        let good = credentials.paths(true);
        let load = |paths: &TlsPaths| TlsServer::load(paths).unwrap_err();
        let error = load(&TlsPaths { certificate: file("none.pem"), ..good.clone() });
        assert!(error.to_string().contains("none.pem") && matches!(error, TlsError::File { .. }), "{error}");
        let error = load(&TlsPaths { certificate: file("key.pem"), ..good.clone() });
        assert!(matches!(error, TlsError::Empty { .. }), "{error}");
        let error = load(&TlsPaths { key: file("cert.pem"), ..good.clone() });
        assert!(matches!(error, TlsError::Empty { what: "a private key", .. }), "{error}");
        let error = load(&TlsPaths { key: file("other.pem"), ..good.clone() });
        assert!(matches!(error, TlsError::Mismatch { .. }), "{error}");
        let error = load(&TlsPaths { client_ca: Some(file("key.pem")), ..good });
        assert!(matches!(error, TlsError::Empty { .. }), "{error}");
    }
}
