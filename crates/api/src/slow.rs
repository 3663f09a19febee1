//! What `holdfast why slow` asks for, and the host's answer: where the time of a volume's requests went of late.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// Of a volume or clone that is in service here, over the last minute or two.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct SlowInfo {
    /// None where there were none.
    pub reads: Option<SlowKind>,
    /// Discards and zeroings are among them.
    pub writes: Option<SlowKind>,
    /// What is not answered yet counts in neither.
    #[serde(default)]
    pub reads_under_way: UnderWayInfo,
    #[serde(default)]
    pub writes_under_way: UnderWayInfo,
    /// What makes them slow, also where none is answered; missing where nothing was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_verdict: Option<VerdictInfo>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_verdict: Option<VerdictInfo>,
    /// Requests of it that had to wait for their turn, and those of them that its own limit held.
    pub waited: u64,
    pub held_by_limit: u64,
    /// Volumes of the host wait for each other, and not for their own limits alone.
    pub has_window: bool,
    /// Other volumes and clones of the host, the busiest first.
    pub others: Vec<Neighbour>,
    /// Of the host's thread that serves it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processor: Option<ProcessorInfo>,
}

/// Requests that have had their turn and are not answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct UnderWayInfo {
    pub count: u64,
    /// Of the first of them.
    pub oldest_us: u64,
}

/// Why requests are slow.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct VerdictInfo {
    /// In a word that stays: `device`, `neighbour`, `limit`.
    pub cause: String,
    /// One sentence, with what to do.
    pub text: String,
}

/// A thread and its processor, in the last minute or two: thousandths of the time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct ProcessorInfo {
    /// It had one.
    pub busy_per_mille: u64,
    /// It could have gone on, and others had all of them.
    pub waited_per_mille: u64,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct SlowKind {
    pub count: u64,
    pub over_ms: u64,
    pub p50_us: u64,
    pub p99_us: u64,
    /// The slowest in a hundred, and all that took about as long.
    pub slow: u64,
    pub stages: Vec<SlowStage>,
    /// Each request is with the node that it waited for longest.
    #[serde(default)]
    pub nodes: Vec<SlowNode>,
    /// The slowest first.
    pub slowest: Vec<SlowRequest>,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct SlowStage {
    pub stage: String,
    /// What a request does there, or waits for.
    pub about: String,
    pub p50_us: u64,
    pub p99_us: u64,
    /// Mean of the slow ones.
    pub slow_us: u64,
    /// Of what the slow ones took beyond the median of all, in thousandths.
    pub slow_per_mille: u64,
}

/// Requests that waited for this node longer than for any other.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct SlowNode {
    pub node: u32,
    pub count: u64,
    /// What all of them waited for it together.
    pub us: u64,
    /// The slow ones among them.
    pub slow: u64,
    pub slow_us: u64,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct SlowRequest {
    pub ago_ms: u64,
    pub took_us: u64,
    /// The node that it waited for longest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<u32>,
    /// Microseconds by stage, without those that took none.
    pub stages: BTreeMap<String, u64>,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Neighbour {
    pub name: String,
    pub per_second: u64,
    /// Requests that it has under way at a time, in the mean, times a hundred.
    pub depth_percent: u64,
    /// Its policy, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
}
