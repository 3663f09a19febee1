//! Images that `qemu-img` makes are read as it reads them, and whatever is done to them ends.

use holdfast_image::{Disk, Error, Format, detect, open};
use proptest::prelude::*;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const MIB: usize = 1 << 20;

/// A disk with data, holes, and a last part that fills no grain.
fn bytes() -> Vec<u8> {
    let mut bytes = vec![0; 5 * MIB + 37 * 512];
    let mut state = 7u64;
    let mut fill = |range: std::ops::Range<usize>| {
        for byte in &mut bytes[range] {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            *byte = (state >> 56) as u8;
        }
    };
    fill(0..4096);
    fill(MIB + 512..MIB + 200_000);
    fill(3 * MIB..3 * MIB + 100);
    let end = 5 * MIB + 37 * 512;
    fill(end - 1000..end);
    bytes[2 * MIB..2 * MIB + 70_000].fill(b'x');
    bytes
}

fn qemu_img(arguments: &[&str]) {
    let output = Command::new("qemu-img").args(arguments).output().expect("qemu-img is there (`./x setup`)");
    assert!(output.status.success(), "qemu-img {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// The whole disk, by its extents; more of them than `steps` are not asked for.
fn read(disk: &mut dyn Disk, steps: usize) -> Result<(Vec<u8>, u64), Error> {
    let (mut bytes, mut at, mut data) = (Vec::new(), 0, 0);
    for _ in 0..steps {
        if at >= disk.size_bytes() {
            break;
        }
        let extent = disk.extent(at)?;
        assert!(extent.len > 0 && extent.len <= disk.size_bytes() - at, "{extent:?} at {at}");
        let len = extent.len.min(1 << 20);
        if extent.is_data {
            let mut piece = vec![0xaa; len as usize];
            disk.read(at, &mut piece)?;
            data += len;
            bytes.extend(piece);
        } else if bytes.len() < 8 * MIB {
            bytes.resize(bytes.len() + len as usize, 0);
        }
        at += len;
    }
    Ok((bytes, data))
}

/// Images of one disk in each format, made once more for each test.
fn images(dir: &Path) -> Vec<(PathBuf, Format)> {
    let raw = dir.join("disk.raw");
    fs::write(&raw, bytes()).unwrap();
    let from = raw.to_str().unwrap();
    let mut all = vec![(raw.clone(), Format::Raw)];
    for (name, options) in [
        ("a.qcow2", &["-O", "qcow2"][..]),
        ("small.qcow2", &["-O", "qcow2", "-c", "-o", "cluster_size=4096"]),
        ("old.qcow2", &["-O", "qcow2", "-o", "compat=0.10"]),
        ("sparse.vmdk", &["-O", "vmdk"]),
        ("stream.vmdk", &["-O", "vmdk", "-o", "subformat=streamOptimized"]),
        ("flat.vmdk", &["-O", "vmdk", "-o", "subformat=monolithicFlat"]),
        ("split.vmdk", &["-O", "vmdk", "-o", "subformat=twoGbMaxExtentSparse"]),
    ] {
        let path = dir.join(name);
        qemu_img(&[&["convert", "-f", "raw"], options, &[from, path.to_str().unwrap()]].concat());
        all.push((path, if name.ends_with("qcow2") { Format::Qcow2 } else { Format::Vmdk }));
    }
    all.push((ova(dir, &["stream.vmdk"]), Format::Ova));
    all
}

fn ova(dir: &Path, disks: &[&str]) -> PathBuf {
    let path = dir.join(format!("machine-{}.ova", disks.len()));
    let mut archive = tar::Builder::new(fs::File::create(&path).unwrap());
    archive.sparse(false);
    fs::write(dir.join("machine.ovf"), "<Envelope/>").unwrap();
    for name in [&["machine.ovf"], disks].concat() {
        archive.append_path_with_name(dir.join(name), name).unwrap();
    }
    archive.finish().unwrap();
    path
}

#[test]
fn what_qemu_img_writes_is_read() {
    let (dir, expected) = (tempfile::tempdir().unwrap(), bytes());
    for (path, format) in images(dir.path()) {
        assert_eq!(detect(&path).unwrap(), format, "{}", path.display());
        let mut disk = open(&path, format, None).unwrap();
        let (told, data) = read(&mut *disk, usize::MAX).unwrap();
        assert!(told[..expected.len()] == expected[..], "{}", path.display());
        // Grains and clusters are whole; the rest is a hole.
        assert!(told[expected.len()..].iter().all(|byte| *byte == 0), "{}", path.display());
        assert!(format == Format::Raw || data < 2 * MIB as u64, "{}: {data} bytes are data", path.display());
        let mut piece = vec![0; 3000];
        disk.read(MIB as u64 + 100_001, &mut piece).unwrap();
        assert_eq!(piece, expected[MIB + 100_001..MIB + 103_001], "{}", path.display());
    }
}

#[test]
fn what_is_not_read_is_refused_with_the_way() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let text = |name: &str| path(name).to_str().unwrap().to_string();
    images(dir.path());
    qemu_img(&["create", "-q", "-f", "qcow2", "-F", "raw", "-b", &text("disk.raw"), &text("over.qcow2")]);
    qemu_img(&["convert", "-O", "vpc", &text("disk.raw"), &text("a.vhd")]);
    qemu_img(&["convert", "-O", "vhdx", &text("disk.raw"), &text("a.vhdx")]);
    qemu_img(&["convert", "-O", "vdi", &text("disk.raw"), &text("a.vdi")]);
    let refused = |name: &str, format: Option<Format>, disk: Option<&str>| {
        let found = format.map_or_else(|| detect(&path(name)), Ok).and_then(|format| open(&path(name), format, disk));
        found.err().unwrap_or_else(|| panic!("{name} is taken")).to_string()
    };
    for name in ["over.qcow2", "a.vhd", "a.vhdx", "a.vdi"] {
        let why = refused(name, None, None);
        // A VHD of a fixed size would have its mark at its end alone.
        assert!(why.contains("qemu-img convert -O qcow2"), "{name}: {why}");
    }
    let flat = |name: &str| format!("# Disk DescriptorFile\nparentCID=ffffffff\nRW 8 FLAT \"{name}\" 0\n");
    for (extent, expected) in
        [("../x", "only files beside it"), ("gone", "put it beside"), ("/etc/passwd", "beside it")]
    {
        fs::write(path("out.vmdk"), flat(extent)).unwrap();
        let why = refused("out.vmdk", None, None);
        assert!(why.contains(expected), "{extent}: {why}");
    }
    fs::write(path("delta.vmdk"), "# Disk DescriptorFile\nparentCID=12345678\nRW 8 FLAT \"disk.raw\" 0\n").unwrap();
    assert!(refused("delta.vmdk", None, None).contains("stands on another"));
    fs::write(path("x.raw.gz"), [0x1f, 0x8b, 8, 0]).unwrap();
    assert!(refused("x.raw.gz", None, None).contains("unpack it first"));
    fs::write(path("what"), [1, 2, 3]).unwrap();
    assert!(refused("what", None, None).contains("--format"));
    fs::write(path("none.raw"), []).unwrap();
    assert!(refused("none.raw", None, None).contains("no bytes"));
    fs::copy(path("stream.vmdk"), path("second.vmdk")).unwrap();
    ova(dir.path(), &["stream.vmdk", "second.vmdk"]);
    let why = refused("machine-2.ova", None, None);
    assert!(why.contains("--disk") && why.contains("second.vmdk"), "{why}");
    assert!(refused("machine-2.ova", None, Some("third.vmdk")).contains("second.vmdk"));
    assert!(refused("disk.raw", None, Some("x")).contains("leave --disk out"));
    let mut disk = open(&path("machine-2.ova"), Format::Ova, Some("second.vmdk")).unwrap();
    assert!(read(&mut *disk, usize::MAX).unwrap().0[..bytes().len()] == bytes()[..]);
}

#[test]
fn whatever_is_done_to_an_image_reading_it_ends() {
    let dir = tempfile::tempdir().unwrap();
    let all: Vec<(PathBuf, Format, Vec<u8>)> =
        images(dir.path()).into_iter().map(|(path, format)| (path.clone(), format, fs::read(path).unwrap())).collect();
    let hurt = dir.path().join("hurt");
    // Most of what an image says of itself stands at its beginning, some of it at its end.
    let places = prop_oneof![0..1024usize, 0..100_000usize, any::<usize>()];
    let change = (places, any::<bool>(), prop_oneof![Just(0u8), Just(1), Just(0xff), any::<u8>()]);
    let case = (0..all.len(), prop::collection::vec(change, 1..8), prop::option::of(any::<usize>()));
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(3000));
    let outcome = runner.run(&case, |(which, changes, cut)| {
        let (_, format, bytes) = &all[which];
        let mut bytes = bytes.clone();
        for (at, from_end, value) in changes {
            let at = at % bytes.len();
            let at = if from_end { bytes.len() - 1 - at } else { at };
            bytes[at] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut % bytes.len());
        }
        fs::write(&hurt, &bytes).unwrap();
        let _ = detect(&hurt);
        if let Ok(mut disk) = open(&hurt, *format, None) {
            let _ = read(&mut *disk, 2000);
        }
        Ok(())
    });
    outcome.unwrap();
}
