//! `holdfast volume filter`: what stands between the clients of a volume and its controller.

use super::format::{print, print_json, print_table, table};
use crate::client;
use crate::grid::layout::GridDir;
use anyhow::Result;
use clap::{Args, Subcommand};
use holdfast_api::{EdgeInfo, FiltersInfo, Request, VolumeInfo};
use holdfast_base::size::Size;
use holdfast_filter::KINDS;
use serde_json::json;

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    holdfast volume filter kinds                                  what there is, and what it takes\n  \
    holdfast volume filter add vm1 delay:read=10ms,share=0.1      every tenth read comes 10 ms later, by chance\n  \
    holdfast volume filter add vm1 delay:write=1ms..20ms,flush=50ms\n  \
    holdfast volume filter add vm1 fail:read=eio,every=100,range=0..1GiB\n  \
    holdfast volume filter add vm1 stall:write=30s                the next write, and those behind it, hang for 30 s\n  \
    holdfast volume filter add vm1 limit:iops=500,bytes=50MiB\n  \
    holdfast volume filter list vm1\n  \
    holdfast volume explain vm1                                  the filters in their places, and what passed them\n  \
    holdfast volume filter remove vm1 2                           what filter 2 holds goes on at once\n  \
    holdfast volume filter remove vm1                             all of them\n\n\
    Filters last as long as the host has the volume in service: they end with `volume unexport`, a hand-over, and the host.\n\
    `holdfast status` tells of those that make a volume worse. A limit that is to stay is the volume's own:\n\
    `holdfast volume set vm1 --limit iops=500`.")]
pub struct FilterArgs {
    #[command(subcommand)]
    action: FilterAction,
}

#[derive(Subcommand, Debug)]
enum FilterAction {
    /// Put a filter before a volume or clone, while it is used, below the filters that are there
    Add {
        name: String,
        /// KIND:KEY=VALUE,…, as `holdfast volume filter kinds` tells
        filter: String,
    },
    /// The filters of a volume or clone, from its clients down
    List { name: String },
    /// Take a filter away, or all, while the volume is used
    Remove {
        name: String,
        /// Its number, as `list` tells it
        filter: Option<u32>,
    },
    /// The kinds of filters that there are
    Kinds,
}

pub fn run(args: FilterArgs, dir: &GridDir, json: bool) -> Result<()> {
    match args.action {
        FilterAction::Add { name, filter } => {
            let volume = client::volume(dir, &Request::VolumeFilterAdd { name, spec: filter })?;
            changed(&volume, json, &format!("volume {} has another filter", volume.name))
        }
        FilterAction::Remove { name, filter } => {
            let volume = client::volume(dir, &Request::VolumeFilterRemove { name, filter })?;
            let which = filter.map_or("its filters".to_string(), |filter| format!("filter {filter}"));
            changed(&volume, json, &format!("volume {} is without {which}", volume.name))
        }
        FilterAction::List { name } => {
            let volume = client::live_volume(dir, &name)?;
            changed(&volume, json, "")
        }
        FilterAction::Kinds => print_kinds(json),
    }
}

fn changed(volume: &VolumeInfo, json: bool, text: &str) -> Result<()> {
    let none = FiltersInfo { filters: Vec::new(), below: EdgeInfo::default() };
    let filters = volume.filters.as_deref().unwrap_or(&none);
    if json {
        return print_json(filters);
    }
    if !text.is_empty() {
        print(text)?;
    }
    if filters.filters.is_empty() {
        return print(format_args!(
            "volume {} has no filters; add one with `holdfast volume filter add {0} KIND:…` (`holdfast volume filter kinds`)",
            volume.name
        ));
    }
    let mut rows = table(&["FILTER", "IS", "REQUESTS", "ERRORS", "IN FLIGHT", "DID"], &[0, 2, 3, 4]);
    for filter in &filters.filters {
        let leaving = if filter.leaving { " (going)" } else { "" };
        rows.add_row([
            filter.id.to_string(),
            format!("{}{leaving}", filter.spec),
            filter.above.requests.to_string(),
            filter.above.errors.to_string(),
            filter.above.in_flight.to_string(),
            counters_text(&filter.counters),
        ]);
    }
    print_table(&rows)
}

/// `12 delayed, 3 held now`
pub fn counters_text(counters: &std::collections::BTreeMap<String, u64>) -> String {
    let texts: Vec<String> = counters.iter().map(|(name, count)| format!("{count} {name}")).collect();
    texts.join(", ")
}

/// What has crossed an edge between filters.
pub fn edge_text(edge: &EdgeInfo) -> String {
    format!(
        "{} requests ({} down), {} replies ({} up), {} errors; {} in flight",
        edge.requests,
        Size(edge.bytes_down),
        edge.replies,
        Size(edge.bytes_up),
        edge.errors,
        edge.in_flight
    )
}

/// That a volume is worse than it would be.
pub fn warning(volume: &VolumeInfo) -> Option<String> {
    let tools = volume.filters.as_ref().map(|filters| filters.tools()).filter(|tools| !tools.is_empty())?;
    Some(format!(
        "volume {} is made worse on purpose, by {}; `holdfast volume filter remove {0}` ends that",
        volume.name,
        tools.join(" and ")
    ))
}

fn print_kinds(json: bool) -> Result<()> {
    if json {
        let kinds = KINDS.iter().map(
            |kind| json!({ "name": kind.name, "about": kind.about, "takes": kind.takes, "example": kind.example }),
        );
        return print_json(&kinds.collect::<Vec<_>>());
    }
    for kind in KINDS {
        print(format_args!("{:6} {}", kind.name, kind.about))?;
        print(format_args!("       takes {}", kind.takes))?;
        print(format_args!("       {}", kind.example))?;
    }
    Ok(())
}
