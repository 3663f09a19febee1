//! Several reactors in one host: volumes are spread over them, and everything is as with one.

mod support;

use std::fs;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use support::{Grid, assert_volume_holds, etcd, is_whole, nbdcopy, pattern, text, until};

const VOLUMES: [&str; 4] = ["v1", "v2", "v3", "v4"];

fn grid(index: u16) -> Grid {
    let grid = Grid::new(index);
    grid.up("--nodes 3 --devices 1");
    grid.ok("grid down --host");
    set_reactors(&grid, 3);
    grid
}

fn snapshots(grid: &Grid, volume: &str) -> Vec<String> {
    let listed = grid.json(&format!("snapshot list {volume}"));
    let listed = listed.as_array().expect("snapshots").iter();
    listed.map(|snapshot| snapshot["name"].as_str().expect("a name").to_string()).collect()
}

/// Of a host that is down; it is up afterwards.
fn set_reactors(grid: &Grid, count: u32) {
    fs::write(grid.path("holdfast.toml"), format!("[cpu]\nreactors = {count}\n")).unwrap();
    grid.ok("grid up");
}

#[test]
fn volumes_on_several_reactors_are_served_listed_changed_and_opened_again() {
    let grid = grid(60);
    let scratch = grid.path("scratch");
    let files: Vec<_> = VOLUMES.iter().map(|name| grid.path(&format!("{name}.img"))).collect();
    for (at, name) in VOLUMES.iter().enumerate() {
        grid.ok(&format!("volume create {name} --size 32MiB"));
        pattern(&files[at], (16 << 20) + at * 4096);
    }
    let pid = grid.json("status")["host"]["pid"].to_string();
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    // A thread that ends meanwhile has no name any more.
    let names = threads.filter_map(|thread| fs::read_to_string(thread.ok()?.path().join("comm")).ok());
    assert_eq!(names.filter(|name| name.starts_with("reactor ")).count(), 2, "beside the first");
    std::thread::scope(|scope| {
        for (name, file) in VOLUMES.iter().zip(&files) {
            let uri = grid.uri(name);
            scope.spawn(move || nbdcopy(file.to_str().unwrap(), &uri));
        }
    });
    let holds = |name: &str, file: &std::path::Path| assert_volume_holds(&grid.uri(name), file, &scratch);
    for (name, file) in VOLUMES.iter().zip(&files) {
        holds(name, file);
        assert_eq!(grid.json(&format!("volume show {name}"))["state"], "open");
    }
    let uri = grid.uri("v1").replace("/v1?", "?");
    let listed = text(&Command::new("nbdinfo").args(["--list", &uri]).output().expect("nbdinfo runs").stdout);
    assert!(VOLUMES.iter().all(|name| listed.contains(&format!("export=\"{name}\""))), "{listed}");
    let status = grid.json("status");
    assert_eq!(status["volumes"].as_array().unwrap().len(), 4, "{status}");

    // What is made in a volume is found where that is.
    for name in VOLUMES {
        grid.ok(&format!("snapshot create {name} s"));
        grid.ok(&format!("volume clone {name}@s {name}-clone"));
        grid.ok(&format!("volume resize {name} --size 48MiB"));
    }
    grid.ok("volume clone v2@s apart --separate");
    for (name, file) in VOLUMES.iter().zip(&files) {
        nbdcopy(files[3].to_str().unwrap(), &grid.uri(name));
        holds(&format!("{name}-clone"), file);
        let uri = grid.uri(name).replace(&format!("/{name}?"), &format!("/{name}@s?"));
        assert_volume_holds(&uri, file, &scratch);
        assert_eq!(grid.json(&format!("volume show {name}"))["size_bytes"], 48 << 20);
    }
    holds("apart", &files[1]);
    // A group is taken of volumes on all of them, or of none.
    let last = &files[3];
    grid.ok("snapshot create v3 taken");
    assert!(
        grid.fails("snapshot create v1 taken --with v2 --with v3 --with v4").contains("has a snapshot of that name")
    );
    assert_eq!(snapshots(&grid, "v1"), ["s"]);
    grid.ok("snapshot create v1 g --with v2 --with v3 --with v4");
    for name in VOLUMES {
        let uri = grid.uri(name).replace(&format!("/{name}?"), &format!("/{name}@g?"));
        assert_volume_holds(&uri, last, &scratch);
    }
    grid.ok("volume unexport v3");
    assert!(grid.fails("snapshot create v1 h --with v2 --with v3").contains("volume v3 is not in service"));
    assert_eq!(grid.json("volume show v3")["state"], "closed");
    grid.ok("volume export v3");

    // A node goes, the host dies: all are there.
    grid.ok("node kill 2");
    for name in VOLUMES {
        nbdcopy(files[0].to_str().unwrap(), &grid.uri(name));
    }
    grid.ok("node start 2");
    grid.wait_for_node(2, "up");
    assert!(Command::new("kill").args(["-9", &pid]).status().unwrap().success());
    until("the host is gone", || grid.json("grid status")["host"]["state"] != "up");
    grid.ok("grid up");
    for name in VOLUMES {
        holds(name, &files[0]);
    }
    until("all is whole", || VOLUMES.iter().all(|name| is_whole(&grid, name)));
    grid.ok("volume delete v4-clone");
    grid.ok("volume unexport v4");
    grid.ok("volume delete v4");
    assert_eq!(grid.json("status")["volumes"].as_array().unwrap().iter().filter(|v| v["name"] == "v4").count(), 0);
    // A clean stop closes the volumes of all.
    grid.ok("grid down --host");
    let log = fs::read_to_string(grid.path("logs/host.log")).unwrap();
    assert!(!log.contains("could not be closed in time"), "{log}");
}

/// Messages between reactors, and looks at what they share, while a volume is read in requests of 4 KiB.
fn crossings_of_reading(grid: &Grid, volume: &str) -> u64 {
    let count = || grid.json("status")["host"]["crossings"].as_u64().expect("a count");
    let before = count();
    let read = ["--request-size=4096", "--connections=1", "--allocated", &grid.uri(volume), "null:"];
    assert!(Command::new("nbdcopy").args(read).status().expect("nbdcopy runs").success());
    count() - before
}

#[test]
fn requests_bring_no_message_between_reactors_and_no_lock() {
    let grid = grid(63);
    for (name, mib) in [("small", 1), ("large", 40)] {
        grid.ok(&format!("volume create {name} --size {mib}MiB"));
        let data = grid.path(name);
        pattern(&data, mib << 20);
        nbdcopy(data.to_str().unwrap(), &grid.uri(name));
    }
    // By what connecting and asking bring, and the control plane meanwhile, they may differ.
    let (few, many) = (crossings_of_reading(&grid, "small"), crossings_of_reading(&grid, "large"));
    assert!(few > 0 && many < few + 500, "256 requests: {few}; 10,240 requests: {many}");
    println!("256 requests: {few}; 10,240 requests: {many}");
}

fn passed_on(grid: &Grid) -> Vec<u64> {
    let nodes = grid.json("status")["nodes"].as_array().expect("nodes").clone();
    nodes.iter().filter_map(|node| node["passed_on"].as_u64()).collect()
}

#[test]
fn nodes_of_several_reactors_serve_by_each_and_pass_nothing_on() {
    let grid = Grid::new(64);
    grid.up("--nodes 3 --devices 2");
    grid.ok("grid down");
    fs::write(grid.path("holdfast.toml"), "[cpu]\nnode_reactors = 2\n").unwrap();
    grid.ok("grid up");
    grid.ok("volume create v --size 64MiB");
    let (file, scratch) = (grid.path("v.img"), grid.path("scratch"));
    pattern(&file, 48 << 20);
    nbdcopy(file.to_str().unwrap(), &grid.uri("v"));
    assert_volume_holds(&grid.uri("v"), &file, &scratch);
    assert!(grid.json("status")["nodes"].as_array().unwrap().iter().all(|node| node["reactors"] == 2));
    until("data are on the devices of all reactors", || {
        let status = grid.json("status");
        let mut devices =
            status["nodes"].as_array().unwrap().iter().flat_map(|node| node["devices"].as_array().unwrap());
        devices.all(|device| device["shards"].as_u64() > Some(0))
    });
    // Copies of the metadata go by way of the first, and nothing else does.
    let read = ["--request-size=4096", "--allocated", &grid.uri("v"), "null:"];
    assert!(Command::new("nbdcopy").args(read).status().expect("nbdcopy runs").success());
    // What was counted meanwhile is told within a second.
    std::thread::sleep(Duration::from_millis(2500));
    let (passed_on, requests) = (passed_on(&grid), 48 << 20 >> 12);
    assert!(passed_on.len() == 3 && passed_on.iter().all(|count| *count < 20), "{passed_on:?} of {requests}");

    // A device more is dealt to one of them, and what was on a lost node is made anew on all.
    grid.ok("device add 1");
    let is_there = || grid.json("status")["nodes"][0]["devices"].as_array().unwrap().len() == 3;
    until("the device is taken in", is_there);
    grid.ok("node kill 2");
    pattern(&file, 50 << 20);
    nbdcopy(file.to_str().unwrap(), &grid.uri("v"));
    grid.ok("node start 2");
    grid.wait_for_node(2, "up");
    until("all is whole", || is_whole(&grid, "v"));
    assert_volume_holds(&grid.uri("v"), &file, &scratch);
    // With one reactor again, and with more than devices.
    for count in [1, 5] {
        grid.ok("grid down");
        fs::write(grid.path("holdfast.toml"), format!("[cpu]\nnode_reactors = {count}\n")).unwrap();
        grid.ok("grid up");
        assert_volume_holds(&grid.uri("v"), &file, &scratch);
        assert_eq!(grid.json("status")["nodes"][2]["reactors"], count);
    }
}

#[test]
fn hosts_of_any_number_of_reactors_forward_to_each_other_and_hand_volumes_over() {
    let store = tempfile::tempdir().expect("a directory");
    let member = etcd(store.path(), 27);
    let endpoint = member.config().endpoint();
    let (a, b) = (Grid::new(61), Grid::new(62));
    a.up(&format!("--nodes 3 --devices 1 --etcd {endpoint} --address 127.0.0.1 --name a"));
    let token = a.ok("grid token").trim().to_string();
    b.up(&format!("--nodes 0 --etcd {endpoint} --address 127.0.0.1 --name b --join {token}"));
    for (grid, count) in [(&a, 3), (&b, 2)] {
        grid.ok("grid down --host");
        set_reactors(grid, count);
    }
    until("both hosts see all nodes", || (1..=3).all(|n| a.node_state(n) == "up" && b.node_state(n) == "up"));
    // Their ids say where they are: of eight volumes some are on each reactor of each host, almost surely.
    let names: Vec<String> = (1..=8).map(|number| format!("v{number}")).collect();
    let (scratch, files) = (a.path("scratch"), [a.path("one"), a.path("two")]);
    files.iter().zip([5 << 20, 6 << 20]).for_each(|(file, len)| pattern(file, len));
    for name in &names {
        a.ok(&format!("volume create {name} --size 16MiB"));
        b.ok(&format!("volume export {name} --multipath"));
        nbdcopy(files[0].to_str().unwrap(), &b.uri(name));
        assert_volume_holds(&a.uri(name), &files[0], &scratch);
    }
    let listed = Command::new("nbdinfo").args(["--list", &b.uri("v1").replace("/v1?", "?")]).output();
    let listed = text(&listed.expect("nbdinfo runs").stdout);
    assert!(names.iter().all(|name| listed.contains(&format!("export=\"{name}\""))), "{listed}");
    a.ok("snapshot create v1 all --with v2 --with v3 --with v4 --with v5 --with v6 --with v7 --with v8");
    for name in &names {
        b.ok(&format!("volume handover {name} --to b"));
        assert_eq!(b.json(&format!("volume show {name}"))["state"], "open");
        nbdcopy(files[1].to_str().unwrap(), &a.uri(name));
        assert_volume_holds(&b.uri(name), &files[1], &scratch);
    }
    // Its host dies, and comes back to where it forwards.
    b.kill_host().expect("it runs");
    let state = |grid: &Grid, name: &str| grid.json(&format!("volume show {name}"))["state"].clone();
    until("host a has taken all over", || names.iter().all(|name| state(&a, name) == "open"));
    b.ok("grid up");
    until("host b offers all of them again", || names.iter().all(|name| state(&b, name) == "forwarding"));
    for name in &names {
        assert_volume_holds(&b.uri(name), &files[1], &scratch);
        let uri = a.uri(name).replace(&format!("/{name}?"), &format!("/{name}@all?"));
        assert_volume_holds(&uri, &files[0], &scratch);
    }
}

/// Copies to a volume that has no room for it, again and again, until it is told to stop.
fn press(file: &str, uri: &str, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        let copied = Command::new("nbdcopy").args([file, uri]).output().expect("nbdcopy runs");
        assert!(!copied.status.success() && text(&copied.stderr).contains("No space"), "{}", text(&copied.stderr));
    }
}

#[test]
fn what_a_fixed_volume_owns_is_kept_from_thin_ones_of_other_reactors() {
    let grid = grid(64);
    let (file, large, scratch) = (grid.path("file"), grid.path("large"), grid.path("scratch"));
    pattern(&file, 96 << 20);
    pattern(&large, 768 << 20);
    let (file_name, large_name) = (file.to_str().unwrap(), large.to_str().unwrap());
    grid.ok("volume create db --size 96MiB --provisioning fixed");
    grid.ok("volume create thin1 --size 1GiB");
    grid.ok("volume create thin2 --size 1GiB");
    let db = grid.uri("db");
    std::thread::scope(|scope| {
        // Both at once, each on a reactor of its own.
        for thin in ["thin1", "thin2"] {
            let uri = grid.uri(thin);
            scope.spawn(move || {
                let copied = Command::new("nbdcopy").args([large_name, &uri]).output().expect("nbdcopy runs");
                assert!(text(&copied.stderr).contains("No space"), "{}", text(&copied.stderr));
            });
        }
    });
    nbdcopy(file_name, &db);
    let stop = AtomicBool::new(false);
    let uri = grid.uri("thin1");
    std::thread::scope(|scope| {
        let pressing = scope.spawn(|| press(large_name, &uri, &stop));
        // It is emptied, and what that frees is its own still.
        let refill = || {
            let discarded = Command::new("qemu-io").args(["-f", "raw", "-c", "discard 0 96M", &db]).output();
            std::thread::sleep(Duration::from_secs(3));
            let copied = Command::new("nbdcopy").args([file_name, &db]).output();
            [discarded, copied].map(|output| output.expect("it runs"))
        };
        let outputs: Vec<Output> = (0..3).flat_map(|_| refill()).collect();
        stop.store(true, Ordering::Relaxed);
        pressing.join().expect("it finds no room");
        for output in outputs {
            assert!(output.status.success(), "it owns its room: {}", text(&output.stderr));
        }
    });
    assert_volume_holds(&db, &file, &scratch);
}
