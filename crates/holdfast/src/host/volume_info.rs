//! Volumes in service as the API tells of them.

use super::Shell;
use holdfast_api::{FiltersInfo, Provisioning, VolumeInfo};
use holdfast_base::HeadId;
use holdfast_filter::Edge;
use holdfast_host::{Volume, policy_of};
use holdfast_runtime::clock;
use holdfast_verdict::resources;
use holdfast_verdict::volumes::{filters_info, info_of, limit_info};

impl Shell {
    /// Where clients find an export.
    pub(super) fn uris(&self, name: &str) -> Vec<String> {
        self.served_at.iter().map(|place| place.uri(name)).collect()
    }

    pub(super) fn volume_infos(&self) -> Vec<VolumeInfo> {
        self.host.heads().map(|(name, volume, head)| self.info(name, volume, head)).collect()
    }

    /// What is told of a volume that is open, or a clone in it.
    pub(super) fn volume_info(&self, name: &str) -> Option<VolumeInfo> {
        let (volume, head) = self.host.find(name)?;
        Some(self.info(name, volume, head))
    }

    /// What stands before a volume: its limit, if that can be kept to, and filters.
    fn filters_info(&self, name: &str, volume: &Volume, head: HeadId) -> Option<Box<FiltersInfo>> {
        let words = volume.id_of(head).filter(|_| volume.is_exported()).and_then(|id| self.host.limit_of(id));
        let Some(words) = words.filter(|words| policy_of(words).is_ok()) else {
            return filters_info(volume, head).map(Box::new);
        };
        let none = || FiltersInfo { filters: Vec::new(), below: resources::edge(Edge::default()) };
        let mut info = filters_info(volume, head).unwrap_or_else(none);
        info.filters.insert(0, limit_info(words, self.host.figures(name).unwrap_or_default()));
        Some(Box::new(info))
    }

    fn info(&self, name: &str, volume: &Volume, head: HeadId) -> VolumeInfo {
        let mut info = info_of(clock::now(), volume, name, head, |export| self.uris(export));
        info.host = volume.is_exported().then(|| self.name.clone());
        let id = volume.id_of(head);
        info.filters = self.filters_info(name, volume, head);
        info.only_for = id.and_then(|id| self.host.clients_of(id)).cloned();
        info.limit = id.and_then(|id| self.host.limit_of(id)).map(str::to_string);
        if let Some(reservation) = self.host.reservations().get(&volume.id()).filter(|_| head == HeadId::VOLUME) {
            info.provisioning = Provisioning::Fixed;
            info.set_aside_bytes = reservation.set_aside_bytes();
        }
        info
    }
}
