//! Operations of one class that wait for a place on a device; hosts take turns.
//!
//! Role: one line of the queue of a device ([`crate::device_queue`]), which decides between lines.
//!
//! Order: deficit round robin. A host whose turn it is goes on until its credit is spent, gets [`QUANTUM`] more, and goes
//! behind the others. What one host asked for stays in order. A line with one host is in order of arrival.
//!
//! Invariants
//! 1. Operations of a host are in order of arrival, and no host is here without one.
//! 2. What a host got while another one waited all the time is at most what that one got, [`QUANTUM`] and two operations.
//!
//! Limits: as many operations as the queue has. A search for who is next is as long as the longest operation has quanta.

use crate::device_queue::Op;
use holdfast_base::{Token, Urgency, crc32c};
use std::collections::VecDeque;

/// A host, by its name: two that happen to have one tag have one turn.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct HostTag(u32);

impl HostTag {
    /// Of a name that a host greeted by.
    pub fn of(name: &str) -> HostTag {
        HostTag(crc32c(name.as_bytes()))
    }
}

/// For whom something is done: a host's request, or the node itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Whose {
    pub host: HostTag,
    pub urgency: Urgency,
}

/// Credit of a turn: some small reads.
const QUANTUM: u64 = 64 << 10;

/// What an operation costs beside its bytes: a small one is no gift.
const COST_EACH: u64 = 16 << 10;

/// Vectors of hosts that have nothing waiting, kept for the next ones.
const SPARE_MAX: usize = 4;

#[derive(Debug)]
pub(crate) struct Waiting {
    /// Orders operations of all lines.
    pub arrival: u64,
    pub token: Token,
    pub op: Op,
}

impl Waiting {
    fn cost(&self) -> u64 {
        COST_EACH + self.op.bytes()
    }
}

#[derive(Debug, Default)]
struct OfHost {
    host: HostTag,
    credit: u64,
    waiting: VecDeque<Waiting>,
}

impl OfHost {
    fn first(&self) -> &Waiting {
        self.waiting.front().expect("a host is here while it has something waiting")
    }
}

#[derive(Debug, Default)]
pub(crate) struct Line {
    /// Whose turn it is first.
    hosts: VecDeque<OfHost>,
    spare: Vec<VecDeque<Waiting>>,
    /// How often the oldest of them has been passed by a later one, since the queue took one of these.
    pub passed: u32,
}

impl Line {
    pub fn is_empty(&self) -> bool {
        self.hosts.is_empty()
    }

    /// Operations that wait.
    pub fn len(&self) -> usize {
        self.hosts.iter().map(|of| of.waiting.len()).sum()
    }

    pub fn push(&mut self, host: HostTag, waiting: Waiting) {
        if let Some(of) = self.hosts.iter_mut().find(|of| of.host == host) {
            return of.waiting.push_back(waiting);
        }
        let mut line = self.spare.pop().unwrap_or_default();
        line.push_back(waiting);
        self.hosts.push_back(OfHost { host, credit: 0, waiting: line });
    }

    /// Arrival of the oldest of them.
    pub fn oldest(&self) -> Option<u64> {
        self.hosts.iter().map(|of| of.first().arrival).min()
    }

    /// Arrival of the one that goes next.
    pub fn next(&mut self) -> Option<u64> {
        if self.hosts.len() > 1 {
            while let Some(of) = self.hosts.front_mut().filter(|of| of.credit < of.first().cost()) {
                of.credit += QUANTUM;
                self.hosts.rotate_left(1);
            }
        }
        self.hosts.front().map(|of| of.first().arrival)
    }

    /// Takes the one that [`Line::next`] told of.
    pub fn pop(&mut self) -> Waiting {
        self.take(0)
    }

    /// Takes the oldest, whoever's turn it is.
    pub fn pop_oldest(&mut self) -> Waiting {
        let oldest = (0..self.hosts.len()).min_by_key(|at| self.hosts[*at].first().arrival);
        self.take(oldest.expect("its caller has seen one"))
    }

    fn take(&mut self, at: usize) -> Waiting {
        let of = self.hosts.get_mut(at).expect("its caller has seen one");
        let waiting = of.waiting.pop_front().expect("a host is here while it has something waiting");
        of.credit = of.credit.saturating_sub(waiting.cost());
        if of.waiting.is_empty() {
            let gone = self.hosts.remove(at).expect("just seen");
            if self.spare.len() < SPARE_MAX {
                self.spare.push(gone.waiting);
            }
        }
        waiting
    }

    /// Takes all of them, in any order.
    pub fn drain(&mut self) -> impl Iterator<Item = Waiting> {
        self.passed = 0;
        self.hosts.drain(..).flat_map(|of| of.waiting)
    }

    /// Asserts what must hold between events; `is_known` by the queue.
    pub fn verify(&self, is_known: impl Fn(Token) -> bool) {
        assert!(self.passed == 0 || !self.is_empty(), "nobody was passed");
        for (at, of) in self.hosts.iter().enumerate() {
            assert!(!of.waiting.is_empty(), "{:?} has a turn, and nothing that waits", of.host);
            assert!(of.waiting.iter().is_sorted_by_key(|waiting| waiting.arrival), "{:?} is in order", of.host);
            assert!(of.waiting.iter().all(|waiting| is_known(waiting.token)));
            assert!(self.hosts.iter().skip(at + 1).all(|other| other.host != of.host), "{:?} has two turns", of.host);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_base::Prng;

    fn read(arrival: u64, len: u32) -> Waiting {
        Waiting { arrival, token: Token(arrival), op: Op::Read { offset: 0, len } }
    }

    #[test]
    fn two_hosts_that_wait_get_alike_whatever_each_asks_for() {
        for seed in 0..100 {
            let mut prng = Prng::new(seed);
            let (mut line, hosts) = (Line::default(), [HostTag(1), HostTag(2), HostTag(3)]);
            let longest = [4 << 10, 64 << 10, 1 << 20, 4 << 20].map(|len: u32| len);
            let (mut arrival, mut got, mut is_next) = (0, [0_u64; 3], Vec::new());
            for (at, host) in hosts.iter().enumerate() {
                for _ in 0..400 {
                    arrival += 1;
                    let len = 4096 * (1 + prng.below(u64::from(longest[(seed as usize + at) % 4] >> 12)) as u32);
                    line.push(*host, read(arrival, len));
                    is_next.push((arrival, at));
                }
            }
            line.verify(|_| true);
            let most = (4 << 20) + COST_EACH;
            while line.hosts.len() == 3 {
                let told = line.next().expect("some wait");
                let gone = line.pop();
                let (_, at) = is_next[gone.arrival as usize - 1];
                got[at] += gone.cost();
                assert_eq!(told, gone.arrival);
                line.verify(|_| true);
                let (least, highest) = (got.iter().min().expect("three"), got.iter().max().expect("three"));
                assert!(highest - least <= QUANTUM + 2 * most, "seed {seed}: {got:?}");
            }
            assert!(got.iter().all(|got| *got > 0), "{got:?}");
        }
    }

    #[test]
    fn who_comes_to_a_line_of_another_is_served_at_once() {
        let mut line = Line::default();
        (1..=100).for_each(|arrival| line.push(HostTag(1), read(arrival, 8192)));
        for arrival in 1..=20 {
            assert_eq!((line.next(), line.pop().arrival), (Some(arrival), arrival), "one alone is in order of arrival");
        }
        line.push(HostTag(2), read(101, 8192));
        let gone: Vec<u64> = (0..4).map(|_| line.next().map(|_| line.pop().arrival).expect("some wait")).collect();
        assert!(gone.contains(&101), "{gone:?}");
    }
}
