//! What a host says of itself, of machines, and of what is done in the background.

use crate::texts::texts;
use crate::{AlertTrouble, LinkState, NodeInfo, VolumeInfo};
use serde::{Deserialize, Serialize};
use std::fmt;
use utoipa::ToSchema;

/// Named in one sentence; of more their number is told.
const NAMED_MAX: usize = 3;

/// Packing of blocks on a host.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct PackingInfo {
    /// Of the machine's CPU, in the last ten to twenty seconds.
    pub recent_per_mille: u64,
    /// What it may take of it while guests work.
    pub share_percent: u32,
    /// CPU time that a block takes, lately.
    pub ns_per_block: u64,
    /// Written as it is for want of CPU time, since the host was started. Packed when guests rest.
    pub refused_bytes: u64,
}

/// A host, with what it knows of the grid.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct HostStatus {
    pub grid: String,
    pub host: String,
    pub pid: u32,
    pub uptime_ms: u64,
    pub cpu_ms: u64,
    /// Of that: for packing blocks, on threads that guests don't wait for.
    #[serde(default)]
    pub packing_cpu_ms: u64,
    #[serde(default)]
    pub packing: PackingInfo,
    pub resident_bytes: u64,
    /// That the metadata store is out of reach or not believed, and why; volumes that are not in service are not told
    /// of then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata_trouble: Option<String>,
    /// Ways by which it can't tell people what is not well.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub alert_troubles: Vec<AlertTrouble>,
    /// At the rate of the last week; `null` while that is unknown, or where nothing points to it.
    pub days_to_full: Option<f64>,
    /// Of the last ten minutes and more: what everything else on the host waited for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub longest_turn: Option<LongTurn>,
    /// Messages between its reactors, and looks at what they share, since it was started: not by guests' requests.
    #[serde(default)]
    pub crossings: u64,
    pub nodes: Vec<NodeInfo>,
    pub volumes: Vec<VolumeInfo>,
    /// Volumes whose space is still being returned.
    pub deleting: Vec<String>,
    /// Volumes that were deleted and can be had back, those first that go first.
    #[serde(default)]
    pub trash: Vec<TrashInfo>,
    /// Volumes whose records this release can't read.
    #[serde(default)]
    pub unreadable: Vec<Unreadable>,
    /// Volumes that a recovery has found, and that nothing opens.
    #[serde(default)]
    pub found: Vec<Unreadable>,
    /// The number that the next node gets.
    #[serde(default)]
    pub next_node: u32,
    /// What the hosts that are there say of themselves.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub other_hosts: Vec<HostHealth>,
    /// Hosts of machines of the grid that are not there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts_gone: Vec<String>,
    /// Machines that are to be away now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub announced: Vec<Announcement>,
}

/// A machine that is to be away for a while, as somebody has said.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Announcement {
    pub machine: String,
    /// Seconds since 1970.
    pub until_s: u64,
}

/// What is not well at a host, of that which only itself sees: all of it empty where all is well.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct HostHealth {
    pub host: String,
    /// Volumes that it can't open yet.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub waits: Vec<Waiting>,
    /// Volumes whose keys it can't have.
    #[serde(skip_serializing_if = "VolumeNames::is_empty")]
    pub locked: VolumeNames,
    /// Volumes of which something was written to fewer devices than it is to be.
    #[serde(skip_serializing_if = "VolumeNames::is_empty")]
    pub at_risk: VolumeNames,
    /// Volumes of which parts lack redundancy.
    #[serde(skip_serializing_if = "VolumeNames::is_empty")]
    pub degraded: VolumeNames,
    /// Volumes that a recovery without the metadata store would not find as they are.
    #[serde(skip_serializing_if = "VolumeNames::is_empty")]
    pub unrecoverable: VolumeNames,
    /// Nodes that it does not reach.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub nodes_away: Vec<u32>,
    /// What is to be done about certificates of its machine.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub certificate_warnings: Vec<String>,
    /// Ways by which it can't tell people what is not well.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub alert_troubles: Vec<AlertTrouble>,
}

/// A volume, and what its opening waits for.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Waiting {
    pub volume: String,
    pub why: String,
}

/// The first of some names, and how many there are.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct VolumeNames {
    pub count: u64,
    pub first: Vec<String>,
}

impl VolumeNames {
    /// So many of them are kept.
    pub const KEPT_MAX: usize = 8;

    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub fn extend(&mut self, more: &VolumeNames) {
        let are_all = |names: &VolumeNames| names.count == names.first.len() as u64;
        let are_known = are_all(self) && are_all(more);
        self.first.extend(more.first.iter().take(VolumeNames::KEPT_MAX).cloned());
        self.first.sort_unstable();
        // Two hosts may tell of one volume.
        self.first.dedup();
        self.count = if are_known { self.first.len() as u64 } else { self.count.saturating_add(more.count) };
        self.first.truncate(VolumeNames::KEPT_MAX);
    }
}

impl<S: Into<String>> FromIterator<S> for VolumeNames {
    fn from_iter<I: IntoIterator<Item = S>>(names: I) -> VolumeNames {
        let mut first: Vec<String> = names.into_iter().map(Into::into).collect();
        let count = first.len() as u64;
        first.sort_unstable();
        first.truncate(VolumeNames::KEPT_MAX);
        VolumeNames { count, first }
    }
}

impl fmt::Display for VolumeNames {
    /// `volume a`, `volumes a, b` or `9 volumes (a, b, c, ...)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = &self.first[..self.first.len().min(NAMED_MAX)];
        match (self.count, shown) {
            (1, [one]) => write!(f, "volume {one}"),
            (count, []) => write!(f, "{count} volumes"),
            (count, shown) if count as usize == shown.len() => write!(f, "volumes {}", shown.join(", ")),
            (count, shown) => write!(f, "{count} volumes ({}, ...)", shown.join(", ")),
        }
    }
}

/// What one event took of the host's thread.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct LongTurn {
    pub took_us: u64,
    pub ago_ms: u64,
    /// The kind of event.
    pub event: String,
    /// Whose maintenance it was, where it was a volume's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
}

/// A deleted volume that can be had back.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct TrashInfo {
    pub id: String,
    /// The one that it had.
    pub name: String,
    pub size_bytes: u64,
    pub layout: String,
    /// Of devices, as far as it is known.
    pub taken_bytes: u64,
    /// Of devices: what is set aside for it, if it is fixed.
    pub set_aside_bytes: u64,
    /// Then it is deleted for good; sooner where devices are nearly full.
    pub minutes_left: u64,
}

/// A volume that can't be told of further.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Unreadable {
    pub name: String,
    pub why: String,
}

/// A machine of the grid. What nobody has said is missing.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct MachineInfo {
    /// Its host has the same.
    pub name: String,
    /// Its host says that it is there.
    pub up: bool,
    /// Since when it is so: seconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since_s: Option<u64>,
    /// Where other hosts reach its host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Of its host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub release: Option<String>,
    /// When the first of its certificates ends, in a grid with TLS: seconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificates_end_s: Option<u64>,
    /// It has the key of the grid's authority.
    #[serde(default)]
    pub signs: bool,
    /// It is to be away until then, as somebody has said: seconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub announced_until_s: Option<u64>,
    pub nodes: Vec<MachineNode>,
    /// That its host has in service.
    pub volumes: Vec<String>,
}

/// A node of a machine.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct MachineNode {
    pub id: u32,
    pub address: String,
    pub link: LinkState,
    /// Of the messages between the host that was asked and the node, while there is a connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wire: Option<u32>,
}

texts! {
    /// How the host of a machine does, as that machine sees it.
    #[derive(Default)]
    pub enum HostState {
        Up = "up",
        /// It is there, and waits for something before it answers.
        Starting = "starting",
        /// It is there, and does not answer.
        Hung = "hung",
        Down = "down",
        /// Its machine was taken out of the grid.
        Removed = "removed",
        /// Not told, or what only newer releases know.
        #[default]
        Other = "other",
    }
}

texts! {
    /// What a task does.
    #[derive(Default)]
    pub enum TaskKind {
        /// Empties a device.
        Drain = "drain",
        /// Makes again what was lost.
        Repair = "repair",
        /// Evens devices out.
        Balance = "balance",
        /// Merges or drops states of a volume that nobody needs any more.
        Merge = "merge",
        /// Returns the space of a deleted volume.
        Return = "return",
        /// Not told, or what only newer releases know.
        #[default]
        Other = "other",
    }
}

texts! {
    /// What is counted of a task.
    pub enum TaskUnit {
        Shards = "shards",
        Segments = "segments",
        MiB = "MiB",
        Layers = "layers",
        Volumes = "volumes",
        /// What only newer releases know.
        Other = "parts",
    }
}

/// Something that is done in the background.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct TaskInfo {
    pub name: String,
    pub left: u64,
    #[serde(default)]
    pub kind: TaskKind,
    /// Of `left`.
    pub unit: TaskUnit,
    /// Done in the last half minute, on average.
    pub per_second: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds_left: Option<u64>,
}
