//! Real hosts in the place of modelled volumes: what the control planes plan becomes orders of [`crate::multi_host`]'s hosts, over one
//! store that has both the records and the roots.
//!
//! Role: what the control plane of a host says to that host, and back, through the same pure code as in production
//! ([`holdfast_host::planned`]). Nothing is decided here.

use super::host::{HostEvent, PEER_PATIENCE, Purpose, number_of_name};
use super::operator::What;
use super::store::{Answer, Op};
use super::{Grid, ms};
use crate::multi_host::planned::HostReport;
use crate::multi_host::{MultiHost, MultiHostOutcome, OTHER};
use crate::world::MachineAt;
use holdfast_base::{MetaReply, MetaRequest, MetaVersion, VolumeId};
use holdfast_cluster::machine::ActionId;
use holdfast_cluster::view::Record;
use holdfast_cluster::{Action, Local, Outcome};
use holdfast_format::root::{Root, root_key};
use holdfast_host::planned::{InService, Way, came_of, local_of, offered};
use holdfast_host::{OpenSpec, Order};
use std::convert::Infallible;
use std::time::Duration;

/// How long clients may wait when nothing is wrong any more.
const ANSWERED_WITHIN: Duration = Duration::from_secs(30);

/// Who waits for the outcome of an order.
#[derive(Clone, Copy, Debug)]
pub(super) enum Ordered {
    Action(ActionId),
    /// To another host, for which it waits only so long.
    Question(ActionId),
    /// A command.
    Task(u64),
}

/// Of a record as it was found.
pub(super) fn version_of(found: Option<&Option<Record>>) -> MetaVersion {
    found.and_then(Option::as_ref).map_or(MetaVersion::ABSENT, |record| record.version)
}

impl Grid {
    pub(super) fn is_real(&self) -> bool {
        self.real.is_some()
    }

    /// Has the real hosts do something, and hears what they tell.
    pub(super) fn with_real<T>(&mut self, act: impl FnOnce(&mut MultiHost) -> T) -> Option<T> {
        let mut real = self.real.take()?;
        real.advance(self.now);
        let done = act(&mut real);
        let (told, failure) = (real.take_reports(), real.take_failure());
        self.real = Some(real);
        if let Some(why) = failure {
            self.fail(why);
        }
        for told in told {
            self.on_report(told);
        }
        Some(done)
    }

    fn on_report(&mut self, told: HostReport) {
        match told {
            HostReport::Done { host, ticket, outcome } => match self.hosts[host].orders.remove(&ticket) {
                Some(Ordered::Action(id)) => self.finish(host, id, came_of(outcome)),
                Some(Ordered::Question(id)) => {
                    let has_answered = came_of(outcome) == Outcome::Asked(true);
                    self.post(host, Duration::ZERO, HostEvent::HasYielded { id, has_answered });
                }
                Some(Ordered::Task(task)) => self.post(host, Duration::ZERO, HostEvent::Task { task }),
                // Of a process that is no more.
                None => {}
            },
            HostReport::Changed { host, volume } => self.post(host, Duration::ZERO, HostEvent::LookAtVolume { volume }),
            HostReport::Meta { at, token, request } => {
                let (op, guard) = match request {
                    MetaRequest::Get { key } => (Op::Get(key), None),
                    MetaRequest::Swap { key, expect, value, guard } => {
                        let version = guard.as_ref().map(|guard| guard.version);
                        let guard = guard.map(|guard| (guard.key, guard.version));
                        let compares = std::iter::once((key.clone(), expect)).chain(guard).collect();
                        (Op::Commit(compares, vec![(key, value)], None), version)
                    }
                };
                self.ask(at.host, op, Purpose::Root { at, token, guard }, None);
            }
        }
    }

    /// The store has answered a controller.
    pub(super) fn answer_root(&mut self, at: MachineAt, token: u64, guard: Option<MetaVersion>, answer: Answer) {
        let parts = |found: Option<Record>| match found {
            Some(record) => (record.version, Some(record.value.to_vec())),
            None => (MetaVersion::ABSENT, None),
        };
        let reply = match answer {
            Answer::Record(found) => {
                let (version, value) = parts(found);
                MetaReply::Record { version, value }
            }
            Answer::Done(version) => MetaReply::Swapped { version },
            Answer::Conflict(found) => {
                let does_guard_hold = guard.is_none_or(|guard| guard == version_of(found.get(1)));
                let (version, value) = parts(found.into_iter().next().flatten());
                match does_guard_hold {
                    true => MetaReply::Conflict { version, value },
                    false => MetaReply::GuardFailed { version, value },
                }
            }
            _ => MetaReply::Unknown,
        };
        self.with_real(|real| real.answer_meta(at, token, reply));
    }

    /// What the host does with a volume goes to its control plane.
    pub(super) fn look(&mut self, host: usize, volume: VolumeId) {
        let local = self.real.as_ref().and_then(|real| real.volume(host, volume)).map(local_of);
        if self.hosts[host].locals.get(&volume).copied() == local {
            return;
        }
        let word = local.map_or(9, |local| local as u64);
        self.trace(&[40, host as u64, volume.0 as u64, word], || format!("h{host}: {volume} {local:?}"));
        if local == Some(Local::Open) {
            self.check_deposing(host, volume);
        }
        self.set_local(host, volume, local);
        if local.is_none() {
            self.wake_tasks(host, volume);
        }
    }

    /// Commands may wait until the volume is gone.
    fn wake_tasks(&mut self, host: usize, volume: VolumeId) {
        let tasks = self.hosts[host].tasks.iter().filter(|(_, task)| task.volume == volume);
        for task in tasks.map(|(task, _)| *task).collect::<Vec<_>>() {
            self.post(host, Duration::ZERO, HostEvent::Task { task });
        }
    }

    // ---- orders ----

    fn give(&mut self, host: usize, by: Ordered, order: Order) {
        let ticket = self.number();
        self.hosts[host].orders.insert(ticket, by);
        self.with_real(|real| real.give(host, ticket, order));
    }

    pub(super) fn order_action(&mut self, host: usize, id: ActionId, action: Action) {
        match &action {
            Action::Open { volume, .. } => self.check_opening(host, *volume),
            Action::LetGo { volume } => self.check_letting_go(host, *volume),
            _ => {}
        }
        let Ok(mut way) = Way::of(action, |volume| Ok::<_, Infallible>(self.spec_for(host, volume)));
        if self.plan.mistakes.has_no_guard()
            && let Some(Way::Order(order)) = &mut way
            && let Order::Open { spec, .. } = &mut **order
        {
            spec.guard = None;
        }
        match way {
            Some(Way::Order(order)) if matches!(*order, Order::AskToYield { .. }) => {
                self.hosts[host].asking.insert(id);
                self.post(host, PEER_PATIENCE, HostEvent::HasYielded { id, has_answered: false });
                self.give(host, Ordered::Question(id), *order);
            }
            Some(Way::Order(order)) => self.give(host, Ordered::Action(id), *order),
            Some(Way::Commit { .. }) => unreachable!("a transaction is the store's"),
            None => self.finish(host, id, Outcome::Failed),
        }
    }

    pub(super) fn order_opening(&mut self, host: usize, volume: VolumeId) {
        if let Some(spec) = self.spec_for(host, volume) {
            let spec = OpenSpec { guard: Some(self.hosts[host].view.export_version(volume)), ..spec };
            self.with_real(|real| real.order(host, OTHER, Order::Open { spec, exported: true }));
        }
    }

    pub(super) fn order_closing(&mut self, host: usize, volume: VolumeId, task: u64) {
        let (name, force, discard, only_care) = (self.name_known(host, volume), true, false, false);
        self.give(host, Ordered::Task(task), Order::Close { name, force, discard, only_care });
    }

    fn name_known(&self, host: usize, volume: VolumeId) -> String {
        self.hosts[host].view.volume(volume).map(|known| known.name.clone()).unwrap_or_default()
    }

    pub(super) fn order_preparing(&mut self, host: usize, volume: VolumeId, task: u64) {
        let name = self.name_known(host, volume);
        self.give(host, Ordered::Task(task), Order::Prepare { name });
    }

    /// How the volume is opened: only if nobody has since what the host knows of it.
    fn spec_for(&self, host: usize, volume: VolumeId) -> Option<OpenSpec> {
        let record = self.hosts[host].view.get(&root_key(volume))?;
        let root = Root::decode(&record.value).ok()?;
        let only_from = Some(root.epoch).filter(|_| !self.plan.mistakes.claims_whatever);
        Some(OpenSpec { only_from, ..OpenSpec::of(&root, true, Default::default(), None) })
    }

    /// Tells the host what it offers with others, if that has changed.
    pub(super) fn publish(&mut self, host: usize) {
        let view = &self.hosts[host].view;
        let exports = view.exports().filter_map(|(volume, export)| {
            let root = Root::decode(&view.get(&root_key(volume))?.value).ok()?;
            Some((root, export))
        });
        let exports: Vec<_> = exports.filter(|(root, _)| !root.deleted).collect();
        let in_service = exports.iter().map(|(root, export)| InService {
            volume: root.volume,
            id: root.volume,
            name: &root.name,
            size_bytes: root.size_bytes,
            host: &export.host,
            from: export.from.as_deref(),
            offered_by: &export.offered_by,
        });
        let (offers, mut reaches) = offered(&self.hosts[host].name, in_service);
        reaches.retain(|name| view.has_host(name));
        let next = (offers, reaches);
        if self.hosts[host].offers == next {
            return;
        }
        self.hosts[host].offers = next.clone();
        let hosts = next.1.into_iter().filter_map(|name| Some((name.clone(), number_of_name(&name)?))).collect();
        self.with_real(|real| {
            real.order(host, OTHER, Order::Offer { offers: next.0, hosts, heard_at: Default::default() })
        });
    }

    /// What is published rests on what the view says a moment later.
    pub(super) fn note_offers(&mut self, host: usize, changes: &holdfast_cluster::Changes) {
        let own = &mut self.hosts[host];
        own.offering.note(&own.view, changes);
        if std::mem::take(&mut own.offering.is_stale) {
            let after = ms(self.prng.below(4));
            self.post(host, after, HostEvent::PublishOffers);
        }
    }

    // ---- nodes, clients ----

    /// The host reaches the nodes that it does now.
    pub(super) fn cut_real_nodes(&mut self, host: usize) {
        let away = self.hosts[host].nodes_away(self.now);
        self.with_real(|real| real.cut_nodes(host, away));
    }

    fn await_clients(&mut self, what: &str) -> Result<(), String> {
        let end = self.now + ANSWERED_WITHIN;
        while self.real.as_ref().is_some_and(|real| !real.are_answered()) {
            if self.now > end {
                let waiting = self.real.as_ref().map(|real| real.waiting());
                return Err(format!("{what}: not within {ANSWERED_WITHIN:?}: {waiting:?}"));
            }
            self.run_until(self.now + ms(20))?;
        }
        Ok(())
    }

    /// Volumes that an operator has taken out of service are put back: their clients wait.
    pub(super) fn serve_all(&mut self) -> Result<(), String> {
        let volumes = if self.is_real() { self.plan.volumes } else { 0 };
        for number in 0..volumes {
            let host = self.prng.below(self.hosts.len() as u64) as usize;
            let host =
                if self.hosts[host].is_running() { Some(host) } else { self.hosts.iter().position(|own| own.is_up) };
            if let Some(host) = host.filter(|_| self.record(number).is_none()) {
                self.command(host, number, What::Export { takeover: false });
                self.run_until(self.now + ms(200))?;
            }
        }
        Ok(())
    }

    /// Clients get what they wait for, and read back what they wrote.
    pub fn settle_clients(&mut self) -> Result<(), String> {
        self.await_clients("requests are answered")?;
        self.with_real(|real| real.read_back());
        self.await_clients("everything is read back")?;
        self.with_real(|real| real.check_history()).unwrap_or(Ok(()))
    }

    /// What clients have seen so far.
    pub fn of_hosts(&self) -> Option<MultiHostOutcome> {
        self.real.as_ref().map(|real| real.outcome())
    }
}
