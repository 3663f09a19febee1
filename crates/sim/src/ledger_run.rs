//! Runs of the ledger client over real nodes: appends, crashes, take-overs, trims; committed is never lost.
//!
//! The judge knows each committed (LSN, value). Invariants: an LSN has one value for ever; every opening recovers all that
//! was committed and not trimmed; a deposed owner's late answer names only what its successor has recovered.

use crate::faults::{HostAct, Nemesis, Weights};
use crate::ledger_client::{ClientConfig, ClientState, LedgerClient, payload_of};
use crate::plan::{disk_in_flight_max, node_reactors};
use crate::world::{MachineAt, Output, World};
use holdfast_base::{
    BlockError, BlockOp, BlockRequest, ByteRange, Epoch, InstanceId, Instant, Lsn, NodeId, Prng, RequestToken, VolumeId,
};
use holdfast_base::{MetaRequest, MetaVersion};
use holdfast_format::geometry::Layout;
use holdfast_format::root::{Root, root_key};
use holdfast_store as store;
use holdfast_volume::Target;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

const VOLUME: VolumeId = VolumeId(0xabcd);
const WAKE_NEMESIS: u64 = 1;
const WAKE_CLIENT: u64 = 2;
/// From here on: the host with that number comes back.
const WAKE_HOST: u64 = 100;

/// Journal bytes for each entry that may be untrimmed: entries take up to 12 KiB, and owners who take over one after the
/// other, without a trim between them, may leave a copy each.
const JOURNAL_BYTES_AN_ENTRY: u64 = 96 << 10;

/// Settings of one run, all drawn from its seed.
#[derive(Clone, Debug)]
pub struct LedgerPlan {
    pub seed: u64,
    pub failures: u8,
    pub nodes: usize,
    pub disks: usize,
    pub hosts: usize,
    pub appends: u32,
    pub depth: usize,
    pub weights: Weights,
    pub pace: Duration,
    pub mutations: store::Mutations,
    pub trust_absent_legs: bool,
}

impl LedgerPlan {
    pub fn from_seed(seed: u64) -> LedgerPlan {
        let mut prng = Prng::new(seed ^ 0x1ed6);
        let failures = if prng.chance(250) { 2 } else { 1 };
        let mut weights = Weights::mixed();
        match prng.below(4) {
            0 => (weights.takeover, weights.blank_disk, weights.slow_disk) = (30, 12, 20),
            1 => (weights.grid_power, weights.power, weights.host_crash) = (20, 20, 10),
            _ => {}
        }
        LedgerPlan {
            seed,
            failures,
            nodes: usize::from(failures) + 2 + prng.below(3) as usize,
            disks: prng.between(1, 2) as usize,
            hosts: 2,
            appends: prng.between(60, 200) as u32,
            depth: prng.between(1, 12) as usize,
            weights,
            pace: Duration::from_micros(prng.between(8_000, 120_000)),
            mutations: store::Mutations::default(),
            trust_absent_legs: false,
        }
    }
}

/// What a run came to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outcome {
    pub trace_hash: u64,
    pub events: u64,
    pub committed: u64,
    pub openings: u32,
    pub rolls: u32,
}

/// A run in progress.
pub struct LedgerRun {
    plan: LedgerPlan,
    pub world: World<LedgerClient>,
    nemesis: Nemesis,
    prng: Prng,
    /// Entries that may be untrimmed, those in flight not counted.
    live_max: u64,
    committed: BTreeMap<Lsn, u64>,
    trimmed: Lsn,
    /// The newest opening, and those before it that may still answer.
    pub current: Option<MachineAt>,
    old: Vec<MachineAt>,
    recovered: BTreeSet<MachineAt>,
    began: BTreeMap<MachineAt, Instant>,
    /// The last to have recovered: the only one that may commit anything new.
    serving: Option<MachineAt>,
    served_epoch: Epoch,
    outstanding: BTreeMap<RequestToken, MachineAt>,
    next_token: u64,
    issued: u32,
    openings: u32,
    rolls: u32,
    healing: bool,
    failure: Option<String>,
}

impl LedgerRun {
    pub fn new(plan: LedgerPlan, verbose: bool) -> LedgerRun {
        let mut world = World::new(plan.seed, verbose);
        let mut prng = world.prng.fork();
        let nemesis = Nemesis::new(prng.fork(), usize::from(plan.failures), plan.weights);
        let sizing = store::JournalSizing {
            journal_bytes: prng.between(16, 40) * (64 << 10),
            unit_bytes: 64 << 10,
            shard_bytes_mean: 128 << 10,
        };
        let batch_records_max = *prng.pick(&[1, 4, 512]);
        for n in 0..plan.nodes {
            let mut config = store::NodeConfig::new(world.grid, NodeId(n as u32 + 1), InstanceId(0));
            config.mutations = plan.mutations;
            config.batch_records_max = batch_records_max;
            config.disk_in_flight_max = disk_in_flight_max(plan.seed);
            config.reactors = node_reactors(plan.seed);
            let index = world.add_node(config, sizing, &vec![6 << 20; plan.disks]);
            world.start_node(index);
        }
        for _ in 0..plan.hosts {
            world.add_host();
        }
        let root = Root::new(world.grid, VOLUME, "log", 1 << 20, Layout::Mirror { copies: plan.failures + 1 });
        let request = MetaRequest::Swap {
            key: root_key(VOLUME),
            expect: MetaVersion(0),
            value: Some(root.encode()),
            guard: None,
        };
        world.meta.apply(&request);
        let mut run = LedgerRun {
            plan,
            world,
            nemesis,
            prng,
            live_max: sizing.journal_bytes / JOURNAL_BYTES_AN_ENTRY,
            committed: BTreeMap::new(),
            trimmed: Lsn::ZERO,
            current: None,
            old: Vec::new(),
            recovered: BTreeSet::new(),
            began: BTreeMap::new(),
            serving: None,
            served_epoch: Epoch(0),
            outstanding: BTreeMap::new(),
            next_token: 1,
            issued: 0,
            openings: 0,
            rolls: 0,
            healing: false,
            failure: None,
        };
        run.open(0);
        run
    }

    /// A new opening on this host takes the log over.
    pub fn open(&mut self, host: usize) {
        if !self.world.hosts[host].is_up() {
            return;
        }
        self.openings += 1;
        let config = ClientConfig {
            volume: VOLUME,
            instance: InstanceId(self.prng.next_u128()),
            failures: self.plan.failures,
            trust_absent_legs: self.plan.trust_absent_legs,
        };
        self.old.extend(self.current.take());
        let at = self.world.attach(host, LedgerClient::new(config));
        self.began.insert(at, self.world.now());
        self.current = Some(at);
    }

    /// Hands one append to an opening.
    pub fn append(&mut self, at: MachineAt) -> RequestToken {
        let token = RequestToken(self.next_token);
        self.next_token += 1;
        self.outstanding.insert(token, at);
        let data = payload_of(token.0, self.prng.between(1, 2) as usize);
        self.world.request(at, Target::VOLUME, BlockRequest { token, op: BlockOp::Write { offset: token.0, data } });
        token
    }

    fn fail(&mut self, why: String) {
        self.failure.get_or_insert(why);
    }

    /// The last opening was deposed by one that began earlier and claimed later: that one goes on, or somebody new.
    fn succeed(&mut self) {
        let alive = |at: &MachineAt| self.world.machine(*at).is_some_and(|c| c.state != ClientState::Deposed);
        self.current = self.old.iter().rposition(alive).map(|i| self.old.remove(i));
        if self.current.is_none()
            && let Some(host) = (0..self.plan.hosts).find(|h| self.world.hosts[*h].is_up())
        {
            self.open(host);
        }
    }

    /// Takes note of what the machines have to tell.
    fn look(&mut self) {
        let all: Vec<MachineAt> = self.old.iter().copied().chain(self.current).collect();
        for at in all {
            let Some(client) = self.world.machine_mut(at) else { continue };
            let news = std::mem::take(&mut client.news);
            let state = client.state;
            if state == ClientState::Open && self.recovered.insert(at) {
                let (log, trimmed, epoch) = (client.log.clone(), client.trimmed, client.epoch());
                // An owner that slept hears of its success when others have long followed it.
                if epoch > self.served_epoch {
                    self.served_epoch = epoch;
                    self.serving = Some(at);
                    self.judge_recovery(&log, trimmed, at);
                }
            }
            if state == ClientState::Deposed && self.current == Some(at) {
                self.current = None;
            }
            for (lsn, value) in news {
                self.judge_commit(at, lsn, value);
            }
        }
    }

    fn judge_recovery(&mut self, log: &BTreeMap<Lsn, u64>, trimmed: Lsn, at: MachineAt) {
        if trimmed > self.trimmed {
            self.fail(format!("{at:?} recovered a trim up to {trimmed}, only {} was asked for", self.trimmed));
        }
        for (lsn, value) in self.committed.range(self.trimmed.next()..) {
            if log.get(lsn) != Some(value) {
                let found = log.get(lsn);
                self.failure.get_or_insert(format!("{at:?} lost {lsn}: committed {value}, recovered {found:?}"));
            }
        }
        self.committed.extend(log.iter().map(|(l, v)| (*l, *v)));
        self.nemesis.on_restored(self.began[&at]);
    }

    fn judge_commit(&mut self, at: MachineAt, lsn: Lsn, value: u64) {
        match self.committed.get(&lsn) {
            Some(v) if *v == value => {}
            Some(v) => self.fail(format!("{at:?} commits {value} as {lsn}, which is {v}")),
            None if self.serving == Some(at) => {
                self.committed.insert(lsn, value);
            }
            None => self.fail(format!("deposed {at:?} commits {lsn} after its successor has recovered")),
        }
    }

    fn on_output(&mut self, output: Output) {
        match output {
            Output::Reply { reply, .. } => {
                self.outstanding.remove(&reply.token);
                match reply.result {
                    Ok(_) | Err(BlockError::Deposed) => {}
                    Err(error) => self.fail(format!("request {} failed: {error}", reply.token.0)),
                }
            }
            Output::Wake(WAKE_NEMESIS) if !self.healing => {
                match self.nemesis.act(&mut self.world, None) {
                    Some(HostAct::Crash { host, back_after }) => {
                        self.crash_host(host);
                        self.world.wake_at(self.world.now() + back_after, WAKE_HOST + host as u64);
                    }
                    Some(HostAct::TakeOver { host }) => self.open(host),
                    None => {}
                }
                self.world.wake_at(self.world.now() + self.plan.pace, WAKE_NEMESIS);
            }
            Output::Wake(WAKE_CLIENT) => self.on_client(),
            Output::Wake(key) if key >= WAKE_HOST => self.host_is_back((key - WAKE_HOST) as usize),
            Output::Wake(_)
            | Output::Notice { .. }
            | Output::NodeNote { .. }
            | Output::Probed { .. }
            | Output::Talk { .. }
            | Output::Meta { .. } => {}
        }
    }

    fn crash_host(&mut self, host: usize) {
        self.look();
        self.world.crash_host(host);
        self.outstanding.retain(|_, at| at.host != host);
        self.old.retain(|at| at.host != host);
        self.current = self.current.filter(|at| at.host != host);
    }

    fn host_is_back(&mut self, host: usize) {
        if !self.world.hosts[host].is_up() {
            self.world.start_host(host);
        }
        if self.current.is_none() {
            self.open(host);
        }
    }

    fn on_client(&mut self) {
        if self.issued < self.plan.appends {
            self.world.wake_at(self.world.now() + Duration::from_micros(self.prng.between(200, 4000)), WAKE_CLIENT);
            let Some(current) = self.current else { return };
            let busy = self.outstanding.values().filter(|at| **at == current).count();
            // The log is bounded by the writer, never by what a node has room for.
            let end = self.committed.last_key_value().map_or(Lsn::ZERO, |(l, _)| *l);
            if busy < self.plan.depth && end.0 < self.trimmed.0 + self.live_max {
                self.issued += 1;
                self.append(current);
            }
            if self.prng.chance(50) && !self.old.is_empty() {
                let zombie = *self.prng.pick(&self.old);
                self.append(zombie);
            }
            if self.prng.chance(100) || end.0 >= self.trimmed.0 + self.live_max {
                self.trim(current);
            }
        }
    }

    fn trim(&mut self, at: MachineAt) {
        let Some(client) = self.world.machine(at).filter(|c| c.state == ClientState::Open) else { return };
        if client.committed.0 > self.trimmed.0 + self.live_max / 2 && !self.world.hosts[at.host].is_paused() {
            let upto = Lsn(client.committed.0 - self.live_max / 3);
            // Trims may take effect any time from now on.
            self.trimmed = self.trimmed.max(upto);
            let token = RequestToken(self.next_token);
            self.next_token += 1;
            self.world.request(
                at,
                Target::VOLUME,
                BlockRequest { token, op: BlockOp::Discard(ByteRange::new(upto.0, 0)) },
            );
        }
    }

    fn step(&mut self) {
        assert!(self.world.step(), "somebody always waits for something");
        self.look();
        while let Some(output) = self.world.outputs.pop_front() {
            self.on_output(output);
        }
    }

    fn run_until(&mut self, until: Instant, done: impl Fn(&LedgerRun) -> bool) -> Result<(), String> {
        while self.world.now() < until && !done(self) {
            self.step();
            if self.current.is_none() {
                self.succeed();
            }
            if let Some(why) = self.failure.take() {
                return Err(why);
            }
        }
        Ok(())
    }

    /// Faults and appends, then healing, then one more opening that must find everything.
    pub fn run(mut self) -> Result<Outcome, String> {
        let start = self.world.now();
        self.world.wake_at(start + Duration::from_millis(1), WAKE_CLIENT);
        self.world.wake_at(start + Duration::from_millis(20), WAKE_NEMESIS);
        let appends = self.plan.appends;
        self.run_until(start + Duration::from_secs(20), move |r| r.issued == appends)?;
        self.healing = true;
        self.nemesis.heal_all(&mut self.world);
        for host in 0..self.plan.hosts {
            self.host_is_back(host);
        }
        self.settle()?;
        self.open(self.plan.hosts - 1);
        if let Some(at) = self.current {
            self.append(at);
        }
        self.settle()?;
        for at in self.old.iter().copied().chain(self.current) {
            self.rolls += self.world.machine(at).map_or(0, |c| c.rolls);
        }
        Ok(Outcome {
            trace_hash: self.world.trace.hash(),
            events: self.world.trace.events(),
            committed: self.committed.len() as u64,
            openings: self.openings,
            rolls: self.rolls,
        })
    }

    // ---- by hand, for scenarios ----

    /// Lets time pass.
    pub fn pass(&mut self, span: Duration) {
        let until = self.world.now() + span;
        self.world.wake_at(until, 0);
        self.run_until(until, |_| false).expect("nothing broke meanwhile");
    }

    /// Asks the newest opening for so many appends.
    pub fn append_some(&mut self, count: u32) {
        let at = self.current.expect("an opening");
        for _ in 0..count {
            self.append(at);
        }
    }

    /// Asks for appends and waits until all are committed.
    pub fn append_and_wait(&mut self, count: u32) {
        self.append_some(count);
        self.settle().expect("appends are committed");
    }

    /// Another opening takes over.
    pub fn reopen(&mut self, host: usize) {
        self.open(host);
    }

    /// Heals everything and takes over once more: everything committed must be there.
    pub fn finish(self) -> Result<Outcome, String> {
        self.run()
    }

    fn settle(&mut self) -> Result<(), String> {
        let until = self.world.now() + Duration::from_secs(10);
        self.run_until(until, |r| {
            let Some(current) = r.current else { return false };
            r.recovered.contains(&current) && !r.outstanding.values().any(|at| *at == current)
        })?;
        if self.world.now() >= until {
            let client = self.current.and_then(|at| self.world.machine(at));
            let state = client.map_or_else(|| "nobody owns the log".to_string(), LedgerClient::describe);
            return Err(format!("not settled after everything was healed: {state}"));
        }
        Ok(())
    }
}

/// One run of a plan.
pub fn run_ledgers(plan: LedgerPlan, verbose: bool) -> Result<Outcome, String> {
    LedgerRun::new(plan, verbose).run()
}
