//! A volume shown as a file by nbdfuse, unmounted again whatever happens.

use super::super::tools::{Running, sleep};
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// nbdfuse connects and mounts within milliseconds.
const MOUNT_TIME_MAX: Duration = Duration::from_secs(20);

/// How long nbdfuse may take to end once it is unmounted.
const END_TIME_MAX: Duration = Duration::from_secs(5);

pub struct Mount {
    dir: PathBuf,
    file: PathBuf,
    running: Running,
}

impl Mount {
    /// Shows the export of `uri` as a read-only file under `parent`.
    pub fn open(uri: &str, parent: &Path, name: &str) -> Result<Mount> {
        let dir = parent.join(format!("mount-{name}"));
        fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        let file = dir.join(format!("{name}.mp4"));
        let log_path = parent.join(format!("nbdfuse-{name}.log"));
        let log = fs::File::create(&log_path).with_context(|| format!("cannot create {}", log_path.display()))?;
        let mut command = Command::new("nbdfuse");
        command.arg("-r").arg(&file).arg(uri).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let mut mount = Mount { dir, file, running: Running::start(&mut command)? };
        let deadline = Instant::now() + MOUNT_TIME_MAX;
        while fs::metadata(&mount.file).is_err() {
            if let Some(status) = mount.running.is_over()? {
                let words = fs::read_to_string(&log_path).unwrap_or_default();
                bail!("nbdfuse cannot show {uri} as a file ({status}): {}", words.trim());
            }
            if Instant::now() >= deadline {
                bail!("nbdfuse did not show {uri} as a file within {} s", MOUNT_TIME_MAX.as_secs());
            }
            sleep(Duration::from_millis(20))?;
        }
        Ok(mount)
    }

    pub fn file(&self) -> &Path {
        &self.file
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let unmount = |flag: &str| {
            let mut command = Command::new("fusermount3");
            command.arg(flag).arg(&self.dir).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            command.status().is_ok_and(|status| status.success())
        };
        // In use, or held by a server that does not answer: at least its name goes.
        if !unmount("-u") {
            unmount("-uz");
        }
        let deadline = Instant::now() + END_TIME_MAX;
        while self.running.is_over().is_ok_and(|over| over.is_none()) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
