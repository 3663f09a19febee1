//! A new volume, filled with what comes from outside of any grid: a disk image, a backup.
//!
//! It is told as a stream, like that of `holdfast send`: what has come is kept when it breaks off, and the same command
//! goes on.

use super::protect::Redundancy;
use super::transfer::{Taking, Wanted, resume_token};
use crate::client;
use crate::grid::layout::GridDir;
use anyhow::Result;
use holdfast_api::{Code, Request, refuse};
use holdfast_base::{BLOCK_BYTES, nonzero_runs};
use holdfast_format::geometry::Layout;
use holdfast_format::stream::{Begin, Part, STREAM_VERSION, SnapshotId, Totals};
use std::collections::VecDeque;
use std::ops::Range;

pub struct NewVolume<'a> {
    pub name: &'a str,
    pub redundancy: &'a Redundancy,
    /// What it is filled with, in the place of a volume's name: see [`Begin::is_of_no_grid`].
    pub origin: &'static str,
    /// Until the volume is in service, what has come is a snapshot of that name.
    pub snapshot: &'static str,
    /// Names what it is filled with: something else is not gone on with.
    pub id: SnapshotId,
    pub size_bytes: u64,
    /// For people, while it goes on, and when it breaks off.
    pub what: String,
    pub broken: String,
    /// Only made; nothing is offered to clients.
    pub no_export: bool,
}

/// Parts of what a volume is filled with, from an offset on.
pub trait Parts {
    /// The next; its data are put into what is given.
    ///
    /// # Errors
    /// There can't be had more.
    fn next(&mut self, into: &mut Vec<u8>) -> Result<Part>;
}

/// What was read last and is not told of yet: its blocks that are not zeroes.
#[derive(Default)]
pub struct Untold {
    bytes: Vec<u8>,
    offset: u64,
    runs: VecDeque<Range<usize>>,
    data_bytes: u64,
}

impl Untold {
    /// Memory for what is read next.
    pub fn space(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }

    /// What was read at this offset, in whole blocks.
    pub fn put(&mut self, offset: u64, bytes: Vec<u8>) {
        self.runs = nonzero_runs(&bytes).into();
        (self.bytes, self.offset) = (bytes, offset);
    }

    /// Nothing when all of it is told.
    pub fn next(&mut self, into: &mut Vec<u8>) -> Option<Part> {
        let run = self.runs.pop_front()?;
        let offset = self.offset + run.start as u64;
        into.clear();
        into.extend_from_slice(&self.bytes[run]);
        self.data_bytes += into.len() as u64;
        Some(Part::Data { offset })
    }

    /// When there is no more to read.
    pub fn end(&self) -> Part {
        Part::End(Totals { data_bytes: self.data_bytes, zeroes_bytes: 0 })
    }
}

impl NewVolume<'_> {
    /// `open` gives what lies from an offset on. Returns what came, and where clients connect.
    ///
    /// # Errors
    /// The grid can't take it, or there is no more of it; what has come is kept.
    pub fn fill<P: Parts>(
        self,
        dir: &GridDir,
        json: bool,
        open: impl FnOnce(u64) -> Result<P>,
    ) -> Result<(Totals, Vec<String>)> {
        let NewVolume { name, redundancy, origin, snapshot, id, size_bytes, what, broken, no_export } = self;
        let there = client::volume(dir, &Request::VolumeShow { name: name.to_string() }).ok();
        if there.is_some_and(|there| there.exported) {
            refuse!(Code::Exists, "volume {name} is in service, and is not written over; give another name");
        }
        // A volume that is not there has no part of anything.
        let token = resume_token(dir, name).ok().flatten();
        let start = token.map(|token| token.parse::<Wanted>()).transpose().map_err(anyhow::Error::msg)?;
        let layout = match start {
            Some(_) => None,
            None => super::volume::said(redundancy.settle_new(dir)?, json)?,
        };
        let begin = Begin {
            version: STREAM_VERSION,
            volume: origin.to_string(),
            snapshot: snapshot.to_string(),
            id,
            from: None,
            size_bytes: size_bytes.next_multiple_of(BLOCK_BYTES as u64),
            layout: layout.unwrap_or(Layout::DEFAULT),
            start: start.map_or(0, |wanted| wanted.start),
        };
        let mut parts = open(begin.start)?;
        let layout = layout.map(|layout| layout.to_string());
        let taking = Taking { name, layout, begin: &begin, what, broken, json };
        let totals = taking.run(dir, &mut |into| parts.next(into))?;
        let uris = if no_export { Vec::new() } else { put_into_service(dir, name, snapshot)? };
        Ok((totals, uris))
    }
}

/// Where clients connect. The snapshot that tells that all has come goes, for it would hold all that guests overwrite.
fn put_into_service(dir: &GridDir, name: &str, snapshot: &str) -> Result<Vec<String>> {
    let export = Request::VolumeExport {
        name: name.to_string(),
        takeover: false,
        multipath: false,
        key: None,
        shared: None,
        failover: None,
    };
    let exported = client::volume(dir, &export)?;
    client::done(dir, &Request::SnapshotDelete { volume: name.to_string(), name: snapshot.to_string() })?;
    Ok(exported.uris)
}

/// How a client gets at a volume that was just made.
pub fn how_to_connect(name: &str, uris: &[String]) -> String {
    uris.first().map_or_else(
        || format!("`holdfast volume export {name}` offers it to clients"),
        |uri| format!("connect to {uri}"),
    )
}
