//! What a host is asked and what it answers, typed: requests, resources, states, and error codes that programs go by.
//!
//! Role: between hosts and whatever asks them. Texts of errors are for people, and may change with any release; codes
//! and states stay, and come through a host that passes a request on.
//!
//! Invariant: what a newer release calls otherwise is read as [`Code::Failed`], or as a state's `Other`, never refused;
//! what an older one does not say has a default.

mod bounds;
mod capacity;
mod error;
mod filter;
mod grid;
mod host;
mod node;
mod parts;
mod qos;
mod request;
mod response;
mod role;
mod room;
mod shapes;
mod slow;
mod texts;
mod volume;

pub use bounds::{ANNOUNCED_S_MAX, NAME_BYTES_MAX, SIZE_BYTES_MAX, SIZE_BYTES_MIN, is_name};
pub use capacity::{Capacity, SavedSpace, UsedSpace, WritableSpace};
pub use error::{Code, Error};
pub use filter::{EdgeInfo, FilterInfo, FiltersInfo};
pub use grid::{
    AlertArrival, AlertTrouble, Concern, Finding, GridStatus, Health, HostView, MetadataView, NodeView, Severity,
};
pub use holdfast_format::meta::KeySource;
pub use host::{
    Announcement, HostHealth, HostState, HostStatus, LongTurn, MachineInfo, MachineNode, PackingInfo, TaskInfo,
    TaskKind, TaskUnit, TrashInfo, Unreadable, VolumeNames, Waiting,
};
pub use node::{
    ConfiguredDevice, DeviceHealth, DeviceInfo, DeviceState, LinkState, NodeInfo, NodeState, OutageInfo, ReadCacheInfo,
    free_of, promised_of, takers,
};
pub use parts::{DeviceParts, LedgerParts, LegParts, LegState, LogParts, Parts, SegmentKind, SegmentParts};
pub use qos::{FloorInfo, MeasuredInfo, QosInfo};
pub use request::{ClientsChange, Kind, Request};
pub use response::Response;
pub use role::Role;
pub use room::RoomInfo;
pub use slow::{
    Neighbour, ProcessorInfo, SlowInfo, SlowKind, SlowNode, SlowRequest, SlowStage, UnderWayInfo, VerdictInfo,
};
pub use volume::{
    Counters, FirstTierUse, Integrity, Provisioning, ScheduleInfo, Shares, SnapshotInfo, SpaceUse, Times, VolumeInfo,
    VolumeLive, VolumeSpace, VolumeState, VolumeWork,
};
