//! A volume has one writer at a time, whichever way its clients come, unless it is shared: by real hosts and real sockets.

mod support;

use holdfast_lab::guest::{BLOCK, Guest};
use holdfast_lab::nbd;
use std::io::Write;
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use support::{Grid, HungWrite, etcd, free_ports, needs, text, until};

/// NBD's number for a write that is not permitted.
const EPERM: u32 = 1;

/// One that writes all the time, by each of its paths in turn.
struct Busy {
    ends: Arc<AtomicBool>,
    thread: JoinHandle<Vec<Guest>>,
}

impl Busy {
    fn begin(mut paths: Vec<Guest>) -> Busy {
        for path in &mut paths {
            assert_eq!(path.write(0, 1), 0);
        }
        let ends = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&ends);
        let thread = std::thread::spawn(move || {
            while !told.load(Ordering::Relaxed) {
                for path in &mut paths {
                    assert_eq!(path.write(0, 1), 0, "who was first goes on, by all its paths");
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            paths
        });
        Busy { ends, thread }
    }

    fn end(self) -> Vec<Guest> {
        self.ends.store(true, Ordering::Relaxed);
        self.thread.join().expect("it was not disturbed")
    }
}

#[test]
fn a_second_client_may_read_and_writes_when_the_first_has_ended() {
    let grid = Grid::new(6);
    let tcp = SocketAddr::from(([127, 0, 0, 1], free_ports(7, 1)));
    grid.up(&format!("--nodes 2 --devices 1 --nbd-tcp {tcp}"));
    grid.ok("volume create v1 --size 16MiB --layout mirror:2");
    let other = |n: u8| Guest::connect_tcp([127, 0, 0, n], tcp, "v1");
    // One client, over the unix socket and over TCP from its machine.
    let paths = || vec![Guest::connect(&grid, "v1"), Guest::connect_tcp([127, 0, 0, 1], tcp, "v1")];
    let (first, mut second) = (Busy::begin(paths()), other(2));
    let mut copy = begin_copy(&grid);
    let held = HungWrite::begin(&grid, "v1");
    assert_eq!(second.read(0), Ok(1));
    assert_eq!(second.write(0, 2), EPERM);
    for command in [nbd::Command::Trim, nbd::Command::WriteZeroes] {
        let cookie = second.ask(command, 0, BLOCK, &[]);
        assert_eq!(second.answer(), (cookie, EPERM));
    }
    let cookie = second.ask(nbd::Command::Flush, 0, 0, &[]);
    assert_eq!(second.answer(), (cookie, 0));
    assert_eq!(second.read(0), Ok(1), "nothing of it was done");
    // It may end before it has read all of it.
    let _ = copy.stdin.take().unwrap().write_all(&vec![0; 1 << 20]);
    let copied = copy.wait_with_output().unwrap();
    assert!(!copied.status.success() && text(&copied.stderr).contains("not permitted"), "{copied:?}");
    assert_eq!(second.read(0), Ok(1));
    let shown = grid.json("volume show v1");
    assert!(shown["writer"].is_string() && shown["refused_writer"].is_string(), "{shown}");
    assert!(grid.ok("volume list").contains("was refused to write") && grid.ok("status").contains("--shared"));
    assert!(std::fs::read_to_string(grid.path("logs/host.log")).unwrap().contains("127.0.0.2"));

    held.end();
    drop(first.end());
    until("the first has ended", || second.write(0, 2) == 0);
    moves(&mut second, &mut other(3));
    shared(&grid, &mut second, &mut other(4));
}

/// Another process of the same machine, which writes what it is told. It is connected: who comes later waits for what
/// is under way.
fn begin_copy(grid: &Grid) -> Child {
    let sessions = || grid.json("volume show v1")["sessions"].as_u64();
    let before = sessions();
    let mut copy = Command::new(needs("nbdcopy"));
    copy.arg("-").arg(grid.uri("v1")).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let copy = copy.spawn().unwrap();
    until("it is connected", || sessions() > before);
    copy
}

/// As a machine moves: the target is connected and reads while the source writes; then that stops, and stays connected.
fn moves(source: &mut Guest, target: &mut Guest) {
    assert_eq!((source.write(0, 3), target.read(0)), (0, Ok(3)));
    assert_eq!(target.write(0, 4), 0, "it waits until the source is quiet");
    // The source has in memory what the disk was before.
    assert_eq!((source.read(0), source.write(0, 3)), (Ok(4), EPERM));
    assert_eq!((target.write(0, 5), target.read(0)), (0, Ok(5)));
}

fn shared(grid: &Grid, one: &mut Guest, two: &mut Guest) {
    assert!(grid.ok("volume export v1 --shared").contains("several writers"));
    assert_eq!(grid.json("volume show v1")["shared"], true);
    for n in 1..4 {
        assert_eq!((one.write(0, n), two.write(0, n + 100), one.read(0)), (0, 0, Ok(n + 100)));
    }
    assert!(grid.ok("volume show v1").contains("several at a time"));
    // It stays so over a restart, until that is taken back.
    grid.ok("grid down --force");
    grid.ok("grid up");
    assert_eq!(grid.json("volume show v1")["shared"], true);
    grid.ok("volume export v1 --shared off");
    assert_eq!(grid.json("volume show v1")["shared"], false);
}

#[test]
fn a_client_of_another_host_is_another_one_and_the_right_goes_with_the_volume() {
    let store = tempfile::tempdir().unwrap();
    let member = etcd(store.path(), 60);
    let endpoint = member.config().endpoint();
    let (a, b) = (Grid::new(8), Grid::new(10));
    let tcp = |index| SocketAddr::from(([127, 0, 0, 1], free_ports(index, 1)));
    let (at_a, at_b) = (tcp(9), tcp(11));
    a.up(&format!("--nodes 2 --devices 1 --etcd {endpoint} --address 127.0.0.1 --name a --tls off --nbd-tcp {at_a}"));
    let id = a.json("status")["grid"].as_str().unwrap().to_string();
    let join = format!("--nodes 0 --etcd {endpoint} --address 127.0.0.1 --name b --join {id} --nbd-tcp {at_b}");
    b.up(&join);
    a.ok("volume create v1 --size 16MiB --layout mirror:2");
    b.ok("volume export v1 --multipath");
    let (mut first, mut second) =
        (Guest::connect_tcp([127, 0, 0, 2], at_b, "v1"), Guest::connect_tcp([127, 0, 0, 3], at_b, "v1"));
    // Two ways of one client, by two hosts; and another client by each of these.
    let busy = Busy::begin(vec![Guest::connect(&a, "v1"), Guest::connect(&b, "v1")]);
    let held = HungWrite::begin(&a, "v1");
    assert_eq!((first.read(0), first.write(0, 2)), (Ok(1), EPERM));
    assert!(a.json("volume show v1")["refused_writer"].as_str().unwrap().contains("127.0.0.2"));
    a.ok("volume handover v1 --to b");
    held.answered();
    let held = HungWrite::begin(&b, "v1");
    assert_eq!(second.write(0, 2), EPERM, "who wrote before goes on");
    held.end();
    let mut former = busy.end();
    assert_eq!(first.write(0, 7), 0, "it is quiet");
    a.ok("volume export v1 --takeover");
    until("the other host has heard of it", || first.read(0) == Ok(7));
    // It is known at the next host, too, who was followed.
    assert_eq!(former[1].write(0, 1), EPERM);
    assert_eq!((first.write(0, 8), first.read(0)), (0, Ok(8)));
}
