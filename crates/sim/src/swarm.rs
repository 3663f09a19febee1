//! One run from one seed: a grid, controllers, guests and faults; safety first, then liveness.
//!
//! Safety phase: requests and faults. Liveness phase: everything is healed, and the grid must converge: all requests
//! answered, the volume open, redundancy whole, every sector read back and judged, nothing held that nobody names.

use crate::disk::{Crash, Disk};
use crate::faults::{HostAct, Nemesis};
use crate::groups::Groups;
use crate::node::NodeProc;
use crate::plan::Plan;
use crate::recovery::Recovery;
use crate::secrecy::{find_plain, key_of, store_key_of};
use crate::separate::{SeparateClones, id_of};
use crate::snapshots::Snapshots;
use crate::workload::{Area, Guests, What};
use crate::world::{MachineAt, Output, World};
use holdfast_base::{
    DeviceId, Epoch, InstanceId, Instant, MediaClass, MetaRequest, MetaVersion, NodeId, Prng, RequestToken, SegmentId,
    VolumeId,
};
use holdfast_format::features::Feature;
use holdfast_format::geometry::Layout;
use holdfast_format::packing::Compression;
use holdfast_format::root::{Root, root_key};
use holdfast_format::tier::Tiers;
use holdfast_format::wire::{DeviceHealth, Reply, Request};
use holdfast_store as store;
use holdfast_volume::{Config, Controller, Event, Notice, State, Target};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

pub const VOLUME: VolumeId = VolumeId(0x0a_b1e5);

const LAYOUTS: [Layout; 11] = [
    Layout::NestedMirror,
    Layout::NestedParity { data: 2, parity: 1 },
    Layout::Mirror { copies: 2 },
    Layout::Mirror { copies: 3 },
    Layout::Parity { data: 2, parity: 1 },
    Layout::Parity { data: 3, parity: 1 },
    Layout::Parity { data: 2, parity: 2 },
    Layout::Parity { data: 4, parity: 2 },
    Layout::DeviceMirror { copies: 2 },
    Layout::DeviceMirror { copies: 3 },
    Layout::DeviceParity { data: 2, parity: 1 },
];

const WAKE_FAULTS: u64 = 1;
const WAKE_GUESTS: u64 = 2;
pub(crate) const WAKE_GROUP: u64 = 3;
pub(crate) const WAKE_SEPARATE: u64 = 4;
/// From here on: the host with that number comes back.
const WAKE_HOST: u64 = 100;

/// A run that makes more events does not come to rest.
const STEPS_MAX: u64 = 2_000_000;

/// In the liveness phase, everything must have converged within this.
const CONVERGE_WITHIN: Duration = Duration::from_secs(60);

/// What a run came to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outcome {
    pub trace_hash: u64,
    pub events: u64,
    pub answered: u64,
    pub refused: u64,
    pub faults: u32,
    pub openings: u32,
    pub segments_written: u64,
    pub segments_cleaned: u64,
    pub repacked_bytes: u64,
    pub rolls: u64,
    pub folds: u64,
    pub audits: u64,
    pub shards_rebuilt: u64,
    /// Reads that were answered from nodes' read caches, of processes that live at the end.
    pub cache_hits: u64,
    /// Between reactors of nodes.
    pub passed_on: u64,
    /// Disk operations that waited for a place, likewise.
    pub disk_waits: u64,
    /// What reads took of what had come with other blocks.
    pub ahead_bytes: u64,
    /// By keys and positions: what was encrypted.
    pub encryptions: u64,
    /// Blocks that members of a domain have named in its store, of openings that live when they are read back.
    pub shared_blocks: u64,
    /// Times that the metadata store was lost, and all volumes had back from nodes, and that some could only be found.
    pub recovered: u32,
    pub found: u32,
    /// Of a volume that is not encrypted: disks show what guests wrote.
    pub plain_seen: bool,
}

pub struct Run {
    pub(crate) plan: Plan,
    pub world: World<Controller>,
    pub guests: Guests,
    nemesis: Nemesis,
    prng: Prng,
    /// The newest opening.
    pub(crate) current: Option<MachineAt>,
    /// All openings whose processes live, oldest first, the current one included.
    openings: Vec<MachineAt>,
    opened: BTreeSet<MachineAt>,
    deposed: BTreeSet<MachineAt>,
    /// The last to have begun to serve.
    serving: Option<MachineAt>,
    served_epoch: Epoch,
    hand_over_to: Option<usize>,
    failed_disks: BTreeSet<(usize, usize)>,
    openings_count: u32,
    issued: u32,
    steps: u64,
    healing: bool,
    discarded_all: bool,
    pub(crate) snapshots: Snapshots,
    pub(crate) groups: Groups,
    pub(crate) separate: SeparateClones,
    shared_blocks: u64,
    draining: BTreeSet<DeviceId>,
    drain_prng: Prng,
    packing_prng: Prng,
    pub(crate) held: BTreeMap<SegmentId, BTreeSet<u8>>,
    held_twice: Vec<String>,
    plain_seen: bool,
    pub(crate) recovery: Option<Recovery>,
    pub(crate) recovery_prng: Prng,
    pub(crate) recovered: u32,
    pub(crate) found: u32,
    failure: Option<String>,
}

impl Run {
    pub fn new(plan: Plan, verbose: bool) -> Run {
        let mut world = World::new(plan.seed, verbose);
        world.mixed = plan.mixed;
        world.asks_lost_one_in = 40;
        let mut prng = world.prng.fork();
        let failures = usize::from(plan.layout.failures());
        let mut nemesis = Nemesis::new(prng.fork(), failures, plan.weights);
        nemesis.spares_nodes = !plan.layout.is_on_devices();
        // Of a nested layout all copies lie on one node while the other is away.
        nemesis.rots_one_disk = plan.layout.is_on_devices() || plan.layout.is_nested() || plan.relayouts;
        for n in 0..plan.nodes {
            let mut config = store::NodeConfig::new(world.grid, NodeId(n as u32 + 1), InstanceId(0));
            config.mutations = plan.store_mutations;
            config.batch_records_max = plan.batch_records_max;
            config.disk_in_flight_max = plan.disk_in_flight_max;
            config.read_cache_per_mille = plan.read_cache_per_mille;
            config.reactors = plan.node_reactors;
            let node = world.add_node(config, plan.sizing, &vec![plan.disk_bytes; plan.disks]);
            for (disk, media) in world.nodes[node].disks.iter_mut().zip(&plan.media) {
                disk.media = Some(*media);
            }
            if plan.read_cache_per_mille > 0 && plan.media.is_empty() {
                mix_classes(&mut world.nodes[node].disks, Prng::new(plan.seed ^ 0xcac4e ^ n as u64));
            }
            world.start_node(node);
        }
        if !plan.greet_early {
            let ready_at = world.now() + Duration::from_millis(5);
            while world.next_at().is_some_and(|at| at < ready_at) {
                world.step();
            }
            world.outputs.clear();
        }
        for _ in 0..plan.hosts {
            world.add_host();
        }
        if let Some(faults) = plan.rotten {
            nemesis.make_rotten(&mut world, faults);
        }
        let mut root = Root::new(world.grid, VOLUME, "vm", plan.volume_bytes, plan.layout);
        root.tiers = plan.tiers;
        root.key_id = plan.encrypted.then(|| key_of(plan.seed).id());
        if plan.compression != Compression::Off && plan.packs_at_once {
            root.features = root.features.with(Feature::Packed);
        }
        let key = root_key(VOLUME);
        world.meta.apply(&MetaRequest::Swap {
            key,
            expect: MetaVersion::ABSENT,
            value: Some(root.encode()),
            guard: None,
        });
        let mut guests =
            Guests::new(prng.fork(), plan.mix, plan.volume_bytes, u64::from(plan.direct_bytes), plan.clones_max as u64);
        guests.space_may_end = plan.space_may_end();
        let (drain_prng, packing_prng) = (Prng::new(plan.seed ^ 0xd5a1), Prng::new(plan.seed ^ 0x25cf));
        let recovery_prng = Prng::new(plan.seed ^ 0x4ec0);
        let snapshots = Snapshots::new(plan.seed, plan.snapshots_max, plan.clones_max);
        let mut run = Run {
            snapshots,
            groups: Groups::new(plan.seed, plan.groups),
            separate: SeparateClones::new(plan.seed, plan.separate_max),
            shared_blocks: 0,
            draining: BTreeSet::new(),
            drain_prng,
            packing_prng,
            plan,
            world,
            guests,
            nemesis,
            prng,
            current: None,
            openings: Vec::new(),
            opened: BTreeSet::new(),
            deposed: BTreeSet::new(),
            serving: None,
            served_epoch: Epoch(0),
            hand_over_to: None,
            failed_disks: BTreeSet::new(),
            openings_count: 0,
            issued: 0,
            steps: 0,
            healing: false,
            discarded_all: false,
            held: BTreeMap::new(),
            held_twice: Vec::new(),
            plain_seen: false,
            recovery: None,
            recovery_prng,
            recovered: 0,
            found: 0,
            failure: None,
        };
        run.open(0);
        if run.plan.sharing {
            run.begin_domain();
        }
        run
    }

    pub(crate) fn config_of(&mut self, volume: VolumeId, host: usize) -> Config {
        let instance = InstanceId(self.prng.next_u128());
        let seed = self.prng.next_u64();
        let plan = &self.plan;
        let mut config = Config::new(self.world.grid, volume, &format!("host{host}"), instance, seed);
        config.takeover = true;
        config.writeback_bytes_max = plan.writeback_bytes;
        config.map_cache_bytes_max = plan.map_cache_bytes;
        config.segment_payload_bytes = plan.segment_bytes;
        config.direct_bytes_min = plan.direct_bytes;
        (config.share_run_min, config.print_heat_min, config.forget_after) = (2, 0, plan.forget_after);
        config.vacate_every = plan.forget_after;
        config.destage_age_max = plan.destage_age;
        config.clean_dead_per_mille = plan.clean_dead_per_mille;
        (config.read_ahead_bytes_max, config.read_ahead_after_blocks) = (plan.read_ahead_bytes, 8);
        config.search_step = plan.search_step;
        (config.fold_runs_min, config.slice_runs_max) = (plan.fold_runs, plan.slice_runs);
        config.rebuild_after = plan.rebuild_after;
        (config.scrub_every, config.audit_every) = (plan.scrub_every, plan.audit_every);
        config.slow_after = plan.slow_after;
        config.mutations = plan.volume_mutations;
        (config.compression, config.repack_every) = (plan.compression, plan.destage_age);
        config.key = plan.encrypted.then(|| key_of(plan.seed));
        config.notes_encryptions = plan.encrypted;
        config
    }

    /// A new opening of the volume on this host, if it is up.
    pub(crate) fn open(&mut self, host: usize) {
        if !self.world.hosts[host].is_up() {
            return;
        }
        self.openings_count += 1;
        // The host's shell has one controller a volume; one that served stays in this world, to go on sending.
        let replaced = |m: &MachineAt| m.host == host && !self.opened.contains(m);
        for at in self.openings.extract_if(.., |m| replaced(m)).collect::<Vec<_>>() {
            self.world.detach(at);
            self.guests.on_gone(|m| m == at);
        }
        self.on_group_loss();
        let mut config = self.config_of(VOLUME, host);
        if let Some(store) = self.separate.store_of_first.filter(|_| self.plan.encrypted) {
            config.store_key = Some((id_of(store), store_key_of(self.plan.seed)));
        }
        let at = self.world.attach(host, Controller::new(config));
        if self.plan.local {
            let nodes = BTreeSet::from([NodeId(host as u32 + 1)]);
            self.world.tell(at, Event::LocalNodes { nodes });
        }
        if !self.draining.is_empty() {
            self.world.tell(at, Event::Drain { devices: self.draining.clone() });
        }
        self.current = Some(at);
        self.openings.push(at);
        self.tell_first();
    }

    pub(crate) fn fail(&mut self, why: String) {
        self.failure.get_or_insert(why);
    }

    fn on_output(&mut self, output: Output) {
        let heard = match &output {
            Output::Notice { at, notice } => Some((*at, notice.clone())),
            _ => None,
        };
        self.take_output(output);
        if let Some((at, notice)) = heard {
            self.on_group_notice(at, &notice);
        }
    }

    fn take_output(&mut self, output: Output) {
        if let Output::Reply { at, .. } | Output::Notice { at, .. } = &output
            && let Some(number) = self.separate.number_at(*at)
        {
            return self.on_member_output(number, *at, output);
        }
        match output {
            // Its host crashed in the same instant: nobody hears this.
            Output::Reply { at, .. } if self.world.machine(at).is_none() => {}
            Output::Reply { at, reply } => {
                self.check_held(at, &reply);
                self.guests.overwhelmed = self.world.now() < self.nemesis.overwhelmed_until + Duration::from_secs(1);
                if let Err(why) = self.guests.on_reply(reply) {
                    self.fail(why);
                }
            }
            Output::Notice { at, notice: Notice::StateChanged(state) } => self.on_state(at, state),
            Output::Probed { token, reply, payload, .. } if self.recovery.is_some() => {
                self.on_evidence(token, reply, &payload);
            }
            Output::Probed { node, reply, .. } => self.on_probed(node, &reply),
            Output::NodeNote { node, notice } => self.on_node_note(node, &notice),
            Output::Notice { at, notice: Notice::Changed { change, target } } => self.on_changed(at, &change, target),
            Output::Notice { at, notice: Notice::Refused { change, .. } } => self.on_change_refused(at, &change),
            Output::Notice { notice: Notice::Miscounted { segments, shadowed }, .. } => {
                self.fail(format!("the audit found {segments} segments miscounted; too much shadowed: {shadowed}"));
            }
            Output::Notice { at, notice } => self.on_separate_notice(at, &notice),
            Output::Wake(key @ (WAKE_FAULTS | WAKE_GUESTS | WAKE_SEPARATE)) if self.recovery.is_some() => {
                self.world.wake_at(self.world.now() + Duration::from_millis(50), key);
            }
            Output::Wake(WAKE_FAULTS) if !self.healing => self.on_fault_time(),
            Output::Wake(WAKE_GUESTS) => self.on_guest_time(),
            Output::Wake(WAKE_GROUP) => self.on_group_time(),
            Output::Wake(WAKE_SEPARATE) => self.on_separate_time(self.healing),
            Output::Wake(key) if key >= WAKE_HOST => self.host_is_back((key - WAKE_HOST) as usize),
            Output::Talk { at, to, talk } => self.on_talk(at, to, talk),
            Output::Wake(_) | Output::Meta { .. } => {}
        }
    }

    fn on_state(&mut self, at: MachineAt, state: State) {
        match state {
            State::Open => {
                self.opened.insert(at);
                // An owner that slept hears of its success when others have long followed it.
                let epoch = self.world.machine(at).map_or(Epoch(0), |c| c.status().epoch);
                if epoch <= self.served_epoch {
                    return;
                }
                self.served_epoch = epoch;
                self.serving = Some(at);
                let others = |m: &&MachineAt| **m != at && self.opened.contains(*m);
                let predecessors: Vec<MachineAt> = self.openings.iter().filter(others).copied().collect();
                self.guests.on_open(&predecessors);
            }
            State::Deposed => {
                self.deposed.insert(at);
                if self.current == Some(at) {
                    // One that served may not have heard yet that it has a successor; one that opens will be that.
                    let is_late = |m: &MachineAt| self.opened.contains(m) && self.serving != Some(*m);
                    let is_gone = |m: &MachineAt| self.deposed.contains(m) || is_late(m);
                    self.current = self.openings.iter().rfind(|m| !is_gone(m)).copied();
                    // While it closed for a hand-over, say, and its deposer is gone.
                    if self.healing && self.current.is_none() {
                        self.open_somewhere();
                    }
                }
            }
            State::Closed => {
                self.deposed.insert(at);
                if self.current == Some(at) {
                    self.current = None;
                    let host = self.hand_over_to.take().unwrap_or(at.host);
                    self.open(host);
                }
            }
            State::Opening | State::Closing => {}
        }
    }

    fn on_node_note(&mut self, node: usize, notice: &store::Notice) {
        match notice {
            store::Notice::DeviceOpened { slot, .. } => {
                self.failed_disks.remove(&(node, slot.0));
            }
            store::Notice::DeviceFailed { slot, .. } => {
                self.failed_disks.insert((node, slot.0));
            }
            _ => {}
        }
    }

    /// The operator's part of healing: a process whose device failed is restarted, once; a disk that still fails is
    /// swapped for a blank one.
    fn replace_failed_disks(&mut self) -> Result<(), String> {
        for swap in [false, true] {
            let failed = std::mem::take(&mut self.failed_disks);
            let nodes: BTreeSet<usize> = failed.iter().map(|(node, _)| *node).collect();
            for node in nodes {
                self.world.crash_node(node, Crash::Process);
                if swap {
                    failed.iter().filter(|(n, _)| *n == node).for_each(|(n, slot)| self.world.format_disk(*n, *slot));
                }
                self.world.start_node(node);
            }
            self.run_until(self.world.now() + Duration::from_millis(20), |_| false)?;
        }
        Ok(())
    }

    fn on_fault_time(&mut self) {
        self.nemesis.is_whole = self.is_whole();
        if self.nemesis.waits_for_restoration() && self.nemesis.is_whole {
            self.nemesis.on_restored(self.world.now());
        }
        let owner = self.current.map(|at| at.host);
        match self.nemesis.act(&mut self.world, owner) {
            Some(HostAct::Crash { host, back_after }) => {
                self.crash_host(host);
                self.world.wake_at(self.world.now() + back_after, WAKE_HOST + host as u64);
            }
            Some(HostAct::TakeOver { host }) => self.take_over(host),
            None => {}
        }
        let mean = self.plan.fault_pace.as_micros() as u64;
        let pause = Duration::from_micros(self.prng.between(mean / 2, mean + mean / 2));
        let next = self.nemesis.ambush_at().unwrap_or(self.world.now() + pause);
        self.world.wake_at(next, WAKE_FAULTS);
    }

    /// The operator empties a disk, or none.
    pub(crate) fn drain(&mut self, disk: Option<(usize, usize)>) {
        let now = self.world.now();
        let device = disk.and_then(|(node, slot)| Some(self.world.nodes[node].stats(now).get(slot)?.device));
        self.drain_devices(device.into_iter().collect());
    }

    pub(crate) fn drain_devices(&mut self, devices: BTreeSet<DeviceId>) {
        self.draining = devices;
        let members: Vec<MachineAt> = self.separate.all_machines().collect();
        for at in self.openings.iter().copied().chain(members).collect::<Vec<_>>() {
            self.world.tell(at, Event::Drain { devices: self.draining.clone() });
        }
    }

    pub(crate) fn draining(&self) -> BTreeSet<DeviceId> {
        self.draining.clone()
    }

    /// Now and then the volume is to be written in another layout that bears as many losses.
    fn act_on_layout(&mut self, at: MachineAt) {
        if self.plan.relayouts && self.drain_prng.chance(10) && !self.is_late(at) {
            let fits = |layout: &Layout| {
                layout.failures() == self.plan.layout.failures()
                    && layout.is_on_devices() == self.plan.layout.is_on_devices()
                    && usize::from(layout.width()) <= self.plan.domains()
                    && usize::from(layout.shards_a_domain()) <= self.plan.disks
            };
            let fitting: Vec<Layout> = LAYOUTS.into_iter().filter(fits).collect();
            let layout = *self.drain_prng.pick(&fitting);
            self.world.tell(at, Event::SetLayout { layout });
            // A tier that bears as much as every one of these.
            let tiers = if self.drain_prng.chance(300) { Tiers::default() } else { self.plan.tiers };
            self.world.tell(at, Event::SetTiers { tiers });
        }
    }

    /// Now and then it is packed otherwise, or no more.
    fn act_on_compression(&mut self, at: MachineAt) {
        if self.plan.compression != Compression::Off && self.packing_prng.chance(30) && !self.is_late(at) {
            let compression = *self.packing_prng.pick(&[Compression::Off, Compression::Lz4, Compression::Auto]);
            self.world.tell(at, Event::SetCompression { compression });
        }
    }

    /// Now and then, where there are nodes to spare.
    fn act_on_drains(&mut self) {
        if self.plan.drains && self.drain_prng.chance(15) {
            let node = self.drain_prng.below(self.plan.nodes as u64) as usize;
            let disk = (node, self.drain_prng.below(self.plan.disks as u64) as usize);
            let disk = self.drain_prng.chance(600).then_some(disk);
            self.drain(disk);
        }
    }

    fn take_over(&mut self, host: usize) {
        match self.current {
            Some(at) if self.prng.chance(300) && !self.world.hosts[at.host].is_paused() => {
                self.hand_over_to = Some(host);
                self.world.tell(at, Event::Close);
            }
            _ => self.open(host),
        }
    }

    pub(crate) fn crash_host(&mut self, host: usize) {
        self.world.crash_host(host);
        self.guests.on_gone(|at| at.host == host);
        self.on_group_loss();
        self.on_separate_host_gone(host);
        self.openings.retain(|at| at.host != host);
        self.current = self.current.filter(|at| at.host != host);
    }

    fn host_is_back(&mut self, host: usize) {
        if !self.world.hosts[host].is_up() {
            self.world.start_host(host);
        }
        if self.current.is_none() && self.recovery.is_none() {
            self.open(host);
        }
    }

    fn on_guest_time(&mut self) {
        if self.issued >= self.plan.requests {
            return;
        }
        let pause = Duration::from_micros(self.prng.between(self.plan.think_us / 4, self.plan.think_us));
        self.world.wake_at(self.world.now() + pause, WAKE_GUESTS);
        let Some(current) = self.current else {
            if self.world.hosts.iter().any(|h| h.is_up()) {
                self.open_somewhere();
            }
            return;
        };
        while self.guests.waiting_on(current) < self.plan.depth && self.issued < self.plan.requests {
            self.issued += 1;
            self.ask(current);
            if self.prng.chance(500) {
                break;
            }
        }
        self.act_on_snapshots(current);
        self.act_on_groups(current);
        self.act_on_separate(current);
        self.act_on_drains();
        self.act_on_layout(current);
        self.act_on_compression(current);
        if self.prng.chance(100)
            && let Some(old) = self.openings.iter().find(|m| **m != current).copied()
            && self.guests.waiting_on(old) < 4
        {
            self.ask(old);
        }
    }

    /// A random request.
    fn ask(&mut self, at: MachineAt) {
        let area = self.draw_area(at);
        let request = self.guests.draw(at, area, self.is_late(at));
        self.world.request(at, area.target, request);
    }

    /// A request of a scenario.
    pub(crate) fn ask_for(&mut self, at: MachineAt, area: Area, what: What, offset: u64, len: u64) -> RequestToken {
        let request = self.guests.ask(at, area, what, offset, len, self.is_late(at));
        let token = request.token;
        self.world.request(at, area.target, request);
        token
    }

    /// Whether the controller is deposed, or has a successor that serves.
    pub(crate) fn is_late(&self, at: MachineAt) -> bool {
        self.deposed.contains(&at) || self.opened.contains(&at) && self.serving.is_some_and(|s| s != at)
    }

    pub(crate) fn open_somewhere(&mut self) {
        let up: Vec<usize> = (0..self.world.hosts.len()).filter(|h| self.world.hosts[*h].is_up()).collect();
        if !up.is_empty() {
            let host = *self.prng.pick(&up);
            self.open(host);
        }
    }

    pub(crate) fn step(&mut self) -> Result<(), String> {
        if !self.world.step() {
            return Err("nothing will ever happen again".to_string());
        }
        while let Some(output) = self.world.outputs.pop_front() {
            self.on_output(output);
        }
        self.steps += 1;
        if self.steps > STEPS_MAX {
            return Err(format!("no rest after {STEPS_MAX} events"));
        }
        match self
            .failure
            .take()
            .or_else(|| self.world.encryptions.take_broken())
            .or_else(|| self.world.witness.take_broken())
        {
            Some(why) => Err(why),
            None => Ok(()),
        }
    }

    /// What guests wrote is on no disk of an encrypted volume. On those of others it is: where it is looked for it is found.
    fn check_secrecy(&mut self) -> Result<(), String> {
        match find_plain(&self.world) {
            Some((node, disk, sector)) if self.plan.encrypted => Err(format!(
                "sector {sector} of disk {disk} of node {node} shows what a guest wrote, and the volume is encrypted"
            )),
            found => {
                self.plain_seen |= found.is_some();
                Ok(())
            }
        }
    }

    pub(crate) fn run_until(&mut self, until: Instant, done: impl Fn(&Run) -> bool) -> Result<bool, String> {
        while self.world.now() < until {
            if done(self) {
                return Ok(true);
            }
            self.step()?;
        }
        Ok(done(self))
    }

    fn is_open(&self, at: MachineAt) -> bool {
        self.world.machine(at).is_some_and(|c| c.state() == State::Open)
    }

    /// Open, with full redundancy in log and segments, as the controller sees it.
    fn is_whole(&self) -> bool {
        let Some(controller) = self.current.and_then(|at| self.world.machine(at)) else { return false };
        if controller.state() != State::Open {
            return false;
        }
        let status = controller.status();
        controller.verify();
        status.degraded_segments == 0 && status.at_risk_entries == 0 && self.are_members_whole()
    }

    /// The whole run.
    pub fn run(mut self) -> Result<Outcome, String> {
        let start = self.world.now();
        self.world.wake_at(start + Duration::from_millis(1), WAKE_GUESTS);
        self.world.wake_at(start + Duration::from_millis(30), WAKE_FAULTS);
        let requests = self.plan.requests;
        if self.plan.loses_metadata {
            self.run_until(start + Duration::from_secs(7), move |r| r.issued >= requests / 2)?;
            self.lose_metadata()?;
        }
        self.run_until(start + Duration::from_secs(15), move |r| r.issued >= requests)?;
        self.issued = requests;
        self.verify_nodes();
        self.check_secrecy()?;
        self.heal()?;
        self.converge("settle")?;
        self.settle_clones();
        if self.plan.sharing {
            self.rest_in_domain()?;
        }
        self.read_back()?;
        self.read_snapshots_back()?;
        self.read_members_back()?;
        self.shared_blocks = self.shared_blocks_of_all();
        self.drop_members()?;
        self.begin_clones()?;
        if self.plan.space_may_end() || self.prng.chance(250) {
            self.discard_all()?;
        }
        self.guests.history.check().map_err(|v| v.to_string())?;
        self.check_nothing_leaked()?;
        self.verify_nodes();
        self.check_secrecy()?;
        self.outcome()
    }

    fn heal(&mut self) -> Result<(), String> {
        self.healing = true;
        self.nemesis.heal_all(&mut self.world);
        self.drain(None);
        for host in 0..self.plan.hosts {
            if !self.world.hosts[host].is_up() {
                self.world.start_host(host);
            }
        }
        self.replace_failed_disks()?;
        // A hand-over may be under way: let it come to an end of its own, then see to it that somebody owns the volume.
        self.run_until(self.world.now() + Duration::from_millis(400), |_| false)?;
        if self.current.is_none() {
            self.open_somewhere();
        }
        Ok(())
    }

    pub(crate) fn converge(&mut self, what: &str) -> Result<(), String> {
        let until = self.world.now() + CONVERGE_WITHIN;
        // A grid without room can't restore layouts before something is let go of.
        let is_full = self.plan.space_may_end() && !self.discarded_all;
        let done = self.run_until(until, |r| {
            let answered = r.current.is_some_and(|at| r.guests.waiting_on(at) == 0 && r.is_open(at));
            answered && (is_full || r.is_whole())
        })?;
        if done {
            return Ok(());
        }
        let waiting = self.current.map(|at| self.guests.waiting_on(at));
        let status = self.current.and_then(|at| self.world.machine(at)).map(Controller::status);
        let members = self.members_text();
        Err(format!(
            "did not {what} within {CONVERGE_WITHIN:?} of healing: {waiting:?} requests wait, {status:?}{members}"
        ))
    }

    fn read_back(&mut self) -> Result<(), String> {
        let at = self.current.expect("converged");
        for area in self.areas() {
            for request in self.guests.read_all(at, area) {
                self.world.request(at, area.target, request);
            }
        }
        self.converge("read everything back")
    }

    /// Whatever fills the grid, it can be let go of.
    fn discard_all(&mut self) -> Result<(), String> {
        self.drop_all_snapshots()?;
        // An opening that is still on its way may have requests that it will carry out when it takes over.
        let is_quiet = |r: &Run, m: &MachineAt| r.deposed.contains(m) || r.guests.waiting_on(*m) == 0;
        self.run_until(self.world.now() + CONVERGE_WITHIN, |r| r.openings.iter().all(|m| is_quiet(r, m)))?;
        if self.current.is_some_and(|at| self.is_late(at)) {
            self.current = self.serving;
        }
        self.converge("settle once more")?;
        let at = self.current.expect("converged");
        let request = self.guests.ask(at, Area::VOLUME, What::Discard, 0, self.guests.size_bytes(), false);
        self.world.request(at, Target::VOLUME, request);
        self.discarded_all = true;
        self.converge("let go of everything")?;
        self.read_back()?;
        let mapped =
            |r: &Run| r.current.and_then(|at| r.world.machine(at)).map_or(u64::MAX, |c| c.status().mapped_blocks);
        if self.run_until(self.world.now() + CONVERGE_WITHIN, move |r| mapped(r) == 0)? {
            return Ok(());
        }
        Err(format!("{} blocks are still mapped {CONVERGE_WITHIN:?} after everything was discarded", mapped(self)))
    }

    fn on_probed(&mut self, node: usize, reply: &Reply) {
        let Reply::Shards { shards, more } = reply else {
            return self.fail(format!("node {node} answered a list of shards by {reply:?}"));
        };
        assert!(!more, "a simulated device holds few shards");
        for shard in shards {
            if !self.held.entry(shard.segment).or_default().insert(shard.index) {
                self.held_twice.push(format!("{shard:?}"));
            }
        }
    }

    /// Lists what nodes hold.
    pub(crate) fn take_stock(&mut self) {
        self.take_stock_of(VOLUME);
    }

    pub(crate) fn take_stock_of(&mut self, volume: VolumeId) {
        self.held.clear();
        self.held_twice.clear();
        for node in 0..self.world.nodes.len() {
            let now = self.world.now();
            let stats = self.world.nodes[node].stats(now);
            // One that failed keeps what it has: nothing can be deleted there.
            let serving = stats.into_iter().filter(|s| s.health == DeviceHealth::Serving);
            for device in serving.map(|s| s.device) {
                let request = Request::ListShards { device, volume, after: None, count_max: 100_000 };
                self.world.probe(node, 0, request);
            }
        }
        while let Some(output) = self.world.outputs.pop_front() {
            self.on_output(output);
        }
    }

    fn check_nothing_leaked(&mut self) -> Result<(), String> {
        let until = self.world.now() + Duration::from_secs(60);
        loop {
            self.take_stock();
            let controller = self.current.and_then(|at| self.world.machine(at)).expect("converged");
            let referenced = controller.status().segment_count;
            if self.held.len() as u64 == referenced && self.held_twice.is_empty() && self.is_whole() {
                return Ok(());
            }
            if self.world.now() > until {
                let (held, twice) = (self.held.len(), &self.held_twice);
                let segments: Vec<_> = self.held.keys().collect();
                return Err(format!(
                    "leak: shards of {held} segments are held, {referenced} are referenced: {segments:?}; twice: {twice:?}"
                ));
            }
            self.run_until(self.world.now() + Duration::from_millis(500), |_| false)?;
        }
    }

    /// What must hold in every node's process.
    fn verify_nodes(&self) {
        self.world.nodes.iter().flat_map(NodeProc::machines).for_each(store::Node::verify);
    }

    fn cache_hits(&self) -> u64 {
        let stats = self.world.nodes.iter().flat_map(|node| node.stats(self.world.now()));
        stats.filter_map(|stat| stat.read_cache).map(|cache| cache.hits).sum()
    }

    fn outcome(&self) -> Result<Outcome, String> {
        let mut outcome = Outcome {
            trace_hash: self.world.trace.hash(),
            events: self.world.trace.events(),
            answered: self.guests.answered,
            refused: self.guests.refused,
            faults: self.nemesis.injected,
            openings: self.openings_count,
            segments_written: 0,
            segments_cleaned: 0,
            repacked_bytes: 0,
            rolls: 0,
            folds: 0,
            audits: 0,
            shards_rebuilt: 0,
            cache_hits: self.cache_hits(),
            shared_blocks: self.shared_blocks,
            passed_on: self.world.nodes.iter().flat_map(NodeProc::machines).map(store::Node::passed_on).sum(),
            disk_waits: self.world.nodes.iter().flat_map(NodeProc::machines).map(store::Node::waited).sum(),
            ahead_bytes: 0,
            encryptions: self.world.encryptions.count(),
            recovered: self.recovered,
            found: self.found,
            plain_seen: self.plain_seen,
        };
        for controller in self.openings.iter().filter_map(|at| self.world.machine(*at)) {
            let counters = controller.status().counters;
            outcome.segments_written += counters.segments_written;
            outcome.segments_cleaned += counters.segments_cleaned;
            outcome.repacked_bytes += counters.repacked_bytes;
            outcome.rolls += counters.rolls;
            outcome.folds += counters.folds;
            outcome.audits += counters.audits;
            outcome.shards_rebuilt += counters.shards_rebuilt;
            outcome.ahead_bytes += counters.ahead_bytes;
        }
        Ok(outcome)
    }
}

/// Most nodes have one fast disk among slow ones.
fn mix_classes(disks: &mut [Disk], mut prng: Prng) {
    if prng.chance(800) {
        let fast = prng.below(disks.len() as u64) as usize;
        disks.iter_mut().for_each(|disk| disk.media = Some(MediaClass::Hdd));
        disks[fast].media = Some(*prng.pick(&[MediaClass::Ssd, MediaClass::Nvme]));
    }
}

/// One run of a plan.
pub fn run_plan(plan: Plan, verbose: bool) -> Result<Outcome, String> {
    Run::new(plan, verbose).run()
}
