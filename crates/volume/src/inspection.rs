//! Inspection: how many segments a volume would lack without some nodes. All of them are looked at, which are a quarter
//! of a million of a terabyte, so it goes a slice at a time.
//!
//! Invariant: a segment that is there all the while, and does not change, is counted once or not at all, by what it is.

use crate::care::Repairer;
use crate::segment::{Kind, SegmentInfo, Segments};
use crate::space::{Topology, is_weak};
use holdfast_base::NodeId;
use holdfast_format::ledger::Leg;
use holdfast_format::record::SegmentNo;
use std::collections::BTreeSet;

/// What is asked of a volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Question {
    /// Segments that are needed and could not be read any more without these nodes, as things are now. What the log
    /// holds is in memory, too, and will be in segments.
    Lost(BTreeSet<NodeId>),
    /// Segments that lack redundancy whether this node is there or not: without it they would lack more.
    WeakApartFrom(NodeId),
}

/// How far an inspection of one volume has come.
#[derive(Clone, Copy, Debug, Default)]
pub struct Inspection {
    last: Option<SegmentNo>,
    found: u64,
    looked_at: usize,
}

impl Inspection {
    /// Segments that were found so far.
    pub fn found(&self) -> u64 {
        self.found
    }

    /// Segments that were looked at so far.
    pub fn looked_at(&self) -> usize {
        self.looked_at
    }

    /// Looks at the next segments, `count` at most; true when all were looked at.
    pub(crate) fn go_on(&mut self, question: &Question, of: &Inspected<'_>, count: usize) -> bool {
        let mut in_table = of.segments.iter_after(self.last);
        for (no, info) in in_table.by_ref().take(count) {
            let is_found = match question {
                Question::Lost(nodes) => of.is_lost_without(nodes, no, info),
                Question::WeakApartFrom(node) => of.is_weak_apart_from(*node, no, info),
            };
            self.found += u64::from(is_found);
            (self.last, self.looked_at) = (Some(no), self.looked_at + 1);
        }
        in_table.next().is_none()
    }
}

/// A volume whose root is known.
pub(crate) struct Inspected<'a> {
    pub(crate) topology: Topology<'a>,
    pub(crate) segments: &'a Segments,
    pub(crate) repairer: &'a Repairer,
}

impl Inspected<'_> {
    fn is_lost_without(&self, nodes: &BTreeSet<NodeId>, no: SegmentNo, info: &SegmentInfo) -> bool {
        let Topology { basis, peers, .. } = self.topology;
        if basis.is_foreign(no) || !(info.is_needed() || info.kind == Kind::Run) {
            return false;
        }
        let stays = |home: &Leg| !nodes.contains(&home.node) && peers.leg_usable(*home);
        let left = info.homes.iter().enumerate().filter(|(_, home)| stays(home));
        let positions: BTreeSet<u8> = left.map(|(index, _)| info.geometry.position(index as u8)).collect();
        positions.len() < usize::from(info.geometry.data)
    }

    fn is_weak_apart_from(&self, node: NodeId, no: SegmentNo, info: &SegmentInfo) -> bool {
        let Topology { basis, peers, .. } = self.topology;
        let is_usable = |home: &Leg| home.node == node || peers.leg_usable(*home);
        let is_repaired = || !basis.is_foreign(no) && self.repairer.makes_again(no);
        is_weak(self.topology, no, info, is_usable) || is_repaired()
    }
}
