//! The ground that all parts of a controller stand on: its settings, the time, and what the root record says.
//!
//! Role: the controller keeps it up, and lends it to the parts whose methods it calls. Parts change nothing of it.

use crate::api::Config;
use crate::turn::PAUSE;
use holdfast_base::{Epoch, Instant, NodeId, SegmentId, VolumeId};
use holdfast_format::geometry::Layout;
use holdfast_format::record::SegmentNo;
use holdfast_format::root::Root;
use holdfast_format::wire::NodeTimes;
use holdfast_stages::{Stage, Trail};
use std::time::Duration;

/// What a node has answered, and what it tells of its part.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Answer {
    pub(crate) node: NodeId,
    pub(crate) asked_at: Instant,
    pub(crate) times: Option<NodeTimes>,
    /// The node that was asked for the same before, and did not answer well or in time.
    pub(crate) instead_of: Option<NodeId>,
}

impl Answer {
    /// Ends what a request spent at nodes at this instant, by the answer that came last.
    pub(crate) fn mark(answer: Option<Answer>, now: Instant, trail: &mut Trail) {
        let Some(Answer { node, asked_at, times, instead_of }) = answer else { return trail.mark(now, Stage::Nodes) };
        let us = |us: u32| Duration::from_micros(us.into());
        trail.mark_for(asked_at, Stage::SecondRound, instead_of);
        trail.mark_node(now, node, times.map(|times| (us(times.queue_us), us(times.device_us))));
    }
}

#[derive(Debug)]
pub(crate) struct Basis {
    pub(crate) config: Config,
    pub(crate) now: Instant,
    /// The answer that is heard now, if one is.
    pub(crate) answer: Option<Answer>,
    /// When the volume was first served.
    pub(crate) opened_at: Instant,
    root: Option<Root>,
}

impl Basis {
    pub(crate) fn new(config: Config) -> Basis {
        Basis { config, now: Instant::ZERO, answer: None, opened_at: Instant::ZERO, root: None }
    }

    /// The root record, which was read.
    pub(crate) fn root(&self) -> &Root {
        self.root.as_ref().expect("the root record was read")
    }

    pub(crate) fn known(&self) -> Option<&Root> {
        self.root.as_ref()
    }

    pub(crate) fn is_known(&self) -> bool {
        self.root.is_some()
    }

    /// Takes a newer record, and returns the one before.
    pub(crate) fn replace_root(&mut self, root: Root) -> Option<Root> {
        self.root.replace(root)
    }

    /// When work that is cut here goes on.
    pub(crate) fn next_slice_at(&self) -> Instant {
        self.now + PAUSE
    }

    pub(crate) fn epoch(&self) -> Epoch {
        self.root().epoch
    }

    pub(crate) fn volume(&self) -> VolumeId {
        self.config.volume
    }

    pub(crate) fn layout(&self) -> Option<Layout> {
        self.root.as_ref().map(|root| root.layout)
    }

    /// Whether fault domains of this volume are devices.
    pub(crate) fn is_on_devices(&self) -> bool {
        self.layout().is_some_and(Layout::is_on_devices)
    }

    /// The id of a segment that the map names.
    pub(crate) fn segment_id(&self, no: SegmentNo) -> SegmentId {
        no.of(self.root().owner_of(no))
    }

    /// Whether a segment is an origin's, or a store's.
    pub(crate) fn is_foreign(&self, no: SegmentNo) -> bool {
        !self.root().own_numbers().contains(no)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use holdfast_base::{GridId, InstanceId};
    use holdfast_format::sharing::Origin;

    pub(crate) const VOLUME: VolumeId = VolumeId(7);

    /// Of a volume of that layout, whose root is known.
    pub(crate) fn basis(layout: &str) -> Basis {
        let mut basis = Basis::new(Config::new(GridId(1), VOLUME, "host", InstanceId(1), 5));
        let layout = layout.parse().expect("a layout");
        basis.replace_root(Root::new(GridId(1), VOLUME, "vm", 1 << 30, layout));
        basis
    }

    #[test]
    fn segments_are_of_the_volume_that_wrote_them() {
        let mut basis = basis("mirror:2");
        let no = |epoch, counter| SegmentNo { epoch: Epoch(epoch), counter };
        assert!(!basis.is_foreign(no(1, 0)));
        let mut root = basis.root().clone();
        root.origins.push(Origin { upto: Epoch(3), volume: VolumeId(9) });
        assert!(basis.replace_root(root).is_some_and(|former| former.origins.is_empty()));
        assert!(basis.is_foreign(no(3, 5)) && !basis.is_foreign(no(4, 0)));
        assert_eq!(basis.segment_id(no(3, 5)), no(3, 5).of(VolumeId(9)));
        assert_eq!(basis.segment_id(no(4, 0)), no(4, 0).of(VOLUME));
    }

    #[test]
    fn before_the_root_is_known_no_layout_is() {
        let basis = Basis::new(Config::new(GridId(1), VOLUME, "host", InstanceId(1), 5));
        assert!(!basis.is_known() && !basis.is_on_devices() && basis.layout().is_none());
        assert!(super::tests::basis("mirror:2@device").is_on_devices());
    }
}
