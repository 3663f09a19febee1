//! `holdfast space`: where the grid's bytes are.

use super::format::{print, print_json, print_table, table};
use super::trash::volumes;
use crate::capacity::{account, saved_text};
use crate::client;
use crate::grid::layout::GridDir;
use crate::host::DEVICES_SHOWN_WITHIN;
use crate::overview::gather;
use anyhow::Result;
use clap::{Args, Subcommand};
use holdfast_api::{Capacity, Code, HostState, SavedSpace, refuse};
use holdfast_base::size::Size;
use holdfast_verdict::findings::full_soon;
use holdfast_verdict::resources;

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
    let space = account(&status, held, silent);
    if !json {
        for host in &space.silent {
            print(format_args!("host {host} does not say what its volumes hold: that counts as other things"))?;
        }
    }
    match (json, &args.action) {
        (true, _) => print_json(&space),
        (false, Some(SpaceAction::Why)) => print_why(&space),
        (false, None) => print_short(&space),
    }
}

fn print_short(space: &Capacity) -> Result<()> {
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

fn print_why(space: &Capacity) -> Result<()> {
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
    let packed = |saved: &SavedSpace| print(format_args!("volume {}: {}", saved.volume, saved_text(saved)));
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
