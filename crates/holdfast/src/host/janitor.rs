//! Returns the space of deleted volumes: asks every device of the grid to drop them, until each has.
//!
//! Role: a thread of its own, started with the host. It takes up what an earlier process began. A device that is away
//! is asked again later; the record of the deletion stays until the last one has answered.

use super::catalog::{Catalog, DeletingRecord, StillNeeded};
use super::commands::Command;
use super::control::ask;
use crate::grid::layout::GridConfig;
use crate::logger;
use anyhow::Result;
use holdfast_base::{DeviceId, NodeId};
use holdfast_format::wire::{Reply, Request};
use holdfast_runtime::mailbox::Sender;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Between two rounds while something is left to do.
const PACE: Duration = Duration::from_secs(2);

/// How long a device may take to drop a volume.
const CALL_MAX: Duration = Duration::from_secs(10);

/// Wakes the janitor; more than one wake-up waiting means nothing.
#[derive(Clone)]
pub struct JanitorBell {
    bell: SyncSender<()>,
    places: Arc<Mutex<Vec<Place>>>,
}

impl JanitorBell {
    pub fn ring(&self) {
        // Full: it will look anyway.
        let _ = self.bell.try_send(());
    }

    /// The grid has these devices from here on.
    pub fn set_places(&self, places: Vec<Place>) {
        *self.places.lock().unwrap_or_else(PoisonError::into_inner) = places;
        self.ring();
    }
}

type Place = (NodeId, DeviceId);

struct Janitor {
    catalog: Catalog,
    reactor: Sender<Command>,
    places: Arc<Mutex<Vec<Place>>>,
    /// By volume: who has dropped it already. Lost with the process; dropping twice is harmless.
    dropped: BTreeMap<String, BTreeSet<Place>>,
}

pub fn start(config: &GridConfig, catalog: Catalog, reactor: Sender<Command>) -> Result<JanitorBell> {
    let (bell, rings) = sync_channel(1);
    let places = Arc::new(Mutex::new(config.devices()));
    let janitor = Janitor { catalog, reactor, places: Arc::clone(&places), dropped: BTreeMap::new() };
    std::thread::Builder::new().name("janitor".to_string()).spawn(move || janitor.run(&rings))?;
    let bell = JanitorBell { bell, places };
    bell.ring();
    Ok(bell)
}

impl Janitor {
    fn run(mut self, rings: &Receiver<()>) {
        let mut is_done = true;
        loop {
            let woken = if is_done {
                rings.recv().map_err(|_| RecvTimeoutError::Disconnected)
            } else {
                rings.recv_timeout(PACE)
            };
            if woken == Err(RecvTimeoutError::Disconnected) {
                return;
            }
            is_done = self.round().unwrap_or_else(|error| {
                logger::warn(format_args!("deleting volumes goes on later: {error:#}"));
                false
            });
        }
    }

    /// True when nothing is left to do.
    fn round(&mut self) -> Result<bool> {
        let mut is_done = true;
        for record in self.catalog.deleting()? {
            is_done &= self.delete(&record)?;
        }
        Ok(is_done)
    }

    fn delete(&mut self, record: &DeletingRecord) -> Result<bool> {
        let marked = self.catalog.mark_deleted(record);
        if let Err(error) = &marked
            && error.is::<StillNeeded>()
        {
            logger::warn(format_args!("{error}"));
            self.catalog.cancel_deleting(record)?;
            return Ok(true);
        }
        let Some(root) = marked? else {
            self.catalog.finish_deleting(record)?;
            return Ok(true);
        };
        let places = self.places.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for &(node, device) in &places {
            let done = self.dropped.entry(record.volume.clone()).or_default();
            if done.contains(&(node, device)) {
                continue;
            }
            let request = Box::new(Request::DropVolume { device, volume: root.volume, epoch: root.epoch });
            let reply = ask(&self.reactor, CALL_MAX, |answer| Command::Call { node, request, answer });
            if let Ok(Some(Reply::Done)) = reply {
                done.insert((node, device));
            }
        }
        let is_done = self.dropped.get(&record.volume).is_some_and(|d| places.iter().all(|p| d.contains(p)));
        if is_done {
            self.catalog.finish_deleting(record)?;
            self.dropped.remove(&record.volume);
            logger::info(format_args!("volume {} ({}) is deleted, its space returned", record.name, record.volume));
        }
        Ok(is_done)
    }
}
