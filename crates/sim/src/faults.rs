//! The fault atlas: what may go wrong at the same time, given the redundancy, so that every failure of a run is a bug.
//!
//! A node is *ill* from the moment a fault strikes it until the fault has ended and its peers had time to notice, and,
//! where it lost durable data, until redundancy is restored. At most `failures` nodes are ill at a time. Silent damage
//! (rot, lost and misdirected writes, unreadable sectors, forgotten contents) strikes the disks of one node per run,
//! which stays ill for all of the run. Free at any time: power loss of the whole grid (durable data stays), connection
//! resets, crashes, hangs and isolation of hosts, and the metadata store's faults.
//!
//! Faults that take no durable data may strike beyond `failures`: what needs those nodes waits, and nothing may be
//! lost. Two kinds aim at the moments when data lies on the fewest disks. An *ambush* has two steps, see `Trap`:
//! something lags behind or falls asleep, and some milliseconds later what had not lagged is struck. *Amnesia* blanks a
//! disk of the rotten node under its id while nodes that remember stand still; never while others are ill already, since
//! data may then lie on the rotten node alone.

use crate::disk::{Crash, DiskFaults};
use crate::world::{Machine, World};
use holdfast_base::{Instant, Prng};
use holdfast_format::wire::DeviceHealth;
use std::time::Duration;

/// After a fault has ended, its node counts as ill for this long: connections and devices come back meanwhile.
const NOTICE_SPAN: Duration = Duration::from_millis(300);

/// How often each kind of fault is drawn, relative to the others; zero is never.
#[derive(Clone, Copy, Debug, Default)]
pub struct Weights {
    pub crash: u32,
    pub power: u32,
    pub hang: u32,
    pub partition: u32,
    pub one_way: u32,
    pub slow_disk: u32,
    pub stuck_disk: u32,
    pub write_error: u32,
    pub glitch: u32,
    pub blank_disk: u32,
    pub grid_power: u32,
    pub reset: u32,
    pub slow_link: u32,
    pub host_crash: u32,
    pub host_hang: u32,
    pub host_isolated: u32,
    pub takeover: u32,
    pub meta_outage: u32,
    pub meta_unknown: u32,
    pub rot: u32,
    /// Hangs of nodes beyond what redundancy covers: nothing is lost by them, but everything may have to wait.
    pub beyond: u32,
    pub ambush: u32,
    pub amnesia: u32,
}

impl Weights {
    /// A bit of everything that can be combined freely.
    pub fn mixed() -> Weights {
        Weights {
            crash: 10,
            power: 5,
            hang: 10,
            partition: 8,
            one_way: 6,
            slow_disk: 4,
            stuck_disk: 6,
            write_error: 2,
            glitch: 3,
            blank_disk: 2,
            grid_power: 3,
            reset: 8,
            slow_link: 4,
            host_crash: 6,
            host_hang: 4,
            host_isolated: 3,
            takeover: 5,
            meta_outage: 3,
            meta_unknown: 5,
            rot: 0,
            beyond: 2,
            ambush: 2,
            amnesia: 0,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Crash,
    Power,
    Hang,
    Partition,
    OneWay,
    SlowDisk,
    StuckDisk,
    WriteError,
    Glitch,
    BlankDisk,
    GridPower,
    Reset,
    SlowLink,
    HostCrash,
    HostHang,
    HostIsolated,
    TakeOver,
    MetaOutage,
    MetaUnknown,
    Rot,
    Beyond,
    Ambush,
    Amnesia,
}

/// When the node whose disks lie is back after the grid lost its power: all others have been greeted by then.
const ROTTEN_BACK_AFTER: Duration = Duration::from_millis(1000);

/// What the driver has to do, since machines are its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HostAct {
    /// The host process dies and is to come back after the span.
    Crash { host: usize, back_after: Duration },
    /// Another host (or the same, anew) opens the volume.
    TakeOver { host: usize },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Cure {
    Start,
    Resume,
    Unblock,
    HealDisks,
    /// The operator restarts the process.
    Restart,
    /// That, if the device is not back by itself.
    RestartIfOut,
}

struct Illness {
    node: usize,
    cure: Cure,
    until: Instant,
    /// Set when cured: from then on the notice span runs.
    cured_at: Option<Instant>,
    /// Durable data is gone: only restored redundancy ends it.
    lost_data: bool,
}

/// The first step of an ambush, and what its second one does.
enum Trap {
    /// A leg does not get what the owner sends. Then the owner dies, and `outs`, which did get it, are out.
    LateLink { outs: Vec<usize> },
    /// A batch of the laggard's journal is not done while later ones are. Then the laggard loses power for a moment, so
    /// that a hole is left, the owner dies, and `outs` are out.
    LateBatch { laggard: usize, outs: Vec<usize> },
    /// The owner falls asleep, and another host takes over. Then all nodes lose power for a moment, the successor falls
    /// asleep in turn, and the first sleeper goes on.
    Sleep,
}

/// A trap for an owner, and when it snaps shut.
struct Ambush {
    at: Instant,
    owner: usize,
    trap: Trap,
}

/// Injects faults by the rules of the atlas.
pub struct Nemesis {
    prng: Prng,
    weights: Vec<(Kind, u32)>,
    failures: usize,
    ill: Vec<Illness>,
    /// Redundancy is over nodes. Else it is over devices: a node that is out is beyond what it covers, and of a node that
    /// is damaged one disk is.
    pub spares_nodes: bool,
    /// Of the rotten node one disk lies, not all: a volume that may come to lie on that node alone bears no more.
    pub rots_one_disk: bool,
    /// All data have the redundancy of their layout, as far as is known now, and had it when a disk was last swapped. What
    /// was written while `failures` nodes were out bears one less than that until it is copied.
    pub is_whole: bool,
    was_whole: bool,
    /// The node whose disks may be damaged silently, if the run has one.
    rotten: Option<usize>,
    hosts_to_resume: Vec<(usize, Instant)>,
    hosts_to_join: Vec<(usize, Instant)>,
    ambush: Option<Ambush>,
    pub injected: u32,
    /// Until then more is out than redundancy covers (the whole grid, or a host's way to it): requests may wait.
    pub overwhelmed_until: Instant,
}

impl Nemesis {
    pub fn new(prng: Prng, failures: usize, weights: Weights) -> Nemesis {
        let w = weights;
        let weights = vec![
            (Kind::Crash, w.crash),
            (Kind::Power, w.power),
            (Kind::Hang, w.hang),
            (Kind::Partition, w.partition),
            (Kind::OneWay, w.one_way),
            (Kind::SlowDisk, w.slow_disk),
            (Kind::StuckDisk, w.stuck_disk),
            (Kind::WriteError, w.write_error),
            (Kind::Glitch, w.glitch),
            (Kind::BlankDisk, w.blank_disk),
            (Kind::GridPower, w.grid_power),
            (Kind::Reset, w.reset),
            (Kind::SlowLink, w.slow_link),
            (Kind::HostCrash, w.host_crash),
            (Kind::HostHang, w.host_hang),
            (Kind::HostIsolated, w.host_isolated),
            (Kind::TakeOver, w.takeover),
            (Kind::MetaOutage, w.meta_outage),
            (Kind::MetaUnknown, w.meta_unknown),
            (Kind::Rot, w.rot),
            (Kind::Beyond, w.beyond),
            (Kind::Ambush, w.ambush),
            (Kind::Amnesia, w.amnesia),
        ];
        Nemesis {
            prng,
            weights,
            failures,
            spares_nodes: true,
            rots_one_disk: false,
            is_whole: true,
            was_whole: true,
            ill: Vec::new(),
            rotten: None,
            hosts_to_resume: Vec::new(),
            hosts_to_join: Vec::new(),
            ambush: None,
            injected: 0,
            overwhelmed_until: Instant::ZERO,
        }
    }

    /// Chooses the node of this run whose disks lie. It is ill until the end.
    pub fn make_rotten<M: Machine>(&mut self, world: &mut World<M>, faults: DiskFaults) {
        let node = self.prng.below(world.nodes.len() as u64) as usize;
        self.rotten = Some(node);
        match self.rots_one_disk {
            true => world.nodes[node].disks[0].faults = faults,
            false => world.set_disk_faults(node, faults),
        }
    }

    pub fn rotten(&self) -> Option<usize> {
        self.rotten
    }

    /// Redundancy is whole again, as found by somebody who began to look at `since`: nodes that lost data count as well from
    /// here on, if they had been back for long enough by then that everybody knew what they lost.
    pub fn on_restored(&mut self, since: Instant) {
        for illness in self.ill.iter_mut().filter(|i| i.cured_at.is_some_and(|t| t + NOTICE_SPAN < since)) {
            illness.lost_data = false;
        }
    }

    /// Whether some node lost durable data that was not restored yet.
    pub fn waits_for_restoration(&self) -> bool {
        self.ill.iter().any(|i| i.lost_data)
    }

    fn ill_count(&self) -> usize {
        self.ill.len() + usize::from(self.rotten.is_some())
    }

    fn is_ill(&self, node: usize) -> bool {
        self.rotten == Some(node) || self.ill.iter().any(|i| i.node == node)
    }

    /// A healthy node, if one more may fall ill.
    fn victim<M: Machine>(&mut self, world: &World<M>) -> Option<usize> {
        if self.ill_count() >= self.failures {
            return None;
        }
        let healthy: Vec<usize> = (0..world.nodes.len()).filter(|n| !self.is_ill(*n)).collect();
        (!healthy.is_empty()).then(|| *self.prng.pick(&healthy))
    }

    /// When [`Nemesis::act`] is to be called next, where that is not for chance to say.
    pub fn ambush_at(&self) -> Option<Instant> {
        self.ambush.as_ref().map(|a| a.at)
    }

    /// Ends what is due to end, and may inject something new. Returns what the driver has to do. `owner` is the host
    /// whose opening is the newest.
    pub fn act<M: Machine>(&mut self, world: &mut World<M>, owner: Option<usize>) -> Option<HostAct> {
        self.cure_due(world, false);
        if let Some(ambush) = self.ambush.take() {
            return self.strike(world, &ambush, owner);
        }
        let total: u64 = self.weights.iter().map(|(_, w)| u64::from(*w)).sum();
        if total == 0 {
            return None;
        }
        let mut at = self.prng.below(total);
        let mut kind = self.weights[0].0;
        for (k, w) in &self.weights {
            if at < u64::from(*w) {
                kind = *k;
                break;
            }
            at -= u64::from(*w);
        }
        self.inject(world, kind, owner)
    }

    /// Ends illnesses whose time has come, or all.
    pub fn cure_due<M: Machine>(&mut self, world: &mut World<M>, all: bool) {
        let now = world.now();
        for illness in &mut self.ill {
            if illness.cured_at.is_none() && (all || illness.until <= now) {
                illness.cured_at = Some(now);
                cure(world, illness.node, illness.cure);
            }
        }
        self.ill.retain(|i| i.lost_data || i.cured_at.is_none_or(|t| t + NOTICE_SPAN > now));
        for (host, _) in extract_due(&mut self.hosts_to_resume, now, all) {
            world.resume_host(host);
        }
        for (host, _) in extract_due(&mut self.hosts_to_join, now, all) {
            for node in 0..world.nodes.len() {
                if all || !self.ill.iter().any(|i| i.node == node && i.cure == Cure::Unblock && i.cured_at.is_none()) {
                    world.unblock(host, node);
                }
            }
            world.hosts[host].meta_reachable = true;
        }
    }

    /// Ends every fault: from here on the grid must converge.
    pub fn heal_all<M: Machine>(&mut self, world: &mut World<M>) {
        self.ambush = None;
        self.cure_due(world, true);
        for node in 0..world.nodes.len() {
            for disk in &mut world.nodes[node].disks {
                disk.heal();
            }
            for host in 0..world.hosts.len() {
                world.unblock(host, node);
                world.net.link_mut(host, node).slow = Duration::ZERO;
            }
            if !world.nodes[node].is_up() {
                world.start_node(node);
            }
            world.resume_node(node);
        }
        for host in 0..world.hosts.len() {
            world.resume_host(host);
            world.hosts[host].meta_reachable = true;
        }
        world.meta.heal();
    }

    fn span(&mut self, low_ms: u64, high_ms: u64) -> Duration {
        Duration::from_micros(self.prng.between(low_ms * 1000, high_ms * 1000))
    }

    fn fall_ill(&mut self, node: usize, cure: Cure, until: Instant, lost_data: bool) {
        self.ill.push(Illness { node, cure, until, cured_at: None, lost_data });
    }

    fn inject<M: Machine>(&mut self, world: &mut World<M>, kind: Kind, owner: Option<usize>) -> Option<HostAct> {
        self.injected += 1;
        match kind {
            Kind::GridPower => self.lose_power(world, 200),
            Kind::Reset => {
                let host = self.prng.below(world.hosts.len() as u64) as usize;
                let node = self.prng.below(world.nodes.len() as u64) as usize;
                world.reset_connection(host, node);
            }
            Kind::HostCrash => {
                let host = self.prng.below(world.hosts.len() as u64) as usize;
                let back_after = self.span(1, 300);
                return Some(HostAct::Crash { host, back_after });
            }
            Kind::TakeOver => {
                let host = self.prng.below(world.hosts.len() as u64) as usize;
                return Some(HostAct::TakeOver { host });
            }
            Kind::HostHang | Kind::HostIsolated => self.trouble_host(world, kind),
            Kind::MetaOutage => world.meta.faults.unavailable_until = world.now() + self.span(20, 600),
            Kind::MetaUnknown => world.meta.faults.unknown = if self.prng.chance(500) { 0 } else { 400 },
            Kind::Rot => self.rot(world),
            Kind::Beyond => self.hang_beyond(world),
            Kind::Ambush => return self.lay_ambush(world, owner),
            Kind::Amnesia => return self.forget(world),
            Kind::BlankDisk => return self.swap_disk(world),
            _ => self.trouble_node(world, kind),
        }
        None
    }

    /// The lights go out: every node at once, each back after a while of its own.
    fn lose_power<M: Machine>(&mut self, world: &mut World<M>, back_ms_max: u64) {
        let now = world.now();
        self.overwhelmed_until = self.overwhelmed_until.max(now + Duration::from_millis(200) + 2 * NOTICE_SPAN);
        let crash = if self.prng.chance(700) { Crash::Power } else { Crash::Process };
        for node in 0..world.nodes.len() {
            if !world.nodes[node].is_up() {
                continue;
            }
            world.crash_node(node, crash);
            // The one whose disks lie comes last: while it is alone, what it acknowledges lies nowhere else.
            let is_rotten = self.rotten == Some(node);
            let until = now + if is_rotten { ROTTEN_BACK_AFTER } else { self.span(5, back_ms_max) };
            // Not an illness that counts: all are out, and nobody's data is lost.
            match self.ill.iter_mut().find(|i| i.node == node && i.cured_at.is_none()) {
                Some(illness) => {
                    world.nodes[node].disks.iter_mut().for_each(|d| d.faults.write_error = 0);
                    if matches!(illness.cure, Cure::Unblock | Cure::HealDisks) {
                        cure(world, node, illness.cure);
                    }
                    (illness.cure, illness.until) = (Cure::Start, until);
                }
                None => self.fall_ill(node, Cure::Start, until, false),
            }
        }
    }

    fn trouble_host<M: Machine>(&mut self, world: &mut World<M>, kind: Kind) {
        let host = self.prng.below(world.hosts.len() as u64) as usize;
        let until = world.now() + self.span(20, 900);
        if kind == Kind::HostHang {
            if world.hosts[host].is_up() && !world.hosts[host].is_paused() {
                world.pause_host(host);
                self.hosts_to_resume.push((host, until));
            }
            return;
        }
        self.overwhelmed_until = self.overwhelmed_until.max(until + 2 * NOTICE_SPAN);
        for node in 0..world.nodes.len() {
            world.block(host, node, true, true);
        }
        world.hosts[host].meta_reachable = self.prng.chance(300);
        self.hosts_to_join.push((host, until));
    }

    fn rot<M: Machine>(&mut self, world: &mut World<M>) {
        let Some(node) = self.rotten else { return };
        let disks = if self.rots_one_disk { 1 } else { world.nodes[node].disks.len() as u64 };
        let slot = self.prng.below(disks) as usize;
        let count = self.prng.between(1, 8) as u32;
        let disk = &mut world.nodes[node].disks[slot];
        // Mostly the shards; sometimes tables and journal.
        let from = if self.prng.chance(700) { disk.silent_from } else { 0 };
        disk.rot(from, count);
    }

    /// Nodes that nothing is wrong with.
    fn steady_nodes<M: Machine>(&self, world: &World<M>) -> Vec<usize> {
        let is_steady = |n: &usize| !self.is_ill(*n) && world.nodes[*n].is_up() && !world.nodes[*n].is_paused();
        (0..world.nodes.len()).filter(is_steady).collect()
    }

    /// So many steady nodes, in any order, whose journals were written last: most likely those that hold the newest
    /// entries.
    fn busiest<M: Machine>(&mut self, world: &World<M>, count: usize) -> Vec<usize> {
        let written_at = |n: &usize| world.nodes[*n].disks.iter().map(|d| d.journal_written_at).max();
        let mut nodes = self.steady_nodes(world);
        nodes.sort_by_key(|n| std::cmp::Reverse(written_at(n)));
        nodes.truncate(count);
        self.prng.shuffle(&mut nodes);
        nodes
    }

    /// One more node than redundancy covers stands still. It loses nothing, so nothing may be lost: what needs it waits.
    fn hang_beyond<M: Machine>(&mut self, world: &mut World<M>) {
        let steady = self.steady_nodes(world);
        if steady.is_empty() {
            return;
        }
        let node = *self.prng.pick(&steady);
        let until = world.now() + self.span(20, 500);
        world.pause_node(node);
        self.fall_ill(node, Cure::Resume, until, false);
        self.overwhelmed_until = self.overwhelmed_until.max(until + 3 * NOTICE_SPAN);
    }

    /// A blank disk in the place of one with data; sometimes at the worst moment: just before a new owner comes, while a
    /// node that still has the data stands still.
    fn swap_disk<M: Machine>(&mut self, world: &mut World<M>) -> Option<HostAct> {
        let is_covered = match self.waits_for_restoration() {
            true => self.was_whole,
            false => self.rotten.is_none() || self.is_whole,
        };
        if self.failures > 1 && !is_covered {
            return None;
        }
        let node = self.victim(world).filter(|n| world.nodes[*n].is_up())?;
        world.crash_node(node, Crash::Process);
        let slot = self.prng.below(world.nodes[node].disks.len() as u64) as usize;
        world.format_disk(node, slot);
        let hurry = self.weights.iter().any(|(k, w)| *k == Kind::Beyond && *w > 0) && self.prng.chance(500);
        let until = world.now() + if hurry { self.span(1, 3) } else { self.span(1, 300) };
        if !self.spares_nodes {
            self.overwhelmed_until = self.overwhelmed_until.max(until + 3 * NOTICE_SPAN);
        }
        if !self.waits_for_restoration() {
            self.was_whole = self.is_whole;
        }
        self.fall_ill(node, Cure::Start, until, true);
        if !hurry {
            return None;
        }
        self.hang_beyond(world);
        Some(self.change_owner(world))
    }

    /// Another opening follows: on a host at random, or on this one once it is back.
    fn change_owner<M: Machine>(&mut self, world: &World<M>) -> HostAct {
        let host = self.prng.below(world.hosts.len() as u64) as usize;
        if self.prng.chance(500) {
            HostAct::TakeOver { host }
        } else {
            HostAct::Crash { host, back_after: self.span(1, 20) }
        }
    }

    /// The first step of an ambush: lags last about as long as it takes to hedge, sleep as long as a take-over.
    fn lay_ambush<M: Machine>(&mut self, world: &mut World<M>, owner: Option<usize>) -> Option<HostAct> {
        let owner = owner.filter(|_| self.ill_count() <= self.failures)?;
        let now = world.now();
        if self.prng.chance(250) && world.hosts.len() > 1 && !world.hosts[owner].is_paused() {
            world.pause_host(owner);
            self.ambush = Some(Ambush { at: now + self.span(20, 400), owner, trap: Trap::Sleep });
            return Some(HostAct::TakeOver { host: (owner + 1) % world.hosts.len() });
        }
        let mut outs = self.busiest(world, self.failures + 1);
        let laggard = outs.pop()?;
        let by_disk = self.prng.chance(500);
        let at = now + if by_disk { self.span(8, 50) } else { self.span(1, 20) };
        let until = at + self.span(1, 50);
        self.fall_ill(laggard, Cure::Unblock, until, false);
        let trap = if by_disk {
            world.nodes[laggard].disks.iter_mut().for_each(|d| d.straggle_until = Some(until));
            Trap::LateBatch { laggard, outs }
        } else {
            world.block(owner, laggard, true, false);
            Trap::LateLink { outs }
        };
        self.ambush = Some(Ambush { at, owner, trap });
        None
    }

    /// The second step.
    fn strike<M: Machine>(
        &mut self,
        world: &mut World<M>,
        ambush: &Ambush,
        successor: Option<usize>,
    ) -> Option<HostAct> {
        let now = world.now();
        let outs = match &ambush.trap {
            Trap::Sleep => {
                self.lose_power(world, 10);
                let until = now + self.span(10, 50);
                self.hosts_to_resume.push((ambush.owner, until));
                if let Some(successor) = successor.filter(|s| *s != ambush.owner && !world.hosts[*s].is_paused()) {
                    world.pause_host(successor);
                    let until = until + self.span(50, 300);
                    self.hosts_to_resume.push((successor, until));
                }
                return None;
            }
            Trap::LateLink { outs } => outs,
            Trap::LateBatch { laggard, outs } => {
                // While metadata are had back, nothing strikes: the lag may be over by then.
                let lag = self.ill.iter().position(|i| i.node == *laggard && i.cured_at.is_none())?;
                world.crash_node(*laggard, if self.prng.chance(700) { Crash::Power } else { Crash::Process });
                let until = now + self.span(1, 5);
                (self.ill[lag].cure, self.ill[lag].until) = (Cure::Start, until);
                outs
            }
        };
        // Long enough for the next owner to go on without them, if it may.
        let until = now + self.span(100, 500);
        for &out in outs {
            let cure = if self.prng.chance(500) {
                world.pause_node(out);
                Cure::Resume
            } else {
                world.crash_node(out, Crash::Power);
                Cure::Start
            };
            self.fall_ill(out, cure, until, false);
        }
        self.overwhelmed_until = self.overwhelmed_until.max(until + 3 * NOTICE_SPAN);
        Some(HostAct::Crash { host: ambush.owner, back_after: self.span(1, 300) })
    }

    /// The rotten node forgets what lay on one of its disks, and nobody who remembers can be asked when the next owner
    /// comes.
    fn forget<M: Machine>(&mut self, world: &mut World<M>) -> Option<HostAct> {
        let node = self.rotten.filter(|n| self.ill.is_empty() && world.nodes[*n].is_up())?;
        world.crash_node(node, Crash::Process);
        let disks = if self.rots_one_disk { 1 } else { world.nodes[node].disks.len() as u64 };
        let slot = self.prng.below(disks) as usize;
        world.forget_disk(node, slot);
        let until = world.now() + self.span(1, 3);
        self.fall_ill(node, Cure::Start, until, false);
        for _ in 0..self.failures {
            self.hang_beyond(world);
        }
        Some(self.change_owner(world))
    }

    fn trouble_node<M: Machine>(&mut self, world: &mut World<M>, kind: Kind) {
        let now = world.now();
        let Some(node) = self.victim(world) else { return };
        if !world.nodes[node].is_up() {
            return;
        }
        let (cure, span, lost_data) = match kind {
            Kind::Crash | Kind::Power => {
                world.crash_node(node, if kind == Kind::Crash { Crash::Process } else { Crash::Power });
                (Cure::Start, self.span(1, 1500), false)
            }
            Kind::Hang => {
                world.pause_node(node);
                (Cure::Resume, self.span(5, 1500), false)
            }
            Kind::Partition | Kind::OneWay => {
                self.cut_off(world, node, kind);
                (Cure::Unblock, self.span(10, 1200), false)
            }
            Kind::SlowLink => {
                let slow = self.span(1, 40);
                for host in 0..world.hosts.len() {
                    world.net.link_mut(host, node).slow = slow;
                }
                (Cure::Unblock, self.span(50, 800), false)
            }
            Kind::SlowDisk => {
                let slowness = self.prng.between(5, 300) as u32;
                world.nodes[node].disks.iter_mut().for_each(|d| d.slowness = slowness);
                (Cure::HealDisks, self.span(50, 800), false)
            }
            Kind::StuckDisk => {
                let span = self.span(20, 900);
                let slot = self.prng.below(world.nodes[node].disks.len() as u64) as usize;
                world.nodes[node].disks[slot].stuck_until = now + span;
                (Cure::HealDisks, span, false)
            }
            Kind::WriteError => {
                let slot = self.prng.below(world.nodes[node].disks.len() as u64) as usize;
                world.nodes[node].disks[slot].faults.write_error = 500;
                (Cure::Restart, self.span(50, 800), false)
            }
            Kind::Glitch => {
                let slot = self.prng.below(world.nodes[node].disks.len() as u64) as usize;
                let disk = &mut world.nodes[node].disks[slot];
                disk.failing_until = now + self.span(1, 900);
                if self.prng.chance(500) {
                    // What the other path had been given.
                    disk.straggle_until = Some(now + self.span(900, 3000));
                }
                // Opened a second after it failed, and sometimes once more.
                (Cure::RestartIfOut, self.span(1500, 4000), false)
            }
            other => unreachable!("{other:?} does not strike a node"),
        };
        if !self.spares_nodes {
            self.overwhelmed_until = self.overwhelmed_until.max(now + span + 3 * NOTICE_SPAN);
        }
        self.fall_ill(node, cure, now + span, lost_data);
    }

    fn cut_off<M: Machine>(&mut self, world: &mut World<M>, node: usize, kind: Kind) {
        let one_host = self.prng.chance(400).then(|| self.prng.below(world.hosts.len() as u64) as usize);
        let toward_node = kind == Kind::Partition || self.prng.chance(500);
        let toward_host = kind == Kind::Partition || !toward_node;
        for host in 0..world.hosts.len() {
            if one_host.is_none_or(|h| h == host) {
                world.block(host, node, toward_node, toward_host);
            }
        }
    }
}

fn extract_due(list: &mut Vec<(usize, Instant)>, now: Instant, all: bool) -> Vec<(usize, Instant)> {
    let (due, rest) = list.iter().partition(|(_, at)| all || *at <= now);
    *list = rest;
    due
}

fn cure<M: Machine>(world: &mut World<M>, node: usize, cure: Cure) {
    match cure {
        Cure::Start => {
            if !world.nodes[node].is_up() {
                world.start_node(node);
            }
        }
        Cure::Resume => world.resume_node(node),
        Cure::Unblock => {
            for host in 0..world.hosts.len() {
                world.net.link_mut(host, node).slow = Duration::ZERO;
                world.unblock(host, node);
            }
        }
        Cure::HealDisks => world.nodes[node].disks.iter_mut().for_each(|d| d.slowness = 1),
        Cure::RestartIfOut if !has_failed_device(world, node) => {}
        Cure::Restart | Cure::RestartIfOut => {
            world.crash_node(node, Crash::Process);
            for disk in &mut world.nodes[node].disks {
                disk.faults.write_error = 0;
            }
            world.start_node(node);
        }
    }
}

fn has_failed_device<M: Machine>(world: &World<M>, node: usize) -> bool {
    let stats = world.nodes[node].stats(world.now());
    stats.len() < world.nodes[node].disks.len() || stats.iter().any(|stat| stat.health != DeviceHealth::Serving)
}
