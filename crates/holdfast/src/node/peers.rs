//! Other nodes, as a node asks them for what it makes shards of.
//!
//! Role: the shell passes in what happens to connections that are not of hosts; a question becomes a frame, and a frame an answer.
//! A connection is made when there is something to ask, and left when there has been nothing for [`IDLE_MAX`].
//!
//! Invariants
//! 1. A question is answered at most once, and by [`Answer`] `None` where its connection ends before.
//! 2. Where links have TLS, nothing is asked of anybody who has not shown that it is that very node.
//!
//! Limits: [`WAYS_MAX`] nodes at a time. What was refused or lost is not tried again for a while: who waits for it has other ways.

use crate::logger;
use holdfast_base::{Buf, BufMut, GridId, Instant, NodeId, Urgency};
use holdfast_format::wire::{Beside, Frame, MAKE_MS, Reply, Request, WIRE, encode_frame, encode_frame_with};
use holdfast_runtime::framed::{Framed, Secured};
use holdfast_runtime::pki::Role;
use holdfast_runtime::reactor::{ConnId, Io};
use holdfast_runtime::tls::link::HostTls;
use holdfast_store::AskToken;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

const IDLE_MAX: Duration = Duration::from_secs(30);

/// Nobody waits longer for an answer.
const SILENCE_MAX: Duration = Duration::from_millis(MAKE_MS);

/// After a connection that could not be made, or was lost; and after one that was refused.
const LOST_PAUSE: Duration = Duration::from_secs(1);
const REFUSED_PAUSE: Duration = Duration::from_secs(60);

const WAYS_MAX: usize = 256;

/// What came of a question.
pub type Answer = Option<(Reply, Buf)>;

type Place = (NodeId, SocketAddr);

struct Way {
    link: Framed<Reply>,
    /// Once it was greeted: what is said beside each request.
    greeted: Option<Beside>,
    /// What is asked then.
    held: Vec<(u64, Request)>,
    /// Asked, and not answered.
    waiting: BTreeSet<u64>,
    last_used: Instant,
}

pub struct NodePeers {
    node: NodeId,
    grid: GridId,
    /// Where links have TLS.
    tls: Option<HostTls>,
    ways: BTreeMap<Place, Way>,
    by_conn: HashMap<ConnId, Place>,
    /// Not to be tried before.
    paused: BTreeMap<Place, Instant>,
    pub answers: VecDeque<(AskToken, Answer)>,
}

impl NodePeers {
    pub fn new(node: NodeId, grid: GridId, tls: Option<HostTls>) -> NodePeers {
        let (ways, by_conn, paused) = (BTreeMap::new(), HashMap::new(), BTreeMap::new());
        NodePeers { node, grid, tls, ways, by_conn, paused, answers: VecDeque::new() }
    }

    /// Asks a node. Without an address, or where it can't be reached, the answer is `None`.
    pub fn ask(
        &mut self,
        now: Instant,
        node: NodeId,
        address: Option<&str>,
        token: AskToken,
        request: &Request,
        io: &mut Io,
    ) {
        let address = address.and_then(|address| address.parse::<SocketAddr>().ok());
        let place = address.map(|address| (node, address)).filter(|place| self.has_way(now, *place, io));
        let Some(way) = place.and_then(|place| self.ways.get_mut(&place)) else {
            return self.answers.push_back((token, None));
        };
        if way.waiting.is_empty() {
            way.last_used = now;
        }
        way.waiting.insert(token.0);
        match way.greeted {
            Some(beside) => way.send(encode_frame_with(token.0, request, 0, beside), io),
            None => way.held.push((token.0, request.clone())),
        }
    }

    /// Whether there is a way to a node, or one is being made.
    fn has_way(&mut self, now: Instant, place: Place, io: &mut Io) -> bool {
        self.paused.retain(|_, until| *until > now);
        if self.ways.contains_key(&place) {
            return true;
        }
        if self.paused.contains_key(&place) || self.ways.len() >= WAYS_MAX {
            return false;
        }
        let connect = |tls: &HostTls| Ok(Secured::new(tls.connect(Role::Node(place.0))?, tls.revoked().clone()));
        let secured = match self.tls.as_ref().map(connect).transpose() {
            Ok(secured) => secured,
            Err(error) => {
                let error: holdfast_runtime::tls::TlsError = error;
                logger::warn(format_args!("node {}: no TLS session could be made: {error}", place.0));
                return false;
            }
        };
        let conn = io.connect_tcp(place.1);
        let way = Way {
            link: Framed::new(conn, secured),
            greeted: None,
            held: Vec::new(),
            waiting: BTreeSet::new(),
            last_used: now,
        };
        self.ways.insert(place, way);
        self.by_conn.insert(conn, place);
        true
    }

    /// Whether the connection is one of these.
    pub fn is_one(&self, conn: ConnId) -> bool {
        self.by_conn.contains_key(&conn)
    }

    pub fn on_connected(&mut self, conn: ConnId, io: &mut Io) {
        let hello = Request::Hello { versions: WIRE, grid: self.grid, host: format!("node {}", self.node) };
        let Some(way) = self.by_conn.get(&conn).and_then(|place| self.ways.get_mut(place)) else { return };
        way.send(encode_frame(u64::MAX, &hello, 0), io);
    }

    pub fn on_bytes(&mut self, now: Instant, conn: ConnId, bytes: &mut [u8], io: &mut Io) {
        let Some(&place) = self.by_conn.get(&conn) else { return };
        let Some(way) = self.ways.get_mut(&place) else { return };
        if let Err(error) = way.link.on_bytes(bytes, io) {
            return self.refuse(now, place, &format!("no TLS with it: {error}"), io);
        }
        self.on_frames(now, place, io);
    }

    pub fn on_filled(&mut self, now: Instant, conn: ConnId, buf: BufMut, io: &mut Io) {
        let Some(&place) = self.by_conn.get(&conn) else { return };
        let Some(way) = self.ways.get_mut(&place) else { return };
        way.link.on_filled(buf);
        self.on_frames(now, place, io);
    }

    fn on_frames(&mut self, now: Instant, place: Place, io: &mut Io) {
        while let Some(frame) = self.ways.get_mut(&place).and_then(|way| way.link.pop()) {
            self.on_frame(now, place, frame, io);
        }
        let Some(way) = self.ways.get_mut(&place) else { return };
        if let Err(error) = way.link.settle(io) {
            let why = format!("it sent what is no answer ({error})");
            self.refuse(now, place, &why, io);
        }
    }

    fn on_frame(&mut self, now: Instant, place: Place, frame: Frame<Reply>, io: &mut Io) {
        let Some(way) = self.ways.get_mut(&place) else { return };
        if way.greeted.is_some() {
            if !way.waiting.remove(&frame.token) {
                return self.refuse(now, place, "it answered what nobody asked", io);
            }
            way.last_used = now;
            return self.answers.push_back((AskToken(frame.token), Some((frame.message, frame.payload))));
        }
        match frame.message {
            Reply::Hello { version, node, .. } if node == place.0 && WIRE.contain(version) => {
                // Shards are made for nobody who waits.
                let beside = Beside { urgency: Urgency::Care, ..Beside::default() }.in_version(version);
                (way.greeted, way.last_used) = (Some(beside), now);
                for (token, request) in std::mem::take(&mut way.held) {
                    way.send(encode_frame_with(token, &request, 0, beside), io);
                }
            }
            other => self.refuse(now, place, &format!("it answered the greeting with {other:?}"), io),
        }
    }

    fn refuse(&mut self, now: Instant, place: Place, why: &str, io: &mut Io) {
        logger::warn(format_args!(
            "node {} at {} can't be asked for shards: {why}; their owner's host passes them on meanwhile",
            place.0, place.1
        ));
        self.lose(now, place, REFUSED_PAUSE, io);
    }

    /// The connection has ended, or could not be made.
    pub fn on_lost(&mut self, now: Instant, conn: ConnId, io: &mut Io) {
        if let Some(place) = self.by_conn.get(&conn).copied() {
            self.lose(now, place, LOST_PAUSE, io);
        }
    }

    fn lose(&mut self, now: Instant, place: Place, pause: Duration, io: &mut Io) {
        let Some(way) = self.ways.remove(&place) else { return };
        self.by_conn.remove(&way.link.conn());
        io.abort(way.link.conn());
        self.answers.extend(way.waiting.into_iter().map(|token| (AskToken(token), None)));
        self.paused.insert(place, now + pause);
    }

    /// Leaves nodes that are silent although they were asked, and those that nothing was asked of for long.
    pub fn on_time(&mut self, now: Instant, io: &mut Io) {
        let due: Vec<Place> = self.ways.iter().filter(|(_, way)| way.due() <= now).map(|(place, _)| *place).collect();
        for place in due {
            let is_idle = self.ways.get(&place).is_some_and(|way| way.waiting.is_empty() && way.greeted.is_some());
            self.lose(now, place, if is_idle { Duration::ZERO } else { LOST_PAUSE }, io);
        }
    }

    /// Ends connections with nodes whose certificates were taken back.
    pub fn cut_revoked(&mut self, now: Instant, io: &mut Io) {
        let cut: Vec<Place> =
            self.ways.iter().filter(|(_, way)| way.link.is_revoked()).map(|(place, _)| *place).collect();
        for place in cut {
            self.refuse(now, place, "its certificate was revoked", io);
        }
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        self.ways.values().map(Way::due).min()
    }
}

impl Way {
    fn due(&self) -> Instant {
        let is_waited_for = !self.waiting.is_empty() || self.greeted.is_none();
        self.last_used + if is_waited_for { SILENCE_MAX } else { IDLE_MAX }
    }

    fn send(&mut self, frame: Vec<u8>, io: &mut Io) {
        self.link.send_frame(frame, Vec::new(), io);
    }
}
