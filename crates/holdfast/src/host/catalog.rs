//! The operator's records in the metadata store: names, exports, deletions. Roots are the controllers' own.
//!
//! ```text
//! name/NAME              which volume or clone has the name; made first, so that names are unique
//! volume/ID/root         the root record
//! volume/ID/key          of an encrypted one: its key, wrapped (see `keys`)
//! volume/ID/clone        of a clone instead: which volume it is a part of
//! volume/ID/dependent/ID what a volume that was made of this one names of it (see `sharing`)
//! volume/ID/export       there while the volume is in service, for the next start: at which host
//! trash/ID               deleted, and can be had back for a while (see `trash`)
//! deleting/ID            there until every device has returned the volume's space
//! clients/ID             of a volume or clone: which clients may have it (see `access`)
//! limits/ID              of a volume or clone: how much clients may have of it (see `limits`)
//! settings/ID            of a volume: how it is provisioned (see `fixed`) and read
//! schedule/ID            of a volume or clone: snapshots by schedule (see `upkeep`)
//! received/ID            of a volume: which of its snapshots are copies, and what is being received (see `receive`)
//! reserved               what compares whoever sets space aside (see `fixed`)
//! trend                  how much space was taken lately (see `forecast`)
//! draining/DEVICE        there while a device is being emptied (see `devices`)
//! kept/DEVICE            there where an operator wants to keep a device that would be emptied unasked
//! node/NUMBER            a storage node: where it is, and its devices
//! machine/NAME, removed/ID, numbers   machines, those that were taken out, and numbers of nodes (see `machines`)
//! revoked                which certificates were taken back (see `revocation`)
//! tls, token/ID, join/ID/…   who may join a grid with TLS (see `grid::token`)
//! ```
//!
//! Every step can be repeated: a step that a crash cut short is finished by the next attempt.

use super::keys::NewKey;
use super::limits;
use super::meta::Meta;
use super::presence::{check_can_serve, live_hosts};
use super::records::Records;
use super::trash::name_in_trash;
use crate::grid::layout::NodeConfig;
use anyhow::{Context, Result, bail};
use holdfast_api::{Code, Error, NAME_BYTES_MAX, Unreadable, is_name, refuse};
use holdfast_base::{DeviceId, Epoch, GridId, MetaVersion, VolumeId};
use holdfast_cipher::VolumeKey;
use holdfast_cluster::exports;
use holdfast_format::FormatError;
use holdfast_format::features::Feature;
use holdfast_format::geometry::Layout;
use holdfast_format::meta::{
    CAPACITY_KEY, CLIENTS_PREFIX, COPIES_KEY, CapacitySample, ClientsRecord, CopiesRecord, DRAINING_PREFIX,
    ExportRecord, FOUND_PREFIX, FoundRecord, KEPT_PREFIX, KeyRecord, LIMITS_PREFIX, LimitRecord, NAME_PREFIX,
    NODE_PREFIX, NUMBERS_KEY, NameRecord, NodeRecord, NumbersRecord, Other, PendingRecord, REMOVED_PREFIX,
    RESERVED_KEY, ReceivedRecord, RemovedRecord, ReservationRecord, ReservedRecord, SCHEDULE_PREFIX, STORES_KEY,
    SettingsRecord, StoresRecord, clients_key, clone_key, deleting_key, encode, export_key, found_key, host_key,
    key_key, limit_key, machine_key, name_key, node_key, received_key, settings_key, trash_key,
};
pub use holdfast_format::meta::{CloneRecord, DELETING_PREFIX, DeletingRecord};
use holdfast_format::packing::Compression;
use holdfast_format::record::SegmentNo;
use holdfast_format::root::{GIVEN_UP, Root, root_key};
use holdfast_format::schedule::ScheduleRecord;
use holdfast_format::sharing::{Dependent, STORE_EPOCHS, STORE_SPAN, SegmentRanges, dependent_key};
use holdfast_format::tier::Tiers;
use holdfast_host::reservation::{Reservation, ReservedVolume};
use holdfast_host::{Limits, Lists, OpenSpec};
use holdfast_runtime::meta::{Commit, Compare, Swap, Write};
use serde::de::DeserializeOwned;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use thiserror::Error;

/// Attempts at a swap that others race for.
pub(super) const SWAPS_MAX: usize = 64;

pub const REVOKED_KEY: &str = "revoked";

/// What a new volume is.
#[derive(Clone, Copy, Debug)]
pub struct What {
    pub size_bytes: u64,
    pub layout: Layout,
    pub tiers: Tiers,
    /// Of a store of a sharing domain: the first of its epochs.
    pub store: Option<Epoch>,
}

impl What {
    /// One for guests.
    pub fn guests(size_bytes: u64, layout: Layout, tiers: Tiers) -> What {
        What { size_bytes, layout, tiers, store: None }
    }
}

/// What an operator has chosen for a volume, besides size and layout, as far as this release knows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Settings {
    pub reservation: Option<Reservation>,
    /// Guests' reads are not checked against checksums.
    pub unchecked_reads: bool,
    pub compression: Compression,
    /// It is to be in its sharing domain no more; in none this says nothing.
    pub leaves_domain: bool,
}

impl Settings {
    fn of(record: &SettingsRecord) -> Settings {
        let reservation = record.reservation.as_ref();
        let reservation = reservation
            .map(|reservation| Reservation { base_bytes: reservation.base_bytes, left_bytes: reservation.left_bytes });
        // Words of a later release say that something is packed.
        let compression = record.compression.as_ref().map(|words| words.parse().unwrap_or(Compression::Auto));
        Settings {
            reservation,
            unchecked_reads: record.unchecked_reads,
            compression: compression.unwrap_or_default(),
            leaves_domain: record.leaves_domain,
        }
    }

    /// In the place of what was there before, of which stays what this release does not know.
    fn put_into(self, before: SettingsRecord) -> SettingsRecord {
        let compression = match self.compression {
            // Also in words of a later release.
            unchanged if unchanged == Settings::of(&before).compression => before.compression,
            Compression::Off => None,
            changed => Some(changed.to_string()),
        };
        let known = before.reservation.map(|reservation| reservation.other).unwrap_or_default();
        let reservation = self.reservation.map(|Reservation { base_bytes, left_bytes }| ReservationRecord {
            base_bytes,
            left_bytes,
            other: known,
        });
        let Settings { unchecked_reads, leaves_domain, .. } = self;
        SettingsRecord { reservation, unchecked_reads, compression, leaves_domain, other: before.other }
    }
}

/// Whether what is made under a name has the id of an earlier attempt that was cut short.
#[derive(Clone, PartialEq, Eq)]
enum Again {
    /// If that was going to be a part of the same volume, or a volume of its own where there is no origin. A clone that nobody
    /// has a record of may have been left in another volume, with the other id.
    SameId {
        origin: Option<VolumeId>,
    },
    NewId,
}

/// What is set aside by now, as far as a transaction compares it: of two hosts that set space aside in the same moment one
/// finds that it has changed.
pub struct Reserving {
    version: MetaVersion,
    record: ReservedRecord,
}

impl Reserving {
    /// What volumes are about to own, beside one: layout, and bytes without redundancy.
    pub fn pending_beside(&self, volume: Option<VolumeId>) -> Vec<(Layout, u64)> {
        let own = volume.map(|volume| volume.to_string());
        let others = self.record.pending.iter().filter(|(of, _)| Some(*of) != own.as_ref());
        others.filter_map(|(_, pending)| Some((pending.layout.parse().ok()?, pending.bytes))).collect()
    }

    fn compare(&self) -> Compare {
        Compare { key: RESERVED_KEY.to_string(), version: self.version }
    }

    /// The record after one more transaction.
    fn next(&self, pending: BTreeMap<String, PendingRecord>) -> Write {
        let record = ReservedRecord { changes: self.record.changes + 1, pending, ..self.record.clone() };
        put(RESERVED_KEY, encode(&record))
    }

    fn passed(&self) -> Write {
        self.next(self.record.pending.clone())
    }
}

pub(super) fn put(key: &str, value: Vec<u8>) -> Write {
    Write { key: key.to_string(), value: Some(value), lease: None }
}

/// Why a volume can't be deleted.
#[derive(Debug, Error)]
#[error(
    "volume {volume} holds data of others ({by}); delete them first, and those in the trash for good \
     (`holdfast volume trash empty`)"
)]
pub struct StillNeeded {
    pub volume: String,
    pub by: String,
}

/// A separate clone that is being made.
#[derive(Clone, Copy, Debug)]
pub struct Begun {
    pub volume: VolumeId,
    /// Of the placeholder.
    version: MetaVersion,
}

/// A volume or clone as its records show it.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Of a clone, the root of the volume that it is a part of.
    pub root: Root,
    /// The host that has it in service, up or not.
    pub served_by: Option<String>,
    /// Hosts that offer it beside that.
    pub offered_by: BTreeSet<String>,
    /// The host that it is handed over from.
    pub handed_from: Option<String>,
    pub clone: Option<(VolumeId, CloneRecord)>,
    /// Of the volume, also for a clone of it.
    pub settings: Settings,
    /// It is not deleted until that is taken back.
    pub protected: bool,
    /// Several clients may write to it at a time.
    pub shared: bool,
    /// Any host takes it over when its own is gone.
    pub failover: bool,
    /// Of the record that says who serves it.
    pub export_version: MetaVersion,
}

impl Entry {
    /// A volume that no host serves or offers, and that has no record of that.
    fn unserved(root: Root, settings: Settings) -> Entry {
        Entry {
            root,
            served_by: None,
            offered_by: BTreeSet::new(),
            handed_from: None,
            clone: None,
            settings,
            protected: false,
            shared: false,
            failover: false,
            export_version: MetaVersion::ABSENT,
        }
    }

    pub fn name(&self) -> &str {
        self.clone.as_ref().map_or(&self.root.name, |(_, clone)| &clone.name)
    }

    pub fn id(&self) -> VolumeId {
        self.clone.as_ref().map_or(self.root.volume, |(id, _)| *id)
    }

    pub fn size_bytes(&self) -> u64 {
        self.clone.as_ref().map_or(self.root.size_bytes, |(_, clone)| clone.size_bytes)
    }

    /// Of the volume, also for a clone of it, as long as who serves it is what this says. With the key of an encrypted
    /// one (see `Keys::spec_of`).
    pub fn spec(&self, key: Option<VolumeKey>) -> OpenSpec {
        let guard = Some(self.export_version);
        let Settings { unchecked_reads, compression, leaves_domain, .. } = self.settings;
        OpenSpec { guard, leaves_domain, ..OpenSpec::of(&self.root, !unchecked_reads, compression, key) }
    }

    /// Whether it is about to leave its sharing domain.
    pub fn is_leaving(&self) -> bool {
        self.settings.leaves_domain && !self.root.stores.is_empty()
    }
}

#[derive(Clone)]
pub struct Catalog {
    /// What is only looked at is read here: from memory, where that is kept.
    pub(super) known: Meta,
    /// What is changed, or must not rest on memory, is read here.
    pub(super) meta: Meta,
    grid: GridId,
    /// This host's name.
    host: String,
}

pub(super) fn decode<T: DeserializeOwned>(key: &str, bytes: &[u8]) -> Result<T> {
    holdfast_format::meta::decode(bytes).with_context(|| format!("metadata record {key} is damaged"))
}

/// The fixed volumes among these.
pub fn reservations_of(entries: &[Entry]) -> BTreeMap<VolumeId, ReservedVolume> {
    let volumes = entries.iter().filter(|entry| entry.clone.is_none());
    let reservation = |entry: &Entry| {
        let reservation = entry.settings.reservation?;
        Some((entry.root.volume, ReservedVolume::new(entry.root.layout, reservation)))
    };
    volumes.filter_map(reservation).collect()
}

/// Refuses names that could not be written in an NBD URI or a table.
pub fn check_name(name: &str) -> Result<()> {
    if !is_name(name) {
        refuse!(
            Code::Invalid,
            "`{name}` can't be a name: use up to {NAME_BYTES_MAX} letters, digits, `-`, `_` and `.`, \
             beginning \
             with a letter or digit, for example vm1-disk"
        );
    }
    Ok(())
}

pub(super) fn no_volume(name: &str) -> Error {
    Error::new(Code::NotFound, format!("there is no volume {name}; `holdfast volume list` shows what there is"))
}

impl Catalog {
    pub fn new(meta: Meta, grid: GridId, host: &str) -> Catalog {
        Catalog { known: meta.clone(), meta, grid, host: host.to_string() }
    }

    /// As before, with what is only looked at read from memory.
    pub fn with_memory(self, records: Arc<Records>) -> Catalog {
        Catalog { meta: Arc::clone(&records).written_through(), known: records, ..self }
    }

    /// This host's name.
    pub fn host(&self) -> &String {
        &self.host
    }

    fn get(&self, key: &str) -> Result<(MetaVersion, Option<Vec<u8>>)> {
        let record = self.known.get(key)?;
        Ok(record.map_or((MetaVersion::ABSENT, None), |r| (r.version, Some(r.value))))
    }

    /// As it is by now.
    pub(super) fn get_now(&self, key: &str) -> Result<(MetaVersion, Option<Vec<u8>>)> {
        let record = self.meta.get(key)?;
        Ok(record.map_or((MetaVersion::ABSENT, None), |r| (r.version, Some(r.value))))
    }

    /// Changes a record by compare-and-swap; `change` sees the present value and gives the next, or `None` to leave it.
    pub(super) fn update(
        &self,
        key: &str,
        mut change: impl FnMut(Option<&[u8]>) -> Result<Option<Option<Vec<u8>>>>,
    ) -> Result<()> {
        for _ in 0..SWAPS_MAX {
            let (version, value) = self.get_now(key)?;
            let Some(next) = change(value.as_deref())? else { return Ok(()) };
            if let Swap::Done(_) = self.meta.swap(key, version, next.as_deref(), None)? {
                return Ok(());
            }
        }
        refuse!(Code::Changed, "metadata record {key} could not be changed: others change it all the time; try again")
    }

    fn set(&self, key: &str, value: Option<Vec<u8>>) -> Result<()> {
        self.update(key, |found| Ok((found != value.as_deref()).then(|| value.clone())))
    }

    fn root(&self, volume: VolumeId) -> Result<Option<Root>> {
        Self::root_in(&self.meta, volume)
    }

    fn root_in(meta: &Meta, volume: VolumeId) -> Result<Option<Root>> {
        let key = root_key(volume);
        let value = meta.get(&key)?.map(|record| record.value);
        let told = |error| match error {
            FormatError::Version(_) | FormatError::Feature(_) => {
                format!("metadata record {key} was written by a newer release than this host's")
            }
            _ => format!("metadata record {key} is damaged"),
        };
        value
            .map(|bytes| Root::decode(&bytes).map_err(|error| anyhow::Error::new(error).context(told(error))))
            .transpose()
    }

    fn clone_in(meta: &Meta, id: VolumeId) -> Result<Option<CloneRecord>> {
        let key = clone_key(id);
        meta.get(&key)?.map(|record| decode(&key, &record.value)).transpose()
    }

    /// Gives a name to something that is about to be made. One whose making was never completed is taken over.
    fn take_name(&self, name: &str, again: Again) -> Result<VolumeId> {
        check_name(name)?;
        let key = name_key(name);
        let fresh = VolumeId(uuid::Uuid::new_v4().as_u128());
        let (mut chosen, mut given_up) = (fresh, None);
        let origin = match again {
            Again::SameId { origin: Some(origin) } => origin.to_string(),
            _ => String::new(),
        };
        let (volume, host, other) = (fresh.to_string(), self.host.clone(), Other::new());
        let taken = NameRecord { volume, host, origin: Some(origin), protected: false, other };
        self.update(&key, |found| {
            given_up = None;
            let Some(found) = found else {
                chosen = fresh;
                return Ok(Some(Some(encode(&taken))));
            };
            let record = decode::<NameRecord>(&key, found)?;
            chosen = record.volume.parse()?;
            let is_ours = record.host.is_empty() || record.host == self.host;
            let is_there = self.live_root(chosen)?.is_some() || Self::clone_in(&self.meta, chosen)?.is_some();
            if !is_there && !is_ours && live_hosts(&self.meta)?.contains(&record.host) {
                refuse!(
                    Code::Changed,
                    "a volume {name} is being made at host {}; choose another name, or try again later",
                    record.host
                );
            }
            // What an attempt has left that was cut short is given up before its name is taken.
            if is_there || !self.is_gone(chosen)? {
                refuse!(
                    Code::Exists,
                    "there is a volume {name} already; choose another name, or look at it with `holdfast volume show \
                     {name}`"
                );
            }
            let is_same = again != Again::NewId && record.origin == taken.origin;
            if is_same && is_ours && self.root(chosen)?.is_none() {
                return Ok(None);
            }
            // Of a clone that may be there somewhere, who may have it is kept. Of a volume nobody knows the id.
            let is_nowhere = record.origin.is_some_and(|origin| origin.is_empty()) && self.root(chosen)?.is_none();
            given_up = is_nowhere.then_some(chosen);
            chosen = fresh;
            Ok(Some(Some(encode(&taken))))
        })?;
        given_up.map_or(Ok(()), |id| self.forget_records(id))?;
        Ok(chosen)
    }

    /// Whether all hosts that are there could serve a volume with this record.
    pub fn check_can_serve(&self, root: &Root) -> Result<()> {
        check_can_serve(&self.meta, root)
    }

    /// Makes a volume, in one transaction once it has its name. Nothing where space is set aside for it, and others have set
    /// aside some since that was looked at.
    pub fn create(
        &self,
        name: &str,
        what: What,
        (settings, limit): (Settings, Option<&LimitRecord>),
        key: Option<&NewKey>,
        reserving: Option<&Reserving>,
    ) -> Result<Option<Entry>> {
        let key_id = key.map(NewKey::id);
        let What { size_bytes, layout, tiers, store } = what;
        let mut root = Root { key_id, tiers, ..Root::new(self.grid, VolumeId(0), name, size_bytes, layout) };
        if let Some(epoch) = store {
            (root.epoch, root.features) = (epoch, root.features.with(Feature::Stores));
        }
        if settings.compression != Compression::Off {
            root.features = root.features.with(Feature::Packed);
        }
        self.check_can_serve(&root)?;
        let chosen = self.take_name(name, Again::SameId { origin: None })?;
        let root = Root { volume: chosen, ..root };
        let absent = Compare { key: root_key(chosen), version: MetaVersion::ABSENT };
        let compares: Vec<Compare> = std::iter::once(absent).chain(reserving.map(Reserving::compare)).collect();
        let limit = limit.map(encode);
        // Also what an earlier attempt has left is replaced.
        let set = |key: String, value: Option<Vec<u8>>| Write { key, value, lease: None };
        let mut writes = vec![
            put(&root_key(chosen), root.encode()),
            put(&settings_key(chosen), encode(&settings.put_into(SettingsRecord::default()))),
            set(limit_key(chosen), limit),
            set(key_key(chosen), key.map(|new| encode(&new.record(chosen)))),
        ];
        writes.extend(reserving.map(Reserving::passed));
        match self.meta.commit(&compares, &writes)? {
            Commit::Done(_) => {}
            Commit::Conflict(found) if found[0].is_none() => return Ok(None),
            Commit::Conflict(_) => {
                refuse!(Code::Changed, "a volume {name} is being made by somebody else; see `holdfast volume list`")
            }
        }
        Ok(Some(Entry::unserved(root, settings)))
    }

    /// Epochs for a store, which no other ever has: the first of them.
    pub fn take_store_epochs(&self) -> Result<Epoch> {
        let mut epoch = STORE_EPOCHS;
        self.update(STORES_KEY, |found| {
            let before: StoresRecord = found.map_or(Ok(StoresRecord::default()), |bytes| decode(STORES_KEY, bytes))?;
            let from_first = before.made.checked_mul(STORE_SPAN);
            let next = from_first.and_then(|from_first| STORE_EPOCHS.0.checked_add(from_first));
            epoch = Epoch(next.context("this grid has made as many stores as there are numbers for")?);
            Ok(Some(Some(encode(&StoresRecord { made: before.made + 1, ..before }))))
        })?;
        Ok(epoch)
    }

    /// Whether a volume is in a sharing domain by now.
    pub fn is_member(&self, volume: VolumeId) -> Result<bool> {
        let (_, value) = self.get_now(&root_key(volume))?;
        let root = Root::decode(&value.context("the volume was deleted meanwhile")?);
        Ok(!root.context("the volume's root record is damaged")?.stores.is_empty())
    }

    /// What is set aside, as it is by now.
    pub fn reserving(&self) -> Result<Reserving> {
        let (version, value) = self.get_now(RESERVED_KEY)?;
        let record = value.map_or(Ok(ReservedRecord::default()), |bytes| decode(RESERVED_KEY, &bytes))?;
        Ok(Reserving { version, record })
    }

    /// Changes what is noted of a fixed volume, together with the word that space was set aside; false where others have done
    /// so since that was looked at.
    pub fn set_reservation_reserving(
        &self,
        volume: VolumeId,
        reservation: Reservation,
        reserving: &Reserving,
    ) -> Result<bool> {
        let key = settings_key(volume);
        let (version, value) = self.get_now(&key)?;
        let before: SettingsRecord = value.map_or(Ok(SettingsRecord::default()), |bytes| decode(&key, &bytes))?;
        let settings = Settings { reservation: Some(reservation), ..Settings::of(&before) };
        let next = put(&key, encode(&settings.put_into(before)));
        let compares = [Compare { key, version }, reserving.compare()];
        Ok(matches!(self.meta.commit(&compares, &[next, reserving.passed()])?, Commit::Done(_)))
    }

    /// Notes what a volume is about to own, until its own records say so; false where others have set space aside since.
    pub fn set_pending(&self, volume: VolumeId, owned: Option<(Layout, u64)>, reserving: &Reserving) -> Result<bool> {
        let mut pending = reserving.record.pending.clone();
        match owned {
            Some((layout, bytes)) => {
                let record = PendingRecord { layout: layout.to_string(), bytes, other: Other::new() };
                pending.insert(volume.to_string(), record)
            }
            None => pending.remove(&volume.to_string()),
        };
        Ok(matches!(self.meta.commit(&[reserving.compare()], &[reserving.next(pending)])?, Commit::Done(_)))
    }

    /// The first step of making a separate clone: its name, and a placeholder for its root.
    pub fn begin_separate(&self, name: &str, origin: &Entry, key: Option<&NewKey>) -> Result<Begun> {
        let Root { layout, ref features, .. } = origin.root;
        // It and its origin share segments from then on.
        let dependents = vec![Dependent { volume: VolumeId(0), upto: SegmentNo::default() }];
        let features = features.clone();
        let own = Root { dependents, features, ..Root::new(self.grid, VolumeId(0), name, 0, layout) };
        self.check_can_serve(&Root { key_id: key.map(NewKey::id), ..own })?;
        let volume = self.take_name(name, Again::NewId)?;
        self.set_key(volume, key)?;
        self.change_settings(volume, |found| *found = Settings { reservation: None, ..origin.settings })?;
        let root = Root { deleted: true, ..Root::new(self.grid, volume, name, 0, layout) };
        match self.meta.swap(&root_key(volume), MetaVersion::ABSENT, Some(&root.encode()), None)? {
            Swap::Done(version) => Ok(Begun { volume, version }),
            _ => refuse!(Code::Changed, "a volume {name} is being made by somebody else; see `holdfast volume list`"),
        }
    }

    /// The last step: from here on it is a volume.
    pub fn finish_separate(&self, begun: &Begun, root: &Root) -> Result<()> {
        match self.meta.swap(&root_key(begun.volume), begun.version, Some(&root.encode()), None)? {
            Swap::Done(_) => Ok(()),
            _ => refuse!(Code::Changed, "the making of {} was given up meanwhile; try again", root.name),
        }
    }

    /// What is written of a volume before its root.
    fn forget_records(&self, volume: VolumeId) -> Result<()> {
        self.set(&settings_key(volume), None)?;
        self.forget_access(volume)?;
        self.set_key(volume, None)
    }

    /// Undoes what was begun of it; false where it is a volume by now.
    pub fn give_up_separate(&self, begun: &Begun, name: &str) -> Result<bool> {
        let is_gone = self.is_gone(begun.volume)?;
        if is_gone {
            self.forget_records(begun.volume)?;
            self.free_name(name, &begun.volume.to_string())?;
        }
        Ok(is_gone)
    }

    /// Whether there is no such volume, and never will be: one that is being made is not finished by whoever makes it. What
    /// nodes have of such a one is returned like that of a volume that is deleted.
    pub fn is_gone(&self, volume: VolumeId) -> Result<bool> {
        // One that a recovery has found is there, although it has no root until it is accepted.
        if self.get_now(&found_key(volume))?.1.is_some() {
            return Ok(false);
        }
        let (mut is_gone, mut was_begun) = (true, None);
        self.update(&root_key(volume), |found| {
            let root = found.map(Root::decode).transpose().context("the volume's root record is damaged")?;
            is_gone = root.as_ref().is_none_or(|root| root.deleted);
            was_begun = root.as_ref().filter(|root| root.is_placeholder() || root.epoch == GIVEN_UP).cloned();
            let given_up = root.filter(Root::is_placeholder).map(|root| Root { epoch: GIVEN_UP, ..root });
            Ok(given_up.map(|root| Some(root.encode())))
        })?;
        if let Some(root) = was_begun {
            let record = DeletingRecord { volume: volume.to_string(), name: root.name, other: Other::new() };
            self.set(&deleting_key(&record.volume), Some(encode(&record)))?;
        }
        Ok(is_gone)
    }

    /// Names of the volumes that need what this one holds.
    pub fn needed_by(&self, root: &Root) -> Result<Vec<String>> {
        self.needed_by_in(root, |volume| self.live_root(volume))
    }

    fn needed_by_in(&self, root: &Root, live_root: impl Fn(VolumeId) -> Result<Option<Root>>) -> Result<Vec<String>> {
        let mut names = Vec::new();
        for of in &root.dependents {
            let Some(root) = live_root(of.volume)? else { continue };
            let is_trash = self.known.get(&trash_key(of.volume))?.is_some();
            names.push(if is_trash { name_in_trash(&root.name, of.volume) } else { root.name });
        }
        Ok(names)
    }

    /// Of a volume that is neither being made nor being deleted.
    pub fn live_root(&self, volume: VolumeId) -> Result<Option<Root>> {
        Ok(self.root(volume)?.filter(|root| !root.deleted))
    }

    /// The name of the store that a volume shares its content by, as it is known.
    pub fn store_known(&self, root: &Root) -> Result<Option<String>> {
        let Some(of) = root.stores.first() else { return Ok(None) };
        Ok(Some(Self::root_in(&self.known, of.volume)?.map_or_else(|| of.volume.to_string(), |root| root.name)))
    }

    /// The name of the volume that a separate clone was made of, and names of those that need what it holds, as they
    /// are known.
    pub fn kin_known(&self, root: &Root) -> Result<(Option<String>, Vec<String>)> {
        let root_of = |volume| Ok(Self::root_in(&self.known, volume)?.filter(|root| !root.deleted));
        let origin = root.origins.last().map(|origin| root_of(origin.volume)).transpose()?.flatten();
        Ok((origin.map(|root| root.name), self.needed_by_in(root, root_of)?))
    }

    pub fn set_named(&self, origin: VolumeId, dependent: VolumeId, names: &SegmentRanges) -> Result<()> {
        self.set(&dependent_key(origin, dependent), Some(names.encode()))
    }

    pub fn forget_named(&self, origin: VolumeId, dependent: VolumeId) -> Result<()> {
        self.set(&dependent_key(origin, dependent), None)
    }

    pub fn named(&self, origin: VolumeId, dependent: VolumeId) -> Result<Option<SegmentRanges>> {
        let key = dependent_key(origin, dependent);
        let (_, value) = self.get_now(&key)?;
        let decode =
            |bytes: Vec<u8>| SegmentRanges::decode(&bytes).with_context(|| format!("metadata record {key} is damaged"));
        value.map(decode).transpose()
    }

    /// The wrapped key of an encrypted volume.
    pub fn key(&self, volume: VolumeId) -> Result<Option<KeyRecord>> {
        let key = key_key(volume);
        let (_, value) = self.get(&key)?;
        value.map(|bytes| decode(&key, &bytes)).transpose()
    }

    fn set_key(&self, volume: VolumeId, new: Option<&NewKey>) -> Result<()> {
        self.set(&key_key(volume), new.map(|new| encode(&new.record(volume))))
    }

    /// Puts another wrapping of the same key in the place of the one that is there; one that is gone does not come back.
    pub fn replace_key(&self, volume: VolumeId, record: &KeyRecord) -> Result<()> {
        self.update(&key_key(volume), |found| {
            let found = found.context("the volume's key is gone: it is being deleted")?;
            let other = decode::<KeyRecord>(&key_key(volume), found)?.other;
            Ok(Some(Some(encode(&KeyRecord { other, ..record.clone() }))))
        })
    }

    /// A number for a copy of the records, that nobody else has and no device: it is above `above`.
    pub fn number_copy(&self, above: u64) -> Result<u64> {
        let mut number = 0;
        self.update(COPIES_KEY, |found| {
            let last = found.map_or(Ok(CopiesRecord::default()), |bytes| decode(COPIES_KEY, bytes))?;
            number = last.number.max(above) + 1;
            Ok(Some(Some(encode(&CopiesRecord { number, ..last }))))
        })?;
        Ok(number)
    }

    /// The signed list of revoked certificates, as it stands there.
    pub fn revoked(&self) -> Result<Option<Vec<u8>>> {
        Ok(self.get(REVOKED_KEY)?.1)
    }

    /// `change` sees the present one, and gives the next.
    pub fn set_revoked(&self, change: impl Fn(Option<&[u8]>) -> Result<Vec<u8>>) -> Result<()> {
        self.update(REVOKED_KEY, |found| {
            let next = change(found)?;
            Ok((found != Some(&next)).then_some(Some(next)))
        })
    }

    /// Which clients may have which volumes and clones. Where that can't be read nobody may.
    pub fn clients(&self) -> Result<Lists> {
        let mut lists = Lists::new();
        for listed in self.known.list(CLIENTS_PREFIX)?.records {
            let Ok(volume) = listed.key[CLIENTS_PREFIX.len()..].parse() else { continue };
            let allowed = decode::<ClientsRecord>(&listed.key, &listed.value).map(|record| record.allowed);
            lists.insert(volume, allowed.unwrap_or_default());
        }
        Ok(lists)
    }

    /// `change` sees the present list, and gives the next; without one all clients may have it.
    pub fn change_clients(
        &self,
        volume: VolumeId,
        mut change: impl FnMut(Option<BTreeSet<String>>) -> Result<Option<BTreeSet<String>>>,
    ) -> Result<()> {
        let key = clients_key(volume);
        self.update(&key, |found| {
            let found = found.map(|bytes| decode::<ClientsRecord>(&key, bytes)).transpose()?;
            let (before, other) = found.map(|found| (found.allowed, found.other)).unzip();
            let after = change(before.clone())?;
            let other = other.unwrap_or_default();
            Ok((after != before).then(|| after.map(|allowed| encode(&ClientsRecord { allowed, other }))))
        })
    }

    /// How much clients may have of which volumes and clones.
    pub fn limits(&self) -> Result<Limits> {
        let mut limits = Limits::new();
        for listed in self.known.list(LIMITS_PREFIX)?.records {
            let Ok(volume) = listed.key[LIMITS_PREFIX.len()..].parse() else { continue };
            let record = decode::<LimitRecord>(&listed.key, &listed.value);
            limits.insert(volume, limits::words_of(record));
        }
        Ok(limits)
    }

    pub fn set_limit(&self, volume: VolumeId, limit: Option<&LimitRecord>) -> Result<()> {
        self.update(&limit_key(volume), |found| {
            let next = limit.map(|limit| encode(&limits::after(found, limit)));
            Ok((found != next.as_deref()).then_some(next))
        })
    }

    /// A clone has that of its origin, also where this release can't read it; but no floor, of which nobody would have counted
    /// a second one.
    pub fn inherit_limit(&self, origin: VolumeId, clone: VolumeId) -> Result<()> {
        let (_, found) = self.get_now(&limit_key(origin))?;
        let record = found.as_deref().and_then(|bytes| holdfast_format::meta::decode::<LimitRecord>(bytes).ok());
        let own = match record {
            Some(record) if limits::floor_of_record(&record).is_some() => {
                limits::without_floor(record).map(|record| encode(&record))
            }
            _ => found,
        };
        self.set(&limit_key(clone), own)
    }

    pub(super) fn commit(&self, compares: &[Compare], writes: &[Write]) -> Result<Commit> {
        Ok(self.meta.commit(compares, writes)?)
    }

    /// A volume or clone is gone: who may have it, and how much.
    fn forget_access(&self, volume: VolumeId) -> Result<()> {
        self.set(&clients_key(volume), None)?;
        self.set(&limit_key(volume), None)
    }

    pub fn change_settings(&self, volume: VolumeId, change: impl Fn(&mut Settings)) -> Result<()> {
        let key = settings_key(volume);
        self.update(&key, |found| {
            let record: SettingsRecord = found.map_or(Ok(SettingsRecord::default()), |bytes| decode(&key, bytes))?;
            let before = Settings::of(&record);
            let mut after = before;
            change(&mut after);
            Ok((after != before).then(|| Some(encode(&after.put_into(record)))))
        })
    }

    fn settings(&self, volume: VolumeId) -> Result<Settings> {
        let key = settings_key(volume);
        let (_, value) = self.get(&key)?;
        value.map_or(Ok(Settings::default()), |bytes| Ok(Settings::of(&decode(&key, &bytes)?)))
    }

    pub fn reservations(&self) -> Result<BTreeMap<VolumeId, ReservedVolume>> {
        Ok(reservations_of(&self.all_kept()?))
    }

    /// The first step of making a clone: its name, and the id that its volume shall know it by.
    pub fn begin_clone(&self, name: &str, origin: VolumeId) -> Result<VolumeId> {
        self.take_name(name, Again::SameId { origin: Some(origin) })
    }

    /// The last step, and what follows a change of size: its volume has it.
    pub fn set_clone(&self, id: VolumeId, record: &CloneRecord) -> Result<()> {
        self.set(&clone_key(id), Some(encode(record)))
    }

    /// Its volume has let go of it.
    pub fn forget_clone(&self, id: VolumeId, name: &str) -> Result<()> {
        self.set_schedule(id, None)?;
        self.forget_access(id)?;
        self.set(&clone_key(id), None)?;
        self.free_name(name, &id.to_string())
    }

    /// Names of the clones that are parts of a volume.
    pub fn clones_of(&self, volume: VolumeId) -> Result<Vec<String>> {
        let is_clone = |entry: &Entry| entry.clone.is_some() && entry.root.volume == volume;
        // Whoever asks may be about to delete the volume.
        let all = self.all_strictly()?;
        Ok(all.iter().filter(|entry| is_clone(entry)).map(|entry| entry.name().to_string()).collect())
    }

    fn free_name(&self, name: &str, volume: &str) -> Result<()> {
        self.update(&name_key(name), |found| {
            let is_ours = |bytes| decode::<NameRecord>(name, bytes).is_ok_and(|n| n.volume == volume);
            Ok(found.is_some_and(is_ours).then_some(None))
        })
    }

    /// `None` where neither volume nor clone was completed.
    pub fn entry(&self, id: VolumeId) -> Result<Option<Entry>> {
        let clone = Self::clone_in(&self.known, id)?;
        let volume = clone.as_ref().map_or(Ok(id), |clone| clone.origin.parse())?;
        let Some(root) = Self::root_in(&self.known, volume)?.filter(|root| !root.is_placeholder()) else {
            return Ok(None);
        };
        let key = export_key(volume);
        let (export_version, export) = self.get(&key)?;
        let export: Option<ExportRecord> = export.map(|bytes| decode(&key, &bytes)).transpose()?;
        let export = export.map(|e| if e.host.is_empty() { ExportRecord { host: self.host.clone(), ..e } } else { e });
        let mut entry = Entry::unserved(root, self.settings(volume)?);
        entry.export_version = export_version;
        if let Some(ExportRecord { host, offered_by, from, shared, failover, .. }) = export {
            (entry.served_by, entry.handed_from, entry.offered_by) = (Some(host), from, offered_by);
            (entry.shared, entry.failover) = (shared, failover);
        }
        entry.clone = clone.map(|clone| (id, clone));
        entry.protected = self.is_protected(entry.name())?;
        Ok(Some(entry))
    }

    pub fn find(&self, name: &str) -> Result<Entry> {
        let key = name_key(name);
        let (_, value) = self.get(&key)?;
        let entry = match value {
            Some(value) => self.entry(decode::<NameRecord>(&key, &value)?.volume.parse()?)?,
            None => None,
        };
        if entry.is_none() && self.found()?.iter().any(|found| found.name == name) {
            refuse!(
                Code::State,
                "volume {name} was found when the metadata were lost, perhaps not as it was last: nothing opens it. \
                 `holdfast status` says why, and what has it back; it is taken as it is, with all hosts stopped, by \
                 `holdfast meta recover --accept {name}`"
            );
        }
        Ok(entry.ok_or_else(|| no_volume(name))?)
    }

    /// All volumes whose records this release can read: a record of a newer one, or a damaged one, is one volume's trouble.
    pub fn all(&self) -> Result<Vec<Entry>> {
        Ok(self.survey()?.0)
    }

    /// All volumes, for what may be done only where it is right for each of them.
    pub fn all_strictly(&self) -> Result<Vec<Entry>> {
        let (entries, unreadable) = self.survey()?;
        match unreadable.first() {
            None => Ok(entries),
            Some(Unreadable { name, why }) => {
                refuse!(Code::State, "volume {name} is not known well enough for that: {why}")
            }
        }
    }

    /// Volumes, and those whose records this release can't read.
    pub fn survey(&self) -> Result<(Vec<Entry>, Vec<Unreadable>)> {
        let (mut entries, mut unreadable) = (Vec::new(), Vec::new());
        for listed in self.known.list(NAME_PREFIX)?.records {
            let entry = decode::<NameRecord>(&listed.key, &listed.value).and_then(|r| self.entry(r.volume.parse()?));
            match entry {
                Ok(entry) => entries.extend(entry.filter(|entry| !entry.root.deleted)),
                Err(error) if error.is::<FormatError>() || error.is::<serde_json::Error>() => {
                    let name = listed.key[NAME_PREFIX.len()..].to_string();
                    unreadable.push(Unreadable { name, why: format!("{error:#}") });
                }
                Err(error) => return Err(error),
            }
        }
        Ok((entries, unreadable))
    }

    /// Volumes that this host has in service.
    pub fn exported(&self) -> Result<Vec<Entry>> {
        // One whose deletion was begun is not opened again.
        let deleting: BTreeSet<String> = self.deleting()?.into_iter().map(|record| record.volume).collect();
        let is_ours =
            |e: &&Entry| self.is_here(e) && e.clone.is_none() && !deleting.contains(&e.root.volume.to_string());
        Ok(self.all()?.iter().filter(is_ours).cloned().collect())
    }

    /// Whether this host offers it, and others may.
    pub fn is_offered(&self, entry: &Entry) -> bool {
        entry.served_by.is_some() && entry.offered_by.contains(&self.host)
    }

    pub fn is_here(&self, entry: &Entry) -> bool {
        entry.served_by.as_ref() == Some(&self.host)
    }

    /// Whether a host says that it is there.
    pub fn is_there(&self, host: &str) -> Result<bool> {
        Ok(self.known.get(&host_key(host))?.is_some())
    }

    /// Refuses what only the host that has the volume in service can do.
    pub fn check_not_elsewhere(&self, entry: &Entry) -> Result<()> {
        match &entry.served_by {
            Some(host) if *host != self.host && !self.is_there(host)? => refuse!(
                Code::State,
                "volume {0} is in service at host {host}, which is gone; `holdfast volume export {0}` has this host \
                 serve it",
                entry.name()
            ),
            Some(host) if *host != self.host => refuse!(
                Code::State,
                "volume {0} is in service at host {host}; ask there, or have it served here with `holdfast volume export {0} \
                 --takeover`, which ends the service there",
                entry.name()
            ),
            _ => Ok(()),
        }
    }

    /// From here on this host has the volume in service. One that another host has is taken over where that host is gone,
    /// or `takeover` says so; then it is true.
    pub fn claim_export(&self, entry: &Entry, takeover: bool) -> Result<bool> {
        let (volume, name) = (entry.root.volume, &entry.root.name);
        let key = export_key(volume);
        for _ in 0..SWAPS_MAX {
            let (version, found) = self.get_now(&key)?;
            let export: Option<ExportRecord> = found.map(|bytes| decode(&key, &bytes)).transpose()?;
            let export = export.unwrap_or_default();
            let other = Some(&export.host).filter(|host| !host.is_empty() && **host != self.host);
            if let Some(host) = other.filter(|_| !takeover)
                && live_hosts(&self.meta)?.contains(host)
            {
                refuse!(
                    Code::State,
                    "volume {name} is in service at host {host}, which is up; have it handed over there (`holdfast volume handover \
                     {name} --to {0}`), offer it here as well (--multipath), or add --takeover: clients of that host then get errors",
                    self.host
                );
            }
            let is_taken_over = other.is_some();
            let next = encode(&exports::claimed(Some(export), &self.host));
            // Of who throws it away and who wants to serve it in the same moment one finds that it is too late.
            let gone = [trash_key(volume), deleting_key(&volume.to_string())];
            let gone = gone.map(|key| Compare { key, version: MetaVersion::ABSENT });
            let compares: Vec<Compare> = [Compare { key: key.clone(), version }].into_iter().chain(gone).collect();
            match self.meta.commit(&compares, &[put(&key, next)])? {
                Commit::Done(_) => return Ok(is_taken_over),
                Commit::Conflict(found) if found[1..].iter().any(Option::is_some) => {
                    refuse!(
                        Code::Changed,
                        "volume {name} was deleted meanwhile; `holdfast volume list` shows what there is"
                    )
                }
                Commit::Conflict(_) => {}
            }
        }
        refuse!(Code::Changed, "volume {name} is not in service: others change who serves it all the time; try again")
    }

    pub(super) fn change_export(&self, volume: VolumeId, change: impl Fn(&mut ExportRecord)) -> Result<bool> {
        let key = export_key(volume);
        let mut is_there = false;
        self.update(&key, |found| {
            is_there = found.is_some();
            let Some(before) = found.map(|bytes| decode::<ExportRecord>(&key, bytes)).transpose()? else {
                return Ok(None);
            };
            let mut after = before.clone();
            change(&mut after);
            Ok((after != before).then(|| Some(encode(&after))))
        })?;
        Ok(is_there)
    }

    /// These hosts offer the volume, too; false where it is not in service.
    pub fn add_offers(&self, volume: VolumeId, hosts: &[&str]) -> Result<bool> {
        self.change_export(volume, |export| export.offered_by.extend(hosts.iter().map(|host| (*host).to_string())))
    }

    /// A host that is none of the grid's any more neither serves nor offers the volume. True where it had it in
    /// service, and no other one is to take it over.
    pub(super) fn forget_host(&self, volume: VolumeId, host: &str) -> Result<bool> {
        let key = export_key(volume);
        let mut is_ended = false;
        self.update(&key, |found| {
            is_ended = false;
            let Some(before) = found.map(|bytes| decode::<ExportRecord>(&key, bytes)).transpose()? else {
                return Ok(None);
            };
            let after = exports::without_host(before.clone(), host);
            is_ended = after.is_none();
            Ok((after.as_ref() != Some(&before)).then(|| after.map(|after| encode(&after))))
        })?;
        Ok(is_ended)
    }

    /// This host offers it no more. Where one host is left, the list is cleared.
    pub fn end_offer(&self, volume: VolumeId) -> Result<()> {
        self.change_export(volume, |export| *export = exports::without_offer(export.clone(), &self.host))?;
        Ok(())
    }

    /// From here on another host shall serve the volume: it asks this one to yield.
    pub fn hand_over(&self, volume: VolumeId, to: &str) -> Result<bool> {
        self.change_export(volume, |export| *export = exports::handed_over(export.clone(), &self.host, to))
    }

    /// The other host could not serve it: this one goes on.
    pub fn take_back(&self, volume: VolumeId, to: &str) -> Result<()> {
        self.change_export(volume, |export| *export = exports::taken_back(export.clone(), &self.host, to))?;
        Ok(())
    }

    /// This host has the volume in service no more. Another's claim stays.
    pub fn end_export(&self, volume: VolumeId) -> Result<()> {
        let key = export_key(volume);
        self.update(&key, |found| {
            let export: Option<ExportRecord> = found.map(|bytes| decode(&key, bytes)).transpose()?;
            Ok(export.is_some_and(|export| exports::may_end(&export, &self.host)).then_some(None))
        })
    }

    /// Records from before there could be other hosts become this one's: the first that starts.
    pub fn adopt_exports(&self) -> Result<()> {
        for entry in self.all()?.iter().filter(|entry| entry.clone.is_none() && self.is_here(entry)) {
            let own = encode(&ExportRecord { host: self.host.clone(), ..ExportRecord::default() });
            self.update(&export_key(entry.root.volume), |found| {
                let is_nobodys =
                    found.is_some_and(|bytes| decode("", bytes).is_ok_and(|e: ExportRecord| e.host.is_empty()));
                Ok(is_nobodys.then(|| Some(own.clone())))
            })?;
        }
        Ok(())
    }

    /// Records of nodes, each with its key's version and whose machine it is on. What a removed machine has written
    /// since is none of the grid's.
    pub(super) fn node_records(&self) -> Result<Vec<(MetaVersion, String, NodeConfig)>> {
        let removed = self.removed_nodes()?;
        let mut nodes = Vec::new();
        for listed in self.known.list(NODE_PREFIX)?.records {
            let NodeRecord { machine, node, .. } = decode(&listed.key, &listed.value)?;
            if !removed.contains(&node.id) {
                nodes.push((listed.version, machine, node));
            }
        }
        nodes.sort_by_key(|(_, _, node)| node.id);
        Ok(nodes)
    }

    /// The grid's nodes, by their numbers.
    pub fn nodes(&self) -> Result<Vec<NodeConfig>> {
        Ok(self.node_records()?.into_iter().map(|(_, _, node)| node).collect())
    }

    /// Machines that were taken out of the grid, by their records' keys.
    pub(super) fn removed(&self) -> Result<Vec<(String, RemovedRecord)>> {
        let listed = self.known.list(REMOVED_PREFIX)?.records;
        listed.into_iter().map(|l| Ok((l.key.clone(), decode(&l.key, &l.value)?))).collect()
    }

    fn removed_nodes(&self) -> Result<BTreeSet<u32>> {
        Ok(self.removed()?.iter().flat_map(|(_, machine)| &machine.nodes).map(|removed| removed.node).collect())
    }

    /// The number that the next node gets: nobody ever had it.
    pub fn next_node(&self) -> Result<u32> {
        let (_, numbers) = self.get(NUMBERS_KEY)?;
        let numbers = numbers.map(|bytes| decode::<NumbersRecord>(NUMBERS_KEY, &bytes)).transpose()?;
        let gone = self.removed_nodes()?.last().copied().max(numbers.map(|numbers| numbers.highest)).unwrap_or(0);
        Ok(self.nodes()?.last().map_or(0, |node| node.id).max(gone) + 1)
    }

    /// Nobody gets this number again.
    fn use_up(&self, node: u32) -> Result<()> {
        self.update(NUMBERS_KEY, |found| {
            let found: Option<NumbersRecord> = found.map(|bytes| decode(NUMBERS_KEY, bytes)).transpose()?;
            let found = found.unwrap_or_default();
            Ok((found.highest < node).then(|| Some(encode(&NumbersRecord { highest: node, ..found }))))
        })
    }

    /// Records as they are known.
    pub(super) fn known(&self) -> &Meta {
        &self.known
    }

    /// The store, for records that are changed several at a time.
    pub(super) fn store(&self) -> &Meta {
        &self.meta
    }

    /// The numbers that were taken for nodes of this machine are as if they had never been.
    pub fn give_back_nodes(&self) -> Result<()> {
        let own = self.node_records()?.into_iter().filter(|(_, machine, _)| *machine == self.host);
        self.give_back(own.map(|(.., node)| node.id).collect::<Vec<_>>().iter())
    }

    /// The same of these numbers, which nobody has used yet.
    pub fn give_back<'n>(&self, mut nodes: impl Iterator<Item = &'n u32>) -> Result<()> {
        nodes.try_for_each(|node| self.set(&node_key(*node), None))
    }

    /// Tells all hosts which nodes run beside this one.
    pub fn set_own_nodes(&self, own: &[NodeConfig]) -> Result<()> {
        let removed = self.removed_nodes()?;
        if let Some(node) = own.iter().find(|node| removed.contains(&node.id)) {
            bail!("node {} was taken out of the grid with its machine, and is none of it any more", node.id);
        }
        for node in own {
            let key = node_key(node.id);
            self.update(&key, |found| {
                let found: Option<NodeRecord> = found.map(|bytes| decode(&key, bytes)).transpose()?;
                if let Some(other) = found.as_ref().filter(|found| found.machine != self.host) {
                    refuse!(
                        Code::Invalid,
                        "node {} is on machine {}; two nodes can't have one number",
                        node.id,
                        other.machine
                    );
                }
                let other = found.as_ref().map(|found| found.other.clone()).unwrap_or_default();
                let record = NodeRecord { machine: self.host.clone(), node: node.clone(), other };
                Ok((found.as_ref() != Some(&record)).then(|| Some(encode(&record))))
            })?;
        }
        for listed in self.known.list(NODE_PREFIX)?.records {
            let found: NodeRecord = decode(&listed.key, &listed.value)?;
            if found.machine == self.host && own.iter().all(|node| node.id != found.node.id) {
                self.use_up(found.node.id)?;
                self.set(&listed.key, None)?;
            }
        }
        Ok(())
    }

    /// Which machine each node is on.
    pub fn node_machines(&self) -> Result<BTreeMap<u32, String>> {
        Ok(self.node_records()?.into_iter().map(|(_, machine, node)| (node.id, machine)).collect())
    }

    /// Numbers of such nodes.
    pub fn numbers_of(&self, is_such: impl Fn(&NodeConfig) -> bool) -> Result<BTreeSet<u32>> {
        let nodes = self.node_records()?.into_iter().map(|(.., node)| node);
        Ok(nodes.filter(is_such).map(|node| node.id).collect())
    }

    /// Whether the grid has a machine of that name, by more than the numbers of these nodes, which it has taken and not
    /// used.
    pub fn has_machine(&self, name: &str, taken: &BTreeSet<u32>) -> Result<bool> {
        let has_nodes = self.node_machines()?.iter().any(|(node, machine)| machine == name && !taken.contains(node));
        Ok(has_nodes || self.known.get(&machine_key(name))?.is_some() || self.is_there(name)?)
    }

    /// Takes a number for a node beside this host that was taken before, and was not used.
    pub fn retake_node(&self, node: NodeConfig) -> Result<NodeConfig> {
        let record = encode(&NodeRecord { machine: self.host.clone(), node: node.clone(), other: Other::new() });
        self.update(&node_key(node.id), |found| match found {
            Some(_) => Ok(Some(Some(record.clone()))),
            None => refuse!(
                Code::Changed,
                "number {} of a node, which an attempt that was cut short had taken, was given back meanwhile; try \
                 again",
                node.id
            ),
        })?;
        Ok(node)
    }

    /// Takes the next number for a node that is being made beside this host.
    pub fn add_node(&self, node_of: impl Fn(u32) -> NodeConfig) -> Result<NodeConfig> {
        for _ in 0..SWAPS_MAX {
            let id = self.next_node()?;
            let node = node_of(id);
            let record = encode(&NodeRecord { machine: self.host.clone(), node: node.clone(), other: Other::new() });
            if let Swap::Done(_) = self.meta.swap(&node_key(id), MetaVersion::ABSENT, Some(&record), None)? {
                return Ok(node);
            }
        }
        refuse!(Code::Changed, "no number could be taken for a node: others take them all the time; try again")
    }

    /// Snapshots by schedule, by the id of a volume or clone.
    pub fn schedules(&self) -> Result<Vec<(VolumeId, ScheduleRecord)>> {
        let listed = self.known.list(SCHEDULE_PREFIX)?.records;
        listed.iter().map(|l| Ok((l.key[SCHEDULE_PREFIX.len()..].parse()?, decode(&l.key, &l.value)?))).collect()
    }

    pub fn schedule(&self, volume: VolumeId) -> Result<Option<ScheduleRecord>> {
        let key = format!("{SCHEDULE_PREFIX}{volume}");
        self.known.get(&key)?.map(|found| decode(&key, &found.value)).transpose()
    }

    pub fn set_schedule(&self, volume: VolumeId, schedule: Option<&ScheduleRecord>) -> Result<()> {
        self.set(&format!("{SCHEDULE_PREFIX}{volume}"), schedule.map(encode))
    }

    pub fn received(&self, volume: VolumeId) -> Result<ReceivedRecord> {
        let key = received_key(volume);
        self.get(&key)?.1.map_or_else(|| Ok(ReceivedRecord::default()), |bytes| decode(&key, &bytes))
    }

    pub fn set_received(&self, volume: VolumeId, received: Option<&ReceivedRecord>) -> Result<()> {
        self.set(&received_key(volume), received.map(encode))
    }

    /// Volumes that a recovery has found, and that nothing opens.
    pub fn found(&self) -> Result<Vec<Unreadable>> {
        let listed = self.known.list(FOUND_PREFIX)?.records;
        let found = listed.iter().map(|l| decode::<FoundRecord>(&l.key, &l.value));
        found.map(|found| found.map(|found| Unreadable { name: found.name, why: found.why })).collect()
    }

    pub fn trend(&self) -> Result<Vec<CapacitySample>> {
        let (_, value) = self.get(CAPACITY_KEY)?;
        value.map_or(Ok(Vec::new()), |bytes| decode(CAPACITY_KEY, &bytes))
    }

    pub fn set_trend(&self, samples: &[CapacitySample]) -> Result<()> {
        self.set(CAPACITY_KEY, Some(encode(&samples)))
    }

    /// Devices that are to be empty: those that an operator names, and what removed machines had, until that is made
    /// good.
    pub fn draining(&self) -> Result<BTreeSet<DeviceId>> {
        let mut draining = self.devices_under(DRAINING_PREFIX)?;
        for (_, machine) in self.removed()?.into_iter().filter(|(_, machine)| !machine.made_good) {
            draining
                .extend(machine.nodes.iter().flat_map(|node| &node.devices).filter_map(|d| d.parse::<DeviceId>().ok()));
        }
        Ok(draining)
    }

    pub fn set_draining(&self, device: DeviceId, draining: bool) -> Result<()> {
        self.set(&format!("{DRAINING_PREFIX}{device}"), draining.then(|| b"{}".to_vec()))
    }

    /// Devices that are not to be emptied unasked.
    pub fn kept(&self) -> Result<BTreeSet<DeviceId>> {
        self.devices_under(KEPT_PREFIX)
    }

    pub fn set_kept(&self, device: DeviceId, kept: bool) -> Result<()> {
        self.set(&format!("{KEPT_PREFIX}{device}"), kept.then(|| b"{}".to_vec()))
    }

    fn devices_under(&self, prefix: &str) -> Result<BTreeSet<DeviceId>> {
        self.known.list(prefix)?.records.iter().map(|l| Ok(l.key[prefix.len()..].parse()?)).collect()
    }

    /// From here on the volume is being deleted, whatever happens to this process.
    pub fn begin_deleting(&self, entry: &Entry) -> Result<()> {
        let volume = entry.root.volume.to_string();
        let record = DeletingRecord { volume: volume.clone(), name: entry.root.name.clone(), other: Other::new() };
        self.set(&deleting_key(&volume), Some(encode(&record)))
    }

    pub fn deleting(&self) -> Result<Vec<DeletingRecord>> {
        self.known.list(DELETING_PREFIX)?.records.iter().map(|l| decode(&l.key, &l.value)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_runtime::clock;
    use holdfast_runtime::meta::LocalStore;

    #[test]
    fn a_volume_of_a_newer_release_keeps_no_others_from_being_served() {
        let meta: Meta = Arc::new(LocalStore::in_memory(Arc::new(clock::now)));
        let catalog = Catalog::new(meta.clone(), GridId(1), "a");
        let made = |name| {
            let what = What::guests(1 << 30, Layout::DEFAULT, Tiers::default());
            catalog.create(name, what, (Settings::default(), None), None, None).unwrap().unwrap().root
        };
        made("readable");
        // The version, and a byte of the body.
        for (name, at) in [("newer", 4), ("damaged", 12)] {
            let root = made(name);
            let mut bytes = root.encode();
            bytes[at] ^= 0x40;
            catalog.set(&root_key(root.volume), Some(bytes)).unwrap();
        }
        let (entries, unreadable) = catalog.survey().unwrap();
        let names: Vec<&str> = entries.iter().map(|entry| entry.name()).collect();
        assert_eq!(names, ["readable"]);
        let why: Vec<(&str, &str)> = unreadable.iter().map(|u| (u.name.as_str(), u.why.as_str())).collect();
        assert_eq!(why.iter().map(|(name, _)| *name).collect::<Vec<_>>(), ["damaged", "newer"]);
        assert!(why[0].1.contains("is damaged") && why[1].1.contains("by a newer release"), "{why:?}");
        assert!(catalog.all_strictly().unwrap_err().to_string().starts_with("volume damaged is not known"));
        assert!(catalog.find("newer").unwrap_err().to_string().contains("by a newer release"));
        assert!(catalog.exported().is_ok() && catalog.reservations().is_ok() && catalog.adopt_exports().is_ok());
    }

    #[test]
    fn a_limit_is_made_with_its_volume_and_goes_with_it_and_a_damaged_one_is_its_volumes_trouble_alone() {
        let meta: Meta = Arc::new(LocalStore::in_memory(Arc::new(clock::now)));
        let catalog = Catalog::new(meta.clone(), GridId(1), "a");
        let what = What::guests(1 << 30, Layout::DEFAULT, Tiers::default());
        let make = |name, limit| {
            catalog.create(name, what, (Settings::default(), limit), None, None).unwrap().unwrap().root.volume
        };
        // An attempt that was cut short before there was a volume.
        let given_up = catalog.take_name("v1", Again::SameId { origin: None }).unwrap();
        catalog.set_limit(given_up, Some(&limits::record_of("iops=1"))).unwrap();
        let (v1, v2) = (make("v1", None), make("v2", Some(&limits::record_of("iops=500"))));
        assert_eq!(v1, given_up);
        assert_eq!(catalog.limits().unwrap(), Limits::from([(v2, "iops=500".to_string())]));
        catalog.set(&limit_key(v1), Some(b"{\"limit\":7}".to_vec())).unwrap();
        catalog.inherit_limit(v1, VolumeId(7)).unwrap();
        let limits = catalog.limits().unwrap();
        assert_eq!(catalog.get(&limit_key(VolumeId(7))).unwrap().1, catalog.get(&limit_key(v1)).unwrap().1);
        assert_eq!((limits[&v2].as_str(), limits[&v1].as_str()), ("iops=500", ""));
    }

    #[test]
    fn what_a_newer_release_has_written_beside_stays_when_a_record_is_changed() {
        let meta: Meta = Arc::new(LocalStore::in_memory(Arc::new(clock::now)));
        let (catalog, id) = (Catalog::new(meta.clone(), GridId(1), "a"), VolumeId(7));
        let put = |key: String, text: &str| meta.swap(&key, MetaVersion::ABSENT, Some(text.as_bytes()), None).unwrap();
        let text = |key: String| String::from_utf8(meta.get(&key).unwrap().unwrap().value).unwrap();
        put(settings_key(id), r#"{"fixed":{"base_bytes":1,"left_bytes":2,"zz":3},"zz":4}"#);
        catalog.change_settings(id, |settings| settings.unchecked_reads = true).unwrap();
        let expected = r#"{"fixed":{"base_bytes":1,"left_bytes":2,"zz":3},"unchecked_reads":true,"zz":4}"#;
        assert_eq!(text(settings_key(id)), expected);
        put(clients_key(id), r#"{"allowed":["a"],"zz":1}"#);
        catalog.change_clients(id, |_| Ok(Some(BTreeSet::from(["b".to_string()])))).unwrap();
        assert_eq!(text(clients_key(id)), r#"{"allowed":["b"],"zz":1}"#);
        put(limit_key(id), r#"{"limit":"iops=1","zz":1}"#);
        catalog.set_limit(id, Some(&limits::record_of("iops=2"))).unwrap();
        assert_eq!(text(limit_key(id)), r#"{"limit":"iops=2","zz":1}"#);
        let key = r#"{"version":1,"nonce":"AA==","wrapped":"AQ==","source":{"file":"/k"},"zz":1}"#;
        put(key_key(id), key);
        let next = KeyRecord { nonce: "Ag==".to_string(), ..catalog.key(id).unwrap().unwrap() };
        catalog.replace_key(id, &KeyRecord { other: Other::new(), ..next }).unwrap();
        assert_eq!(text(key_key(id)), key.replace("AA==", "Ag=="));
    }

    #[test]
    fn copies_have_rising_numbers_above_those_of_devices() {
        let meta: Meta = Arc::new(LocalStore::in_memory(Arc::new(clock::now)));
        let (a, b) = (Catalog::new(meta.clone(), GridId(1), "a"), Catalog::new(meta, GridId(1), "b"));
        let numbers = [a.number_copy(0), b.number_copy(0), a.number_copy(7), b.number_copy(7), a.number_copy(1)];
        assert_eq!(numbers.map(Result::unwrap), [1, 2, 8, 9, 10]);
    }

    #[test]
    fn what_others_take_over_stays_in_service_when_its_host_is_taken_out_of_the_grid() {
        let meta: Meta = Arc::new(LocalStore::in_memory(Arc::new(clock::now)));
        let catalog = Catalog::new(meta.clone(), GridId(1), "a");
        let export = |offered_by: &[&str], failover| {
            let offered_by = offered_by.iter().map(|host| host.to_string()).collect();
            ExportRecord { host: "gone".to_string(), offered_by, failover, ..ExportRecord::default() }
        };
        let all = [
            (export(&[], false), None),
            (export(&["gone"], false), None),
            (export(&[], true), Some(export(&[], true))),
            (export(&["b", "gone"], false), Some(export(&["b"], false))),
        ];
        for (id, (before, after)) in (1..).map(VolumeId).zip(all) {
            meta.swap(&export_key(id), MetaVersion::ABSENT, Some(&encode(&before)), None).unwrap();
            assert_eq!(catalog.forget_host(id, "gone").unwrap(), after.is_none());
            let left = meta.get(&export_key(id)).unwrap();
            assert_eq!(left.map(|found| decode::<ExportRecord>("", &found.value).unwrap()), after);
        }
    }

    #[test]
    fn of_two_hosts_that_set_space_aside_in_the_same_moment_one_looks_again() {
        let meta: Meta = Arc::new(LocalStore::in_memory(Arc::new(clock::now)));
        let (a, b) = (Catalog::new(meta.clone(), GridId(1), "a"), Catalog::new(meta, GridId(1), "b"));
        let what = What::guests(1 << 30, Layout::DEFAULT, Tiers::default());
        let reservation = Reservation { base_bytes: 0, left_bytes: 1 << 30 };
        let settings = (Settings { reservation: Some(reservation), ..Settings::default() }, None);
        let (at_a, at_b) = (a.reserving().unwrap(), b.reserving().unwrap());
        let made = a.create("va", what, settings, None, Some(&at_a)).unwrap().expect("it was first");
        assert!(
            b.create("vb", what, settings, None, Some(&at_b)).unwrap().is_none(),
            "nothing is made beyond what was seen"
        );
        assert!(b.find("vb").is_err());
        // It looks again, and sees what the other one has.
        let again = b.reserving().unwrap();
        assert_eq!(b.reservations().unwrap().len(), 1);
        b.create("vb", what, settings, None, Some(&again)).unwrap().expect("nobody came between");
        // What a volume is about to own counts for others, and comes between as well.
        let (stale, now) = (b.reserving().unwrap(), a.reserving().unwrap());
        let volume = made.root.volume;
        assert!(a.set_pending(volume, Some((Layout::DEFAULT, 2 << 30)), &now).unwrap());
        assert!(!b.set_reservation_reserving(volume, reservation, &stale).unwrap());
        let seen = b.reserving().unwrap();
        assert_eq!(seen.pending_beside(None), [(Layout::DEFAULT, 2 << 30)]);
        assert_eq!(seen.pending_beside(Some(volume)), []);
        assert!(a.set_pending(volume, None, &a.reserving().unwrap()).unwrap());
        assert!(b.reserving().unwrap().pending_beside(None).is_empty());
    }

    /// A clone that was made in its volume, and of which no record was written, still has its id there.
    #[test]
    fn a_clone_whose_making_was_cut_short_shares_its_id_with_nothing_but_the_next_attempt_at_it() {
        let meta: Meta = Arc::new(LocalStore::in_memory(Arc::new(clock::now)));
        let catalog = Catalog::new(meta, GridId(1), "a");
        let what = What::guests(1 << 30, Layout::DEFAULT, Tiers::default());
        let make =
            |name| catalog.create(name, what, (Settings::default(), None), None, None).unwrap().unwrap().root.volume;
        let (v1, v2) = (make("v1"), make("v2"));
        let begun = catalog.begin_clone("c", v1).unwrap();
        assert_eq!(catalog.begin_clone("c", v1).unwrap(), begun, "it is gone on with");
        let elsewhere = catalog.begin_clone("c", v2).unwrap();
        assert_ne!(elsewhere, begun);
        catalog.change_clients(elsewhere, |_| Ok(Some(BTreeSet::new()))).unwrap();
        let given_up = catalog.take_name("d", Again::SameId { origin: None }).unwrap();
        catalog.set_limit(given_up, Some(&limits::record_of("iops=1"))).unwrap();
        assert_ne!(catalog.begin_clone("d", v1).unwrap(), given_up);
        assert!(catalog.limits().unwrap().is_empty(), "nothing stays of what there never was");
        let volume = make("c");
        assert!(volume != elsewhere && volume != begun);
        assert_eq!(catalog.clients().unwrap().get(&elsewhere), Some(&BTreeSet::new()), "its list stays");
        assert_eq!(catalog.find("c").unwrap().root.volume, volume);
    }

    #[test]
    fn odd_names_are_refused_with_an_example() {
        for name in ["", "-x", "a b", "a/b", "ä", &"x".repeat(65)] {
            assert!(check_name(name).unwrap_err().to_string().contains("vm1-disk"), "{name}");
        }
        for name in ["vm1", "a.b_c-d", "0"] {
            check_name(name).unwrap();
        }
    }
}
