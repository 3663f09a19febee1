//! One device of a node: opening, serving, or failed for good.
//!
//! States: `Opening` → `Serving` (the opening's last table write is durable) → `Failed` (any write or flush failed); also
//! `Opening` → `Failed`. A failed device answers everything with `DeviceFailed` until the process restarts (protocol rule
//! 25); the node's other devices serve on.

use crate::api::{DeviceSlot, DiskError, Effect, FailReason, NodeConfig, Notice};
use crate::io::{Client, Ctx, IO_MAX, Io, Started, client_of};
use crate::meter::Meter;
use crate::open::{Opening, Progress};
use crate::serving::Serving;
use holdfast_base::{Buf, DeviceId, Effects, Instant, MediaClass, Slab, Token};
use holdfast_format::disk::SUPERBLOCK_BYTES;
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
    io: Slab<Started>,
    meter: Meter,
    state: State,
}

/// What every event comes with.
pub(crate) struct Surroundings<'a> {
    pub now: Instant,
    pub config: &'a NodeConfig,
    pub out: &'a mut Effects<Effect>,
}

fn ctx<'a>(slot: DeviceSlot, id: Option<DeviceId>, io: &'a mut Slab<Started>, s: &'a mut Surroundings<'_>) -> Ctx<'a> {
    Ctx { now: s.now, slot, device: id.unwrap_or_default(), config: s.config, io, out: s.out }
}

impl Device {
    pub fn open(slot: DeviceSlot, size_bytes: u64, media: Option<MediaClass>, around: &mut Surroundings) -> Device {
        let meter = Meter::new(around.now);
        let mut device = Device { slot, id: None, media, io: Slab::new(IO_MAX), meter, state: State::Failed };
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

    /// A disk operation is done. Returns the device's id when the operation has told it.
    pub fn on_disk(
        &mut self,
        around: &mut Surroundings,
        token: Token,
        result: Result<Buf, DiskError>,
    ) -> Option<DeviceId> {
        // What was under way when the device failed is answered already.
        let Started { io, kind, at } = self.io.remove(token)?;
        self.meter.on_done(around.now, kind, at, result.is_err());
        let mut ctx = ctx(self.slot, self.id, &mut self.io, around);
        let outcome = match (&mut self.state, io) {
            (State::Failed, _) => return None,
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
            Ok(Progress::Going) => None,
            Ok(Progress::Identified) => {
                let State::Opening(opening) = &self.state else { unreachable!("only an opening identifies") };
                self.id = opening.superblock().map(|s| s.device);
                self.id
            }
            Ok(Progress::Done(serving)) => {
                self.serve(serving, around);
                None
            }
            Err(reason) => {
                self.fail(reason, around);
                None
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
