//! What a host says of nodes and their devices.

use crate::shapes;
use crate::texts::texts;
use holdfast_base::MediaClass;
use holdfast_format::drive::DriveReport;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use utoipa::ToSchema;

/// A node of the grid, as a host sees it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct NodeInfo {
    pub id: u32,
    pub address: String,
    pub link: LinkState,
    /// A volume avoids it, since it was late.
    pub suspect: bool,
    pub cut: bool,
    /// Time since it last answered anything.
    pub silent_ms: u64,
    /// Why there is no connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
    /// Of the messages between host and node, while there is a connection: the newest that both speak.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wire: Option<u32>,
    /// Threads of its process that have devices or could; hosts ask each for its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reactors: Option<u32>,
    /// Requests that one of them passed on: of other nodes, of copies of the metadata, of older hosts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passed_on: Option<u64>,
    pub devices: Vec<DeviceInfo>,
    /// The machine that it is on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<String>,
    /// That machine's host does not say that it is there.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub machine_gone: bool,
    /// Its devices as its machine's configuration has them, in their places.
    #[serde(default)]
    pub configured: Vec<ConfiguredDevice>,
}

texts! {
    /// How the link between a host and a node is.
    pub enum LinkState {
        Up = "up",
        /// Connected, but a question is unanswered for over a second.
        Silent = "silent",
        Down = "down",
        /// What only newer releases know.
        Other = "other",
    }
}

texts! {
    /// How a node does, as a host sees it.
    pub enum NodeState {
        Up = "up",
        /// It answers, and a volume avoids it, since it was late.
        Suspect = "suspect",
        /// It is there, and does not answer.
        Hung = "hung",
        Down = "down",
        /// `holdfast node cut` has cut it off.
        Cut = "cut",
        /// What only newer releases know.
        Other = "other",
    }
}

impl NodeState {
    /// It takes requests.
    pub fn serves(self) -> bool {
        matches!(self, NodeState::Up | NodeState::Suspect)
    }
}

impl From<LinkState> for NodeState {
    fn from(link: LinkState) -> NodeState {
        match link {
            LinkState::Up => NodeState::Up,
            LinkState::Silent => NodeState::Hung,
            LinkState::Down => NodeState::Down,
            LinkState::Other => NodeState::Other,
        }
    }
}

impl NodeInfo {
    /// How it does, in a word.
    pub fn state(&self) -> NodeState {
        match self.link {
            _ if self.cut => NodeState::Cut,
            LinkState::Up if self.suspect => NodeState::Suspect,
            link => link.into(),
        }
    }
}

texts! {
    /// How a device is by the word of its node.
    pub enum DeviceHealth {
        Opening = "opening",
        Serving = "serving",
        Failed = "failed",
        /// What only newer releases know.
        Other = "other",
    }
}

texts! {
    /// How a device does, with what is known of its errors and its pace.
    pub enum DeviceState {
        /// It can't be opened: it is not there, say, or another's.
        Missing = "missing",
        /// It is out.
        Failed = "failed",
        Opening = "opening",
        /// It serves, with several errors of late.
        Failing = "failing",
        /// It serves, far slower than its peers.
        Slow = "slow",
        Serving = "serving",
        /// What only newer releases know.
        Other = "other",
    }
}

/// A device as its machine's configuration has it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct ConfiguredDevice {
    /// Relative to the grid's directory of that machine, or absolute.
    #[schema(value_type = String)]
    pub path: PathBuf,
    pub device: String,
    pub size_bytes: u64,
}

/// A device of a node.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct DeviceInfo {
    pub device: String,
    pub health: DeviceHealth,
    pub capacity_bytes: u64,
    pub free_bytes: u64,
    /// Of these: what guests' data leaves for cleaning, deleting and metadata.
    #[serde(default)]
    pub reserve_bytes: u64,
    /// Of these besides: what is not promised to guests, and holds what is dead until they take it all the same.
    #[serde(default)]
    pub spare_bytes: u64,
    pub journal_bytes: u64,
    pub journal_used_bytes: u64,
    pub shards: u64,
    /// What it is made of (`nvme`, `ssd` or `hdd`), as far as anybody knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<shapes::MediaClass>)]
    pub class: Option<MediaClass>,
    /// By an operator, with `holdfast device class`; else it was detected.
    #[serde(default)]
    pub class_set: bool,
    /// It is being emptied.
    #[serde(default)]
    pub draining: bool,
    /// Then: shards and logs of volumes in service that are still to be moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left: Option<u64>,
    /// 99 of 100 small operations of the last seconds took no longer; missing where there were none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_p99_us: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_p99_us: Option<u32>,
    /// Operations that ended with an error since its node was started.
    #[serde(default)]
    pub io_errors: u64,
    /// What a durable write of a block took when the device was added.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flush_us: Option<u32>,
    /// Where its node's read cache is on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_cache: Option<ReadCacheInfo>,
    /// What its drive says of its own health, where it says anything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<shapes::DriveReport>)]
    pub drive: Option<DriveReport>,
    /// It is an outlier among its peers: for so many seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slow_s: Option<u64>,
    /// Then: a volume does without it.
    #[serde(default)]
    pub bypassed: bool,
    /// Since its last error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub errors_within_s: Option<u64>,
    /// Reads that failed and were tried again since its node was started.
    #[serde(default)]
    pub retries: u64,
    /// It is out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outage: Option<OutageInfo>,
}

/// Of a device that is out.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct OutageInfo {
    /// For so long.
    pub seconds: u64,
    pub why: String,
    /// It can't be opened: it is not there, say, or another's.
    pub missing: bool,
    /// It is opened anew by itself, now and then.
    pub tried: bool,
}

/// Errors this young make a device that serves a failing one.
const ERRORS_COUNT_FOR_S: u64 = 600;

impl DeviceInfo {
    /// It has had several errors, and of late.
    pub fn is_failing(&self) -> bool {
        self.io_errors >= 3 && self.errors_within_s.is_some_and(|s| s < ERRORS_COUNT_FOR_S)
    }

    /// How it does, in a word.
    pub fn state(&self) -> DeviceState {
        match self.health {
            DeviceHealth::Failed if self.outage.as_ref().is_some_and(|outage| outage.missing) => DeviceState::Missing,
            DeviceHealth::Failed => DeviceState::Failed,
            DeviceHealth::Opening => DeviceState::Opening,
            DeviceHealth::Serving if self.is_failing() => DeviceState::Failing,
            DeviceHealth::Serving if self.slow_s.is_some() => DeviceState::Slow,
            DeviceHealth::Serving => DeviceState::Serving,
            DeviceHealth::Other => DeviceState::Other,
        }
    }
}

/// Copies on a fast device of what is read often from slower ones of its node; counted since the node was started.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct ReadCacheInfo {
    /// Reads of slower devices that were answered from it, and those that were not.
    pub hits: u64,
    pub misses: u64,
    /// Copies that could not be read back, and were read from the slower device again.
    pub damaged: u64,
    pub admitted_bytes: u64,
    pub evicted_bytes: u64,
    pub held_bytes: u64,
    /// Most that it may come to hold. What it holds counts as free.
    pub limit_bytes: u64,
}

/// What guests can still write to a node with these devices.
pub fn free_of(devices: &[DeviceInfo]) -> Vec<u64> {
    takers(devices).map(|d| d.free_bytes.saturating_sub(d.reserve_bytes)).collect()
}

/// The same, without what is not promised to them.
pub fn promised_of(devices: &[DeviceInfo]) -> Vec<u64> {
    takers(devices).map(|d| d.free_bytes.saturating_sub(d.reserve_bytes + d.spare_bytes)).collect()
}

/// Devices that take something new.
pub fn takers(devices: &[DeviceInfo]) -> impl Iterator<Item = &DeviceInfo> {
    devices.iter().filter(|d| d.health == DeviceHealth::Serving && !d.draining)
}
