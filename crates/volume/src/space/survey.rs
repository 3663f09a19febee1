//! Which segments lack something, kept up as the segment table and the devices change.
//!
//! A volume of a terabyte has a quarter of a million segments: walking over all of them takes so long that guests wait,
//! and the host asks for the state of every volume all the time. So what a segment lacks is judged when it, or what the
//! judgement goes by, has changed: the table notes the segments that did, and the rest is compared as a whole.
//!
//! States: settled -> terms have changed, or many segments have -> they are judged anew, slice by slice -> settled. What
//! is not judged yet counts as it was judged last, so a survey that is not settled says nothing of a volume's being
//! whole ([`Survey::is_settled`]).
//!
//! Invariant: of what was judged a survey finds what a walk over the whole table would ([`Survey::verify`] walks).

use super::topology::Topology;
use crate::basis::Basis;
use crate::segment::{Kind, SegmentInfo, Segments};
use crate::turn::Turn;
use holdfast_base::{Instant, MediaClass};
use holdfast_format::geometry::Layout;
use holdfast_format::ledger::Leg;
use holdfast_format::record::SegmentNo;
use holdfast_format::root::OwnNumbers;
use holdfast_format::tier::Tiers;
use std::cell::{Ref, RefCell};
use std::collections::BTreeSet;

/// What segments are judged by, besides themselves.
#[derive(Debug, Default)]
struct Terms {
    /// Devices that nodes told of, and whether they can be used.
    devices: Vec<(Leg, Option<MediaClass>, bool)>,
    root: Option<(Layout, Tiers, OwnNumbers)>,
}

impl Terms {
    fn of(topology: Topology<'_>) -> Terms {
        Terms { devices: topology.peers.device_states().collect(), root: Terms::root_of(topology) }
    }

    fn root_of(topology: Topology<'_>) -> Option<(Layout, Tiers, OwnNumbers)> {
        topology.basis.known().map(|root| (root.layout, root.tiers, root.own_numbers()))
    }

    /// Whether nothing of them has changed: asked often, so without a copy.
    fn hold(&self, topology: Topology<'_>) -> bool {
        self.root == Terms::root_of(topology) && topology.peers.device_states().eq(self.devices.iter().copied())
    }
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

    fn sets(&self) -> [&BTreeSet<SegmentNo>; 5] {
        [&self.weak, &self.at_risk, &self.crowded, &self.astray, &self.first]
    }
}

fn set(of: &mut BTreeSet<SegmentNo>, no: SegmentNo, is_in: bool) {
    if is_in {
        of.insert(no);
    } else {
        of.remove(&no);
    }
}

/// Segments that changed, and tables that are to be judged anew, are judged when they are asked for, if they are no more
/// than that: who asks of a small volume is not told that nobody knows yet.
const AT_ONCE: usize = 256;

/// A judgement costs as much as so many runs.
const RUNS_A_SEGMENT: usize = 2;

/// Share of what is left of a turn which a survey takes: it may go on for as long as devices come and go.
const TURN_PART: usize = 2;

/// What was found last, and what it was judged by.
#[derive(Debug, Default)]
struct State {
    terms: Terms,
    found: Found,
    /// While the table is judged anew.
    round: Option<Round>,
}

/// It begins where the last one was, goes on to the table's end, and from its start to where it began: however often
/// terms change, each segment has its turn.
#[derive(Clone, Copy, Debug, Default)]
struct Round {
    /// When its first slice is, unless one is under way.
    due_at: Instant,
    began_after: Option<SegmentNo>,
    last: Option<SegmentNo>,
    has_turned: bool,
}

impl Round {
    fn is_over(&self) -> bool {
        self.has_turned && self.last >= self.began_after
    }

    fn has_judged(&self, no: SegmentNo) -> bool {
        let (is_behind_begin, is_passed) = (Some(no) > self.began_after, Some(no) <= self.last);
        if self.has_turned { is_behind_begin || is_passed } else { is_behind_begin && is_passed }
    }
}

impl State {
    /// Other terms: all is judged anew.
    fn compare(&mut self, topology: Topology<'_>) {
        if !self.terms.hold(topology) {
            let terms = Terms::of(topology);
            let last = self.round.and_then(|round| round.last);
            let due_at = topology.basis.next_slice_at();
            (self.terms, self.round) = (terms, Some(Round { due_at, began_after: last, last, has_turned: false }));
        }
    }

    /// Judges up to `count` of the segments that changed; how many it were.
    fn judge_touched(&mut self, topology: Topology<'_>, segments: &Segments, count: usize) -> usize {
        let touched = segments.take_touched(count);
        touched.iter().for_each(|no| judge(&mut self.found, topology, *no, segments.get(*no)));
        touched.len()
    }

    /// Goes on with the round that is under way; how many segments it were.
    fn judge_table(&mut self, topology: Topology<'_>, segments: &Segments, count: usize) -> usize {
        let Some(round) = &mut self.round else { return 0 };
        let mut judged = 0;
        while judged < count && !round.is_over() {
            let Some((no, info)) = segments.iter_after(round.last).next() else {
                // Where it began may be gone, with all before it.
                let began_after = round.began_after.filter(|_| !round.has_turned);
                *round = Round { began_after, last: None, has_turned: true, ..*round };
                continue;
            };
            judge(&mut self.found, topology, no, Some(info));
            (round.last, judged) = (Some(no), judged + 1);
        }
        self.round = Some(*round).filter(|round| !round.is_over());
        judged
    }
}

#[derive(Debug, Default)]
pub(crate) struct Survey {
    state: RefCell<State>,
    slice_at: Option<Instant>,
}

impl Survey {
    /// What there is to find, as far as it was judged. The root is known.
    pub(crate) fn look(&self, topology: Topology<'_>, segments: &Segments) -> Ref<'_, Found> {
        {
            let state = &mut *self.state.borrow_mut();
            state.compare(topology);
            if segments.touched_count() <= AT_ONCE {
                state.judge_touched(topology, segments, AT_ONCE);
            }
            let a_slice = topology.basis.config.slice_runs_max / RUNS_A_SEGMENT;
            if segments.len() <= AT_ONCE.min(a_slice) {
                state.judge_table(topology, segments, usize::MAX);
            }
        }
        Ref::map(self.state.borrow(), |state| &state.found)
    }

    /// Whether all was judged that [`Survey::look`] gives.
    pub(crate) fn is_settled(&self, topology: Topology<'_>, segments: &Segments) -> bool {
        self.look(topology, segments);
        self.state.borrow().round.is_none() && segments.touched_count() == 0
    }

    /// From here on slices are taken.
    pub(crate) fn begin(&mut self, basis: &Basis) {
        self.slice_at = Some(basis.next_slice_at());
    }

    /// Judges the next slice, if there is one and it is due.
    pub(crate) fn go_on(&mut self, basis: &Basis, topology: Topology<'_>, segments: &Segments, turn: &mut Turn) {
        if self.is_settled(topology, segments) {
            self.slice_at = None;
            return;
        }
        if self.slice_at.is_some_and(|at| at > basis.now) {
            return;
        }
        self.slice_at = Some(basis.next_slice_at());
        let state = self.state.get_mut();
        let count = (turn.left(basis) / TURN_PART / RUNS_A_SEGMENT).max(1);
        let touched = state.judge_touched(topology, segments, count);
        let judged = touched + state.judge_table(topology, segments, count - touched);
        turn.slice("survey: segments are judged", judged * RUNS_A_SEGMENT);
    }

    /// A round that somebody's question began has its first slice soon: a volume at rest does nothing else for long.
    pub(crate) fn slice_deadline(&self) -> Option<Instant> {
        self.slice_at.or_else(|| self.state.borrow().round.map(|round| round.due_at))
    }

    /// Asserts what must hold between events (tests and the simulator).
    pub(crate) fn verify(&self, topology: Topology<'_>, segments: &Segments) {
        let found = self.look(topology, segments).clone();
        let round = self.state.borrow().round;
        let is_judged = |no: &SegmentNo| round.is_none_or(|round| round.has_judged(*no)) && !segments.is_touched(*no);
        let walked = walk(topology, segments);
        let judged = |found: &Found| found.sets().map(|set| set.iter().copied().filter(is_judged).collect::<Vec<_>>());
        assert_eq!(judged(&found), judged(&walked), "a survey is what a walk finds");
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
    let is_usable = |home: &Leg| topology.peers.leg_usable(*home);
    let weak = info.is_some_and(|info| is_weak(topology, no, info, is_usable));
    set(&mut found.weak, no, weak);
    let needed = own.filter(|info| weak && info.is_needed());
    set(&mut found.at_risk, no, needed.is_some_and(|info| topology.bears_nothing(info, |_| false)));
    let moved = own.filter(|info| info.kind != Kind::Run && info.is_needed());
    set(&mut found.crowded, no, moved.is_some_and(|info| topology.crowded(&info.geometry, &info.homes).is_some()));
    let data = own.filter(|info| info.kind == Kind::Data && !info.kept);
    set(&mut found.astray, no, data.is_some_and(|info| info.is_visible() && topology.is_astray(info)));
    let first = data.filter(|info| info.is_live() && topology.is_in_first_tier(&info.geometry, &info.homes));
    set(&mut found.first, no, first.is_some());
}

/// Whether a segment is among [`Found::weak`], as far as its homes can be used.
pub(crate) fn is_weak(
    topology: Topology<'_>,
    no: SegmentNo,
    info: &SegmentInfo,
    is_usable: impl Fn(&Leg) -> bool,
) -> bool {
    if topology.basis.is_foreign(no) {
        return info.kind == Kind::Data && topology.is_crowded_foreign(no, info);
    }
    let is_narrow = match info.kind {
        Kind::Data => !topology.is_of_policy(&info.geometry),
        _ => topology.is_narrow_metadata(&info.geometry),
    };
    !info.homes.iter().all(is_usable)
        || info.is_live() && (is_narrow || topology.crowded(&info.geometry, &info.homes).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::basis::tests::basis;
    use crate::peers::Peers;
    use crate::peers::tests::{leg, peers, stat};
    use crate::segment::tests::{info, no};
    use holdfast_base::NodeId;

    const AT: Instant = Instant(1_000_000_000);

    /// Judges all, slice by slice; how many it were.
    fn settle(survey: &mut Survey, basis: &mut Basis, peers: &Peers, segments: &Segments) -> usize {
        for slices in 0.. {
            let mut turn = Turn::default();
            survey.go_on(basis, Topology::new(basis, peers), segments, &mut turn);
            survey.verify(Topology::new(basis, peers), segments);
            assert!(turn.runs <= basis.config.slice_runs_max, "a turn of {}", turn.runs);
            match survey.slice_deadline() {
                Some(at) => basis.now = at,
                None => return slices,
            }
        }
        unreachable!("it ends")
    }

    #[test]
    fn what_lacks_something_is_found_as_segments_and_devices_change() {
        let (mut basis, mut peers) = (basis("mirror:2"), peers(AT, &[1, 1, 2]));
        let (mut survey, mut segments) = (Survey::default(), Segments::default());
        segments.insert(no(1, 0), info(8, 8, &[leg(1, 0), leg(2, 0)]));
        segments.insert(no(1, 1), info(8, 8, &[leg(3, 0), leg(3, 1)]));
        segments.insert(no(1, 2), info(8, 0, &[leg(1, 0), leg(3, 0)]));
        let of = |set: &BTreeSet<SegmentNo>| set.iter().map(|no| no.counter).collect::<Vec<_>>();
        let mut found = |peers: &_, segments: &Segments| {
            settle(&mut survey, &mut basis, peers, segments);
            let found = survey.look(Topology::new(&basis, peers), segments);
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
        segments.reset(OwnNumbers::default());
        assert_eq!(found(&peers, &segments), nothing);
    }

    #[test]
    fn a_large_table_is_judged_in_slices_whatever_changes_meanwhile() {
        const SEGMENTS: u64 = 2000;
        let (mut basis, mut peers) = (basis("mirror:2"), peers(AT, &[1, 1, 2]));
        basis.config.slice_runs_max = 64;
        let (mut survey, mut segments) = (Survey::default(), Segments::default());
        for counter in 0..SEGMENTS {
            segments.insert(no(1, counter), info(8, 8, &[leg(1, 0), leg(2, 0)]));
        }
        let topology = Topology::new(&basis, &peers);
        assert!(!survey.is_settled(topology, &segments), "nothing was judged yet");
        assert!(settle(&mut survey, &mut basis, &peers, &segments) > 60);
        peers.on_down(AT, NodeId(1));
        let weak = |survey: &Survey, basis: &Basis, peers: &Peers, segments: &Segments| {
            survey.look(Topology::new(basis, peers), segments).weak().len() as u64
        };
        let is_settled = |survey: &Survey, basis: &Basis, peers: &Peers, segments: &Segments| {
            survey.is_settled(Topology::new(basis, peers), segments)
        };
        for step in 0..10 {
            survey.go_on(&basis, Topology::new(&basis, &peers), &segments, &mut Turn::default());
            segments.rehome(no(1, step), &[(0, leg(3, 0))]);
            segments.rehome(no(1, SEGMENTS - 1 - step), &[(0, leg(3, 0))]);
            segments.remove(no(1, 100 + step));
            survey.verify(Topology::new(&basis, &peers), &segments);
            assert!(!is_settled(&survey, &basis, &peers, &segments));
            basis.now = survey.slice_deadline().expect("it goes on");
        }
        assert!((100..1000).contains(&weak(&survey, &basis, &peers, &segments)), "as far as it was judged");
        assert!(settle(&mut survey, &mut basis, &peers, &segments) > 40);
        assert_eq!(weak(&survey, &basis, &peers, &segments), SEGMENTS - 30);
        assert!(is_settled(&survey, &basis, &peers, &segments));
    }

    #[test]
    fn a_device_that_comes_and_goes_keeps_no_segment_from_being_judged() {
        const SEGMENTS: u64 = 2000;
        let (mut basis, mut peers) = (basis("mirror:2"), peers(AT, &[1, 1, 1, 1]));
        basis.config.slice_runs_max = 64;
        let (mut survey, mut segments) = (Survey::default(), Segments::default());
        for counter in 0..SEGMENTS {
            segments.insert(no(1, counter), info(8, 8, &[leg(1, 0), leg(2, 0)]));
        }
        segments.insert(no(1, SEGMENTS), info(8, 8, &[leg(2, 0), leg(3, 0)]));
        settle(&mut survey, &mut basis, &peers, &segments);
        peers.on_down(AT, NodeId(3));
        for round in 0..200 {
            match round % 2 {
                0 => peers.on_down(basis.now, NodeId(4)),
                _ => peers.on_up(basis.now, NodeId(4), u32::MAX, vec![stat(leg(4, 0))]),
            }
            for _ in 0..4 {
                survey.go_on(&basis, Topology::new(&basis, &peers), &segments, &mut Turn::default());
                survey.verify(Topology::new(&basis, &peers), &segments);
                basis.now = survey.slice_deadline().expect("it goes on");
            }
        }
        let found = survey.look(Topology::new(&basis, &peers), &segments).weak().clone();
        assert_eq!(found, BTreeSet::from([no(1, SEGMENTS)]));
        settle(&mut survey, &mut basis, &peers, &segments);
    }

    #[test]
    fn who_asks_of_a_small_table_is_told_and_of_a_large_one_soon() {
        let (mut basis, mut peers) = (basis("mirror:2"), peers(AT, &[1, 1, 1]));
        basis.now = AT;
        let (mut survey, mut segments) = (Survey::default(), Segments::default());
        for counter in 0..AT_ONCE as u64 {
            segments.insert(no(1, counter), info(8, 8, &[leg(1, 0), leg(2, 0)]));
        }
        assert!(survey.is_settled(Topology::new(&basis, &peers), &segments));
        peers.on_down(AT, NodeId(1));
        assert!(survey.is_settled(Topology::new(&basis, &peers), &segments));
        assert_eq!(survey.look(Topology::new(&basis, &peers), &segments).weak().len(), AT_ONCE);
        segments.insert(no(1, AT_ONCE as u64), info(8, 8, &[leg(1, 0), leg(2, 0)]));
        settle(&mut survey, &mut basis, &peers, &segments);
        assert_eq!(survey.slice_deadline(), None);
        peers.on_up(basis.now, NodeId(1), u32::MAX, vec![stat(leg(1, 0))]);
        assert!(!survey.is_settled(Topology::new(&basis, &peers), &segments));
        let due_at = survey.slice_deadline().expect("nobody waits for a tick of a volume at rest");
        assert_eq!(due_at, basis.next_slice_at());
        assert!(settle(&mut survey, &mut basis, &peers, &segments) > 0);
    }

    #[test]
    fn a_survey_leaves_something_of_a_turn_to_others_and_goes_on_in_one_that_is_used_up() {
        let (mut basis, peers) = (basis("mirror:2"), peers(AT, &[1, 1]));
        basis.config.slice_runs_max = 64;
        let (mut survey, mut segments) = (Survey::default(), Segments::default());
        for counter in 0..1000 {
            segments.insert(no(1, counter), info(8, 8, &[leg(1, 0), leg(2, 0)]));
        }
        let mut turn = Turn::default();
        survey.go_on(&basis, Topology::new(&basis, &peers), &segments, &mut turn);
        assert!((1..basis.config.slice_runs_max).contains(&turn.sliced), "{turn:?}");
        let before = segments.touched_count();
        turn.slice("others", basis.config.slice_runs_max);
        basis.now = survey.slice_deadline().expect("it goes on");
        survey.go_on(&basis, Topology::new(&basis, &peers), &segments, &mut turn);
        assert!(segments.touched_count() < before);
    }
}
