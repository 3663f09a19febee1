//! What a process of a local grid does before it serves.

use anyhow::{Context, Result};
use std::time::{Duration, Instant};

/// How long what a killed process held may still be taken: the kernel ends its operations in flight first.
const PREDECESSOR_MAX: Duration = Duration::from_secs(3);

const PACE: Duration = Duration::from_millis(10);

/// With `--daemon`: leaves the session of whoever started it, so that closing a terminal does not end the grid.
pub fn begin(is_daemon: bool) -> Result<()> {
    if is_daemon {
        rustix::process::setsid().context("cannot leave the terminal's session")?;
    }
    Ok(())
}

/// Repeats `attempt` for a while where it failed because something is in use: a process that has just been killed lets
/// go of its files and ports a little after it is gone.
pub fn outwait<T, E>(mut attempt: impl FnMut() -> Result<T, E>, is_in_use: impl Fn(&E) -> bool) -> Result<T, E> {
    let end = Instant::now() + PREDECESSOR_MAX;
    loop {
        match attempt() {
            Err(error) if is_in_use(&error) && Instant::now() < end => std::thread::sleep(PACE),
            other => return other,
        }
    }
}
