//! Protection rules on the command line: which layout one chooses on this grid, why, and what that costs, before anything is
//! made.

use super::format::{print, print_json, print_table, table};
use crate::capacity::{efficiency, writable_now};
use crate::grid::layout::GridDir;
use crate::overview::gather;
use anyhow::{Result, anyhow};
use clap::Args;
use holdfast_api::{Code, GridStatus, HostState, refuse, takers};
use holdfast_base::size::Size;
use holdfast_format::geometry::Layout;
use holdfast_volume::protect::{Protect, bears, choose, for_few, lacks};
use serde::Serialize;

/// How a volume is kept: by a layout, or by a rule that chooses one.
#[derive(Args, Debug)]
#[group(id = "redundancy", multiple = false)]
pub struct Redundancy {
    /// Redundancy: mirror:2, mirror:3 or parity:K+M; parity:2+1 survives any one node [default for new volumes]. With @device behind
    /// it, as in mirror:2@device, over devices, whichever nodes they are in: for a single node. For two nodes with several devices
    /// each, nested-mirror and nested-parity:K+1 survive a node and at the same time a device of the other.
    /// `holdfast space` tells what each leaves of the raw capacity
    #[arg(long)]
    pub layout: Option<Layout>,
    /// What shall be survived: `device`, `node`, or `node+device` for a node and at the same time a device of another. Chooses the
    /// layout for the nodes and devices that there are now; `holdfast volume plan` shows which
    #[arg(long)]
    pub protect: Option<Protect>,
}

impl Redundancy {
    /// As [`Self::settle`], for a new volume of which nothing is said: where the grid has too few nodes for the usual layout, what
    /// bears the loss of most here.
    pub fn settle_new(&self, dir: &GridDir) -> Result<Option<(Layout, Option<String>)>> {
        let is_open = self.layout.is_none() && self.protect.is_none();
        let found = is_open.then(|| gather(dir)).transpose()?.filter(|status| status.host.state == HostState::Up);
        let Some(plan) = found.and_then(|status| Plan::for_few(&status)) else { return self.settle(dir) };
        Ok(Some((plan.layout.parse()?, Some(plan.sentence(None)))))
    }

    /// The layout that is asked for, and what is to be said of it before anything is done.
    pub fn settle(&self, dir: &GridDir) -> Result<Option<(Layout, Option<String>)>> {
        let Some(rule) = self.protect else { return Ok(self.layout.map(|layout| (layout, None))) };
        let plan = Plan::by_rule(&gather(dir)?, rule).map_err(|why| anyhow!(why))?;
        let layout = plan.layout.parse()?;
        Ok(Some((layout, Some(plan.sentence(None)))))
    }
}

/// What a layout means on this grid.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Plan {
    /// The rule that chose it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    pub layout: String,
    /// What may be lost at a time.
    pub bears: String,
    /// Devices that take data, by node.
    pub devices: Vec<usize>,
    /// Of what devices hold, what guests see.
    pub efficiency: f64,
    /// What guests can write now, of all volumes together.
    pub writable_bytes: u64,
}

impl Plan {
    pub fn of(status: &GridStatus, layout: Layout) -> Plan {
        Plan {
            rule: None,
            layout: layout.to_string(),
            bears: bears(layout),
            devices: devices_of(status),
            efficiency: efficiency(layout),
            writable_bytes: writable_now(status, layout),
        }
    }

    fn by_rule(status: &GridStatus, rule: Protect) -> Result<Plan, String> {
        let layout = choose(rule, &devices_of(status))?;
        Ok(Plan { rule: Some(rule.to_string()), ..Plan::of(status, layout) })
    }

    /// On a grid that has too few nodes for the usual layout: by the rule that bears most there, if any can be followed. One
    /// that has nodes which are away is not to get less than it could bear when they are back.
    fn for_few(status: &GridStatus) -> Option<Plan> {
        if status.nodes.iter().any(|node| !node.state.serves()) {
            return None;
        }
        let (rule, layout) = for_few(&devices_of(status))?;
        Some(Plan { rule: Some(rule.to_string()), ..Plan::of(status, layout) })
    }

    /// One line for people; of a volume of so many bytes also what it takes of devices when it is full.
    pub fn sentence(&self, size_bytes: Option<u64>) -> String {
        let Plan { layout, bears, .. } = self;
        let chosen = match &self.rule {
            Some(rule) => format!("--protect {rule} on {} means layout {layout}", grid_text(&self.devices)),
            None => format!("layout {layout} on {}", grid_text(&self.devices)),
        };
        let full = size_bytes.map_or(String::new(), |size| {
            let raw = Size((size as f64 / self.efficiency) as u64);
            format!("; full, {} take {raw} of devices", Size(size))
        });
        let percent = self.efficiency * 100.0;
        let writable = Size(self.writable_bytes);
        format!(
            "{chosen}: it bears the loss of {bears}, and leaves {percent:.1} % of raw capacity, {writable} now{full}"
        )
    }
}

/// Devices that take data, by node, of nodes that have any.
fn devices_of(status: &GridStatus) -> Vec<usize> {
    status.nodes.iter().map(|node| takers(&node.devices).count()).filter(|count| *count > 0).collect()
}

/// For example "3 nodes of 2 devices".
fn grid_text(devices: &[usize]) -> String {
    let nodes = if devices.len() == 1 { "1 node".to_string() } else { format!("{} nodes", devices.len()) };
    let (least, most) = (devices.iter().min().unwrap_or(&0), devices.iter().max().unwrap_or(&0));
    match (least, most) {
        (1, 1) => format!("{nodes} of 1 device"),
        (least, most) if least == most => format!("{nodes} of {least} devices"),
        (least, most) => format!("{nodes} of {least} to {most} devices"),
    }
}

/// `holdfast volume plan`.
pub fn show_plan(dir: &GridDir, json: bool) -> Result<()> {
    let status = gather(dir)?;
    let plans: Vec<(Protect, Result<Plan, String>)> =
        Protect::ALL.into_iter().map(|rule| (rule, Plan::by_rule(&status, rule))).collect();
    if json {
        return print_json(&plans.into_iter().filter_map(|(_, plan)| plan.ok()).collect::<Vec<_>>());
    }
    print(format_args!("{} that take data:", grid_text(&devices_of(&status))))?;
    let mut rows = table(&["--PROTECT", "LAYOUT", "BEARS THE LOSS OF", "OF RAW", "CAN BE WRITTEN"], &[3, 4]);
    for (rule, plan) in &plans {
        let Ok(plan) = plan else { continue };
        let efficiency = format!("{:.1} %", plan.efficiency * 100.0);
        let writable = Size(plan.writable_bytes).to_string();
        rows.add_row([rule.to_string(), plan.layout.clone(), plan.bears.clone(), efficiency, writable]);
    }
    print_table(&rows)?;
    for why in plans.iter().filter_map(|(_, plan)| plan.as_ref().err()) {
        print(why)?;
    }
    Ok(())
}

/// `--dry-run`: what a layout means, for a volume of that size, and nothing else.
pub fn show_one(dir: &GridDir, json: bool, of: &Redundancy, size_bytes: Option<u64>) -> Result<()> {
    let status = gather(dir)?;
    let for_few = Plan::for_few(&status).filter(|_| of.layout.is_none());
    let plan = match (of.protect, for_few) {
        (Some(rule), _) => Plan::by_rule(&status, rule).map_err(|why| anyhow!(why))?,
        (None, Some(plan)) => plan,
        (None, None) => {
            let layout = of.layout.unwrap_or(Layout::DEFAULT);
            if let Some((wants, has)) = lacks(layout, &devices_of(&status)) {
                refuse!(
                    Code::Redundancy,
                    "layout {layout} wants {wants} and this grid has {has} that take data; `holdfast volume plan` shows what \
                     fits"
                );
            }
            Plan::of(&status, layout)
        }
    };
    if json { print_json(&plan) } else { print(plan.sentence(size_bytes)) }
}
