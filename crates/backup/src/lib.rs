//! Backups of volumes: in a directory or an S3 store, readable without a grid.
//!
//! Role: [`Repository`] keeps what was backed up; [`Writing`] adds a backup, [`Reader`] gives one back, [`verify()`] and
//! [`prune()`] look after them. Who asks brings the bytes of volumes; nothing here knows a grid.
//!
//! # Format
//!
//! | object | what |
//! | --- | --- |
//! | `repository.json` | [`About`]: format, id, bytes of a chunk, id of the key |
//! | `chunks/AB/NAME` | bytes of a volume at a multiple of [`CHUNK_BYTES`], without zeroes that fill it; or a page |
//! | `backups/TIME-NAME` | a [`Manifest`], as JSON |
//! | `locks/KIND-ID` | who is at work ([`lock`]) |
//! | `damaged/NAME` | a chunk that could not be read, set aside by [`verify()`]; empty if there was none |
//!
//! `NAME` is of the plain bytes: SHA-256 or, with a key, HMAC-SHA256, in hexadecimal digits; `AB` are its first two. A
//! page is a list of [`PAGE_CHUNKS`] names of 32 bytes (the last one may be shorter), zeroes for a chunk that is a hole.
//! A manifest lists the pages. Equal chunks, and equal pages, are stored once.
//!
//! ```text
//! 0      4       5         8             12      24
//! +------+-------+---------+-------------+-------+------+-----------------------+
//! | HFB1 | flags | 3 zero  | plain bytes | nonce | body | tag, where encrypted  |
//! +------+-------+---------+-------------+-------+------+-----------------------+
//! ```
//! Flags: 1 the body is one frame of zstd (RFC 8878), 2 it is encrypted after that by AES-256-GCM with the first 12 bytes
//! as associated data (keys: [`holdfast_cipher::BackupKey`]). Integers are little-endian. Manifests are such objects too.
//!
//! # Invariants
//! 1. A backup that is listed can be restored: its chunks and pages were durable before its manifest.
//! 2. A chunk is deleted only if no manifest leads to it, nobody else is at work, and it is older than a day.
//! 3. What is read is what its name says, or it is [`Error::Damaged`].
//!
//! Limits: 32 bytes of memory a chunk that differs from the backup before; [`verify()`] and [`prune()`] take 32 bytes a chunk
//! that is there.

#![deny(unsafe_code)]

mod catalogue;
mod directory;
mod error;
pub mod key_file;
pub mod lock;
mod manifest;
mod map;
mod object;
mod parallel;
mod prune;
mod repository;
mod restore;
mod s3;
mod store;
mod verify;
mod write;

pub use catalogue::{Backup, Catalogue};
pub use directory::Directory;
pub use error::{Error, Result};
pub use manifest::{Manifest, Source};
pub use map::{Map, PAGE_CHUNKS};
pub use object::Name;
pub use prune::{Pruned, prune};
pub use repository::{About, Repository, now_ms, stamp};
pub use restore::{Piece, Reader, Restored, to_file, to_output};
pub use s3::S3;
pub use store::{Listed, OBJECT_BYTES_MAX, Store, store};
pub use verify::{Damage, Verified, verify};
pub use write::{Give, Stored, Writing};

/// Of a volume, at multiples of itself.
pub const CHUNK_BYTES: u64 = 1 << 20;
