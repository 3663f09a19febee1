//! How the node drives its read cache between its devices.
//!
//! A read of a slower device is looked up first; a hit is read from the home, and what fails there goes on to the shard's own
//! device as if there were no cache. A put on the home finds space that is lent given back before it looks for room.

use super::{Asked, CachedWrite, Found, Outcome};
use crate::api::{DeviceSlot, DiskError, Effect};
use crate::device::Surroundings;
use crate::node::Node;
use holdfast_base::{BLOCK_BYTES, Buf, Effects, Instant, Token};
use holdfast_format::wire::{Reply, Request};
use std::collections::BTreeSet;
use std::time::Duration;

/// What a device keeps of its free space beside what it lends, so that puts seldom have to take any back: this share.
const KEPT_PER_MILLE: u64 = 30;

/// At most.
const KEPT_BLOCKS_MAX: u64 = (256 << 20) / BLOCK_BYTES as u64;

fn kept_blocks(capacity_blocks: u64) -> u64 {
    (capacity_blocks / 1000 * KEPT_PER_MILLE).min(KEPT_BLOCKS_MAX)
}

impl Node {
    /// Before a device is asked: whatever of the cache stands in the way goes.
    pub(crate) fn clear_way(&mut self, slot: DeviceSlot, request: &Request, payload_bytes: usize) {
        match request {
            Request::PutShard { .. } if self.cache.home() == Some(slot) => {
                self.give_room(slot, payload_bytes.div_ceil(BLOCK_BYTES) as u64);
            }
            Request::DeleteShards { shards, .. } if self.slow.contains(&slot) => {
                shards.iter().for_each(|shard| self.cache.forget(super::ShardAt { slot, shard: *shard }));
            }
            Request::DropVolume { volume, .. } if self.slow.contains(&slot) => {
                self.cache.forget_volume(slot, *volume);
            }
            _ => {}
        }
    }

    /// Takes lent space back until the home has room for a shard, and for what comes next.
    fn give_room(&mut self, home: DeviceSlot, blocks: u64) {
        let device = self.devices.get_mut(&home).expect("the home is a device");
        let kept = kept_blocks(device.capacity_blocks());
        while !device.has_room_for(blocks, kept) {
            let Some(first) = self.cache.give_back() else { break };
            device.take_back(first);
        }
    }

    /// Asks the cache, and then the device that has the shard.
    pub(crate) fn read_through(&mut self, now: Instant, asked: Asked, out: &mut Effects<Effect>) {
        let own = self.devices.get(&asked.slot).expect("its caller found it");
        if !own.holds(asked.shard, asked.block, asked.blocks) {
            return self.read_own(now, asked, false, out);
        }
        let (ticket, reads) = match self.cache.find(asked) {
            Found::Miss { wanted } => return self.read_own(now, asked, wanted, out),
            Found::Hit { ticket, reads } => (ticket, reads),
        };
        let home = self.cache.home().expect("hits lie somewhere");
        let home = self.devices.get_mut(&home).expect("the home is a device");
        let mut around = Surroundings { now, config: &self.config, out, fresh: &mut self.fresh };
        if !home.has_io_room() {
            self.cache.cancel(ticket);
            return self.read_own(now, asked, false, out);
        }
        for read in reads {
            home.read_lent(&mut around, read, ticket, asked.client.whose);
        }
    }

    fn read_own(&mut self, now: Instant, asked: Asked, wanted: bool, out: &mut Effects<Effect>) {
        let mut around = Surroundings { now, config: &self.config, out, fresh: &mut self.fresh };
        let device = self.devices.get_mut(&asked.slot).expect("devices stay");
        device.read_shard(&mut around, &asked, wanted);
    }

    /// A read of the cache is done on its home.
    pub(crate) fn on_cached_read(
        &mut self,
        now: Instant,
        (ticket, part): (Token, u8),
        (result, took): (Result<Buf, DiskError>, Duration),
        out: &mut Effects<Effect>,
    ) {
        match self.cache.on_read(ticket, part, result) {
            Some(Outcome::Answer(asked, payload)) => {
                let times = asked.client.times(now, took);
                asked.client.reply_with(Reply::Shard { blocks: asked.blocks }, times, payload, out);
            }
            Some(Outcome::Fallback(asked)) => self.read_own(now, asked, true, out),
            None => {}
        }
        if self.go_on_closing() {
            self.look_at_roles(now, out);
        }
    }

    /// A write of the cache is done on its home.
    pub(crate) fn on_cached_write(
        &mut self,
        now: Instant,
        ticket: Token,
        result: Result<Buf, DiskError>,
        out: &mut Effects<Effect>,
    ) {
        self.cache.on_written(ticket, result);
        if self.go_on_closing() {
            self.look_at_roles(now, out);
        }
    }

    /// What devices have read for the cache goes there, if there is room.
    pub(crate) fn admit_fresh(&mut self, now: Instant, out: &mut Effects<Effect>) {
        let mut fresh = std::mem::take(&mut self.fresh);
        for fresh in fresh.drain(..) {
            let Some(home) = self.cache.home().and_then(|slot| self.devices.get_mut(&slot)) else { continue };
            let kept = kept_blocks(home.capacity_blocks());
            if !home.has_io_room() {
                continue;
            }
            let writes = self.cache.admit(&fresh, |blocks| home.lend(blocks, kept));
            let mut around = Surroundings { now, config: &self.config, out, fresh: &mut self.fresh };
            for CachedWrite { ticket, first, bytes } in writes {
                home.write_lent(&mut around, first, bytes, ticket);
            }
        }
        self.fresh = fresh;
    }

    /// A device serves, or no more, or is said to be of another class: which ones are cached, and where?
    pub(crate) fn look_at_roles(&mut self, now: Instant, out: &mut Effects<Effect>) {
        if !self.cache.is_wanted() {
            return;
        }
        let serving = self.devices.iter().filter(|(_, device)| device.is_serving());
        let classes: Vec<_> = serving.filter_map(|(slot, device)| Some((*slot, device.media()?))).collect();
        let fastest = classes.iter().map(|(_, class)| *class).max();
        let (fast, slow): (Vec<_>, Vec<_>) = classes.into_iter().partition(|(_, class)| Some(*class) == fastest);
        self.slow = slow.into_iter().map(|(slot, _)| slot).collect::<BTreeSet<DeviceSlot>>();
        self.cache.retain(&self.slow);
        let lenders = || fast.iter().map(|(slot, _)| *slot).filter(|slot| self.cache.may_lend(*slot));
        let now_home = self.cache.home();
        let home = match now_home.filter(|home| lenders().any(|slot| slot == *home)) {
            _ if self.slow.is_empty() => None,
            Some(home) => Some(home),
            None => lenders().max_by_key(|slot| self.devices.get(slot).map(|device| device.unlent_blocks())),
        };
        if now_home.is_some() && home != now_home {
            self.leave_home(now, out);
        }
        if let (None, Some(home)) = (self.cache.home(), home) {
            let capacity = self.devices.get(&home).expect("a lender").capacity_blocks();
            self.cache.begin(home, capacity);
        }
    }

    fn leave_home(&mut self, now: Instant, out: &mut Effects<Effect>) {
        let home = self.cache.home().and_then(|slot| self.devices.get(&slot));
        if home.is_some_and(|device| device.is_serving()) {
            self.cache.close();
            self.go_on_closing();
            return;
        }
        for asked in self.cache.end() {
            self.read_own(now, asked, false, out);
        }
    }

    /// Gives back what can be, of a home that is left. True where that was the last of it.
    fn go_on_closing(&mut self) -> bool {
        let Some(home) = self.cache.home().filter(|_| self.cache.is_closing()) else { return false };
        let device = self.devices.get_mut(&home).expect("the home is a device");
        while let Some(first) = self.cache.give_back() {
            device.take_back(first);
        }
        if !self.cache.is_empty() {
            return false;
        }
        let left = self.cache.end();
        assert!(left.is_empty(), "it is empty");
        true
    }

    /// Nothing is held of a shard that its device does not hold; the home has lent what the cache has.
    pub(crate) fn verify_cache(&self) {
        self.cache.verify();
        for at in self.cache.shards() {
            let holds = self.devices.get(&at.slot).is_some_and(|device| device.holds(at.shard, 0, 1));
            assert!(holds, "the cache holds {at:?}, and its device does not");
        }
    }
}
