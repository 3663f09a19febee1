//! One device of a node: opening, serving, or failed for good.
//!
//! States: `Opening` → `Serving` (the opening's last table write is durable) → `Failed` (any write or flush failed); also
//! `Opening` → `Failed`. A failed device answers everything with `DeviceFailed` until the process restarts (protocol rule
//! 25); the node's other devices serve on.

use crate::api::{DeviceSlot, DiskError, Effect, FailReason, NodeConfig, Notice};
use crate::cache::{Asked, Fresh};
use crate::io::{Client, Ctx, IO_MAX, IO_RESERVE, Io, Started, client_of};
use crate::meter::Meter;
use crate::open::{Opening, Progress};
use crate::serving::Serving;
use crate::shards::Shards;
use holdfast_base::{BLOCK_BYTES, Buf, DeviceId, Effects, Instant, MediaClass, ShardId, Slab, Token};
use holdfast_format::disk::SUPERBLOCK_BYTES;
use holdfast_format::drive::DriveReport;
use holdfast_format::wire::{DeviceHealth, DeviceStat, Refusal, Request};

enum State {
    Opening(Box<Opening>),
    Serving(Box<Serving>),
    Failed,
}

pub(crate) struct Device {
    slot: DeviceSlot,
    /// Known once the superblock was read.
    id: Option<DeviceId>,
    /// As its shell found it to be.
    media: Option<MediaClass>,
    /// What its drive said last of its health.
    pub drive: Option<DriveReport>,
    io: Slab<Started>,
    meter: Meter,
    state: State,
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
pub(crate) enum Told {
    Nothing,
    /// Which device this is.
    Id(DeviceId),
    /// Of the read cache, in space that this device lends.
    CachedRead {
        ticket: Token,
        part: u8,
        result: Result<Buf, DiskError>,
    },
    CachedWrite {
        ticket: Token,
        result: Result<Buf, DiskError>,
    },
}

fn ctx<'a>(slot: DeviceSlot, id: Option<DeviceId>, io: &'a mut Slab<Started>, s: &'a mut Surroundings<'_>) -> Ctx<'a> {
    Ctx { now: s.now, slot, device: id.unwrap_or_default(), config: s.config, io, out: s.out, fresh: s.fresh }
}

impl Device {
    pub fn open(slot: DeviceSlot, size_bytes: u64, media: Option<MediaClass>, around: &mut Surroundings) -> Device {
        let meter = Meter::new(around.now);
        let mut device =
            Device { slot, id: None, media, drive: None, io: Slab::new(IO_MAX), meter, state: State::Failed };
        match Opening::start(&mut ctx(slot, None, &mut device.io, around), size_bytes) {
            Ok(opening) => device.state = State::Opening(Box::new(opening)),
            Err(reason) => device.fail(reason, around),
        }
        device
    }

    pub fn id(&self) -> Option<DeviceId> {
        self.id
    }

    pub fn is_opening(&self) -> bool {
        match &self.state {
            State::Opening(_) => true,
            State::Serving(serving) => !serving.is_ready,
            State::Failed => false,
        }
    }

    pub fn on_request(&mut self, around: &mut Surroundings, client: Client, request: Request, payload: Buf) {
        let mut ctx = ctx(self.slot, self.id, &mut self.io, around);
        match &mut self.state {
            State::Opening(_) => ctx.refuse(client, Refusal::Busy),
            State::Failed => ctx.refuse(client, Refusal::DeviceFailed),
            State::Serving(serving) => {
                serving.on_request(&mut ctx, client, request, payload);
                serving.settle(&mut ctx);
            }
        }
    }

    pub fn on_tick(&mut self, around: &mut Surroundings) {
        if let State::Serving(serving) = &mut self.state {
            serving.on_tick(&mut ctx(self.slot, self.id, &mut self.io, around));
        }
    }

    /// A disk operation is done.
    pub fn on_disk(&mut self, around: &mut Surroundings, token: Token, result: Result<Buf, DiskError>) -> Told {
        // What was under way when the device failed is answered already.
        let Some(Started { io, kind, at }) = self.io.remove(token) else { return Told::Nothing };
        self.meter.on_done(around.now, kind, at, result.is_err());
        let mut ctx = ctx(self.slot, self.id, &mut self.io, around);
        let outcome = match (&mut self.state, io) {
            (State::Failed, _) => return Told::Nothing,
            (_, Io::CachedRead { ticket, part }) => return Told::CachedRead { ticket, part, result },
            (_, Io::CachedWrite { ticket }) => return Told::CachedWrite { ticket, result },
            (State::Opening(opening), Io::Opening { step }) => opening.on_disk(&mut ctx, step, result),
            (State::Opening(_), io) => unreachable!("an opening device does nothing else: {io:?}"),
            (State::Serving(serving), io) => {
                let outcome = serving.on_disk(&mut ctx, io, result).map(|()| Progress::Going);
                if outcome.is_ok() {
                    serving.settle(&mut ctx);
                }
                outcome
            }
        };
        match outcome {
            Ok(Progress::Going) => Told::Nothing,
            Ok(Progress::Identified) => {
                let State::Opening(opening) = &self.state else { unreachable!("only an opening identifies") };
                self.id = opening.superblock().map(|s| s.device);
                self.id.map_or(Told::Nothing, Told::Id)
            }
            Ok(Progress::Done(serving)) => {
                self.serve(serving, around);
                Told::Nothing
            }
            Err(reason) => {
                self.fail(reason, around);
                Told::Nothing
            }
        }
    }

    fn serve(&mut self, serving: Box<Serving>, around: &mut Surroundings) {
        if serving.promises_lost {
            let reason = FailReason::PromisesLost;
            around.out.push(Effect::Note(Notice::DeviceFailed { slot: self.slot, device: self.id, reason }));
        }
        self.state = State::Serving(serving);
    }

    /// The device is out: everything that waits for it is answered, and all later requests are refused.
    pub fn fail(&mut self, reason: FailReason, around: &mut Surroundings) {
        let state = std::mem::replace(&mut self.state, State::Failed);
        let mut clients: Vec<Client> = self.io.iter().filter_map(|(_, started)| client_of(&started.io)).collect();
        if let State::Serving(serving) = state {
            clients.extend(serving.waiting_clients());
        }
        let mut ctx = ctx(self.slot, self.id, &mut self.io, around);
        ctx.note(Notice::DeviceFailed { slot: self.slot, device: self.id, reason });
        for client in clients {
            ctx.refuse(client, Refusal::DeviceFailed);
        }
    }

    /// The same device is open in another slot: this one never speaks for it.
    pub fn fail_as_twice(&mut self, around: &mut Surroundings) {
        self.fail(FailReason::Twice, around);
        self.id = None;
    }

    pub fn next_deadline(&self, config: &NodeConfig) -> Option<Instant> {
        match &self.state {
            State::Serving(serving) => serving.next_deadline(config.batch_in_flight_max),
            State::Opening(_) | State::Failed => None,
        }
    }

    /// What is told of the device; nothing until its id is known.
    pub fn stat(&self, now: Instant) -> Option<DeviceStat> {
        let device = self.id?;
        let mut stat = match &self.state {
            State::Serving(serving) => serving.stat(),
            State::Opening(_) => DeviceStat::unknown(device, DeviceHealth::Opening),
            State::Failed => DeviceStat::unknown(device, DeviceHealth::Failed),
        };
        (stat.reads, stat.writes) =
            self.meter.times(now, self.io.iter().map(|(_, started)| (started.kind, started.at)));
        stat.io_errors = self.meter.io_errors;
        stat.media_is_set = stat.media.is_some();
        stat.media = stat.media.or(self.media);
        Some(stat)
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
            State::Opening(_) | State::Failed => None,
        }
    }

    fn shards_mut(&mut self) -> Option<&mut Shards> {
        match &mut self.state {
            State::Serving(serving) => Some(&mut serving.shards),
            State::Opening(_) | State::Failed => None,
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
        let mut ctx = ctx(self.slot, self.id, &mut self.io, around);
        match &mut self.state {
            State::Opening(_) => ctx.refuse(asked.client, Refusal::Busy),
            State::Failed => ctx.refuse(asked.client, Refusal::DeviceFailed),
            State::Serving(serving) => {
                serving.on_read_shard(&mut ctx, asked, wanted);
                serving.settle(&mut ctx);
            }
        }
    }

    pub fn has_io_room(&self) -> bool {
        self.is_serving() && self.io.len() + IO_RESERVE <= IO_MAX
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

    pub fn read_lent(&mut self, around: &mut Surroundings, first: u64, blocks: u32, (ticket, part): (Token, u8)) {
        let offset = self.shards().expect("what lends serves").offset_of(first);
        let mut ctx = ctx(self.slot, self.id, &mut self.io, around);
        ctx.read(offset, blocks * BLOCK_BYTES as u32, Io::CachedRead { ticket, part });
    }

    pub fn write_lent(&mut self, around: &mut Surroundings, first: u64, bytes: Buf, ticket: Token) {
        let offset = self.shards().expect("what lends serves").offset_of(first);
        let aligned = (bytes.as_ptr() as usize).is_multiple_of(BLOCK_BYTES);
        let bytes = if aligned { bytes } else { Buf::copy_from(&bytes) };
        let mut ctx = ctx(self.slot, self.id, &mut self.io, around);
        ctx.write(offset, vec![bytes], false, Io::CachedWrite { ticket });
    }

    /// Somebody asks how the device does: where it has had little to do lately, a block is read to see.
    pub fn probe(&mut self, around: &mut Surroundings) {
        let State::Serving(serving) = &self.state else { return };
        let under_way = self.io.iter().any(|(_, started)| matches!(started.io, Io::Probe));
        if serving.is_ready && self.meter.wants_probe(around.now, under_way) {
            let mut ctx = ctx(self.slot, self.id, &mut self.io, around);
            if ctx.has_io_room() {
                ctx.read(0, SUPERBLOCK_BYTES as u32, Io::Probe);
            }
        }
    }

    /// Asserts what must hold between events (tests and the simulator).
    pub fn verify(&self) {
        if let State::Serving(serving) = &self.state {
            serving.verify();
        }
    }
}
