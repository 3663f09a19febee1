//! Encrypted volumes through the command line: what lies on devices, and what becomes of a volume whose key is elsewhere.

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::{Grid, assert_volume_holds, etcd, nbdcopy, needs, program, text, until};

const LEN: usize = 12 << 20;

/// Recognisable wherever it turns up: each 512 bytes begin with the mark.
fn marked(path: &Path, mark: &str) {
    let sectors = (0..LEN / 512).flat_map(|i| {
        let mut sector = format!("{mark} {i:08} ").into_bytes();
        sector.resize(512, b'.');
        sector
    });
    fs::write(path, sectors.collect::<Vec<u8>>()).unwrap();
}

/// How often the mark stands at the beginning of a sector of a device.
fn on_devices(grid: &Grid, mark: &str) -> usize {
    let devices = fs::read_dir(grid.path("devices")).unwrap().map(|entry| entry.unwrap().path());
    let count = |path: PathBuf| {
        let bytes = fs::read(path).unwrap();
        bytes.chunks(512).filter(|sector| sector.starts_with(mark.as_bytes())).count()
    };
    devices.map(count).sum()
}

fn key_file(grid: &Grid, name: &str, mode: u32) -> String {
    let path = grid.path(name);
    let _ = fs::remove_file(&path);
    let digits: String = name.bytes().cycle().take(32).map(|b| format!("{b:02x}")).collect();
    fs::write(&path, digits + "\n").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    path.to_str().unwrap().to_string()
}

fn restart(grid: &Grid) {
    grid.ok("grid down");
    grid.ok("grid up");
}

fn state(grid: &Grid, volume: &str) -> String {
    grid.json(&format!("volume show {volume}"))["state"].as_str().unwrap().to_string()
}

#[test]
fn what_cannot_be_a_key_is_refused() {
    let grid = Grid::new(0);
    grid.up("--nodes 2 --devices 1");
    let create = "volume create vault --size 16MiB --layout mirror:2";
    let (good, open) = (key_file(&grid, "good", 0o600), key_file(&grid, "open", 0o644));
    assert!(grid.fails(&format!("{create} --encrypt")).contains("--key-file"));
    assert!(grid.fails(&format!("{create} --key-file {good}")).contains("--encrypt"));
    assert!(
        grid.fails(&format!("{create} --encrypt --key-file {good} --key-command true")).contains("cannot be used with")
    );
    assert!(grid.fails(&format!("{create} --encrypt --key-file {open}")).contains("chmod 600"));
    assert!(grid.fails(&format!("{create} --encrypt --key-file /nowhere/key")).contains("openssl rand"));
    assert!(grid.fails(&format!("{create} --encrypt --key-command false")).contains("ended with"));
    assert!(grid.ok("volume list").contains("no volumes yet"), "nothing is made without a key");
    grid.ok(create);
    assert!(grid.fails(&format!("volume rekey vault --key-file {good}")).contains("not encrypted"));
    assert!(grid.fails(&format!("volume export vault --key-file {good}")).contains("not encrypted"));
}

#[test]
fn devices_hold_no_plaintext_and_the_wrong_key_opens_nothing() {
    let grid = Grid::new(1);
    grid.up("--nodes 3 --devices 1");
    let key = key_file(&grid, "key", 0o600);
    let made = grid.json(&format!("volume create vault --size 32MiB --encrypt --key-file {key}"));
    assert_eq!((&made["state"], &made["encrypted"]), (&"open".into(), &true.into()), "{made}");
    assert_eq!(grid.json("volume create plain --size 32MiB")["encrypted"], false);

    // Bulk writes that go past the log, and small ones that don't.
    let (secret, open, scratch) = (grid.path("secret"), grid.path("open-data"), grid.path("scratch"));
    marked(&secret, "SECRET-OF-VAULT");
    marked(&open, "OPEN-TO-ALL");
    for (data, volume) in [(&secret, "vault"), (&open, "plain")] {
        nbdcopy(data.to_str().unwrap(), &grid.uri(volume));
        let small = ["--request-size=32768", data.to_str().unwrap(), &grid.uri(volume)].map(str::to_string);
        let output = Command::new(needs("nbdcopy")).args(small).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
    }
    grid.kill_host().expect("it runs");
    grid.ok("grid up");
    assert_volume_holds(&grid.uri("vault"), &secret, &scratch);
    assert_volume_holds(&grid.uri("plain"), &open, &scratch);
    // All of the log has become segments.
    restart(&grid);
    assert!(on_devices(&grid, "OPEN-TO-ALL") > LEN / 512, "what is not encrypted is found where it is looked for");
    assert_eq!(on_devices(&grid, "SECRET-OF-VAULT"), 0);

    only_its_key_opens_it(&grid, &key, &secret, &open);
    its_key_is_wrapped_anew(&grid, &key, &secret);
    a_separate_clone_has_a_wrapping_of_its_own(&grid, &secret);
    assert!(grid.ok("volume delete vault --now").contains("its key destroyed"));
    assert_eq!(on_devices(&grid, "SECRET-OF-VAULT"), 0);
}

/// Another key, and none: the volume stays closed, the other one serves, and nothing is lost.
fn only_its_key_opens_it(grid: &Grid, key: &str, secret: &Path, open: &Path) {
    let scratch = grid.path("scratch");
    let kept = grid.path("kept");
    fs::rename(key, &kept).unwrap();
    fs::copy(key_file(grid, "another", 0o600), key).unwrap();
    for why in ["is not the key", "cannot read key file"] {
        restart(grid);
        until("the volume is locked", || state(grid, "vault") == "locked");
        assert!(grid.ok("volume list").contains(why), "{}", grid.ok("volume list"));
        let error = grid.fails("volume export vault");
        assert!(error.contains(why) && error.contains("--key-file") && error.contains("all its data"), "{error}");
        assert_volume_holds(&grid.uri("plain"), open, &scratch);
        let _ = fs::remove_file(key);
    }
    fs::rename(&kept, key).unwrap();
    until("the volume opens once its key is there", || state(grid, "vault") == "open");
    assert_volume_holds(&grid.uri("vault"), secret, &scratch);
}

/// The key is wrapped anew while the volume is used; from then on it is the new one that opens it.
fn its_key_is_wrapped_anew(grid: &Grid, key: &str, secret: &Path) {
    let scratch = grid.path("scratch");
    let command = grid.path("give-key");
    program(&command, &format!("#!/bin/sh\ncat {}\n", key_file(grid, "new", 0o600)));
    let told = grid.ok(&format!("volume rekey vault --key-command {}", command.display()));
    assert!(told.contains("opens it no more"), "{told}");
    assert!(grid.fails(&format!("volume export vault --key-file {key}")).contains("is not the key"));
    fs::remove_file(key).unwrap();
    restart(grid);
    until("the new key opens it", || state(grid, "vault") == "open");
    assert_volume_holds(&grid.uri("vault"), secret, &scratch);
    // A host that was not told of a command does not run it.
    grid.ok("grid down");
    fs::remove_file(grid.path("keys.json")).unwrap();
    grid.ok("grid up");
    until("the volume is locked", || state(grid, "vault") == "locked");
    assert!(grid.fails("volume export vault").contains("nobody has named at this host"));
    grid.ok(&format!("volume export vault --key-command {}", command.display()));
    assert_volume_holds(&grid.uri("vault"), secret, &scratch);
}

/// A separate clone has a wrapping of its own of the same key.
fn a_separate_clone_has_a_wrapping_of_its_own(grid: &Grid, secret: &Path) {
    let scratch = grid.path("scratch");
    grid.ok("snapshot create vault v1");
    let clone = grid.json("volume clone vault@v1 copy --separate");
    assert_eq!((&clone["state"], &clone["encrypted"]), (&"open".into(), &true.into()), "{clone}");
    assert_volume_holds(&grid.uri("copy"), secret, &scratch);
    let own = key_file(grid, "own", 0o600);
    grid.ok(&format!("volume rekey copy --key-file {own}"));
    restart(grid);
    until("both open", || state(grid, "vault") == "open" && state(grid, "copy") == "open");
    assert_volume_holds(&grid.uri("copy"), secret, &scratch);
    assert!(grid.fails("volume delete vault").contains("copy"));
    assert!(grid.ok("volume delete copy --now").contains("copy of the shared key destroyed"));
    until("the copy's space is back", || grid.json("status")["deleting"].as_array().is_some_and(Vec::is_empty));
}

#[test]
fn another_host_takes_an_encrypted_volume_over_where_it_gets_the_key() {
    let store = tempfile::tempdir().unwrap();
    let member = etcd(store.path(), 40);
    let endpoint = member.config().endpoint();
    let (a, b) = (Grid::new(2), Grid::new(3));
    a.up(&format!("--nodes 2 --devices 1 --etcd {endpoint} --name a"));
    let id = a.json("status")["grid"].as_str().unwrap().to_string();
    b.up(&format!("--nodes 1 --devices 1 --etcd {endpoint} --join {id} --name b"));
    until("both hosts see all nodes", || a.node_state(3) == "up" && b.node_state(1) == "up");
    let key = key_file(&a, "key", 0o600);
    let command = a.path("give-key");
    program(&command, &format!("#!/bin/sh\ncat {key}\n"));
    a.ok(&format!("volume create v1 --size 32MiB --layout mirror:2 --encrypt --key-command {}", command.display()));
    let (data, scratch) = (a.path("data"), a.path("scratch"));
    marked(&data, "SECRET-OF-V1");
    nbdcopy(data.to_str().unwrap(), &a.uri("v1"));
    // What stands in the metadata store is not run, and who can't open the volume does not take it away.
    assert!(b.fails("volume export v1 --takeover").contains("nobody has named at this host"));
    assert_eq!(state(&a, "v1"), "open");
    b.ok(&format!("volume export v1 --takeover --key-command {}", command.display()));
    until("host a has let go of it", || state(&a, "v1") == "elsewhere");
    // A file that the record names any host reads.
    b.ok(&format!("volume rekey v1 --key-file {key}"));
    b.ok("volume unexport v1");
    a.ok("volume export v1");
    assert_eq!(state(&a, "v1"), "open");
    assert_volume_holds(&a.uri("v1"), &data, &scratch);
}

#[test]
fn an_encrypted_domain_shows_nobody_what_its_members_share() {
    let grid = Grid::new(0);
    grid.up("--nodes 2 --devices 1");
    let (own, shared) = (key_file(&grid, "own", 0o600), key_file(&grid, "shared", 0o600));
    grid.ok(&format!("sharing create vaults --layout mirror:2 --compress off --encrypt --key-file {shared}"));
    grid.ok("sharing create open --layout mirror:2");
    assert!(grid.json("volume show vaults")["encrypted"] == true);
    let (file, scratch) = (grid.path("marked"), grid.path("scratch"));
    marked(&file, "SECRET");
    for name in ["v1", "v2"] {
        grid.ok(&format!("volume create {name} --size {LEN} --layout mirror:2 --encrypt --key-file {own}"));
        nbdcopy(file.to_str().unwrap(), &grid.uri(name));
    }
    grid.ok(&format!("volume create plain --size {LEN} --layout mirror:2"));
    assert!(grid.fails("volume set v1 --sharing open").contains("sharing create NAME --encrypt"));
    assert!(grid.fails("volume set plain --sharing vaults").contains("the store is encrypted"));
    for name in ["v1", "v2"] {
        grid.ok(&format!("volume set {name} --sharing vaults"));
    }
    let own_bytes =
        |name: &str| grid.json(&format!("volume show {name}"))["live"]["space"]["data_bytes"].as_u64().unwrap();
    until("the store alone has it", || own_bytes("v1") == 0 && own_bytes("v2") == 0);
    assert_eq!(own_bytes("vaults"), LEN as u64);
    let holds = |name: &str| assert_volume_holds(&grid.uri(name), &file, &scratch);
    ["v1", "v2"].into_iter().for_each(holds);
    assert_eq!(on_devices(&grid, "SECRET"), 0);
    // Without the store's key its members stay closed, and say why.
    let away = grid.path("away");
    fs::rename(&shared, &away).unwrap();
    restart(&grid);
    until("members are locked", || state(&grid, "v1") == "locked" && state(&grid, "v2") == "locked");
    let why = grid.json("volume show v1")["waits"].as_str().unwrap().to_string();
    assert!(why.contains("shares its content in an encrypted domain") && why.contains("volume vaults"), "{why}");
    fs::rename(&away, &shared).unwrap();
    until("they are open", || state(&grid, "v1") == "open" && state(&grid, "v2") == "open");
    ["v1", "v2"].into_iter().for_each(holds);
    // Who has left needs that key no more.
    grid.ok("volume set v1 --sharing none");
    until("it has left", || grid.json("volume show v1")["sharing"].is_null());
    fs::rename(&shared, &away).unwrap();
    restart(&grid);
    until("it is open", || state(&grid, "v1") == "open" && state(&grid, "v2") == "locked");
    holds("v1");
    fs::rename(&away, &shared).unwrap();
    until("the other is, too", || state(&grid, "v2") == "open");
    holds("v2");
    assert_eq!(on_devices(&grid, "SECRET"), 0);
}
