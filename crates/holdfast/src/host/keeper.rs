//! The keeper: this host serves the volumes whose records name it, and no others.
//!
//! Role: a thread of its own, which compares now and then, and when a record has changed. A volume that another host has
//! claimed is let go of; one that is to be served here and is not (another opening was faster, a take-over was cut short)
//! is opened again. So hosts that raced for a volume agree within moments, whoever came first.

use super::commands::Command;
use super::control::{CLOSE_MAX, ControlPlane, ask};
use crate::logger;
use anyhow::{Context, Result};
use std::sync::Arc;
use std::time::Duration;

/// Pace of looking, when nothing changes.
const PACE: Duration = Duration::from_secs(2);

pub(super) fn start(plane: Arc<ControlPlane>) -> Result<()> {
    let look = move || {
        loop {
            std::thread::sleep(PACE);
            if plane.store_is_silent() {
                continue;
            }
            let _alone = plane.alone();
            // Whoever looks after the store's health tells where it did not answer.
            let _ = plane.keep_to_records();
        }
    };
    std::thread::Builder::new().name("keeper".to_string()).spawn(look).context("no thread for the keeper")?;
    Ok(())
}

impl ControlPlane {
    /// To be called alone.
    pub(super) fn keep_to_records(&self) -> Result<()> {
        let open = self.live()?.volumes;
        for entry in self.catalog.all()?.iter().filter(|entry| entry.clone.is_none()) {
            let (name, is_here) = (entry.name().to_string(), self.catalog.is_here(entry));
            let found = open.iter().find(|volume| volume.name == name);
            match found {
                None if is_here => {
                    let Some(spec) = self.keys.spec_now_and_then(entry) else { continue };
                    logger::info(format_args!("volume {name} is to be in service here, and is opened"));
                    self.ask(|answer| Command::Open { spec, exported: true, answer })?;
                }
                Some(volume) if volume.exported && entry.served_by.is_some() && !is_here => {
                    let host = entry.served_by.as_deref().unwrap_or_default();
                    logger::info(format_args!("volume {name} is host {host}'s now, and is let go of"));
                    let (force, discard) = (true, true);
                    ask(&self.reactor, CLOSE_MAX, |answer| Command::Close { name, force, discard, answer })?;
                }
                _ => {}
            }
        }
        Ok(())
    }
}
