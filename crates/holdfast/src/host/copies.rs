//! Copies of the grid's records on its devices: what survives the loss of the whole metadata store.
//!
//! Role: writes one when the steward wants it. Where a volume's key was wrapped anew, all older copies go: they have it as it was
//! before.
//!
//! Faults: of a store that is silent, or not the one that it was, nothing is copied. A device that can't be reached has an older
//! copy; any one that has the newest will do.

use super::control::ControlPlane;
use crate::grid::copies::{self, Way};
use crate::grid::metadata::{self, Held};
use crate::logger;
use anyhow::Result;
use holdfast_api::{Code, refuse};
use holdfast_format::meta::VOLUME_PREFIX;
use std::sync::PoisonError;

/// Of the records of volumes' wrapped keys.
const KEY_SUFFIX: &str = "/key";

/// Whether a key of a volume is there as it was wrapped before it was wrapped anew: whoever has the former key could still open
/// it.
fn has_former_key(older: &Held, held: &Held) -> bool {
    let keys = older.iter().filter(|(key, _)| key.starts_with(VOLUME_PREFIX) && key.ends_with(KEY_SUFFIX));
    keys.into_iter().any(|(key, value)| held.get(key).is_some_and(|now| now != value))
}

impl ControlPlane {
    /// Gives whether it is on every device.
    pub(super) fn copy_records(&self) -> Result<bool> {
        let held = metadata::held(&self.meta)?;
        // It may have turned out meanwhile that the store is not the one that it was.
        if !self.store_is_right() {
            refuse!(Code::Unavailable, "the store does not answer, or is not the one that it was");
        }
        let config = self.config();
        let grid = config.grid_id()?;
        let load_tls = || self.revocations.load_host(&config.host.name);
        let way = Way { grid, host: config.host.name.clone(), tls: config.tls.then(load_tls).transpose()? };
        let file = metadata::file_of(&config.grid, &held, true);
        let bytes = serde_json::to_vec(&file).expect("it encodes");
        let must_go = |older: &[u8]| {
            metadata::read_file(older)
                .and_then(|file| metadata::records_of(&file))
                .is_ok_and(|older| has_former_key(&older, &held))
        };
        let written = copies::write(&way, &self.catalog.nodes()?, &bytes, must_go);
        let (devices, failed) = (written.devices, written.failed.join("; "));
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
        Ok(written.failed.is_empty())
    }
}
