//! Grids with TLS: machines that join with a token, and everybody else, who gets nowhere.
//!
//! Needs the program `etcd`; `./x` sees to it.

mod support;

use holdfast_base::{GridId, MetaVersion, NodeId};
use holdfast_format::wire::{Request, WIRE, encode_frame};
use holdfast_runtime::meta::{EtcdConfig, EtcdStore, MetaStore, Swap};
use holdfast_runtime::pki::{Authority, Pair, Role};
use holdfast_runtime::revoked::Revoked;
use holdfast_runtime::tls::TlsStream;
use holdfast_runtime::tls::link::{HostTls, LinkPaths};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::ring;
use rustls::{ClientConfig, ClientConnection, DigitallySignedStruct, SignatureScheme};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use support::{Grid, assert_volume_holds, etcd, holdfast, is_whole, nbdcopy, needs, pattern, text, until};

/// How long a peer that does not answer may keep a test waiting.
const PATIENCE: Duration = Duration::from_secs(60);

/// A certificate for so long is to be renewed at once.
const SHORT: Duration = Duration::from_secs(3600);

/// The first machine of a grid that others can join: TLS is the default. Two devices a node, so that one node of two can be
/// away.
fn first(index: u16, endpoint: &str, nodes: u32) -> Grid {
    let grid = Grid::new(index);
    fs::write(grid.path("holdfast.toml"), "authority.spread = \"off\"\n").expect("written");
    grid.up(&format!("--nodes {nodes} --devices 2 --etcd {endpoint} --address 127.0.0.1 --name a"));
    grid
}

fn join_line(grid: &Grid, endpoint: &str, name: &str, token: &str) -> String {
    let port = &grid.port;
    format!(
        "grid up --port {port} --device-size 256MiB --nodes 1 --devices 2 --etcd {endpoint} --address 127.0.0.1 --name \
         {name} --join {token}"
    )
}

fn token(grid: &Grid, options: &str) -> String {
    grid.ok(&format!("grid token {options}")).trim().to_string()
}

fn log(grid: &Grid, name: &str) -> String {
    fs::read_to_string(grid.path("logs").join(name)).unwrap_or_default()
}

fn id(grid: &Grid) -> GridId {
    grid.json("status")["grid"].as_str().expect("an id").parse().expect("an id")
}

fn connect(grid: &Grid) -> TcpStream {
    let port: u16 = grid.port.parse().expect("a port");
    let stream = TcpStream::connect(("127.0.0.1", port)).expect("node 1 listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    stream
}

/// What comes back until the node ends the connection.
fn until_closed(mut stream: TcpStream) -> Vec<u8> {
    let mut came = Vec::new();
    match stream.read_to_end(&mut came) {
        Ok(_) => came,
        Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => came,
        Err(e) => panic!("the node did not end the connection: {e}"),
    }
}

fn hello(grid: &Grid) -> Vec<u8> {
    encode_frame(1, &Request::Hello { versions: WIRE, grid: id(grid), host: "stranger".to_string() }, 0)
}

/// The grid's records.
fn records(endpoint: &str, of: &Grid) -> EtcdStore {
    let prefix = format!("holdfast/{}/", id(of));
    let config = EtcdConfig { endpoints: vec![endpoint.to_string()], prefix, tls: None };
    EtcdStore::connect(&config).expect("etcd")
}

/// Has a machine join, and kills the command when the grid has a number for its node, long before its part is complete.
fn join_cut_short(grid: &Grid, line: &str, endpoint: &str, of: &Grid) {
    let store = records(endpoint, of);
    let mut joining = holdfast();
    joining.args(line.split_whitespace()).arg("--dir").arg(grid.dir.path()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut joining = joining.spawn().expect("it starts");
    let end = Instant::now() + PATIENCE;
    let has_two = || store.list("node/").expect("etcd answers").records.len() == 2;
    while !has_two() {
        assert!(Instant::now() < end, "no number is taken");
        std::thread::sleep(Duration::from_millis(1));
    }
    joining.kill().expect("it runs");
    joining.wait().expect("it ends");
    assert!(grid.path("grid.creating").exists() && !grid.path("grid.json").exists(), "it was not complete");
    assert!(has_two(), "the number is taken");
}

/// Drives a session over a socket until the node has ended it; gives what the node said, or why it could not be heard.
fn talk(mut session: TlsStream, mut stream: TcpStream, says: &[u8]) -> Result<Vec<u8>, String> {
    session.send(says);
    let mut heard = Vec::new();
    loop {
        let mut out = Vec::new();
        session.take_ciphertext(&mut out);
        if stream.write_all(&out).is_err() {
            return Err("the connection ended".to_string());
        }
        let mut bytes = [0; 4096];
        match stream.read(&mut bytes) {
            Ok(0) | Err(_) => return Err("the connection ended".to_string()),
            Ok(count) => session.on_ciphertext(&mut bytes[..count], &mut heard).map_err(|e| e.to_string())?,
        }
        if !heard.is_empty() {
            return Ok(heard);
        }
    }
}

/// A host's credentials, judging nodes by the grid's authority, and shown by whichever signed `pair`.
fn credentials(grid: &Grid, name: &str, pair: &Pair) -> HostTls {
    let path = |extension: &str| grid.path(&format!("{name}.{extension}"));
    fs::write(path("pem"), &pair.certificate).expect("written");
    fs::write(path("key"), &pair.key).expect("written");
    let paths = LinkPaths { ca: grid.path("tls/ca.pem"), certificate: path("pem"), key: path("key") };
    HostTls::load(&paths, id(grid), name).expect("they are sound")
}

/// Takes any node for the right one.
#[derive(Debug)]
struct Anybody;

impl ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        ring::default_provider().signature_verification_algorithms.supported_schemes()
    }
}

/// Says hello as any TLS client may, with these files' certificate or none; what the node answers.
fn answer_to_stranger(grid: &Grid, shows: Option<[&str; 2]>) -> Vec<u8> {
    answer_to(grid, shows, &hello(grid))
}

/// The same, of whatever is said.
fn answer_to(grid: &Grid, shows: Option<[&str; 2]>, says: &[u8]) -> Vec<u8> {
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("TLS 1.3")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Anybody));
    let config = match shows {
        None => builder.with_no_client_auth(),
        Some([certificate, key]) => {
            let certificate = CertificateDer::from_pem_file(grid.path(certificate)).expect("a certificate");
            let key = PrivateKeyDer::from_pem_file(grid.path(key)).expect("a key");
            builder.with_client_auth_cert(vec![certificate], key).expect("a pair")
        }
    };
    let name = ServerName::try_from("anybody").expect("a name");
    let mut session = ClientConnection::new(Arc::new(config), name).expect("a session");
    let mut socket = connect(grid);
    let mut stream = rustls::Stream::new(&mut session, &mut socket);
    let mut bytes = [0; 4096];
    // It fails in saying or in hearing, as the alert comes sooner or later.
    let count = stream.write_all(says).and_then(|()| stream.read(&mut bytes)).unwrap_or(0);
    bytes[..count].to_vec()
}

fn write_and_read(grid: &Grid, volume: &str) {
    let (data, scratch) = (grid.path("data"), grid.path("scratch"));
    pattern(&data, 8 << 20);
    nbdcopy(data.to_str().expect("text"), &grid.uri(volume));
    assert_volume_holds(&grid.uri(volume), &data, &scratch);
}

#[test]
fn machines_join_by_token_and_share_volumes_over_tls() {
    let store = tempfile::tempdir().expect("a directory");
    let member = etcd(store.path(), 20);
    let endpoint = member.config().endpoint();
    let a = first(32, &endpoint, 1);
    let (b, c) = (Grid::new(33), Grid::new(34));
    assert_eq!(a.json("status")["tls"], true);
    for secret in ["tls/ca.key", "tls/host.key", "tls/node-1.key"] {
        let mode = fs::metadata(a.path(secret)).expect("it is there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{secret}");
    }
    assert_eq!(fs::metadata(a.path("tls")).expect("it is there").permissions().mode() & 0o777, 0o700);

    let refused = b.fails(&join_line(&b, &endpoint, "b", &id(&a).to_string()));
    assert!(refused.contains("has TLS") && refused.contains("holdfast grid token"), "{refused}");
    let refused = b.fails(&join_line(&b, &endpoint, "b", "hfjoin1_AAAA"));
    assert!(refused.contains("copy the whole line"), "{refused}");
    let given = token(&a, "");
    let refused = b.fails(&join_line(&b, &endpoint, "a", &given));
    assert!(refused.contains("named a already"), "{refused}");
    assert!(!b.path("grid.json").exists() && !b.path("tls").exists(), "nothing is left of it");
    join_cut_short(&b, &join_line(&b, &endpoint, "b", &given), &endpoint, &a);
    let refused = c.fails(&join_line(&c, &endpoint, "b", &given));
    assert!(refused.contains("named b already"), "elsewhere it is another machine's: {refused}");
    b.ok(&join_line(&b, &endpoint, "b", &given));
    assert_eq!(b.json("status")["nodes"].as_array().map(Vec::len), Some(2), "it has taken no second number");
    assert!(!b.path("grid.creating").exists());
    assert!(!b.path("tls/ca.key").exists(), "it needs no key of the authority");
    until("both hosts use both nodes", || {
        [&a, &b].iter().all(|grid| grid.node_state(1) == "up" && grid.node_state(2) == "up")
    });
    a.ok("volume create v1 --size 64MiB --layout mirror:2");
    write_and_read(&a, "v1");
    b.ok("volume export v1 --takeover");
    assert_volume_holds(&b.uri("v1"), &a.path("data"), &b.path("scratch"));
    write_and_read(&b, "v1");

    // A cut cable, as drills make it: the sessions outlive it, or are made anew.
    b.ok("node cut 2");
    until("the cut shows", || b.node_state(2) == "cut");
    write_and_read(&b, "v1");
    b.ok("node mend 2");
    until("it is mended", || b.node_state(2) == "up");
    write_and_read(&b, "v1");

    let refused = c.fails(&join_line(&c, &endpoint, "c", &given));
    assert!(refused.contains("used already, for machine b") && refused.contains("grid token"), "{refused}");
    // Both machines start again with what they have, the one that signs being down.
    until("what the cut node missed is made good", || is_whole(&b, "v1"));
    a.ok("grid down --force");
    b.ok("grid down --force");
    b.ok("grid up");
    let refused = c.fails(&join_line(&c, &endpoint, "c", &given));
    assert!(refused.contains("used already"), "{refused}");
    a.ok("grid up");
    until("both are up again", || a.node_state(2) == "up" && b.node_state(1) == "up");
    assert!(b.fails("grid token").contains("no key of the grid's authority"));

    // The authority's key goes from host to host, by command and by itself.
    let refused = b.fails("grid tls authority give a");
    assert!(refused.contains("no key of the grid's authority"), "{refused}");
    let refused = a.fails("grid tls authority give z");
    assert!(refused.contains("no host z that is up; those are: a, b"), "{refused}");
    // Its certificate is renewed over that key, and gets to the others.
    let authority = fs::read(a.path("tls/ca.pem")).expect("it is there");
    let told = a.ok("grid tls authority renew");
    assert!(told.contains("ca-cert.pem"), "{told}");
    assert!(b.fails("grid tls authority renew").contains("no key of the grid's authority"));
    let renewed = fs::read(a.path("tls/ca.pem")).expect("it is there");
    assert_ne!(renewed, authority);
    until("the others have it", || fs::read(b.path("tls/ca.pem")).expect("it is there") == renewed);
    a.ok("grid tls authority give b");
    assert_eq!(fs::read(a.path("tls/ca.key")).expect("a key"), fs::read(b.path("tls/ca.key")).expect("a key"));
    let mode = fs::metadata(b.path("tls/ca.key")).expect("it is there").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let signing = |grid: &Grid| -> Vec<bool> {
        let machines = grid.json("machine list");
        machines.as_array().expect("machines").iter().map(|m| m["signs"].as_bool().expect("a bool")).collect()
    };
    until("it is told", || signing(&a) == [true, true]);
    for grid in [&a, &b] {
        until("all is well", || grid.ok("status").starts_with("all is well"));
        let mut command = Command::new(needs("curl"));
        command.args(["-sS", "--unix-socket"]).arg(grid.path("api.sock")).arg("http://host/metrics");
        let page = text(&command.output().expect("it runs").stdout);
        let ends = page.lines().filter(|line| line.starts_with("holdfast_certificate_end_timestamp_seconds{"));
        assert_eq!(ends.count(), 3, "of the authority, its host and its node: {page}");
    }
    a.ok("grid down --force");
    c.ok(&join_line(&c, &endpoint, "c", &token(&b, "")));
    b.ok("grid down --force");
    c.ok("grid down --force");
    fs::remove_file(b.path("tls/ca.key")).expect("removed");
    fs::remove_file(a.path("holdfast.toml")).expect("removed");
    for grid in [&b, &a] {
        grid.ok("grid up");
    }
    until("the other machine has it again", || b.path("tls/ca.key").exists() && signing(&a) == [true, true, false]);
    let words = a.ok("grid tls authority phrase");
    assert_eq!((words.split_whitespace().count(), &words), (24, &b.ok("grid tls authority phrase")));
}

#[test]
fn whoever_is_not_a_host_of_the_grid_is_refused_and_the_node_serves_on() {
    let store = tempfile::tempdir().expect("a directory");
    let member = etcd(store.path(), 21);
    let a = first(35, &member.config().endpoint(), 2);
    a.ok("volume create v1 --size 64MiB --layout mirror:2");

    // The first is what a host says where links have no TLS.
    let mut oversized = b"\x16\x03\x01\x40\x00\x01\x00\xff\xff".to_vec();
    oversized.resize(1 << 20, 0);
    let truncated = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc".to_vec();
    let garbage: Vec<u8> = (0..200_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    for (what, bytes) in [("plain", hello(&a)), ("oversized", oversized), ("garbage", garbage)] {
        let mut stream = connect(&a);
        // It may end the connection before all is said.
        let _ = stream.write_all(&bytes);
        let came = until_closed(stream);
        assert!(!came.starts_with(b"HFW1") && came.len() < 100, "{what}: {} bytes came", came.len());
    }
    // Neither who says nothing, nor who stops in the middle, holds a place for long.
    let silent = connect(&a);
    let mut half = connect(&a);
    half.write_all(&truncated).expect("sent");
    let (grid, node) = (id(&a), NodeId(1));
    let issue = |authority: &Authority| authority.issue(&Role::Host("x".to_string())).expect("signed");

    let (other, _) = Authority::make(grid).expect("made");
    let forged = credentials(&a, "x", &issue(&other));
    let heard = talk(forged.connect(Role::Node(node)).expect("a session"), connect(&a), &hello(&a));
    let why = heard.expect_err("it is not let in");
    assert!(why.contains("its log says why") || why.contains("the connection ended"), "{why}");
    // With one of the grid's it is: the same way in, so it is the certificate that decides.
    let read = |name: &str| fs::read_to_string(a.path(name)).expect("it is there");
    let own = Authority::load(grid, &Pair { certificate: read("tls/ca.pem"), key: read("tls/ca.key") }).expect("sound");
    let right = credentials(&a, "x", &issue(&own));
    // Nodes wait for a handshake no longer than some seconds, which a busy machine may take.
    let as_node = |id: u32| right.connect(Role::Node(NodeId(id))).expect("a session");
    until("it is let in, and the node greets", || {
        talk(as_node(1), connect(&a), &hello(&a)).is_ok_and(|heard| heard.starts_with(b"HFW1"))
    });
    until("it is node 1", || {
        let why = talk(as_node(2), connect(&a), &hello(&a)).expect_err("it is not node 2");
        why.contains("node 1's, and node 2 should be there")
    });

    assert_eq!(answer_to_stranger(&a, None), b"", "one without a certificate");
    let node_2 = Some(["tls/node-2.pem", "tls/node-2.key"]);
    until("a node is let in, for what it makes shards of", || answer_to_stranger(&a, node_2).starts_with(b"HFW1"));
    let not_greeted = encode_frame(2, &Request::Stat, 0);
    assert_eq!(answer_to(&a, node_2, &not_greeted), b"", "a node that asks what is not for nodes");
    let host = Some(["tls/host.pem", "tls/host.key"]);
    until("the same client is let in with a host's", || answer_to_stranger(&a, host).starts_with(b"HFW1"));

    assert!(until_closed(silent).is_empty());
    until_closed(half);
    until("the log has all reasons", || {
        let said = log(&a, "node1.log");
        let reasons = [
            "refused a connection from 127.0.0.1",
            "does not speak TLS 1.3",
            "not of this grid's authority",
            "has not finished its TLS handshake",
            "shows no certificate",
            "it is a node, and may only read shards",
        ];
        reasons.iter().all(|reason| said.contains(reason))
    });
    a.wait_for_node(1, "up");
    write_and_read(&a, "v1");
}

#[test]
fn certificates_are_renewed_and_nodes_added_where_the_authority_is_and_with_a_token_elsewhere() {
    let store = tempfile::tempdir().expect("a directory");
    let member = etcd(store.path(), 22);
    let endpoint = member.config().endpoint();
    let a = first(36, &endpoint, 1);
    let (b, c) = (Grid::new(37), Grid::new(38));
    b.ok(&join_line(&b, &endpoint, "b", &token(&a, "--valid 10m")));
    let shown = a.json("grid tls show");
    let roles = |shown: &serde_json::Value| -> Vec<String> {
        let listed = shown["certificates"].as_array().expect("a list").iter();
        listed.map(|leaf| leaf["role"].as_str().expect("a role").to_string()).collect()
    };
    assert_eq!(roles(&shown), ["authority", "host a", "node 1"]);
    assert_eq!(b.json("grid tls show")["authority_sha256"], shown["authority_sha256"]);

    // A node more on each machine.
    a.ok("node add");
    assert!(b.fails("node add").contains("holdfast grid token --for b"));
    let for_b = token(&a, "--for b");
    b.ok(&format!("node add --token {for_b}"));
    assert!(b.fails(&format!("grid tls rotate --token {for_b}")).contains("used already"));
    assert_eq!(roles(&b.json("grid tls show")), ["authority", "host b", "node 2", "node 4"]);
    until("all use all", || (1..=4).all(|node| a.node_state(node) == "up" && b.node_state(node) == "up"));

    // New certificates.
    let read = |grid: &Grid, name: &str| fs::read(grid.path(name)).expect("it is there");
    let (before, key) = (read(&b, "tls/node-2.pem"), read(&b, "tls/node-2.key"));
    let told = a.ok("grid tls rotate");
    assert!(told.contains("next connection"), "{told}");
    assert!(b.fails("grid tls rotate").contains("--token"));
    let file = b.path("token");
    fs::write(&file, a.ok("grid token --for b")).expect("written");
    b.ok(&format!("grid tls rotate --token-file {}", file.display()));
    assert!(read(&b, "tls/node-2.pem") != before && read(&b, "tls/node-2.key") != key);
    for grid in [&a, &b] {
        grid.ok("grid down");
    }
    a.ok("grid up");
    b.ok("grid up");
    until("all use all again", || (1..=4).all(|node| a.node_state(node) == "up" && b.node_state(node) == "up"));
    assert!(a.json("status")["certificate_warnings"].is_null());

    // They are made anew by themselves when most of their time is used up; processes that run take them.
    let grid = id(&a);
    let text = |name: &str| fs::read_to_string(a.path(name)).expect("it is there");
    let kept = Pair { certificate: text("tls/ca.pem"), key: text("tls/ca.key") };
    let authority = Authority::load(grid, &kept).expect("the authority");
    let short = authority.issue_for(&Role::Host("b".to_string()), SHORT).expect("signed");
    b.ok("grid down --host");
    fs::write(b.path("tls/host.pem"), short.certificate).expect("written");
    fs::write(b.path("tls/host.key"), short.key).expect("written");
    let before = read(&b, "tls/node-2.pem");
    let (served, server) =
        (b.path("nbd-tls"), authority.issue_server(&["127.0.0.1".to_string()], SHORT).expect("signed"));
    fs::create_dir(&served).expect("made");
    for (name, pem) in
        [("server-cert.pem", &server.certificate), ("server-key.pem", &server.key), ("ca-cert.pem", &kept.certificate)]
    {
        fs::write(served.join(name), pem).expect("written");
    }
    serve_nbd(&b, &served);
    b.ok("grid up");
    let days = || b.json("grid tls show")["certificates"][1]["days_left"].as_i64().expect("days");
    until("host b has another certificate", || days() > 700);
    until("so has its server of NBD", || read(&b, "nbd-tls/server-cert.pem") != server.certificate.as_bytes());
    until("which uses it", || log(&b, "host.log").contains("there is a new certificate of the NBD server"));
    until("its nodes have others, too", || read(&b, "tls/node-2.pem") != before);
    for name in ["host.log", "node2.log"] {
        until("it is used", || log(&b, name).contains("it counts from the next connection on"));
    }
    a.ok("grid down --host");
    a.ok("grid up");
    until("all use all with them", || (1..=4).all(|node| a.node_state(node) == "up" && b.node_state(node) == "up"));

    // Who was given a token for one thing can't have another, nor in the name of another.
    let refused = c.fails(&join_line(&c, &endpoint, "c", &token(&a, "--for b")));
    assert!(refused.contains("is for machine b, and c has asked"), "{refused}");
    b.ok("grid down --force");
    let refused = c.fails(&join_line(&c, &endpoint, "b", &token(&a, "")));
    assert!(refused.contains("named b already"), "{refused}");
    let late = token(&a, "");
    for entry in fs::read_dir(a.path("tls/tokens")).expect("a directory") {
        let path = entry.expect("an entry").path();
        let mut given: serde_json::Value = serde_json::from_slice(&fs::read(&path).expect("read")).expect("JSON");
        if given["token"] == late {
            given["valid_until"] = (given["valid_until"].as_u64().expect("a time") - 3600).into();
            fs::write(&path, given.to_string()).expect("written");
        }
    }
    let refused = c.fails(&join_line(&c, &endpoint, "c", &late));
    assert!(refused.contains("has expired") && refused.contains("grid token"), "{refused}");
    assert!(!c.path("grid.json").exists() && !c.path("devices/node5-0.img").exists(), "nothing is left of it");
    // A node whose certificate is another's does not start.
    fs::copy(a.path("tls/node-3.pem"), a.path("tls/node-1.pem")).expect("copied");
    a.ok("node kill 1");
    let refused = a.fails("node start 1");
    assert!(refused.contains("node/3") && refused.contains("tls rotate"), "{refused}");
    a.ok("grid tls rotate");
    a.ok("node start 1");
}

/// What `openssl s_client` makes of a port: whether it ended well, and what it said. It goes on until the other side ends the
/// connection.
fn s_client(port: u16, options: &[&str]) -> (bool, String) {
    let output = Command::new("timeout")
        .arg("60")
        .arg(needs("openssl"))
        .args(["s_client", "-ign_eof", "-connect", &format!("127.0.0.1:{port}")])
        .args(options)
        .stdin(Stdio::null())
        .output()
        .expect("it runs");
    assert_ne!(output.status.code(), Some(124), "it was not refused");
    (output.status.success(), text(&output.stdout) + &text(&output.stderr))
}

/// A door to a server of NBD for one client that knows nothing of NBD: it asks for TLS, and from there on passes bytes on.
fn past_starttls(port: u16) -> u16 {
    let door = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let at = door.local_addr().expect("bound").port();
    std::thread::spawn(move || {
        let (mut client, _) = door.accept().expect("a client");
        let mut server = TcpStream::connect(("127.0.0.1", port)).expect("it listens");
        let mut greeting = [0; 18];
        server.read_exact(&mut greeting).expect("a greeting");
        server.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x05\0\0\0\0").expect("sent");
        let mut reply = [0; 20];
        server.read_exact(&mut reply).expect("an answer");
        assert_eq!(&reply[12..], b"\0\0\0\x01\0\0\0\0", "it begins TLS");
        let (mut up, mut down) = (client.try_clone().expect("a copy"), server.try_clone().expect("a copy"));
        let sends = std::thread::spawn(move || std::io::copy(&mut up, &mut server));
        let _ = std::io::copy(&mut down, &mut client);
        let _ = client.shutdown(Shutdown::Both);
        let _ = sends.join();
    });
    at
}

/// Has a grid's host serve NBD at its fourth port, with what is in that directory, from its next start on.
fn serve_nbd(grid: &Grid, dir: &Path) {
    let nbd = grid.port.parse::<u16>().expect("a port") + 3;
    let settings = format!("[nbd]\ntcp = \"127.0.0.1:{nbd}\"\ntls_dir = \"{}\"\n", dir.display());
    fs::write(grid.path("holdfast.toml"), settings).expect("written");
}

/// The server of NBD shows what is put into its directory, whoever has signed it, and asks clients for certificates
/// still when somebody deletes what says so.
fn files_that_are_replaced_count(grid: &Grid, nbd: u16) {
    let (other, _) = Authority::make(id(grid)).expect("made");
    let names = ["127.0.0.1".to_string()];
    let file = |name: &str| grid.path("nbd-tls").join(name);
    let warnings = || grid.json("status")["certificate_warnings"].to_string();
    assert_eq!(warnings(), "null");
    let own = other.issue_server(&names, SHORT).expect("signed");
    fs::write(file("server-key.pem"), &own.key).expect("written");
    fs::write(file("server-cert.pem"), &own.certificate).expect("written");
    let uses = |times: usize| {
        until("it is used", || log(grid, "host.log").matches("/nbd-tls: it counts from the next").count() >= times);
    };
    uses(1);
    let warned = warnings();
    assert!(warned.contains("server-cert.pem, ends in 0 days") && warned.contains("whoever has signed it"), "{warned}");
    let (_, said) = s_client(past_starttls(nbd), &[]);
    let line = own.certificate.lines().nth(3).expect("a line of it");
    assert!(said.contains(line) && said.contains("alert certificate required"), "{said}");
    fs::remove_file(file("ca-cert.pem")).expect("removed");
    until("it is told of", || log(grid, "host.log").contains("that can't be used, and the old one is used on"));
    let (is_ok, said) = s_client(past_starttls(nbd), &[]);
    assert!(!is_ok && said.contains("alert certificate required"), "{said}");
    // What the grid's authority has signed and is used up the host makes anew, for the same names.
    let read = |name: &str| fs::read_to_string(grid.path(name)).expect("it is there");
    let kept = Pair { certificate: read("tls/ca.pem"), key: read("tls/ca.key") };
    let short = Authority::load(id(grid), &kept).expect("sound").issue_server(&names, SHORT).expect("signed");
    for (name, pem) in
        [("ca-cert.pem", &kept.certificate), ("server-key.pem", &short.key), ("server-cert.pem", &short.certificate)]
    {
        fs::write(file(name), pem).expect("written");
    }
    until("it is renewed", || {
        let now = read("nbd-tls/server-cert.pem");
        now != short.certificate && warnings() == "null"
    });
    uses(2);
}

#[test]
fn openssl_and_who_speaks_no_tls_are_turned_away_at_nodes_and_at_nbd() {
    let grid = Grid::new(44);
    let port: u16 = grid.port.parse().expect("a port");
    let nbd = port + 3;
    grid.up(&format!("--nodes 2 --devices 2 --tls on --nbd-tcp 127.0.0.1:{nbd}"));
    grid.ok("volume create v1 --size 16MiB --layout mirror:2");
    grid.ok("grid tls server 127.0.0.1");
    serve_nbd(&grid, &grid.path("nbd-tls"));
    grid.ok("grid down");
    grid.ok("grid up");
    let (other, _) = Authority::make(id(&grid)).expect("made");
    let foreign = |name: &str, role: &Role| -> [String; 2] {
        let pair = other.issue(role).expect("signed");
        let path = |extension: &str| grid.path(&format!("{name}.{extension}"));
        fs::write(path("pem"), pair.certificate).expect("written");
        fs::write(path("key"), pair.key).expect("written");
        ["pem", "key"].map(|extension| path(extension).display().to_string())
    };
    let (host, client) = (foreign("x", &Role::Host("x".into())), foreign("y", &Role::Client("y".into())));
    let shows = |[certificate, key]: &[String; 2]| ["-cert", certificate, "-key", key].map(str::to_string);
    let refused_by_node = |options: &[String]| {
        let options: Vec<&str> = options.iter().map(String::as_str).collect();
        s_client(port, &options)
    };
    let (is_ok, said) = refused_by_node(&[]);
    assert!(!is_ok && said.contains("alert certificate required"), "without a certificate: {said}");
    let (is_ok, said) = refused_by_node(&shows(&host));
    assert!(!is_ok && said.contains("alert"), "of another authority: {said}");
    let (is_ok, said) = s_client(port, &["-tls1_2"]);
    assert!(!is_ok && said.contains("alert"), "an older TLS: {said}");
    let (is_ok, said) = s_client(past_starttls(nbd), &[]);
    assert!(!is_ok && said.contains("alert certificate required"), "NBD without a certificate: {said}");
    let options = shows(&client);
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let (is_ok, said) = s_client(past_starttls(nbd), &options);
    assert!(!is_ok && said.contains("alert"), "NBD, of another authority: {said}");
    until("the logs have the reasons", || {
        let (node, host) = (log(&grid, "node1.log"), log(&grid, "host.log"));
        ["shows no certificate", "not of this grid's authority", "does not speak TLS 1.3"]
            .iter()
            .all(|w| node.contains(w))
            && host.contains("sent no certificates")
            && host.contains("BadSignature")
    });
    // Bytes that are no TLS, at both; an NBD client that does not ask for it.
    for at in [port, nbd] {
        let mut plain = TcpStream::connect(("127.0.0.1", at)).expect("it listens");
        plain.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        plain.write_all(b"GET / HTTP/1.1\r\nHost: grid\r\n\r\n").expect("sent");
        let came = until_closed(plain);
        assert!(!came.starts_with(b"HFW1") && came.len() < 100, "{at}: {} bytes came", came.len());
    }
    files_that_are_replaced_count(&grid, nbd);
    let asked = Command::new(needs("nbdinfo")).arg(format!("nbd://127.0.0.1:{nbd}/v1")).output().expect("it runs");
    assert!(!asked.status.success(), "{}", text(&asked.stdout));
    let shown = grid.json("grid tls client c");
    let uri = format!("nbds://127.0.0.1:{nbd}/v1?tls-certificates={}", shown["dir"].as_str().expect("a directory"));
    let asked = Command::new(needs("nbdinfo")).args(["--size", &uri]).output().expect("it runs");
    assert_eq!(text(&asked.stdout).trim(), "16777216", "{}", text(&asked.stderr));
    until("the host's log has the reason", || log(&grid, "host.log").contains("does not secure its connection"));
    grid.wait_for_node(1, "up");
    write_and_read(&grid, "v1");
}

#[test]
fn a_host_whose_certificate_is_revoked_is_shut_out_by_nodes_until_it_has_another() {
    let store = tempfile::tempdir().expect("a directory");
    let member = etcd(store.path(), 23);
    let endpoint = member.config().endpoint();
    let a = first(45, &endpoint, 1);
    let b = Grid::new(46);
    b.ok(&join_line(&b, &endpoint, "b", &token(&a, "")));
    let states = |grid: &Grid| [grid.node_state(1), grid.node_state(2)];
    until("both use both", || states(&a) == ["up", "up"] && states(&b) == ["up", "up"]);
    assert!(b.fails("grid tls revoke host/a").contains("no key of the grid's authority"));
    // A host of an older release could not read that an operator is revoked, and would go by no list at all.
    let (records, record) = (records(&endpoint, &a), br#"{"home":"z","reads_root":5,"knows_trash":true}"#);
    let Ok(Swap::Done(version)) = records.swap("host/old", MetaVersion::ABSENT, Some(record), None) else {
        panic!("nothing else is there");
    };
    let why = a.fails("grid tls revoke operator/ann");
    assert!(why.contains("host old, of an older release") && why.contains("then revoke again"), "{why}");
    assert!(!a.path("tls/revoked").exists());
    records.swap("host/old", version, None, None).expect("etcd answers");
    a.ok("grid tls revoke host/b");
    // Whoever carries the list is not trusted: one that the authority has not signed counts for nothing.
    until("a's node shuts b out", || b.node_state(1) != "up");
    until("the others go on", || states(&a) == ["up", "up"]);
    until("the log of the node tells", || log(&a, "node1.log").contains("was revoked"));
    let (other, _) = Authority::make(id(&a)).expect("made");
    let mut forged = Revoked::none(id(&a));
    (0..9).for_each(|at| forged.add(Role::Host("x".to_string()), at));
    fs::write(a.path("tls/revoked"), forged.sign(&other).expect("signed")).expect("written");
    until("it is told of", || log(&a, "node1.log").contains("authority has not signed it"));
    assert_ne!(b.node_state(1), "up", "what was revoked before counts still");
    // b's own node has heard of it by b's host, from the metadata store.
    until("b has the list", || b.path("tls/revoked").exists());
    until("so does its node", || log(&b, "node2.log").contains("version 1 of the list counts"));
    // With certificates that were issued later it is let in again.
    b.ok(&format!("grid tls rotate --token {}", token(&a, "--for b")));
    b.ok("grid down --force");
    b.ok("grid up");
    until("it is let in again", || states(&b) == ["up", "up"]);
    // The forged list is still there, and nothing is added to it before the right one is.
    let why = a.fails("grid tls revoke operator/ann");
    assert!(why.contains("remove it and start this machine's host"), "{why}");
    std::fs::remove_file(a.path("tls/revoked")).expect("it is there");
    a.ok("grid down --host");
    a.ok("grid up");
    until("the host writes it anew", || a.path("tls/revoked").exists());
    a.ok("grid tls revoke operator/ann");
    until("b's node has heard of it", || log(&b, "node2.log").contains("version 2 of the list counts"));
}

#[test]
fn a_local_grid_has_tls_when_asked() {
    let grid = Grid::new(39);
    grid.up("--nodes 3 --devices 1 --tls on");
    assert!(grid.ok("status").contains("have TLS"));
    grid.ok("volume create v1 --size 64MiB");
    write_and_read(&grid, "v1");
    grid.ok("node kill 2");
    write_and_read(&grid, "v1");
    grid.ok("node start 2");
    grid.wait_for_node(2, "up");
    assert!(log(&grid, "node2.log").contains("with TLS"));
    assert!(grid.fails("grid token").contains("etcd"));
    let shown = |grid: &Grid| grid.json("grid tls show")["authority_sha256"].to_string();
    let before = shown(&grid);
    // A certificate that was made in the same second is as good, and stays.
    until("the authority has another certificate", || {
        grid.ok("grid tls authority renew");
        shown(&grid) != before
    });
    grid.ok("grid tls rotate");
    grid.ok("node restart 2");
    grid.wait_for_node(2, "up");
    assert!(grid.fails("grid up --tls off").contains("--tls differs"));
}
