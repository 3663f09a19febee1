//! Whom nodes serve before whom: how many reads of shards a node answers while another one waits there.
//!
//! Role: the world shows it reads that a node takes and answers, while somebody wants to know. Counts, and no time.

use holdfast_base::{Urgency, VolumeId};
use holdfast_format::wire::Request;
use holdfast_store::PeerId;
use std::collections::BTreeMap;

/// Of reads of one volume and urgency.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Passed {
    pub reads: u64,
    /// Others that their node answered while they waited, of all of them and of the worst.
    pub by: u64,
    pub by_most: u64,
}

impl Passed {
    /// Of one of them, in the mean.
    pub fn mean(&self) -> f64 {
        self.by as f64 / self.reads.max(1) as f64
    }
}

struct Waits {
    of: (VolumeId, Urgency),
    /// What its node had answered as it came.
    from: u64,
}

#[derive(Default)]
pub struct Service {
    /// By node.
    answered: BTreeMap<usize, u64>,
    waiting: BTreeMap<(PeerId, u64), Waits>,
    passed: BTreeMap<(VolumeId, Urgency), Passed>,
}

impl Service {
    pub fn on_request(&mut self, node: usize, to: (PeerId, u64), request: &Request, urgency: Urgency) {
        if let Request::ReadShard { shard, .. } = request {
            let from = self.answered.get(&node).copied().unwrap_or(0);
            self.waiting.insert(to, Waits { of: (shard.segment.volume, urgency), from });
        }
    }

    pub fn on_reply(&mut self, node: usize, to: (PeerId, u64)) {
        let Some(Waits { of, from }) = self.waiting.remove(&to) else { return };
        let answered = self.answered.entry(node).or_default();
        let by = *answered - from;
        *answered += 1;
        let passed = self.passed.entry(of).or_default();
        *passed = Passed { reads: passed.reads + 1, by: passed.by + by, by_most: passed.by_most.max(by) };
    }

    pub fn of(&self, volume: VolumeId, urgency: Urgency) -> Passed {
        self.passed.get(&(volume, urgency)).copied().unwrap_or_default()
    }
}
