//! Copies of the grid's records on its devices: what survives the loss of the whole metadata store.
//!
//! Role: writes one when the steward wants it, and when a volume's key was made or wrapped anew at this host. Where it
//! was wrapped anew, all older copies go: they have it as it was before.
//!
//! Faults: of a store that is silent, or not the one that it was, nothing is copied. A device that can't be reached has an older
//! copy; any one that has the newest will do.

use super::control::ControlPlane;
use crate::grid::copies::{Copy, Places, Way, Written};
use crate::grid::metadata::{self, Records};
use crate::logger;
use anyhow::Result;
use holdfast_api::{Code, refuse};
use holdfast_format::geometry::Layout;
use holdfast_format::meta::{KEY_SUFFIX, VOLUME_PREFIX};
use std::sync::PoisonError;

/// Whether a key of a volume is there as it was wrapped before it was wrapped anew: whoever has the former key could still open
/// it.
fn has_former_key(older: &Records, held: &Records) -> bool {
    let keys = older.iter().filter(|(key, _)| key.starts_with(VOLUME_PREFIX) && key.ends_with(KEY_SUFFIX));
    keys.into_iter().any(|(key, value)| held.get(key).is_some_and(|now| now != value))
}

/// How often a copy is begun anew where others, who write theirs at the same time, have outdone it.
const TRIES: usize = 5;

fn again_where_outdone(mut copy: impl FnMut() -> Result<Written>) -> Result<Written> {
    let mut written = copy()?;
    for _ in 1..TRIES {
        if written.outdone == 0 {
            break;
        }
        written = copy()?;
    }
    Ok(written)
}

impl ControlPlane {
    /// Gives where it is. One that was outdone is not where it should be, and nobody knows yet whether the newer one will be:
    /// another follows, with a higher number.
    pub(super) fn copy_records(&self) -> Result<Written> {
        let written = again_where_outdone(|| self.copy_once())?;
        self.tell_of_copy(&written);
        Ok(written)
    }

    fn copy_once(&self) -> Result<Written> {
        let config = self.config();
        let grid = config.grid_id()?;
        let load_tls = || self.revocations.load_host(&config.host.name);
        let way = Way { grid, host: config.host.name.clone(), tls: config.tls.then(load_tls).transpose()? };
        let places = Places::look(way, &self.catalog.nodes()?);
        // In this order: whoever has a higher number has read later than this one was given.
        let number = self.catalog.number_copy(places.newest())?;
        let held = metadata::all_records(&self.meta)?;
        // It may have turned out meanwhile that the store is not the one that it was.
        if !self.store_is_right() {
            refuse!(Code::Unavailable, "the store does not answer, or is not the one that it was");
        }
        let file = metadata::file_of(&config.grid, &held, true);
        let bytes = serde_json::to_vec(&file).expect("it encodes");
        let must_go = |older: &[u8]| {
            metadata::read_file(older)
                .and_then(|file| metadata::records_of(&file))
                .is_ok_and(|older| has_former_key(&older, &held))
        };
        Ok(places.write(&Copy { number, bytes: &bytes, must_go: &must_go }))
    }

    fn tell_of_copy(&self, written: &Written) {
        let (devices, failed) = (written.on.len(), [&written.away[..], &written.failed].concat().join("; "));
        let mut told = self.copies_told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.as_ref().is_none_or(|(of, why)| (*of, why) != (devices, &failed)) {
            match failed.is_empty() {
                true => logger::info(format_args!("a copy of the metadata is on all {devices} devices")),
                false => {
                    logger::info(format_args!("a copy of the metadata is on {devices} devices, not on all: {failed}"))
                }
            }
            *told = Some((devices, failed));
        }
    }

    /// Has the wrapped key of a volume, which was just made, on devices before anybody is told that it is there:
    /// without it the volume's data would be lost with the metadata store. Where that can't be had it says so.
    pub(super) fn key_warning(&self, volume: &str, layout: Layout) -> Option<String> {
        let why = match self.copy_records() {
            Ok(written) if written.bears(layout) => return None,
            Ok(written) => format!(
                "{} of the {} {} that layout {layout} wants it on have it: {}",
                written.domains(layout),
                layout.failures() + 1,
                if layout.is_on_devices() { "devices" } else { "nodes" },
                [written.failed, written.away].concat().join("; ")
            ),
            Err(error) => format!("{error:#}"),
        };
        logger::warn(format_args!("the key of volume {volume} is not in copies of the metadata yet: {why}"));
        Some(format!(
            "volume {volume} is there, and its key is not yet as safe as its data: were the metadata store lost now, \
             it could not be read any more ({why}). The grid tries again every 20 s. `holdfast status` shows what is \
             down; once that is back `holdfast volume rekey {volume}` with the same key says whether it is safe. Until \
             then write nothing there that is nowhere else, and keep a former key"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_that_another_has_outdone_is_begun_anew() {
        let outdone = |outdone| Written { outdone, ..Written::default() };
        let tries = |outdone_times: usize| {
            let mut tries = 0;
            let written = again_where_outdone(|| {
                tries += 1;
                Ok(outdone(if tries <= outdone_times { 3 } else { 0 }))
            });
            (tries, written.unwrap().outdone)
        };
        assert_eq!(tries(0), (1, 0));
        assert_eq!(tries(2), (3, 0));
        assert_eq!(tries(100), (TRIES, 3), "it is told of as it is");
    }
}
