//! What a host can be asked for.

use holdfast_base::MediaClass;
use holdfast_format::meta::KeySource;
use holdfast_format::packing::Compression;
use holdfast_format::schedule::ScheduleRecord;
use holdfast_format::stream::Begin;
use holdfast_format::tier::Tiers;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

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

/// One command to a host, as an object with `op`; a host refuses fields that it does not know.
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
        /// As in [`Request::VolumeSet`]. Hosts of a release before this one refuse it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        compression: Option<Compression>,
        #[serde(default)]
        tiers: Tiers,
        /// It is encrypted, with a key that this one wraps.
        #[serde(default)]
        key: Option<KeySource>,
        /// As in [`Request::VolumeSet`]. Hosts of a release before this one refuse it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        limit: Option<String>,
    },
    /// What there is room for; answered by [`crate::Response::Room`].
    Room {
        /// What new volumes get of which nothing is said, where none is named.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        layout: Option<String>,
    },
    /// Which floors are promised, and of what.
    Qos,
    /// What this host can do, without one of so many nodes.
    QosMeasured {
        iops: u64,
        nodes: u64,
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
    /// Where the time of its requests goes.
    VolumeSlow {
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
        /// How blocks are packed from here on.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        compression: Option<Compression>,
        #[serde(default)]
        tiers: Option<Tiers>,
        /// How clients fare among others, and what they may have of it: a policy, or a limit in the words of the filter, or
        /// `none`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        limit: Option<String>,
        /// The store that it shares its content by from here on. Hosts of a release before this one refuse it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        sharing: Option<String>,
    },
    /// Make a sharing domain, which is a volume that no client reaches: its store.
    SharingCreate {
        name: String,
        layout: String,
        compression: Compression,
        /// As in [`Request::VolumeCreate`], of the store; members are encrypted, too.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        key: Option<KeySource>,
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
    /// What was deleted and can be had back; answered by [`crate::Response::Trash`].
    TrashList,
    /// By its name or its id.
    TrashRestore {
        volume: String,
        /// Under another name.
        #[serde(default)]
        name: Option<String>,
    },
    /// One, or all; answered by [`crate::Response::Names`].
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
        #[serde(default, alias = "portal")]
        multipath: bool,
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
    /// Puts a filter before a volume in service, below those that are there.
    #[serde(alias = "volume-layer-add")]
    VolumeFilterAdd {
        name: String,
        spec: String,
    },
    /// Takes one away, or all.
    #[serde(alias = "volume-layer-remove")]
    VolumeFilterRemove {
        name: String,
        #[serde(alias = "layer")]
        filter: Option<u32>,
    },
    SnapshotCreate {
        volume: String,
        name: String,
    },
    /// Consistent snapshots of several volumes, of all or of none; answered by [`crate::Response::Volumes`].
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
    /// A volume is to take in a stream that begins so; answered by [`crate::Response::Receiving`].
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
    /// A device of the host's machine gives its place to another: that is taken in, and the old one emptied.
    DeviceReplace {
        device: String,
        /// A block device, or a file that is there. Without it: a new file.
        path: Option<PathBuf>,
        /// Although it holds something, which is destroyed.
        force: bool,
    },
    /// Takes a device of the host's machine out that was emptied.
    DeviceRemove {
        device: String,
        /// Although it is not empty: what lies there is made again from the others.
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
    /// The same; answered by [`crate::Response::MayStop`], also where the answer is no.
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
    /// Answered by [`crate::Response::Machines`].
    Machines,
    /// A machine will be away for so many seconds, or is back: what comes of that nobody is told.
    MachineAnnounce {
        name: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        seconds: Option<u64>,
    },
    /// A machine leaves the grid for good; answered by [`crate::Response::Leaving`].
    MachineRemove {
        name: String,
        /// It is dead: at once, without its help.
        dead: bool,
        /// Although data is lost that only it has.
        accept_loss: bool,
    },
    /// Gives the key of the grid's authority to another machine.
    AuthorityGive {
        to: String,
    },
    /// Sends a test alert by each way that is set; answered by [`crate::Response::Alerts`].
    AlertsTest,
    /// A list of revoked certificates, newer than the one that counts, and signed by the grid's authority.
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

    /// Volumes of which it asks what only those have that are for guests: the store of a sharing domain is not.
    pub fn needs_guests(&self) -> &[String] {
        match self {
            Request::VolumeRename { .. } => &[],
            Request::VolumeSchedule { name, schedule: Some(_) } | Request::VolumeFilterAdd { name, .. } => {
                std::slice::from_ref(name)
            }
            Request::VolumeClone { source: volume, .. } | Request::SendBegin { volume, .. } => {
                std::slice::from_ref(volume)
            }
            other => other.disturbs(),
        }
    }

    /// A limit is in the records alone.
    fn is_of_records(&self) -> bool {
        let Request::VolumeSet { layout, fixed, checked_reads, compression, tiers, sharing, .. } = self else {
            return false;
        };
        let is_kept_so = layout.is_none() && fixed.is_none() && checked_reads.is_none();
        is_kept_so && compression.is_none() && tiers.is_none() && sharing.is_none()
    }

    /// The volumes that only the host can do it to that has them in service.
    pub fn of_one_host(&self) -> &[String] {
        match self {
            request if request.is_of_records() => &[],
            Request::VolumeSet { name, .. }
            | Request::VolumeDelete { name, .. }
            | Request::VolumeHandover { name, .. }
            | Request::VolumeFilterAdd { name, .. }
            | Request::VolumeFilterRemove { name, .. }
            | Request::ReceiveBegin { name, .. }
            | Request::SendBegin { volume: name, .. } => std::slice::from_ref(name),
            other => other.disturbs(),
        }
    }

    /// Volumes of which the host does it that has them in service, whichever host was given the command. None of
    /// these has anything in it that counts at one machine only.
    pub fn passed_on(&self) -> &[String] {
        match self {
            request if request.is_of_records() => &[],
            Request::VolumeSet { name, .. }
            | Request::VolumeLive { name }
            | Request::VolumeDelete { name, .. }
            | Request::VolumeUnexport { name, .. }
            | Request::VolumeFilterAdd { name, .. }
            | Request::VolumeFilterRemove { name, .. } => std::slice::from_ref(name),
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
            | Request::VolumeSlow { .. }
            | Request::ReceiveState { .. }
            | Request::TrashList
            | Request::Tasks
            | Request::GridSpace
            | Request::Room { .. }
            | Request::Qos
            | Request::Machines => Kind::Look,
            Request::CheckRemovable { .. }
            | Request::CheckStop { .. }
            | Request::MayStop { .. }
            | Request::CheckDown { .. } => Kind::Check,
            Request::VolumeCreate { .. }
            | Request::VolumeResize { .. }
            | Request::VolumeSet { .. }
            | Request::SharingCreate { .. }
            | Request::QosMeasured { .. }
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
            | Request::MachineAnnounce { .. }
            | Request::MachineRemove { .. }
            | Request::GridReload => Kind::Change,
            Request::SendBegin { .. }
            | Request::Metadata
            | Request::AlertsTest
            | Request::DeviceReplace { .. }
            | Request::DeviceRemove { .. }
            | Request::VolumeFilterAdd { .. }
            | Request::VolumeFilterRemove { .. }
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
    /// It begins to hand out data, or does something to a link or before a volume, and needs not be alone for that; or it
    /// consists of others that are.
    Act,
}
