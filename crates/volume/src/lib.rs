//! The host-side controller without I/O: single writer of one volume, straight to the nodes.
//!
//! Start reading at [`controller::Controller`].

mod anatomy;
pub mod api;
mod basis;
mod care;
pub mod controller;
mod inspection;
mod io;
mod log;
mod map;
mod owner;
mod peers;
mod rest;
mod segment;
mod sharing;
mod space;
mod turn;
mod wants;

pub use anatomy::{Anatomy, CacheParts, DeviceParts, LegParts, LogParts, SegmentParts};
pub use api::{
    Change, Config, Counters, Effect, Event, Lane, Mutations, Notice, PreloadState, SlowBecause, SpaceUse, State,
    Status, Target,
};
pub use care::{Shares, Sharing};
pub use controller::Controller;
pub use inspection::{Inspection, Question};
pub use io::quiesce;
pub use map::{CloneInfo, Snapshot};
pub use owner::root::FEATURES_SERVED;
pub use segment::encrypt::Encryption;
pub use segment::task::{Task, Worked};
pub use segment::units::{NotPacked, PackedPayload, Way, pack_blocks};
pub use sharing::group::{GROUP_MAX, Group, GroupEffect, GroupEnd, GroupEvent, GroupMember, Why};
pub use space::claims::Claim;
pub use space::{DEAD_PER_MILLE_MIN, TierUse, claims, protect, reserve_bytes, spare_bytes};
pub use turn::Turn;
