//! What this machine remembers of the grid's metadata store, and how a store is begun anew.
//!
//! Role: the file `beat.json` beside the configuration holds how far the store had come when this machine's host saw it last
//! ([`holdfast_cluster::beat`]). Whoever fills a store from elsewhere begins a lineage in it, which hosts believe at their next
//! start.

use super::certs::now_s;
use super::layout::{GridConfig, GridDir, write_durably};
use super::metadata::{check_no_hosts, check_stopped};
use crate::host::meta::{self, Meta};
use crate::logger;
use anyhow::Result;
use holdfast_api::{Code, refuse};
use holdfast_base::MetaVersion;
use holdfast_cluster::beat;
use holdfast_cluster::view::Doubt;
use holdfast_format::meta::{BEAT_KEY, BeatRecord, decode, encode};
use holdfast_runtime::meta::Swap;
use holdfast_runtime::pki;
use serde::Serialize;
use std::io::ErrorKind;

/// Nothing where this machine has seen nothing of the store yet. One that can't be read is told of, and does not count.
pub fn remembered(dir: &GridDir) -> Option<BeatRecord> {
    let path = dir.beat_path();
    let read = std::fs::read(&path).map_err(anyhow::Error::from).and_then(|bytes| Ok(decode(&bytes)?));
    match read {
        Ok(beat) => Some(beat),
        Err(error) if error.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == ErrorKind::NotFound) => None,
        Err(error) => {
            logger::warn(format_args!(
                "{} can't be read ({error:#}): whether the metadata store was set back can't be told at this start",
                path.display()
            ));
            None
        }
    }
}

pub fn remember(dir: &GridDir, beat: &BeatRecord) -> Result<()> {
    write_durably(&dir.beat_path(), &encode(beat))
}

/// The store is another one from here on: hosts that remember the one before believe it when they are started.
pub fn begin(dir: &GridDir, meta: &Meta) -> Result<()> {
    let held = meta.get(BEAT_KEY)?;
    let found: Option<BeatRecord> = held.as_ref().and_then(|record| decode(&record.value).ok());
    let known = found.into_iter().chain(remembered(dir)).max_by_key(|beat| beat.since_s);
    let next = beat::begin(known.as_ref(), now_s(), u64::from_le_bytes(pki::random()));
    let version = held.map_or(MetaVersion::ABSENT, |record| record.version);
    match meta.swap(BEAT_KEY, version, Some(&encode(&next)), None)? {
        Swap::Done(_) => Ok(()),
        Swap::Conflict(_) => refuse!(Code::Changed, "the store was changed meanwhile: does a host use it? Try again"),
    }
}

/// What `holdfast meta believe` found, and did.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Believed {
    pub store: String,
    /// Why this machine does not believe it; nothing where it does.
    pub doubt: Option<String>,
    pub done: bool,
}

/// Goes on with the store as it is, although it is not the one that this machine knows.
pub fn believe(dir: &GridDir, yes: bool) -> Result<Believed> {
    let config: GridConfig = dir.load()?;
    check_stopped(dir)?;
    let meta = meta::open(dir, &config)?;
    check_no_hosts(&meta, &config.meta)?;
    // One that can't be read counts as none, as at a host's start.
    let found: Option<BeatRecord> = meta.get(BEAT_KEY)?.and_then(|record| decode(&record.value).ok());
    let doubt: Option<Doubt> = beat::doubt(remembered(dir).as_ref(), found.as_ref(), true);
    let done = yes && doubt.is_some();
    if done {
        begin(dir, &meta)?;
    }
    Ok(Believed { store: config.meta.to_string(), doubt: doubt.map(|doubt| doubt.to_string()), done })
}
