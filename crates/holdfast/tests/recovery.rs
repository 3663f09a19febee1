//! The metadata store is lost, and comes back from what the nodes hold.

mod support;

use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use support::*;

fn volume<'a>(report: &'a Value, name: &str) -> &'a Value {
    let volumes = report["volumes"].as_array().unwrap();
    volumes.iter().find(|volume| volume["name"] == name).unwrap_or_else(|| panic!("{name} is in {report}"))
}

#[test]
fn a_grid_whose_metadata_file_is_gone_has_all_its_volumes_back() {
    let grid = Grid::new(0);
    grid.up("--nodes 3");
    grid.ok("volume create v1 --size 64MiB");
    grid.ok("volume create never --size 16MiB");
    let (file, scratch) = (grid.path("pattern"), grid.path("scratch"));
    pattern(&file, 64 << 20);
    nbdcopy(file.to_str().unwrap(), &grid.uri("v1"));
    grid.ok("snapshot create v1 s1");
    grid.ok("volume clone v1@s1 apart --separate");
    // What it says while the grid runs is no file to be imported.
    let exported = grid.path("running.json");
    // Named alone it is where the command is.
    let mut export = holdfast();
    export.args(["meta", "export", "running.json", "--dir"]).arg(grid.dir.path()).current_dir(grid.dir.path());
    let output = export.output().unwrap();
    assert!(output.status.success() && exported.exists(), "{}", text(&output.stderr));
    // So that a copy is told from one of when it was being made.
    grid.ok("volume protect apart on");
    until("the records are on the devices", || has_copies(&[&grid], "name/apart", "\"protected\":true"));
    // Copies need not know of what came just now.
    grid.ok("volume create late --size 16MiB");
    assert!(grid.json("status")["volumes"].as_array().unwrap().iter().all(|v| v["live"]["recoverable"] != false));
    // Nothing is emptied or closed.
    grid.kill_host().unwrap();
    let refused = grid.fails(&format!("meta import {} --embedded --replace", exported.display()));
    assert!(refused.contains("while the grid was running") && refused.contains("meta recover --from"), "{refused}");
    let refused = grid.fails("meta recover");
    assert!(refused.contains("nothing has to be recovered") && refused.contains("--replace"), "{refused}");
    fs::remove_file(grid.path("meta.redb")).unwrap();
    let refused = grid.fails("grid up");
    assert!(refused.contains("is missing") && refused.contains("holdfast meta recover"), "{refused}");

    // It shows what it would do, and changes nothing.
    let shown = grid.json("meta recover");
    assert_eq!((&shown["done"], &shown["devices"]), (&Value::Bool(false), &Value::from(6)), "{shown}");
    assert!(!grid.path("meta.redb").exists());
    // A node that does not answer may hold a newer root: nothing is taken then.
    grid.ok("node stop 2 --force");
    fs::rename(grid.path("devices/node2-0.img"), grid.path("away")).unwrap();
    let found = grid.json("meta recover");
    assert!(volume(&found, "v1")["doubt"].as_str().unwrap().contains("did not answer"), "{found}");
    assert!(found["silent"][0].as_str().unwrap().contains("device"), "{found}");
    fs::rename(grid.path("away"), grid.path("devices/node2-0.img")).unwrap();
    grid.ok("node stop 2 --force");

    let done = grid.json("meta recover --yes");
    for name in ["v1", "never", "apart", "late"] {
        assert_eq!(volume(&done, name)["doubt"], Value::Null, "{done}");
    }
    grid.ok("grid up");
    for name in ["v1", "apart"] {
        grid.ok(&format!("volume export {name}"));
        assert_volume_holds(&grid.uri(name), &file, &scratch);
    }
    for name in ["never", "late"] {
        grid.ok(&format!("volume export {name}"));
        nbdcopy(file.to_str().unwrap(), &grid.uri("v1"));
    }
    assert!(grid.ok("snapshot list v1").contains("s1"));
    until("everything is whole", || is_whole(&grid, "v1") && is_whole(&grid, "apart"));
    // What was made of it holds its segments still.
    grid.ok("snapshot delete v1 s1");
    assert_volume_holds(&grid.uri("apart"), &file, &scratch);

    // Found while a node is away for good, and taken by command.
    grid.kill_host().unwrap();
    grid.ok("node stop 3 --force");
    fs::rename(grid.path("devices/node3-0.img"), grid.path("gone")).unwrap();
    let done = grid.json("meta recover --replace --yes");
    assert!(volume(&done, "v1")["doubt"].is_string(), "{done}");
    grid.ok("grid up");
    let status = grid.run("status");
    let told = text(&status.stdout);
    assert!(told.contains("was found when the metadata were lost") && told.contains("--accept v1"), "{told}");
    assert!(grid.fails("volume export v1").contains("v1"));
    grid.ok("grid down --host");
    grid.ok("meta recover --accept v1 --yes");
    grid.ok("grid up");
    grid.ok("volume export v1");
    assert_volume_holds(&grid.uri("v1"), &file, &scratch);

    // What was made of it is only found, and holds its segments all the same.
    let refused = grid.fails("volume export apart");
    assert!(refused.contains("--accept apart"), "{refused}");
    let other = grid.path("other");
    fs::write(&other, fs::read(&file).unwrap().iter().map(|byte| !byte).collect::<Vec<u8>>()).unwrap();
    for _ in 0..2 {
        nbdcopy(other.to_str().unwrap(), &grid.uri("v1"));
    }
    let freed = || grid.json("volume show v1")["live"]["counters"]["segments_freed"].as_u64();
    until("its former segments are freed", || freed() > Some(8));
    grid.ok("grid down --host");
    grid.ok("meta recover --accept apart --yes");
    grid.ok("grid up");
    grid.ok("volume export apart");
    assert_volume_holds(&grid.uri("apart"), &file, &scratch);
    assert_volume_holds(&grid.uri("v1"), &other, &scratch);
}

/// With 32 bytes of its own.
fn key_file(grid: &Grid, name: &str) -> String {
    let path = grid.path(name);
    fs::write(&path, format!("{name:x<64}").bytes().map(|byte| format!("{:x}", byte % 16)).collect::<String>())
        .unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    path.to_str().unwrap().to_string()
}

#[test]
fn a_key_is_on_devices_before_anybody_is_told_that_its_volume_is_there() {
    let grid = Grid::new(1);
    grid.up("--nodes 3 --devices 1");
    let (first, second) = (key_file(&grid, "first"), key_file(&grid, "second"));
    // The steward has just written a copy after each, and waits for its next turn.
    for name in ["v0", "v1", "v2"] {
        let made = grid.json(&format!("volume create {name} --size 32MiB --encrypt --key-file {first}"));
        assert_eq!(made["warning"], Value::Null, "{made}");
        let key = format!("volume/{}/key", made["id"].as_str().unwrap());
        assert!(has_copies(&[&grid], &key, &first), "{name}");
    }
    let (file, scratch) = (grid.path("pattern"), grid.path("scratch"));
    pattern(&file, 32 << 20);
    nbdcopy(file.to_str().unwrap(), &grid.uri("v0"));
    grid.ok("snapshot create v0 s");
    let copy = grid.json("volume clone v0@s apart --separate");
    assert!(has_copies(&[&grid], &format!("volume/{}/key", copy["id"].as_str().unwrap()), &first));
    let changed = grid.json(&format!("volume rekey v0 --key-file {second}"));
    assert!(has_copies(&[&grid], &format!("volume/{}/key", changed["id"].as_str().unwrap()), &second));
    grid.kill_host().unwrap();
    fs::remove_file(grid.path("meta.redb")).unwrap();
    fs::remove_file(grid.path("keys.json")).unwrap();
    grid.ok("meta recover --yes");
    grid.ok("grid up");
    for (name, key) in [("v0", &second), ("apart", &first)] {
        grid.ok(&format!("volume export {name} --key-file {key}"));
        assert_volume_holds(&grid.uri(name), &file, &scratch);
    }

    // Where no device can take it, that is said, and what helps does.
    for node in 1..=3 {
        grid.ok(&format!("node stop {node} --force"));
    }
    let told = grid.run(&format!("volume create late --size 16MiB --no-export --encrypt --key-file {first}"));
    let warning = text(&told.stderr);
    assert!(told.status.success(), "{warning}");
    for part in ["warning: volume late", "0 of the 2 nodes", "node 3 at", "holdfast volume rekey late"] {
        assert!(warning.contains(part), "{part}: {warning}");
    }
    for node in 1..=3 {
        grid.ok(&format!("node start {node}"));
    }
    until("all nodes are up", || (1..=3).all(|node| grid.node_state(node) == "up"));
    // A node that is late for it just now is told of.
    until("its key is on devices", || {
        let told = grid.run(&format!("volume rekey late --key-file {first}"));
        told.status.success() && !text(&told.stderr).contains("warning")
    });
}

#[test]
fn all_of_etcd_is_emptied_under_load_and_every_acknowledged_byte_is_there() {
    let store = tempfile::tempdir().unwrap();
    let member = etcd(store.path(), 97);
    let endpoint = member.config().endpoint();
    let (a, b) = (Grid::new(2), Grid::new(3));
    a.up(&format!("--nodes 1 --devices 1 --etcd {endpoint} --address 127.0.0.1 --name a"));
    let token = a.ok("grid token").trim().to_string();
    b.up(&format!("--nodes 1 --devices 1 --etcd {endpoint} --address 127.0.0.1 --name b --join {token}"));
    a.ok("volume create v1 --size 32MiB --layout mirror:2");
    b.ok("volume create v2 --size 32MiB --layout mirror:2");
    let (first, second, scratch) = (a.path("first"), a.path("second"), a.path("scratch"));
    pattern(&first, 16 << 20);
    pattern(&second, 32 << 20);
    let uris = [a.uri("v1"), b.uri("v2")];
    nbdcopy(first.to_str().unwrap(), &uris[0]);
    b.ok("volume protect v2 on");
    until("the records are on the devices of both", || has_copies(&[&a, &b], "name/v2", "\"protected\":true"));
    let config = member.kill();
    fs::remove_dir_all(config.dir.join("data")).unwrap();
    let mut member = holdfast_runtime::meta::member::Member::start(config).unwrap();
    member.wait().unwrap();
    // Nothing stops, and nothing of that store is believed.
    for uri in &uris {
        nbdcopy(second.to_str().unwrap(), uri);
    }
    until("both have seen it", || {
        [&a, &b].iter().all(|machine| text(&machine.run("status").stdout).contains(", not believed: it was emptied"))
    });
    assert!(a.fails("volume create v3 --size 16MiB").contains("not believed"));
    a.ok("grid down --host");
    let refused = a.fails("meta recover --yes");
    assert!(refused.contains("hosts are at work") && refused.contains('b'), "{refused}");
    b.ok("grid down --host");
    let done = b.json("meta recover --yes");
    assert!(done["volumes"].as_array().unwrap().iter().all(|v| v["doubt"].is_null()), "{done}");
    assert_eq!((done["volumes"].as_array().unwrap().len(), done["silent"].as_array().unwrap().len()), (2, 0), "{done}");
    for machine in [&a, &b] {
        machine.ok("grid up");
    }
    for (machine, volume) in [(&a, "v1"), (&b, "v2")] {
        until("it is served where it was", || machine.json(&format!("volume show {volume}"))["state"] == "open");
        assert_volume_holds(&machine.uri(volume), &second, &scratch);
    }
    assert!(b.fails("volume delete v2").contains("protected"), "settings are there, too");
}
