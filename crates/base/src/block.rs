//! Requests and replies between a frontend (NBD, iSCSI …) and the controller of a volume.

use crate::buf::Buf;
use crate::ids::ObjectId;
use std::fmt;

/// Names one request of one session; the reply carries it back.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RequestToken(pub u64);

/// Bytes of a volume: any alignment, `offset + len` may not overflow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ByteRange {
    pub offset: u64,
    pub len: u64,
}

impl ByteRange {
    pub fn new(offset: u64, len: u64) -> ByteRange {
        ByteRange { offset, len }
    }

    /// First byte after the range; `None` where it would overflow.
    pub fn end(self) -> Option<u64> {
        self.offset.checked_add(self.len)
    }
}

#[derive(Clone, Debug)]
pub enum BlockOp {
    Read(ByteRange),
    /// Every acknowledged write is durable, so FUA asks for nothing more.
    Write {
        offset: u64,
        data: Buf,
    },
    /// Answered when every write acknowledged before it is durable, which it is.
    Flush,
    /// The bytes read as zeroes afterwards, and their space returns.
    Discard(ByteRange),
    WriteZeroes(ByteRange),
    /// A hint that the range will be read soon.
    Prefetch(ByteRange),
    /// Which parts are mapped.
    Status(ByteRange),
    /// Which parts may differ from what this snapshot holds.
    Changes {
        range: ByteRange,
        since: ObjectId,
    },
}

impl BlockOp {
    /// Whether it is to change what the volume holds.
    pub fn changes(&self) -> bool {
        match self {
            BlockOp::Write { .. } | BlockOp::Discard(_) | BlockOp::WriteZeroes(_) => true,
            BlockOp::Read(_) | BlockOp::Flush | BlockOp::Prefetch(_) | BlockOp::Status(_) | BlockOp::Changes { .. } => {
                false
            }
        }
    }
}

#[derive(Clone, Debug)]
pub struct BlockRequest {
    pub token: RequestToken,
    pub op: BlockOp,
}

/// One run of the answer to [`BlockOp::Status`] or [`BlockOp::Changes`], in order from the start of the requested range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StatusExtent {
    pub len: u64,
    /// Mapped, where false is a hole that reads as zeroes; or changed.
    pub set: bool,
}

#[derive(Clone, Debug)]
pub enum BlockData {
    Done,
    /// The bytes of a read, in order; their lengths add up to the range's.
    Data(Vec<Buf>),
    Status(Vec<StatusExtent>),
}

/// Why a request was not done. Frontends map each to their protocol's answer, exhaustively.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BlockError {
    /// Beyond the volume's end.
    OutOfRange,
    /// No space for a write; reads, discards and deletes go on.
    NoSpace,
    /// More fault domains are gone than the layout tolerates.
    Unavailable,
    /// Another host owns the volume now.
    Deposed,
    /// The volume is closing.
    ShuttingDown,
    /// The request itself is not valid (length zero where data is due, too long).
    Invalid,
    /// Another client writes to the volume, which has one writer at a time.
    NotWriter,
    /// Nothing is wrong: a layer between the frontend and the controller was told to fail it.
    Injected,
}

impl fmt::Display for BlockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            BlockError::OutOfRange => "the request reaches beyond the end of the volume",
            BlockError::NoSpace => "the grid has no space left for new data",
            BlockError::Unavailable => "more nodes are gone than the volume's layout tolerates",
            BlockError::Deposed => "another host has taken the volume over",
            BlockError::ShuttingDown => "the volume is closing",
            BlockError::Invalid => "the request is not valid",
            BlockError::NotWriter => "another client writes to the volume, and only one may at a time",
            BlockError::Injected => "a layer of the volume was told to fail it",
        })
    }
}

impl std::error::Error for BlockError {}

#[derive(Clone, Debug)]
pub struct BlockReply {
    pub token: RequestToken,
    pub result: Result<BlockData, BlockError>,
}

/// What a frontend needs to know of a volume to offer it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExportInfo {
    pub name: String,
    pub description: String,
    pub size_bytes: u64,
    pub read_only: bool,
}
