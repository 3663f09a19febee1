//! A volume at a host, as far as it concerns who serves it: its root is read and claimed, nodes promise to the claim, writes
//! are acknowledged for as long as they do.

use super::host::{HostEvent, Purpose, number_of_name};
use super::real::version_of;
use super::store::{Answer, Op};
use super::{Grid, ms};
use holdfast_base::{DeviceId, Epoch, GridId, InstanceId, Instant, LedgerId, MetaVersion, NodeId, VolumeId};
use holdfast_cluster::machine::ActionId;
use holdfast_cluster::view::Record;
use holdfast_cluster::{Event as ClusterEvent, Local, Outcome, Reading, SILENT_FOR};
use holdfast_format::geometry::Layout;
use holdfast_format::ledger::{AckRule, LedgerRef, Leg};
use holdfast_format::meta::export_key;
use holdfast_format::root::{Root, root_key};
use std::collections::BTreeSet;

/// Nodes that a volume's layout does without.
pub(super) const FAILURES: usize = 1;

/// Nodes of the grid: each has a leg of each volume's log.
const NODES: usize = 3;

/// Nodes count from one.
pub(super) fn node_id(node: usize) -> NodeId {
    NodeId(node as u32 + 1)
}

/// Of a volume as it is made, with its log.
pub(super) fn fresh_root(volume: VolumeId) -> Root {
    let leg = |number: usize| Leg { node: node_id(number), device: DeviceId(number as u128) };
    let id = LedgerId { epoch: Epoch(0), n: 0 };
    let legs = (0..NODES).map(leg).collect();
    let ledger = LedgerRef { id, legs, rule: AckRule::flat(FAILURES as u8), sealed: None };
    Root { ledgers: vec![ledger], ..Root::new(GridId(1), volume, "vm", 1 << 30, Layout::DEFAULT) }
}

/// One opening or reading of a volume at a host.
#[derive(Clone, Debug)]
pub(super) struct Vol {
    pub run: u64,
    pub stage: Stage,
    /// Whoever waits until it is gone: hosts that asked it to yield, and commands.
    yields_to: Vec<((usize, u64), ActionId)>,
    pub closes_for: Vec<u64>,
    /// It stops serving in a moment.
    is_stopping: bool,
}

#[derive(Clone, Debug)]
pub(super) enum Stage {
    Reading {
        read_at: Instant,
        is_unreadable: bool,
    },
    /// With the version of the record that it rests on.
    Opening {
        only_from: Option<Epoch>,
        found: Epoch,
        by: MetaVersion,
    },
    Open {
        root: Box<Root>,
        version: MetaVersion,
    },
    Ending,
}

impl Stage {
    fn local(&self) -> Local {
        match self {
            Stage::Reading { .. } => Local::Reading,
            Stage::Opening { .. } => Local::Opening,
            Stage::Open { .. } => Local::Open,
            Stage::Ending => Local::Ending,
        }
    }
}

#[derive(Clone, Debug)]
pub(super) enum Step {
    Claim,
    Fence { root: Box<Root>, version: MetaVersion },
    Write,
    Tidy,
    Stop,
    Gone,
}

/// What of the root record is asked.
#[derive(Clone, Debug)]
pub(super) enum Ask {
    Read,
    Claim { root: Box<Root>, by: MetaVersion },
    Tidy { root: Box<Root> },
    LastTidy,
}

/// Whether a root was claimed by this opening.
fn is_of(found: Option<&Record>, run: u64) -> bool {
    let root = found.and_then(|record| Root::decode(&record.value).ok());
    root.is_some_and(|root| root.instance == InstanceId(u128::from(run)))
}

impl Grid {
    // ---- what nodes hear of hosts ----

    /// Hosts that run and reach a node ask it something all the time.
    pub(super) fn hear(&mut self) {
        for (host, own) in self.hosts.iter_mut().enumerate() {
            let away = own.nodes_away(self.now);
            if !own.is_running() || away > FAILURES {
                own.reaches_from = self.now;
            }
            let heard = (away..NODES).filter(|_| own.is_running());
            self.heard.extend(heard.map(|node| ((node, host), self.now)));
        }
    }

    /// Asks the nodes that the host reaches whether they hear of another one.
    pub(super) fn ask_nodes(&mut self, host: usize, name: String) {
        let Some(other) = number_of_name(&name) else { return };
        let reached = self.hosts[host].nodes_away(self.now)..NODES;
        let heard = |node: &usize| self.heard.get(&(*node, other)).copied().unwrap_or_default();
        let silent = reached.filter(|node| self.now.since(heard(node)) >= SILENT_FOR);
        let nodes: BTreeSet<NodeId> = silent.map(node_id).collect();
        let after = ms(self.prng.between(1, 20));
        self.post(host, after, HostEvent::Silent { host: name, nodes });
    }

    fn vol(&mut self, host: usize, volume: VolumeId, run: u64) -> Option<&mut Vol> {
        self.hosts[host].volumes.get_mut(&volume).filter(|vol| vol.run == run)
    }

    /// What the host does with the volume from here on, as its machine hears.
    pub(super) fn set_local(&mut self, host: usize, volume: VolumeId, local: Option<Local>) {
        let locals = &mut self.hosts[host].locals;
        match local {
            Some(local) => locals.insert(volume, local),
            None => locals.remove(&volume),
        };
        self.tell(host, ClusterEvent::Local { volume, local });
    }

    /// The machine hears of the stage at once.
    fn set_stage(&mut self, host: usize, volume: VolumeId, stage: Stage) -> u64 {
        let fresh = self.number();
        let local = stage.local();
        let found = self.hosts[host].volumes.entry(volume).or_insert_with(|| Vol {
            run: fresh,
            stage: Stage::Ending,
            yields_to: Vec::new(),
            closes_for: Vec::new(),
            is_stopping: false,
        });
        found.stage = stage;
        let run = found.run;
        self.trace(&[40, host as u64, volume.0 as u64, local as u64], || format!("h{host}: {volume} {local:?}"));
        self.set_local(host, volume, Some(local));
        run
    }

    fn next_step(&mut self, host: usize, volume: VolumeId, run: u64, after_ms: u64, step: Step) {
        self.post(host, ms(after_ms), HostEvent::Volume { volume, run, step });
    }

    // ---- what actions and commands ask for ----

    pub(super) fn open(&mut self, host: usize, volume: VolumeId, decided_by: MetaVersion) -> Outcome {
        match self.hosts[host].volumes.get_mut(&volume).map(|vol| &mut vol.stage) {
            Some(Stage::Ending) => Outcome::Failed,
            Some(Stage::Open { .. }) => Outcome::Done,
            Some(Stage::Opening { by, .. }) => {
                *by = decided_by;
                Outcome::Done
            }
            Some(Stage::Reading { .. }) | None => {
                // Nobody has claimed it since the state of the records by which it is to be opened.
                let only_from = self.hosts[host].view.volume(volume).map(|known| known.epoch);
                self.begin_opening(host, volume, only_from, decided_by);
                Outcome::Done
            }
        }
    }

    /// By a command: nobody has claimed it since the state of the records that the host knows.
    pub(super) fn open_by_command(&mut self, host: usize, volume: VolumeId) {
        if self.is_real() {
            return self.order_opening(host, volume);
        }
        let only_from = self.hosts[host].view.volume(volume).map(|known| known.epoch);
        let by = self.hosts[host].view.export_version(volume);
        self.begin_opening(host, volume, only_from, by);
    }

    fn begin_opening(&mut self, host: usize, volume: VolumeId, only_from: Option<Epoch>, by: MetaVersion) {
        let stage = Stage::Opening { only_from, found: Epoch(0), by };
        let run = self.set_stage(host, volume, stage);
        let after = self.prng.below(3);
        self.next_step(host, volume, run, after, Step::Claim);
    }

    pub(super) fn read(&mut self, host: usize, volume: VolumeId) -> Reading {
        match self.hosts[host].volumes.get(&volume).map(|vol| &vol.stage) {
            Some(Stage::Reading { is_unreadable: true, .. }) => Reading::Unreadable,
            Some(Stage::Reading { read_at, .. }) if *read_at > self.now => Reading::Begun,
            Some(Stage::Reading { .. } | Stage::Open { .. } | Stage::Opening { .. }) => Reading::Read,
            Some(Stage::Ending) => Reading::NoRoom,
            None => {
                let is_unreadable = self.unreadable_until.get(&volume).is_some_and(|until| *until > self.now);
                let most = *self.prng.pick(&[20, 20, 100, 500]);
                let read_at = self.now + ms(self.prng.between(10, most));
                self.set_stage(host, volume, Stage::Reading { read_at, is_unreadable });
                Reading::Begun
            }
        }
    }

    pub(super) fn let_go(&mut self, host: usize, volume: VolumeId) {
        let Some(vol) = self.hosts[host].volumes.get(&volume) else { return };
        let run = vol.run;
        match vol.stage {
            Stage::Reading { .. } => self.drop_volume(host, volume, run),
            Stage::Open { .. } | Stage::Opening { .. } => {
                self.check_letting_go(host, volume);
                self.set_stage(host, volume, Stage::Ending);
                let after = self.prng.below(50);
                self.next_step(host, volume, run, after, Step::Gone);
            }
            Stage::Ending => {}
        }
    }

    pub(super) fn on_asked_to_yield(&mut self, host: usize, by: (usize, u64), id: ActionId, volume: VolumeId) {
        match self.hosts[host].volumes.get_mut(&volume) {
            None => self.answer_peer(by, id),
            Some(vol) => {
                vol.yields_to.push((by, id));
                self.stop_soon(host, volume);
            }
        }
    }

    /// Closed in good order; a command is told when it is gone.
    pub(super) fn close(&mut self, host: usize, volume: VolumeId, task: u64) {
        if self.is_real() {
            return self.order_closing(host, volume, task);
        }
        match self.hosts[host].volumes.get_mut(&volume) {
            None => self.post(host, ms(1), HostEvent::Task { task }),
            Some(vol) => {
                vol.closes_for.push(task);
                self.stop_soon(host, volume);
            }
        }
    }

    fn stop_soon(&mut self, host: usize, volume: VolumeId) {
        let Some(vol) = self.hosts[host].volumes.get_mut(&volume) else { return };
        let run = vol.run;
        match vol.stage {
            Stage::Open { .. } if !std::mem::replace(&mut vol.is_stopping, true) => {
                let after = self.prng.between(5, 60);
                self.next_step(host, volume, run, after, Step::Stop);
            }
            Stage::Reading { .. } | Stage::Opening { .. } => self.drop_volume(host, volume, run),
            _ => {}
        }
    }

    fn drop_volume(&mut self, host: usize, volume: VolumeId, run: u64) {
        let own = &mut self.hosts[host];
        if own.volumes.get(&volume).is_none_or(|vol| vol.run != run) {
            return;
        }
        let vol = own.volumes.remove(&volume).expect("it was just seen");
        self.trace(&[41, host as u64, volume.0 as u64], || format!("h{host}: {volume} is gone"));
        self.set_local(host, volume, None);
        for (by, id) in vol.yields_to {
            self.answer_peer(by, id);
        }
        for task in vol.closes_for {
            self.post(host, ms(0), HostEvent::Task { task });
        }
    }

    // ---- the opening ----

    fn ask_root(&mut self, host: usize, volume: VolumeId, run: u64) {
        self.ask(host, Op::Get(root_key(volume)), Purpose::Volume { volume, run, ask: Ask::Read }, None);
    }

    fn swap_root(&mut self, host: usize, run: u64, version: MetaVersion, root: Root, ask: Ask) {
        let (volume, key) = (root.volume, root_key(root.volume));
        let mut compares = vec![(key.clone(), version)];
        if let Ask::Claim { by, .. } = &ask
            && !self.plan.mistakes.has_no_guard()
        {
            compares.push((export_key(volume), *by));
        }
        let op = Op::Commit(compares, vec![(key, Some(root.encode()))], None);
        self.ask(host, op, Purpose::Volume { volume, run, ask }, None);
    }

    pub(super) fn on_root(&mut self, host: usize, volume: VolumeId, run: u64, ask: Ask, answer: Answer) {
        let Some(vol) = self.vol(host, volume, run) else { return };
        let is_opening = matches!(vol.stage, Stage::Opening { .. });
        match (ask, answer) {
            (Ask::LastTidy, _) => self.drop_volume(host, volume, run),
            (_, Answer::Unknown) => self.ask_root(host, volume, run),
            (Ask::Claim { root, .. }, Answer::Done(version)) => self.on_claimed(host, run, *root, version),
            (Ask::Tidy { root }, Answer::Done(version)) => self.on_tidied(host, run, *root, version),
            (Ask::Read, Answer::Record(found)) if is_opening => self.on_found(host, volume, run, found, true),
            (Ask::Claim { by, .. }, Answer::Conflict(found)) => {
                self.outcome.conflicts += 1;
                let is_decided_anew = found.get(1).is_some_and(|found| version_of(Some(found)) != by)
                    && self.is_resting_on(host, volume, run, by);
                let found = found.into_iter().next().flatten();
                match is_decided_anew && !is_of(found.as_ref(), run) {
                    true => self.drop_volume(host, volume, run),
                    false => self.on_found(host, volume, run, found, false),
                }
            }
            (Ask::Tidy { .. }, Answer::Conflict(found)) => {
                self.on_found_open(host, volume, run, found.into_iter().next().flatten());
            }
            (Ask::Read, Answer::Record(found)) => self.on_found_open(host, volume, run, found),
            _ => {}
        }
    }

    /// The root as an opening finds it: it claims it, sees that it has, or that others were faster.
    fn on_found(&mut self, host: usize, volume: VolumeId, run: u64, found: Option<Record>, is_read: bool) {
        let claims_whatever = self.plan.mistakes.claims_whatever;
        let conflict_deposes = self.plan.mistakes.conflict_deposes;
        let Some(vol) = self.vol(host, volume, run) else { return };
        let Stage::Opening { only_from, found: before, by } = &mut vol.stage else { return };
        let root = found.and_then(|record| Some((record.version, Root::decode(&record.value).ok()?)));
        let Some((version, root)) = root.filter(|(_, root)| !root.deleted) else {
            return self.drop_volume(host, volume, run);
        };
        if root.instance == InstanceId(u128::from(run)) {
            return self.on_claimed(host, run, root, version);
        }
        let is_first = *before == Epoch(0) && is_read;
        let is_overtaken = match only_from {
            Some(epoch) if !claims_whatever => *epoch != root.epoch,
            _ => !is_first && root.epoch != *before,
        };
        if is_overtaken || !is_read && conflict_deposes {
            self.trace(&[42, host as u64, root.epoch.0], || format!("h{host}: {volume} was claimed by others"));
            return self.drop_volume(host, volume, run);
        }
        *before = root.epoch;
        let by = *by;
        let root = Root { epoch: root.epoch.next(), instance: InstanceId(u128::from(run)), ..root };
        let ask = Ask::Claim { root: Box::new(root.clone()), by };
        self.swap_root(host, run, version, root, ask);
    }

    /// Whether the opening is still what was decided by that version of the record.
    fn is_resting_on(&mut self, host: usize, volume: VolumeId, run: u64, version: MetaVersion) -> bool {
        let stage = self.vol(host, volume, run).map(|vol| &vol.stage);
        matches!(stage, Some(Stage::Opening { by, .. }) if *by == version)
    }

    fn on_claimed(&mut self, host: usize, run: u64, root: Root, version: MetaVersion) {
        let after = self.prng.between(1, 6);
        self.next_step(host, root.volume, run, after, Step::Fence { root: Box::new(root), version });
    }

    fn fence(&mut self, host: usize, run: u64, root: Root, version: MetaVersion) {
        let volume = root.volume;
        if self.hosts[host].nodes_away(self.now) > FAILURES {
            return self.next_step(host, volume, run, 50, Step::Fence { root: Box::new(root), version });
        }
        let promised = self.promises.entry(volume).or_default();
        if *promised > root.epoch.0 {
            return self.drop_volume(host, volume, run);
        }
        *promised = root.epoch.0;
        self.check_deposing(host, volume);
        if let Some(since) = self.pause_since.remove(&volume) {
            let pause = self.now.since(since);
            self.outcome.pause_max = self.outcome.pause_max.max(pause);
            self.check_pause(volume, pause);
        }
        self.set_stage(host, volume, Stage::Open { root: Box::new(root), version });
        self.next_step(host, volume, run, 1, Step::Write);
        let after = self.prng.between(1_000, 5_000);
        self.next_step(host, volume, run, after, Step::Tidy);
    }

    // ---- the service ----

    pub(super) fn on_volume(&mut self, host: usize, volume: VolumeId, run: u64, step: Step) {
        let Some(vol) = self.vol(host, volume, run) else { return };
        match (step, vol.stage.clone()) {
            (Step::Claim, Stage::Opening { .. }) => self.ask_root(host, volume, run),
            (Step::Fence { root, version }, Stage::Opening { .. }) => self.fence(host, run, *root, version),
            (Step::Write, Stage::Open { root, .. }) => self.write(host, volume, run, root.epoch),
            (Step::Tidy, Stage::Open { root, version }) => {
                let after = self.prng.between(1_000, 5_000);
                self.next_step(host, volume, run, after, Step::Tidy);
                let ask = Ask::Tidy { root: root.clone() };
                self.swap_root(host, run, version, *root, ask);
            }
            (Step::Stop, Stage::Open { root, version }) => {
                if !vol.yields_to.is_empty() {
                    self.pause_since.insert(volume, self.now);
                }
                self.set_stage(host, volume, Stage::Ending);
                self.swap_root(host, run, version, *root, Ask::LastTidy);
                // It may be gone before the root has heard of it.
                let after = *self.prng.pick(&[0, 1, 100]);
                self.next_step(host, volume, run, after, Step::Gone);
            }
            (Step::Gone, Stage::Ending) => self.drop_volume(host, volume, run),
            _ => {}
        }
    }

    fn write(&mut self, host: usize, volume: VolumeId, run: u64, epoch: Epoch) {
        let after = self.prng.between(100, 800);
        self.next_step(host, volume, run, after, Step::Write);
        if self.hosts[host].nodes_away(self.now) > FAILURES {
            return;
        }
        if self.promises.get(&volume).is_some_and(|promised| *promised > epoch.0) {
            return self.on_deposed(host, volume, run);
        }
        self.outcome.writes += 1;
    }

    fn on_deposed(&mut self, host: usize, volume: VolumeId, run: u64) {
        self.outcome.depositions += 1;
        self.trace(&[43, host as u64, volume.0 as u64], || format!("h{host}: {volume} is deposed"));
        self.set_stage(host, volume, Stage::Ending);
        let after = self.prng.below(1_000);
        self.next_step(host, volume, run, after, Step::Gone);
    }

    fn on_tidied(&mut self, host: usize, run: u64, root: Root, version: MetaVersion) {
        let volume = root.volume;
        let Some(vol) = self.vol(host, volume, run) else { return };
        if let Stage::Open { version: found, .. } = &mut vol.stage {
            *found = version;
        }
    }

    /// The root as an owner finds it that lost a swap, or does not know whether it did.
    fn on_found_open(&mut self, host: usize, volume: VolumeId, run: u64, found: Option<Record>) {
        let Some(vol) = self.vol(host, volume, run) else { return };
        let Stage::Open { root, version } = &mut vol.stage else { return };
        let found = found.and_then(|record| Some((record.version, Root::decode(&record.value).ok()?)));
        match found {
            Some((_, found)) if found.epoch > root.epoch || found.deleted => self.on_deposed(host, volume, run),
            Some((newer, _)) => *version = newer,
            // A store that was emptied deposes nobody.
            None => {}
        }
    }
}
