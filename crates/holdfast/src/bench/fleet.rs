//! vmfleet-4k: virtual machines that are clones of one image, each with a tenth of its own, which read and write 4 KiB at random,
//! 30 in flight each; in the grid's mirror and in nested parity, plain and reduced.
//!
//! Source: the report on Storage Spaces Direct with nested resiliency, two nodes of six SSDs, E5-2620v2.

use super::Common;
use super::load::{Done, Load, Span};
use super::page::{Goal, Report};
use super::setup::{PACKED_REST, REST, Setup, volumes};
use crate::cli::format::table;
use anyhow::{Result, bail};
use clap::Args;
use holdfast_base::size::Size;
use holdfast_format::geometry::Layout;
use serde_json::json;

#[derive(Args, Clone, Debug)]
pub struct FleetArgs {
    #[command(flatten)]
    pub common: Common,
    /// Virtual machines
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    vms: u32,
    /// Size of each
    #[arg(long, default_value = "512MiB", value_name = "SIZE")]
    size: Size,
    /// Layouts, the first of which others are compared with; by default a mirror, and nested parity where the grid bears it
    #[arg(long, value_name = "LAYOUT", value_delimiter = ',')]
    layouts: Vec<String>,
    /// Leave out what is reduced
    #[arg(long)]
    plain: bool,
}

const MIRRORS: [Layout; 2] = [Layout::Mirror { copies: 2 }, Layout::DeviceMirror { copies: 2 }];
const NESTED: [Layout; 3] =
    [Layout::NestedParity { data: 3, parity: 1 }, Layout::NestedParity { data: 2, parity: 1 }, Layout::NestedMirror];

/// A row: what was measured of a layout.
struct Row {
    layout: Layout,
    is_reduced: bool,
    reads: Done,
    mixed: Done,
    /// Of what machines see: what takes no room, and what is dead and takes room until that is needed; redundancy aside.
    saved: f64,
    dead: f64,
}

/// 100/0 and its CPU, 70/30 and its CPU, saved: of the report.
fn of_report(row: &Row) -> [&'static str; 5] {
    match (row.layout.is_nested(), row.is_reduced) {
        (false, false) => ["140 K", "82", "97 K", "87", "-"],
        (false, true) => ["huge drop", "97", "-", "-", "70"],
        (true, false) => ["123 K", "82", "-", "95", "-"],
        (true, true) => ["poor", "97", "-", "-", "75"],
    }
}

pub fn run(setup: &mut Setup, args: &FleetArgs) -> Result<Report> {
    let layouts = layouts(setup, args)?;
    let mut rows = Vec::new();
    for layout in layouts {
        rows.extend(measure(setup, args, layout)?);
        setup.remove_all();
    }
    Ok(report(&rows, args, setup.machine()?))
}

fn layouts(setup: &Setup, args: &FleetArgs) -> Result<Vec<Layout>> {
    if !args.layouts.is_empty() {
        return args.layouts.iter().map(|text| Ok(text.parse()?)).collect();
    }
    let first_of = |layouts: &[Layout]| -> Result<Option<Layout>> {
        for layout in layouts {
            if setup.bears(*layout)? {
                return Ok(Some(*layout));
            }
        }
        Ok(None)
    };
    let Some(mirror) = first_of(&MIRRORS)? else { bail!("this grid has no two devices to mirror on; name --layouts") };
    Ok([Some(mirror), first_of(&NESTED)?].into_iter().flatten().collect())
}

fn measure(setup: &mut Setup, args: &FleetArgs, layout: Layout) -> Result<Vec<Row>> {
    let size = args.size.0;
    eprintln!("{layout}: an image of {}, and {} machines of it", args.size, args.vms);
    let image = setup.create(&layout.to_string().replace([':', '+'], "-"), size, layout)?;
    setup.run(&volumes(std::slice::from_ref(&image)), &Load::fill(size))?;
    let machines = volumes(&setup.clones(&image, args.vms)?);
    let own = Load { rw: "randwrite", span: Span::Bytes(size / 10), ..Load::random("64k", 4, 0) };
    setup.run(&machines, &own)?;
    let loads = |name: &str| {
        eprintln!("{name}: reads, then 70/30");
        let reads = Load { threads: 2, ..Load::random("4k", 15, args.common.seconds()) };
        let mixed = Load { rw: "randrw", read_percent: Some(70), ..reads.clone() };
        Ok::<_, anyhow::Error>((setup.run(&machines, &reads)?, setup.run(&machines, &mixed)?))
    };
    // What is saved is looked at between the loads: so it is of the same content, plain and reduced.
    let shares = |rest| -> Result<(f64, f64)> {
        let space = &setup.settle(std::slice::from_ref(&image), rest)?[0];
        let stored = space.taken_bytes() - space.redundancy_bytes - space.dead_bytes;
        let of_seen = |bytes: u64| bytes as f64 / (size as f64 * f64::from(args.vms));
        Ok((1.0 - of_seen(stored), of_seen(space.dead_bytes)))
    };
    let name = layout.to_string();
    setup.settle(std::slice::from_ref(&image), REST)?;
    let (reads, mixed) = loads(&name)?;
    let (saved, dead) = shares(REST)?;
    let mut rows = vec![Row { layout, is_reduced: false, reads, mixed, saved, dead }];
    if !args.plain {
        eprintln!("{name}: reducing");
        setup.reduce(&image)?;
        let (saved, dead) = shares(PACKED_REST)?;
        let (reads, mixed) = loads(&format!("{name}, reduced"))?;
        rows.push(Row { layout, is_reduced: true, reads, mixed, saved, dead });
    }
    Ok(rows)
}

fn report(rows: &[Row], args: &FleetArgs, machine: String) -> Report {
    let header = [
        "LAYOUT",
        "100/0",
        "CPU %",
        "70/30",
        "CPU %",
        "MEAN MS",
        "US A READ",
        "US AT 70/30",
        "SAVED %",
        "DEAD %",
        "| REPORT: 100/0",
        "CPU %",
        "70/30",
        "CPU %",
        "SAVED %",
    ];
    let mut shown = table(&header, &(1..header.len()).collect::<Vec<_>>());
    for row in rows {
        let name = if row.is_reduced { format!("{}, reduced", row.layout) } else { row.layout.to_string() };
        let own = [
            name,
            format!("{:.0}", row.reads.iops()),
            format!("{:.0}", row.reads.cpu_percent),
            format!("{:.0}", row.mixed.iops()),
            format!("{:.0}", row.mixed.cpu_percent),
            format!("{:.2}/{:.2}", row.reads.mean_ms(), row.mixed.mean_ms()),
            format!("{:.1}", row.reads.ours_us()),
            format!("{:.1}", row.mixed.ours_us()),
            format!("{:.1}", row.saved * 100.0),
            format!("{:.1}", row.dead * 100.0),
        ];
        shown.add_row(own.into_iter().chain(of_report(row).map(str::to_string)));
    }
    Report {
        title: format!(
            "vmfleet-4k: {} machines of {}, 4 KiB random, 2 threads with 15 in flight each, {} s each",
            args.vms,
            args.size,
            args.common.seconds()
        ),
        tables: vec![("requests a second; CPU of host and nodes a request".to_string(), shown)],
        goals: goals(rows),
        remarks: vec![
            "the report: Storage Spaces Direct, two nodes of six SSDs, E5-2620v2; nested parity had 2 ms, 6 ms at 70/30".to_string(),
        ],
        figures: json!({ "rows": rows.iter().map(|row| json!({
            "layout": row.layout.to_string(), "reduced": row.is_reduced, "reads": row.reads, "mixed": row.mixed,
            "saved": row.saved, "dead": row.dead,
        })).collect::<Vec<_>>() }),
        machine,
    }
}

fn goals(rows: &[Row]) -> Vec<Goal> {
    let find = |is_nested: bool, is_reduced: bool| {
        rows.iter().find(|row| (row.layout.is_nested(), row.is_reduced) == (is_nested, is_reduced))
    };
    let mut goals = Vec::new();
    let Some(first) = rows.first() else { return goals };
    let ratio = |a: f64, b: f64| a / b.max(1.0);
    goals.push(Goal::told("70/30 to reads", ratio(first.mixed.iops(), first.reads.iops()), Some(0.69)));
    if let (Some(mirror), Some(nested)) = (find(false, false), find(true, false)) {
        let value = ratio(nested.reads.iops(), mirror.reads.iops());
        goals.push(Goal::at_least("nested to mirror, reads", value, 0.88, Some(0.88)));
    }
    for (is_nested, name) in [(false, "mirror"), (true, "nested")] {
        if let (Some(plain), Some(reduced)) = (find(is_nested, false), find(is_nested, true)) {
            let of = |which: fn(&Row) -> &Done| ratio(which(reduced).iops(), which(plain).iops());
            goals.push(Goal::at_least(format!("{name}, reduced to plain, reads"), of(|row| &row.reads), 0.9, None));
            goals.push(Goal::at_least(format!("{name}, reduced to plain, 70/30"), of(|row| &row.mixed), 0.9, None));
            goals.push(Goal::at_least(
                format!("{name}, saved"),
                reduced.saved,
                0.7,
                Some(if is_nested { 0.75 } else { 0.7 }),
            ));
        }
    }
    goals
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_compared_as_the_report_does() {
        let row = |layout, is_reduced, iops, saved| {
            let side = |iops| super::super::load::Side { iops, ..Default::default() };
            let done = |iops| Done { reads: side(iops), ..Done::default() };
            Row { layout, is_reduced, reads: done(iops), mixed: done(iops / 2.0), saved, dead: 0.0 }
        };
        let rows = [
            row(MIRRORS[0], false, 1000.0, 0.6),
            row(MIRRORS[0], true, 950.0, 0.8),
            row(NESTED[0], false, 800.0, 0.6),
            row(NESTED[0], true, 600.0, 0.65),
        ];
        let missed = Report::missed(&goals(&rows));
        let wanted = [
            "nested to mirror, reads is 0.800",
            "nested, reduced to plain, reads is 0.750",
            "nested, reduced to plain, 70/30 is 0.750",
            "nested, saved is 0.650",
        ];
        assert_eq!(missed, wanted);
    }
}
