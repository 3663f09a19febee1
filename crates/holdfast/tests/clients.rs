//! Who may do what: clients of volumes, by their certificates, and users of the machine, by their groups.

mod support;

use holdfast_base::GridId;
use holdfast_lab::process::{Signal, signal};
use holdfast_runtime::pki::{Authority, Role};
use rustls::crypto::ring;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use serde_json::json;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;
use support::{Grid, etcd, holdfast, needs, skip, text, until};

/// How long a server that does not answer may keep a test waiting.
const PATIENCE: Duration = Duration::from_secs(60);

const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const LIST: u32 = 3;
const STARTTLS: u32 = 5;
const GO: u32 = 7;
const ACK: u32 = 1;
const SERVER: u32 = 2;
const ERR_POLICY: u32 = (1 << 31) + 2;
const ERR_TLS_REQUIRED: u32 = (1 << 31) + 5;

trait Stream: Read + Write {}
impl<T: Read + Write> Stream for T {}

/// An NBD client that shows all that it is told.
struct Nbd {
    stream: Box<dyn Stream>,
}

impl Nbd {
    fn greeted(mut stream: impl Stream + 'static) -> Nbd {
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).expect("a greeting");
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        stream.write_all(&3u32.to_be_bytes()).expect("sent");
        Nbd { stream: Box::new(stream) }
    }

    fn tcp(port: u16) -> TcpStream {
        let stream = TcpStream::connect(("127.0.0.1", port)).expect("the host listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        stream
    }

    fn plain(port: u16) -> Nbd {
        Nbd::greeted(Nbd::tcp(port))
    }

    /// Secures the connection, judging the host by the authority of `dir`, and showing its certificate if it has one; fails
    /// where the host does not let it in.
    fn secure(port: u16, dir: &Path) -> Result<Nbd, String> {
        let stream = Nbd::tcp(port);
        let mut plain = Nbd::greeted(stream.try_clone().expect("a copy"));
        assert_eq!(plain.option(STARTTLS, b""), [(ACK, Vec::new())]);
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(dir.join("ca-cert.pem")).expect("an authority")).expect("sound");
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .expect("TLS")
            .with_root_certificates(roots);
        let config = match dir.join("client-cert.pem").exists() {
            false => builder.with_no_client_auth(),
            true => {
                let certificate = CertificateDer::from_pem_file(dir.join("client-cert.pem")).expect("a certificate");
                let key = PrivateKeyDer::from_pem_file(dir.join("client-key.pem")).expect("a key");
                builder.with_client_auth_cert(vec![certificate], key).expect("a pair")
            }
        };
        let name = ServerName::try_from("127.0.0.1").expect("a name");
        let session = ClientConnection::new(Arc::new(config), name).expect("a session");
        let mut secured = Nbd { stream: Box::new(StreamOwned::new(session, stream)) };
        // In TLS 1.3 a client hears of its refusal when it reads.
        secured.try_option(LIST, b"").map(|_| secured).map_err(|e| e.to_string())
    }

    fn option(&mut self, option: u32, data: &[u8]) -> Vec<(u32, Vec<u8>)> {
        self.try_option(option, data).expect("the host answers")
    }

    /// What is answered to an option, up to its end.
    fn try_option(&mut self, option: u32, data: &[u8]) -> std::io::Result<Vec<(u32, Vec<u8>)>> {
        let head = [&OPTION_MAGIC.to_be_bytes()[..], &option.to_be_bytes(), &(data.len() as u32).to_be_bytes()];
        self.stream.write_all(&[&head.concat()[..], data].concat())?;
        let mut replies = Vec::new();
        loop {
            let mut head = [0; 20];
            self.stream.read_exact(&mut head)?;
            let number = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().expect("four bytes"));
            let mut data = vec![0; number(16) as usize];
            self.stream.read_exact(&mut data)?;
            let kind = number(12);
            replies.push((kind, data));
            if kind == ACK || kind >> 31 == 1 {
                return Ok(replies);
            }
        }
    }

    fn list(&mut self) -> Vec<String> {
        let servers = self.option(LIST, b"").into_iter().filter(|(kind, _)| *kind == SERVER);
        let name = |data: Vec<u8>| text(&data[4..4 + u32::from_be_bytes(data[..4].try_into().unwrap()) as usize]);
        servers.map(|(_, data)| name(data)).collect()
    }

    /// Opens an export, or says why not.
    fn go(&mut self, export: &str) -> Result<(), String> {
        let data = [&(export.len() as u32).to_be_bytes()[..], export.as_bytes(), &[0, 0]].concat();
        match self.option(GO, &data).pop().expect("an answer") {
            (ACK, _) => Ok(()),
            (kind, why) => {
                assert_eq!(kind, ERR_POLICY, "{}", text(&why));
                Err(text(&why))
            }
        }
    }

    /// Reads the beginning of an open export.
    fn read(&mut self) -> std::io::Result<()> {
        let request = [&0x2560_9513_u32.to_be_bytes()[..], &[0; 4], &[7; 8], &[0; 8], &4096u32.to_be_bytes()].concat();
        self.stream.write_all(&request)?;
        let mut reply = [0; 16 + 4096];
        self.stream.read_exact(&mut reply)?;
        assert_eq!(&reply[..8], [&0x6744_6698_u32.to_be_bytes()[..], &[0; 4]].concat(), "no error");
        Ok(())
    }
}

/// A grid with TLS on its links and NBD over TCP, with two volumes.
fn grid_with_nbd(index: u16) -> (Grid, u16) {
    let grid = Grid::new(index);
    let port: u16 = grid.port.parse::<u16>().expect("a port") + 3;
    grid.up(&format!("--nodes 3 --devices 1 --tls on --nbd-tcp 127.0.0.1:{port}"));
    for volume in ["v1", "v2"] {
        grid.ok(&format!("volume create {volume} --size 16MiB --layout mirror:2"));
    }
    (grid, port)
}

/// Has the host's NBD server ask for certificates of the grid's authority.
fn secure_nbd(grid: &Grid, port: u16) {
    let tls = grid.path("nbd-tls");
    grid.ok(&format!("grid tls server 127.0.0.1 localhost --out {}", tls.display()));
    let settings = format!("[nbd]\ntcp = \"127.0.0.1:{port}\"\ntls_dir = \"{}\"\n", tls.display());
    fs::write(grid.path("holdfast.toml"), settings).expect("written");
    grid.ok("grid down");
    grid.ok("grid up");
    until("the volumes are open", || {
        ["v1", "v2"].iter().all(|volume| grid.json(&format!("volume show {volume}"))["state"] == "open")
    });
}

fn client(grid: &Grid, name: &str) -> PathBuf {
    let shown = grid.json(&format!("grid tls client {name}"));
    PathBuf::from(shown["dir"].as_str().expect("a directory"))
}

fn host_log(grid: &Grid) -> String {
    fs::read_to_string(grid.path("logs/host.log")).expect("a log")
}

#[test]
fn over_tcp_without_tls_a_restricted_volume_is_nobodys() {
    let (grid, port) = grid_with_nbd(0);
    assert!(grid.json("volume show v1")["only_for"].is_null());
    let mut before = Nbd::plain(port);
    before.go("v1").expect("it is everybody's");
    before.read().expect("read");
    let told = grid.ok("volume allow v1 a");
    assert!(told.contains("for clients a alone"), "{told}");
    assert!(before.read().is_err(), "who was connected is cut off");
    let mut client = Nbd::plain(port);
    assert_eq!(client.list(), ["v2"]);
    let why = client.go("v1").expect_err("it is restricted");
    assert!(why.contains("has no TLS") && why.contains("nbd.tls_dir") && why.contains("grid tls client"), "{why}");
    client.go("v2").expect("it is everybody's");
    until("the log tells", || host_log(&grid).contains("is refused: export v1 is for certain clients"));
    // The unix socket is the administrator's.
    let mode = fs::metadata(grid.path("nbd.sock")).expect("it is there").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let mut local = Nbd::greeted(UnixStream::connect(grid.path("nbd.sock")).expect("it listens"));
    assert_eq!(local.list(), ["v1", "v2"]);
    local.go("v1").expect("root has it");
    local.read().expect("read");
    // Mistakes are told of.
    assert!(grid.fails("volume deny v2 a").contains("is for every client"));
    assert!(grid.fails("volume deny v1 x").contains("client x is not one of those"));
    assert!(grid.fails("volume allow v1 a/b").contains("can't be a name"));
    assert!(grid.fails("volume allow v9 a").contains("no volume v9"));
    assert!(grid.fails("volume allow v1").contains("CLIENT"));
}

#[test]
fn volumes_are_for_the_clients_that_are_named_and_show_their_certificates() {
    let (grid, port) = grid_with_nbd(1);
    secure_nbd(&grid, port);
    let (a, b) = (client(&grid, "a"), client(&grid, "b"));
    for secret in [a.join("client-key.pem"), grid.path("nbd-tls/server-key.pem"), grid.path("tls/ca.key")] {
        let mode = fs::metadata(&secret).expect("it is there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{}", secret.display());
    }
    assert!(grid.fails("grid tls client a/b").contains("can't be a name"));
    assert!(grid.fails("grid tls server a_b:7").contains("no address"));
    let secure = |dir: &Path| Nbd::secure(port, dir).expect("it is let in");
    grid.ok("volume allow v1 a");
    grid.ok("snapshot create v1 s1");
    grid.ok("volume clone v1@s1 c1");
    assert_eq!(grid.json("volume show c1")["only_for"], json!(["a"]), "a clone is for whom its volume is for");
    assert_eq!(secure(&a).list(), ["c1", "v1", "v1@s1", "v2"]);
    assert_eq!(secure(&b).list(), ["v2"]);
    for export in ["v1", "v1@s1", "c1"] {
        let why = secure(&b).go(export).expect_err("it is not b's");
        assert!(why.contains("client b is not one of them") && why.contains("holdfast volume allow"), "{why}");
        secure(&a).go(export).expect("it is a's");
    }
    secure(&b).go("v2").expect("it is everybody's");
    // Changes count at once, and for who is connected.
    let (mut at_v1, mut at_v2) = (secure(&a), secure(&a));
    at_v1.go("v1").expect("it is a's");
    at_v2.go("v2").expect("it is everybody's");
    let shown = grid.json("volume deny v1 a");
    assert_eq!(shown["only_for"], json!([]));
    assert!(at_v1.read().is_err(), "it is cut off");
    at_v2.read().expect("other volumes stay");
    assert!(secure(&a).go("v1").is_err());
    grid.ok("volume allow v1 b a");
    assert!(grid.ok("volume list").contains("volume v1 is for clients a, b alone"));
    assert!(grid.ok("volume explain v1").contains("for clients a, b alone"));
    secure(&b).go("v1").expect("it is b's, too");
    grid.ok("volume deny v1 --all");
    assert!(secure(&b).go("v1").is_err());
    let refused = grid.fails("grid down --host");
    assert!(refused.contains("`holdfast grid down --host --force`"), "nodes go on: {refused}");
    // It stands in the metadata, for the next start and for other hosts.
    grid.ok("grid down --force");
    grid.ok("grid up");
    assert!(secure(&b).go("v1").is_err());
    grid.ok("volume allow v1 --all");
    secure(&b).go("v1").expect("it is everybody's");
}

#[test]
fn a_forwarding_host_goes_by_the_list_of_a_volume_that_another_host_owns() {
    let store = tempfile::tempdir().expect("a directory");
    let member = etcd(store.path(), 24);
    let endpoint = member.config().endpoint();
    let (a, b) = (Grid::new(6), Grid::new(7));
    a.up(&format!("--nodes 1 --devices 2 --etcd {endpoint} --tls off --name a --address 127.0.0.1"));
    let id = a.json("status")["grid"].as_str().expect("an id").to_string();
    let port: u16 = b.port.parse::<u16>().expect("a port") + 3;
    let join = format!("--etcd {endpoint} --join {id} --name b --address 127.0.0.1 --nbd-tcp 127.0.0.1:{port}");
    b.up(&format!("--nodes 1 --devices 2 {join}"));
    a.ok("volume create v1 --size 16MiB --layout mirror:2@device");
    b.ok("volume export v1 --multipath");
    let mut through = Nbd::plain(port);
    through.go("v1").expect("it is everybody's");
    through.read().expect("read");
    a.ok("volume allow v1 x");
    until("b knows", || b.json("volume show v1")["only_for"] == json!(["x"]));
    until("it is cut off at the forwarding host", || through.read().is_err());
    let mut again = Nbd::plain(port);
    assert!(again.list().is_empty());
    assert!(again.go("v1").expect_err("it is x's").contains("has no TLS"));
    // The forwarding host's own way to the owner is a host's, and the unix socket the administrator's.
    let mut local = Nbd::greeted(UnixStream::connect(b.path("nbd.sock")).expect("it listens"));
    local.go("v1").expect("root has it");
    local.read().expect("through the forwarding host");
    a.ok("volume allow v1 --all");
    until("b lets clients in again", || Nbd::plain(port).go("v1").is_ok());
}

#[test]
fn who_shows_no_certificate_or_anothers_gets_no_volume() {
    let (grid, port) = grid_with_nbd(2);
    secure_nbd(&grid, port);
    let a = client(&grid, "a");
    grid.ok("volume allow v1 a");
    let mut plain = Nbd::plain(port);
    let refused = plain.option(LIST, b"");
    assert_eq!(refused[0].0, ERR_TLS_REQUIRED, "{}", text(&refused[0].1));
    drop(plain);
    let with = |name: &str, certificate: &str, key: &str| {
        let dir = grid.path(name);
        fs::create_dir(&dir).expect("made");
        fs::copy(a.join("ca-cert.pem"), dir.join("ca-cert.pem")).expect("copied");
        if !certificate.is_empty() {
            fs::write(dir.join("client-cert.pem"), certificate).expect("written");
            fs::write(dir.join("client-key.pem"), key).expect("written");
        }
        dir
    };
    assert!(Nbd::secure(port, &with("none", "", "")).is_err(), "without a certificate");
    let grid_id: GridId = grid.json("status")["grid"].as_str().expect("an id").parse().expect("an id");
    let (other, _) = Authority::make(grid_id).expect("made");
    let forged = other.issue(&Role::Client("a".to_string())).expect("signed");
    assert!(Nbd::secure(port, &with("forged", &forged.certificate, &forged.key)).is_err(), "of another authority");
    let read = |name: &str| fs::read_to_string(grid.path(name)).expect("it is there");
    // Hosts and nodes of the grid are let in, as anybody whose certificate is sound; they are no clients, of no volume.
    grid.ok("volume create open --size 64MiB --layout mirror:2");
    for (of, name) in [("host", "host/local"), ("node-1", "node/1")] {
        let files = with(of, &read(&format!("tls/{of}.pem")), &read(&format!("tls/{of}.key")));
        for volume in ["v1", "open"] {
            let why = Nbd::secure(port, &files).expect("it is let in").go(volume).expect_err("it is no client");
            assert!(why.contains(name), "{why}");
        }
    }
    until("the log has all reasons", || {
        let said = host_log(&grid);
        let reasons = ["does not secure its connection", "sent no certificates", "BadSignature", "host/local"];
        reasons.into_iter().all(|reason| said.contains(reason))
    });
    Nbd::secure(port, &a).expect("it is let in").go("v1").expect("it is a's");
}

#[test]
fn a_client_whose_certificate_is_revoked_is_cut_off_and_comes_back_with_another() {
    let (grid, port) = grid_with_nbd(4);
    secure_nbd(&grid, port);
    let (a, b) = (client(&grid, "a"), client(&grid, "b"));
    let stolen = grid.path("stolen");
    fs::create_dir(&stolen).expect("made");
    for name in ["ca-cert.pem", "client-cert.pem", "client-key.pem"] {
        fs::copy(a.join(name), stolen.join(name)).expect("copied");
    }
    let (mut at_v1, mut others) = (Nbd::secure(port, &a).expect("in"), Nbd::secure(port, &b).expect("in"));
    at_v1.go("v1").expect("it is everybody's");
    others.go("v1").expect("it is everybody's");
    let told = grid.ok("grid tls revoke client/a");
    assert!(told.contains("client/a"), "{told}");
    assert!(at_v1.read().is_err(), "it is cut off");
    others.read().expect("others stay");
    assert!(Nbd::secure(port, &stolen).is_err());
    until("the log tells", || host_log(&grid).contains("its certificate was revoked"));
    // Issued in a later second, another certificate of the same name is good.
    until("it is let in again", || Nbd::secure(port, &client(&grid, "a")).is_ok());
    // It outlives the host, and the list goes to nobody who is not to have it.
    grid.ok("grid down --force");
    grid.ok("grid up");
    assert!(Nbd::secure(port, &stolen).is_err());
    assert_eq!(grid.json("grid tls show")["revoked"][0]["role"], "client a");
    assert!(grid.fails("grid tls revoke host/local").contains("this machine's own host"));
    assert!(grid.fails("grid tls revoke a").contains("host/NAME"));
}

#[test]
fn what_is_no_request_is_told_so_and_the_host_serves_on() {
    let grid = Grid::new(5);
    grid.up("--nodes 1 --devices 2");
    grid.ok("volume create v1 --size 16MiB --layout mirror:2@device");
    let say = |bytes: &[u8]| -> String {
        let mut stream = UnixStream::connect(grid.path("control.sock")).expect("it listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        // It may have heard enough before all is said.
        let _ = stream.write_all(bytes);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut heard = Vec::new();
        let _ = stream.read_to_end(&mut heard);
        text(&heard)
    };
    let delete = br#"{"op":"volume-delete","name":"v1","force":true}"#;
    let shown = say(b"{\"op\":\"volume-show\",\"name\":\"v1\"}\n");
    assert!(shown.contains("\"size_bytes\":16777216"), "{shown}");
    // Whole but for its end, it may be the beginning of something else.
    assert!(say(delete).contains("has no end"));
    let forged = br#"{"op":"volume-delete","name":"v1","force":true,"as":"admin"}"#;
    for (what, bytes) in [
        ("unknown", &b"{\"op\":\"format-all\"}\n"[..]),
        ("no JSON", &b"GET / HTTP/1.1\n"[..]),
        ("a field too many", &[&forged[..], b"\n"].concat()[..]),
        ("a field too few", &b"{\"op\":\"volume-delete\",\"name\":\"v1\"}\n"[..]),
    ] {
        let said = say(bytes);
        assert!(said.contains("does not understand the request"), "{what}: {said}");
    }
    let mut endless = b"{\"op\":\"".to_vec();
    endless.resize(17 << 20, b'x');
    assert!(say(&endless).contains("at most 16777216 bytes"));
    // One bit of a request flipped: another request, or none; never a crash.
    let show = b"{\"op\":\"volume-show\",\"name\":\"v1\"}\n";
    for bit in 0..show.len() * 8 {
        let mut bytes = show.to_vec();
        bytes[bit / 8] ^= 1 << (bit % 8);
        say(&bytes);
    }
    assert_eq!(grid.json("volume show v1")["state"], "open");
}

#[test]
fn readers_look_and_change_nothing() {
    let grid = Grid::new(3);
    grid.up("--nodes 3 --devices 1");
    grid.ok("volume create v1 --size 16MiB --layout mirror:2");
    let mode = |name: &str| fs::metadata(grid.path(name)).expect("it is there").permissions().mode() & 0o777;
    for (name, due) in [("control.sock", 0o600), ("nbd.sock", 0o600), ("meta.redb", 0o600), ("devices", 0o700)] {
        assert_eq!(mode(name), due, "{name}");
    }
    assert!(!grid.path("reader.sock").exists());
    let settings = |group: &str| {
        fs::write(grid.path("holdfast.toml"), format!("[control]\nreaders = \"{group}\"\n")).expect("written");
        grid.ok("grid down");
    };
    settings("no-such-group");
    let refused = grid.fails("grid up");
    assert!(refused.contains("groupadd no-such-group"), "{refused}");
    if !rustix::process::geteuid().is_root() {
        skip("to become another user one has to be root");
        return;
    }
    // Group `daemon` has the number 1 everywhere.
    settings("daemon");
    grid.ok("grid up");
    assert_eq!(mode("reader.sock"), 0o660);
    fs::set_permissions(grid.dir.path(), fs::Permissions::from_mode(0o755)).expect("set");
    let program = grid.path("holdfast");
    // By another process: what this one has open for writing may be inherited by what another test is just starting,
    // and can't be run meanwhile.
    let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_holdfast")).arg(&program).status().expect("it runs");
    assert!(copied.success());
    let run_as = |group: &str, line: &str| {
        let mut command = Command::new(needs("setpriv"));
        command.args(["--reuid", "65534", "--regid", group, "--clear-groups"]).arg(&program);
        let output = command.args(line.split_whitespace()).arg("--dir").arg(grid.dir.path()).output().expect("it runs");
        (output.status.success(), text(&output.stdout) + &text(&output.stderr))
    };
    for line in ["status", "volume list", "volume show v1", "volume explain v1", "device list", "snapshot list v1"] {
        let (is_ok, said) = run_as("1", line);
        assert!(is_ok, "{line}: {said}");
        assert!(!said.contains("cannot"), "{line}: {said}");
    }
    for line in [
        "volume create v2 --size 16MiB",
        "volume delete v1",
        "volume allow v1 a",
        "volume resize v1 --size 32MiB",
        "snapshot create v1 s1",
        "node cut 1",
    ] {
        let (is_ok, said) = run_as("1", line);
        assert!(!is_ok && said.contains("you may look at this grid and change nothing"), "{line}: {said}");
    }
    assert_eq!(grid.json("volume list").as_array().expect("a list").len(), 1);
    let (is_ok, said) = run_as("65534", "volume list");
    assert!(!is_ok && said.contains("control.readers"), "{said}");
    // By HTTP it is the same.
    let by_http = |method: &str| {
        let mut command = Command::new(needs("setpriv"));
        command.args(["--reuid", "65534", "--regid", "1", "--clear-groups"]).arg(needs("curl"));
        command.args(["-sS", "-X", method, "-o", "/dev/null", "-w", "%{http_code}", "--unix-socket"]);
        let output = command.arg(grid.path("api.sock")).arg("http://host/v1/volumes/v1").output().expect("it runs");
        text(&output.stdout)
    };
    assert_eq!(mode("api.sock"), 0o660);
    assert_eq!(["GET", "DELETE"].map(by_http), ["200", "403"]);
    // Nor do readers get at data.
    let touched = Command::new(needs("setpriv"))
        .args(["--reuid", "65534", "--regid", "1", "--clear-groups", "ls"])
        .arg(grid.path("devices"))
        .output()
        .expect("it runs");
    assert!(!touched.status.success(), "{}", text(&touched.stdout));
}

/// As curl has it: the status, and the body.
fn by_https(port: u16, dir: &Path, method: &str, target: &str, more: &[&str]) -> (String, String) {
    let mut command = Command::new(needs("curl"));
    command.args(["-sS", "--max-time", "60", "-X", method, "-w", "\n%{http_code}", "--cacert"]);
    command.arg(dir.join("ca-cert.pem")).args(more).arg(format!("https://127.0.0.1:{port}{target}"));
    let output = command.output().expect("it runs");
    let said = text(&output.stdout);
    let (body, status) = said.rsplit_once('\n').unwrap_or(("", &said));
    (status.to_string(), body.to_string() + &text(&output.stderr))
}

/// At a machine that is not the grid's; `reader` is a token.
fn by_the_command_line(grid: &Grid, port: u16, reader: &str) {
    let token = grid.ok("grid tls operator eve --token");
    for (name, token) in [("eve", token.trim()), ("reader", reader)] {
        fs::write(grid.path(name), token).expect("written");
    }
    let at = |who: &str, words: &str| {
        let mut command = holdfast();
        command.args(["--at", &format!("https://127.0.0.1:{port}"), "--ca-file"]).arg(grid.path("tls/ca.pem"));
        command.arg("--token-file").arg(grid.path(who)).args(words.split(' ')).env("HOME", "/nonexistent");
        let output = command.output().expect("it runs");
        (output.status.success(), format!("{}{}", text(&output.stdout), text(&output.stderr)))
    };
    for (words, said) in [
        ("status", "host up"),
        ("volume create v2 --size 64MiB --layout mirror:2", "is made"),
        ("snapshot create v2 s", "is taken"),
        ("space why", "data of volume v2"),
        ("device drain 1/0 --cancel", "takes data again"),
        ("machine list", "local"),
        ("volume delete v2 --now", "is deleted"),
    ] {
        let (is_done, told) = at("eve", words);
        assert!(is_done && told.contains(said), "{words}: {told}");
    }
    let command = "volume create v2 --size 64MiB --layout mirror:2 --encrypt --key-command id";
    for (who, words, why) in [
        ("reader", "volume create v2 --size 64MiB --layout mirror:2", "you may look"),
        ("eve", command, "given at a machine of the grid"),
        ("eve", "device add 1", "give the command at a machine of the grid"),
        ("eve", "node kill 1", "given at a machine of the grid"),
        ("eve", "grid up", "given at a machine of the grid"),
        ("nobody", "status", "cannot read"),
    ] {
        let (is_done, told) = at(who, words);
        assert!(!is_done && told.contains(why), "{who}: {words}: {told}");
    }
    assert!(at("reader", "volume list").1.contains("VOLUME"));
}

#[test]
fn over_the_network_operators_and_readers_are_known_by_certificates_and_tokens() {
    let grid = Grid::new(8);
    grid.up("--nodes 2 --devices 1 --tls on");
    let port: u16 = grid.port.parse::<u16>().expect("a port") + 3;
    let tls = grid.path("api-tls");
    let file = format!("[api]\ntcp = \"127.0.0.1:{port}\"\n");
    fs::write(grid.path("holdfast.toml"), &file).expect("written");
    let refused = grid.fails("config check");
    assert!(refused.contains("api.tls_dir is not") && refused.contains("grid tls server"), "{refused}");
    grid.ok(&format!("grid tls server 127.0.0.1 --out {}", tls.display()));
    fs::write(grid.path("holdfast.toml"), format!("{file}tls_dir = \"{}\"\n", tls.display())).expect("written");
    grid.ok("config check");
    grid.ok("grid down --host");
    grid.ok("grid up");
    grid.ok("grid tls operator ann");
    let ann = grid.path("tls/operators/ann");
    let [certificate, key] = ["client-cert.pem", "client-key.pem"].map(|name| ann.join(name).display().to_string());
    let as_ann = ["--cert", certificate.as_str(), "--key", key.as_str()];
    let ask = |method: &str, target: &str, more: &[&str]| by_https(port, &ann, method, target, more);
    until("the port is served", || ask("GET", "/v1/health", &as_ann).0 == "200");
    let (_, health) = ask("GET", "/v1/health", &as_ann);
    let health: serde_json::Value = serde_json::from_str(&health).expect("JSON");
    assert_eq!((health["findings"].clone(), health["host"]["state"].clone()), (json!([]), json!("up")));
    // Nobody is answered who shows nothing, or something of somebody else's.
    let (status, why) = ask("GET", "/v1/volumes", &[]);
    assert!(status == "401" && why.contains("grid tls operator"), "{status}: {why}");
    grid.ok("grid tls client vm7");
    let vm7 = grid.path("tls/clients/vm7");
    let [vm7_certificate, vm7_key] = ["client-cert.pem", "client-key.pem"].map(|n| vm7.join(n).display().to_string());
    let (status, why) = ask("GET", "/v1/volumes", &["--cert", &vm7_certificate, "--key", &vm7_key]);
    assert!(status == "401" && why.contains("client vm7 has no access here"), "{status}: {why}");
    for token in ["x", "holdfast-token.a.b"] {
        let (status, why) = ask("GET", "/v1/volumes", &["-H", &format!("Authorization: Bearer {token}")]);
        assert!(status == "401" && why.contains("the token is not taken"), "{status}: {why}");
    }
    // Readers look.
    let token = grid.ok("grid tls operator prometheus --reader --token --valid 1h");
    let bearer = format!("Authorization: Bearer {}", token.trim());
    let as_reader = ["-H", bearer.as_str()];
    let make =
        ["-H", "Content-Type: application/json", "-d", r#"{"name":"v1","size_bytes":16777216,"layout":"mirror:2"}"#];
    assert_eq!(ask("GET", "/v1/volumes", &as_reader).0, "200");
    assert_eq!(ask("POST", "/v1/volumes", &[&as_reader[..], &make[..]].concat()).0, "403");
    let (status, why) = ask("POST", "/v1/volumes", &[&as_ann[..], &make[..]].concat());
    assert_eq!(status, "201", "{why}");
    by_the_command_line(&grid, port, token.trim());
    // A page of another site has a browser ask with the user's certificate.
    let foreign = [&as_ann[..], &["-H", "Origin: https://elsewhere.example"]].concat();
    assert_eq!(ask("DELETE", "/v1/volumes/v1", &foreign).0, "403");
    assert_eq!(grid.json("volume list").as_array().expect("a list").len(), 1);
    assert_eq!(ask("GET", "/metrics", &as_reader).0, "200");
    // What is revoked counts for nothing from then on, what is given later does.
    let mut listener = Command::new(needs("curl"));
    listener.args(["-sSN", "--max-time", "60", "--cacert"]).arg(ann.join("ca-cert.pem")).args(as_reader);
    listener.arg(format!("https://127.0.0.1:{port}/v1/events")).stdout(Stdio::piped());
    let mut listener = listener.spawn().expect("it runs");
    let mut heard = listener.stdout.take().expect("it is piped");
    heard.read_exact(&mut [0; 15]).expect("`event: findings`");
    grid.ok("grid tls revoke operator/ann");
    let (status, why) = ask("GET", "/v1/volumes", &as_ann);
    assert!(status == "401" && why.contains("revoked"), "{status}: {why}");
    grid.ok("grid tls revoke reader/prometheus");
    assert_eq!(ask("GET", "/v1/volumes", &as_reader).0, "401");
    assert!(listener.wait().expect("it ends").success(), "the host ends a stream that stands");
    grid.ok("grid tls operator ann");
    assert_eq!(ask("GET", "/v1/volumes", &as_ann).0, "200");
}

#[test]
fn who_listens_is_told_what_is_not_well_as_it_comes_and_goes() {
    let grid = Grid::new(9);
    grid.up("--nodes 3 --devices 1");
    grid.ok("volume create v1 --size 16MiB --layout mirror:2");
    let mut listener = UnixStream::connect(grid.path("api.sock")).expect("it listens");
    listener.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    listener.write_all(b"GET /v1/events HTTP/1.1\r\nHost: host\r\n\r\n").expect("sent");
    let mut heard = String::new();
    let mut until_heard = |what: &str| {
        let mut part = [0; 4096];
        while !heard.contains(what) {
            let len = listener.read(&mut part).expect("it goes on");
            assert!(len > 0, "it ended: {heard}");
            heard += &text(&part[..len]);
        }
        heard.split_off(heard.find(what).expect("just seen") + what.len())
    };
    let rest = until_heard("event: findings\ndata: ");
    assert!(rest.starts_with("[]"), "all is well: {rest}");
    let node = grid.pid("node2").expect("it runs");
    signal(node, Signal::KILL).expect("it runs");
    let rest = until_heard("event: raised\ndata: {");
    assert!(rest.contains("node 2"), "{rest}");
    grid.ok("grid up");
    until_heard("event: cleared\ndata: {");
}
