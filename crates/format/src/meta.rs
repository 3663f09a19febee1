//! Records of the metadata store beside roots: JSON objects, so that a person with `etcdctl` can read them.
//!
//! ```text
//! name/NAME              which volume or clone has the name: [`NameRecord`]
//! volume/ID/root         the root record ([`crate::root`])
//! volume/ID/export       which host serves the volume, and which offer it: [`ExportRecord`]
//! volume/ID/clone        of a clone: which volume it is a part of: [`CloneRecord`]
//! volume/ID/key          of an encrypted volume: its key, wrapped: [`KeyRecord`]
//! settings/ID            what an operator has chosen for a volume: [`SettingsRecord`]
//! clients/ID             the clients that may have a volume or clone: [`ClientsRecord`]
//! limits/ID              the policy of a volume or clone, its limit above all: [`LimitRecord`]
//! trash/ID               a deleted volume that can be had back for a while: [`TrashRecord`]
//! deleting/ID            a volume whose space is being returned: [`DeletingRecord`]
//! host/NAME              (leased) a host that is there: [`HostRecord`]
//! found/ID               a volume that was found when the metadata were lost, and that nothing opens: [`FoundRecord`]
//! machine/NAME           a machine, whether it is there or not: [`MachineRecord`]
//! removed/ID             a machine that was taken out of the grid, for ever: [`RemovedRecord`]
//! numbers                the highest number that a node ever had: [`NumbersRecord`]
//! node/NUMBER            a storage node and its devices, as its machine's host knows them: [`NodeRecord`]
//! received/ID            of a volume: which snapshots came in streams, and what is coming: [`ReceivedRecord`]
//! trend                  how much space was taken in the last week: a list of [`CapacitySample`]
//! tls                    by which authority the grid's machines go: [`TlsRecord`]
//! token/ID               a token to join by, without its secret: [`TokenRecord`]
//! draining/DEVICE, kept/DEVICE  a device that is to be emptied, or is not although it would be: `{}`
//! copies                 the number of the last copy of all this on devices: [`CopiesRecord`]
//! reserved               compared by whoever sets space aside: [`ReservedRecord`]
//! stores                 how many stores of sharing domains were made: [`StoresRecord`]
//! floors                 what hosts can do, of which floors are promised: [`FloorsRecord`]
//! beat                   which store this is, and how far it has come: [`BeatRecord`]
//! ```
//! Compatibility: a field that a release does not know is kept when it rewrites the record (`other`); one that older
//! releases must not ignore needs a new key, or a host's word that it knows it ([`HostRecord`]). Fields are never given another
//! meaning. What each release wrote stands in `tests/bytes/golden.rs`.

use crate::stream::{Begin, SnapshotId};
use holdfast_base::VolumeId;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// Fields of newer releases.
pub type Other = Map<String, Value>;

pub const NAME_PREFIX: &str = "name/";
pub const VOLUME_PREFIX: &str = "volume/";
pub const EXPORT_SUFFIX: &str = "/export";
pub const CLONE_SUFFIX: &str = "/clone";
pub const ROOT_SUFFIX: &str = "/root";
pub const KEY_SUFFIX: &str = "/key";
pub const TRASH_PREFIX: &str = "trash/";
pub const DELETING_PREFIX: &str = "deleting/";
pub const HOST_PREFIX: &str = "host/";
pub const FOUND_PREFIX: &str = "found/";
pub const MACHINE_PREFIX: &str = "machine/";
pub const REMOVED_PREFIX: &str = "removed/";
pub const NUMBERS_KEY: &str = "numbers";
pub const RESERVED_KEY: &str = "reserved";
pub const COPIES_KEY: &str = "copies";
pub const STORES_KEY: &str = "stores";
pub const FLOORS_KEY: &str = "floors";
/// Of the store itself: no copy of the records has it.
pub const BEAT_KEY: &str = "beat";
/// Which host is the steward, on that host's lease.
pub const STEWARD_KEY: &str = "caretaker";
pub const DRAINING_PREFIX: &str = "draining/";
/// Devices that an operator wants to keep although they would be emptied unasked.
pub const KEPT_PREFIX: &str = "kept/";
/// Of volumes, by their ids.
pub const SCHEDULE_PREFIX: &str = "schedule/";
pub const RECEIVED_PREFIX: &str = "received/";
pub const NODE_PREFIX: &str = "node/";
pub const CAPACITY_KEY: &str = "trend";
pub const TLS_KEY: &str = "tls";
pub const TOKEN_PREFIX: &str = "token/";
pub const CLIENTS_PREFIX: &str = "clients/";
pub const LIMITS_PREFIX: &str = "limits/";
pub const SETTINGS_PREFIX: &str = "settings/";
/// What hosts say of themselves, each on its lease.
pub const HEALTH_PREFIX: &str = "health/";

/// Beginnings of keys of records that change all the time, and that nobody misses.
pub const FLEETING: [&str; 9] = [
    CAPACITY_KEY,
    "errand-done/",
    "question/",
    "answer/",
    HEALTH_PREFIX,
    RESERVED_KEY,
    STEWARD_KEY,
    COPIES_KEY,
    BEAT_KEY,
];

/// Where the records of a volume are: under a prefix, root and export among them, and at keys of their own.
pub fn records_of(volume: VolumeId) -> (String, [String; 5]) {
    let keys = [SETTINGS_PREFIX, SCHEDULE_PREFIX, RECEIVED_PREFIX, CLIENTS_PREFIX, LIMITS_PREFIX];
    (format!("{VOLUME_PREFIX}{volume}/"), keys.map(|prefix| format!("{prefix}{volume}")))
}

pub fn name_key(name: &str) -> String {
    format!("{NAME_PREFIX}{name}")
}

pub fn export_key(volume: VolumeId) -> String {
    format!("{VOLUME_PREFIX}{volume}{EXPORT_SUFFIX}")
}

pub fn clone_key(clone: VolumeId) -> String {
    format!("{VOLUME_PREFIX}{clone}{CLONE_SUFFIX}")
}

pub fn key_key(volume: VolumeId) -> String {
    format!("{VOLUME_PREFIX}{volume}{KEY_SUFFIX}")
}

/// In order of numbers.
pub fn node_key(node: u32) -> String {
    format!("{NODE_PREFIX}{node:05}")
}

pub fn received_key(volume: VolumeId) -> String {
    format!("{RECEIVED_PREFIX}{volume}")
}

/// Of a token, by what of it is no secret.
pub fn token_key(id: &str) -> String {
    format!("{TOKEN_PREFIX}{id}")
}

pub fn settings_key(volume: VolumeId) -> String {
    format!("{SETTINGS_PREFIX}{volume}")
}

pub fn clients_key(volume: VolumeId) -> String {
    format!("{CLIENTS_PREFIX}{volume}")
}

pub fn limit_key(volume: VolumeId) -> String {
    format!("{LIMITS_PREFIX}{volume}")
}

pub fn trash_key(volume: VolumeId) -> String {
    format!("{TRASH_PREFIX}{volume}")
}

pub fn deleting_key(volume: &str) -> String {
    format!("{DELETING_PREFIX}{volume}")
}

pub fn found_key(volume: VolumeId) -> String {
    format!("{FOUND_PREFIX}{volume}")
}

pub fn host_key(host: &str) -> String {
    format!("{HOST_PREFIX}{host}")
}

pub fn machine_key(machine: &str) -> String {
    format!("{MACHINE_PREFIX}{machine}")
}

pub fn removed_key(id: &str) -> String {
    format!("{REMOVED_PREFIX}{id}")
}

/// Which volume or clone has a name; made first, so that names are unique.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct NameRecord {
    pub volume: String,
    /// The host that has taken it, until what it names is there.
    #[serde(default)]
    pub host: String,
    /// The volume that what it names is a clone in, empty for a volume; the first releases did not say.
    #[serde(default)]
    pub origin: Option<String>,
    /// It is not deleted until this is taken back. Hosts of earlier releases keep it, and delete all the same.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub protected: bool,
    #[serde(flatten)]
    pub other: Other,
}

/// Which host has a volume in service. Absent: none.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct ExportRecord {
    /// Empty in records of grids with one host, from before there could be others.
    #[serde(default)]
    pub host: String,
    /// Hosts that offer it, wherever it is served; none where only its host does.
    #[serde(rename = "portals", default, skip_serializing_if = "BTreeSet::is_empty")]
    pub offered_by: BTreeSet<String>,
    /// It is being handed over: the host that has it still, and yields when it is asked to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// Several clients may write to it at a time. Hosts of earlier releases let them in any case.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shared: bool,
    /// Any host takes it over when its host is gone, once its nodes hear no more of that one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub failover: bool,
    #[serde(flatten)]
    pub other: Other,
}

/// A clone, as far as it is known while its volume is not in service.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CloneRecord {
    pub name: String,
    /// The volume that it is a part of.
    pub origin: String,
    pub size_bytes: u64,
    #[serde(flatten)]
    pub other: Other,
}

impl CloneRecord {
    pub fn new(name: &str, origin: VolumeId, size_bytes: u64) -> CloneRecord {
        CloneRecord { name: name.to_string(), origin: origin.to_string(), size_bytes, other: Other::new() }
    }
}

/// What an operator has chosen for a volume, besides size and layout; what is not there is as by default.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct SettingsRecord {
    #[serde(rename = "fixed", default, skip_serializing_if = "Option::is_none")]
    pub reservation: Option<ReservationRecord>,
    /// Guests' reads are not checked against checksums.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unchecked_reads: bool,
    /// How blocks are packed, in words ([`crate::packing::Compression`]); nothing where they are not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compression: Option<String>,
    /// It is to be in its sharing domain no more.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub leaves_domain: bool,
    #[serde(flatten)]
    pub other: Other,
}

/// Capacity is set aside for all of the volume.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ReservationRecord {
    /// Bytes in segments that the volume has not written since its last snapshot; all that there are while one is
    /// taken.
    pub base_bytes: u64,
    /// What was left to write when it was last noted, with the sixteenth.
    pub left_bytes: u64,
    #[serde(flatten)]
    pub other: Other,
}

/// The clients that may have a volume or clone over TCP; where there is none all may.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ClientsRecord {
    pub allowed: BTreeSet<String>,
    #[serde(flatten)]
    pub other: Other,
}

/// How the clients of a volume or clone fare among others, and how much they may have of it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LimitRecord {
    /// In the words of the filter `limit`, as hosts of all releases keep to it.
    pub limit: String,
    /// All of the policy, where these can't say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qos: Option<String>,
    #[serde(flatten)]
    pub other: Other,
}

/// The version of a [`KeyRecord`]: of another one nobody knows what opens it.
pub const KEY_VERSION: u32 = 1;

/// A volume's own key, wrapped with a key-encrypting key (docs/FORMAT.md).
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct KeyRecord {
    pub version: u32,
    /// Of the wrapping; base64, like the key.
    pub nonce: String,
    pub wrapped: String,
    /// Where the key-encrypting key was when it was wrapped.
    pub source: KeySource,
    #[serde(flatten)]
    pub other: Other,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KeySource {
    /// Absolute.
    File(PathBuf),
    /// For a shell.
    Command(String),
}

impl fmt::Display for KeySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KeySource::File(path) => write!(f, "key file {}", path.display()),
            KeySource::Command(command) => write!(f, "key command `{command}`"),
        }
    }
}

/// A storage node as all hosts know it. What later releases add stands beside `node`, which older ones read strictly.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct NodeRecord {
    /// The host that runs beside it, and keeps this record.
    pub machine: String,
    pub node: NodeConfig,
    #[serde(flatten)]
    pub other: Other,
}

/// A storage node, as in a machine's configuration.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeConfig {
    pub id: u32,
    pub address: SocketAddr,
    pub devices: Vec<DeviceConfig>,
}

impl NodeConfig {
    pub fn has(&self, path: &Path) -> bool {
        self.devices.iter().any(|device| device.path == path)
    }
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceConfig {
    /// Relative to the grid's directory, or absolute.
    pub path: PathBuf,
    pub device: String,
    pub size_bytes: u64,
}

/// Which snapshots of a volume are copies of which, and what is being received.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct ReceivedRecord {
    pub copies: Vec<SnapshotCopy>,
    pub partial: Option<PartialStream>,
    #[serde(flatten)]
    pub other: Other,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SnapshotCopy {
    pub layer: u32,
    pub of: SnapshotId,
}

/// A part of a stream.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PartialStream {
    pub begin: Begin,
    /// Everything before it has been received.
    pub offset: u64,
    /// Of who brings it.
    pub ticket: String,
    /// All of it has come; its snapshot is being taken.
    #[serde(default)]
    pub is_ending: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CapacitySample {
    /// Since 1970, by the host's clock.
    pub at_ms: u64,
    /// Of all devices.
    pub taken_bytes: u64,
}

/// That a grid has TLS: which authority its machines go by.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TlsRecord {
    /// SHA-256 of its certificate, in hexadecimal.
    pub authority: String,
    /// That, in PEM; a grid that an older release has made has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate: Option<String>,
    #[serde(flatten)]
    pub other: Other,
}

/// What all may know of a token.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TokenRecord {
    /// Who signs.
    pub host: String,
    /// Seconds since 1970, by that host's clock.
    pub valid_until: u64,
    /// The machine that it was used for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_by: Option<String>,
    #[serde(flatten)]
    pub other: Other,
}

/// How many marks a store keeps: hosts that were away for longer go by the count alone.
pub const BEAT_MARKS_MAX: usize = 120;

/// Which of all stores that the grid ever had this one is, and how far it has come. It is changed once a minute, and
/// remembered by hosts: one that was set back to an older state is known as that by whoever has seen more.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct BeatRecord {
    /// New whenever the store is filled from elsewhere, or believed by command.
    pub lineage: String,
    /// When that was: seconds since 1970, and later than of the lineage before.
    pub since_s: u64,
    /// How many times it was changed.
    pub count: u64,
    /// Random, of the last changes, the newest last: after the same count two stores that went apart have different ones.
    #[serde(default)]
    pub marks: Vec<String>,
    #[serde(flatten)]
    pub other: Other,
}

/// A deleted volume that can be had back for a while: it has no name, nobody serves it, and its data are cared for.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TrashRecord {
    /// The one that it had, which another volume may have by now.
    pub name: String,
    /// Of devices, as far as that was known when it was deleted.
    #[serde(default)]
    pub taken_bytes: u64,
    /// So many minutes some host has seen pass since. No clock of a machine decides when it goes.
    #[serde(default)]
    pub minutes: u64,
    #[serde(flatten)]
    pub other: Other,
}

/// A volume whose space is being returned.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DeletingRecord {
    pub volume: String,
    pub name: String,
    #[serde(flatten)]
    pub other: Other,
}

/// A host that is there, for as long as its lease lives.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct HostRecord {
    /// Machine and directory: only one host runs there at a time.
    pub home: String,
    /// Where other hosts reach it: an IP address and a port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// The newest version of a volume's root record that its release reads; the first releases did not say.
    #[serde(default)]
    pub reads_root: u16,
    /// Features of the format that its release serves, by number.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub features: Vec<u16>,
    /// Queries of other hosts are answered.
    #[serde(default)]
    pub answers: bool,
    /// It does what other hosts ask it for.
    #[serde(default)]
    pub runs_errands: bool,
    /// Guests' writes of its volumes may take what is not promised to them; earlier releases leave that free, and would be
    /// short of room where others don't.
    #[serde(default)]
    pub takes_spare: bool,
    /// It carries out commands that another host was given, about volumes that it has in service.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub takes_requests: bool,
    /// It takes care of volumes in the trash; earlier releases look for them by their names, and find others.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub knows_trash: bool,
    /// It takes a list of what was revoked that names operators and readers, which earlier releases refuse whole.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub knows_operators: bool,
    /// Where other hosts reach its other reactors, by number: as `address`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reactors: Vec<String>,
    /// It finds volumes on other reactors of hosts than the first, which earlier releases don't.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub knows_reactors: bool,
    #[serde(flatten)]
    pub other: Other,
}

/// A machine of the grid, as its host has told at its last start. Whether it is there, [`HostRecord`] says.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MachineRecord {
    /// Of its directory: another machine that has the name later has another one.
    pub id: String,
    /// As in [`HostRecord`].
    pub home: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    #[serde(default)]
    pub release: String,
    /// When its host started: seconds since 1970, as all that ends in `_s`.
    #[serde(default)]
    pub started_s: u64,
    /// When another host found that this one was gone; nothing while it is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gone_s: Option<u64>,
    /// When the first of its certificates ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificates_end_s: Option<u64>,
    /// It has the key of the grid's authority.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub signs: bool,
    /// Somebody has said that it will be away, until then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub announced_until_s: Option<u64>,
    #[serde(flatten)]
    pub other: Other,
}

/// A machine that was taken out of the grid. Its nodes are none of the grid's from then on, whatever other records
/// say, and nobody has their numbers again.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RemovedRecord {
    pub name: String,
    /// As in [`MachineRecord`]; nothing where none was there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub home: Option<String>,
    #[serde(default)]
    pub nodes: Vec<RemovedNode>,
    /// Seconds since 1970.
    #[serde(default)]
    pub removed_s: u64,
    /// The host that did it.
    #[serde(default)]
    pub by: String,
    /// Nothing is missing any more of what its devices held.
    #[serde(default)]
    pub made_good: bool,
    #[serde(flatten)]
    pub other: Other,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RemovedNode {
    pub node: u32,
    pub devices: BTreeSet<String>,
    #[serde(flatten)]
    pub other: Other,
}

/// Numbers of nodes only rise: what a device says of its node stays true.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct NumbersRecord {
    /// Of nodes that are no more; those that there are have records of their own.
    pub highest: u32,
    #[serde(flatten)]
    pub other: Other,
}

/// Changed by every transaction that sets space aside, and compared by it: of two hosts that do so in the same moment one
/// looks again.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct ReservedRecord {
    /// So many such transactions there were.
    pub changes: u64,
    /// By volume: what it is about to own, until its own records say so.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub pending: BTreeMap<String, PendingRecord>,
    #[serde(flatten)]
    pub other: Other,
}

/// Each store of a sharing domain has epochs of its own, which no other ever has.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct StoresRecord {
    /// So many were made, whatever became of them.
    pub made: u64,
    #[serde(flatten)]
    pub other: Other,
}

/// Of what floors are promised. Changed by every transaction that promises one, and compared by it: of two hosts that do so in the
/// same moment one looks again.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct FloorsRecord {
    /// So many such transactions there were.
    pub changes: u64,
    /// By host.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub measured: BTreeMap<String, MeasuredRecord>,
    #[serde(flatten)]
    pub other: Other,
}

/// What a host could do when it was measured.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MeasuredRecord {
    /// Requests of 8 KiB a second, seven reads to three writes, without one of the nodes.
    pub iops: u64,
    /// That the grid had, with the one that was left out.
    pub nodes: u64,
    /// Unix seconds.
    pub at_s: u64,
    #[serde(flatten)]
    pub other: Other,
}

/// Each copy of the records has a number of its own, given before they are read: whoever has a higher one has read
/// later. Hosts of earlier releases take the next one that devices have not.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct CopiesRecord {
    pub number: u64,
    #[serde(flatten)]
    pub other: Other,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PendingRecord {
    pub layout: String,
    /// Without redundancy.
    pub bytes: u64,
    #[serde(flatten)]
    pub other: Other,
}

/// A volume of which a root was found when the metadata store was lost, and perhaps not its newest: an operator says whether it
/// is taken as that says.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FoundRecord {
    pub name: String,
    pub size_bytes: u64,
    /// Why it may not be the newest, for people.
    pub why: String,
    /// The root record to be taken, in hexadecimal.
    pub root: String,
    #[serde(flatten)]
    pub other: Other,
}

/// A record that is kept as JSON.
pub fn encode<T: Serialize>(record: &T) -> Vec<u8> {
    serde_json::to_vec(record).expect("our records always encode")
}

/// The record, or that its bytes are none of its kind.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, serde_json::Error> {
    serde_json::from_slice(bytes)
}

/// A file of `holdfast meta export`, and a copy of the records on devices: JSON. Files of other versions are refused.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MetadataFile {
    pub version: u32,
    /// The grid's id.
    pub grid: String,
    /// It was taken while hosts were at work: roots in it may be older than the data. The first release did not have it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub while_running: bool,
    /// Over all keys and values, in order.
    pub crc32c: u32,
    /// By key, in hexadecimal.
    pub records: BTreeMap<String, String>,
}

impl MetadataFile {
    pub const VERSION: u32 = 1;
}
