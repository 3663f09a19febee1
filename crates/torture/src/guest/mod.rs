//! A real guest on a volume that two hosts offer: QEMU, a Linux kernel, ext4, files with checksums.
//!
//! ```text
//!   guest ── virtio-blk ── QEMU's NBD client ──TCP──> host h1
//!   host h1 ──TLS──> host h2, the owner ──TLS──> n1, n2, n3
//! ```
//! The guest never learns of anything. Its disk stays where it is while the volume is handed over to h1 and back, and while
//! the owner's machine is killed, from which h1 takes the volume over. In the end h1 itself is killed and started again:
//! QEMU connects anew (`reconnect-delay`), as it has nowhere else to go.
//!
//! Role: starts QEMU beside the bridge, reads the guest's lines, and does all that to the grid meanwhile. With
//! [`Options::migrate`] the guest moves itself: see [`migrate`].

pub mod initrd;
mod migrate;

use crate::atlas::machine::{Part, Shape};
use crate::atlas::site::{Site, VolumeSpec};
use crate::atlas::{net, say};
use anyhow::{Context, Result, bail, ensure};
use initrd::Parts;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

const VOLUME: VolumeSpec = VolumeSpec { name: "guest", layout: "parity:2+1", is_encrypted: false };

/// An emulated processor beside others' work takes its time.
const BOOT_MAX: Duration = Duration::from_secs(180);

/// How long the guest may stand still.
const GAP_MAX: Duration = Duration::from_secs(60);

/// How long the checks in the end may take.
const CHECK_MAX: Duration = Duration::from_secs(240);

/// How long QEMU keeps requests while it has no connection.
const RECONNECT_DELAY: u32 = 120;

const WHOLE_MAX: Duration = Duration::from_secs(120);

#[derive(Clone, Debug)]
pub struct Options {
    pub binary: PathBuf,
    pub dir: PathBuf,
    /// Where kernel and busybox were unpacked.
    pub parts: PathBuf,
    /// How long the guest writes between two events.
    pub pause: Duration,
    pub device_mib: u64,
    pub volume_mib: u64,
    /// Move the guest from host to host, rather than have hosts go.
    pub migrate: bool,
}

/// What the guest did, and what was seen of it.
pub struct Report {
    /// Event, longest gap between two durable files from it to the next.
    pub gaps: Vec<(String, Duration)>,
    pub files: u64,
    /// Why it did not pass.
    pub failures: Vec<String>,
}

impl Report {
    pub fn json(&self) -> Value {
        let gap = |(event, gap): &(String, Duration)| json!({ "event": event, "longest_gap_s": gap.as_secs_f64() });
        json!({
            "passed": self.failures.is_empty(),
            "files": self.files,
            "events": self.gaps.iter().map(gap).collect::<Vec<_>>(),
            "failures": self.failures,
        })
    }

    pub fn text(&self) -> String {
        let mut text = format!("{:<56} {:>14}\n", "event", "longest gap, s");
        for (event, gap) in &self.gaps {
            text += &format!("{event:<56} {:>14.2}\n", gap.as_secs_f64());
        }
        for failure in &self.failures {
            text += &format!("FAILED: {failure}\n");
        }
        let verdict = if self.failures.is_empty() { "passed" } else { "FAILED" };
        text + &format!("guest {verdict}: {} files, each synced; ext4 and all checksums were looked at", self.files)
    }
}

/// Makes the grid, boots the guest, and does everything to its volume.
pub fn run(options: &Options, stopped: &AtomicBool) -> Result<Report> {
    let parts = Parts::find(&options.parts)?;
    let initrd = options.dir.join("initrd.cpio");
    parts.pack(&initrd)?;
    let sizes = (options.device_mib, options.volume_mib);
    let mut site = Site::build(Shape::SIX, (&options.binary, &options.dir), sizes, &[VOLUME])?;
    let launch = Launch { kernel: &parts.kernel, initrd: &initrd, dir: &options.dir };
    let mut report = Report { gaps: Vec::new(), files: 0, failures: Vec::new() };
    let guest = match options.migrate {
        true => migrate::run(&launch, options.pause, &mut site, &mut report, stopped)?,
        false => stay(&launch, options, &mut site, &mut report, stopped)?,
    };
    report.files = guest.files;
    guest.end();
    report.failures.extend(site.complaints()?);
    Ok(report)
}

/// The guest stays at h1, which forwards; the volume is at h2.
fn stay(
    launch: &Launch<'_>,
    options: &Options,
    site: &mut Site,
    report: &mut Report,
    stopped: &AtomicBool,
) -> Result<Guest> {
    site.balance(1)?;
    let server = Part::H1.nbd();
    let server = format!("server.type=inet,server.host={},server.port={}", server.ip(), server.port());
    let mut guest = launch.boot(&Disk { server, qmp: None, incoming: None })?;
    if let Err(error) = events(options, site, &mut guest, report, stopped) {
        report.failures.push(format!("{error:#}; what the guest said: {}", guest.said()));
    }
    Ok(guest)
}

/// What is done to the grid while the guest writes.
fn events(
    options: &Options,
    site: &mut Site,
    guest: &mut Guest,
    report: &mut Report,
    stopped: &AtomicBool,
) -> Result<()> {
    guest.comes_up(stopped)?;
    type Event = (&'static str, fn(&mut Site) -> Result<()>);
    let list: [Event; 6] = [
        ("nothing, for comparison", |_| Ok(())),
        ("handed over to h1, which the guest is at", |site| site.balance(0)),
        ("handed over to h2", |site| site.balance(1)),
        ("owner h2 killed with -9, h1 takes over", |site| site.machine(Part::H2).kill()),
        ("h2 started again", |site| site.machine(Part::H2).start()),
        ("h1, which the guest is at, killed and started again", |site| {
            site.machine(Part::H1).kill()?;
            site.machine(Part::H1).start()
        }),
    ];
    for (name, act) in list {
        say(name);
        guest.longest = Duration::ZERO;
        act(site)?;
        guest.watch(options.pause, stopped)?;
        report.gaps.push((name.to_string(), guest.longest));
    }
    wait_whole(site, guest, stopped)?;
    guest.finishes(stopped)
}

fn wait_whole(site: &mut Site, guest: &mut Guest, stopped: &AtomicBool) -> Result<()> {
    let since = Instant::now();
    while let Some(what) = site.lacks() {
        ensure!(since.elapsed() < WHOLE_MAX, "not whole after {WHOLE_MAX:?}: {what}");
        guest.watch(Duration::from_millis(500), stopped)?;
    }
    Ok(())
}

/// How a QEMU reaches the volume, and how it is reached.
struct Disk {
    /// Words of `-blockdev` that name a server of NBD.
    server: String,
    /// Where it takes commands.
    qmp: Option<PathBuf>,
    /// Where the memory of a guest comes in; without it boots.
    incoming: Option<PathBuf>,
}

/// What a guest is booted from.
struct Launch<'a> {
    kernel: &'a Path,
    initrd: &'a Path,
    dir: &'a Path,
}

impl Launch<'_> {
    fn boot(&self, disk: &Disk) -> Result<Guest> {
        say(if disk.incoming.is_some() { "another QEMU waits for the guest" } else { "booting the guest" });
        let Disk { server, qmp, incoming } = disk;
        let export = VOLUME.name;
        let blockdev = format!("driver=nbd,node-name=disk,{server},export={export},reconnect-delay={RECONNECT_DELAY}");
        let log = std::fs::File::options().create(true).append(true).open(self.dir.join("qemu.log"))?;
        let mut command = Command::new("qemu-system-x86_64");
        // An emulated processor works on every machine.
        command.args(["-accel", "tcg", "-m", "256", "-nodefaults", "-no-reboot", "-display", "none"]);
        command.args(["-serial", "stdio", "-blockdev", &blockdev, "-device", "virtio-blk-pci,drive=disk"]);
        command.arg("-kernel").arg(self.kernel).arg("-initrd").arg(self.initrd);
        command.args(["-append", "console=ttyS0 loglevel=4 panic=-1 random.trust_cpu=on"]);
        if let Some(path) = qmp {
            command.arg("-qmp").arg(format!("unix:{},server=on,wait=off", path.display()));
        }
        if let Some(path) = incoming {
            command.arg("-incoming").arg(format!("unix:{}", path.display()));
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log);
        let child = command.spawn().context("cannot start qemu-system-x86_64; `./x setup --guests` installs it")?;
        Guest::listen(child, self.dir)
    }
}

/// A running QEMU and what its guest says.
struct Guest {
    child: Child,
    input: Option<ChildStdin>,
    lines: mpsc::Receiver<(Instant, String)>,
    files: u64,
    last: Option<Instant>,
    longest: Duration,
    /// The last lines that were no ticks.
    words: Vec<String>,
}

impl Guest {
    fn listen(mut child: Child, dir: &Path) -> Result<Guest> {
        let output = child.stdout.take().context("QEMU's output is not piped")?;
        let input = child.stdin.take();
        let mut console = std::fs::File::options().create(true).append(true).open(dir.join("console.log"))?;
        let (sender, lines) = mpsc::channel();
        let read = move || {
            for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line).trim_end().to_string();
                // The log is for people; what counts is passed on.
                let _ = writeln!(console, "{line}");
                if sender.send((Instant::now(), line)).is_err() {
                    return;
                }
            }
        };
        std::thread::Builder::new().name("console".into()).spawn(read).context("cannot start a thread")?;
        Ok(Guest { child, input, lines, files: 0, last: None, longest: Duration::ZERO, words: Vec::new() })
    }

    /// Takes the guest's next line, if it says one soon; notes the gap where it tells of a file.
    fn line(&mut self) -> Result<Option<String>> {
        match self.lines.recv_timeout(Duration::from_millis(50)) {
            Ok((at, line)) => {
                if let Some(rest) = line.strip_prefix("T ") {
                    self.files = rest.split_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or(self.files);
                    if let Some(last) = self.last.replace(at) {
                        self.longest = self.longest.max(at.saturating_duration_since(last));
                    }
                } else if !line.is_empty() {
                    self.words.push(line.clone());
                }
                Ok(Some(line))
            }
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => {
                bail!("QEMU has ended ({:?}); see qemu.log and console.log", self.child.try_wait())
            }
        }
    }

    fn wait_for(&mut self, word: &str, patience: Duration, stopped: &AtomicBool) -> Result<String> {
        let end = Instant::now() + patience;
        loop {
            ensure!(!stopped.load(Ordering::Relaxed), "interrupted");
            ensure!(Instant::now() < end, "it did not say {word} within {patience:?}");
            if let Some(line) = self.line()?.filter(|line| line.contains(word)) {
                return Ok(line);
            }
        }
    }

    /// Lets it write for a while; what it has not finished by then counts as a gap, too.
    fn watch(&mut self, time: Duration, stopped: &AtomicBool) -> Result<()> {
        let end = Instant::now() + time;
        loop {
            ensure!(!stopped.load(Ordering::Relaxed), "interrupted");
            self.line()?;
            let still = self.last.map_or(Duration::ZERO, |last| last.elapsed());
            self.longest = self.longest.max(still);
            ensure!(still < GAP_MAX, "the guest stands still for {GAP_MAX:?}");
            // The end of a phase is not in the middle of a gap.
            if Instant::now() > end && still < Duration::from_secs(1) {
                return Ok(());
            }
        }
    }

    fn comes_up(&mut self, stopped: &AtomicBool) -> Result<()> {
        self.wait_for("READY", BOOT_MAX, stopped).map(drop).context("the guest does not come up")
    }

    /// It stops writing, and finds all that it wrote.
    fn finishes(&mut self, stopped: &AtomicBool) -> Result<()> {
        say("the guest stops writing, and checks everything");
        self.stop()?;
        let result = self.wait_for("RESULT", CHECK_MAX, stopped).context("the guest did not finish its checks")?;
        let expected = ["failed=0", "wrong=0", "left=0", "fsck=0", "errors=0"];
        let words: Vec<&str> = result.split_whitespace().collect();
        ensure!(expected.iter().all(|word| words.contains(word)), "the guest found: {result}");
        ensure!(self.files > 0, "the guest wrote no file");
        Ok(())
    }

    /// It goes on in the other's QEMU, which gets this one's in exchange. What it said here is heard to the end.
    fn replace(&mut self, other: &mut Guest) -> Result<()> {
        let end = Instant::now() + GAP_MAX;
        while self.child.try_wait()?.is_none() {
            ensure!(Instant::now() < end, "a QEMU that was told to quit does not");
            std::thread::sleep(Duration::from_millis(5));
        }
        while self.line().is_ok() {}
        std::mem::swap(&mut self.child, &mut other.child);
        std::mem::swap(&mut self.input, &mut other.input);
        std::mem::swap(&mut self.lines, &mut other.lines);
        Ok(())
    }

    fn stop(&mut self) -> Result<()> {
        let mut input = self.input.take().context("the guest was told to stop already")?;
        input.write_all(b"stop\n").and_then(|()| input.flush()).context("cannot tell the guest to stop")?;
        self.input = Some(input);
        Ok(())
    }

    fn said(&self) -> String {
        self.words.iter().rev().take(8).rev().cloned().collect::<Vec<_>>().join(" | ")
    }

    fn end(self) {
        drop(self);
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // It may have powered itself off.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Where `./x setup --guests` unpacks packages, below the directory for tools.
pub const PARTS_DIR: &str = "guest";

/// What a run needs of this machine, told before anything is made.
pub fn check(parts: &Path) -> Result<()> {
    Parts::find(parts)?;
    net::run("qemu-system-x86_64", &["--version"]).context("`./x setup --guests` installs QEMU")?;
    Ok(())
}
