//! The guest moves from one QEMU to another while it writes, and its volume follows.
//!
//! ```text
//!   QEMU a ── unix socket ──> host h1 ─┐
//!     │ migrate                        ├── the volume, at one of them
//!   QEMU b ── unix socket ──> host h2 ─┘
//! ```
//! Each QEMU has the socket of another host, as on two machines of a cluster. The volume stays where it is until the guest has
//! moved, and is handed over then; or it moves in the middle of that. A target that dies leaves the guest where it is.
//!
//! Two processes on one machine are two clients, as two machines are: the target's first write waits until the source is gone.

use super::{Disk, Guest, Launch, Report, wait_whole};
use crate::atlas::machine::Part;
use crate::atlas::say;
use crate::atlas::site::Site;
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// How long memory may take to be copied, beside others' work.
const MIGRATE_MAX: Duration = Duration::from_secs(120);

const QMP_MAX: Duration = Duration::from_secs(20);

const LOOK_PACE: Duration = Duration::from_millis(20);

/// Slow enough that a migration is under way for long, in bytes a second.
const SLOW: u64 = 1 << 20;

/// QEMU's own, in bytes a second.
const FAST: u64 = 1 << 30;

/// When the volume is handed over.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Follows {
    /// When the guest has moved, as an integration does.
    After,
    /// While memory is copied.
    Meanwhile,
}

/// A QEMU that is asked over its socket.
struct Qmp {
    reader: BufReader<UnixStream>,
    writer: UnixStream,
}

impl Qmp {
    fn connect(path: &Path) -> Result<Qmp> {
        let end = Instant::now() + QMP_MAX;
        let writer = loop {
            match UnixStream::connect(path) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() > end => bail!("QEMU does not listen at {}: {error}", path.display()),
                Err(_) => std::thread::sleep(LOOK_PACE),
            }
        };
        writer.set_read_timeout(Some(QMP_MAX))?;
        let mut qmp = Qmp { reader: BufReader::new(writer.try_clone()?), writer };
        qmp.ask("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// What it answers; events that come between are passed over.
    fn ask(&mut self, command: &str, arguments: Value) -> Result<Value> {
        writeln!(self.writer, "{}", json!({ "execute": command, "arguments": arguments }))
            .with_context(|| format!("QEMU can't be asked for {command}"))?;
        loop {
            let mut line = String::new();
            ensure!(self.reader.read_line(&mut line)? > 0, "QEMU ended at {command}");
            let mut answer: Value = serde_json::from_str(&line)?;
            if let Some(error) = answer.get("error") {
                bail!("QEMU refuses {command}: {error}");
            }
            if answer.get("return").is_some() {
                return Ok(answer["return"].take());
            }
        }
    }

    fn begin(&mut self, to: &Path, bytes_per_second: u64) -> Result<()> {
        self.ask("migrate-set-parameters", json!({ "max-bandwidth": bytes_per_second }))?;
        self.ask("migrate", json!({ "uri": format!("unix:{}", to.display()) })).map(drop)
    }

    fn state(&mut self) -> Result<String> {
        let told = self.ask("query-migrate", json!({}))?;
        Ok(told["status"].as_str().unwrap_or_default().to_string())
    }

    /// Until it is in one of these states.
    fn await_state(&mut self, wanted: &[&str], guest: &mut Guest) -> Result<String> {
        let end = Instant::now() + MIGRATE_MAX;
        loop {
            let state = self.state()?;
            if wanted.contains(&state.as_str()) {
                return Ok(state);
            }
            ensure!(Instant::now() < end, "the migration is `{state}` after {MIGRATE_MAX:?}");
            ensure!(!["failed", "cancelled"].contains(&state.as_str()), "the migration is `{state}`");
            guest.line()?;
        }
    }
}

/// The guest, the host that it is at, and how many QEMUs there were.
struct Moving<'a> {
    launch: &'a Launch<'a>,
    at: Part,
    /// Of the QEMU that it is in.
    qmp: PathBuf,
    count: usize,
}

struct Target {
    guest: Guest,
    qmp: PathBuf,
    memory: PathBuf,
}

/// The socket of a host, as QEMU is told of it.
fn disk(dir: &Path, part: Part, qmp: &Path, incoming: Option<PathBuf>) -> Disk {
    let socket = dir.join(part.name()).join("nbd.sock");
    let server = format!("server.type=unix,server.path={}", socket.display());
    Disk { server, qmp: Some(qmp.to_path_buf()), incoming }
}

impl Moving<'_> {
    fn other(&self) -> Part {
        if self.at == Part::H1 { Part::H2 } else { Part::H1 }
    }

    /// A socket of the QEMU that is started next.
    fn socket(&self, what: &str) -> PathBuf {
        self.launch.dir.join(format!("qemu{}.{what}", self.count))
    }

    /// A QEMU at the other host, which waits for the guest.
    fn target(&mut self) -> Result<Target> {
        self.count += 1;
        let (qmp, memory) = (self.socket("qmp"), self.socket("memory"));
        let disk = disk(self.launch.dir, self.other(), &qmp, Some(memory.clone()));
        Ok(Target { guest: self.launch.boot(&disk)?, qmp, memory })
    }

    fn migrate(&mut self, site: &mut Site, guest: &mut Guest, follows: Follows) -> Result<()> {
        let mut source = Qmp::connect(&self.qmp)?;
        let Target { guest: mut target, qmp, memory } = self.target()?;
        let mut waiting = Qmp::connect(&qmp)?;
        let to = self.other();
        if follows == Follows::Meanwhile {
            source.begin(&memory, SLOW)?;
            source.await_state(&["active"], guest)?;
            site.hand_all_over(to)?;
            ensure!(source.state()? == "active", "the migration was over before the volume was handed over");
            source.ask("migrate-set-parameters", json!({ "max-bandwidth": FAST }))?;
        } else {
            source.begin(&memory, FAST)?;
        }
        source.await_state(&["completed"], guest)?;
        // What moves guests ends the source at once: only then the target writes.
        source.ask("quit", json!({}))?;
        guest.replace(&mut target)?;
        target.end();
        let state = waiting.ask("query-status", json!({}))?;
        ensure!(state["status"] == "running", "the guest does not run where it has moved: {state}");
        site.hand_all_over(to)?;
        (self.at, self.qmp) = (to, qmp);
        Ok(())
    }

    /// The target dies while memory is copied.
    fn give_up(&mut self, guest: &mut Guest) -> Result<()> {
        let mut source = Qmp::connect(&self.qmp)?;
        let Target { guest: target, qmp, memory } = self.target()?;
        Qmp::connect(&qmp)?;
        source.begin(&memory, SLOW)?;
        source.await_state(&["active"], guest)?;
        target.end();
        let end = Instant::now() + MIGRATE_MAX;
        while source.state()? != "failed" {
            ensure!(Instant::now() < end, "QEMU does not see that its target is gone");
            guest.line()?;
        }
        Ok(())
    }
}

/// Boots the guest at h1, and moves it.
pub(super) fn run(
    launch: &Launch<'_>,
    pause: Duration,
    site: &mut Site,
    report: &mut Report,
    stopped: &AtomicBool,
) -> Result<Guest> {
    site.hand_all_over(Part::H1)?;
    let qmp = launch.dir.join("qemu0.qmp");
    let mut guest = launch.boot(&disk(launch.dir, Part::H1, &qmp, None))?;
    let mut moving = Moving { launch, at: Part::H1, qmp, count: 0 };
    let outcome = events(&mut moving, &mut guest, pause, site, report, stopped);
    if let Err(error) = outcome {
        report.failures.push(format!("{error:#}; what the guest said: {}", guest.said()));
    }
    Ok(guest)
}

fn events(
    moving: &mut Moving<'_>,
    guest: &mut Guest,
    pause: Duration,
    site: &mut Site,
    report: &mut Report,
    stopped: &AtomicBool,
) -> Result<()> {
    guest.comes_up(stopped)?;
    type Event = (&'static str, fn(&mut Moving<'_>, &mut Site, &mut Guest) -> Result<()>);
    let list: [Event; 5] = [
        ("nothing, for comparison", |_, _, _| Ok(())),
        ("migrated to h2, then the volume", |moving, site, guest| moving.migrate(site, guest, Follows::After)),
        ("the volume to h1 while memory is copied there", |moving, site, guest| {
            moving.migrate(site, guest, Follows::Meanwhile)
        }),
        ("a migration to h2 whose target dies", |moving, _, guest| moving.give_up(guest)),
        ("migrated to h2 all the same", |moving, site, guest| moving.migrate(site, guest, Follows::After)),
    ];
    for (name, act) in list {
        say(name);
        guest.longest = Duration::ZERO;
        act(moving, site, guest)?;
        guest.watch(pause, stopped)?;
        report.gaps.push((name.to_string(), guest.longest));
    }
    wait_whole(site, guest, stopped)?;
    guest.finishes(stopped)
}
