//! What a filter is tested with: any stack of filters over a simulated device, with guests above, judged by the laws.
//!
//! ```
//! # use holdfast_filter::{build, kit};
//! // In the tests of a new filter:
//! kit::check(|seed| vec![build(&format!("delay:write=5ms,share=0.5,seed={seed}")).unwrap()]);
//! ```
//!
//! Role: [`check`] runs a few hundred seeds, each twice, and panics with the seed and the law that was broken; [`trial`] runs
//! one. A seed decides what guests ask (reads, writes, discards, zeroes, flushes, hints, several at a time and over each other),
//! in which order and how late the device answers and what it refuses, when ticks come (early, late, after a long hang), and
//! when a filter is removed or all are drained. At the end everything has to come out.
//!
//! The device is worse than a controller: what it has acknowledged it may lose, until a flush that was asked later is done.
//! So a filter that answers a flush too early is found, although a controller would forgive it. It takes whole sectors of
//! [`SECTOR_BYTES`]: a filter that cuts requests has to cut there.
//!
//! Which law, by number, is in the text of what was found.

use crate::choice::range_of;
use crate::filter::{Effect, Filter, Nature};
use crate::stack::{Breach, FilterId, Stack, StackEvent};
use holdfast_base::buf::concat;
use holdfast_base::{
    BlockData, BlockError, BlockOp, BlockReply, BlockRequest, Buf, ByteRange, Effects, Instant, Prng, RequestToken,
    StatusExtent,
};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::time::Duration;

/// What the device keeps or changes as a whole.
pub const SECTOR_BYTES: usize = 512;

/// Small, so that requests meet.
const SECTORS: u64 = 24;

const SEEDS: u64 = 150;

/// Requests of a trial.
const REQUESTS: u64 = 120;

const IN_FLIGHT_MAX: usize = 12;

/// Steps of a trial, and as many more until the last answer has come.
const PATIENCE: u32 = 5_000;

/// What a trial came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// Of all that was asked and answered, above and below, and when.
    pub trace_hash: u64,
    pub answered: u64,
}

/// Checks the filters that `make` makes, from above, for a seed of their own. Panics with what was found.
pub fn check(make: impl Fn(u64) -> Vec<Box<dyn Filter>>) {
    let mut answered = 0;
    for seed in 0..SEEDS {
        match find(seed, &make) {
            Ok(outcome) => answered += outcome.answered,
            Err(why) => panic!("seed {seed}: {why}"),
        }
    }
    assert!(answered >= SEEDS * IN_FLIGHT_MAX as u64, "only {answered} requests were answered");
}

/// The first law that is found broken, in any trial that [`check`] does.
pub fn first_finding(make: impl Fn(u64) -> Vec<Box<dyn Filter>>) -> Option<String> {
    (0..SEEDS).find_map(|seed| find(seed, &make).err())
}

fn find(seed: u64, make: &impl Fn(u64) -> Vec<Box<dyn Filter>>) -> Result<Outcome, String> {
    let first = trial(seed, make(seed))?;
    let second = trial(seed, make(seed))?;
    if first != second {
        return Err(format!("law 8: the same seed gave {first:?}, then {second:?}"));
    }
    Ok(first)
}

/// One run.
pub fn trial(seed: u64, filters: Vec<Box<dyn Filter>>) -> Result<Outcome, String> {
    Bench::new(seed, filters).run()
}

/// What is written: which write it was. Zeroes are 0.
type Value = u64;

/// A change of one sector, in the history.
struct Change {
    value: Value,
    asked: u64,
    /// Nothing of it can come later: it was answered.
    over: Option<u64>,
    /// It was answered as done.
    done: bool,
}

struct Asked {
    op: BlockOp,
    value: Value,
    at: u64,
    /// Of a flush: what the device had done of what was acknowledged.
    covers: u64,
}

struct AtDevice {
    request: BlockRequest,
    /// What the device had done when it was asked.
    done_then: u64,
}

/// A change that the device has carried out.
struct Applied {
    range: ByteRange,
    value: Value,
    at: u64,
}

struct Bench {
    prng: Prng,
    now: Instant,
    /// Events so far: the order of all things.
    step: u64,
    stack: Stack,
    ids: Vec<FilterId>,
    nature: Nature,
    out: Effects<Effect>,
    asked: BTreeMap<RequestToken, Asked>,
    next_token: u64,
    /// By sector.
    history: Vec<Vec<Change>>,
    answered: u64,
    /// Writes of which nothing may come any more.
    over: BTreeSet<Value>,
    /// What the device had done when the last change was acknowledged.
    acknowledged_upto: u64,
    device: Vec<AtDevice>,
    /// By sector: the newest write that was passed on.
    passed: Vec<Value>,
    sectors: Vec<Value>,
    applied: Vec<Applied>,
    /// So many changes would survive a loss of power.
    safe_upto: u64,
    /// The last time that the device refused something so.
    refused: BTreeMap<&'static str, u64>,
    hash: u64,
}

impl Bench {
    fn new(seed: u64, filters: Vec<Box<dyn Filter>>) -> Bench {
        let mut stack = Stack::new(IN_FLIGHT_MAX + 1);
        let add = |filter| stack.add(filter).expect("a stack has room for what is tested");
        let ids = filters.into_iter().map(add).collect();
        Bench {
            prng: Prng::new(seed ^ 0x1a7e5),
            now: Instant::ZERO + Duration::from_secs(1_000),
            step: 0,
            nature: stack.nature(),
            stack,
            ids,
            out: Effects::new(),
            asked: BTreeMap::new(),
            next_token: 1,
            history: (0..SECTORS).map(|_| vec![Change { value: 0, asked: 0, over: Some(0), done: true }]).collect(),
            answered: 0,
            over: BTreeSet::new(),
            acknowledged_upto: 0,
            device: Vec::new(),
            passed: vec![0; SECTORS as usize],
            sectors: vec![0; SECTORS as usize],
            applied: Vec::new(),
            safe_upto: 0,
            refused: BTreeMap::new(),
            hash: 0xcbf2_9ce4_8422_2325,
        }
    }

    fn run(mut self) -> Result<Outcome, String> {
        // Half of the trials have filters that go in the middle of it.
        let going_at = self.prng.chance(500).then(|| self.prng.below(REQUESTS));
        // Where a filter lets nothing out, no more can be asked: that is judged below.
        for _ in 0..PATIENCE {
            if self.next_token > REQUESTS {
                break;
            }
            self.advance();
            if going_at.is_some_and(|at| at <= self.next_token) && self.prng.chance(100) {
                self.let_filters_go()?;
            }
            match self.prng.below(10) {
                0..4 if self.asked.len() < IN_FLIGHT_MAX => self.ask()?,
                0..6 => self.device_answers()?,
                _ => self.tick()?,
            }
        }
        if self.nature.hangs || self.prng.chance(300) {
            self.tell(StackEvent::Drain)?;
        }
        self.finish()
    }

    /// Everything has to come out.
    fn finish(&mut self) -> Result<Outcome, String> {
        for _ in 0..PATIENCE {
            if self.asked.is_empty() {
                break;
            }
            self.now = self.now + Duration::from_millis(1);
            self.device_answers()?;
            self.tick()?;
            if self.device.is_empty() && !self.asked.is_empty() {
                let Some(due) = self.stack.next_deadline() else { break };
                self.now = self.now.max(due);
            }
        }
        if let Some((token, asked)) = self.asked.first_key_value() {
            return Err(format!("law 1: {token:?} is never answered: {:?}", asked.op));
        }
        self.tell(StackEvent::Drain)?;
        if !self.device.is_empty() {
            return Err(format!("law 4: {} requests come out after all was answered", self.device.len()));
        }
        Ok(Outcome { trace_hash: self.hash, answered: self.answered })
    }

    fn advance(&mut self) {
        let micros = match self.prng.below(100) {
            0 => self.prng.below(200_000),
            1..40 => self.prng.below(3_000),
            _ => self.prng.below(50),
        };
        self.now = self.now + Duration::from_micros(micros);
    }

    fn let_filters_go(&mut self) -> Result<(), String> {
        if self.prng.chance(500) || self.ids.is_empty() {
            return self.tell(StackEvent::Drain);
        }
        let id = self.ids.remove(self.prng.below(self.ids.len() as u64) as usize);
        self.tell(StackEvent::Remove(id))
    }

    fn tick(&mut self) -> Result<(), String> {
        let is_due = self.stack.next_deadline().is_some_and(|due| due <= self.now);
        if is_due || self.prng.chance(200) { self.tell(StackEvent::Tick) } else { Ok(()) }
    }

    fn note(&mut self, text: &str) {
        for byte in text.bytes() {
            self.hash = (self.hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    fn tell(&mut self, event: StackEvent) -> Result<(), String> {
        self.step += 1;
        let mut out = std::mem::take(&mut self.out);
        self.stack.try_handle(self.now, event, &mut out).map_err(|Breach(why)| format!("a law of the stack: {why}"))?;
        let effects = out.take();
        self.out = out;
        for effect in effects {
            let mut text = String::new();
            let _ = write!(text, "{:?} {effect:?}", self.now);
            self.note(&text);
            match effect {
                Effect::Down(request) => self.on_down(request)?,
                Effect::Up(reply) => self.on_up(reply)?,
            }
        }
        Ok(())
    }

    // ---- guests ----

    fn ask(&mut self) -> Result<(), String> {
        let token = RequestToken(self.next_token);
        self.next_token += 1;
        let first = self.prng.below(SECTORS);
        let count = 1 + self.prng.below((SECTORS - first).min(5));
        let range = ByteRange::new(first * SECTOR_BYTES as u64, count * SECTOR_BYTES as u64);
        let op = match self.prng.below(100) {
            0..35 => BlockOp::Read(range),
            35..75 => BlockOp::Write { offset: range.offset, data: encode(token.0, count as usize) },
            75..79 => BlockOp::Discard(range),
            79..82 => BlockOp::WriteZeroes(range),
            82..94 => BlockOp::Flush,
            94..97 => BlockOp::Prefetch(range),
            _ => BlockOp::Status(range),
        };
        let value = if matches!(op, BlockOp::Write { .. }) { token.0 } else { 0 };
        let at = self.step + 1;
        for sector in changed_by(&op) {
            self.history[sector].push(Change { value, asked: at, over: None, done: false });
        }
        self.asked.insert(token, Asked { op: op.clone(), value, at, covers: self.acknowledged_upto });
        self.tell(StackEvent::Request(BlockRequest { token, op }))
    }

    fn on_up(&mut self, reply: BlockReply) -> Result<(), String> {
        let asked = self.asked.remove(&reply.token).ok_or("law 1: an answer to nothing")?;
        self.answered += 1;
        match &reply.result {
            Err(error) => self.check_error(&asked, *error)?,
            Ok(data) => self.check_done(&asked, data)?,
        }
        for sector in changed_by(&asked.op) {
            let own = |change: &&mut Change| change.asked == asked.at && change.value == asked.value;
            let change = self.history[sector].iter_mut().find(own).expect("it was noted when it was asked");
            (change.over, change.done) = (Some(self.step), reply.result.is_ok());
        }
        if asked.value != 0 {
            self.over.insert(asked.value);
            let late = self.device.iter().find(|at| value_of(&at.request.op) == Some(asked.value));
            if let Some(late) = late.filter(|_| !self.nature.alters) {
                return Err(format!("law 4: it is answered, and still below: {:?}", late.request.op));
            }
        }
        Ok(())
    }

    fn check_error(&self, asked: &Asked, error: BlockError) -> Result<(), String> {
        let came = self.refused.get(name_of(error)).is_some_and(|at| *at >= asked.at);
        if !came && !self.nature.fails {
            return Err(format!("law 5: {error:?} did not come from below, to {:?}", asked.op));
        }
        Ok(())
    }

    fn check_done(&mut self, asked: &Asked, data: &BlockData) -> Result<(), String> {
        match (&asked.op, data) {
            (BlockOp::Flush, _) if self.safe_upto < asked.covers => {
                let (safe, covers) = (self.safe_upto, asked.covers);
                return Err(format!("law 3: a flush is answered with {safe} changes safe of {covers}"));
            }
            (BlockOp::Read(range), BlockData::Data(parts)) if !self.nature.alters => {
                self.check_read(asked, *range, &concat(parts))?;
            }
            (BlockOp::Write { .. } | BlockOp::Discard(_) | BlockOp::WriteZeroes(_), _) => {
                let range = range_of(&asked.op).expect("of bytes");
                for sector in sectors_of(range) {
                    let own = |a: &Applied| {
                        a.at >= asked.at
                            && (a.value == asked.value || self.nature.alters)
                            && sectors_of(a.range).contains(&sector)
                    };
                    if !self.applied.iter().rev().any(own) {
                        return Err(format!("law 2: sector {sector} was not written below by {:?}", asked.op));
                    }
                }
                self.acknowledged_upto = self.applied.len() as u64;
            }
            _ => {}
        }
        Ok(())
    }

    /// Every sector shows a change that was there at some time between question and answer.
    fn check_read(&self, asked: &Asked, range: ByteRange, bytes: &[u8]) -> Result<(), String> {
        for (sector, bytes) in sectors_of(range).zip(bytes.chunks_exact(SECTOR_BYTES)) {
            let value = decode(bytes).ok_or_else(|| format!("law 5: sector {sector} holds what nobody wrote"))?;
            let changes = &self.history[sector];
            let is_overwritten = |old: &Change| {
                let is_after = |new: &&Change| {
                    new.done && old.over.is_some_and(|over| new.asked > over) && new.over.is_some_and(|o| o < asked.at)
                };
                changes.iter().any(|new| is_after(&new))
            };
            if !changes.iter().any(|change| change.value == value && !is_overwritten(change)) {
                return Err(format!("law 5: sector {sector} shows write {value}, which it did not hold"));
            }
        }
        Ok(())
    }

    // ---- the device ----

    fn on_down(&mut self, request: BlockRequest) -> Result<(), String> {
        if let Some(range) = range_of(&request.op) {
            let is_whole = |n: u64| n.is_multiple_of(SECTOR_BYTES as u64);
            if !is_whole(range.offset)
                || !is_whole(range.len)
                || range.offset + range.len > SECTORS * SECTOR_BYTES as u64
            {
                return Err(format!("the device takes whole sectors that it has: {:?}", request.op));
            }
        }
        if let Some(value) = value_of(&request.op).filter(|value| self.over.contains(value) && !self.nature.alters) {
            return Err(format!("law 4: write {value} comes after it was answered"));
        }
        if let Some(value) = value_of(&request.op).filter(|_| !self.nature.alters) {
            for sector in changed_by(&request.op) {
                if self.passed[sector] > value {
                    return Err(format!("law 9: write {value} of sector {sector} comes after {}", self.passed[sector]));
                }
                self.passed[sector] = value;
            }
        }
        self.device.push(AtDevice { request, done_then: self.applied.len() as u64 });
        Ok(())
    }

    /// One of what it was asked, whichever.
    fn device_answers(&mut self) -> Result<(), String> {
        if self.device.is_empty() {
            return Ok(());
        }
        let at = self.prng.below(self.device.len() as u64) as usize;
        let AtDevice { request: BlockRequest { token, op }, done_then } = self.device.swap_remove(at);
        if self.prng.chance(30) {
            let error = *self.prng.pick(&[BlockError::NoSpace, BlockError::Unavailable, BlockError::ShuttingDown]);
            self.refused.insert(name_of(error), self.step + 1);
            return self.tell(StackEvent::Reply(BlockReply { token, result: Err(error) }));
        }
        let data = match &op {
            BlockOp::Read(range) => {
                BlockData::Data(sectors_of(*range).map(|sector| encode(self.sectors[sector], 1)).collect())
            }
            BlockOp::Write { offset, data } => {
                for (i, sector) in sectors_of(ByteRange::new(*offset, data.len() as u64)).enumerate() {
                    let bytes = &data[i * SECTOR_BYTES..(i + 1) * SECTOR_BYTES];
                    // What nobody wrote reads as what nobody wrote.
                    self.apply_one(sector, decode(bytes).unwrap_or(Value::MAX));
                }
                BlockData::Done
            }
            BlockOp::Discard(range) | BlockOp::WriteZeroes(range) => {
                sectors_of(*range).for_each(|sector| self.apply_one(sector, 0));
                BlockData::Done
            }
            BlockOp::Flush => {
                self.safe_upto = self.safe_upto.max(done_then);
                BlockData::Done
            }
            BlockOp::Prefetch(_) => BlockData::Done,
            BlockOp::Status(range) | BlockOp::Changes { range, .. } => {
                BlockData::Status(vec![StatusExtent { len: range.len, set: true }])
            }
        };
        self.tell(StackEvent::Reply(BlockReply { token, result: Ok(data) }))
    }

    fn apply_one(&mut self, sector: usize, value: Value) {
        self.sectors[sector] = value;
        let range = ByteRange::new(sector as u64 * SECTOR_BYTES as u64, SECTOR_BYTES as u64);
        self.applied.push(Applied { range, value, at: self.step + 1 });
    }
}

fn sectors_of(range: ByteRange) -> std::ops::Range<usize> {
    let first = range.offset as usize / SECTOR_BYTES;
    first..first + range.len as usize / SECTOR_BYTES
}

fn changed_by(op: &BlockOp) -> std::ops::Range<usize> {
    match op {
        BlockOp::Write { .. } | BlockOp::Discard(_) | BlockOp::WriteZeroes(_) => range_of(op).map_or(0..0, sectors_of),
        _ => 0..0,
    }
}

fn value_of(op: &BlockOp) -> Option<Value> {
    match op {
        BlockOp::Write { data, .. } => decode(data.get(..SECTOR_BYTES)?),
        _ => None,
    }
}

fn name_of(error: BlockError) -> &'static str {
    match error {
        BlockError::OutOfRange => "out of range",
        BlockError::NoSpace => "no space",
        BlockError::Unavailable => "unavailable",
        BlockError::Deposed => "deposed",
        BlockError::ShuttingDown => "shutting down",
        BlockError::Invalid => "invalid",
        BlockError::NotWriter => "not the writer",
        BlockError::Injected => "injected",
    }
}

/// So many sectors of a write.
fn encode(value: Value, sectors: usize) -> Buf {
    Buf::copy_from(&value.to_le_bytes().repeat(sectors * SECTOR_BYTES / 8))
}

/// Which write a sector is of; `None` where it is of none, or of more.
fn decode(sector: &[u8]) -> Option<Value> {
    let (words, _) = sector.as_chunks::<8>();
    let first = words.first()?;
    words.iter().all(|word| word == first).then(|| Value::from_le_bytes(*first))
}
