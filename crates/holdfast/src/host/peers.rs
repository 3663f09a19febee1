//! Connections between hosts: those that this host makes to owners, and those that other hosts have made to it.
//!
//! Role: turns bytes into [`PeerEvent`]s and messages into frames. It decides nothing about sessions.
//!
//! Limits: as many connections of other hosts as there are places for, shared by where they come from; what the
//! [`Door`] allows before they have said something.
//!
//! Faults: bytes that are no frame end their connection; one that can't be made is tried again after [`RETRY_PAUSE`].

use crate::link_tls::{Door, HANDSHAKE_MAX, PUSHED_OUT};
use crate::logger;
use holdfast_base::time::earliest;
use holdfast_base::{Buf, BufMut, Instant, Slab, Token};
use holdfast_format::forward::{Answer, Ask};
use holdfast_format::wire::Message;
use holdfast_host::homes::host_of_link;
use holdfast_host::{LinkId, PeerEvent, Source};
use holdfast_runtime::framed::{Framed, REVOKED, Secured};
use holdfast_runtime::pki::Role;
use holdfast_runtime::reactor::{ConnId, Io};
use holdfast_runtime::tls::TlsError;
use holdfast_runtime::tls::link::HostTls;
use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

/// Between two attempts to connect.
const RETRY_PAUSE: Duration = Duration::from_millis(200);

/// After a greeting that was refused: somebody has to act first.
const REFUSED_PAUSE: Duration = Duration::from_secs(5);

/// Has the kernel fill what is large; what is wrong, for people, where what came is no message.
fn settle<M: Message>(conn: &mut Framed<M>, io: &mut Io) -> Result<(), String> {
    conn.settle(io).map_err(|error| {
        let how = if conn.is_secured() { "with" } else { "without" };
        format!("it sent what is no message ({error}), {how} TLS; does its machine have the same `tls`?")
    })
}

struct Peer {
    name: String,
    address: SocketAddr,
    /// Some volume that is offered here may be there.
    is_wanted: bool,
    conn: Option<Framed<Answer>>,
    connected: bool,
    retry_at: Instant,
    trouble: Option<String>,
}

struct Link {
    from: String,
    source: Source,
    conn: Framed<Ask>,
    /// It has said something, and is at the door no more.
    is_in: bool,
}

#[derive(Clone, Copy)]
enum End {
    Peer(usize),
    Link(Token),
}

pub struct Peers {
    tls: Option<HostTls>,
    door: Door,
    peers: Vec<Peer>,
    links: Slab<Link>,
    links_max: usize,
    by_conn: HashMap<ConnId, End>,
    pub events: VecDeque<PeerEvent>,
}

impl Peers {
    pub fn new(tls: Option<HostTls>, door: Door, links_max: usize) -> Peers {
        let links = Slab::new(links_max);
        Peers { tls, door, peers: Vec::new(), links, links_max, by_conn: HashMap::new(), events: VecDeque::new() }
    }

    pub fn owns(&self, conn: ConnId) -> bool {
        self.by_conn.contains_key(&conn)
    }

    /// Keeps a connection to each of these, and to no others. Gives their numbers, in the order given.
    pub fn set_wanted(&mut self, now: Instant, hosts: &[(String, SocketAddr)], io: &mut Io) -> Vec<usize> {
        for peer in 0..self.peers.len() {
            let is_wanted = hosts.iter().any(|(name, address)| self.peers[peer].is(name, *address));
            if !is_wanted && self.peers[peer].is_wanted {
                self.drop_peer(peer, now, true, io);
            }
            self.peers[peer].is_wanted = is_wanted;
        }
        let mut numbers = Vec::new();
        for (name, address) in hosts {
            let known = self.peers.iter().position(|peer| peer.is(name, *address));
            numbers.push(known.unwrap_or_else(|| {
                self.peers.push(Peer {
                    name: name.clone(),
                    address: *address,
                    is_wanted: true,
                    conn: None,
                    connected: false,
                    retry_at: now,
                    trouble: None,
                });
                self.peers.len() - 1
            }));
        }
        self.on_time(now, io);
        numbers
    }

    pub fn ask(&mut self, peer: usize, token: u64, ask: &Ask, payload: Buf, io: &mut Io) {
        if let Some(conn) = self.peers[peer].conn.as_mut() {
            let payload = if payload.is_empty() { Vec::new() } else { vec![payload] };
            conn.send(token, ask, payload, io);
        }
    }

    pub fn answer(&mut self, link: LinkId, token: u64, answer: &Answer, payload: Vec<Buf>, io: &mut Io) {
        if let Some(link) = self.links.get_mut(Token(link.0)) {
            link.conn.send(token, answer, payload, io);
        }
    }

    /// The other host has given the connection up: it does not have to be told.
    pub fn reconnect(&mut self, now: Instant, peer: usize, refused: bool, io: &mut Io) {
        self.drop_peer(peer, now, false, io);
        if refused {
            self.peers[peer].retry_at = now + REFUSED_PAUSE;
        }
    }

    /// The owner's end has done with it, and does not have to be told. What was sent to it leaves first.
    pub fn close_link(&mut self, link: LinkId, io: &mut Io) {
        self.door.let_in(Token(link.0));
        if let Some(link) = self.links.remove(Token(link.0)) {
            self.by_conn.remove(&link.conn.conn());
            io.close(link.conn.conn());
        }
    }

    /// Whether the other end of a link has shown that it is a reactor of this host; without TLS nobody shows anything.
    pub fn is_from(&self, link: LinkId, name: &str) -> bool {
        let Some(link) = self.links.get(Token(link.0)) else { return false };
        let host = Role::Host(host_of_link(name).to_string());
        !link.conn.is_secured() || link.conn.peer().is_some_and(|peer| peer.role == host)
    }

    pub fn on_accepted(
        &mut self,
        now: Instant,
        conn: ConnId,
        (from, address): (String, Option<SocketAddr>),
        io: &mut Io,
    ) {
        let source = Source::of(address);
        if self.links.is_full() {
            self.on_turned_away(now, &from);
            return io.abort(conn);
        }
        let secured = match self.door.begin() {
            Ok(secured) => secured,
            Err(error) => {
                logger::error(format_args!("refused {from}: no TLS session could be made: {error}"));
                return io.abort(conn);
            }
        };
        let token = self.links.insert(Link { from, source, conn: Framed::new(conn, secured), is_in: false });
        self.by_conn.insert(conn, End::Link(token));
        if let Some(pushed_out) = self.door.come(token, source, now + HANDSHAKE_MAX) {
            self.refuse(now, pushed_out, PUSHED_OUT, io);
        }
    }

    pub fn on_turned_away(&mut self, now: Instant, from: &str) {
        let links = self.links.len();
        self.door.tell(
            now,
            from,
            &format!("{links} connections of other hosts are open, and there is no room for more"),
        );
    }

    /// Ends another host's connection that can't be used.
    fn refuse(&mut self, now: Instant, token: Token, why: &str, io: &mut Io) {
        let Some(link) = self.links.remove(token) else { return };
        self.door.let_in(token);
        self.door.tell(now, &link.from, why);
        self.by_conn.remove(&link.conn.conn());
        io.close(link.conn.conn());
        self.events.push_back(PeerEvent::LinkDown { link: LinkId(token.0) });
    }

    pub fn on_connected(&mut self, conn: ConnId) {
        if let Some(&End::Peer(peer)) = self.by_conn.get(&conn) {
            self.peers[peer].connected = true;
            self.events.push_back(PeerEvent::Connected { peer });
        }
    }

    pub fn on_bytes(&mut self, now: Instant, conn: ConnId, bytes: &mut [u8], io: &mut Io) {
        match self.by_conn.get(&conn) {
            Some(&End::Peer(peer)) => {
                let result = self.peers[peer].conn.as_mut().map_or(Ok(()), |c| c.on_bytes(bytes, io));
                self.after_peer(now, peer, result.map_err(|error| error.to_string()), io);
            }
            Some(&End::Link(token)) => {
                let Some(link) = self.links.get_mut(token) else { return };
                let result = link.conn.on_bytes(bytes, io).map_err(|error| error.to_string());
                self.after_link(now, token, result, io);
            }
            None => {}
        }
    }

    pub fn on_filled(&mut self, now: Instant, conn: ConnId, buf: BufMut, io: &mut Io) {
        match self.by_conn.get(&conn) {
            Some(&End::Peer(peer)) => {
                let Some(conn) = self.peers[peer].conn.as_mut() else { return };
                conn.on_filled(buf);
                self.after_peer(now, peer, Ok(()), io);
            }
            Some(&End::Link(token)) => {
                let Some(link) = self.links.get_mut(token) else { return };
                link.conn.on_filled(buf);
                self.after_link(now, token, Ok(()), io);
            }
            None => {}
        }
    }

    fn after_peer(&mut self, now: Instant, peer: usize, result: Result<(), String>, io: &mut Io) {
        while let Some(frame) = self.peers[peer].conn.as_mut().and_then(Framed::pop) {
            let (token, answer, payload) = (frame.token, frame.message, frame.payload);
            self.events.push_back(PeerEvent::Answer { peer, token, answer, payload });
        }
        let settled = self.peers[peer].conn.as_mut().map_or(Ok(()), |conn| settle(conn, io));
        if let Err(why) = result.and(settled) {
            self.tell_trouble(peer, &why);
            self.drop_peer(peer, now, true, io);
            self.peers[peer].retry_at = now + REFUSED_PAUSE;
        }
    }

    fn after_link(&mut self, now: Instant, token: Token, result: Result<(), String>, io: &mut Io) {
        while let Some(frame) = self.links.get_mut(token).and_then(|l| l.conn.pop()) {
            if let Some(why) = self.let_in(token) {
                return self.refuse(now, token, &why, io);
            }
            let (link, payload) = (LinkId(token.0), frame.payload);
            self.events.push_back(PeerEvent::Ask { link, token: frame.token, ask: frame.message, payload });
        }
        let settled = self.links.get_mut(token).map_or(Ok(()), |link| settle(&mut link.conn, io));
        if let Err(why) = result.and(settled) {
            self.refuse(now, token, &why, io);
        }
    }

    /// It has said something; why it may not stay, where there is no room for it.
    fn let_in(&mut self, token: Token) -> Option<String> {
        let link = self.links.get(token).expect("it has just said something");
        if link.is_in {
            return None;
        }
        self.door.let_in(token);
        let others = self.links.iter().filter(|(_, l)| l.is_in).map(|(_, l)| l.source);
        let why = Door::why_no_room(self.links_max / 2, link.source, others);
        self.links.get_mut(token).expect("just seen").is_in = why.is_none();
        why
    }

    pub fn on_lost(&mut self, now: Instant, conn: ConnId, why: &str, io: &mut Io) {
        match self.by_conn.remove(&conn) {
            Some(End::Peer(peer)) => {
                self.tell_trouble(peer, why);
                self.drop_peer(peer, now, true, io);
            }
            Some(End::Link(token)) => {
                self.door.let_in(token);
                self.links.remove(token);
                self.events.push_back(PeerEvent::LinkDown { link: LinkId(token.0) });
            }
            None => {}
        }
    }

    /// Ends connections with hosts whose certificates were taken back.
    pub fn cut_revoked(&mut self, now: Instant, io: &mut Io) {
        let cut: Vec<Token> = self.links.iter().filter(|(_, l)| l.conn.is_revoked()).map(|(token, _)| token).collect();
        for token in cut {
            self.refuse(now, token, REVOKED, io);
        }
        for peer in 0..self.peers.len() {
            if self.peers[peer].conn.as_ref().is_some_and(Framed::is_revoked) {
                self.tell_trouble(peer, REVOKED);
                self.drop_peer(peer, now, true, io);
            }
        }
    }

    /// Once, until something else is wrong or it is well again.
    pub fn tell_trouble(&mut self, peer: usize, why: &str) {
        let Peer { name, address, trouble, is_wanted, .. } = &mut self.peers[peer];
        if *is_wanted && trouble.as_deref() != Some(why) {
            logger::warn(format_args!("host {name} at {address} can't be asked: {why}"));
            *trouble = Some(why.to_string());
        }
    }

    pub fn is_well(&mut self, peer: usize) {
        let Peer { name, trouble, .. } = &mut self.peers[peer];
        if trouble.take().is_some() {
            logger::info(format_args!("host {name} can be asked again"));
        }
    }

    fn drop_peer(&mut self, peer: usize, now: Instant, tells: bool, io: &mut Io) {
        let Peer { conn, connected, retry_at, .. } = &mut self.peers[peer];
        *retry_at = now + RETRY_PAUSE;
        if let Some(conn) = conn.take() {
            self.by_conn.remove(&conn.conn());
            io.abort(conn.conn());
        }
        if std::mem::take(connected) && tells {
            self.events.push_back(PeerEvent::Disconnected { peer });
        }
    }

    /// Does what is due by time.
    pub fn on_time(&mut self, now: Instant, io: &mut Io) {
        for peer in 0..self.peers.len() {
            let Peer { is_wanted, conn, retry_at, .. } = &self.peers[peer];
            if *is_wanted && conn.is_none() && *retry_at <= now {
                self.connect(now, peer, io);
            }
        }
        while let Some(late) = self.door.overdue(now) {
            let why = self.door.lateness();
            self.refuse(now, late, &why, io);
        }
    }

    fn connect(&mut self, now: Instant, peer: usize, io: &mut Io) {
        let Peer { name, address, .. } = &self.peers[peer];
        let role = Role::Host(host_of_link(name).to_string());
        let connect = |tls: &HostTls| Ok(Secured::new(tls.connect(role)?, tls.revoked().clone()));
        let session: Result<_, TlsError> = self.tls.as_ref().map(connect).transpose();
        let secured = match session {
            Ok(session) => session,
            Err(error) => {
                self.tell_trouble(peer, &format!("no TLS session could be made: {error}"));
                self.peers[peer].retry_at = now + REFUSED_PAUSE;
                return;
            }
        };
        let conn = io.connect_tcp(*address);
        self.peers[peer].conn = Some(Framed::new(conn, secured));
        self.by_conn.insert(conn, End::Peer(peer));
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        let waiting = self.peers.iter().filter(|p| p.is_wanted && p.conn.is_none());
        earliest(waiting.map(|p| p.retry_at).min(), self.door.next_deadline())
    }
}

impl Peer {
    fn is(&self, name: &str, address: SocketAddr) -> bool {
        self.name == name && self.address == address
    }
}
