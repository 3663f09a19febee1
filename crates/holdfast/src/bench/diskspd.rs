//! diskspd-8k: 8 KiB, 70 % reads, 16 threads with 16 in flight each, caches off, on a file beside the grid's devices and on a volume.
//!
//! Source: the report on Storage Spaces Direct with three nodes and NVMe P3700 (DISKSPD `-b8K -w30 -r -t16 -o16 -Sh`).

use super::Common;
use super::load::{Done, Load, Target};
use super::page::{Goal, Report};
use super::setup::{REST, Setup};
use crate::cli::format::table;
use anyhow::Result;
use clap::Args;
use holdfast_base::size::Size;
use holdfast_format::geometry::Layout;
use serde_json::json;

#[derive(Args, Clone, Debug)]
pub struct DiskspdArgs {
    #[command(flatten)]
    pub common: Common,
    /// Size of the file and of the volume
    #[arg(long, default_value = "1GiB", value_name = "SIZE")]
    size: Size,
    #[arg(long, default_value = "mirror:2", value_name = "LAYOUT")]
    layout: Layout,
}

pub fn run(setup: &mut Setup, args: &DiskspdArgs) -> Result<Report> {
    let size = args.size.0;
    let bare = Target::File(setup.file(size)?);
    let volume = setup.create("diskspd", size, args.layout)?;
    let own = Target::Volume(volume.clone());
    let random = Load { random_percent: 100, ..Load::fill(size) };
    for target in [&bare, &own] {
        eprintln!("writing all of it once");
        setup.run(std::slice::from_ref(target), &random)?;
    }
    setup.settle(&[volume], REST)?;
    let load = Load {
        rw: "randrw",
        read_percent: Some(70),
        threads: 16,
        random_percent: 100,
        ..Load::random("8k", 16, args.common.seconds())
    };
    eprintln!("the file, then the volume");
    let bare = setup.run(&[bare], &load)?;
    let own = setup.run(&[own], &load)?;
    Ok(report(&bare, &own, args, setup.machine()?))
}

fn report(bare: &Done, own: &Done, args: &DiskspdArgs, machine: String) -> Report {
    let mut shown = table(
        &["", "IOPS", "SD", "MEAN MS", "SD", "P99 MS", "CPU US", "| REPORT: IOPS", "SD", "MEAN MS", "SD"],
        &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
    );
    for (name, done, told) in
        [("bare", bare, ["215136", "10863", "1.188", "1.163"]), ("volume", own, ["185964", "17183", "1.375", "1.504"])]
    {
        let row = [
            name.to_string(),
            format!("{:.0}", done.iops()),
            format!("{:.0}", done.iops_sd()),
            format!("{:.3}", done.mean_ms()),
            format!("{:.3}", done.sd_ms()),
            format!("{:.3}", done.p99_ms()),
            format!("{:.1}", done.ours_us()),
        ];
        shown.add_row(row.into_iter().chain(told.map(str::to_string)));
    }
    Report {
        title: format!(
            "diskspd-8k: {} of {}, 8 KiB, 70 % reads, 16 threads with 16 in flight each, {} s",
            args.layout,
            args.size,
            args.common.seconds()
        ),
        tables: vec![("SD of requests a second over half seconds, of latency over requests".to_string(), shown)],
        goals: vec![Goal::at_least(
            "volume to bare, requests a second",
            own.iops() / bare.iops().max(1.0),
            0.864,
            Some(0.864),
        )],
        remarks: vec![
            "the report: a mirror on three nodes with P3700; its bare device is one machine's own".to_string(),
        ],
        figures: json!({ "bare": bare, "volume": own }),
        machine,
    }
}
