//! NBD clients of this host: sessions, and the sockets that they come by.
//!
//! Role: carries out what sessions want. A session that asked for an export is bound to its volume; its requests go to
//! that volume's controller, whose replies come back here. Of a volume that several hosts offer the sessions are the portal's
//! (see [`super::portals`]), and bound while it is served here.
//!
//! Limits: what [`HostPlaces`] says, shared by the origins of clients; [`super::volumes::SESSIONS_MAX`] of one volume,
//! shared in the same way; [`HANDSHAKE_MAX`] for a handshake.
//! [`HELD_BYTES_MAX`] for what sessions hold, besides the one payload that each may have in any case.
//!
//! Faults: a client that vanishes leaves requests in flight; their replies find no session and are dropped.

use super::Host;
use super::access::{Caller, Teller};
use super::portals::Portals;
use super::tls::Secured;
use super::volumes::{Asker, Behind, SESSIONS_MAX, Volume, Volumes, Who, split_export, split_ticket};
use super::writers::Machine;
use crate::admission::{Full, Handshakes, HostPlaces, Origin, Room, Taken};
use crate::link_tls::REVOKED;
use crate::logger;
use holdfast_base::{
    BlockData, BlockError, BlockReply, BlockRequest, Buf, BufMut, Effects, ExportInfo, GridId, HeadId, Instant,
    ObjectId, Slab, Token, VolumeId,
};
use holdfast_format::portal::Client as Identity;
use holdfast_frontend::nbd::{Effect, Exports, Refusal, RefusalKind, Session, SessionConfig, TlsPolicy};
use holdfast_layer::StackEvent;
use holdfast_portal::{DeskEvent, Event as PortalEvent, SessionId};
use holdfast_runtime::reactor::{ConnId, Io};
use holdfast_runtime::revoked::RevokedNow;
use holdfast_runtime::tls::TlsServer;
use holdfast_volume::{State, Target};
use std::cell::RefCell;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

/// Places of one volume that only this machine's own clients get: its guest over some connections, and the tools of
/// whoever looks after it.
const VOLUME_LOCAL_KEPT: usize = 32;

/// What all sessions together may hold, but for one payload each: shared evenly, and no less than the least for each.
const HELD_BYTES_MAX: u64 = 512 << 20;
const HELD_BYTES_LEAST: u64 = 1 << 20;

/// How long a client may take until it has opened an export.
const HANDSHAKE_MAX: Duration = Duration::from_secs(30);

const WITHOUT_TLS: &str = "it does not secure its connection; connect by TLS (nbds://), as nbd.tls_dir demands";

pub struct Client {
    conn: ConnId,
    pub peer: String,
    origin: Origin,
    pub caller: Caller,
    /// Who it is beside other clients, and when its last write was answered.
    pub identity: Identity,
    pub wrote_at: Option<Instant>,
    session: Session,
    secured: Option<Box<Secured>>,
    /// The export that was opened, and the volume that it is of.
    pub export: Option<String>,
    of: Option<VolumeId>,
    /// It is the portal's session: its volume may be served elsewhere.
    of_portal: bool,
    pub held: Held,
    /// Where the volume is served here.
    volume: Option<Token>,
    /// What of it the client uses, and the head that it counts to.
    target: Target,
    head: HeadId,
    /// Bytes given to the reactor that the session has not been told to have left.
    unsent_bytes: u64,
    paused: bool,
    has_said: bool,
}

/// What a session of the portal has asked before it may begin.
#[derive(Default)]
pub enum Held {
    #[default]
    Nothing,
    Arriving {
        volume: VolumeId,
        export: String,
        requests: Vec<(BlockRequest, Instant)>,
    },
    /// Of a session that is not the portal's: what was asked of the volume before is not done yet.
    Behind {
        requests: Vec<(BlockRequest, Instant)>,
    },
}

/// What a client is shown: volumes in service here, and those that are reached through the portal, but for those that are not
/// for it.
pub struct Offered<'a> {
    volumes: &'a Volumes,
    portals: &'a Portals,
    caller: &'a Caller,
    /// What the client was told that it may not have.
    refused: RefCell<Option<String>>,
}

impl<'a> Offered<'a> {
    pub fn to(caller: &'a Caller, (volumes, portals): (&'a Volumes, &'a Portals)) -> Offered<'a> {
        Offered { volumes, portals, caller, refused: RefCell::new(None) }
    }

    /// Why it may not have an export.
    pub fn why_not(&self, export: &str) -> Option<String> {
        let (shown, _) = split_ticket(export);
        let (name, _) = split_export(shown);
        let id = self.volumes.export_id(name).or_else(|| self.portals.export_id(name))?;
        self.caller.refusal(shown, self.volumes.access.get(&id))
    }
}

impl Exports for Offered<'_> {
    fn list(&self) -> Vec<ExportInfo> {
        let mut list = self.volumes.list();
        let away: Vec<_> = self.portals.exports().filter(|e| list.iter().all(|own| own.name != e.name)).collect();
        list.extend(away);
        list.retain(|export| self.why_not(&export.name).is_none());
        list
    }

    fn refusal(&self, name: &str) -> Option<String> {
        let why = self.why_not(name)?;
        self.refused.replace(Some(why.clone()));
        Some(why)
    }

    fn find(&self, name: &str) -> Option<ExportInfo> {
        if self.why_not(name).is_some() {
            return None;
        }
        self.volumes.find(name).or_else(|| Some(self.portals.export(name)?.1))
    }

    fn snapshots(&self, export: &str) -> Vec<(String, ObjectId)> {
        self.volumes.snapshots(export)
    }
}

pub struct Clients {
    table: Slab<Client>,
    by_conn: HashMap<ConnId, Token>,
    places: HostPlaces,
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
    pub teller: Teller,
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
            places,
            handshakes: Handshakes::new(places.handshakes),
            effects: Effects::new(),
            held_bytes_max: SessionConfig::default().held_bytes_max,
            sending: Vec::new(),
            tls,
            grid,
            revoked,
            machine,
            teller: Teller::default(),
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

    pub fn get_mut(&mut self, session: Token) -> Option<&mut Client> {
        self.table.get_mut(session)
    }

    /// Clients of the volume, a clone or a snapshot.
    pub fn of_target(&self, volume: Token, target: Target) -> usize {
        self.table.iter().filter(|(_, c)| c.volume == Some(volume) && c.target == target).count()
    }

    /// Their names, for people.
    pub fn names_of(&self, volume: Token, target: Target) -> Vec<String> {
        let of = |c: &&Client| c.volume == Some(volume) && c.target == target;
        self.table.iter().map(|(_, c)| c).filter(of).map(Client::who).collect()
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
    /// Its volume may be served elsewhere from here on; gives the export.
    pub fn give_to_portal(&mut self) -> Option<String> {
        let export = self.export.clone().filter(|export| split_ticket(export).1.is_none() && !self.of_portal)?;
        self.of_portal = true;
        Some(export)
    }

    /// Only this host serves its volume.
    pub fn take_from_portal(&mut self) {
        self.of_portal = false;
    }

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

impl Host {
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
            identity: self.clients.machine.client(&peer, address, process),
            wrote_at: None,
            peer,
            origin: Origin::of(address),
            caller: if is_tcp { Caller::Plain } else { Caller::Local },
            session,
            secured: None,
            export: None,
            of: None,
            of_portal: false,
            held: Held::Nothing,
            volume: None,
            target: Target::VOLUME,
            head: HeadId::VOLUME,
            unsent_bytes: 0,
            paused: false,
            has_said: false,
        };
        // A guest that is paused, or a program that is stopped, comes back to all that it asked for.
        if is_tcp {
            io.be_patient(conn);
        }
        let token = self.clients.table.insert(client);
        self.clients.by_conn.insert(conn, token);
        if let Some(pushed_out) = self.clients.handshakes.come(token, Origin::of(address), now + HANDSHAKE_MAX) {
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
        let Clients { table, teller, .. } = &mut self.clients;
        if let Some(client) = table.get(token) {
            teller.tell(now, &client.peer, why);
            self.abort_client(token, io);
        }
    }

    /// More connections than a port may have, with those that only have to be closed yet.
    pub(super) fn on_turned_away(&mut self, now: Instant, peer: &str) {
        self.clients.teller.tell(
            now,
            peer,
            "all connections are taken; close some, or wait until others have been closed",
        );
    }

    pub(super) fn on_client_bytes(&mut self, now: Instant, token: Token, bytes: &mut [u8], io: &mut Io) {
        let Clients { table, effects, grid, revoked, teller, .. } = &mut self.clients;
        let Some(client) = table.get_mut(token) else { return };
        client.has_said = true;
        let refused;
        if let Some(secured) = &mut client.secured {
            let is_revoked = |secured: &Secured| revoked.as_ref().is_some_and(|revoked| secured.is_revoked(revoked));
            match secured.on_bytes(client.conn, bytes, io) {
                Ok(opened) if opened.started && is_revoked(secured) => {
                    teller.tell(now, &client.peer, REVOKED);
                    io.close(client.conn);
                    return self.forget_client(token);
                }
                Ok(opened) => {
                    if opened.started {
                        client.caller = secured.caller(*grid);
                        client.identity.name = client.caller.name().map(str::to_string);
                        client.identity.label = who(&client.caller, &client.peer);
                        client.session.on_tls_started();
                    }
                    let offered = Offered::to(&client.caller, (&self.volumes, &self.portals));
                    client.session.on_bytes(&opened.plaintext, &offered, effects);
                    refused = offered.refused.take();
                    secured.recycle(opened.plaintext);
                }
                Err(error) => {
                    teller.tell(now, &client.peer, &error.to_string());
                    io.close(client.conn);
                    return self.forget_client(token);
                }
            }
        } else {
            let offered = Offered::to(&client.caller, (&self.volumes, &self.portals));
            client.session.on_bytes(bytes, &offered, effects);
            refused = offered.refused.take();
            client.lend_sink(io);
        }
        if let Some(why) = refused {
            teller.tell(now, &client.peer, &why);
        }
        self.carry_out_session(token, io);
    }

    /// Tells of those that were refused, or have gone without TLS where it is due.
    pub(super) fn tell_of_strangers(&mut self, now: Instant) {
        let Clients { strangers, teller, .. } = &mut self.clients;
        for (peer, why) in strangers.drain(..) {
            teller.tell(now, &peer, &why);
        }
    }

    pub(super) fn on_client_filled(&mut self, token: Token, buf: BufMut, io: &mut Io) {
        let Clients { table, effects, .. } = &mut self.clients;
        let Some(client) = table.get_mut(token) else { return };
        let filled = buf.len();
        client.session.give_sink(buf, filled, effects);
        self.carry_out_session(token, io);
    }

    /// A controller's answer.
    pub(super) fn on_volume_reply(&mut self, now: Instant, volume: Token, reply: BlockReply, io: &mut Io) {
        let answered = self.volumes.table.get_mut(volume).and_then(|v| v.answered(reply.token));
        let Some((asker, clear)) = answered else { return };
        self.portals.cleared.extend(clear);
        if let Some(head) = asker.changes {
            self.on_change_answered(now, (volume, head), asker.who, reply.result.is_ok());
        }
        self.answer(now, volume, asker, reply.result, io);
    }

    /// Tells who has asked.
    pub(super) fn answer(
        &mut self,
        now: Instant,
        volume: Token,
        asker: Asker,
        result: Result<BlockData, BlockError>,
        io: &mut Io,
    ) {
        let Asker { who, token, op, since, .. } = asker;
        let reply = BlockReply { token, result };
        let is_elsewhere = matches!(reply.result, Err(BlockError::Deposed | BlockError::ShuttingDown));
        match (who, op) {
            (Who::Guest(request), _) => self.portals.desk_events.push_back(DeskEvent::Reply { request, reply }),
            (Who::Client(session), Some(op)) if is_elsewhere && !self.is_stopping() && self.is_of_portal(session) => {
                self.hand_back(session, BlockRequest { token, op }, since);
            }
            (Who::Client(session), _) => self.on_session_reply(session, reply, io),
            (Who::Layers(head), _) => self.drive_layers(now, volume, head, StackEvent::Reply(reply), io),
        }
    }

    fn is_of_portal(&self, session: Token) -> bool {
        self.clients.table.get(session).is_some_and(|client| client.of_portal)
    }

    pub(super) fn on_session_reply(&mut self, session: Token, reply: BlockReply, io: &mut Io) {
        let Clients { table, effects, .. } = &mut self.clients;
        let Some(client) = table.get_mut(session) else { return };
        client.session.on_reply(reply, effects);
        self.carry_out_session(session, io);
    }

    /// A session's request goes to its volume, by the portal where that may be elsewhere.
    pub(super) fn submit(&mut self, now: Instant, session: Token, request: BlockRequest, io: &mut Io) {
        let Some(client) = self.clients.table.get_mut(session) else { return };
        let since = self.portals.since(now);
        match &mut client.held {
            Held::Arriving { requests, .. } | Held::Behind { requests } => requests.push((request, since)),
            Held::Nothing if client.of_portal => {
                self.portals.events.push_back(PortalEvent::Request { session, request, since });
            }
            Held::Nothing => self.submit_local(now, session, request, since, io),
        }
    }

    /// To the controller of the volume that the session is bound to.
    pub(super) fn submit_local(
        &mut self,
        now: Instant,
        session: Token,
        request: BlockRequest,
        since: Instant,
        io: &mut Io,
    ) {
        let found = self.clients.table.get(session).and_then(|c| Some((c.volume?, c.target)));
        let Some((at, target)) = found.filter(|(at, _)| self.volumes.table.get(*at).is_some()) else {
            let reply = BlockReply { token: request.token, result: Err(BlockError::ShuttingDown) };
            return self.on_session_reply(session, reply, io);
        };
        let (who, op) = (Who::Client(session), Some(request.op.clone()));
        let asker = Asker { who, token: request.token, op, since, changes: None };
        self.enter(now, (at, target), SessionId::Own(session), (asker, request.op), io);
    }

    /// What was asked of its volume before the session began is done.
    pub(super) fn on_client_clear(&mut self, now: Instant, session: Token, io: &mut Io) {
        let Some(client) = self.clients.table.get_mut(session) else { return };
        if let Held::Behind { requests } = std::mem::take(&mut client.held) {
            for (request, since) in requests {
                self.submit_local(now, session, request, since, io);
            }
        }
    }

    /// Binds a session of the portal to its volume, which serves here; false where it does not, or has no such clone or
    /// snapshot.
    pub(super) fn bind_here(&mut self, session: Token) -> bool {
        let Some(client) = self.clients.table.get(session) else { return false };
        if client.volume.is_some() {
            return true;
        }
        let Some((name, snapshot)) = client.export.as_deref().map(split_export) else { return false };
        let Some((at, head)) = self.volumes.find_open(name) else { return false };
        let open = |v: &&mut Volume| v.exported && v.controller.state() == State::Open;
        let Some(volume) = self.volumes.table.get_mut(at).filter(open) else { return false };
        let target = match snapshot.map(|snapshot| volume.snapshot(head, snapshot)) {
            Some(None) => return false,
            Some(Some((layer, _))) => Target::Snapshot(layer),
            None => Target::Head(head),
        };
        volume.add_session(head);
        let (wrote_at, is_fenced) = self.portals.standing(session);
        let client = self.clients.table.get_mut(session).expect("just seen");
        (client.volume, client.target, client.head) = (Some(at), target, head);
        let (client, wrote_at) = (client.identity.clone(), wrote_at.max(client.wrote_at));
        self.open_writer((at, target), SessionId::Own(session), client, (wrote_at, is_fenced));
        true
    }

    /// The volume is not served here any more.
    pub(super) fn unbind_here(&mut self, session: Token) {
        let Some(client) = self.clients.table.get_mut(session) else { return };
        let (head, target) = (client.head, client.target);
        let Some(at) = client.volume.take() else { return };
        if let Some(volume) = self.volumes.table.get_mut(at) {
            volume.remove_session(head);
        }
        self.close_writer((at, target), SessionId::Own(session));
    }

    /// A controller is gone: its sessions that are the portal's wait for who follows, the others end.
    pub(super) fn let_sessions_go(&mut self, volume: Token, io: &mut Io) {
        for session in self.clients.of_volume(volume) {
            if self.is_of_portal(session) && !self.is_stopping() {
                self.unbind_here(session);
                self.portals.events.push_back(PortalEvent::NotHere { session });
            } else {
                self.abort_client(session, io);
            }
        }
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
            self.settle_handshake(token, &result);
            let client = self.clients.table.get_mut(token).expect("binding ends no session");
            let offered = Offered::to(&client.caller, (&self.volumes, &self.portals));
            client.session.on_opened(result, &offered, &mut effects);
        }
        self.clients.effects = effects;
    }

    fn bind(&mut self, session: Token, export: &str) -> Result<ExportInfo, Refusal> {
        let refuse = |kind, message: String| Err(Refusal { kind, message });
        if self.is_stopping() {
            return refuse(RefusalKind::ShuttingDown, "this host is stopping; connect again later".to_string());
        }
        let caller = self.clients.table.get(session).map(|client| client.caller.clone());
        let why = self.refusal_of(export, &caller.expect("it has just asked"));
        if let Some(why) = why.or_else(|| self.why_no_place(session, split_ticket(export).0)) {
            return refuse(RefusalKind::Forbidden, why);
        }
        let (shown, ticket) = split_ticket(export);
        let (name, snapshot) = split_export(shown);
        let found = self.volumes.find_open(name);
        let found = found.and_then(|(at, head)| Some((at, head, self.volumes.table.get_mut(at)?)));
        let is_elsewhere = !found.as_ref().is_some_and(|(_, _, volume)| volume.admits(ticket));
        if let Some((volume, info)) = self.portals.export(shown).filter(|_| is_elsewhere && ticket.is_none()) {
            self.bind_to_portal(session, volume, shown);
            return Ok(info);
        }
        let Some((at, head, volume)) = found else {
            return refuse(RefusalKind::Unknown, format!("volume {shown} is not exported; `holdfast volume list`"));
        };
        if !volume.admits(ticket) {
            return refuse(RefusalKind::ShuttingDown, format!("volume {shown} is closing; connect again later"));
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
        let id = volume.id;
        if ticket.is_none() && self.portals.is_offered(id) {
            self.bind_to_portal(session, id, shown);
            return Ok(info);
        }
        volume.add_session(head);
        let is_behind = volume.comes_behind(Behind::Client(session));
        self.share_memory();
        let client = self.clients.table.get_mut(session).expect("it has just asked");
        if is_behind {
            client.held = Held::Behind { requests: Vec::new() };
        }
        (client.volume, client.target, client.head) = (Some(at), target, head);
        (client.export, client.of) = (Some(export.to_string()), Some(id));
        logger::info(format_args!("client {} opens {shown}", client.who()));
        let identity = client.identity.clone();
        self.open_writer((at, target), SessionId::Own(session), identity, (None, false));
        Ok(info)
    }

    /// Why there is no place for a session, of this host's or of the volume's: what, why, and what to do.
    fn why_no_place(&self, session: Token, export: &str) -> Option<String> {
        let origin = self.clients.table.get(session)?.origin;
        let opened = || self.clients.table.iter().filter(|(_, c)| c.of.is_some()).map(|(_, c)| c);
        let room = self.clients.places.sessions;
        let taken = Taken::of(origin, opened().map(|c| c.origin));
        if let Err(full) = room.admits(origin, taken) {
            return Some(no_place("this host", origin, full, taken));
        }
        let name = split_export(export).0;
        let found = self.volumes.find_open(name).and_then(|(at, _)| self.volumes.table.get(at));
        let id = found.map(|v| v.id).or_else(|| self.portals.export(export).map(|(id, _)| id))?;
        let own = Taken::of(origin, opened().filter(|c| c.of == Some(id)).map(|c| c.origin));
        // Other hosts' clients count, too.
        let taken = Taken { all: own.all.max(found.map_or(0, Volume::sessions)), ..own };
        let room = Room { max: SESSIONS_MAX, kept_for_local: VOLUME_LOCAL_KEPT };
        let full = room.admits(origin, taken).err()?;
        Some(no_place(&format!("volume {name}"), origin, full, taken))
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

    /// The session is the portal's: it begins when others have passed on what they had of the volume.
    fn bind_to_portal(&mut self, session: Token, volume: VolumeId, export: &str) {
        let client = self.clients.table.get_mut(session).expect("it has just asked");
        (client.export, client.of, client.of_portal) = (Some(export.to_string()), Some(volume), true);
        client.held = Held::Arriving { volume, export: export.to_string(), requests: Vec::new() };
        logger::info(format_args!("client {} opens {export}, by the portal", client.who()));
        self.share_memory();
        self.arrive(session);
    }

    pub(super) fn forget_client(&mut self, token: Token) {
        let Some(client) = self.clients.table.remove(token) else { return };
        self.clients.by_conn.remove(&client.conn);
        if self.clients.tls.is_some() && client.caller == Caller::Plain && client.secured.is_none() && client.has_said {
            self.clients.strangers.push((client.peer, WITHOUT_TLS.to_string()));
        }
        self.clients.handshakes.leave(token);
        if let Some(at) = client.volume {
            if let Some(volume) = self.volumes.table.get_mut(at) {
                volume.remove_session(client.head);
            }
            self.close_writer((at, client.target), SessionId::Own(token));
        }
        if client.of_portal {
            self.portals.events.push_back(PortalEvent::Close { session: token });
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
                let offered = Offered::to(&client.caller, (&self.volumes, &self.portals));
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

/// Why somebody is not let in: what, why, and what to do.
fn no_place(whose: &str, origin: Origin, full: Full, taken: Taken) -> String {
    match full {
        Full::All => format!("{whose} has {} clients, which is the bound; close one first", taken.all),
        Full::Share => format!(
            "{whose} has {} clients, {} of them from {origin}, and what is left is kept for others; close one of those first",
            taken.all, taken.own
        ),
    }
}
