//! `holdfast space`: where the grid's bytes are.

use super::format::{print, print_json, print_table, table};
use super::trash::volumes;
use crate::client;
use crate::grid::layout::GridDir;
use crate::host::DEVICES_SHOWN_WITHIN;
use crate::overview::gather;
use crate::resources;
use anyhow::Result;
use clap::{Args, Subcommand};
use holdfast_api::{Code, GridStatus, HostState, SpaceUse, VolumeSpace, promised_of, refuse, takers};
use holdfast_base::size::Size;
use holdfast_format::geometry::Layout;
use holdfast_volume::Claim;
use holdfast_volume::claims::writable_beside;
use holdfast_volume::protect::{Protect, bears, choose, lacks};
use serde::Serialize;

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    holdfast space          what can still be written\n  \
    holdfast space why      where every byte is; the lines of a part add up to it\n\n\
    Takes a second: devices are asked anew. While data is written the last line may be below zero.")]
pub struct SpaceArgs {
    #[command(subcommand)]
    action: Option<SpaceAction>,
}

#[derive(Subcommand, Debug)]
enum SpaceAction {
    /// Where every byte is
    Why,
}

/// Bytes of all devices together. `raw` is the sum of what stands below it, and so is `used`.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Space {
    pub raw_bytes: u64,
    /// Journals, tables and superblocks.
    pub overhead_bytes: u64,
    pub used_bytes: u64,
    pub reserve_bytes: u64,
    /// Not promised to guests either: what is dead may take it.
    pub spare_bytes: u64,
    /// What fixed volumes own and have not used yet, by volume, as far as it is there.
    pub set_aside: Vec<(String, u64)>,
    /// What they own and is not there: devices are away, or were taken out.
    pub missing_bytes: u64,
    pub free_bytes: u64,
    /// At the rate of the last week; `null` while that is unknown, or where nothing points to it.
    pub days_to_full: Option<f64>,
    /// Of `used`: dead, with its copies and parity, and cleaned when room is needed.
    pub reclaimable_bytes: u64,
    pub used: Used,
    /// In the layouts that nodes and devices allow.
    pub writable: Vec<Writable>,
}

/// What guests of thin volumes can write of `free` in a layout.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Writable {
    pub layout: String,
    pub bytes: u64,
    /// Of what devices hold, what guests see.
    pub efficiency: f64,
    /// What may be lost at a time.
    pub bears: String,
}

impl Writable {
    fn of(layout: Layout, bytes: u64) -> Writable {
        Writable { layout: layout.to_string(), bytes, efficiency: efficiency(layout), bears: bears(layout) }
    }
}

/// Of what devices hold, what guests see.
pub fn efficiency(layout: Layout) -> f64 {
    f64::from(layout.data_shards()) / f64::from(layout.shard_count())
}

/// Fixed volumes, with their layouts and what is set aside for them; also for those in the trash.
fn set_aside(status: &GridStatus) -> impl Iterator<Item = (String, &str, u64)> {
    let served = status.volumes.iter().map(|v| (v.name.clone(), v.layout.as_str(), v.set_aside_bytes));
    let trash = status.trash.iter();
    let trash = trash.map(|t| (format!("{} (in the trash)", t.name), t.layout.as_str(), t.set_aside_bytes));
    served.chain(trash).filter(|(_, _, bytes)| *bytes > 0)
}

/// What guests can write in a layout beside what fixed volumes own.
pub fn writable_now(status: &GridStatus, layout: Layout) -> u64 {
    let free: Vec<Vec<u64>> = status.nodes.iter().map(|n| promised_of(&n.devices)).collect();
    let own = |(_, layout, bytes): (String, &str, u64)| {
        let layout = layout.parse::<Layout>().ok()?;
        let width = if layout.is_on_devices() { 1 } else { layout.width() };
        Some(Claim { width, shard_bytes: bytes / u64::from(width) })
    };
    let claims: Vec<Claim> = set_aside(status).filter_map(own).collect();
    writable_beside(&free, &claims, layout)
}

/// Layouts that nodes and devices allow, of the usual ones, and of those that rules choose.
fn layouts_of(status: &GridStatus) -> Vec<Layout> {
    let by_node: Vec<usize> = status.nodes.iter().map(|node| takers(&node.devices).count()).collect();
    let mut layouts: Vec<Layout> = LAYOUTS.iter().map(|layout| layout.parse().expect("a layout")).collect();
    let chosen: Vec<Layout> = Protect::ALL.iter().filter_map(|rule| choose(*rule, &by_node).ok()).collect();
    layouts.extend(chosen.into_iter().filter(|layout| !LAYOUTS.contains(&layout.to_string().as_str())));
    layouts.dedup();
    layouts.retain(|layout| lacks(*layout, &by_node).is_none());
    layouts
}

/// Layouts that `space` tells of.
const LAYOUTS: [&str; 10] = [
    "mirror:2@device",
    "parity:2+1@device",
    "mirror:2",
    "mirror:3",
    "parity:2+1",
    "parity:3+1",
    "parity:4+2",
    "nested-mirror",
    "nested-parity:2+1",
    "nested-parity:3+1",
];

#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Used {
    /// What a volume and its clones show, by volume.
    pub data: Vec<(String, u64)>,
    /// What of them only snapshots show, or did until they were deleted, by volume.
    pub snapshots: Vec<(String, u64)>,
    pub dead_bytes: u64,
    /// What only separate clones may need, by the volume that holds it.
    pub kept: Vec<(String, u64)>,
    /// Between packed blocks.
    pub padding_bytes: u64,
    pub redundancy_bytes: u64,
    pub metadata_bytes: u64,
    /// What is not stored, since blocks are packed, by volume, and how much of the volume's data is not packed. In no sum.
    pub saved: Vec<Saved>,
    /// What volumes show of a store or an origin, which holds it. In no sum.
    pub elsewhere: Vec<(String, u64)>,
    /// What deleted volumes hold that can be had back, as far as it is known, and how many they are.
    pub trash_bytes: u64,
    pub trash_volumes: usize,
    /// Headers of shards, volumes that are not in service, and what is on its way to or from devices.
    pub other_bytes: i64,
}

/// Of a volume of which something is packed.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Saved {
    pub volume: String,
    pub shown_bytes: u64,
    /// With what lies between packed blocks.
    pub stored_bytes: u64,
    pub plain_bytes: u64,
}

impl Saved {
    /// Nothing of a volume of which nothing is packed.
    fn of(volume: &str, space: &SpaceUse) -> Option<Saved> {
        let SpaceUse { data_bytes, padding_bytes, shown_bytes, plain_bytes, .. } = *space;
        let stored_bytes = data_bytes + padding_bytes;
        let saved = Saved { volume: volume.to_string(), shown_bytes, stored_bytes, plain_bytes };
        (plain_bytes < shown_bytes).then_some(saved)
    }

    fn text(&self) -> String {
        let ratio = self.stored_bytes as f64 / self.shown_bytes.max(1) as f64;
        let (shown, stored, plain) = (Size(self.shown_bytes), Size(self.stored_bytes), Size(self.plain_bytes));
        format!("{shown} of data take {stored} ({ratio:.2}); {plain} of them are not packed")
    }
}

/// What packing does to a volume's data, before copies and parity; nothing where none of them are packed.
pub fn packed_text(space: &SpaceUse) -> Option<String> {
    Saved::of("", space).map(|saved| saved.text())
}

/// The same of all volumes together that have something packed.
pub fn all_packed_text(volumes: impl Iterator<Item = VolumeSpace>) -> Option<String> {
    let saved = volumes.filter_map(|of| Saved::of("", &of.space));
    let sum = |a: Saved, b: Saved| Saved {
        shown_bytes: a.shown_bytes + b.shown_bytes,
        stored_bytes: a.stored_bytes + b.stored_bytes,
        plain_bytes: a.plain_bytes + b.plain_bytes,
        ..a
    };
    saved.reduce(sum).map(|saved| saved.text())
}

pub fn run(args: &SpaceArgs, dir: &GridDir, json: bool) -> Result<()> {
    let state = gather(dir)?.host.state;
    if state != HostState::Up {
        refuse!(Code::Unavailable, "the host is {state}, and only it knows; `holdfast grid up`");
    }
    // What nodes told of their devices until now may be older than what volumes tell.
    std::thread::sleep(DEVICES_SHOWN_WITHIN);
    let status = gather(dir)?;
    let (held, silent) = match client::space(dir) {
        // A host of an older release knows its own volumes alone.
        Err(error) if format!("{error:#}").contains("unknown variant") => {
            (status.volumes.iter().filter_map(resources::space_of).collect(), Vec::new())
        }
        told => told?,
    };
    let space = account(&status, &held);
    if !json {
        for host in silent {
            print(format_args!("host {host} does not say what its volumes hold: that counts as other things"))?;
        }
    }
    match (json, &args.action) {
        (true, _) => print_json(&space),
        (false, Some(SpaceAction::Why)) => print_why(&space),
        (false, None) => print_short(&space),
    }
}

/// Of devices that nobody has told of, for they are away, nothing but what is known of others counts.
fn account(status: &GridStatus, held: &[VolumeSpace]) -> Space {
    let devices = || status.nodes.iter().flat_map(|n| &n.devices);
    let is_told = |id: &String| devices().any(|device| device.device == *id && device.capacity_bytes > 0);
    let configured = status.nodes.iter().flat_map(|node| &node.configured).filter(|device| is_told(&device.device));
    let raw_bytes: u64 = configured.map(|device| device.size_bytes).sum();
    let sum = |f: fn(&holdfast_api::DeviceInfo) -> u64| devices().map(f).sum::<u64>();
    let (capacity, free) = (sum(|d| d.capacity_bytes), sum(|d| d.free_bytes));
    let (reserve_bytes, mut spare_bytes) = (sum(|d| d.reserve_bytes), sum(|d| d.spare_bytes));
    let mut used = Used::default();
    for live in held {
        let (volume, held_bytes) = (live, live.held_by_snapshots_bytes);
        used.data.push((volume.name.clone(), live.space.data_bytes.saturating_sub(held_bytes)));
        if held_bytes > 0 {
            used.snapshots.push((volume.name.clone(), held_bytes));
        }
        if live.space.kept_bytes > 0 {
            used.kept.push((volume.name.clone(), live.space.kept_bytes));
        }
        if live.space.elsewhere_bytes > 0 {
            used.elsewhere.push((volume.name.clone(), live.space.elsewhere_bytes));
        }
        used.dead_bytes += live.space.dead_bytes;
        used.padding_bytes += live.space.padding_bytes;
        used.redundancy_bytes += live.space.redundancy_bytes;
        used.metadata_bytes += live.space.metadata_bytes;
    }
    let data: u64 = used.data.iter().chain(&used.snapshots).chain(&used.kept).map(|(_, bytes)| bytes).sum();
    used.trash_volumes = status.trash.len();
    used.trash_bytes = status.trash.iter().map(|trashed| trashed.taken_bytes).sum();
    used.saved = held.iter().filter_map(|held| Saved::of(&held.name, &held.space)).collect();
    let beside = used.padding_bytes + used.redundancy_bytes + used.metadata_bytes;
    let known = data + used.dead_bytes + beside + used.trash_bytes;
    used.other_bytes = (capacity - free) as i64 - known as i64;
    let mut free_bytes = free - reserve_bytes - spare_bytes;
    let mut aside = Vec::new();
    let mut missing_bytes = 0;
    for (name, _, bytes) in set_aside(status) {
        let there = bytes.min(free_bytes + spare_bytes);
        // What fixed volumes own may lie in what is not promised to others.
        let of_spare = there.saturating_sub(free_bytes);
        (free_bytes, spare_bytes) = (free_bytes - (there - of_spare), spare_bytes - of_spare);
        missing_bytes += bytes - there;
        aside.push((name, there));
    }
    let writable = |layout: Layout| Writable::of(layout, writable_now(status, layout));
    Space {
        raw_bytes,
        overhead_bytes: raw_bytes.saturating_sub(capacity),
        used_bytes: capacity - free,
        reserve_bytes,
        spare_bytes,
        set_aside: aside,
        missing_bytes,
        free_bytes,
        days_to_full: status.days_to_full,
        reclaimable_bytes: held.iter().map(|volume| volume.reclaimable_bytes).sum(),
        used,
        writable: layouts_of(status).into_iter().map(writable).collect(),
    }
}

/// Shown from so many days on.
const ALARM_DAYS: f64 = 30.0;

pub fn full_soon(days: Option<f64>) -> Option<String> {
    let days = days.filter(|days| *days < ALARM_DAYS)?;
    let when = match days.round() as u64 {
        0 => "today".to_string(),
        1 => "in about a day".to_string(),
        days => format!("in about {days} days"),
    };
    Some(format!(
        "devices are full {when} if what is taken grows as in the last week; free space, or add devices (`holdfast device \
         add NODE`)"
    ))
}

fn print_short(space: &Space) -> Result<()> {
    print(format_args!(
        "{} on devices: {} in use, {} free above a reserve of {}",
        Size(space.raw_bytes),
        Size(space.used_bytes),
        Size(space.free_bytes),
        Size(space.reserve_bytes + space.spare_bytes)
    ))?;
    if space.reclaimable_bytes > 0 {
        print(format_args!(
            "{} of what is in use is dead: it is cleaned when room is needed, and can be written anew",
            Size(space.reclaimable_bytes)
        ))?;
    }
    if space.used.trash_volumes > 0 {
        print(format_args!(
            "{} of what is in use is in the trash, {}: it goes by itself, first when devices are nearly full (`holdfast volume \
             trash list`)",
            Size(space.used.trash_bytes),
            volumes(space.used.trash_volumes)
        ))?;
    }
    let set_aside: u64 = space.set_aside.iter().map(|(_, bytes)| bytes).sum();
    if set_aside > 0 {
        print(format_args!("{} more are set aside for fixed volumes; thin ones have the rest:", Size(set_aside)))?;
    }
    if let Some(alarm) = full_soon(space.days_to_full) {
        print(alarm)?;
    }
    let mut rows = table(&["LAYOUT", "CAN BE WRITTEN", "OF RAW", "BEARS THE LOSS OF"], &[1, 2]);
    for of in &space.writable {
        let efficiency = format!("{:.1} %", of.efficiency * 100.0);
        rows.add_row([of.layout.clone(), Size(of.bytes).to_string(), efficiency, of.bears.clone()]);
    }
    print_table(&rows)
}

fn print_why(space: &Space) -> Result<()> {
    let mut rows = table(&["", "BYTES", ""], &[1, 2]);
    let mut row = |name: String, bytes: i64| {
        let size = if bytes < 0 { "-".to_string() } else { Size(bytes as u64).to_string() };
        rows.add_row([name, bytes.to_string(), size]);
    };
    row("all devices".to_string(), space.raw_bytes as i64);
    row("  journals, tables, superblocks".to_string(), space.overhead_bytes as i64);
    row("  in use".to_string(), space.used_bytes as i64);
    for (name, bytes) in &space.used.data {
        row(format!("    data of volume {name} and its clones"), *bytes as i64);
    }
    for (name, bytes) in &space.used.snapshots {
        row(format!("    held by snapshots of volume {name} alone"), *bytes as i64);
    }
    for (name, bytes) in &space.used.kept {
        row(format!("    held by volume {name} for its separate clones"), *bytes as i64);
    }
    if space.used.padding_bytes > 0 {
        row("    padding, between packed blocks".to_string(), space.used.padding_bytes as i64);
    }
    row("    copies and parity".to_string(), space.used.redundancy_bytes as i64);
    row("    dead, until it is cleaned".to_string(), space.used.dead_bytes as i64);
    row("    maps and checkpoints".to_string(), space.used.metadata_bytes as i64);
    if space.used.trash_volumes > 0 {
        row(format!("    in the trash, {}", volumes(space.used.trash_volumes)), space.used.trash_bytes as i64);
    }
    row("    headers, volumes not in service, on the way".to_string(), space.used.other_bytes);
    row("  reserve for cleaning and deleting".to_string(), space.reserve_bytes as i64);
    row("  not promised, so that cleaning stays cheap".to_string(), space.spare_bytes as i64);
    for (name, bytes) in &space.set_aside {
        row(format!("  set aside for volume {name}"), *bytes as i64);
    }
    row("  free".to_string(), space.free_bytes as i64);
    print_table(&rows)?;
    let packed = |saved: &Saved| print(format_args!("volume {}: {}", saved.volume, saved.text()));
    space.used.saved.iter().try_for_each(packed)?;
    for (name, bytes) in &space.used.elsewhere {
        print(format_args!(
            "volume {name}: {} more of its data lie with another volume, which shares them",
            Size(*bytes)
        ))?;
    }
    if space.missing_bytes > 0 {
        print(format_args!(
            "{} more belong to fixed volumes and are not there: bring devices back, or add some (`holdfast device add NODE`)",
            Size(space.missing_bytes)
        ))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alarm_is_raised_in_the_last_month() {
        assert_eq!(full_soon(None), None);
        assert_eq!(full_soon(Some(30.5)), None);
        assert!(full_soon(Some(12.2)).unwrap().contains("in about 12 days"));
        assert!(full_soon(Some(1.4)).unwrap().contains("in about a day"));
        assert!(full_soon(Some(0.0)).unwrap().contains("full today"));
    }
}
