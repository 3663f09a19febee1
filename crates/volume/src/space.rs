//! Space: how much room the grid has for this volume's data, and what writes do while there is little.
//!
//! While segments hold dead blocks worth cleaning, writes are slowed as room goes down, and at the reserve they are held
//! back: the cleaner's moves and the destaging of what is acknowledged use the reserve. They are refused when there is
//! nothing to clean, or cleaning has freed nothing for [`PATIENCE`]. Discards are never held back by this: they free.
//!
//! Room is what the devices told last ([`ask_for_room`](Controller::ask_for_room)), less what was placed there since, less
//! what the log holds and will need, less what others own and have not used yet ([`Event::SetAside`](crate::Event)). Only
//! guests' writes stop at what others own: cleaning, destaging and metadata use all that is there.

use crate::api::{SpaceUse, State};
use crate::claims::{Claim, take};
use crate::controller::{Controller, Out};
use crate::placement::is_of;
use crate::reserve::reserve;
use crate::tiers::Place;
use holdfast_base::Instant;
use holdfast_format::geometry::Layout;
use holdfast_format::wire::DeviceStat;
use std::time::Duration;

/// How long writes are held back while nothing is freed.
const PATIENCE: Duration = Duration::from_secs(5);

/// Held back, they look again this often.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// While room is tight nodes are asked this often for their state.
const ASK_EVERY: Duration = Duration::from_millis(100);

/// What was freed is in the devices' answers after this long.
const TOLD_AFTER: Duration = Duration::from_secs(1);

/// After destaging found no room.
const REFUSED_PAUSE: Duration = Duration::from_millis(20);

/// Dead share from which cleaning is expected to free space: with less, moving costs more than it gives.
pub const DEAD_PER_MILLE_MIN: u64 = 50;

/// Share of a device, and shards of full segments, of which the greater is the room that the cleaner keeps: what is dead and
/// left alone makes cleaning cheap, and what is free does not. From a quarter of it on writes are slowed.
const WANTED_PER_MILLE: u64 = 6;
const WANTED_SHARDS: u64 = 6;

/// The cleaner may move what fills this part of the free room before a checkpoint frees what it emptied.
const MOVABLE_PART: u64 = 4;

#[derive(Debug, Default)]
pub(crate) struct Space {
    /// Since when guests' data has found no room.
    short_since: Option<Instant>,
    /// When data segments were last found dead: what checkpoints and attempts give back is no gain.
    freed_at: Instant,
    asked_at: Instant,
    /// After a segment found no room.
    destage_from: Instant,
    room: Room,
    /// The same of the capacity tier alone: what the cleaner goes by.
    capacity: Room,
    /// What others own.
    claims: Vec<Claim>,
    /// What the first write that waits needs of a device, where others own room.
    needed_bytes: u64,
}

/// Free above the reserve, on the device that decides whether guests' data has room.
#[derive(Clone, Copy, Debug)]
struct Room {
    bytes: u64,
    /// Of its capacity, in 1/1000.
    per_mille: u64,
    /// So much the cleaner keeps.
    wanted_bytes: u64,
}

impl Default for Room {
    fn default() -> Room {
        Room { bytes: u64::MAX, per_mille: 1000, wanted_bytes: 0 }
    }
}

impl Space {
    pub(crate) fn on_destage_refused(&mut self, now: Instant) {
        self.destage_from = now + REFUSED_PAUSE;
    }

    /// Whether a segment of guests' data may find room.
    pub(crate) fn may_destage(&self, now: Instant) -> bool {
        now >= self.destage_from
    }

    pub(crate) fn on_dead(&mut self, now: Instant) {
        self.freed_at = now;
    }
}

/// What so many bytes of guests' data take of all nodes together.
fn raw_bytes(layout: Layout, bytes: u64) -> u64 {
    bytes * u64::from(layout.shard_count()) / u64::from(layout.data_shards())
}

impl Controller {
    /// What the volume's segments are made of.
    pub fn space_use(&self) -> SpaceUse {
        self.segments.own_totals().space
    }

    /// Guests' data that was let in and is in no segment yet.
    pub fn unplaced_bytes(&self) -> u64 {
        self.log.bytes + self.bypass.in_flight_bytes
    }

    pub(crate) fn on_set_aside(&mut self, claims: Vec<Claim>) {
        self.space.claims = claims;
        if matches!(self.state, State::Open | State::Closing) {
            self.look_for_room();
        }
    }

    /// Looks at the device that decides: of as many nodes as a segment is wide, those with the most room, the fullest one's
    /// emptiest device. Where no segment can be written the log takes what it can.
    pub(crate) fn look_for_room(&mut self) {
        let capacity = self.capacity_place().and_then(|place| self.room_at(place));
        let first = self.first_place().and_then(|place| self.room_at(place));
        // What one tier has no room for goes to the other.
        self.space.room = capacity.into_iter().chain(first).max_by_key(|room| room.bytes).unwrap_or_default();
        self.space.capacity = capacity.unwrap_or_default();
        if self.space.room.bytes > self.space.needed_bytes {
            self.space.short_since = None;
        }
    }

    fn room_at(&self, Place { layout, media }: Place) -> Option<Room> {
        let usable = self.peers.usable();
        let above_reserve = |d: &DeviceStat| d.free_bytes.saturating_sub(reserve(&self.basis.config, d));
        // By node: what it has, and its emptiest device. Devices of a node that is alone stand for nodes.
        let by_node = usable.filter_map(|(_, n)| {
            let serving = || n.devices().filter(|d| self.peers.takes_shards(d) && is_of(d, media));
            // Of a nested layout as many of them are needed as a node holds shards.
            let mut by_room: Vec<&DeviceStat> = serving().collect();
            by_room.sort_unstable_by_key(|d| std::cmp::Reverse(d.free_bytes));
            let emptiest = *by_room.get(usize::from(layout.shards_a_domain()) - 1)?;
            Some((serving().map(above_reserve).sum(), emptiest))
        });
        let nodes: Vec<(u64, &DeviceStat)> = match self.is_alone() || self.basis.is_on_devices() {
            true => self.usable_devices().filter(|d| is_of(d, media)).map(|d| (above_reserve(d), d)).collect(),
            false => by_node.collect(),
        };
        let mut left: Vec<u64> = nodes.iter().map(|(sum, _)| *sum).collect();
        for claim in &self.space.claims {
            take(&mut left, *claim);
        }
        // What others own of a node they own of each of its devices.
        let ours = |left: u64, sum: u64, of: u64| (u128::from(of) * u128::from(left) / u128::from(sum.max(1))) as u64;
        let shares = nodes.iter().zip(&left).map(|((sum, d), left)| (ours(*left, *sum, above_reserve(d)), *d));
        let mut devices: Vec<(u64, &DeviceStat)> = shares.collect();
        devices.sort_unstable_by_key(|(above_reserve, _)| std::cmp::Reverse(*above_reserve));
        let width = u64::from(layout.width());
        let (above_reserve, decisive) = *devices.get(width as usize - 1)?;
        // Where nothing is set aside what bulk writes take is seen when they have taken it.
        let let_in = if self.space.claims.is_empty() { self.undestaged_bytes() } else { self.unplaced_bytes() };
        let spread = devices.len() as u64 * u64::from(layout.shards_a_domain());
        let bytes = above_reserve.saturating_sub(raw_bytes(layout, let_in) / spread);
        let capacity = decisive.capacity_bytes;
        let shard = u64::from(self.basis.config.segment_payload_bytes) / u64::from(layout.data_shards());
        let wanted_bytes = (capacity * WANTED_PER_MILLE / 1000).max((WANTED_SHARDS * shard).min(capacity / 8));
        Some(Room { bytes, per_mille: bytes * 1000 / capacity.max(1), wanted_bytes })
    }

    /// What the log holds that no segment has yet. What only waits to be trimmed needs no room. Shards that are being put do until they
    /// are durable: what was placed counts until a device tells what it has free, and it may tell that before it has begun with them.
    fn undestaged_bytes(&self) -> u64 {
        self.log.waiting_bytes() + self.log.in_flight_bytes() + self.unwritten_destage_bytes()
    }

    /// Payload that the cleaner may move before a checkpoint frees what was emptied: a quarter of what is free on all usable
    /// devices together, as far as that is no more than twice the reserve.
    pub(crate) fn movable_payload_bytes(&self) -> u64 {
        let Some(layout) = self.layout_now() else { return 0 };
        let free: u64 = self.usable_devices().map(|d| d.free_bytes.min(2 * reserve(&self.basis.config, d))).sum();
        free / MOVABLE_PART * u64::from(layout.data_shards()) / u64::from(layout.shard_count())
    }

    /// Whether a guest's write fits. Where others own room all of it must, and it counts at once, not with the next look.
    pub(crate) fn has_room_for(&mut self, len: u64) -> bool {
        self.space.needed_bytes = self.bytes_of_a_device(len);
        self.space.room.bytes > self.space.needed_bytes
    }

    pub(crate) fn charge_room(&mut self, len: u64) {
        self.space.needed_bytes = 0;
        self.space.room.bytes = self.space.room.bytes.saturating_sub(self.bytes_of_a_device(len));
    }

    fn bytes_of_a_device(&self, len: u64) -> u64 {
        let layout = self.layout_now().filter(|_| !self.space.claims.is_empty());
        let spread = if self.is_alone() { self.usable_devices().count() } else { self.domain_count().max(1) };
        layout.map_or(0, |layout| raw_bytes(layout, len).div_ceil(spread as u64 * u64::from(layout.shards_a_domain())))
    }

    /// Whether guests' writes still fit above the reserve.
    pub(crate) fn has_room(&self) -> bool {
        self.space.room.bytes > 0
    }

    /// Whether the cleaner is to make room.
    pub(crate) fn wants_room(&self) -> bool {
        self.space.capacity.bytes < self.space.capacity.wanted_bytes
    }

    /// Free share above the reserve of the device that decides, in 1/1000.
    pub(crate) fn room_per_mille(&self) -> u64 {
        self.space.capacity.per_mille
    }

    /// A guest's data finds no room: when to look again, if the cleaner is expected to make some.
    pub(crate) fn room_expected_at(&mut self) -> Option<Instant> {
        let since = (*self.space.short_since.get_or_insert(self.basis.now)).max(self.space.freed_at);
        if self.may_make_room() && self.basis.now.since(since) < PATIENCE {
            return Some(self.basis.now + LOOK_EVERY);
        }
        // What comes next is waited for anew, if there is cause.
        self.space.short_since = None;
        self.space.needed_bytes = 0;
        None
    }

    /// Whether something is dead, or may turn out to be, or is on its way to be free.
    fn may_make_room(&self) -> bool {
        let told = self.basis.now.since(self.space.freed_at) >= TOLD_AFTER;
        self.segments.dead_per_mille() >= DEAD_PER_MILLE_MIN
            || self.checkpointer.unfolded
            || self.layers.any_goes()
            || !self.log.all_destaged()
            || !self.checkpointer.is_idle()
            || !self.checkpointer.freeing.is_empty()
            || !self.cleaner.is_idle()
            || !told
    }

    /// Whether guests' data waits for room.
    pub(crate) fn is_short_of_room(&self) -> bool {
        self.space.short_since.is_some()
    }

    /// A write waits for room, or less than an eighth is left of what the cleaner keeps.
    pub(crate) fn is_nearly_full(&self) -> bool {
        self.is_short_of_room() || self.space.capacity.bytes < self.space.capacity.wanted_bytes / 8
    }

    /// How far room has gone down from where writes begin to be slowed, in 1/1000; 0 where nothing can be cleaned.
    pub(crate) fn tightness_per_mille(&self) -> u64 {
        if self.segments.dead_per_mille() < DEAD_PER_MILLE_MIN {
            return 0;
        }
        let Room { bytes, wanted_bytes, .. } = self.space.room;
        // The curve begins at half of this.
        let tight_bytes = wanted_bytes / 2;
        tight_bytes.saturating_sub(bytes) * 1000 / tight_bytes.max(1)
    }

    /// While room is tight a second is too long to wait for word of what was freed.
    pub(crate) fn ask_for_room(&mut self, out: Out) {
        if self.basis.now.since(self.space.asked_at) < ASK_EVERY || !self.wants_room() {
            return;
        }
        self.space.asked_at = self.basis.now;
        for node in self.peers.ids() {
            self.peers.ask_state(self.basis.now, node, out);
        }
    }
}
