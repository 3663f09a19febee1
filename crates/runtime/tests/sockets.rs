//! The reactor over real sockets: sinks, many connections, ends in every state, pausing, slow peers.

mod support;

use holdfast_base::stream::SINK_BYTES_MIN;
use holdfast_base::{BufMut, Prng};
use holdfast_runtime::mailbox::mailbox;
use holdfast_runtime::reactor::{Config, ConnError};
use holdfast_runtime::{ConnId, Event, Io};
use socket2::{Domain, Socket, Type};
use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;
use support::{pattern, run};

fn loopback() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

/// Length-prefixed frames, echoed: payloads of some size go through a sink.
#[derive(Default)]
struct Framing {
    header: Vec<u8>,
    payload: Option<(BufMut, usize)>,
}

impl Framing {
    fn on_bytes(&mut self, conn: ConnId, mut bytes: &[u8], io: &mut Io) {
        while !bytes.is_empty() {
            if let Some((mut payload, filled)) = self.payload.take() {
                let count = bytes.len().min(payload.len() - filled);
                payload[filled..filled + count].copy_from_slice(&bytes[..count]);
                bytes = &bytes[count..];
                self.on_progress(conn, payload, filled + count, bytes.is_empty(), io);
                continue;
            }
            let count = bytes.len().min(4 - self.header.len());
            self.header.extend_from_slice(&bytes[..count]);
            bytes = &bytes[count..];
            if self.header.len() == 4 {
                let len = u32::from_le_bytes(self.header[..].try_into().unwrap()) as usize;
                self.header.clear();
                self.on_progress(conn, BufMut::new(len), 0, bytes.is_empty(), io);
            }
        }
    }

    fn on_progress(&mut self, conn: ConnId, payload: BufMut, filled: usize, is_last: bool, io: &mut Io) {
        if filled == payload.len() {
            io.send(conn, &(payload.len() as u32).to_le_bytes());
            io.send_buf(conn, payload.freeze());
        } else if is_last && payload.len() - filled >= SINK_BYTES_MIN {
            io.recv_into(conn, payload, filled);
        } else {
            self.payload = Some((payload, filled));
        }
    }
}

fn frame_client(mut stream: impl Read + Write, seed: u64, frames: usize, len_max: u64) {
    let mut prng = Prng::new(seed);
    for n in 0..frames {
        // Several frames in flight at once, so that a sink ends in the middle of what the kernel holds.
        let lens: Vec<usize> = (0..1 + n % 3).map(|_| prng.below(len_max) as usize).collect();
        let mut out = Vec::new();
        for (i, len) in lens.iter().enumerate() {
            out.extend((*len as u32).to_le_bytes());
            out.extend(pattern(seed ^ i as u64, *len));
        }
        stream.write_all(&out).unwrap();
        let mut back = vec![0; out.len()];
        stream.read_exact(&mut back).unwrap();
        assert!(back == out, "frame {n} of seed {seed} came back changed");
    }
}

#[test]
fn frames_of_all_sizes_come_back_whole_over_many_connections() {
    const CLIENTS: usize = 24;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    type State = (HashMap<ConnId, Framing>, usize, Vec<thread::JoinHandle<()>>);
    let (conns, ended, clients) = run(
        Config { receive_buffers: 8, ..Config::default() },
        |reactor| -> State {
            let (_, address) = reactor.io().listen_tcp(loopback()).unwrap();
            reactor.io().listen_unix(&path).unwrap();
            let start = |n: usize| {
                let path = path.clone();
                thread::spawn(move || {
                    let (seed, len_max) = (n as u64, if n.is_multiple_of(4) { 1 << 20 } else { 20_000 });
                    if n.is_multiple_of(2) {
                        frame_client(TcpStream::connect(address).unwrap(), seed, 20, len_max);
                    } else {
                        frame_client(UnixStream::connect(path).unwrap(), seed, 20, len_max);
                    }
                })
            };
            (HashMap::new(), 0, (0..CLIENTS).map(start).collect())
        },
        |(conns, ended, _), event, io| match event {
            Event::Accepted { conn, peer, .. } => {
                assert!(!peer.is_empty());
                conns.insert(conn, Framing::default());
            }
            Event::Bytes { conn, bytes } => conns.get_mut(&conn).unwrap().on_bytes(conn, bytes, io),
            Event::Filled { conn, buf } => {
                let filled = buf.len();
                conns.get_mut(&conn).unwrap().on_progress(conn, buf, filled, true, io);
            }
            Event::Closed { conn, error } => {
                assert_eq!(error, ConnError::ByPeer);
                conns.remove(&conn).unwrap();
                *ended += 1;
                if *ended == CLIENTS {
                    io.stop();
                }
            }
            other => panic!("{other:?}"),
        },
    );
    assert!(conns.is_empty());
    assert_eq!(ended, CLIENTS);
    clients.into_iter().for_each(|c| c.join().unwrap());
}

#[test]
fn a_reactor_talks_to_itself_and_learns_of_refusals() {
    #[derive(Default)]
    struct State {
        to_self: Option<ConnId>,
        refused: Vec<ConnId>,
        heard: Vec<u8>,
    }
    let dir = tempfile::tempdir().unwrap();
    // An address that nobody else can have meanwhile, and where nobody listens.
    let taken = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    taken.bind(&loopback().into()).unwrap();
    let dead = taken.local_addr().unwrap().as_socket().unwrap();
    let state = run(
        Config::default(),
        |reactor| {
            let (_, address) = reactor.io().listen_tcp(loopback()).unwrap();
            let to_self = reactor.io().connect_tcp(address);
            reactor.io().send(to_self, b"queued before connected");
            let refused = vec![reactor.io().connect_tcp(dead), reactor.io().connect_unix(&dir.path().join("nobody"))];
            State { to_self: Some(to_self), refused, ..State::default() }
        },
        |state, event, io| {
            match event {
                Event::Accepted { .. } => {}
                Event::Connected { conn } => assert_eq!(Some(conn), state.to_self),
                Event::ConnectFailed { conn, error } => {
                    assert!(state.refused.contains(&conn));
                    assert!(matches!(error, ConnError::Refused | ConnError::System(libc::ENOENT)), "{error}");
                    state.refused.retain(|c| *c != conn);
                }
                Event::Bytes { bytes, .. } => state.heard.extend_from_slice(bytes),
                other => panic!("{other:?}"),
            }
            if state.refused.is_empty() && state.heard == b"queued before connected" {
                io.stop();
            }
        },
    );
    assert_eq!(state.heard, b"queued before connected");
}

#[test]
fn a_close_hands_over_everything_first() {
    let payload = pattern(1, 8 << 20);
    let (client, _) = run(
        Config::default(),
        |reactor| {
            let (_, address) = reactor.io().listen_tcp(loopback()).unwrap();
            let want = payload.clone();
            let waker = reactor.waker();
            let (tx, rx) = mailbox::<()>(waker, 1);
            let client = thread::spawn(move || {
                let mut stream = TcpStream::connect(address).unwrap();
                // Unread by the peer when it closes: its close must not turn into a reset that eats the payload.
                stream.write_all(&[1; 1000]).unwrap();
                let mut got = Vec::new();
                stream.read_to_end(&mut got).unwrap();
                assert!(got == want, "{} bytes of {}", got.len(), want.len());
                drop(stream);
                tx.post(()).unwrap();
            });
            (client, rx)
        },
        |(_, rx), event, io| match event {
            Event::Accepted { conn, .. } => {
                io.send_vec(conn, payload.clone());
                io.close(conn);
                assert_eq!(io.unsent_bytes(conn), Some(payload.len()));
            }
            Event::Wake if !rx.drain().is_empty() => io.stop(),
            Event::Wake => {}
            other => panic!("{other:?}"),
        },
    );
    client.join().unwrap();
}

#[test]
fn ends_with_operations_in_flight_are_harmless() {
    // Each accepted connection lends a sink and queues more than the kernel takes; then the peer vanishes, or the
    // application aborts, or the reactor itself is dropped.
    const CONNS: usize = 30;
    const CLOSED_MIN: usize = 5;
    let (streams, closed, _) = run(
        Config::default(),
        |reactor| {
            let (_, address) = reactor.io().listen_tcp(loopback()).unwrap();
            let streams: Vec<_> = (0..CONNS).map(|_| TcpStream::connect(address).unwrap()).collect();
            (streams, 0, Vec::new())
        },
        |(streams, closed, conns), event, io| match event {
            Event::Accepted { conn, .. } => {
                io.recv_into(conn, BufMut::new(1 << 20), 0);
                io.send_vec(conn, vec![1; 16 << 20]);
                conns.push(conn);
                if conns.len() == CONNS {
                    for conn in &conns[..CONNS / 3] {
                        io.abort(*conn);
                        io.send(*conn, b"to nobody");
                        assert_eq!(io.unsent_bytes(*conn), None);
                    }
                    for stream in &mut *streams {
                        let _ = stream.write_all(&[1; 5000]);
                    }
                    streams.truncate(CONNS / 2);
                }
            }
            Event::Closed { conn, .. } => {
                assert!(!conns[..CONNS / 3].contains(&conn), "no event after abort");
                *closed += 1;
                if *closed >= CLOSED_MIN {
                    io.stop();
                }
            }
            other => panic!("{other:?}"),
        },
    );
    assert_eq!(streams.len(), CONNS / 2);
    assert!((CLOSED_MIN..=CONNS / 2).contains(&closed), "{closed} closed");
}

#[test]
fn a_paused_connection_gives_nothing_until_resumed_and_loses_nothing() {
    const TOTAL: usize = 24 << 20;
    struct State {
        client: thread::JoinHandle<()>,
        mail: holdfast_runtime::mailbox::Receiver<()>,
        tx: holdfast_runtime::mailbox::Sender<()>,
        conn: Option<ConnId>,
        is_paused: bool,
        got: Vec<u8>,
        pauses: usize,
    }
    let payload = pattern(5, TOTAL);
    let state = run(
        Config::default(),
        |reactor| {
            let (_, address) = reactor.io().listen_tcp(loopback()).unwrap();
            let (tx, mail) = mailbox(reactor.waker(), 16);
            let bytes = payload.clone();
            let client = thread::spawn(move || TcpStream::connect(address).unwrap().write_all(&bytes).unwrap());
            State { client, mail, tx, conn: None, is_paused: false, got: Vec::new(), pauses: 0 }
        },
        |state, event, io| match event {
            Event::Accepted { conn, .. } => state.conn = Some(conn),
            Event::Bytes { conn, bytes } => {
                assert!(!state.is_paused, "bytes of a paused connection");
                state.got.extend_from_slice(bytes);
                if state.got.len() / (4 << 20) > state.pauses {
                    state.pauses += 1;
                    state.is_paused = true;
                    io.pause_reading(conn, true);
                    if state.pauses % 2 == 1 {
                        // Resumed in the same breath, and paused again: only the last word counts.
                        io.pause_reading(conn, false);
                        io.pause_reading(conn, true);
                    }
                    let tx = state.tx.clone();
                    thread::spawn(move || tx.post(()).unwrap());
                }
            }
            Event::Wake if !state.mail.drain().is_empty() => {
                state.is_paused = false;
                io.pause_reading(state.conn.unwrap(), false);
            }
            Event::Wake => {}
            Event::Closed { .. } => io.stop(),
            other => panic!("{other:?}"),
        },
    );
    state.client.join().unwrap();
    assert!(state.got == payload, "{} bytes of {TOTAL}", state.got.len());
    assert!(state.pauses >= 5);
}

#[test]
fn a_peer_that_stops_reading_is_given_up_at_the_bound() {
    const BOUND: usize = 32 << 20;
    let (_, sent) = run(
        Config { unsent_bytes_max: BOUND, ..Config::default() },
        |reactor| {
            let (_, address) = reactor.io().listen_tcp(loopback()).unwrap();
            (TcpStream::connect(address).unwrap(), 0)
        },
        |(_, sent), event, io| match event {
            Event::Accepted { conn, .. } => {
                while io.unsent_bytes(conn).is_some_and(|left| left > *sent) || *sent == 0 {
                    *sent = io.unsent_bytes(conn).expect("it is open");
                    assert!(*sent <= BOUND);
                    io.send_vec(conn, vec![0; 1 << 20]);
                }
            }
            Event::Closed { error, .. } => {
                assert_eq!(error, ConnError::Overflow);
                io.stop();
            }
            other => panic!("{other:?}"),
        },
    );
    assert!(sent > BOUND / 2);
}

/// From here on the stream's machine might as well be cut off: its kernel drops whatever comes for it.
fn vanish(stream: &TcpStream) {
    let mut drop_all = libc::sock_filter { code: (libc::BPF_RET | libc::BPF_K) as u16, jt: 0, jf: 0, k: 0 };
    let program = libc::sock_fprog { len: 1, filter: &raw mut drop_all };
    // SAFETY: the program is one instruction, and outlives the call, which copies it.
    let set = unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            (&raw const program).cast(),
            size_of::<libc::sock_fprog>() as libc::socklen_t,
        )
    };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
}

const PEER_TIMEOUT: Duration = Duration::from_secs(3);

/// Three clients that ask for something and don't read it.
fn pausing_clients(
    address: SocketAddr,
    want: Vec<u8>,
    [first, second]: [Arc<AtomicBool>; 2],
) -> Vec<thread::JoinHandle<TcpStream>> {
    let ask = move |what: &[u8]| {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(what).unwrap();
        stream
    };
    vec![
        // It is back after a pause, gets all, and vanishes with bytes on their way to it.
        thread::spawn(move || {
            let mut stream = ask(b"1");
            thread::sleep(3 * PEER_TIMEOUT);
            let mut got = vec![0; want.len()];
            stream.read_exact(&mut got).unwrap();
            assert!(got == want, "bytes have changed");
            first.store(true, Ordering::SeqCst);
            vanish(&stream);
            stream.write_all(b"1").unwrap();
            stream
        }),
        // It vanishes in its pause.
        thread::spawn(move || {
            let stream = ask(b"2");
            thread::sleep(2 * PEER_TIMEOUT);
            second.store(true, Ordering::SeqCst);
            vanish(&stream);
            stream
        }),
        // Nobody is patient with it.
        thread::spawn(move || ask(b"3")),
    ]
}

#[test]
fn a_patient_connection_outlasts_a_pause_of_its_reader_but_not_its_machine() {
    const TOTAL: usize = 24 << 20;
    struct State {
        clients: Vec<thread::JoinHandle<TcpStream>>,
        kinds: HashMap<ConnId, u8>,
        /// Of the first and the second client: they have vanished.
        vanished: [Arc<AtomicBool>; 2],
        ended: usize,
    }
    let payload = pattern(9, TOTAL);
    let state = run(
        Config { peer_timeout: PEER_TIMEOUT, ..Config::default() },
        |reactor| {
            let (_, address) = reactor.io().listen_tcp(loopback()).unwrap();
            let vanished: [Arc<AtomicBool>; 2] = Default::default();
            let clients = pausing_clients(address, payload.clone(), vanished.clone());
            State { clients, kinds: HashMap::new(), vanished, ended: 0 }
        },
        |state, event, io| match event {
            Event::Accepted { .. } => {}
            Event::Bytes { conn, bytes } => {
                let kind = bytes[0];
                state.kinds.insert(conn, kind);
                if kind != b'3' {
                    io.be_patient(conn);
                }
                io.send_vec(conn, payload.clone());
            }
            Event::Closed { conn, error } => {
                // The send under way may hear of it first, and hears less.
                assert!(matches!(error, ConnError::TimedOut | ConnError::Reset), "{error}");
                let kind = state.kinds[&conn];
                if let Some(vanished) = state.vanished.get(usize::from(kind - b'1')) {
                    assert!(vanished.load(Ordering::SeqCst), "client {} was there", char::from(kind));
                }
                state.ended += 1;
                if state.ended == 3 {
                    io.stop();
                }
            }
            other => panic!("{other:?}"),
        },
    );
    for client in state.clients {
        client.join().unwrap();
    }
}

#[test]
fn connections_beyond_the_bound_of_a_listener_are_turned_away_and_others_are_not() {
    let (streams, accepted, turned_away) = run(
        Config { accepted_max: 2, ..Config::default() },
        |reactor| {
            let (_, address) = reactor.io().listen_tcp(loopback()).unwrap();
            let (wide, other) = reactor.io().listen_tcp(loopback()).unwrap();
            reactor.io().set_accepted_max(wide, 3);
            let waker = reactor.waker();
            let streams = thread::spawn(move || {
                let mut streams: Vec<_> = (0..4).map(|_| TcpStream::connect(address).unwrap()).collect();
                // The last two end at once; the first two stay.
                for stream in &mut streams[2..] {
                    assert_eq!(stream.read(&mut [0; 1]).unwrap_or(0), 0);
                }
                let others: Vec<_> = (0..4).map(|_| TcpStream::connect(other).unwrap()).collect();
                assert_eq!((&others[3]).read(&mut [0; 1]).unwrap_or(0), 0);
                waker.wake();
                (streams, others)
            });
            (streams, 0, 0)
        },
        |(_, accepted, turned_away), event, io| match event {
            Event::Accepted { address, .. } => {
                assert!(address.is_some());
                *accepted += 1;
            }
            Event::TurnedAway { .. } => *turned_away += 1,
            Event::Wake => io.stop(),
            other => panic!("{other:?}"),
        },
    );
    assert_eq!((accepted, turned_away), (5, 3));
    streams.join().unwrap();
}

#[test]
fn a_stale_socket_file_is_replaced_and_a_live_one_respected() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    run(
        Config::default(),
        |reactor| {
            reactor.io().listen_unix(&path).unwrap();
            let error = reactor.io().listen_unix(&path).unwrap_err();
            assert!(error.to_string().contains("in use"), "{error}");
            let file = dir.path().join("file");
            std::fs::write(&file, b"data").unwrap();
            assert!(reactor.io().listen_unix(&file).unwrap_err().to_string().contains("no socket"));
            reactor.waker().wake();
        },
        |(), event, io| {
            if matches!(event, Event::Wake) {
                io.stop();
            }
        },
    );
}

/// Echoes what comes, on a thread of its own, over connections that another reactor has handed over.
fn adopting(
    socks: std::sync::mpsc::Receiver<(std::os::fd::OwnedFd, Vec<u8>)>,
) -> (thread::JoinHandle<usize>, impl Fn()) {
    let (told, is_told) = std::sync::mpsc::sync_channel(1);
    let thread = thread::spawn(move || {
        run(
            Config::default(),
            |reactor| {
                told.send(reactor.waker()).unwrap();
                (socks, 0)
            },
            |(socks, ended), event, io| match event {
                Event::Wake => {
                    while let Ok((socket, bytes)) = socks.try_recv() {
                        let conn = io.adopt(socket);
                        io.send(conn, &bytes);
                    }
                }
                Event::Bytes { conn, bytes } => io.send(conn, bytes),
                Event::Closed { .. } => {
                    *ended += 1;
                    if *ended == 2 {
                        io.stop();
                    }
                }
                other => panic!("{other:?}"),
            },
        )
        .1
    });
    let waker = is_told.recv().unwrap();
    (thread, move || waker.wake())
}

#[test]
fn a_connection_that_is_handed_over_loses_no_byte_and_counts_no_more() {
    let (hand, socks) = std::sync::mpsc::channel();
    let (other, wake) = adopting(socks);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let (_, clients) = run(
        Config { accepted_max: 1, ..Config::default() },
        |reactor| {
            let (_, address) = reactor.io().listen_tcp(loopback()).unwrap();
            reactor.io().listen_unix(&path).unwrap();
            let talk = |mut stream: Box<dyn ReadWrite>| {
                stream.write_all(b"x").unwrap();
                let mut first = [0; 1];
                stream.read_exact(&mut first).unwrap();
                // Some of it comes before it has left, and some after.
                let sent = pattern(7, 300_000);
                let mut back = vec![0; sent.len()];
                for (part, back) in sent.chunks(1000).zip(back.chunks_mut(1000)) {
                    stream.write_all(part).unwrap();
                    stream.read_exact(back).unwrap();
                }
                assert!(back == sent && first == *b"a");
            };
            let path = path.clone();
            let clients = vec![
                thread::spawn(move || talk(Box::new(TcpStream::connect(address).unwrap()))),
                thread::spawn(move || talk(Box::new(UnixStream::connect(path).unwrap()))),
            ];
            (0, clients)
        },
        |(gone, _), event, io| match event {
            Event::Accepted { .. } => {}
            Event::Bytes { conn, .. } => {
                io.send(conn, b"a");
                io.detach(conn);
            }
            Event::Detached { conn, socket, bytes } => {
                assert_eq!(io.unsent_bytes(conn), None, "it is here no more");
                hand.send((socket, bytes)).unwrap();
                wake();
                *gone += 1;
                if *gone == 2 {
                    io.stop();
                }
            }
            other => panic!("{other:?}"),
        },
    );
    clients.into_iter().for_each(|client| client.join().unwrap());
    assert_eq!(other.join().unwrap(), 2);
}

#[test]
fn what_is_sent_while_a_connection_is_handed_over_leaves_before_it() {
    let (bytes, client) = run(
        Config::default(),
        |reactor| {
            let (_, address) = reactor.io().listen_tcp(loopback()).unwrap();
            let client = thread::spawn(move || {
                let mut stream = TcpStream::connect(address).unwrap();
                stream.write_all(b"x").unwrap();
                let mut answer = [0; 1];
                stream.read_exact(&mut answer).unwrap();
                answer
            });
            (None, Some(client))
        },
        |(left, _), event, io| match event {
            Event::Accepted { .. } => {}
            Event::Bytes { conn, .. } => {
                io.detach(conn);
                io.send(conn, b"a");
            }
            Event::Detached { bytes, .. } => {
                *left = Some(bytes);
                io.stop();
            }
            other => panic!("{other:?}"),
        },
    );
    assert_eq!(bytes.unwrap(), b"");
    assert_eq!(client.unwrap().join().unwrap(), *b"a");
}

#[test]
fn a_connection_that_ends_while_it_is_handed_over_is_told_of() {
    let (error, client) = run(
        Config::default(),
        |reactor| {
            let (_, address) = reactor.io().listen_tcp(loopback()).unwrap();
            let client = thread::spawn(move || {
                let mut stream = TcpStream::connect(address).unwrap();
                stream.write_all(b"x").unwrap();
                thread::sleep(Duration::from_millis(50));
                let socket = Socket::from(stream);
                socket.set_linger(Some(Duration::ZERO)).unwrap();
            });
            (None, Some(client))
        },
        |(error, _), event, io| match event {
            Event::Accepted { .. } => {}
            Event::Bytes { conn, .. } => {
                // More than the kernel takes, to one who does not read.
                io.send_vec(conn, vec![0; 64 << 20]);
                io.detach(conn);
            }
            Event::Closed { error: why, .. } => {
                *error = Some(why);
                io.stop();
            }
            other => panic!("{other:?}"),
        },
    );
    assert_eq!(error, Some(ConnError::Reset));
    client.unwrap().join().unwrap();
}

#[test]
fn a_connection_that_both_have_ended_is_gone_with_its_last_byte() {
    let sent = pattern(3, 16 << 20);
    let (_, client) = run(
        Config::default(),
        |reactor| {
            let (_, address) = reactor.io().listen_tcp(loopback()).unwrap();
            let waker = reactor.waker();
            let client = thread::spawn(move || {
                let mut stream = TcpStream::connect(address).unwrap();
                stream.write_all(b"x").unwrap();
                stream.shutdown(std::net::Shutdown::Write).unwrap();
                thread::sleep(Duration::from_millis(50));
                let mut all = Vec::new();
                stream.read_to_end(&mut all).unwrap();
                waker.wake();
                all
            });
            (0, Some(client))
        },
        |_, event, io| match event {
            Event::Accepted { .. } => {}
            Event::Bytes { conn, .. } => {
                io.send_vec(conn, pattern(3, 16 << 20));
                io.close(conn);
            }
            Event::Wake => io.stop(),
            other => panic!("{other:?}"),
        },
    );
    assert!(client.unwrap().join().unwrap() == sent);
}

trait ReadWrite: Read + Write {}
impl<T: Read + Write> ReadWrite for T {}
