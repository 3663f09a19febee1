//! NBD clients of this host: sessions, and the sockets that they come by.
//!
//! Role: carries out what sessions want. A session that asked for an export is bound to its volume; its requests go to
//! that volume's controller, whose replies come back here.
//!
//! Limits: [`CLIENTS_MAX`] sessions, [`super::volumes::SESSIONS_MAX`] of one volume; [`HANDSHAKE_MAX`] for a handshake.
//! [`HELD_BYTES_MAX`] for what sessions hold, besides the one payload that each may have in any case.
//!
//! Faults: a client that vanishes leaves requests in flight; their replies find no session and are dropped.

use super::Host;
use super::tls::Secured;
use super::volumes::{Asker, SESSIONS_MAX, split_export, split_ticket};
use crate::logger;
use holdfast_base::{
    BlockReply, BlockRequest, Buf, BufMut, Effects, ExportInfo, HeadId, Instant, RequestToken, Slab, Token,
};
use holdfast_frontend::nbd::{Effect, Refusal, RefusalKind, Session, SessionConfig, TlsPolicy};
use holdfast_runtime::reactor::{ConnId, Io};
use holdfast_runtime::tls::TlsServer;
use holdfast_volume::{Event as VolumeEvent, State, Target};
use std::collections::HashMap;
use std::time::Duration;

const CLIENTS_MAX: usize = 4096;

/// What all sessions together may hold, but for one payload each: shared evenly, and no less than the least for each.
const HELD_BYTES_MAX: u64 = 512 << 20;
const HELD_BYTES_LEAST: u64 = 1 << 20;

/// How long a client may take until it has opened an export.
const HANDSHAKE_MAX: Duration = Duration::from_secs(30);

pub struct Client {
    conn: ConnId,
    peer: String,
    session: Session,
    secured: Option<Box<Secured>>,
    volume: Option<Token>,
    /// What of it the client uses, and the head that it counts to.
    target: Target,
    head: HeadId,
    /// Bytes given to the reactor that the session has not been told to have left.
    unsent_bytes: u64,
    paused: bool,
    give_up_at: Instant,
}

pub struct Clients {
    table: Slab<Client>,
    by_conn: HashMap<ConnId, Token>,
    effects: Effects<Effect>,
    /// What each session may hold now.
    held_bytes_max: u64,
    /// Sessions whose sends are to be looked at when the batch ends.
    sending: Vec<Token>,
    /// Where it is set, clients that come over TCP must secure their connection.
    tls: Option<TlsServer>,
}

impl Clients {
    pub fn new(tls: Option<TlsServer>) -> Clients {
        let table = Slab::new(CLIENTS_MAX);
        let held_bytes_max = SessionConfig::default().held_bytes_max;
        Clients { table, by_conn: HashMap::new(), effects: Effects::new(), held_bytes_max, sending: Vec::new(), tls }
    }

    pub fn owner(&self, conn: ConnId) -> Option<Token> {
        self.by_conn.get(&conn).copied()
    }

    pub fn tokens(&self) -> Vec<Token> {
        self.table.tokens()
    }

    /// Clients of the volume, a clone or a snapshot.
    pub fn of_target(&self, volume: Token, target: Target) -> usize {
        self.table.iter().filter(|(_, c)| c.volume == Some(volume) && c.target == target).count()
    }

    /// Clients of a volume's head, and of its snapshots.
    pub fn of_head(&self, volume: Token, head: HeadId) -> Vec<Token> {
        self.table.iter().filter(|(_, c)| c.volume == Some(volume) && c.head == head).map(|(t, _)| t).collect()
    }

    pub fn of_volume(&self, volume: Token) -> Vec<Token> {
        self.table.iter().filter(|(_, c)| c.volume == Some(volume)).map(|(t, _)| t).collect()
    }
}

impl Client {
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

impl Host {
    pub(super) fn on_client(&mut self, now: Instant, conn: ConnId, peer: String, is_tcp: bool, io: &mut Io) {
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
            peer,
            session,
            secured: None,
            volume: None,
            target: Target::VOLUME,
            head: HeadId::VOLUME,
            unsent_bytes: 0,
            paused: false,
            give_up_at: now + HANDSHAKE_MAX,
        };
        let token = self.clients.table.insert(client);
        self.clients.by_conn.insert(conn, token);
        self.carry_out_session(token, io);
    }

    pub(super) fn on_client_bytes(&mut self, token: Token, bytes: &[u8], io: &mut Io) {
        let Clients { table, effects, .. } = &mut self.clients;
        let Some(client) = table.get_mut(token) else { return };
        if let Some(secured) = &mut client.secured {
            match secured.on_bytes(client.conn, bytes, io) {
                Ok(opened) => {
                    if opened.started {
                        client.session.on_tls_started();
                    }
                    client.session.on_bytes(&opened.plaintext, &self.volumes, effects);
                    secured.recycle(opened.plaintext);
                }
                Err(error) => {
                    logger::info(format_args!("client {}: {error}", client.peer));
                    io.close(client.conn);
                    return self.forget_client(token);
                }
            }
        } else {
            client.session.on_bytes(bytes, &self.volumes, effects);
            client.lend_sink(io);
        }
        self.carry_out_session(token, io);
    }

    pub(super) fn on_client_filled(&mut self, token: Token, buf: BufMut, io: &mut Io) {
        let Clients { table, effects, .. } = &mut self.clients;
        let Some(client) = table.get_mut(token) else { return };
        let filled = buf.len();
        client.session.give_sink(buf, filled, effects);
        self.carry_out_session(token, io);
    }

    /// A controller's answer.
    pub(super) fn on_volume_reply(&mut self, volume: Token, reply: BlockReply, io: &mut Io) {
        let Some(asker) = self.volumes.table.get_mut(volume).and_then(|v| v.askers.remove(Token(reply.token.0))) else {
            return;
        };
        let Clients { table, effects, .. } = &mut self.clients;
        let Some(client) = table.get_mut(asker.session) else { return };
        client.session.on_reply(BlockReply { token: asker.token, result: reply.result }, effects);
        self.carry_out_session(asker.session, io);
    }

    /// A session's request goes to its volume.
    pub(super) fn submit(&mut self, now: Instant, session: Token, request: BlockRequest, io: &mut Io) {
        let Some((volume, target)) = self.clients.table.get(session).and_then(|c| Some((c.volume?, c.target))) else {
            return;
        };
        let Some(open) = self.volumes.table.get_mut(volume) else { return };
        let token = open.askers.insert(Asker { session, token: request.token });
        let request = BlockRequest { token: RequestToken(token.0), op: request.op };
        self.drive(now, volume, VolumeEvent::Request { target, request }, io);
    }

    /// Carries out what a session pushed, and what follows from it. Requests gather for [`Host::submit`].
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
                self.forget_client(token);
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
            let result = self.bind(token, &export);
            let client = self.clients.table.get_mut(token).expect("binding ends no session");
            client.session.on_opened(result, &self.volumes, &mut effects);
        }
        self.clients.effects = effects;
    }

    fn bind(&mut self, session: Token, export: &str) -> Result<ExportInfo, Refusal> {
        let refuse = |kind, message: String| Err(Refusal { kind, message });
        if self.is_stopping() {
            return refuse(RefusalKind::ShuttingDown, "this host is stopping; connect again later".to_string());
        }
        let (shown, ticket) = split_ticket(export);
        let (name, snapshot) = split_export(shown);
        let found = self.volumes.find_open(name);
        let Some((at, head, volume)) = found.and_then(|(at, head)| Some((at, head, self.volumes.table.get_mut(at)?)))
        else {
            return refuse(RefusalKind::Unknown, format!("volume {shown} is not exported; `holdfast volume list`"));
        };
        if !volume.admits(ticket) {
            return refuse(RefusalKind::ShuttingDown, format!("volume {shown} is closing; connect again later"));
        }
        if volume.sessions() >= SESSIONS_MAX {
            let message =
                format!("volume {} has {SESSIONS_MAX} clients, which is the bound; close one first", volume.name);
            return refuse(RefusalKind::Forbidden, message);
        }
        let found = snapshot.map(|snapshot| volume.snapshot_export(name, head, snapshot));
        let (target, info) = match found {
            Some(None) if volume.controller.state() == State::Opening => {
                let message = format!("volume {name} is opening; connect again in a moment");
                return refuse(RefusalKind::ShuttingDown, message);
            }
            Some(None) => {
                let message = format!("there is no {shown}; `holdfast snapshot list {name}`");
                return refuse(RefusalKind::Unknown, message);
            }
            Some(Some((layer, info))) => (Target::Snapshot(layer), info),
            None => (Target::Head(head), volume.export(export, head)),
        };
        volume.add_session(head);
        self.share_memory();
        let client = self.clients.table.get_mut(session).expect("it has just asked");
        (client.volume, client.target, client.head) = (Some(at), target, head);
        logger::info(format_args!("client {} opens {shown}", client.peer));
        Ok(info)
    }

    pub(super) fn forget_client(&mut self, token: Token) {
        let Some(client) = self.clients.table.remove(token) else { return };
        self.clients.by_conn.remove(&client.conn);
        if let Some(volume) = client.volume.and_then(|at| self.volumes.table.get_mut(at)) {
            volume.remove_session(client.head);
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
            self.forget_client(token);
        }
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
                client.session.on_sent(sent as usize, &self.volumes, effects);
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
        let slow = |c: &Client| c.volume.is_none() && c.give_up_at <= now;
        let slow: Vec<Token> = self.clients.table.iter().filter(|(_, c)| slow(c)).map(|(t, _)| t).collect();
        for token in slow {
            self.abort_client(token, io);
        }
    }
}
