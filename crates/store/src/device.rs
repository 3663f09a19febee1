//! One device of a node: opening, serving, or out.
//!
//! States: `Opening` → `Serving` (the opening's last table write is durable) → `Out` (any write or flush failed); also
//! `Opening` → `Out`; `Out` → `Opening` after a pause, by a new descriptor, when nothing of the former life is under way any
//! more (protocol rule 25). Each opening is a life of its own: nothing of the former one is known to the next but what the
//! media tell. A device that is out answers everything with `DeviceFailed`; the node's other devices serve on.
//!
//! A read that fails is tried again, twice, before anybody hears of it.

use crate::api::{DeviceSlot, DiskError, Effect, FailReason, Next, NodeConfig, Notice};
use crate::cache::{Asked, CachedRead, Fresh};
use crate::device_queue::DeviceQueue;
use crate::io::{Client, Ctx, Io, Started, client_of};
use crate::line::Whose;
use crate::meter::Meter;
use crate::open::{Opening, Progress};
use crate::outage::{HANGS_AFTER, Outages, READ_PAUSES};
use crate::serving::Serving;
use crate::shards::Shards;
use holdfast_base::{BLOCK_BYTES, Buf, DeviceId, Effects, Instant, MediaClass, ShardId, Token, time::earliest};
use holdfast_format::disk::SUPERBLOCK_BYTES;
use holdfast_format::drive::DriveReport;
use holdfast_format::wire::{DeviceHealth, DeviceStat, DeviceTrouble, Outage, Refusal, Request};
use std::collections::BTreeSet;
use std::time::Duration;

enum State {
    Opening(Box<Opening>),
    Serving(Box<Serving>),
    Out(Out),
}

/// What is to come for a device that is out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Out {
    /// It is opened at that time, or when nothing of its former life is under way any more.
    Until(Instant),
    /// The shell opens it, since then.
    Asked(Instant),
    /// Nothing.
    Stays,
    /// It is forgotten when nothing of it is under way any more.
    Leaves,
}

pub(crate) struct Device {
    slot: DeviceSlot,
    /// Which the configuration has in this place.
    expected: Option<DeviceId>,
    /// Known once the superblock was read.
    id: Option<DeviceId>,
    /// As its shell found it to be.
    media: Option<MediaClass>,
    /// What its drive said last of its health.
    pub drive: Option<DriveReport>,
    queue: DeviceQueue,
    /// Reads of those that have failed, and when they are tried again.
    again: BTreeSet<(Instant, Token)>,
    meter: Meter,
    outages: Outages,
    is_direct: bool,
    state: State,
}

/// What the shell tells of a device that it has opened.
#[derive(Clone, Copy)]
pub(crate) struct Opened {
    pub size_bytes: u64,
    pub media: Option<MediaClass>,
    pub is_direct: bool,
}

/// What every event comes with.
pub(crate) struct Surroundings<'a> {
    pub now: Instant,
    pub config: &'a NodeConfig,
    pub out: &'a mut Effects<Effect>,
    /// What is read for the read cache.
    pub fresh: &'a mut Vec<Fresh>,
}

/// What the node is to hear of a completion.
pub(crate) enum Completed {
    Nothing,
    /// Which device this is.
    Id(DeviceId),
    /// Of the read cache, in space that this device lends.
    CachedRead {
        ticket: Token,
        part: u8,
        result: Result<Buf, DiskError>,
        took: Duration,
    },
    CachedWrite {
        ticket: Token,
        result: Result<Buf, DiskError>,
    },
}

fn ctx<'a>(slot: DeviceSlot, id: Option<DeviceId>, queue: &'a mut DeviceQueue, s: &'a mut Surroundings<'_>) -> Ctx<'a> {
    let (now, device, took) = (s.now, id.unwrap_or_default(), Duration::ZERO);
    Ctx { now, slot, device, config: s.config, queue, out: s.out, fresh: s.fresh, took }
}

impl Device {
    /// One that the shell is to open.
    pub fn expect(slot: DeviceSlot, expected: Option<DeviceId>, around: &mut Surroundings) -> Device {
        around.out.push(Effect::Open { slot });
        Device::new(slot, expected, around)
    }

    /// One that is open.
    pub fn open(slot: DeviceSlot, opened: Opened, around: &mut Surroundings) -> Device {
        let mut device = Device::new(slot, None, around);
        device.begin(opened, around);
        device
    }

    fn new(slot: DeviceSlot, expected: Option<DeviceId>, around: &Surroundings) -> Device {
        Device {
            slot,
            expected,
            id: None,
            media: None,
            drive: None,
            queue: DeviceQueue::new(slot, around.config.disk_in_flight_max),
            again: BTreeSet::new(),
            meter: Meter::new(around.now),
            outages: Outages::default(),
            is_direct: true,
            state: State::Out(Out::Asked(around.now)),
        }
    }

    /// The shell has opened it: a new life begins.
    pub fn begin(&mut self, opened: Opened, around: &mut Surroundings) {
        if let State::Out(Out::Stays) = self.state {
            // While the shell opened it, a sibling has read that it has this device.
            return around.out.push(Effect::Close { slot: self.slot });
        }
        assert!(matches!(self.state, State::Out(Out::Asked(_))), "{:?} is opened when that is asked for", self.slot);
        assert!(self.queue.is_empty() && self.again.is_empty(), "nothing of a former life is under way");
        (self.media, self.is_direct) = (opened.media, opened.is_direct);
        self.outages.lives += 1;
        match Opening::start(&mut ctx(self.slot, self.id, &mut self.queue, around), opened.size_bytes) {
            Ok(opening) => self.state = State::Opening(Box::new(opening)),
            Err(reason) => self.fail(reason, around),
        }
    }

    /// The shell could not open it.
    pub fn on_not_opened(&mut self, why: String, around: &mut Surroundings) {
        if matches!(self.state, State::Out(Out::Asked(_))) {
            self.fail(FailReason::NotOpened(why), around);
        }
    }

    pub fn id(&self) -> Option<DeviceId> {
        self.id
    }

    /// Which it should be, while it has not told which it is.
    pub fn expected(&self) -> Option<DeviceId> {
        self.expected.filter(|_| self.id.is_none())
    }

    /// Since when an opening that is under way has made no progress; `None` where none is.
    fn stands_since(&self, now: Instant) -> Option<Instant> {
        match &self.state {
            State::Opening(opening) => Some(opening.progress_at),
            State::Serving(serving) if serving.is_ready => None,
            State::Serving(_) => Some(self.queue.iter().map(|started| started.at).min().unwrap_or(now)),
            State::Out(Out::Asked(since)) => Some(*since),
            State::Out(_) => None,
        }
    }

    /// It is being opened for the first time, and that does not hang.
    pub fn is_opening(&self, now: Instant) -> bool {
        let stands_since = self.stands_since(now);
        self.outages.out.is_none() && stands_since.is_some_and(|since| now.since(since) < HANGS_AFTER)
    }

    pub fn on_request(&mut self, around: &mut Surroundings, client: Client, request: Request, payload: Buf) {
        let refusal = self.refusal(around.now);
        let mut ctx = ctx(self.slot, self.id, &mut self.queue, around);
        match &mut self.state {
            State::Opening(_) | State::Out(_) => ctx.refuse(client, refusal),
            State::Serving(serving) if !serving.is_ready => ctx.refuse(client, refusal),
            State::Serving(serving) => {
                serving.on_request(&mut ctx, client, request, payload);
                serving.settle(&mut ctx);
            }
        }
    }

    /// What is told who asks while it does not serve.
    fn refusal(&self, now: Instant) -> Refusal {
        if self.is_opening(now) { Refusal::Busy } else { Refusal::DeviceFailed }
    }

    pub fn on_tick(&mut self, around: &mut Surroundings) {
        while let Some(&(at, token)) = self.again.first().filter(|(at, _)| *at <= around.now) {
            self.again.remove(&(at, token));
            self.queue.get_mut(token).expect("it waits to be tried again").at = around.now;
            self.queue.retry(around.now, token, around.out);
        }
        if let State::Serving(serving) = &mut self.state {
            serving.on_tick(&mut ctx(self.slot, self.id, &mut self.queue, around));
        }
        self.go_on(around);
    }

    /// Opens a device anew whose pause is over, when nothing of its former life is under way any more: a write that is would
    /// change what was read before.
    fn go_on(&mut self, around: &mut Surroundings) {
        let State::Out(Out::Until(at)) = self.state else { return };
        if at <= around.now && self.queue.is_empty() {
            around.out.push(Effect::Open { slot: self.slot });
            self.state = State::Out(Out::Asked(around.now));
        }
    }

    /// A disk operation is done.
    pub fn on_disk(&mut self, around: &mut Surroundings, token: Token, result: Result<Buf, DiskError>) -> Completed {
        if result == Err(DiskError::Io) && self.wants_again(around, token) {
            return Completed::Nothing;
        }
        // All operations of a life end before the next one begins; a mutation forgets them.
        let Some(Started { io, kind, went_at, .. }) = self.queue.on_done(around.now, token, around.out) else {
            return Completed::Nothing;
        };
        if let State::Out(_) = self.state {
            // Whoever waited for it is answered already.
            self.go_on(around);
            return Completed::Nothing;
        }
        let went_at = went_at.expect("what is done has gone");
        self.meter.on_done(around.now, kind, went_at, result.is_err());
        let mut ctx = ctx(self.slot, self.id, &mut self.queue, around);
        ctx.took = ctx.now.since(went_at);
        let outcome = match (&mut self.state, io) {
            (State::Out(_), _) => unreachable!("seen above"),
            (_, Io::CachedRead { ticket, part, .. }) => {
                return Completed::CachedRead { ticket, part, result, took: ctx.took };
            }
            (_, Io::CachedWrite { ticket }) => return Completed::CachedWrite { ticket, result },
            (State::Opening(opening), Io::Opening { step }) => opening.on_disk(&mut ctx, step, result),
            (State::Opening(_), io) => unreachable!("an opening device does nothing else: {io:?}"),
            (State::Serving(serving), io) => {
                let was_ready = serving.is_ready;
                let outcome = serving.on_disk(&mut ctx, io, result).map(|()| Progress::Going);
                if outcome.is_ok() {
                    serving.settle(&mut ctx);
                    if serving.is_ready && !was_ready {
                        self.outages.on_served(around.now);
                    }
                }
                outcome
            }
        };
        match outcome {
            Ok(Progress::Going) => Completed::Nothing,
            Ok(Progress::Identified) => {
                let State::Opening(opening) = &self.state else { unreachable!("only an opening identifies") };
                self.id = opening.superblock().map(|s| s.device);
                self.id.map_or(Completed::Nothing, Completed::Id)
            }
            Ok(Progress::Done(serving)) => {
                self.serve(serving, around);
                Completed::Nothing
            }
            Err(reason) => {
                self.fail(reason, around);
                Completed::Nothing
            }
        }
    }

    /// Whether a read that has failed is tried again, after a pause. Not on a device that has many errors: who waits is
    /// served sooner from elsewhere.
    fn wants_again(&mut self, around: &mut Surroundings, token: Token) -> bool {
        let now = around.now;
        let is_failing = self.meter.is_failing(now);
        let Some(started) = self.queue.get_mut(token) else { return false };
        let is_read = started.read.is_some() && !matches!(started.io, Io::CachedRead { .. });
        let may = match &self.state {
            State::Opening(opening) => is_read && opening.is_tried_again(&started.io),
            State::Serving(_) => is_read && !is_failing,
            State::Out(_) => false,
        };
        let Some(pause) = READ_PAUSES.get(started.failures).filter(|_| may) else { return false };
        started.failures += 1;
        self.again.insert((now + *pause, token));
        self.queue.rest(now, token, around.out);
        self.meter.retries += 1;
        true
    }

    fn serve(&mut self, serving: Box<Serving>, around: &mut Surroundings) {
        if serving.promises_lost {
            let reason = FailReason::PromisesLost;
            let next = self.outages.on_out(around.now, &reason, self.is_direct);
            around.out.push(Effect::Note(Notice::DeviceFailed { slot: self.slot, device: self.id, reason, next }));
        }
        self.state = State::Serving(serving);
    }

    /// The device is out: everything that waits for it is answered, and all later requests are refused until it is back.
    pub fn fail(&mut self, reason: FailReason, around: &mut Surroundings) {
        let next = self.outages.on_out(around.now, &reason, self.is_direct);
        let out = match (&reason, next) {
            (FailReason::Removed, _) => Out::Leaves,
            (_, Next::Again(pause)) => Out::Until(around.now + pause),
            (_, Next::GivenUp | Next::Stays) => Out::Stays,
        };
        let state = std::mem::replace(&mut self.state, State::Out(out));
        let mut clients: Vec<Client> = self.queue.iter().filter_map(|started| client_of(&started.io)).collect();
        if let State::Serving(serving) = state {
            clients.extend(serving.waiting_clients());
        }
        // The kernel has not got them.
        self.queue.drop_waiting(std::mem::take(&mut self.again).into_iter().map(|(_, token)| token));
        if around.config.mutations.reopens_under_writes() {
            self.queue.forget();
        }
        let mut ctx = ctx(self.slot, self.id, &mut self.queue, around);
        ctx.note(Notice::DeviceFailed { slot: self.slot, device: self.id, reason, next });
        for client in clients {
            ctx.refuse(client, Refusal::DeviceFailed);
        }
        around.out.push(Effect::Close { slot: self.slot });
    }

    /// Whether it was removed, and nothing of it is under way any more.
    pub fn is_gone(&self) -> bool {
        matches!(self.state, State::Out(Out::Leaves)) && self.queue.is_empty()
    }

    /// The same device is open in another slot: this one never speaks for it.
    pub fn fail_as_twice(&mut self, around: &mut Surroundings) {
        self.fail(FailReason::Twice, around);
        (self.id, self.expected) = (None, None);
    }

    pub fn next_deadline(&self, config: &NodeConfig) -> Option<Instant> {
        let own = match &self.state {
            State::Serving(serving) => serving.next_deadline(config.batch_in_flight_max),
            State::Out(Out::Until(at)) if self.queue.is_empty() => Some(*at),
            State::Opening(_) | State::Out(_) => None,
        };
        earliest(own, self.again.first().map(|(at, _)| *at))
    }

    /// What is told of the device; nothing while nobody knows which it is.
    pub fn stat(&self, now: Instant) -> Option<DeviceStat> {
        if let State::Out(Out::Leaves) = self.state {
            return None;
        }
        let device = self.id.or(self.expected)?;
        let mut stat = match &self.state {
            State::Serving(serving) if serving.is_ready || self.is_opening(now) => serving.stat(),
            State::Serving(serving) => DeviceStat { health: DeviceHealth::Failed, ..serving.stat() },
            _ if self.is_opening(now) => DeviceStat::unknown(device, DeviceHealth::Opening),
            State::Opening(_) | State::Out(_) => DeviceStat::unknown(device, DeviceHealth::Failed),
        };
        // They wait in the queue for others, and not for the device.
        let in_flight = self.queue.iter().filter_map(|started| Some((started.kind, started.went_at?)));
        (stat.reads, stat.writes) = self.meter.times(now, in_flight);
        stat.io_errors = self.meter.io_errors;
        stat.media_is_set = stat.media.is_some();
        stat.media = stat.media.or(self.media);
        Some(stat)
    }

    /// What is wrong with it, or was.
    pub fn trouble(&self, now: Instant) -> Option<DeviceTrouble> {
        let device = self.id.or(self.expected)?;
        let ms = |since: Instant| now.since(since).as_millis() as u64;
        let hangs_since = self.stands_since(now).filter(|since| now.since(*since) >= HANGS_AFTER);
        let outage = match (&self.outages.out, hangs_since) {
            (Some((since, reason)), _) => Some(Outage {
                ms: ms(*since),
                why: reason.to_string(),
                is_missing: matches!(reason, FailReason::NotOpened(_)),
                is_tried: !matches!(self.state, State::Out(Out::Stays) | State::Serving(_)),
            }),
            (None, Some(since)) => {
                let why = "it does not answer since it was to be opened".to_string();
                Some(Outage { ms: ms(since), why, is_missing: false, is_tried: true })
            }
            (None, None) => None,
        };
        let (io_errors, retries) = (self.meter.io_errors, self.meter.retries);
        let is_leaving = matches!(self.state, State::Out(Out::Leaves));
        let has_any = !is_leaving && (outage.is_some() || io_errors + retries > 0 || self.outages.lives > 1);
        let last_error_ms = self.meter.last_error_at().map(ms);
        let trouble = DeviceTrouble { device, lives: self.outages.lives, io_errors, last_error_ms, retries, outage };
        has_any.then_some(trouble)
    }

    pub fn is_serving(&self) -> bool {
        matches!(&self.state, State::Serving(serving) if serving.health() == DeviceHealth::Serving)
    }

    /// What it is made of, as far as anybody knows.
    pub fn media(&self) -> Option<MediaClass> {
        let State::Serving(serving) = &self.state else { return self.media };
        serving.superblock.media.or(self.media)
    }

    /// What its part in the read cache follows from.
    pub fn standing(&self) -> (bool, Option<MediaClass>) {
        (self.is_serving(), self.media())
    }

    fn shards(&self) -> Option<&Shards> {
        match &self.state {
            State::Serving(serving) => Some(&serving.shards),
            State::Opening(_) | State::Out(_) => None,
        }
    }

    fn shards_mut(&mut self) -> Option<&mut Shards> {
        match &mut self.state {
            State::Serving(serving) => Some(&mut serving.shards),
            State::Opening(_) | State::Out(_) => None,
        }
    }

    /// Whether these blocks of a shard can be read here.
    pub fn holds(&self, shard: ShardId, block: u32, blocks: u32) -> bool {
        self.is_serving() && self.shards().is_some_and(|shards| shards.holds(shard, block, blocks))
    }

    /// Something of the shard is there: whole, damaged, or on its way.
    pub fn has_shard(&self, shard: ShardId) -> bool {
        self.shards().is_some_and(|shards| shards.has(shard))
    }

    /// A read that passed the read cache; `wanted`: what comes of it is told in [`Surroundings::fresh`].
    pub fn read_shard(&mut self, around: &mut Surroundings, asked: &Asked, wanted: bool) {
        let refusal = self.refusal(around.now);
        let mut ctx = ctx(self.slot, self.id, &mut self.queue, around);
        match &mut self.state {
            State::Opening(_) | State::Out(_) => ctx.refuse(asked.client, refusal),
            State::Serving(serving) => {
                serving.on_read_shard(&mut ctx, asked, wanted);
                serving.settle(&mut ctx);
            }
        }
    }

    pub fn has_io_room(&self) -> bool {
        self.is_serving() && self.queue.has_room()
    }

    pub fn capacity_blocks(&self) -> u64 {
        self.shards().map_or(0, |shards| shards.capacity_bytes() / BLOCK_BYTES as u64)
    }

    /// Free, and not lent.
    pub fn unlent_blocks(&self) -> u64 {
        self.shards().map_or(0, Shards::unlent_blocks)
    }

    /// Whether a shard can be put here without what is lent, and so much stays free.
    pub fn has_room_for(&self, blocks: u64, kept_blocks: u64) -> bool {
        self.shards().is_none_or(|s| s.unlent_blocks() >= blocks + kept_blocks && s.can_place(blocks))
    }

    /// Space for the read cache, if so much stays free: the first of the blocks.
    pub fn lend(&mut self, blocks: u64, kept_blocks: u64) -> Option<u64> {
        self.shards_mut()?.lend(blocks, kept_blocks)
    }

    /// Nothing is read or written there any more, but for reads that nobody believes.
    pub fn take_back(&mut self, first: u64) {
        if let Some(shards) = self.shards_mut() {
            shards.take_back(first);
        }
    }

    pub fn read_lent(&mut self, around: &mut Surroundings, read: CachedRead, ticket: Token, whose: Whose) {
        let CachedRead { part, first, blocks } = read;
        let offset = self.shards().expect("what lends serves").offset_of(first);
        let mut ctx = ctx(self.slot, self.id, &mut self.queue, around);
        ctx.read(offset, blocks * BLOCK_BYTES as u32, Io::CachedRead { ticket, part, whose });
    }

    pub fn write_lent(&mut self, around: &mut Surroundings, first: u64, bytes: Buf, ticket: Token) {
        let offset = self.shards().expect("what lends serves").offset_of(first);
        let aligned = (bytes.as_ptr() as usize).is_multiple_of(BLOCK_BYTES);
        let bytes = if aligned { bytes } else { Buf::copy_from(&bytes) };
        let mut ctx = ctx(self.slot, self.id, &mut self.queue, around);
        ctx.write(offset, vec![bytes], false, Io::CachedWrite { ticket });
    }

    /// Somebody asks how the device does: where it has had little to do lately, a block is read to see.
    pub fn probe(&mut self, around: &mut Surroundings) {
        let State::Serving(serving) = &self.state else { return };
        let under_way = self.queue.iter().any(|started| matches!(started.io, Io::Probe));
        if serving.is_ready && self.meter.wants_probe(around.now, under_way) {
            let mut ctx = ctx(self.slot, self.id, &mut self.queue, around);
            if ctx.has_io_room() {
                ctx.read(0, SUPERBLOCK_BYTES as u32, Io::Probe);
            }
        }
    }

    pub fn waited(&self) -> u64 {
        self.queue.waited()
    }

    /// Asserts what must hold between events (tests and the simulator).
    pub fn verify(&self) {
        self.queue.verify(self.again.len());
        if let State::Serving(serving) = &self.state {
            serving.verify();
        }
    }
}
