//! Links: two connections to each reactor of a node, kept up, greeted, and shared by all volumes of this host.
//!
//! Role: the host passes in what happens to connections; links turn bytes into [`LinkEvent`]s and requests into frames.
//! They judge nobody: a node is up while all lanes are greeted, and who finds it slow asks for a reconnection.
//!
//! States of a link
//!
//! | state | entered by | left by |
//! | --- | --- | --- |
//! | waiting | start; connection lost, given up, or refused | `retry_at` → greeting |
//! | greeting | lanes connect, say Hello, join reactor by reactor | all answered → up; [`GREETING_MAX`] over, lost → waiting |
//! | up | [`LinkEvent::Up`] | a lane lost, [`Links::reconnect`], silence → waiting, [`LinkEvent::Down`] |
//!
//! Invariants
//! 1. An answer is passed on only while the connection that its request left on is the current one.
//! 2. Between two `Up`s of a node lies a `Down`.
//!
//! Where the grid has TLS, a lane's greeting waits in its session until the node has shown that it is that very node;
//! a node that is another, or lets this host not in, is refused as one is whose greeting was.
//!
//! A cut link (for drills) reads and sends nothing, keeps its connections open, and makes new ones only when mended: a
//! black hole between host and node, as far as the host can tell. What would have been sent waits, as it would in a
//! socket.
//!
//! Limits: [`WAITING_MAX`] requests unanswered on a link; at the bound the link is given up.

use crate::logger::{self, Voice};
use crate::node::REACTORS_MAX;
use holdfast_base::time::earliest;
use holdfast_base::{Buf, BufMut, DeviceId, GridId, InstanceId, Instant, NodeId, Slab, Token};
use holdfast_format::drive::DriveReport;
use holdfast_format::wire::{
    Beside, DeviceHealth, DeviceStat, DeviceTrouble, Frame, NodeTimes, PAYLOAD_AGAIN_SINCE, Refusal, Reply, Request,
    WIRE, encode_frame, encode_frame_again, encode_frame_with,
};
use holdfast_runtime::framed::{Framed, REVOKED, Secured};
use holdfast_runtime::pki::Role;
use holdfast_runtime::reactor::{ConnError, ConnId, Io};
use holdfast_runtime::tls::TlsError;
use holdfast_runtime::tls::link::HostTls;
use holdfast_volume::{Event, Lane};
use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

/// Between two attempts to connect.
const RETRY_PAUSE: Duration = Duration::from_millis(200);

/// After a greeting that a node refused: somebody has to act first.
const REFUSED_PAUSE: Duration = Duration::from_secs(5);

/// How long connecting and greeting may take, at each reactor. A hung process greets as soon as it goes on, so this is not short.
const GREETING_MAX: Duration = Duration::from_secs(2);

/// Pace of [`Links::poll`]: how old a device's fill in `status` may be.
const POLL_PACE: Duration = Duration::from_secs(1);

/// What is told of devices after this long is no older than now.
pub const DEVICES_SHOWN_WITHIN: Duration = Duration::from_millis(1250);

/// Polls unanswered in a row after which a connection is made anew, where no volume asked for it before.
const POLLS_MISSED_MAX: u32 = 6;

/// Drives are asked for how they are with one poll of so many.
const POLLS_PER_DRIVES: u32 = 10;

const WAITING_MAX: usize = 1 << 20;

const LANES: usize = 2;

/// Who an answer is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Owner {
    /// A volume's controller, with its own name for the call.
    Volume { volume: Token, token: u64 },
    /// A call of the control plane.
    Control { ticket: u64 },
    /// The link's own poll.
    Poll,
}

/// What the host must hear, in order.
#[derive(Debug)]
pub enum LinkEvent {
    /// An [`Event::NodeUp`], for all volumes.
    Up(Event),
    Down {
        node: NodeId,
    },
    /// What it says of its devices now.
    Devices {
        node: NodeId,
        devices: Vec<DeviceStat>,
    },
    Answer {
        node: NodeId,
        volume: Token,
        token: u64,
        reply: Reply,
        times: Option<NodeTimes>,
        payload: Buf,
    },
    /// Answer to a call of the control plane; `None` where the connection went first.
    Control {
        ticket: u64,
        reply: Option<Reply>,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Waiting { retry_at: Instant },
    Greeting { give_up_at: Instant },
    Up,
}

/// What a lane has asked and waits for before it carries requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// Who it is.
    Hello,
    /// How many reactors it has: of the first lane alone.
    Reactors,
    /// To go to one of them.
    Join,
    Greeted,
}

struct LaneConn {
    link: Framed<Reply>,
    stage: Stage,
    /// Payload of the last request, where it is of one piece: the next one may refer to it.
    sent: Option<Buf>,
    /// A payload that became whole while the link was cut.
    late: Option<BufMut>,
}

struct WaitingFrame {
    lane: usize,
    frame: Vec<u8>,
    payload: Vec<Buf>,
}

/// A request, and what is said beside it.
pub struct Question<'a> {
    pub request: &'a Request,
    pub beside: Beside,
}

/// What `status` shows of a link.
#[derive(Clone, Debug)]
pub struct LinkView<'a> {
    pub node: NodeId,
    pub address: SocketAddr,
    pub up: bool,
    pub cut: bool,
    pub polls_missed: u32,
    pub last_heard: Instant,
    pub trouble: Option<&'a str>,
    /// Of the messages that were agreed on, while it is up.
    pub version: Option<u32>,
    /// Of the node's process.
    pub reactors: usize,
    pub passed_on: u64,
    pub devices: &'a [DeviceStat],
    /// What their drives say.
    pub drives: &'a [(DeviceId, DriveReport)],
    pub troubles: &'a [DeviceTrouble],
}

struct Link {
    node: NodeId,
    address: SocketAddr,
    state: State,
    /// Of each reactor in turn.
    lanes: Vec<Option<LaneConn>>,
    /// Which of its reactors has which device.
    homes: Vec<(DeviceId, u16)>,
    /// Requests that it has passed on between its reactors.
    passed_on: u64,
    waiting: Slab<Owner>,
    boot: InstanceId,
    /// Of the messages, agreed on by the lanes that were greeted.
    version: u32,
    devices: Vec<DeviceStat>,
    /// As last heard.
    drives: Vec<(DeviceId, DriveReport)>,
    /// What is wrong with its devices, as last heard.
    troubles: Vec<DeviceTrouble>,
    /// Since its process was started it has told them.
    has_troubles: bool,
    /// Until drives are asked for how they are again.
    polls_to_drives: u32,
    cut: bool,
    /// Its node is not in the grid any more.
    retired: bool,
    held: Vec<WaitingFrame>,
    /// Connections given up while the link was cut: to the other side they are still there.
    orphans: Vec<ConnId>,
    polls_missed: u32,
    last_heard: Instant,
    trouble: Option<String>,
}

pub struct Links {
    grid: GridId,
    host: String,
    /// Where links have TLS.
    tls: Option<HostTls>,
    links: Vec<Link>,
    by_conn: HashMap<ConnId, (usize, usize)>,
    pub events: VecDeque<LinkEvent>,
    poll_at: Instant,
    /// Of several reactors one tells how its links are.
    voice: Voice,
}

fn serves(device: &DeviceStat) -> bool {
    device.health == DeviceHealth::Serving
}

fn lane_index(lane: Lane) -> usize {
    match lane {
        Lane::Fast => 0,
        Lane::Bulk => 1,
    }
}

impl Links {
    pub fn new(grid: GridId, host: &str, tls: Option<HostTls>, nodes: &[(NodeId, SocketAddr)], voice: Voice) -> Links {
        let mut links: Vec<Link> = nodes.iter().map(|(node, address)| Link::new(*node, *address)).collect();
        links.sort_by_key(|l| l.node);
        Links {
            grid,
            host: host.to_string(),
            tls,
            links,
            by_conn: HashMap::new(),
            events: VecDeque::new(),
            poll_at: Instant::ZERO,
            voice,
        }
    }

    /// The grid has these nodes from here on.
    pub fn set_nodes(&mut self, nodes: &[(NodeId, SocketAddr)], now: Instant, io: &mut Io) {
        let voice = self.voice;
        for index in 0..self.links.len() {
            let link = &mut self.links[index];
            let wanted = nodes.iter().find(|(node, _)| *node == link.node).map(|(_, address)| *address);
            let trouble = match wanted {
                None if link.retired => continue,
                None => "it was taken out of the grid".to_string(),
                Some(address) if address != link.address => {
                    voice.info(format_args!("node {} is at {address} now, and no more at {}", link.node, link.address));
                    format!("it is at {address} now")
                }
                Some(_) if link.retired => "it is in the grid again".to_string(),
                Some(_) => continue,
            };
            link.retired = wanted.is_none();
            link.address = wanted.unwrap_or(link.address);
            link.trouble = Some(trouble);
            self.drop_link(index, now, io);
        }
        for (node, address) in nodes {
            let Err(at) = self.links.binary_search_by_key(node, |link| link.node) else { continue };
            self.links.insert(at, Link::new(*node, *address));
            // Those behind it are one place further on.
            self.by_conn.values_mut().filter(|(index, _)| *index >= at).for_each(|(index, _)| *index += 1);
        }
    }

    fn index(&self, node: NodeId) -> Option<usize> {
        self.links.binary_search_by_key(&node, |l| l.node).ok()
    }

    /// Nodes that are up, for a volume that has just been opened.
    pub fn views(&self) -> impl Iterator<Item = LinkView<'_>> {
        self.links.iter().filter(|l| !l.retired).map(|l| LinkView {
            node: l.node,
            address: l.address,
            up: l.state == State::Up,
            cut: l.cut,
            polls_missed: l.polls_missed,
            last_heard: l.last_heard,
            trouble: l.trouble.as_deref(),
            version: (l.state == State::Up).then_some(l.version),
            reactors: l.lanes.len() / LANES,
            passed_on: l.passed_on,
            devices: &l.devices,
            drives: &l.drives,
            troubles: &l.troubles,
        })
    }

    /// Sends what is short, and for no volume.
    fn ask(&mut self, node: NodeId, lane: Lane, owner: Owner, request: &Request, io: &mut Io) {
        self.send(node, lane, owner, Question { request, beside: Beside::default() }, Vec::new(), io);
    }

    /// Sends to a node; does nothing where it is not up (a `Down` is on its way to who asked).
    pub fn send(
        &mut self,
        node: NodeId,
        lane: Lane,
        owner: Owner,
        Question { request, beside }: Question<'_>,
        payload: Vec<Buf>,
        io: &mut Io,
    ) {
        let Some(index) = self.index(node) else { return };
        let link = &mut self.links[index];
        if link.state != State::Up {
            return;
        }
        if link.waiting.is_full() {
            logger::error(format_args!("node {node}: {WAITING_MAX} requests are unanswered; connecting anew"));
            return self.drop_link(index, io.now(), io);
        }
        let (token, lane) = (link.waiting.insert(owner), link.lane_for(lane, request));
        let len = payload.iter().map(|b| b.len()).sum();
        let (is_again, beside) = (link.is_again(lane, &payload), beside.in_version(link.version));
        let request = self.addressed(request);
        let (frame, payload) = match is_again {
            true => (encode_frame_again(token.0, &*request, len, beside), Vec::new()),
            false => (encode_frame_with(token.0, &*request, len, beside), payload),
        };
        self.links[index].queue(lane, frame, payload, io);
    }

    /// The request with the addresses of the nodes that it names, if it names any: volumes know nodes by number.
    fn addressed<'a>(&self, request: &'a Request) -> Cow<'a, Request> {
        let mut request = Cow::Borrowed(request);
        if matches!(*request, Request::MakeShard { .. })
            && let Request::MakeShard { sources, .. } = request.to_mut()
        {
            for source in sources {
                let link = self.index(source.node).map(|index| &self.links[index]);
                source.address = link.map(|link| link.address.to_string());
            }
        }
        request
    }

    /// A call of the control plane; false where the node is not up, or doesn't know what is asked.
    pub fn call(&mut self, node: NodeId, ticket: u64, request: &Request, io: &mut Io) -> bool {
        let knows = |link: &Link| link.state == State::Up && link.version >= request.since();
        let is_up = self.index(node).is_some_and(|i| knows(&self.links[i]));
        if is_up {
            self.ask(node, Lane::Bulk, Owner::Control { ticket }, request, io);
        }
        is_up
    }

    pub fn on_connected(&mut self, conn: ConnId, io: &mut Io) {
        let Some(&(index, lane)) = self.by_conn.get(&conn) else { return };
        let hello = Request::Hello { versions: WIRE, grid: self.grid, host: self.host.clone() };
        self.links[index].queue(lane, encode_frame(u64::MAX, &hello, 0), Vec::new(), io);
    }

    pub fn on_bytes(&mut self, now: Instant, conn: ConnId, bytes: &mut [u8], io: &mut Io) {
        let Some(&(index, lane)) = self.by_conn.get(&conn) else { return };
        let link = &mut self.links[index];
        link.last_heard = now;
        let Some(lane_conn) = &mut link.lanes[lane] else { return };
        if let Err(error) = lane_conn.link.on_bytes(bytes, io) {
            return self.refuse(now, index, format!("no TLS with it: {error}"), io);
        }
        self.on_frames(now, index, lane, io);
    }

    pub fn on_filled(&mut self, now: Instant, conn: ConnId, buf: BufMut, io: &mut Io) {
        let Some(&(index, lane)) = self.by_conn.get(&conn) else { return };
        let link = &mut self.links[index];
        let Some(lane_conn) = &mut link.lanes[lane] else { return };
        if link.cut {
            lane_conn.late = Some(buf);
            return;
        }
        link.last_heard = now;
        lane_conn.link.on_filled(buf);
        self.on_frames(now, index, lane, io);
    }

    /// Passes on the answers that are whole, and has the kernel fill what is large.
    fn on_frames(&mut self, now: Instant, index: usize, lane: usize, io: &mut Io) {
        // With a frame the link may end, and its further lanes with it.
        while let Some(frame) = self.links[index].lane_mut(lane).and_then(|l| l.link.pop()) {
            self.on_frame(now, index, lane, frame, io);
        }
        let link = &mut self.links[index];
        let Some(lane_conn) = link.lane_mut(lane) else { return };
        let Err(error) = lane_conn.link.settle(io) else { return };
        if lane_conn.stage != Stage::Greeted {
            let how = if lane_conn.link.is_secured() { "with" } else { "without" };
            let trouble = format!(
                "it sent what is no greeting ({error}), and this host connects {how} TLS; does its machine have the same `tls` \
                 in grid.json?"
            );
            self.refuse(now, index, trouble, io);
        } else {
            logger::warn(format_args!("node {} sent what is no answer ({error}); connecting anew", link.node));
            self.drop_link(index, now, io);
        }
    }

    fn on_frame(&mut self, now: Instant, index: usize, lane: usize, frame: Frame<Reply>, io: &mut Io) {
        let voice = self.voice;
        if let Some(stage) = self.links[index].stage(lane).filter(|stage| *stage != Stage::Greeted) {
            return self.on_greeting(now, index, lane, stage, frame.message, io);
        }
        let link = &mut self.links[index];
        let Some(owner) = link.waiting.remove(Token(frame.token)) else {
            voice.warn(format_args!("node {} answered what nobody asked; connecting anew", link.node));
            return self.drop_link(index, now, io);
        };
        let node = link.node;
        match owner {
            Owner::Volume { volume, token } => {
                self.events.push_back(LinkEvent::Answer {
                    node,
                    volume,
                    token,
                    reply: frame.message,
                    times: frame.beside.times,
                    payload: frame.payload,
                });
            }
            Owner::Control { ticket } => {
                self.events.push_back(LinkEvent::Control { ticket, reply: Some(frame.message) });
            }
            Owner::Poll => {
                link.polls_missed = 0;
                let devices = match frame.message {
                    Reply::Stat { devices } => devices,
                    Reply::Drives { drives } => return link.drives = drives,
                    Reply::Reactors { passed_on, .. } => return link.passed_on = passed_on,
                    Reply::Troubles { troubles } => return self.on_troubles(now, index, troubles, io),
                    _ => return,
                };
                let news = devices
                    .iter()
                    .any(|d| serves(d) && !link.devices.iter().any(|k| k.device == d.device && serves(k)));
                link.devices = devices;
                self.events.push_back(LinkEvent::Devices { node, devices: link.devices.clone() });
                if news {
                    // Volumes learn of devices from greetings.
                    voice.info(format_args!("node {node} has another device that serves; connecting anew"));
                    link.trouble = Some("it is greeted anew".to_string());
                    self.drop_link(index, now, io);
                }
            }
        }
    }

    fn on_troubles(&mut self, now: Instant, index: usize, troubles: Vec<DeviceTrouble>, io: &mut Io) {
        let voice = self.voice;
        let link = &mut self.links[index];
        for trouble in &troubles {
            let Some(outage) = &trouble.outage else { continue };
            let known = link.troubles.iter().find(|known| known.device == trouble.device);
            if known.and_then(|known| known.outage.as_ref()).is_none_or(|known| known.why != outage.why) {
                voice.error(format_args!(
                    "node {} is without device {}: {}; `holdfast device list` says what to do",
                    link.node, trouble.device, outage.why
                ));
            }
        }
        for known in link.troubles.iter().filter(|known| known.outage.is_some()) {
            if !troubles.iter().any(|trouble| trouble.device == known.device && trouble.outage.is_some()) {
                voice.info(format_args!("node {}: device {} is not out any more", link.node, known.device));
            }
        }
        // Between two looks it was out, and is another life of itself now: volumes learn of that by a greeting.
        let lives_before =
            |device| link.troubles.iter().find(|known| known.device == device).map_or(1, |known| known.lives);
        let is_back = |t: &DeviceTrouble| t.outage.is_none() && t.lives > lives_before(t.device);
        let again = troubles.iter().any(is_back) && link.has_troubles;
        (link.troubles, link.has_troubles) = (troubles, true);
        if again {
            link.trouble = Some("it is greeted anew".to_string());
            self.drop_link(index, now, io);
        }
    }

    fn on_greeting(&mut self, now: Instant, index: usize, lane: usize, stage: Stage, reply: Reply, io: &mut Io) {
        let link = &mut self.links[index];
        let expected = link.node;
        match (stage, reply) {
            (Stage::Hello, Reply::Hello { version, node, boot, devices })
                if node == expected && WIRE.contain(version) =>
            {
                link.on_hello(version, boot, devices);
                self.after_hello(index, lane, io);
            }
            (Stage::Reactors, Reply::Reactors { count, devices, passed_on }) => {
                (link.homes, link.passed_on) = (devices, passed_on);
                link.set_stage(lane, Stage::Greeted);
                let count = usize::from(count).clamp(1, REACTORS_MAX as usize);
                link.lanes.resize_with(LANES * count, || None);
            }
            (Stage::Join, Reply::Done) => link.set_stage(lane, Stage::Greeted),
            (_, Reply::Hello { node, .. }) => {
                let trouble = format!("node {node} listens where node {expected} should; check the addresses");
                return self.refuse(now, index, trouble, io);
            }
            (_, Reply::Refused(Refusal::Version(its))) => {
                return self.refuse(now, index, its.apart_from(WIRE), io);
            }
            (_, other) => {
                let trouble = format!("the greeting was refused ({other:?}): it is of another grid or release");
                return self.refuse(now, index, trouble, io);
            }
        }
        self.after_greeted(now, index, io);
    }

    /// Goes on to the next reactor when all lanes so far are greeted: all at once, of many hosts, would be too many at the
    /// node's door. After the last one the node is up.
    fn after_greeted(&mut self, now: Instant, index: usize, io: &mut Io) {
        let link = &mut self.links[index];
        let count = link.lanes.len();
        let Some(next) = (0..count).find(|lane| link.stage(*lane) != Some(Stage::Greeted)) else {
            link.state = State::Up;
            link.trouble = None;
            link.polls_missed = 0;
            let event = link.up_event();
            self.voice.info(format_args!("node {} is up", link.node));
            return self.events.push_back(LinkEvent::Up(event));
        };
        if link.lanes[next..].iter().any(Option::is_some) {
            return;
        }
        link.state = State::Greeting { give_up_at: now + GREETING_MAX };
        for lane in next..next + LANES {
            if !self.connect_lane(index, lane, now, io) {
                return;
            }
        }
    }

    /// The first lane asks which reactors there are, and those of further ones go there.
    fn after_hello(&mut self, index: usize, lane: usize, io: &mut Io) {
        let link = &mut self.links[index];
        let (stage, request) = if lane >= LANES {
            (Stage::Join, Request::Join { reactor: (lane / LANES) as u16, host: self.host.clone() })
        } else if lane == 0 && link.version >= Request::REACTORS_SINCE {
            (Stage::Reactors, Request::Reactors)
        } else {
            return link.set_stage(lane, Stage::Greeted);
        };
        link.set_stage(lane, stage);
        link.queue(lane, encode_frame(u64::MAX, &request, 0), Vec::new(), io);
    }

    fn refuse(&mut self, now: Instant, index: usize, trouble: String, io: &mut Io) {
        let voice = self.voice;
        let link = &mut self.links[index];
        if link.trouble.as_ref() != Some(&trouble) {
            voice.error(format_args!("node {} at {}: {trouble}", link.node, link.address));
        }
        self.drop_link(index, now, io);
        let link = &mut self.links[index];
        link.trouble = Some(trouble);
        link.state = State::Waiting { retry_at: now + REFUSED_PAUSE };
    }

    pub fn on_lost(&mut self, now: Instant, conn: ConnId, error: ConnError, io: &mut Io) {
        let Some(&(index, lane)) = self.by_conn.get(&conn) else { return };
        self.by_conn.remove(&conn);
        let link = &mut self.links[index];
        link.lanes[lane] = None;
        let is_greeting = matches!(link.state, State::Greeting { .. });
        link.trouble = Some(match error {
            ConnError::ByPeer | ConnError::Reset if is_greeting => format!(
                "{error} instead of greeting: its process is just starting or ending, or its machine has another `tls` in \
                 grid.json than this one"
            ),
            _ => error.to_string(),
        });
        self.drop_link(index, now, io);
    }

    /// Ends connections with nodes whose certificates were taken back.
    pub fn cut_revoked(&mut self, now: Instant, io: &mut Io) {
        for index in 0..self.links.len() {
            if self.links[index].lanes.iter().flatten().any(|lane| lane.link.is_revoked()) {
                self.refuse(now, index, format!("no TLS with it: {REVOKED}"), io);
            }
        }
    }

    /// A volume found the node silent for too long.
    pub fn reconnect(&mut self, now: Instant, node: NodeId, io: &mut Io) {
        if let Some(index) = self.index(node)
            && self.links[index].state == State::Up
        {
            logger::info(format_args!("node {node} is silent; connecting anew"));
            self.links[index].trouble = Some("it is connected, but does not answer".to_string());
            self.drop_link(index, now, io);
        }
    }

    /// Leaves all lanes and tries again soon.
    fn drop_link(&mut self, index: usize, now: Instant, io: &mut Io) {
        let voice = self.voice;
        let link = &mut self.links[index];
        for lane in link.lanes.drain(..).flatten() {
            self.by_conn.remove(&lane.link.conn());
            if link.cut {
                link.orphans.push(lane.link.conn());
            } else {
                io.abort(lane.link.conn());
            }
        }
        link.lanes.resize_with(LANES, || None);
        link.held.clear();
        for token in link.waiting.tokens() {
            if let Some(Owner::Control { ticket }) = link.waiting.remove(token) {
                self.events.push_back(LinkEvent::Control { ticket, reply: None });
            }
        }
        if link.state == State::Up {
            let why = link.trouble.as_deref().unwrap_or("its connection was given up");
            voice.warn(format_args!("node {} is down: {why}", link.node));
            self.events.push_back(LinkEvent::Down { node: link.node });
        }
        link.polls_missed = 0;
        link.state = State::Waiting { retry_at: now + RETRY_PAUSE };
    }

    /// Does what is due by time.
    pub fn on_time(&mut self, now: Instant, io: &mut Io) {
        for index in 0..self.links.len() {
            let link = &mut self.links[index];
            match link.state {
                State::Waiting { retry_at } if retry_at <= now && !link.retired => self.connect(index, now, io),
                State::Greeting { give_up_at } if give_up_at <= now => {
                    link.trouble = Some("it does not answer".to_string());
                    self.drop_link(index, now, io);
                }
                _ => {}
            }
        }
        if self.poll_at <= now {
            self.poll_at = now + POLL_PACE;
            self.poll(now, io);
        }
    }

    fn connect(&mut self, index: usize, now: Instant, io: &mut Io) {
        let link = &mut self.links[index];
        if link.cut {
            // The attempt gets no answer.
            link.state = State::Waiting { retry_at: now + GREETING_MAX };
            return;
        }
        for lane in 0..LANES {
            if !self.connect_lane(index, lane, now, io) {
                return;
            }
        }
        let link = &mut self.links[index];
        link.waiting = Slab::new(WAITING_MAX);
        link.state = State::Greeting { give_up_at: now + GREETING_MAX };
    }

    /// False where it can't be had, and the link has been given up.
    fn connect_lane(&mut self, index: usize, lane: usize, now: Instant, io: &mut Io) -> bool {
        let link = &mut self.links[index];
        let connect = |tls: &HostTls| Ok(Secured::new(tls.connect(Role::Node(link.node))?, tls.revoked().clone()));
        let session: Result<_, TlsError> = self.tls.as_ref().map(connect).transpose();
        let secured = match session {
            Ok(session) => session,
            Err(error) => {
                self.refuse(now, index, format!("no TLS with it: {error}"), io);
                return false;
            }
        };
        let conn = io.connect_tcp(link.address);
        link.lanes[lane] =
            Some(LaneConn { link: Framed::new(conn, secured), stage: Stage::Hello, sent: None, late: None });
        self.by_conn.insert(conn, (index, lane));
        true
    }

    /// Asks every node how full its devices are: `status` never has to.
    fn poll(&mut self, now: Instant, io: &mut Io) {
        for index in 0..self.links.len() {
            let link = &mut self.links[index];
            if link.state != State::Up {
                continue;
            }
            if link.polls_missed >= POLLS_MISSED_MAX {
                link.trouble = Some("it is connected, but does not answer".to_string());
                self.drop_link(index, now, io);
                continue;
            }
            let is_first = link.polls_missed == 0;
            link.polls_missed += 1;
            if is_first {
                let (node, knows_drives) = (link.node, link.version >= Request::DRIVES_SINCE);
                let asks_drives = knows_drives && link.polls_to_drives == 0;
                link.polls_to_drives = link.polls_to_drives.checked_sub(1).unwrap_or(POLLS_PER_DRIVES - 1);
                if asks_drives {
                    self.ask(node, Lane::Fast, Owner::Poll, &Request::Drives, io);
                }
                if self.links[index].version >= Request::TROUBLES_SINCE {
                    self.ask(node, Lane::Fast, Owner::Poll, &Request::Troubles, io);
                }
                if self.links[index].lanes.len() > LANES {
                    self.ask(node, Lane::Fast, Owner::Poll, &Request::Reactors, io);
                }
                self.ask(node, Lane::Fast, Owner::Poll, &Request::Stat, io);
            }
        }
    }

    /// Black-holes the link, or ends that.
    pub fn set_cut(&mut self, now: Instant, node: NodeId, cut: bool, io: &mut Io) -> bool {
        let Some(index) = self.index(node) else { return false };
        let link = &mut self.links[index];
        if link.cut == cut {
            return true;
        }
        link.cut = cut;
        for lane in link.lanes.iter().flatten() {
            io.pause_reading(lane.link.conn(), cut);
        }
        if !cut {
            for held in std::mem::take(&mut link.held) {
                link.queue(held.lane, held.frame, held.payload, io);
            }
            for conn in link.orphans.drain(..) {
                io.abort(conn);
            }
            if let State::Waiting { retry_at } = &mut link.state {
                *retry_at = now;
            }
            let late: Vec<(ConnId, BufMut)> =
                link.lanes.iter_mut().flatten().filter_map(|l| l.late.take().map(|buf| (l.link.conn(), buf))).collect();
            for (conn, buf) in late {
                self.on_filled(now, conn, buf, io);
            }
        }
        true
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        let own = self.links.iter().filter(|l| !l.retired).filter_map(|l| match l.state {
            State::Waiting { retry_at } => Some(retry_at),
            State::Greeting { give_up_at } => Some(give_up_at),
            State::Up => None,
        });
        earliest(own.min(), Some(self.poll_at))
    }
}

impl Link {
    fn new(node: NodeId, address: SocketAddr) -> Link {
        Link {
            node,
            address,
            state: State::Waiting { retry_at: Instant::ZERO },
            lanes: (0..LANES).map(|_| None).collect(),
            homes: Vec::new(),
            passed_on: 0,
            waiting: Slab::new(WAITING_MAX),
            boot: InstanceId(0),
            version: 0,
            devices: Vec::new(),
            drives: Vec::new(),
            troubles: Vec::new(),
            has_troubles: false,
            polls_to_drives: 0,
            cut: false,
            retired: false,
            held: Vec::new(),
            orphans: Vec::new(),
            polls_missed: 0,
            last_heard: Instant::ZERO,
            trouble: None,
        }
    }

    fn stage(&self, lane: usize) -> Option<Stage> {
        self.lanes.get(lane)?.as_ref().map(|lane| lane.stage)
    }

    fn lane_mut(&mut self, lane: usize) -> Option<&mut LaneConn> {
        self.lanes.get_mut(lane)?.as_mut()
    }

    fn set_stage(&mut self, lane: usize, stage: Stage) {
        self.lanes[lane].as_mut().expect("it has just been heard").stage = stage;
    }

    /// The lane to the reactor that has the request's device; to the first, which passes it on, where that is not known.
    fn lane_for(&self, lane: Lane, request: &Request) -> usize {
        let home = |device| self.homes.iter().find(|(known, _)| *known == device).map(|(_, reactor)| *reactor);
        let reactor = if self.lanes.len() == LANES { None } else { request.device().and_then(home) };
        let there = LANES * usize::from(reactor.unwrap_or(0)) + lane_index(lane);
        if there < self.lanes.len() { there } else { lane_index(lane) }
    }

    fn on_hello(&mut self, version: u32, boot: InstanceId, devices: Vec<DeviceStat>) {
        // Its process may be of another release than it was when the first lane greeted.
        let is_first = (0..self.lanes.len()).all(|lane| matches!(self.stage(lane), None | Some(Stage::Hello)));
        self.version = if is_first { version } else { version.min(self.version) };
        if self.boot != boot {
            // It may have other drives now.
            (self.drives, self.polls_to_drives) = (Vec::new(), 0);
            (self.troubles, self.has_troubles) = (Vec::new(), false);
        }
        self.boot = boot;
        self.devices = devices;
    }

    fn up_event(&self) -> Event {
        Event::NodeUp { node: self.node, boot: self.boot, version: self.version, devices: self.devices.clone() }
    }

    /// Whether the node has just got this very payload, for another of its devices. Called with each request, in order.
    fn is_again(&mut self, lane: usize, payload: &[Buf]) -> bool {
        let knows = self.version >= PAYLOAD_AGAIN_SINCE;
        let Some(lane) = self.lanes[lane].as_mut().filter(|_| knows) else { return false };
        let sent = match payload {
            [one] if !one.is_empty() => Some(one.clone()),
            _ => None,
        };
        let former = std::mem::replace(&mut lane.sent, sent);
        matches!((&former, &lane.sent), (Some(former), Some(sent)) if former.is_same(sent))
    }

    fn queue(&mut self, lane: usize, frame: Vec<u8>, payload: Vec<Buf>, io: &mut Io) {
        if self.cut {
            return self.held.push(WaitingFrame { lane, frame, payload });
        }
        let Some(lane_conn) = &mut self.lanes[lane] else { return };
        lane_conn.link.send_frame(frame, payload, io);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_runtime::reactor::{Config, Reactor};

    #[test]
    fn nodes_come_and_go_and_change_their_addresses_while_the_host_runs() {
        let mut reactor = Reactor::new(Config::default()).unwrap();
        let at = |node: u32, port: u16| (NodeId(node), SocketAddr::from(([127, 0, 0, 1], port)));
        let now = Instant(1_000_000_000);
        let mut links = Links::new(GridId(7), "a", None, &[at(1, 1), at(4, 4)], Voice::new(true));
        let shown = |links: &Links| links.views().map(|l| (l.node, l.address)).collect::<Vec<_>>();
        links.on_time(now, reactor.io());
        let conns = |links: &Links, node: u32| {
            let index = links.index(NodeId(node)).unwrap();
            links.by_conn.values().filter(|(at, _)| *at == index).count()
        };
        assert_eq!((conns(&links, 1), conns(&links, 4)), (LANES, LANES));
        let all = [at(1, 1), at(2, 2), at(4, 40)];
        links.set_nodes(&all, now, reactor.io());
        assert_eq!(shown(&links), all);
        assert_eq!((conns(&links, 1), conns(&links, 2), conns(&links, 4)), (LANES, 0, 0), "the old address is left");
        links.on_time(now + RETRY_PAUSE, reactor.io());
        assert_eq!((conns(&links, 1), conns(&links, 2), conns(&links, 4)), (LANES, LANES, LANES));

        links.set_nodes(&[at(2, 2)], now + RETRY_PAUSE, reactor.io());
        assert_eq!(shown(&links), [at(2, 2)]);
        links.poll_at = Instant(u64::MAX);
        let State::Greeting { give_up_at } = links.links[1].state else { panic!("node 2 is being greeted") };
        assert_eq!(links.next_deadline(), Some(give_up_at), "for a node that is gone nobody wakes up");
        links.set_nodes(&[at(1, 10), at(2, 2), at(4, 40)], now + RETRY_PAUSE, reactor.io());
        assert_eq!(shown(&links), [at(1, 10), at(2, 2), at(4, 40)]);
    }

    /// Links to one node that are being greeted, and what it answers over a lane.
    struct Greeted {
        links: Links,
        reactor: Reactor,
    }

    impl Greeted {
        const NOW: Instant = Instant(1_000_000_000);

        fn new() -> Greeted {
            let mut reactor = Reactor::new(Config::default()).unwrap();
            let node = (NodeId(1), SocketAddr::from(([127, 0, 0, 1], 1)));
            let mut links = Links::new(GridId(7), "a", None, &[node], Voice::new(true));
            links.on_time(Greeted::NOW, reactor.io());
            Greeted { links, reactor }
        }

        fn answer(&mut self, lane: usize, reply: &Reply) {
            let conn = self.links.links[0].lane_mut(lane).expect("it is connected").link.conn();
            self.links.on_bytes(Greeted::NOW, conn, &mut encode_frame(u64::MAX, reply, 0), self.reactor.io());
        }

        fn answer_hello(&mut self, lane: usize) {
            let (version, node, boot, devices) = (WIRE.newest, NodeId(1), InstanceId(5), Vec::new());
            self.answer(lane, &Reply::Hello { version, node, boot, devices });
        }

        fn answer_reactors(&mut self, count: u16) {
            self.answer(0, &Reply::Reactors { count, devices: Vec::new(), passed_on: 0 });
        }

        fn is_connected(&mut self, lane: usize) -> bool {
            self.links.links[0].lane_mut(lane).is_some()
        }
    }

    #[test]
    fn reactors_are_joined_one_after_another() {
        let mut greeted = Greeted::new();
        greeted.answer_hello(0);
        greeted.answer_reactors(3);
        assert!(!greeted.is_connected(2), "the second lane has not been greeted");
        greeted.answer_hello(1);
        for lane in [2, 4] {
            assert!(greeted.is_connected(lane) && greeted.is_connected(lane + 1));
            assert!(!greeted.is_connected(lane + 2));
            for lane in [lane + 1, lane] {
                greeted.answer_hello(lane);
                assert!(greeted.links.events.is_empty());
                greeted.answer(lane, &Reply::Done);
            }
        }
        assert!(matches!(greeted.links.events.make_contiguous(), [LinkEvent::Up(_)]));
    }

    #[test]
    fn a_greeting_that_is_refused_at_a_further_reactor_ends_the_link() {
        let mut greeted = Greeted::new();
        greeted.answer_hello(0);
        greeted.answer_hello(1);
        greeted.answer_reactors(2);
        greeted.answer_hello(3);
        greeted.answer(3, &Reply::Refused(Refusal::Invalid));
        assert!(matches!(greeted.links.links[0].state, State::Waiting { .. }));
        assert!(greeted.links.by_conn.is_empty() && !greeted.is_connected(3));
    }
}
