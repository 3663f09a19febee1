//! Sharing domains of a simulated grid: a store, and volumes with equal content that are its members.
//!
//! They are kept with separate clones (see `separate`): each has an owner on any host, and all but the store a guest.

use crate::secrecy::{key_of, store_key_of};
use crate::separate::id_of;
use crate::swarm::{Run, VOLUME};
use crate::world::MachineAt;
use holdfast_base::{Epoch, MetaReply, MetaRequest, MetaVersion, VolumeId};
use holdfast_format::features::{Feature, Features};
use holdfast_format::packing::Compression;
use holdfast_format::root::{Root, root_key};
use holdfast_format::sharing::{STORE_EPOCHS, STORE_SPAN};
use holdfast_format::talk::Talk;
use holdfast_volume::{Controller, Event, State};
use std::collections::VecDeque;
use std::time::Duration;

/// Room for whatever is copied in a run.
const STORE_BYTES: u64 = 1 << 30;

/// Without work of guests a domain comes to rest within this, and then does nothing for so long.
const ENDS_WITHIN: Duration = Duration::from_secs(600);
const IS_QUIET: Duration = Duration::from_secs(10);

/// Members publish what they name within so many rests of a walk.
const PUBLISHED_AFTER: u32 = 20;

/// Of a thousand messages, those that are lost.
const LOST: u32 = 50;

impl Run {
    /// A volume with nothing in it, which somebody opens; returns its number among members.
    pub(crate) fn create_fresh(&mut self, is_store: bool) -> usize {
        let number = self.separate.add_fresh(self.guests.size_bytes(), is_store);
        let (size, layout) = (if is_store { STORE_BYTES } else { self.guests.size_bytes() }, self.plan.layout);
        let mut root = Root::new(self.world.grid, id_of(number), &format!("member{number}"), size, layout);
        if is_store {
            root.epoch = Epoch(STORE_EPOCHS.0 + number as u64 * STORE_SPAN);
            root.features = Features::default().with(Feature::Stores);
        }
        if self.plan.encrypted {
            let seed = self.plan.seed;
            root.key_id = Some(if is_store { store_key_of(seed) } else { key_of(seed) }.id());
        }
        if self.plan.compression != Compression::Off {
            root.features = root.features.with(Feature::Packed);
        }
        let (key, value) = (root_key(root.volume), Some(root.encode()));
        self.world.meta.apply(&MetaRequest::Swap { key, expect: MetaVersion::ABSENT, value, guard: None });
        if number == 1 {
            self.begin_separate_time();
        }
        let host = self.separate.any_host(self.world.hosts.len());
        self.open_member(number, host);
        number
    }

    /// A store and some members.
    pub(crate) fn begin_domain(&mut self) {
        let store = self.create_fresh(true);
        for _ in 0..1 + self.plan.seed % 3 {
            let member = self.create_fresh(false);
            self.put_into_domain(member, store);
        }
        if self.plan.first_shares {
            self.separate.store_of_first = Some(store);
            self.guests.written = Some(VecDeque::new());
            self.tell_first();
        }
    }

    /// The first volume is in that domain, too, whoever opens it.
    pub(crate) fn tell_first(&mut self) {
        if let (Some(store), Some(at)) = (self.separate.store_of_first, self.current) {
            self.tell_store(at, store);
        }
    }

    /// The member is to be in the domain of that store, whoever opens it.
    pub(crate) fn put_into_domain(&mut self, number: usize, store: usize) {
        self.separate.set_store(number, store);
        if let Some(at) = self.member_at(number) {
            self.tell_store(at, store);
        }
    }

    pub(crate) fn tell_store(&mut self, at: MachineAt, store: usize) {
        let key = self.plan.encrypted.then(|| store_key_of(self.plan.seed));
        self.world.tell(at, Event::SetSharing { store: id_of(store), key });
    }

    /// The member is to be in none, whoever opens it.
    pub(crate) fn take_out_of_domain(&mut self, number: usize) {
        self.separate.set_leaving(number);
        if let Some(at) = self.member_at(number) {
            self.world.tell(at, Event::EndSharing);
        }
    }

    /// Whether its root names no store.
    pub(crate) fn is_out_of_domain(&self, number: usize) -> bool {
        let machine = self.member_at(number).and_then(|at| self.world.machine(at));
        machine.is_some_and(|controller| controller.state() == State::Open && controller.store_named().is_none())
    }

    /// What an owner asks that has not heard the answer when it is gone.
    pub(crate) fn ask_to_join(&mut self, number: usize, store: usize) {
        let at = self.member_at(store).expect("a store that is open");
        let talk = Box::new(Talk::Join { member: id_of(number) });
        self.world.tell(at, Event::Talk { from: id_of(number), talk });
    }

    pub(crate) fn has_members(&self, store: usize) -> bool {
        let machine = self.member_at(store).and_then(|at| self.world.machine(at));
        machine.is_some_and(|controller| !controller.dependents().is_empty())
    }

    /// The operator has deleted it: nobody opens it again.
    pub(crate) fn delete_root(&mut self, number: usize) {
        let key = root_key(id_of(number));
        let MetaReply::Record { version, value } = self.world.meta.apply(&MetaRequest::Get { key: key.clone() }) else {
            return;
        };
        if let Some(root) = value.and_then(|bytes| Root::decode(&bytes).ok()) {
            let value = Some(Root { deleted: true, ..root }.encode());
            self.world.meta.apply(&MetaRequest::Swap { key, expect: version, value, guard: None });
        }
    }

    /// One owner tells another something, which arrives after a while, if it does.
    pub(crate) fn on_talk(&mut self, from: MachineAt, to: VolumeId, talk: Box<Talk>) {
        let volume_at = |r: &Run, at| r.separate.number_at(at).map_or(VOLUME, id_of);
        let target = if to == VOLUME { self.current } else { self.separate.at_of(to) };
        let from = volume_at(self, from);
        if let Some(held) = self.separate.held_offers.as_mut().filter(|_| matches!(*talk, Talk::Take { .. })) {
            return held.push((to, Event::Talk { from, talk }));
        }
        let (is_lost, us) = self.separate.fate_of_talk(LOST);
        if let Some(target) = target.filter(|_| !is_lost) {
            let after = self.separate.talk_takes + Duration::from_micros(us);
            self.world.tell_later(target, after, Event::Talk { from, talk });
        }
    }

    /// What was held back arrives.
    pub(crate) fn release_offers(&mut self) {
        for (to, event) in self.separate.held_offers.take().unwrap_or_default() {
            if let Some(at) = self.separate.at_of(to) {
                self.world.tell_later(at, Duration::from_micros(100), event);
            }
        }
    }

    /// Nobody asks for anything: what is copied and named comes to an end. Not where a store forgets content before members
    /// have published that they name it: it is gathered again for ever.
    pub(crate) fn rest_in_domain(&mut self) -> Result<(), String> {
        if self.plan.forget_after < self.plan.destage_age * PUBLISHED_AFTER {
            return Ok(());
        }
        let until = self.world.now() + ENDS_WITHIN;
        let moved = |r: &Run| -> Vec<(u64, u64)> {
            let all = (1..=r.separate.count()).filter_map(|number| r.member_at(number)).chain(r.current);
            let all = all.filter_map(|at| r.world.machine(at)).map(Controller::status);
            all.map(|status| (status.counters.cleaned_bytes, status.shared_blocks)).collect()
        };
        loop {
            let before = moved(self);
            self.run_until(self.world.now() + IS_QUIET, |_| false)?;
            let after = moved(self);
            if before == after {
                return Ok(());
            }
            if self.world.now() > until {
                return Err(format!("a domain does not come to rest: {before:?}, and then {after:?}"));
            }
        }
    }

    pub(crate) fn shared_blocks_of_all(&self) -> u64 {
        (1..=self.separate.count()).map(|number| self.shared_blocks(number)).sum()
    }

    /// Blocks that a member names in the store so far.
    pub(crate) fn shared_blocks(&self, number: usize) -> u64 {
        let machine = self.member_at(number).and_then(|at| self.world.machine(at));
        machine.map_or(0, |controller| controller.status().shared_blocks)
    }
}
