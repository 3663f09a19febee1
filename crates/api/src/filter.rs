//! What a host says of the filters between a volume's clients and its controller.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// The filters of a volume, from its clients down.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct FiltersInfo {
    #[serde(alias = "layers")]
    pub filters: Vec<FilterInfo>,
    /// Between the lowest one and the controller.
    pub below: EdgeInfo,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct FilterInfo {
    pub id: u32,
    /// What it was told.
    pub spec: String,
    /// It makes the volume worse than it is: a tool for tests.
    pub tool: bool,
    /// It is removed, and waits for replies to what it has passed on.
    pub leaving: bool,
    /// It is the volume's limit, wherever that is served, and no filter.
    #[serde(default)]
    pub kept: bool,
    /// Between it and what is above it.
    pub above: EdgeInfo,
    /// What it did.
    pub counters: BTreeMap<String, u64>,
}

/// What has crossed an edge since the filter below it was added.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct EdgeInfo {
    pub requests: u64,
    pub bytes_down: u64,
    pub replies: u64,
    pub bytes_up: u64,
    pub errors: u64,
    pub in_flight: u64,
}

impl FiltersInfo {
    /// What makes the volume worse than it is.
    pub fn tools(&self) -> Vec<&str> {
        self.filters.iter().filter(|filter| filter.tool).map(|filter| filter.spec.as_str()).collect()
    }
}
