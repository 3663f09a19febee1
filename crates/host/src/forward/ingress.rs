//! The ingress of a host: the sessions of its clients, and where what they ask is carried out.
//!
//! States of a session
//!
//! | state | entered by | left by |
//! | --- | --- | --- |
//! | here | the route says so | the controller answers that it is not the owner, or the route says otherwise → waiting |
//! | waiting | opened; its link went down; refused as by no owner | the route says here → here; a link to the owner is up → attaching |
//! | attaching | its owner is asked | answered → attached; refused → waiting, or ended where there is no such export |
//! | attached | its owner has it | its link goes down, the owner is another, the owner says that it is none → waiting |
//! | leaving | the volume is not offered here any more | the owner confirms → ended |
//!
//! From each but `here` it is ended by [`LAPSE`] without word of an owner, and from each where the ingress itself stood
//! still for so long (invariants 2 and 3 of the crate): a client whose connection ends without a word may try again,
//! here or elsewhere.
//!
//! Requests of a session that is not `here` are kept until they are answered. Those of one that is here are the controller's;
//! where it turns out not to own the volume the shell hands them in again.
//!
//! Links: one to each host that owns a volume that is offered here. They are greeted, and asked for a tick now and then; one
//! that does not answer for [`SILENCE_MAX`] is made anew.
//!
//! Limits: sessions and their requests are bounded by who opens them.

use super::travelling;
use crate::Mutations;
use holdfast_base::time::earliest;
use holdfast_base::{
    BlockData, BlockError, BlockOp, BlockReply, BlockRequest, Buf, Effects, GridId, InstanceId, Instant, RequestToken,
    Token, VolumeId, crc32c,
};
use holdfast_format::forward::{
    Answer, Ask, CLIENTS_SINCE, Client, FORWARD, Failure, LIFETIME_MS, Refusal, TELLS_SINCE, TickMs,
};
use std::collections::BTreeMap;
use std::time::Duration;

/// A session that has not heard of an owner for so long is ended: longer than its owner takes what it sent, by what clocks
/// may drift in that time.
pub const LAPSE: Duration = Duration::from_millis(LIFETIME_MS + 2_000);

/// What was asked for so long ago is not passed on any more: its session ends. Together with the owner's [`LIFETIME_MS`] this is how
/// long after a client's last word, on a path on which it hears nothing, something of it may still be carried out.
const QUIESCE_MAX: Duration = LAPSE;

/// A process that did nothing for so long may find what clients sent at any time in between; and finds it within
/// [`STALL_ECHO`].
const STALL_MIN: Duration = Duration::from_millis(100);
const STALL_ECHO: Duration = Duration::from_secs(1);

/// Pace of asking an owner for its tick.
const PING_PACE: Duration = Duration::from_millis(1_000);

/// A link whose other end does not answer for so long is made anew.
const SILENCE_MAX: Duration = Duration::from_millis(3_000);

/// Pause before an owner is asked again that was none.
const RETRY_PAUSE: Duration = Duration::from_millis(20);

/// Another host, as the shell numbers them.
pub type Peer = usize;

/// Where a volume is served, as far as this host knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Route {
    /// By the controller beside the ingress.
    Here,
    At(Peer),
    /// By nobody, for the moment.
    Nowhere,
    /// It is not offered here any more.
    Closed,
}

#[derive(Clone, Debug)]
pub enum Event {
    /// A client has opened an export of a volume.
    Open {
        session: Token,
        volume: VolumeId,
        export: String,
        client: Client,
        /// When its last write was answered, in a session that was not the ingress's.
        wrote_at: Option<Instant>,
    },
    /// The client is gone.
    Close {
        session: Token,
    },
    /// From the client; or handed in again, since the controller does not own the volume.
    Request {
        session: Token,
        request: BlockRequest,
        /// The earliest that the client may have sent it: see [`Ingress::since`]. Often before [`Event::Open`], where the
        /// session had to wait for others.
        since: Instant,
    },
    /// The controller beside the ingress does not own the volume that the session is of; what it was asked follows.
    NotHere {
        session: Token,
    },
    Route {
        volume: VolumeId,
        route: Route,
    },
    /// A connection to the host is up.
    Connected {
        peer: Peer,
    },
    /// It is gone.
    Disconnected {
        peer: Peer,
    },
    Answer {
        peer: Peer,
        token: u64,
        answer: Answer,
        payload: Buf,
    },
    /// The host asks another one something of its own ([`Ask::Yield`]): answered by [`Effect::Answered`].
    Ask {
        peer: Peer,
        ticket: u64,
        ask: Ask,
    },
    /// A volume of the host tells one of another host something ([`Ask::Tell`]): lost where that can't be reached.
    Tell {
        peer: Peer,
        from: VolumeId,
        to: VolumeId,
        payload: Buf,
    },
    Tick,
}

#[derive(Clone, Debug)]
pub enum Effect {
    /// To the controller beside the ingress.
    Submit {
        session: Token,
        request: BlockRequest,
        since: Instant,
    },
    /// To the client.
    Reply {
        session: Token,
        reply: BlockReply,
    },
    /// End the client's connection without an answer to anything: it may try again.
    Abort {
        session: Token,
    },
    Send {
        peer: Peer,
        token: u64,
        ask: Ask,
        payload: Buf,
    },
    /// Make the connection anew; [`Event::Disconnected`] does not follow.
    Reconnect {
        peer: Peer,
    },
    /// What the other host says; `None` where it can't be asked, or the connection went first.
    Answered {
        ticket: u64,
        answer: Option<Answer>,
    },
    /// The host can't be used as it is: somebody has to act.
    Trouble {
        peer: Peer,
        refusal: Refusal,
    },
}

type Out<'a> = &'a mut Effects<Effect>;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Here,
    Waiting { retry_at: Instant },
    Attaching(Peer),
    Attached(Peer),
    Leaving(Peer),
}

struct Session {
    volume: VolumeId,
    export: String,
    client: Client,
    /// When its last write was answered.
    wrote_at: Option<Instant>,
    /// Another client has followed it.
    is_fenced: bool,
    state: State,
    /// Not answered yet, and not the controller's.
    pending: BTreeMap<RequestToken, (BlockOp, Instant)>,
    /// It was never attached, nor here.
    fresh: bool,
    /// When an owner was last heard of, where no link says it.
    heard_at: Instant,
}

#[derive(Clone, Copy, Debug)]
enum Call {
    Hello,
    Ping,
    Attach(Token),
    Detach(Token),
    Op(Token, RequestToken),
    Host(u64),
}

struct Link {
    /// The owner has answered the greeting.
    up: bool,
    /// Of the messages, from then on.
    version: u32,
    calls: BTreeMap<u64, Call>,
    tick: TickMs,
    heard_at: Instant,
    ping_at: Instant,
    /// When the oldest ping was sent that is unanswered; or the greeting.
    asked_at: Option<Instant>,
    /// What the owner waits for, which waits for sessions that are being attached.
    barriers: Vec<u64>,
}

/// What `status` shows of a session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SessionView {
    pub volume: VolumeId,
    /// The host that it is attached to.
    pub at: Option<Peer>,
    pub is_here: bool,
    pub pending: usize,
}

pub struct Ingress {
    grid: GridId,
    host: String,
    instance: InstanceId,
    now: Instant,
    next_token: u64,
    next_number: u64,
    sessions: BTreeMap<Token, Session>,
    routes: BTreeMap<VolumeId, Route>,
    links: BTreeMap<Peer, Link>,
    /// No session lapses before.
    lapse_from: Instant,
    /// The last time that the process stood still for a while: from, to.
    stall: (Instant, Instant),
    mutations: Mutations,
}

impl Ingress {
    pub fn new(grid: GridId, host: &str, instance: InstanceId) -> Ingress {
        Ingress {
            grid,
            host: host.to_string(),
            instance,
            now: Instant::ZERO,
            next_token: 1,
            next_number: 1,
            sessions: BTreeMap::new(),
            routes: BTreeMap::new(),
            links: BTreeMap::new(),
            lapse_from: Instant::ZERO,
            stall: (Instant::ZERO, Instant::ZERO),
            mutations: Mutations::default(),
        }
    }

    pub fn set_mutations(&mut self, mutations: Mutations) {
        self.mutations = mutations;
    }

    /// Handles one event to completion; everything wanted of the world is in `out` afterwards.
    pub fn handle(&mut self, now: Instant, event: Event, out: Out) {
        let stood_still = now.since(self.now) >= LAPSE && self.now > Instant::ZERO;
        if now.since(self.now) >= STALL_MIN && self.now > Instant::ZERO {
            self.stall = (self.now, now);
        }
        self.now = self.now.max(now);
        // Before anything else: a process that stood still has the bytes of clients that may have gone elsewhere.
        self.end_lapsed(stood_still, out);
        match event {
            Event::Open { session, volume, export, client, wrote_at } => {
                self.on_open(session, volume, export, (client, wrote_at), out);
            }
            Event::Close { session } => self.on_close(session, out),
            Event::Request { session, request, since } => self.on_request(session, request, since, out),
            Event::NotHere { session } => self.on_not_here(session),
            Event::Route { volume, route } => self.on_route(volume, route, out),
            Event::Connected { peer } => self.on_connected(peer, out),
            Event::Disconnected { peer } => self.on_disconnected(peer, out),
            Event::Ask { peer, ticket, ask } => match self.links.get(&peer).is_some_and(|l| l.up) {
                true => self.send(peer, Some(Call::Host(ticket)), ask, Buf::empty(), out),
                false => out.push(Effect::Answered { ticket, answer: None }),
            },
            Event::Tell { peer, from, to, payload } => {
                if self.links.get(&peer).is_some_and(|link| link.up && link.version >= TELLS_SINCE) {
                    self.send(peer, None, Ask::Tell { from, to }, payload, out);
                }
            }
            Event::Answer { peer, token, answer, payload } => self.on_answer(peer, token, answer, payload, out),
            Event::Tick => self.on_tick(out),
        }
        for peer in self.links.iter().filter(|(_, l)| !l.barriers.is_empty()).map(|(p, _)| *p).collect::<Vec<_>>() {
            self.pass_barriers(peer, out);
        }
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        let sessions = self.sessions.values().map(|s| {
            let retry = match s.state {
                State::Waiting { retry_at } if self.has_owner(s) => Some(retry_at),
                _ => None,
            };
            earliest(retry, self.lapse_of(s))
        });
        let links = self.links.values().map(|l| match l.asked_at {
            Some(at) => earliest(Some(at + SILENCE_MAX), l.up.then_some(l.ping_at)),
            None => Some(l.ping_at),
        });
        // By this it notices that it stood still, and knows that it did not before its first session comes.
        let watch = (self.now > Instant::ZERO).then(|| self.now + LAPSE / 4);
        sessions.chain(links).fold(watch, earliest)
    }

    /// Whether the session's requests are the controller's beside the ingress.
    pub fn is_here(&self, session: Token) -> bool {
        self.sessions.get(&session).is_some_and(|s| s.state == State::Here)
    }

    pub fn has(&self, session: Token) -> bool {
        self.sessions.contains_key(&session)
    }

    /// A write of a session that is here was answered.
    pub fn note_written(&mut self, session: Token, now: Instant) {
        if let Some(session) = self.sessions.get_mut(&session) {
            session.wrote_at = Some(now);
        }
    }

    /// Another client has followed that of a session: so it is wherever the volume is served from here on.
    pub fn note_fenced(&mut self, session: Token) {
        if let Some(session) = self.sessions.get_mut(&session) {
            session.is_fenced = true;
        }
    }

    pub fn is_fenced(&self, session: Token) -> bool {
        self.sessions.get(&session).is_some_and(|session| session.is_fenced)
    }

    /// When the session's last write was answered, wherever that was.
    pub fn wrote_at(&self, session: Token) -> Option<Instant> {
        self.sessions.get(&session)?.wrote_at
    }

    pub fn sessions_of(&self, volume: VolumeId) -> impl Iterator<Item = Token> {
        self.sessions.iter().filter(move |(_, s)| s.volume == volume).map(|(token, _)| *token)
    }

    pub fn view(&self, session: Token) -> Option<SessionView> {
        let session = self.sessions.get(&session)?;
        let at = match session.state {
            State::Attached(peer) | State::Attaching(peer) | State::Leaving(peer) => Some(peer),
            State::Here | State::Waiting { .. } => None,
        };
        let is_here = session.state == State::Here;
        Some(SessionView { volume: session.volume, at, is_here, pending: session.pending.len() })
    }

    fn route(&self, volume: VolumeId) -> Route {
        self.routes.get(&volume).copied().unwrap_or(Route::Nowhere)
    }

    /// The host that it could be attached to now.
    fn owner_of(&self, session: &Session) -> Option<Peer> {
        match self.route(session.volume) {
            Route::At(peer) if self.links.get(&peer).is_some_and(|l| l.up) => Some(peer),
            _ => None,
        }
    }

    fn has_owner(&self, session: &Session) -> bool {
        self.route(session.volume) == Route::Here || self.owner_of(session).is_some()
    }

    fn lapse_of(&self, session: &Session) -> Option<Instant> {
        let heard_at = match session.state {
            State::Here => return None,
            State::Attached(peer) | State::Leaving(peer) => self.links.get(&peer).map(|l| l.heard_at),
            State::Waiting { .. } | State::Attaching(_) => None,
        };
        Some(heard_at.unwrap_or(Instant::ZERO).max(session.heard_at) + LAPSE)
    }

    fn end_lapsed(&mut self, stood_still: bool, out: Out) {
        if self.now < self.lapse_from && !stood_still || self.mutations.never_lapses() {
            return;
        }
        let lapsed = |s: &Session| stood_still || self.lapse_of(s).is_some_and(|at| at <= self.now);
        let lapsed: Vec<Token> = self.sessions.iter().filter(|(_, s)| lapsed(s)).map(|(token, _)| *token).collect();
        for session in lapsed {
            self.end(session, out);
        }
        // A session's lapse is only ever put off, and that of a new one is this far away at least.
        let lapses = self.sessions.values().filter_map(|s| self.lapse_of(s));
        self.lapse_from = lapses.fold(self.now + LAPSE, Instant::min);
    }

    fn end(&mut self, token: Token, out: Out) {
        self.forget_calls(token);
        let Some(session) = self.sessions.remove(&token) else { return };
        if let State::Attaching(peer) | State::Attached(peer) = session.state {
            self.send(peer, None, Ask::Detach { session: token.0 }, Buf::empty(), out);
        }
        out.push(Effect::Abort { session: token });
    }

    /// What was asked for the session before is not waited for any more: its answers say nothing about what is asked anew.
    fn forget_calls(&mut self, session: Token) {
        if self.mutations.hears_old_answers() {
            return;
        }
        for link in self.links.values_mut() {
            link.calls
                .retain(|_, call| !matches!(call, Call::Attach(s) | Call::Detach(s) | Call::Op(s, _) if *s == session));
        }
    }

    fn on_open(
        &mut self,
        token: Token,
        volume: VolumeId,
        export: String,
        (client, wrote_at): (Client, Option<Instant>),
        out: Out,
    ) {
        let state = State::Waiting { retry_at: self.now };
        let session = Session {
            volume,
            export,
            client,
            wrote_at,
            is_fenced: false,
            state,
            pending: BTreeMap::new(),
            fresh: true,
            heard_at: self.now,
        };
        let before = self.sessions.insert(token, session);
        assert!(before.is_none(), "session {token:?} is open already");
        self.steer(token, out);
    }

    fn on_close(&mut self, token: Token, out: Out) {
        let Some(session) = self.sessions.remove(&token) else { return };
        self.forget_calls(token);
        if let State::Attaching(peer) | State::Attached(peer) = session.state {
            self.send(peer, None, Ask::Detach { session: token.0 }, Buf::empty(), out);
        }
    }

    /// The earliest that a client may have sent what is read of it at `now`.
    pub fn since(&self, now: Instant) -> Instant {
        let (from, to) = self.stall;
        if now.since(self.now) >= STALL_MIN && self.now > Instant::ZERO {
            self.now
        } else if now.since(to) < STALL_ECHO {
            from
        } else {
            now
        }
    }

    fn on_request(&mut self, token: Token, request: BlockRequest, since: Instant, out: Out) {
        let is_old = self.is_too_old(since);
        let Some(session) = self.sessions.get_mut(&token) else { return };
        match session.state {
            State::Here if is_old => return self.end(token, out),
            State::Here => return out.push(Effect::Submit { session: token, request, since }),
            _ => {}
        }
        let before = session.pending.insert(request.token, (request.op, since));
        assert!(before.is_none(), "session {token:?} asks {:?} twice", request.token);
        match session.state {
            _ if is_old => self.steer(token, out),
            State::Attached(peer) => self.send_op(peer, token, request.token, out),
            _ => {}
        }
    }

    fn on_not_here(&mut self, token: Token) {
        let now = self.now;
        let Some(session) = self.sessions.get_mut(&token).filter(|s| s.state == State::Here) else { return };
        // The controller has ended for good: none of what it took is under way any more.
        (session.state, session.heard_at) = (State::Waiting { retry_at: now + RETRY_PAUSE }, now);
    }

    fn on_route(&mut self, volume: VolumeId, route: Route, out: Out) {
        let before = match route {
            Route::Closed => self.routes.remove(&volume),
            _ => self.routes.insert(volume, route),
        };
        if before == Some(route) && route != Route::Here {
            return;
        }
        let of_volume: Vec<Token> = self.sessions_of(volume).collect();
        for token in of_volume {
            if let State::Waiting { retry_at } = &mut self.sessions.get_mut(&token).expect("just listed").state {
                *retry_at = self.now;
            }
            match route {
                Route::Closed => self.leave(token, out),
                _ => self.steer(token, out),
            }
        }
    }

    /// The volume is not offered here any more: its clients are told once nothing of theirs can be carried out.
    fn leave(&mut self, token: Token, out: Out) {
        let session = self.sessions.get_mut(&token).expect("just listed");
        match session.state {
            State::Attached(peer) if !session.pending.is_empty() => {
                session.state = State::Leaving(peer);
                self.forget_calls(token);
                self.send(peer, Some(Call::Detach(token)), Ask::Detach { session: token.0 }, Buf::empty(), out);
            }
            State::Attached(_) => self.end(token, out),
            // What it had sent before may still be carried out: it waits for its lapse.
            State::Waiting { .. } | State::Attaching(_) if !session.pending.is_empty() => {
                session.state = State::Waiting { retry_at: self.now };
                self.forget_calls(token);
            }
            State::Leaving(_) => {}
            State::Here | State::Waiting { .. } | State::Attaching(_) => self.end(token, out),
        }
    }

    /// To be passed on.
    fn is_too_old(&self, since: Instant) -> bool {
        self.now.since(since) >= QUIESCE_MAX && !self.mutations.never_lapses()
    }

    /// Brings a session to where its volume is served. One of which something is too old waits for its end.
    fn steer(&mut self, token: Token, out: Out) {
        let session = &self.sessions[&token];
        if session.pending.values().any(|(_, since)| self.is_too_old(*since)) {
            if !matches!(session.state, State::Here | State::Leaving(_)) {
                self.wait(token, self.now + LAPSE);
            }
            return;
        }
        let session = &self.sessions[&token];
        let (state, route, owner) = (session.state, self.route(session.volume), self.owner_of(session));
        match (state, route) {
            (State::Leaving(_), _) => {}
            (State::Here, Route::Here) => {}
            (State::Attaching(peer) | State::Attached(peer), Route::At(at)) if at == peer => {}
            (State::Waiting { retry_at }, _) if retry_at > self.now => {}
            (_, Route::Here) => self.bring_here(token, out),
            (_, _) => {
                self.wait(token, self.now);
                if let Some(peer) = owner {
                    self.attach(token, peer, out);
                }
            }
        }
    }

    fn bring_here(&mut self, token: Token, out: Out) {
        self.forget_calls(token);
        let session = self.sessions.get_mut(&token).expect("asked for one that is there");
        (session.state, session.fresh) = (State::Here, false);
        for (request, (op, since)) in std::mem::take(&mut session.pending) {
            out.push(Effect::Submit { session: token, request: BlockRequest { token: request, op }, since });
        }
    }

    fn wait(&mut self, token: Token, retry_at: Instant) {
        self.forget_calls(token);
        let session = self.sessions.get_mut(&token).expect("asked for one that is there");
        session.heard_at = match session.state {
            State::Here => self.now,
            State::Attached(peer) => {
                self.links.get(&peer).map_or(session.heard_at, |l| l.heard_at.max(session.heard_at))
            }
            _ => session.heard_at,
        };
        session.state = State::Waiting { retry_at };
    }

    fn attach(&mut self, token: Token, peer: Peer, out: Out) {
        let session = self.sessions.get_mut(&token).expect("asked for one that is there");
        session.state = State::Attaching(peer);
        let (export, fresh, client) = (session.export.clone(), session.fresh, session.client.clone());
        let wrote_ms = session.wrote_at.map(|at| self.now.since(at).as_millis() as u64);
        let fenced = session.is_fenced;
        let session = token.0;
        let ask = match self.links.get(&peer).is_some_and(|link| link.version >= CLIENTS_SINCE) {
            true => Ask::AttachAs { session, export, fresh, client, wrote_ms, fenced },
            false => Ask::Attach { session, export, fresh },
        };
        self.send(peer, Some(Call::Attach(token)), ask, Buf::empty(), out);
    }

    /// Nobody waits for an answer without a call.
    fn send(&mut self, peer: Peer, call: Option<Call>, ask: Ask, payload: Buf, out: Out) {
        let Some(link) = self.links.get_mut(&peer) else { return };
        let token = self.next_token;
        self.next_token += 1;
        if let Some(call) = call {
            link.calls.insert(token, call);
        }
        out.push(Effect::Send { peer, token, ask, payload });
    }

    fn send_op(&mut self, peer: Peer, token: Token, request: RequestToken, out: Out) {
        let (op, payload) = travelling(&self.sessions[&token].pending[&request].0);
        let Some(tick) = self.links.get(&peer).map(|l| l.tick) else { return };
        self.send(peer, Some(Call::Op(token, request)), Ask::Op { session: token.0, tick, op }, payload, out);
    }

    fn on_connected(&mut self, peer: Peer, out: Out) {
        let link = Link {
            up: false,
            version: FORWARD.oldest,
            calls: BTreeMap::new(),
            tick: 0,
            heard_at: Instant::ZERO,
            ping_at: self.now + PING_PACE,
            asked_at: Some(self.now),
            barriers: Vec::new(),
        };
        self.links.insert(peer, link);
        let number = self.next_number;
        self.next_number += 1;
        let (versions, grid, host, instance) = (FORWARD, self.grid, self.host.clone(), self.instance);
        self.send(peer, Some(Call::Hello), Ask::Hello { versions, grid, host, instance, number }, Buf::empty(), out);
    }

    fn on_disconnected(&mut self, peer: Peer, out: Out) {
        let on_it = |s: &Session| matches!(s.state, State::Attaching(p) | State::Attached(p) if p == peer);
        let on_it: Vec<Token> = self.sessions.iter().filter(|(_, s)| on_it(s)).map(|(token, _)| *token).collect();
        for token in on_it {
            self.wait(token, self.now);
        }
        // One that is leaving goes by when its owner was last heard.
        let Some(link) = self.links.remove(&peer) else { return };
        let heard_at = link.heard_at;
        for session in self.sessions.values_mut().filter(|s| s.state == State::Leaving(peer)) {
            session.heard_at = session.heard_at.max(heard_at);
        }
        for call in link.calls.into_values() {
            if let Call::Host(ticket) = call {
                out.push(Effect::Answered { ticket, answer: None });
            }
        }
    }

    fn on_answer(&mut self, peer: Peer, token: u64, answer: Answer, payload: Buf, out: Out) {
        let Some(link) = self.links.get_mut(&peer) else { return };
        if let Answer::Barrier { barrier } = answer {
            return link.barriers.push(barrier);
        }
        if let Answer::Fenced { session } = answer {
            return self.note_fenced(Token(session));
        }
        let Some(call) = link.calls.remove(&token) else { return };
        match (call, answer) {
            (Call::Hello, Answer::Hello { tick, version, .. }) => {
                self.heard(peer, tick);
                let link = self.links.get_mut(&peer).expect("it has just answered");
                (link.up, link.version) = (true, version);
                self.steer_to(peer, out);
            }
            (Call::Hello, Answer::Refused(refusal)) => {
                out.push(Effect::Trouble { peer, refusal });
                self.reconnect(peer, out);
            }
            (Call::Ping, Answer::Pong { tick }) => self.heard(peer, tick),
            (Call::Attach(session), Answer::Attached) => self.on_attached(session, peer, out),
            (Call::Attach(session), Answer::Refused(Refusal::Unknown | Refusal::Full)) => self.end(session, out),
            (Call::Attach(session), Answer::Refused(_)) => self.wait(session, self.now + RETRY_PAUSE),
            (Call::Detach(session), Answer::Detached) => self.end(session, out),
            (Call::Op(session, request), Answer::Stale { tick }) => {
                self.heard(peer, tick);
                self.send_op(peer, session, request, out);
            }
            (Call::Op(session, _), Answer::Failed(Failure::NotOwner)) => self.wait(session, self.now + RETRY_PAUSE),
            (Call::Op(session, request), answer) => match result_of(answer, payload) {
                Some(result) => self.reply(session, request, result, out),
                None => self.reconnect(peer, out),
            },
            (Call::Host(ticket), answer) => out.push(Effect::Answered { ticket, answer: Some(answer) }),
            (Call::Hello | Call::Ping | Call::Attach(_) | Call::Detach(_), _) => self.reconnect(peer, out),
        }
    }

    /// What came before is asked, once no session is half attached.
    fn pass_barriers(&mut self, peer: Peer, out: Out) {
        let is_attaching = self.sessions.values().any(|s| s.state == State::Attaching(peer) && !s.fresh);
        let Some(link) = self.links.get_mut(&peer).filter(|l| !is_attaching && !l.barriers.is_empty()) else { return };
        for barrier in std::mem::take(&mut link.barriers) {
            self.send(peer, None, Ask::Passed { barrier }, Buf::empty(), out);
        }
    }

    fn heard(&mut self, peer: Peer, tick: TickMs) {
        let link = self.links.get_mut(&peer).expect("it has just answered");
        link.tick = link.tick.max(tick);
        (link.heard_at, link.asked_at) = (self.now, None);
        link.ping_at = self.now + PING_PACE;
    }

    fn on_attached(&mut self, token: Token, peer: Peer, out: Out) {
        let session = self.sessions.get_mut(&token).expect("its calls go with it");
        (session.state, session.fresh) = (State::Attached(peer), false);
        let requests: Vec<RequestToken> = session.pending.keys().copied().collect();
        for request in requests {
            self.send_op(peer, token, request, out);
        }
    }

    fn reply(&mut self, token: Token, request: RequestToken, result: Result<BlockData, BlockError>, out: Out) {
        let session = self.sessions.get_mut(&token).expect("its calls go with it");
        let (op, _) = session.pending.remove(&request).expect("it was asked, and not answered yet");
        if op.changes() && result.is_ok() {
            session.wrote_at = Some(self.now);
        }
        out.push(Effect::Reply { session: token, reply: BlockReply { token: request, result } });
    }

    fn reconnect(&mut self, peer: Peer, out: Out) {
        self.on_disconnected(peer, out);
        out.push(Effect::Reconnect { peer });
    }

    /// Sessions that wait for this host, now that it can be asked.
    fn steer_to(&mut self, peer: Peer, out: Out) {
        let waits = |s: &Session| matches!(s.state, State::Waiting { .. }) && self.owner_of(s) == Some(peer);
        let waiting: Vec<Token> = self.sessions.iter().filter(|(_, s)| waits(s)).map(|(token, _)| *token).collect();
        for token in waiting {
            self.steer(token, out);
        }
    }

    fn on_tick(&mut self, out: Out) {
        let due = |s: &Session| matches!(s.state, State::Waiting { retry_at } if retry_at <= self.now);
        let due: Vec<Token> = self.sessions.iter().filter(|(_, s)| due(s)).map(|(token, _)| *token).collect();
        for token in due {
            if self.has_owner(&self.sessions[&token]) {
                self.steer(token, out);
            }
        }
        for peer in self.links.keys().copied().collect::<Vec<_>>() {
            let link = self.links.get_mut(&peer).expect("just listed");
            if link.asked_at.is_some_and(|at| at + SILENCE_MAX <= self.now) {
                self.reconnect(peer, out);
            } else if link.up && link.ping_at <= self.now {
                link.ping_at = self.now + PING_PACE;
                link.asked_at = link.asked_at.or(Some(self.now));
                self.send(peer, Some(Call::Ping), Ask::Ping, Buf::empty(), out);
            }
        }
    }
}

/// What an answer says of a request; `None` where it says nothing that could be.
fn result_of(answer: Answer, payload: Buf) -> Option<Result<BlockData, BlockError>> {
    Some(match answer {
        Answer::Done => Ok(BlockData::Done),
        Answer::Data { crc } if crc == crc32c(&payload) => Ok(BlockData::Data(vec![payload])),
        Answer::Extents(extents) => Ok(BlockData::Status(extents.into_iter().map(Into::into).collect())),
        Answer::Failed(failure) => Err(match failure {
            Failure::OutOfRange => BlockError::OutOfRange,
            Failure::NoSpace => BlockError::NoSpace,
            Failure::Unavailable => BlockError::Unavailable,
            Failure::NotOwner => BlockError::Deposed,
            Failure::Invalid => BlockError::Invalid,
            Failure::NotWriter => BlockError::NotWriter,
        }),
        _ => return None,
    })
}
