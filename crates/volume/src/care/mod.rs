//! Care: what is done in the background so that data stay whole and room comes back.
//!
//! Each part owns what it has found and what is under way; it works with what is [`Around`] it, and leaves to the
//! controller what it wants of others: records for the log, and news.

mod audit;
mod cleaner;
mod inventory;
mod moves;
mod repack;
mod repair;
mod scrub;
mod shares;

pub use audit::Sharing;
pub(crate) use audit::{Audit, Walk, Walked, Wrong};
pub(crate) use cleaner::{
    CleanRead, Cleaned, Cleaner, Header, LiveRun, Looked, Read, Returned, VICTIMS_MAX, blocks_max,
};
pub(crate) use inventory::ledger_inventory;
pub(crate) use moves::Mover;
pub(crate) use repack::Repacker;
pub(crate) use repair::{Made, Repairer};
pub(crate) use scrub::Scrubber;
pub use shares::Shares;

use crate::api::{Counters, Lane, Out};
use crate::basis::Basis;
use crate::map::Map;
use crate::peers::{Ask, Peers, Purpose};
use crate::segment::Segments;
use crate::space::{Governor, Need, Placer, Room, Survey, Topology};
use crate::turn::Turn;
use crate::wants::Wants;
use holdfast_base::{Buf, Instant, NodeId, Prng, ShardId, Token};
use holdfast_format::record::SegmentNo;
use holdfast_format::wire::Request;

/// The parts.
#[derive(Default)]
pub(crate) struct Care {
    pub(crate) cleaner: Cleaner,
    pub(crate) repairer: Repairer,
    pub(crate) mover: Mover,
    pub(crate) scrubber: Scrubber,
    pub(crate) audit: Audit,
    pub(crate) repacker: Repacker,
}

impl Care {
    /// Moves shards that could stay, where nothing has to be made again.
    pub(crate) fn drive_moves(&mut self, around: &mut Around<'_>, out: Out) {
        let Care { repairer, mover, .. } = self;
        mover.look(around);
        while repairer.may_move()
            && let Some(segment) = mover.next()
            && repairer.may_move_data(around, repairer.need_of(around, segment, None))
        {
            if let Some(moved) = mover.take(around, repairer) {
                repairer.begin_move(around, moved, out);
            }
        }
    }

    /// When the next slice of what goes over the table is due.
    pub(crate) fn slice_deadline(&self) -> Option<Instant> {
        let of_parts = [self.cleaner.slice_deadline(), self.repairer.slice_deadline(), self.mover.slice_deadline()];
        of_parts.into_iter().flatten().min()
    }

    /// Nothing is under way or waits, but what has a deadline.
    pub(crate) fn is_at_rest(&self) -> bool {
        let is_walking = self.audit.is_at_work() || !self.repacker.is_at_rest();
        self.cleaner.is_at_rest() && self.repairer.is_at_rest() && self.mover.is_at_rest() && !is_walking
    }

    /// Asserts what must hold between events (tests and the simulator).
    pub(crate) fn verify(&self) {
        self.cleaner.verify();
        self.repairer.verify();
        self.mover.verify();
        self.scrubber.verify();
        self.audit.verify();
    }
}

/// What they work with.
pub(crate) struct Around<'a> {
    pub(crate) basis: &'a Basis,
    pub(crate) peers: &'a mut Peers,
    pub(crate) segments: &'a Segments,
    pub(crate) map: &'a Map,
    pub(crate) survey: &'a Survey,
    pub(crate) room: &'a Room,
    pub(crate) governor: &'a mut Governor,
    pub(crate) rng: &'a mut Prng,
    pub(crate) wants: &'a mut Wants,
    pub(crate) counters: &'a mut Counters,
    pub(crate) turn: &'a mut Turn,
    /// Guests' requests come before work that can wait.
    pub(crate) guests_are_at_work: bool,
}

impl Around<'_> {
    pub(crate) fn topology(&self) -> Topology<'_> {
        Topology::new(self.basis, self.peers)
    }

    fn placer(&mut self) -> Placer<'_> {
        Placer::new(self.basis, self.peers, self.rng)
    }

    fn send_bulk(
        &mut self,
        node: NodeId,
        purpose: Purpose,
        request: Request,
        payload: Vec<Buf>,
        out: Out,
    ) -> Option<Token> {
        self.peers.send(self.basis.now, Ask::new(node, Lane::Bulk, purpose, request, payload), out)
    }

    /// The id of a shard of a segment that the map names.
    fn shard_id(&self, segment: SegmentNo, index: u8) -> ShardId {
        ShardId { segment: self.basis.segment_id(segment), index }
    }

    fn charge_moved(&mut self, bytes: u64, need: Need) {
        if self.guests_are_at_work {
            self.governor.charge(self.basis.now, bytes, need);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::api::Effect;
    use crate::peers::tests::peers;
    use holdfast_base::{Effects, Instant};
    use std::time::Duration;

    /// What parts of care work with, of a volume of that layout.
    pub(crate) struct Rig {
        pub(crate) basis: Basis,
        pub(crate) peers: Peers,
        pub(crate) segments: Segments,
        pub(crate) map: Map,
        pub(crate) room: Room,
        pub(crate) wants: Wants,
        pub(crate) counters: Counters,
        pub(crate) out: Effects<Effect>,
        survey: Survey,
        governor: Governor,
        rng: Prng,
        pub(crate) turn: Turn,
    }

    impl Rig {
        pub(crate) fn new(layout: &str, devices_by_node: &[u32]) -> Rig {
            let mut basis = crate::basis::tests::basis(layout);
            basis.now = Instant(10_000_000_000);
            let peers = peers(basis.now, devices_by_node);
            Rig {
                basis,
                peers,
                segments: Segments::default(),
                map: Map::new(1 << 20),
                room: Room::default(),
                wants: Wants::default(),
                counters: Counters::default(),
                out: Effects::new(),
                survey: Survey::default(),
                governor: Governor::default(),
                rng: Prng::new(1),
                turn: Turn::default(),
            }
        }

        pub(crate) fn pass(&mut self, span: Duration) {
            self.basis.now = self.basis.now + span;
        }

        /// Has all segments judged.
        pub(crate) fn survey_all(&mut self) {
            loop {
                let topology = Topology::new(&self.basis, &self.peers);
                self.survey.go_on(&self.basis, topology, &self.segments, &mut Turn::default());
                let Some(at) = self.survey.slice_deadline() else { return };
                self.basis.now = at;
            }
        }

        pub(crate) fn around(&mut self) -> Around<'_> {
            Around {
                basis: &self.basis,
                peers: &mut self.peers,
                segments: &self.segments,
                map: &self.map,
                survey: &self.survey,
                room: &self.room,
                governor: &mut self.governor,
                rng: &mut self.rng,
                wants: &mut self.wants,
                counters: &mut self.counters,
                turn: &mut self.turn,
                guests_are_at_work: false,
            }
        }

        pub(crate) fn with<T>(&mut self, act: impl FnOnce(&mut Around<'_>, Out) -> T) -> T {
            let mut out = std::mem::take(&mut self.out);
            let result = act(&mut self.around(), &mut out);
            self.out = out;
            result
        }
    }
}
