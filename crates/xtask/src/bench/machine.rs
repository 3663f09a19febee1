//! Times, processors and memory, as the kernel tells them.

use anyhow::{Context, Result};
use std::time::{SystemTime, UNIX_EPOCH};

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
pub fn memory_mib(pid: u32, which: &str) -> Result<f64> {
    let path = format!("/proc/{pid}/status");
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let line = text.lines().find_map(|l| l.strip_prefix(which)?.strip_prefix(':'));
    let kib = line.and_then(|l| l.split_whitespace().next()?.parse::<f64>().ok());
    Ok(kib.with_context(|| format!("{path} has no {which}"))? / 1024.0)
}
