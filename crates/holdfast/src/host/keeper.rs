//! The keeper: this host serves the volumes whose records name it, offers those whose portals name it, and no others.
//!
//! Role: a thread of its own, which compares now and then, and when a record has changed. A volume that another host has
//! claimed is let go of; one that is to be served here and is not (another opening was faster, a take-over was cut short)
//! is opened again. So hosts that raced for a volume agree within moments, whoever came first.
//!
//! Of a volume that is handed over to this host the map is read first; it is opened when the host that has it has yielded, or can't
//! be asked. One that this host offers, and whose own host has let its lease run out, is taken over.

use super::catalog::{Catalog, Entry};
use super::commands::Command;
use super::control::{CLOSE_MAX, ControlPlane, ask};
use super::portals::{Offer, Place};
use super::volumes::{OpenSpec, WARMING};
use crate::logger;
use crate::protocol::LinkState;
use anyhow::{Context, Result};
use holdfast_base::VolumeId;
use holdfast_format::portal::Answer;
use holdfast_volume::Warming;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pace of looking, when nothing changes.
const PACE: Duration = Duration::from_secs(2);

/// How long what the volume's checkpoint says may take to come. A node may be away, and the old owner have deleted what is asked for.
const READ_MAX: Duration = Duration::from_secs(5);

/// How long is waited for the map to be read each time that the keeper looks: it has other volumes to look after.
const WARM_PAUSE: Duration = Duration::from_secs(1);

/// How often it is seen whether the other host of a hand-over is still there.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(200);

/// How long the host that hands a volume over may take to stop serving it.
const YIELD_MAX: Duration = Duration::from_secs(1);

/// How long the connection to it may take to come up.
const REACH_MAX: Duration = Duration::from_secs(3);

/// How long a volume that was handed over may take to open before its clients are looked after again.
const OPEN_MAX: Duration = Duration::from_secs(10);

pub(super) fn start(plane: Arc<ControlPlane>) -> Result<()> {
    let look = move || {
        loop {
            std::thread::sleep(PACE);
            if plane.store_is_silent() {
                continue;
            }
            let _alone = plane.alone();
            // Whoever looks after the store's health tells where it did not answer.
            let _ = plane.keep_to_records();
        }
    };
    std::thread::Builder::new().name("keeper".to_string()).spawn(look).context("no thread for the keeper")?;
    Ok(())
}

/// What this host offers together with others, and where those are.
pub(super) fn offers(
    catalog: &Catalog,
    entries: &[Entry],
    hosts: &BTreeMap<String, Option<SocketAddr>>,
) -> (Vec<Offer>, Vec<(String, SocketAddr)>) {
    let mut offers: BTreeMap<VolumeId, Offer> = BTreeMap::new();
    let mut wanted = BTreeSet::new();
    for entry in entries.iter().filter(|entry| catalog.is_offered(entry)) {
        let volume = entry.root.volume;
        let host = entry.served_by.clone().unwrap_or_default();
        // Until a hand-over is done the host that has the volume serves it, and knows itself when it has stopped.
        let place = match entry.handed_from.as_ref().filter(|from| *from != catalog.host()) {
            Some(from) => Place::At(from.clone()),
            None if catalog.is_here(entry) => Place::Here,
            None => Place::At(host.clone()),
        };
        let offer = offers.entry(volume).or_insert_with(|| Offer { volume, exports: BTreeMap::new(), place });
        offer.exports.insert(entry.name().to_string(), (entry.id(), entry.size_bytes()));
        wanted.extend(entry.handed_from.iter().cloned().chain([host]));
        wanted.extend(entry.portals.iter().cloned());
    }
    wanted.remove(catalog.host());
    let reached = wanted.into_iter().filter_map(|host| Some((host.clone(), (*hosts.get(&host)?)?)));
    (offers.into_values().collect(), reached.collect())
}

impl ControlPlane {
    /// To be called alone.
    pub(super) fn keep_to_records(&self) -> Result<()> {
        let live = self.live()?;
        let open = live.volumes;
        let out_of_reach = live.nodes.iter().filter(|node| node.link != LinkState::Up).count();
        let entries = self.catalog.all()?;
        let hosts = self.presence.hosts()?;
        self.take_in_access()?;
        let (offers, addresses) = offers(&self.catalog, &entries, &hosts);
        self.ask(|answer| Command::Offers { offers, hosts: addresses, answer })?;
        for volume in open.iter().filter(|volume| volume.state == WARMING) {
            // Deleted, or named otherwise: nobody would open it.
            if !entries.iter().any(|entry| entry.name() == volume.name && entry.id().to_string() == volume.id) {
                self.let_go(&volume.name)?;
            }
        }
        for entry in entries.iter().filter(|entry| entry.clone.is_none()) {
            let (name, is_here) = (entry.name().to_string(), self.catalog.is_here(entry));
            let found = open.iter().find(|volume| volume.name == name);
            let is_lost = entry.served_by.as_ref().is_some_and(|host| !hosts.contains_key(host));
            match found {
                _ if is_here && found.is_none_or(|volume| volume.state == WARMING) => {
                    // First the key, and the nodes: until they are there the other host goes on.
                    if entry.handed_from.is_some() && out_of_reach > usize::from(entry.root.layout.failures()) {
                        continue;
                    }
                    let Some(spec) = self.keys.spec_now_and_then(entry) else { continue };
                    if !self.await_yield(entry, &spec)? {
                        continue;
                    }
                    logger::info(format_args!("volume {name} is to be in service here, and is opened"));
                    self.ask(|answer| Command::Open { spec, exported: true, answer })?;
                    self.end_hand_over(entry)?;
                }
                None if self.catalog.is_offered(entry) && is_lost => {
                    let Some(spec) = self.keys.spec_now_and_then(entry) else { continue };
                    let host = entry.served_by.as_deref().unwrap_or_default();
                    logger::warn(format_args!("volume {name}: its host {host} is gone; it is taken over"));
                    // Where another portal was faster, this is refused.
                    if self.catalog.claim_export(entry, false).is_ok() {
                        self.ask(|answer| Command::Open { spec, exported: true, answer })?;
                    }
                }
                // The hand-over was cut short when it was as good as done.
                Some(volume) if is_here && entry.handed_from.is_some() && volume.state == "open" => {
                    self.catalog.handed_over(entry.root.volume)?;
                }
                // It yields when the other asks it to; where that is gone, it has it again.
                Some(_) if entry.handed_from.as_ref() == Some(self.catalog.host()) && is_lost => {
                    self.catalog.claim_export(entry, false)?;
                }
                Some(_) if entry.handed_from.as_ref() == Some(self.catalog.host()) => {}
                Some(volume) if volume.state == WARMING || volume.exported && entry.served_by.is_some() && !is_here => {
                    let host = entry.served_by.as_deref().unwrap_or("nobody");
                    logger::info(format_args!("volume {name} is host {host}'s now, and is let go of"));
                    self.let_go(&name)?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn let_go(&self, name: &str) -> Result<()> {
        let (name, force, discard) = (name.to_string(), true, true);
        ask(&self.reactor, CLOSE_MAX, |answer| Command::Close { name, force, discard, answer })?;
        Ok(())
    }

    /// The map of a volume that is handed over to this host is read, as far as the host that has it is there; then that is asked to
    /// stop. False where it goes on: the volume is not handed over after all, can't be read, or takes longer.
    fn await_yield(&self, entry: &Entry, spec: &OpenSpec) -> Result<bool> {
        let Some(from) = entry.handed_from.as_ref().filter(|from| *from != self.catalog.host()) else {
            return Ok(true);
        };
        let (volume, name) = (entry.root.volume, &entry.root.name);
        if !self.await_warmth(from, spec)? {
            return Ok(false);
        }
        let now = self.catalog.find(name)?;
        if !self.catalog.is_here(&now) || now.handed_from != entry.handed_from {
            return Ok(false);
        }
        let end = Instant::now() + if self.is_up(from)? { REACH_MAX } else { Duration::ZERO };
        loop {
            let host = from.clone();
            let asked = ask(&self.reactor, YIELD_MAX, |answer| Command::AskToYield { host, volume, answer });
            match asked {
                Ok(Some(Answer::Yielded | Answer::Refused(_))) => return Ok(true),
                Ok(_) if Instant::now() < end => std::thread::sleep(Duration::from_millis(20)),
                // It hangs, or can't be reached: what it has is recovered like after a crash.
                _ => {
                    logger::warn(format_args!("host {from} can't be asked to yield volume {name}"));
                    return Ok(true);
                }
            }
        }
    }

    pub(super) fn is_up(&self, host: &str) -> Result<bool> {
        Ok(self.presence.hosts()?.contains_key(host))
    }

    /// True when the map is read, or nobody serves the volume meanwhile.
    fn await_warmth(&self, from: &str, spec: &OpenSpec) -> Result<bool> {
        let name = &spec.name;
        let (began, mut looked) = (Instant::now(), None);
        loop {
            if looked.is_none_or(|at: Instant| at.elapsed() >= LOOK_EVERY) {
                looked = Some(Instant::now());
                if !self.is_up(from)? {
                    logger::warn(format_args!("volume {name}: host {from}, which hands it over, is gone"));
                    return Ok(true);
                }
            }
            let found = self.ask(|answer| Command::Warm { spec: spec.clone(), answer })?;
            // It can't be opened: this host is stopping, or has too many.
            let Some((warming, for_how_long)) = found else { return Ok(false) };
            match warming {
                None | Some(Warming::Warm) => return Ok(true),
                Some(Warming::Reading) if for_how_long >= READ_MAX => break,
                Some(Warming::Unreadable) => break,
                Some(_) if began.elapsed() >= WARM_PAUSE => return Ok(false),
                Some(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        }
        logger::warn(format_args!(
            "volume {name}: its map can't be read now, host {from} goes on with it, and it is tried again"
        ));
        // The root may name another checkpoint next time.
        self.let_go(name)?;
        Ok(false)
    }

    fn end_hand_over(&self, entry: &Entry) -> Result<()> {
        if entry.handed_from.is_none() {
            return Ok(());
        }
        let end = Instant::now() + OPEN_MAX;
        while Instant::now() < end {
            let name = entry.root.name.clone();
            let info = self.ask(|answer| Command::Volume { name, answer })?;
            if info.is_some_and(|info| info.state == "open") {
                return self.catalog.handed_over(entry.root.volume);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}
