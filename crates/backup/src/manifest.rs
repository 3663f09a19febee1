//! What a backup is: of which volume, when, and the pages that list its chunks.

use crate::object::Name;
use crate::{CHUNK_BYTES, Error, PAGE_CHUNKS, Result};
use holdfast_format::stream::SnapshotId;
use serde::{Deserialize, Serialize};

pub const FORMAT: u16 = 1;

/// The snapshot that was backed up.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Source {
    /// Names at the grid, then.
    pub volume: String,
    pub snapshot: String,
    pub snapshot_id: SnapshotId,
    /// When it was taken, in milliseconds since 1970.
    pub taken_ms: u64,
    pub layout: String,
    /// The volume was, at the grid.
    pub encrypted: bool,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Manifest {
    pub format: u16,
    #[serde(flatten)]
    pub source: Source,
    pub size_bytes: u64,
    /// Of chunks that are no holes.
    pub data_bytes: u64,
    /// Of objects that this backup brought to the repository.
    pub added_bytes: u64,
    /// Nothing for a page of holes.
    pub pages: Vec<Option<Name>>,
}

impl Manifest {
    /// Chunks of a volume of that size.
    pub fn chunks_of(size_bytes: u64) -> u64 {
        size_bytes.div_ceil(CHUNK_BYTES)
    }

    /// # Errors
    /// It is no manifest, of another format, or lists other pages than its size asks for.
    pub fn parse(text: &[u8]) -> Result<Manifest> {
        let manifest: Manifest = serde_json::from_slice(text)
            .map_err(|why| Error::Damaged(format!("its manifest makes no sense: {why}")))?;
        if manifest.format != FORMAT {
            return Err(Error::Invalid(format!("it has format {}, of a later release", manifest.format)));
        }
        let pages = Self::chunks_of(manifest.size_bytes).div_ceil(PAGE_CHUNKS);
        match manifest.pages.len() as u64 == pages {
            true => Ok(manifest),
            false => Err(Error::Damaged(format!("its manifest lists {} pages of {pages}", manifest.pages.len()))),
        }
    }
}
