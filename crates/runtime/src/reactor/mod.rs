//! The reactor: one io_uring and one application on one thread.
//!
//! Role: delivers what happened (sockets, devices, timers, wake-ups) to its [`App`] and carries out what that asks of
//! its [`Io`]. It decides nothing. One batch is: sleep until something completes, deliver every completion, let the
//! application flush ([`App::on_batch_end`]), submit all that it asked for with the system call that sleeps again.
//!
//! Invariants
//! 1. The kernel owns the memory of an operation until its completion: connections, sinks and disk operations outlive
//!    their use by the application, and what can't be drained at the end is leaked.
//! 2. Events of one connection arrive in the order of its bytes; none after `close`, `abort`, `Closed` or
//!    `ConnectFailed`.
//! 3. Without anything to do the thread sleeps: no polling, no periodic timer.
//!
//! Limits: see [`Config`], `ring.rs` and `disk.rs`.
//!
//! Faults: an error of a connection or device is an event; an error of the ring itself ends [`Reactor::run`].

mod arena;
mod conn;
mod disk;
mod io;
mod outbox;
mod patience;
mod processor;
mod ring;
mod socket;
mod spin;
mod table;
mod turns;

pub use disk::{DiskError, DiskFault, DiskVerb};
pub use io::Io;
pub use processor::ProcessorShare;
pub use socket::ListenError;
pub use turns::Turn;

use crate::clock;
use crate::mailbox::Waker;
use crate::signals;
use arena::Arena;
use conn::{Conn, Receiving, State, conn_error};
use holdfast_base::time::earliest;
use holdfast_base::{Buf, BufMut, Instant, Token};
use io_uring::{cqueue, opcode, types};
use ring::{Completion, Kind, Ring, Wait};
use spin::Spin;
use std::net::SocketAddr;
use std::os::fd::{FromRawFd, OwnedFd};
use std::time::Duration;
use table::index_of;
use thiserror::Error;
use turns::Timed;

/// Names one connection; a name is not used again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ConnId(Token);

/// Names one listening socket.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ListenerId(u32);

/// Names one device of a reactor.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct DeviceSlot(u32);

/// The application's name for a disk operation; comes back with its event.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct DiskToken(pub u64);

/// Why a connection ended, or never began.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum ConnError {
    #[error("the peer closed the connection")]
    ByPeer,
    #[error("the connection was reset")]
    Reset,
    #[error("nobody listens there")]
    Refused,
    #[error("the peer did not answer in time")]
    TimedOut,
    #[error("the peer reads too slowly: too much is queued for it")]
    Overflow,
    #[error("system error {}", std::io::Error::from_raw_os_error(*.0))]
    System(i32),
}

#[derive(Debug)]
pub enum Event<'a> {
    Accepted {
        listener: ListenerId,
        conn: ConnId,
        /// For people: the peer's address, or process.
        peer: String,
        /// Of a TCP connection.
        address: Option<SocketAddr>,
        /// The process at the other end of a unix socket, where the kernel tells.
        process: Option<u32>,
    },
    /// Somebody was turned away: the listener has as many connections as it may ([`Io::set_accepted_max`]).
    TurnedAway {
        listener: ListenerId,
        peer: String,
    },
    Connected {
        conn: ConnId,
    },
    ConnectFailed {
        conn: ConnId,
        error: ConnError,
    },
    /// The next bytes of a connection; the application takes all of them, and may change them where they lie.
    Bytes {
        conn: ConnId,
        bytes: &'a mut [u8],
    },
    /// The buffer given to [`Io::recv_into`], full.
    Filled {
        conn: ConnId,
        buf: BufMut,
    },
    /// The connection is gone, and what was still queued for the peer with it.
    Closed {
        conn: ConnId,
        error: ConnError,
    },
    /// The connection has left this reactor ([`Io::detach`]), with what came and was not handed over: for [`Io::adopt`].
    Detached {
        conn: ConnId,
        socket: OwnedFd,
        bytes: Vec<u8>,
    },
    Read {
        token: DiskToken,
        result: Result<Buf, DiskError>,
    },
    Written {
        token: DiskToken,
        result: Result<(), DiskError>,
    },
    Discarded {
        token: DiskToken,
        result: Result<(), DiskError>,
    },
    /// [`App::next_deadline`] has come.
    Timer,
    /// A mailbox of this reactor may hold messages.
    Wake,
    /// SIGTERM or SIGINT, where the configuration asks for them.
    Shutdown {
        signal: i32,
    },
}

/// What a reactor drives: glue between events and machines. Runs to completion, never blocks.
pub trait App {
    fn on_event(&mut self, now: Instant, event: Event<'_>, io: &mut Io);

    /// Every event of a batch has been delivered: what was gathered leaves now, before the reactor sleeps.
    fn on_batch_end(&mut self, now: Instant, io: &mut Io);

    /// When [`Event::Timer`] is due. One that has passed must move on when it is delivered, or the reactor spins.
    fn next_deadline(&self) -> Option<Instant>;

    /// Whose the last turn was, and what was done in it, for people: asked where it took long.
    fn cause(&self) -> Option<String> {
        None
    }

    /// A turn took long, and so did some before that were not told of.
    fn on_long_turn(&mut self, _turn: &Turn, _untold: u64) {}
}

impl Event<'_> {
    /// For people.
    fn kind(&self) -> &'static str {
        match self {
            Event::Accepted { .. } | Event::TurnedAway { .. } => "a client comes",
            Event::Connected { .. } | Event::ConnectFailed { .. } | Event::Closed { .. } | Event::Detached { .. } => {
                "a connection changes"
            }
            Event::Bytes { .. } | Event::Filled { .. } => "bytes of a connection",
            Event::Read { .. } | Event::Written { .. } | Event::Discarded { .. } => "a device has done something",
            Event::Timer => "timer",
            Event::Wake => "wake-up",
            Event::Shutdown { .. } => "shutdown",
        }
    }
}

/// What can be set about a reactor.
#[derive(Clone, Debug)]
pub struct Config {
    /// Receive buffers of 64 KiB shared by all connections: a power of two up to 256. As many as connections that
    /// typically have bytes at the same moment; fewer only cost repeated receives.
    pub receive_buffers: u16,
    /// Accepted connections of one listener beyond this are closed at once, unless it is told another number.
    pub accepted_max: usize,
    /// Bytes that may wait for one peer before it is given up: a backstop far above what a well-made application
    /// lets gather.
    pub unsent_bytes_max: usize,
    /// A TCP peer that acknowledges nothing for so long is gone. Decisions are made long before, by the machines'
    /// deadlines. One whose window is closed is gone as well, unless [`Io::be_patient`] was asked for.
    pub peer_timeout: Duration,
    /// How long a closed connection may take to hand over what is queued.
    pub linger: Duration,
    /// How long to look for completions before sleeping; zero never looks. Pays where a core is free and the load is
    /// bound by latency; backs off by itself where it finds nothing.
    pub spin_max: Duration,
    /// Deliver SIGTERM and SIGINT as [`Event::Shutdown`]: for one reactor of a process.
    pub handles_signals: bool,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            receive_buffers: 32,
            accepted_max: 4096,
            unsent_bytes_max: 256 << 20,
            peer_timeout: Duration::from_secs(15),
            linger: Duration::from_secs(2),
            spin_max: Duration::ZERO,
            handles_signals: false,
        }
    }
}

/// Why there is no reactor, or no longer.
#[derive(Debug, Error)]
pub enum ReactorError {
    #[error(
        "cannot set up io_uring: {0}; it needs Linux 5.19 or newer, `sysctl kernel.io_uring_disabled` at 0, and a \
         container profile that allows io_uring system calls"
    )]
    SetUp(std::io::Error),
    #[error("io_uring failed: {0}; this is a bug or the machine is out of memory (see `dmesg`)")]
    Ring(std::io::Error),
}

/// Time to wait before accepting again when the process is out of descriptors or memory.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Time that dropping a reactor gives the kernel to let go of its operations.
const DRAIN_MAX: Duration = Duration::from_secs(2);

/// Owns the ring and everything that it works on. Lives and dies on the thread that made it.
pub struct Reactor {
    // Declared first, so that the ring goes before the memory it was told of.
    io: Io,
    arena: Option<Arena>,
    waker: Waker,
    wake_count: Box<[u8; 8]>,
    completions: Vec<Completion>,
    spin: Spin,
}

impl Reactor {
    /// Sets everything up, on the thread that will call [`Reactor::run`].
    pub fn new(config: Config) -> Result<Reactor, ReactorError> {
        let ring = Ring::new().map_err(ReactorError::SetUp)?;
        let arena = Arena::new(&ring, config.receive_buffers).map_err(ReactorError::SetUp)?;
        let waker = Waker::new().map_err(ReactorError::SetUp)?;
        if config.handles_signals {
            signals::route_to(&waker).map_err(ReactorError::SetUp)?;
        }
        let spin = Spin::new(config.spin_max);
        let mut reactor = Reactor {
            io: Io::new(ring, config, waker.clone()),
            arena: Some(arena),
            waker,
            wake_count: Box::new([0; 8]),
            completions: Vec::new(),
            spin,
        };
        reactor.arm_wake();
        Ok(reactor)
    }

    /// To set up listeners, connections and devices before the application runs.
    pub fn io(&mut self) -> &mut Io {
        &mut self.io
    }

    /// For mailboxes into this reactor.
    pub fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// Drives `app` until it calls [`Io::stop`].
    pub fn run<A: App>(&mut self, app: &mut A) -> Result<(), ReactorError> {
        self.io.is_stopping = false;
        let app = &mut Timed(app);
        let mut now = clock::now();
        self.io.processor.look(now);
        self.deliver_deferred(app, now);
        self.end_batch(app, now);
        while !self.io.is_stopping {
            self.sleep(app, now).map_err(ReactorError::Ring)?;
            now = clock::now();
            self.io.processor.look(now);
            self.deliver_completions(app, now);
            self.on_time(app, now);
            self.end_batch(app, now);
        }
        // What the last batch queued is at least handed to the kernel.
        self.io.ring.enter(Wait::No).map_err(ReactorError::Ring)
    }

    fn sleep<A: App>(&mut self, app: &A, now: Instant) -> std::io::Result<()> {
        let deadline = earliest(app.next_deadline(), self.io.own_deadline());
        let wait = match deadline {
            None => Wait::Forever,
            Some(at) => match at.since(clock::now()) {
                Duration::ZERO => Wait::No,
                span => Wait::AtMost(span),
            },
        };
        if wait != Wait::No && self.spin.is_due() {
            self.io.ring.enter(Wait::No)?;
            let until = earliest(deadline, Some(now + self.spin.span())).expect("one of them is there");
            let found = spin::until(until, || self.io.ring.is_stirring());
            self.spin.learn(found);
            if found {
                return self.io.ring.enter(Wait::No);
            }
        }
        self.io.ring.enter(wait)
    }

    fn deliver_completions<A: App>(&mut self, app: &mut A, now: Instant) {
        let mut completions = std::mem::take(&mut self.completions);
        self.io.ring.take(&mut completions);
        for completion in completions.drain(..) {
            match completion.kind {
                Kind::Receive => self.on_receive(app, now, completion),
                Kind::Send => self.on_send(completion),
                Kind::Disk => {
                    if let Some(event) = self.io.disks.on_complete(&mut self.io.ring, completion) {
                        app.on_event(now, event, &mut self.io);
                    }
                }
                Kind::Accept => self.on_accept(app, now, completion),
                Kind::Connect => self.on_connect(app, now, completion),
                Kind::Wake => self.on_wake(app, now),
                Kind::Ignored => {}
            }
            self.deliver_deferred(app, now);
        }
        self.completions = completions;
    }

    fn deliver_deferred<A: App>(&mut self, app: &mut A, now: Instant) {
        while let Some(event) = self.io.deferred.pop_front() {
            app.on_event(now, event, &mut self.io);
        }
    }

    fn on_time<A: App>(&mut self, app: &mut A, now: Instant) {
        if app.next_deadline().is_some_and(|at| at <= now) {
            app.on_event(now, Event::Timer, &mut self.io);
            self.deliver_deferred(app, now);
        }
        self.io.cut_lingering(now);
        self.io.look_at_watched(now);
        for index in 0..self.io.listeners.len() as u32 {
            if self.io.listeners[index as usize].retry_at.is_some_and(|at| at <= now) {
                self.io.arm_accept(index);
            }
        }
    }

    fn end_batch<A: App>(&mut self, app: &mut A, now: Instant) {
        loop {
            app.on_batch_end(now, &mut self.io);
            if self.io.deferred.is_empty() && self.io.resumed.is_empty() {
                break;
            }
            self.deliver_deferred(app, now);
            for conn in std::mem::take(&mut self.io.resumed) {
                self.on_resumed(app, now, conn);
                self.deliver_deferred(app, now);
            }
        }
        self.io.flush();
    }

    fn arm_wake(&mut self) {
        let fd = types::Fd(self.waker.raw_fd());
        let entry = opcode::Read::new(fd, self.wake_count.as_mut_ptr(), 8).build();
        // SAFETY: the counter is boxed, and leaked where it can't be drained.
        unsafe { self.io.ring.push(entry.user_data(Kind::Wake.tag(0))) };
    }

    fn on_wake<A: App>(&mut self, app: &mut A, now: Instant) {
        self.waker.rearm();
        self.arm_wake();
        if self.io.config.handles_signals
            && let Some(signal) = signals::take()
        {
            app.on_event(now, Event::Shutdown { signal }, &mut self.io);
        }
        app.on_event(now, Event::Wake, &mut self.io);
    }

    fn on_accept<A: App>(&mut self, app: &mut A, now: Instant, completion: Completion) {
        let index = completion.index;
        match completion.outcome() {
            Ok(fd) => {
                // SAFETY: the kernel has just made this descriptor for us.
                let socket = unsafe { OwnedFd::from_raw_fd(fd as i32) };
                self.admit(app, now, index, socket);
                if !completion.more() {
                    self.io.arm_accept(index);
                }
            }
            Err(_) if !completion.more() => {
                self.io.listeners[index as usize].retry_at = Some(now + ACCEPT_RETRY);
            }
            Err(_) => {}
        }
    }

    fn admit<A: App>(&mut self, app: &mut A, now: Instant, index: u32, socket: OwnedFd) {
        let listener = ListenerId(index);
        let (address, process, peer) = socket::accepted(&socket, self.io.config.peer_timeout);
        let at = &mut self.io.listeners[index as usize];
        if at.accepted >= at.accepted_max {
            drop(socket);
            return app.on_event(now, Event::TurnedAway { listener, peer }, &mut self.io);
        }
        at.accepted += 1;
        let mut conn = Conn::new(Some(socket), State::Open);
        conn.accepted_by = Some(listener);
        let token = self.io.conns.insert(conn);
        app.on_event(now, Event::Accepted { listener, conn: ConnId(token), peer, address, process }, &mut self.io);
        if self.io.conns.get(token).is_some() {
            self.io.arm_receive(index_of(token));
        }
    }

    fn on_connect<A: App>(&mut self, app: &mut A, now: Instant, completion: Completion) {
        let index = completion.index;
        let conn = ConnId(self.io.conns.token_at(index));
        let c = self.io.conns.at(index);
        c.address = None;
        if c.state == State::Dead {
            return self.io.free_if_done(index);
        }
        match completion.outcome() {
            Ok(_) => {
                c.state = State::Open;
                self.io.mark_dirty(index);
                self.io.arm_receive(index);
                app.on_event(now, Event::Connected { conn }, &mut self.io);
            }
            Err(e) => self.io.fail(conn, conn_error(&e)),
        }
    }

    fn on_send(&mut self, completion: Completion) {
        let index = completion.index;
        let conn = ConnId(self.io.conns.token_at(index));
        let c = self.io.conns.at(index);
        c.is_sending = false;
        if c.state == State::Dead {
            return self.io.free_if_done(index);
        }
        match completion.outcome() {
            Ok(count) => {
                c.outbox.on_sent(count);
                if c.outbox.unsent_bytes() > 0 {
                    self.io.mark_dirty(index);
                }
                self.io.finish_flush(index);
                if self.io.conns.get(conn.0).is_some() {
                    self.io.finish_detach(index);
                }
            }
            Err(e) if is_transient(&e) => self.io.mark_dirty(index),
            Err(e) => self.io.fail(conn, conn_error(&e)),
        }
    }

    fn on_receive<A: App>(&mut self, app: &mut A, now: Instant, completion: Completion) {
        let index = completion.index;
        let conn = ConnId(self.io.conns.token_at(index));
        let lent = cqueue::buffer_select(completion.flags);
        let c = self.io.conns.at(index);
        let receiving = std::mem::replace(&mut c.receiving, Receiving::Nothing);
        c.is_drained = !cqueue::sock_nonempty(completion.flags);
        match completion.outcome() {
            _ if c.state == State::Dead => self.io.free_if_done(index),
            Ok(0) if c.state == (State::Draining { flushed: false }) => c.is_ended = true,
            Ok(0) => self.io.fail(conn, ConnError::ByPeer),
            Ok(count) if receiving == Receiving::Sink => {
                let sink = c.sink.as_mut().expect("a sink stays while it is received into");
                sink.filled += count;
                self.deliver_filled(app, now, conn);
            }
            Ok(count) => {
                let id = lent.expect("bytes came in a buffer of the arena");
                let arena = self.arena.as_mut().expect("the arena is taken only at the end");
                deliver(app, now, conn, arena.bytes(id, count), &mut self.io);
            }
            Err(e) if is_transient(&e) => {}
            // Cancelled.
            Err(_) if c.state == State::Detaching => {}
            Err(e) => self.io.fail(conn, conn_error(&e)),
        }
        if let (Some(id), Some(arena)) = (lent, &mut self.arena) {
            arena.give_back(id);
        }
        if self.io.conns.get(conn.0).is_some() {
            self.io.arm_receive(index);
            self.io.finish_detach(index);
        }
    }

    fn deliver_filled<A: App>(&mut self, app: &mut A, now: Instant, conn: ConnId) {
        let c = self.io.conns.at(index_of(conn.0));
        let is_known = c.is_known();
        if let Some(buf) = c.take_full_sink()
            && is_known
        {
            app.on_event(now, Event::Filled { conn, buf }, &mut self.io);
        }
    }

    /// Hands over what came while the connection was paused.
    fn on_resumed<A: App>(&mut self, app: &mut A, now: Instant, conn: ConnId) {
        let Some(c) = self.io.conns.get_mut(conn.0) else { return };
        let mut stash = std::mem::take(&mut c.stash);
        if !stash.is_empty() {
            deliver(app, now, conn, &mut stash, &mut self.io);
        }
        if self.io.conns.get(conn.0).is_some() {
            self.io.arm_receive(index_of(conn.0));
        }
    }
}

/// Passes received bytes on: into the sink, to the application, or aside while paused. The application may change
/// which it is with every event.
fn deliver<A: App>(app: &mut A, now: Instant, conn: ConnId, bytes: &mut [u8], io: &mut Io) {
    let Some(c) = io.conns.get_mut(conn.0) else { return };
    c.is_delivering = true;
    deliver_parts(app, now, conn, bytes, io);
    if let Some(c) = io.conns.get_mut(conn.0) {
        c.is_delivering = false;
        io.finish_detach(index_of(conn.0));
    }
}

fn deliver_parts<A: App>(app: &mut A, now: Instant, conn: ConnId, mut bytes: &mut [u8], io: &mut Io) {
    while !bytes.is_empty() {
        let is_live = |c: &&mut Conn| matches!(c.state, State::Open | State::Detaching);
        let Some(c) = io.conns.get_mut(conn.0).filter(is_live) else { return };
        if c.sink.is_some() {
            let filled = c.fill_sink(bytes);
            bytes = &mut bytes[filled..];
            if let Some(buf) = c.take_full_sink() {
                app.on_event(now, Event::Filled { conn, buf }, io);
            }
        } else if c.is_paused || c.state == State::Detaching {
            c.stash.extend_from_slice(bytes);
            return;
        } else {
            return app.on_event(now, Event::Bytes { conn, bytes }, io);
        }
    }
}

/// Nothing happened, and trying again is right: an interruption, or receive buffers that are all in use this batch.
fn is_transient(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::ENOBUFS))
}

impl Drop for Reactor {
    fn drop(&mut self) {
        for token in self.io.conns.tokens() {
            self.io.kill(index_of(token));
        }
        let cancel = opcode::AsyncCancel2::new(types::CancelBuilder::any().all()).build();
        // SAFETY: a cancellation points to no memory.
        unsafe { self.io.ring.push(cancel.user_data(Kind::Ignored.tag(0))) };
        let give_up_at = clock::now() + DRAIN_MAX;
        let mut completions = Vec::new();
        while self.io.ring.in_flight() > 0 {
            let left = give_up_at.since(clock::now());
            if left == Duration::ZERO || self.io.ring.enter(Wait::AtMost(left)).is_err() {
                break;
            }
            self.io.ring.take(&mut completions);
        }
        if self.io.ring.in_flight() > 0 {
            // A device hangs: the kernel may still write to this memory, so nobody else may ever have it.
            self.io.leak_memory();
            std::mem::forget(self.arena.take());
            std::mem::forget(std::mem::take(&mut self.wake_count));
        }
    }
}
