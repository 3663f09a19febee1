//! Volumes that share data: separate clones with the one that they were made of, and members of a sharing domain with its
//! store, each on any host.
//!
//! Two tests need the program `etcd`; `./x` sees to it.

mod support;

use std::path::Path;
use support::{Grid, assert_volume_holds, etcd, nbdcopy, pattern, until};

const SIZE: usize = 24 << 20;

fn write(grid: &Grid, volume: &str, file: &Path) {
    nbdcopy(file.to_str().expect("text"), &grid.uri(volume));
}

fn assert_holds(grid: &Grid, export: &str, file: &Path) {
    let (volume, snapshot) = export.split_once('@').map_or((export, None), |(v, s)| (v, Some(s)));
    let uri = grid.uri(volume);
    let uri = snapshot.map_or(uri.clone(), |s| uri.replace(&format!("/{volume}"), &format!("/{volume}@{s}")));
    assert_volume_holds(&uri, file, &grid.path("scratch"));
}

fn kept_bytes(grid: &Grid, volume: &str) -> u64 {
    grid.json(&format!("volume show {volume}"))["live"]["space"]["kept_bytes"].as_u64().expect("bytes")
}

#[test]
fn a_separate_clone_outlives_what_becomes_of_its_origin() {
    let grid = Grid::new(18);
    grid.up("--nodes 4 --devices 1");
    grid.ok(&format!("volume create golden --size {SIZE}"));
    let (first, second) = (grid.path("first"), grid.path("second"));
    pattern(&first, SIZE);
    std::fs::write(&second, vec![9; SIZE]).expect("written");
    write(&grid, "golden", &first);
    assert!(grid.fails("volume clone golden vm1 --separate").contains("snapshot create golden"));
    assert!(grid.fails("volume clone golden@v1 vm1 --separate").contains("no snapshot v1"));
    grid.ok("snapshot create golden v1");
    assert!(grid.fails("volume clone golden@v1 golden --separate").contains("already"));
    assert!(grid.fails("volume clone golden@v1 vm1 --separate --size 8MiB").contains("at least as large"));
    let made = grid.json("volume clone golden@v1 vm1 --separate");
    assert_eq!((&made["shares_with"], &made["state"]), (&"golden".into(), &"open".into()), "{made}");
    let large = grid.json("volume clone golden@v1 vm2 --separate --size 32MiB --no-export");
    assert_eq!((&large["size_bytes"], &large["state"]), (&(32_u64 << 20).into(), &"closed".into()), "{large}");
    assert_eq!(grid.json("volume show golden")["needed_by"], serde_json::json!(["vm1", "vm2"]));
    assert!(grid.fails("volume delete golden --now").contains("vm1, vm2"));

    // The origin forgets all of it; a node is lost; everybody starts anew.
    grid.ok("snapshot delete golden v1");
    write(&grid, "golden", &second);
    assert_holds(&grid, "vm1", &first);
    grid.ok("node kill 2");
    assert_holds(&grid, "vm1", &first);
    grid.ok("node start 2");
    grid.ok("grid down");
    grid.ok("grid up");
    grid.ok("volume export vm2");
    assert_holds(&grid, "vm1", &first);
    assert_holds(&grid, "vm2", &first);
    assert_holds(&grid, "golden", &second);
    until("what is kept is told of", || kept_bytes(&grid, "golden") >= SIZE as u64 / 2);
    // A clone of a clone; it begins with the snapshots that it stands on.
    grid.ok("snapshot create vm1 mine");
    grid.ok("volume clone vm1@mine vm3 --separate");
    write(&grid, "vm1", &second);
    assert_holds(&grid, "vm3", &first);
    assert_holds(&grid, "vm3@v1", &first);
    assert!(grid.fails("volume delete vm1").contains("vm3"));
    for name in ["vm3", "vm2", "vm1"] {
        until("it can be deleted", || grid.run(&format!("volume delete {name} --now")).status.success());
    }
    until("nothing is kept any more", || kept_bytes(&grid, "golden") == 0);
    assert_holds(&grid, "golden", &second);
    grid.ok("volume delete golden --now");
}

#[test]
fn clones_of_one_volume_are_served_by_different_hosts() {
    let store = tempfile::tempdir().expect("a directory");
    let member = etcd(store.path(), 8);
    let endpoint = member.config().endpoint();
    let (a, b) = (Grid::new(19), Grid::new(9));
    a.up(&format!("--nodes 3 --devices 1 --etcd {endpoint} --name a"));
    let id = a.json("status")["grid"].as_str().expect("an id").to_string();
    b.up(&format!("--nodes 1 --devices 1 --etcd {endpoint} --join {id} --name b"));
    until("both hosts see node 4", || a.node_state(4) == "up" && b.node_state(4) == "up");
    a.ok(&format!("volume create golden --size {SIZE}"));
    let (first, second) = (a.path("first"), a.path("second"));
    pattern(&first, SIZE);
    std::fs::write(&second, vec![5; SIZE]).expect("written");
    write(&a, "golden", &first);
    a.ok("snapshot create golden v1");
    assert!(b.fails("volume clone golden@v1 vm1 --separate").contains("host a"));
    a.ok("volume clone golden@v1 vm1 --separate --no-export");
    b.ok("volume export vm1");
    assert_holds(&b, "vm1", &first);
    a.ok("snapshot delete golden v1");
    write(&a, "golden", &second);
    // The origin's shards move; who serves the clone finds them.
    a.ok("node drain 1");
    until("node 1 is empty", || {
        let status = a.json("status");
        let node = status["nodes"].as_array().expect("nodes").iter().find(|n| n["id"] == 1).expect("node 1");
        node["devices"][0]["shards"] == 0
    });
    a.kill_host().expect("it runs; its nodes go on");
    assert_holds(&b, "vm1", &first);
    // The origin has another owner now, which knows what is named of it.
    until("the lease of host a has run out", || b.run("volume export golden").status.success());
    assert_holds(&b, "golden", &second);
    until("it is not forgotten", || kept_bytes(&b, "golden") > 0);
    write(&b, "vm1", &second);
    b.ok("volume delete vm1 --now");
    until("nothing is kept any more", || kept_bytes(&b, "golden") == 0);
    a.ok("grid up");
}

/// Of a volume's own segments, which a store's are not.
fn own_bytes(grid: &Grid, volume: &str) -> u64 {
    grid.json(&format!("volume show {volume}"))["live"]["space"]["data_bytes"].as_u64().expect("bytes")
}

#[test]
fn equal_content_of_volumes_on_two_hosts_is_stored_once() {
    let store = tempfile::tempdir().expect("a directory");
    let member = etcd(store.path(), 10);
    let endpoint = member.config().endpoint();
    let (a, b) = (Grid::new(21), Grid::new(22));
    // The store and a member are on reactors of one host, and another member is on another host.
    std::fs::write(a.path("holdfast.toml"), "[cpu]\nreactors = 3\n").expect("written");
    a.up(&format!("--nodes 3 --devices 1 --etcd {endpoint} --name a"));
    let id = a.json("status")["grid"].as_str().expect("an id").to_string();
    b.up(&format!("--nodes 1 --devices 1 --etcd {endpoint} --join {id} --name b"));
    until("both hosts see node 4", || a.node_state(4) == "up" && b.node_state(4) == "up");
    assert!(a.ok("sharing list").contains("no sharing domain"));
    let said = a.ok("sharing create guests --layout mirror:2 --compress off");
    assert!(said.contains("volume set VOLUME --sharing guests"), "{said}");
    let (same, other) = (a.path("same"), a.path("other"));
    pattern(&same, SIZE);
    std::fs::write(&other, vec![5; SIZE]).expect("written");
    for (grid, name) in [(&a, "vm1"), (&a, "vm2"), (&b, "vm3")] {
        grid.ok(&format!("volume create {name} --size {SIZE} --layout mirror:2"));
        write(grid, name, &same);
    }
    a.ok(&format!("volume create narrow --size {SIZE} --layout parity:2+1"));
    assert!(a.fails("volume set vm1 --sharing vm2").contains("no store"));
    assert!(a.fails("volume set narrow --sharing guests").contains("volume set narrow --layout mirror:2"));
    assert!(a.fails("volume set guests --sharing guests").contains("itself"));
    for (grid, name) in [(&a, "vm1"), (&a, "vm2"), (&b, "vm3")] {
        let said = grid.ok(&format!("volume set {name} --sharing guests"));
        assert!(said.contains("shares its content in domain guests"), "{said}");
        assert_eq!(grid.json(&format!("volume show {name}"))["sharing"], "guests");
    }
    assert!(a.ok("sharing list").contains("vm1, vm2, vm3"));
    let is_shared = |grid: &Grid, name: &str| own_bytes(grid, name) == 0;
    until("the store alone has it", || is_shared(&a, "vm1") && is_shared(&a, "vm2") && is_shared(&b, "vm3"));
    assert_eq!(own_bytes(&a, "guests"), SIZE as u64);
    assert!(a.ok("volume show vm1").contains("of its data lie with guests"));
    assert!(a.ok("space why").contains("volume vm1: ") && a.ok("space why").contains("lie with another volume"));
    let hold_it = |volumes: &[(&Grid, &str)]| volumes.iter().for_each(|(grid, name)| assert_holds(grid, name, &same));
    hold_it(&[(&a, "vm1"), (&a, "vm2"), (&b, "vm3")]);
    // No client reaches the store.
    let uri = a.uri("guests");
    assert!(!std::process::Command::new("nbdinfo").args(["--size", &uri]).status().expect("nbdinfo").success());
    assert!(a.fails("volume delete guests --now").contains("vm1, vm2, vm3"));
    assert!(a.fails("snapshot create guests monday").contains("has no clients"));
    assert!(a.fails("volume resize guests --size 64MiB --shrink").contains("has no clients"));
    assert!(a.fails("volume set vm1 --layout mirror:3").contains("in a sharing domain"));
    // Its owner is gone, and members go on without it, their snapshots, too.
    a.ok("snapshot create vm2 before");
    write(&a, "vm2", &other);
    assert_holds(&a, "vm2@before", &same);
    a.ok("volume delete vm1 --now");
    a.kill_host().expect("it runs; its nodes go on");
    hold_it(&[(&b, "vm3")]);
    until("the lease of host a has run out", || b.run("volume export guests").status.success());
    b.ok("volume export vm2");
    assert_holds(&b, "vm2", &other);
    assert_holds(&b, "vm2@before", &same);
    hold_it(&[(&b, "vm3")]);
    assert_eq!(own_bytes(&b, "guests"), SIZE as u64, "vm3 needs it");
    // One leaves, with all that it has, and may have another layout then.
    assert!(b.fails("volume set vm3 --layout parity:2+1").contains("--sharing none"));
    assert!(b.fails("volume set guests --sharing none").contains("its members leave it"));
    let said = b.ok("volume set vm3 --sharing none");
    assert!(said.contains("leaves domain guests"), "{said}");
    until("it has left", || b.json("volume show vm3")["sharing"].is_null());
    assert_eq!(own_bytes(&b, "vm3"), SIZE as u64);
    assert!(b.ok("volume set vm3 --sharing none").contains("in no sharing domain"));
    b.ok("volume set vm3 --layout parity:2+1");
    b.ok("volume delete vm2 --now");
    until("nobody needs the store", || b.run("volume delete guests --now").status.success());
    hold_it(&[(&b, "vm3")]);
    a.ok("grid up");
}
