//! Backups given back: chunk by chunk, as a raw image, or as a stream of bytes.

use crate::lock::Lock;
use crate::object::Name;
use crate::parallel::{WORKERS, in_order};
use crate::{Backup, CHUNK_BYTES, Error, Map, PAGE_CHUNKS, Repository, Result};
use holdfast_base::nonzero_runs;
use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Restored {
    pub data_bytes: u64,
    /// Bytes that could not be read, and are zeroes.
    pub damaged: Vec<Range<u64>>,
}

/// A chunk's bytes, or a part of the volume that can't be had.
pub type Piece = (Range<u64>, Result<Vec<u8>>);

/// Chunks of a backup that are no holes, in order. Nobody deletes while it is there.
pub struct Reader<'r> {
    repository: &'r Repository,
    size_bytes: u64,
    map: Map,
    /// The first chunk that is wanted, and the first page that was not read.
    start: u64,
    page: u64,
    names: VecDeque<(u64, Name)>,
    ready: VecDeque<Piece>,
    _lock: Option<Lock>,
}

impl<'r> Reader<'r> {
    /// From the chunk on that has the byte at `start`.
    ///
    /// # Errors
    /// Somebody deletes now.
    pub fn new(repository: &'r Repository, backup: &Backup, start: u64) -> Result<Reader<'r>> {
        let lock = Lock::to_read(&repository.store, "restoring a backup")?;
        let start = start / CHUNK_BYTES;
        Ok(Reader {
            repository,
            size_bytes: backup.manifest.size_bytes,
            map: Map::of(&backup.manifest),
            start,
            page: start / PAGE_CHUNKS,
            names: VecDeque::new(),
            ready: VecDeque::new(),
            _lock: lock,
        })
    }

    /// The next one.
    pub fn next_piece(&mut self) -> Option<Piece> {
        while self.ready.is_empty() {
            if self.names.is_empty() {
                self.read_page()?;
            } else {
                self.read_chunks();
            }
        }
        self.ready.pop_front()
    }

    fn bytes_of(&self, chunks: Range<u64>) -> Range<u64> {
        chunks.start * CHUNK_BYTES..self.size_bytes.min(chunks.end * CHUNK_BYTES)
    }

    /// Nothing where there is no other.
    fn read_page(&mut self) -> Option<()> {
        let page = (self.page < self.map.pages()).then_some(self.page)?;
        self.page += 1;
        match self.map.named_in(self.repository, page) {
            Ok(named) => self.names.extend(named.into_iter().filter(|(chunk, _)| *chunk >= self.start)),
            Err(why) => self.ready.push_back((self.bytes_of(self.map.listed_in(page)), Err(why))),
        }
        Some(())
    }

    fn read_chunks(&mut self) {
        let batch: Vec<(u64, Name)> = self.names.drain(..self.names.len().min(WORKERS)).collect();
        let read = |(chunk, name): (u64, Name)| {
            let range = self.bytes_of(chunk..chunk + 1);
            let wanted = range.end - range.start;
            let bytes = self.repository.chunk(&name).and_then(|bytes| match bytes.len() as u64 == wanted {
                true => Ok(bytes),
                false => Err(Error::Damaged(format!("chunk {name} has {} bytes of {wanted}", bytes.len()))),
            });
            (range, bytes)
        };
        let mut ready = VecDeque::new();
        in_order(batch, read, |piece| {
            ready.push_back(piece);
            Ok(())
        })
        .expect("nothing is refused");
        self.ready = ready;
    }
}

/// Whether to go on without it.
fn or_skip((range, bytes): Piece, skip_damaged: bool, restored: &mut Restored) -> Result<Option<Vec<u8>>> {
    match bytes {
        Ok(bytes) => {
            restored.data_bytes += bytes.len() as u64;
            Ok(Some(bytes))
        }
        Err(Error::Damaged(_)) if skip_damaged => {
            match restored.damaged.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => restored.damaged.push(range),
            }
            Ok(None)
        }
        Err(Error::Damaged(why)) => Err(Error::Damaged(format!(
            "{why}, for {} bytes at offset {}; an image with --skip-damaged has all else, and zeroes there",
            range.end - range.start,
            range.start
        ))),
        Err(why) => Err(why),
    }
}

/// A raw image, with holes, in a new file. It has its name when it is whole; until then `.partial` is added to it.
///
/// # Errors
/// The file is there already; the backup can't be read whole, and `skip_damaged` is not said.
pub fn to_file(
    repository: &Repository,
    backup: &Backup,
    path: &Path,
    skip_damaged: bool,
    mut tell: impl FnMut(u64),
) -> Result<Restored> {
    let failed = |why: std::io::Error| Error::store(format_args!("cannot write {}", path.display()), why);
    if path.symlink_metadata().is_ok() {
        return Err(Error::Exists(format!(
            "{} is there already, and nothing is overwritten; name a new file, or `-` for standard output",
            path.display()
        )));
    }
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let partial = PathBuf::from(partial);
    let opened = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&partial);
    let file = opened.map_err(|why| match why.kind() {
        ErrorKind::AlreadyExists => Error::Exists(format!(
            "{0} is there: somebody writes this image now, or one that broke off left it; in that case delete it (`rm {0}`)",
            partial.display()
        )),
        _ => failed(why),
    })?;
    let outcome = fill(&file, repository, backup, skip_damaged, &mut tell, &failed);
    let named = outcome.and_then(|restored| std::fs::rename(&partial, path).map(|()| restored).map_err(failed));
    named.inspect_err(|_| drop(std::fs::remove_file(&partial)))
}

fn fill(
    file: &File,
    repository: &Repository,
    backup: &Backup,
    skip_damaged: bool,
    tell: &mut impl FnMut(u64),
    failed: &impl Fn(std::io::Error) -> Error,
) -> Result<Restored> {
    file.set_len(backup.manifest.size_bytes).map_err(failed)?;
    let mut restored = Restored::default();
    let mut reader = Reader::new(repository, backup, 0)?;
    while let Some(piece) = reader.next_piece() {
        let offset = piece.0.start;
        tell(offset);
        let Some(bytes) = or_skip(piece, skip_damaged, &mut restored)? else { continue };
        for run in nonzero_runs(&bytes) {
            file.write_all_at(&bytes[run.clone()], offset + run.start as u64).map_err(failed)?;
        }
    }
    file.sync_all().map_err(failed)?;
    Ok(restored)
}

/// All bytes of the volume, zeroes too.
///
/// # Errors
/// As [`to_file`].
pub fn to_output(
    repository: &Repository,
    backup: &Backup,
    out: &mut impl Write,
    skip_damaged: bool,
    mut tell: impl FnMut(u64),
) -> Result<Restored> {
    let failed = |why: std::io::Error| Error::store("cannot write to standard output", why);
    let zeroes = vec![0; CHUNK_BYTES as usize];
    let (mut restored, mut at) = (Restored::default(), 0);
    let fill = |at: &mut u64, up_to: u64, out: &mut dyn Write| {
        while *at < up_to {
            let len = CHUNK_BYTES.min(up_to - *at);
            out.write_all(&zeroes[..len as usize]).map_err(failed)?;
            *at += len;
        }
        Ok(())
    };
    let mut reader = Reader::new(repository, backup, 0)?;
    while let Some(piece) = reader.next_piece() {
        let offset = piece.0.start;
        tell(offset);
        let Some(bytes) = or_skip(piece, skip_damaged, &mut restored)? else { continue };
        fill(&mut at, offset, out)?;
        out.write_all(&bytes).map_err(failed)?;
        at += bytes.len() as u64;
    }
    fill(&mut at, backup.manifest.size_bytes, out)?;
    out.flush().map_err(failed)?;
    Ok(restored)
}
