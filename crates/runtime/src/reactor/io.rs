//! What an application can ask of its reactor.

use super::conn::{Conn, Receiving, Sink, State, conn_error};
use super::disk::Disks;
use super::processor::{Processor, ProcessorShare};
use super::ring::{Kind, Ring};
use super::socket::{self, ListenError, Target};
use super::table::{Table, index_of};
use super::turns::{Turn, Turns};
use super::{Config, ConnError, ConnId, DeviceSlot, DiskToken, Event, ListenerId, arena};
use crate::clock;
use crate::device::Device;
use crate::mailbox::Waker;
use holdfast_base::{Buf, BufMut, Instant, Token};
use io_uring::{opcode, squeue, types};
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

/// Wait in poll first instead of trying a receive that will find nothing.
const POLL_FIRST: u16 = 1;

/// Connections in all: accepted ones are limited further, by listener.
const CONNS_MAX: usize = 1 << 20;

pub(super) struct Listener {
    pub socket: OwnedFd,
    /// When to accept again after the process ran out of descriptors or memory.
    pub retry_at: Option<Instant>,
    /// Its connections, until the kernel has done with them.
    pub accepted: usize,
    pub accepted_max: usize,
}

/// The application's handle on everything outside it; lent for the duration of each event.
pub struct Io {
    pub(super) ring: Ring,
    pub(super) config: Config,
    pub(super) conns: Table<Conn>,
    pub(super) disks: Disks,
    pub(super) listeners: Vec<Listener>,
    /// Connections with bytes queued since the last flush.
    dirty: Vec<u32>,
    /// Events that arise from the application's own calls, delivered after the current one.
    pub(super) deferred: VecDeque<Event<'static>>,
    /// Connections that may hold bytes from while they were paused.
    pub(super) resumed: Vec<ConnId>,
    /// Draining connections and when they are cut, oldest first.
    pub(super) lingering: VecDeque<(Instant, Token)>,
    /// Patient connections that have sent something, and when each is looked at, soonest first.
    pub(super) watched: VecDeque<(Instant, Token)>,
    waker: Waker,
    pub(super) turns: Turns,
    pub(super) processor: Processor,
    pub(super) is_stopping: bool,
}

impl Io {
    pub(super) fn new(ring: Ring, config: Config, waker: Waker) -> Io {
        Io {
            ring,
            config,
            conns: Table::new(CONNS_MAX),
            disks: Disks::new(),
            listeners: Vec::new(),
            dirty: Vec::new(),
            deferred: VecDeque::new(),
            resumed: Vec::new(),
            lingering: VecDeque::new(),
            watched: VecDeque::new(),
            waker,
            turns: Turns::default(),
            processor: Processor::default(),
            is_stopping: false,
        }
    }

    /// The clock, where the batch's own `now` is not fresh enough.
    pub fn now(&self) -> Instant {
        clock::now()
    }

    /// The longest turn of the last minutes.
    pub fn longest_turn(&self) -> Option<&Turn> {
        self.turns.longest()
    }

    /// How much of the last minute or two the reactor's thread had a processor, and waited for one; its own thread asks.
    pub fn processor_share(&self) -> Option<ProcessorShare> {
        self.processor.share(clock::now())
    }

    /// For mailboxes into this reactor.
    pub fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// Makes [`super::Reactor::run`] return after this batch.
    pub fn stop(&mut self) {
        self.is_stopping = true;
    }

    /// Accepts connections on `address`; returns the address bound, which tells the port where zero was asked for.
    pub fn listen_tcp(&mut self, address: SocketAddr) -> Result<(ListenerId, SocketAddr), ListenError> {
        let (socket, bound) = socket::listen_tcp(address)?;
        Ok((self.add_listener(socket), bound))
    }

    /// Accepts connections on a unix socket, of this user and root alone; a stale socket file is replaced.
    pub fn listen_unix(&mut self, path: &Path) -> Result<ListenerId, ListenError> {
        let socket = socket::listen_unix(path)?;
        Ok(self.add_listener(socket))
    }

    fn add_listener(&mut self, socket: OwnedFd) -> ListenerId {
        let index = self.listeners.len() as u32;
        let accepted_max = self.config.accepted_max;
        self.listeners.push(Listener { socket, retry_at: None, accepted: 0, accepted_max });
        self.arm_accept(index);
        ListenerId(index)
    }

    /// How many connections of the listener there may be, with those that still send what was queued when they were
    /// closed.
    pub fn set_accepted_max(&mut self, listener: ListenerId, max: usize) {
        self.listeners[listener.0 as usize].accepted_max = max;
    }

    pub(super) fn arm_accept(&mut self, index: u32) {
        let listener = &mut self.listeners[index as usize];
        listener.retry_at = None;
        let fd = types::Fd(listener.socket.as_raw_fd());
        let entry = opcode::AcceptMulti::new(fd).flags(libc::SOCK_CLOEXEC).build();
        // SAFETY: the operation points to no memory.
        unsafe { self.ring.push(entry.user_data(Kind::Accept.tag(index))) };
    }

    /// Starts connecting; the outcome is [`Event::Connected`] or [`Event::ConnectFailed`]. There is no time limit but
    /// the kernel's (minutes): set a timer and [`Io::abort`].
    pub fn connect_tcp(&mut self, address: SocketAddr) -> ConnId {
        self.connect(Target::Tcp(address))
    }

    /// As [`Io::connect_tcp`], to a unix socket.
    pub fn connect_unix(&mut self, path: &Path) -> ConnId {
        self.connect(Target::Unix(path.into()))
    }

    fn connect(&mut self, target: Target) -> ConnId {
        let (socket, address) = match socket::unconnected(&target, self.config.peer_timeout) {
            Ok(made) => made,
            Err(e) => {
                let token = self.conns.insert(Conn::new(None, State::Dead));
                self.conns.remove_at(index_of(token));
                self.deferred.push_back(Event::ConnectFailed { conn: ConnId(token), error: conn_error(&e) });
                return ConnId(token);
            }
        };
        let mut conn = Conn::new(Some(socket), State::Connecting);
        let fd = types::Fd(conn.fd());
        let address = conn.address.insert(address);
        let entry = opcode::Connect::new(fd, address.as_ptr().cast(), address.len()).build();
        let token = self.conns.insert(conn);
        // SAFETY: the address is boxed, and the connection keeps it until the completion is seen.
        unsafe { self.ring.push(entry.user_data(Kind::Connect.tag(index_of(token)))) };
        ConnId(token)
    }

    pub(super) fn known(&mut self, conn: ConnId) -> Option<(u32, &mut Conn)> {
        let index = index_of(conn.0);
        self.conns.get_mut(conn.0).filter(|c| c.is_known()).map(|c| (index, c))
    }

    /// Queues a copy of `bytes`: for headers and other small messages. What is queued while connecting leaves once
    /// connected; what is queued on a connection that is gone is dropped, since its `Closed` says so.
    pub fn send(&mut self, conn: ConnId, bytes: &[u8]) {
        self.queue(conn, |c| c.outbox.push_slice(bytes));
    }

    /// Queues `bytes` without a copy (unless they are few).
    pub fn send_vec(&mut self, conn: ConnId, bytes: Vec<u8>) {
        self.queue(conn, |c| c.outbox.push_vec(bytes));
    }

    /// Queues `bytes` without a copy (unless they are few).
    pub fn send_buf(&mut self, conn: ConnId, bytes: Buf) {
        self.queue(conn, |c| c.outbox.push_buf(bytes));
    }

    fn queue(&mut self, conn: ConnId, push: impl FnOnce(&mut Conn)) {
        let unsent_bytes_max = self.config.unsent_bytes_max;
        let Some((index, c)) = self.known(conn) else { return };
        push(c);
        if c.outbox.unsent_bytes() > unsent_bytes_max {
            return self.fail(conn, ConnError::Overflow);
        }
        if matches!(c.state, State::Open | State::Detaching) {
            self.mark_dirty(index);
        }
    }

    /// Has the connection's queue sent at the end of the batch.
    pub(super) fn mark_dirty(&mut self, index: u32) {
        let c = self.conns.at(index);
        if !c.is_dirty && !c.is_sending {
            c.is_dirty = true;
            self.dirty.push(index);
        }
    }

    /// Bytes queued that the kernel has not taken: the application stops producing for a peer that does not read.
    /// `None` for a connection that is gone: what it had queued was dropped, not sent.
    pub fn unsent_bytes(&self, conn: ConnId) -> Option<usize> {
        self.conns.get(conn.0).filter(|c| c.state != State::Dead).map(|c| c.outbox.unsent_bytes())
    }

    /// While paused, a connection gives no `Bytes`; a sink under way is still filled. The peer's end is noticed when a
    /// send fails or reading resumes.
    pub fn pause_reading(&mut self, conn: ConnId, is_paused: bool) {
        let Some((index, c)) = self.known(conn) else { return };
        if std::mem::replace(&mut c.is_paused, is_paused) == is_paused || is_paused {
            return;
        }
        if c.stash.is_empty() {
            self.arm_receive(index);
        } else {
            self.resumed.push(conn);
        }
    }

    /// Lends `buf` for the next bytes of `conn`, after `filled` bytes that are there already; it comes back, full, in
    /// [`Event::Filled`]. If the connection ends first it is dropped, once the kernel is done with it. Called within
    /// the connection's `Bytes` or `Filled`, it takes effect with the byte after that event's.
    pub fn recv_into(&mut self, conn: ConnId, buf: BufMut, filled: usize) {
        assert!(filled < buf.len(), "a sink of {} bytes with {filled} filled has nothing to receive", buf.len());
        let Some((index, c)) = self.known(conn) else { return };
        assert!(c.sink.is_none(), "a connection has one sink at a time");
        c.sink = Some(Sink { buf, filled });
        if c.stash.is_empty() {
            self.arm_receive(index);
        } else {
            self.resumed.push(conn);
        }
    }

    /// Ends `conn` once everything queued is sent (or its linger time is over). No event of it follows.
    pub fn close(&mut self, conn: ConnId) {
        let Some((index, c)) = self.known(conn) else { return };
        if c.state == State::Connecting {
            return self.kill(index);
        }
        c.state = State::Draining { flushed: false };
        c.is_paused = false;
        c.stash = Vec::new();
        if c.receiving != Receiving::Sink {
            c.sink = None;
        }
        let cut_at = clock::now() + self.config.linger;
        self.lingering.push_back((cut_at, conn.0));
        self.finish_flush(index);
        self.arm_receive(index);
    }

    /// Ends `conn` now; what is queued is lost. No event of it follows.
    pub fn abort(&mut self, conn: ConnId) {
        if let Some((index, _)) = self.known(conn) {
            self.kill(index);
        }
    }

    /// Has `conn` leave this reactor, once everything queued is sent: [`Event::Detached`] gives its socket, or
    /// [`Event::Closed`] says that it ended first. No other event of it follows.
    pub fn detach(&mut self, conn: ConnId) {
        let Some((index, c)) = self.known(conn).filter(|(_, c)| c.state == State::Open) else { return };
        assert!(c.sink.is_none(), "what is received in place belongs to this reactor");
        c.state = State::Detaching;
        if c.receiving != Receiving::Nothing {
            let cancel = opcode::AsyncCancel2::new(types::CancelBuilder::user_data(Kind::Receive.tag(index))).build();
            // SAFETY: a cancellation points to no memory.
            unsafe { self.ring.push(cancel.user_data(Kind::Ignored.tag(index))) };
        }
        self.finish_detach(index);
    }

    /// Lets a connection go that is detaching, if nothing of it is under way.
    pub(super) fn finish_detach(&mut self, index: u32) {
        let c = self.conns.at(index);
        let is_idle = !c.is_in_kernel() && !c.is_delivering && !c.is_dirty && c.outbox.unsent_bytes() == 0;
        if c.state != State::Detaching || !is_idle {
            return;
        }
        let conn = ConnId(self.conns.token_at(index));
        let c = self.conns.at(index);
        let (socket, bytes) = (c.socket.take().expect("it was open"), std::mem::take(&mut c.stash));
        c.state = State::Dead;
        self.free_if_done(index);
        self.deferred.push_back(Event::Detached { conn, socket, bytes });
    }

    /// Takes a connection that another reactor has detached; its bytes come from the next event on.
    pub fn adopt(&mut self, socket: OwnedFd) -> ConnId {
        let token = self.conns.insert(Conn::new(Some(socket), State::Open));
        self.arm_receive(index_of(token));
        ConnId(token)
    }

    /// Adds a device. Operations on it go to the kernel at once: the application bounds how many.
    pub fn add_device(&mut self, device: Device) -> DeviceSlot {
        self.disks.add(device)
    }

    pub fn device(&self, slot: DeviceSlot) -> &Device {
        self.disks.device(slot)
    }

    /// Closes the device when what is in flight has ended. The slot must not be used again, and may be given to another
    /// device afterwards.
    pub fn remove_device(&mut self, slot: DeviceSlot) {
        self.disks.remove(slot);
    }

    /// Reads `len` bytes at `offset`, both multiples of 4 KiB; ends with [`Event::Read`].
    pub fn read(&mut self, slot: DeviceSlot, offset: u64, len: usize, token: DiskToken) {
        let event = self.disks.read(&mut self.ring, slot, offset, len, token);
        self.deferred.extend(event);
    }

    /// Writes `bufs` one after another at `offset`, all aligned to 4 KiB in address and length; ends with
    /// [`Event::Written`], where `durable` means on the media, through the drive's cache.
    pub fn write(&mut self, slot: DeviceSlot, offset: u64, bufs: Vec<Buf>, durable: bool, token: DiskToken) {
        let event = self.disks.write(&mut self.ring, slot, offset, bufs, durable, token);
        self.deferred.extend(event);
    }

    /// Has everything that was written before put on the media; ends with [`Event::Written`].
    pub fn flush_device(&mut self, slot: DeviceSlot, token: DiskToken) {
        let event = self.disks.flush(&mut self.ring, slot, token);
        self.deferred.extend(event);
    }

    /// Gives the range back to the drive or file system where it can take it; ends with [`Event::Discarded`]. On a
    /// file the range becomes a hole: writing there again needs free space below.
    pub fn discard(&mut self, slot: DeviceSlot, offset: u64, len: u64, token: DiskToken) {
        let event = self.disks.discard(&mut self.ring, slot, offset, len, token);
        self.deferred.extend(event);
    }

    /// Disk operations in flight.
    pub fn disk_operations(&self) -> usize {
        self.disks.in_flight()
    }

    /// Starts the next receive where one is wanted and none is under way.
    pub(super) fn arm_receive(&mut self, index: u32) {
        let c = self.conns.at(index);
        let wants = match c.state {
            State::Open => c.sink.is_some() || !c.is_paused,
            State::Draining { .. } => true,
            State::Connecting | State::Detaching | State::Dead => false,
        };
        if !wants || c.receiving != Receiving::Nothing || c.is_delivering || c.is_ended || !c.stash.is_empty() {
            return;
        }
        let fd = types::Fd(c.fd());
        let ioprio = if c.is_drained { POLL_FIRST } else { 0 };
        let (receiving, entry) = match &mut c.sink {
            Some(sink) => {
                let room = &mut sink.buf[sink.filled..];
                let len = room.len().min(1 << 30) as u32;
                let receive = opcode::Recv::new(fd, room.as_mut_ptr(), len);
                (Receiving::Sink, receive.flags(libc::MSG_WAITALL).ioprio(ioprio).build())
            }
            None => {
                let receive = opcode::Recv::new(fd, std::ptr::null_mut(), arena::SLICE_BYTES as u32);
                let receive = receive.buf_group(arena::GROUP).ioprio(ioprio).build();
                (Receiving::Arena, receive.flags(squeue::Flags::BUFFER_SELECT))
            }
        };
        c.receiving = receiving;
        // SAFETY: a sink's memory is on the heap, and the connection keeps it, untouched, until the completion; the
        // arena outlives the ring's operations.
        unsafe { self.ring.push(entry.user_data(Kind::Receive.tag(index))) };
    }

    /// Gives everything queued during the batch to the kernel, one send a connection.
    pub(super) fn flush(&mut self) {
        let mut dirty = std::mem::take(&mut self.dirty);
        for index in dirty.drain(..) {
            let c = self.conns.at(index);
            c.is_dirty = false;
            if c.state != State::Dead {
                self.start_send(index);
            } else {
                self.free_if_done(index);
            }
        }
        self.dirty = dirty;
    }

    pub(super) fn start_send(&mut self, index: u32) {
        let c = self.conns.at(index);
        if c.is_sending {
            return;
        }
        let fd = c.fd();
        if let Some(entry) = c.outbox.next_send(fd, Kind::Send.tag(index)) {
            c.is_sending = true;
            // SAFETY: the outbox keeps all that the entry points to until `on_sent`, and the connection its outbox.
            unsafe { self.ring.push(entry) };
            self.watch(index);
        }
    }

    /// Moves a draining connection on when all is sent.
    pub(super) fn finish_flush(&mut self, index: u32) {
        let c = self.conns.at(index);
        if c.state == (State::Draining { flushed: false }) && c.outbox.unsent_bytes() == 0 && !c.is_sending {
            c.state = State::Draining { flushed: true };
            if c.is_ended {
                return self.kill(index);
            }
            if let Some(socket) = &c.socket {
                // Fails only where the peer is gone already, which the receive under way reports.
                let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Write);
            }
        }
    }

    /// Ends a connection and tells the application, if it still knows it.
    pub(super) fn fail(&mut self, conn: ConnId, error: ConnError) {
        let index = index_of(conn.0);
        match self.conns.at(index).state {
            State::Open | State::Detaching => self.deferred.push_back(Event::Closed { conn, error }),
            State::Connecting => self.deferred.push_back(Event::ConnectFailed { conn, error }),
            State::Draining { .. } | State::Dead => {}
        }
        self.kill(index);
    }

    /// Ends a connection; what the kernel still does for it is cancelled, and its memory kept until then.
    pub(super) fn kill(&mut self, index: u32) {
        let c = self.conns.at(index);
        if c.state == State::Dead {
            return;
        }
        c.state = State::Dead;
        c.stash = Vec::new();
        c.outbox.discard_queued();
        if c.receiving != Receiving::Sink {
            c.sink = None;
        }
        if c.is_in_kernel() {
            let fd = types::Fd(c.fd());
            if let Some(socket) = &c.socket {
                // Fails while connecting, which the cancellation covers.
                let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
            }
            let cancel = opcode::AsyncCancel2::new(types::CancelBuilder::fd(fd).all()).build();
            // SAFETY: a cancellation points to no memory.
            unsafe { self.ring.push(cancel.user_data(Kind::Ignored.tag(index))) };
        }
        self.free_if_done(index);
    }

    pub(super) fn free_if_done(&mut self, index: u32) {
        let c = self.conns.at(index);
        if c.state == State::Dead && !c.is_in_kernel() && !c.is_dirty {
            if let Some(listener) = c.accepted_by {
                self.listeners[listener.0 as usize].accepted -= 1;
            }
            self.conns.remove_at(index);
        }
    }

    /// Cuts draining connections whose time is over.
    pub(super) fn cut_lingering(&mut self, now: Instant) {
        while let Some((_, token)) = self.lingering.pop_front_if(|(at, _)| *at <= now) {
            if self.conns.get(token).is_some() {
                self.kill(index_of(token));
            }
        }
    }

    /// When the reactor itself has something to do.
    pub(super) fn own_deadline(&self) -> Option<Instant> {
        let accept = self.listeners.iter().filter_map(|l| l.retry_at).min();
        let (lingering, watched) = (self.lingering.front(), self.watched.front());
        let own = holdfast_base::time::earliest(lingering.map(|(at, _)| *at), watched.map(|(at, _)| *at));
        holdfast_base::time::earliest(accept, own)
    }

    /// Keeps all memory that the kernel may still use from ever being freed.
    pub(super) fn leak_memory(&mut self) {
        std::mem::forget(std::mem::replace(&mut self.conns, Table::new(0)));
        std::mem::forget(std::mem::replace(&mut self.disks, Disks::new()));
    }
}
