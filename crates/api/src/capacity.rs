//! Capacity: where each byte of the grid's devices is.

use crate::VolumeSpace;
use serde::Serialize;
use utoipa::ToSchema;

/// Bytes of all devices together. `raw` is the sum of what stands below it, and so is `used`.
#[derive(Clone, PartialEq, Debug, Serialize, ToSchema)]
pub struct Capacity {
    pub raw_bytes: u64,
    /// Journals, tables and superblocks.
    pub overhead_bytes: u64,
    pub used_bytes: u64,
    pub reserve_bytes: u64,
    /// Not promised to guests either: what is dead may take it.
    pub spare_bytes: u64,
    /// What fixed volumes own and have not used yet, by volume, as far as it is there.
    pub set_aside: Vec<(String, u64)>,
    /// What they own and is not there: devices are away, or were taken out.
    pub missing_bytes: u64,
    pub free_bytes: u64,
    /// At the rate of the last week; `null` while that is unknown, or where nothing points to it.
    pub days_to_full: Option<f64>,
    /// Of `used`: dead, with its copies and parity, and cleaned when room is needed.
    pub reclaimable_bytes: u64,
    pub used: UsedSpace,
    /// In the layouts that nodes and devices allow.
    pub writable: Vec<WritableSpace>,
    /// Those that are open at any host.
    pub volumes: Vec<VolumeSpace>,
    /// Hosts that do not say what their volumes hold: that counts as other things.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub silent: Vec<String>,
}

/// What guests of thin volumes can write of `free` in a layout.
#[derive(Clone, PartialEq, Debug, Serialize, ToSchema)]
pub struct WritableSpace {
    pub layout: String,
    pub bytes: u64,
    /// Of what devices hold, what guests see.
    pub efficiency: f64,
    /// What may be lost at a time.
    pub bears: String,
}

#[derive(Clone, PartialEq, Debug, Default, Serialize, ToSchema)]
pub struct UsedSpace {
    /// What a volume and its clones show, by volume.
    pub data: Vec<(String, u64)>,
    /// What of them only snapshots show, or did until they were deleted, by volume.
    pub snapshots: Vec<(String, u64)>,
    pub dead_bytes: u64,
    /// What only separate clones may need, by the volume that holds it.
    pub kept: Vec<(String, u64)>,
    /// Between packed blocks.
    pub padding_bytes: u64,
    pub redundancy_bytes: u64,
    pub metadata_bytes: u64,
    /// What is not stored, since blocks are packed, by volume. In no sum.
    pub saved: Vec<SavedSpace>,
    /// What volumes show of a store or an origin, which holds it. In no sum.
    pub elsewhere: Vec<(String, u64)>,
    /// What deleted volumes hold that can be had back, as far as it is known, and how many they are.
    pub trash_bytes: u64,
    pub trash_volumes: usize,
    /// Headers of shards, volumes that are not in service, and what is on its way to or from devices.
    pub other_bytes: i64,
}

/// Of a volume of which something is packed.
#[derive(Clone, PartialEq, Debug, Default, Serialize, ToSchema)]
pub struct SavedSpace {
    pub volume: String,
    pub shown_bytes: u64,
    /// With what lies between packed blocks.
    pub stored_bytes: u64,
    pub plain_bytes: u64,
}
