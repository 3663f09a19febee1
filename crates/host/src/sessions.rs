//! Sessions of this host's clients: from the opening of an export to the end of the connection.
//!
//! States of a session
//!
//! | state | entered by | left by |
//! | --- | --- | --- |
//! | arriving | it opens an export that several hosts offer | others have passed on what they had → begun |
//! | behind | what was asked of its volume before is not answered yet | it is → begun |
//! | begun | | the client is gone, or cut off |
//!
//! A session that is **forwarded** is [`crate::forward::Ingress`]'s, and bound to its volume while that is served here.
//! Another one is bound to its volume for life.
//!
//! Limits: the places that the host's configuration gives, shared by the sources of connections; [`SESSIONS_MAX`] of one
//! volume, shared in the same way.

use crate::access::Caller;
use crate::admission::{Full, Room, Source, Taken};
use crate::event::Effect;
use crate::forward::{IngressEvent, OwnerEvent};
use crate::host::{Asked, Host, Out, info};
use crate::requests::{Barrier, Origin, Requester};
use crate::turns::Left;
use crate::volumes::{SESSIONS_MAX, Volume, split_export, split_ticket};
use crate::writers::SessionId;
use holdfast_base::{BlockData, BlockError, BlockReply, BlockRequest, ExportInfo, HeadId, Instant, Token, VolumeId};
use holdfast_filter::StackEvent;
use holdfast_format::forward::Client as Association;
use holdfast_volume::{State, Target};

/// Places of one volume that only this machine's own clients get: its guest over some connections, and the tools of
/// whoever looks after it.
const VOLUME_LOCAL_KEPT: usize = 32;

/// A connection that opens an export, as its front end describes it.
#[derive(Clone, Debug)]
pub struct Connection {
    /// The front end's name for it, by which effects name the session.
    pub to: Token,
    /// For the log, and for people.
    pub label: String,
    /// Whose connections count together.
    pub source: Source,
    pub caller: Caller,
    /// Who asks, beside other clients, over all its connections.
    pub association: Association,
}

/// Why a connection gets no session.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Denied {
    pub kind: DeniedKind,
    /// What, why, and what to do.
    pub why: String,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeniedKind {
    /// There is no such export.
    Unknown,
    /// It is not for this client, or there is no place for it.
    Forbidden,
    /// Not now; later perhaps.
    Later,
}

/// Requests of a session that has not begun, in the order of their coming.
#[derive(Default)]
enum Backlog {
    #[default]
    Nothing,
    Arriving(Vec<Asked>),
    AtBarrier(Vec<Asked>),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Bound {
    at: Token,
    /// What of the volume the session uses, and the head that it counts to.
    target: Target,
    head: HeadId,
}

pub(crate) struct Session {
    connection: Connection,
    export: String,
    /// The volume that the export is of.
    of: VolumeId,
    is_forwarded: bool,
    backlog: Backlog,
    /// Where the volume is served here.
    bound: Option<Bound>,
    /// When its last write was answered.
    wrote_at: Option<Instant>,
    /// Nothing that it asks is older.
    opened_at: Instant,
}

impl Session {
    pub fn to(&self) -> Token {
        self.connection.to
    }

    pub fn at(&self) -> Option<Token> {
        self.bound.map(|bound| bound.at)
    }

    pub fn is_bound_to(&self, at: Token, target: Target) -> bool {
        self.bound.is_some_and(|bound| bound.at == at && bound.target == target)
    }

    fn is_of_head(&self, at: Token, head: HeadId) -> bool {
        self.bound.is_some_and(|bound| bound.at == at && bound.head == head)
    }

    pub fn is_of(&self, volume: VolumeId) -> bool {
        self.of == volume
    }

    pub fn is_forwarded(&self) -> bool {
        self.is_forwarded
    }
}

impl Host {
    /// Opens an export for a connection: the session, and what the client is told of the export.
    ///
    /// # Errors
    /// No such export, not for this client, no place, or not now; nothing is left of it then.
    pub fn open_session(
        &mut self,
        now: Instant,
        connection: Connection,
        export: &str,
        out: Out,
    ) -> Result<(Token, ExportInfo), Denied> {
        let now = self.pass_to(now);
        let opened = self.open_now(connection, export, out);
        self.settle(now, out);
        opened
    }

    fn open_now(&mut self, connection: Connection, export: &str, out: Out) -> Result<(Token, ExportInfo), Denied> {
        let deny = |kind, why: String| Err(Denied { kind, why });
        if self.is_stopping {
            return deny(DeniedKind::Later, "this host is stopping; connect again later".to_string());
        }
        let (shown, ticket) = split_ticket(export);
        let why = self.why_refused(&connection.caller, export);
        if let Some(why) = why.or_else(|| self.why_no_place(connection.source, shown)) {
            return deny(DeniedKind::Forbidden, why);
        }
        let (name, snapshot) = split_export(shown);
        let found = self.volumes.find_open(name);
        let found = found.and_then(|(at, head)| Some((at, head, self.volumes.table.get(at)?)));
        let is_elsewhere = !found.as_ref().is_some_and(|(_, _, volume)| volume.admits(ticket));
        if let Some((volume, info)) = self.forward.export(shown).filter(|_| is_elsewhere && ticket.is_none()) {
            return Ok((self.open_forwarded(connection, (volume, shown), out), info));
        }
        let Some((at, head, volume)) = found else {
            return deny(DeniedKind::Unknown, format!("volume {shown} is not exported; `holdfast volume list`"));
        };
        if !volume.admits(ticket) {
            return deny(DeniedKind::Later, format!("volume {shown} is closing; connect again later"));
        }
        let (target, info) = match snapshot.map(|snapshot| volume.snapshot_export(name, head, snapshot)) {
            Some(None) if volume.controller.state() == State::Opening => {
                let why = format!("volume {name} is opening; connect again in a moment");
                return deny(DeniedKind::Later, why);
            }
            Some(None) => {
                return deny(DeniedKind::Unknown, format!("there is no {shown}; `holdfast snapshot list {name}`"));
            }
            Some(Some((layer, info))) => (Target::Snapshot(layer), info),
            None => (Target::Head(head), volume.export(export, head)),
        };
        let of = volume.id;
        if ticket.is_none() && self.forward.is_offered(of) {
            return Ok((self.open_forwarded(connection, (of, shown), out), info));
        }
        Ok((self.open_bound(connection, (of, export), Bound { at, target, head }, out), info))
    }

    /// The session is bound for life: it begins when what was asked of the volume before is done.
    fn open_bound(&mut self, connection: Connection, (of, export): (VolumeId, &str), bound: Bound, out: Out) -> Token {
        info(out, format!("client {} opens {}", connection.label, split_ticket(export).0));
        let association = connection.association.clone();
        let session = self.sessions.insert(Session {
            connection,
            export: export.to_string(),
            of,
            is_forwarded: false,
            backlog: Backlog::Nothing,
            bound: Some(bound),
            wrote_at: None,
            opened_at: self.now,
        });
        let volume = self.volumes.table.get_mut(bound.at).expect("just found");
        volume.add_session(bound.head);
        if volume.requests.waits(Barrier::Session(session)) {
            self.sessions.get_mut(session).expect("just put").backlog = Backlog::AtBarrier(Vec::new());
        }
        self.open_writer((bound.at, bound.target), SessionId::Own(session), association, (None, false));
        session
    }

    /// The session begins when others have passed on what they had of the volume.
    fn open_forwarded(&mut self, connection: Connection, (of, export): (VolumeId, &str), out: Out) -> Token {
        info(out, format!("client {} opens {export}, which several hosts offer", connection.label));
        let session = self.sessions.insert(Session {
            connection,
            export: export.to_string(),
            of,
            is_forwarded: true,
            backlog: Backlog::Arriving(Vec::new()),
            bound: None,
            wrote_at: None,
            opened_at: self.now,
        });
        self.forward.owner_events.push_back(OwnerEvent::Arrive { session });
        session
    }

    /// Why a client may not have an export.
    pub(crate) fn why_refused(&self, caller: &Caller, export: &str) -> Option<String> {
        let (shown, _) = split_ticket(export);
        let (name, _) = split_export(shown);
        if self.volumes.find_open(name).is_some_and(|(at, _)| self.volumes.table.get(at).is_some_and(Volume::is_store))
        {
            return Some(format!("volume {name} is the store of a sharing domain, which has no clients of its own"));
        }
        let id = self.volumes.export_id(name).or_else(|| self.forward.export_id(name))?;
        caller.refusal(shown, self.volumes.access.get(&id))
    }

    /// The same of an export of this volume or clone, which need not be here.
    pub fn refuses(&self, caller: &Caller, export: &str, of: VolumeId) -> bool {
        caller.refusal(export, self.volumes.access.get(&of)).is_some()
    }

    /// As [`Host::export`] goes by it, for a front end that tells a client before it opens anything.
    pub fn refusal(&self, caller: &Caller, export: &str) -> Option<String> {
        self.why_refused(caller, export)
    }

    /// Why there is no place for a session, of this host's or of the volume's: what, why, and what to do.
    fn why_no_place(&self, source: Source, export: &str) -> Option<String> {
        let all = || self.sessions.iter().map(|(_, session)| session);
        let taken = Taken::of(source, all().map(|session| session.connection.source));
        if let Err(full) = self.room.admits(source, taken) {
            return Some(no_place("this host", source, full, taken));
        }
        let name = split_export(export).0;
        let found = self.volumes.find_open(name).and_then(|(at, _)| self.volumes.table.get(at));
        let id = found.map(|v| v.id).or_else(|| self.forward.export(export).map(|(id, _)| id))?;
        let own = Taken::of(source, all().filter(|s| s.of == id).map(|s| s.connection.source));
        // Other hosts' clients count, too.
        let taken = Taken { all: own.all.max(found.map_or(0, Volume::sessions)), ..own };
        let room = Room { max: SESSIONS_MAX, kept_for_local: VOLUME_LOCAL_KEPT };
        let full = room.admits(source, taken).err()?;
        Some(no_place(&format!("volume {name}"), source, full, taken))
    }

    // ---- requests ----

    /// A session's request goes to its volume, by way of forwarding where that may be elsewhere.
    pub(crate) fn on_request(&mut self, now: Instant, session: Token, request: BlockRequest, out: Out) {
        let since = self.forward.since(now);
        let Some(of) = self.sessions.get_mut(session) else { return };
        let asked = Asked { request, since: since.max(of.opened_at), came_at: now };
        match &mut of.backlog {
            Backlog::Arriving(requests) | Backlog::AtBarrier(requests) => requests.push(asked),
            Backlog::Nothing => self.submit(now, session, asked, out),
        }
    }

    /// To the volume of a session that has begun.
    fn submit(&mut self, now: Instant, session: Token, asked: Asked, out: Out) {
        if !self.is_forwarded(session) {
            return self.submit_bound(now, session, asked, out);
        }
        let Asked { request, since, .. } = asked;
        self.forward.events.push_back(IngressEvent::Request { session, request, since });
    }

    /// To the controller of the volume that the session is bound to.
    pub(crate) fn submit_bound(&mut self, now: Instant, session: Token, asked: Asked, out: Out) {
        let Asked { request, since, came_at } = asked;
        let bound = self.sessions.get(session).and_then(|session| session.bound);
        let Some(bound) = bound.filter(|bound| self.volumes.table.get(bound.at).is_some()) else {
            let reply = BlockReply { token: request.token, result: Err(BlockError::ShuttingDown) };
            return self.reply_to(session, reply, out);
        };
        let (requester, op) = (Requester::Session(session), Some(request.op.clone()));
        let origin = Origin { requester, token: request.token, op, since, came_at, changes: None };
        self.enter(now, (bound.at, bound.target), SessionId::Own(session), (origin, request.op), out);
    }

    pub(crate) fn reply_to(&self, session: Token, reply: BlockReply, out: Out) {
        if let Some(session) = self.sessions.get(session) {
            out.push(Effect::Reply { to: session.to(), reply });
        }
    }

    /// Tells who has asked.
    pub(crate) fn answer(
        &mut self,
        now: Instant,
        volume: Token,
        origin: Origin,
        result: Result<BlockData, BlockError>,
        out: Out,
    ) {
        let Origin { requester, token, op, since, .. } = origin;
        let reply = BlockReply { token, result };
        let is_elsewhere = matches!(reply.result, Err(BlockError::Deposed | BlockError::ShuttingDown));
        match (requester, op) {
            (Requester::Remote(request), _) => {
                self.forward.owner_events.push_back(OwnerEvent::Reply { request, reply });
            }
            (Requester::Session(session), Some(op))
                if is_elsewhere && !self.is_stopping && self.is_forwarded(session) =>
            {
                let opened_at = self.sessions.get(session).map_or(since, |of| of.opened_at);
                self.hand_back(session, BlockRequest { token, op }, since.max(opened_at));
            }
            (Requester::Session(session), _) => self.reply_to(session, reply, out),
            (Requester::Filters(head), _) => self.drive_filters(now, volume, head, StackEvent::Reply(reply), out),
        }
    }

    fn is_forwarded(&self, session: Token) -> bool {
        self.sessions.get(session).is_some_and(|session| session.is_forwarded)
    }

    pub(crate) fn note_written(&mut self, session: Token, now: Instant) {
        if let Some(session) = self.sessions.get_mut(session) {
            session.wrote_at = Some(now);
        }
    }

    /// What was asked of its volume before the session began is done.
    pub(crate) fn on_session_clear(&mut self, now: Instant, session: Token, out: Out) {
        let Some(of) = self.sessions.get_mut(session) else { return };
        let opened_at = of.opened_at;
        if let Backlog::AtBarrier(requests) = std::mem::take(&mut of.backlog) {
            for asked in requests {
                self.submit(now, session, Asked { since: asked.since.max(opened_at), ..asked }, out);
            }
        }
    }

    // ---- sessions that are forwarded ----

    /// Others have passed on what they had; what was asked here before is waited for, too.
    pub(crate) fn admit_forwarded(&mut self, session: Token, out: Out) {
        let Some(of) = self.sessions.get(session).filter(|s| matches!(s.backlog, Backlog::Arriving(_))) else { return };
        let at = self.volumes.find_id(of.of);
        let open = at.and_then(|at| self.volumes.table.get_mut(at));
        if !open.is_some_and(|volume| volume.requests.waits(Barrier::Forwarded(session))) {
            self.begin_forwarded(session, out);
        }
    }

    pub(crate) fn begin_forwarded(&mut self, session: Token, out: Out) {
        let Some(of) = self.sessions.get_mut(session) else { return };
        let Backlog::Arriving(requests) = std::mem::take(&mut of.backlog) else { return };
        let (volume, export) = (of.of, of.export.clone());
        if !self.forward.is_offered(volume) {
            // Meanwhile only one host has it; the client may find out which.
            return self.abort_session(session, None, out);
        }
        let (client, wrote_at) = (of.connection.association.clone(), of.wrote_at);
        let events = &mut self.forward.events;
        events.push_back(IngressEvent::Open { session, volume, export, client, wrote_at });
        let event = |Asked { request, since, .. }| IngressEvent::Request { session, request, since };
        events.extend(requests.into_iter().map(event));
        if self.serves(volume) {
            self.bind_here(session);
        }
    }

    /// Binds a forwarded session to its volume, which serves here; false where it does not, or has no such clone or snapshot.
    pub(crate) fn bind_here(&mut self, session: Token) -> bool {
        let Some(of) = self.sessions.get(session) else { return false };
        if of.bound.is_some() {
            return true;
        }
        let (name, snapshot) = split_export(&of.export);
        let Some((at, head)) = self.volumes.find_open(name) else { return false };
        let open = |v: &&mut Volume| v.exported && v.controller.state() == State::Open;
        let Some(volume) = self.volumes.table.get_mut(at).filter(open) else { return false };
        let target = match snapshot.map(|snapshot| volume.snapshot(head, snapshot)) {
            Some(None) => return false,
            Some(Some((layer, _))) => Target::Snapshot(layer),
            None => Target::Head(head),
        };
        volume.add_session(head);
        let (wrote_at, is_fenced) = self.forward.standing(session);
        let of = self.sessions.get_mut(session).expect("just seen");
        of.bound = Some(Bound { at, target, head });
        let (client, wrote_at) = (of.connection.association.clone(), wrote_at.max(of.wrote_at));
        self.open_writer((at, target), SessionId::Own(session), client, (wrote_at, is_fenced));
        true
    }

    /// The volume is not served here any more.
    pub(crate) fn unbind_here(&mut self, session: Token) {
        let Some(of) = self.sessions.get_mut(session) else { return };
        if let Some(bound) = of.bound.take() {
            self.leave_volume(session, bound);
        }
    }

    fn leave_volume(&mut self, session: Token, bound: Bound) {
        if let Some(volume) = self.volumes.table.get_mut(bound.at) {
            volume.remove_session(bound.head);
        }
        self.close_writer((bound.at, bound.target), SessionId::Own(session));
        self.turns.left.push_back(Left::Session { at: bound.at, session: SessionId::Own(session) });
    }

    /// A controller is gone: its sessions that are forwarded wait for who follows, the others end.
    pub(crate) fn let_sessions_go(&mut self, volume: Token, out: Out) {
        for session in self.sessions_where(|session| session.at() == Some(volume)) {
            if self.is_forwarded(session) && !self.is_stopping {
                self.unbind_here(session);
                self.forward.events.push_back(IngressEvent::NotHere { session });
            } else {
                self.abort_session(session, None, out);
            }
        }
    }

    /// Sessions of a volume that several hosts offer from here on are forwarded.
    pub(crate) fn forward_sessions_of(&mut self, volume: VolumeId) {
        let Some(at) = self.volumes.find_id(volume) else { return };
        let own = |session: &Session| {
            session.at() == Some(at) && !session.is_forwarded && split_ticket(&session.export).1.is_none()
        };
        for session in self.sessions_where(own) {
            let of = self.sessions.get_mut(session).expect("just listed");
            // Before, nothing that it asked could have gone elsewhere.
            (of.is_forwarded, of.opened_at) = (true, self.now);
            let (export, client, wrote_at) = (of.export.clone(), of.connection.association.clone(), of.wrote_at);
            self.forward.events.push_back(IngressEvent::Open { session, volume, export, client, wrote_at });
        }
    }

    /// Only this host serves its volume.
    pub(crate) fn stop_forwarding(&mut self, session: Token) {
        if let Some(session) = self.sessions.get_mut(session) {
            session.is_forwarded = false;
        }
    }

    // ---- ends ----

    /// The client is gone.
    pub(crate) fn close_session(&mut self, session: Token) {
        let Some(of) = self.sessions.remove(session) else { return };
        if let Some(bound) = of.bound {
            self.leave_volume(session, bound);
        }
        if of.is_forwarded {
            self.forward.events.push_back(IngressEvent::Close { session });
        }
    }

    /// Ends a session without an answer to anything.
    pub(crate) fn abort_session(&mut self, session: Token, why: Option<String>, out: Out) {
        if let Some(to) = self.sessions.get(session).map(Session::to) {
            out.push(Effect::Abort { to, why });
            self.close_session(session);
        }
    }

    /// Ends the sessions of clients that may not have their export any more.
    pub(crate) fn cut_refused(&mut self, out: Out) {
        for session in self.sessions.tokens() {
            let of = self.sessions.get(session).expect("just listed");
            if let Some(why) = self.why_refused(&of.connection.caller, &of.export) {
                self.abort_session(session, Some(format!("{why}; it was connected, and is cut off")), out);
            }
        }
    }

    // ---- counts ----

    pub(crate) fn sessions_where(&self, is_meant: impl Fn(&Session) -> bool) -> Vec<Token> {
        self.sessions.iter().filter(|(_, session)| is_meant(session)).map(|(token, _)| token).collect()
    }

    /// Of a volume's head, and of its snapshots.
    pub(crate) fn sessions_of_head(&self, at: Token, head: HeadId) -> Vec<Token> {
        self.sessions_where(|session| session.is_of_head(at, head))
    }

    /// Clients here and at other hosts.
    pub(crate) fn users_of(&self, at: Token, head: HeadId, target: Target) -> usize {
        let own = self.sessions.iter().filter(|(_, session)| session.is_bound_to(at, target)).count();
        own + self.remotes_of(at, head, Some(target))
    }

    /// Names of a volume's or a clone's clients, for people; of those at other hosts it is known how many they are.
    pub fn users(&self, name: &str) -> Vec<String> {
        let Some((at, head)) = self.volumes.find_open(name) else { return Vec::new() };
        let target = Target::Head(head);
        let own = self.sessions.iter().filter(|(_, session)| session.is_bound_to(at, target));
        let mut names: Vec<String> = own.map(|(_, session)| session.connection.label.clone()).collect();
        match self.remotes_of(at, head, Some(target)) {
            0 => {}
            1 => names.push("one at another host".to_string()),
            count => names.push(format!("{count} at other hosts")),
        }
        names
    }
}

/// Why somebody is not let in: what, why, and what to do.
fn no_place(whose: &str, source: Source, full: Full, taken: Taken) -> String {
    match full {
        Full::All => format!("{whose} has {} clients, which is the bound; close one first", taken.all),
        Full::Share => format!(
            "{whose} has {} clients, {} of them from {source}, and what is left is kept for others; close one of those first",
            taken.all, taken.own
        ),
    }
}
