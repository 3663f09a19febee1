//! Whether all that backups need is there and is right.

use crate::lock::{Kind, Lock};
use crate::object::{HEAD_BYTES, Name};
use crate::parallel::in_order;
use crate::{Backup, Error, Map, Repository, Result};
use std::collections::BTreeMap;

/// Something that can't be read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Damage {
    pub why: String,
    /// Of a backup itself: only deleting it helps. Else of a chunk or a page.
    pub is_manifest: bool,
    /// Ids of backups that need it.
    pub backups: Vec<String>,
}

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Verified {
    pub backups: usize,
    /// Chunks and pages.
    pub objects: u64,
    /// Plain bytes that were read.
    pub read_bytes: u64,
    pub damage: Vec<Damage>,
    /// Objects that were set aside, or are missing and marked so.
    pub set_aside: u64,
}

/// Reads every chunk that a backup needs; with `is_quick` looks only whether they are there. With `set_aside` what is
/// damaged is put where no backup finds it, so that the next backup of the same bytes stores them anew.
///
/// # Errors
/// The store can't be read, or somebody else is at work.
pub fn verify(repository: &Repository, is_quick: bool, set_aside: bool, tell: impl Fn(u64, u64)) -> Result<Verified> {
    let doing = "verifying";
    let lock = match set_aside {
        true => Some(Lock::take(&repository.store, Kind::Exclusive, doing)?),
        false => Lock::to_read(&repository.store, doing)?,
    };
    let catalogue = repository.catalogue()?;
    let mut verified = Verified { backups: catalogue.backups.len(), ..Verified::default() };
    for (id, why) in &catalogue.unreadable {
        verified.damage.push(Damage {
            why: format!("its manifest: {why}"),
            is_manifest: true,
            backups: vec![id.clone()],
        });
    }
    let mut bad: BTreeMap<Name, String> = BTreeMap::new();
    let mut names = Vec::new();
    for backup in &catalogue.backups {
        for_each_object(repository, backup, &mut |name| names.push(name), &mut |page, why| {
            drop(bad.insert(page, why))
        })?;
        names.sort_unstable();
        names.dedup();
    }
    let all = names.len() as u64;
    let look = |name: Name| {
        let found = match is_quick {
            true => repository.store.stat(&name.chunk()).map(|found| {
                // One that is shorter than its head is none.
                found.filter(|found| found.bytes >= HEAD_BYTES as u64).map(|_| 0)
            }),
            false => repository.chunk(&name).map(|bytes| Some(bytes.len() as u64)),
        };
        (name, found)
    };
    in_order(names, look, |(name, found)| {
        verified.objects += 1;
        tell(verified.objects, all);
        match found {
            Ok(Some(bytes)) => verified.read_bytes += bytes,
            Ok(None) => drop(bad.insert(name, format!("object {name} is missing"))),
            Err(Error::Damaged(why)) => drop(bad.insert(name, why)),
            Err(why) => return Err(why),
        }
        Ok(())
    })?;
    if !is_quick && lock.is_some() {
        forget_mended(repository, &bad)?;
    }
    let mut needed = needed_by(repository, &catalogue.backups, &bad)?;
    for (name, why) in bad {
        verified.damage.push(Damage { why, is_manifest: false, backups: needed.remove(&name).unwrap_or_default() });
        if let Some(lock) = lock.as_ref().filter(|_| set_aside) {
            lock.check()?;
            put_aside(repository, &name)?;
            verified.set_aside += 1;
        }
    }
    Ok(verified)
}

/// Pages and chunks of a backup. Of a page that can't be read `bad` hears.
fn for_each_object(
    repository: &Repository,
    backup: &Backup,
    show: &mut dyn FnMut(Name),
    bad: &mut dyn FnMut(Name, String),
) -> Result<()> {
    backup.manifest.pages.iter().flatten().for_each(|page| show(*page));
    let map = Map::of(&backup.manifest);
    for (at, page) in backup.manifest.pages.iter().enumerate().filter_map(|(at, page)| Some((at, (*page)?))) {
        match map.named_in(repository, at as u64) {
            Ok(named) => named.into_iter().for_each(|(_, name)| show(name)),
            Err(Error::Damaged(why)) => bad(page, why),
            Err(why) => return Err(why),
        }
    }
    Ok(())
}

/// Which backups need what is bad.
fn needed_by(
    repository: &Repository,
    backups: &[Backup],
    bad: &BTreeMap<Name, String>,
) -> Result<BTreeMap<Name, Vec<String>>> {
    let mut needed: BTreeMap<Name, Vec<String>> = BTreeMap::new();
    if bad.is_empty() {
        return Ok(needed);
    }
    for backup in backups {
        let mut show = |name: Name| {
            let of = needed.entry(name).or_default();
            if bad.contains_key(&name) && of.last() != Some(&backup.id) {
                of.push(backup.id.clone());
            }
        };
        for_each_object(repository, backup, &mut show, &mut |_, _| {})?;
        needed.retain(|_, backups| !backups.is_empty());
    }
    Ok(needed)
}

fn put_aside(repository: &Repository, name: &Name) -> Result<()> {
    let (object, is_read) = match repository.store.get(&name.chunk()) {
        Ok(object) => (object.unwrap_or_default(), true),
        Err(Error::Damaged(_)) => (Vec::new(), false),
        Err(why) => return Err(why),
    };
    repository.store.put(&name.damaged(), &object)?;
    repository.store.settle()?;
    // What can't be read now may be read later: it is only marked, and what is stored anew takes its place.
    if is_read { repository.store.delete(&name.chunk()) } else { Ok(()) }
}

/// What was set aside and has been stored anew since is damaged no more.
fn forget_mended(repository: &Repository, bad: &BTreeMap<Name, String>) -> Result<()> {
    for found in repository.store.list("damaged")? {
        let name = found.name.strip_prefix("damaged/").and_then(|digits| digits.parse::<Name>().ok());
        let Some(name) = name.filter(|name| !bad.contains_key(name)) else { continue };
        if repository.chunk(&name).is_ok() {
            repository.store.delete(&found.name)?;
        }
    }
    Ok(())
}
