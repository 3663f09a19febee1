//! A machine without the key of the grid's authority asks, with a token, for certificates.
//!
//! Faults: keys are made here and never leave this machine. A request that is not answered in time is taken back; a token
//! may be used up by then, and whoever asks is told to get another one.

use super::certs::{self, Certificates, now_s};
use super::layout::GridConfig;
use super::processes::wait;
use super::token::{Answer, EtcdGrant, JoinToken, Wanted, answer_key, request_key};
use super::{authority, etcd};
use crate::host::meta::Meta;
use crate::host::presence::live_hosts;
use anyhow::{Context, Result, bail};
use holdfast_api::{Code, refuse};
use holdfast_base::{MetaVersion, NodeId};
use holdfast_format::meta::{TokenRecord, decode, token_key};
use holdfast_runtime::meta::{Record, Swap};
use holdfast_runtime::pki::etcd::{User, user_of_pem};
use holdfast_runtime::pki::{self, Facts, Pair, Role, is_same};
use holdfast_runtime::revoked::RevokedNow;
use holdfast_runtime::tls::link::holder_of;
use std::collections::BTreeMap;
use std::time::Duration;

/// How long an answer may take: the host that signs looks each half second, and may just be starting.
const ANSWER_MAX: Duration = Duration::from_secs(30);

const ANOTHER: &str = "make another one with `holdfast grid token`";

/// What was answered, in PEM.
pub struct Signed {
    ca: String,
    certificates: BTreeMap<Role, String>,
    etcd: Option<EtcdGrant>,
}

impl Signed {
    /// Of an answer to that machine; why not, where it was refused.
    pub fn of(answer: Answer, machine: &str) -> Result<Signed> {
        match answer {
            Answer::Signed { ca, host, nodes, etcd } => {
                let nodes = nodes.into_iter().map(|(node, pem)| (Role::Node(NodeId(node)), pem));
                let host = host.map(|pem| (Role::Host(machine.to_string()), pem));
                let only = |(role, pem): (Role, String)| Ok((role, pki::only_certificate(&pem)?));
                let certificates = nodes.chain(host).map(only).collect::<Result<_>>()?;
                Ok(Signed { ca: pki::only_certificate(&ca)?, certificates, etcd })
            }
            Answer::Refused { why } => refuse!(Code::NotPermitted, "{why}"),
        }
    }
}

/// What is asked to be signed, and the keys that never leave this machine.
pub struct Asked {
    pub wanted: Wanted,
    keys: Vec<(Role, String)>,
    /// For access to etcd.
    etcd_key: Option<String>,
}

impl Asked {
    /// New keys for these, and requests for certificates; for access to etcd, where that goes by the grid's certificates and the host is
    /// among them.
    pub fn make(machine: &str, roles: &[Role], wants_etcd: bool) -> Result<Asked> {
        let mut wanted = Wanted { machine: machine.to_string(), host: None, nodes: BTreeMap::new(), etcd: None };
        let mut keys = Vec::new();
        for role in roles {
            let (key, request) = pki::request()?;
            match role {
                Role::Host(_) => wanted.host = Some(request),
                Role::Node(node) => drop(wanted.nodes.insert(node.0, request)),
                Role::Client(_) | Role::Operator(_) | Role::Reader(_) => {
                    unreachable!("a machine of the grid is no client")
                }
            }
            keys.push((role.clone(), key));
        }
        let etcd_key = (wants_etcd && wanted.host.is_some()).then(pki::request).transpose()?;
        let etcd_key = etcd_key.map(|(key, request)| {
            wanted.etcd = Some(request);
            key
        });
        Ok(Asked { wanted, keys, etcd_key })
    }

    /// Puts keys and certificates where this machine's processes look: all of them are looked at before the first.
    pub fn put(self, certificates: &Certificates, signed: &Signed) -> Result<()> {
        let mut pairs = Vec::new();
        for (role, key) in self.keys {
            let certificate =
                signed.certificates.get(&role).cloned().with_context(|| format!("{role} was left out"))?;
            let grid = certificates.grid();
            match holder_of(&certificate, &certificates.ca(), grid, &RevokedNow::new(grid)) {
                Ok(found) if found == role => {}
                Ok(found) => bail!("the certificate of {role} is for another one, {found}"),
                Err(why) => bail!("the certificate of {role} is none of this grid's: {why}"),
            }
            if !certs::go_together(&certificate, &key) {
                bail!("the certificate of {role} is for another key");
            }
            pairs.push((role, Pair { certificate, key }));
        }
        if let Some(key) = self.etcd_key {
            let certificate = access_to_etcd(&self.wanted.machine, &key, signed.etcd.as_ref())?;
            etcd::put(certificates, &Pair { certificate, key })?;
        }
        for (role, pair) in &pairs {
            certificates.put(role, pair)?;
            certificates.check(role)?;
        }
        Ok(())
    }
}

/// The certificate for a key that etcd is to be shown.
fn access_to_etcd(machine: &str, key: &str, given: Option<&EtcdGrant>) -> Result<String> {
    let EtcdGrant { certificate, .. } =
        given.context("it has given no access to etcd: it is of an older release, or uses another etcd")?;
    match user_of_pem(certificate) {
        Some(User::Host { name, .. }) if name == machine => {}
        _ => bail!("the certificate for etcd is another's"),
    }
    if !certs::go_together(certificate, key) {
        bail!("the certificate for etcd is for another key");
    }
    Ok(certificate.clone())
}

/// A token that may be used by this machine, as far as that can be told without asking.
pub struct JoinClient<'a> {
    meta: Meta,
    token: &'a JoinToken,
    machine: String,
    signer: String,
    /// Etcd goes by the grid's certificates, so that this machine needs one for that, too.
    wants_etcd: bool,
}

impl<'a> JoinClient<'a> {
    /// Finds at once what could be found wrong with a token.
    pub fn begin(meta: Meta, token: &'a JoinToken, config: &GridConfig) -> Result<JoinClient<'a>> {
        let Some((known, _)) = authority::named_in(&meta)? else {
            refuse!(
                Code::Invalid,
                "grid {} has no TLS, so there is nothing to sign: join it with its id (--join {0})",
                token.grid
            );
        };
        if !authority::is_named(&known, &token.authority) {
            refuse!(
                Code::State,
                "the token is of another authority than the grid's: either it was made before the grid was given its present \
                 one, or the metadata store is not to be trusted. Compare `holdfast grid tls show` on a machine of the grid, then \
                 {ANOTHER} there"
            );
        }
        let id = token.id();
        let Some(record) = meta.get(&token_key(&id))? else {
            refuse!(
                Code::NotFound,
                "grid {} knows no such token: it has expired long ago, or was taken back; {ANOTHER}",
                token.grid
            );
        };
        let record: TokenRecord = decode(&record.value).context("the token's record is damaged")?;
        if let Some(machine) = &record.used_by {
            refuse!(
                Code::NotPermitted,
                "the token was used already, for machine {machine}; {ANOTHER}: one is good for one machine, once"
            );
        }
        if record.valid_until <= now_s() {
            refuse!(
                Code::NotPermitted,
                "the token has expired, going by this machine's clock; {ANOTHER}, or one that is good for longer (--valid 4h)"
            );
        }
        let signer = record.host;
        if !live_hosts(&meta)?.contains(&signer) {
            refuse!(
                Code::Unavailable,
                "the host {signer}, which has made the token and signs certificates, is not up; start it (`holdfast grid up` on \
                 its machine), then try again"
            );
        }
        let machine = config.host.name.clone();
        Ok(JoinClient { meta, token, machine, signer, wants_etcd: config.meta.has_own_tls() })
    }

    /// Gets certificates for new keys, and puts both where this machine's processes look.
    pub fn obtain(&self, certificates: &Certificates, roles: &[Role]) -> Result<()> {
        let asked = Asked::make(&self.machine, roles, self.wants_etcd)?;
        let signed = self.ask(&asked.wanted)?;
        if !is_same(&Facts::of_pem(&signed.ca)?.fingerprint, &self.token.authority) {
            refuse!(
                Code::NotPermitted,
                "host {} answered with another authority's certificate; {ANOTHER}",
                self.signer
            );
        }
        certificates.put_ca(&signed.ca)?;
        if let Some(grant) = &signed.etcd {
            etcd::put_ca(certificates, &grant.ca)?;
        }
        asked
            .put(certificates, &signed)
            .with_context(|| format!("what host {} signed can't be used; {ANOTHER}", self.signer))
    }

    fn ask(&self, wanted: &Wanted) -> Result<Signed> {
        let id = self.token.id();
        let (request_key, answer_key) = (request_key(&id), answer_key(&id));
        let request = self.token.seal_request(wanted);
        let Swap::Done(version) = self.meta.swap(&request_key, MetaVersion::ABSENT, Some(&request), None)? else {
            refuse!(Code::Changed, "somebody is using this token right now, or was cut short doing so; {ANOTHER}");
        };
        let mut answer: Option<Record> = None;
        wait(ANSWER_MAX, || {
            // Where the store does not answer, it may the next time.
            answer = self.meta.get(&answer_key).ok().flatten();
            answer.is_some() || {
                std::thread::sleep(Duration::from_millis(90));
                false
            }
        });
        // Left behind they do no harm: the host that signs tidies up after an expired token.
        let _ = self.meta.swap(&request_key, version, None, None);
        let Some(answer) = answer else {
            refuse!(
                Code::Unavailable,
                "host {} did not answer within {} s; see its log, then {ANOTHER}: this one may be used up",
                self.signer,
                ANSWER_MAX.as_secs()
            );
        };
        let _ = self.meta.swap(&answer_key, answer.version, None, None);
        let opened = self.token.open_answer(&request, &answer.value);
        let answer = opened.with_context(|| format!("what came as an answer can't be used; {ANOTHER}"))?;
        Signed::of(answer, &self.machine).with_context(|| format!("host {} signs nothing", self.signer))
    }
}
