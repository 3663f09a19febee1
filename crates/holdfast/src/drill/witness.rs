//! A slow writer beside the load that knows at every moment what every one of its blocks must hold.
//!
//! fio proves what the volume holds in the end. The witness proves what it answers meanwhile: one request at a time over
//! a connection of its own, to the volume's last [`REGION_BYTES`], it overwrites random blocks with (address, version,
//! checksum, filling) and reads random blocks back, which must hold exactly the last version that was acknowledged.
//!
//! Several of them, each with a region of its own, are a load themselves ([`Manner`]): one that outlives its connection.
//!
//! Limits: [`RATE`] requests a second, so that it takes nothing worth mentioning from a load beside.
//! Faults: a request that failed is an error; what a failed write left is then unknown, and either version is accepted. One
//! whose connection broke is sent again over another, as long as the witness is patient: so do guests' drivers.

use super::rejoin::unix_ms;
use super::stats::{Completion, ns_to_ms};
use crate::nbd_client::Client;
use anyhow::{Context, Result};
use holdfast_base::{Prng, crc32c};
use serde::Serialize;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// What a witness writes to: beside a load the end of the volume, which that leaves to it.
pub const REGION_BYTES: u64 = 16 << 20;

const BLOCK_BYTES: usize = 8 << 10;
const RATE: u64 = 100;
const MAGIC: u64 = 0x486f_6c64_6661_7374;
const HEADER_BYTES: usize = 28;

/// How long it waits before it tries a broken connection anew.
const RETRY_DELAY: Duration = Duration::from_millis(500);

/// The same of one that is patient.
const RETRY_PACE: Duration = Duration::from_millis(50);

const EXAMPLES_MAX: usize = 4;

/// What the witness saw.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Testimony {
    pub writes: u64,
    pub reads: u64,
    pub errors: u64,
    pub mismatches: u64,
    /// How often a request went on over another connection.
    pub reconnections: u64,
    pub read_max_ms: f64,
    pub write_max_ms: f64,
    pub examples: Vec<String>,
}

/// How a witness goes about it.
#[derive(Clone)]
pub struct Manner {
    /// Requests a second.
    pub rate: u64,
    /// For how long a request is sent again whose connection broke.
    pub patience: Duration,
    /// Where each request is written down that ended well.
    pub completions: Option<Arc<Mutex<Vec<Completion>>>>,
}

impl Manner {
    /// Of one beside a load that breaks with its connection, too.
    pub const BESIDE: Manner = Manner { rate: RATE, patience: Duration::ZERO, completions: None };
}

impl Testimony {
    /// What another one saw, too.
    pub fn add(&mut self, other: Testimony) {
        self.writes += other.writes;
        self.reads += other.reads;
        self.errors += other.errors;
        self.mismatches += other.mismatches;
        self.reconnections += other.reconnections;
        self.read_max_ms = self.read_max_ms.max(other.read_max_ms);
        self.write_max_ms = self.write_max_ms.max(other.write_max_ms);
        other.examples.into_iter().for_each(|text| self.note(text));
    }

    fn note(&mut self, text: String) {
        if self.examples.len() < EXAMPLES_MAX {
            self.examples.push(text);
        }
    }
}

/// What a block may hold: the last acknowledged version, or that of a later write which failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Known {
    acknowledged: u64,
    attempted: u64,
}

/// Versions of all blocks and what was seen; does no I/O.
struct Notebook {
    prng: Prng,
    blocks: Vec<Known>,
    base: u64,
    testimony: Testimony,
}

enum Step {
    Write { index: usize, version: u64 },
    Read { index: usize },
}

impl Notebook {
    fn new(base: u64, seed: u64) -> Notebook {
        let count = REGION_BYTES as usize / BLOCK_BYTES;
        Notebook { prng: Prng::new(seed), blocks: vec![Known::default(); count], base, testimony: Testimony::default() }
    }

    fn offset(&self, index: usize) -> u64 {
        self.base + (index * BLOCK_BYTES) as u64
    }

    fn next(&mut self) -> Step {
        // A small hot part, so that blocks are overwritten again and again and read soon after.
        let hot = self.prng.chance(500);
        let range = if hot { self.blocks.len() as u64 / 16 } else { self.blocks.len() as u64 };
        let index = self.prng.below(range) as usize;
        if self.prng.chance(500) {
            self.blocks[index].attempted += 1;
            Step::Write { index, version: self.blocks[index].attempted }
        } else {
            Step::Read { index }
        }
    }

    fn on_written(&mut self, index: usize, version: u64) {
        self.testimony.writes += 1;
        self.blocks[index].acknowledged = version;
    }

    fn on_read(&mut self, index: usize, data: &[u8]) {
        self.testimony.reads += 1;
        let (offset, known) = (self.offset(index), self.blocks[index]);
        match decode(offset, data) {
            Ok(version) if (known.acknowledged..=known.attempted).contains(&version) => {}
            Ok(version) => {
                self.testimony.mismatches += 1;
                let expected = known.acknowledged;
                self.testimony.note(format!(
                    "the block at byte {offset} held version {version} when {expected} had been acknowledged"
                ));
            }
            Err(what) => {
                self.testimony.mismatches += 1;
                self.testimony.note(format!("the block at byte {offset} {what}"));
            }
        }
    }

    fn on_error(&mut self, what: &str, error: &io::Error) {
        self.testimony.errors += 1;
        self.testimony.note(format!("{what}: {error}"));
    }
}

/// A block of `version` at `offset`; version 0 is a block never written.
fn encode(offset: u64, version: u64) -> Vec<u8> {
    let mut block = vec![0; BLOCK_BYTES];
    block[0..8].copy_from_slice(&MAGIC.to_le_bytes());
    block[8..16].copy_from_slice(&offset.to_le_bytes());
    block[16..24].copy_from_slice(&version.to_le_bytes());
    Prng::new(offset ^ version.rotate_left(32)).fill(&mut block[HEADER_BYTES..]);
    let crc = block_crc(&block);
    block[24..28].copy_from_slice(&crc.to_le_bytes());
    block
}

fn block_crc(block: &[u8]) -> u32 {
    crc32c(&block[..24]) ^ crc32c(&block[HEADER_BYTES..]).rotate_left(1)
}

/// The version that a block holds, or what is wrong with it.
fn decode(offset: u64, block: &[u8]) -> std::result::Result<u64, String> {
    if block.iter().all(|byte| *byte == 0) {
        return Ok(0);
    }
    let u64_at = |at: usize| u64::from_le_bytes(block[at..at + 8].try_into().expect("eight bytes"));
    if u64_at(0) != MAGIC {
        return Err("is nothing that the witness ever wrote".to_string());
    }
    if block_crc(block).to_le_bytes() != block[24..28] {
        return Err("fails its checksum".to_string());
    }
    if u64_at(8) != offset {
        return Err(format!("holds what was written at byte {}", u64_at(8)));
    }
    Ok(u64_at(16))
}

/// The witness's thread.
pub struct Witness {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Testimony>>,
}

impl Witness {
    /// Starts to write to the region of a volume from `base` on, which nobody has written to.
    pub fn start(socket: PathBuf, volume: String, base: u64, seed: u64, manner: Manner) -> Result<Witness> {
        let client = Client::connect(&socket, &volume).context("the witness cannot connect to the volume")?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let period = Duration::from_micros(1_000_000 / manner.rate);
            let mut session = Session { client: Some(client), socket, volume, manner, is_new: false };
            let mut notebook = Notebook::new(base, seed);
            let mut due = Instant::now();
            while !stopped.load(Ordering::SeqCst) {
                due = (due + period).max(Instant::now());
                thread::sleep(due.saturating_duration_since(Instant::now()));
                step(&mut notebook, &mut session);
            }
            read_all(&mut notebook, &mut session);
            notebook.testimony
        });
        Ok(Witness { stop, thread: Some(thread) })
    }

    /// Ends it after it has read all its blocks once more.
    pub fn finish(mut self) -> Testimony {
        self.stop.store(true, Ordering::SeqCst);
        let thread = self.thread.take().expect("only finishing takes the thread");
        thread.join().expect("the witness does not panic")
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        // Not waited for: it ends with its current request.
        self.stop.store(true, Ordering::SeqCst);
    }
}

/// The witness's way to the volume.
struct Session {
    client: Option<Client>,
    socket: PathBuf,
    volume: String,
    manner: Manner,
    /// A connection was made anew, and no request has been counted for that.
    is_new: bool,
}

/// The server has answered, and refuses; any other error is the connection's.
fn is_refusal(error: &io::Error) -> bool {
    // What the protocol knows besides ESHUTDOWN, with which a server says good-bye.
    const ERRORS: [i32; 7] = [1, 5, 12, 22, 28, 75, 95];
    error.raw_os_error().is_some_and(|errno| ERRORS.contains(&errno))
}

impl Session {
    /// The connection, made anew if the last request broke it.
    fn connected(&mut self) -> io::Result<&mut Client> {
        if self.client.is_none() {
            self.client = Some(Client::connect(&self.socket, &self.volume)?);
            self.is_new = true;
        }
        Ok(self.client.as_mut().expect("just seen"))
    }

    fn ask<T>(&mut self, mut request: impl FnMut(&mut Client) -> io::Result<T>) -> io::Result<T> {
        let end = Instant::now() + self.manner.patience;
        loop {
            let error = match self.connected().and_then(&mut request) {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            // An error reply leaves the connection whole, but a time-out or a reset doesn't, and a new one costs nothing.
            self.client = None;
            if is_refusal(&error) || Instant::now() >= end {
                return Err(error);
            }
            thread::sleep(RETRY_PACE);
        }
    }
}

fn step(notebook: &mut Notebook, session: &mut Session) {
    let begun = Instant::now();
    let (is_write, result) = match notebook.next() {
        Step::Write { index, version } => {
            let offset = notebook.offset(index);
            let block = encode(offset, version);
            let result = session.ask(|client| client.write(offset, &block));
            (true, result.map(|()| notebook.on_written(index, version)))
        }
        Step::Read { index } => {
            let offset = notebook.offset(index);
            let mut block = vec![0; BLOCK_BYTES];
            let result = session.ask(|client| client.read(offset, &mut block));
            (false, result.map(|()| notebook.on_read(index, &block)))
        }
    };
    let latency_ns = begun.elapsed().as_nanos() as u64;
    let testimony = &mut notebook.testimony;
    testimony.reconnections += u64::from(std::mem::take(&mut session.is_new));
    let slowest = if is_write { &mut testimony.write_max_ms } else { &mut testimony.read_max_ms };
    *slowest = slowest.max(ns_to_ms(latency_ns));
    match (result, &session.manner.completions) {
        (Ok(()), Some(completions)) => {
            let completion = Completion { at_ms: unix_ms(), latency_ns, is_write };
            completions.lock().unwrap_or_else(PoisonError::into_inner).push(completion);
        }
        (Ok(()), None) => {}
        (Err(error), _) => {
            let what = if is_write { "a write of the witness failed" } else { "a read of the witness failed" };
            notebook.on_error(what, &error);
            if session.connected().is_err() {
                thread::sleep(RETRY_DELAY);
            }
        }
    }
}

fn read_all(notebook: &mut Notebook, session: &mut Session) {
    for index in 0..notebook.blocks.len() {
        let offset = notebook.offset(index);
        let mut block = vec![0; BLOCK_BYTES];
        match session.ask(|client| client.read(offset, &mut block)) {
            Ok(()) => notebook.on_read(index, &block),
            Err(error) => {
                notebook.on_error("the witness cannot read its blocks back", &error);
                if session.connected().is_err() {
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notebook_with_two_versions() -> Notebook {
        let mut notebook = Notebook::new(4096 * 100, 1);
        notebook.blocks[3].attempted = 2;
        notebook.on_written(3, 2);
        notebook
    }

    #[test]
    fn the_acknowledged_version_is_the_only_right_one() {
        let mut notebook = notebook_with_two_versions();
        let offset = notebook.offset(3);
        notebook.on_read(3, &encode(offset, 2));
        notebook.on_read(4, &[0; BLOCK_BYTES]);
        assert_eq!(notebook.testimony.mismatches, 0);
        let mut torn = encode(offset, 2);
        torn[4096..].copy_from_slice(&encode(offset, 1)[4096..]);
        let wrong = [encode(offset, 1), encode(offset, 3), encode(offset + 8192, 2), torn, vec![0; BLOCK_BYTES]];
        for (i, block) in wrong.iter().enumerate() {
            notebook.on_read(3, block);
            assert_eq!(notebook.testimony.mismatches, i as u64 + 1, "case {i}");
        }
        assert_eq!(notebook.testimony.examples.len(), EXAMPLES_MAX);
    }

    #[test]
    fn what_a_server_refuses_is_told_from_a_connection_that_broke() {
        for errno in [1, 5, 28] {
            assert!(is_refusal(&io::Error::from_raw_os_error(errno)), "{errno}");
        }
        // No such socket, a broken pipe, a reset, a server that is shutting down, nobody who listens.
        for errno in [2, 32, 104, 108, 111] {
            assert!(!is_refusal(&io::Error::from_raw_os_error(errno)), "{errno}");
        }
        assert!(!is_refusal(&io::Error::other("the NBD server refuses")));
    }

    #[test]
    fn a_failed_write_may_or_may_not_have_happened() {
        let mut notebook = notebook_with_two_versions();
        notebook.blocks[3].attempted = 3;
        let offset = notebook.offset(3);
        for version in [2, 3] {
            notebook.on_read(3, &encode(offset, version));
        }
        assert_eq!(notebook.testimony.mismatches, 0);
        notebook.on_read(3, &encode(offset, 1));
        assert_eq!(notebook.testimony.mismatches, 1);
    }
}
