//! The node's vocabulary: configuration, events, effects, notices.

use crate::journal::commit::BATCH_RECORDS_MAX;
use crate::siblings::Message;
use holdfast_base::{Buf, DeviceId, GridId, InstanceId, LedgerId, Lsn, MediaClass, NodeId, ShardId, VolumeId};
use holdfast_format::drive::DriveReport;
use holdfast_format::versions::Versions;
use holdfast_format::wire::{Beside, NodeTimes, Reply, Request, WIRE};
use std::fmt;
use std::time::Duration;

/// Place of a device in its node's configuration. It names the device before its superblock was read.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct DeviceSlot(pub usize);

/// One connection. The shell never gives the same number to two.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PeerId {
    pub conn: u64,
    /// The reactor whose connection it is, where that is another one.
    pub(crate) sibling: Option<u16>,
}

impl PeerId {
    /// A connection of this machine's own reactor.
    pub fn here(conn: u64) -> PeerId {
        PeerId { conn, sibling: None }
    }
}

/// Names one read, write or flush; its completion carries it back.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct DiskToken(pub u64);

/// Names one question to another node; its answer carries it back.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct AskToken(pub u64);

/// What became of a disk operation that did not succeed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DiskError {
    /// The device reported an error (EIO and its kin).
    Io,
    /// The backing file system has no room (ENOSPC).
    NoSpace,
    /// The device is gone.
    Gone,
}

impl fmt::Display for DiskError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DiskError::Io => "the device reported an I/O error",
            DiskError::NoSpace => "the file system below the device has no room",
            DiskError::Gone => "the device is gone",
        })
    }
}

impl std::error::Error for DiskError {}

holdfast_base::mutations! {
    /// Test-only switches: each breaks one protocol rule, and the simulator must notice. All false in production.
    pub struct Mutations {
        /// Appends of epochs below the promise are accepted (rule 6: a fenced owner can't complete a write).
        skip_fence_check,
        /// Journal batches are acknowledged without having been flushed (DESIGN invariant 1, rule 11).
        ack_before_durable,
        /// Fences are answered without a promise on this device (rule 6: promises live on the device they protect).
        promise_not_persisted,
        /// The start-up scan ends at the first missing batch (rule 11: it finds every batch and never stops at a hole).
        scan_stops_at_hole,
        /// What is unknown or damaged is told as "sound, and I hold nothing" (rule 1: a blank disk proves nothing).
        blank_says_dont_have,
        /// What a read cache holds is not compared with the shard's checksums (decision 0022).
        cached_read_unverified,
        /// What a read cache holds of a shard outlives the shard (decision 0022).
        deletion_keeps_cached,
        /// A device is opened anew while writes of its former life are under way (rule 25).
        reopens_under_writes,
    }
}

/// Operations of one device that its kernel holds at a time: enough for a fast drive, few enough that reads don't queue
/// behind a burst of shards.
const DISK_IN_FLIGHT_MAX: usize = 64;

#[derive(Clone, Debug)]
pub struct NodeConfig {
    pub grid: GridId,
    pub node: NodeId,
    /// Fresh at every start of the process.
    pub boot: InstanceId,
    /// Which of the node's reactors it is on, and how many these are: each has a machine with some of the devices.
    pub reactor: u16,
    pub reactors: u16,
    /// Versions of the messages that it speaks.
    pub wire: Versions,
    /// Longest time that a record waits for others to share its batch; used only under load.
    pub commit_window_max: Duration,
    /// Operations of one device that the shell gets at a time.
    pub disk_in_flight_max: usize,
    /// Journal batches of one device in flight together.
    pub batch_in_flight_max: usize,
    /// Records that one batch takes up to, of those that need not be together.
    pub batch_records_max: usize,
    /// Memory for checksum tables of shards, a device.
    pub shard_table_cache_bytes: usize,
    /// Share of a device of the fastest class that may hold copies of what is read from slower ones; zero for no read cache.
    pub read_cache_per_mille: u32,
    /// Memory for what a read cache knows of what it holds.
    pub read_cache_state_bytes_max: u64,
    pub mutations: Mutations,
}

impl NodeConfig {
    /// The defaults that documentation names, for this node.
    pub fn new(grid: GridId, node: NodeId, boot: InstanceId) -> NodeConfig {
        NodeConfig {
            grid,
            node,
            boot,
            reactor: 0,
            reactors: 1,
            wire: WIRE,
            commit_window_max: Duration::from_micros(500),
            disk_in_flight_max: DISK_IN_FLIGHT_MAX,
            batch_in_flight_max: 4,
            batch_records_max: BATCH_RECORDS_MAX,
            shard_table_cache_bytes: 32 << 20,
            read_cache_per_mille: 100,
            read_cache_state_bytes_max: 256 << 20,
            mutations: Mutations::default(),
        }
    }
}

#[derive(Clone, Debug)]
pub enum Event {
    /// A device of the configuration, which the shell is to open.
    ExpectDevice {
        slot: DeviceSlot,
        /// Which it should be, as far as that is known.
        device: Option<DeviceId>,
    },
    /// A device is open, for the first time or anew ([`Effect::Open`]): superblock, unit table, slot table, journal are read.
    AddDevice {
        slot: DeviceSlot,
        size_bytes: u64,
        /// What the shell found it to be made of.
        media: Option<MediaClass>,
        /// What was acknowledged is on its media, and nothing lies in a page cache: it may be opened anew after a failure.
        is_direct: bool,
    },
    /// It could not be opened, and is not written to.
    NotOpened {
        slot: DeviceSlot,
        /// For people: what, why, and what to do.
        why: String,
    },
    /// The configuration has it no more. [`Notice::DeviceGone`] follows when nothing of it is under way.
    RemoveDevice {
        slot: DeviceSlot,
    },
    /// What the device's drive says of its health, from now on; `None` where nothing is known any more.
    Drive {
        slot: DeviceSlot,
        report: Option<DriveReport>,
    },
    /// The connection is closed. What it asked for is still done; replies to it go nowhere.
    PeerGone {
        peer: PeerId,
    },
    Request {
        peer: PeerId,
        token: u64,
        beside: Beside,
        request: Request,
        payload: Buf,
    },
    /// A read, write or flush is done. The buffer of a read holds exactly the bytes asked for; others are empty.
    Disk {
        token: DiskToken,
        result: Result<Buf, DiskError>,
    },
    /// A machine on another of the node's reactors says something; in the order in which it was said.
    Told {
        reactor: u16,
        message: Message,
    },
    /// What another node has answered; `None` where it can't be reached, or the connection was lost on the way.
    PeerAnswered {
        token: AskToken,
        answer: Option<(Reply, Buf)>,
    },
    /// A deadline has passed.
    Tick,
}

/// All offsets and lengths are multiples of 4 KiB, and so is the address of every piece of a write.
#[derive(Clone, Debug)]
pub enum Effect {
    Reply {
        peer: PeerId,
        token: u64,
        reply: Reply,
        /// Where that was asked for, and a device had a part in it.
        times: Option<NodeTimes>,
        payload: Vec<Buf>,
    },
    /// For the machine on another of the node's reactors: [`Event::Told`] there, after what it was told before.
    Tell {
        reactor: u16,
        message: Message,
    },
    /// A question to a node of the grid, this one perhaps. Answered once, or not at all.
    Ask {
        node: NodeId,
        /// Where it listens, as far as it was told.
        address: Option<String>,
        token: AskToken,
        request: Request,
    },
    Read {
        slot: DeviceSlot,
        offset: u64,
        len: u32,
        token: DiskToken,
    },
    /// `durable`: complete only when the bytes are on media (RWF_DSYNC).
    Write {
        slot: DeviceSlot,
        offset: u64,
        data: Vec<Buf>,
        durable: bool,
        token: DiskToken,
    },
    /// Complete when everything in the device's volatile cache is on media (fdatasync). Asked for once, at opening: what a
    /// killed process left in the cache is about to be read and believed.
    Flush {
        slot: DeviceSlot,
        token: DiskToken,
    },
    /// Opens the device in this slot, by a new descriptor: [`Event::AddDevice`] or [`Event::NotOpened`] follows.
    Open {
        slot: DeviceSlot,
    },
    /// The device is not used until it is opened anew: what is in flight of its operations ends, and then its descriptor is
    /// closed.
    Close {
        slot: DeviceSlot,
    },
    /// Advice that the range holds nothing. Not pushed by this release: without a completion it could overtake the next
    /// use of the same space.
    Discard {
        slot: DeviceSlot,
        offset: u64,
        len: u64,
    },
    /// Something a person or a test may want to know.
    Note(Notice),
}

/// Why a device is out.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FailReason {
    /// It could not be opened, for this reason.
    NotOpened(String),
    /// The configuration has it no more.
    Removed,
    /// Neither superblock copy is one: the device was never formatted, or both copies are gone.
    NoSuperblock,
    /// The superblock names another grid.
    OtherGrid(GridId),
    /// The superblock names another node of this grid.
    OtherNode(NodeId),
    /// The device is smaller than when it was formatted.
    Shrunk,
    /// The same device is open in another slot.
    Twice,
    /// Neither copy of the unit table can be read.
    NoUnitTable,
    /// A write or flush of the journal failed.
    JournalWrite(DiskError),
    /// A write of the unit table, slot table or superblock failed.
    TableWrite(DiskError),
    /// A write of shard data failed.
    ShardWrite(DiskError),
    /// The flush at opening failed.
    Flush(DiskError),
    /// Batches that may have held promises are lost: only reads are served (protocol rule 6).
    PromisesLost,
}

impl fmt::Display for FailReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FailReason::NotOpened(why) => f.write_str(why),
            FailReason::Removed => write!(f, "it was taken out of its node"),
            FailReason::NoSuperblock => write!(f, "it has no readable superblock: format it, or restore its contents"),
            FailReason::OtherGrid(grid) => write!(f, "it belongs to grid {grid}"),
            FailReason::OtherNode(node) => write!(f, "it belongs to node {node} of this grid"),
            FailReason::Shrunk => write!(f, "it is smaller than when it was formatted"),
            FailReason::Twice => write!(f, "the same device is configured twice"),
            FailReason::NoUnitTable => write!(f, "neither copy of its unit table is readable"),
            FailReason::JournalWrite(e) => write!(f, "a journal write failed: {e}"),
            FailReason::TableWrite(e) => write!(f, "a table write failed: {e}"),
            FailReason::ShardWrite(e) => write!(f, "a shard write failed: {e}"),
            FailReason::Flush(e) => write!(f, "its flush at opening failed: {e}"),
            FailReason::PromisesLost => write!(f, "journal batches that may have held promises are lost"),
        }
    }
}

/// What becomes of a device that is out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    /// It is opened anew after so long.
    Again(Duration),
    /// It has failed so often that it is left alone until the process restarts. A person must act.
    GivenUp,
    /// It is left alone until the process restarts, or still serves reads. A person must act.
    Stays,
}

/// The typed structured log of the node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Notice {
    DeviceOpened {
        slot: DeviceSlot,
        device: DeviceId,
        ledgers: u64,
        shards: u64,
    },
    /// The device is out.
    DeviceFailed {
        slot: DeviceSlot,
        device: Option<DeviceId>,
        reason: FailReason,
        next: Next,
    },
    /// Nothing of a device that was removed is under way any more.
    DeviceGone {
        slot: DeviceSlot,
    },
    /// Durable journal batches can't be read any more: so many are missing, so many ledgers are unsound because of it.
    JournalDamaged {
        device: DeviceId,
        batches: u64,
        unsound_ledgers: u64,
    },
    /// A log entry is held, but unreadable.
    EntryDamaged {
        device: DeviceId,
        volume: VolumeId,
        ledger: LedgerId,
        lsn: Lsn,
    },
    /// A shard's bytes don't match their checksums, or can't be read.
    ShardDamaged {
        device: DeviceId,
        shard: ShardId,
    },
    /// Slots of the slot table can't be read: their shards are lost here.
    SlotsDamaged {
        device: DeviceId,
        count: u64,
    },
    /// One superblock copy was unreadable and has been written anew.
    SuperblockRepaired {
        device: DeviceId,
    },
}
