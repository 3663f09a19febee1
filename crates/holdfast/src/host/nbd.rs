//! NBD clients of this host: sessions, and the sockets that they come by.
//!
//! Role: carries out what NBD sessions want. One that asked for an export gets a session of the [`holdfast_host::Host`], to
//! which its requests go, and whose replies come back here. Nothing of the host machine knows NBD, and nothing here knows
//! where a volume is.
//!
//! Limits: what [`HostPlaces`] says, shared by the sources of connections; [`HANDSHAKE_MAX`] for a handshake.
//! [`HELD_BYTES_MAX`] for what sessions hold, besides the one payload that each may have in any case.
//!
//! Faults: a client that vanishes leaves requests in flight; their replies find no session and are dropped.

use super::Shell;
use super::access::RefusalLog;
use super::client::Machine;
use super::reactors::Own;
use super::tls::Secured;
use holdfast_base::{BlockReply, Buf, BufMut, Effects, ExportInfo, GridId, Instant, ObjectId, Slab, Token};
use holdfast_format::forward::Client as Association;
use holdfast_frontend::nbd::{Effect, Exports, Refusal, RefusalKind, Session, SessionConfig, TlsPolicy};
use holdfast_host::{Caller, Connection, Denied, DeniedKind, Event, Handshakes, Host, HostPlaces, Source};
use holdfast_runtime::framed::REVOKED;
use holdfast_runtime::reactor::{ConnId, Io};
use holdfast_runtime::revoked::RevokedNow;
use holdfast_runtime::tls::TlsServer;
use std::cell::RefCell;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

/// What all sessions together may hold, but for one payload each: shared evenly, and no less than the least for each.
const HELD_BYTES_MAX: u64 = 512 << 20;
const HELD_BYTES_LEAST: u64 = 1 << 20;

/// How long a client may take until it has opened an export.
const HANDSHAKE_MAX: Duration = Duration::from_secs(30);

const WITHOUT_TLS: &str = "it does not secure its connection; connect by TLS (nbds://), as nbd.tls_dir demands";

pub struct Client {
    conn: ConnId,
    pub peer: String,
    source: Source,
    caller: Caller,
    /// Who it is beside other clients.
    association: Association,
    session: Session,
    secured: Option<Box<Secured>>,
    /// The host's session, once it has opened an export.
    opened: Option<Token>,
    /// Bytes given to the reactor that the session has not been told to have left.
    unsent_bytes: u64,
    paused: bool,
    has_said: bool,
    /// The export that it asked for, which another reactor has.
    moves_to: Option<String>,
}

/// A client that another reactor has handed over, with the bytes that its session has not seen.
pub struct Arrival {
    client: Client,
    socket: OwnedFd,
    bytes: Vec<u8>,
}

/// Exports that a client is shown: those that are not for it are left out.
struct Offered<'a> {
    host: &'a Host,
    own: &'a Own,
    caller: &'a Caller,
    /// What the client was told that it may not have.
    refused: RefCell<Option<String>>,
}

impl<'a> Offered<'a> {
    fn to(caller: &'a Caller, host: &'a Host, own: &'a Own) -> Offered<'a> {
        Offered { host, own, caller, refused: RefCell::new(None) }
    }
}

impl Exports for Offered<'_> {
    fn list(&self) -> Vec<ExportInfo> {
        let mut list = self.host.exports(self.caller);
        let others = self.own.exports_elsewhere().into_iter();
        let allowed = others.filter(|(export, of)| !self.host.refuses(self.caller, &export.name, *of));
        list.extend(allowed.map(|(export, _)| export));
        list
    }

    fn is_elsewhere(&self, name: &str) -> bool {
        self.own.elsewhere(name).is_some()
    }

    fn refusal(&self, name: &str) -> Option<String> {
        let why = self.host.refusal(self.caller, name)?;
        self.refused.replace(Some(why.clone()));
        Some(why)
    }

    fn find(&self, name: &str) -> Option<ExportInfo> {
        self.host.export(self.caller, name)
    }

    fn snapshots(&self, export: &str) -> Vec<(String, ObjectId)> {
        self.host.snapshots(export)
    }
}

pub struct Clients {
    table: Slab<Client>,
    by_conn: HashMap<ConnId, Token>,
    /// Those that have not opened an export.
    handshakes: Handshakes,
    effects: Effects<Effect>,
    /// What each session may hold now.
    held_bytes_max: u64,
    /// Sessions whose sends are to be looked at when the batch ends.
    sending: Vec<Token>,
    /// Where it is set, clients that come over TCP must secure their connection.
    tls: Option<TlsServer>,
    /// Whose clients are let in by name.
    grid: GridId,
    /// Where the grid has certificates.
    revoked: Option<RevokedNow>,
    machine: Machine,
    pub refusals: RefusalLog,
    /// Who was refused, or has said something and has gone without TLS where it is due; and why.
    strangers: Vec<(String, String)>,
}

impl Clients {
    pub fn new(
        places: HostPlaces,
        (grid, revoked): (GridId, Option<RevokedNow>),
        tls: Option<TlsServer>,
        machine: Machine,
    ) -> Clients {
        Clients {
            // One more comes before another is pushed out.
            table: Slab::new(places.clients() + 1),
            by_conn: HashMap::new(),
            handshakes: Handshakes::new(places.handshakes),
            effects: Effects::new(),
            held_bytes_max: SessionConfig::default().held_bytes_max,
            sending: Vec::new(),
            tls,
            grid,
            revoked,
            machine,
            refusals: RefusalLog::default(),
            strangers: Vec::new(),
        }
    }

    pub fn owner(&self, conn: ConnId) -> Option<Token> {
        self.by_conn.get(&conn).copied()
    }

    pub fn tokens(&self) -> Vec<Token> {
        self.table.tokens()
    }

    /// Whether its certificate was taken back.
    pub fn is_revoked(&self, session: Token) -> bool {
        let secured = self.table.get(session).and_then(|client| client.secured.as_ref());
        secured.zip(self.revoked.as_ref()).is_some_and(|(secured, revoked)| secured.is_revoked(revoked))
    }

    pub fn peer_of(&self, session: Token) -> String {
        self.table.get(session).map(|client| client.peer.clone()).unwrap_or_default()
    }
}

impl Client {
    /// For the log.
    fn who(&self) -> String {
        who(&self.caller, &self.peer)
    }

    fn send(&mut self, bytes: &[u8], io: &mut Io) {
        self.unsent_bytes += bytes.len() as u64;
        match &mut self.secured {
            Some(secured) => secured.send(bytes),
            None => io.send(self.conn, bytes),
        }
    }

    fn send_buf(&mut self, buf: Buf, io: &mut Io) {
        self.unsent_bytes += buf.len() as u64;
        match &mut self.secured {
            Some(secured) => secured.send_buf(&buf),
            None => io.send_buf(self.conn, buf),
        }
    }

    /// Has the kernel fill a large payload. What comes encrypted can't be received in place.
    fn lend_sink(&mut self, io: &mut Io) {
        if let Some((buf, filled)) = self.session.take_sink() {
            io.recv_into(self.conn, buf, filled);
        }
    }

    /// While a connection is being secured its session waits, but the handshake goes on.
    fn wants_input(&self) -> bool {
        self.session.wants_input() || self.secured.as_ref().is_some_and(|s| !s.is_started())
    }

    fn flush(&mut self, closes: bool, io: &mut Io) {
        if let Some(secured) = &mut self.secured {
            if closes {
                secured.close();
            }
            secured.flush(self.conn, io);
        }
    }
}

fn who(caller: &Caller, peer: &str) -> String {
    caller.name().map_or_else(|| peer.to_string(), |name| format!("{name} ({peer})"))
}

impl Shell {
    pub(super) fn on_client(
        &mut self,
        now: Instant,
        conn: ConnId,
        (peer, address, process): (String, Option<SocketAddr>, Option<u32>),
        io: &mut Io,
    ) {
        let is_tcp = address.is_some();
        if self.is_stopping() || self.clients.table.is_full() {
            return io.abort(conn);
        }
        let mut effects = std::mem::take(&mut self.clients.effects);
        let tls = if is_tcp && self.clients.tls.is_some() { TlsPolicy::Required } else { TlsPolicy::None };
        let session = Session::new(
            SessionConfig { tls, held_bytes_max: self.clients.held_bytes_max, ..SessionConfig::default() },
            &mut effects,
        );
        self.clients.effects = effects;
        let client = Client {
            conn,
            association: self.clients.machine.client(&peer, address, process),
            peer,
            source: Source::of(address),
            caller: if is_tcp { Caller::Plain } else { Caller::Local },
            session,
            secured: None,
            opened: None,
            unsent_bytes: 0,
            paused: false,
            has_said: false,
            moves_to: None,
        };
        // A guest that is paused, or a program that is stopped, comes back to all that it asked for.
        if is_tcp {
            io.be_patient(conn);
        }
        let token = self.clients.table.insert(client);
        self.clients.by_conn.insert(conn, token);
        if let Some(pushed_out) = self.clients.handshakes.come(token, Source::of(address), now + HANDSHAKE_MAX) {
            self.cut_handshake(
                now,
                pushed_out,
                "too many clients have opened no export yet, most of them from there",
                io,
            );
        }
        self.carry_out_session(token, io);
    }

    /// Ends a client that has not opened an export.
    fn cut_handshake(&mut self, now: Instant, token: Token, why: &str, io: &mut Io) {
        let Clients { table, refusals, .. } = &mut self.clients;
        if let Some(client) = table.get(token) {
            refusals.note(now, &client.peer, why);
            self.abort_client(token, io);
        }
    }

    /// More connections than a port may have, with those that only have to be closed yet.
    pub(super) fn on_turned_away(&mut self, now: Instant, peer: &str) {
        self.clients.refusals.note(
            now,
            peer,
            "all connections are taken; close some, or wait until others have been closed",
        );
    }

    pub(super) fn on_client_bytes(&mut self, now: Instant, token: Token, bytes: &mut [u8], io: &mut Io) {
        let Clients { table, effects, grid, revoked, refusals, .. } = &mut self.clients;
        let Some(client) = table.get_mut(token) else { return };
        client.has_said = true;
        let refused;
        if let Some(secured) = &mut client.secured {
            let is_revoked = |secured: &Secured| revoked.as_ref().is_some_and(|revoked| secured.is_revoked(revoked));
            match secured.on_bytes(client.conn, bytes, io) {
                Ok(opened) if opened.started && is_revoked(secured) => {
                    refusals.note(now, &client.peer, REVOKED);
                    io.close(client.conn);
                    return self.forget_client(now, token);
                }
                Ok(opened) => {
                    if opened.started {
                        client.caller = secured.caller(*grid);
                        client.association.name = client.caller.name().map(str::to_string);
                        client.association.label = who(&client.caller, &client.peer);
                        client.session.on_tls_started();
                    }
                    let offered = Offered::to(&client.caller, &self.host, &self.own);
                    client.session.on_bytes(&opened.plaintext, &offered, effects);
                    refused = offered.refused.take();
                    secured.recycle(opened.plaintext);
                }
                Err(error) => {
                    refusals.note(now, &client.peer, &error.to_string());
                    io.close(client.conn);
                    return self.forget_client(now, token);
                }
            }
        } else {
            let offered = Offered::to(&client.caller, &self.host, &self.own);
            client.session.on_bytes(bytes, &offered, effects);
            refused = offered.refused.take();
            client.lend_sink(io);
        }
        if let Some(why) = refused {
            refusals.note(now, &client.peer, &why);
        }
        self.carry_out_session(token, io);
    }

    /// Tells of those that were refused, or have gone without TLS where it is due.
    pub(super) fn tell_of_strangers(&mut self, now: Instant) {
        let Clients { strangers, refusals, .. } = &mut self.clients;
        for (peer, why) in strangers.drain(..) {
            refusals.note(now, &peer, &why);
        }
    }

    pub(super) fn on_client_filled(&mut self, token: Token, buf: BufMut, io: &mut Io) {
        let Clients { table, effects, .. } = &mut self.clients;
        let Some(client) = table.get_mut(token) else { return };
        let filled = buf.len();
        client.session.give_sink(buf, filled, effects);
        self.carry_out_session(token, io);
    }

    pub(super) fn on_client_reply(&mut self, to: Token, reply: BlockReply, io: &mut Io) {
        let Clients { table, effects, .. } = &mut self.clients;
        let Some(client) = table.get_mut(to) else { return };
        client.session.on_reply(reply, effects);
        self.carry_out_session(to, io);
    }

    /// Carries out what a session pushed, and what follows from it. Requests gather for [`Shell::settle`].
    fn carry_out_session(&mut self, token: Token, io: &mut Io) {
        let mut effects = std::mem::take(&mut self.clients.effects);
        let mut opening = None;
        loop {
            let Some(client) = self.clients.table.get_mut(token) else {
                effects.drain().for_each(drop);
                break;
            };
            let (conn, had_unsent) = (client.conn, client.unsent_bytes > 0);
            let mut closes = false;
            for effect in effects.drain() {
                match effect {
                    Effect::Send(head) => client.send(&head, io),
                    Effect::SendBuf(buf) => client.send_buf(buf, io),
                    Effect::Request(request) => self.requests.push_back((token, request)),
                    Effect::Open { export } => opening = Some(export),
                    Effect::Move { export } => client.moves_to = Some(export),
                    // What was sent in the clear is queued ahead of everything encrypted.
                    Effect::StartTls => match self.clients.tls.as_ref().map(Secured::new) {
                        Some(Ok(secured)) => client.secured = Some(Box::new(secured)),
                        _ => closes = true,
                    },
                    Effect::Close => closes = true,
                }
            }
            client.flush(closes, io);
            if client.unsent_bytes > 0 && !had_unsent {
                self.clients.sending.push(token);
            }
            if closes {
                io.close(conn);
                self.forget_client(self.now, token);
                break;
            }
            if client.moves_to.is_some() {
                // It goes on where its export is.
                io.detach(conn);
                break;
            }
            let Some(export) = opening.take() else {
                let wants = client.wants_input();
                if wants == client.paused {
                    client.paused = !wants;
                    io.pause_reading(conn, !wants);
                }
                break;
            };
            let result = self.open_export(self.now, token, &export);
            self.settle_handshake(token, &result);
            let client = self.clients.table.get_mut(token).expect("binding ends no session");
            let offered = Offered::to(&client.caller, &self.host, &self.own);
            client.session.on_opened(result, &offered, &mut effects);
        }
        self.clients.effects = effects;
    }

    /// A client has left this reactor: for the one that has its export, or for this one again if none has it any more.
    pub(super) fn on_detached(&mut self, now: Instant, conn: ConnId, socket: OwnedFd, bytes: Vec<u8>, io: &mut Io) {
        let Some(token) = self.clients.by_conn.remove(&conn) else { return };
        self.clients.handshakes.leave(token);
        self.clients.sending.retain(|of| *of != token);
        let mut client = self.clients.table.remove(token).expect("its connection was there");
        let Clients { effects, refusals, .. } = &mut self.clients;
        let sent = std::mem::take(&mut client.unsent_bytes) as usize;
        // A session that is moving wants nothing before it has moved.
        client.session.on_sent(sent, &Offered::to(&client.caller, &self.host, &self.own), effects);
        let export = client.moves_to.take().unwrap_or_default();
        let peer = client.peer.clone();
        let arrival = Box::new(Arrival { client, socket, bytes });
        let Some(reactor) = self.own.elsewhere(&export) else {
            return self.on_arrival(now, *arrival, io);
        };
        if !self.own.hand_over(reactor, arrival) {
            refusals.note(now, &peer, "the reactor that has its export takes nothing just now");
        }
    }

    pub(super) fn on_arrival(&mut self, now: Instant, arrival: Arrival, io: &mut Io) {
        let Arrival { mut client, socket, mut bytes } = arrival;
        if self.is_stopping() || self.clients.table.is_full() {
            return;
        }
        client.conn = io.adopt(socket);
        client.paused = false;
        if client.source != Source::Local {
            io.be_patient(client.conn);
        }
        let (conn, source) = (client.conn, client.source);
        client.session.set_held_bytes_max(self.clients.held_bytes_max);
        let token = self.clients.table.insert(client);
        self.clients.by_conn.insert(conn, token);
        if let Some(pushed_out) = self.clients.handshakes.come(token, source, now + HANDSHAKE_MAX) {
            self.cut_handshake(now, pushed_out, "too many clients open exports at this moment", io);
        }
        let Clients { table, effects, .. } = &mut self.clients;
        let Some(client) = table.get_mut(token) else { return };
        let offered = Offered::to(&client.caller, &self.host, &self.own);
        client.session.on_moved(&offered, effects);
        self.carry_out_session(token, io);
        if !bytes.is_empty() {
            self.on_client_bytes(now, token, &mut bytes, io);
        }
    }

    fn open_export(&mut self, now: Instant, token: Token, export: &str) -> Result<ExportInfo, Refusal> {
        let client = self.clients.table.get(token).expect("it has just asked");
        let connection = Connection {
            to: token,
            label: client.who(),
            source: client.source,
            caller: client.caller.clone(),
            association: client.association.clone(),
        };
        let opened = self.host.open_session(now, connection, export, &mut self.effects);
        let (session, info) = opened.map_err(refusal_of)?;
        self.clients.table.get_mut(token).expect("just seen").opened = Some(session);
        self.share_memory();
        Ok(info)
    }

    /// A client that has opened an export is in its handshake no more; who found no place is told of.
    fn settle_handshake(&mut self, token: Token, result: &Result<ExportInfo, Refusal>) {
        match result {
            Ok(_) => {
                self.clients.handshakes.leave(token);
            }
            Err(refusal) if refusal.kind == RefusalKind::Forbidden => {
                if let Some(client) = self.clients.table.get(token) {
                    self.clients.strangers.push((client.peer.clone(), refusal.message.clone()));
                }
            }
            Err(_) => {}
        }
    }

    pub(super) fn forget_client(&mut self, now: Instant, token: Token) {
        let Some(client) = self.clients.table.remove(token) else { return };
        self.clients.by_conn.remove(&client.conn);
        if self.clients.tls.is_some() && client.caller == Caller::Plain && client.secured.is_none() && client.has_said {
            self.clients.strangers.push((client.peer, WITHOUT_TLS.to_string()));
        }
        self.clients.handshakes.leave(token);
        if let Some(session) = client.opened {
            self.host.handle(now, Event::Close { session }, &mut self.effects);
        }
        self.share_memory();
    }

    /// Divides what sessions may hold between them.
    fn share_memory(&mut self) {
        let share = HELD_BYTES_MAX / self.clients.table.len().max(1) as u64;
        let held_bytes_max = share.clamp(HELD_BYTES_LEAST, SessionConfig::default().held_bytes_max);
        if held_bytes_max != self.clients.held_bytes_max {
            self.clients.held_bytes_max = held_bytes_max;
            for token in self.clients.table.tokens() {
                let client = self.clients.table.get_mut(token).expect("just listed");
                client.session.set_held_bytes_max(held_bytes_max);
            }
        }
    }

    /// Ends a session without asking it.
    pub(super) fn abort_client(&mut self, token: Token, io: &mut Io) {
        if let Some(client) = self.clients.table.get(token) {
            io.abort(client.conn);
            self.forget_client(self.now, token);
        }
    }

    /// The host has ended the session.
    pub(super) fn on_client_aborted(&mut self, token: Token, why: Option<&str>, io: &mut Io) {
        let Clients { table, refusals, .. } = &mut self.clients;
        let Some(client) = table.get_mut(token) else { return };
        client.opened = None;
        if let Some(why) = why {
            refusals.note(self.now, &client.peer, why);
        }
        self.abort_client(token, io);
    }

    /// The host's session of a client.
    pub(super) fn opened_by(&self, token: Token) -> Option<Token> {
        self.clients.table.get(token)?.opened
    }

    /// No further request is taken; what is in flight is answered first.
    pub(super) fn shut_client_down(&mut self, token: Token, io: &mut Io) {
        let Clients { table, effects, .. } = &mut self.clients;
        let Some(client) = table.get_mut(token) else { return };
        client.session.on_shutdown(effects);
        self.carry_out_session(token, io);
    }

    /// Tells sessions what has left for their clients.
    pub(super) fn settle_sends(&mut self, io: &mut Io) {
        let mut sending = std::mem::take(&mut self.clients.sending);
        for token in sending.drain(..) {
            let Clients { table, effects, .. } = &mut self.clients;
            let Some(client) = table.get_mut(token) else { continue };
            // Of a secured connection these are encrypted, and a little more than what they stand for: until all has
            // left, fewer bytes are told than have.
            // Of one that is gone nothing was sent: taking more of its requests would be work for nobody.
            let Some(left) = io.unsent_bytes(client.conn) else { continue };
            let sent = client.unsent_bytes.saturating_sub(left as u64);
            client.unsent_bytes -= sent;
            let goes_on = client.unsent_bytes > 0;
            if sent > 0 {
                let offered = Offered::to(&client.caller, &self.host, &self.own);
                client.session.on_sent(sent as usize, &offered, effects);
            }
            if goes_on {
                self.clients.sending.push(token);
            }
            if sent > 0 {
                self.carry_out_session(token, io);
            }
        }
        if self.clients.sending.is_empty() {
            self.clients.sending = sending;
        }
    }

    /// Cuts clients that never finish their handshake.
    pub(super) fn cut_slow_handshakes(&mut self, now: Instant, io: &mut Io) {
        while let Some(token) = self.clients.handshakes.overdue(now) {
            let why = format!("it has opened no export within {} s", HANDSHAKE_MAX.as_secs());
            self.cut_handshake(now, token, &why, io);
        }
    }
}

fn refusal_of(denied: Denied) -> Refusal {
    let kind = match denied.kind {
        DeniedKind::Unknown => RefusalKind::Unknown,
        DeniedKind::Forbidden => RefusalKind::Forbidden,
        DeniedKind::Later => RefusalKind::ShuttingDown,
    };
    Refusal { kind, message: denied.why }
}
