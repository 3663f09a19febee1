//! The proof that the player counts: over a server that is stopped for two seconds it must lose frames.
//!
//! The server is `qemu-nbd` over the film's plain file, so that nothing of the grid takes part. (The drop counters of mpv
//! and of ffmpeg stay at zero through such a stop: they count what the decoder or the display drops, and neither
//! notices that its input came late.)

use super::super::tools::{Running, sleep, sleep_until};
use super::make::{FRAMES_PER_SECOND, Film};
use super::mount::Mount;
use super::player::Player;
use crate::nbd_uri::of_socket;
use anyhow::{Context, Result, bail};
use rustix::process::Signal;
use serde::Serialize;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How much of the film is played.
pub const SECONDS: u64 = 8;

/// When the server stops, and for how long.
const STOP_AFTER: Duration = Duration::from_secs(3);
pub const STOP: Duration = Duration::from_secs(2);

const START_TIME_MAX: Duration = Duration::from_secs(10);

/// What the player counted.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Proof {
    pub stopped_s: f64,
    pub frames: u64,
    pub lost: u64,
    /// Frames were lost before the stop.
    pub lost_early: bool,
    pub artefacts: u64,
    pub errors: u64,
}

impl Proof {
    /// Frames were lost, and only because of the stop.
    pub fn counts(&self) -> bool {
        self.lost > 0 && !self.lost_early && self.artefacts == 0 && self.errors == 0
    }
}

pub fn run(film: &Film, work: &Path) -> Result<Proof> {
    let socket = work.join("proof.sock");
    let mut command = Command::new("qemu-nbd");
    command.args(["--read-only", "--persistent", "--format=raw", "--shared=8", "--export-name=film", "--socket"]);
    command.arg(&socket).arg(&film.path).stdin(Stdio::null()).stdout(Stdio::null());
    let mut server = Running::start(&mut command)?;
    let deadline = Instant::now() + START_TIME_MAX;
    while !socket.exists() {
        if Instant::now() >= deadline || server.is_over()?.is_some() {
            bail!("qemu-nbd does not serve {}", film.path.display());
        }
        sleep(Duration::from_millis(20))?;
    }
    let mount = Mount::open(&of_socket(&socket, "film"), work, "proof")?;
    let player = Player::start(film, mount.file(), (SECONDS * FRAMES_PER_SECOND) as usize)?;
    let begun = Instant::now();
    sleep_until(begun + STOP_AFTER)?;
    let stopped = Instant::now();
    server.signal(Signal::STOP)?;
    let slept = sleep(STOP);
    server.signal(Signal::CONT).context("the stopped server cannot be resumed")?;
    let stopped_s = stopped.elapsed().as_secs_f64();
    slept?;
    while !player.is_over() {
        sleep(Duration::from_millis(50))?;
    }
    let showing = player.finish()?;
    let lost_early = showing.first_lost_at.is_some_and(|at| at < stopped);
    Ok(Proof {
        stopped_s,
        frames: showing.frames,
        lost_early,
        lost: showing.lost,
        artefacts: showing.artefacts,
        errors: showing.errors,
    })
}
