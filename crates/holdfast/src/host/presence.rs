//! That this host is here: a record that lives as long as it says so, and what hangs on that.
//!
//! ```text
//! host/NAME              (metadata, leased) where the host of this name runs
//! caretaker              (metadata, leased) which host is the steward, that does what one does for all
//! ```
//! A lease that has run out permits others to take volumes over, and nothing else: a host whose lease was lost goes on
//! serving until a node refuses its epoch (protocol rule 7), and announces itself anew.
//!
//! Faults: a killed host's record outlives it by [`TTL`]; its successor in the same directory does not wait for that.

use super::meta::Meta;
use crate::grid::layout::GridDir;
use crate::logger;
use anyhow::{Context, Result, bail};
use holdfast_api::{Code, NodeInfo, refuse};
use holdfast_base::MetaVersion;
use holdfast_cluster::View;
use holdfast_format::meta::{HOST_PREFIX, HostRecord, Other, STEWARD_KEY, decode, encode, host_key};
use holdfast_format::root::{ROOT_VERSION, Root};
use holdfast_format::wire::{OPERATORS_SINCE, PACKED_SINCE};
use holdfast_runtime::meta::{LeaseId, MetaError, MetaStore, Swap};
use holdfast_volume::FEATURES_SERVED;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a host that says nothing counts as there. An election of etcd's default timing takes one to two seconds.
pub const TTL: Duration = Duration::from_secs(5);

const RENEW_PACE: Duration = Duration::from_secs(1);

/// So many renewals lie between two looks whether the host's record is there.
const LOOK_EVERY: u32 = 5;

/// How long a start waits for another host of the same name to be gone.
const PREDECESSOR_MAX: Duration = Duration::from_secs(8);

/// This host, as others see it.
#[derive(Clone)]
pub struct Presence {
    meta: Meta,
    host: String,
    home: String,
    state: Arc<Mutex<HostLease>>,
}

#[derive(Clone)]
struct HostLease {
    /// Where this host's reactors can be reached by others, by number, if they may.
    addresses: Vec<SocketAddr>,
    lease: LeaseId,
    /// The host's record is on this lease.
    named: bool,
    /// The host goes: the lease is not to be had anew.
    ended: bool,
}

/// Machine and directory.
pub fn home_of(dir: &GridDir) -> String {
    let machine = std::fs::read_to_string("/etc/machine-id").unwrap_or_default();
    format!("{}:{}", machine.trim(), dir.root().display())
}

/// Hosts that say that they are there.
pub fn live_hosts(meta: &Meta) -> Result<BTreeSet<String>> {
    Ok(host_addresses(meta)?.into_keys().collect())
}

/// Hosts that say that they are there, and where the reactors of each can be reached by others, if they can.
pub fn host_addresses(meta: &Meta) -> Result<BTreeMap<String, Vec<SocketAddr>>> {
    Ok(host_records(meta)?.map(|(host, record)| (host, addresses_of(record.as_ref()))).collect())
}

/// Where a host's reactors can be reached by others, by number, as its record says.
pub fn addresses_of(record: Option<&HostRecord>) -> Vec<SocketAddr> {
    let Some(record) = record else { return Vec::new() };
    let all = record.address.iter().chain(&record.reactors).map(|address| address.parse());
    all.collect::<Result<_, _>>().unwrap_or_default()
}

/// By name; nothing of a record that this release can't read.
fn host_records(meta: &Meta) -> Result<impl Iterator<Item = (String, Option<HostRecord>)>> {
    let listed = meta.list(HOST_PREFIX)?.records.into_iter();
    Ok(listed.map(|r| (r.key[HOST_PREFIX.len()..].to_string(), decode(&r.value).ok())))
}

/// Refuses what would put a volume out of reach of a host that is there and of an older release.
pub fn check_can_serve(meta: &Meta, root: &Root) -> Result<()> {
    let serves = |record: Option<HostRecord>| {
        let (reads, features) = record.map_or((0, Vec::new()), |record| (record.reads_root, record.features));
        reads.max(1) >= root.version() && root.features.needed().all(|feature| features.contains(&feature))
    };
    let old: Vec<String> = host_records(meta)?.filter(|(_, r)| !serves(r.clone())).map(|(h, _)| h).collect();
    if !old.is_empty() {
        bail!(
            "{} could not serve volume {} then: its release is older than this host's. Bring it to the same one and \
             restart it, then try again",
            old.join(", "),
            root.name
        );
    }
    Ok(())
}

/// Refuses packed blocks where a node would. Of nodes that are away nobody knows: an owner packs nothing while it sees an
/// older one.
pub fn check_nodes_pack(nodes: &[NodeInfo]) -> Result<()> {
    let old = nodes.iter().filter(|node| node.wire.is_some_and(|wire| wire < PACKED_SINCE));
    let old: Vec<String> = old.map(|node| node.id.to_string()).collect();
    if !old.is_empty() {
        refuse!(
            Code::State,
            "nodes of an older release would refuse packed blocks: {}. Bring these to this host's, then try again",
            old.join(", ")
        );
    }
    Ok(())
}

/// Refuses a list of what is revoked that names operators or readers where somebody who is there could not read it: a host or
/// node of an older release goes by the list of before, and a node does not start with such a one.
pub fn check_take_operators(hosts: &[String], nodes: &[NodeInfo]) -> Result<()> {
    let nodes = nodes.iter().filter(|node| node.wire.is_some_and(|wire| wire < OPERATORS_SINCE));
    let nodes = nodes.map(|node| format!("node {}", node.id));
    let old: Vec<String> = hosts.iter().map(|host| format!("host {host}")).chain(nodes).collect();
    if !old.is_empty() {
        refuse!(
            Code::Unsupported,
            "nothing is revoked: a list that names operators or readers could not be read by {}, of an older release. Bring \
             these to this host's (`holdfast machine list`), then revoke again. Until then nobody comes by HTTP where \
             api.tcp is taken out of holdfast.toml and the host restarted",
            old.join(", ")
        );
    }
    Ok(())
}

/// Hosts that are there, and would not look after what is in the trash.
pub fn without_trash(view: &View) -> Vec<String> {
    let knows = |record: &Option<HostRecord>| record.as_ref().is_some_and(|record| record.knows_trash);
    view.hosts().iter().filter(|(_, record)| !knows(record)).map(|(host, _)| host.clone()).collect()
}

/// Whether every host that is there takes what is not promised to guests.
pub fn all_take_spare(view: &View) -> bool {
    view.hosts().values().all(|record| record.as_ref().is_some_and(|record| record.takes_spare))
}

impl Presence {
    /// Announces the host, once it holds its directory's locks.
    pub fn announce(meta: Meta, (host, addresses): (&str, &[SocketAddr]), dir: &GridDir) -> Result<Presence> {
        let home = home_of(dir);
        let state = Arc::new(Mutex::new(HostLease {
            addresses: addresses.to_vec(),
            lease: meta.grant(TTL)?,
            named: false,
            ended: false,
        }));
        let presence = Presence { meta, host: host.to_string(), home, state };
        let end = Instant::now() + PREDECESSOR_MAX;
        while let Some(other) = presence.renew()? {
            if Instant::now() >= end {
                refuse!(
                    Code::Exists,
                    "a host named {host} is at work already, on {other}; give this one another `name` in {}",
                    dir.config_path().display()
                );
            }
            std::thread::sleep(RENEW_PACE / 5);
        }
        let renewing = presence.clone();
        let renew = move || {
            let mut told = None;
            for count in 0_u32.. {
                std::thread::sleep(RENEW_PACE);
                if count % LOOK_EVERY == 0 {
                    renewing.look();
                }
                // While the store is away the lease may run out: see above.
                let Ok(other) = renewing.renew() else { continue };
                if let Some(other) = other.as_ref().filter(|_| other != told) {
                    let host = &renewing.host;
                    logger::error(format_args!("another host calls itself {host}, on {other}: rename one of them"));
                }
                told = other;
            }
        };
        std::thread::Builder::new().name("presence".to_string()).spawn(renew).context("no thread for the lease")?;
        Ok(presence)
    }

    fn lease_state(&self) -> std::sync::MutexGuard<'_, HostLease> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn address(&self) -> Option<SocketAddr> {
        self.lease_state().addresses.first().copied()
    }

    /// Other hosts reach this one here from now on.
    pub fn set_addresses(&self, addresses: Vec<SocketAddr>) -> Result<()> {
        let mut held = self.lease_state();
        (held.addresses, held.named) = (addresses, false);
        drop(held);
        self.renew().map(drop)
    }

    fn lease(&self) -> LeaseId {
        self.lease_state().lease
    }

    /// Puts this host's record where no other host's is; gives where that is.
    fn take_name(&self) -> Result<Option<String>> {
        let key = host_key(&self.host);
        let mut addresses =
            self.lease_state().addresses.iter().map(SocketAddr::to_string).collect::<Vec<_>>().into_iter();
        let record = HostRecord {
            home: self.home.clone(),
            address: addresses.next(),
            reactors: addresses.collect(),
            knows_reactors: true,
            reads_root: ROOT_VERSION,
            features: FEATURES_SERVED.iter().map(|feature| feature.number()).collect(),
            answers: true,
            runs_errands: true,
            takes_spare: true,
            takes_requests: true,
            knows_trash: true,
            knows_operators: true,
            other: Other::new(),
        };
        let record = encode(&record);
        let mut expect = MetaVersion::ABSENT;
        loop {
            match self.meta.swap(&key, expect, Some(&record), Some(self.lease()))? {
                Swap::Done(_) => return Ok(None),
                Swap::Conflict(None) => expect = MetaVersion::ABSENT,
                Swap::Conflict(Some(found)) => {
                    let there: HostRecord = decode(&found.value).with_context(|| format!("record {key} is damaged"))?;
                    if there.home != self.home {
                        return Ok(Some(there.home));
                    }
                    expect = found.version;
                }
            }
        }
    }

    /// Keeps lease and record alive, or gets new ones; gives where another host of the name is.
    fn renew(&self) -> Result<Option<String>> {
        match self.meta.keep_alive(self.lease()) {
            Ok(()) => {}
            Err(MetaError::LeaseGone) if self.lease_state().ended => return Ok(None),
            Err(MetaError::LeaseGone) => {
                let lease = self.meta.grant(TTL)?;
                let mut held = self.lease_state();
                (held.lease, held.named) = (lease, false);
                drop(held);
                logger::warn(format_args!("the host's lease had run out; it takes a new one"));
            }
            Err(error) => return Err(error.into()),
        }
        if self.lease_state().named {
            return Ok(None);
        }
        let other = self.take_name()?;
        self.lease_state().named = other.is_none();
        Ok(other)
    }

    /// Of a store that somebody has emptied the lease may be left without the record: who fills the store anew must see that
    /// this host is at work.
    fn look(&self) {
        let is_gone = self.meta.get(&host_key(&self.host)).is_ok_and(|found| found.is_none());
        if is_gone {
            self.lease_state().named = false;
        }
    }

    /// Hosts that say that they are there, and where they can be reached.
    pub fn hosts(&self) -> Result<BTreeMap<String, Vec<SocketAddr>>> {
        host_addresses(&self.meta)
    }

    /// Other hosts that are there, of releases that know hosts of one reactor only.
    pub fn hosts_of_one_reactor(&self) -> Result<Vec<String>> {
        let knows = |record: Option<HostRecord>| record.is_some_and(|record| record.knows_reactors);
        let others = host_records(&self.meta)?.filter(|(host, _)| *host != self.host);
        Ok(others.filter(|(_, record)| !knows(record.clone())).map(|(host, _)| host).collect())
    }

    /// Other hosts that are there, of releases that know neither operators nor readers.
    pub fn hosts_without_operators(&self) -> Result<Vec<String>> {
        let knows = |record: Option<HostRecord>| record.is_some_and(|record| record.knows_operators);
        let others = host_records(&self.meta)?.filter(|(host, _)| *host != self.host);
        Ok(others.filter(|(_, record)| !knows(record.clone())).map(|(host, _)| host).collect())
    }

    /// Other hosts that are there, and can be asked how their volumes are.
    pub fn hosts_that_answer(&self) -> Result<BTreeSet<String>> {
        let answers = |record: Option<HostRecord>| record.is_some_and(|record| record.answers);
        let others = host_records(&self.meta)?.filter(|(host, _)| *host != self.host);
        Ok(others.filter(|(_, record)| answers(record.clone())).map(|(host, _)| host).collect())
    }

    /// Whether that host is there, and does what others ask for.
    pub fn runs_errands(&self, host: &str) -> Result<bool> {
        Ok(host_records(&self.meta)?
            .any(|(name, record)| name == host && record.is_some_and(|record| record.runs_errands)))
    }

    /// Other hosts that are there, and do what others ask for.
    pub fn hosts_that_run_errands(&self) -> Result<BTreeSet<String>> {
        let runs = |record: Option<HostRecord>| record.is_some_and(|record| record.runs_errands);
        let others = host_records(&self.meta)?.filter(|(host, _)| *host != self.host);
        Ok(others.filter(|(_, record)| runs(record.clone())).map(|(host, _)| host).collect())
    }

    /// Puts a record of this host's alone that lasts as long as the host's lease, or takes it away.
    pub fn keep(&self, key: &str, value: Option<&[u8]>) -> Result<()> {
        let mut expect = self.meta.get(key)?.map_or(MetaVersion::ABSENT, |found| found.version);
        loop {
            if value.is_none() && expect == MetaVersion::ABSENT {
                return Ok(());
            }
            match self.meta.swap(key, expect, value, value.map(|_| self.lease()))? {
                Swap::Done(_) => return Ok(()),
                Swap::Conflict(found) => expect = found.map_or(MetaVersion::ABSENT, |found| found.version),
            }
        }
    }

    /// A record's bytes.
    pub fn read(&self, key: &str) -> Result<Option<Vec<u8>>> {
        Ok(self.meta.get(key)?.map(|found| found.value))
    }

    /// This host becomes the steward where the record is at that version: for as long as it is there at the new one.
    pub fn be_steward(&self, store: &dyn MetaStore, replaces: MetaVersion) -> Result<Option<MetaVersion>> {
        let host = Some(self.host.as_bytes());
        let taken = store.swap(STEWARD_KEY, replaces, host, Some(self.lease()))?;
        Ok(if let Swap::Done(version) = taken { Some(version) } else { None })
    }

    /// The host is about to end, in good order: others need not wait.
    pub fn end(&self) {
        // Before the lease is gone: it may be renewed in this moment.
        self.lease_state().ended = true;
        if let Err(error) = self.meta.revoke(self.lease()) {
            logger::warn(format_args!("others learn in {} s that this host is gone: {error}", TTL.as_secs()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::records::Records;
    use super::*;
    use holdfast_base::{GridId, MediaClass, VolumeId};
    use holdfast_format::features::{Feature, Features};
    use holdfast_format::geometry::Layout;
    use holdfast_format::tier::Tiers;
    use holdfast_runtime::clock;
    use holdfast_runtime::meta::LocalStore;
    use std::path::Path;

    fn node(id: u32, wire: Option<u32>) -> NodeInfo {
        let json = serde_json::json!({
            "id": id, "address": "", "link": "up", "suspect": false, "cut": false, "silent_ms": 0, "wire": wire, "devices": [],
        });
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn who_could_not_read_that_operators_are_revoked_is_named_before_they_are() {
        let new = [node(1, Some(OPERATORS_SINCE)), node(2, None)];
        check_take_operators(&[], &new).unwrap();
        let nodes = [&new[..], &[node(3, Some(OPERATORS_SINCE - 1))]].concat();
        let refusal = check_take_operators(&["b".to_string()], &nodes).unwrap_err().to_string();
        assert!(refusal.contains("by host b, node 3, of an older") && refusal.contains("Bring these"), "{refusal}");
        let meta: Meta = Arc::new(LocalStore::in_memory(Arc::new(clock::now)));
        let dir = GridDir::choose(Some(Path::new("/x"))).unwrap();
        let own = Presence::announce(meta.clone(), ("a", &[]), &dir).unwrap();
        let other = GridDir::choose(Some(Path::new("/y"))).unwrap();
        let _other = Presence::announce(meta.clone(), ("b", &[]), &other).unwrap();
        assert!(own.hosts_without_operators().unwrap().is_empty());
        let old = br#"{"home":"z","knows_trash":true}"#;
        meta.swap("host/old", MetaVersion::ABSENT, Some(old), None).unwrap();
        assert_eq!(own.hosts_without_operators().unwrap(), ["old"]);
    }

    #[test]
    fn nodes_of_an_older_release_are_named_before_blocks_are_packed() {
        let new = [node(1, Some(PACKED_SINCE)), node(2, None)];
        check_nodes_pack(&new).unwrap();
        let refusal = check_nodes_pack(&[&new[..], &[node(3, Some(PACKED_SINCE - 1)), node(4, Some(5))]].concat());
        let refusal = refusal.unwrap_err().to_string();
        assert!(refusal.contains("packed blocks: 3, 4. Bring these"), "{refusal}");
    }

    #[test]
    fn a_name_is_one_hosts_and_its_successor_in_the_same_directory_does_not_wait() {
        let meta: Meta = Arc::new(LocalStore::in_memory(Arc::new(clock::now)));
        let dir = |path: &str| GridDir::choose(Some(Path::new(path))).unwrap();
        let first = Presence::announce(meta.clone(), ("a", &[]), &dir("/x")).unwrap();
        let version = first.be_steward(&*meta, MetaVersion::ABSENT).unwrap();
        assert!(version.is_some());
        let second = Presence::announce(meta.clone(), ("b", &[]), &dir("/y")).unwrap();
        assert_eq!(second.be_steward(&*meta, MetaVersion::ABSENT).unwrap(), None);
        assert_eq!(live_hosts(&meta).unwrap(), BTreeSet::from(["a".to_string(), "b".to_string()]));
        let again = Presence::announce(meta.clone(), ("a", &[]), &dir("/x")).unwrap();
        assert_eq!(again.take_name().unwrap(), None);
        let elsewhere = Presence { home: "other".to_string(), ..again.clone() };
        assert!(elsewhere.take_name().unwrap().is_some());
        let root = Root::new(GridId(1), VolumeId(2), "vm", 1 << 30, Layout::DEFAULT);
        let tiers = Tiers { capacity: Some(MediaClass::Hdd), ..Tiers::default() };
        let tiered = Root { tiers, ..root.clone() };
        check_can_serve(&meta, &tiered).unwrap();
        let old = |version: &str| format!("{{\"home\":\"z\"{version}}}").into_bytes();
        let mut expect = MetaVersion::ABSENT;
        for version in ["", ",\"reads_root\":3"] {
            let swapped = meta.swap("host/old", expect, Some(&old(version)), None).unwrap();
            let Swap::Done(now) = swapped else { panic!("{swapped:?}") };
            expect = now;
            check_can_serve(&meta, &root).unwrap();
            let refusal = check_can_serve(&meta, &tiered).unwrap_err().to_string();
            assert!(refusal.starts_with("old could not serve volume vm"), "{refusal}");
        }
        let headed = Root { features: Features::default().with(Feature::Heads), ..root.clone() };
        for (features, hosts) in
            [("", "a, b, old"), (",\"features\":[1]", "a, b, old"), (",\"features\":[1,3]", "a, b")]
        {
            let swapped =
                meta.swap("host/old", expect, Some(&old(&format!(",\"reads_root\":5{features}"))), None).unwrap();
            let Swap::Done(now) = swapped else { panic!("{swapped:?}") };
            expect = now;
            check_can_serve(&meta, &tiered).unwrap();
            let refusal = check_can_serve(&meta, &headed).unwrap_err().to_string();
            assert!(refusal.starts_with(&format!("{hosts} could not serve volume vm")), "{refusal}");
        }
        let records = Records::start(meta.clone(), false, None).unwrap();
        let all_take_spare = || {
            records.sync().unwrap();
            records.view(all_take_spare)
        };
        assert!(!all_take_spare());
        meta.swap("host/old", expect, None, None).unwrap();
        assert!(all_take_spare());
        // Somebody has emptied the store, and its lease is alive.
        let there = meta.get("host/b").unwrap().unwrap().version;
        meta.swap("host/b", there, None, None).unwrap();
        second.look();
        second.renew().unwrap();
        assert!(live_hosts(&meta).unwrap().contains("b"), "it says so again");
        first.end();
        assert!(
            second.be_steward(&*meta, MetaVersion::ABSENT).unwrap() > version,
            "who goes in good order lets go at once"
        );
        meta.revoke(again.lease()).unwrap();
        assert_eq!(live_hosts(&meta).unwrap(), BTreeSet::from(["b".to_string()]));
        let named = elsewhere.renew().unwrap();
        assert_eq!((named, elsewhere.lease_state().named), (None, true), "the lease was gone, and the name free");
        elsewhere.end();
        assert_eq!(elsewhere.renew().unwrap(), None);
        assert_eq!(live_hosts(&meta).unwrap(), BTreeSet::from(["b".to_string()]), "who goes takes no new lease");
    }
}
