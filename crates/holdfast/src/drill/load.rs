//! The drill with fio as load: fill, load with the node lost at half time, read back, rejoin under load, read back.
//!
//! What is read back, and when: once while the node is still out, so that what only parity or the other copy can give is
//! read too, and once after everything is redundant again. The witness runs all the while.

use super::NodeLossArgs;
use super::fio::{Job, Outcome, Pattern, RunningJob, read_latency_log};
use super::grid::{Grid, node_of_log};
use super::history::{BLOCK_BYTES, History, Verdict};
use super::machine::{Machine, Watch};
use super::rejoin::{Loss, Rejoin, Volumes, unix_ms};
use super::stats::{Figures, Sample, Timeline, Window, rounded};
use super::tools::{WorkDir, sleep, sleep_until};
use super::witness::{Manner, REGION_BYTES, Testimony, Witness};
use crate::nbd_client::Client;
use crate::nbd_uri::of_socket;
use anyhow::{Context, Result, bail};
use serde::Serialize;
use std::time::{Duration, Instant};

/// Writing every block once takes at most this.
const FILL_TIME_MAX: Duration = Duration::from_secs(3600);

/// What the volume may do by itself between the fill and the load.
const SETTLE_TIME: Duration = Duration::from_secs(2);

/// Load before the node comes back, so that its first seconds are no part of the figure.
const REJOIN_LEAD: Duration = Duration::from_secs(2);

/// Load from the moment that the node comes back, at least.
const REJOIN_LOAD_MIN: Duration = Duration::from_secs(5);

/// Completions are counted over at least this, or one slow moment would be the figure.
const REJOIN_WINDOW_MIN_MS: u64 = 1000;

const DEPTH_OF_FILL: u32 = 4;

/// How a load went on while the node was brought up to date.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct RejoinLoad {
    #[serde(flatten)]
    pub rejoin: Rejoin,
    /// From the node's return until full redundancy, at least a second.
    pub window_s: f64,
    pub iops: f64,
    /// Of the healthy IOPS.
    pub iops_ratio: f64,
    pub longest_gap_ms: u64,
    pub read_max_ms: f64,
    pub write_max_ms: f64,
    /// The whole of the load: the node returned two seconds after its start.
    pub samples: Vec<Sample>,
}

#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct LoadReport {
    pub workload: String,
    pub layout: String,
    pub fault: String,
    pub node: u32,
    pub seconds: u64,
    pub queue_depth: u32,
    pub volume_bytes: u64,
    /// Left out of the means on both sides of the loss.
    pub margin_s: f64,
    /// Requests that failed: fio's, the witness's, and those of reading back.
    pub errors: u64,
    /// Blocks that did not hold what was acknowledged last.
    pub mismatches: u64,
    pub blocks_verified: u64,
    /// The first few errors and mismatches, in words.
    pub troubles: Vec<String>,
    #[serde(flatten)]
    pub figures: Figures,
    pub rejoin: RejoinLoad,
    pub witness: Testimony,
    /// While the load ran.
    pub machine: Machine,
    /// What to type to repeat the load on a volume that is exported.
    pub fio: String,
}

impl LoadReport {
    pub fn has_passed(&self) -> bool {
        self.errors == 0 && self.mismatches == 0 && self.rejoin.rejoin.redundant_s.is_some()
    }
}

/// What goes wrong is counted and the drill goes on.
#[derive(Default)]
struct Troubles {
    errors: u64,
    words: Vec<String>,
}

impl Troubles {
    fn take(&mut self, job: &str, outcome: &Outcome) {
        self.errors += outcome.errors;
        if outcome.errors > 0 {
            self.words.push(format!("fio ({job}): {} errors: {}", outcome.errors, outcome.complaints));
        }
    }
}

/// The volume under load and what is known of it.
struct Drill<'a> {
    grid: &'a dyn Grid,
    args: &'a NodeLossArgs,
    work: &'a WorkDir,
    volume: String,
    history: History,
    troubles: Troubles,
    verdict: Verdict,
    machine: Machine,
}

pub fn run(grid: &dyn Grid, args: &NodeLossArgs, pattern: Pattern, work: &WorkDir) -> Result<LoadReport> {
    let load_bytes = args.volume_size.0.saturating_sub(REGION_BYTES);
    let load_bytes = load_bytes - load_bytes % (1 << 20);
    if load_bytes < 64 << 20 {
        bail!("--volume-size {} is too small for a load; give 128MiB or more", args.volume_size);
    }
    let volume = format!("drill-{}", std::process::id());
    let mut volumes = Volumes::new(grid, args.keep);
    volumes.create(&volume, load_bytes + REGION_BYTES, &args.layout)?;
    let mut drill = Drill {
        grid,
        args,
        work,
        volume,
        history: History::new(load_bytes),
        troubles: Troubles::default(),
        verdict: Verdict::default(),
        machine: Machine::default(),
    };

    drill.fill()?;
    let before = grid.holdings()?;
    let (socket, name) = (grid.socket_of(&drill.volume), drill.volume.clone());
    let witness = Witness::start(socket, name, load_bytes, unix_ms(), Manner::BESIDE)?;
    sleep(SETTLE_TIME)?;
    // Once more: the host needs a second to see that a node hangs.
    grid.wait_until_up()?;
    let after = grid.holdings()?;
    let node = args.node.or_else(|| node_of_log(&before, &after)).context("the grid has no nodes")?;

    let main = drill.job("load", pattern, args.seconds, 2);
    let (figures, loss) = drill.lose_at_half_time(&main, node)?;
    eprintln!("reading everything back while node {node} is out");
    drill.read_back()?;
    let rejoin = drill.rejoin_under_load(pattern, &figures, loss, &volumes.names)?;
    eprintln!("reading everything back");
    drill.read_back()?;
    Ok(drill.report(node, figures, rejoin, witness.finish(), &main))
}

impl<'a> Drill<'a> {
    fn job(&self, name: &'static str, pattern: Pattern, seconds: u64, seed: u64) -> Job {
        Job {
            name,
            pattern,
            uri: of_socket(&self.grid.socket_of(&self.volume), &self.volume),
            size_bytes: self.history.size_bytes(),
            queue_depth: if pattern == Pattern::Fill { DEPTH_OF_FILL } else { self.args.queue_depth },
            seconds,
            seed,
        }
    }

    fn fill(&mut self) -> Result<()> {
        eprintln!("writing every block of a {} volume once", self.args.volume_size);
        let outcome = self.job("fill", Pattern::Fill, 0, 1).run(self.work.path(), FILL_TIME_MAX)?;
        if outcome.errors > 0 {
            bail!("the volume could not be filled: {}", outcome.complaints);
        }
        self.history.add_job(&outcome.iolog)
    }

    /// Runs the load, strikes the node at half time, and returns the figures with the node still out.
    fn lose_at_half_time(&mut self, job: &Job, node: u32) -> Result<(Figures, Loss<'a>)> {
        let args = self.args;
        eprintln!("{} for {} s, node {node} out ({}) at half time", args.workload, args.seconds, args.fault);
        let watch = Watch::start(self.work.path())?;
        let running = job.start(self.work.path())?;
        sleep_until(running.started + Duration::from_secs(args.seconds) / 2)?;
        let loss = Loss::strike(self.grid, node, args.fault)?;
        let outcome = running.finish()?;
        self.machine = watch.seen();
        self.troubles.take(job.name, &outcome);
        self.history.add_job(&outcome.iolog)?;
        let mut timeline = Timeline::new(loss.at_ms, margin_ms(args.seconds));
        read_latency_log(&outcome.latency_log, |completion| timeline.record(completion))?;
        Ok((timeline.figures(), loss))
    }

    fn read_back(&mut self) -> Result<()> {
        let socket = self.grid.socket_of(&self.volume);
        let mut client = Client::connect(&socket, &self.volume).context("cannot connect to read the volume back")?;
        let verdict = self.history.verify(&mut client)?;
        self.verdict.add(verdict);
        Ok(())
    }

    fn rejoin_under_load(
        &mut self,
        pattern: Pattern,
        figures: &Figures,
        loss: Loss<'_>,
        volumes: &[String],
    ) -> Result<RejoinLoad> {
        let limit = Duration::from_secs(self.args.rejoin_seconds);
        eprintln!("bringing the node back under load");
        let seconds = self.args.rejoin_seconds + (REJOIN_LEAD + REJOIN_LOAD_MIN).as_secs() + 1;
        let job = self.job("rejoin", pattern, seconds, 3);
        let running: RunningJob = job.start(self.work.path())?;
        sleep(REJOIN_LEAD)?;
        let (healed, healed_ms) = (Instant::now(), unix_ms());
        let rejoin = loss.rejoin(volumes, limit, || Ok(()))?;
        let ended_ms = unix_ms().max(healed_ms + REJOIN_WINDOW_MIN_MS);
        sleep_until((healed + REJOIN_LOAD_MIN).max(Instant::now() + REJOIN_LEAD / 2))?;
        let outcome = running.stop()?;
        self.troubles.take(job.name, &outcome);
        self.history.add_job(&outcome.iolog)?;

        let mut timeline = Timeline::new(healed_ms, 0);
        let mut window = Window::new(healed_ms, ended_ms);
        read_latency_log(&outcome.latency_log, |completion| {
            timeline.record(completion);
            window.record(completion);
        })?;
        let of_rejoin = timeline.figures();
        Ok(RejoinLoad {
            rejoin,
            window_s: (ended_ms - healed_ms) as f64 / 1000.0,
            iops: window.iops(),
            iops_ratio: if figures.healthy.iops > 0.0 { rounded(window.iops() / figures.healthy.iops) } else { 0.0 },
            longest_gap_ms: of_rejoin.longest_gap_ms,
            read_max_ms: of_rejoin.read_max_ms,
            write_max_ms: of_rejoin.write_max_ms,
            samples: of_rejoin.samples,
        })
    }

    fn report(self, node: u32, figures: Figures, rejoin: RejoinLoad, witness: Testimony, job: &Job) -> LoadReport {
        let Drill { args, troubles, verdict, history, machine, .. } = self;
        let mut words = troubles.words;
        words.extend(verdict.examples.iter().chain(&witness.examples).cloned());
        if rejoin.rejoin.redundant_s.is_none() {
            words.push(format!("not fully redundant {} s after the node's return", args.rejoin_seconds));
        }
        LoadReport {
            workload: args.workload.to_string(),
            layout: args.layout.clone(),
            fault: args.fault.to_string(),
            node,
            seconds: args.seconds,
            queue_depth: args.queue_depth,
            volume_bytes: history.size_bytes() + REGION_BYTES,
            margin_s: margin_ms(args.seconds) as f64 / 1000.0,
            errors: troubles.errors + verdict.errors + witness.errors,
            mismatches: verdict.mismatches + witness.mismatches,
            blocks_verified: verdict.blocks,
            troubles: words,
            figures,
            rejoin,
            witness,
            machine,
            fio: job.command_line(),
        }
    }
}

/// 15 s on both sides of the loss, an eighth of a short run.
pub fn margin_ms(seconds: u64) -> u64 {
    (seconds * 1000 / 8).min(15_000)
}

const _: () = assert!(REGION_BYTES.is_multiple_of(BLOCK_BYTES));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_margin_is_fifteen_seconds_or_an_eighth() {
        assert_eq!(margin_ms(1800), 15_000);
        assert_eq!(margin_ms(120), 15_000);
        assert_eq!(margin_ms(60), 7_500);
        assert_eq!(margin_ms(8), 1_000);
    }
}
