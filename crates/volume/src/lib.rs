//! The host-side controller without I/O: single writer of one volume, straight to the nodes.
//!
//! Start reading at [`controller::Controller`].

mod anatomy;
pub mod api;
mod append;
mod apply;
mod basis;
mod bypass;
mod care;
pub mod controller;
mod copies;
mod destage;
mod family;
mod fetch;
pub mod group;
mod handover;
pub mod hold;
mod job;
mod log;
mod map;
mod opening;
mod peers;
mod pressure;
mod read;
mod readahead;
mod resize;
mod roll;
mod root;
mod sealing;
mod segment;
mod snapshots;
mod space;
mod wants;
mod warming;
mod write;

pub use anatomy::{Anatomy, CacheParts, DeviceParts, LegParts, LogParts, SegmentParts};
pub use api::{
    Change, Config, Counters, Effect, Event, Lane, Mutations, Notice, SlowBecause, SpaceUse, State, Status, Target,
    Warming,
};
pub use care::{Shares, Sharing};
pub use controller::Controller;
pub use group::{Group, GroupEffect, GroupEnd, GroupEvent, GroupMember, Why};
pub use map::{CloneInfo, Snapshot};
pub use sealing::Seal;
pub use space::claims::Claim;
pub use space::{DEAD_PER_MILLE_MIN, TierUse, claims, protect, reserve_bytes, spare_bytes};
