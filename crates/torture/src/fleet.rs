//! Ten virtual machines, clones of one disk that went their own ways, in one packed volume of a sharing domain on two nodes:
//! under vmfleet's load a device fails and a node is lost, and every byte is held against the disks' images.
//!
//! Source: the report on Storage Spaces Direct with nested resiliency, which saves 70 to 75 % of such a fleet.

use crate::engine::{Control, Plan, VolumePlan};
use crate::logs::Expected;
use anyhow::{Context, Result, bail, ensure};
use holdfast_base::BLOCK_BYTES;
use holdfast_lab::grid::{Grid, NodeAction};
use holdfast_lab::nbd::{self, Client, Command as Nbd};
use holdfast_lab::space::Taken;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub const VOLUME: &str = "fleet";
/// What the machines have alike beyond what they began with.
const STORE: &str = "alike";
const LAYOUT: &str = "nested-parity:3+1";

/// On each of two nodes; the fifth of the first is the one that fails.
pub const DEVICES: u64 = 4;
pub const DEVICE_MIB: u64 = 2048;
const FAILING_NODE: u32 = 1;
const LOST_NODE: u32 = 2;

/// Two threads with 15 requests in flight each.
const THREADS: usize = 2;
pub const DEPTH: usize = 15;

/// Pieces in which a machine's own data are written, and how many are under way.
const PIECE_BYTES: usize = 64 << 10;
const PIECES: usize = 8;

/// How long each state of the grid is looked at, under load.
const STAY: Duration = Duration::from_secs(20);

/// What is told where a device fails: of the requests that did, and what becomes of it.
pub const OF_LOSS: Expected = Expected {
    warnings: &["device"],
    errors: &["is out, and is opened anew", "is without device", "/failing/device", "it is there and can't be opened"],
};

/// A device that can fail while it is used: a file that `nbdfuse` shows, served by `nbdkit`.
pub struct FailingDevice {
    pub path: PathBuf,
    dir: PathBuf,
    server: Child,
}

impl FailingDevice {
    /// # Errors
    /// There is no FUSE, or the programs are not there (`./x setup` installs them).
    pub fn make(dir: &Path) -> Result<FailingDevice> {
        let (image, mount) = (dir.join("failing.img"), dir.join("failing"));
        std::fs::File::create(&image)?.set_len(DEVICE_MIB << 20)?;
        std::fs::create_dir_all(&mount)?;
        let path = mount.join("device");
        let mut command = Command::new("nbdfuse");
        command.arg(&path).args(["[", "nbdkit", "--exit-with-parent", "file"]).arg(&image).arg("]");
        let server = command.stdin(Stdio::null()).spawn().context("cannot run nbdfuse")?;
        let mut made = FailingDevice { path, dir: mount, server };
        let late = Instant::now() + Duration::from_secs(20);
        while std::fs::metadata(&made.path).is_err() {
            if let Some(status) = made.server.try_wait()? {
                bail!("nbdfuse has ended ({status})");
            }
            ensure!(Instant::now() < late, "nbdfuse shows no file");
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(made)
    }

    /// From here on every access fails.
    pub fn fail(&mut self) -> Result<()> {
        self.server.kill().context("cannot end nbdfuse")?;
        self.server.wait().context("nbdfuse does not end").map(drop)
    }
}

impl Drop for FailingDevice {
    fn drop(&mut self) {
        let unmount = |flag: &str| Command::new("fusermount3").arg(flag).arg(&self.dir).stderr(Stdio::null()).status();
        // What a node has open is unmounted as soon as that ends.
        let _ = unmount("-uz");
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

/// The machines' disks.
pub struct Images {
    golden: PathBuf,
    machines: Vec<PathBuf>,
}

impl Images {
    /// `golden.img`, and `vm0.img` and so on, of one size.
    pub fn find(dir: &Path) -> Result<Images> {
        let of = |vm: usize| dir.join(format!("vm{vm}.img"));
        let machines: Vec<PathBuf> = (0..).map(of).take_while(|path| path.exists()).collect();
        ensure!(!machines.is_empty(), "no disks of machines in {}; `./x torture --fleet` makes some", dir.display());
        Ok(Images { golden: dir.join("golden.img"), machines })
    }
}

/// Makes the volume and its clones of the images, has them packed and shared, and gives what the engine is to ask for; and a
/// line on what is saved.
pub fn make(grid: &Grid, images: &Images, seed: u64) -> Result<(Plan, String)> {
    let golden = std::fs::read(&images.golden).with_context(|| format!("cannot read {}", images.golden.display()))?;
    grid.create_volume(VOLUME, golden.len() as u64 >> 20, LAYOUT)?;
    grid.run(&["sharing", "create", STORE, "--layout", LAYOUT, "--compress", "auto"])?;
    grid.run(&["volume", "set", VOLUME, "--compress", "auto", "--sharing", STORE])?;
    write_own(grid, VOLUME, &vec![0; golden.len()], &golden)?;
    grid.run(&["snapshot", "create", VOLUME, "image"])?;
    let mut volumes = Vec::new();
    for (vm, path) in images.machines.iter().enumerate() {
        let name = format!("vm{vm}");
        grid.run(&["volume", "clone", &format!("{VOLUME}@image"), &name])?;
        let image = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        ensure!(image.len() == golden.len(), "disks have different sizes");
        write_own(grid, &name, &golden, &image)?;
        let (socket, size_bytes) = (grid.nbd_socket(), image.len() as u64);
        let image = Some(Arc::new(image));
        volumes.push(VolumePlan { socket, export: name, size_bytes, connections: THREADS, image });
    }
    let seen: u64 = volumes.iter().filter_map(|volume| volume.image.as_deref()).map(|image| used(image)).sum();
    let taken = Taken::when_still(grid, &[VOLUME, STORE].map(str::to_string))?;
    let share = |bytes: i64| bytes as f64 * 100.0 / seen as f64;
    let (saved, dead) = (100.0 - share(taken.needed_bytes), share(taken.dead_bytes));
    let (mib, machines) = (seen >> 20, volumes.len());
    let line = format!("{saved:.1} % saved of {mib} MiB that {machines} machines have, and {dead:.1} % is dead yet");
    Ok((Plan { seed, depth: DEPTH, volumes }, line))
}

/// Bytes of blocks that are not all zeroes.
fn used(image: &[u8]) -> u64 {
    let is_used = |block: &&[u8]| block.iter().any(|byte| *byte != 0);
    (image.chunks(BLOCK_BYTES).filter(is_used).count() * BLOCK_BYTES) as u64
}

/// Writes what an image has beyond what the export holds.
fn write_own(grid: &Grid, export: &str, held: &[u8], image: &[u8]) -> Result<()> {
    let (mut stream, mut receiver) = Client::connect(&grid.nbd_socket(), export, true)?.split()?;
    let mut under_way = 0;
    let mut hear = |under_way: &mut usize| -> Result<()> {
        let reply = receiver.receive()?.context("the host closed the connection")?;
        ensure!(reply.error == 0, "a write to {export} failed: {}", reply.message);
        *under_way -= 1;
        Ok(())
    };
    for (at, (held, piece)) in held.chunks(PIECE_BYTES).zip(image.chunks(PIECE_BYTES)).enumerate() {
        // Only blocks that are others: what is the same stays shared.
        for (block, (held, own)) in held.chunks(BLOCK_BYTES).zip(piece.chunks(BLOCK_BYTES)).enumerate() {
            if held != own {
                let offset = (at * PIECE_BYTES + block * BLOCK_BYTES) as u64;
                stream.write_all(&nbd::encode(Nbd::Write, false, 0, offset, own.len() as u32, own))?;
                under_way += 1;
            }
            if under_way >= PIECES {
                hear(&mut under_way)?;
            }
        }
    }
    while under_way > 0 {
        hear(&mut under_way)?;
    }
    stream.write_all(&nbd::encode(Nbd::Disconnect, false, 0, 0, 0, &[]))?;
    Ok(())
}

/// A device fails, then the other node is lost as well, and comes back; all that while machines work.
pub fn lose(grid: &Grid, control: &Control, device: &mut FailingDevice) -> Result<String> {
    control.rest(STAY);
    control.fault(format!("a device of node {FAILING_NODE} fails"));
    device.fail()?;
    control.rest(STAY / 4);
    control.fault(format!("node {LOST_NODE} is killed"));
    grid.node(NodeAction::Kill, LOST_NODE)?;
    control.rest(STAY);
    let said = grid.run(&["why", "slow", "vm0"])?;
    control.fault(format!("node {LOST_NODE} is started"));
    grid.node(NodeAction::Start, LOST_NODE)?;
    control.rest(STAY);
    Ok(said)
}

/// Has a device added to the first node that can fail.
pub fn add_failing(grid: &Grid, device: &FailingDevice) -> Result<()> {
    let path = device.path.display().to_string();
    grid.run(&["device", "add", &FAILING_NODE.to_string(), "--path", &path]).map(drop)
}
