//! The shell of [`holdfast_cluster::Upkeep`]: looks at what this host has when that asks for it, and carries out what follows.
//!
//! ```text
//! Upkeep ──Look──> looker ──Facts──> Upkeep ──Act──> two executors ──Outcome──> Upkeep
//! ```
//! Executors choose nothing and repeat nothing. What a chore needs that has changed since it was planned is refused where it is
//! carried out: a volume that is another host's by then is snapshotted by nobody here.

use super::catalog::Entry;
use super::commands::Command;
use super::control::ControlPlane;
use super::errands::Errand;
use super::executors;
use super::records::News;
use super::reservation::base_now;
use crate::grid::authority;
use crate::grid::certs::Certificates;
use crate::grid::etcd::Door;
use crate::grid::nbd_server::{self, ServerRenewal};
use crate::grid::renewal::{self, Renewal};
use crate::grid::token::Answer;
use crate::logger;
use anyhow::{Context, Result, bail};
use holdfast_api::{Code, DeviceInfo, LinkState, NodeInfo, SnapshotInfo, VolumeLive, VolumeState, refuse};
use holdfast_base::{DeviceId, Effects, VolumeId};
use holdfast_cluster::Upkeep;
use holdfast_cluster::schedule::{self, Snapshot};
use holdfast_cluster::upkeep::{
    Action, Chore, Config, DeviceNow, Effect, Event, Facts, LOOK_EVERY, LookId, Mutations, ReservationNow, Scheduled,
    Take,
};
use holdfast_format::schedule::ScheduleRecord;
use holdfast_host::Wanted;
use holdfast_host::reservation::Reservation;
use holdfast_runtime::clock;
use holdfast_runtime::meta::MetaError;
use holdfast_runtime::revoked::RevokedNow;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

const EXECUTORS: usize = 2;

/// How long a host that signs may take.
const ANSWER_MAX: Duration = Duration::from_secs(20);

/// What was told last of a chore that can't be done, so that it is told once.
#[derive(Default)]
struct Reported(Mutex<BTreeMap<Chore, String>>);

impl Reported {
    fn note(&self, chore: Chore, outcome: &Result<()>) {
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match outcome {
            Ok(()) => drop(told.remove(&chore)),
            // Of the store others tell.
            Err(error) if error.downcast_ref::<MetaError>().is_some() => {}
            Err(error) => {
                let why = format!("{error:#}");
                if told.get(&chore) != Some(&why) {
                    logger::warn(format_args!("{why}"));
                }
                told.insert(chore, why);
            }
        }
    }
}

pub(super) fn start(plane: &Arc<ControlPlane>) -> Result<()> {
    let (sender, events) = channel();
    let (own, tell) = (Arc::clone(plane), sender.clone());
    let looks = executors::start("look", 1, move |look: LookId| {
        // While the reactor is busy or stops it answers later, or never.
        let facts = own.look_around().ok();
        let _ = tell.send(Event::Seen { look, facts });
    })?;
    let (own, tell, told) = (Arc::clone(plane), sender.clone(), Arc::new(Reported::default()));
    let actions = executors::start("chore", EXECUTORS, move |action: Action| {
        let chore = action.chore();
        let outcome = own.do_chore(action);
        told.note(chore, &outcome);
        let _ = tell.send(Event::Outcome { chore, is_done: outcome.is_ok() });
    })?;
    let config = Config {
        host: plane.catalog.host().to_string(),
        rebuild_after: plane.settings.rebuild_after,
        spreads_authority: plane.settings.authority_spread,
        mutations: Mutations::default(),
    };
    let own = Arc::clone(plane);
    let drive = move || run(&mut Upkeep::new(config), &own, &events, (&looks, &actions));
    std::thread::Builder::new().name("upkeep".to_string()).spawn(drive).context("no thread for upkeep")?;
    plane.records.listen(move |news| {
        if let News::Right(is_right) = news {
            let _ = sender.send(Event::Store { is_right });
        }
    });
    Ok(())
}

fn run(
    upkeep: &mut Upkeep,
    plane: &ControlPlane,
    events: &Receiver<Event>,
    (looks, actions): (&Sender<LookId>, &Sender<Action>),
) {
    let mut out = Effects::new();
    loop {
        let wait = upkeep.next_deadline().map_or(LOOK_EVERY, |at| at.since(clock::now()));
        let event = match events.recv_timeout(wait) {
            Ok(event) => event,
            Err(RecvTimeoutError::Timeout) => Event::Tick,
            Err(RecvTimeoutError::Disconnected) => return,
        };
        plane.records.view(|view| upkeep.handle(clock::now(), view, event, &mut out));
        for effect in out.drain() {
            // The executors live as long as this thread.
            match effect {
                Effect::Look(look) => drop(looks.send(look)),
                Effect::Act(action) => drop(actions.send(action)),
            }
        }
    }
}

fn devices_of(nodes: Vec<NodeInfo>) -> Vec<DeviceNow> {
    let seen = |seen: DeviceInfo| {
        Some(DeviceNow {
            device: seen.device.parse().ok()?,
            is_draining: seen.draining,
            is_failing: seen.drive.as_ref().is_some_and(|drive| drive.is_failing()),
            bypassed_for: seen.slow_s.filter(|_| seen.bypassed).map(Duration::from_secs),
        })
    };
    nodes.into_iter().flat_map(|node| node.devices).filter_map(seen).collect()
}

impl ControlPlane {
    /// What this host has, as far as anything of it may follow.
    fn look_around(&self) -> Result<Facts> {
        let certificates = &self.revocations.certificates;
        let has_tls = self.revocations.known().is_some();
        let certificates_are_due = has_tls
            && (self.links_are_due()
                || self.settings.server_dirs().any(|dir| self.server_is_due(dir))
                || self.has_other_authority());
        let has_authority = has_tls && certificates.has_authority();
        let wall_ms = clock::wall().as_millis() as u64;
        let live = self.live()?;
        // Rates of tasks follow from what was left at each look.
        self.seen("tasks", self.tasks_in(&live.nodes, &live.volumes));
        // What a node holds that is away is not known.
        let all_are_up = !live.nodes.is_empty() && live.nodes.iter().all(|node| node.link != LinkState::Down);
        Ok(Facts {
            wall_ms,
            scheduled: self.seen("snapshots by schedule", self.scheduled_here()),
            reservations: self.seen("fixed volumes", self.reservations_here()),
            sharing: self.seen("separate clones", self.sharing_here()),
            devices: devices_of(live.nodes),
            space_is_due: all_are_up && self.forecast().is_due(wall_ms),
            certificates_are_due,
            has_authority,
        })
    }

    /// One damaged record keeps nothing else from being looked after: what could not be seen is told once.
    fn seen<T: Default>(&self, what: &str, found: Result<T>) -> T {
        let mut unseen = self.unseen.lock().unwrap_or_else(PoisonError::into_inner);
        match found {
            Ok(found) => {
                unseen.remove(what);
                found
            }
            Err(error) => {
                let why = format!("{error:#}");
                // Of the store others tell.
                if error.downcast_ref::<MetaError>().is_none() && unseen.get(what) != Some(&why) {
                    logger::warn(format_args!("{what} are not looked after: {why}"));
                }
                unseen.insert(what.to_string(), why);
                T::default()
            }
        }
    }

    /// Nothing of a volume whose records can't be read.
    fn entry_here(&self, volume: VolumeId) -> Option<Entry> {
        let entry = self.seen(&format!("schedule and space of volume {volume}"), self.catalog.entry(volume));
        entry.filter(|entry| !entry.root.deleted)
    }

    fn scheduled_here(&self) -> Result<Vec<Scheduled>> {
        let mut scheduled = Vec::new();
        for (volume, _) in self.catalog.schedules()? {
            let entry = self.entry_here(volume);
            let Some(entry) = entry.filter(|entry| self.catalog.is_here(entry)) else { continue };
            // What is open for care or a stream is nobody's to look at.
            if let Some(snapshots) = self.snapshots_of(entry.name(), volume)? {
                scheduled.push(Scheduled { volume, snapshots });
            }
        }
        Ok(scheduled)
    }

    /// Of a volume or clone that this host serves.
    fn snapshots_of(&self, name: &str, volume: VolumeId) -> Result<Option<Vec<Snapshot>>> {
        let live = self.ask(|answer| Command::Volume { name: name.to_string(), answer })?;
        let live = live.filter(|info| info.exported && info.id == volume.to_string()).and_then(|info| info.live);
        let all = |live: VolumeLive| live.snapshots.into_iter();
        let snapshot = |s: SnapshotInfo| Snapshot { name: s.name, layer: s.layer, created_ms: s.created_ms };
        Ok(live.map(|live| all(live).map(snapshot).collect()))
    }

    fn reservations_here(&self) -> Result<Vec<ReservationNow>> {
        let mut reservations = Vec::new();
        for (volume, seen) in self.ask(|answer| Command::Reservations { answer })? {
            let Some(entry) = self.entry_here(volume) else { continue };
            let Some(noted) = entry.settings.reservation.filter(|_| self.has_care_of(&entry)) else { continue };
            let live = self.ask(|answer| Command::Volume { name: entry.name().to_string(), answer })?;
            // A volume in the trash has left its name to others.
            let live = live.filter(|live| live.id == volume.to_string());
            let is_closed = live.is_none();
            let open = live.filter(|live| live.state == VolumeState::Open);
            let base_bytes = open.as_ref().map_or(noted.base_bytes, |live| base_now(live, noted.base_bytes));
            let noted = (noted.base_bytes, noted.left_bytes);
            let now = (base_bytes, seen.reservation.left_bytes);
            reservations.push(ReservationNow {
                volume,
                size_bytes: entry.size_bytes(),
                is_open: !is_closed,
                noted,
                now,
            });
        }
        Ok(reservations)
    }

    /// The records of fixed volumes are to say what is so. To be called alone.
    pub(super) fn note_all_reservations(&self) -> Result<()> {
        for seen in self.reservations_here()? {
            if let Some((base_bytes, left_bytes, has_new_base)) = seen.to_note() {
                self.note_reservation(seen.volume, Reservation { base_bytes, left_bytes }, has_new_base)?;
            }
        }
        Ok(())
    }

    fn do_chore(&self, action: Action) -> Result<()> {
        match action {
            Action::Snapshots { volume, take, drops } => self.follow_schedule(volume, take, drops),
            Action::NoteReservation { volume, base_bytes, left_bytes, has_new_base } => {
                let _alone = self.alone();
                let reservation = Reservation { base_bytes, left_bytes };
                self.note_reservation(volume, reservation, has_new_base)
                    .context("noting what is set aside for fixed volumes")
            }
            Action::NoteNames { origin, dependent, names, generation } => self
                .note_names((origin, dependent), &names, generation)
                .context("what a separate clone needs of its origin is noted later"),
            Action::TellNames { origin, dependent } => {
                self.tell_names(origin, dependent).context("what separate clones need is told later")
            }
            Action::GiveUp { origin, dependent } => {
                self.give_up_dependent(origin, dependent).context("that a separate clone is gone is told later")
            }
            Action::Drain { device } => self.drain_unasked(device),
            Action::NoteSpace => self.sample_space().context("noting how much space is taken"),
            Action::Renew => self
                .renew_certificates()
                .context("this machine's certificates could not be made anew, which is tried again"),
            Action::NoteMachine => self
                .note_certificates(&self.dir.load()?)
                .context("whether this machine signs is not noted, which is tried again"),
            Action::GiveAuthority { to } => self
                .give_to_one_of(&to)
                .context("no second machine has the key of the grid's authority, which is tried again"),
        }
    }

    fn follow_schedule(&self, volume: VolumeId, take: Option<Take>, drops: Vec<String>) -> Result<()> {
        let _alone = self.alone();
        let Some(entry) = self.catalog.entry(volume)?.filter(|entry| self.catalog.is_here(entry)) else {
            return Ok(());
        };
        let of = entry.name();
        let taken = take.map_or(Ok(()), |take| self.take_by_schedule(of, volume, take));
        for name in drops {
            // One that is being read is deleted another time.
            let _ = self.change(of, Wanted::DropSnapshot { name });
        }
        taken
    }

    fn take_by_schedule(&self, of: &str, volume: VolumeId, take: Take) -> Result<()> {
        let Take { name, after, ahead } = take;
        let now = self.snapshots_of(of, volume)?.unwrap_or_default();
        if schedule::newest(&now).map(|newest| newest.layer) != after {
            return Ok(());
        }
        if let Some(ahead) = ahead {
            logger::warn(format_args!(
                "snapshot {of}@{ahead} is dated ahead of this machine's clock: that was wrong when it was taken, or is now \
                 (`timedatectl` shows whether it is kept right); the schedule goes on"
            ));
        }
        let taken = self.change(of, Wanted::Snapshot { name, created_ms: clock::wall_ms() });
        taken.map(drop).with_context(|| format!("snapshots by schedule: volume {of} gets none"))
    }

    /// Has a volume snapshotted by schedule, or ends that.
    pub(super) fn set_schedule(&self, name: &str, schedule: Option<&ScheduleRecord>) -> Result<()> {
        let entry = self.catalog.find(name)?;
        self.catalog.set_schedule(entry.id(), schedule)
    }

    fn drain_unasked(&self, device: DeviceId) -> Result<()> {
        let _alone = self.alone();
        let why = self.why_unasked(device)?;
        let emptied = self.empty(&BTreeSet::from([device]), false);
        emptied.with_context(|| format!("device {device} {why}, and can't be emptied"))?;
        logger::warn(format_args!(
            "device {device} {why}, and is being emptied; replace it (`holdfast device replace`), or `holdfast device drain {device} \
             --cancel` to go on with it"
        ));
        Ok(())
    }

    /// What can't be looked at is told of where it is used.
    fn links_are_due(&self) -> bool {
        // What the machine itself has: nodes of others are not in it.
        let is_due = || anyhow::Ok(renewal::is_due(&self.revocations.certificates, &self.dir.load()?)?);
        is_due().unwrap_or(false)
    }

    fn server_is_due(&self, dir: &Path) -> bool {
        nbd_server::is_due(&self.revocations.certificates, dir).unwrap_or(false)
    }

    fn has_other_authority(&self) -> bool {
        authority::is_settled(&self.revocations.certificates, self.catalog.known()).is_ok_and(|is_settled| !is_settled)
    }

    /// All of it is seen to, whatever of it fails.
    fn renew_certificates(&self) -> Result<()> {
        let settled = self.settle_authority();
        let renewed = if self.links_are_due() { self.renew_links() } else { Ok(()) };
        let due = self.settings.server_dirs().filter(|dir| self.server_is_due(dir));
        let served = due.map(|dir| self.renew_own_server(dir)).fold(Ok(()), Result::and);
        settled.and(renewed).and(served)
    }

    fn settle_authority(&self) -> Result<()> {
        if authority::settle(&self.dir, &self.revocations.certificates, self.catalog.store())? {
            logger::info(format_args!(
                "the authority's certificate was made anew, and is the same here and for the grid"
            ));
            self.note_certificates(&self.dir.load()?)?;
        }
        Ok(())
    }

    fn renew_own_server(&self, dir: &Path) -> Result<()> {
        let sign = |renewal: &ServerRenewal| {
            let renewal = serde_json::to_value(renewal).expect("our records always encode");
            self.have_signed(&Errand::RenewServer { renewal })
        };
        let own = (&self.dir, self.catalog.host().as_str());
        nbd_server::renew(own, &self.revocations.certificates, dir, sign)
            .with_context(|| format!("the certificate of this host's server, in {}", dir.display()))
    }

    fn renew_links(&self) -> Result<()> {
        let (certificates, config) = (&self.revocations.certificates, self.dir.load()?);
        if certificates.has_authority() {
            renewal::sign_here(&self.dir, certificates, &config)?;
        } else {
            let (renewal, asked) = renewal::ask(certificates, &config)?;
            let errand = Errand::Renew { renewal: serde_json::to_value(renewal).expect("our records always encode") };
            let signed: Answer = self.have_signed(&errand)?;
            renewal::take(&self.dir, certificates, asked, signed)?;
        }
        logger::info(format_args!("this machine's certificates were made anew"));
        self.note_certificates(&config)
    }

    /// Has a host that signs do so.
    fn have_signed<T: DeserializeOwned>(&self, errand: &Errand) -> Result<T> {
        let signing = self.catalog.machine_records()?.into_iter().filter(|(_, (_, record))| record.signs);
        let there = self.hosts_there();
        let mut why =
            "no host is up that has the key of the grid's authority (`holdfast machine list` shows which have)"
                .to_string();
        for (signer, _) in signing.filter(|(name, _)| there.contains(name)) {
            match self.send_errand(&signer, errand, ANSWER_MAX).and_then(|done| done) {
                Ok(told) => return serde_json::from_value(told).context("the answer makes no sense"),
                Err(error) => why = format!("host {signer}: {error:#}"),
            }
        }
        bail!("{why}")
    }

    /// What this machine signs with for others, and who is given nothing.
    fn signing(&self) -> Result<(&Certificates, &RevokedNow)> {
        let certificates = &self.revocations.certificates;
        if !certificates.has_authority() {
            refuse!(Code::State, "it has no key of the grid's authority");
        }
        Ok((certificates, self.revocations.lists.first().context("the grid has no TLS")?))
    }

    /// Signs for another machine's server of NBD.
    pub(super) fn renew_server(&self, renewal: Value) -> Result<Value> {
        let renewal: ServerRenewal = serde_json::from_value(renewal).context("it is no request for a certificate")?;
        let (certificates, revoked) = self.signing()?;
        let signed = nbd_server::answer(certificates, &renewal, revoked)?;
        // Who was revoked asks those first that have not heard.
        self.look_who_is_revoked().context("whether it was revoked can't be told now")?;
        nbd_server::check_host(certificates, &renewal, revoked)?;
        Ok(Value::from(signed))
    }

    /// Signs for another machine.
    pub(super) fn renew(&self, renewal: Value) -> Result<Value> {
        let renewal: Renewal = serde_json::from_value(renewal).context("it is no request for certificates")?;
        let (certificates, revoked) = self.signing()?;
        let mut answer = renewal::answer(certificates, (&renewal, revoked), &self.catalog.node_machines()?)?;
        // What was signed after its machine was revoked would be good for all. Here it may not have been heard of yet: who
        // was revoked asks those first that have not. One that is revoked after this look has a later time on the list.
        self.look_who_is_revoked().context("whether it was revoked can't be told now")?;
        renewal::check_still_good(certificates, &renewal, revoked)?;
        if let (Answer::Signed { etcd, .. }, Some(door)) = (&mut answer, Door::of(&self.dir, &self.config())?) {
            *etcd = door.grant(renewal.wanted())?;
        }
        serde_json::to_value(answer).context("the answer can't be written")
    }
}
