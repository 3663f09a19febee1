//! Guests: random requests to a volume's controllers, and the judging of every reply.
//!
//! Every sector written carries its address and the write's number, so that a read tells what it saw. Requests are reads,
//! writes, discards, writes of zeroes, flushes and status queries; aligned and not, small and bulk, overlapping, several
//! in flight.

use crate::checker::{self, History, OpId, SECTOR_BYTES, Version};
use crate::world::MachineAt;
use holdfast_base::buf::{concat, total_len};
use holdfast_base::{
    BlockData, BlockError, BlockOp, BlockReply, BlockRequest, BufMut, ByteRange, Prng, RequestToken, StatusExtent,
};
use std::collections::BTreeMap;

const BLOCK: u64 = holdfast_base::BLOCK_BYTES as u64;
const SECTOR: u64 = SECTOR_BYTES as u64;

/// How often each kind of request is drawn, relative to the others.
#[derive(Clone, Copy, Debug)]
pub struct Mix {
    pub read: u32,
    pub write: u32,
    pub discard: u32,
    pub zeroes: u32,
    pub flush: u32,
    pub status: u32,
    /// Per mille of writes that are long enough to bypass the log.
    pub bulk: u32,
    /// Per mille of reads and writes that are not aligned to blocks.
    pub unaligned: u32,
    /// Per mille of requests that go to an eighth of the volume.
    pub hot: u32,
}

impl Default for Mix {
    fn default() -> Mix {
        Mix { read: 35, write: 52, discard: 5, zeroes: 4, flush: 2, status: 2, bulk: 60, unaligned: 150, hot: 600 }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum What {
    Read,
    Write(Version),
    Discard,
    Zeroes,
    Flush,
    Status,
}

#[derive(Clone, Copy, Debug)]
struct Asked {
    at: MachineAt,
    what: What,
    offset: u64,
    len: u64,
    op: Option<OpId>,
    /// Its owner had a successor when it was asked.
    late: bool,
    /// For a read of a snapshot: when that was taken.
    within: Option<Within>,
}

/// A span of a history in which something was at one instant; without an end, by the time it is answered.
#[derive(Clone, Copy, Debug)]
pub struct Within {
    pub invoked: u64,
    pub ended: Option<u64>,
}

/// All guests of one volume and what they know.
pub struct Guests {
    prng: Prng,
    mix: Mix,
    size_bytes: u64,
    bulk_bytes: u64,
    next_version: Version,
    next_token: u64,
    asked: BTreeMap<RequestToken, Asked>,
    /// Writes that were refused or lost without a word on whether they happened.
    unheard: Vec<OpId>,
    pub history: History,
    pub answered: u64,
    pub refused: u64,
    /// Whether writes may be refused for want of space.
    pub space_may_end: bool,
    /// Whether requests may be refused since more is out than redundancy covers.
    pub overwhelmed: bool,
}

impl Guests {
    pub fn new(prng: Prng, mix: Mix, size_bytes: u64, bulk_bytes: u64) -> Guests {
        Guests {
            prng,
            mix,
            size_bytes,
            bulk_bytes,
            next_version: 1,
            next_token: 1,
            asked: BTreeMap::new(),
            unheard: Vec::new(),
            history: History::new(size_bytes),
            answered: 0,
            refused: 0,
            space_may_end: false,
            overwhelmed: false,
        }
    }

    /// Requests of a controller without an answer.
    pub fn waiting_on(&self, at: MachineAt) -> usize {
        self.asked.values().filter(|a| a.at == at).count()
    }

    pub fn is_waiting(&self, token: RequestToken) -> bool {
        self.asked.contains_key(&token)
    }

    /// A random request for a controller. `late` where its successor serves already.
    pub fn draw(&mut self, at: MachineAt, late: bool) -> BlockRequest {
        let mix = self.mix;
        let kinds = [
            (What::Read, mix.read),
            (What::Write(0), mix.write),
            (What::Discard, mix.discard),
            (What::Zeroes, mix.zeroes),
            (What::Flush, mix.flush),
            (What::Status, mix.status),
        ];
        let total: u32 = kinds.iter().map(|(_, w)| w).sum();
        let mut draw = self.prng.below(u64::from(total)) as u32;
        let mut what = What::Read;
        for (kind, weight) in kinds {
            what = kind;
            if draw < weight {
                break;
            }
            draw -= weight;
        }
        let (offset, len) = self.draw_range(what);
        self.ask(at, what, offset, len, late)
    }

    fn draw_range(&mut self, what: What) -> (u64, u64) {
        let prng = &mut self.prng;
        let bulk = matches!(what, What::Write(_)) && prng.chance(self.mix.bulk);
        let unaligned = prng.chance(self.mix.unaligned);
        let (unit, units_max) = match what {
            _ if bulk => (BLOCK, 0),
            What::Discard | What::Zeroes if prng.chance(300) => (BLOCK, 64),
            _ if unaligned => (SECTOR, 30),
            _ => (BLOCK, if prng.chance(200) { 12 } else { 3 }),
        };
        let len = if bulk {
            self.bulk_bytes + prng.below(self.bulk_bytes / BLOCK) * BLOCK
        } else {
            prng.between(1, units_max) * unit
        };
        let len = len.min(self.size_bytes);
        let space = if prng.chance(self.mix.hot) { (self.size_bytes / 8).max(len) } else { self.size_bytes };
        let offset = prng.below((space - len) / unit + 1) * unit;
        (offset, len)
    }

    /// Makes a request and remembers it; a write gets the next version.
    pub fn ask(&mut self, at: MachineAt, what: What, offset: u64, len: u64, late: bool) -> BlockRequest {
        let who = (at.host * 100 + at.machine) as u32;
        let range = ByteRange::new(offset, len);
        let mut what = what;
        let (op, id) = match what {
            What::Read => (BlockOp::Read(range), Some(self.history.invoke_read(offset, len, who))),
            What::Status => (BlockOp::Status(range), Some(self.history.invoke_read(offset, len, who))),
            What::Flush => (BlockOp::Flush, None),
            What::Discard => (BlockOp::Discard(range), Some(self.history.invoke_write(0, offset, len, who))),
            What::Zeroes => (BlockOp::WriteZeroes(range), Some(self.history.invoke_write(0, offset, len, who))),
            What::Write(_) => {
                let version = self.next_version;
                self.next_version += 1;
                what = What::Write(version);
                let mut data = BufMut::new(len as usize);
                checker::fill(&mut data, offset / SECTOR, version);
                let id = self.history.invoke_write(version, offset, len, who);
                (BlockOp::Write { offset, data: data.freeze() }, Some(id))
            }
        };
        if late && let (Some(id), What::Write(_) | What::Discard | What::Zeroes) = (id, what) {
            self.history.never(id);
        }
        let token = RequestToken(self.next_token);
        self.next_token += 1;
        self.asked.insert(token, Asked { at, what, offset, len, op: id, late, within: None });
        BlockRequest { token, op }
    }

    /// Makes a read of a snapshot that was taken in this span.
    pub fn ask_snapshot(&mut self, at: MachineAt, within: Within, offset: u64, len: u64) -> BlockRequest {
        let who = (at.host * 100 + at.machine) as u32;
        let op = self.history.invoke_read_at(within.invoked, offset, len, who);
        let token = RequestToken(self.next_token);
        self.next_token += 1;
        let asked = Asked { at, what: What::Read, offset, len, op: Some(op), late: false, within: Some(within) };
        self.asked.insert(token, asked);
        BlockRequest { token, op: BlockOp::Read(ByteRange::new(offset, len)) }
    }

    /// Takes a reply in; an error is a bug that the reply shows by itself.
    pub fn on_reply(&mut self, reply: BlockReply) -> Result<(), String> {
        let Some(asked) = self.asked.remove(&reply.token) else {
            return Err(format!("request {} was answered twice, or never asked: {reply:?}", reply.token.0));
        };
        self.answered += 1;
        let data = match reply.result {
            Ok(data) => data,
            Err(error) => return self.on_refused(asked, error),
        };
        match (asked.what, data) {
            (What::Flush, BlockData::Done) => Ok(()),
            (What::Write(_) | What::Discard | What::Zeroes, BlockData::Done) => {
                if asked.late {
                    return Err(format!("an owner with a successor acknowledged {asked:?}"));
                }
                self.history.write_done(asked.op.expect("a write is in the history"));
                Ok(())
            }
            (What::Read, BlockData::Data(parts)) => self.on_read(asked, &concat(&parts), total_len(&parts)),
            (What::Status, BlockData::Status(extents)) => self.on_status(asked, &extents),
            (_, other) => Err(format!("{asked:?} was answered by {other:?}")),
        }
    }

    fn on_read(&mut self, asked: Asked, bytes: &[u8], len: usize) -> Result<(), String> {
        if len as u64 != asked.len {
            return Err(format!("{asked:?} was answered by {len} bytes"));
        }
        let first = asked.offset / SECTOR;
        let mut versions = Vec::with_capacity(len / SECTOR_BYTES);
        for (i, sector) in bytes.chunks_exact(SECTOR_BYTES).enumerate() {
            let at = first + i as u64;
            match checker::decode(sector, at) {
                Some(version) => versions.push(version),
                None => return Err(format!("{asked:?} got bytes that nobody wrote at sector {at}")),
            }
        }
        let op = asked.op.expect("a read is in the history");
        match asked.within.and_then(|within| within.ended) {
            Some(ended) => self.history.read_done_by(op, versions, ended),
            None => self.history.read_done(op, versions),
        }
        Ok(())
    }

    fn on_status(&mut self, asked: Asked, extents: &[StatusExtent]) -> Result<(), String> {
        let mut offset = asked.offset;
        for extent in extents {
            // Sub-sector parts would have no register of their own.
            if !extent.mapped && extent.len.is_multiple_of(SECTOR) && offset.is_multiple_of(SECTOR) && extent.len > 0 {
                self.history.hole_seen(asked.op.expect("in the history"), offset, extent.len);
            }
            offset += extent.len;
        }
        if offset != asked.offset + asked.len {
            return Err(format!("{asked:?} was answered by extents up to {offset}"));
        }
        Ok(())
    }

    fn on_refused(&mut self, asked: Asked, error: BlockError) -> Result<(), String> {
        self.refused += 1;
        let is_write = matches!(asked.what, What::Write(_) | What::Discard | What::Zeroes);
        let allowed = match error {
            BlockError::Deposed | BlockError::ShuttingDown => true,
            BlockError::NoSpace => is_write && self.space_may_end,
            BlockError::Unavailable => self.overwhelmed,
            BlockError::OutOfRange | BlockError::Invalid => false,
        };
        if !allowed {
            return Err(format!("{asked:?} was refused: {error}"));
        }
        if error == BlockError::NoSpace
            && let Some(op) = asked.op
        {
            self.history.never_after_now(op);
        }
        // Otherwise its outcome is open until a successor serves.
        if matches!(error, BlockError::Deposed | BlockError::ShuttingDown | BlockError::Unavailable)
            && is_write
            && !asked.late
        {
            self.unheard.extend(asked.op);
        }
        Ok(())
    }

    /// Controllers are gone: their guests' requests are never answered.
    pub fn on_gone(&mut self, is_gone: impl Fn(MachineAt) -> bool) {
        let gone: Vec<RequestToken> = self.asked.iter().filter(|(_, a)| is_gone(a.at)).map(|(t, _)| *t).collect();
        for token in gone {
            let asked = self.asked.remove(&token).expect("listed");
            if !asked.late {
                self.unheard.extend(asked.op);
            }
        }
    }

    /// An opening serves: what its `predecessors` have not done by now, they never will.
    pub fn on_open(&mut self, predecessors: &[MachineAt]) {
        for op in std::mem::take(&mut self.unheard) {
            self.history.never_after_now(op);
        }
        for asked in self.asked.values().filter(|a| predecessors.contains(&a.at) && !a.late) {
            if let (Some(op), What::Write(_) | What::Discard | What::Zeroes) = (asked.op, asked.what) {
                self.history.never_after_now(op);
            }
        }
    }

    /// Reads of the whole volume, in pieces.
    pub fn read_all(&mut self, at: MachineAt) -> Vec<BlockRequest> {
        const PIECE: u64 = 128 << 10;
        let size = self.size_bytes;
        (0..size.div_ceil(PIECE))
            .map(|i| self.ask(at, What::Read, i * PIECE, PIECE.min(size - i * PIECE), false))
            .collect()
    }

    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }
}
