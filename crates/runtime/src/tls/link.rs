//! TLS on the links of a grid: each side shows a certificate of the grid's own authority, and each looks whose it is.
//!
//! Role: makes the two ends of a session. The serving end, a node's or a host's, lets in hosts of its grid, a node's other nodes as
//! well, and nobody else; the connecting end, a host's or a node's, goes on only with the very node or host that it meant to reach.
//! TLS 1.3 alone: all ends are of one release or the next.
//!
//! Invariants
//! 1. A session whose handshake is done is one with whom [`ServerTls`] or [`HostTls`] says: the authority has signed the
//!    certificate for that role in this grid (`pki::Identity`), and the peer has its key.
//! 2. Sessions are not resumed: a certificate is looked at on each connection, also whether it was revoked.
//!
//! Faults: what refuses a peer says what, why and what to do, for the log; the peer itself gets an alert.

use super::{Current, TlsError, TlsStream, certificates, pem_error};
use crate::pki::{Identity, Role, identity_of};
use crate::revoked::RevokedNow;
use holdfast_base::{GridId, NodeId};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, UnbufferedClientConnection, verify_server_cert_signed_by_trust_anchor};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, ring, verify_tls13_signature};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ParsedCertificate, UnbufferedServerConnection, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{
    AlertDescription, CertificateError, CipherSuite, ClientConfig, DigitallySignedStruct, DistinguishedName, Error,
    OtherError, RootCertStore, ServerConfig, SignatureScheme,
};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Where one process's credentials are.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LinkPaths {
    /// The grid's authority.
    pub ca: PathBuf,
    /// The process's own.
    pub certificate: PathBuf,
    /// That goes with it.
    pub key: PathBuf,
}

/// A certificate that is sound, and another's.
#[derive(Debug)]
struct Wrong(String);

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Wrong {}

fn wrong(text: String) -> Error {
    Error::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(Wrong(text)))))
}

/// What came of looking whose a certificate is.
fn check_identity(
    certificate: &[u8],
    (grid, revoked): (GridId, &RevokedNow),
    is_right: impl Fn(&Role) -> bool,
    due: &str,
) -> Result<(), Error> {
    match identity_of(certificate) {
        Some(found) if found.grid == grid && is_right(&found.role) && revoked.covers(certificate, &found) => {
            Err(wrong(format!(
                "its certificate, {}'s, was revoked; give that machine another one, if it is to be let in again",
                found.role
            )))
        }
        Some(found) if found.grid == grid && is_right(&found.role) => Ok(()),
        Some(found) if found.grid == grid => {
            Err(wrong(format!("its certificate is {}'s, and {due}; check which machine connects to which", found.role)))
        }
        Some(found) => {
            Err(wrong(format!("its certificate is of grid {}; check which grid that machine belongs to", found.grid)))
        }
        None => Err(wrong(format!(
            "its certificate names nobody of a grid, and {due}; give that machine one of this grid's (`holdfast grid token`)"
        ))),
    }
}

/// What went wrong with a peer, why, and what to do.
pub(super) fn text(error: &Error) -> String {
    match error {
        Error::InvalidCertificate(why) => certificate_text(why),
        Error::NoCertificatesPresented => {
            "it shows no certificate; only this grid's own hosts may connect: join its machine with a token of `holdfast grid \
             token`"
                .to_string()
        }
        Error::AlertReceived(alert) => format!(
            "the other side ended the handshake ({}); its log says why",
            alert_text(*alert)
        ),
        Error::InvalidMessage(_) | Error::InappropriateMessage { .. } | Error::PeerIncompatible(_) => format!(
            "it does not speak TLS 1.3 as this grid's hosts and nodes do ({error}): it is a host that has joined without TLS, \
             or something else; join it anew with a token of `holdfast grid token`, or keep it away from this port"
        ),
        other => format!("{other}; check what it is that connects"),
    }
}

fn certificate_text(why: &CertificateError) -> String {
    let renew = "`holdfast grid tls rotate` on its machine renews it";
    match why {
        CertificateError::Other(OtherError(other)) => other.to_string(),
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            "its certificate is not of this grid's authority; join its machine with a token of `holdfast grid token`"
                .to_string()
        }
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            format!("its certificate has expired; {renew}")
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "its certificate is not valid yet; compare the clocks of both machines".to_string()
        }
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            "its certificate is for another role; check which machine connects to which".to_string()
        }
        other => format!("its certificate can't be used ({other}); {renew}"),
    }
}

fn alert_text(alert: AlertDescription) -> &'static str {
    match alert {
        AlertDescription::UnknownCA | AlertDescription::DecryptError => "our certificate is not of its authority",
        AlertDescription::CertificateExpired => "our certificate has expired",
        AlertDescription::CertificateRequired => "it wants a certificate",
        AlertDescription::CertificateUnknown | AlertDescription::UnsupportedCertificate => "it does not let us in",
        _ => "it does not like what we say",
    }
}

/// Credentials as they were read.
struct Loaded {
    roots: Arc<RootCertStore>,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

impl Loaded {
    fn read(paths: &LinkPaths, own: &Identity) -> Result<Loaded, TlsError> {
        let unusable = |why: String| TlsError::ClientCa { path: paths.ca.clone(), why };
        let mut roots = RootCertStore::empty();
        for certificate in certificates("a certificate", &paths.ca)? {
            roots.add(certificate).map_err(|e| unusable(e.to_string()))?;
        }
        let chain = certificates("a certificate", &paths.certificate)?;
        let key = PrivateKeyDer::from_pem_file(&paths.key).map_err(|e| pem_error("a private key", &paths.key, e))?;
        let found = chain.first().and_then(|leaf| identity_of(leaf));
        if found.as_ref() != Some(own) {
            return Err(TlsError::NotOurs {
                path: paths.certificate.clone(),
                found: found.map_or_else(|| "nobody".to_string(), |found| found.to_string()),
                wanted: own.to_string(),
            });
        }
        Ok(Loaded { roots: Arc::new(roots), chain, key })
    }
}

fn mismatch(paths: &LinkPaths) -> impl FnOnce(Error) -> TlsError {
    let (certificate, key) = (paths.certificate.clone(), paths.key.clone());
    move |source| TlsError::Mismatch { certificate, key, source }
}

/// AES-128-GCM comes first: the cipher that TLS 1.3 asks of everybody, with four rounds of fourteen less than AES-256.
/// The others stay, for ends of other releases.
fn provider() -> Arc<CryptoProvider> {
    let mut provider = ring::default_provider();
    provider.cipher_suites.sort_by_key(|suite| suite.suite() != CipherSuite::TLS13_AES_128_GCM_SHA256);
    Arc::new(provider)
}

/// The serving end of links; clones share it.
#[derive(Clone)]
pub struct ServerTls {
    config: Current<ServerConfig>,
    paths: LinkPaths,
    own: Identity,
    revoked: RevokedNow,
}

impl fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ServerTls")
    }
}

impl ServerTls {
    /// The credentials of a node or host, which must be its own.
    pub fn load(paths: &LinkPaths, grid: GridId, role: Role) -> Result<ServerTls, TlsError> {
        let (own, revoked) = (Identity { grid, role }, RevokedNow::new(grid));
        let config = Current::new(ServerTls::read(paths, &own, &revoked)?);
        Ok(ServerTls { config, paths: paths.clone(), own, revoked })
    }

    /// Takes what lies where it was loaded from, from the next session on; where that can't be used, all stays as it is.
    pub fn reload(&self) -> Result<(), TlsError> {
        self.config.replace(ServerTls::read(&self.paths, &self.own, &self.revoked)?);
        Ok(())
    }

    fn read(paths: &LinkPaths, own: &Identity, revoked: &RevokedNow) -> Result<ServerConfig, TlsError> {
        let loaded = Loaded::read(paths, own)?;
        let unusable = |why: String| TlsError::ClientCa { path: paths.ca.clone(), why };
        let are_nodes_too = matches!(own.role, Role::Node(_));
        let callers = Callers::new(loaded.roots, own.grid, revoked, are_nodes_too).map_err(unusable)?;
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(Arc::new(callers))
            .with_single_cert(loaded.chain, loaded.key)
            .map_err(mismatch(paths))?;
        config.send_tls13_tickets = 0;
        config.max_early_data_size = 0;
        Ok(config)
    }

    /// What it goes by; replacing it counts from the next handshake on.
    pub fn revoked(&self) -> &RevokedNow {
        &self.revoked
    }

    /// The serving side of a session that a host begins.
    pub fn accept(&self) -> Result<TlsStream, TlsError> {
        Ok(TlsStream::over(UnbufferedServerConnection::new(self.config.get())?.into(), true))
    }
}

/// The connecting end of links, a host's or a node's; clones share it.
#[derive(Clone)]
pub struct HostTls {
    current: Current<Connecting>,
    paths: LinkPaths,
    own: Identity,
    revoked: RevokedNow,
}

struct Connecting {
    config: ClientConfig,
    roots: Arc<RootCertStore>,
}

impl fmt::Debug for HostTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HostTls")
    }
}

impl HostTls {
    /// The credentials of a host, which must be its own.
    pub fn load(paths: &LinkPaths, grid: GridId, name: &str) -> Result<HostTls, TlsError> {
        HostTls::load_as(paths, Identity { grid, role: Role::Host(name.to_string()) }, RevokedNow::new(grid))
    }

    /// The credentials of a node, with which it connects to other nodes; it goes by the same list as at its own door.
    pub fn load_node(paths: &LinkPaths, grid: GridId, node: NodeId, door: &ServerTls) -> Result<HostTls, TlsError> {
        HostTls::load_as(paths, Identity { grid, role: Role::Node(node) }, door.revoked.clone())
    }

    fn load_as(paths: &LinkPaths, own: Identity, revoked: RevokedNow) -> Result<HostTls, TlsError> {
        let current = Current::new(HostTls::read(paths, &own)?);
        Ok(HostTls { current, paths: paths.clone(), own, revoked })
    }

    /// Takes what lies where it was loaded from, from the next session on; where that can't be used, all stays as it is.
    pub fn reload(&self) -> Result<(), TlsError> {
        self.current.replace(HostTls::read(&self.paths, &self.own)?);
        Ok(())
    }

    /// Where its certificate and key are.
    pub fn paths(&self) -> &LinkPaths {
        &self.paths
    }

    fn read(paths: &LinkPaths, own: &Identity) -> Result<Connecting, TlsError> {
        let loaded = Loaded::read(paths, own)?;
        let mut config = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])?
            .with_root_certificates(Arc::clone(&loaded.roots))
            .with_client_auth_cert(loaded.chain, loaded.key)
            .map_err(mismatch(paths))?;
        config.resumption = Resumption::disabled();
        // Nodes have one certificate each: nobody on the way has to learn which of them it is.
        config.enable_sni = false;
        Ok(Connecting { config, roots: loaded.roots })
    }

    /// What it goes by; replacing it counts from the next handshake on.
    pub fn revoked(&self) -> &RevokedNow {
        &self.revoked
    }

    /// The connecting side of a session with that node or host.
    pub fn connect(&self, peer: Role) -> Result<TlsStream, TlsError> {
        let current = self.current.get();
        let mut config = current.config.clone();
        let only = OnePeer {
            roots: Arc::clone(&current.roots),
            algorithms: config.crypto_provider().signature_verification_algorithms,
            grid: self.own.grid,
            revoked: self.revoked.clone(),
            peer,
        };
        config.dangerous().set_certificate_verifier(Arc::new(only));
        // Whom it reaches is judged by the certificate's identity: the library wants a name all the same.
        let name = ServerName::try_from("holdfast").expect("a name as any other");
        Ok(TlsStream::over(UnbufferedClientConnection::new(Arc::new(config), name)?.into(), true))
    }
}

/// Lets in hosts of one grid, and nodes where it is a node's.
#[derive(Debug)]
struct Callers {
    chain: Arc<dyn ClientCertVerifier>,
    grid: GridId,
    revoked: RevokedNow,
    are_nodes_too: bool,
}

impl Callers {
    fn new(
        roots: Arc<RootCertStore>,
        grid: GridId,
        revoked: &RevokedNow,
        are_nodes_too: bool,
    ) -> Result<Callers, String> {
        let chain = WebPkiClientVerifier::builder_with_provider(roots, provider()).build();
        let chain = chain.map_err(|e| e.to_string())?;
        Ok(Callers { chain, grid, revoked: revoked.clone(), are_nodes_too })
    }
}

/// The host or node that a certificate in PEM speaks for, where it is good now by the authority at `ca`; else why it is not.
pub fn holder_of(pem: &str, ca: &Path, grid: GridId, revoked: &RevokedNow) -> Result<Role, String> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates("a certificate", ca).map_err(|e| e.to_string())? {
        roots.add(certificate).map_err(|e| e.to_string())?;
    }
    let callers = Callers::new(Arc::new(roots), grid, revoked, true)?;
    let der = CertificateDer::from_pem_slice(pem.as_bytes()).map_err(|_| "it is no certificate".to_string())?;
    callers.verify_client_cert(&der, &[], UnixTime::now()).map_err(|e| text(&e))?;
    identity_of(&der).map(|identity| identity.role).ok_or_else(|| "it names nobody of a grid".to_string())
}

impl ClientCertVerifier for Callers {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.chain.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.chain.verify_client_cert(end_entity, intermediates, now);
        let is_sound = match &verified {
            Ok(_) => true,
            // The authority signed it, for another role: which it is, the log can say.
            Err(Error::InvalidCertificate(why)) => {
                matches!(why, CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. })
            }
            Err(_) => false,
        };
        if is_sound {
            let may_call = |role: &Role| match role {
                Role::Host(_) => true,
                Role::Node(_) => self.are_nodes_too,
                Role::Client(_) | Role::Operator(_) | Role::Reader(_) => false,
            };
            let due = match self.are_nodes_too {
                true => "only hosts and nodes may connect to a node",
                false => "only hosts may connect to a host",
            };
            check_identity(end_entity, (self.grid, &self.revoked), may_call, due)?;
        }
        verified
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("links speak TLS 1.3".to_string()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chain.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.chain.supported_verify_schemes()
    }
}

/// Goes on with one node or host.
#[derive(Debug)]
struct OnePeer {
    roots: Arc<RootCertStore>,
    algorithms: WebPkiSupportedAlgorithms,
    grid: GridId,
    revoked: RevokedNow,
    peer: Role,
}

impl ServerCertVerifier for OnePeer {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let parsed = ParsedCertificate::try_from(end_entity)?;
        verify_server_cert_signed_by_trust_anchor(&parsed, &self.roots, intermediates, now, self.algorithms.all)?;
        let due = format!("{} should be there", self.peer);
        check_identity(end_entity, (self.grid, &self.revoked), |role| *role == self.peer, &due)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("links speak TLS 1.3".to_string()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, dss, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

impl TlsStream {
    /// Whom the peer's certificate speaks for, once the handshake is done, where that is of a grid.
    pub fn peer(&self) -> Option<Identity> {
        Some(self.peer_certificate()?.1)
    }

    /// Its certificate as well.
    pub fn peer_certificate(&self) -> Option<(&[u8], Identity)> {
        let chain = self.session.state().peer_certificates().filter(|_| !self.is_handshaking())?;
        let certificate: &[u8] = chain.first()?;
        Some((certificate, identity_of(certificate)?))
    }

    /// The peer has shown a certificate, and has its key.
    pub fn has_certificate(&self) -> bool {
        !self.is_handshaking() && self.session.state().peer_certificates().is_some()
    }
}

#[cfg(test)]
mod tests;
