//! `holdfast backup`: copies of volumes in a repository, which is read without a grid.

mod create;
mod restore;

use super::format::{print, print_json, print_table, table};
use super::progress::{Progress, Unit};
use crate::grid::layout::GridDir;
use anyhow::Result;
use clap::{Args, Subcommand};
use holdfast_api::{Code, Error, refuse};
use holdfast_backup::{Backup, Pruned, Repository, Verified, key_file, prune, verify};
use holdfast_base::size::Size;
use holdfast_format::schedule::Keep;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::Mutex;

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    holdfast backup init /mnt/nas/holdfast --key-file /etc/holdfast/backup.key\n  \
    holdfast backup create /mnt/nas/holdfast --all\n  \
    holdfast backup list /mnt/nas/holdfast\n  \
    holdfast backup restore /mnt/nas/holdfast vm1 vm1-again\n  \
    holdfast backup restore /mnt/nas/holdfast vm1 --image vm1.raw\n  \
    holdfast backup prune /mnt/nas/holdfast --keep 7d,4w\n  \
    holdfast backup verify /mnt/nas/holdfast\n\n\
    REPOSITORY is a directory, or s3:https://HOST[:PORT]/BUCKET[/PREFIX] with AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and \
    AWS_REGION in the environment. BACKUP is an id of `list`, or the name of a volume: its latest. `holdfast-restore` does the \
    same without a grid.")]
pub struct BackupArgs {
    #[command(flatten)]
    key: KeyFile,
    #[command(subcommand)]
    action: BackupAction,
}

#[derive(Args, Debug)]
struct KeyFile {
    /// The key of an encrypted repository: 32 bytes or 64 hexadecimal digits, to be read by nobody else (`openssl rand -hex 32`).
    /// Without it no backup can be read: keep a copy elsewhere
    #[arg(long, global = true, env = "HOLDFAST_BACKUP_KEY_FILE", value_name = "FILE")]
    key_file: Option<PathBuf>,
}

impl KeyFile {
    fn open(&self, place: &str) -> Result<Repository> {
        let key = self.key_file.as_deref().map(key_file::read).transpose().map_err(told)?;
        Repository::open(place, key).map_err(told)
    }
}

#[derive(Subcommand, Debug)]
enum BackupAction {
    /// Make a repository of an empty place; encrypted if --key-file is given, for good
    Init { repository: String },
    /// Back volumes up: what changed since their last backup there is read, what is not there yet is stored
    Create(create::Create),
    /// Backups, oldest first
    List {
        repository: String,
        /// Only of this volume
        volume: Option<String>,
    },
    /// Make a volume, or a raw image, of a backup
    Restore(restore::Restore),
    /// Read all that backups need, and say what is damaged
    Verify {
        repository: String,
        /// Look only whether all is there
        #[arg(long)]
        quick: bool,
        /// Put what is damaged aside: the next backup of the same bytes stores them anew, and mends older ones
        #[arg(long)]
        set_aside: bool,
    },
    /// Delete backups that no rule keeps, and what no backup needs any more
    Prune {
        repository: String,
        /// Of each volume: of each of the last 7 days and 4 weeks that have any, the newest. Without it all backups stay
        #[arg(long, value_name = "RULES")]
        keep: Option<Keep>,
        /// Only say what would go
        #[arg(long)]
        dry_run: bool,
    },
    /// Delete backups; `prune` returns their space
    Delete {
        repository: String,
        #[arg(required = true, value_name = "ID")]
        ids: Vec<String>,
    },
}

/// Only some of it asks a grid.
pub fn run(args: BackupArgs, grid: Result<GridDir>, json: bool) -> Result<()> {
    let BackupArgs { key, action } = args;
    match action {
        BackupAction::Init { repository } => {
            let key = key.key_file.as_deref().map(key_file::read).transpose().map_err(told)?;
            let made = Repository::init(&repository, key).map_err(told)?;
            if json {
                return print_json(made.about());
            }
            let how = match made.about().key {
                Some(_) => "encrypted; keep a copy of its key where this place and the grid can't be lost with it",
                None => "not encrypted",
            };
            print(format_args!("{repository} takes backups now, {how}"))
        }
        BackupAction::Create(create) => create.run(&key, &grid?, json),
        BackupAction::List { repository, volume } => list(&key.open(&repository)?, volume.as_deref(), json),
        BackupAction::Restore(restore) => restore.run(&key, grid, json),
        BackupAction::Verify { repository, quick, set_aside } => {
            run_verify(&key.open(&repository)?, quick, set_aside, json)
        }
        BackupAction::Prune { repository, keep, dry_run } => {
            let pruned = prune(&key.open(&repository)?, keep.as_ref(), dry_run).map_err(told)?;
            print_pruned(&pruned, dry_run, json)
        }
        BackupAction::Delete { repository, ids } => {
            key.open(&repository)?.delete(&ids).map_err(told)?;
            if json {
                return print_json(&json!({ "deleted": ids }));
            }
            let text = format!("deleted: {}; `holdfast backup prune {repository}` returns their space", ids.join(", "));
            print(text)
        }
    }
}

/// With the code that programs look at.
fn told(error: holdfast_backup::Error) -> anyhow::Error {
    use holdfast_backup::Error as Of;
    let code = match &error {
        Of::Invalid(_) => Code::Invalid,
        Of::NotFound(_) => Code::NotFound,
        Of::Exists(_) => Code::Exists,
        Of::Busy(_) => Code::InUse,
        Of::Damaged(_) => Code::Failed,
        Of::Store(_) => Code::Unavailable,
    };
    Error::new(code, error.to_string()).into()
}

fn value_of(backup: &Backup) -> Value {
    let Backup { id, manifest, .. } = backup;
    let source = &manifest.source;
    json!({ "id": id, "volume": source.volume, "volume_id": source.snapshot_id.volume.to_string(),
        "snapshot": source.snapshot, "taken_ms": source.taken_ms, "size_bytes": manifest.size_bytes,
        "data_bytes": manifest.data_bytes, "added_bytes": manifest.added_bytes, "layout": source.layout,
        "encrypted": source.encrypted })
}

fn list(repository: &Repository, volume: Option<&str>, json: bool) -> Result<()> {
    let catalogue = repository.catalogue().map_err(told)?;
    let wanted = |backup: &&Backup| volume.is_none_or(|volume| backup.manifest.source.volume == volume);
    let backups: Vec<&Backup> = catalogue.backups.iter().filter(wanted).collect();
    if json {
        let unreadable: Vec<Value> =
            catalogue.unreadable.iter().map(|(id, why)| json!({ "id": id, "why": why.to_string() })).collect();
        let backups: Vec<Value> = backups.into_iter().map(value_of).collect();
        return print_json(&json!({ "backups": backups, "unreadable": unreadable }));
    }
    let mut rows = table(&["BACKUP", "VOLUME", "SIZE", "DATA", "ADDED"], &[2, 3, 4]);
    for Backup { id, manifest, .. } in backups {
        let size = |bytes| Size(bytes).to_string();
        let volume = manifest.source.volume.clone();
        let (data, added) = (size(manifest.data_bytes), size(manifest.added_bytes));
        rows.add_row([id.clone(), volume, size(manifest.size_bytes), data, added]);
    }
    print_table(&rows)?;
    catalogue.unreadable.iter().try_for_each(|(id, why)| print(format_args!("{id} can't be read: {why}")))
}

fn run_verify(repository: &Repository, quick: bool, set_aside: bool, json: bool) -> Result<()> {
    let progress: Mutex<Option<Progress>> = Mutex::default();
    let tell = |done, all| {
        let mut progress = progress.lock().expect("nobody panics with it");
        progress.get_or_insert_with(|| Progress::begin("verifying", Unit::Of("objects"), all, json)).set(done);
    };
    let verified = verify(repository, quick, set_aside, tell).map_err(told)?;
    drop(progress);
    let Verified { backups, objects, read_bytes, damage, set_aside: aside } = &verified;
    if json {
        let damage: Vec<Value> = damage
            .iter()
            .map(|damage| json!({ "why": damage.why, "is_manifest": damage.is_manifest, "backups": damage.backups }))
            .collect();
        print_json(&json!({ "backups": backups, "objects": objects, "read_bytes": read_bytes, "damage": damage,
            "set_aside": aside }))?;
    } else {
        for damage in damage {
            print(format_args!("{}; needed by {}", damage.why, damage.backups.join(", ")))?;
        }
        let how = if quick { "are there".to_string() } else { format!("read, {}", Size(*read_bytes)) };
        print(format_args!("{backups} backups, {objects} objects {how}"))?;
    }
    if damage.is_empty() {
        return Ok(());
    }
    let place = repository.place();
    let lost: Vec<&str> = damage.iter().filter(|damage| damage.is_manifest).map(|damage| &*damage.backups[0]).collect();
    let mut advice = Vec::new();
    if !lost.is_empty() {
        advice.push(format!("`holdfast backup delete {place} {}` gives up what can't be read at all", lost.join(" ")));
    }
    if lost.len() < damage.len() {
        advice.push(match set_aside {
            true => "back the same volumes up now, then verify again".to_string(),
            false => format!(
                "`holdfast backup verify {place} --set-aside` lets the next backup store chunks anew, as far as volumes still have \
                 them"
            ),
        });
    }
    refuse!(Code::Failed, "{} things are damaged: {}", damage.len(), advice.join("; "))
}

fn print_pruned(pruned: &Pruned, is_dry: bool, json: bool) -> Result<()> {
    let Pruned { deleted, kept, freed_objects, freed_bytes, young_bytes } = pruned;
    if json {
        return print_json(&json!({ "deleted": deleted, "kept": kept, "freed_objects": freed_objects,
            "freed_bytes": freed_bytes, "young_bytes": young_bytes, "dry_run": is_dry }));
    }
    for id in deleted {
        print(format_args!("{} {id}", if is_dry { "would delete" } else { "deleted" }))?;
    }
    let would = if is_dry { "would return" } else { "returned" };
    let later = match young_bytes {
        0 => String::new(),
        young => format!("; {} more a day after they were written", Size(*young)),
    };
    print(format_args!("{kept} backups stay; {} {would}{later}", Size(*freed_bytes)))
}
