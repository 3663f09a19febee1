//! xdd-sweep: sizes from 4 KiB to 1 MiB by requests in flight, sequential and random, reads and writes, of several clients.
//!
//! Source: the report on the Violin block layers, ten servers with 40 disks beside an FC matrix, measured with XDD.

use super::Common;
use super::load::{Done, Load};
use super::page::{Goal, Report};
use super::setup::{REST, Setup, volumes};
use crate::cli::format::table;
use anyhow::Result;
use clap::Args;
use holdfast_base::size::Size;
use holdfast_format::geometry::Layout;
use serde_json::json;

#[derive(Args, Clone, Debug)]
pub struct SweepArgs {
    #[command(flatten)]
    pub common: Common,
    /// Clients, each with a volume of its own
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=8))]
    clients: u32,
    /// Size of each volume
    #[arg(long, default_value = "256MiB", value_name = "SIZE")]
    size: Size,
    #[arg(long, default_value = "mirror:2", value_name = "LAYOUT")]
    layout: Layout,
    /// Sizes of requests in KiB, rising
    #[arg(long, default_values_t = [4, 16, 64, 256, 1024], value_name = "KIB", value_delimiter = ',')]
    #[arg(value_parser = clap::value_parser!(u32).range(4..=1024))]
    sizes: Vec<u32>,
    /// Requests in flight of each client, rising
    #[arg(long, default_values_t = [1, 2, 4, 8], value_name = "N", value_delimiter = ',')]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=64))]
    depths: Vec<u32>,
}

const KINDS: [(&str, &str); 4] = [
    ("read", "sequential reads"),
    ("write", "sequential writes"),
    ("randread", "random reads"),
    ("randwrite", "random writes"),
];

/// At QD 4 and more a rate is to be so much of the best of its size.
const HOLDS: f64 = 0.9;

struct Sweep {
    name: &'static str,
    depths: Vec<u32>,
    /// By depth, then by size.
    cells: Vec<Vec<Done>>,
}

impl Sweep {
    fn best(&self) -> f64 {
        self.cells.iter().flatten().map(Done::megabytes).fold(0.0, f64::max)
    }

    /// The least step from one size to the next, of the best over depths.
    fn rise(&self) -> f64 {
        let sizes = self.cells.first().map_or(0, Vec::len);
        let best: Vec<f64> =
            (0..sizes).map(|size| self.cells.iter().map(|row| row[size].megabytes()).fold(0.001, f64::max)).collect();
        best.windows(2).map(|pair| pair[1] / pair[0]).fold(f64::INFINITY, f64::min)
    }

    /// At the largest size and QD 4 and more, the least to the best; 1 where there is none of these.
    fn hold(&self) -> f64 {
        let at_largest = |row: &Vec<Done>| row.last().map_or(0.0, Done::megabytes);
        let best = self.cells.iter().map(at_largest).fold(0.001, f64::max);
        let deep = self.depths.iter().zip(&self.cells).filter(|(depth, _)| **depth >= 4);
        deep.map(|(_, row)| at_largest(row) / best).fold(1.0, f64::min)
    }
}

pub fn run(setup: &mut Setup, args: &SweepArgs) -> Result<Report> {
    let size = args.size.0;
    let names: Vec<String> =
        (0..args.clients).map(|n| setup.create(&format!("client{n}"), size, args.layout)).collect::<Result<_>>()?;
    let clients = volumes(&names);
    setup.run(&clients, &Load { random_percent: 100, ..Load::fill(size) })?;
    let mut sweeps = Vec::new();
    for (rw, name) in KINDS {
        setup.settle(&names, REST)?;
        let mut cells = Vec::new();
        for depth in args.depths.iter().copied() {
            eprintln!("{name}, {depth} in flight");
            let load = |kib: u32| {
                let block = format!("{kib}k");
                let load = Load { rw, random_percent: 100, ..Load::random(&block, depth, args.common.seconds()) };
                setup.run(&clients, &load)
            };
            cells.push(args.sizes.iter().copied().map(load).collect::<Result<Vec<_>>>()?);
        }
        sweeps.push(Sweep { name, depths: args.depths.clone(), cells });
    }
    Ok(report(&sweeps, args, setup.machine()?))
}

fn report(sweeps: &[Sweep], args: &SweepArgs, machine: String) -> Report {
    let mut tables = Vec::new();
    let mut goals = Vec::new();
    for sweep in sweeps {
        let header: Vec<String> =
            std::iter::once("IN FLIGHT".to_string()).chain(args.sizes.iter().map(|kib| format!("{kib} KIB"))).collect();
        let header: Vec<&str> = header.iter().map(String::as_str).collect();
        let mut shown = table(&header, &(0..header.len()).collect::<Vec<_>>());
        for (depth, row) in sweep.depths.iter().zip(&sweep.cells) {
            let rates = row.iter().map(|done| format!("{:.0}", done.megabytes()));
            shown.add_row(std::iter::once(depth.to_string()).chain(rates));
        }
        tables.push((format!("{}, MB/s", sweep.name), shown));
        goals.push(Goal::told(format!("{}, best MB/s", sweep.name), sweep.best(), None));
        if args.sizes.len() > 1 {
            goals.push(Goal::at_least(format!("{}, rises with size by", sweep.name), sweep.rise(), HOLDS, None));
        }
        goals.push(Goal::at_least(format!("{}, holds at depth", sweep.name), sweep.hold(), HOLDS, None));
    }
    Report {
        title: format!(
            "xdd-sweep: {} clients, each with {} of {}, {} s a cell",
            args.clients,
            args.layout,
            args.size,
            args.common.seconds()
        ),
        tables,
        goals,
        remarks: vec![
            "the report: ten servers with 40 disks, best writes 219 MB/s beside 150 of an FC matrix, whose reads came to 460; its \
             random reads fall under 100 MB/s below 64 KiB"
                .to_string(),
        ],
        figures: json!({ "sizes_kib": args.sizes, "depths": args.depths, "sweeps": sweeps.iter().map(|sweep| {
            json!({ "name": sweep.name, "cells": sweep.cells })
        }).collect::<Vec<_>>() }),
        machine,
    }
}

#[cfg(test)]
mod tests {
    use super::super::load::Side;
    use super::*;

    #[test]
    fn what_rises_and_holds_is_told_from_what_does_not() {
        let done = |megabytes: f64| Done { reads: Side { megabytes, ..Side::default() }, ..Done::default() };
        let sweep = |rate: fn(usize, usize) -> f64| Sweep {
            name: "reads",
            depths: vec![1, 4, 8],
            cells: (0..3).map(|depth| (0..4).map(|size| done(rate(depth, size))).collect()).collect(),
        };
        let well = sweep(|depth, size| (10 << size) as f64 + depth as f64);
        assert!(well.rise() > 1.5 && well.hold() > HOLDS, "{} {}", well.rise(), well.hold());
        let falls = sweep(|depth, size| if size == 2 || depth == 2 { 5.0 } else { 10.0 });
        assert_eq!((falls.rise(), falls.hold(), falls.best()), (0.5, 0.5, 10.0));
    }
}
