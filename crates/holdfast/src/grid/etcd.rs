//! An etcd that goes by the grid's own certificates: who is let in there, and what each may do.
//!
//! ```text
//! DIR/tls/etcd-ca.pem, etcd.pem, etcd.key   what this machine judges etcd by, and shows it
//! DIR/tls/etcd-users.json                   machines' users, where certificates are signed: for an emptied etcd
//! DIR/grid.prepared                         the id of a grid that is to be made here, whose authority is there already
//! ```
//! Role: what changes users is done where the key of the grid's authority is: a certificate of etcd's root is made for
//! it each time, and kept nowhere.
//!
//! States of a machine's user: let in (role [`ROLE`]) → revoked (role [`TOLD`]: it may read that it was taken out, and
//! nothing else) → deleted, when its certificate has ended. Who joins has a user until the token ends or was used.
//!
//! Faults: whatever is done here may be done again; the host that signs compares etcd's users with the list of revoked
//! certificates now and then, and mends what was cut short.

use super::certs::{Certificates, finish, make_private_dir, now_s, replace_pair};
use super::grow;
use super::layout::{EtcdMeta, GridConfig, GridDir, MetaConfig, write_durably, write_secret};
use super::revoked;
use super::token::{EtcdGrant, JoinToken, Wanted};
use crate::daemon::outwait;
use crate::host::meta;
use crate::logger;
use anyhow::{Context, Result};
use holdfast_api::{Code, refuse};
use holdfast_base::GridId;
use holdfast_runtime::meta::{EtcdConfig, EtcdStore, EtcdTls, Right};
use holdfast_runtime::pki::etcd::{User, user_of_pem};
use holdfast_runtime::pki::{Authority, Facts, Identity, LEAF_VALID, Pair, Role};
use holdfast_runtime::revoked::Revoked;
use holdfast_runtime::tls::link::LinkPaths;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

/// Of machines: all of the grid's records.
const ROLE: &str = "holdfast";

/// Of machines whose certificates were revoked.
const TOLD: &str = "holdfast-told";

/// What says that a machine was taken out, and which certificates count no more.
fn rights_when_told() -> Vec<Right> {
    vec![Right::ReadUnder("removed/"), Right::Read("revoked")]
}

/// How long a certificate of root is good that is made for one purpose.
const ROOT_VALID: Duration = Duration::from_secs(3600);

/// The same, for people.
const ACCESS_VALID: Duration = Duration::from_secs(24 * 3600);

/// How long after its end a token's user stays, for who has just used it.
const LATE_S: u64 = 60;

/// A grid that is to be made in a directory.
#[derive(Serialize, Deserialize)]
struct Prepared {
    grid: String,
}

/// The grid that was prepared in a directory, if one was.
pub fn prepared(dir: &GridDir) -> Result<Option<GridId>> {
    let path = dir.prepared_path();
    let bytes = match fs::read(&path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e).with_context(|| format!("cannot read {}; check its permissions", path.display())),
    };
    let read = serde_json::from_slice::<Prepared>(&bytes).ok().and_then(|prepared| prepared.grid.parse().ok());
    read.map(Some).with_context(|| {
        format!("{} is damaged: remove it, and prepare the grid anew with `holdfast grid etcd member`", path.display())
    })
}

/// Makes a grid's id and authority before there is a grid: its etcd has to be there first.
pub fn prepare(dir: &GridDir) -> Result<Certificates> {
    if let Some(grid) = prepared(dir)? {
        return Ok(Certificates::of(dir, grid));
    }
    fs::create_dir_all(dir.root())
        .with_context(|| format!("cannot make the directory {}; choose another --dir", dir.root().display()))?;
    let grid = GridId(uuid::Uuid::new_v4().as_u128());
    let certificates = Certificates::of(dir, grid);
    certificates.make_authority()?;
    let prepared = serde_json::to_vec(&Prepared { grid: grid.to_string() }).expect("our records always encode");
    write_durably(&dir.prepared_path(), &prepared)?;
    Ok(certificates)
}

/// The grid that `grid up` makes in a directory, where it was prepared: its etcd goes by that grid's authority.
pub fn check_prepared(dir: &GridDir, meta: Option<&MetaConfig>, is_joining: bool) -> Result<Option<GridId>> {
    let (found, has_own_tls) = (prepared(dir)?, meta.is_some_and(MetaConfig::has_own_tls));
    if is_joining && found.is_some() {
        refuse!(Code::Exists, "a grid was prepared in {}; choose another --dir to join one", dir.root().display());
    }
    if has_own_tls && !is_joining && found.is_none() {
        refuse!(
            Code::State,
            "members of etcd that have https:// show certificates, and none are known in {}: make these members' \
             configuration there with `holdfast grid etcd member NAME=ADDRESS …`, or name a directory with others by \
             --etcd-tls-dir",
            dir.root().display()
        );
    }
    Ok(found)
}

/// Where this machine's access to etcd is.
pub fn paths(certificates: &Certificates) -> LinkPaths {
    let path = |name: &str| certificates.root().join(name);
    LinkPaths { ca: path("etcd-ca.pem"), certificate: path("etcd.pem"), key: path("etcd.key") }
}

/// Whom members of etcd go by.
pub fn put_ca(certificates: &Certificates, ca: &str) -> Result<()> {
    write_durably(&paths(certificates).ca, ca.as_bytes())
}

/// Replaces this machine's access to etcd.
pub fn put(certificates: &Certificates, pair: &Pair) -> Result<()> {
    replace_pair(&paths(certificates), pair)
}

/// What this machine shows etcd.
pub fn load(dir: &GridDir, config: &GridConfig) -> Result<EtcdTls> {
    let paths = paths(&Certificates::of(dir, config.grid_id()?));
    finish(&paths);
    let read = |path: &std::path::Path| {
        fs::read(path).with_context(|| {
            format!(
                "cannot read {}, which etcd's members ask for: let this machine in with a token (`holdfast grid \
                 token`, with --for \
                 {1} where that is a machine of the grid already), or name a directory with other certificates by \
                 --etcd-tls-dir",
                path.display(),
                config.host.name
            )
        })
    };
    let identity = Some((read(&paths.certificate)?, read(&paths.key)?));
    Ok(EtcdTls { ca: read(&paths.ca)?, identity })
}

/// Etcd, for who has the key of the grid's authority.
pub struct Door {
    store: EtcdStore,
    certificates: Certificates,
}

impl Door {
    /// None where etcd doesn't go by the grid's certificates, or this machine can't sign.
    pub fn of(dir: &GridDir, config: &GridConfig) -> Result<Option<Door>> {
        let MetaConfig::Etcd(etcd) = &config.meta else { return Ok(None) };
        let grid = config.grid_id()?;
        let certificates = Certificates::of(dir, grid);
        if !config.meta.has_own_tls() || !certificates.has_authority() {
            return Ok(None);
        }
        let authority = certificates.authority()?;
        let root = authority.issue_etcd_user(&User::Root, ROOT_VALID)?;
        let identity = Some((root.certificate.into_bytes(), root.key.into_bytes()));
        let tls = Some(EtcdTls { ca: authority.etcd_ca()?.into_bytes(), identity });
        let config = EtcdConfig { endpoints: etcd.endpoints.clone(), prefix: meta::etcd_prefix(&config.grid), tls };
        Ok(Some(Door { store: EtcdStore::connect(&config)?, certificates }))
    }

    /// For what is no user's business.
    pub fn store(&self) -> &EtcdStore {
        &self.store
    }

    /// Lets a user in.
    pub fn let_in(&self, user: &User) -> Result<()> {
        self.store.add_user(&user.to_string(), ROLE)?;
        if matches!(user, User::Host { .. }) {
            let mut known = self.known()?;
            known.insert(user.to_string());
            self.remember(&known)?;
        }
        Ok(())
    }

    /// A certificate for who joins by this token, who is let in with it until the token ends.
    pub fn issue_joining(&self, token: &str, until_s: u64) -> Result<(String, Pair)> {
        let user = User::Joining { token: token.to_string(), until_s };
        let valid = Duration::from_secs(until_s.saturating_sub(now_s()).saturating_add(LATE_S));
        let authority = self.certificates.authority()?;
        let pair = authority.issue_etcd_user(&user, valid)?;
        self.let_in(&user)?;
        Ok((authority.etcd_ca()?, pair))
    }

    /// A certificate of a machine for the key behind a request; from here on it is let in.
    fn answer(&self, machine: &str, request: &str) -> Result<(String, String)> {
        let authority = self.certificates.authority()?;
        let user = user_now(&authority, machine)?;
        let certificate = authority.answer_etcd_user(&user, request)?;
        self.let_in(&user)?;
        Ok((authority.etcd_ca()?, certificate))
    }

    /// Access for a machine that wants it.
    pub fn grant(&self, wanted: &Wanted) -> Result<Option<EtcdGrant>> {
        let Some(request) = &wanted.etcd else { return Ok(None) };
        let (ca, certificate) = self.answer(&wanted.machine, request)?;
        Ok(Some(EtcdGrant { ca, certificate }))
    }

    /// A new certificate for this machine.
    fn renew(&self, name: &str) -> Result<()> {
        let authority = self.certificates.authority()?;
        let user = user_now(&authority, name)?;
        let pair = authority.issue_etcd_user(&user, LEAF_VALID)?;
        self.let_in(&user)?;
        put_ca(&self.certificates, &authority.etcd_ca()?)?;
        put(&self.certificates, &pair)
    }

    /// Has etcd let in nobody but users, with those of machines that were let in before.
    fn protect(&self) -> Result<()> {
        self.store.protect(&[(ROLE, vec![Right::All]), (TOLD, rights_when_told())])?;
        let list = revoked::load(&self.certificates.ca(), self.certificates.grid())?;
        self.let_back_in(&list, &[]).map(drop)
    }

    /// Lets in machines that were let in before and are none of these users: etcd was emptied, and who told it whom to let
    /// in was cut short, or another host is about it. A user that a machine may need is never deleted.
    fn let_back_in(&self, list: &Revoked, users: &[(String, Vec<String>)]) -> Result<BTreeSet<String>> {
        let mut back = BTreeSet::new();
        for user in self.known()? {
            let Ok(User::Host { name, issued_s }) = user.parse() else { continue };
            let is_there = users.iter().any(|(there, _)| *there == user);
            if !is_there && !self.is_revoked(list, &name, issued_s) && !has_ended(issued_s) {
                self.store.add_user(&user, ROLE)?;
                back.insert(user);
            }
        }
        Ok(back)
    }

    fn is_revoked(&self, list: &Revoked, name: &str, issued_s: u64) -> bool {
        list.covers(&Identity { grid: self.certificates.grid(), role: Role::Host(name.to_string()) }, issued_s)
    }

    /// Takes from users what they may do no more. `is_over`: of a token, that nobody needs it any more.
    pub fn sync(&self, list: &Revoked, is_over: impl Fn(&str) -> bool) -> Result<()> {
        let mut users = self.store.users()?;
        // Nobody has been told yet whom to let in: it was emptied, say.
        if !users.iter().any(|(name, _)| *name == User::Root.to_string()) {
            self.protect()?;
            users = self.store.users()?;
        }
        let mut known = self.let_back_in(list, &users)?;
        for (user, roles) in users {
            let has = |role: &str| roles.iter().any(|has| has == role);
            match user.parse() {
                Ok(User::Host { issued_s, .. }) if has_ended(issued_s) => self.store.delete_user(&user)?,
                Ok(User::Host { name, issued_s }) if has(ROLE) && self.is_revoked(list, &name, issued_s) => {
                    self.store.change_role(&user, ROLE, TOLD)?;
                    logger::info(format_args!("etcd lets machine {name} change nothing any more ({user})"));
                }
                Ok(User::Host { .. }) if has(ROLE) => drop(known.insert(user)),
                Ok(User::Joining { token, until_s }) if until_s.saturating_add(LATE_S) < now_s() || is_over(&token) => {
                    self.store.delete_user(&user)?;
                }
                Ok(User::Host { .. } | User::Joining { .. } | User::Root) | Err(_) => {}
            }
        }
        self.remember(&known)
    }

    fn known(&self) -> Result<BTreeSet<String>> {
        let path = self.certificates.root().join("etcd-users.json");
        match fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .with_context(|| format!("{} is damaged: remove it, it is written anew", path.display())),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(BTreeSet::new()),
            Err(e) => Err(e).with_context(|| format!("cannot read {}", path.display())),
        }
    }

    fn remember(&self, known: &BTreeSet<String>) -> Result<()> {
        if self.known().is_ok_and(|now| now == *known) {
            return Ok(());
        }
        let bytes = serde_json::to_vec(known).expect("our records always encode");
        write_secret(&self.certificates.root().join("etcd-users.json"), &bytes)
    }
}

/// Of a certificate for this machine that is issued now.
fn user_now(authority: &Authority, machine: &str) -> Result<User> {
    let issued_s = authority.issue_s(&Role::Host(machine.to_string()))?;
    Ok(User::Host { name: machine.to_string(), issued_s })
}

/// Of a certificate of that time nobody needs to know any more.
fn has_ended(issued_s: u64) -> bool {
    issued_s.saturating_add(LEAF_VALID.as_secs()) < now_s()
}

/// Has etcd go by the grid's certificates, and let this machine in: nothing where that is not for this machine to do.
pub fn settle(dir: &GridDir, config: &GridConfig) -> Result<()> {
    let Some(door) = Door::of(dir, config)? else { return Ok(()) };
    // One that was just started elects first.
    let protected = outwait(|| door.protect(), meta::is_away);
    protected.context("etcd is not told whom to let in")?;
    let own = fs::read_to_string(paths(&door.certificates).certificate).ok();
    let left_s = |pem: &String| Facts::of_pem(pem).ok()?.not_after.checked_sub(now_s());
    let user = own.filter(|pem| left_s(pem).is_some()).and_then(|pem| user_of_pem(&pem));
    match user {
        Some(user @ User::Host { .. }) => door.let_in(&user),
        _ => door.renew(&config.host.name),
    }
}

/// New access to etcd for the machine that signs.
pub fn renew(dir: &GridDir, config: &GridConfig) -> Result<()> {
    Door::of(dir, config)?.map_or(Ok(()), |door| door.renew(&config.host.name))
}

/// Has this machine use other members: of the same cluster, or of one that the grid has moved to.
pub fn use_members(dir: &GridDir, etcd: EtcdMeta, token: Option<&JoinToken>) -> Result<GridConfig> {
    let _lock = super::Lock::take(dir)?;
    let config = dir.load()?;
    if config.meta == MetaConfig::Embedded {
        refuse!(
            Code::State,
            "the grid's metadata are in a file; `holdfast meta export` and `holdfast meta import` move them to etcd"
        );
    }
    let next = GridConfig { meta: MetaConfig::Etcd(etcd), ..config.clone() };
    match token {
        Some(token) => grow::obtain(dir, &next, &super::certs::roles(&next), Some(token))?,
        None => settle(dir, &next)?,
    }
    meta::open(dir, &next).context("nothing was changed")?;
    dir.save(&next)?;
    Ok(next)
}

/// What lets etcdctl in as root.
pub struct Access {
    pub endpoints: Vec<String>,
    /// Of ca.pem, root.pem and root.key.
    pub dir: PathBuf,
}

/// Signs a certificate of root, good for a day.
pub fn access(dir: &GridDir, to: Option<PathBuf>) -> Result<Access> {
    let config = dir.load()?;
    let (Some(door), MetaConfig::Etcd(etcd)) = (Door::of(dir, &config)?, &config.meta) else {
        refuse!(
            Code::NotPermitted,
            "either the etcd of the grid in {} does not go by its certificates, or this machine has no key of its \
             authority: `holdfast machine list` says which has it",
            dir.root().display()
        );
    };
    let to = to.unwrap_or_else(|| door.certificates.root().join("etcd-root"));
    make_private_dir(&to)?;
    let authority = door.certificates.authority()?;
    let root = authority.issue_etcd_user(&User::Root, ACCESS_VALID)?;
    write_durably(&to.join("ca.pem"), authority.etcd_ca()?.as_bytes())?;
    write_secret(&to.join("root.key"), root.key.as_bytes())?;
    write_durably(&to.join("root.pem"), root.certificate.as_bytes())?;
    Ok(Access { endpoints: etcd.endpoints.clone(), dir: to })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grid_is_prepared_once_and_only_etcd_with_tls_needs_it() {
        let temp = tempfile::tempdir().unwrap();
        let dir = GridDir::choose(Some(&temp.path().join("grid"))).unwrap();
        let etcd = |url: &str, tls_dir: Option<&str>| {
            MetaConfig::Etcd(EtcdMeta { endpoints: vec![url.to_string()], tls_dir: tls_dir.map(Into::into) })
        };
        let (own, plain) = (etcd("https://10.0.0.1:2379", None), etcd("http://10.0.0.1:2379", None));
        assert!(!etcd("https://10.0.0.1:2379", Some("/tls")).has_own_tls());
        assert_eq!(check_prepared(&dir, Some(&plain), false).unwrap(), None);
        assert_eq!(check_prepared(&dir, Some(&own), true).unwrap(), None, "who joins has a token");
        let refused = check_prepared(&dir, Some(&own), false).unwrap_err().to_string();
        assert!(refused.contains("grid etcd member") && refused.contains("--etcd-tls-dir"), "{refused}");
        let made = prepare(&dir).unwrap();
        assert_eq!(prepare(&dir).unwrap().grid(), made.grid(), "a second time it is the same");
        assert_eq!(check_prepared(&dir, Some(&own), false).unwrap(), Some(made.grid()));
        assert!(check_prepared(&dir, Some(&own), true).unwrap_err().to_string().contains("another --dir"));
        assert!(made.authority().is_ok());
    }
}
