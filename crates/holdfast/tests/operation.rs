//! What an operator of a machine does: settings, services, devices, looking into volumes.

mod support;

use holdfast_lab::process::{Signal, signal};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use support::{
    Grid, Loop, PATIENCE, assert_volume_holds, etcd, find, free_ports, holdfast, nbdcopy, needs, pattern, program,
    receivers, skip, text, until,
};

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

/// Values of a key in a unit file.
fn unit_values(path: &Path, key: &str) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap();
    let lines = text.lines().filter_map(|line| line.split_once('='));
    lines.filter(|(name, _)| *name == key).map(|(_, value)| value.to_string()).collect()
}

/// A process that a service manager would run; ends with the test.
struct Service {
    child: Child,
    ready: UnixDatagram,
}

impl Service {
    /// Starts exactly what the unit says, without any capability where that can be tried.
    fn start(unit: &Path, instance: &str, notify: &Path) -> Service {
        let _ = fs::remove_file(notify);
        let ready = UnixDatagram::bind(notify).unwrap();
        ready.set_read_timeout(Some(PATIENCE)).unwrap();
        let line = unit_values(unit, "ExecStart").remove(0).replace("%i", instance);
        let without = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"];
        let can_try =
            Command::new(without[0]).args(&without[1..]).arg("true").output().is_ok_and(|o| o.status.success());
        let words: Vec<&str> = without.into_iter().filter(|_| can_try).chain(line.split_whitespace()).collect();
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).env("NOTIFY_SOCKET", notify).env_remove("HOLDFAST_DIR").stderr(Stdio::null());
        Service { child: command.spawn().unwrap(), ready }
    }

    fn wait_ready(&self) {
        let mut said = [0; 64];
        let len = self.ready.recv(&mut said).expect("it says that it is ready");
        assert_eq!(&said[..len], b"READY=1");
    }

    fn stop(mut self, within: Duration) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        let end = Instant::now() + within;
        while self.child.try_wait().unwrap().is_none() {
            assert!(Instant::now() < end, "it does not stop within the time that its unit gives it");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn units_are_sound_as_systemd_judges() {
    let Some(judge) = find("systemd-analyze") else { return skip("systemd is not on this machine") };
    let grid = Grid::new(11);
    grid.up("--nodes 2 --devices 1");
    let units = grid.path("units");
    grid.ok(&format!("grid units --output {}", units.display()));
    let files = ["holdfast-node@.service", "holdfast-host.service", "holdfast.target"].map(|name| units.join(name));
    let output = Command::new(judge).arg("verify").args(files).output().unwrap();
    // It tells of every unit of the machine.
    let said = text(&output.stderr);
    assert!(!said.lines().any(|line| line.contains("holdfast")), "{said}");
}

#[test]
fn services_run_what_their_units_say_and_are_seen_by_all_commands() {
    let grid = Grid::new(5);
    grid.up("--nodes 2 --devices 1");
    grid.ok("volume create v1 --size 16MiB --layout mirror:2");
    grid.ok("grid down");
    let units = grid.path("units");
    let told = grid.ok(&format!("grid units --output {}", units.display()));
    assert!(told.contains("wrote ") && told.contains("does not look there"), "{told}");
    let (node, host) = (units.join("holdfast-node@.service"), units.join("holdfast-host.service"));
    let notify = |name: &str| grid.path(&format!("notify-{name}"));
    let services: Vec<Service> = ["1", "2"].iter().map(|id| Service::start(&node, id, &notify(id))).collect();
    services.iter().for_each(Service::wait_ready);
    let serving = Service::start(&host, "", &notify("host"));
    serving.wait_ready();
    assert_eq!(grid.json("status")["host"]["pid"], serving.child.id());
    grid.wait_for_node(2, "up");
    assert!(grid.ok("grid up").contains("up already"));
    until("the volume is open", || grid.json("volume show v1")["state"] == "open");
    let error = text(&holdfast().args(["host", "--dir"]).arg(grid.dir.path()).output().unwrap().stderr);
    assert!(error.contains("the host is running already"), "{error}");
    let stop_max = |unit: &Path| Duration::from_secs(unit_values(unit, "TimeoutStopSec")[0].parse().unwrap());
    serving.stop(stop_max(&host));
    services.into_iter().for_each(|service| service.stop(stop_max(&node)));
    assert_eq!(grid.json("status")["host"]["state"], "down");
    grid.ok("grid up");
}

/// Does what this test needs of systemctl: runs a unit's ExecStart until it is ready, ends it, and notes what was asked.
const SYSTEMCTL: &str = r#"#!/bin/sh
echo "$*" >>"$UNITS/asked"
instance=$(echo "$2" | sed -n 's/.*@\(.*\)\.service/\1/p')
case "$2" in
    *@*) file="$UNITS/holdfast-node@.service"; pid="$GRID/run/node$instance.pid" ;;
    *) file="$UNITS/holdfast-host.service"; pid="$GRID/run/host.pid" ;;
esac
number() { sed -n 's/.*"pid":\([0-9]*\).*/\1/p' "$pid" 2>/dev/null; }
case "$1" in
    start)
        rm -f "$pid"
        line=$(sed -n 's/^ExecStart=//p' "$file" | sed "s/%i/$instance/")
        setsid $line </dev/null >/dev/null 2>>"$UNITS/journal" &
        for i in $(seq 2400); do [ -n "$(number)" ] && break; sleep 0.05; done ;;
    stop)
        [ -n "$(number)" ] && kill "$(number)" 2>/dev/null
        for i in $(seq 2400); do kill -0 "$(number)" 2>/dev/null || break; sleep 0.05; done ;;
esac
exit 0
"#;

/// A node that a drill kills stays out until the drill has it back, although systemd starts again what ends.
fn lose_by_drill(ok: &impl Fn(&str) -> String, asked: &impl Fn() -> String) {
    needs("fio");
    ok("drill node-loss --fault kill --node 3 --layout mirror:2 --seconds 4 --volume-size 128MiB");
    assert!(asked().ends_with("stop holdfast-node@3.service\nstart holdfast-node@3.service\n"), "{}", asked());
}

#[test]
fn a_grid_that_systemd_runs_is_started_and_stopped_by_it_alone() {
    let grid = Grid::new(6);
    grid.up("--nodes 2 --devices 1");
    let units = grid.path("units");
    fs::create_dir(&units).unwrap();
    let tool = units.join("systemctl");
    program(&tool, SYSTEMCTL);
    let path = format!("{}:{}", units.display(), std::env::var("PATH").unwrap());
    let run = |line: &str| {
        let mut command = holdfast();
        command.args(line.split_whitespace()).arg("--dir").arg(grid.dir.path()).env("PATH", &path);
        let output =
            command.env("SYSTEMD_UNIT_PATH", &units).env("UNITS", &units).env("GRID", grid.dir.path()).output();
        let output = output.unwrap();
        (output.status.success(), format!("{}{}", text(&output.stdout), text(&output.stderr)))
    };
    let ok = |line: &str| {
        let (is_ok, said) = run(line);
        assert!(is_ok, "{line}: {said}");
        said
    };
    let asked = || fs::read_to_string(units.join("asked")).unwrap_or_default();
    let write = format!("grid units --output {}", units.display());
    let (is_ok, said) = run(&write);
    assert!(!is_ok && said.contains("stop the grid first"), "{said}");
    ok("grid down");
    assert!(ok(&write).contains("enable --now holdfast.target"));
    let (is_ok, said) = run(&format!("{write} --name lab"));
    assert!(!is_ok && said.contains("holdfast.target in"), "{said}");

    ok("grid up");
    assert_eq!(asked(), "start holdfast-node@1.service\nstart holdfast-node@2.service\nstart holdfast-host.service\n");
    ok("node stop 2");
    assert!(asked().ends_with("stop holdfast-node@2.service\n"));
    ok("node start 2 --format-blank");
    // The files know all nodes.
    ok("node add");
    assert!(asked().ends_with("daemon-reload\nstart holdfast-node@3.service\n"), "{}", asked());
    assert!(unit_values(&units.join("holdfast.target"), "Wants")[0].contains("holdfast-node@3.service"));
    lose_by_drill(&ok, &asked);
    assert!(ok("node kill 3").contains("systemd starts it again"));
    assert!(ok("grid down").contains("the host"));
    let asked = asked();
    let last: Vec<&str> = asked.lines().rev().take(4).collect();
    let expected = ["1", "2", "3"].map(|id| format!("stop holdfast-node@{id}.service"));
    assert_eq!(last[..3], expected, "{asked}");
    assert_eq!(last[3], "stop holdfast-host.service");
    // Without its files systemd runs it no more.
    fs::remove_file(units.join("holdfast.target")).unwrap();
    ok("grid up");
    assert!(grid.path("logs/node3.log").exists(), "started as before");
}

/// What is said of a device: whether it is eligible, and why.
fn verdict(grid: &Grid, path: &str) -> (String, String) {
    let found = grid.json(&format!("device list --eligible {path}"));
    let why = found[0]["why"].as_str().unwrap_or_default().to_string();
    (found[0]["verdict"].as_str().unwrap().to_string(), why)
}

fn run(program: &str, arguments: &[&str]) -> bool {
    Command::new(needs(program)).args(arguments).output().is_ok_and(|output| output.status.success())
}

#[test]
fn block_devices_are_taken_only_when_they_are_empty() {
    const SIZE: u64 = 512 << 20;
    let grid = Grid::new(7);
    let Some(blank) = Loop::attach(&grid.path("blank"), SIZE, &[]) else { return };
    assert_eq!(verdict(&grid, blank.path()).0, "eligible", "before there is a grid, too");
    grid.up("--nodes 2 --devices 1");
    let (Some(ext4), Some(xfs), Some(small)) = (
        Loop::attach(&grid.path("ext4"), SIZE, &[]),
        Loop::attach(&grid.path("xfs"), SIZE, &[]),
        Loop::attach(&grid.path("small"), 8 << 20, &[]),
    ) else {
        return;
    };
    let mut table = vec![0; 512];
    table[510..].copy_from_slice(&[0x55, 0xaa]);
    // One partition, of everything behind the first MiB.
    table[446 + 4] = 0x83;
    table[446 + 8..446 + 12].copy_from_slice(&2048_u32.to_le_bytes());
    table[446 + 12..446 + 16].copy_from_slice(&((SIZE / 512) as u32 - 2048).to_le_bytes());
    fs::write(grid.path("parts"), &table).unwrap();
    fs::OpenOptions::new().write(true).open(grid.path("parts")).unwrap().set_len(SIZE).unwrap();
    let (Some(parts), Some(fixed)) =
        (Loop::attach(&grid.path("parts"), SIZE, &[]), Loop::attach(&grid.path("fixed"), SIZE, &["--read-only"]))
    else {
        return;
    };
    assert!(run("mkfs.ext4", &["-q", ext4.path()]) && run("mkfs.xfs", &["-q", xfs.path()]));
    let not_empty = |path: &str, part: &str| {
        let (verdict, why) = verdict(&grid, path);
        assert!(verdict == "not-empty" && why.contains(part), "{path}: {verdict}: {why}");
        let error = grid.fails(&format!("device add 1 --path {path}"));
        assert!(error.contains(part) && error.contains("nothing was written") && error.contains("--force"), "{error}");
    };
    let impossible = |path: &str, part: &str| {
        let (verdict, why) = verdict(&grid, path);
        assert!(verdict == "impossible" && why.contains(part), "{path}: {verdict}: {why}");
        let error = grid.fails(&format!("device add 1 --path {path} --force"));
        assert!(error.contains(part), "{error}");
    };
    not_empty(ext4.path(), "holds an ext4 file system");
    not_empty(xfs.path(), "holds an XFS file system");
    not_empty(parts.path(), "holds a partition table (MBR)");
    impossible(small.path(), "too small: it has 8 MiB");
    impossible(fixed.path(), "is read-only");
    let mount = grid.path("mnt");
    fs::create_dir(&mount).unwrap();
    if run("mount", &[ext4.path(), mount.to_str().unwrap()]) {
        impossible(ext4.path(), &format!("is mounted at {}", mount.display()));
        assert!(run("umount", &[mount.to_str().unwrap()]));
    }
    assert!(run("blkid", &[ext4.path()]), "it is as it was");
    let listed = grid.ok("device list --eligible");
    let line = |path: &str| listed.lines().find(|line| line.starts_with(&format!("{path} "))).unwrap().to_string();
    assert!(line(blank.path()).contains(" yes "), "{listed}");
    assert!(line(xfs.path()).contains(" with --force "), "{listed}");

    grid.ok(&format!("device add 1 --path {}", blank.path()));
    impossible(blank.path(), "is a device of node 1 of this grid already");
    grid.ok(&format!("device add 2 --path {} --force", ext4.path()));
    assert!(!run("blkid", &["--probe", ext4.path()]), "nobody takes it for a file system any more");
    grid.ok("volume create v1 --size 64MiB --layout mirror:2");
    assert_eq!(grid.json("device list").as_array().unwrap().len(), 4);
    grid.ok("device drain 1/1");
    grid.ok("task watch");
    until("the device is empty", || grid.run("device remove 1/1").status.success());
    assert!(blank.device.exists(), "it is not a file to delete");
    assert_eq!(verdict(&grid, blank.path()), ("eligible".to_string(), String::new()));
    grid.ok("grid down");
    grid.ok("grid up");
}

#[test]
fn devices_of_another_grid_are_left_alone() {
    let (grid, other) = (Grid::new(8), Grid::new(9));
    for g in [&grid, &other] {
        g.up("--nodes 1 --devices 1");
    }
    let theirs = other.path("devices/node1-0.img");
    let add = format!("device add 1 --path {}", theirs.display());
    assert!(grid.fails(&format!("{add} --force")).contains("in use by another process"));
    other.ok("grid down");
    let id = other.json("status")["grid"].as_str().unwrap().to_string();
    let error = grid.fails(&add);
    assert!(error.contains(&format!("belongs to node 1 of grid {id}")), "{error}");
    other.ok("grid up");
    other.ok("grid down");
    grid.ok(&format!("{add} --force"));
    assert_eq!(grid.json("device list").as_array().unwrap().len(), 2);
    other.ok("grid up");
    until("it is left out, and told", || other.ok("status").contains("another process uses it"));
    grid.ok("grid down");
    until("it is left out for another reason", || other.ok("status").contains("belongs to grid"));
    grid.ok("grid up");
    assert_eq!(grid.json("device list").as_array().unwrap().len(), 2);
}

#[test]
fn a_grid_and_nodes_are_made_on_devices_that_are_there() {
    let grid = Grid::new(10);
    let disks = tempfile::tempdir().unwrap();
    let disk = |name: &str, bytes: &[u8]| {
        let path = disks.path().join(name);
        fs::write(&path, bytes).unwrap();
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(256 << 20).unwrap();
        path.display().to_string()
    };
    let (one, two, full) = (disk("one", &[]), disk("two", &[]), disk("full", &[1; 4096]));
    let port = &grid.port;
    let error = grid.fails(&format!("grid up --port {port} --device {one} --device {full}"));
    assert!(error.contains("unknown kind") && !grid.path("grid.json").exists(), "{error}");
    assert!(grid.fails(&format!("grid up --device {one} --device {one}")).contains("named twice"));
    assert!(grid.fails(&format!("grid up --nodes 2 --device {one}")).contains("holdfast node add"));
    assert_eq!(verdict(&grid, &one).0, "eligible");
    grid.ok(&format!("grid up --port {port} --device {one}"));
    assert!(grid.fails(&format!("node add --path {full}")).contains("--force"));
    grid.ok(&format!("node add --path {two} --path {full} --force"));
    let devices = grid.json("device list");
    assert_eq!(devices.as_array().unwrap().len(), 3);
    grid.ok("volume create v1 --size 16MiB --layout mirror:2");
    grid.ok("grid down");
    grid.ok("grid up");
    assert!(Path::new(&one).exists());
}

/// The counters of the grid's read caches.
fn read_caches(grid: &Grid) -> Vec<serde_json::Value> {
    let devices = grid.json("device list");
    let told = devices.as_array().unwrap().iter().map(|row| row["device"]["read_cache"].clone());
    told.filter(|cache| !cache.is_null()).collect()
}

#[test]
fn what_is_read_again_and_again_from_a_slow_device_is_read_from_a_fast_one() {
    let grid = Grid::new(45);
    grid.up("--nodes 2 --devices 2");
    grid.ok("volume create v1 --size 16MiB --layout mirror:2");
    let (original, scratch) = (grid.path("original"), grid.path("scratch"));
    pattern(&original, 16 << 20);
    nbdcopy(original.to_str().unwrap(), &grid.uri("v1"));
    // So that all of it lies in segments.
    grid.ok("volume unexport v1");
    grid.ok("volume export v1");
    assert!(read_caches(&grid).is_empty(), "all devices are alike");
    for node in [1, 2] {
        grid.ok(&format!("device class {node}/0 nvme"));
        grid.ok(&format!("device class {node}/1 hdd"));
    }
    let sum = |key: &str| read_caches(&grid).iter().map(|cache| cache[key].as_u64().unwrap()).sum::<u64>();
    until("reads are served from a read cache", || {
        assert_volume_holds(&grid.uri("v1"), &original, &scratch);
        sum("hits") > 20
    });
    assert!(read_caches(&grid).len() <= 2 && sum("held_bytes") > 1 << 20 && sum("damaged") == 0);
    let list = grid.ok("device list");
    assert!(list.contains("read cache on 1/0: ") && list.contains(" reads of slower devices"), "{list}");

    let path = grid.path("holdfast.toml");
    fs::write(&path, "[cache]\nreads = \"off\"\n").unwrap();
    assert!(grid.ok("config check").contains("it sets 1 of"));
    grid.ok("grid down");
    grid.ok("grid up");
    for _ in 0..3 {
        assert_volume_holds(&grid.uri("v1"), &original, &scratch);
    }
    assert!(read_caches(&grid).is_empty(), "it is off");
    // A node starts whatever is wrong with the file.
    fs::write(&path, "[cache]\nreads = \"200 %\"\n").unwrap();
    assert!(grid.fails("config check").contains("from 1 % to 50 %, or off"));
    grid.ok("node kill 2");
    grid.ok("node start 2");
    assert!(read_caches(&grid).is_empty(), "it does without");
}

/// Process of each node.
fn node_pids(grid: &Grid) -> Vec<u64> {
    let status = grid.json("grid status");
    let nodes = status["nodes"].as_array().unwrap_or_else(|| panic!("{status}")).clone();
    nodes.iter().map(|node| node["pid"].as_u64().unwrap_or_else(|| panic!("{status}"))).collect()
}

#[test]
fn nodes_are_restarted_in_turn_while_clients_write() {
    let grid = Grid::new(46);
    grid.up("--nodes 3 --devices 1");
    grid.ok("volume create v1 --size 32MiB");
    let (file, scratch) = (grid.path("pattern"), grid.path("scratch"));
    pattern(&file, 32 << 20);
    let before = node_pids(&grid);
    let uri = grid.uri("v1");
    let is_over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                nbdcopy(file.to_str().unwrap(), &uri);
            }
        });
        let said = grid.run("node restart --rolling --patience 120");
        is_over.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(said.status.success(), "{}", text(&said.stderr));
        assert!(text(&said.stdout).contains("node 3 is restarted (3 of 3)"), "{}", text(&said.stdout));
    });
    let after = node_pids(&grid);
    assert!(before.iter().all(|pid| !after.contains(pid)), "{before:?} {after:?}");
    assert_volume_holds(&uri, &file, &scratch);
    grid.ok("node kill 1");
    let refusal = grid.fails("node restart 2 3 --patience 1");
    for part in ["node 2 is not restarted", "nothing was restarted", "node 1 is down"] {
        assert!(refusal.contains(part), "{part}: {refusal}");
    }
    assert_eq!(node_pids_of_up(&grid), 2);
}

fn node_pids_of_up(grid: &Grid) -> usize {
    let status = grid.json("grid status");
    status["nodes"].as_array().unwrap().iter().filter(|node| node["pid"].is_u64()).count()
}

/// Asks by HTTP: the status, and what comes with it.
fn by_http(grid: &Grid, method: &str, target: &str, more: &[&str]) -> (u16, Value) {
    let mut command = Command::new(needs("curl"));
    command.args(["-sS", "-X", method, "-w", "\n%{http_code}", "--unix-socket"]).arg(grid.path("api.sock"));
    let output = command.args(more).arg(format!("http://host{target}")).output().expect("it runs");
    let said = text(&output.stdout);
    let (body, status) = said.rsplit_once('\n').unwrap_or_else(|| panic!("{said}{}", text(&output.stderr)));
    (status.parse().expect("a status"), serde_json::from_str(body).unwrap_or(Value::Null))
}

#[test]
fn volumes_are_made_and_kept_by_http() {
    let grid = Grid::new(47);
    grid.up("--nodes 3 --devices 1");
    let json = |body: &'static str| ["-H", "Content-Type: application/json", "-d", body];
    let make = r#"{"name":"v1","size_bytes":16777216,"layout":"mirror:2"}"#;
    let keyed = [&json(make)[..], &["-H", "Idempotency-Key: 1f6e"]].concat();
    for _ in 0..2 {
        let (status, made) = by_http(&grid, "POST", "/v1/volumes", &keyed);
        assert_eq!((status, &made["name"], &made["layout"]), (201, &"v1".into(), &"mirror:2".into()), "{made}");
    }
    let (status, refused) = by_http(&grid, "POST", "/v1/volumes", &json(make));
    assert_eq!((status, &refused["error"]["code"]), (409, &"exists".into()), "{refused}");
    let (status, made) = by_http(&grid, "POST", "/v1/volumes/v1/snapshots", &json(r#"{"name":"s1"}"#));
    assert_eq!(status, 201, "{made}");
    let (status, listed) = by_http(&grid, "GET", "/v1/volumes/v1/snapshots", &[]);
    assert_eq!((status, &listed["snapshots"][0]["name"]), (200, &"s1".into()), "{listed}");
    let clone = json(r#"{"name":"c1","size_bytes":33554432}"#);
    let (status, made) = by_http(&grid, "POST", "/v1/volumes/v1/snapshots/s1/clone", &clone);
    assert_eq!((status, &made["size_bytes"]), (201, &33_554_432.into()), "{made}");
    let (status, set) = by_http(&grid, "PATCH", "/v1/volumes/v1", &json(r#"{"qos":"weight=400"}"#));
    assert_eq!((status, &set["limit"]), (200, &"weight=400".into()), "{set}");
    assert_eq!(by_http(&grid, "DELETE", "/v1/volumes/c1", &[]), (204, Value::Null));
    let (status, _) = by_http(&grid, "DELETE", "/v1/volumes/v1/snapshots/s1", &[]);
    assert_eq!(status, 204);
    assert_eq!(by_http(&grid, "DELETE", "/v1/volumes/v1?force=true", &[]).0, 204);
    let (_, trash) = by_http(&grid, "GET", "/v1/trash", &[]);
    assert_eq!(trash["trash"][0]["name"], "v1", "{trash}");
    let (status, back) = by_http(&grid, "POST", "/v1/trash/v1/restore", &json("{}"));
    assert_eq!((status, &back["name"]), (200, &"v1".into()), "{back}");
    assert_eq!(grid.json("volume list")[0]["name"], "v1");
    let (status, grid_status) = by_http(&grid, "GET", "/v1/status", &[]);
    assert_eq!((status, grid_status["nodes"].as_array().map(Vec::len)), (200, Some(3)));
    for target in ["/v1/volumes", "/v1/volumes/v1", "/v1/volumes/v1/slow", "/v1/volumes/v1/parts", "/v1/nodes"] {
        assert_eq!(by_http(&grid, "GET", target, &[]).0, 200, "{target}");
    }
    for target in ["/v1/tasks", "/v1/space", "/v1/qos", "/v1/machines", "/v1/openapi.json"] {
        assert_eq!(by_http(&grid, "GET", target, &[]).0, 200, "{target}");
    }
    assert_eq!(by_http(&grid, "GET", "/v1/volumes/v2", &[]).0, 404);
}

#[test]
fn people_are_told_what_is_not_well_by_webhook_and_by_mail() {
    let grid = Grid::new(11);
    grid.up("--nodes 2 --devices 1");
    assert!(grid.fails("alerts test").contains("set alerts.webhook or alerts.smtp"));
    let (hook, mail, heard) = receivers();
    let file = format!(
        "[alerts]\nwebhook = \"http://127.0.0.1:{hook}/secret\"\nsmtp = \"smtp://127.0.0.1:{mail}\"\n\
         mail_from = \"grid@example.org\"\n"
    );
    std::fs::write(grid.path("holdfast.toml"), &file).expect("written");
    assert!(grid.fails("config check").contains("alerts.mail_to is not"));
    let file = format!("{file}mail_to = \"ann@example.org, bob@example.org\"\n");
    std::fs::write(grid.path("holdfast.toml"), file).expect("written");
    grid.ok("grid down --host");
    grid.ok("grid up");
    let said = grid.ok("alerts test");
    assert!(said.contains(&format!("webhook at 127.0.0.1:{hook}: sent")) && !said.contains("secret"), "{said}");
    let next = || heard.recv_timeout(Duration::from_secs(120)).expect("something is told");
    let by_hook: Value = serde_json::from_str(&next()).expect("JSON");
    assert_eq!((by_hook["became"].as_str(), by_hook["host"].as_str()), (Some("test"), Some("local")));
    let by_mail = next();
    for part in ["RCPT TO:<ann@example.org>", "RCPT TO:<bob@example.org>", "Subject: [holdfast local] TEST"] {
        assert!(by_mail.contains(part), "{by_mail}");
    }
    // A volume whose nodes are gone is told without anybody asking.
    grid.ok("volume create v1 --size 16MiB --layout mirror:2");
    for node in ["node1", "node2"] {
        signal(grid.pid(node).expect("it runs"), Signal::KILL).expect("it runs");
    }
    let raised = std::iter::repeat_with(next).find(|message| message.contains("nodes are away")).expect("endless");
    assert!(raised.contains("raised") || raised.contains("CRITICAL"), "{raised}");
}

#[test]
fn that_people_can_not_be_told_is_what_status_tells() {
    let grid = Grid::new(52);
    let nobody = free_ports(53, 1);
    grid.up("--nodes 2 --devices 1");
    let file = format!("[alerts]\nwebhook = \"http://127.0.0.1:{nobody}/secret\"\n");
    std::fs::write(grid.path("holdfast.toml"), file).expect("written");
    grid.ok("grid down --host");
    grid.ok("grid up");
    grid.ok("volume create v1 --size 16MiB --layout mirror:2");
    for node in ["node1", "node2"] {
        signal(grid.pid(node).expect("it runs"), Signal::KILL).expect("it runs");
    }
    let told = || {
        let findings = grid.json("status")["findings"].clone();
        let what = |finding: &Value| finding["what"].as_str().unwrap_or_default().to_string();
        findings.as_array().expect("a list").iter().map(what).find(|what| what.contains("alerts can't be sent"))
    };
    until("status tells", || told().is_some());
    let told = told().expect("just seen");
    assert!(told.contains(&format!("webhook at 127.0.0.1:{nobody}: ")) && !told.contains("secret"), "{told}");
}

#[test]
fn what_can_not_be_is_told_apart_from_what_fails() {
    let grid = Grid::new(50);
    grid.up("--nodes 3 --devices 1");
    grid.ok("volume create v1 --size 16MiB --layout mirror:2");
    grid.ok("snapshot create v1 s1");
    let asked = |method: &str, target: &str, body: &str| {
        let (status, said) = by_http(&grid, method, target, &["-H", "Content-Type: application/json", "-d", body]);
        (status, said["error"]["code"].as_str().unwrap_or_default().to_string())
    };
    for (method, target, body, status, code) in [
        ("POST", "/v1/volumes/v1/snapshots", r#"{"name":"s1"}"#, 409, "exists"),
        ("POST", "/v1/snapshot-groups", r#"{"volumes":["v1"],"name":"s1"}"#, 409, "exists"),
        ("DELETE", "/v1/volumes/v1/snapshots/s2", "", 404, "not-found"),
        ("POST", "/v1/volumes/v1/snapshots/s1/clone", r#"{"name":"c","size_bytes":1048576}"#, 409, "state"),
        ("POST", "/v1/volumes/v1/resize", r#"{"size_bytes":1048576}"#, 409, "state"),
        ("PATCH", "/v1/volumes/v1", r#"{"tiers":{"first":{"layout":"mirror:3","size":"1%"}}}"#, 409, "state"),
        ("PUT", "/v1/devices/first/class", r#"{"class":"ssd"}"#, 400, "invalid"),
        ("POST", "/v1/devices/first/drain", "{}", 400, "invalid"),
        ("POST", "/v1/sharing", r#"{"name":"d","layout":"mirror:2","key_file":"/nothing"}"#, 404, "not-found"),
        ("POST", "/v1/sharing", r#"{"name":"d","layout":"mirror:2","key_file":"/dev/zero"}"#, 409, "state"),
    ] {
        assert_eq!(asked(method, target, body), (status, code.to_string()), "{method} {target} {body}");
    }
    // Over the control socket nothing stands before the host, which has to go on.
    let mut control = UnixStream::connect(grid.path("control.sock")).expect("the host is up");
    writeln!(control, r#"{{"op":"snapshot-group","volumes":[],"name":"s2"}}"#).expect("it listens");
    let mut answer = String::new();
    BufReader::new(&control).read_line(&mut answer).expect("it answers");
    assert!(answer.contains("\"invalid\""), "{answer}");
    assert_eq!(by_http(&grid, "GET", "/v1/volumes/v1", &[]).0, 200);
}

/// All parts of a bundle, one after the other.
fn parts_of(file: &str) -> String {
    let output = Command::new("tar").args(["--extract", "--gzip", "--to-stdout", "--file", file]).output().unwrap();
    assert!(output.status.success(), "{file}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// Puts secrets of every kind where they are in real grids; returns each, with what it is.
fn keep_secrets(grid: &Grid) -> Vec<(&'static str, String)> {
    let mut secrets = vec![
        ("webhook", "hook-T024-xyzzy".to_string()),
        ("webhook of before", "hook-B777-plugh".to_string()),
        ("password of mail", "correct horse 77".to_string()),
        ("key of a volume", "5a0f".repeat(16)),
        ("argument of a key command", "vault-s.Zq81".to_string()),
        ("password of a proxy", "pr0xy-pw-31".to_string()),
    ];
    let given = secrets.clone();
    let of = |what: &str| given.iter().find(|(of, _)| *of == what).unwrap().1.clone();
    let secret_file = |name: &str, content: &str| {
        let path = grid.path(name);
        fs::write(&path, content).unwrap();
        assert!(run("chmod", &["600", path.to_str().unwrap()]));
        path.display().to_string()
    };
    let password = secret_file("mail", &format!("{}\n", of("password of mail")));
    let key = secret_file("vault", &of("key of a volume"));
    grid.ok(&format!("volume create vault --size 16MiB --layout mirror:2 --encrypt --key-file {key}"));
    let command = format!("echo {} >/dev/null; cat {key}", of("argument of a key command"));
    let told = ["volume", "create", "safe", "--size", "16MiB", "--layout", "mirror:2", "--encrypt", "--key-command"];
    let output = holdfast().arg("--dir").arg(grid.dir.path()).args(told).arg(command).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));

    let token = grid.ok("grid token");
    secrets.push(("join token", token.split_whitespace().find(|word| word.starts_with("hfjoin")).unwrap().to_string()));
    secrets.push(("token of a reader", grid.ok("grid tls operator ann --reader --token").trim().to_string()));
    for entry in fs::read_dir(grid.path("tls")).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.extension().is_some_and(|extension| extension == "key") {
            let lines = fs::read_to_string(&entry).unwrap();
            secrets.push(("private key", lines.lines().nth(1).unwrap().to_string()));
        }
    }
    assert!(secrets.iter().filter(|(what, _)| *what == "private key").count() >= 2, "of host and authority");
    let file = format!(
        "# alerts.webhook = \"https://127.0.0.1:9/{}\"\n[alerts]\nwebhook = \"https://127.0.0.1:9/{}\"\n\
         smtp = \"smtps://ann@127.0.0.1:9\"\nsmtp_password_file = \"{password}\"\nmail_from = \"a@example.org\"\n\
         mail_to = \"b@example.org\"\n",
        of("webhook of before"),
        of("webhook")
    );
    fs::write(grid.path("holdfast.toml"), file).unwrap();
    // As if a careless log had it all.
    let mut log = fs::OpenOptions::new().append(true).open(grid.path("logs/node1.log")).unwrap();
    for (what, secret) in secrets.iter().filter(|(what, _)| !what.contains("proxy")) {
        writeln!(log, "INFO {what}: {secret}, https://127.0.0.1:9/{secret}?x={secret}").unwrap();
    }
    writeln!(log, "INFO a proxy at http://ann:{}@10.0.0.1", of("password of a proxy")).unwrap();
    secrets
}

#[test]
fn a_bundle_for_support_tells_all_but_secrets() {
    let (grid, store) = (Grid::new(51), tempfile::tempdir().expect("a directory"));
    // Where machines join there are tokens.
    let member = etcd(store.path(), 51);
    let endpoint = member.config().endpoint();
    grid.up(&format!("--nodes 2 --devices 1 --tls on --address 127.0.0.1 --etcd {endpoint} --name a"));
    let secrets = keep_secrets(&grid);
    grid.ok("grid down --host");
    grid.ok("grid up");
    until("volumes are open", || grid.ok("volume list").matches("open").count() == 2);
    let bundle = |name: &str, parts: &[&str]| {
        let file = grid.path(name).display().to_string();
        let told = grid.json(&format!("support --output {file}"));
        let all = parts_of(&file);
        for (what, secret) in &secrets {
            assert!(!all.contains(secret), "{name}: {what} is in it");
        }
        for part in parts {
            assert!(all.contains(part), "{name} does not have {part}; missing: {}", told["missing"]);
        }
        told["missing"].to_string()
    };
    let always =
        ["holdfast 0.", "Names of volumes, machines and clients stay", "node1-0.img", "MemTotal", "INFO webhook: "];
    let told = ["holdfast_build_info", "\"vault\"", "alerts.webhook = [secret]", "smtps://ann@127.0.0.1:9", "VmRSS"];
    let missing = bundle("up.tar.gz", &[&always[..], &told].concat());
    assert!(!missing.contains("volumes.json") && !missing.contains("metrics.txt"), "{missing}");
    let again = grid.fails(&format!("support --output {}", grid.path("up.tar.gz").display()));
    assert!(again.contains("name another file"), "{again}");

    // Of a host that is down, files tell; of settings that are wrong, no more than that.
    grid.ok("grid down --force");
    let missing = bundle("down.tar.gz", &[&always[..], &["alerts.webhook = [secret]", "grid up"]].concat());
    assert!(missing.contains("volumes.json") && missing.contains("is not running"), "{missing}");
    let settings = fs::read_to_string(grid.path("holdfast.toml")).unwrap();
    fs::write(grid.path("holdfast.toml"), format!("{settings}webhook = https://127.0.0.1:9/x\n")).unwrap();
    let missing = bundle("wrong.tar.gz", &always);
    assert!(missing.contains("settings.txt") && missing.contains("line 8"), "{missing}");
}
