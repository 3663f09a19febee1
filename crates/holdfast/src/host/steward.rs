//! Copies of the grid's records on its devices: what survives the loss of the whole metadata store.
//!
//! Role: a thread of its own, at work on the one host that is the caretaker. It writes a copy soon after the records have
//! changed, at most three a minute, and one a day. Roots are not looked at: each change of theirs that matters is on the legs of
//! its volume's log already. Where a volume's key was wrapped anew, all older copies go: they have it as it was before.
//!
//! Faults: of a store that is silent, or not the one that it was, nothing is copied. A device that can't be reached has an older
//! copy; any one that has the newest will do.

use super::control::ControlPlane;
use crate::grid::certs::Certificates;
use crate::grid::copies::{self, Way};
use crate::grid::metadata::{self, Held, MetadataFile};
use crate::logger;
use anyhow::{Context, Result};
use holdfast_base::crc32c;
use holdfast_format::meta::{ROOT_SUFFIX, VOLUME_PREFIX};
use std::sync::Arc;
use std::time::{Duration, Instant};

const PACE: Duration = Duration::from_secs(5);

/// Between two copies.
const COPY_PAUSE: Duration = Duration::from_secs(20);

/// One is written after this long although nothing has changed: devices come and go.
const COPY_EVERY: Duration = Duration::from_secs(24 * 3600);

/// Records that change all the time, and that nobody misses.
const FLEETING: [&str; 5] = ["trend", "errand-done/", "question/", "answer/", "reserved"];

/// Of the records of volumes' wrapped keys.
const KEY_SUFFIX: &str = "/key";

/// What was copied last.
struct Last {
    at: Instant,
    fingerprint: u32,
    is_everywhere: bool,
}

pub(super) fn start(plane: Arc<ControlPlane>) -> Result<()> {
    let look = move || {
        let mut last: Option<Last> = None;
        let mut told = String::new();
        loop {
            std::thread::sleep(PACE);
            let rests = last.as_ref().is_some_and(|last| last.at.elapsed() < COPY_PAUSE);
            if rests || !plane.store_is_right() || !plane.presence.is_caretaker().unwrap_or(false) {
                continue;
            }
            if let Err(error) = plane.copy_records(&mut last, &mut told) {
                logger::warn(format_args!("the metadata were not copied to the grid's devices: {error:#}"));
                std::thread::sleep(COPY_PAUSE);
            }
        }
    };
    std::thread::Builder::new()
        .name("steward".to_string())
        .spawn(look)
        .context("no thread for copies of the metadata")?;
    Ok(())
}

fn fingerprint(held: &Held) -> u32 {
    let is_kept = |key: &str| !key.ends_with(ROOT_SUFFIX) && !FLEETING.iter().any(|fleeting| key.starts_with(fleeting));
    let lasting = held.iter().filter(|(key, _)| is_kept(key));
    let bytes: Vec<u8> = lasting.flat_map(|(key, value)| [key.as_bytes(), &[0], value, &[0]].concat()).collect();
    crc32c(&bytes)
}

/// Whether a key of a volume is there as it was wrapped before it was wrapped anew: whoever has the former key could still open
/// it.
fn has_former_key(older: &Held, held: &Held) -> bool {
    let keys = older.iter().filter(|(key, _)| key.starts_with(VOLUME_PREFIX) && key.ends_with(KEY_SUFFIX));
    keys.into_iter().any(|(key, value)| held.get(key).is_some_and(|now| now != value))
}

impl ControlPlane {
    fn copy_records(&self, last: &mut Option<Last>, told: &mut String) -> Result<()> {
        let held = metadata::held(&self.meta)?;
        let fingerprint = fingerprint(&held);
        let is_fresh =
            |last: &Last| last.fingerprint == fingerprint && last.is_everywhere && last.at.elapsed() < COPY_EVERY;
        // It may have turned out meanwhile that the store is not the one that it was.
        if last.as_ref().is_some_and(is_fresh) || !self.store_is_right() {
            return Ok(());
        }
        let config = self.config();
        let grid = config.grid_id()?;
        let load_tls = || {
            let tls = Certificates::of(&self.dir, grid).load_host(&config.host.name)?;
            if let Some(list) = self.revocations.known() {
                tls.revoked().replace(&list);
            }
            anyhow::Ok(tls)
        };
        let way = Way { grid, host: config.host.name.clone(), tls: config.tls.then(load_tls).transpose()? };
        let file = MetadataFile::new(&config.grid, &held, true);
        let bytes = serde_json::to_vec(&file).expect("it encodes");
        let must_go = |older: &[u8]| {
            MetadataFile::read(older).and_then(|file| file.records()).is_ok_and(|older| has_former_key(&older, &held))
        };
        let written = copies::write(&way, &self.catalog.nodes()?, &bytes, must_go);
        let failed = written.failed.join("; ");
        if failed != *told || last.is_none() {
            let devices = written.devices;
            match failed.is_empty() {
                true => logger::info(format_args!("a copy of the metadata is on all {devices} devices")),
                false => {
                    logger::info(format_args!("a copy of the metadata is on {devices} devices, not on all: {failed}"))
                }
            }
            *told = failed;
        }
        *last = Some(Last { at: Instant::now(), fingerprint, is_everywhere: written.failed.is_empty() });
        Ok(())
    }
}
