//! What the grid has room for, as programs that make volumes ask.

use super::commands::Command;
use super::control::ControlPlane;
use crate::capacity::efficiency;
use anyhow::Result;
use holdfast_api::{Code, Error, LinkState, RoomInfo, promised_of, takers};
use holdfast_format::geometry::Layout;
use holdfast_volume::claims::writable_beside;
use holdfast_volume::protect::for_few;

impl ControlPlane {
    /// Of nodes that are there: what is on others nobody can write to now.
    pub(super) fn room(&self, layout: Option<&str>) -> Result<RoomInfo> {
        let nodes = self.live()?.nodes;
        let here: Vec<_> = nodes.iter().filter(|node| node.link != LinkState::Down).collect();
        let usual = || match here.len() == nodes.len() {
            // One that has nodes which are away is not to get less than it could bear when they are back.
            false => Layout::DEFAULT,
            true => {
                let takers = here.iter().map(|node| takers(&node.devices).count());
                for_few(&takers.filter(|count| *count > 0).collect::<Vec<usize>>())
                    .map_or(Layout::DEFAULT, |(_, layout)| layout)
            }
        };
        let named = layout.map(str::parse::<Layout>).transpose();
        let layout = named.map_err(|why| Error::new(Code::Invalid, why.to_string()))?.unwrap_or_else(usual);
        let free: Vec<Vec<u64>> = here.iter().map(|node| promised_of(&node.devices)).collect();
        let claims = self.ask(|answer| Command::Claims { beside: None, answer })?;
        let free_bytes = writable_beside(&free, &claims, layout);
        let devices = here.iter().flat_map(|node| &node.devices);
        let taken: u64 = devices.map(|device| device.capacity_bytes.saturating_sub(device.free_bytes)).sum();
        let used_bytes = taken / u64::from(layout.shard_count()) * u64::from(layout.data_shards());
        Ok(RoomInfo {
            host: self.catalog.host().to_string(),
            layout: layout.to_string(),
            efficiency: efficiency(layout),
            total_bytes: used_bytes + free_bytes,
            used_bytes,
            free_bytes,
        })
    }
}
