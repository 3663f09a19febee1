//! What a grid has room for.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Room of a grid, as guests see it, if all of it is of one layout.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct RoomInfo {
    /// The host that tells.
    pub host: String,
    /// The one that was asked for; else what new volumes get of which nothing is said.
    pub layout: String,
    /// Of what devices hold, what guests see.
    pub efficiency: f64,
    /// Used and free.
    pub total_bytes: u64,
    pub used_bytes: u64,
    /// What guests of thin volumes can write yet, of all of them together.
    pub free_bytes: u64,
}
