//! Floors: requests a second that a volume or clone is promised, and of what they are promised.
//!
//! ```text
//! floors         (metadata) what hosts can do (`holdfast qos measure`), and how often something was promised
//! limits/ID      (metadata) the policy of a volume or clone, its floor in it
//! ```
//! The sum of all floors of the grid is what counts, also of volumes in the trash: any host may have to serve them all
//! ([`holdfast_host::promise`]). Of two hosts that promise in the same moment one looks again, since each compares the record `floors`
//! and changes it. A floor is its volume's own: a clone begins without.

use super::catalog::{Catalog, Entry, SWAPS_MAX, decode, put};
use super::control::ControlPlane;
use super::limits;
use crate::grid::certs::now_s;
use anyhow::Result;
use holdfast_api::{Code, FloorInfo, MeasuredInfo, QosInfo, refuse};
use holdfast_base::{MetaVersion, VolumeId};
use holdfast_format::meta::{
    DELETING_PREFIX, FLOORS_KEY, FloorsRecord, LimitRecord, MeasuredRecord, Other, encode, limit_key,
};
use holdfast_host::{Capacity, promise};
use holdfast_runtime::meta::{Commit, Compare};
use std::collections::BTreeMap;

/// The record, as it was looked at.
struct Floors {
    version: MetaVersion,
    record: FloorsRecord,
}

impl Catalog {
    fn floors(&self) -> Result<Floors> {
        let (version, value) = self.get_now(FLOORS_KEY)?;
        let record = value.map_or(Ok(FloorsRecord::default()), |bytes| decode(FLOORS_KEY, &bytes))?;
        Ok(Floors { version, record })
    }

    /// Notes what this host can do.
    fn set_measured(&self, iops: u64, nodes: u64) -> Result<()> {
        self.update(FLOORS_KEY, |found| {
            let mut record = found.map_or(Ok(FloorsRecord::default()), |bytes| decode(FLOORS_KEY, bytes))?;
            let measured = MeasuredRecord { iops, nodes, at_s: now_s(), other: Other::new() };
            record.measured.insert(self.host().clone(), measured);
            record.changes += 1;
            Ok(Some(Some(encode(&record))))
        })
    }

    /// Writes a policy that promises a floor; false where others have promised something since these floors were looked at.
    fn set_limit_promising(&self, volume: VolumeId, limit: &LimitRecord, floors: Floors) -> Result<bool> {
        let key = limit_key(volume);
        let (at, found) = self.get_now(&key)?;
        let Floors { version, record } = floors;
        let compares = [Compare { key: FLOORS_KEY.to_string(), version }, Compare { key: key.clone(), version: at }];
        let next = encode(&FloorsRecord { changes: record.changes + 1, ..record });
        let writes = [put(&key, encode(&limits::after(found.as_deref(), limit))), put(FLOORS_KEY, next)];
        Ok(matches!(self.commit(&compares, &writes)?, Commit::Done(_)))
    }

    /// What is promised, by volume or clone. One that is being deleted is never had back.
    fn promised(&self) -> Result<BTreeMap<VolumeId, u64>> {
        let deleting = self.known().list(DELETING_PREFIX)?.records;
        let is_going = |id: &VolumeId| deleting.iter().any(|of| of.key[DELETING_PREFIX.len()..] == id.to_string());
        let floors = self.limits()?.into_iter().filter(|(id, _)| !is_going(id));
        Ok(floors.filter_map(|(id, words)| Some((id, limits::floor_of(&words)?))).collect())
    }
}

impl ControlPlane {
    /// What there is to promise of; nothing before a host of the grid was measured.
    fn capacity(&self, record: &FloorsRecord) -> Result<(u64, Option<Capacity>)> {
        let machines = self.catalog.machine_records()?;
        let hosts = machines.len().max(1) as u64;
        // A machine that was taken out of the grid serves nothing any more.
        let is_here = |name: &String| machines.is_empty() || machines.contains_key(name);
        let least = record.measured.iter().filter(|(host, _)| is_here(host)).map(|(_, of)| of.iops).min();
        Ok((hosts, least.map(|measured| Capacity { measured, hosts })))
    }

    /// Refuses a floor that can't be kept beside those of others.
    pub(super) fn check_floor(&self, volume: Option<VolumeId>, floor: u64, record: &FloorsRecord) -> Result<()> {
        let others = self.catalog.promised()?.into_iter().filter(|(id, _)| Some(*id) != volume);
        let others = others.fold(0, |sum: u64, (_, floor)| sum.saturating_add(floor));
        match promise(floor, others, self.capacity(record)?.1) {
            Ok(()) => Ok(()),
            Err(refused) => refuse!(Code::State, "{refused}"),
        }
    }

    /// The same, of a volume that is about to be made.
    pub(super) fn check_new_floor(&self, limit: &LimitRecord) -> Result<()> {
        let Some(floor) = limits::floor_of_record(limit) else { return Ok(()) };
        self.check_floor(None, floor, &self.catalog.floors()?.record)
    }

    /// Gives a volume or clone a policy that promises a floor.
    pub(super) fn promise_floor(&self, entry: &Entry, floor: u64, limit: &LimitRecord) -> Result<()> {
        for _ in 0..SWAPS_MAX {
            let floors = self.catalog.floors()?;
            // Whatever others have promised up to there counts.
            self.records.sync()?;
            self.check_floor(Some(entry.id()), floor, &floors.record)?;
            if self.catalog.set_limit_promising(entry.id(), limit, floors)? {
                return Ok(());
            }
        }
        refuse!(Code::Changed, "{}: others promise floors all the time; try again", entry.name())
    }

    /// To be called alone.
    pub(super) fn note_measured(&self, iops: u64, nodes: u64) -> Result<QosInfo> {
        self.catalog.set_measured(iops, nodes)?;
        self.qos()
    }

    pub(super) fn qos(&self) -> Result<QosInfo> {
        let Floors { record, .. } = self.catalog.floors()?;
        let (hosts, capacity) = self.capacity(&record)?;
        let names = self.catalog.all()?.into_iter().map(|entry| (entry.id(), entry.name().to_string()));
        let trash = self.catalog.trash()?.into_iter().map(|trashed| (trashed.id(), trashed.record.name));
        let names: BTreeMap<VolumeId, String> = trash.chain(names).collect();
        let name = |id: VolumeId| names.get(&id).cloned().unwrap_or_else(|| id.to_string());
        let floors = self.catalog.promised()?.into_iter().map(|(id, floor)| FloorInfo { volume: name(id), floor });
        let measured = record.measured.into_iter().map(|(host, of)| {
            let MeasuredRecord { iops, nodes, at_s, .. } = of;
            MeasuredInfo { host, iops, nodes, at_s }
        });
        Ok(QosInfo {
            measured: measured.collect(),
            hosts,
            for_floors: capacity.map(Capacity::for_floors),
            floors: floors.collect(),
        })
    }
}
