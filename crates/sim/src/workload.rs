//! Guests: random requests to a volume's controllers, and the judging of every reply.
//!
//! Every sector written carries its address and the write's number, so that a read tells what it saw. Requests are reads,
//! writes, discards, writes of zeroes, flushes and status queries; aligned and not, small and bulk, overlapping, several
//! in flight.

use crate::checker::{self, History, OpId, SECTOR_BYTES, Version};
use crate::world::MachineAt;
use holdfast_base::buf::{concat, total_len};
use holdfast_base::{
    BlockData, BlockError, BlockOp, BlockReply, BlockRequest, BufMut, ByteRange, ObjectId, Prng, RequestToken,
    StatusExtent,
};
use holdfast_volume::Target;
use std::collections::{BTreeMap, VecDeque};

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
    /// Per mille of reads that begin where the one before ended.
    pub in_order: u32,
}

impl Default for Mix {
    fn default() -> Mix {
        Mix {
            read: 35,
            write: 52,
            discard: 5,
            zeroes: 4,
            flush: 2,
            status: 2,
            bulk: 60,
            unaligned: 150,
            hot: 600,
            in_order: 0,
        }
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
    /// Not a request: it is ended by [`Guests::on_rolled_back`].
    Rollback,
}

impl What {
    fn is_write(self) -> bool {
        matches!(self, What::Write(_) | What::Discard | What::Zeroes | What::Rollback)
    }
}

/// What of a volume guests ask for, and where its sectors stand in the history.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Area {
    pub target: Target,
    pub base: u64,
}

impl Area {
    pub const VOLUME: Area = Area { target: Target::VOLUME, base: 0 };
}

#[derive(Clone, Copy, Debug)]
struct Asked {
    at: MachineAt,
    area: Area,
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
    /// By area: where the last read in order ended.
    read_to: BTreeMap<u64, u64>,
    /// Writes that were refused or lost without a word on whether they happened.
    unheard: Vec<OpId>,
    /// By layer of a snapshot: what was read of it, by sector.
    contents: BTreeMap<ObjectId, Vec<Option<Version>>>,
    /// Areas of clones that are to be dropped.
    dropping: Vec<u64>,
    /// Snapshots that are being dropped, whoever still reads them.
    dropping_layers: Vec<ObjectId>,
    pub history: History,
    pub answered: u64,
    pub refused: u64,
    /// What was written to the volume last, where others write the same: offset, length, version.
    pub(crate) written: Option<VecDeque<(u64, u64, Version)>>,
    /// Whether writes may be refused for want of space.
    pub space_may_end: bool,
    /// Several clients write, of which one may at a time.
    pub several_write: bool,
    /// Whether requests may be refused since more is out than redundancy covers.
    pub overwhelmed: bool,
}

impl Guests {
    /// In the history there is room for so many clones of the volume.
    pub fn new(prng: Prng, mix: Mix, size_bytes: u64, bulk_bytes: u64, clones: u64) -> Guests {
        Guests {
            prng,
            mix,
            size_bytes,
            bulk_bytes,
            next_version: 1,
            next_token: 1,
            asked: BTreeMap::new(),
            read_to: BTreeMap::new(),
            unheard: Vec::new(),
            contents: BTreeMap::new(),
            dropping: Vec::new(),
            dropping_layers: Vec::new(),
            history: History::new(size_bytes * (1 + clones)),
            written: None,
            answered: 0,
            refused: 0,
            space_may_end: false,
            several_write: false,
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

    pub fn is_write(&self, token: RequestToken) -> bool {
        self.asked.get(&token).is_some_and(|asked| asked.what.is_write())
    }

    /// A random request for a controller. `late` where its successor serves already.
    pub fn draw(&mut self, at: MachineAt, area: Area, late: bool) -> BlockRequest {
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
        let is_next = what == What::Read && mix.in_order > 0 && self.prng.chance(mix.in_order);
        let (offset, len) = if is_next { self.next_range(area) } else { self.draw_range(what) };
        self.ask(at, area, what, offset, len, late)
    }

    /// Goes on where the last read of that kind ended.
    fn next_range(&mut self, area: Area) -> (u64, u64) {
        let len = self.prng.between(1, 4) * BLOCK;
        let read_to = self.read_to.entry(area.base).or_default();
        let offset = if *read_to + len > self.size_bytes { 0 } else { *read_to };
        *read_to = offset + len;
        (offset, len)
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
    pub fn ask(&mut self, at: MachineAt, area: Area, what: What, offset: u64, len: u64, late: bool) -> BlockRequest {
        let who = (at.host * 100 + at.machine) as u32;
        let range = ByteRange::new(offset, len);
        let place = area.base + offset;
        let mut what = what;
        let (op, id) = match what {
            What::Read => (BlockOp::Read(range), Some(self.history.invoke_read(place, len, who))),
            What::Status => (BlockOp::Status(range), Some(self.history.invoke_read(place, len, who))),
            What::Flush => (BlockOp::Flush, None),
            What::Discard => (BlockOp::Discard(range), Some(self.history.invoke_write(0, place, len, who))),
            What::Zeroes => (BlockOp::WriteZeroes(range), Some(self.history.invoke_write(0, place, len, who))),
            What::Write(_) => {
                let version = self.next_version;
                self.next_version += 1;
                what = What::Write(version);
                let mut data = BufMut::new(len as usize);
                checker::fill(&mut data, offset / SECTOR, version);
                let id = self.history.invoke_write(version, place, len, who);
                self.note_written(area, offset, len, version);
                (BlockOp::Write { offset, data: data.freeze() }, Some(id))
            }
            What::Rollback => panic!("a rollback is not a request"),
        };
        if late && what.is_write() {
            id.into_iter().for_each(|id| self.history.never(id));
        }
        let token = self.remember(Asked { at, area, what, offset, len, op: id, late, within: None });
        BlockRequest { token, op }
    }

    fn note_written(&mut self, area: Area, offset: u64, len: u64, version: Version) {
        let are_blocks = offset.is_multiple_of(BLOCK) && len.is_multiple_of(BLOCK) && len <= 12 * BLOCK;
        if let Some(written) = self.written.as_mut().filter(|_| area.base == 0 && are_blocks) {
            written.push_front((offset, len, version));
            written.truncate(64);
        }
    }

    fn remember(&mut self, asked: Asked) -> RequestToken {
        let token = RequestToken(self.next_token);
        self.next_token += 1;
        self.asked.insert(token, asked);
        token
    }

    /// An area is rolled back to a snapshot of known contents.
    pub fn roll_back(&mut self, at: MachineAt, area: Area, snapshot: ObjectId) -> RequestToken {
        let versions = self.content(snapshot).expect("its contents are known");
        let who = (at.host * 100 + at.machine) as u32;
        let op = Some(self.history.invoke_write_each(versions, area.base, who));
        let (what, len) = (What::Rollback, self.size_bytes);
        self.remember(Asked { at, area, what, offset: 0, len, op, late: false, within: None })
    }

    pub fn on_rolled_back(&mut self, token: RequestToken, is_done: bool) {
        let Some(op) = self.asked.remove(&token).and_then(|asked| asked.op) else { return };
        if is_done { self.history.write_done(op) } else { self.history.never(op) }
    }

    /// From here on requests to the clone may be refused.
    pub fn on_dropping_snapshot(&mut self, layer: ObjectId) {
        self.dropping_layers.push(layer);
    }

    pub fn on_dropping(&mut self, area: Area) {
        self.dropping.push(area.base);
    }

    /// What was read of a snapshot.
    pub fn content_so_far(&self, snapshot: ObjectId) -> Option<&Vec<Option<Version>>> {
        self.contents.get(&snapshot)
    }

    /// All that a snapshot holds, if it was read.
    pub fn content(&self, snapshot: ObjectId) -> Option<Vec<Version>> {
        self.contents.get(&snapshot)?.iter().copied().collect()
    }

    /// Makes a read of a snapshot that was taken in this span.
    pub fn ask_snapshot(&mut self, at: MachineAt, area: Area, within: Within, offset: u64, len: u64) -> BlockRequest {
        let who = (at.host * 100 + at.machine) as u32;
        let op = self.history.invoke_read_at(within.invoked, area.base + offset, len, who);
        let (what, op, within) = (What::Read, Some(op), Some(within));
        let token = self.remember(Asked { at, area, what, offset, len, op, late: false, within });
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
        if let Target::Snapshot(layer) = asked.area.target {
            let sectors = (self.size_bytes / SECTOR) as usize;
            let content = self.contents.entry(layer).or_insert_with(|| vec![None; sectors]);
            for (i, version) in versions.iter().enumerate() {
                content[first as usize + i] = Some(*version);
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
            if !extent.set && extent.len.is_multiple_of(SECTOR) && offset.is_multiple_of(SECTOR) && extent.len > 0 {
                let op = asked.op.expect("in the history");
                self.history.hole_seen(op, asked.area.base + offset, extent.len);
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
        let is_write = asked.what.is_write();
        let allowed = match error {
            BlockError::Deposed | BlockError::ShuttingDown => true,
            BlockError::NoSpace => is_write && self.space_may_end,
            BlockError::Unavailable => {
                let is_going =
                    matches!(asked.area.target, Target::Snapshot(layer) if self.dropping_layers.contains(&layer));
                self.overwhelmed || self.dropping.contains(&asked.area.base) || is_going
            }
            BlockError::NotWriter => is_write && self.several_write,
            BlockError::OutOfRange | BlockError::Invalid | BlockError::Injected => false,
        };
        if !allowed {
            return Err(format!("{asked:?} was refused: {error}"));
        }
        if matches!(error, BlockError::NoSpace | BlockError::NotWriter)
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
            if asked.what.is_write() {
                asked.op.into_iter().for_each(|op| self.history.never_after_now(op));
            }
        }
    }

    /// Reads of a whole area, in pieces.
    pub fn read_all(&mut self, at: MachineAt, area: Area) -> Vec<BlockRequest> {
        const PIECE: u64 = 128 << 10;
        let size = self.size_bytes;
        (0..size.div_ceil(PIECE))
            .map(|i| self.ask(at, area, What::Read, i * PIECE, PIECE.min(size - i * PIECE), false))
            .collect()
    }

    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }
}
