//! An etcd that goes by the grid's own certificates: real members by the configuration that is printed, machines that
//! get in, and those that no longer do.
//!
//! Needs the program `etcd`; `./x` sees to it.

mod support;

use holdfast_base::MetaVersion;
use holdfast_runtime::meta::{EtcdConfig, EtcdStore, EtcdTls, MetaError, MetaStore, Swap};
use holdfast_runtime::pki::etcd::User;
use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;
use support::{Grid, PATIENCE, assert_volume_holds, etcd, free_ports, nbdcopy, needs, pattern, until};

/// A member, by the files that were made for it, as if they had been copied.
struct Member {
    child: Child,
    client: SocketAddr,
}

impl Member {
    fn start(files: &Path) -> Member {
        let text = fs::read_to_string(files.join("etcd.env")).expect("its configuration");
        let text = text.replace("/etc/holdfast-etcd", files.to_str().expect("text"));
        let settings: Vec<(&str, &str)> = text.lines().map(|line| line.split_once('=').expect("a setting")).collect();
        let of = |name: &str| settings.iter().find(|(found, _)| *found == name).expect(name).1;
        let client =
            of("ETCD_ADVERTISE_CLIENT_URLS").strip_prefix("https://").expect("TLS").parse().expect("an address");
        let log = fs::File::options().create(true).append(true).open(files.join("log")).expect("a log");
        let mut command = Command::new(needs("etcd"));
        command.envs(settings.iter().copied()).stdin(Stdio::null());
        command.stdout(log.try_clone().expect("a log")).stderr(log);
        Member { child: command.spawn().expect("etcd starts"), client }
    }

    fn wait(&self) {
        until("etcd listens", || TcpStream::connect(self.client).is_ok());
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Members of a cluster, and a place for others, each at an address of its own.
struct Cluster {
    dir: tempfile::TempDir,
    net: u8,
    port: u16,
}

impl Cluster {
    fn new(net: u8) -> Cluster {
        // Each of its addresses has both of the member's ports.
        let port = free_ports(u16::from(net), 2);
        Cluster { dir: tempfile::tempdir().expect("a directory"), net, port }
    }

    fn address(&self, number: u8) -> String {
        format!("127.0.{}.{number}:{}", self.net, self.port)
    }

    fn urls(&self, numbers: &[u8]) -> String {
        numbers.iter().map(|n| format!("https://{}", self.address(*n))).collect::<Vec<_>>().join(",")
    }

    /// What names members on the command line that makes them.
    fn make(&self, numbers: &[u8], options: &str) -> String {
        let members = numbers.iter().map(|n| format!("m{n}={}", self.address(*n))).collect::<Vec<_>>().join(" ");
        let dir = self.dir.path().display();
        format!("grid etcd member {members} --to {dir} --data {dir}/data {options}")
    }

    fn files(&self, number: u8) -> PathBuf {
        self.dir.path().join(format!("m{number}"))
    }

    fn log(&self, number: u8) -> String {
        fs::read_to_string(self.files(number).join("log")).unwrap_or_default()
    }

    fn start(&self, number: u8) -> Member {
        Member::start(&self.files(number))
    }

    /// As whoever has these files.
    fn store(&self, grid: &Grid, numbers: &[u8], certificate: &Path, key: &Path) -> EtcdStore {
        let read = |path: &Path| fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let tls = EtcdTls { ca: read(&grid.path("tls/etcd-ca.pem")), identity: Some((read(certificate), read(key))) };
        let endpoints = self.urls(numbers).split(',').map(str::to_string).collect();
        let id = grid.json("status")["grid"].as_str().expect("an id").to_string();
        EtcdStore::connect(&EtcdConfig { endpoints, prefix: format!("holdfast/{id}/"), tls: Some(tls) })
            .expect("prepared")
    }
}

fn trouble(grid: &Grid) -> String {
    grid.json("status")["metadata"]["trouble"].as_str().unwrap_or_default().to_string()
}

fn up_line(grid: &Grid, name: &str, etcd: &str, options: &str) -> String {
    let port = &grid.port;
    format!(
        "grid up --port {port} --device-size 256MiB --nodes 1 --devices 2 --etcd {etcd} --address 127.0.0.1 --name \
         {name} {options}"
    )
}

/// Whoever makes the grid keeps its authority's key for itself: hosts give it to each other by themselves, sooner or
/// later.
fn keeps_authority(first: &Grid) {
    fs::write(first.path("holdfast.toml"), "authority.spread = \"off\"\n").expect("written");
}

fn put(store: &EtcdStore) -> Result<Swap, MetaError> {
    let end = Instant::now() + PATIENCE;
    let version = loop {
        match store.swap("of-a-test", MetaVersion::ABSENT, Some(b"x"), None) {
            // Where it elects, or the machine has much else to do, it is silent for longer than a call waits.
            Err(MetaError::Unknown { .. }) if Instant::now() < end => {}
            Ok(Swap::Done(version)) => break version,
            // It was done, and nobody was told.
            Ok(Swap::Conflict(Some(found))) if found.value == b"x" => break found.version,
            other => return other,
        }
    };
    until("it is deleted again", || store.swap("of-a-test", version, None, None).is_ok());
    Ok(Swap::Done(version))
}

/// Nobody but machines of the grid gets in.
fn refuse_strangers(a: &Grid, cluster: &Cluster) {
    a.ok("grid tls client vm7");
    let of_client = |file: &str| a.path("tls/clients/vm7").join(file);
    let stranger = cluster.store(a, &[1], &of_client("client-cert.pem"), &of_client("client-key.pem"));
    assert!(matches!(stranger.get("grid"), Err(MetaError::Unknown { .. })), "a client of volumes");
    let of_member = |file: &str| cluster.files(2).join(file);
    let member = cluster.store(a, &[1], &of_member("member.pem"), &of_member("member.key"));
    assert_eq!(member.get("grid"), Err(MetaError::Refused), "a member is no user");
    assert_eq!(put(&member), Err(MetaError::Refused));
}

/// Host b is revoked: it is told so, by connections that it had, too, and a goes on.
fn revoke(a: &Grid, b: &Grid, cluster: &Cluster) {
    let b_store = || cluster.store(b, &[1, 2, 3], &b.path("tls/etcd.pem"), &b.path("tls/etcd.key"));
    let had = b_store();
    assert!(matches!(put(&had), Ok(Swap::Done(_))), "as long as it is of the grid");
    a.ok("grid tls revoke host/b");
    assert_eq!(put(&had), Err(MetaError::Refused), "by a connection that is there");
    assert_eq!(put(&b_store()), Err(MetaError::Refused), "by a new one");
    until("b is told", || trouble(b).contains("it was revoked"));
    let refused = b.fails("volume create v9 --size 32MiB --layout mirror:2 --no-export");
    assert!(refused.contains("refuses this") && refused.contains("grid token --for"), "{refused}");
    let refused = b.fails("volume create v9 --size 32MiB --layout mirror:2 --no-export --json");
    assert!(refused.contains("\"code\":\"not-permitted\""), "{refused}");
    a.ok("volume create v2 --size 32MiB --layout mirror:2 --no-export");
    // What it is advised to do lets it in again, and not by what was revoked.
    for end in ["pem", "key"] {
        fs::copy(b.path(&format!("tls/etcd.{end}")), b.path(&format!("revoked.{end}"))).expect("copied");
    }
    let token = a.ok("grid token --for b");
    b.ok(&format!("grid tls rotate --token {}", token.trim()));
    until("b is let in again, by what its host shows now", || trouble(b).is_empty());
    let log = fs::read_to_string(b.path("logs/host.log")).expect("a log");
    assert!(log.contains("there is a new certificate for etcd: it counts"), "{log}");
    until("so do nodes", || b.run("volume create v9 --size 32MiB --layout mirror:2 --no-export").status.success());
    assert_eq!(put(&had), Err(MetaError::Refused));
}

/// All of etcd is emptied: it lets in whom it let in before, when one machine has the metadata back. Where a member was
/// replaced before, none has a configuration that would begin anew with the others.
fn lose_all(a: &Grid, b: &Grid, cluster: &Cluster, members: &mut Vec<Member>, numbers: [u8; 3], is_configured: bool) {
    let stranger = cluster.store(b, &[1], &b.path("revoked.pem"), &b.path("revoked.key"));
    assert_eq!(put(&stranger), Err(MetaError::Refused));
    // Of this moment: copies on devices may be older than the volumes.
    let file = a.path("meta.json").display().to_string();
    a.ok(&format!("meta export {file}"));
    for grid in [a, b] {
        grid.ok("grid down --host --force");
    }
    if !is_configured {
        let refused = a.fails(&cluster.make(&numbers, "--new-cluster"));
        assert!(refused.contains("not all of it is lost"), "{refused}");
    }
    members.clear();
    fs::remove_dir_all(cluster.dir.path().join("data")).expect("removed");
    if !is_configured {
        let told = a.ok(&cluster.make(&numbers, "--new-cluster"));
        assert!(told.contains("ETCD_INITIAL_CLUSTER_STATE=new") && told.contains("meta recover"), "{told}");
    }
    members.extend(numbers.map(|n| cluster.start(n)));
    members.iter().for_each(Member::wait);
    until("the metadata are back", || a.run(&format!("meta recover --from {file} --yes")).status.success());
    for grid in [a, b] {
        grid.ok("grid up");
    }
    assert_eq!(put(&stranger), Err(MetaError::Refused), "what was revoked stays so");
    b.ok(&format!("volume create v8-{} --size 32MiB --layout mirror:2 --no-export", numbers[2]));
}

/// Member 2 has died, and member 4 takes its place.
fn replace(a: &Grid, b: &Grid, cluster: &Cluster, members: &mut Vec<Member>) {
    let refused = a.fails(&cluster.make(&[4], "--replace m2"));
    assert!(refused.contains("is not dead"), "{refused}");
    drop(members.remove(1));
    // It may have been the leader.
    until("the others have a leader", || a.run("volume protect v1 off").status.success());
    let refused = a.fails(&cluster.make(&[4], "--replace m9"));
    assert!(refused.contains("has no member m9; its members are m1, m2, m3"), "{refused}");
    let told = a.ok(&cluster.make(&[4], "--replace m2"));
    assert!(
        told.contains("member m2 is not a member") && told.contains("ETCD_INITIAL_CLUSTER_STATE=existing"),
        "{told}"
    );
    // As if it had been cut short there.
    a.ok(&cluster.make(&[4], "--replace m2"));
    members.push(cluster.start(4));
    members.last().expect("started").wait();
    // Whoever has the dead member's files can't have it speak to the others.
    let dead = cluster.start(2);
    until("the dead member is refused", || cluster.log(4).contains("revoked") || cluster.log(3).contains("revoked"));
    drop(dead);
    let urls = cluster.urls(&[1, 3, 4]);
    for grid in [a, b] {
        grid.ok(&format!("grid etcd use {urls}"));
        grid.ok("grid down --host --force");
        grid.ok("grid up");
        assert_eq!(grid.json("status")["metadata"]["store"], format!("etcd at {}", urls.replace(',', ", ")));
    }
    let again = a.ok(&cluster.make(&[4], ""));
    assert!(again.contains("member m4 has another certificate"), "{again}");
}

/// The cluster does without another member.
fn lose_another(a: &Grid, members: &mut Vec<Member>) {
    drop(members.remove(0));
    until("two members are a majority", || {
        a.run("volume create v3 --size 32MiB --layout mirror:2 --no-export").status.success()
    });
}

#[test]
fn etcd_lets_in_machines_of_the_grid_and_a_revoked_one_changes_nothing() {
    let (cluster, a, b) = (Cluster::new(9), Grid::new(1), Grid::new(2));
    keeps_authority(&a);
    let urls = cluster.urls(&[1, 2, 3]);
    let refused = a.fails(&up_line(&a, "a", &urls, ""));
    assert!(refused.contains("grid etcd member"), "{refused}");
    let told = a.ok(&cluster.make(&[1, 2, 3], ""));
    assert!(told.contains("ETCD_PEER_CERT_ALLOWED_CN=") && told.contains(&format!("--etcd {urls}")), "{told}");
    let mut members: Vec<Member> = [1, 2, 3].into_iter().map(|n| cluster.start(n)).collect();
    members.iter().for_each(Member::wait);
    until("etcd has a leader", || a.run(&up_line(&a, "a", &urls, "")).status.success());
    let refused =
        b.fails(&up_line(&b, "b", &urls, &format!("--join {}", a.json("status")["grid"].as_str().expect("an id"))));
    assert!(refused.contains("grid token"), "{refused}");
    let token = b.path("token");
    fs::write(&token, a.ok("grid token")).expect("written");
    b.ok(&up_line(&b, "b", &urls, &format!("--join-file {}", token.display())));
    a.ok("volume create v1 --size 64MiB --layout mirror:2");
    let (data, scratch) = (a.path("data"), a.path("scratch"));
    pattern(&data, 4 << 20);
    nbdcopy(data.to_str().expect("text"), &a.uri("v1"));
    b.ok("volume export v1 --takeover");
    assert_volume_holds(&b.uri("v1"), &data, &scratch);
    a.ok("volume export v1 --takeover");
    refuse_strangers(&a, &cluster);
    revoke(&a, &b, &cluster);
    lose_all(&a, &b, &cluster, &mut members, [1, 2, 3], true);
    replace(&a, &b, &cluster, &mut members);
    lose_all(&a, &b, &cluster, &mut members, [1, 3, 4], false);
    lose_another(&a, &mut members);
    a.ok("volume export v1 --takeover");
    assert_volume_holds(&a.uri("v1"), &data, &scratch);
    // A machine that was taken out is told that, and no more.
    b.ok("grid down --force");
    // Where etcd elects just then its host can't say that it goes, and its lease runs out.
    until("host b is gone", || a.run("machine remove b --dead --accept-loss").status.success());
    let refused = b.fails("grid up");
    assert!(refused.contains("was taken out of grid"), "{refused}");
}

#[test]
fn a_grid_moves_to_an_etcd_that_goes_by_its_certificates() {
    let (store, cluster) = (tempfile::tempdir().expect("a directory"), Cluster::new(10));
    let plain = etcd(store.path(), 11);
    let (a, b) = (Grid::new(3), Grid::new(4));
    let (from, to) = (plain.config().endpoint(), cluster.urls(&[1]));
    keeps_authority(&a);
    a.ok(&up_line(&a, "a", &from, ""));
    b.ok(&up_line(&b, "b", &from, &format!("--join {}", a.ok("grid token").trim())));
    a.ok("volume create v1 --size 32MiB --layout mirror:2");
    let refused = a.fails(&format!("grid up --etcd {to}"));
    assert!(refused.contains("grid etcd use"), "{refused}");
    let refused = b.fails(&cluster.make(&[1], ""));
    assert!(refused.contains("no key of the grid's authority"), "{refused}");
    a.ok(&cluster.make(&[1], ""));
    let member = cluster.start(1);
    member.wait();
    for grid in [&a, &b] {
        grid.ok("grid down --host --force");
    }
    let file = a.path("meta.json").display().to_string();
    a.ok(&format!("meta export {file}"));
    a.ok(&format!("meta import {file} --etcd {to}"));
    drop(plain);
    a.ok("grid up");
    let refused = b.fails(&format!("grid etcd use {to}"));
    assert!(refused.contains("grid token") && refused.contains("--for b"), "{refused}");
    b.ok(&format!("grid etcd use {to} --token {}", a.ok("grid token --for b").trim()));
    b.ok("grid up");
    let machines = |grid: &Grid| grid.json("machine list").as_array().map(Vec::len);
    assert_eq!([machines(&a), machines(&b)], [Some(2), Some(2)]);
    b.ok("volume export v1 --takeover");
    // For people's tools.
    let access = a.ok("grid etcd access");
    assert!(access.contains(&format!("export ETCDCTL_ENDPOINTS={to}")), "{access}");
    let root = |file: &str| a.path("tls/etcd-root").join(file);
    let root = cluster.store(&a, &[1], &root("root.pem"), &root("root.key"));
    assert!(root.get("grid").expect("root may").is_some());
    // Whoever tells an etcd that was emptied whom to let in may be cut short: a machine that is missing comes back.
    let users = || root.users().expect("root may").into_iter().map(|(user, _)| user);
    let is_of_b = |user: &String| matches!(user.parse(), Ok(User::Host { name, .. }) if name == "b");
    let gone: Vec<String> = users().filter(is_of_b).collect();
    assert!(!gone.is_empty());
    gone.iter().for_each(|user| root.delete_user(user).expect("root may"));
    until("machine b is let in again", || users().any(|user| is_of_b(&user)));
}
