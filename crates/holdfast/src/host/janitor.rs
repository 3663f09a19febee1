//! Returns the space of deleted volumes: asks every device of the grid to drop them, until each has.
//!
//! Role: a thread of its own, started with the host. It takes up what an earlier process began. A device that is away
//! is asked again later; the record of the deletion stays until the last one has answered.

use super::catalog::{Catalog, DeletingRecord};
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
use std::time::Duration;

/// Between two rounds while something is left to do.
const PACE: Duration = Duration::from_secs(2);

/// How long a device may take to drop a volume.
const CALL_MAX: Duration = Duration::from_secs(10);

/// Wakes the janitor; more than one wake-up waiting means nothing.
#[derive(Clone)]
pub struct JanitorBell(SyncSender<()>);

impl JanitorBell {
    pub fn ring(&self) {
        // Full: it will look anyway.
        let _ = self.0.try_send(());
    }
}

type Place = (NodeId, DeviceId);

struct Janitor {
    catalog: Catalog,
    reactor: Sender<Command>,
    places: Vec<Place>,
    /// By volume: who has dropped it already. Lost with the process; dropping twice is harmless.
    dropped: BTreeMap<String, BTreeSet<Place>>,
}

pub fn start(config: &GridConfig, catalog: Catalog, reactor: Sender<Command>) -> Result<JanitorBell> {
    let (bell, rings) = sync_channel(1);
    let mut places = Vec::new();
    for node in &config.nodes {
        for device in &node.devices {
            places.push((NodeId(node.id), device.device.parse()?));
        }
    }
    let janitor = Janitor { catalog, reactor, places, dropped: BTreeMap::new() };
    std::thread::Builder::new().name("janitor".to_string()).spawn(move || janitor.run(&rings))?;
    let bell = JanitorBell(bell);
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
        let Some(root) = self.catalog.mark_deleted(record)? else {
            self.catalog.finish_deleting(record)?;
            return Ok(true);
        };
        for &(node, device) in &self.places {
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
        let is_done = self.dropped.get(&record.volume).is_some_and(|d| d.len() == self.places.len());
        if is_done {
            self.catalog.finish_deleting(record)?;
            self.dropped.remove(&record.volume);
            logger::info(format_args!("volume {} ({}) is deleted, its space returned", record.name, record.volume));
        }
        Ok(is_done)
    }
}
