//! Guests with two paths, against servers whose faults are known: they go over to the other path, and nothing is missed.

use holdfast_torture::atlas::guests::{Control, Guests, Plan, Seen, VolumePlan, Work};
use holdfast_torture::atlas::machine::Part;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command};
use std::sync::mpsc;
use std::time::{Duration, Instant};

const SIZE_BYTES: u64 = 16 << 20;
const SIZE: &str = "16M";

/// nbdkit on a TCP port, killed with the test.
struct Server {
    child: Child,
    address: SocketAddr,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// nbdkit dies with the thread that started it (`PR_SET_PDEATHSIG`), so that thread stays.
fn spawn_for_good(mut command: Command) -> Child {
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || {
        tell.send(command.spawn().expect("nbdkit starts")).expect("the caller waits");
        loop {
            std::thread::park();
        }
    });
    told.recv().expect("nbdkit starts")
}

fn start(arguments: &[&str]) -> Server {
    let address = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port");
    let mut command = Command::new("nbdkit");
    command.args(["-f", "-i", "127.0.0.1", "-p", &address.port().to_string()]).args(arguments);
    let child = spawn_for_good(command);
    let since = Instant::now();
    while TcpStream::connect(address).is_err() {
        assert!(since.elapsed() < Duration::from_secs(10), "nbdkit listens");
        std::thread::sleep(Duration::from_millis(10));
    }
    Server { child, address }
}

/// False, with a line on the terminal, where nbdkit is missing.
fn has_nbdkit() -> bool {
    let found = Command::new("nbdkit").arg("--version").output().is_ok();
    if !found {
        use std::io::Write;
        let _ = writeln!(std::io::stderr(), "skipped: no nbdkit here; ./x setup installs it");
    }
    found
}

/// Two ways to the same bytes. What keeps them does one request at a time: a page cache would let a read see half of a
/// cell that is being written, which no volume does.
struct Pair {
    ways: [Server; 2],
    _disk: Server,
}

fn pair(filters: &[&str], settings: &[&str]) -> Pair {
    let serial = ["--filter=noparallel", "serialize=all-requests"];
    let disk = start(&[&serial[..1], filters, &["memory", SIZE, serial[1]], settings].concat());
    let uri = format!("uri=nbd://{}", disk.address);
    Pair { ways: [(); 2].map(|()| start(&["nbd", &uri])), _disk: disk }
}

/// Runs guests under what is done to their servers, then reads everything; what they saw.
fn run(servers: &[Server; 2], act: impl FnOnce(&Control)) -> Seen {
    let plan = Plan {
        seed: 7,
        servers: Part::HOSTS.into_iter().zip(servers.iter().map(|server| server.address)).collect(),
        volumes: vec![VolumePlan {
            name: String::new(),
            layout: "-".into(),
            size_bytes: SIZE_BYTES,
            homes: Part::HOSTS,
        }],
        depth: 4,
        rate: 500.0,
        silence: Duration::from_secs(1),
        patience: Duration::from_secs(20),
    };
    let (guests, control) = Guests::new(plan);
    let running = std::thread::spawn(move || guests.run());
    std::thread::sleep(Duration::from_secs(1));
    act(&control);
    control.set_work(Work::Rest);
    wait(|| control.is_idle());
    control.set_work(Work::Sweep(0));
    wait(|| control.swept() || control.failed());
    control.end();
    running.join().expect("guests run").expect("servers keep to the protocol");
    control.total()
}

fn wait(mut is_so: impl FnMut() -> bool) {
    let since = Instant::now();
    while !is_so() {
        assert!(since.elapsed() < Duration::from_secs(30), "not within half a minute");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn guests_go_over_to_the_other_path_when_theirs_ends_or_is_silent() {
    if !has_nbdkit() {
        return;
    }
    let disk = pair(&[], &[]);
    let first = disk.ways[0].child.id().cast_signed();
    let seen = run(&disk.ways, |_| {
        let process = rustix::process::Pid::from_raw(first).expect("a process");
        rustix::process::kill_process(process, rustix::process::Signal::STOP).expect("stopped");
        std::thread::sleep(Duration::from_secs(3));
    });
    assert_eq!(seen.failed(), 0, "{seen:?}");
    assert!(seen.left == 1 && seen.repeated > 0 && seen.requests > 500, "{seen:?}");
    assert!(seen.longest[0] > Duration::from_secs(1) && seen.longest[1] < Duration::from_secs(1), "{seen:?}");

    let disk = pair(&[], &[]);
    let pid = disk.ways[1].child.id().cast_signed();
    let seen = run(&disk.ways, |control| {
        let process = rustix::process::Pid::from_raw(pid).expect("a process");
        rustix::process::kill_process(process, rustix::process::Signal::KILL).expect("killed");
        std::thread::sleep(Duration::from_secs(1));
        assert_eq!(control.at(), [Some(Part::H1), Some(Part::H1)]);
    });
    assert_eq!(seen.failed(), 0, "{seen:?}");
    assert!(seen.left == 0 && seen.ended == 1, "{seen:?}");
}

#[test]
fn two_paths_that_lead_to_different_bytes_are_found_out() {
    if !has_nbdkit() {
        return;
    }
    let servers = [start(&["memory", SIZE]), start(&["memory", SIZE])];
    let seen = run(&servers, |control| wait(|| control.failed()));
    assert!(seen.mismatches > 0 && seen.failures[0].contains("mismatch"), "{seen:?}");
}

#[test]
fn an_error_is_counted_and_told() {
    if !has_nbdkit() {
        return;
    }
    let disk = pair(&["--filter=error"], &["error-rate=1%", "error=EIO"]);
    let seen = run(&disk.ways, |control| wait(|| control.failed()));
    assert!(seen.errors > 0 && seen.mismatches == 0, "{seen:?}");
    assert!(seen.failures.iter().all(|f| f.contains("failed with error 5")), "{seen:?}");
}
