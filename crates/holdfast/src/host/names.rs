//! A volume's name: another one, and whether what bears it may be deleted.
//!
//! The name is in the root record and in `name/NAME`; one transaction changes both. The root's epoch rises with it, as by
//! an opening: whoever had the volume open under the former name has it no more. Whether it is protected stands with the name.

use super::catalog::{Catalog, Entry, SWAPS_MAX, check_name, decode, no_volume, put};
use super::control::ControlPlane;
use super::trash::renamed;
use crate::logger;
use anyhow::{Context, Result};
use holdfast_api::{Code, VolumeInfo, refuse};
use holdfast_base::MetaVersion;
use holdfast_format::meta::{NameRecord, encode, name_key};
use holdfast_format::root::{Root, root_key};
use holdfast_runtime::meta::{Commit, Compare, Write};

impl Catalog {
    /// What the name of a volume or clone says besides.
    pub(super) fn is_protected(&self, name: &str) -> Result<bool> {
        let key = name_key(name);
        let record = self.known.get(&key)?.map(|record| decode::<NameRecord>(&key, &record.value)).transpose()?;
        Ok(record.is_some_and(|record| record.protected))
    }

    pub fn set_protected(&self, name: &str, protected: bool) -> Result<()> {
        let key = name_key(name);
        self.update(&key, |found| {
            let found = found.ok_or_else(|| no_volume(name))?;
            let before: NameRecord = decode(&key, found)?;
            let after = NameRecord { protected, ..before.clone() };
            Ok((after != before).then(|| Some(encode(&after))))
        })
    }

    /// Gives a volume that nobody has open another name.
    pub fn rename(&self, entry: &Entry, name: &str) -> Result<()> {
        let (id, old) = (entry.root.volume, &entry.root.name);
        let lost = || format!("volume {old} was changed meanwhile; `holdfast volume list` shows what there is");
        for _ in 0..SWAPS_MAX {
            let (root_version, root) = self.get_now(&root_key(id))?;
            let root = Root::decode(&root.with_context(lost)?).context("the volume's root record is damaged")?;
            let (name_version, named) = self.get_now(&name_key(old))?;
            let named: NameRecord = decode(&name_key(old), &named.with_context(lost)?)?;
            if root.deleted || root.name != *old || named.volume != id.to_string() {
                refuse!(Code::Changed, "{}", lost());
            }
            let compares = [
                Compare { key: name_key(name), version: MetaVersion::ABSENT },
                Compare { key: root_key(id), version: root_version },
                Compare { key: name_key(old), version: name_version },
            ];
            let writes = [
                put(&root_key(id), renamed(&root, name).encode()),
                put(&name_key(name), encode(&named)),
                Write { key: name_key(old), value: None, lease: None },
            ];
            match self.meta.commit(&compares, &writes)? {
                Commit::Done(_) => return Ok(()),
                Commit::Conflict(found) if found[0].is_some() => {
                    refuse!(Code::Exists, "there is a volume {name} already, or one is being made; choose another name")
                }
                Commit::Conflict(_) => {}
            }
        }
        refuse!(Code::Changed, "volume {old} could not be renamed: others change it all the time; try again")
    }
}

impl ControlPlane {
    /// A volume that is in service here is closed for a moment. Not under the hands of clients: they would come back to a
    /// name that is not there.
    pub(super) fn rename(&self, old: &str, new: &str) -> Result<VolumeInfo> {
        check_name(new)?;
        self.check_no_stream(old)?;
        let entry = self.catalog.find(old)?;
        if entry.clone.is_some() {
            refuse!(
                Code::State,
                "{old} is a clone, a part of volume {}, and keeps its name; one that was made with --separate can be renamed",
                entry.root.name
            );
        }
        if old == new {
            return self.show(old);
        }
        if self.catalog.find(new).is_ok() {
            refuse!(Code::Exists, "there is a volume {new} already; choose another name");
        }
        self.drop_orphan(new)?;
        self.close(old, false, false, &format!("volume {old} keeps its name"))?;
        let renamed = self.catalog.rename(&entry, new);
        let name = if renamed.is_ok() { new } else { old };
        if renamed.is_ok() {
            logger::info(format_args!("volume {old} ({}) is called {new} now", entry.root.volume));
        }
        // In service it is again whatever came of that.
        let exported = if self.catalog.is_here(&entry) { self.export(name, false).map(drop) } else { Ok(()) };
        renamed?;
        exported.with_context(|| format!("the volume is called {new} now, and is not in service yet"))?;
        self.show(new)
    }

    pub(super) fn protect(&self, name: &str, protected: bool) -> Result<VolumeInfo> {
        self.catalog.find(name)?;
        self.catalog.set_protected(name, protected)?;
        self.show(name)
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

    #[test]
    fn a_volume_keeps_its_id_and_its_protection_under_another_name() {
        let meta: Meta = Arc::new(LocalStore::in_memory(Arc::new(clock::now)));
        let catalog = Catalog::new(meta, GridId(1), "a");
        let what = What::guests(1 << 30, Layout::DEFAULT, Tiers::default());
        let make = |name| catalog.create(name, what, (Settings::default(), None), None, None).unwrap().unwrap();
        let (vm, other) = (make("vm"), make("other"));
        catalog.set_protected("vm", true).unwrap();
        assert!(catalog.find("vm").unwrap().protected && !catalog.find("other").unwrap().protected);
        assert!(catalog.rename(&vm, "other").unwrap_err().to_string().contains("there is a volume other"));
        catalog.rename(&vm, "web").unwrap();
        let web = catalog.find("web").unwrap();
        assert_eq!((web.root.volume, web.name(), web.protected), (vm.root.volume, "web", true));
        assert!(web.root.epoch > vm.root.epoch);
        assert!(catalog.find("vm").is_err() && catalog.all().unwrap().len() == 2);
        assert!(catalog.rename(&vm, "again").unwrap_err().to_string().contains("changed meanwhile"));
        assert!(catalog.throw_away(&web, 0).is_err(), "and is not deleted, whoever asks in the same moment");
        assert!(catalog.set_protected("vm", false).is_err());
        make("vm");
        assert_ne!(catalog.find("vm").unwrap().root.volume, other.root.volume);
    }
}
