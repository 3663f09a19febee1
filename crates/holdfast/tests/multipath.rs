//! Volumes that two hosts offer: clients of both go on while the volume changes hands, and when its host dies.
//!
//! Needs the programs `etcd` and `nbdcopy`; `./x` sees to them.

mod support;

use holdfast_lab::process::{Signal, signal};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use support::{Grid, assert_volume_holds, etcd, nbdcopy, pattern, until};

fn state(grid: &Grid, volume: &str) -> String {
    grid.json(&format!("volume show {volume}"))["state"].as_str().expect("a state").to_string()
}

/// A client that writes and reads all the time; any error, and any byte that is not the last one written, fails the test.
struct Client {
    ends: Arc<AtomicBool>,
    rounds: Arc<AtomicU32>,
    thread: JoinHandle<()>,
}

impl Client {
    fn begin(grid: &Grid, uri: String) -> Client {
        let (ends, rounds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
        let (data, scratch) = (grid.path("client-data"), grid.path("client-scratch"));
        pattern(&data, 12 << 20);
        let (ends_too, rounds_too) = (Arc::clone(&ends), Arc::clone(&rounds));
        let thread = std::thread::spawn(move || {
            while !ends_too.load(Ordering::Relaxed) {
                let mut bytes = std::fs::read(&data).expect("read");
                bytes.rotate_left(4096 + 1);
                std::fs::write(&data, &bytes).expect("written");
                nbdcopy(data.to_str().expect("text"), &uri);
                assert_volume_holds(&uri, &data, &scratch);
                rounds_too.fetch_add(1, Ordering::Relaxed);
            }
        });
        Client { ends, rounds, thread }
    }

    /// Lets it do its work a few times more.
    fn goes_on(&self, what: &str) {
        let before = self.rounds.load(Ordering::Relaxed);
        until(what, || self.thread.is_finished() || self.rounds.load(Ordering::Relaxed) > before + 1);
        assert!(!self.thread.is_finished(), "{what}: a client was let down");
    }

    fn end(self) {
        self.ends.store(true, Ordering::Relaxed);
        self.thread.join().expect("a client was let down");
    }
}

#[test]
fn clients_go_on_while_a_volume_is_handed_over() {
    let store = tempfile::tempdir().expect("a directory");
    let member = etcd(store.path(), 23);
    let endpoint = member.config().endpoint();
    let (a, b) = (Grid::new(40), Grid::new(41));
    a.up(&format!("--nodes 3 --devices 1 --etcd {endpoint} --address 127.0.0.1 --name a"));
    let token = a.ok("grid token").trim().to_string();
    // A machine without a node: others reach its host at the address that it was given.
    b.up(&format!("--nodes 0 --etcd {endpoint} --address 127.0.0.1 --name b --join {token}"));
    until("both hosts see all nodes", || (1..=3).all(|n| a.node_state(n) == "up" && b.node_state(n) == "up"));
    a.ok("volume create v1 --size 32MiB");
    a.ok("volume create v2 --size 32MiB");
    assert!(a.fails("volume handover v1 --to c").contains("these are up: a, b"));

    // Both offer it, and clients of both see the same.
    b.ok("volume export v1 --multipath");
    assert_eq!((state(&a, "v1"), state(&b, "v1")), ("open".to_string(), "forwarding".to_string()));
    let data = a.path("data");
    pattern(&data, 4 << 20);
    nbdcopy(data.to_str().expect("text"), &b.uri("v1"));
    assert_volume_holds(&a.uri("v1"), &data, &a.path("scratch"));

    // One through each; the second volume has no second host before it is handed over.
    let (one, two) = (Client::begin(&b, b.uri("v1")), Client::begin(&a, a.uri("v2")));
    one.goes_on("the client of the forwarding host");
    for (from, to, name) in [(&a, &b, "b"), (&b, &a, "a"), (&a, &b, "b")] {
        for volume in ["v1", "v2"] {
            // Asked at the host that has it, and at the other, which passes it on.
            let asked = if volume == "v1" { from } else { to };
            asked.ok(&format!("volume handover {volume} --to {name}"));
            assert_eq!((state(from, volume), state(to, volume)), ("forwarding".to_string(), "open".to_string()));
        }
        one.goes_on("the client of host b");
        two.goes_on("the client of host a");
    }
    two.end();

    // A host that is not there any more gets nothing: the volume stays, and its clients with it.
    let a_host = a.pid("host").expect("it runs");
    let is_up = |host: &str| {
        let machines = b.json("machine list");
        machines.as_array().expect("machines").iter().any(|machine| machine["name"] == host && machine["up"] == true)
    };
    // On a busy machine its lease may have run out before it is asked.
    until("host a is asked, which hangs", || {
        signal(a_host, Signal::STOP).expect("signalled");
        let refused = b.fails("volume handover v1 --to a");
        signal(a_host, Signal::CONT).expect("signalled");
        until("host a is up again", || is_up("a"));
        refused.contains("host a was asked, and")
    });
    one.goes_on("the client of host b, whose volume nobody took over");
    one.end();
    assert_eq!(state(&b, "v1"), "open");
}

#[test]
fn a_forwarding_host_takes_over_from_a_host_that_dies_or_hangs() {
    let store = tempfile::tempdir().expect("a directory");
    let member = etcd(store.path(), 24);
    let endpoint = member.config().endpoint();
    let (a, b) = (Grid::new(42), Grid::new(43));
    a.up(&format!("--nodes 2 --devices 1 --etcd {endpoint} --name a"));
    let id = a.json("status")["grid"].as_str().expect("an id").to_string();
    b.up(&format!("--nodes 1 --devices 1 --etcd {endpoint} --join {id} --name b"));
    until("both hosts see all nodes", || (1..=3).all(|n| a.node_state(n) == "up" && b.node_state(n) == "up"));
    a.ok("volume create v1 --size 32MiB");
    b.ok("volume export v1 --multipath");
    let client = Client::begin(&b, b.uri("v1"));
    client.goes_on("the client of the forwarding host");

    a.kill_host().expect("it runs");
    until("host b has taken over", || state(&b, "v1") == "open");
    client.goes_on("the client of the host that forwarded, and serves now");
    a.ok("grid up");
    until("host a offers it again", || state(&a, "v1") == "forwarding");
    let (data, scratch) = (a.path("data"), a.path("scratch"));
    nbdcopy(&a.uri("v1"), data.to_str().expect("text"));

    // And back, from one that hangs until its lease is over, and then goes on.
    client.end();
    let client_of_a = Client::begin(&a, a.uri("v1"));
    client_of_a.goes_on("the client of the host that was dead");
    let hung = b.pid("host").expect("it runs");
    signal(hung, Signal::STOP).expect("signalled");
    until("host a has taken over", || state(&a, "v1") == "open");
    client_of_a.goes_on("the client of the host that serves now");
    signal(hung, Signal::CONT).expect("signalled");
    until("host b knows", || state(&b, "v1") == "forwarding");
    client_of_a.goes_on("the client after that");
    client_of_a.end();
    nbdcopy(&a.uri("v1"), data.to_str().expect("text"));
    assert_volume_holds(&b.uri("v1"), &data, &scratch);

    // One that does not offer it any more forwards nothing.
    b.ok("volume unexport v1");
    assert_eq!((state(&a, "v1"), state(&b, "v1")), ("open".to_string(), "elsewhere".to_string()));
    assert!(a.json("volume show v1").get("offered_by").is_none());
}
