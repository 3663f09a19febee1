//! What fio wrote last to every block, and whether a block read back is that.
//!
//! fio's job logs every request before it issues it (`write_iolog`), and each 8 KiB that it writes starts with a header
//! (`verify=crc32c`): the block's address, the time of issue, the low 16 bits of the write's number within the job, a
//! checksum of the header and one of the data. Writes to one block never overlap in time (`serialize_overlap`), and all
//! writes of a job that ended without errors were acknowledged. So the last logged write of a block is its only right
//! content, an older one is a lost acknowledged write, and header and log together tell them apart: the number must be
//! the logged one, and since it wraps around every 65,536 writes, the times must agree too. fio's two clocks start at
//! different moments; their difference is the same for all writes of a job and is taken as the median over the blocks.
//!
//! Invariants: (1) a block is right only if its address, number, time and both checksums are; (2) a block that nobody
//! wrote is all zeroes.

use crate::nbd_client::Client;
use anyhow::{Context, Result, bail};
use holdfast_base::crc32c;
use serde::Serialize;
use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

/// Bytes that carry one header: fio's `verify_interval`, and the smallest request of the drill's loads.
pub const BLOCK_BYTES: u64 = 8 << 10;

const HEADER_MAGIC: u16 = 0xacca;
const HEADER_CHECKED_BYTES: usize = 36;
const HEADER_BYTES: usize = 44;

/// How far the clocks' difference of one block may be from the median. fio takes both times while it issues a request,
/// so only its own pauses tell them apart; 65,536 writes take longer than this at any rate seen.
const CLOCK_TOLERANCE_US: i64 = 1_000_000;

/// Requests in flight while everything is read back.
const SCAN_DEPTH: usize = 4;

/// Flaws that are described in full; the others are counted.
const EXAMPLES_MAX: usize = 8;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct LastWrite {
    /// Which job, counted from 1; 0 says that none wrote the block.
    job: u32,
    number: u64,
    at_us: i64,
}

const NEVER: LastWrite = LastWrite { job: 0, number: 0, at_us: 0 };

/// The last write of every block.
#[derive(Clone, Debug)]
pub struct History {
    blocks: Vec<LastWrite>,
    jobs: u32,
}

/// Why a block is not what was acknowledged last.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flaw {
    /// No header where one was written, or data where none was.
    Foreign,
    Misplaced {
        found: u64,
    },
    Damaged,
    /// An older write of the block, or one that never was.
    Stale {
        found: u16,
        expected: u16,
    },
    /// The number of the right write, at another time: older by a multiple of 65,536 writes.
    StaleByTime,
}

impl fmt::Display for Flaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Flaw::Foreign => write!(f, "is nothing that was ever written there"),
            Flaw::Misplaced { found } => write!(f, "holds what was written at byte {found}"),
            Flaw::Damaged => write!(f, "fails its checksum"),
            Flaw::Stale { found, expected } => {
                write!(f, "holds write {found} (modulo 65536), but write {expected} was acknowledged last")
            }
            Flaw::StaleByTime => write!(f, "holds a write from another time than the last acknowledged one"),
        }
    }
}

/// What reading everything back gave.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Verdict {
    pub blocks: u64,
    pub mismatches: u64,
    /// Reads that failed.
    pub errors: u64,
    pub examples: Vec<String>,
}

impl Verdict {
    fn note(&mut self, text: String) {
        if self.examples.len() < EXAMPLES_MAX {
            self.examples.push(text);
        }
    }

    fn flaw(&mut self, offset: u64, flaw: Flaw) {
        self.mismatches += 1;
        self.note(format!("the block at byte {offset} {flaw}"));
    }

    pub fn add(&mut self, other: Verdict) {
        self.blocks += other.blocks;
        self.mismatches += other.mismatches;
        self.errors += other.errors;
        for text in other.examples {
            self.note(text);
        }
    }
}

impl History {
    /// Of a volume's first `size_bytes`, to which nothing was written yet.
    pub fn new(size_bytes: u64) -> History {
        assert!(size_bytes.is_multiple_of(BLOCK_BYTES), "{size_bytes} bytes are not whole blocks");
        History { blocks: vec![NEVER; (size_bytes / BLOCK_BYTES) as usize], jobs: 0 }
    }

    pub fn size_bytes(&self) -> u64 {
        self.blocks.len() as u64 * BLOCK_BYTES
    }

    /// Takes in the log of one more job. Jobs are given in the order in which they ran.
    pub fn add_job(&mut self, iolog: &Path) -> Result<()> {
        let file = File::open(iolog).with_context(|| format!("cannot open fio's log {}", iolog.display()))?;
        self.add_lines(BufReader::new(file)).with_context(|| format!("in fio's log {}", iolog.display()))
    }

    fn add_lines(&mut self, mut lines: impl BufRead) -> Result<()> {
        self.jobs += 1;
        let mut number = 0;
        let mut line = String::new();
        if lines.read_line(&mut line)? > 0 && line.trim() != "fio version 3 iolog" {
            bail!("unknown form `{}`; the drill reads fio 3.30 and newer", line.trim());
        }
        loop {
            line.clear();
            if lines.read_line(&mut line)? == 0 {
                return Ok(());
            }
            let Some((at_us, offset, len)) = parse_write(&line)? else { continue };
            if !offset.is_multiple_of(BLOCK_BYTES)
                || !len.is_multiple_of(BLOCK_BYTES)
                || offset + len > self.size_bytes()
            {
                bail!("a write of {len} bytes at {offset} is no part of the drill's job");
            }
            let first = (offset / BLOCK_BYTES) as usize;
            let last = LastWrite { job: self.jobs, number, at_us };
            self.blocks[first..first + (len / BLOCK_BYTES) as usize].fill(last);
            number += 1;
        }
    }

    /// Reads everything back.
    pub fn verify(&self, client: &mut Client) -> Result<Verdict> {
        let mut check = Check::new(self);
        client
            .scan(0..self.size_bytes(), SCAN_DEPTH, |offset, data| match data {
                Ok(data) => check.take(offset, data),
                Err(error) => {
                    check.verdict.errors += 1;
                    check.verdict.note(format!("the read at byte {offset} failed: {error}"));
                }
            })
            .context("the volume cannot be read back")?;
        Ok(check.finish())
    }
}

/// `(time, offset, length)` of a line that logs a write; `None` for every other line.
fn parse_write(line: &str) -> Result<Option<(i64, u64, u64)>> {
    let fields: Vec<&str> = line.split_ascii_whitespace().collect();
    let [at, _file, "write", offset, len] = fields[..] else { return Ok(None) };
    let parse = || Some((at.parse().ok()?, offset.parse().ok()?, len.parse().ok()?));
    parse().map(Some).with_context(|| format!("the line `{}` cannot be read", line.trim()))
}

/// One reading back, in any order of blocks.
struct Check<'a> {
    history: &'a History,
    verdict: Verdict,
    /// By job: each good block's address and the difference of its clocks.
    clocks: Vec<Vec<(u64, i64)>>,
}

impl<'a> Check<'a> {
    fn new(history: &'a History) -> Check<'a> {
        Check { history, verdict: Verdict::default(), clocks: vec![Vec::new(); history.jobs as usize + 1] }
    }

    fn take(&mut self, offset: u64, data: &[u8]) {
        for (index, block) in data.chunks(BLOCK_BYTES as usize).enumerate() {
            let offset = offset + index as u64 * BLOCK_BYTES;
            let last = self.history.blocks[(offset / BLOCK_BYTES) as usize];
            self.verdict.blocks += 1;
            match check_block(offset, block, last) {
                Ok(Some(issued_us)) => self.clocks[last.job as usize].push((offset, issued_us - last.at_us)),
                Ok(None) => {}
                Err(flaw) => self.verdict.flaw(offset, flaw),
            }
        }
    }

    fn finish(mut self) -> Verdict {
        for mut clocks in std::mem::take(&mut self.clocks) {
            if clocks.is_empty() {
                continue;
            }
            let middle = clocks.len() / 2;
            let median = clocks.select_nth_unstable_by_key(middle, |c| c.1).1.1;
            for (offset, difference) in clocks {
                if (difference - median).abs() > CLOCK_TOLERANCE_US {
                    self.verdict.flaw(offset, Flaw::StaleByTime);
                }
            }
        }
        self.verdict
    }
}

/// fio leaves out the final inversion of CRC32C.
fn fio_crc32c(bytes: &[u8]) -> u32 {
    !crc32c(bytes)
}

/// Checks all but the time, which is returned, in microseconds of fio's monotonic clock.
fn check_block(offset: u64, block: &[u8], last: LastWrite) -> Result<Option<i64>, Flaw> {
    if last == NEVER {
        return if block.iter().all(|byte| *byte == 0) { Ok(None) } else { Err(Flaw::Foreign) };
    }
    let u16_at = |at: usize| u16::from_le_bytes(block[at..at + 2].try_into().expect("two bytes"));
    let u32_at = |at: usize| u32::from_le_bytes(block[at..at + 4].try_into().expect("four bytes"));
    let u64_at = |at: usize| u64::from_le_bytes(block[at..at + 8].try_into().expect("eight bytes"));
    if u16_at(0) != HEADER_MAGIC {
        return Err(Flaw::Foreign);
    }
    let header_crc = fio_crc32c(&block[..HEADER_CHECKED_BYTES]);
    if u64::from(u32_at(4)) != BLOCK_BYTES
        || header_crc != u32_at(36)
        || fio_crc32c(&block[HEADER_BYTES..]) != u32_at(40)
    {
        return Err(Flaw::Damaged);
    }
    if u64_at(16) != offset {
        return Err(Flaw::Misplaced { found: u64_at(16) });
    }
    let (found, expected) = (u16_at(34), last.number as u16);
    if found != expected {
        return Err(Flaw::Stale { found, expected });
    }
    Ok(Some(i64::from(u32_at(24)) * 1_000_000 + i64::from(u32_at(28)) / 1000))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A block as fio writes it: job started at 500 s on the header's clock.
    fn written(offset: u64, number: u16, at_us: i64) -> Vec<u8> {
        let mut block: Vec<u8> = (0..BLOCK_BYTES).map(|i| (i as u8).wrapping_mul(31) ^ number as u8).collect();
        let issued_us = 500_000_000 + at_us;
        block[0..2].copy_from_slice(&HEADER_MAGIC.to_le_bytes());
        block[2..4].copy_from_slice(&5_u16.to_le_bytes());
        block[4..8].copy_from_slice(&(BLOCK_BYTES as u32).to_le_bytes());
        block[16..24].copy_from_slice(&offset.to_le_bytes());
        block[24..28].copy_from_slice(&((issued_us / 1_000_000) as u32).to_le_bytes());
        block[28..32].copy_from_slice(&((issued_us % 1_000_000 * 1000) as u32).to_le_bytes());
        block[32..34].copy_from_slice(&1_u16.to_le_bytes());
        block[34..36].copy_from_slice(&number.to_le_bytes());
        let crc = fio_crc32c(&block[..HEADER_CHECKED_BYTES]);
        block[36..40].copy_from_slice(&crc.to_le_bytes());
        let crc = fio_crc32c(&block[HEADER_BYTES..]);
        block[40..44].copy_from_slice(&crc.to_le_bytes());
        block
    }

    fn history() -> History {
        let mut history = History::new(8 * BLOCK_BYTES);
        let fill = "fio version 3 iolog\n21 f add\n30 f open\n100 f write 0 49152\n90000 f close\n";
        let run = "fio version 3 iolog\n21 f add\n30 f open\n200 f read 0 8192\n300 f write 8192 8192\n\
                   9000 f write 16384 8192\n9500000 f write 8192 8192\n9600000 f close\n";
        history.add_lines(fill.as_bytes()).unwrap();
        history.add_lines(run.as_bytes()).unwrap();
        history
    }

    fn verdict_with(change: impl Fn(&mut Vec<Vec<u8>>)) -> Verdict {
        let at = |i: u64| i * BLOCK_BYTES;
        let mut blocks = vec![
            written(at(0), 0, 150),
            written(at(1), 2, 9_500_040),
            written(at(2), 1, 9040),
            written(at(3), 0, 150),
            written(at(4), 0, 150),
            written(at(5), 0, 150),
            vec![0; BLOCK_BYTES as usize],
            vec![0; BLOCK_BYTES as usize],
        ];
        change(&mut blocks);
        let history = history();
        let mut check = Check::new(&history);
        // In any order: the second half first.
        check.take(4 * BLOCK_BYTES, &blocks[4..].concat());
        check.take(0, &blocks[..4].concat());
        check.finish()
    }

    #[test]
    fn what_was_written_last_is_accepted() {
        assert_eq!(verdict_with(|_| ()), Verdict { blocks: 8, ..Verdict::default() });
    }

    #[test]
    fn every_flaw_is_found() {
        let at = |i: u64| i * BLOCK_BYTES;
        type Change = Box<dyn Fn(&mut Vec<Vec<u8>>)>;
        let changes: Vec<(&str, Change)> = vec![
            ("an acknowledged write lost", Box::new(move |b| b[1] = written(at(1), 0, 300))),
            ("the fill came back", Box::new(move |b| b[2] = written(at(2), 0, 150))),
            ("older by 65,536 writes", Box::new(move |b| b[1] = written(at(1), 2, 7_000_000))),
            ("another block's data", Box::new(move |b| b[3] = written(at(4), 0, 150))),
            ("one bit of data", Box::new(|b| b[4][5000] ^= 4)),
            ("one bit of the header", Box::new(|b| b[4][30] ^= 4)),
            ("two halves", Box::new(move |b| b[1][4096..].copy_from_slice(&written(at(1), 0, 300)[4096..]))),
            ("zeroes", Box::new(|b| b[5].fill(0))),
            ("data where none was written", Box::new(move |b| b[6] = written(at(6), 0, 150))),
        ];
        for (what, change) in changes {
            let verdict = verdict_with(change);
            assert_eq!((verdict.mismatches, verdict.errors), (1, 0), "{what}: {verdict:?}");
            assert_eq!(verdict.examples.len(), 1, "{what}");
        }
    }

    #[test]
    fn logs_that_are_not_ours_are_refused() {
        for text in [
            "fio version 2 iolog\n",
            "fio version 3 iolog\n1 f write 0 512\n",
            "fio version 3 iolog\n1 f write 0 999999999\n",
            "fio version 3 iolog\n1 f write x 8192\n",
        ] {
            assert!(History::new(8 * BLOCK_BYTES).add_lines(text.as_bytes()).is_err(), "{text}");
        }
    }
}
