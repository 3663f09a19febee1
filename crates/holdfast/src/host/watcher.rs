//! What other hosts change in the metadata store, and this one has to go by.
//!
//! Role: a thread of its own, which watches the grid's records. After a gap (the store was away, its history is gone)
//! everything is read anew, so that nothing is missed.

use super::catalog::{
    CLIENTS_PREFIX, DRAINING_PREFIX, EXPORT_SUFFIX, LIMITS_PREFIX, NODE_PREFIX, REVOKED_KEY, SETTINGS_PREFIX, fixed_of,
};
use super::commands::Command;
use super::control::ControlPlane;
use super::meta::Meta;
use super::presence::{HOST_PREFIX, all_take_spare};
use crate::logger;
use anyhow::{Context, Result};
use holdfast_base::VolumeId;
use holdfast_runtime::meta::{MetaError, Watch, WatchEvent};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// How long one look waits for changes.
const LOOK_MAX: Duration = Duration::from_secs(5);

/// Pause before the store is asked again that did not answer.
const PAUSE: Duration = Duration::from_secs(1);

/// Kinds of records that others change.
const WATCHED: [&str; 6] = [NODE_PREFIX, DRAINING_PREFIX, SETTINGS_PREFIX, CLIENTS_PREFIX, LIMITS_PREFIX, REVOKED_KEY];

pub(super) fn start(plane: Arc<ControlPlane>, meta: Meta) -> Result<()> {
    let look = move || {
        loop {
            let Err(error) = plane.follow(&meta);
            // Of a store that does not answer whoever looks after its health tells.
            if error.downcast_ref::<MetaError>().is_none() {
                logger::warn(format_args!("what other hosts have changed is read again: {error:#}"));
            }
            std::thread::sleep(PAUSE);
        }
    };
    std::thread::Builder::new().name("watcher".to_string()).spawn(look).context("no thread for the watcher")?;
    Ok(())
}

impl ControlPlane {
    /// Goes by what is there, and by what changes, until something fails.
    fn follow(&self, meta: &Meta) -> Result<std::convert::Infallible> {
        let from = meta.list("")?.revision.next();
        self.take_in(&WATCHED.into())?;
        self.share_spare(meta)?;
        let mut watch: Box<dyn Watch> = meta.watch("", from)?;
        loop {
            let events = watch.next(LOOK_MAX)?;
            let kind = |key: &str| WATCHED.into_iter().find(|prefix| key.starts_with(prefix));
            let changed: BTreeSet<&str> = events.iter().filter_map(|event| kind(&event.key)).collect();
            self.take_in(&changed)?;
            // A host that has come, or whose lease has run out, counts like a volume that has changed hands.
            let concerns =
                |event: &WatchEvent| event.key.ends_with(EXPORT_SUFFIX) || event.key.starts_with(HOST_PREFIX);
            if events.iter().any(|event| event.key.starts_with(HOST_PREFIX)) {
                self.share_spare(meta)?;
            }
            if events.iter().any(concerns) {
                let _alone = self.alone();
                self.keep_to_records()?;
            }
        }
    }

    /// Beside hosts of older releases guests' writes stop where theirs do.
    fn share_spare(&self, meta: &Meta) -> Result<()> {
        let keep = !all_take_spare(meta)?;
        self.ask(|answer| Command::KeepSpare { keep, answer })
    }

    fn take_in(&self, changed: &BTreeSet<&str>) -> Result<()> {
        // What shuts somebody out comes first: it does not wait for another record that can't be used.
        if changed.contains(REVOKED_KEY) {
            self.take_in_revoked()?;
        }
        if changed.contains(CLIENTS_PREFIX) || changed.contains(LIMITS_PREFIX) {
            self.take_in_access()?;
        }
        if changed.contains(NODE_PREFIX) {
            self.use_nodes(self.catalog.nodes()?)?;
        }
        if changed.contains(DRAINING_PREFIX) {
            let devices = self.catalog.draining()?;
            self.ask(|answer| Command::Drain { devices, answer })?;
        }
        if changed.contains(SETTINGS_PREFIX) {
            self.take_in_fixed()?;
        }
        Ok(())
    }

    /// What other hosts' fixed volumes own; this host's are its own to know.
    fn take_in_fixed(&self) -> Result<()> {
        let _alone = self.alone();
        let (entries, unreadable) = self.catalog.survey()?;
        let noted = fixed_of(&entries);
        let known = self.ask(|answer| Command::Fixed { answer })?;
        for entry in entries.iter().filter(|e| e.clone.is_none() && !self.catalog.is_here(e)) {
            let id = entry.root.volume;
            let (fixed, before) = (noted.get(&id).copied(), known.get(&id));
            let is_news = fixed.map(|f| (f.layout, f.fixed)) != before.map(|f| (f.layout, f.fixed));
            if is_news {
                self.ask(|answer| Command::SetFixed { id, fixed, answer })?;
            }
        }
        // Of a volume whose record can't be read what it owned stays its own.
        let gone = |id: &VolumeId| unreadable.is_empty() && !noted.contains_key(id);
        for id in known.keys().copied().filter(gone) {
            self.ask(|answer| Command::SetFixed { id, fixed: None, answer })?;
        }
        Ok(())
    }
}
