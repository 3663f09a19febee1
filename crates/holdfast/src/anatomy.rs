//! What `holdfast volume explain` asks for, and the host's answer: the parts of a volume, from its guests down to devices.

use holdfast_volume::Anatomy;
use serde::{Deserialize, Serialize};

/// Figures without a time are of now; `appended_bytes` counts since the volume was opened.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Parts {
    pub reads_in_flight: u64,
    pub writes_in_flight: u64,
    pub waiting: u64,
    pub map_cache_bytes: u64,
    pub map_cache_bytes_max: u64,
    /// Runs of blocks whose places changed, and are not written down with the map yet.
    #[serde(default)]
    pub map_changes: u64,
    pub log: LogParts,
    pub segments: Vec<SegmentParts>,
    /// Segments that are being written.
    pub jobs: u64,
    pub devices: Vec<DeviceParts>,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LogParts {
    pub entries: u64,
    pub bytes: u64,
    pub bytes_max: u64,
    pub appended_bytes: u64,
    pub completed_lsn: u64,
    pub trimmed_lsn: u64,
    pub ledgers: u64,
    /// The ledger that takes appends, while there is one.
    pub open: Option<LedgerParts>,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LedgerParts {
    pub id: String,
    /// What acknowledges an entry: so many copies, in so many nodes; wherever they are for none.
    pub copies: u8,
    pub nodes: u8,
    pub legs: Vec<LegParts>,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LegParts {
    pub node: u32,
    pub device: String,
    /// `appending`, `standby` or `out`.
    pub state: String,
    /// Of the entries in memory, those that it holds.
    pub entries: u64,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SegmentParts {
    /// `data` or `map`.
    pub kind: String,
    pub layout: String,
    pub segments: u64,
    pub shards: u64,
    pub bytes: u64,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DeviceParts {
    pub node: u32,
    pub device: String,
    pub shards: u64,
    pub bytes: u64,
    pub usable: bool,
}

impl From<Anatomy> for Parts {
    fn from(anatomy: Anatomy) -> Parts {
        let log = anatomy.log;
        let leg = |part: &holdfast_volume::LegParts| LegParts {
            node: part.leg.node.0,
            device: part.leg.device.to_string(),
            state: match (part.is_usable, part.is_preferred) {
                (false, _) => "out",
                (true, true) => "appending",
                (true, false) => "standby",
            }
            .to_string(),
            entries: part.entries,
        };
        let ledger = |(id, rule): (holdfast_base::LedgerId, holdfast_format::ledger::AckRule)| LedgerParts {
            id: id.to_string(),
            copies: rule.copies,
            nodes: rule.domains,
            legs: log.legs.iter().map(leg).collect(),
        };
        let segment = |part: holdfast_volume::SegmentParts| SegmentParts {
            kind: if part.is_data { "data" } else { "map" }.to_string(),
            layout: part.layout.to_string(),
            segments: part.segments,
            shards: part.shards,
            bytes: part.bytes,
        };
        let device = |part: holdfast_volume::DeviceParts| DeviceParts {
            node: part.leg.node.0,
            device: part.leg.device.to_string(),
            shards: part.shards,
            bytes: part.bytes,
            usable: part.is_usable,
        };
        Parts {
            reads_in_flight: anatomy.reads_in_flight,
            writes_in_flight: anatomy.writes_in_flight,
            waiting: anatomy.waiting,
            map_cache_bytes: anatomy.cache.map_bytes,
            map_cache_bytes_max: anatomy.cache.map_bytes_max,
            map_changes: anatomy.cache.changes,
            log: LogParts {
                entries: log.entries,
                bytes: log.bytes,
                bytes_max: log.bytes_max,
                appended_bytes: log.appended_bytes,
                completed_lsn: log.completed.0,
                trimmed_lsn: log.trimmed.0,
                ledgers: log.ledgers,
                open: log.open.map(ledger),
            },
            segments: anatomy.segments.into_iter().map(segment).collect(),
            jobs: anatomy.jobs,
            devices: anatomy.devices.into_iter().map(device).collect(),
        }
    }
}
