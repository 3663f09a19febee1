//! The interface over TLS, before a host that knows operators `ann` and `bob` and reader `eve` by their tokens.

use holdfast_api::{Capacity, Code, Error, Health, Request, Response, Role, TrashInfo};
use holdfast_http::{Ask, Caller, Config, Limits, Shown, router, serve_tls};
use rustls::pki_types::{PrivatePkcs8KeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig, StreamOwned};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const PATIENT: Duration = Duration::from_secs(60);

/// Notes what it is asked, and by whom.
#[derive(Default)]
struct Fake(Mutex<Vec<(Role, Request)>>);

impl Ask for Fake {
    fn ask(&self, role: Role, request: Request) -> Response {
        self.0.lock().unwrap().push((role, request.clone()));
        match request {
            Request::TrashList => Response::Trash { trash: Vec::<TrashInfo>::new() },
            _ => Response::Done,
        }
    }

    fn health(&self) -> Result<Health, Error> {
        Err(Error::new(Code::Unavailable, "nothing can be told"))
    }

    fn capacity(&self) -> Result<Capacity, Error> {
        Err(Error::new(Code::Unavailable, "nothing can be told"))
    }

    fn caller_of(&self, shown: Shown<'_>) -> Result<Caller, Error> {
        match shown {
            Shown::Token(name @ ("ann" | "bob")) => Ok(Caller::new(Role::Admin, &format!("operator {name}"))),
            Shown::Token("eve") => Ok(Caller::new(Role::Reader, "reader eve")),
            _ => Err(Error::new(Code::NotPermitted, "nobody")),
        }
    }
}

struct Served {
    fake: Arc<Fake>,
    at: SocketAddr,
    client: Arc<ClientConfig>,
    _runtime: tokio::runtime::Runtime,
}

type Stream = StreamOwned<ClientConnection, TcpStream>;

impl Served {
    fn new(limits: Limits) -> Served {
        let made = rcgen::generate_simple_self_signed(["localhost".to_string()]).unwrap();
        let key = PrivatePkcs8KeyDer::from(made.signing_key.serialize_der());
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let server = ServerConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions();
        let server = server.unwrap().with_no_client_auth();
        let server = Arc::new(server.with_single_cert(vec![made.cert.der().clone()], key.into()).unwrap());
        let mut roots = RootCertStore::empty();
        roots.add(made.cert.der().clone()).unwrap();
        let client = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let client = Arc::new(client.with_root_certificates(roots).with_no_client_auth());
        let fake = Arc::new(Fake::default());
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let at = listener.local_addr().unwrap();
        let routes = router(Arc::clone(&fake) as Arc<dyn Ask>, Config::default());
        runtime.spawn(async move { serve_tls(listener, move || Arc::clone(&server), routes, limits).await });
        Served { fake, at, client, _runtime: runtime }
    }

    fn connect(&self) -> Stream {
        let tcp = TcpStream::connect(self.at).unwrap();
        tcp.set_read_timeout(Some(PATIENT)).unwrap();
        let name = ServerName::try_from("localhost").unwrap();
        StreamOwned::new(ClientConnection::new(Arc::clone(&self.client), name).unwrap(), tcp)
    }

    /// The status of what comes first, and all that comes.
    fn say(&self, text: &str) -> (u16, String) {
        let mut stream = self.connect();
        stream.write_all(text.as_bytes()).unwrap();
        let mut heard = Vec::new();
        // Who is closed upon has heard enough.
        let _ = stream.read_to_end(&mut heard);
        let heard = String::from_utf8(heard).unwrap();
        let status = heard.split(' ').nth(1).and_then(|status| status.parse().ok());
        (status.unwrap_or_else(|| panic!("no answer: {heard:?}")), heard)
    }

    fn get(&self, target: &str, headers: &[&str]) -> u16 {
        let more: String = headers.iter().map(|line| format!("{line}\r\n")).collect();
        self.say(&format!("GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{more}\r\n")).0
    }
}

const ANN: &str = "Authorization: Bearer ann";

#[test]
fn strangers_keep_nobody_out() {
    let served = Served::new(Limits { connections: 8, ..Limits::default() });
    // Some say nothing, some greet, some have asked and are nobody.
    let silent: Vec<TcpStream> = (0..8).map(|_| TcpStream::connect(served.at).unwrap()).collect();
    assert_eq!(served.get("/v1/trash", &[ANN]), 200);
    let mut greeted: Vec<Stream> = (0..8).map(|_| served.connect()).collect();
    for stream in &mut greeted {
        stream.write_all(b"GET /v1/trash HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    }
    assert_eq!(served.get("/v1/trash", &[ANN]), 200);
    // Who is known stays meanwhile.
    let mut known = served.connect();
    let mut ask_it = || {
        known.write_all(format!("GET /v1/trash HTTP/1.1\r\nHost: localhost\r\n{ANN}\r\n\r\n").as_bytes()).unwrap();
        let mut answer = [0; 4096];
        let len = known.read(&mut answer).unwrap();
        String::from_utf8_lossy(&answer[..len]).starts_with("HTTP/1.1 200")
    };
    assert!(ask_it());
    let more: Vec<TcpStream> = (0..32).map(|_| TcpStream::connect(served.at).unwrap()).collect();
    assert_eq!(served.get("/v1/trash", &[ANN]), 200);
    assert!(ask_it());
    drop((silent, greeted, more));
}

#[test]
fn of_a_stranger_the_head_alone_is_read() {
    let served = Served::new(Limits::default());
    let to = "POST /v1/volumes HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n";
    for body in ["Content-Length: 1000000", "Transfer-Encoding: chunked", "Content-Length: 9\r\nExpect: 100-continue"] {
        let (status, heard) = served.say(&format!("{to}{body}\r\n\r\n"));
        assert_eq!(status, 401, "{body}: {heard}");
    }
    assert!(served.fake.0.lock().unwrap().is_empty());
}

#[test]
fn nobody_is_known_by_what_is_no_token_and_no_page_of_another_site_asks() {
    let served = Served::new(Limits::default());
    for (headers, status) in [
        (&[ANN][..], 200),
        (&["Authorization: bearer  eve "], 200),
        (&[], 401),
        (&["Authorization: Basic YW5uOmFubg=="], 401),
        (&["Authorization: Bearer"], 401),
        (&["Authorization: Bearer x", ANN], 401),
        (&[ANN, ANN], 401),
        (&[ANN, "Origin: https://localhost"], 200),
        (&[ANN, "Origin: https://localhost:1"], 403),
        (&[ANN, "Origin: null"], 403),
        (&[ANN, "Sec-Fetch-Site: none"], 200),
        (&[ANN, "Sec-Fetch-Site: cross-site"], 403),
        (&[ANN, "Sec-Fetch-Site: same-site"], 403),
    ] {
        assert_eq!(served.get("/v1/trash", headers), status, "{headers:?}");
    }
    let (_, heard) = served.say(&format!("GET /v1/trash HTTP/1.1\r\nHost: a\r\n{ANN}\r\nConnection: close\r\n\r\n"));
    let heard = heard.to_lowercase();
    assert!(heard.contains("x-content-type-options: nosniff") && heard.contains("cache-control: no-store"), "{heard}");
    assert!(!heard.contains("access-control"), "{heard}");
}

#[test]
fn keys_are_each_callers_own() {
    let served = Served::new(Limits::default());
    let asked = || served.fake.0.lock().unwrap().len();
    let delete = |who: &str| {
        let head = format!("DELETE /v1/volumes/v HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {who}\r\n");
        served.say(&format!("{head}Idempotency-Key: 1\r\nConnection: close\r\n\r\n")).0
    };
    assert_eq!((delete("ann"), asked()), (204, 1));
    assert_eq!((delete("ann"), asked()), (204, 1), "it is the same one");
    assert_eq!((delete("bob"), asked()), (204, 2), "bob has asked for nothing yet");
    assert_eq!((delete("eve"), asked()), (403, 2), "a reader is not told what came of it");
}

#[test]
fn a_reader_makes_no_change_of_the_table() {
    let served = Served::new(Limits::default());
    let mut changes = 0;
    for endpoint in holdfast_http::table::all().iter().filter(|of| of.method != "GET") {
        let path = endpoint.path.replace(['{', '}'], "").replace("/nodes/node", "/nodes/1");
        let path = path.replace("/filters/filter", "/filters/1");
        let (method, body) = (&endpoint.method, BODIES.iter().find(|(path, _)| *path == endpoint.path));
        let body = body.map_or("{}", |(_, body)| body);
        let head = format!("{method} {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer eve\r\nConnection: close\r\n");
        let length = body.len();
        let head = format!("{head}Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n");
        let (status, heard) = served.say(&format!("{head}{body}"));
        assert_eq!(status, 403, "{method} {path}: {heard}");
        changes += 1;
    }
    assert!(changes > 25, "{changes}");
    assert!(served.fake.0.lock().unwrap().is_empty());
}

/// Where an empty object is none.
const BODIES: [(&str, &str); 16] = [
    ("/v1/machines/{machine}/announcement", r#"{"for":"1h"}"#),
    ("/v1/requests", r#"{"op":"volume-delete","name":"v","force":false}"#),
    ("/v1/volumes", r#"{"name":"v","size_bytes":1073741824,"layout":"mirror:2"}"#),
    ("/v1/volumes/{volume}/resize", r#"{"size_bytes":1073741824}"#),
    ("/v1/volumes/{volume}/rename", r#"{"name":"w"}"#),
    ("/v1/volumes/{volume}/protect", r#"{"protected":true}"#),
    ("/v1/volumes/{volume}/rekey", r#"{"key_file":"/key"}"#),
    ("/v1/sharing", r#"{"name":"d","layout":"mirror:2"}"#),
    ("/v1/volumes/{volume}/handover", r#"{"to":"b"}"#),
    ("/v1/volumes/{volume}/clients", r#"{"all":true}"#),
    ("/v1/volumes/{volume}/schedule", r#"{"every":"1h","keep":"24h"}"#),
    ("/v1/volumes/{volume}/filters", r#"{"spec":"delay:time=1ms"}"#),
    ("/v1/volumes/{volume}/snapshots", r#"{"name":"s"}"#),
    ("/v1/volumes/{volume}/snapshots/{snapshot}/clone", r#"{"name":"c"}"#),
    ("/v1/snapshot-groups", r#"{"volumes":["v"],"name":"s"}"#),
    ("/v1/devices/{device}/class", r#"{"class":"ssd"}"#),
];
