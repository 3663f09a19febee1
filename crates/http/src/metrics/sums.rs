//! Sums of counters over volumes that are opened and closed.
//!
//! A volume's counters begin anew when it is opened, and are gone when it is closed or served elsewhere. A plain sum would
//! go down then, which a reader takes for a restart of all. So what was added since the last look is summed.

use super::families::{self as f, Family};
use super::volumes::live_of;
use holdfast_api::{Counters, VolumeInfo};
use std::collections::BTreeMap;

/// A family, and the counter that it tells of.
pub type Counted = (&'static Family, fn(&Counters) -> u64);

/// Counters with families of their sums.
pub const COUNTED: [Counted; 27] = [
    (&f::READS, |c| c.reads),
    (&f::READ_BYTES, |c| c.read_bytes),
    (&f::WRITES, |c| c.writes),
    (&f::WRITE_BYTES, |c| c.write_bytes),
    (&f::APPEND_HEDGES, |c| c.append_hedges),
    (&f::READ_HEDGES, |c| c.read_hedges),
    (&f::SHARD_READS, |c| c.shard_reads),
    (&f::LOCAL_READS, |c| c.local_reads),
    (&f::RECONSTRUCTED_READS, |c| c.reconstructed_reads),
    (&f::AHEAD_BYTES, |c| c.ahead_bytes),
    (&f::LOG_ROLLS, |c| c.rolls),
    (&f::SEGMENTS_WRITTEN, |c| c.segments_written),
    (&f::SEGMENT_WRITTEN_BYTES, |c| c.segment_bytes_written),
    (&f::DIRECT_BYTES, |c| c.direct_bytes),
    (&f::DESTAGED_BYTES, |c| c.destaged_bytes),
    (&f::SEGMENTS_CLEANED, |c| c.segments_cleaned),
    (&f::CLEANED_BYTES, |c| c.cleaned_bytes),
    (&f::REPACKED_BYTES, |c| c.repacked_bytes),
    (&f::SEGMENTS_FREED, |c| c.segments_freed),
    (&f::SHARDS_DELETED, |c| c.shards_deleted),
    (&f::SHARDS_REBUILT, |c| c.shards_rebuilt),
    (&f::SHARDS_MOVED, |c| c.shards_moved),
    (&f::SHARDS_MADE_BY_NODES, |c| c.shards_made_by_nodes),
    (&f::CHECKPOINTS, |c| c.checkpoints),
    (&f::CHECKPOINT_BYTES, |c| c.checkpoint_bytes),
    (&f::CHECKSUM_ERRORS, |c| c.checksum_errors),
    (&f::SHARDS_SCRUBBED, |c| c.shards_scrubbed),
];

/// A sum of each.
pub type All = [u64; COUNTED.len()];

#[derive(Default)]
pub struct Sums {
    all: All,
    /// By volume's id: its counters at the last look.
    seen: BTreeMap<String, All>,
}

impl Sums {
    /// Counts what volumes have done since the last look.
    pub fn add(&mut self, volumes: &[VolumeInfo]) {
        let mut seen = BTreeMap::new();
        for volume in volumes {
            let Some(live) = live_of(volume) else { continue };
            let now: All = COUNTED.map(|(_, of)| of(&live.counters));
            let before = self.seen.get(&volume.id).copied().unwrap_or_default();
            // One that was opened anew in between has fewer requests.
            let is_anew = now.iter().zip(&before).any(|(now, before)| now < before);
            for (at, sum) in self.all.iter_mut().enumerate() {
                *sum += if is_anew { now[at] } else { now[at] - before[at] };
            }
            seen.insert(volume.id.clone(), now);
        }
        self.seen = seen;
    }

    pub fn all(&self) -> All {
        self.all
    }
}
