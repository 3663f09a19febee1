//! Grids whose metadata are in etcd, with a real one.
//!
//! Needs the program `etcd`; `./x` sees to it.

mod support;

use holdfast_runtime::meta::member::Member;
use support::{Grid, assert_volume_holds, etcd, nbdcopy, pattern, text, until};

/// Waits until the metadata store is, or is not, in trouble.
fn wait_for_trouble(grid: &Grid, expected: bool) {
    let what = format!("trouble with the store is {expected}");
    until(&what, || grid.json("status")["metadata"]["trouble"].is_string() == expected);
}

#[test]
fn metadata_move_to_etcd_and_back() {
    let store = tempfile::tempdir().expect("a directory");
    let member = etcd(store.path(), 1);
    let (grid, other) = (Grid::new(24), Grid::new(25));
    grid.up("--nodes 3 --devices 1");
    grid.ok("volume create v1 --size 64MiB");
    grid.ok("volume create spare --size 32MiB --layout mirror:2 --no-export");
    grid.ok("snapshot create v1 first");
    let (data, scratch, file) = (grid.path("data"), grid.path("scratch"), grid.path("meta.json"));
    pattern(&data, 8 << 20);
    nbdcopy(data.to_str().expect("text"), &grid.uri("v1"));
    let (export, import) = (format!("meta export {}", file.display()), format!("meta import {}", file.display()));
    grid.ok(&export);
    let refused = grid.fails(&format!("{import} --embedded"));
    assert!(refused.contains("grid down"), "not under the hands of a host: {refused}");
    grid.ok("grid down");
    let refused = grid.fails(&format!("{import} --embedded --replace"));
    assert!(refused.contains("while the grid was running"), "{refused}");
    let exported = grid.json(&export);
    let endpoint = member.config().endpoint();
    let to_etcd = format!("{import} --etcd {endpoint}");
    let imported = grid.json(&to_etcd);
    assert_eq!(imported["records"], exported["records"]);
    assert_eq!(grid.json(&to_etcd)["records"], exported["records"], "a second time changes nothing");
    grid.ok("grid up");
    let status = grid.json("status");
    assert_eq!(status["metadata"]["store"], format!("etcd at {endpoint}"));
    assert_eq!(status["volumes"].as_array().map(Vec::len), Some(2), "{status}");
    grid.ok("volume export spare");
    assert_volume_holds(&grid.uri("v1"), &data, &scratch);
    // Another grid's metadata are not taken, nor older ones without being told.
    other.up("--nodes 1 --devices 1");
    other.ok("grid down");
    assert!(other.fails(&import).contains("is of grid"));
    grid.ok("grid down");
    let refused = grid.fails(&to_etcd);
    assert!(refused.contains("--replace"), "{refused}");
    grid.ok(&export);
    let refused = grid.fails(&format!("{import} --embedded"));
    assert!(refused.contains("--replace"), "what the file held before is other by now: {refused}");
    grid.ok(&format!("{import} --embedded --replace"));
    drop(member);
    grid.ok("grid up");
    assert_eq!(grid.json("status")["metadata"]["store"], "embedded");
    assert_eq!(grid.json("volume show spare")["state"], "open");
    assert_eq!(grid.json("snapshot list v1").as_array().map(Vec::len), Some(1));
    assert_volume_holds(&grid.uri("v1"), &data, &scratch);
}

/// While the store is silent, with the word that it is.
fn what_the_host_knows_is_told(grid: &Grid) {
    for (command, part) in [
        ("volume show v1", "open"),
        ("volume show idle", "closed"),
        ("volume list", "idle"),
        ("volume explain v1", "v1"),
        ("snapshot list v1", "first"),
        ("device list", "1/0"),
        ("machine list", "local"),
        ("task list", ""),
    ] {
        let output = grid.run(command);
        let (told, warning) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success() && told.contains(part), "{command}: {told} {warning}");
        assert!(warning.contains("the metadata store is out of reach for"), "{command}: {warning}");
    }
    grid.ok("volume trash list");
    grid.ok("space why");
}

#[test]
fn data_are_served_while_etcd_is_away() {
    let store = tempfile::tempdir().expect("a directory");
    let member = etcd(store.path(), 2);
    let grid = Grid::new(26);
    grid.up(&format!("--nodes 3 --devices 1 --etcd {}", member.config().endpoint()));
    grid.ok("volume create v1 --size 64MiB");
    grid.ok("volume create idle --size 16MiB --no-export");
    grid.ok("snapshot create v1 first");
    let (data, scratch) = (grid.path("data"), grid.path("scratch"));
    pattern(&data, 8 << 20);
    member.hang().expect("a signal");
    wait_for_trouble(&grid, true);
    let status = grid.json("status");
    assert_eq!(status["volumes"][1]["state"], "open", "{status}");
    let told = grid.ok("status");
    assert!(told.contains("out of reach"), "{told}");
    what_the_host_knows_is_told(&grid);
    let uri = status["volumes"][1]["uris"][0].as_str().expect("an address").to_string();
    nbdcopy(data.to_str().expect("text"), &uri);
    assert_volume_holds(&uri, &data, &scratch);
    // A lost node changes legs, not owners: its hedge is there already.
    grid.ok("node kill 2");
    assert_volume_holds(&uri, &data, &scratch);
    let refused = grid.fails("volume create v2 --size 32MiB");
    assert!(refused.contains("metadata store"), "{refused}");
    member.resume().expect("a signal");
    wait_for_trouble(&grid, false);
    grid.ok("node start 2");
    grid.ok("volume create v2 --size 32MiB");
    // An emptied cluster is not taken for a new grid.
    grid.ok("grid down");
    let config = member.kill();
    std::fs::remove_dir_all(config.dir.join("data")).expect("removed");
    let mut member = Member::start(config).expect("etcd starts");
    member.wait().expect("etcd serves");
    let refused = grid.fails("grid up");
    assert!(refused.contains("knows nothing of grid"), "{refused}");
}
