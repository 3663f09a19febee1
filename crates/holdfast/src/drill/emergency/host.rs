//! The host's process is killed, and started again.

use super::steps::{Haste, give};
use super::{Calamity, Site, Steps, check_unused};
use crate::grid::processes::Role;
use anyhow::{Context, Result, bail};
use clap::Args;
use holdfast_api::{Concern, Finding};
use rustix::process::Signal;
use std::time::Duration;

/// A process that was killed is gone by then.
const GONE_WITHIN: Duration = Duration::from_secs(20);

#[derive(Args, Clone, Debug)]
pub struct HostLossArgs {
    #[command(flatten)]
    pub common: super::EmergencyArgs,
    /// Although clients are connected to other volumes of this host: they wait, or get errors
    #[arg(long)]
    pub with_clients: bool,
}

pub struct HostLoss {
    pub with_clients: bool,
}

impl Calamity for HostLoss {
    fn name(&self) -> &'static str {
        "host-loss"
    }

    fn check(&mut self, site: &Site) -> Result<()> {
        check_unused(&site.status()?, self.with_clients)
    }

    fn warning(&self) -> String {
        "this machine's host is killed under load; volumes that it serves are away until it is started again"
            .to_string()
    }

    fn prepare(&mut self, _: &Site) -> Result<String> {
        Ok("`holdfast grid up`".to_string())
    }

    fn strike(&mut self, site: &Site) -> Result<String> {
        let running = Role::Host.signal(&site.dir, Signal::KILL)?;
        if !Role::Host.wait_gone(&site.dir, GONE_WITHIN) {
            bail!("the host (process {}) does not end although it was killed: its machine hangs", running.pid);
        }
        Ok(format!("the host (process {}) was killed", running.pid))
    }

    fn is_told(&self) -> bool {
        true
    }

    fn is_told_by(&self, finding: &Finding) -> bool {
        finding.concern == Concern::Service && finding.what.starts_with("the host")
    }

    fn mend(&mut self, _: &Site, steps: &mut Steps) -> Result<()> {
        steps.give(&["grid", "up"]).map(drop)
    }

    fn undo(&mut self, site: &Site) -> Result<()> {
        give(site, &["grid", "up"], Haste::Undoes).map(drop).context("run `holdfast grid up`")
    }

    fn clear_up(&mut self) -> Result<()> {
        Ok(())
    }
}
