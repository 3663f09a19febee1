//! Processes by their ids: signalled, looked at, waited for.

use anyhow::{Context, Result, ensure};
pub use rustix::process::Signal;
use rustix::process::{Pid, kill_process};
use std::path::Path;
use std::time::{Duration, Instant};

/// How long a process may outlive its SIGKILL.
const GONE_MAX: Duration = Duration::from_secs(10);

const LOOK_PACE: Duration = Duration::from_millis(5);

/// Sends a signal.
pub fn signal(pid: u32, signal: Signal) -> Result<()> {
    let process = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let process = process.with_context(|| format!("{pid} is no process"))?;
    kill_process(process, signal).with_context(|| format!("cannot signal process {pid}"))
}

/// Ends all of them at once, and waits until they are gone.
pub fn kill(pids: &[u32]) -> Result<()> {
    pids.iter().try_for_each(|pid| signal(*pid, Signal::KILL))?;
    pids.iter().try_for_each(|pid| wait_gone(*pid))
}

/// Waits until a killed process is gone.
pub fn wait_gone(pid: u32) -> Result<()> {
    let since = Instant::now();
    while is_alive(pid) {
        ensure!(since.elapsed() < GONE_MAX, "process {pid} outlives its SIGKILL by {GONE_MAX:?}");
        std::thread::sleep(LOOK_PACE);
    }
    Ok(())
}

/// True while the process runs; one that only waits to be reaped does not.
pub fn is_alive(pid: u32) -> bool {
    state(pid).is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

/// True while it is stopped in mid-air.
pub fn is_hung(pid: u32) -> bool {
    state(pid) == Some('T')
}

fn state(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

/// True while it runs and its command line has this directory as a word.
pub fn is_of(pid: u32, dir: &Path) -> bool {
    let Ok(line) = std::fs::read(format!("/proc/{pid}/cmdline")) else { return false };
    let dir = dir.to_string_lossy();
    String::from_utf8_lossy(&line).split('\0').any(|word| word == dir) && is_alive(pid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_process_is_hung_goes_on_and_is_killed() {
        let mut child = Command::new("sleep").arg("600").spawn().expect("sleep runs");
        let pid = child.id();
        signal(pid, Signal::STOP).expect("stopped");
        let since = Instant::now();
        while !is_hung(pid) {
            assert!(since.elapsed() < GONE_MAX, "it is still not hung");
        }
        signal(pid, Signal::CONT).expect("goes on");
        kill(&[pid]).expect("killed, if not reaped");
        assert!(!is_alive(pid) && !is_hung(pid));
        child.wait().expect("reaped");
        assert!(is_alive(std::process::id()) && signal(0, Signal::CONT).is_err());
    }
}
