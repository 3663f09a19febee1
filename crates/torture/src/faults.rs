//! What is done to the grid: nodes killed, hung, stalled, cut off and restarted, the host killed, everything killed.
//!
//! Role: runs on a thread of its own beside the workload. At most one node is out at a time, and the next fault waits
//! until all redundancy is back: more than that the layouts do not promise. Killing the host, or everything, takes no
//! data away, so it needs no such wait, and may come while a node hangs.

use crate::engine::Control;
use anyhow::{Context, Result, bail, ensure};
use holdfast_base::Prng;
use holdfast_lab::grid::{ComingUp, Grid, NodeAction};
use holdfast_lab::status::Status;
use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

/// How long after a fault everything may take to be redundant again, under full load.
const REDUNDANT_MAX: Duration = Duration::from_secs(120);

/// How long volumes may take to be open after the host was started. The goal is two seconds; this is what counts as stuck.
const OPEN_MAX: Duration = Duration::from_secs(30);

/// Pace of looking at the grid.
const LOOK_PACE: Duration = Duration::from_millis(200);

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Fault {
    /// SIGKILL, some seconds without the node, start.
    NodeKill,
    /// SIGKILL and started at once.
    NodeRestart,
    /// SIGSTOP, some seconds, SIGCONT.
    NodeHang,
    /// SIGSTOP for less than most would notice.
    NodeStall,
    /// The links to a node swallow everything for some seconds.
    NodeCut,
    /// SIGKILL of the host, and started again.
    HostKill,
    /// The same while a node hangs.
    HostKillWhileNodeHangs,
    /// SIGKILL of every process at once.
    Blackout,
}

impl Fault {
    /// Each with its share in a hundred.
    pub const ALL: [(Fault, u64); 8] = [
        (Fault::NodeKill, 22),
        (Fault::NodeRestart, 12),
        (Fault::NodeHang, 22),
        (Fault::NodeStall, 10),
        (Fault::NodeCut, 10),
        (Fault::HostKill, 12),
        (Fault::HostKillWhileNodeHangs, 6),
        (Fault::Blackout, 6),
    ];

    pub fn word(self) -> &'static str {
        match self {
            Fault::NodeKill => "kill",
            Fault::NodeRestart => "restart",
            Fault::NodeHang => "hang",
            Fault::NodeStall => "stall",
            Fault::NodeCut => "cut",
            Fault::HostKill => "host-kill",
            Fault::HostKillWhileNodeHangs => "host-kill-while-hung",
            Fault::Blackout => "blackout",
        }
    }

    fn draw(random: &mut Prng, allowed: &[Fault]) -> Fault {
        let shares: Vec<_> = Fault::ALL.into_iter().filter(|(fault, _)| allowed.contains(fault)).collect();
        let mut at = random.below(shares.iter().map(|(_, share)| share).sum());
        for (fault, share) in shares {
            if at < share {
                return fault;
            }
            at -= share;
        }
        unreachable!("the draw is below the sum of the shares")
    }
}

impl std::str::FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Fault, String> {
        let known = || Fault::ALL.map(|(fault, _)| fault.word()).join(", ");
        let found = Fault::ALL.into_iter().map(|(fault, _)| fault).find(|fault| fault.word() == text);
        found.ok_or_else(|| format!("no fault '{text}'; there are {}", known()))
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// What was done, and how long the grid took to be whole again.
#[derive(Clone, Debug, Default)]
pub struct Report {
    pub faults: BTreeMap<Fault, u32>,
    pub longest_repair: Duration,
    pub longest_host_start: Duration,
}

pub struct Tormentor<'a> {
    pub grid: &'a Grid,
    pub control: Control,
    pub random: Prng,
    pub allowed: Vec<Fault>,
    pub until: Instant,
}

impl Tormentor<'_> {
    /// Faults until the time is up; returns with the grid whole.
    pub fn run(mut self) -> Result<Report> {
        let mut report = Report::default();
        self.wait_redundant(&mut report).context("before the first fault")?;
        while Instant::now() < self.until && !self.control.stopped() {
            self.rest(300, 3_000);
            let fault = Fault::draw(&mut self.random, &self.allowed);
            *report.faults.entry(fault).or_default() += 1;
            self.commit(fault, &mut report).with_context(|| format!("in a fault of the kind '{fault}'"))?;
            self.wait_redundant(&mut report).with_context(|| format!("after a fault of the kind '{fault}'"))?;
        }
        Ok(report)
    }

    fn commit(&mut self, fault: Fault, report: &mut Report) -> Result<()> {
        let node = self.pick_node()?;
        match fault {
            Fault::NodeKill => {
                self.node(NodeAction::Kill, node)?;
                self.rest(500, 10_000);
                self.node(NodeAction::Start, node)
            }
            Fault::NodeRestart => {
                self.node(NodeAction::Kill, node)?;
                self.node(NodeAction::Start, node)
            }
            Fault::NodeHang => {
                self.node(NodeAction::Hang, node)?;
                self.rest(500, 10_000);
                self.node(NodeAction::Resume, node)
            }
            Fault::NodeStall => {
                self.node(NodeAction::Hang, node)?;
                self.rest(5, 400);
                self.node(NodeAction::Resume, node)
            }
            Fault::NodeCut => {
                self.node(NodeAction::Cut, node)?;
                self.rest(500, 8_000);
                self.node(NodeAction::Mend, node)
            }
            Fault::HostKill => self.host_down(report, "host killed", Grid::kill_host)?.finish(),
            Fault::HostKillWhileNodeHangs => {
                self.node(NodeAction::Hang, node)?;
                self.rest(10, 2_000);
                let coming = self.host_down(report, "host killed", Grid::kill_host)?;
                self.rest(500, 4_000);
                self.node(NodeAction::Resume, node)?;
                coming.finish()
            }
            Fault::Blackout => self.host_down(report, "everything killed", Grid::kill_everything)?.finish(),
        }
    }

    /// Takes the host down by `kill`, starts again what is down, and waits until volumes are served.
    fn host_down(&mut self, report: &mut Report, text: &str, kill: fn(&Grid) -> Result<()>) -> Result<ComingUp> {
        self.control.host_going();
        self.control.fault(text);
        kill(self.grid)?;
        self.rest(0, 500);
        let ordered = Instant::now();
        let coming = self.grid.begin_up()?;
        self.grid.wait_open(OPEN_MAX)?;
        let took = ordered.elapsed();
        report.longest_host_start = report.longest_host_start.max(took);
        self.control.fault(format!("volumes are open after {took:?}"));
        self.control.host_back(ordered);
        Ok(coming)
    }

    fn node(&self, action: NodeAction, node: u32) -> Result<()> {
        self.control.fault(format!("node {node}: {action:?}"));
        self.grid.node(action, node)
    }

    fn pick_node(&mut self) -> Result<u32> {
        let status = self.grid.state()?;
        ensure!(!status.nodes.is_empty(), "the grid has no nodes");
        Ok(self.random.pick(&status.nodes).id)
    }

    fn rest(&mut self, from_ms: u64, to_ms: u64) {
        self.control.rest(Duration::from_millis(self.random.between(from_ms, to_ms)));
    }

    /// Waits until nothing is lacking, twice in a row: what is counted may lag behind what has just happened.
    fn wait_redundant(&self, report: &mut Report) -> Result<()> {
        let since = Instant::now();
        let mut whole = 0;
        while whole < 2 && !self.control.stopped() {
            let status = self.grid.state()?;
            check_alive(&status)?;
            match status.lacks() {
                None => whole += 1,
                Some(what) if since.elapsed() > REDUNDANT_MAX => {
                    bail!("not redundant {REDUNDANT_MAX:?} after the last fault ended: {what}");
                }
                Some(_) => whole = 0,
            }
            std::thread::sleep(LOOK_PACE);
        }
        report.longest_repair = report.longest_repair.max(since.elapsed());
        self.control.fault("redundant again");
        Ok(())
    }
}

/// Nobody has killed anything by now: a process that is missing has ended by itself.
fn check_alive(status: &Status) -> Result<()> {
    ensure!(status.host_pid.is_some(), "the host has ended by itself; its log says why");
    match status.nodes.iter().find(|n| n.pid.is_none()) {
        Some(node) => bail!("node {} has ended by itself; its log says why", node.id),
        None => Ok(()),
    }
}
