//! What the command line and the host say to each other: one JSON object a line, over the grid's control socket.
//!
//! Role: types only. A request is answered by exactly one line; a connection may carry any number, one after the other.

use crate::anatomy::Parts;
use crate::grid::layout::DeviceConfig;
use crate::grid::metadata::MetadataFile;
use crate::size::Size;
use holdfast_api::{Code, Error, VolumeState};
use holdfast_base::MediaClass;
use holdfast_format::drive::DriveReport;
use holdfast_format::schedule::ScheduleRecord;
use holdfast_format::stream::Begin;
use holdfast_format::tier::Tiers;
use holdfast_format::wire::CacheStat;
use holdfast_layer::Edge;
use holdfast_runtime::meta::MetaError;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;

/// Longest line that either side takes.
pub const LINE_BYTES_MAX: usize = 16 << 20;

/// Where a key-encrypting key is to be had.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KeySource {
    /// Absolute.
    File(PathBuf),
    /// For a shell; it prints the key.
    Command(String),
}

/// What becomes of the list of clients that may have a volume.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum ClientsChange {
    /// These, too; where there was no list, these alone.
    Allow { clients: Vec<String> },
    /// These no more.
    Deny { clients: Vec<String> },
    /// Every client: there is no list.
    AllowAll,
    /// The list is empty.
    DenyAll,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// Answered from the host's memory, whatever the nodes do.
    Status,
    VolumeCreate {
        name: String,
        size_bytes: u64,
        layout: String,
        export: bool,
        /// Capacity is set aside for all of it.
        fixed: bool,
        checked_reads: bool,
        #[serde(default)]
        tiers: Tiers,
        /// It is encrypted, with a key that this one wraps.
        #[serde(default)]
        key: Option<KeySource>,
        /// As in [`Request::VolumeSet`]. Hosts of a release before this one refuse it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        limit: Option<String>,
    },
    VolumeList,
    VolumeShow {
        name: String,
    },
    /// The same, as the host tells it that has it in service.
    VolumeLive {
        name: String,
    },
    /// As [`Request::VolumeShow`], with its parts.
    VolumeExplain {
        name: String,
    },
    VolumeResize {
        name: String,
        size_bytes: u64,
        /// Allow the end of the volume to be cut off.
        shrink: bool,
        /// Also under the hands of clients that know the larger size.
        #[serde(default)]
        force: bool,
    },
    /// Change what is given.
    VolumeSet {
        name: String,
        layout: Option<String>,
        fixed: Option<bool>,
        checked_reads: Option<bool>,
        #[serde(default)]
        tiers: Option<Tiers>,
        /// What clients may have of it, in the words of the layer `limit`, or `none`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        limit: Option<String>,
    },
    /// Take snapshots by schedule, or no more.
    VolumeSchedule {
        name: String,
        schedule: Option<ScheduleRecord>,
    },
    VolumeDelete {
        name: String,
        /// Disconnect clients.
        force: bool,
        /// For good, past the trash. Hosts of a release before this one know no other way.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        now: bool,
    },
    /// What was deleted and can be had back; answered by [`Response::Trash`].
    TrashList,
    /// By its name or its id.
    TrashRestore {
        volume: String,
        /// Under another name.
        #[serde(default)]
        name: Option<String>,
    },
    /// One, or all; answered by [`Response::Names`].
    TrashEmpty {
        volume: Option<String>,
    },
    VolumeRename {
        name: String,
        new: String,
    },
    /// It is not deleted until that is taken back.
    VolumeProtect {
        name: String,
        protected: bool,
    },
    VolumeExport {
        name: String,
        /// Although another host that is up has it in service.
        takeover: bool,
        /// Beside the host that has it in service.
        #[serde(default)]
        portal: bool,
        /// From where this host is to get the key of an encrypted one.
        #[serde(default)]
        key: Option<KeySource>,
        /// Whether several clients may write to it at a time; as it was where that is not told.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        shared: Option<bool>,
        /// Whether any host takes it over when its own is gone; as it was where that is not told.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        failover: Option<bool>,
    },
    /// Which clients may have it over TCP.
    VolumeClients {
        name: String,
        change: ClientsChange,
    },
    /// Another host shall have it in service; answered when it has.
    VolumeHandover {
        name: String,
        to: String,
    },
    /// Wraps the key of an encrypted volume anew.
    VolumeRekey {
        name: String,
        key: KeySource,
    },
    VolumeUnexport {
        name: String,
        /// Disconnect clients.
        force: bool,
    },
    /// Puts a layer before a volume in service, below those that are there.
    VolumeLayerAdd {
        name: String,
        spec: String,
    },
    /// Takes one away, or all.
    VolumeLayerRemove {
        name: String,
        layer: Option<u32>,
    },
    SnapshotCreate {
        volume: String,
        name: String,
    },
    /// Consistent snapshots of several volumes, of all or of none; answered by [`Response::Volumes`].
    SnapshotGroup {
        volumes: Vec<String>,
        name: String,
    },
    SnapshotDelete {
        volume: String,
        name: String,
    },
    /// The volume becomes what its snapshot is.
    SnapshotRollback {
        volume: String,
        name: String,
    },
    VolumeClone {
        /// `VOLUME@SNAPSHOT`
        source: String,
        name: String,
        /// The snapshot's where it is missing.
        size_bytes: Option<u64>,
        /// A volume of its own, which any host can serve.
        separate: bool,
        /// Of a separate one: put it into service here.
        export: bool,
    },
    /// What a stream of a snapshot begins with.
    SendBegin {
        volume: String,
        snapshot: String,
        /// The snapshot that the receiver has.
        from: Option<String>,
        /// What lies before it the receiver has, too.
        start: u64,
    },
    /// A volume is to take in a stream that begins so; answered by [`Response::Receiving`].
    ReceiveBegin {
        name: String,
        begin: Box<Begin>,
        /// For a volume that is made for it.
        layout: Option<String>,
    },
    /// Everything before the offset is in the volume.
    ReceiveProgress {
        name: String,
        ticket: String,
        offset: u64,
    },
    /// The stream came to its end, or no further.
    ReceiveEnd {
        name: String,
        ticket: String,
        complete: bool,
    },
    /// Give up what has come of a stream: the volume becomes what its snapshot is that the stream builds on.
    ReceiveAbandon {
        name: String,
    },
    /// How to go on with a stream that was cut off.
    ReceiveState {
        name: String,
    },
    /// Empty devices (or let them take data again).
    Drain {
        devices: Vec<String>,
        cancel: bool,
        force: bool,
    },
    /// What a device is made of; without a class its node finds out.
    DeviceClass {
        device: String,
        class: Option<MediaClass>,
    },
    /// Done where these devices hold nothing that is needed.
    CheckRemovable {
        devices: Vec<String>,
        force: bool,
    },
    /// Done where a node may be stopped: nothing would be less redundant than its absence alone makes it.
    CheckStop {
        node: u32,
    },
    /// Done where all nodes of a machine may be stopped at once, with its host.
    CheckDown {
        nodes: Vec<u32>,
    },
    /// The same; answered by [`Response::MayStop`], also where the answer is no.
    MayStop {
        node: u32,
    },
    /// grid.json has changed.
    GridReload,
    Tasks,
    /// All records of the metadata store.
    Metadata,
    /// What open volumes hold, at all hosts.
    GridSpace,
    /// Answered by [`Response::Machines`].
    Machines,
    /// A machine leaves the grid for good; answered by [`Response::Leaving`].
    MachineRemove {
        name: String,
        /// It is dead: at once, without its help.
        dead: bool,
        /// Although data is lost that only it has.
        accept_loss: bool,
    },
    /// A list of revoked certificates, newer than the one that counts, and signed by the grid's authority.
    /// Gives the key of the grid's authority to another machine.
    AuthorityGive {
        to: String,
    },
    TlsRevoke {
        list: String,
    },
    /// Black-hole the links to a node: see `holdfast node cut --help`.
    NodeCut {
        node: u32,
    },
    NodeMend {
        node: u32,
    },
}

impl Request {
    /// The volumes that it would change under a stream that is being received.
    pub fn disturbs(&self) -> &[String] {
        match self {
            Request::VolumeResize { name, .. } | Request::VolumeRename { name, .. } => std::slice::from_ref(name),
            Request::SnapshotCreate { volume, .. }
            | Request::SnapshotDelete { volume, .. }
            | Request::SnapshotRollback { volume, .. } => std::slice::from_ref(volume),
            Request::SnapshotGroup { volumes, .. } => volumes,
            _ => &[],
        }
    }

    /// The volumes that only the host can do it to that has them in service.
    pub fn of_one_host(&self) -> &[String] {
        match self {
            // A limit is in the records alone.
            Request::VolumeSet { layout: None, fixed: None, checked_reads: None, tiers: None, .. } => &[],
            Request::VolumeSet { name, .. }
            | Request::VolumeDelete { name, .. }
            | Request::VolumeHandover { name, .. }
            | Request::VolumeLayerAdd { name, .. }
            | Request::VolumeLayerRemove { name, .. }
            | Request::ReceiveBegin { name, .. }
            | Request::SendBegin { volume: name, .. } => std::slice::from_ref(name),
            other => other.disturbs(),
        }
    }

    /// Volumes of which the host does it that has them in service, whichever host was given the command. None of
    /// these has anything in it that counts at one machine only.
    pub fn passed_on(&self) -> &[String] {
        match self {
            Request::VolumeSet { layout: None, fixed: None, checked_reads: None, tiers: None, .. } => &[],
            Request::VolumeSet { name, .. }
            | Request::VolumeLive { name }
            | Request::VolumeDelete { name, .. }
            | Request::VolumeUnexport { name, .. }
            | Request::VolumeLayerAdd { name, .. }
            | Request::VolumeLayerRemove { name, .. } => std::slice::from_ref(name),
            other => other.disturbs(),
        }
    }

    /// The volume that it takes into service or out of it, or has served by another host: nothing else is begun about it
    /// meanwhile.
    pub fn moves(&self) -> Option<&str> {
        match self {
            Request::VolumeExport { name, .. }
            | Request::VolumeUnexport { name, .. }
            | Request::VolumeDelete { name, .. }
            | Request::VolumeRename { name, .. }
            | Request::VolumeHandover { name, .. }
            | Request::VolumeRekey { name, .. }
            | Request::VolumeResize { name, .. }
            | Request::ReceiveBegin { name, .. }
            | Request::ReceiveEnd { name, .. }
            | Request::ReceiveAbandon { name } => Some(name),
            Request::SnapshotRollback { volume, .. } => Some(volume),
            _ => None,
        }
    }

    /// What it does to the grid. Each request says so: a new one has to be looked at here.
    pub fn kind(&self) -> Kind {
        match self {
            Request::Status
            | Request::VolumeList
            | Request::VolumeShow { .. }
            | Request::VolumeLive { .. }
            | Request::VolumeExplain { .. }
            | Request::ReceiveState { .. }
            | Request::TrashList
            | Request::Tasks
            | Request::GridSpace
            | Request::Machines => Kind::Look,
            Request::CheckRemovable { .. }
            | Request::CheckStop { .. }
            | Request::MayStop { .. }
            | Request::CheckDown { .. } => Kind::Check,
            Request::VolumeCreate { .. }
            | Request::VolumeResize { .. }
            | Request::VolumeSet { .. }
            | Request::VolumeSchedule { .. }
            | Request::VolumeDelete { .. }
            | Request::TrashRestore { .. }
            | Request::TrashEmpty { .. }
            | Request::VolumeRename { .. }
            | Request::VolumeProtect { .. }
            | Request::VolumeExport { .. }
            | Request::VolumeClients { .. }
            | Request::VolumeHandover { .. }
            | Request::VolumeRekey { .. }
            | Request::VolumeUnexport { .. }
            | Request::SnapshotCreate { .. }
            | Request::SnapshotGroup { .. }
            | Request::SnapshotDelete { .. }
            | Request::SnapshotRollback { .. }
            | Request::VolumeClone { .. }
            | Request::ReceiveBegin { .. }
            | Request::ReceiveProgress { .. }
            | Request::ReceiveEnd { .. }
            | Request::ReceiveAbandon { .. }
            | Request::Drain { .. }
            | Request::DeviceClass { .. }
            | Request::AuthorityGive { .. }
            | Request::TlsRevoke { .. }
            | Request::MachineRemove { .. }
            | Request::GridReload => Kind::Change,
            Request::SendBegin { .. }
            | Request::Metadata
            | Request::VolumeLayerAdd { .. }
            | Request::VolumeLayerRemove { .. }
            | Request::NodeCut { .. }
            | Request::NodeMend { .. } => Kind::Act,
        }
    }

    /// Whether it is carried out while no other such one is.
    pub fn is_alone(&self) -> bool {
        matches!(self.kind(), Kind::Check | Kind::Change)
    }
}

/// What a request does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// It looks, and changes nothing: readers may ask it.
    Look,
    /// It looks before something is done, and keeps changes waiting meanwhile.
    Check,
    /// It changes what there is.
    Change,
    /// It begins to hand out data, or does something to a link or before a volume, and needs not be alone for that.
    Act,
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "kebab-case")]
pub enum Response {
    Done,
    Status(Box<HostStatus>),
    Volume(Box<VolumeInfo>),
    Explained {
        volume: Box<VolumeInfo>,
        /// Of a volume that is open here.
        parts: Option<Box<Parts>>,
    },
    Volumes {
        volumes: Vec<VolumeInfo>,
    },
    Trash {
        trash: Vec<TrashInfo>,
    },
    Names {
        names: Vec<String>,
    },
    Tasks {
        tasks: Vec<TaskInfo>,
        /// Hosts that do not say what they do.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        silent: Vec<String>,
    },
    Space {
        volumes: Vec<VolumeSpace>,
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        silent: Vec<String>,
    },
    MayStop {
        /// Why not now.
        why: Option<String>,
        /// Nor ever, as the grid is.
        never: bool,
    },
    Machines {
        machines: Vec<MachineInfo>,
    },
    Leaving {
        /// What it waits for; nothing once the machine is out.
        waits: Option<String>,
        /// What to know beside that.
        notes: Vec<String>,
    },
    Metadata {
        file: Box<MetadataFile>,
    },
    Begin(Box<Begin>),
    Receiving {
        /// Under which name the volume takes writes meanwhile.
        export: String,
        ticket: String,
    },
    /// The rest of a stream: what `holdfast send --resume` takes.
    Resume {
        token: Option<String>,
    },
    /// What, why, and the next command.
    Error {
        message: String,
        /// What kind of thing stood in the way; older hosts say none.
        #[serde(default)]
        code: Code,
    },
}

impl Response {
    pub fn failure(error: &anyhow::Error) -> Response {
        Response::Error { message: format!("{error:#}"), code: code_of(error) }
    }
}

/// What kind of thing stood in the way.
pub fn code_of(error: &anyhow::Error) -> Code {
    let of = |cause: &(dyn std::error::Error + 'static)| match cause.downcast_ref::<MetaError>() {
        Some(MetaError::Unknown { .. } | MetaError::Unwritable { .. }) => Some(Code::Unavailable),
        Some(MetaError::Refused) => Some(Code::NotPermitted),
        Some(MetaError::LeaseGone | MetaError::Compacted { .. } | MetaError::TooLarge) => None,
        None => cause.downcast_ref::<Error>().map(|error| error.code),
    };
    // What was found last is the deepest.
    let deepest = error.chain().filter_map(of).last();
    deepest.unwrap_or_default()
}

impl From<VolumeInfo> for Response {
    fn from(info: VolumeInfo) -> Response {
        Response::Volume(Box::new(info))
    }
}

#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct HostStatus {
    pub grid: String,
    pub host: String,
    pub pid: u32,
    pub uptime_ms: u64,
    pub cpu_ms: u64,
    pub resident_bytes: u64,
    /// Why the metadata store can't be asked; volumes that are not in service are not told of then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata_trouble: Option<String>,
    /// At the rate of the last week; `null` while that is unknown, or where nothing points to it.
    pub days_to_full: Option<f64>,
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
}

impl VolumeSpace {
    /// Of a volume that is open where this is told.
    pub fn of(volume: &VolumeInfo) -> Option<VolumeSpace> {
        let live = volume.live.as_ref().filter(|_| volume.clone_of.is_none())?;
        Some(VolumeSpace {
            name: volume.name.clone(),
            space: live.space,
            held_by_snapshots_bytes: live.held_by_snapshots_bytes,
            reclaimable_bytes: volume.reclaimable_bytes(),
        })
    }
}

/// A machine of the grid. What nobody has said is missing.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
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
    pub nodes: Vec<MachineNode>,
    /// That its host has in service.
    pub volumes: Vec<String>,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MachineNode {
    pub id: u32,
    pub address: String,
    pub link: LinkState,
    /// Of the messages between the host that was asked and the node, while there is a connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wire: Option<u32>,
}

/// What an open volume holds.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct VolumeSpace {
    pub name: String,
    pub space: SpaceUse,
    pub held_by_snapshots_bytes: u64,
    pub reclaimable_bytes: u64,
}

/// A deleted volume that can be had back.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
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

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Unreadable {
    pub name: String,
    pub why: String,
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
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
    pub devices: Vec<DeviceInfo>,
    /// The machine that it is on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<String>,
    /// That machine's host does not say that it is there.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub machine_gone: bool,
    /// Its devices as its machine's configuration has them, in their places.
    #[serde(default)]
    pub configured: Vec<DeviceConfig>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LinkState {
    Up,
    /// Connected, but a question is unanswered for over a second.
    Silent,
    Down,
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct DeviceInfo {
    pub device: String,
    /// `opening`, `serving` or `failed`.
    pub health: String,
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
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
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
    pub fn state(&self) -> &'static str {
        match (self.health.as_str(), &self.outage) {
            ("failed", Some(outage)) if outage.missing => "missing",
            ("failed", _) => "failed",
            ("opening", _) => "opening",
            _ if self.is_failing() => "failing",
            _ if self.slow_s.is_some() => "slow",
            _ => "serving",
        }
    }
}

/// Copies on a fast device of what is read often from slower ones of its node; counted since the node was started.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
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

impl From<CacheStat> for ReadCacheInfo {
    fn from(stat: CacheStat) -> ReadCacheInfo {
        let CacheStat { hits, misses, damaged, admitted_bytes, evicted_bytes, held_bytes, limit_bytes } = stat;
        ReadCacheInfo { hits, misses, damaged, admitted_bytes, evicted_bytes, held_bytes, limit_bytes }
    }
}

impl fmt::Display for ReadCacheInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (held, limit, reads) = (Size(self.held_bytes), Size(self.limit_bytes), self.hits + self.misses);
        let percent = (self.hits * 100).checked_div(reads).unwrap_or(0);
        write!(f, "{held} of at most {limit}, which served {percent} % of {reads} reads of slower devices")
    }
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
    devices.iter().filter(|d| d.health == "serving" && !d.draining)
}

/// Something that is done in the background.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct TaskInfo {
    pub name: String,
    pub left: u64,
    /// Of `left`.
    pub unit: String,
    /// Done in the last half minute, on average.
    pub per_second: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds_left: Option<u64>,
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct VolumeInfo {
    pub name: String,
    pub id: String,
    /// Of a clone: the volume that it is a part of, and whose figures it shows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clone_of: Option<String>,
    pub size_bytes: u64,
    pub layout: String,
    #[serde(default)]
    pub tiers: Tiers,
    /// `thin`, or `fixed`: capacity is set aside for all of it.
    #[serde(default)]
    pub provisioning: String,
    /// Of all devices: what a fixed volume owns and has not used yet.
    #[serde(default)]
    pub set_aside_bytes: u64,
    /// `on`: what guests read is checked against checksums, or `off`.
    #[serde(default)]
    pub integrity: String,
    /// What guests write is encrypted wherever it is kept.
    #[serde(default)]
    pub encrypted: bool,
    pub exported: bool,
    /// It is not deleted until that is taken back.
    #[serde(default)]
    pub protected: bool,
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
    /// Separate clones that may need what the volume holds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub needed_by: Vec<String>,
    /// The host that has it in service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// That host is gone, and no other is about to take the volume over.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub orphaned: bool,
    /// Hosts that offer it, wherever it is served; empty where only its host does.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub portals: Vec<String>,
    /// The clients that may have it over TCP; `None` where all may that reach it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub only_for: Option<BTreeSet<String>>,
    /// How much clients may have of it, in the words of the layer `limit`.
    #[serde(default)]
    pub limit: Option<String>,
    pub state: VolumeState,
    /// What opening waits for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits: Option<String>,
    /// What a command could not see to that was about the volume; told by that command.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
    pub epoch: u64,
    /// Where clients connect.
    pub uris: Vec<String>,
    pub sessions: usize,
    /// Where layers stand between its clients and its controller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers: Option<Box<LayersInfo>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub live: Option<VolumeLive>,
}

/// The layers of a volume, from its clients down.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LayersInfo {
    pub layers: Vec<LayerInfo>,
    /// Between the lowest one and the controller.
    pub below: EdgeInfo,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LayerInfo {
    pub id: u32,
    /// What it was told.
    pub spec: String,
    /// It makes the volume worse than it is: a tool for tests.
    pub tool: bool,
    /// It is removed, and waits for replies to what it has passed on.
    pub leaving: bool,
    /// It is the volume's limit, wherever that is served.
    #[serde(default)]
    pub kept: bool,
    /// Between it and what is above it.
    pub above: EdgeInfo,
    /// What it did.
    pub counters: BTreeMap<String, u64>,
}

/// What has crossed an edge since the layer below it was added.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct EdgeInfo {
    pub requests: u64,
    pub bytes_down: u64,
    pub replies: u64,
    pub bytes_up: u64,
    pub errors: u64,
    pub in_flight: u64,
}

impl From<Edge> for EdgeInfo {
    fn from(edge: Edge) -> EdgeInfo {
        let Edge { requests, bytes_down, replies, bytes_up, errors } = edge;
        EdgeInfo { requests, bytes_down, replies, bytes_up, errors, in_flight: edge.in_flight() }
    }
}

impl LayersInfo {
    /// What makes the volume worse than it is.
    pub fn tools(&self) -> Vec<&str> {
        self.layers.iter().filter(|layer| layer.tool).map(|layer| layer.spec.as_str()).collect()
    }
}

fn yes() -> bool {
    true
}

/// What only an open volume can tell.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
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

/// What a first tier holds, and what it did since the volume was opened; bytes of guests' data.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct FirstTierUse {
    pub bytes: u64,
    pub bytes_max: u64,
    pub born_bytes: u64,
    pub passed_bytes: u64,
    pub rotated_bytes: u64,
    pub read_bytes: u64,
    pub read_first_bytes: u64,
}

impl From<holdfast_volume::TierUse> for FirstTierUse {
    fn from(u: holdfast_volume::TierUse) -> FirstTierUse {
        FirstTierUse {
            bytes: u.bytes,
            bytes_max: u.bytes_max,
            born_bytes: u.born_bytes,
            passed_bytes: u.passed_bytes,
            rotated_bytes: u.rotated_bytes,
            read_bytes: u.read_bytes,
            read_first_bytes: u.read_first_bytes,
        }
    }
}

/// Bytes of devices that a volume's segments take.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct SpaceUse {
    pub data_bytes: u64,
    pub dead_bytes: u64,
    /// Needed by separate clones, perhaps, and by nobody else.
    #[serde(default)]
    pub kept_bytes: u64,
    pub redundancy_bytes: u64,
    pub metadata_bytes: u64,
}

impl SpaceUse {
    pub fn taken_bytes(&self) -> u64 {
        self.data_bytes + self.dead_bytes + self.kept_bytes + self.redundancy_bytes + self.metadata_bytes
    }
}

impl VolumeInfo {
    /// Of what its segments take: dead, with its copies and parity, and cleaned when room is needed. A fixed volume keeps
    /// it, and a clone shows the figures of its volume.
    pub fn reclaimable_bytes(&self) -> u64 {
        let own = self.live.as_ref().filter(|_| self.clone_of.is_none() && self.provisioning != "fixed");
        own.map_or(0, |live| {
            let SpaceUse { data_bytes, dead_bytes, kept_bytes, redundancy_bytes, .. } = live.space;
            let payload = data_bytes + dead_bytes + kept_bytes;
            let gained = dead_bytes.saturating_sub(payload * holdfast_volume::DEAD_PER_MILLE_MIN / 1000);
            gained + (u128::from(redundancy_bytes) * u128::from(gained) / u128::from(payload.max(1))) as u64
        })
    }
}

impl From<holdfast_volume::SpaceUse> for SpaceUse {
    fn from(s: holdfast_volume::SpaceUse) -> SpaceUse {
        SpaceUse {
            data_bytes: s.data_bytes,
            dead_bytes: s.dead_bytes,
            kept_bytes: s.kept_bytes,
            redundancy_bytes: s.redundancy_bytes,
            metadata_bytes: s.metadata_bytes,
        }
    }
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
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
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Shares {
    pub referenced_bytes: u64,
    /// Of it, what neither another snapshot nor a clone nor the volume shows.
    pub exclusive_bytes: u64,
}

impl From<holdfast_volume::Shares> for Shares {
    fn from(s: holdfast_volume::Shares) -> Shares {
        Shares { referenced_bytes: s.referenced_bytes, exclusive_bytes: s.exclusive_bytes }
    }
}

/// Counts since the volume was opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
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
    #[serde(default)]
    pub near_reads: u64,
    pub reconstructed_reads: u64,
    /// What reads took of what had come with other blocks.
    #[serde(default)]
    pub ahead_bytes: u64,
    pub rolls: u64,
    pub segments_written: u64,
    pub segment_bytes_written: u64,
    pub bypass_bytes: u64,
    /// Guests' data that left the log for segments.
    #[serde(default)]
    pub destaged_bytes: u64,
    pub segments_cleaned: u64,
    pub cleaned_bytes: u64,
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

impl From<holdfast_volume::Counters> for Counters {
    fn from(c: holdfast_volume::Counters) -> Counters {
        Counters {
            reads: c.reads,
            read_bytes: c.read_bytes,
            writes: c.writes,
            write_bytes: c.write_bytes,
            append_hedges: c.append_hedges,
            read_hedges: c.read_hedges,
            shard_reads: c.shard_reads,
            near_reads: c.near_reads,
            reconstructed_reads: c.reconstructed_reads,
            ahead_bytes: c.ahead_bytes,
            rolls: c.rolls,
            segments_written: c.segments_written,
            segment_bytes_written: c.segment_bytes_written,
            bypass_bytes: c.bypass_bytes,
            destaged_bytes: c.destaged_bytes,
            segments_cleaned: c.segments_cleaned,
            cleaned_bytes: c.cleaned_bytes,
            segments_freed: c.segments_freed,
            shards_deleted: c.shards_deleted,
            shards_rebuilt: c.shards_rebuilt,
            shards_moved: c.shards_moved,
            shards_made_by_nodes: c.shards_made_by_nodes,
            checkpoints: c.checkpoints,
            checkpoint_bytes: c.checkpoint_bytes,
            folds: c.folds,
            checksum_errors: c.checksum_errors,
            shards_scrubbed: c.shards_scrubbed,
        }
    }
}
