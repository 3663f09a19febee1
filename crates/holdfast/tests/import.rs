//! Disk images become volumes.

mod support;

use std::fs;
use std::process::{Command, Stdio};
use support::{Grid, assert_volume_holds, holdfast, needs, until};

const MIB: usize = 1 << 20;

/// A disk of 96 MiB and a bit, of which a third is data.
fn disk() -> Vec<u8> {
    let mut bytes = vec![0; 96 * MIB + 3 * 512];
    for (number, piece) in bytes.chunks_mut(MIB).enumerate().filter(|(number, _)| number % 3 == 0) {
        piece.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at * 31 + number * 7 + at / 4096) as u8);
    }
    bytes
}

fn convert(grid: &Grid, options: &[&str], to: &str) {
    let (from, to) = (grid.path("disk.raw"), grid.path(to));
    let mut command = Command::new(needs("qemu-img"));
    command.args(["convert", "-f", "raw"]).args(options).args([from, to]);
    assert!(command.status().expect("it runs").success());
}

#[test]
fn images_become_volumes_and_what_was_cut_off_goes_on() {
    let grid = Grid::new(77);
    grid.up("--nodes 3 --devices 1");
    let expected = grid.path("expected");
    let mut bytes = disk();
    fs::write(grid.path("disk.raw"), &bytes).expect("written");
    bytes.resize(bytes.len().next_multiple_of(4096), 0);
    fs::write(&expected, &bytes).expect("written");
    convert(&grid, &["-O", "qcow2", "-c"], "a.qcow2");
    convert(&grid, &["-O", "vmdk", "-o", "subformat=streamOptimized"], "b.vmdk");
    let path = |name: &str| grid.path(name).display().to_string();
    let scratch = grid.path("scratch");
    for (image, volume) in [("a.qcow2", "a"), ("b.vmdk", "b"), ("disk.raw", "c")] {
        let told = grid.json(&format!("volume import {} {volume} --layout mirror:2", path(image)));
        assert_eq!((&told["size_bytes"], &told["data_bytes"]), (&bytes.len().into(), &(32 * MIB + 4096).into()));
        assert_volume_holds(&grid.uri(volume), &expected, &scratch);
        assert_eq!(grid.json(&format!("snapshot list {volume}")), serde_json::json!([]), "it holds nothing");
    }
    let why = grid.fails(&format!("volume import {} a", path("a.qcow2")));
    assert!(why.contains("volume a is in service") && !why.contains("is kept"), "{why}");
    let why = grid.fails(&format!("volume import {} d", path("expected")));
    assert!(why.contains("--format"), "{why}");
    assert!(grid.fails("volume show d").contains("no volume"), "nothing is left of what was refused");

    // Cut off at some moment, again and again, it comes to its end; another image is not mixed in.
    let import = || {
        let mut command = holdfast();
        command.arg("--dir").arg(grid.path("")).args([
            "volume",
            "import",
            &path("b.vmdk"),
            "e",
            "--layout",
            "mirror:2",
        ]);
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it runs")
    };
    for moment in [3u64, 10, 30, 100, 300] {
        let mut process = import();
        std::thread::sleep(std::time::Duration::from_millis(moment));
        process.kill().expect("killed");
        process.wait().expect("gone");
    }
    until("it is there", || {
        import().wait().expect("it ends").success() || grid.json("volume show e")["exported"] == true
    });
    assert_volume_holds(&grid.uri("e"), &expected, &scratch);

    grid.ok(&format!("volume import {} f --no-export --layout mirror:2", path("a.qcow2")));
    assert_eq!(grid.json("volume show f")["state"], "closed");
    let why = grid.fails(&format!("volume import {} f --layout mirror:2", path("b.vmdk")));
    assert!(why.contains("volume f has a snapshot import already"), "{why}");
    grid.ok(&format!("volume import {} f --layout mirror:2", path("a.qcow2")));
    assert_volume_holds(&grid.uri("f"), &expected, &scratch);
}
