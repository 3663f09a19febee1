//! `./x bench --etcd`: what clients feel when a node hangs, when all of etcd or its leader hangs with it, and when a volume is
//! handed over to another host. Each part has a grid of its own, with its metadata in three members of etcd that have their
//! defaults.
//!
//! Gaps are times without a completion; every drill also fails on an error, or on a block that does not hold what was
//! acknowledged last.

use super::etcd::{Cluster, Hung};
use super::grid::{Directory, Grid, Shape};
use super::latency::{self, Completion};
use super::load::Load;
use super::machine::unix_ms;
use super::paired::Run;
use super::report::Report;
use anyhow::{Context, Result, bail};
use holdfast_lab::process::is_hung;
use serde_json::Value;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::ops::Range;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

const DEVICE_MIB: u64 = 2048;
const VOLUME_MIB: u64 = 256;
/// Of the load; the node hangs half-way.
const DRILL_SECONDS: &str = "20";

const GAP_MS_MAX: f64 = 1000.0;
const PAUSE_MS_MAX: f64 = 50.0;
/// A gap with etcd stopped is not longer than that of the same grid without a fault of etcd, or than this: a few requests that
/// lie in the queues of a machine with few processors.
const SAME_MS: f64 = 150.0;

const HANDOVERS: usize = 10;
const CALM: Duration = Duration::from_secs(5);
const BETWEEN: Duration = Duration::from_secs(2);
/// What is under way so long after a hand-over's command has ended counts as its, too.
const SETTLED_MS: u64 = 500;

/// Where other hosts reach this one; with TLS, as it is on by default then.
const ADDRESS: [&str; 2] = ["--address", "127.0.0.1"];

/// A grid and its etcd; the grid goes first.
struct Site {
    grid: Grid,
    etcd: Cluster,
    dir: Directory,
}

/// A drill that is under way; ended with whoever watches it.
struct Drill(Child);

impl Drop for Drill {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What hangs beside the node.
#[derive(Clone, Copy, PartialEq)]
enum Etcd {
    IsWell,
    /// Its leader, in the same moment.
    LosesItsLeader,
    /// All members, from the load's beginning to its end.
    Hangs,
}

pub fn run(arguments: &[String]) -> Result<()> {
    let run = Run::from(arguments, "./x bench --etcd")?;
    let mut report = Report::new("etcd", "Metadata in etcd: a node hangs, etcd hangs, a volume changes hands");
    let parts = [handover, two_nodes, etcd_stopped];
    let measured = parts.iter().try_for_each(|part| part(&run, &mut report));
    // What was measured before something went wrong is told all the same.
    report.print();
    measured
}

impl Site {
    fn make(run: &Run, name: &str, shape: Shape, options: &[&str]) -> Result<Site> {
        eprintln!("bench: {name}: making a grid of {} nodes and three members of etcd", shape.nodes);
        let dir = Directory::make(std::env::temp_dir().join(format!("holdfast-bench-{}-{name}", std::process::id())))?;
        let etcd = Cluster::start(dir.path())?;
        let endpoints = etcd.endpoints();
        let all = [&["--etcd", &endpoints, "--name", "a"], options].concat();
        let grid = Grid::make(&run.binary, dir.path().join("a"), shape, &all)?;
        Ok(Site { grid, etcd, dir })
    }

    /// Runs the drill of a node that hangs; its report.
    fn drill(&self, layout: &str, fault: Etcd) -> Result<Value> {
        let nodes = self.grid.processes().into_iter().filter(|(role, _)| role.starts_with("node"));
        let nodes: Vec<u32> = nodes.map(|(_, pid)| pid).collect();
        let size = format!("{VOLUME_MIB}MiB");
        let mut command = self.grid.command(&["drill", "node-loss", "--fault", "hang", "--json", "--layout", layout]);
        command.args(["--seconds", DRILL_SECONDS, "--volume-size", &size]);
        // Into a file: a pipe would fill up while nobody reads it.
        let path = self.dir.path().join("drill.json");
        command.stdout(File::create(&path)?).stderr(Stdio::piped());
        let mut drill = Drill(command.spawn().context("cannot start the drill")?);
        let mut said = BufReader::new(drill.0.stderr.take().context("the drill has no standard error")?).lines();
        let mut hung = None;
        let mut words = String::new();
        while let Some(line) = said.next().transpose()? {
            if line.contains("at half time") && fault != Etcd::IsWell {
                hung = Some(self.strike(&nodes, fault)?);
            }
            if line.starts_with("bringing the node back") {
                hung = None;
            }
            words += &format!("{line}\n");
        }
        drop(hung);
        let (status, report) = (drill.0.wait()?, std::fs::read_to_string(&path)?);
        if !status.success() {
            bail!("the drill on {layout} failed:\n{words}{report}");
        }
        serde_json::from_str(&report).context("the drill's report is not JSON")
    }

    fn strike(&self, nodes: &[u32], fault: Etcd) -> Result<Hung> {
        if fault == Etcd::Hangs {
            return Hung::strike(self.etcd.pids());
        }
        let leader = self.etcd.leader().context("etcd has no leader")?;
        let since = Instant::now();
        while !nodes.iter().any(|pid| is_hung(*pid)) {
            if since.elapsed() > Duration::from_secs(60) {
                bail!("the drill hung none of the nodes {nodes:?}");
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Hung::strike(vec![leader])
    }
}

fn gap_ms(drill: &Value) -> Result<f64> {
    drill["longest_gap_ms"].as_f64().context("the drill tells no longest gap")
}

/// Of each round.
fn gaps_ms(site: &Site, run: &Run, layout: &str, fault: Etcd) -> Result<Vec<f64>> {
    (0..run.rounds).map(|_| gap_ms(&site.drill(layout, fault)?)).collect()
}

fn listed(values: &[f64]) -> String {
    let words: Vec<String> = values.iter().map(|value| format!("{value:.0}")).collect();
    words.join(", ")
}

fn two_nodes(run: &Run, report: &mut Report) -> Result<()> {
    let shape = Shape { nodes: 2, devices: 2, device_mib: DEVICE_MIB };
    let site = Site::make(run, "two", shape, &[])?;
    for (what, fault) in [("", Etcd::IsWell), (", and etcd's leader with it", Etcd::LosesItsLeader)] {
        eprintln!("bench: two nodes, one hangs{what}");
        let gaps = gaps_ms(&site, run, "mirror:2", fault)?;
        let longest = latency::max(&gaps);
        let what = format!("two nodes, mirror:2, one hangs{what}: longest gap ({} ms)", listed(&gaps));
        let goal = format!("{GAP_MS_MAX:.0} ms");
        report.judged(what, goal, (longest, "ms"), longest <= GAP_MS_MAX);
    }
    Ok(())
}

fn etcd_stopped(run: &Run, report: &mut Report) -> Result<()> {
    for (nodes, layout) in [(3, "mirror:2"), (4, "parity:2+1")] {
        let shape = Shape { nodes, devices: 2, device_mib: DEVICE_MIB };
        let site = Site::make(run, &format!("nodes-{nodes}"), shape, &[])?;
        let title = format!("{nodes} nodes, {layout}, one hangs");
        eprintln!("bench: {title}");
        let well = gaps_ms(&site, run, layout, Etcd::IsWell)?;
        report.told(format!("{title}: longest gap ({} ms)", listed(&well)), latency::max(&well), "ms");
        eprintln!("bench: {title}, with etcd stopped");
        let stopped = gaps_ms(&site, run, layout, Etcd::Hangs)?;
        let (longest, bound) = (latency::max(&stopped), latency::max(&well).max(SAME_MS));
        let what = format!("the same with all of etcd stopped meanwhile ({} ms)", listed(&stopped));
        report.judged(what, format!("the same, or {SAME_MS:.0} ms"), (longest, "ms"), longest <= bound);
    }
    Ok(())
}

/// Ten times to and fro, under a client of each host.
fn handover(run: &Run, report: &mut Report) -> Result<()> {
    let shape = Shape { nodes: 3, devices: 2, device_mib: DEVICE_MIB };
    let site = Site::make(run, "handover", shape, &ADDRESS)?;
    let (a, etcd) = (&site.grid, site.etcd.endpoints());
    let token = a.run(&["grid", "token"])?;
    let join = ["--nodes", "0", "--etcd", &etcd, "--join", token.trim(), "--name", "b"];
    let b = Grid::up(&run.binary, site.dir.path().join("b"), &[&join[..], &ADDRESS].concat())?;
    a.create_volume("v", VOLUME_MIB, "mirror:2")?;
    b.run(&["volume", "export", "v", "--multipath"])?;
    eprintln!("bench: a volume is handed over {HANDOVERS} times under a client of each host");
    let seconds = (CALM + BETWEEN * (HANDOVERS as u32 + 4)).as_secs() * 2;
    let job = ["--rw=randrw", "--rwmixread=50", "--bs=8k", "--iodepth=1"];
    let loads = [Load::start(a, "v", VOLUME_MIB, &job, seconds)?, Load::start(&b, "v", VOLUME_MIB, &job, seconds)?];
    std::thread::sleep(CALM);
    let mut handovers = Vec::new();
    for round in 0..HANDOVERS {
        let (grid, to) = if round % 2 == 0 { (a, "b") } else { (&b, "a") };
        let from = unix_ms();
        grid.run(&["volume", "handover", "v", "--to", to])?;
        handovers.push(from..unix_ms() + SETTLED_MS);
        std::thread::sleep(BETWEEN);
    }
    for (load, host) in loads.into_iter().zip(["a", "b"]) {
        let completions = load.stop()?;
        let is_within = |c: &Completion, span: &Range<u64>| {
            c.at_ms >= span.start && c.at_ms.saturating_sub((c.us / 1e3) as u64) < span.end
        };
        let longest = |among: &dyn Fn(&Completion) -> bool| {
            let among = completions.iter().filter(|c| among(c));
            let (count, longest) = among.fold((0, 0.0_f64), |(n, max), c| (n + 1, max.max(c.us / 1e3)));
            (count > 0).then_some(longest).with_context(|| format!("the client of host {host} completed nothing"))
        };
        let calm = longest(&|c| !handovers.iter().any(|span| is_within(c, span)))?;
        report.told(format!("client of host {host}, before, between and after: longest request"), calm, "ms");
        let pauses = handovers.iter().map(|span| longest(&|c| is_within(c, span)));
        let pauses = pauses.collect::<Result<Vec<f64>>>()?;
        let pause = latency::max(&pauses);
        let each = listed(&pauses);
        let what = format!("client of host {host}, {HANDOVERS} hand-overs: longest request under way ({each} ms)");
        report.judged(what, format!("{PAUSE_MS_MAX:.0} ms"), (pause, "ms"), pause < PAUSE_MS_MAX);
    }
    Ok(())
}
