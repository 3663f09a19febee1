//! Join tokens: what a new machine needs to know to be given certificates, in one line of text.
//!
//! ```text
//! hfjoin1_ base64url( grid 16 | SHA-256 of the authority's certificate 32 | secret 32 | crc32c 4 )
//! hfjoin2_ the same, and before the crc what is shown to an etcd with the grid's certificates: its authority, a
//!          certificate and the key of that, each in DER with its length before it in 2 bytes
//! token/ID               (metadata) which host has given it out, until when it is good, whether it was used
//! join/ID/request        (metadata) what a machine asks for: names, and requests to sign
//! join/ID/answer         (metadata) certificates, or why not
//! ```
//! The secret is known to who was given the token, and to the machine that gave it out; the metadata store never sees it.
//! Request and answer are sealed with it, each for its purpose, so that whoever may write to the store can neither be
//! given a certificate nor pass off another authority.
//!
//! Invariants
//! 1. A token's id follows from its secret, and tells nothing of it.
//! 2. What was sealed as one thing opens as nothing else: purpose, token, and for an answer its request, are part of it.

use super::certs::Certificates;
use anyhow::{Context, Result, bail};
use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use clap::Args;
use holdfast_base::{GridId, NodeId, crc32c};
use holdfast_runtime::meta::EtcdTls;
use holdfast_runtime::pki::{DIGEST_BYTES, Fingerprint, Pair, Role, is_same, mac};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

const PREFIX: &str = "hfjoin1_";

/// Of one with access to etcd.
const PREFIX_WITH_ETCD: &str = "hfjoin2_";

/// A file with a token is shorter by far.
const FILE_BYTES_MAX: u64 = 4096;
const GRID_BYTES: usize = 16;
const CRC_BYTES: usize = 4;
const TOKEN_BYTES: usize = GRID_BYTES + 2 * DIGEST_BYTES + CRC_BYTES;

/// Longest time that a token may be good for: it is a password that others have seen.
const VALID_MAX: Duration = Duration::from_secs(7 * 24 * 3600);

/// Prefix of requests and answers.
pub const JOIN_PREFIX: &str = "join/";

/// Key of what is asked for with a token.
pub fn request_key(id: &str) -> String {
    format!("{JOIN_PREFIX}{id}/request")
}

/// Key of what is answered.
pub fn answer_key(id: &str) -> String {
    format!("{JOIN_PREFIX}{id}/answer")
}

/// What a machine asks to be signed.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Wanted {
    /// Of the machine's host.
    pub machine: String,
    /// For the host, in PEM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// By number.
    pub nodes: BTreeMap<u32, String>,
    /// For the machine's access to etcd; an older release does not know it, and gives none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etcd: Option<String>,
}

/// Access of a machine to etcd, in PEM.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct EtcdGrant {
    /// Whom its members go by.
    pub ca: String,
    pub certificate: String,
}

impl Wanted {
    /// Signs for all of it but access to etcd, whoever asks.
    pub fn sign(&self, certificates: &Certificates) -> Result<Answer> {
        let authority = certificates.authority()?;
        let host = self.host.as_ref().map(|request| authority.answer(&Role::Host(self.machine.clone()), request));
        let signed = self
            .nodes
            .iter()
            .map(|(node, request)| Ok((*node, authority.answer(&Role::Node(NodeId(*node)), request)?)));
        let nodes = signed.collect::<Result<BTreeMap<u32, String>>>()?;
        Ok(Answer::Signed { ca: certificates.ca_pem()?, host: host.transpose()?, nodes, etcd: None })
    }
}

/// What it gets.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// Certificates in PEM, and the authority's.
    Signed {
        ca: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        host: Option<String>,
        nodes: BTreeMap<u32, String>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        etcd: Option<EtcdGrant>,
    },
    Refused {
        why: String,
    },
}

/// A text with a seal that only who knows the token's secret can make.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sealed {
    body: String,
    seal: String,
}

/// A token, with its secret.
#[derive(Clone, PartialEq, Eq)]
pub struct JoinToken {
    /// The grid to join.
    pub grid: GridId,
    /// Whom its machines go by.
    pub authority: Fingerprint,
    secret: [u8; DIGEST_BYTES],
    etcd: Option<Box<EtcdAccess>>,
}

/// What a token's holder shows etcd, in DER.
#[derive(Clone, PartialEq, Eq)]
struct EtcdAccess {
    ca: Vec<u8>,
    certificate: Vec<u8>,
    key: Vec<u8>,
}

impl EtcdAccess {
    fn parts(&self) -> [&Vec<u8>; 3] {
        [&self.ca, &self.certificate, &self.key]
    }

    /// From parts with their lengths before them; `None` where they are not all of the bytes.
    fn parse(mut bytes: &[u8]) -> Option<EtcdAccess> {
        let mut next = || {
            let (len, rest) = bytes.split_first_chunk::<2>()?;
            let (part, rest) = rest.split_at_checked(usize::from(u16::from_be_bytes(*len)))?;
            bytes = rest;
            Some(part.to_vec())
        };
        let access = EtcdAccess { ca: next()?, certificate: next()?, key: next()? };
        bytes.is_empty().then_some(access)
    }
}

/// The bytes in DER that a text in PEM holds, which is of one thing.
fn der_of(pem: &str) -> Option<Vec<u8>> {
    let lines = pem.lines().filter(|line| !line.starts_with("-----"));
    STANDARD.decode(lines.collect::<String>()).ok().filter(|der| !der.is_empty())
}

/// The text that PEM is for bytes in DER.
fn pem_of(label: &str, der: &[u8]) -> Vec<u8> {
    let text = STANDARD.encode(der);
    let lines = text.as_bytes().chunks(64).map(|line| [line, b"\n"].concat());
    let body: Vec<u8> = lines.flatten().collect();
    [format!("-----BEGIN {label}-----\n").into_bytes(), body, format!("-----END {label}-----\n").into_bytes()].concat()
}

impl fmt::Debug for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JoinToken({})", self.id())
    }
}

impl fmt::Display for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut bytes = [&self.grid.0.to_be_bytes()[..], &self.authority, &self.secret].concat();
        for part in self.etcd.iter().flat_map(|etcd| etcd.parts()) {
            let len = u16::try_from(part.len()).expect("keys and certificates of ours are small");
            bytes.extend(len.to_be_bytes());
            bytes.extend(part);
        }
        bytes.extend(crc32c(&bytes).to_le_bytes());
        let prefix = if self.etcd.is_some() { PREFIX_WITH_ETCD } else { PREFIX };
        write!(f, "{prefix}{}", URL_SAFE_NO_PAD.encode(bytes))
    }
}

impl FromStr for JoinToken {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<JoinToken> {
        let damaged = "it is no token, or not all of one: copy the whole line that `holdfast grid token` has printed";
        let short = text.trim().strip_prefix(PREFIX);
        let bytes = short.or(text.trim().strip_prefix(PREFIX_WITH_ETCD));
        let bytes = bytes.and_then(|rest| URL_SAFE_NO_PAD.decode(rest).ok());
        let fits = |bytes: &Vec<u8>| match short {
            Some(_) => bytes.len() == TOKEN_BYTES,
            None => bytes.len() > TOKEN_BYTES,
        };
        let bytes = bytes.filter(fits).context(damaged)?;
        let (content, crc) = bytes.split_at(bytes.len() - CRC_BYTES);
        if crc32c(content).to_le_bytes() != *crc {
            bail!("{damaged}");
        }
        let (grid, rest) = content.split_at(GRID_BYTES);
        let (authority, rest) = rest.split_at(DIGEST_BYTES);
        let (secret, rest) = rest.split_at(DIGEST_BYTES);
        let etcd = short.is_none().then(|| EtcdAccess::parse(rest).context(damaged)).transpose()?;
        Ok(JoinToken {
            grid: GridId(u128::from_be_bytes(grid.try_into()?)),
            authority: authority.try_into()?,
            secret: secret.try_into()?,
            etcd: etcd.map(Box::new),
        })
    }
}

impl JoinToken {
    /// A token with a secret that nobody has had before.
    pub fn new(grid: GridId, authority: Fingerprint, secret: [u8; DIGEST_BYTES]) -> JoinToken {
        JoinToken { grid, authority, secret, etcd: None }
    }

    /// The same token, with what its holder shows etcd: etcd's authority, and a certificate with its key, in PEM.
    pub fn with_access(self, ca: &str, pair: &Pair) -> Result<JoinToken> {
        let der = |pem: &str| der_of(pem).context("a certificate for etcd is damaged");
        let etcd = EtcdAccess { ca: der(ca)?, certificate: der(&pair.certificate)?, key: der(&pair.key)? };
        Ok(JoinToken { etcd: Some(Box::new(etcd)), ..self })
    }

    /// What its holder shows etcd, where the token has that.
    pub fn access(&self) -> Option<EtcdTls> {
        let etcd = self.etcd.as_ref()?;
        let identity = (pem_of("CERTIFICATE", &etcd.certificate), pem_of("PRIVATE KEY", &etcd.key));
        Some(EtcdTls { ca: pem_of("CERTIFICATE", &etcd.ca), identity: Some(identity) })
    }

    /// What it is called where everybody can read.
    pub fn id(&self) -> String {
        hex(&mac(&self.secret, &[b"holdfast token id"])[..16])
    }

    fn seal(&self, purpose: &[&[u8]], body: String) -> Vec<u8> {
        let parts = [purpose, &[body.as_bytes()]].concat();
        let sealed = Sealed { seal: hex(&mac(&self.secret, &parts)), body };
        serde_json::to_vec(&sealed).expect("our records always encode")
    }

    fn open<T: DeserializeOwned>(&self, purpose: &[&[u8]], bytes: &[u8]) -> Result<T> {
        let sealed: Sealed = serde_json::from_slice(bytes).context("it is damaged")?;
        let parts = [purpose, &[sealed.body.as_bytes()]].concat();
        if !is_same(hex(&mac(&self.secret, &parts)).as_bytes(), sealed.seal.as_bytes()) {
            bail!("it does not come from who knows the token");
        }
        serde_json::from_str(&sealed.body).context("it is of another release")
    }

    /// For the metadata store.
    pub fn seal_request(&self, wanted: &Wanted) -> Vec<u8> {
        let body = serde_json::to_string(wanted).expect("our records always encode");
        self.seal(&[b"holdfast join request", self.id().as_bytes()], body)
    }

    /// What was sealed by who has the token.
    pub fn open_request(&self, bytes: &[u8]) -> Result<Wanted> {
        self.open(&[b"holdfast join request", self.id().as_bytes()], bytes)
    }

    /// `request` as it lies in the store.
    pub fn seal_answer(&self, request: &[u8], answer: &Answer) -> Vec<u8> {
        let body = serde_json::to_string(answer).expect("our records always encode");
        self.seal(&[b"holdfast join answer", self.id().as_bytes(), request], body)
    }

    /// What was sealed for this request by who gave the token out.
    pub fn open_answer(&self, request: &[u8], bytes: &[u8]) -> Result<Answer> {
        self.open(&[b"holdfast join answer", self.id().as_bytes(), request], bytes)
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What `--join` names: a grid, or a token for one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Join {
    /// Without TLS.
    Grid(GridId),
    Token(Box<JoinToken>),
}

impl Join {
    /// The grid to join, either way.
    pub fn grid(&self) -> GridId {
        match self {
            Join::Grid(grid) => *grid,
            Join::Token(token) => token.grid,
        }
    }

    /// The token, if it is one.
    pub fn token(&self) -> Option<&JoinToken> {
        match self {
            Join::Grid(_) => None,
            Join::Token(token) => Some(token),
        }
    }
}

impl FromStr for Join {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Join> {
        match text.parse() {
            Ok(grid) => Ok(Join::Grid(grid)),
            Err(_) => Ok(Join::Token(Box::new(text.parse()?))),
        }
    }
}

// A token on the command line, or in a file: the command line of a process everybody on its machine can read. The help
// of a command takes this in, so that it has no comment of its own there.
#[derive(Args, Clone, Debug, Default)]
pub struct TokenArgs {
    /// A token of `holdfast grid token --for` this machine, made where the grid's authority is; needed where that is
    /// another machine
    #[arg(long)]
    token: Option<JoinToken>,
    /// The token in a file, or `-` for standard input, where the list of processes does not show it
    #[arg(long, value_name = "FILE", conflicts_with = "token")]
    token_file: Option<PathBuf>,
}

impl TokenArgs {
    pub fn token(&self) -> Result<Option<JoinToken>> {
        let Some(file) = &self.token_file else { return Ok(self.token.clone()) };
        read(file).with_context(|| format!("cannot take a token from {}", file.display())).map(Some)
    }
}

/// Reads a token, or what else stands alone in a small file; `-` is standard input.
pub fn read<T: FromStr<Err = anyhow::Error>>(file: &Path) -> Result<T> {
    let mut text = String::new();
    if file == Path::new("-") {
        std::io::stdin().take(FILE_BYTES_MAX).read_to_string(&mut text)?;
    } else {
        std::fs::File::open(file)?.take(FILE_BYTES_MAX).read_to_string(&mut text)?;
    }
    text.trim().parse()
}

/// How long a token is good for: `30m`, `1h`, `2d`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Valid(pub Duration);

impl FromStr for Valid {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Valid> {
        let wrong = "give a number and m, h or d, up to 7d: for example 30m";
        let unit = match text.chars().last() {
            Some('m') => 60,
            Some('h') => 3600,
            Some('d') => 24 * 3600,
            _ => bail!("{wrong}"),
        };
        let count: u32 = text[..text.len() - 1].parse().context(wrong)?;
        let valid = Duration::from_secs(u64::from(count) * unit);
        if valid.is_zero() || valid > VALID_MAX {
            bail!("{wrong}");
        }
        Ok(Valid(valid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_runtime::pki::Authority;
    use holdfast_runtime::pki::etcd::User;
    use rustls_pki_types::pem::PemObject;
    use rustls_pki_types::{CertificateDer, PrivateKeyDer};

    fn token(secret: u8) -> JoinToken {
        JoinToken::new(GridId(7 << 100), [1; 32], [secret; 32])
    }

    #[test]
    fn a_token_reads_back_and_a_damaged_one_does_not() {
        let text = token(2).to_string();
        assert_eq!(text.parse::<JoinToken>().unwrap(), token(2));
        assert_eq!(format!(" {text}\n").parse::<Join>().unwrap(), Join::Token(Box::new(token(2))));
        assert_eq!(GridId(7).to_string().parse::<Join>().unwrap(), Join::Grid(GridId(7)));
        assert_ne!(token(2).id(), token(3).id());
        for damaged in [&text[1..], &text[..text.len() - 1], &text.replace("AQEB", "AQEC"), "", "hfjoin1_", "ü"] {
            assert!(damaged.parse::<Join>().unwrap_err().to_string().contains("grid token"), "{damaged}");
        }
    }

    #[test]
    fn a_token_takes_access_to_etcd_along() {
        let (authority, _) = Authority::make(GridId(7)).unwrap();
        let user = User::Joining { token: token(2).id(), until_s: 7 };
        let pair = authority.issue_etcd_user(&user, Duration::from_secs(60)).unwrap();
        let ca = authority.etcd_ca().unwrap();
        let with = token(2).with_access(&ca, &pair).unwrap();
        let text = with.to_string();
        assert!(text.len() < FILE_BYTES_MAX as usize / 2 && text.starts_with("hfjoin2_"), "{}", text.len());
        let read: JoinToken = text.parse().unwrap();
        assert!(read == with && read.id() == token(2).id());
        let access = read.access().unwrap();
        let same = |a: &[u8], pem: &str| {
            CertificateDer::from_pem_slice(a).unwrap() == CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()
        };
        let (certificate, key) = access.identity.unwrap();
        assert!(same(&access.ca, &ca) && same(&certificate, &pair.certificate));
        assert_eq!(
            PrivateKeyDer::from_pem_slice(&key).unwrap(),
            PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).unwrap()
        );
        assert!(token(2).access().is_none());
        for damaged in [&text[..text.len() - 8], &text.replace("hfjoin2_", "hfjoin1_"), &text.replace("AQEB", "AQEC")] {
            assert!(damaged.parse::<JoinToken>().unwrap_err().to_string().contains("grid token"), "{damaged}");
        }
        assert!(token(2).to_string().replace("hfjoin1_", "hfjoin2_").parse::<JoinToken>().is_err());
    }

    #[test]
    fn what_is_sealed_opens_for_its_token_and_purpose_alone() {
        let wanted =
            Wanted { machine: "b".into(), host: Some("pem".into()), nodes: [(3, "pem".into())].into(), etcd: None };
        let request = token(2).seal_request(&wanted);
        assert_eq!(token(2).open_request(&request).unwrap(), wanted);
        assert!(token(3).open_request(&request).is_err(), "another token");
        let changed = String::from_utf8(request.clone()).unwrap().replace("\\\"b\\\"", "\\\"c\\\"");
        assert!(token(2).open_request(changed.as_bytes()).unwrap_err().to_string().contains("does not come"));
        assert!(token(2).open_request(b"{}").is_err() && token(2).open_request(b"").is_err());
        let refused = Answer::Refused { why: "no".into() };
        let answer = token(2).seal_answer(&request, &refused);
        assert_eq!(token(2).open_answer(&request, &answer).unwrap(), refused);
        assert!(token(2).open_answer(b"another", &answer).is_err(), "another request");
        assert!(token(2).open_answer(&request, &request).is_err(), "another purpose");
    }

    #[test]
    fn times_have_units_and_bounds() {
        assert_eq!("90m".parse::<Valid>().unwrap(), Valid(Duration::from_secs(5400)));
        assert_eq!("7d".parse::<Valid>().unwrap().0, VALID_MAX);
        for odd in ["", "h", "8d", "0m", "1", "-1h", "1ü", "99999999999h"] {
            assert!(odd.parse::<Valid>().is_err(), "{odd}");
        }
    }
}
