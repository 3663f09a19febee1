//! The shell around [`holdfast_cluster::Steward`]: what one host does for the whole grid.
//!
//! Role: one thread drives the machine with what the records tell; others carry its actions out, [`DROPPERS`] of them what devices
//! are asked, each of which may take [`CALL_MAX`]. They choose nothing and repeat nothing.
//!
//! **Care.** A volume that no host has in service is opened without clients: its controller repairs, rebuilds, drains, merges,
//! cleans and frees as for any other. States: closed -> in care -> closed; from anywhere -> in service, when it is exported.

use super::catalog::StillNeeded;
use super::commands::Command;
use super::control::{ControlPlane, ask};
use super::executors;
use super::records::{News, Records};
use super::trash::name_in_trash;
use crate::logger;
use anyhow::{Context, Result, bail};
use holdfast_api::{Code, VolumeInfo, VolumeState, refuse};
use holdfast_base::{DeviceId, Effects, NodeId, VolumeId};
use holdfast_cluster::deletion::{self, Step};
use holdfast_cluster::steward::{self, Action, ActionId, Change, Compares, Config, Event, Outcome, Writes};
use holdfast_cluster::{Steward, View};
use holdfast_format::geometry::Layout;
use holdfast_format::meta::{DeletingRecord, decode, deleting_key, trash_key};
use holdfast_format::root::{Root, root_key};
use holdfast_format::wire::{Reply, Request};
use holdfast_host::{CloseOutcome, OpenSpec, Order};
use holdfast_runtime::meta::{Commit, Compare, MetaError, MetaStore, Write};
use holdfast_runtime::{clock, pki};
use holdfast_verdict::findings::is_short;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

/// Requests to devices that are under way at a time, and other actions.
const DROPPERS: usize = 4;
const EXECUTORS: usize = 4;

/// How long a device may take to drop a volume.
const CALL_MAX: Duration = Duration::from_secs(10);

/// Attempts at a transaction that others race for.
const COMMITS_MAX: usize = 16;

/// The way to the machine; clones share it.
#[derive(Clone)]
pub struct Stewardship {
    events: Sender<Event>,
    leads: Arc<AtomicBool>,
}

impl Stewardship {
    pub fn new() -> (Stewardship, Receiver<Event>) {
        let (sender, events) = channel();
        (Stewardship { events: sender, leads: Arc::default() }, events)
    }

    /// What is told when the host ends is heard by nobody.
    fn tell(&self, event: Event) {
        let _ = self.events.send(event);
    }

    /// This host is the steward, as far as it knows.
    pub fn leads(&self) -> bool {
        self.leads.load(Ordering::Relaxed)
    }

    /// The grid has these devices from here on.
    pub fn set_places(&self, places: Vec<(NodeId, DeviceId)>) {
        self.tell(Event::Places(places.into_iter().collect()));
    }
}

type Task = (ActionId, Action);

pub(super) fn start(plane: &Arc<ControlPlane>, events: Receiver<Event>) -> Result<()> {
    let (drops, others) = (start_executors(plane, DROPPERS)?, start_executors(plane, EXECUTORS)?);
    let config = Config::new(plane.catalog.host(), u64::from_le_bytes(pki::random()));
    let records = Arc::clone(&plane.records);
    let leads = Arc::clone(&plane.stewardship.leads);
    let drive = move || run(&mut Steward::new(clock::now(), config), &records, &events, &leads, &drops, &others);
    std::thread::Builder::new().name("steward".to_string()).spawn(drive).context("no thread for the steward")?;
    plane.stewardship.set_places(plane.config().devices());
    let stewardship = plane.stewardship.clone();
    plane.records.listen(move |news| {
        stewardship.tell(match news {
            News::Changed(changes) => Event::Changed(changes),
            News::Right(is_right) => Event::Store { is_right },
        });
    });
    Ok(())
}

fn start_executors(plane: &Arc<ControlPlane>, count: usize) -> Result<Sender<Task>> {
    let plane = Arc::clone(plane);
    executors::start("duty", count, move |(id, action): Task| {
        let outcome = plane.do_duty(&action).unwrap_or_else(|error| {
            // Of the store, and of this host's lease, others tell.
            if error.downcast_ref::<MetaError>().is_none() {
                logger::warn(format_args!("{}: {error:#}", describe(&action)));
            }
            Outcome::Failed
        });
        plane.stewardship.tell(Event::Outcome { id, outcome });
    })
}

fn run(
    steward: &mut Steward,
    records: &Records,
    events: &Receiver<Event>,
    leads: &AtomicBool,
    drops: &Sender<Task>,
    others: &Sender<Task>,
) {
    let mut out = Effects::new();
    loop {
        let wait = steward.next_deadline().since(clock::now());
        let event = match events.recv_timeout(wait) {
            Ok(event) => event,
            Err(RecvTimeoutError::Timeout) => Event::Tick,
            Err(RecvTimeoutError::Disconnected) => return,
        };
        records.view(|view| {
            steward.handle(clock::now(), view, event, &mut out);
            leads.store(steward.is_steward(view), Ordering::Relaxed);
        });
        for task in out.drain() {
            let queue = if matches!(task.1, Action::Drop { .. }) { drops } else { others };
            // The executors live as long as this thread.
            let _ = queue.send(task);
        }
    }
}

/// What is told where it could not be done.
fn describe(action: &Action) -> &'static str {
    match action {
        Action::BeSteward { .. } => "taking the grid's stewardship is tried again",
        Action::Commit { change: Change::Age | Change::GiveUp { .. }, .. } => "looking after the trash",
        Action::Commit { .. } | Action::Drop { .. } => "deleting volumes goes on later",
        Action::Beat { .. } => "the metadata store's beat",
        Action::LookAtSpace => "looking whether the trash has to be emptied",
        Action::OpenForCare { .. } | Action::LookAtCare { .. } | Action::EndCare { .. } => {
            "looking after volumes that are not in service"
        }
        Action::CopyRecords => "the metadata were not copied to the grid's devices",
        Action::SettleRemoved => "looking whether all that removed machines held is made again",
    }
}

fn is_busy(info: &VolumeInfo) -> bool {
    info.live
        .as_ref()
        .is_none_or(|live| live.degraded_segments + live.at_risk_entries + live.layers_going + live.left_to_drain > 0)
}

/// What a volume is called while nobody serves it: one in the trash has a name that no volume can have.
fn name_of(view: &View, volume: VolumeId) -> Option<String> {
    let known = view.volume(volume)?;
    Some(match view.get(&trash_key(volume)) {
        Some(_) => name_in_trash(&known.name, volume),
        None => known.name.clone(),
    })
}

impl ControlPlane {
    /// Names of volumes that no host has in service; also of those in the trash.
    pub(super) fn unserved(&self) -> Vec<String> {
        self.records.view(|view| steward::unserved(view).filter_map(|volume| name_of(view, volume)).collect())
    }

    fn do_duty(&self, action: &Action) -> Result<Outcome> {
        match action {
            Action::BeSteward { replaces } => {
                let taken = self.presence.be_steward(&*self.records, *replaces)?;
                Ok(taken.map_or(Outcome::Failed, Outcome::Steward))
            }
            Action::Commit { volume, change, compares, writes } => {
                let before = self.records.view(|view| view.get(&root_key(*volume)).cloned());
                let is_done = self.commit_duty(compares, writes)?;
                if is_done {
                    let name = before.and_then(|record| Root::decode(&record.value).ok()).map(|root| root.name);
                    self.after(*volume, &name.unwrap_or_default(), *change)?;
                }
                Ok(if is_done { Outcome::Done } else { Outcome::Failed })
            }
            Action::Drop { volume, epoch, place: (node, device) } => {
                let request = Box::new(Request::DropVolume { device: *device, volume: *volume, epoch: *epoch });
                let reply = ask(&self.reactors, CALL_MAX, |answer| Command::Call { node: *node, request, answer });
                // One that is away is asked again.
                Ok(if matches!(reply, Ok(Some(Reply::Done))) { Outcome::Done } else { Outcome::Failed })
            }
            Action::Beat { compares, writes } => {
                Ok(if self.commit_duty(compares, writes)? { Outcome::Done } else { Outcome::Failed })
            }
            Action::LookAtSpace => {
                let live = self.live()?;
                let by_node: Vec<&[_]> = live.nodes.iter().map(|node| &node.devices[..]).collect();
                let layouts: Vec<Layout> = self.catalog.all()?.iter().map(|entry| entry.root.layout).collect();
                Ok(Outcome::Space { is_short: is_short(&by_node, &layouts) })
            }
            Action::OpenForCare { volume } => self.open_for_care(*volume),
            Action::LookAtCare { volume } => {
                let name = self.records.view(|view| name_of(view, *volume));
                let Some(name) = name else { return Ok(Outcome::Care { is_busy: None }) };
                let info = self.ask(|answer| Command::Volume { name, answer })?;
                let info = info.filter(|info| !info.exported && info.state != VolumeState::Deposed);
                Ok(Outcome::Care { is_busy: info.as_ref().map(is_busy) })
            }
            Action::EndCare { volume } => {
                let _alone = self.alone();
                if let Some(name) = self.records.view(|view| name_of(view, *volume)) {
                    match self.end_care(&name)? {
                        CloseOutcome::Closed | CloseOutcome::NotOpen | CloseOutcome::InUse(_) => {}
                    }
                }
                Ok(Outcome::Done)
            }
            Action::CopyRecords => Ok(Outcome::Copied { is_everywhere: self.copy_records()?.is_everywhere() }),
            Action::SettleRemoved => {
                // Where somebody does not answer it is not known yet.
                let _ = self.settle_removed();
                Ok(Outcome::Done)
            }
        }
    }

    fn commit_duty(&self, compares: &Compares, writes: &Writes) -> Result<bool> {
        let compare = |(key, version): &(String, _)| Compare { key: key.clone(), version: *version };
        let compares: Vec<Compare> = compares.iter().map(compare).collect();
        let write =
            |(key, value): &(String, Option<Vec<u8>>)| Write { key: key.clone(), value: value.clone(), lease: None };
        let writes: Vec<Write> = writes.iter().map(write).collect();
        Ok(matches!(self.records.commit(&compares, &writes)?, Commit::Done(_)))
    }

    /// What follows here from a transaction that was carried out.
    fn after(&self, volume: VolumeId, name: &str, change: Change) -> Result<()> {
        match change {
            Change::GiveUp { for_space } => {
                let why = if for_space { "devices are nearly full" } else { "its time is over" };
                logger::info(format_args!("volume {name} ({volume}) in the trash is deleted for good: {why}"));
                self.let_go_for_good(volume)?;
            }
            Change::Delete => self.let_go_for_good(volume)?,
            Change::KeepIt => logger::warn(format_args!("{}", self.still_needed(volume)?)),
            Change::Finish => {
                logger::info(format_args!("volume {name} ({volume}) is deleted, its space returned"));
            }
            Change::EndCreation | Change::Forget | Change::Age => {}
        }
        Ok(())
    }

    /// Nothing of the volume stays here.
    pub(super) fn let_go_for_good(&self, volume: VolumeId) -> Result<()> {
        self.order(Order::LetGo { volume })?;
        self.order(Order::SetReservation { volume, reservation: None })?;
        self.keys.forget(volume)
    }

    fn still_needed(&self, volume: VolumeId) -> Result<StillNeeded> {
        let root = self.catalog.live_root(volume)?.context("the volume is gone")?;
        Ok(StillNeeded { volume: root.name.clone(), by: self.catalog.needed_by(&root)?.join(", ") })
    }

    /// Deletes a volume whose deletion was begun, up to where there is no way back; the steward does the rest.
    pub(super) fn delete_for_good(&self, volume: VolumeId) -> Result<()> {
        for _ in 0..COMMITS_MAX {
            let step = self.records.view(|view| {
                let record = view.get(&deleting_key(&volume.to_string()))?;
                let deleting: DeletingRecord = decode(&record.value).ok()?;
                Some(deletion::next(view, volume, &deleting, record.version))
            });
            let (change, compares, writes) = match step {
                None | Some(Step::Drop { .. }) => return Ok(()),
                Some(Step::Unreadable) => bail!("a record of the volume, or of one that was made of it, can't be read"),
                Some(Step::Commit(_, change, compares, writes)) => (change, compares, writes),
            };
            // Before the record says that it is not in the way any more.
            let needed = (change == Change::KeepIt).then(|| self.still_needed(volume)).transpose()?;
            if self.commit_duty(&compares, &writes)? {
                if let Some(needed) = needed {
                    return Err(needed.into());
                }
                if change == Change::Delete {
                    return self.let_go_for_good(volume);
                }
            }
        }
        refuse!(Code::Changed, "the volume's records are changed by others all the time; try again")
    }

    /// It may have been exported or deleted since it was planned, or its key can't be had: then it has had its turn.
    fn open_for_care(&self, volume: VolumeId) -> Result<Outcome> {
        let _alone = self.alone();
        let entry = self.catalog.kept_entry(volume)?.filter(|entry| entry.served_by.is_none());
        let Some(entry) = entry else { return Ok(Outcome::Failed) };
        let Some(spec) = self.keys.spec_now_and_then(&entry) else { return Ok(Outcome::Failed) };
        // Who has claimed it by the time that it is opened keeps it.
        let spec = OpenSpec { only_from: Some(entry.root.epoch), ..spec };
        self.order(Order::Open { spec, exported: false })?;
        Ok(Outcome::Done)
    }
}
