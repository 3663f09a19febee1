//! The certificate of the grid's authority, which all machines have: when it is made anew, it gets to the others.
//!
//! Role: whoever renews it replaces the file on his own machine, and no more. Each host compares its file with the
//! record `tls` now and then, and has the one follow the other: the certificate that is good for longer stays.
//!
//! Invariant: a machine takes nothing but one certificate that the authority has made itself, for the same name and key.
//! The metadata store, which carries it, can neither pass off another nor bring an older one back.
//!
//! Faults: a machine that is away takes it when it is back. One of an older release goes on with what it has: hosts and
//! nodes go by name and key of the authority alone.

use super::Lock;
use super::certs::{self, Certificates, fingerprint_text};
use super::layout::GridDir;
use crate::host::meta::Meta;
use anyhow::{Context, Result};
use holdfast_api::{Code, refuse};
use holdfast_base::MetaVersion;
use holdfast_format::meta::{Other, TLS_KEY, TlsRecord, decode, encode};
use holdfast_runtime::meta::Swap;
use holdfast_runtime::pki::{self, Fingerprint};
use std::cmp::Ordering;

/// What says that the grid has that authority, by its certificate in PEM.
pub fn record_of(certificate: &str) -> Result<TlsRecord> {
    let authority = fingerprint_text(&pki::Facts::of_pem(certificate)?.fingerprint);
    Ok(TlsRecord { authority, certificate: Some(certificate.to_string()), other: Other::new() })
}

/// Whether the record is of the certificate with this fingerprint.
pub fn is_named(record: &TlsRecord, fingerprint: &Fingerprint) -> bool {
    record.authority == fingerprint_text(fingerprint)
}

/// What is to be done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    Nothing,
    /// The record has the later certificate.
    Take,
    /// This machine has it.
    Tell,
}

/// The authority that a grid's metadata name, if it has TLS.
pub fn named_in(meta: &Meta) -> Result<Option<(TlsRecord, MetaVersion)>> {
    let Some(record) = meta.get(TLS_KEY)? else { return Ok(None) };
    let named = decode(&record.value).context("metadata record tls is damaged")?;
    Ok(Some((named, record.version)))
}

fn step(certificates: &Certificates, record: &TlsRecord) -> Result<Step> {
    let own = certificates.ca_pem()?;
    let is_named = is_named(record, &certificates.fingerprint()?);
    if record.certificate.is_none() && is_named {
        return Ok(Step::Nothing);
    }
    let is_known = |other: &&String| pki::is_same_authority(&own, other);
    Ok(match record.certificate.as_ref().filter(is_known) {
        Some(other) => match certs::lasts(other)?.cmp(&certs::lasts(&own)?) {
            Ordering::Greater => Step::Take,
            Ordering::Equal if is_named => Step::Nothing,
            Ordering::Equal | Ordering::Less => Step::Tell,
        },
        // Who has the key knows that this is the authority.
        None if certificates.has_authority() => Step::Tell,
        None => Step::Nothing,
    })
}

/// Whether this machine and the record have one certificate.
pub fn is_settled(certificates: &Certificates, meta: &Meta) -> Result<bool> {
    let Some((record, _)) = named_in(meta)? else { return Ok(true) };
    Ok(step(certificates, &record)? == Step::Nothing)
}

/// Takes the certificate that the record has, or has the record name this machine's; true where either was done.
pub fn settle(dir: &GridDir, certificates: &Certificates, meta: &Meta) -> Result<bool> {
    if is_settled(certificates, meta)? {
        return Ok(false);
    }
    let _lock = Lock::take(dir)?;
    let Some((record, version)) = named_in(meta)? else { return Ok(false) };
    match step(certificates, &record)? {
        Step::Nothing => return Ok(false),
        Step::Take => drop(certificates.take_renewed(&record.certificate.unwrap_or_default())?),
        Step::Tell => {
            let next = encode(&TlsRecord { other: record.other, ..record_of(&certificates.ca_pem()?)? });
            let Swap::Done(_) = meta.swap(TLS_KEY, version, Some(&next), None)? else {
                refuse!(Code::Changed, "another machine has told of a new certificate of the authority meanwhile");
            };
        }
    }
    Ok(true)
}

/// Makes the authority's certificate anew on a machine that has its key.
pub fn renew(dir: &GridDir, certificates: &Certificates) -> Result<()> {
    let _lock = Lock::take(dir)?;
    certificates.renew_authority()
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_base::GridId;
    use holdfast_runtime::clock;
    use holdfast_runtime::meta::LocalStore;
    use holdfast_runtime::pki::AUTHORITY_VALID;
    use std::sync::Arc;
    use std::time::Duration;

    const GRID: GridId = GridId(7);
    const DAY: Duration = Duration::from_secs(24 * 3600);

    fn put(meta: &Meta, record: &TlsRecord) {
        let version = meta.get(TLS_KEY).unwrap().map_or(MetaVersion::ABSENT, |found| found.version);
        let bytes = encode(record);
        assert!(matches!(meta.swap(TLS_KEY, version, Some(&bytes), None).unwrap(), Swap::Done(_)));
    }

    #[test]
    fn all_machines_take_a_renewed_authority_and_nothing_else() {
        let temp = tempfile::tempdir().unwrap();
        let dir = |name: &str| {
            let root = temp.path().join(name);
            std::fs::create_dir(&root).unwrap();
            GridDir::choose(Some(&root)).unwrap()
        };
        let (a_dir, b_dir) = (dir("a"), dir("b"));
        let [a, b] = [&a_dir, &b_dir].map(|dir| Certificates::of(dir, GRID));
        a.make_authority_for(DAY).unwrap();
        b.put_ca(&a.ca_pem().unwrap()).unwrap();
        let meta: Meta = Arc::new(LocalStore::in_memory(Arc::new(clock::now)));
        // As older releases have made it.
        let first = TlsRecord { certificate: None, ..record_of(&a.ca_pem().unwrap()).unwrap() };
        put(&meta, &first);
        assert!(is_settled(&a, &meta).unwrap() && is_settled(&b, &meta).unwrap());
        renew(&a_dir, &a).unwrap();
        assert!(!settle(&b_dir, &b, &meta).unwrap(), "nobody has told yet");
        assert!(settle(&a_dir, &a, &meta).unwrap() && is_settled(&a, &meta).unwrap());
        assert!(settle(&b_dir, &b, &meta).unwrap() && is_settled(&b, &meta).unwrap());
        assert_eq!(a.ca_pem().unwrap(), b.ca_pem().unwrap());
        let told = named_in(&meta).unwrap().unwrap().0;
        assert!(is_named(&told, &a.fingerprint().unwrap()) && !is_named(&first, &a.fingerprint().unwrap()));
        // Whoever writes to the store brings back no older one, and passes off no other.
        let good = a.ca_pem().unwrap();
        let other = Certificates::in_dir(&temp.path().join("c"), GRID);
        other.make_authority_for(2 * AUTHORITY_VALID).unwrap();
        for forged in [first, record_of(&other.ca_pem().unwrap()).unwrap()] {
            put(&meta, &forged);
            // Who has no key does not know whether it is the record that is wrong.
            let _ = settle(&b_dir, &b, &meta).unwrap();
            settle(&a_dir, &a, &meta).unwrap();
            assert_eq!([a.ca_pem().unwrap(), b.ca_pem().unwrap()], [good.clone(), good.clone()]);
            assert!(is_named(&named_in(&meta).unwrap().unwrap().0, &a.fingerprint().unwrap()));
        }
        // Nor puts another one beside one of the authority's.
        renew(&a_dir, &a).unwrap();
        put(&meta, &record_of(&format!("{}{}", a.ca_pem().unwrap(), other.ca_pem().unwrap())).unwrap());
        assert!(!settle(&b_dir, &b, &meta).unwrap());
        assert_eq!(b.ca_pem().unwrap(), good);
        // Two that are made at once come to one.
        b.put_authority_key(&a.authority_key().unwrap()).unwrap();
        renew(&b_dir, &b).unwrap();
        for _ in 0..3 {
            settle(&a_dir, &a, &meta).unwrap();
            settle(&b_dir, &b, &meta).unwrap();
        }
        assert_eq!(a.ca_pem().unwrap(), b.ca_pem().unwrap());
        assert!(is_settled(&a, &meta).unwrap() && is_settled(&b, &meta).unwrap());
    }
}
