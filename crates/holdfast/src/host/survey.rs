//! Facts about this host and its machine for the page of metrics, beside its status: nothing of it waits for the metadata
//! store, other hosts or nodes.

use super::commands::Command;
use super::control::ControlPlane;
use crate::grid::certs::{Certificates, Leaf, roles};
use crate::grid::layout::MetaConfig;
use crate::overview::gather_as;
use crate::protocol::code_of;
use anyhow::{Result, anyhow};
use holdfast_api::{Error, Finding, HostStatus, Neighbour, SlowInfo, TaskInfo};
use holdfast_host::{BOUNDS_US, Kind, Stage, Tally, Totals};
use holdfast_http::metrics::{Certificate, Survey, Times};
use holdfast_verdict::findings;

fn told<T>(result: Result<T>) -> Result<T, Error> {
    result.map_err(|error| Error::new(code_of(&error), format!("{error:#}")))
}

impl Survey for ControlPlane {
    fn loads(&self) -> Result<Vec<Neighbour>, Error> {
        told(self.ask(|answer| Command::Loads { answer }))
    }

    fn slow(&self, names: &[String]) -> Result<Vec<(String, SlowInfo)>, Error> {
        let slow = |name: &String| {
            let slow = self.ask(|answer| Command::Slow { name: name.clone(), answer });
            slow.map(|slow| Some((name.clone(), *slow?))).transpose()
        };
        told(names.iter().filter_map(slow).collect())
    }

    fn times(&self) -> Result<Vec<Times>, Error> {
        let totals = told(self.ask(|answer| Command::Totals { answer }))?;
        let kinds = [(Kind::Read, "read"), (Kind::Write, "write")];
        Ok(kinds.into_iter().flat_map(|(kind, op)| times_of(&totals, kind, op)).collect())
    }

    fn tasks(&self, status: &HostStatus) -> Result<Vec<TaskInfo>, Error> {
        told(self.tasks_in(&status.nodes, &status.volumes))
    }

    fn findings(&self, status: Option<&HostStatus>) -> Result<Vec<Finding>, Error> {
        let status = || status.cloned().ok_or_else(|| anyhow!("it does not say how it is"));
        told(gather_as(&self.dir, status).map(|status| findings::of(&status)))
    }

    fn certificates(&self) -> Result<Vec<Certificate>, Error> {
        told(self.own_certificates())
    }

    fn members(&self) -> Result<usize, Error> {
        Ok(match &self.config().meta {
            MetaConfig::Etcd(etcd) => etcd.endpoints.len(),
            MetaConfig::Embedded => 0,
        })
    }
}

/// Of whole requests, then of each stage.
fn times_of(totals: &Totals, kind: Kind, op: &'static str) -> impl Iterator<Item = Times> {
    let times = move |stage: Option<Stage>, tally: Tally| {
        let bounds = BOUNDS_US.into_iter().map(Some).chain([None]);
        let buckets = bounds.zip(tally.counts).collect();
        Times { op, stage: stage.map(|stage| stage.name_in(kind)), buckets, sum_us: tally.us }
    };
    let stages = Stage::ALL.iter().map(move |stage| times(Some(*stage), totals.stage(kind, *stage)));
    std::iter::once(times(None, *totals.whole(kind))).chain(stages)
}

impl ControlPlane {
    fn own_certificates(&self) -> Result<Vec<Certificate>> {
        // Nodes of other machines have theirs there.
        let config = self.dir.load()?;
        if !config.tls {
            return Ok(Vec::new());
        }
        let certificates = Certificates::of(&self.dir, config.grid_id()?);
        let listed = certificates.list(&roles(&config))?;
        // One of another authority, which is nobody's here, is listed no less.
        let servers = self.settings.server_dirs().map(|dir| Ok(certificates.list_server(dir)?[1].clone()));
        let servers = servers.collect::<Result<Vec<_>>>()?;
        Ok(listed
            .into_iter()
            .chain(servers)
            .map(|Leaf { role, expires, .. }| Certificate { role, ends_s: expires })
            .collect())
    }
}
