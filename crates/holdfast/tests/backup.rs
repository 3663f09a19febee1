//! Backups of a grid's volumes, and back.

mod support;

use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use support::{Grid, holdfast, nbdcopy, needs, text, until};

/// Writes, and discards, by qemu-io.
fn change(uri: &str, commands: &[&str]) {
    let mut command = Command::new(needs("qemu-io"));
    command.args(["-f", "raw", "-d", "unmap"]);
    let commands = commands.iter().flat_map(|line| ["-c", line]);
    let output = command.args(commands).arg(uri).output().expect("it runs");
    assert!(output.status.success() && !text(&output.stdout).contains("failed"), "{}", text(&output.stdout));
}

struct Desk {
    grid: Grid,
    repository: String,
}

impl Desk {
    fn new(index: u16) -> Desk {
        let grid = Grid::new(index);
        grid.up("--nodes 3 --devices 1");
        let repository = grid.path("repository").display().to_string();
        fs::create_dir(&repository).expect("made");
        Desk { grid, repository }
    }

    fn path(&self, name: &str) -> String {
        self.grid.path(name).display().to_string()
    }

    /// What `backup create` says of the only volume.
    fn create(&self, of: &str) -> Value {
        self.grid.json(&format!("backup create {} {of}", self.repository))["backups"][0].clone()
    }

    /// The latest backup of the volume is what the volume is.
    fn assert_latest(&self, volume: &str) {
        let (now, image) = (self.path("now"), self.path("image"));
        let _ = (fs::remove_file(&now), fs::remove_file(&image));
        nbdcopy(&self.grid.uri(volume), &now);
        self.grid.ok(&format!("backup restore {} {volume} --image {image}", self.repository));
        assert_same(&now, &image);
    }
}

fn assert_same(one: &str, other: &str) {
    let is_same = Command::new("cmp").args([one, other]).status().expect("it runs").success();
    assert!(is_same, "{one} and {other} differ");
}

#[test]
fn what_changed_is_read_and_all_of_it_comes_back() {
    let desk = Desk::new(150);
    let (grid, repository) = (&desk.grid, &desk.repository);
    grid.ok("volume create v1 --size 64MiB --layout mirror:2");
    let why = grid.fails(&format!("backup create {repository} v1"));
    assert!(why.contains("backup init"), "{why}");
    grid.ok(&format!("backup init {repository}"));
    let uri = grid.uri("v1");
    change(&uri, &["write -P 1 0 20M", "write -P 2 40M 4k", "flush"]);
    let first = desk.create("v1");
    assert_eq!((&first["read_bytes"], &first["since"]), (&(21 << 20).into(), &Value::Null));
    desk.assert_latest("v1");
    // A block in the middle, another one that was a hole, a hole of whole chunks and parts, the end.
    change(
        &uri,
        &["write -P 3 5M 4k", "write -P 4 33M 4k", "discard 8388608 4198400", "write -P 5 67104768 4k", "flush"],
    );
    let second = desk.create("v1");
    assert_eq!(second["since"], first["id"]);
    assert_eq!(second["read_bytes"], 4 << 20, "three chunks, and the one that is discarded in part");
    desk.assert_latest("v1");
    let snapshots = grid.json("snapshot list v1");
    assert_eq!(snapshots.as_array().map(Vec::len), Some(1), "only that on which the next builds: {snapshots}");
    // Sizes, and the way back to a snapshot.
    grid.ok("volume resize v1 --size 24MiB --shrink");
    grid.ok("volume resize v1 --size 48MiB");
    change(&grid.uri("v1"), &["write -P 6 47M 4k", "flush"]);
    desk.create("v1");
    desk.assert_latest("v1");
    let kept = grid.json("snapshot list v1")[0]["name"].as_str().expect("a name").to_string();
    change(&grid.uri("v1"), &["write -P 7 1M 1M", "flush"]);
    grid.ok(&format!("snapshot rollback v1 {kept}"));
    change(&grid.uri("v1"), &["write -P 8 2M 4k", "flush"]);
    desk.create("v1");
    desk.assert_latest("v1");
    // One of an older backup is what that was, under its own name, with the grid's layout.
    grid.ok(&format!("backup restore {repository} {} old", first["id"].as_str().expect("an id")));
    let (old, expected) = (desk.path("old"), desk.path("expected"));
    nbdcopy(&grid.uri("old"), &old);
    let mut bytes = vec![0_u8; 64 << 20];
    bytes[..20 << 20].fill(1);
    bytes[40 << 20..][..4096].fill(2);
    fs::write(&expected, bytes).expect("written");
    assert_same(&old, &expected);
    let why = grid.fails(&format!("backup restore {repository} v1 old"));
    assert!(why.contains("in service") && why.contains("another name"), "{why}");
    // Without the snapshot all of it is read, and stored is what is not there.
    let kept = grid.json("snapshot list v1")[0]["name"].as_str().expect("a name").to_string();
    grid.ok(&format!("snapshot delete v1 {kept}"));
    let whole = desk.create("v1");
    assert_eq!((&whole["since"], &whole["added_bytes"]), (&Value::Null, &0.into()));
    // A snapshot that is there is read, and stays.
    grid.ok("snapshot create v1 mine");
    desk.create("v1@mine");
    let all = grid.json(&format!("backup create {repository} --all"));
    assert_eq!(all["backups"].as_array().map(Vec::len), Some(2), "v1 and old");
    assert!(grid.ok("snapshot list v1").contains("mine"));
    assert!(grid.json(&format!("backup verify {repository}"))["damage"].as_array().is_some_and(Vec::is_empty));
    grid.ok(&format!("backup prune {repository} --keep 1h"));
    desk.assert_latest("v1");
    desk.assert_latest("old");
}

#[test]
fn an_encrypted_volume_is_not_stored_in_plain_unasked() {
    let desk = Desk::new(151);
    let (grid, repository) = (&desk.grid, &desk.repository);
    let key = desk.path("key");
    let made = Command::new("sh").arg("-c").arg(format!("umask 077; openssl rand -hex 32 > {key}")).status();
    assert!(made.expect("it runs").success());
    grid.ok(&format!("volume create v1 --size 16MiB --layout mirror:2 --encrypt --key-file {key}"));
    change(&grid.uri("v1"), &["write -P 77 0 8M", "flush"]);
    grid.ok(&format!("backup init {repository}"));
    let why = grid.fails(&format!("backup create {repository} v1"));
    assert!(why.contains("--key-file") && why.contains("--plain"), "{why}");
    assert_eq!(grid.json("snapshot list v1"), serde_json::json!([]), "nothing is left of it");
    let safe = desk.path("safe");
    fs::create_dir(&safe).expect("made");
    grid.ok(&format!("backup init {safe} --key-file {key}"));
    grid.ok(&format!("backup create {safe} v1 --key-file {key}"));
    let why = grid.fails(&format!("backup list {safe}"));
    assert!(why.contains("--key-file"), "{why}");
    let found = Command::new("grep").args(["-rlaP", "\\x4d{64}|v1|mirror", &safe]).output().expect("it runs");
    assert_eq!(text(&found.stdout), "", "it shows in these");
    let why = grid.fails(&format!("backup restore {safe} v1 v2 --key-file {key}"));
    assert!(why.contains("--plain"), "{why}");
    grid.ok(&format!("backup restore {safe} v1 v2 --plain --key-file {key}"));
    let (one, other) = (desk.path("one"), desk.path("other"));
    nbdcopy(&grid.uri("v1"), &one);
    nbdcopy(&grid.uri("v2"), &other);
    assert_same(&one, &other);
}

#[test]
fn a_backup_or_a_restore_that_was_killed_is_done_again() {
    let desk = Desk::new(152);
    let (grid, repository) = (&desk.grid, &desk.repository);
    grid.ok("volume create v1 --size 96MiB --layout mirror:2");
    let source = desk.path("source");
    support::pattern(Path::new(&source), 96 << 20);
    nbdcopy(&source, &grid.uri("v1"));
    grid.ok(&format!("backup init {repository}"));
    let start = |words: &[&str]| {
        let mut command = holdfast();
        command.arg("--dir").arg(grid.path("")).arg("backup").args(words);
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it runs")
    };
    let kill_at = |words: &[&str]| {
        for moment in [3_u64, 30, 100, 200, 400] {
            let mut process = start(words);
            std::thread::sleep(std::time::Duration::from_millis(moment));
            process.kill().expect("killed");
            process.wait().expect("gone");
        }
    };
    kill_at(&["create", repository, "v1"]);
    grid.ok(&format!("backup create {repository} v1"));
    desk.assert_latest("v1");
    kill_at(&["restore", repository, "v1", "v2"]);
    let is_there = || {
        grid.json("volume list")
            .as_array()
            .is_some_and(|all| all.iter().any(|v| v["name"] == "v2" && v["exported"] == true))
    };
    until("it is there", || {
        start(&["restore", repository, "v1", "v2"]).wait().expect("it ends").success() || is_there()
    });
    let other = desk.path("other");
    nbdcopy(&grid.uri("v2"), &other);
    assert_same(&source, &other);
    assert!(grid.json(&format!("backup verify {repository}"))["damage"].as_array().is_some_and(Vec::is_empty));
}
