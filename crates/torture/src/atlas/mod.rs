//! The atlas of faults: a grid over six machines, every fault for every one of them, and guests that check every byte meanwhile.
//!
//! ```text
//!   h1, h2       hosts without a node; both offer every volume
//!   n1, n2, n3   storage nodes with three devices each, a member of etcd on the first two
//!   w            the witness: a member of etcd, and nothing else
//! ```
//! Machines are network namespaces, processes are real ones of the real binary, and everything between them goes over TLS with
//! certificates that machines have got by tokens. [`guests`] are clients of both hosts. One fault after the other: commit, wait,
//! heal, wait until all is redundant again. In the end every block is read through both hosts.
//!
//! Another shape has two machines, each a host and a node, and the witness: [`order`]s of losing and regaining them. A third has
//! machines that are alike: the first [`burn`]s, another one comes, and then all of etcd is lost.

pub mod burn;
pub mod fault;
pub mod guests;
pub mod launch;
pub mod machine;
pub mod net;
pub mod order;
mod orders;
pub mod path;
pub mod report;
pub mod site;
pub mod wire;

use anyhow::{Context, Result, bail, ensure};
use fault::{Fault, Kind};
use guests::{Control, Guests, Plan, VolumePlan, Work};
use machine::{Part, Shape};
use order::Order;
use report::{Report, Row};
use site::{Site, VolumeSpec};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use wire::Passage;

/// How long all may take to be whole after a fault.
const WHOLE_MAX: Duration = Duration::from_secs(150);

/// A guest is well when nothing that it asked waits for longer.
const WELL: Duration = Duration::from_secs(1);

/// Past the time after which clients may leave a silent host, for what follows to be seen.
const AFTER_SILENCE: Duration = Duration::from_secs(10);

/// Guests are asked to go home again after this long.
const ASK_AGAIN: Duration = Duration::from_secs(15);

const SWEEP_MAX: Duration = Duration::from_secs(300);
const LOOK_PACE: Duration = Duration::from_millis(200);

/// Each layout that two nodes with three devices can hold.
const VOLUMES_OF_TWO: [VolumeSpec; 4] = [
    VolumeSpec { name: "mirror2", layout: "mirror:2", is_encrypted: false },
    VolumeSpec { name: "sealed", layout: "mirror:2", is_encrypted: true },
    VolumeSpec { name: "nestedm", layout: "nested-mirror", is_encrypted: false },
    VolumeSpec { name: "nestedp", layout: "nested-parity:2+1", is_encrypted: false },
];

/// Each layout that three nodes with three devices can hold.
const VOLUMES: [VolumeSpec; 6] = [
    VolumeSpec { name: "mirror2", layout: "mirror:2", is_encrypted: false },
    VolumeSpec { name: "mirror3", layout: "mirror:3", is_encrypted: false },
    VolumeSpec { name: "parity", layout: "parity:2+1", is_encrypted: false },
    VolumeSpec { name: "sealed", layout: "parity:2+1", is_encrypted: true },
    VolumeSpec { name: "nestedm", layout: "nested-mirror", is_encrypted: false },
    VolumeSpec { name: "nestedp", layout: "nested-parity:2+1", is_encrypted: false },
];

#[derive(Clone, Debug)]
pub struct Options {
    pub binary: PathBuf,
    pub dir: PathBuf,
    pub seed: u64,
    pub happens: Happens,
    /// How long a fault lasts.
    pub lasts: Duration,
    /// How late frames of a slow machine are, in each direction.
    pub slow: Duration,
    pub silence: Duration,
    pub patience: Duration,
    pub depth: usize,
    pub rate: f64,
    pub device_mib: u64,
    pub volume_mib: u64,
}

/// What happens to the grid, and with that which shape it has.
#[derive(Clone, Debug)]
pub enum Happens {
    Faults(Vec<Fault>),
    Orders(Vec<Order>),
    /// A machine burns, and all of etcd is lost.
    Burn,
}

impl Happens {
    fn shape(&self) -> &'static Shape {
        match self {
            Happens::Faults(_) => Shape::SIX,
            Happens::Orders(_) => Shape::TWO,
            Happens::Burn => Shape::FOUR,
        }
    }

    fn volumes(&self) -> &'static [VolumeSpec] {
        match self {
            Happens::Faults(_) => &VOLUMES,
            Happens::Orders(_) => &VOLUMES_OF_TWO,
            Happens::Burn => &[],
        }
    }

    fn needs_wire(&self) -> bool {
        matches!(self, Happens::Faults(faults) if faults.iter().any(Fault::needs_wire))
    }
}

/// Makes the grid, commits all faults, and reads everything back. What guests saw is in the report, whatever happened.
pub fn run(options: &Options, stopped: &Arc<AtomicBool>) -> Result<Report> {
    let begun = Instant::now();
    if let Happens::Burn = options.happens {
        return burn::run(options, stopped);
    }
    let (shape, volumes) = (options.happens.shape(), options.happens.volumes());
    let sizes = (options.device_mib, options.volume_mib);
    let mut site = Site::build(shape, (&options.binary, &options.dir), sizes, volumes)?;
    if options.happens.needs_wire() {
        // What this kernel lacks shows now, not after half of the run.
        site.net.divert(Part::W, Passage::Late(Duration::ZERO))?;
        site.net.restore(Part::W)?;
    }
    let planned = volumes.iter().map(|volume| VolumePlan {
        name: volume.name.to_string(),
        layout: volume.layout.to_string(),
        size_bytes: options.volume_mib << 20,
        homes: Part::HOSTS,
    });
    let mut report = under_guests(options, &Part::HOSTS, planned.collect(), |control, report| {
        Atlas { options, site: &mut site, control: control.clone(), stopped, lacked: None }.all(report)
    });
    report.failures.extend(site.complaints()?);
    report.took = begun.elapsed();
    Ok(report)
}

/// Has guests of these volumes at work while something is done to the grid; what they saw.
fn under_guests(
    options: &Options,
    hosts: &[Part],
    volumes: Vec<VolumePlan>,
    act: impl FnOnce(&Control, &mut Report) -> Result<()>,
) -> Report {
    let mut report = Report {
        seed: options.seed,
        volumes: volumes.iter().map(|v| (v.name.clone(), v.layout.clone())).collect(),
        rows: Vec::new(),
        total: guests::Seen::default(),
        verified_bytes: 0,
        failures: Vec::new(),
        took: Duration::ZERO,
    };
    let plan = Plan {
        seed: options.seed,
        servers: hosts.iter().map(|host| (*host, host.nbd())).collect(),
        volumes,
        depth: options.depth,
        rate: options.rate,
        silence: options.silence,
        patience: options.patience,
    };
    let (guests, control) = Guests::new(plan);
    std::thread::scope(|scope| {
        let ended = control.clone();
        let running = scope.spawn(move || {
            let outcome = guests.run();
            ended.end();
            outcome
        });
        if let Err(error) = act(&control, &mut report) {
            report.failures.push(format!("{error:#}"));
        }
        control.end();
        match running.join() {
            Ok(Ok(())) => {}
            Ok(Err(error)) => report.failures.push(format!("guests: {error:#}")),
            Err(_) => report.failures.push("the thread of guests panicked".to_string()),
        }
    });
    report.total = control.total();
    report
}

/// The thread that commits faults.
struct Atlas<'a> {
    options: &'a Options,
    site: &'a mut Site,
    control: Control,
    stopped: &'a Arc<AtomicBool>,
    /// What was waited for last, before all was whole.
    lacked: Option<String>,
}

impl Atlas<'_> {
    fn all(&mut self, report: &mut Report) -> Result<()> {
        self.wait_whole().context("before the first fault")?;
        self.quiet(report)?;
        match &self.options.happens {
            Happens::Faults(faults) => {
                for (at, fault) in faults.iter().enumerate() {
                    say(&format!("{}/{}: {fault} ({})", at + 1, faults.len(), fault.expectation()));
                    self.one(fault, report).with_context(|| format!("in fault {fault}"))?;
                    self.check_bytes()?;
                }
            }
            Happens::Burn => {}
            Happens::Orders(orders) => {
                for (at, order) in orders.iter().enumerate() {
                    say(&format!("{}/{}: {order}", at + 1, orders.len()));
                    self.order(order, report).with_context(|| format!("in order {order}"))?;
                    self.check_bytes()?;
                }
            }
        }
        say("everything is read back through both hosts");
        for (reader, host) in Part::HOSTS.into_iter().enumerate() {
            self.sweep(reader).with_context(|| format!("while everything was read through {host}"))?;
            report.verified_bytes += report.volumes.len() as u64 * (self.options.volume_mib << 20);
        }
        Ok(())
    }

    /// The same time without a fault, and every volume handed over under load: what other figures are to be held against.
    fn quiet(&mut self, report: &mut Report) -> Result<()> {
        say("no fault, for comparison");
        self.control.take_seen();
        self.rest(self.options.lasts)?;
        let times = (self.options.lasts, Duration::ZERO);
        report.rows.push(Row::new("(none)", None, times, self.control.take_seen()));
        say("every volume is handed over, and back");
        let begun = Instant::now();
        for turn in [1, 0] {
            self.control.note(format!("hand-overs begin, turn {turn}"));
            self.site.balance(turn)?;
        }
        let times = (begun.elapsed(), Duration::ZERO);
        report.rows.push(Row::new("(hand-over)", None, times, self.control.take_seen()));
        Ok(())
    }

    fn one(&mut self, fault: &Fault, report: &mut Report) -> Result<()> {
        self.control.take_seen();
        let begun = Instant::now();
        for (kind, part) in &fault.0 {
            self.control.note(format!("{}:{part} begins", kind.name()));
            self.commit(*kind, *part)?;
        }
        let least = self.options.silence + AFTER_SILENCE;
        let lasts = if fault.silences_host() { self.options.lasts.max(least) } else { self.options.lasts };
        let rested = self.rest(lasts);
        // Also where the run is to end: nothing is left hung.
        let ended = Instant::now();
        self.control.note(format!("{fault} ends"));
        self.heal(fault)?;
        rested?;
        let healed = Instant::now();
        let whole = self.wait_whole();
        let times = (ended - begun, healed.elapsed() + (healed - ended));
        self.control.note(format!("all is whole after {fault}"));
        self.note_row(Row::new(&fault.to_string(), Some(fault), times, self.control.take_seen()), report);
        whole?;
        self.site.balance(0)
    }

    fn note_row(&mut self, mut row: Row, report: &mut Report) {
        row.lacked = self.lacked.take();
        let longest = row.longest_elsewhere.max(row.longest_at_hit.unwrap_or_default());
        let (stall, whole) = (longest.as_secs_f64(), row.whole_after.as_secs_f64());
        say(&format!("  longest stall {stall:.2} s, whole after {whole:.1} s, {} failed", row.seen.failed()));
        report.rows.push(row);
    }

    fn check_bytes(&self) -> Result<()> {
        ensure!(!self.control.mismatched(), "guests saw wrong bytes: stopped, so that what explains it stays");
        Ok(())
    }

    fn commit(&mut self, kind: Kind, part: Part) -> Result<()> {
        match kind {
            Kind::Kill => self.site.machine(part).kill(),
            Kind::Hang => self.site.machine(part).hang(),
            Kind::Cut => self.site.net.cut(part),
            Kind::Slow => self.site.net.divert(part, Passage::Late(self.options.slow)),
            Kind::Deaf => self.site.net.divert(part, Passage::Deaf),
            Kind::Mute => self.site.net.divert(part, Passage::Mute),
        }
    }

    /// Ends the fault everywhere: links first, since what is started needs them, and members of etcd before all else.
    fn heal(&mut self, fault: &Fault) -> Result<()> {
        for (kind, part) in &fault.0 {
            self.mend(*kind, *part)?;
        }
        machine::wait_etcd(&self.options.happens.shape().voters)?;
        for (_, part) in fault.0.iter().filter(|(kind, _)| *kind == Kind::Kill) {
            self.site.machine(*part).start().with_context(|| format!("{part} does not come back"))?;
        }
        Ok(())
    }

    /// Ends what was done to a machine; of one that was killed etcd alone runs then.
    fn mend(&mut self, kind: Kind, part: Part) -> Result<()> {
        match kind {
            Kind::Kill => self.site.machine(part).start_etcd(),
            Kind::Hang => self.site.machine(part).resume(),
            Kind::Cut => self.site.net.mend(part),
            Kind::Slow | Kind::Deaf | Kind::Mute => self.site.net.restore(part),
        }
    }

    /// Waits until every volume is open once and redundant, and every guest is answered at its own host.
    fn wait_whole(&mut self) -> Result<()> {
        let since = Instant::now();
        let mut asked_at: Option<Instant> = None;
        loop {
            let mut lacks = self.site.lacks();
            if lacks.is_none() {
                // One that had not noticed that its path is dead goes away once more.
                if asked_at.is_none_or(|at| at.elapsed() > ASK_AGAIN) {
                    self.control.go_home();
                    asked_at = Some(Instant::now());
                }
                if self.control.is_well(WELL) {
                    return Ok(());
                }
                lacks = Some(format!("guests are not well; their paths lead to {:?}", self.control.at()));
            }
            if let Some(what) = lacks.as_ref().filter(|_| since.elapsed() > WHOLE_MAX) {
                bail!("not whole {WHOLE_MAX:?} after the fault: {what}");
            }
            self.lacked = lacks;
            self.check_going()?;
            std::thread::sleep(LOOK_PACE);
        }
    }

    fn sweep(&self, reader: usize) -> Result<()> {
        sweep(&self.control, reader, || self.check_going())
    }

    fn check_going(&self) -> Result<()> {
        check_going(&self.control, self.stopped)
    }

    fn rest(&self, time: Duration) -> Result<()> {
        rest(time, || self.check_going())
    }
}

/// Has this guest of each volume read all of it.
fn sweep(control: &Control, reader: usize, is_going: impl Fn() -> Result<()>) -> Result<()> {
    let since = Instant::now();
    control.set_work(Work::Rest);
    while !control.is_idle() {
        ensure!(since.elapsed() < SWEEP_MAX, "requests are unanswered after {SWEEP_MAX:?}");
        is_going()?;
        std::thread::sleep(LOOK_PACE);
    }
    control.set_work(Work::Sweep(reader));
    while !control.swept() {
        ensure!(since.elapsed() < SWEEP_MAX, "not everything was read after {SWEEP_MAX:?}");
        is_going()?;
        std::thread::sleep(LOOK_PACE);
    }
    Ok(())
}

fn check_going(control: &Control, stopped: &AtomicBool) -> Result<()> {
    ensure!(!stopped.load(Ordering::Relaxed), "interrupted");
    ensure!(!control.ended(), "guests have given up; what they said stands with the failures");
    Ok(())
}

fn rest(time: Duration, is_going: impl Fn() -> Result<()>) -> Result<()> {
    let end = Instant::now() + time;
    while Instant::now() < end {
        is_going()?;
        std::thread::sleep(LOOK_PACE.min(end.saturating_duration_since(Instant::now())));
    }
    Ok(())
}

/// A run takes half an hour: each line says what it is at.
pub fn say(text: &str) {
    eprintln!("atlas: {text}");
}
