//! What passes between two hosts: requests that a portal forwards to the host that owns the volume.
//!
//! Frames are those of [`crate::wire`]. A portal is a host at which clients reach a volume that another host owns. It
//! connects to the owner, greets, attaches its clients' sessions, and forwards what they ask.
//!
//! A **tick** is a moment on the owner's clock. Each request carries the newest one that the portal has heard, and the owner
//! refuses a request whose tick is older than [`LIFETIME_MS`] (protocol rule 22): what was held up on the way is not carried
//! out after the client was told that it failed.

use crate::versions::Versions;
use crate::wire::Message;
use holdfast_base::{BlockError, ByteRange, GridId, InstanceId, ObjectId, StatusExtent, VolumeId};
use serde::{Deserialize, Serialize};

/// Versions of these messages that this release speaks.
pub const PORTAL: Versions = Versions { oldest: 2, newest: 2 };

/// Age of its tick at which a forwarded request is refused. Longer than a host's lease and a take-over, which clients
/// shall sit out.
pub const LIFETIME_MS: u64 = 10_000;

/// A moment on the clock of the host that owns the volume, in milliseconds from its own start.
pub type TickMs = u64;

/// What a portal asks of the host that owns a volume.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Ask {
    /// First on every connection, and the same in all versions. Of connections of one instance only the one with the highest number lives.
    Hello { versions: Versions, grid: GridId, host: String, instance: InstanceId, number: u64 },
    /// For the tick.
    Ping,
    /// A client has opened an export, and has this number at its portal. `fresh`: nothing of it was ever carried out.
    Attach { session: u64, export: String, fresh: bool },
    /// Nothing that was asked in the session and is not under way yet will be done.
    Detach { session: u64 },
    /// Payload: what a write writes.
    Op { session: u64, tick: TickMs, op: Op },
    /// All that had come when the owner asked for this has been asked, on this connection.
    Passed { barrier: u64 },
    /// The portal's host takes the volume over now: stop serving, and give up all grants.
    Yield { volume: VolumeId },
}

/// A block request as it travels; a write's bytes are the payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Op {
    Read(Range),
    Write { offset: u64, crc: u32 },
    Flush,
    Discard(Range),
    WriteZeroes(Range),
    Prefetch(Range),
    Status(Range),
    Changes { range: Range, since: ObjectId },
}

/// Bytes of a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Range {
    pub offset: u64,
    pub len: u64,
}

impl From<ByteRange> for Range {
    fn from(range: ByteRange) -> Range {
        Range { offset: range.offset, len: range.len }
    }
}

impl From<Range> for ByteRange {
    fn from(range: Range) -> ByteRange {
        ByteRange::new(range.offset, range.len)
    }
}

/// A run of the answer to a status request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Extent {
    pub len: u64,
    pub set: bool,
}

impl From<StatusExtent> for Extent {
    fn from(extent: StatusExtent) -> Extent {
        Extent { len: extent.len, set: extent.set }
    }
}

impl From<Extent> for StatusExtent {
    fn from(extent: Extent) -> StatusExtent {
        StatusExtent { len: extent.len, set: extent.set }
    }
}

/// What the owner answers. The frame's token is that of what was asked.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Answer {
    /// `version` is the one to be spoken. The same in all versions, and so is the refusal of a greeting.
    Hello {
        version: u32,
        host: String,
        tick: TickMs,
    },
    Pong {
        tick: TickMs,
    },
    /// Answers nothing: the portal shall say [`Ask::Passed`].
    Barrier {
        barrier: u64,
    },
    Attached,
    Detached,
    /// A write, a discard or a flush is done.
    Done,
    /// Payload: what a read gives.
    Data {
        crc: u32,
    },
    Extents(Vec<Extent>),
    /// It was not done, and won't be.
    Failed(Failure),
    /// It was too old to be done: ask again with this tick.
    Stale {
        tick: TickMs,
    },
    /// Nothing is served any more, and no grant is left.
    Yielded,
    Refused(Refusal),
}

/// Of a request: see [`BlockError`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Failure {
    OutOfRange,
    NoSpace,
    Unavailable,
    /// This host does not own the volume, or not any more: another one does, or will.
    NotOwner,
    Invalid,
}

impl From<BlockError> for Failure {
    fn from(error: BlockError) -> Failure {
        match error {
            BlockError::OutOfRange => Failure::OutOfRange,
            BlockError::NoSpace => Failure::NoSpace,
            // Clients are told the same of both.
            BlockError::Unavailable | BlockError::Injected => Failure::Unavailable,
            BlockError::Deposed | BlockError::ShuttingDown => Failure::NotOwner,
            BlockError::Invalid => Failure::Invalid,
        }
    }
}

/// Why the owner does not do what it was asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Refusal {
    /// These versions are spoken here, and none of those that were offered.
    Version(Versions),
    Grid,
    /// Another connection of the same portal is newer.
    Superseded,
    /// The volume is not served here, or not now.
    NotOwner,
    /// There is no such export.
    Unknown,
    /// More sessions than the owner takes.
    Full,
}

impl Message for Ask {
    const KIND: u8 = 3;
}

impl Message for Answer {
    const KIND: u8 = 4;
}
