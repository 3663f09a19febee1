//! Backups that no rule keeps, and chunks that no backup needs, are deleted.

use crate::lock::{Kind, Lock};
use crate::object::{Name, folder};
use crate::parallel::{WORKERS, in_order};
use crate::{Backup, Error, Map, Repository, Result};
use holdfast_base::VolumeId;
use holdfast_format::schedule::Keep;
use std::collections::BTreeMap;

/// A chunk that is younger may be of a backup that is being written by somebody whose lock is gone.
const YOUNG_MS: u64 = 24 * 3_600_000;

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Pruned {
    /// Ids, oldest first.
    pub deleted: Vec<String>,
    pub kept: usize,
    pub freed_objects: u64,
    pub freed_bytes: u64,
    /// Needed by nobody, and younger than a day: they go another time.
    pub young_bytes: u64,
}

/// Of each volume the backups that `keep` keeps stay, and always its latest. Without `keep` all stay, and only chunks
/// are looked at. With `is_dry` nothing is deleted.
///
/// # Errors
/// Somebody is at work; a backup can't be read, so that nobody knows what it needs: nothing is deleted then.
pub fn prune(repository: &Repository, keep: Option<&Keep>, is_dry: bool) -> Result<Pruned> {
    let lock = Lock::take(&repository.store, Kind::Exclusive, "pruning")?;
    let backups = repository.catalogue()?.all_readable()?;
    let mut pruned = Pruned::default();
    let (kept, superfluous): (Vec<Backup>, Vec<Backup>) = match keep {
        Some(keep) => split(backups, keep),
        None => (backups, Vec::new()),
    };
    pruned.kept = kept.len();
    pruned.deleted = superfluous.iter().map(|backup| backup.id.clone()).collect();
    // Before anything goes: what is kept can be followed.
    let mut needed: Vec<Name> = Vec::new();
    for backup in &kept {
        needed.extend(backup.manifest.pages.iter().flatten());
        Map::of(&backup.manifest).each(repository, |_, name| needed.push(name)).map_err(|why| match why {
            Error::Damaged(why) => Error::Damaged(format!(
                "backup {0} can't be followed ({why}), so nobody knows which chunks it needs; `holdfast backup verify \
                 --set-aside` and a new backup may mend it, `holdfast backup delete` of {0} gives it up",
                backup.id
            )),
            why => why,
        })?;
        needed.sort_unstable();
        needed.dedup();
    }
    if !is_dry {
        for backup in &superfluous {
            lock.check()?;
            repository.store.delete(&backup.object)?;
        }
        repository.store.settle()?;
        ["backups", "damaged", "locks"].into_iter().try_for_each(|folder| repository.store.sweep(folder))?;
    }
    for first in 0..=u8::MAX {
        lock.check()?;
        let mut garbage = Vec::new();
        for found in repository.store.list(&folder(first))? {
            let name = found.name.rsplit('/').next().and_then(|digits| digits.parse::<Name>().ok());
            // What has another name is not ours.
            let Some(name) = name.filter(|name| needed.binary_search(name).is_err()) else { continue };
            if lock.taken_ms().saturating_sub(found.written_ms) < YOUNG_MS {
                pruned.young_bytes += found.bytes;
                continue;
            }
            pruned.freed_objects += 1;
            pruned.freed_bytes += found.bytes;
            garbage.push(name);
        }
        if !is_dry {
            repository.store.sweep(&folder(first))?;
            // Who stood still and lost its lock meanwhile deletes no more than is under way.
            for batch in garbage.chunks(WORKERS) {
                lock.check()?;
                in_order(batch, |name| repository.store.delete(&name.chunk()), |done| done)?;
            }
        }
    }
    Ok(pruned)
}

/// Those that stay, and those that go; both oldest first. A clone is a part of its volume and has its id, so the name
/// counts, too: a volume that was renamed is another one here.
fn split(backups: Vec<Backup>, keep: &Keep) -> (Vec<Backup>, Vec<Backup>) {
    let of = |backup: &Backup| {
        let source = &backup.manifest.source;
        (source.snapshot_id.volume, source.volume.clone())
    };
    let mut taken_ms: BTreeMap<(VolumeId, String), Vec<u64>> = BTreeMap::new();
    for backup in backups.iter().rev() {
        taken_ms.entry(of(backup)).or_default().push(backup.manifest.source.taken_ms);
    }
    let mut kept: BTreeMap<_, _> = taken_ms.into_iter().map(|(of, taken_ms)| (of, keep.keeps(&taken_ms))).collect();
    backups.into_iter().partition(|backup| {
        let latest_first = kept.get_mut(&of(backup)).expect("each volume was counted");
        latest_first.pop().expect("each backup was counted")
    })
}
