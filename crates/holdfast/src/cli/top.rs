//! `holdfast top`: the busiest volumes, again and again.

use super::format::{print, print_json, print_table, table};
use super::status::{Rates, Sample, rates};
use crate::grid::layout::GridDir;
use anyhow::Result;
use clap::Args;
use holdfast_api::{Times, VolumeInfo};
use holdfast_base::size::Size;
use holdfast_verdict::ms;
use serde::Serialize;
use std::io::{IsTerminal, Write};
use std::time::Duration;

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    holdfast top               until it is stopped\n  \
    holdfast top --once        one answer, of two seconds\n\n\
    Rates are those between two answers; what half of the requests took at most, and 99 of 100, is of the last one to two \
    minutes. Clones count with the volume that they are in. `holdfast why slow VOLUME` tells where the time goes.")]
pub struct TopArgs {
    /// Seconds between two answers
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = clap::value_parser!(u64).range(1..))]
    every: u64,
    /// One answer, and no more
    #[arg(long)]
    once: bool,
}

/// A volume, and what passes between it and its clients.
#[derive(Serialize)]
struct Row<'a> {
    volume: &'a str,
    #[serde(flatten)]
    rates: Rates,
    read_times: Option<Times>,
    write_times: Option<Times>,
    /// In the mean, of rates and what half of the requests take.
    under_way: f64,
    clients: usize,
}

pub fn run(args: &TopArgs, dir: &GridDir, json: bool) -> Result<()> {
    let mut before = Sample::now(dir)?;
    loop {
        std::thread::sleep(Duration::from_secs(args.every));
        let now = Sample::now(dir)?;
        let rows = rows(&before, &now);
        if !args.once && !json && std::io::stdout().is_terminal() {
            print("\x1b[H\x1b[2J")?;
        }
        if json {
            print_json(&rows)?
        } else {
            show(&rows)?
        }
        if args.once {
            return Ok(());
        }
        before = now;
        // A reader that has gone ends it.
        if json { std::io::stdout().flush()? } else { writeln!(std::io::stdout())? }
    }
}

/// The busiest first.
fn rows<'a>(before: &Sample, now: &'a Sample) -> Vec<Row<'a>> {
    let rates = rates(before, now);
    let of = |volume: &'a VolumeInfo| {
        let (rates, live) = (*rates.get(&volume.name)?, volume.live.as_ref()?);
        let busy = |rate: f64, times: Option<Times>| times.map_or(0.0, |times| rate * times.p50_us as f64 / 1e6);
        let under_way = busy(rates.reads, live.read_times) + busy(rates.writes, live.write_times);
        let (read_times, write_times) = (live.read_times, live.write_times);
        let is_in_it = |other: &&VolumeInfo| other.clone_of.as_ref() == Some(&volume.name);
        let of_clones: usize = now.status.volumes.iter().filter(is_in_it).map(|clone| clone.sessions).sum();
        let clients = volume.sessions + of_clones;
        Some(Row { volume: &volume.name, rates, read_times, write_times, under_way, clients })
    };
    let mut rows: Vec<Row> = now.status.volumes.iter().filter_map(of).collect();
    let rate = |row: &Row<'_>| row.rates.reads + row.rates.writes;
    rows.sort_by(|a, b| rate(b).total_cmp(&rate(a)).then(a.volume.cmp(b.volume)));
    rows
}

fn show(rows: &[Row<'_>]) -> Result<()> {
    if rows.is_empty() {
        return print("no volume is in service here");
    }
    let header = [
        "VOLUME",
        "READS/S",
        "WRITES/S",
        "READ/S",
        "WRITTEN/S",
        "READ P50",
        "P99",
        "WRITE P50",
        "P99",
        "UNDER WAY",
        "CLIENTS",
    ];
    let mut shown = table(&header, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
    let of = |times: Option<Times>, which: fn(Times) -> u64| times.map_or("-".to_string(), |times| ms(which(times)));
    for row in rows {
        shown.add_row([
            row.volume.to_string(),
            format!("{:.0}", row.rates.reads),
            format!("{:.0}", row.rates.writes),
            Size(row.rates.read_bytes as u64).to_string(),
            Size(row.rates.write_bytes as u64).to_string(),
            of(row.read_times, |times| times.p50_us),
            of(row.read_times, |times| times.p99_us),
            of(row.write_times, |times| times.p50_us),
            of(row.write_times, |times| times.p99_us),
            format!("{:.1}", row.under_way),
            row.clients.to_string(),
        ]);
    }
    print_table(&shown)
}
