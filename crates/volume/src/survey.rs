//! Which segments lack something, kept up as the segment table and the devices change.
//!
//! A volume of a terabyte has a quarter of a million segments: walking over all of them takes so long that guests wait, and the
//! host asks for the state of every volume all the time. So what a segment lacks is judged when it, or what the
//! judgement goes by, has changed: the table notes the segments that did, and the rest is compared as a whole.
//!
//! Invariant: a survey says what a walk over the whole table would ([`Controller::check_survey`] walks).

use crate::controller::Controller;
use crate::governor::Need;
use crate::segments::{Kind, SegmentInfo};
use holdfast_base::MediaClass;
use holdfast_format::geometry::Layout;
use holdfast_format::ledger::Leg;
use holdfast_format::record::SegmentNo;
use holdfast_format::tier::Tiers;
use std::cell::Ref;
use std::collections::BTreeSet;

/// What segments are judged by, besides themselves.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Terms {
    /// Devices that nodes told of, and whether they can be used.
    devices: Vec<(Leg, Option<MediaClass>, bool)>,
    root: Option<(Layout, Tiers, SegmentNo)>,
}

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Survey {
    terms: Terms,
    /// Judged anew at the next look.
    pub(crate) touched: BTreeSet<SegmentNo>,
    /// Own ones with a shard on a device that is out or missing, of another shape than the policy's, or with shards too close
    /// together; and those of others whose shards are too close.
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

impl Survey {
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

impl Controller {
    fn terms(&self) -> Terms {
        Terms {
            devices: self.peers.device_states(),
            root: self.basis.is_known().then(|| (self.root().layout, self.root().tiers, self.root().first_own())),
        }
    }

    /// The survey as of now. The root is known.
    pub(crate) fn survey(&self) -> Ref<'_, Survey> {
        let terms = self.terms();
        let mut survey = self.segments.survey.borrow_mut();
        if survey.terms == terms {
            for no in std::mem::take(&mut survey.touched) {
                self.judge(&mut survey, no, self.segments.get(no));
            }
        } else {
            *survey = self.walk(terms);
        }
        drop(survey);
        self.segments.survey.borrow()
    }

    fn walk(&self, terms: Terms) -> Survey {
        let mut survey = Survey { terms, ..Survey::default() };
        for (no, info) in self.segments.iter() {
            self.judge(&mut survey, no, Some(info));
        }
        survey
    }

    fn judge(&self, survey: &mut Survey, no: SegmentNo, info: Option<&SegmentInfo>) {
        let own = info.filter(|_| !self.basis.is_foreign(no));
        let is_weak = info.is_some_and(|info| self.is_weak(no, info));
        set(&mut survey.weak, no, is_weak);
        let needed = own.filter(|info| is_weak && info.is_needed());
        set(&mut survey.at_risk, no, needed.is_some_and(|info| self.bears_nothing(info, |_| false)));
        let moved = own.filter(|info| info.kind != Kind::Run && info.is_needed());
        set(&mut survey.crowded, no, moved.is_some_and(|info| self.crowded(&info.geometry, &info.homes).is_some()));
        let data = own.filter(|info| info.kind == Kind::Data && !info.kept);
        set(&mut survey.astray, no, data.is_some_and(|info| info.visible() > 0 && self.is_astray(info)));
        let first = data.filter(|info| info.live > 0 && self.is_in_first_tier(&info.geometry, &info.homes));
        set(&mut survey.first, no, first.is_some());
    }

    fn is_weak(&self, no: SegmentNo, info: &SegmentInfo) -> bool {
        if self.basis.is_foreign(no) {
            return info.kind == Kind::Data && self.is_crowded_foreign(no, info);
        }
        let is_narrow = match info.kind {
            Kind::Data => !self.is_of_policy(&info.geometry),
            _ => self.is_narrow_metadata(&info.geometry),
        };
        info.homes.iter().any(|home| !self.peers.leg_usable(*home))
            || info.live > 0 && (is_narrow || self.crowded(&info.geometry, &info.homes).is_some())
    }

    /// Whether one more loss would take the segment, with shards missing where they can't be used, and where `lacks` says so.
    pub(crate) fn bears_nothing(&self, info: &SegmentInfo, lacks: impl Fn(u8) -> bool) -> bool {
        let is_on_devices = self.basis.is_on_devices();
        let is_beside = |one: &Leg, other: &Leg| {
            if is_on_devices { one.device == other.device } else { one.node == other.node }
        };
        let there: Vec<(u8, Leg)> = info
            .homes
            .iter()
            .enumerate()
            .map(|(index, home)| (index as u8, *home))
            .filter(|(index, home)| self.peers.leg_usable(*home) && !lacks(*index))
            .collect();
        let is_lost_without = |gone: Option<&Leg>| {
            let left = there.iter().filter(|(_, home)| gone.is_none_or(|gone| !is_beside(gone, home)));
            let positions = left.fold(0_u64, |positions, (index, _)| positions | 1 << info.geometry.position(*index));
            positions.count_ones() < u32::from(info.geometry.data)
        };
        is_lost_without(None) || there.iter().any(|(_, home)| is_lost_without(Some(home)))
    }

    /// How much it is needed that the segment's data are moved, or its shard made again which is missing or damaged.
    pub(crate) fn need_of(&self, no: SegmentNo, shard: Option<u8>) -> Need {
        let Some(info) = self.segments.get(no) else { return Need::Choice };
        let lacks = |index| shard == Some(index) || self.repairer.wants(no, index);
        let is_out = |(index, home): (usize, &Leg)| lacks(index as u8) || !self.peers.leg_usable(*home);
        if self.bears_nothing(info, lacks) {
            Need::AtRisk
        } else if info.homes.iter().enumerate().any(is_out) || info.geometry.failures() < self.root().layout.failures()
        {
            Need::Lacking
        } else {
            Need::Choice
        }
    }

    /// For tests: walks over the whole table, and panics where the survey, or a total that is kept, says anything else.
    pub fn check_survey(&self) {
        if self.basis.is_known() {
            let kept = self.survey();
            assert_eq!(*kept, self.walk(kept.terms.clone()), "the survey is what a walk finds");
        }
        let first_own = (self.state() == crate::api::State::Open).then(|| self.root().first_own());
        self.segments.check_totals(first_own);
    }
}
