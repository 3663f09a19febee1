//! The trash: a volume that is deleted has no name and is not served, and can be had back for a day.
//!
//! ```text
//! trash/ID               (metadata) what the volume was called, and how many minutes some host has seen pass since
//! ```
//! **In and out.** One transaction takes the name and the export away and writes the record; one takes the record away and
//! gives a name, or hands the volume to whoever returns space (`deleting/ID`). Both compare the record's version: of a
//! restoring and an emptying in the same moment one finds nothing.
//!
//! **Meanwhile** the volume is what one is that no host has in service: the steward looks after it, what is set aside
//! for it stays so, drains wait for it. It is told of, and opened for care, under a name that no volume can have.
//!
//! **Age** is what the steward has seen pass, a minute at a time ([`holdfast_cluster::steward`]): it gives up what has been there for
//! long enough, or what was thrown away first where devices are nearly full.
//!
//! Role: what commands do with it, and what is told of it.

use super::catalog::{Catalog, Entry, SWAPS_MAX, check_name, decode, put};
use super::commands::Command;
use super::control::ControlPlane;
use super::presence::without_trash;
use crate::logger;
use anyhow::{Context, Result};
use holdfast_api::{Code, TrashInfo, Unreadable, VolumeInfo, refuse};
use holdfast_base::{InstanceId, MetaVersion, VolumeId};
use holdfast_cluster::steward::KEPT_MINUTES;
use holdfast_format::meta::{
    DeletingRecord, ExportRecord, NameRecord, Other, TRASH_PREFIX, TrashRecord, deleting_key, encode, export_key,
    name_key, trash_key,
};
use holdfast_format::root::{Root, root_key};
use holdfast_host::Order;
use holdfast_host::reservation::ReservedVolume;
use holdfast_runtime::meta::{Commit, Compare, Write};

/// A volume in the trash.
#[derive(Clone, Debug)]
pub struct Trashed {
    /// Under a name that it bears for people, and which no volume in service can have.
    pub entry: Entry,
    pub record: TrashRecord,
    version: MetaVersion,
}

impl Trashed {
    pub fn id(&self) -> VolumeId {
        self.entry.root.volume
    }

    fn compare(&self) -> Compare {
        Compare { key: trash_key(self.id()), version: self.version }
    }
}

/// What a volume in the trash is called meanwhile.
pub fn name_in_trash(name: &str, id: VolumeId) -> String {
    let id = id.to_string();
    format!("{name} (in the trash, {})", id.split('-').next().unwrap_or(&id))
}

fn delete(key: String) -> Write {
    Write { key, value: None, lease: None }
}

/// A root as it is by now, under another name: whoever had it open before is deposed, and learns the name anew.
pub(super) fn renamed(root: &Root, name: &str) -> Root {
    let instance = InstanceId(uuid::Uuid::new_v4().as_u128());
    Root { name: name.to_string(), epoch: root.epoch.next(), instance, ..root.clone() }
}

impl Catalog {
    /// What is in the trash, and what of it this release can't read.
    pub fn survey_trash(&self) -> Result<(Vec<Trashed>, Vec<Unreadable>)> {
        let (mut trash, mut unreadable) = (Vec::new(), Vec::new());
        for listed in self.known.list(TRASH_PREFIX)?.records {
            let read = || -> Result<Option<Trashed>> {
                let record: TrashRecord = decode(&listed.key, &listed.value)?;
                let id: VolumeId = listed.key[TRASH_PREFIX.len()..].parse()?;
                let Some(mut entry) = self.entry(id)?.filter(|entry| !entry.root.deleted) else { return Ok(None) };
                entry.root.name = name_in_trash(&record.name, id);
                Ok(Some(Trashed { entry, record, version: listed.version }))
            };
            match read() {
                Ok(trashed) => trash.extend(trashed),
                Err(error) => unreadable.push(Unreadable { name: listed.key, why: format!("{error:#}") }),
            }
        }
        Ok((trash, unreadable))
    }

    /// What can be read of it.
    pub fn trash(&self) -> Result<Vec<Trashed>> {
        Ok(self.survey_trash()?.0)
    }

    /// All volumes whose data are to be kept, also those in the trash.
    pub fn all_kept(&self) -> Result<Vec<Entry>> {
        let trash = self.trash()?.into_iter().map(|trashed| trashed.entry);
        Ok(self.all()?.into_iter().chain(trash).collect())
    }

    /// The same, for what may be done only where it is right for each of them.
    pub fn all_kept_strictly(&self) -> Result<Vec<Entry>> {
        let (trash, unreadable) = self.survey_trash()?;
        if let Some(Unreadable { name, why }) = unreadable.first() {
            refuse!(Code::State, "the volume of record {name} is not known well enough for that: {why}");
        }
        Ok(self.all_strictly()?.into_iter().chain(trash.into_iter().map(|trashed| trashed.entry)).collect())
    }

    /// A volume by its id, wherever it is; nothing where it is being deleted or made.
    pub fn kept_entry(&self, id: VolumeId) -> Result<Option<Entry>> {
        let is_going = self.known.get(&deleting_key(&id.to_string()))?.is_some();
        let Some(mut entry) = self.entry(id)?.filter(|entry| !entry.root.deleted && !is_going) else { return Ok(None) };
        if self.known.get(&trash_key(id))?.is_some() {
            entry.root.name = name_in_trash(&entry.root.name, id);
        }
        Ok(Some(entry))
    }

    /// The volume loses its name and its service, and can be had back.
    pub fn throw_away(&self, entry: &Entry, taken_bytes: u64) -> Result<()> {
        let (id, name) = (entry.root.volume, entry.root.name.clone());
        let lost = || format!("volume {name} was changed meanwhile; `holdfast volume list` shows what there is");
        for _ in 0..SWAPS_MAX {
            let (root_version, root) = self.get_now(&root_key(id))?;
            let root = Root::decode(&root.with_context(lost)?).context("the volume's root record is damaged")?;
            let (name_version, named) = self.get_now(&name_key(&name))?;
            let named: NameRecord = decode(&name_key(&name), &named.with_context(lost)?)?;
            let (export_version, export) = self.get_now(&export_key(id))?;
            let export: Option<ExportRecord> = export.map(|bytes| decode(&export_key(id), &bytes)).transpose()?;
            let is_ours = |export: &ExportRecord| export.host.is_empty() || export.host == *self.host();
            if root.deleted || named.volume != id.to_string() || !export.as_ref().is_none_or(is_ours) {
                refuse!(Code::Changed, "{}", lost());
            }
            let by = self.needed_by(&root)?;
            if named.protected || !by.is_empty() {
                refuse!(Code::Changed, "{}", lost());
            }
            let record = TrashRecord { name: name.clone(), taken_bytes, minutes: 0, other: Other::new() };
            let compares = [
                Compare { key: root_key(id), version: root_version },
                Compare { key: name_key(&name), version: name_version },
                Compare { key: export_key(id), version: export_version },
                Compare { key: trash_key(id), version: MetaVersion::ABSENT },
            ];
            let mut writes = vec![delete(name_key(&name)), put(&trash_key(id), encode(&record))];
            writes.extend(export.map(|_| delete(export_key(id))));
            if let Commit::Done(_) = self.meta.commit(&compares, &writes)? {
                return Ok(());
            }
        }
        refuse!(
            Code::Changed,
            "volume {name} could not be put into the trash: others change it all the time; try again"
        )
    }

    /// A volume out of the trash has this name from here on.
    pub fn restore(&self, trashed: &Trashed, name: &str) -> Result<()> {
        let id = trashed.id();
        for _ in 0..SWAPS_MAX {
            let (root_version, root) = self.get_now(&root_key(id))?;
            let root = Root::decode(&root.context("the volume is gone")?).context("its root record is damaged")?;
            let named = NameRecord {
                volume: id.to_string(),
                host: String::new(),
                origin: Some(String::new()),
                protected: false,
                other: Other::new(),
            };
            let mut compares = vec![trashed.compare(), Compare { key: name_key(name), version: MetaVersion::ABSENT }];
            let mut writes = vec![delete(trash_key(id)), put(&name_key(name), encode(&named))];
            if root.name != name {
                compares.push(Compare { key: root_key(id), version: root_version });
                writes.push(put(&root_key(id), renamed(&root, name).encode()));
            }
            let found = match self.meta.commit(&compares, &writes)? {
                Commit::Done(_) => return Ok(()),
                Commit::Conflict(found) => found,
            };
            match &found[0] {
                None => refuse!(
                    Code::NotFound,
                    "{} is not in the trash any more; `holdfast volume list` shows what there is",
                    trashed.record.name
                ),
                Some(record) if record.version != trashed.version => {
                    refuse!(Code::Changed, "the trash was changed meanwhile; try again")
                }
                Some(_) => {}
            }
            if found[1].is_some() {
                refuse!(Code::Exists, "there is a volume {name} by now; give this one another name with --as NEW");
            }
        }
        refuse!(
            Code::Changed,
            "{} could not be had back: others change it all the time; try again",
            trashed.record.name
        )
    }

    /// From here on its space is returned; false where it is not in the trash any more, or its record was changed.
    pub fn empty(&self, trashed: &Trashed) -> Result<bool> {
        let volume = trashed.id().to_string();
        let record = DeletingRecord { volume, name: trashed.record.name.clone(), other: Other::new() };
        let writes = [delete(trash_key(trashed.id())), put(&deleting_key(&record.volume), encode(&record))];
        Ok(matches!(self.meta.commit(&[trashed.compare()], &writes)?, Commit::Done(_)))
    }
}

impl ControlPlane {
    /// To be called alone.
    fn finish_off(&self, trashed: &Trashed) -> Result<bool> {
        if !self.catalog.empty(trashed)? {
            return Ok(false);
        }
        self.let_go_for_good(trashed.id())?;
        Ok(true)
    }

    /// A volume that is in service here, or nowhere, goes into the trash.
    pub(super) fn throw_away(&self, entry: &Entry, force: bool) -> Result<()> {
        let name = entry.name();
        let old = self.records.view(without_trash);
        if !old.is_empty() {
            refuse!(
                Code::Unsupported,
                "volume {name} is not deleted: hosts of an earlier release know no trash, and would not look after it there ({}). \
                 Bring them to this release, or delete it for good with --now",
                old.join(", ")
            );
        }
        let live = self.ask(|answer| Command::Volume { name: name.to_string(), answer })?;
        let taken = live.and_then(|info| Some(info.live?.space.taken_bytes()));
        // What is in its log is read when it is opened again.
        self.close(name, force, true, &format!("volume {name} is not deleted"))?;
        self.catalog.throw_away(entry, taken.unwrap_or(0))
    }

    /// What is told of the trash; what is open of it for care is taken out of the volumes.
    pub(super) fn trash_of(&self, volumes: &mut Vec<VolumeInfo>) -> Result<(Vec<TrashInfo>, Vec<Unreadable>)> {
        let (trash, unreadable) = self.catalog.survey_trash()?;
        let info = |trashed: &Trashed| {
            let Trashed { entry, record, .. } = trashed;
            let open = volumes.iter().find(|v| v.id == trashed.id().to_string());
            let taken = open.and_then(|v| Some(v.live.as_ref()?.space.taken_bytes()));
            let reservation =
                entry.settings.reservation.map(|reservation| ReservedVolume::new(entry.root.layout, reservation));
            TrashInfo {
                id: trashed.id().to_string(),
                name: record.name.clone(),
                size_bytes: entry.root.size_bytes,
                layout: entry.root.layout.to_string(),
                taken_bytes: taken.unwrap_or(record.taken_bytes),
                set_aside_bytes: reservation.map_or(0, |reservation| reservation.set_aside_bytes()),
                minutes_left: KEPT_MINUTES.saturating_sub(record.minutes),
            }
        };
        let mut infos: Vec<TrashInfo> = trash.iter().map(info).collect();
        infos.sort_by_key(|info| (info.minutes_left, info.name.clone()));
        volumes.retain(|v| v.exported || trash.iter().all(|trashed| trashed.id().to_string() != v.id));
        Ok((infos, unreadable))
    }

    pub(super) fn list_trash(&self) -> Result<Vec<TrashInfo>> {
        Ok(self.trash_of(&mut self.live()?.volumes)?.0)
    }

    /// By a name that it had, or by its id.
    fn find_trashed(&self, which: &str) -> Result<Trashed> {
        let trash = self.catalog.trash()?;
        let is_it = |trashed: &&Trashed| trashed.record.name == which || trashed.id().to_string() == which;
        let found: Vec<&Trashed> = trash.iter().filter(is_it).collect();
        match found[..] {
            [one] => Ok(one.clone()),
            [] => refuse!(
                Code::NotFound,
                "there is no {which} in the trash; `holdfast volume trash list` shows what there is"
            ),
            _ => {
                let ids: Vec<String> = found.iter().map(|trashed| trashed.id().to_string()).collect();
                refuse!(
                    Code::State,
                    "several volumes named {which} are in the trash; say which by its id: {}",
                    ids.join(", ")
                )
            }
        }
    }

    pub(super) fn restore(&self, which: &str, new_name: Option<&str>) -> Result<VolumeInfo> {
        let trashed = self.find_trashed(which)?;
        let name = new_name.unwrap_or(&trashed.record.name);
        check_name(name)?;
        self.drop_orphan(name)?;
        // While it is cared for here it bears another name.
        let volume = trashed.id();
        self.order(Order::LetGo { volume })?;
        self.catalog.restore(&trashed, name)?;
        logger::info(format_args!("volume {name} ({volume}) is back from the trash"));
        self.show(name)
    }

    /// One volume, or all; gives the names of what is gone for good.
    pub(super) fn empty_trash(&self, which: Option<&str>) -> Result<Vec<String>> {
        let chosen = match which {
            Some(which) => vec![self.find_trashed(which)?],
            None => self.catalog.trash()?,
        };
        let mut names = Vec::new();
        for trashed in chosen {
            if self.finish_off(&trashed)? {
                names.push(trashed.record.name.clone());
            } else if which.is_some() {
                refuse!(Code::Changed, "the trash was changed meanwhile; try again");
            }
        }
        Ok(names)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::catalog::Settings;
    use crate::host::catalog::What;
    use crate::host::meta::Meta;
    use holdfast_base::GridId;
    use holdfast_format::geometry::Layout;
    use holdfast_format::tier::Tiers;
    use holdfast_runtime::clock;
    use holdfast_runtime::meta::LocalStore;
    use std::sync::Arc;

    fn catalog() -> Catalog {
        let meta: Meta = Arc::new(LocalStore::in_memory(Arc::new(clock::now)));
        Catalog::new(meta, GridId(1), "a")
    }

    fn make(catalog: &Catalog, name: &str) -> Entry {
        let what = What::guests(1 << 30, Layout::DEFAULT, Tiers::default());
        catalog.create(name, what, (Settings::default(), None), None, None).unwrap().unwrap()
    }

    #[test]
    fn a_name_is_free_at_once_and_comes_back_where_nobody_has_it() {
        let catalog = catalog();
        let first = make(&catalog, "vm");
        catalog.claim_export(&first, false).unwrap();
        catalog.throw_away(&first, 7).unwrap();
        assert!(catalog.find("vm").is_err() && catalog.exported().unwrap().is_empty());
        assert!(catalog.claim_export(&first, true).unwrap_err().to_string().contains("was deleted meanwhile"));
        assert!(catalog.all().unwrap().is_empty());
        let kept: Vec<String> = catalog.all_kept_strictly().unwrap().iter().map(|e| e.name().to_string()).collect();
        assert_eq!(kept, [name_in_trash("vm", first.root.volume)], "its data are cared for");
        assert!(check_name(&kept[0]).is_err(), "under a name that no volume can have");
        let second = make(&catalog, "vm");
        assert_ne!(second.root.volume, first.root.volume);
        let trashed = catalog.trash().unwrap().remove(0);
        assert!(catalog.restore(&trashed, "vm").unwrap_err().to_string().contains("--as NEW"));
        catalog.restore(&trashed, "vm-old").unwrap();
        let back = catalog.find("vm-old").unwrap();
        assert_eq!((back.root.volume, back.served_by.clone()), (first.root.volume, None));
        assert_eq!(back.name(), "vm-old");
        assert!(back.root.epoch > first.root.epoch, "whoever has it open under the former name is deposed");
        assert!(catalog.trash().unwrap().is_empty());
        assert!(catalog.restore(&trashed, "other").unwrap_err().to_string().contains("not in the trash any more"));
        catalog.throw_away(&second, 0).unwrap();
        catalog.restore(&catalog.trash().unwrap()[0], "vm").unwrap();
        assert_eq!(
            catalog.find("vm").unwrap().root.epoch,
            second.root.epoch,
            "under its own name nothing else changes"
        );
    }

    #[test]
    fn of_restoring_and_emptying_one_finds_nothing() {
        let catalog = catalog();
        catalog.throw_away(&make(&catalog, "vm"), 0).unwrap();
        let trashed = catalog.trash().unwrap().remove(0);
        catalog.restore(&trashed, "vm").unwrap();
        assert!(!catalog.empty(&trashed).unwrap());
        assert!(catalog.deleting().unwrap().is_empty() && catalog.find("vm").is_ok());
        catalog.throw_away(&catalog.find("vm").unwrap(), 0).unwrap();
        let again = catalog.trash().unwrap().remove(0);
        assert!(!catalog.empty(&trashed).unwrap(), "it is another stay");
        assert!(catalog.empty(&again).unwrap());
        assert!(catalog.restore(&again, "vm").is_err());
        assert_eq!(catalog.deleting().unwrap()[0].name, "vm");
        assert_eq!(catalog.kept_entry(again.id()).unwrap().map(|entry| entry.root.volume), None);
    }
}
