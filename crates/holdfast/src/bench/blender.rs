//! blender: several virtual machines, each with one sequential stream of 64 KiB, at once; what reaches devices is random, unless what
//! belongs together is put together.
//!
//! Source: the report on Gridstore's grid, which takes streams apart by machine. A volume's segments are in the order of its
//! addresses, so each machine's stream is whole again.

use super::Common;
use super::load::{Done, Load, Target};
use super::page::{Goal, Report};
use super::setup::{REST, Setup, volumes};
use crate::cli::format::table;
use anyhow::Result;
use clap::Args;
use holdfast_base::size::Size;
use holdfast_format::geometry::Layout;
use serde_json::json;

#[derive(Args, Clone, Debug)]
pub struct BlenderArgs {
    #[command(flatten)]
    pub common: Common,
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=64))]
    vms: u32,
    /// Size of each
    #[arg(long, default_value = "256MiB", value_name = "SIZE")]
    size: Size,
    #[arg(long, default_value = "parity:2+1", value_name = "LAYOUT")]
    layout: Layout,
    /// All streams in one volume, each by a connection of its own and in its part of it, as of a datastore
    #[arg(long)]
    one_volume: bool,
}

/// Volumes, and where in them each machine's stream goes.
struct Machines {
    names: Vec<String>,
    targets: Vec<Target>,
}

impl Machines {
    fn make(setup: &mut Setup, args: &BlenderArgs) -> Result<Machines> {
        let (bytes, count) = (args.size.0, u64::from(args.vms));
        if args.one_volume {
            let volume = setup.create("all", bytes * count, args.layout)?;
            let of = |n| Target::Part { volume: volume.clone(), offset: n * bytes, bytes };
            return Ok(Machines { targets: (0..count).map(of).collect(), names: vec![volume] });
        }
        let names: Vec<String> =
            (0..count).map(|n| setup.create(&format!("vm{n}"), bytes, args.layout)).collect::<Result<_>>()?;
        Ok(Machines { targets: volumes(&names), names })
    }
}

/// One stream, then all of them.
struct Row {
    name: &'static str,
    alone: Done,
    together: Done,
    /// Mean of what nodes were asked for at once, in KiB, of reads.
    read_kib: Option<f64>,
    goal: f64,
}

pub fn run(setup: &mut Setup, args: &BlenderArgs) -> Result<Report> {
    let size = args.size.0;
    let machines = Machines::make(setup, args)?;
    let Machines { targets, .. } = &machines;
    eprintln!("writing {} machines of {} at the same time", args.vms, args.size);
    setup.run(targets, &Load { block: "64k".to_string(), depth: 4, random_percent: 100, ..Load::fill(size) })?;
    let mut rows = vec![streams(setup, args, &machines, "reads of what was written at once", 0.9)?];
    eprintln!("overwriting a half of it at random");
    let bytes = super::load::Span::Bytes(size / 2);
    let random = Load { rw: "randwrite", span: bytes, random_percent: 100, ..Load::random("8k", 4, 0) };
    setup.run(targets, &random)?;
    rows.push(streams(setup, args, &machines, "reads after random writes", 0.6)?);
    let writes = Load { rw: "write", random_percent: 100, ..Load::random("64k", 4, args.common.seconds()) };
    let alone = setup.run(&targets[..1], &writes)?;
    let together = setup.run(targets, &writes)?;
    rows.push(Row { name: "writes", alone, together, read_kib: None, goal: 0.9 });
    Ok(report(&rows, args, setup.machine()?))
}

fn streams(setup: &Setup, args: &BlenderArgs, machines: &Machines, name: &'static str, goal: f64) -> Result<Row> {
    let Machines { names, targets } = machines;
    setup.settle(names, REST)?;
    eprintln!("{name}: one stream, then all");
    let reads = Load { rw: "read", ..Load::random("64k", 4, args.common.seconds()) };
    let alone = setup.run(&targets[..1], &reads)?;
    let asked = || -> Result<(u64, u64)> {
        let all = names.iter().map(|machine| setup.shard_reads(machine)).collect::<Result<Vec<_>>>()?;
        Ok(all.into_iter().fold((0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1)))
    };
    let before = asked()?;
    let together = setup.run(targets, &reads)?;
    let after = asked()?;
    let read_kib = (after.1 - before.1) as f64 / 1024.0 / (after.0 - before.0).max(1) as f64;
    Ok(Row { name, alone, together, read_kib: Some(read_kib), goal })
}

fn report(rows: &[Row], args: &BlenderArgs, machine: String) -> Report {
    let header = ["", "ONE, MB/S", "ALL, MB/S", "ONE, CPU US", "ALL, CPU US", "A READ OF NODES, KIB"];
    let mut shown = table(&header, &[1, 2, 3, 4, 5]);
    let mut goals = Vec::new();
    for row in rows {
        shown.add_row([
            row.name.to_string(),
            format!("{:.0}", row.alone.megabytes()),
            format!("{:.0}", row.together.megabytes()),
            format!("{:.1}", row.alone.ours_us()),
            format!("{:.1}", row.together.ours_us()),
            row.read_kib.map_or("-".to_string(), |kib| format!("{kib:.0}")),
        ]);
        let ratio = row.together.megabytes() / row.alone.megabytes().max(0.001);
        goals.push(Goal::at_least(format!("all to one, {}", row.name), ratio, row.goal, None));
        if let Some(kib) = row.read_kib.filter(|_| row.goal > 0.6) {
            goals.push(Goal::at_least("mean read of nodes, KiB", kib, 64.0, None));
        }
    }
    Report {
        title: format!(
            "blender: {} machines of {} in {}{}, each one stream of 64 KiB with 4 in flight, {} s each",
            args.vms,
            args.size,
            if args.one_volume { "one volume of " } else { "" },
            args.layout,
            args.common.seconds()
        ),
        tables: vec![("megabytes a second of one stream, and of all together".to_string(), shown)],
        goals,
        remarks: vec!["interleaved as they come, 12 % of requests would continue the one before".to_string()],
        figures: json!({ "rows": rows.iter().map(|row| json!({
            "name": row.name, "alone": row.alone, "together": row.together, "read_kib": row.read_kib,
        })).collect::<Vec<_>>() }),
        machine,
    }
}
