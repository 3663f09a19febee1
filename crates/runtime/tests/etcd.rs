//! The metadata store on real etcd: the conformance suite, TLS, members that die and hang.
//!
//! Needs the program `etcd`; `./x` sees to it.

use holdfast_base::MetaVersion;
use holdfast_runtime::meta::conformance::{self, Subject};
use holdfast_runtime::meta::member::{Member, MemberConfig, MemberTls};
use holdfast_runtime::meta::{
    Change, EtcdConfig, EtcdError, EtcdStore, EtcdTls, LeaseId, MetaError, MetaStore, Revision, Right, Swap,
};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long a store may be silent on a machine that has much else to do.
const PATIENCE: Duration = Duration::from_secs(60);

/// Free ports of an address that no other test uses.
fn ports(last: u8, count: usize) -> Vec<SocketAddr> {
    let ip = IpAddr::V4(Ipv4Addr::new(127, 0, 9, last));
    let held: Vec<_> = (0..count).map(|_| TcpListener::bind((ip, 0)).expect("a free port")).collect();
    held.iter().map(|l| l.local_addr().expect("bound")).collect()
}

fn alone(dir: &Path, last: u8) -> Member {
    let at = ports(last, 2);
    let mut member = Member::start(MemberConfig::alone(dir, at[0], at[1])).expect("etcd starts");
    member.wait().expect("etcd serves");
    member
}

fn cluster(dir: &Path, last: u8) -> Vec<Member> {
    let at = ports(last, 6);
    let names: Vec<(String, SocketAddr)> = (0..3).map(|n| (format!("m{n}"), at[3 + n])).collect();
    let config = |n: usize| MemberConfig {
        name: names[n].0.clone(),
        dir: dir.join(&names[n].0),
        client: at[n],
        peer: at[3 + n],
        cluster: names.clone(),
        tls: None,
        quota_bytes: None,
    };
    let mut members: Vec<Member> = (0..3).map(|n| Member::start(config(n)).expect("etcd starts")).collect();
    members.iter_mut().for_each(|m| m.wait().expect("etcd serves"));
    connect(&members);
    members
}

/// A store that has answered: members listen before they have a leader, and a machine with much to do lets them be silent for long.
fn connect(members: &[Member]) -> EtcdStore {
    connect_under("test/", members)
}

fn connect_under(prefix: &str, members: &[Member]) -> EtcdStore {
    let endpoints = members.iter().map(|m| m.config().endpoint()).collect();
    let store =
        EtcdStore::connect(&EtcdConfig { endpoints, prefix: prefix.into(), tls: None }).expect("good endpoints");
    let end = Instant::now() + PATIENCE;
    while let Err(error) = store.get("ready") {
        assert!(Instant::now() < end, "{error}");
    }
    store
}

fn swap(store: &EtcdStore, key: &str, expect: MetaVersion, value: &[u8]) -> MetaVersion {
    swap_in_time(store, key, expect, value)
}

struct Alone(Member);

impl Subject for Alone {
    fn open(&self) -> Arc<dyn MetaStore> {
        Arc::new(connect(std::slice::from_ref(&self.0)))
    }

    fn advance(&self, span: Duration) {
        std::thread::sleep(span);
    }

    fn forget_history(&self, store: &dyn MetaStore) -> bool {
        // Of the revision that history is forgotten up to, the change stays.
        store.swap("later", MetaVersion::ABSENT, Some(b""), None).expect("swap");
        let revision = store.list("conformance/").expect("list").revision.0.cast_signed();
        let endpoint = self.0.config().endpoint();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
        let compacted = runtime.block_on(async {
            let mut client = etcd_client::Client::connect([endpoint], None).await?;
            client.compact(revision, None).await
        });
        compacted.expect("etcd compacts its history");
        true
    }
}

#[test]
fn etcd_does_what_every_store_must() {
    let dir = tempfile::tempdir().expect("a directory");
    conformance::run(&Alone(alone(dir.path(), 1)));
}

#[test]
fn long_lists_come_whole() {
    let dir = tempfile::tempdir().expect("a directory");
    let members = [alone(dir.path(), 2)];
    let store = connect(&members);
    for n in 0..150 {
        swap(&store, &format!("many/{n:03}"), MetaVersion::ABSENT, &vec![n as u8; 60_000]);
    }
    swap(&store, "many0", MetaVersion::ABSENT, b"not one of them");
    let listing = store.list("many/").expect("list");
    assert_eq!(listing.records.len(), 150);
    assert!(listing.records.iter().enumerate().all(|(n, r)| r.value == vec![n as u8; 60_000]), "in order, and whole");
    assert_eq!(store.list("").expect("list").records.len(), 151, "an empty prefix is all of the grid's");
    let all = connect_under("", &members);
    assert_eq!(all.list("test/many/").expect("list").records.len(), 150, "the prefix lies before the keys");
}

#[test]
fn members_may_die_and_hang_and_the_store_serves_on() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut members = cluster(dir.path(), 3);
    let store = connect(&members);
    let lease = store.grant(Duration::from_secs(60)).expect("grant");
    let mut version = MetaVersion::ABSENT;
    for round in 0..6_u8 {
        let victim = usize::from(round) % 3;
        let killed = if round < 3 {
            members[victim].hang().expect("a signal");
            None
        } else {
            Some(members.remove(victim).kill())
        };
        version = swap_in_time(&store, "round", version, &[round]);
        in_time(|| store.keep_alive(lease)).expect("the lease lives on");
        match killed {
            None => members[victim].resume().expect("a signal"),
            Some(config) => {
                let mut again = Member::start(config).expect("etcd starts");
                again.wait().expect("etcd serves");
                members.insert(victim, again);
            }
        }
    }
    assert_eq!(in_time(|| store.get("round")).expect("get").expect("there").value, [5]);
    assert_eq!(store.keep_alive(LeaseId(12345)), Err(MetaError::LeaseGone));
}

/// Members that do not lead: without one of them no election has to be waited for.
fn followers(members: &[Member]) -> Vec<usize> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
    let follows = |member: &Member| {
        let endpoint = member.config().endpoint();
        let status = runtime.block_on(async { etcd_client::Client::connect([endpoint], None).await?.status().await });
        let status = status.expect("a member tells of itself");
        status.header().expect("it names itself").member_id() != status.leader()
    };
    (0..members.len()).filter(|at| follows(&members[*at])).collect()
}

#[test]
fn what_only_reads_does_not_fail_with_the_member_that_was_asked() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut members = cluster(dir.path(), 6);
    swap_in_time(&connect(&members), "kept", MetaVersion::ABSENT, b"value");
    // While one is elected all follow, or none is known.
    let end = Instant::now() + PATIENCE;
    let asked = loop {
        let asked = followers(&members);
        if asked.len() == 2 {
            break asked;
        }
        assert!(Instant::now() < end, "nobody leads: {asked:?}");
    };
    let endpoints = asked.iter().map(|at| members[*at].config().endpoint()).collect();
    let store =
        EtcdStore::connect(&EtcdConfig { endpoints, prefix: "test/".into(), tls: None }).expect("good endpoints");
    // A lease more than is used does no harm.
    let lease = in_time(|| store.grant(Duration::from_secs(300))).expect("grant");
    // Where the machine stands still the other one is silent for too long, too.
    let mut told: Vec<(Result<usize, MetaError>, Result<(), MetaError>)> = Vec::new();
    while told.last() != Some(&(Ok(1), Ok(()))) {
        assert!(told.len() < 5, "the other answers, and the lease lives on: {told:?}");
        let victim = asked[store.member()];
        members[victim].hang().expect("a signal");
        told.push((store.list("").map(|listing| listing.records.len()), store.keep_alive(lease)));
        members[victim].resume().expect("a signal");
        in_time(|| store.get("kept")).expect("it answers still");
    }
    members.remove(asked[store.member()]).kill();
    assert_eq!(in_time(|| store.get("kept")).expect("the other answers").expect("there").value, b"value");
}

/// Asks again while the store is silent, as it is where it elects, or where the machine has much else to do.
fn in_time<T>(ask: impl Fn() -> Result<T, MetaError>) -> Result<T, MetaError> {
    let end = Instant::now() + PATIENCE;
    loop {
        match ask() {
            Err(MetaError::Unknown { .. }) if Instant::now() < end => {}
            told => return told,
        }
    }
}

/// Silence counts for nothing, on a machine with much to do; whatever else is unknown does.
fn unless_silent(told: Result<(), MetaError>) -> Result<(), MetaError> {
    match told {
        Err(MetaError::Unknown { why }) if why.contains("silent") => Ok(()),
        told => told,
    }
}

/// As protocol rule 4 asks: the same swap on the same version, until its outcome is known.
fn swap_in_time(store: &EtcdStore, key: &str, expect: MetaVersion, value: &[u8]) -> MetaVersion {
    let end = Instant::now() + PATIENCE;
    loop {
        match store.swap(key, expect, Some(value), None) {
            Ok(Swap::Done(version)) => return version,
            Ok(Swap::Conflict(Some(found))) if found.value == value => return found.version,
            Err(MetaError::Unknown { why }) => assert!(Instant::now() < end, "{key}: {why}"),
            other => panic!("{key}: {other:?}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_watch_that_lost_its_member_ends_and_resumes_at_another() {
    let dir = tempfile::tempdir().expect("a directory");
    let members = cluster(dir.path(), 4);
    let store = connect(&members);
    let version = swap(&store, "w/a", MetaVersion::ABSENT, b"1");
    let from = Revision(version.0);
    let watch = |from| in_time(|| store.watch("w/", from)).expect("watch");
    let mut told = watch(from);
    let end = Instant::now() + PATIENCE;
    let first = loop {
        match told.next(Duration::from_secs(10)) {
            Ok(events) if !events.is_empty() => break events,
            Ok(_) => {}
            // A machine that stands still for a while takes its member for lost.
            Err(MetaError::Unknown { .. }) => told = watch(from),
            Err(error) => panic!("{error}"),
        }
        assert!(Instant::now() < end, "the first change was never told");
    };
    assert_eq!(first.len(), 1);
    // It hangs: the connection stays up, and says nothing.
    members[store.member()].hang().expect("a signal");
    let version = swap_in_time(&store, "w/a", version, b"2");
    let mut next = first[0].revision.next();
    let end = Instant::now() + Duration::from_secs(60);
    let value = loop {
        assert!(Instant::now() < end, "the change was never told");
        match told.next(Duration::from_secs(1)) {
            Ok(events) if events.is_empty() => {}
            Ok(events) => {
                next = events.last().expect("some").revision.next();
                let Change::Put(record) = &events[0].change else { panic!("{events:?}") };
                break record.value.clone();
            }
            Err(MetaError::Unknown { .. }) => match store.watch("w/", next) {
                Ok(again) => told = again,
                Err(error) => assert!(matches!(error, MetaError::Unknown { .. }), "{error}"),
            },
            Err(error) => panic!("{error}"),
        }
    };
    assert_eq!(value, b"2");
    assert!(next > Revision(version.0));
}

#[test]
fn a_cluster_behind_tls_lets_in_whom_its_authority_knows() {
    let dir = tempfile::tempdir().expect("a directory");
    let authority = Authority::new();
    let (member, (certificate, key)) = alone_behind_tls(dir.path(), 5, &authority);
    let endpoints = vec![member.config().endpoint()];

    // A machine with much to do keeps silent for longer than one call waits, which says nothing of whom the cluster lets in.
    let ask = |tls: Option<EtcdTls>| {
        let config = EtcdConfig { endpoints: endpoints.clone(), prefix: "t/".into(), tls };
        let store = EtcdStore::connect(&config).map_err(|e| e.to_string())?;
        let end = Instant::now() + PATIENCE;
        loop {
            match store.get("x").map_err(|e| e.to_string()) {
                Err(why) if why.contains("silent") && Instant::now() < end => {}
                told => return told,
            }
        }
    };
    let identity = Some((certificate, key));
    let ca = authority.pem().into_bytes();
    let shown = EtcdTls { ca: ca.clone(), identity: identity.clone() };
    assert_eq!(ask(Some(shown.clone())), Ok(None));
    shows_another_certificate(
        &EtcdConfig { endpoints: endpoints.clone(), prefix: "t/".into(), tls: Some(shown) },
        &authority,
    );
    ask(Some(EtcdTls { ca: ca.clone(), identity: None })).expect_err("no certificate is shown");
    let other = Authority::new();
    let stranger = Some(other.sign("127.0.9.5"));
    ask(Some(EtcdTls { ca, identity: stranger })).expect_err("a certificate of another authority");
    ask(Some(EtcdTls { ca: other.pem().into_bytes(), identity })).expect_err("a member of another authority");
    ask(None).expect_err("TLS without an authority");
}

/// A member, and what it shows to clients.
fn alone_behind_tls(dir: &Path, last: u8, authority: &Authority) -> (Member, (Vec<u8>, Vec<u8>)) {
    let (certificate, key) = authority.sign(&format!("127.0.9.{last}"));
    let tls = MemberTls { ca: dir.join("ca.pem"), certificate: dir.join("cert.pem"), key: dir.join("key.pem") };
    std::fs::write(&tls.ca, authority.pem()).expect("written");
    std::fs::write(&tls.certificate, &certificate).expect("written");
    std::fs::write(&tls.key, &key).expect("written");
    let at = ports(last, 2);
    let config = MemberConfig { tls: Some(tls), ..MemberConfig::alone(dir, at[0], at[1]) };
    let mut member = Member::start(config).expect("etcd starts");
    member.wait().expect("etcd serves");
    (member, (certificate, key))
}

/// A member that lets in users alone.
struct Guarded {
    member: Member,
    authority: Authority,
    last: u8,
    _dir: tempfile::TempDir,
}

impl Guarded {
    fn start(last: u8) -> Guarded {
        let dir = tempfile::tempdir().expect("a directory");
        let authority = Authority::new();
        let (member, _) = alone_behind_tls(dir.path(), last, &authority);
        let guarded = Guarded { member, authority, last, _dir: dir };
        in_time(|| guarded.as_user("root").protect(&[("all", vec![Right::All])])).expect("protected");
        guarded
    }

    fn as_user(&self, name: &str) -> EtcdStore {
        let identity = Some(self.authority.sign_as(name, &format!("127.0.9.{}", self.last)));
        let tls = Some(EtcdTls { ca: self.authority.pem().into_bytes(), identity });
        let endpoints = vec![self.member.config().endpoint()];
        EtcdStore::connect(&EtcdConfig { endpoints, prefix: "t/".into(), tls }).expect("good endpoints")
    }
}

#[test]
fn users_that_another_deletes_meanwhile_are_none() {
    let guarded = Guarded::start(11);
    let (root, other) = (guarded.as_user("root"), guarded.as_user("root"));
    unless_silent(root.change_role("nobody", "all", "root")).expect("who is no user may do nothing anyway");
    unless_silent(root.delete_user("nobody")).expect("there is none");
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in (0..4).cycle().take_while(|_| !done.load(Ordering::Relaxed)) {
                in_time(|| other.add_user(&format!("user{n}"), "all")).expect("a user");
                in_time(|| other.delete_user(&format!("user{n}"))).expect("it goes");
            }
        });
        let listed = (0..200).try_for_each(|_| unless_silent(root.users().map(drop)));
        done.store(true, Ordering::Relaxed);
        listed.expect("whoever is left");
    });
}

#[test]
fn who_writes_while_users_are_added_is_not_told_so() {
    let guarded = Guarded::start(10);
    let (root, writer) = (guarded.as_user("root"), guarded.as_user("writer"));
    in_time(|| root.add_user("writer", "all")).expect("a user");

    let done = AtomicBool::new(false);
    let write = &|key: String| {
        while !done.load(Ordering::Relaxed) {
            let version =
                in_time(|| writer.get(&key)).expect("read").map_or(MetaVersion::ABSENT, |record| record.version);
            unless_silent(writer.swap(&key, version, Some(b"x"), None).map(drop)).expect("written");
        }
    };
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..4).map(|n| scope.spawn(move || write(format!("k{n}")))).collect();
        for n in 0..100 {
            in_time(|| root.add_user(&format!("user{n}"), "all")).expect("a user");
        }
        done.store(true, Ordering::Relaxed);
        writers.into_iter().for_each(|writer| writer.join().expect("it wrote all the while"));
    });
}

/// What a store shows is replaced while it is used, by what members let in alone.
fn shows_another_certificate(config: &EtcdConfig, authority: &Authority) {
    let store = EtcdStore::connect(config).expect("good endpoints");
    let mut watch = store.watch("w/", Revision(1)).expect("a watch");
    let ca = authority.pem().into_bytes();
    let stranger = Some(Authority::new().sign("127.0.9.5"));
    let refused = store.show(&EtcdTls { ca: ca.clone(), identity: stranger });
    assert!(matches!(refused, Err(EtcdError::NotLetIn { .. })), "{refused:?}");
    let version = swap_in_time(&store, "w/a", MetaVersion::ABSENT, b"1");
    store.show(&EtcdTls { ca, identity: Some(authority.sign("127.0.9.5")) }).expect("it is let in");
    swap_in_time(&store, "w/a", version, b"2");
    let (mut values, end) = (Vec::new(), Instant::now() + Duration::from_secs(30));
    while values.len() < 2 && Instant::now() < end {
        values.extend(watch.next(Duration::from_secs(1)).expect("it goes on").into_iter().map(|event| event.change));
    }
    assert_eq!(values.len(), 2, "{values:?}");
}

struct Authority {
    issuer: rcgen::CertifiedIssuer<'static, rcgen::KeyPair>,
}

impl Authority {
    fn new() -> Authority {
        let mut params = rcgen::CertificateParams::new(Vec::new()).expect("parameters");
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let key = rcgen::KeyPair::generate().expect("a key");
        Authority { issuer: rcgen::CertifiedIssuer::self_signed(params, key).expect("a certificate") }
    }

    fn pem(&self) -> String {
        self.issuer.pem()
    }

    /// Certificate and key for an address, as PEM.
    fn sign(&self, address: &str) -> (Vec<u8>, Vec<u8>) {
        self.sign_as("", address)
    }

    /// The same for a user of etcd.
    fn sign_as(&self, user: &str, address: &str) -> (Vec<u8>, Vec<u8>) {
        let mut params = rcgen::CertificateParams::new(vec![address.to_string()]).expect("parameters");
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(rcgen::DnType::CommonName, user);
        let key = rcgen::KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.issuer).expect("signed");
        (certificate.pem().into_bytes(), key.serialize_pem().into_bytes())
    }
}

#[test]
fn a_full_etcd_says_so_and_goes_on_when_an_operator_has_made_room() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = ports(61, 2);
    let config = MemberConfig { quota_bytes: Some(1 << 20), ..MemberConfig::alone(dir.path(), at[0], at[1]) };
    let mut member = Member::start(config).expect("etcd starts");
    member.wait().expect("etcd serves");
    let store = connect(std::slice::from_ref(&member));
    assert_eq!(store.trouble(), None);
    let value = vec![7; 64 << 10];
    let put = |n| store.swap(&format!("k{n}"), MetaVersion::ABSENT, Some(&value), None);
    // One that was silent for a while has not refused.
    let refused = (0..400).find_map(|n| put(n).err().filter(|error| !matches!(error, MetaError::Unknown { .. })));
    let refused = refused.expect("its database is full");
    assert!(matches!(refused, MetaError::Unwritable { .. }), "{refused}");
    assert!(refused.to_string().contains("NOSPACE") && refused.to_string().contains("etcdctl defrag"), "{refused}");
    assert_eq!(store.trouble(), Some(refused));
    assert_eq!(store.get("k0").expect("it is read").expect("there").value, value);
}
