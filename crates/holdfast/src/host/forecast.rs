//! How long the space will last: samples of what is taken, in the records of the grid.
//!
//! ```text
//! trend                  (metadata) what was taken of the devices in each hour of the last week
//! ```
//! What is taken is what is in use, but for what is dead and can be cleaned (of volumes that this host serves), and what is set
//! aside for fixed volumes. Unlike what is free it doesn't jump when a device is added. [`holdfast_cluster::forecast`] says where
//! it leads.

use super::control::ControlPlane;
use anyhow::Result;
use holdfast_api::{LinkState, NodeInfo, VolumeInfo, free_of};
use holdfast_format::meta::CapacitySample;
use holdfast_runtime::clock;
use holdfast_verdict::resources;

/// What can still be written above the reserve and beside what is set aside, and what is taken. What is dead counts
/// as free: where guests overwrite it comes to take nearly all that is left beside what lives.
fn free_and_taken(nodes: &[NodeInfo], volumes: &[VolumeInfo]) -> (u64, u64) {
    let set_aside: u64 = volumes.iter().map(|v| v.set_aside_bytes).sum();
    let dead: u64 = volumes.iter().map(resources::reclaimable_bytes).sum();
    let free: u64 = nodes.iter().flat_map(|n| free_of(&n.devices)).sum();
    let devices = nodes.iter().flat_map(|n| &n.devices);
    let used: u64 = devices.map(|d| d.capacity_bytes - d.free_bytes).sum();
    ((free + dead).saturating_sub(set_aside), used.saturating_sub(dead) + set_aside)
}

impl ControlPlane {
    pub(super) fn sample_space(&self) -> Result<()> {
        let at_ms = clock::wall().as_millis() as u64;
        // While the reactor is busy or stops it answers later, or never.
        let Ok(status) = self.status() else { return Ok(()) };
        // What a node holds that is away is not known.
        if status.nodes.is_empty() || status.nodes.iter().any(|n| n.link == LinkState::Down) {
            return Ok(());
        }
        let (_, taken_bytes) = free_and_taken(&status.nodes, &status.volumes);
        let sample = CapacitySample { at_ms, taken_bytes };
        let kept = self.forecast().note(sample).map(<[CapacitySample]>::to_vec);
        kept.map_or(Ok(()), |samples| self.catalog.set_trend(&samples))
    }

    pub(super) fn days_to_full(&self, nodes: &[NodeInfo], volumes: &[VolumeInfo]) -> Option<f64> {
        let (free, _) = free_and_taken(nodes, volumes);
        self.forecast().days_until(free)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::catalog::Catalog;
    use holdfast_base::GridId;
    use holdfast_runtime::meta::LocalStore;
    use std::sync::Arc;

    #[test]
    fn what_was_seen_outlives_the_host() {
        let catalog = Catalog::new(Arc::new(LocalStore::in_memory(Arc::new(clock::now))), GridId(1), "a");
        assert_eq!(catalog.trend().unwrap(), []);
        let samples: Vec<CapacitySample> =
            (0..24).map(|hour| CapacitySample { at_ms: hour * 3_600_000, taken_bytes: hour << 30 }).collect();
        catalog.set_trend(&samples).unwrap();
        assert_eq!(catalog.trend().unwrap(), samples);
    }
}
