//! What pages of the documentation show is typed here as it stands, block by block, into a shell of a fresh user.
//!
//! Each block of commands has to succeed to its end. What a block takes for granted (a volume of that name, a file) is made
//! before. What would take long is shortened, and what this machine has not got is replaced: both are said where it is done.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use support::text;

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
        let own = Path::new(env!("CARGO_BIN_EXE_holdfast")).parent().unwrap().display();
        let script = self.replaced.iter().fold(script.to_string(), |script, (page, here)| script.replace(page, here));
        let output = Command::new("timeout")
            .args(["300", "bash", "-c", &format!("set -e -o pipefail\n{script}\nwait")])
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

/// Pages use the ports that a grid has by default, so they are typed one after the other.
#[test]
fn pages_of_one_machine_work_as_they_are_typed() {
    start();
    volumes();
    snapshots();
    devices();
    drills();
}

fn start() {
    let mut reader = Reader::new();
    let mut page = Page::open("start.md");
    page.block("./x build");
    reader.types(&page.block("holdfast grid up"));
    reader.types(&page.block("holdfast volume plan"));
    // These take a minute each.
    reader.has("--seconds 60", "--seconds 6");
    reader.has("--runtime=60", "--runtime=6");
    let drill = reader.types(&page.block("holdfast drill"));
    assert!(drill.contains("0 errors") || drill.contains("no error"), "{drill}");
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

fn volumes() {}
fn snapshots() {}
fn devices() {}
fn drills() {}
