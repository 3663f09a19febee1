//! What pages of the documentation show is typed here as it stands, block by block, into a shell of a fresh user.
//!
//! Each block of commands has to succeed to its end. What a block takes for granted (a volume of that name, a file) is made
//! before. What would take long is shortened, and what this machine has not got is replaced: both are said where it is done.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use support::text;

/// What fails ends a block, and so does each part of a pipe. But `status` says by its code that not all is well.
const SHELL: &str = r#"set -e -o pipefail
holdfast() { command holdfast "$@" || [ "$1" = status ]; }"#;

/// Grids that begin at the same moment choose the same ports.
static BEGINNING: Mutex<()> = Mutex::new(());

/// A user who has read nothing but the page.
struct Reader {
    home: tempfile::TempDir,
    replaced: Vec<(&'static str, String)>,
}

impl Reader {
    fn new() -> Reader {
        Reader { home: tempfile::Builder::new().prefix("hf").tempdir().unwrap(), replaced: Vec::new() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    /// Where a page has the first, this machine has the second.
    fn has(&mut self, page: &'static str, here: &str) {
        self.replaced.push((page, here.to_string()));
    }

    /// Types it; it has to succeed.
    fn types(&self, script: &str) -> String {
        let _alone = script.contains("grid up").then(|| BEGINNING.lock().unwrap_or_else(PoisonError::into_inner));
        let own = Path::new(env!("CARGO_BIN_EXE_holdfast")).parent().unwrap().display();
        let script = self.replaced.iter().fold(script.to_string(), |script, (page, here)| script.replace(page, here));
        let output = Command::new("timeout")
            .args(["300", "bash", "-c", &format!("{SHELL}\n{script}\nwait")])
            .env("PATH", format!("{}:{own}:{}", self.path("bin").display(), std::env::var("PATH").unwrap()))
            .env("HOME", self.home.path())
            .env_remove("HOLDFAST_DIR")
            .current_dir(self.home.path())
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let said = text(&output.stdout) + &text(&output.stderr);
        eprintln!("{script}\n{said}");
        assert!(output.status.success(), "{script}: {}: {said}", output.status);
        said
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let down = "holdfast grid down --force";
        let own = env!("CARGO_BIN_EXE_holdfast");
        let _ = Command::new(own).args(down.split(' ').skip(1)).env("HOME", self.home.path()).output();
    }
}

/// The blocks of commands of a page, in its order.
struct Page {
    name: &'static str,
    blocks: std::vec::IntoIter<String>,
}

impl Page {
    fn open(name: &'static str) -> Page {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(name);
        let page = fs::read_to_string(path).unwrap();
        let mut blocks = Vec::new();
        for part in page.split("```").skip(1).step_by(2) {
            if let Some(block) = part.strip_prefix("console\n") {
                blocks.push(commands_of(block));
            }
        }
        Page { name, blocks: blocks.into_iter() }
    }

    /// The next one, which begins so.
    fn block(&mut self, begins: &str) -> String {
        let block = self.blocks.next().unwrap_or_else(|| panic!("{} has no other block", self.name));
        assert!(block.starts_with(begins), "{}: this is not the block that begins with `{begins}`: {block}", self.name);
        block
    }

    fn end(mut self) {
        assert_eq!(self.blocks.next(), None, "{} has more", self.name);
    }
}

/// What is typed, without prompts and without what is printed.
fn commands_of(block: &str) -> String {
    let mut commands: Vec<&str> = Vec::new();
    let mut goes_on = false;
    for line in block.lines() {
        let typed = if goes_on { Some(line) } else { line.strip_prefix("$ ").or_else(|| line.strip_prefix("# ")) };
        goes_on = typed.is_some_and(|typed| typed.ends_with('\\'));
        commands.extend(typed);
    }
    commands.join("\n")
}

#[test]
fn the_tutorial_on_one_machine_works_as_it_is_typed() {
    let mut reader = Reader::new();
    let mut page = Page::open("start.md");
    page.block("./x build");
    // It would take all the room that there is.
    let up = page.block("holdfast grid up");
    reader.types(&up.replacen("grid up", "grid up --device-size 2GiB", 1));
    reader.types(&page.block("holdfast volume plan"));
    // These take a minute each.
    reader.has("--seconds 60", "--seconds 6");
    reader.has("--runtime=60", "--runtime=6");
    let drill = reader.types(&page.block("holdfast drill"));
    assert!(drill.contains("(hang)") && drill.contains(": passed"), "{drill}");
    reader.types(&page.block("fio"));
    // An image of the reader's own; and no machine boots from it.
    reader.types("qemu-img create -f qcow2 disk.qcow2 64M");
    let machine = page.block("qemu-img convert");
    let (convert, machine) = machine.split_once('\n').unwrap();
    assert!(machine.starts_with("qemu-system-x86_64"));
    reader.types(convert);
    reader.types(&page.block("holdfast snapshot create"));
    reader.types(&page.block("holdfast grid down"));
}

/// Four nodes of two devices each, of both classes.
fn grid(reader: &Reader) {
    reader.types("holdfast grid up --nodes 4 --devices 2 --device-size 1GiB");
    for node in 1..=4 {
        reader.types(&format!("holdfast device class {node}/0 ssd; holdfast device class {node}/1 hdd"));
    }
}

#[test]
fn the_page_about_volumes_works_as_it_is_typed() {
    let mut reader = Reader::new();
    let mut page = Page::open("operate/volumes.md");
    grid(&reader);
    reader.types(&page.block("holdfast volume create vm1"));
    reader.types(&page.block("holdfast volume plan"));
    reader.types(&page.block("holdfast volume create vm4"));
    // Not everybody who tries this is root.
    let home = reader.home.path().display().to_string();
    reader.has("/root/", &format!("{home}/"));
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
    reader.types(&page.block("holdfast volume set vm1 --limit"));
    reader.types(&page.block("holdfast volume filter add"));
    page.end();
}

#[test]
fn the_page_about_snapshots_works_as_it_is_typed() {
    let reader = Reader::new();
    let mut page = Page::open("operate/snapshots.md");
    grid(&reader);
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
    let other = Reader::new();
    other.types("holdfast grid up --nodes 3 --device-size 1GiB");
    let bin = reader.path("bin");
    fs::create_dir(&bin).unwrap();
    let ssh = format!("#!/bin/sh\nshift\nHOME={} exec \"$@\"\n", other.home.path().display());
    support::program(&bin.join("ssh"), &ssh);
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
    page.end();
}

#[test]
fn the_pages_about_devices_drills_and_what_is_watched_work_as_they_are_typed() {
    let mut reader = Reader::new();
    grid(&reader);
    let mut page = Page::open("operate/plan.md");
    reader.types(&page.block("holdfast volume plan"));
    page.end();
    let mut page = Page::open("operate/monitor.md");
    let looks = page.block("holdfast status");
    // The last goes on until it is interrupted.
    let (looks, watch) = looks.rsplit_once('\n').unwrap();
    reader.types(looks);
    reader.types(&format!("timeout 3 {} || [ $? = 124 ]", watch.split("  #").next().unwrap()));
    page.end();

    let mut page = Page::open("operate/drills.md");
    reader.has("--seconds 60", "--seconds 6");
    let drills = page.block("holdfast drill node-loss");
    // The others do harm, and ask first: they are tested with their answer (drills.rs).
    reader.types(drills.lines().next().unwrap());
    reader.types(&page.block("holdfast node hang 3"));
    page.end();

    let mut page = Page::open("operate/devices.md");
    // A file is as good as a disk, and this machine has no other.
    let mut disks = (0..3).map(|number| {
        let path = reader.path(&format!("disk{number}"));
        fs::File::create(&path).unwrap().set_len(1 << 30).unwrap();
        path.display().to_string()
    });
    let mut with_disks = |block: &str| -> String {
        let take = |line: &str| match line.contains("/dev/disk/by-id/nvme-…") {
            true => line.replace("/dev/disk/by-id/nvme-…", &disks.next().unwrap()) + "\n",
            false => line.to_string() + "\n",
        };
        block.lines().map(take).collect()
    };
    reader.types(&with_disks(&page.block("holdfast device list --eligible")));
    reader.types(&with_disks(&page.block("holdfast device list  ")));
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
    page.end();
}
