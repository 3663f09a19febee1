//! Requests in flight to nodes: one table, so that a lost connection, a late answer or a deadline finds its operation.

use holdfast_base::{DeviceId, Instant, LedgerId, Lsn, NodeId, ShardId, Token};
use holdfast_format::ledger::Leg;
use holdfast_format::record::SegmentNo;

/// Kinds of latency that are learned apart.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Class {
    Append,
    Read,
    Bulk,
    Control,
}

/// Whose request it is.
#[derive(Clone, Debug)]
pub enum Purpose {
    Append {
        ledger: LedgerId,
        leg: u8,
        lsn: Lsn,
    },
    CreateLedger {
        ledger: LedgerId,
        leg: u8,
    },
    Fence {
        leg: Leg,
    },
    /// What a leg knows of the volume, before anything is claimed.
    Knows {
        leg: Leg,
    },
    RecoverRead {
        ledger: LedgerId,
        leg: Leg,
    },
    Grant {
        leg: u8,
        ledger: LedgerId,
    },
    PutShard {
        job: Token,
        shard: ShardId,
    },
    Fetch {
        fetch: Token,
        shard: u8,
    },
    Header {
        cleaner: u64,
        victim: usize,
    },
    RepairRead {
        repair: Token,
        shard: u8,
    },
    RepairHeader {
        repair: Token,
    },
    RepairClear {
        repair: Token,
    },
    RepairPut {
        repair: Token,
    },
    /// The target reads what it needs from the others, and puts the shard.
    RepairMake {
        repair: Token,
    },
    Inventory {
        device: DeviceId,
    },
    DeleteShards {
        shards: Vec<ShardId>,
    },
    LedgerInventory {
        leg: Leg,
    },
    Scrub {
        segment: SegmentNo,
        index: u8,
    },
    /// Where shards of an origin are.
    Look {
        leg: Leg,
    },
    /// A copy of the root.
    PutRoot {
        leg: Leg,
        sequence: u64,
    },
    /// Of a grant.
    Release,
    Stat,
    Probe,
    /// Nothing waits for the answer (trims, deletes of ledgers).
    Forget,
}

impl Purpose {
    pub fn class(&self) -> Class {
        match self {
            Purpose::Append { .. } => Class::Append,
            Purpose::Fetch { .. } | Purpose::Grant { .. } => Class::Read,
            Purpose::CreateLedger { .. }
            | Purpose::Fence { .. }
            | Purpose::Release
            | Purpose::Stat
            | Purpose::Probe => Class::Control,
            // Long by nature, or behind something long: nobody is judged by these.
            Purpose::PutShard { .. }
            | Purpose::RecoverRead { .. }
            | Purpose::Knows { .. }
            | Purpose::Header { .. }
            | Purpose::RepairRead { .. }
            | Purpose::RepairHeader { .. }
            | Purpose::RepairClear { .. }
            | Purpose::RepairPut { .. }
            | Purpose::RepairMake { .. }
            | Purpose::Inventory { .. }
            | Purpose::LedgerInventory { .. }
            | Purpose::Scrub { .. }
            | Purpose::Look { .. }
            | Purpose::PutRoot { .. }
            | Purpose::DeleteShards { .. }
            | Purpose::Forget => Class::Bulk,
        }
    }
}

#[derive(Clone, Debug)]
pub struct Call {
    pub node: NodeId,
    pub sent_at: Instant,
    pub purpose: Purpose,
    /// Its bound has passed and whoever waits was told.
    pub late: bool,
}

/// Calls that may be in flight: appends and fetches of the deepest queue a frontend allows, and background work.
pub const CALLS_MAX: usize = 65_536;

/// Who wants bytes out of a segment.
#[derive(Clone, Debug)]
pub enum Wants {
    /// A guest's read: piece `part` of the operation.
    Read { op: Token, part: u32 },
    /// What reads want, or will want, of one shard: the run that begins at block `first`.
    Ahead { segment: SegmentNo, first: u32 },
    /// Leaves of the map that are read at once: piece `part` of their blocks.
    Leaves { span: u64, part: u32 },
    /// A run of the checkpoint that is being loaded: piece `part` of run `at`.
    Run { at: usize, part: u32 },
    /// Live data of a cleaner job: piece `part`.
    Clean { job: u64, part: u32 },
    /// Another fetch, of several blocks, which can't be had together: its block `at`.
    Block { of: Token, at: u32 },
}

impl Wants {
    /// Whoever wants it opens each block by itself, and asks alone for what is damaged or can't be had.
    pub fn takes_parts(&self) -> bool {
        matches!(self, Wants::Ahead { .. })
    }
}
