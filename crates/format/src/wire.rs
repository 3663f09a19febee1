//! Our own wire: frames between a controller and a node.
//!
//! ```text
//! 0        4      5    6    8           12              16      24           28
//! +--------+------+----+----+-----------+---------------+-------+------------+------+---------+
//! | "HFW1" | kind | f. | c. | meta bytes| payload bytes | token | crc32c     | meta | payload |
//! +--------+------+----+----+-----------+---------------+-------+------------+------+---------+
//! ```
//! Flags and class are two bytes, and zero in most frames; so is the byte behind the class.
//! The checksum covers the first 24 bytes and the meta part (postcard of [`Request`] or [`Reply`]). Payload is covered by
//! the block checksums that meta carries, the same from the guest's write to the guest's read.

use crate::drive::DriveReport;
use crate::ledger::{AckRule, Leg};
use crate::versions::Versions;
use crate::{FormatError, from_postcard};
use holdfast_base::{
    BlockCrc, Buf, BufMut, DeviceId, Epoch, GridId, InstanceId, LedgerId, Lsn, MediaClass, NodeId, ShardId, Urgency,
    VolumeId, crc32c,
    stream::{Inbound, SINK_BYTES_MIN},
};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Versions of the messages that this release speaks. 6 has [`Request::CheckShard`], 7 [`Request::MakeShard`],
/// 8 [`Request::Drives`], 9 [`encode_frame_again`], 10 [`Request::Troubles`], 11 [`Request::PutRoot`] and [`Request::ListVolumes`],
/// 12 [`Request::Heard`], 13 [`Request::Reactors`] and [`Request::Join`]. From 14 on nodes take shards of packed segments,
/// and frames say more than their messages ([`Beside`]); from 15 on they take lists of what was revoked that name operators.
pub const WIRE: Versions = Versions { oldest: 5, newest: 15 };

/// Version from which on a node reads headers of packed segments, and takes their shards.
pub const PACKED_SINCE: u32 = 14;

/// Version from which on a node takes a list of what was revoked that names operators and readers of the HTTP interface.
pub const OPERATORS_SINCE: u32 = 15;

/// Version from which on a request says how urgent it is, and asks for the times of its node.
pub const BESIDE_SINCE: u32 = 14;

/// Version from which on a request may go without its payload where that is the one of the frame before it.
pub const PAYLOAD_AGAIN_SINCE: u32 = 9;

pub const FRAME_HEADER_BYTES: usize = 28;

/// A frame's meta part: a list of shards or log entries is paged to stay below.
pub const META_BYTES_MAX: u32 = 4 << 20;

/// A frame's payload: the largest request of a guest that one host forwards to another; the largest shard is far below.
pub const PAYLOAD_BYTES_MAX: u32 = 32 << 20;

/// How long one answer to an owner lets it serve reads, counted from when it sent the request (protocol rule 8).
pub const GRANT_MS: u64 = 200;

/// How long a node that makes a shard waits for what it needs of others, at most: later it puts nothing.
pub const MAKE_MS: u64 = 1000;

/// Where a shard of a segment is.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ShardSource {
    pub index: u8,
    pub node: NodeId,
    /// Where that node listens, as the owner's host knows it.
    pub address: Option<String>,
    pub device: DeviceId,
}

/// What a controller asks of a node. Everything names its device: a node's devices fail by themselves.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Request {
    /// First on every connection, and the same in all versions.
    Hello {
        versions: Versions,
        grid: GridId,
        host: String,
    },
    /// Answered by [`Reply::Pong`] without touching a device.
    Ping,
    /// Fill and state of all devices.
    Stat,
    /// Durable before it is answered. Repeating it is harmless.
    CreateLedger {
        device: DeviceId,
        volume: VolumeId,
        epoch: Epoch,
        instance: InstanceId,
        ledger: LedgerId,
        legs: Vec<Leg>,
        rule: AckRule,
    },
    /// Payload: the entry's blocks, `crcs.len()` of them. `header` is opaque here. Repeating it is harmless.
    Append {
        device: DeviceId,
        volume: VolumeId,
        epoch: Epoch,
        ledger: LedgerId,
        lsn: Lsn,
        /// Largest LSN that the writer knows to be acknowledged.
        acked: Lsn,
        header: Vec<u8>,
        crcs: Vec<BlockCrc>,
    },
    /// Promise never again to serve an epoch below this one, durable before it is answered, and tell what is held.
    Fence {
        device: DeviceId,
        volume: VolumeId,
        epoch: Epoch,
        instance: InstanceId,
    },
    /// Entries of a ledger from an LSN on, as many as fit `bytes_max` (at least one).
    ReadLog {
        device: DeviceId,
        volume: VolumeId,
        ledger: LedgerId,
        from: Lsn,
        bytes_max: u32,
    },
    /// Entries up to and including `upto` are not needed any more. Lazily durable.
    TrimLedger {
        device: DeviceId,
        volume: VolumeId,
        epoch: Epoch,
        ledger: LedgerId,
        upto: Lsn,
    },
    DeleteLedger {
        device: DeviceId,
        volume: VolumeId,
        epoch: Epoch,
        ledger: LedgerId,
    },
    /// Asks for nothing but the read grant that every answer to an owner carries.
    Grant {
        device: DeviceId,
        volume: VolumeId,
        epoch: Epoch,
    },
    /// This owner serves no more: no answer to its epoch is a grant from here on.
    Release {
        device: DeviceId,
        volume: VolumeId,
        epoch: Epoch,
    },
    /// The operator says what the device is made of; `None` leaves it to the node to find out. Durable before it is answered.
    SetMedia {
        device: DeviceId,
        media: Option<MediaClass>,
    },
    /// Payload: header area (`header_blocks`), then the shard's blocks. Written whole, checked first, never changed.
    PutShard {
        device: DeviceId,
        volume: VolumeId,
        epoch: Epoch,
        shard: ShardId,
        header_blocks: u32,
    },
    /// `blocks` blocks of the shard's data from `block` on (the header area not counted).
    ReadShard {
        device: DeviceId,
        shard: ShardId,
        block: u32,
        blocks: u32,
        /// Against the shard's checksums. Bytes that were not may be damaged.
        checked: bool,
        /// A copy in the node's read cache will do; not for who looks whether the shard can be read.
        cached: bool,
    },
    /// The shard's header area.
    ReadShardHeader {
        device: DeviceId,
        shard: ShardId,
    },
    DeleteShards {
        device: DeviceId,
        volume: VolumeId,
        epoch: Epoch,
        shards: Vec<ShardId>,
    },
    /// The shards held of a volume, in order, after `after`, at most `count_max`.
    ListShards {
        device: DeviceId,
        volume: VolumeId,
        after: Option<ShardId>,
        count_max: u32,
    },
    /// Returns everything held of a volume: the volume is being deleted. The promise stays.
    DropVolume {
        device: DeviceId,
        volume: VolumeId,
        epoch: Epoch,
    },
    /// Reads the whole shard and compares it with its checksums: [`Reply::Done`], or why not. Since version 6.
    CheckShard {
        device: DeviceId,
        shard: ShardId,
    },
    /// Reads `sources` from their nodes and puts the shard that follows from them, as [`Request::PutShard`] does: of one source
    /// a copy, of as many as the segment's code has data shards what the code gives. Payload: the header area of the
    /// segment's shard `header_of`. Since version 7.
    MakeShard {
        device: DeviceId,
        volume: VolumeId,
        epoch: Epoch,
        shard: ShardId,
        header_of: u8,
        sources: Vec<ShardSource>,
    },
    /// What the drives say of their health. Since version 8.
    Drives,
    /// Which devices are out, or have had errors. Since version 10.
    Troubles,
    /// A copy of the volume's root record, durable before it is answered. It takes the place of those with a lower epoch, or
    /// a lower sequence in the same; one that is older than what is held changes nothing. Since version 11.
    PutRoot {
        device: DeviceId,
        volume: VolumeId,
        epoch: Epoch,
        sequence: u64,
        root: Vec<u8>,
    },
    /// What is held of volumes beside their shards, in order, after `after`, of at most `count_max`. Since version 11.
    ListVolumes {
        device: DeviceId,
        after: Option<VolumeId>,
        count_max: u32,
    },
    /// How long ago the node has heard of a host. Since version 12.
    Heard {
        host: String,
    },
    /// How many reactors the node has, and which has which device. Since version 13.
    Reactors,
    /// What follows on this connection is for devices of that reactor; of a host that was greeted. Done once it is there.
    /// Since version 13.
    Join {
        reactor: u16,
        host: String,
    },
}

impl Request {
    /// Since then nodes make shards by themselves.
    pub const MAKE_SHARD_SINCE: u32 = 7;

    /// Since then nodes tell what their drives say of themselves.
    pub const DRIVES_SINCE: u32 = 8;

    /// Since then nodes tell what is wrong with their devices.
    pub const TROUBLES_SINCE: u32 = 10;

    /// Since then devices keep copies of roots.
    pub const ROOTS_SINCE: u32 = 11;

    /// Since then nodes tell when they have heard of a host.
    pub const HEARD_SINCE: u32 = 12;

    /// Since then nodes may have several reactors, and connections may be for one of them.
    pub const REACTORS_SINCE: u32 = 13;

    /// The device that it is for; none where it concerns the whole node.
    pub fn device(&self) -> Option<DeviceId> {
        match self {
            Request::Hello { .. }
            | Request::Ping
            | Request::Stat
            | Request::Drives
            | Request::Troubles
            | Request::Heard { .. }
            | Request::Reactors
            | Request::Join { .. } => None,
            Request::CreateLedger { device, .. }
            | Request::Append { device, .. }
            | Request::Fence { device, .. }
            | Request::ReadLog { device, .. }
            | Request::TrimLedger { device, .. }
            | Request::DeleteLedger { device, .. }
            | Request::Grant { device, .. }
            | Request::Release { device, .. }
            | Request::SetMedia { device, .. }
            | Request::PutShard { device, .. }
            | Request::ReadShard { device, .. }
            | Request::ReadShardHeader { device, .. }
            | Request::CheckShard { device, .. }
            | Request::MakeShard { device, .. }
            | Request::DeleteShards { device, .. }
            | Request::ListShards { device, .. }
            | Request::PutRoot { device, .. }
            | Request::ListVolumes { device, .. }
            | Request::DropVolume { device, .. } => Some(*device),
        }
    }

    /// The first version of the messages that has this one.
    pub fn since(&self) -> u32 {
        match self {
            Request::Hello { .. }
            | Request::Ping
            | Request::Stat
            | Request::CreateLedger { .. }
            | Request::Append { .. }
            | Request::Fence { .. }
            | Request::ReadLog { .. }
            | Request::TrimLedger { .. }
            | Request::DeleteLedger { .. }
            | Request::Grant { .. }
            | Request::Release { .. }
            | Request::SetMedia { .. }
            | Request::PutShard { .. }
            | Request::ReadShard { .. }
            | Request::ReadShardHeader { .. }
            | Request::DeleteShards { .. }
            | Request::ListShards { .. }
            | Request::DropVolume { .. } => 5,
            Request::CheckShard { .. } => 6,
            Request::MakeShard { .. } => Request::MAKE_SHARD_SINCE,
            Request::Drives => Request::DRIVES_SINCE,
            Request::Troubles => Request::TROUBLES_SINCE,
            Request::PutRoot { .. } | Request::ListVolumes { .. } => Request::ROOTS_SINCE,
            Request::Heard { .. } => Request::HEARD_SINCE,
            Request::Reactors | Request::Join { .. } => Request::REACTORS_SINCE,
        }
    }
}

/// State of one device, as its node sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum DeviceHealth {
    /// Being opened; not usable yet.
    Opening,
    Serving,
    /// A write or flush failed, or the device could not be opened: out, until it is opened anew.
    Failed,
}

/// How long operations of one kind took: those of the last seconds, without the large ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct OpTimes {
    /// 99 of 100 took no longer; zero where there were none.
    pub p99_us: u32,
    pub samples: u32,
}

/// A node's read cache since the node's process was started: reads of devices slower than the one that it is on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct CacheStat {
    /// Reads that were answered from it, and those that were not.
    pub hits: u64,
    pub misses: u64,
    /// Lines that could not be read back as they were written.
    pub damaged: u64,
    pub admitted_bytes: u64,
    /// Because others were read more often, or shards needed the room.
    pub evicted_bytes: u64,
    pub held_bytes: u64,
    /// Most that it may come to hold; free space counts as free, whatever of it is held.
    pub limit_bytes: u64,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DeviceStat {
    pub device: DeviceId,
    pub health: DeviceHealth,
    /// Bytes for shards, in all and free.
    pub capacity_bytes: u64,
    pub free_bytes: u64,
    /// Bytes for log entries, in all and in use.
    pub journal_bytes: u64,
    pub journal_used_bytes: u64,
    pub shard_count: u64,
    pub reads: OpTimes,
    /// Durable ones.
    pub writes: OpTimes,
    /// Operations that ended with an error since the node's process was started.
    pub io_errors: u64,
    /// What one durable write of a block took when the device was formatted; zero where nobody measured.
    pub flush_us: u32,
    /// What it is made of, as far as anybody knows.
    pub media: Option<MediaClass>,
    /// The operator said so; else it was detected.
    pub media_is_set: bool,
    /// Of the device that the node's read cache is on.
    pub read_cache: Option<CacheStat>,
}

impl DeviceStat {
    /// A device of which nothing else is known.
    pub fn unknown(device: DeviceId, health: DeviceHealth) -> DeviceStat {
        DeviceStat {
            device,
            health,
            capacity_bytes: 0,
            free_bytes: 0,
            journal_bytes: 0,
            journal_used_bytes: 0,
            shard_count: 0,
            reads: OpTimes::default(),
            writes: OpTimes::default(),
            io_errors: 0,
            flush_us: 0,
            media: None,
            media_is_set: false,
            read_cache: None,
        }
    }
}

/// What is wrong with a device, or was: of one that is out, or has had errors since its node's process was started.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DeviceTrouble {
    pub device: DeviceId,
    /// How often it was opened: each time it is another life, of which nothing is known but what its media tell.
    pub lives: u32,
    /// Operations that ended with an error, and the last of them, so long ago.
    pub io_errors: u64,
    pub last_error_ms: Option<u64>,
    /// Reads that failed and were tried again.
    pub retries: u64,
    pub outage: Option<Outage>,
}

/// A device that is out.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Outage {
    /// For so long.
    pub ms: u64,
    /// For people.
    pub why: String,
    /// It can't be opened: it is not there, say, or another's.
    pub is_missing: bool,
    /// It is opened anew by itself; else when its node restarts.
    pub is_tried: bool,
}

/// What a leg knows of one ledger.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LedgerState {
    pub ledger: LedgerId,
    /// False where the index over it may miss entries: such a leg proves nothing by lacking one (protocol rule 1).
    pub sound: bool,
    /// Largest "known acknowledged" that came with any entry.
    pub acked: Lsn,
    /// Everything up to here was trimmed.
    pub trimmed: Lsn,
    /// Largest LSN held; zero if none.
    pub last: Lsn,
}

/// What a device holds of a volume beside its shards.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct HeldVolume {
    pub volume: VolumeId,
    /// The highest that was promised here; zero where nothing was.
    pub promised: Epoch,
    pub ledgers: Vec<LedgerState>,
    pub root: Option<HeldRoot>,
}

/// The newest copy of a volume's root on a device: [`crate::copy::root_copy_id`] names its shard.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct HeldRoot {
    pub epoch: Epoch,
    pub sequence: u64,
    pub blocks: u32,
}

/// One entry of a [`Reply::LogEntries`]; payloads follow each other in the frame's payload.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LogEntry {
    pub lsn: Lsn,
    pub header: Vec<u8>,
    pub crcs: Vec<BlockCrc>,
}

/// Why a node did not do what it was asked. Exhaustive: a controller handles each.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Refusal {
    /// A higher epoch, or another opening of the same one, was promised.
    StaleEpoch {
        promised: Epoch,
    },
    UnknownDevice,
    DeviceFailed,
    /// The device is still opening, or has too much in flight: ask again later.
    Busy,
    UnknownLedger,
    UnknownShard,
    /// The bytes sent, or the bytes on the device, don't match their checksum.
    Checksum,
    /// No room: in the journal for entries, in the data area for shards.
    NoSpace,
    /// Not a request that this release can serve: bad range, another grid.
    Invalid,
    /// Of a greeting: these versions are spoken here, and none of those that were offered.
    Version(Versions),
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Reply {
    /// `version` is the one to be spoken; `boot` is new at every start of the process. The same in all versions, and so is
    /// the refusal of a greeting.
    Hello {
        version: u32,
        node: NodeId,
        boot: InstanceId,
        devices: Vec<DeviceStat>,
    },
    Pong,
    Stat {
        devices: Vec<DeviceStat>,
    },
    /// Done, and durable where the request says so.
    Done,
    /// The entry is durable here. `journal_fill` is the used share of the device's journal in 1/255.
    Appended {
        lsn: Lsn,
        journal_fill: u8,
    },
    /// `grant_left_ms`: how long the fenced owner may still serve reads by a grant of this device.
    Fenced {
        grant_left_ms: u64,
        ledgers: Vec<LedgerState>,
    },
    /// `damaged`: entries held but unreadable. `more`: the ledger holds entries beyond the last one given.
    LogEntries {
        entries: Vec<LogEntry>,
        damaged: Vec<Lsn>,
        more: bool,
    },
    /// Payload: the blocks.
    Shard {
        blocks: u32,
    },
    /// Payload: the header area.
    ShardHeader,
    Shards {
        shards: Vec<ShardId>,
        more: bool,
    },
    Refused(Refusal),
    /// As their nodes last heard them; of those that tell anything.
    Drives {
        drives: Vec<(DeviceId, DriveReport)>,
    },
    /// Of all devices that have any.
    Troubles {
        troubles: Vec<DeviceTrouble>,
    },
    Volumes {
        volumes: Vec<HeldVolume>,
        more: bool,
    },
    /// So long ago the node has heard of the host, or has begun to listen.
    Heard {
        ms: u64,
    },
    /// Reactors are numbered from zero; of devices those whose superblocks have been read.
    Reactors {
        count: u16,
        devices: Vec<(DeviceId, u16)>,
        /// Requests that one reactor has passed on to another, since the process was started.
        passed_on: u64,
    },
}

/// What a node's part in a request took.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct NodeTimes {
    /// From its coming to its answer, but for what the device took.
    pub queue_us: u32,
    /// The last operation of a device that it waited for, since the device had that.
    pub device_us: u32,
}

/// What a frame says beside its message, since [`BESIDE_SINCE`]. Before that all requests are normal, and no times are told.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Beside {
    /// Of a request.
    pub urgency: Urgency,
    /// Of a request: its answer is to bring times.
    pub wants_times: bool,
    /// Of an answer.
    pub times: Option<NodeTimes>,
}

impl Beside {
    /// Of a request that is so urgent.
    pub fn of(request: &Request, urgency: Urgency) -> Beside {
        let wants_times = matches!(request, Request::ReadShard { .. } | Request::Append { .. });
        Beside { urgency, wants_times, times: None }
    }

    /// What of it may be said where that version was agreed on.
    pub fn in_version(self, version: u32) -> Beside {
        if version >= BESIDE_SINCE { self } else { Beside::default() }
    }
}

/// A decoded frame.
#[derive(Clone, Debug)]
pub struct Frame<M> {
    pub token: u64,
    pub beside: Beside,
    pub message: M,
    pub payload: Buf,
}

/// Which direction a frame belongs to.
pub trait Message: Serialize + serde::de::DeserializeOwned {
    const KIND: u8;

    /// Whether a frame may refer to the payload of the one before it; a reader keeps that for as long.
    const REPEATS: bool = false;

    /// Whether times may stand behind it; a message that never has them may ask for them.
    const HAS_TIMES: bool = false;
}

impl Message for Request {
    const KIND: u8 = 1;
    const REPEATS: bool = true;
}

impl Message for Reply {
    const KIND: u8 = 2;
    const HAS_TIMES: bool = true;
}

const FRAME_MAGIC: [u8; 4] = *b"HFW1";

/// In byte 5 of a header: the payload does not follow, it is that of the frame before on the same connection.
const FLAG_AGAIN: u8 = 1;

/// There, too: a request asks for times, an answer has them behind its message.
const FLAG_TIMES: u8 = 2;

/// Queue and device, in the meta part behind the message.
const TIMES_BYTES: usize = 8;

/// Header and meta part of a frame; the payload's handles follow it on the stream as they are.
pub fn encode_frame<M: Message>(token: u64, message: &M, payload_len: usize) -> Vec<u8> {
    encode_frame_with(token, message, payload_len, Beside::default())
}

/// The same, of a frame whose header says more.
pub fn encode_frame_with<M: Message>(token: u64, message: &M, payload_len: usize, beside: Beside) -> Vec<u8> {
    encode_flagged(token, message, payload_len, beside, 0)
}

/// A whole frame, whose payload is the one that the frame before had on the same connection: what goes to several devices
/// of a node goes there once. For who agreed on [`PAYLOAD_AGAIN_SINCE`].
pub fn encode_frame_again<M: Message>(token: u64, message: &M, payload_len: usize, beside: Beside) -> Vec<u8> {
    assert!(M::REPEATS && payload_len > 0, "no payload of such a frame is kept");
    encode_flagged(token, message, payload_len, beside, FLAG_AGAIN)
}

/// In byte 6 of a header.
fn byte_of(urgency: Urgency) -> u8 {
    match urgency {
        Urgency::Normal => 0,
        Urgency::Sparse => 1,
        Urgency::Care => 2,
    }
}

/// What nobody knows yet is as most are.
fn urgency_of(byte: u8) -> Urgency {
    match byte {
        1 => Urgency::Sparse,
        2 => Urgency::Care,
        _ => Urgency::Normal,
    }
}

fn encode_flagged<M: Message>(token: u64, message: &M, payload_len: usize, beside: Beside, flags: u8) -> Vec<u8> {
    assert!(payload_len <= PAYLOAD_BYTES_MAX as usize, "frame payload of {payload_len} bytes");
    let mut bytes = Vec::with_capacity(FRAME_HEADER_BYTES + 96);
    bytes.resize(FRAME_HEADER_BYTES, 0);
    let mut bytes = postcard::to_extend(message, bytes).expect("our messages always encode");
    if let Some(NodeTimes { queue_us, device_us }) = beside.times {
        [queue_us, device_us].into_iter().for_each(|us| bytes.extend(us.to_le_bytes()));
    }
    let says_times = beside.wants_times || beside.times.is_some();
    let flags = flags | if says_times { FLAG_TIMES } else { 0 };
    let meta_len = bytes.len() - FRAME_HEADER_BYTES;
    assert!(meta_len <= META_BYTES_MAX as usize, "frame meta part of {meta_len} bytes");
    bytes[..4].copy_from_slice(&FRAME_MAGIC);
    (bytes[4], bytes[5], bytes[6]) = (M::KIND, flags, byte_of(beside.urgency));
    bytes[8..12].copy_from_slice(&(meta_len as u32).to_le_bytes());
    bytes[12..16].copy_from_slice(&(payload_len as u32).to_le_bytes());
    bytes[16..24].copy_from_slice(&token.to_le_bytes());
    let crc = frame_crc(&bytes[..24], &bytes[FRAME_HEADER_BYTES..]);
    bytes[24..28].copy_from_slice(&crc.to_le_bytes());
    bytes
}

fn frame_crc(header: &[u8], meta: &[u8]) -> u32 {
    crc32c(meta) ^ crc32c(header).rotate_left(1)
}

struct FrameHeader {
    meta_len: usize,
    payload_len: usize,
    is_again: bool,
    says_times: bool,
    urgency: Urgency,
    token: u64,
    crc: u32,
}

fn decode_header<M: Message>(bytes: &[u8; FRAME_HEADER_BYTES]) -> Result<FrameHeader, FormatError> {
    if bytes[..4] != FRAME_MAGIC || bytes[4] != M::KIND {
        return Err(FormatError::Magic);
    }
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
    let (meta_len, payload_len) = (word(8), word(12));
    if meta_len > META_BYTES_MAX {
        return Err(FormatError::Field("meta bytes"));
    }
    if payload_len > PAYLOAD_BYTES_MAX {
        return Err(FormatError::Field("payload bytes"));
    }
    let (meta_len, payload_len) = (meta_len as usize, payload_len as usize);
    let token = u64::from_le_bytes(bytes[16..24].try_into().expect("eight bytes"));
    let (is_again, says_times) = (bytes[5] & FLAG_AGAIN != 0, bytes[5] & FLAG_TIMES != 0);
    if says_times && M::HAS_TIMES && meta_len < TIMES_BYTES {
        return Err(FormatError::Field("times"));
    }
    let urgency = urgency_of(bytes[6]);
    Ok(FrameHeader { meta_len, payload_len, is_again, says_times, urgency, token, crc: word(24) })
}

/// A whole meta part, and what the frame says beside it.
fn read_meta<M: Message>(header: &FrameHeader, meta: &[u8]) -> Result<(M, Beside), FormatError> {
    let mut beside = Beside { urgency: header.urgency, ..Beside::default() };
    if !header.says_times {
        return Ok((from_postcard(meta)?, beside));
    }
    if !M::HAS_TIMES {
        beside.wants_times = true;
        return Ok((from_postcard(meta)?, beside));
    }
    let (meta, times) = meta.split_at(meta.len() - TIMES_BYTES);
    let us = |at: usize| u32::from_le_bytes(times[at..at + 4].try_into().expect("four bytes"));
    beside.times = Some(NodeTimes { queue_us: us(0), device_us: us(4) });
    Ok((from_postcard(meta)?, beside))
}

/// Cuts a byte stream into frames. Payloads land in aligned buffers of their own.
///
/// Faults: bytes that are no frame break the stream for good ([`FrameReader::error`]); the shell closes the connection.
pub struct FrameReader<M> {
    head: Vec<u8>,
    body: Option<Body<M>>,
    ready: VecDeque<Frame<M>>,
    /// Payload of the last frame, where the next one may refer to it.
    last: Buf,
    error: Option<FormatError>,
}

struct Body<M> {
    token: u64,
    beside: Beside,
    message: M,
    /// `None` while it is lent.
    payload: Option<BufMut>,
    filled: usize,
}

impl<M> Body<M> {
    fn rest_bytes(&self) -> usize {
        self.payload.as_ref().expect("the buffer is lent: bytes belong in it").len() - self.filled
    }
}

impl<M: Message> Default for FrameReader<M> {
    fn default() -> Self {
        FrameReader { head: Vec::new(), body: None, ready: VecDeque::new(), last: Buf::empty(), error: None }
    }
}

impl<M: Message> FrameReader<M> {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn pop(&mut self) -> Option<Frame<M>> {
        self.ready.pop_front()
    }

    pub fn error(&self) -> Option<FormatError> {
        self.error
    }

    /// Takes bytes of the head (header and meta part) from the front of `bytes`; returns how many.
    fn take_head(&mut self, bytes: &[u8]) -> Result<usize, FormatError> {
        let mut taken = fill_up_to(&mut self.head, FRAME_HEADER_BYTES, bytes);
        let Some(fixed) = self.head.first_chunk::<FRAME_HEADER_BYTES>() else { return Ok(taken) };
        let header = decode_header::<M>(fixed)?;
        taken += fill_up_to(&mut self.head, FRAME_HEADER_BYTES + header.meta_len, &bytes[taken..]);
        if self.head.len() < FRAME_HEADER_BYTES + header.meta_len {
            return Ok(taken);
        }
        let (fixed, meta) = self.head.split_at(FRAME_HEADER_BYTES);
        if frame_crc(&fixed[..24], meta) != header.crc {
            return Err(FormatError::Checksum);
        }
        let (message, beside) = read_meta::<M>(&header, meta)?;
        let token = header.token;
        self.head.clear();
        if header.is_again {
            if header.payload_len == 0 || header.payload_len != self.last.len() {
                return Err(FormatError::Field("payload of the frame before"));
            }
            self.on_whole(Frame { token, beside, message, payload: self.last.clone() });
        } else if header.payload_len == 0 {
            self.on_whole(Frame { token, beside, message, payload: Buf::empty() });
        } else {
            let payload = Some(BufMut::new(header.payload_len));
            self.body = Some(Body { token, beside, message, payload, filled: 0 });
        }
        Ok(taken)
    }

    fn finish_body(&mut self) {
        if self.body.as_ref().is_some_and(|b| b.rest_bytes() == 0) {
            let Body { token, beside, message, payload, .. } = self.body.take().expect("just seen");
            self.on_whole(Frame { token, beside, message, payload: payload.expect("just seen").freeze() });
        }
    }

    fn on_whole(&mut self, frame: Frame<M>) {
        if M::REPEATS {
            self.last = frame.payload.clone();
        }
        self.ready.push_back(frame);
    }
}

fn fill_up_to(head: &mut Vec<u8>, want: usize, bytes: &[u8]) -> usize {
    let count = want.saturating_sub(head.len()).min(bytes.len());
    head.extend_from_slice(&bytes[..count]);
    count
}

impl<M: Message> Inbound for FrameReader<M> {
    fn on_bytes(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() && self.error.is_none() {
            if let Some(body) = &mut self.body {
                let count = bytes.len().min(body.rest_bytes());
                let payload = body.payload.as_mut().expect("just asked");
                payload[body.filled..body.filled + count].copy_from_slice(&bytes[..count]);
                body.filled += count;
                bytes = &bytes[count..];
                self.finish_body();
            } else {
                match self.take_head(bytes) {
                    Ok(count) => bytes = &bytes[count..],
                    Err(error) => self.error = Some(error),
                }
            }
        }
    }

    fn take_sink(&mut self) -> Option<(BufMut, usize)> {
        let body = self.body.as_mut()?;
        let payload = body.payload.take_if(|p| p.len() - body.filled >= SINK_BYTES_MIN)?;
        Some((payload, body.filled))
    }

    fn give_sink(&mut self, buf: BufMut, filled: usize) {
        let body = self.body.as_mut().expect("a sink was lent");
        assert!(filled >= body.filled && filled <= buf.len(), "{filled} bytes in a sink of {}", buf.len());
        (body.payload, body.filled) = (Some(buf), filled);
        self.finish_body();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn append(len: usize) -> Request {
        Request::Append {
            device: DeviceId(1),
            volume: VolumeId(2),
            epoch: Epoch(3),
            ledger: LedgerId { epoch: Epoch(3), n: 0 },
            lsn: Lsn(9),
            acked: Lsn(8),
            header: vec![1, 2, 3],
            crcs: vec![5; len.div_ceil(4096)],
        }
    }

    #[test]
    fn a_damaged_frame_breaks_the_stream() {
        for at in [0, 4, 9, 20, 26, 30] {
            let mut bytes = encode_frame(1, &append(0), 0);
            bytes[at] ^= 0x40;
            let mut reader = FrameReader::<Request>::new();
            reader.on_bytes(&bytes);
            reader.on_bytes(&[0; 40_000]);
            assert!(reader.pop().is_none(), "byte {at}");
            assert!(reader.error().is_some(), "byte {at}");
        }
    }

    #[test]
    fn only_the_payload_of_the_frame_before_is_had_again() {
        let read = |frames: &[(Vec<u8>, usize)]| {
            let mut reader = FrameReader::<Request>::new();
            for (frame, len) in frames {
                reader.on_bytes(frame);
                reader.on_bytes(&vec![7; *len]);
            }
            let whole = std::iter::from_fn(|| reader.pop()).map(|f| f.payload.to_vec()).collect::<Vec<_>>();
            (whole, reader.error())
        };
        let whole = (encode_frame(1, &append(8192), 8192), 8192);
        let again = |len| (encode_frame_again(2, &append(len), len, Beside::default()), 0);
        let other = (encode_frame(3, &append(0), 0), 0);
        assert_eq!((whole.0[5], again(8192).0[5]), (0, 1));
        let payload = vec![7; 8192];
        let wrong = Some(FormatError::Field("payload of the frame before"));
        assert_eq!(read(&[whole.clone(), again(8192), again(8192)]), (vec![payload.clone(); 3], None));
        assert_eq!(read(&[again(8192)]), (vec![], wrong));
        assert_eq!(read(&[whole.clone(), again(4096)]), (vec![payload.clone()], wrong));
        assert_eq!(read(&[whole, other, again(8192)]), (vec![payload, vec![]], wrong));

        // Answers don't refer to each other.
        let mut reader = FrameReader::<Reply>::new();
        let shard = Reply::Shard { blocks: 1 };
        reader.on_bytes(&[encode_frame(1, &shard, 4096), vec![7; 4096]].concat());
        reader.on_bytes(&encode_flagged(2, &shard, 4096, Beside::default(), FLAG_AGAIN));
        assert!(reader.pop().is_some() && reader.pop().is_none());
        assert_eq!(reader.error(), wrong);
    }

    #[test]
    fn a_request_says_its_class_where_that_was_agreed_on_and_a_normal_one_is_as_it_was() {
        let frame = |urgency, version| {
            let beside = Beside { urgency, ..Beside::default() };
            encode_frame_with(7, &append(0), 0, beside.in_version(version))
        };
        let plain = encode_frame(7, &append(0), 0);
        assert_eq!(frame(Urgency::Normal, BESIDE_SINCE), plain);
        assert_eq!(frame(Urgency::Care, BESIDE_SINCE - 1), plain);
        for (byte, urgency) in [(0, Urgency::Normal), (1, Urgency::Sparse), (2, Urgency::Care)] {
            let bytes = frame(urgency, BESIDE_SINCE);
            assert_eq!(bytes[4..8], [1, 0, byte, 0]);
            let mut reader = FrameReader::<Request>::new();
            reader.on_bytes(&bytes);
            assert_eq!(reader.pop().expect("a frame").beside.urgency, urgency);
        }
        assert_eq!(urgency_of(9), Urgency::Normal, "of a later release");
    }

    #[test]
    fn an_answer_brings_times_where_its_request_asked_for_them() {
        let asking = Beside::of(&append(0), Urgency::Sparse);
        let bytes = encode_frame_with(7, &append(0), 0, asking);
        assert_eq!(bytes[4..8], [1, 2, 1, 0]);
        let mut reader = FrameReader::<Request>::new();
        reader.on_bytes(&bytes);
        assert_eq!(reader.pop().expect("a frame").beside, asking);
        assert!(!Beside::of(&Request::Stat, Urgency::Normal).wants_times);

        let reply = Reply::Appended { lsn: Lsn(9), journal_fill: 3 };
        let times = Some(NodeTimes { queue_us: 258, device_us: 1 << 24 });
        let told = encode_frame_with(7, &reply, 0, Beside { times, ..Beside::default() });
        let plain = encode_frame(7, &reply, 0);
        assert_eq!(told.len(), plain.len() + TIMES_BYTES);
        assert_eq!((told[5], &told[plain.len()..]), (2, &[2, 1, 0, 0, 0, 0, 0, 1][..]));
        let mut reader = FrameReader::<Reply>::new();
        reader.on_bytes(&[told, plain].concat());
        let frames: Vec<_> = std::iter::from_fn(|| reader.pop()).map(|f| (f.message, f.beside.times)).collect();
        assert_eq!(frames, [(reply.clone(), times), (reply, None)]);

        // Too short for what it says.
        let mut pong = encode_frame(7, &Reply::Pong, 0);
        pong[5] = 2;
        reader.on_bytes(&pong);
        assert_eq!(reader.error(), Some(FormatError::Field("times")));
    }

    proptest! {
        #[test]
        fn frames_survive_any_fragmentation(
            payloads in proptest::collection::vec(
                (prop_oneof![Just(0usize), 1usize..9000, 60_000usize..80_000], any::<bool>()),
                1..5,
            ),
            cuts in proptest::collection::vec(1usize..50_000, 1..20),
        ) {
            let mut stream = Vec::new();
            for (i, (len, twice)) in payloads.iter().enumerate() {
                stream.extend_from_slice(&encode_frame(i as u64, &append(*len), *len));
                stream.extend(std::iter::repeat_n(i as u8, *len));
                if *twice && *len > 0 {
                    stream.extend_from_slice(&encode_frame_again(i as u64, &append(*len), *len, Beside::default()));
                }
            }
            let mut reader = FrameReader::<Request>::new();
            let mut rest = &stream[..];
            let mut cuts = cuts.iter().cycle();
            while !rest.is_empty() {
                let count = (*cuts.next().unwrap()).min(rest.len());
                if let Some((mut sink, filled)) = reader.take_sink() {
                    let count = count.min(sink.len() - filled);
                    sink[filled..filled + count].copy_from_slice(&rest[..count]);
                    reader.give_sink(sink, filled + count);
                    rest = &rest[count..];
                } else {
                    reader.on_bytes(&rest[..count]);
                    rest = &rest[count..];
                }
            }
            for (i, (len, twice)) in payloads.iter().enumerate() {
                for _ in 0..if *twice && *len > 0 { 2 } else { 1 } {
                    let frame = reader.pop().expect("a frame a message");
                    prop_assert_eq!(frame.token, i as u64);
                    prop_assert_eq!(frame.message, append(*len));
                    prop_assert_eq!(frame.payload.len(), *len);
                    prop_assert!(frame.payload.iter().all(|b| *b == i as u8));
                }
            }
            prop_assert!(reader.pop().is_none() && reader.error().is_none());
        }
    }
}
