//! Several reactors in one host: volumes are spread over them, and everything is as with one.

mod support;

use std::fs;
use std::process::Command;
use support::{Grid, assert_volume_holds, is_whole, nbdcopy, pattern, text, until};

const VOLUMES: [&str; 4] = ["v1", "v2", "v3", "v4"];

fn grid(index: u16) -> Grid {
    let grid = Grid::new(index);
    grid.up("--nodes 3 --devices 1");
    grid.ok("grid down --host");
    set_reactors(&grid, 3);
    grid
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
    let names = threads.map(|thread| fs::read_to_string(thread.unwrap().path().join("comm")).unwrap());
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
    let refused = grid.fails("snapshot create v1 g --with v2 --with v3");
    assert!(refused.contains("several reactors") && refused.contains("cpu.reactors"), "{refused}");
    grid.ok("volume unexport v3");
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
    // What the refusal of a group has said.
    set_reactors(&grid, 1);
    grid.ok("snapshot create v1 g --with v2 --with v3");
}
