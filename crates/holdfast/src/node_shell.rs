//! The shell of a storage node: one process, one reactor thread, the node's machine in the middle.
//!
//! Role: turns connections into requests, completions into events, and effects into sends and disk operations. It
//! decides nothing. What is sent within one batch leaves with one system call a connection.
//!
//! Limits: [`DISK_IN_FLIGHT_MAX`] operations a device in the kernel; what is queued for one peer is bounded by the
//! reactor.
//!
//! A node of a grid with TLS reads no frame of anybody who has not shown at the [`Door`] that it is a host of the grid.
//!
//! Faults: bytes that are no frame close their connection; a device's errors go to the machine, which excludes it and
//! serves on with the others.

use crate::daemon::{outwait, tell_ready};
use crate::drives;
use crate::grid::revoked;
use crate::link_tls::{Door, HANDSHAKE_MAX, Secured};
use crate::logger;
use crate::neighbours::Neighbours;
use anyhow::{Result, anyhow, bail};
use holdfast_base::stream::Inbound;
use holdfast_base::time::earliest;
use holdfast_base::{Buf, BufMut, DeviceId, Effects, GridId, InstanceId, Instant, NodeId, Slab, Token};
use holdfast_format::wire::{FrameReader, Request, encode_frame};
use holdfast_runtime::device::{self, DeviceError};
use holdfast_runtime::mailbox::{self, Receiver};
use holdfast_runtime::pki::Role;
use holdfast_runtime::reactor::{self, App, ConnId, DiskFault, DiskToken, Event, Io, ListenError, Reactor};
use holdfast_runtime::tls::link::{HostTls, LinkPaths, ServerTls};
use holdfast_store::{self as store, FailReason, Notice};
use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// Operations of one device that the kernel holds at a time: enough for a fast drive, few enough that reads don't queue
/// behind a burst of shards.
const DISK_IN_FLIGHT_MAX: usize = 64;

/// Connections at a time: two lanes of 2,000 hosts.
const PEERS_MAX: usize = 4096;

/// How long a device that does not open may keep the others from being used.
const OPENING_MAX: Duration = Duration::from_secs(5);

/// Reports of drives that wait to be taken note of: there is one in ten minutes from each.
const DRIVES_TOLD_MAX: usize = 256;

/// What `holdfast node` was asked to run.
#[derive(Clone, Debug)]
pub struct NodeOptions {
    pub node: NodeId,
    pub grid: GridId,
    pub listen: SocketAddr,
    pub devices: Vec<PathBuf>,
    /// Make devices that hold nothing but zeroes this node's.
    pub format_blank: bool,
    /// Credentials, where links have TLS.
    pub tls: Option<LinkPaths>,
    /// Share of a fast device for copies of what is read from slower ones; zero for none.
    pub read_cache_percent: u32,
    /// The grid's directory, where the node was started by it.
    pub dir: Option<PathBuf>,
}

struct Peer {
    conn: ConnId,
    /// Where it comes from.
    from: String,
    reader: FrameReader<Request>,
    secured: Option<Box<Secured>>,
    /// Its certificate is a node's, not a host's.
    is_node: bool,
}

/// A device as the reactor knows it, and where its file is.
struct Disk {
    slot: reactor::DeviceSlot,
    path: PathBuf,
}

struct NodeShell {
    node: store::Node,
    effects: Effects<store::Effect>,
    peers: Slab<Peer>,
    by_conn: HashMap<ConnId, Token>,
    /// Where links have TLS.
    door: Option<Door>,
    disks: Vec<Disk>,
    neighbours: Neighbours,
    /// Completions that arose without the ring.
    local: VecDeque<store::Event>,
    /// What drives say, by their devices' places.
    drives: Receiver<drives::Heard>,
    /// Devices that are still being opened: until none is, or for [`OPENING_MAX`], connections are accepted but not
    /// read, so that a greeting tells of all devices.
    opening: usize,
    read_from: Instant,
}

/// Runs until SIGTERM.
pub fn run(options: &NodeOptions) -> Result<()> {
    let load = |paths| ServerTls::load(paths, options.grid, Role::Node(options.node));
    let tls = options.tls.as_ref().map(load).transpose()?;
    if let (Some(tls), Some(paths)) = (&tls, &options.tls) {
        tls.revoked().replace(&revoked::load(&paths.ca, options.grid)?);
    }
    let connecting = match (&tls, &options.tls) {
        (Some(tls), Some(paths)) => Some(HostTls::load_node(paths, options.grid, options.node, tls)?),
        _ => None,
    };
    let devices = open_devices(options)?;
    let config = reactor::Config { handles_signals: true, ..reactor::Config::default() };
    let mut reactor = Reactor::new(config)?;
    if let (Some(tls), Some(paths)) = (&tls, &options.tls) {
        revoked::follow(paths.ca.clone(), options.grid, tls.revoked().clone(), reactor.waker())?;
    }
    let in_use = |e: &ListenError| matches!(e, ListenError::InUse { .. });
    let (_, bound) = outwait(|| reactor.io().listen_tcp(options.listen), in_use)?;
    let boot = InstanceId(uuid::Uuid::new_v4().as_u128());
    let node_config = store::NodeConfig::new(options.grid, options.node, boot);
    let node_config = store::NodeConfig { read_cache_per_mille: options.read_cache_percent * 10, ..node_config };
    let (tell, drives) = mailbox::mailbox(reactor.waker(), DRIVES_TOLD_MAX);
    let mut shell = NodeShell {
        node: store::Node::new(node_config),
        effects: Effects::new(),
        peers: Slab::new(PEERS_MAX),
        by_conn: HashMap::new(),
        door: tls.map(Door::new),
        disks: Vec::new(),
        neighbours: Neighbours::new(options.node, options.grid, connecting),
        local: VecDeque::new(),
        drives,
        opening: devices.len(),
        read_from: reactor.io().now() + OPENING_MAX,
    };
    for device in devices {
        let (path, size_bytes, media) = (device.path().to_path_buf(), device.size_bytes(), device.media());
        let slot = reactor.io().add_device(device, DISK_IN_FLIGHT_MAX);
        let slot_of_node = store::DeviceSlot(shell.disks.len());
        shell.local.push_back(store::Event::AddDevice { slot: slot_of_node, size_bytes, media });
        if drives::is_asked(&path) {
            drives::follow(options.dir.clone(), slot_of_node.0, path.clone(), tell.clone())?;
        }
        shell.disks.push(Disk { slot, path });
    }
    let how = if options.tls.is_some() { ", with TLS" } else { "" };
    logger::info(format_args!("node {} of grid {} listens on {bound}{how}", options.node, options.grid));
    if options.tls.is_none() && !bound.ip().is_loopback() {
        logger::warn(format_args!(
            "{bound} is open to everybody who can reach it, without TLS; only on a network of the grid's own"
        ));
    }
    tell_ready();
    reactor.run(&mut shell)?;
    logger::info(format_args!("node {} stops", options.node));
    Ok(())
}

/// Opens what the node may use. A device that is missing, broken, blank or unknown is left out, as long as one remains:
/// devices fail by themselves. One that belongs to another node or grid stops the node before it does any harm.
fn open_devices(options: &NodeOptions) -> Result<Vec<device::Device>> {
    let mut opened = Vec::new();
    let mut failed = Vec::new();
    for path in &options.devices {
        match outwait(|| device::open(path), |e| matches!(e, DeviceError::InUse { .. })) {
            Ok(device) => match crate::grid::ownership::claim(&device, options)? {
                Ok(()) => opened.push(device),
                Err(why) => failed.push(anyhow!(why)),
            },
            Err(error @ (DeviceError::InUse { .. } | DeviceError::NotADevice { .. })) => return Err(error.into()),
            Err(error) => failed.push(error.into()),
        }
    }
    if opened.is_empty() {
        let Some(first) = failed.into_iter().next() else {
            bail!("node {} has no device; name at least one with --device", options.node)
        };
        return Err(first.context(format!("node {} can't use any of its devices", options.node)));
    }
    for error in failed {
        logger::error(format_args!("node {} starts without a device: {error:#}", options.node));
    }
    Ok(opened)
}

impl NodeShell {
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
            store::Effect::Reply { peer, token, reply, payload } => {
                let Some(peer) = self.peers.get_mut(Token(peer.0)) else { return };
                let len = payload.iter().map(|b| b.len()).sum();
                let frame = encode_frame(token, &reply, len);
                if let Some(secured) = &mut peer.secured {
                    return secured.send(peer.conn, &frame, &payload, io);
                }
                io.send_vec(peer.conn, frame);
                for part in payload {
                    io.send_buf(peer.conn, part);
                }
            }
            store::Effect::Ask { node, address, token, request } => {
                self.neighbours.ask(io.now(), node, address.as_deref(), token, &request, io);
            }
            store::Effect::Read { slot, offset, len, token } => {
                io.read(self.disks[slot.0].slot, offset, len as usize, DiskToken(token.0));
            }
            store::Effect::Write { slot, offset, data, durable, token } => {
                io.write(self.disks[slot.0].slot, offset, data, durable, DiskToken(token.0));
            }
            store::Effect::Flush { slot, token } => self.flush(slot, token),
            store::Effect::Discard { .. } => {}
            store::Effect::Note(notice) => {
                if matches!(notice, Notice::DeviceOpened { .. } | Notice::DeviceFailed { .. }) && self.opening > 0 {
                    self.opening -= 1;
                    if self.opening == 0 {
                        self.begin_reading(io);
                    }
                }
                self.note(&notice);
            }
        }
    }

    /// Asked for once a device, while it is being opened, when nobody waits for anything: so it may block.
    fn flush(&mut self, slot: store::DeviceSlot, token: store::DiskToken) {
        let flushed = std::fs::File::open(&self.disks[slot.0].path).and_then(|file| file.sync_data());
        let result = flushed.map(|()| Buf::empty()).map_err(|_| store::DiskError::Io);
        self.local.push_back(store::Event::Disk { token, result });
    }

    fn handle_local(&mut self, now: Instant, io: &mut Io) {
        loop {
            let told = self.neighbours.answers.pop_front().map(|(token, answer)| store::Event::Told { token, answer });
            let Some(event) = told.or_else(|| self.local.pop_front()) else { return };
            self.handle(now, event, io);
        }
    }

    fn note(&self, notice: &Notice) {
        let path = |slot: &store::DeviceSlot| self.disks[slot.0].path.display();
        match notice {
            Notice::DeviceOpened { slot, device, ledgers, shards } => logger::info(format_args!(
                "device {device} ({}) serves: {ledgers} ledgers, {shards} shards",
                path(slot)
            )),
            Notice::DeviceFailed { slot, reason: reason @ FailReason::PromisesLost, .. } => {
                logger::error(format_args!("device {} only serves reads: {reason}; replace it", path(slot)));
            }
            Notice::DeviceFailed { slot, reason, .. } => logger::error(format_args!(
                "device {} is out until this node restarts: {reason}; check `dmesg`, then replace the device or \
                 restart",
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

    fn begin_reading(&mut self, io: &mut Io) {
        self.opening = 0;
        for (_, peer) in self.peers.iter() {
            io.pause_reading(peer.conn, false);
        }
    }

    fn on_timer(&mut self, now: Instant, io: &mut Io) {
        if self.opening > 0 && now >= self.read_from {
            logger::warn(format_args!(
                "{} devices are still being opened; the others serve without them",
                self.opening
            ));
            self.begin_reading(io);
        }
        if self.node.next_deadline().is_some_and(|at| at <= now) {
            self.handle(now, store::Event::Tick, io);
        }
        self.neighbours.on_time(now, io);
        while let Some(late) = self.door.as_mut().and_then(|door| door.overdue(now)) {
            let seconds = HANDSHAKE_MAX.as_secs();
            let why =
                format!("it has not finished its TLS handshake within {seconds} s; check what it is that connects");
            self.refuse(now, late, &why, io);
        }
    }

    fn on_accepted(&mut self, now: Instant, conn: ConnId, from: String, io: &mut Io) {
        if self.peers.is_full() {
            logger::warn(format_args!("refused {from}: {PEERS_MAX} connections are open"));
            return io.abort(conn);
        }
        let secured = match self.door.as_ref().map(Door::begin).transpose() {
            Ok(secured) => secured,
            Err(error) => {
                logger::error(format_args!("refused {from}: no TLS session could be made: {error}"));
                return io.abort(conn);
            }
        };
        let token = self.peers.insert(Peer { conn, from, reader: FrameReader::new(), secured, is_node: false });
        self.by_conn.insert(conn, token);
        io.pause_reading(conn, self.opening > 0);
        // Nothing is heard of it before.
        let heard_from = if self.opening > 0 { now.max(self.read_from) } else { now };
        if let Some(pushed_out) = self.door.as_mut().and_then(|door| door.come(token, heard_from + HANDSHAKE_MAX)) {
            let why =
                "too many connections are in their TLS handshake, and it is the oldest; check what it is that connects";
            self.refuse(now, pushed_out, why, io);
        }
    }

    /// Ends a connection that the door does not let in, or whose session has failed; it is told by an alert.
    fn refuse(&mut self, now: Instant, token: Token, why: &str, io: &mut Io) {
        let (Some(door), Some(peer)) = (&mut self.door, self.peers.get(token)) else { return };
        door.tell(now, &peer.from, why);
        let conn = peer.conn;
        io.close(conn);
        self.on_closed(now, conn, io);
    }

    /// Ends connections of hosts whose certificates were taken back.
    fn cut_revoked(&mut self, now: Instant, io: &mut Io) {
        self.neighbours.cut_revoked(now, io);
        let is_revoked = |peer: &Peer| peer.secured.as_ref().is_some_and(|secured| secured.is_revoked());
        let cut: Vec<Token> = self.peers.iter().filter(|(_, peer)| is_revoked(peer)).map(|(token, _)| token).collect();
        for token in cut {
            self.refuse(now, token, "its certificate was revoked; it was connected, and is cut off", io);
        }
    }

    fn on_bytes(&mut self, now: Instant, conn: ConnId, bytes: &mut [u8], io: &mut Io) {
        let Some(&token) = self.by_conn.get(&conn) else { return };
        let Some(peer) = self.peers.get_mut(token) else { return };
        match &mut peer.secured {
            None => peer.reader.on_bytes(bytes),
            Some(secured) => {
                let was_at_door = secured.is_handshaking();
                if let Err(error) = secured.on_bytes(conn, bytes, io, |part| peer.reader.on_bytes(part)) {
                    return self.refuse(now, token, &error.to_string(), io);
                }
                if let Some(door) = self.door.as_mut().filter(|_| was_at_door && !secured.is_handshaking()) {
                    peer.is_node = secured.peer().is_some_and(|who| matches!(who.role, Role::Node(_)));
                    door.let_in(token);
                }
            }
        }
        self.on_frames(now, token, io);
    }

    fn on_filled(&mut self, now: Instant, conn: ConnId, buf: BufMut, io: &mut Io) {
        let Some(&token) = self.by_conn.get(&conn) else { return };
        let Some(peer) = self.peers.get_mut(token) else { return };
        let filled = buf.len();
        peer.reader.give_sink(buf, filled);
        self.on_frames(now, token, io);
    }

    /// Handles the requests that are whole, and has the kernel fill what is large.
    fn on_frames(&mut self, now: Instant, token: Token, io: &mut Io) {
        while let Some(frame) = self.peers.get_mut(token).and_then(|p| p.reader.pop()) {
            if self.peers.get(token).is_some_and(|peer| !may_ask(peer, &frame.message)) {
                return self.refuse(now, token, "it is a node, and may only read shards; check what it is", io);
            }
            let event = store::Event::Request {
                peer: store::PeerId(token.0),
                token: frame.token,
                request: frame.message,
                payload: frame.payload,
            };
            self.handle(now, event, io);
        }
        let Some(peer) = self.peers.get_mut(token) else { return };
        if let Some(error) = peer.reader.error() {
            logger::warn(format_args!("closed a connection that does not speak our protocol: {error}"));
            let conn = peer.conn;
            io.abort(conn);
            self.on_closed(now, conn, io);
        } else if peer.secured.is_none()
            && let Some((buf, filled)) = peer.reader.take_sink()
        {
            io.recv_into(peer.conn, buf, filled);
        }
    }

    fn on_closed(&mut self, now: Instant, conn: ConnId, io: &mut Io) {
        let Some(token) = self.by_conn.remove(&conn) else { return };
        self.peers.remove(token);
        if let Some(door) = &mut self.door {
            door.let_in(token);
        }
        self.handle(now, store::Event::PeerGone { peer: store::PeerId(token.0) }, io);
    }
}

/// Hosts may ask anything; nodes read shards of which they make others.
fn may_ask(peer: &Peer, request: &Request) -> bool {
    !peer.is_node || matches!(request, Request::Hello { .. } | Request::ReadShard { .. })
}

fn disk_error(fault: DiskFault) -> store::DiskError {
    match fault {
        DiskFault::NoSpace => store::DiskError::NoSpace,
        DiskFault::Removed => store::DiskError::Gone,
        DiskFault::OutOfRange | DiskFault::Media(_) => store::DiskError::Io,
    }
}

impl App for NodeShell {
    fn on_event(&mut self, now: Instant, event: Event<'_>, io: &mut Io) {
        match event {
            Event::Bytes { conn, bytes } if self.neighbours.is_one(conn) => {
                self.neighbours.on_bytes(now, conn, bytes, io);
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
            Event::Accepted { conn, peer, .. } => self.on_accepted(now, conn, peer, io),
            Event::Closed { conn, .. } | Event::ConnectFailed { conn, .. } if self.neighbours.is_one(conn) => {
                self.neighbours.on_lost(now, conn, io);
            }
            Event::Closed { conn, .. } => self.on_closed(now, conn, io),
            Event::Timer => self.on_timer(now, io),
            Event::Shutdown { .. } => io.stop(),
            Event::Wake => {
                self.cut_revoked(now, io);
                for (place, report) in self.drives.drain() {
                    self.handle(now, store::Event::Drive { slot: store::DeviceSlot(place), report }, io);
                }
            }
            Event::Discarded { .. } => {}
            Event::Filled { conn, buf } if self.neighbours.is_one(conn) => {
                self.neighbours.on_filled(now, conn, buf, io);
            }
            Event::Filled { conn, buf } => self.on_filled(now, conn, buf, io),
            Event::Connected { conn } => self.neighbours.on_connected(conn, io),
            Event::ConnectFailed { .. } => {}
        }
        self.handle_local(now, io);
    }

    fn on_batch_end(&mut self, now: Instant, io: &mut Io) {
        self.handle_local(now, io);
    }

    fn next_deadline(&self) -> Option<Instant> {
        let opening = (self.opening > 0).then_some(self.read_from);
        let door = self.door.as_ref().and_then(Door::next_deadline);
        earliest(earliest(self.node.next_deadline(), self.neighbours.next_deadline()), earliest(opening, door))
    }
}

/// A device id for a device about to be formatted.
pub fn fresh_device_id() -> DeviceId {
    DeviceId(uuid::Uuid::new_v4().as_u128())
}
