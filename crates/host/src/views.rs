//! What a host tells of its volumes to whoever looks after the grid.

use crate::host::Host;
use crate::volumes::Volume;
use holdfast_base::{Epoch, VolumeId};
use holdfast_format::sharing::SegmentRanges;
use holdfast_volume::State;
use std::collections::BTreeMap;

/// By separate clone that is open here: of which generation its record of what it names is.
pub type Published = BTreeMap<VolumeId, (Epoch, u64)>;

/// A volume that is open here, as far as it shares segments.
#[derive(Clone, Debug)]
pub struct SharingView {
    pub id: VolumeId,
    /// Volumes that may name segments of it.
    pub dependents: Vec<VolumeId>,
    /// Its origin, and what it names of that, where the generation is not the one that is known.
    pub named: Option<(VolumeId, SegmentRanges)>,
    /// See [`holdfast_volume::Controller::named_generation`].
    pub generation: (Epoch, u64),
}

/// What a volume in service lacks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Weakness {
    pub volume: String,
    /// It is not open yet, or not any more: nobody knows.
    pub unknown: bool,
    pub segments: u64,
    pub entries: u64,
}

pub(crate) fn is_unknown(volume: &Volume) -> bool {
    matches!(volume.controller().state(), State::Opening | State::Closing)
}

impl Host {
    /// Volumes that are open and share segments with others; what is told of one in a known generation is left out.
    pub fn sharing(&self, known: &Published) -> Vec<SharingView> {
        let open = self.volumes().filter(|v| v.controller().state() == State::Open);
        let sharing = |volume: &Volume| {
            let (id, generation) = (volume.id(), volume.controller().named_generation());
            let is_known = known.get(&id) == Some(&generation);
            let named = if is_known { None } else { volume.controller().named_of_origin() };
            let dependents = volume.controller().dependents().iter().map(|of| of.volume).collect();
            SharingView { id, dependents, named, generation }
        };
        open.map(sharing).filter(|sharing| !sharing.dependents.is_empty() || sharing.named.is_some()).collect()
    }
}
