//! The thread that tells people and programs what is not well.
//!
//! Of several hosts the steward tells, so that it is told once; each of those that can't reach the metadata store does,
//! since then nobody knows who the steward is.

use super::control::ControlPlane;
use super::http::health;
use crate::alerts::{Sender, Ways};
use crate::logger;
use anyhow::{Context, Result};
use holdfast_api::{AlertArrival, Code, refuse};
use holdfast_runtime::clock;
use holdfast_verdict::alerts::Alerts;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

const LOOK_EVERY: Duration = Duration::from_secs(5);

pub(super) fn start(plane: &Arc<ControlPlane>) -> Result<()> {
    if !plane.settings.alerts.is_any() {
        return Ok(());
    }
    let plane = Arc::clone(plane);
    let run = move || run(&plane);
    std::thread::Builder::new().name("alerts".to_string()).spawn(run).context("no thread for alerts")?;
    Ok(())
}

fn run(plane: &ControlPlane) {
    let (mut alerts, mut ways) = (Alerts::default(), Ways::new(&plane.settings.alerts, plane.sender()));
    let mut told = Vec::new();
    loop {
        std::thread::sleep(LOOK_EVERY);
        // One look that fails changes nothing.
        if let Ok(health) = health(plane) {
            ways.add(&alerts.look(clock::now(), &health.findings, plane.tells()));
        }
        let failed = ways.send(clock::now());
        plane.alert_troubles.lock().unwrap_or_else(PoisonError::into_inner).clone_from(&ways.troubles());
        // Each pause is longer, so that the log is not full of it.
        failed.iter().filter(|why| !told.contains(*why)).for_each(|why| logger::warn(format_args!("{why}")));
        if !failed.is_empty() {
            told = failed;
        }
    }
}

impl ControlPlane {
    fn sender(&self) -> Sender {
        Sender { grid: self.revocations.certificates.grid().to_string(), host: self.catalog.host().clone() }
    }

    /// Whether it is this host's to tell.
    fn tells(&self) -> bool {
        self.stewardship.leads() || self.store_trouble().is_some()
    }

    /// Sends a test by each way that is set.
    pub(super) fn test_alerts(&self) -> Result<Vec<AlertArrival>> {
        let targets = &self.settings.alerts;
        if !targets.is_any() {
            refuse!(
                Code::State,
                "this host tells nobody: set alerts.webhook or alerts.smtp in holdfast.toml, and restart it"
            );
        }
        Ok(targets.test(&self.sender()))
    }
}
