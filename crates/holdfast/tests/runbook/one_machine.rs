//! What befalls one machine's grid: its metadata, its releases, its guests, its room.

use crate::page::{Book, Machine, pid};
use crate::support::{
    HungWrite, assert_volume_holds, free_ports, has_copies, is_whole, nbdcopy, pattern, program, until,
};
use holdfast_base::stream::Inbound;
use holdfast_format::meta::{EXPORT_SUFFIX, VOLUME_PREFIX};
use holdfast_format::versions::Versions;
use holdfast_format::wire::{FrameReader, Refusal, Reply, Request, encode_frame};
use holdfast_lab::guest::Guest;
use holdfast_lab::nbd::Command;
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

pub const ROWS: &[&str] = &[
    "meta.redb is gone or damaged",
    "Volumes are only found",
    "A wrong version",
    "A guest was started twice",
    "95 %",
    "100 %",
];

const MIB: usize = 1 << 20;

/// NBD's numbers for a write that is not permitted, and for one that finds no room.
const EPERM: u32 = 1;
const ENOSPC: u32 = 28;

/// What stands at a node's address for a process of an older release, as long as that is there, and speaks versions
/// that nobody knows any more.
struct OldNode(Option<JoinHandle<()>>);

impl OldNode {
    fn at(address: SocketAddr, process: &str) -> OldNode {
        let listener = TcpListener::bind(address).expect("the node is elsewhere");
        listener.set_nonblocking(true).unwrap();
        let process = PathBuf::from(format!("/proc/{process}/exe"));
        OldNode(Some(std::thread::spawn(move || {
            while process.exists() {
                match listener.accept() {
                    Ok((stream, _)) => OldNode::refuse(stream),
                    Err(_) => std::thread::sleep(Duration::from_millis(5)),
                }
            }
        })))
    }

    /// Answers a greeting as a node does that has no version in common with it.
    fn refuse(mut stream: TcpStream) {
        let mut reader: FrameReader<Request> = FrameReader::new();
        stream.set_nonblocking(false).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
        let mut bytes = [0; 4096];
        while let Ok(len @ 1..) = stream.read(&mut bytes) {
            reader.on_bytes(&bytes[..len]);
            if let Some(frame) = reader.pop() {
                let refusal = Reply::Refused(Refusal::Version(Versions { oldest: 1, newest: 2 }));
                let _ = stream.write_all(&encode_frame(frame.token, &refusal, 0));
                return;
            }
        }
    }
}

impl Drop for OldNode {
    fn drop(&mut self) {
        // Its process ends with the grid at the latest.
        let ended = self.0.take().filter(|_| !std::thread::panicking()).map(JoinHandle::join);
        assert!(ended.is_none_or(|ended| ended.is_ok()));
    }
}

/// A grid of three nodes with one device each, and a volume whose data has to outlive all that comes.
struct Site {
    m: Machine,
    data: PathBuf,
    tcp: SocketAddr,
}

impl Site {
    fn new() -> Site {
        let m = Machine::new(1);
        let tcp = SocketAddr::from(([127, 0, 0, 1], free_ports(3, 1)));
        m.ok(&format!(
            "holdfast grid up --port {} --nodes 3 --devices 1 --device-size 128MiB --nbd-tcp {tcp}",
            m.grid.port
        ));
        m.ok("holdfast volume create v --size 32MiB");
        let data = m.path("data");
        pattern(&data, 8 * MIB);
        nbdcopy(data.to_str().unwrap(), &m.grid.uri("v"));
        Site { m, data, tcp }
    }

    fn is_well(&self) {
        self.m.is_well();
        assert_volume_holds(&self.m.grid.uri("v"), &self.data, &self.m.path("scratch"));
    }

    fn kill_host(&self) {
        self.m.ok(&format!("kill -9 {}", pid(&self.m.grid, "host")));
        until("the host is gone", || self.m.grid.json("grid status")["host"]["state"] != "up");
    }

    /// Every device has a copy of the records in which the volume is in service.
    fn is_copied(&self) -> bool {
        let volume = self.m.grid.json("volume show v");
        let key = format!("{VOLUME_PREFIX}{}{EXPORT_SUFFIX}", volume["id"].as_str().unwrap());
        has_copies(&[&self.m.grid], &key, "")
    }

    fn lose_metadata(&self, book: &mut Book) {
        let (m, file, away) = (&self.m, self.m.grid.path("meta.redb"), self.m.path("away"));
        until("the records are on the devices", || self.is_copied());
        let mut row = book.open("meta.redb is gone or damaged");
        self.kill_host();
        fs::rename(&file, &away).unwrap();
        row.seen(m, &[]);
        fs::write(&file, vec![7; 64 << 10]).unwrap();
        row.seen(m, &[]);
        row.checked(m, &[]);
        row.done(m, &[]);
        row.done(m, &[]);
        self.is_well();
    }

    /// The metadata are lost while a device is away: a newer state of a volume may be there.
    fn find_only(&self) {
        self.kill_host();
        self.m.ok("holdfast node kill 3");
        fs::rename(self.m.grid.path("devices/node3-0.img"), self.m.path("device")).unwrap();
        self.m.ok("holdfast meta recover --replace --yes");
        self.m.ok("holdfast grid up");
    }

    fn bring_back(&self) {
        fs::rename(self.m.path("device"), self.m.grid.path("devices/node3-0.img")).unwrap();
        until("it is taken up again", || self.m.grid.serving_devices(3) == 1);
    }

    fn find_volumes(&self, book: &mut Book) {
        let (m, v) = (&self.m, &[("VOLUME", "v")]);
        let mut row = book.open("Volumes are only found");
        self.find_only();
        row.seen(m, &[]);
        row.checked(m, &[]);
        self.bring_back();
        row.done(m, &[]);
        row.done(m, &[]);
        m.ok("holdfast grid up");
        m.ok("holdfast volume export v");
        self.is_well();
        // It is not back in time.
        self.find_only();
        m.sees("holdfast status", "was found when the metadata were lost");
        m.ok("holdfast grid down --host");
        row.done(m, v);
        row.done(m, &[]);
        row.done(m, v);
        self.bring_back();
        self.is_well();
    }

    /// Has node 2 listen elsewhere, as far as it knows itself: its place is free for an older release.
    fn put_aside_node_2(&self, place: &str) {
        let (m, path) = (&self.m, self.m.grid.path("grid.json"));
        let told = fs::read_to_string(&path).unwrap();
        fs::write(&path, told.replace(place, &format!("127.0.0.1:{}", free_ports(4, 1)))).unwrap();
        m.ok("holdfast node start 2");
        fs::write(&path, told).unwrap();
    }

    fn meet_an_old_release(&self, book: &mut Book) {
        let m = &self.m;
        let mut row = book.open("A wrong version");
        self.kill_host();
        m.ok("holdfast node stop 2");
        let place = format!("127.0.0.1:{}", m.grid.port.parse::<u16>().unwrap() + 1);
        self.put_aside_node_2(&place);
        let old = OldNode::at(place.parse().unwrap(), &pid(&m.grid, "node2"));
        // `grid up` waits for a node that does not come.
        m.ok(&format!("setsid holdfast host --dir {} </dev/null >/dev/null 2>&1 &", m.grid.dir.path().display()));
        row.seen(m, &[]);
        row.checked(m, &[]);
        for _ in 0..3 {
            row.done(m, &[]);
        }
        drop(old);
        self.is_well();
    }

    fn start_twice(&self, book: &mut Book) {
        let m = &self.m;
        m.ok("holdfast volume create g --size 16MiB");
        let mut row = book.open("A guest was started twice");
        let (mut first, mut second) = (Guest::connect(&m.grid, "g"), Guest::connect_tcp([127, 0, 0, 2], self.tcp, "g"));
        assert_eq!(first.write(0, 1), 0);
        // The first goes on, so that the second is not taken for one that follows it.
        let held = HungWrite::begin(&m.grid, "g");
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    assert_eq!(first.write(0, 1), 0);
                    std::thread::sleep(Duration::from_millis(20));
                }
            });
            let error = second.write(0, 2);
            is_over.store(true, Ordering::Relaxed);
            assert_eq!(error, EPERM);
        });
        held.end();
        row.seen(m, &[]);
        row.checked(m, &[("VOLUME", "g")]);
        drop(second);
        assert_eq!((first.write(0, 3), first.read(0)), (0, Ok(3)));
        self.is_well();
    }
}

/// A guest that writes one MiB after the other, each full of its number.
struct Filler {
    guest: Guest,
    written: usize,
}

impl Filler {
    /// The error number.
    fn write(&mut self) -> u32 {
        let at = (self.written * MIB) as u64;
        let cookie = self.guest.ask(Command::Write, at, MIB, &vec![self.written as u8; MIB]);
        let (of, error) = self.guest.answer();
        assert_eq!(of, cookie);
        self.written += usize::from(error == 0);
        error
    }

    fn holds_all(&mut self, from: usize) {
        for n in from..self.written {
            assert_eq!(self.guest.read((n * MIB) as u64), Ok(n as u8));
        }
    }
}

impl Site {
    /// A snapshot that holds what the volume has not any more, and a volume in the trash: so many MiB in each, and as
    /// many that stay.
    fn waste(&self, filler: &mut Filler, snapshot: &str, mib: usize) {
        let m = &self.m;
        m.ok("holdfast volume create old --size 16MiB");
        let mut old = Filler { guest: Guest::connect(&m.grid, "old"), written: 0 };
        (0..mib).for_each(|_| assert_eq!(old.write(), 0));
        drop(old);
        m.ok("holdfast volume delete old");
        (0..mib).for_each(|_| assert_eq!(filler.write(), 0));
        m.ok(&format!("holdfast snapshot create full {snapshot}"));
        filler.written -= mib;
        (0..mib).for_each(|_| assert_eq!(filler.write(), 0));
    }

    fn findings(&self) -> Vec<serde_json::Value> {
        self.m.grid.json("status")["findings"].as_array().unwrap().clone()
    }

    fn is_short(&self) -> bool {
        self.findings().iter().any(|finding| finding["concern"] == "capacity" && finding["severity"] == "critical")
    }

    fn has_room(&self) {
        until("there is room", || !self.is_short());
        assert_volume_holds(&self.m.grid.uri("v"), &self.data, &self.m.path("scratch"));
    }

    /// Of all devices together, above what guests can't have.
    fn free_bytes(&self) -> u64 {
        let devices = self.m.grid.json("device list");
        let bytes = |row: &serde_json::Value, what: &str| row["device"][what].as_u64().unwrap_or(0);
        let free = |row| bytes(row, "free_bytes").saturating_sub(bytes(row, "reserve_bytes"));
        devices.as_array().unwrap().iter().map(free).sum()
    }

    fn fill(&self, book: &mut Book) {
        let m = &self.m;
        m.ok("holdfast volume create full --size 1GiB");
        let mut filler = Filler { guest: Guest::connect(&m.grid, "full"), written: 0 };
        let mut row = book.open("95 %");
        self.waste(&mut filler, "s1", 6);
        loop {
            // Nodes are asked what they have left once a second.
            std::thread::sleep(Duration::from_millis(1500));
            if self.is_short() {
                break;
            }
            // With the parity three eighths of what is left.
            for _ in 0..(self.free_bytes() >> 22).max(1) {
                assert_eq!(filler.write(), 0, "there is room yet");
            }
        }
        row.seen(m, &[]);
        row.checked(m, &[]);
        row.done(m, &[]);
        row.done(m, &[("VOLUME", "full"), ("NAME", "s1")]);
        row.done(m, &[("NODE", "1"), ("PATH", &m.disk("disk1", 256 << 20))]);
        self.has_room();
        filler.holds_all(0);
        drop(row);

        let mut row = book.open("100 %");
        // Little room is left, but for the new device.
        self.waste(&mut filler, "s2", 2);
        // What the trash gives back of itself is written full, too.
        until("there is nothing left", || {
            let error = std::iter::repeat_with(|| filler.write()).find(|error| *error != 0);
            assert_eq!(error, Some(ENOSPC));
            self.findings().iter().any(|finding| finding["what"].as_str().unwrap().contains("devices are full"))
        });
        row.seen(m, &[]);
        row.checked(m, &[]);
        filler.holds_all(0);
        // What fstrim does in a guest that has no use for the first eight MiB.
        let told = filler.guest.ask(Command::Trim, 0, 8 * MIB, &[]);
        assert_eq!(filler.guest.answer(), (told, 0), "discards go on");
        program(&m.path("fstrim"), "#!/bin/sh\n[ \"$*\" = -a ]\n");
        row.done(m, &[]);
        row.done(m, &[]);
        row.done(m, &[("VOLUME", "full"), ("NAME", "s2")]);
        row.done(m, &[("NODE", "2"), ("PATH", &m.disk("disk2", 256 << 20))]);
        self.has_room();
        filler.holds_all(8);
        assert_eq!(filler.write(), 0, "there is room again");
    }
}

#[test]
fn rows_about_one_machine() {
    let mut book = Book::of(ROWS);
    let site = Site::new();
    until("all is whole", || is_whole(&site.m.grid, "v"));
    site.lose_metadata(&mut book);
    site.find_volumes(&mut book);
    site.meet_an_old_release(&mut book);
    site.start_twice(&mut book);
    site.fill(&mut book);
    book.end();
}
