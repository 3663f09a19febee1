//! Gives out join tokens, and signs what their holders ask for: on machines that have the key of the grid's authority.
//!
//! ```text
//! DIR/tls/tokens/ID.json    0600: a token that was given out here, whole, until a day after its end
//! DIR/tls/machines.json     names that certificates were signed for
//! ```
//! Role: a thread of its own, which looks for requests while a token is open. What counts is what lies in this directory;
//! the records of tokens in the metadata store are for those who ask, to be told early what is wrong.
//!
//! States of a token: open → used (before its certificates leave) or expired → forgotten after [`KEPT_S`].
//!
//! Invariants
//! 1. A token is marked as used, durably, before what it was used for can be read by anybody.
//! 2. A name is signed for once, unless a token was made for that very machine; no token speaks for this machine.
//!
//! Faults: a crash after a token was marked costs that token. A request that is not sealed with its token's secret is
//! deleted, and told of in the log.

use super::catalog::{Catalog, check_name};
use super::meta::{self, Meta};
use super::presence::live_hosts;
use crate::grid::authority;
use crate::grid::certs::{Certificates, make_private_dir, now_s, secret};
use crate::grid::etcd::Door;
use crate::grid::etcd_members::Given as EtcdMembers;
use crate::grid::layout::{GridConfig, GridDir, MetaConfig, write_secret};
use crate::grid::revoked;
use crate::grid::token::{Answer, JOIN_PREFIX, JoinToken, Valid, Wanted, answer_key, request_key};
use crate::logger;
use anyhow::{Context, Result, bail};
use holdfast_api::{Code, refuse};
use holdfast_base::{GridId, MetaVersion};
use holdfast_format::meta::{Other, TokenRecord, decode, encode, token_key};
use holdfast_runtime::meta::{MetaError, Record, Swap};
use holdfast_runtime::pki::is_same_authority;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Pace of looking for requests.
const PACE: Duration = Duration::from_millis(500);

/// Pace of looking whom etcd lets in, where nothing was revoked meanwhile.
const DOOR_PACE: Duration = Duration::from_secs(30);

/// The same, where something was, or etcd could not be asked.
const DOOR_AGAIN_PACE: Duration = Duration::from_secs(2);

/// How long after its end a token is still known, so that who uses it is told what is wrong.
const KEPT_S: u64 = 24 * 3600;

/// For so long after its end requests are still answered: with the reason.
const LATE_S: u64 = 60;

/// Nodes of one machine.
const NODES_MAX: usize = 64;

/// A token that was given out here.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Given {
    token: String,
    /// Zero where an older release made it.
    #[serde(default)]
    made_at: u64,
    valid_until: u64,
    /// The machine, already of the grid, that it is for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    renews: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    used_by: Option<String>,
}

fn tokens_dir(certificates: &Certificates) -> PathBuf {
    certificates.root().join("tokens")
}

fn write_json<T: Serialize>(path: &Path, value: &T) -> Result<()> {
    write_secret(path, &serde_json::to_vec(value).expect("our records always encode"))
}

/// Makes a token on a machine that can sign.
pub fn give_out(dir: &GridDir, valid: Valid, renews: Option<&str>) -> Result<JoinToken> {
    let config = dir.load()?;
    let grid = config.grid_id()?;
    let certificates = Certificates::of(dir, grid);
    if !config.tls {
        refuse!(
            Code::State,
            "grid {grid} has no TLS: other machines join it with its id (`holdfast grid up --join {grid}`)"
        );
    }
    if !certificates.has_authority() {
        refuse!(
            Code::State,
            "{} has no key of the grid's authority: make tokens on the machine that has it, which is the grid's first",
            certificates.root().display()
        );
    }
    if config.meta == MetaConfig::Embedded {
        refuse!(
            Code::State,
            "only a grid whose metadata are in etcd has room for other machines; see `holdfast meta --help`"
        );
    }
    let meta = meta::open(dir, &config)?;
    // Who joins looks whether the token is of the authority that the metadata name.
    authority::settle(dir, &certificates, &meta)?;
    let token = JoinToken::new(grid, certificates.fingerprint()?, secret());
    let made_at = now_s();
    let valid_until = made_at + valid.0.as_secs();
    let renews = renews.map(str::to_string);
    let door = Door::of(dir, &config)?;
    let access = door.map(|door| door.issue_joining(&token.id(), valid_until)).transpose()?;
    let given = Given { token: token.to_string(), made_at, valid_until, renews, used_by: None };
    make_private_dir(&tokens_dir(&certificates))?;
    write_json(&tokens_dir(&certificates).join(format!("{}.json", token.id())), &given)?;
    let record = TokenRecord { host: config.host.name, valid_until, used_by: None, other: Other::new() };
    meta::put_new(&meta, &token_key(&token.id()), &encode(&record))?;
    match access {
        Some((ca, pair)) => token.with_access(&ca, &pair),
        None => Ok(token),
    }
}

/// A machine is none of the grid's any more: another one may have its name signed for. Nothing where none signs here.
pub(super) fn forget_machine(certificates: &Certificates, name: &str) -> Result<()> {
    let path = machines_path(certificates);
    let mut machines = read_machines(certificates)?;
    if machines.remove(name) { write_json(&path, &machines) } else { Ok(()) }
}

/// The key of the grid's authority, and the names that it has signed for, for another machine or a safe place.
#[derive(Serialize, Deserialize)]
pub struct AuthorityCopy {
    grid: String,
    /// Its certificate and its key, in PEM.
    certificate: String,
    key: String,
    machines: BTreeSet<String>,
    /// Certificates of etcd's members; an older release knows of none.
    #[serde(default)]
    etcd_members: EtcdMembers,
}

impl AuthorityCopy {
    /// What this machine has.
    pub fn read(certificates: &Certificates) -> Result<AuthorityCopy> {
        let key = certificates.authority_key()?;
        let (certificate, machines) = (certificates.ca_pem()?, read_machines(certificates)?);
        let etcd_members = EtcdMembers::load(certificates)?;
        Ok(AuthorityCopy { grid: certificates.grid().to_string(), certificate, key, machines, etcd_members })
    }

    /// Has this machine sign, too.
    pub fn take(self, certificates: &Certificates) -> Result<()> {
        let is_ours = is_same_authority(&self.certificate, &certificates.ca_pem()?);
        if self.grid != certificates.grid().to_string() || !is_ours {
            bail!("it is of another grid's authority, or of an older one of this grid; nothing was changed");
        }
        let machines: BTreeSet<String> = read_machines(certificates)?.into_iter().chain(self.machines).collect();
        // Whoever has the key signs: by then it knows what others have signed.
        certificates.check_authority_key(&self.key)?;
        write_json(&machines_path(certificates), &machines)?;
        let mut etcd_members = EtcdMembers::load(certificates)?;
        etcd_members.merge(self.etcd_members);
        etcd_members.save(certificates)?;
        certificates.put_authority_key(&self.key)
    }
}

/// Writes the authority to a file that nobody else may read.
pub fn export_authority(certificates: &Certificates, to: &Path) -> Result<()> {
    write_json(to, &AuthorityCopy::read(certificates)?)
}

/// Has this machine sign, too.
pub fn import_authority(certificates: &Certificates, from: &Path) -> Result<()> {
    let cannot = || format!("cannot use {}", from.display());
    let kept: AuthorityCopy = serde_json::from_slice(&fs::read(from).with_context(cannot)?).with_context(cannot)?;
    kept.take(certificates).with_context(cannot)
}

fn machines_path(certificates: &Certificates) -> PathBuf {
    certificates.root().join("machines.json")
}

fn read_machines(certificates: &Certificates) -> Result<BTreeSet<String>> {
    match fs::read(machines_path(certificates)) {
        Ok(bytes) => serde_json::from_slice(&bytes).context("machines.json is damaged; restore a copy of it"),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(BTreeSet::new()),
        Err(e) => Err(e).context("cannot read machines.json"),
    }
}

struct Signer {
    certificates: Certificates,
    grid: GridId,
    /// This machine.
    name: String,
    own_nodes: BTreeSet<u32>,
    catalog: Catalog,
    meta: Meta,
    /// Where etcd goes by the grid's certificates.
    doorkeeper: Option<Doorkeeper>,
}

/// Has etcd know whom to let in.
struct Doorkeeper {
    dir: GridDir,
    config: GridConfig,
}

impl Doorkeeper {
    fn door(&self) -> Result<Door> {
        Door::of(&self.dir, &self.config)?.context("this machine has lost the key of the grid's authority")
    }
}

/// Starts where the grid has TLS: this machine may come to sign later.
pub(super) fn start(dir: &GridDir, config: &GridConfig, catalog: Catalog, meta: Meta) -> Result<()> {
    let grid = config.grid_id()?;
    let certificates = Certificates::of(dir, grid);
    if !config.tls {
        return Ok(());
    }
    let own_nodes = config.nodes.iter().map(|node| node.id).collect();
    let has_door = config.meta.has_own_tls();
    let doorkeeper = has_door.then(|| Doorkeeper { dir: dir.clone(), config: config.clone() });
    let signer = Signer { certificates, grid, name: config.host.name.clone(), own_nodes, catalog, meta, doorkeeper };
    let look = move || {
        let (mut looked_at, mut version) = (None::<Instant>, None);
        loop {
            std::thread::sleep(PACE);
            if !signer.certificates.has_authority() {
                continue;
            }
            signer.keep_door(&mut looked_at, &mut version);
            if let Err(error) = signer.round()
                && error.downcast_ref::<MetaError>().is_none()
            {
                logger::warn(format_args!("requests for certificates wait: {error:#}"));
            }
        }
    };
    std::thread::Builder::new().name("signer".to_string()).spawn(look).context("no thread for the signer")?;
    Ok(())
}

impl Signer {
    /// Compares now and then, and when certificates were revoked, whom etcd lets in with whom it should.
    fn keep_door(&self, looked_at: &mut Option<Instant>, version: &mut Option<u64>) {
        let Some(doorkeeper) = &self.doorkeeper else { return };
        let mut looked = || -> Result<()> {
            let list = revoked::load(&self.certificates.ca(), self.grid)?;
            let pace = if *version == Some(list.version()) { DOOR_PACE } else { DOOR_AGAIN_PACE };
            if looked_at.is_some_and(|at| at.elapsed() < pace) {
                return Ok(());
            }
            *looked_at = Some(Instant::now());
            let given = self.given()?;
            let answers = self.meta.list(JOIN_PREFIX)?.records;
            // Who has used it reads the answer first. One that was made elsewhere ends by its time.
            let is_over = |id: &str| {
                let is_read = !answers.iter().any(|record| record.key == answer_key(id));
                is_read && given.get(id).is_some_and(|given| given.used_by.is_some())
            };
            doorkeeper.door()?.sync(&list, is_over)?;
            *version = Some(list.version());
            Ok(())
        };
        if let Err(error) = looked()
            && error.downcast_ref::<MetaError>().is_none()
        {
            logger::warn(format_args!("whom etcd lets in is not looked after: {error:#}"));
        }
    }

    fn given(&self) -> Result<BTreeMap<String, Given>> {
        let directory = match fs::read_dir(tokens_dir(&self.certificates)) {
            Ok(directory) => directory,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
            Err(e) => return Err(e).context("cannot list the tokens that were given out"),
        };
        let mut given = BTreeMap::new();
        for entry in directory {
            let path = entry?.path();
            let Some(id) = path.file_name().and_then(|name| name.to_str()?.strip_suffix(".json")) else { continue };
            let read = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
            // One that is damaged opens nothing.
            let Ok(token) = serde_json::from_slice(&read) else { continue };
            given.insert(id.to_string(), token);
        }
        Ok(given)
    }

    fn path(&self, id: &str) -> PathBuf {
        tokens_dir(&self.certificates).join(format!("{id}.json"))
    }

    fn round(&self) -> Result<()> {
        let now = now_s();
        let (given, over): (BTreeMap<_, _>, BTreeMap<_, _>) =
            self.given()?.into_iter().partition(|(_, token)| token.valid_until.saturating_add(KEPT_S) > now);
        for id in over.keys() {
            self.forget(id)?;
        }
        if given.values().all(|token| token.valid_until.saturating_add(LATE_S) <= now) {
            return Ok(());
        }
        let listed = self.meta.list(JOIN_PREFIX)?.records;
        for (id, given) in &given {
            let find = |key: String| listed.iter().find(|record| record.key == key);
            if let (Some(request), None) = (find(request_key(id)), find(answer_key(id))) {
                self.answer(id, given, request)?;
            }
        }
        Ok(())
    }

    /// Takes a token out of the grid's memory.
    fn forget(&self, id: &str) -> Result<()> {
        for key in [request_key(id), answer_key(id), token_key(id)] {
            if let Some(record) = self.meta.get(&key)? {
                self.meta.swap(&key, record.version, None, None)?;
            }
        }
        fs::remove_file(self.path(id)).context("cannot forget a token that has expired")
    }

    fn answer(&self, id: &str, given: &Given, request: &Record) -> Result<()> {
        let token: JoinToken = given.token.parse()?;
        let wanted = match token.open_request(&request.value) {
            Ok(wanted) => wanted,
            Err(error) => {
                logger::warn(format_args!(
                    "a request for certificates under token {id} is deleted: {error:#}; look who writes to the metadata store"
                ));
                self.meta.swap(&request.key, request.version, None, None)?;
                return Ok(());
            }
        };
        let answer = match self.check(given, &wanted) {
            Ok(()) => self.sign(id, given, &wanted).map_err(|error| format!("{error:#}")),
            Err(error) => match error.downcast::<MetaError>() {
                Ok(error) => return Err(error.into()),
                Err(error) => Err(format!("{error:#}")),
            },
        };
        let answer = answer.unwrap_or_else(|why| {
            logger::warn(format_args!("machine {} is given no certificates: {why}", wanted.machine));
            Answer::Refused { why }
        });
        let sealed = token.seal_answer(&request.value, &answer);
        self.meta.swap(&answer_key(id), MetaVersion::ABSENT, Some(&sealed), None)?;
        Ok(())
    }

    /// Fails where a token gives no right to what is wanted.
    fn check(&self, given: &Given, wanted: &Wanted) -> Result<()> {
        let (machine, another) = (&wanted.machine, "make another one with `holdfast grid token`");
        check_name(machine)?;
        if let Some(by) = &given.used_by {
            refuse!(Code::NotPermitted, "the token was used already, for machine {by}; {another}");
        }
        if given.valid_until <= now_s() {
            refuse!(
                Code::NotPermitted,
                "the token has expired; {another}, or one that is good for longer (--valid 4h)"
            );
        }
        if given.made_at > now_s().saturating_add(LATE_S) {
            refuse!(
                Code::NotPermitted,
                "the token was made while the clock of machine {} was ahead, and would be good for too long; {another}",
                self.name
            );
        }
        if wanted.nodes.len() > NODES_MAX {
            refuse!(Code::Invalid, "a machine has at most {NODES_MAX} nodes; choose fewer --nodes");
        }
        if *machine == self.name {
            refuse!(
                Code::State,
                "machine {machine} is the one that signs: `holdfast grid tls rotate` on it needs no token"
            );
        }
        match &given.renews {
            Some(renews) if renews != machine => {
                refuse!(Code::NotPermitted, "the token is for machine {renews}, and {machine} has asked; {another}");
            }
            Some(_) => {}
            None if self.is_known(machine)? || live_hosts(&self.meta)?.contains(machine) => refuse!(
                Code::Exists,
                "there is a machine {machine} already; choose another --name, or, if it is that one, use a token of `holdfast \
                 grid token --for {machine}`"
            ),
            None => {}
        }
        let owners = self.catalog.node_machines()?;
        let is_foreign = |node: &&u32| match owners.get(node) {
            _ if self.own_nodes.contains(node) => true,
            Some(owner) => owner != machine,
            // Who joins has taken its numbers before; a machine of the grid may be about to add a node.
            None => given.renews.is_none(),
        };
        if let Some(node) = wanted.nodes.keys().find(is_foreign) {
            refuse!(
                Code::NotFound,
                "node {node} is another machine's, or nobody's yet; see `holdfast status` for who has which number"
            );
        }
        if given.renews.is_none()
            && let Some((node, _)) =
                owners.iter().find(|(id, owner)| *owner == machine && !wanted.nodes.contains_key(id))
        {
            refuse!(Code::Exists, "there is a machine {machine} already, with node {node}; choose another --name");
        }
        Ok(())
    }

    /// A machine of that name is in the grid, or its name was signed for here and it was not taken out since, by whichever
    /// machine signs.
    fn is_known(&self, machine: &str) -> Result<bool> {
        // A newcomer of that name has nodes already when it asks, and no host yet that has told of itself. What another
        // machine signed for is known by that.
        if self.catalog.machine_records()?.contains_key(machine) {
            return Ok(true);
        }
        let was_removed = self.catalog.removed()?.iter().any(|(_, removed)| removed.name == machine);
        Ok(self.machines()?.contains(machine) && !was_removed)
    }

    /// Names that were signed for.
    fn machines(&self) -> Result<BTreeSet<String>> {
        read_machines(&self.certificates)
    }

    fn sign(&self, id: &str, given: &Given, wanted: &Wanted) -> Result<Answer> {
        let machine = &wanted.machine;
        let mut answer = wanted.sign(&self.certificates)?;
        if let (Answer::Signed { etcd, .. }, Some(doorkeeper)) = (&mut answer, &self.doorkeeper) {
            *etcd = doorkeeper.door()?.grant(wanted)?;
        }
        let mut machines = self.machines()?;
        machines.insert(machine.clone());
        write_json(&machines_path(&self.certificates), &machines)?;
        write_json(&self.path(id), &Given { used_by: Some(machine.clone()), ..given.clone() })?;
        logger::info(format_args!("machine {machine} is given certificates of grid {}", self.grid));
        self.note_use(id, machine);
        Ok(answer)
    }

    /// For those who would use the token again; that it can't be is known here.
    fn note_use(&self, id: &str, machine: &str) {
        let note = || -> Result<()> {
            let Some(record) = self.meta.get(&token_key(id))? else { return Ok(()) };
            let known: TokenRecord = decode(&record.value)?;
            let used = TokenRecord { used_by: Some(machine.to_string()), ..known };
            let _: Swap = self.meta.swap(&token_key(id), record.version, Some(&encode(&used)), None)?;
            Ok(())
        };
        if let Err(error) = note() {
            logger::warn(format_args!("that a token was used is not noted in the metadata store: {error:#}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grid::layout::NodeConfig;
    use holdfast_base::NodeId;
    use holdfast_format::meta::{MachineRecord, Other, encode, machine_key};
    use holdfast_runtime::clock;
    use holdfast_runtime::meta::LocalStore;
    use holdfast_runtime::pki::{self, Role};
    use std::sync::Arc;

    const GRID: GridId = GridId(7);

    /// Machine a, with node 1, and what it has given out.
    struct Rig {
        _dir: tempfile::TempDir,
        signer: Signer,
    }

    impl Rig {
        fn new() -> Rig {
            let temp = tempfile::tempdir().unwrap();
            let certificates = Certificates::in_dir(&temp.path().join("tls"), GRID);
            certificates.make_authority_for(Duration::from_secs(24 * 3600)).unwrap();
            let meta: Meta = Arc::new(LocalStore::in_memory(Arc::new(clock::now)));
            let catalog = Catalog::new(meta.clone(), GRID, "a");
            catalog.add_node(node).unwrap();
            let (name, own_nodes) = ("a".to_string(), BTreeSet::from([1]));
            Rig {
                _dir: temp,
                signer: Signer { certificates, grid: GRID, name, own_nodes, catalog, meta, doorkeeper: None },
            }
        }

        fn give(&self, left_s: i64, renews: Option<&str>) -> JoinToken {
            let certificates = &self.signer.certificates;
            let token = JoinToken::new(GRID, certificates.fingerprint().unwrap(), secret());
            let valid_until = now_s().saturating_add_signed(left_s);
            let (made_at, renews) = (valid_until.saturating_sub(3600), renews.map(str::to_string));
            let given = Given { token: token.to_string(), made_at, valid_until, renews, used_by: None };
            make_private_dir(&tokens_dir(certificates)).unwrap();
            write_json(&self.signer.path(&token.id()), &given).unwrap();
            token
        }

        fn put(&self, key: &str, value: &[u8]) {
            let found = self.signer.meta.get(key).unwrap().map_or(MetaVersion::ABSENT, |record| record.version);
            assert!(matches!(self.signer.meta.swap(key, found, Some(value), None).unwrap(), Swap::Done(_)));
        }

        /// Asks as a machine would; the answer, if there is any.
        fn ask(&self, token: &JoinToken, machine: &str, nodes: &[u32]) -> Option<Answer> {
            let request = || pki::request().unwrap().1;
            let nodes = nodes.iter().map(|node| (*node, request())).collect();
            let wanted = Wanted { machine: machine.to_string(), host: Some(request()), nodes, etcd: None };
            let sealed = token.seal_request(&wanted);
            self.put(&request_key(&token.id()), &sealed);
            self.signer.round().unwrap();
            let answer = self.signer.meta.get(&answer_key(&token.id())).unwrap()?;
            self.signer.meta.swap(&answer.key, answer.version, None, None).unwrap();
            Some(token.open_answer(&sealed, &answer.value).unwrap())
        }

        fn refusal(&self, token: &JoinToken, machine: &str, nodes: &[u32]) -> String {
            match self.ask(token, machine, nodes) {
                Some(Answer::Refused { why }) => why,
                other => panic!("{machine} {nodes:?}: {other:?}"),
            }
        }
    }

    fn node(id: u32) -> NodeConfig {
        NodeConfig { id, address: "127.0.0.1:7501".parse().unwrap(), devices: Vec::new() }
    }

    #[test]
    fn a_token_is_good_once_for_a_machine_that_is_new() {
        let rig = Rig::new();
        Catalog::new(rig.signer.meta.clone(), GRID, "b").add_node(node).unwrap();
        let token = rig.give(60, None);
        for (machine, nodes, why) in [
            ("a", &[][..], "the one that signs"),
            ("c", &[1], "node 1 is another machine's"),
            ("c", &[2], "node 2 is another machine's"),
            ("c", &[3], "nobody's yet"),
            ("b", &[], "a machine b already, with node 2"),
            ("../b", &[], "can't be a name"),
        ] {
            let told = rig.refusal(&token, machine, nodes);
            assert!(told.contains(why), "{machine}: {told}");
        }
        let Some(Answer::Signed { host: Some(host), nodes, ca, .. }) = rig.ask(&token, "b", &[2]) else {
            panic!("it is b's to ask for")
        };
        assert_eq!(pki::Facts::of_pem(&host).unwrap().identity.unwrap().role, Role::Host("b".to_string()));
        assert_eq!(pki::Facts::of_pem(&nodes[&2]).unwrap().identity.unwrap().role, Role::Node(NodeId(2)));
        assert_eq!(pki::Facts::of_pem(&ca).unwrap().fingerprint, token.authority);
        assert!(rig.refusal(&token, "b", &[2]).contains("used already, for machine b"));
        assert!(
            rig.refusal(&rig.give(60, None), "b", &[2]).contains("a machine b already"),
            "a name is signed for once"
        );
        let Some(Answer::Signed { .. }) = rig.ask(&rig.give(60, Some("b")), "b", &[2, 3]) else {
            panic!("a token for b gives b certificates again, and one for a node that is new")
        };
        assert!(rig.refusal(&rig.give(60, Some("b")), "c", &[3]).contains("for machine b, and c has asked"));
        assert!(rig.refusal(&rig.give(-30, None), "d", &[]).contains("has expired"));
        let ahead = rig.refusal(&rig.give(365 * 24 * 3600, None), "d", &[]);
        assert!(ahead.contains("the clock of machine a was ahead"), "{ahead}");
    }

    #[test]
    fn a_machine_is_known_that_another_one_has_signed_for() {
        let rig = Rig::new();
        assert!(matches!(rig.ask(&rig.give(60, None), "e", &[]), Some(Answer::Signed { .. })));
        // Of f this machine has never heard, but by its record: it has no nodes, and its host is down.
        let record = MachineRecord {
            id: String::new(),
            home: String::new(),
            address: None,
            release: String::new(),
            started_s: 0,
            gone_s: None,
            certificates_end_s: None,
            signs: false,
            announced_until_s: None,
            other: Other::new(),
        };
        rig.put(&machine_key("f"), &encode(&record));
        for machine in ["e", "f"] {
            let told = rig.refusal(&rig.give(60, None), machine, &[]);
            assert!(told.contains(&format!("a machine {machine} already")), "{told}");
        }
        assert!(matches!(rig.ask(&rig.give(60, Some("f")), "f", &[]), Some(Answer::Signed { .. })));
    }

    #[test]
    fn a_machine_has_the_key_when_it_knows_what_was_signed_with_it() {
        let rig = Rig::new();
        let given = || AuthorityCopy::read(&rig.signer.certificates).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let other = Certificates::in_dir(&dir.path().join("tls"), GRID);
        other.put_ca(&rig.signer.certificates.ca_pem().unwrap()).unwrap();
        let members = EtcdMembers::path(&other);
        fs::create_dir_all(&members).unwrap();
        given().take(&other).unwrap_err();
        assert!(!other.has_authority(), "what it could not take in it would not know");
        fs::remove_dir(&members).unwrap();
        let foreign = AuthorityCopy { key: pki::request().unwrap().0, ..given() };
        foreign.take(&other).unwrap_err();
        assert!(!other.has_authority());
        // One that was written down before the authority was renewed is good still.
        let written_down = given();
        rig.signer.certificates.renew_authority().unwrap();
        assert!(other.take_renewed(&rig.signer.certificates.ca_pem().unwrap()).unwrap());
        written_down.take(&other).unwrap();
        assert!(other.has_authority());
    }

    #[test]
    fn what_is_not_sealed_with_the_secret_is_deleted_and_old_tokens_are_forgotten() {
        let rig = Rig::new();
        let (token, stranger) = (rig.give(60, None), JoinToken::new(GRID, [0; 32], [9; 32]));
        let wanted =
            Wanted { machine: "b".into(), host: Some(pki::request().unwrap().1), nodes: BTreeMap::new(), etcd: None };
        for forged in [stranger.seal_request(&wanted), b"{}".to_vec(), vec![0xff; 1000]] {
            rig.put(&request_key(&token.id()), &forged);
            rig.signer.round().unwrap();
            assert_eq!(rig.signer.meta.get(&request_key(&token.id())).unwrap(), None);
            assert_eq!(rig.signer.meta.get(&answer_key(&token.id())).unwrap(), None);
        }
        let old = rig.give(-(KEPT_S as i64) - 1, None);
        rig.put(&token_key(&old.id()), b"{}");
        assert_eq!(rig.ask(&old, "b", &[]), None);
        assert_eq!(rig.signer.meta.get(&token_key(&old.id())).unwrap(), None);
        assert!(!rig.signer.path(&old.id()).exists());
        assert!(matches!(rig.ask(&token, "b", &[]), Some(Answer::Signed { .. })), "it was used by nobody");
    }
}
