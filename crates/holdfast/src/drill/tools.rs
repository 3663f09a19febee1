//! The programs that a drill starts, and how it ends: children die with it, an interrupt is noticed between steps.
//!
//! Role: finding programs, children that are always reaped, the interrupt flag, a directory that is removed again.

use anyhow::{Context, Result, bail};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

/// A program and the Debian package that brings it.
#[derive(Clone, Copy, Debug)]
pub struct Tool {
    pub program: &'static str,
    pub package: &'static str,
}

pub const FIO: Tool = Tool { program: "fio", package: "fio" };
pub const FFMPEG: Tool = Tool { program: "ffmpeg", package: "ffmpeg" };
pub const FFPROBE: Tool = Tool { program: "ffprobe", package: "ffmpeg" };
pub const NBDFUSE: Tool = Tool { program: "nbdfuse", package: "libnbd-bin" };
pub const FUSERMOUNT: Tool = Tool { program: "fusermount3", package: "fuse3" };
pub const QEMU_NBD: Tool = Tool { program: "qemu-nbd", package: "qemu-utils" };

/// How often a waiting drill looks whether it was interrupted.
const INTERRUPT_POLL: Duration = Duration::from_millis(50);

/// Refuses, with what to type, if a program is missing.
pub fn require(tools: &[Tool]) -> Result<()> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let dirs: Vec<PathBuf> = std::env::split_paths(&path).collect();
    let missing: Vec<Tool> = tools.iter().copied().filter(|tool| !is_in(&dirs, tool.program)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let programs: Vec<&str> = missing.iter().map(|tool| tool.program).collect();
    let mut packages: Vec<&str> = missing.iter().map(|tool| tool.package).collect();
    packages.dedup();
    bail!(
        "this needs {}, which PATH does not have; run `./x setup` in the source tree, or install by hand: \
         apt-get install {}",
        programs.join(", "),
        packages.join(" ")
    );
}

fn is_in(dirs: &[PathBuf], program: &str) -> bool {
    dirs.iter().any(|dir| {
        fs::metadata(dir.join(program)).is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
    })
}

static INTERRUPTED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// From here on the first SIGINT or SIGTERM only sets a flag, which [`check_interrupt`] reads; the second one kills.
pub fn catch_interrupts() -> Result<()> {
    let flag = INTERRUPTED.get_or_init(Arc::default);
    for signal in [SIGINT, SIGTERM] {
        // In this order: the first one finds the flag unset, and then sets it.
        flag::register_conditional_default(signal, Arc::clone(flag)).context("cannot watch for interrupts")?;
        flag::register(signal, Arc::clone(flag)).context("cannot watch for interrupts")?;
    }
    Ok(())
}

/// Ends the drill, through its clean-up, once somebody asked for that.
pub fn check_interrupt() -> Result<()> {
    if INTERRUPTED.get().is_some_and(|flag| flag.load(Ordering::SeqCst)) {
        bail!("interrupted; what had been started was stopped and removed");
    }
    Ok(())
}

pub fn sleep(time: Duration) -> Result<()> {
    sleep_until(Instant::now() + time)
}

pub fn sleep_until(deadline: Instant) -> Result<()> {
    loop {
        check_interrupt()?;
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        thread::sleep(left.min(INTERRUPT_POLL));
    }
}

/// A child of ours: killed, if it still runs, and reaped when dropped.
pub struct Running {
    program: String,
    pub child: Child,
}

impl Running {
    pub fn start(command: &mut Command) -> Result<Running> {
        let program = command.get_program().to_string_lossy().into_owned();
        let child = command.spawn().with_context(|| format!("cannot start {program}"))?;
        Ok(Running { program, child })
    }

    pub fn is_over(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().with_context(|| format!("cannot wait for {}", self.program))
    }

    /// Waits for the end of a child that needs at most `time`.
    pub fn wait_at_most(&mut self, time: Duration) -> Result<ExitStatus> {
        let deadline = Instant::now() + time;
        loop {
            if let Some(status) = self.is_over()? {
                return Ok(status);
            }
            if Instant::now() >= deadline {
                bail!("{} did not end within {} s of when it had to", self.program, time.as_secs());
            }
            sleep(Duration::from_millis(10))?;
        }
    }

    /// Sends a signal to a child that has not been reaped, so that its id can't be another's.
    pub fn signal(&mut self, signal: rustix::process::Signal) -> Result<()> {
        if self.is_over()?.is_some() {
            bail!("{} has ended by itself", self.program);
        }
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).with_context(|| format!("cannot signal {}", self.program))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Both fail only for a child that is gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs a command to its end for its standard output; an error carries what it complained about.
pub fn output_of(command: &mut Command) -> Result<Vec<u8>> {
    let program = command.get_program().to_string_lossy().into_owned();
    let mut running = Running::start(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()))?;
    let mut complaints = running.child.stderr.take().expect("standard error is piped");
    let listener = thread::spawn(move || {
        let mut text = Vec::new();
        // A lost complaint is no reason to fail.
        let _ = complaints.read_to_end(&mut text);
        String::from_utf8_lossy(&text).trim().to_string()
    });
    let mut output = Vec::new();
    let mut stdout = running.child.stdout.take().expect("standard output is piped");
    stdout.read_to_end(&mut output).with_context(|| format!("cannot read what {program} prints"))?;
    let status = running.child.wait().with_context(|| format!("cannot wait for {program}"))?;
    let complaints = listener.join().unwrap_or_default();
    if !status.success() {
        bail!("{program} failed ({status}): {complaints}");
    }
    Ok(output)
}

/// A directory for logs, sockets and mount points, removed when dropped unless it is to be kept.
pub struct WorkDir {
    path: PathBuf,
    keep: bool,
}

impl WorkDir {
    pub fn create(parent: &Path, keep: bool) -> Result<WorkDir> {
        let path = parent.join(format!("drill-{}", std::process::id()));
        fs::create_dir_all(&path).with_context(|| format!("cannot create {}", path.display()))?;
        Ok(WorkDir { path, keep })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for WorkDir {
    fn drop(&mut self) {
        if !self.keep {
            // What can't be removed (a mount that hangs) is left for the user to see.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_tool_names_its_package_and_the_set_up() {
        assert!(require(&[Tool { program: "sh", package: "dash" }]).is_ok());
        let text = require(&[Tool { program: "no-such-tool", package: "some-package" }]).unwrap_err().to_string();
        assert!(text.contains("no-such-tool") && text.contains("some-package") && text.contains("./x setup"), "{text}");
    }

    #[test]
    fn failures_of_a_command_carry_its_words() {
        assert_eq!(output_of(Command::new("sh").args(["-c", "echo fine"])).unwrap(), b"fine\n");
        let error = output_of(Command::new("sh").args(["-c", "echo broken >&2; exit 3"])).unwrap_err().to_string();
        assert!(error.contains("broken") && error.contains('3'), "{error}");
    }

    #[test]
    fn a_child_dies_with_its_owner() {
        let running = Running::start(Command::new("sleep").arg("100")).unwrap();
        let pid = running.child.id();
        drop(running);
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
    }
}
