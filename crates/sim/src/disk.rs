//! A simulated disk: 512-byte sectors, a volatile cache, and every way in which disks fail.
//!
//! Role: the world submits reads, writes and discards for a node's device and asks for their outcome when their time has
//! come. Bytes change when an operation completes; a crash leaves any subset of the sectors of writes in flight, and of
//! sectors that were written but never made durable, either old or new.
//!
//! Faults: torn, lost and misdirected writes, bit rot, unreadable sectors, failing reads and writes, a slow disk, a disk
//! that answers nothing for a while or fails everything for a while, a single write that takes long while later ones overtake it.

use holdfast_base::{Buf, BufMut, Instant, MediaClass, Prng};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

pub const SECTOR_BYTES: usize = 512;

/// Bytes of one lazily allocated piece of the medium.
const CHUNK_BYTES: usize = 4096;

type Chunk = Box<[u8; CHUNK_BYTES]>;
type Sector = [u8; SECTOR_BYTES];

/// How often single operations fail, per mille.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskFaults {
    /// A read fails, and its first sector stays unreadable until it is written.
    pub read_error: u32,
    /// A write fails; any subset of its sectors is written.
    pub write_error: u32,
    /// A write below the limit in [`Disk::silent_from`] is exempt from the two silent faults.
    pub lost_write: u32,
    pub misdirected_write: u32,
}

/// What a crash does to the sectors that a completed write left in the disk's cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Crash {
    /// The process dies; the disk keeps its power and its cache.
    Process,
    /// The cache is gone, sector by sector, except for what the disk had written out by itself.
    Power,
}

#[derive(Clone, Debug)]
pub enum DiskOp {
    Read {
        offset: u64,
        len: u32,
    },
    Write {
        offset: u64,
        data: Vec<Buf>,
        durable: bool,
    },
    /// Everything in the cache goes to the medium.
    Flush,
}

/// Why an operation failed, as the node's shell would report it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IoError;

/// One disk of one node.
pub struct Disk {
    size_bytes: u64,
    chunks: Vec<Option<Chunk>>,
    /// Sectors whose current bytes are only in the cache, with the bytes that the medium has.
    cached: BTreeMap<u64, Sector>,
    unreadable: BTreeSet<u64>,
    in_flight: BTreeMap<u64, DiskOp>,
    next_op: u64,
    prng: Prng,
    /// As the node's shell finds it to be.
    pub media: Option<MediaClass>,
    pub faults: DiskFaults,
    /// Silent faults of writes strike only from this offset on.
    pub silent_from: u64,
    /// Latencies are multiplied by this.
    pub slowness: u32,
    /// What passes in a second, one operation after the other: who asks for little waits behind who asks for much.
    pub bytes_per_second: Option<u64>,
    /// By what was asked for so far.
    busy_until: Instant,
    pub stuck_until: Instant,
    /// Until then everything fails: a path is switched, a bus is reset.
    pub failing_until: Instant,
    /// The next write to tables or journal is not done before this; those after it are not held up.
    pub straggle_until: Option<Instant>,
    /// When tables or journal were written last.
    pub journal_written_at: Instant,
    /// Whether the disk was damaged silently in this run.
    pub silently_damaged: bool,
}

impl Disk {
    pub fn new(size_bytes: u64, prng: Prng) -> Disk {
        assert!(size_bytes.is_multiple_of(CHUNK_BYTES as u64), "a disk of {size_bytes} bytes is not whole chunks");
        let chunk_count = (size_bytes / CHUNK_BYTES as u64) as usize;
        Disk {
            size_bytes,
            chunks: std::iter::repeat_with(|| None).take(chunk_count).collect(),
            cached: BTreeMap::new(),
            unreadable: BTreeSet::new(),
            in_flight: BTreeMap::new(),
            next_op: 0,
            prng,
            media: None,
            faults: DiskFaults::default(),
            silent_from: 0,
            slowness: 1,
            bytes_per_second: None,
            busy_until: Instant::ZERO,
            stuck_until: Instant::ZERO,
            failing_until: Instant::ZERO,
            straggle_until: None,
            journal_written_at: Instant::ZERO,
            silently_damaged: false,
        }
    }

    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Takes an operation; its outcome is due at the returned instant under the returned name.
    pub fn submit(&mut self, now: Instant, op: DiskOp) -> (u64, Instant) {
        let is_journal = matches!(&op, DiskOp::Write { offset, .. } if *offset < self.silent_from);
        let (base_us, len) = match &op {
            DiskOp::Read { offset, len } => {
                self.check_range(*offset, u64::from(*len));
                (60, u64::from(*len))
            }
            DiskOp::Write { offset, data, durable } => {
                let len = data.iter().map(|b| b.len() as u64).sum();
                self.check_range(*offset, len);
                (if *durable { 120 } else { 30 }, len)
            }
            DiskOp::Flush => (200, 0),
        };
        // One byte a nanosecond, and a jitter as large as the base, so that completions overtake each other.
        let nanos = (base_us * 1000 + self.prng.below(base_us * 1000) + len) * u64::from(self.slowness);
        let mut due = now + Duration::from_nanos(nanos);
        if let Some(rate) = self.bytes_per_second {
            self.busy_until = self.busy_until.max(now) + Duration::from_nanos(len * 1_000_000_000 / rate);
            due = due.max(self.busy_until);
        }
        if self.stuck_until > now {
            due = due.max(self.stuck_until + Duration::from_nanos(self.prng.below(200_000)));
        }
        if is_journal {
            self.journal_written_at = now;
            due = due.max(self.straggle_until.take().unwrap_or(due));
        }
        let id = self.next_op;
        self.next_op += 1;
        self.in_flight.insert(id, op);
        (id, due)
    }

    /// Nothing is in flight.
    pub fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// Operations that it has taken and not done yet.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    fn check_range(&self, offset: u64, len: u64) {
        assert!(
            offset.is_multiple_of(SECTOR_BYTES as u64) && len.is_multiple_of(SECTOR_BYTES as u64) && len > 0,
            "direct I/O of {len} bytes at {offset} is not aligned to sectors"
        );
        assert!(offset + len <= self.size_bytes, "I/O of {len} bytes at {offset} beyond {} bytes", self.size_bytes);
    }

    /// When the operation's outcome is due after all: `None` now, or later, since the disk got stuck meanwhile.
    pub fn postponed(&mut self, now: Instant) -> Option<Instant> {
        (self.stuck_until > now).then(|| self.stuck_until + Duration::from_nanos(self.prng.below(200_000)))
    }

    /// Carries the operation out; `None` where a crash took it away.
    pub fn complete(&mut self, now: Instant, id: u64) -> Option<Result<Buf, IoError>> {
        let op = self.in_flight.remove(&id)?;
        if self.failing_until > now {
            match op {
                DiskOp::Read { .. } => {}
                DiskOp::Write { offset, data, .. } => self.write_torn(offset, &data),
                DiskOp::Flush => self.lose_cached(),
            }
            return Some(Err(IoError));
        }
        Some(match op {
            DiskOp::Read { offset, len } => self.complete_read(offset, len),
            DiskOp::Write { offset, data, durable } => self.complete_write(offset, &data, durable),
            DiskOp::Flush => {
                self.cached.clear();
                Ok(Buf::empty())
            }
        })
    }

    fn complete_read(&mut self, offset: u64, len: u32) -> Result<Buf, IoError> {
        if self.faults.read_error > 0 && self.prng.chance(self.faults.read_error) {
            self.unreadable.insert(offset / SECTOR_BYTES as u64);
        }
        let (first, end) = sectors(offset, u64::from(len));
        if self.unreadable.range(first..end).next().is_some() {
            return Err(IoError);
        }
        Ok(self.peek(offset, len as usize))
    }

    /// The bytes that a read would see now, without faults.
    pub fn peek(&self, offset: u64, len: usize) -> Buf {
        let mut buf = BufMut::new(len);
        let mut done = 0;
        while done < len {
            let at = offset as usize + done;
            let in_chunk = at % CHUNK_BYTES;
            let count = (CHUNK_BYTES - in_chunk).min(len - done);
            let target = &mut buf[done..done + count];
            match &self.chunks[at / CHUNK_BYTES] {
                Some(chunk) => target.copy_from_slice(&chunk[in_chunk..in_chunk + count]),
                None => target.fill(0),
            }
            done += count;
        }
        buf.freeze()
    }

    /// The first sector that is as asked for.
    pub fn find_sector(&self, is_wanted: impl Fn(&[u8]) -> bool) -> Option<u64> {
        let chunks = self.chunks.iter().enumerate().filter_map(|(at, chunk)| Some((at, chunk.as_ref()?)));
        let sectors = chunks.flat_map(|(at, chunk)| {
            let first = (at * CHUNK_BYTES / SECTOR_BYTES) as u64;
            (first..).zip(chunk.chunks_exact(SECTOR_BYTES))
        });
        sectors.into_iter().find(|(_, bytes)| is_wanted(bytes)).map(|(sector, _)| sector)
    }

    fn complete_write(&mut self, offset: u64, data: &[Buf], durable: bool) -> Result<Buf, IoError> {
        let faults = self.faults;
        if faults.write_error > 0 && self.prng.chance(faults.write_error) {
            self.write_torn(offset, data);
            return Err(IoError);
        }
        let silent = offset >= self.silent_from && faults.lost_write + faults.misdirected_write > 0;
        if silent && self.prng.chance(faults.lost_write) {
            self.silently_damaged = true;
            return Ok(Buf::empty());
        }
        if silent && self.prng.chance(faults.misdirected_write) {
            let len: u64 = data.iter().map(|b| b.len() as u64).sum();
            let places = (self.size_bytes - self.silent_from - len) / CHUNK_BYTES as u64;
            let elsewhere = self.silent_from + self.prng.below(places + 1) * CHUNK_BYTES as u64;
            self.silently_damaged = true;
            self.write_all(elsewhere, data, durable);
            return Ok(Buf::empty());
        }
        self.write_all(offset, data, durable);
        Ok(Buf::empty())
    }

    fn write_all(&mut self, offset: u64, data: &[Buf], durable: bool) {
        let len: u64 = data.iter().map(|b| b.len() as u64).sum();
        let (first, end) = sectors(offset, len);
        if durable {
            if !self.cached.is_empty() {
                self.cached.retain(|s, _| *s < first || *s >= end);
            }
        } else {
            for sector in first..end {
                if !self.cached.contains_key(&sector) {
                    let old = self.sector(sector);
                    self.cached.insert(sector, old);
                }
            }
        }
        if !self.unreadable.is_empty() {
            self.unreadable.retain(|s| *s < first || *s >= end);
        }
        let mut at = offset as usize;
        for buf in data {
            self.put(at, buf);
            at += buf.len();
        }
    }

    fn put(&mut self, offset: usize, bytes: &[u8]) {
        let mut done = 0;
        while done < bytes.len() {
            let at = offset + done;
            let in_chunk = at % CHUNK_BYTES;
            let count = (CHUNK_BYTES - in_chunk).min(bytes.len() - done);
            let chunk = self.chunks[at / CHUNK_BYTES].get_or_insert_with(|| Box::new([0; CHUNK_BYTES]));
            chunk[in_chunk..in_chunk + count].copy_from_slice(&bytes[done..done + count]);
            done += count;
        }
    }

    fn sector(&self, sector: u64) -> Sector {
        let at = sector as usize * SECTOR_BYTES;
        let in_chunk = at % CHUNK_BYTES;
        match &self.chunks[at / CHUNK_BYTES] {
            Some(chunk) => chunk[in_chunk..in_chunk + SECTOR_BYTES].try_into().expect("a sector's length"),
            None => [0; SECTOR_BYTES],
        }
    }

    /// Writes any subset of the sectors: each by the toss of a coin, or a prefix, or all or none.
    fn write_torn(&mut self, offset: u64, data: &[Buf]) {
        let bytes = holdfast_base::buf::concat(data);
        let count = bytes.len() / SECTOR_BYTES;
        let prefix = match self.prng.below(4) {
            0 => Some(0),
            1 => Some(count),
            2 => Some(self.prng.below(count as u64 + 1) as usize),
            _ => None,
        };
        for i in 0..count {
            if prefix.map_or_else(|| self.prng.chance(500), |p| i < p) {
                let part = bytes.slice(i * SECTOR_BYTES..(i + 1) * SECTOR_BYTES);
                self.write_all(offset + (i * SECTOR_BYTES) as u64, &[part], true);
            }
        }
    }

    /// Advice that takes effect at once: the range reads as zeroes.
    pub fn discard(&mut self, offset: u64, len: u64) {
        let (first, end) = (offset.div_ceil(CHUNK_BYTES as u64), (offset + len) / CHUNK_BYTES as u64);
        self.cached.retain(|s, _| *s < first * 8 || *s >= end * 8);
        for chunk in first..end {
            self.chunks[chunk as usize] = None;
        }
    }

    /// The process is gone, or the power: what was in flight is torn, what was cached survives or not.
    pub fn crash(&mut self, crash: Crash) {
        self.straggle_until = None;
        for (_, op) in std::mem::take(&mut self.in_flight) {
            if let DiskOp::Write { offset, data, .. } = op {
                self.write_torn(offset, &data);
            }
        }
        if crash == Crash::Process {
            return;
        }
        self.lose_cached();
    }

    /// What the cache alone had is gone, all of it or some.
    fn lose_cached(&mut self) {
        let keep_all = self.prng.chance(300);
        for (sector, old) in std::mem::take(&mut self.cached) {
            if !keep_all && self.prng.chance(500) {
                self.put(sector as usize * SECTOR_BYTES, &old);
            }
        }
    }

    /// Flips a bit in up to `count` written sectors at or after `from`. Returns how many were damaged.
    pub fn rot(&mut self, from: u64, count: u32) -> u32 {
        self.rot_where(from, count, |_| true)
    }

    /// As [`Disk::rot`], in those chunks alone whose number is chosen.
    pub fn rot_where(&mut self, from: u64, count: u32, is_chosen: impl Fn(usize) -> bool) -> u32 {
        let first = (from / CHUNK_BYTES as u64) as usize;
        let may_rot = |i: &usize| self.chunks[*i].is_some() && is_chosen(*i);
        let written: Vec<usize> = (first..self.chunks.len()).filter(may_rot).collect();
        if written.is_empty() {
            return 0;
        }
        for _ in 0..count {
            let chunk = *self.prng.pick(&written);
            let at = self.prng.below(CHUNK_BYTES as u64) as usize;
            let bit = 1 << self.prng.below(8);
            let bytes = self.chunks[chunk].as_mut().expect("filtered to written chunks");
            bytes[at] ^= bit;
        }
        self.silently_damaged = true;
        count
    }

    /// Makes everything unreadable as a swapped-in blank disk would be: all zeroes, nothing in flight.
    pub fn blank(&mut self) {
        self.in_flight.clear();
        self.cached.clear();
        self.unreadable.clear();
        for chunk in &mut self.chunks {
            *chunk = None;
        }
    }

    /// Ends all faults that time can end; damage done stays.
    pub fn heal(&mut self) {
        self.faults = DiskFaults::default();
        self.slowness = 1;
        self.stuck_until = Instant::ZERO;
        self.failing_until = Instant::ZERO;
        self.straggle_until = None;
        self.unreadable.clear();
    }

    /// Writes outside of time, durable at once: formatting a blank disk. Handles on the shared run of zeroes are told by
    /// their address, and skipped: zeroes are there already.
    pub fn write_now(&mut self, offset: u64, data: &Buf) {
        if data.as_ptr() != Buf::zeroes(1).as_ptr() {
            self.write_all(offset, std::slice::from_ref(data), true);
        }
    }
}

fn sectors(offset: u64, len: u64) -> (u64, u64) {
    (offset / SECTOR_BYTES as u64, (offset + len) / SECTOR_BYTES as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(disk: &mut Disk, at: u64, byte: u8, durable: bool) {
        let data = vec![Buf::copy_from(&[byte; 4 * SECTOR_BYTES])];
        let (id, due) = disk.submit(Instant(5), DiskOp::Write { offset: at, data, durable });
        assert!(due > Instant(5));
        assert_eq!(disk.complete(due, id), Some(Ok(Buf::empty())));
    }

    #[test]
    fn durable_writes_survive_power_loss_and_cached_ones_survive_by_sector() {
        let (mut kept, mut lost) = (0, 0);
        for seed in 0..50 {
            let mut disk = Disk::new(1 << 20, Prng::new(seed));
            write(&mut disk, 0, 1, true);
            write(&mut disk, 4096, 2, false);
            disk.crash(Crash::Power);
            assert!(disk.peek(0, 2048).iter().all(|b| *b == 1));
            for sector in disk.peek(4096, 2048).chunks(SECTOR_BYTES) {
                assert!(sector.iter().all(|b| *b == sector[0]), "a sector is atomic");
                if sector[0] == 2 { kept += 1 } else { lost += 1 }
            }
        }
        assert!(kept > 20 && lost > 20, "{kept} kept, {lost} lost");
    }

    #[test]
    fn a_process_crash_keeps_the_cache_and_tears_what_is_in_flight() {
        let mut torn = 0;
        for seed in 0..50 {
            let mut disk = Disk::new(1 << 20, Prng::new(seed));
            write(&mut disk, 0, 1, false);
            let data = vec![Buf::copy_from(&[9; 8 * SECTOR_BYTES])];
            let (id, _) = disk.submit(Instant(9), DiskOp::Write { offset: 8192, data, durable: true });
            disk.crash(Crash::Process);
            assert_eq!(disk.complete(Instant(9), id), None);
            assert!(disk.peek(0, 2048).iter().all(|b| *b == 1));
            let sum: usize = disk.peek(8192, 4096).iter().map(|b| usize::from(*b == 9)).sum();
            torn += usize::from(sum > 0 && sum < 4096);
        }
        assert!(torn > 10, "{torn} writes torn");
    }

    #[test]
    fn an_unreadable_sector_is_readable_again_after_a_write() {
        let mut disk = Disk::new(1 << 20, Prng::new(1));
        disk.faults.read_error = 1000;
        let read = |disk: &mut Disk| {
            let (id, _) = disk.submit(Instant(1), DiskOp::Read { offset: 0, len: 4096 });
            disk.complete(Instant(1), id).unwrap()
        };
        assert_eq!(read(&mut disk), Err(IoError));
        disk.faults.read_error = 0;
        assert_eq!(read(&mut disk), Err(IoError));
        write(&mut disk, 0, 3, true);
        assert!(read(&mut disk).is_ok());
    }
}
