//! `holdfast machine`: the machines of a grid, and how one leaves it.

use super::format::{print, print_json, print_table, table};
use crate::client;
use crate::grid::certs::now_s;
use crate::grid::layout::GridDir;
use crate::logger::{date, moment};
use anyhow::Result;
use clap::{Args, Subcommand};
use holdfast_api::{Code, LinkState, MachineInfo, MachineNode, NodeState, Request, Response, refuse};
use holdfast_format::schedule::Span;
use serde_json::json;
use std::time::Duration;

/// Pace of looking whether a machine is empty.
const EMPTY_PACE: Duration = Duration::from_secs(1);

#[derive(Args, Debug)]
#[command(after_help = "Examples, on any machine of the grid:\n  \
    holdfast machine list\n  \
    holdfast machine announce b --for 30m\n  \
    holdfast machine remove b          empties machine b, and takes it out\n  \
    holdfast machine remove b --dead   it will not be back: out at once, what it held is made again\n\n\
    A machine is a host and the nodes beside it, and has the host's name. To put another one in its place: remove \
    it, then `holdfast grid token`, and on the new machine `holdfast grid up --name b --join TOKEN`.")]
pub struct MachineArgs {
    #[command(subcommand)]
    action: MachineAction,
}

#[derive(Subcommand, Debug)]
enum MachineAction {
    /// All machines: whether they are there and since when, their nodes, what they serve, their release, when
    /// certificates end
    ///
    /// What nobody has said is shown as `?`: hosts of older releases tell less of themselves.
    List,
    /// Say that a machine will be away for a while: its reboot, or its new memory
    ///
    /// What comes of that nobody is told, and `holdfast status` ends with 0 for it: that its host and nodes are away,
    /// the volumes that it served, and what bears less meanwhile. What may be lost is told, and so are devices, and
    /// what anything else adds. It stops nothing, and ends by itself.
    Announce {
        name: String,
        /// So long, for example 30m or 2h; at most 30d
        #[arg(long = "for", value_name = "SPAN", required_unless_present = "over")]
        span: Option<Span>,
        /// It is back before that
        #[arg(long, conflicts_with = "span")]
        over: bool,
    },
    /// Take a machine out of the grid for good
    ///
    /// Everything is moved off its devices first; where it is interrupted, give the command again. Then its nodes are
    /// none of the grid's, their numbers are nobody's again, and in a grid with TLS its certificates are revoked. Its
    /// name is free for another machine. What runs there still is stopped there (`holdfast grid down`).
    Remove {
        name: String,
        /// It is dead and will not be back: out at once; what it held is made again from the others. Refused while it
        /// answers
        #[arg(long)]
        dead: bool,
        /// Although volumes have data that is nowhere else, and is lost then
        #[arg(long, requires = "dead")]
        accept_loss: bool,
        /// Return when the machine is being emptied; the same command takes it out once nothing is left
        #[arg(long, conflicts_with = "dead")]
        no_wait: bool,
    },
}

/// What was announced of a machine.
fn announced_text(name: &str, until_s: u64) -> String {
    format!("machine {name} is to be away until {}: what comes of that nobody is told", moment(until_s))
}

fn announce(dir: &GridDir, name: &str, span: Option<Span>, json: bool) -> Result<()> {
    let seconds = span.map(Span::seconds);
    client::done(dir, &Request::MachineAnnounce { name: name.to_string(), seconds })?;
    match seconds.map(|seconds| now_s() + seconds) {
        _ if json => print_json(&json!({ "machine": name, "announced_s": seconds })),
        Some(until_s) => print(announced_text(name, until_s)),
        None => print(format_args!("machine {name} is not to be away: what is not well there is told")),
    }
}

pub fn run(args: &MachineArgs, dir: &GridDir, json: bool) -> Result<()> {
    match &args.action {
        MachineAction::List => list(dir, json),
        MachineAction::Announce { name, span, over: _ } => announce(dir, name, *span, json),
        MachineAction::Remove { name, dead, accept_loss, no_wait } => {
            let request = Request::MachineRemove { name: name.clone(), dead: *dead, accept_loss: *accept_loss };
            remove(dir, name, &request, *no_wait, json)
        }
    }
}

fn remove(dir: &GridDir, name: &str, request: &Request, no_wait: bool, json: bool) -> Result<()> {
    let mut told = String::new();
    let notes = loop {
        let (waits, notes) = match client::ask(dir, request, client::PATIENT)? {
            Response::Leaving { waits, notes } => (waits, notes),
            other => refuse!(
                Code::Unsupported,
                "the host's answer does not fit the request ({other:?}): is it another release?"
            ),
        };
        let Some(why) = waits else { break notes };
        if no_wait {
            let text = format!("{why}; `holdfast machine remove {name}` takes it out once nothing is left there");
            return if json {
                print_json(&json!({ "machine": name, "removed": false, "waits": why }))
            } else {
                print(text)
            };
        }
        if why != told && !json {
            print(&why)?;
        }
        told = why;
        std::thread::sleep(EMPTY_PACE);
    };
    if json {
        return print_json(&json!({ "machine": name, "removed": true, "notes": notes }));
    }
    print(format_args!(
        "machine {name} is not a part of the grid any more, and nobody gets the numbers of its nodes again; what it \
         held is made again where it was not moved (`holdfast task watch`)"
    ))?;
    notes.iter().try_for_each(print)?;
    let join = match has_tls(dir)? {
        true => "`holdfast grid token`, then there `holdfast grid up … --join TOKEN`".to_string(),
        false => format!("there `holdfast grid up … --join {}`", dir.load()?.grid),
    };
    print(format_args!(
        "next: what runs there still is stopped there by `holdfast grid down`; another one may have its name: {join}"
    ))
}

/// A grid that is asked from elsewhere has.
fn has_tls(dir: &GridDir) -> Result<bool> {
    Ok(dir.remote().is_some() || dir.load()?.tls)
}

fn list(dir: &GridDir, json: bool) -> Result<()> {
    let machines = client::machines(dir)?;
    super::volume::warn_of_store(client::status(dir)?.metadata_trouble.as_ref());
    if json {
        return print_json(&machines);
    }
    let mut rows =
        table(&["MACHINE", "HOST", "SINCE", "ADDRESS", "NODES", "SERVES", "RELEASE", "CERTIFICATES UNTIL"], &[]);
    let is_tls = has_tls(dir)?;
    for machine in &machines {
        rows.add_row([
            machine.name.clone(),
            if machine.up { "up" } else { "gone" }.to_string(),
            machine.since_s.map_or("?".to_string(), moment),
            address(machine),
            nodes(&machine.nodes),
            if machine.volumes.is_empty() { "-".to_string() } else { machine.volumes.join(", ") },
            machine.release.clone().unwrap_or("?".to_string()),
            match (is_tls, machine.certificates_end_s) {
                (false, _) => "-".to_string(),
                (true, ends) => ends.map_or("?".to_string(), date),
            },
        ]);
    }
    print_table(&rows)?;
    for machine in &machines {
        machine.announced_until_s.map_or(Ok(()), |until_s| print(announced_text(&machine.name, until_s)))?;
    }
    for machine in machines.iter().filter(|machine| machine.signs) {
        print(format_args!("machine {} has the key of the grid's authority", machine.name))?;
    }
    for machine in machines.iter().filter(|machine| !machine.up) {
        let (name, nodes) = (&machine.name, &machine.nodes);
        let is_answering = nodes.iter().any(|node| node.link != LinkState::Down);
        print(match is_answering {
            true => format!("machine {name}: its host is gone, and its nodes serve; next: `holdfast grid up` there"),
            false => format!(
                "machine {name} is gone; next: `holdfast grid up` there, or, if it will not be back, `holdfast \
                 machine remove {name} --dead`"
            ),
        })?;
    }
    Ok(())
}

/// Without the host's port, which is another one at each start.
fn address(machine: &MachineInfo) -> String {
    let address = machine.address.as_ref().or(machine.nodes.first().map(|node| &node.address));
    let ip = address.and_then(|address| address.parse::<std::net::SocketAddr>().ok()).map(|address| address.ip());
    ip.map_or("?".to_string(), |ip| ip.to_string())
}

fn nodes(nodes: &[MachineNode]) -> String {
    let node = |node: &MachineNode| format!("{} {}", node.id, NodeState::from(node.link));
    if nodes.is_empty() { "-".to_string() } else { nodes.iter().map(node).collect::<Vec<_>>().join(", ") }
}
