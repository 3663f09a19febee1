//! Volumes that several clients may write to at a time.

use super::catalog::Entry;
use super::control::ControlPlane;
use anyhow::Result;
use holdfast_base::VolumeId;
use holdfast_host::Order;
use std::collections::BTreeSet;

impl ControlPlane {
    /// Has the host know which volumes several clients may write to.
    pub(super) fn take_in_shared(&self) -> Result<()> {
        let volumes: BTreeSet<VolumeId> = self
            .records
            .view(|view| view.exports().filter(|(_, export)| export.shared).map(|(volume, _)| volume).collect());
        let mut told = self.shared_told();
        if told.as_ref() != Some(&volumes) {
            let next = volumes.clone();
            self.order(Order::Share(volumes))?;
            *told = Some(next);
        }
        Ok(())
    }

    /// Whether several clients may write to a volume in service at a time.
    pub(super) fn set_shared(&self, entry: &Entry, shared: bool) -> Result<()> {
        self.catalog.change_export(entry.root.volume, |export| export.shared = shared)?;
        self.take_in_shared()
    }
}
