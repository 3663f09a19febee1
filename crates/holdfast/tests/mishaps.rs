//! What goes wrong around a grid on one machine: full file systems, addresses, commands that end half-way.

mod support;

use serde_json::Value;
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::{Grid, etcd, free_ports, skip, text, until};

/// A small file system of its own; unmounted with the test.
struct Small(tempfile::TempDir);

impl Small {
    /// `None`, and the test counts as skipped, where there can't be any.
    fn mount(size: &str) -> Option<Small> {
        let dir = tempfile::Builder::new().prefix("hf").tempdir().unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={size}"), "none"]).arg(dir.path());
        let is_mounted = mount.output().is_ok_and(|output| output.status.success());
        if !is_mounted {
            skip("nothing can be mounted here; run this as root");
            return None;
        }
        Some(Small(dir))
    }

    fn filler(&self) -> PathBuf {
        self.0.path().join("filler")
    }

    /// Takes all the room there is.
    fn fill(&self) {
        let mut file = fs::File::create(self.filler()).unwrap();
        for piece in [vec![1; 1 << 20], vec![1; 4096]] {
            while file.write_all(&piece).is_ok() {}
        }
    }

    fn empty(&self) {
        fs::remove_file(self.filler()).unwrap();
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(self.0.path()).output();
    }
}

/// Ids of processes whose command line names the directory.
fn processes_of(dir: &Path) -> Vec<u32> {
    let name = dir.to_str().unwrap();
    let all = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
    let is_of = |pid: &u32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        text(&line).split('\0').any(|word| word == name)
    };
    all.filter(is_of).collect()
}

#[test]
fn a_full_file_system_stops_no_reads_leaves_no_process_behind_and_is_over_when_there_is_room() {
    let Some(small) = Small::mount("700m") else { return };
    let dir = tempfile::Builder::new().prefix("g").tempdir_in(small.0.path()).unwrap();
    let grid = Grid::in_dir(dir, free_ports(1, 2));
    grid.up_with("128MiB", "--nodes 2 --devices 1");
    grid.ok("volume create v --size 8MiB --layout mirror:2");
    grid.ok("node stop 2 --force");
    small.fill();
    let refused = (0..60).map(|n| grid.run(&format!("volume create w{n} --size 8MiB --layout mirror:2 --no-export")));
    let refused = refused.map(|output| text(&output.stderr)).find(|error| !error.is_empty()).expect("it is full");
    assert!(refused.contains("no space left on the file system of"), "{refused}");
    assert_eq!(grid.json("volume list")[0]["name"], "v", "what is known is read");
    until("status tells why", || grid.ok("status").contains("no space left on the file system of"));

    // Nothing is started that no command would know.
    let before = processes_of(grid.dir.path());
    let refused = grid.fails("node start 2");
    assert!(refused.contains("node 2 is not started") && refused.contains("node2.pid"), "{refused}");
    assert_eq!(processes_of(grid.dir.path()), before);

    small.empty();
    until("it goes on by itself", || !grid.ok("status").contains("no space left"));
    grid.ok("volume create after --size 8MiB --layout mirror:2");
    grid.ok("node start 2");
    grid.ok("snapshot create v s");
    grid.ok("grid down");
    assert_eq!(processes_of(grid.dir.path()), Vec::<u32>::new());
    grid.ok("grid up");
}

fn address_of(grid: &Grid, node: u64) -> (String, String) {
    let status = grid.json("status");
    let found = status["nodes"].as_array().unwrap().iter().find(|n| n["id"] == node).cloned().unwrap_or_default();
    let text = |field: &str| found[field].as_str().unwrap_or_default().to_string();
    (text("address"), text("state"))
}

#[test]
fn a_machine_gets_another_address_while_the_grid_serves() {
    let store = tempfile::tempdir().unwrap();
    let member = etcd(store.path(), 60);
    let options = format!("--devices 1 --etcd {}", member.config().endpoint());
    let (a, b) = (Grid::new(2), Grid::new(3));
    for (odd, why) in [("0.0.0.0", "stands for all addresses"), ("192.0.2.77", "no address of this machine: it has")] {
        let refused = a.fails(&format!("grid up --port {} --name a {options} --address {odd}", a.port));
        assert!(refused.contains(why), "{refused}");
    }
    a.up(&format!("--nodes 2 --name a {options}"));
    let id = a.json("status")["grid"].as_str().unwrap().to_string();
    // Where the machine has an address that others can reach, those of a grid that is on loopback can't.
    let far = std::net::UdpSocket::bind("0.0.0.0:0").and_then(|socket| {
        socket.connect("192.0.2.1:9")?;
        socket.local_addr()
    });
    if let Some(far) = far.ok().map(|address| address.ip()).filter(|ip| !ip.is_loopback()) {
        let refused = b.fails(&format!("grid up --port {} --name b {options} --join {id} --address {far}", b.port));
        assert!(refused.contains("can't be reached from here") && refused.contains("grid address"), "{refused}");
    }
    b.up(&format!("--nodes 1 --name b {options} --join {id}"));
    until("both see node 3", || a.node_state(3) == "up" && b.node_state(3) == "up");
    a.ok("volume create v --size 16MiB");
    for (odd, why) in [("0.0.0.0", "stands for all addresses"), ("192.0.2.77", "no address of this machine")] {
        assert!(b.fails(&format!("grid address {odd}")).contains(why));
    }
    assert!(b.ok("grid address 127.0.0.1").contains("so already"));

    let port: u16 = b.port.parse().unwrap();
    let there = format!("127.0.0.3:{}", port + 2);
    let said = b.ok(&format!("grid address 127.0.0.3 --port {}", port + 2));
    assert!(said.contains(&format!("node 3 is at {there}")), "{said}");
    for grid in [&a, &b] {
        until("the node is used at its new address", || address_of(grid, 3) == (there.clone(), "up".to_string()));
    }
    // Other hosts go on to reach this one, at its new address.
    b.ok("volume handover v --to b");
    let state = |grid: &Grid| grid.json("volume show v")["state"].as_str().unwrap().to_string();
    assert_eq!(
        (state(&a), state(&b)),
        ("forwarding".to_string(), "open".to_string()),
        "the owner was asked by the other"
    );
    a.ok("volume handover v --to b");
    let refused = a.fails("volume handover v --to nobody");
    assert!(refused.contains("there is no host nobody") && refused.contains("a, b"), "{refused}");
    // What the other host could not open it says at once.
    fs::write(a.path("key"), [7; 32]).unwrap();
    fs::set_permissions(a.path("key"), fs::Permissions::from_mode(0o600)).unwrap();
    a.ok(&format!("volume create vault --size 8MiB --encrypt --key-file {}", a.path("key").display()));
    fs::remove_file(a.path("key")).unwrap();
    let refused = a.fails("volume handover vault --to b");
    assert!(refused.contains("could not take volume vault over, which stays where it is"), "{refused}");
    assert_eq!(a.json("volume show vault")["state"], "open");
    a.ok("volume delete vault --now");
    // Several nodes move one after the other: each when data can do without it.
    until("all is well", || a.run(&format!("grid address --port {}", port + 4)).status.success());
    let there = |node: u64| (format!("127.0.0.1:{}", u64::from(port) + 3 + node), "up".to_string());
    until("both are used there", || (1..=2).all(|node| address_of(&b, node) == there(node)));

    // What is down is named anew, and is found there when it comes up.
    b.ok("grid down --force");
    assert!(b.ok(&format!("grid address --port {port}")).contains("grid up"));
    assert!(b.fails(&format!("grid up --port {}", port + 2)).contains("holdfast grid address"));
    b.ok("grid up");
    until("it is found", || address_of(&a, 3) == (format!("127.0.0.3:{port}"), "up".to_string()));
}

#[test]
fn asking_for_what_is_so_succeeds_and_what_a_killed_command_has_left_is_cleared() {
    let grid = Grid::new(4);
    assert!(grid.up("--nodes 2 --devices 1").contains("with 2 devices of 256 MiB"));
    assert!(grid.ok("grid up").contains("up already"));
    assert!(grid.ok("node start 2").contains("up already"));
    assert!(grid.ok("node resume 2").contains("goes on"));
    grid.ok("node kill 2");
    assert!(grid.ok("node kill 2").contains("was dead"));
    assert!(grid.ok("node stop 2 --force").contains("was stopped"));
    grid.ok("node start 2");
    grid.wait_for_node(2, "up");
    // The layout is what two nodes bear.
    let said = grid.ok("volume create v --size 8MiB");
    assert!(said.contains("mirror:2"), "{said}");
    let schedule = "snapshot schedule v --every 1h --keep 24h";
    for line in
        [schedule, schedule, "volume export v", "volume unexport v", "volume unexport v", "node cut 2", "node cut 2"]
    {
        grid.ok(line);
    }
    grid.ok("node mend 2");

    // A command that is killed while it makes a device, before anything names that.
    let adding =
        r#"[{"path":"devices/node3-0.img","device":"0e4c2d7a-0000-4000-8000-000000000001","size_bytes":268435456}]"#;
    fs::write(grid.path("grid.adding"), adding).unwrap();
    fs::write(grid.path("devices/node3-0.img"), vec![0; 4096]).unwrap();
    assert!(grid.ok("node add").contains("node 3 is added"));
    assert!(!grid.path("grid.adding").exists());
    assert_eq!(fs::metadata(grid.path("devices/node3-0.img")).unwrap().len(), 256 << 20, "it is a whole device");
    assert_eq!(fs::read_dir(grid.path("devices")).unwrap().count(), 3);

    // One that is killed when they are named, and before anybody has heard of them, is completed by the next.
    let config = || -> Value { serde_json::from_slice(&fs::read(grid.path("grid.json")).unwrap()).unwrap() };
    let cut_short = |devices: &Value| fs::write(grid.path("grid.adding"), devices.to_string()).unwrap();
    grid.ok("node stop 3 --force");
    cut_short(&config()["nodes"][2]["devices"]);
    assert!(grid.ok("node add").contains("node 3 is added"));
    assert_eq!(config()["nodes"].as_array().unwrap().len(), 3);
    grid.wait_for_node(3, "up");
    grid.ok("device add 3");
    let added = config()["nodes"][2]["devices"][1].clone();
    cut_short(&Value::Array(vec![added.clone()]));
    assert!(grid.ok("device add 3").contains(added["device"].as_str().unwrap()));
    assert_eq!(config()["nodes"][2]["devices"].as_array().unwrap().len(), 2);
    grid.ok("device add 3");
    assert_eq!(config()["nodes"][2]["devices"].as_array().unwrap().len(), 3, "that one was complete");
    removals_are_completed(&grid);
}

/// Commands that are killed when the configuration has forgotten devices, before anybody has heard of it.
fn removals_are_completed(grid: &Grid) {
    let config = || -> Value { serde_json::from_slice(&fs::read(grid.path("grid.json")).unwrap()).unwrap() };
    let cut_short = |devices: Value, next: &Value| {
        let removing = serde_json::json!({ "node": 3, "devices": devices });
        fs::write(grid.path("grid.removing"), removing.to_string()).unwrap();
        fs::write(grid.path("grid.json"), next.to_string()).unwrap();
    };
    let is_over = || !grid.path("grid.removing").exists();
    let mut next = config();
    let devices = next["nodes"][2]["devices"].as_array_mut().unwrap();
    // Its place is that of another one by then.
    let gone = devices.remove(1);
    let (id, file) = (gone["device"].as_str().unwrap(), grid.path(gone["path"].as_str().unwrap()));
    grid.ok("device drain 3/1");
    grid.ok("task watch");
    // Before the configuration has forgotten it nothing was done.
    cut_short(serde_json::json!([[1, gone]]), &config());
    grid.ok("grid up");
    assert!(is_over() && file.exists() && config()["nodes"][2]["devices"].as_array().unwrap().len() == 3);
    cut_short(serde_json::json!([[1, gone]]), &next);
    let told = grid.ok("device remove 3/1");
    assert!(told.contains(id) && is_over() && !file.exists(), "{told}");
    assert!(!grid.ok("device list").contains(id) && grid.serving_devices(3) == 2);
    assert!(grid.fails(&format!("device remove {id}")).contains("no device"));

    let mut next = config();
    let node = next["nodes"].as_array_mut().unwrap().remove(2);
    let devices = node["devices"].as_array().unwrap();
    let placed: Vec<Value> = devices.iter().enumerate().map(|(place, d)| serde_json::json!([place, d])).collect();
    grid.ok("node drain 3");
    grid.ok("task watch");
    for repeated in ["grid up", "node remove 3"] {
        cut_short(placed.clone().into(), &next);
        grid.ok(repeated);
        assert!(is_over() && !grid.path("run/node3.pid").exists(), "{repeated}");
        assert!(devices.iter().all(|device| !grid.path(device["path"].as_str().unwrap()).exists()));
        let status = grid.json("status");
        assert_eq!(status["nodes"].as_array().unwrap().len(), 2, "{repeated}: {status}");
    }
    assert!(grid.fails("node remove 3").contains("no node 3"));
    assert!(grid.ok("node add").contains("node 4 is added"), "nobody gets its number again");
}

#[test]
fn a_grid_that_was_being_made_of_devices_that_were_there_is_made_by_the_same_command() {
    let grid = Grid::new(5);
    let device = grid.path("disk");
    fs::File::create(&device).unwrap().set_len(256 << 20).unwrap();
    let up = format!("grid up --port {} --device {}", grid.port, device.display());
    grid.ok(&up);
    let first: Value = serde_json::from_slice(&fs::read(grid.path("grid.json")).unwrap()).unwrap();
    grid.ok("grid down");
    // As if it had been killed when the device was made the grid's.
    let begun = serde_json::json!({ "grid": first["grid"], "devices": first["nodes"][0]["devices"] });
    fs::remove_file(grid.path("grid.json")).unwrap();
    let refused = grid.fails(&up);
    assert!(refused.contains("belongs to") || refused.contains("is not taken"), "it is somebody's: {refused}");
    fs::write(grid.path("grid.creating"), begun.to_string()).unwrap();
    grid.ok(&up);
    assert!(!grid.path("grid.creating").exists());
    let second: Value = serde_json::from_slice(&fs::read(grid.path("grid.json")).unwrap()).unwrap();
    assert_ne!(first["grid"], second["grid"]);
    // What says that a grid is not complete counts for nothing when it is.
    fs::write(grid.path("grid.creating"), begun.to_string()).unwrap();
    grid.ok("grid up");
    assert!(!grid.path("grid.creating").exists());
}
