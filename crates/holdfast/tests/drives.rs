//! What drives say of their own health, and what becomes of it. Needs loop devices, and root.

mod support;

use std::fs;
use std::path::Path;
use support::{Grid, Loop, holdfast, program, text, until};

const SIZE: u64 = 512 << 20;

/// Directory of a program that says what `smartctl` once said, of whatever drive.
fn fake(dir: &Path, said: &str) -> String {
    let said = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/drives").join(said);
    program(&dir.join("smartctl"), &format!("#!/bin/sh\ncat {}\n", said.display()));
    format!("{}:{}", dir.display(), std::env::var("PATH").unwrap())
}

fn health(grid: &Grid, path: &str, more: &[&str]) -> String {
    let mut command = holdfast();
    command.env("PATH", path).arg("--dir").arg(grid.dir.path()).args(["device", "health"]).args(more);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn a_device_whose_drive_fails_is_emptied_unless_somebody_wants_to_keep_it() {
    let (grid, programs) = (Grid::new(1), tempfile::tempdir().unwrap());
    let Some(disk) = Loop::attach(&grid.path("disk"), SIZE, &[]) else { return };
    grid.up("--nodes 2 --devices 1");
    grid.ok(&format!("device add 1 --path {}", disk.path()));
    grid.ok("volume create v1 --size 64MiB --layout mirror:2");
    let listed =
        || grid.json("device list").as_array().unwrap().iter().find(|d| d["device"]["device"] == id(&grid)).cloned();
    // A host that is held up tells of no device for a while.
    let device = || {
        let mut found = None;
        until("the host tells of the device", || {
            found = listed();
            found.is_some()
        });
        found.unwrap()["device"].clone()
    };

    let path = fake(programs.path(), "nvme-well.json");
    assert!(health(&grid, &path, &["--save"]).contains("is well"));
    until("the host knows that it is well", || device()["drive"]["celsius"] == 50);
    assert!(device()["draining"] == false && grid.ok("device list").contains(" well "));

    let path = fake(programs.path(), "nvme-unreliable.json");
    let shown = health(&grid, &path, &["--save"]);
    assert!(shown.contains(disk.path()) && shown.contains("has become unreliable"), "{shown}");
    until("it is being emptied", || device()["draining"] == true);
    assert!(grid.ok("device list").contains("FAILING"));
    assert!(grid.ok("grid status").contains("has become unreliable; replace it"));
    let log = |name: &str| fs::read_to_string(grid.path("logs").join(name)).unwrap();
    let at_node = format!("the drive of {} has become unreliable; replace it", disk.path());
    until("both logs tell", || {
        log("host.log").contains("is on a drive that has become unreliable, and is being emptied")
            && log("node1.log").contains(&at_node)
    });

    let drain = format!("device drain {}", id(&grid));
    grid.ok(&format!("{drain} --cancel"));
    grid.ok("grid down");
    grid.ok("grid up");
    until("the host knows again how it is", || device()["drive"]["troubles"][0] == "unreliable");
    // Two rounds of the one who looks.
    std::thread::sleep(std::time::Duration::from_secs(5));
    assert_eq!(device()["draining"], false, "somebody wants to keep it");
    grid.ok(&drain);
    assert_eq!(device()["draining"], true);
}

#[test]
fn drives_that_say_nothing_are_shown_as_such() {
    let (grid, programs) = (Grid::new(2), tempfile::tempdir().unwrap());
    let path = fake(programs.path(), "virtio.json");
    let json = health(&grid, &path, &["/dev/nothing", "--json"]);
    let told: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(told[0]["unknown"], "/dev/vda: Unable to detect device type");
    let failing: serde_json::Value =
        serde_json::from_str(&health(&grid, &fake(programs.path(), "nvme-unreliable.json"), &["/dev/x", "--json"]))
            .unwrap();
    assert!(failing[0]["failing"] == true && failing[0]["drive"]["troubles"][0] == "unreliable");
    let without = health(&grid, programs.path().join("nowhere").to_str().unwrap(), &["/dev/x"]);
    let is_installed = Path::new("/usr/sbin/smartctl").exists();
    assert!(without.contains("smartmontools") || is_installed, "{without}");
    grid.up("--nodes 1 --devices 1");
    assert!(health(&grid, &path, &[]).contains("no block device of the grid"));
}

/// Of the second device of the first node.
fn id(grid: &Grid) -> String {
    let config: serde_json::Value = serde_json::from_slice(&fs::read(grid.path("grid.json")).unwrap()).unwrap();
    config["nodes"][0]["devices"][1]["device"].as_str().unwrap().to_string()
}
