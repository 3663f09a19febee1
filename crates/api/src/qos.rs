//! What `holdfast qos list` asks for, and the host's answer: which floors are promised, and of what.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct QosInfo {
    /// By host.
    pub measured: Vec<MeasuredInfo>,
    /// Of the grid, measured or not.
    pub hosts: u64,
    /// Requests of 8 KiB a second, in all; nothing is promised before a host was measured.
    pub for_floors: Option<u64>,
    pub floors: Vec<FloorInfo>,
}

impl QosInfo {
    /// All floors together, requests of 8 KiB a second.
    pub fn promised(&self) -> u64 {
        self.floors.iter().fold(0, |sum, of| sum.saturating_add(of.floor))
    }
}

/// What a host could do, without one of the nodes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct MeasuredInfo {
    pub host: String,
    /// Requests of 8 KiB a second, seven reads to three writes.
    pub iops: u64,
    /// That the grid had then.
    pub nodes: u64,
    /// Unix seconds.
    pub at_s: u64,
}

/// A volume or clone that is promised something.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct FloorInfo {
    /// Of one in the trash, the name that it had.
    pub volume: String,
    /// Requests of 8 KiB a second.
    pub floor: u64,
}
