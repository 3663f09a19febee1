//! The shell around [`holdfast_cluster::Cluster`]: which host serves which volume.
//!
//! Role: one thread drives the machine with what the records, the reactor and commands tell; [`EXECUTORS`] others carry its
//! actions out. They choose nothing and repeat nothing: what came of an action goes back to the machine, which plans anew.
//!
//! A command that works on a volume holds it for that long ([`Assignment::hold`]). What is offered together with other hosts is told
//! to the reactor from here, too ([`ControlPlane::publish_offers`]).

use super::catalog::{Catalog, Entry};
use super::commands::{self, Command};
use super::control::{ANSWER_MAX, CLOSE_MAX, ControlPlane};
use super::executors;
use super::presence::{TTL, addresses_of};
use super::records::{News, Records};
use crate::logger;
use anyhow::{Context, Result};
use holdfast_api::{Code, refuse};
use holdfast_base::{Effects, MetaVersion, NodeId, VolumeId};
use holdfast_cluster::{Action, ActionId, Cluster, Config, Effect, Event, Outcome, SILENT_FOR};
use holdfast_format::meta::{ExportRecord, decode};
use holdfast_format::wire::{Reply, Request};
use holdfast_host::homes::Offered;
use holdfast_host::planned::{self, InService, Offering, Way};
use holdfast_host::{OpenSpec, Order};
use holdfast_runtime::clock;
use holdfast_runtime::meta::{Commit, Compare, MetaStore, Write};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

/// Actions that are carried out at a time: each may wait for the store, or for another host.
const EXECUTORS: usize = 16;

/// How long the host that hands a volume over may take to stop serving it.
const YIELD_MAX: Duration = Duration::from_secs(1);

/// How long nodes may take to say whether they hear of a host.
const HEARD_MAX: Duration = Duration::from_millis(500);

/// Pace of looking whether this process stood still.
const LOOK_PACE: Duration = Duration::from_secs(1);

/// A process that has not run for so long does not know whether the store was silent, and whose leases are over by now.
const STOOD_STILL: Duration = Duration::from_secs(2);

/// How long a command waits for what is under way about its volume.
const HOLD_MAX: Duration = Duration::from_secs(15);

/// What an executor is to do.
enum Task {
    /// With the version of the volume's record that it was planned by.
    Act {
        id: ActionId,
        action: Action,
        planned_by: MetaVersion,
    },
    AskNodes {
        host: String,
    },
}

pub enum Input {
    Event(Event),
    /// A command is about to work on the volume.
    Hold {
        volume: VolumeId,
        granted: SyncSender<()>,
    },
}

/// The way to the machine; clones share it.
#[derive(Clone)]
pub struct Assignment(Sender<Input>);

/// While it is there nothing is begun about the volume but by its owner.
pub struct Hold(VolumeId, Assignment);

impl Drop for Hold {
    fn drop(&mut self) {
        self.1.tell(Event::Release { volume: self.0 });
    }
}

impl Assignment {
    pub fn new() -> (Assignment, Receiver<Input>) {
        let (sender, inputs) = channel();
        (Assignment(sender), inputs)
    }

    /// What is told when the host ends is heard by nobody.
    pub fn tell(&self, event: Event) {
        let _ = self.0.send(Input::Event(event));
    }

    pub fn hold(&self, volume: VolumeId) -> Result<Hold> {
        let (granted, is_granted) = sync_channel(1);
        let _ = self.0.send(Input::Hold { volume, granted });
        // From here on it is let go of whatever comes of it.
        let hold = Hold(volume, self.clone());
        if is_granted.recv_timeout(HOLD_MAX).is_err() {
            refuse!(
                Code::Unavailable,
                "the volume is being moved between hosts, and that takes long; `holdfast volume list` shows where it is"
            );
        }
        Ok(hold)
    }
}

/// Begins to assign volumes, once there is somebody who can be asked.
pub fn start(plane: &Arc<ControlPlane>, inputs: Receiver<Input>) -> Result<()> {
    let own = Arc::clone(plane);
    let actions = executors::start("executor", EXECUTORS, move |task| match task {
        Task::Act { id, action, planned_by } => {
            // What is not asked for any more is left out, and planned anew.
            let is_current = own.records.view(|view| view.export_version(action.volume())) == planned_by;
            let outcome = if is_current { own.carry_out(action) } else { Ok(Outcome::Done) };
            let outcome = outcome.unwrap_or(Outcome::Failed);
            own.assignment.tell(Event::Outcome { id, outcome });
        }
        Task::AskNodes { host } => {
            let nodes = own.who_does_not_hear(&host);
            own.assignment.tell(Event::Silent { host, nodes });
        }
    })?;
    let config = Config::new(plane.catalog.host(), TTL);
    let (records, own) = (Arc::clone(&plane.records), Arc::clone(plane));
    let drive = move || run(&mut Cluster::new(config), &records, &inputs, &own, &actions);
    std::thread::Builder::new().name("assignment".to_string()).spawn(drive).context("no thread for assignment")?;
    let assignment = plane.assignment.clone();
    plane.records.listen(move |news| {
        assignment.tell(match news {
            News::Changed(changes) => Event::Changed(changes),
            News::Right(is_right) => Event::Store { is_right },
        });
    });
    Ok(())
}

fn run(
    cluster: &mut Cluster,
    records: &Records,
    inputs: &Receiver<Input>,
    plane: &ControlPlane,
    actions: &Sender<Task>,
) {
    let mut out = Effects::new();
    let (mut waiting, mut next_ticket) = (BTreeMap::<u64, SyncSender<()>>::new(), 0);
    let mut offering = Offering::new(plane.catalog.host());
    let mut looked_at = clock::now();
    loop {
        if clock::now().since(looked_at) > STOOD_STILL {
            // Before anything is planned by what has come meanwhile.
            let silence = Event::Store { is_right: false };
            records.view(|view| cluster.handle(clock::now(), view, silence, &mut out));
            records.forget_rightness();
        }
        looked_at = clock::now();
        let wait = cluster.next_deadline().map_or(LOOK_PACE, |at| at.since(clock::now()).min(LOOK_PACE));
        let event = match inputs.recv_timeout(wait) {
            Ok(Input::Event(event)) => event,
            Ok(Input::Hold { volume, granted }) => {
                next_ticket += 1;
                waiting.insert(next_ticket, granted);
                Event::Hold { volume, ticket: next_ticket }
            }
            Err(RecvTimeoutError::Timeout) => Event::Tick,
            Err(RecvTimeoutError::Disconnected) => return,
        };
        if let Event::Changed(changes) = &event {
            records.view(|view| offering.note(view, changes));
        }
        let mut tasks = Vec::new();
        let mut held = Vec::new();
        records.view(|view| {
            cluster.handle(clock::now(), view, event, &mut out);
            for effect in out.drain() {
                match effect {
                    Effect::Act { id, action } => {
                        let planned_by = view.export_version(action.volume());
                        tasks.push(Task::Act { id, action, planned_by });
                    }
                    Effect::AskNodes { host } => tasks.push(Task::AskNodes { host }),
                    Effect::Granted { ticket } => held.push(ticket),
                }
            }
        });
        // The executors live as long as this thread.
        tasks.into_iter().for_each(|task| drop(actions.send(task)));
        for granted in held.into_iter().filter_map(|ticket| waiting.remove(&ticket)) {
            let _ = granted.try_send(());
        }
        if std::mem::take(&mut offering.is_stale)
            && let Err(error) = plane.publish_offers()
        {
            logger::warn(format_args!("what is offered with other hosts is told again later: {error:#}"));
            offering.is_stale = true;
        }
    }
}

/// What this host offers together with others, and where those are. The store of a sharing domain has no clients.
pub(super) fn offers(
    catalog: &Catalog,
    entries: &[Entry],
    hosts: &BTreeMap<String, Vec<SocketAddr>>,
    heard_at: BTreeMap<VolumeId, String>,
) -> Offered {
    let with_clients = entries.iter().filter(|entry| !entry.root.is_store());
    let in_service = with_clients.filter_map(|entry| {
        let (volume, id, size_bytes) = (entry.root.volume, entry.id(), entry.size_bytes());
        let (host, from) = (entry.served_by.as_deref()?, entry.handed_from.as_deref());
        Some(InService { volume, id, name: entry.name(), size_bytes, host, from, offered_by: &entry.offered_by })
    });
    let (offers, mut reaches) = planned::offered(catalog.host(), in_service);
    reaches.extend(heard_at.values().cloned());
    let reached = reaches.into_iter().filter_map(|host| hosts.get_key_value(&host)).filter(|(_, at)| !at.is_empty());
    let hosts = reached.map(|(host, at)| (host.clone(), at.clone())).collect();
    Offered { offers, hosts, heard_at }
}

impl ControlPlane {
    /// Tells the reactor what is offered together with other hosts, as the records say it now.
    pub(super) fn publish_offers(&self) -> Result<()> {
        // One at a time, so that what is newer is told last.
        let mut told = self.offered.lock().unwrap_or_else(PoisonError::into_inner);
        let offered: Vec<VolumeId> = self.records.view(|view| {
            let is_mine = |export: &ExportRecord| export.offered_by.contains(self.catalog.host());
            let volumes: BTreeSet<VolumeId> = view.exports().filter(|(_, e)| is_mine(e)).map(|(v, _)| v).collect();
            let clones: Vec<VolumeId> = view.clones().filter(|(_, of)| volumes.contains(of)).map(|(c, _)| c).collect();
            volumes.into_iter().chain(clones).collect()
        });
        // One that can't be read is not offered; it is told of elsewhere.
        let entries: Vec<Entry> = offered.into_iter().filter_map(|id| self.catalog.entry(id).ok().flatten()).collect();
        let (hosts, heard_at) = self.records.view(|view| {
            let at = |(host, record): (&String, &Option<_>)| (host.clone(), addresses_of(record.as_ref()));
            (view.hosts().iter().map(at).collect(), planned::heard_at(self.catalog.host(), view))
        });
        let live = entries.iter().filter(|entry| !entry.root.deleted).cloned().collect::<Vec<_>>();
        let next = offers(&self.catalog, &live, &hosts, heard_at);
        if told.as_ref() != Some(&next) {
            self.offer(next.clone())?;
            *told = Some(next);
        }
        Ok(())
    }

    fn carry_out(&self, action: Action) -> Result<Outcome> {
        let volume = action.volume();
        let Some(way) = Way::of(action, |volume| self.spec_for(volume))? else { return Ok(Outcome::Failed) };
        let order = match way {
            Way::Commit { compares, writes } => return self.commit(volume, compares, writes),
            Way::Order(order) => *order,
        };
        let outcome = match order {
            Order::AskToYield { .. } => match self.order_within(YIELD_MAX, order) {
                Ok(outcome) => outcome,
                Err(_) => return Ok(Outcome::Asked(false)),
            },
            Order::LetGo { .. } => self.order_within(CLOSE_MAX.min(ANSWER_MAX), order)?,
            order => {
                if let Order::Open { spec, .. } = &order {
                    logger::info(format_args!("volume {} is to be in service here, and is opened", spec.name));
                }
                self.order(order)?
            }
        };
        Ok(planned::came_of(outcome))
    }

    /// Nodes that have heard nothing of a host for long enough. One that does not answer has not said so.
    fn who_does_not_hear(&self, host: &str) -> BTreeSet<NodeId> {
        let devices = self.config().devices();
        let nodes: BTreeSet<NodeId> = devices.into_iter().map(|(node, _)| node).collect();
        let ask = |node: &NodeId| {
            let (answer, answered) = sync_channel(1);
            let request = Box::new(Request::Heard { host: host.to_string() });
            self.reactors
                .post(Command::Call { node: *node, request, answer: commands::Answer::Whole(answer) })
                .ok()
                .map(|()| (*node, answered))
        };
        let asked: Vec<_> = nodes.iter().filter_map(ask).collect();
        let patience = std::time::Instant::now() + HEARD_MAX;
        let is_silent = |answered: Receiver<Option<Reply>>| {
            let left = patience.saturating_duration_since(std::time::Instant::now());
            let reply = answered.recv_timeout(left).ok().flatten();
            matches!(reply, Some(Reply::Heard { ms }) if Duration::from_millis(ms) >= SILENT_FOR)
        };
        asked.into_iter().filter_map(|(node, answered)| is_silent(answered).then_some(node)).collect()
    }

    /// How the volume is opened: only if nobody has since what is known of it. Nothing where its key can't be had now.
    fn spec_for(&self, volume: VolumeId) -> Result<Option<OpenSpec>> {
        let entry = self.catalog.entry(volume)?.context("the volume is gone")?;
        let only_from = Some(entry.root.epoch);
        Ok(self.keys.spec_now_and_then(&entry).map(|spec| OpenSpec { only_from, ..spec }))
    }

    fn commit(
        &self,
        volume: VolumeId,
        compares: Vec<(String, MetaVersion)>,
        writes: Vec<(String, Option<Vec<u8>>)>,
    ) -> Result<Outcome> {
        let export = self.records.view(|view| view.export(volume).map(|(_, export)| export.clone()));
        // Whoever has no key for it leaves it to the others.
        let is_failing_over = export.as_ref().is_some_and(|export| export.failover);
        if is_failing_over && self.spec_for(volume)?.is_none() {
            return Ok(Outcome::Failed);
        }
        let before = export.map(|export| export.host);
        let compares: Vec<Compare> = compares.into_iter().map(|(key, version)| Compare { key, version }).collect();
        let writes: Vec<Write> = writes.into_iter().map(|(key, value)| Write { key, value, lease: None }).collect();
        let is_done = matches!(self.records.commit(&compares, &writes)?, Commit::Done(_));
        let after = writes.first().and_then(|write| decode::<ExportRecord>(write.value.as_ref()?).ok());
        if let (true, Some(before), Some(after)) = (is_done, before, after)
            && before != after.host
        {
            logger::warn(format_args!("volume {volume}: its host {before} is gone; it is taken over"));
        }
        Ok(Outcome::Done)
    }
}
