//! How a grid does, as a machine of it tells: what commands and drills go by.

use crate::{
    Announcement, ConfiguredDevice, DeviceInfo, HostHealth, HostState, LongTurn, NodeState, PackingInfo, TrashInfo,
    Unreadable, VolumeInfo,
};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::Path;
use utoipa::ToSchema;

/// A grid, and the machine that tells of it.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct GridStatus {
    pub grid: String,
    pub dir: String,
    pub host: HostView,
    pub metadata: MetadataView,
    /// Hosts and nodes talk over TLS.
    pub tls: bool,
    /// What is to be done about certificates of this machine.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub certificate_warnings: Vec<String>,
    /// This machine's, when it was asked: milliseconds since 1970.
    pub clock_ms: u64,
    /// NBD over TCP is open to everybody, or is not served since it would be.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nbd_warning: Option<String>,
    /// Ways by which the host can't tell people what is not well.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub alert_troubles: Vec<AlertTrouble>,
    /// At the rate of the last week; `null` while that is unknown, or where nothing points to it.
    pub days_to_full: Option<f64>,
    pub nodes: Vec<NodeView>,
    pub volumes: Vec<VolumeInfo>,
    pub deleting: Vec<String>,
    /// Volumes that were deleted and can be had back.
    pub trash: Vec<TrashInfo>,
    /// Volumes whose records this release can't read.
    pub unreadable: Vec<Unreadable>,
    pub found: Vec<Unreadable>,
    /// What the other hosts that are there say of themselves.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub other_hosts: Vec<HostHealth>,
    /// Hosts of machines of the grid that are not there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts_gone: Vec<String>,
    /// Machines that are to be away now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub announced: Vec<Announcement>,
}

/// The host of the machine.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct HostView {
    pub state: HostState,
    pub pid: Option<u32>,
    pub cpu_ms: u64,
    /// Of that: for packing blocks.
    pub packing_cpu_ms: u64,
    pub packing: PackingInfo,
    pub resident_bytes: u64,
    /// Of the last ten minutes and more: what everything else on the host waited for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub longest_turn: Option<LongTurn>,
    /// Messages between its reactors, and looks at what they share, since it was started: not by guests' requests.
    pub crossings: u64,
    /// Why the host told nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
}

/// The grid's metadata store.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct MetadataView {
    /// Which it is, and where.
    pub store: String,
    /// Why it can't be asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
}

/// A node, and its process where that is of the same machine.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct NodeView {
    pub id: u32,
    pub state: NodeState,
    pub address: String,
    pub pid: Option<u32>,
    pub cpu_ms: u64,
    pub resident_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
    /// Version of the messages between this host and the node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wire: Option<u32>,
    /// Threads of its process, each with some of its devices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reactors: Option<u32>,
    /// Requests that one of them passed on: of other nodes, of copies of the metadata, of older hosts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub passed_on: Option<u64>,
    pub devices: Vec<DeviceInfo>,
    /// The machine that it is on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub machine: Option<String>,
    /// Its host is gone.
    #[serde(skip)]
    pub machine_gone: bool,
    /// It runs on this machine.
    #[serde(skip)]
    pub is_own: bool,
    /// As its machine's configuration has them, in their places.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub configured: Vec<ConfiguredDevice>,
}

impl NodeView {
    /// What commands call a device: by its place where that is known; and where it is on its machine.
    pub fn name_of(&self, device: &DeviceInfo) -> (String, Option<&Path>) {
        match self.configured.iter().position(|known| known.device == device.device) {
            Some(place) => (format!("{}/{place}", self.id), Some(&self.configured[place].path)),
            None => (device.device.clone(), None),
        }
    }
}

/// How bad it is; the worst comes last.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Somebody should act; everything is served, and bears a failure as it is to, or soon will again by itself.
    Warning,
    /// Something is not served, can't be changed, or may be lost with the next failure; or there is little time until
    /// it is so.
    Critical,
}

/// What it is about.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Concern {
    /// Something is not served, or not in full.
    Service,
    /// One more failure may lose data.
    DataAtRisk,
    /// Less may fail than what is promised.
    Redundancy,
    Capacity,
    /// Records can't be changed or read.
    Metadata,
    Certificates,
    /// A clock is wrong, or was.
    Time,
}

impl fmt::Display for Concern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Concern::Service => "service",
            Concern::DataAtRisk => "data at risk",
            Concern::Redundancy => "redundancy",
            Concern::Capacity => "capacity",
            Concern::Metadata => "metadata",
            Concern::Certificates => "certificates",
            Concern::Time => "time",
        })
    }
}

/// Something that is not well.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Finding {
    pub severity: Severity,
    pub concern: Concern,
    /// By what it is known again: it stays while the trouble does, though `what` and the severity may change.
    pub about: String,
    pub what: String,
    /// A command, or in words what is to be done; nothing where `what` says it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
    /// It comes of a machine that is to be away now: nobody is told.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub announced: bool,
}

/// Whether a test alert arrived by one way.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct AlertArrival {
    /// `webhook at hooks.example`
    pub way: String,
    /// Why it did not, as far as this end can tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
}

/// Alerts that can't be sent by one way now; they are tried again.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct AlertTrouble {
    /// `webhook at hooks.example`
    pub way: String,
    /// Of the last attempt.
    pub why: String,
    /// Alerts that are kept until then.
    pub waiting: u64,
    /// Older ones, for which there was no room.
    pub dropped: u64,
}

/// A grid, and what is not well there.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Health {
    #[serde(flatten)]
    pub status: GridStatus,
    /// The worst first.
    pub findings: Vec<Finding>,
}

impl Finding {
    /// Of the same trouble.
    pub fn is_same(&self, other: &Finding) -> bool {
        (self.concern, &self.about) == (other.concern, &other.about)
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let severity = match self.severity {
            Severity::Warning => "WARNING",
            Severity::Critical => "CRITICAL",
        };
        let announced = if self.announced { ", announced" } else { "" };
        write!(f, "{severity} ({}){announced}: {}", self.concern, self.what)?;
        self.next.as_ref().map_or(Ok(()), |next| write!(f, "; next: {next}"))
    }
}
