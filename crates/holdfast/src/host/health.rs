//! What hosts tell each other of themselves, so that each can tell how all of the grid is.
//!
//! ```text
//! health/HOST            (metadata, leased) what is not well there, of what only that host sees
//! ```
//! Role: a thread of its own looks every [`LOOK_EVERY`], and writes what has changed. The other hosts have it in memory,
//! with all other records.
//!
//! Faults: what a host that is gone has said goes with its lease. While the store is silent what was known stays. Of a
//! host of an older release there is no record, and nothing is told.

use super::commands::LiveStatus;
use super::control::ControlPlane;
use crate::grid::layout::MetaConfig;
use crate::overview::certificate_warnings;
use anyhow::{Context, Result};
use holdfast_api::{HostHealth, LinkState};
use holdfast_format::meta::HEALTH_PREFIX;
use holdfast_verdict::findings::{WAITING_MAX, health_of};
use std::collections::BTreeSet;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

const LOOK_EVERY: Duration = Duration::from_secs(2);

/// So many looks lie between two at files of certificates.
const FILES_EVERY: u32 = 30;

pub(super) fn start(plane: &Arc<ControlPlane>) -> Result<()> {
    // Of a store that is one host's own nobody else reads anything.
    if matches!(plane.config().meta, MetaConfig::Embedded) {
        return Ok(());
    }
    let plane = Arc::clone(plane);
    let run = move || run(&plane);
    std::thread::Builder::new().name("health".to_string()).spawn(run).context("no thread for the host's health")?;
    Ok(())
}

fn run(plane: &ControlPlane) {
    let mut away = BTreeSet::new();
    let mut certificates = Vec::new();
    for look in 0_u32.. {
        if look.is_multiple_of(FILES_EVERY) {
            // Of what can't be read whoever needs it tells.
            certificates = plane.dir.load().and_then(|own| certificate_warnings(&plane.dir, &own)).unwrap_or_default();
        }
        // What could not be told is told the next time: of a store that is silent others tell.
        let _ = plane.tell_health(&mut away, &certificates);
        std::thread::sleep(LOOK_EVERY);
    }
}

impl ControlPlane {
    /// `away`: nodes that this host did not reach at the look before.
    fn tell_health(&self, away: &mut BTreeSet<u32>, certificates: &[String]) -> Result<()> {
        let LiveStatus { nodes, mut volumes, .. } = self.live()?;
        let down = nodes.iter().filter(|node| node.link == LinkState::Down).map(|node| node.id).collect();
        let before = std::mem::replace(away, down);
        volumes.extend(self.keys.locked()?.iter().map(|entry| self.closed_info(entry)));
        let mut health = HostHealth {
            // The other hosts have just seen the same, or will: only what stays is of interest.
            nodes_away: away.intersection(&before).copied().collect(),
            certificate_warnings: certificates.to_vec(),
            alert_troubles: self.alert_troubles.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            ..health_of(&volumes)
        };
        health.waits.truncate(WAITING_MAX);
        let record = serde_json::to_vec(&health).expect("our records always encode");
        let key = format!("{HEALTH_PREFIX}{}", self.catalog.host());
        // Where the lease was lost, the record is gone with it.
        let is_told = self.records.view(|view| view.get(&key).is_some_and(|found| *found.value == record[..]));
        if is_told { Ok(()) } else { self.presence.keep(&key, Some(&record)) }
    }

    /// What the other hosts have said last.
    pub(super) fn other_hosts(&self) -> Vec<HostHealth> {
        let own = self.catalog.host();
        self.records.view(|view| {
            let told = view.list(HEALTH_PREFIX).filter_map(|record| {
                // One that is left of a host that is not there says nothing.
                let host = record.key.strip_prefix(HEALTH_PREFIX).filter(|host| host != own && view.has_host(host))?;
                let health: HostHealth = serde_json::from_slice(&record.value).ok()?;
                Some(HostHealth { host: host.to_string(), ..health })
            });
            told.collect()
        })
    }

    /// Hosts of machines that nobody has taken out, and that don't say that they are there.
    pub(super) fn hosts_gone(&self) -> Result<Vec<String>> {
        let (there, own) = (self.hosts_there(), self.catalog.host());
        let machines = self.catalog.machine_records()?.into_keys();
        Ok(machines.filter(|host| host != own && !there.contains(host)).collect())
    }
}
