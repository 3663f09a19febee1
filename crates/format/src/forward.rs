//! What passes between two hosts: requests that an ingress forwards to the host that owns the volume.
//!
//! Frames are those of [`crate::wire`]. An ingress is a host at which clients reach a volume that another host owns. It
//! connects to the owner, greets, attaches its clients' sessions, and forwards what they ask.
//!
//! A **tick** is a moment on the owner's clock. Each request carries the newest one that the ingress has heard, and the
//! owner refuses a request whose tick is older than [`LIFETIME_MS`] (protocol rule 22): what was held up on the way is
//! not carried out after the client was told that it failed.

use crate::versions::Versions;
use crate::wire::Message;
use core::net::IpAddr;
use holdfast_base::{BlockError, ByteRange, GridId, InstanceId, ObjectId, StatusExtent, VolumeId};
use serde::{Deserialize, Serialize};

/// Versions of these messages that this release speaks.
pub const FORWARD: Versions = Versions { oldest: 2, newest: 4 };

/// Since this version an ingress says who its clients are, and hears which of them may not write.
pub const CLIENTS_SINCE: u32 = 3;

/// Since this version hosts pass on what volumes of a sharing domain tell each other.
pub const TELLS_SINCE: u32 = 4;

/// Age of its tick at which a forwarded request is refused. Longer than a host's lease and a take-over, which clients
/// shall sit out.
pub const LIFETIME_MS: u64 = 10_000;

/// A moment on the clock of the host that owns the volume, in milliseconds from its own start.
pub type TickMs = u64;

/// What an ingress asks of the host that owns a volume.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Ask {
    /// First on every connection, and the same in all versions. Of connections of one instance only the one with the highest number lives.
    Hello { versions: Versions, grid: GridId, host: String, instance: InstanceId, number: u64 },
    /// For the tick.
    Ping,
    /// A client has opened an export, and has this number at its ingress. `fresh`: nothing of it was ever carried out.
    Attach { session: u64, export: String, fresh: bool },
    /// Nothing that was asked in the session and is not under way yet will be done.
    Detach { session: u64 },
    /// Payload: what a write writes.
    Op { session: u64, tick: TickMs, op: Op },
    /// All that had come when the owner asked for this has been asked, on this connection.
    Passed { barrier: u64 },
    /// The ingress's host takes the volume over now: stop serving, and give up all grants.
    Yield { volume: VolumeId },
    /// As [`Ask::Attach`], with who the client is, how long ago its last write was answered, and whether another client has
    /// followed it. Since [`CLIENTS_SINCE`].
    AttachAs { session: u64, export: String, fresh: bool, client: Client, wrote_ms: Option<u64>, fenced: bool },
    /// One volume tells another something, in a [`crate::talk::Talk`], which is the payload. Not answered. Since
    /// [`TELLS_SINCE`].
    Tell { from: VolumeId, to: VolumeId },
}

/// Who a client is, as far as its host knows: what two paths of one client have in common.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Client {
    /// For people.
    pub label: String,
    /// Of its certificate.
    pub name: Option<String>,
    /// The start of the machine that it runs on, where it is known: by a unix socket, or by the machine's own address.
    pub machine: Option<u128>,
    /// Of its machine.
    pub address: Option<IpAddr>,
    /// On that machine.
    pub process: Option<u32>,
}

impl Client {
    /// Of an ingress of a release that does not say who its clients are: all of them are one.
    pub fn of_ingress(host: &str) -> Client {
        let label = format!("a client of host {host}");
        // No client has such a name.
        Client { name: Some(format!("host {host}")), label, ..Client::default() }
    }

    /// Whether both may be paths of one client: what both tell is the same.
    pub fn is(&self, other: &Client) -> bool {
        fn both<T: PartialEq>(a: &Option<T>, b: &Option<T>) -> Option<bool> {
            Some(a.as_ref()? == b.as_ref()?)
        }
        if let Some(is_one) = both(&self.name, &other.name) {
            return is_one;
        }
        let is_one_machine = both(&self.machine, &other.machine).or_else(|| both(&self.address, &other.address));
        is_one_machine == Some(true) && both(&self.process, &other.process) != Some(false)
    }

    /// Another path of it tells more.
    pub fn learn(&mut self, other: &Client) {
        self.name = self.name.take().or_else(|| other.name.clone());
        self.machine = self.machine.or(other.machine);
        self.address = self.address.or(other.address);
        self.process = self.process.or(other.process);
    }
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
    /// Answers nothing: the ingress shall say [`Ask::Passed`].
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
    /// Answers nothing: another client has followed the one of this session, which writes no more. Since [`CLIENTS_SINCE`].
    Fenced {
        session: u64,
    },
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
    /// Another client writes. Since [`CLIENTS_SINCE`].
    NotWriter,
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
            BlockError::NotWriter => Failure::NotWriter,
        }
    }
}

/// Why the owner does not do what it was asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Refusal {
    /// These versions are spoken here, and none of those that were offered.
    Version(Versions),
    Grid,
    /// Another connection of the same ingress is newer.
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
