//! Volumes in the words of libvirt, by its own schema.
//!
//! Needs the program `virt-xml-validate`; `./x` sees to it.

mod support;

use std::fs;
use std::process::Command;
use support::{Grid, needs, text};

/// A domain with such a disk is one that libvirt would take.
fn assert_valid(grid: &Grid, disk: &str) {
    let path = grid.path("domain.xml");
    let before = "<domain type='qemu'><name>guest</name><memory>1</memory><os><type>hvm</type></os><devices>";
    fs::write(&path, format!("{before}{disk}</devices></domain>")).expect("written");
    let output = Command::new(needs("virt-xml-validate")).arg(&path).arg("domain").output().expect("it runs");
    assert!(output.status.success(), "{disk}: {}{}", text(&output.stdout), text(&output.stderr));
}

#[test]
fn a_volume_is_printed_as_a_disk_that_libvirt_takes() {
    let dir = tempfile::Builder::new().prefix("it's <a> \"grid\" & more").tempdir().expect("a directory");
    let grid = Grid::in_dir(dir, support::free_ports(76, 4));
    grid.up("--nodes 2 --devices 1");
    grid.ok("volume create vm1 --size 16MiB --layout mirror:2");
    grid.ok("snapshot create vm1 monday");
    let id = grid.json("volume show vm1")["id"].as_str().expect("an id").replace('-', "");
    let serial = format!("<serial>{}</serial>", &id[..20]);
    for (options, target) in [
        ("", "<target dev='vda' bus='virtio'/>"),
        ("--dev vdc", "<target dev='vdc' bus='virtio'/>"),
        ("--bus scsi", "<target dev='sda' bus='scsi'/>"),
        ("--bus sata --dev sdb", "<target dev='sdb' bus='sata'/>"),
        ("--bus usb", "<target dev='sda' bus='usb'/>"),
    ] {
        let disk = grid.ok(&format!("volume xml vm1 {options}"));
        assert!(disk.contains(target) && disk.contains(&serial) && disk.contains("name='vm1'"), "{disk}");
        assert!(!disk.contains("readonly") && !disk.contains("shareable"), "{disk}");
        assert_valid(&grid, &disk);
    }
    let snapshot = grid.ok("volume xml vm1@monday");
    assert!(snapshot.contains("name='vm1@monday'") && snapshot.contains("<readonly/>"), "{snapshot}");
    assert_valid(&grid, &snapshot);
    grid.ok("volume export vm1 --shared");
    let shared = grid.ok("volume xml vm1");
    assert!(shared.contains("<shareable/>"), "{shared}");
    assert_valid(&grid, &shared);
    let told = grid.json("volume xml vm1");
    assert_eq!((told["volume"].as_str(), told["xml"].as_str()), (Some("vm1"), Some(shared.trim_end())));

    // Schemas of libvirt 9.0 have no such element, and later ones do.
    let waits = grid.ok("volume xml vm1 --reconnect 60");
    assert!(waits.contains("    <reconnect delay='60'/>\n  </source>"), "{waits}");
    assert!(grid.fails("volume xml vm1@sunday").contains("has no snapshot sunday"));
    assert!(grid.fails("volume xml vm7").contains("there is no volume vm7"));
    assert!(grid.fails("volume xml vm1 --dev disk").contains("is no disk of a guest"));
    grid.ok("volume unexport vm1");
    assert!(grid.fails("volume xml vm1").contains("`holdfast volume export vm1`"));
}
