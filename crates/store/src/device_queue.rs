//! Disk operations of one device that are under way: in flight, waiting for a place, or resting before another try.
//!
//! Role: handlers start operations ([`DeviceQueue::start`]); those that the device may have now become effects at once, the
//! others with completions ([`DeviceQueue::on_done`]). The shell has no queue of its own. How many the device may have is
//! for [`Depth`] to say.
//!
//! States of an operation: waiting → in flight → done. A read that failed may rest, and starts again as if it were new.
//! When the device is out, what waits or rests is dropped, and what is in flight ends as the shell tells.
//!
//! Order: the most urgent line first. There is one for each class, and of reads one for each urgency of requests; in a line
//! hosts take turns ([`crate::line`]). Where [`PASSED_MAX`] operations have passed the oldest of a line since one of it went,
//! that one goes before all that came later, and nothing else with it.
//!
//! Invariants
//! 1. At most `in_flight_max` operations are in flight, and none waits while nothing is.
//! 2. An operation of the most urgent line starts no later than it would in order of arrival.
//! 3. Of a line in which something waits, one operation goes after at most [`PASSED_MAX`] of others that came later than its
//!    oldest: so care goes on, however many guests read.
//! 4. An operation is in one state, and is known until it is done or dropped.
//!
//! Limits: [`IO_MAX`] operations in all; requests ask [`DeviceQueue::has_room`] first.

use crate::api::{DeviceSlot, Effect};
use crate::depth::Depth;
use crate::io::{IO_MAX, IO_RESERVE, Io, Started, disk_token};
use crate::line::{Line, Waiting, Whose};
use holdfast_base::{Buf, Effects, Instant, Slab, Token, Urgency};

/// Later operations that may pass one before it is its turn: waits stay within a few times those in order of arrival.
const PASSED_MAX: u32 = 8;

/// Classes, the most urgent first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Class {
    /// The journal and its tables: appends wait for these, and whoever opens a volume.
    Journal,
    /// Reads of shards.
    Read,
    /// Shards that are put and deleted, checks, and what the read cache writes.
    Bulk,
}

const LINES: usize = 5;

/// Its line's place, the most urgent first.
fn line_of(class: Class, urgency: Urgency) -> usize {
    match (class, urgency) {
        (Class::Journal, _) => 0,
        (Class::Read, Urgency::Sparse) => 1,
        (Class::Read, Urgency::Normal) => 2,
        (Class::Read, Urgency::Care) => 3,
        (Class::Bulk, _) => 4,
    }
}

/// What the device is to do.
#[derive(Debug)]
pub(crate) enum Op {
    Read { offset: u64, len: u32 },
    Write { offset: u64, data: Vec<Buf>, durable: bool },
    Flush,
}

impl Op {
    pub fn bytes(&self) -> u64 {
        match self {
            Op::Read { len, .. } => u64::from(*len),
            Op::Write { data, .. } => holdfast_base::buf::total_len(data) as u64,
            Op::Flush => 0,
        }
    }
}

#[derive(Debug)]
pub(crate) struct DeviceQueue {
    slot: DeviceSlot,
    under_way: Slab<Started>,
    in_flight: usize,
    depth: Depth,
    in_flight_max: usize,
    lines: [Line; LINES],
    waiting: usize,
    resting: usize,
    arrivals: u64,
}

impl DeviceQueue {
    pub fn new(slot: DeviceSlot, in_flight_max: usize) -> DeviceQueue {
        assert!(in_flight_max > 0, "a device that may do nothing");
        DeviceQueue {
            slot,
            under_way: Slab::new(IO_MAX),
            in_flight: 0,
            depth: Depth::new(in_flight_max),
            in_flight_max,
            lines: Default::default(),
            waiting: 0,
            resting: 0,
            arrivals: 0,
        }
    }

    /// Whether a new request may start operations.
    pub fn has_room(&self) -> bool {
        self.under_way.len() + IO_RESERVE <= IO_MAX
    }

    /// Operations that had to wait for a place, ever.
    pub fn waited(&self) -> u64 {
        self.arrivals
    }

    pub fn is_empty(&self) -> bool {
        self.under_way.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = &Started> {
        self.under_way.iter().map(|(_, started)| started)
    }

    pub fn get_mut(&mut self, token: Token) -> Option<&mut Started> {
        self.under_way.get_mut(token)
    }

    /// Has the operation carried out, now or when its turn comes.
    #[inline]
    pub fn start(&mut self, started: Started, op: Op, out: &mut Effects<Effect>) {
        let now = started.at;
        let token = self.under_way.insert(started);
        self.submit(now, token, op, out);
    }

    #[inline]
    fn submit(&mut self, now: Instant, token: Token, op: Op, out: &mut Effects<Effect>) {
        if self.waiting == 0 && self.in_flight < self.depth.now(now) {
            return self.go(now, token, op, out);
        }
        self.wait(token, op);
        self.fill(now, out);
    }

    #[inline]
    fn go(&mut self, now: Instant, token: Token, op: Op, out: &mut Effects<Effect>) {
        self.under_way.get_mut(token).expect("its caller knows it").went_at = Some(now);
        self.in_flight += 1;
        out.push(effect(self.slot, token, op));
    }

    #[cold]
    fn wait(&mut self, token: Token, op: Op) {
        let io = &self.under_way.get(token).expect("its caller knows it").io;
        let (class, Whose { host, urgency }) = (io.class(), io.whose());
        let arrival = self.arrivals;
        self.arrivals += 1;
        self.waiting += 1;
        // Others than reads are in order of arrival.
        let host = if class == Class::Read { host } else { Default::default() };
        self.lines[line_of(class, urgency)].push(host, Waiting { arrival, token, op });
    }

    /// The shell is done with an operation, and the next one starts. Nothing where it is of a life that was forgotten.
    #[inline]
    pub fn on_done(&mut self, now: Instant, token: Token, out: &mut Effects<Effect>) -> Option<Started> {
        let started = self.under_way.remove(token)?;
        self.see(now, &started);
        self.in_flight -= 1;
        self.fill(now, out);
        Some(started)
    }

    /// What guests read one by one is seen. Tables of shards go as such reads do, and anybody's reads need them.
    #[inline]
    fn see(&mut self, now: Instant, started: &Started) {
        if let (Some(went_at), Some((_, bytes))) = (started.went_at, started.read)
            && matches!(started.io, Io::ShardRead(_) | Io::CachedRead { .. })
            && started.io.class() == Class::Read
            && started.io.whose().urgency == Urgency::Sparse
        {
            self.depth.on_sparse_read(now, bytes, now.since(went_at), self.in_flight, self.waiting > 0);
        }
    }

    /// Gives the device what it may have.
    #[inline]
    fn fill(&mut self, now: Instant, out: &mut Effects<Effect>) {
        while self.waiting > 0 && self.in_flight < self.depth.now(now) {
            let Waiting { token, op, .. } = self.next();
            self.go(now, token, op, out);
        }
    }

    /// A read has failed, and is going to be tried again; the next operation starts.
    pub fn rest(&mut self, now: Instant, token: Token, out: &mut Effects<Effect>) {
        self.under_way.get_mut(token).expect("it rests before it is forgotten").went_at = None;
        self.resting += 1;
        self.in_flight -= 1;
        self.fill(now, out);
    }

    /// A read has rested.
    pub fn retry(&mut self, now: Instant, token: Token, out: &mut Effects<Effect>) {
        let started = self.under_way.get(token).expect("it rests");
        let (offset, len) = started.read.expect("only reads rest");
        self.resting -= 1;
        self.submit(now, token, Op::Read { offset, len }, out);
    }

    /// The next of the most urgent line, or the oldest of one that has been passed often enough, if that came earlier.
    fn next(&mut self) -> Waiting {
        let first = self.lines.iter().position(|line| !line.is_empty()).expect("one waits");
        let arrival = self.lines[first].next().expect("just seen");
        let overdue = (first + 1..LINES).filter(|line| self.lines[*line].passed >= PASSED_MAX);
        let overdue = overdue.filter_map(|line| Some((self.lines[line].oldest()?, line)));
        let chosen = overdue.filter(|(oldest, _)| *oldest < arrival).min().map(|(_, line)| line);
        let next = match chosen {
            Some(line) => self.lines[line].pop_oldest(),
            None => self.lines[first].pop(),
        };
        for line in &mut self.lines {
            line.passed += u32::from(line.oldest().is_some_and(|arrival| arrival < next.arrival));
        }
        self.lines[chosen.unwrap_or(first)].passed = 0;
        self.waiting -= 1;
        next
    }

    /// The device is out: what is not in flight is forgotten.
    pub fn drop_waiting(&mut self, resting: impl Iterator<Item = Token>) {
        for waiting in self.lines.iter_mut().flat_map(Line::drain) {
            self.under_way.remove(waiting.token);
        }
        for token in resting {
            self.under_way.remove(token);
        }
        (self.waiting, self.resting) = (0, 0);
    }

    /// For a mutation: what is in flight is forgotten, too.
    pub fn forget(&mut self) {
        self.under_way.tokens().into_iter().for_each(|token| drop(self.under_way.remove(token)));
        self.in_flight = 0;
    }

    /// Asserts what must hold between events (tests and the simulator).
    pub fn verify(&self, resting: usize) {
        assert_eq!(self.resting, resting, "what rests is tried again");
        assert!(self.in_flight <= self.in_flight_max, "{} operations in flight", self.in_flight);
        assert!(self.waiting == 0 || self.in_flight > 0, "{} wait for nothing", self.waiting);
        self.depth.verify();
        assert_eq!(self.in_flight + self.waiting + self.resting, self.under_way.len(), "each is in one state");
        let gone = self.iter().filter(|started| started.went_at.is_some()).count();
        assert_eq!(gone, self.in_flight, "what is in flight has gone");
        assert_eq!(self.lines.iter().map(Line::len).sum::<usize>(), self.waiting);
        self.lines.iter().for_each(|line| line.verify(|token| self.under_way.get(token).is_some()));
    }
}

fn effect(slot: DeviceSlot, token: Token, op: Op) -> Effect {
    let token = disk_token(slot, token);
    match op {
        Op::Read { offset, len } => Effect::Read { slot, offset, len, token },
        Op::Write { offset, data, durable } => Effect::Write { slot, offset, data, durable, token },
        Op::Flush => Effect::Flush { slot, token },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::Io;
    use crate::line::HostTag;
    use crate::meter::Kind;
    use holdfast_base::Prng;
    use std::collections::BTreeMap;
    use std::time::Duration;

    /// By line.
    const OF: [(Class, Urgency); LINES] = [
        (Class::Journal, Urgency::Normal),
        (Class::Read, Urgency::Sparse),
        (Class::Read, Urgency::Normal),
        (Class::Read, Urgency::Care),
        (Class::Bulk, Urgency::Normal),
    ];
    const NOW: Instant = Instant(1);
    const JOURNAL: usize = 0;
    const READ: usize = 2;
    const BULK: usize = 4;

    fn started(line: usize, host: &str) -> Started {
        let (class, urgency) = OF[line];
        let whose = Whose { host: HostTag::of(host), urgency };
        let (io, read) = match class {
            Class::Journal => (Io::UnitTable, None),
            Class::Read => (Io::CachedRead { ticket: Token(0), part: 0, whose }, Some((0, 4096))),
            Class::Bulk => (Io::SlotBlock { block: 0 }, None),
        };
        assert_eq!((io.class(), line_of(class, urgency)), (class, line));
        Started { io, kind: Kind::Other, at: NOW, went_at: None, read, failures: 0 }
    }

    /// A queue, and what it was given: line and arrival by token.
    struct Rig {
        queue: DeviceQueue,
        out: Effects<Effect>,
        waiting: BTreeMap<Token, (usize, u64)>,
        in_flight: Vec<Token>,
        now: Instant,
        begun: u64,
        /// Operations that started, by arrival and line.
        order: Vec<(u64, usize)>,
    }

    impl Rig {
        fn new(in_flight_max: usize) -> Rig {
            let queue = DeviceQueue::new(DeviceSlot(3), in_flight_max);
            let (waiting, in_flight, order) = (BTreeMap::new(), Vec::new(), Vec::new());
            Rig { queue, out: Effects::new(), waiting, in_flight, now: NOW, begun: 0, order }
        }

        fn start(&mut self, line: usize) {
            self.start_of(line, "a");
        }

        fn start_of(&mut self, line: usize, host: &str) {
            let before: Vec<Token> = self.queue.under_way.tokens();
            let read = Op::Read { offset: 0, len: 4096 };
            let op = if OF[line].0 == Class::Read { read } else { Op::Flush };
            self.queue.start(Started { at: self.now, ..started(line, host) }, op, &mut self.out);
            let token = self.queue.under_way.tokens().into_iter().find(|token| !before.contains(token)).unwrap();
            self.begun += 1;
            self.waiting.insert(token, (line, self.begun));
            self.look();
        }

        fn look(&mut self) {
            for effect in self.out.take() {
                let (Effect::Read { token, .. } | Effect::Flush { token, .. }) = effect else { panic!("{effect:?}") };
                let (slot, token) = crate::io::split_token(token);
                assert_eq!(slot, DeviceSlot(3));
                let (line, arrival) = self.waiting.remove(&token).expect("it starts once");
                self.in_flight.push(token);
                self.order.push((arrival, line));
            }
            self.queue.verify(0);
        }

        fn end(&mut self, at: usize) {
            let token = self.in_flight.swap_remove(at);
            assert!(self.queue.on_done(self.now, token, &mut self.out).is_some());
            self.look();
            assert!(self.queue.on_done(self.now, token, &mut self.out).is_none(), "it is done once");
        }
    }

    #[test]
    fn all_start_once_in_bounds_and_nothing_urgent_starts_later_than_in_order_of_arrival() {
        for seed in 0..200 {
            let mut prng = Prng::new(seed);
            let mut rig = Rig::new(1 + prng.below(4) as usize);
            let mut weights = [prng.below(4), prng.below(4), prng.below(4), prng.below(4), 1 + prng.below(4)];
            weights[prng.below(5) as usize] *= 4;
            for _ in 0..300 {
                if prng.chance(550) {
                    let mut at = prng.below(weights.iter().sum::<u64>().max(1));
                    let is_it = |weight: &u64| {
                        let is_it = at < *weight;
                        at = at.saturating_sub(*weight);
                        is_it
                    };
                    rig.start(weights.iter().position(is_it).unwrap_or(BULK));
                } else if !rig.in_flight.is_empty() {
                    let at = prng.below(rig.in_flight.len() as u64) as usize;
                    rig.end(at);
                }
            }
            while !rig.in_flight.is_empty() {
                rig.end(0);
            }
            assert!(rig.queue.is_empty() && rig.waiting.is_empty() && rig.order.len() as u64 == rig.begun);
            for (at, (arrival, line)) in rig.order.iter().enumerate() {
                let later = rig.order[..at].iter().filter(|(other, _)| other > arrival).count() as u64;
                let same = |(other, of): &&(u64, usize)| of == line && other < arrival;
                let before = rig.order.iter().filter(same).count() as u64;
                let most = if *line == JOURNAL { 0 } else { u64::from(PASSED_MAX) * (before + 1) };
                assert!(
                    later <= most,
                    "seed {seed}: {arrival} of {:?} is passed by {later} that came later",
                    OF[*line]
                );
            }
        }
    }

    #[test]
    fn the_most_urgent_goes_first_and_the_others_come_about() {
        let mut rig = Rig::new(1);
        (0..3).for_each(|_| rig.start(BULK));
        rig.start(READ);
        rig.start(JOURNAL);
        rig.end(0);
        rig.end(0);
        assert_eq!(rig.order, [(1, BULK), (5, JOURNAL), (4, READ)]);
        // There is always something more urgent.
        for _ in 0..2 * PASSED_MAX {
            rig.start(JOURNAL);
            rig.end(0);
        }
        let bulk: Vec<u64> = rig.order.iter().filter(|(_, line)| *line == BULK).map(|(at, _)| *at).collect();
        assert_eq!(bulk, [1, 2, 3]);
    }

    #[test]
    fn sparse_reads_go_first_and_care_goes_last_and_on() {
        const SPARSE: usize = 1;
        const CARE: usize = 3;
        let mut rig = Rig::new(1);
        [READ, CARE, CARE, READ, SPARSE].into_iter().for_each(|line| rig.start(line));
        (0..4).for_each(|_| rig.end(0));
        assert_eq!(rig.order.iter().map(|(_, line)| *line).collect::<Vec<_>>(), [READ, SPARSE, READ, CARE, CARE]);
        // Guests read without end.
        rig.order.clear();
        (0..3).for_each(|_| rig.start(CARE));
        for _ in 0..5 * PASSED_MAX {
            rig.start(READ);
            rig.end(0);
        }
        let at: Vec<usize> = (0..rig.order.len()).filter(|at| rig.order[*at].1 == CARE).collect();
        assert_eq!(at.len(), 3, "{:?}", rig.order);
        assert!(at.windows(2).all(|pair| pair[1] - pair[0] <= PASSED_MAX as usize + 1), "{at:?}");
    }

    #[test]
    fn what_is_overdue_goes_alone_and_has_nobody_wait_for_what_came_before_it() {
        const SPARSE: usize = 1;
        let mut rig = Rig::new(1);
        (0..50).for_each(|_| rig.start(READ));
        rig.start(BULK);
        for _ in 0..4 * PASSED_MAX {
            rig.start(SPARSE);
            let before = rig.order.len();
            while rig.order.last().is_none_or(|(_, line)| *line != SPARSE) || rig.order.len() == before {
                rig.end(0);
            }
            assert!(rig.order.len() - before <= 3, "a sparse read waits for {:?}", &rig.order[before..]);
        }
        assert!(rig.order.iter().any(|(_, line)| *line == BULK));
    }

    #[test]
    fn a_device_has_less_at_a_time_while_a_guest_reads_one_by_one_and_all_again_when_it_is_gone() {
        const SPARSE: usize = 1;
        let mut rig = Rig::new(64);
        (0..200).for_each(|_| rig.start(READ));
        assert_eq!(rig.in_flight.len(), 64);
        let mut at_a_time = 0;
        for _ in 0..200 {
            rig.start(SPARSE);
            let own = (rig.begun, SPARSE);
            while rig.order.last() != Some(&own) {
                rig.end(0);
                rig.start(READ);
            }
            // It comes behind all that the device has.
            at_a_time = rig.in_flight.len();
            rig.now = rig.now + Duration::from_micros(100 * at_a_time as u64);
            rig.end(at_a_time - 1);
        }
        assert!((4..=24).contains(&at_a_time), "{at_a_time}");
        rig.now = rig.now + Duration::from_millis(100);
        rig.end(0);
        assert_eq!(rig.in_flight.len(), 64);
    }

    #[test]
    fn a_host_that_reads_one_at_a_time_does_not_wait_for_all_that_another_reads() {
        let mut rig = Rig::new(1);
        (0..100).for_each(|_| rig.start_of(READ, "noisy"));
        rig.start_of(READ, "quiet");
        let ended = (0..).find(|_| {
            rig.end(0);
            rig.order.last().is_some_and(|(arrival, _)| *arrival == 101)
        });
        assert!(ended.is_some_and(|ended| ended <= 8), "{ended:?} went before it");
    }

    #[test]
    fn what_waits_or_rests_is_dropped_and_what_is_in_flight_ends() {
        let mut rig = Rig::new(2);
        [READ, READ, JOURNAL, BULK].into_iter().for_each(|line| rig.start(line));
        let resting = rig.in_flight[0];
        rig.queue.rest(NOW, resting, &mut rig.out);
        rig.queue.verify(1);
        assert_eq!(rig.out.take().len(), 1, "another one takes its place");
        rig.queue.drop_waiting([resting].into_iter());
        rig.queue.verify(0);
        assert_eq!(rig.queue.iter().count(), 2);
        assert!(rig.queue.on_done(NOW, rig.in_flight[1], &mut rig.out).is_some() && rig.out.take().is_empty());
    }

    #[test]
    fn a_read_that_has_rested_waits_for_its_turn() {
        let mut rig = Rig::new(1);
        rig.start(READ);
        rig.start(BULK);
        let read = rig.in_flight[0];
        rig.queue.rest(NOW, read, &mut rig.out);
        let Some(Effect::Flush { token, .. }) = rig.out.take().pop() else { panic!("another one takes its place") };
        rig.queue.retry(NOW, read, &mut rig.out);
        assert!(rig.out.take().is_empty(), "its place is taken");
        rig.queue.verify(0);
        assert!(rig.queue.on_done(NOW, crate::io::split_token(token).1, &mut rig.out).is_some());
        let again = rig.out.take();
        assert!(matches!(again[..], [Effect::Read { token, .. }] if token == disk_token(DeviceSlot(3), read)));
    }
}
