//! Another machine is lost: by the hand of the operator, who is told when, and the same when it is to come back.
//!
//! The drill runs on a machine that stays, since whoever is lost measures nothing.

use super::{Calamity, Site, Steps};
use crate::client;
use crate::drill::rejoin::unix_ms;
use crate::drill::tools::sleep;
use anyhow::{Context, Result, bail};
use clap::Args;
use holdfast_api::{Concern, Finding, HostState, Request};
use std::time::{Duration, Instant};

const LOOK_PACE: Duration = Duration::from_millis(100);

#[derive(Args, Clone, Debug)]
pub struct MachineLossArgs {
    #[command(flatten)]
    pub common: super::EmergencyArgs,
    /// The machine to lose, another one than this [default: the first that has nodes]
    #[arg(long, value_name = "NAME")]
    machine: Option<String>,
    /// How long the drill waits for you to take the machine away
    #[arg(long, default_value_t = 600, value_name = "N", value_parser = clap::value_parser!(u64).range(5..=86_400))]
    wait_seconds: u64,
}

pub struct MachineLoss {
    wanted: Option<String>,
    wait: Duration,
    name: String,
    nodes: Vec<u32>,
    gone_ms: Option<u64>,
}

impl MachineLoss {
    pub fn new(args: &MachineLossArgs) -> MachineLoss {
        let (wanted, wait) = (args.machine.clone(), Duration::from_secs(args.wait_seconds));
        MachineLoss { wanted, wait, name: String::new(), nodes: Vec::new(), gone_ms: None }
    }

    /// How many of the machine's nodes are there, as far as the host tells.
    fn nodes_up(&self, site: &Site) -> Option<usize> {
        let status = site.status().ok().filter(|status| status.host.state == HostState::Up)?;
        let is_up = |id: &&u32| status.nodes.iter().any(|node| node.id == **id && node.state.serves());
        Some(self.nodes.iter().filter(is_up).count())
    }

    fn await_nodes(&self, site: &Site, count: usize, time_max: Duration) -> Result<()> {
        let end = Instant::now() + time_max;
        while self.nodes_up(site) != Some(count) {
            if Instant::now() >= end {
                bail!("{} s have passed, and nodes of machine {} are not so", time_max.as_secs(), self.name);
            }
            sleep(LOOK_PACE)?;
        }
        Ok(())
    }
}

impl Calamity for MachineLoss {
    fn name(&self) -> &'static str {
        "machine-loss"
    }

    fn check(&mut self, site: &Site) -> Result<()> {
        let own = site.dir.load()?.host.name;
        let machines = client::machines(&site.dir)?;
        let mut others = machines.into_iter().filter(|machine| machine.name != own && !machine.nodes.is_empty());
        let wanted = self.wanted.clone();
        let chosen = match &wanted {
            Some(name) if *name == own => {
                bail!("{own} is this machine, and who is lost measures nothing; run the drill on another one")
            }
            Some(name) => others.find(|machine| machine.name == *name),
            None => others.find(|machine| machine.up),
        };
        let Some(machine) = chosen else {
            match wanted {
                Some(name) => bail!("this grid has no machine {name} with nodes; `holdfast machine list` shows them"),
                None => bail!(
                    "this grid has no other machine with nodes, and none can be lost. Have one join (`holdfast grid token`); or \
                     take what comes nearest: `holdfast drill node-loss`, which loses a node of this machine"
                ),
            }
        };
        self.nodes = machine.nodes.iter().map(|node| node.id).collect();
        self.name = machine.name;
        client::done(&site.dir, &Request::CheckDown { nodes: self.nodes.clone() })
            .with_context(|| format!("the grid can't do without machine {}", self.name))
    }

    fn warning(&self) -> String {
        format!("you are asked to take machine {} away under load; what it serves is away with it", self.name)
    }

    fn prepare(&mut self, site: &Site) -> Result<String> {
        // The drill's own volume has to bear it, too.
        client::done(&site.dir, &Request::CheckDown { nodes: self.nodes.clone() }).with_context(|| {
            format!("the drill's volume can't do without machine {}; give another --layout", self.name)
        })?;
        Ok(format!("on machine {}: `holdfast grid up`", self.name))
    }

    fn strike(&mut self, site: &Site) -> Result<String> {
        eprintln!(
            "NOW take machine {0} away: pull its plug, or on {0}: `holdfast grid down --force`. The drill waits {1} s at most",
            self.name,
            self.wait.as_secs()
        );
        self.await_nodes(site, 0, self.wait).context("the machine was not taken away")?;
        self.gone_ms = Some(unix_ms());
        Ok(format!("machine {} with {} of the grid's nodes was taken away", self.name, self.nodes.len()))
    }

    fn since_ms(&self) -> Option<u64> {
        self.gone_ms
    }

    fn is_told(&self) -> bool {
        true
    }

    fn is_told_by(&self, finding: &Finding) -> bool {
        let is_about = |node: &u32| finding.what.starts_with(&format!("node {node} "));
        finding.concern == Concern::Redundancy && self.nodes.iter().any(is_about)
    }

    fn mend(&mut self, site: &Site, steps: &mut Steps) -> Result<()> {
        let begun = Instant::now();
        eprintln!("NOW bring machine {0} back; on {0}: `holdfast grid up`. The drill waits", self.name);
        self.await_nodes(site, self.nodes.len(), site.mend_max)?;
        steps.note(&self.name, "grid up", begun);
        Ok(())
    }

    fn undo(&mut self, site: &Site) -> Result<()> {
        match self.nodes_up(site) {
            Some(up) if up == self.nodes.len() => Ok(()),
            _ => bail!("machine {0} is away; on {0}: `holdfast grid up`", self.name),
        }
    }

    fn clear_up(&mut self) -> Result<()> {
        Ok(())
    }
}
