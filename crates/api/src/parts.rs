//! What `holdfast volume explain` asks for, and the host's answer: the parts of a volume, from its guests down to devices.

use crate::texts::texts;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

texts! {
    /// What a leg of the open ledger does.
    pub enum LegState {
        Appending = "appending",
        Standby = "standby",
        Out = "out",
        /// What only newer releases know.
        Other = "other",
    }
}

texts! {
    /// What segments hold.
    pub enum SegmentKind {
        /// Guests' data.
        Data = "data",
        /// The map of a volume.
        Map = "map",
        /// What only newer releases know.
        Other = "other",
    }
}

/// Figures without a time are of now; `appended_bytes` counts since the volume was opened.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Parts {
    pub reads_in_flight: u64,
    pub writes_in_flight: u64,
    pub waiting: u64,
    pub map_cache_bytes: u64,
    pub map_cache_bytes_max: u64,
    /// Runs of blocks whose places changed, and are not written down with the map yet.
    #[serde(default)]
    pub map_changes: u64,
    pub log: LogParts,
    pub segments: Vec<SegmentParts>,
    /// Segments that are being written.
    pub jobs: u64,
    pub devices: Vec<DeviceParts>,
}

/// The log of a volume, from its first ledger to the end.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct LogParts {
    pub entries: u64,
    pub bytes: u64,
    pub bytes_max: u64,
    pub appended_bytes: u64,
    pub completed_lsn: u64,
    pub trimmed_lsn: u64,
    pub ledgers: u64,
    /// The ledger that takes appends, while there is one.
    pub open: Option<LedgerParts>,
}

/// A ledger: what was appended in one opening, on the same legs.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct LedgerParts {
    pub id: String,
    /// What acknowledges an entry: so many copies, in so many nodes; wherever they are for none.
    pub copies: u8,
    pub nodes: u8,
    pub legs: Vec<LegParts>,
}

/// A device that a ledger is on.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct LegParts {
    pub node: u32,
    pub device: String,
    pub state: LegState,
    /// Of the entries in memory, those that it holds.
    pub entries: u64,
}

/// Segments of one kind in one layout.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct SegmentParts {
    pub kind: SegmentKind,
    pub layout: String,
    pub segments: u64,
    pub shards: u64,
    pub bytes: u64,
}

/// What a device holds of a volume.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct DeviceParts {
    pub node: u32,
    pub device: String,
    pub shards: u64,
    pub bytes: u64,
    pub usable: bool,
}
