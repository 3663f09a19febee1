//! `holdfast backup restore`: a new volume, or a raw image, of a backup.

use super::{KeyFile, told};
use crate::cli::fill::{NewVolume, Parts, Untold, how_to_connect};
use crate::cli::format::{print, print_json};
use crate::cli::progress::{Progress, Unit};
use crate::cli::protect::Redundancy;
use crate::cli::transfer;
use crate::grid::layout::GridDir;
use anyhow::Result;
use clap::Args;
use holdfast_api::{Code, refuse};
use holdfast_backup::{Backup, Reader, Repository, to_file, to_output};
use holdfast_base::size::Size;
use holdfast_base::{ObjectId, VolumeId};
use holdfast_cipher::digest;
use holdfast_format::stream::{BACKUP, Part, SnapshotId, Totals};
use serde_json::{Value, json};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Instant;

#[derive(Args, Debug)]
#[command(
    after_help = "A volume takes no space for zeroes and holes. If it breaks off, the same command goes on; `holdfast receive \
    --abandon NAME` and `holdfast volume delete NAME` give up what has come. No grid is needed for an image."
)]
pub struct Restore {
    repository: String,
    /// An id of `holdfast backup list`, or the name of a volume: its latest
    backup: String,
    /// Of a new volume
    #[arg(required_unless_present = "image")]
    name: Option<String>,
    /// A new file instead, or `-` for standard output
    #[arg(long, value_name = "FILE", conflicts_with = "name")]
    image: Option<PathBuf>,
    #[command(flatten)]
    redundancy: Redundancy,
    /// Only make it; `holdfast volume export` offers it to clients later
    #[arg(long)]
    no_export: bool,
    /// Make a volume that is not encrypted of one that was
    #[arg(long)]
    plain: bool,
    /// In an image, zeroes in the place of what can't be read
    #[arg(long, requires = "image")]
    skip_damaged: bool,
}

impl Restore {
    pub(super) fn run(self, key: &KeyFile, grid: Result<GridDir>, json: bool) -> Result<()> {
        let repository = key.open(&self.repository)?;
        let catalogue = repository.catalogue().map_err(told)?;
        for (id, why) in &catalogue.unreadable {
            eprintln!("backup {id} can't be read, and may be the latest: {why}");
        }
        let backup = catalogue.find(&self.backup).map_err(told)?;
        match &self.image {
            Some(image) => self.to_image(&repository, backup, image, json),
            None => self.to_volume(&repository, backup, &grid?, json),
        }
    }

    fn to_image(&self, repository: &Repository, backup: &Backup, image: &Path, json: bool) -> Result<()> {
        let (begun, size_bytes) = (Instant::now(), backup.manifest.size_bytes);
        let mut progress = Progress::begin(format!("restoring {}", backup.id), Unit::Bytes, size_bytes, json);
        let is_stream = image == Path::new("-");
        let tell = |offset| progress.set(offset);
        let restored = match is_stream {
            true => to_output(repository, backup, &mut std::io::stdout().lock(), self.skip_damaged, tell),
            false => to_file(repository, backup, image, self.skip_damaged, tell),
        };
        drop(progress);
        let restored = restored.map_err(told)?;
        let data = transfer::told(Totals { data_bytes: restored.data_bytes, zeroes_bytes: 0 }, begun.elapsed());
        let text = format!("{} of volume {}: {data}", backup.id, backup.manifest.source.volume);
        let one = |range: &Range<u64>| json!({ "offset": range.start, "length": range.end - range.start });
        let damaged: Vec<Value> = restored.damaged.iter().map(one).collect();
        match (is_stream, json) {
            (true, _) => eprintln!("{text}"),
            (false, false) => print(text)?,
            (false, true) => print_json(&json!({ "backup": backup.id, "size_bytes": size_bytes,
                "data_bytes": restored.data_bytes, "damaged": damaged }))?,
        }
        if !restored.damaged.is_empty() {
            refuse!(Code::Failed, "these bytes can't be read, and are zeroes in the image: {:?}", restored.damaged);
        }
        Ok(())
    }

    fn to_volume(&self, repository: &Repository, backup: &Backup, dir: &GridDir, json: bool) -> Result<()> {
        dir.check_here()?;
        let name = self.name.as_deref().expect("there is no image");
        let source = &backup.manifest.source;
        if source.encrypted && !self.plain {
            refuse!(
                Code::Protected,
                "volume {} was encrypted, and a volume that is restored is not: say --plain, or take an image",
                source.volume
            );
        }
        let begun = Instant::now();
        let size_bytes = backup.manifest.size_bytes;
        let volume = NewVolume {
            name,
            redundancy: &self.redundancy,
            origin: BACKUP,
            snapshot: "restore",
            id: named(repository, backup),
            size_bytes,
            what: format!("restoring {} to {name}", backup.id),
            broken: format!(
                "what has come of {0} is kept; `holdfast backup restore {1} {0} {name}` goes on",
                backup.id,
                repository.place()
            ),
            no_export: self.no_export,
        };
        let open = |start| {
            Ok(Reading { reader: Reader::new(repository, backup, start).map_err(told)?, untold: Untold::default() })
        };
        let (totals, uris) = volume.fill(dir, json, open)?;
        if json {
            return print_json(&json!({ "name": name, "backup": backup.id, "size_bytes": size_bytes,
                "data_bytes": totals.data_bytes, "uris": uris }));
        }
        let (size, data) = (Size(size_bytes), transfer::told(totals, begun.elapsed()));
        let how = how_to_connect(name, &uris);
        print(format_args!("volume {name} ({size}) is {} as of {}: {data}; {how}", source.volume, backup.id))
    }
}

/// Names the backup: another one is not gone on with.
fn named(repository: &Repository, backup: &Backup) -> SnapshotId {
    let digest = digest(format!("{}/{}", repository.about().id, backup.id).as_bytes());
    SnapshotId { volume: VolumeId(u128::from_le_bytes(digest[..16].try_into().expect("32 bytes"))), layer: ObjectId(0) }
}

/// A backup, as parts of a stream.
struct Reading<'r> {
    reader: Reader<'r>,
    untold: Untold,
}

impl Parts for Reading<'_> {
    fn next(&mut self, into: &mut Vec<u8>) -> Result<Part> {
        loop {
            if let Some(part) = self.untold.next(into) {
                return Ok(part);
            }
            let Some((range, chunk)) = self.reader.next_piece() else { return Ok(self.untold.end()) };
            self.untold.put(range.start, chunk.map_err(told)?);
        }
    }
}
