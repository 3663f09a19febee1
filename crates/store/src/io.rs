//! What handlers of one device share: its operations in flight, and the out-tray.

use crate::api::{DeviceSlot, DiskToken, Effect, NodeConfig, Notice, PeerId};
use crate::cache::Fresh;
use crate::device_queue::{Class, DeviceQueue, Op};
use crate::line::Whose;
use crate::meter::Kind;
use crate::shards::{HeaderRead, ShardRead};
use crate::siblings::Message;
use holdfast_base::{Buf, DeviceId, Effects, Instant, ShardId, Token};
use holdfast_format::wire::{NodeTimes, Refusal, Reply};
use std::time::Duration;

/// Disk operations of one device under way: some thousand requests of the shell's connections, and the node's own.
pub(crate) const IO_MAX: usize = 16 * 1024;

/// Operations that requests leave to what is already accepted: a log read has up to two an entry, tables need a few.
pub(crate) const IO_RESERVE: usize = 1024;

/// Bits of a disk token below the device's slot: indexes of the slab.
const INDEX_BITS: u32 = 20;
const SLOT_BITS: u32 = 12;

const _: () = assert!(IO_MAX <= 1 << INDEX_BITS, "slab indexes fit their bits");

/// Most devices that a node can have.
pub(crate) const DEVICES_MAX: usize = 1 << SLOT_BITS;

/// Who asked: where a reply goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Client {
    pub peer: PeerId,
    pub token: u64,
    pub whose: Whose,
    /// When it asked, if it wants to be told what came after that took.
    pub asked_at: Option<Instant>,
}

impl Client {
    /// Answers without times.
    pub fn reply(self, reply: Reply, payload: Vec<Buf>, out: &mut Effects<Effect>) {
        self.reply_with(reply, None, payload, out);
    }

    /// Its times, if it wants them and a device took so long just now.
    pub fn times(self, now: Instant, device: Duration) -> Option<NodeTimes> {
        let took = now.since(self.asked_at?);
        let us = |span: Duration| u32::try_from(span.as_micros()).unwrap_or(u32::MAX);
        let device = device.min(took);
        Some(NodeTimes { queue_us: us(took - device), device_us: us(device) })
    }

    /// Answers; by way of the reactor whose connection it is.
    pub fn reply_with(self, reply: Reply, times: Option<NodeTimes>, payload: Vec<Buf>, out: &mut Effects<Effect>) {
        let Client { peer, token, .. } = self;
        out.push(match peer.sibling {
            None => Effect::Reply { peer, token, reply, times, payload },
            Some(reactor) => {
                let message = Message::Reply { conn: peer.conn, token, reply: Box::new(reply), times, payload };
                Effect::Tell { reactor, message }
            }
        });
    }
}

/// What a disk operation is for.
#[derive(Debug)]
pub(crate) enum Io {
    /// The opening's own numbering.
    Opening {
        step: u32,
    },
    Batch {
        seq: u64,
    },
    UnitTable,
    Compaction {
        unit: u32,
        generation: u64,
    },
    LogRead {
        op: Token,
        part: u32,
    },
    ShardData {
        number: u32,
    },
    SlotBlock {
        block: u32,
    },
    /// Of an operation on a shard that lies in several extents.
    Part {
        whole: Token,
        part: u8,
        /// Of the whole.
        class: Class,
        whose: Whose,
    },
    ShardRead(ShardRead),
    HeaderRead(HeaderRead),
    ShardTable {
        number: u32,
        shard: ShardId,
        /// Of the first who needs it.
        whose: Whose,
    },
    SuperblockRepair,
    /// See [`crate::labels`].
    Label {
        copy: u8,
    },
    /// Of the node's read cache, in space that this device lends: see [`crate::cache`].
    CachedRead {
        ticket: Token,
        part: u8,
        whose: Whose,
    },
    CachedWrite {
        ticket: Token,
    },
    /// How the device does; nobody waits for it.
    Probe,
}

impl Io {
    /// For whom it is, where that makes a difference.
    pub fn whose(&self) -> Whose {
        match self {
            Io::ShardRead(read) => read.client().whose,
            Io::HeaderRead(read) => read.client().whose,
            Io::ShardTable { whose, .. } | Io::CachedRead { whose, .. } | Io::Part { whose, .. } => *whose,
            _ => Whose::default(),
        }
    }

    /// What it is.
    pub fn class(&self) -> Class {
        match self {
            Io::Opening { .. }
            | Io::Batch { .. }
            | Io::UnitTable
            | Io::Compaction { .. }
            | Io::LogRead { .. }
            | Io::SuperblockRepair
            | Io::Label { .. } => Class::Journal,
            Io::ShardRead(read) if read.is_check() => Class::Bulk,
            Io::ShardRead(_) | Io::HeaderRead(_) | Io::ShardTable { .. } | Io::CachedRead { .. } | Io::Probe => {
                Class::Read
            }
            Io::ShardData { .. } | Io::SlotBlock { .. } | Io::CachedWrite { .. } => Class::Bulk,
            Io::Part { class, .. } => *class,
        }
    }
}

/// A disk operation that is under way.
#[derive(Debug)]
pub(crate) struct Started {
    pub io: Io,
    pub kind: Kind,
    pub at: Instant,
    /// Since when the device has it.
    pub went_at: Option<Instant>,
    /// Offset and length of a read.
    pub read: Option<(u64, u32)>,
    /// How often it has failed, and is tried again.
    pub failures: usize,
}

/// One event's surroundings, passed to every handler of a device.
pub(crate) struct Ctx<'a> {
    pub now: Instant,
    pub slot: DeviceSlot,
    /// Zero until the superblock was read.
    pub device: DeviceId,
    pub config: &'a NodeConfig,
    pub queue: &'a mut DeviceQueue,
    pub out: &'a mut Effects<Effect>,
    /// What was read for the node's read cache.
    pub fresh: &'a mut Vec<Fresh>,
    /// What the operation took that is done now.
    pub took: Duration,
}

impl Ctx<'_> {
    fn start(&mut self, kind: Kind, io: Io, op: Op) {
        let read = if let Op::Read { offset, len } = op { Some((offset, len)) } else { None };
        self.queue.start(Started { io, kind, at: self.now, went_at: None, read, failures: 0 }, op, self.out);
    }

    pub fn read(&mut self, offset: u64, len: u32, io: Io) {
        assert!(len > 0 && offset.is_multiple_of(4096) && len.is_multiple_of(4096), "read of {len} at {offset}");
        self.start(Kind::of_read(len), io, Op::Read { offset, len });
    }

    pub fn write(&mut self, offset: u64, data: Vec<Buf>, durable: bool, io: Io) {
        debug_assert!(data.iter().all(|b| (b.as_ptr() as usize).is_multiple_of(4096)), "pieces are aligned");
        let len = holdfast_base::buf::total_len(&data);
        assert!(offset.is_multiple_of(4096) && len.is_multiple_of(4096));
        self.start(Kind::of_write(len as u64, durable), io, Op::Write { offset, data, durable });
    }

    pub fn flush(&mut self, io: Io) {
        self.start(Kind::Other, io, Op::Flush);
    }

    pub fn reply(&mut self, client: Client, reply: Reply) {
        self.reply_with(client, reply, Vec::new());
    }

    pub fn reply_with(&mut self, client: Client, reply: Reply, payload: Vec<Buf>) {
        client.reply_with(reply, client.times(self.now, self.took), payload, self.out);
    }

    pub fn refuse(&mut self, client: Client, refusal: Refusal) {
        self.reply(client, Reply::Refused(refusal));
    }

    pub fn note(&mut self, notice: Notice) {
        self.out.push(Effect::Note(notice));
    }

    /// Whether a new request may start disk operations.
    pub fn has_io_room(&self) -> bool {
        self.queue.has_room()
    }
}

/// The name of an operation of the device in this slot.
pub(crate) fn disk_token(slot: DeviceSlot, token: Token) -> DiskToken {
    DiskToken(token.0 | (slot.0 as u64) << INDEX_BITS)
}

/// The slot and the slab's token in a disk token.
pub(crate) fn split_token(token: DiskToken) -> (DeviceSlot, Token) {
    let slot = (token.0 >> INDEX_BITS) & ((1 << SLOT_BITS) - 1);
    let index = token.0 & ((1 << INDEX_BITS) - 1);
    (DeviceSlot(slot as usize), Token(token.0 >> 32 << 32 | index))
}

/// Who waits for a disk operation of a request whose client is named by nothing else.
pub(crate) fn client_of(io: &Io) -> Option<Client> {
    match io {
        Io::ShardRead(read) => Some(read.client()),
        Io::HeaderRead(read) => Some(read.client()),
        _ => None,
    }
}
