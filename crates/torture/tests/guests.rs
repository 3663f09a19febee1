//! Guests with two paths, against servers whose faults are known: they go over to the other path, and nothing is missed.

use holdfast_lab::program::needs;
use holdfast_torture::atlas::guests::{Control, Guests, Plan, Seen, VolumePlan, Work};
use holdfast_torture::atlas::machine::Part;
use rustix::process::{Pid, Signal};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command};
use std::sync::mpsc;
use std::time::{Duration, Instant};

const SIZE_BYTES: u64 = 16 << 20;
const SIZE: &str = "16M";

/// How long a machine that has much else to do may keep a test waiting.
const PATIENCE: Duration = Duration::from_secs(60);

/// Of a guest, on a path that says nothing.
const SILENCE: Duration = Duration::from_secs(1);

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

/// On a port that was free just now: where somebody else was faster it ends at once, and another one is tried.
fn start(arguments: &[&str]) -> Server {
    let since = Instant::now();
    loop {
        let address = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port");
        let mut command = Command::new(needs("nbdkit"));
        command.args(["-f", "-i", "127.0.0.1", "-p", &address.port().to_string()]).args(arguments);
        let mut server = Server { child: spawn_for_good(command), address };
        while server.child.try_wait().expect("it is our child").is_none() {
            if listens(address) {
                return server;
            }
            assert!(since.elapsed() < PATIENCE, "nbdkit listens");
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(since.elapsed() < PATIENCE, "nbdkit ends at once");
    }
}

/// Where nobody listens, a connection may get the very port that it goes to, and then is one with itself.
fn listens(address: SocketAddr) -> bool {
    TcpStream::connect(address).is_ok_and(|stream| stream.local_addr().is_ok_and(|own| own != address))
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
        silence: SILENCE,
        patience: PATIENCE,
    };
    let (guests, control) = Guests::new(plan);
    let running = std::thread::spawn(move || guests.run());
    wait(|| control.failed() || control.total().requests > 300);
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
        assert!(since.elapsed() < PATIENCE, "not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Does something to one of two ways; guests lose nothing by it. Where the machine stands still for a while they may
/// take the other way for silent, too, which is right of them: then it is tried again.
fn runs_rightly(act: impl Fn(&Pair, &Control), is_right: impl Fn(&Seen) -> bool) {
    let mut told = Vec::new();
    for _ in 0..5 {
        let disk = pair(&[], &[]);
        let seen = run(&disk.ways, |control| act(&disk, control));
        assert_eq!(seen.failed(), 0, "{seen:?}");
        if is_right(&seen) {
            return;
        }
        told.push(seen);
    }
    panic!("{told:?}");
}

fn signal(server: &Server, signal: Signal) {
    let process = Pid::from_raw(server.child.id().cast_signed()).expect("a process");
    rustix::process::kill_process(process, signal).expect("signalled");
}

/// All guests have this path, and go on there.
fn go_on_at(control: &Control, part: Part) {
    wait(|| control.failed() || control.at() == [Some(part); 2]);
    let before = control.total().requests;
    wait(|| control.failed() || control.total().requests > before + 100);
}

#[test]
fn guests_go_over_to_the_other_path_when_theirs_ends_or_is_silent() {
    let [first, second] = Part::HOSTS;
    let hang = |disk: &Pair, control: &Control| {
        signal(&disk.ways[0], Signal::STOP);
        go_on_at(control, second);
    };
    runs_rightly(hang, |seen| {
        let waited = &seen.longest;
        seen.left == 1 && seen.repeated > 0 && waited[0] > SILENCE && waited[1] < SILENCE
    });
    let kill = |disk: &Pair, control: &Control| {
        signal(&disk.ways[1], Signal::KILL);
        go_on_at(control, first);
    };
    runs_rightly(kill, |seen| seen.left == 0 && seen.ended == 1);
}

#[test]
fn two_paths_that_lead_to_different_bytes_are_found_out() {
    let servers = [start(&["memory", SIZE]), start(&["memory", SIZE])];
    let seen = run(&servers, |control| wait(|| control.failed()));
    assert!(seen.mismatches > 0 && seen.failures[0].contains("mismatch"), "{seen:?}");
}

#[test]
fn an_error_is_counted_and_told() {
    let disk = pair(&["--filter=error"], &["error-rate=1%", "error=EIO"]);
    let seen = run(&disk.ways, |control| wait(|| control.failed()));
    assert!(seen.errors > 0 && seen.mismatches == 0, "{seen:?}");
    assert!(seen.failures.iter().all(|f| f.contains("failed with error 5")), "{seen:?}");
}
