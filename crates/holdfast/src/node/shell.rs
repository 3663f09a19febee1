//! The shell of a storage node: one process, one reactor thread, the node's machine in the middle.
//!
//! Role: turns connections into requests, completions into events, and effects into sends and disk operations. It
//! decides nothing. What is sent within one batch leaves with one system call a connection.
//!
//! Limits: the machine bounds what a device has in the kernel, the reactor what is queued for one peer.
//!
//! A node of a grid with TLS reads no frame of anybody who has not shown at the [`Door`] that it is a host of the grid.
//! Without TLS who says nothing does not stay.
//!
//! Faults: bytes that are no frame close their connection; a device's errors go to the machine, which excludes it and
//! serves on with the others. A device that can't be opened, or hangs, keeps nobody waiting: see [`super::devices`].

use super::devices::{self, DeviceEvent, NodeDevice, Owner};
use super::peers::NodePeers;
use super::siblings::{Own, Post};
use super::{Common, FRONT};
use crate::drives;
use crate::link_tls::{Door, HANDSHAKE_MAX, HANDSHAKES_MAX, PUSHED_OUT};
use crate::logger;
use anyhow::Result;
use holdfast_base::time::earliest;
use holdfast_base::{Buf, BufMut, Effects, Instant, Slab, Token};
use holdfast_format::wire::{Beside, Frame, Request};
use holdfast_host::Source;
use holdfast_runtime::device::Device;
use holdfast_runtime::framed::{Framed, REVOKED};
use holdfast_runtime::mailbox::{self, Receiver, Sender};
use holdfast_runtime::pki::Role;
use holdfast_runtime::reactor::{self, App, ConnId, DiskFault, DiskToken, Event, Io, Reactor, Turn};
use holdfast_runtime::tls::link::ServerTls;
use holdfast_store::{self as store, Dealing, FailReason, Next, Notice};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// What reactors have told this one, and it has not heard.
const POSTS_MAX: usize = 4096;

/// Between two tries to say what another reactor has no room for, and how many are made at the end.
const SAY_PAUSE: Duration = Duration::from_millis(1);
const STOP_TRIES: usize = 1000;

/// How long a device that does not open may keep the others from being used.
const OPENING_MAX: Duration = Duration::from_secs(5);

/// Devices that a process ever has: places are not used twice.
const PLACES_MAX: usize = 4096;

/// What is heard of devices and waits: an answer from each place, and a few lists of them.
const TOLD_MAX: usize = 4 * PLACES_MAX;

/// Reports of drives that wait to be taken note of: there is one in ten minutes from each.
const DRIVES_TOLD_MAX: usize = 256;

struct Peer {
    link: Framed<Request>,
    /// Where it comes from.
    from: String,
    source: Source,
    /// It has shown what it is, and is at the door no more.
    is_in: bool,
    /// Its certificate is a node's, not a host's.
    is_node: bool,
    /// It goes to another reactor, and says this there first.
    joins: Option<(u16, Frame<Request>)>,
}

/// A device, by its place.
struct Disk {
    path: PathBuf,
    /// In the reactor, while it is open.
    slot: Option<reactor::DeviceSlot>,
    /// Blank, it may be made this node's: until it was tried once.
    format_blank: bool,
    /// The configuration has it no more.
    leaves: bool,
    /// Why it is out, as it was last told.
    trouble: Option<String>,
    /// Its drive is asked how it is as long as this lives.
    asked: Option<Arc<()>>,
}

pub struct NodeShell {
    node: store::Node,
    effects: Effects<store::Effect>,
    peers: Slab<Peer>,
    /// Of those that are in.
    peers_max: usize,
    by_conn: HashMap<ConnId, Token>,
    door: Door,
    disks: Vec<Disk>,
    node_peers: NodePeers,
    /// Completions that arose without the ring.
    local: VecDeque<store::Event>,
    /// What drives say, by their devices' places.
    drives: Receiver<drives::Heard>,
    tell_drives: Sender<drives::Heard>,
    /// What became of devices that are opened, and which there are.
    told: Receiver<DeviceEvent>,
    tell: Sender<DeviceEvent>,
    owner: Owner,
    posts: Receiver<Post>,
    own: Own,
    /// When it is tried again to say what others had no room for.
    say_at: Option<Instant>,
    /// Of the first reactor, where a directory says which devices the node has.
    dealing: Option<Dealing<NodeDevice>>,
    /// Places of devices that are still being opened since the start: until none is on any reactor, or for [`OPENING_MAX`],
    /// connections are accepted but not read, so that a greeting tells of all devices.
    opening: BTreeSet<usize>,
    /// Of the first reactor: others that are still opening devices.
    unopened: BTreeSet<u16>,
    read_from: Instant,
}

/// A connection on its way from one reactor to another.
pub struct Joining {
    peer: Peer,
    socket: OwnedFd,
    /// What came behind the request that moves it.
    bytes: Vec<u8>,
    frame: Frame<Request>,
}

/// How the reactor is told something, once it has begun.
pub type Begun = Sender<Post>;

impl NodeShell {
    /// One reactor's part of the node, with these devices; only the first has a door.
    pub fn new(
        common: &Common,
        number: usize,
        devices: &[NodeDevice],
        reactor: &mut Reactor,
        door: Option<ServerTls>,
    ) -> (NodeShell, Begun) {
        let Common { options, peers_max, .. } = common;
        let (tell_drives, drives) = mailbox::mailbox(reactor.waker(), DRIVES_TOLD_MAX);
        let (tell, told) = mailbox::mailbox(reactor.waker(), TOLD_MAX);
        let (post, posts) = mailbox::mailbox(reactor.waker(), POSTS_MAX);
        let own = common.own(number);
        let unopened = if own.is_front() { own.others().collect() } else { BTreeSet::new() };
        let mut shell = NodeShell {
            node: store::Node::new(common.config(number)),
            effects: Effects::new(),
            peers: Slab::new(*peers_max),
            peers_max: peers_max - HANDSHAKES_MAX.min(peers_max / 4),
            by_conn: HashMap::new(),
            door: Door::new(door, peers_max / 4),
            disks: Vec::new(),
            node_peers: NodePeers::new(options.node, options.grid, common.connecting.clone()),
            local: VecDeque::new(),
            drives,
            tell_drives,
            told,
            tell,
            posts,
            own,
            // What is said before all have begun is heard then.
            say_at: Some(reactor.io().now()),
            dealing: None,
            owner: Owner { grid: options.grid, node: options.node, dir: options.dir.clone() },
            opening: (0..devices.len()).collect(),
            unopened,
            read_from: reactor.io().now() + OPENING_MAX,
        };
        for device in devices {
            shell.take_in(device, options.format_blank);
        }
        shell.tell_if_opened();
        (shell, post)
    }

    /// The first reactor deals devices out from here on, as the grid's directory names them.
    pub fn deal_out(&mut self, dealing: Dealing<NodeDevice>, dir: PathBuf) -> Result<()> {
        self.dealing = Some(dealing);
        devices::watch(dir, self.owner.node, self.tell.clone())
    }

    /// The others end with the first. False if one takes nothing any more, and ends with the process.
    pub fn stop_others(&mut self) -> bool {
        self.own.others().for_each(|reactor| self.own.say(reactor, Post::Stop));
        for _ in 0..STOP_TRIES {
            if !self.own.has_unsaid() {
                return true;
            }
            std::thread::sleep(SAY_PAUSE);
            self.own.say_rest();
        }
        false
    }

    fn handle(&mut self, now: Instant, event: store::Event, io: &mut Io) {
        let mut effects = std::mem::take(&mut self.effects);
        self.node.handle(now, event, &mut effects);
        for effect in effects.drain() {
            self.carry_out(effect, io);
        }
        self.effects = effects;
    }

    fn carry_out(&mut self, effect: store::Effect, io: &mut Io) {
        match effect {
            store::Effect::Reply { peer, token, reply, times, payload } => {
                let Some(peer) = self.peers.get_mut(Token(peer.conn)) else { return };
                peer.link.send_with(token, &reply, payload, Beside { times, ..Beside::default() }, io);
            }
            store::Effect::Tell { reactor, message } => {
                self.own.say(reactor, Post::Told { reactor: self.own.number(), message });
            }
            store::Effect::Ask { node, address, token, request } => {
                self.node_peers.ask(io.now(), node, address.as_deref(), token, &request, io);
            }
            store::Effect::Read { slot, offset, len, token } => {
                let Some(disk) = self.disk(slot, token) else { return };
                io.read(disk, offset, len as usize, DiskToken(token.0));
            }
            store::Effect::Write { slot, offset, data, durable, token } => {
                let Some(disk) = self.disk(slot, token) else { return };
                io.write(disk, offset, data, durable, DiskToken(token.0));
            }
            store::Effect::Flush { slot, token } => {
                let Some(disk) = self.disk(slot, token) else { return };
                io.flush_device(disk, DiskToken(token.0));
            }
            store::Effect::Open { slot } => self.open(slot),
            store::Effect::Close { slot } => {
                if let Some(disk) = self.disks[slot.0].slot.take() {
                    io.remove_device(disk);
                }
            }
            store::Effect::Discard { .. } => {}
            store::Effect::Note(notice) => {
                if let Notice::DeviceOpened { slot, .. } | Notice::DeviceFailed { slot, .. } = &notice
                    && self.opening.remove(&slot.0)
                {
                    self.tell_if_opened();
                    self.read_if_opened(io);
                }
                self.note(&notice);
            }
        }
    }

    /// The device's name in the reactor. What is asked of one that is closed fails.
    fn disk(&mut self, slot: store::DeviceSlot, token: store::DiskToken) -> Option<reactor::DeviceSlot> {
        let disk = self.disks[slot.0].slot;
        if disk.is_none() {
            self.local.push_back(store::Event::Disk { token, result: Err(store::DiskError::Gone) });
        }
        disk
    }

    /// Has a device of the configuration opened, in a place of its own.
    fn take_in(&mut self, device: &NodeDevice, format_blank: bool) {
        if self.disks.len() == PLACES_MAX {
            return logger::error(format_args!(
                "{} is not taken in: this process has had {PLACES_MAX} devices; `holdfast node restart {}` takes it in",
                device.path.display(),
                self.owner.node
            ));
        }
        let slot = store::DeviceSlot(self.disks.len());
        let path = device.path.clone();
        self.disks.push(Disk { path, slot: None, format_blank, leaves: false, trouble: None, asked: None });
        self.local.push_back(store::Event::ExpectDevice { slot, device: device.device });
    }

    fn open(&mut self, slot: store::DeviceSlot) {
        let disk = &mut self.disks[slot.0];
        let format_blank = std::mem::take(&mut disk.format_blank);
        let opened = devices::open(self.owner.clone(), slot.0, disk.path.clone(), format_blank, self.tell.clone());
        if let Err(error) = opened {
            self.local.push_back(store::Event::NotOpened { slot, why: format!("{error:#}") });
        }
    }

    fn on_device_event(&mut self, told: DeviceEvent, io: &mut Io) {
        match told {
            DeviceEvent::Opened { place, opened: Ok(device) } => self.on_opened(place, device, io),
            DeviceEvent::Opened { place, opened: Err(why) } => {
                self.local.push_back(store::Event::NotOpened { slot: store::DeviceSlot(place), why });
            }
            DeviceEvent::Formatted { place, device } => {
                let path = self.disks[place].path.display();
                logger::info(format_args!("{path} was blank, and is device {device} of this node now"));
            }
            DeviceEvent::Devices(devices) => self.deal(&devices),
        }
    }

    fn deal(&mut self, devices: &[NodeDevice]) {
        let dealing = self.dealing.as_mut().expect("whoever watches deals");
        for (number, share) in (0..).zip(dealing.deal(devices, devices::class_of)) {
            match number == self.own.number() {
                true => self.reconcile(&share),
                false => self.own.say(number, Post::Devices(share)),
            }
        }
    }

    fn on_post(&mut self, now: Instant, post: Post, io: &mut Io) {
        match post {
            Post::Told { reactor, message } => self.handle(now, store::Event::Told { reactor, message }, io),
            Post::Joining(joining) => self.on_joining(now, *joining, io),
            Post::Devices(devices) => self.reconcile(&devices),
            Post::Opened { reactor } => {
                self.unopened.remove(&reactor);
                self.read_if_opened(io);
            }
            Post::Stop => io.stop(),
        }
    }

    fn on_opened(&mut self, place: usize, device: Device, io: &mut Io) {
        let disk = &mut self.disks[place];
        if disk.leaves {
            return;
        }
        let (size_bytes, media, is_direct) = (device.size_bytes(), device.media(), device.is_direct());
        disk.slot = Some(io.add_device(device));
        let slot = store::DeviceSlot(place);
        self.local.push_back(store::Event::AddDevice { slot, size_bytes, media, is_direct });
        if disk.asked.is_none() && drives::is_asked(&disk.path) {
            let asked = Arc::new(());
            let (dir, while_here) = (self.owner.dir.clone(), Arc::downgrade(&asked));
            match drives::follow(dir, place, disk.path.clone(), self.tell_drives.clone(), while_here) {
                Ok(()) => disk.asked = Some(asked),
                Err(error) => logger::warn(format_args!("{error:#}")),
            }
        }
    }

    /// The configuration has changed: what it names is taken in, what it names no more is let go. A device that has taken
    /// another's place there is another one.
    fn reconcile(&mut self, devices: &[NodeDevice]) {
        let node = &self.node;
        let is_it = |place: usize, disk: &Disk, device: &NodeDevice| {
            let here = node.device_in(store::DeviceSlot(place));
            disk.path == device.path && (here.is_none() || device.device.is_none() || here == device.device)
        };
        let here = || self.disks.iter().enumerate().filter(|(_, disk)| !disk.leaves);
        let gone = here().filter(|(place, disk)| !devices.iter().any(|device| is_it(*place, disk, device)));
        let gone: Vec<usize> = gone.map(|(place, _)| place).collect();
        let is_new = |device: &&NodeDevice| !here().any(|(place, disk)| is_it(place, disk, device));
        let new: Vec<NodeDevice> = devices.iter().filter(is_new).cloned().collect();
        for place in gone {
            let disk = &mut self.disks[place];
            (disk.leaves, disk.asked) = (true, None);
            self.local.push_back(store::Event::RemoveDevice { slot: store::DeviceSlot(place) });
        }
        for device in &new {
            self.take_in(device, false);
        }
    }

    fn handle_local(&mut self, now: Instant, io: &mut Io) {
        loop {
            let told =
                self.node_peers.answers.pop_front().map(|(token, answer)| store::Event::PeerAnswered { token, answer });
            let Some(event) = told.or_else(|| self.local.pop_front()) else { return };
            self.handle(now, event, io);
        }
    }

    fn note_out(&mut self, slot: store::DeviceSlot, reason: &FailReason, next: Next) {
        let disk = &mut self.disks[slot.0];
        let path = disk.path.display();
        let what = match (reason, next) {
            (FailReason::Removed, _) => return logger::info(format_args!("device {path} is let go")),
            (FailReason::PromisesLost, _) => format!("device {path} only serves reads: {reason}; replace it"),
            (_, Next::Again(_)) => {
                format!(
                    "device {path} is out, and is opened anew after a pause: {reason}; if it stays out, check `dmesg`"
                )
            }
            (_, Next::GivenUp) => format!(
                "device {path} has failed for the third time within a day, and stays out: {reason}; check `dmesg`, then replace \
                 it (`holdfast device replace`), or restart this node to go on with it"
            ),
            (_, Next::Stays) => format!(
                "device {path} is out until this node restarts: {reason}; check `dmesg`, then replace the device or restart"
            ),
        };
        if disk.trouble.as_ref() != Some(&what) {
            logger::error(format_args!("{what}"));
        }
        disk.trouble = Some(what);
    }

    fn note(&mut self, notice: &Notice) {
        if let Notice::DeviceOpened { slot, .. } = notice {
            self.disks[slot.0].trouble = None;
        }
        let path = |slot: &store::DeviceSlot| self.disks[slot.0].path.display();
        match notice {
            Notice::DeviceFailed { slot, reason, next, .. } => self.note_out(*slot, reason, *next),
            Notice::DeviceGone { slot } => logger::info(format_args!("nothing uses device {} any more", path(slot))),
            Notice::DeviceOpened { slot, device, ledgers, shards } => logger::info(format_args!(
                "device {device} ({}) serves: {ledgers} ledgers, {shards} shards",
                path(slot)
            )),
            Notice::JournalDamaged { device, batches, unsound_ledgers } => logger::warn(format_args!(
                "device {device}: {batches} journal batches can't be read, {unsound_ledgers} ledgers are unsound here"
            )),
            Notice::EntryDamaged { device, volume, ledger, lsn } => logger::warn(format_args!(
                "device {device}: entry {lsn} of ledger {ledger}, volume {volume}, is unreadable"
            )),
            Notice::ShardDamaged { device, shard } => {
                logger::warn(format_args!("device {device}: {shard:?} is damaged; its volume's host repairs it"));
            }
            Notice::SlotsDamaged { device, count } => {
                logger::warn(format_args!("device {device}: {count} slots can't be read; their shards are lost here"));
            }
            Notice::SuperblockRepaired { device } => {
                logger::warn(format_args!("device {device}: one superblock copy was unreadable and is written anew"));
            }
        }
    }

    /// The first reactor hears that all that this one had at the start are open, or out.
    fn tell_if_opened(&mut self) {
        if self.opening.is_empty() && !self.own.is_front() {
            self.own.say(FRONT as u16, Post::Opened { reactor: self.own.number() });
        }
    }

    fn is_opening(&self) -> bool {
        !self.opening.is_empty() || !self.unopened.is_empty()
    }

    fn read_if_opened(&mut self, io: &mut Io) {
        if !self.is_opening() {
            self.begin_reading(io);
        }
    }

    fn begin_reading(&mut self, io: &mut Io) {
        self.opening.clear();
        self.unopened.clear();
        for (_, peer) in self.peers.iter() {
            io.pause_reading(peer.link.conn(), false);
        }
    }

    fn on_timer(&mut self, now: Instant, io: &mut Io) {
        if self.is_opening() && now >= self.read_from {
            for place in &self.opening {
                let path = self.disks[*place].path.display();
                logger::error(format_args!(
                    "device {path} does not answer: the others serve without it; check `dmesg`"
                ));
            }
            self.begin_reading(io);
            self.tell_if_opened();
        }
        if self.node.next_deadline().is_some_and(|at| at <= now) {
            self.handle(now, store::Event::Tick, io);
        }
        self.node_peers.on_time(now, io);
        while let Some(late) = self.door.overdue(now) {
            let why = self.door.lateness();
            self.refuse(now, late, &why, io);
        }
    }

    fn on_accepted(&mut self, now: Instant, conn: ConnId, (from, address): (String, Option<SocketAddr>), io: &mut Io) {
        let source = Source::of(address);
        if self.peers.is_full() {
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
        let link = Framed::new(conn, secured);
        let token = self.peers.insert(Peer { link, from, source, is_in: false, is_node: false, joins: None });
        self.by_conn.insert(conn, token);
        io.pause_reading(conn, self.is_opening());
        // Nothing is heard of it before.
        let heard_from = if self.is_opening() { now.max(self.read_from) } else { now };
        if let Some(pushed_out) = self.door.come(token, source, heard_from + HANDSHAKE_MAX) {
            self.refuse(now, pushed_out, PUSHED_OUT, io);
        }
    }

    fn on_turned_away(&mut self, now: Instant, from: &str) {
        let peers = self.peers.len();
        self.door.tell(now, from, &format!("{peers} connections are open, and there is no room for more"));
    }

    /// It has shown what it is; why it may not stay, where there is no room for it.
    fn let_in(&mut self, token: Token) -> Option<String> {
        let source = self.peers.get(token).filter(|peer| !peer.is_in)?.source;
        self.door.let_in(token);
        let others = self.peers.iter().filter(|(_, peer)| peer.is_in).map(|(_, peer)| peer.source);
        let why = Door::why_no_room(self.peers_max, source, others);
        self.peers.get_mut(token).expect("just seen").is_in = why.is_none();
        why
    }

    /// Ends a connection that the door does not let in, or whose session has failed; it is told by an alert.
    fn refuse(&mut self, now: Instant, token: Token, why: &str, io: &mut Io) {
        let Some(peer) = self.peers.get(token) else { return };
        self.door.tell(now, &peer.from, why);
        let conn = peer.link.conn();
        io.close(conn);
        self.on_closed(now, conn, io);
    }

    /// Ends connections of hosts whose certificates were taken back.
    fn cut_revoked(&mut self, now: Instant, io: &mut Io) {
        self.node_peers.cut_revoked(now, io);
        let revoked = self.peers.iter().filter(|(_, peer)| peer.link.is_revoked());
        let cut: Vec<Token> = revoked.map(|(token, _)| token).collect();
        for token in cut {
            self.refuse(now, token, "its certificate was revoked; it was connected, and is cut off", io);
        }
    }

    fn on_bytes(&mut self, now: Instant, conn: ConnId, bytes: &mut [u8], io: &mut Io) {
        let Some(&token) = self.by_conn.get(&conn) else { return };
        let Some(peer) = self.peers.get_mut(token) else { return };
        let was_at_door = peer.link.is_handshaking();
        if let Err(error) = peer.link.on_bytes(bytes, io) {
            return self.refuse(now, token, &error.to_string(), io);
        }
        if was_at_door && !peer.link.is_handshaking() {
            peer.is_node = peer.link.peer().is_some_and(|who| matches!(who.role, Role::Node(_)));
            if let Some(why) = self.let_in(token) {
                return self.refuse(now, token, &why, io);
            }
        }
        self.on_frames(now, token, io);
    }

    fn on_filled(&mut self, now: Instant, conn: ConnId, buf: BufMut, io: &mut Io) {
        let Some(&token) = self.by_conn.get(&conn) else { return };
        let Some(peer) = self.peers.get_mut(token) else { return };
        peer.link.on_filled(buf);
        self.on_frames(now, token, io);
    }

    /// Handles the requests that are whole, and has the kernel fill what is large.
    fn on_frames(&mut self, now: Instant, token: Token, io: &mut Io) {
        while let Some(frame) = self.peers.get_mut(token).and_then(|p| p.link.pop()) {
            if let Some(why) = self.let_in(token) {
                return self.refuse(now, token, &why, io);
            }
            if self.peers.get(token).is_some_and(|peer| !may_ask(peer, &frame.message)) {
                return self.refuse(now, token, "it is a node, and may only read shards; check what it is", io);
            }
            if let Request::Join { reactor, .. } = frame.message
                && self.own.others().any(|other| other == reactor)
            {
                let peer = self.peers.get_mut(token).expect("just seen");
                peer.joins = Some((reactor, frame));
                return io.detach(peer.link.conn());
            }
            self.on_request(now, token, frame, io);
        }
        let Some(peer) = self.peers.get_mut(token) else { return };
        if let Err(error) = peer.link.settle(io) {
            let (conn, from) = (peer.link.conn(), peer.from.clone());
            self.door.tell(now, &from, &format!("it does not speak our protocol: {error}"));
            io.abort(conn);
            self.on_closed(now, conn, io);
        }
    }

    fn on_request(&mut self, now: Instant, token: Token, frame: Frame<Request>, io: &mut Io) {
        let Frame { token: request_token, beside, message: request, payload } = frame;
        let peer = store::PeerId::here(token.0);
        self.handle(now, store::Event::Request { peer, token: request_token, beside, request, payload }, io);
    }

    /// A connection has left this reactor for another one.
    fn on_detached(&mut self, now: Instant, conn: ConnId, socket: OwnedFd, bytes: Vec<u8>, io: &mut Io) {
        let Some(token) = self.by_conn.remove(&conn) else { return };
        let mut peer = self.peers.remove(token).expect("its connection was here");
        let (reactor, frame) = peer.joins.take().expect("nothing else has it leave");
        self.handle(now, store::Event::PeerGone { peer: store::PeerId::here(token.0) }, io);
        self.own.say(reactor, Post::Joining(Box::new(Joining { peer, socket, bytes, frame })));
    }

    fn why_no_room(&self, source: Source) -> Option<String> {
        if self.peers.is_full() {
            return Some(format!("{} connections are open, and there is no room for more", self.peers.len()));
        }
        Door::why_no_room(self.peers_max, source, self.peers.iter().map(|(_, peer)| peer.source))
    }

    /// A connection that is for devices of this reactor has come from the first one.
    fn on_joining(&mut self, now: Instant, joining: Joining, io: &mut Io) {
        let Joining { mut peer, socket, mut bytes, frame } = joining;
        // While it was on its way no reactor saw to it.
        let why_cut = peer.link.is_revoked().then(|| REVOKED.to_string());
        if let Some(why) = why_cut.or_else(|| self.why_no_room(peer.source)) {
            return self.door.tell(now, &peer.from, &why);
        }
        let conn = io.adopt(socket);
        peer.link.move_to(conn);
        let token = self.peers.insert(peer);
        self.by_conn.insert(conn, token);
        self.on_request(now, token, frame, io);
        self.on_bytes(now, conn, &mut bytes, io);
    }

    fn on_closed(&mut self, now: Instant, conn: ConnId, io: &mut Io) {
        let Some(token) = self.by_conn.remove(&conn) else { return };
        self.peers.remove(token);
        self.door.let_in(token);
        self.handle(now, store::Event::PeerGone { peer: store::PeerId::here(token.0) }, io);
    }
}

/// Hosts may ask anything; nodes read shards of which they make others.
fn may_ask(peer: &Peer, request: &Request) -> bool {
    !peer.is_node || matches!(request, Request::Hello { .. } | Request::ReadShard { .. })
}

fn disk_error(fault: DiskFault) -> store::DiskError {
    match fault {
        DiskFault::NoSpace => store::DiskError::NoSpace,
        DiskFault::OutOfRange | DiskFault::Media(_) => store::DiskError::Io,
    }
}

impl App for NodeShell {
    fn on_event(&mut self, now: Instant, event: Event<'_>, io: &mut Io) {
        match event {
            Event::Bytes { conn, bytes } if self.node_peers.is_one(conn) => {
                self.node_peers.on_bytes(now, conn, bytes, io);
            }
            Event::Bytes { conn, bytes } => self.on_bytes(now, conn, bytes, io),
            Event::Read { token, result } => {
                let result = result.map_err(|e| {
                    logger::warn(format_args!("{e}"));
                    disk_error(e.fault)
                });
                self.handle(now, store::Event::Disk { token: store::DiskToken(token.0), result }, io);
            }
            Event::Written { token, result } => {
                let result = result.map(|()| Buf::empty()).map_err(|e| {
                    logger::error(format_args!("{e}"));
                    disk_error(e.fault)
                });
                self.handle(now, store::Event::Disk { token: store::DiskToken(token.0), result }, io);
            }
            Event::Accepted { conn, peer, address, .. } => self.on_accepted(now, conn, (peer, address), io),
            Event::TurnedAway { peer, .. } => self.on_turned_away(now, &peer),
            Event::Closed { conn, .. } | Event::ConnectFailed { conn, .. } if self.node_peers.is_one(conn) => {
                self.node_peers.on_lost(now, conn, io);
            }
            Event::Closed { conn, .. } => self.on_closed(now, conn, io),
            Event::Timer => self.on_timer(now, io),
            Event::Shutdown { .. } => io.stop(),
            Event::Wake => {
                self.cut_revoked(now, io);
                for post in self.posts.drain() {
                    self.on_post(now, post, io);
                }
                for told in self.told.drain() {
                    self.on_device_event(told, io);
                }
                for (place, report) in self.drives.drain() {
                    self.handle(now, store::Event::Drive { slot: store::DeviceSlot(place), report }, io);
                }
            }
            Event::Discarded { .. } => {}
            Event::Filled { conn, buf } if self.node_peers.is_one(conn) => {
                self.node_peers.on_filled(now, conn, buf, io);
            }
            Event::Filled { conn, buf } => self.on_filled(now, conn, buf, io),
            Event::Connected { conn } => self.node_peers.on_connected(conn, io),
            Event::ConnectFailed { .. } => {}
            Event::Detached { conn, socket, bytes } => self.on_detached(now, conn, socket, bytes, io),
        }
        self.handle_local(now, io);
    }

    fn on_batch_end(&mut self, now: Instant, io: &mut Io) {
        self.handle_local(now, io);
        self.own.say_rest();
        self.say_at = self.own.has_unsaid().then_some(now + SAY_PAUSE);
    }

    fn next_deadline(&self) -> Option<Instant> {
        let opening = self.is_opening().then_some(self.read_from);
        let machines = earliest(self.node.next_deadline(), self.node_peers.next_deadline());
        earliest(earliest(machines, self.say_at), earliest(opening, self.door.next_deadline()))
    }

    fn on_long_turn(&mut self, turn: &Turn, untold: u64) {
        logger::info(format_args!("a turn of the reactor took {turn}; {untold} others did since the last such line"));
    }
}
