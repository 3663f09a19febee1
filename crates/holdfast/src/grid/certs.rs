//! The certificates of one machine's directory, in a grid that has TLS.
//!
//! ```text
//! DIR/tls/               0700
//! DIR/tls/ca.pem         the grid's authority: what this machine's processes judge others by
//! DIR/tls/ca.key         0600, only where certificates are signed: the first machine's
//! DIR/tls/host.pem, host.key, node-N.pem, node-N.key    this machine's own; keys 0600
//! DIR/tls/revoked        certificates that were taken back, signed by the authority (see `revoked`)
//! DIR/tls/clients/NAME/  certificates for clients of volumes, as they leave for these clients' machines
//! DIR/tls/etcd*          what an etcd of the grid's own goes by (see `etcd`)
//! DIR/tls/tokens/        tokens that were given out here, with their secrets (see `host::signer`)
//! ```
//! Faults: both of a pair are durable beside their places before the key is put into its own, then the certificate. What was cut
//! short between the two is done by whoever needs the pair next ([`finish`]).

use super::layout::{GridConfig, GridDir, Replacement, write_durably, write_secret};
use super::revoked;
use crate::logger;
use anyhow::{Context, Result};
use bip39::{Language, Mnemonic};
use holdfast_api::{Code, refuse};
use holdfast_base::{GridId, NodeId};
use holdfast_runtime::pki::{self, AUTHORITY_VALID, Authority, Facts, Fingerprint, LEAF_VALID, Pair, Role};
use holdfast_runtime::revoked::Revoked;
use holdfast_runtime::tls::link::{HostTls, LinkPaths, ServerTls};
use serde::Serialize;
use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// What members of etcd are listed as.
const ETCD_MEMBER: &str = "etcd's member";

/// What the authority's certificate is listed as that a member of etcd goes by.
const ETCD_AUTHORITY: &str = "etcd's authority";

/// What a host's server of NBD is told of as.
const SERVER: &str = "this host's server of clients";

const AUTHORITY: &str = "authority";

/// From when on `status` warns of certificates that end.
const WARN_DAYS: i64 = 30;

/// The same of an authority's: clients of volumes have copies of it, which are to be replaced by hand.
const WARN_DAYS_OF_AUTHORITY: i64 = 90;

const DAY_S: i64 = 24 * 3600;

/// Seconds since 1970.
pub fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// A directory of certificates.
#[derive(Clone, Debug)]
pub struct Certificates {
    root: PathBuf,
    grid: GridId,
}

/// A certificate as `holdfast grid tls show` lists it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Leaf {
    /// Where it is.
    pub file: PathBuf,
    /// Its common name, for people.
    pub subject: String,
    /// `authority`, `host NAME` or `node NUMBER`.
    pub role: String,
    /// Nobody accepts it before; seconds since 1970.
    pub begins: u64,
    pub expires: u64,
    /// Whole days; negative once it has ended.
    pub days_left: i64,
}

impl Leaf {
    pub fn is_authority(&self) -> bool {
        self.role == AUTHORITY
    }

    /// Its host has it made anew by itself.
    pub fn renews(&self) -> bool {
        !self.is_authority() && !self.role.starts_with(ETCD_MEMBER) && !self.role.starts_with(ETCD_AUTHORITY)
    }

    fn warn_days(&self) -> i64 {
        let is_authority = self.is_authority() || self.role.starts_with(ETCD_AUTHORITY);
        if is_authority { WARN_DAYS_OF_AUTHORITY } else { WARN_DAYS }
    }

    /// What a certificate says; whom it speaks for before `role`, where it says that.
    fn read(role: String, file: PathBuf, now: u64) -> Result<Leaf> {
        let facts = Facts::of_pem(&read(&file)?).with_context(|| file.display().to_string())?;
        let left_s = i64::try_from(facts.not_after).unwrap_or(i64::MAX) - i64::try_from(now).unwrap_or(i64::MAX);
        Ok(Leaf {
            file,
            subject: facts.subject,
            role: facts.identity.map_or(role, |identity| identity.role.to_string()),
            begins: facts.not_before,
            expires: facts.not_after,
            days_left: left_s.div_euclid(DAY_S),
        })
    }
}

/// Signed to see whether a key and a certificate go together.
const PROOF: &[u8] = b"holdfast";

pub fn go_together(certificate: &str, key: &str) -> bool {
    let proved = pki::sign_with(key, PROOF).and_then(|seal| pki::is_signed_by(certificate, PROOF, &seal));
    proved.unwrap_or(false)
}

/// Replaces a key and its certificate. A key without its certificate is good for nothing.
pub fn replace_pair(paths: &LinkPaths, pair: &Pair) -> Result<()> {
    let key = Replacement::prepare_secret(&paths.key, pair.key.as_bytes())?;
    let certificate = Replacement::prepare(&paths.certificate, pair.certificate.as_bytes())?;
    key.put()?;
    certificate.put()
}

/// Puts the certificate of a key into its place, where the replacement of both was cut short after that of the key.
pub fn finish(paths: &LinkPaths) {
    let read = |path: &Path| fs::read_to_string(path).ok();
    let Some(key) = read(&paths.key) else { return };
    if read(&paths.certificate).is_some_and(|certificate| go_together(&certificate, &key)) {
        return;
    }
    let left = Replacement::left_beside(&paths.certificate);
    if let Some(left) = left.filter(|left| left.bytes().is_ok_and(|certificate| go_together(&certificate, &key)))
        && let Err(error) = left.put()
    {
        logger::warn(format_args!("{error:#}"));
    }
}

/// Makes a directory that only its owner may enter.
pub fn make_private_dir(path: &Path) -> Result<()> {
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.with_context(|| format!("cannot make the directory {}; check permissions", path.display()))
}

fn read(path: &Path) -> Result<String> {
    let advice = "restore it, or have it made anew with `holdfast grid tls rotate`";
    fs::read_to_string(path).with_context(|| format!("cannot read {}; {advice}", path.display()))
}

fn client_paths(dir: &Path) -> LinkPaths {
    let path = |name: &str| dir.join(name);
    LinkPaths { ca: path("ca-cert.pem"), certificate: path("client-cert.pem"), key: path("client-key.pem") }
}

/// Of a server of NBD, in a directory as `nbd.tls_dir` names it; the authority is the clients'.
pub fn server_paths(dir: &Path) -> LinkPaths {
    let path = |name: &str| dir.join(name);
    LinkPaths { ca: path("ca-cert.pem"), certificate: path("server-cert.pem"), key: path("server-key.pem") }
}

/// All that a machine needs certificates for.
pub fn roles(config: &GridConfig) -> Vec<Role> {
    let nodes = config.nodes.iter().map(|node| Role::Node(NodeId(node.id)));
    [Role::Host(config.host.name.clone())].into_iter().chain(nodes).collect()
}

impl Certificates {
    /// Those of a directory, whether there are any or not.
    pub fn of(dir: &GridDir, grid: GridId) -> Certificates {
        Certificates { root: dir.tls_dir(), grid }
    }

    /// In a directory that holds nothing else.
    pub fn in_dir(root: &Path, grid: GridId) -> Certificates {
        Certificates { root: root.to_path_buf(), grid }
    }

    pub fn grid(&self) -> GridId {
        self.grid
    }

    /// Where they are.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The authority's certificate.
    pub fn ca(&self) -> PathBuf {
        self.root.join("ca.pem")
    }

    fn ca_key(&self) -> PathBuf {
        self.root.join("ca.key")
    }

    /// Where a process of this machine finds what it needs.
    pub fn paths(&self, role: &Role) -> LinkPaths {
        let stem = match role {
            Role::Host(_) => "host".to_string(),
            Role::Node(node) => format!("node-{node}"),
            Role::Client(name) => return client_paths(&self.client_dir(name)),
            Role::Operator(name) | Role::Reader(name) => return client_paths(&self.operator_dir(name)),
        };
        let path = |extension: &str| self.root.join(format!("{stem}.{extension}"));
        LinkPaths { ca: self.ca(), certificate: path("pem"), key: path("key") }
    }

    /// Where those of a client of volumes are put, unless somewhere else is asked for.
    pub fn client_dir(&self, name: &str) -> PathBuf {
        self.root.join("clients").join(name)
    }

    /// The same of who uses the HTTP interface.
    pub fn operator_dir(&self, name: &str) -> PathBuf {
        self.root.join("operators").join(name)
    }

    /// Signs a certificate for a client, of volumes or of the HTTP interface, into a directory as NBD clients expect it.
    pub fn issue_client(&self, role: &Role, dir: &Path) -> Result<()> {
        let pair = self.authority()?.issue(role)?;
        self.put_credentials(dir, &client_paths(dir), &pair)
    }

    /// Signs a certificate for a server that clients reach by these names, into a directory for `nbd.tls_dir` and
    /// `api.tls_dir`.
    pub fn issue_server(&self, names: &[String], dir: &Path) -> Result<()> {
        let pair = self.authority()?.issue_server(names, LEAF_VALID)?;
        self.put_credentials(dir, &server_paths(dir), &pair)
    }

    fn put_credentials(&self, dir: &Path, paths: &LinkPaths, pair: &Pair) -> Result<()> {
        make_private_dir(dir)?;
        let ca = self.ca_pem()?;
        let key = Replacement::prepare_secret(&paths.key, pair.key.as_bytes())?;
        let certificate = Replacement::prepare(&paths.certificate, pair.certificate.as_bytes())?;
        let ca = Replacement::prepare(&paths.ca, ca.as_bytes())?;
        [key, certificate, ca].into_iter().try_for_each(Replacement::put)
    }

    /// Whether certificates can be signed here.
    pub fn has_authority(&self) -> bool {
        self.ca_key().exists()
    }

    /// Makes the grid's authority.
    pub fn make_authority(&self) -> Result<()> {
        self.make_authority_for(AUTHORITY_VALID)
    }

    /// The same, good for so long.
    pub fn make_authority_for(&self, valid: Duration) -> Result<()> {
        make_private_dir(&self.root)?;
        let (_, pair) = Authority::make_for(self.grid, valid)?;
        write_secret(&self.ca_key(), pair.key.as_bytes())?;
        write_durably(&self.ca(), pair.certificate.as_bytes())
    }

    /// The grid's authority, to sign with.
    pub fn authority(&self) -> Result<Authority> {
        let pair = Pair { certificate: read(&self.ca())?, key: read(&self.ca_key())? };
        let mut authority = Authority::load(self.grid, &pair)?;
        // Without a list that can be read a certificate may be revoked when it is made; another one mends that.
        if let Ok(revoked) = revoked::load(&self.ca(), self.grid) {
            authority.heed(revoked.entries().map(|(role, until)| (role.clone(), until)));
        }
        Ok(authority)
    }

    /// Has the authority go on under its name and key, by a certificate that is good for longer.
    pub fn renew_authority(&self) -> Result<()> {
        self.authority_key()?;
        let next = self.authority()?.renewed(&self.ca_pem()?)?;
        let ends = lasts(&next)?.0;
        // One that was made in the same second is as good.
        if !self.take_renewed(&next)? && ends < lasts(&self.ca_pem()?)?.0 {
            refuse!(
                Code::State,
                "another certificate of the authority would end before the one that is there: this machine's clock is \
                 wrong (`timedatectl` shows whether it is kept right), or was when that was made"
            );
        }
        Ok(())
    }

    /// Takes another certificate of this very authority, which it has made itself, where that is good for longer; false
    /// where it is not.
    pub fn take_renewed(&self, pem: &str) -> Result<bool> {
        let own = self.ca_pem()?;
        let is_later = pki::is_same_authority(&own, pem) && lasts(pem)? > lasts(&own)?;
        if is_later {
            self.put_ca(&pki::only_certificate(pem)?)?;
        }
        Ok(is_later)
    }

    /// The authority's key, in PEM: whoever has it can sign for anybody.
    pub fn authority_key(&self) -> Result<String> {
        if !self.has_authority() {
            refuse!(
                Code::NotPermitted,
                "{} has no key of the grid's authority; `holdfast machine list` says which machine has it",
                self.root.display()
            );
        }
        read(&self.ca_key())
    }

    /// Takes a key in that is the authority's.
    pub fn put_authority_key(&self, key: &str) -> Result<()> {
        self.check_authority_key(key)?;
        write_secret(&self.ca_key(), key.as_bytes())
    }

    /// Fails where a key is not the authority's.
    pub fn check_authority_key(&self, key: &str) -> Result<()> {
        let pair = Pair { certificate: read(&self.ca())?, key: key.to_string() };
        let authority = Authority::load(self.grid, &pair)?;
        // What it signs has to be good by the certificate that everybody has.
        let signed = Revoked::none(self.grid).sign(&authority)?;
        Revoked::verify(&signed, self.grid, &pair.certificate)
            .context("the key is not that of this grid's authority")?;
        Ok(())
    }

    /// The authority's key as words (BIP 39, in English): 32 bytes of its secret and a check sum.
    pub fn authority_phrase(&self) -> Result<String> {
        let secret = pki::key_secret(&self.authority_key()?)?;
        Ok(Mnemonic::from_entropy(&secret).expect("32 bytes are 24 words").to_string())
    }

    /// Takes the key in by its words.
    pub fn put_authority_phrase(&self, words: &str) -> Result<()> {
        let words = words.split_whitespace().map(str::to_lowercase).collect::<Vec<_>>().join(" ");
        let phrase = Mnemonic::parse_in_normalized(Language::English, &words);
        let entropy = phrase.map(|phrase| phrase.to_entropy());
        let secret: [u8; pki::SECRET_BYTES] = entropy.ok().and_then(|bytes| bytes.try_into().ok()).context(
            "these are not the twenty-four words of `holdfast grid tls authority phrase`, in their order; compare each with what was \
             written down",
        )?;
        let key = pki::key_of_secret(&self.ca_pem()?, &secret);
        let key = key.context("the words are those of another grid's authority, or of an older one of this grid")?;
        self.put_authority_key(&key)
    }

    /// The authority's certificate, in PEM.
    pub fn ca_pem(&self) -> Result<String> {
        read(&self.ca())
    }

    /// Of the authority's certificate.
    pub fn fingerprint(&self) -> Result<Fingerprint> {
        Ok(Facts::of_pem(&self.ca_pem()?)?.fingerprint)
    }

    /// Takes the grid's authority over from another machine: without its key.
    pub fn put_ca(&self, pem: &str) -> Result<()> {
        make_private_dir(&self.root)?;
        write_durably(&self.ca(), pem.as_bytes())
    }

    /// Replaces a key and its certificate.
    pub fn put(&self, role: &Role, pair: &Pair) -> Result<()> {
        replace_pair(&self.paths(role), pair)
    }

    /// Signs new certificates for a machine, where the authority is.
    pub fn sign(&self, roles: &[Role], machine: &str) -> Result<()> {
        if !self.has_authority() {
            refuse!(
                Code::NotPermitted,
                "{} has no key of the grid's authority, so that nothing can be signed here; make a token on the grid's first \
                 machine (`holdfast grid token --for {machine}`), and give it with --token",
                self.root.display()
            );
        }
        self.issue(roles)
    }

    /// Signs new certificates, for new keys.
    pub fn issue(&self, roles: &[Role]) -> Result<()> {
        let authority = self.authority()?;
        roles.iter().try_for_each(|role| self.put(role, &authority.issue(role)?))
    }

    /// Deletes what was a node's that is gone.
    pub fn forget(&self, role: &Role) {
        let paths = self.paths(role);
        for path in [paths.key, paths.certificate] {
            // It may never have been there.
            let _ = fs::remove_file(path);
        }
    }

    /// What a host needs to connect to nodes.
    pub fn load_host(&self, name: &str) -> Result<HostTls> {
        let paths = self.paths(&Role::Host(name.to_string()));
        finish(&paths);
        HostTls::load(&paths, self.grid, name).with_context(|| self.unusable())
    }

    /// What a host needs to be connected to by other hosts.
    pub fn load_host_server(&self, name: &str) -> Result<ServerTls> {
        let role = Role::Host(name.to_string());
        finish(&self.paths(&role));
        ServerTls::load(&self.paths(&role), self.grid, role).with_context(|| self.unusable())
    }

    /// Fails where a process could not start with what is there.
    pub fn check(&self, role: &Role) -> Result<()> {
        match role {
            Role::Host(name) => self.load_host(name).map(drop),
            Role::Node(node) => {
                finish(&self.paths(role));
                let loaded = ServerTls::load(&self.paths(role), self.grid, Role::Node(*node));
                loaded.map(drop).with_context(|| self.unusable())
            }
            // No process of a grid shows it.
            Role::Client(_) | Role::Operator(_) | Role::Reader(_) => Ok(()),
        }
    }

    fn unusable(&self) -> String {
        format!(
            "the certificates in {} can't be used; restore them, or have them made anew (`holdfast grid tls rotate`)",
            self.root.display()
        )
    }

    /// What is there, the authority first.
    pub fn list(&self, roles: &[Role]) -> Result<Vec<Leaf>> {
        let own = roles.iter().map(|role| (role.to_string(), self.paths(role).certificate));
        let all = [(AUTHORITY.to_string(), self.ca())].into_iter().chain(own).chain(self.of_etcd(roles));
        let now = now_s();
        all.map(|(role, file)| Leaf::read(role, file, now)).collect()
    }

    /// That of a server of NBD in the directory that `nbd.tls_dir` names, and the authority's before it.
    pub fn list_server(&self, dir: &Path) -> Result<[Leaf; 2]> {
        let now = now_s();
        let authority = Leaf::read(AUTHORITY.to_string(), self.ca(), now)?;
        Ok([authority, Leaf::read(SERVER.to_string(), server_paths(dir).certificate, now)?])
    }

    /// What an etcd of the grid's own goes by, where it has one: this machine's access, if it is to have any, and
    /// members' certificates where they were signed.
    fn of_etcd(&self, roles: &[Role]) -> Vec<(String, PathBuf)> {
        let access = super::etcd::paths(self).certificate;
        let is_wanted = access.exists() && roles.iter().any(|role| matches!(role, Role::Host(_)));
        let access = is_wanted.then(|| ("access to etcd".to_string(), access));
        // A directory that can't be read is one without members.
        let members = fs::read_dir(super::etcd_members::default_dir(self)).into_iter().flatten().flatten();
        let of_member = |entry: fs::DirEntry| {
            let member = entry.file_name().display().to_string();
            let [certificate, ca] = [super::etcd_members::CERTIFICATE, "ca.pem"].map(|name| entry.path().join(name));
            [(format!("{ETCD_MEMBER} {member}"), certificate), (format!("{ETCD_AUTHORITY} at member {member}"), ca)]
        };
        let of_members = members.flat_map(of_member).filter(|(_, file)| file.exists());
        access.into_iter().chain(of_members).collect()
    }

    /// What `status` has to say of them.
    pub fn warnings(&self, roles: &[Role]) -> Vec<String> {
        let listed = match self.list(roles) {
            Ok(listed) => listed,
            // Who may only look at the grid can't read them, and can't renew them.
            Err(error) if is_denied(&error) => return Vec::new(),
            Err(error) => return vec![format!("{error:#}")],
        };
        let now = now_s();
        listed.iter().filter_map(|leaf| warning(leaf, now)).collect()
    }
}

/// What `status` has to say of the certificate in a directory that `nbd.tls_dir` or `api.tls_dir` names: `own` are the grid's, where
/// it has any.
pub fn server_warning(dir: &Path, own: Option<&Certificates>) -> Option<String> {
    let paths = server_paths(dir);
    let names = own.and_then(|own| {
        let (certificate, ca) = (fs::read_to_string(&paths.certificate).ok()?, own.ca_pem().ok()?);
        pki::server_names(&certificate, &ca)
    });
    let shown = dir.display();
    let advice = match names {
        Some(names) => format!(
            "the host makes another by itself where it may write to {shown}, while a host is up that has the \
             authority's key; else, where that is, `holdfast grid tls server {} --out DIR`, and copy the files to \
             {shown}. The host uses them from the next connection on",
            names.join(" ")
        ),
        None => format!(
            "have another made by whoever has signed it, and put it and its key, {}, there; the host uses them from \
             the next connection on",
            paths.key.display()
        ),
    };
    file_warning(&paths.certificate, SERVER, &advice)
}

/// The same of the certificate that etcd is shown from a directory that `--etcd-tls-dir` has named.
pub fn etcd_warning(dir: &Path) -> Option<String> {
    let advice = format!(
        "have another made by whoever has signed it, and put it and its key, {}, there; the host uses them by itself",
        dir.join("client-key.pem").display()
    );
    file_warning(&dir.join("client-cert.pem"), "access to etcd", &advice)
}

/// Whether it can be used is found out by who uses it; readers of the grid perhaps can't read it.
fn file_warning(file: &Path, what: &str, advice: &str) -> Option<String> {
    let leaf = Leaf::read(what.to_string(), file.to_path_buf(), now_s()).ok()?;
    let (shown, days) = (file.display(), leaf.days_left);
    (days < WARN_DAYS).then(|| match days {
        ..0 => format!("the certificate of {what}, {shown}, has ended: {advice}"),
        _ => format!("the certificate of {what}, {shown}, ends in {days} days: {advice}"),
    })
}

fn is_denied(error: &anyhow::Error) -> bool {
    let denied = |e: &std::io::Error| e.kind() == std::io::ErrorKind::PermissionDenied;
    error.chain().filter_map(|cause| cause.downcast_ref()).any(denied)
}

fn warning(leaf: &Leaf, now: u64) -> Option<String> {
    if leaf.days_left >= leaf.warn_days() && leaf.begins <= now {
        return None;
    }
    let (what, days) = (&leaf.role, leaf.days_left);
    let advice = if what == AUTHORITY {
        "`holdfast grid tls authority renew` on a machine that has its key (`holdfast machine list` shows which have) \
         makes another one over the same key, which all machines take by themselves"
    } else if what.starts_with(ETCD_AUTHORITY) {
        "make that member's files anew with `holdfast grid etcd member NAME=ADDRESS`, copy ca.pem, member.pem and \
         member.key to its machine, and restart etcd there, one member after the other"
    } else if what.starts_with(ETCD_MEMBER) {
        "make it anew with `holdfast grid etcd member NAME=ADDRESS`, and copy member.pem and member.key to its machine"
    } else {
        "its host makes another by itself while one is up that has the authority's key; else `holdfast grid tls rotate`"
    };
    if leaf.begins > now {
        return Some(format!(
            "the certificate of {what} is good from {} on, and nobody accepts it before: this machine's clock is wrong \
             (`timedatectl` shows whether it is kept right), or was when that was made, and then {advice}",
            logger::date(leaf.begins)
        ));
    }
    Some(match days {
        ..0 if leaf.is_authority() => {
            format!("the certificate of {what} has expired, and clients of volumes accept it no more: {advice}")
        }
        ..0 => format!("the certificate of {what} has expired, and nobody accepts it any more: {advice}"),
        _ => format!("the certificate of {what} expires in {days} days: {advice}"),
    })
}

/// Removes what belongs to a grid that was never complete; what others have put there stays, and the authority where it
/// was made before.
pub fn clear(root: &Path, keep_authority: bool) -> Result<()> {
    let entries = match fs::read_dir(root) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e).with_context(|| format!("cannot list {}", root.display())),
    };
    for entry in entries {
        let path = entry?.path();
        let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        let is_key = path.extension().is_some_and(|extension| extension == "pem" || extension == "key");
        let is_list = path.file_name().is_some_and(|name| name == "revoked");
        let is_own = matches!(stem, "host" | "etcd") || stem.starts_with("node-");
        if is_list || is_key && (is_own || stem == "ca" && !keep_authority) {
            fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
        }
    }
    // It may hold what is others'.
    let _ = fs::remove_dir(root);
    Ok(())
}

/// A certificate as people compare it.
pub fn fingerprint_text(fingerprint: &Fingerprint) -> String {
    fingerprint.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// When a certificate ends, and which it is: of two that end in the same second all machines take the same.
pub fn lasts(certificate: &str) -> Result<(u64, Fingerprint)> {
    let facts = Facts::of_pem(certificate)?;
    Ok((facts.not_after, facts.fingerprint))
}

/// What can't be guessed, for a token.
pub fn secret() -> [u8; pki::DIGEST_BYTES] {
    pki::random()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_authoritys_key_is_had_back_by_its_words() {
        let temp = tempfile::tempdir().unwrap();
        let dir = |name: &str| Certificates::in_dir(&temp.path().join(name), GridId(7));
        let (a, b, other) = (dir("a"), dir("b"), dir("c"));
        a.make_authority().unwrap();
        other.make_authority().unwrap();
        b.put_ca(&a.ca_pem().unwrap()).unwrap();
        let phrase = a.authority_phrase().unwrap();
        assert_eq!(phrase.split(' ').count(), 24);
        let why = |words: &str| format!("{:#}", b.put_authority_phrase(words).unwrap_err());
        assert!(why("word word").contains("not the twenty-four words"));
        assert!(why(&other.authority_phrase().unwrap()).contains("another grid's authority"));
        let mut swapped: Vec<&str> = phrase.split(' ').collect();
        let place = (1..24).find(|at| swapped[*at] != swapped[0]).unwrap();
        swapped.swap(0, place);
        // One of 256 orders has a right check sum: it is another key then.
        b.put_authority_phrase(&swapped.join(" ")).unwrap_err();
        assert!(!b.has_authority());
        b.put_authority_phrase(&format!("  {}\n", phrase.to_uppercase())).unwrap();
        b.sign(&[Role::Host("b".to_string())], "b").unwrap();
        b.check(&Role::Host("b".to_string())).unwrap();
    }

    #[test]
    fn a_pair_whose_replacement_was_cut_short_is_whole_again() {
        let temp = tempfile::tempdir().unwrap();
        let certificates = Certificates::in_dir(&temp.path().join("tls"), GridId(7));
        certificates.make_authority().unwrap();
        for role in [Role::Host("a".to_string()), Role::Node(NodeId(1))] {
            let paths = certificates.paths(&role);
            for has_old in [false, true] {
                let next = certificates.authority().unwrap().issue(&role).unwrap();
                let key = Replacement::prepare_secret(&paths.key, next.key.as_bytes()).unwrap();
                // It is killed before it can take away what lies beside.
                std::mem::forget(Replacement::prepare(&paths.certificate, next.certificate.as_bytes()).unwrap());
                if has_old {
                    certificates.check(&role).expect("the old pair is used until then");
                    assert_ne!(read(&paths.certificate).unwrap(), next.certificate);
                }
                key.put().unwrap();
                certificates.check(&role).unwrap();
                assert_eq!(read(&paths.certificate).unwrap(), next.certificate);
            }
            // What is left of an older attempt is not taken for the key's.
            let (next, other) = [(); 2].map(|()| certificates.authority().unwrap().issue(&role).unwrap()).into();
            std::mem::forget(Replacement::prepare(&paths.certificate, other.certificate.as_bytes()).unwrap());
            write_secret(&paths.key, next.key.as_bytes()).unwrap();
            assert!(certificates.check(&role).is_err());
            certificates.put(&role, &next).unwrap();
            certificates.check(&role).unwrap();
        }
    }

    #[test]
    fn a_machine_signs_for_itself_and_keys_are_its_owners_alone() {
        let temp = tempfile::tempdir().unwrap();
        let dir = GridDir::choose(Some(temp.path())).unwrap();
        let certificates = Certificates::of(&dir, GridId(7));
        let roles = [Role::Host("a".to_string()), Role::Node(NodeId(1))];
        assert!(certificates.list(&roles).is_err());
        assert!(certificates.sign(&roles, "a").unwrap_err().to_string().contains("holdfast grid token"));
        certificates.make_authority().unwrap();
        certificates.issue(&roles).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&dir.tls_dir()), 0o700);
        for key in ["ca.key", "host.key", "node-1.key"] {
            assert_eq!(mode(&dir.tls_dir().join(key)), 0o600, "{key}");
        }
        for role in &roles {
            certificates.check(role).unwrap();
        }
        let listed = certificates.list(&roles).unwrap();
        let shown: Vec<&str> = listed.iter().map(|leaf| leaf.role.as_str()).collect();
        assert_eq!(shown, ["authority", "host a", "node 1"]);
        // A second may have passed since.
        assert!((7299..=7300).contains(&listed[0].days_left) && (729..=730).contains(&listed[2].days_left));
        assert!(certificates.warnings(&roles).is_empty());
        let before = certificates.fingerprint().unwrap();
        let old = read(&certificates.paths(&roles[1]).certificate).unwrap();
        certificates.sign(&roles, "a").unwrap();
        assert_eq!(certificates.fingerprint().unwrap(), before, "the authority stays");
        assert_ne!(read(&certificates.paths(&roles[1]).certificate).unwrap(), old);
        certificates.check(&roles[1]).unwrap();
        certificates.forget(&roles[1]);
        assert!(certificates.check(&roles[1]).is_err());
        assert_eq!(certificates.warnings(&roles).len(), 1);
        fs::write(dir.tls_dir().join("server-key.pem"), b"another's").unwrap();
        clear(&dir.tls_dir(), false).unwrap();
        let left: Vec<_> = fs::read_dir(dir.tls_dir()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["server-key.pem"]);
        clear(&dir.root().join("none"), false).unwrap();
    }

    #[test]
    fn what_ends_soon_is_told_with_what_to_do() {
        let leaf = |days_left| Leaf {
            file: PathBuf::new(),
            subject: String::new(),
            role: "node 3".to_string(),
            begins: 1000,
            expires: 0,
            days_left,
        };
        let warning = |leaf: &Leaf| warning(leaf, 1000).unwrap();
        let text = warning(&leaf(29));
        assert!(text.contains("node 3 expires in 29 days") && text.contains("tls rotate"), "{text}");
        assert!(warning(&leaf(-1)).contains("has expired"));
        let early = super::warning(&leaf(700), 999).unwrap();
        assert!(early.contains("is good from 1970-01-01 on") && early.contains("clock"), "{early}");
        assert_eq!(super::warning(&leaf(700), 1000), None);
    }

    #[test]
    fn a_servers_certificate_that_is_good_for_long_is_not_told_of() {
        let temp = tempfile::tempdir().unwrap();
        let certificates = Certificates::in_dir(&temp.path().join("tls"), GridId(7));
        certificates.make_authority().unwrap();
        let dir = temp.path().join("nbd");
        let told = |own| server_warning(&dir, own);
        assert_eq!(told(Some(&certificates)), None, "the host says so when it starts");
        certificates.issue_server(&["10.0.0.1".to_string()], &dir).unwrap();
        assert_eq!(told(Some(&certificates)), None);
        let days = |days: u64| Duration::from_secs(days * 24 * 3600);
        let names = ["10.0.0.1", "vmhost-1"].map(str::to_string);
        let pair = certificates.authority().unwrap().issue_server(&names, days(20)).unwrap();
        replace_pair(&server_paths(&dir), &pair).unwrap();
        let own = told(Some(&certificates)).unwrap();
        let file = server_paths(&dir).certificate.display().to_string();
        assert!(own.contains(&file) && own.contains("grid tls server 10.0.0.1 vmhost-1"), "{own}");
        let (other, _) = Authority::make(GridId(7)).unwrap();
        replace_pair(&server_paths(&dir), &other.issue_server(&names, days(20)).unwrap()).unwrap();
        for foreign in [told(Some(&certificates)).unwrap(), told(None).unwrap()] {
            assert!(foreign.contains(&file) && foreign.contains("whoever has signed it"), "{foreign}");
        }
        fs::copy(&file, dir.join("client-cert.pem")).unwrap();
        assert!(etcd_warning(&dir).unwrap().contains("client-key.pem"));
    }

    #[test]
    fn an_authority_that_ends_is_told_of_early_and_renewed_over_its_key() {
        let temp = tempfile::tempdir().unwrap();
        let [a, b] = ["a", "b"].map(|name| Certificates::in_dir(&temp.path().join(name), GridId(7)));
        a.make_authority_for(Duration::from_secs(80 * 24 * 3600)).unwrap();
        let first = a.ca_pem().unwrap();
        b.put_ca(&first).unwrap();
        let role = Role::Host("a".to_string());
        a.issue(std::slice::from_ref(&role)).unwrap();
        let told = a.warnings(std::slice::from_ref(&role));
        assert!(
            told.len() == 1 && told[0].contains("expires in ") && told[0].contains("tls authority renew"),
            "{told:?}"
        );
        assert!(b.renew_authority().is_err(), "who has no key");
        a.renew_authority().unwrap();
        assert_eq!(a.warnings(std::slice::from_ref(&role)), Vec::<String>::new());
        a.check(&role).unwrap();
        assert!(b.take_renewed(&a.ca_pem().unwrap()).unwrap());
        assert_eq!(b.ca_pem().unwrap(), a.ca_pem().unwrap());
        let (_, other) = Authority::make(GridId(7)).unwrap();
        for older in [&first, &other.certificate, &a.ca_pem().unwrap()] {
            assert!(!b.take_renewed(older).unwrap());
        }
        // What was written down before is the key still.
        let phrase = a.authority_phrase().unwrap();
        b.put_authority_phrase(&phrase).unwrap();
    }
}
