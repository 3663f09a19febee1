//! `holdfast backup create`: of each volume a snapshot is read, by chunks that changed since the last backup.

use super::{KeyFile, told, value_of};
use crate::cli::format::{print, print_json};
use crate::cli::progress::{Progress, Unit};
use crate::cli::transfer::{ASKED_BYTES, Piece, READ_DEPTH, Wanted, ask_begin, pieces};
use crate::client;
use crate::grid::layout::GridDir;
use crate::nbd_client::{Client, REQUEST_BYTES_MAX};
use anyhow::{Context, Result};
use clap::Args;
use holdfast_api::{Code, Request, SnapshotInfo, VolumeInfo, VolumeState, refuse};
use holdfast_backup::{Backup, CHUNK_BYTES, Error, Repository, Source, Stored, Writing, now_ms, stamp};
use holdfast_base::size::Size;
use holdfast_format::stream::Begin;
use serde_json::{Value, json};
use std::ops::Range;
use std::time::Instant;

/// A snapshot of ours without a backup may be of somebody who reads it now, or of one who was killed.
const LEFT_OVER_MS: u64 = 24 * 3_600_000;

const _: () = assert!(REQUEST_BYTES_MAX as u64 == CHUNK_BYTES, "a chunk is read by one request");

#[derive(Args, Debug)]
#[command(
    after_help = "Of VOLUME a snapshot is taken, and kept until the next backup to this repository: what changed since then is \
    all that is read. With VOLUME@SNAPSHOT that one is read, and nothing is taken or deleted. A volume that can't be backed up keeps \
    no other one from it."
)]
pub struct Create {
    repository: String,
    /// Volumes in service at this host, or VOLUME@SNAPSHOT
    #[arg(required_unless_present = "all", value_name = "VOLUME")]
    volumes: Vec<String>,
    /// All volumes in service at this host
    #[arg(long, conflicts_with = "volumes")]
    all: bool,
    /// Read all of it, also what did not change since the last backup
    #[arg(long)]
    full: bool,
    /// Store volumes that are encrypted at the grid in a repository that is not
    #[arg(long)]
    plain: bool,
}

/// A backup that was made.
struct Made {
    backup: Backup,
    stored: Stored,
    /// Id of the backup that it builds on.
    since: Option<String>,
    /// What could not be done besides.
    note: Option<String>,
}

impl Create {
    pub(super) fn run(self, key: &KeyFile, dir: &GridDir, json: bool) -> Result<()> {
        dir.check_here()?;
        let repository = key.open(&self.repository)?;
        let wanted = if self.all { in_service(dir)? } else { self.volumes.clone() };
        if wanted.is_empty() {
            refuse!(
                Code::State,
                "no volume is in service at this host; `holdfast volume export NAME` takes one into service"
            );
        }
        let known = repository.catalogue().map_err(told)?.backups;
        let mut round = Round { create: &self, repository: &repository, known, dir, json };
        let (mut made, mut failed) = (Vec::new(), Vec::new());
        for of in &wanted {
            let begun = Instant::now();
            match round.back_up(of) {
                Ok(one) => {
                    if !json {
                        say(&one, begun)?;
                    }
                    made.push(one);
                }
                Err(why) => failed.push((of, why)),
            }
        }
        if json {
            let failures: Vec<Value> =
                failed.iter().map(|(of, why)| json!({ "volume": of, "why": format!("{why:#}") })).collect();
            print_json(&json!({ "backups": made.iter().map(value).collect::<Vec<_>>(), "failed": failures }))?;
        }
        match (failed.len(), wanted.len()) {
            (0, _) => Ok(()),
            (1, 1) => Err(failed.remove(0).1),
            (count, all) => {
                let told: Vec<String> = failed.iter().map(|(of, why)| format!("{of}: {why:#}")).collect();
                refuse!(Code::Failed, "{count} of {all} volumes were not backed up: {}", told.join("; "))
            }
        }
    }
}

/// One command, for all its volumes.
struct Round<'a> {
    create: &'a Create,
    repository: &'a Repository,
    /// All backups that the repository has.
    known: Vec<Backup>,
    dir: &'a GridDir,
    json: bool,
}

impl Round<'_> {
    fn back_up(&mut self, of: &str) -> Result<Made> {
        let Round { create, repository, dir, .. } = *self;
        let (name, given) = of.split_once('@').map_or((of, None), |(name, snapshot)| (name, Some(snapshot)));
        let volume = client::volume(dir, &Request::VolumeShow { name: name.to_string() })?;
        if volume.state != VolumeState::Open {
            let how = volume.host.as_ref().map_or_else(
                || format!("`holdfast volume export {name}` takes it into service"),
                |host| format!("give the command at host {host}"),
            );
            refuse!(Code::State, "volume {name} is not in service at this host (it is {}); {how}", volume.state);
        }
        if volume.encrypted && repository.about().key.is_none() && !create.plain {
            refuse!(
                Code::Protected,
                "volume {name} is encrypted, and {} is not: make a repository with a key (`holdfast backup init --key-file FILE`), \
                 or say --plain",
                repository.place()
            );
        }
        if let Some(snapshot) = given {
            return self.read(&volume, snapshot);
        }
        let ours = prefix(repository);
        let now_ms = now_ms();
        let snapshot = format!("{ours}{}-{:03}", stamp(now_ms), now_ms % 1000);
        let taken = Request::SnapshotCreate { volume: name.to_string(), name: snapshot.clone() };
        let volume = client::volume(dir, &taken)?;
        let delete = |snapshot: &str| {
            let request = Request::SnapshotDelete { volume: name.to_string(), name: snapshot.to_string() };
            client::done(dir, &request)
        };
        let made = self.read(&volume, &snapshot);
        let Ok(mut made) = made else {
            let _ = delete(&snapshot);
            return made;
        };
        let deleted = self.superfluous(&volume, &snapshot).and_then(|old| old.iter().try_for_each(|old| delete(old)));
        made.note = deleted.err().map(|why| format!("a snapshot of the backup before could not be deleted: {why:#}"));
        Ok(made)
    }

    /// Our snapshots that the next backup does not build on.
    fn superfluous(&self, volume: &VolumeInfo, newest: &str) -> Result<Vec<String>> {
        let is_done = |snapshot: &SnapshotInfo| self.known.iter().any(|backup| is_of(backup, snapshot));
        let snapshots = snapshots(volume)?;
        let now_ms = snapshots.iter().find(|snapshot| snapshot.name == newest).map_or(0, |newest| newest.created_ms);
        let ours = prefix(self.repository);
        let superfluous = snapshots.iter().filter(|snapshot| {
            let is_old = snapshot.created_ms + LEFT_OVER_MS < now_ms;
            snapshot.name != newest && snapshot.name.starts_with(&ours) && (is_old || is_done(snapshot))
        });
        Ok(superfluous.map(|snapshot| snapshot.name.clone()).collect())
    }

    fn read(&mut self, volume: &VolumeInfo, snapshot: &str) -> Result<Made> {
        let Round { create, repository, dir, json, .. } = *self;
        let Some(info) = snapshots(volume)?.iter().find(|info| info.name == snapshot) else {
            refuse!(
                Code::NotFound,
                "volume {0} has no snapshot {snapshot}; `holdfast snapshot list {0}` shows what there is",
                volume.name
            );
        };
        let base = if create.full { None } else { self.base(volume, info)? };
        let (begin, base) = begin(dir, volume, snapshot, base)?;
        let mut writing = Writing::begin(repository, begin.size_bytes).map_err(told)?;
        let (base, doubtful) = build_on(&mut writing, base)?;
        let mut touched = Touched::find(dir, &begin, base.is_some())?;
        doubtful.into_iter().for_each(|chunk| touched.read.push(chunk..chunk + 1));
        writing.holes(touched.holes.into_iter().flatten()).map_err(told)?;
        let ranges: Vec<Range<u64>> = touched.read.iter().map(|chunks| bytes_of(chunks, begin.size_bytes)).collect();
        let what = format!("backing up {}@{snapshot}", volume.name);
        let all_bytes = ranges.iter().map(|range| range.end - range.start).sum();
        let mut progress = Progress::begin(what, Unit::Bytes, all_bytes, json);
        let mut reading = Client::connect(&dir.nbd_socket(), &format!("{}@{snapshot}", begin.volume))?;
        let mut done_bytes = 0;
        let written = writing.write(|give| {
            let taken = reading.read_in_order(ranges, READ_DEPTH, |offset, bytes| {
                done_bytes += bytes.len() as u64;
                progress.set(done_bytes);
                give.chunk(offset / CHUNK_BYTES, bytes).map_err(std::io::Error::other)
            });
            taken.map_err(|why| Error::store(format_args!("cannot read {}@{snapshot}", volume.name), why))
        });
        written.map_err(told)?;
        drop(progress);
        let source = Source {
            volume: volume.name.clone(),
            snapshot: snapshot.to_string(),
            snapshot_id: begin.id,
            taken_ms: info.created_ms,
            layout: volume.layout.clone(),
            encrypted: volume.encrypted,
        };
        let (backup, stored) = writing.commit(source).map_err(told)?;
        self.known.push(backup.clone());
        Ok(Made { backup, stored, since: base.map(|base| base.id), note: None })
    }

    /// The latest backup of the volume whose snapshot it still has.
    fn base(&self, volume: &VolumeInfo, of: &SnapshotInfo) -> Result<Option<Backup>> {
        let there = snapshots(volume)?;
        let is_base = |backup: &&Backup| {
            let source = &backup.manifest.source;
            let is_there = |snapshot: &SnapshotInfo| is_of(backup, snapshot) && snapshot.layer != of.layer;
            source.volume == volume.name && source.taken_ms <= of.created_ms && there.iter().any(is_there)
        };
        Ok(self.known.iter().filter(is_base).max_by_key(|backup| backup.manifest.source.taken_ms).cloned())
    }
}

/// Of names of snapshots that backups to this repository are made of.
fn prefix(repository: &Repository) -> String {
    format!("backup-{}-", repository.about().id.get(..8).unwrap_or(&repository.about().id))
}

fn in_service(dir: &GridDir) -> Result<Vec<String>> {
    let volumes = client::volumes(dir)?.into_iter();
    let is_ours = |volume: &VolumeInfo| volume.state == VolumeState::Open && volume.exported && !volume.is_store;
    Ok(volumes.filter(is_ours).map(|volume| volume.name).collect())
}

fn snapshots(volume: &VolumeInfo) -> Result<&[SnapshotInfo]> {
    let live = volume.live.as_ref();
    live.map(|live| &live.snapshots[..]).with_context(|| format!("volume {} went out of service", volume.name))
}

/// It was read for that backup.
fn is_of(backup: &Backup, snapshot: &SnapshotInfo) -> bool {
    let source = &backup.manifest.source;
    source.snapshot == snapshot.name && source.snapshot_id.layer.0 == snapshot.layer
}

/// What is read; without the base where the grid does not know what changed since.
fn begin(dir: &GridDir, volume: &VolumeInfo, snapshot: &str, base: Option<Backup>) -> Result<(Begin, Option<Backup>)> {
    let wanted = |from| Wanted { volume: volume.name.clone(), snapshot: snapshot.to_string(), from, start: 0 };
    if let Some(base) = base {
        let source = &base.manifest.source;
        let begin = ask_begin(dir, &wanted(Some(source.snapshot.clone())));
        // One of that name that was taken anew is another one.
        let is_same = |begin: &Begin| begin.from.as_ref().is_some_and(|(_, id)| *id == source.snapshot_id);
        if let Some(begin) = begin.ok().filter(is_same) {
            return Ok((begin, Some(base)));
        }
    }
    Ok((ask_begin(dir, &wanted(None))?, None))
}

/// Chunks that are to be read in any case; without the base where its own pages are damaged, or somebody deleted it.
fn build_on(writing: &mut Writing, base: Option<Backup>) -> Result<(Option<Backup>, Vec<u64>)> {
    let Some(base) = base else { return Ok((None, Vec::new())) };
    match writing.build_on(&base) {
        Ok(doubtful) => Ok((Some(base), doubtful)),
        Err(Error::Damaged(_) | Error::NotFound(_)) => Ok((None, Vec::new())),
        Err(why) => Err(told(why)),
    }
}

fn bytes_of(chunks: &Range<u64>, size_bytes: u64) -> Range<u64> {
    chunks.start * CHUNK_BYTES..size_bytes.min(chunks.end * CHUNK_BYTES)
}

/// Chunks that a backup is told of: each once, those to be read in order.
#[derive(Default, PartialEq, Eq, Debug)]
struct Touched {
    read: Vec<Range<u64>>,
    holes: Vec<Range<u64>>,
}

impl Touched {
    fn find(dir: &GridDir, begin: &Begin, is_based: bool) -> Result<Touched> {
        let export = format!("{}@{}", begin.volume, begin.snapshot);
        let from = begin.from.as_ref().filter(|_| is_based);
        let changed = from.map(|(from, _)| format!("holdfast:changed:{from}"));
        let contexts: Vec<&str> = ["base:allocation"].into_iter().chain(changed.as_deref()).collect();
        let mut asking = Client::connect_for_status(&dir.nbd_socket(), &export, &contexts)?;
        let mut touched = Touched::default();
        let mut at = 0;
        while at < begin.size_bytes {
            let told = asking.status(at, ASKED_BYTES.min(begin.size_bytes - at) as u32)?;
            let (pieces, end) = pieces(at, &told);
            pieces.into_iter().for_each(|piece| touched.add(piece, begin.size_bytes));
            at = end;
        }
        Ok(touched)
    }

    /// Pieces come in order.
    fn add(&mut self, piece: Piece, size_bytes: u64) {
        let (range, is_hole) = match piece {
            Piece::Data(range) => (range, false),
            Piece::Zeroes(range) => (range, true),
        };
        let chunks = range.start / CHUNK_BYTES..range.end.div_ceil(CHUNK_BYTES);
        if !is_hole {
            return self.add_read(chunks);
        }
        // A chunk of which only a part is told of has other bytes, too.
        let end = if range.end == size_bytes { chunks.end } else { range.end / CHUNK_BYTES };
        let whole = range.start.div_ceil(CHUNK_BYTES)..end;
        if whole.is_empty() {
            return self.add_read(chunks);
        }
        self.add_read(chunks.start..whole.start);
        self.holes.push(whole.clone());
        self.add_read(whole.end..chunks.end);
    }

    fn add_read(&mut self, chunks: Range<u64>) {
        let told = self.read.last().map_or(0, |last| last.end);
        let chunks = chunks.start.max(told)..chunks.end;
        match self.read.last_mut() {
            _ if chunks.is_empty() => {}
            Some(last) if last.end == chunks.start => last.end = chunks.end,
            _ => self.read.push(chunks),
        }
    }
}

fn value(made: &Made) -> Value {
    let mut value = value_of(&made.backup);
    value["read_bytes"] = made.stored.read_bytes.into();
    value["since"] = json!(made.since);
    if let Some(note) = &made.note {
        value["note"] = json!(note);
    }
    value
}

fn say(made: &Made, begun: Instant) -> Result<()> {
    let Made { backup, stored, since, note } = made;
    let volume = &backup.manifest.source.volume;
    let since = since.as_ref().map_or_else(|| "all of it".to_string(), |since| format!("since {since}"));
    let (read, added) = (Size(stored.read_bytes), Size(stored.added_bytes));
    let took = begun.elapsed().as_secs_f64();
    print(format_args!("{volume}: backup {}, {since}: read {read}, stored {added}, in {took:.1} s", backup.id))?;
    note.iter().try_for_each(|note| print(format_args!("{volume}: {note}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = 10 * CHUNK_BYTES + 4096;

    fn touched(pieces: impl IntoIterator<Item = Piece>) -> Touched {
        let mut touched = Touched::default();
        pieces.into_iter().for_each(|piece| touched.add(piece, SIZE));
        touched
    }

    #[test]
    fn each_chunk_is_told_of_once() {
        let block = 4096;
        let found = touched([
            Piece::Data(0..block),
            Piece::Data(2 * block..3 * block),
            Piece::Data(CHUNK_BYTES - block..CHUNK_BYTES + block),
            Piece::Data(5 * CHUNK_BYTES..7 * CHUNK_BYTES),
            Piece::Data(SIZE - block..SIZE),
        ]);
        assert_eq!(found, Touched { read: vec![0..2, 5..7, 10..11], holes: vec![] });
    }

    #[test]
    fn only_whole_chunks_are_holes() {
        let half = CHUNK_BYTES / 2;
        let found = touched([
            Piece::Zeroes(half..half + 4096),
            Piece::Zeroes(CHUNK_BYTES + half..4 * CHUNK_BYTES + half),
            Piece::Data(4 * CHUNK_BYTES + half..5 * CHUNK_BYTES),
            Piece::Zeroes(9 * CHUNK_BYTES..SIZE),
        ]);
        assert_eq!(found, Touched { read: vec![0..2, 4..5], holes: vec![2..4, 9..11] });
    }
}
