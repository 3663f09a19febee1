//! What the machine itself did meanwhile: a grid on one machine stands still whenever the machine does, and whoever
//! reads a drill's figures has to know.
//!
//! A thread sleeps for [`PERIOD`] and then writes 4 KiB durably to a file beside the grid's devices, over and over. How much
//! too late it woke up, and how long a write took, at most, is what no grid on this machine could have avoided.

use super::stats::ns_to_ms;
use anyhow::{Context, Result};
use rustix::fs::OFlags;
use serde::Serialize;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Short enough to see any pause that a drill would blame on the grid, long enough to cost nothing.
const PERIOD: Duration = Duration::from_millis(50);

const WRITE_BYTES: usize = 4096;

#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct Machine {
    /// A thread that slept woke up this much too late, at most.
    pub pause_max_ms: f64,
    /// The slowest durable write of 4 KiB.
    pub durable_write_max_ms: f64,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    pause_ns: AtomicU64,
    write_ns: AtomicU64,
}

/// The thread that watches, from its start until it is dropped.
pub struct Watch {
    shared: Arc<Shared>,
}

impl Watch {
    pub fn start(dir: &Path) -> Result<Watch> {
        let path = dir.join("machine.probe");
        let file = OpenOptions::new()
            .create(true)
            .truncate(true)
            .write(true)
            .custom_flags(OFlags::DSYNC.bits() as i32)
            .open(&path)
            .with_context(|| format!("cannot create {}; check space and permissions", path.display()))?;
        let shared = Arc::new(Shared::default());
        let watched = Arc::clone(&shared);
        // Never joined: it ends within a period and a write.
        thread::spawn(move || watch(&file, &watched));
        Ok(Watch { shared })
    }

    pub fn seen(&self) -> Machine {
        Machine {
            pause_max_ms: ns_to_ms(self.shared.pause_ns.load(Ordering::SeqCst)),
            durable_write_max_ms: ns_to_ms(self.shared.write_ns.load(Ordering::SeqCst)),
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
    }
}

fn watch(file: &File, shared: &Shared) {
    let block = [0x5a; WRITE_BYTES];
    let mut is_first = true;
    while !shared.stop.load(Ordering::SeqCst) {
        let slept = Instant::now();
        thread::sleep(PERIOD);
        let late = slept.elapsed().saturating_sub(PERIOD);
        shared.pause_ns.fetch_max(late.as_nanos() as u64, Ordering::SeqCst);
        let begun = Instant::now();
        // A disk that is full says nothing about speed; the grid's own devices are allocated already.
        if file.write_all_at(&block, 0).is_ok() && !is_first {
            shared.write_ns.fetch_max(begun.elapsed().as_nanos() as u64, Ordering::SeqCst);
        }
        // The first write allocates; the others overwrite, as the grid's do.
        is_first = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_sees_pauses_and_writes() {
        let temp = tempfile::tempdir().unwrap();
        let watch = Watch::start(temp.path()).unwrap();
        let until = Instant::now() + Duration::from_secs(60);
        let mut seen = watch.seen();
        while seen.pause_max_ms == 0.0 || seen.durable_write_max_ms == 0.0 {
            assert!(Instant::now() < until, "{seen:?}");
            thread::sleep(PERIOD);
            seen = watch.seen();
        }
    }
}
