//! Room: how much the grid has for this volume's data, and what writes do while there is little.
//!
//! While segments hold dead blocks worth cleaning, writes are slowed as room goes down, and at the reserve they are
//! held back: the cleaner's moves and the destaging of what is acknowledged use the reserve. They are refused when
//! there is nothing to clean, or cleaning has freed nothing for [`PATIENCE`]. Discards are never held back by this:
//! they free.
//!
//! Room is what the devices told last ([`Room::ask`]), less what was placed there since, less what the log holds and
//! will need, less what others own and have not used yet ([`Event::SetAside`](crate::Event)). Only guests' writes stop
//! at what others own: cleaning, destaging and metadata use all that is there.

use super::claims::{Claim, take};
use super::reserve::reserve;
use super::topology::{Place, Topology, is_of};
use crate::api::Out;
use crate::peers::Peers;
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

/// Share of a device, and shards of full segments, of which the greater is the room that the cleaner keeps: what is
/// dead and left alone makes cleaning cheap, and what is free does not. From a quarter of it on writes are slowed.
const WANTED_PER_MILLE: u64 = 6;
const WANTED_SHARDS: u64 = 6;

/// The cleaner may move what fills this part of the free room before a checkpoint frees what it emptied.
const MOVABLE_PART: u64 = 4;

#[derive(Debug, Default)]
pub(crate) struct Room {
    /// Since when guests' data has found no room.
    short_since: Option<Instant>,
    /// When data segments were last found dead: what checkpoints and attempts give back is no gain.
    freed_at: Instant,
    asked_at: Instant,
    /// After a segment found no room.
    destage_from: Instant,
    free: Free,
    /// The same of the capacity tier alone: what the cleaner goes by.
    capacity: Free,
    /// What others own.
    claims: Vec<Claim>,
    /// What the first write that waits needs of a device, where others own room.
    needed_bytes: u64,
}

/// Free above the reserve, on the device that decides whether guests' data has room.
#[derive(Clone, Copy, Debug)]
struct Free {
    bytes: u64,
    /// Of its capacity, in 1/1000.
    per_mille: u64,
    /// So much the cleaner keeps.
    wanted_bytes: u64,
}

impl Default for Free {
    fn default() -> Free {
        Free { bytes: u64::MAX, per_mille: 1000, wanted_bytes: 0 }
    }
}

/// Guests' data that was let in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LetIn {
    /// What the log holds that no segment has yet. What only waits to be trimmed needs no room. Shards that are being
    /// put do until they are durable: what was placed counts until a device tells what it has free, and it may tell
    /// that before it has begun with them.
    pub(crate) undestaged_bytes: u64,
    /// What is in no segment yet, direct writes included.
    pub(crate) unplaced_bytes: u64,
}

/// What so many bytes of guests' data take of all nodes together.
fn raw_bytes(layout: Layout, bytes: u64) -> u64 {
    bytes * u64::from(layout.shard_count()) / u64::from(layout.data_shards())
}

impl Room {
    // ---- what changes it ----

    pub(crate) fn on_destage_refused(&mut self, now: Instant) {
        self.destage_from = now + REFUSED_PAUSE;
    }

    pub(crate) fn on_dead(&mut self, now: Instant) {
        self.freed_at = now;
    }

    pub(crate) fn set_claims(&mut self, claims: Vec<Claim>) {
        self.claims = claims;
    }

    /// Looks at the device that decides: of as many nodes as a segment is wide, those with the most room, the fullest
    /// one's emptiest device. Where no segment can be written the log takes what it can.
    pub(crate) fn look(&mut self, topology: Topology<'_>, let_in: LetIn) {
        let capacity = topology.capacity_place().and_then(|place| self.free_at(topology, place, let_in));
        let first = topology.first_place().and_then(|place| self.free_at(topology, place, let_in));
        // What one tier has no room for goes to the other.
        self.free = capacity.into_iter().chain(first).max_by_key(|free| free.bytes).unwrap_or_default();
        self.capacity = capacity.unwrap_or_default();
        if self.free.bytes > self.needed_bytes {
            self.short_since = None;
        }
    }

    fn free_at(&self, topology: Topology<'_>, Place { layout, media }: Place, let_in: LetIn) -> Option<Free> {
        let (config, peers) = (&topology.basis.config, topology.peers);
        let above_reserve = |d: &DeviceStat| d.free_bytes.saturating_sub(reserve(config, d));
        // By node: what it has, and its emptiest device. Devices of a node that is alone stand for nodes.
        let by_node = peers.usable().filter_map(|(_, n)| {
            let serving = || n.devices().filter(|d| peers.takes_shards(d) && is_of(d, media));
            // Of a nested layout as many of them are needed as a node holds shards.
            let mut by_room: Vec<&DeviceStat> = serving().collect();
            by_room.sort_unstable_by_key(|d| std::cmp::Reverse(d.free_bytes));
            let emptiest = *by_room.get(usize::from(layout.shards_a_domain()) - 1)?;
            Some((serving().map(above_reserve).sum(), emptiest))
        });
        let nodes: Vec<(u64, &DeviceStat)> = match topology.is_alone() || topology.basis.is_on_devices() {
            true => topology.usable_devices().filter(|d| is_of(d, media)).map(|d| (above_reserve(d), d)).collect(),
            false => by_node.collect(),
        };
        let mut left: Vec<u64> = nodes.iter().map(|(sum, _)| *sum).collect();
        for claim in &self.claims {
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
        let let_in = if self.claims.is_empty() { let_in.undestaged_bytes } else { let_in.unplaced_bytes };
        let spread = devices.len() as u64 * u64::from(layout.shards_a_domain());
        let bytes = above_reserve.saturating_sub(raw_bytes(layout, let_in) / spread);
        let capacity = decisive.capacity_bytes;
        let shard = u64::from(config.segment_payload_bytes) / u64::from(layout.data_shards());
        let wanted_bytes = (capacity * WANTED_PER_MILLE / 1000).max((WANTED_SHARDS * shard).min(capacity / 8));
        Some(Free { bytes, per_mille: bytes * 1000 / capacity.max(1), wanted_bytes })
    }

    /// While room is tight a second is too long to wait for word of what was freed.
    pub(crate) fn ask(&mut self, now: Instant, peers: &mut Peers, out: Out) {
        if now.since(self.asked_at) < ASK_EVERY || !self.is_wanted() {
            return;
        }
        self.asked_at = now;
        for node in peers.ids() {
            peers.ask_state(now, node, out);
        }
    }

    // ---- guests' writes ----

    /// Whether a guest's write fits. Where others own room all of it must, and it counts at once, not with the next
    /// look.
    pub(crate) fn has_room_for(&mut self, topology: Topology<'_>, len: u64) -> bool {
        self.needed_bytes = self.bytes_of_a_device(topology, len);
        self.free.bytes > self.needed_bytes
    }

    pub(crate) fn charge(&mut self, topology: Topology<'_>, len: u64) {
        self.needed_bytes = 0;
        self.free.bytes = self.free.bytes.saturating_sub(self.bytes_of_a_device(topology, len));
    }

    fn bytes_of_a_device(&self, topology: Topology<'_>, len: u64) -> u64 {
        let layout = topology.layout_now().filter(|_| !self.claims.is_empty());
        let spread = match topology.is_alone() {
            true => topology.usable_devices().count(),
            false => topology.domain_count().max(1),
        };
        layout.map_or(0, |layout| raw_bytes(layout, len).div_ceil(spread as u64 * u64::from(layout.shards_a_domain())))
    }

    /// A guest's data finds no room: when to look again, if some may be made, and is expected to be.
    pub(crate) fn expected_at(&mut self, now: Instant, may_be_made: bool) -> Option<Instant> {
        let since = (*self.short_since.get_or_insert(now)).max(self.freed_at);
        if (may_be_made || self.is_untold(now)) && now.since(since) < PATIENCE {
            return Some(now + LOOK_EVERY);
        }
        // What comes next is waited for anew, if there is cause.
        self.short_since = None;
        self.needed_bytes = 0;
        None
    }

    /// What was freed last may not be in the devices' answers yet.
    fn is_untold(&self, now: Instant) -> bool {
        now.since(self.freed_at) < TOLD_AFTER
    }

    /// How far room has gone down from where writes begin to be slowed, in 1/1000; 0 where nothing can be cleaned.
    pub(crate) fn tightness_per_mille(&self, dead_per_mille: u64) -> u64 {
        if dead_per_mille < DEAD_PER_MILLE_MIN {
            return 0;
        }
        let Free { bytes, wanted_bytes, .. } = self.free;
        // The curve begins at half of this.
        let tight_bytes = wanted_bytes / 2;
        tight_bytes.saturating_sub(bytes) * 1000 / tight_bytes.max(1)
    }

    // ---- how much there is ----

    /// Whether a segment of guests' data may find room.
    pub(crate) fn may_destage(&self, now: Instant) -> bool {
        now >= self.destage_from
    }

    /// Whether guests' writes still fit above the reserve.
    pub(crate) fn is_left(&self) -> bool {
        self.free.bytes > 0
    }

    /// Whether the cleaner is to make room.
    pub(crate) fn is_wanted(&self) -> bool {
        self.capacity.bytes < self.capacity.wanted_bytes
    }

    /// Free share above the reserve of the device that decides, in 1/1000.
    pub(crate) fn per_mille(&self) -> u64 {
        self.capacity.per_mille
    }

    /// Whether guests' data waits for room.
    pub(crate) fn is_short(&self) -> bool {
        self.short_since.is_some()
    }

    /// A write waits for room, or less than an eighth is left of what the cleaner keeps.
    pub(crate) fn is_nearly_gone(&self) -> bool {
        self.is_short() || self.capacity.bytes < self.capacity.wanted_bytes / 8
    }

    /// Asserts what must hold between events (tests and the simulator).
    pub(crate) fn verify(&self, now: Instant) {
        assert!(self.short_since.is_none_or(|since| since <= now), "room is short from later on");
        assert!(self.freed_at <= now && self.asked_at <= now, "room was freed, or asked for, later on");
        assert!(self.free.per_mille <= 1000 && self.capacity.per_mille <= 1000, "more is free than there is");
    }
}

/// Payload that the cleaner may move before a checkpoint frees what was emptied: a quarter of what is free on all
/// usable devices together, as far as that is no more than twice the reserve.
pub(crate) fn movable_payload_bytes(topology: Topology<'_>) -> u64 {
    let Some(layout) = topology.layout_now() else { return 0 };
    let config = &topology.basis.config;
    let free: u64 = topology.usable_devices().map(|d| d.free_bytes.min(2 * reserve(config, d))).sum();
    free / MOVABLE_PART * u64::from(layout.data_shards()) / u64::from(layout.shard_count())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::basis::Basis;
    use crate::basis::tests::basis;
    use crate::peers::tests::{CAPACITY, leg, peers, stat};
    use holdfast_base::{Effects, NodeId};

    const AT: Instant = Instant(10_000_000_000);
    const NOTHING: LetIn = LetIn { undestaged_bytes: 0, unplaced_bytes: 0 };

    /// Three nodes of one device each, with so many bytes free.
    fn rig(free: [u64; 3]) -> (Basis, Peers) {
        let mut basis = basis("mirror:2");
        basis.now = AT;
        let mut peers = peers(AT, &[1, 1, 1]);
        set_free(&mut peers, free);
        (basis, peers)
    }

    fn set_free(peers: &mut Peers, free: [u64; 3]) {
        for (node, free_bytes) in (1..).zip(free) {
            peers.on_stat(NodeId(node), vec![DeviceStat { free_bytes, ..stat(leg(node, 0)) }]);
        }
    }

    fn looked(basis: &Basis, peers: &Peers, let_in: LetIn) -> Room {
        let mut room = Room::default();
        room.look(Topology::new(basis, peers), let_in);
        room.verify(basis.now);
        room
    }

    #[test]
    fn the_emptiest_nodes_that_a_segment_needs_decide_and_the_log_counts() {
        let (basis, peers) = rig([CAPACITY, 0, CAPACITY / 2]);
        let reserve = reserve(&basis.config, &stat(leg(1, 0)));
        assert_eq!(looked(&basis, &peers, NOTHING).free.bytes, CAPACITY / 2 - reserve);
        // Two copies, over three devices.
        let in_log = LetIn { undestaged_bytes: 3 << 20, unplaced_bytes: 1 << 40 };
        assert_eq!(looked(&basis, &peers, in_log).free.bytes, CAPACITY / 2 - reserve - (2 << 20));
    }

    #[test]
    fn what_others_own_is_not_for_guests() {
        let (basis, peers) = rig([CAPACITY; 3]);
        let topology = Topology::new(&basis, &peers);
        let mut room = looked(&basis, &peers, NOTHING);
        let all = room.free.bytes;
        assert!(room.has_room_for(topology, 1 << 50), "nothing is set aside: it is seen when it has taken it");
        room.set_claims(vec![Claim { width: 3, shard_bytes: all - (1 << 20) }]);
        room.look(topology, NOTHING);
        assert_eq!(room.free.bytes, 1 << 20);
        // Two copies of it, on three devices.
        assert!(room.has_room_for(topology, 1 << 20) && !room.has_room_for(topology, 2 << 20));
        room.charge(topology, 1 << 20);
        assert!(!room.has_room_for(topology, 1 << 20));
    }

    #[test]
    fn a_write_waits_while_room_is_expected_and_no_longer_than_patience() {
        let (basis, peers) = rig([0; 3]);
        let mut room = looked(&basis, &peers, NOTHING);
        assert!(!room.is_left() && room.is_wanted() && room.is_nearly_gone() && !room.is_short());
        assert_eq!(room.expected_at(AT, false), None);
        assert_eq!(room.expected_at(AT, true), Some(AT + LOOK_EVERY));
        assert!(room.is_short());
        room.on_dead(AT + Duration::from_secs(4));
        let later = AT + PATIENCE + Duration::from_secs(3);
        assert_eq!(room.expected_at(later, true), Some(later + LOOK_EVERY), "something was freed meanwhile");
        assert_eq!(room.expected_at(later + Duration::from_secs(1), true), None);
        assert!(!room.is_short());
    }

    #[test]
    fn writes_are_slowed_from_half_of_what_the_cleaner_keeps_if_something_can_be_cleaned() {
        let (basis, mut peers) = rig([0; 3]);
        assert_eq!(looked(&basis, &peers, NOTHING).tightness_per_mille(500), 1000);
        assert_eq!(looked(&basis, &peers, NOTHING).tightness_per_mille(DEAD_PER_MILLE_MIN - 1), 0);
        set_free(&mut peers, [CAPACITY; 3]);
        assert_eq!(looked(&basis, &peers, NOTHING).tightness_per_mille(500), 0);
    }

    #[test]
    fn nodes_are_asked_while_room_is_tight() {
        let (basis, mut peers) = rig([0; 3]);
        let (mut room, mut out) = (looked(&basis, &peers, NOTHING), Effects::new());
        room.ask(AT, &mut peers, &mut out);
        room.ask(AT + ASK_EVERY / 2, &mut peers, &mut out);
        assert_eq!(out.take().len(), 3);
        assert!(movable_payload_bytes(Topology::new(&basis, &peers)) == 0);
    }
}
