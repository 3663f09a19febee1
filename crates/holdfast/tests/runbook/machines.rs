//! Machines, hosts, and etcd with its members: a grid of several machines, each a directory here, with TLS.

use crate::page::{Book, Machine, pid};
use crate::support::{assert_volume_holds, free_ports, is_whole, nbdcopy, needs, pattern, program, until};
use crate::time::{Clock, library};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

pub const ROWS: &[&str] = &[
    "A host is gone, its machine is not",
    "A host hangs",
    "A member of etcd is lost",
    "The majority is lost",
    "All of it is lost, emptied or set back",
    "A machine is dead",
    "It is back",
    "It leaves for good, in order",
    "It is replaced",
    "The first machine is lost",
    "A certificate ends",
    "The authority's certificate ends",
];

/// Does what is asked of systemctl here: starts etcd with its settings.
const SYSTEMCTL: &str = r#"#!/bin/sh
[ "$*" = "start etcd" ] || exit 1
set -a
. DESK/settings
setsid etcd </dev/null >>DESK/log 2>&1 &
echo $! >DESK/pid
"#;

/// The machine of a member of etcd.
struct Member {
    m: Machine,
    client: String,
    peer: String,
}

impl Member {
    /// Writes its settings, as of a new cluster of these.
    fn configure(&self, name: &str, cluster: &str) {
        let data = self.m.path("data");
        let settings = format!(
            "ETCD_NAME={name}\nETCD_DATA_DIR={}\nETCD_INITIAL_CLUSTER={cluster}\n\
             ETCD_INITIAL_ADVERTISE_PEER_URLS={peer}\n\
             ETCD_LISTEN_PEER_URLS={peer}\nETCD_ADVERTISE_CLIENT_URLS={client}\nETCD_LISTEN_CLIENT_URLS={client}\n",
            data.display(),
            peer = self.peer,
            client = self.client,
        );
        fs::write(self.m.path("settings"), settings).unwrap();
    }

    fn kill(&self) {
        if let Ok(pid) = fs::read_to_string(self.m.path("pid")) {
            let pid = pid.trim();
            let _ = Command::new("kill").args(["-9", pid]).output();
            until("it has ended", || !Path::new(&format!("/proc/{pid}/exe")).exists());
            fs::remove_file(self.m.path("pid")).unwrap();
        }
    }

    fn is_running(&self) -> bool {
        let pid = fs::read_to_string(self.m.path("pid")).unwrap_or_default();
        Path::new(&format!("/proc/{}/exe", pid.trim())).exists()
    }

    fn wipe(&self) {
        let _ = fs::remove_dir_all(self.m.path("data"));
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.kill();
    }
}

struct Etcd {
    members: Vec<Member>,
    urls: String,
    cluster: String,
}

impl Etcd {
    /// Three members.
    fn start() -> Etcd {
        ["etcd", "etcdctl"].iter().for_each(|program| drop(needs(program)));
        let port = free_ports(9, 6);
        let member = |n: u16| {
            let m = Machine::new(0);
            program(&m.path("systemctl"), &SYSTEMCTL.replace("DESK", m.desk.path().to_str().unwrap()));
            let url = |port: u16| format!("http://127.0.0.1:{port}");
            Member { m, client: url(port + 2 * n), peer: url(port + 2 * n + 1) }
        };
        let members: Vec<Member> = (0..3).map(member).collect();
        let listed =
            |of: &dyn Fn((usize, &Member)) -> String| members.iter().enumerate().map(of).collect::<Vec<_>>().join(",");
        let (urls, cluster) =
            (listed(&|(_, member)| member.client.clone()), listed(&|(n, member)| format!("m{n}={}", member.peer)));
        let etcd = Etcd { members, urls, cluster };
        etcd.begin();
        etcd
    }

    /// As a new cluster, or with what their directories hold.
    fn begin(&self) {
        for (n, member) in self.members.iter().enumerate() {
            member.configure(&format!("m{n}"), &self.cluster);
            member.m.ok("systemctl start etcd");
        }
        self.is_healthy();
    }

    fn end(&self) {
        self.members.iter().for_each(|member| {
            member.kill();
            member.wipe();
        });
    }

    fn is_healthy(&self) {
        let m = &self.members[0].m;
        until("all members are healthy", || {
            // One whose port the one before held for a moment longer has ended at once.
            self.members.iter().filter(|member| !member.is_running()).for_each(|member| {
                member.m.ok("systemctl start etcd");
            });
            m.gives(&self.ctl("endpoint health")).status.success()
        });
    }

    fn ctl(&self, what: &str) -> String {
        format!("etcdctl --endpoints {} {what}", self.urls)
    }

    /// All members get what they held when the snapshot was taken.
    fn set_back(&self, snapshot: &Path) {
        self.end();
        for (n, member) in self.members.iter().enumerate() {
            member.m.ok(&format!(
                "etcdctl snapshot restore {} --name m{n} --data-dir {} --initial-cluster {} \
                 --initial-advertise-peer-urls {}",
                snapshot.display(),
                member.m.path("data").display(),
                self.cluster,
                member.peer
            ));
        }
        self.begin();
    }
}

/// Makes the first machine of a grid.
fn first(index: u16, etcd: &Etcd) -> Machine {
    let a = Machine::new(index);
    fs::write(a.grid.path("holdfast.toml"), "authority.spread = \"off\"\n").unwrap();
    a.grid.up(&format!("--nodes 1 --devices 1 --etcd {} --address 127.0.0.1 --name a", etcd.urls));
    a
}

fn join(index: u16, at: &Machine, etcd: &Etcd, name: &str) -> Machine {
    let (m, token) = (Machine::new(index), at.ok("holdfast grid token"));
    let options = format!("--address 127.0.0.1 --name {name} --join {}", token.trim());
    m.grid.up(&format!("--nodes 1 --devices 1 --etcd {} {options}", etcd.urls));
    m
}

/// What becomes of a machine whose power is gone.
fn power_off(m: &Machine) {
    m.grid.kill_everything().unwrap();
}

/// The data that every volume here has.
struct Data {
    path: PathBuf,
    dir: tempfile::TempDir,
}

impl Data {
    fn new() -> Data {
        let dir = tempfile::Builder::new().prefix("hf").tempdir().unwrap();
        let path = dir.path().join("data");
        pattern(&path, 4 << 20);
        Data { path, dir }
    }

    fn put(&self, m: &Machine, volume: &str) {
        m.ok(&format!("holdfast volume create {volume} --size 16MiB --layout mirror:2"));
        nbdcopy(self.path.to_str().unwrap(), &m.grid.uri(volume));
    }

    /// What the machine serves is what was written, and nothing is missing.
    fn is_there(&self, m: &Machine, volume: &str) {
        self.is_served(m, volume);
        until("it is whole", || is_whole(&m.grid, volume));
    }

    fn is_served(&self, m: &Machine, volume: &str) {
        until("it is served here", || m.grid.json(&format!("volume show {volume}"))["state"] == "open");
        self.is_at(&m.grid.uri(volume));
    }

    fn is_at(&self, uri: &str) {
        assert_volume_holds(uri, &self.path, &self.dir.path().join("scratch"));
    }
}

/// A host that has ended, and one that hangs.
fn hosts(book: &mut Book, b: &Machine, data: &Data) {
    let logs = b.grid.dir.path().to_str().unwrap();
    let mut row = book.open("A host is gone, its machine is not");
    b.ok(&format!("kill -9 {}", pid(&b.grid, "host")));
    row.seen(b, &[]);
    row.checked(b, &[("DIR", logs)]);
    row.done(b, &[]);
    b.is_well();
    data.is_there(b, "vb");
    drop(row);

    let mut row = book.open("A host hangs");
    let hang = || b.ok(&format!("kill -STOP {}", pid(&b.grid, "host")));
    hang();
    row.seen(b, &[]);
    row.checked(b, &[]);
    row.done(b, &[("PID", &pid(&b.grid, "host"))]);
    b.is_well();
    data.is_there(b, "vb");
    hang();
    row.done(b, &[]);
    row.done(b, &[]);
    b.is_well();
    data.is_there(b, "vb");
}

/// One member of etcd, and two.
fn members(book: &mut Book, a: &Machine, etcd: &Etcd, data: &Data) {
    let lost = &etcd.members[2];
    let mut row = book.open("A member of etcd is lost");
    lost.kill();
    row.seen(a, &[("URLS", &etcd.urls)]);
    row.checked(a, &[("URLS", &etcd.urls)]);
    row.done(&lost.m, &[]);
    etcd.is_healthy();
    lost.kill();
    let list = a.ok(&etcd.ctl("member list"));
    let id = list.lines().find(|line| line.contains(", m2,")).unwrap().split(',').next().unwrap().to_string();
    row.done(a, &[("URLS", &etcd.urls), ("ID", &id)]);
    let said = row.done(a, &[("URLS", &etcd.urls), ("MEMBER", "m2"), ("PEER_URL", &lost.peer)]);
    let lines: String = said.lines().filter(|line| line.starts_with("ETCD_")).map(|line| format!("{line}\n")).collect();
    assert!(lines.contains("ETCD_INITIAL_CLUSTER_STATE"), "{said}");
    row.done(&lost.m, &[("DATA_DIR", lost.m.path("data").to_str().unwrap())]);
    let settings = fs::read_to_string(lost.m.path("settings")).unwrap();
    fs::write(lost.m.path("settings"), settings + &lines).unwrap();
    row.done(&lost.m, &[]);
    etcd.is_healthy();
    a.is_well();
    drop(row);

    let mut row = book.open("The majority is lost");
    let (lost, uri) = (&etcd.members[1..], a.grid.uri("va"));
    lost.iter().for_each(Member::kill);
    row.seen(a, &[]);
    row.checked(a, &[("URLS", &etcd.urls)]);
    data.is_at(&uri);
    row.done_at_each(&[&lost[0].m, &lost[1].m], &[]);
    a.is_well();
    data.is_there(a, "va");
}

/// What is lost of a grid with these machines.
fn all_of_etcd(book: &mut Book, machines: &[&Machine], etcd: &Etcd, data: &Data) {
    let a = machines[0];
    let copies = || -> usize {
        let log = |m: &&Machine| fs::read_to_string(m.grid.path("logs/host.log")).unwrap_or_default();
        let all = format!("a copy of the metadata is on all {} devices", machines.len());
        machines.iter().map(|m| log(m).matches(&all).count()).sum()
    };
    let snapshot = a.path("snapshot");
    a.ok(&format!("etcdctl --endpoints {} snapshot save {}", etcd.members[0].client, snapshot.display()));
    data.put(a, "late");
    // A host that begins tells of the first copy.
    let before = copies();
    for m in machines {
        m.ok("holdfast grid down --host");
        m.ok("holdfast grid up");
    }
    until("the records are on all devices", || copies() > before);
    let uri = a.grid.uri("va");
    let mut row = book.open("All of it is lost, emptied or set back");
    etcd.end();
    etcd.begin();
    row.seen(a, &[]);
    etcd.set_back(&snapshot);
    row.seen(a, &[]);
    row.checked(a, &[]);
    data.is_at(&uri);
    row.done_at_each(machines, &[]);
    row.done(a, &[]);
    row.done(a, &[]);
    row.done_at_each(machines, &[]);
    machines.iter().for_each(|m| m.is_well());
    for volume in ["va", "late"] {
        data.is_there(a, volume);
    }
}

/// New certificates, where the authority's key is and where it is not.
fn certificates(book: &mut Book, a: &Machine, b: &Machine, data: &Data) {
    let library = library();
    let mut row = book.open("A certificate ends");
    let clock = Clock::of(b, &library);
    clock.set("+710d");
    row.seen(b, &[]);
    row.checked(b, &[]);
    clock.set("+0");
    let certificate = |m: &Machine| fs::read(m.grid.path("tls/host.pem")).unwrap();
    let before = [certificate(a), certificate(b)];
    let token = b.path("token");
    let file = token.to_str().unwrap();
    row.done(a, &[]);
    row.done(a, &[("NAME", "b"), ("FILE", file)]);
    row.done(b, &[("FILE", file)]);
    assert!(certificate(a) != before[0] && certificate(b) != before[1]);
    for (m, node) in [(a, 1), (b, 2)] {
        let log = |name: &str| fs::read_to_string(m.grid.path("logs").join(name)).unwrap_or_default();
        let is_used = |name: &str| log(name).contains("it counts from the next connection on");
        until("they are used", || is_used("host.log") && is_used(&format!("node{node}.log")));
    }
    let mut row = book.open("The authority's certificate ends");
    clock.set("+7250d");
    row.seen(b, &[]);
    clock.set("+0");
    row.checked(b, &[]);
    let authority = |m: &Machine| fs::read(m.grid.path("tls/ca.pem")).unwrap();
    let before = authority(a);
    row.done(a, &[]);
    assert_ne!(authority(a), before);
    until("the other machine has it", || authority(b) == authority(a));
    for (m, volume) in [(a, "va"), (b, "vb")] {
        m.is_well();
        data.is_there(m, volume);
    }
    fs::remove_file(b.path("holdfast")).unwrap();
}

/// Machine c of three dies and comes back, and dies and is given up; gives a newcomer of its name.
fn dead_and_back(book: &mut Book, [a, b, c]: [&Machine; 3], etcd: &Etcd, data: &Data) -> Machine {
    let mut dead = book.open("A machine is dead");
    power_off(c);
    dead.seen(a, &[]);
    dead.seen(a, &[]);
    dead.checked(b, &[]);
    dead.done(a, &[("VOLUME", "vc")]);
    data.is_served(a, "vc");
    let mut back = book.open("It is back");
    back.seen(c, &[]);
    back.checked(a, &[]);
    back.done(c, &[]);
    back.done(c, &[]);
    [a, b, c].iter().for_each(|m| m.is_well());
    data.is_there(a, "vc");

    power_off(c);
    a.sees("holdfast machine list", "machine c is gone");
    dead.done(a, &[("NAME", "c")]);
    [a, b].iter().for_each(|m| m.is_well());
    data.is_there(a, "vc");
    back.seen(c, &[]);
    back.done(c, &[]);
    let dir = c.grid.dir.path().to_str().unwrap();
    back.done(c, &[("DIR", dir)]);
    fs::remove_dir_all(format!("{dir}.old")).unwrap();
    join(6, a, etcd, "c")
}

/// Machine c goes in good order, its next namesake dies, and another takes the name; gives that one.
fn left_and_replaced(book: &mut Book, [a, b, c]: [&Machine; 3], etcd: &Etcd, data: &Data) -> Machine {
    let mut row = book.open("It leaves for good, in order");
    until("it can serve", || a.gives("holdfast volume handover vc --to c").status.success());
    row.seen(a, &[]);
    row.checked(a, &[]);
    row.done(a, &[("VOLUME", "vc"), ("HOST", "a")]);
    row.done(a, &[("NAME", "c")]);
    row.done(c, &[]);
    [a, b].iter().for_each(|m| m.is_well());
    data.is_there(a, "vc");
    drop(row);

    let (next, new) = (join(7, a, etcd, "c"), Machine::new(8));
    until("its node is used", || a.grid.json("node list").as_array().unwrap().iter().all(|node| node["state"] == "up"));
    let mut row = book.open("It is replaced");
    power_off(&next);
    row.seen(a, &[]);
    row.checked(a, &[]);
    let (token, disk) = (new.path("token"), new.disk("disk", 256 << 20));
    let file = token.to_str().unwrap();
    row.done(a, &[("NAME", "c")]);
    row.done(a, &[("FILE", file)]);
    let to = [("URLS", &etcd.urls[..]), ("NAME", "c"), ("IP", "127.0.0.1"), ("PATH", &disk), ("FILE", file)];
    row.done(&new, &to);
    row.done(&new, &[("VOLUME", "vc")]);
    data.is_at(&new.grid.uri("vc"));
    [a, b, &new].iter().for_each(|m| m.is_well());
    data.is_there(a, "vc");
    drop(row);
    new
}

/// Machine a, which has made the grid, is lost.
fn first_lost(book: &mut Book, [a, b, c]: [&Machine; 3], data: &Data) {
    let mut row = book.open("The first machine is lost");
    row.seen(b, &[]);
    row.checked(b, &[]);
    row.done(a, &[("NAME", "b")]);
    b.is_well();
    power_off(a);
    b.sees("holdfast machine list", "machine a is gone");
    row.done(b, &[("VOLUME", "va")]);
    row.done(b, &[("NAME", "a")]);
    [b, c].iter().for_each(|m| m.is_well());
    data.is_there(b, "va");
    b.ok("holdfast grid token");
}

#[test]
fn rows_about_machines_and_etcd() {
    let etcd = Etcd::start();
    let mut book = Book::of(ROWS);
    let data = Data::new();
    let a = first(3, &etcd);
    let (b, c) = (join(4, &a, &etcd, "b"), join(5, &a, &etcd, "c"));
    for (m, volume) in [(&a, "va"), (&b, "vb"), (&c, "vc")] {
        until("all nodes are used", || m.grid.json("node list").as_array().is_some_and(|nodes| nodes.len() == 3));
        m.is_well();
        data.put(m, volume);
    }
    hosts(&mut book, &b, &data);
    members(&mut book, &a, &etcd, &data);
    certificates(&mut book, &a, &b, &data);
    let c = dead_and_back(&mut book, [&a, &b, &c], &etcd, &data);
    let c = left_and_replaced(&mut book, [&a, &b, &c], &etcd, &data);
    all_of_etcd(&mut book, &[&a, &b, &c], &etcd, &data);
    first_lost(&mut book, [&a, &b, &c], &data);
    book.end();
}
