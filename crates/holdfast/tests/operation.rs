//! What an operator of a machine does: settings, services, devices, looking into volumes.

mod support;

use std::fs;
use support::{Grid, free_ports, holdfast, text};

#[test]
fn settings_are_in_one_file_that_is_checked_before_it_is_used() {
    let grid = Grid::new(1);
    let tcp = format!("127.0.0.1:{}", free_ports(2, 1));
    grid.up(&format!("--nodes 2 --devices 1 --nbd-tcp {tcp}"));
    let shown = |key: &str| {
        let all = grid.json("config show");
        let found = all.as_array().unwrap().iter().find(|setting| setting["key"] == key).cloned().unwrap();
        (found["value"].as_str().unwrap().to_string(), found["from"].as_str().unwrap().to_string())
    };
    let (value, from) = shown("nbd.tcp");
    assert!(value == tcp && from.starts_with("holdfast.toml, line "), "{value} {from}");
    assert_eq!(shown("memory.writeback"), ("256 MiB".to_string(), "default".to_string()));
    assert!(!fs::read_to_string(grid.path("grid.json")).unwrap().contains("nbd_tcp"));
    grid.ok("volume create v1 --size 16MiB --layout mirror:2");
    assert!(grid.ok("volume show v1").contains(&format!("nbd://{tcp}/v1")));

    let path = grid.path("holdfast.toml");
    let written = fs::read_to_string(&path).unwrap();
    fs::write(&path, format!("{written}\n[memmory]\nwriteback = \"1 GiB\"\n")).unwrap();
    let error = grid.fails("config check");
    let line = written.lines().count() + 3;
    assert!(error.contains(&format!("holdfast.toml, line {line}: memmory.writeback is no key")), "{error}");
    assert!(error.contains("memory.writeback is meant"), "{error}");
    // What runs goes on and can be asked and stopped; nothing is started.
    assert_eq!(grid.json("status")["host"]["state"], "up");
    grid.ok("grid down");
    assert!(grid.fails("grid up").contains(&format!("line {line}")));
    let refused = text(&holdfast().args(["host", "--dir"]).arg(grid.dir.path()).output().unwrap().stderr);
    assert!(refused.contains(&format!("line {line}")), "{refused}");

    fs::write(&path, "care.rebuild_after = \"20 min\"\n").unwrap();
    assert!(grid.ok("config check").contains("sets 1 of"));
    assert!(grid.fails("config check /nowhere.toml").contains("there is no file"));
    assert!(grid.fails(&format!("grid up --nbd-tcp {tcp}")).contains("set nbd.tcp in"));
    grid.ok("grid up");
    assert!(!grid.ok("volume show v1").contains("nbd://"));
    assert_eq!(shown("care.rebuild_after").0, "20 min");
}

#[test]
fn settings_in_a_grid_json_of_an_older_release_still_count() {
    let grid = Grid::new(3);
    grid.up("--nodes 2 --devices 1");
    grid.ok("grid down");
    let port = free_ports(4, 1);
    let mut config: serde_json::Value = serde_json::from_slice(&fs::read(grid.path("grid.json")).unwrap()).unwrap();
    config["host"] = serde_json::json!({ "name": "local", "nbd_tcp": format!("127.0.0.1:{port}"), "tls_dir": null,
        "writeback_bytes": 128 << 20, "map_cache_bytes": 64 << 20, "rebuild_after_s": 600, "scrub_every_s": 1_209_600 });
    fs::write(grid.path("grid.json"), config.to_string()).unwrap();
    fs::remove_file(grid.path("holdfast.toml")).unwrap();
    grid.ok("grid up");
    grid.ok("volume create v1 --size 16MiB --layout mirror:2");
    assert!(grid.ok("volume show v1").contains(&format!("nbd://127.0.0.1:{port}/v1")));
    let shown = grid.ok("config show");
    assert!(shown.contains("128 MiB") && shown.contains("grid.json, of an older release"), "{shown}");
    // They stay when the file is written, and give way to what the operator sets.
    grid.ok("device add 1");
    assert!(fs::read_to_string(grid.path("grid.json")).unwrap().contains("writeback_bytes"));
    fs::write(grid.path("holdfast.toml"), "memory.writeback = '64 MiB'\n").unwrap();
    let shown = grid.ok("config show");
    assert!(shown.contains("64 MiB") && shown.contains("holdfast.toml, line 1"), "{shown}");
}

#[test]
fn every_key_is_explained() {
    let run = |arguments: &[&str]| text(&holdfast().args(arguments).output().unwrap().stdout);
    let all = run(&["config", "explain"]);
    for line in all.lines().take_while(|line| !line.is_empty()) {
        let key = line.split_whitespace().next().unwrap();
        let told = run(&["config", "explain", key]);
        assert!(told.contains("takes ") && told.contains("default "), "{told}");
    }
    assert!(run(&["config", "explain", "--markdown"]).starts_with("# Configuration"));
}
