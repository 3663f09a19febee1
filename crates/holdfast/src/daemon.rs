//! What a process of a local grid does before it serves.

use anyhow::{Context, Result};

/// With `--daemon`: leaves the session of whoever started it, so that closing a terminal does not end the grid.
pub fn begin(is_daemon: bool) -> Result<()> {
    if is_daemon {
        rustix::process::setsid().context("cannot leave the terminal's session")?;
    }
    Ok(())
}
