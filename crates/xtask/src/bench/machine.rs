//! What the kernel tells of this machine and of one process, and signals by process id.

use anyhow::{Context, Result, bail};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Ticks of all processors so far.
#[derive(Clone, Copy)]
pub struct Ticks {
    busy: u64,
    all: u64,
}

impl Ticks {
    pub fn now() -> Result<Ticks> {
        let text = std::fs::read_to_string("/proc/stat").context("cannot read /proc/stat")?;
        let line = text.lines().next().unwrap_or_default();
        let values: Vec<u64> = line.split_whitespace().skip(1).filter_map(|v| v.parse().ok()).collect();
        // user, nice, system, idle, iowait, irq, softirq, steal; guests' time is in the first two.
        let all: u64 = values.iter().take(8).sum();
        let idle: u64 = values.iter().skip(3).take(2).sum();
        Ok(Ticks { busy: all - idle, all })
    }

    /// Part of the time since `before` in which processors had work, whoever's.
    pub fn busy_since(self, before: Ticks) -> f64 {
        (self.busy - before.busy) as f64 / (self.all - before.all).max(1) as f64
    }
}

pub fn cores() -> f64 {
    std::thread::available_parallelism().map_or(1.0, |n| n.get() as f64)
}

pub fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64)
}

/// `VmRSS` or `VmHWM`.
pub fn memory_mib(pid: u64, which: &str) -> Result<f64> {
    let path = format!("/proc/{pid}/status");
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let line = text.lines().find_map(|l| l.strip_prefix(which)?.strip_prefix(':'));
    let kib = line.and_then(|l| l.split_whitespace().next()?.parse::<f64>().ok());
    Ok(kib.with_context(|| format!("{path} has no {which}"))? / 1024.0)
}

pub fn kill_hard(pid: u64) -> Result<()> {
    signal(pid, "KILL")
}

/// By the signal's name, without `SIG`.
pub fn signal(pid: u64, name: &str) -> Result<()> {
    let status = Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status();
    if !status.context("cannot start kill")?.success() {
        bail!("cannot send {name} to process {pid}");
    }
    Ok(())
}

/// Whether it has been stopped in mid-air.
pub fn is_hung(pid: u64) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
}

/// Until a killed process has let go of its files.
pub fn wait_gone(pid: u64) -> Result<()> {
    const GONE_WITHIN: Duration = Duration::from_secs(10);
    let since = Instant::now();
    while std::path::Path::new(&format!("/proc/{pid}/fd/0")).exists() {
        if since.elapsed() > GONE_WITHIN {
            bail!("process {pid} outlives its SIGKILL by {} s", GONE_WITHIN.as_secs());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}
