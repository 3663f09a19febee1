//! The simulated network: connections of two lanes between host processes and node processes.
//!
//! A lane behaves like TCP: what is sent arrives in order, or the lane ends. A blocked direction holds everything back (a
//! partition that lasts shorter than the connection); a connection that ends loses what was on its way, except for the
//! part that already lay in the receiver's buffer, which is still read, and then the end.
//!
//! Faults: delay, slow links, one-way and two-way partitions, resets with lost data, old connections' data read late.

use holdfast_base::{Buf, Instant, Prng};
use holdfast_format::wire::{Beside, NodeTimes, Reply, Request};
use holdfast_volume::Lane;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// One connection, never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ConnId(pub u64);

/// Direction of travel.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Toward {
    Node,
    Host,
}

#[derive(Clone, Debug)]
pub enum Body {
    Request(Request, Beside),
    Reply(Reply, Option<NodeTimes>),
    /// The end of the stream: closed or reset by the other side.
    End,
}

#[derive(Clone, Debug)]
pub struct Message {
    pub token: u64,
    pub body: Body,
    pub payload: Buf,
}

/// Which stream: connection, lane, direction.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Stream {
    pub conn: ConnId,
    pub lane: usize,
    pub toward: Toward,
}

/// Lanes in the order of their index.
pub const LANES: [Lane; 2] = [Lane::Fast, Lane::Bulk];

pub fn lane_index(lane: Lane) -> usize {
    match lane {
        Lane::Fast => 0,
        Lane::Bulk => 1,
    }
}

#[derive(Default)]
struct Pipe {
    queue: VecDeque<Message>,
    last_at: Instant,
    /// Deliveries whose time came while the direction was blocked.
    owed: u32,
    ended: bool,
}

/// A connection between a host process and a node process.
pub struct Conn {
    pub host: usize,
    pub node: usize,
    pub host_open: bool,
    pub node_open: bool,
    /// Lanes whose greeting was answered.
    pub greeted: [bool; 2],
    /// Of the messages: the oldest that a lane has agreed on.
    pub version: u32,
    /// Lanes whose end the node has read.
    pub ends_heard: usize,
    /// Requests without an answer: wire token to (controller, its token).
    pub waiting: BTreeMap<u64, (usize, u64)>,
    pipes: [[Pipe; 2]; 2],
}

impl Conn {
    fn pipe(&mut self, stream: Stream) -> &mut Pipe {
        &mut self.pipes[stream.lane][stream.toward as usize]
    }
}

/// State of the way between one host and one node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Link {
    /// By direction.
    pub blocked: [bool; 2],
    pub slow: Duration,
}

impl Link {
    pub fn is_up(&self) -> bool {
        !self.blocked[0] && !self.blocked[1]
    }
}

pub struct Net {
    links: BTreeMap<(usize, usize), Link>,
    conns: BTreeMap<ConnId, Conn>,
    /// The connection that a host uses towards a node.
    current: BTreeMap<(usize, usize), ConnId>,
    next_conn: u64,
    prng: Prng,
}

impl Net {
    pub fn new(prng: Prng) -> Net {
        Net { links: BTreeMap::new(), conns: BTreeMap::new(), current: BTreeMap::new(), next_conn: 1, prng }
    }

    pub fn link(&self, host: usize, node: usize) -> Link {
        self.links.get(&(host, node)).copied().unwrap_or_default()
    }

    pub fn link_mut(&mut self, host: usize, node: usize) -> &mut Link {
        self.links.entry((host, node)).or_default()
    }

    pub fn conn(&self, id: ConnId) -> Option<&Conn> {
        self.conns.get(&id)
    }

    pub fn conn_mut(&mut self, id: ConnId) -> Option<&mut Conn> {
        self.conns.get_mut(&id)
    }

    pub fn current(&self, host: usize, node: usize) -> Option<ConnId> {
        self.current.get(&(host, node)).copied()
    }

    /// Connections that satisfy `wanted`, in the order of their making.
    pub fn conns_where(&self, wanted: impl Fn(&Conn) -> bool) -> Vec<ConnId> {
        self.conns.iter().filter(|(_, c)| wanted(c)).map(|(id, _)| *id).collect()
    }

    pub fn open(&mut self, host: usize, node: usize) -> ConnId {
        let id = ConnId(self.next_conn);
        self.next_conn += 1;
        let conn = Conn {
            host,
            node,
            host_open: true,
            node_open: true,
            greeted: [false; 2],
            version: u32::MAX,
            ends_heard: 0,
            waiting: BTreeMap::new(),
            pipes: Default::default(),
        };
        self.conns.insert(id, conn);
        let old = self.current.insert((host, node), id);
        assert!(old.is_none(), "host {host} has a connection to node {node} already");
        id
    }

    /// Sends on a stream; the message is due at the returned instant.
    pub fn send(&mut self, now: Instant, stream: Stream, message: Message) -> Option<Instant> {
        let prng = &mut self.prng;
        let conn = self.conns.get_mut(&stream.conn)?;
        let link = self.links.get(&(conn.host, conn.node)).copied().unwrap_or_default();
        let pipe = conn.pipe(stream);
        if pipe.ended {
            return None;
        }
        pipe.ended = matches!(message.body, Body::End);
        let nanos = 20_000 + prng.below(40_000) + message.payload.len() as u64;
        pipe.last_at = pipe.last_at.max(now + Duration::from_nanos(nanos) + link.slow);
        pipe.queue.push_back(message);
        Some(pipe.last_at)
    }

    /// The message due on the stream. `None` where the direction is blocked, or nothing (any more) is there to receive.
    pub fn deliver(&mut self, stream: Stream) -> Option<Message> {
        let conn = self.conns.get_mut(&stream.conn)?;
        let blocked = self.links.get(&(conn.host, conn.node)).is_some_and(|l| l.blocked[stream.toward as usize]);
        let open = match stream.toward {
            Toward::Node => conn.node_open,
            Toward::Host => conn.host_open,
        };
        let pipe = conn.pipe(stream);
        if blocked {
            pipe.owed += 1;
            return None;
        }
        let message = pipe.queue.pop_front();
        if open { message } else { None }
    }

    /// Opens a direction again; the streams in it owe that many deliveries.
    pub fn unblock(&mut self, host: usize, node: usize, toward: Toward) -> Vec<(Stream, u32)> {
        self.link_mut(host, node).blocked[toward as usize] = false;
        let mut owed = Vec::new();
        for (id, conn) in &mut self.conns {
            if conn.host == host && conn.node == node {
                for lane in 0..LANES.len() {
                    let stream = Stream { conn: *id, lane, toward };
                    let count = std::mem::take(&mut conn.pipe(stream).owed);
                    if count > 0 {
                        owed.push((stream, count));
                    }
                }
            }
        }
        owed
    }

    /// Drops what is on its way on all lanes in a direction, except for a part at the front (what the receiver has in
    /// its buffer already).
    pub fn lose_in_flight(&mut self, id: ConnId, toward: Toward) {
        let prng = &mut self.prng;
        let Some(conn) = self.conns.get_mut(&id) else { return };
        for lane in 0..LANES.len() {
            let pipe = conn.pipe(Stream { conn: id, lane, toward });
            if pipe.ended {
                // The end is on its way, and arrives: whoever waits for it would never hear otherwise.
                continue;
            }
            let keep = prng.below(pipe.queue.len() as u64 + 1) as usize;
            pipe.queue.truncate(keep);
        }
    }

    /// The host's side is closed: it hears nothing more on this connection.
    pub fn close_host_side(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        conn.host_open = false;
        conn.waiting.clear();
        let way = (conn.host, conn.node);
        if self.current.get(&way) == Some(&id) {
            self.current.remove(&way);
        }
    }

    /// Forgets connections that both sides have left.
    pub fn sweep(&mut self) {
        self.conns.retain(|_, c| c.host_open || c.node_open);
    }
}
