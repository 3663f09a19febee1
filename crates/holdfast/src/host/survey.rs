//! Facts about this host and its machine for the page of metrics, beside its status: nothing of it waits for the metadata
//! store, other hosts or nodes.

use super::commands::Command;
use super::control::ControlPlane;
use crate::findings;
use crate::grid::certs::{Certificates, Leaf, roles};
use crate::grid::layout::MetaConfig;
use crate::overview::gather_as;
use crate::protocol::code_of;
use anyhow::{Result, anyhow};
use holdfast_api::{Error, Finding, HostStatus, Neighbour, SlowInfo, TaskInfo};
use holdfast_http::metrics::{Certificate, Survey};

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

impl ControlPlane {
    fn own_certificates(&self) -> Result<Vec<Certificate>> {
        let config = self.config();
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
