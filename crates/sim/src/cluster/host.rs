//! A host's shell around its machine: it keeps a lease, takes the store's records in by a listing and a watch, tells the machine
//! what it hears and does, and carries actions out.

use super::operator::Task;
use super::real::Ordered;
use super::steward::duties_of;
use super::store::{Answer, Compares, Op, Store, Which, Writes};
use super::upkeep::HostUpkeep;
use super::volume::{Ask, Step, Vol, node_id};
use super::{About, ClusterPlan, Event, Grid, LEASE, ms, number_of};
use crate::cluster::store::MARK;
use crate::world::MachineAt;
use holdfast_base::{Effects, Instant, MetaVersion, NodeId, VolumeId};
use holdfast_cluster::machine::{ActionId, Config};
use holdfast_cluster::steward::{self as duties, Steward};
use holdfast_cluster::upkeep as chores;
use holdfast_cluster::view::{Asked, Record};
use holdfast_cluster::{Action, Cluster, Effect, Event as ClusterEvent, Local, Outcome, View};
use holdfast_format::meta::{BEAT_KEY, BeatRecord, HostRecord, Other, decode, encode, host_key};
use holdfast_host::Offer;
use holdfast_host::planned::Offering;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

const RENEW_EVERY: Duration = Duration::from_secs(1);

/// A store that leaves a request unanswered for so long is silent.
const SILENT_AFTER: Duration = Duration::from_secs(1);

/// What came of a request that is unanswered for so long nobody knows.
const GIVEN_UP_AFTER: Duration = Duration::from_secs(2);

/// How long another host may take to answer.
pub(super) const PEER_PATIENCE: Duration = Duration::from_secs(1);

/// Who was in trouble is back in everything after that: what was asked is given up, the lease taken anew.
const RECOVERS_IN: Duration = Duration::from_secs(6);

pub fn name_of(host: usize) -> String {
    format!("h{host}")
}

pub fn number_of_name(name: &str) -> Option<usize> {
    name.strip_prefix('h')?.parse().ok()
}

#[derive(Clone, Debug)]
pub(super) enum HostEvent {
    Answer { request: u64, answer: Answer },
    Overdue { request: u64 },
    GivenUp { request: u64 },
    Watch { watch: u64, upto: u64 },
    WatchFails { watch: u64 },
    List,
    Renew,
    Carry { id: ActionId, action: Action, planned_by: MetaVersion },
    Tick,
    Volume { volume: VolumeId, run: u64, step: Step },
    AskedToYield { by: (usize, u64), id: ActionId, volume: VolumeId },
    HasYielded { id: ActionId, has_answered: bool },
    LookAtVolume { volume: VolumeId },
    PublishOffers,
    Task { task: u64 },
    Nodes,
    Silent { host: String, nodes: BTreeSet<NodeId> },
    Duty { id: duties::ActionId, action: duties::Action },
    DutyTick,
    DutyDone { id: duties::ActionId, outcome: duties::Outcome },
    KeeperTick,
    Seen { look: chores::LookId, facts: Option<chores::Facts> },
    Chore { action: chores::Action },
    ChoreDone { chore: chores::Chore, is_done: bool },
}

/// What a request was for.
#[derive(Clone, Debug)]
pub(super) enum Purpose {
    List(Asked),
    Lease,
    Action {
        id: ActionId,
        compares: Compares,
        writes: Writes,
    },
    Volume {
        volume: VolumeId,
        run: u64,
        ask: Ask,
    },
    Task {
        task: u64,
        compares: Compares,
        writes: Writes,
    },
    /// Of a real host's controller.
    Root {
        at: MachineAt,
        token: u64,
        /// The version of the record that it rests on.
        guard: Option<MetaVersion>,
    },
    Duty {
        id: duties::ActionId,
        compares: Compares,
        writes: Writes,
    },
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Watch {
    pub id: u64,
    /// Everything up to here was told.
    upto: u64,
    of: Which,
}

/// One host's process, and the ways from its machine.
pub(super) struct Host {
    pub name: String,
    pub is_up: bool,
    pub boot: u64,
    pub hangs_until: Option<Instant>,
    /// For how long it does, or did.
    pub hangs_for: Duration,
    /// What waits in its sockets, and for its timers, while it hangs.
    deferred: VecDeque<HostEvent>,
    pub view: View,
    /// How far the store had come by what the process before has seen.
    remembered: Option<BeatRecord>,
    pub cluster: Cluster,
    pub steward: Steward,
    pub(super) keeper: HostUpkeep,
    pub(super) duty_tick_at: Option<Instant>,
    /// What the machine was told of the store.
    pub is_right: bool,
    /// It ever was: before it serves nothing.
    pub was_right: bool,
    pub watch: Option<Watch>,
    pub lag: Duration,
    pub watch_stalled_until: Instant,
    is_listing: bool,
    lists_at: Option<Instant>,
    pub(super) lease: Option<u64>,
    is_named: bool,
    name_version: MetaVersion,
    requests: BTreeMap<u64, Purpose>,
    pub volumes: BTreeMap<VolumeId, Vol>,
    /// What its machine was told that it does with volumes.
    pub locals: BTreeMap<VolumeId, Local>,
    /// Orders of its real host whose outcome is waited for.
    pub(super) orders: BTreeMap<u64, Ordered>,
    pub(super) offering: Offering,
    pub(super) offers: (Vec<Offer>, BTreeSet<String>),
    pub tasks: BTreeMap<u64, Task>,
    /// By how many commands a volume is held.
    pub held: BTreeMap<VolumeId, usize>,
    pub(super) asking: BTreeSet<ActionId>,
    tick_at: Option<Instant>,
    pub nodes_away: (usize, Instant),
    pub cut_store_until: Instant,
    /// From then on nothing has been wrong with it for long enough.
    pub well_from: Instant,
    /// Since when it runs, and reaches the nodes that it needs.
    pub reaches_from: Instant,
    pub ticks: u64,
    pub actions: u64,
}

impl Host {
    pub(super) fn new(number: usize, plan: &ClusterPlan, lag: Duration, remembered: Option<BeatRecord>) -> Host {
        let name = name_of(number);
        let mut config = Config::new(&name, LEASE);
        config.mutations = plan.mutations;
        let keeper = HostUpkeep::new(&name, plan);
        Host {
            name,
            is_up: false,
            boot: 0,
            hangs_until: None,
            hangs_for: Duration::ZERO,
            deferred: VecDeque::new(),
            view: View::new(
                Some(MARK).filter(|_| !plan.mistakes.believes_any_listing),
                remembered.clone().filter(|_| !plan.mistakes.forgets_the_beat),
            ),
            remembered,
            cluster: Cluster::new(config),
            steward: Steward::new(Instant::ZERO, duties_of((number, 0), plan)),
            keeper,
            duty_tick_at: None,
            is_right: false,
            was_right: false,
            watch: None,
            lag,
            watch_stalled_until: Instant::ZERO,
            is_listing: false,
            lists_at: None,
            lease: None,
            is_named: false,
            name_version: MetaVersion::ABSENT,
            requests: BTreeMap::new(),
            volumes: BTreeMap::new(),
            locals: BTreeMap::new(),
            orders: BTreeMap::new(),
            offering: Offering::new(&name_of(number)),
            offers: Default::default(),
            tasks: BTreeMap::new(),
            held: BTreeMap::new(),
            asking: BTreeSet::new(),
            tick_at: None,
            nodes_away: (0, Instant::ZERO),
            cut_store_until: Instant::ZERO,
            well_from: Instant::ZERO,
            reaches_from: Instant::ZERO,
            ticks: 0,
            actions: 0,
        }
    }

    pub(super) fn is_cut_from_store(&self, now: Instant) -> bool {
        now < self.cut_store_until
    }

    /// Whether it remembers of the store that it had come further than this one.
    pub(super) fn knows_more_than(&self, store: &Store) -> bool {
        let count = |beat: BeatRecord| beat.count + 1;
        let there = store.get(BEAT_KEY).and_then(|record| decode(&record.value).ok()).map_or(0, count);
        self.view.beat().or(self.remembered.as_ref()).cloned().map_or(0, count) > there
    }

    pub(super) fn is_running(&self) -> bool {
        self.is_up && self.hangs_until.is_none()
    }

    pub(super) fn unwell(&mut self, until: Instant) {
        self.well_from = self.well_from.max(until + RECOVERS_IN);
    }

    pub(super) fn nodes_away(&self, now: Instant) -> usize {
        if now < self.nodes_away.1 { self.nodes_away.0 } else { 0 }
    }
}

impl Grid {
    // ---- the process ----

    pub(super) fn start(&mut self, host: usize) {
        if self.hosts[host].is_up {
            return;
        }
        // What was set back by less than it remembers it can't tell from the right one.
        if self.store.which == Which::Older && !self.hosts[host].knows_more_than(&self.store) {
            return self.push(self.now + ms(500), Event::Start { host });
        }
        self.trace(&[30, host as u64], || format!("h{host} starts"));
        let own = &mut self.hosts[host];
        own.is_up = true;
        own.unwell(self.now);
        self.with_real(|real| real.begin(host));
        self.post(host, Duration::ZERO, HostEvent::Renew);
        self.list_after(host, ms(5));
        self.begin_duties(host);
        self.tell_keeper(host, chores::Event::Tick);
        self.post(host, ms(1), HostEvent::Nodes);
        let back_in = self.hosts[host].nodes_away.1.since(self.now);
        self.post(host, back_in, HostEvent::Nodes);
    }

    pub(super) fn drop_process(&mut self, host: usize) {
        let old = &self.hosts[host];
        let remembered = old.view.beat().cloned().or(old.remembered.clone());
        let mut fresh = Host::new(host, &self.plan, old.lag, remembered);
        fresh.boot = old.boot + 1;
        fresh.nodes_away = old.nodes_away;
        fresh.cut_store_until = old.cut_store_until;
        fresh.watch_stalled_until = old.watch_stalled_until;
        fresh.actions = old.actions;
        fresh.ticks = old.ticks;
        // Its hand-overs are no more.
        self.pause_since.clear();
        self.hosts[host] = fresh;
    }

    pub(super) fn resume(&mut self, host: usize) {
        if self.hosts[host].hangs_until.is_none_or(|until| until > self.now) {
            return;
        }
        self.trace(&[31, host as u64], || format!("h{host} goes on"));
        self.hosts[host].hangs_until = None;
        self.with_real(|real| real.go_on(host));
        // It has not heard whether the store was silent meanwhile.
        if self.hosts[host].was_right && self.hosts[host].hangs_for >= SILENT_AFTER {
            self.on_silence(host);
        }
        for event in std::mem::take(&mut self.hosts[host].deferred) {
            self.post(host, Duration::ZERO, event);
        }
    }

    pub(super) fn post(&mut self, host: usize, after: Duration, event: HostEvent) {
        let boot = self.hosts[host].boot;
        self.push(self.now + after, Event::At { host, boot, event });
    }

    pub(super) fn on_host_event(&mut self, host: usize, boot: u64, event: HostEvent) {
        let own = &mut self.hosts[host];
        if !own.is_up || own.boot != boot {
            return;
        }
        if own.hangs_until.is_some() {
            return own.deferred.push_back(event);
        }
        match event {
            HostEvent::Answer { request, answer } => self.on_answer(host, request, answer),
            HostEvent::Overdue { request } => {
                if self.hosts[host].requests.contains_key(&request) {
                    self.post(host, GIVEN_UP_AFTER - SILENT_AFTER, HostEvent::GivenUp { request });
                    self.on_silence(host);
                }
            }
            HostEvent::GivenUp { request } => self.on_answer(host, request, Answer::Unknown),
            HostEvent::Watch { watch, upto } => self.on_watch(host, watch, upto),
            HostEvent::WatchFails { watch } => {
                if self.hosts[host].watch.is_some_and(|found| found.id == watch) {
                    self.on_silence(host);
                }
            }
            HostEvent::List => self.list(host),
            HostEvent::Renew => self.renew(host),
            HostEvent::Carry { id, action, planned_by } => self.carry_out(host, id, action, planned_by),
            HostEvent::Tick => self.on_tick(host),
            HostEvent::Volume { volume, run, step } => self.on_volume(host, volume, run, step),
            HostEvent::AskedToYield { by, id, volume } => self.on_asked_to_yield(host, by, id, volume),
            HostEvent::HasYielded { id, has_answered } => {
                if self.hosts[host].asking.remove(&id) {
                    self.finish(host, id, Outcome::Asked(has_answered));
                }
            }
            HostEvent::LookAtVolume { volume } => self.look(host, volume),
            HostEvent::PublishOffers => self.publish(host),
            HostEvent::Task { task } => self.on_task(host, task),
            HostEvent::Nodes => {
                let away: BTreeSet<NodeId> = (0..self.hosts[host].nodes_away(self.now)).map(node_id).collect();
                self.tell(host, ClusterEvent::NodesAway(away.clone()));
                self.with_real(|real| real.tell_nodes_away(host, away));
            }
            HostEvent::Silent { host: other, nodes } => self.tell(host, ClusterEvent::Silent { host: other, nodes }),
            HostEvent::Duty { id, action } => self.do_duty(host, id, action),
            HostEvent::DutyTick => self.on_duty_tick(host),
            HostEvent::DutyDone { id, outcome } => self.tell_steward(host, duties::Event::Outcome { id, outcome }),
            HostEvent::KeeperTick => self.on_keeper_tick(host),
            HostEvent::Seen { look, facts } => self.tell_keeper(host, chores::Event::Seen { look, facts }),
            HostEvent::Chore { action } => self.do_chore(host, action),
            HostEvent::ChoreDone { chore, is_done } => self.on_chore_done(host, chore, is_done),
        }
    }

    // ---- the store ----

    pub(super) fn ask(&mut self, host: usize, op: Op, purpose: Purpose, about: Option<About>) {
        let request = self.number();
        self.hosts[host].requests.insert(request, purpose);
        self.post(host, SILENT_AFTER, HostEvent::Overdue { request });
        self.send(host, request, op, about);
    }

    /// The store is silent, or not the right one: until a listing is taken in the machine begins nothing.
    fn on_silence(&mut self, host: usize) {
        self.hosts[host].watch = None;
        self.set_right(host, false);
        self.list_after(host, Duration::ZERO);
    }

    fn set_right(&mut self, host: usize, is_right: bool) {
        if is_right && !std::mem::replace(&mut self.hosts[host].was_right, true) {
            // From here on it has a lease to lose.
            self.hosts[host].unwell(self.now);
        }
        if std::mem::replace(&mut self.hosts[host].is_right, is_right) != is_right {
            self.trace(&[32, host as u64, u64::from(is_right)], || format!("h{host}: the store is right: {is_right}"));
            self.tell(host, ClusterEvent::Store { is_right });
            self.tell_steward(host, duties::Event::Store { is_right });
            self.tell_keeper(host, chores::Event::Store { is_right });
        }
    }

    fn list_after(&mut self, host: usize, after: Duration) {
        let at = self.now + after;
        let own = &mut self.hosts[host];
        if own.lists_at.is_none_or(|expected| at < expected) {
            own.lists_at = Some(at);
            self.post(host, after, HostEvent::List);
        }
    }

    fn list(&mut self, host: usize) {
        // One that an earlier one has made needless.
        if self.hosts[host].lists_at.is_none_or(|at| at > self.now) {
            return;
        }
        self.hosts[host].lists_at = None;
        if !std::mem::replace(&mut self.hosts[host].is_listing, true) {
            let asked = self.hosts[host].view.asking();
            self.ask(host, Op::List, Purpose::List(asked), None);
        }
    }

    fn on_listing(&mut self, host: usize, asked: Asked, answer: Answer) {
        let own = &mut self.hosts[host];
        own.is_listing = false;
        let Answer::Listing(revision, records, which) = answer else { return self.list_after(host, ms(200)) };
        match own.view.replace(asked, revision, records) {
            Ok(()) => {
                self.check_belief(host, which);
                let (id, upto, of) = (self.number(), self.store.revision, which);
                let own = &mut self.hosts[host];
                own.watch = Some(Watch { id, upto: revision, of });
                let after = own.lag;
                self.post(host, after, HostEvent::Watch { watch: id, upto });
                self.on_view(host);
                self.set_right(host, true);
            }
            Err(doubt) => {
                self.outcome.doubts += 1;
                self.trace(&[33, host as u64, revision], || format!("h{host}: {doubt:?}"));
                self.hosts[host].watch = None;
                self.set_right(host, false);
                self.list_after(host, ms(1_000));
            }
        }
    }

    fn on_watch(&mut self, host: usize, id: u64, upto: u64) {
        let own = &mut self.hosts[host];
        let Some(watch) = own.watch.filter(|watch| watch.id == id && watch.of == self.store.which) else { return };
        if upto <= watch.upto {
            return;
        }
        let open_from = own.cut_store_until.max(own.watch_stalled_until);
        if self.now < open_from {
            let boot = own.boot;
            return self.push(open_from, Event::At { host, boot, event: HostEvent::Watch { watch: id, upto } });
        }
        let Some(changes) = self.store.changes(watch.upto, upto) else { return self.on_silence(host) };
        match own.view.apply(changes) {
            Ok(()) => {
                own.watch = Some(Watch { upto, ..watch });
                self.on_view(host);
            }
            Err(_) => self.on_silence(host),
        }
    }

    /// The machine hears what has changed in the view.
    pub(super) fn on_view(&mut self, host: usize) {
        let changes = self.hosts[host].view.take_changes();
        if !changes.is_empty() {
            let (upto, count) = (self.hosts[host].view.upto(), changes.volumes.len());
            self.trace(&[34, host as u64, upto, count as u64], || format!("h{host}: sees {changes:?} at {upto}"));
            if self.is_real() {
                self.note_offers(host, &changes);
            }
            self.tell(host, ClusterEvent::Changed(changes.clone()));
            self.tell_steward(host, duties::Event::Changed(changes));
        }
    }

    fn on_answer(&mut self, host: usize, request: u64, answer: Answer) {
        let Some(purpose) = self.hosts[host].requests.remove(&request) else { return };
        match purpose {
            Purpose::List(asked) => self.on_listing(host, asked, answer),
            Purpose::Lease => self.on_lease(host, answer),
            Purpose::Action { id, compares, writes } => {
                let outcome = if matches!(answer, Answer::Unknown) { Outcome::Failed } else { Outcome::Done };
                if matches!(answer, Answer::Conflict(_)) {
                    self.outcome.conflicts += 1;
                }
                self.note(host, &compares, &writes, &answer);
                self.finish(host, id, outcome);
            }
            Purpose::Volume { volume, run, ask } => self.on_root(host, volume, run, ask, answer),
            Purpose::Root { at, token, guard } => self.answer_root(at, token, guard, answer),
            Purpose::Task { task, compares, writes } => {
                self.note(host, &compares, &writes, &answer);
                self.on_task_answer(host, task, answer);
            }
            Purpose::Duty { id, compares, writes } => {
                self.note(host, &compares, &writes, &answer);
                self.on_duty_answer(host, id, &writes, answer);
            }
        }
    }

    /// What was written, or was found instead, is in the view before anybody acts on it.
    fn note(&mut self, host: usize, compares: &Compares, writes: &Writes, answer: &Answer) {
        let view = &mut self.hosts[host].view;
        let compared = |key: &str| compares.iter().find(|(found, _)| found == key).map(|(_, version)| *version);
        match answer {
            Answer::Done(version) => {
                for (key, value) in writes {
                    match value {
                        Some(value) => {
                            let value = value.as_slice().into();
                            view.note(Record { key: key.clone(), version: *version, value });
                        }
                        None => view.note_deleted(key, compared(key).unwrap_or(MetaVersion::ABSENT)),
                    }
                }
            }
            Answer::Conflict(found) => {
                for ((key, version), found) in compares.iter().zip(found) {
                    match found {
                        Some(record) => view.note(record.clone()),
                        None if *version != MetaVersion::ABSENT => view.note_deleted(key, *version),
                        None => {}
                    }
                }
            }
            _ => {}
        }
        self.on_view(host);
    }

    // ---- the lease ----

    fn renew(&mut self, host: usize) {
        let own = &self.hosts[host];
        let Some(lease) = own.lease else { return self.ask(host, Op::Grant, Purpose::Lease, None) };
        if own.is_named {
            return self.ask(host, Op::KeepAlive(lease), Purpose::Lease, None);
        }
        let (key, home) = (host_key(&own.name), own.name.clone());
        let (reads_root, answers, takes_spare, knows_trash) = (0, true, true, true);
        let (address, runs_errands, takes_requests, other) = (None, true, false, Other::new());
        let record = HostRecord {
            home,
            address,
            reads_root,
            features: Vec::new(),
            answers,
            runs_errands,
            takes_spare,
            takes_requests,
            knows_trash,
            knows_operators: true,
            reactors: Vec::new(),
            knows_reactors: true,
            other,
        };
        let compares = vec![(key.clone(), own.name_version)];
        let op = Op::Commit(compares, vec![(key, Some(encode(&record)))], Some(lease));
        self.ask(host, op, Purpose::Lease, None);
    }

    fn on_lease(&mut self, host: usize, answer: Answer) {
        let own = &mut self.hosts[host];
        let after = match answer {
            Answer::Granted(lease) => {
                own.lease = Some(lease);
                Duration::ZERO
            }
            Answer::Done(_) => {
                own.is_named = true;
                RENEW_EVERY
            }
            Answer::Conflict(found) => {
                let version = found.first().and_then(|found| found.as_ref()).map(|record| record.version);
                own.name_version = version.unwrap_or(MetaVersion::ABSENT);
                Duration::ZERO
            }
            Answer::LeaseGone => {
                (own.lease, own.is_named) = (None, false);
                Duration::ZERO
            }
            Answer::Alive => RENEW_EVERY,
            _ => Duration::ZERO,
        };
        self.post(host, after, HostEvent::Renew);
    }

    // ---- the machine ----

    pub(super) fn tell(&mut self, host: usize, event: ClusterEvent) {
        let own = &mut self.hosts[host];
        let mut out = Effects::new();
        own.cluster.handle(self.now, &own.view, event, &mut out);
        own.cluster.verify();
        if let Some(at) = own.cluster.next_deadline()
            && own.tick_at.is_none_or(|expected| at < expected)
        {
            own.tick_at = Some(at);
            let boot = own.boot;
            self.push(at, Event::At { host, boot, event: HostEvent::Tick });
        }
        for effect in out.take() {
            match effect {
                Effect::Act { id, action } => self.on_act(host, id, action),
                Effect::Granted { ticket } => self.on_held(host, ticket),
                Effect::AskNodes { host: other } => self.ask_nodes(host, other),
            }
        }
    }

    fn on_tick(&mut self, host: usize) {
        let own = &mut self.hosts[host];
        // One that an earlier deadline has made needless.
        if own.tick_at.is_none_or(|at| at > self.now) {
            return;
        }
        own.tick_at = None;
        own.ticks += 1;
        self.tell(host, ClusterEvent::Tick);
    }

    fn on_act(&mut self, host: usize, id: ActionId, action: Action) {
        let [number, volume, kind] = number_of(id, &action);
        self.trace(&[35, host as u64, number, volume, kind], || format!("h{host}: {id:?} {action:?}"));
        self.outcome.actions += 1;
        self.hosts[host].actions += 1;
        self.check_action(host, &action);
        let is_late = !self.is_healing && self.prng.chance(self.plan.late_action);
        let after = if is_late { ms(self.prng.between(500, 5_000)) } else { ms(self.prng.below(4)) };
        if is_late {
            self.disturb(self.now + after);
        }
        let planned_by = self.hosts[host].view.export(action.volume()).map_or(MetaVersion::ABSENT, |(v, _)| *v);
        self.post(host, after, HostEvent::Carry { id, action, planned_by });
    }

    pub(super) fn finish(&mut self, host: usize, id: ActionId, outcome: Outcome) {
        self.trace(&[36, host as u64, id.0], || format!("h{host}: {id:?} {outcome:?}"));
        self.tell(host, ClusterEvent::Outcome { id, outcome });
    }

    fn carry_out(&mut self, host: usize, id: ActionId, action: Action, planned_by: MetaVersion) {
        let volume = action.volume();
        if self.hosts[host].held.contains_key(&volume) {
            self.fail(format!("h{host}: {action:?} is carried out while a command holds the volume"));
        }
        let own = &self.hosts[host];
        if !own.cluster.is_current(&own.view, id) && !self.plan.mistakes.carries_out_late {
            return self.finish(host, id, Outcome::Done);
        }
        match action {
            action if self.is_real() && !matches!(action, Action::Commit { .. }) => self.order_action(host, id, action),
            Action::Open { by, .. } => {
                self.check_opening(host, volume);
                let outcome = self.open(host, volume, by);
                self.finish(host, id, outcome);
            }
            Action::Read { .. } => {
                let reading = self.read(host, volume);
                self.finish(host, id, Outcome::Reading(reading));
            }
            Action::LetGo { .. } => {
                self.let_go(host, volume);
                self.finish(host, id, Outcome::Done);
            }
            Action::AskToYield { host: name, .. } => self.ask_to_yield(host, id, volume, &name),
            Action::Commit { mut compares, writes, .. } => {
                if self.plan.mistakes.leaves_compares_out {
                    compares.clear();
                }
                let about = Some(About { volume, planned_by, planned_at: self.now });
                let op = Op::Commit(compares.clone(), writes.clone(), None);
                self.ask(host, op, Purpose::Action { id, compares, writes }, about);
            }
        }
    }

    fn ask_to_yield(&mut self, host: usize, id: ActionId, volume: VolumeId, name: &str) {
        self.hosts[host].asking.insert(id);
        let refused = HostEvent::HasYielded { id, has_answered: false };
        let Some(peer) = number_of_name(name).filter(|peer| *peer < self.hosts.len()) else {
            return self.post(host, ms(1), refused);
        };
        let is_cut = self.cut_peers_until.get(&(host.min(peer), host.max(peer))).is_some_and(|until| *until > self.now);
        if !is_cut && !self.hosts[peer].is_up {
            return self.post(host, ms(1), refused);
        }
        self.post(host, PEER_PATIENCE, refused);
        if !is_cut {
            let (by, after) = ((host, self.hosts[host].boot), ms(self.prng.between(1, 4)));
            self.post(peer, after, HostEvent::AskedToYield { by, id, volume });
        }
    }

    pub(super) fn answer_peer(&mut self, by: (usize, u64), id: ActionId) {
        let (host, boot) = by;
        let at = self.now + ms(self.prng.between(1, 4));
        self.push(at, Event::At { host, boot, event: HostEvent::HasYielded { id, has_answered: true } });
    }
}
