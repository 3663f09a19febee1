//! A player that counts: every frame that is not ready when it is due is lost.
//!
//! ```text
//! volume ─nbdfuse─▶ file ─feeder, O_DIRECT─▶ ffmpeg ─raw frames─▶ reader ─12 frames─▶ screen
//! ```
//!
//! Each arrow holds little and blocks when full, so the film is read as it is shown: what lies between the volume and the
//! screen is the buffer of [`BUFFER_FRAMES`], [`FEED_BYTES`] in hand and two pipes. The screen takes frame n at
//! `start + n / 25 s` by its own clock, which never waits: a frame that comes later is thrown away and stays lost. Every
//! frame's checksum must be that of the same frame decoded from the local file.
//!
//! Faults: a failed read is an error and ends the film there; all frames that it would have shown are lost.

use super::super::stats::ns_to_ms;
use super::super::tools::Running;
use super::make::{BLOCK_BYTES, FRAME_BYTES, FRAMES_PER_SECOND, Film};
use anyhow::{Context, Result, bail};
use holdfast_base::crc32c;
use rustix::fs::OFlags;
use serde::Serialize;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Decoded frames that may wait for their time, the one in the reader's hand included.
pub const BUFFER_FRAMES: u64 = 12;

/// One read of the film: less than a frame.
const FEED_BYTES: usize = 32 << 10;

/// Of the pipe to the decoder; the kernel's default would hold another frame.
const FEED_PIPE_BYTES: usize = 16 << 10;

/// How long the first frames may take.
const START_TIME_MAX: Duration = Duration::from_secs(30);

/// The film is running once so many frames were due.
const START_FRAMES: u64 = 2 * FRAMES_PER_SECOND;

const COMPLAINT_BYTES_MAX: u64 = 4096;

/// How one film went.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Showing {
    pub film: String,
    pub frames: u64,
    pub shown: u64,
    /// Not ready when due.
    pub lost: u64,
    /// Not the frame that was recorded.
    pub artefacts: u64,
    pub errors: u64,
    pub first_lost: Option<u64>,
    /// Fewest frames ready when one was due, that one included.
    pub ready_min: u64,
    pub slowest_read_ms: f64,
    /// Frames that had been read but not shown, at most, once the film was running: few, or it was not read in real time.
    pub read_ahead_max: u64,
    pub troubles: Vec<String>,
    #[serde(skip)]
    pub first_lost_at: Option<Instant>,
}

/// Counts frames; knows neither clock nor decoder.
struct Screen<'a> {
    expected: &'a [u32],
    /// Index of the next frame to come out of the buffer.
    next: usize,
    showing: Showing,
}

impl<'a> Screen<'a> {
    fn new(film: &str, expected: &'a [u32]) -> Screen<'a> {
        let frames = expected.len() as u64;
        Screen {
            expected,
            next: 0,
            showing: Showing { film: film.to_string(), frames, ready_min: BUFFER_FRAMES, ..Showing::default() },
        }
    }

    /// Frame `due` must be shown now; `take` gives the next frame of the buffer, if one is ready.
    fn on_due(&mut self, due: usize, mut take: impl FnMut() -> Option<u32>) {
        while let Some(checksum) = take() {
            let frame = self.next;
            self.next += 1;
            self.showing.artefacts += u64::from(self.expected.get(frame) != Some(&checksum));
            if frame == due {
                self.showing.shown += 1;
                return;
            }
            assert!(frame < due, "frame {frame} was taken when {due} was due");
        }
        self.showing.lost += 1;
        self.showing.first_lost.get_or_insert(due as u64);
    }
}

/// What the threads of one player tell each other.
#[derive(Default)]
struct Shared {
    decoded: AtomicU64,
    fed_bytes: AtomicU64,
    slowest_read_ns: AtomicU64,
    read_errors: AtomicU64,
    /// The screen needs no more.
    over: AtomicBool,
}

pub struct Player {
    decoder: Running,
    shared: Arc<Shared>,
    screen: JoinHandle<Showing>,
    complaints: JoinHandle<String>,
}

fn decoder_command(input: &str) -> Command {
    let mut command = Command::new("ffmpeg");
    // One thread, so that no frames wait inside; no frame dropped or doubled to fit a rate.
    command.args(["-v", "error", "-nostdin", "-threads", "1", "-i", input, "-vsync", "passthrough"]);
    command.args(["-f", "rawvideo", "-pix_fmt", "yuv420p", "pipe:1"]);
    command.stdout(Stdio::piped());
    command
}

/// Checksums of all frames of a local film, decoded at once.
pub fn decode_all(path: &Path) -> Result<Vec<u32>> {
    let input = path.to_str().context("ffmpeg needs a path in UTF-8")?;
    let mut command = decoder_command(input);
    let mut decoder = Running::start(command.stdin(Stdio::null()))?;
    let mut frames = decoder.child.stdout.take().expect("standard output is piped");
    let mut checksums = Vec::new();
    while let Some(checksum) = next_frame(&mut frames).context("cannot read decoded frames")? {
        checksums.push(checksum);
    }
    let status = decoder.child.wait().context("cannot wait for ffmpeg")?;
    if !status.success() {
        bail!("ffmpeg cannot decode {} ({status})", path.display());
    }
    Ok(checksums)
}

/// `None` at the end, also if the last frame is cut off.
fn next_frame(frames: &mut impl Read) -> io::Result<Option<u32>> {
    let mut frame = vec![0; FRAME_BYTES];
    match frames.read_exact(&mut frame) {
        Ok(()) => Ok(Some(crc32c(&frame))),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        Err(error) => Err(error),
    }
}

impl Player {
    /// Plays the first `frames` frames of the film that `file` holds.
    pub fn start(film: &Film, file: &Path, frames: usize) -> Result<Player> {
        let source = OpenOptions::new()
            .read(true)
            .custom_flags(OFlags::DIRECT.bits() as i32)
            .open(file)
            .with_context(|| format!("cannot open {} past the page cache", file.display()))?;
        let mut decoder = Running::start(decoder_command("pipe:0").stdin(Stdio::piped()).stderr(Stdio::piped()))?;
        let stdin = decoder.child.stdin.take().expect("standard input is piped");
        let stdout = decoder.child.stdout.take().expect("standard output is piped");
        let stderr = decoder.child.stderr.take().expect("standard error is piped");
        rustix::pipe::fcntl_setpipe_size(&stdin, FEED_PIPE_BYTES).context("cannot shorten a pipe")?;

        let shared = Arc::new(Shared::default());
        let (feeder_shared, film_bytes) = (Arc::clone(&shared), film.bytes);
        // Never joined: it may be held by a read that ends only when the volume is unmounted.
        thread::spawn(move || feed(&source, film_bytes, stdin, &feeder_shared));
        let complaints = thread::spawn(move || {
            let mut text = String::new();
            // A decoder's complaint that is no text is no complaint to show.
            let _ = stderr.take(COMPLAINT_BYTES_MAX).read_to_string(&mut text);
            text.trim().to_string()
        });
        let (buffer, ready) = sync_channel(BUFFER_FRAMES as usize - 1);
        let reader_shared = Arc::clone(&shared);
        thread::spawn(move || read_frames(stdout, &reader_shared, |checksum| buffer.send(checksum).is_ok()));
        let (screen_shared, film) = (Arc::clone(&shared), film.clone());
        let screen = thread::spawn(move || show(&film, frames, &ready, &screen_shared));
        Ok(Player { decoder, shared, screen, complaints })
    }

    pub fn is_over(&self) -> bool {
        self.screen.is_finished()
    }

    /// How it went; what is not over by now counts as lost.
    pub fn finish(self) -> Result<Showing> {
        let Player { decoder, shared, screen, complaints } = self;
        shared.over.store(true, Ordering::SeqCst);
        let Ok(mut showing) = screen.join() else { bail!("a player's screen failed") };
        drop(decoder);
        let complaints = complaints.join().unwrap_or_default();
        showing.errors = shared.read_errors.load(Ordering::SeqCst);
        showing.slowest_read_ms = ns_to_ms(shared.slowest_read_ns.load(Ordering::SeqCst));
        if showing.errors > 0 {
            showing.troubles.push(format!("film {}: reading it failed", showing.film));
        }
        if showing.artefacts + showing.lost > 0 && !complaints.is_empty() {
            showing.troubles.push(format!("film {}: the decoder says: {complaints}", showing.film));
        }
        Ok(showing)
    }
}

/// Reads the film as the decoder takes it.
fn feed(source: &File, film_bytes: u64, mut decoder: ChildStdin, shared: &Shared) {
    let mut space = vec![0; FEED_BYTES + BLOCK_BYTES];
    let start = space.as_ptr().align_offset(BLOCK_BYTES);
    let chunk = &mut space[start..start + FEED_BYTES];
    let mut offset = 0;
    while offset < film_bytes && !shared.over.load(Ordering::SeqCst) {
        let begun = Instant::now();
        let result = source.read_at(chunk, offset);
        shared.slowest_read_ns.fetch_max(begun.elapsed().as_nanos() as u64, Ordering::SeqCst);
        let len = match result {
            Ok(len) if len > 0 => len.min((film_bytes - offset) as usize),
            _ => {
                // Once the screen is done the volume may be unmounted under a read.
                if !shared.over.load(Ordering::SeqCst) {
                    shared.read_errors.fetch_add(1, Ordering::SeqCst);
                }
                return;
            }
        };
        offset += len as u64;
        shared.fed_bytes.store(offset, Ordering::SeqCst);
        // The decoder is killed when the screen is done.
        if decoder.write_all(&chunk[..len]).is_err() {
            return;
        }
    }
}

fn read_frames(mut decoder: ChildStdout, shared: &Shared, mut send: impl FnMut(u32) -> bool) {
    while let Ok(Some(checksum)) = next_frame(&mut decoder) {
        shared.decoded.fetch_add(1, Ordering::SeqCst);
        if !send(checksum) {
            return;
        }
    }
}

/// The screen: waits for a full buffer, then for nothing but the clock.
fn show(film: &Film, frames: usize, ready: &Receiver<u32>, shared: &Shared) -> Showing {
    let mut screen = Screen::new(film.name, &film.checksums[..frames]);
    let begun = Instant::now();
    while shared.decoded.load(Ordering::SeqCst) < BUFFER_FRAMES && begun.elapsed() < START_TIME_MAX {
        if shared.over.load(Ordering::SeqCst) {
            break;
        }
        thread::sleep(Duration::from_millis(2));
    }
    let start = Instant::now();
    for due in 0..frames {
        let due_at = start + Duration::from_nanos(due as u64 * 1_000_000_000 / FRAMES_PER_SECOND);
        if !shared.over.load(Ordering::SeqCst) {
            thread::sleep(due_at.saturating_duration_since(Instant::now()));
        }
        let decoded = shared.decoded.load(Ordering::SeqCst);
        screen.on_due(due, || ready.try_recv().ok());
        let showing = &mut screen.showing;
        if showing.lost > 0 {
            showing.first_lost_at.get_or_insert_with(Instant::now);
        }
        // At the end there is nothing left to decode.
        if due + BUFFER_FRAMES as usize <= frames {
            showing.ready_min = showing.ready_min.min(decoded.saturating_sub(due as u64));
        }
        if due as u64 >= START_FRAMES {
            let fed_bytes = shared.fed_bytes.load(Ordering::SeqCst);
            let read = film.ends.partition_point(|end| *end <= fed_bytes) as u64;
            showing.read_ahead_max = showing.read_ahead_max.max(read.saturating_sub(due as u64));
        }
    }
    shared.over.store(true, Ordering::SeqCst);
    screen.showing
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    /// Plays 100 frames at 40 ms over a source that has frame n ready at `ready_ms(n)`, in order, with room for 12.
    fn play(ready_ms: impl Fn(u64) -> u64) -> Showing {
        let expected: Vec<u32> = (0..100).collect();
        let mut screen = Screen::new("scripted", &expected);
        let (mut buffer, mut next, mut last_ms) = (VecDeque::new(), 0, 0);
        for due in 0..100 {
            let now_ms = 1000 + due as u64 * 40;
            let mut take = || {
                while next < 100 && buffer.len() < BUFFER_FRAMES as usize && ready_ms(next).max(last_ms) <= now_ms {
                    last_ms = ready_ms(next).max(last_ms);
                    buffer.push_back(next as u32);
                    next += 1;
                }
                buffer.pop_front()
            };
            screen.on_due(due, &mut take);
        }
        screen.showing
    }

    #[test]
    fn frames_in_time_are_shown() {
        let showing = play(|n| 1000 + n * 40);
        assert_eq!((showing.shown, showing.lost, showing.artefacts), (100, 0, 0));
        assert_eq!(showing.first_lost, None);
    }

    #[test]
    fn a_stop_of_two_seconds_loses_what_was_due_in_it() {
        // The source is 12 frames ahead until frame 50, then stops for 2 s: 38 frames of 50 are lost.
        let showing = play(|n| if n < 50 { 1000 + n * 40 - 480 } else { 1000 + n * 40 - 480 + 2000 });
        assert_eq!(showing.first_lost, Some(50));
        assert_eq!((showing.shown, showing.lost, showing.artefacts), (50, 50, 0));
        // One that can catch up is on time again after the stop.
        let showing =
            play(|n| if n < 50 { 1000 + n * 40 - 480 } else { (1000 + 50 * 40 - 480 + 2000).max(1000 + n * 40 - 480) });
        assert_eq!((showing.shown, showing.lost, showing.artefacts), (62, 38, 0));
    }

    #[test]
    fn a_frame_one_millisecond_late_is_lost_and_the_next_is_not() {
        let showing = play(|n| if n == 7 { 1000 + 7 * 40 + 1 } else { 1000 + n * 40 });
        assert_eq!((showing.shown, showing.lost, showing.first_lost), (99, 1, Some(7)));
    }

    #[test]
    fn a_film_that_ends_early_loses_the_rest() {
        let showing = play(|n| if n < 40 { 1000 + n * 40 } else { u64::MAX });
        assert_eq!((showing.shown, showing.lost), (40, 60));
    }

    #[test]
    fn a_frame_that_differs_is_an_artefact() {
        let expected = [10, 11, 12];
        let mut screen = Screen::new("scripted", &expected);
        let mut frames = vec![10, 99, 12].into_iter();
        for due in 0..3 {
            screen.on_due(due, || frames.next());
        }
        assert_eq!((screen.showing.shown, screen.showing.artefacts), (3, 1));
    }
}
