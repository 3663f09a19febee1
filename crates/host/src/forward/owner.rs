//! The owner's end of forwarding: what other hosts' ingresses ask of the volumes that this one owns.
//!
//! States of a link: greeting (what an earlier link of the same ingress left under way is waited for) → up → gone, with
//! what is under way of it or without.
//! States of a session: binding (the shell looks for the export; what an earlier session of the number left under way is
//! waited for) → attached → detached.
//!
//! Invariants
//! 1. Of one ingress's links only the newest is read from, and its greeting is answered when nothing of the others is
//!    under way any more: what they had asked and is asked again is not overtaken by its first copy.
//! 2. A request with a tick older than [`LIFETIME_MS`] is not carried out (protocol rule 22).
//! 3. A session begins, here or attached, when all that other ingresses had before has come ([`Ask::Passed`]), or
//!    nothing more of them can be carried out: its client may have left another path, on which a write is still under
//!    way.
//! 4. Every request that reached a controller is answered by it once, whatever became of who asked.
//!
//! Limits: [`SESSIONS_MAX`] sessions, [`REQUESTS_MAX`] requests under way; beyond, what is asked is refused or its link ended.

use super::arrived;
use crate::Mutations;
use crate::homes::host_of_link;
use holdfast_base::{
    BlockData, BlockReply, BlockRequest, Buf, Effects, GridId, InstanceId, Instant, RequestToken, Slab, Token,
    VolumeId, buf::concat, crc32c,
};
use holdfast_format::forward::{
    Answer, Ask, CLIENTS_SINCE, Client, FORWARD, Failure, LIFETIME_MS, Op, Refusal, TickMs,
};
use holdfast_format::versions::Versions;
use holdfast_format::wire::PAYLOAD_BYTES_MAX;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Sessions of all ingresses: as many as their own hosts take.
const SESSIONS_MAX: usize = 4096;

/// Requests of all sessions.
const REQUESTS_MAX: usize = 65_536;

/// Longest range of a status request: what NBD can ask for. Its extents fit a frame.
const STATUS_BYTES_MAX: u64 = 4 << 30;

/// A connection, as the shell numbers them; never used again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LinkId(pub u64);

/// What became of looking for an export.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Binding {
    Bound,
    Refused(Refusal),
}

#[derive(Clone, Debug)]
pub enum OwnerEvent {
    Ask {
        link: LinkId,
        token: u64,
        ask: Ask,
        payload: Buf,
    },
    LinkDown {
        link: LinkId,
    },
    /// What [`OwnerEffect::Bind`] asked for.
    Bound {
        remote: Token,
        binding: Binding,
    },
    /// A controller's answer.
    Reply {
        request: Token,
        reply: BlockReply,
    },
    /// A client of this host is about to begin a session; answered by [`OwnerEffect::Admit`].
    Arrive {
        session: Token,
    },
    /// Another client has followed that of the session.
    Fenced {
        remote: Token,
    },
    /// What the session is bound to is served no more.
    Unserved {
        remote: Token,
    },
    /// The volume is served no more, or was not.
    Yielded {
        link: LinkId,
        token: u64,
        refusal: Option<Refusal>,
    },
    Tick,
}

#[derive(Clone, Debug)]
pub enum OwnerEffect {
    Answer {
        link: LinkId,
        token: u64,
        answer: Answer,
        payload: Vec<Buf>,
    },
    /// Read nothing of it any more.
    CloseLink {
        link: LinkId,
    },
    /// Find the export; [`OwnerEvent::Bound`] follows.
    Bind {
        remote: Token,
        host: String,
        export: String,
        client: Client,
        /// When its last write was answered, somewhere; and whether another client has followed it.
        wrote_at: Option<Instant>,
        is_fenced: bool,
    },
    /// The session of a client of this host may begin.
    Admit {
        session: Token,
    },
    /// The session is over.
    Unbind {
        remote: Token,
    },
    /// To the controller; the answer names `request`.
    Submit {
        remote: Token,
        request: Token,
        block: BlockRequest,
    },
    Yield {
        link: LinkId,
        token: u64,
        volume: VolumeId,
    },
    /// One volume tells another something.
    Told {
        from: VolumeId,
        to: VolumeId,
        payload: Buf,
    },
}

type Out<'a> = &'a mut Effects<OwnerEffect>;

struct Link {
    /// Of the messages.
    version: u32,
    /// Of one of a host's reactors: see [`crate::homes`].
    host: String,
    instance: InstanceId,
    number: u64,
    /// The greeting that waits for its answer.
    greeting: Option<u64>,
    under_way: usize,
    is_open: bool,
    /// When it was last told a tick: what it asks by that is refused after the lifetime.
    ticked_at: Instant,
    /// By the ingress's number.
    sessions: BTreeMap<u64, Token>,
}

struct Remote {
    link: LinkId,
    number: u64,
    /// What waits for an answer: the attaching.
    attaching: Option<u64>,
    is_bound: bool,
    is_admitted: bool,
    /// What waits for the last request: the detaching.
    detaching: Option<u64>,
    under_way: usize,
    /// The ingress does not know it any more by its number.
    is_gone: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Arriving {
    Own(Token),
    Remote(Token),
}

/// Somebody's session, which begins when these ingresses have said that what they had has come.
struct Barrier {
    session: Arriving,
    ingresses: BTreeSet<String>,
    /// What they had is refused from here on.
    until: Instant,
}

struct Asked {
    remote: Token,
    token: u64,
    request: RequestToken,
}

pub struct OwnerEnd {
    grid: GridId,
    host: String,
    now: Instant,
    links: BTreeMap<LinkId, Link>,
    remotes: Slab<Remote>,
    asked: Slab<Asked>,
    barriers: BTreeMap<u64, Barrier>,
    next_barrier: u64,
    mutations: Mutations,
}

impl OwnerEnd {
    pub fn new(grid: GridId, host: &str) -> OwnerEnd {
        let (remotes, asked) = (Slab::new(SESSIONS_MAX), Slab::new(REQUESTS_MAX));
        OwnerEnd {
            grid,
            host: host.to_string(),
            now: Instant::ZERO,
            links: BTreeMap::new(),
            remotes,
            asked,
            barriers: BTreeMap::new(),
            next_barrier: 1,
            mutations: Mutations::default(),
        }
    }

    pub fn set_mutations(&mut self, mutations: Mutations) {
        self.mutations = mutations;
    }

    pub fn handle(&mut self, now: Instant, event: OwnerEvent, out: Out) {
        self.now = self.now.max(now);
        match event {
            OwnerEvent::Ask { link, token, ask, payload } => self.on_ask(link, token, ask, payload, out),
            OwnerEvent::LinkDown { link } => self.on_link_down(link, out),
            OwnerEvent::Bound { remote, binding } => self.on_bound(remote, binding, out),
            OwnerEvent::Reply { request, reply } => self.on_reply(request, reply, out),
            OwnerEvent::Arrive { session } => self.arrive(Arriving::Own(session), None, out),
            OwnerEvent::Tick => {}
            OwnerEvent::Unserved { remote } => self.on_unserved(remote, out),
            OwnerEvent::Fenced { remote } => self.on_fenced(remote, out),
            OwnerEvent::Yielded { link, token, refusal } => {
                let answer = refusal.map_or(Answer::Yielded, Answer::Refused);
                self.answer(link, token, answer, Vec::new(), out);
            }
        }
        self.settle_barriers(out);
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        self.barriers.values().map(|b| b.until).min()
    }

    /// A session is about to begin: ingresses, other than its own, are asked to say when what they have has come.
    fn arrive(&mut self, session: Arriving, own: Option<&str>, out: Out) {
        let others = self.links.values().filter(|l| own != Some(l.host.as_str()));
        let mut until = self.now;
        let mut ingresses = BTreeSet::new();
        for link in others.filter(|l| !l.sessions.is_empty() || l.under_way > 0) {
            until = until.max(link.ticked_at + Duration::from_millis(LIFETIME_MS + 1_000));
            ingresses.insert(link.host.clone());
        }
        let barrier = self.next_barrier;
        self.next_barrier += 1;
        for ingress in &ingresses {
            self.ask_barrier(barrier, ingress, out);
        }
        self.barriers.insert(barrier, Barrier { session, ingresses, until });
    }

    fn ask_barrier(&self, barrier: u64, ingress: &str, out: Out) {
        let is_asked = |l: &Link| l.host == ingress && l.is_open && l.greeting.is_none();
        for link in self.links.iter().filter(|(_, l)| is_asked(l)).map(|(id, _)| *id) {
            self.answer(link, 0, Answer::Barrier { barrier }, Vec::new(), out);
        }
    }

    fn on_passed(&mut self, link: LinkId, barrier: u64) {
        let host = &self.links[&link].host;
        if let Some(barrier) = self.barriers.get_mut(&barrier) {
            barrier.ingresses.remove(host);
        }
    }

    /// Lets sessions begin that nothing stands against any more.
    fn settle_barriers(&mut self, out: Out) {
        if self.barriers.is_empty() {
            return;
        }
        for barrier in self.barriers.values_mut() {
            // Of one without a link nothing is read any more, and nothing of it is under way.
            barrier.ingresses.retain(|ingress| self.links.values().any(|l| l.host == *ingress));
        }
        let (now, at_once) = (self.now, self.mutations.begins_at_once());
        let settled: Vec<Barrier> = self
            .barriers
            .extract_if(.., |_, b| b.ingresses.is_empty() || b.until <= now || at_once)
            .map(|(_, b)| b)
            .collect();
        for Barrier { session, .. } in settled {
            match session {
                Arriving::Own(session) => out.push(OwnerEffect::Admit { session }),
                Arriving::Remote(token) => {
                    let Some(remote) = self.remotes.get_mut(token) else { continue };
                    remote.is_admitted = true;
                    let (link, number) = (remote.link, remote.number);
                    self.attached(link, number, out);
                }
            }
        }
    }

    /// The ingress whose link it is, once it has greeted.
    pub fn host_of(&self, link: LinkId) -> Option<&str> {
        self.links.get(&link).map(|l| l.host.as_str())
    }

    fn tick(&self) -> TickMs {
        self.now.0 / 1_000_000
    }

    fn answer(&self, link: LinkId, token: u64, answer: Answer, payload: Vec<Buf>, out: Out) {
        if self.links.get(&link).is_some_and(|l| l.is_open) {
            out.push(OwnerEffect::Answer { link, token, answer, payload });
        }
    }

    fn on_ask(&mut self, link: LinkId, token: u64, ask: Ask, payload: Buf, out: Out) {
        if let Ask::Hello { versions, grid, host, instance, number } = ask {
            return self.on_hello(
                link,
                token,
                (versions, grid),
                Link {
                    version: 0,
                    host,
                    instance,
                    number,
                    greeting: Some(token),
                    under_way: 0,
                    is_open: true,
                    ticked_at: self.now,
                    sessions: BTreeMap::new(),
                },
                out,
            );
        }
        if !self.links.get(&link).is_some_and(|l| l.is_open && l.greeting.is_none()) {
            // Nobody asks before the greeting is answered.
            out.push(OwnerEffect::CloseLink { link });
            return self.on_link_down(link, out);
        }
        match ask {
            Ask::Ping => {
                self.links.get_mut(&link).expect("just seen").ticked_at = self.now;
                self.answer(link, token, Answer::Pong { tick: self.tick() }, Vec::new(), out);
            }
            Ask::Attach { session, export, fresh } => {
                let client = Client::of_ingress(host_of_link(&self.links[&link].host));
                self.on_attach(link, token, (session, fresh), (export, client, (None, false)), out);
            }
            Ask::AttachAs { session, export, fresh, client, wrote_ms, fenced } => {
                let wrote_at = wrote_ms.map(|ms| self.now - Duration::from_millis(ms));
                self.on_attach(link, token, (session, fresh), (export, client, (wrote_at, fenced)), out);
            }
            Ask::Detach { session } => self.on_detach(link, token, session, out),
            Ask::Op { session, tick, op } => self.on_op(link, token, (session, tick), (op, payload), out),
            Ask::Passed { barrier } => self.on_passed(link, barrier),
            Ask::Yield { volume } => out.push(OwnerEffect::Yield { link, token, volume }),
            Ask::Tell { from, to } => out.push(OwnerEffect::Told { from, to, payload }),
            Ask::Hello { .. } => unreachable!("taken above"),
        }
    }

    fn on_hello(&mut self, id: LinkId, token: u64, (versions, grid): (Versions, GridId), mut link: Link, out: Out) {
        let refuse =
            |refusal| OwnerEffect::Answer { link: id, token, answer: Answer::Refused(refusal), payload: Vec::new() };
        if self.links.contains_key(&id) {
            out.push(OwnerEffect::CloseLink { link: id });
            return self.on_link_down(id, out);
        }
        let Some(version) = FORWARD.common(versions).filter(|_| grid == self.grid) else {
            let is_of_it = FORWARD.common(versions).is_some();
            out.push(refuse(if is_of_it { Refusal::Grid } else { Refusal::Version(FORWARD) }));
            return out.push(OwnerEffect::CloseLink { link: id });
        };
        link.version = version;
        let is_newer = |l: &Link| l.instance == link.instance && l.number > link.number;
        if self.links.values().any(|l| l.host == link.host && is_newer(l)) {
            out.push(refuse(Refusal::Superseded));
            return out.push(OwnerEffect::CloseLink { link: id });
        }
        let others: Vec<LinkId> =
            self.links.iter().filter(|(_, l)| l.host == link.host && l.is_open).map(|(id, _)| *id).collect();
        let host = link.host.clone();
        self.links.insert(id, link);
        for other in others {
            out.push(OwnerEffect::CloseLink { link: other });
            self.on_link_down(other, out);
        }
        self.greet(&host, out);
    }

    /// Answers the greeting of an ingress's newest link, once nothing of its others is under way.
    fn greet(&mut self, host: &str, out: Out) {
        let mut own = self.links.iter().filter(|(_, l)| l.host == host);
        if own.any(|(_, l)| !l.is_open) {
            return;
        }
        let tick = self.tick();
        for (id, link) in self.links.iter_mut().filter(|(_, l)| l.host == host) {
            if let Some(token) = link.greeting.take() {
                link.ticked_at = self.now;
                let answer = Answer::Hello { version: link.version, host: self.host.clone(), tick };
                out.push(OwnerEffect::Answer { link: *id, token, answer, payload: Vec::new() });
            }
        }
        for (barrier, _) in self.barriers.iter().filter(|(_, b)| b.ingresses.contains(host)) {
            self.ask_barrier(*barrier, host, out);
        }
    }

    fn on_link_down(&mut self, id: LinkId, out: Out) {
        let Some(link) = self.links.get_mut(&id).filter(|l| l.is_open) else { return };
        (link.is_open, link.greeting) = (false, None);
        for remote in std::mem::take(&mut link.sessions).into_values() {
            self.let_go(remote, out);
        }
        self.sweep_link(id, out);
    }

    /// A link that is gone is forgotten with the last request that was under way.
    fn sweep_link(&mut self, id: LinkId, out: Out) {
        if let Some(link) = self.links.get(&id).filter(|l| !l.is_open && l.under_way == 0) {
            let host = link.host.clone();
            self.links.remove(&id);
            self.greet(&host, out);
        }
    }

    /// The ingress does not ask in this session any more; what is under way goes on.
    fn let_go(&mut self, token: Token, out: Out) {
        let remote = self.remotes.get_mut(token).expect("a link's sessions are there");
        remote.is_gone = true;
        if std::mem::take(&mut remote.is_bound) {
            out.push(OwnerEffect::Unbind { remote: token });
        }
        self.sweep_remote(token, out);
    }

    fn sweep_remote(&mut self, token: Token, out: Out) {
        let Some(remote) = self.remotes.get(token).filter(|g| g.is_gone && g.under_way == 0) else { return };
        let (link, number, detaching) = (remote.link, remote.number, remote.detaching);
        self.remotes.remove(token);
        if let Some(call) = detaching {
            self.answer(link, call, Answer::Detached, Vec::new(), out);
        }
        self.attached(link, number, out);
    }

    fn on_attach(
        &mut self,
        link: LinkId,
        token: u64,
        (number, fresh): (u64, bool),
        (export, client, (wrote_at, is_fenced)): (String, Client, (Option<Instant>, bool)),
        out: Out,
    ) {
        if self.remotes.is_full() {
            return self.answer(link, token, Answer::Refused(Refusal::Full), Vec::new(), out);
        }
        let remote = Remote {
            link,
            number,
            attaching: Some(token),
            is_bound: false,
            is_admitted: !fresh,
            detaching: None,
            under_way: 0,
            is_gone: false,
        };
        let remote = self.remotes.insert(remote);
        let of = self.links.get_mut(&link).expect("it has asked");
        let host = of.host.clone();
        if let Some(before) = of.sessions.insert(number, remote) {
            self.let_go(before, out);
        }
        if fresh {
            self.arrive(Arriving::Remote(remote), Some(&host), out);
        }
        out.push(OwnerEffect::Bind { remote, host, export, client, wrote_at, is_fenced });
    }

    fn on_bound(&mut self, token: Token, binding: Binding, out: Out) {
        let Some(remote) = self.remotes.get_mut(token).filter(|g| !g.is_gone) else {
            if binding == Binding::Bound {
                out.push(OwnerEffect::Unbind { remote: token });
            }
            return;
        };
        let (link, number) = (remote.link, remote.number);
        match binding {
            Binding::Bound => {
                remote.is_bound = true;
                self.attached(link, number, out);
            }
            Binding::Refused(refusal) => {
                let call = remote.attaching.take();
                self.links.get_mut(&link).expect("the link of a session").sessions.remove(&number);
                self.let_go(token, out);
                if let Some(call) = call {
                    self.answer(link, call, Answer::Refused(refusal), Vec::new(), out);
                }
            }
        }
    }

    /// Tells that a session is attached, once nothing that was asked under its number before is under way.
    fn attached(&mut self, link: LinkId, number: u64, out: Out) {
        let Some(token) = self.links.get(&link).and_then(|l| l.sessions.get(&number)).copied() else { return };
        let is_clear = !self.remotes.iter().any(|(_, g)| g.link == link && g.number == number && g.is_gone);
        let remote = self.remotes.get_mut(token).expect("a link's sessions are there");
        if is_clear
            && remote.is_bound
            && remote.is_admitted
            && let Some(call) = remote.attaching.take()
        {
            self.answer(link, call, Answer::Attached, Vec::new(), out);
        }
    }

    fn on_detach(&mut self, link: LinkId, token: u64, number: u64, out: Out) {
        let of = self.links.get_mut(&link).expect("it has asked");
        match of.sessions.remove(&number) {
            None => self.answer(link, token, Answer::Detached, Vec::new(), out),
            Some(remote) => {
                self.remotes.get_mut(remote).expect("a link's sessions are there").detaching = Some(token);
                self.let_go(remote, out);
            }
        }
    }

    fn on_op(&mut self, link: LinkId, token: u64, (number, tick): (u64, TickMs), (op, payload): (Op, Buf), out: Out) {
        let now = self.tick();
        if now.saturating_sub(tick) > LIFETIME_MS {
            self.links.get_mut(&link).expect("it has asked").ticked_at = self.now;
            return self.answer(link, token, Answer::Stale { tick: now }, Vec::new(), out);
        }
        let found = self.links.get(&link).and_then(|l| l.sessions.get(&number)).copied();
        let Some((remote, session)) =
            found.and_then(|g| Some((g, self.remotes.get_mut(g).filter(|g| g.is_bound && g.attaching.is_none())?)))
        else {
            return self.answer(link, token, Answer::Failed(Failure::NotOwner), Vec::new(), out);
        };
        if !is_bounded(&op) {
            return self.answer(link, token, Answer::Failed(Failure::Invalid), Vec::new(), out);
        }
        let Some(op) = arrived(op, payload).filter(|_| !self.asked.is_full()) else {
            out.push(OwnerEffect::CloseLink { link });
            return self.on_link_down(link, out);
        };
        session.under_way += 1;
        self.links.get_mut(&link).expect("it has asked").under_way += 1;
        let request = self.asked.insert(Asked { remote, token, request: RequestToken(token) });
        let block = BlockRequest { token: self.asked.get(request).expect("just put").request, op };
        out.push(OwnerEffect::Submit { remote, request, block });
    }

    fn on_reply(&mut self, request: Token, reply: BlockReply, out: Out) {
        let asked = self.asked.remove(request).expect("a controller answers once");
        assert_eq!(asked.request, reply.token, "a controller answers what it was asked");
        let remote = self.remotes.get_mut(asked.remote).expect("it stays while anything is under way");
        remote.under_way -= 1;
        let (link, is_gone) = (remote.link, remote.is_gone);
        if !is_gone {
            let (mut answer, payload) = answer_of(reply);
            if answer == Answer::Failed(Failure::NotWriter) && self.links[&link].version < CLIENTS_SINCE {
                answer = Answer::Failed(Failure::Unavailable);
            }
            self.answer(link, asked.token, answer, payload, out);
        }
        self.sweep_remote(asked.remote, out);
        self.links.get_mut(&link).expect("it stays while anything is under way").under_way -= 1;
        self.sweep_link(link, out);
    }

    fn on_fenced(&mut self, token: Token, out: Out) {
        let Some(Remote { link, number, .. }) = self.remotes.get(token).filter(|g| !g.is_gone) else { return };
        if self.links[link].version >= CLIENTS_SINCE {
            self.answer(*link, 0, Answer::Fenced { session: *number }, Vec::new(), out);
        }
    }

    fn on_unserved(&mut self, token: Token, out: Out) {
        let Some(remote) = self.remotes.get(token).filter(|g| !g.is_gone) else { return };
        let (link, number) = (remote.link, remote.number);
        self.links.get_mut(&link).expect("the link of a session").sessions.remove(&number);
        self.let_go(token, out);
    }
}

/// Whether its answer fits a frame, whatever it is.
fn is_bounded(op: &Op) -> bool {
    match op {
        Op::Read(range) => range.len <= u64::from(PAYLOAD_BYTES_MAX),
        Op::Status(range) | Op::Changes { range, .. } => range.len <= STATUS_BYTES_MAX,
        Op::Write { .. } | Op::Flush | Op::Discard(_) | Op::WriteZeroes(_) | Op::Prefetch(_) => true,
    }
}

fn answer_of(reply: BlockReply) -> (Answer, Vec<Buf>) {
    match reply.result {
        Ok(BlockData::Done) => (Answer::Done, Vec::new()),
        Ok(BlockData::Data(parts)) => {
            let whole = concat(&parts);
            (Answer::Data { crc: crc32c(&whole) }, vec![whole])
        }
        Ok(BlockData::Status(extents)) => (Answer::Extents(extents.into_iter().map(Into::into).collect()), Vec::new()),
        Err(error) => (Answer::Failed(error.into()), Vec::new()),
    }
}
