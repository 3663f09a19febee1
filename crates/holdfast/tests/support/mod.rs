//! A grid of a test: the harness of `lab`, whose failures end the test, and what clients do to volumes.

#![allow(dead_code, reason = "each of the test programs uses a part")]
#![allow(unused_imports, reason = "as above")]

mod receivers;

pub use holdfast_lab::ports::free as free_ports;
pub use holdfast_lab::program::{find, needs, skip, write as program};
pub use receivers::receivers;

use holdfast_lab::grid;
use holdfast_lab::guest::{BLOCK, Guest};
use holdfast_lab::nbd;
use holdfast_lab::ports;
use holdfast_runtime::meta::member::{Member, MemberConfig};
use serde_json::Value;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

const BINARY: &str = env!("CARGO_BIN_EXE_holdfast");

/// A grid of one test: brought down, whatever happens.
pub struct Grid {
    // Dropped first: its processes end before its directory goes.
    grid: grid::Grid,
    pub dir: tempfile::TempDir,
    pub port: String,
}

impl Drop for Grid {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = self.host_log().unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            eprintln!("the host said last:\n{}", lines[lines.len().saturating_sub(60)..].join("\n"));
        }
    }
}

impl Deref for Grid {
    type Target = grid::Grid;

    fn deref(&self) -> &grid::Grid {
        &self.grid
    }
}

pub fn holdfast() -> Command {
    Command::new(BINARY)
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// How long a machine that has much else to do may keep a test waiting.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Closes a listener for good: a process that another test was just starting may hold a copy until it runs.
pub fn give_back(listener: TcpListener) {
    let address = listener.local_addr().unwrap();
    drop(listener);
    until("the address comes free", || TcpStream::connect(address).is_err());
}

/// What only looks begins with one of these.
const LOOKS: [&str; 13] = [
    "status",
    "grid status",
    "volume show",
    "volume list",
    "volume explain",
    "volume filter list",
    "volume trash list",
    "snapshot list",
    "device list",
    "machine list",
    "task list",
    "tier show",
    "space",
];

/// The host had something else to do for longer than commands wait that only look.
fn is_silent(output: &Output) -> bool {
    let said = [text(&output.stdout), text(&output.stderr)].concat();
    ["the host does not answer within", "the host did not answer in time"].iter().any(|part| said.contains(part))
}

impl Grid {
    pub fn new(index: u16) -> Grid {
        Grid::in_dir(tempfile::Builder::new().prefix("hf").tempdir().unwrap(), free_ports(index, 4))
    }

    pub fn in_dir(dir: tempfile::TempDir, port: u16) -> Grid {
        Grid { grid: grid::Grid::new(Path::new(BINARY), dir.path()).ended(), dir, port: port.to_string() }
    }

    /// Runs a command. One that only looks is given again where a busy machine let the host be silent for too long.
    pub fn run(&self, line: &str) -> Output {
        let is_look = LOOKS.iter().any(|look| line.starts_with(look));
        let end = Instant::now() + PATIENCE;
        loop {
            let output = self.told(&line.split_whitespace().collect::<Vec<_>>()).unwrap();
            if !is_look || !is_silent(&output) || Instant::now() > end {
                return output;
            }
        }
    }

    /// Runs a command that must succeed; returns what it says. It is given again where the metadata store was silent
    /// for too long, as it is on a busy machine: what was done all the same is so already.
    pub fn ok(&self, line: &str) -> String {
        let end = Instant::now() + PATIENCE;
        loop {
            let output = self.run(line);
            // A state that is not well is told all the same, and which it is by the exit code.
            let is_told = line.starts_with("status") && output.status.code().is_some_and(|code| code <= 2);
            if output.status.success() || is_told {
                return text(&output.stdout);
            }
            let why = text(&output.stderr);
            assert!(why.contains("the metadata store did not answer") && Instant::now() < end, "{line}: {why}");
        }
    }

    pub fn json(&self, line: &str) -> Value {
        serde_json::from_str(&self.ok(&format!("{line} --json"))).unwrap()
    }

    /// Runs a command that must fail; returns its message.
    pub fn fails(&self, line: &str) -> String {
        let output = self.run(line);
        assert!(!output.status.success(), "{line} succeeded: {}", text(&output.stdout));
        text(&output.stderr)
    }

    /// How many devices of a node are in use.
    pub fn serving_devices(&self, node: u64) -> usize {
        let devices = self.json("device list");
        let of_node = devices.as_array().unwrap().iter().filter(|row| row["node"] == node);
        of_node.filter(|row| row["device"]["health"] == "serving").count()
    }

    pub fn up(&self, options: &str) -> String {
        self.up_with("256MiB", options)
    }

    /// With devices of another size.
    pub fn up_with(&self, device_size: &str, options: &str) -> String {
        self.ok(&format!("grid up --port {} --device-size {device_size} {options}", self.port))
    }

    pub fn node_state(&self, id: u64) -> String {
        let status = self.json("status");
        let node = status["nodes"].as_array().unwrap().iter().find(|n| n["id"] == id).unwrap();
        node["state"].as_str().unwrap().to_string()
    }

    pub fn wait_for_node(&self, id: u64, state: &str) {
        until(&format!("node {id} is {state}"), || self.node_state(id) == state);
    }

    pub fn uri(&self, volume: &str) -> String {
        self.json(&format!("volume show {volume}"))["uris"][0].as_str().unwrap().to_string()
    }
}

/// A loop device over a sparse file; detached with the test.
pub struct Loop {
    pub device: PathBuf,
}

impl Loop {
    /// `None`, and the test counts as skipped, where there can't be any.
    pub fn attach(file: &Path, size: u64, options: &[&str]) -> Option<Loop> {
        if !file.exists() {
            fs::File::create(file).unwrap().set_len(size).unwrap();
        }
        // Another one may take the same number in between.
        for _ in 0..5 {
            let output = Command::new("losetup").args(["--find", "--show"]).args(options).arg(file).output();
            let output = output.ok().filter(|output| output.status.success());
            if let Some(output) = output {
                return Some(Loop { device: PathBuf::from(text(&output.stdout).trim()) });
            }
        }
        skip("no loop devices here; run this as root where the kernel has them");
        None
    }

    pub fn path(&self) -> &str {
        self.device.to_str().unwrap()
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.device).output();
    }
}

/// Whether every device of these machines has a copy of the metadata in which the record `key` has `part` in its value.
pub fn has_copies(grids: &[&Grid], key: &str, part: &str) -> bool {
    let hex: String = part.bytes().map(|byte| format!("{byte:02x}")).collect();
    let record = format!("\"{key}\":\"[0-9a-f]*{hex}");
    let devices = grids.iter().flat_map(|grid| fs::read_dir(grid.path("devices")).unwrap());
    let has_it = |device: PathBuf| {
        let mut grep = Command::new("grep");
        grep.args(["-aqE", &record]).arg(device).status().unwrap().success()
    };
    devices.map(|device| device.unwrap().path()).all(has_it)
}

/// Waits for what takes a moment on a machine that has other things to do.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < end, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// All of the volume is as redundant as its layout promises.
pub fn is_whole(grid: &Grid, volume: &str) -> bool {
    let live = &grid.json(&format!("volume show {volume}"))["live"];
    live["degraded_segments"] == 0 && live["at_risk_entries"] == 0
}

pub fn nbdcopy(from: &str, to: &str) {
    let output = Command::new(needs("nbdcopy")).args([from, to]).output().unwrap();
    assert!(output.status.success(), "nbdcopy {from} {to}: {}", text(&output.stderr));
}

pub fn pattern(path: &Path, len: usize) {
    let mut x = 0x2545_f491_4f6c_dd1d_u64;
    let words = (0..len / 8).flat_map(|_| {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x.to_le_bytes()
    });
    fs::write(path, words.collect::<Vec<u8>>()).unwrap();
}

/// Compares the volume's beginning with the file.
pub fn assert_volume_holds(uri: &str, original: &Path, scratch: &Path) {
    nbdcopy(uri, scratch.to_str().unwrap());
    let (want, got) = (fs::read(original).unwrap(), fs::read(scratch).unwrap());
    assert!(got.len() >= want.len() && got[..want.len()] == want[..], "the volume holds other bytes");
}

/// An etcd of one's own, on 127.0.8.`last`.
pub fn etcd(dir: &Path, last: u8) -> Member {
    etcd_cluster(dir, last, 1).remove(0)
}

/// As many members that form a cluster, one an address from 127.0.8.`first` on.
pub fn etcd_cluster(dir: &Path, first: u8, count: u8) -> Vec<Member> {
    needs("etcd");
    let addresses: Vec<[SocketAddr; 2]> = (first..first + count)
        .map(|last| {
            let ip = Ipv4Addr::new(127, 0, 8, last);
            let port = ports::free_at(ip, u16::from(last), 2);
            [port, port + 1].map(|port| SocketAddr::from((ip, port)))
        })
        .collect();
    let name = |n: usize| format!("m{n}");
    let cluster: Vec<(String, SocketAddr)> =
        addresses.iter().enumerate().map(|(n, [_, peer])| (name(n), *peer)).collect();
    let config = |(n, [client, peer]): (usize, &[SocketAddr; 2])| MemberConfig {
        name: name(n),
        dir: dir.join(name(n)),
        client: *client,
        peer: *peer,
        cluster: cluster.clone(),
        tls: None,
        quota_bytes: None,
    };
    let start = |config| Member::start(config).expect("etcd starts");
    let mut members: Vec<Member> = addresses.iter().enumerate().map(config).map(start).collect();
    members.iter_mut().for_each(|member| member.wait().expect("etcd serves"));
    members
}

/// A write of this process that is under way, and stays so. Nobody may follow its client as one that is quiet, however
/// long a busy machine keeps that from writing.
pub struct HungWrite<'a> {
    grid: &'a Grid,
    volume: &'a str,
    guest: Guest,
    asked: u32,
}

impl HungWrite<'_> {
    /// Behind the first 8 MiB of a volume that the grid's own host serves.
    pub fn begin<'a>(grid: &'a Grid, volume: &'a str) -> HungWrite<'a> {
        grid.ok(&format!("volume filter add {volume} delay:write=3600s,range=8MiB..9MiB"));
        let mut guest = Guest::connect(grid, volume);
        let asked = guest.ask(nbd::Command::Write, 8 << 20, BLOCK, &[1; BLOCK]);
        let told = || grid.json(&format!("volume filter list {volume}"));
        until("a write is under way", || told()["filters"][0]["counters"]["held now"] == 1);
        HungWrite { grid, volume, guest, asked }
    }

    pub fn end(self) {
        self.grid.ok(&format!("volume filter remove {}", self.volume));
        self.answered();
    }

    /// A hand-over has it done.
    pub fn answered(mut self) {
        assert_eq!(self.guest.answer(), (self.asked, 0));
    }
}
