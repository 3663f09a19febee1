//! Pages that need several machines.
//!
//! Each is a directory with addresses of its own here, and members of etcd are real ones, by the configuration that is
//! printed for them.

use crate::prometheus::{Prometheus, queries_of_the_board};
use crate::reader::{Reader, Site};
use crate::support::{etcd, needs, until};
use holdfast_lab::page::{Page, Typed, blocks_of};
use std::fs;
use std::process::Command;

/// The tutorial's machines a, b and c, with the volume vm1 at a.
fn three(page: &mut Page) -> Site {
    ["etcd", "etcdctl"].iter().for_each(|program| drop(needs(program)));
    let mut site = Site::new(&["a", "b", "c"]);
    let said = site.types(&page.lines("holdfast device list"));
    site.obeys("a", &said);
    let endpoints = page.block("E=");
    site.all().for_each(|machine| drop(machine.types(&endpoints)));
    let up = page.lines("holdfast grid up");
    // Until its members have found each other etcd answers nobody.
    site.at("a").types_until(&up[0].command);
    site.types(&up[1..]);
    site.types(&page.lines("holdfast volume create"));
    site
}

/// Its host ends, and says nothing to anybody.
fn lose_host(machine: &mut Reader) {
    machine.types("kill -9 $(sed -n 's/.*\"pid\":\\([0-9]*\\).*/\\1/p' .holdfast/grid/run/host.pid)");
}

fn serves(site: &mut Site, at: &str, volume: &str) -> bool {
    let shown = site.at(at).tries(&format!("holdfast volume show {volume} --json"));
    String::from_utf8_lossy(&shown.stdout).contains("\"state\": \"open\"")
}

#[test]
fn the_tutorial_on_three_machines_works_and_so_do_multipath_and_upgrades() {
    let mut page = Page::open("start.md");
    page.begin_from("Three machines");
    let mut site = three(&mut page);
    // As the page has it, plugs are pulled.
    site.at("b").dies();
    site.at("a").types("qemu-io -f raw -c 'write 0 1M' \"nbd+unix:///vm1?socket=$HOME/.holdfast/grid/nbd.sock\"");
    site.at("b").types("systemctl start etcd; holdfast grid up");
    site.at("a").types("holdfast task watch");
    site.at("a").dies();
    until("another host serves it", || ["b", "c"].iter().any(|at| serves(&mut site, at, "vm1")));
    site.at("a").types("systemctl start etcd; holdfast grid up; holdfast volume handover vm1 --to a");
    let paths = page.lines("holdfast volume export vm1 --multipath");
    site.types(&paths);
    assert!(serves(&mut site, "b", "vm1"));
    multipath(&mut site);
    live_migration(&mut site);
    upgrade(&mut site);
}

fn live_migration(site: &mut Site) {
    let mut page = Page::open("integrate/qemu-libvirt.md");
    page.begin_from("Live migration");
    site.at("b").types("holdfast volume handover vm1 --to a; holdfast volume unexport vm1");
    assert!(!serves(site, "b", "vm1"));
    site.types(&page.lines("holdfast volume export vm1"));
    assert!(serves(site, "b", "vm1"));
}

fn multipath(site: &mut Site) {
    let mut page = Page::open("operate/multipath.md");
    site.at("b").types("holdfast volume delete vm1; holdfast volume create vm1 --size 1GiB");
    lose_host(site.at("b"));
    let by_command = page.lines("holdfast volume list");
    site.types(&by_command[..1]);
    // As long as its lease runs the host may be back.
    site.at("c").types_until(&by_command[1].command);
    assert!(serves(site, "c", "vm1"));
    site.at("a").types("holdfast volume create web1 --size 1GiB");
    site.types(&page.lines("holdfast volume export web1"));
    site.at("b").types("holdfast grid up");
    site.at("c").types("holdfast volume handover vm1 --to a");
    site.types(&page.lines("holdfast volume export vm1"));
    assert!(serves(site, "b", "vm1"));
}

/// Has systemd run the machine's part of the grid, as the page about installing says.
fn units(machine: &mut Reader) {
    machine.types("holdfast grid down --force; holdfast grid units; systemctl enable --now holdfast.target");
}

fn upgrade(site: &mut Site) {
    let mut page = Page::open("operate/upgrade.md");
    // The tutorial's grids are elsewhere, and systemd does not run them.
    for machine in site.all() {
        let dir = machine.path(".holdfast/grid").display().to_string();
        machine.has("/var/lib/holdfast", &dir);
    }
    // Where a machine leaves, three others have what the layout needs.
    site.add("d");
    let token = Typed { at: "a".into(), command: "holdfast grid token".into() };
    site.types_one(&token);
    let join = "--name d --address 10.0.0.4 --device /dev/disk/by-id/nvme-… --join TOKEN";
    let etcd = "https://10.0.0.1:2379,https://10.0.0.2:2379,https://10.0.0.3:2379";
    site.at("d").types(&format!("holdfast grid up --etcd {etcd} {join}"));
    units(site.at("a"));
    site.types(&page.lines("holdfast node restart --rolling"));
    site.types(&page.lines("holdfast node list"));
    let stop = page.lines("holdfast node stop 2");
    // What was restarted has to be whole again first, which the refusal says.
    site.at("b").types_until(&stop[0].command);
    site.types(&stop[1..]);
    let leave = page.lines("holdfast machine list");
    site.types(&leave[..3]);
    // Either it leaves in order or it is dead: the next one dies.
    site.at("b").types("holdfast grid down --force && rm -r .holdfast");
    let again = page.lines("holdfast grid token");
    site.types(&again[..1]);
    // The host that was taken out could not say that it goes: its lease runs out first.
    site.at("b").types_until(&again[1].command);
    site.at("b").dies();
    site.at("a").types_until(&leave[3].command);
    assert_eq!(leave.len(), 4);
}

#[test]
fn the_page_about_security_works_as_it_is_typed() {
    let mut start = Page::open("start.md");
    start.begin_from("Three machines");
    let mut site = three(&mut start);
    site.types(&start.lines("holdfast volume export vm1 --multipath"));
    site.add("vm7");
    let mut page = Page::open("operate/security.md");
    let a = site.at("a");
    let dir = a.path(".holdfast/grid").display().to_string();
    a.has("/var/lib/holdfast", &dir);
    units(a);
    // No user of this machine is changed: ann is the reader, whose own group may look.
    ["groupadd", "usermod"].iter().for_each(|tool| a.has_program(tool, "#!/bin/sh\n"));
    let group = a.types("id -gn");
    let readers = page.lines("groupadd");
    a.has("control.readers = \"holdfast-readers\"", &format!("control.readers = \"{}\"", group.trim()));
    for typed in readers {
        assert!(["", "ann"].contains(&typed.at.as_str()));
        a.types(&typed.command);
    }
    a.types("holdfast volume create db --size 1GiB");
    clients(&mut site, &page.lines("holdfast grid tls server"));
    by_https(&mut site, &page.lines("holdfast grid tls server"));
    by_command(&mut site, &page.lines("holdfast grid tls operator ann --token"));
    serves_http(&mut site, "b", "10.0.0.2");
    scraped(&mut site, Page::open("operate/monitoring.md"));
    looked_at(&mut site, Page::open("operate/dashboard.md"));
    site.types(&page.lines("holdfast grid tls show"));
    site.at("a").types("rm FILE");
    site.types(&page.lines("holdfast grid tls authority give c"));
    site.types(&page.lines("holdfast grid tls revoke client/vm7"));
}

/// A volume for one client, which is another machine.
fn clients(site: &mut Site, block: &[Typed]) {
    let (client, server) = block.split_last().unwrap();
    site.types(server);
    let (from, to) = (site.at("a").path("root/vm7"), site.at("vm7").path("etc/pki"));
    fs::create_dir(&to).unwrap();
    assert!(Command::new("cp").arg("-r").args([&from, &to]).status().unwrap().success());
    site.types_one(client);
    assert_eq!(client.at, "vm7");
}

/// For an operator, at another machine.
fn by_https(site: &mut Site, block: &[Typed]) {
    let (ann, server) = block.split_last().unwrap();
    site.add("ann");
    site.types(server);
    let (from, to) = (site.at("a").path("root/ann"), site.at("ann").path("ann"));
    assert!(Command::new("cp").arg("-r").args([&from, &to]).status().unwrap().success());
    assert_eq!(ann.at, "ann");
    site.at("ann").types_until(&ann.command);
    assert!(site.types_one(ann).contains("\"findings\":"));
}

/// The same operator, by the command line.
fn by_command(site: &mut Site, block: &[Typed]) {
    let (server, ann) = block.split_at(1);
    site.types(server);
    let (from, to) = (site.at("a").path("root/ann/token"), site.at("ann").path("ann/token"));
    fs::copy(from, to).unwrap();
    let typed: Vec<String> = ann.iter().map(|typed| typed.command.clone()).collect();
    assert!(ann.iter().all(|typed| typed.at == "ann"));
    assert!(site.at("ann").types(&typed.join("\n")).contains("host up"));
}

/// In a browser, which a test of its own has (`./x dashboard`).
fn looked_at(site: &mut Site, mut page: Page) {
    let a = site.at("a");
    let here = page.block("holdfast dashboard");
    // It goes on until it is interrupted.
    let said =
        a.types(&format!("timeout 3 {} || [ $? = 124 ]", here.lines().next().unwrap().split("  #").next().unwrap()));
    assert!(said.contains("http://127.0.0.1:7070/#token="), "{said}");
    assert!(here.lines().count() == 2 && here.contains("127.0.0.1:7070:") || here.contains("7070:127.0.0.1:7070"));
    // Ann has been given something before.
    a.types(&page.block("holdfast grid tls operator ann"));
}

/// Another host, too, by the same commands.
fn serves_http(site: &mut Site, name: &str, address: &str) {
    let mut page = Page::open("operate/security.md");
    page.begin_from("HTTP over the network");
    let block = page.lines("holdfast grid tls server");
    page.leave_from("HTTP over the network");
    let machine = site.at(name);
    let dir = machine.path(".holdfast/grid").display().to_string();
    machine.has("/var/lib/holdfast", &dir);
    units(machine);
    block[..3].iter().for_each(|typed| drop(machine.types(&typed.command.replace("10.0.0.1", address))));
}

/// By Prometheus, and by node_exporter, which is not there: its directory is.
fn scraped(site: &mut Site, mut page: Page) {
    let a = site.at("a");
    for directory in ["etc/prometheus", "run", "var/lib/prometheus/node-exporter"] {
        fs::create_dir_all(a.path(directory)).unwrap();
    }
    a.has("/run/holdfast", &a.path("run/holdfast").display().to_string());
    // No group of this machine is another's.
    a.has_program("chgrp", "#!/bin/sh\n");
    let integrations = format!("{}/../../integrations", env!("CARGO_MANIFEST_DIR"));
    a.has("/usr/share/holdfast", &integrations);
    let said = a.types(&page.block("curl --unix-socket"));
    assert_eq!(said.matches("# EOF").count() + said.matches("holdfast_build_info{").count(), 2, "{said}");
    a.types(&page.block("umask 027"));
    a.types(&page.block("curl -sS"));
    let written = |name: &str| fs::read_to_string(a.path(name)).unwrap();
    assert!(written("etc/prometheus/holdfast-token").len() > 100);
    assert!(written("var/lib/prometheus/node-exporter/holdfast.prom").contains("\nholdfast_"));

    // Looks are far apart where nothing is said of it.
    let parts = blocks_of("operate/monitoring.md", "yaml").concat();
    let config = a.here(&format!("global: {{ scrape_interval: 1s, evaluation_interval: 1s }}\n{parts}"));
    let file = a.path("etc/prometheus/prometheus.yml");
    fs::write(&file, config).unwrap();
    a.types(&page.block("mkdir -p /etc/prometheus/holdfast"));
    let listens = a.here("10.0.0.9:9090");
    let prometheus = Prometheus::start(&file, &a.path("prometheus"), &listens);
    until("both hosts are up", || prometheus.targets() == ["up", "up"]);
    until("all rules are looked at", || prometheus.rules().iter().all(|health| health == "ok"));
    assert!(prometheus.rules().len() > 20, "{:?}", prometheus.rules());

    // The page's own query, and those of the board.
    let [text] = &blocks_of("operate/monitoring.md", "text")[..] else { panic!("the page has one query") };
    let writes = "qemu-io -f raw -c 'write 0 1M' \"nbd+unix:///db?socket=$HOME/.holdfast/grid/nbd.sock\"";
    until("stages have times", || {
        a.types(writes);
        let found = prometheus.query(text);
        let is_timed = |of: &serde_json::Value| of["value"][1].as_str().is_some_and(|value| value != "NaN");
        found.len() == 19 && found.iter().all(is_timed)
    });
    let queries = queries_of_the_board(&integrations);
    assert!(queries.len() > 60, "{queries:?}");
    let found: usize = queries.iter().filter(|query| !prometheus.query(query).is_empty()).count();
    assert!(found > 45, "{found} of {} have something to show", queries.len());

    site.at("c").types("holdfast node kill 3");
    until("the rules see it", || prometheus.alerts().iter().any(|name| name == "HoldfastNodeAway"));
    site.at("c").types("holdfast node start 3");
    until("it is over", || !prometheus.alerts().iter().any(|name| name == "HoldfastNodeAway"));
}

#[test]
fn the_page_about_metadata_works_as_it_is_typed() {
    ["etcd", "etcdctl"].iter().for_each(|program| drop(needs(program)));
    let mut page = Page::open("operate/metadata.md");
    let mut site = Site::new(&["a", "b", "w", "x"]);
    let set_up = page.lines("holdfast grid etcd member a=");
    let said = site.types(&set_up[..1]);
    site.obeys("a", &said);
    // Until its members have found each other etcd answers nobody.
    site.at("a").types_until(&set_up[1].command);
    site.types(&set_up[2..]);
    site.at("a").types("holdfast volume create vm1 --size 1GiB --layout mirror:2");

    let replace = page.lines("holdfast grid etcd member x=");
    site.at("w").dies();
    let said = site.types(&replace[..1]);
    site.obeys("a", &said);
    site.types(&replace[1..]);
    site.at("b").types("holdfast volume list");

    let anew = page.lines("holdfast grid etcd member a=");
    for name in ["a", "b", "x"] {
        site.at(name).types("kill -9 $(cat etcd.pid); rm -r /var/lib/etcd");
    }
    let said = site.types(&anew);
    site.obeys("a", &said);
    let recover = page.lines("holdfast grid down --host");
    site.types(&recover[..1]);
    site.at("a").types_until(&recover[1].command);
    site.types(&recover[2..]);
    until("the volume is there", || serves(&mut site, "a", "vm1"));
}

#[test]
fn the_page_about_installing_works_as_it_is_typed() {
    let mut page = Page::open("operate/install.md");
    let mut reader = Reader::new();
    // It is built, and lies elsewhere: perhaps below a directory that is another one here.
    reader.has("./x build", "true");
    let built = reader.path("built");
    fs::create_dir(&built).unwrap();
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_holdfast"), built.join("holdfast")).unwrap();
    reader.has("target/release/holdfast", built.join("holdfast").to_str().unwrap());
    // No package is made and brought in here: `./x package --try` does.
    reader.has_program("apt", "#!/bin/sh\n");
    reader.has("./x package", "true");
    let package = page.lines("./x package");
    package.iter().for_each(|typed| drop(reader.types(&typed.command)));
    let build: Vec<String> = page.lines("./x build").into_iter().map(|typed| typed.command).collect();
    reader.types(&build.join("\n"));
    reader.types(&page.block("holdfast device list"));
    reader.types(&page.block("holdfast grid down"));
    until("systemd's host answers", || reader.tries("holdfast volume list").status.success());

    let store = tempfile::tempdir().unwrap();
    let member = etcd(store.path(), 41);
    let mut site = Site::new(&["a", "b"]);
    site.has("http://10.0.0.9:2379", &member.config().endpoint());
    site.types(&page.lines("holdfast grid up --etcd"));
    site.types(&page.lines("holdfast config explain"));
    site.types(&page.lines("holdfast grid address"));
    until("it is reached there", || site.at("a").tries("holdfast machine list").status.success());
}
