//! The node: one storage process, its devices side by side.
//!
//! Role: the shell passes events in ([`Event`]) and carries out effects ([`Effect`]), in order. The node decides nothing
//! about volumes or placement; it answers requests, each by itself, for one of its devices.
//!
//! A request for a device goes: [`Node::handle`] → [`crate::device`] (is it open?) → [`crate::serving`] (epoch, limits,
//! state) → [`crate::journal`] or [`crate::shards`] → disk → [`crate::completion`] → reply. A read of a shard on a
//! device of a slower class is looked up in the read cache first.
//!
//! A shard that is to be made is asked for of other nodes first ([`crate::peer_rebuild`]), and then a request to put
//! it.
//!
//! Invariants:
//! 1. Every request is answered exactly once, if the shell answers every disk operation.
//! 2. Nothing is answered as done before it is durable on the device that it concerns.
//! 3. One device's failure changes no answer of another: what the read cache ([`crate::cache`]) has on the one that fails is
//!    read from the others again.
//!
//! Limits: devices [`DEVICES_MAX`]; requests are bounded by each device's own queues, and refused
//! as `Busy` beyond.

use crate::api::{DeviceSlot, DiskError, DiskToken, Effect, Event, FailReason, NodeConfig, Notice, PeerId};
use crate::cache::{Asked, Fresh, ReadCache};
use crate::device::{Completed, Device, Opened, Surroundings};
use crate::hosts::Hosts;
use crate::io::{Client, DEVICES_MAX, split_token};
use crate::line::Whose;
use crate::peer_rebuild::PeerRebuilds;
use crate::siblings::Siblings;
use holdfast_base::{Buf, DeviceId, Effects, Instant, time::earliest};
use holdfast_format::wire::{DeviceStat, Refusal, Reply, Request};
use std::collections::{BTreeMap, BTreeSet};

pub struct Node {
    pub(crate) config: NodeConfig,
    pub(crate) devices: BTreeMap<DeviceSlot, Device>,
    /// Where each device is, for the few that a node has: looked through in order.
    pub(crate) slots: Vec<(DeviceId, DeviceSlot)>,
    pub(crate) cache: ReadCache,
    /// Devices whose reads are cached.
    pub(crate) slow: BTreeSet<DeviceSlot>,
    /// What devices have read for the cache; empty between events.
    pub(crate) fresh: Vec<Fresh>,
    pub(crate) rebuilds: PeerRebuilds,
    pub(crate) hosts: Hosts,
    pub(crate) siblings: Siblings,
}

impl Node {
    pub fn new(config: NodeConfig) -> Node {
        assert!(config.batch_in_flight_max > 0, "a journal needs at least one batch in flight");
        let cache = ReadCache::new(&config);
        let (devices, slots) = (BTreeMap::new(), Vec::new());
        let (slow, fresh, rebuilds, hosts) = (BTreeSet::new(), Vec::new(), PeerRebuilds::new(), Hosts::default());
        let siblings = Siblings::new(config.reactor, config.reactors);
        Node { config, devices, slots, cache, slow, fresh, rebuilds, hosts, siblings }
    }

    /// Runs one event to completion.
    pub fn handle(&mut self, now: Instant, event: Event, out: &mut Effects<Effect>) {
        self.hosts.on_event(now);
        match event {
            Event::Request { peer, token, beside, request, payload } => {
                let whose = Whose { host: self.hosts.on_request(now, peer), urgency: beside.urgency };
                self.on_request(
                    now,
                    Client { peer, token, whose, asked_at: beside.wants_times.then_some(now) },
                    request,
                    payload,
                    out,
                );
            }
            Event::Disk { token, result } => self.on_disk(now, token, result, out),
            Event::Told { reactor, message } => self.on_told(now, reactor, message, out),
            Event::PeerAnswered { token, answer } => self.on_peer_answered(now, token, answer, out),
            Event::Tick => {
                self.end_late_rebuilds(now, out);
                let mut around = Surroundings { now, config: &self.config, out, fresh: &mut self.fresh };
                self.devices.values_mut().for_each(|d| d.on_tick(&mut around));
            }
            Event::ExpectDevice { slot, device } => {
                assert!(slot.0 < DEVICES_MAX && !self.devices.contains_key(&slot), "{slot:?} is added once");
                let mut around = Surroundings { now, config: &self.config, out, fresh: &mut self.fresh };
                self.devices.insert(slot, Device::expect(slot, device, &mut around));
                self.siblings.on_changed();
            }
            Event::AddDevice { slot, size_bytes, media, is_direct } => {
                assert!(slot.0 < DEVICES_MAX, "{slot:?}");
                let mut around = Surroundings { now, config: &self.config, out, fresh: &mut self.fresh };
                let opened = Opened { size_bytes, media, is_direct };
                match self.devices.get_mut(&slot) {
                    Some(device) => device.begin(opened, &mut around),
                    None => drop(self.devices.insert(slot, Device::open(slot, opened, &mut around))),
                }
            }
            Event::NotOpened { slot, why } => {
                let mut around = Surroundings { now, config: &self.config, out, fresh: &mut self.fresh };
                if let Some(device) = self.devices.get_mut(&slot) {
                    device.on_not_opened(why, &mut around);
                }
            }
            Event::RemoveDevice { slot } => self.on_remove(now, slot, out),
            Event::Drive { slot, report } => {
                if let Some(device) = self.devices.get_mut(&slot) {
                    device.drive = report;
                }
            }
            // What the peer asked for is done all the same; the shell drops replies to peers that are gone.
            // But what has not begun to be put.
            Event::PeerGone { peer } => {
                self.hosts.on_gone(peer);
                self.give_up_rebuilds_of(peer, out);
                self.tell_gone(peer, out);
            }
        }
        self.tell_devices(out);
    }

    /// When the node wants a [`Event::Tick`] at the latest.
    pub fn next_deadline(&self) -> Option<Instant> {
        let devices = self.devices.values().map(|d| d.next_deadline(&self.config));
        devices.fold(self.rebuilds.next_deadline(), earliest)
    }

    /// Which device is in a place, once it has told.
    pub fn device_in(&self, slot: DeviceSlot) -> Option<DeviceId> {
        self.devices.get(&slot)?.id()
    }

    /// Fill and state of all devices whose superblock has been read.
    pub fn stats(&self, now: Instant) -> Vec<DeviceStat> {
        let home = self.cache.home();
        let stat = |(slot, device): (&DeviceSlot, &Device)| {
            // Another one is it.
            device.expected().is_none_or(|id| !self.has_read(id)).then_some(())?;
            let read_cache = (home == Some(*slot)).then(|| self.cache.stat());
            Some(DeviceStat { read_cache, ..device.stat(now)? })
        };
        self.devices.iter().filter_map(stat).collect()
    }

    /// Whether a device of this node is known to be that one.
    fn has_read(&self, id: DeviceId) -> bool {
        self.slots.iter().any(|(known, _)| *known == id) || self.siblings.has_read(id)
    }

    /// Disk operations that had to wait for a place on their devices.
    pub fn waited(&self) -> u64 {
        self.devices.values().map(Device::waited).sum()
    }

    /// Requests for devices of siblings that were passed on to these.
    pub fn passed_on(&self) -> u64 {
        self.siblings.passed_on()
    }

    /// Asserts what must hold between events: space adds up, and every unit's account agrees with the index. Slow: for
    /// tests and the simulator.
    pub fn verify(&self) {
        self.devices.values().for_each(Device::verify);
        self.verify_cache();
        self.verify_siblings();
    }

    pub(crate) fn on_request(
        &mut self,
        now: Instant,
        client: Client,
        request: Request,
        payload: Buf,
        out: &mut Effects<Effect>,
    ) {
        let Some(id) = request.device() else {
            let own = self.own_answer(now, Some(client.peer), &request, out);
            return self.ask_siblings(client, &request, own, out);
        };
        let found = self.find(now, id);
        if let Err(refusal) = found
            && let Some(reactor) = self.elsewhere(id, refusal)
        {
            return self.pass_on(client, reactor, request, payload, out);
        }
        match found {
            _ if matches!(request, Request::MakeShard { .. }) => self.on_make(now, client, request, &payload, out),
            Ok(slot) => self.on_device_request(now, client, slot, request, payload, out),
            Err(refusal) => client.reply(Reply::Refused(refusal), Vec::new(), out),
        }
    }

    fn on_device_request(
        &mut self,
        now: Instant,
        client: Client,
        slot: DeviceSlot,
        request: Request,
        payload: Buf,
        out: &mut Effects<Effect>,
    ) {
        if self.cache.home().is_some() {
            if let Request::ReadShard { shard, block, blocks, checked, cached: true, .. } = request
                && self.slow.contains(&slot)
            {
                let asked = Asked { client, slot, shard, block, blocks, checked };
                return self.read_through(now, asked, out);
            }
            self.clear_way(slot, &request, payload.len());
        }
        self.give_up_rebuilds_for(&request, out);
        let mut around = Surroundings { now, config: &self.config, out, fresh: &mut self.fresh };
        let device = self.devices.get_mut(&slot).expect("found there");
        device.on_request(&mut around, client, request, payload);
    }

    pub(crate) fn find(&self, now: Instant, id: DeviceId) -> Result<DeviceSlot, Refusal> {
        if let Some((_, slot)) = self.slots.iter().find(|(device, _)| *device == id) {
            return Ok(*slot);
        }
        // While some device has not told its id yet, it may be this one.
        let may_come = |d: &Device| d.id().is_none() && d.expected().is_none_or(|e| e == id) && d.is_opening(now);
        if self.devices.values().any(may_come) {
            return Err(Refusal::Busy);
        }
        let is_out = self.devices.values().any(|d| d.expected() == Some(id));
        Err(if is_out { Refusal::DeviceFailed } else { Refusal::UnknownDevice })
    }

    fn on_remove(&mut self, now: Instant, slot: DeviceSlot, out: &mut Effects<Effect>) {
        let mut around = Surroundings { now, config: &self.config, out, fresh: &mut self.fresh };
        let Some(device) = self.devices.get_mut(&slot) else { return };
        device.fail(FailReason::Removed, &mut around);
        self.slots.retain(|(_, known)| *known != slot);
        self.siblings.on_changed();
        self.look_at_roles(now, out);
        self.forget_gone(slot, out);
    }

    /// A device that was removed goes with the last of its operations.
    fn forget_gone(&mut self, slot: DeviceSlot, out: &mut Effects<Effect>) {
        if self.devices.get(&slot).is_some_and(Device::is_gone) {
            self.devices.remove(&slot);
            out.push(Effect::Note(Notice::DeviceGone { slot }));
        }
    }

    /// What this machine says to a request that concerns the whole node; of a sibling's connections there is no peer.
    pub(crate) fn own_answer(
        &mut self,
        now: Instant,
        peer: Option<PeerId>,
        request: &Request,
        out: &mut Effects<Effect>,
    ) -> Reply {
        match request {
            Request::Hello { versions, grid, host } => match self.config.wire.common(*versions) {
                None => Reply::Refused(Refusal::Version(self.config.wire)),
                Some(_) if *grid != self.config.grid => Reply::Refused(Refusal::Invalid),
                Some(version) => {
                    if let Some(peer) = peer {
                        self.hosts.on_hello(now, peer, host);
                    }
                    let (node, boot) = (self.config.node, self.config.boot);
                    Reply::Hello { version, node, boot, devices: self.stats(now) }
                }
            },
            Request::Heard { host } => {
                let ms = self.hosts.silent_for(now, host).as_millis().try_into().unwrap_or(u64::MAX);
                Reply::Heard { ms }
            }
            Request::Stat => {
                let mut around = Surroundings { now, config: &self.config, out, fresh: &mut self.fresh };
                self.devices.values_mut().for_each(|device| device.probe(&mut around));
                Reply::Stat { devices: self.stats(now) }
            }
            Request::Drives => {
                let told = self.devices.values().filter_map(|device| Some((device.id()?, device.drive.clone()?)));
                Reply::Drives { drives: told.collect() }
            }
            Request::Troubles => {
                Reply::Troubles { troubles: self.devices.values().filter_map(|device| device.trouble(now)).collect() }
            }
            Request::Reactors => self.reactors(),
            Request::Join { reactor, host } => match peer {
                Some(peer) => self.on_join(now, peer, *reactor, host),
                None => Reply::Refused(Refusal::Invalid),
            },
            _ => Reply::Pong,
        }
    }

    fn on_disk(&mut self, now: Instant, token: DiskToken, result: Result<Buf, DiskError>, out: &mut Effects<Effect>) {
        let (slot, token) = split_token(token);
        let mut around = Surroundings { now, config: &self.config, out, fresh: &mut self.fresh };
        let device = self.devices.get_mut(&slot).expect("tokens name devices of this node");
        let before = device.standing();
        let told = device.on_disk(&mut around, token, result);
        match told {
            Completed::Nothing => {}
            Completed::Id(id)
                if self.siblings.has_read(id)
                    || self.slots.iter().any(|(known, other)| *known == id && *other != slot) =>
            {
                device.fail_as_twice(&mut around);
            }
            Completed::Id(id) => {
                self.slots.retain(|(_, known)| *known != slot);
                self.slots.push((id, slot));
                self.siblings.on_changed();
            }
            Completed::CachedRead { ticket, part, result, took } => {
                self.on_cached_read(now, (ticket, part), (result, took), out);
            }
            Completed::CachedWrite { ticket, result } => self.on_cached_write(now, ticket, result, out),
        }
        if self.devices.get(&slot).is_some_and(|device| device.standing() != before) {
            self.look_at_roles(now, out);
        }
        self.forget_gone(slot, out);
        if !self.fresh.is_empty() {
            self.admit_fresh(now, out);
        }
    }
}
