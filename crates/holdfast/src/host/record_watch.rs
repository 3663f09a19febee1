//! What is known of the grid's records, as far as the reactor has to go by it: nodes, drains, lists of clients, limits, fixed
//! volumes, revoked certificates.
//!
//! Role: a thread of its own, told by [`super::records`] which kinds of records have changed. What could not be taken in is taken
//! in again a moment later. Who serves what is [`super::assignment`]'s.

use super::catalog::{REVOKED_KEY, reservations_of};
use super::commands::Command;
use super::control::ControlPlane;
use super::presence::all_take_spare;
use super::records::News;
use crate::logger;
use anyhow::{Context, Result};
use holdfast_base::VolumeId;
use holdfast_format::meta::{
    CLIENTS_PREFIX, DRAINING_PREFIX, HOST_PREFIX, LIMITS_PREFIX, NODE_PREFIX, REMOVED_PREFIX, SETTINGS_PREFIX,
    VOLUME_PREFIX,
};
use holdfast_host::Order;
use holdfast_runtime::meta::MetaError;
use std::collections::BTreeSet;
use std::sync::mpsc::channel;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

/// Pause before what could not be taken in is tried again.
const PAUSE: Duration = Duration::from_secs(1);

/// Kinds of records that the reactor goes by.
const WATCHED: [&str; 9] = [
    VOLUME_PREFIX,
    NODE_PREFIX,
    DRAINING_PREFIX,
    SETTINGS_PREFIX,
    CLIENTS_PREFIX,
    LIMITS_PREFIX,
    REVOKED_KEY,
    HOST_PREFIX,
    REMOVED_PREFIX,
];

pub(super) fn start(plane: Arc<ControlPlane>) -> Result<()> {
    let (tell, news) = channel();
    plane.records.listen(move |what| {
        if let News::Changed(changes) = what {
            let mut kinds = changes.kinds;
            if !changes.volumes.is_empty() {
                kinds.insert(VOLUME_PREFIX.to_string());
            }
            if changes.hosts {
                kinds.insert(HOST_PREFIX.to_string());
            }
            // Nobody listens when the host ends.
            let _ = tell.send(kinds);
        }
    });
    let look = move || {
        // Everything is new at first.
        let mut changed: BTreeSet<String> = WATCHED.iter().map(|kind| (*kind).to_string()).collect();
        loop {
            if let Err(error) = plane.take_in(&changed) {
                // Of a store that does not answer whoever looks after its health tells.
                if error.downcast_ref::<MetaError>().is_none() {
                    logger::warn(format_args!("what other hosts have changed is read again: {error:#}"));
                }
                std::thread::sleep(PAUSE);
            } else {
                changed.clear();
                let Ok(next) = news.recv() else { return };
                changed.extend(next);
            }
            changed.extend(news.try_iter().flatten());
        }
    };
    std::thread::Builder::new()
        .name("record-watch".to_string())
        .spawn(look)
        .context("no thread for the watch of records")?;
    Ok(())
}

impl ControlPlane {
    /// Beside hosts of older releases guests' writes stop where theirs do.
    fn share_spare(&self) -> Result<()> {
        let keep = !self.records.view(all_take_spare);
        self.order(Order::KeepSpare(keep)).map(drop)
    }

    /// What a host that was started before must not find: see [`super::start`].
    fn tell_of_older_hosts(&self) -> Result<()> {
        let old = if self.reactors.count() > 1 { self.presence.hosts_of_one_reactor()? } else { Vec::new() };
        let mut told = self.older_hosts.lock().unwrap_or_else(PoisonError::into_inner);
        if *told != old && !old.is_empty() {
            logger::error(format_args!(
                "{} may not find volumes here: its release is older, and this host has several reactors. Bring it to this \
                 one, or set cpu.reactors to 1 in holdfast.toml and restart this host (`holdfast grid down --host`, \
                 `holdfast grid up`)",
                old.join(", ")
            ));
        }
        *told = old;
        Ok(())
    }

    fn take_in(&self, changed: &BTreeSet<String>) -> Result<()> {
        // What shuts somebody out comes first: it does not wait for another record that can't be used.
        if changed.contains(REVOKED_KEY) {
            self.take_in_revoked()?;
        }
        if changed.contains(CLIENTS_PREFIX) || changed.contains(LIMITS_PREFIX) {
            self.take_in_access()?;
        }
        let is_removed = changed.contains(REMOVED_PREFIX);
        if is_removed {
            self.leave_if_removed()?;
        }
        if changed.contains(VOLUME_PREFIX) {
            self.take_in_shared()?;
        }
        if changed.contains(HOST_PREFIX) {
            self.share_spare()?;
            self.tell_of_older_hosts()?;
            self.note_absences()?;
        }
        if is_removed || changed.contains(NODE_PREFIX) {
            self.use_nodes(self.catalog.nodes()?)?;
        }
        if is_removed || changed.contains(DRAINING_PREFIX) {
            let devices = self.catalog.draining()?;
            self.order(Order::Drain(devices))?;
        }
        if changed.contains(SETTINGS_PREFIX) {
            self.take_in_reservations()?;
        }
        Ok(())
    }

    fn take_in_reservations(&self) -> Result<()> {
        let _alone = self.alone();
        self.take_in_others_reservations()
    }

    /// What other hosts' fixed volumes own; this host's are its own to know. To be called alone.
    pub(super) fn take_in_others_reservations(&self) -> Result<()> {
        let (mut entries, mut unreadable) = self.catalog.survey()?;
        // What was set aside for a volume in the trash stays so.
        let (trash, more) = self.catalog.survey_trash()?;
        entries.extend(trash.into_iter().map(|trashed| trashed.entry));
        unreadable.extend(more);
        let noted = reservations_of(&entries);
        let known = self.ask(|answer| Command::Reservations { answer })?;
        for entry in entries.iter().filter(|e| e.clone.is_none() && !self.catalog.is_here(e)) {
            let id = entry.root.volume;
            let (reservation, before) = (noted.get(&id).copied(), known.get(&id));
            let is_news = reservation.map(|f| (f.layout, f.reservation)) != before.map(|f| (f.layout, f.reservation));
            if is_news {
                self.order(Order::SetReservation { volume: id, reservation })?;
            }
        }
        // Of a volume whose record can't be read what it owned stays its own.
        let gone = |id: &VolumeId| unreadable.is_empty() && !noted.contains_key(id);
        for id in known.keys().copied().filter(gone) {
            self.order(Order::SetReservation { volume: id, reservation: None })?;
        }
        Ok(())
    }
}
