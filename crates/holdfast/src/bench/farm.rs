//! vm-farm: threads with 4 and 8 KiB, half of them reads, direct, each in a volume of its own; half of them, then all: what a request
//! costs, and how many virtual machines of 25 requests a second that is.
//!
//! Source: the report on Hitachi's scale-out NAS for virtual machines, four and eight nodes. On a grid that is made for it (`--scratch`)
//! the same is measured with twice the nodes.

use super::Common;
use super::load::{Done, Load};
use super::page::{Goal, Report};
use super::scratch::Scratch;
use super::setup::{REST, Setup, volumes};
use crate::cli::format::table;
use anyhow::Result;
use clap::Args;
use holdfast_base::size::Size;
use holdfast_format::geometry::Layout;
use serde_json::json;

#[derive(Args, Clone, Debug)]
pub struct FarmArgs {
    #[command(flatten)]
    pub common: Common,
    /// Threads, each with a volume of its own; a half, and then all of them
    #[arg(long, default_value_t = 16, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=1024))]
    threads: u32,
    /// Size of each volume; the report's is 20 GB
    #[arg(long, default_value = "64MiB", value_name = "SIZE")]
    size: Size,
    #[arg(long, default_value = "mirror:2", value_name = "LAYOUT")]
    layout: Layout,
}

/// Requests a second of a virtual machine, and what is left out for what they need beside.
const OPS_A_VM: f64 = 25.0;
const VM_SHARE: f64 = 0.93;

struct Row {
    nodes: u32,
    threads: u32,
    done: Done,
}

impl Row {
    fn vms(&self) -> f64 {
        self.done.iops() * VM_SHARE / OPS_A_VM
    }
}

pub fn run(setup: &mut Setup, args: &FarmArgs, grows: Option<&Scratch>) -> Result<Report> {
    let mut rows = measure(setup, args, &[args.threads / 2, args.threads])?;
    if let Some(scratch) = grows {
        setup.remove_all();
        eprintln!("{} nodes more", scratch.nodes());
        scratch.double()?;
        rows.extend(measure(setup, args, &[args.threads])?);
    }
    Ok(report(&rows, args, setup.machine()?))
}

fn measure(setup: &mut Setup, args: &FarmArgs, counts: &[u32]) -> Result<Vec<Row>> {
    let size = args.size.0;
    let nodes = setup.status()?.nodes.len() as u32;
    let names: Vec<String> =
        (0..args.threads).map(|n| setup.create(&format!("vm{n}"), size, args.layout)).collect::<Result<_>>()?;
    let all = volumes(&names);
    eprintln!("writing {} volumes of {}", args.threads, args.size);
    setup.run(&all, &Load { random_percent: 100, ..Load::fill(size) })?;
    let mut rows = Vec::new();
    for threads in counts.iter().copied() {
        setup.settle(&names, REST)?;
        eprintln!("{nodes} nodes, {threads} threads");
        let load = Load {
            rw: "randrw",
            read_percent: Some(50),
            split: Some("4k/50:8k/50"),
            random_percent: 100,
            ..Load::random("4k", 1, args.common.seconds())
        };
        let done = setup.run(&all[..threads as usize], &load)?;
        rows.push(Row { nodes, threads, done });
    }
    Ok(rows)
}

fn report(rows: &[Row], args: &FarmArgs, machine: String) -> Report {
    let header =
        ["NODES", "THREADS", "OPS/S", "A THREAD", "MEAN MS", "P99 MS", "VMS AT 25", "CPU US: HOST", "CPU US: NODES"];
    let mut shown = table(&header, &(0..header.len()).collect::<Vec<_>>());
    for row in rows {
        shown.add_row([
            row.nodes.to_string(),
            row.threads.to_string(),
            format!("{:.0}", row.done.iops()),
            format!("{:.0}", row.done.iops() / f64::from(row.threads)),
            format!("{:.2}", row.done.mean_ms()),
            format!("{:.2}", row.done.p99_ms()),
            format!("{:.0}", row.vms()),
            format!("{:.1}", row.done.host_us),
            format!("{:.1}", row.done.nodes_us),
        ]);
    }
    let (half, all) = (&rows[0].done, &rows[1].done);
    let mut goals = Vec::new();
    let mut compare = |what: &str, more: &Done, fewer: &Done| {
        goals.push(Goal::told(format!("{what}: requests a second"), more.iops() / fewer.iops().max(1.0), None));
        let cpu = more.ours_us() / fewer.ours_us().max(0.001);
        goals.push(Goal::at_most(format!("{what}: CPU a request"), cpu, 1.1, None));
    };
    compare("twice the threads", all, half);
    if let Some(grown) = rows.get(2) {
        compare("twice the nodes", &grown.done, all);
    }
    Report {
        title: format!(
            "vm-farm: volumes of {} in {}, 4 and 8 KiB, half of it reads, one in flight each, {} s",
            args.size,
            args.layout,
            args.common.seconds()
        ),
        tables: vec![("half of the threads, and all".to_string(), shown)],
        goals,
        remarks: vec![
            "the report: 380 threads on four nodes; 760 with 525 each, 401,018 in all, on eight: 15,000 machines"
                .to_string(),
            "with --scratch also on twice the nodes: CPU a request that stays is growth in a line".to_string(),
        ],
        figures: json!({ "rows": rows.iter().map(|row| json!({
            "nodes": row.nodes, "threads": row.threads, "done": row.done, "vms": row.vms(),
        })).collect::<Vec<_>>() }),
        machine,
    }
}
