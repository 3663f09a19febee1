//! A grid's own certificates: its authority, what that signs, and who a certificate speaks for.
//!
//! ```text
//! CA of a grid ──signs──> host/NAME     for both ends: hosts connect to nodes and to each other
//!                    ├──> node/3        for servers: nodes accept hosts
//!                    ├──> client/NAME   for clients: of volumes, over NBD
//!                    ├──> operator/NAME, reader/NAME   for clients: of the HTTP interface
//!                    └──> (nobody)      for servers of NBD and HTTP: by DNS names and addresses, as clients check them
//! ```
//! What a grid's own etcd goes by is signed under another name: see [`etcd`].
//!
//! Role: called by the command line and by threads of the host; it reads no files and keeps no secrets of its own.
//!
//! Invariants
//! 1. Whom a certificate speaks for is one URI among its alternative names, `holdfast://GRID/host/NAME`, say, or
//!    `holdfast://GRID/node/NUMBER`: one name carries grid, role and number, so that no two fields can contradict each
//!    other. Its common name is for people.
//! 2. What a request asks to be called counts for nothing: of a request only the public key is taken, and only where
//!    its signature shows that the sender has the other half.
//!
//! Limits: [`AUTHORITY_VALID`] and [`LEAF_VALID`]; certificates begin a day early, for machines whose clocks differ.

pub mod etcd;

use holdfast_base::{GridId, NodeId};
use rcgen::string::Ia5String;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose, PublicKeyData, SanType, SerialNumber, SigningKey, date_time_ymd,
};
use ring::rand::{SecureRandom, SystemRandom};
use ring::signature::{ECDSA_P256_SHA256_ASN1, UnparsedPublicKey};
use ring::{digest, hmac};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, DnsName};
use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use thiserror::Error;
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::{GeneralName, ParsedExtension};

/// How long a grid's authority is good for: longer than its machines.
pub const AUTHORITY_VALID: Duration = Duration::from_secs(20 * 365 * 24 * 3600);

/// How long what it signs is good for.
pub const LEAF_VALID: Duration = Duration::from_secs(2 * 365 * 24 * 3600);

/// Certificates are good from so long ago.
pub(crate) const EARLIER: Duration = Duration::from_secs(24 * 3600);

/// Length of a [`Fingerprint`] and of a [`mac`].
pub const DIGEST_BYTES: usize = 32;

/// SHA-256 of a certificate.
pub type Fingerprint = [u8; DIGEST_BYTES];

/// What can't be made or read, and why.
#[derive(Debug, Error)]
pub enum PkiError {
    #[error("a certificate could not be made: {0}; this is a bug, or the machine gives no random numbers")]
    Make(rcgen::Error),
    #[error("the authority's certificate and key can't be used: {0}; restore ca.pem and ca.key from a copy")]
    Authority(rcgen::Error),
    #[error("a signing request can't be used: {0}; make it anew")]
    Request(rcgen::Error),
    #[error("`{0}` is no address and no name of a machine; give what clients connect to, for example 10.0.0.1")]
    NoName(String),
    #[error("it is not the key of this certificate")]
    KeyForm,
    #[error("what should be a certificate is none, or a damaged one; restore it, or have it made anew")]
    NoCertificate,
    #[error("there is something beside the one certificate that is expected: whoever reads it would trust all of it")]
    NotAlone,
    #[error(
        "certificates of {role} were revoked up to a moment that is {ahead_s} s ahead of this machine's clock, so that a new one \
         would be revoked already; set the clocks right, of this machine or of the one that revoked them, and try again"
    )]
    Clock { role: Role, ahead_s: u64 },
}

/// In which role a machine's process takes part in a grid.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Role {
    /// By its name: it connects to nodes.
    Host(String),
    /// It accepts hosts.
    Node(NodeId),
    /// By its name: it uses volumes over NBD, and is let in nowhere else.
    Client(String),
    /// By their name: they may do all over the HTTP interface, and are let in nowhere else.
    Operator(String),
    /// The same, to look alone.
    Reader(String),
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Role::Host(name) => write!(f, "host {name}"),
            Role::Node(node) => write!(f, "node {node}"),
            Role::Client(name) => write!(f, "client {name}"),
            Role::Operator(name) => write!(f, "operator {name}"),
            Role::Reader(name) => write!(f, "reader {name}"),
        }
    }
}

/// Whom a certificate speaks for. As text it is the URI that the certificate holds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Identity {
    /// The grid that it belongs to; nothing is said of others.
    pub grid: GridId,
    /// As what.
    pub role: Role,
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.role {
            Role::Host(name) => write!(f, "holdfast://{}/host/{name}", self.grid),
            Role::Node(node) => write!(f, "holdfast://{}/node/{node}", self.grid),
            Role::Client(name) => write!(f, "holdfast://{}/client/{name}", self.grid),
            Role::Operator(name) => write!(f, "holdfast://{}/operator/{name}", self.grid),
            Role::Reader(name) => write!(f, "holdfast://{}/reader/{name}", self.grid),
        }
    }
}

/// A text that names nobody of a grid.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error(
    "it is not of the form holdfast://GRID/ROLE/NAME, with the role host, client, operator or reader, or holdfast://GRID/node/NUMBER"
)]
pub struct NoIdentity;

impl FromStr for Identity {
    type Err = NoIdentity;

    fn from_str(text: &str) -> Result<Identity, NoIdentity> {
        let rest = text.strip_prefix("holdfast://").ok_or(NoIdentity)?;
        let mut parts = rest.splitn(3, '/');
        let grid = parts.next().and_then(|grid| grid.parse().ok()).ok_or(NoIdentity)?;
        let (kind, name) = parts.next().zip(parts.next()).ok_or(NoIdentity)?;
        if kind != "node" && (name.is_empty() || name.contains('/')) {
            return Err(NoIdentity);
        }
        let role = match kind {
            "host" => Role::Host(name.to_string()),
            "client" => Role::Client(name.to_string()),
            "operator" => Role::Operator(name.to_string()),
            "reader" => Role::Reader(name.to_string()),
            "node" => Role::Node(NodeId(name.parse().map_err(|_| NoIdentity)?)),
            _ => return Err(NoIdentity),
        };
        let identity = Identity { grid, role };
        // One way to write each: what compares equal as text is equal.
        if identity.to_string() == text { Ok(identity) } else { Err(NoIdentity) }
    }
}

/// A grid's certificate authority: its certificate, and the key that signs.
pub struct Authority {
    grid: GridId,
    issuer: Issuer<'static, KeyPair>,
    /// Of whom certificates were revoked, and up to when issued, in seconds since 1970.
    revoked: BTreeMap<Role, u64>,
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Authority({})", self.grid)
    }
}

/// A certificate and its private key, in PEM.
#[derive(Clone)]
pub struct Pair {
    /// The certificate alone: there are no intermediate ones.
    pub certificate: String,
    /// PKCS#8, not encrypted: whoever reads it is who the certificate names.
    pub key: String,
}

impl fmt::Debug for Pair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pair")
    }
}

/// Since 1970.
fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Issued now: good from a day ago on, for as long.
fn params(common_name: &str, valid: Duration) -> CertificateParams {
    params_at(common_name, now(), valid)
}

/// Issued at a time since 1970.
fn params_at(common_name: &str, issued: Duration, valid: Duration) -> CertificateParams {
    let at = |since: Duration| date_time_ymd(1970, 1, 1) + Duration::from_secs(since.as_secs());
    let mut params = CertificateParams::default();
    params.not_before = at(issued.saturating_sub(EARLIER));
    params.not_after = at(issued + valid);
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, common_name);
    params
}

fn authority_params(name: &str, valid: Duration) -> CertificateParams {
    let mut params = params(name, valid);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params
}

impl Authority {
    /// A new authority for a grid, with what is to be kept of it.
    pub fn make(grid: GridId) -> Result<(Authority, Pair), PkiError> {
        Authority::make_for(grid, AUTHORITY_VALID)
    }

    /// The same, good for so long from now on.
    pub fn make_for(grid: GridId, valid: Duration) -> Result<(Authority, Pair), PkiError> {
        let params = authority_params(&authority_name(grid), valid);
        let key = KeyPair::generate().map_err(PkiError::Make)?;
        let certificate = params.self_signed(&key).map_err(PkiError::Make)?;
        let pair = Pair { certificate: certificate.pem(), key: key.serialize_pem() };
        Ok((Authority { grid, issuer: Issuer::new(params, key), revoked: BTreeMap::new() }, pair))
    }

    /// An authority from what was kept of it.
    pub fn load(grid: GridId, pair: &Pair) -> Result<Authority, PkiError> {
        let key = KeyPair::from_pem(&pair.key).map_err(PkiError::Authority)?;
        let issuer = Issuer::from_ca_cert_pem(&pair.certificate, key).map_err(PkiError::Authority)?;
        Ok(Authority { grid, issuer, revoked: BTreeMap::new() })
    }

    /// Another certificate for the authority's key and name, which is good for longer than `old`: what was signed stays
    /// signed. It has a number of its own, as two certificates of one issuer have to.
    pub fn renewed(&self, old: &str) -> Result<String, PkiError> {
        let der = CertificateDer::from_pem_slice(old.as_bytes()).map_err(|_| PkiError::NoCertificate)?;
        let (_, parsed) = x509_parser::parse_x509_certificate(&der).map_err(|_| PkiError::NoCertificate)?;
        let mut params = authority_params(&authority_name(self.grid), AUTHORITY_VALID);
        params.serial_number = Some(SerialNumber::from_slice(&etcd::serial()));
        // What it has signed says by this whose key did it.
        if let Some(id) = key_id(&parsed) {
            params.key_identifier_method = KeyIdMethod::PreSpecified(id);
        }
        Ok(params.self_signed(self.issuer.key()).map_err(PkiError::Make)?.pem())
    }

    /// Has certificates that are issued from here on count as issued after those that were revoked: of whom, and up to
    /// when issued, in seconds since 1970.
    pub fn heed(&mut self, revoked: impl IntoIterator<Item = (Role, u64)>) {
        self.revoked = revoked.into_iter().collect();
    }

    /// When a certificate of `role` that is issued now counts as issued, in seconds since 1970: what was revoked counts
    /// by the second, maybe of another machine's clock, and a certificate of that second would be revoked already.
    pub fn issue_s(&self, role: &Role) -> Result<u64, PkiError> {
        let now_s = now().as_secs();
        let from = self.revoked.get(role).map_or(now_s, |until| now_s.max(until.saturating_add(1)));
        // A later one would not be good yet.
        let ahead_s = from - now_s;
        if ahead_s < EARLIER.as_secs() { Ok(from) } else { Err(PkiError::Clock { role: role.clone(), ahead_s }) }
    }

    fn sign(&self, role: &Role, key: &impl PublicKeyData, valid: Duration) -> Result<String, PkiError> {
        let identity = Identity { grid: self.grid, role: role.clone() };
        let issued = Duration::from_secs(self.issue_s(role)?);
        let mut params = params_at(&format!("{role} of Holdfast grid {}", self.grid), issued, valid);
        let uri = Ia5String::try_from(identity.to_string()).map_err(PkiError::Make)?;
        params.subject_alt_names = vec![SanType::URI(uri)];
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        // The role a second time, in the form that every TLS library checks by itself.
        // Hosts connect to nodes and to each other, nodes to nodes.
        params.extended_key_usages = match role {
            Role::Host(_) | Role::Node(_) => {
                vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth]
            }
            Role::Client(_) | Role::Operator(_) | Role::Reader(_) => vec![ExtendedKeyUsagePurpose::ClientAuth],
        };
        params.use_authority_key_identifier_extension = true;
        Ok(params.signed_by(key, &self.issuer).map_err(PkiError::Make)?.pem())
    }

    /// A signature of the authority's key.
    pub fn seal(&self, bytes: &[u8]) -> Result<Vec<u8>, PkiError> {
        self.issuer.key().sign(bytes).map_err(PkiError::Make)
    }

    /// A new key, and a certificate for it.
    pub fn issue(&self, role: &Role) -> Result<Pair, PkiError> {
        self.issue_for(role, LEAF_VALID)
    }

    /// The same, good for so long from now on.
    pub fn issue_for(&self, role: &Role, valid: Duration) -> Result<Pair, PkiError> {
        let key = KeyPair::generate().map_err(PkiError::Make)?;
        Ok(Pair { certificate: self.sign(role, &key, valid)?, key: key.serialize_pem() })
    }

    /// A new key, and a certificate for a server of NBD that clients reach by these names and addresses. It speaks for
    /// nobody of the grid.
    pub fn issue_server(&self, names: &[String], valid: Duration) -> Result<Pair, PkiError> {
        let key = KeyPair::generate().map_err(PkiError::Make)?;
        Ok(Pair { certificate: self.sign_server(names, &key, valid)?, key: key.serialize_pem() })
    }

    /// The same for the key behind a request.
    pub fn answer_server(&self, names: &[String], request: &str) -> Result<String, PkiError> {
        let request = CertificateSigningRequestParams::from_pem(request).map_err(PkiError::Request)?;
        self.sign_server(names, &request.public_key, LEAF_VALID)
    }

    fn sign_server(&self, names: &[String], key: &impl PublicKeyData, valid: Duration) -> Result<String, PkiError> {
        let mut params = params(&format!("NBD server of Holdfast grid {}", self.grid), valid);
        let name = |name: &String| match name.parse::<IpAddr>() {
            Ok(address) => Ok(SanType::IpAddress(address)),
            Err(_) => match DnsName::try_from(name.as_str()) {
                Ok(_) => Ia5String::try_from(name.clone()).map(SanType::DnsName).map_err(PkiError::Make),
                Err(_) => Err(PkiError::NoName(name.clone())),
            },
        };
        params.subject_alt_names = names.iter().map(name).collect::<Result<_, _>>()?;
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        Ok(params.signed_by(key, &self.issuer).map_err(PkiError::Make)?.pem())
    }

    /// A certificate for the key behind a request, whatever that calls itself.
    pub fn answer(&self, role: &Role, request: &str) -> Result<String, PkiError> {
        let request = CertificateSigningRequestParams::from_pem(request).map_err(PkiError::Request)?;
        self.sign(role, &request.public_key, LEAF_VALID)
    }
}

/// A new key, and a request to sign a certificate for it: both in PEM.
pub fn request() -> Result<(String, String), PkiError> {
    let key = KeyPair::generate().map_err(PkiError::Make)?;
    let request = params("to be named", LEAF_VALID).serialize_request(&key).map_err(PkiError::Make)?;
    Ok((key.serialize_pem(), request.pem().map_err(PkiError::Make)?))
}

/// What comes before the secret of a key on P-256 in PKCS#8, between it and the public key, as `ring` makes and takes it (RFC 5958,
/// RFC 5915).
const KEY_HEAD: &[u8] = &[
    0x30, 0x81, 0x87, 0x02, 0x01, 0x00, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08,
    0x2a, 0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x04, 0x6d, 0x30, 0x6b, 0x02, 0x01, 0x01, 0x04, 0x20,
];
const KEY_MIDDLE: &[u8] = &[0xa1, 0x44, 0x03, 0x42, 0x00];

/// Length of [`key_secret`].
pub const SECRET_BYTES: usize = 32;

/// The part of an authority's key that has to be kept: the rest follows from its certificate.
pub fn key_secret(key: &str) -> Result<[u8; SECRET_BYTES], PkiError> {
    let key = KeyPair::from_pem(key).map_err(PkiError::Authority)?;
    let der = key.serialize_der();
    let secret = der.strip_prefix(KEY_HEAD).and_then(|rest| rest.first_chunk());
    secret.copied().ok_or(PkiError::KeyForm)
}

/// The key, in PEM, whose secret that is and whose certificate, in PEM, is `certificate`; nobody has looked whether they go together.
pub fn key_of_secret(certificate: &str, secret: &[u8; SECRET_BYTES]) -> Result<String, PkiError> {
    let der = CertificateDer::from_pem_slice(certificate.as_bytes()).map_err(|_| PkiError::NoCertificate)?;
    let (_, parsed) = x509_parser::parse_x509_certificate(&der).map_err(|_| PkiError::NoCertificate)?;
    let public = parsed.public_key().subject_public_key.data.as_ref();
    let der = [KEY_HEAD, secret, KEY_MIDDLE, public].concat();
    let key = KeyPair::try_from(der).map_err(|_| PkiError::KeyForm)?;
    Ok(key.serialize_pem())
}

/// A signature by a key in PEM that [`request`] or an authority has made.
pub fn sign_with(key: &str, bytes: &[u8]) -> Result<Vec<u8>, PkiError> {
    KeyPair::from_pem(key).and_then(|key| key.sign(bytes)).map_err(PkiError::Make)
}

/// Whether bytes were signed with the key of a certificate in PEM.
pub fn is_signed_by(certificate: &str, bytes: &[u8], signature: &[u8]) -> Result<bool, PkiError> {
    let der = CertificateDer::from_pem_slice(certificate.as_bytes()).map_err(|_| PkiError::NoCertificate)?;
    let (_, parsed) = x509_parser::parse_x509_certificate(&der).map_err(|_| PkiError::NoCertificate)?;
    let key = parsed.public_key().subject_public_key.data.as_ref();
    Ok(UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, key).verify(bytes, signature).is_ok())
}

/// What a certificate says of itself: nobody has verified it by this.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Facts {
    /// For people.
    pub subject: String,
    /// Whom it speaks for; the authority speaks for nobody.
    pub identity: Option<Identity>,
    /// When it begins to be good, in seconds since 1970.
    pub not_before: u64,
    /// When it ends.
    pub not_after: u64,
    /// Of all of it.
    pub fingerprint: Fingerprint,
}

impl Facts {
    /// Of a certificate in PEM.
    pub fn of_pem(pem: &str) -> Result<Facts, PkiError> {
        let der = CertificateDer::from_pem_slice(pem.as_bytes()).map_err(|_| PkiError::NoCertificate)?;
        Facts::of_der(&der)
    }

    fn of_der(der: &[u8]) -> Result<Facts, PkiError> {
        let (_, parsed) = x509_parser::parse_x509_certificate(der).map_err(|_| PkiError::NoCertificate)?;
        let mut fingerprint = [0; DIGEST_BYTES];
        fingerprint.copy_from_slice(digest::digest(&digest::SHA256, der).as_ref());
        Ok(Facts {
            subject: parsed.subject().to_string(),
            identity: identity_of(der),
            not_before: u64::try_from(parsed.validity().not_before.timestamp()).unwrap_or(0),
            not_after: u64::try_from(parsed.validity().not_after.timestamp()).unwrap_or(0),
            fingerprint,
        })
    }
}

fn key_id(certificate: &X509Certificate<'_>) -> Option<Vec<u8>> {
    certificate.extensions().iter().find_map(|extension| match extension.parsed_extension() {
        ParsedExtension::SubjectKeyIdentifier(id) => Some(id.0.to_vec()),
        _ => None,
    })
}

/// Whether the authority, whose certificate in PEM is `ca`, has signed a certificate under its own name, ended or not.
fn is_of(certificate: &X509Certificate<'_>, ca: &str) -> Result<bool, PkiError> {
    let der = CertificateDer::from_pem_slice(ca.as_bytes()).map_err(|_| PkiError::NoCertificate)?;
    let (_, parsed) = x509_parser::parse_x509_certificate(&der).map_err(|_| PkiError::NoCertificate)?;
    let signature = certificate.signature_value.data.as_ref();
    Ok(certificate.issuer().as_raw() == parsed.subject().as_raw()
        && is_signed_by(ca, certificate.tbs_certificate.as_ref(), signature)?)
}

/// The one certificate that a text in PEM holds, and nothing that stands around it. What comes from others is looked at by
/// its first certificate, and trusted with all that it holds: so it may hold no more.
pub fn only_certificate(pem: &str) -> Result<String, PkiError> {
    const END: &str = "-----END CERTIFICATE-----";
    Facts::of_pem(pem)?;
    let mut sections = pem.match_indices("-----BEGIN");
    let (Some((begin, _)), None) = (sections.next(), sections.next()) else { return Err(PkiError::NotAlone) };
    let end = pem[begin..].find(END).ok_or(PkiError::NoCertificate)?;
    Ok(format!("{}\n", &pem[begin..begin + end + END.len()]))
}

/// Whether both certificates in PEM are an authority's for the same name and key, made by itself, and nothing beside.
pub fn is_same_authority(one: &str, other: &str) -> bool {
    let subject_and_key = |pem: &str| -> Option<(Vec<u8>, Vec<u8>)> {
        let der = CertificateDer::from_pem_slice(only_certificate(pem).ok()?.as_bytes()).ok()?;
        let (_, parsed) = x509_parser::parse_x509_certificate(&der).ok()?;
        let is_sound = parsed.is_ca() && is_of(&parsed, pem).unwrap_or(false);
        is_sound.then(|| (parsed.subject().as_raw().to_vec(), parsed.public_key().raw.to_vec()))
    };
    subject_and_key(one).is_some_and(|own| subject_and_key(other) == Some(own))
}

/// By which names and addresses clients know a server of NBD, whose certificate this authority has signed; nothing
/// where it is another certificate, or another authority's.
pub fn server_names(certificate: &str, ca: &str) -> Option<Vec<String>> {
    let der = CertificateDer::from_pem_slice(certificate.as_bytes()).ok()?;
    let (_, parsed) = x509_parser::parse_x509_certificate(&der).ok()?;
    if parsed.is_ca() || !is_of(&parsed, ca).unwrap_or(false) {
        return None;
    }
    let names = parsed.subject_alternative_name().ok()??;
    let name = |name: &GeneralName<'_>| match name {
        GeneralName::DNSName(name) => Some((*name).to_string()),
        GeneralName::IPAddress(bytes) => match bytes.len() {
            4 => Some(Ipv4Addr::from(<[u8; 4]>::try_from(*bytes).ok()?).to_string()),
            _ => Some(Ipv6Addr::from(<[u8; 16]>::try_from(*bytes).ok()?).to_string()),
        },
        // Whom of the grid it speaks for is not this one's to say.
        _ => None,
    };
    let names: Option<Vec<String>> = names.value.general_names.iter().map(name).collect();
    names.filter(|names| !names.is_empty())
}

/// Whom a certificate speaks for: the only one of its alternative names, where that is of our form.
pub fn identity_of(der: &[u8]) -> Option<Identity> {
    let (_, parsed) = x509_parser::parse_x509_certificate(der).ok()?;
    let names = parsed.subject_alternative_name().ok()??;
    match names.value.general_names.as_slice() {
        [GeneralName::URI(uri)] => uri.parse().ok(),
        _ => None,
    }
}

/// When a certificate was issued, in seconds since 1970: those of a grid's own authority are good from a day before on. Another's,
/// which clients of NBD may have, counts as issued when it begins to be good.
pub fn issued_s(der: &[u8]) -> Option<u64> {
    let (_, parsed) = x509_parser::parse_x509_certificate(der).ok()?;
    let from = u64::try_from(parsed.validity().not_before.timestamp()).ok()?;
    let is_ours = |name: &str| identity_of(der).is_some_and(|own| name == authority_name(own.grid));
    let mut names = parsed.issuer().iter_common_name().filter_map(|name| name.as_str().ok());
    Some(if names.any(is_ours) { from + EARLIER.as_secs() } else { from })
}

fn authority_name(grid: GridId) -> String {
    format!("Holdfast grid {grid}")
}

/// HMAC-SHA256 over `parts`, each with its length before it.
pub fn mac(secret: &[u8], parts: &[&[u8]]) -> [u8; DIGEST_BYTES] {
    let mut context = hmac::Context::with_key(&hmac::Key::new(hmac::HMAC_SHA256, secret));
    for part in parts {
        context.update(&(part.len() as u64).to_le_bytes());
        context.update(part);
    }
    let mut mac = [0; DIGEST_BYTES];
    mac.copy_from_slice(context.sign().as_ref());
    mac
}

/// Compares what nobody may guess byte by byte: how long it takes depends on nothing but the lengths.
pub fn is_same(a: &[u8], b: &[u8]) -> bool {
    let once = hmac::Key::new(hmac::HMAC_SHA256, &random::<DIGEST_BYTES>());
    hmac::verify(&once, a, hmac::sign(&once, b).as_ref()).is_ok()
}

/// Bytes that nobody can guess.
pub fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    SystemRandom::new().fill(&mut bytes).expect("the kernel gives random numbers");
    bytes
}

/// The size of the key that a certificate is for, where it is an RSA key.
pub(crate) fn rsa_bits(certificate: &[u8]) -> Option<usize> {
    let (_, parsed) = x509_parser::parse_x509_certificate(certificate).ok()?;
    match parsed.public_key().parsed().ok()? {
        x509_parser::public_key::PublicKey::RSA(key) => Some(key.key_size()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRID: GridId = GridId(7);

    /// As releases before this one made it, with another library.
    const OLDER: (&str, &str) = (
        "-----BEGIN CERTIFICATE-----
MIIBwDCCAWegAwIBAgIUUImZlZwkoenln5zkIahCkK0EW5swCgYIKoZIzj0EAwIw
PTE7MDkGA1UEAwwySG9sZGZhc3QgZ3JpZCAyNzcwMjE1OS1kYzRiLTRjZGQtOWNl
Yi0xYjFiYzE5YTAxYTEwHhcNMjYxMTIyMDkxODAyWhcNNDYxMTE4MDkxODAyWjA9
MTswOQYDVQQDDDJIb2xkZmFzdCBncmlkIDI3NzAyMTU5LWRjNGItNGNkZC05Y2Vi
LTFiMWJjMTlhMDFhMTBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABH76A1xk3nyc
c8/ttG2Zohdkf16WoRzr6meyvehdrxz6MXTqyLg263VKbPAnoqRuzsE2VbY7PoxN
NVPu3Xoe1rGjRTBDMA4GA1UdDwEB/wQEAwIBBjAdBgNVHQ4EFgQU+nqPlLfA1iPf
18xL9ZWLBy7dcBgwEgYDVR0TAQH/BAgwBgEB/wIBADAKBggqhkjOPQQDAgNHADBE
AiAsyfV/aF+yiAGbhzrGsoeYQUtUjTZcE8RLEOd8VSCSRQIgI5hvdUecms11Vm/e
STJlO2T4Ivk0HDZUh6c4nu/f/xg=
-----END CERTIFICATE-----
",
        "-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgmOCermWWXXva1eD9
Qp3jMddehhgAtwITKSqejBYUPAihRANCAAR++gNcZN58nHPP7bRtmaIXZH9elqEc
6+pnsr3oXa8c+jF06si4Nut1SmzwJ6Kkbs7BNlW2Oz6MTTVT7t16Htax
-----END PRIVATE KEY-----
",
    );

    const OLDER_GRID: &str = "27702159-dc4b-4cdd-9ceb-1b1bc19a01a1";

    fn older() -> Pair {
        Pair { certificate: OLDER.0.to_string(), key: OLDER.1.to_string() }
    }

    #[test]
    fn an_authority_of_an_older_release_goes_on_signing() {
        let authority = Authority::load(GRID, &older()).unwrap();
        let issued = authority.issue(&Role::Node(NodeId(3))).unwrap();
        let facts = Facts::of_pem(&issued.certificate).unwrap();
        assert_eq!(facts.identity, Some(Identity { grid: GRID, role: Role::Node(NodeId(3)) }));
        let ca = CertificateDer::from_pem_slice(OLDER.0.as_bytes()).unwrap();
        let (_, parsed) = x509_parser::parse_x509_certificate(&ca).unwrap();
        let signed = authority.seal(b"a list").unwrap();
        let key = &parsed.public_key().subject_public_key.data;
        let key = ring::signature::UnparsedPublicKey::new(&ring::signature::ECDSA_P256_SHA256_ASN1, key);
        assert!(key.verify(b"a list", &signed).is_ok() && key.verify(b"another", &signed).is_err());
    }

    #[test]
    fn identities_read_back_and_odd_ones_do_not() {
        let named = [Role::Host, Role::Client, Role::Operator, Role::Reader].map(|role| role("a.b-c".into()));
        for role in named.into_iter().chain([Role::Node(NodeId(3))]) {
            let identity = Identity { grid: GRID, role };
            assert_eq!(identity.to_string().parse(), Ok(identity));
        }
        let grid = GRID.to_string();
        for odd in [
            format!("holdfast://{grid}/node/03"),
            format!("holdfast://{grid}/node/+3"),
            format!("holdfast://{grid}/node/3/"),
            format!("holdfast://{grid}/node/-1"),
            format!("holdfast://{grid}/host/"),
            format!("holdfast://{grid}/host/a/b"),
            format!("holdfast://{grid}/guest/a"),
            format!("holdfast://{grid}/client/"),
            format!("holdfast://{grid}/client/a/b"),
            format!("holdfast://{grid}/operator/"),
            format!("holdfast://{grid}/reader"),
            format!("holdfast://{}/node/3", grid.replace('-', "")),
            format!("https://{grid}/node/3"),
            String::new(),
        ] {
            assert_eq!(odd.parse::<Identity>(), Err(NoIdentity), "{odd}");
        }
    }

    #[test]
    fn an_authority_signs_keys_it_never_sees_and_names_them_itself() {
        let (_, kept) = Authority::make(GRID).unwrap();
        let authority = Authority::load(GRID, &kept).unwrap();
        let (key, request) = request().unwrap();
        let role = Role::Node(NodeId(3));
        let certificate = authority.answer(&role, &request).unwrap();
        let facts = Facts::of_pem(&certificate).unwrap();
        assert_eq!(facts.identity, Some(Identity { grid: GRID, role: role.clone() }));
        assert!(facts.subject.contains("node 3"), "{}", facts.subject);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        assert!(facts.not_before.abs_diff(now - EARLIER.as_secs()) < 60);
        assert!(facts.not_after.abs_diff(now + LEAF_VALID.as_secs()) < 60);
        let der = CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap();
        let (_, parsed) = x509_parser::parse_x509_certificate(&der).unwrap();
        let raw = KeyPair::from_pem(&key).unwrap().public_key_raw().to_vec();
        assert_eq!(parsed.public_key().subject_public_key.data.as_ref(), raw);
        let ca = Facts::of_pem(&kept.certificate).unwrap();
        assert!(ca.identity.is_none() && ca.not_after > facts.not_after);
    }

    #[test]
    fn a_server_of_nbd_is_known_by_where_it_is_reached_and_speaks_for_nobody() {
        let (authority, kept) = Authority::make(GRID).unwrap();
        let names = ["10.0.0.1", "fd00::1", "vmhost-1.example.org"].map(str::to_string);
        let pair = authority.issue_server(&names, LEAF_VALID).unwrap();
        assert_eq!(Facts::of_pem(&pair.certificate).unwrap().identity, None);
        for odd in ["", "a b", "holdfast://x", "10.0.0.1:10809"] {
            let made = authority.issue_server(&[odd.to_string()], LEAF_VALID);
            assert!(matches!(made, Err(PkiError::NoName(_))), "{odd}");
        }
        assert_eq!(server_names(&pair.certificate, &kept.certificate), Some(names.to_vec()));
        let again = authority.answer_server(&names, &request().unwrap().1).unwrap();
        assert_eq!(server_names(&again, &kept.certificate), Some(names.to_vec()));
        let (other, stranger) = Authority::make(GRID).unwrap();
        let forged = other.issue_server(&names, LEAF_VALID).unwrap().certificate;
        let member = authority.issue_etcd_member("10.0.0.1".parse().unwrap(), &etcd::serial()).unwrap();
        let host = authority.issue(&Role::Host("a".to_string())).unwrap();
        for no_server in [&forged, &member.certificate, &host.certificate, &kept.certificate, &stranger.certificate] {
            assert_eq!(server_names(no_server, &kept.certificate), None);
        }
    }

    #[test]
    fn an_authority_is_renewed_over_its_key_and_what_it_has_signed_stays_signed() {
        let short = Duration::from_secs(3600);
        for kept in [Authority::make_for(GRID, short).unwrap().1, older()] {
            let grid = if kept.certificate == OLDER.0 { OLDER_GRID.parse().unwrap() } else { GRID };
            let authority = Authority::load(grid, &kept).unwrap();
            let server = authority.issue_server(&["10.0.0.1".to_string()], LEAF_VALID).unwrap().certificate;
            let next = authority.renewed(&kept.certificate).unwrap();
            assert!(is_same_authority(&kept.certificate, &next) && is_same_authority(&next, &kept.certificate));
            let [old_facts, new_facts] = [&kept.certificate, &next].map(|pem| Facts::of_pem(pem).unwrap());
            // The older one ends on a day that is nearer by and by.
            assert!(grid != GRID || new_facts.not_after > old_facts.not_after);
            assert_ne!(new_facts.fingerprint, old_facts.fingerprint);
            assert_eq!(server_names(&server, &next), Some(vec!["10.0.0.1".to_string()]));
            let renewed = Authority::load(grid, &Pair { certificate: next.clone(), key: kept.key.clone() }).unwrap();
            let later = renewed.issue_server(&["a".to_string()], LEAF_VALID).unwrap().certificate;
            assert!(server_names(&later, &kept.certificate).is_some(), "who goes by the old one knows it");
            let parsed = |pem: &str, what: &dyn Fn(&X509Certificate<'_>) -> Vec<u8>| {
                let der = CertificateDer::from_pem_slice(pem.as_bytes()).unwrap();
                what(&x509_parser::parse_x509_certificate(&der).unwrap().1)
            };
            let key_of = |pem: &str| parsed(pem, &|c| key_id(c).unwrap());
            assert_eq!(key_of(&kept.certificate), key_of(&next));
            let number_of = |pem: &str| parsed(pem, &|c| c.raw_serial().to_vec());
            assert_ne!(number_of(&kept.certificate), number_of(&next));
            let (_, other) = Authority::make(grid).unwrap();
            assert!(!is_same_authority(&kept.certificate, &other.certificate), "another key");
            let both = format!("{next}{}", other.certificate);
            assert!(!is_same_authority(&kept.certificate, &both), "another one beside");
            assert!(matches!(only_certificate(&both), Err(PkiError::NotAlone)));
            assert_eq!(only_certificate(&format!("around\n{next}it\n")).unwrap().trim_end(), next.trim_end());
            assert!(!is_same_authority(&server, &server), "no authority");
        }
    }

    #[test]
    fn damaged_requests_and_files_are_errors() {
        let (authority, kept) = Authority::make(GRID).unwrap();
        let role = Role::Host("a".into());
        let (_, request) = request().unwrap();
        for damaged in [request.replace('A', "B"), request[..200].to_string(), kept.certificate.clone(), String::new()]
        {
            assert!(matches!(authority.answer(&role, &damaged), Err(PkiError::Request(_))), "{damaged}");
        }
        let swapped = Pair { certificate: kept.key.clone(), key: kept.certificate.clone() };
        assert!(matches!(Authority::load(GRID, &swapped), Err(PkiError::Authority(_))));
        assert!(matches!(Facts::of_pem(&kept.key), Err(PkiError::NoCertificate)));
    }

    #[test]
    fn a_mac_depends_on_the_secret_and_on_where_parts_end() {
        let mac_of = |parts: &[&[u8]]| mac(b"secret", parts);
        assert!(is_same(&mac_of(&[b"ab", b"c"]), &mac_of(&[b"ab", b"c"])));
        assert!(!is_same(&mac_of(&[b"ab", b"c"]), &mac_of(&[b"a", b"bc"])));
        assert!(!is_same(&mac_of(&[b"ab", b"c"]), &mac(b"other", &[b"ab", b"c"])));
        assert_ne!(random::<32>(), random::<32>());
    }
}
