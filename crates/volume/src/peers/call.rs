//! Requests in flight to nodes: one table, so that a lost connection, a late answer or a deadline finds its operation.

use holdfast_base::{DeviceId, Instant, LedgerId, Lsn, NodeId, ShardId, Token, Urgency};
use holdfast_format::ledger::Leg;
use holdfast_format::record::SegmentNo;

/// Kinds of latency that are learned apart.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Class {
    Append,
    Read,
    Bulk,
    Control,
}

impl Class {
    /// In the order of their numbers.
    pub(crate) const ALL: [Class; 4] = [Class::Append, Class::Read, Class::Bulk, Class::Control];
}

/// Whose request it is.
#[derive(Clone, Debug)]
pub(crate) enum Purpose {
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
    /// Of shards behind that one.
    Inventory {
        device: DeviceId,
        after: Option<ShardId>,
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
    /// By who waits for it, where its request does not tell. Who opens a volume is waited for, and so is the log.
    pub(crate) fn urgency(&self) -> Urgency {
        match self {
            Purpose::Header { .. }
            | Purpose::RepairRead { .. }
            | Purpose::RepairHeader { .. }
            | Purpose::RepairClear { .. }
            | Purpose::RepairPut { .. }
            | Purpose::RepairMake { .. }
            | Purpose::Inventory { .. }
            | Purpose::LedgerInventory { .. }
            | Purpose::Scrub { .. }
            | Purpose::DeleteShards { .. } => Urgency::Care,
            Purpose::Append { .. }
            | Purpose::CreateLedger { .. }
            | Purpose::Fence { .. }
            | Purpose::Knows { .. }
            | Purpose::RecoverRead { .. }
            | Purpose::Grant { .. }
            | Purpose::PutShard { .. }
            | Purpose::Fetch { .. }
            | Purpose::Look { .. }
            | Purpose::PutRoot { .. }
            | Purpose::Release
            | Purpose::Stat
            | Purpose::Probe
            | Purpose::Forget => Urgency::Normal,
        }
    }

    pub(crate) fn class(&self) -> Class {
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
pub(crate) struct Call {
    pub(crate) node: NodeId,
    pub(crate) sent_at: Instant,
    pub(crate) purpose: Purpose,
    /// Its bound has passed and whoever waits was told.
    pub(super) late: bool,
}

/// Calls that may be in flight: appends and fetches of the deepest queue a frontend allows, and background work.
pub(crate) const CALLS_MAX: usize = 65_536;
