//! Fixed volumes: room that is set aside for what they have not written yet.
//!
//! ```text
//! settings/ID            (metadata) of a volume: whether it is fixed, and what is not counted as written by it
//! ```
//! A fixed volume owns its size and a sixteenth, in its layout. What its segments take comes off that, also what is dead in
//! them: of a volume that is overwritten there is always some, and with the sixteenth it is enough that the cleaner always
//! has something to gain. The rest is set aside. Other volumes' guests don't write to it, nor does what is in their logs and
//! has yet to find a place; see [`holdfast_volume::claims`].
//!
//! A snapshot keeps what is overwritten after it. So all that is there when one is taken counts no more as written by the
//! volume, until it has no snapshots.

use super::catalog::{Entry, Reserving};
use super::commands::Command;
use super::control::ControlPlane;
use super::volumes::Volumes;
use super::{DEVICES_SHOWN_WITHIN, Host};
use crate::logger;
use crate::size::Size;
use anyhow::Result;
use holdfast_api::{Code, LinkState, VolumeInfo, VolumeState, free_of, refuse};
use holdfast_base::{Instant, Token, VolumeId};
use holdfast_format::geometry::Layout;
use holdfast_runtime::reactor::Io;
use holdfast_volume::claims::writable_beside;
use holdfast_volume::{Claim, Event as VolumeEvent, State};
use std::collections::BTreeMap;
use std::time::Duration;

/// Part of its size that a fixed volume owns besides: more than the dead share that the cleaner leaves alone, and headers.
const SLACK_PART: u64 = 16;

/// Others are told the most of so many looks: what devices tell is older than what volumes do.
const LOOKS: usize = 3;

/// How often it is looked again when others have set space aside meanwhile.
const RESERVE_TRIES: u32 = 50;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fixed {
    /// Bytes in segments that the volume has not written since its last snapshot; all that there are while one is taken.
    pub base_bytes: u64,
    /// What was left to write when it was last noted, with the sixteenth: it stands while the volume is not in service.
    pub left_bytes: u64,
}

/// A fixed volume, as the reactor keeps it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FixedVolume {
    pub layout: Layout,
    pub fixed: Fixed,
    recent: [u64; LOOKS],
}

impl FixedVolume {
    pub fn new(layout: Layout, fixed: Fixed) -> FixedVolume {
        FixedVolume { layout, fixed, recent: [fixed.left_bytes; LOOKS] }
    }

    fn see(&mut self, layout: Layout, left_bytes: u64) {
        self.layout = layout;
        self.fixed.left_bytes = left_bytes;
        self.recent.rotate_right(1);
        self.recent[0] = left_bytes;
    }

    /// Goes on from what was known of the volume.
    pub fn after(mut self, before: &FixedVolume) -> FixedVolume {
        self.recent = before.recent;
        self.see(self.layout, self.fixed.left_bytes);
        self
    }

    fn claim(&self) -> Claim {
        Claim::of(self.layout, self.recent.iter().copied().max().unwrap_or_default())
    }

    /// Of devices.
    pub fn set_aside_bytes(&self) -> u64 {
        Claim::of(self.layout, self.fixed.left_bytes).raw_bytes()
    }
}

/// What a fixed volume owns, without redundancy.
pub fn owned_bytes(size_bytes: u64) -> u64 {
    size_bytes + size_bytes / SLACK_PART
}

/// What it has not used of that; `taken_bytes` of payload are in its segments.
fn left_bytes(size_bytes: u64, taken_bytes: u64, base_bytes: u64) -> u64 {
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
    fn look_at_fixed(&mut self) {
        for (_, volume) in self.table.iter() {
            let Some(fixed) = self.fixed.get_mut(&volume.id) else { continue };
            let (Some(size), Some(layout)) = (volume.controller.size_bytes(), volume.controller.layout()) else {
                continue;
            };
            if matches!(volume.controller.state(), State::Open | State::Closing) {
                let space = volume.controller.space_use();
                let taken = space.data_bytes + space.dead_bytes;
                fixed.see(layout, left_bytes(size, taken, fixed.fixed.base_bytes));
            }
        }
    }

    /// What each volume owns, or has taken on and not placed: by volume, and of all together.
    fn owned(&self) -> (BTreeMap<VolumeId, Claim>, Sum) {
        let fixed = self.fixed.iter().map(|(id, fixed)| (*id, fixed.claim()));
        let logs = self.table.iter().filter(|(_, v)| !self.fixed.contains_key(&v.id));
        let logs = logs.map(|(_, v)| (v.id, Claim::of(v.layout(), v.controller.unplaced_bytes())));
        let owned: BTreeMap<VolumeId, Claim> = fixed.chain(logs).collect();
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

    /// For each open volume that has not heard it yet.
    fn claims_to_tell(&mut self) -> Vec<(Token, Vec<Claim>)> {
        let (owned, sum) = self.owned();
        let mut news = Vec::new();
        for at in self.table.tokens() {
            let volume = self.table.get_mut(at).expect("listed");
            let others = self.fixed.len() - usize::from(self.fixed.contains_key(&volume.id));
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
    /// Looks what is set aside, and tells the volumes that it is set aside from.
    pub(super) fn tell_set_aside(&mut self, now: Instant, io: &mut Io) {
        self.volumes.look_at_fixed();
        self.tell_claims(now, io);
    }

    pub(super) fn tell_claims(&mut self, now: Instant, io: &mut Io) {
        for (at, claims) in self.volumes.claims_to_tell() {
            self.drive(now, at, VolumeEvent::SetAside { claims }, io);
        }
    }
}

impl ControlPlane {
    /// This host serves the volume, or nobody does.
    pub(super) fn has_care_of(&self, entry: &Entry) -> bool {
        entry.served_by.is_none() || self.catalog.is_here(entry)
    }

    /// Has the record of a fixed volume say what it has left. To be called alone.
    pub(super) fn note_fixed(&self, volume: VolumeId, fixed: Fixed, has_new_base: bool) -> Result<()> {
        let Some(entry) = self.catalog.entry(volume)?.filter(|entry| !entry.root.deleted) else { return Ok(()) };
        // It may be fixed no more, or another host's.
        if entry.settings.fixed.is_none() || !self.has_care_of(&entry) {
            return Ok(());
        }
        if has_new_base {
            return self.set_fixed(&entry, Some(fixed));
        }
        self.catalog.change_settings(volume, |settings| settings.fixed = settings.fixed.map(|_| fixed))
    }

    /// Keeps it, and has the reactor go by it.
    fn set_fixed(&self, entry: &Entry, fixed: Option<Fixed>) -> Result<()> {
        let id = entry.root.volume;
        self.catalog.change_settings(id, |settings| settings.fixed = fixed)?;
        let fixed = fixed.map(|fixed| FixedVolume::new(entry.root.layout, fixed));
        self.ask(|answer| Command::SetFixed { id, fixed, answer })
    }

    /// A volume that is about to be made has its room from the beginning.
    pub(super) fn set_fixed_anew(&self, entry: &Entry) -> Result<()> {
        self.set_fixed(entry, entry.settings.fixed)
    }

    /// How much data can be set aside in a layout, beside what others own or are about to.
    fn free_to_own(&self, volume: Option<VolumeId>, layout: Layout, reserving: &Reserving) -> Result<u64> {
        let live = self.live()?;
        let free: Vec<Vec<u64>> =
            live.nodes.iter().filter(|n| n.link != LinkState::Down).map(|n| free_of(&n.devices)).collect();
        let mut claims = self.ask(|answer| Command::Claims { beside: volume, answer })?;
        claims.extend(reserving.pending_beside(volume).into_iter().map(|(layout, bytes)| Claim::of(layout, bytes)));
        Ok(writable_beside(&free, &claims, layout))
    }

    /// Sets space aside, if there is as much: `write` puts it into the records by a transaction that others' would come in the
    /// way of, and gives nothing where one has.
    pub(super) fn set_aside<T>(
        &self,
        what: &str,
        volume: Option<VolumeId>,
        (layout, bytes): (Layout, u64),
        mut write: impl FnMut(&Reserving) -> Result<Option<T>>,
    ) -> Result<T> {
        for _ in 0..RESERVE_TRIES {
            let reserving = self.catalog.reserving()?;
            // Whatever others have set aside up to there counts.
            self.records.sync()?;
            self.take_in_others_fixed()?;
            self.check_owned(what, volume, (layout, bytes), &reserving)?;
            if let Some(written) = write(&reserving)? {
                return Ok(written);
            }
            std::thread::sleep(Duration::from_millis(5 + u64::from(uuid::Uuid::new_v4().as_bytes()[0] % 46)));
        }
        refuse!(Code::Changed, "{what}: others set space aside all the time; try again")
    }

    /// Refuses what would own more than there is.
    fn check_owned(
        &self,
        what: &str,
        volume: Option<VolumeId>,
        (layout, bytes): (Layout, u64),
        reserving: &Reserving,
    ) -> Result<()> {
        let mut free = self.free_to_own(volume, layout, reserving)?;
        if bytes > free {
            // What was freed a moment ago nodes have not told yet.
            std::thread::sleep(DEVICES_SHOWN_WITHIN);
            free = self.free_to_own(volume, layout, reserving)?;
        }
        if bytes > free {
            let trash = if self.catalog.trash()?.is_empty() { "" } else { " (`holdfast volume trash empty`)" };
            refuse!(
                Code::NoSpace,
                "{what} needs {} set aside in layout {layout}, a sixteenth for what is overwritten included, and {} is free \
                 beside what other fixed volumes own (`holdfast space why`); free space{trash}, add a device \
                 (`holdfast device add NODE`), choose a smaller size, or --provisioning thin",
                Size(bytes),
                Size(free)
            );
        }
        Ok(())
    }

    /// A volume comes to have this size and layout by `become_so`; if it is fixed, what it then owns is set aside before.
    pub(super) fn become_fixed<T>(
        &self,
        entry: &Entry,
        size_bytes: u64,
        layout: Layout,
        become_so: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let Some(fixed) = entry.settings.fixed.filter(|_| entry.clone.is_none()) else { return become_so() };
        let live = self.show(entry.name())?.live;
        let taken = live.map_or(0, |live| live.space.data_bytes + live.space.dead_bytes);
        let left = left_bytes(size_bytes, taken, fixed.base_bytes);
        let before = Claim::of(entry.root.layout, left_bytes(entry.root.size_bytes, taken, fixed.base_bytes));
        if Claim::of(layout, left).raw_bytes() <= before.raw_bytes() {
            return become_so();
        }
        let (what, volume, owned) = (format!("volume {}", entry.name()), entry.root.volume, (layout, left));
        self.set_aside(&what, Some(volume), owned, |reserving| {
            Ok(self.catalog.set_pending(volume, Some(owned), reserving)?.then_some(()))
        })?;
        let outcome = become_so();
        // From here on its own records say it. What stays noted for longer keeps others off for longer.
        let forget = || self.catalog.set_pending(volume, None, &self.catalog.reserving()?);
        for _ in 0..RESERVE_TRIES {
            match forget() {
                Ok(true) => break,
                Ok(false) => {}
                Err(error) => {
                    logger::warn(format_args!("{what}: what was set aside for it stays so: {error:#}"));
                    break;
                }
            }
        }
        outcome
    }

    fn set_fixed_aside(&self, what: &str, entry: &Entry, fixed: Fixed) -> Result<()> {
        let (volume, owned) = (entry.root.volume, (entry.root.layout, fixed.left_bytes));
        self.set_aside(what, Some(volume), owned, |reserving| {
            Ok(self.catalog.set_fixed_reserving(volume, fixed, reserving)?.then_some(()))
        })?;
        self.set_fixed(entry, Some(fixed))
    }

    pub(super) fn set_provisioning(&self, entry: &Entry, fixed: bool) -> Result<()> {
        let name = entry.name();
        if !fixed || entry.settings.fixed.is_some() {
            return if fixed { Ok(()) } else { self.set_fixed(entry, None) };
        }
        let clones = self.catalog.clones_of(entry.root.volume)?;
        if !clones.is_empty() {
            refuse!(
                Code::InUse,
                "volume {name} has clones ({}), which would write to what is set aside for it",
                clones.join(", ")
            );
        }
        let live = self.show(name)?;
        let Some(figures) = live.live.as_ref().filter(|_| live.state == VolumeState::Open) else {
            refuse!(Code::State, "volume {name} is not in service; `holdfast volume export {name}`, then try again");
        };
        let base_bytes = if figures.snapshots.is_empty() { 0 } else { held_bytes(&live) };
        let taken = figures.space.data_bytes + figures.space.dead_bytes;
        let left_bytes = left_bytes(live.size_bytes, taken, base_bytes);
        self.set_fixed_aside(&format!("volume {name}"), entry, Fixed { base_bytes, left_bytes })
    }

    /// A snapshot of a fixed volume is taken by `take`: all of the volume can be written once more.
    pub(super) fn snapshot_fixed(&self, entry: &Entry, take: impl FnOnce() -> Result<()>) -> Result<()> {
        let Some(before) = entry.settings.fixed.filter(|_| entry.clone.is_none()) else { return take() };
        let owned = owned_bytes(self.show(entry.name())?.size_bytes);
        let what = format!("volume {} is fixed, and after a snapshot", entry.name());
        // Until it is known what the snapshot holds, nothing counts as written after it.
        self.set_fixed_aside(&what, entry, Fixed { base_bytes: u64::MAX, left_bytes: owned })?;
        let taken = take();
        let base_bytes = match &taken {
            Ok(()) => held_bytes(&self.show(entry.name())?),
            Err(_) => before.base_bytes,
        };
        self.set_fixed(entry, Some(Fixed { base_bytes, left_bytes: owned }))?;
        taken
    }
}

/// What a snapshot that was just taken may hold: all that is live or on its way.
fn held_bytes(info: &VolumeInfo) -> u64 {
    info.live.as_ref().map_or(u64::MAX, |live| live.space.data_bytes + live.unplaced_bytes)
}

/// What doesn't count as written by the volume itself.
pub(super) fn base_now(live: &VolumeInfo, noted: u64) -> u64 {
    let any = live.live.as_ref().is_none_or(|live| !live.snapshots.is_empty());
    match (any, noted) {
        (false, _) => 0,
        // The host ended while a snapshot was taken.
        (true, u64::MAX) => held_bytes(live),
        (true, noted) => noted,
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
        let mut volume = FixedVolume::new(layout, Fixed { base_bytes: 0, left_bytes: 100 });
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
