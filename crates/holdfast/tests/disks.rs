//! Disks of a node that are not there, come back, and are replaced, while the node serves with the others.

mod support;

use serde_json::Value;
use std::fs;
use support::*;

fn pid(grid: &Grid) -> Value {
    grid.json("status")["nodes"][0]["pid"].clone()
}

fn config(grid: &Grid) -> Value {
    serde_json::from_slice(&fs::read(grid.path("grid.json")).unwrap()).unwrap()
}

#[test]
fn a_disk_that_is_gone_is_told_left_out_and_replaced_by_one_command() {
    let grid = Grid::new(0);
    grid.up("--nodes 1 --devices 2");
    grid.ok("volume create v1 --size 32MiB --protect device");
    let (file, scratch) = (grid.path("pattern"), grid.path("scratch"));
    pattern(&file, 32 << 20);
    nbdcopy(file.to_str().unwrap(), &grid.uri("v1"));
    let holds = || {
        assert_volume_holds(&grid.uri("v1"), &file, &scratch);
    };
    until("it is whole", || is_whole(&grid, "v1"));
    grid.ok("grid down");
    let (disk, away) = (grid.path("devices/node1-0.img"), grid.path("away"));
    fs::rename(&disk, &away).unwrap();
    grid.ok("grid up");
    holds();
    let node = pid(&grid);
    for command in ["status", "device list"] {
        until("it is told with what to do", || {
            let told = grid.ok(command);
            let parts = ["device 1/0", "is missing for", "does not exist", "holdfast device replace 1/0"];
            parts.iter().all(|part| told.contains(part)) && !told.contains("slow")
        });
    }
    // What it asks for is what helps, and no message names force.
    let refused = grid.fails("device remove 1/0");
    assert!(refused.contains("device drain") && !refused.contains("--force"), "{refused}");
    let old = config(&grid)["nodes"][0]["devices"][0]["device"].as_str().unwrap().to_string();
    let said = grid.ok("device replace 1/0");
    assert!(said.contains(&format!("{old} is not a part of node 1 any more")), "{said}");
    assert_eq!(pid(&grid), node, "its node has served all the while");
    let devices = config(&grid)["nodes"][0]["devices"].clone();
    assert_eq!(devices.as_array().unwrap().len(), 2);
    assert!(devices.as_array().unwrap().iter().all(|device| device["device"] != old.as_str()));
    until("both are in use", || grid.serving_devices(1) == 2);
    until("it is whole again", || is_whole(&grid, "v1"));
    holds();
    // A planned one: the device that is left of the first two.
    let planned = devices[0]["device"].as_str().unwrap().to_string();
    // Whoever gave it before, or was cut off from it, goes on with the same new one.
    let added = |said: &str| said.split_whitespace().nth(1).unwrap().to_string();
    let begun = added(&grid.ok("device replace 1/0 --no-wait"));
    assert_eq!(added(&grid.ok("device replace 1/0 --size 256MiB --no-wait")), begun);
    assert_eq!(config(&grid)["nodes"][0]["devices"].as_array().unwrap().len(), 3);
    assert_eq!(added(&grid.ok("device replace 1/0")), begun);
    assert_eq!(config(&grid)["nodes"][0]["devices"].as_array().unwrap().len(), 2);
    assert_eq!(pid(&grid), node);
    assert!(config(&grid)["nodes"][0]["devices"].as_array().unwrap().iter().all(|d| d["device"] != planned.as_str()));
    holds();
    // Given once more when it is done, it takes out none that has moved to the place.
    let disk = grid.path("disk.img");
    fs::File::create(&disk).unwrap().set_len(256 << 20).unwrap();
    let replace = format!("device replace 1/0 {}", disk.display());
    grid.ok(&replace);
    let after = config(&grid);
    let refused = grid.fails(&replace);
    assert!(refused.contains("is not taken") && config(&grid) == after, "{refused}");
    holds();
}

#[test]
fn a_node_without_any_device_comes_up_and_takes_them_when_they_are_there() {
    let grid = Grid::new(1);
    grid.up("--nodes 1 --devices 1");
    grid.ok("grid down");
    let (disk, away) = (grid.path("devices/node1-0.img"), grid.path("away"));
    fs::rename(&disk, &away).unwrap();
    grid.ok("grid up");
    grid.wait_for_node(1, "up");
    assert_eq!(grid.serving_devices(1), 0);
    let node = pid(&grid);
    // Two paths that are one device: it serves by one of them.
    fs::rename(&away, &disk).unwrap();
    until("it is taken up", || grid.serving_devices(1) == 1);
    grid.ok("grid down");
    let mut twice = config(&grid);
    fs::hard_link(&disk, grid.path("devices/again.img")).unwrap();
    let mut other = twice["nodes"][0]["devices"][0].clone();
    other["path"] = "devices/again.img".into();
    other["device"] = "00000000-0000-0000-0000-00000000abcd".into();
    twice["nodes"][0]["devices"].as_array_mut().unwrap().push(other);
    fs::write(grid.path("grid.json"), twice.to_string()).unwrap();
    grid.ok("grid up");
    assert_ne!(pid(&grid), node);
    until("it serves once", || grid.serving_devices(1) == 1);
    // By whichever of the two paths it came up first.
    until("the other is told", || {
        let log = fs::read_to_string(grid.path("logs/node1.log")).unwrap();
        log.contains("another process uses it") && log.contains("is out")
    });
}
