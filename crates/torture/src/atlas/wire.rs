//! A wire between a machine and the bridge that passes frames late, or in one direction only.
//!
//! Role: two threads a direction, one that takes frames and one that gives them when they are due. Frames keep what the kernel
//! says of them (checksums still to be made, segments still to be cut), since both ends speak in the same way.
//!
//! Limits: [`FRAMES_MAX`] frames wait in a direction; more are lost, as in any switch.

use anyhow::{Context, Result};
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A second of a thousand frames a millisecond would be more: what waits here is bounded by TCP long before.
const FRAMES_MAX: usize = 16_384;

/// A frame of 64 KiB that the card is to cut, and what the kernel says of it.
const FRAME_BYTES_MAX: usize = 70_000;

/// Pace of looking whether the wire is to end.
const LOOK_PACE: Duration = Duration::from_millis(50);

/// What becomes of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Passage {
    /// Passes in both directions, after this time.
    Late(Duration),
    /// What is sent to the machine is lost.
    Deaf,
    /// What the machine sends is lost.
    Mute,
}

impl Passage {
    /// How long a frame takes; none where it does not pass.
    fn delay(self, to_machine: bool) -> Option<Duration> {
        match (self, to_machine) {
            (Passage::Late(time), _) => Some(time),
            (Passage::Deaf, true) | (Passage::Mute, false) => None,
            _ => Some(Duration::ZERO),
        }
    }
}

pub struct Wire {
    ends: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Wire {
    /// Begins to pass frames between the two devices.
    pub fn begin(machine: &Path, bridge: &Path, passage: Passage) -> Result<Wire> {
        let ends = Arc::new(AtomicBool::new(false));
        let mut wire = Wire { ends: Arc::clone(&ends), threads: Vec::new() };
        let (machine, bridge) = (Arc::new(open(machine)?), Arc::new(open(bridge)?));
        let directions = [(&machine, &bridge, false), (&bridge, &machine, true)];
        for (from, to, to_machine) in directions.map(|(f, t, is)| (Arc::clone(f), Arc::clone(t), is)) {
            let (sender, frames) = mpsc::sync_channel(FRAMES_MAX);
            let (ends_too, delay) = (Arc::clone(&ends), passage.delay(to_machine));
            let takes = move || take(&from, delay, &sender, &ends_too);
            wire.threads.push(std::thread::Builder::new().name("wire-take".into()).spawn(takes)?);
            let gives = move || give(&to, &frames);
            wire.threads.push(std::thread::Builder::new().name("wire-give".into()).spawn(gives)?);
        }
        Ok(wire)
    }

    /// Stops, and closes both devices.
    pub fn end(self) {
        self.ends.store(true, Ordering::Relaxed);
        for thread in self.threads {
            // A thread that panicked has said so itself.
            let _ = thread.join();
        }
    }
}

fn open(path: &Path) -> Result<File> {
    let file = File::options().read(true).write(true).open(path);
    let file = file.with_context(|| format!("cannot open the interface's device {}", path.display()))?;
    rustix::io::ioctl_fionbio(&file, true).context("cannot have it not wait")?;
    Ok(file)
}

/// Takes frames, and says when each is due. Without a delay they are read and forgotten.
fn take(from: &File, delay: Option<Duration>, frames: &mpsc::SyncSender<(Instant, Vec<u8>)>, ends: &AtomicBool) {
    let mut buffer = vec![0; FRAME_BYTES_MAX];
    let wait = rustix::event::Timespec { tv_sec: 0, tv_nsec: LOOK_PACE.subsec_nanos().into() };
    while !ends.load(Ordering::Relaxed) {
        let mut polled = [rustix::event::PollFd::new(from, rustix::event::PollFlags::IN)];
        if rustix::event::poll(&mut polled, Some(&wait)).is_ok_and(|count| count == 0) {
            continue;
        }
        let mut reader = from;
        match (reader.read(&mut buffer), delay) {
            (Ok(len), Some(delay)) => {
                // A full queue loses frames.
                let _ = frames.try_send((Instant::now() + delay, buffer[..len].to_vec()));
            }
            (Ok(_), None) => {}
            // Nothing there, or the interface is down for the moment.
            (Err(_), _) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// Gives frames when they are due, until no more can come.
fn give(to: &File, frames: &mpsc::Receiver<(Instant, Vec<u8>)>) {
    let mut writer = to;
    loop {
        match frames.recv_timeout(LOOK_PACE) {
            Ok((due, frame)) => {
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
                // What can't be sent is lost.
                let _ = writer.write(&frame);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}
