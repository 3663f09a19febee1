//! Reservations: room that is set aside for fixed volumes, of what they have not written yet.
//!
//! A fixed volume owns its size and a sixteenth, in its layout. What its segments take comes off that, also what is dead in
//! them. Of a volume that is overwritten there is always some, and with the sixteenth it is enough that the cleaner always
//! has something to gain. The rest is set aside. Other volumes' clients don't write to it, nor does what is in their logs and
//! has yet to find a place; see [`holdfast_volume::claims`].
//!
//! A snapshot keeps what is overwritten after it. So all that is there when one is taken counts no more as written by the
//! volume, until it has no snapshots.

use crate::event::Effect;
use crate::groups::Sibling;
use crate::host::{Host, Out};
use crate::volumes::Volumes;
use holdfast_base::{Instant, Token, VolumeId};
use holdfast_format::geometry::Layout;
use holdfast_volume::{Claim, Event as VolumeEvent, State};
use std::collections::BTreeMap;

/// Part of its size that a fixed volume owns besides: more than the dead share that the cleaner leaves alone, and headers.
const SLACK_PART: u64 = 16;

/// Others are told the most of so many looks: what devices tell is older than what volumes do.
const LOOKS: usize = 3;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reservation {
    /// Bytes in segments that the volume has not written since its last snapshot; all that there are while one is taken.
    pub base_bytes: u64,
    /// What was left to write when it was last noted, with the sixteenth: it stands while the volume is not in service.
    pub left_bytes: u64,
}

/// A fixed volume, as a host keeps it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReservedVolume {
    pub layout: Layout,
    pub reservation: Reservation,
    recent: [u64; LOOKS],
}

impl ReservedVolume {
    pub fn new(layout: Layout, reservation: Reservation) -> ReservedVolume {
        ReservedVolume { layout, reservation, recent: [reservation.left_bytes; LOOKS] }
    }

    fn see(&mut self, layout: Layout, left_bytes: u64) {
        self.layout = layout;
        self.reservation.left_bytes = left_bytes;
        self.recent.rotate_right(1);
        self.recent[0] = left_bytes;
    }

    /// Goes on from what was known of the volume.
    pub fn after(mut self, before: &ReservedVolume) -> ReservedVolume {
        self.recent = before.recent;
        self.see(self.layout, self.reservation.left_bytes);
        self
    }

    fn claim(&self) -> Claim {
        Claim::of(self.layout, self.recent.iter().copied().max().unwrap_or_default())
    }

    /// Of devices.
    pub fn set_aside_bytes(&self) -> u64 {
        Claim::of(self.layout, self.reservation.left_bytes).raw_bytes()
    }
}

/// What a fixed volume owns, without redundancy.
pub fn owned_bytes(size_bytes: u64) -> u64 {
    size_bytes + size_bytes / SLACK_PART
}

/// What it has not used of that; `taken_bytes` of payload are in its segments.
pub fn left_bytes(size_bytes: u64, taken_bytes: u64, base_bytes: u64) -> u64 {
    owned_bytes(size_bytes).saturating_sub(taken_bytes.saturating_sub(base_bytes))
}

/// Claims by width.
#[derive(Clone, Default)]
struct Sum(BTreeMap<u8, u64>);

impl Sum {
    fn add(&mut self, claim: Claim) {
        *self.0.entry(claim.width).or_default() += claim.shard_bytes;
    }

    fn without(&self, own: Claim) -> Vec<Claim> {
        let bytes = |width: u8, bytes: u64| if width == own.width { bytes - own.shard_bytes } else { bytes };
        let claims = self.0.iter().map(|(width, sum)| Claim { width: *width, shard_bytes: bytes(*width, *sum) });
        claims.filter(|claim| claim.shard_bytes > 0).collect()
    }
}

impl Volumes {
    /// Sees what fixed volumes that are open have left.
    pub(crate) fn look_at_reservations(&mut self) {
        for (_, volume) in self.table.iter() {
            let Some(reservation) = self.reservations.get_mut(&volume.id) else { continue };
            let (Some(size), Some(layout)) = (volume.controller.size_bytes(), volume.controller.layout()) else {
                continue;
            };
            if matches!(volume.controller.state(), State::Open | State::Closing) {
                let space = volume.controller.space_use();
                let taken = space.data_bytes + space.dead_bytes;
                reservation.see(layout, left_bytes(size, taken, reservation.reservation.base_bytes));
            }
        }
    }

    /// Fixed volumes here of which other reactors have not heard yet what they own.
    fn reservations_to_tell(&mut self) -> Vec<(VolumeId, ReservedVolume)> {
        if self.siblings.is_empty() {
            return Vec::new();
        }
        let here = self.table.iter().filter_map(|(_, volume)| Some((volume.id, *self.reservations.get(&volume.id)?)));
        let here: BTreeMap<VolumeId, ReservedVolume> = here.collect();
        let news = here.iter().filter(|(id, reservation)| self.told_reservations.get(id) != Some(reservation));
        let news = news.map(|(id, reservation)| (*id, *reservation)).collect();
        self.told_reservations = here;
        news
    }

    /// What each volume owns, or has taken on and not placed: by volume, and of all together.
    fn owned(&self) -> (BTreeMap<VolumeId, Claim>, Sum) {
        let reservation = self.reservations.iter().map(|(id, reservation)| (*id, reservation.claim()));
        let logs = self.table.iter().filter(|(_, v)| !self.reservations.contains_key(&v.id));
        let logs = logs.map(|(_, v)| (v.id, Claim::of(v.layout(), v.controller.unplaced_bytes())));
        let owned: BTreeMap<VolumeId, Claim> = reservation.chain(logs).collect();
        let mut sum = Sum::default();
        owned.values().for_each(|claim| sum.add(*claim));
        (owned, sum)
    }

    /// What others own beside this volume, or beside all that there are.
    pub fn claims_beside(&self, volume: Option<VolumeId>) -> Vec<Claim> {
        let (owned, sum) = self.owned();
        let own = volume.and_then(|id| owned.get(&id).copied());
        sum.without(own.unwrap_or(Claim { width: 0, shard_bytes: 0 }))
    }

    /// What volumes here have taken on and not placed, beside this one; fixed ones own their room anyway.
    pub fn unplaced_beside(&self, volume: Option<VolumeId>) -> Vec<Claim> {
        let mut sum = Sum::default();
        let logs = self.table.iter().filter(|(_, v)| Some(v.id) != volume && !self.reservations.contains_key(&v.id));
        logs.for_each(|(_, v)| sum.add(Claim::of(v.layout(), v.controller.unplaced_bytes())));
        sum.without(Claim { width: 0, shard_bytes: 0 })
    }

    /// For each open volume that has not heard it yet.
    fn claims_to_tell(&mut self) -> Vec<(Token, Vec<Claim>)> {
        let (owned, sum) = self.owned();
        let mut news = Vec::new();
        for at in self.table.tokens() {
            let volume = self.table.get_mut(at).expect("listed");
            let others = self.reservations.len() - usize::from(self.reservations.contains_key(&volume.id));
            // Without a fixed volume to be kept from, what is in others' logs is nobody's business.
            let claims = if others == 0 { Vec::new() } else { sum.without(owned[&volume.id]) };
            if volume.told_claims != claims {
                volume.told_claims.clone_from(&claims);
                news.push((at, claims));
            }
        }
        news
    }
}

impl Host {
    /// Looks what is set aside, and tells the volumes that it is set aside from, on other reactors, too.
    pub(crate) fn tell_set_aside(&mut self, now: Instant, out: Out) {
        self.volumes.look_at_reservations();
        for (volume, reservation) in self.volumes.reservations_to_tell() {
            for reactor in self.volumes.siblings.clone() {
                out.push(Effect::Sibling { reactor, message: Sibling::Owns { volume, reservation } });
            }
        }
        self.tell_claims(now, out);
    }

    /// What a fixed volume of another reactor owns now.
    pub(crate) fn on_owned_elsewhere(&mut self, now: Instant, volume: VolumeId, reservation: ReservedVolume, out: Out) {
        // One that was told that it is fixed no more stays so; and one that has come here is known better.
        if self.volumes.find_id(volume).is_none() && self.volumes.reservations.contains_key(&volume) {
            self.volumes.reservations.insert(volume, reservation);
            self.tell_claims(now, out);
        }
    }

    pub(crate) fn tell_claims(&mut self, now: Instant, out: Out) {
        for (at, claims) in self.volumes.claims_to_tell() {
            self.drive(now, at, VolumeEvent::SetAside { claims }, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_goes_down_with_what_is_taken_and_not_below_nothing() {
        let size = 16 << 30;
        assert_eq!(left_bytes(size, 0, 0), 17 << 30);
        assert_eq!(left_bytes(size, 10 << 30, 0), 7 << 30);
        assert_eq!(left_bytes(size, 30 << 30, 0), 0);
        // After a snapshot of all of it.
        assert_eq!(left_bytes(size, 16 << 30, 16 << 30), 17 << 30);
        assert_eq!(left_bytes(size, 20 << 30, 16 << 30), 13 << 30);
        assert_eq!(left_bytes(size, 4 << 30, 16 << 30), 17 << 30, "never more than it owns");
        assert_eq!(left_bytes(size, 4 << 30, u64::MAX), 17 << 30);
    }

    #[test]
    fn others_are_told_the_most_of_the_last_looks() {
        let layout: Layout = "mirror:2".parse().unwrap();
        let mut volume = ReservedVolume::new(layout, Reservation { base_bytes: 0, left_bytes: 100 });
        volume.see(layout, 80);
        volume.see(layout, 60);
        assert_eq!(volume.claim(), Claim { width: 2, shard_bytes: 100 }, "devices may have told what they had before");
        volume.see(layout, 40);
        assert_eq!(volume.claim(), Claim { width: 2, shard_bytes: 80 });
        volume.see(layout, 90);
        assert_eq!(volume.claim(), Claim { width: 2, shard_bytes: 90 }, "more counts at once");
        assert_eq!(volume.set_aside_bytes(), 180);
    }

    #[test]
    fn nobody_is_told_of_his_own() {
        let mut sum = Sum::default();
        let (a, b) = (Claim { width: 2, shard_bytes: 10 }, Claim { width: 3, shard_bytes: 7 });
        [a, b, a].iter().for_each(|claim| sum.add(*claim));
        assert_eq!(sum.without(a), [a, b]);
        assert_eq!(sum.without(b), [Claim { width: 2, shard_bytes: 20 }]);
    }
}
