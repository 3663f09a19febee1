//! The local grid through its command line, with real processes and small devices.

mod support;

use serde_json::Value;
use std::collections::HashMap;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use support::{
    Grid, PATIENCE, assert_volume_holds, free_ports, give_back, holdfast, is_whole, nbdcopy, needs, pattern, text,
    until,
};

#[test]
fn a_grid_keeps_its_volumes_over_down_and_up_and_the_loss_of_a_node() {
    let grid = Grid::new(0);
    assert!(grid.up("--nodes 3 --devices 1").contains("made and up"));
    assert!(grid.ok("grid up").contains("up already"));

    assert!(grid.ok("volume list").contains("no volumes yet"));
    let made = grid.json("volume create v1 --size 64MiB");
    assert_eq!((&made["state"], &made["layout"]), (&"open".into(), &"parity:2+1".into()), "{made}");
    assert!(grid.fails("volume create v1 --size 64MiB").contains("already"));
    assert!(grid.fails("volume create wide --size 64MiB --layout parity:4+2").contains("wants 6 nodes"));
    assert!(grid.fails("volume create a/b --size 64MiB").contains("vm1-disk"));
    assert!(grid.fails("volume create odd --size 64MB5").contains("8GiB"));
    assert!(grid.fails("volume show v9").contains("volume list"));

    let data = grid.path("data");
    let scratch = grid.path("scratch");
    pattern(&data, 24 << 20);
    nbdcopy(data.to_str().unwrap(), &grid.uri("v1"));

    let resized = grid.json("volume resize v1 --size 96MiB");
    assert_eq!(resized["size_bytes"], 96 << 20);
    assert!(grid.fails("volume resize v1 --size 32MiB").contains("--shrink"));

    assert!(grid.ok("grid down").contains("stopped"));
    assert_eq!(grid.json("status")["host"]["state"], "down");
    assert!(grid.fails("volume list").contains("grid up"));
    assert!(!grid.ok("grid up").contains("made"));
    let volumes = grid.json("volume list");
    assert_eq!((&volumes[0]["name"], &volumes[0]["state"]), (&"v1".into(), &"open".into()), "{volumes}");
    assert_eq!(volumes[0]["size_bytes"], 96 << 20);
    assert_volume_holds(&grid.uri("v1"), &data, &scratch);

    grid.ok("node kill 2");
    assert_eq!(grid.node_state(2), "down");
    assert!(grid.ok("node kill 2").contains("was dead"));
    assert_volume_holds(&grid.uri("v1"), &data, &scratch);
    grid.ok("node start 2");
    assert!(grid.ok("node start 2").contains("up already"));
    grid.wait_for_node(2, "up");

    grid.ok("volume delete v1");
    assert!(grid.ok("volume list").contains("no volumes yet"));
    grid.json("volume create v1 --size 32MiB --layout mirror:2");
    grid.ok("volume delete v1 --now");
    until("deleted volumes are gone", || grid.json("status")["deleting"].as_array().is_some_and(Vec::is_empty));
}

#[test]
fn exports_are_taken_in_and_out_of_service() {
    let grid = Grid::new(1);
    grid.up("--nodes 2 --devices 1");
    let made = grid.json("volume create v1 --size 32MiB --layout mirror:2 --no-export");
    assert_eq!((&made["state"], &made["exported"]), (&"closed".into(), &false.into()));
    assert_eq!(grid.json("volume resize v1 --size 48MiB")["size_bytes"], 48 << 20);
    let exported = grid.json("volume export v1");
    assert_eq!((&exported["state"], &exported["size_bytes"]), (&"open".into(), &(48 << 20).into()));
    let unexported = grid.json("volume unexport v1");
    assert_eq!((&unexported["state"], &unexported["exported"]), (&"closed".into(), &false.into()));
    grid.ok("grid down");
    grid.ok("grid up");
    assert_eq!(grid.json("volume show v1")["state"], "closed");
}

#[test]
fn status_answers_within_a_second_whatever_hangs() {
    let grid = Grid::new(2);
    grid.up("--nodes 3 --devices 1");
    grid.json("volume create v1 --size 32MiB");
    grid.ok("node hang 1");
    grid.ok("node cut 3");
    // Each may be kept up by what else the machine does; one that waits for a node that hangs is so every time.
    until("status answers within a second", || {
        let start = Instant::now();
        assert_eq!(grid.node_state(1), "hung");
        start.elapsed() < Duration::from_secs(1)
    });
    assert_eq!(grid.node_state(3), "cut");
    grid.ok("node resume 1");
    grid.ok("node mend 3");
    grid.wait_for_node(1, "up");
    grid.wait_for_node(3, "up");
    assert!(grid.fails("node cut 9").contains("no node 9"));
}

#[test]
fn a_grid_comes_up_beside_a_node_that_hangs() {
    let grid = Grid::new(5);
    grid.up("--nodes 3 --devices 1");
    grid.ok("node hang 1");
    grid.ok("node kill 2");
    let told = grid.ok("grid up");
    assert!(told.contains("node 2 started") && told.contains("node 1 hangs"), "{told}");
    grid.ok("node resume 1");
    grid.wait_for_node(1, "up");
}

/// What kind of thing stands in the way of a command, for programs.
fn code(grid: &Grid, line: &str) -> String {
    let told: Value = serde_json::from_str(&grid.fails(&format!("{line} --json"))).unwrap();
    assert!(told["error"]["message"].as_str().is_some_and(|message| message.len() > 20), "{told}");
    told["error"]["code"].as_str().unwrap().to_string()
}

fn refusals_have_codes(grid: &Grid) {
    grid.ok("volume create v1 --size 32MiB --layout mirror:2 --no-export");
    for (line, expected) in [
        ("volume show v2", "not-found"),
        ("snapshot create v2 monday", "not-found"),
        ("volume create v1 --size 32MiB", "exists"),
        ("volume create v2 --size 100000TiB", "invalid"),
        ("volume create v2 --size 32MiB --layout mirror:3", "redundancy"),
        ("snapshot create v1 monday", "state"),
        ("device drain 2/0", "redundancy"),
        ("device drain 7/0", "not-found"),
        ("node stop 9", "not-found"),
        ("grid etcd use 127.0.0.1:1", "state"),
        ("volume rename v1 .", "invalid"),
    ] {
        assert_eq!(code(grid, line), expected, "{line}");
    }
    grid.ok("volume protect v1 on");
    assert_eq!(code(grid, "volume delete v1"), "protected");
    grid.ok("volume protect v1 off");
    grid.ok("volume delete v1 --now");
    grid.ok("task watch");
}

#[test]
fn what_cannot_work_is_refused_and_nothing_is_lost() {
    let grid = Grid::new(3);
    assert!(grid.fails("status").contains("holdfast grid up"));
    assert!(grid.fails("volume list").contains("holdfast grid up"));
    assert_eq!(code(&grid, "volume list"), "not-found");
    assert_eq!(code(&grid, "grid up --device-size 500TiB"), "no-space");
    assert_eq!(code(&grid, "grid up --device-size 1MiB"), "invalid");
    let error = grid.fails("grid up --device-size 500TiB");
    assert!(error.contains("too little space") && error.contains("--device-size"), "{error}");
    assert!(grid.fails("grid up --device-size 1MiB").contains("at least"));

    let port: u16 = grid.port.parse().unwrap();
    let squatter = TcpListener::bind(("127.0.0.1", port + 1)).unwrap();
    let error = grid.fails(&format!("grid up --nodes 2 --devices 1 --device-size 256MiB --port {port}"));
    assert!(error.contains(&format!("port {}", port + 1)), "{error}");
    assert!(!grid.path("grid.json").exists() && !grid.path("devices").exists());
    give_back(squatter);

    grid.up("--nodes 2 --devices 1");
    refusals_have_codes(&grid);
    grid.ok("grid down");
    assert_eq!(code(&grid, "volume list"), "unavailable");
    let error = grid.fails("grid up --nodes 3");
    assert!(error.contains("--nodes") && error.contains("2 nodes"), "{error}");
    let squatter = TcpListener::bind(("127.0.0.1", port)).unwrap();
    assert!(grid.fails("grid up").contains("in use"));
    give_back(squatter);

    let other = Grid::new(4);
    other.up("--nodes 2 --devices 1");
    other.ok("grid down");
    let (ours, theirs) = (grid.path("devices/node1-0.img"), other.path("devices/node1-0.img"));
    let kept = grid.path("kept.img");
    fs::rename(&ours, &kept).unwrap();
    fs::rename(&theirs, &ours).unwrap();
    // One device stops nobody: it is left out, and told.
    grid.ok("grid up");
    until("it is told", || {
        let told = grid.ok("status");
        told.contains("device 1/0") && told.contains("belongs to grid") && told.contains("nothing was written")
    });
    fs::rename(&ours, &theirs).unwrap();
    fs::rename(&kept, &ours).unwrap();
    other.ok("grid up");
    until("its own is taken up without being told", || grid.serving_devices(1) == 1);
}

#[test]
fn a_grid_without_its_metadata_is_not_taken_for_an_empty_one() {
    let grid = Grid::new(6);
    grid.up("--nodes 3 --devices 1");
    grid.json("volume create v1 --size 32MiB");
    grid.ok("grid down");
    let (meta, kept) = (grid.path("meta.redb"), grid.path("kept"));
    fs::rename(&meta, &kept).unwrap();
    let error = grid.fails("grid up");
    assert!(error.contains("meta.redb is missing") && error.contains("Restore"), "{error}");
    fs::write(&meta, "").unwrap();
    assert!(grid.fails("grid up").contains("missing or empty"));
    fs::rename(&kept, &meta).unwrap();
    grid.ok("grid up");
    assert_eq!(grid.json("volume show v1")["state"], "open");

    // One that was set back, while nobody looked, is not believed.
    let remembered = || fs::read_to_string(grid.path("beat.json")).unwrap_or_default();
    until("the machine remembers its store", || !remembered().is_empty());
    grid.ok("grid down --host");
    assert!(grid.ok("meta believe").contains("is believed"));
    fs::copy(&meta, &kept).unwrap();
    let before = remembered();
    let recover = || {
        let done = grid.json("meta recover --replace --complete --yes");
        assert_eq!(done["volumes"][0]["doubt"], serde_json::Value::Null, "{done}");
    };
    recover();
    grid.ok("grid up");
    until("the machine remembers the store that it has now", || remembered() != before);
    grid.ok("grid down --host");
    fs::copy(&kept, &meta).unwrap();
    let error = grid.fails("grid up");
    assert!(error.contains("not the one that it was") && error.contains("meta believe"), "{error}");
    let shown = grid.json("meta believe");
    assert!(shown["doubt"].is_string() && shown["done"] == false, "{shown}");
    assert!(grid.fails("grid up").contains("not the one that it was"), "nothing was changed");
    // As the message says, the metadata come from the nodes; or the store is gone on with as it is.
    recover();
    grid.ok("grid up");
    grid.ok("volume export v1");
    grid.ok("grid down --host");
    fs::copy(&kept, &meta).unwrap();
    assert_eq!(grid.json("meta believe --yes")["done"], true);
    assert!(grid.ok("meta believe").contains("is believed"));
    // Its volume has been opened since, as nodes know.
    assert!(grid.fails("grid up").contains("the metadata are older than what nodes know"));
}

#[test]
fn a_node_serves_without_a_blank_device_and_takes_it_when_told() {
    let grid = Grid::new(7);
    grid.up("--nodes 3 --devices 2");
    grid.ok("node kill 2");
    let device = grid.path("devices/node2-1.img");
    let len = fs::metadata(&device).unwrap().len();
    fs::write(&device, "").unwrap();
    fs::OpenOptions::new().write(true).open(&device).unwrap().set_len(len).unwrap();
    grid.ok("node start 2");
    grid.wait_for_node(2, "up");
    until("it serves by the other", || grid.serving_devices(2) == 1);
    until("it is told", || grid.ok("device list").contains("--format-blank"));
    let named = || -> serde_json::Value {
        let config: serde_json::Value = serde_json::from_slice(&fs::read(grid.path("grid.json")).unwrap()).unwrap();
        config["nodes"][1]["devices"].clone()
    };
    let before = named();
    grid.ok("node kill 2");
    grid.ok("node start 2 --format-blank");
    grid.wait_for_node(2, "up");
    until("it serves", || grid.serving_devices(2) == 2);
    // It is another device, by the name that the grid has for it from here on.
    let after = named();
    assert_eq!(before[0], after[0]);
    assert_ne!(before[1]["device"], after[1]["device"]);
    until("the host knows it", || !grid.ok("device list").contains("unknown"));
    assert!(grid.fails("device remove 2/1").contains("is in use"));
    assert!(device.exists());
}

#[test]
fn a_volume_out_of_service_is_resized() {
    let grid = Grid::new(8);
    grid.up("--nodes 3 --devices 1");
    grid.json("volume create v1 --size 32MiB");
    grid.ok("volume unexport v1");
    assert!(grid.fails("volume resize v1 --size 16MiB").contains("--shrink"));
    grid.ok("volume resize v1 --size 16MiB --shrink");
    let shown = grid.json("volume show v1");
    assert_eq!((&shown["size_bytes"], &shown["exported"]), (&(16 << 20).into(), &false.into()));
    grid.ok("volume resize v1 --size 64MiB");
    assert_eq!(grid.json("volume show v1")["size_bytes"], 64 << 20);
}

#[test]
fn help_teaches_by_example() {
    let help = text(&holdfast().arg("--help").output().unwrap().stdout);
    assert!(help.contains("holdfast grid up") && help.contains("HOLDFAST_DIR"), "{help}");
    for command in ["grid", "volume", "node"] {
        let help = text(&holdfast().args([command, "--help"]).output().unwrap().stdout);
        assert!(help.contains("Examples:"), "{command}: {help}");
    }
}

#[test]
fn a_node_refuses_devices_that_are_not_its_own() {
    let temp = tempfile::tempdir().unwrap();
    let device = temp.path().join("disk.img");
    let port = free_ports(5, 1);
    let log = temp.path().join("log");
    // It serves without it, and says why.
    let says = |extra: &[&str], parts: &[&str]| {
        let mut command = holdfast();
        command.args(["node", "--id", "1", "--grid", "00000000-0000-0000-0000-000000000001"]);
        command.args(["--listen", &format!("127.0.0.1:{port}"), "--device"]).arg(&device).args(extra);
        let mut node = command.stderr(fs::File::create(&log).unwrap()).spawn().unwrap();
        until("it is told", || {
            let told = fs::read_to_string(&log).unwrap();
            parts.iter().all(|part| told.contains(part))
        });
        node.kill().unwrap();
        node.wait().unwrap();
    };
    says(&[], &["does not exist"]);
    fs::write(&device, vec![0; 64 << 20]).unwrap();
    says(&[], &["--format-blank"]);
    fs::write(&device, vec![7; 64 << 20]).unwrap();
    says(&["--format-blank"], &["not Holdfast's", "nothing was written"]);
    assert!(fs::read(&device).unwrap().iter().all(|byte| *byte == 7));
}

#[test]
fn a_snapshot_stays_as_it_was() {
    let grid = Grid::new(9);
    grid.up("--nodes 3 --devices 1");
    grid.ok("volume create v1 --size 32MiB");
    assert!(grid.ok("snapshot list v1").contains("no snapshots"));
    let (first, second, scratch) = (grid.path("first"), grid.path("second"), grid.path("scratch"));
    pattern(&first, 16 << 20);
    fs::write(&second, vec![7; 12 << 20]).unwrap();
    nbdcopy(first.to_str().unwrap(), &grid.uri("v1"));
    let taken = grid.json("snapshot create v1 monday");
    assert_eq!((&taken["name"], &taken["size_bytes"]), (&"monday".into(), &(32_u64 << 20).into()), "{taken}");
    assert!(grid.fails("snapshot create v1 monday").contains("of that name"));
    assert!(grid.fails("snapshot create v1 a@b").contains("can't be a name"));
    assert!(grid.fails("snapshot delete v1 tuesday").contains("snapshot list v1"));
    assert!(grid.fails("snapshot create v9 monday").contains("volume list"));
    let snapshot = taken["uris"][0].as_str().unwrap();
    nbdcopy(second.to_str().unwrap(), &grid.uri("v1"));
    assert_volume_holds(snapshot, &first, &scratch);
    let refused = Command::new(needs("nbdcopy")).args([second.to_str().unwrap(), snapshot]).output().unwrap();
    assert!(!refused.status.success(), "a snapshot can't be written to");
    grid.ok("grid down");
    grid.ok("grid up");
    assert_eq!(grid.json("snapshot list v1").as_array().unwrap().len(), 1);
    grid.ok("node kill 2");
    assert_volume_holds(snapshot, &first, &scratch);
    assert_volume_holds(&grid.uri("v1"), &second, &scratch);
    grid.ok("snapshot delete v1 monday");
    assert!(grid.ok("snapshot list v1").contains("no snapshots"));
    assert_volume_holds(&grid.uri("v1"), &second, &scratch);
    // By schedule, with old ones deleted.
    assert!(grid.fails("snapshot schedule v1 --every often").contains("for example 1h"));
    grid.ok("snapshot create v1 mine");
    grid.ok("snapshot schedule v1 --every 1s --keep 2s");
    assert_eq!(grid.json("volume show v1")["schedule"], serde_json::json!({ "every": "1s", "keep": "2s" }));
    let names = || -> Vec<String> {
        let list = grid.json("snapshot list v1");
        list.as_array().unwrap().iter().map(|s| s["name"].as_str().unwrap().to_string()).collect()
    };
    let first = loop {
        if let Some(auto) = names().into_iter().find(|name| name.starts_with("auto-")) {
            break auto;
        }
    };
    while names().contains(&first) {}
    assert!(names().contains(&"mine".to_string()), "it deletes only its own");
    grid.ok("snapshot schedule v1 --off");
    assert!(grid.json("volume show v1")["schedule"].is_null());
    grid.ok("volume unexport v1");
    assert!(grid.fails("snapshot create v1 again").contains("volume export v1"));
}

#[test]
fn a_group_of_snapshots_is_taken_of_all_volumes_or_of_none() {
    let grid = Grid::new(23);
    grid.up("--nodes 3 --devices 1");
    for volume in ["db", "log", "temp"] {
        grid.ok(&format!("volume create {volume} --size 32MiB"));
    }
    let names = |volume: &str| -> Vec<String> {
        let list = grid.json(&format!("snapshot list {volume}"));
        list.as_array().unwrap().iter().map(|s| s["name"].as_str().unwrap().to_string()).collect()
    };
    let (first, scratch) = (grid.path("first"), grid.path("scratch"));
    pattern(&first, 4 << 20);
    nbdcopy(first.to_str().unwrap(), &grid.uri("log"));
    let taken = grid.json("snapshot create db monday --with log");
    assert_eq!((&taken[0]["volume"], &taken[1]["volume"]), (&"db".into(), &"log".into()), "{taken}");
    assert_eq!(taken[0]["snapshot"]["created_ms"], taken[1]["snapshot"]["created_ms"], "{taken}");
    assert_eq!((names("db"), names("log")), (vec!["monday".to_string()], vec!["monday".to_string()]));
    assert!(grid.ok("snapshot list db").contains("monday") && grid.ok("snapshot list log").contains("monday"));
    assert_volume_holds(taken[1]["snapshot"]["uris"][0].as_str().unwrap(), &first, &scratch);
    // One of them can't have it: then nobody has.
    let refused = grid.fails("snapshot create temp monday --with log");
    assert!(refused.contains("nothing is taken: volume log") && refused.contains("delete log monday"), "{refused}");
    assert_eq!(names("temp"), Vec::<String>::new());
    assert!(grid.fails("snapshot create temp tuesday --with temp").contains("named twice"));
    assert!(grid.fails("snapshot create temp tuesday --with v9").contains("volume list"));
    grid.ok("volume unexport log");
    let refused = grid.fails("snapshot create temp tuesday --with log");
    assert!(refused.contains("volume export log"), "{refused}");
    assert_eq!(names("temp"), Vec::<String>::new());
    // A clone is a member like any other, also beside its volume.
    grid.ok("volume clone db@monday copy");
    let text = grid.ok("snapshot create db tuesday --with copy --with temp");
    assert_eq!(text.lines().count(), 3, "{text}");
    assert_eq!(
        (names("db"), names("copy"), names("temp")),
        (vec!["monday".to_string(), "tuesday".to_string()], vec!["tuesday".to_string()], vec!["tuesday".to_string()])
    );
    // Answers are not held back any more.
    nbdcopy(first.to_str().unwrap(), &grid.uri("copy"));
    assert_volume_holds(&grid.uri("copy"), &first, &scratch);
}

#[test]
fn clones_begin_with_a_snapshot_and_go_their_own_ways() {
    let grid = Grid::new(10);
    grid.up("--nodes 3 --devices 1");
    grid.ok("volume create golden --size 16MiB");
    let (first, second, scratch) = (grid.path("first"), grid.path("second"), grid.path("scratch"));
    pattern(&first, 16 << 20);
    fs::write(&second, vec![7; 16 << 20]).unwrap();
    let copy = |file: &Path, name: &str| {
        nbdcopy(file.to_str().unwrap(), &grid.uri(name));
    };
    let holds = |uri: &str, file: &Path| {
        assert_volume_holds(uri, file, &scratch);
    };
    copy(&first, "golden");
    assert!(grid.fails("volume clone golden vm1").contains("snapshot create golden"));
    assert!(grid.fails("volume clone golden@v1 vm1").contains("no snapshot"));
    grid.ok("snapshot create golden v1");
    assert!(grid.fails("volume clone golden@v1 golden").contains("already"));
    assert!(grid.fails("volume clone golden@v1 small --size 8MiB").contains("at least as large"));
    let made = grid.json("volume clone golden@v1 vm1");
    assert_eq!((&made["clone_of"], &made["size_bytes"]), (&"golden".into(), &(16_u64 << 20).into()), "{made}");
    let large = grid.json("volume clone golden@v1 vm2 --size 32MiB");
    assert_eq!(large["size_bytes"], 32_u64 << 20, "{large}");
    copy(&second, "vm1");
    holds(&grid.uri("vm1"), &second);
    holds(&grid.uri("golden"), &first);
    // A clone has snapshots of its own, and clones of these.
    grid.ok("snapshot create vm1 v1");
    grid.ok("volume clone vm1@v1 vm3");
    copy(&first, "vm1");
    holds(&grid.uri("vm3"), &second);
    grid.ok("snapshot rollback vm1 v1");
    holds(&grid.uri("vm1"), &second);
    grid.ok("volume resize vm1 --size 24MiB");
    grid.ok("grid down");
    grid.ok("grid up");
    assert_eq!(grid.json("volume show vm1")["size_bytes"], 24_u64 << 20);
    grid.ok("snapshot rollback vm1 v1");
    assert_eq!(grid.json("volume show vm1")["size_bytes"], 16_u64 << 20, "the size is rolled back, too");
    grid.ok("node kill 2");
    holds(&grid.uri("vm1"), &second);
    holds(&grid.uri("vm3"), &second);
    // In any order.
    assert!(grid.fails("volume delete golden").contains("vm1, vm2, vm3"));
    assert!(grid.fails("volume unexport vm1").contains("unexport golden"));
    grid.ok("snapshot delete golden v1");
    grid.ok("volume delete vm1");
    assert!(grid.fails("volume show vm1").contains("no volume vm1"));
    holds(&grid.uri("vm3"), &second);
    grid.ok("volume delete vm2");
    grid.ok("volume delete vm3");
    holds(&grid.uri("golden"), &first);
    grid.ok("volume delete golden");
}

#[test]
fn nested_layouts_lie_on_several_devices_of_two_nodes() {
    let grid = Grid::new(24);
    grid.up("--nodes 2 --devices 3");
    let refused = grid.fails("volume create v1 --size 24MiB --layout nested-parity:3+1");
    assert!(refused.contains("2 nodes of 4 devices"), "{refused}");
    assert!(grid.fails("volume create v1 --size 24MiB --layout nested-mirror:2").contains("nested-parity:K+1"));
    grid.ok("volume create v1 --size 24MiB --layout nested-parity:2+1");
    grid.ok("volume create v2 --size 24MiB --layout nested-mirror");
    let space = grid.json("space");
    let told = |layout: &str| space["writable"].as_array().unwrap().iter().find(|w| w["layout"] == layout).cloned();
    assert_eq!(told("nested-mirror").unwrap()["efficiency"], 0.25, "{space}");
    assert!(told("nested-parity:2+1").is_some() && told("nested-parity:3+1").is_none(), "{space}");
    let (file, scratch) = (grid.path("pattern"), grid.path("scratch"));
    pattern(&file, 24 << 20);
    let wait = |name: &str| until(&format!("{name} is whole"), || is_whole(&grid, name));
    for name in ["v1", "v2"] {
        nbdcopy(file.to_str().unwrap(), &grid.uri(name));
        wait(name);
    }
    grid.ok("node kill 2");
    for name in ["v1", "v2"] {
        assert_volume_holds(&grid.uri(name), &file, &scratch);
        nbdcopy(file.to_str().unwrap(), &grid.uri(name));
    }
    grid.ok("node start 2");
    ["v1", "v2"].into_iter().for_each(wait);
    // On to another one, and back, in place.
    for layout in ["mirror:2", "nested-mirror", "nested-parity:2+1"] {
        grid.ok(&format!("volume set v1 --layout {layout}"));
        wait("v1");
    }
    assert_volume_holds(&grid.uri("v1"), &file, &scratch);
}

#[test]
fn a_rule_chooses_the_layout_for_what_there_is_and_says_what_it_costs() {
    let grid = Grid::new(26);
    grid.up("--nodes 1 --devices 2");
    assert!(grid.fails("volume create v1 --size 24MiB --layout parity:2+1").contains("for example mirror:2@device"));
    assert!(grid.ok("volume create v1 --size 24MiB --dry-run").contains("mirror:2@device"), "where nothing is said");
    let refused = grid.fails("volume create v1 --size 24MiB --protect node");
    assert!(refused.contains("needs two nodes") && refused.contains("node add"), "{refused}");
    assert!(grid.fails("volume create v1 --size 24MiB --protect rack").contains("node+device"));
    let told = grid.ok("volume create v1 --size 24MiB --protect device --dry-run");
    assert!(
        told.contains("mirror:2@device") && told.contains("50.0 %") && told.contains("48 MiB of devices"),
        "{told}"
    );
    assert!(grid.ok("volume list").contains("no volumes yet"));
    let told = grid.ok("volume create v1 --size 24MiB --protect device");
    assert!(told.contains("any device, but not its node") && told.contains("50.0 %"), "{told}");
    assert_eq!(grid.json("volume show v1")["layout"], "mirror:2@device");
    assert!(grid.ok("volume explain v1").contains("2 legs in any nodes acknowledge"));

    let (file, scratch) = (grid.path("pattern"), grid.path("scratch"));
    pattern(&file, 24 << 20);
    nbdcopy(file.to_str().unwrap(), &grid.uri("v1"));
    grid.ok("node add");
    let plan = grid.ok("volume plan");
    assert!(plan.contains("nested-mirror") && plan.contains("25.0 %"), "{plan}");
    assert_eq!(grid.json("volume plan")[1]["layout"], "mirror:2");
    for (change, layout) in [
        ("--protect node", "mirror:2"),
        ("--protect node+device", "nested-mirror"),
        ("--layout mirror:2@device", "mirror:2@device"),
    ] {
        grid.ok(&format!("volume set v1 {change}"));
        assert_eq!(grid.json("volume show v1")["layout"], layout);
        until(layout, || is_whole(&grid, "v1"));
    }
    grid.ok("node drain 2");
    grid.ok("task watch");
    until("the node can be removed", || grid.run("node remove 2").status.success());
    assert_volume_holds(&grid.uri("v1"), &file, &scratch);
}

#[test]
fn nodes_and_devices_come_and_go_with_the_data_on_them_safe() {
    let grid = Grid::new(11);
    grid.up("--nodes 4 --devices 1");
    grid.ok("volume create v1 --size 32MiB");
    let (pattern_file, scratch) = (grid.path("pattern"), grid.path("scratch"));
    pattern(&pattern_file, 32 << 20);
    nbdcopy(pattern_file.to_str().unwrap(), &grid.uri("v1"));
    let holds = || {
        assert_volume_holds(&grid.uri("v1"), &pattern_file, &scratch);
    };
    assert!(grid.fails("node remove 4").contains("device drain"));
    assert!(grid.fails("device drain 9/0").contains("no node 9"));
    // The steward moves what is not in service.
    grid.ok("volume unexport v1");
    grid.ok("node drain 4");
    grid.ok("task watch");
    assert!(grid.ok("device list").contains("drained"));
    grid.ok("volume export v1");
    assert!(grid.fails("node drain 3").contains("needs 3 nodes"), "with node 4 and node 3 gone");
    grid.ok("node remove 4");
    assert!(grid.fails("node kill 4").contains("no node 4"));
    holds();
    grid.ok("device add 3");
    grid.ok("device drain 3/0");
    grid.ok("task watch");
    grid.ok("device remove 3/0");
    holds();
    grid.ok("node add --devices 2");
    assert_eq!(grid.json("device list").as_array().unwrap().len(), 5);
    assert!(grid.fails("volume set v1 --layout parity:4+2").contains("wants 6 nodes"));
    grid.ok("volume set v1 --layout mirror:2");
    grid.ok("task watch");
    let set = grid.json("volume show v1");
    assert_eq!((&set["layout"], &set["live"]["degraded_segments"]), (&"mirror:2".into(), &0.into()), "{set}");
    holds();
    // A node that never comes back is not waited for.
    grid.ok("node kill 1");
    assert!(grid.fails("node remove 1").contains("drain"));
    grid.ok("node drain 1 --force");
    grid.ok("task watch");
    grid.ok("node remove 1 --force");
    grid.ok("grid down");
    grid.ok("grid up");
    holds();
    let status = grid.json("status");
    assert_eq!(status["nodes"].as_array().unwrap().len(), 3, "{status}");
    grid.ok("volume delete v1");
}

/// The lines of `holdfast space why` add up. Returns bytes of data, and in use.
fn adds_up(space: &Value) -> (i64, i64) {
    let bytes = |value: &Value| value.as_i64().unwrap();
    let rows = |rows: &Value| rows.as_array().unwrap().iter().map(|row| bytes(&row[1])).sum::<i64>();
    let used = &space["used"];
    let data = rows(&used["data"]);
    let parts = data
        + rows(&used["snapshots"])
        + bytes(&used["dead_bytes"])
        + bytes(&used["redundancy_bytes"])
        + bytes(&used["metadata_bytes"]);
    assert_eq!(parts + bytes(&used["other_bytes"]), bytes(&space["used_bytes"]), "{space}");
    let raw = bytes(&space["overhead_bytes"]) + bytes(&space["used_bytes"]) + bytes(&space["reserve_bytes"]);
    let free = bytes(&space["spare_bytes"]) + bytes(&space["free_bytes"]) + rows(&space["set_aside"]);
    assert_eq!(raw + free, bytes(&space["raw_bytes"]), "{space}");
    (data, bytes(&space["used_bytes"]))
}

#[test]
fn space_adds_up_and_comes_back() {
    let grid = Grid::new(12);
    // Large enough for the reserve to be a share of them.
    grid.up_with("1GiB", "--nodes 3 --devices 1");
    grid.ok("volume create v1 --size 64MiB");
    let spare = || grid.json("space")["spare_bytes"].as_u64().unwrap();
    until("the host hears that no other is older", || spare() > 0);
    let (data, before) = adds_up(&grid.json("space"));
    assert_eq!(data, 0);
    let (file, scratch) = (grid.path("pattern"), grid.path("scratch"));
    pattern(&file, 64 << 20);
    nbdcopy(file.to_str().unwrap(), &grid.uri("v1"));
    until("all of it is in segments", || adds_up(&grid.json("space why")).0 == 64 << 20);
    // Devices tell a moment later than volumes.
    until("with parity devices hold more", || adds_up(&grid.json("space why")).1 > 96 << 20);
    assert_volume_holds(&grid.uri("v1"), &file, &scratch);
    assert!(grid.ok("space").contains("parity:2+1"));
    for told in [grid.json("space"), grid.json("status")] {
        assert!(told.as_object().unwrap().contains_key("days_to_full") && told["days_to_full"].is_null(), "{told}");
    }
    assert!(grid.ok("space why").contains("copies and parity"));
    grid.ok("volume delete v1 --now");
    grid.ok("task watch");
    // Copies of the metadata are there since.
    until("everything is back", || {
        let (data, after) = adds_up(&grid.json("space"));
        data == 0 && after < before + (8 << 20)
    });
}

/// Pipes what one command writes into another, on another grid; returns what both say.
fn pipe(from: &Grid, send: &str, to: &Grid, receive: &str) -> (Output, Output) {
    let command = |grid: &Grid, line: &str| {
        let mut command = holdfast();
        command.args(line.split_whitespace()).arg("--json").arg("--dir").arg(grid.dir.path());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    let mut sender = command(from, send).spawn().unwrap();
    let receiver = command(to, receive).stdin(sender.stdout.take().unwrap()).output().unwrap();
    (sender.wait_with_output().unwrap(), receiver)
}

fn piped(from: &Grid, send: &str, to: &Grid, receive: &str) -> Value {
    let (sent, received) = pipe(from, send, to, receive);
    let said = [text(&sent.stderr), text(&received.stderr)].concat();
    assert!(sent.status.success() && received.status.success(), "{send} | {receive}: {said}");
    serde_json::from_slice(&received.stdout).unwrap()
}

fn pipe_fails(from: &Grid, send: &str, to: &Grid, receive: &str) -> String {
    let (_, received) = pipe(from, send, to, receive);
    assert!(!received.status.success(), "{send} | {receive} succeeded");
    text(&received.stderr)
}

#[test]
fn snapshots_are_sent_from_grid_to_grid_whole_and_by_what_changed() {
    let (here, there) = (Grid::new(20), Grid::new(21));
    here.up("--nodes 3 --devices 1");
    there.up("--nodes 2 --devices 1");
    here.ok("volume create v1 --size 32MiB --layout mirror:2");
    let (first, second, scratch) = (here.path("first"), here.path("second"), here.path("scratch"));
    pattern(&first, 16 << 20);
    fs::write(&second, vec![7; 4 << 20]).unwrap();
    let write = |grid: &Grid, volume: &str, file: &Path| nbdcopy(file.to_str().unwrap(), &grid.uri(volume));
    let mixed = here.path("mixed");
    fs::write(&mixed, [fs::read(&second).unwrap(), fs::read(&first).unwrap()[4 << 20..].to_vec()].concat()).unwrap();
    write(&here, "v1", &first);
    here.ok("snapshot create v1 monday");
    write(&here, "v1", &second);
    here.ok("snapshot create v1 tuesday");
    let sent = piped(&here, "send v1@monday", &there, "receive copy");
    assert_eq!((&sent["snapshot"], &sent["data_bytes"]), (&"monday".into(), &(16_u64 << 20).into()), "{sent}");
    assert_eq!(there.json("volume show copy")["exported"], false);
    let changed = here.json("changes v1@tuesday --from monday");
    assert_eq!(changed, serde_json::json!([{ "offset": 0, "length": 4 << 20 }]));
    let refused = pipe_fails(&here, "send --from monday v1@tuesday", &there, "receive other");
    assert!(refused.contains("send v1@monday"), "{refused}");
    let sent = piped(&here, "send --from monday v1@tuesday", &there, "receive copy");
    assert_eq!(sent["data_bytes"], 4 << 20, "only what changed: {sent}");
    let refused = pipe_fails(&here, "send --from monday v1@tuesday", &there, "receive copy");
    assert!(refused.contains("already"), "{refused}");
    there.ok("volume export copy");
    assert_volume_holds(&there.uri("copy"), &mixed, &scratch);
    assert_volume_holds(&there.uri("copy").replace("copy", "copy@monday"), &first, &scratch);
    let refused = pipe_fails(&here, "send v1@tuesday", &there, "receive copy");
    assert!(refused.contains("volume unexport copy"), "{refused}");

    // What was written there since is not lost without a word.
    write(&there, "copy", &first);
    there.ok("volume unexport copy");
    here.ok("snapshot create v1 wednesday");
    let refused = pipe_fails(&here, "send --from tuesday v1@wednesday", &there, "receive copy");
    assert!(refused.contains("snapshot rollback copy tuesday"), "{refused}");
    there.ok("volume export copy");
    assert_volume_holds(&there.uri("copy"), &first, &scratch);
    there.ok("snapshot rollback copy tuesday");
    there.ok("volume unexport copy");
    piped(&here, "send --from tuesday v1@wednesday", &there, "receive copy");

    // And back again, what changed there, with another size.
    there.ok("volume export copy");
    there.ok("volume resize copy --size 48MiB");
    write(&there, "copy", &first);
    there.ok("snapshot create copy thursday");
    here.ok("volume unexport v1");
    piped(&there, "send --from wednesday copy@thursday", &here, "receive v1");
    here.ok("volume export v1");
    assert_eq!(here.json("volume show v1")["size_bytes"], 48 << 20);
    assert_volume_holds(&here.uri("v1"), &first, &scratch);
}

#[test]
fn a_stream_that_breaks_off_is_gone_on_with() {
    let grid = Grid::new(22);
    grid.up("--nodes 2 --devices 1");
    grid.ok("volume create v1 --size 32MiB --layout mirror:2");
    let (first, scratch) = (grid.path("first"), grid.path("scratch"));
    pattern(&first, 16 << 20);
    nbdcopy(first.to_str().unwrap(), &grid.uri("v1"));
    grid.ok("snapshot create v1 monday");
    let stream = grid.run("send v1@monday").stdout;
    let receive = |stream: &[u8], name: &str| {
        let file = grid.path("stream");
        fs::write(&file, stream).unwrap();
        let mut command = holdfast();
        command.args(["receive", name, "--dir"]).arg(grid.dir.path()).stdin(fs::File::open(&file).unwrap());
        command.output().unwrap()
    };
    assert!(text(&receive(&stream[..20], "v2").stderr).contains("ends before its end"));
    assert!(text(&receive(b"something else, and long enough to be a head", "v2").stderr).contains("is no stream"));
    assert!(grid.fails("volume show v2").contains("no volume v2"));
    let cut = receive(&stream[..stream.len() / 2], "v2");
    assert!(text(&cut.stderr).contains("receive --resume-token v2"), "{}", text(&cut.stderr));
    let refused = grid.fails("volume export v2");
    assert!(refused.contains("send --resume v1@monday/at="), "{refused}");
    let refused = grid.fails("volume resize v2 --size 64MiB");
    assert!(refused.contains("part of a stream") && refused.contains("receive --abandon v2"), "{refused}");
    assert!(grid.fails("receive --abandon v2").contains("volume delete v2"), "there is nothing else in it");
    let token = grid.ok("receive --resume-token v2");
    let mut rest = grid.run(&format!("send --resume {token}")).stdout;
    assert!(rest.len() < stream.len() / 2 + (2 << 20), "only the rest is sent");
    // Damage is found, and nothing of what had come is lost.
    let at = rest.len() / 2;
    rest[at] ^= 1;
    assert!(text(&receive(&rest, "v2").stderr).contains("was damaged"));
    grid.ok("grid down");
    grid.ok("grid up");
    let token = grid.ok("receive --resume-token v2");
    piped(&grid, &format!("send --resume {}", token.trim()), &grid, "receive v2");
    assert!(grid.fails("receive --resume-token v2").contains("no part of a stream"));
    grid.ok("volume export v2");
    assert_volume_holds(&grid.uri("v2"), &first, &scratch);
    assert_volume_holds(&grid.uri("v2").replace("v2", "v2@monday"), &first, &scratch);

    // A part of what changed is given up, and the volume is as it was.
    let second = grid.path("second");
    fs::write(&second, vec![9; 16 << 20]).unwrap();
    nbdcopy(second.to_str().unwrap(), &grid.uri("v1"));
    grid.ok("snapshot create v1 tuesday");
    grid.ok("volume unexport v2");
    grid.ok("volume resize v2 --size 8MiB --shrink");
    let refused = pipe_fails(&grid, "send --from monday v1@tuesday", &grid, "receive v2");
    assert!(refused.contains("cut off"), "{refused}");
    grid.ok("volume export v2");
    grid.ok("snapshot rollback v2 monday");
    grid.ok("volume unexport v2");
    let stream = grid.run("send --from monday v1@tuesday").stdout;
    assert!(!receive(&stream[..stream.len() / 2], "v2").status.success());
    assert!(grid.fails("snapshot delete v2 monday").contains("part of a stream"));
    grid.ok("receive --abandon v2");
    grid.ok("volume export v2");
    assert_volume_holds(&grid.uri("v2"), &first, &scratch);
    grid.ok("volume unexport v2");
    piped(&grid, "send --from monday v1@tuesday", &grid, "receive v2");
    grid.ok("volume export v2");
    assert_volume_holds(&grid.uri("v2"), &second, &scratch);
}

/// Waits until the command goes through, which may be refused for a while.
fn until_ok(grid: &Grid, line: &str) {
    let end = Instant::now() + PATIENCE;
    loop {
        let output = grid.run(line);
        if output.status.success() {
            return;
        }
        assert!(Instant::now() < end, "{line}: {}", text(&output.stderr));
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_node_is_stopped_only_while_nothing_else_is_missing() {
    let grid = Grid::new(13);
    grid.up("--nodes 3 --devices 1");
    // Without a volume there is nothing to lose.
    grid.ok("node stop 3");
    assert!(grid.ok("node stop 3").contains("was stopped"));
    grid.ok("node start 3");
    grid.ok("volume create v1 --size 32MiB --layout mirror:2");
    let (file, scratch) = (grid.path("pattern"), grid.path("scratch"));
    pattern(&file, 32 << 20);
    nbdcopy(file.to_str().unwrap(), &grid.uri("v1"));
    until_ok(&grid, "node stop 2");
    assert_eq!(grid.node_state(2), "down");
    let refusal = grid.fails("node stop 3");
    for part in ["node 2 is down", "volume v1", " s: what it held"] {
        assert!(refusal.contains(part), "{part}: {refusal}");
    }
    assert!(!refusal.contains("--force"), "nothing is advised that lowers redundancy: {refusal}");
    grid.wait_for_node(3, "up");
    grid.ok("node start 2");
    until_ok(&grid, "node stop 3");
    grid.ok("node start 3");
    grid.wait_for_node(3, "up");
    grid.ok("node hang 1");
    assert!(grid.fails("node stop 2").contains("node 1 is down or hangs"), "seen at once");
    grid.ok("node stop 2 --force");
    assert_eq!(grid.node_state(2), "down");
    grid.ok("node resume 1");
    grid.ok("node start 2");
    assert_volume_holds(&grid.uri("v1"), &file, &scratch);
}

#[test]
fn a_restart_that_can_never_be_is_not_waited_for_and_numbers_of_nodes_are_not_used_again() {
    let grid = Grid::new(64);
    grid.up("--nodes 2 --devices 1");
    grid.ok("volume create v1 --size 32MiB --layout mirror:2");
    let refusal = grid.fails("node restart 1");
    assert!(refusal.contains("1 device would be left") && refusal.contains("`holdfast node add`"), "{refusal}");
    grid.ok("node add");
    grid.ok("node drain 3");
    grid.ok("task watch");
    until_ok(&grid, "node remove 3");
    assert!(grid.ok("node add").contains("node 4 is added"));
    until_ok(&grid, "node restart 1");
    // One that is down and that no volume misses is in nobody's way.
    grid.ok("node add");
    grid.ok("node kill 5");
    until_ok(&grid, "node stop 1");
}

#[test]
fn a_grid_is_not_stopped_under_the_hands_of_clients() {
    let grid = Grid::new(14);
    grid.up("--nodes 3 --devices 1");
    grid.ok("volume create v1 --size 16MiB");
    let client = greeted_client(&grid, "v1");
    let refusal = grid.fails("grid down");
    assert!(refusal.contains("v1 (1)") && refusal.contains("--force"), "{refusal}");
    assert_eq!(grid.json("status")["host"]["state"], "up");
    grid.ok("grid down --force");
    drop(client);
    grid.ok("grid up");
    grid.ok("grid down");
}

/// A client of a volume that has come to the end of the handshake of the oldest kind, and does nothing more.
fn greeted_client(grid: &Grid, volume: &str) -> std::os::unix::net::UnixStream {
    greeted_client_of(grid, volume, 16 << 20)
}

fn greeted_client_of(grid: &Grid, volume: &str, size: u64) -> std::os::unix::net::UnixStream {
    let mut stream = std::os::unix::net::UnixStream::connect(grid.path("nbd.sock")).unwrap();
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting).unwrap();
    assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
    // Fixed newstyle, no zeroes; then NBD_OPT_EXPORT_NAME, which ends the handshake.
    stream.write_all(&3_u32.to_be_bytes()).unwrap();
    stream.write_all(b"IHAVEOPT").unwrap();
    stream.write_all(&1_u32.to_be_bytes()).unwrap();
    stream.write_all(&(volume.len() as u32).to_be_bytes()).unwrap();
    stream.write_all(volume.as_bytes()).unwrap();
    let mut export = [0; 10];
    stream.read_exact(&mut export).unwrap();
    assert_eq!(export[..8], size.to_be_bytes());
    stream
}

#[test]
fn what_a_flush_costs_is_measured_when_a_device_is_added_and_shown() {
    let grid = Grid::new(15);
    grid.up("--nodes 2 --devices 1");
    grid.ok("device add 2");
    let measured = || -> Vec<u64> {
        let devices = grid.json("device list");
        devices.as_array().unwrap().iter().map(|row| row["device"]["flush_us"].as_u64().unwrap()).collect()
    };
    let costs = measured();
    assert_eq!(costs.len(), 3);
    assert!(costs.iter().all(|us| *us > 0), "{costs:?}");
    let list = grid.ok("device list");
    assert!(list.contains("FLUSH") && list.contains(" ms"), "{list}");
    // It stands on the device.
    grid.ok("grid down");
    grid.ok("grid up");
    assert_eq!(measured(), costs);
}

#[test]
fn what_a_device_is_made_of_can_be_set() {
    let grid = Grid::new(44);
    grid.up("--nodes 2 --devices 2");
    let row = |place: usize| grid.json("device list").as_array().unwrap()[place]["device"].clone();
    assert_eq!(row(1)["class_set"], false);
    let detected = row(1)["class"].clone();
    let set = grid.json("device class 1/1 hdd");
    assert_eq!((&set["class"], &set["class_set"]), (&"hdd".into(), &true.into()), "{set}");
    let set = grid.ok(&format!("device class {} nvme", row(0)["device"].as_str().unwrap()));
    assert!(set.contains("is nvme, as it was set"), "{set}");
    assert_eq!((&row(1)["class"], &row(0)["class"]), (&"hdd".into(), &"nvme".into()));
    let list = grid.ok("device list");
    assert!(list.contains("CLASS") && list.contains("hdd (set)"), "{list}");
    // It stands on the device.
    grid.ok("grid down");
    grid.ok("grid up");
    assert_eq!((&row(1)["class"], &row(1)["class_set"]), (&"hdd".into(), &true.into()));
    let unset = grid.json("device class 1/1 auto");
    assert_eq!((&unset["class"], &unset["class_set"]), (&detected, &false.into()), "{unset}");
    assert_eq!(row(1)["class_set"], false);
    assert!(grid.ok("device class 1/0").contains("as it was set"));

    assert!(grid.fails("device class 1/7 ssd").contains("node 1 has 2 devices"));
    assert!(grid.fails("device class 1/0 tape").contains("[possible values: nvme, ssd, hdd, auto]"));
    assert!(grid.fails("device class f00 ssd").contains("`holdfast device list` shows them"));
    grid.ok("node kill 2");
    let error = grid.fails("device class 2/0 ssd");
    assert!(error.contains("node 2 is out of reach") && error.contains("try again"), "{error}");
}

#[test]
fn a_fixed_volume_can_be_written_to_its_end_when_thin_ones_find_no_more_room() {
    let grid = Grid::new(16);
    grid.up("--nodes 3 --devices 1");
    let made = grid.json("volume create db --size 96MiB --provisioning fixed");
    let owned = (96 << 20) / 16 * 17 / 2 * 3_u64;
    assert_eq!((&made["provisioning"], &made["set_aside_bytes"]), (&"fixed".into(), &owned.into()), "{made}");
    let refused = grid.fails("volume create more --size 512MiB --provisioning fixed");
    assert!(refused.contains("is free beside") && refused.contains("--provisioning thin"), "{refused}");
    assert!(grid.ok("volume list").contains("db") && !grid.ok("volume list").contains("more"));
    assert!(grid.fails("volume resize db --size 600MiB").contains("device add"));
    adds_up(&grid.json("space why"));
    assert!(grid.ok("space why").contains("set aside for volume db"));

    grid.ok("volume create thin --size 1GiB");
    assert!(grid.fails("volume set thin --provisioning fixed").contains("set aside in layout parity:2+1"));
    assert!(grid.fails("volume set thin").contains("--layout"));
    let (file, large, scratch) = (grid.path("pattern"), grid.path("large"), grid.path("scratch"));
    pattern(&file, 96 << 20);
    pattern(&large, 768 << 20);
    let copied = Command::new(needs("nbdcopy")).args([large.to_str().unwrap(), &grid.uri("thin")]).output().unwrap();
    assert!(!copied.status.success() && text(&copied.stderr).contains("No space"), "{}", text(&copied.stderr));
    adds_up(&grid.json("space why"));
    nbdcopy(file.to_str().unwrap(), &grid.uri("db"));
    // Again, and again: what is overwritten is cleaned.
    nbdcopy(file.to_str().unwrap(), &grid.uri("db"));
    nbdcopy(file.to_str().unwrap(), &grid.uri("db"));
    assert_volume_holds(&grid.uri("db"), &file, &scratch);
    let left = || grid.json("volume show db")["set_aside_bytes"].as_u64().unwrap();
    until("what is written is not set aside any more", || left() < owned / 2);
    adds_up(&grid.json("space why"));
    assert!(grid.fails("snapshot create db monday").contains("after a snapshot"));
    grid.ok("volume unexport db");
    let closed = grid.json("volume show db");
    grid.ok("grid down");
    grid.ok("grid up");
    let after = grid.json("volume show db");
    assert_eq!(after["provisioning"], "fixed");
    assert_eq!(after["set_aside_bytes"], closed["set_aside_bytes"], "it stands while the volume is not in service");
    grid.ok("volume delete thin --now");
    grid.ok("task watch");
    grid.ok("volume export db");
    grid.ok("snapshot create db monday");
    let taken = grid.json("volume show db");
    assert_eq!(taken["set_aside_bytes"], owned, "all of it can be written once more: {taken}");
    assert!(grid.fails("volume clone db@monday db2").contains("--provisioning thin"));
    grid.ok("volume set db --provisioning thin");
    let thin = grid.json("volume show db");
    assert_eq!((&thin["provisioning"], &thin["set_aside_bytes"]), (&"thin".into(), &0.into()), "{thin}");
    grid.ok("volume clone db@monday db2");
    assert!(grid.fails("volume set db --provisioning fixed").contains("has clones"));
    grid.ok("volume delete db2");
    let fixed = grid.json("volume set db --provisioning fixed");
    assert_eq!(fixed["set_aside_bytes"], owned, "{fixed}");
    adds_up(&grid.json("space why"));
}

/// Flips a bit in the one place where the devices of the grid, which is down, hold some block of what was written; says which.
/// A block that is there more often has a copy, or a parity like itself, and both would be damaged.
fn damage(grid: &Grid, written: &[u8], journal_bytes: u64) -> usize {
    let mut places: HashMap<&[u8], Vec<(PathBuf, usize)>> =
        written.chunks_exact(4096).skip(100).step_by(64).map(|block| (block, Vec::new())).collect();
    for device in fs::read_dir(grid.path("devices")).unwrap() {
        let path = device.unwrap().path();
        let bytes = fs::read(&path).unwrap();
        // Journals may hold it, too.
        for (at, block) in bytes.chunks_exact(4096).enumerate().skip(journal_bytes as usize / 4096 + 256) {
            if let Some(places) = places.get_mut(block) {
                places.push((path.clone(), at));
            }
        }
    }
    let single = written.chunks_exact(4096).position(|block| places.get(block).is_some_and(|found| found.len() == 1));
    let block = single.expect("some block is there once");
    let (path, at) = &places[&written[block * 4096..(block + 1) * 4096]][0];
    let mut bytes = fs::read(path).unwrap();
    bytes[at * 4096 + 77] ^= 4;
    fs::write(path, &bytes).unwrap();
    block
}

#[test]
fn damage_is_read_around_or_with_integrity_off_left_to_the_scrub() {
    let grid = Grid::new(17);
    grid.up("--nodes 3 --devices 1");
    let made = grid.json("volume create fast --size 32MiB --integrity off");
    assert_eq!(made["integrity"], "off", "{made}");
    assert_eq!(grid.json("volume create safe --size 32MiB")["integrity"], "on");
    let (file, scratch) = (grid.path("pattern"), grid.path("scratch"));
    pattern(&file, 16 << 20);
    let differing = |volume: &str| -> Vec<usize> {
        nbdcopy(&grid.uri(volume), scratch.to_str().unwrap());
        let (written, found) = (fs::read(&file).unwrap(), fs::read(&scratch).unwrap());
        let blocks = written.chunks_exact(4096).zip(found.chunks_exact(4096));
        blocks.enumerate().filter(|(_, (written, found))| written != found).map(|(i, _)| i).collect()
    };
    let journal_bytes = grid.json("status")["nodes"][0]["devices"][0]["journal_bytes"].as_u64().unwrap();
    let write_and_damage = |volume: &str| {
        nbdcopy(file.to_str().unwrap(), &grid.uri(volume));
        grid.ok("grid down");
        let block = damage(&grid, &fs::read(&file).unwrap(), journal_bytes);
        grid.ok("grid up");
        block
    };
    write_and_damage("safe");
    // What comes late is computed from other shards: then the damage is not met.
    until("the damage is met", || {
        assert!(differing("safe").is_empty());
        grid.json("volume show safe")["live"]["counters"]["checksum_errors"].as_u64() > Some(0)
    });
    grid.ok("task watch");
    grid.ok("volume delete safe --now");
    grid.ok("task watch");
    // Other bytes: those of the volume before may still lie where nothing is now.
    let inverted: Vec<u8> = fs::read(&file).unwrap().iter().map(|byte| !byte).collect();
    fs::write(&file, inverted).unwrap();
    let damaged = write_and_damage("fast");
    // A read that came late may have met it, and had it repaired.
    let repaired = || grid.json("volume show fast")["live"]["counters"]["shards_rebuilt"].as_u64() > Some(0);
    // What comes late is computed from other shards, which are checked: then the block is right.
    until("the damage is handed out", || differing("fast") == [damaged] || repaired());
    let repaired_early = repaired();
    // A tour of a few seconds.
    grid.ok("grid down");
    let config = fs::read_to_string(grid.path("grid.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["host"]["scrub_every_s"] = 2.into();
    fs::write(grid.path("grid.json"), config.to_string()).unwrap();
    grid.ok("grid up");
    until("a scrub has found the damage", || differing("fast").is_empty());
    let shown = grid.json("volume show fast");
    assert_eq!(shown["integrity"], "off", "over restarts: {shown}");
    // Until the scrub has come to it, what is right may have been computed from other shards.
    until("it is repaired", || repaired_early || repaired());
    assert!(grid.ok("volume set fast --integrity on").contains("is checked"));
    assert_eq!(grid.json("volume show fast")["integrity"], "on");
    assert!(differing("fast").is_empty());
}

#[test]
fn a_volume_is_drawn_from_its_clients_down_to_devices() {
    let grid = Grid::new(25);
    grid.up("--nodes 3 --devices 1");
    grid.ok("volume create v1 --size 64MiB");
    let file = grid.path("pattern");
    pattern(&file, 24 << 20);
    nbdcopy(file.to_str().unwrap(), &grid.uri("v1"));
    until("it is in segments", || grid.json("volume show v1")["live"]["segments"].as_u64() > Some(0));
    is_settled(&grid);
    let _client = greeted_client_of(&grid, "v1", 64 << 20);
    let sum =
        |list: &Value, name: &str| list.as_array().unwrap().iter().map(|p| p[name].as_u64().unwrap()).sum::<u64>();
    let count = |told: &Value, state: &str| {
        let legs = told["parts"]["log"]["open"]["legs"].as_array().unwrap();
        legs.iter().filter(|leg| leg["state"] == state).count()
    };
    let mut told = Value::Null;
    // On a busy machine a node may be late, and something more be written, just now.
    until("two legs take entries, one client is there, and all segments were when the volume was told of", || {
        told = grid.json("volume explain v1");
        (count(&told, "appending"), count(&told, "standby")) == (2, 1)
            && told["volume"]["sessions"] == 1
            && sum(&told["parts"]["segments"], "segments") == told["volume"]["live"]["segments"].as_u64().unwrap()
            // What is still in the log only is a few entries: with parity there is more.
            && sum(&told["parts"]["devices"], "bytes") >= 24 << 20
    });
    let (volume, parts) = (&told["volume"], &told["parts"]);
    for figure in ["shards", "bytes"] {
        assert_eq!(
            sum(&parts["segments"], figure),
            sum(&parts["devices"], figure),
            "every shard is somewhere: {parts}"
        );
    }
    let open = &parts["log"]["open"];
    assert_eq!((&open["copies"], &open["nodes"]), (&2.into(), &2.into()), "{open}");
    assert_eq!(told["nodes"].as_array().unwrap().len(), 3);
    let counters = &volume["live"]["counters"];
    assert!(counters["write_bytes"].as_u64() >= Some(24 << 20), "{counters}");

    let drawn = grid.ok("volume explain v1");
    let at =
        |part: &str| drawn.lines().position(|line| line.starts_with(part)).unwrap_or_else(|| panic!("{part}: {drawn}"));
    let order = ["volume ", "front end ", "controller ", "log ", "layout ", "nodes "].map(at);
    assert!(order.is_sorted(), "{drawn}");
    assert!(drawn.contains("NBD, 1 client connected") && drawn.contains("2 legs in 2 nodes acknowledge"), "{drawn}");
    let is_uri = |line: &str| line.contains("nbd+unix:");
    for line in drawn.lines().filter(|line| !is_uri(line)) {
        assert!(line.chars().count() <= 100, "{} columns: {line}", line.chars().count());
    }
    grid.ok("node kill 2");
    until("node 2 is seen to be down", || {
        let told = grid.json("volume explain v1");
        told["nodes"][1]["link"] == "down" && grid.ok("volume explain v1").contains("down")
    });
    grid.ok("node start 2");
    grid.ok("volume unexport v1 --force");
    let closed = grid.ok("volume explain v1");
    assert!(closed.contains("it is closed") && !closed.contains("front end"), "{closed}");
    assert!(grid.json("volume explain v1")["parts"].is_null());
    assert!(grid.fails("volume explain v9").contains("volume list"));
}

/// Waits until no segment is being written.
fn is_settled(grid: &Grid) {
    until("nothing is being written", || {
        let first = grid.json("volume explain v1")["parts"].clone();
        std::thread::sleep(Duration::from_millis(300));
        let second = grid.json("volume explain v1")["parts"].clone();
        first["jobs"] == 0 && first["segments"] == second["segments"]
    });
}
