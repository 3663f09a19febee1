//! Certificates that are taken back before they end: one list a grid, which its authority signs.
//!
//! ```text
//! holdfast revoked 1
//! grid 0f6c…                    whose list it is
//! version 3                     each change makes a higher one
//! holdfast://0f6c…/host/b 1763848000
//! holdfast://0f6c…/client/vm7 1763849123
//! signature 3045…               of the authority's key over all lines before, in hexadecimal digits
//! ```
//! An entry takes back all certificates of a name that were issued up to that second; one that is issued later is good. As the
//! list is signed, whoever carries it need not be trusted, and whoever has it needs nobody to judge by it.
//!
//! Invariant: a process goes from a version to a higher one alone ([`RevokedNow::replace`]).

use crate::pki::{Authority, Identity, PkiError, Role, is_signed_by, issued_s};
use crate::tls::TlsStream;
use holdfast_base::GridId;
use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};
use thiserror::Error;

const FIRST_LINE: &str = "holdfast revoked 1";

/// Longest list that is looked at.
pub const REVOKED_BYTES_MAX: usize = 1 << 20;

/// Why a text is no list to go by.
#[derive(Debug, Error)]
pub enum RevokedError {
    #[error("it is no list of revoked certificates, or a damaged one (line {0})")]
    Form(usize),
    #[error("it is of grid {0}, which is another one")]
    Grid(GridId),
    #[error("this grid's authority has not signed it")]
    Signature,
    #[error(transparent)]
    Pki(#[from] PkiError),
}

/// What is taken back.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Revoked {
    grid: GridId,
    version: u64,
    /// Up to when, in seconds since 1970.
    until: BTreeMap<Role, u64>,
}

impl Revoked {
    /// Of a grid in which nothing was taken back.
    pub fn none(grid: GridId) -> Revoked {
        Revoked { grid, version: 0, until: BTreeMap::new() }
    }

    pub fn version(&self) -> u64 {
        self.version
    }

    /// Whose certificates were taken back, and up to when issued.
    pub fn entries(&self) -> impl Iterator<Item = (&Role, u64)> {
        self.until.iter().map(|(role, until)| (role, *until))
    }

    /// Whether there is anybody on it who comes by HTTP: releases before these take no such list.
    pub fn names_operators(&self) -> bool {
        self.until.keys().any(|role| matches!(role, Role::Operator(_) | Role::Reader(_)))
    }

    /// All that was issued to `role` by now.
    pub fn add(&mut self, role: Role, now_s: u64) {
        self.version += 1;
        // Where the clock was set back, what was taken back stays so; so is what was given after that
        // ([`Authority::issue_s`]).
        let next = self.until.get(&role).map_or(now_s, |until| now_s.max(until.saturating_add(1)));
        self.until.insert(role, next);
    }

    /// Whether a certificate counts for nothing any more.
    pub fn covers(&self, identity: &Identity, issued_s: u64) -> bool {
        identity.grid == self.grid && self.until.get(&identity.role).is_some_and(|until| issued_s <= *until)
    }

    /// As [`Revoked::covers`], of a certificate.
    pub fn covers_certificate(&self, der: &[u8], identity: &Identity) -> bool {
        // One whose time can't be read is none.
        self.covers(identity, issued_s(der).unwrap_or(0))
    }

    fn body(&self) -> String {
        let mut text = format!("{FIRST_LINE}\ngrid {}\nversion {}\n", self.grid, self.version);
        for (role, until) in &self.until {
            let identity = Identity { grid: self.grid, role: role.clone() };
            text.push_str(&format!("{identity} {until}\n"));
        }
        text
    }

    /// The text that others may go by.
    pub fn sign(&self, authority: &Authority) -> Result<String, PkiError> {
        let body = self.body();
        let signature: String = authority.seal(body.as_bytes())?.iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(format!("{body}signature {signature}\n"))
    }

    /// What a text says that the authority has signed, whose certificate in PEM is `ca`.
    pub fn verify(text: &str, grid: GridId, ca: &str) -> Result<Revoked, RevokedError> {
        if text.len() > REVOKED_BYTES_MAX {
            return Err(RevokedError::Form(1));
        }
        let body_len = text.rfind("signature ").ok_or(RevokedError::Form(text.lines().count()))?;
        let (body, seal) = text.split_at(body_len);
        let signature = seal.strip_prefix("signature ").and_then(|hex| hex.strip_suffix('\n')).and_then(bytes_of);
        let signature = signature.ok_or(RevokedError::Form(text.lines().count()))?;
        if !is_signed_by(ca, body.as_bytes(), &signature)? {
            return Err(RevokedError::Signature);
        }
        Revoked::parse(body, grid)
    }

    fn parse(body: &str, grid: GridId) -> Result<Revoked, RevokedError> {
        let mut lines = body.lines().enumerate().map(|(n, line)| (n + 1, line));
        let mut next = |what: &str| {
            let (n, line) = lines.next().ok_or(RevokedError::Form(1))?;
            line.strip_prefix(what).map(|rest| (n, rest.to_string())).ok_or(RevokedError::Form(n))
        };
        next(FIRST_LINE)?;
        let (n, of) = next("grid ")?;
        let of: GridId = of.parse().map_err(|_| RevokedError::Form(n))?;
        if of != grid {
            return Err(RevokedError::Grid(of));
        }
        let (n, version) = next("version ")?;
        let version = version.parse().map_err(|_| RevokedError::Form(n))?;
        let mut until = BTreeMap::new();
        for (n, line) in lines {
            let (identity, at) = line.split_once(' ').ok_or(RevokedError::Form(n))?;
            let identity: Identity = identity.parse().map_err(|_| RevokedError::Form(n))?;
            until.insert(identity.role, at.parse().map_err(|_| RevokedError::Form(n))?);
        }
        Ok(Revoked { grid, version, until })
    }
}

fn bytes_of(hex: &str) -> Option<Vec<u8>> {
    let digits = hex.as_bytes();
    let pair = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    digits.len().is_multiple_of(2).then(|| digits.chunks(2).map(pair).collect()).flatten()
}

/// The list that a process goes by now; clones share it.
#[derive(Clone, Debug)]
pub struct RevokedNow(Arc<RwLock<Revoked>>);

impl RevokedNow {
    pub fn new(grid: GridId) -> RevokedNow {
        RevokedNow(Arc::new(RwLock::new(Revoked::none(grid))))
    }

    /// It is replaced whole: after a panic it is as good as before.
    pub fn get(&self) -> Revoked {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether what somebody was given counts for nothing any more: as [`Revoked::covers`].
    pub fn covers_issued(&self, identity: &Identity, issued_s: u64) -> bool {
        self.0.read().unwrap_or_else(PoisonError::into_inner).covers(identity, issued_s)
    }

    /// Goes by a newer list from here on; false where it is not newer.
    pub fn replace(&self, newer: &Revoked) -> bool {
        let mut now = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let is_newer = newer.version > now.version;
        if is_newer {
            now.clone_from(newer);
        }
        is_newer
    }

    /// Whether a certificate counts for nothing any more.
    pub fn covers(&self, der: &[u8], identity: &Identity) -> bool {
        self.0.read().unwrap_or_else(PoisonError::into_inner).covers_certificate(der, identity)
    }

    /// Whether the peer's certificate was taken back since the session was made.
    pub fn covers_peer(&self, stream: &TlsStream) -> bool {
        stream.peer_certificate().is_some_and(|(der, identity)| self.covers(der, &identity))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_base::NodeId;
    use rustls_pki_types::CertificateDer;
    use rustls_pki_types::pem::PemObject;

    const GRID: GridId = GridId(7);

    fn list() -> Revoked {
        let mut list = Revoked::none(GRID);
        list.add(Role::Host("b".into()), 1_000);
        list.add(Role::Node(NodeId(3)), 2_000);
        list.add(Role::Client("vm-7".into()), 3_000);
        list
    }

    #[test]
    fn a_signed_list_reads_back_and_any_change_is_found() {
        let (authority, kept) = Authority::make(GRID).unwrap();
        let text = list().sign(&authority).unwrap();
        assert_eq!(Revoked::verify(&text, GRID, &kept.certificate).unwrap(), list());
        let loaded = Authority::load(GRID, &kept).unwrap();
        let again = list().sign(&loaded).unwrap();
        assert_eq!(Revoked::verify(&again, GRID, &kept.certificate).unwrap(), list(), "by the key that was kept");
        for at in 0..text.len() {
            let mut bytes = text.clone().into_bytes();
            bytes[at] ^= 1;
            let Ok(forged) = String::from_utf8(bytes) else { continue };
            assert!(Revoked::verify(&forged, GRID, &kept.certificate).is_err(), "byte {at}: {forged}");
            assert!(Revoked::verify(&text[..at], GRID, &kept.certificate).is_err(), "cut at {at}");
        }
        let (_, other) = Authority::make(GRID).unwrap();
        assert!(matches!(Revoked::verify(&text, GRID, &other.certificate), Err(RevokedError::Signature)));
        assert!(matches!(Revoked::verify(&text, GridId(8), &kept.certificate), Err(RevokedError::Grid(GRID))));
    }

    #[test]
    fn what_was_issued_later_is_good_and_versions_only_rise() {
        let identity = |grid, name: &str| Identity { grid, role: Role::Host(name.into()) };
        let list = list();
        assert!(list.covers(&identity(GRID, "b"), 1_000) && !list.covers(&identity(GRID, "b"), 1_001));
        assert!(!list.covers(&identity(GRID, "a"), 0) && !list.covers(&identity(GridId(8), "b"), 0));
        let now = RevokedNow::new(GRID);
        assert!(now.replace(&list) && !now.replace(&list));
        assert!(!now.replace(&Revoked::none(GRID)));
        assert_eq!(now.get(), list);
    }

    /// Clocks of machines differ, and revoking counts by the second.
    #[test]
    fn who_was_revoked_is_given_a_good_certificate_at_once() {
        let (role, now_s) = (Role::Client("a".into()), now_s());
        let (mut authority, _) = Authority::make(GRID).unwrap();
        let issued = |authority: &Authority, role: &Role| {
            let pair = authority.issue(role).unwrap();
            let der = CertificateDer::from_pem_slice(pair.certificate.as_bytes()).unwrap();
            (issued_s(&der).unwrap(), der)
        };
        let mut list = Revoked::none(GRID);
        list.add(role.clone(), now_s + 60);
        authority.heed(list.entries().map(|(role, until)| (role.clone(), until)));
        let (at, der) = issued(&authority, &role);
        assert_eq!(at, now_s + 61);
        assert!(!list.covers_certificate(&der, &Identity { grid: GRID, role: role.clone() }));
        let mut again = list.clone();
        again.add(role.clone(), now_s);
        assert!(
            again.covers_certificate(&der, &Identity { grid: GRID, role: role.clone() }),
            "it is taken back at once"
        );
        assert!(issued(&authority, &Role::Client("b".into())).0 < now_s + 60);
        // By a clock that is days behind none can be good.
        authority.heed([(role.clone(), now_s + 3 * 24 * 3600)]);
        assert!(matches!(authority.issue(&role), Err(PkiError::Clock { .. })));
    }

    fn now_s() -> u64 {
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs()
    }

    #[test]
    fn a_certificate_tells_when_it_was_issued() {
        let (authority, _) = Authority::make(GRID).unwrap();
        let role = Role::Client("a".into());
        let pair = authority.issue(&role).unwrap();
        let der = CertificateDer::from_pem_slice(pair.certificate.as_bytes()).unwrap();
        let issued = issued_s(&der).unwrap();
        assert!(issued.abs_diff(now_s()) < 60);
        let mut list = Revoked::none(GRID);
        list.add(role.clone(), issued);
        assert!(list.covers_certificate(&der, &Identity { grid: GRID, role: role.clone() }));
        let before = |until| {
            let mut list = Revoked::none(GRID);
            list.add(role.clone(), until);
            list
        };
        assert!(!before(issued - 1).covers_certificate(&der, &Identity { grid: GRID, role: role.clone() }));
        // A clock that was set back gives nothing back.
        list.add(role.clone(), issued - 1_000);
        assert!(list.covers_certificate(&der, &Identity { grid: GRID, role: role.clone() }));
        // Another authority's begin to be good when they are issued.
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        let uri = Identity { grid: GRID, role: role.clone() }.to_string();
        params.subject_alt_names = vec![rcgen::SanType::URI(rcgen::string::Ia5String::try_from(uri).unwrap())];
        params.not_before = rcgen::date_time_ymd(2026, 1, 1);
        let other = params.self_signed(&rcgen::KeyPair::generate().unwrap()).unwrap();
        assert_eq!(issued_s(other.der()), Some(1_767_225_600));
        assert!(before(1_767_225_600).covers_certificate(other.der(), &Identity { grid: GRID, role }));
    }
}
