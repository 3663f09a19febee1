//! Drills of what operators fear, once each and small: harm is done to a grid under load, and its commands put it right.

mod support;

use serde_json::Value;
use std::fs;
use support::*;

/// A drill that is under way: it does not outlive its test.
struct Child(std::process::Child);

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a drill that has to pass; its report.
fn drill(grid: &Grid, line: &str) -> Value {
    let report = grid.json(&format!("drill {line} --yes --seconds 4 --clients 2 --mend-seconds 120"));
    for count in ["errors", "mismatches"] {
        assert_eq!(report[count], 0, "{report}");
    }
    assert!(report["whole_s"].is_f64() && report["volumes_changed"].as_array().unwrap().is_empty(), "{report}");
    let testimony = &report["testimony"];
    // What is read back in the end, and what was before.
    assert!(testimony["reads"].as_u64() > Some(2 * 2048) && testimony["writes"].as_u64() > Some(0), "{report}");
    report
}

fn commands(report: &Value) -> Vec<&str> {
    report["steps"].as_array().unwrap().iter().map(|step| step["command"].as_str().unwrap()).collect()
}

/// Nothing of a drill is left.
fn assert_clean(grid: &Grid) {
    for place in [grid.path(""), grid.path("devices")] {
        let names = fs::read_dir(place).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let left: Vec<String> = names.filter(|name| name.contains("drill-")).collect();
        assert!(left.is_empty(), "{left:?}");
    }
    let volumes = grid.json("volume list");
    assert!(volumes.as_array().unwrap().iter().all(|volume| volume["name"] == "v1"), "{volumes}");
}

#[test]
fn each_drill_does_its_harm_and_all_is_well_again() {
    let grid = Grid::new(0);
    grid.up("--nodes 3");
    grid.ok("volume create v1 --size 16MiB");
    // Nobody can be asked, and nothing was done.
    let refused = grid.fails("drill host-loss");
    assert!(refused.contains("--yes") && refused.contains("killed under load"), "{refused}");
    let host = grid.json("status")["host"]["pid"].clone();

    let report = drill(&grid, "host-loss");
    assert_eq!(commands(&report), ["holdfast grid up"]);
    assert!(report["told"].as_str().unwrap().contains("the host is down"), "{report}");
    assert!(report["testimony"]["reconnections"].as_u64() >= Some(2), "{report}");
    assert_ne!(grid.json("status")["host"]["pid"], host);
    assert_clean(&grid);

    let report = drill(&grid, "disk-loss --device 2/1");
    assert_eq!(commands(&report), ["holdfast device replace 2/1"]);
    assert!(report["told"].as_str().unwrap().contains("device 2/1"), "{report}");
    assert_clean(&grid);
    assert_eq!(grid.serving_devices(2), 2);

    let report = drill(&grid, "metadata-loss");
    let wanted = ["grid down --host --force", "meta recover", "meta recover --yes", "grid up"];
    assert_eq!(commands(&report), wanted.map(|line| format!("holdfast {line}")));
    assert_clean(&grid);

    // A grid that is not well has harm enough.
    grid.ok("node kill 1");
    let refused = grid.fails("drill disk-loss --yes");
    assert!(refused.contains("not well") && refused.contains("node 1"), "{refused}");
}

#[test]
fn a_drill_that_is_broken_off_puts_back_what_it_took() {
    let grid = Grid::new(1);
    grid.up("--nodes 2");
    let before = fs::metadata(grid.path("meta.redb")).unwrap();
    let mut drill = holdfast();
    drill.args(["drill", "metadata-loss", "--yes", "--seconds", "40", "--dir"]).arg(grid.dir.path());
    let mut drill = drill.spawn().map(Child).unwrap();
    // It waits for copies of the records before.
    until("the metadata are gone", || !grid.path("meta.redb").exists());
    assert!(std::process::Command::new("kill").args(["-INT", &drill.0.id().to_string()]).status().unwrap().success());
    assert!(!drill.0.wait().unwrap().success());
    let after = fs::metadata(grid.path("meta.redb")).unwrap();
    assert_eq!(std::os::unix::fs::MetadataExt::ino(&before), std::os::unix::fs::MetadataExt::ino(&after));
    assert!(grid.json("volume list").as_array().unwrap().is_empty());
    let names = fs::read_dir(grid.path("")).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(names.filter(|name| name.contains("drill-")).count(), 0);
}

#[test]
fn metadata_that_are_lost_in_etcd_are_recovered_and_a_machine_is_lost_by_drills() {
    let store = tempfile::tempdir().unwrap();
    let member = etcd(store.path(), 93);
    let endpoint = member.config().endpoint();
    let (a, b) = (Grid::new(2), Grid::new(3));
    a.up(&format!("--nodes 2 --devices 1 --etcd {endpoint} --address 127.0.0.1 --name a"));
    let report = drill(&a, "metadata-loss");
    assert!(report["told"].as_str().unwrap().contains("it was emptied"), "{report}");
    let refused = a.fails("drill machine-loss --yes");
    assert!(refused.contains("no other machine") && refused.contains("drill node-loss"), "{refused}");

    let token = a.ok("grid token").trim().to_string();
    b.up(&format!("--nodes 1 --devices 1 --etcd {endpoint} --address 127.0.0.1 --name b --join {token}"));
    let mut drill = holdfast();
    drill.args(["drill", "machine-loss", "--yes", "--json", "--seconds", "4", "--clients", "2", "--dir"]);
    let (report, said) = (a.path("report"), a.path("said"));
    drill.arg(a.dir.path()).stdout(fs::File::create(&report).unwrap()).stderr(fs::File::create(&said).unwrap());
    let mut drill = drill.spawn().map(Child).unwrap();
    let says = |what: &str| fs::read_to_string(&said).unwrap().contains(what);
    until("it asks for the loss", || says("NOW take machine b away"));
    b.ok("grid down --force");
    until("it asks for the return", || says("NOW bring machine b back"));
    b.ok("grid up");
    assert!(drill.0.wait().unwrap().success(), "{}", fs::read_to_string(&said).unwrap());
    let report: Value = serde_json::from_slice(&fs::read(&report).unwrap()).unwrap();
    assert!(report["told"].as_str().unwrap().starts_with("WARNING (redundancy): node"), "{report}");
}
