//! `holdfast status`, and the states that other commands tell: told within a second, whatever hangs.

use super::format::{percent_used, print, print_json, print_table, table};
use super::trash::print_trash_count;
use super::volume::print_list;
use crate::capacity::all_packed_text;
use crate::grid::layout::GridDir;
use crate::overview::{gather, health};
use anyhow::Result;
use clap::Args;
use holdfast_api::{
    Counters, DeviceHealth, DeviceInfo, Finding, GridStatus, Health, HostState, NodeView, PackingInfo, Severity,
    VolumeInfo,
};
use holdfast_base::size::Size;
use holdfast_format::wire::WIRE;
use holdfast_verdict::resources::space_of;
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

#[derive(Args, Debug)]
#[command(
    after_help = "The first lines tell what is not well, the worst first: how bad it is, what it is about, and what to do next.\n\
    Exit codes: 0 all is well; 1 a warning: somebody should act; 2 critical: something is not served, can't be changed, or may \
    be lost with the next failure; 3 nothing can be told.\n`holdfast grid status` tells the same of nodes and host, with exit code 0.\n\n\
    States of a node: up; suspect (late, avoided); hung (its process stands still, or answers nothing); cut (see `holdfast node \
    cut`); down.\nThe answer comes from memory of the host and of the kernel: it does not wait for nodes."
)]
pub struct StatusArgs {
    /// Tell it again and again, every so many seconds [default: 2], with the rates of each volume between two answers
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2", value_parser = clap::value_parser!(u64).range(1..))]
    watch: Option<u64>,
}

/// Of the worst that is found, beside what was announced.
fn exit_code(findings: &[Finding]) -> ExitCode {
    ExitCode::from(match findings.first().filter(|finding| !finding.announced).map(|finding| finding.severity) {
        None => 0,
        Some(Severity::Warning) => 1,
        Some(Severity::Critical) => 2,
    })
}

/// Where nothing can be told.
pub const UNKNOWN: u8 = 3;

pub fn run_status(args: &StatusArgs, dir: &GridDir, json: bool) -> Result<ExitCode> {
    let mut before: Option<Sample> = None;
    loop {
        let sample = Sample::now(dir)?;
        let findings = &sample.findings;
        let rates = before.as_ref().map(|before| rates(before, &sample));
        // On a terminal one takes the place of the other.
        if args.watch.is_some() && !json && std::io::stdout().is_terminal() {
            print("\x1b[H\x1b[2J")?;
        }
        match json {
            true => print_json(&StatusReport { status: &sample.status, findings, rates })?,
            false => print_status(&sample.status, findings, rates.as_ref())?,
        }
        let Some(seconds) = args.watch else { return Ok(exit_code(findings)) };
        before = Some(sample);
        std::thread::sleep(Duration::from_secs(seconds));
        // A reader that has gone ends it.
        if json { std::io::stdout().flush()? } else { writeln!(std::io::stdout())? }
    }
}

#[derive(Serialize)]
struct StatusReport<'a> {
    #[serde(flatten)]
    status: &'a GridStatus,
    /// What is not well, the worst first.
    findings: &'a [Finding],
    /// By volume, from the second answer on.
    #[serde(skip_serializing_if = "Option::is_none")]
    rates: Option<BTreeMap<String, Rates>>,
}

/// What was told, and when.
pub struct Sample {
    at: Instant,
    pub status: GridStatus,
    findings: Vec<Finding>,
}

impl Sample {
    pub fn now(dir: &GridDir) -> Result<Sample> {
        let at = Instant::now();
        let Health { status, findings } = health(dir)?;
        Ok(Sample { at, status, findings })
    }
}

/// What passes between a volume and its clients, a second.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Rates {
    pub reads: f64,
    pub read_bytes: f64,
    pub writes: f64,
    pub write_bytes: f64,
}

/// Of volumes that were served without a break.
pub fn rates(before: &Sample, now: &Sample) -> BTreeMap<String, Rates> {
    let seconds = (now.at - before.at).as_secs_f64().max(0.001);
    let counters = |status: &GridStatus, volume: &VolumeInfo| {
        let found =
            status.volumes.iter().find(|v| v.id == volume.id && v.epoch == volume.epoch && v.clone_of.is_none());
        found.and_then(|v| v.live.as_ref()).map(|live| live.counters)
    };
    let of = |volume: &VolumeInfo| {
        let (old, new) = (counters(&before.status, volume)?, counters(&now.status, volume)?);
        let rate = |f: fn(&Counters) -> u64| f(&new).saturating_sub(f(&old)) as f64 / seconds;
        Some(Rates {
            reads: rate(|c| c.reads),
            read_bytes: rate(|c| c.read_bytes),
            writes: rate(|c| c.writes),
            write_bytes: rate(|c| c.write_bytes),
        })
    };
    now.status.volumes.iter().filter_map(|volume| Some((volume.name.clone(), of(volume)?))).collect()
}

fn print_status(status: &GridStatus, findings: &[Finding], rates: Option<&BTreeMap<String, Rates>>) -> Result<()> {
    print_findings(findings)?;
    print_grid(status)?;
    if status.host.state == HostState::Up {
        print("")?;
        print_list(&status.volumes)?;
        if let Some(rates) = rates {
            print_rates(rates)?;
        }
        print_trash_count(&status.trash)?;
        for name in &status.deleting {
            print(format_args!("volume {name} is deleted; its space is being returned"))?;
        }
    }
    Ok(())
}

pub(super) fn print_findings(findings: &[Finding]) -> Result<()> {
    match findings.first() {
        None => return print("all is well"),
        Some(first) if first.announced => print("all is well, beside what was announced")?,
        Some(_) => {}
    }
    findings.iter().try_for_each(print)
}

fn print_rates(rates: &BTreeMap<String, Rates>) -> Result<()> {
    if rates.is_empty() {
        return Ok(());
    }
    print("")?;
    let mut rows = table(&["VOLUME", "READS/S", "BYTES/S", "WRITES/S", "BYTES/S"], &[1, 2, 3, 4]);
    for (name, rates) in rates {
        rows.add_row([
            name.clone(),
            format!("{:.0}", rates.reads),
            Size(rates.read_bytes as u64).to_string(),
            format!("{:.0}", rates.writes),
            Size(rates.write_bytes as u64).to_string(),
        ]);
    }
    print_table(&rows)
}

/// All nodes of the grid.
pub fn list_nodes(dir: &GridDir, json: bool) -> Result<()> {
    let status = gather(dir)?;
    if json { print_json(&status.nodes) } else { print_nodes(&status.nodes) }
}

pub(super) fn print_grid(status: &GridStatus) -> Result<()> {
    let host = &status.host;
    print(format_args!("grid {} in {}", status.grid, status.dir))?;
    match (host.state, host.pid) {
        (HostState::Down, _) => print("host down; `holdfast grid up` starts it")?,
        (HostState::Removed, _) => print("host down; this machine is none of the grid's any more")?,
        (state, pid) => print(format_args!(
            "host {state}, process {}, CPU {:.1} s{}, memory {}",
            pid.unwrap_or(0),
            host.cpu_ms as f64 / 1000.0,
            match host.packing_cpu_ms {
                0 => String::new(),
                ms => format!(" ({})", packing_text(ms, &host.packing)),
            },
            Size(host.resident_bytes)
        ))?,
    }
    if let Some(packed) = all_packed_text(status.volumes.iter().filter_map(space_of)) {
        print(format_args!("packed, of volumes in service here: {packed}"))?;
    }
    print(format_args!("metadata {}", status.metadata.store))?;
    if status.tls {
        print("links between hosts and nodes have TLS")?;
    }
    status.nbd_warning.iter().try_for_each(print)?;
    print("")?;
    print_nodes(&status.nodes)
}

/// CPU that packs blocks, and what holds it.
fn packing_text(cpu_ms: u64, packing: &PackingInfo) -> String {
    let refused = match packing.refused_bytes {
        0 => String::new(),
        bytes => format!(", {} left until guests rest", Size(bytes)),
    };
    format!(
        "{:.1} s of it to pack blocks, {:.1} us each; now {:.1} % of the machine, of {} % while guests work{refused}",
        cpu_ms as f64 / 1000.0,
        packing.ns_per_block as f64 / 1000.0,
        packing.recent_per_mille as f64 / 10.0,
        packing.share_percent
    )
}

fn print_nodes(nodes: &[NodeView]) -> Result<()> {
    let mut rows = table(
        &["NODE", "STATE", "MACHINE", "ADDRESS", "PROCESS", "CPU", "MEMORY", "DEVICES", "CAPACITY", "USED", "JOURNAL"],
        &[4, 5, 6, 7, 8, 9, 10],
    );
    for node in nodes {
        let serving = node.devices.iter().filter(|d| d.health == DeviceHealth::Serving).count();
        let sum = |f: fn(&DeviceInfo) -> u64| node.devices.iter().map(f).sum::<u64>();
        let capacity = sum(|d| d.capacity_bytes);
        rows.add_row([
            node.id.to_string(),
            node.state.to_string(),
            node.machine.clone().unwrap_or("-".to_string()),
            node.address.clone(),
            node.pid.map_or("-".to_string(), |p| p.to_string()),
            // Of a process of another machine nobody here knows more.
            node.pid.map_or("-".to_string(), |_| format!("{:.1} s", node.cpu_ms as f64 / 1000.0)),
            node.pid.map_or("-".to_string(), |_| Size(node.resident_bytes).to_string()),
            format!("{serving}/{}", node.devices.len()),
            Size(capacity).to_string(),
            percent_used(capacity, sum(|d| d.free_bytes)),
            percent_used(
                sum(|d| d.journal_bytes),
                sum(|d| d.journal_bytes - d.journal_used_bytes.min(d.journal_bytes)),
            ),
        ]);
    }
    print_table(&rows)?;
    nodes.iter().try_for_each(print_release)
}

fn print_release(node: &NodeView) -> Result<()> {
    if let Some(wire) = node.wire.filter(|wire| *wire < WIRE.newest) {
        print(format_args!(
            "node {}: of an older release; it speaks version {wire} of the messages, this one {WIRE}",
            node.id
        ))?;
    }
    Ok(())
}
