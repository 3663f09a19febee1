//! Disks that are slow, fail and die: served by nbdkit, whose filters do that, through FUSE and a loop device.

use crate::page::{Book, Machine};
use crate::support::{Loop, assert_volume_holds, nbdcopy, needs, pattern, program, until};
use holdfast_lab::guest::{BLOCK, Guest};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

pub const ROWS: &[&str] = &["A disk is slow", "A disk is failing", "A disk is dead"];

const SIZE: u64 = 256 << 20;

const DATA: usize = 16 << 20;

/// A disk that can be made to fail.
struct Disk {
    /// The name that a grid knows it by.
    path: PathBuf,
    mount: PathBuf,
    /// While it is there, reads fail.
    failing: PathBuf,
    device: Option<Loop>,
    server: Child,
    fuse: Child,
}

impl Disk {
    /// With filters of nbdkit and their parameters. `None`, and the test counts as skipped, where there are no loop
    /// devices.
    fn attach(dir: &Path, name: &str, filters: &[&str]) -> Option<Disk> {
        let path = |kind: &str| dir.join(format!("{name}-{kind}"));
        let (image, socket, mount, failing) = (path("image"), path("socket"), path("mount"), path("failing"));
        fs::File::create(&image).unwrap().set_len(SIZE).unwrap();
        fs::create_dir(&mount).unwrap();
        let (of_filter, parameters): (Vec<&str>, Vec<&str>) = filters.iter().partition(|word| word.starts_with("--"));
        let parameters = parameters.iter().map(|word| word.replace("FAILING", failing.to_str().unwrap()));
        let mut server = Command::new(needs("nbdkit"));
        server.args(["--foreground", "--unix"]).arg(&socket).args(of_filter).arg("file").arg(&image).args(parameters);
        let mut fuse = Command::new(needs("nbdfuse"));
        fuse.arg(&mount).arg(format!("nbd+unix:///?socket={}", socket.display()));
        let quiet = |command: &mut Command| command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let server = quiet(&mut server);
        until("nbdkit serves", || socket.exists());
        let fuse = quiet(&mut fuse);
        let mut disk = Disk { path: path("disk"), failing, device: None, server, fuse, mount };
        until("nbdfuse serves", || disk.mount.join("nbd").exists());
        disk.device = Some(Loop::attach(&disk.mount.join("nbd"), SIZE, &["--direct-io=on"])?);
        symlink(&disk.device.as_ref()?.device, &disk.path).unwrap();
        Some(disk)
    }

    fn path(&self) -> &str {
        self.path.to_str().unwrap()
    }

    /// From now on nothing that is asked of it succeeds.
    fn die(&mut self) {
        self.server.kill().unwrap();
        self.server.wait().unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        drop(self.device.take());
        let _ = Command::new("umount").arg("--lazy").arg(&self.mount).output();
        for child in [&mut self.server, &mut self.fuse] {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A disk that stands still most of the time: what is asked of it takes long, however busy this machine is otherwise.
struct Stutter {
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Stutter {
    fn begin(disk: &Disk) -> Stutter {
        let (ends, server) = (Arc::new(AtomicBool::new(false)), Pid::from_child(&disk.server));
        let told = Arc::clone(&ends);
        let thread = std::thread::spawn(move || {
            while !told.load(Ordering::Relaxed) {
                kill_process(server, Signal::STOP).unwrap();
                std::thread::sleep(Duration::from_millis(800));
                kill_process(server, Signal::CONT).unwrap();
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        Stutter { ends, thread: Some(thread) }
    }
}

impl Drop for Stutter {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Some who read all the time, here and there.
struct Readers {
    ends: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Readers {
    fn begin(machine: &Machine, volume: &str) -> Readers {
        let ends = Arc::new(AtomicBool::new(false));
        let read = |first: usize| {
            let (mut guest, told) = (Guest::connect(&machine.grid, volume), Arc::clone(&ends));
            std::thread::spawn(move || {
                let mut block = first;
                while !told.load(Ordering::Relaxed) {
                    block = block.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let offset = (block >> 33) % (DATA / BLOCK) * BLOCK;
                    guest.read_any(offset as u64).expect("a read that succeeds");
                    std::thread::sleep(Duration::from_millis(10));
                }
            })
        };
        Readers { threads: (0..8).map(read).collect(), ends }
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        let have_read = self.threads.drain(..).all(|thread| thread.join().is_ok());
        assert!(have_read || std::thread::panicking(), "guests go on");
    }
}

/// What drives say of themselves from here on.
fn drive(m: &Machine, said: &str) {
    let said = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/drives").join(said);
    program(&m.path("smartctl"), &format!("#!/bin/sh\ncat {}\n", said.display()));
}

/// Three nodes, the first on this disk, and a volume with data, all of it on disks.
fn grid_on(disk: &Disk, data: &Path) -> Machine {
    let m = Machine::new(0);
    drive(&m, "nvme-well.json");
    m.ok(&format!("holdfast grid up --port {} --device {}", m.grid.port, disk.path()));
    for name in ["node2", "node3"] {
        m.ok(&format!("holdfast node add --path {}", m.disk(name, SIZE)));
    }
    m.ok("holdfast volume create v --size 32MiB");
    pattern(data, DATA);
    nbdcopy(data.to_str().unwrap(), &m.grid.uri("v"));
    m.ok("holdfast volume unexport v");
    m.ok("holdfast volume export v");
    m
}

#[test]
fn rows_about_disks() {
    let dir = tempfile::Builder::new().prefix("hf").tempdir().unwrap();
    let errors = ["--filter=error", "error-pread=EIO", "error-pread-rate=100%", "error-pread-file=FAILING"];
    let disk = |name: &str, filters: &[&str]| Disk::attach(dir.path(), name, filters);
    let Some(slow) = disk("slow", &[]) else { return };
    let Some(failing) = disk("failing", &errors) else { return };
    let Some(mut dying) = disk("dying", &[]) else { return };
    let mut book = Book::of(ROWS);
    let (data, scratch) = (dir.path().join("data"), dir.path().join("scratch"));
    let m = grid_on(&slow, &data);
    let readers = Readers::begin(&m, "v");
    let is_well = || {
        m.is_well();
        assert_volume_holds(&m.grid.uri("v"), &data, &scratch);
    };

    let mut row = book.open("A disk is slow");
    let stutter = Stutter::begin(&slow);
    row.seen(&m, &[]);
    row.checked(&m, &[]);
    row.done(&m, &[("NODE/N", "1/0"), ("PATH", failing.path())]);
    drop(stutter);
    is_well();
    drop(row);

    let mut row = book.open("A disk is failing");
    fs::write(&failing.failing, "").unwrap();
    row.seen(&m, &[]);
    fs::remove_file(&failing.failing).unwrap();
    drive(&m, "nvme-unreliable.json");
    m.ok("holdfast device health --save");
    row.seen(&m, &[]);
    row.checked(&m, &[]);
    drive(&m, "nvme-well.json");
    row.done(&m, &[("NODE/N", "1/0"), ("PATH", dying.path())]);
    is_well();
    drop(row);

    let mut row = book.open("A disk is dead");
    dying.die();
    row.seen(&m, &[]);
    // As after a reboot that does not find it.
    m.ok("holdfast node kill 1");
    fs::remove_file(&dying.path).unwrap();
    m.ok("holdfast node start 1");
    row.seen(&m, &[]);
    row.checked(&m, &[]);
    row.done(&m, &[("NODE/N", "1/0"), ("PATH", &m.disk("new", SIZE))]);
    row.done(&m, &[]);
    is_well();
    drop(row);
    drop(readers);
    book.end();
}
