//! What a repository has: one manifest a backup.

use crate::object::{Name, name_of, open, seal};
use crate::parallel::in_order;
use crate::repository::stamp;
use crate::{Error, Manifest, Repository, Result};

const FOLDER: &str = "backups";

/// Of a name of 64 digits, what people type.
const SHORT_DIGITS: usize = 8;

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Backup {
    /// `YYYYMMDD-HHMMSS-8 digits`, in UTC.
    pub id: String,
    /// Of its object.
    pub(crate) object: String,
    pub manifest: Manifest,
}

pub struct Catalogue {
    /// Oldest first.
    pub backups: Vec<Backup>,
    /// Ids of those whose manifest can't be read, and why.
    pub unreadable: Vec<(String, Error)>,
}

impl Catalogue {
    /// The backup with that id, or the latest of a volume with that name.
    ///
    /// # Errors
    /// There is none, or volumes with different ids have that name.
    pub fn find(&self, wanted: &str) -> Result<&Backup> {
        if let Some((_, why)) = self.unreadable.iter().find(|(id, _)| id == wanted) {
            return Err(Error::Damaged(format!("backup {wanted} can't be read: {why}")));
        }
        if let Some(backup) = self.backups.iter().find(|backup| backup.id == wanted) {
            return Ok(backup);
        }
        let named = || self.backups.iter().rev().filter(|backup| backup.manifest.source.volume == wanted);
        let Some(latest) = named().next() else {
            return Err(Error::NotFound(format!(
                "there is no backup {wanted}, and none of a volume of that name; `holdfast backup list` shows what there is"
            )));
        };
        let volume = latest.manifest.source.snapshot_id.volume;
        match named().any(|other| other.manifest.source.snapshot_id.volume != volume) {
            false => Ok(latest),
            true => Err(Error::Invalid(format!(
                "several volumes had the name {wanted}; take the id of a backup, from `holdfast backup list`"
            ))),
        }
    }

    /// # Errors
    /// A manifest can't be read.
    pub fn all_readable(self) -> Result<Vec<Backup>> {
        match self.unreadable.into_iter().next() {
            None => Ok(self.backups),
            Some((id, why)) => Err(Error::Damaged(format!(
                "backup {id} can't be read ({why}), so nobody knows which chunks it needs; `holdfast backup delete` of it \
                 gives it up"
            ))),
        }
    }
}

impl Repository {
    /// # Errors
    /// The store can't be read.
    pub fn catalogue(&self) -> Result<Catalogue> {
        let mut objects: Vec<String> = self.store.list(FOLDER)?.into_iter().map(|found| found.name).collect();
        objects.sort_unstable();
        let mut catalogue = Catalogue { backups: Vec::new(), unreadable: Vec::new() };
        let read = |object: String| {
            let outcome = self.manifest(&object);
            (object, outcome)
        };
        in_order(objects, read, |(object, outcome)| {
            let id = id_of(&object);
            match outcome {
                Ok(Some(manifest)) => catalogue.backups.push(Backup { id, object, manifest }),
                // Deleted meanwhile.
                Ok(None) => {}
                Err(why @ Error::Store(_)) => return Err(why),
                Err(why) => catalogue.unreadable.push((id, why)),
            }
            Ok(())
        })?;
        catalogue.backups.sort_by_key(|backup| backup.manifest.source.taken_ms);
        Ok(catalogue)
    }

    fn manifest(&self, object: &str) -> Result<Option<Manifest>> {
        let name = object.rsplit('-').next().and_then(|digits| digits.parse::<Name>().ok());
        let name = name.ok_or_else(|| Error::Damaged("its name is none of a backup".to_string()))?;
        let Some(bytes) = self.store.get(object)? else { return Ok(None) };
        Manifest::parse(&open(self.key.as_ref(), &name, bytes)?).map(Some)
    }

    /// From here on the backup is there.
    pub(crate) fn put_manifest(&self, manifest: Manifest) -> Result<Backup> {
        let text = serde_json::to_vec(&manifest).expect("plain fields");
        let name = name_of(self.key.as_ref(), &text);
        let object = format!("{FOLDER}/{}-{name}", stamp(manifest.source.taken_ms));
        let mut bytes = Vec::new();
        seal(self.key.as_ref(), &name, &text, &mut bytes);
        self.store.put(&object, &bytes)?;
        self.store.settle()?;
        Ok(Backup { id: id_of(&object), object, manifest })
    }

    /// Takes backups out of the catalogue; [`crate::prune()`] frees what only they needed.
    ///
    /// # Errors
    /// One of them is not there: then none is taken out.
    pub fn delete(&self, ids: &[String]) -> Result<()> {
        let objects: Vec<String> = self.store.list(FOLDER)?.into_iter().map(|found| found.name).collect();
        let find = |id: &String| {
            let found = objects.iter().find(|object| id_of(object) == *id);
            found.ok_or_else(|| {
                Error::NotFound(format!("there is no backup {id}; `holdfast backup list` shows what there is"))
            })
        };
        let found: Vec<&String> = ids.iter().map(find).collect::<Result<_>>()?;
        found.into_iter().try_for_each(|object| self.store.delete(object))?;
        self.store.settle()
    }
}

fn id_of(object: &str) -> String {
    let name = object.strip_prefix(FOLDER).map_or(object, |rest| rest.trim_start_matches('/'));
    match name.rsplit_once('-') {
        Some((time, digits)) => format!("{time}-{}", digits.get(..SHORT_DIGITS).unwrap_or(digits)),
        None => name.to_string(),
    }
}
