//! Grids of several machines, each a directory here: ownership, and what becomes of it when a host dies.
//!
//! Needs the program `etcd`; `./x` sees to it.

mod support;

use holdfast_lab::process::{Signal, signal};
use holdfast_runtime::meta::member::Member;
use std::sync::mpsc::Receiver;
use std::time::Duration;
use support::{
    Grid, assert_volume_holds, etcd, etcd_cluster, is_whole, nbdcopy, needs, pattern, receivers, text, until,
};

fn state(grid: &Grid, volume: &str) -> String {
    grid.json(&format!("volume show {volume}"))["state"].as_str().expect("a state").to_string()
}

/// Writes another file to the volume, and reads it back.
fn write_anew(grid: &Grid, uri: &str, seed: u8) {
    let (data, scratch) = (grid.path("data"), grid.path("scratch"));
    std::fs::write(&data, vec![seed; 4 << 20]).expect("written");
    nbdcopy(data.to_str().expect("text"), uri);
    assert_volume_holds(uri, &data, &scratch);
}

#[test]
fn a_volume_is_one_hosts_and_another_takes_it_over() {
    let store = tempfile::tempdir().expect("a directory");
    let member = etcd(store.path(), 3);
    let endpoint = member.config().endpoint();
    let (a, b) = (Grid::new(27), Grid::new(28));
    a.up(&format!("--nodes 3 --devices 1 --etcd {endpoint} --name a"));
    let id = a.json("status")["grid"].as_str().expect("an id").to_string();
    a.ok("volume create v1 --size 64MiB");
    let (data, scratch) = (a.path("data"), a.path("scratch"));
    pattern(&data, 8 << 20);
    nbdcopy(data.to_str().expect("text"), &a.uri("v1"));
    let join = format!("--nodes 1 --devices 1 --etcd {endpoint} --join {id} --name");
    let refused = b.fails(&format!("grid up --port {} --device-size 256MiB {join} a", b.port));
    assert!(refused.contains("named a already"), "{refused}");
    b.up(&format!("{join} b"));
    // Its node has the next number, and all hosts use it.
    until("both hosts see node 4", || a.node_state(4) == "up" && b.node_state(4) == "up" && b.node_state(1) == "up");

    let seen = b.json("volume show v1");
    assert_eq!((&seen["state"], &seen["host"]), (&"elsewhere".into(), &"a".into()), "{seen}");
    let why = b.fails("volume export v1");
    assert!(why.contains("host a") && why.contains("--takeover"), "{why}");
    // What only host a can do it is asked to.
    b.ok("snapshot create v1 t");
    b.ok("volume resize v1 --size 96MiB");
    assert_eq!(a.json("volume show v1")["size_bytes"], 96 << 20);
    assert_eq!(b.json("snapshot list v1")[0]["name"], "t");
    let old_uri = a.uri("v1");
    b.ok("volume export v1 --takeover");
    assert_eq!(state(&b, "v1"), "open");
    until("host a has let go of it", || state(&a, "v1") == "elsewhere");
    assert_volume_holds(&b.uri("v1"), &data, &scratch);
    let output = std::process::Command::new(needs("nbdinfo")).arg(&old_uri).output().expect("nbdinfo runs");
    assert!(!output.status.success(), "the old owner serves it no more");
    b.ok("snapshot create v1 s");
    b.json("volume create v2 --size 32MiB --layout mirror:2");
    b.json("volume create v3 --size 32MiB --layout mirror:2");
    b.ok("volume export v3 --failover auto");
    assert!([&a, &b].iter().all(|host| host.json("volume show v3")["failover"] == true));
    nbdcopy(data.to_str().expect("text"), &b.uri("v3"));
    assert!(a.fails("volume export v1").contains("host b, which is up"));

    // A host that dies keeps its volumes for as long as its lease.
    b.kill_host().expect("it runs");
    until("the lease of host b has run out", || a.run("volume export v1").status.success());
    assert_eq!(state(&a, "v1"), "open");
    until("the nodes hear no more of host b", || state(&a, "v3") == "open");
    assert_eq!(state(&a, "v2"), "elsewhere", "it waits for its host");
    assert_volume_holds(&a.uri("v3"), &data, &scratch);
    assert_eq!(a.json("snapshot list v1").as_array().map(Vec::len), Some(2));
    assert_volume_holds(&a.uri("v1"), &data, &scratch);
    b.ok("grid up");
    assert_eq!((state(&b, "v1"), state(&b, "v2")), ("elsewhere".to_string(), "open".to_string()));
    assert_eq!((state(&a, "v2"), state(&b, "v3")), ("elsewhere".to_string(), "elsewhere".to_string()));
    // One that goes in good order lets go of its name at once; its volumes stay its own. Nobody is told of what was
    // announced.
    assert!(a.fails("machine announce c --for 1h").contains("has no machine c"));
    a.ok("machine announce b --for 1h");
    b.ok("grid down");
    let heard = || text(&a.run("status").stdout);
    until("what is not well was announced", || heard().starts_with("all is well, beside what was announced"));
    assert!(a.run("status").status.success());
    let orphaned = "CRITICAL (service), announced: volume v2 is served by nobody";
    assert!(heard().contains(orphaned) && heard().contains("announced: host b is gone"), "{}", heard());
    assert!(b.fails("machine announce b").contains("--for"));
    a.ok("machine announce b --over");
    assert_eq!(a.run("status").status.code(), Some(2));
    a.ok("volume export v2");
    assert_eq!(state(&a, "v2"), "open");
}

#[test]
fn a_host_whose_lease_ran_out_goes_on() {
    let store = tempfile::tempdir().expect("a directory");
    let member = etcd(store.path(), 4);
    let endpoint = member.config().endpoint();
    let a = Grid::new(29);
    a.up(&format!("--nodes 2 --devices 1 --etcd {endpoint} --name a"));
    a.ok("volume create v1 --size 64MiB --layout mirror:2");
    // Longer than its lease.
    member.hang().expect("a signal");
    std::thread::sleep(Duration::from_secs(7));
    let data = a.path("data");
    pattern(&data, 4 << 20);
    let status = a.json("status");
    let uri = status["volumes"][0]["uris"][0].as_str().expect("an address");
    nbdcopy(data.to_str().expect("text"), uri);
    member.resume().expect("a signal");
    until("the store answers again", || !a.json("status")["metadata"]["trouble"].is_string());
    a.ok("volume create v2 --size 32MiB --layout mirror:2");
    assert_eq!(state(&a, "v1"), "open");
    assert_volume_holds(uri, &data, &a.path("scratch"));
}

/// Two machines, each with a node of two devices, a host and a member of etcd; the third member is a witness. Each of the
/// three is lost and comes back, in turn.
#[test]
fn two_machines_and_a_witness() {
    let store = tempfile::tempdir().expect("a directory");
    let mut members = etcd_cluster(store.path(), 5, 3);
    let endpoints: Vec<String> = members.iter().map(|m| m.config().endpoint()).collect();
    let etcd = endpoints.join(",");
    let (a, b) = (Grid::new(30), Grid::new(31));
    until("etcd has a leader", || {
        a.run(&format!("grid up --port {} --device-size 256MiB --nodes 1 --devices 2 --etcd {etcd} --name a", a.port))
            .status
            .success()
    });
    let id = a.json("status")["grid"].as_str().expect("an id").to_string();
    b.up(&format!("--nodes 1 --devices 2 --etcd {etcd} --join {id} --name b"));
    until("host a uses both nodes", || a.node_state(2) == "up");
    a.ok("volume create v1 --size 64MiB --layout mirror:2");
    let uri = a.uri("v1");
    write_anew(&a, &uri, 1);

    // The witness: nobody needs it while both nodes are there.
    let witness = members.remove(2).kill();
    write_anew(&a, &uri, 2);
    members.push(Member::start(witness).expect("etcd starts"));
    members[2].wait().expect("etcd serves");

    // Machine b, with its vote.
    let lost = members.remove(1).kill();
    b.kill_host().expect("it runs");
    b.ok("node kill 2");
    write_anew(&a, &uri, 3);
    members.insert(1, Member::start(lost).expect("etcd starts"));
    members[1].wait().expect("etcd serves");
    b.ok("grid up");
    until("what b missed is made good", || a.node_state(2) == "up" && is_whole(&a, "v1"));

    // Machine a, with its vote, and the owner of the volume.
    let lost = members.remove(0).kill();
    a.kill_host().expect("it runs");
    a.ok("node kill 1");
    until("b has taken the volume over", || b.run("volume export v1").status.success());
    until("it is open", || state(&b, "v1") == "open");
    assert_volume_holds(&b.uri("v1"), &a.path("data"), &b.path("scratch"));
    write_anew(&b, &b.uri("v1"), 4);
    members.insert(0, Member::start(lost).expect("etcd starts"));
    members[0].wait().expect("etcd serves");
    a.ok("grid up");
    assert_eq!(state(&a, "v1"), "elsewhere");
    until("what a missed is made good", || b.node_state(1) == "up" && is_whole(&b, "v1"));
}

/// A volume's number of what is shown of it in service.
fn live(grid: &Grid, volume: &str, what: &str) -> u64 {
    grid.json(&format!("volume show {volume}"))["live"][what].as_u64().unwrap_or(0)
}

#[test]
fn a_node_is_stopped_only_while_volumes_at_other_hosts_can_do_without_it() {
    let store = tempfile::tempdir().expect("a directory");
    let member = etcd(store.path(), 48);
    let endpoint = member.config().endpoint();
    let (a, b) = (Grid::new(48), Grid::new(49));
    a.up(&format!("--nodes 3 --devices 1 --etcd {endpoint} --name a"));
    let id = a.json("status")["grid"].as_str().expect("an id").to_string();
    b.up(&format!("--nodes 1 --devices 1 --etcd {endpoint} --join {id} --name b"));
    until("both use all nodes", || a.node_state(4) == "up" && (1..=4).all(|node| b.node_state(node) == "up"));
    b.ok("volume create v --size 64MiB --layout mirror:2");
    let data = b.path("data");
    pattern(&data, 48 << 20);
    nbdcopy(data.to_str().expect("text"), &b.uri("v"));
    // Where a host is silent for longer than its lease, on a busy machine, nobody asks for what it has.
    let is_refused = |node: u32, why: &str| {
        let output = a.run(&format!("node stop {node}"));
        let refused = text(&output.stderr);
        if output.status.success() {
            a.ok(&format!("node start {node}"));
        }
        !output.status.success() && refused.contains(why) && !refused.contains("--force")
    };
    let stops = |node: u32| {
        let stopped = a.run(&format!("node stop {node}")).status.success();
        if stopped {
            a.ok(&format!("node start {node}"));
        }
        stopped
    };
    until("nothing speaks against it", || stops(2));
    until("the volume is whole again", || is_whole(&b, "v") && a.node_state(2) == "up" && b.node_state(2) == "up");
    // Out of reach for host b alone.
    b.ok("node cut 4");
    until("host b misses node 4", || live(&b, "v", "degraded_segments") > 0);
    a.wait_for_node(4, "up");
    until("it is refused for what b misses", || is_refused(2, "at host b, volume v has"));
    assert!(a.fails("grid down").contains("is not stopped"), "by another name it is the same");
    b.ok("node mend 4");
    until("nothing speaks against it", || stops(2));
    until("all is as it was", || (1..=4).all(|node| a.node_state(node) == "up"));
    // Nobody knows what a host that hangs has in service, until its lease has run out.
    let pid = b.pid("host").expect("it runs");
    until("it is refused for what b does not say", || {
        signal(pid, Signal::STOP).expect("stopped");
        let is_so = is_refused(1, "host b does not say");
        signal(pid, Signal::CONT).expect("goes on");
        is_so
    });
    until("nothing speaks against it", || stops(1));
}

fn join(machine: &Grid, first: &Grid, endpoint: &str, name: &str) {
    let token = first.ok("grid token").trim().to_string();
    machine.up(&format!("--nodes 1 --devices 1 --etcd {endpoint} --address 127.0.0.1 --name {name} --join {token}"));
}

/// Nodes that a machine knows to be in the grid, and that are up.
fn nodes_up(grid: &Grid) -> Vec<u64> {
    let nodes = grid.json("node list");
    let up = nodes.as_array().expect("nodes").iter().filter(|node| node["state"] == "up");
    up.filter_map(|node| node["id"].as_u64()).collect()
}

/// Has another machine sign as well.
fn share_authority(from: &Grid, to: &Grid) {
    assert!(to.fails("grid token").contains("no key of the grid's authority"));
    let (file, changed) = (from.path("authority"), from.path("changed"));
    from.ok(&format!("grid tls authority export {}", file.display()));
    let text = std::fs::read_to_string(&file).expect("it was written");
    let other = Grid::new(64);
    other.up("--nodes 1 --devices 1 --tls on");
    let refused = other.fails(&format!("grid tls authority import {}", file.display()));
    assert!(refused.contains("of another grid's authority"), "{refused}");
    let key = |text: &str| serde_json::from_str::<serde_json::Value>(text).expect("JSON")["key"].clone();
    other.ok(&format!("grid tls authority export {}", changed.display()));
    let others = key(&std::fs::read_to_string(&changed).expect("it was written"));
    let mut wrong: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    wrong["key"] = others;
    std::fs::write(&changed, wrong.to_string()).expect("written");
    let refused = to.fails(&format!("grid tls authority import {}", changed.display()));
    assert!(refused.contains("not that of this grid's authority"), "{refused}");
    to.ok(&format!("grid tls authority import {}", file.display()));
    to.ok("grid token");
}

fn machine(grid: &Grid, name: &str) -> Option<serde_json::Value> {
    grid.json("machine list").as_array().expect("machines").iter().find(|machine| machine["name"] == name).cloned()
}

#[test]
fn a_dead_machine_is_removed_at_any_other_and_a_newcomer_has_its_name() {
    let store = tempfile::tempdir().expect("a directory");
    let member = etcd(store.path(), 64);
    let endpoint = member.config().endpoint();
    let (a, b, c, d) = (Grid::new(60), Grid::new(61), Grid::new(62), Grid::new(63));
    std::fs::write(a.path("holdfast.toml"), "authority.spread = \"off\"\n").expect("written");
    a.up(&format!("--nodes 1 --devices 1 --etcd {endpoint} --address 127.0.0.1 --name a"));
    join(&b, &a, &endpoint, "b");
    join(&c, &a, &endpoint, "c");
    until("all use all nodes", || [&a, &b, &c].iter().all(|machine| nodes_up(machine) == [1, 2, 3]));
    a.ok("volume create v1 --size 64MiB --layout mirror:2");
    c.ok("volume create v2 --size 64MiB --layout mirror:2");
    let data = a.path("data");
    pattern(&data, 8 << 20);
    let holds = |machine: &Grid, volume: &str| {
        assert_volume_holds(&machine.uri(volume), &data, &machine.path("scratch"));
    };
    nbdcopy(data.to_str().expect("text"), &a.uri("v1"));
    nbdcopy(data.to_str().expect("text"), &c.uri("v2"));
    // The whole grid is seen at machine b, and what is done elsewhere is said to be.
    let devices = b.ok("device list");
    assert!(["1/0", "2/0", "3/0"].iter().all(|device| devices.contains(device)), "{devices}");
    let space = b.json("space");
    let of_all =
        space["used"]["data"].as_array().expect("volumes").iter().map(|row| row[0].clone()).collect::<Vec<_>>();
    assert_eq!(
        (of_all, &space["raw_bytes"]),
        (vec!["v1".into(), "v2".into()], &(3 * (256_u64 << 20)).into()),
        "{space}"
    );
    assert!(b.fails("node stop 3").contains("node 3 is on machine c"));
    assert!(b.fails("node stop 9").contains("its nodes are 1, 2, 3"));
    assert!(b.fails("machine remove c --dead").contains("is not dead"));
    assert!(b.fails("machine remove a").contains("key of the grid's authority"));
    share_authority(&a, &b);

    c.kill_host().expect("it runs");
    c.ok("node kill 3");
    until("machine c is gone", || machine(&b, "c").is_some_and(|c| c["up"] == false && c["since_s"].is_u64()));
    let list = b.ok("volume list");
    assert!(list.contains("volume v2 is served by nobody: its host, c, is gone"), "{list}");
    let status = b.ok("status");
    assert!(
        status.contains("`holdfast volume export v2`") && status.contains("`holdfast machine remove c --dead`"),
        "{status}"
    );
    let said = b.ok("machine remove c --dead");
    assert!(said.contains("nobody has v2 in service any more"), "{said}");
    assert_eq!(machine(&a, "c"), None);
    b.ok("volume export v2");
    until("what was there is made again", || is_whole(&a, "v1") && is_whole(&b, "v2"));
    until("the nodes that are left are up", || [&a, &b].iter().all(|machine| nodes_up(machine) == [1, 2]));
    holds(&a, "v1");
    holds(&b, "v2");
    let log = |machine: &Grid| std::fs::read_to_string(machine.path("logs/host.log")).unwrap_or_default();
    until("it is found to be made again", || {
        [&a, &b].iter().any(|machine| log(machine).contains("all that machine c held is made again"))
    });

    join(&d, &a, &endpoint, "c");
    until("all use the newcomer's node", || [&a, &b, &d].iter().all(|machine| nodes_up(machine) == [1, 2, 4]));
    for refused in ["grid up", "node start 3"] {
        let why = c.fails(refused);
        assert!(why.contains("was taken out of grid") && why.contains("--join"), "{refused}: {why}");
    }
    assert!(c.ok("status").contains("was taken out of grid"));
    until("the one that came back is not used, and the others are", || nodes_up(&a) == [1, 2, 4]);
    a.ok("node restart --rolling --patience 60");

    empty_and_remove(&a, &b, &d);
    holds(&a, "v1");
    holds(&b, "v2");
}

/// Takes machine c out, a newcomer of three, that is there: it is emptied first, its last node as well.
fn empty_and_remove(a: &Grid, b: &Grid, c: &Grid) {
    a.ok("volume set v1 --layout mirror:3");
    let refused = b.fails("machine remove c");
    assert!(refused.contains("needs 3 nodes") && !refused.contains("--force"), "{refused}");
    a.ok("volume set v1 --layout mirror:2");
    let said = b.ok("machine remove c");
    assert!(said.contains("are being emptied"), "{said}");
    until("its host has ended", || c.json("status")["host"]["state"] == "removed");
    until("the nodes that are left are up", || [a, b].iter().all(|machine| nodes_up(machine) == [1, 2]));
    until("nothing is missing", || is_whole(a, "v1") && is_whole(b, "v2"));
}

/// What a webhook and a mail server of all hosts heard.
struct Heard {
    from: Receiver<String>,
    /// By the webhook: which host told, what became of it, and its name.
    told: Vec<[String; 3]>,
    mails: Vec<String>,
}

impl Heard {
    /// Listens until somebody tells that; gives who.
    fn until(&mut self, became: &str, about: &str) -> String {
        loop {
            let message = self.from.recv_timeout(Duration::from_secs(300));
            let message = message.unwrap_or_else(|_| panic!("nobody tells {about} {became}: {:?}", self.told));
            let Ok(json) = serde_json::from_str::<serde_json::Value>(&message) else {
                self.mails.push(message);
                continue;
            };
            let told = ["host", "became", "about"].map(|field| json[field].as_str().expect("text").to_string());
            self.told.push(told.clone());
            if told[1] == became && told[2] == about {
                return told[0].clone();
            }
        }
    }

    fn count(&self, became: &str, about: &str) -> usize {
        self.told.iter().filter(|told| told[1] == became && told[2] == about).count()
    }
}

/// Three machines of which one tells people. The host that does dies after it has told, and the next one before.
#[test]
fn alerts_are_not_lost_when_the_host_that_tells_them_dies() {
    let store = tempfile::tempdir().expect("a directory");
    let member = etcd(store.path(), 80);
    let endpoint = member.config().endpoint();
    let (hook, mail, from) = receivers();
    let mut heard = Heard { from, told: Vec::new(), mails: Vec::new() };
    let grids = [("a", Grid::new(144)), ("b", Grid::new(145)), ("c", Grid::new(146))];
    let mut join = String::new();
    for (name, grid) in &grids {
        let file = format!(
            "[alerts]\nwebhook = \"http://127.0.0.1:{hook}/\"\nsmtp = \"smtp://127.0.0.1:{mail}\"\n\
             mail_from = \"grid@example.org\"\nmail_to = \"ann@example.org\"\n"
        );
        std::fs::write(grid.path("holdfast.toml"), file).expect("written");
        grid.up(&format!("--nodes 1 --devices 2 --etcd {endpoint} {join} --name {name}"));
        join = format!("--join {}", grid.json("status")["grid"].as_str().expect("an id"));
    }
    until("all hosts use all nodes", || {
        grids.iter().all(|(_, grid)| (1..=3).all(|node| grid.node_state(node) == "up"))
    });
    for (name, grid) in &grids {
        grid.ok(&format!("volume create v{name} --size 16MiB --layout mirror:2@device"));
        grid.ok(&format!("volume create w{name} --size 16MiB --layout mirror:3"));
        write_anew(grid, &grid.uri(&format!("w{name}")), 1);
        until("some of it is in segments", || grid.json(&format!("volume show w{name}"))["live"]["segments"] != 0);
    }
    let grid = |name: &str| &grids.iter().find(|(of, _)| *of == name).expect("one of them").1;

    grid("c").ok("node kill 3");
    let tells = |grid: &Grid, what: &str| text(&grid.run("status").stdout).contains(what);
    until("each host tells of the volumes of all", || {
        grids.iter().all(|(_, grid)| tells(grid, "parts of volumes wa, wb, wc bear less than they are to"))
    });
    let first = heard.until("raised", "node 3");
    grid(&first).kill_host().expect("it runs");
    let second = heard.until("raised", &format!("volume v{first} orphaned"));
    assert!(tells(grid(&second), &format!("host {first} is gone")));
    grid("b").ok("node kill 2");
    grid(&second).kill_host().expect("it runs");
    // A minute later, which the second one has not lived to see.
    let third = heard.until("raised", "node 2");
    assert!(first != second && second != third && third != first, "{:?}", heard.told);
    for (name, node) in [("c", 3), ("b", 2)] {
        grid(name).ok(&format!("node start {node}"));
        assert_eq!(heard.until("cleared", &format!("node {node}")), third);
    }
    assert_eq!(heard.count("raised", &format!("volume v{second} orphaned")), 1, "{:?}", heard.told);
    // Each host tells once; what the former one told is told again by the next one, within two minutes.
    for (at, told) in heard.told.iter().enumerate() {
        assert!(!heard.told[..at].contains(told), "{told:?} twice: {:?}", heard.told);
    }
    for (about, times) in [("node 3", 3), ("node 2", 1)] {
        assert!((1..=times).contains(&heard.count("raised", about)), "{about}: {:?}", heard.told);
        assert_eq!(heard.count("cleared", about), 1, "{about}: {:?}", heard.told);
    }
    assert!(heard.count("raised", "volumes degraded") > 0, "{:?}", heard.told);
    // Mails leave after webhooks: the first host may not have lived to send its own, which the next one tells then.
    let mails = heard.mails.concat().replace("=\r\n", "");
    for part in ["node 3 is down", "node 2 is down", "is served by nobody: its host"] {
        assert!(mails.lines().any(|line| line.contains(part) && line.contains("(told by host")), "{part}: {mails}");
    }
}
