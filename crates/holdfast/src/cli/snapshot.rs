//! `holdfast snapshot`: take, list, delete, roll back.

use super::format::{print, print_json, print_table, table};
use crate::client;
use crate::grid::layout::GridDir;
use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use holdfast_api::{Code, Request, Shares, SnapshotInfo, VolumeInfo, refuse};
use holdfast_base::size::Size;
use holdfast_format::schedule::{Keep, ScheduleRecord, Span};
use serde_json::json;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    holdfast snapshot create vm1 monday\n  \
    holdfast snapshot create db monday --with db-log --with db-temp     of all three as at one instant\n  \
    holdfast snapshot list vm1\n  \
    qemu-img convert -n \"nbd+unix:///vm1@monday?socket=…\" backup.raw     read it, like any export\n  \
    holdfast snapshot rollback vm1 monday      with nobody connected to vm1\n  \
    holdfast volume clone vm1@monday vm2       writable, and begins with what the snapshot holds\n  \
    holdfast snapshot schedule vm1 --every 1h --keep 24h,7d,4w\n  \
    holdfast snapshot delete vm1 monday\n\n\
    A snapshot holds what was completed when it was taken, in order, as a power cut would leave it.\n\
    It costs the space of what is overwritten from then on. `list` tells what each shows (referenced) and what nobody else\n\
    does (exclusive: about what its deletion returns; if two clones stand on it, when one of them goes). Both are counted in\n\
    the background, when snapshots change and every ten minutes.\n\
    Snapshots of a group (--with) hold together what could have been at one instant: of two writes, the second issued when\n\
    the first was answered, never only the second, on whatever volume. For that moment answers to writes wait.\n\
    Either all are taken, or none.")]
pub struct SnapshotArgs {
    #[command(subcommand)]
    action: SnapshotAction,
}

#[derive(Subcommand, Debug)]
enum SnapshotAction {
    /// Take a snapshot of a volume in service; clients read it as the export VOLUME@NAME
    Create {
        volume: String,
        name: String,
        /// Take one of this volume, too, as at the same instant; may be given several times
        #[arg(long, value_name = "VOLUME")]
        with: Vec<String>,
    },
    /// The snapshots of a volume in service, oldest first
    List { volume: String },
    /// Make a volume what its snapshot is; what was written since is lost, other snapshots stay
    Rollback { volume: String, name: String },
    /// Take snapshots of a volume in service by schedule, as auto-DATE-TIME (UTC)
    Schedule {
        volume: String,
        /// Between two snapshots: a number and s, m, h, d or w
        #[arg(long, required_unless_present = "off")]
        every: Option<Span>,
        /// What is kept of them: of each of the last 24 hours, 7 days and 4 weeks that have any, the newest
        #[arg(long, default_value = "24h,7d,4w")]
        keep: Keep,
        /// Take no more; those that are there stay
        #[arg(long, conflicts_with = "every")]
        off: bool,
    },
    /// Delete a snapshot; the space that only it holds returns in the background
    Delete { volume: String, name: String },
}

pub fn run(args: SnapshotArgs, dir: &GridDir, json: bool) -> Result<()> {
    match args.action {
        SnapshotAction::Create { volume, name, with } if with.is_empty() => create(dir, volume, &name, json),
        SnapshotAction::Create { volume, name, with } => create_group(dir, volume, with, &name, json),
        SnapshotAction::List { volume } => {
            let volume = client::live_volume(dir, &volume)?;
            super::volume::warn_of(&volume);
            let snapshots = snapshots(&volume)?;
            if json { print_json(&snapshots) } else { print_list(&volume.name, snapshots) }
        }
        SnapshotAction::Rollback { volume, name } => {
            let request = Request::SnapshotRollback { volume, name: name.clone() };
            let volume = client::volume(dir, &request)?;
            let text = format!("volume {} is as it was at snapshot {name}", volume.name);
            if json { print_json(&volume) } else { print(text) }
        }
        SnapshotAction::Schedule { volume, every, keep, off: _ } => {
            let schedule = every.map(|every| ScheduleRecord::new(every, keep));
            let text = match &schedule {
                Some(s) => format!("volume {volume} gets a snapshot every {}; kept are {}", s.every, s.keep),
                None => format!("volume {volume} gets no more snapshots by schedule"),
            };
            client::done(dir, &Request::VolumeSchedule { name: volume, schedule: schedule.clone() })?;
            if json { print_json(&schedule) } else { print(text) }
        }
        SnapshotAction::Delete { volume, name } => {
            client::done(dir, &Request::SnapshotDelete { volume: volume.clone(), name: name.clone() })?;
            let text = format!("snapshot {name} of volume {volume} is deleted; its space returns in the background");
            if json { print_json(&json!({ "name": name, "done": true })) } else { print(text) }
        }
    }
}

fn create(dir: &GridDir, volume: String, name: &str, json: bool) -> Result<()> {
    let volume = client::volume(dir, &Request::SnapshotCreate { volume, name: name.to_string() })?;
    let snapshot = taken(&volume, name)?;
    if json { print_json(snapshot) } else { print(taken_text(&volume, snapshot)) }
}

fn create_group(dir: &GridDir, volume: String, with: Vec<String>, name: &str, json: bool) -> Result<()> {
    let volumes = std::iter::once(volume).chain(with).collect();
    let volumes = client::snapshot_group(dir, &Request::SnapshotGroup { volumes, name: name.to_string() })?;
    let mut shown = Vec::with_capacity(volumes.len());
    for volume in &volumes {
        shown.push((volume, taken(volume, name)?));
    }
    if json {
        let objects: Vec<_> = shown.iter().map(|(v, s)| json!({ "volume": v.name, "snapshot": s })).collect();
        print_json(&objects)
    } else {
        let lines: Vec<String> = shown.iter().map(|(volume, snapshot)| taken_text(volume, snapshot)).collect();
        print(lines.join("\n"))
    }
}

fn taken<'a>(volume: &'a VolumeInfo, name: &str) -> Result<&'a SnapshotInfo> {
    let found = snapshots(volume)?.iter().find(|s| s.name == name);
    found.with_context(|| {
        format!(
            "snapshot {name} of volume {0} was deleted by somebody meanwhile; `holdfast snapshot list {0}` shows what \
             there is",
            volume.name
        )
    })
}

fn taken_text(volume: &VolumeInfo, snapshot: &SnapshotInfo) -> String {
    let uri = snapshot.uris.first().map_or(String::new(), |uri| format!("; read it at {uri}"));
    format!("snapshot {} of volume {} is taken{uri}", snapshot.name, volume.name)
}

fn snapshots(volume: &VolumeInfo) -> Result<&[SnapshotInfo]> {
    match &volume.live {
        Some(live) => Ok(&live.snapshots),
        None => refuse!(
            Code::State,
            "volume {0} is {1}, and its snapshots are not known; `holdfast volume export {0}`",
            volume.name,
            volume.state
        ),
    }
}

fn print_list(volume: &str, snapshots: &[SnapshotInfo]) -> Result<()> {
    if snapshots.is_empty() {
        return print(format_args!(
            "no snapshots of {volume} yet; take one with `holdfast snapshot create {volume} NAME`"
        ));
    }
    let mut rows = table(&["SNAPSHOT", "AGE", "SIZE", "REFERENCED", "EXCLUSIVE", "READ AT"], &[1, 2, 3, 4]);
    for snapshot in snapshots {
        rows.add_row([
            snapshot.name.clone(),
            age(snapshot.created_ms),
            Size(snapshot.size_bytes).to_string(),
            share(snapshot.shares, |s| s.referenced_bytes),
            share(snapshot.shares, |s| s.exclusive_bytes),
            snapshot.uris.first().cloned().unwrap_or_default(),
        ]);
    }
    print_table(&rows)
}

/// Counted in the background: not there yet for what was just made.
pub fn share(shares: Option<Shares>, of: fn(&Shares) -> u64) -> String {
    shares.map_or("-".to_string(), |shares| Size(of(&shares)).to_string())
}

fn age(created_ms: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let created = Duration::from_millis(created_ms);
    let seconds = now.abs_diff(created).as_secs();
    let age = match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    };
    // The clock was wrong when it was taken, or is now.
    if created > now && seconds >= 120 { format!("{age} ahead") } else { age }
}
