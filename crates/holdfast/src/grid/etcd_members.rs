//! Members of a grid's own etcd: their certificates, their whole configuration, and another member in the place of a
//! dead one.
//!
//! ```text
//! DIR/tls/etcd/NAME/           what leaves for the member's machine: ca.pem, member.pem, member.key, crl.der, etcd.env
//! DIR/tls/etcd-members.json    numbers of certificates that were given to members, and of those that were taken back
//! ```
//! Role: for the command line, where the key of the grid's authority is. Without a grid it makes the authority first.
//!
//! Faults: the dead member is taken out, its certificates are taken back, the new one is added, and the files are written last. Cut
//! short in between, the same command goes on: a member that was added and has never started is not added again.

use super::certs::{Certificates, make_private_dir, now_s};
use super::etcd::{self, Door};
use super::layout::{GridConfig, GridDir, write_durably, write_secret};
use super::metadata::{from_hex, to_hex};
use crate::daemon::outwait;
use crate::host::catalog::check_name;
use anyhow::{Context, Result, bail};
use holdfast_api::{Code, refuse};
use holdfast_runtime::meta::{EtcdMember, MetaError};
use holdfast_runtime::pki;
use holdfast_runtime::pki::etcd::{MEMBER, Serial};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, Instant};

/// Of a member, in its directory.
pub const CERTIFICATE: &str = "member.pem";

const CLIENT_PORT: u16 = 2379;

/// Certificates of members that others are to refuse: they look there whenever a member connects.
pub const REVOKED: &str = "crl.der";

/// A member that has not taken a connection by then is dead or cut off.
const ANSWER_MAX: Duration = Duration::from_secs(2);

/// etcd wants five seconds of peace before its members change.
const UNREST_MAX: Duration = Duration::from_secs(20);
const UNREST_PACE: Duration = Duration::from_millis(500);

/// A member as it is wanted: `NAME=ADDRESS`, with another port for clients behind the address perhaps; members use the
/// next one among themselves.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Wanted {
    pub name: String,
    pub client: SocketAddr,
}

impl FromStr for Wanted {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Wanted> {
        let wrong = "write the member's name and address, for example a=10.0.0.1";
        let (name, address) = text.split_once('=').context(wrong)?;
        check_name(name)?;
        let with_port = |address: &str| address.parse::<SocketAddr>().ok();
        let bare = |address: &str| Some(SocketAddr::new(address.parse::<IpAddr>().ok()?, CLIENT_PORT));
        let client = bare(address).or(with_port(address)).context(wrong)?;
        if client.port() == u16::MAX || client.ip().is_unspecified() {
            bail!("{wrong}");
        }
        Ok(Wanted { name: name.to_string(), client })
    }
}

impl Wanted {
    fn client_url(&self) -> String {
        format!("https://{}", self.client)
    }

    fn peer_url(&self) -> String {
        format!("https://{}", SocketAddr::new(self.client.ip(), self.client.port() + 1))
    }
}

/// Where members will have their files and their data.
#[derive(Clone, Debug)]
pub struct Places {
    pub files: PathBuf,
    pub data: PathBuf,
}

/// What was made for a member.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Made {
    pub name: String,
    pub client_url: String,
    pub dir: PathBuf,
    /// Nothing where its certificate alone is new.
    pub environment: Option<String>,
}

/// What becomes of a cluster that is there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Change {
    Add,
    /// This member is dead, and another one takes its place.
    Replace(String),
    /// All members have lost what they held: others begin anew.
    Anew,
}

/// Numbers of certificates, in hexadecimal.
#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Given {
    /// By the member's name.
    issued: BTreeMap<String, BTreeSet<String>>,
    revoked: BTreeSet<String>,
}

impl Given {
    pub fn path(certificates: &Certificates) -> PathBuf {
        certificates.root().join("etcd-members.json")
    }

    pub fn load(certificates: &Certificates) -> Result<Given> {
        let path = Given::path(certificates);
        match fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .with_context(|| format!("{} is damaged; restore a copy of it", path.display())),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Given::default()),
            Err(e) => Err(e).with_context(|| format!("cannot read {}; check its permissions", path.display())),
        }
    }

    /// With what another machine has given and taken back, for one that is to sign as well.
    pub fn merge(&mut self, other: Given) {
        for (name, serials) in other.issued {
            self.issued.entry(name).or_default().extend(serials);
        }
        self.revoked.extend(other.revoked);
        self.issued.values_mut().for_each(|issued| issued.retain(|serial| !self.revoked.contains(serial)));
    }

    pub fn save(&self, certificates: &Certificates) -> Result<()> {
        write_secret(&Given::path(certificates), &serde_json::to_vec(self).expect("our records always encode"))
    }

    fn revoked(&self) -> Vec<Serial> {
        let serial = |hex: &String| from_hex(hex)?.try_into().ok();
        self.revoked.iter().filter_map(serial).collect()
    }
}

/// A dead member is one of the others' no more, whoever has its key; false where its certificate is not known here.
fn take_back(certificates: &Certificates, out: &Path, dead: &str) -> Result<bool> {
    let mut given = Given::load(certificates)?;
    let Some(issued) = given.issued.remove(dead) else { return Ok(false) };
    given.revoked.extend(issued);
    given.save(certificates)?;
    let list = certificates.authority()?.etcd_members_revoked(&given.revoked())?;
    for name in given.issued.keys().filter(|name| out.join(name).exists()) {
        write_durably(&out.join(name).join(REVOKED), &list)?;
    }
    Ok(true)
}

/// What was made, and what was done in a cluster that is there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outcome {
    pub made: Vec<Made>,
    pub removed: Option<String>,
    /// The others are to refuse its certificate.
    pub is_taken_back: bool,
    /// There is no grid yet that uses them.
    pub is_new: bool,
    /// They hold nothing of the grid that uses them.
    pub is_anew: bool,
}

/// Whether a cluster is being made, or gets another member.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    New,
    Existing,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            State::New => "new",
            State::Existing => "existing",
        })
    }
}

/// Where members' files are put, unless somewhere else is asked for.
pub fn default_dir(certificates: &Certificates) -> PathBuf {
    certificates.root().join("etcd")
}

/// Makes what members need that are to form a cluster, or to become part of the grid's.
pub fn make(dir: &GridDir, wanted: &[Wanted], change: &Change, places: &Places, out: Option<&Path>) -> Result<Outcome> {
    check_apart(wanted)?;
    let config = dir.exists().then(|| dir.load()).transpose()?;
    let certificates = match &config {
        Some(config) => signing(dir, config)?,
        None => etcd::prepare(dir)?,
    };
    let out = out.map_or_else(|| default_dir(&certificates), Path::to_path_buf);
    let door = config.as_ref().map(|config| Door::of(dir, config)).transpose()?.flatten();
    let is_anew = *change == Change::Anew;
    if let Some(door) = door.as_ref().filter(|_| is_anew) {
        check_silent(door)?;
    }
    let Some(door) = door.filter(|_| !is_anew) else {
        if let Change::Replace(dead) = change {
            refuse!(
                Code::NotFound,
                "the grid in {} has no etcd that goes by its certificates, and so no member {dead}",
                dir.root().display()
            );
        }
        let grid = certificates.grid();
        let cluster = Cluster {
            members: wanted.iter().map(|member| (member.name.clone(), member.peer_url())).collect(),
            state: State::New,
            // A member of before that comes back with its data is none of these.
            token: if is_anew { format!("{grid}-{}", now_s()) } else { grid.to_string() },
        };
        let make = |member| write(&certificates, &out, member, Some(&cluster), places);
        let made = wanted.iter().map(make).collect::<Result<_>>()?;
        return Ok(Outcome { made, removed: None, is_taken_back: false, is_new: config.is_none(), is_anew });
    };
    let given = Given::load(&certificates)?;
    let removed = match (change, wanted) {
        (Change::Replace(dead), [_, _, ..]) => {
            refuse!(Code::Invalid, "one member takes the place of {dead}; name that one")
        }
        (Change::Replace(dead), _) => take_out(&door, &given, dead, wanted)?,
        (Change::Add | Change::Anew, _) => None,
    };
    let take_back = |dead: &String| take_back(&certificates, &out, dead);
    let is_taken_back = removed.as_ref().map(take_back).transpose()?.unwrap_or(false);
    let made = wanted.iter().map(|member| add(&door, &certificates, &out, member, places)).collect::<Result<_>>()?;
    Ok(Outcome { made, removed, is_taken_back, is_new: false, is_anew })
}

/// A cluster that answers holds something: another one in its place is not what is wanted.
fn check_silent(door: &Door) -> Result<()> {
    let Ok(members) = door.store().members() else { return Ok(()) };
    refuse!(
        Code::State,
        "the grid's etcd answers, with the members {}: not all of it is lost. Start those that are down (`systemctl \
         start etcd` there), or replace one with --replace; where they hold nothing any more, `holdfast meta recover` \
         is next. Stop them first, if they are to begin anew all the same",
        names(&members)
    )
}

fn check_apart(wanted: &[Wanted]) -> Result<()> {
    let names: BTreeSet<&String> = wanted.iter().map(|member| &member.name).collect();
    let ports = wanted.iter().flat_map(|member| [member.client_url(), member.peer_url()]);
    if names.len() < wanted.len() || ports.collect::<BTreeSet<_>>().len() < 2 * wanted.len() {
        refuse!(Code::Invalid, "two members have the same name, or the same address and port; give each its own");
    }
    Ok(())
}

/// The certificates of a grid that is there, where they are signed.
fn signing(dir: &GridDir, config: &GridConfig) -> Result<Certificates> {
    let certificates = Certificates::of(dir, config.grid_id()?);
    if !config.tls {
        refuse!(
            Code::State,
            "the grid in {} has no TLS, and so no authority that could sign for its etcd",
            dir.root().display()
        );
    }
    if !certificates.has_authority() {
        refuse!(
            Code::NotPermitted,
            "{} has no key of the grid's authority; run this on the machine that `holdfast machine list` names",
            certificates.root().display()
        );
    }
    Ok(certificates)
}

fn names(members: &[EtcdMember]) -> String {
    let names: BTreeSet<&str> = members.iter().map(|member| member.name.as_str()).collect();
    names.into_iter().collect::<Vec<_>>().join(", ")
}

/// The cluster's members; where one has just died, the others may be electing.
fn members(door: &Door) -> Result<Vec<EtcdMember>> {
    let is_away = |error: &MetaError| matches!(error, MetaError::Unknown { .. });
    Ok(outwait(|| door.store().members(), is_away)?)
}

/// A member is out, and the certificates that it had are still good: somebody was cut short who took it out. One without a name
/// may be that very one, which has never started.
fn was_cut_short(members: &[EtcdMember], given: &Given, dead: &str) -> bool {
    let has_certificates = given.issued.get(dead).is_some_and(|issued| !issued.is_empty());
    has_certificates && members.iter().all(|member| !member.name.is_empty() && member.name != dead)
}

/// Takes a dead member out; nothing where that was done before, and its successor waits to be started.
fn take_out(door: &Door, given: &Given, dead: &str, wanted: &[Wanted]) -> Result<Option<String>> {
    let members = members(door)?;
    if was_cut_short(&members, given, dead) {
        return Ok(Some(dead.to_string()));
    }
    let Some(found) = members.iter().find(|member| member.name == dead) else {
        let is_waiting = |member: &EtcdMember| {
            member.name.is_empty() && wanted.iter().any(|new| member.peer_urls.contains(&new.peer_url()))
        };
        if members.iter().any(is_waiting) {
            return Ok(None);
        }
        refuse!(
            Code::NotFound,
            "the grid's etcd has no member {dead}; its members are {}. Where it was taken out already, leave \
             --replace out: the new member is added",
            names(&members)
        );
    };
    let addresses = found.peer_urls.iter().filter_map(|url| url.split_once("://")?.1.parse::<SocketAddr>().ok());
    for address in addresses {
        if TcpStream::connect_timeout(&address, ANSWER_MAX).is_ok() {
            refuse!(
                Code::State,
                "member {dead} is not dead: it takes connections at {address}. Stop it first (`systemctl stop etcd` \
                 there), if it is to be replaced all the same"
            );
        }
    }
    outwait_unrest(|| door.store().remove_member(found.id)).context("the dead member stays a member; try again")?;
    Ok(Some(dead.to_string()))
}

/// etcd changes its members only when all that are left have been connected for some seconds.
fn outwait_unrest(change: impl Fn() -> Result<(), MetaError>) -> Result<(), MetaError> {
    let end = Instant::now() + UNREST_MAX;
    loop {
        match change() {
            Err(MetaError::Unknown { why }) if why.contains("unhealthy cluster") && Instant::now() < end => {
                std::thread::sleep(UNREST_PACE);
            }
            told => return told,
        }
    }
}

/// Adds a member to the cluster, where it isn't one; makes its files.
fn add(door: &Door, certificates: &Certificates, out: &Path, wanted: &Wanted, places: &Places) -> Result<Made> {
    let members = members(door)?;
    let is_at = |member: &EtcdMember| member.peer_urls.contains(&wanted.peer_url());
    match members.iter().find(|member| member.name == wanted.name) {
        Some(member) if is_at(member) => return write(certificates, out, wanted, None, places),
        Some(member) => refuse!(
            Code::Exists,
            "the grid's etcd has a member {0} already, at {1}; choose another name, or, if that one is dead, add \
             --replace {0}",
            wanted.name,
            member.peer_urls.join(", ")
        ),
        None => {}
    }
    match members.iter().find(|member| is_at(member)) {
        Some(member) if !member.name.is_empty() => refuse!(
            Code::Exists,
            "member {0} of the grid's etcd has that address; choose another one, or, if that member is dead, add \
             --replace {0}",
            member.name
        ),
        // It was added before, and waits to be started.
        Some(_) => {}
        None => outwait_unrest(|| door.store().add_member(&wanted.peer_url()))
            .context("the new member is not added; try again, without --replace")?,
    }
    let others = members.iter().filter(|member| !is_at(member));
    let named = others.flat_map(|member| member.peer_urls.iter().map(|url| (member.name.clone(), url.clone())));
    // One that has not started yet says its name when it does.
    let named = named.filter(|(name, _)| !name.is_empty());
    let cluster = Cluster {
        members: named.chain([(wanted.name.clone(), wanted.peer_url())]).collect(),
        state: State::Existing,
        token: certificates.grid().to_string(),
    };
    write(certificates, out, wanted, Some(&cluster), places)
}

/// What a member is to be part of.
struct Cluster {
    /// Names, and URLs for other members.
    members: Vec<(String, String)>,
    state: State,
    /// Sets it apart from others of the same members.
    token: String,
}

fn write(
    certificates: &Certificates,
    out: &Path,
    wanted: &Wanted,
    cluster: Option<&Cluster>,
    places: &Places,
) -> Result<Made> {
    let authority = certificates.authority()?;
    let mut given = Given::load(certificates)?;
    let serial = pki::etcd::serial();
    given.issued.entry(wanted.name.clone()).or_default().insert(to_hex(&serial));
    given.save(certificates)?;
    let pair = authority.issue_etcd_member(wanted.client.ip(), &serial)?;
    let dir = out.join(&wanted.name);
    make_private_dir(&dir)?;
    write_durably(&dir.join(REVOKED), &authority.etcd_members_revoked(&given.revoked())?)?;
    write_durably(&dir.join("ca.pem"), authority.etcd_ca()?.as_bytes())?;
    write_secret(&dir.join("member.key"), pair.key.as_bytes())?;
    write_durably(&dir.join(CERTIFICATE), pair.certificate.as_bytes())?;
    let environment = cluster.map(|cluster| environment(wanted, cluster, places));
    let path = dir.join("etcd.env");
    match &environment {
        Some(text) => write_durably(&path, text.as_bytes())?,
        // That of an earlier time would have it begin with other data.
        None => drop(fs::remove_file(&path)),
    }
    Ok(Made { name: wanted.name.clone(), client_url: wanted.client_url(), dir, environment })
}

/// A member's whole configuration, as `/etc/default/etcd` takes it.
fn environment(wanted: &Wanted, cluster: &Cluster, places: &Places) -> String {
    let members: Vec<String> = cluster.members.iter().map(|(name, url)| format!("{name}={url}")).collect();
    let file = |name: &str| places.files.join(name).display().to_string();
    // Data of its own: etcd goes on with what it finds, whatever it is told.
    let data = places.data.join(format!("{}-{}", wanted.name, now_s()));
    let (name, client, peer) = (&wanted.name, wanted.client_url(), wanted.peer_url());
    let settings = [
        ("NAME", name.clone()),
        ("DATA_DIR", data.display().to_string()),
        ("INITIAL_CLUSTER", members.join(",")),
        ("INITIAL_CLUSTER_STATE", cluster.state.to_string()),
        ("INITIAL_CLUSTER_TOKEN", cluster.token.clone()),
        ("INITIAL_ADVERTISE_PEER_URLS", peer.clone()),
        ("LISTEN_PEER_URLS", peer),
        ("ADVERTISE_CLIENT_URLS", client.clone()),
        ("LISTEN_CLIENT_URLS", client),
        ("CLIENT_CERT_AUTH", "true".to_string()),
        ("TRUSTED_CA_FILE", file("ca.pem")),
        ("CERT_FILE", file(CERTIFICATE)),
        ("KEY_FILE", file("member.key")),
        ("PEER_CLIENT_CERT_AUTH", "true".to_string()),
        ("PEER_TRUSTED_CA_FILE", file("ca.pem")),
        ("PEER_CERT_FILE", file(CERTIFICATE)),
        ("PEER_KEY_FILE", file("member.key")),
        ("PEER_CERT_ALLOWED_CN", MEMBER.to_string()),
        ("PEER_CRL_FILE", file(REVOKED)),
        ("PRE_VOTE", "true".to_string()),
        ("SNAPSHOT_COUNT", "5000".to_string()),
        ("AUTO_COMPACTION_RETENTION", "1".to_string()),
    ];
    settings.iter().map(|(name, value)| format!("ETCD_{name}={value}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_have_a_name_and_an_address_and_two_ports() {
        let wanted: Wanted = "a=10.0.0.1".parse().unwrap();
        assert_eq!(
            (wanted.client_url(), wanted.peer_url()),
            ("https://10.0.0.1:2379".into(), "https://10.0.0.1:2380".into())
        );
        let wanted: Wanted = "w=[fd00::9]:7000".parse().unwrap();
        assert_eq!(wanted.peer_url(), "https://[fd00::9]:7001");
        assert_eq!("w=fd00::9".parse::<Wanted>().unwrap().client_url(), "https://[fd00::9]:2379");
        for odd in ["a", "a=", "=10.0.0.1", "a=host", "a b=10.0.0.1", "a=10.0.0.1:65535", "a=0.0.0.0", "a=10.0.0.1:x"] {
            assert!(odd.parse::<Wanted>().is_err(), "{odd}");
        }
    }

    #[test]
    fn what_was_taken_back_stays_so_wherever_members_are_signed_for() {
        let given = |issued: &[(&str, &str)], revoked: &[&str]| Given {
            issued: issued.iter().map(|(name, serial)| (name.to_string(), [serial.to_string()].into())).collect(),
            revoked: revoked.iter().map(|serial| serial.to_string()).collect(),
        };
        let mut here = given(&[("a", "01"), ("b", "02")], &["03"]);
        here.merge(given(&[("a", "04")], &["02"]));
        assert_eq!(here.revoked, ["02", "03"].map(str::to_string).into());
        assert_eq!((here.issued["a"].len(), here.issued["b"].len()), (2, 0));
        let other = given(&[], &["5f".repeat(16).as_str(), "xx"]);
        assert_eq!(other.revoked(), [[0x5f; 16]]);
    }

    #[test]
    fn a_member_that_is_out_with_good_certificates_was_left_half_way() {
        let member = |id, name: &str| {
            let (peer_urls, client_urls) = (Vec::new(), Vec::new());
            EtcdMember { id, name: name.to_string(), peer_urls, client_urls }
        };
        let issued = ["a", "b", "c"].map(|name| (name.to_string(), [name.to_string()].into()));
        let mut given = Given { issued: issued.into(), revoked: BTreeSet::new() };
        let (all, left) = ([member(1, "a"), member(2, "b"), member(3, "c")], [member(1, "a"), member(2, "b")]);
        assert!(!was_cut_short(&all, &given, "c"), "it is a member still");
        assert!(was_cut_short(&left, &given, "c"));
        assert!(!was_cut_short(&left, &given, "x"), "nobody has heard of it");
        assert!(
            !was_cut_short(&[member(1, "a"), member(2, "b"), member(3, "")], &given, "c"),
            "it has not started yet"
        );
        given.issued.remove("c");
        assert!(!was_cut_short(&left, &given, "c"), "that is done");
    }

    #[test]
    fn a_new_cluster_is_configured_before_there_is_a_grid() {
        let temp = tempfile::tempdir().unwrap();
        let dir = GridDir::choose(Some(&temp.path().join("grid"))).unwrap();
        let places = Places { files: "/etc/holdfast-etcd".into(), data: "/var/lib/etcd".into() };
        let wanted: Vec<Wanted> = ["a=10.0.0.1", "w=10.0.0.9"].iter().map(|text| text.parse().unwrap()).collect();
        let made = make(&dir, &wanted, &Change::Add, &places, None).unwrap();
        assert!(made.is_new && made.made.len() == 2);
        let environment = fs::read_to_string(dir.tls_dir().join("etcd/w/etcd.env")).unwrap();
        assert_eq!(made.made[1].environment.as_ref(), Some(&environment));
        for line in [
            "ETCD_NAME=w",
            "ETCD_INITIAL_CLUSTER=a=https://10.0.0.1:2380,w=https://10.0.0.9:2380",
            "ETCD_INITIAL_CLUSTER_STATE=new",
            "ETCD_PEER_CERT_ALLOWED_CN=holdfast-etcd-member",
            "ETCD_KEY_FILE=/etc/holdfast-etcd/member.key",
        ] {
            assert!(environment.lines().any(|found| found == line), "{line}: {environment}");
        }
        let replace = Change::Replace("w".to_string());
        let refused = make(&dir, &wanted[..1], &replace, &places, None).unwrap_err().to_string();
        assert!(refused.contains("no member w"), "{refused}");
        let twice = [wanted[0].clone(), Wanted { name: "b".into(), ..wanted[0].clone() }];
        assert!(make(&dir, &twice, &Change::Add, &places, None).is_err(), "one address");
    }
}
