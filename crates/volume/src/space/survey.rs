//! Which segments lack something, kept up as the segment table and the devices change.
//!
//! A volume of a terabyte has a quarter of a million segments: walking over all of them takes so long that guests wait,
//! and the host asks for the state of every volume all the time. So what a segment lacks is judged when it, or what the
//! judgement goes by, has changed: the table notes the segments that did, and the rest is compared as a whole.
//!
//! Invariant: a survey finds what a walk over the whole table would ([`Survey::verify`] walks).

use super::topology::Topology;
use crate::segment::{Kind, SegmentInfo, Segments};
use holdfast_base::MediaClass;
use holdfast_format::geometry::Layout;
use holdfast_format::ledger::Leg;
use holdfast_format::record::SegmentNo;
use holdfast_format::tier::Tiers;
use std::cell::{Ref, RefCell};
use std::collections::BTreeSet;

/// What segments are judged by, besides themselves.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Terms {
    /// Devices that nodes told of, and whether they can be used.
    devices: Vec<(Leg, Option<MediaClass>, bool)>,
    root: Option<(Layout, Tiers, SegmentNo)>,
}

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Found {
    /// Own ones with a shard on a device that is out or missing, of another shape than the policy's, or with shards too
    /// close together; and those of others whose shards are too close.
    weak: BTreeSet<SegmentNo>,
    /// Own ones of these that somebody needs, and one more loss would take.
    at_risk: BTreeSet<SegmentNo>,
    /// Own ones that somebody needs, with shards too close together, which can be moved apart.
    crowded: BTreeSet<SegmentNo>,
    /// Of the right shape, on media where the policy does not say.
    astray: BTreeSet<SegmentNo>,
    /// In the first tier, with anything that lives.
    first: BTreeSet<SegmentNo>,
}

impl Found {
    pub(crate) fn weak(&self) -> &BTreeSet<SegmentNo> {
        &self.weak
    }

    pub(crate) fn at_risk(&self) -> &BTreeSet<SegmentNo> {
        &self.at_risk
    }

    pub(crate) fn crowded(&self) -> &BTreeSet<SegmentNo> {
        &self.crowded
    }

    pub(crate) fn astray(&self) -> &BTreeSet<SegmentNo> {
        &self.astray
    }

    pub(crate) fn first(&self) -> &BTreeSet<SegmentNo> {
        &self.first
    }
}

fn set(of: &mut BTreeSet<SegmentNo>, no: SegmentNo, is_in: bool) {
    if is_in {
        of.insert(no);
    } else {
        of.remove(&no);
    }
}

/// What was found last, and what it was judged by.
#[derive(Debug, Default)]
pub(crate) struct Survey {
    last: RefCell<(Terms, Found)>,
}

impl Survey {
    /// What there is to find now. The root is known.
    pub(crate) fn look(&self, topology: Topology<'_>, segments: &Segments) -> Ref<'_, Found> {
        let terms = terms(topology);
        let touched = segments.take_touched();
        {
            let (judged_by, found) = &mut *self.last.borrow_mut();
            if *judged_by == terms {
                for no in touched {
                    judge(found, topology, no, segments.get(no));
                }
            } else {
                (*judged_by, *found) = (terms, walk(topology, segments));
            }
        }
        Ref::map(self.last.borrow(), |(_, found)| found)
    }

    /// Asserts what must hold between events (tests and the simulator).
    pub(crate) fn verify(&self, topology: Topology<'_>, segments: &Segments) {
        assert_eq!(*self.look(topology, segments), walk(topology, segments), "the survey is what a walk finds");
    }
}

fn terms(topology: Topology<'_>) -> Terms {
    let root = topology.basis.known();
    Terms {
        devices: topology.peers.device_states(),
        root: root.map(|root| (root.layout, root.tiers, root.first_own())),
    }
}

fn walk(topology: Topology<'_>, segments: &Segments) -> Found {
    let mut found = Found::default();
    for (no, info) in segments.iter() {
        judge(&mut found, topology, no, Some(info));
    }
    found
}

fn judge(found: &mut Found, topology: Topology<'_>, no: SegmentNo, info: Option<&SegmentInfo>) {
    let own = info.filter(|_| !topology.basis.is_foreign(no));
    let weak = info.is_some_and(|info| is_weak(topology, no, info));
    set(&mut found.weak, no, weak);
    let needed = own.filter(|info| weak && info.is_needed());
    set(&mut found.at_risk, no, needed.is_some_and(|info| topology.bears_nothing(info, |_| false)));
    let moved = own.filter(|info| info.kind != Kind::Run && info.is_needed());
    set(&mut found.crowded, no, moved.is_some_and(|info| topology.crowded(&info.geometry, &info.homes).is_some()));
    let data = own.filter(|info| info.kind == Kind::Data && !info.kept);
    set(&mut found.astray, no, data.is_some_and(|info| info.visible() > 0 && topology.is_astray(info)));
    let first = data.filter(|info| info.live > 0 && topology.is_in_first_tier(&info.geometry, &info.homes));
    set(&mut found.first, no, first.is_some());
}

fn is_weak(topology: Topology<'_>, no: SegmentNo, info: &SegmentInfo) -> bool {
    if topology.basis.is_foreign(no) {
        return info.kind == Kind::Data && topology.is_crowded_foreign(no, info);
    }
    let is_narrow = match info.kind {
        Kind::Data => !topology.is_of_policy(&info.geometry),
        _ => topology.is_narrow_metadata(&info.geometry),
    };
    info.homes.iter().any(|home| !topology.peers.leg_usable(*home))
        || info.live > 0 && (is_narrow || topology.crowded(&info.geometry, &info.homes).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::basis::tests::basis;
    use crate::peers::tests::{leg, peers};
    use crate::segment::tests::{info, no};
    use holdfast_base::{Instant, NodeId};

    const AT: Instant = Instant(1_000_000_000);

    #[test]
    fn what_lacks_something_is_found_as_segments_and_devices_change() {
        let (basis, mut peers) = (basis("mirror:2"), peers(AT, &[1, 1, 2]));
        let (survey, mut segments) = (Survey::default(), Segments::default());
        segments.insert(no(1, 0), info(8, 8, &[leg(1, 0), leg(2, 0)]));
        segments.insert(no(1, 1), info(8, 8, &[leg(3, 0), leg(3, 1)]));
        segments.insert(no(1, 2), info(8, 0, &[leg(1, 0), leg(3, 0)]));
        let of = |set: &BTreeSet<SegmentNo>| set.iter().map(|no| no.counter).collect::<Vec<_>>();
        let found = |peers: &_, segments: &Segments| {
            let topology = Topology::new(&basis, peers);
            survey.verify(topology, segments);
            let found = survey.look(topology, segments);
            [of(found.weak()), of(found.at_risk()), of(found.crowded())]
        };
        assert_eq!(found(&peers, &segments), [vec![1], vec![1], vec![1]], "one node has both copies");
        segments.rehome(no(1, 1), &[(1, leg(2, 0))]);
        let nothing = [const { Vec::<u64>::new() }; 3];
        assert_eq!(found(&peers, &segments), nothing);
        peers.on_down(AT, NodeId(1));
        assert_eq!(found(&peers, &segments), [vec![0, 2], vec![0], vec![]], "nobody needs what holds nothing");
        segments.remove(no(1, 0));
        assert_eq!(found(&peers, &segments), [vec![2], vec![], vec![]]);
        segments.reset(no(0, 0));
        assert_eq!(found(&peers, &segments), nothing);
    }
}
