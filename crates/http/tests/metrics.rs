//! The page of metrics over a socket, before a host of which parts hang.

use holdfast_api::{
    Capacity, Code, Error, Finding, Health, HostStatus, Neighbour, Request, Response, Role, SlowInfo, TaskInfo,
};
use holdfast_http::metrics::{Certificate, Survey, Times};
use holdfast_http::{Ask, Caller, Config, Limits, Shown, router, serve_unix};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};

/// Its status comes when it may.
#[derive(Default)]
struct Fake {
    asked: AtomicUsize,
    may_tell: (Mutex<bool>, Condvar),
}

impl Ask for Fake {
    fn ask(&self, role: Role, request: Request) -> Response {
        assert_eq!((role, request), (Role::Admin, Request::Status));
        self.asked.fetch_add(1, Ordering::AcqRel);
        let (lock, changed) = &self.may_tell;
        drop(changed.wait_while(lock.lock().unwrap(), |may_tell| !*may_tell).unwrap());
        Response::Status(Box::new(HostStatus { host: "m1".to_string(), uptime_ms: 1500, ..HostStatus::default() }))
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

    fn survey(&self) -> Option<&dyn Survey> {
        Some(self)
    }
}

impl Survey for Fake {
    fn loads(&self) -> Result<Vec<Neighbour>, Error> {
        Ok(Vec::new())
    }

    fn slow(&self, _: &[String]) -> Result<Vec<(String, SlowInfo)>, Error> {
        Ok(Vec::new())
    }

    fn times(&self) -> Result<Vec<Times>, Error> {
        Ok(Vec::new())
    }

    fn tasks(&self, _: &HostStatus) -> Result<Vec<TaskInfo>, Error> {
        Ok(Vec::new())
    }

    fn findings(&self, _: Option<&HostStatus>) -> Result<Vec<Finding>, Error> {
        Ok(Vec::new())
    }

    fn certificates(&self) -> Result<Vec<Certificate>, Error> {
        panic!("a fault of the host")
    }

    fn members(&self) -> Result<usize, Error> {
        Ok(3)
    }
}

fn page(socket: &Path) -> String {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: host\r\nConnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 200 ") && text.to_lowercase().contains("content-type: text/plain"), "{text}");
    text
}

fn is_up(page: &str, part: &str) -> bool {
    let series = format!("holdfast_scrape_part_up{{part=\"{part}\"}} ");
    page.lines().find_map(|line| line.strip_prefix(&series)).expect("it is there") == "1"
}

#[test]
fn a_part_that_hangs_or_fails_is_left_out_and_begun_once() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("api.sock");
    let fake = Arc::new(Fake::default());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (at, asked) = (socket.clone(), Arc::clone(&fake));
    let listener = runtime.block_on(async move { tokio::net::UnixListener::bind(at).unwrap() });
    runtime.spawn(async move { serve_unix(listener, router(asked, Config::default()), Limits::default()).await });
    let pages: Vec<String> = std::thread::scope(|scope| {
        let asked: Vec<_> = (0..3).map(|_| scope.spawn(|| page(&socket))).collect();
        asked.into_iter().map(|page| page.join().unwrap()).collect()
    });
    for page in &pages {
        let up =
            ["status", "tasks", "certificates", "loads", "stages", "findings", "metadata"].map(|of| is_up(page, of));
        assert_eq!(up, [false, false, false, true, true, true, true], "{page}");
        assert!(page.contains("\nholdfast_metadata_members 3\n") && !page.contains("\nholdfast_host_uptime_seconds "));
    }
    assert_eq!(fake.asked.load(Ordering::Acquire), 1, "one waits, however many ask");
    *fake.may_tell.0.lock().unwrap() = true;
    fake.may_tell.1.notify_all();
    let whole = page(&socket);
    assert!(is_up(&whole, "status") && is_up(&whole, "tasks"), "{whole}");
    assert!(whole.contains("\nholdfast_host_uptime_seconds 1.5\n"), "{whole}");
}
