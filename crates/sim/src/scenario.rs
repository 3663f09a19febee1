//! A grid that is driven by hand, one step of a story after the other: the form of the scenarios.
//!
//! Every request goes into the same history as in the swarm, and [`Cluster::finish`] heals everything, reads everything
//! back and judges it, so that a scenario only has to say what happens and what it expects on the way.

use crate::disk::{Crash, DiskFaults};
use crate::plan::{Plan, Profile};
use crate::swarm::{Outcome, Run};
use crate::workload::{Area, What};
use crate::world::{MachineAt, World};
use holdfast_base::{DeviceId, HeadId, Instant, RequestToken};
use holdfast_format::geometry::Layout;
use holdfast_format::root::{Root, root_key};
use holdfast_format::tier::Tiers;
use holdfast_volume::{Change, Claim, Controller, Event, GroupEnd, State, Status};
use std::time::Duration;

/// Bytes of a block.
pub const BLOCK: u64 = holdfast_base::BLOCK_BYTES as u64;

/// Nothing that a scenario waits for takes longer.
const PATIENCE: Duration = Duration::from_secs(30);

/// Settings of a [`Cluster`].
pub struct Setup {
    plan: Plan,
}

impl Setup {
    /// Three nodes of one disk, two hosts, a volume of 2 MiB in two copies; nothing fails by itself.
    pub fn new(seed: u64) -> Setup {
        let mut plan = Plan::from_seed(0);
        plan.seed = seed;
        plan.profile = Profile::Calm;
        (plan.snapshots_max, plan.clones_max, plan.separate_max) = (0, 4, 0);
        (plan.groups, plan.drains, plan.relayouts, plan.local, plan.sharing) = (false, false, false, false, false);
        (plan.tiers, plan.media) = (Tiers::default(), Vec::new());
        (plan.read_cache_per_mille, plan.node_reactors) = (0, 1);
        plan.layout = Layout::Mirror { copies: 2 };
        (plan.nodes, plan.disks, plan.hosts) = (3, 1, 2);
        (plan.volume_bytes, plan.writeback_bytes) = (2 << 20, 1 << 20);
        (plan.segment_bytes, plan.direct_bytes, plan.map_cache_bytes) = (128 << 10, 64 << 10, 256 << 10);
        (plan.disk_bytes, plan.sizing.journal_bytes, plan.sizing.unit_bytes) = (24 << 20, 4 << 20, 128 << 10);
        (plan.destage_age, plan.fold_runs, plan.clean_dead_per_mille) = (Duration::from_millis(200), 32, 300);
        (plan.read_ahead_bytes, plan.slice_runs) = (256 << 10, 64);
        (plan.batch_records_max, plan.disk_in_flight_max, plan.requests) = (512, 64, 0);
        (plan.rebuild_after, plan.scrub_every) = (Duration::from_secs(600), Duration::from_secs(3600));
        (plan.slow_after, plan.audit_every) = (Duration::from_secs(30), Duration::from_secs(1));
        plan.forget_after = Duration::from_secs(12);
        plan.weights = crate::faults::Weights::default();
        (plan.rotten, plan.greet_early, plan.mixed, plan.loses_metadata) = (None, false, false, false);
        Setup { plan }
    }

    /// As [`Setup::new`], with what is written staying in the log.
    pub fn long_destage(seed: u64) -> Setup {
        Setup::new(seed).with(|plan| plan.destage_age = Duration::from_secs(60))
    }

    #[must_use]
    pub fn nodes(mut self, nodes: usize) -> Setup {
        self.plan.nodes = nodes;
        self
    }

    #[must_use]
    pub fn disks(mut self, disks: usize) -> Setup {
        self.plan.disks = disks;
        self
    }

    #[must_use]
    pub fn layout(mut self, layout: &str) -> Setup {
        self.plan.layout = layout.parse().expect("a layout");
        self
    }

    /// Whatever else of the plan.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Plan)) -> Setup {
        change(&mut self.plan);
        self
    }

    /// Starts it: everything is up, and the first host has the volume open.
    pub fn start(self) -> Cluster {
        let mut cluster = Cluster { run: Run::new(self.plan, false) };
        cluster.until("the volume is open", |s| s.serving().is_some());
        cluster
    }
}

/// A grid in the middle of a story.
pub struct Cluster {
    pub(crate) run: Run,
}

impl Cluster {
    pub fn world(&mut self) -> &mut World<Controller> {
        &mut self.run.world
    }

    pub fn now(&self) -> Instant {
        self.run.world.now()
    }

    /// The newest opening.
    pub fn owner(&self) -> MachineAt {
        self.run.current.expect("somebody opens the volume")
    }

    /// Whether somebody has the volume open, or is opening it.
    pub fn is_anybody_there(&self) -> bool {
        self.run.current.is_some()
    }

    /// The newest opening, if it serves.
    pub fn serving(&self) -> Option<MachineAt> {
        self.run.current.filter(|at| self.state(*at) == Some(State::Open))
    }

    pub fn state(&self, at: MachineAt) -> Option<State> {
        self.run.world.machine(at).map(Controller::state)
    }

    /// The newest opening's machine.
    pub fn controller(&self) -> &Controller {
        self.run.world.machine(self.owner()).expect("the owner runs")
    }

    pub fn status(&self) -> Status {
        self.controller().verify();
        self.controller().status()
    }

    /// Nothing has less redundancy than it should.
    pub fn is_whole(&self) -> bool {
        let status = self.status();
        status.degraded_segments == 0 && status.at_risk_entries == 0
    }

    /// Everything on the disk is gone from one moment to the next: its device answers by errors.
    pub fn lose_disk(&mut self, node: usize, slot: usize) {
        self.world().nodes[node].disks[slot].faults =
            DiskFaults { write_error: 1000, read_error: 1000, ..DiskFaults::default() };
    }

    /// The operator puts a blank one into its place.
    pub fn swap_disk(&mut self, node: usize, slot: usize) {
        self.crash_node(node);
        self.world().nodes[node].disks[slot].faults = DiskFaults::default();
        self.world().format_disk(node, slot);
        self.start_node(node);
    }

    /// The root record as the metadata store has it.
    pub fn root(&self) -> Root {
        let bytes = self.run.world.meta.peek(&root_key(crate::swarm::VOLUME)).expect("the volume exists");
        Root::decode(bytes).expect("a root record")
    }

    /// Nodes (from zero) that hold the open ledger's legs, in their order.
    pub fn leg_nodes(&self) -> Vec<usize> {
        self.root().open_ledger().expect("an open ledger").legs.iter().map(|l| l.node.0 as usize - 1).collect()
    }

    /// Lets time pass.
    pub fn pass(&mut self, span: Duration) {
        let until = self.now() + span;
        self.run.world.wake_at(until, 0);
        self.run.run_until(until, |_| false).unwrap_or_else(|why| panic!("{why}"));
    }

    pub fn pass_ms(&mut self, ms: u64) {
        self.pass(Duration::from_millis(ms));
    }

    /// Lets time pass until something is so.
    pub fn until(&mut self, what: &str, is_so: impl Fn(&Cluster) -> bool) {
        self.until_within(PATIENCE, what, is_so);
    }

    pub fn until_within(&mut self, patience: Duration, what: &str, is_so: impl Fn(&Cluster) -> bool) {
        let end = self.now() + patience;
        while !is_so(self) {
            let members = || self.run.members_text();
            assert!(self.now() < end, "{what}: not within {patience:?}; {:?}{}", self.status(), members());
            self.run.step().unwrap_or_else(|why| panic!("{why}"));
        }
    }

    /// Writes while a device hangs, which nobody waits for; the node of the device comes anew after that.
    pub fn write_around(&mut self, node: usize, slot: usize) {
        let until = self.now() + Duration::from_secs(20);
        self.world().nodes[node].disks[slot].stuck_until = until;
        for block in (0..256).step_by(8) {
            self.write(block, 3);
        }
        assert!(self.now() < until, "writes wait for the device");
        self.pass(Duration::from_secs(25));
        // Shards that it wrote after their deletion are found when the node lists what it holds.
        self.crash_node(node);
        self.start_node(node);
    }

    /// Asks without waiting for the answer.
    pub fn ask(&mut self, at: MachineAt, what: What, block: u64, blocks: u64) -> RequestToken {
        self.ask_of(at, Area::VOLUME, what, block, blocks)
    }

    fn ask_of(&mut self, at: MachineAt, area: Area, what: What, block: u64, blocks: u64) -> RequestToken {
        self.run.ask_for(at, area, what, block * BLOCK, blocks * BLOCK)
    }

    /// Asks for so many blocks to be written, each by a request of its own, without waiting.
    pub fn ask_writes(&mut self, at: MachineAt, block: u64, count: u64) {
        for i in 0..count {
            self.ask(at, What::Write(0), block + i, 1);
        }
    }

    pub fn is_answered(&self, token: RequestToken) -> bool {
        !self.run.guests.is_waiting(token)
    }

    fn ask_owner(&mut self, what: What, block: u64, blocks: u64) {
        self.ask_owner_of(Area::VOLUME, what, block, blocks);
    }

    fn ask_owner_of(&mut self, area: Area, what: What, block: u64, blocks: u64) {
        let token = self.ask_of(self.owner(), area, what, block, blocks);
        self.until("the request is answered", |s| s.is_answered(token));
    }

    /// Writes through the newest opening and waits.
    pub fn write(&mut self, block: u64, blocks: u64) {
        self.ask_owner(What::Write(0), block, blocks);
    }

    /// Reads through the newest opening; what was read is judged at the end.
    pub fn read(&mut self, block: u64, blocks: u64) {
        self.ask_owner(What::Read, block, blocks);
    }

    pub fn discard(&mut self, block: u64, blocks: u64) {
        self.ask_owner(What::Discard, block, blocks);
    }

    /// Writes to a clone through the newest opening and waits.
    pub fn write_clone(&mut self, clone: usize, block: u64, blocks: u64) {
        self.ask_owner_of(self.run.area(clone), What::Write(0), block, blocks);
    }

    /// Asks a clone without waiting for the answer.
    pub fn ask_clone(&mut self, clone: usize, what: What, block: u64, blocks: u64) -> RequestToken {
        self.ask_of(self.owner(), self.run.area(clone), what, block, blocks)
    }

    /// Reads a clone through the newest opening; what was read is judged at the end.
    pub fn read_clone(&mut self, clone: usize, block: u64, blocks: u64) {
        self.ask_owner_of(self.run.area(clone), What::Read, block, blocks);
    }

    pub fn discard_clone(&mut self, clone: usize, block: u64, blocks: u64) {
        self.ask_owner_of(self.run.area(clone), What::Discard, block, blocks);
    }

    /// Makes a clone of a snapshot; returns its number, from 1 on.
    pub fn clone_snapshot(&mut self, name: &str) -> usize {
        let owner = self.owner();
        let clone = self.run.ask_clone(owner, name);
        self.until("the clone is made", |s| s.run.is_made(clone));
        clone
    }

    /// Makes a separate clone of a snapshot, which somebody opens; returns its number, from 1 on.
    pub fn separate(&mut self, name: &str) -> usize {
        let owner = self.owner();
        let member = self.run.ask_separate(owner, name);
        self.until("the separate clone is made", |s| s.run.is_member_made(member));
        self.until("the separate clone is open", |s| s.run.is_member_open(member));
        member
    }

    /// Asks for a separate clone without waiting for it.
    pub fn begin_separate(&mut self, name: &str) -> usize {
        let owner = self.owner();
        self.run.ask_separate(owner, name)
    }

    /// The runs of a checkpoint are on their way to the nodes.
    pub fn is_checkpointing(&self) -> bool {
        let owner = self.run.world.machine(self.owner()).expect("the owner runs");
        owner.dump().contains("stage: Writing(")
    }

    pub fn until_made(&mut self, member: usize) {
        self.until("the separate clone is made", |s| s.run.is_member_made(member));
    }

    /// Makes a separate clone of a separate clone.
    pub fn separate_of_member(&mut self, of: usize) -> usize {
        let member = self.begin_separate_of_member(of);
        self.until("the separate clone is made", |s| s.run.is_member_made(member));
        self.until("the separate clone is open", |s| s.run.is_member_open(member));
        member
    }

    fn begin_separate_of_member(&mut self, of: usize) -> usize {
        self.until("the separate clone is open", |s| s.run.is_member_open(of) && s.run.is_member_idle(of));
        self.run.snapshot_member(of);
        self.until("the snapshot is taken", |s| s.run.has_member_snapshot(of));
        self.run.ask_separate_of_member(of).expect("it has a snapshot")
    }

    /// Whether no separate clone of it can be made.
    pub fn refuses_separate_of_member(&mut self, of: usize) -> bool {
        let member = self.begin_separate_of_member(of);
        self.until("it is told what comes of it", |s| s.run.is_member_made(member) || s.run.is_member_gone(member));
        self.run.is_member_gone(member)
    }

    /// Lets a snapshot go that a separate clone began with.
    pub fn drop_snapshot_of_member(&mut self, member: usize, name: &str) {
        let at = self.run.member_at(member).expect("a separate clone that is open");
        let change = Change::DropSnapshot { head: HeadId::VOLUME, name: name.to_string() };
        self.run.world.tell(at, Event::Change(change));
        self.until("the snapshot is dropped", |s| s.member_status(member).snapshots.is_empty());
    }

    fn ask_member(&mut self, member: usize, what: What, block: u64, blocks: u64) {
        self.until("the separate clone is open", |s| s.run.is_member_open(member) && s.run.is_member_idle(member));
        self.run.ask_member(member, what, block * BLOCK, blocks * BLOCK);
        self.until("the separate clone answers", |s| s.run.is_member_idle(member));
    }

    pub fn write_member(&mut self, member: usize, block: u64, blocks: u64) {
        self.ask_member(member, What::Write(0), block, blocks);
    }

    /// A store, whose domain others are put into.
    pub fn store(&mut self) -> usize {
        let store = self.run.create_fresh(true);
        self.until("the store is open", |s| s.run.is_member_open(store));
        store
    }

    /// A volume of its own in that domain, as large as the first one.
    pub fn member_of(&mut self, store: usize) -> usize {
        let member = self.run.create_fresh(false);
        self.run.put_into_domain(member, store);
        self.until("the member is open", |s| s.run.is_member_open(member));
        member
    }

    /// A volume of its own in no domain, as large as the first one.
    pub fn volume(&mut self) -> usize {
        let member = self.run.create_fresh(false);
        self.until("the volume is open", |s| s.run.is_member_open(member));
        member
    }

    pub fn has_members(&self, store: usize) -> bool {
        self.run.has_members(store)
    }

    /// A volume whose owner has asked to be in that domain, and was gone before it heard that it is.
    pub fn half_joined(&mut self, store: usize) -> usize {
        let member = self.volume();
        self.run.ask_to_join(member, store);
        self.until("the store has a member", |s| s.run.has_members(store));
        member
    }

    /// Messages of stores and members take that long, at least.
    pub fn delay_talk(&mut self, least: Duration) {
        self.run.separate.talk_takes = least;
    }

    /// Writes the same as in any other volume that is written there as that version.
    pub fn write_member_as(&mut self, member: usize, block: u64, blocks: u64, version: u32) {
        self.ask_member(member, What::Write(version), block, blocks);
    }

    /// The member's host goes, and with it whoever had other volumes there.
    pub fn crash_owner_of(&mut self, member: usize) {
        let at = self.run.member_at(member).expect("a member that is open");
        self.crash_host(at.host);
    }

    /// Waits until somebody has it open.
    pub fn until_open(&mut self, member: usize) {
        self.until("the member is open", |s| s.run.is_member_open(member));
    }

    /// The wish to be in that domain, without waiting for anything.
    pub fn wish_for(&mut self, member: usize, store: usize) {
        self.run.put_into_domain(member, store);
    }

    /// The wish to be in no domain any more.
    pub fn take_out(&mut self, member: usize) {
        self.run.take_out_of_domain(member);
    }

    /// Whether it is looked at seldom, since nothing is left to do.
    pub fn rests(&self, member: usize) -> bool {
        let machine = self.run.member_at(member).and_then(|at| self.run.world.machine(at));
        let next = machine.and_then(Controller::next_deadline);
        next.is_some_and(|at| at.since(self.now()) > Duration::from_secs(5))
    }

    pub fn is_out(&self, member: usize) -> bool {
        self.run.is_out_of_domain(member)
    }

    /// Offers of stores are on their way until they are released.
    pub fn hold_offers(&mut self) {
        self.run.separate.held_offers = Some(Vec::new());
    }

    pub fn release_offers(&mut self) {
        self.run.release_offers();
    }

    /// Blocks that a member has named in its store, since it was opened.
    pub fn shared_blocks(&self, member: usize) -> u64 {
        self.run.shared_blocks(member)
    }

    /// Reads all of a separate clone.
    pub fn read_member(&mut self, member: usize) {
        self.run.read_member(member).unwrap_or_else(|why| panic!("{why}"));
    }

    pub fn member_status(&self, member: usize) -> Status {
        let at = self.run.member_at(member).expect("a separate clone that is open");
        self.run.world.machine(at).expect("it runs").status()
    }

    /// Another opening of a separate clone begins.
    pub fn open_member_on(&mut self, member: usize, host: usize) {
        self.run.open_member(member, host);
        self.until("the separate clone is open", |s| s.run.is_member_open(member));
    }

    pub fn drop_member(&mut self, member: usize) {
        self.run.drop_member(member);
    }

    pub fn drop_clone(&mut self, clone: usize) {
        let owner = self.owner();
        self.run.ask_drop_clone(owner, clone);
        self.until("the clone is dropped", |s| s.run.is_clone_dropped(clone));
    }

    /// Rolls the volume (0), or a clone, back to a snapshot of it.
    pub fn roll_back(&mut self, number: usize, name: &str) {
        let owner = self.owner();
        let size = self.run.guests.size_bytes() / BLOCK;
        self.read_snapshot(name, 0, size);
        let token = self.run.ask_rollback(owner, number, name);
        self.until("the rollback is done", |s| s.is_answered(token));
    }

    /// Takes a snapshot of the volume; returns its name.
    pub fn snapshot(&mut self) -> String {
        self.snapshot_of(0)
    }

    /// Takes a snapshot of the volume (0) or a clone; returns its name.
    pub fn snapshot_of(&mut self, number: usize) -> String {
        let owner = self.owner();
        let name = self.run.ask_snapshot(owner, number);
        self.until("the snapshot is taken", |s| s.run.is_taken(&name));
        name
    }

    /// Begins a group of snapshots of the volume (0) and clones; returns their names.
    pub fn begin_group(&mut self, numbers: &[usize]) -> Vec<String> {
        let owner = self.owner();
        self.run.ask_group(owner, numbers)
    }

    /// What the last group came to, if it has.
    pub fn group_end(&self) -> Option<GroupEnd> {
        self.run.groups.end.clone()
    }

    pub fn drop_snapshot(&mut self, name: &str) {
        let owner = self.owner();
        self.run.ask_drop(owner, name);
        self.until("the snapshot is dropped", |s| s.run.is_dropped(name));
    }

    /// Reads a snapshot through the newest opening; what was read is judged at the end.
    pub fn read_snapshot(&mut self, name: &str, block: u64, blocks: u64) {
        let owner = self.owner();
        let token = self.run.read_snapshot(owner, name, block * BLOCK, blocks * BLOCK);
        self.until("the request is answered", |s| s.is_answered(token));
    }

    /// Writes and overwrites until so many segments have been written.
    pub fn write_segments(&mut self, count: u64) {
        let wanted = self.status().counters.segments_written + count;
        let mut block = 0;
        while self.status().counters.segments_written < wanted {
            self.write(block % 256, 4);
            block += 4;
        }
    }

    /// Another opening begins; it takes the volume over.
    pub fn open_on(&mut self, host: usize) -> MachineAt {
        self.run.open(host);
        self.owner()
    }

    /// The hosts open the volume in turns, so many times, and each crashes before it serves.
    pub fn die_opening(&mut self, rounds: usize) {
        for round in 0..rounds {
            let epoch = self.root().epoch;
            self.open_on(round % 2);
            self.until("it has claimed the volume", |s| s.root().epoch > epoch);
            self.pass_ms(12);
            assert_ne!(self.root().open_ledger().expect("one is open").id.epoch, epoch.next(), "too late: it serves");
            self.crash_host(round % 2);
            self.start_host(round % 2);
            self.pass_ms(5);
        }
    }

    /// Another opening takes the volume over and serves.
    pub fn take_over_on(&mut self, host: usize) -> MachineAt {
        let at = self.open_on(host);
        self.until("the new owner serves", |s| s.state(at) == Some(State::Open));
        at
    }

    pub fn crash_host(&mut self, host: usize) {
        self.run.crash_host(host);
    }

    /// All hosts die, the metadata store is lost, and volumes are had back from what nodes hold. True where all of them surely
    /// are the newest; else the store is found again as it was.
    pub fn lose_metadata(&mut self) -> bool {
        let recovered = self.run.recovered;
        self.run.lose_metadata().unwrap_or_else(|why| panic!("{why}"));
        self.run.recovered > recovered
    }

    pub fn start_host(&mut self, host: usize) {
        self.run.world.start_host(host);
    }

    pub fn crash_node(&mut self, node: usize) {
        self.run.world.crash_node(node, Crash::Process);
    }

    pub fn start_node(&mut self, node: usize) {
        self.run.world.start_node(node);
    }

    /// Every node at once, without a warning; all are back after a while.
    pub fn power_loss(&mut self) {
        let nodes = self.run.world.nodes.len();
        for node in 0..nodes {
            self.run.world.crash_node(node, Crash::Power);
        }
        self.pass_ms(20);
        for node in 0..nodes {
            self.start_node(node);
        }
    }

    /// The node comes back with blank disks in the place of its own.
    pub fn swap_disks(&mut self, node: usize) {
        self.crash_node(node);
        for slot in 0..self.run.world.nodes[node].disks.len() {
            self.run.world.format_disk(node, slot);
        }
        self.start_node(node);
    }

    /// The node comes back under the ids of its disks, which have forgotten everything else.
    pub fn forget_disks(&mut self, node: usize) {
        self.crash_node(node);
        for slot in 0..self.run.world.nodes[node].disks.len() {
            self.run.world.forget_disk(node, slot);
        }
        self.start_node(node);
    }

    pub fn set_layout(&mut self, layout: &str) {
        let layout = layout.parse().expect("a layout");
        self.run.world.tell(self.owner(), Event::SetLayout { layout });
        self.until("the owner knows that the layout is set", |s| s.status().layout == layout);
    }

    pub fn set_tiers(&mut self, tiers: Tiers) {
        self.run.world.tell(self.owner(), Event::SetTiers { tiers });
        self.until("the owner knows that the tiers are set", |s| s.status().tiers == tiers);
    }

    /// What lies on this disk shall go elsewhere; without one, nothing any more.
    pub fn drain(&mut self, disk: Option<(usize, usize)>) {
        self.run.drain(disk);
    }

    /// Shards held by the disks of a node.
    pub fn held_by(&self, node: usize) -> u64 {
        self.run.world.nodes[node].stats(self.now()).iter().map(|device| device.shard_count).sum()
    }

    /// What journals hold, of all nodes that run.
    pub fn journal_bytes_used(&self) -> u64 {
        let nodes = self.run.world.nodes.iter();
        nodes.flat_map(|node| node.stats(self.now())).map(|device| device.journal_used_bytes).sum()
    }

    pub fn device(&self, node: usize, slot: usize) -> DeviceId {
        self.run.world.nodes[node].stats(self.now())[slot].device
    }

    /// What the newest opening finds slow, and whether it does without it.
    pub fn slow_devices(&self) -> Vec<(DeviceId, bool)> {
        let owner = self.run.world.machine(self.owner()).expect("the owner runs");
        owner.slow_devices().into_iter().map(|(device, _, bypassed)| (device, bypassed)).collect()
    }

    /// So much of each of so many different nodes belongs to others, from here on; where any does, writes may be refused.
    pub fn set_aside(&mut self, width: u8, shard_bytes: u64) {
        let claims = if shard_bytes > 0 { vec![Claim { width, shard_bytes }] } else { Vec::new() };
        self.run.guests.space_may_end = !claims.is_empty();
        self.run.world.tell(self.owner(), Event::SetAside { claims });
    }

    /// Requests that were refused so far.
    pub fn refused(&self) -> u64 {
        self.run.guests.refused
    }

    /// The owner is told to let go of the volume; whoever follows it opens it.
    pub fn close(&mut self) {
        self.run.world.tell(self.run.current.expect("somebody has the volume open"), Event::Close);
    }

    /// Shards held on all nodes together, by their segments.
    pub fn held_segments(&mut self) -> usize {
        self.run.take_stock();
        self.run.held.len()
    }

    /// Heals everything; the grid must converge, and every answer given on the way must have been right.
    pub fn finish(self) -> Outcome {
        self.run.run().unwrap_or_else(|why| panic!("{why}"))
    }
}
