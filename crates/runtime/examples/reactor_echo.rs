//! What a hop costs: operations a second and CPU time an operation, by role, for 8 KiB reads.
//!
//! Roles, each a reactor on a thread of its own: a client with a fixed number of requests outstanding; a hop that
//! passes requests on over TCP, as a controller does; a server that answers from memory or from a device, as a node
//! does.
//!
//! `cargo run --release -p holdfast-runtime --example reactor_echo -- [directory for the device] [seconds] [spin us]`

use holdfast_base::{Buf, BufMut, Instant, Prng};
use holdfast_runtime::reactor::{Config, DeviceSlot, DiskToken};
use holdfast_runtime::{App, ConnId, Event, Io, Reactor, Waker, clock, device, process};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

const REQUEST_BYTES: usize = 32;
const HEADER_BYTES: usize = 16;
const PAYLOAD_BYTES: usize = 8192;
const DEVICE_BYTES: u64 = 1 << 30;

/// Splits a stream into messages of one size, as a protocol would.
struct Splitter {
    message_bytes: usize,
    partial: Vec<u8>,
}

impl Splitter {
    fn new(message_bytes: usize) -> Splitter {
        Splitter { message_bytes, partial: Vec::new() }
    }

    fn feed(&mut self, mut bytes: &[u8], mut on_message: impl FnMut(&[u8])) {
        if !self.partial.is_empty() {
            let count = bytes.len().min(self.message_bytes - self.partial.len());
            self.partial.extend_from_slice(&bytes[..count]);
            bytes = &bytes[count..];
            if self.partial.len() < self.message_bytes {
                return;
            }
            on_message(&self.partial);
            self.partial.clear();
        }
        let mut messages = bytes.chunks_exact(self.message_bytes);
        messages.by_ref().for_each(&mut on_message);
        self.partial.extend_from_slice(messages.remainder());
    }
}

/// Answers each request with a header and 8 KiB, from memory or from its device.
struct Server {
    device: Option<DeviceSlot>,
    requests: Splitter,
    payload: Buf,
    conn: Option<ConnId>,
    prng: Prng,
}

impl App for Server {
    fn on_event(&mut self, _now: Instant, event: Event<'_>, io: &mut Io) {
        match event {
            Event::Accepted { conn, .. } => self.conn = Some(conn),
            Event::Bytes { conn, bytes } => {
                let Server { device, requests, payload, prng, .. } = self;
                requests.feed(bytes, |_| match device {
                    Some(slot) => {
                        let offset = prng.below(DEVICE_BYTES / PAYLOAD_BYTES as u64) * PAYLOAD_BYTES as u64;
                        io.read(*slot, offset, PAYLOAD_BYTES, DiskToken(0));
                    }
                    None => answer(io, conn, payload.clone()),
                });
            }
            Event::Read { result, .. } => answer(io, self.conn.expect("a request came first"), result.expect("read")),
            Event::Closed { .. } => io.stop(),
            _ => {}
        }
    }

    fn on_batch_end(&mut self, _now: Instant, _io: &mut Io) {}

    fn next_deadline(&self) -> Option<Instant> {
        None
    }
}

fn answer(io: &mut Io, conn: ConnId, payload: Buf) {
    io.send(conn, &[1; HEADER_BYTES]);
    io.send_buf(conn, payload);
}

/// Passes requests on and replies back.
struct Hop {
    target: SocketAddr,
    client: Option<ConnId>,
    server: Option<ConnId>,
    requests: Splitter,
    replies: Splitter,
}

impl App for Hop {
    fn on_event(&mut self, _now: Instant, event: Event<'_>, io: &mut Io) {
        match event {
            Event::Accepted { conn, .. } => {
                self.client = Some(conn);
                self.server = Some(io.connect_tcp(self.target));
            }
            Event::Bytes { conn, bytes } if Some(conn) == self.client => {
                let server = self.server.expect("connected when the client came");
                self.requests.feed(bytes, |request| io.send(server, request));
            }
            Event::Bytes { bytes, .. } => {
                let client = self.client.expect("replies follow requests");
                self.replies.feed(bytes, |reply| {
                    let mut payload = BufMut::new(PAYLOAD_BYTES);
                    payload.copy_from_slice(&reply[HEADER_BYTES..]);
                    answer(io, client, payload.freeze());
                });
            }
            Event::Closed { .. } => io.stop(),
            _ => {}
        }
    }

    fn on_batch_end(&mut self, _now: Instant, _io: &mut Io) {}

    fn next_deadline(&self) -> Option<Instant> {
        None
    }
}

/// Keeps `depth` requests outstanding for a while.
struct Client {
    conn: ConnId,
    depth: usize,
    replies: Splitter,
    done: u64,
    end: Instant,
}

impl App for Client {
    fn on_event(&mut self, now: Instant, event: Event<'_>, io: &mut Io) {
        match event {
            Event::Connected { conn } => (0..self.depth).for_each(|_| io.send(conn, &[2; REQUEST_BYTES])),
            Event::Bytes { conn, bytes } => {
                let Client { replies, done, .. } = self;
                replies.feed(bytes, |_| {
                    *done += 1;
                    io.send(conn, &[2; REQUEST_BYTES]);
                });
                if now >= self.end {
                    io.abort(self.conn);
                    io.stop();
                }
            }
            other => panic!("{other:?}"),
        }
    }

    fn on_batch_end(&mut self, _now: Instant, _io: &mut Io) {}

    fn next_deadline(&self) -> Option<Instant> {
        None
    }
}

/// Reads at random offsets with a fixed depth, without any socket.
struct DiskOnly {
    slot: DeviceSlot,
    prng: Prng,
    done: u64,
    end: Instant,
}

impl DiskOnly {
    fn read(&mut self, io: &mut Io) {
        let offset = self.prng.below(DEVICE_BYTES / PAYLOAD_BYTES as u64) * PAYLOAD_BYTES as u64;
        io.read(self.slot, offset, PAYLOAD_BYTES, DiskToken(0));
    }
}

impl App for DiskOnly {
    fn on_event(&mut self, now: Instant, event: Event<'_>, io: &mut Io) {
        let Event::Read { result, .. } = event else { return };
        result.expect("read");
        self.done += 1;
        if now < self.end {
            self.read(io);
        } else {
            io.stop();
        }
    }

    fn on_batch_end(&mut self, _now: Instant, _io: &mut Io) {}

    fn next_deadline(&self) -> Option<Instant> {
        None
    }
}

struct Setting {
    device: PathBuf,
    span: Duration,
    config: Config,
}

fn server(setting: &Setting, with_device: bool) -> (SocketAddr, JoinHandle<Duration>) {
    let (config, path) = (setting.config.clone(), setting.device.clone());
    let (tx, rx) = mpsc::channel();
    let named = thread::Builder::new().name("server".into());
    let handle = named.spawn(move || {
        let mut reactor = Reactor::new(config).expect("reactor");
        let (_, address) = reactor.io().listen_tcp("127.0.0.1:0".parse().expect("address")).expect("listen");
        let device = with_device.then(|| reactor.io().add_device(device::open(&path).expect("device")));
        tx.send(address).expect("the main thread waits");
        let requests = Splitter::new(REQUEST_BYTES);
        let payload = BufMut::zeroed(PAYLOAD_BYTES).freeze();
        let mut app = Server { device, requests, payload, conn: None, prng: Prng::new(1) };
        reactor.run(&mut app).expect("run");
        process::thread_cpu()
    });
    let handle = handle.expect("thread");
    (rx.recv().expect("the server starts"), handle)
}

fn hop(setting: &Setting, target: SocketAddr, path: &Path) -> (Waker, JoinHandle<Duration>) {
    let (config, path) = (setting.config.clone(), path.to_path_buf());
    let (tx, rx) = mpsc::channel();
    let named = thread::Builder::new().name("hop".into());
    let handle = named.spawn(move || {
        let mut reactor = Reactor::new(config).expect("reactor");
        reactor.io().listen_unix(&path).expect("listen");
        tx.send(reactor.waker()).expect("the main thread waits");
        let requests = Splitter::new(REQUEST_BYTES);
        let replies = Splitter::new(HEADER_BYTES + PAYLOAD_BYTES);
        reactor.run(&mut Hop { target, client: None, server: None, requests, replies }).expect("run");
        process::thread_cpu()
    });
    let handle = handle.expect("thread");
    (rx.recv().expect("the hop starts"), handle)
}

fn client(setting: &Setting, depth: usize, connect: impl FnOnce(&mut Io) -> ConnId) -> (u64, Duration) {
    let mut reactor = Reactor::new(setting.config.clone()).expect("reactor");
    let conn = connect(reactor.io());
    let replies = Splitter::new(HEADER_BYTES + PAYLOAD_BYTES);
    let before = process::thread_cpu();
    let mut app = Client { conn, depth, replies, done: 0, end: clock::now() + setting.span };
    reactor.run(&mut app).expect("run");
    (app.done, process::thread_cpu() - before)
}

fn report(name: &str, depth: usize, setting: &Setting, done: u64, roles: &[(&str, Duration)]) {
    let rate = done as f64 / setting.span.as_secs_f64();
    let roles: Vec<String> =
        roles.iter().map(|(role, cpu)| format!("{role} {:.2}", cpu.as_secs_f64() * 1e6 / done as f64)).collect();
    println!("{name:<28} QD{depth:<3} {rate:>8.0}/s   CPU us an operation: {}", roles.join(", "));
}

fn main() {
    let mut args = std::env::args().skip(1);
    let dir = PathBuf::from(args.next().unwrap_or_else(|| ".".into()));
    let seconds = args.next().map_or(3, |s| s.parse().expect("seconds"));
    let spin_us = args.next().map_or(0, |s| s.parse().expect("microseconds"));
    let device = dir.join("reactor-echo.device");
    device::create_file(&device, DEVICE_BYTES, DEVICE_BYTES).expect("device");
    let config = Config { spin_max: Duration::from_micros(spin_us), ..Config::default() };
    let setting = Setting { device, span: Duration::from_secs(seconds), config };
    for depth in [1, 16] {
        let (address, handle) = server(&setting, false);
        let (done, cpu) = client(&setting, depth, |io| io.connect_tcp(address));
        report(
            "TCP, from memory",
            depth,
            &setting,
            done,
            &[("client", cpu), ("server", handle.join().expect("server"))],
        );
    }
    for depth in [1, 16] {
        let mut reactor = Reactor::new(setting.config.clone()).expect("reactor");
        let slot = reactor.io().add_device(device::open(&setting.device).expect("device"));
        let mut app = DiskOnly { slot, prng: Prng::new(2), done: 0, end: clock::now() + setting.span };
        let before = process::thread_cpu();
        (0..depth).for_each(|_| app.read(reactor.io()));
        reactor.run(&mut app).expect("run");
        report("device", depth, &setting, app.done, &[("thread", process::thread_cpu() - before)]);
    }
    for depth in [1, 16, 32] {
        let (address, server) = server(&setting, true);
        let path = dir.join("reactor-echo.socket");
        let (_waker, hop) = hop(&setting, address, &path);
        let (done, cpu) = client(&setting, depth, |io| io.connect_unix(&path));
        let roles = [("client", cpu), ("hop", hop.join().expect("hop")), ("server", server.join().expect("server"))];
        report("unix, hop, TCP, device", depth, &setting, done, &roles);
        std::fs::remove_file(&path).expect("socket file");
    }
    std::fs::remove_file(&setting.device).expect("device file");
}
