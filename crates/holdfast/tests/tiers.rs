//! Tiers through the command line: data are born in one place and end in another, and what clients read is the same.

mod support;

use serde_json::Value;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use support::{Grid, assert_volume_holds, needs, pattern, text, until};

const LEN: usize = 40 << 20;
const MIB: u64 = 1 << 20;

/// Small requests go through the log, as a guest's do.
fn copy_in(grid: &Grid, file: &Path) {
    let uri = grid.uri("vm");
    let output = Command::new(needs("nbdcopy")).arg("--request-size=65536").arg(file).arg(uri).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
}

fn tier(grid: &Grid, volume: &str) -> Value {
    grid.json(&format!("tier show {volume}"))[0].clone()
}

/// Bytes of guests' data by layout.
fn data_in(grid: &Grid, volume: &str, layout: &str) -> u64 {
    let parts = grid.json(&format!("volume explain {volume}"));
    let segments = parts["parts"]["segments"].as_array().unwrap_or_else(|| panic!("{parts}")).clone();
    let of = |s: &&Value| s["kind"] == "data" && s["layout"] == layout;
    segments.iter().filter(of).map(|s| s["bytes"].as_u64().unwrap()).sum()
}

#[test]
fn what_cannot_be_tiers_is_refused() {
    let grid = Grid::new(0);
    grid.up("--nodes 3 --devices 1");
    assert!(grid.ok("tier show").contains("--first-tier"));
    let create = "volume create vm --size 512MiB";
    assert!(grid.fails(&format!("{create} --first-tier mirror")).contains("not a layout"));
    assert!(grid.fails(&format!("{create} --first-tier mirror:2,floppy")).contains("class of media"));
    assert!(grid.fails(&format!("{create} --first-tier parity:2+1")).contains("for nothing"));
    assert!(grid.fails(&format!("{create} --first-tier mirror:2,4MiB")).contains("full all the time"));
    assert!(grid.fails(&format!("{create} --layout mirror:3 --first-tier mirror:2")).contains("mirror:3"));
    assert!(grid.ok("volume list").contains("no volumes yet"), "nothing is made with tiers that don't go together");
    grid.ok(create);
    assert!(grid.fails("tier show vm").contains("has no first tier"));
    assert!(grid.fails("volume set vm --first-tier mirror:2,95%").contains("90 %"));
}

#[test]
fn data_are_born_in_a_mirror_and_move_on_by_age() {
    let grid = Grid::new(1);
    grid.up("--nodes 4 --devices 1");
    let said = grid.ok("volume create vm --size 512MiB --first-tier mirror:2,64MiB");
    assert!(said.contains("is made"), "{said}");
    assert!(grid.ok("volume show vm").contains("mirror:2, 64MiB"));
    let (one, two) = (grid.path("one"), grid.path("two"));
    pattern(&one, LEN);
    let backwards: Vec<u8> = fs::read(&one).unwrap().into_iter().rev().collect();
    fs::write(&two, backwards).unwrap();
    copy_in(&grid, &one);
    until("data are born in the mirror", || tier(&grid, "vm")["born_bytes"].as_u64().unwrap() > 8 * MIB);
    until("clients rest, and a quarter of the tier is left", || {
        let tier = tier(&grid, "vm");
        tier["bytes"].as_u64().unwrap() <= 20 * MIB && tier["rotated_bytes"].as_u64().unwrap() > 8 * MIB
    });
    assert!(data_in(&grid, "vm", "parity:2+1") > 8 * MIB);
    assert_volume_holds(&grid.uri("vm"), &one, &grid.path("scratch"));
    grid.ok("node kill 2");
    copy_in(&grid, &two);
    assert_volume_holds(&grid.uri("vm"), &two, &grid.path("scratch"));
    grid.ok("node start 2");
    let said = grid.ok("volume set vm --first-tier none");
    assert!(said.contains("no first tier"), "{said}");
    until("all is in the volume's own layout", || {
        data_in(&grid, "vm", "mirror:2") == 0 && data_in(&grid, "vm", "parity:2+1") >= LEN as u64
    });
    grid.ok("grid down");
    grid.ok("grid up");
    assert_volume_holds(&grid.uri("vm"), &two, &grid.path("scratch"));
    grid.ok("volume set vm --first-tier mirror:2,20%");
    assert_eq!(grid.json("volume show vm")["tiers"]["first"]["size"]["PerMille"], 200);
}

/// Of a volume: what its data are as clients see them, what they take, and how much of them is not packed.
fn packed(grid: &Grid, volume: &str) -> (u64, u64, u64) {
    let live = grid.json(&format!("volume show {volume}"))["live"]["space"].clone();
    let bytes = |key: &str| live[key].as_u64().unwrap_or_else(|| panic!("{key}: {live}"));
    (bytes("shown_bytes"), bytes("data_bytes") + bytes("padding_bytes"), bytes("plain_bytes"))
}

#[test]
fn blocks_are_packed_behind_guests_backs_and_read_as_they_were() {
    let grid = Grid::new(3);
    grid.up("--nodes 3 --devices 1");
    packs_and_reads(&grid, "");
}

#[test]
fn blocks_of_encrypted_volumes_are_packed_and_read_as_they_were() {
    let grid = Grid::new(4);
    grid.up("--nodes 3 --devices 1");
    fs::write(grid.path("key"), "0".repeat(64)).unwrap();
    fs::set_permissions(grid.path("key"), Permissions::from_mode(0o600)).unwrap();
    packs_and_reads(&grid, &format!("--encrypt --key-file {}", grid.path("key").display()));
}

fn packs_and_reads(grid: &Grid, options: &str) {
    assert!(grid.fails("volume create vm --size 128MiB --compress brotli").contains("off, lz4 and auto"));
    grid.ok(&format!("volume create vm --size 128MiB {options}"));
    let (one, scratch) = (grid.path("one"), grid.path("scratch"));
    let words = ["storage", "grid", "holds", "fast", "while", "nodes", "burn"];
    let line = |n: usize| format!("{n:x} {} {}\n", words[n % 7], words[n / 7 % 5]);
    let mut content: Vec<u8> = (0..).flat_map(|n: usize| line(n * 7919).into_bytes()).take(LEN / 2).collect();
    content.resize(LEN, 0);
    pattern(&scratch, LEN / 4);
    content[LEN / 2..LEN / 2 + LEN / 4].copy_from_slice(&fs::read(&scratch).unwrap());
    fs::write(&one, content).unwrap();
    copy_in(grid, &one);
    let is_written = || packed(grid, "vm").0 > LEN as u64 / 2;
    until("data are in segments", is_written);
    let (shown, stored, plain) = packed(grid, "vm");
    assert_eq!((shown, shown), (stored, plain), "nothing is packed");
    let said = grid.ok("volume set vm --compress lz4");
    assert!(said.contains("packed from here on, by lz4"), "{said}");
    assert!(grid.ok("volume show vm").contains("lz4"));
    let ratio = || {
        let (shown, stored, _) = packed(grid, "vm");
        stored * 100 / shown
    };
    until("what was there is packed", || ratio() < 75);
    assert_volume_holds(&grid.uri("vm"), &one, &scratch);
    let by_lz4 = ratio();
    grid.ok("volume set vm --compress auto");
    until("zstd makes more of it", || ratio() < by_lz4 * 7 / 8);
    assert!(grid.ok("space why").contains("are not packed"));
    let packing = grid.json("grid status")["host"]["packing"].clone();
    assert!(packing["share_percent"] == 10 && packing["ns_per_block"].as_u64() > Some(0), "{packing}");
    let said = grid.ok("grid status");
    assert!(said.contains("to pack blocks") && said.contains("of 10 % while guests work"), "{said}");
    assert!(said.contains("packed, of volumes in service here") && said.contains("are not packed"), "{said}");
    grid.ok("node kill 2");
    assert_volume_holds(&grid.uri("vm"), &one, &scratch);
    grid.ok("node start 2");
    grid.ok("grid down");
    grid.ok("grid up");
    assert_eq!(grid.json("volume show vm")["compression"], "auto");
    assert_volume_holds(&grid.uri("vm"), &one, &scratch);
    assert!(ratio() < by_lz4 * 7 / 8);
    let said = grid.ok("volume set vm --compress off");
    assert!(said.contains("written as it is"), "{said}");
    assert_volume_holds(&grid.uri("vm"), &one, &scratch);
}

/// Devices of each node, by id: (node, device).
fn devices(grid: &Grid) -> Vec<(u64, String)> {
    let list = grid.json("device list");
    let row = |row: &Value| (row["node"].as_u64().unwrap(), row["device"]["device"].as_str().unwrap().to_string());
    list.as_array().unwrap_or_else(|| panic!("{list}")).iter().map(row).collect()
}

/// Bytes of a volume's shards on devices of a class, its map's apart.
fn data_on(grid: &Grid, volume: &str, of: &[String]) -> u64 {
    let parts = grid.json(&format!("volume explain {volume}"));
    let devices = parts["parts"]["devices"].as_array().unwrap_or_else(|| panic!("{parts}")).clone();
    let is_of = |d: &&Value| of.iter().any(|device| d["device"] == device.as_str());
    devices.iter().filter(is_of).map(|d| d["bytes"].as_u64().unwrap()).sum()
}

#[test]
fn data_are_born_on_flash_and_end_on_disks() {
    let grid = Grid::new(2);
    grid.up("--nodes 3 --devices 2");
    let create = "volume create vm --size 512MiB --first-tier mirror:2,ssd,64MiB --media hdd";
    let mut flash = Vec::new();
    let mut disks = Vec::new();
    for (i, (_, device)) in devices(&grid).into_iter().enumerate() {
        let class = if i % 2 == 0 { "ssd" } else { "hdd" };
        grid.ok(&format!("device class {device} {class}"));
        if class == "ssd" { &mut flash } else { &mut disks }.push(device);
    }
    let on_nvme = grid.fails(&create.replace("ssd", "nvme"));
    assert!(
        on_nvme.contains("mirror:2 on nvme wants 2 nodes") && on_nvme.contains("holdfast device class"),
        "{on_nvme}"
    );
    grid.ok(create);
    let (one, scratch) = (grid.path("one"), grid.path("scratch"));
    pattern(&one, LEN);
    copy_in(&grid, &one);
    until("clients rest, and a quarter of the tier is left", || {
        let tier = tier(&grid, "vm");
        tier["bytes"].as_u64().unwrap() <= 20 * MIB && tier["rotated_bytes"].as_u64().unwrap() > 8 * MIB
    });
    let (on_flash, on_disks) = (data_on(&grid, "vm", &flash), data_on(&grid, "vm", &disks));
    assert!(on_flash > 0 && on_disks > 8 * MIB, "{on_flash} on flash, {on_disks} on disks");
    assert_eq!(tier(&grid, "vm")["astray_segments"], 0);
    assert_volume_holds(&grid.uri("vm"), &one, &scratch);
    assert!(tier(&grid, "vm")["read_first_bytes"].as_u64().unwrap() > 0);
    // A device changes its class: what lies there is astray, and goes where it belongs.
    grid.ok(&format!("device class {} hdd", flash[0]));
    until("what lies there has left", || tier(&grid, "vm")["astray_segments"] == 0);
    assert_volume_holds(&grid.uri("vm"), &one, &scratch);
}
