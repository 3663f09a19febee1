//! Restarting nodes one after the other, so that no volume is ever less redundant than one node's absence makes it: how a new
//! version of the program comes into service.
//!
//! States of a node: asked about (the host says that data could do without it) -> stopped -> started, and serves. The next is
//! asked about only then, and that question is answered with no until what the restart left behind was made up for.

use super::{start_node, stop_node};
use crate::client;
use crate::grid::layout::GridDir;
use crate::grid::processes::Role;
use anyhow::{Context, Result, anyhow};
use holdfast_api::{Code, Error, refuse};
use std::time::{Duration, Instant};

/// The host is asked this often whether a node may go.
const ASK_EVERY: Duration = Duration::from_millis(500);

/// What is waited for is told this often, where it changes.
const TELL_EVERY: Duration = Duration::from_secs(10);

/// Restarts these nodes of this machine in turn; `tell` hears of each step. Where data can't do without one for longer than
/// `patience`, the rest is left as it is, with the host's reason.
pub fn restart_nodes(dir: &GridDir, nodes: &[u32], patience: Duration, mut tell: impl FnMut(String)) -> Result<()> {
    for (i, node) in nodes.iter().enumerate() {
        let so_far = || match nodes[..i].len() {
            0 => "nothing was restarted".to_string(),
            _ => format!("restarted so far: {}", listed(&nodes[..i])),
        };
        wait_until_spare(dir, *node, patience, &mut tell)
            .with_context(|| format!("node {node} is not restarted; {}", so_far()))?;
        stop_node(dir, *node, false).with_context(so_far)?;
        start_node(dir, *node, false)
            .with_context(|| format!("node {node} was stopped and does not start; {}", so_far()))?;
        tell(format!("node {node} is restarted ({} of {})", i + 1, nodes.len()));
    }
    let last = nodes.last().copied();
    last.map_or(Ok(()), |node| {
        wait_until_spare(dir, node, patience, &mut tell).context("all nodes are restarted, but not all is well")
    })
}

fn listed(nodes: &[u32]) -> String {
    nodes.iter().map(|node| format!("node {node}")).collect::<Vec<_>>().join(", ")
}

/// Until data could do without a node: everything is as redundant as it is to be. What that waits for is told at
/// once, and then now and then; where it can never be it is not waited for.
fn wait_until_spare(dir: &GridDir, node: u32, patience: Duration, tell: &mut impl FnMut(String)) -> Result<()> {
    if Role::Host.find(dir).is_none() {
        return Ok(());
    }
    let end = Instant::now() + patience;
    let mut told: Option<(String, Instant)> = None;
    loop {
        let Some((why, never)) = client::why_not_stopped(dir, node)? else { return Ok(()) };
        if never {
            refuse!(Code::Redundancy, "{why}");
        }
        if Instant::now() >= end {
            let waited = format!("after {} s of waiting", patience.as_secs());
            return Err(anyhow!(Error::new(Code::Redundancy, why)).context(waited));
        }
        if told.as_ref().is_none_or(|(before, at)| *before != why && at.elapsed() >= TELL_EVERY) {
            tell(format!("waiting, for {} s at most: {why}", end.saturating_duration_since(Instant::now()).as_secs()));
            told = Some((why, Instant::now()));
        }
        std::thread::sleep(ASK_EVERY);
    }
}
