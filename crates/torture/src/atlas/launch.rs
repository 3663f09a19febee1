//! How a run over six machines is started, and what is left of it in the end: nothing but its directory.
//!
//! Two processes. The outer one makes the namespaces, starts the inner one (the same program, with `--inside`) in that of the
//! bridge, and removes them all when it has ended, however it has ended; a run that was killed with everything else leaves only
//! what the next start removes.

use super::{net, say};
use anyhow::{Context, Result, bail, ensure};
use rustix::fs::FlockOperation;
use rustix::process::{Pid, Signal, kill_process};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// One run at a time: names of namespaces are this program's.
const LOCK: &str = "/run/holdfast-atlas.lock";

/// In each directory that a run has made, and the next one may therefore empty.
const MARK: &str = "atlas-was-here";

const LOOK_PACE: Duration = Duration::from_millis(50);

/// Makes the namespaces, runs this program again inside, and removes them. True when the inner process was content.
pub fn outer(binary: &Path, dir: &Path) -> Result<bool> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "network namespaces are root's to make: run it as root, or with sudo"
    );
    let binary =
        std::fs::canonicalize(binary).with_context(|| format!("no program {}; `./x build`", binary.display()))?;
    let lock = std::fs::File::options().create(true).truncate(false).write(true).open(LOCK)?;
    if rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        bail!("another run is at work on this machine ({LOCK} is locked); wait for it");
    }
    // What an interrupt does the inner process decides; this one passes it on, waits for it, and cleans up.
    let stopped = interrupted()?;
    net::remove().context("what an earlier run has left can't be removed")?;
    let dir = make_dir(dir)?;
    net::make()?;
    let outcome = run_inner(&binary, &dir, &stopped);
    net::remove()?;
    if !outcome.as_ref().is_ok_and(|passed| *passed) {
        say(&format!("logs and devices are kept in {}", dir.display()));
        return outcome;
    }
    // Devices are large, and logs tell what there is to tell.
    for entry in std::fs::read_dir(&dir)?.flatten().filter(|entry| entry.path().is_dir()) {
        let _ = std::fs::remove_dir_all(entry.path().join("devices"));
    }
    outcome
}

/// A flag that an interrupt sets, rather than end the process.
pub fn interrupted() -> Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&flag))?;
    }
    Ok(flag)
}

fn run_inner(binary: &Path, dir: &Path, stopped: &AtomicBool) -> Result<bool> {
    let own = std::env::current_exe().context("cannot tell where this program is")?;
    let mut command = Command::new("ip");
    command.args(["netns", "exec", &net::namespace(net::HUB)]).arg(own);
    command.args(std::env::args_os().skip(1)).arg("--inside");
    command.arg("--binary").arg(binary).arg("--dir").arg(dir);
    let mut child = command.spawn().context("cannot start `ip`; is iproute2 installed? (`./x setup`)")?;
    let process = Pid::from_raw(child.id().cast_signed()).context("a child has an id")?;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status.success());
        }
        if stopped.swap(false, Ordering::Relaxed) {
            // A terminal's Ctrl-C reaches both, a signal to this process only this one. It may have ended meanwhile.
            let _ = kill_process(process, Signal::TERM);
        }
        std::thread::sleep(LOOK_PACE);
    }
}

/// An empty directory, marked as this program's.
fn make_dir(dir: &Path) -> Result<PathBuf> {
    let is_empty = std::fs::read_dir(dir).map_or(true, |mut entries| entries.next().is_none());
    if !is_empty {
        let shown = dir.display();
        ensure!(dir.join(MARK).exists(), "{shown} is not empty, and no run of this has made it: choose another --dir");
        std::fs::remove_dir_all(dir).with_context(|| format!("cannot empty {shown}"))?;
    }
    std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    std::fs::write(dir.join(MARK), b"a run over six machines has made this directory, and the next one empties it\n")?;
    Ok(std::fs::canonicalize(dir)?)
}
