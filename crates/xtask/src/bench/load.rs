//! fio in the background while something happens to the grid, with a log of every request.

use super::fio;
use super::grid::Grid;
use super::latency::{self, Completion};
use anyhow::{Context, Result, bail};
use holdfast_lab::process::{self, Signal};
use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// What a job may take to start, and to end after its time or after it was told to.
const PATIENCE: Duration = Duration::from_secs(60);

/// Ended with its process when it is dropped.
pub struct Load {
    child: Child,
    name: String,
    log: PathBuf,
    complaints: PathBuf,
}

impl Drop for Load {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Load {
    /// Returns when clients of the volume are connected.
    pub fn start(grid: &Grid, volume: &str, size_mib: u64, job: &[&str], seconds: u64) -> Result<Load> {
        let name = format!("load-{volume}");
        let complaints = grid.around().join(format!("{name}.err"));
        let mut command = fio::command(size_mib);
        // One process, so that none is left behind. Without the larger io_size fio begins again with the same numbers.
        command.args(["--thread=1", "--io_size=1000T", "--log_unix_epoch=1", "--disable_slat=1", "--disable_clat=1"]);
        command.arg(format!("--write_lat_log={name}")).args(fio::nbd(&grid.uri(volume))).args(job);
        command.args(fio::timed(seconds)).current_dir(grid.around()).stdin(Stdio::null()).stdout(Stdio::null());
        let child = command.stderr(File::create(&complaints)?).spawn().context("cannot start fio")?;
        let log = grid.around().join(format!("{name}_lat.1.log"));
        let load = Load { child, name, log, complaints };
        let since = Instant::now();
        while grid.volume(volume)?["sessions"].as_u64() == Some(0) {
            if since.elapsed() > PATIENCE {
                bail!("{} did not connect", load.name);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(load)
    }

    pub fn is_running(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }

    /// Waits for the end of its time.
    pub fn finish(mut self) -> Result<Vec<Completion>> {
        let Some(status) = self.wait()? else { bail!("{} did not end in time", self.name) };
        if !status.success() {
            let said = std::fs::read_to_string(&self.complaints).unwrap_or_default();
            bail!("{} failed ({status}): {}", self.name, said.trim());
        }
        latency::read_log(&self.log)
    }

    /// Ends it before its time, in good order.
    pub fn stop(mut self) -> Result<Vec<Completion>> {
        if self.is_running()? {
            process::signal(self.child.id(), Signal::INT)?;
        }
        // fio's status tells of the signal, too.
        if self.wait()?.is_none() {
            bail!("{} did not end when told to", self.name);
        }
        latency::read_log(&self.log)
    }

    fn wait(&mut self) -> Result<Option<ExitStatus>> {
        let since = Instant::now();
        while since.elapsed() < PATIENCE {
            if let Some(status) = self.child.try_wait()? {
                return Ok(Some(status));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(None)
    }
}
