//! Scrub: every shard is read once in a set time, whether anybody wants it or not; what is damaged or missing is made again.
//!
//! The node checks what it reads against the shard's checksums, and tells whether it matches; one of an older release sends
//! along what it has read. A tour goes through the segment table in order, from a
//! random place on after an opening; one shard is read at a time, and tours are paced to take the set time.

use crate::api::{Lane, State};
use crate::controller::{Controller, Out};
use crate::peers::Purpose;
use holdfast_base::{Instant, ShardId};
use holdfast_format::ledger::Leg;
use holdfast_format::record::SegmentNo;
use holdfast_format::wire::{Refusal, Reply, Request};

/// Between two shards at least, while their tour is behind.
const PACE_MIN: std::time::Duration = std::time::Duration::from_millis(1);

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
}

impl Controller {
    pub(crate) fn drive_scrub(&mut self, out: Out) {
        if self.state != State::Open || self.scrubber.reading.is_some() {
            return;
        }
        let due = self.scrubber.due.unwrap_or_else(|| self.basis.now + self.scrub_pause());
        self.scrubber.due = Some(due);
        if due > self.basis.now {
            return;
        }
        // After a pause of this process the tour goes on from here, and is not made up for at once.
        self.scrubber.due = Some((due + self.scrub_pause()).max(self.basis.now + PACE_MIN));
        let Some((segment, index, leg, blocks)) = self.next_to_scrub() else { return };
        self.scrubber.cursor = Some((segment, index));
        if !self.peers.leg_usable(leg) {
            return;
        }
        let shard = ShardId { segment: self.basis.segment_id(segment), index };
        let device = leg.device;
        let mut request = Request::CheckShard { device, shard };
        if !self.peers.understands(leg.node, &request) {
            request = Request::ReadShard { device, shard, block: 0, blocks, checked: true, cached: false };
        }
        let sent = self.send(leg.node, Lane::Bulk, Purpose::Scrub { segment, index }, request, Vec::new(), out);
        self.scrubber.reading = sent.map(|_| leg);
    }

    /// Between two shards, so that a tour takes the set time.
    fn scrub_pause(&self) -> std::time::Duration {
        self.basis.config.scrub_every / (self.segments.own_totals().shards.max(1) as u32)
    }

    /// The shard after the cursor, round again: segment, index, home, data blocks.
    fn next_to_scrub(&mut self) -> Option<(SegmentNo, u8, Leg, u32)> {
        let (segment, index) = match self.scrubber.cursor {
            Some((segment, index)) => (segment, index + 1),
            None => {
                let nth = self.rng.below(self.segments.own_totals().segments.max(1)) as usize;
                (self.segments.own().nth(nth)?.0, 0)
            }
        };
        let ahead = self.segments.iter_from(segment);
        let behind = self.segments.own();
        for (no, info) in ahead.chain(behind) {
            let index = if no == segment { index } else { 0 };
            if let Some(home) = info.homes.get(usize::from(index)) {
                return Some((no, index, *home, info.geometry.shard_blocks()));
            }
        }
        None
    }

    pub(crate) fn on_scrubbed(&mut self, segment: SegmentNo, index: u8, reply: &Reply, out: Out) {
        let asked_at = self.scrubber.reading.take();
        let Some(leg) = self.segments.get(segment).map(|info| info.homes[usize::from(index)]) else { return };
        match reply {
            Reply::Done | Reply::Shard { .. } => self.counters.shards_scrubbed += 1,
            Reply::Refused(Refusal::Checksum | Refusal::UnknownShard) if asked_at == Some(leg) => {
                self.counters.shards_scrubbed += 1;
                self.on_damaged((segment, index), leg, true, out);
            }
            _ => {}
        }
        self.drive_scrub(out);
    }

    /// The tour goes on as after an answer: the next shard may have been due for as long as this one was waited for.
    pub(crate) fn on_scrub_lost(&mut self, out: Out) {
        self.scrubber.reading = None;
        self.drive_scrub(out);
    }
}
