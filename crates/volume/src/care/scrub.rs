//! Scrub: every shard is read once in a set time, whether anybody wants it or not; what is damaged or missing is made
//! again.
//!
//! The node checks what it reads against the shard's checksums, and tells whether it matches; one of an older release
//! sends along what it has read. A tour goes through the segment table in order, from a
//! random place on after an opening; one shard is read at a time, and tours are paced to take the set time.

use super::Around;
use crate::api::Out;
use crate::peers::Purpose;
use holdfast_base::{Epoch, Instant};
use holdfast_format::ledger::Leg;
use holdfast_format::record::SegmentNo;
use holdfast_format::wire::{Refusal, Reply, Request};
use std::ops::Bound;
use std::time::Duration;

/// Between two shards at least, while their tour is behind.
const PACE_MIN: Duration = Duration::from_millis(1);

#[derive(Debug, Default)]
pub(crate) struct Scrubber {
    /// The shard that was read last.
    cursor: Option<(SegmentNo, u8)>,
    /// When the shard after it is due.
    due: Option<Instant>,
    reading: Option<Leg>,
}

impl Scrubber {
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.due.filter(|_| self.reading.is_none())
    }

    /// Reads the next shard, if it is due.
    pub(crate) fn drive(&mut self, around: &mut Around<'_>, out: Out) {
        if self.reading.is_some() {
            return;
        }
        let now = around.basis.now;
        let due = self.due.unwrap_or_else(|| now + pause(around));
        self.due = Some(due);
        if due > now {
            return;
        }
        // After a pause of this process the tour goes on from here, and is not made up for at once.
        self.due = Some((due + pause(around)).max(now + PACE_MIN));
        let Some((segment, index, leg, blocks)) = self.next(around) else { return };
        self.cursor = Some((segment, index));
        if !around.peers.leg_usable(leg) {
            return;
        }
        let shard = around.shard_id(segment, index);
        let device = leg.device;
        let mut request = Request::CheckShard { device, shard };
        if !around.peers.understands(leg.node, &request) {
            request = Request::ReadShard { device, shard, block: 0, blocks, checked: true, cached: false };
        }
        let sent = around.send_bulk(leg.node, Purpose::Scrub { segment, index }, request, Vec::new(), out);
        self.reading = sent.map(|_| leg);
    }

    /// The shard after the cursor, round again: segment, index, home, data blocks.
    fn next(&self, around: &mut Around<'_>) -> Option<(SegmentNo, u8, Leg, u32)> {
        let segments = around.segments;
        let (segment, index) = match self.cursor {
            Some((segment, index)) => (segment, index + 1),
            None => {
                // Anywhere among the youngest, or where an epoch begins.
                let next = segments.next_number(around.basis.epoch());
                let epoch = Epoch(around.rng.below(next.epoch.0 + 1));
                let counter = if epoch == next.epoch { around.rng.below(next.counter.max(1)) } else { 0 };
                (SegmentNo { epoch, counter }, 0)
            }
        };
        for (no, info) in segments.own_behind(Bound::Included(segment)).chain(segments.own()) {
            let index = if no == segment { index } else { 0 };
            if let Some(home) = info.homes.get(usize::from(index)) {
                return Some((no, index, *home, info.geometry.shard_blocks()));
            }
        }
        None
    }

    /// An answer: where the shard lies, if it is damaged or missing there.
    pub(crate) fn on_scrubbed(
        &mut self,
        around: &mut Around<'_>,
        segment: SegmentNo,
        index: u8,
        reply: &Reply,
    ) -> Option<Leg> {
        let asked_at = self.reading.take();
        let leg = around.segments.get(segment)?.homes[usize::from(index)];
        match reply {
            Reply::Done | Reply::Shard { .. } => around.counters.shards_scrubbed += 1,
            Reply::Refused(Refusal::Checksum | Refusal::UnknownShard) if asked_at == Some(leg) => {
                around.counters.shards_scrubbed += 1;
                return Some(leg);
            }
            _ => {}
        }
        None
    }

    /// The tour goes on as after an answer: the next shard may have been due for as long as this one was waited for.
    pub(crate) fn on_lost(&mut self) {
        self.reading = None;
    }

    /// Asserts what must hold between events (tests and the simulator).
    pub(crate) fn verify(&self) {
        assert!(self.reading.is_none() || self.cursor.is_some() && self.due.is_some(), "a shard is read on a tour");
    }
}

/// Between two shards, so that a tour takes the set time.
fn pause(around: &Around<'_>) -> Duration {
    around.basis.config.scrub_every / (around.segments.own_totals().shards.max(1) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::care::tests::Rig;
    use crate::peers::tests::{leg, sent};
    use crate::segment::tests::{info, no};

    #[test]
    fn a_tour_reads_every_shard_once_in_the_set_time_and_tells_of_damage() {
        let mut rig = Rig::new("mirror:2", &[1, 1]);
        let mut scrubber = Scrubber::default();
        for counter in 0..3 {
            rig.segments.insert(no(1, counter), info(8, 8, &[leg(1, 0), leg(2, 0)]));
        }
        let pause = rig.basis.config.scrub_every / 6;
        let mut read = Vec::new();
        for _ in 0..7 {
            rig.with(|around, out| scrubber.drive(around, out));
            let asked = sent(&mut rig.out);
            scrubber.verify();
            rig.pass(pause);
            let Some((node, token, _)) = asked.first() else { continue };
            let call = rig.peers.on_answer(rig.basis.now, *node, *token).expect("it is waited for");
            let Purpose::Scrub { segment, index } = call.purpose else { panic!("{call:?}") };
            read.push((segment, index));
            let reply = if index == 0 { Reply::Done } else { Reply::Refused(Refusal::Checksum) };
            let damaged = rig.with(|around, _| scrubber.on_scrubbed(around, segment, index, &reply));
            assert_eq!(damaged, (index == 1).then_some(leg(2, 0)));
        }
        read.sort_unstable();
        read.dedup();
        assert_eq!((read.len(), rig.counters.shards_scrubbed), (6, 6));
    }
}
