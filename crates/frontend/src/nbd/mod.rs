//! One client's NBD session: owns what the protocol says on one connection, and promises one reply for every request.
//!
//! Role: the shell passes in what the client sent, what the volume answered and what has left the socket, and carries
//! out the [`Effect`]s in order. The session never does I/O, never waits, and knows a volume only as an export's name,
//! size and access.
//!
//! States
//!
//! | state | entered by | left by |
//! | --- | --- | --- |
//! | handshake: flags | `new` (greeting sent) | the client's flags → options; flags unknown → closed |
//! | handshake: options | flags; every answered option | `GO`, `EXPORT_NAME` → opening; `STARTTLS` → securing; `ABORT` → closed |
//! | | | an option whose export is elsewhere → moving; a broken stream → closed |
//! | handshake: opening | [`Effect::Open`] | `on_opened`: → serving, or refused → options (`GO`), closed (`EXPORT_NAME`) |
//! | handshake: moving | [`Effect::Move`] | `on_moved` → options, with the one that named the export |
//! | handshake: securing | [`Effect::StartTls`] | `on_tls_started` → options, with nothing negotiated |
//! | transmission: serving | `on_opened` | `DISC`, `on_shutdown` → draining; a broken stream → closed |
//! | transmission: draining | `DISC`, `on_shutdown` | last reply → closed |
//! | closed | [`Effect::Close`] | – |
//!
//! Invariants
//! 1. Every [`Effect::Request`] gets exactly one `on_reply` (asserted), and until the session is closed every request
//!    that the client sent gets exactly one answer, the client's cookie in it (`tests/nbd_conversation.rs`).
//! 2. The same bytes give the same effects, however the connection cuts them (`tests/nbd_conversation.rs`).
//! 3. A request that reaches the volume lies within the export and its limits, and writes only where that is allowed.
//! 4. Nothing negotiated in the clear survives `STARTTLS`, and bytes sent ahead of it break the session: otherwise a
//!    man in the middle could prepend options to the secured part.
//! 5. A buffer that [`Session::take_sink`] lends is the shell's until `give_sink`, also when the session closes
//!    meanwhile: the kernel may be writing there.
//!
//! Limits
//!
//! | what | size | why | when full |
//! | --- | --- | --- | --- |
//! | payload of a request | [`PAYLOAD_BYTES_MAX`] | what clients assume if nothing is negotiated | read, write refused |
//! | payload of a refused write | [`DRAIN_BYTES_MAX`] | what a sound client might try | closed |
//! | requests in flight | [`SessionConfig::in_flight_max`] | the depth of one busy disk | input waits |
//! | bytes in flight and unsent | [`SessionConfig::held_bytes_max`] plus one payload | a client that asks and never reads | input waits |
//! | data of an option | [`OPTION_DATA_BYTES_MAX`] | a dozen of the longest strings | skipped, refused |
//! | input not yet looked at | what the shell passes while input waits: one read | the shell can't give bytes back | – |
//! | extents of a status reply | [`STATUS_EXTENTS_MAX`] | half a MiB, a sixteenth of what the protocol advises | the rest is left to the client's next request |
//!
//! The session keeps no time. The shell bounds how long a handshake may take.
//!
//! Faults: a client that vanishes is the shell's to notice; it drops the session, and replies to requests in flight
//! with it. A failed request is an answer to the client (`transmission::errno_of` is the table) and no end of the
//! session. A reply of the volume that does not fit its request is a bug, and asserted.

mod contexts;
mod handshake;
#[cfg(test)]
mod harness;
mod transmission;
mod wire;

pub use handshake::OPTION_DATA_BYTES_MAX;
pub use transmission::{DRAIN_BYTES_MAX, PAYLOAD_BYTES_MAX, STATUS_EXTENTS_MAX};
pub use wire::Head;

use handshake::{Handshake, Opened};
use holdfast_base::{BlockReply, BlockRequest, Buf, BufMut, Effects, ExportInfo, ObjectId};
use std::fmt;
use transmission::Transmission;

/// What the shell does for a session, in the order given.
#[derive(Clone, Debug)]
pub enum Effect {
    /// Send these few bytes.
    Send(Head),
    /// Send these bytes, payload or anything longer than a head.
    SendBuf(Buf),
    /// Once everything before has been sent, wrap the connection in TLS as the server, then call
    /// [`Session::on_tls_started`]; if that fails, drop the connection.
    StartTls,
    /// Bind the volume of this export to the session, then call [`Session::on_opened`].
    Open { export: String },
    /// Once everything before has been sent, hand the connection and this session to where that export is, then call
    /// [`Session::on_moved`] there.
    Move { export: String },
    /// Pass this to the volume, and its reply to [`Session::on_reply`].
    Request(BlockRequest),
    /// Once everything before has been sent, close the connection. Nothing follows.
    Close,
}

/// What is on offer, to this client. The shell may show different clients different exports.
pub trait Exports {
    fn list(&self) -> Vec<ExportInfo>;
    fn find(&self, name: &str) -> Option<ExportInfo>;
    /// Of an export that this client may not have: what, why, and what to do. It is neither listed nor found.
    fn refusal(&self, _name: &str) -> Option<String> {
        None
    }
    /// Another part of the server has that export: the connection has to go there first.
    fn is_elsewhere(&self, _name: &str) -> bool {
        false
    }
    /// The snapshots from which changes of an export can be counted, with the names that clients know them by.
    fn snapshots(&self, export: &str) -> Vec<(String, ObjectId)>;
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum TlsPolicy {
    /// `STARTTLS` is refused.
    #[default]
    None,
    /// The client may secure the connection.
    Offered,
    /// The client learns nothing and opens nothing before it has secured the connection.
    Required,
}

#[derive(Clone, Debug)]
pub struct SessionConfig {
    pub tls: TlsPolicy,
    /// Requests that the volume may hold at a time.
    pub in_flight_max: usize,
    /// Payload of requests in flight, and bytes not yet sent, at which no further request is taken.
    pub held_bytes_max: u64,
    /// The export that the empty name stands for. Without one it is the only export there is, if there is just one.
    pub default_export: Option<String>,
}

impl Default for SessionConfig {
    fn default() -> Self {
        // Linux keeps 128 requests in flight on a connection, QEMU 16, libnbd's copy 64. Two of the largest payloads
        // keep a stream of large requests busy: one is served while the next arrives.
        let held_bytes_max = 2 * u64::from(PAYLOAD_BYTES_MAX);
        SessionConfig { tls: TlsPolicy::None, in_flight_max: 128, held_bytes_max, default_export: None }
    }
}

/// Why the shell did not bind a volume to the session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RefusalKind {
    /// There is no such export, or none that can be served now.
    Unknown,
    /// This client may not have it.
    Forbidden,
    ShuttingDown,
}

/// A refusal as the client's user will read it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Refusal {
    pub kind: RefusalKind,
    /// What, why, and what to do about it.
    pub message: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Refusal {}

/// The out-tray of both machines: counts what is sent, so that a client that doesn't read can't pile replies up.
struct Outbox<'a> {
    effects: &'a mut Effects<Effect>,
    unsent_bytes: &'a mut u64,
}

impl Outbox<'_> {
    fn send(&mut self, head: Head) {
        *self.unsent_bytes += head.len() as u64;
        self.effects.push(Effect::Send(head));
    }

    fn send_buf(&mut self, buf: Buf) {
        *self.unsent_bytes += buf.len() as u64;
        self.effects.push(Effect::SendBuf(buf));
    }

    fn push(&mut self, effect: Effect) {
        self.effects.push(effect);
    }
}

/// What became of input, or of the session after an event.
enum Step {
    /// So many bytes are dealt with.
    Taken(usize),
    /// None can be dealt with before another event.
    Waiting,
    Close,
}

enum Phase {
    Handshake(Handshake),
    Transmission(Transmission),
}

/// Bytes received while input had to wait.
#[derive(Default)]
struct Backlog {
    bytes: Vec<u8>,
    taken: usize,
}

impl Backlog {
    fn rest(&self) -> &[u8] {
        &self.bytes[self.taken..]
    }

    fn is_empty(&self) -> bool {
        self.rest().is_empty()
    }

    fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.taken);
        self.taken = 0;
        self.bytes.extend_from_slice(bytes);
    }

    fn advance(&mut self, count: usize) {
        self.taken += count;
        if self.is_empty() {
            // An idle session keeps no memory for a burst that has passed.
            *self = Backlog::default();
        }
    }
}

/// The machine of one connection; see the module for its states.
pub struct Session {
    config: SessionConfig,
    phase: Phase,
    backlog: Backlog,
    unsent_bytes: u64,
    closed: bool,
}

impl Session {
    /// A session for a connection just accepted: greets the client.
    pub fn new(config: SessionConfig, out: &mut Effects<Effect>) -> Session {
        assert!(config.in_flight_max > 0 && config.held_bytes_max > 0, "limits of zero serve nobody");
        let mut session = Session {
            config,
            phase: Phase::Handshake(Handshake::new()),
            backlog: Backlog::default(),
            unsent_bytes: 0,
            closed: false,
        };
        Outbox { effects: out, unsent_bytes: &mut session.unsent_bytes }.send(handshake::greeting());
        session
    }

    /// Bytes of the client. They are taken whole, also while [`Session::wants_input`] is false.
    pub fn on_bytes(&mut self, bytes: &[u8], exports: &dyn Exports, out: &mut Effects<Effect>) {
        if self.backlog.is_empty() {
            let taken = self.consume(bytes, exports, out);
            self.backlog.push(&bytes[taken..]);
        } else {
            self.backlog.push(bytes);
            self.resume(|session, bytes| session.consume(bytes, exports, out));
        }
    }

    /// Lends the buffer of a large payload, for the shell to receive into; see [`holdfast_base::stream::Inbound`].
    pub fn take_sink(&mut self) -> Option<(BufMut, usize)> {
        match &mut self.phase {
            Phase::Transmission(transmission) if !self.closed => {
                let sink = transmission.take_sink()?;
                assert!(self.backlog.is_empty(), "a payload takes all the bytes that have come");
                Some(sink)
            }
            _ => None,
        }
    }

    /// The buffer lent comes back, with its first `filled` bytes in place.
    pub fn give_sink(&mut self, buf: BufMut, filled: usize, out: &mut Effects<Effect>) {
        let Phase::Transmission(transmission) = &mut self.phase else { panic!("no sink was lent") };
        transmission.give_sink(buf, filled, &mut Outbox { effects: out, unsent_bytes: &mut self.unsent_bytes });
    }

    /// `count` bytes of this session's sends have left for the client.
    pub fn on_sent(&mut self, count: usize, exports: &dyn Exports, out: &mut Effects<Effect>) {
        self.unsent_bytes = self.unsent_bytes.checked_sub(count as u64).expect("only what was sent has left");
        self.resume(|session, bytes| session.consume(bytes, exports, out));
    }

    /// The volume has answered a request.
    pub fn on_reply(&mut self, reply: BlockReply, out: &mut Effects<Effect>) {
        let Phase::Transmission(transmission) = &mut self.phase else { panic!("a reply without a request") };
        if self.closed {
            transmission.forget(reply.token);
            return;
        }
        let mut outbox = Outbox { effects: out, unsent_bytes: &mut self.unsent_bytes };
        if let Step::Close = transmission.on_reply(reply, &mut outbox) {
            self.close(out);
        }
        self.resume(|session, bytes| session.consume_requests(bytes, out));
    }

    /// The shell has bound the export of [`Effect::Open`] to this session, or has not.
    pub fn on_opened(&mut self, result: Result<ExportInfo, Refusal>, exports: &dyn Exports, out: &mut Effects<Effect>) {
        if self.closed {
            return;
        }
        let Phase::Handshake(handshake) = &mut self.phase else { panic!("only a handshake opens an export") };
        let mut outbox = Outbox { effects: out, unsent_bytes: &mut self.unsent_bytes };
        match handshake.on_opened(result, &mut outbox) {
            Opened::Serving(terms) => {
                self.phase = Phase::Transmission(Transmission::new(terms, self.config.in_flight_max));
            }
            Opened::Refused => {}
            Opened::Close => self.close(out),
        }
        self.resume(|session, bytes| session.consume(bytes, exports, out));
    }

    /// The session is where the export is that it asked for: goes on with the option that named it.
    pub fn on_moved(&mut self, exports: &dyn Exports, out: &mut Effects<Effect>) {
        if self.closed {
            return;
        }
        let Phase::Handshake(handshake) = &mut self.phase else { panic!("only a handshake moves") };
        let mut outbox = Outbox { effects: out, unsent_bytes: &mut self.unsent_bytes };
        if let Some(Step::Close) = handshake.on_moved(&self.config, exports, &mut outbox) {
            self.close(out);
        }
        self.resume(|session, bytes| session.consume(bytes, exports, out));
    }

    /// The connection is wrapped in TLS, and bytes are its plain text from now on.
    pub fn on_tls_started(&mut self) {
        if self.closed {
            return;
        }
        let Phase::Handshake(handshake) = &mut self.phase else { panic!("only a handshake starts TLS") };
        handshake.on_tls_started();
    }

    /// The server stops: requests in flight are finished, no further one is taken, and then the connection closes. A
    /// client still in its handshake is told with its next option; the shell bounds how long that may take.
    pub fn on_shutdown(&mut self, out: &mut Effects<Effect>) {
        if self.closed {
            return;
        }
        match &mut self.phase {
            Phase::Handshake(handshake) => handshake.on_shutdown(),
            Phase::Transmission(transmission) => {
                if let Step::Close = transmission.on_shutdown() {
                    self.close(out);
                }
            }
        }
    }

    /// Whether the shell should receive. Until a reply, a send or an answer changes it, more input could only queue.
    pub fn wants_input(&self) -> bool {
        !self.closed
            && self.backlog.is_empty()
            && match &self.phase {
                Phase::Handshake(handshake) => handshake.wants_input(self.room_bytes() > 0),
                Phase::Transmission(transmission) => transmission.wants_input(self.room_bytes()),
            }
    }

    /// Requests that the volume holds.
    pub fn in_flight(&self) -> usize {
        match &self.phase {
            Phase::Handshake(_) => 0,
            Phase::Transmission(transmission) => transmission.in_flight(),
        }
    }

    /// Bytes that the session makes the process hold: payload in flight, replies unsent, input not yet looked at.
    pub fn held_bytes(&self) -> u64 {
        let in_flight_bytes = match &self.phase {
            Phase::Handshake(_) => 0,
            Phase::Transmission(transmission) => transmission.in_flight_bytes(),
        };
        in_flight_bytes + self.unsent_bytes + self.backlog.rest().len() as u64
    }

    /// Changes how much may be held from now on (more than zero); what is in flight stays.
    pub fn set_held_bytes_max(&mut self, bytes: u64) {
        assert!(bytes > 0, "a limit of zero serves nobody");
        self.config.held_bytes_max = bytes;
    }

    /// What replies not yet sent leave of the bytes that may be held.
    fn room_bytes(&self) -> u64 {
        self.config.held_bytes_max.saturating_sub(self.unsent_bytes)
    }

    fn close(&mut self, out: &mut Effects<Effect>) {
        assert!(!self.closed, "a session closes once");
        self.closed = true;
        self.backlog = Backlog::default();
        out.push(Effect::Close);
    }

    /// Goes on with input that had to wait, if there is any.
    fn resume(&mut self, consume: impl FnOnce(&mut Session, &[u8]) -> usize) {
        if self.backlog.is_empty() {
            return;
        }
        let mut backlog = std::mem::take(&mut self.backlog);
        let taken = consume(self, backlog.rest());
        backlog.advance(taken);
        self.backlog = backlog;
    }

    /// Deals with as many of `bytes` as it can now; returns how many.
    fn consume(&mut self, bytes: &[u8], exports: &dyn Exports, out: &mut Effects<Effect>) -> usize {
        match &self.phase {
            Phase::Handshake(_) => self.consume_options(bytes, exports, out),
            Phase::Transmission(_) => self.consume_requests(bytes, out),
        }
    }

    fn consume_options(&mut self, bytes: &[u8], exports: &dyn Exports, out: &mut Effects<Effect>) -> usize {
        let mut taken = 0;
        while taken < bytes.len() && !self.closed {
            let may_send = self.room_bytes() > 0;
            let Phase::Handshake(handshake) = &mut self.phase else { unreachable!("only on_opened ends a handshake") };
            let mut outbox = Outbox { effects: out, unsent_bytes: &mut self.unsent_bytes };
            match handshake.on_bytes(&bytes[taken..], &self.config, exports, may_send, &mut outbox) {
                Step::Taken(count) => taken += count,
                Step::Waiting => return taken,
                Step::Close => self.close(out),
            }
        }
        if self.closed { bytes.len() } else { taken }
    }

    fn consume_requests(&mut self, bytes: &[u8], out: &mut Effects<Effect>) -> usize {
        let mut taken = 0;
        while taken < bytes.len() && !self.closed {
            let room_bytes = self.room_bytes();
            let Phase::Transmission(transmission) = &mut self.phase else {
                unreachable!("transmission lasts to the end")
            };
            let mut outbox = Outbox { effects: out, unsent_bytes: &mut self.unsent_bytes };
            match transmission.on_bytes(&bytes[taken..], room_bytes, &mut outbox) {
                Step::Taken(count) => taken += count,
                Step::Waiting => return taken,
                Step::Close => self.close(out),
            }
        }
        if self.closed { bytes.len() } else { taken }
    }
}

/// Moves bytes from the front of `bytes` to `head` until it has `want`; returns how many.
fn gather(head: &mut Vec<u8>, want: usize, bytes: &[u8]) -> usize {
    let count = want.saturating_sub(head.len()).min(bytes.len());
    head.extend_from_slice(&bytes[..count]);
    count
}
