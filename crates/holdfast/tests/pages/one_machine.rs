//! Pages that need one machine, or one of each grid.

use crate::reader::{QEMU, Reader};
use crate::support::receivers;
use holdfast_lab::page::Page;

#[test]
fn the_tutorial_on_one_machine_works_as_it_is_typed() {
    let mut reader = Reader::new();
    let mut page = Page::open("start.md");
    page.block("./x build");
    // It would take all the room that there is.
    let up = page.block("holdfast grid up");
    reader.types(&up.replacen("grid up", "grid up --device-size 1GiB", 1));
    reader.types(&page.block("holdfast volume plan"));
    // These take a minute each.
    reader.has("--seconds 60", "--seconds 6");
    reader.has("--runtime=60", "--runtime=6");
    let drill = reader.types(&page.block("holdfast drill"));
    assert!(drill.contains("(hang)") && drill.contains(": passed"), "{drill}");
    reader.types(&page.block("fio"));
    // An image of the reader's own; and no machine boots from it: what is in its place reads its disk.
    reader.types("qemu-img create -f qcow2 disk.qcow2 64M");
    reader.has_program("qemu-system-x86_64", QEMU);
    let said = reader.types(&page.block("qemu-img convert"));
    assert!(said.contains("virtual size: 4 GiB"), "{said}");
    reader.types(&page.block("holdfast snapshot create"));
    reader.types(&page.block("holdfast grid down"));
    page.leave_from("Three machines");
}

#[test]
fn what_the_readme_shows_works_as_it_is_typed() {
    let mut reader = Reader::new();
    let mut page = Page::open("../README.md");
    // It is built; the devices would take all the room that there is; and a minute would be long.
    reader.has("./x build && export PATH=$PWD/target/release:$PATH", "holdfast --version");
    reader.has("grid up", "grid up --device-size 1GiB");
    reader.has("--seconds 60", "--seconds 6");
    // It goes on until it is interrupted.
    reader.has("holdfast dashboard  ", "timeout 3 holdfast dashboard || [ $? = 124 ]  ");
    let said = reader.types(&page.block("./x build"));
    assert!(said.contains("(hang)") && said.contains(": passed"), "{said}");
}

/// Four nodes of two devices each, of both classes.
fn grid(reader: &mut Reader) {
    reader.types("holdfast grid up --nodes 4 --devices 2 --device-size 1GiB");
    for node in 1..=4 {
        reader.types(&format!("holdfast device class {node}/0 ssd; holdfast device class {node}/1 hdd"));
    }
}

#[test]
fn the_pages_about_volumes_qos_and_reduction_work_as_they_are_typed() {
    let mut reader = Reader::new();
    let mut page = Page::open("operate/volumes.md");
    grid(&mut reader);
    reader.types(&page.block("holdfast volume create vm1"));
    reader.types(&page.block("holdfast volume plan"));
    reader.types(&page.block("holdfast volume create vm4"));
    reader.types("openssl rand -hex 32 >/root/new.key && chmod 600 /root/new.key");
    reader.types(&page.block("openssl rand"));
    reader.types("holdfast volume create ocfs --size 1GiB --no-export");
    reader.types(&page.block("holdfast volume export ocfs --shared"));
    reader.types("holdfast volume create scratch --size 1GiB; holdfast volume create db --size 1GiB");
    // One after the other they would find nothing: a volume that was restored can't be emptied, for one.
    for command in page.block("holdfast volume delete vm1").lines() {
        let is_gone = ["trash empty vm1", "rename vm1"].iter().any(|part| command.contains(part));
        let given = match command.contains("trash empty vm1") {
            true => "holdfast volume delete vm1",
            false if is_gone => "holdfast volume create vm1 --size 4GiB",
            false => "",
        };
        reader.types(given);
        reader.types(command);
    }
    reader.types("holdfast volume create vm1 --size 4GiB");
    reader.types(&page.block("holdfast volume filter add"));
    let mut page = Page::open("operate/qos.md");
    reader.types(&page.block("holdfast volume set vm1 --limit"));
    reader.has("qos measure", "qos measure --seconds 2");
    reader.types(&page.block("holdfast qos measure"));
    reader.types(&Page::open("operate/slow.md").block("holdfast top"));
    let mut page = Page::open("operate/reduction.md");
    reader.types(&page.block("holdfast volume create vm5"));
    reader.types(&page.block("holdfast volume show vm5"));
    reader.types(&page.block("holdfast sharing create guests"));
}

#[test]
fn the_page_about_benchmarks_works_as_it_is_typed() {
    let mut reader = Reader::new();
    grid(&mut reader);
    // Each takes minutes, and what it measures here says nothing.
    reader.has("--vms 4", "--vms 2 --size 32MiB --seconds 1 --layouts mirror:2");
    reader.has("diskspd-8k", "diskspd-8k --size 64MiB --seconds 1");
    reader.has("xdd-sweep --seconds 2", "xdd-sweep --size 16MiB --seconds 1 --sizes 4,64 --depths 4");
    reader.has("--threads 16", "--threads 2 --size 16MiB --seconds 1");
    reader.has("bench blender", "bench blender --vms 2 --size 32MiB --seconds 1");
    reader.has(
        "--scratch --nodes 4",
        "--scratch --nodes 2 --devices 1 --device-size 512MiB --threads 2 --size 16MiB --seconds 1",
    );
    let said = reader.types(&Page::open("operate/bench.md").block("holdfast bench vmfleet-4k"));
    for part in [
        "mirror, reduced to plain, reads",
        "mirror, saved",
        "volume to bare, requests a second",
        "random writes, holds at depth",
        "twice the threads: CPU a request",
        "all to one, reads of what was written at once",
        "twice the nodes: CPU a request",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let left = reader.types("holdfast volume list; ls $HOME/.holdfast/grid");
    assert!(!left.contains("bench-") && !left.contains("drill-"), "{left}");
    reader.types("! holdfast bench vm-farm --threads 2 --size 16MiB --seconds 1 --layout mirror:9");
}

#[test]
fn the_page_about_snapshots_works_as_it_is_typed() {
    let mut reader = Reader::new();
    let mut page = Page::open("operate/snapshots.md");
    grid(&mut reader);
    for volume in ["vm1", "db", "db-log", "db-temp", "golden"] {
        reader.types(&format!("holdfast volume create {volume} --size 256MiB"));
    }
    // It goes back to what it held on monday, with which the page is done.
    let taken = page.block("holdfast snapshot create vm1 monday");
    reader.types(&taken);
    reader.types("holdfast snapshot create vm1 monday");
    reader.types(&page.block("qemu-img convert"));
    reader.types("holdfast snapshot create golden v1");
    reader.types(&page.block("holdfast volume clone golden@v1"));
    // The other grid is another reader's.
    let mut other = Reader::new();
    other.types("holdfast grid up --nodes 3 --device-size 1GiB");
    let ssh = format!("#!/bin/sh\nshift\nHOME={} exec \"$@\"\n", other.home.path().display());
    reader.has_program("ssh", &ssh);
    let sent = page.block("holdfast send vm1@monday");
    let lines: Vec<&str> = sent.lines().collect();
    let [whole, more, resumed, changes] = lines[..] else { panic!("{sent}") };
    reader.types(whole);
    reader.types("holdfast snapshot create vm1 tuesday");
    reader.types(more);
    // Nothing of it was cut short, which is said.
    assert!(resumed.contains("--resume-token"));
    reader.types(changes);
    reader.types(&page.block("nbdinfo --map"));
}

#[test]
fn the_pages_about_devices_drills_and_what_is_watched_work_as_they_are_typed() {
    let mut reader = Reader::new();
    grid(&mut reader);
    let mut page = Page::open("operate/plan.md");
    reader.types(&page.block("holdfast volume plan"));
    let mut page = Page::open("operate/monitor.md");
    let looks = page.block("holdfast status");
    // The last goes on until it is interrupted.
    let (looks, watch) = looks.rsplit_once('\n').unwrap();
    reader.types(looks);
    reader.types(&format!("timeout 3 {} || [ $? = 124 ]", watch.split("  #").next().unwrap()));

    let (hook, mail, _heard) = receivers();
    let dir = reader.path(".holdfast/grid").display().to_string();
    reader.has("/var/lib/holdfast", &dir);
    reader.has("https://chat.example.org", &format!("http://127.0.0.1:{hook}"));
    reader.has("smtps://holdfast@mail.example.org:465", &format!("smtp://127.0.0.1:{mail}"));
    // That server knows no passwords.
    reader.has("alerts.smtp_password_file =", "# alerts.smtp_password_file =");
    reader.has_program("systemctl", "#!/bin/sh\nholdfast grid down --host && holdfast grid up\n");
    let said = reader.types(&page.block("cat >>/var/lib/holdfast/holdfast.toml"));
    assert_eq!(said.matches(": sent").count(), 2, "{said}");

    let machine = reader.types("holdfast machine list --json");
    let machine: serde_json::Value = serde_json::from_str(&machine).expect("JSON");
    reader.has(" announce b ", &format!(" announce {} ", machine[0]["name"].as_str().expect("a name")));
    let said = reader.types(&page.block("holdfast machine announce"));
    assert!(said.contains("is to be away until"), "{said}");

    let said = reader.types(&Page::open("operate/support.md").block("holdfast support"));
    assert!(said.contains("holdfast-support/README.txt") && said.contains("holdfast-support/metrics.txt"), "{said}");

    let mut page = Page::open("operate/drills.md");
    reader.has("--seconds 60", "--seconds 6");
    let drills = page.block("holdfast drill node-loss");
    // The others do harm, and ask first: they are tested with their answer (drills.rs).
    reader.types(drills.lines().next().unwrap());
    reader.types(&page.block("holdfast node hang 3"));

    let mut page = Page::open("operate/devices.md");
    reader.types(&page.block("holdfast device list --eligible"));
    reader.types(&page.block("holdfast device list  "));
    let drain = page.block("holdfast device drain 2/0");
    // Once the node is gone it has no class.
    reader.types(&page.block("holdfast device class 2/1"));
    for command in drain.lines() {
        if command == "holdfast node remove 2" {
            reader.types("holdfast task watch");
        }
        reader.types(command);
    }
    page.block("holdfast device health");
}
