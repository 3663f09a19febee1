//! All families of series: their names, and what they say.

use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;
use std::fmt::Write;

/// Series of one name.
pub struct Family {
    /// Without the unit, and without what the kind adds.
    pub name: &'static str,
    pub unit: Option<Unit>,
    pub kind: MetricType,
    pub labels: &'static [&'static str],
    pub help: &'static str,
}

impl Family {
    /// As it stands in the page before labels.
    pub fn full_name(&self) -> String {
        let unit = self.unit.as_ref().map_or(String::new(), |unit| format!("_{}", unit.as_str()));
        let end = match self.kind {
            MetricType::Counter => "_total",
            MetricType::Info => "_info",
            _ => "",
        };
        format!("{}{unit}{end}", self.name)
    }

    /// Names of its series.
    #[cfg(test)]
    pub fn series_names(&self) -> Vec<String> {
        let name = self.full_name();
        match self.kind {
            MetricType::Histogram => ["bucket", "count", "sum"].map(|end| format!("{name}_{end}")).to_vec(),
            _ => vec![name],
        }
    }

    fn kind_text(&self) -> &'static str {
        match self.kind {
            MetricType::Counter => "counter",
            MetricType::Info => "info",
            MetricType::Histogram => "histogram",
            _ => "gauge",
        }
    }
}

macro_rules! unit {
    () => {
        None
    };
    ($unit:ident) => {
        Some(Unit::$unit)
    };
}

macro_rules! families {
    ($($id:ident: $kind:ident $name:literal $($unit:ident)? [$($label:literal),*] $help:literal;)*) => {
        $(pub static $id: Family = Family {
            name: concat!("holdfast_", $name),
            unit: unit!($($unit)?),
            kind: MetricType::$kind,
            labels: &[$($label),*],
            help: $help,
        };)*

        /// In the order of the page.
        pub static ALL: &[&Family] = &[$(&$id),*];
    };
}

families! {
    PART_UP: Gauge "scrape_part_up" ["part"] "1 where this part of the page could be told in time; else its series are missing";
    LEFT_OUT: Gauge "scrape_volumes_left_out" [] "Volumes in service here that have no series of their own on this page";

    BUILD: Info "build" ["version", "grid", "host"] "The release of the host that made this page";
    UPTIME: Gauge "host_uptime" Seconds [] "Time since the host was started";
    CPU: Counter "host_cpu" Seconds [] "CPU time of the host's process";
    PACKING_CPU: Counter "host_packing_cpu" Seconds [] "CPU time for packing blocks, of that of the process";
    PACKING_REFUSED: Counter "host_packing_refused" Bytes [] "Data of guests written as they are for want of CPU time";
    RESIDENT: Gauge "host_resident_memory" Bytes [] "Memory of the host's process";
    LONGEST_TURN: Gauge "host_longest_turn" Seconds [] "Longest time that one event kept a thread, of ten minutes and more";
    CROSSINGS: Counter "host_crossings" [] "Messages between reactors of the host, and looks at what they share";

    FINDINGS: Gauge "findings" ["severity", "concern"] "Things that are not well, as holdfast status tells them";
    METADATA_UP: Gauge "metadata_up" [] "1 where the metadata store answers and is believed";
    METADATA_MEMBERS: Gauge "metadata_members" [] "Members of etcd that the host is told of; 0 where the store is a file";
    UNREADABLE: Gauge "metadata_unreadable_volumes" [] "Volumes whose records this release can't read";
    FOUND: Gauge "metadata_found_volumes" [] "Volumes that a recovery has found, and that nothing opens";
    CERTIFICATE_END: Gauge "certificate_end_timestamp" Seconds ["certificate"] "End of a certificate of this machine, since 1970";

    TASKS: Gauge "tasks" ["kind"] "Things that this host does in the background";
    TASK_LEFT: Gauge "task_left" ["task", "kind", "unit"] "Parts of a task that are still to be done";
    TASK_RATE: Gauge "task_done_per_second" ["task", "kind", "unit"] "Parts of a task done a second in the last half minute";
    TASK_TIME: Gauge "task_left" Seconds ["task", "kind"] "Time that a task still takes at that rate";

    NODES: Gauge "nodes" ["state"] "Nodes of the grid, as this host sees them";
    NODE_UP: Gauge "node_up" ["node", "machine"] "1 where a node takes requests of this host";
    NODE_SILENT: Gauge "node_silent" Seconds ["node"] "Time since a node last answered anything";

    RAW: Gauge "capacity_raw" Bytes [] "Size of all devices";
    USED: Gauge "capacity_used" Bytes [] "Taken of that";
    RESERVE: Gauge "capacity_reserve" Bytes [] "Reserve for cleaning, deleting and metadata, which guests' data leaves free";
    WRITABLE: Gauge "capacity_writable" Bytes [] "Room on devices, with copies and parity; a layout may have less";
    WRITABLE_MAX: Gauge "capacity_writable_max" Bytes [] "The same room if nothing were there";
    FULL_IN: Gauge "capacity_full_in" Seconds [] "Time until devices are full at the rate of the last week; missing while that is unknown";

    DEVICE_INFO: Info "device" ["node", "device", "path", "class"] "A device: where it is, and what it is made of";
    DEVICE_STATE: Gauge "device_state" ["node", "device", "state"] "1 for the state that a device is in";
    DEVICE_CAPACITY: Gauge "device_capacity" Bytes ["node", "device"] "Size of a device";
    DEVICE_USED: Gauge "device_used" Bytes ["node", "device"] "Taken of a device";
    DEVICE_JOURNAL: Gauge "device_journal_used" Bytes ["node", "device"] "Taken of a device's journal";
    DEVICE_JOURNAL_MAX: Gauge "device_journal" Bytes ["node", "device"] "Size of a device's journal";
    DEVICE_SHARDS: Gauge "device_shards" ["node", "device"] "Shards on a device";
    DEVICE_LATENCY: Gauge "device_latency" Seconds ["node", "device", "op", "percentile"] "Most that so many of 100 small ones took";
    DEVICE_ERRORS: Counter "device_io_errors" ["node", "device"] "Operations that ended with an error since the node was started";
    DEVICE_RETRIES: Counter "device_retries" ["node", "device"] "Reads that failed and were tried again since the node was started";
    DEVICE_SLOW: Gauge "device_slow" Seconds ["node", "device"] "Time for which a device has been slower than its peers, or 0";
    DEVICE_OUT: Gauge "device_out" Seconds ["node", "device"] "Time for which a device has been out; 0 where it is not";
    DEVICE_DRAINING: Gauge "device_draining" ["node", "device"] "1 where a device is being emptied";
    DRIVE_FAILING: Gauge "drive_failing" ["node", "device"] "1 where a drive says of itself that it is to be replaced";
    DRIVE_WORN: Gauge "drive_worn" Ratios ["node", "device"] "Share had of the writes that a drive is made for; may exceed 1";
    DRIVE_SPARE: Gauge "drive_spare" Ratios ["node", "device"] "Share that a drive has left of its blocks in reserve";
    DRIVE_CELSIUS: Gauge "drive_temperature" Celsius ["node", "device"] "Temperature of a drive";
    DRIVE_ERRORS: Counter "drive_media_errors" ["node", "device"] "Errors of a drive's media, ever: read in vain, or expected to";
    CACHE_HITS: Counter "read_cache_hits" ["node", "device"] "Reads of slower devices answered from the read cache here";
    CACHE_MISSES: Counter "read_cache_misses" ["node", "device"] "Reads of slower devices that were not";
    CACHE_HELD: Gauge "read_cache_held" Bytes ["node", "device"] "Held by the read cache on a device";

    VOLUMES: Gauge "volumes" ["state"] "Volumes and clones of the grid, as this host sees them";
    SESSIONS: Gauge "sessions" [] "Connections of clients to volumes in service here";
    WAITING: Gauge "volumes_waiting" [] "Volumes that can't be opened yet";
    ORPHANED: Gauge "volumes_orphaned" [] "Volumes whose host is gone, and that nobody serves";
    DELETING: Gauge "volumes_deleting" [] "Deleted volumes whose space is still being returned";
    TRASH: Gauge "trash_volumes" [] "Deleted volumes that can be had back";
    TRASH_TAKEN: Gauge "trash_taken" Bytes [] "Space that these take of devices, as far as it is known";
    DEGRADED_VOLUMES: Gauge "volumes_degraded" [] "Volumes in service here with parts that bear less than they are to";
    AT_RISK_VOLUMES: Gauge "volumes_at_risk" [] "Volumes in service here whose last writes are on fewer devices than they are to be";
    LACKING_VOLUMES: Gauge "volumes_unrecoverable" [] "Volumes in service here that could not be had back without the metadata store";
    DEGRADED: Gauge "degraded_segments" [] "Segments of volumes in service here that bear less than they are to";
    AT_RISK: Gauge "at_risk_log_entries" [] "Entries of logs of volumes in service here that are on fewer devices than they are to be";
    TO_DRAIN: Gauge "left_to_drain_shards" [] "Shards and logs of volumes in service here on devices that are being emptied";
    TO_BALANCE: Gauge "left_to_balance" Bytes [] "Data to be moved to even devices out";
    SEGMENTS: Gauge "segments" [] "Segments of volumes in service here";
    LOG: Gauge "log" Bytes [] "Held by logs of volumes in service here";
    UNPLACED: Gauge "unplaced" Bytes [] "Written by guests, and in no segment yet";
    SPACE: Gauge "space" Bytes ["use"] "Space that segments of volumes in service here take of devices, by use";
    SHOWN: Gauge "space_shown" Bytes [] "Data of volumes in service here as guests see them";
    SAVED: Gauge "space_saved" Bytes [] "Space that packing saves of these, before copies and parity";
    SHARED: Gauge "space_shared" Bytes [] "Data that guests see of segments of another volume, a store's or an origin's";

    READS: Counter "reads" [] "Reads of guests, of volumes in service here";
    READ_BYTES: Counter "read" Bytes [] "Data that guests have read";
    WRITES: Counter "writes" [] "Writes of guests, of volumes in service here";
    WRITE_BYTES: Counter "written" Bytes [] "Data that guests have written";
    APPEND_HEDGES: Counter "append_hedges" [] "Appends to a log that one more device was asked for, as one was late";
    READ_HEDGES: Counter "read_hedges" [] "Reads that another device was asked for, as one was late";
    SHARD_READS: Counter "shard_reads" [] "Reads of shards";
    LOCAL_READS: Counter "local_shard_reads" [] "Reads of shards from nodes of the host's own machine";
    RECONSTRUCTED_READS: Counter "reconstructed_reads" [] "Reads that were made of other shards, as one was away or late";
    AHEAD_BYTES: Counter "read_ahead" Bytes [] "Data that reads took of what had come with other blocks";
    LOG_ROLLS: Counter "log_rolls" [] "Ledgers that were begun on other devices";
    SEGMENTS_WRITTEN: Counter "segments_written" [] "Segments written";
    SEGMENT_WRITTEN_BYTES: Counter "segment_written" Bytes [] "Data of segments written, before copies and parity";
    DIRECT_BYTES: Counter "direct_written" Bytes [] "Large writes of guests that went into segments past the log";
    DESTAGED_BYTES: Counter "destaged" Bytes [] "Data of guests that left the log for segments";
    SEGMENTS_CLEANED: Counter "segments_cleaned" [] "Segments whose living data were written anew";
    CLEANED_BYTES: Counter "cleaned" Bytes [] "Data that cleaning wrote anew";
    REPACKED_BYTES: Counter "repacked" Bytes [] "Data that was written anew only to make it smaller";
    SEGMENTS_FREED: Counter "segments_freed" [] "Segments that nobody needed any more";
    SHARDS_DELETED: Counter "shards_deleted" [] "Shards deleted";
    SHARDS_REBUILT: Counter "shards_rebuilt" [] "Shards made again that were lost";
    SHARDS_MOVED: Counter "shards_moved" [] "Shards moved to other devices";
    SHARDS_MADE_BY_NODES: Counter "shards_made_by_nodes" [] "Shards that nodes made again or moved by themselves";
    CHECKPOINTS: Counter "checkpoints" [] "Checkpoints of maps";
    CHECKPOINT_BYTES: Counter "checkpoint_written" Bytes [] "Data written for checkpoints";
    CHECKSUM_ERRORS: Counter "checksum_errors" [] "Blocks and shards whose checksum was wrong";
    SHARDS_SCRUBBED: Counter "shards_scrubbed" [] "Shards read to see whether they are right";

    REQUEST: Histogram "request" Seconds ["op"] "Times of guests' requests, of all volumes and clones that were in service here";
    REQUEST_STAGE: Histogram "request_stage" Seconds ["op", "stage"] "Times of the same requests in a stage: all count in each";

    VOLUME_INFO: Info "volume" ["volume", "layout", "state", "compression"] "A volume: how it is kept, and how it stands at this host";
    VOLUME_SIZE: Gauge "volume_size" Bytes ["volume"] "Size as guests see it";
    VOLUME_SESSIONS: Gauge "volume_sessions" ["volume"] "Connections of clients";
    VOLUME_READS: Counter "volume_reads" ["volume"] "Reads of guests since it was opened, with those of its clones";
    VOLUME_READ_BYTES: Counter "volume_read" Bytes ["volume"] "Data that guests have read";
    VOLUME_WRITES: Counter "volume_writes" ["volume"] "Writes of guests since it was opened, with those of its clones";
    VOLUME_WRITE_BYTES: Counter "volume_written" Bytes ["volume"] "Data that guests have written";
    VOLUME_RECONSTRUCTED: Counter "volume_reconstructed_reads" ["volume"] "Reads that were made of other shards";
    VOLUME_CHECKSUM_ERRORS: Counter "volume_checksum_errors" ["volume"] "Blocks and shards whose checksum was wrong";
    VOLUME_DEGRADED: Gauge "volume_degraded_segments" ["volume"] "Segments that bear less than they are to";
    VOLUME_AT_RISK: Gauge "volume_at_risk_log_entries" ["volume"] "Entries of its log that are on fewer devices than they are to be";
    VOLUME_LOG: Gauge "volume_log" Bytes ["volume"] "Held by its log";
    VOLUME_UNPLACED: Gauge "volume_unplaced" Bytes ["volume"] "Written by guests, and in no segment yet";
    VOLUME_SPACE: Gauge "volume_space" Bytes ["volume", "use"] "Space that its segments take of devices, by use";
    VOLUME_SHOWN: Gauge "volume_space_shown" Bytes ["volume"] "Data as guests see them";
    VOLUME_RATE: Gauge "volume_requests_per_second" ["volume"] "Requests a second in the last minute or two";
    VOLUME_DEPTH: Gauge "volume_queue_depth" ["volume"] "Requests under way at a time, in the mean of the last minute or two";
    VOLUME_LATENCY: Gauge "volume_latency" Seconds ["volume", "op", "percentile"] "Most that so many of 100 requests took";
    VOLUME_STAGE: Gauge "volume_stage" Seconds ["volume", "op", "stage", "percentile"] "Most that so many of 100 requests took there";
    VOLUME_IN_FLIGHT: Gauge "volume_in_flight" ["volume", "op"] "Requests under way; of the same volumes as stages";
    VOLUME_OLDEST: Gauge "volume_oldest_request" Seconds ["volume", "op"] "Age of the first of these";
    VOLUME_WAITED: Gauge "volume_waited_requests" ["volume", "held_by"] "Requests of the last minutes that waited for their turn";
}

const HEAD: &str = "# Metrics

<!-- Written by `holdfast reference --metrics`: change crates/http/src/metrics/families.rs, then write it anew. -->

Series of `GET /metrics`, of the host that is asked ([monitoring](../operate/monitoring.md)). A name ends in its unit.
Series without the label `volume` are of all volumes in service at that host, or of the whole grid as it sees it.
Percentiles of volumes are of the last minute or two, those of devices of the last seconds. Stages are of the 20
busiest volumes, or of those that are asked for. Histograms are of all requests since the host was started: such a name
has series with `_bucket`, `_count` and `_sum` behind it.

| name | kind | labels | meaning |
| --- | --- | --- | --- |
";

/// The page docs/reference/metrics.md.
pub fn reference() -> String {
    ALL.iter().fold(HEAD.to_string(), |mut table, family| {
        let labels: Vec<String> = family.labels.iter().map(|label| format!("`{label}`")).collect();
        let (name, kind, labels) = (family.full_name(), family.kind_text(), labels.join(", "));
        writeln!(table, "| `{name}` | {kind} | {labels} | {} |", family.help).expect("a text can always be written to");
        table
    })
}
