//! What a host says of a volume.

use crate::FiltersInfo;
use crate::shapes;
use crate::texts::texts;
use holdfast_format::tier::Tiers;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use utoipa::ToSchema;

texts! {
    /// Whether capacity is set aside for a volume.
    #[derive(Default)]
    pub enum Provisioning {
        /// As it is written.
        Thin = "thin",
        /// For all of it.
        Fixed = "fixed",
        /// Not told, or what only newer releases know.
        #[default]
        Other = "other",
    }
}

texts! {
    /// Whether what guests read is checked against checksums.
    #[derive(Default)]
    pub enum Integrity {
        On = "on",
        Off = "off",
        /// Not told, or what only newer releases know.
        #[default]
        Other = "other",
    }
}

texts! {
    /// How a volume stands, as the host sees it that is asked.
    pub enum VolumeState {
        /// In service here.
        Open = "open",
        /// Being opened here.
        Opening = "opening",
        /// Being closed here.
        Closing = "closing",
        /// Another host has taken it over, and this one knows.
        Deposed = "deposed",
        /// Another host is about to hand it over to this one.
        Preloading = "preloading" | "warming",
        /// In service at another host; clients reach it here, too.
        Forwarding = "forwarding" | "portal",
        /// In service at another host.
        Elsewhere = "elsewhere",
        /// In service nowhere.
        Closed = "closed",
        /// In service nowhere; the steward has it open.
        InCare = "in care",
        /// In service nowhere: its key could not be had.
        Locked = "locked",
        /// What only newer releases know.
        Other = "other",
    }
}

/// A volume, or a clone in one.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct VolumeInfo {
    pub name: String,
    pub id: String,
    /// Of a clone: the volume that it is a part of, and whose figures it shows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clone_of: Option<String>,
    pub size_bytes: u64,
    pub layout: String,
    #[serde(default)]
    #[schema(value_type = shapes::Tiers)]
    pub tiers: Tiers,
    #[serde(default)]
    pub provisioning: Provisioning,
    /// Of all devices: what a fixed volume owns and has not used yet.
    #[serde(default)]
    pub set_aside_bytes: u64,
    #[serde(default)]
    pub integrity: Integrity,
    /// How blocks are packed from here on: off, lz4 or auto.
    #[serde(default)]
    pub compression: String,
    /// What guests write is encrypted wherever it is kept.
    #[serde(default)]
    pub encrypted: bool,
    pub exported: bool,
    /// It is not deleted until that is taken back.
    #[serde(default)]
    pub protected: bool,
    /// By which snapshots are taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedule: Option<ScheduleInfo>,
    /// Several clients may write to it at a time.
    #[serde(default)]
    pub shared: bool,
    /// Any host takes it over when its own is gone, and nodes hear no more of that.
    #[serde(default)]
    pub failover: bool,
    /// The client that has the right to write, as its host sees it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub writer: Option<String>,
    /// One that was refused of late, since another one writes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused_writer: Option<String>,
    /// Of a separate clone: the volume that it was made of. Told by `volume show`, like the next.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shares_with: Option<String>,
    /// The store of a sharing domain, which no client reaches.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_store: bool,
    /// The store that it shares its content by. Told by `volume show`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sharing: Option<String>,
    /// It is about to share by that no more: what it has there is copied back. Told by `volume show`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub leaves_domain: bool,
    /// Separate clones, or members of its domain, that may need what the volume holds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub needed_by: Vec<String>,
    /// The host that has it in service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// That host is gone, and no other is about to take the volume over.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub orphaned: bool,
    /// Hosts that offer it, wherever it is served; empty where only its host does.
    #[serde(default, alias = "portals", skip_serializing_if = "Vec::is_empty")]
    pub offered_by: Vec<String>,
    /// The clients that may have it over TCP; `None` where all may that reach it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub only_for: Option<BTreeSet<String>>,
    /// The policy of its clients, as it was told: `weight=400,limit=500`, or `iops=500` in the words of the filter `limit`.
    #[serde(default)]
    pub limit: Option<String>,
    pub state: VolumeState,
    /// What opening waits for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits: Option<String>,
    /// What a command could not see to that was about the volume; told by that command.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
    /// Those of stores of sharing domains are above 2^63.
    #[schema(format = "uint64")]
    pub epoch: u64,
    /// Where clients connect.
    pub uris: Vec<String>,
    pub sessions: usize,
    /// Where filters stand between its clients and its controller.
    #[serde(default, alias = "layers", skip_serializing_if = "Option::is_none")]
    pub filters: Option<Box<FiltersInfo>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub live: Option<VolumeLive>,
}

/// How often a volume is snapshotted, and which of these snapshots are kept.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct ScheduleInfo {
    /// `1h`
    pub every: String,
    /// `24h,7d,4w`
    pub keep: String,
}

fn yes() -> bool {
    true
}

/// What only an open volume can tell.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct VolumeLive {
    pub log_bytes: u64,
    /// Written by guests, and in no segment yet.
    #[serde(default)]
    pub unplaced_bytes: u64,
    pub mapped_bytes: u64,
    pub segments: u64,
    pub degraded_segments: u64,
    pub at_risk_entries: u64,
    /// Copies of its root are where a recovery without the metadata store finds them. Older releases don't say.
    #[serde(default = "yes")]
    pub recoverable: bool,
    pub suspect_nodes: Vec<u32>,
    /// Shards and logs on devices that are being emptied.
    #[serde(default)]
    pub left_to_drain: u64,
    #[serde(default)]
    pub left_to_balance_bytes: u64,
    #[serde(default)]
    pub space: SpaceUse,
    /// Of the volume itself, or of the clone; `None` until it was counted, in the background.
    #[serde(default)]
    pub shares: Option<Shares>,
    /// Of `space.data_bytes`, what neither the volume nor a clone of it shows, when that was counted last.
    #[serde(default)]
    pub held_by_snapshots_bytes: u64,
    /// States of the volume that nobody needs any more, on their way to be merged or dropped.
    #[serde(default)]
    pub layers_going: u64,
    /// Of the last minute or two, as the host saw them, of a volume with its clones; older releases don't say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_times: Option<Times>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_times: Option<Times>,
    /// Where there is a first tier.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_tier: Option<FirstTierUse>,
    /// Segments on media that the policy does not name.
    #[serde(default)]
    pub astray_segments: u64,
    /// Oldest first.
    #[serde(default)]
    pub snapshots: Vec<SnapshotInfo>,
    pub counters: Counters,
}

/// What half of the requests took at most, and 99 of 100.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Times {
    pub p50_us: u64,
    pub p99_us: u64,
}

/// What a first tier holds, and what it did since the volume was opened; bytes of guests' data.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct FirstTierUse {
    pub bytes: u64,
    pub bytes_max: u64,
    pub born_bytes: u64,
    pub passed_bytes: u64,
    pub rotated_bytes: u64,
    pub read_bytes: u64,
    pub read_first_bytes: u64,
}

/// Bytes of devices that a volume's segments take.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct SpaceUse {
    pub data_bytes: u64,
    pub dead_bytes: u64,
    /// Needed by separate clones, perhaps, and by nobody else.
    #[serde(default)]
    pub kept_bytes: u64,
    /// Between packed blocks.
    #[serde(default)]
    pub padding_bytes: u64,
    pub redundancy_bytes: u64,
    pub metadata_bytes: u64,
    /// What the data are as guests see them, and how much of them is not packed: in no sum. Zero of hosts that don't say.
    #[serde(default)]
    pub shown_bytes: u64,
    #[serde(default)]
    pub plain_bytes: u64,
    /// What guests see of segments of another volume, its store's or its origin's: in no sum.
    #[serde(default)]
    pub elsewhere_bytes: u64,
}

impl SpaceUse {
    pub fn taken_bytes(&self) -> u64 {
        let payload_bytes = self.data_bytes + self.dead_bytes + self.kept_bytes + self.padding_bytes;
        payload_bytes + self.redundancy_bytes + self.metadata_bytes
    }
}

/// What an open volume holds.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct VolumeSpace {
    pub name: String,
    pub space: SpaceUse,
    pub held_by_snapshots_bytes: u64,
    pub reclaimable_bytes: u64,
    /// Of hosts of a release before this one: nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub work: Option<VolumeWork>,
}

/// What is asked of an open volume, and how safe it is: counts since it was opened.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct VolumeWork {
    pub reads: u64,
    pub read_bytes: u64,
    pub writes: u64,
    pub write_bytes: u64,
    /// Of the last minute or two.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_times: Option<Times>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_times: Option<Times>,
    pub degraded_segments: u64,
    pub at_risk_entries: u64,
}

/// A state of a volume that was kept.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct SnapshotInfo {
    pub name: String,
    /// Its number in the volume: no other ever has it.
    #[serde(default)]
    pub layer: u32,
    /// Milliseconds since 1970.
    pub created_ms: u64,
    pub size_bytes: u64,
    /// Where clients read it.
    pub uris: Vec<String>,
    /// `None` until it was counted, in the background.
    #[serde(default)]
    pub shares: Option<Shares>,
}

/// Data that a snapshot, a clone or a volume shows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Shares {
    pub referenced_bytes: u64,
    /// Of it, what neither another snapshot nor a clone nor the volume shows.
    pub exclusive_bytes: u64,
}

/// Counts since the volume was opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Counters {
    pub reads: u64,
    pub read_bytes: u64,
    pub writes: u64,
    pub write_bytes: u64,
    pub append_hedges: u64,
    pub read_hedges: u64,
    #[serde(default)]
    pub shard_reads: u64,
    /// Of these, from nodes of the host's own machine.
    #[serde(default, alias = "near_reads")]
    pub local_reads: u64,
    pub reconstructed_reads: u64,
    /// What reads took of what had come with other blocks.
    #[serde(default)]
    pub ahead_bytes: u64,
    pub rolls: u64,
    pub segments_written: u64,
    pub segment_bytes_written: u64,
    #[serde(rename = "bypass_bytes")]
    pub direct_bytes: u64,
    /// Guests' data that left the log for segments.
    #[serde(default)]
    pub destaged_bytes: u64,
    pub segments_cleaned: u64,
    pub cleaned_bytes: u64,
    /// Of that: only to make them smaller.
    #[serde(default)]
    pub repacked_bytes: u64,
    pub segments_freed: u64,
    pub shards_deleted: u64,
    pub shards_rebuilt: u64,
    #[serde(default)]
    pub shards_moved: u64,
    /// Of the rebuilt and the moved ones, by nodes themselves.
    #[serde(default)]
    pub shards_made_by_nodes: u64,
    pub checkpoints: u64,
    pub checkpoint_bytes: u64,
    pub folds: u64,
    pub checksum_errors: u64,
    pub shards_scrubbed: u64,
}
