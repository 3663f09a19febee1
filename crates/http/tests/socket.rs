//! The interface over a socket, before a host that answers what it is told to.

use holdfast_api::{Capacity, Code, Error, Health, Request, Response, Role, TrashInfo};
use holdfast_http::{Ask, Caller, Config, Limits, Shown, local_router, router, serve_local, serve_unix};
use serde_json::{Value, json};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Notes what it is asked; a rename waits until it may end.
#[derive(Default)]
struct Fake {
    asked: Mutex<Vec<Request>>,
    may_end: AtomicBool,
}

impl Ask for Fake {
    fn ask(&self, _: Role, request: Request) -> Response {
        self.asked.lock().unwrap().push(request.clone());
        let refused = |code, message: &str| Response::Error { code, message: message.to_string() };
        match request {
            Request::VolumeDelete { .. } => Response::Done,
            Request::TrashList => Response::Trash { trash: Vec::<TrashInfo>::new() },
            Request::VolumeShow { .. } | Request::VolumeLive { .. } => refused(Code::NotFound, "no such volume"),
            Request::VolumeProtect { .. } => refused(Code::Unavailable, "the metadata store is away"),
            Request::VolumeHandover { .. } => panic!("a fault of the host"),
            Request::VolumeRename { .. } => {
                while !self.may_end.load(Ordering::Acquire) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                refused(Code::Exists, "there is one of that name")
            }
            _ => Response::Done,
        }
    }

    fn health(&self) -> Result<Health, Error> {
        Err(Error::new(Code::Unavailable, "nothing can be told"))
    }

    fn capacity(&self) -> Result<Capacity, Error> {
        Err(Error::new(Code::Unavailable, "nothing can be told"))
    }

    fn caller_of(&self, _: Shown<'_>) -> Result<Caller, Error> {
        Err(Error::new(Code::NotPermitted, "there are no callers from the network"))
    }
}

struct Served {
    fake: Arc<Fake>,
    socket: PathBuf,
    _dir: tempfile::TempDir,
    runtime: tokio::runtime::Runtime,
}

struct Answer {
    status: u16,
    head: String,
    body: Value,
}

impl Served {
    fn within(change_within: Duration) -> Served {
        Served::by(Config { change_within, ..Config::default() }, Limits::default())
    }

    fn by(config: Config, limits: Limits) -> Served {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("api.sock");
        let fake = Arc::new(Fake::default());
        let (at, asked) = (socket.clone(), Arc::clone(&fake));
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = runtime.block_on(async move { tokio::net::UnixListener::bind(at).unwrap() });
        runtime.spawn(async move { serve_unix(listener, router(asked, config), limits).await });
        Served { fake, socket, _dir: dir, runtime }
    }

    fn ask(&self, method: &str, target: &str, headers: &[&str], body: &str) -> Answer {
        ask(&self.socket, method, target, headers, body)
    }

    fn asked(&self) -> usize {
        self.fake.asked.lock().unwrap().len()
    }
}

fn ask(socket: &Path, method: &str, target: &str, headers: &[&str], body: &str) -> Answer {
    let stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    converse(stream, method, target, headers, body)
}

fn converse(mut stream: impl Read + Write, method: &str, target: &str, headers: &[&str], body: &str) -> Answer {
    let more: String = headers.iter().map(|line| format!("{line}\r\n")).collect();
    let length = body.len();
    let head = format!(
        "{method} {target} HTTP/1.1\r\nHost: host\r\nConnection: close\r\nContent-Length: {length}\r\n{more}\r\n"
    );
    stream.write_all(head.as_bytes()).unwrap();
    // One that is too large is answered before it is read.
    let _ = stream.write_all(body.as_bytes());
    let mut text = String::new();
    let _ = stream.read_to_string(&mut text);
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {text:?}"));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    Answer { status, head: head.to_lowercase(), body: serde_json::from_str(body).unwrap_or(Value::Null) }
}

const JSON: &str = "Content-Type: application/json";
const PATIENT: Duration = Duration::from_secs(60);

#[test]
fn whatever_comes_is_answered_as_it_is_described() {
    let served = Served::within(PATIENT);
    let code = |answer: &Answer| answer.body["error"]["code"].as_str().map(str::to_string);
    for (method, target, headers, body, status, expected) in [
        ("GET", "/v1/trash", &[][..], "", 200, None),
        ("DELETE", "/v1/volumes/vm%201?now=true", &[], "", 204, None),
        ("GET", "/v1/volumes/vm7", &[], "", 404, Some("not-found")),
        ("GET", "/v1/nothing", &[], "", 404, Some("not-found")),
        ("PUT", "/v1/volumes", &[JSON], "{}", 405, Some("invalid")),
        ("GET", "/v1/trash?all=1", &[], "", 400, Some("invalid")),
        ("POST", "/v1/volumes", &[JSON], "{", 400, Some("invalid")),
        ("POST", "/v1/volumes", &[], "{}", 415, Some("invalid")),
        ("POST", "/v1/volumes/v/protect", &[JSON], r#"{"protected":true}"#, 503, Some("unavailable")),
        ("POST", "/v1/volumes/v/handover", &[JSON], r#"{"to":"b"}"#, 500, Some("failed")),
        ("POST", "/v1/nodes/first/cut", &[], "", 400, Some("invalid")),
        ("POST", "/v1/nodes/+1/cut", &[], "", 400, Some("invalid")),
        ("POST", "/v1/nodes/4294967296/cut", &[], "", 400, Some("invalid")),
        ("GET", "/v1/volumes/%FF", &[], "", 400, Some("invalid")),
        ("GET", "/v1/volumes/", &[], "", 404, Some("not-found")),
        ("OPTIONS", "/v1/volumes", &[], "", 405, Some("invalid")),
        ("DELETE", "/v1/volumes/v?now=true&now=true", &[], "", 400, Some("invalid")),
        ("POST", "/v1/volumes/v/rename", &[JSON], r#"["web"]"#, 400, Some("invalid")),
        ("PATCH", "/v1/volumes/v", &[JSON], r#"{"tiers":[null,null]}"#, 400, Some("invalid")),
        ("POST", "/v1/snapshot-groups", &[JSON], r#"{"volumes":[],"name":"s"}"#, 400, Some("invalid")),
        ("POST", "/v1/volumes/v/clients", &[JSON], r#"{"all":true,"allow":["a"]}"#, 400, Some("invalid")),
        ("POST", "/v1/volumes/v/clients", &[JSON], r#"{"allow":[]}"#, 400, Some("invalid")),
        ("POST", "/v1/volumes/v/resize", &[JSON], r#"{"size_bytes":1e99}"#, 400, Some("invalid")),
        ("POST", "/v1/volumes/v/resize", &[JSON], r#"{"size_bytes":18446744073709551616}"#, 400, Some("invalid")),
        ("POST", "/v1/volumes/v/resize", &[JSON], r#"{"size_bytes":4097}"#, 400, Some("invalid")),
        ("DELETE", "/v1/volumes/v", &["Idempotency-Key: a b"], "", 400, Some("invalid")),
        ("DELETE", "/v1/volumes/v", &["Idempotency-Key: a", "Idempotency-Key: b"], "", 400, Some("invalid")),
    ] {
        let answer = served.ask(method, target, headers, body);
        assert_eq!((answer.status, code(&answer).as_deref()), (status, expected), "{method} {target}: {}", answer.body);
        assert_eq!(answer.head.contains("retry-after: 1"), status == 503, "{}", answer.head);
        assert_eq!(answer.head.contains("allow: get,head,post"), status == 405, "{}", answer.head);
    }
    let large = format!(r#"{{"name":"{}"}}"#, "x".repeat(2 << 20));
    let answer = served.ask("POST", "/v1/volumes/v/rename", &[JSON], &large);
    assert_eq!((answer.status, code(&answer).as_deref()), (413, Some("invalid")));
    let first = served.fake.asked.lock().unwrap()[1].clone();
    assert_eq!(first, Request::VolumeDelete { name: "vm 1".to_string(), force: false, now: true });
    let described = served.ask("GET", "/v1/openapi.json", &[], "");
    assert_eq!((described.status, &described.body["info"]["title"]), (200, &json!("Holdfast")));
}

#[test]
fn who_comes_when_all_places_are_taken_gets_that_of_one_who_asks_nothing() {
    let served = Served::by(Config::default(), Limits { connections: 4, ..Limits::default() });
    let idle: Vec<UnixStream> = (0..3).map(|_| UnixStream::connect(&served.socket).unwrap()).collect();
    let ask_it = |stream: &mut UnixStream| {
        stream.write_all(b"GET /v1/trash HTTP/1.1\r\nHost: host\r\n\r\n").unwrap();
        stream.set_read_timeout(Some(PATIENT)).unwrap();
        let (mut answer, mut part) = (Vec::new(), [0; 1024]);
        while !answer.ends_with(b"}") {
            let len = stream.read(&mut part).unwrap();
            assert!(len > 0, "it is let go");
            answer.extend_from_slice(&part[..len]);
        }
        answer.starts_with(b"HTTP/1.1 200 OK")
    };
    let mut used = UnixStream::connect(&served.socket).unwrap();
    assert!(ask_it(&mut used));
    let mut more: Vec<UnixStream> = idle.iter().map(|_| UnixStream::connect(&served.socket).unwrap()).collect();
    for stream in &mut more {
        assert!(ask_it(stream));
    }
    for mut stream in idle {
        stream.set_read_timeout(Some(PATIENT)).unwrap();
        assert_eq!(stream.read(&mut [0; 16]).unwrap(), 0, "it is let go");
    }
    assert!(ask_it(&mut used), "who was answered meanwhile stays");
}

#[test]
fn what_is_under_way_keeps_its_place() {
    let config = Config { at_a_time: 8, ..Config::default() };
    let served = Served::by(config, Limits { connections: 2, ..Limits::default() });
    let begin = |target: &'static str| {
        let socket = served.socket.clone();
        std::thread::spawn(move || ask(&socket, "POST", target, &[JSON], r#"{"name":"web"}"#).status)
    };
    let under_way = [begin("/v1/volumes/a/rename"), begin("/v1/volumes/b/rename")];
    while served.asked() < 2 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let waiting = begin("/v1/volumes/c/rename");
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!((waiting.is_finished(), served.asked()), (false, 2));
    served.fake.may_end.store(true, Ordering::Release);
    let all = under_way.into_iter().chain([waiting]).map(|answer| answer.join().unwrap());
    assert_eq!(all.collect::<Vec<_>>(), [409; 3]);
}

#[test]
fn who_takes_no_answer_is_let_go() {
    let served =
        Served::by(Config::default(), Limits { stalled_within: Duration::from_millis(50), ..Limits::default() });
    let mut stream = UnixStream::connect(&served.socket).unwrap();
    stream.set_write_timeout(Some(PATIENT)).unwrap();
    let why = loop {
        if let Err(error) = stream.write_all(b"GET /v1/openapi.json HTTP/1.1\r\nHost: host\r\n\r\n") {
            break error.kind();
        }
    };
    assert!([ErrorKind::BrokenPipe, ErrorKind::ConnectionReset].contains(&why), "{why:?}");
}

#[test]
fn heads_are_small_and_come_in_time() {
    let served = Served::by(Config::default(), Limits { head_within: Duration::from_millis(50), ..Limits::default() });
    let large = format!("X-Odd: {}", "x".repeat(200 << 10));
    assert_eq!(served.ask("GET", "/v1/trash", &[&large], "").status, 431);
    let mut slow = UnixStream::connect(&served.socket).unwrap();
    slow.set_read_timeout(Some(PATIENT)).unwrap();
    slow.write_all(b"GET /v1/trash HTTP/1.1\r\nHo").unwrap();
    let mut said = Vec::new();
    slow.read_to_end(&mut said).expect("it is let go");
}

#[test]
fn a_change_that_is_asked_for_again_by_its_key_is_carried_out_once() {
    let served = Served::within(PATIENT);
    let rename = |key: &'static str, name: &str| {
        let (socket, body) = (served.socket.clone(), json!({ "name": name }).to_string());
        std::thread::spawn(move || {
            let key = format!("Idempotency-Key: {key}");
            ask(&socket, "POST", "/v1/volumes/v/rename", &[JSON, &key], &body)
        })
    };
    let both = [rename("one", "web"), rename("one", "web")];
    while served.asked() == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let other = rename("one", "db").join().unwrap();
    assert_eq!((other.status, &other.body["error"]["code"]), (422, &json!("invalid")), "{}", other.body);
    served.fake.may_end.store(true, Ordering::Release);
    for answer in both {
        assert_eq!(answer.join().unwrap().status, 409);
    }
    assert_eq!(rename("one", "web").join().unwrap().status, 409);
    assert_eq!(served.asked(), 1);
    assert_eq!(rename("two", "web").join().unwrap().status, 409);
    assert_eq!(served.asked(), 2);
    // It may succeed the next time, so it is tried again.
    for _ in 0..2 {
        let headers = [JSON, "Idempotency-Key: three"];
        assert_eq!(served.ask("POST", "/v1/volumes/v/protect", &headers, r#"{"protected":true}"#).status, 503);
    }
    assert_eq!(served.asked(), 4);
}

#[test]
fn what_takes_too_long_goes_on_and_is_had_by_its_key() {
    let served = Served::within(Duration::from_millis(50));
    let headers = [JSON, "Idempotency-Key: one"];
    let late = served.ask("POST", "/v1/volumes/v/rename", &headers, r#"{"name":"web"}"#);
    assert_eq!((late.status, &late.body["error"]["code"]), (503, &json!("unavailable")), "{}", late.body);
    served.fake.may_end.store(true, Ordering::Release);
    let end = loop {
        let answer = served.ask("POST", "/v1/volumes/v/rename", &headers, r#"{"name":"web"}"#);
        if answer.status != 503 {
            break answer;
        }
    };
    assert_eq!((end.status, served.asked()), (409, 1));
}

#[test]
fn the_dashboard_is_for_everybody_and_is_sent_once() {
    let served = Served::within(PATIENT);
    let page = served.ask("GET", "/", &[], "");
    assert_eq!(page.status, 200);
    for guard in ["content-security-policy: default-src 'none'", "x-content-type-options: nosniff", "text/html"] {
        assert!(page.head.contains(guard), "{}", page.head);
    }
    let tag = page.head.lines().find_map(|line| line.strip_prefix("etag: ")).expect("a tag");
    let again = served.ask("GET", "/", &[&format!("If-None-Match: {tag}")], "");
    assert_eq!((again.status, again.body.clone()), (304, Value::Null));
    assert_eq!(served.ask("GET", "/web/main.js", &[&format!("If-None-Match: {tag}")], "").status, 200);
    assert_eq!(served.ask("GET", "/web/../main.js", &[], "").status, 404);
    assert_eq!(served.ask("GET", "/v1/access", &[], "").body, json!({ "role": "admin" }));
}

#[test]
fn a_port_of_the_machine_leads_to_the_host_for_who_has_its_key() {
    let served = Served::within(PATIENT);
    let way = local_router(served.socket.clone(), |key| key == "sesame");
    let (sender, port) = std::sync::mpsc::channel();
    served.runtime.spawn(async move {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        sender.send(listener.local_addr().unwrap()).unwrap();
        serve_local(listener, way).await;
    });
    let address = port.recv().unwrap();
    let ask = |method: &str, target: &str, headers: &[&str], body: &str| {
        converse(TcpStream::connect(address).unwrap(), method, target, headers, body)
    };
    assert_eq!(ask("GET", "/", &[], "").status, 200, "the page has nothing of the grid in it");
    for headers in [&[][..], &["Authorization: Bearer Sesame"], &["Cookie: sesame"]] {
        for target in ["/v1/trash", "/metrics", "/v1/events", "/elsewhere"] {
            assert_eq!(ask("GET", target, headers, "").status, 401, "{target} {headers:?}");
        }
    }
    let key = "Authorization: Bearer sesame";
    assert_eq!(ask("GET", "/v1/trash", &[key], "").body, json!({ "trash": [] }));
    let made = ask("POST", "/v1/volumes/v/protect", &[key, JSON], r#"{"protected":true}"#);
    assert_eq!((made.status, served.asked()), (503, 2), "{}", made.body);
    std::fs::remove_file(&served.socket).unwrap();
    let gone = ask("GET", "/v1/trash", &[key], "");
    assert!(gone.status == 503 && gone.body.to_string().contains("holdfast status"), "{}", gone.body);
}
