//! CPU that packing blocks takes: whose blocks are packed next, when, and which are not packed at all.
//!
//! States of a job: waiting (there is no CPU time for it, or others are at the worker) -> given to the worker -> done. One
//! that would wait for longer than its volume does is refused at once, and is written as it is.
//!
//! While guests work, packing has a share of the machine; while none does, another one. Both are kept by credit, which
//! grows with time up to what a second gives. Work is taken from it as estimated, and put right when it is done.
//!
//! Invariants, in [`Packing::verify`]
//! 1. Where somebody waits, either the worker has enough, or there is no credit.
//! 2. Nobody has more than two jobs at the worker, so that a volume waits for no more than these of another.
//!
//! Disaster that the second one prevents: a volume that destages much packs alone, and all others are written raw.

use crate::Mutations;
use crate::event::Call;
use holdfast_base::buf::total_len;
use holdfast_base::{BLOCK_BYTES, Buf, Instant, Token};
use holdfast_volume::Task;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Jobs that the worker has at a time: one, and the next.
const GIVEN_MAX: usize = 2;

/// Blocks of a volume that wait: beyond that they are written as they are.
const WAITING_BYTES_MAX: usize = 8 << 20;

/// Guests rest when none has asked for anything for so long.
const REST: Duration = Duration::from_secs(1);

/// The first guess of what a block costs.
const BLOCK_COST: Duration = Duration::from_micros(8);

/// What is told of the recent past is told of the last whole one of these, and of this one.
const RECENT: Duration = Duration::from_secs(10);

/// Of the machine's CPU, what a reactor's packing may take, in thousandths of a core.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PackingShare {
    pub busy_per_mille: u32,
    /// While guests rest.
    pub idle_per_mille: u32,
}

impl Default for PackingShare {
    /// Of two cores.
    fn default() -> PackingShare {
        PackingShare { busy_per_mille: 200, idle_per_mille: 1000 }
    }
}

/// How packing fares on a reactor.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct PackingFigures {
    /// CPU time of the last ten to twenty seconds, and how long these were.
    pub recent_cpu: Duration,
    pub recent: Duration,
    /// Of a block, lately.
    pub block_cost: Duration,
    /// Blocks that were written as they are for want of CPU time, since the start.
    pub refused_blocks: u64,
}

impl PackingFigures {
    /// Of two reactors.
    pub fn and(self, other: PackingFigures) -> PackingFigures {
        PackingFigures {
            recent_cpu: self.recent_cpu + other.recent_cpu,
            recent: self.recent.max(other.recent),
            block_cost: self.block_cost.max(other.block_cost),
            refused_blocks: self.refused_blocks + other.refused_blocks,
        }
    }
}

/// Blocks that a volume wants packed.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) call: Call,
    pub(crate) task: Task,
    pub(crate) blocks: Vec<Buf>,
    /// The volume waits no longer.
    pub(crate) until: Instant,
}

impl Job {
    fn count(&self) -> u64 {
        (total_len(&self.blocks) / BLOCK_BYTES) as u64
    }
}

pub(crate) struct Packing {
    share: PackingShare,
    /// CPU time in nanoseconds; below zero after work that took longer than it was thought to.
    credit: i64,
    as_of: Instant,
    /// The last request of a guest.
    guests_at: Option<Instant>,
    block_ns: u64,
    waiting: BTreeMap<Token, VecDeque<Job>>,
    /// Whose turn was the last.
    last: Option<Token>,
    /// With what was taken from the credit for it, and its blocks.
    given: BTreeMap<Call, (u64, u64)>,
    /// Since when, how much, and how much in the span before that.
    recent: (Instant, u64, u64),
    refused_blocks: u64,
    pub(crate) refused: VecDeque<(Call, Task)>,
    mutations: Mutations,
}

impl Packing {
    pub(crate) fn new(share: PackingShare, mutations: Mutations) -> Packing {
        Packing {
            share,
            credit: 0,
            as_of: Instant::ZERO,
            guests_at: None,
            block_ns: BLOCK_COST.as_nanos() as u64,
            waiting: BTreeMap::new(),
            last: None,
            given: BTreeMap::new(),
            recent: (Instant::ZERO, 0, 0),
            refused_blocks: 0,
            refused: VecDeque::new(),
            mutations,
        }
    }

    /// A guest has asked for something.
    pub(crate) fn note_guest(&mut self, now: Instant) {
        self.guests_at = Some(now);
    }

    /// Takes a job, or refuses it: its volume hears of that by `refused`.
    pub(crate) fn ask(&mut self, now: Instant, job: Job) {
        self.refill(now);
        let own = self.waiting.get(&job.call.volume);
        let own_blocks: u64 = own.iter().flat_map(|jobs| jobs.iter()).map(Job::count).sum();
        let others = self.waiting.len() - usize::from(own.is_some());
        let is_too_much = own.is_some() && (own_blocks + job.count()) * BLOCK_BYTES as u64 > WAITING_BYTES_MAX as u64;
        // Volumes take turns, so others have as much before it at most.
        let ahead_ns = own_blocks * self.block_ns * (others as u64 + 1);
        let ready_at = self.ready_at(ahead_ns);
        if is_too_much || ready_at.is_none_or(|at| at >= job.until) {
            self.refused_blocks += job.count();
            return self.refused.push_back((job.call, job.task));
        }
        self.waiting.entry(job.call.volume).or_default().push_back(job);
    }

    /// The worker is done with it.
    pub(crate) fn done(&mut self, now: Instant, call: Call, cpu: Duration) {
        self.refill(now);
        let Some((taken, blocks)) = self.given.remove(&call) else { return };
        let cpu = cpu.as_nanos() as u64;
        let of_share = if self.mutations.packs_for_nothing() { 0 } else { cpu };
        self.credit += taken as i64 - of_share as i64;
        self.recent.1 += cpu;
        if let Some(each) = cpu.checked_div(blocks) {
            self.block_ns = (self.block_ns * 7 + each) / 8;
        }
    }

    /// The next job for the worker, if it may have one now.
    pub(crate) fn next(&mut self, now: Instant) -> Option<Job> {
        self.refill(now);
        self.drop_late(now);
        if self.credit <= 0 || self.given.len() >= GIVEN_MAX {
            return None;
        }
        let behind = self.last.and_then(|last| self.waiting.keys().find(|at| **at > last));
        let at = *behind.or_else(|| self.waiting.keys().next())?;
        let jobs = self.waiting.get_mut(&at).expect("just seen");
        let job = jobs.pop_front().expect("those who wait for nothing are gone");
        if jobs.is_empty() {
            self.waiting.remove(&at);
        }
        let (blocks, cost) = (job.count(), job.count() * self.block_ns);
        self.last = Some(at);
        self.credit -= cost as i64;
        self.given.insert(job.call, (cost, blocks));
        Some(job)
    }

    /// The volume is gone.
    pub(crate) fn forget(&mut self, at: Token) {
        self.waiting.remove(&at);
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let jobs = || self.waiting.values().flatten();
        let late_at = jobs().map(|job| job.until).min()?;
        let ready_at = if self.given.len() < GIVEN_MAX { self.ready_at(0) } else { None };
        Some(ready_at.map_or(late_at, |at| at.min(late_at)))
    }

    pub(crate) fn figures(&self, now: Instant) -> PackingFigures {
        let (since, cpu, before) = self.recent;
        let recent = now.since(since) + if since > Instant::ZERO { RECENT } else { Duration::ZERO };
        PackingFigures {
            recent_cpu: Duration::from_nanos(cpu + before),
            recent,
            block_cost: Duration::from_nanos(self.block_ns),
            refused_blocks: self.refused_blocks,
        }
    }

    /// # Panics
    /// An invariant of the module does not hold.
    pub(crate) fn verify(&self) {
        assert!(self.given.len() <= GIVEN_MAX, "{} jobs are at the worker", self.given.len());
        assert!(self.waiting.values().all(|jobs| !jobs.is_empty()), "a volume waits for nothing");
        let may_go = self.credit > 0 && self.given.len() < GIVEN_MAX;
        assert!(self.waiting.is_empty() || !may_go, "somebody waits, and there is CPU time");
    }

    // ---- credit ----

    /// In thousandths of a core, which are microseconds of CPU time for each millisecond.
    fn per_mille(&self) -> u32 {
        let is_busy = self.guests_at.is_some_and(|at| self.as_of.since(at) < REST);
        if is_busy { self.share.busy_per_mille } else { self.share.idle_per_mille }
    }

    fn refill(&mut self, now: Instant) {
        let per_mille = u64::from(self.per_mille());
        let passed_ns = now.since(self.as_of).as_nanos() as u64;
        self.as_of = self.as_of.max(now);
        let most = per_mille as i64 * 1_000_000;
        let more = i64::try_from(passed_ns.saturating_mul(per_mille) / 1000).unwrap_or(i64::MAX);
        self.credit = self.credit.saturating_add(more).min(most);
        let (since, cpu, _) = self.recent;
        match now.since(since) {
            span if span >= 2 * RECENT => self.recent = (now, 0, 0),
            span if span >= RECENT => self.recent = (now, 0, cpu),
            _ => {}
        }
    }

    /// When there is CPU time again, once so much more is taken; never, where there is no share.
    fn ready_at(&self, ahead_ns: u64) -> Option<Instant> {
        let missing = u64::try_from(ahead_ns as i64 - self.credit + 1).unwrap_or(0);
        match u64::from(self.per_mille()) {
            _ if missing == 0 => Some(self.as_of),
            0 => None,
            per_mille => Some(self.as_of + Duration::from_nanos((missing * 1000).div_ceil(per_mille))),
        }
    }

    /// Their volumes have written these as they are.
    fn drop_late(&mut self, now: Instant) {
        let Packing { waiting, refused_blocks, .. } = self;
        for jobs in waiting.values_mut() {
            jobs.retain(|job| {
                let is_late = job.until <= now;
                *refused_blocks += if is_late { job.count() } else { 0 };
                !is_late
            });
        }
        waiting.retain(|_, jobs| !jobs.is_empty());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_format::packing::Codec;
    use holdfast_volume::Way;

    const SHARE: PackingShare = PackingShare { busy_per_mille: 100, idle_per_mille: 500 };

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn start() -> Instant {
        Instant::ZERO + ms(1_000_000)
    }

    fn job(volume: u64, token: u64, blocks: usize, until: Instant) -> Job {
        let blocks = vec![Buf::copy_from(&vec![0; blocks * BLOCK_BYTES])];
        let task = Task::Pack(Way { codec: Codec::Lz4, is_sealed: false });
        Job { call: Call { volume: Token(volume), token }, task, blocks, until }
    }

    /// A worker that takes so long for a block, and volumes that ask for a job every millisecond each, and wait so long.
    struct Run {
        packing: Packing,
        now: Instant,
        block: Duration,
        at_worker: VecDeque<(Instant, Call, Duration)>,
        packed: BTreeMap<u64, u64>,
        refused: u64,
        cpu: Duration,
    }

    impl Run {
        fn new(share: PackingShare, block: Duration) -> Run {
            let mut packing = Packing::new(share, Mutations::default());
            packing.refill(start());
            let (at_worker, packed) = (VecDeque::new(), BTreeMap::new());
            Run { packing, now: start(), block, at_worker, packed, refused: 0, cpu: Duration::ZERO }
        }

        fn pass(&mut self, for_ms: u64, volumes: &[(u64, usize)], guests: bool, patience: Duration) {
            for _ in 0..for_ms {
                self.now = self.now + ms(1);
                if guests {
                    self.packing.note_guest(self.now);
                }
                while self.at_worker.front().is_some_and(|(at, ..)| *at <= self.now) {
                    let (_, call, cpu) = self.at_worker.pop_front().expect("just seen");
                    self.packing.done(self.now, call, cpu);
                    *self.packed.entry(call.volume.0).or_default() += 1;
                    self.cpu += cpu;
                }
                for (volume, blocks) in volumes {
                    let token = self.now.0;
                    self.packing.ask(self.now, job(*volume, token, *blocks, self.now + patience));
                }
                while let Some(job) = self.packing.next(self.now) {
                    let cpu = self.block * job.count() as u32;
                    let free_at = self.at_worker.back().map_or(self.now, |(at, ..)| *at);
                    self.at_worker.push_back((free_at + cpu, job.call, cpu));
                }
                self.refused += self.packing.refused.drain(..).count() as u64;
                self.packing.verify();
            }
        }
    }

    #[test]
    fn packing_keeps_to_its_share_whatever_a_block_costs() {
        for (guests, per_mille) in [(true, 100), (false, 500)] {
            for us in [1, 8, 40] {
                let mut run = Run::new(SHARE, Duration::from_micros(us));
                run.pass(10_000, &[(1, 256), (2, 256)], guests, ms(50));
                // What a second gives is there at the beginning, and two jobs may cost more than was thought.
                let most = ms(per_mille * 11) + Duration::from_micros(us) * 512;
                let least = ms(per_mille * 10).min(Duration::from_micros(us) * 256 * 2 * 10_000) * 9 / 10;
                assert!(run.cpu <= most && run.cpu >= least, "{guests} {us}: {:?} of {most:?}", run.cpu);
                assert!(us == 1 || run.refused > 0);
            }
        }
    }

    #[test]
    fn a_volume_that_packs_little_is_not_refused_beside_one_that_packs_much() {
        let mut run = Run::new(SHARE, Duration::from_micros(8));
        let few = |packing: &Packing| packing.refused.iter().filter(|(call, _)| call.volume == Token(2)).count();
        let mut refused = 0;
        for n in 0..200 {
            run.pass(20, &[(1, 256)], true, ms(50));
            run.packing.ask(run.now, job(2, n, 16, run.now + ms(50)));
            refused += few(&run.packing);
            run.packing.refused.clear();
        }
        run.pass(50, &[], true, ms(50));
        // A job that comes while credit is owed for one of the other's, and one more of it goes first, is late at times.
        let packed = run.packed[&2];
        assert!(refused <= 2 && packed >= 180, "{refused} refused, {packed} packed");
    }

    #[test]
    fn without_a_share_all_is_refused_while_guests_work_and_packed_while_they_rest() {
        let mut run = Run::new(PackingShare { busy_per_mille: 0, ..SHARE }, Duration::from_micros(8));
        run.packing.note_guest(run.now);
        run.pass(2_000, &[(1, 64)], true, ms(50));
        assert!(run.packed.is_empty() && run.refused == 2_000, "{} refused", run.refused);
        assert_eq!(run.packing.figures(run.now).refused_blocks, 2_000 * 64);
        run.pass(1_500, &[(1, 64)], false, ms(50));
        assert!(run.packed[&1] > 50, "{:?}", run.packed);
        // They come back while much waits: nobody is left behind for ever.
        run.packing.ask(run.now, job(1, 0, 256, run.now + ms(5_000)));
        run.pass(5_100, &[], true, ms(50));
        assert!(run.packing.next_deadline().is_none() && run.packing.waiting.is_empty());
    }

    #[test]
    fn what_waits_has_its_turn_when_there_is_cpu_time_again_or_ends_when_its_volume_waits_no_more() {
        let mut packing = Packing::new(SHARE, Mutations::default());
        let now = start();
        packing.note_guest(now);
        packing.refill(now);
        // 100 ms of CPU time are there, and each of these takes longer than is thought at first.
        for n in 0..5 {
            packing.ask(now, job(1, n, 1000, now + ms(5_000)));
            assert!(packing.next(now).is_some());
            packing.done(now, Call { volume: Token(1), token: n }, ms(22));
        }
        assert!(packing.credit == -10_000_000 && packing.refused.is_empty());
        packing.ask(now, job(1, 20, 1000, now + ms(50)));
        assert_eq!(packing.refused.pop_front().map(|(call, _)| call), Some(Call { volume: Token(1), token: 20 }));
        packing.ask(now, job(1, 21, 1000, now + ms(5_000)));
        assert!(packing.next(now).is_none());
        let at = packing.next_deadline().expect("one waits");
        packing.note_guest(at);
        assert!(at > now + ms(100) && packing.next(at - ms(10)).is_none());
        assert_eq!(packing.next(at).map(|job| job.call.token), Some(21));
        packing.ask(at, job(2, 22, 1, at + ms(5_000)));
        packing.forget(Token(2));
        assert!(packing.next_deadline().is_none());
    }
}
