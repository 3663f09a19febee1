//! Separate clones: volumes of their own that share the segments of the volume that they were made of (see
//! `holdfast_volume`'s `sharing::segments`). This is who makes them, and who carries word between the two.
//!
//! **Making one.** First its root record is there as a mere placeholder; then the origin's owner writes its map and names it
//! in the origin's root; then the placeholder becomes the root that the owner has given. That is one compare-and-swap: where
//! the making was given up meanwhile, because another host has the origin now, the placeholder is gone, and it fails.
//!
//! **Word of what is named.** Each host looks what the volumes that it has open still name of their origins, and writes
//! that into a record when it has changed; and tells each volume that it has open what its dependents wrote
//! ([`holdfast_cluster::Upkeep`] decides when).
//! A dependent whose root is gone, or is being deleted, names nothing. A placeholder that nobody is at work on is given up first, by
//! a swap of that record: whoever may still be about to finish it does not come to that.

use super::catalog::Begun;
use super::commands::Command;
use super::control::{CHANGE_MAX, ControlPlane, check_size};
use anyhow::Result;
use holdfast_api::{Code, Error, VolumeInfo, refuse};
use holdfast_base::{Epoch, VolumeId};
use holdfast_cluster::upkeep::SharingNow;
use holdfast_format::record::SegmentNo;
use holdfast_format::root::Root;
use holdfast_format::sharing::SegmentRanges;
use holdfast_host::views::{Published, SharingView};
use holdfast_host::{DependentOutcome, Order, split_export};
use std::sync::{MutexGuard, PoisonError};

impl ControlPlane {
    /// Makes a volume of its own of a snapshot. To be called alone.
    pub(super) fn clone_separately(
        &self,
        source: &str,
        name: &str,
        size_bytes: Option<u64>,
        export: bool,
    ) -> Result<VolumeInfo> {
        let (volume, Some(snapshot)) = split_export(source) else {
            refuse!(
                Code::State,
                "{source} is a volume, and clones are made of snapshots; `holdfast snapshot create {source} NAME`, then \
                 `holdfast volume clone {source}@NAME {name} --separate`"
            );
        };
        size_bytes.map_or(Ok(()), check_size)?;
        let origin = self.catalog.find(volume)?;
        self.catalog.check_not_elsewhere(&origin)?;
        let shown_bytes = self.snapshot_bytes(volume, snapshot)?;
        if size_bytes.is_some_and(|size| size < shown_bytes) {
            refuse!(
                Code::State,
                "a clone is at least as large as its snapshot; make it smaller later (`holdfast volume resize`)"
            );
        }
        let layout = origin.root.layout;
        let key = self.keys.for_dependent(&origin)?;
        let begun = self.catalog.begin_separate(name, &origin, key.as_ref())?;
        let made = self.inherit_access(&origin, begun.volume);
        let made = made.and_then(|()| self.create_dependent((volume, snapshot), &begun, name, size_bytes));
        if let Err(error) = made.and_then(|root| self.catalog.finish_separate(&begun, &root)) {
            // The last step may have happened although nobody heard of it.
            if self.catalog.give_up_separate(&begun, name)? {
                return Err(error);
            }
        }
        let mut warning = None;
        if let Some(key) = &key {
            self.keys.on_made(begun.volume, key)?;
            warning = self.key_warning(name, layout);
        }
        if export {
            self.export(name, false)?;
        }
        Ok(VolumeInfo { warning, ..self.show(name)? })
    }

    fn create_dependent(
        &self,
        (volume, snapshot): (&str, &str),
        begun: &Begun,
        name: &str,
        size_bytes: Option<u64>,
    ) -> Result<Box<Root>> {
        let (dependent, name) = (begun.volume, name.to_string());
        let (of, snapshot) = (volume.to_string(), snapshot.to_string());
        let order = Order::CreateDependent { volume: of, snapshot, dependent, name, size_bytes };
        match self.order_within(CHANGE_MAX, order)?.dependent() {
            DependentOutcome::Made(root) => Ok(root),
            DependentOutcome::NotOpen => {
                refuse!(
                    Code::State,
                    "volume {volume} is not in service any more; `holdfast volume list` says where it is"
                )
            }
            DependentOutcome::Refused(why) => {
                refuse!(Code::State, "{why}; `holdfast snapshot list {volume}` shows what there is")
            }
        }
    }

    fn snapshot_bytes(&self, volume: &str, snapshot: &str) -> Result<u64> {
        let info = self.show(volume)?;
        let Some(live) = &info.live else {
            refuse!(
                Code::State,
                "volume {volume} is not in service; `holdfast volume export {volume}`, then try again"
            );
        };
        let found = live.snapshots.iter().find(|s| s.name == snapshot).map(|s| s.size_bytes);
        found.ok_or_else(|| {
            let why = format!(
                "volume {volume} has no snapshot {snapshot}; `holdfast snapshot list {volume}` shows what there is"
            );
            Error::new(Code::NotFound, why).into()
        })
    }

    /// Volumes that are open here and share segments with others.
    pub(super) fn sharing_here(&self) -> Result<Vec<SharingNow>> {
        let known = self.published().clone();
        let sharing = self.ask(|answer| Command::Sharing { known, answer })?;
        let seen = |SharingView { id, dependents, named, generation }| SharingNow {
            volume: id,
            dependents,
            names: named,
            generation,
        };
        Ok(sharing.into_iter().map(seen).collect())
    }

    pub(super) fn note_names(
        &self,
        (origin, dependent): (VolumeId, VolumeId),
        names: &SegmentRanges,
        generation: (Epoch, u64),
    ) -> Result<()> {
        self.catalog.set_named(origin, dependent, names)?;
        self.published().insert(dependent, generation);
        Ok(())
    }

    fn published(&self) -> MutexGuard<'_, Published> {
        self.published.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn tell_names(&self, origin: VolumeId, dependent: VolumeId) -> Result<()> {
        let everything = SegmentNo { epoch: Epoch(u64::MAX), counter: u64::MAX };
        let names = self.catalog.named(origin, dependent)?.unwrap_or(SegmentRanges::upto(everything));
        self.tell_of_dependent(origin, dependent, Some(names))
    }

    pub(super) fn give_up_dependent(&self, origin: VolumeId, dependent: VolumeId) -> Result<()> {
        // What is being made at this host is being made by whoever is alone.
        let _alone = self.alone();
        if !self.catalog.is_gone(dependent)? {
            // Its word comes with the next look.
            return Ok(());
        }
        self.catalog.forget_named(origin, dependent)?;
        self.tell_of_dependent(origin, dependent, None)
    }

    fn tell_of_dependent(&self, origin: VolumeId, dependent: VolumeId, names: Option<SegmentRanges>) -> Result<()> {
        self.order(Order::Dependent { origin, dependent, names }).map(drop)
    }
}
