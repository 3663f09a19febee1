//! A grid's control plane: the real [`holdfast_cluster::Cluster`] machines of several hosts, each with its own view, over one simulated
//! metadata store; volumes are what matters of them here: who claimed one, and who is promised to by the nodes.
//!
//! Role: the shell of each host ([`host`]), the store and what becomes of requests to it ([`store`]), volumes ([`volume`]), an
//! operator ([`operator`]), misfortunes ([`faults`]), and what must hold at every moment and in the end ([`check`]).
//! In the place of modelled volumes there may be real hosts that have them open ([`real`], [`crate::grid`]).
//!
//! ```text
//! operator ──commands, holds──> host: shell ──events──> Cluster ──actions──> shell ──> volumes, nodes' promises
//!                                 │   ^                                        │
//!                                 v   └── listing, watch ── store <────────────┘
//! ```
//! Faults: hosts crash, hang, are cut off from the store, from each other, from nodes; the store hangs, changes its leader,
//! comes back empty or older, and then as it was; leases run out all at once; transactions come late or their answers never;
//! watches lag, stand still, fail, are compacted; actions are carried out seconds late; maps can't be read.

mod check;
mod faults;
mod host;
mod operator;
mod real;
mod steward;
pub mod store;
mod upkeep;
mod volume;

use crate::multi_host::MultiHost;
use crate::trace::Trace;
use holdfast_base::{Epoch, Instant, MetaVersion, Prng, VolumeId};
use holdfast_cluster::Action;
use holdfast_cluster::machine::{ActionId, Mutations};
use holdfast_cluster::{steward as duties, upkeep as chores};
use holdfast_format::meta::{DRAINING_PREFIX, ExportRecord, encode, export_key};
use holdfast_format::root::root_key;
use host::{Host, HostEvent};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use store::{Answer, MARK, Op, Store, Which};

pub use check::{SETTLED_AFTER, SETTLED_AFTER_STORE};
pub use host::name_of;
pub use operator::What;

/// How long a host that says nothing counts as there.
pub const LEASE: Duration = Duration::from_secs(5);

/// Pace of misfortunes and of the operator.
const LOOK_EVERY: Duration = Duration::from_millis(100);

pub const fn ms(count: u64) -> Duration {
    Duration::from_millis(count)
}

/// Mistakes of shells and volumes that must be found, beside those of the machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Mistakes {
    /// An opening that lost a swap of the root takes itself for deposed, whoever has changed the root.
    pub conflict_deposes: bool,
    /// Transactions are carried out without what they compare.
    pub leaves_compares_out: bool,
    /// Any listing is believed.
    pub believes_any_listing: bool,
    /// A host that starts knows nothing of how far the store had come.
    pub forgets_the_beat: bool,
    /// An opening does not look whether the volume was claimed since it was planned, nor whether it is still to be.
    pub claims_whatever: bool,
    /// It does not look whether it is still to be.
    pub leaves_guard_out: bool,
    /// Actions are carried out however late, whatever the record says by then.
    pub carries_out_late: bool,
}

/// What a run is made of.
#[derive(Clone, Debug)]
pub struct ClusterPlan {
    pub seed: u64,
    pub hosts: usize,
    pub volumes: usize,
    /// How long there are faults and commands.
    pub duration: Duration,
    /// A host that crashed may stay away to the end.
    pub stays_down: bool,
    /// Of a thousand looks: how many bring something of the kind.
    pub crash: u32,
    pub hang: u32,
    pub cut_store: u32,
    pub cut_peers: u32,
    pub cut_nodes: u32,
    pub outage: u32,
    pub leader_loss: u32,
    pub emptied: u32,
    pub older: u32,
    pub compaction: u32,
    pub watch_stall: u32,
    pub unreadable: u32,
    pub command: u32,
    /// Of a thousand transactions: how many come late, or are not answered.
    pub late_commit: u32,
    pub lost_answer: u32,
    /// Of a thousand actions: how many are carried out seconds late.
    pub late_action: u32,
    /// Of a thousand looks: how often a volume is thrown away, had back, or deleted.
    pub deletion: u32,
    /// Of a thousand looks at devices: how many find them nearly full.
    pub short: u32,
    pub mutations: Mutations,
    pub duties: duties::Mutations,
    pub upkeep: chores::Mutations,
    pub mistakes: Mistakes,
}

impl Mistakes {
    fn has_no_guard(&self) -> bool {
        self.claims_whatever || self.leaves_guard_out
    }
}

impl ClusterPlan {
    /// Nothing happens by itself.
    pub fn quiet(seed: u64, hosts: usize, volumes: usize) -> ClusterPlan {
        ClusterPlan {
            seed,
            hosts,
            volumes,
            duration: Duration::from_secs(20),
            stays_down: false,
            crash: 0,
            hang: 0,
            cut_store: 0,
            cut_peers: 0,
            cut_nodes: 0,
            outage: 0,
            leader_loss: 0,
            emptied: 0,
            older: 0,
            compaction: 0,
            watch_stall: 0,
            unreadable: 0,
            command: 0,
            late_commit: 0,
            lost_answer: 0,
            late_action: 0,
            deletion: 0,
            short: 0,
            mutations: Mutations::default(),
            duties: duties::Mutations::default(),
            upkeep: chores::Mutations::default(),
            mistakes: Mistakes::default(),
        }
    }

    /// Nothing goes wrong, and nobody does but hand volumes over: then no pause is long.
    fn is_calm(&self) -> bool {
        let hosts = self.crash + self.hang + self.cut_store + self.cut_peers + self.cut_nodes + self.unreadable;
        let store = self.outage + self.leader_loss + self.emptied + self.older + self.compaction + self.watch_stall;
        hosts + store + self.late_commit + self.lost_answer + self.late_action == 0
    }

    pub fn from_seed(seed: u64) -> ClusterPlan {
        let mut prng = Prng::new(seed ^ 0xc105);
        let quiet = ClusterPlan::quiet(seed, prng.between(2, 4) as usize, prng.between(1, 6) as usize);
        if prng.chance(100) {
            return ClusterPlan { command: 80, ..quiet };
        }
        let mut some = |share: u32, most: u64| if prng.chance(share) { prng.between(1, most) as u32 } else { 0 };
        ClusterPlan {
            crash: some(500, 12),
            hang: some(400, 15),
            cut_store: some(400, 15),
            cut_peers: some(300, 20),
            cut_nodes: some(300, 20),
            outage: some(300, 10),
            leader_loss: some(300, 20),
            emptied: some(150, 10),
            older: some(150, 10),
            compaction: some(300, 10),
            watch_stall: some(400, 20),
            unreadable: some(300, 20),
            command: some(900, 80),
            late_commit: some(300, 80),
            lost_answer: some(300, 80),
            late_action: some(300, 300),
            deletion: some(600, 60),
            short: some(300, 300),
            duration: Duration::from_secs(prng.between(10, 40)),
            stays_down: prng.chance(300),
            ..quiet
        }
    }
}

/// What a run came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ClusterOutcome {
    pub trace_hash: u64,
    pub events: u64,
    pub actions: u64,
    pub faults: u64,
    pub commands: u64,
    /// Hand-overs that came to their end.
    pub handovers: u64,
    /// Volumes that were taken over from hosts that were gone.
    pub take_overs: u64,
    /// Of these: by hosts that did not offer them.
    pub fail_overs: u64,
    pub depositions: u64,
    pub conflicts: u64,
    /// Listings that were not believed.
    pub doubts: u64,
    pub writes: u64,
    /// Volumes that went into the trash, came back from it, and are gone for good.
    pub thrown_away: u64,
    pub restored: u64,
    pub deleted: u64,
    /// Volumes that nobody serves, cared for.
    pub cared: u64,
    /// By schedule.
    pub snapshots: u64,
    /// The longest time that a volume was served by nobody in a hand-over.
    pub pause_max: Duration,
}

#[derive(Clone, Debug)]
enum Event {
    At { host: usize, boot: u64, event: HostEvent },
    Arrive { host: usize, boot: u64, request: u64, op: Op, about: Option<About>, is_heard: bool },
    Expire,
    StoreIs { which: Which, keeps_leases: bool, is_return: bool },
    Drop { host: usize, boot: u64, id: duties::ActionId, volume: VolumeId, epoch: Epoch, device: usize },
    Start { host: usize },
    ReachNodes { host: usize },
    Resume { host: usize },
    Look,
}

/// Of a transaction that a machine has planned: by which state of the record.
#[derive(Clone, Debug)]
pub struct About {
    volume: VolumeId,
    planned_by: MetaVersion,
    planned_at: Instant,
}

/// A grid in a run.
pub struct Grid {
    pub plan: ClusterPlan,
    prng: Prng,
    trace: Trace,
    now: Instant,
    queue: BTreeMap<(Instant, u64), Event>,
    next_event: u64,
    next_number: u64,
    hosts: Vec<Host>,
    store: Store,
    /// The right store while another is in its place.
    put_away: Option<Store>,
    older: Vec<Store>,
    /// It doesn't answer until then.
    store_away_until: Instant,
    next_store_fault_at: Instant,
    store_was_lost_until: Instant,
    expiry_at: Option<Instant>,
    /// What nodes have promised: the highest epoch that fenced each volume.
    promises: BTreeMap<VolumeId, u64>,
    /// At which epoch each host has claimed each volume last, and whom the record named then.
    claims: BTreeMap<(VolumeId, usize), (Epoch, String)>,
    unreadable_until: BTreeMap<VolumeId, Instant>,
    /// When each node has heard of each host, by their numbers.
    heard: BTreeMap<(usize, usize), Instant>,
    /// Pairs of hosts that can't reach each other.
    cut_peers_until: BTreeMap<(usize, usize), Instant>,
    /// Of each volume, in the order in which they were taken.
    snapshots: BTreeMap<VolumeId, Vec<upkeep::Taken>>,
    /// What each device of the grid holds something of.
    devices: Vec<BTreeSet<VolumeId>>,
    /// When volumes were put into the trash that are there.
    thrown_at: BTreeMap<VolumeId, Instant>,
    /// Since when a volume that is handed over is served by nobody.
    pause_since: BTreeMap<VolumeId, Instant>,
    /// The last fault, or its last consequence.
    faults_end: Instant,
    is_healing: bool,
    failure: Option<String>,
    /// Hosts that have volumes open, where these are not modelled.
    real: Option<Box<MultiHost>>,
    pub outcome: ClusterOutcome,
}

pub fn volume_id(number: usize) -> VolumeId {
    VolumeId(0xc1_0000 + number as u128)
}

impl Grid {
    pub fn new(plan: ClusterPlan, verbose: bool) -> Grid {
        Grid::over(plan, None, verbose)
    }

    /// Over real hosts, or over none: then volumes are modelled.
    pub(crate) fn over(plan: ClusterPlan, real: Option<Box<MultiHost>>, verbose: bool) -> Grid {
        let mut prng = Prng::new(plan.seed);
        let names: Vec<String> = (0..plan.hosts).map(host::name_of).collect();
        let hosts = (0..plan.hosts).map(|n| Host::new(n, &plan, ms(prng.between(1, 60)), None)).collect();
        let mut grid = Grid {
            hosts,
            prng,
            trace: Trace::new(verbose),
            now: Instant::ZERO,
            queue: BTreeMap::new(),
            next_event: 0,
            next_number: 1,
            store: Store::new(Which::Right, 0),
            put_away: None,
            older: Vec::new(),
            store_away_until: Instant::ZERO,
            next_store_fault_at: Instant::ZERO + Duration::from_secs(8),
            store_was_lost_until: Instant::ZERO,
            expiry_at: None,
            promises: BTreeMap::new(),
            claims: BTreeMap::new(),
            unreadable_until: BTreeMap::new(),
            heard: BTreeMap::new(),
            cut_peers_until: BTreeMap::new(),
            snapshots: BTreeMap::new(),
            devices: vec![BTreeSet::new(); steward::DEVICES],
            thrown_at: BTreeMap::new(),
            pause_since: BTreeMap::new(),
            faults_end: Instant::ZERO,
            is_healing: false,
            failure: None,
            real,
            outcome: ClusterOutcome::default(),
            plan,
        };
        grid.fill(&names);
        for host in 0..grid.hosts.len() {
            let at = Instant::ZERO + ms(grid.prng.below(200));
            grid.push(at, Event::Start { host });
        }
        grid.push(Instant::ZERO + LOOK_EVERY, Event::Look);
        grid
    }

    /// The records that there are in the beginning.
    fn fill(&mut self, names: &[String]) {
        let mark = vec![(MARK.to_string(), Some(b"{}".to_vec()))];
        self.store.commit(&Vec::new(), &mark, None);
        if self.plan.deletion > 0 && self.prng.chance(500) {
            // Then volumes that nobody serves are looked after all the time.
            let draining = vec![(format!("{DRAINING_PREFIX}1"), Some(b"{}".to_vec()))];
            self.store.commit(&Vec::new(), &draining, None);
        }
        let roots = match &self.real {
            Some(real) => real.roots(),
            None => (0..self.plan.volumes).map(|number| volume::fresh_root(volume_id(number))).collect(),
        };
        for (number, root) in roots.into_iter().enumerate() {
            let volume = volume_id(number);
            let host = self.prng.pick(names).clone();
            let others: BTreeSet<String> = names.iter().filter(|_| self.prng.chance(600)).cloned().collect();
            let offered_by = if others.is_empty() { others } else { &others | &BTreeSet::from([host.clone()]) };
            let failover = self.prng.chance(300);
            let export = ExportRecord { host, offered_by, failover, ..ExportRecord::default() };
            let mut writes = vec![(root_key(volume), Some(root.encode()))];
            if self.real.is_some() || self.plan.volumes > 6 || self.prng.chance(900) {
                writes.push((export_key(volume), Some(encode(&export))));
            }
            if self.real.is_none() && self.prng.chance(400) {
                writes.push(upkeep::schedule_record(volume));
            }
            self.store.commit(&Vec::new(), &writes, None);
            self.devices.iter_mut().for_each(|device| {
                device.insert(volume);
            });
        }
    }

    // ---- for scenarios ----

    /// Puts a record as it should be in the beginning.
    pub fn set_export(&mut self, number: usize, host: usize, offered_by: &[usize]) {
        let offered_by = offered_by.iter().map(|n| host::name_of(*n)).collect();
        let export = ExportRecord { host: host::name_of(host), offered_by, ..ExportRecord::default() };
        let writes = vec![(export_key(volume_id(number)), Some(encode(&export)))];
        self.store.commit(&Vec::new(), &writes, None);
    }

    /// Served at a host, to be taken over by whoever lives.
    pub fn set_failover(&mut self, number: usize, host: usize) {
        let export = ExportRecord { host: host::name_of(host), failover: true, ..ExportRecord::default() };
        let writes = vec![(export_key(volume_id(number)), Some(encode(&export)))];
        self.store.commit(&Vec::new(), &writes, None);
    }

    /// Where the record says that a volume is served.
    pub fn record(&self, number: usize) -> Option<ExportRecord> {
        self.export_of(volume_id(number))
    }

    /// Hosts that have it open.
    pub fn open_at(&self, number: usize) -> Vec<usize> {
        self.serving(volume_id(number))
    }

    pub fn has_failed(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    pub fn now(&self) -> Instant {
        self.now
    }

    /// Runs for a while.
    ///
    /// # Panics
    /// Where something is found.
    pub fn run_for(&mut self, span: Duration) {
        self.run_until(self.now + span).unwrap_or_else(|why| panic!("at {:?}: {why}", self.now));
    }

    // ---- the machinery ----

    fn push(&mut self, at: Instant, event: Event) {
        self.next_event += 1;
        self.queue.insert((at.max(self.now), self.next_event), event);
    }

    fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    fn trace(&mut self, words: &[u64], text: impl FnOnce() -> String) {
        self.trace.event(self.now, words, text);
    }

    fn fail(&mut self, why: String) {
        self.failure.get_or_insert(why);
    }

    fn is_true(&self) -> bool {
        self.store.which == Which::Right
    }

    /// The right store's content, also while another one is in its place.
    fn right_store(&self) -> &Store {
        self.put_away.as_ref().unwrap_or(&self.store)
    }

    fn export_of(&self, volume: VolumeId) -> Option<ExportRecord> {
        let record = self.right_store().get(&export_key(volume))?;
        holdfast_format::meta::decode(&record.value).ok()
    }

    fn run_until(&mut self, end: Instant) -> Result<(), String> {
        while let Some(at) = self.next_at().filter(|at| *at <= end) {
            self.outcome.events += 1;
            self.step(at);
            if let Some(why) = self.failure.take() {
                return Err(why);
            }
        }
        self.now = end;
        Ok(())
    }

    fn next_at(&mut self) -> Option<Instant> {
        let own = self.queue.first_key_value().map(|((at, _), _)| *at);
        own.into_iter().chain(self.real.as_mut().and_then(|real| real.next_at())).min()
    }

    /// What happens then, first here.
    fn step(&mut self, at: Instant) {
        self.now = self.now.max(at);
        match self.queue.first_entry().filter(|entry| entry.key().0 <= at) {
            Some(entry) => {
                let event = entry.remove();
                self.on_event(event);
            }
            None => {
                self.with_real(|real| real.step_planned());
            }
        }
    }

    fn on_event(&mut self, event: Event) {
        match event {
            Event::At { host, boot, event } => self.on_host_event(host, boot, event),
            Event::Arrive { host, boot, request, op, about, is_heard } => {
                self.on_arrive((host, boot, request), op, about, is_heard);
            }
            Event::Expire => {
                self.expiry_at = None;
                self.expire();
            }
            // It may be back already.
            Event::StoreIs { is_return: true, .. } if self.put_away.is_none() => {}
            Event::StoreIs { which, keeps_leases, .. } => self.on_store_is(which, keeps_leases),
            Event::Drop { host, boot, id, volume, epoch, device } => {
                self.on_drop((host, boot), id, (volume, epoch), device);
            }
            Event::Start { host } => self.start(host),
            Event::ReachNodes { host } => self.cut_real_nodes(host),
            Event::Resume { host } => self.resume(host),
            Event::Look => {
                self.hear();
                if !self.is_healing {
                    self.misfortune();
                    self.operate();
                    self.throw_and_restore();
                }
                self.push(self.now + LOOK_EVERY, Event::Look);
            }
        }
    }

    // ---- the store ----

    /// A host asks something. What becomes of it the host hears with its [`HostEvent::Answer`].
    fn send(&mut self, host: usize, request: u64, op: Op, about: Option<About>) {
        let boot = self.hosts[host].boot;
        let latency = Duration::from_micros(self.prng.between(200, 4_000));
        // Of what keeps a lease nothing is late: who keeps it is well.
        let is_commit = matches!(op, Op::Commit(_, _, None));
        let arrive = |grid: &mut Grid, at: Instant, is_heard: bool| {
            let (op, about) = (op.clone(), about.clone());
            grid.push(at, Event::Arrive { host, boot, request, op, about, is_heard });
        };
        if self.hosts[host].is_cut_from_store(self.now) {
            // It may be on its way, and get through when the way is open again.
            if self.prng.chance(300) {
                let at = self.hosts[host].cut_store_until + latency;
                self.disturb(at);
                arrive(self, at, true);
            }
            return;
        }
        if is_commit && !self.is_healing && self.prng.chance(self.plan.late_commit) {
            let at = self.now + ms(self.prng.between(500, 6_000));
            self.disturb(at);
            return arrive(self, at, false);
        }
        let is_lost = is_commit && !self.is_healing && self.prng.chance(self.plan.lost_answer);
        if is_lost {
            self.disturb(self.now + Duration::from_secs(2));
        }
        arrive(self, self.now + latency, !is_lost);
    }

    fn on_arrive(&mut self, from: (usize, u64, u64), op: Op, about: Option<About>, is_heard: bool) {
        let (host, boot, request) = from;
        if self.now < self.store_away_until {
            let after = match self.prng.below(3) {
                0 => return,
                1 => ms(self.prng.below(100)),
                _ => ms(self.prng.below(5_000)),
            };
            let at = self.store_away_until + after;
            self.disturb(at);
            return self.push(at, Event::Arrive { host, boot, request, op, about, is_heard });
        }
        self.expire();
        let before = self.store.revision;
        if let (Op::Commit(_, writes, _), Some(about)) = (&op, &about) {
            self.check_plan(host, boot, about, writes, &op);
        }
        let answer = match op {
            Op::Get(key) => Answer::Record(self.store.get(&key)),
            Op::List => Answer::Listing(self.store.revision, self.store.list(), self.store.which),
            Op::Commit(compares, writes, lease) => {
                let answer = self.store.commit(&compares, &writes, lease);
                if matches!(answer, Answer::Done(_)) {
                    self.note_claims(host, &writes);
                    self.check_fates(host, &writes);
                }
                answer
            }
            Op::Grant => {
                let lease = self.number();
                self.store.grant(lease, self.now + LEASE);
                Answer::Granted(lease)
            }
            Op::KeepAlive(lease) => self.store.keep_alive(lease, self.now + LEASE),
        };
        self.expect_expiry();
        self.end_older_in_time();
        if self.store.revision != before {
            let (revision, kind) = (self.store.revision, u64::from(about.is_some()));
            self.trace(&[10, host as u64, revision, kind], || format!("store: {revision} by h{host}"));
            self.tell_watches();
        }
        if is_heard && !self.hosts[host].is_cut_from_store(self.now) {
            let at = self.now + Duration::from_micros(self.prng.between(200, 4_000));
            self.push(at, Event::At { host, boot, event: HostEvent::Answer { request, answer } });
        }
    }

    fn expire(&mut self) {
        if self.now >= self.store_away_until && self.store.expire(self.now) {
            let revision = self.store.revision;
            self.trace(&[11, revision], || format!("store: {revision}, leases ran out"));
            self.tell_watches();
        }
        self.expect_expiry();
    }

    fn expect_expiry(&mut self) {
        let Some(at) = self.store.next_expiry().map(|at| at.max(self.store_away_until)) else { return };
        if self.expiry_at.is_none_or(|expected| at < expected || expected < self.now) {
            self.expiry_at = Some(at);
            self.push(at, Event::Expire);
        }
    }

    fn tell_watches(&mut self) {
        let upto = self.store.revision;
        for host in 0..self.hosts.len() {
            let Some(watch) = self.hosts[host].watch else { continue };
            let late = Duration::from_micros(self.prng.below(2_000));
            let at = (self.now + self.hosts[host].lag + late).max(self.hosts[host].watch_stalled_until);
            let boot = self.hosts[host].boot;
            self.push(at, Event::At { host, boot, event: HostEvent::Watch { watch: watch.id, upto } });
        }
    }

    /// Whatever was connected to the store is not any more.
    fn break_watches(&mut self) {
        for host in 0..self.hosts.len() {
            if let Some(watch) = self.hosts[host].watch {
                let at = self.now + ms(self.prng.below(50));
                let boot = self.hosts[host].boot;
                self.push(at, Event::At { host, boot, event: HostEvent::WatchFails { watch: watch.id } });
            }
        }
    }

    /// Something is not as it should be, or has consequences, until then.
    fn disturb(&mut self, until: Instant) {
        self.faults_end = self.faults_end.max(until);
    }
}

/// One run of a plan: faults and commands for a while, then everything must come to be as the records say.
pub fn run_cluster(plan: ClusterPlan, verbose: bool) -> Result<ClusterOutcome, String> {
    Grid::new(plan, verbose).run()
}

/// What an action is about, for the trace.
fn number_of(id: ActionId, action: &Action) -> [u64; 3] {
    let kind = match action {
        Action::Open { .. } => 1,
        Action::Read { .. } => 2,
        Action::AskToYield { .. } => 3,
        Action::LetGo { .. } => 4,
        Action::Commit { .. } => 5,
    };
    [id.0, action.volume().0 as u64, kind]
}
