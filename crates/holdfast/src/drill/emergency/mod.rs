//! Drills of what operators fear: a disk, the host, the metadata or a machine is lost while clients are at work, and the
//! commands of the runbook put it right.
//!
//! One way for all of them ([`run`]): look that the grid is well; make a volume, and have clients write and read ([`Clients`]);
//! do harm; see what `holdfast status` says; mend by commands, which are shown; wait until everything is redundant again; read
//! all back that was acknowledged; compare the grid's volumes with those that there were. What differs is a [`Calamity`].
//!
//! Faults: a drill that fails or is interrupted undoes its harm, or says what does ([`Harm`]). What that needs lies beside the
//! grid's files, and is told of before the harm is done: so also where the drill itself is killed.

pub mod disk;
pub mod host;
pub mod machines;
pub mod metadata;
mod page;
mod steps;

use super::grid::{Grid, LocalGrid};
use super::history::BLOCK_BYTES;
use super::machine::{Machine, Watch};
use super::rejoin::{Volumes, unix_ms};
use super::stats::{Completion, Figures, Timeline, rounded};
use super::tools::{self, WorkDir, check_interrupt, sleep, sleep_until};
use super::witness::{Manner, REGION_BYTES, Testimony, Witness};
use super::{load::margin_ms, report};
use crate::client;
use crate::grid::layout::GridDir;
use crate::overview::gather;
use anyhow::{Context, Result, bail};
use clap::Args;
use holdfast_api::{Concern, Finding, GridStatus, VolumeState};
use holdfast_format::geometry::Layout;
use holdfast_verdict::findings;
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::{BufRead, IsTerminal, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
pub use steps::{Step, Steps};

/// What one client asks for a second: a load that shows a stall, and leaves the grid to others.
const CLIENT_RATE: u64 = 250;

/// A grid that was just made, or has just been mended, becomes well by itself.
const WELL_WITHIN: Duration = Duration::from_secs(20);

/// How long `holdfast status` may take to tell of the harm.
const TOLD_WITHIN: Duration = Duration::from_secs(30);

/// What a client's request may last beyond the time that mending may take.
const PATIENCE_MORE: Duration = Duration::from_secs(60);

const LOOK_PACE: Duration = Duration::from_millis(200);

#[derive(Args, Clone, Debug)]
pub struct EmergencyArgs {
    /// Do it, without asking on the terminal
    #[arg(long)]
    pub yes: bool,
    /// Layout of the drill's volume; by default parity:2+1; mirror:2 on two nodes, mirror:2@device on one
    #[arg(long, value_name = "LAYOUT")]
    layout: Option<String>,
    /// Length of the load before mending begins; the harm is done half-way
    #[arg(long, default_value_t = 20, value_name = "N", value_parser = clap::value_parser!(u64).range(2..=3600))]
    seconds: u64,
    /// Clients that write and read, each 16 MiB of its own
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=64))]
    clients: u64,
    /// How long mending may take, until everything is redundant again
    #[arg(long, default_value_t = 600, value_name = "N", value_parser = clap::value_parser!(u64).range(10..=86_400))]
    mend_seconds: u64,
    /// Keep the drill's volume
    #[arg(long)]
    keep: bool,
}

/// What a drill does to a grid, and how that is put right.
pub trait Calamity {
    /// As its command is called.
    fn name(&self) -> &'static str;
    /// Refuses a grid that could not bear it, with the reason and what to do. Nothing is made yet.
    fn check(&mut self, site: &Site) -> Result<()>;
    /// What is about to be done, for whoever is asked whether that is right.
    fn warning(&self) -> String;
    /// The last things before the harm, under load; says what undoes that, should the drill be killed.
    fn prepare(&mut self, site: &Site) -> Result<String>;
    /// Does harm; says what was done.
    fn strike(&mut self, site: &Site) -> Result<String>;
    /// When the harm was done, where that is not the moment at which it was begun: Unix milliseconds.
    fn since_ms(&self) -> Option<u64> {
        None
    }
    /// Whether `holdfast status` is to tell of it.
    fn is_told(&self) -> bool;
    /// Whether a finding is about the harm.
    fn is_told_by(&self, finding: &Finding) -> bool;
    fn mend(&mut self, site: &Site, steps: &mut Steps) -> Result<()>;
    /// The drill ends early: undoes the harm, or says in its error what does.
    fn undo(&mut self, site: &Site) -> Result<()>;
    /// All is well again: what was kept to undo the harm goes.
    fn clear_up(&mut self) -> Result<()>;
}

/// The grid that it is done to.
pub struct Site {
    pub dir: GridDir,
    pub grid: LocalGrid,
    pub work: WorkDir,
    pub volume: String,
    /// When all has to be well again, from the beginning of mending on.
    pub mend_max: Duration,
}

impl Site {
    pub fn status(&self) -> Result<GridStatus> {
        gather(&self.dir)
    }

    /// A name for what is kept beside the grid's files.
    pub fn beside(&self, what: &str) -> std::path::PathBuf {
        self.dir.root().join(format!("{what}.{}", self.volume))
    }
}

/// What the grid promises does not hold, or will not.
fn is_amiss(finding: &Finding) -> bool {
    matches!(finding.concern, Concern::Service | Concern::DataAtRisk | Concern::Redundancy | Concern::Metadata)
}

fn amiss(dir: &GridDir) -> Result<Vec<String>> {
    let found = findings::of(&gather(dir)?);
    Ok(found.iter().filter(|finding| is_amiss(finding)).map(ToString::to_string).collect())
}

fn check_well(dir: &GridDir) -> Result<()> {
    dir.load()?;
    client::ask(dir, &holdfast_api::Request::Status, client::UNHURRIED)?;
    let end = Instant::now() + WELL_WITHIN;
    loop {
        let amiss = amiss(dir)?;
        let Some(first) = amiss.first() else { return Ok(()) };
        if Instant::now() >= end {
            bail!("the grid is not well, and would have to bear the drill's harm besides: {first}. Mend that first");
        }
        sleep(LOOK_PACE)?;
    }
}

/// Refuses where volumes of others would not go on without a node.
pub fn check_layouts(status: &GridStatus) -> Result<()> {
    for volume in &status.volumes {
        let layout = volume.layout.parse::<Layout>().ok();
        if layout.is_none_or(|layout| layout.failures() == 0) {
            bail!(
                "volume {} ({}) bears no loss, and would lose data; give it a layout that does (`holdfast volume set`), or \
                 drill another grid",
                volume.name,
                volume.layout
            );
        }
    }
    Ok(())
}

/// Refuses where clients of other volumes would be cut off.
pub fn check_unused(status: &GridStatus, with_clients: bool) -> Result<()> {
    let used = status.volumes.iter().filter(|volume| volume.sessions > 0);
    let used: Vec<String> = used.map(|volume| format!("{} ({})", volume.name, volume.sessions)).collect();
    if !used.is_empty() && !with_clients {
        bail!(
            "clients are connected to {}, and this drill stops the host: they wait until it is back, or get errors, as \
             they are set up. Disconnect them; or add --with-clients",
            used.join(", ")
        );
    }
    Ok(())
}

fn confirm(name: &str, warning: &str, yes: bool) -> Result<()> {
    if yes {
        return Ok(());
    }
    if !std::io::stdin().is_terminal() {
        bail!("{name} does harm on purpose: {warning}. Nobody can be asked here; add --yes to do it");
    }
    eprint!("{name} does harm on purpose: {warning}. Do it? [y/N] ");
    std::io::stderr().flush()?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    if !matches!(answer.trim(), "y" | "yes") {
        bail!("nothing was done");
    }
    Ok(())
}

/// Those that write and read all the while, whatever becomes of their connections.
struct Clients {
    witnesses: Vec<Witness>,
    completions: Arc<Mutex<Vec<Completion>>>,
}

impl Clients {
    fn start(site: &Site, count: u64) -> Result<Clients> {
        let completions: Arc<Mutex<Vec<Completion>>> = Arc::default();
        let patience = site.mend_max + PATIENCE_MORE;
        let manner = Manner { rate: CLIENT_RATE, patience, completions: Some(Arc::clone(&completions)) };
        let start = |at: u64| {
            let socket = site.grid.socket_of(&site.volume);
            Witness::start(socket, site.volume.clone(), at * REGION_BYTES, unix_ms() + at, manner.clone())
        };
        Ok(Clients { witnesses: (0..count).map(start).collect::<Result<_>>()?, completions })
    }

    /// Has all of them read their blocks back.
    fn finish(self) -> (Testimony, Vec<Completion>) {
        let mut all = Testimony::default();
        for witness in self.witnesses {
            all.add(witness.finish());
        }
        let mut completions = self.completions.lock().unwrap_or_else(PoisonError::into_inner).clone();
        completions.sort_by_key(|completion| completion.at_ms);
        (all, completions)
    }
}

/// Harm that was done, and is undone on the way out of a drill that fails.
struct Harm<'a> {
    calamity: &'a mut dyn Calamity,
    site: &'a Site,
    is_mended: bool,
}

impl Drop for Harm<'_> {
    fn drop(&mut self) {
        if !self.is_mended {
            eprintln!("undoing what the drill did");
            if let Err(error) = self.calamity.undo(self.site) {
                eprintln!("the grid is not as it was: {error:#}");
            }
        }
    }
}

/// A volume as it has to be after the drill, too.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Known {
    id: String,
    size_bytes: u64,
    exported: bool,
    state: VolumeState,
}

fn volumes_of(dir: &GridDir) -> Result<BTreeMap<String, Known>> {
    let known = |volume: holdfast_api::VolumeInfo| {
        let (id, size_bytes, exported, state) = (volume.id, volume.size_bytes, volume.exported, volume.state);
        // Which of the two it is changes by itself.
        let state = if state == VolumeState::InCare { VolumeState::Closed } else { state };
        (volume.name, Known { id, size_bytes, exported, state })
    };
    Ok(client::volumes(dir)?.into_iter().map(known).collect())
}

/// Names of volumes that are not what they were.
fn changed(before: &BTreeMap<String, Known>, dir: &GridDir) -> Result<Vec<String>> {
    let now = volumes_of(dir)?;
    Ok(before.iter().filter(|(name, known)| now.get(*name) != Some(known)).map(|(name, _)| name.clone()).collect())
}

#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct EmergencyReport {
    pub drill: String,
    /// What was done to the grid.
    pub harm: String,
    pub layout: String,
    pub seconds: u64,
    pub clients: u64,
    /// Requests that a client got an error for.
    pub errors: u64,
    /// Blocks that did not hold what was acknowledged last, whenever they were read.
    pub mismatches: u64,
    pub blocks_verified: u64,
    /// Of volumes that were there before, those that are as they were.
    pub volumes: u64,
    pub volumes_changed: Vec<String>,
    /// What `holdfast status` said of it.
    pub told: Option<String>,
    /// What put it right.
    pub steps: Vec<Step>,
    /// From the beginning of mending until everything was redundant again.
    pub whole_s: Option<f64>,
    pub troubles: Vec<String>,
    #[serde(flatten)]
    pub figures: Figures,
    pub testimony: Testimony,
    pub machine: Machine,
}

impl EmergencyReport {
    pub fn has_passed(&self) -> bool {
        self.errors == 0 && self.mismatches == 0 && self.volumes_changed.is_empty() && self.whole_s.is_some()
    }
}

/// Runs a drill. An error says that it could not be run or did not pass.
pub fn run(calamity: &mut dyn Calamity, dir: &GridDir, args: &EmergencyArgs, json: bool) -> Result<()> {
    check_well(dir)?;
    let volume = format!("drill-{}", std::process::id());
    let mend_max = Duration::from_secs(args.mend_seconds);
    let work = WorkDir::create(dir.root(), false)?;
    let site = Site { dir: dir.clone(), grid: LocalGrid::new(dir.clone()), work, volume, mend_max };
    calamity.check(&site)?;
    confirm(calamity.name(), &calamity.warning(), args.yes)?;
    tools::catch_interrupts()?;
    let report = rehearse(calamity, &site, args)?;
    report::print(json, &report, || page::page(&report))?;
    if args.keep {
        eprintln!("kept: the volume {}", site.volume);
    }
    if !report.has_passed() {
        bail!("the drill did not pass; what failed stands in its report");
    }
    Ok(())
}

fn rehearse(calamity: &mut dyn Calamity, site: &Site, args: &EmergencyArgs) -> Result<EmergencyReport> {
    let layout = args.layout.clone().unwrap_or_else(|| fitting_layout(&site.grid));
    let before = volumes_of(&site.dir)?;
    let mut volumes = Volumes::new(&site.grid, args.keep);
    volumes.create(&site.volume, args.clients * REGION_BYTES, &layout)?;
    let watch = Watch::start(site.work.path())?;
    eprintln!("{} clients write and read volume {} ({layout})", args.clients, site.volume);
    let clients = Clients::start(site, args.clients)?;
    let half = Duration::from_secs(args.seconds) / 2;
    let begun = Instant::now();
    let way_back = calamity.prepare(site)?;
    eprintln!("should this drill be killed, this puts the grid right: {way_back}");
    sleep_until(begun + half)?;

    let begun_ms = unix_ms();
    let mut harm = Harm { calamity, site, is_mended: false };
    let what = harm.calamity.strike(site)?;
    let struck_ms = harm.calamity.since_ms().unwrap_or(begun_ms);
    eprintln!("done: {what}");
    let rest = Instant::now() + half;
    let told = told_of(&*harm.calamity, site)?;
    sleep_until(rest)?;
    let mending = Instant::now();
    let mut steps = Steps::new(site);
    harm.calamity.mend(site, &mut steps).with_context(|| format!("broken off while it was put right ({what})"))?;
    let whole_s = wait_until_whole(&before, site, mending)?;
    eprintln!("reading back all that was acknowledged");
    let (testimony, completions) = clients.finish();
    harm.is_mended = true;
    if whole_s.is_some() {
        harm.calamity.clear_up()?;
    }
    let name = harm.calamity.name();
    drop(harm);

    let mut timeline = Timeline::new(struck_ms, margin_ms(args.seconds));
    completions.into_iter().for_each(|completion| timeline.record(completion));
    let volumes_changed = changed(&before, &site.dir)?;
    let mut troubles = testimony.examples.clone();
    if whole_s.is_none() {
        let amiss = amiss(&site.dir)?.join("; ");
        troubles.push(format!("not all is well {} s after mending began: {amiss}", args.mend_seconds));
        troubles
            .push(format!("what the drill took is kept beside where it was, in names that end in .{}", site.volume));
    }
    Ok(EmergencyReport {
        drill: name.to_string(),
        harm: what,
        layout,
        seconds: args.seconds,
        clients: args.clients,
        errors: testimony.errors,
        mismatches: testimony.mismatches,
        blocks_verified: args.clients * REGION_BYTES / BLOCK_BYTES,
        volumes: (before.len() - volumes_changed.len()) as u64,
        volumes_changed,
        told,
        steps: steps.done,
        whole_s,
        troubles,
        figures: timeline.figures(),
        testimony,
        machine: watch.seen(),
    })
}

fn fitting_layout(grid: &LocalGrid) -> String {
    let layout = match grid.nodes().map_or(0, |nodes| nodes.len()) {
        0 | 1 => "mirror:2@device",
        2 => "mirror:2",
        _ => "parity:2+1",
    };
    layout.to_string()
}

/// What `holdfast status` says of the harm.
fn told_of(calamity: &dyn Calamity, site: &Site) -> Result<Option<String>> {
    let end = Instant::now() + TOLD_WITHIN;
    while calamity.is_told() && Instant::now() < end {
        let found = findings::of(&site.status()?);
        if let Some(finding) = found.iter().find(|finding| calamity.is_told_by(finding)) {
            eprintln!("`holdfast status` says: {finding}");
            return Ok(Some(finding.to_string()));
        }
        sleep(LOOK_PACE)?;
    }
    Ok(None)
}

/// Waits until nothing is amiss any more and all volumes are what they were; the seconds from the beginning of mending.
fn wait_until_whole(before: &BTreeMap<String, Known>, site: &Site, mending: Instant) -> Result<Option<f64>> {
    eprintln!("waiting until everything is redundant again");
    let end = mending + site.mend_max;
    loop {
        check_interrupt()?;
        // A host that has just been started can't be asked at once.
        let is_whole = amiss(&site.dir).is_ok_and(|amiss| amiss.is_empty())
            && changed(before, &site.dir).is_ok_and(|changed| changed.is_empty());
        if is_whole {
            return Ok(Some(rounded(mending.elapsed().as_secs_f64())));
        }
        if Instant::now() >= end {
            return Ok(None);
        }
        sleep(LOOK_PACE)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_api::Severity;

    fn report() -> EmergencyReport {
        EmergencyReport {
            drill: "host-loss".to_string(),
            harm: "the host was killed".to_string(),
            layout: "mirror:2".to_string(),
            seconds: 4,
            clients: 1,
            errors: 0,
            mismatches: 0,
            blocks_verified: 2048,
            volumes: 3,
            volumes_changed: Vec::new(),
            told: Some("CRITICAL".to_string()),
            steps: vec![Step { command: "holdfast grid up".to_string(), seconds: 0.2 }],
            whole_s: Some(1.0),
            troubles: Vec::new(),
            figures: Timeline::new(1000, 0).figures(),
            testimony: Testimony::default(),
            machine: Machine::default(),
        }
    }

    #[test]
    fn whatever_is_not_as_promised_fails_the_drill() {
        assert!(report().has_passed());
        let page = page::page(&report());
        assert!(page.contains("passed") && page.contains("  holdfast grid up   # 0.2 s"), "{page}");
        let changes: [fn(&mut EmergencyReport); 4] = [
            |report| report.errors = 1,
            |report| report.mismatches = 1,
            |report| report.volumes_changed.push("v1".to_string()),
            |report| report.whole_s = None,
        ];
        for change in changes {
            let mut changed = report();
            change(&mut changed);
            assert!(!changed.has_passed() && page::page(&changed).contains("FAILED"), "{changed:?}");
        }
    }

    #[test]
    fn a_grid_that_lacks_room_may_be_drilled_and_one_that_lacks_redundancy_may_not() {
        let finding = |concern| Finding {
            severity: Severity::Warning,
            concern,
            about: "it".to_string(),
            what: "it".to_string(),
            next: None,
            announced: false,
        };
        let amiss = [Concern::Service, Concern::DataAtRisk, Concern::Redundancy, Concern::Metadata];
        assert!(amiss.into_iter().all(|concern| is_amiss(&finding(concern))));
        let others = [Concern::Capacity, Concern::Certificates, Concern::Time];
        assert!(!others.into_iter().any(|concern| is_amiss(&finding(concern))));
    }
}
