//! Disk operations of one device that are under way: in flight, waiting for a place, or resting before another try.
//!
//! Role: handlers start operations ([`DeviceQueue::start`]); those that the device may have now become effects at once, the
//! others with completions ([`DeviceQueue::on_done`]). The shell has no queue of its own.
//!
//! States of an operation: waiting → in flight → done. A read that failed may rest, and starts again as if it were new.
//! When the device is out, what waits or rests is dropped, and what is in flight ends as the shell tells.
//!
//! Order: the most urgent class first, each class in order of arrival. An operation that has been passed
//! [`PASSED_MAX`] times goes before all that came later.
//!
//! Invariants
//! 1. At most `in_flight_max` operations are in flight, and none waits while there is a place.
//! 2. An operation of the most urgent class starts no later than it would in order of arrival.
//! 3. An operation is passed by at most [`PASSED_MAX`] that came later, for each operation of its class before it.
//! 4. An operation is in one state, and is known until it is done or dropped.
//!
//! Limits: [`IO_MAX`] operations in all; requests ask [`DeviceQueue::has_room`] first.

use crate::api::{DeviceSlot, Effect};
use crate::io::{IO_MAX, IO_RESERVE, Started, disk_token};
use holdfast_base::{Buf, Effects, Slab, Token};
use std::collections::VecDeque;

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

const CLASSES: usize = 3;

/// What the device is to do.
#[derive(Debug)]
pub(crate) enum Op {
    Read { offset: u64, len: u32 },
    Write { offset: u64, data: Vec<Buf>, durable: bool },
    Flush,
}

#[derive(Debug)]
struct Waiting {
    /// Orders operations of all classes.
    arrival: u64,
    token: Token,
    op: Op,
}

#[derive(Debug, Default)]
struct Line {
    waiting: VecDeque<Waiting>,
    /// How often the first of them has been passed by a later one.
    passed: u32,
}

impl Line {
    fn first(&self) -> Option<u64> {
        self.waiting.front().map(|waiting| waiting.arrival)
    }
}

#[derive(Debug)]
pub(crate) struct DeviceQueue {
    slot: DeviceSlot,
    under_way: Slab<Started>,
    in_flight: usize,
    in_flight_max: usize,
    /// By class.
    lines: [Line; CLASSES],
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
        let token = self.under_way.insert(started);
        self.submit(token, op, out);
    }

    #[inline]
    fn submit(&mut self, token: Token, op: Op, out: &mut Effects<Effect>) {
        if self.in_flight < self.in_flight_max {
            self.in_flight += 1;
            return out.push(effect(self.slot, token, op));
        }
        self.wait(token, op);
    }

    #[cold]
    fn wait(&mut self, token: Token, op: Op) {
        let class = self.under_way.get(token).expect("its caller knows it").io.class();
        let arrival = self.arrivals;
        self.arrivals += 1;
        self.waiting += 1;
        self.lines[class as usize].waiting.push_back(Waiting { arrival, token, op });
    }

    /// The shell is done with an operation, and the next one starts. Nothing where it is of a life that was forgotten.
    #[inline]
    pub fn on_done(&mut self, token: Token, out: &mut Effects<Effect>) -> Option<Started> {
        let started = self.under_way.remove(token)?;
        self.give_up_place(out);
        Some(started)
    }

    #[inline]
    fn give_up_place(&mut self, out: &mut Effects<Effect>) {
        if self.waiting == 0 {
            self.in_flight -= 1;
            return;
        }
        let Waiting { token, op, .. } = self.next();
        out.push(effect(self.slot, token, op));
    }

    /// A read has failed, and is going to be tried again; the next operation starts.
    pub fn rest(&mut self, token: Token, out: &mut Effects<Effect>) {
        assert!(self.under_way.get(token).is_some(), "{token:?} rests before it is forgotten");
        self.resting += 1;
        self.give_up_place(out);
    }

    /// A read has rested.
    pub fn retry(&mut self, token: Token, out: &mut Effects<Effect>) {
        let started = self.under_way.get(token).expect("it rests");
        let (offset, len) = started.read.expect("only reads rest");
        self.resting -= 1;
        self.submit(token, Op::Read { offset, len }, out);
    }

    /// The first of the most urgent class that may go on, of those that wait.
    fn next(&mut self) -> Waiting {
        let chosen = (0..CLASSES).find(|class| self.may_go(*class)).expect("one waits");
        self.lines[chosen].passed = 0;
        let next = self.lines[chosen].waiting.pop_front().expect("just seen");
        for line in &mut self.lines[chosen + 1..] {
            line.passed += u32::from(line.first().is_some_and(|arrival| arrival < next.arrival));
        }
        self.waiting -= 1;
        next
    }

    /// Whether somebody waits in the class, and would pass nobody who has been passed often enough.
    fn may_go(&self, class: usize) -> bool {
        let Some(arrival) = self.lines[class].first() else { return false };
        let is_overdue = |line: &Line| line.passed >= PASSED_MAX && line.first().is_some_and(|first| first < arrival);
        !self.lines[class + 1..].iter().any(is_overdue)
    }

    /// The device is out: what is not in flight is forgotten.
    pub fn drop_waiting(&mut self, resting: impl Iterator<Item = Token>) {
        for line in &mut self.lines {
            line.passed = 0;
            for waiting in line.waiting.drain(..) {
                self.under_way.remove(waiting.token);
            }
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
        assert!(self.waiting == 0 || self.in_flight == self.in_flight_max, "{} wait beside a free place", self.waiting);
        assert_eq!(self.in_flight + self.waiting + self.resting, self.under_way.len(), "each is in one state");
        assert_eq!(self.lines.iter().map(|line| line.waiting.len()).sum::<usize>(), self.waiting);
        for line in &self.lines {
            assert!(line.waiting.iter().is_sorted_by_key(|waiting| waiting.arrival), "each class is in order");
            assert!(line.waiting.iter().all(|waiting| self.under_way.get(waiting.token).is_some()));
            assert!(line.passed == 0 || !line.waiting.is_empty(), "nobody was passed");
        }
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
    use crate::meter::Kind;
    use holdfast_base::{Instant, Prng};
    use std::collections::BTreeMap;

    const CLASS_OF: [Class; CLASSES] = [Class::Journal, Class::Read, Class::Bulk];

    fn started(class: Class) -> Started {
        let (io, read) = match class {
            Class::Journal => (Io::UnitTable, None),
            Class::Read => (Io::Probe, Some((0, 4096))),
            Class::Bulk => (Io::SlotBlock { block: 0 }, None),
        };
        assert_eq!(io.class(), class);
        Started { io, kind: Kind::Other, at: Instant(1), read, failures: 0 }
    }

    /// A queue, and what it was given: class and arrival by token.
    struct Rig {
        queue: DeviceQueue,
        out: Effects<Effect>,
        waiting: BTreeMap<Token, (Class, u64)>,
        in_flight: Vec<Token>,
        begun: u64,
        /// Operations that started, by arrival and class.
        order: Vec<(u64, Class)>,
    }

    impl Rig {
        fn new(in_flight_max: usize) -> Rig {
            let queue = DeviceQueue::new(DeviceSlot(3), in_flight_max);
            let (waiting, in_flight, order) = (BTreeMap::new(), Vec::new(), Vec::new());
            Rig { queue, out: Effects::new(), waiting, in_flight, begun: 0, order }
        }

        fn start(&mut self, class: Class) {
            let before: Vec<Token> = self.queue.under_way.tokens();
            let read = Op::Read { offset: 0, len: 4096 };
            let op = if class == Class::Read { read } else { Op::Flush };
            self.queue.start(started(class), op, &mut self.out);
            let token = self.queue.under_way.tokens().into_iter().find(|token| !before.contains(token)).unwrap();
            self.begun += 1;
            self.waiting.insert(token, (class, self.begun));
            self.look();
        }

        fn look(&mut self) {
            for effect in self.out.take() {
                let (Effect::Read { token, .. } | Effect::Flush { token, .. }) = effect else { panic!("{effect:?}") };
                let (slot, token) = crate::io::split_token(token);
                assert_eq!(slot, DeviceSlot(3));
                let (class, arrival) = self.waiting.remove(&token).expect("it starts once");
                self.in_flight.push(token);
                self.order.push((arrival, class));
            }
            self.queue.verify(0);
        }

        fn end(&mut self, at: usize) {
            let token = self.in_flight.swap_remove(at);
            assert!(self.queue.on_done(token, &mut self.out).is_some());
            self.look();
            assert!(self.queue.on_done(token, &mut self.out).is_none(), "it is done once");
        }
    }

    #[test]
    fn all_start_once_in_bounds_and_nothing_urgent_starts_later_than_in_order_of_arrival() {
        for seed in 0..200 {
            let mut prng = Prng::new(seed);
            let mut rig = Rig::new(1 + prng.below(4) as usize);
            let weights = [prng.below(4), prng.below(4), 1 + prng.below(4)];
            for _ in 0..300 {
                if prng.chance(550) {
                    let at = prng.below(weights.iter().sum());
                    let class = if at < weights[0] { 0 } else { 1 + usize::from(at >= weights[0] + weights[1]) };
                    rig.start(CLASS_OF[class]);
                } else if !rig.in_flight.is_empty() {
                    let at = prng.below(rig.in_flight.len() as u64) as usize;
                    rig.end(at);
                }
            }
            while !rig.in_flight.is_empty() {
                rig.end(0);
            }
            assert!(rig.queue.is_empty() && rig.waiting.is_empty() && rig.order.len() as u64 == rig.begun);
            for (at, (arrival, class)) in rig.order.iter().enumerate() {
                let later = rig.order[..at].iter().filter(|(other, _)| other > arrival).count() as u64;
                let same = |(other, of): &&(u64, Class)| of == class && other < arrival;
                let before = rig.order.iter().filter(same).count() as u64;
                let most = if *class == Class::Journal { 0 } else { u64::from(PASSED_MAX) * (before + 1) };
                assert!(later <= most, "seed {seed}: {class:?} {arrival} is passed by {later} that came later");
            }
        }
    }

    #[test]
    fn the_most_urgent_goes_first_and_the_others_come_about() {
        let mut rig = Rig::new(1);
        (0..3).for_each(|_| rig.start(Class::Bulk));
        rig.start(Class::Read);
        rig.start(Class::Journal);
        rig.end(0);
        rig.end(0);
        assert_eq!(rig.order, [(1, Class::Bulk), (5, Class::Journal), (4, Class::Read)]);
        // There is always something more urgent.
        for _ in 0..2 * PASSED_MAX {
            rig.start(Class::Journal);
            rig.end(0);
        }
        let bulk: Vec<u64> = rig.order.iter().filter(|(_, class)| *class == Class::Bulk).map(|(at, _)| *at).collect();
        assert_eq!(bulk, [1, 2, 3]);
    }

    #[test]
    fn what_waits_or_rests_is_dropped_and_what_is_in_flight_ends() {
        let mut rig = Rig::new(2);
        [Class::Read, Class::Read, Class::Journal, Class::Bulk].into_iter().for_each(|class| rig.start(class));
        let resting = rig.in_flight[0];
        rig.queue.rest(resting, &mut rig.out);
        rig.queue.verify(1);
        assert_eq!(rig.out.take().len(), 1, "another one takes its place");
        rig.queue.drop_waiting([resting].into_iter());
        rig.queue.verify(0);
        assert_eq!(rig.queue.iter().count(), 2);
        assert!(rig.queue.on_done(rig.in_flight[1], &mut rig.out).is_some() && rig.out.take().is_empty());
    }

    #[test]
    fn a_read_that_has_rested_waits_for_its_turn() {
        let mut rig = Rig::new(1);
        rig.start(Class::Read);
        rig.start(Class::Bulk);
        let read = rig.in_flight[0];
        rig.queue.rest(read, &mut rig.out);
        let Some(Effect::Flush { token, .. }) = rig.out.take().pop() else { panic!("another one takes its place") };
        rig.queue.retry(read, &mut rig.out);
        assert!(rig.out.take().is_empty(), "its place is taken");
        rig.queue.verify(0);
        assert!(rig.queue.on_done(crate::io::split_token(token).1, &mut rig.out).is_some());
        let again = rig.out.take();
        assert!(matches!(again[..], [Effect::Read { token, .. }] if token == disk_token(DeviceSlot(3), read)));
    }
}
