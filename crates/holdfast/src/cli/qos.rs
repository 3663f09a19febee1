//! `holdfast qos`: what the grid can do, and what of that is promised.

use super::format::{print, print_json, print_table, table};
use super::protect::Redundancy;
use crate::client::{self, UNHURRIED};
use crate::drill::{self, Measure};
use crate::grid::layout::GridDir;
use crate::logger::moment;
use anyhow::{Result, bail};
use clap::{Args, Subcommand};
use holdfast_api::{QosInfo, Request, Response};
use holdfast_base::size::Size;
use holdfast_format::geometry::Layout;

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    holdfast qos measure                             what this host can do without one of the nodes\n  \
    holdfast volume set vm1 --qos floor=2000         2,000 requests of 8 KiB a second, if vm1 asks for them\n  \
    holdfast qos list\n\n\
    Floors are promised of what was measured: all together half of it, and with more than two hosts one part in as many.\n\
    `holdfast volume set VOLUME --qos none` takes one back.")]
pub struct QosArgs {
    #[command(subcommand)]
    action: QosAction,
}

#[derive(Subcommand, Debug)]
enum QosAction {
    /// Measure what this host can do without one of the nodes, with fio and a volume of its own
    ///
    /// For that time this host has no connection to one of the nodes; all volumes go on without it. Other guests' work counts as
    /// what is not there: measure while they rest.
    Measure {
        /// Length of the load
        #[arg(long, default_value_t = 10, value_name = "N", value_parser = clap::value_parser!(u64).range(2..=3600))]
        seconds: u64,
        /// Size of the volume under load
        #[arg(long, default_value = "512MiB", value_name = "SIZE")]
        volume_size: Size,
        #[command(flatten)]
        redundancy: Redundancy,
    },
    /// What was measured, and which floors are promised
    List,
}

pub fn run(args: QosArgs, dir: &GridDir, json: bool) -> Result<()> {
    match args.action {
        QosAction::Measure { seconds, volume_size, redundancy } => {
            // The load is of this machine.
            dir.check_here()?;
            let layout = super::volume::said(redundancy.settle_new(dir)?, json)?.unwrap_or(Layout::DEFAULT);
            let bears_loss = layout.failures() > 0 && !layout.is_on_devices();
            let how = Measure { seconds, volume_size, layout: layout.to_string(), bears_loss };
            let found = drill::measure(dir, &how)?;
            let request = Request::QosMeasured { iops: found.iops, nodes: found.nodes };
            let qos = told(client::ask(dir, &request, UNHURRIED)?)?;
            if json {
                return print_json(&qos);
            }
            let without = match found.without {
                Some(node) => format!("without node {node}"),
                None => format!("with all nodes, since {layout} bears the loss of none: floors end with the first"),
            };
            print(format!("{} requests of 8 KiB a second, seven reads to three writes, {without}", found.iops))?;
            print(summary(&qos))
        }
        QosAction::List => list(dir, json),
    }
}

fn told(response: Response) -> Result<QosInfo> {
    match response {
        Response::Qos(qos) => Ok(*qos),
        other => bail!("the host's answer does not fit the request ({other:?}): is it another release?"),
    }
}

fn summary(qos: &QosInfo) -> String {
    let Some(all) = qos.for_floors else {
        return "nothing was measured, so no floor can be promised: `holdfast qos measure`".to_string();
    };
    let promised = qos.promised();
    match all.checked_sub(promised) {
        Some(left) => format!("floors may come to {all} a second in all; {promised} are promised, {left} are left"),
        None => format!(
            "floors may come to {all} a second in all, and {promised} are promised: more than can be kept; lower some, or \
             measure again: `holdfast qos measure`"
        ),
    }
}

fn list(dir: &GridDir, json: bool) -> Result<()> {
    let qos = told(client::ask(dir, &Request::Qos, UNHURRIED)?)?;
    if json {
        return print_json(&qos);
    }
    if !qos.measured.is_empty() {
        let mut rows = table(&["HOST", "REQUESTS OF 8 KIB A SECOND", "NODES", "MEASURED"], &[1, 2]);
        for of in &qos.measured {
            rows.add_row([of.host.clone(), of.iops.to_string(), of.nodes.to_string(), moment(of.at_s)]);
        }
        print_table(&rows)?;
    }
    if !qos.floors.is_empty() {
        let mut rows = table(&["VOLUME", "FLOOR"], &[1]);
        for of in &qos.floors {
            rows.add_row([of.volume.clone(), of.floor.to_string()]);
        }
        print_table(&rows)?;
    }
    print(summary(&qos))
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_api::FloorInfo;

    #[test]
    fn what_is_left_is_told_and_what_is_too_much() {
        let floors = vec![FloorInfo { volume: "vm1".into(), floor: 700 }];
        let qos = |for_floors| QosInfo { for_floors, floors: floors.clone(), ..QosInfo::default() };
        assert!(summary(&qos(None)).contains("holdfast qos measure"));
        assert!(summary(&qos(Some(1000))).ends_with("700 are promised, 300 are left"));
        assert!(summary(&qos(Some(699))).contains("more than can be kept"));
    }
}
