//! Guests' writes, discards and zeroings: admission, ordering of partial blocks, and the way into log or bypass.
//!
//! A request is cut into up to three parts: a partial block in front, whole blocks, a partial block behind. Whole
//! blocks go to the log as they are; a partial block is read, changed and written, alone on its block.
//!
//! Limits: the log window. From half of the budget on each write waits a little, by a curve; at the budget it waits for
//! space. Nothing is refused for being too much; only a grid without room for data refuses (`NoSpace`).

use crate::api::Target;
use crate::controller::{Controller, Out};
use crate::io::read::Reader;
use crate::log::window::{Done, WriteOp};
use crate::space::Topology;
use holdfast_base::{
    BLOCK_BYTES, BlockData, BlockError, BlockOp, BlockRequest, Buf, BufMut, ByteRange, HeadId, Instant, Key, Token,
    Urgency, block_crcs,
};
use holdfast_format::record::Record;
use holdfast_stages::{Stage, Trail};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Longest log entry: several fit a journal unit, and an append never delays its neighbours much.
const ENTRY_BYTES_MAX: usize = 256 * 1024;

/// Longest delay of the curve, at nine tenths of the budget.
const DELAY_MAX: Duration = Duration::from_millis(10);

#[derive(Debug, Default)]
pub(crate) struct Writes {
    queue: VecDeque<Queued>,
    /// The head of the queue may go from here on.
    not_before: Option<Instant>,
    /// What the head of the queue waits for, or waited for last.
    held_by: Option<Stage>,
    modifies: BTreeMap<u64, Modify>,
    next_modify: u64,
    /// Parts that wait for a block to be free of others' partial writes.
    blocked: VecDeque<Part>,
}

/// A write that waits to be let in, since it came.
#[derive(Debug)]
struct Queued {
    head: HeadId,
    request: BlockRequest,
    urgency: Urgency,
    since: Instant,
}

/// Whole blocks that are to be written or unmapped.
#[derive(Debug)]
struct Part {
    op: Token,
    head: HeadId,
    first: u64,
    blocks: u64,
    /// `None` discards.
    data: Option<Buf>,
}

/// A read-modify-write of one block.
#[derive(Debug)]
struct Modify {
    op: Token,
    head: HeadId,
    block: u64,
    from: usize,
    /// `len` bytes to put in; `None` are zeroes.
    bytes: Option<Buf>,
    len: usize,
    state: ModifyState,
}

#[derive(Debug, PartialEq, Eq, Clone, Copy)]
enum ModifyState {
    /// Others write the block.
    Waiting,
    Reading,
    Writing,
}

impl Writes {
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.not_before
    }

    pub(crate) fn drain(&mut self) -> Vec<BlockRequest> {
        self.queue.drain(..).map(|queued| queued.request).collect()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.modifies.is_empty() && self.blocked.is_empty()
    }

    /// Of any head: that they wait for each other does no harm.
    fn modifies_any(&self, first: u64, blocks: u64) -> bool {
        self.modifies.values().any(|m| m.state != ModifyState::Waiting && (first..first + blocks).contains(&m.block))
    }
}

fn range_of(op: &BlockOp) -> ByteRange {
    match op {
        BlockOp::Flush => ByteRange::new(0, 0),
        BlockOp::Write { offset, data } => ByteRange::new(*offset, data.len() as u64),
        BlockOp::Read(range)
        | BlockOp::Discard(range)
        | BlockOp::WriteZeroes(range)
        | BlockOp::Prefetch(range)
        | BlockOp::Status(range)
        | BlockOp::Changes { range, .. } => *range,
    }
}

/// Bytes that a request has to store.
fn data_len(op: &BlockOp) -> u64 {
    match op {
        BlockOp::Write { data, .. } => data.len() as u64,
        _ => 0,
    }
}

impl Controller {
    pub(crate) fn start_request(&mut self, target: Target, request: BlockRequest, urgency: Urgency, out: Out) {
        let range = range_of(&request.op);
        let Some(size_bytes) = self.bytes_of(target) else {
            // It was dropped.
            return self.reply(request.token, Err(BlockError::Unavailable), out);
        };
        if range.end().is_none_or(|end| end > size_bytes) {
            return self.reply(request.token, Err(BlockError::OutOfRange), out);
        }
        match (request.op, target) {
            (BlockOp::Status(_) | BlockOp::Changes { .. }, _) if range.len == 0 => {
                self.reply(request.token, Err(BlockError::Invalid), out);
            }
            (BlockOp::Read(_), _) if range.len == 0 => {
                self.reply(request.token, Ok(BlockData::Data(Vec::new())), out);
            }
            (BlockOp::Read(_), of) => self.start_read(Reader::Guest(request.token), urgency, of, range, out),
            (BlockOp::Status(_), of) => self.start_read(Reader::Status(request.token), urgency, of, range, out),
            (BlockOp::Changes { since, .. }, of) => {
                self.start_read(Reader::Changes(request.token, since), urgency, of, range, out);
            }
            (BlockOp::Prefetch(_) | BlockOp::Flush, _) => self.reply(request.token, Ok(BlockData::Done), out),
            (_, Target::Snapshot(_)) => self.reply(request.token, Err(BlockError::Invalid), out),
            _ if range.len == 0 => self.reply(request.token, Ok(BlockData::Done), out),
            (op, Target::Head(head)) => {
                let request = BlockRequest { token: request.token, op };
                self.writes.queue.push_back(Queued { head, request, urgency, since: self.basis.now });
                self.admit_writes(out);
            }
        }
    }

    /// Its size, if it is still there.
    pub(crate) fn bytes_of(&self, target: Target) -> Option<u64> {
        match target {
            Target::Head(head) => self.head_bytes(head),
            Target::Snapshot(layer) => self.snapshots().find(|(id, _)| *id == layer).map(|(_, s)| s.size_bytes),
        }
    }

    /// Whether a write to the head was let in, or waits to be.
    pub(crate) fn is_writing(&self, head: HeadId) -> bool {
        let waits = self.writes.queue.iter().any(|queued| queued.head == head);
        // Parts of a write that has failed may still be at work.
        let parts = self.writes.modifies.values().any(|modify| modify.head == head)
            || self.writes.blocked.iter().any(|part| part.head == head);
        waits || parts || self.write_ops.iter().any(|(_, op)| op.head == head)
    }

    /// Lets queued writes in, as far as budget and curve allow.
    pub(crate) fn admit_writes(&mut self, out: Out) {
        if self.writes.not_before.is_some_and(|at| at <= self.basis.now) {
            self.writes.not_before = None;
        }
        while let Some(Queued { request, .. }) = self.writes.queue.front() {
            let len = data_len(&request.op);
            if len > 0 && !self.room.has_room_for(Topology::new(&self.basis, &self.peers), len) {
                if self.wait_for_room(out) {
                    return;
                }
                let Queued { request, .. } = self.writes.queue.pop_front().expect("just seen");
                self.reply(request.token, Err(BlockError::NoSpace), out);
                continue;
            }
            if self.write_ops.is_full() || !self.admits(len) {
                return;
            }
            let queued = self.writes.queue.pop_front().expect("just seen");
            if len > 0 {
                self.room.charge(Topology::new(&self.basis, &self.peers), len);
                let delay = self.curve_delay();
                self.writes.not_before = delay.map(|(until, _)| until);
                self.writes.held_by = delay.map(|(_, stage)| stage).or(self.writes.held_by);
            }
            self.begin_if_inside(queued, out);
        }
    }

    fn begin_if_inside(&mut self, queued: Queued, out: Out) {
        let Queued { head, request, .. } = &queued;
        let (head, token, end) = (*head, request.token, range_of(&request.op).end());
        match self.head_bytes(head) {
            Some(size) if end.is_some_and(|end| end <= size) => self.begin_write(queued, out),
            // The end was cut off while it waited.
            Some(_) => self.reply(token, Err(BlockError::OutOfRange), out),
            None => self.reply(token, Err(BlockError::Unavailable), out),
        }
    }

    /// Whether the cleaner is expected to make room for the head of the queue. Discards don't wait with it.
    fn wait_for_room(&mut self, out: Out) -> bool {
        let Some(again) = self.room_expected_at() else { return false };
        (self.writes.not_before, self.writes.held_by) = (Some(again), Some(Stage::Space));
        let queue = std::mem::take(&mut self.writes.queue);
        for queued in queue {
            if data_len(&queued.request.op) > 0 || self.write_ops.is_full() {
                self.writes.queue.push_back(queued);
            } else {
                self.begin_if_inside(queued, out);
            }
        }
        true
    }

    fn admits(&mut self, len: u64) -> bool {
        // What stores nothing makes nothing tighter.
        if len > 0 && self.writes.not_before.is_some_and(|at| at > self.basis.now) {
            return false;
        }
        let missing = self.lacks(len);
        self.writes.held_by = missing.or(self.writes.held_by);
        // A window with nothing in flight always takes one, so that a tiny budget can't stop everything.
        missing.is_none() || self.log.len() == 0
    }

    /// What there is no room in for a write.
    fn lacks(&self, len: u64) -> Option<Stage> {
        if len >= u64::from(self.basis.config.direct_bytes_min) {
            return (!self.direct.has_room()).then_some(Stage::Held);
        }
        if self.log.bytes + len > self.basis.config.writeback_bytes_max {
            return Some(Stage::WriteBack);
        }
        (len > 0 && !self.journals_admit(len)).then_some(Stage::Journal)
    }

    /// Whether writes wait here, for budget, curve or room, rather than for nodes.
    pub fn holds_writes(&self) -> bool {
        !self.writes.queue.is_empty() || self.writes.not_before.is_some()
    }

    /// Whether the head of the queue is a write that full journals hold back.
    pub(crate) fn writes_wait_for_journals(&self) -> bool {
        let Some(BlockOp::Write { data, .. }) = self.writes.queue.front().map(|queued| &queued.request.op) else {
            return false;
        };
        let len = data.len() as u64;
        len < u64::from(self.basis.config.direct_bytes_min) && !self.journals_admit(len)
    }

    /// Nothing up to half of the budget or of the journals, or while a quarter is left of the room that the cleaner
    /// keeps, then a cubic curve up to [`DELAY_MAX`] at nine tenths. And which of them it is.
    fn curve_delay(&self) -> Option<(Instant, Stage)> {
        let fills = [
            (self.log.bytes * 1000 / self.basis.config.writeback_bytes_max.max(1), Stage::WriteBack),
            (self.journal_per_mille(), Stage::Journal),
            (self.room.tightness_per_mille(self.segments.dead_per_mille()), Stage::Space),
        ];
        let (fill, stage) = fills.into_iter().max()?;
        let over = fill.saturating_sub(500).min(400);
        if over == 0 {
            return None;
        }
        let us = DELAY_MAX.as_micros() as u64 * over * over * over / (400 * 400 * 400);
        (us > 0).then(|| (self.basis.now + Duration::from_micros(us), stage))
    }

    fn begin_write(&mut self, Queued { head, request, urgency, since }: Queued, out: Out) {
        let (range, data) = match request.op {
            BlockOp::Write { offset, data } => (ByteRange::new(offset, data.len() as u64), Some(data)),
            BlockOp::Discard(range) | BlockOp::WriteZeroes(range) => (range, None),
            other => panic!("{other:?} is not a write"),
        };
        let block = BLOCK_BYTES as u64;
        let end = range.offset + range.len;
        let (whole_first, whole_end) = (range.offset.div_ceil(block), end / block);
        let bytes = if data.is_some() { range.len } else { 0 };
        let mut trail = Trail::new(since);
        trail.mark(self.basis.now, self.writes.held_by.unwrap_or(Stage::Held));
        let op = self.write_ops.insert(WriteOp {
            token: request.token,
            urgency,
            head,
            began_at: self.basis.now,
            trail,
            parts: 1,
            bytes,
            failed: None,
        });
        let part_of = |from: u64, to: u64| {
            data.as_ref().map(|d| d.slice((from - range.offset) as usize..(to - range.offset) as usize))
        };
        let front_end = (whole_first * block).min(end);
        if range.offset < front_end {
            self.add_modify(op, head, (range.offset, front_end), part_of(range.offset, front_end), out);
        }
        let tail_start = (whole_end * block).max(front_end);
        if tail_start < end {
            self.add_modify(op, head, (tail_start, end), part_of(tail_start, end), out);
        }
        if whole_first < whole_end {
            let data = part_of(whole_first * block, whole_end * block);
            self.add_parts(1, op);
            self.place_part(Part { op, head, first: whole_first, blocks: whole_end - whole_first, data }, out);
        }
        // The part that stood for "not cut yet".
        self.on_write_part_done(op, out);
    }

    /// Of one that is over nobody waits.
    pub(crate) fn urgency_of_write(&self, op: Token) -> Urgency {
        self.write_ops.get(op).map_or(Urgency::Normal, |op| op.urgency)
    }

    /// The write has more parts.
    pub(crate) fn add_parts(&mut self, count: u32, op: Token) {
        if let Some(op) = self.write_ops.get_mut(op) {
            op.parts += count;
        }
    }

    fn place_part(&mut self, part: Part, out: Out) {
        match self.write_ops.get(part.op) {
            // The opening has ended.
            None => return,
            // Another part of it has failed, and the guest hears of that.
            Some(op) if op.failed.is_some() => return self.on_write_part_done(part.op, out),
            Some(_) => {}
        }
        if self.writes.modifies_any(part.first, part.blocks) {
            self.writes.blocked.push_back(part);
            return;
        }
        let Some(key) = self.write_key(part.head, part.first) else {
            return self.fail_write(part.op, BlockError::Unavailable, out);
        };
        let Some(data) = part.data else {
            self.append_control(Record::Discard { key, blocks: part.blocks }, Done::Write(part.op), out);
            return;
        };
        if data.len() >= self.basis.config.direct_bytes_min as usize {
            self.write_directly(part.op, key, data, out);
            return;
        }
        let entry_max = ENTRY_BYTES_MAX.min(self.basis.config.direct_bytes_min as usize).max(BLOCK_BYTES);
        let mut at = 0;
        self.add_parts(data.len().div_ceil(entry_max) as u32 - 1, part.op);
        while at < data.len() {
            let len = entry_max.min(data.len() - at);
            let piece = data.slice(at..at + len);
            let key = key.offset((at / BLOCK_BYTES) as u64);
            let record = Record::Write { key, blocks: (len / BLOCK_BYTES) as u32 };
            let crcs = block_crcs(&piece).into();
            self.append(record, piece, crcs, Done::Write(part.op), out);
            at += len;
        }
    }

    // ---- partial blocks ----

    fn add_modify(&mut self, op: Token, head: HeadId, (from, to): (u64, u64), bytes: Option<Buf>, out: Out) {
        self.add_parts(1, op);
        let block = from / BLOCK_BYTES as u64;
        let id = self.writes.next_modify;
        self.writes.next_modify += 1;
        let modify = Modify {
            op,
            head,
            block,
            from: (from - block * BLOCK_BYTES as u64) as usize,
            bytes,
            len: (to - from) as usize,
            state: ModifyState::Waiting,
        };
        self.writes.modifies.insert(id, modify);
        self.try_modify(id, out);
    }

    /// Begins the read once nobody else writes the block.
    fn try_modify(&mut self, id: u64, out: Out) {
        let Some(modify) = self.writes.modifies.get(&id) else { return };
        let (op, head, block) = (modify.op, modify.head, modify.block);
        let others = modify.state != ModifyState::Waiting
            || self.changes.is_rolling_back(head)
            || self.writes.modifies_any(block, 1)
            || self.is_being_written(block);
        if !others {
            let size = self.head_bytes(head);
            let start = block * BLOCK_BYTES as u64;
            let modify = self.writes.modifies.get_mut(&id).expect("just seen");
            modify.state = ModifyState::Reading;
            let Some(size) = size.filter(|size| start < *size) else {
                // The end was cut off while it waited, or the clone was dropped.
                let error = if size.is_some() { BlockError::OutOfRange } else { BlockError::Unavailable };
                return self.on_modify_failed(id, error, out);
            };
            let len = (size - start).min(BLOCK_BYTES as u64);
            let urgency = self.urgency_of_write(op);
            self.start_read(Reader::Modify(id), urgency, Target::Head(head), ByteRange::new(start, len), out);
        }
    }

    /// Whether an entry or bulk write in flight covers the block.
    fn is_being_written(&self, block: u64) -> bool {
        let covers = |key: Key, blocks: u64| (key.lba().0..key.lba().0 + blocks).contains(&block);
        let in_log = self.log.iter_from(self.log.completed.next()).any(|(_, e)| match e.record {
            Record::Write { key, blocks } => covers(key, u64::from(blocks)),
            Record::Discard { key, blocks } => covers(key, blocks),
            _ => false,
        });
        in_log || self.direct.covers(block)
    }

    /// The block can't be read, or is not there any more.
    pub(crate) fn on_modify_failed(&mut self, id: u64, error: BlockError, out: Out) {
        if let Some(modify) = self.writes.modifies.remove(&id) {
            self.fail_write(modify.op, error, out);
        }
    }

    /// Writes the block with what is to be put in. Zeroes leave a hole as it is, and make one where nothing else is
    /// left.
    pub(crate) fn on_modify_read(&mut self, id: u64, parts: &[Buf], is_hole: bool, out: Out) {
        let Some(modify) = self.writes.modifies.get_mut(&id) else { return };
        if is_hole && modify.bytes.is_none() {
            let op = modify.op;
            return self.on_modified(op, id, out);
        }
        let mut block = BufMut::zeroed(BLOCK_BYTES);
        let mut at = 0;
        for part in parts {
            block[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
        if let Some(op) = self.write_ops.get_mut(modify.op) {
            op.trail.mark(self.basis.now, Stage::Blocks);
        }
        let target = &mut block[modify.from..modify.from + modify.len];
        match &modify.bytes {
            Some(bytes) => target.copy_from_slice(bytes),
            None => target.fill(0),
        }
        let empties = modify.bytes.is_none() && block.iter().all(|byte| *byte == 0);
        modify.state = ModifyState::Writing;
        let (op, head, number) = (modify.op, modify.head, modify.block);
        let Some(key) = self.write_key(head, number) else {
            return self.on_modify_failed(id, BlockError::Unavailable, out);
        };
        let done = Done::Modified { op, modify: id };
        if empties {
            self.append_control(Record::Discard { key, blocks: 1 }, done, out);
            return;
        }
        let data = block.freeze();
        let crcs = block_crcs(&data).into();
        self.append(Record::Write { key, blocks: 1 }, data, crcs, done, out);
    }

    pub(crate) fn on_modified(&mut self, op: Token, id: u64, out: Out) {
        self.writes.modifies.remove(&id);
        self.on_write_part_done(op, out);
    }

    /// A part of a write can't be done. The others go on: they may have happened already.
    pub(crate) fn fail_write(&mut self, op: Token, error: BlockError, out: Out) {
        if let Some(op) = self.write_ops.get_mut(op) {
            op.failed.get_or_insert(error);
        }
        self.on_write_part_done(op, out);
    }

    /// Something completed: partial writes and parts that waited for it may go on.
    pub(crate) fn unblock_writes(&mut self, out: Out) {
        if !self.writes.modifies.is_empty() {
            let ids: Vec<u64> = self.writes.modifies.keys().copied().collect();
            for id in ids {
                self.try_modify(id, out);
            }
        }
        for _ in 0..self.writes.blocked.len() {
            let part = self.writes.blocked.pop_front().expect("counted");
            if let Some(op) = self.write_ops.get_mut(part.op) {
                op.trail.mark(self.basis.now, Stage::Blocks);
            }
            self.place_part(part, out);
        }
    }
}
