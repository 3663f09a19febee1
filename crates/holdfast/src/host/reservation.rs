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

use super::DEVICES_SHOWN_WITHIN;
use super::catalog::{Entry, Reserving};
use super::commands::Command;
use super::control::ControlPlane;
use crate::logger;
use anyhow::Result;
use holdfast_api::{Code, LinkState, VolumeInfo, VolumeState, free_of, refuse};
use holdfast_base::VolumeId;
use holdfast_base::size::Size;
use holdfast_format::geometry::Layout;
use holdfast_host::Order;
use holdfast_host::reservation::{Reservation, ReservedVolume, left_bytes, owned_bytes};
use holdfast_volume::Claim;
use holdfast_volume::claims::writable_beside;
use std::time::Duration;

/// How often it is looked again when others have set space aside meanwhile.
const RESERVE_TRIES: u32 = 50;

impl ControlPlane {
    /// This host serves the volume, or nobody does.
    pub(super) fn has_care_of(&self, entry: &Entry) -> bool {
        entry.served_by.is_none() || self.catalog.is_here(entry)
    }

    /// Has the record of a fixed volume say what it has left. To be called alone.
    pub(super) fn note_reservation(
        &self,
        volume: VolumeId,
        reservation: Reservation,
        has_new_base: bool,
    ) -> Result<()> {
        let Some(entry) = self.catalog.entry(volume)?.filter(|entry| !entry.root.deleted) else { return Ok(()) };
        // It may be fixed no more, or another host's.
        if entry.settings.reservation.is_none() || !self.has_care_of(&entry) {
            return Ok(());
        }
        if has_new_base {
            return self.set_reservation(&entry, Some(reservation));
        }
        self.catalog
            .change_settings(volume, |settings| settings.reservation = settings.reservation.map(|_| reservation))
    }

    /// Keeps it, and has the reactor go by it.
    fn set_reservation(&self, entry: &Entry, reservation: Option<Reservation>) -> Result<()> {
        let id = entry.root.volume;
        self.catalog.change_settings(id, |settings| settings.reservation = reservation)?;
        let reservation = reservation.map(|reservation| ReservedVolume::new(entry.root.layout, reservation));
        self.order(Order::SetReservation { volume: id, reservation }).map(drop)
    }

    /// A volume that is about to be made has its room from the beginning.
    pub(super) fn set_reservation_anew(&self, entry: &Entry) -> Result<()> {
        self.set_reservation(entry, entry.settings.reservation)
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
            self.take_in_others_reservations()?;
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
        let Some(reservation) = entry.settings.reservation.filter(|_| entry.clone.is_none()) else {
            return become_so();
        };
        let live = self.show(entry.name())?.live;
        let taken = live.map_or(0, |live| live.space.data_bytes + live.space.dead_bytes);
        let left = left_bytes(size_bytes, taken, reservation.base_bytes);
        let before = Claim::of(entry.root.layout, left_bytes(entry.root.size_bytes, taken, reservation.base_bytes));
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

    fn set_reservation_aside(&self, what: &str, entry: &Entry, reservation: Reservation) -> Result<()> {
        let (volume, owned) = (entry.root.volume, (entry.root.layout, reservation.left_bytes));
        self.set_aside(what, Some(volume), owned, |reserving| {
            Ok(self.catalog.set_reservation_reserving(volume, reservation, reserving)?.then_some(()))
        })?;
        self.set_reservation(entry, Some(reservation))
    }

    pub(super) fn set_provisioning(&self, entry: &Entry, fixed: bool) -> Result<()> {
        let name = entry.name();
        if !fixed || entry.settings.reservation.is_some() {
            return if fixed { Ok(()) } else { self.set_reservation(entry, None) };
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
        self.set_reservation_aside(&format!("volume {name}"), entry, Reservation { base_bytes, left_bytes })
    }

    /// A snapshot of a fixed volume is taken by `take`: all of the volume can be written once more.
    pub(super) fn snapshot_fixed(&self, entry: &Entry, take: impl FnOnce() -> Result<()>) -> Result<()> {
        let Some(before) = entry.settings.reservation.filter(|_| entry.clone.is_none()) else { return take() };
        let owned = owned_bytes(self.show(entry.name())?.size_bytes);
        let what = format!("volume {} is fixed, and after a snapshot", entry.name());
        // Until it is known what the snapshot holds, nothing counts as written after it.
        self.set_reservation_aside(&what, entry, Reservation { base_bytes: u64::MAX, left_bytes: owned })?;
        let taken = take();
        let base_bytes = match &taken {
            Ok(()) => held_bytes(&self.show(entry.name())?),
            Err(_) => before.base_bytes,
        };
        self.set_reservation(entry, Some(Reservation { base_bytes, left_bytes: owned }))?;
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
