//! A repository in a bucket, of a small store made for this: it lists two objects a page, and one request of 61 fails.

use holdfast_backup::{Error, Repository, S3, Source, Store, Writing, prune, to_output, verify};
use holdfast_base::{ObjectId, VolumeId};
use holdfast_format::stream::SnapshotId;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

const PAGE: usize = 2;

#[derive(Default)]
struct Bucket {
    objects: Mutex<BTreeMap<String, Vec<u8>>>,
    requests: AtomicU64,
    /// Chunks are refused, once so many were given.
    refuses_after: AtomicU64,
    given: AtomicU64,
}

/// What workers hold, and what waits for them.
const UNDER_WAY: u64 = 16;

fn unescaped(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte == b'%' {
            let digits = [rest.next().expect("a digit"), rest.next().expect("a digit")];
            bytes.push(u8::from_str_radix(std::str::from_utf8(&digits).expect("ASCII"), 16).expect("hexadecimal"));
        } else {
            bytes.push(byte);
        }
    }
    String::from_utf8(bytes).expect("names are ASCII")
}

impl Bucket {
    fn serve(self: Arc<Bucket>) -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("bound").port();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (bucket, stream) = (self.clone(), stream.expect("a client"));
                std::thread::spawn(move || bucket.talk(stream));
            }
        });
        port
    }

    fn talk(&self, stream: TcpStream) {
        let mut input = BufReader::new(stream.try_clone().expect("a copy"));
        let mut output = stream;
        loop {
            let mut line = String::new();
            if input.read_line(&mut line).unwrap_or(0) == 0 {
                return;
            }
            let words: Vec<&str> = line.split(' ').collect();
            let (method, target) = (words[0].to_string(), words[1].to_string());
            let (mut body_bytes, mut is_new) = (0, false);
            loop {
                let mut header = String::new();
                input.read_line(&mut header).expect("a header");
                let Some((name, value)) = header.trim().split_once(": ") else { break };
                match name.to_ascii_lowercase().as_str() {
                    "content-length" => body_bytes = value.parse().expect("a number"),
                    "if-none-match" => is_new = value == "*",
                    _ => {}
                }
            }
            let mut body = vec![0; body_bytes];
            input.read_exact(&mut body).expect("the body");
            let (status, answer) = self.answer(&method, &target, body, is_new);
            let head = format!(
                "HTTP/1.1 {status} X\r\nContent-Length: {}\r\nLast-Modified: Mon, 30 Nov 2026 12:00:00 GMT\r\n\r\n",
                answer.len()
            );
            let told = if method == "HEAD" { Vec::new() } else { answer };
            output.write_all(&[head.into_bytes(), told].concat()).expect("told");
        }
    }

    fn answer(&self, method: &str, target: &str, body: Vec<u8>, is_new: bool) -> (u16, Vec<u8>) {
        let (path, query) = target.split_once('?').expect("a query");
        let query: BTreeMap<&str, String> = query
            .split('&')
            .filter_map(|part| part.split_once('='))
            .map(|(name, value)| (name, unescaped(value)))
            .collect();
        assert!(query["X-Amz-Credential"].starts_with("key/") && query.contains_key("X-Amz-Signature"), "{target}");
        if is_new {
            assert!(query["X-Amz-SignedHeaders"].contains("if-none-match"), "{target}");
        }
        if self.requests.fetch_add(1, Ordering::Relaxed) % 61 == 6 {
            return (503, b"<Error><Code>SlowDown</Code></Error>".to_vec());
        }
        let path = unescaped(path);
        let Some(path) = path.strip_prefix("/bucket") else {
            return (404, b"<Error><Code>NoSuchBucket</Code><Message>none</Message></Error>".to_vec());
        };
        let key = path.trim_start_matches('/').to_string();
        let mut objects = self.objects.lock().expect("nobody panics with it");
        let refuses_after = self.refuses_after.load(Ordering::Relaxed);
        if refuses_after > 0 && key.contains("chunks/") {
            drop(objects);
            while self.given.load(Ordering::Relaxed) < refuses_after {
                std::thread::yield_now();
            }
            return (403, b"<Error><Code>AccessDenied</Code></Error>".to_vec());
        }
        match method {
            "GET" if query.contains_key("list-type") => (200, list(&objects, &query)),
            "PUT" if is_new && objects.contains_key(&key) => (412, Vec::new()),
            "PUT" => {
                objects.insert(key, body);
                (200, Vec::new())
            }
            "DELETE" => {
                objects.remove(&key);
                (204, Vec::new())
            }
            _ => objects.get(&key).map_or((404, Vec::new()), |object| (200, object.clone())),
        }
    }
}

fn list(objects: &BTreeMap<String, Vec<u8>>, query: &BTreeMap<&str, String>) -> Vec<u8> {
    let after = query.get("continuation-token").cloned().unwrap_or_default();
    let prefix = query.get("prefix").cloned().unwrap_or_default();
    let mut found = objects.iter().filter(|(key, _)| key.starts_with(&prefix) && **key > after);
    let page: Vec<_> = found.by_ref().take(PAGE).collect();
    let next = page.last().filter(|_| found.next().is_some()).map(|(key, _)| key);
    let contents: String = page
        .iter()
        .map(|(key, object)| {
            format!(
                "<Contents><Key>{key}</Key><LastModified>2026-11-30T12:00:00.000Z</LastModified><Size>{}</Size></Contents>",
                object.len()
            )
        })
        .collect();
    let token = next.map_or(String::new(), |next| format!("<NextContinuationToken>{next}</NextContinuationToken>"));
    let more = next.is_some();
    format!(
        "<?xml version=\"1.0\"?><ListBucketResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">{contents}\
         <IsTruncated>{more}</IsTruncated>{token}</ListBucketResult>"
    )
    .into_bytes()
}

fn source(layer: u32) -> Source {
    Source {
        volume: "vm1".to_string(),
        snapshot: format!("s{layer}"),
        snapshot_id: SnapshotId { volume: VolumeId(1), layer: ObjectId(layer) },
        taken_ms: u64::from(layer) * 3_600_000,
        layout: "mirror:2".to_string(),
        encrypted: false,
    }
}

#[test]
fn a_bucket_keeps_backups_though_it_fails_now_and_then() {
    // No other test of this program looks at the environment.
    let credentials = [("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret")];
    if credentials.iter().any(|(name, value)| std::env::var(name).as_deref() != Ok(value)) {
        let this = std::env::current_exe().expect("a program");
        let outcome = std::process::Command::new(this).arg("--nocapture").envs(credentials).status().expect("it runs");
        assert!(outcome.success());
        return;
    }
    let bucket = Arc::new(Bucket::default());
    let port = bucket.clone().serve();
    let place = format!("s3:http://127.0.0.1:{port}/bucket/grid");
    let says = |outcome: Result<Repository, Error>| outcome.err().expect("refused").to_string();
    assert!(says(Repository::open(&place, None)).contains("backup init"));
    assert!(says(Repository::open(&format!("s3:http://127.0.0.1:{port}/none"), None)).contains("NoSuchBucket"));
    let repository = Repository::init(&place, None).expect("made");
    assert!(says(Repository::init(&place, None)).contains("already"));
    let bytes: Vec<u8> = (0..5 << 20).map(|at| (at / 4096) as u8 ^ (at >> 20) as u8).collect();
    let mut base = None;
    for layer in 1..=3_u32 {
        let mut writing = Writing::begin(&repository, bytes.len() as u64).expect("begun");
        base.as_ref().map_or(Ok(Vec::new()), |base| writing.build_on(base)).expect("read");
        let given = bytes.chunks(1 << 20).take(if layer == 1 { 5 } else { 1 });
        let feed = |give: &mut holdfast_backup::Give| {
            (0..).zip(given).try_for_each(|(at, chunk): (u64, &[u8])| {
                let mut chunk = chunk.to_vec();
                chunk[0] = layer as u8;
                give.chunk(at, &chunk)
            })
        };
        writing.write(feed).expect("stored");
        base = Some(writing.commit(source(layer)).expect("committed").0);
    }
    let catalogue = repository.catalogue().expect("listed");
    assert_eq!(catalogue.backups.len(), 3, "more than a page of a listing");
    let mut out = Vec::new();
    to_output(&repository, catalogue.find("vm1").expect("there"), &mut out, false, |_| {}).expect("restored");
    let mut expected = bytes;
    expected[0] = 3;
    (1..5).for_each(|chunk| expected[chunk << 20] = 1);
    assert!(out == expected);
    assert!(verify(&repository, false, false, |_, _| {}).expect("read").damage.is_empty());
    let pruned = prune(&repository, Some(&"1h".parse().expect("a rule")), false).expect("pruned");
    assert_eq!((pruned.deleted.len(), pruned.kept), (2, 1));
    // All workers fail at the same time, while more is given than they have room for.
    bucket.refuses_after.store(UNDER_WAY, Ordering::Relaxed);
    let mut writing = Writing::begin(&repository, 40 << 20).expect("begun");
    let refused = writing.write(|give| {
        (0..40_u64).try_for_each(|at| {
            give.chunk(at, &[at as u8 + 200; 1 << 20])?;
            bucket.given.fetch_add(1, Ordering::Relaxed);
            Ok::<(), Error>(())
        })
    });
    let why = refused.expect_err("nothing is stored").to_string();
    assert!(why.contains("AccessDenied") || why.contains("403"), "{why}");
    drop(writing);
    let s3 = S3::open(place.strip_prefix("s3:").expect("it has it")).expect("a place");
    assert!(s3.list("locks").expect("listed").is_empty());
    assert!(bucket.objects.lock().expect("there").keys().all(|key| key.starts_with("grid/")));
}
