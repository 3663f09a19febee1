//! Segments of a store of which members name little: what is dead in them can't be given back as long as they do.
//!
//! Role: a walk over the store's segments. A few at a time, members are asked how much they name of each; what comes to less
//! than three tenths is *vacated*: it is offered no more, and members copy back what they have there. What of that is alike is
//! gathered anew, into a segment that is full. The old one is named by nobody then, and goes as such.
//!
//! States: resting -> asking (members, about a slice) -> the next slice -> resting.
//!
//! All that is told is a hint: what is copied back though it need not be costs a copy. A slice of which a member tells nothing,
//! since it is closed, is passed over.

use super::store::LOOKED_AT;
use crate::basis::Basis;
use crate::segment::{Kind, SegmentInfo, Segments};
use holdfast_base::{Instant, VolumeId};
use holdfast_format::record::SegmentNo;
use std::collections::{BTreeMap, BTreeSet};

/// Of a thousand blocks of a segment: fewer are not worth keeping the others for.
const NAMED_MIN: u64 = 300;

/// What members tell of a slice.
#[derive(Debug)]
struct Round {
    /// Blocks that are named, and that the store has there.
    blocks: BTreeMap<SegmentNo, (u64, u64)>,
    unanswered: BTreeSet<VolumeId>,
    until: Instant,
}

#[derive(Debug, Default)]
pub(crate) struct Sparse {
    looked_to: Option<SegmentNo>,
    rests_until: Instant,
    round: Option<Round>,
    /// Being vacated: offered to nobody.
    vacated: BTreeSet<SegmentNo>,
}

impl Sparse {
    pub(crate) fn is_vacated(&self, no: SegmentNo) -> bool {
        self.vacated.contains(&no)
    }

    /// The next slice that members are to be asked about.
    pub(crate) fn ask(&mut self, basis: &Basis, segments: &Segments) -> Option<Vec<SegmentNo>> {
        let members = &basis.root().dependents;
        self.round.take_if(|round| round.until <= basis.now);
        if self.round.is_some() || basis.now < self.rests_until || members.is_empty() {
            return None;
        }
        let is_data = |info: &SegmentInfo| info.kind == Kind::Data && info.is_visible();
        let mut ahead = segments.own_after(self.looked_to);
        let slice: Vec<(SegmentNo, &SegmentInfo)> = ahead.by_ref().take(LOOKED_AT).collect();
        self.looked_to = ahead.next().and(slice.last()).map(|(no, _)| *no);
        if self.looked_to.is_none() {
            self.rests_until = basis.now + basis.config.vacate_every;
            self.vacated.retain(|no| segments.get(*no).is_some_and(is_data));
        }
        let blocks: BTreeMap<SegmentNo, (u64, u64)> = slice
            .iter()
            .filter(|(_, info)| is_data(info))
            .map(|(no, info)| (*no, (0, info.visible().blocks)))
            .collect();
        let asked: Vec<SegmentNo> = blocks.keys().copied().collect();
        let (unanswered, until) = (members.iter().map(|of| of.volume).collect(), basis.now + basis.config.repack_every);
        self.round = (!asked.is_empty()).then_some(Round { blocks, unanswered, until });
        Some(asked).filter(|asked| !asked.is_empty())
    }

    /// A member names so much. With the last one: which segments are to be vacated. An answer that came late is of another
    /// slice, and tells nothing of this one.
    pub(crate) fn on_counted(&mut self, member: VolumeId, counts: &[(SegmentNo, u32)]) -> Vec<SegmentNo> {
        let Some(round) = &mut self.round else { return Vec::new() };
        let counts: BTreeMap<SegmentNo, u32> = counts.iter().copied().collect();
        let is_of_this = round.blocks.keys().all(|no| counts.contains_key(no));
        if !is_of_this || !round.unanswered.remove(&member) {
            return Vec::new();
        }
        for (no, count) in &counts {
            if let Some((named, _)) = round.blocks.get_mut(no) {
                *named += u64::from(*count);
            }
        }
        if !round.unanswered.is_empty() {
            return Vec::new();
        }
        let round = self.round.take().expect("just seen");
        let is_sparse = |(named, all): &(u64, u64)| *named > 0 && named.saturating_mul(1000) < NAMED_MIN * all;
        let sparse: Vec<SegmentNo> = round.blocks.iter().filter(|(_, of)| is_sparse(of)).map(|(no, _)| *no).collect();
        self.vacated.extend(&sparse);
        sparse
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::tests::leg;
    use crate::segment::tests::{info, no as number};
    use holdfast_format::root::Root;
    use holdfast_format::sharing::Dependent;
    use std::time::Duration;

    fn no(counter: u64) -> SegmentNo {
        number(1, counter)
    }

    #[test]
    fn what_little_is_named_of_is_vacated_when_all_have_told() {
        let mut basis = crate::basis::tests::basis("mirror:2");
        basis.now = Instant::ZERO + Duration::from_secs(10);
        let mut segments = Segments::default();
        for counter in 1..=3 {
            segments.insert(no(counter), info(100, 20, &[leg(1, 0), leg(2, 0)]));
        }
        let dependents = [3, 4].map(|member| Dependent { volume: VolumeId(member), upto: no(9) }).to_vec();
        basis.replace_root(Root { dependents, ..basis.root().clone() });
        let mut sparse = Sparse::default();
        let asked = sparse.ask(&basis, &segments);
        assert_eq!(asked.as_deref(), Some([no(1), no(2), no(3)].as_slice()));
        assert!(sparse.ask(&basis, &segments).is_none(), "one slice at a time");
        assert!(sparse.on_counted(VolumeId(3), &[(no(1), 3), (no(2), 3), (no(3), 0)]).is_empty());
        assert!(sparse.on_counted(VolumeId(3), &[(no(1), 9)]).is_empty(), "it has told");
        assert!(sparse.on_counted(VolumeId(5), &[(no(1), 9)]).is_empty(), "it is no member");
        assert!(sparse.on_counted(VolumeId(4), &[(no(1), 2), (no(2), 0)]).is_empty(), "that is of another slice");
        // Half of it is dead in the one, the other one has it all; of the third nobody has anything.
        assert_eq!(sparse.on_counted(VolumeId(4), &[(no(1), 2), (no(2), 20), (no(3), 0)]), [no(1)]);
        assert!(sparse.is_vacated(no(1)) && !sparse.is_vacated(no(2)) && !sparse.is_vacated(no(3)));
        assert!(sparse.ask(&basis, &segments).is_none(), "it rests");
        basis.now = basis.now + basis.config.vacate_every;
        assert!(sparse.ask(&basis, &segments).is_some());
        basis.now = basis.now + basis.config.repack_every + basis.config.vacate_every;
        assert!(sparse.ask(&basis, &segments).is_some(), "who tells nothing is not waited for");
    }
}
