//! The caretaker: volumes that are not in service are opened now and then, for as long as there is something to do.
//!
//! Role: a thread of its own at one of the hosts, which takes one volume after the other. While it is open its controller repairs, rebuilds,
//! drains, merges, cleans and frees as for any other; no client gets at it. Nothing is kept: after a restart it begins anew.
//!
//! States of a volume: closed -> in care -> closed; from anywhere -> in service, when it is exported.

use super::commands::{CloseOutcome, Command};
use super::control::{CLOSE_MAX, ControlPlane, ask};
use super::trash::name_in_trash;
use super::volumes::OpenSpec;
use crate::logger;
use crate::protocol::VolumeInfo;
use anyhow::{Context, Result};
use holdfast_base::VolumeId;
use holdfast_format::meta::trash_key;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pace of looking.
const PACE: Duration = Duration::from_secs(2);

/// Each volume is looked after this often, and more often while devices are drained.
const CARE_EVERY: Duration = Duration::from_secs(3600);
const CARE_EVERY_DRAINING: Duration = Duration::from_secs(5);

/// It is closed when there has been nothing to do for so long, and in any case after the longer span: others wait.
const REST: Duration = Duration::from_secs(3);
const CARE_MAX: Duration = Duration::from_secs(600);

pub(super) fn start(plane: Arc<ControlPlane>) -> Result<()> {
    let look = move || {
        let mut cared: BTreeMap<VolumeId, Instant> = BTreeMap::new();
        let (mut rested, mut removed_since) = (BTreeMap::new(), BTreeMap::new());
        let started = Instant::now();
        loop {
            std::thread::sleep(PACE);
            if !plane.store_is_right() || !plane.presence.is_caretaker().unwrap_or(false) {
                continue;
            }
            if let Err(error) = plane.look_after_closed(started, &mut cared, &mut rested) {
                logger::warn(format_args!("looking after volumes that are not in service: {error:#}"));
            }
            // Where somebody does not answer it is not known yet.
            let _ = plane.settle_removed(&rested, &mut removed_since);
        }
    };
    std::thread::Builder::new().name("caretaker".to_string()).spawn(look).context("no thread for the caretaker")?;
    Ok(())
}

impl ControlPlane {
    /// Takes care of one volume, the one that has waited longest, if any is due.
    fn look_after_closed(
        &self,
        started: Instant,
        cared: &mut BTreeMap<VolumeId, Instant>,
        rested: &mut BTreeMap<String, Instant>,
    ) -> Result<()> {
        let every = if self.catalog.draining()?.is_empty() { CARE_EVERY } else { CARE_EVERY_DRAINING };
        let last = |id: VolumeId| cared.get(&id).copied().unwrap_or(started);
        let due = self.unserved().into_iter().map(|(id, _)| id).filter(|id| last(*id).elapsed() >= every);
        let Some(id) = due.min_by_key(|id| last(*id)) else { return Ok(()) };
        let name = {
            let _alone = self.alone();
            // It may have been exported or deleted meanwhile.
            let Some(entry) = self.catalog.kept_entry(id)?.filter(|entry| entry.served_by.is_none()) else {
                return Ok(());
            };
            // Others wait: without its key it has had its turn.
            let Some(spec) = self.keys.spec_now_and_then(&entry) else {
                cared.insert(id, Instant::now());
                return Ok(());
            };
            let name = spec.name.clone();
            // Who has claimed it by the time that it is opened keeps it.
            let spec = OpenSpec { only_from: Some(entry.root.epoch), ..spec };
            self.ask(|answer| Command::Open { spec, exported: false, answer })?;
            name
        };
        let begun = Instant::now();
        if self.wait_for_rest(&name)? {
            rested.insert(name.clone(), begun);
        }
        cared.insert(id, Instant::now());
        let _alone = self.alone();
        match ask(&self.reactor, CLOSE_MAX, |answer| Command::EndCare { name: name.clone(), answer })? {
            CloseOutcome::Closed | CloseOutcome::NotOpen | CloseOutcome::InUse(_) => Ok(()),
        }
    }

    /// Volumes that no host has in service, with their names; also those in the trash.
    pub(super) fn unserved(&self) -> Vec<(VolumeId, String)> {
        self.records.view(|view| {
            let closed = view.volumes().filter(|volume| view.export(*volume).is_none());
            let there = closed.filter_map(|id| Some((id, view.volume(id)?))).filter(|(_, known)| !known.is_gone);
            let named = there.map(|(id, known)| match view.get(&trash_key(id)) {
                Some(_) => (id, name_in_trash(&known.name, id)),
                None => (id, known.name.clone()),
            });
            named.collect()
        })
    }

    /// True where nothing was left to do.
    fn wait_for_rest(&self, name: &str) -> Result<bool> {
        let begun = Instant::now();
        let mut busy_at = begun;
        while busy_at.elapsed() < REST && begun.elapsed() < CARE_MAX {
            std::thread::sleep(Duration::from_millis(500));
            let info = self.ask(|answer| Command::Volume { name: name.to_string(), answer })?;
            let Some(info) = info.filter(|info| !info.exported && info.state != "deposed") else { return Ok(false) };
            if is_busy(&info) {
                busy_at = Instant::now();
            }
        }
        Ok(busy_at.elapsed() >= REST)
    }
}

fn is_busy(info: &VolumeInfo) -> bool {
    info.live
        .as_ref()
        .is_none_or(|live| live.degraded_segments + live.at_risk_entries + live.layers_going + live.left_to_drain > 0)
}
