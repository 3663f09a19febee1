//! The host where strangers meet it: too many of them, in places of any name, without TLS, with keys that are not
//! right.

mod support;

use holdfast_lab::guest::connect_from;
use holdfast_lab::nbd::{self, Client, Receiver};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use support::{Grid, free_ports, needs, text, until};

/// How long a server that does not answer may keep a test waiting.
const PATIENCE: Duration = Duration::from_secs(60);

/// More than a host lets stand in line that have opened no export.
const IDLE_COUNT: usize = 1100;

/// Places of a volume that one address can have: half of what is not kept for this machine's own clients.
const SHARE: usize = 112;

/// A connection to the port from one of this machine's loopback addresses.
fn from(address: [u8; 4], port: u16) -> TcpStream {
    let stream = connect_from(address, (Ipv4Addr::LOCALHOST, port).into()).expect("the host listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    stream
}

/// Opens an export, or says why not.
fn open<S: Read + Write>(stream: S, export: &str) -> Result<Receiver<S>, String> {
    Client::open(stream, export, false).map(Client::into_receiver).map_err(|error| format!("{error:#}"))
}

/// Reads a block; gives the error of the answer.
fn read<S: Read + Write>(client: &mut Receiver<S>, offset: u64) -> u32 {
    let request = nbd::encode(nbd::Command::Read, false, 7, offset, 4096, &[]);
    client.stream.write_all(&request).expect("sent");
    client.receive().expect("an answer").expect("the host does not close").error
}

fn succeeds(program: &str, arguments: &[&str]) {
    let output = Command::new(needs(program)).args(arguments).output().expect("it runs");
    assert!(output.status.success(), "{program} {arguments:?}: {}", text(&output.stderr));
}

#[test]
fn one_who_takes_all_places_is_in_nobodys_way() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).expect("as many as we may");
    let dir = tempfile::Builder::new().prefix("hf a?&%+{}é").tempdir().expect("a directory");
    let grid = Grid::in_dir(dir, free_ports(0, 4));
    let port = free_ports(1, 1);
    let options = format!("--port {} --device-size 256MiB --nbd-tcp 127.0.0.1:{port}", grid.port);
    grid.ok(&format!("grid up --nodes 3 --devices 1 {options}"));
    grid.ok("volume create v1 --size 8MiB");
    let nbd = || UnixStream::connect(grid.path("nbd.sock")).expect("the host listens");
    let mut local = open(nbd(), "v1").expect("there is room");
    let mut silent = from([127, 0, 0, 1], grid.port.parse().expect("a port"));

    // Who says nothing pushes out nobody but itself.
    let idle: Vec<TcpStream> = (0..IDLE_COUNT).map(|_| from([127, 0, 0, 1], port)).collect();
    open(from([127, 0, 0, 2], port), "v1").expect("another address is let in");
    open(nbd(), "v1").expect("this machine is let in");
    // It has been greeted, and then it is over.
    let mut heard = Vec::new();
    (&idle[0]).take(1000).read_to_end(&mut heard).unwrap_or_default();
    assert!(heard.len() <= 18, "the oldest is pushed out");
    drop(idle);

    // Sessions of a volume are shared by addresses.
    let mut sessions = Vec::new();
    let why = loop {
        match open(from([127, 0, 0, 1], port), "v1") {
            Ok(session) => sessions.push(session),
            Err(why) => break why,
        }
        assert!(sessions.len() <= SHARE, "{} sessions of one address", sessions.len());
    };
    assert!(why.contains("kept for others") && why.contains("127.0.0.1"), "{why}");
    assert!(sessions.len() >= SHARE - 2, "{}", sessions.len());
    open(from([127, 0, 0, 2], port), "v1").expect("another address is let in");
    open(nbd(), "v1").expect("this machine is let in");
    assert_eq!(read(&mut local, 0), 0);

    // What clients know the size of is not made smaller under their hands.
    let why = grid.fails("volume resize v1 --size 4MiB --shrink");
    assert!(why.contains("127.0.0.1:") && why.contains("--force"), "{why}");
    drop(sessions);
    let sessions_left = || grid.json("volume show v1")["sessions"].as_u64();
    until("only one is left", || sessions_left() == Some(1));
    assert!(grid.fails("volume resize v1 --size 4MiB --shrink").contains("unix, process"));
    let told = grid.ok("volume resize v1 --size 4MiB --shrink --force");
    assert!(told.contains("4 MiB") && told.contains("larger size"), "{told}");
    assert_eq!(read(&mut local, 6 << 20), 22, "EINVAL: it is behind the end");
    assert_eq!(read(&mut local, 0), 0, "and the connection goes on");

    // Who says nothing to a node does not stay there.
    assert_eq!(silent.read(&mut [0]).unwrap_or(0), 0);

    // Whatever is in the name of the directory, clients find the socket.
    let uri = grid.uri("v1");
    assert!(uri.contains("%20a%3F%26%25%2B%7B%7D%C3%A9"), "{uri}");
    succeeds("nbdinfo", &["--size", &uri]);
    succeeds("qemu-img", &["info", &uri]);
}

/// Writes a self-signed certificate for an RSA key of so many bits, and that.
fn make_rsa(dir: &Path, bits: u32) {
    fs::create_dir_all(dir).expect("a directory");
    let (key, certificate) = (dir.join("server-key.pem"), dir.join("server-cert.pem"));
    let kind = format!("rsa:{bits}");
    let paths = [key.to_str().expect("plain"), "-out", certificate.to_str().expect("plain")];
    succeeds(
        "openssl",
        &[&["req", "-x509", "-newkey", &kind, "-nodes", "-subj", "/CN=a", "-keyout"], &paths[..]].concat(),
    );
}

#[test]
fn other_machines_are_served_with_tls_or_where_that_is_said() {
    let grid = Grid::new(2);
    let port = free_ports(3, 1);
    let up =
        format!("grid up --nodes 2 --devices 1 --port {} --device-size 256MiB --nbd-tcp 0.0.0.0:{port}", grid.port);
    let why = grid.fails(&up);
    assert!(why.contains("--nbd-open") && why.contains("--tls-dir"), "{why}");
    let odd = grid.path("odd");
    make_rsa(&odd, 2432);
    let why = grid.fails(&format!("{up} --tls-dir {}", odd.display()));
    assert!(why.contains("RSA key of 2432 bits") && why.contains("openssl req"), "{why}");
    assert!(why.contains("--tls-dir can't be used") && !why.contains("holdfast.toml"), "there is no file: {why}");
    assert!(!grid.path("run/node1.pid").exists(), "nothing is started");

    let told = grid.ok(&format!("{up} --nbd-open"));
    assert!(told.contains("is open") && told.contains("everybody"), "{told}");
    assert!(grid.json("status")["nbd_warning"].as_str().is_some_and(|warning| warning.contains("is open")));
    grid.ok("volume create v1 --size 8MiB --layout mirror:2");
    open(from([127, 0, 0, 1], port), "v1").expect("it is open");
    grid.ok("grid down");

    // What an older release served: the host is up without it.
    let settings = grid.path("holdfast.toml");
    let text = fs::read_to_string(&settings).expect("it is there");
    fs::write(&settings, text.replace("\nnbd.open = \"on\"", "")).expect("written");
    assert!(grid.fails("config check").contains("nbd.open"));
    let told = grid.ok("grid up");
    assert!(told.contains("NBD is not served") && told.contains("nbd.tls_dir"), "{told}");
    TcpStream::connect(("127.0.0.1", port)).expect_err("nobody listens");
    let nbd = || UnixStream::connect(grid.path("nbd.sock")).expect("the host listens");
    until("the volume is served", || open(nbd(), "v1").is_ok());

    // The same of keys, by the same words.
    let with_tls = |dir: &Path| {
        format!("{text}\n").replace("\nnbd.open = \"on\"", &format!("\nnbd.tls_dir = '{}'", dir.display()))
    };
    let write = |dir: &Path| {
        let text = with_tls(dir).replace("\n# nbd.tls_dir", "\n# other");
        fs::write(&settings, text).expect("written");
    };
    write(&odd);
    let why = grid.fails("config check");
    assert!(why.contains("RSA key of 2432 bits") && why.contains("openssl req"), "{why}");
    let right = grid.path("right");
    make_rsa(&right, 3072);
    write(&right);
    assert!(grid.ok("config check").contains("is right"));
    assert!(grid.json("status")["nbd_warning"].is_null());
}
